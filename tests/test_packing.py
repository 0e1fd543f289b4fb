"""Packed batches: one buffer holds all tensors of a batch, whatever an encoder reads, and gives them back bit by bit."""

import pickle
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from meta_device import DeviceOperations
from model_cases import batch_of
from strategies import batches, binary_trees, right_branching
from torch import Tensor

from treenet.data import input_kinds
from treenet.data.input_kinds import LEAVES, TREES, InputKind
from treenet.data.packing import ALIGNMENT, pack
from treenet.structure import Structure

KINDS = [kind for kind in vars(input_kinds).values() if isinstance(kind, InputKind)]


def assert_same(first: Any, second: Any) -> None:
    """Equal classes, values, types and bits."""
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second)
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype and np.array_equal(first, second)
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for pair in zip(first, second, strict=True):
            assert_same(*pair)
    elif is_dataclass(first):
        for field in fields(first):
            assert_same(getattr(first, field.name), getattr(second, field.name))
    else:
        assert first == second


def assert_survives(value: Any) -> None:
    packed = pack(value)
    assert packed.buffer.dtype == torch.uint8
    assert_same(packed.unpack(), value)
    layout = pickle.loads(pickle.dumps(packed.layout))
    assert_same(type(packed)(packed.buffer.clone(), layout).unpack(), value)


@pytest.mark.parametrize("reads", KINDS, ids=str)
@num_examples(25)
@given(data=st.data())
def test_a_batch_of_any_kind_comes_back_bit_by_bit(reads, data):
    kinds = st.lists(binary_trees(), min_size=1, max_size=3) if reads.binary else batches()
    assert_survives(batch_of(data.draw(kinds), reads))


@pytest.mark.parametrize("reads", KINDS, ids=str)
def test_deep_chains_come_back(reads):
    """Trees of more than a hundred levels, whose index lists and windows are of other kinds."""
    assert_survives([batch_of([right_branching(150), right_branching(1)], reads), batch_of([right_branching(3)], reads)])


def test_the_tensors_of_several_batches_are_in_one_buffer():
    values = [batch_of([right_branching(length)], TREES) for length in (1, 5, 9)]
    packed = pack(values)
    for batch in packed.unpack():
        for tensor in (batch.leaf_pad_mask, batch.node_pad_mask):
            assert tensor.untyped_storage().data_ptr() == packed.buffer.untyped_storage().data_ptr()
            assert tensor.storage_offset() % ALIGNMENT == 0


@dataclass
class _Wide(Structure):
    large: Tensor
    small: Tensor
    nothing: Tensor | None
    name: str


class _Pair(NamedTuple):
    first: Tensor
    second: int


@dataclass
class _OfUsers(Structure):
    pair: _Pair
    kind: str = field(init=False, default="x")


def test_a_structure_of_a_user_may_have_named_tuples_and_fields_without_an_argument():
    moved = _OfUsers(_Pair(torch.arange(3), 3)).to("meta")
    assert (moved.pair.first.device.type, moved.pair.second, moved.kind) == ("meta", 3, "x") and type(moved.pair) is _Pair


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5))
def test_numbers_beyond_int32_keep_their_bits(large, small):
    value = _Wide(torch.tensor(large, dtype=torch.int64), torch.tensor(small, dtype=torch.int64)[:, None], None, "x")
    assert_survives(value)
    assert_survives(_Wide(value.large.double(), value.small.to(torch.int16).t(), value.small > 0, ""))


def test_indices_take_half_of_their_bytes():
    value = torch.arange(100_000)
    assert pack(value).layout.num_bytes <= 4 * len(value) + ALIGNMENT
    assert pack(value + 2**40).layout.num_bytes >= 8 * len(value)


def test_a_buffer_that_is_there_is_used():
    room, asked = torch.zeros(100_000, dtype=torch.uint8), []

    def allocate(num_bytes: int) -> Tensor:
        asked.append(num_bytes)
        return room

    packed = pack(batch_of([right_branching(4)], LEAVES), allocate)
    assert packed.buffer.data_ptr() == room.data_ptr() and packed.buffer.shape == (asked[0],)
    assert_same(packed.unpack(), batch_of([right_branching(4)], LEAVES))


@pytest.mark.parametrize("reads", KINDS, ids=str)
def test_a_batch_goes_to_an_accelerator_in_one_copy(reads):
    """`meta` holds no data: what would have to look at a value raises. A kernel widens the indices."""
    batch = batch_of([right_branching(length) for length in (3, 5)], reads)
    with DeviceOperations() as seen:
        there = batch.to("meta")
    assert (seen.copies.total(), seen.kernels.total()) == (1, 1)
    assert there.leaf_pieces.device.type == "meta"
    for part in fields(there):
        mine, theirs = getattr(there, part.name), getattr(batch, part.name)
        if isinstance(mine, Tensor):
            assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert batch.to("cpu").leaf_pieces is batch.leaf_pieces


def test_places_in_a_buffer_make_no_graph_of_their_own():
    """torch.compile takes a place that equals a size for that size: 16 would be the place of the second tensor, without a gap."""
    graphs = []

    def compile_eager(graph, _):
        graphs.append(graph)
        return graph.forward

    add = torch.compile(lambda pair: pair[0].sum() + pair[1].sum(), dynamic=True, backend=compile_eager)
    for first, second in ((16, 30), (20, 31), (40, 50)):
        values = [torch.ones(first, dtype=torch.int64), torch.ones(second, dtype=torch.int64)]
        assert add(pack(values).unpack()) == first + second
    assert len(graphs) == 1
