"""Shuffled trees: every line with the parse of another line of its split that has as many words."""

from collections import Counter, defaultdict
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeproc.stages.parse_and_encode as job
import treeproc.stages.shuffle as shuffle
from treeproc.common.settings import UserError
from treeproc.inspect import describe
from treeproc.online.line_encoder import LineEncoder
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import describe_agreement, read_index
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages.shuffle import donor_windows, find_donors, next_other
from treeproc.subwords import LabelVocab
from treeproc.trees.controls import hash_examples
from treeproc.verify import verify

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]


def tree(number: int, length: int) -> str:
    """A tree over `length` words whose cut and label tell the line that it was made for."""
    leaves = [f"(T{number % 3} {WORDS[(number * 5 + i) % len(WORDS)]})" for i in range(length)]
    cut = 1 + number % (length - 1)
    return f"(S (A{number % 4} {' '.join(leaves[:cut])}) (B{number % 5} {' '.join(leaves[cut:])}))"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shuffled")
    lengths = [2 + n % 5 for n in range(40)] + [9]  # no other line has nine words
    (folder / "train.mrg").write_text("\n".join(tree(n, length) for n, length in enumerate(lengths)), encoding="utf-8")
    (folder / "test.mrg").write_text("\n".join(tree(n, 4) for n in range(50, 53)), encoding="utf-8")
    config = {
        "splits": {"train": {"source": [folder / "train.mrg"]}, "test": {"source": [folder / "test.mrg"]}},
        "format": "brackets",
        "parser": {"name": "given"},
        "subwords": {"vocab_size": 300},
        "rows_per_shard": 7,
        "workers": 0,
    }
    preprocess(PreprocessConfig.model_validate(config), folder / "data")
    return folder / "data"


def shuffled(data, out, **changes):
    values = {"parsed": data, "subwords": {"vocab_size": 300}, "tree": {"tree_source": "shuffled"}, "workers": 0} | changes
    return preprocess(PreprocessConfig.model_validate(values), out)


def rows_of(data, split: str) -> dict[int, dict]:
    return {row["example_id"]: row for shard in SplitShards(data / "encoded", split) for row in shard.rows()}


def shape(data, row: dict) -> tuple:
    """Labels and spans over words, without the nodes of split words."""
    names = LabelVocab.load(data / "encoded/vocab/labels.txt").names
    words = row["leaves"]["word_index"]
    nodes = zip(row["nodes"]["label"], row["spans"]["start"], row["spans"]["end"], strict=True)
    return tuple((names[n], int(words[a]), int(words[b - 1]) + 1) for n, a, b in nodes if not names[n].startswith("POS="))


def spans(nodes: tuple) -> tuple:
    return tuple((start, end) for _, start, end in nodes)


def num_words(row: dict) -> int:
    return int(row["leaves"]["word_index"][-1]) + 1


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_line_has_the_tree_of_another_of_its_length(data, tmp_path, split):
    index = shuffled(data, tmp_path / "out")
    before, after = rows_of(data, split), rows_of(tmp_path / "out", split)
    assert before.keys() == after.keys()
    trees = {where: defaultdict(Counter) for where in ("before", "after")}
    shapes = defaultdict(set)
    for row in before.values():
        shapes[num_words(row)].add(shape(data, row))
    for number, row in before.items():
        words = num_words(row)
        trees["before"][words][shape(data, row)] += 1
        trees["after"][words][shape(tmp_path / "out", after[number])] += 1
        for column in ("piece", "word_index", "pos_tag"):
            assert after[number]["leaves"][column].tolist() == row["leaves"][column].tolist()
        # No line has its own shape where a line of that length has another one.
        others = {spans(one) for one in shapes[words]} - {spans(shape(data, row))}
        assert (spans(shape(tmp_path / "out", after[number])) == spans(shape(data, row))) == (not others)
    # The trees of a length are dealt out anew: none is made up, and none is lost but for those that are passed over.
    assert all(trees["after"][words].keys() <= trees["before"][words].keys() for words in shapes)
    assert sum((trees["before"][words] - trees["after"][words]).total() for words in shapes) < len(before) / 4
    assert index["totals"][split]["lines_without_partner"] == (split == "train")


def test_the_pieces_of_the_data_set_are_named_where_the_usual_ones_do_not_suit(data, tmp_path):
    with pytest.raises(
        UserError, match=rf"not suit .*; parsed does not take the subwords of {data}: give subwords.vocab_size=300$"
    ):
        shuffled(data, tmp_path / "out", subwords={})
    shuffled(data, tmp_path / "out")  # the remedy works in the same folder


def test_partners_do_not_depend_on_shards_but_on_the_seed(data, tmp_path):
    shuffled(data, tmp_path / "one")
    shuffled(data, tmp_path / "other", tree={"tree_source": "shuffled", "seed": 2})
    whole = PreprocessConfig.model_validate(
        {
            "splits": {s: {"source": [data.parent / f"{s}.mrg"]} for s in ("train", "test")},
            "format": "brackets",
            "parser": {"name": "given"},
            "subwords": {"vocab_size": 300},
            "tree": {"tree_source": "shuffled"},
            "workers": 0,
        }
    )
    preprocess(whole, tmp_path / "whole")
    shapes = {
        name: [shape(tmp_path / name, row) for row in rows_of(tmp_path / name, "train").values()]
        for name in ("one", "other", "whole")
    }
    assert shapes["one"] == shapes["whole"] != shapes["other"]


def test_a_control_of_the_same_text_and_vocabulary(data, tmp_path):
    index, original = shuffled(data, tmp_path / "out"), read_index(data / "encoded")
    for name in ("text_fingerprint", "vocab_fingerprint"):
        assert index[name] == original[name]
    assert index["tree_fingerprint"] != original["tree_fingerprint"]
    assert not verify(tmp_path / "out").problems
    note = "shuffled trees: lines that keep their own tree, because no other line has as many words: 1"
    assert note in summary(index, tmp_path / "out") and note in describe(tmp_path / "out")[0]


def slow_agreement(own: dict[int, dict], given: dict[int, dict], data, out) -> dict[str, int]:
    """From the definition: nodes over words by line, as multisets."""
    counts = Counter()
    for number, row in own.items():
        mine, theirs = Counter(spans(shape(data, row))), Counter(spans(shape(out, given[number])))
        one = {"own_nodes": mine.total(), "given_nodes": theirs.total(), "shared_nodes": (mine & theirs).total()}
        counts.update(one | {"own_shapes": int(mine == theirs), "compared_lines": 1})
    return counts


@pytest.mark.parametrize("tree", [{"tree_source": "shuffled"}, {"tree_source": "random", "collapse_unary": False}])
def test_what_control_trees_share_with_the_own_trees_is_counted_and_told(data, tmp_path, tree):
    out, totals = tmp_path / "out", Counter()
    index = shuffled(data, out, tree=tree)
    for split in ("train", "test"):
        expected = slow_agreement(rows_of(data, split), rows_of(out, split), data, out)
        assert expected.items() <= index["totals"][split].items()
        totals.update(expected)
        f1 = 2 * expected["shared_nodes"] / (expected["own_nodes"] + expected["given_nodes"])
        same = expected["own_shapes"] / expected["compared_lines"]
        told = f"unlabelled F1 with the lines' own trees {f1:.2f}, {same:.1%} of the shapes are the same"
        assert f"control trees: {told}" in summary(index, out) and told in describe(out)[0]
    assert f"{2 * totals['shared_nodes'] / (totals['own_nodes'] + totals['given_nodes']):.2f}" in describe_agreement(index)
    assert not describe_agreement(read_index(data / "encoded")), "a parse is not a control"
    flat = {"splits": {"train": {"source": [data.parent / "train.mrg"]}}, "format": "brackets", "parser": {"name": "words"}}
    values = flat | {"tree": tree, "subwords": {"vocab_size": 300}, "workers": 0}
    assert not describe_agreement(preprocess(PreprocessConfig.model_validate(values), tmp_path / "flat")), "nothing was parsed"


def test_a_line_by_itself_has_no_partner(data, tmp_path):
    shuffled(data, tmp_path / "out")
    advised = r"but this is a single line; preprocess .* tree-attention evaluate, or of tree-attention score-lm$"
    with pytest.raises(UserError, match=f"has shuffled trees, which come from other lines of a split, {advised}"):
        LineEncoder(tmp_path / "out", given_trees=True)


def slow_donors(ids: list[int], lengths: list[int], seed: int, shapes: list | None = None) -> list[int]:
    """From the definition: the lines of a length in the order of their hashes, each with the place of the next one.

    With shapes, it is that of the next one of another shape if there is one.
    """
    donors = [0] * len(ids)
    for length in set(lengths):
        ring = [place for place, other in enumerate(lengths) if other == length]
        ring.sort(key=lambda place: int(hash_examples(np.array([ids[place]]), seed)[0]))
        for number, place in enumerate(ring):
            following = [*ring[number + 1 :], *ring[: number + 1]]
            others = [one for one in following if shapes and shapes[one] != shapes[place]]
            donors[place] = (others or following)[0]
    return donors


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4)), max_size=30, unique_by=lambda line: line[0]), st.integers(0, 3)
)
def test_donors_are_those_of_the_definition(lines, seed):
    ids, lengths = ([line[i] for line in sorted(lines)] for i in (0, 1))
    found = find_donors(np.array(ids, dtype=np.int64), np.array(lengths, dtype=np.int32), seed)
    assert found.tolist() == slow_donors(ids, lengths, seed)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_the_next_of_another_shape_is_that_of_the_definition(codes):
    expected = []
    for place, code in enumerate(codes):
        following = [*range(place + 1, len(codes)), *range(place + 1)]
        expected.append(next((one for one in following if codes[one] != code), following[0]))
    assert next_other(np.array(codes)).tolist() == expected


def test_windows_are_runs_of_shards_of_one_split(data):
    records = list(read_index(data / "parsed").records())
    assert [(record.split, record.rows) for record in records] == [("train", 7)] * 5 + [("train", 6), ("test", 3)]
    assert donor_windows(records, one_window=44) == [(0, 7)] * 7
    assert donor_windows(records, one_window=43, rows_of_window=14) == [(0, 2)] * 2 + [(2, 4)] * 2 + [(4, 6)] * 2 + [(6, 7)]


@pytest.mark.parametrize("most_open", [1, 100])
def test_in_large_data_partners_are_lines_of_one_window(data, tmp_path, monkeypatch, most_open):
    monkeypatch.setattr(job, "donor_windows", partial(donor_windows, one_window=43, rows_of_window=14))
    monkeypatch.setattr(shuffle, "MOST_OPEN", most_open)
    shuffled(data, tmp_path / "out")
    before, after = rows_of(data, "train"), rows_of(tmp_path / "out", "train")
    ids = sorted(before)
    kept = 0
    for first in range(0, len(ids), 14):  # two shards
        window = ids[first : first + 14]
        shapes = [spans(shape(data, before[n])) for n in window]
        donors = slow_donors(window, [num_words(before[n]) for n in window], 1, shapes)
        kept += sum(place == donor for place, donor in enumerate(donors))
        for number, donor in zip(window, donors, strict=True):
            assert shape(tmp_path / "out", after[number]) == shape(data, before[window[donor]])
    assert read_index(tmp_path / "out/encoded")["totals"]["train"]["lines_without_partner"] == kept
