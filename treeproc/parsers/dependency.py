"""Stanza's graph-based dependency parser without documents: the same weights, the same arcs.

Words are in packed order (`Packing`). The character LSTM reads every distinct word once per call. Relations are scored only for
the arcs of the tree. If the best governors of all words form a tree, as they mostly do, there is no search.

Shapes: B sentences, L words of the longest with the root, N words and roots of all sentences, D states, R relations.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from treeproc.parsers.lines import Arcs, Tags, longest_first
from treeproc.parsers.tagger import Packing, spell

_ARCS_AT_ONCE = 128  # the intermediate tensor of this many pairs fits in a cache


def supports(model: nn.Module) -> bool:
    """Return whether a Stanza parser is graph-based and reads only words, characters and simple tags."""
    from stanza.models.common.vocab import VOCAB_PREFIX_SIZE, CompositeVocab
    from stanza.models.depparse.model import GraphParser

    if not isinstance(model, GraphParser):
        return False
    args = model.args
    return (
        args["word_emb_dim"] > 0
        and args["tag_emb_dim"] > 0
        and args.get("use_upos", True)
        and args.get("use_xpos", True)
        and not args.get("use_ufeats", True)
        and not args["pretrain"]
        and bool(args["char"])
        and args["char_emb_dim"] > 0
        and not args.get("charlm")
        and model.bert_model is None
        and not args.get("use_arc_embedding")
        and not args["linearization"]
        and not args["distance"]
        and not args.get("reversed")
        and not isinstance(model.vocab["xpos"], CompositeVocab)
        and len(model.vocab["lemma"]) == VOCAB_PREFIX_SIZE
    )


def word_ids(vocab, words: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Return ids of words and of their characters, after those of the root."""
    from stanza.models.common.utils import simplify_punct
    from stanza.models.common.vocab import ROOT_ID

    texts = [word for ((word,),) in simplify_punct([[[word]] for word in words])]
    return [ROOT_ID, *vocab["word"].map(texts)], [[ROOT_ID], *(vocab["char"].map(text) for text in texts)]


def embed(model: nn.Module, known: Tensor) -> Tensor:
    """Return embeddings [words, .] of word ids, with those of the absent lemmas."""
    from stanza.models.common.vocab import ROOT_ID, UNK_ID

    lemmas = torch.where(known == ROOT_ID, ROOT_ID, UNK_ID)
    return torch.cat([model.word_emb(known), model.lemma_emb(lemmas)], -1)


def arc_scores(model: nn.Module, states: Tensor, is_word: Tensor) -> Tensor:
    """Return [B, L, L] from padded states [B, L, D]: the score of a word (second) with a governor (third).

    It is -inf for a word with itself, and at padding.
    """
    scores = model.unlabeled.scorer(*_sides(model, model.unlabeled, states)).squeeze(3)
    itself = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(itself | ~is_word[:, None], -torch.inf)


def relation_scores(model: nn.Module, states: Tensor, words: Tensor, governors: Tensor) -> Tensor:
    """Return [arcs, R], the scores of relations for arcs between rows of states [N, D]."""
    form = model.deprel.scorer.W_bilin
    left, right = _sides(model, model.deprel, states)
    left, right = (torch.cat([side, side.new_ones(len(side), 1)], 1) for side in (left[words], right[governors]))
    parts = []
    for some, others in zip(left.split(_ARCS_AT_ONCE), right.split(_ARCS_AT_ONCE), strict=True):
        halfway = (some @ form.weight.flatten(1)).view(len(some), form.weight.shape[1], -1)  # [arcs, hidden + 1, R]
        parts.append(torch.bmm(others[:, None], halfway)[:, 0])
    return torch.cat(parts) + form.bias


def _sides(model: nn.Module, scorer: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden layers of a biaffine scorer: words as dependents and as governors."""
    words, governors = scorer.W1(model.drop(states)), scorer.W2(model.drop(states))
    return scorer.dropout(scorer.hidden_func(words)), scorer.dropout(scorer.hidden_func(governors))


def best_trees(scores: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return governors [B, L] of the best trees with one root, given log probabilities of arcs [B, L, L]; 0 for roots and
    padding.
    """
    from stanza.models.common.chuliu_edmonds import chuliu_edmonds_one_root

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
        governors[i, :size] = chuliu_edmonds_one_root(scores[i, :size, :size])
    return governors


class DependencyParser:
    """Arcs of tagged sentences."""

    def __init__(self, model: nn.Module):
        from stanza.models.common.vocab import VOCAB_PREFIX_SIZE

        self._model = model
        # Words with two subjects or two objects are corrected unless the model says otherwise, as in Stanza's pipeline.
        self._mends = model.args.get("resolve_head_constraints", True)
        names = model.vocab["deprel"]
        self._relations = [names.id2unit(i) for i in range(VOCAB_PREFIX_SIZE, len(names))]

    @torch.inference_mode()
    def parse(self, sentences: Sequence[Sequence[str]], tags: Sequence[Tags], batch_words: int) -> list[Arcs]:
        """Return (governor, relation) of every word; governors are 0-based, -1 a root.

        A batch pads to at most `batch_words` words.
        """
        from stanza.models.common.vocab import ROOT_ID

        model = self._model
        ids: dict[str, int] = {}
        rows = [[0, *(ids.setdefault(word, len(ids) + 1) for word in sentence)] for sentence in sentences]
        known, spelling = word_ids(model.vocab, list(ids))
        embedded = embed(model, torch.tensor(known, device=model.drop_replacement.device))
        words = (embedded, spell(model, spelling))
        upos, xpos = (
            [[ROOT_ID, *model.vocab[name].map([tag[column] for tag in sentence])] for sentence in tags]
            for column, name in enumerate(("upos", "xpos"))
        )
        out: list[Arcs] = [[] for _ in rows]
        for batch in longest_first([len(row) for row in rows], batch_words):
            columns = [[column[i] for i in batch] for column in (rows, upos, xpos)]
            for i, arcs in zip(batch, self._parse_batch(words, *columns), strict=True):
                out[i] = arcs
        return out

    def _parse_batch(self, words: tuple[Tensor, Tensor], *columns: list[list[int]]) -> list[Arcs]:
        """Parse sentences given as rows and tags with their roots, longest first."""
        model, device = self._model, words[0].device
        at = Packing.of([len(row) for row in columns[0]])
        rows, upos, xpos = (torch.from_numpy(np.concatenate(column)[at.taken]).to(device) for column in columns)
        tags = model.upos_emb(upos) + model.xpos_emb(xpos)
        inputs = PackedSequence(torch.cat([words[0][rows], tags, words[1][rows]], 1), torch.from_numpy(at.batch_sizes))
        first = [p.expand(-1, len(at.sizes), -1).contiguous() for p in (model.parserlstm_h_init, model.parserlstm_c_init)]
        states = model.parserlstm(inputs, at.sizes.tolist(), hx=tuple(first))[0].data
        is_word = torch.from_numpy(np.arange(len(at.batch_sizes)) < at.sizes[:, None]).to(device)
        scores = arc_scores(model, at.pad(states), is_word).log_softmax(2).cpu().numpy()
        governors = best_trees(scores, at.sizes)
        heads = torch.from_numpy(at.before[governors[at.sentence, at.step]] + at.sentence).to(device)
        relations = relation_scores(model, states, torch.arange(len(states), device=device), heads).argmax(1)
        padded = np.zeros(governors.shape, np.int64)
        padded[at.sentence, at.step] = relations.cpu().numpy()
        out = []
        for i, size in enumerate(at.sizes.tolist()):
            tree, named = governors[i, :size], padded[i, 1:size].tolist()
            if self._mends:
                tree, named = self._mend(states, scores[i, :size, :size], tree, named, at.before[:size] + i)
            out.append([(governor - 1, self._relations[r]) for governor, r in zip(tree[1:].tolist(), named, strict=True)])
        return out

    def _mend(self, states: Tensor, scores: np.ndarray, tree: np.ndarray, relations: list[int], places: np.ndarray):
        """Apply Stanza's repair of words with two subjects or two objects."""
        from stanza.models.depparse.head_constraints import (
            find_head_constraint_violations,
            resolve_head_constraint_violations,
        )

        if not find_head_constraint_violations(tree, [self._relations[r] for r in relations]):
            return tree, relations
        own = states[torch.from_numpy(places).to(states.device)][None]
        of_all_arcs = self._model.deprel(own, own)[0].log_softmax(2).cpu().numpy()
        return resolve_head_constraint_violations(scores, of_all_arcs, tree, self._model.vocab["deprel"])
