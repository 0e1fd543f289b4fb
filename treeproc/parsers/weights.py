"""Weights of Stanza's models as plain tensors, from its files or its modules, and LSTMs over them; and its constituency parser.

To read a file, Stanza is not needed. Its import takes almost as long as that of PyTorch. On a CPU, the LSTMs read every distinct
input once. They write tanh(x) as 2 sigmoid(2x) - 1, which is six times faster in PyTorch. States are kept as h / 2 and 2c. So the
factors go into the weights.

Shapes: N packed words (see `Packing`), B sentences, L words of the longest, D inputs, H states, M rows of a table of inputs.
"""

from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

# Units of every vocabulary of Stanza, in this order.
_PREFIX = ("<PAD>", "<UNK>", "<EMPTY>", "<ROOT>")
PAD, UNKNOWN, EMPTY, ROOT = range(len(_PREFIX))
PREFIX_SIZE = len(_PREFIX)


class Vocabulary:
    """Ids of units: characters, words or tags."""

    def __init__(self, state: Mapping):
        """Take the state of a vocabulary of Stanza. Raises KeyError or TypeError if it is none."""
        ignored = state.get("ignore") or ()
        self._ids: dict[str, int] = {**state["_unit2id"], **dict.fromkeys(ignored, EMPTY)}
        self.names: list[str] = list(state["_id2unit"])
        if ignored:
            self.names[EMPTY] = "_"
        self._lower = bool(state.get("lower"))
        self._unknown = self._ids[_PREFIX[UNKNOWN]]

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, unit: str) -> bool:
        return (unit.lower() if self._lower else unit) in self._ids

    def id_of(self, unit: str) -> int:
        return self._ids.get(unit.lower() if self._lower else unit, self._unknown)

    def map(self, units: Sequence[str]) -> list[int]:
        return [self.id_of(unit) for unit in units]

    def unmap(self, ids: Sequence[int]) -> list[str]:
        """Return the units of ids. Stanza's own repair of arcs calls it."""
        return [self.names[i] for i in ids]

    @property
    def is_plain(self) -> bool:
        """Return whether units are whole texts, without parts that have ids."""
        return not any(isinstance(value, dict) for value in self._ids.values())


@dataclass(frozen=True)
class Weights:
    """The tensors of a model by name, its settings, and its vocabularies."""

    tensors: dict[str, Tensor]
    args: Mapping[str, Any]
    vocab: Mapping[str, Vocabulary]

    @classmethod
    def of(cls, model: Any) -> "Weights":
        """Take those of a tagger or a dependency parser of Stanza, in its floating-point type."""
        vocab = {name: Vocabulary(vars(model.vocab[name])) for name in model.vocab.keys() if name != "feats"}  # noqa: SIM118
        return cls(tensors_of(model.state_dict()), model.args, vocab)

    @classmethod
    def read(cls, content: Mapping, device: torch.device) -> "Weights":
        """Take those of a file of `Weights.of`'s models. Raises KeyError or TypeError if the file is of something else."""
        states = {name: state for name, state in content["vocab"].items() if name not in ("_key2class", "feats")}
        vocab = {name: Vocabulary(state) for name, state in states.items()}
        return cls(tensors_of(content["model"], device), content["config"], vocab)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def linear(self, name: str, inputs: Tensor) -> Tensor:
        """Apply a linear layer: [..., D] -> [..., outputs]."""
        return linear(inputs, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def tensors_of(state: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the tensors of a module, those in half precision as float32."""
    out = {}
    for name, value in state.items():
        dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        out[name] = value.detach().to(device or value.device, dtype)
    return out


def with_one(rows: Tensor) -> Tensor:
    """Append a column of ones, which a bilinear form multiplies with its bias."""
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


@dataclass(frozen=True)
class Packing:
    """The positions of words in a packed sequence, ordered by step. A step has one word of each sentence that is long enough.

    Sentences are sorted by length, longest first. Shapes: B sentences, L words of the longest, N words in all.
    """

    sizes: np.ndarray  # [B] words
    batch_sizes: np.ndarray  # [L] number of sentences that have a step
    before: np.ndarray  # [L] number of words before a step
    taken: np.ndarray  # [N] index in the concatenated sentences of the word at a packed place
    sentence: np.ndarray  # [N] sentence of a packed place
    step: np.ndarray  # [N] index of its word in the sentence

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Packing":
        lengths = np.array(sizes)
        begins = np.cumsum(lengths) - lengths
        # How many sentences are longer than a step, of lengths that fall.
        batch_sizes = len(lengths) - np.searchsorted(lengths[::-1], np.arange(lengths[0]), side="right")
        before = np.cumsum(batch_sizes) - batch_sizes
        step = np.repeat(np.arange(len(batch_sizes)), batch_sizes)
        sentence = np.arange(len(step)) - before[step]
        return cls(lengths, batch_sizes, before, begins[sentence] + step, sentence, step)

    def pad(self, data: Tensor) -> Tensor:
        """Pad [N, ...] to [B, L, ...]."""
        return pad_packed_sequence(PackedSequence(data, torch.from_numpy(self.batch_sizes)), batch_first=True)[0]


class Direction:
    """One direction of a layer."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, ending: str):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        inputs, states, *biases = (tensors[f"{prefix}{name}_{ending}"] for name in names)
        self.size = states.shape[1]
        scale = states.new_ones(4 * self.size)
        scale[2 * self.size : 3 * self.size] = 2  # gates: in, forget, cell, out
        self.inputs = (inputs * scale[:, None]).T.contiguous()
        self.bias = (biases[0] + biases[1]) * scale
        self.states = (states * (2 * scale[:, None])).T.contiguous()

    def run(self, table: Tensor, rows: Tensor | None, at: Packing, first: tuple[Tensor, Tensor], back: bool) -> Tensor:
        """Return half of the states [N, H]; see `Layer`. First states are [1, H]."""
        projected, size = torch.addmm(self.bias, table, self.inputs), self.size
        steps = list(zip(at.before.tolist(), at.batch_sizes.tolist(), strict=True))
        out = projected.new_empty(len(at.taken), size)
        first_h = (first[0] / 2).expand(steps[0][1], size)
        cells = (first[1] * 2).expand(steps[0][1], size).contiguous()
        h = first_h
        for begin, count in reversed(steps) if back else steps:
            if count > len(h):
                h = torch.cat([h, first_h[len(h) : count]])
            place = slice(begin, begin + count)
            gates = projected[place] if rows is None else projected.index_select(0, rows[place])
            h = step(gates.addmm_(h[:count], self.states), cells[:count], out[place])
        return out


def step(gates: Tensor, cells: Tensor, out: Tensor) -> Tensor:
    """Compute one step of an LSTM: the next states into `out` [B, H], and cells in place. `gates` [B, 4H] are overwritten.

    Gates are in, forget, cell, out, those of the cell doubled. States are halves, cells are doubled.
    """
    enter, forget, cell, leave = gates.sigmoid_().split(cells.shape[1], 1)
    cells.mul_(forget).addcmul_(enter, cell.sub_(0.5), value=4)
    return torch.mul(torch.sigmoid(cells).sub_(0.5), leave, out=out)


class Layer:
    """One layer of an LSTM in one or two directions, over packed sentences. On a GPU it is PyTorch's own."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, layer: int = 0):
        endings = [f"l{layer}", f"l{layer}_reverse"]
        endings = [ending for ending in endings if f"{prefix}weight_ih_{ending}" in tensors]
        self._ways = [Direction(tensors, prefix, ending) for ending in endings]
        self._zero = self._ways[0].bias.new_zeros(len(endings), 1, self._ways[0].size)
        self._module = None
        if self._zero.device.type != "cpu":
            names = [f"{name}_{ending}" for ending in endings for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            inputs, sizes = tensors[prefix + names[0]].shape[1], self._ways[0].size
            module = nn.LSTM(inputs, sizes, bidirectional=len(endings) == 2, device="meta")
            state = {name.replace(f"_l{layer}", "_l0"): tensors[prefix + name] for name in names}
            module.load_state_dict(state, assign=True)
            module.flatten_parameters()
            self._module = module.eval()

    def __call__(self, table: Tensor, rows: Tensor | None, at: Packing, first: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return states [N, H] or [N, 2H]. Inputs are the `rows` [N] of a `table` [M, D], or without rows all of it, N = M.

        First states are [directions, 1, H] each, by default zero.
        """
        first = first or (self._zero, self._zero)
        if self._module is not None:
            h, c = (state.expand(-1, len(at.sizes), -1).contiguous() for state in first)
            inputs = PackedSequence(table if rows is None else table[rows], torch.from_numpy(at.batch_sizes))
            return self._module(inputs, (h, c))[0].data
        halves = [way.run(table, rows, at, (first[0][i], first[1][i]), back=i == 1) for i, way in enumerate(self._ways)]
        return torch.cat(halves, 1).mul_(2)


class Highway:
    """Stanza's bidirectional LSTM whose layers have a gated way around them."""

    def __init__(self, weights: Weights, name: str):
        self._weights, self._name = weights, name
        count = sum(1 for tensor in weights.tensors if tensor.startswith(f"{name}.gate.") and tensor.endswith(".weight"))
        self._layers = [Layer(weights.tensors, f"{name}.lstm.{i}.lstm.") for i in range(count)]
        self._first = [weights.tensors[f"{name}_{state}_init"].split(2) for state in ("h", "c")]

    def __call__(self, table: Tensor, rows: Tensor | None, at: Packing) -> Tensor:
        """Return states [N, 2H] of inputs as `Layer` takes them."""
        weights = self._weights
        for i, (layer, *first) in enumerate(zip(self._layers, *self._first, strict=True)):
            around = torch.sigmoid(weights.linear(f"{self._name}.gate.{i}", table))
            around = around * torch.tanh(weights.linear(f"{self._name}.highway.{i}", table))
            states = layer(table, rows, at, tuple(first))
            table, rows = states + (around if rows is None else around.index_select(0, rows)), None
        return table


SHIFT, CLOSE, OPEN = 0, 1, 2
_KINDS = {"Shift": SHIFT, "CloseConstituent": CLOSE, "OpenConstituent": OPEN}
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "silu": torch.nn.functional.silu}


def can_read(model: nn.Module) -> bool:
    """Return whether a constituency parser of Stanza is one model with a stack of LSTMs, not an ensemble."""
    return type(model).__name__ == "LSTMModel"


@dataclass(frozen=True)
class ConstituencyModel:
    """A constituency parser of Stanza: its tensors by name, its settings, and the lists that it has by heart."""

    tensors: dict[str, Tensor]
    args: Mapping[str, Any]
    transitions: list[tuple[int, tuple[str, ...]]]  # kind and labels; only those of OPEN have labels
    root_labels: Sequence[str]
    opens: Sequence[tuple[str, ...]]
    unary_limit: int
    tags: Sequence[str]
    words: Sequence[str]  # with vectors that the parser learned
    vectors: Vocabulary
    vector_table: Tensor  # [vectors, D]
    stanza: Any = None  # its `nn.Module`; None if it comes from a file

    @classmethod
    def of(cls, model: Any) -> "ConstituencyModel":
        """Take a model of Stanza that `is_supported`."""
        tensors = tensors_of(model.state_dict())
        opens = [(kind, tuple(getattr(one, "label", ()))) for one in model.transitions for kind in [_KINDS[type(one).__name__]]]
        return cls(
            tensors, model.args, opens, model.root_labels, model.constituent_opens, model.unary_limit, model.tags,
            model.delta_words, Vocabulary(vars(model.emb_vocab)), tensors["embedding.weight"], model,
        )  # fmt: skip

    @classmethod
    def read(cls, content: Mapping, vectors: Mapping, device: torch.device) -> "ConstituencyModel":
        """Take the content of a file and that of its word vectors. Raises KeyError or ValueError for something else."""
        if content["model_type"] != "LSTM":
            raise ValueError(f"a parser of type {content['model_type']}")
        params = content["params"]
        tensors = tensors_of(params["model"], device)
        transitions = []
        for text in params["transitions"]:
            name, _, labels = text.partition("(")
            transitions.append((_KINDS[name], tuple(literal_eval(labels[:-1])) if labels else ()))
        return cls(
            tensors, params["config"], transitions, params["root_labels"], sorted(params["constituent_opens"]),
            params["unary_limit"], sorted(params["tags"]), sorted(params["words"]), Vocabulary(vectors["vocab"]),
            torch.as_tensor(vectors["emb"]).to(device, torch.float32),
        )  # fmt: skip

    @property
    def is_supported(self) -> bool:
        """Return whether the parser has the kind of all published English models: in-order, LSTM stacks, MAX."""
        args = self.args
        names = {"transition_scheme": "IN_ORDER", "constituency_composition": "MAX"}
        names |= {"transition_stack": "LSTM", "constituent_stack": "LSTM"}
        return (
            all(getattr(args[key], "name", args[key]) == name for key, name in names.items())
            and args["num_lstm_layers"] == 2
            and args["num_tree_lstm_layers"] == 1
            and not args.get("maxout_k")
            and not args.get("reversed")
            and args["nonlinearity"] in ACTIVATIONS
        )

    @property
    def is_plain(self) -> bool:
        """Return whether the parser reads only words and tags, between vectors of the ends of a sentence."""
        args, boundary = self.args, self.args["sentence_boundary_vectors"]
        others = ("bert_model", "charlm_forward_file", "charlm_backward_file", "use_lattn", "use_rattn")
        return (
            not any(args.get(name) for name in others)
            and not args.get("pattn_num_layers")
            and args["tag_embedding_dim"] > 0
            and getattr(boundary, "name", boundary) != "NONE"
        )

    @property
    def reads_xpos(self) -> bool:
        """Return whether the parser reads XPOS; else UPOS."""
        return self.args["retag_package"] is not None and self.args["retag_method"] == "xpos"
