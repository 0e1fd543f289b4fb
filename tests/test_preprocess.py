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
from treeproc.parsers import ParserConfig, StanzaParser, fallback, find_models, read_trees
from treeproc.preprocess import SAMPLE, PreprocessConfig, preprocess, summary
from treeproc.settings import UserError
from treeproc.shards import open_shards, read_index, read_lengths
from treeproc.subwords import Subwords
from treeproc.trees import SpanTree, check_tree, draw

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


def test_a_real_parse(data):
    row = StanzaParser(ParserConfig(name="shipped")).parse(["The old man saw a dog."])[0]
    ((tags, tree),) = read_trees({"trees": row.trees})
    assert tags == ["DT", "JJ", "NN", "VBD", "DT", "NN", "."]
    assert draw(tree, row.words["text"]).split("\n")[:3] == ["ROOT", "└─ S", "   ├─ NP"]


def test_too_long_sentences_get_a_named_flat_tree(data):
    row = rows(data, "parsed", "test")[0]
    assert row["parse_status"] == "flat_too_long" and len(row["words"]["text"]) == 500
    assert len(read_trees(row)[0][1]) == 1
    assert read_index(data / "parsed")["totals"]["test"]["status.flat_too_long"] == 1


def test_one_bad_sentence_does_not_harm_its_batch(monkeypatch):
    parser = StanzaParser(ParserConfig(name="shipped"))
    lines = ["I see a cat.", "bad", "You see two dogs."]
    analyse = parser._analyse[1]

    def fails_on_bad(document):
        if any(word.text == "bad" for sentence in document.sentences for word in sentence.words):
            raise ValueError("Went infinite!")
        return analyse(document)

    expected = [parser.parse([line])[0] for line in lines]
    parser._analyse[1] = fails_on_bad
    assert parser.parse(lines) == [expected[0], fallback("bad", "flat_parser_failed"), expected[2]]

    def out_of_memory(document):
        raise RuntimeError("DefaultCPUAllocator: out of memory")

    parser._analyse[1] = out_of_memory
    with pytest.raises(RuntimeError, match="out of memory"):
        parser.parse(lines)


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
        (["--sample", "--out", "x", "--turbo"], "unrecognized arguments: --turbo"),
        (["--sample", "--out", "http://host/x"], "must be a local path, s3://BUCKET/NAME"),
    ],
)
def test_wrong_command_lines(arguments, message, run_workflow, tmp_path):
    run = run_workflow("preprocess.py", *arguments, cwd=tmp_path)
    assert run.returncode == 2 and message in run.stderr and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(data, text):
    with locked(data), pytest.raises(UserError, match="another process is writing"):
        preprocess(config_of(text), data)


def test_installed_stanza_models_are_preferred(tmp_path, monkeypatch):
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(tmp_path))
    assert find_models(ParserConfig()).origin == "shipped"
    for name in ("tokenize", "pos", "constituency"):
        (tmp_path / "en" / name).mkdir(parents=True)
        (tmp_path / "en" / name / "combined.pt").write_bytes(b"x")
    (tmp_path / "resources.json").write_text("{}")
    assert find_models(ParserConfig()).origin == "installed"
    assert find_models(ParserConfig(name="shipped")).origin == "shipped"


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


def test_tokens_that_their_words_do_not_spell_are_one_leaf():
    """im = in + dem is one leaf, won't = wo + n't are two: with Stanza's own documents and trees."""
    from stanza.models.common.doc import Document
    from stanza.models.constituency.tree_reader import read_trees as read_stanza_trees

    from treeproc.parsers import _parsed_line

    def parsed(line, words, tree):
        document = Document([words], text=line)
        document.sentences[0].constituency = read_stanza_trees(tree)[0]
        return _parsed_line(line, 0, document.sentences)

    def word(number, text, tag, start=None):
        place = {} if start is None else {"start_char": start, "end_char": start + len(text)}
        return {"id": number, "text": text, "xpos": tag, **place}

    german = parsed(
        "im Haus",
        [
            {"id": (1, 2), "text": "im", "start_char": 0, "end_char": 2},
            word(1, "in", "APPR"),
            word(2, "dem", "ART"),
            word(3, "Haus", "NN", 3),
        ],
        "(ROOT (PP (APPR in) (NP (DP (ART dem)) (NN Haus))))",
    )
    assert german.words == {"text": ["im", "Haus"], "start_char": [0, 3], "end_char": [2, 7], "pos_tag": ["APPR", "NN"]}
    assert german.trees == ["(ROOT (PP (APPR im) (NP (NN Haus))))"]
    english = parsed(
        "I won't",
        [
            word(1, "I", "PRP", 0),
            {"id": (2, 3), "text": "won't", "start_char": 2, "end_char": 7},
            word(2, "wo", "MD"),
            word(3, "n't", "RB"),
        ],
        "(ROOT (S (NP (PRP I)) (VP (MD wo) (RB n't))))",
    )
    assert english.words["text"] == ["I", "wo", "n't"] and english.words["end_char"] == [1, 4, 7]
    assert english.trees == ["(ROOT (S (NP (PRP I)) (VP (MD wo) (RB n't))))"]


def test_a_dry_run_says_what_the_job_would_do(text, tmp_path, run_workflow, data):
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(config_of(text).model_dump(mode="json")))
    run = run_workflow("preprocess.py", "--config", config, "--out", tmp_path / "deep" / "out", "--dry-run")
    assert run.returncode == 0, run.stderr
    assert "train: 57 examples; dropped: 1 empty_source, 1 empty_target, 1 source_too_long" in run.stdout
    assert "plan: 4 shards of up to 20 input examples" in run.stdout and "probe: 59 sentences in " in run.stdout
    assert "1 without a parse" in run.stdout and run.stdout.splitlines()[-1].endswith("hours")
    assert not (tmp_path / "deep").exists()


def test_a_job_without_a_pair_leaves_no_folder(text, tmp_path):
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "deep" / "out", tmp_path / "there"):
        with pytest.raises(UserError, match=r"splits.train: no .* is left after the filters \(dropped: .*source_too_long"):
            preprocess(config_of(text, filters={"max_words": 1}), out)
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and not list((tmp_path / "there").iterdir())


def test_an_empty_config_is_named(data, text, tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=r"config.yaml is empty: write the settings"):
        preprocess(config_of(text), tmp_path)


def test_the_summary_counts_what_was_not_parsed(data):
    assert "parse_status: 1 flat_too_long, 1 parsed" in summary(read_index(data / "encoded"), data)
