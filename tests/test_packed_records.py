"""Packed records are the records that were packed, in a tenth of the memory."""

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treeproc.shards.records import PackedRecords, RecordSlots
from treeproc.shards.store import ShardRecord, in_index_order

NUMBERS = st.dictionaries(st.text(max_size=4), st.integers(-(2**62), 2**62), max_size=3)
RECORDS = st.builds(
    ShardRecord,
    name=st.text(min_size=1, max_size=9), split=st.sampled_from(["train", "valid", "newstest"]), index=st.integers(0, 2**40),
    rows=st.integers(0, 2**40), bytes=st.integers(0, 2**60), sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    fingerprint=st.text(max_size=16), counts=NUMBERS, longest=NUMBERS,
)  # fmt: skip


@num_examples(40)
@given(records=st.lists(RECORDS, max_size=8), data=st.data())
def test_packed_records_are_those_that_were_packed(records, data):
    packed = PackedRecords(records)
    assert list(packed) == records == [packed[i] for i in range(-len(records), 0)] and packed == records and records == packed
    places = data.draw(st.lists(st.sampled_from(range(len(records))), max_size=5)) if records else []
    taken = packed.take(places)
    assert list(taken) == [records[place] for place in places] and packed[1:5] == records[1:5]
    for record in records:  # the records that share memory can grow
        taken.append(record)
    assert list(taken)[len(places) :] == records and packed == records
    if records:
        other = [*records[:-1], replace(records[-1], rows=records[-1].rows + 1)]
        assert packed != other and other != packed and packed != records[:-1] and packed != 3


@num_examples(40)
@given(records=st.lists(RECORDS, min_size=1, max_size=8), data=st.data())
def test_slots_are_filled_in_any_order(records, data):
    slots, there = RecordSlots(len(records)), set()
    for place in data.draw(st.lists(st.sampled_from(range(len(records))))):
        if data.draw(st.booleans()):
            slots.put(place, records[place])
            there.add(place)
        else:
            slots.put(place, None)
            there.discard(place)
        expected = [record if i in there else None for i, record in enumerate(records)]
        assert list(slots) == expected and slots[:3] == expected[:3]
        assert [slots.holds(i) for i in range(len(records))] == [i in there for i in range(len(records))]
        assert slots.missing() == [i for i in range(len(records)) if i not in there]
        assert list(slots.present()) == [record for record in expected if record]


def test_the_order_of_the_index_is_that_of_splits_and_shards():
    names = [("newstest", 1), ("train", 2), ("valid", 0), ("train", 0), ("newstest", 0), ("train", 1)]
    records = [ShardRecord(f"{split}-{index}", split, index, 1, 1, "", "") for split, index in names]
    for given_records in (records, PackedRecords(records), iter(records)):
        assert [(r.split, r.index) for r in in_index_order(given_records)] == [
            ("train", 0), ("train", 1), ("train", 2), ("valid", 0), ("newstest", 0), ("newstest", 1),
        ]  # fmt: skip


@pytest.mark.parametrize("count", [500])
def test_a_record_takes_a_few_hundred_bytes(count):
    """The record is like those of the parsed stage, with 60 different counts."""
    packed = RecordSlots(count)
    tracemalloc.start()
    try:
        for number in range(count):
            counts = {f"label.{label}": (number * 7919 + label * 104729) % 4001 for label in range(60)}
            sha256 = f"{number * 2654435761 % 2**61:064x}"
            packed.put(
                number,
                ShardRecord(
                    f"train-{number:05d}-of-{count:05d}.arrow", "train", number, 2000, 9, sha256, "f" * 16, counts=counts
                ),
            )
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 600 * count
