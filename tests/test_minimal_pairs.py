"""Minimal pairs: files to pairs, scores with shared beginnings against single sentences, groups, tests of two runs, commands."""

import gzip
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_here
from data_beside import DATA
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import VOCAB
from scipy import stats
from test_causal_lm import make_config
from test_packed_files import zipped
from toydata import with_given_trees, write_toy_data

from treenet.config import ModelConfig
from treenet.data.input_kinds import LEAVES
from treenet.evaluation.language_models import Scored, Scorer, score_pairs
from treenet.evaluation.minimal_pairs import (
    PairInput,
    compare_groups,
    format_groups,
    mcnemar,
    open_pairs,
    pair_columns,
    pair_rows,
    summarize_pairs,
)
from treenet.evaluation.prefix_trees import plant, score_pieces
from treenet.evaluation.settings import PairsConfig, ScoreLMSettings
from treenet.experiments.seeds import _fingerprint_pairs
from treenet.jobs.train_run import run_training
from treenet.models import CausalLM, build_causal_lm
from treenet.report.build import write_report
from treenet.report.settings import ReportSettings
from treenet.runs.run_results import parse_columns, read_scores
from treenet.tasks.causal_lm import CausalBatch
from treenet.tasks.class_scores import wilson_interval
from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.settings import UserError
from treeproc.online.minimal_pairs import MinimalPair, PairColumns, encode_pairs, read_pairs
from treeproc.parsers import ParserConfig, build_parser
from treeproc.shards.schema import BOS_ID, EOS_ID
from treeproc.stages.inputs import TreeConfig

COLUMNS = PairColumns("good", "bad", ("kind",))
PAIRS = [("The cat is here .", "The cat are here .", "is"), ("They were here .", "They was here .", "was")]
OBJECTS = "".join(json.dumps({"kind": kind, "good": good, "bad": bad, "n": 1}) + "\n" for good, bad, kind in PAIRS)
TABLE = "kind\tbad\tgood\n" + "".join(f"{kind}\t{bad}\t{good}\n" for good, bad, kind in PAIRS)
QUOTED = 'is\tb\t"A 5"" disk"\n'  # of pandas and Excel
TREES = "(S (X ba) (X be))\n(S (X ba) (X bi))\n"


def write(folder: Path, name: str, content: str | bytes) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / name


# Files.


def test_all_forms_give_the_same_pairs(tmp_path, caplog):
    others = {"top/.DS_Store": b"\0", "top/README.md": b"pairs"}
    files = [
        write(tmp_path, "a.jsonl", OBJECTS),
        write(tmp_path, "a.tsv", TABLE),
        write(tmp_path, "a.csv", TABLE.replace("\t", ",")),
        write(tmp_path, "a.jsonl.gz", gzip.compress(OBJECTS.encode())),
        write(tmp_path, "a.zip", zipped({"top/a.jsonl": OBJECTS.encode(), **others})),
        write(tmp_path, "folder/data/a.jsonl", OBJECTS).parents[1],
        write(tmp_path, "only_zip/a.zip", zipped({"a.jsonl": OBJECTS.encode()})).parent,
    ]
    write(tmp_path, "folder/a.zip", zipped({"a.jsonl": OBJECTS.encode()}))  # not read twice
    for file in files:
        pairs, published = read_pairs([file], COLUMNS)
        assert [(*pair.sentences, *pair.groups) for pair in pairs] == PAIRS and not published, file
        assert pairs[1].place.startswith("a.") and pairs[1].place.rpartition(":")[2] in "23"
    assert "a.zip has entries that are left out (hidden files: 1)" in caplog.text
    assert "note: " in caplog.text and "1 files cannot hold pairs, and are left out" in caplog.text
    (pair,), _ = read_pairs([write(tmp_path, "two.mrg", TREES)], COLUMNS)
    assert pair.sentences == ("ba be", "ba bi") and pair.place == "two.mrg:1" and pair.trees is not None


GOOD = {"good": "a", "bad": "b", "kind": "c"}


def test_a_study_names_the_settings_of_its_grid(tmp_path):
    objects, pairs = write(tmp_path, "a.jsonl", json.dumps({"bad": "a"})), write(tmp_path, "blimp.jsonl", json.dumps(GOOD))
    for settings, said in (
        (ScoreLMSettings(pairs=PairsConfig(files=(objects,))), "; set grid.pairs.good"),
        (ScoreLMSettings(blimp=pairs), "with grid.pairs.files instead of grid.blimp"),
    ):
        fingerprint, problem = _fingerprint_pairs(settings)
        assert fingerprint is None and problem.endswith(said)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", json.dumps({"good": "a", "bad": "b"}), r"a.jsonl, line 1: the object has no key 'kind', .*; set pairs.by$"),
        ("a.jsonl", json.dumps({"bad": "a", "kind": "b"}), r"a.jsonl, line 1: the object has no key 'good', .*; set pairs.good$"),
        ("a.jsonl", OBJECTS + OBJECTS[:40], "a.jsonl, line 3: not JSON .*; every line must be one JSON object"),
        ("a.jsonl", OBJECTS + "[1]\n", "a.jsonl, line 3: must be a JSON object"),
        ("a.jsonl", json.dumps(GOOD | {"good": " "}), "a.jsonl, line 1: the good is empty; write one, or remove"),
        ("a.jsonl", json.dumps(GOOD | {"bad": ["b"]}), "a.jsonl, line 1: the bad must be a string"),
        ("a.jsonl", "", "a.jsonl has no minimal pairs; give JSON Lines, a table with a header, or trees"),
        ("a.tsv", "a\tb\tc\n", "a.tsv, line 1: must be a header with the columns good and bad and kind, separated by tabs"),
        ("a.tsv", TABLE + "was\tb\n", "a.tsv, line 4: expected 3 columns separated by tabs"),
        ("a.tsv", TABLE + "was\tb\t\n", "a.tsv, line 4: the good is empty"),
        ("a.txt", "one\ntwo\n", "a.txt, line 1: must be a header"),
        ("a.tsv", TABLE + QUOTED, "a.tsv, line 4: expected a plain good between tabs, but found one quoted as in CSV: .*; undo"),
        ("a.tsv", TABLE.replace("The cat are here .", '"They say ""Hi""."'), "a.tsv, line 2: expected a plain bad between tabs"),
        ("a.mrg", TREES + TREES[:18], "a.mrg: trees 3 and 4 must be a pair, but tree 4 has no words"),
        ("a.mrg", "(S (-NONE- *))\n" + TREES[:18], "a.mrg: trees 1 and 2 must be a pair, but tree 1 has no words"),
        ("a.mrg", TREES[:-2], "a.mrg, line 2: .* not closed"),
        ("a.zip", zipped({"../a.jsonl": OBJECTS.encode()}), "a.zip: the name '../a.jsonl' of a file leads out of it"),
        ("a.zip", zipped({"a.jsonl": OBJECTS.encode()})[:-30], "a.zip: it is not a zip archive, or is damaged"),
        ("a.zip", zipped({"a.txt": b"x"}), "a.zip has no minimal pairs"),
        ("models_summary.jsonl", '{"UID": "a"}\n{"lstm": 1}\n', "summary.jsonl, line 2: expected an object with UID"),
        ("models_summary.jsonl", f'{{"UID": "a", "lstm": 1{"0" * 400}}}\n', "summary.jsonl, line 1: expected an object with UID"),
    ],
)
def test_bad_files_are_one_line(name, content, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        read_pairs([write(tmp_path, name, content)], COLUMNS)
    assert "\n" not in str(error.value)


def test_quotation_marks_of_a_text_stay_and_those_of_csv_are_undone(tmp_path, caplog):
    said = ('"Hi," they said, "you"', '"Hi," they says, "you"'), ('""', "''")
    rows = "".join(f"is\t{bad}\t{good}\n" for good, bad in said)
    pairs, _ = read_pairs([write(tmp_path, "a.tsv", f"kind\tbad\tgood\n{rows}is\tb\tb\n")], COLUMNS)
    assert [pair.sentences for pair in pairs] == [*said, ("b", "b")]
    pairs, _ = read_pairs([write(tmp_path, "a.csv", ("kind\tbad\tgood\n" + QUOTED).replace("\t", ","))], COLUMNS)
    assert [pair.sentences for pair in pairs] == [('A 5" disk', "b")]
    assert open_pairs(ScoreLMSettings(pairs=PairsConfig(files=(tmp_path / "a.tsv",)))) is not None
    assert "quotation marks" not in caplog.text
    read_pairs([write(tmp_path, "b.tsv", 'kind\tbad\tgood\na\t"b"\tc\na\t"d"\t"e"\n')], COLUMNS)
    assert "b.tsv, line 2: every bad stands in quotation marks, which are scored as text" in caplog.text
    assert "every good" not in caplog.text
    assert "note: 1 of 3 pairs are one sentence twice, which is a tie, and counts as wrong" in caplog.text
    with pytest.raises(ValueError, match="good and bad must be two columns, but both are 'bad'"):
        PairsConfig(files=(tmp_path / "a.tsv",), good="bad")


def test_the_summary_of_blimp_is_no_paradigm_and_its_totals_are_none(tmp_path, caplog):
    rows = [("one", "t", 0.5), ("two", "t", 0.75), ("overall", "t", 0.1), ("overall", "overall", 0.2)]
    lines = [json.dumps({"UID": name, "linguistics_term": term, "lstm": value}) for name, term, value in rows]
    write(tmp_path, "models_summary.jsonl", "\n".join(lines))
    pair = {"sentence_good": "a", "sentence_bad": "b", "linguistics_term": "t"}
    fields = ("syntax/semantics", "syntax_semantics")
    for name, field in zip(("one", "two"), fields, strict=True):
        write(tmp_path, f"{name}.jsonl", json.dumps(pair | {"UID": name, "field": field}))
    found = open_pairs(ScoreLMSettings(blimp=tmp_path))
    assert found is not None and found.published == {"one": {"lstm": 0.5}, "two": {"lstm": 0.75}}
    groups = summarize_pairs(found, np.array([[1.0, 2.0], [2.0, 2.0]]), np.full((2, 2), 3))["groups"]
    assert [*groups["UID"]] == ["one", "two"] and [*groups["field"]] == ["syntax_semantics"]
    assert groups["linguistics_term"]["t"]["published"] == {"lstm": 0.625} and groups["UID"]["one"]["published"] == {"lstm": 0.5}
    columns = {one.title: list(one.cells) for one in pair_columns("UID", list(groups["UID"]), {"run": [*groups["UID"].values()]})}
    assert columns["lstm, published"] == ["50.0", "75.0"] and columns["run, right pairs (%)"] == ["100.00", "0.00"]
    groups["UID"]["one"].pop("published")
    groups["UID"]["two"]["published"] = {"gpt2": 0.5}
    columns = {one.title: list(one.cells) for one in pair_columns("UID", list(groups["UID"]), {"run": [*groups["UID"].values()]})}
    assert columns["gpt2, published"] == ["–", "50.0"]
    assert columns["pairs"] == ["1", "1"] and columns["ties"] == ["0", "1"] and "run, by mean of pieces (%)" not in columns
    with (tmp_path / "one.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(pair | {'UID': 'one', 'field': 'x'})}\n")
    uneven = open_pairs(ScoreLMSettings(blimp=tmp_path))
    assert uneven is not None and uneven.name == "pairs-blimp"
    assert "two has 1 pairs, but others up to 2; if this is BLiMP itself, copy it again" in caplog.text
    (tmp_path / "one.jsonl").write_text(json.dumps(pair))
    with pytest.raises(UserError, match="no key 'UID', .*; set pairs.by with pairs.files instead of blimp"):
        open_pairs(ScoreLMSettings(blimp=tmp_path))


@pytest.mark.slow
def test_a_parser_that_only_cuts_gives_the_same_words():
    lines = ["I don't know why he can't go.", "<2de> Who's there?", "a b. " * 80, "“No”, said Ann.", "it cost $5"]
    config = ParserConfig(name="shipped", tags=["<2de>"])
    whole, cut = (build_parser(config, words_only=only).parse(lines) for only in (False, True))
    for one, other in zip(whole, cut, strict=True):
        assert all(one.words[name] == other.words[name] for name in ("text", "start_char", "end_char"))
    assert whole[0].trees != cut[0].trees and [one.parse_status for one in cut] == [one.parse_status for one in whole]


@pytest.mark.data
def test_blimp_as_published():
    found = open_pairs(ScoreLMSettings(blimp=DATA / "blimp"))
    assert found is not None and (len(found.pairs), len(found.published)) == (67_000, 67)
    assert sum(pair.sentences[0] == pair.sentences[1] for pair in found.pairs) == 7
    pieces = np.full((67_000, 2), 9)
    summary = summarize_pairs(found, np.array([[len(one) for one in pair.sentences] for pair in found.pairs], float), pieces)
    assert [len(groups) for groups in summary["groups"].values()] == [67, 13, 4]
    assert {one["num_pairs"] for one in summary["groups"]["UID"].values()} == {1000}
    published = [one["published"]["lstm"] for one in summary["groups"]["UID"].values()]
    assert 100 * sum(published) / 67 == pytest.approx(69.8, abs=0.05)


# Scores with shared beginnings.


def build(**options) -> CausalLM:
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2)
    return build_causal_lm(ModelConfig(name="causal_transformer", **sizes, **options), VOCAB).eval()


@torch.no_grad()
def score_alone(model: CausalLM, pieces: list[int], beginners: list[int]) -> tuple[list[float], list[float]]:
    """Score one sentence by itself, one position after the other."""
    ids, following = torch.tensor([[BOS_ID, *pieces]]), [*pieces, EOS_ID]
    none = torch.zeros(1, 0, dtype=torch.int64)
    batch = CausalBatch(torch.zeros(1), none, none.bool(), none, none.bool(), None, ids, torch.tensor([following]))
    logits = model.compute_logits(model(batch)[0])[0].log_softmax(1)
    nll = [-float(logits[place, piece]) for place, piece in enumerate(following)]
    return nll, [-float(row[beginners].exp().sum().log()) for row in logits]


@num_examples(30)
@given(st.lists(st.lists(st.integers(4, 7), max_size=7), min_size=1, max_size=25), st.integers(2, 40))
def test_trees_have_every_sentence_once(sentences, most):
    trees = plant(sentences, most)
    assert sorted(number for tree in trees for number in tree.paths) == list(range(len(sentences)))
    for tree in trees:
        assert len(tree.pieces) <= most or len({tuple(sentences[number]) for number in tree.paths}) == 1
        for number, path in tree.paths.items():
            assert [tree.pieces[place] for place in path] == [BOS_ID, *sentences[number]]
            assert [tree.depth[place] for place in path] == list(range(len(path)))
            assert all(tree.above[below] == place for place, below in itertools.pairwise(path))
        beginnings = {tuple(sentences[number][:end]) for number in tree.paths for end in range(len(sentences[number]) + 1)}
        assert len(tree.pieces) == len(beginnings)  # each is computed once


@pytest.mark.parametrize("options", [{}, {"norm": "pre"}, {"tree_reg": {"weight": 0.5}}])
def test_scores_are_those_of_single_sentences(options, monkeypatch):
    monkeypatch.setattr("treenet.evaluation.prefix_trees.ROWS", 7)
    random = np.random.default_rng(0)
    sentences = [random.integers(4, 7, size).tolist() for size in random.integers(0, 9, 40)]
    sentences += [sentences[0], [5] * 300]  # longer than a tree, and than the first table of positions
    for model, tolerance in ((build(**options).double(), 1e-10), (build(**options), 1e-4)):
        found = dict(score_pieces(model, sentences, [4, EOS_ID]))
        assert len(found) == len(sentences)
        for number, pieces in enumerate(sentences):
            nll, begins = score_alone(model, pieces, [4, EOS_ID])
            np.testing.assert_allclose(found[number].nll, nll, rtol=tolerance)
            np.testing.assert_allclose(found[number].begins, begins, rtol=tolerance)
        assert (found[0].nll == found[40].nll).all()  # equal sentences tie to the last bit


# Statistics.


def test_intervals_and_tests_are_those_of_scipy():
    for right, count in itertools.product((0, 1, 7, 40), (40, 1000)):
        expected = stats.binomtest(right, count).proportion_ci(method="wilson")
        assert wilson_interval(right, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
    for better, worse in itertools.product((0, 1, 5, 30), repeat=2):
        expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
        assert mcnemar(better, worse) == pytest.approx(expected)


def given_pairs(groups: list[tuple[str, ...]], by: tuple[str, ...] = ("kind", "all")) -> PairInput:
    return PairInput("pairs-x", [MinimalPair("x:1", ("a", "b"), one) for one in groups], by, {})


def test_groups_ties_and_means_of_pieces():
    pairs = given_pairs([("p", "x"), ("p", "x"), ("q", "x")])
    nll, pieces = np.array([[1.0, 2.0], [3.0, 3.0], [5.0, 4.0]]), np.array([[4, 4], [6, 5], [9, 4]])
    found = summarize_pairs(pairs, nll, pieces)
    assert (found["num_pairs"], found["pair_accuracy"], found["num_ties"], found["num_unequal"]) == (3, 1 / 3, 1, 2)
    assert found["accuracy_per_piece"] == 1 and found["paradigm_accuracy"] == 0.25
    p, q = found["groups"]["kind"].values()
    assert (p["pair_accuracy"], p["num_ties"], q["pair_accuracy"]) == (0.5, 1, 0) and found["groups"]["all"]["x"][
        "num_pairs"
    ] == 3
    rows = [line.rstrip("\n").split("\t") for line in pair_rows(pairs, nll, pieces)]
    assert rows[0][2:5] == ["by.kind", "by.all", "right"] and [row[4] for row in rows[1:]] == ["1", "0", "0"]


def test_two_results_are_tested_in_each_group():
    kinds = [('"p', "x")] * 10 + [('"q', "x")] * 12  # quotes as any other character
    pairs, bad = given_pairs(kinds), np.ones(22)
    sides = []
    for wrong in (set(range(8)), {9, 20}):
        nll = np.stack([[2.0 if number in wrong else 0.5 for number in range(22)], bad], axis=1)
        sides.append("".join(pair_rows(pairs, nll, np.ones((22, 2)))))
    right = parse_columns(sides[0], "FILE", {"right": int}, "")
    assert right == [[0] * 8 + [1] * 14]
    found = compare_groups(*sides)
    p, q = found["kind"].values()
    assert (p["baseline"], p["system"], p["better"], p["worse"], q["better"], q["worse"]) == (2, 9, 8, 1, 0, 1)
    expected = stats.binomtest(1, 9).pvalue
    assert (p["p"], q["p"]) == (pytest.approx(expected), 1.0) and p["holm_p"] == pytest.approx(2 * expected)
    assert found["all"]["x"]["better"] == 8 and found["all"]["x"]["holm_p"] == found["all"]["x"]["p"]
    p["p"] = 1e-9
    assert format_groups(found)[2].endswith(f"  < 0.001    {2 * expected:.3f}")


# Commands.

WORDS = ("ba", "be", "bi", "bo", "bu")


def toy_pairs(count: int = 12) -> list[dict]:
    random = np.random.default_rng(1)
    drawn = [[str(word) for word in random.choice(WORDS, 5)] for _ in range(count)]
    pairs = [{"good": " ".join(line), "bad": " ".join([*line[:3], *line[2:]]), "kind": line[0]} for line in drawn]
    return [*pairs, {"good": "ba Be", "bad": "ba Be", "kind": "tie"}]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return with_given_trees(write_toy_data(tmp_path_factory.mktemp("pairs") / "data", train=40, valid=8, test=10), "words")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("causal") / "run"
    run_training(make_config(data, "model.name=causal_transformer", "max_steps=4", "checkpoint_every=2"), out)
    return out


def score(out: Path, *arguments: object) -> str:
    done = run_here("score_lm.py", "--out", out, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_is_scored_and_compared_with_another(run, data, tmp_path):
    file = write(tmp_path, "toy.jsonl", "".join(json.dumps(row) + "\n" for row in toy_pairs()))
    arguments = [f"pairs.files=[{file}]", "pairs.by=[kind]"]
    said = score(run, *arguments)
    entry = read_json(run / "scores.json")["pairs-toy"]
    assert (entry["num_pairs"], entry["num_ties"], entry["num_unequal"], entry["num_with_unknown"]) == (13, 1, 12, 2)
    assert "2 of 26 sentences have unknown pieces or bytes" in said and "12 pairs differ in their number" in said
    rows = [line.split("\t") for line in (run / "language_model.pairs-toy.tsv").read_text().splitlines()[1:]]
    total = math.fsum(float(value) for row in rows for value in row[4:6])
    assert entry["nll"] == pytest.approx(total / entry["num_targets"], rel=1e-6)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    score(other, *arguments, "checkpoint=2")
    result = other / "language_model.pairs-toy.step_00000002.tsv"
    done = run_here("evaluate.py", "--compare", run / "language_model.pairs-toy.tsv", result, "--out", tmp_path / "compared")
    assert done.returncode == 0 and "McNemar's exact test" in done.stdout, done.stderr
    found = read_json(tmp_path / "compared" / "comparison.json")
    assert read_scores(other)["pairs-toy.step_00000002"]["steps"] == [2]
    assert found["num_examples"] == 13 and found["groups"]["kind"]["tie"]["better"] == 0
    assert found["metrics"]["pair_accuracy"]["baseline"] == pytest.approx(entry["pair_accuracy"])
    score(other, *arguments)
    assert "pairs-toy" in run_here("evaluate.py", "--compare", run, other, "split=pairs-toy").stdout
    file.write_text("".join(json.dumps(row) + "\n" for row in toy_pairs()[1:]))
    score(other, *arguments)
    for sides, message in (((run, other), "are of other minimal pairs; score both"), ((run, run), "has no scores of pairs-x")):
        split = "pairs-x" if sides[1] == run else "pairs-toy"
        done = run_here("evaluate.py", "--compare", *sides, f"split={split}")
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "blimp=FOLDER, or pairs.files=[FILE]" in done.stderr
    done = run_here("evaluate.py", "--compare", run, other, "split=pairs-toy.beam.every_2")
    own = run / "language_model.pairs-toy.every_2.tsv"
    assert done.returncode == 2 and f"--compare {own} GRAMMAR/language_model.pairs-toy.beam.every_2.tsv" in done.stderr
    done = run_here("score_lm.py", "--out", run, *arguments, f"blimp={file}")
    assert done.returncode == 2 and "pairs.files: leave it out, or leave blimp out" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_a_report_shows_groups_of_pairs_with_their_intervals(run, tmp_path):
    file = write(tmp_path, "kinds.jsonl", "".join(json.dumps(row) + "\n" for row in toy_pairs()))
    arguments, unscored = [f"pairs.files=[{file}]", "pairs.by=[kind]"], shutil.ignore_patterns("scores.json", "language_model.*")
    run = Path(shutil.copytree(run, tmp_path / "run", ignore=unscored))
    score(run, *arguments)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    score(run, "split=valid")
    write_report(ReportSettings(runs=(str(run), str(other)), split="valid"), tmp_path / "out")
    page, numbers = (tmp_path / "out" / "index.html").read_text(), read_json(tmp_path / "out" / "report.json")
    entries = numbers["language"]
    assert entries == {folder.name: read_scores(folder) for folder in (run, other)}
    assert "<title>Language models</title>" in page and "tree-attention score-lm --out" in page  # `other` lacks valid
    groups = entries["run"]["pairs-kinds"]["groups"]["kind"]
    for one in (*groups.values(), entries["run"]["pairs-kinds"]):
        low, high = one["interval"]
        assert f">{100 * one['pair_accuracy']:.2f}<" in page and f">{100 * low:.2f} to {100 * high:.2f}<" in page
    assert f">{entries['run']['valid']['nll']:.3f}<" in page
    charts = [name for name in numbers["figures"] if name.startswith("pairs_")]
    assert charts == ["pairs_1.png", "pairs_1.svg"]
    svg = (tmp_path / "out" / "figures" / "pairs_1.svg").read_text()
    assert all(f">{name}<" in svg for name in (*groups, "run", "other"))
    file.write_text("".join(json.dumps(row) + "\n" for row in toy_pairs()[1:]))
    score(other, *arguments)  # other pairs stand in a chart of their own
    write_report(ReportSettings(runs=(str(run), str(other)), split="valid"), tmp_path / "out")
    assert {"pairs_1.svg", "pairs_2.svg"} < {*read_json(tmp_path / "out" / "report.json")["figures"]}


def test_trees_of_a_pair_are_drawn_alike(data, tmp_path):
    """Equal sentences have equal random trees, other pairs have others."""
    random = with_given_trees(Path(shutil.copytree(data, tmp_path / "random")))
    index = random / "encoded" / "index.json"
    atomic_write(index, json_bytes(read_json(index) | {"tree_settings": TreeConfig(tree_source="random").model_dump()}))
    tree = "(S (X ba) (X be) (X bibo) (X ba) (X be) (X ba) (X be))\n"
    pairs, _ = read_pairs([write(tmp_path, "pairs.mrg", tree * 8)], COLUMNS)
    shapes = [row["spans"]["end"].tolist() for row, _ in encode_pairs(pairs, random, reads_trees=True)]
    assert shapes[::2] == shapes[1::2] and len({tuple(shape) for shape in shapes}) > 1
    mixed = [*pairs, MinimalPair("a:1", ("ba", "be"))]
    with pytest.raises(UserError, match="some files have trees and others have none"):
        next(encode_pairs(mixed, random, reads_trees=True))
    with pytest.raises(UserError, match="give the pairs as trees in brackets, or"):
        next(encode_pairs(mixed[-1:], random, reads_trees=True))


def test_equal_sentences_tie_however_their_sums_were_rounded(data, monkeypatch):
    """In two batches, a sentence may get two sums."""
    monkeypatch.setattr(Scorer, "score", lambda self, rows: [Scored(n, 2, 3, 1.0 - 1e-12 * n) for n, _ in enumerate(rows)])
    given = PairInput("pairs-x", [MinimalPair("x:1", ("ba be", "ba be")), MinimalPair("x:2", ("ba be", "ba bi"))], (), {})
    _, entry = score_pairs(Scorer(build(), LEAVES, VOCAB), given, data)
    assert (entry["num_ties"], entry["pair_accuracy"]) == (1, 0)
