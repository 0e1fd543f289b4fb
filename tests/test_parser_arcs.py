"""Arcs of parsers: tokens of several words keep a tree, arcs that are none are a counted fallback, and rules are not mixed."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_dependency import reference_contraction
from test_dependency_trees import sentences

from treeproc.common.settings import UserError
from treeproc.online.raw_lines import RawLine, RawLineEncoder
from treeproc.parsers import Given, ParserConfig, build_parser
from treeproc.parsers.given import TagReader
from treeproc.parsers.lines import Line, LineParser, Sentence, Token
from treeproc.parsers.stanza_parser import StanzaParser
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.trees.arcs import check_arcs
from treeproc.trees.conllu import read_leaves
from treeproc.trees.spans import SpanTree, flat_tree
from treeproc.verify import verify

GOOD = [(1, "nsubj"), (-1, "root"), (1, "obj")]
NO_TREES = {
    "a cycle": [(1, "a"), (2, "b"), (0, "c")],
    "a cycle beside a root": [(-1, "root"), (2, "a"), (1, "b")],
    "a word that governs itself": [(0, "a"), (-1, "root"), (1, "b")],
    "two roots": [(-1, "root"), (-1, "root"), (0, "a")],
    "a governor behind the end": [(3, "a"), (-1, "root"), (1, "b")],
    "a governor in the next sentence": [(4, "a"), (-1, "root"), (1, "b")],
    "a governor before the start": [(-2, "a"), (-1, "root"), (1, "b")],
    "too few": GOOD[:2],
    "too many": [*GOOD, (1, "a")],
    "a relation without a name": [(1, None), *GOOD[1:]],
    "none": None,
}


class Answers(LineParser):
    """Answers every line with sentences of one token for three characters, with the given arcs."""

    def __init__(self, *arcs, **settings):
        super().__init__(ParserConfig(name="shipped").model_copy(update={"dependencies": True, **settings}))
        self._arcs = arcs

    def _sentences(self, lines):
        return [[self._sentence(line, 6 * number, arcs) for number, arcs in enumerate(self._arcs)] for line in lines]

    def _sentence(self, line: Line, first: int, arcs) -> Sentence:
        tokens = [Token(place, place + 1, (line.text[place],)) for place in range(first, first + 6, 2)]
        return Sentence(tokens, [("X", "T")] * 3, arcs, SpanTree(["S", "NP"], [0, 1], [3, 3]))


@pytest.mark.parametrize("arcs", NO_TREES.values(), ids=NO_TREES)
def test_arcs_that_are_no_tree_are_a_fallback(arcs):
    (alone,) = Answers(arcs).parse(["a b c"])
    assert alone.arcs == {"governor": [-1] * 3, "deprel": ["X"] * 3} and alone.parse_status == "arcs_failed"
    assert alone.trees == ["(S (T a) (NP (T b) (T c)))"]  # the constituents are good
    (beside,) = Answers(arcs, GOOD, split_sentences=True).parse(["a b c d e f"])
    assert beside.parse_status == "partly_arcs_failed"
    assert beside.arcs == {"governor": [-1, -1, -1, 4, -1, 4], "deprel": ["X"] * 3 + ["nsubj", "root", "obj"]}
    (tagged,) = TagReader(Answers(arcs), ["<2de>"]).parse(["<2de> a b c"])
    assert tagged.parse_status == "arcs_failed" and tagged.arcs["governor"] == [-1] * 4
    (without,) = Answers(arcs, dependencies=False).parse(["a b c"])
    assert without.parse_status == "parsed" and without.arcs is None


def test_good_arcs_and_sentences_of_roots_stay():
    (row,) = Answers(GOOD).parse(["a b c"])
    assert row.parse_status == "parsed" and row.arcs == {"governor": [1, -1, 1], "deprel": ["nsubj", "root", "obj"]}
    (roots,) = Answers([(-1, "root")] * 3).parse(["a b c"])  # as the files of treebanks have them
    assert roots.parse_status == "parsed" and roots.arcs["governor"] == [-1] * 3


class OneParse:
    """A parser of labels whose arcs failed."""

    def parse(self, lines, given=None):
        return Answers(NO_TREES["a cycle"]).parse(lines)


def test_given_trees_keep_their_labels_where_the_parsers_arcs_failed():
    parser = build_parser(ParserConfig(name="given", dependencies=True))
    parser._labeller, parser._config = OneParse(), parser._config.model_copy(update={"given_labels": "parsed"})
    words = {"text": ["a", "b", "c"], "start_char": [0, 2, 4], "end_char": [1, 3, 5]}
    arcs = {"governor": [-1, 0, 0], "deprel": ["root", "b", "c"]}
    for own, status in ((None, "arcs_failed"), (arcs, "parsed")):  # arcs of the file count
        (row,) = parser.parse(["a b c"], [Given(words, ["(Z (T a) (Y (T b) (T c)))"], deepcopy(own))])
        assert row.trees == ["(S (T a) (NP (T b) (T c)))"] and row.parse_status == status
        assert own is None or row.arcs == own


class Contracted(LineParser):
    """Answers with one sentence, whose tokens are not spelled by their words."""

    def __init__(self, arcs, leaves):
        super().__init__(ParserConfig(name="shipped").model_copy(update={"dependencies": True}))
        self._arcs, self._leaves = arcs, leaves

    def _sentences(self, lines):
        counts = np.bincount(self._leaves).tolist()
        tokens = [Token(2 * place, 2 * place + 1, ("other",) * count) for place, count in enumerate(counts)]
        return [[Sentence(tokens, [("X", "T")] * len(self._arcs), self._arcs, flat_tree(len(self._arcs)))]]


@num_examples(200)
@given(sentences(), st.data())
def test_tokens_of_several_words_keep_a_tree(sentence, data):
    governors, relations, *_ = sentence
    leaf_of = np.cumsum([0, *(data.draw(st.integers(0, 1)) for _ in governors[1:])])
    (row,) = Contracted(list(zip(governors, relations, strict=True)), leaf_of).parse(["x " * leaf_of[-1] + "x"])
    wanted, topmost = reference_contraction(governors, leaf_of.tolist())
    assert row.arcs == {"governor": wanted, "deprel": [relations[word] for word in topmost]}
    assert row.parse_status == "parsed" and check_arcs(np.array([0, len(wanted)]), np.array(wanted)) == [""]


def test_two_roots_inside_one_token_are_two_roots():
    """For files too, so that a sentence has the same fate with all cuts into tokens."""
    (row,) = Contracted([(-1, "root"), (-1, "root"), (0, "obj")], [0, 0, 1]).parse(["x x"])
    assert row.parse_status == "arcs_failed" and row.arcs["governor"] == [-1, -1]
    rows = ["1-2\tzum" + "\t_" * 8]
    rows += [f"{i}\t{i}\t_\tX\t_\t_\t{above}\tx\t_\t_" for i, above in ((1, 0), (2, 0), (3, 1))]
    with pytest.raises(UserError, match="a, line 3: expected one word with governor 0, but this is one of 2"):
        list(read_leaves(iter([*rows, ""]), "a"))


# Jobs


LINES = [*["Die Katze sieht einen Hund .", "Der Mann geht zum Haus ."] * 10, "zurT c .", "Hier ist ein Kreis ."]


def arcs_of(line: str) -> list[Sentence] | None:
    """A token of two words, whose first arc leaves it for a word below it; and a cycle."""
    if line == "zurT c .":
        tokens, arcs = (
            [Token(0, 4, ("a", "b")), Token(5, 6, ("c",)), Token(7, 8, (".",))],
            [(2, "case"), (-1, "root"), (1, "obj")],
        )
    elif line == "Hier ist ein Kreis .":
        tokens = [Token(0, 4, ("Hier",)), Token(5, 8, ("ist",)), Token(9, 20, ("x", "y"))]
        arcs = [(1, "a"), (0, "b"), (1, "c")]
    else:
        return None
    tags = [("ADP", "_"), ("VERB", "_"), ("NOUN", "_"), ("PUNCT", "_")]
    return [Sentence(tokens, tags, [*arcs, (1, "punct")], flat_tree(4))]


@pytest.fixture
def german(tmp_path, monkeypatch):
    """The settings of a job on the shipped German parser, which gives other arcs for two of its lines."""
    parse = StanzaParser._sentences
    monkeypatch.setattr(
        StanzaParser,
        "_sentences",
        lambda self, lines: [arcs_of(line.text) or own for line, own in zip(lines, parse(self, lines), strict=True)],
    )
    path = tmp_path / "lines"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return {
        "splits": {"train": {"source": [path], "target": [path]}},
        "parser": {"name": "shipped", "language": "de", "dependencies": True, "constituency": False, "device": "cpu"},
        "subwords": {"vocab_size": 300},
        "rows_per_shard": 8,
        "workers": 0,
    }


def bytes_of(data) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for stage in ("parsed", "encoded") for path in (data / stage).iterdir() if path.is_file()
    }


@pytest.mark.slow
def test_a_job_does_not_end_with_arcs_that_are_no_tree(german, tmp_path):
    data = tmp_path / "data"
    index = preprocess(PreprocessConfig.model_validate(german), data)
    rows = [row for shard in SplitShards(data / "parsed", "train") for row in shard.rows()]
    assert rows[20]["words"]["text"] == ["zurT", "c", "."] and rows[20]["arcs"]["governor"].tolist() == [-1, 0, 0]
    assert rows[20]["arcs"]["deprel"] == ["root", "obj", "punct"] and rows[20]["parse_status"] == "parsed"
    assert rows[21]["parse_status"] == "arcs_failed" and rows[21]["arcs"]["governor"].tolist() == [-1] * 3
    assert read_index(data / "parsed")["totals"]["train"]["status.arcs_failed"] == 1
    assert (data / "parsed/fallbacks.tsv").read_text().splitlines()[1:] == ["train\t22\tsource\tarcs_failed"]
    assert "parse_status: 1 arcs_failed, 21 parsed" in summary(index, data) and not verify(data).problems
    encoder = RawLineEncoder(data, given_trees=False, max_pieces=100)
    good, bad = encoder.encode([RawLine(line.encode()) for line in LINES[-2:]])
    assert bad.row and not bad.problem and not good.note
    assert bad.note == "has arcs of the parser that form no tree (arcs_failed); these words have no governors"
