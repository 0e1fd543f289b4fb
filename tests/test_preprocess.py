"""The preprocessing job with the real parser, on a slice of the sample."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from commands import run_here
from reference_encoding import check_tree
from waiting import wait_for

from treenet.config import TrainConfig
from treenet.data.splits import read_references
from treenet.jobs.train_run import run_training
from treeproc.common.files import locked
from treeproc.common.folder_kinds import DATA_SET, mark_folder
from treeproc.common.provenance import PROVENANCE, read_sessions
from treeproc.common.settings import UserError, load_settings
from treeproc.inspect import describe, draw_line
from treeproc.parsers import read_trees
from treeproc.shards.lengths import read_lengths
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index, stage_folder
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.subwords import Subwords
from treeproc.trees.spans import SpanTree

pytestmark = [pytest.mark.slow, pytest.mark.long]

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
    values = {
        "splits": splits, "parser": {"name": "shipped"}, "subwords": {"vocab_size": 400}, "rows_per_shard": 20, "workers": 0,
    }  # fmt: skip
    return PreprocessConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def data(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "slice"
    preprocess(config_of(text), out)
    return out


def rows(data, stage, split="train") -> dict[int, dict]:
    return {row["example_id"]: row for shard in SplitShards(data / stage, split) for row in shard.rows()}


def test_index_counts_what_was_dropped(data):
    index = read_index(data / "encoded")
    assert index["dropped"] == {"train": {"empty_source": 1, "empty_target": 1, "source_too_long": 1}, "test": {}}
    assert index["totals"]["train"]["rows"] == NUM_TRAIN - 3 and index["totals"]["test"]["rows"] == 2
    assert index["parser"]["models"]["origin"] == "shipped" and index["tree_source"] == "parsed"
    assert {key for key in index if key.endswith("fingerprint")} == {
        "fingerprint", "text_fingerprint", "parsed_fingerprint", "tree_fingerprint", "vocab_fingerprint",
    }  # fmt: skip


def test_the_session_counts_shards(data, text):
    before = (data / PROVENANCE).read_bytes()
    (session,) = read_sessions(data)
    assert session.did == {"text": 4, "parsed": 4, "encoded": 4} and session.outcome == "finished"
    preprocess(config_of(text), data)  # nothing is left to do
    assert (data / PROVENANCE).read_bytes() == before
    assert "finished after" in describe(data)[0]


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
        if path.is_file() and path.name not in (".lock", PROVENANCE)
    }


@pytest.mark.parametrize("workers", [["workers=0"], pytest.param([], marks=pytest.mark.cluster)], ids=["without Ray", "on Ray"])
def test_killed_and_rerun_gives_the_same_bytes(data, text, tmp_path, repository, workers):
    out = tmp_path / "killed"
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(config_of(text).model_dump(mode="json")))
    command = [sys.executable, repository / "workflows" / "preprocess.py", "--config", config, "--out", out, *workers]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        # Killed when the first parsed shard has landed, and others have not.
        wait_for(lambda: list((out / "parsed").glob("train-*.arrow")), job, 120, tmp_path / "log")
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert not (out / "encoded" / "index.json").exists()
    first = {path: path.stat().st_mtime_ns for path in (out / "parsed").glob("train-*.json")}
    (out / "parsed" / ".tmp-1-leftover").write_text("half")
    preprocess(config_of(text), out)  # what Ray began goes on without it too
    assert snapshot(out) == snapshot(data)
    assert [session.outcome for session in read_sessions(out)] == ["unfinished", "finished"]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in first.items()), "a finished shard was done again"


def without_ray(repository, *arguments: object) -> list[str]:
    """A command line of preprocess.py that ends with status 1 where it loads Ray."""
    code = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__'); sys.exit('ray' in sys.modules)"
    return [sys.executable, "-c", code, str(repository / "workflows" / "preprocess.py"), *map(str, arguments)]


def test_a_job_without_ray_does_not_load_it(text, tmp_path, repository):
    files = {"source": [str(text / "test.en")], "target": [str(text / "test.de")]}
    values = {"splits": {"train": files}, "parser": {"name": "words"}, "subwords": {"vocab_size": 280}}
    (tmp_path / "c.yaml").write_text(json.dumps(values | {"filters": {"max_words": 500}}))
    command = without_ray(repository, "--config", tmp_path / "c.yaml", "--out", tmp_path / "out", "workers=0")
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=repository)
    assert run.returncode == 0, run.stdout + run.stderr
    (session,) = read_sessions(tmp_path / "out")
    assert session.did == {"text": 1, "parsed": 1, "encoded": 1} and "Ray" not in session.cpu_covers


@pytest.mark.cluster
def test_killed_without_ray_and_rerun_with_it_or_without_gives_the_same_bytes(data, text, tmp_path, repository):
    out, config = tmp_path / "killed", tmp_path / "config.yaml"
    config.write_text(json.dumps(config_of(text).model_dump(mode="json")))
    command = without_ray(repository, "--config", config, "--out", out, "workers=0")
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, cwd=repository)
        wait_for(lambda: list((out / "parsed").glob("train-*.json")), job, 120, tmp_path / "log", pause=0.005)
        job.kill()
        job.wait()
    assert not (out / "encoded" / "index.json").exists()
    shutil.copytree(out, tmp_path / "on Ray")
    first = {path: path.stat().st_mtime_ns for path in (out / "parsed").glob("*-of-*.json")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=repository)
    assert run.returncode == 0, run.stdout + run.stderr
    preprocess(config_of(text, workers=None), tmp_path / "on Ray")
    assert snapshot(out) == snapshot(data) == snapshot(tmp_path / "on Ray")
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in first.items()), "a finished shard was done again"
    killed, last = read_sessions(out)
    assert killed.outcome == "unfinished" and killed.did["text"] == 4
    assert last.did["parsed"] == 4 - len(first) and last.did["encoded"] == 4
    assert last.cpu_s > 0.5 and "Ray" not in last.cpu_covers


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
    with pytest.raises(UserError, match="the text of train differs from the text of"):
        preprocess(config_of(text, splits=splits), data)
    assert snapshot(data) == before


def test_bad_input_writes_nothing(text, tmp_path):
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
        run = run_here("preprocess.py", "--config", config, "--out", tmp_path / "out")
        assert run.returncode == 2 and run.stderr.startswith("error: ") and message in run.stderr
        assert run.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give settings as splits.train.source=FILE splits.train.target=FILE, or --config FILE.yaml"),
        (["--sample"], "give --out DIR"),
        (["--sample", "--out", "x", "parser.language=xx"], "no constituency parser for 'xx'"),
        (["--sample", "--out", "x", "parser.nam=stanza"], "parser.nam: unknown key"),
        (["--config", "nowhere.yaml", "--out", "x"], "cannot read the configuration nowhere.yaml"),
        (["--sample", "--out", "x", "--turbo"], "there is no option '--turbo'"),
        (["--sample", "--out", "http://host/x"], "must be a local path, s3://BUCKET/NAME"),
    ],
)
def test_wrong_command_lines(arguments, message, tmp_path):
    run = run_here("preprocess.py", *arguments, cwd=tmp_path)
    assert run.returncode == 2 and message in run.stderr and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def encoded_again(data, out, **changes) -> dict:
    return preprocess(
        PreprocessConfig.model_validate({"parsed": data, "subwords": {"vocab_size": 400}, "workers": 0} | changes), out
    )


def test_another_encoding_of_the_same_trees(data, text):
    """`parsed: DIR` writes an encoded stage alone, the same as a whole job with these settings would."""
    before = snapshot(data)
    out = data.parent / "again"
    same = encoded_again(data, out)
    assert not (out / "text").exists() and not (out / "parsed").exists()
    original = read_index(data / "encoded")
    assert same == original | {"stages": {"text": "../slice/text", "parsed": "../slice/parsed"}}
    for path in (data / "encoded").rglob("*"):
        if path.is_file() and path.name != "index.json":
            assert path.read_bytes() == (out / "encoded" / path.relative_to(data / "encoded")).read_bytes()
    assert stage_folder(out, "text") == data / "text" and stage_folder(data, "text") == data / "text"
    assert read_references(out, "test") == ["a", "Nein."]
    with pytest.raises(UserError, match="belongs to other settings .*vocab_size: 400 -> 410"):
        encoded_again(data, out, subwords={"vocab_size": 410})
    assert "rows_per_shard: 2000\n" in (out / "config.yaml").read_text()  # as it always was: it has no shards of text
    assert preprocess(load_settings(PreprocessConfig, out / "config.yaml"), out) == same
    # A set that has no trees of its own stands for the one that has.
    control = encoded_again(out, data.parent / "control", tree={"tree_source": "left", "binarize": "right"})
    assert control["stages"] == same["stages"]
    assert control["text_fingerprint"] == original["text_fingerprint"]
    assert control["tree_fingerprint"] != original["tree_fingerprint"]
    for i, row in rows(data.parent / "control", "encoded").items():
        assert (np.bincount(row["nodes"]["parent"] + 1)[1:] <= 2).all(), i
    assert snapshot(data) == before


def test_settings_of_another_data_set_are_refused(data, tmp_path):
    for changes, message in (
        ({"rows_per_shard": 7, "filters": {"max_words": 9}}, "filters, rows_per_shard: must not be set with parsed"),
        ({"tree": {"side": "target"}}, "tree.side: must be a side with trees, but is target: the data set has no target_words"),
    ):
        with pytest.raises(UserError, match=message):
            encoded_again(data, tmp_path / "out", **changes)
    with pytest.raises(UserError, match="must be another folder"):
        encoded_again(data, data)


@pytest.mark.parametrize("form, side", [("parallel", "source"), ("parallel", "target"), ("conllu", "target"), ("text", "source")])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.jsonl"])
def test_tables_are_not_read_as_lines(text, tmp_path, form, side, name):
    others = {"source": [text / "train.en"], "target": [text / "train.de"]} if form != "text" else {}
    sides = others | {side: [tmp_path / name]}
    with pytest.raises(UserError, match=f"{name} must have one text a line, but its name is that of a table .*; write its texts"):
        preprocess(config_of(text, format=form, splits={"train": sides}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sides_that_are_not_there_are_refused_before_anything_is_written(text, tmp_path):
    for changes, message in (
        ({"tree": {"side": "target"}}, "tree.side: must be a side with trees, but is target"),
        ({"parser": {"name": "given"}}, "parser.name: is given, but this format gives no trees"),
    ):
        with pytest.raises(UserError, match=message):
            preprocess(config_of(text, **changes), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_separate_vocabularies_and_lower_case(data):
    out = data.parent / "separate"
    index = encoded_again(data, out, subwords={"vocab_size": 350, "joint": False, "lowercase": True})
    source, target = (Subwords(out / "encoded" / "vocab" / name) for name in ("pieces.model", "pieces.tgt.model"))
    assert len(source) == len(target) == index["num_pieces"] == 350
    lines, encoded = rows(data, "text"), rows(out, "encoded")
    for i, row in encoded.items():
        assert source.decode([row["leaves"]["piece"]]) == [lines[i]["source"].lower()]
        assert target.decode([row["tgt_pieces"]]) == [lines[i]["target"].lower()]
    drawn = draw_line(out, "train", 1)
    assert f"source: {lines[0]['source'].lower()}\n" in drawn
    assert drawn.partition("target: ")[2].replace(" ", "").replace("▁", " ").strip() == lines[0]["target"].lower()
    with pytest.raises(UserError, match="has a vocabulary for each side"):
        run_training(TrainConfig(data=out), data.parent / "run")


def test_vocabularies_learn_from_lines_spread_over_all(data, tmp_path):
    """A limit on the lines takes some of every part of the text, and the same ones for other shards."""
    from treeproc.shards.store import ShardRecord
    from treeproc.stages.inputs import TreeConfig
    from treeproc.stages.vocabulary import TrainSplit, count_vocabulary
    from treeproc.subwords import SubwordConfig

    text, parsed = (
        [ShardRecord(**shard) for shard in read_index(data / stage)["shards"] if shard["split"] == "train"]
        for stage in ("text", "parsed")
    )
    counts = count_vocabulary(TrainSplit(data, text, parsed, SubwordConfig(max_training_lines=20), TreeConfig()))
    lines = list(rows(data, "text").values())
    kept = [line for k, line in enumerate(lines) if (k + 1) * 10 // len(lines) > k * 10 // len(lines)]
    words = Counter(word for line in kept for side in ("source", "target") for word in line[side].split(" "))
    assert len(kept) == 10 and Counter({w.replace("\x01", ""): n for w, n in counts.words["source"].items()}) == words


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


def test_a_dry_run_says_what_the_job_would_do(text, tmp_path, monkeypatch):
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(config_of(text).model_dump(mode="json")))
    monkeypatch.setitem(sys.modules, "ray", None)  # it cannot be imported
    run = run_here("preprocess.py", "--config", config, "--out", tmp_path / "deep" / "out", "--dry-run")
    assert run.returncode == 0, run.stderr
    assert "train: 57 examples; dropped: 1 empty_source, 1 empty_target, 1 source_too_long" in run.stdout
    assert "plan: 4 shards of up to 20 input examples, " in run.stdout and "on this machine's cores" in run.stdout
    assert "probe: 59 examples in " in run.stdout
    assert "1 without a parse" in run.stdout and run.stdout.splitlines()[-1].startswith("  parsing takes about 0.00 hours (0:")
    assert not (tmp_path / "deep").exists()


def test_a_job_without_a_pair_leaves_no_folder(text, tmp_path):
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "deep" / "out", tmp_path / "there"):
        with pytest.raises(UserError, match=r"splits.train: the filters drop all examples \(dropped: .*source_too_long"):
            preprocess(config_of(text, filters={"max_words": 1}), out)
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and not list((tmp_path / "there").iterdir())


def test_an_empty_config_is_named(data, text, tmp_path):
    mark_folder(tmp_path, DATA_SET)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=r"config.yaml is empty: write the settings"):
        preprocess(config_of(text), tmp_path)


def test_the_summary_counts_what_was_not_parsed(data):
    assert "parse_status: 1 flat_too_long, 1 parsed" in summary(read_index(data / "encoded"), data)


def test_lines_that_were_dropped_or_not_parsed_are_listed(data):
    rows = (data / "text" / "dropped.tsv").read_text().splitlines()
    assert rows == [
        "split\tline\treason", "train\t4\tempty_source", "train\t8\tempty_target", "train\t12\tsource_too_long",
    ]  # fmt: skip
    rows = (data / "parsed" / "fallbacks.tsv").read_text().splitlines()
    assert rows == ["split\tline\tside\tparse_status", "test\t1\tsource\tflat_too_long"]
    message = summary(read_index(data / "encoded"), data)
    assert str(data / "text" / "dropped.tsv") in message and str(data / "parsed" / "fallbacks.tsv") in message
