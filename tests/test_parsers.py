"""Parsers: the fast paths give what Stanza gives, no line is lost, given words and trees are taken as they are."""

import http.server
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import stanza
import torch
from character_models import write_resources
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from sample_lines import sample_lines

from treeproc.common.settings import UserError
from treeproc.extras.parsers.corenlp import CoreNLPParser, describe_server
from treeproc.parsers import (
    Given,
    ParserConfig,
    build_parser,
    describe_parser,
    fallback,
    find_models,
    read_trees,
    shift_reduce,
)
from treeproc.parsers.characters import CharacterReader
from treeproc.parsers.config import split_at_blanks
from treeproc.parsers.lines import Line, LineParser, Sentence, Token
from treeproc.parsers.stanza_parser import DocumentTagger, DocumentTokenizer, ObjectParser, span_tree, stanza_options
from treeproc.shards.schema import FULL_PARSED_SCHEMA, TEXT_SCHEMA
from treeproc.shards.shard import Shard
from treeproc.shards.store import write_shard
from treeproc.stages.parse_and_encode import ParseShard, parsed_columns
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.trees.spans import SpanTree, draw, write_brackets

pytestmark = pytest.mark.slow

SHIPPED = ParserConfig(name="shipped", device="cpu")
ODD = [
    "see http://a.b.com/x. and me@x.org!",
    "two  spaces,\u00a0a hard one, \x85 and (brackets) ...",
    "é",
    "?!?! ＡＢＣ 12,5 %",
    "x" * 400 + " y",
    "One\u2028line  (still).",
    "🙂 smiles , 𝔘nicode",
]
REVIEW = "I saw it twice. Was it good?! No, it was not... The actors don't care. " * 20


@pytest.fixture(scope="module")
def parser():
    return build_parser(SHIPPED)


@pytest.fixture(scope="module")
def plain():
    """Stanza as its manual says."""
    return stanza.Pipeline(**stanza_options(SHIPPED, find_models(SHIPPED)))


def test_a_real_parse(parser):
    row = parser.parse(["The old man saw a dog."])[0]
    ((tags, tree),) = read_trees({"trees": row.trees})
    assert tags == ["DT", "JJ", "NN", "VBD", "DT", "NN", "."]
    assert draw(tree, row.words["text"]).split("\n")[:3] == ["ROOT", "└─ S", "   ├─ NP"]


def check_against_stanza(line: str, parsed, sentence, offset: int = 0) -> None:
    assert parsed.words["start_char"] == [token.start_char - offset for token in sentence.tokens], line
    assert parsed.words["end_char"] == [token.end_char - offset for token in sentence.tokens], line
    tags = [word.xpos for word in sentence.words]
    assert parsed.words["pos_tag"] == tags, line
    assert parsed.trees == [write_brackets(span_tree(sentence.constituency), parsed.words["text"], tags)], line


def test_words_tags_and_trees_are_those_of_stanza(parser, plain):
    lines = [*sample_lines(25), *ODD]
    for line, parsed in zip(lines, parser.parse(lines), strict=True):
        check_against_stanza(line, parsed, *plain(line).sentences)


def test_words_tags_and_trees_are_those_of_stanzas_bulk_call(parser, plain):
    lines = sample_lines(120)
    offset = 0
    for line, parsed, sentence in zip(lines, parser.parse(lines), plain(lines).sentences, strict=True):
        check_against_stanza(line, parsed, sentence, offset)
        offset += len(line) + 2


def test_documents_are_split_as_stanza_splits_them():
    config = SHIPPED.model_copy(update={"split_sentences": True})
    lines = [REVIEW, REVIEW[:300], "One only"]
    pipeline = stanza.Pipeline(**stanza_options(config, find_models(config)))
    for line, parsed in zip(lines, build_parser(config).parse(lines), strict=True):
        sentences = pipeline(line).sentences
        assert parsed.words["start_char"] == [token.start_char for s in sentences for token in s.tokens]
        assert [len(tags) for tags, _ in read_trees(vars(parsed))] == [len(s.words) for s in sentences]
    assert len(sentences) == 1 and len(pipeline(REVIEW).sentences) > 40


def test_windows_of_long_lines_stand_beside_whole_lines(parser):
    """The last window of a long line has every length that a whole line beside it may have."""
    lines = [REVIEW, *(REVIEW[:size] for size in range(405, 480))]
    tokenizer = parser._tokenizer
    together = tokenizer.tokenize(lines, 50_000)
    assert together[0] == tokenizer.tokenize(lines[:1], 50_000)[0] and together[60] == tokenizer.tokenize([lines[60]], 50_000)[0]


def test_long_sentences_of_a_document_are_flat_alone():
    config = SHIPPED.model_copy(update={"split_sentences": True, "max_words": 6})
    row = build_parser(config).parse(["It is good. I saw it twice in a town with my friends."])[0]
    first, second = read_trees(vars(row))
    assert len(first[1]) > 1 and len(second[1]) == 1 and set(second[0]) == {"X"}
    assert row.parse_status == "partly_flat_too_long" and len(row.words["text"]) == 15


def test_batches_and_neighbours_do_not_matter(parser):
    lines = [*sample_lines(15), *ODD]
    expected = parser.parse(lines)
    for batch_words in (1, 60):
        assert build_parser(SHIPPED.model_copy(update={"batch_words": batch_words})).parse(lines) == expected
    assert [parser.parse([line])[0] for line in lines[:5]] == expected[:5]
    assert parser.parse([*lines[::-1], *lines])[len(lines) :] == expected


@given(text=st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=60))
@num_examples(25)
def test_any_line_keeps_its_characters(parser, text):
    line = text.strip() or "x"
    row = parser.parse([line])[0]
    spans = list(zip(row.words["start_char"], row.words["end_char"], strict=True))
    assert [line[start:end] for start, end in spans] == row.words["text"]
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    assert [len(tags) for tags, _ in read_trees(vars(row))] == [len(spans)]


def test_fast_paths_give_what_stanzas_processors_give(parser, plain):
    """The slow paths, for models that the fast ones do not support."""
    lines = [*sample_lines(30), *ODD[:4]]
    tokenizer = DocumentTokenizer([plain.processors["tokenize"]])
    sentences = [line[0] for line in tokenizer.tokenize(lines, 300)]
    assert sentences == [line[0] for line in parser._tokenizer.tokenize(lines, 300)]
    words = [[word for token in s for word in token.words] for s in sentences]
    tags, arcs = DocumentTagger([plain.processors["pos"]], dependencies=False).tag(words, 100)
    assert tags == parser._tagger.tag(words, 100)[0] and arcs is None
    tagged = [list(zip(w, (xpos for _, xpos in t), strict=True)) for w, t in zip(words, tags, strict=True)]
    assert ObjectParser(plain.processors["constituency"].trainer.model).parse(tagged, 500) == parser._parser.parse(tagged, 100)


def test_language_models_of_characters_are_read_once(tmp_path, monkeypatch):
    """As those of the published models, which tagger and parser share. Other models' states decide tags and trees here."""
    write_resources(tmp_path, size=12, tagger_hidden=130, parser_hidden=132, noise=0.1)
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(tmp_path))
    config = ParserConfig(device="cpu", batch_words=150)
    pipeline = stanza.Pipeline(**stanza_options(config, find_models(config)))
    lines = [*sample_lines(12), *ODD]
    parser, read = build_parser(config), []
    for reader in parser._readers:
        monkeypatch.setattr(reader, "_read", lambda new, call=reader._read: (read.append(len(new)), call(new)))
    parsed = parser.parse(lines)
    # The tagger has "?" for "?!?!", which is another sentence than the parser's.
    assert len(parser._readers) == 2 and sum(read) == 2 * (len(lines) + 1)
    assert not any(reader._kept for reader in parser._readers)
    for line, one in zip(lines, parsed, strict=True):
        check_against_stanza(line, one, *pipeline(line).sentences)
    tagger = pipeline.processors["pos"].trainer.model
    sentences = [["A", "café", "is", "\u200b", "!"], ["One"], ["I", "see", "…"]]
    for model in (tagger.charmodel_forward, tagger.charmodel_backward):
        expected = model.build_char_representation(sentences)
        torch.testing.assert_close(CharacterReader(model).read(sentences), expected, atol=1e-6, rtol=0)


def test_transitions_without_end_are_a_named_fallback(parser, monkeypatch):
    lines = ["I see a cat.", "You see two dogs."]
    monkeypatch.setattr(shift_reduce, "_STEPS_PER_WORD", 1)
    assert parser.parse(lines) == [fallback(line, "flat_parser_failed") for line in lines]
    monkeypatch.undo()
    assert [row.parse_status for row in parser.parse(lines)] == ["parsed", "parsed"]
    endless = SimpleNamespace(parse_tagged_words=lambda sentences, batch: [])  # Stanza leaves such sentences out
    with pytest.raises(RuntimeError, match="no end"):
        ObjectParser(endless).parse([[("I", "PRP"), ("see", "VBP")]], 100)


def test_deep_trees_grow_the_stack(parser, plain):
    tagged = [[(word, "NN") for word in ["a", "b", "c", "d", "e", "f", "g", "h"] * 12]]
    trees = ObjectParser(plain.processors["constituency"].trainer.model).parse(tagged, 100)
    assert parser._parser.parse(tagged, 100) == trees


def test_one_bad_sentence_does_not_harm_its_batch(parser, monkeypatch):
    lines = ["I see a cat.", "bad", "You see two dogs."]
    expected = parser.parse(lines)
    parse = parser._parser.parse

    def fails_on_bad(sentences, batch_words):
        if any(word == "bad" for sentence in sentences for word, _ in sentence):
            raise ValueError("bad")
        return parse(sentences, batch_words)

    monkeypatch.setattr(parser._parser, "parse", fails_on_bad)
    assert parser.parse(lines) == [expected[0], fallback("bad", "flat_parser_failed"), expected[2]]


def test_out_of_memory_means_smaller_batches_and_the_same_trees(monkeypatch):
    parser = build_parser(SHIPPED)
    lines = sample_lines(20)
    expected = parser.parse(lines)
    parse = parser._parser.parse

    def little_memory(sentences, batch_words):
        if batch_words > limit:
            torch.empty(2**60)
        return parse(sentences, batch_words)

    monkeypatch.setattr(parser._parser, "parse", little_memory)
    limit = 200
    assert parser.parse(lines) == expected and parser._batch_words == 128
    limit = 0
    with pytest.raises(RuntimeError, match="allocate"):
        parser.parse(lines)


def test_a_gpu_that_fails_makes_no_flat_trees(parser, monkeypatch):
    def broken(sentences, batch_words):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(parser._parser, "parse", broken)
    with pytest.raises(UserError, match=r"the GPU failed \(CUDA error: an illegal .*\); run the same command again"):
        parser.parse(["I see a cat.", "You see two dogs."])


def test_given_words_are_taken_as_they_are(parser):
    line = "New York is-big , don't"
    words = {"text": ["New York", "is-big", ",", "don't"], "start_char": [0, 9, 16, 18], "end_char": [8, 15, 17, 23]}
    row = parser.parse([line, line], [Given(words=words), Given()])[0]
    assert {name: row.words[name] for name in words} == words
    assert [len(tags) for tags, _ in read_trees(vars(row))] == [4] and row.parse_status == "parsed"
    short = build_parser(SHIPPED.model_copy(update={"max_words": 3}))
    assert short.parse([line], [Given(words=words)]) == [fallback(line, "flat_too_long", words)]


class OneSentence(LineParser):
    """Answers with a sentence that is given."""

    def __init__(self, sentence: Sentence):
        super().__init__(ParserConfig(name="shipped", language="en").model_copy(update={"dependencies": True}))
        self._sentence = sentence

    def _sentences(self, lines):
        return [[self._sentence]]


def test_tokens_that_their_words_do_not_spell_are_one_leaf():
    """im = in + dem is one leaf with the arc that leaves it; won't = wo + n't are two."""
    german = Sentence(
        [Token(0, 2, ("in", "dem")), Token(3, 7, ("Haus",)), Token(8, 13, ("wohnt",))],
        [("ADP", "APPR"), ("DET", "ART"), ("NOUN", "NN"), ("VERB", "VVFIN")],
        [(2, "case"), (2, "det"), (3, "obl"), (-1, "root")],
        SpanTree(["ROOT", "S", "PP", "NP", "DP"], [0, 0, 0, 1, 1], [4, 4, 3, 3, 2]),
    )
    row = OneSentence(german).parse(["im Haus wohnt"])[0]
    assert row.words["text"] == ["im", "Haus", "wohnt"] and row.words["pos_tag"] == ["APPR", "NN", "VVFIN"]
    assert row.trees == ["(ROOT (S (PP (APPR im) (NP (NN Haus))) (VVFIN wohnt)))"]
    assert row.arcs == {"governor": [1, 2, -1], "deprel": ["case", "obl", "root"]}
    english = Sentence(
        [Token(0, 1, ("I",)), Token(2, 7, ("wo", "n't"))],
        [("PRON", "PRP"), ("AUX", "MD"), ("PART", "RB")],
        [(1, "nsubj"), (-1, "root"), (1, "advmod")],
        SpanTree(["ROOT", "S", "NP", "VP"], [0, 0, 0, 1], [3, 3, 1, 3]),
    )
    row = OneSentence(english).parse(["I won't"])[0]
    assert row.words["text"] == ["I", "wo", "n't"] and row.words["end_char"] == [1, 4, 7]
    assert row.trees == ["(ROOT (S (NP (PRP I)) (VP (MD wo) (RB n't))))"]
    assert row.arcs == {"governor": [1, -1, 1], "deprel": ["nsubj", "root", "advmod"]}


def test_given_trees_and_their_labels():
    line = "The old man saw dogs"
    words = {"text": line.split(), "start_char": [0, 4, 8, 12, 16], "end_char": [3, 7, 11, 15, 20]}
    trees = ["(S (NP (D The) (NP (J old) (N man))) (VP (V saw) (N dogs)))"]
    expected = {
        "keep": trees,
        "none": ["(X (X (D The) (X (J old) (N man))) (X (V saw) (N dogs)))"],
        "phrase": ["(PHRASE (PHRASE (D The) (PHRASE (J old) (N man))) (PHRASE (V saw) (N dogs)))"],
        # The parser knows no node over "old man", and the tags are its own.
        "parsed": ["(S (NP (DT The) (X (JJ old) (NN man))) (VP (VBD saw) (NNS dogs)))"],
    }
    for labels, out in expected.items():
        config = ParserConfig(name="given", given_labels=labels, device="cpu")
        row = build_parser(config).parse([line], [Given(words=words, trees=trees)])[0]
        assert (row.trees, row.parse_status, row.arcs) == (out, "parsed", None)
    arcs = {"governor": [2, 2, 3, -1, 3], "deprel": ["det", "amod", "nsubj", "root", "obj"]}
    with_arcs = build_parser(ParserConfig(name="given", dependencies=True))
    assert with_arcs.parse([line], [Given(words, trees, arcs)])[0].arcs == arcs
    labelled = build_parser(ParserConfig(name="given", given_labels="parsed", dependencies=True, device="cpu"))
    assert labelled.parse([line], [Given(words, trees, arcs)])[0].arcs == arcs
    parsed = labelled.parse([line], [Given(words, trees)])[0].arcs  # of the parse, where the input has none
    assert parsed["governor"] == arcs["governor"] and parsed["deprel"][3] == "root"
    for bad, message in (
        (Given(words), "no trees with words"),
        (Given(words, trees), "gives no arcs"),
        (Given(words, ["(S (D The))"], arcs), "1 leaves, but 5 words"),
        (Given(words, ["(S (D The)"], arcs), "cannot read a given tree: 1 bracket"),
    ):
        with pytest.raises(UserError, match=message):
            with_arcs.parse([line], [bad])


def test_words_alone():
    parser = build_parser(ParserConfig(name="words", language="fr"))
    assert parser.parse(["L' eau est bleue"]) == [fallback("L' eau est bleue", "flat_no_parser")]


def test_installed_stanza_models_are_preferred(tmp_path, monkeypatch):
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(tmp_path))
    assert find_models(ParserConfig()).origin == "shipped"
    for name in ("tokenize", "pos", "constituency"):
        (tmp_path / "en" / name).mkdir(parents=True)
        (tmp_path / "en" / name / "combined.pt").write_bytes(b"x")
    (tmp_path / "resources.json").write_text("{}")
    assert find_models(ParserConfig()).origin == "installed"
    assert find_models(ParserConfig(name="shipped")).origin == "shipped"
    # The installed ones lack a dependency parser.
    assert find_models(ParserConfig(dependencies=True)).origin == "shipped"


def test_shipped_models_without_a_dependency_parser(tmp_path, monkeypatch):
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(tmp_path))
    monkeypatch.setattr("treeproc.parsers.model_files.SHIPPED_MODELS", tmp_path)
    (tmp_path / "en").mkdir()
    for name in ("tokenizer", "pos", "constituency"):
        (tmp_path / "en" / f"{name}.pt").write_bytes(b"x")
    assert set(find_models(ParserConfig()).files) == {"tokenize", "pos", "constituency"}
    with pytest.raises(
        UserError,
        match="no dependency parser for 'en'; shipped languages: none; choose one of these: parser.name=stanza: ",
    ):
        find_models(ParserConfig(dependencies=True))


def test_description_tells_settings_apart():
    configs = [
        SHIPPED,
        *(
            SHIPPED.model_copy(update=change)
            for change in ({"max_words": 9}, {"split_sentences": True}, {"batch_words": 9}, {"device": "auto"})
        ),
        ParserConfig(name="words"),
        ParserConfig(name="given"),
        ParserConfig(name="given", given_labels="phrase"),
        ParserConfig(name="given", given_labels="parsed"),
    ]
    described = [json.dumps(describe_parser(config), sort_keys=True) for config in configs]
    assert len(set(described)) == len(described)
    assert "models" not in describe_parser(ParserConfig(name="given"))
    assert [config.gpus_per_actor for config in (SHIPPED, configs[4], configs[5], configs[-1])] == [0, 1, 0, 1]


def parse_rows(folder, schema, rows: list[dict], *configs: ParserConfig) -> Shard:
    """The parsed shard of text rows."""
    for stage in ("text", "parsed"):
        (folder / stage).mkdir()
    record = write_shard(folder / "text", "train-0.arrow", rows, schema, split="train", index=0, fingerprint="x")
    return Shard(folder / "parsed", ParseShard(folder, *configs)(record, "y"))


def test_both_sides_are_parsed(tmp_path):
    lines = [*sample_lines(7), "word " * 20]
    rows = [{"example_id": i, "source": line, "target": line} for i, line in enumerate(lines)]
    words, shipped = ParserConfig(name="words"), SHIPPED.model_copy(update={"max_words": 19})
    shard = parse_rows(tmp_path, TEXT_SCHEMA, rows, words, shipped)
    assert shard.schema.names == ["example_id", *parsed_columns(words, shipped)[1:]]
    for row, parsed in zip(shard.rows(), build_parser(shipped).parse(lines), strict=True):
        assert row["parse_status"] == "flat_no_parser" and row["words"]["text"] == lines[row["example_id"]].split()
        assert (row["target_trees"], row["target_parse_status"]) == (parsed.trees, parsed.parse_status)
        assert row["target_words"]["pos_tag"] == parsed.words["pos_tag"]
    assert shard.record.counts["status.flat_no_parser"] == shard.record.rows == 8
    assert shard.record.counts["target_status.parsed"] == 7 and shard.record.counts["target_status.flat_too_long"] == 1


def test_given_columns_of_the_text_are_used(tmp_path):
    words = {"text": ["a", "b c"], "start_char": [0, 2], "end_char": [1, 5]}
    row = {"example_id": 5, "source": "a b c", "words": words, "trees": ["(S (X a) (X b_c))"]}
    row["arcs"] = {"governor": [1, -1], "deprel": ["dep", "root"]}
    spans = FULL_PARSED_SCHEMA.field("words").type.value_type
    item = pa.struct([spans.field(name) for name in ("text", "start_char", "end_char")])
    schema = pa.schema(
        [
            *TEXT_SCHEMA.remove(TEXT_SCHEMA.get_field_index("target")),
            pa.field("words", pa.list_(pa.field("item", item, nullable=False)), nullable=False),
            FULL_PARSED_SCHEMA.field("trees"),
            FULL_PARSED_SCHEMA.field("arcs"),
        ]
    )
    shard = parse_rows(tmp_path, schema, [row], ParserConfig(name="given", dependencies=True))
    parsed = shard.row(0)
    assert parsed["words"]["text"] == ["a", "b c"] and parsed["trees"] == ["(S (X a) (X b-U+0020-c))"]
    assert parsed["arcs"]["governor"].tolist() == [1, -1] and parsed["arcs"]["deprel"] == ["dep", "root"]
    assert shard.record.counts["deprel.dep"] == 1 and shard.record.counts["label.S"] == 1


def test_given_trees_need_a_format_that_has_them(tmp_path):
    for side in ("en", "de"):
        (tmp_path / side).write_text("a b c\n")
    config = PreprocessConfig.model_validate(
        {"splits": {"train": {"source": [tmp_path / "en"], "target": [tmp_path / "de"]}}, "parser": {"name": "given"}}
    )
    with pytest.raises(UserError, match="parser.name: is given, but this format gives no trees"):
        preprocess(config, tmp_path / "data")
    german = config.model_copy(update={"parser": SHIPPED, "target_parser": ParserConfig(name="shipped", language="de")})
    with pytest.raises(UserError, match="^target_parser.language: no .* target_parser.constituency=false, for"):
        preprocess(german, tmp_path / "other")


ANSWER = {
    "sentences": [
        {
            "parse": "(ROOT (S (NP (PRP I)) (VP (VBP see) (NP (CD 🙂)))))",
            "tokens": [
                {"word": "I", "pos": "PRP", "characterOffsetBegin": 0, "characterOffsetEnd": 1},
                {"word": "see", "pos": "VBP", "characterOffsetBegin": 2, "characterOffsetEnd": 5},
                {"word": "🙂", "pos": "CD", "characterOffsetBegin": 6, "characterOffsetEnd": 8},
            ],
            "basicDependencies": [
                {"dep": "ROOT", "governor": 0, "dependent": 2},
                {"dep": "nsubj", "governor": 2, "dependent": 1},
                {"dep": "obj", "governor": 2, "dependent": 3},
            ],
        },
        {
            "parse": "(ROOT (NP (NN a) (NN b)))",
            "tokens": [
                {"word": "a", "pos": "NN", "characterOffsetBegin": 9, "characterOffsetEnd": 11},
                {"word": "b", "pos": "NN", "characterOffsetBegin": 9, "characterOffsetEnd": 11},
            ],
            "basicDependencies": [
                {"dep": "ROOT", "governor": 0, "dependent": 1},
                {"dep": "dep", "governor": 1, "dependent": 2},
            ],
        },
        {  # as the server answers about a sentence that its grammar cannot parse
            "parse": "(X (IN -LRB-))",
            "tokens": [{"word": "(", "pos": "IN", "characterOffsetBegin": 12, "characterOffsetEnd": 13}],
            "basicDependencies": [{"dep": "ROOT", "governor": 0, "dependent": 1}],
        },
    ]
}


class FakeCoreNLP(http.server.BaseHTTPRequestHandler):
    """Answers every request with ANSWER."""

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer(b"pong")

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        assert self.rfile.read(length).decode() == "I see 🙂\nzu\n("
        self._answer(json.dumps(ANSWER).encode())

    def log_message(self, *arguments):
        pass


def test_answers_of_corenlp_become_lines():
    server = http.server.ThreadingHTTPServer(("localhost", 0), FakeCoreNLP)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        config = ParserConfig(name="corenlp", dependencies=True, endpoint=f"http://localhost:{server.server_port}")
        assert describe_server(config) == "CoreNLP server"
        first, second, failed = CoreNLPParser(config).parse(["I see 🙂", "zu", "("])
    finally:
        server.shutdown()
    assert first.words["text"] == ["I", "see", "🙂"] and first.words["end_char"] == [1, 5, 7]
    assert first.trees == ["(ROOT (S (NP (PRP I)) (VP (VBP see) (NP (CD 🙂)))))"]
    assert first.arcs == {"governor": [1, -1, 1], "deprel": ["nsubj", "ROOT", "obj"]}
    assert second.words["text"] == ["zu"] and second.trees == ["(ROOT (NP (NN zu)))"]
    assert second.arcs == {"governor": [-1], "deprel": ["ROOT"]}
    assert failed == fallback("(", "flat_parser_failed", dependencies=True)


def test_a_corenlp_server_that_has_ended_makes_no_flat_trees():
    server = http.server.ThreadingHTTPServer(("localhost", 0), FakeCoreNLP)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        parser = CoreNLPParser(ParserConfig(name="corenlp", endpoint=f"http://localhost:{server.server_port}"))
        (other,) = parser.parse(["a line that fails, and a server that answers"])
    finally:
        server.shutdown()
        server.server_close()
    assert other.parse_status == "flat_parser_failed"
    with pytest.raises(
        UserError, match="the CoreNLP server at http://localhost:.* does not answer any more .*; start the server again"
    ):
        parser.parse(["I see 🙂", "zu"])


def test_a_real_corenlp():
    config = ParserConfig(name="corenlp", endpoint=os.environ.get("CORENLP_ENDPOINT", "http://localhost:9000"))
    try:
        describe_server(config)
    except UserError:
        pytest.skip("no CoreNLP server and no $CORENLP_HOME")
    parser = build_parser(config)
    lines = ["The old man saw a dog.", "I don't know."]
    words = [Given(), Given(words=split_at_blanks(lines[1]))]
    first, second = parser.parse(lines, words)
    assert first.words["text"] == ["The", "old", "man", "saw", "a", "dog", "."] and first.trees[0].startswith("(ROOT (S (NP")
    assert second.words["text"] == ["I", "don't", "know."]


def test_same_lines_with_other_words_are_not_the_same():
    assert Line("a b", None) != Line("a b", ((0, 1, "a"), (2, 3, "b")))


def test_shipped_models_are_those_of_the_repository(repository):
    folder = find_models(SHIPPED).folder
    assert folder == Path(repository) / "treeproc" / "models" / "en"
