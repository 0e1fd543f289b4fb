"""Encoder and decoder step as ONNX graphs: encoder.onnx, decoder.onnx."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from treenet.data.input_kinds import TREES
from treenet.extras.export.folder import read_vocabulary, write_export
from treenet.extras.export.steps import DecoderStep, PlainEncoderStep, TreeEncoderStep, with_positions
from treenet.models.composed import Seq2Seq
from treenet.runs.loading import LoadedRun
from treeproc.common.settings import UserError

EXPORTED = ("transformer", "tree_transformer")
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
# Protocol buffers, which ONNX files are, end at 2 GiB.
_MOST_BYTES = 2 * 10**9
_MEMORY, _PAST = ("memory_keys", "memory_values", "memory_mask"), ("past_keys", "past_values")


# Names of the dimensions of inputs. All other sizes are fixed.
Axes = Mapping[str, Mapping[int, str]]


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
    those of more than 2 GB.
    """
    if (name := run.config.model.name) not in EXPORTED:
        raise UserError(f"ONNX takes {' and '.join(EXPORTED)}, but the run is {name}; --to safetensors takes every model")
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
