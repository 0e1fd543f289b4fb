"""The leaves of every written tree are the words: of all readers and parsers, for any text. A reader of brackets undoes it.

Two words are no leaf: an empty one, and one with a line feed. No line has them.
"""

import re

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treeproc.online.raw_lines import place_trees
from treeproc.parsers import Given, ParserConfig, build_parser
from treeproc.parsers.config import split_at_blanks
from treeproc.parsers.given import TagReader, WordsOnly
from treeproc.parsers.lines import Line, LineParser, Sentence, Token
from treeproc.readers.labelled import _tree_row
from treeproc.readers.line_forms import FORMS, compose_row, is_blank, join_with_blanks
from treeproc.readers.treebanks import read_sentences, read_sentiment, read_trees
from treeproc.trees.flat_trees import read_flat_trees
from treeproc.trees.spans import escape, flat_tree, read_brackets, write_brackets

# What a notation of leaves could take for something else, and any other text.
_PARTS = ("(", ")", "-", "\\", "/", "*", "_", " ", "\t", "\u00a0", "\u2028", "\x1c", "a", "e\u0301", "LRB", "RSB", "U+0020")
_ESCAPES = ("-LRB-", "-RCB-", "\\/", "\\*", "-U+0020-", "-U+002D-", "-U+000A-", "-U+1F600-", "-u+0020-", "-LRB")
TEXTS = st.one_of(
    st.lists(st.sampled_from(_PARTS + _ESCAPES), min_size=1, max_size=6).map("".join), st.text(min_size=1, max_size=8)
).map(lambda text: text.replace("\n", "a"))
TOKENS = TEXTS.filter(lambda token: not re.search(r"[\s()]", token))  # as words between blanks, or in a file of brackets
LINES = TEXTS.map(str.strip).filter(lambda line: not is_blank(line))


def leaves_of(trees: list[str]) -> list[str]:
    """The leaves as `translate trees=` and the format `brackets` read them."""
    return [word for row in read_trees(iter(trees), "tree") for word in row["words"]["text"]]


def check(row: dict) -> None:
    assert leaves_of(row["trees"]) == row["words"]["text"]
    assert read_flat_trees(pa.array(row["trees"], pa.string())).leaf_edges[-1] == len(row["words"]["text"])


@num_examples(250)
@given(st.lists(TEXTS, min_size=1, max_size=4))
@example(["t(est)", "10 000", "-LRB-", "\\/", "-LRB(", "(-RRB-", "-U+0020\\/", "\\\\*", "-U+002D-LRB-"])
def test_any_word_is_written_and_read(words):
    text = write_brackets(flat_tree(len(words)), words, ["-LRB-"] * len(words))
    assert read_brackets(text)[:2] == (words, ["-LRB-"] * len(words))
    check({"words": {"text": words}, "trees": [text]})


@num_examples(500)
@given(TEXTS)
@example("a/b*[c]{d}\\e-f_g-LRB")
def test_other_words_are_written_as_they_are(word):
    """What readers of earlier versions took for the word itself, and writers wrote so: shards keep their bytes."""
    if not re.search(r"[\s()]|-[LR][RSC]B-|\\[/*]|-U\+[0-9A-F]{4}-", word):
        assert escape(word) == word
    assert escape("(") == "-LRB-" and escape(")") == "-RRB-" and not re.search(r"[\s()]", escape(word))


def test_notation():
    assert list(map(escape, ("t(est)", "10\u00a0000", "-LRB-", "and\\/or"))) == [
        "t-LRB-est-RRB-", "10-U+00A0-000", "-U+002D-LRB-", "and-U+005C-/or",
    ]  # fmt: skip
    assert escape("") == "_"  # no line has such a word
    assert read_brackets("(N x-U+000A-y-U+0041-)")[0] == ["x-U+000A-y-U+0041-"]  # only white space, - and \ have numbers


@num_examples(150)
@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_readers_of_brackets(tokens):
    """Files hold any escape; labelled texts and sentiment trees are read in the same way, and NFC composes leaves and words."""
    text = f"(S {' '.join(f'(2 {token})' for token in tokens)})"
    rows = [*read_trees(iter([text]), "a"), *read_sentiment(iter([text.replace("S", "3", 1)]), "a")]
    if rows[0]["source"]:
        rows.append(_tree_row(text, "a"))
    for row in rows:
        check(row)
        composed = compose_row(row)
        check(composed)
        assert composed["words"]["text"] == list(map(FORMS["nfc"], row["words"]["text"]))


@num_examples(300)
@given(st.lists(TEXTS.map(lambda text: text.replace("\t", " ").strip()).filter(bool), min_size=1, max_size=5))
def test_reader_of_conllu(forms):
    rows = [f"{number}\t{form}\t_\tX\tX\t_\t{number - 1}\tdep\t_\t_" for number, form in enumerate(forms, start=1)]
    (row,) = read_sentences(iter([*rows, ""]), "a")
    assert row["words"]["text"] == forms
    check(row)
    check(compose_row(row))


@num_examples(200)
@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_given_trees_and_words(words):
    line, columns = join_with_blanks(words)
    tree = write_brackets(flat_tree(len(words)), words, ["N"] * len(words))
    for parser in (build_parser(ParserConfig(name="given")), WordsOnly(ParserConfig(name="words"))):
        (parsed,) = parser.parse([line], [Given(columns, [tree])])
        assert parsed.words["text"] == words
        check(vars(parsed))


@pytest.mark.parametrize("tag", ["<-LRB->", "<\\/>", "<-U+0020->", "<2de>"])
def test_tags_of_lines(tag):
    (parsed,) = TagReader(WordsOnly(ParserConfig(name="words")), [tag]).parse([f"{tag} a b"])
    assert parsed.words["text"] == [tag, "a", "b"]
    check(vars(parsed))


class RandomTokens(LineParser):
    """What every parser has in common, on any cut of lines into tokens, some of several words."""

    def __init__(self, draw, **settings):
        super().__init__(ParserConfig(name="shipped").model_copy(update=settings))
        self._draw = draw

    def _sentences(self, lines):
        return [self._cut(line) for line in lines]

    def _cut(self, line: Line) -> list[Sentence]:
        cuts = sorted({0, len(line.text), *self._draw(st.sets(st.integers(0, len(line.text)), max_size=4))})
        sentences = []
        for start, end in zip(cuts, cuts[1:], strict=False):
            text = line.text[start:end]
            words = self._draw(st.sampled_from([(text,), ("in", "dem"), (text[:1], text[1:])] if text[1:] else [(text,)]))
            count = len(words)
            tree = self._draw(st.sampled_from([flat_tree(count), None]))
            status = "parsed" if tree else "flat_parser_failed"
            arcs = [(number - 1, "dep") for number in range(count)]
            sentences.append(Sentence([Token(start, end, words)], [("X", "-NONE-")] * count, arcs, tree, status))
        return sentences


@num_examples(200)
@given(LINES, st.booleans(), st.booleans(), st.data())
def test_parsers(line, dependencies, split_sentences, data):
    """Also those of spaCy, benepar, SuPar and CoreNLP, which give their tokens to the same method."""
    parser = RandomTokens(data.draw, dependencies=dependencies, split_sentences=split_sentences)
    (parsed,) = parser.parse([line])
    assert parsed.parse_status != "flat_parser_failed" or not split_sentences or set(parsed.words["pos_tag"]) == {"X"}
    check(vars(parsed))


@pytest.mark.slow
@pytest.mark.parametrize("constituency", [True, False])
def test_shipped_parser(constituency):
    """Its trees can be given to `translate trees=` beside their lines, as its dependency trees over the same words."""
    parser = build_parser(ParserConfig(name="shipped", device="cpu", dependencies=True, constituency=constituency))

    @num_examples(40)
    @given(st.lists(LINES, min_size=1, max_size=8))
    @example(["Here is a t(est) .", "It is 10\u00a0000 -LRB- or and\\/or .", "I saw a (man) with-LRB-it- ."])
    def every_line(lines):
        for given_words in (None, [Given(split_at_blanks(line)) for line in lines]):
            for line, parsed in zip(lines, parser.parse(lines, given_words), strict=True):
                check(vars(parsed))
                if not re.search("[\x00-\x08\x0a-\x1f\x7f-\x9f]", line):
                    words = place_trees(line, parsed.trees[0])[1].words
                    assert words == {name: parsed.words[name] for name in words}

    every_line()


def test_escapes_of_control_characters_are_refused_where_the_characters_are():
    with pytest.raises(ValueError, match=r"words of the tree: control character U\+000B at character 2; remove it"):
        place_trees(None, "(S (N a-U+000B-b))")
    assert place_trees(None, "(S (N a-U+0020-b))")[0] == "a b"
