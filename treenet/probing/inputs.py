"""The inputs of probes: pieces of sentences, copies with two adjacent words exchanged, and states of a frozen encoder for both.

Only pieces are exchanged. Tree, tags and arcs stay those of the original sentence, for every model. The two words have the same
number of pieces, so that nothing except the pieces differs. States are of whole sentences and of single words, from any layer.
The tasks of probing are classes of sentences, copies and words, and their rows of states.

Shapes: n sentences, w chosen words, k copies, B batch, L leaves, S positions, D model.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treenet.data.batch import TreeBatch, cut_batches
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import InputKind
from treenet.layers.backend import scoring
from treenet.models.composed import ComposedModel
from treenet.probing.sentences import ProbeSentences, keys
from treenet.probing.settings import BINS, TOP_SEQUENCES, WORD_TASKS, TaskName
from treenet.structure.base import pad
from treeproc.common.errors import check_choice
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

# Random draws for a sentence or a word, each from a separate stream.
_EXCHANGED, _PAIR, _WORD = 1, 2, 3
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class ProbeInputs:
    """The rows of states of a split: one for each sentence, then one for each copy; and one for each chosen word."""

    source: ExampleSource
    sentences: ProbeSentences
    word_of_leaf: list[np.ndarray]  # of each sentence, [leaves]
    pair: np.ndarray  # [n, 2] first leaf of the two words that may be exchanged, and leaves of each; 0, 0 without such a pair
    copies: np.ndarray  # [k] sentences that have a copy with the pair exchanged: about half of those with a pair
    words: np.ndarray  # [w] chosen words among those of `sentences.syntax`, ascending
    word_leaves: np.ndarray  # [w, 2] first leaf of each in its sentence, and number of its leaves

    @classmethod
    def build(
        cls, data: AnyPath, split: str, reads: InputKind, sentences: ProbeSentences, most_words: int, seed: int
    ) -> "ProbeInputs":
        """Build the inputs for a model that reads `reads`. Words and pairs depend only on ids and `seed`."""
        source = ExampleSource(data / "encoded", split, reads)
        picked = source.pick(sentences.rows)
        pieces, words = (list(source.lists(picked, "leaves", name)) for name in ("piece", "word_index"))
        ids = sentences.example_ids
        pair = np.zeros((len(ids), 2), dtype=np.int64)
        for i, draw in enumerate(keys(ids, seed, _PAIR).tolist()):
            if len(pairs := exchangeable_pairs(pieces[i], words[i])):
                pair[i] = pairs[draw % len(pairs)]
        exchanged = (keys(ids, seed, _EXCHANGED) & np.uint64(1)).astype(bool)

        numbers, firsts, sizes = zip(*(np.unique(one, return_index=True, return_counts=True) for one in words), strict=True)
        word = np.concatenate(numbers)
        sentence = np.repeat(np.arange(len(ids)), [len(one) for one in numbers])
        chosen = np.sort(np.argsort(keys(ids[sentence], seed, _WORD, word), kind="stable")[:most_words])
        return cls(
            source=source,
            sentences=sentences,
            word_of_leaf=words,
            pair=pair,
            copies=np.flatnonzero(exchanged & (pair[:, 1] > 0)),
            words=(sentences.syntax.word_edges[sentence] + word)[chosen],
            word_leaves=np.stack([np.concatenate(firsts), np.concatenate(sizes)], axis=1)[chosen],
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows, n + k."""
        return len(self.word_of_leaf) + len(self.copies)

    def forms(self) -> list[str]:
        """Return the text of each chosen word [w]."""
        return [self.sentences.syntax.form[word] for word in self.words.tolist()]

    def texts(self) -> list[bytes]:
        """Return the pieces of every sentence [n], as bytes."""
        return [pieces.tobytes() for pieces in self.source.lists(self.source.pick(self.sentences.rows), "leaves", "piece")]

    def batches(self) -> list[np.ndarray]:
        """Return all rows of sentences and copies once, in batches of similar length."""
        leaves = np.array([len(self.word_of_leaf[sentence]) for sentence in self._sentence(np.arange(self.num_rows))])
        order = np.argsort(leaves, kind="stable")
        return np.split(order, cut_batches(leaves[order], _BATCH_TOKENS)[1:-1])

    def batch(self, rows: np.ndarray) -> tuple[TreeBatch, Tensor]:
        """Return rows of sentences and copies as a batch in the form that the model reads, and the word of every leaf [B, L]."""
        sentence = self._sentence(rows)
        batch = self.source.batch(self.sentences.rows[sentence])
        for place in np.flatnonzero(rows >= len(self.word_of_leaf)).tolist():
            batch.leaf_pieces[place] = exchange(batch.leaf_pieces[place], *self.pair[sentence[place]].tolist())
        words = [self.word_of_leaf[one] for one in sentence]
        padded, _ = pad(words, 0, self.source.reads.width_multiple)
        return batch, torch.from_numpy(padded)

    def leaves_of_words(self, rows: np.ndarray, width: int, word_state: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the chosen words of a batch of `width` leaves, by their place in `words`, and the leaves of their states.

        Both have an entry for each leaf: (word, b * width + leaf). Copies have no entries.
        """
        check_choice("word_state", word_state, ("first", "mean"))
        sentence_of_word = self.sentence_of_word()
        row_of_sentence = np.full(len(self.word_of_leaf), -1)
        own = rows < len(self.word_of_leaf)
        row_of_sentence[rows[own]] = np.flatnonzero(own)
        word = np.flatnonzero(row_of_sentence[sentence_of_word] >= 0)
        first, size = self.word_leaves[word].T
        size = np.ones_like(size) if word_state == "first" else size
        offset = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        row = row_of_sentence[sentence_of_word[word]]
        return np.repeat(word, size), np.repeat(row * width + first, size) + offset

    def sentence_of_word(self) -> np.ndarray:
        """Return the sentence of each chosen word [w]."""
        return np.searchsorted(self.sentences.syntax.word_edges, self.words, side="right") - 1

    def _sentence(self, rows: np.ndarray) -> np.ndarray:
        """Return the sentence of each row."""
        return np.concatenate([np.arange(len(self.word_of_leaf)), self.copies])[rows]


def exchangeable_pairs(pieces: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return [pairs, 2] for adjacent, different words with the same number of pieces: the first leaf, and the leaves of each."""
    number, first, size = np.unique(words, return_index=True, return_counts=True)
    alike = np.flatnonzero((size[1:] == size[:-1]) & (number[1:] == number[:-1] + 1))
    differ = [i for i in alike.tolist() if (pieces[first[i] : first[i + 1]] != pieces[first[i + 1] :][: size[i]]).any()]
    return np.stack([first[differ], size[differ]], axis=1)


def exchange(pieces: Tensor, first: int, size: int) -> Tensor:
    """Copy pieces [L], and exchange `size` of them from `first` with the next `size` pieces."""
    middle, end = first + size, first + 2 * size
    return torch.cat([pieces[:first], pieces[middle:end], pieces[first:middle], pieces[end:]])


EMBEDDINGS = 0  # the layer below the first: the vectors of the pieces, without positions


@dataclass
class States:
    """States of one layer, float32 on the CPU."""

    sentences: dict[str, Tensor] = field(default_factory=dict)  # "mean" of the leaves, and "root" of tree models, [n + k, D]
    words: Tensor | None = None  # [w, D]


def num_layers(model: ComposedModel) -> int:
    """Return the number of layers with states; 1 for encoders that do not keep their layers in a list."""
    return max(1, len(model.encoder.probed_layers()))


@contextmanager
def record_layers(model: ComposedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Return a dict that gets the output [B, S, D] of encoder layers, counted from 1, at every forward pass in this context."""
    recorded: dict[int, Tensor] = {}

    def recorder(layer: int) -> Callable:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            recorded[layer] = output[0] if isinstance(output, tuple) else output

        return record

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(model.encoder.probed_layers()[layer - 1].register_forward_hook(recorder(layer)))
        yield recorded


@torch.no_grad()
def encode_layers(model: ComposedModel, batch: TreeBatch, layers: Sequence[int]) -> dict[int, Tensor]:
    """Compute states [B, S, D] of the layers; EMBEDDINGS are [B, L, D]."""
    last = num_layers(model)
    with record_layers(model, [layer for layer in layers if EMBEDDINGS < layer < last]) as states, scoring(model):
        memory = model.encoder(batch)
    for layer, found in states.items():
        if found.shape[:2] != memory.states.shape[:2]:
            raise UserError(f"layer: layer {layer} of this encoder has no state for each position; choose layer=last")
    states[EMBEDDINGS], states[last] = model.encoder.embedding.vectors(batch.leaf_pieces), memory.states
    return {layer: states[layer] for layer in layers}


def leaf_states(states: Tensor, reads: InputKind, num_leaves: int, words: Tensor) -> Tensor:
    """Return the states of leaves [B, L, D] from states of positions [B, S, D].

    If positions are words, which arcs join, a leaf has the state of its word, `words` [B, L]. Raises UserError if there are too
    few positions.
    """
    if reads.positions != "words":
        if states.shape[1] < num_leaves:
            raise UserError("this model cannot be probed: its encoder has no state for each leaf")
        return states[:, :num_leaves]
    return states.gather(1, words[..., None].expand(-1, -1, states.shape[2]))


def collect_states(
    model: ComposedModel, inputs: ProbeInputs, layers: Sequence[int], word_state: str, advance: Callable[[int], None]
) -> dict[int, States]:
    """Collect states of every sentence, copy and chosen word of a split, by layer. The model must be in evaluation mode.

    `advance` is called after every batch with its number of sentences. Raises UserError for states that are not finite.
    """
    device = next(model.parameters()).device
    found = {layer: States() for layer in layers}
    for rows in inputs.batches():
        batch, words = inputs.batch(rows)
        batch, words = batch.to(device), words.to(device)
        states = encode_layers(model, batch, layers)
        real = ~batch.leaf_pad_mask
        place = torch.from_numpy(rows)
        word, leaf = map(torch.from_numpy, inputs.leaves_of_words(rows, real.shape[1], word_state))
        word, slot = word.unique(return_inverse=True)
        leaf, slot = leaf.to(device), slot.to(device)
        for layer, x in states.items():
            out, leaves = found[layer], x if layer == EMBEDDINGS else leaf_states(x, model.reads, real.shape[1], words)
            leaves = leaves.float()
            mean = (leaves * real[..., None]).sum(1) / real.sum(1, keepdim=True)
            out.sentences["mean"] = _stored(out.sentences.get("mean"), place, mean, inputs.num_rows)
            if layer != EMBEDDINGS and model.reads.rooted:
                root = x[:, real.shape[1]].float()
                out.sentences["root"] = _stored(out.sentences.get("root"), place, root, inputs.num_rows)
            flat = leaves.flatten(0, 1)
            sums = flat.new_zeros(len(word), flat.shape[1]).index_add_(0, slot, flat.index_select(0, leaf))
            means = sums / slot.bincount(minlength=len(word))[:, None]
            out.words = _stored(out.words, word, means, len(inputs.words))
        advance(len(rows))
    for layer, out in found.items():
        if not all(x.isfinite().all() for x in (*out.sentences.values(), out.words) if x is not None):
            raise UserError(f"the states of layer {layer} are not finite, so the model has diverged; choose another checkpoint")
    return found


def _stored(out: Tensor | None, place: Tensor, values: Tensor, rows: int) -> Tensor:
    """Write values to their places in `out` [rows, D], which is created if it is None."""
    out = torch.zeros(rows, values.shape[1]) if out is None else out
    out[place] = values.cpu()
    return out


OTHER = "other"
UNSEEN = -1  # a class that train does not have, so no probe can predict it


@dataclass(frozen=True)
class ProbeTask:
    """A classification task. Its classes are those of train. A row is one of `States.sentences`, or of `States.words`."""

    name: TaskName
    classes: list[str]
    rows: dict[str, np.ndarray]  # split -> [m]
    labels: dict[str, np.ndarray]  # split -> [m] place in `classes`, or UNSEEN
    forms: dict[str, list[str]] = field(default_factory=dict)  # split -> [m] texts of words; only for tasks of words
    sentences: dict[str, np.ndarray] = field(default_factory=dict)  # split -> [m] sentences of words; only for tasks of words

    @property
    def of_words(self) -> bool:
        return self.name in WORD_TASKS

    @property
    def empty(self) -> bool:
        """Return whether the task is trivial: it has one class, or a split without examples."""
        return len(np.unique(self.labels["train"])) < 2 or not all(len(one) for one in self.labels.values())

    def control_labels(self, split: str, seed: int) -> np.ndarray:
        """Return random labels of words [m]: the control task of Hewitt and Liang (2019).

        All words of a form have the same label, in all splits. It is that of a random word of train.
        """
        of_train, found = self.labels["train"], {}
        for form in set(self.forms[split]):
            draw = hashlib.sha256(f"{seed} {self.name} {form}".encode()).digest()
            found[form] = of_train[int.from_bytes(draw[:8]) % len(of_train)]
        return np.array([found[form] for form in self.forms[split]], dtype=np.int64)

    def majority(self) -> float:
        """Return the accuracy on test of a constant prediction, the most frequent class of train."""
        most, test = np.bincount(self.labels["train"], minlength=len(self.classes)).argmax(), self.labels["test"]
        return float((test == most).mean()) if len(test) else 0.0


def build_probe_task(name: TaskName, splits: Mapping[str, ProbeInputs]) -> ProbeTask:
    """Build the examples of a task in each split. `train` is required, and gives the classes."""
    check_choice("name", name, TaskName)
    if name == "word_order":
        rows = {split: _order_rows(inputs) for split, inputs in splits.items()}
        labels = {split: (rows[split] >= len(inputs.pair)).astype(np.int64) for split, inputs in splits.items()}
        return ProbeTask(name, ["as written", "exchanged"], rows, labels)
    values: dict[str, Any] = {split: _values(name, inputs) for split, inputs in splits.items()}
    rows = {split: np.arange(len(one)) for split, one in values.items()}
    words = splits if name in WORD_TASKS else {}
    forms = {split: inputs.forms() for split, inputs in words.items()}
    sentences = {split: inputs.sentence_of_word() for split, inputs in words.items()}
    if name in ("depth", "length", "arc_depth"):
        classes, ends = bin_values(values["train"], BINS)
        labels = {split: np.searchsorted(ends, one) for split, one in values.items()}
        return ProbeTask(name, classes, rows, labels, forms, sentences)
    most = TOP_SEQUENCES if name == "top_constituents" else None
    classes = frequent_classes(values["train"], most)
    numbers = {value: number for number, value in enumerate(classes)}
    rest = numbers[OTHER] if most is not None and len(classes) > most else UNSEEN
    labels = {split: np.array([numbers.get(value, rest) for value in one]) for split, one in values.items()}
    return ProbeTask(name, classes, rows, labels, forms, sentences)


def _values(name: TaskName, inputs: ProbeInputs) -> Sequence[str] | np.ndarray:
    """Return the gold value of a task for every sentence, or for every chosen word."""
    syntax, words = inputs.sentences.syntax, inputs.words
    if name == "depth":
        return syntax.depth
    if name == "length":
        return np.diff(syntax.word_edges)
    if name == "top_constituents":
        return syntax.top
    if name == "arc_depth":
        assert syntax.arc_depth is not None  # the data set has arcs
        return syntax.arc_depth[words]
    return [getattr(syntax, name)[word] for word in words.tolist()]


def _order_rows(inputs: ProbeInputs) -> np.ndarray:
    """Return a row for every sentence with an exchangeable pair: its copy if it has one, else the sentence itself."""
    rows = np.arange(len(inputs.pair))
    rows[inputs.copies] = len(inputs.pair) + np.arange(len(inputs.copies))
    return rows[inputs.pair[:, 1] > 0]


def bin_values(values: np.ndarray, count: int) -> tuple[list[str], np.ndarray]:
    """Split whole numbers into at most `count` ranges, each with about the same number of `values`.

    Returns their names, and the last number of each range except the last range. There are fewer ranges if one number is very
    frequent.
    """
    lasts = np.unique(np.quantile(values, np.arange(1, count) / count, method="inverted_cdf")).astype(np.int64)
    lasts = lasts[lasts < values.max()]
    firsts = [None, *(last + 1 for last in lasts.tolist())]
    names = []
    for first, last in zip(firsts, [*lasts.tolist(), None], strict=True):
        if first is None or last is None:
            names.append("all" if first is last else f"up to {last}" if first is None else f"{first} and more")
        else:
            names.append(str(first) if first == last else f"{first} to {last}")
    return names, lasts


def frequent_classes(values: Sequence[str], most: int | None) -> list[str]:
    """Return values by frequency, ties by name. With `most`, it returns so many of them, and OTHER if there are more."""
    ordered = [value for value, _ in sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))]
    return ordered if most is None or len(ordered) <= most else [*ordered[:most], OTHER]
