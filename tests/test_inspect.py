"""The figures of `treeproc.inspect` against a slow count of every row."""

import json
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from toydata import write_toy_data

import treeproc.shards.shard as shards
from treeproc.common.files import file_sha256
from treeproc.common.settings import UserError
from treeproc.inspect import SplitStatistics, describe, draw_line, histogram, plot, statistics
from treeproc.shards.shard import Shard, SplitShards
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.subwords import LabelVocab

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_toy_data(tmp_path_factory.mktemp("inspect") / "data", train=1500, shards=1)


def levels(parents) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def test_figures_are_those_of_a_slow_count(data):
    """The shard has two record batches, so offsets that start anew are covered."""
    rows = [row for shard in SplitShards(data / "encoded", "train") for row in shard.rows()]
    figures = statistics(data / "encoded", "train")
    assert figures.rows == len(rows) == 1500
    assert figures.leaves == sum(len(row["leaves"]["piece"]) for row in rows)
    assert figures.nodes == sum(len(row["nodes"]["label"]) for row in rows)
    assert figures.words == sum(row["leaves"]["word_index"][-1] + 1 for row in rows)
    assert figures.tgt_pieces == sum(len(row["tgt_pieces"]) for row in rows)
    for counts, expected in (
        (figures.labels, Counter(int(label) for row in rows for label in row["nodes"]["label"])),
        (figures.lengths, Counter(len(row["leaves"]["piece"]) for row in rows)),
        (figures.depths, Counter(levels(row["nodes"]["parent"]) for row in rows)),
    ):
        assert {i: int(count) for i, count in enumerate(counts) if count} == expected


def test_the_report_names_shares_labels_and_what_was_dropped(data):
    text, figures = describe(data)
    share = figures["train"].leaves / (figures["train"].leaves + figures["train"].nodes)
    assert f"leaves / nodes: {share:.1%} / {1 - share:.1%}" in text and "train: 1,500 examples" in text
    assert "parse_status: none" in text and "dropped: none" in text
    names = LabelVocab.load(data / "encoded" / "vocab" / "labels.txt").names
    commonest = names[int(np.argmax(figures["train"].labels))]
    assert text.partition("  labels\n")[2].split()[0] == commonest


@pytest.mark.parametrize("every", [None, 3])
def test_a_dropped_line_says_why(tmp_path, every):
    """With `hold_out`, the list of the job counts over the file, and `line` within the split."""
    words = ["a good film", "a", "bad film", "b", "c", "a very good film", "no film", "a bad film", "d"]
    (tmp_path / "a").write_text("".join(f"{'xy'[place % 2]}\t{text}\n" for place, text in enumerate(words)))
    splits = {"train": {"source": [tmp_path / "a"]}} | ({"valid": {"hold_out": every}} if every else {})
    config = PreprocessConfig(
        splits=splits, format="labelled", workers=0,
        parser={"name": "words"}, tree={"tree_source": "right"}, filters={"max_words": 2}, subwords={"vocab_size": 280},
    )  # fmt: skip
    preprocess(config, tmp_path / "data")
    lines = {split: [one for place, one in enumerate(words, 1) if not every or (place % every == 0) == (split == "valid")]
             for split in (("train", "valid") if every else ("train",))}  # fmt: skip
    for split, texts in lines.items():
        for number, text in enumerate(texts, 1):
            if split == "valid" or text.count(" ") < 2:
                assert f"source: {text}\n" in draw_line(tmp_path / "data", split, number)
                continue
            why = rf"{split} has no line {number}: the job dropped it, source_too_long in .*/text/dropped.tsv; choose another"
            with pytest.raises(UserError, match=why):
                draw_line(tmp_path / "data", split, number)


def test_histograms_lose_nothing():
    counts = np.array([0, 3, 0, 5] + [0] * 30 + [2])
    lines = histogram(counts, "x")
    assert sum(int(line.split()[1]) for line in lines[1:]) == 10 and len(lines) <= 13
    assert lines[1].split()[0] == "0-2" and histogram(np.zeros(3, int), "x") == []


def test_an_example_is_drawn_with_its_pieces(data, tmp_path):
    row = next(row for row in SplitShards(data / "encoded", "valid")[0].rows() if row["example_id"] == 3)
    text = draw_line(data, "valid", 4)
    lines = text.splitlines()
    assert lines[0] == f"valid line 4: {len(row['leaves']['piece'])} leaves, {len(row['nodes']['label'])} nodes"
    assert len(lines) == 3 + len(row["leaves"]["piece"]) + len(row["nodes"]["label"])
    source, target = (line.partition(": ")[2] for line in lines[-2:])
    assert target.replace(" ", "").replace("▁", " ").split() == list(reversed(source.split()))
    with pytest.raises(UserError, match=r"valid has no line 99 \(its lines are 1 to 12"):
        draw_line(data, "valid", 99)
    with pytest.raises(UserError, match=r"has no split 'dev'; there are: .*valid"):
        draw_line(data, "dev", 1)
    for look in (describe, lambda folder: draw_line(folder, "train", 1)):
        with pytest.raises(UserError, match="encoded/index.json is missing; run tree-attention preprocess to the end$"):
            look(tmp_path)
    plot(describe(data)[1], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_damaged_vocabulary_is_one_line(tmp_path):
    folder = write_toy_data(tmp_path / "data")
    encoded = folder / "encoded"
    index, labels = json.loads((encoded / "index.json").read_text()), encoded / "vocab" / "labels.txt"
    index["files"] = {"vocab/labels.txt": file_sha256(labels)}
    (encoded / "index.json").write_text(json.dumps(index))
    describe(folder)
    labels.write_text("<unk>\nS\n")
    for look in (describe, lambda data: draw_line(data, "train", 1)):
        with pytest.raises(UserError, match="labels.txt is damaged"):
            look(folder)


def test_one_line_of_many_shards_opens_one(tmp_path, monkeypatch):
    folder = write_toy_data(tmp_path / "data", train=12, shards=6)
    rows = [row for shard in SplitShards(folder / "encoded", "train") for row in shard.rows()]
    opened, real = [], shards.Shard
    monkeypatch.setattr(shards, "Shard", lambda place, record: opened.append(record.index) or real(place, record))
    for number, row in enumerate(rows):
        text = draw_line(folder, "train", row["example_id"] + 1)
        assert f": {len(row['leaves']['piece'])} leaves" in text and opened == [number // 2]
        opened.clear()


def test_the_command(data):
    run = subprocess.run([sys.executable, "-m", "treeproc.inspect", str(data)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "levels of nodes of an example" in run.stdout, run.stderr
    for arguments, message in (
        ([str(data), "--splt", "x"], "there is no option '--splt'"),
        ([str(data / "no")], "no is not a folder; give a data set"),
    ):
        run = subprocess.run([sys.executable, "-m", "treeproc.inspect", *arguments], capture_output=True, text=True, timeout=120)
        assert run.returncode == 2 and message in run.stderr and run.stderr.count("\n") == 1


def test_a_million_rows_take_seconds(data):
    """Extrapolated from 30,000 rows; a loop over rows would take minutes."""
    shard: Shard = SplitShards(data / "encoded", "train")[0]
    figures = SplitStatistics()
    started = time.process_time()
    for _ in range(20):
        figures.add(shard)
    assert figures.rows == 30_000 and (time.process_time() - started) / 30_000 * 1e6 < 100
