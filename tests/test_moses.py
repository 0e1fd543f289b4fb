"""Moses tokens: every escape undone once, every token where it says, English ones read as treebanks write them."""

import gzip
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treeproc.common.settings import UserError
from treeproc.online.line_encoder import LineEncoder, possible_remedies
from treeproc.parsers import Given, ParserConfig, build_parser, describe_parser
from treeproc.parsers.lines import treebank_tokens
from treeproc.parsers.model_files import _choices
from treeproc.readers.line_forms import join_with_blanks, undo_moses, unescape
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.subwords import Subwords
from treeproc.verify import verify

pytestmark = pytest.mark.slow

ESCAPES = {"&": "&amp;", "|": "&#124;", "<": "&lt;", ">": "&gt;", "'": "&apos;", '"': "&quot;", "[": "&#91;", "]": "&#93;"}


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("it &apos;s &quot; R &amp; D &quot;", ["it", "'s", '"', "R", "&", "D", '"']),
        ("well @-@ known &#91; 1 &#93; a &#124; b &lt;x&gt;", ["well", "-", "known", "[", "1", "]", "a", "|", "b", "<x>"]),
        ("&amp;quot; &amp;amp;", ["&quot;", "&amp;"]),  # once: an escape that stood in the text stays text
        ("&copy; a@-@b @-@x", ["&copy;", "a@-@b", "@-@x"]),
        ("", []),
    ],
)
def test_escapes(line, tokens):
    assert unescape(line) == tokens


@given(st.lists(st.text(st.sampled_from("ab&|<>'\"[]-;ä "), min_size=1).filter(lambda t: t == t.replace(" ", "")), max_size=8))
@num_examples(200)
def test_tokens_stand_where_they_say(tokens):
    escaped = ["@-@" if token == "-" else "".join(ESCAPES.get(c, c) for c in token) for token in tokens]
    row = undo_moses({"source": " ".join(escaped), "target": " ".join(escaped)})
    words = row["words"]
    assert words["text"] == tokens and row["source"] == row["target"] == " ".join(tokens)
    assert [row["source"][a:b] for a, b in zip(words["start_char"], words["end_char"], strict=True)] == tokens


def line_tokens(line: str):
    words = join_with_blanks(line.split())[1]
    return treebank_tokens(list(zip(words["start_char"], words["end_char"], words["text"], strict=True)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("I don 't and DON 'T", "I do n't and DO N'T"),
        ("it can 't , won 't and ain 't", "it ca n't , wo n't and ai n't"),
        ("son 't is Don 's", "son 't is Don 's"),  # no auxiliary, no negation
        ("\" it 's \" she 'd say", "`` it 's '' she 'd say"),
        ("don ’ t say it ’ s so", "do n’t say it ’s so"),
        ("'Don 't go , ' he said", "' Do n't go , ' he said"),
        ("cannot Cannot gonna", "can not Can not gon na"),
        ("at 8 o 'clock O 'Reilly and I 'd l 'enfant", "at 8 o'clock O'Reilly and I 'd l'enfant"),
        ("'tis 'em 'all 'quoted ' '90s '", "'tis 'em 'all ' quoted ' '90s '"),
        ("well-known -- ... ( 1 )", "well-known -- ... ( 1 )"),
    ],
)
def test_moses_tokens_as_treebanks_write_them(line, words):
    tokens = line_tokens(line)
    assert [word for token in tokens for word in token.words] == words.split()
    assert re.sub(r"\s", "", "".join(line[t.start : t.end] for t in tokens)) == line.replace(" ", "")


@given(
    st.lists(
        st.sampled_from(["don", "'don", "can", "'t", "’", "t", "'", '"', "o", "'clock", "cannot", "'quoted", "x"]), max_size=9
    )
)
@num_examples(200)
def test_no_character_of_a_line_is_lost_or_moved(words):
    tokens = line_tokens(" ".join(words))
    ends = [0, *(token.end for token in tokens)]
    assert all(before <= token.start < token.end for before, token in zip(ends, tokens, strict=False))
    assert "".join(" ".join(words)[t.start : t.end] for t in tokens).replace(" ", "") == "".join(words)


NEGATED = [
    "He don &apos;t know it .",
    "They won &apos;t , and we cannot .",
    "It isn &apos;t &quot; true &quot; at 8 o &apos;clock .",
    "&apos;Don &apos;t go , &apos; he said .",
]


def test_leaves_are_the_tokens_and_have_the_tags_of_the_treebanks_words():
    config = ParserConfig(name="shipped", device="cpu", treebank_words=True)
    rows = [undo_moses({"source": line}) for line in NEGATED]
    first, second, third, fourth = build_parser(config).parse([r["source"] for r in rows], [Given(r["words"]) for r in rows])
    assert first.words["text"] == ["He", "don", "'t", "know", "it", "."]
    assert first.words["pos_tag"][1:4] == ["VBP", "RB", "VB"]
    assert second.words["text"][1:3] == ["won", "'t"] and second.words["pos_tag"][1:3] == ["MD", "RB"]
    assert second.words["text"][-3:-1] == ["can", "not"] and second.words["pos_tag"][-3:-1] == ["MD", "RB"]
    assert third.words["text"][-2] == "o 'clock" and third.words["pos_tag"][3:6:2] == ["``", "''"]
    assert fourth.words["text"][:4] == ["'", "Don", "'t", "go"] and fourth.words["pos_tag"][1:4] == ["VB", "RB", "VB"]
    for row, parsed in zip(rows, (first, second, third, fourth), strict=True):
        places = zip(parsed.words["start_char"], parsed.words["end_char"], strict=True)
        assert [row["source"][a:b] for a, b in places] == parsed.words["text"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moses")
    for side in ("en", "de"):
        lines = gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).decode().split("\n")[:40]
        (folder / side).write_text("\n".join([*NEGATED, *lines]) + "\n")
    return folder


def moses_config(corpus, **parser) -> PreprocessConfig:
    files = {"source": [corpus / "en"], "target": [corpus / "de"]}
    values = {"splits": {"train": files}, "tokenized": "moses", "subwords": {"vocab_size": 400}, "workers": 0}
    return PreprocessConfig.model_validate(values | {"parser": {"name": "shipped", "device": "cpu"} | parser})


def shard_hashes(out):
    return [s["sha256"] for stage in ("text", "parsed", "encoded") for s in read_index(out / stage)["shards"]]


def test_a_data_set_of_moses_tokens_is_parsed_as_treebanks_write_them(corpus, tmp_path):
    out = tmp_path / "data"
    index = preprocess(moses_config(corpus), out)
    assert index["parser"]["treebank_words"] is True and not verify(out).problems
    pieces = Subwords(out / "encoded" / "vocab" / "pieces.model")
    (text,), (parsed,), (encoded,) = (SplitShards(out / stage, "train") for stage in ("text", "parsed", "encoded"))
    for line, row in zip(text.rows(), encoded.rows(), strict=True):
        assert pieces.decode([row["leaves"]["piece"]]) == [line["source"]]
    assert parsed.row(0)["words"]["pos_tag"][1:3] == ["VBP", "RB"] and text.row(0)["words"]["text"][1:3] == ["don", "'t"]
    assert LineEncoder(out).encode(["They know it ."])[0]["leaves"]["piece"].size
    path = out / "encoded" / "index.json"
    facts = json.loads(path.read_text())
    for name in ("parser", "parser_settings"):  # of a machine with a GPU
        facts[name]["device"] = "cuda"
    path.write_text(json.dumps(facts))
    assert LineEncoder(out).encode(["They know it ."])[0]["leaves"]["piece"].size
    path.write_text(json.dumps(facts | {"parser_settings": facts["parser_settings"] | {"models": str(tmp_path / "gone")}}))
    with pytest.raises(UserError, match=rf"gone has no .*; install here the parser that {out} was made with$"):
        LineEncoder(out)


def test_what_lines_cannot_set_is_left_out_of_errors_of_parsers(tmp_path):
    download = "python -c \"import stanza; stanza.download('de')\""
    here = f"install here the parser that {tmp_path} was made with"
    for error, expected in (
        (
            _choices(ParserConfig(name="stanza", language="de")),
            f"parser.language: no constituency parser for 'de'; install Stanza's own ({download})",
        ),
        ("/a/my; b.pt is damaged: x; give models", f"/a/my; b.pt is damaged: x; {here}"),
        ("a is bad; install it again, or set parser.package", "a is bad; install it again"),
        ("a takes more than 2 GiB; raise it", "a takes more than 2 GiB; raise it"),
    ):
        with pytest.raises(UserError) as raised, possible_remedies(tmp_path):
            raise UserError(error)
        assert str(raised.value) == expected


def test_a_data_set_that_was_begun_with_tokens_as_they_are_goes_on_so(corpus, tmp_path, caplog):
    out = tmp_path / "data"
    preprocess(moses_config(corpus, treebank_words=False), out)
    made = shard_hashes(out)
    with caplog.at_level("INFO"):
        index = preprocess(moses_config(corpus), out)
    assert shard_hashes(out) == made and "treebank_words" not in index["parser"]
    assert "began with parser.treebank_words=false" in caplog.text
    with pytest.raises(UserError, match="parser.treebank_words: False -> True"):
        preprocess(moses_config(corpus, treebank_words=True), out)


def test_only_english_moses_tokens_are_treebank_words(corpus):
    assert moses_config(corpus).settled().parser.treebank_words is True
    assert moses_config(corpus, name="words").settled().parser.treebank_words is False
    assert moses_config(corpus, name="corenlp", language="de").settled().parser.treebank_words is False
    plain = ParserConfig(name="shipped", device="cpu")
    assert describe_parser(plain) == describe_parser(plain.model_copy(update={"treebank_words": False}))
    with pytest.raises(ValueError, match="treebank_words: needs tokenized: moses"):
        PreprocessConfig.model_validate({"parser": {"treebank_words": True}})
