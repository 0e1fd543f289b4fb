"""Stanza's graph-based dependency parser without documents: the same weights, the same arcs.

Words are in packed order (`Packing`). The character LSTM reads every distinct word once per call. Relations are scored only for
the arcs of the tree. If the best governors of all words form a tree, as they mostly do, there is no search.

Shapes: B sentences, L words of the longest with the root, N words and roots of all sentences, D states, R relations.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from treeproc.parsers.lines import Arcs, Tags, longest_first
from treeproc.parsers.tagger import Speller, reads_characters, simplify_marks
from treeproc.parsers.weights import PREFIX_SIZE, ROOT, UNKNOWN, Highway, Packing, Weights, with_one

# Relations of which a word has one at most: Stanza mends others.
_SINGLE = ("nsubj", "csubj", "obj")
_ARCS_AT_ONCE = 128  # the intermediate tensor of this many pairs fits in a cache


def supports(weights: Weights) -> bool:
    """Return whether a Stanza parser is graph-based and reads only words, characters and simple tags."""
    args = weights.args
    return bool(
        {"unlabeled.scorer.W_bilin.weight", "deprel.scorer.W_bilin.weight", "upos_emb.weight", "xpos_emb.weight"}
        <= set(weights.tensors)
        and reads_characters(weights, "parserlstm")
        and not args.get("use_ufeats", True)
        and not args.get("use_arc_embedding")
        and not args["linearization"]
        and not args["distance"]
        and not args.get("reversed")
        and len(weights.vocab["lemma"]) == PREFIX_SIZE
    )


@cache
def _search_of_stanza() -> Callable[[np.ndarray], np.ndarray]:
    """Return Stanza's search for the best tree with one root. Its file needs NumPy alone, but the package loads all of Stanza."""
    name = "chuliu_edmonds"
    folders = getattr(find_spec("stanza"), "submodule_search_locations", None) or [""]
    path = Path(folders[0]) / "models" / "common" / f"{name}.py"
    if not path.is_file():
        return import_module(f"stanza.models.common.{name}").chuliu_edmonds_one_root
    loader = SourceFileLoader(f"{__name__}.{name}", str(path))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module.chuliu_edmonds_one_root


def best_trees(scores: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return governors [B, L] of the best trees with one root, given log probabilities of arcs [B, L, L]; 0 for roots and
    padding.
    """
    governors = scores.argmax(2)
    is_word = np.arange(scores.shape[1]) < sizes[:, None]
    is_word[:, 0] = False
    governors[~is_word] = 0
    above = governors
    for _ in range(int(sizes[0]).bit_length()):
        above = np.take_along_axis(above, above, 1)
    # If the best governors of all words have no cycle and one root, they are the best tree.
    is_tree = (above == 0).all(1) & (((governors == 0) & is_word).sum(1) == 1)
    for i in np.flatnonzero(~is_tree).tolist():
        size = sizes[i]
        governors[i, :size] = _search_of_stanza()(scores[i, :size, :size])
    return governors


def bilinear(words: Tensor, governors: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return [arcs, R], the scores of relations for arcs given as hidden layers [arcs, hidden + 1]."""
    parts = []
    for some, others in zip(words.split(_ARCS_AT_ONCE), governors.split(_ARCS_AT_ONCE), strict=True):
        halfway = (some @ weight.flatten(1)).view(len(some), weight.shape[1], -1)  # [arcs, hidden + 1, R]
        parts.append(torch.bmm(others[:, None], halfway)[:, 0])
    return torch.cat(parts) + bias


class DependencyParser:
    """Arcs of tagged sentences."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._speller, self._lstm = Speller(weights), Highway(weights, "parserlstm")
        # Words with two subjects or two objects are corrected unless the model says otherwise, as in Stanza's pipeline.
        self._mends = weights.args.get("resolve_head_constraints", True)
        self._relations = weights.vocab["deprel"].names[PREFIX_SIZE:]

    @torch.inference_mode()
    def parse(self, sentences: Sequence[Sequence[str]], tags: Sequence[Tags], batch_words: int) -> list[Arcs]:
        """Return (governor, relation) of every word; governors are 0-based, -1 a root.

        A batch pads to at most `batch_words` words.
        """
        vocab = self._weights.vocab
        ids: dict[str, int] = {}
        rows = [[0, *(ids.setdefault(word, len(ids) + 1) for word in sentence)] for sentence in sentences]
        words = self._word_inputs(list(map(simplify_marks, ids)))
        upos, xpos = (
            [[ROOT, *vocab[name].map([tag[column] for tag in sentence])] for sentence in tags]
            for column, name in enumerate(("upos", "xpos"))
        )
        out: list[Arcs] = [[] for _ in rows]
        for batch in longest_first([len(row) for row in rows], batch_words):
            columns = [[column[i] for i in batch] for column in (rows, upos, xpos)]
            for i, arcs in zip(batch, self._parse_batch(words, *columns), strict=True):
                out[i] = arcs
        return out

    def _word_inputs(self, words: list[str]) -> tuple[Tensor, Tensor]:
        """Return embeddings [1 + words, .] of the root and of distinct words, and what their characters say."""
        vocab, tensors = self._weights.vocab, self._weights.tensors
        known = torch.tensor([ROOT, *vocab["word"].map(words)], device=self._weights.device)
        lemmas = torch.where(known == ROOT, ROOT, UNKNOWN)  # no data has lemmas
        spelled = self._speller.spell([[ROOT], *map(vocab["char"].map, words)])
        return torch.cat([tensors["word_emb.weight"][known], tensors["lemma_emb.weight"][lemmas]], 1), spelled

    def _parse_batch(self, words: tuple[Tensor, Tensor], *columns: list[list[int]]) -> list[Arcs]:
        """Parse sentences given as rows and tags with their roots, longest first."""
        tensors, device = self._weights.tensors, words[0].device
        at = Packing.of([len(row) for row in columns[0]])
        rows, upos, xpos = (torch.from_numpy(np.concatenate(column)[at.taken]).to(device) for column in columns)
        tags = tensors["upos_emb.weight"][upos] + tensors["xpos_emb.weight"][xpos]
        states = self._lstm(torch.cat([words[0][rows], tags, words[1][rows]], 1), None, at)
        is_word = torch.from_numpy(np.arange(len(at.batch_sizes)) < at.sizes[:, None]).to(device)
        scores = self._arc_scores(at, states, is_word).log_softmax(2).cpu().numpy()
        governors = best_trees(scores, at.sizes)
        heads = torch.from_numpy(at.before[governors[at.sentence, at.step]] + at.sentence).to(device)
        form = (tensors[f"deprel.scorer.W_bilin.{name}"] for name in ("weight", "bias"))
        relations = bilinear(*self._sides("deprel", states, heads), *form).argmax(1)
        padded = np.zeros(governors.shape, np.int64)
        padded[at.sentence, at.step] = relations.cpu().numpy()
        out = []
        for i, size in enumerate(at.sizes.tolist()):
            tree, named = governors[i, :size], padded[i, 1:size].tolist()
            if self._mends and self._may_be_wrong(tree, named):
                tree, named = self._mend(states, scores[i, :size, :size], tree, named, at.before[:size] + i)
            out.append([(governor - 1, self._relations[r]) for governor, r in zip(tree[1:].tolist(), named, strict=True)])
        return out

    def _sides(self, scorer: str, states: Tensor, governors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the hidden layers of a biaffine scorer [N, hidden + 1]: words as dependents, and as governors or those given."""
        words, heads = (torch.relu(self._weights.linear(f"{scorer}.{side}", states)) for side in ("W1", "W2"))
        return with_one(words), with_one(heads if governors is None else heads[governors])

    def _arc_scores(self, at: Packing, states: Tensor, is_word: Tensor) -> Tensor:
        """Return [B, L, L]: the score of a word (second) with a governor (third); -inf with itself and at padding."""
        tensors = self._weights.tensors
        words, heads = self._sides("unlabeled", states)
        words = words @ tensors["unlabeled.scorer.W_bilin.weight"][:, :, 0]
        scores = at.pad(words) @ at.pad(heads).transpose(1, 2) + tensors["unlabeled.scorer.W_bilin.bias"]
        itself = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device)
        return scores.masked_fill(itself | ~is_word[:, None], -torch.inf)

    def _may_be_wrong(self, tree: np.ndarray, relations: list[int]) -> bool:
        """Return whether a word may have two subjects or two objects; Stanza knows for sure."""
        found = [
            (governor, name.partition(":")[0] == "obj")
            for governor, relation in zip(tree[1:].tolist(), relations, strict=True)
            if (name := self._relations[relation]).partition(":")[0] in _SINGLE
        ]
        return len(set(found)) < len(found)

    def _mend(
        self, states: Tensor, scores: np.ndarray, tree: np.ndarray, relations: list[int], places: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """Apply Stanza's repair of words with two subjects or two objects."""
        from stanza.models.depparse.head_constraints import (
            find_head_constraint_violations,
            resolve_head_constraint_violations,
        )

        if not find_head_constraint_violations(tree, [self._relations[r] for r in relations]):
            return tree, relations
        words, heads = self._sides("deprel", states[torch.from_numpy(places).to(states.device)])
        halfway = torch.einsum("ni,ijr->njr", words, self._weights.tensors["deprel.scorer.W_bilin.weight"])
        scored = torch.einsum("njr,mj->nmr", halfway, heads) + self._weights.tensors["deprel.scorer.W_bilin.bias"]
        names = self._weights.vocab["deprel"]
        return resolve_head_constraint_violations(scores, scored.log_softmax(2).cpu().numpy(), tree, names)
