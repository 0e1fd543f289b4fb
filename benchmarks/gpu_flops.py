"""Floating-point operations of matrix products on real tokens, and the peak rate of a GPU.

Shapes: D model, F feed-forward, V pieces. A product of [m, k] and [k, n] has 2 m k n operations.
"""

from dataclasses import dataclass

import numpy as np
import torch

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.structure import TreeStructure
from treenet.training.micro_batches import StepInputs
from treeproc.shards.schema import PAD_ID

# Dense bf16 rates with float32 sums, TFLOP/s, from the makers' data sheets.
PEAKS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70, "B200": 2250}


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak rate of bf16 products; None for a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


@dataclass(frozen=True)
class Work:
    """Real positions of a batch and their pairs; without trees, nodes and entries are 0."""

    leaves: int
    nodes: int
    targets: int
    encoder_pairs: int  # queries and keys of encoder self-attention
    decoder_pairs: int  # of causal self-attention
    cross_pairs: int
    entries: int  # weights of leaves and nodes in nodes; hierarchical accumulation multiplies vectors by these

    @classmethod
    def of(cls, batch: TreeBatch | StepInputs, tree: bool) -> "Work":
        batch = batch.batch if isinstance(batch, StepInputs) else batch  # a GPU gets more than the batch
        leaves = (~batch.leaf_pad_mask).sum(1).numpy(force=True).astype(np.int64)
        targets = (batch.tgt_out != PAD_ID).sum(1).numpy(force=True).astype(np.int64)
        nodes, pairs, entries = np.zeros_like(leaves), leaves**2, 0
        if tree:
            assert isinstance(batch.structure, TreeStructure)
            nodes = (~batch.structure.node_pad_mask).sum(1).numpy(force=True).astype(np.int64)
            entries = count_entries(batch.structure)
            pairs = pairs.sum() + entries
        return cls(
            leaves=int(leaves.sum()),
            nodes=int(nodes.sum()),
            targets=int(targets.sum()),
            encoder_pairs=int(np.sum(pairs)),
            decoder_pairs=int((targets * (targets + 1) // 2).sum()),
            cross_pairs=int((targets * (leaves + nodes)).sum()),
            entries=entries,
        )


def count_entries(structure: TreeStructure) -> int:
    """Count leaves and nodes of all subtrees: the keys of nodes, and the terms of their sums."""
    start, end, subtree_end = (
        x.numpy(force=True).astype(np.int64) for x in (structure.start, structure.end, structure.subtree_end)
    )
    real = ~structure.node_pad_mask.numpy(force=True)
    below = subtree_end - np.arange(start.shape[1])
    return int(((end - start) + below)[real].sum())


def encoder_layer_flops(work: Work, d_model: int, d_ff: int) -> int:
    """Return the FLOPs of a forward pass of one encoder layer, with accumulation."""
    positions = work.leaves + work.nodes
    return 2 * positions * (4 * d_model**2 + 2 * d_model * d_ff) + 4 * d_model * work.encoder_pairs + 2 * d_model * work.entries


def training_flops(work: Work, model: ModelConfig, pieces: int) -> int:
    """Return the FLOPs of forward and backward pass of a translation model: three times the forward pass."""
    d_model, d_ff, positions = model.d_model, model.d_ff, work.leaves + work.nodes
    decoder_layer = 2 * work.targets * (6 * d_model**2 + 2 * d_model * d_ff) + 2 * positions * 2 * d_model**2
    decoder_layer += 4 * d_model * (work.decoder_pairs + work.cross_pairs) + 2 * d_model * work.entries
    layers = model.num_encoder_layers * encoder_layer_flops(work, d_model, d_ff) + model.num_decoder_layers * decoder_layer
    return 3 * (layers + 2 * work.targets * d_model * pieces)
