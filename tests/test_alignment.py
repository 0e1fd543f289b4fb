"""Alignments against loops over weights, the error rate against its equation, and align.py on a run of random weights."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from commands import main_of
from hypothesis import given
from hypothesis import strategies as st
from model_cases import example_of, tiny_model
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from strategies import Tree

from treenet.analysis.alignment import (
    ReferenceLinks,
    alignment_error_rate,
    count_words,
    format_links,
    link_nodes,
    link_words,
    number_words,
    parse_links,
    word_attention,
)
from treenet.analysis.attention_stats import attend_examples
from treeproc.common.settings import UserError
from treeproc.subwords import Subwords

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "tests" / "samples"
LINKS = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6)


@pytest.mark.parametrize("case", ["transformer", "tree_transformer"])
@pytest.mark.parametrize("layer", [None, 1, 2])
def test_words_get_the_attention_of_their_pieces_leaves_and_nodes(case, layer):
    model = tiny_model(case)
    tree = Tree(6, [(0, 6, 4), (0, 2, 2), (3, 6, 4), (4, 6, 4)])  # (start, end, subtree_end)
    example = example_of(tree, 3, target_length=5, reads=model.reads)
    [attended] = attend_examples(model, [example])
    source, target = np.array([0, 0, 1, 2, 2, 3]), np.array([0, 1, 1, 1, 2])
    found = word_attention(attended, source, target, layer)
    layers = [layer - 1] if layer else [0, 1]
    spans = list(zip(example["spans"]["start"].tolist(), example["spans"]["end"].tolist(), strict=True))[: attended.num_nodes]
    expected, nodes = np.zeros((3, 4)), np.zeros((3, len(spans)))
    for piece, word in enumerate(target.tolist()):
        share = 1 / (target == word).sum() / len(layers) / attended.weights.shape[1]
        for row in (attended.weights[one, head, piece].tolist() for one in layers for head in range(attended.weights.shape[1])):
            for leaf in range(6):
                expected[word, source[leaf]] += row[leaf] * share
            for node, (start, end) in enumerate(spans):
                nodes[word, node] += row[6 + node] * share
                for leaf in range(start, end):
                    expected[word, source[leaf]] += row[6 + node] / (end - start) * share
    assert found == pytest.approx(expected) and found.sum(1) == pytest.approx(1)
    assert link_words(found) == [(int(np.argmax(expected[word])), word) for word in range(3)]
    linked = link_nodes(attended, source, target, layer)
    assert len(linked) == (3 if case == "tree_transformer" else 0)
    for one in linked:
        best = int(np.argmax(nodes[one.target]))
        start, end = spans[best]
        assert (one.start, one.end) == (source[start], source[end - 1] + 1)
        assert one.label == example["nodes"]["label"][best] and one.weight == pytest.approx(nodes[one.target, best])


def test_words_are_counted_at_blanks():
    assert number_words(["▁Der", "▁al", "te", "▁", "Hund", "."], "Der alte Hund.").tolist() == [0, 1, 1, 2, 2, 2]
    assert number_words([], "").tolist() == []
    found = number_words(["▁", "▁", "a", "▁", "▁", "▁b", "▁c"], " a   b c").tolist()
    assert found == [0, 0, 0, 1, 1, 1, 2], "blanks side by side are one"
    assert number_words(["▁", "▁", "a", "▁b", "▁", "▁", "▁c"], "▁a▁b ▁ c").tolist() == [0, 0, 0, 0, 1, 1, 2], "no blanks"


@given(st.text("ab ▁é\u4e2d\u00a0<", max_size=12).map(str.strip))
def test_a_piece_has_the_word_in_which_it_begins(vocabulary, line):
    """Against the bytes that the pieces take from the line, one after the other."""
    pieces = vocabulary.names(vocabulary.encode_lines(pa.array([line]))[0]) if line else []
    left, expected = f" {line}".encode(), []
    for piece in pieces:
        before, size = len(f" {line}".encode()) - len(left), 1
        if not re.fullmatch("<0x..>", piece):
            size = sum(1 if char == "▁" and left[:1] == b" " else len(char.encode()) for char in piece)
        words = f" {line}".encode()[:before].split(b" ")
        expected.append(sum(map(bool, words)) - bool(words[-1] and left[:1] != b" "))
        left = left[size:]
    assert not left or not line
    assert number_words(pieces, line).tolist() == expected and (not line or expected[-1] == count_words(line) - 1)


@given(st.lists(st.tuples(LINKS, LINKS, LINKS), min_size=1, max_size=4))
def test_the_error_rate_is_that_of_the_equation(lines):
    found = [links for links, _, _ in lines]
    references = [ReferenceLinks(frozenset(sure), frozenset(sure | more)) for _, sure, more in lines]
    pairs = list(zip(found, references, strict=True))
    a_s = sum(1 for links, reference in pairs for link in links if link in reference.sure)
    a_p = sum(1 for links, reference in pairs for link in links if link in reference.possible)
    size = sum(len(links) + len(reference.sure) for links, reference in pairs)
    assert alignment_error_rate(found, references) == (pytest.approx(1 - (a_s + a_p) / size) if size else None)


def test_links_are_read_and_written_in_pharaoh_form():
    assert parse_links("1-0 0p2 ") == ReferenceLinks(frozenset({(1, 0)}), frozenset({(1, 0), (0, 2)}))
    assert format_links([(2, 1), (0, 3)]) == "0-3 2-1" and parse_links(" ").possible == frozenset()
    for wrong in ("1_2", "1-2-3", "-1-2", "a-b", "1234567-1", "١-٢"):
        with pytest.raises(ValueError, match="a link must have the form 2-3"):
            parse_links(wrong)


def test_reference_links_of_the_sample_name_words_of_their_lines():
    sides = [(SAMPLES / f"aligned.{name}").read_text().splitlines() for name in ("en", "de", "links")]
    assert [len(side) for side in sides] == [20] * 3
    for source, target, links in zip(*sides, strict=True):
        possible = parse_links(links).possible
        assert {one for one, _ in possible} == set(range(len(source.split(" "))))
        assert {other for _, other in possible} == set(range(len(target.split(" "))))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Subwords:
    return Subwords(write_vocabulary(tmp_path_factory.mktemp("pieces")) / "encoded" / "vocab" / "pieces.model")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", write_vocabulary(tmp_path_factory.mktemp("data")))


@pytest.fixture
def align(capfdbinary):
    main = main_of("align.py")

    def call(*arguments: object) -> tuple[list[str], str]:
        capfdbinary.readouterr()
        main([*map(str, arguments)])
        sys.stdout.flush()
        printed = capfdbinary.readouterr()
        return printed.out.decode().split("\n")[:-1], printed.err.decode()

    return call


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_the_command_writes_a_line_for_each_pair(align, run, tmp_path):
    random = np.random.default_rng(0)
    sources, targets = ([" ".join(random.choice(SEARCH_WORDS, random.integers(1, 7))) for _ in range(9)] for _ in range(2))
    sources[3], targets[5], sources[7] = "ba\x01", "", ""
    targets[7] = ""
    files = [f"{name}={write(tmp_path / name, lines)}" for name, lines in (("input", sources), ("target", targets))]
    found, errors = align("--out", run, *files)
    assert len(found) == 9 and [number for number, line in enumerate(found) if not line] == [3, 5, 7]
    assert "line 4: control character U+0001" in errors
    for line, source, target in zip(found, sources, targets, strict=True):
        links = sorted(parse_links(line).sure)
        assert not links or sorted(word for _, word in links) == list(range(len(target.split())))
        assert all(word < len(source.split()) for word, _ in links)
    assert align("--out", run, *files, "lines_at_once=2")[0] == found
    records = [json.loads(line) for line in align("--out", run, *files, "json_lines=true")[0]]
    assert [format_links(map(tuple, one["links"])) for one in records] == found
    assert all(len(one["nodes"]) == len(one["links"]) for one in records) and records[0]["nodes"][0]["label"]
    references = write(tmp_path / "references", found)
    said = align("--out", run, *files, f"references={references}")[1]
    assert "alignment error rate 0.0 % on 9 lines, 1 of them not aligned" in said
    output = tmp_path / "out"
    assert align("--out", run, *files, f"output={output}")[0] == [] and output.read_text().splitlines() == found


def test_a_word_is_the_same_in_links_and_in_references(align, run, tmp_path):
    for blanks, words in (("  ", 3), ("\u00a0", 1), ("\t", 1), ("▁", 1), (" ▁ ", 5)):
        line = write(tmp_path / "line", [blanks.join(["ba", "be", "bo"])])
        files = [f"input={line}", f"target={line}"]
        (links,) = align("--out", run, *files)[0]
        assert {word for _, word in parse_links(links).sure} == set(range(words))
        for last, refused in ((words - 1, False), (words, True)):
            references = write(tmp_path / "links", [f"{last}-{last}"])
            with pytest.raises(UserError, match=f"of {words} source and") if refused else nullcontext():
                align("--out", run, *files, f"references={references}")


def test_doubtful_text_is_told_once_for_all_parts(align, run, tmp_path):
    source = write(tmp_path / "source", ["ba &apos;s be", "ba be", "bo &apos;s be"])
    said = align("--out", run, f"input={source}", f"target={source}", "lines_at_once=1")[1].splitlines()
    assert [line for line in said if "escapes" in line] == [line for line in said if line.startswith(f"warning: {source}: has")]
    assert len([line for line in said if "escapes" in line]) == 1


def test_align_refuses_unfit_files_and_models_in_one_line(align, run, tmp_path):
    source, short = write(tmp_path / "in", ["ba be", "bo"]), write(tmp_path / "short", ["ba"])
    one = write(tmp_path / "one", ["0-0"])
    wrong = write(tmp_path / "wrong", ["0-0", "0:0"])
    from_one = write(tmp_path / "from_one", ["1-1 2p2", "1-1"])
    recurrent = write_run(tmp_path / "recurrent", write_vocabulary(tmp_path / "data"), name="bilstm")
    for out, arguments, message in [
        (run, [f"target={short}"], "has 2 lines, but .*short has 1"),
        (run, ["target=target.tsv"], "target.tsv must have one text a line, but its name is that of a table"),
        (run, [f"target={source}", f"references={one}"], "has 2 lines, but .*one has 1"),
        (run, [f"target={source}", f"references={wrong}"], "wrong, line 2: a link must have the form 2-3"),
        (
            run,
            [f"target={source}", f"references={from_one}"],
            "line 1: the link 2-2 must be of 2 source and 2 target words",
        ),
        (run, [f"target={source}", "layer=2"], "layer must be at most 1, but is 2"),
        (run, [], "target: .*missing"),
        (recurrent, [f"target={source}"], "bilstm has no Transformer decoder"),
    ]:
        with pytest.raises(UserError, match=message):
            align("--out", out, f"input={source}", *arguments)


@pytest.mark.parametrize("links, message", [(["0-0"] * 3, "2, but has more"), (["0-0"], "but has 1")])
def test_reference_links_of_a_pipe_are_counted_as_well(align, run, tmp_path, monkeypatch, links, message):
    monkeypatch.setattr("treenet.cli.align.is_stream", lambda path: True)
    source, target, references = (
        write(tmp_path / name, lines) for name, lines in (("in", ["ba be", "bo"]), ("out", ["ba", "be"]), ("references", links))
    )
    with pytest.raises(UserError, match=f"references must have one line for each line of the input, {message}"):
        align("--out", run, f"input={source}", f"target={target}", f"references={references}", "lines_at_once=1")
