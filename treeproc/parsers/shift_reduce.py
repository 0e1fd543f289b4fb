"""Stanza's in-order shift-reduce parser, run on arrays instead of objects: the same weights, the same transitions.

Stanza keeps one Python object per stack entry and loops over sentences in every step. Here, a batch of sentences is one set of
arrays. A finished sentence gives its slot to the next one, so the batch stays full.

Shapes: R running sentences, S slots, E stack entries of a slot, H hidden size, W words of the call, A transitions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from treeproc.parsers.lines import batches
from treeproc.parsers.weights import ACTIVATIONS, CLOSE, OPEN, SHIFT, UNKNOWN, ConstituencyModel, Direction, Layer, Packing, step
from treeproc.shards.rows import edges_of
from treeproc.trees.spans import SpanTree

_EXTRA_OPENS = 10  # as in Stanza: at most this many more open nodes than words
_WORDS_PER_SLOT = 32  # of a batch; a slot holds a running sentence
Tagged = Sequence[tuple[str, str]]  # words and tags of a sentence
_STEPS_PER_WORD = 20  # as in Stanza: a sentence with more transitions "went infinite"


class _Cell:
    """Two stacked LSTM layers, one step. The states of both layers are side by side: h, c [R, 2H]; see `step` for their form."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str):
        lower, upper = (Direction(tensors, prefix, f"l{layer}") for layer in (0, 1))
        self.size = lower.size
        self.input_weight, self.input_bias, self.recurrent = lower.inputs, lower.bias, lower.states
        self.upper = torch.cat([2 * upper.inputs, upper.states])
        self.upper_bias = upper.bias

    def project(self, inputs: Tensor) -> Tensor:
        """Compute the part of the lower gates that needs only the input: [R, input] -> [R, 4H]."""
        return torch.addmm(self.input_bias, inputs, self.input_weight)

    def step(self, projected: Tensor, h: Tensor, c: Tensor) -> None:
        """Update h and c in place. Overwrites `projected`."""
        size = self.size
        step(projected.addmm_(h[:, :size], self.recurrent), c[:, :size], h[:, :size])
        step(torch.addmm(self.upper_bias, h, self.upper), c[:, size:], h[:, size:])

    def first(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c [2H] after a first input."""
        h, c = (self.upper_bias.new_zeros(1, 2 * self.size) for _ in range(2))
        self.step(self.project(inputs[None]), h, c)
        return h[0], c[0]


@dataclass
class _WordVectors:
    """The input vectors of the parser: all words of the call, then the open labels, in one table."""

    hidden: Tensor  # [W + labels, H]: the vector that a shift or an open puts on the stack
    projected: Tensor  # [W + labels, 4H]: the same, as input of the stack's LSTM
    ahead: Tensor  # [W, output]: the part of the next word in the first output layer
    start: np.ndarray  # row of the first word of every sentence; the row after its last word marks its end
    lengths: np.ndarray


@dataclass(frozen=True)
class Derivation:
    """The transitions of a sentence, and what they make."""

    tree: SpanTree | None  # None if they do not end in a root over all words
    actions: np.ndarray
    score: float  # mean log-probability of a transition among the legal ones


class ShiftReduceParser:
    """Trees of tagged sentences."""

    def __init__(self, model: ConstituencyModel):
        self.model = model
        self._kind = np.array([kind for kind, _ in model.transitions])
        self._labels = [labels for _, labels in model.transitions]
        places = {names: place for place, names in enumerate(model.opens)}
        self._open_row = np.array([places[names] if names else 0 for names in self._labels])
        self._open_size = np.array([len(names) for names in self._labels])
        self._is_root = np.array([bool(names) and names[0] in model.root_labels for names in self._labels])
        # Column of each transition in the table of legal ones.
        self._column = np.select([self._kind == SHIFT, self._kind == CLOSE, self._is_root], [0, 1, 2], 3)
        self._chain_limit = model.unary_limit + 1
        self._word_rows = {word: row for row, word in enumerate(model.words, start=2)}
        self._tag_rows = {tag: row for row, tag in enumerate(model.tags, start=2)}
        with torch.inference_mode():
            self._load(model.tensors, model.args)

    def _load(self, tensors: Mapping[str, Tensor], args: Mapping[str, Any]) -> None:
        self._device = tensors["word_zeros"].device
        self._column_index = torch.from_numpy(self._column).to(self._device)
        count = sum(name.startswith("word_lstm.weight_ih") and not name.endswith("_reverse") for name in tensors)
        self._words = [Layer(tensors, "word_lstm.", layer) for layer in range(count)]
        self._constituents, self._history = (_Cell(tensors, f"{name}_stack.lstm.") for name in ("constituent", "transition"))
        self._history_inputs = self._history.project(tensors["transition_embedding.weight"])
        self._first_constituent = self._constituents.first(tensors["constituent_stack.start_embedding"])
        self._first_history = self._history.first(tensors["transition_stack.start_embedding"])
        self._dummies = tensors["dummy_embedding.weight"]
        self._activate = ACTIVATIONS[args["nonlinearity"]]
        self._reduce = tensors["reduce_linear.weight"].T.contiguous(), tensors["reduce_linear.bias"]
        sizes = [args["hidden_size"], args["transition_hidden_size"], args["hidden_size"]]
        word, history, constituent = tensors["output_layers.0.weight"].split(sizes, dim=1)
        self._out_word, self._out_history = word.T.contiguous(), history.T.contiguous()
        self._out_constituent, self._out_bias = constituent.T.contiguous(), tensors["output_layers.0.bias"]
        layers = sum(name.startswith("output_layers.") and name.endswith(".weight") for name in tensors)
        self._out_rest = [[tensors[f"output_layers.{i}.{part}"] for part in ("weight", "bias")] for i in range(1, layers)]

    def parse(self, sentences: Sequence[Tagged], batch_words: int) -> list[SpanTree | None]:
        """Return one tree per sentence of (word, tag); None if the parser finds no end.

        It reads at most `batch_words` words at once. The number of running sentences is at most a 32nd of that.
        """
        return [found.tree for found in self.derive(sentences, batch_words)]

    @torch.inference_mode()
    def derive(
        self,
        sentences: Sequence[Tagged],
        batch_words: int,
        *,
        scored: bool = False,
        given: Sequence[np.ndarray] | None = None,
    ) -> list[Derivation]:
        """Return the derivation of every sentence; if `scored`, with its score. `given` are transitions to take instead."""
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        out: dict[int, Derivation] = {}
        for batch in batches([len(sentences[i]) for i in order], batch_words):
            chunk = [order[k] for k in batch]
            own = None if given is None else _Given([given[i] for i in chunk])
            found = self._derive_chunk([sentences[i] for i in chunk], max(1, batch_words // _WORDS_PER_SLOT), scored, own)
            out.update(zip(chunk, found, strict=True))
        return [out[i] for i in range(len(sentences))]

    def _derive_chunk(self, sentences: list, slots: int, scored: bool, given: "_Given | None") -> list[Derivation]:
        lengths = np.array([len(s) for s in sentences])
        states = self._word_states(sentences)
        rows, actions, log_probs = self._run(self._tables(states, lengths), slots, scored, given)
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows, minlength=len(sentences))
        parts = np.split(actions[order], np.cumsum(counts)[:-1])
        scores = np.bincount(rows, log_probs, len(sentences)) / counts if scored else np.zeros(len(sentences))
        trees = [self._tree(part.tolist(), n) for part, n in zip(parts, lengths.tolist(), strict=True)]
        return [Derivation(*found) for found in zip(trees, parts, scores.tolist(), strict=True)]

    def _tree(self, actions: list[int], length: int) -> SpanTree | None:
        """Return the nodes that the transitions close, in pre-order; None unless they end in one root over all words."""
        kinds, labels = self._kind.tolist(), self._labels
        begins, opened, position = [], [], 0
        closed: list[tuple[int, int, int, str]] = []
        for action in actions:
            kind = kinds[action]
            if kind == SHIFT:
                begins.append(position)
                position += 1
            elif kind == OPEN:
                opened.append((len(begins), action))
            else:
                height, opening = opened.pop()
                del begins[height:]
                start = begins[-1]
                closed += [(start, -position, -len(closed) - k, label) for k, label in enumerate(reversed(labels[opening]))]
        if not closed or closed[-1][:2] != (0, -length) or closed[-1][3] not in self.model.root_labels or opened:
            return None
        closed.sort()
        return SpanTree([node[3] for node in closed], [node[0] for node in closed], [-node[1] for node in closed])

    def _word_states(self, sentences: list) -> Tensor:
        """Return states of words with a bookend before and after: [W + 2 sentences, H], sentence after sentence."""
        if self.model.is_plain:
            return self._plain_word_states(sentences)
        from stanza.models.constituency.parse_tree import Tree

        trees = [[Tree(tag, Tree(word)) for word, tag in sentence] for sentence in sentences]
        return torch.stack([node.hx for queue in self.model.stanza.initial_word_queues(trees) for node in queue])

    def _plain_word_states(self, sentences: list) -> Tensor:
        model, tensors = self.model, self.model.tensors
        pairs: dict[tuple[str, str], int] = {}
        rows = np.concatenate([[0, *(pairs.setdefault(pair, len(pairs) + 2) for pair in sentence), 1] for sentence in sentences])
        ids = []
        for word, tag in pairs:
            text = word.replace(" ", "\xa0")
            known = model.vectors.id_of(text)
            known = known if known != UNKNOWN else model.vectors.id_of(text.lower())
            ids.append((known, self._word_rows.get(word, 1), self._tag_rows.get(tag, 1)))
        known, delta, tag = torch.tensor(ids, device=self._device).T
        own = tensors["delta_embedding.weight"][delta], tensors["tag_embedding.weight"][tag]
        unique = torch.cat([model.vector_table[known], *own], 1)
        states = torch.cat([tensors["word_start_embedding"][None], tensors["word_end_embedding"][None], unique])
        # Sentences are ordered longest first.
        at = Packing.of([len(s) + 2 for s in sentences])
        packed: Tensor | None = torch.from_numpy(rows[at.taken]).to(self._device)
        for layer in self._words:
            states, packed = layer(states, packed, at), None
        hidden = self._activate(linear(states, tensors["word_to_constituent.weight"], tensors["word_to_constituent.bias"]))
        return torch.empty_like(hidden).index_copy_(0, torch.from_numpy(at.taken).to(self._device), hidden)

    def _tables(self, states: Tensor, lengths: np.ndarray) -> _WordVectors:
        begins = np.cumsum(lengths + 2) - lengths - 2
        hidden = torch.cat([states, self._dummies])
        share = torch.addmm(self._out_bias, self._activate(states), self._out_word)
        return _WordVectors(hidden, self._constituents.project(hidden), share, begins + 1, lengths)

    def _run(
        self, words: _WordVectors, slots: int, scored: bool, given: "_Given | None"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sentence, transition and, if `scored`, its log-probability, of every step in order of time."""
        work = _Work(self, words, min(slots, len(words.lengths)))
        steps = []
        while len(work.sentence):
            legal = work.legal(self._chain_limit)
            logits = work.logits().masked_fill_(~legal[:, self._column_index], -torch.inf)
            chosen = logits.argmax(1) if given is None else given.at(work).to(logits.device)
            actions = chosen.cpu().numpy()
            # Without a legal transition Stanza stops too. `_tree` notices that the root is missing.
            stuck = ~legal.any(1).cpu().numpy()
            # 1 / p of the transition, which is precise also for p close to 1.
            inverse = logits.sub_(logits.gather(1, chosen[:, None])).exp_().sum(1).cpu().numpy() if scored else actions
            steps.append((work.sentence[~stuck], actions[~stuck], inverse[~stuck]))
            roots = work.apply(actions)
            work.replace(roots | stuck | work.too_long())
        rows, actions, inverse = map(np.concatenate, zip(*steps, strict=True))
        return rows, actions, -np.log(inverse.astype(np.float64)) if scored else inverse


class _Given:
    """Transitions to take, one array for each sentence."""

    def __init__(self, actions: Sequence[np.ndarray]):
        self._flat = np.concatenate(actions)
        self._first = edges_of([len(one) for one in actions])[:-1]

    def at(self, work: "_Work") -> Tensor:
        """Return the next transition of the running sentences [R]."""
        return torch.from_numpy(self._flat[self._first[work.sentence] + work.steps])


class _Work:
    """The running sentences and their stacks. Entry e of slot s is row s * E + e; entry 0 is the bottom."""

    def __init__(self, parser: ShiftReduceParser, words: _WordVectors, slots: int):
        self._parser, self._words = parser, words
        self._next, self._entries = slots, 32
        self._device = words.hidden.device
        size = parser._constituents.size
        rows = slots * self._entries
        # h and c of both layers, the vector of the entry, and the maximum of it and its siblings to the left.
        self._h, self._c = (first.repeat(rows, 1) for first in parser._first_constituent)
        self._tree = words.hidden.new_zeros(rows, size)
        self._siblings = words.hidden.new_zeros(rows, size)
        self._chain = np.zeros(rows, np.int64)  # nodes with a single child in a row, from the entry downwards
        # Entry and transition of the open nodes of a slot, outermost first.
        self._opens, self._opened = (np.zeros((slots, self._entries), np.int64) for _ in range(2))
        self._top_h = self._h[:slots].clone()
        self._history = [first.repeat(slots, 1) for first in parser._first_history]
        self.sentence = np.arange(slots)
        self._slot = np.arange(slots)
        self._position, self._depth, self._open_count, self.steps = (np.zeros(slots, np.int64) for _ in range(4))
        self._after_open = np.zeros(slots, bool)

    def _rows(self, depth: np.ndarray) -> np.ndarray:
        return self._slot * self._entries + depth

    def _index(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

    def legal(self, chain_limit: int) -> Tensor:
        """Return [R, 4]: whether shift, close, open a root, open another node are legal by Stanza's in-order scheme."""
        length = self._words.lengths[self.sentence]
        no_words, opens, top = self._position == length, self._open_count, self._rows(self._depth)
        long_chain = self._chain[top] >= chain_limit
        long_below = self._chain[top - (self._depth > 0)] >= chain_limit
        table = np.empty((len(length), 4), bool)
        table[:, 0] = ~no_words & ((opens > 0) | (self._depth == 0))
        table[:, 1] = (opens > 0) & (~self._after_open | (opens > 1) | no_words | ~long_below)
        may_open = (opens <= length + _EXTRA_OPENS) & (self._depth > 0) & ~self._after_open
        table[:, 2] = may_open & (opens == 0) & no_words
        table[:, 3] = may_open & ~(((opens > 0) | no_words) & long_chain)
        return torch.from_numpy(table).to(self._device)

    def logits(self) -> Tensor:
        """Return scores of the transitions [R, A]."""
        parser, words = self._parser, self._words
        out = words.ahead[self._index(words.start[self.sentence] + self._position)]
        size = parser._constituents.size
        # States are halves.
        out.addmm_(parser._activate(2 * self._top_h[:, size:]), parser._out_constituent)
        out.addmm_(parser._activate(2 * self._history[0][:, parser._history.size :]), parser._out_history)
        for weight, bias in parser._out_rest:
            out = linear(parser._activate(out), weight, bias)
        return out

    def apply(self, actions: np.ndarray) -> np.ndarray:
        """Take one transition in every sentence. Returns which sentences are finished."""
        parser, words = self._parser, self._words
        kind = parser._kind[actions]
        shift, close = kind == SHIFT, kind == CLOSE
        opens = kind == OPEN
        top = self._rows(self._depth)
        first_open = self._opens[self._slot, np.maximum(self._open_count - 1, 0)]
        new_depth = np.where(close, first_open - 1, self._depth + 1)
        if new_depth.max() >= self._entries:
            self._grow()
            top = self._rows(self._depth)
        row = self._rows(new_depth)
        # Words and open labels come from the table, closed nodes from the maximum over their children.
        of_words = np.where(shift, words.start[self.sentence] + self._position, 0)
        source = self._index(np.where(opens, len(words.ahead) + parser._open_row[actions], of_words))
        entry, projected = words.hidden[source], words.projected[source]
        closing = np.flatnonzero(close)
        if len(closing):
            nodes = self._index(closing)
            weight, bias = parser._reduce
            node = parser._activate(torch.addmm(bias, self._siblings[self._index(top[closing])], weight))
            entry[nodes] = node
            projected[nodes] = parser._constituents.project(node)
        below = self._index(row - 1)
        h, c = self._h[below], self._c[below]
        parser._constituents.step(projected, h, c)
        target = self._index(row)
        self._h[target], self._c[target], self._tree[target] = h, c, entry
        # The left child of a new open node is the entry below it; an entry joins the siblings below it.
        group = torch.maximum(self._siblings[below], entry)
        if opens.any():
            at = np.flatnonzero(opens)
            group[self._index(at)] = self._tree[self._index(row[at] - 1)]
        self._siblings[target] = group
        self._top_h = h

        parser._history.step(parser._history_inputs[self._index(actions)], *self._history)

        opening = self._opened[self._slot, np.maximum(self._open_count - 1, 0)]
        names = parser._open_size[opening]
        single = np.where(self._depth == first_open, self._chain[row] + names, names - 1)
        self._chain[row] = np.where(close, single, shift)
        at = np.flatnonzero(opens)
        self._opens[self._slot[at], self._open_count[at]] = new_depth[at]
        self._opened[self._slot[at], self._open_count[at]] = actions[at]
        finished = close & parser._is_root[opening] & (new_depth == 1) & (self._position == words.lengths[self.sentence])
        self._position += shift
        self._open_count += opens.astype(np.int64) - close
        self._depth, self._after_open = new_depth, opens
        self.steps += 1
        return finished

    def too_long(self) -> np.ndarray:
        """Return the sentences with so many transitions that Stanza calls them infinite."""
        return self.steps >= (self._words.lengths[self.sentence] + 2) * _STEPS_PER_WORD

    def replace(self, done: np.ndarray) -> None:
        """Give the slots of finished sentences to the next ones. If there are none, continue with the rest."""
        ended = np.flatnonzero(done)
        if not len(ended):
            return
        refilled = ended[: len(self._words.lengths) - self._next]
        if len(refilled):
            self.sentence[refilled] = np.arange(self._next, self._next + len(refilled))
            self._next += len(refilled)
            for counter in (self._position, self._depth, self._open_count, self.steps, self._after_open):
                counter[refilled] = 0
            at = self._index(refilled)
            self._top_h[at] = self._parser._first_constituent[0]
            for state, first in zip(self._history, self._parser._first_history, strict=True):
                state[at] = first
        if len(refilled) < len(ended):
            kept = np.setdiff1d(np.arange(len(done)), ended[len(refilled) :])
            self.sentence, self._slot, self._position = self.sentence[kept], self._slot[kept], self._position[kept]
            self._depth, self._open_count, self.steps = self._depth[kept], self._open_count[kept], self.steps[kept]
            self._after_open = self._after_open[kept]
            at = self._index(kept)
            self._top_h, self._history = self._top_h[at], [state[at] for state in self._history]

    def _grow(self) -> None:
        """Double the number of stack entries."""
        old, self._entries = self._entries, 2 * self._entries

        def widen(values: Tensor) -> Tensor:
            wide = values.new_zeros(len(values) // old, self._entries, values.shape[1])
            wide[:, :old] = values.view(-1, old, values.shape[1])
            return wide.view(-1, values.shape[1])

        self._h, self._c, self._tree, self._siblings = map(widen, (self._h, self._c, self._tree, self._siblings))
        self._chain = np.pad(self._chain.reshape(-1, old), ((0, 0), (0, old))).reshape(-1)
        self._opens, self._opened = (np.pad(a, ((0, 0), (0, old))) for a in (self._opens, self._opened))
