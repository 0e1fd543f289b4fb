"""Encoder layers for benchmarks/gpu.py: ours with and without trees, PyTorch's, and one with FlexAttention over packed rows.

Shapes: B batch, S positions, D model, H heads, T = all positions of a batch, concatenated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gpu_flops import count_entries
from gpu_measure import count_kernels, peak_gib
from gpu_report import Report
from layer import LayerConfig, TreeDefaults
from layer_trees import random_document, random_tree
from measure import Step, time_interleaved
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from treenet.layers.attention import SelfAttention
from treenet.layers.scaled_dot_product import merge_heads
from treenet.structure import TreeStructure
from treenet.structure.prepare import prepare


@dataclass(frozen=True)
class LayerCase:
    """Trees of a batch, all of the same size."""

    batch: int
    leaves: int
    nodes: int
    document: bool = False
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8


CASES = {
    "base, sentences": LayerCase(682, 28, 20),
    "base, documents": LayerCase(9, 2000, 1700, document=True),
    "big, sentences": LayerCase(682, 28, 20, d_model=1024, d_ff=4096, num_heads=16),
}
QUICK_CASES = {"tiny, sentences": LayerCase(4, 12, 8, d_model=32, d_ff=64, num_heads=4)}


class PackedAttention(nn.Module):
    """A plain self-attention over concatenated sentences, without padding. A position attends to its own sentence."""

    def __init__(self, attention: SelfAttention, sentence: Tensor):
        """`sentence` [T] is the sentence of each position."""
        super().__init__()
        self.attention = attention
        self.mask: BlockMask = create_block_mask(
            lambda b, h, query, key: sentence[query] == sentence[key], None, None, len(sentence), len(sentence), sentence.device
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [1, T, D] -> [1, T, D]."""
        queries, keys, values = map(self.attention.split_heads, self.attention.project(x))
        return self.attention.output(merge_heads(flex_attention(queries, keys, values, block_mask=self.mask)))


def build_structure(case: LayerCase, device: torch.device) -> TreeStructure:
    """Build random trees in the form for the device, with their maps, which all layers share."""
    rng = np.random.default_rng(0)
    make = random_document if case.document else random_tree
    spans = [make(case.leaves, case.nodes, rng) for _ in range(case.batch)]
    build = TreeStructure.build if device.type == "cpu" else TreeStructure.build_compact
    on_gpu = device.type == "cuda"
    structure = build([case.leaves] * case.batch, spans).to(device)
    return prepare(structure, TreeDefaults(), torch.float32, torch.bfloat16 if on_gpu else torch.float32, blocks=on_gpu)


def measure_layers(report: Report, name: str, case: LayerCase, device: torch.device, compiled: bool, rounds: int) -> None:
    """Measure forward and backward pass of every kind of layer on the same positions, in turn."""
    structure = build_structure(case, device)
    width = structure.num_leaves + structure.num_nodes
    config = LayerConfig(case.d_model, case.d_ff, case.num_heads)
    source = torch.randn(case.batch, width, case.d_model, device=device, requires_grad=True)
    packed = torch.randn(1, case.batch * width, case.d_model, device=device, requires_grad=True)
    tree, plain, flex = (config.encoder_layer(trees).to(device) for trees in (TreeDefaults(), None, None))
    theirs = nn.TransformerEncoderLayer(case.d_model, case.num_heads, case.d_ff, dropout=0.0, batch_first=True).to(device)

    def compile_if(module: nn.Module) -> Callable:
        return torch.compile(module) if compiled else module

    half = device.type == "cuda"
    run = {"tree": compile_if(tree), "plain": compile_if(plain), "torch.nn": compile_if(theirs)}
    steps = {
        "tree": Step([source, *tree.parameters()], lambda: run["tree"](source, None, structure), half),
        "plain": Step([source, *plain.parameters()], lambda: run["plain"](source), half),
        "torch.nn": Step([source, *theirs.parameters()], lambda: run["torch.nn"](source), half),
    }
    if compiled and device.type == "cuda":  # on CPUs FlexAttention has no backward pass
        sentence = torch.arange(case.batch, device=device).repeat_interleave(width)
        flex.self_attention = PackedAttention(flex.self_attention, sentence)
        packed_layer = torch.compile(flex)
        steps["FlexAttention, packed"] = Step([packed, *flex.parameters()], lambda: packed_layer(packed), half)
    times = time_interleaved(steps, device, rounds, float("inf"))
    entries = count_entries(structure)
    for kind, step in steps.items():
        report.add(
            "Encoder layer, forward and backward",
            trees=name,
            layer=kind,
            compiled=compiled,
            ms=1e3 * times.best(kind),
            **{"to plain": times.ratio(kind, "plain")[1]["median"]},
            **{"memory, GiB": peak_gib(step, device), **count_kernels(step, device).columns()},
            entries=entries if kind == "tree" else None,
        )
