"""tree-attention translate on runs of random weights: every line of the output belongs to its line of the input, however bad."""

import gzip
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from commands import Started, main_of, print_to, printed_by, returned_memory, run_here
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from toyruns import without_phases

from treenet.runs.loading import load_run
from treenet.translation.line_translator import LineTranslator
from treenet.translation.settings import TranslateSettings
from treenet.translation.translate import load_ensemble
from treeproc.common.settings import UserError
from treeproc.online.line_encoder import LineEncoder
from treeproc.online.raw_lines import EncodedLine, RawLineEncoder, place_trees
from treeproc.shards.store import write_index

pytestmark, slow = pytest.mark.long, pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, data) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", data)
    return write_run(folder, data, seed=2, checkpoint="checkpoints/step_00000007")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(SEARCH_WORDS, random.integers(1, 9))) for _ in range(23)]


@pytest.fixture
def translate(capfdbinary, run, monkeypatch):
    """Run the command in this process; returns its output lines and those of standard error."""
    main = main_of("translate.py")

    def call(*arguments: object, out: Path | None = run) -> tuple[list[str], list[str]]:
        capfdbinary.readouterr()
        main([*(["--out", str(out)] if out else []), *map(str, arguments)])
        sys.stdout.flush()
        printed = capfdbinary.readouterr()
        assert printed.out.endswith(b"\n") or not printed.out
        return printed.out.decode().split("\n")[:-1], without_phases(printed.err.decode())

    return call


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def warnings(errors: list[str]) -> list[str]:
    return [line.removeprefix("warning: ") for line in errors if line.startswith("warning: ")]


@slow
def test_one_line_out_for_every_line_in_whatever_the_parts(translate, lines, tmp_path):
    source = write(tmp_path / "source.txt", lines)
    expected, errors = translate(f"input={source}")
    assert len(expected) == 23 and len(set(expected)) > 15, "the model looks at its source"
    assert warnings(errors) == []
    assert errors[0].startswith("tree_transformer averaged: beam_size=3 length_penalty=1.0 length_penalty_form=length ")
    alone = [translate(f"input={write(tmp_path / 'one.txt', [line])}")[0] for line in lines[:4]]
    assert alone == [[line] for line in expected[:4]]
    assert translate(f"input={source}", "lines_at_once=5", "decoding.max_tokens=20")[0] == expected
    (tmp_path / "source.gz").write_bytes(gzip.compress("\r\n".join(lines).encode()))  # nor do line ends matter
    out = tmp_path / "out.txt"
    assert translate(f"input={tmp_path / 'source.gz'}", f"output={out}")[0] == []
    assert out.read_text().split("\n") == [*expected, ""]


@slow
def test_an_output_that_is_a_link_or_a_device_stays_one(translate, lines, tmp_path):
    source = write(tmp_path / "source.txt", lines[:3])
    expected, _ = translate(f"input={source}")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "nowhere").symlink_to("/dev/null")
    assert translate(f"input={source}", f"output={tmp_path / 'link'}")[0] == []
    assert translate(f"input={source}", f"output={tmp_path / 'nowhere'}")[0] == []
    assert (tmp_path / "target").read_text().split("\n") == [*expected, ""]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "nowhere").is_symlink()
    assert not list(tmp_path.glob("*.parts"))


def test_a_bad_line_is_empty_and_told_and_the_others_are_as_without_it(translate, lines, tmp_path):
    good = [line.encode() for line in lines[:6]]
    long = " ".join(["ba"] * 2000).encode()
    bad = [b"ba \xff be", b"ba\x01be", long, b"x" * 17_000, "ba\u0085be".encode()]
    mixed = [good[0], bad[0], good[1], bad[1], b"", good[2], bad[2], good[3], bad[3], good[4], b" \t ", good[5], bad[4]]
    source = tmp_path / "mixed.txt"
    source.write_bytes(b"\n".join(mixed) + b"\n")
    expected = translate(f"input={write(tmp_path / 'good.txt', lines[:6])}")[0]
    found, errors = translate(f"input={source}")
    assert [line for line, raw in zip(found, mixed, strict=True) if raw in good] == expected
    assert all(line == "" for line, raw in zip(found, mixed, strict=True) if raw not in good)
    assert warnings(errors) == [
        f"{source}, line 2: not valid UTF-8 (byte 0xff at column 4); its translation is empty",
        f"{source}, line 4: control character U+0001 at character 3; remove it; its translation is empty",
        f"{source}, line 7: 2,000 words are more than 1,000; split the line into sentences, or raise max_leaves; "
        "its translation is empty",
        f"{source}, line 9: 17,000 characters are more than 16,000; split the line into sentences, or raise max_leaves; "
        "its translation is empty",
        f"{source}, line 13: control character U+0085 at character 3; remove it; its translation is empty",
        "5 of 13 lines have no translation: 2, 4, 7, 9, 13",
    ]
    assert translate(f"input={source}", "lines_at_once=2")[0] == found
    # Words within the limit, pieces beyond it: characters that the vocabulary writes in bytes.
    found, errors = translate(f"input={write(tmp_path / 'bytes.txt', ['ЖЖЖЖЖЖ', lines[0]])}", "max_leaves=8")
    assert found == ["", expected[0]] and "13 pieces are more than 8" in warnings(errors)[0]


def test_a_line_at_which_the_parser_fails_stands_alone(translate, lines, tmp_path, monkeypatch):
    source = write(tmp_path / "source.txt", lines[:9])
    expected = translate(f"input={source}")[0]
    parse = LineEncoder.parse

    def fail(self, chosen, given=None):
        if lines[4] in chosen:
            raise ValueError("line 5: its trees have another number of leaves than it has words")
        return parse(self, chosen, given)

    monkeypatch.setattr(LineEncoder, "parse", fail)
    found, errors = translate(f"input={source}")
    assert found == [*expected[:4], "", *expected[5:]]
    assert warnings(errors)[0].startswith(f"{source}, line 5: cannot be parsed: line 5: its trees have another number")


def test_formats(translate, lines, tmp_path):
    source = write(tmp_path / "source.txt", [lines[0], "ba\x02", "", lines[1]])
    plain = translate(f"input={source}")[0]
    records = [json.loads(line) for line in translate(f"input={source}", "--nbest", 3, "--json")[0]]
    assert [r["line"] for r in records] == [1, 2, 3, 4] and [r["source"] for r in records] == [lines[0], "ba\x02", "", lines[1]]
    assert [len(r["hypotheses"]) for r in records] == [3, 0, 1, 3]
    assert records[1]["error"] == "control character U+0002 at character 3; remove it" and "error" not in records[0]
    assert [r["hypotheses"][0]["text"] if r["hypotheses"] else "" for r in records] == plain
    for one in records[0]["hypotheses"]:
        assert one["score"] == pytest.approx(one["log_prob"] / (one["pieces"] + 1), abs=1e-6)
    scores = [[f"{h['score']:.6f}" for h in r["hypotheses"]] if r["source"] else [] for r in records]
    assert translate(f"input={source}", "--scores")[0] == [
        f"{scores[0][0]}\t{plain[0]}", "\t", "\t", f"{scores[3][0]}\t{plain[3]}",
    ]  # fmt: skip
    assert records[2]["hypotheses"] == [{"text": "", "score": None, "log_prob": None, "pieces": 0}]  # no model gave it
    expected = []
    for record in records:
        number, found = record["line"], record["hypotheses"] if record["source"] else []
        expected += [f"{number}\t{h['score']:.6f}\t{h['text']}" for h in found] or [f"{number}\t\t"]
    assert translate(f"input={source}", "nbest=3", "scores=true")[0] == expected


def test_given_translations_get_the_score_that_search_gave_them(translate, lines, tmp_path):
    source = write(tmp_path / "source.txt", [*lines[:6], "", "ba\x01"])
    for ensemble in ([], ["checkpoint=[averaged,7]"]):
        gnmt = ["decoding.length_penalty_form=gnmt", *ensemble]
        found = [json.loads(line) for line in translate(f"input={source}", "--json", *gnmt)[0]]
        texts = [r["hypotheses"][0]["text"] if r["hypotheses"] else "" for r in found]
        targets = write(tmp_path / "targets.txt", texts)
        arguments = (f"input={source}", f"score={targets}", *gnmt)
        scored = [json.loads(line) for line in translate(*arguments, "--json")[0]]
        same = 0
        for record, given in zip(found[:6], scored[:6], strict=True):
            h, (g,) = record["hypotheses"][0], given["hypotheses"]
            assert g["text"] == h["text"] and len(g["tokens"]) == g["pieces"] + 1 and g["tokens"][-1][0] == "</s>"
            assert sum(p for _, p in g["tokens"]) == pytest.approx(g["log_prob"], abs=1e-4)
            if g["pieces"] == h["pieces"]:  # search may have found the text in other pieces than the vocabulary's own
                same += abs(g["score"] - h["score"]) < 1e-5
        assert same
        assert scored[6]["hypotheses"] == [{"text": "", "score": None, "log_prob": None, "pieces": 0, "tokens": []}]
        assert "control character" in scored[7]["error"]
        lines_out = translate(*arguments)[0]
        assert lines_out[0] == f"{scored[0]['hypotheses'][0]['score']:.6f}\t{texts[0]}" and lines_out[7] == "\t"


def test_trees_are_given_beside_their_lines_or_alone(translate, run, tmp_path):
    data = write_vocabulary(tmp_path / "data", tree_source="parsed")
    own = write_run(tmp_path / "run", data)
    left = ["(S (NP (NN ba) (NN be)) (VP (NN bi)))", "", "(S (NN ba) (NP (NN -LRB-) (NN da) (NN -RRB-)))"]
    right = ["(S (NN ba) (VP (NN be) (NN bi)))", "", "(S (NN ba) (NN -LRB-) (NN da) (NN -RRB-))"]
    source = write(tmp_path / "source.txt", ["ba be bi", "", "ba (da)"])
    trees = write(tmp_path / "left.mrg", left)
    found = translate(f"input={source}", f"trees={trees}", "--json", out=own)[0]
    alone = [json.loads(line) for line in translate(f"trees={trees}", "--json", out=own)[0]]
    first, again = json.loads(found[0])["hypotheses"][0], alone[0]["hypotheses"][0]
    assert first["text"] == again["text"] and first["score"] == pytest.approx(again["score"], abs=1e-5)
    assert [a["source"] for a in alone] == ["ba be bi", "", "ba ( da )"]
    assert json.loads(found[2])["hypotheses"] != alone[2]["hypotheses"], "blanks are part of the pieces"
    others = translate(f"input={source}", f"trees={write(tmp_path / 'right.mrg', right)}", "--json", out=own)[0]
    assert [a == b for a, b in zip(found, others, strict=True)] == [False, True, False], "the model reads the trees"
    foreign = [*left[:1], "(Satz (Nomen ba) (Nomen be) (Verb bi))"]
    for lines, noticed in ((left, []), (foreign, []), (foreign[1:], ["1 of 1"])):  # an unknown label of 3, and of 1
        trees = write(tmp_path / "foreign.mrg", lines)
        said = [f"{trees}: labels: {of} nodes have labels that the training data lacks; are these trees of " for of in noticed]
        errors = [line for line in translate(f"trees={trees}", out=own)[1] if "labels: " in line]
        assert len(errors) == len(said) and all(one in line for one, line in zip(said, errors, strict=True))
    trees = write(tmp_path / "wrong.mrg", ["(S (NN ba) (NN bo) (NN bi))", "(S (NN ba)", "(S (NN ba) (NN -LRB-) (NN da))"])
    found, errors = translate(f"input={source}", f"trees={trees}", out=own)
    assert found == ["", "", ""]
    assert warnings(errors)[:3] == [
        f"{source}, line 1: leaf 2 of its tree is 'bo', but the line goes on with 'be bi'; its translation is empty",
        f"{source}, line 2: tree: 1 bracket(s) of this tree are not closed; its translation is empty",
        f"{source}, line 3: its tree ends after 3 leaves, but the line goes on with ')'; its translation is empty",
    ]


def test_leaves_are_found_in_the_line_in_their_treebank_spelling():
    line, given = place_trees('He said "no  way."', "(S (PRP He) (VBD said) (`` ``) (NP (DT no) (NN way)) (. .) ('' ''))")
    assert [line[s:e] for s, e in zip(given.words["start_char"], given.words["end_char"], strict=True)] == given.words["text"]
    assert given.words["text"] == ["He", "said", '"', "no", "way", ".", '"']
    assert place_trees(None, "(S (NN a)) (S (NN b) (-NONE- *T*))")[0] == "a b"
    with pytest.raises(ValueError, match="leaf 1 of its tree is 'a', but the line goes on with ''"):
        place_trees("", "(S (NN a))")


@slow
def test_each_segment_of_a_run_on_segments_has_a_translation(translate, data, lines, tmp_path):
    expected, _ = translate(f"input={write(tmp_path / 'in.txt', lines[:3])}")
    segments = [f'<seg id="{number}">{line}</seg>' for number, line in enumerate(lines[:3])]
    source = write(tmp_path / "in.sgm", ['<srcset><doc docid="d">', *segments, "</doc></srcset>"])
    with pytest.raises(UserError, match="in.sgm: expected lines of text, but found a file of segments in XML"):
        translate(f"input={source}")
    try:
        (data / "config.yaml").write_text("format: sgm\n")
        assert translate(f"input={source}")[0] == translate(f"input={tmp_path / 'in.txt'}")[0] == expected
    finally:
        (data / "config.yaml").unlink()


def test_an_impossible_command_is_one_error_and_keeps_the_output(translate, run, lines, tmp_path):
    output, source, empty = tmp_path / "out.txt", write(tmp_path / "in.txt", lines[:3]), write(tmp_path / "empty.txt", [])
    output.write_text("as it was")
    (tmp_path / "out.txt.parts").write_text("in the way")
    short = write(tmp_path / "short.txt", lines[:2])
    other = write_run(tmp_path / "other", write_vocabulary(tmp_path / "vocabulary", words=[word[::-1] for word in SEARCH_WORDS]))
    given = write_run(tmp_path / "given", write_vocabulary(tmp_path / "trees", parser="given"))
    source_argument = f"input={source}"
    for out, arguments, message in [
        (run, [f"input={empty}"], "empty.txt is empty, but must have one sentence a line"),
        (run, [f"input={tmp_path / 'none.csv'}"], "none.csv must have one text a line, but its name is that of a table"),
        (run, [source_argument, "score=scores.tsv"], "scores.tsv must have one text a line, but its name is that of a table"),
        (run, [f"input={tmp_path / 'none.txt'}"], "cannot read .*none.txt: No such file"),
        (run, [source_argument, f"score={short}"], "in.txt has 3 lines, but .*short.txt has 2"),
        (run, [source_argument, f"trees={short}"], "in.txt has 3 lines, but .*short.txt has 2"),
        (
            run,
            [source_argument, f"ensemble=[{other}]"],
            "cannot form an ensemble: vocab_fingerprint of their data sets must be the same",
        ),
        (run, [source_argument, f"checkpoint={other / 'averaged'}"], r"has weights of another model or vocabulary \(vocab_"),
        (run, [source_argument, "checkpoint=9"], "step_00000009/model.safetensors is missing"),
        (run, [source_argument, "checkpoint=[]"], "checkpoint: must name a checkpoint"),
        (run, [source_argument, "decoding.max_length_factor=1e308"], "max_length_factor: .*less than or equal to 1000"),
        (run, [source_argument, "decoding.beam_size=1000000"], "beam_size: .*less than or equal to 1000, but is 1000000"),
        (run, [source_argument, "--nbest", "4"], "nbest must be from 1 to beam_size = 3, but is 4"),
        (run, [source_argument, "--nbest", "0"], "nbest: must be greater than 0"),
        (given, [source_argument], "was made of trees of its input files; give trees for these lines as well .trees=FILE."),
        (tmp_path, [source_argument], "is not a run"),
        (tmp_path, [f"input={tmp_path / 'none.csv'}"], "is not a run"),
        (None, [source_argument], "give --out RUN"),
        (run, [source_argument], "cannot write .*out.txt.parts: File exists"),
    ]:
        with pytest.raises(UserError, match=message):
            translate(*arguments, f"output={output}", out=out)
    assert output.read_text() == "as it was" and not list(tmp_path.glob(".tmp-*"))


def test_an_ensemble_of_runs_needs_the_same_trees_only_where_they_are_read(tmp_path, data, run):
    balanced, left = data, write_vocabulary(tmp_path / "left", tree_source="left")
    plain = write_run(tmp_path / "plain", left, name="transformer")
    tree = write_run(tmp_path / "tree", left)
    loaded = load_ensemble([run, plain], ["averaged"])
    assert loaded.checkpoint == "run/averaged + plain/averaged" and len(loaded.model.models) == 2 and loaded.data == balanced
    with pytest.raises(UserError, match="tree_settings of their data sets must be the same"):
        load_ensemble([run, tree], ["averaged"])
    with pytest.raises(UserError, match="would count .*/run, checkpoint averaged, twice; give each one once"):
        load_ensemble([run, plain, run.parent / "." / run.name], ["averaged"])
    with pytest.raises(UserError, match="would count .*/averaged, twice"):
        load_ensemble([run], ["averaged", str(run / "averaged")])
    assert load_ensemble([run], ["averaged"]).checkpoint == load_run(run).checkpoint == "averaged"


@contextmanager
def standard_input(content: bytes) -> Iterator[None]:
    """Let this process read `content` from a pipe. It must fit into one."""
    kept, (reader, writer) = os.dup(0), os.pipe()
    os.write(writer, content)
    os.dup2(reader, 0)
    for end in (reader, writer):
        os.close(end)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@slow
def test_the_command_goes_on_after_bad_lines_and_reports_errors_in_one_line(run, lines):
    with standard_input(lines[0].encode() + b"\n\xff\xfe\n" + lines[1].encode()):
        done = run_here("translate.py", "--out", run)
    assert done.returncode == 0 and done.stdout.count("\n") == 3 and done.stdout.split("\n")[1] == ""
    errors = without_phases(done.stderr)
    assert errors[1:] == [
        "warning: /dev/stdin, line 2: not valid UTF-8 (byte 0xff at column 1); its translation is empty",
        "warning: 1 of 3 lines have no translation: 2",
    ]
    with standard_input(b""):
        done = run_here("translate.py", "--out", run)
    assert done.returncode == 2 and without_phases(done.stderr) == [
        "error: /dev/stdin is empty, but must have one sentence a line"
    ]


@slow
def test_a_killed_command_goes_on_after_what_it_had_done(translate, run, lines, tmp_path, monkeypatch):
    source, output = write(tmp_path / "in.txt", [*lines, "ba\x01", *lines[::-1]]), tmp_path / "out.txt"
    arguments = (f"input={source}", f"output={output}", "lines_at_once=1", "--json")
    translate(*arguments)
    expected = output.read_bytes()
    output.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]

    parts = tmp_path / "out.txt.parts"
    killed = Started(tmp_path / ".log", "translate.py", "--out", run, *arguments)
    while killed.is_alive() and len(list(parts.glob("*.json"))) < 8:
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    done = len(list(parts.glob("*.json")))
    assert 8 <= done < 47 and not output.exists()

    translated = []
    true_call = LineTranslator.__call__
    monkeypatch.setattr(LineTranslator, "__call__", lambda *a: translated.append(a[2]) or true_call(*a))
    (parts / f"{done}.json").write_text('{"key"')  # half written
    (parts / f".tmp-1-{done}.json").write_text("")
    _, message = translate(*arguments)
    assert translated == list(range(done - 1, 47))
    assert f"{done - 1:,} lines are translated already; the command continues after them" in message
    assert "1 of 47 lines have no translation: 24" in message[-1]
    assert output.read_bytes() == expected
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["in.txt", "out.txt"]


@slow
def test_kept_parts_count_only_for_the_same_lines_settings_and_checkpoints(translate, run, lines, tmp_path, monkeypatch):
    output, translated = tmp_path / "out.txt", []
    true_call = LineTranslator.__call__

    def failing(translator, part, first):
        if first >= 8:
            raise UserError("as if memory had run out")
        translated.append(first)
        return true_call(translator, part, first)

    monkeypatch.setattr(LineTranslator, "__call__", failing)
    source = write(tmp_path / "in.txt", lines)
    for changes, expected in [
        ([], [0, 4]),
        ([], []),
        (["workers=0", f"input={write(tmp_path / 'same.txt', lines)}"], []),
        (["decoding.beam_size=2"], [0, 4]),
        (["decoding.beam_size=5"], [0, 4]),  # the usual value, but the run has 3
        (["decoding.no_repeat_ngram=0"], [0, 4]),
        (["checkpoint=7"], [0, 4]),
        ([f"input={write(tmp_path / 'other.txt', [*lines[:4], 'ba', *lines[5:]])}"], [0, 4]),
        ([], [4]),
    ]:
        translated.clear()
        with pytest.raises(UserError, match="memory"):
            translate(f"input={source}", f"output={output}", "lines_at_once=4", *changes)
        assert translated == expected, changes
    assert not output.exists()


@slow
def test_escapes_are_told_once_for_the_whole_input(translate, lines, tmp_path):
    source = write(tmp_path / "mixed.txt", [*lines[:2], "ba &apos;s be", *lines[2:5], "ba &apos;s be"])
    message = warnings(translate(f"input={source}", "lines_at_once=3")[1])
    assert len(message) == 1 and message[0].startswith(f"{source}: has escapes such as &apos; or @-@")
    assert "1 of 3 lines (33.3%), for example line 3: 'ba &apos;s be'" in message[0]


@slow
def test_another_language_and_tokens_are_told_where_a_parser_reads_plain_text(tmp_path):
    data = write_vocabulary(tmp_path / "data", parser="shipped")
    (data / "text").mkdir()
    write_index(data / "text", [], columns=["example_id", "source", "target"])
    encoder = RawLineEncoder(data, given_trees=False, max_pieces=500)

    def notices(*texts: str) -> dict[str, str]:
        return encoder.notices([EncodedLine(text) for text in texts], first_id=10)

    assert notices("The old woman went slowly across the street.", "") == {}
    message = notices("We read a new book.", "Die alte Frau ging langsam über die Straße.", "they go , they come .")
    assert "another language (de) than the parser's (en)" in message["language"] and "example line 12" in message["language"]
    assert "looks tokenised, but" in message["tokens"] and set(message) == {"language", "tokens"}
    both = notices("they &apos;re here , too .")
    assert "looks tokenised, with escapes such as &apos; or @-@, but" in both["tokens"] and set(both) == {"tokens"}
    encoder = RawLineEncoder(data, given_trees=True, max_pieces=500)
    of_words = notices("they go , they come .", "they &apos;re here")
    assert set(of_words) == {"tokens"} and of_words["tokens"].endswith("; give the plain text as input")
    seen = {"train": {"target": {"lines": 9, "tokens": {"count": 0, "line": 0, "text": ""}}}}
    for facts, expected in ({}, set()), (seen, {"target tokens"}):
        write_index(data / "text", [], columns=["example_id", "source", "target"], notices=facts)
        encoder = RawLineEncoder(data, given_trees=False, max_pieces=500)
        pair = encoder.notices([EncodedLine("They go, they come.", "sie gehen , sie kommen .")])
        assert set(pair) == expected, "only a target whose tokens the data set looked for"
    assert pair["target tokens"].startswith("target: looks tokenised, but")
    write_index(data / "text", [], columns=["example_id", "source", "target", "words"])
    encoder = RawLineEncoder(data, given_trees=False, max_pieces=500)
    assert notices("they go , they come .") == {}, "the model learned from tokens"
    encoder = RawLineEncoder(data, given_trees=True, max_pieces=500)
    assert notices("they go , they come .") == {}, "and so it did of trees"
    noticed = {"lines": 9, "tokens": {"count": 9, "line": 1, "text": ""}}
    write_index(data / "text", [], columns=["example_id", "source", "label"], notices={"train": {"source": noticed}})
    encoder = RawLineEncoder(data, given_trees=False, max_pieces=500)
    assert notices("they go , they come .") == {}, "the text that the model learned looks tokenised too"
    message = notices("They go, they come.", "They went.", "they come .")
    assert set(message) == {"attached"} and "looks like plain text, but the model learned from tokens" in message["attached"]


@slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_memory_that_a_step_frees_stays_for_the_next_one(tmp_path, run):
    assert int(printed_by(_free_in_a_translator, tmp_path / "out", run)) < 10 * 2**20


def _free_in_a_translator(place: Path, run: Path) -> None:
    LineTranslator(TranslateSettings(), [run])
    print_to(place)
    print(returned_memory(), flush=True)
