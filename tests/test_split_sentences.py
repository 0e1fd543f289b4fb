"""Lines of several sentences: each is parsed by itself, and one root stands over them, in data sets and in translating."""

import gzip

import numpy as np
import pytest

from treeproc.online.line_encoder import LineEncoder
from treeproc.online.raw_lines import RawLine, RawLineEncoder
from treeproc.parsers import Given, ParserConfig, build_parser, read_trees
from treeproc.readers.line_forms import undo_moses
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.subwords import LabelVocab
from treeproc.verify import verify

pytestmark = pytest.mark.slow

LINES = ["I saw a dog. It was old.", "She is here.", "Go home! We know it. They left the old house."]
LINES += ["Yes. " + "No, " * 30 + "no."]
SPLITTING = ParserConfig(name="shipped", device="cpu", split_sentences=True, max_words=30)


@pytest.fixture(scope="module")
def parser():
    return build_parser(SPLITTING)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    for side in ("en", "de"):
        lines = gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).decode().split("\n")[:40]
        (folder / side).write_text("\n".join([*LINES, *lines]) + "\n")
    files = {"source": [folder / "en"], "target": [folder / "de"]}
    settings = {"splits": {"train": files}, "parser": SPLITTING.model_dump(mode="json"), "workers": 0}
    settings["subwords"] = {"vocab_size": 400}
    preprocess(PreprocessConfig.model_validate(settings), folder / "data")
    return folder / "data"


def roots(row) -> int:
    return int(np.count_nonzero(row["nodes"]["parent"] < 0))


def test_the_sentences_of_a_pair_are_parsed_by_themselves_under_one_root(data, parser):
    assert read_index(data / "encoded")["tree_settings"]["documents"] == "dummy_root" and not verify(data).problems
    (parsed,), (encoded,) = (SplitShards(data / stage, "train") for stage in ("parsed", "encoded"))
    labels = LabelVocab.load(data / "encoded" / "vocab" / "labels.txt").names
    assert [len(parsed.row(i)["trees"]) for i in range(4)] == [2, 1, 3, 2]
    alone = parser.parse(["I saw a dog.", "It was old."])
    assert parsed.row(0)["trees"] == [tree for line in alone for tree in line.trees]
    assert all(roots(row) == 1 for row in encoded.rows())
    assert [labels[encoded.row(i)["nodes"]["label"][0]] == "DOC" for i in range(4)] == [True, False, True, True]


def test_a_sentence_without_a_tree_is_flat_alone_and_counted(data):
    (parsed,) = SplitShards(data / "parsed", "train")
    assert parsed.row(3)["parse_status"] == "partly_flat_too_long"
    assert [len(tree) > 1 for _, tree in read_trees(parsed.row(3))] == [True, False]
    assert read_index(data / "parsed")["totals"]["train"]["status.partly_flat_too_long"] == 1


def test_raw_lines_are_split_as_the_data_set_was(data):
    (encoded,) = SplitShards(data / "encoded", "train")
    for line, row in zip(LineEncoder(data).encode(LINES), encoded.rows(), strict=False):
        assert all(np.array_equal(line["spans"][name], row["spans"][name]) for name in ("start", "end", "subtree_end"))
        assert np.array_equal(line["nodes"]["label"], row["nodes"]["label"])
    result = RawLineEncoder(data, given_trees=False, max_pieces=1000).encode([RawLine(LINES[3].encode())])[0]
    assert "has a sentence that was not parsed (partly_flat_too_long)" in result.note and roots(result.row) == 1


def test_constraints_may_come_from_files_with_two_line_ends(data):
    one = RawLine(b"She is here.\r", prefix=b"Sie ist\r", must_appear=b"hier\tda\r", must_not_appear=b" dort\r")
    (found,) = RawLineEncoder(data, given_trees=False, max_pieces=1000).encode([one])
    assert not found.problem and found.row["must_not_appear"] == [" dort"] and len(found.row["must_appear"]) == 2


def test_given_words_are_split_where_their_sentences_end(parser):
    row = undo_moses({"source": "I don &apos;t know it . She won &apos;t go ."})
    (parsed,) = parser.parse([row["source"]], [Given(row["words"])])
    assert [len(tags) for tags, _ in read_trees(vars(parsed))] == [6, 5]
    assert parsed.words["text"] == row["words"]["text"] and parsed.words["start_char"] == row["words"]["start_char"]


def test_the_users_choice_for_several_trees_holds(data):
    pairs = {"splits": {"train": {"source": ["a"], "target": ["b"]}}, "parser": {"name": "shipped", "split_sentences": True}}
    documents = {"splits": {"train": {"source": ["a"]}}, "format": "imdb", "parser": pairs["parser"]}
    for values, expected in (
        (pairs, "dummy_root"),
        (pairs | {"tree": {"documents": "separate"}}, "separate"),
        (pairs | {"parser": {"name": "shipped"}}, "separate"),
        (documents, "dummy_root"),
        (documents | {"format": "brackets"}, "separate"),
    ):
        assert PreprocessConfig.model_validate(values).settled().tree.documents == expected
    begun = {"tree": {"documents": "separate"}}
    assert PreprocessConfig.model_validate(pairs).settled(begun).tree.documents == "separate"
