"""Tags in front of lines: the parser does not see them, a model reads them as one leaf, and scores are told apart by them."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sacrebleu.metrics import BLEU

from treenet.data.splits import read_references
from treenet.evaluation.buckets import format_tags, score_tags
from treenet.evaluation.evaluate import score_lines
from treenet.evaluation.settings import EvaluateSettings
from treeproc.online.line_encoder import LineEncoder
from treeproc.online.raw_lines import RawLine, RawLineEncoder
from treeproc.parsers import Given, ParserConfig, build_parser
from treeproc.parsers.config import ParsedLine
from treeproc.parsers.given import TagReader, split_tag
from treeproc.shards.schema import without_tag
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.preprocess import preprocess
from treeproc.subwords import Subwords
from treeproc.trees.arcs import check_arcs
from treeproc.trees.flat_trees import read_flat_trees

SAMPLE = Path(__file__).resolve().parent.parent / "treeproc" / "sample"


class OneParse:
    """Gives every line the same trees, and records the lines."""

    def __init__(self, *trees: str, governors=None):
        self.lines, self.trees, self.governors = [], list(trees), governors

    def parse(self, lines, given=None):
        self.lines += lines
        words = {"text": ["a", "b", "c"], "start_char": [0, 2, 4], "end_char": [1, 3, 5], "pos_tag": ["A", "B", "C"]}
        arcs = None if self.governors is None else {"governor": self.governors, "deprel": ["x", "y", "z"]}
        return [ParsedLine(words, self.trees, "parsed", arcs) for _ in lines]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("<2de> a b c", ("<2de>", "a b c")),
        ("<2de>  a b c", ("<2de>", "a b c")),
        ("<2de>a b c", ("", "<2de>a b c")),
        ("a <2de> b", ("", "a <2de> b")),
        ("<2fr> a", ("", "<2fr> a")),
        ("<2de>", ("", "<2de>")),
    ],
)
def test_a_tag_is_the_first_word_before_a_text(line, expected):
    assert split_tag(line, ["<2de>"]) == expected


def test_the_tag_is_a_word_under_a_root_over_the_first_tree():
    parser = OneParse("(ROOT (S (A a) (B b)))", "(ROOT (NP (C c)))", governors=[1, -1, -1])
    trees = [*parser.trees]
    tagged, plain = TagReader(parser, ["<bt>"]).parse(["<bt>  a b c", "a b c"])
    assert parser.lines == ["a b c", "a b c"] and plain.trees == parser.trees == trees
    assert tagged.words == {
        "text": ["<bt>", "a", "b", "c"],
        "start_char": [0, 6, 8, 10],
        "end_char": [4, 7, 9, 11],
        "pos_tag": ["TAG", "A", "B", "C"],
    }
    assert tagged.trees == ["(TAGGED (TAG <bt>) (ROOT (S (A a) (B b))))", "(ROOT (NP (C c)))"]
    assert tagged.arcs == {"governor": [2, 2, -1, -1], "deprel": ["tag", "x", "y", "z"]}
    assert not any(check_arcs(read_flat_trees(pa.array(tagged.trees)).leaf_edges, np.array([2, 2, -1, -1])))


def test_arcs_of_a_sentence_that_was_not_parsed_stay_roots():
    (tagged,) = TagReader(OneParse("(X (A a) (B b) (C c))", governors=[-1, -1, -1]), ["<bt>"]).parse(["<bt> a b c"])
    assert tagged.arcs["governor"] == [-1, -1, -1, -1]


def test_descriptions_without_tags_are_as_before():
    assert "tags" not in ParserConfig().facts()
    assert ParserConfig(tags=["<b>", "<a>", "<b>"]).facts()["tags"] == ["<a>", "<b>"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data set of the words parser; every other line has a tag."""
    folder = tmp_path_factory.mktemp("tagged")
    splits = {}
    for split, count in (("train", 60), ("valid", 10)):
        for side, language in (("source", "en"), ("target", "de")):
            with gzip.open(SAMPLE / f"{split}.{language}.gz", "rt", encoding="utf-8") as file:
                lines = [next(file) for _ in range(count)]
            if side == "source":
                lines = [f"<{'ab'[number // 2 % 2]}> {line}" if number % 2 else line for number, line in enumerate(lines)]
            (folder / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")
        splits[split] = {"source": [str(folder / f"{split}.en")], "target": [str(folder / f"{split}.de")]}
    parser = {"name": "words", "tags": ["<a>", "<b>"]}
    config = PreprocessConfig(
        splits=splits, parser=parser, subwords={"vocab_size": 400}, tree={"tree_source": "balanced"}, workers=0
    )
    preprocess(config, folder / "data")
    return folder / "data"


def test_a_tagged_line_has_one_more_leaf_than_the_line_alone(data):
    index, subwords = read_index(data / "encoded"), Subwords(data / "encoded" / "vocab" / "pieces.model")
    assert index["parser_settings"]["tags"] == ["<a>", "<b>"]
    encoder, seen = LineEncoder(data), set()
    texts, rows = ([row for shard in SplitShards(data / stage, "train") for row in shard.rows()] for stage in ("text", "encoded"))
    for text, row in zip(texts, rows, strict=True):
        tag, plain = split_tag(text["source"], ["<a>", "<b>"])
        pieces = row["leaves"]["piece"].tolist()
        (alone,) = encoder.encode([plain])
        assert pieces[1 if tag else 0 :] == alone["leaves"]["piece"].tolist()
        assert subwords.decode([pieces]) == [text["source"]]
        if tag:
            assert subwords.names(pieces[:1]) == [f"\u2581{tag}"]
            seen.add(tag)
        (online,) = encoder.encode([text["source"]], text["example_id"])
        assert all(online[name].keys() == row[name].keys() for name in ("leaves", "spans"))
        assert all((online[n][k] == row[n][k]).all() for n in ("leaves", "nodes", "spans") for k in row[n])
    assert seen == {"<a>", "<b>"}


def test_filters_read_the_text_after_a_tag(tmp_path):
    """Lines as `sed 's/^/<a> /'` makes them: the tag alone is an empty line, and it adds no word and no letter."""
    sources = ["<a> one two three", "<a> ", "<a> one", "<b> \u044f", "<b> x \u044f \u044f \u044f"]
    targets, more = ["eins zwei", "zwei", "eins zwei", "ich", "x ich und"], 20
    sources, targets = [*sources, *["<b> \u0434\u043e\u043c"] * more], [*targets, *["hausboot"] * more]
    splits = {"train": (sources, targets), "valid": (sources[:2], ["eins", "zwei"])}
    files = {}
    for split, sides in splits.items():
        for side, lines in zip(("source", "target"), sides, strict=True):
            path = tmp_path / f"{split}.{side}"
            path.write_text("".join(f"{line}\n" for line in lines))
            files.setdefault(split, {})[side] = [path]
    common = {"splits": files, "parser": {"name": "words", "tags": ["<a>", "<b>"]}, "tree": {"tree_source": "flat"}, "workers": 0}
    for name, filters, expected in (
        ("ratio", {"max_ratio": 1.5}, [0, 3, 4]),
        ("script", {"source_script": "cyrillic", "target_script": "latin"}, [3, 4]),
        ("none", {}, [0, 2, 3, 4]),
    ):
        preprocess(PreprocessConfig(**common, subwords={"vocab_size": 285}, filters=filters), out := tmp_path / name)
        found = {split: [r["example_id"] for s in SplitShards(out / "text", split) for r in s.rows()] for split in splits}
        assert found == {"train": [*expected, *range(5, 5 + more)], "valid": [0]}, name


def test_a_line_with_another_tag_is_translated_with_a_warning(data):
    encoder = RawLineEncoder(data, given_trees=False, max_pieces=100)
    lines = encoder.encode([RawLine(line) for line in (b"<a> one dog", b"<c> one dog", b"one <c> dog", b"< c> dog")])
    note = "begins with <c>, which is not a tag of the data set (<a>, <b>); it is read as text"
    assert [line.note for line in lines] == ["", note, "", ""]
    assert all(line.row for line in lines)


def test_a_tag_alone_is_an_empty_line(data):
    """As `sed 's/^/<a> /'` makes it of an empty line, and as preprocessing reads it."""
    encoder = RawLineEncoder(data, given_trees=False, max_pieces=100)
    lines = encoder.encode([RawLine(line.encode()) for line in ("<a> ", "<b>", "<a> \u200b", "<c>", "<a> <b>")])
    assert [line.source for line in lines] == ["", "", "", "<c>", "<a> <b>"] and not any(line.problem for line in lines)
    assert [bool(len(line.row["leaves"]["piece"])) for line in lines] == [False, False, False, True, True]


def test_a_line_without_its_tag():
    lines = ("<de> a b", "<de>", "a <de>", " x")
    assert [without_tag(line, ["<de>"]) for line in lines] == ["a b", "", "a <de>", " x"]


def test_scores_by_tag_are_of_the_side_that_models_read(data):
    """The pairs the other way round, in a data set whose models read the target side."""
    files = {split: {side: [str(data.parent / f"{split}.{side}")] for side in ("de", "en")} for split in ("train", "valid")}
    config = PreprocessConfig(
        splits={split: {"source": paths["de"], "target": paths["en"]} for split, paths in files.items()},
        parser={"name": "words"},
        target_parser={"name": "words", "tags": ["<a>", "<b>"]},
        subwords={"vocab_size": 400},
        tree={"tree_source": "balanced", "side": "target"},
        workers=0,
    )
    preprocess(config, out := data.parent / "target_side")
    found = []
    for folder in (data, out):
        lines = read_references(folder, "valid")
        found.append(score_lines(lines, lines, folder, EvaluateSettings(split="valid"))["tags"])
    assert [(row["tag"], row["num_examples"]) for row in found[1]] == [("<a>", 3), ("<b>", 2), ("none", 5)]
    assert found[0] == found[1]


def test_scores_by_tag_are_those_of_the_lines_alone():
    sources = ["<a> x", "<b> x", "y", "<a> y", "<c> z"]
    lines = ["the cat sat down here", "a dog ran off now", "no", "one two three four", "five"]
    references = ["the cat sat down there", "a dog ran off then", "yes", "one two three four", "five"]
    found = score_tags(sources, ["<b>", "<a>", "<z>"], lines, references)
    assert [(row["tag"], row["num_examples"]) for row in found] == [("<a>", 2), ("<b>", 1), ("none", 2)]
    alone = BLEU(tokenize="13a", force=True).corpus_score([lines[0], lines[3]], [[references[0], references[3]]]).score
    assert found[0]["bleu"] == alone
    assert format_tags(found).splitlines()[1].split()[:2] == ["<a>", "2"]


def test_words_with_given_offsets_are_not_needed():
    (parsed,) = build_parser(ParserConfig(name="words", tags=["<a>"])).parse(["<a> b c"], [Given()])
    assert parsed.words["text"] == ["<a>", "b", "c"] and parsed.words["start_char"] == [0, 4, 6]
