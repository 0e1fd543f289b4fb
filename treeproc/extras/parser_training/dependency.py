"""The learner of Stanza's graph-based dependency parser, from words, characters and tags.

The saved file loads in `stanza.Pipeline(..., depparse_model_path=..., depparse_pretagged=True)`; it reads no lemmas. In use, the
tags come from a tagger. So some training tags are wrong on purpose (`TagNoise`).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stanza.models.common.vocab import ROOT_ID, UNK_ID, VOCAB_PREFIX_SIZE, CharVocab
from stanza.models.depparse.model import GraphParser
from stanza.models.pos.vocab import FeatureVocab, MultiVocab, WordVocab
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from treeproc.extras.parser_training.config import DependencySettings
from treeproc.extras.parser_training.layers import highway, replace_dropout, save_halved, spell, start_words
from treeproc.extras.parser_training.treebank import Sentence
from treeproc.parsers.dependency import DependencyParser, bilinear
from treeproc.parsers.tagger import simplify_marks
from treeproc.parsers.weights import Weights, with_one


def build_vocab(sentences: Sequence[Sentence], word_cutoff: int) -> MultiVocab:
    """Build Stanza's vocabularies without lemmas and features."""
    words = [[(word,) for word in s.words] for s in sentences]
    upos, xpos = ([[(tag or "_",) for tag in getattr(s, name)] for s in sentences] for name in ("upos", "xpos"))
    return MultiVocab(
        {
            "char": CharVocab(words, cutoff=2),
            "word": WordVocab(words, cutoff=word_cutoff, lower=True),
            "upos": WordVocab(upos, ignore=["_"]),
            "xpos": WordVocab(xpos, ignore=["_"]),
            "feats": FeatureVocab([[("_",)]]),
            "lemma": WordVocab([], lower=True),
            "deprel": WordVocab([[(name,) for name in s.deprels] for s in sentences]),
        }
    )


class TagNoise:
    """Tags with the errors of a tagger: the tags of another word with the same last letters, drawn by its frequency."""

    _LETTERS = 3

    def __init__(self, words: Sequence[str], share: float):
        self._share = share
        endings: dict[str, int] = {}
        self._group = np.array([endings.setdefault(word.lower()[-self._LETTERS :], len(endings)) for word in words])
        self._members = np.argsort(self._group, kind="stable")
        self._count = np.bincount(self._group)
        self._start = np.cumsum(self._count) - self._count

    def draw(self, words: np.ndarray) -> np.ndarray:
        """Draw the positions of the words that give the tags, mostly the words themselves. It draws from numpy's state."""
        group = self._group[words]
        other = self._members[self._start[group] + (np.random.random(words.shape) * self._count[group]).astype(np.int64)]
        return np.where(np.random.random(words.shape) < self._share, other, words)


class DependencyLearner:
    """See `treeproc.extras.parser_training.loop.Learner`. The tags of `dev` come from a tagger, as in use."""

    def __init__(
        self,
        train: Sequence[Sentence],
        dev: Sequence[Sentence],
        settings: DependencySettings,
        seed: int,
        unlabelled: Iterable[Sequence[str]] = (),
    ):
        """Take further sentences, `unlabelled`, for the initial word embeddings."""
        self._settings, self._seed, self._dev = settings, seed, dev
        vocab = build_vocab(train, settings.word_cutoff)
        torch.manual_seed(seed)
        self.model = GraphParser(settings.stanza_args(), vocab)
        start_words(self.model.word_emb, vocab["word"], [*(s.words for s in train), *unlabelled], seed)
        replace_dropout(self.model)
        ids: dict[str, int] = {}
        # The columns of all sentences in a row, each with its root.
        self._rows = _with_roots([[ids.setdefault(word, len(ids) + 1) for word in s.words] for s in train], 0)
        known, spelling = word_ids(vocab, list(ids))
        self._known, self._spelled_in = torch.tensor(known), torch.tensor([len(word) for word in spelling])
        self._characters = pad_sequence([torch.tensor(word) for word in spelling], batch_first=True)
        columns = ([vocab[name].map(getattr(s, name)) for s in train] for name in ("upos", "xpos"))
        self._upos, self._xpos = (_with_roots(column, ROOT_ID) for column in columns)
        self._governors = _with_roots([[governor + 1 for governor in s.governors] for s in train], 0)
        relations = [[r - VOCAB_PREFIX_SIZE for r in vocab["deprel"].map(s.deprels)] for s in train]
        self._relations = _with_roots(relations, 0)
        self._sizes = np.array([len(s.words) + 1 for s in train])
        self._begins = np.cumsum(self._sizes) - self._sizes
        # Roots have a separate ending, so their tags stay.
        self._noise = TagNoise([word for s in train for word in ("\0", *s.words)], settings.tag_noise)

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Return batches of indices of sentences of about one length, in random order; in a batch, longest first."""
        random = np.random.default_rng((self._seed, epoch))
        order = np.argsort(-(self._sizes + random.uniform(-2, 2, len(self._sizes))))
        places = np.cumsum(self._sizes[order]) // self._settings.batch_words
        batches = np.split(order, np.flatnonzero(np.diff(places)) + 1)
        batches = [batch[np.argsort(-self._sizes[batch], kind="stable")] for batch in batches]
        return [batches[i] for i in random.permutation(len(batches))]

    def loss(self, batch: np.ndarray) -> Tensor:
        """Return the negative log likelihood of governors and relations per word and root, as Stanza counts."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._settings.precision == "bf16"):
            return self._loss(batch)

    def _loss(self, batch: np.ndarray) -> Tensor:
        model = self.model
        sizes = torch.from_numpy(self._sizes[batch])
        steps = torch.arange(int(sizes[0]))
        is_word = steps < sizes[:, None]  # or the root, the first
        places = (torch.from_numpy(self._begins[batch])[:, None] + steps.clamp(max=sizes[:, None] - 1)).numpy()
        states = self._states(places, sizes)
        governors, relations = torch.from_numpy(self._governors[places]), torch.from_numpy(self._relations[places])
        scores = arc_scores(model, states, is_word)
        is_word[:, 0] = False  # a root has no governor
        loss = F.cross_entropy(scores[is_word], governors[is_word], reduction="sum")
        flat = torch.arange(is_word.numel()).view(is_word.shape)
        above = flat.gather(1, governors)
        named = relation_scores(model, states.flatten(0, 1), flat[is_word], above[is_word])
        loss = loss + F.cross_entropy(named, relations[is_word], reduction="sum")
        return loss / sizes.sum()

    def _states(self, places: np.ndarray, sizes: Tensor) -> Tensor:
        """Return states of the word LSTM [B, L, D] from indices of words."""
        model = self.model
        distinct, rows = torch.from_numpy(self._rows[places]).unique(return_inverse=True)
        embedded = embed(model, self._known[distinct])[rows]
        spelled = spell(model.charmodel, self._characters[distinct], self._spelled_in[distinct], model.drop)
        spelled = model.trans_char(model.drop(spelled))[rows]
        tagged = self._noise.draw(places)
        tags = model.upos_emb(torch.from_numpy(self._upos[tagged])) + model.xpos_emb(torch.from_numpy(self._xpos[tagged]))
        inputs = torch.cat([embedded, tags, spelled], 2)
        inputs = model.drop(model.worddrop(inputs, model.drop_replacement))
        return highway(model.parserlstm, inputs, sizes, model.parserlstm_h_init, model.parserlstm_c_init, model.drop)

    def evaluate(self) -> dict[str, float]:
        """Return attachment scores on dev in percent, with punctuation, relations with their subtypes."""
        self.model.eval()
        tags = [list(zip(s.upos, s.xpos, strict=True)) for s in self._dev]
        parsed = DependencyParser(Weights.of(self.model)).parse([s.words for s in self._dev], tags, 4096)
        arcs = [arc for sentence in parsed for arc in sentence]
        gold = [arc for s in self._dev for arc in zip(s.governors, s.deprels, strict=True)]
        labelled = np.mean([arc == true for arc, true in zip(arcs, gold, strict=True)])
        unlabelled = np.mean([arc[0] == true[0] for arc, true in zip(arcs, gold, strict=True)])
        return {"score": 100 * float(labelled), "las": 100 * float(labelled), "uas": 100 * float(unlabelled)}

    def save(self, path: Path) -> None:
        """Save the model in Stanza's format, weights as float16."""
        config = self.model.args | {"transition_subtree_combination": self.model.args["transition_subtree_combination"].name}
        save_halved(path, self.model, vocab=self.model.vocab.state_dict(), config=config, model_type="graph")


def word_ids(vocab: Any, words: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Return ids of words and of their characters, after those of the root."""
    texts = list(map(simplify_marks, words))
    return [ROOT_ID, *vocab["word"].map(texts)], [[ROOT_ID], *(vocab["char"].map(text) for text in texts)]


def embed(model: Any, known: Tensor) -> Tensor:
    """Return embeddings [words, .] of word ids, with those of the absent lemmas."""
    lemmas = torch.where(known == ROOT_ID, ROOT_ID, UNK_ID)
    return torch.cat([model.word_emb(known), model.lemma_emb(lemmas)], -1)


def arc_scores(model: Any, states: Tensor, is_word: Tensor) -> Tensor:
    """Return [B, L, L] from padded states [B, L, D]: the score of a word (second) with a governor (third).

    It is -inf for a word with itself, and at padding.
    """
    scores = model.unlabeled.scorer(*_sides(model, model.unlabeled, states)).squeeze(3)
    itself = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(itself | ~is_word[:, None], -torch.inf)


def relation_scores(model: Any, states: Tensor, words: Tensor, governors: Tensor) -> Tensor:
    """Return [arcs, R], the scores of relations for arcs between rows of states [N, D]."""
    form = model.deprel.scorer.W_bilin
    left, right = _sides(model, model.deprel, states)
    return bilinear(with_one(left[words]), with_one(right[governors]), form.weight, form.bias)


def _sides(model: Any, scorer: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden layers of a biaffine scorer: words as dependents and as governors."""
    words, governors = scorer.W1(model.drop(states)), scorer.W2(model.drop(states))
    return scorer.dropout(scorer.hidden_func(words)), scorer.dropout(scorer.hidden_func(governors))


def _with_roots(columns: Sequence[Sequence[int]], root: int) -> np.ndarray:
    return np.array([value for column in columns for value in (root, *column)])
