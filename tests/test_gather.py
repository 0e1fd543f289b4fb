"""Batches that are gathered from many record batches at once hold what reading row by row gives."""

from threading import Barrier, current_thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches
from test_packing import KINDS, assert_same
from toydata import write_toy_data
from toylabels import make_rows, write_labelled

from treenet.data.batch import collate
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import TREES
from treenet.data.labelled import LabelledSource, PhraseSource
from treenet.structure.base import Ragged, SpanTable
from treeproc.shards.gather import Gather
from treeproc.shards.shard import SplitShards

# Lists by record batch and row.
LISTS = st.lists(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=4), min_size=1, max_size=4)


def columns_of(rows: list[list[int]], first: int) -> dict:
    """Columns as a shard has them: numbers, lists of numbers, and lists of structs."""
    edges = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    flat = np.array([item for row in rows for item in row])
    structs = {"half": flat.astype(np.int16), "whole": flat.astype(np.int32)}
    ids = np.arange(first, first + len(rows), dtype=np.int64)
    return {"example_id": ids, "tiny": (edges, flat.astype(np.int8)), "structs": (edges, structs)}


def gather_of(lists: list[list[list[int]]], batch_rows: int, most_open: int = 100) -> tuple[Gather, list[int]]:
    """Shards that hold these rows, and the numbers of those that were opened, in order."""
    starts, opened = np.cumsum([0, *map(len, lists)]), []

    def open_shard(number: int) -> list[dict]:
        rows, first = lists[number], int(starts[number])
        opened.append(number)
        return [columns_of(rows[i : i + batch_rows], first + i) for i in range(0, len(rows), batch_rows)]

    return Gather([len(rows) for rows in lists], open_shard, batch_rows, most_open), opened


@pytest.mark.parametrize("shards", [1, 2])
def test_one_shard_is_opened_by_the_thread_that_asks(shards):
    """So its failures and their times are those of this thread."""
    opened = []

    def open_shard(number: int) -> list[dict]:
        opened.append(current_thread())
        return [{"example_id": np.array([number])}]

    Gather([1] * shards, open_shard, 1, at_once=2).pick(range(shards))
    assert len(opened) == shards and (current_thread() in opened) == (shards == 1)


@given(LISTS, st.data(), st.integers(1, 4), st.integers(1, 5))
def test_rows_of_any_shards_come_in_the_order_asked_for(lists, data, batch_rows, most_open):
    gather, opened = gather_of(lists, batch_rows, most_open)
    every = [row for rows in lists for row in rows]
    if not every:
        return
    numbers = st.lists(st.integers(0, len(every) - 1), max_size=9)
    earlier, times = [], data.draw(st.integers(1, 4))
    for _ in range(times):
        chosen = data.draw(numbers)
        earlier.append((chosen, gather.pick(chosen)))
        assert len(gather._open) <= max(most_open, len(lists))
    for chosen, picked in earlier:  # rows that were picked can be read when their shards have been closed
        assert picked.values("example_id").tolist() == chosen
        for column, part, dtype in (("tiny", None, np.int8), ("structs", "half", np.int16), ("structs", "whole", np.int32)):
            flat, lengths = picked.items(column, part)
            assert flat.dtype == dtype and flat.tolist() == [item for row in chosen for item in every[row]]
            assert lengths.tolist() == [len(every[row]) for row in chosen]


def test_shards_are_opened_when_needed_and_those_not_needed_for_longest_are_closed():
    gather, opened = gather_of([[[n]] for n in range(10)], 4, most_open=4)
    gather.pick([3, 1, 3])
    assert opened == [1, 3]
    gather.pick([0, 1])
    gather.pick([5])
    assert opened == [1, 3, 0, 5] and len(gather._open) == 4
    gather.pick([6])
    assert len(gather._open) == 2, "half of the limit, or every batch would close some"
    gather.pick([5, 6])
    assert opened == [1, 3, 0, 5, 6]
    gather.pick([0])
    assert opened == [1, 3, 0, 5, 6, 0]
    assert gather.pick(range(10)).values("example_id").tolist() == list(range(10)), "a batch may need more than the limit"


def test_shards_are_opened_several_at_a_time_where_that_is_asked_for():
    """Four are on their way together before any is there; the rows are the same, and the first error is raised."""
    together = Barrier(4, timeout=30)

    def open_shard(number: int) -> list[dict]:
        together.wait()
        if number >= 6:
            raise ValueError(f"shard {number}")
        return [{"example_id": np.array([2 * number, 2 * number + 1])}]

    gather = Gather([2] * 8, open_shard, 2, at_once=4)
    assert gather.pick([7, 0, 3, 4]).values("example_id").tolist() == [7, 0, 3, 4] and len(gather._open) == 4
    with pytest.raises(ValueError, match="^shard 6$"):
        gather.pick([15, 0, 12, 8, 10])
    assert gather.pick([9, 0]).values("example_id").tolist() == [9, 0]


def test_no_address_can_be_wrong():
    columns = columns_of([[1, 2], [], [3]], 0)

    def gather(*batches: dict) -> Gather:
        return Gather([len(batch["example_id"]) for batch in batches], lambda number: [batches[number]], 4)

    for row in (-1, 3):
        with pytest.raises(IndexError):
            gather(columns).pick([row])
    for edges in ([0, 2, 2, 4], [0, 3, 2, 3], [-1, 2, 2, 3], [0, 2, 3]):
        with pytest.raises(ValueError, match="must ascend"):
            gather(columns | {"tiny": (np.array(edges), columns["tiny"][1])}).pick([0])
    with pytest.raises(ValueError, match="a number for each row"):
        gather(columns | {"label": np.zeros(2)}).pick([0])
    with pytest.raises(ValueError, match="of one type"):
        other = columns | {"tiny": (columns["tiny"][0], columns["tiny"][1].astype(np.int16))}
        gather(columns, other).pick([0, 3])
    with pytest.raises(ValueError, match="the same columns"):
        gather(columns, {"example_id": columns["example_id"]}).pick([0, 3])
    with pytest.raises(ValueError, match="without gaps"):
        gather(columns | {"label": np.zeros(6)[::2]}).pick([0])


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy_data(tmp_path_factory.mktemp("toy"), shards=3, arcs=True) / "encoded"


@pytest.mark.parametrize("reads", KINDS, ids=str)
def test_a_batch_equals_its_rows_one_by_one(toy, reads):
    shards = {shard.record.index: shard for shard in SplitShards(toy, "train")}
    for kind in {reads, reads.for_device("meta")}:
        source = ExampleSource(toy, "train", kind)
        random = np.random.default_rng(0)
        for size in (1, 7, 40):
            rows = random.choice(len(source), size, replace=False)
            places = zip(source.lengths["shard"][rows].tolist(), source.lengths["row"][rows].tolist(), strict=True)
            assert_same(source.batch(rows), collate([shards[shard].row(row) for shard, row in places], kind))


def test_phrases_are_cut_out_of_their_examples(tmp_path):
    rows = make_rows(12)
    source = PhraseSource(write_labelled(tmp_path / "data", {"train": rows}, shards=3) / "encoded", "train")
    chosen = np.random.default_rng(0).choice(len(source), 30, replace=False)
    batch = source.batch(chosen)
    for place, phrase in enumerate(chosen):
        row, start, end = source._row[phrase], source._start[phrase], source._end[phrase]
        pieces = rows[source.lengths["example_id"][phrase]]["leaves"]["piece"][start:end]
        assert batch.leaf_pieces[place][~batch.leaf_pad_mask[place]].tolist() == pieces and row < 12
    source._gather._most_open = 0
    source._gather._close()  # as with more shards than may be open
    assert source.batch(chosen).leaf_pieces.equal(batch.leaf_pieces)


@given(batches())
def test_ragged_rows_read_like_a_list(trees):
    rows = [tree.span_array for tree in trees]
    ragged = Ragged.of(rows)
    assert Ragged.of(ragged) is ragged and len(ragged) == len(rows)
    for mine, theirs in zip([*ragged, ragged[0], *ragged[1:]], [*rows, rows[0], *rows[1:]], strict=True):
        assert np.array_equal(mine, theirs)
    tables = [SpanTable.build([tree.num_leaves for tree in trees], given) for given in (rows, ragged)]
    for name in ("start", "end", "subtree_end", "node_counts"):
        assert np.array_equal(*(getattr(table, name) for table in tables))
    for b, row in enumerate(rows):
        assert np.array_equal(tables[0].start[b, : len(row)], row[:, 0]) and not tables[0].start[b, len(row) :].any()


def test_classes_of_a_batch_are_those_of_its_rows(tmp_path):
    rows = make_rows(30)
    encoded = write_labelled(tmp_path / "data", {"train": rows}, shards=3) / "encoded"
    source = LabelledSource(encoded, "train", TREES, phrases=True)
    chosen = np.random.default_rng(0).choice(len(source), 20, replace=False)
    batch, counted = source.batch(chosen), 0
    width = batch.leaf_pieces.shape[1]
    for place, row in enumerate(rows[source.lengths["example_id"][number]] for number in chosen):
        leaves, nodes = batch.position_labels[place].tolist()[:width], batch.position_labels[place].tolist()[width:]
        of_nodes = [row["label"], *row["node_labels"][1:]]
        assert leaves == row["leaf_labels"] + [-1] * (width - len(row["leaf_labels"]))
        assert nodes == of_nodes + [-1] * (len(nodes) - len(of_nodes)) and batch.labels[place] == row["label"]
        counted += sum(label != -1 for label in row["leaf_labels"] + of_nodes)
    assert source.target_tokens(chosen) == counted
