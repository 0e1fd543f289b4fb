"""Data sets without a target side, from their files to what a person and a training run see of them."""

import io
import random
import tarfile

import numpy as np
import pytest
from commands import run_here

from treenet.config import TrainConfig
from treenet.data import input_kinds
from treenet.data.examples import ExampleSource
from treenet.data.labelled import LabelledSource
from treenet.jobs.train_run import run_training
from treeproc.common.settings import UserError
from treeproc.inspect import describe, draw_line
from treeproc.readers.labelled import LabelledConfig, read_labelled, read_new_records
from treeproc.shards.schema import SPLIT_WORD_PREFIX
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.subwords import Subwords
from treeproc.verify import verify

pytestmark = pytest.mark.slow

TREES = """(3 (2 The) (4 (4 (3 very) (4 best)) (2 .)))
(2 (2 So) (2 so))
(0 (1 Bad) (2 (2 quite) (0 (1 bad) (2 .))))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentiment")
    (folder / "train.txt").write_text(TREES * 20, encoding="utf-8")
    config = {
        "splits": {"train": {"source": [folder / "train.txt"]}},
        "format": "sst",
        "labels": {0: 0, 1: 0, 3: 1, 4: 1},
        "parser": {"name": "given"},
        "subwords": {"vocab_size": 300},
        "rows_per_shard": 60,
        "workers": 0,
    }
    preprocess(PreprocessConfig.model_validate(config), folder / "data")
    return folder / "data"


def test_classes_of_a_sentiment_treebank(data):
    shard = SplitShards(data / "encoded", "train")[0]
    first, second = shard.row(0), shard.row(1)
    subwords = Subwords(data / "encoded" / "vocab" / "pieces.model")
    assert subwords.decode([first["leaves"]["piece"]]) == ["The very best ."]
    assert (first["label"], second["label"]) == (1, 0) and second["example_id"] == 2  # the neutral one between them went
    labels = (data / "encoded" / "vocab" / "labels.txt").read_text().splitlines()
    words = {"The": -1, "very": 1, "best": 1, ".": -1}
    of_words = list(words.values())
    assert first["leaf_labels"].tolist() == [of_words[word] for word in first["leaves"]["word_index"]]
    phrases = [c for c, node in zip(first["node_labels"], first["nodes"]["label"], strict=True) if labels[node] == "X"]
    assert phrases == [1, 1, 1]
    added = [c for c, node in zip(first["node_labels"], first["nodes"]["label"], strict=True) if labels[node] != "X"]
    assert set(added) <= {-1}


def test_a_damaged_archive_makes_no_data_set(tmp_path, caplog):
    """The command says one line and leaves nothing. A whole plain tar has one warning, although the command reads it twice."""
    files = {f"top/{i:02}.mrg": f"(S (NP (DT A) (NN w{i})) (VP (VBZ ends)))\n" * 9 for i in range(60)}
    settings = tmp_path / "settings.yaml"
    settings.write_text("format: brackets\nparser: {name: given}\nsubwords: {vocab_size: 300}\nworkers: 0\n")

    def preprocess_here(path, out):
        return run_here("preprocess.py", "--config", settings, "--out", out, f"splits.train.source=[{path}]")

    for suffix in ("tar.gz", "tar"):
        path = tmp_path / f"a.{suffix}"
        with tarfile.open(path, f"w:{suffix[4:]}") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        whole = path.read_bytes()
        if suffix == "tar":
            done = preprocess_here(path, tmp_path / "whole")
            assert done.returncode == 0 and caplog.text.count("a.tar has no checksum of its data") == 1, done.stderr
        for number, place in enumerate(
            random.Random(1).sample(range(len(files) * 1024 if suffix == "tar" else len(whole) - 8), 4)
        ):
            flipped = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
            path.write_bytes(whole[:place] if number % 2 or suffix == "tar" else flipped)
            done = preprocess_here(path, out := tmp_path / f"{suffix}-{number}")
            assert done.returncode == 2 and done.stderr.startswith(f"error: cannot read {path}: "), done.stderr
            assert done.stderr.count("\n") == 1 and not (out / "text").exists()


@pytest.mark.parametrize("split_words", ["pieces", "node", "both"])
def test_the_class_of_a_split_word_stands_where_it_is_asked_for(data, tmp_path, split_words):
    config = {"parsed": data, "subwords": {"vocab_size": 282}, "workers": 0}
    preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    encoded = tmp_path / "data" / "encoded"
    labels = (encoded / "vocab" / "labels.txt").read_text().splitlines()
    source = LabelledSource(encoded, "train", input_kinds.TREES, phrases=True, split_words=split_words)
    for number, row in enumerate(SplitShards(encoded, "train")[0].row(i) for i in range(2)):
        leaves, nodes = row["leaf_labels"].tolist(), row["node_labels"].tolist()
        own = [i for i, label in enumerate(row["nodes"]["label"]) if labels[label].startswith(SPLIT_WORD_PREFIX)]
        assert own  # some words are split
        for node in own:
            pieces = slice(row["spans"]["start"][node], row["spans"]["end"][node])
            if split_words != "pieces":
                nodes[node] = leaves[pieces.start]
            if split_words == "node":
                leaves[pieces] = [-1] * (pieces.stop - pieces.start)
        batch = source.batch([number])
        assert batch.position_labels[0].tolist() == leaves + nodes
        assert source.target_tokens(np.array([number])) == sum(c >= 0 for c in leaves + nodes)


def test_control_trees_take_the_classes_of_the_phrases_that_they_hold(data, tmp_path):
    tree = {"tree_source": "right", "binarize": "right"}
    config = {"parsed": data, "tree": tree, "subwords": {"vocab_size": 300}, "workers": 0}
    preprocess(PreprocessConfig.model_validate(config), tmp_path / "right")
    assert read_index(tmp_path / "right" / "encoded")["num_classes"] == 2
    row = SplitShards(tmp_path / "right" / "encoded", "train")[0].row(0)
    words = row["leaves"]["word_index"]
    spans = zip(words[row["spans"]["start"]], words[row["spans"]["end"] - 1] + 1, row["node_labels"], strict=True)
    found = {(start, end): c for start, end, c in spans if end - start > 1}
    # "The very best ." is a phrase of class 1, as "very best ." is; "best ." is none.
    assert found == {(0, 4): 1, (1, 4): 1, (2, 4): -1}


def test_descriptions_of_labelled_data_name_no_pairs(data):
    text = summary(read_index(data / "encoded"), data)
    assert "train: 40 examples" in text and "20 label_2" in text and "target" not in text and "pairs" not in text
    assert "target" not in describe(data)[0]
    drawn = draw_line(data, "train", 1)
    assert "\nsource: The very best .\n" in drawn and "\nlabel: 1\n" in drawn and "target" not in drawn
    assert not verify(data).problems
    assert ExampleSource(data / "encoded", "train").batch([0, 1]).tgt_in.shape == (2, 1)


def test_statuses_are_those_of_the_leaves_side(tmp_path):
    for name, lines in (("en", "One dog\nTwo dogs\n"), ("xx", "Dogs , one\nDogs , two\n")):
        (tmp_path / name).write_text(lines * 30, encoding="utf-8")
    config = {
        "splits": {"train": {"source": [tmp_path / "xx"], "target": [tmp_path / "en"]}},
        "parser": {"name": "words"},
        "target_parser": {"name": "shipped"},
        "tree": {"side": "target"},
        "subwords": {"vocab_size": 280},
        "workers": 0,
    }
    index = preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    assert "train: 60 pairs" in summary(index, tmp_path / "data")
    assert "parse_status: 60 parsed" in summary(index, tmp_path / "data")
    assert "parse_status: 60 parsed" in describe(tmp_path / "data")[0]
    assert "\ntarget: One dog\nsource: ▁" in draw_line(tmp_path / "data", "train", 1)


def test_a_translation_model_refuses_it(data, tmp_path):
    with pytest.raises(UserError, match=r"data has no target side \(its columns: example_id, leaves, nodes, spans, .*pairs"):
        run_training(TrainConfig(data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_header_that_names_the_text_otherwise_is_no_new_text(tmp_path):
    path = tmp_path / "new.tsv"
    path.write_text("label\tsentence\npos\ta good film\n")
    with pytest.raises(UserError, match=r"new.tsv, line 1: must be a header with the column text, .* 'text' is missing"):
        list(read_new_records(path, LabelledConfig()))
    for name, content, message in (
        (
            "a.csv",
            "pos,a good film\n",
            r"the columns label and text, .* set labelled.label, or rename its column, or add a header line$",
        ),
        ("b.csv", "label,sentence\nx,y\n", r"the columns label and text, .* set labelled.text, or rename its column$"),
        ("c.jsonl", '{"label": 2.0, "text": "a"}\n', r"line 1: the label must be a string or a whole number, but is '2.0'$"),
        ("d.jsonl", '{"label": true, "text": "a"}\n', r"line 1: the label must be a string or a whole number, but is 'true'$"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            list(read_labelled([tmp_path / name], LabelledConfig()))
    (row,) = read_new_records(path, LabelledConfig(text="sentence"))
    assert row[1] == ["a good film"]
