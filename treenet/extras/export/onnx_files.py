"""Encoder and decoder step as ONNX graphs: encoder.onnx, decoder.onnx. They are functions of tensors alone.

Shapes: B sentences, L leaves, N nodes, S memory positions (L, or L + N), R hypotheses, T pieces so far, Y decoder layers,
H heads, K = D / H, V pieces.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import TREES
from treenet.layers.attention import BeamLayout, padding_to_attend_mask
from treenet.layers.blocks import SinusoidalPositions, compute_sinusoids
from treenet.models.composed import Seq2Seq
from treenet.models.decoders.transformer import DecoderState
from treenet.models.encoders.base import Memory
from treenet.runs.exported_run import read_vocabulary, write_export
from treenet.runs.loading import LoadedRun
from treenet.structure import TreeStructure
from treenet.structure.branches import Depths
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID

Encoded = tuple[Tensor, Tensor, Tensor]
EXPORTED = ("transformer", "tree_transformer")
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
# Protocol buffers, which ONNX files are, end at 2 GiB.
_MOST_BYTES = 2 * 10**9
_MEMORY, _PAST = ("memory_keys", "memory_values", "memory_mask"), ("past_keys", "past_values")


# Names of the dimensions of inputs. All other sizes are fixed.
Axes = Mapping[str, Mapping[int, str]]


class PlainEncoderStep(nn.Module):
    """Leaves to the keys and values that the decoder attends to."""

    def __init__(self, model: Seq2Seq):
        super().__init__()
        self.model = model

    def forward(self, leaves: Tensor) -> Encoded:
        """Map leaves [B, L] int64, PAD_ID where padded, to keys and values [Y, B, H, S, K] and a mask [B, S].

        The mask is True where the decoder may attend.
        """
        return self._project(self._batch(leaves))

    def _batch(self, leaves: Tensor) -> TreeBatch:
        none = leaves[:, :0]
        return TreeBatch(leaves[:, 0], leaves, leaves == PAD_ID, none, none == PAD_ID, None, none, none)

    def _project(self, batch: TreeBatch) -> Encoded:
        memory: Memory = self.model.encode(batch)
        layers = self.model.decoder.layers
        projected = [layer.cross_attention.project_memory(memory.states, memory.structure) for layer in layers]
        keys, values = (torch.stack(part) for part in zip(*projected, strict=True))
        return keys, values, padding_to_attend_mask(memory.pad_mask)[:, 0, 0]


class TreeEncoderStep(PlainEncoderStep):
    """The same for models that read trees."""

    def forward(  # type: ignore[override]  # leaves and trees
        self, leaves: Tensor, labels: Tensor, spans: Tensor
    ) -> Encoded:
        """Map leaves [B, L] and nodes to keys and values [Y, B, H, S, K] and a mask [B, S].

        `labels` [B, N] int64 are those of nodes in pre-order. `spans` [B, N, 3] int64 are their start, end and subtree_end; all 0
        where padded.
        """
        batch = self._batch(leaves)
        start, end, subtree_end = spans.unbind(2)
        batch.node_labels, batch.node_pad_mask = labels, end == 0
        batch.structure = TreeStructure(
            start, end, subtree_end, batch.leaf_pad_mask, batch.node_pad_mask, _find_depths(leaves, spans), attention=None
        )
        return self._project(batch)


class DecoderStep(nn.Module):
    """One piece of every hypothesis to the probabilities of the next one."""

    def __init__(self, model: Seq2Seq):
        super().__init__()
        self.model = model

    def forward(
        self,
        pieces: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
        memory_mask: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
    ) -> Encoded:
        """Map the last pieces [R] int64 to log-probabilities [R, V], and keys and values of all positions [Y, R, H, T + 1, K].

        `memory_...` are rows of the encoder's outputs, one for each hypothesis: [Y, R, H, S, K] and [R, S]. `past_...` are those
        that the step before returned, [Y, R, H, T, K]; T = 0 at first, where `pieces` are BOS.
        """
        memory, past = (list(zip(*pair, strict=True)) for pair in ((memory_keys, memory_values), (past_keys, past_values)))
        state = DecoderState(
            sources=pieces,
            layout=BeamLayout.full(pieces.shape[0], beam_width=1),
            memory=memory,
            memory_attend_mask=memory_mask[:, None, None],
            past=past,
            step=past_keys.shape[3],
        )
        logits, state = self.model.decode_step(pieces, state)
        keys, values = (torch.stack(part) for part in zip(*state.past, strict=True))
        return logits.log_softmax(dim=1), keys, values


def with_positions(model: Seq2Seq, count: int) -> Seq2Seq:
    """Return a copy of a model whose tables of sinusoids have `count` rows, so that none grows."""
    model = copy.deepcopy(model).eval()
    for part in model.modules():
        if isinstance(part, SinusoidalPositions):
            part.table = compute_sinusoids(count, part.table.shape[1])
    return model


def _find_depths(leaves: Tensor, spans: Tensor) -> Depths:
    """Count the ancestors of nodes and leaves. No leaf has more of them than there are nodes."""
    start, end, subtree_end = (x[..., None] for x in spans.unbind(2))
    node, leaf = (torch.arange(count, device=spans.device) for count in (spans.shape[1], leaves.shape[1]))
    below = (node[:, None] < node) & (node < subtree_end)
    over = (start <= leaf) & (leaf < end)
    return Depths(below.sum(1), over.sum(1), spans.shape[1])


@dataclass(frozen=True)
class _Graph:
    """A module with an example of its inputs. No two sizes of an example are equal, else they would count as one dimension."""

    step: nn.Module
    inputs: dict[str, Tensor]
    axes: Axes
    outputs: tuple[str, ...]

    def describe(self) -> dict:
        """Return names, types and dimensions of the inputs, and the names of the outputs, for export.json."""
        given = {
            name: {
                "type": str(value.dtype).removeprefix("torch."),
                "shape": [self.axes[name].get(place, size) for place, size in enumerate(value.shape)],
            }
            for name, value in self.inputs.items()
        }
        return {"inputs": given, "outputs": list(self.outputs)}


def export_onnx(run: LoadedRun, out: Path, max_positions: int) -> None:
    """Write the graphs of a run, its vocabulary, and export.json with the inputs and outputs of the graphs.

    Sentences and translations may have up to `max_positions` pieces. Raises UserError for models of other architectures, for
    those of more than 2 GB, and for the reference implementation.
    """
    if (name := run.config.model.name) not in EXPORTED:
        raise UserError(f"ONNX takes {' and '.join(EXPORTED)}, but the run is {name}; --to safetensors takes every model")
    if run.config.model.tree.implementation != "fast":
        again = "run its training command again with model.tree.implementation=fast, which changes no weight"
        raise UserError(f"ONNX does not take the reference implementation of trees; {again}")
    if sum(weight.nbytes for weight in run.model.parameters()) > _MOST_BYTES:
        raise UserError("an ONNX file holds at most 2 GB, but the weights are larger; --to safetensors takes them")
    model = with_positions(run.model, max_positions)
    graphs = {ENCODER: _encoder(model), DECODER: _decoder(model)}

    def fill(folder: Path) -> list[str]:
        (folder / "vocab").mkdir()
        vocabulary = read_vocabulary(run)
        for name, content in vocabulary.items():
            (folder / name).write_bytes(content)
        for name, graph in graphs.items():
            _write(folder / name, graph, max_positions)
        return [*graphs, *vocabulary]

    described = {name: graph.describe() for name, graph in graphs.items()}
    write_export(out, run, "onnx", fill, graphs=described, max_positions=max_positions)


def _encoder(model: Seq2Seq) -> _Graph:
    inputs = {"leaves": torch.tensor([[4, 5, 6, 4, 5, 6, 4], [5, 6, 4, 5, 6, 0, 0]])}
    axes = {"leaves": {0: "batch", 1: "leaves"}}
    if model.reads is not TREES:
        return _Graph(PlainEncoderStep(model), inputs, axes, _MEMORY)
    inputs["labels"] = torch.tensor([[1, 2, 1], [1, 2, 0]])
    inputs["spans"] = torch.tensor([[[0, 7, 3], [0, 2, 2], [2, 7, 3]], [[0, 5, 2], [1, 3, 2], [0, 0, 0]]])
    axes |= {name: {0: "batch", 1: "nodes"} for name in ("labels", "spans")}
    return _Graph(TreeEncoderStep(model), inputs, axes, _MEMORY)


def _decoder(model: Seq2Seq) -> _Graph:
    attention = [layer.cross_attention for layer in model.decoder.layers]
    layers, heads, size = len(attention), attention[0].num_heads, model.encoder.d_model // attention[0].num_heads
    # One tensor in two places would count as one input.
    keys, values, past_keys, past_values = (torch.zeros(layers, 3, heads, length, size) for length in (7, 7, 5, 5))
    given = [torch.tensor([4, 5, 6]), keys, values, torch.ones(3, 7, dtype=torch.bool), past_keys, past_values]
    inputs = dict(zip(("pieces", *_MEMORY, *_PAST), given, strict=True))
    axes: dict[str, Mapping[int, str]] = {"pieces": {0: "rows"}, "memory_mask": {0: "rows", 1: "positions"}}
    axes |= {name: {1: "rows", 3: "positions"} for name in _MEMORY[:2]}
    axes |= {name: {1: "rows", 3: "past"} for name in _PAST}
    return _Graph(DecoderStep(model), inputs, axes, ("log_probs", "present_keys", "present_values"))


def _write(path: Path, graph: _Graph, max_positions: int) -> None:
    most = {"leaves": max_positions, "past": max_positions - 1}  # tables of positions end there
    names = {name for axes in graph.axes.values() for name in axes.values()}
    dims = {name: Dim(name, min=0 if name == "past" else 1, max=most.get(name)) for name in names}
    shapes = tuple({place: dims[name] for place, name in graph.axes[given].items()} for given in graph.inputs)
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            graph.step.eval(),
            tuple(graph.inputs.values()),
            dynamo=True,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=shapes,
            verbose=False,
        )
        program.save(path, external_data=False)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep remarks of the exporter about itself off the user's terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
