"""Stanza's in-order shift-reduce parser, run on arrays instead of objects: the same weights, the same transitions.

Stanza keeps one Python object per stack entry and loops over sentences in every step. Here, a batch of sentences is one set of
arrays. A finished sentence gives its slot to the next one, so the batch stays full.

Shapes: R running sentences, S slots, E stack entries of a slot, H hidden size, W words of the call, A transitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from treeproc.parsers.lines import batches
from treeproc.trees.spans import SpanTree

SHIFT, CLOSE, OPEN = 0, 1, 2
_EXTRA_OPENS = 10  # as in Stanza: at most this many more open nodes than words
_WORDS_PER_SLOT = 32  # measured: docs/parsers.md
_STEPS_PER_WORD = 20  # as in Stanza: a sentence with more transitions "went infinite"


def supports(model: nn.Module) -> bool:
    """Return whether this Stanza parser has the kind of all published English models: in-order, LSTM stacks, MAX."""
    from stanza.models.constituency.lstm_model import ConstituencyComposition, LSTMModel, StackHistory
    from stanza.models.constituency.parse_transitions import TransitionScheme

    return (
        isinstance(model, LSTMModel)
        and model.transition_scheme is TransitionScheme.IN_ORDER
        and model.constituency_composition is ConstituencyComposition.MAX
        and model.args["transition_stack"] is StackHistory.LSTM
        and model.args["constituent_stack"] is StackHistory.LSTM
        and model.num_lstm_layers == 2
        and model.num_tree_lstm_layers == 1
        and not model.maxout_k
        and not model.reverse_sentence
    )


class _Cell:
    """Two stacked LSTM layers, one step. The states of both layers are side by side: h, c [R, 2H]."""

    def __init__(self, lstm: nn.LSTM):
        size = lstm.hidden_size
        # Gates in the order in, forget, out, cell: one sigmoid over three of them.
        order = torch.cat([torch.arange(size), torch.arange(size, 2 * size), torch.arange(3 * size, 4 * size)])
        order = torch.cat([order, torch.arange(2 * size, 3 * size)]).to(lstm.weight_ih_l0.device)
        self.size = size
        self.input_weight = lstm.weight_ih_l0[order].T.contiguous()
        self.input_bias = (lstm.bias_ih_l0 + lstm.bias_hh_l0)[order]
        self.recurrent = lstm.weight_hh_l0[order].T.contiguous()
        self.upper = torch.cat([lstm.weight_ih_l1[order], lstm.weight_hh_l1[order]], 1).T.contiguous()
        self.upper_bias = (lstm.bias_ih_l1 + lstm.bias_hh_l1)[order]

    def project(self, inputs: Tensor) -> Tensor:
        """Compute the part of the lower gates that needs only the input: [R, input] -> [R, 4H]."""
        return torch.addmm(self.input_bias, inputs, self.input_weight)

    def step(self, projected: Tensor, h: Tensor, c: Tensor) -> None:
        """Update h and c in place."""
        size = self.size
        self._gate(torch.addmm(projected, h[:, :size], self.recurrent), h[:, :size], c[:, :size])
        self._gate(torch.addmm(self.upper_bias, h, self.upper), h[:, size:], c[:, size:])

    def _gate(self, gates: Tensor, h: Tensor, c: Tensor) -> None:
        enter, forget, out = gates[:, : 3 * self.size].sigmoid_().chunk(3, 1)
        cell = gates[:, 3 * self.size :].tanh_()
        c.mul_(forget).addcmul_(enter, cell)
        torch.mul(torch.tanh(c), out, out=h)


@dataclass
class _WordVectors:
    """The input vectors of the parser: all words of the call, then the open labels, in one table."""

    hidden: Tensor  # [W + labels, H]: the vector that a shift or an open puts on the stack
    projected: Tensor  # [W + labels, 4H]: the same, as input of the stack's LSTM
    ahead: Tensor  # [W, output]: the part of the next word in the first output layer
    start: np.ndarray  # row of the first word of every sentence; the row after its last word marks its end
    lengths: np.ndarray


class ShiftReduceParser:
    """Trees of tagged sentences."""

    def __init__(self, model: nn.Module):
        self._model = model
        from stanza.models.constituency.parse_transitions import CloseConstituent, OpenConstituent, Shift

        kinds = {Shift: SHIFT, CloseConstituent: CLOSE, OpenConstituent: OPEN}
        self._kind = np.array([kinds[type(t)] for t in model.transitions])
        self._labels = [tuple(t.label) if kinds[type(t)] == OPEN else () for t in model.transitions]
        self._open_row = np.array([model.constituent_open_map[names] if names else 0 for names in self._labels])
        self._open_size = np.array([len(names) for names in self._labels])
        self._is_root = np.array([bool(names) and names[0] in model.root_labels for names in self._labels])
        # Column of each transition in the table of legal ones.
        self._column = np.select([self._kind == SHIFT, self._kind == CLOSE, self._is_root], [0, 1, 2], 3)
        self._chain_limit = model.unary_limit + 1
        with torch.inference_mode():
            self._load()

    def _load(self) -> None:
        model = self._model
        self._device = model.word_zeros.device
        self._column_index = torch.from_numpy(self._column).to(self._device)
        self._constituents = _Cell(model.constituent_stack.lstm)
        self._history = _Cell(model.transition_stack.lstm)
        self._history_inputs = self._history.project(model.transition_embedding.weight)
        self._first_constituent = _first_state(model.constituent_stack)
        self._first_history = _first_state(model.transition_stack)
        self._dummies: Tensor = model.dummy_embedding.weight
        self._activate = model.nonlinearity
        self._reduce = model.reduce_linear.weight.T.contiguous(), model.reduce_linear.bias
        first, *rest = model.output_layers
        word, history, constituent = first.weight.split(
            [model.hidden_size, model.transition_hidden_size, model.hidden_size], dim=1
        )
        self._out_word, self._out_history = word.T.contiguous(), history.T.contiguous()
        self._out_constituent, self._out_bias = constituent.T.contiguous(), first.bias
        self._out_rest = rest

    @torch.inference_mode()
    def parse(self, sentences: Sequence[Sequence[tuple[str, str]]], batch_words: int) -> list[SpanTree | None]:
        """Return one tree per sentence of (word, tag); None if the parser finds no end.

        It reads at most `batch_words` words at once. The number of running sentences is at most a 32nd of that.
        """
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        out: list[SpanTree | None] = [None] * len(sentences)
        for batch in batches([len(sentences[i]) for i in order], batch_words):
            chunk = [order[k] for k in batch]
            trees = self._parse_chunk([sentences[i] for i in chunk], max(1, batch_words // _WORDS_PER_SLOT))
            for i, tree in zip(chunk, trees, strict=True):
                out[i] = tree
        return out

    def _parse_chunk(self, sentences: list, slots: int) -> list[SpanTree | None]:
        lengths = np.array([len(s) for s in sentences])
        states = self._word_states(sentences)
        rows, actions = self._run(self._tables(states, lengths), slots)
        order = np.argsort(rows, kind="stable")
        parts = np.split(actions[order], np.cumsum(np.bincount(rows, minlength=len(sentences)))[:-1])
        return [self._tree(part.tolist(), n) for part, n in zip(parts, lengths.tolist(), strict=True)]

    def _tree(self, actions: list[int], length: int) -> SpanTree | None:
        """Return the nodes that the transitions close, in pre-order; None unless they end in one root over all words."""
        kinds, labels = self._kind.tolist(), self._labels
        begins, opened, closed, position = [], [], [], 0
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
        if not closed or closed[-1][:2] != (0, -length) or closed[-1][3] not in self._model.root_labels or opened:
            return None
        closed.sort()
        return SpanTree([node[3] for node in closed], [node[0] for node in closed], [-node[1] for node in closed])

    def _word_states(self, sentences: list) -> Tensor:
        """Return states of words with a bookend before and after: [W + 2 sentences, H], sentence after sentence."""
        from stanza.models.constituency.lstm_model import SentenceBoundary

        model = self._model
        plain = (
            model.forward_charlm is None
            and model.backward_charlm is None
            and model.bert_model is None
            and model.partitioned_transformer_module is None
            and model.rel_attn_forward is None
            and model.rel_attn_reverse is None
            and model.tag_embedding_dim > 0
            and model.sentence_boundary_vectors is not SentenceBoundary.NONE
        )
        if not plain:
            from stanza.models.constituency.parse_tree import Tree

            queues = model.initial_word_queues([[Tree(tag, Tree(word)) for word, tag in sentence] for sentence in sentences])
            return torch.stack([node.hx for queue in queues for node in queue])
        return self._plain_word_states(sentences)

    def _plain_word_states(self, sentences: list) -> Tensor:
        model, vocab = self._model, self._model.emb_vocab
        pairs: dict[tuple[str, str], int] = {}
        rows = np.concatenate([[0, *(pairs.setdefault(pair, len(pairs) + 2) for pair in sentence), 1] for sentence in sentences])
        ids = []
        for word, tag in pairs:
            known = vocab.unit2id(word)
            known = known if known != 1 else vocab.unit2id(word.lower())
            ids.append((known, model.delta_word_map.get(word, 1), model.tag_map.get(tag, 1)))
        known, delta, tag = torch.tensor(ids, device=self._device).T
        unique = torch.cat([model.embedding(known), model.delta_embedding(delta), model.tag_embedding(tag)], 1)
        table = torch.cat([model.word_start_embedding[None], model.word_end_embedding[None], unique])
        # Sentences are ordered longest first. So packing is a transposition: each step has all sentences that are long enough.
        sizes = np.array([len(s) + 2 for s in sentences])
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        alive = (sizes[None] > np.arange(sizes[0])[:, None]).sum(1)
        packed_at = np.concatenate([begins[:n] + step for step, n in enumerate(alive.tolist())])
        packed = nn.utils.rnn.PackedSequence(table[torch.from_numpy(rows[packed_at]).to(self._device)], torch.from_numpy(alive))
        states = model.word_lstm(packed)[0].data
        hidden = self._activate(model.word_to_constituent(states))
        out = torch.empty_like(hidden)
        out[torch.from_numpy(packed_at).to(self._device)] = hidden
        return out

    def _tables(self, states: Tensor, lengths: np.ndarray) -> _WordVectors:
        begins = np.cumsum(lengths + 2) - lengths - 2
        hidden = torch.cat([states, self._dummies])
        share = torch.addmm(self._out_bias, self._activate(states), self._out_word)
        return _WordVectors(hidden, self._constituents.project(hidden), share, begins + 1, lengths)

    def _run(self, words: _WordVectors, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sentence and transition of every step, in order of time."""
        work = _Work(self, words, min(slots, len(words.lengths)))
        steps = []
        while len(work.sentence):
            legal = work.legal(self._chain_limit)
            logits = work.logits().masked_fill_(~legal[:, self._column_index], -torch.inf)
            actions = logits.argmax(1).cpu().numpy()
            # Without a legal transition Stanza stops too. `_tree` notices that the root is missing.
            stuck = ~legal.any(1).cpu().numpy()
            steps.append((work.sentence[~stuck], actions[~stuck]))
            roots = work.apply(actions)
            work.replace(roots | stuck | work.too_long())
        rows, actions = zip(*steps, strict=True)
        return np.concatenate(rows), np.concatenate(actions)


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
        self._position, self._depth, self._open_count, self._steps = (np.zeros(slots, np.int64) for _ in range(4))
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
        out.addmm_(parser._activate(self._top_h[:, size:]), parser._out_constituent)
        out.addmm_(parser._activate(self._history[0][:, parser._history.size :]), parser._out_history)
        for layer in parser._out_rest:
            out = layer(parser._activate(out))
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
        source = np.where(shift, words.start[self.sentence] + self._position, 0)
        source = self._index(np.where(opens, len(words.ahead) + parser._open_row[actions], source))
        entry, projected = words.hidden[source], words.projected[source]
        closing = np.flatnonzero(close)
        if len(closing):
            at = self._index(closing)
            weight, bias = parser._reduce
            node = parser._activate(torch.addmm(bias, self._siblings[self._index(top[closing])], weight))
            entry[at] = node
            projected[at] = parser._constituents.project(node)
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
        self._steps += 1
        return finished

    def too_long(self) -> np.ndarray:
        """Return the sentences with so many transitions that Stanza calls them infinite."""
        return self._steps >= (self._words.lengths[self.sentence] + 2) * _STEPS_PER_WORD

    def replace(self, done: np.ndarray) -> None:
        """Give the slots of finished sentences to the next ones. If there are none, continue with the rest."""
        ended = np.flatnonzero(done)
        if not len(ended):
            return
        refilled = ended[: len(self._words.lengths) - self._next]
        if len(refilled):
            self.sentence[refilled] = np.arange(self._next, self._next + len(refilled))
            self._next += len(refilled)
            for counter in (self._position, self._depth, self._open_count, self._steps, self._after_open):
                counter[refilled] = 0
            at = self._index(refilled)
            self._top_h[at] = self._parser._first_constituent[0]
            for state, first in zip(self._history, self._parser._first_history, strict=True):
                state[at] = first
        if len(refilled) < len(ended):
            kept = np.setdiff1d(np.arange(len(done)), ended[len(refilled) :])
            self.sentence, self._slot, self._position = self.sentence[kept], self._slot[kept], self._position[kept]
            self._depth, self._open_count, self._steps = self._depth[kept], self._open_count[kept], self._steps[kept]
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


def _first_state(stack: nn.Module) -> tuple[Tensor, Tensor]:
    """Return h and c of both layers on the empty stack, each [2H]."""
    bottom = stack.initial_state().value
    return bottom.lstm_hx.reshape(-1), bottom.lstm_cx.reshape(-1)
