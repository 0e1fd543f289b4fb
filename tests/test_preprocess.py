"""The preprocessing job with the real parser in real Ray actors, on a slice of the sample."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain

import pytest

from treeproc.files import locked
from treeproc.parsers import read_trees
from treeproc.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.settings import UserError
from treeproc.shards import open_shards, read_index, read_lengths
from treeproc.subwords import Subwords
from treeproc.trees import SpanTree, check_tree

NUM_TRAIN = 60


def lines_of(name: str, count: int) -> list[str]:
    return gzip.decompress((SAMPLE / name).read_bytes()).decode().split("\n")[:count]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small parallel corpus, with an empty line, a line separator and a sentence of 500 words."""
    folder = tmp_path_factory.mktemp("text")
    source, target = lines_of("train.en.gz", NUM_TRAIN), lines_of("train.de.gz", NUM_TRAIN)
    source[3], source[5], target[7] = "", "One\u2028line  (still).", ""
    source[11] = " ".join(["word"] * 500)
    for split, rows in {"train": (source, target), "test": (["x " * 499 + "y", "No."], ["a", "Nein."])}.items():
        for side, lines in zip(("en", "de"), rows, strict=True):
            (folder / f"{split}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def config_of(text, **changes) -> PreprocessConfig:
    splits = {split: {"source": [text / f"{split}.en"], "target": [text / f"{split}.de"]} for split in ("train", "test")}
    values = {"splits": splits, "parser": {"name": "shipped"}, "subwords": {"vocab_size": 400}, "rows_per_shard": 20}
    return PreprocessConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def data(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "slice"
    preprocess(config_of(text), out)
    return out


def rows(data, stage, split="train") -> dict[int, dict]:
    return {row["example_id"]: row for shard in open_shards(data / stage, split) for row in shard.rows()}


def test_index_counts_what_was_dropped(data):
    index = read_index(data / "encoded")
    assert index["dropped"] == {"train": {"empty_source": 1, "empty_target": 1, "source_too_long": 1}, "test": {}}
    assert index["totals"]["train"]["rows"] == NUM_TRAIN - 3 and index["totals"]["test"]["rows"] == 2
    assert index["parser"]["models"]["origin"] == "shipped" and index["tree_source"] == "parsed"
    assert {key for key in index if key.endswith("fingerprint")} == {
        "fingerprint", "text_fingerprint", "tree_fingerprint", "vocab_fingerprint",
    }  # fmt: skip


def test_ids_are_those_of_the_input_lines(data, text):
    source = (text / "train.en").read_bytes().decode().split("\n")
    for stage in ("text", "parsed", "encoded"):
        assert sorted(rows(data, stage)) == [i for i in range(NUM_TRAIN) if i not in (3, 7, 11)]
    assert all(row["source"] == source[i].strip() for i, row in rows(data, "text").items())


def test_words_cover_the_line_and_carry_its_characters(data):
    lines = rows(data, "text")
    for i, row in rows(data, "parsed").items():
        words, line = row["words"], lines[i]["source"]
        spans = list(zip(words["start_char"], words["end_char"], strict=True))
        assert [line[start:end] for start, end in spans] == words["text"]
        assert "".join(words["text"]) == "".join(line.split())
        for tags, tree in read_trees(row):
            check_tree(tree, len(tags))


def test_encoded_rows_are_trees_over_pieces(data):
    subwords = Subwords(data / "encoded" / "vocab" / "pieces.model")
    labels = (data / "encoded" / "vocab" / "labels.txt").read_text().splitlines()
    lines = {split: rows(data, "text", split) for split in ("train", "test")}
    for split in ("train", "test"):
        for i, row in rows(data, "encoded", split).items():
            assert subwords.decode([row["leaves"]["piece"], row["tgt_pieces"]]) == [
                lines[split][i]["source"],
                lines[split][i]["target"],
            ]
            tree = SpanTree(
                [labels[n] for n in row["nodes"]["label"]], row["spans"]["start"].tolist(), row["spans"]["end"].tolist()
            )
            check_tree(tree, len(row["leaves"]["piece"]))
            words = row["leaves"]["word_index"].tolist()
            split_words = {(words.index(w), words.index(w) + words.count(w)) for w in words if words.count(w) > 1}
            spans = list(zip(tree.starts, tree.ends, strict=True))
            marked = {span for label, span in zip(tree.labels, spans, strict=True) if label.startswith("POS=")}
            # Labels and tags that the training slice did not hold are unknown in the test split.
            assert split_words == marked if split == "train" else marked <= split_words <= set(spans)


def test_too_long_sentences_get_a_named_flat_tree(data):
    row = rows(data, "parsed", "test")[0]
    assert row["parse_status"] == "flat_too_long" and len(row["words"]["text"]) == 500
    assert len(read_trees(row)[0][1]) == 1
    assert read_index(data / "parsed")["totals"]["test"]["status.flat_too_long"] == 1


def test_lengths_agree_with_rows(data):
    lengths = read_lengths(data / "encoded", "train")
    encoded = rows(data, "encoded")
    assert lengths["example_id"].tolist() == sorted(encoded)
    for i, leaves, nodes, pieces in zip(
        *(lengths[n].tolist() for n in ("example_id", "leaves", "nodes", "tgt_pieces")), strict=True
    ):
        row = encoded[i]
        assert (leaves, nodes, pieces) == (len(row["leaves"]["piece"]), len(row["nodes"]["label"]), len(row["tgt_pieces"]))


def snapshot(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_killed_and_rerun_gives_the_same_bytes(data, text, tmp_path, repository):
    out = tmp_path / "killed"
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(config_of(text).model_dump(mode="json")))
    command = [sys.executable, str(repository / "workflows" / "preprocess.py"), "--config", str(config), "--out", str(out)]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        # Killed when the first parsed shard has landed, and others have not.
        while not list((out / "parsed").glob("train-*.arrow")):
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert not (out / "encoded" / "index.json").exists()
    first = {path: path.stat().st_mtime_ns for path in (out / "parsed").glob("train-*.json")}
    (out / "parsed" / ".tmp-1-leftover").write_text("half")
    preprocess(config_of(text), out)
    assert snapshot(out) == snapshot(data)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in first.items()), "a finished shard was done again"


def test_damaged_shards_are_healed_and_nothing_else_is_redone(data, text):
    before = snapshot(data)
    stamps = {path: path.stat().st_mtime_ns for path in data.rglob("*.arrow") if path.name != "lengths.arrow"}
    victim = next((data / "encoded").glob("train-00001-*.arrow"))
    victim.write_bytes(victim.read_bytes()[:-10])
    preprocess(config_of(text), data)
    assert snapshot(data) == before
    assert {path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp} == {victim}


def test_other_settings_or_text_are_refused(data, text, tmp_path):
    before = snapshot(data)
    with pytest.raises(UserError, match="belongs to other settings .*rows_per_shard: 20 -> 30"):
        preprocess(config_of(text, rows_per_shard=30), data)
    other = tmp_path / "other.en"
    other.write_text((text / "train.en").read_text().replace("word", "ward"))
    splits = {
        "train": {"source": [other], "target": [text / "train.de"]},
        "test": {"source": [text / "test.en"], "target": [text / "test.de"]},
    }
    with pytest.raises(UserError, match="the text of train is not the one"):
        preprocess(config_of(text, splits=splits), data)
    assert snapshot(data) == before


def test_bad_input_writes_nothing(text, tmp_path, run_workflow):
    (tmp_path / "short.de").write_text("eins\n")
    (tmp_path / "latin.de").write_bytes(b"gr\xfcn\n")
    for target, message in (
        ("short.de", "has 60 lines, but"),
        ("latin.de", "latin.de, line 1: not valid UTF-8"),
        ("none.de", "cannot read"),
    ):
        config = tmp_path / "c.yaml"
        config.write_text(
            json.dumps({"splits": {"train": {"source": [str(text / "train.en")], "target": [str(tmp_path / target)]}}})
        )
        run = run_workflow("preprocess.py", "--config", config, "--out", tmp_path / "out")
        assert run.returncode == 2 and run.stderr.startswith("error: ") and message in run.stderr
        assert run.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs either --config FILE.yaml or --sample"),
        (["--sample"], "needs --out DIR"),
        (["--sample", "--out", "x", "parser.language=xx"], "no parser model for 'xx'"),
        (["--sample", "--out", "x", "parser.nam=stanza"], "parser.nam: unknown key"),
        (["--config", "nowhere.yaml", "--out", "x"], "cannot read the configuration nowhere.yaml"),
    ],
)
def test_wrong_command_lines(arguments, message, run_workflow, tmp_path):
    run = run_workflow("preprocess.py", *arguments, cwd=tmp_path)
    assert run.returncode == 2 and message in run.stderr and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(data, text):
    with locked(data), pytest.raises(UserError, match="another process is writing"):
        preprocess(config_of(text), data)


def test_sample_splits_share_no_sentence():
    import re

    def keys(name):
        return [" ".join(re.findall(r"\w+", line.lower())) for line in lines_of(name, 10**6) if line]

    for language in ("en", "de"):
        train, valid, test = (keys(f"{split}.{language}.gz") for split in ("train", "valid", "test"))
        assert (len(valid), len(test)) == (500, 500) and len(train) >= 12_000
        assert len(set(chain(train, valid, test))) == len(train) + 1000
    assert (
        min(len(key.split()) for key in keys("train.en.gz")) >= 4
        or min(len(line.split()) for line in lines_of("train.en.gz", 20_000)) >= 4
    )
