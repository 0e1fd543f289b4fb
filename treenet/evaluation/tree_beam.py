"""The probability of a sentence under a grammar: word-synchronous beam search over its trees (Stern, Fried and Klein, 2017).

A grammar gives p(sentence, tree). Here p(sentence) is the sum over the trees that a beam finds: a lower bound. A partial tree
competes with those that have as many words, and as many opened and closed nodes since the last word. In each step, the best
`actions` successors are kept. Those that write the next word wait. The best `fast_track` of those that write it, but are not
kept, wait too. What scores below the best `words` that wait is dropped: more actions never raise a score. The step of a word
ends when `actions` partial trees wait, or no other is left. The best `words` go on; after the last word, the best `actions`.

Trees are all that a grammar can write: labels of closing nonterminals match, a node has a word, no node ends within a word. A
tree may have several roots, and words without a node. At most `max_depth` nodes are open, and at most `max_opens` nodes open
between two words. What the model gives to other sequences of actions is lost, as in the scores of given trees. A tree is one
sequence of actions, so the beam finds no tree twice.

Let S(n) be the log of the sum of p(first n pieces, partial tree). At the end of a word, the sum is over the partial trees that go
on; within a word, over those that wait. The nll of piece n is S(n - 1) - S(n), that of the end S(last) - log p(sentence).
Together they are the nll of the sentence. That of a word is an estimate: both sums are lower bounds, of p(the words so far).

Shapes: R partial trees, A next positions of each, S all positions that it reads, K log-probabilities of each, L labels, D model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from treenet.evaluation.kept_scores import KeptScores, SentenceScore
from treenet.evaluation.prefix_trees import ROWS
from treenet.evaluation.settings import TreeBeamConfig
from treenet.layers.backend import scoring
from treenet.layers.relations import StackPast
from treenet.models import CausalLM, VocabSizes
from treenet.models.encoders.causal import GrammarEncoder
from treenet.structure import Actions
from treenet.structure.sequences import COMPOSE, OPEN, PADDING, PIECE, STACK
from treeproc.common.messages import Progress
from treeproc.shards.schema import BOS_ID, EOS_ID

_WORD, _CLOSE = -1, -2  # in `_Partial.actions`; a label opens a node


@dataclass(frozen=True)
class _Partial:
    """A partial tree."""

    score: float = 0.0  # log p(actions)
    actions: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()  # rows of `StackPast` of what is on the stack
    opened: tuple[tuple[int, int], ...] = ()  # place on the stack and label of each open node
    opens: int = 0  # nodes opened since the last word

    @property
    def can_close(self) -> bool:
        """Whether the lowest open node has a word."""
        return bool(self.opened) and self.opened[-1][0] < len(self.stack) - 1


def cut_words(pieces: np.ndarray, words: np.ndarray) -> list[list[int]]:
    """Return the pieces of each word, from the pieces [n] and words [n] of leaves."""
    parts = np.split(pieces, np.flatnonzero(np.diff(words)) + 1) if len(pieces) else []
    return [part.tolist() for part in parts]


def reads_grammar(model: object) -> TypeGuard[CausalLM]:
    """Return whether a model is a grammar, with which `TreeBeam` can search."""
    return isinstance(model, CausalLM) and isinstance(model.encoder, GrammarEncoder)


def spans_of(actions: Sequence[int], labels: Sequence[str]) -> list[tuple[tuple[int, int], str]]:
    """Return the nodes of the tree that actions write, in pre-order: their words [start, end), and their labels."""
    nodes, opened, words = list[tuple[tuple[int, int], str]](), list[int](), 0
    for action in actions:
        if action == _WORD:
            words += 1
        elif action == _CLOSE:
            (start, _), label = nodes[place := opened.pop()]
            nodes[place] = (start, words), label
        else:
            opened.append(len(nodes))
            nodes.append(((words, words), labels[action]))
    return nodes


class TreeBeam:
    """A search with one model. Each sentence is searched alone, so it does not depend on other sentences."""

    def __init__(self, model: CausalLM, sizes: VocabSizes, settings: TreeBeamConfig, kept: KeptScores | None = None):
        assert isinstance(model.encoder, GrammarEncoder)
        self._model, self._encoder, self._settings, self._kept = model, model.encoder, settings, kept
        self._first_open, self._first_close, self._labels = sizes.pieces, sizes.pieces + sizes.labels, sizes.labels
        self._device = model.encoder.embedding.weight.device

    def score_all(self, sentences: Sequence[Sequence[Sequence[int]]]) -> Iterator[SentenceScore]:
        """Yield the scores of sentences, each as `score` takes it."""
        scores = self._kept.score_all(sentences, self.score) if self._kept else map(self.score, sentences)
        with Progress("searching for trees", len(sentences), unit="sentences") as progress:
            for one in scores:
                yield one
                progress.update()

    @torch.no_grad()
    def score(self, words: Sequence[Sequence[int]]) -> SentenceScore:
        """Return the scores of a sentence, given as the pieces of its words."""
        with scoring(self._model):
            return self._score(words)

    def _score(self, words: Sequence[Sequence[int]]) -> SentenceScore:
        empty = self._encoder.embedding.weight.new_zeros(0, *self._heads())
        self._pasts = [StackPast(empty, empty, torch.zeros(0)) for _ in self._encoder.layers]
        live, states = self._write([_Partial()], [BOS_ID])
        sums = [0.0]
        for number, (first, *others) in enumerate(words, start=1):
            most = self._settings.words if number < len(words) else self._settings.actions  # each has one way to its end
            waiting = self._reach(live, states, first, most, is_end=False)
            if others and waiting:
                sums.append(_log_sum(waiting))
                waiting, states = self._write(waiting, [first, *others[:-1]])
                found = self._log_probs(states.flatten(0, 1), np.tile(others, len(waiting))[:, None])
                steps = np.array([one.score for one in waiting])[:, None] + found.reshape(len(waiting), -1).cumsum(1)
                sums += np.logaddexp.reduce(steps, axis=0)[:-1].tolist()
                waiting = [replace(one, score=score) for one, score in zip(waiting, steps[:, -1].tolist(), strict=True)]
            chosen = sorted(waiting, key=lambda one: -one.score)[:most]
            sums.append(_log_sum(chosen))
            if not np.isfinite(sums[-1]):
                return SentenceScore(np.full(1 + sum(map(len, words)), np.nan), 0, np.nan, ())
            live, states = self._write(self._forget_others(chosen), [others[-1] if others else first])
        whole = self._reach(live, states, EOS_ID, self._settings.actions, is_end=True)
        sums.append(_log_sum(whole))
        best = max(whole, key=lambda one: one.score, default=_Partial(np.nan))
        return SentenceScore(-np.diff(sums), len(whole), -best.score, best.actions)

    def _reach(self, live: list[_Partial], states: Tensor, target: int, wanted: int, *, is_end: bool) -> list[_Partial]:
        """Return the partial trees that wait at `target`, the first piece of the next word or EOS. They have not read it yet.

        `wanted` of them will go on. `states` [R, A, D] are of `live`; the last position predicts.
        """
        most, waiting, word = self._settings.actions, list[_Partial](), () if is_end else (_WORD,)
        while True:
            scores = self._successors(live, states[:, -1], target, is_end)
            order = np.argsort(-scores, axis=None, kind="stable")[: int((scores > -np.inf).sum())]
            rows, kinds = np.divmod(order, scores.shape[1])
            kept = np.arange(len(order)) < most
            writes = np.flatnonzero(kinds == 0)
            fast = writes[~kept[writes]][: self._settings.fast_track]
            for place in [*writes[kept[writes]], *fast]:
                one = live[rows[place]]
                waiting.append(replace(one, score=float(scores.flat[order[place]]), actions=(*one.actions, *word)))
            worst = sorted((one.score for one in waiting), reverse=True)[wanted - 1 : wanted] or [-np.inf]
            others = np.flatnonzero(kept & (kinds > 0) & (scores.flat[order] > worst[0]))
            if len(waiting) >= most or not len(others):
                return waiting
            parts = []
            for is_close in (False, True):
                chosen = others[(kinds[others] == 1) == is_close]
                if len(chosen):
                    ones = [replace(live[rows[i]], score=float(scores.flat[order[i]])) for i in chosen]
                    parts.append(self._close(ones) if is_close else self._open(ones, (kinds[chosen] - 2).tolist()))
            live = [one for part, _ in parts for one in part]
            states = torch.cat([found[:, -1:] for _, found in parts])

    def _successors(self, live: Sequence[_Partial], states: Tensor, target: int, is_end: bool) -> np.ndarray:
        """Return the scores [R, 2 + L] of partial trees after `target`, a closed node, and an opened node of each label.

        -inf stands for what is not a tree, or beyond the limits.
        """
        ids = np.empty((len(live), 2 + self._labels), dtype=np.int64)
        ids[:, 0], ids[:, 2:] = target, np.arange(self._first_open, self._first_close)
        ids[:, 1] = [self._first_close + (one.opened[-1][1] if one.opened else 0) for one in live]
        legal = np.ones(ids.shape, dtype=bool)
        legal[:, 0] = [not (is_end and one.opened) for one in live]
        legal[:, 1] = [one.can_close for one in live]
        limits = self._settings
        legal[:, 2:] = [[not is_end and len(one.opened) < limits.max_depth and one.opens < limits.max_opens] for one in live]
        scores = np.array([one.score for one in live])[:, None] + self._log_probs(states, ids)
        return np.where(legal & np.isfinite(scores), scores, -np.inf)

    def _log_probs(self, states: Tensor, ids: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of `ids` [R, K] after states [R, D], float64."""
        parts = zip(states.split(ROWS), torch.from_numpy(ids).to(self._device).split(ROWS), strict=True)
        found = [self._model.compute_logits(x).log_softmax(-1).gather(1, wanted).double() for x, wanted in parts]
        return torch.cat(found).cpu().numpy()

    def _write(self, live: Sequence[_Partial], pieces: Sequence[int]) -> tuple[list[_Partial], Tensor]:
        """Let partial trees read pieces. Returns them and the states [R, A, D] of these positions; so do the next two."""
        rows, states = self._read(live, [PIECE] * len(pieces), [pieces] * len(live))
        return [replace(one, stack=(*one.stack, *new), opens=0) for one, new in zip(live, rows, strict=True)], states

    def _open(self, live: Sequence[_Partial], labels: Sequence[int]) -> tuple[list[_Partial], Tensor]:
        rows, states = self._read(live, [OPEN], [[self._first_open + label] for label in labels])
        return [
            replace(
                one,
                actions=(*one.actions, label),
                stack=(*one.stack, *new),
                opened=(*one.opened, (len(one.stack), label)),
                opens=one.opens + 1,
            )
            for one, new, label in zip(live, rows, labels, strict=True)
        ], states

    def _close(self, live: Sequence[_Partial]) -> tuple[list[_Partial], Tensor]:
        rows, states = self._read(live, [COMPOSE, STACK], [[self._first_close + one.opened[-1][1]] * 2 for one in live])
        return [
            replace(
                one,
                actions=(*one.actions, _CLOSE),
                stack=(*one.stack[: one.opened[-1][0]], new[0]),
                opened=one.opened[:-1],
            )
            for one, new in zip(live, rows, strict=True)
        ], states

    def _read(
        self, live: Sequence[_Partial], kinds: Sequence[int], ids: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], Tensor]:
        """Return rows of the pasts, and states [R, A, D], of next positions of partial trees, by `kinds` [A] and `ids` [R, A].

        The mask and the differences of depth are those of the training, of a sequence of what is on the stack, padding, and the
        next positions.
        """
        most, count = max(len(one.stack) for one in live), len(kinds)
        kind, depth, leaves, rows = np.zeros((4, len(live), most + count), dtype=np.int64)
        kind[:], kind[:, most:] = PADDING, kinds
        leaves[:], leaves[:, most:] = -1, most + count
        rows[:, most:] = len(self._pasts[0].keys) + np.arange(len(live) * count).reshape(len(live), count)
        for r, one in enumerate(live):
            opened, place = [place for place, _ in one.opened], np.arange(len(one.stack))
            rows[r, place], kind[r, place], leaves[r, place] = one.stack, PIECE, most + count
            depth[r, place] = np.searchsorted(opened, place) + (place > 0)
            depth[r, most:] = len(opened) + bool(one.stack)
            if kinds[0] == COMPOSE:
                leaves[r, opened[-1] : len(place)] = most
                depth[r, most:] -= 1
        to_device = [torch.from_numpy(x).to(self._device) for x in (kind, depth, leaves, rows, np.array(ids))]
        kinds_there, depths, leaving, places, next_ids = to_device
        for past in self._pasts:
            past.rows = places
        actions = Actions(kinds_there, torch.zeros_like(kinds_there), depths, leaving)  # symbols do not matter here
        return rows[:, most:].tolist(), self._encoder.extend(next_ids, actions, self._pasts)

    def _forget_others(self, live: Sequence[_Partial]) -> list[_Partial]:
        """Keep only the positions that are on a stack of `live`."""
        kept = sorted({row for one in live for row in one.stack})
        place = {row: number for number, row in enumerate(kept)}
        chosen = torch.tensor(kept, device=self._device)
        for past in self._pasts:
            past.keys, past.values = past.keys[chosen], past.values[chosen]
        return [replace(one, stack=tuple(place[row] for row in one.stack)) for one in live]

    def _heads(self) -> tuple[int, int]:
        heads = self._encoder.layers[0].self_attention.num_heads
        return heads, self._encoder.d_model // heads


def _log_sum(ones: Sequence[_Partial]) -> float:
    return float(np.logaddexp.reduce([one.score for one in ones], initial=-np.inf))
