"""Filters: dropped examples and reasons, duplicates and overlap over all of a split, the text stage's bytes after a kill."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treeproc.common.settings import UserError
from treeproc.shards.shard import Shard
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.filters import FilterConfig, drop_reason, script_share
from treeproc.stages.inputs import Inputs, SplitFiles
from treeproc.stages.job_report import DROPPED, line_list
from treeproc.stages.keys import later_duplicates
from treeproc.stages.preprocess import preprocess
from treeproc.stages.text_warnings import TextNotices
from treeproc.stages.text_work import TextWork, remove_work

DEFAULT = FilterConfig()
LIMITS = FilterConfig(max_words=3, max_word_chars=10)


@pytest.mark.parametrize(
    ("source", "target", "split", "reason"),
    [
        ("a b", "c", "train", None),
        ("", "c", "test", "empty_source"),
        ("a", "", "train", "empty_target"),
        ("\u00a0", "c", "test", "empty_source"),
        ("\u200b", "c", "test", "empty_source"),
        ("\ufeff \u00ad\u2028\u2060\x01", "c", "train", "empty_source"),
        ("\u3164\u2800\ufe0f\u034f", "c", "train", "empty_source"),  # fillers
        ("\u2764\ufe0f", "c", "train", None),
        ("a", "\u200b\u00a0", "test", "empty_target"),
        ("\u200bx", ".\u200b", "train", None),
        ("a", None, "train", None),
        ("a b c d", "e", "train", "source_too_long"),
        ("a b c", "e", "train", None),
        ("a", "b c d e", "train", "target_too_long"),
        ("a" * 11, "b", "train", "source_word_too_long"),
        ("a b c d", "b" * 11, "test", None),
        ("a\ufffd", "b", "train", "source_damaged"),
        ("a", "b\x85", "train", "target_damaged"),
        ("a", "b\x00", "test", None),
        ("a\tb\u00a0\u2028", "b", "train", None),
    ],
)
def test_drop_reasons(source, target, split, reason):
    assert drop_reason(source, target, split, LIMITS) == reason


@pytest.mark.parametrize(
    ("source", "target", "reason"), [("a b c", "d e", None), ("a b c d", "e f", "ratio"), ("a", "b c", "ratio")]
)
def test_ratio(source, target, reason):
    assert drop_reason(source, target, "train", FilterConfig(max_ratio=1.5)) == reason
    assert drop_reason(source, target, "train", FilterConfig()) is None
    assert drop_reason(source, target, "test", FilterConfig(max_ratio=1.5)) is None


@pytest.mark.parametrize(
    ("source", "target", "split", "reason"),
    [
        ("<bt> a b c", "d e", "train", None),
        ("<bt> a", "b c", "train", "ratio"),
        ("a b c", "<bt> d", "train", "ratio"),
        ("<2ru> \u044f", "a", "train", None),
        ("<2ru> a \u0434\u0430", "a b", "train", None),
        ("<2ru> ab \u0434", "a b", "train", "source_script"),
        ("<bt> ", "b", "test", "empty_source"),
        ("<bt> \u200b", "b", "train", "empty_source"),
        ("b", "<bt>", "valid", "empty_target"),
        ("<xx>", "b", "valid", None),  # text
    ],
)
def test_a_tag_is_no_word_of_its_line(source, target, split, reason):
    config = FilterConfig(max_ratio=1.5, source_script="cyrillic" if "<2ru>" in source else None)
    assert drop_reason(source, target, split, config, ["<2ru>", "<bt>"]) == reason


def test_a_tag_counts_for_the_length_of_a_line():
    assert drop_reason("<bt> a b c", "d", "train", LIMITS, ["<bt>"]) == "source_too_long"


def test_damage_may_be_allowed():
    assert drop_reason("a\x01", "b", "train", FilterConfig(drop_damaged=False)) is None


def test_scripts():
    assert script_share("Größe 12!", "latin") == 1 and script_share("123", "cyrillic") == 1
    assert script_share("abв", "cyrillic") == pytest.approx(1 / 3) and script_share("かカ漢", "kana") == pytest.approx(2 / 3)
    config = FilterConfig(target_script="latin", min_script_share=0.5)
    assert drop_reason("что", "что is", "train", config) == "target_script"
    assert drop_reason("что", "a что is it", "train", config) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30))
@num_examples(100)
def test_later_duplicates_against_a_set(pairs):
    seen, expected = set(), []
    for pair in pairs:
        expected.append(pair in seen)
        seen.add(pair)
    assert later_duplicates(np.array(pairs, dtype=np.uint64).tobytes()).tolist() == expected


def files(folder, **splits) -> dict[str, SplitFiles]:
    """Parallel files of `source target` pairs, one word a side."""
    out = {}
    for split, pairs in splits.items():
        if isinstance(pairs, int):
            out[split] = SplitFiles(hold_out=pairs)
            continue
        paths = [folder / f"{split}.{side}" for side in "ab"]
        for i, path in enumerate(paths):
            path.write_text("".join(f"{pair.split('|')[i]}\n" for pair in pairs))
        out[split] = SplitFiles(source=[paths[0]], target=[paths[1]])
    return out


def write(folder, inputs: Inputs, filters=DEFAULT, rows_per_shard=2) -> tuple[dict[str, list[dict]], dict[str, int]]:
    """Rows of every split, and the summed counts of the training split."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    with line_list(folder / DROPPED) as dropped:
        records = list(TextWork(folder, inputs, filters, {}).write("mark", rows_per_shard, TextNotices(), dropped))
    remove_work(folder)
    rows, counts = {split: [] for split in inputs.splits}, {}
    for record in records:
        rows[record.split] += Shard(folder / "text", record).rows()
        for name, count in record.counts.items() if record.split == "train" else ():
            counts[name] = counts.get(name, 0) + count
    return rows, counts


def ids(rows: list[dict]) -> list[int]:
    return [row["example_id"] for row in rows]


def test_the_first_of_equal_pairs_stays_over_all_shards(tmp_path):
    splits = files(tmp_path, train=["a|b", "c|d", "a|c", "a|b", "c|d", "a|b", "e|f"], valid=["a|b", "a|b"])
    rows, counts = write(tmp_path / "out", Inputs(splits, "parallel", "none", None), FilterConfig(drop_duplicates=True))
    assert ids(rows["train"]) == [0, 1, 2, 6] and counts == {"dropped.duplicate": 3} and ids(rows["valid"]) == [0, 1]
    rows, counts = write(tmp_path / "all", Inputs(splits, "parallel", "none", None))
    assert ids(rows["train"]) == list(range(7)) and counts == {}


@pytest.mark.parametrize(("overlap", "left"), [("none", [0, 1, 2, 3]), ("example", [1, 2, 3]), ("source", [2, 3])])
def test_overlap_with_valid_and_test(overlap, left, tmp_path):
    splits = files(tmp_path, train=["a|b", "c|x", "e|f", "b|a"], valid=["a|b"], test=["c|d"])
    rows, counts = write(tmp_path / "out", Inputs(splits, "parallel", "none", None), FilterConfig(drop_overlap=overlap))
    assert ids(rows["train"]) == left and counts.get("dropped.overlap", 0) == 4 - len(left)


def test_hold_out_takes_every_nth_from_train(tmp_path):
    splits = files(tmp_path, train=[f"{i}|{i}" for i in range(8)], valid=3)
    rows, _ = write(tmp_path / "out", Inputs(splits, "parallel", "none", None))
    assert [row["source"] for row in rows["valid"]] == ["2", "5"] and ids(rows["valid"]) == [0, 1]
    assert [row["source"] for row in rows["train"]] == ["0", "1", "3", "4", "6", "7"]
    with pytest.raises(UserError, match="splits.valid: hold_out takes no example; set a smaller hold_out"):
        TextWork(tmp_path, Inputs(files(tmp_path, train=["a|b"], valid=3), "parallel", "none", None), FilterConfig(), {}).counts()


def test_classes_can_be_joined_and_left_out(tmp_path):
    (tmp_path / "sst").write_text("(3 (2 a) (4 b))\n(2 (1 a) (2 b))\n(0 c)\n")
    inputs = Inputs({"train": SplitFiles(source=[tmp_path / "sst"])}, "sst", "none", {0: 0, 1: 0, 3: 1, 4: 1})
    rows, counts = write(tmp_path / "out", inputs)
    assert [(row["example_id"], row["label"]) for row in rows["train"]] == [(0, 1), (2, 0)]
    assert rows["train"][0]["node_labels"].tolist() == [1] and rows["train"][0]["leaf_labels"].tolist() == [-1, 1]
    assert counts == {"dropped.label_2": 1, "class.0": 1, "class.1": 1}


def test_more_splits_than_lengths_can_number_are_refused(tmp_path):
    (tmp_path / "a").write_text("a\n")
    files = {"source": [tmp_path / "a"], "target": [tmp_path / "a"]}
    config = PreprocessConfig(
        splits={"train": files, **{f"test_{i}": files for i in range(128)}}, parser={"name": "words"}, workers=0
    )
    with pytest.raises(UserError, match="splits: must be at most 128, but are 129; make other data sets .*vocab_from=DATA"):
        preprocess(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_columns_come_back_from_the_shards(tmp_path):
    (tmp_path / "a").write_text("it &apos;s\n")
    (tmp_path / "c").write_text("1\tHi\t_\tX\tUH\t_\t0\troot\t_\t_\n")
    moses = Inputs({"train": SplitFiles(source=[tmp_path / "a"], target=[tmp_path / "a"])}, "parallel", "moses", None)
    row = write(tmp_path / "moses", moses)[0]["train"][0]
    assert row["words"]["text"] == ["it", "'s"] and row["words"]["start_char"].tolist() == [0, 3] and row["target"] == "it 's"
    trees = Inputs({"train": SplitFiles(source=[tmp_path / "c"])}, "conllu", "none", None)
    row = write(tmp_path / "trees", trees)[0]["train"][0]
    assert row["trees"] == ["(X (UH Hi))"] and row["arcs"]["governor"].tolist() == [-1] and row["arcs"]["deprel"] == ["root"]
    assert list(row) == ["example_id", *trees.columns()]


def test_empty_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no example of format parallel in .*train.a and .*train.b; at least one is needed"):
        TextWork(tmp_path, Inputs(files(tmp_path, train=[]), "parallel", "none", None), FilterConfig(), {}).counts()


def test_files_that_change_between_the_passes_are_refused(tmp_path):
    inputs = Inputs(files(tmp_path, train=["a|b", "c|d", "e|f"]), "parallel", "none", None)
    work = TextWork(tmp_path, inputs, FilterConfig(), {})
    (tmp_path / "text").mkdir()
    assert work.counts() == {"train": 3}
    files(tmp_path, train=["a|b", "c|d"])
    with (
        pytest.raises(UserError, match="splits.train: the files changed while they were read"),
        line_list(tmp_path / DROPPED) as dropped,
    ):
        list(work.write("mark", 2, TextNotices(), dropped))


KILLED = """
import os, signal, sys
from pathlib import Path
from treeproc.stages import run_jobs
from treeproc.stages.filters import FilterConfig
from treeproc.stages.inputs import Inputs, SplitFiles
from treeproc.stages.text_warnings import TextNotices
from treeproc.stages.text_work import TextWork
run_jobs.GROUP_ROWS = 3
inputs = Inputs({"train": SplitFiles(source=[sys.argv[2]], target=[sys.argv[2]])}, "parallel", "none", None)
work = TextWork(Path(sys.argv[1]), inputs, FilterConfig(drop_duplicates=True), {})
for number, _ in enumerate(work.write("mark", 3, TextNotices(), None)):
    if number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_and_run_again_gives_the_same_bytes(tmp_path):
    source, once, killed = (tmp_path / name for name in ("lines", "once", "killed"))
    source.write_text("".join(f"{i % 17} {i % 5}\n" for i in range(50)))
    (killed / "text").mkdir(parents=True)
    run = subprocess.run([sys.executable, "-c", KILLED, killed, source], capture_output=True, text=True)
    assert run.returncode == -9, run.stderr
    before = {path: path.stat().st_mtime_ns for path in (killed / "text").iterdir()}
    inputs = Inputs({"train": SplitFiles(source=[source], target=[source])}, "parallel", "none", None)
    for folder in (once, killed):
        write(folder, inputs, FilterConfig(drop_duplicates=True), rows_per_shard=3)
    whole, again = ({path.name: path.read_bytes() for path in (folder / "text").iterdir()} for folder in (once, killed))
    assert whole == again and len(whole) == 2 * 17
    assert len(before) == 14 and all(path.stat().st_mtime_ns == stamp for path, stamp in before.items()), "written twice"
