"""Lines of several sentences: each is parsed by itself, and one root stands over them; or each is a row, of running text."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from treeproc.common.settings import UserError
from treeproc.online.line_encoder import LineEncoder
from treeproc.online.raw_lines import RawLine, RawLineEncoder
from treeproc.parsers import Given, ParsedLine, ParserConfig, build_parser, read_trees
from treeproc.readers.line_forms import undo_moses
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages import text_blocks
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.stages.sentences import sentences_of
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
    for line, row in zip(LineEncoder(data).encode(LINES), list(encoded.rows())[: len(LINES)], strict=True):
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


# Running text, cut to a row a sentence.

RUNNING = {
    "b.train": "= = = A dog = = =\n\nI saw a dog. It was old.\nShe is\there, Mr. Smith.Go home!  We know it.\n \n\nWho is it?",
    "a.train": "Tom said: \u201cNo.\u201d He left; \u00fcber all.\u2028It rained. " + "very " * 500 + "much.\n\n\n",
    "sub/c.train": "\nThe end.\r\nIt was late... Was it? Yes.\r\n",
}
DOCUMENTS = [  # the lines of each, in the order of the files' names
    RUNNING["a.train"].split("\n")[:1],
    RUNNING["b.train"].split("\n")[:1],
    RUNNING["b.train"].split("\n")[2:4],
    RUNNING["b.train"].split("\n")[-1:],
    RUNNING["sub/c.train"].split("\n")[1:],
]


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("running")
    for name, text in RUNNING.items():
        (folder / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "train" / name).write_bytes(text.encode())
    preprocess(PreprocessConfig.model_validate(settings_of(folder)), folder / "data")
    return folder


def settings_of(folder: Path, **more) -> dict:
    values = {"format": "documents", "splits": {"train": {"source": [folder / "train"]}}, "subwords": {"vocab_size": None}}
    return {**values, "parser": {"name": "shipped"}, "rows_per_shard": 4, "workers": 0} | more


def text_rows(data: Path) -> list[dict]:
    return [row for shard in SplitShards(data / "text", "train") for row in shard.rows()]


def test_running_text_becomes_a_row_a_sentence_with_the_number_of_its_document(running):
    rows = text_rows(running / "data")
    found: dict[int, list[str]] = {}
    for row in rows:
        found.setdefault(row["document"], []).append(row["source"])
    assert [*found] == list(range(len(DOCUMENTS)))
    for number, lines in enumerate(DOCUMENTS):
        assert " ".join(found[number]).split() == " ".join(lines).split()
    assert found[2][:2] == ["I saw a dog.", "It was old."] and found[4][0] == "The end." and len(found[0]) >= 3
    statuses = [row["parse_status"] for shard in SplitShards(running / "data" / "parsed", "train") for row in shard.rows()]
    assert len(statuses) == len(rows) and {*statuses} == {"parsed", "flat_too_long"}
    assert not verify(running / "data").problems


def test_a_sentence_ends_before_a_blank_alone():
    words = {"text": ["a.", "b", "c"], "start_char": [0, 2, 4], "end_char": [2, 3, 5]}
    parsed = ParsedLine(words, ["(X (X a.))", "(X (X b))", "(X (X c))"], "parsed")
    assert sentences_of("a.b c", parsed) == ["a.b", "c"]


def test_a_killed_job_on_running_text_ends_as_one_at_once(running, tmp_path, monkeypatch):
    whole = {path.name: path.read_bytes() for path in (running / "data" / "text").glob("*.arrow")}
    assert len(whole) > 2
    again = Path(shutil.copytree(running, tmp_path / "again", ignore=shutil.ignore_patterns("data")))
    kill_after = [3]

    def killed(*arguments, **options):
        kill_after[0] -= 1
        if not kill_after[0]:
            raise KeyboardInterrupt
        return write(*arguments, **options)

    write = text_blocks.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(text_blocks, "write_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            preprocess(PreprocessConfig.model_validate(settings_of(again)), again / "data")
    preprocess(PreprocessConfig.model_validate(settings_of(again)), again / "data")
    assert {path.name: path.read_bytes() for path in (again / "data" / "text").glob("*.arrow")} == whole


def test_files_of_a_folder_are_named_and_copies_noted(running, tmp_path, caplog):
    folder = Path(shutil.copytree(running / "train", tmp_path / "train"))
    caplog.set_level("INFO", "treeproc")
    for said, number in (("a.train, b.train, sub/c.train", 3), ("a.train, a.train.bak, b.train, ...", 4)):
        caplog.clear()
        preprocess(PreprocessConfig.model_validate(settings_of(tmp_path)), tmp_path / f"data{number}")
        assert caplog.text.count(f"train: {number} files of {folder}: {said}\n") == 1
        assert ("several suffixes (3 .train, 1 .bak)" in caplog.text) == (number == 4)
        shutil.copy(folder / "a.train", folder / "a.train.bak")


def test_documents_are_not_torn_or_read_without_a_parser(running):
    train = {"source": [running / "train"]}
    for more, message in (
        ({"splits": {"train": train, "valid": {"hold_out": 2}}}, "would separate the sentences of a document"),
        ({"parser": {"name": "words"}}, "parser.name: must find sentences for format documents"),
        ({"splits": {"train": train | {"target": [running / "train"]}}}, "takes no target files"),
    ):
        with pytest.raises(ValueError, match=message):
            PreprocessConfig.model_validate(settings_of(running, **more))
    (running / "empty").write_text("\n \n")
    config = PreprocessConfig.model_validate(settings_of(running, splits={"train": {"source": [running / "empty"]}}))
    with pytest.raises(UserError, match="no example of format documents in .*empty"):
        preprocess(config, running / "none")
