"""Kernels that a layer launches on an accelerator, counted on the device "meta": a change that adds some should say why."""

import pytest
import torch
from meta_device import DeviceOperations
from strategies import Tree, right_branching
from test_accumulation import UNARY, build_structure
from test_device_spans import build_compact

from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import EncoderLayer
from treenet.structure import TreeStructure
from treenet.structure.prepare import prepare

TREES = [right_branching(9), UNARY, Tree(3)]
CONFIG = TreeAttentionConfig()
D_MODEL = 16


def count_layer(structure: TreeStructure | None) -> int:
    """Kernels of the forward and backward passes of a layer, over trees or without."""
    attention = SelfAttention(D_MODEL, 2, 0.0, CONFIG if structure else None)
    layer = EncoderLayer(ModelConfig(d_model=D_MODEL, d_ff=32, num_heads=2, dropout=0.0), attention).to("meta")
    x = torch.zeros(len(TREES), 32, D_MODEL, device="meta", requires_grad=True)
    if structure:
        x = torch.zeros(len(TREES), structure.num_leaves + structure.num_nodes, D_MODEL, device="meta", requires_grad=True)
    mask = None if structure else padding_to_attend_mask(torch.zeros(x.shape[:2], dtype=torch.bool, device="meta"))
    inputs = (mask, structure) if structure else (mask,)
    layer(x, *inputs).sum().backward()  # gradients are there from now on
    with DeviceOperations() as seen:
        layer(x, *inputs).sum().backward()
    assert not seen.copies
    return seen.kernels.total()


def compact() -> TreeStructure:
    return prepare(build_compact(TREES).to("meta"), CONFIG, torch.float32, torch.float32)


def lists() -> TreeStructure:
    return build_structure(TREES, sparse=False).to("meta")


# Attention is composed of several operations on "meta". A layer over index lists is what accelerators ran before compact trees;
# to prepare these is done once a batch.
KERNELS = {"plain": 65, "compact": 118, "lists": 138, "prepare": 70}


@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_launches_no_more_than_before(name):
    if name == "prepare":
        structure = build_compact(TREES).to("meta")
        with DeviceOperations() as seen:
            prepare(structure, CONFIG, torch.float32, torch.float32)
        count = seen.kernels.total()
    else:
        count = count_layer({"plain": lambda: None, "compact": compact, "lists": lists}[name]())
    assert count <= KERNELS[name]
