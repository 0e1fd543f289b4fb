"""Models that learned nothing: the facts and rules, and what commands, studies and reports say instead of p and stars."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from commands import main_of
from toydata import write_toy_data
from toyruns import make_config

from treenet.data.splits import read_split
from treenet.evaluation.comparison import compare, format_comparison
from treenet.evaluation.settings import CompareConfig
from treenet.experiments import scaling_report, seeds_report
from treenet.experiments.recorded_study import report_records
from treenet.experiments.records import read_records
from treenet.experiments.study import note_unlearned, say_unlearned_cells
from treenet.jobs.train_run import run_training
from treenet.report.answer import answer_study
from treenet.report.report_inputs import ReportStudy
from treenet.runs.run_results import System
from treenet.tasks.learning import (
    facts_of_classes,
    facts_of_lines,
    facts_of_nll,
    facts_of_scores,
    facts_of_text,
    facts_of_training,
    find_unlearned,
    piece_counts,
    say_unlearned,
    why_overfitted,
    why_unlearned,
)
from treenet.tasks.scores import format_scores
from treeproc.shards.schema import EOS_ID

RECORDS = Path(__file__).parents[1] / "docs" / "results" / "runs"
ANIMALS, THINGS = ("cat", "dog", "owl", "hen", "fox"), ("tree", "mouse", "house", "river", "stone", "road")
REFERENCES = [f"the {animal} saw a {thing} ." for animal in ANIMALS for thing in THINGS]
COMMAS = [", " * (3 + number % 7) for number in range(30)]
ONE_LINE = ["the the a ."] * 30


def why(outputs, references=REFERENCES) -> str:
    return why_unlearned({"learning": facts_of_text(outputs, references, "intl")})


def test_translations_of_one_piece_and_constant_ones_are_signs():
    assert why(COMMAS) == "one piece is 100.0% of the output"
    assert why(ONE_LINE) == "different outputs: 1, different references: 30"
    assert why([""] * 30) == "different outputs: 1, different references: 30"
    weak = [f"the the the {line.split()[1]}" for line in REFERENCES]  # 75 % one word, 5 different outputs
    assert why(weak) == why(REFERENCES) == ""
    many = [f"{number}" for number in range(1000)]
    assert why([f"{number % 10}" for number in range(1000)], many) == "different outputs: 10, different references: 1,000"
    assert why([f"{number % 11}" for number in range(1000)], many) == ""


def test_few_references_or_uniform_ones_are_no_sign():
    assert why(COMMAS[:19], REFERENCES[:19]) == why(ONE_LINE[:19], REFERENCES[:19]) == ""
    assert why(ONE_LINE * 4, REFERENCES[:4] * 30) == ""  # four different references
    assert why(["a " * (1 + number % 3) for number in range(30)], ["a " * (1 + number) for number in range(30)]) == ""


@pytest.mark.parametrize(
    ("cells", "is_sign"),
    [
        ({(0, 0): 50, (1, 0): 49, (1, 1): 1}, True),
        ({(0, 0): 50, (1, 0): 48, (1, 1): 2}, False),
        ({(0, 0): 950, (1, 0): 50}, False),  # the test set is of one class itself
        ({(0, 0): 850, (1, 0): 150}, True),
        ({(0, 0): 10, (1, 0): 10}, False),  # few examples
        ({(number, 7): 1 for number in range(150)}, True),  # more classes than a confusion matrix has
    ],
)
def test_one_class_for_nearly_all_examples_is_a_sign(cells, is_sign):
    entry = {"learning": facts_of_classes(cells), "num_examples": sum(cells.values())}
    assert bool(why_unlearned(entry)) == is_sign


def test_scores_that_hardly_differ_are_a_sign():
    right = np.linspace(1, 5, 40)
    for factor, is_sign in ((0.0, True), (0.009, True), (0.05, False), (1.0, False)):
        entry = {"learning": facts_of_scores(3 + factor * right, right), "num_examples": 40}
        assert bool(why_unlearned(entry)) == is_sign and not why_unlearned(entry | {"num_examples": 19})
    assert facts_of_scores(right, np.ones(40)) == {}


def test_an_nll_that_is_not_below_that_of_frequencies_is_a_sign():
    entry = {"num_examples": 30, "nll": 5.0, "learning": {"unigram_nll": 5.0}}
    assert why_unlearned(entry) == "nll 5.000, a unigram model of train has 5.000"
    assert not why_unlearned(entry | {"nll": 4.99}) and not why_unlearned(entry | {"num_examples": 19})
    assert why_unlearned(entry | {"bleu": 0.9}) and not why_unlearned(entry | {"bleu": 1.1})  # it learned train by heart
    assert not why_unlearned(entry | {"bleu": 0.0, "bleu_tokenized": 12.0})
    assert not why_unlearned(entry | {"perplexity_given_tree": math.exp(4.9)})  # the rest of the nll is of trees
    assert not why_unlearned(entry | {"asked": {"untrained": True}})  # the user wanted it so
    assert not why_unlearned({"num_examples": 30, "bleu": 0.0, "accuracy": 0.0, "nll": 99.0})  # low scores alone are no sign


def test_a_language_model_that_learned_train_by_heart_is_overfitted():
    lines = [{"step": 1, "nll": 5.5}, {"step": 2, "nll": 1.0}, {"step": 3, "nll": None}, {"step": 4}]
    facts = {"unigram_nll": 5.0}
    assert facts_of_training(facts, lines, 2) == {"lowest_nll": 1.0} and not facts_of_training(facts, lines, 1)
    assert not facts_of_training(facts, [{"step": 1, "nll": 4.6}], 2)  # as a model of frequencies has by chance
    assert not facts_of_training({}, lines, 2) and not facts_of_training(facts, [], 2)
    entry = {"num_examples": 30, "nll": 9.0, "learning": facts}
    assert why_unlearned(entry) and not why_overfitted(entry)
    entry["learning"] = facts | {"lowest_nll": 1.0}
    why_is = "nll 9.000, a unigram model of train has 5.000, but 1.000 was reached in training"
    assert not why_unlearned(entry) and why_overfitted(entry) == why_is
    said = f"overfitted; set average=best, or train with fewer updates: test ({why_is})"
    assert format_scores({"test": entry}).split("\n")[-1] == said
    assert note_unlearned(entry) == {"overfitted": why_is}
    assert say_unlearned_cells({"cells": [{"cell": "test", "overfitted": why_is}, {"cell": "other"}]}) == [said]


@pytest.mark.parametrize(
    ("facts", "entry", "is_sign"),
    [
        # Exactly at each limit, and beyond it.
        ({"reference_distinct": 20, "distinct": 1}, {}, True),
        ({"reference_distinct": 19, "distinct": 1}, {}, False),
        ({"reference_distinct": 20, "distinct": 2}, {}, False),
        ({"reference_distinct": 20}, {}, False),
        ({"reference_distinct": 300, "distinct": 3}, {}, True),
        ({"reference_distinct": 300, "distinct": 4}, {}, False),
        ({"reference_distinct": 20, "piece_share": 0.9, "reference_piece_share": 0.1}, {}, False),
        ({"reference_distinct": 20, "piece_share": 0.91, "reference_piece_share": 0.9}, {}, True),
        ({"reference_distinct": 20, "piece_share": 0.95, "reference_piece_share": 0.91}, {}, False),
        ({"reference_distinct": 20, "piece_share": 0.95}, {}, False),
        ({"class_share": 0.99, "label_share": 0.0}, {"num_examples": 20}, True),
        ({"class_share": 0.99, "label_share": 0.0}, {"num_examples": 19}, False),
        ({"class_share": 0.98, "label_share": 0.0}, {"num_examples": 20}, False),
        ({"class_share": 1.0, "label_share": 0.75}, {"num_examples": 80}, True),
        ({"class_share": 1.0, "label_share": 0.76}, {"num_examples": 80}, False),
        ({"class_share": 1.0, "label_share": 0.9}, {"num_examples": 9000}, True),
        ({"class_share": 1.0, "label_share": 0.91}, {"num_examples": 9000}, False),
        ({"class_share": 1.0}, {"num_examples": 9000}, False),
        ({"spread": 0.0099}, {"num_examples": 20}, True),
        ({"spread": 0.01}, {"num_examples": 20}, False),
        ({"unigram_nll": 5.0}, {"num_examples": 20, "nll": 5.0, "bleu": 0.99, "bleu_tokenized": 0.99}, True),
        ({"unigram_nll": 5.0}, {"num_examples": 20, "nll": 5.0, "bleu": 1.0}, False),
        ({"unigram_nll": 5.0}, {"num_examples": 20, "nll": 5.0, "bleu_tokenized": 1.0}, False),
        ({"unigram_nll": 5.0}, {"num_examples": 20}, False),
        ({}, {"num_examples": 20, "nll": 5.0}, False),
        ({"unigram_nll": 1.0}, {"num_examples": 20, "nll": 0.5, "perplexity_given_tree": math.e}, True),
        ({"unigram_nll": 0.0}, {"num_examples": 20, "nll": -1.0, "perplexity_given_tree": 0.5}, True),
        ({"unigram_nll": 0.1}, {"num_examples": 20, "nll": 9.0, "perplexity_given_tree": 0.5}, False),
        ({"spread": 0.0}, {"num_examples": 20, "asked": {"untrained": True}}, False),
        ({"spread": 0.0}, {"num_examples": 20, "asked": {"untrained": False}}, True),
    ],
    ids=str,
)
def test_a_sign_begins_exactly_at_its_limit(facts, entry, is_sign):
    entry = {"learning": facts, **entry}
    assert bool(why_unlearned(entry)) == is_sign
    assert find_unlearned({"a": entry}) == ({"a": why_unlearned(entry)} if is_sign else {})


def test_six_models_are_named_and_the_others_counted():
    for count, end in ((1, "0 (why)"), (6, "5 (why)"), (7, "5 (why), and 1 more"), (9, "5 (why), and 3 more")):
        [line] = say_unlearned({str(number): "why" for number in range(count)})
        assert line.startswith("nothing was learned; train longer: 0 (why)") and line.endswith(end)
    assert why_unlearned({"learning": None, "num_examples": 30}) == why_unlearned({}) == ""


def test_frequencies_come_from_shards_that_are_spread_evenly(tmp_path):
    data = write_toy_data(tmp_path / "data", train=50, shards=7)
    rows = [row["tgt_pieces"].tolist() for row in read_split(data, "encoded", "train")]
    parts = [[rows[row] for row in part] for part in np.array_split(np.arange(50), 7)]
    for most, chosen in (
        (None, range(7)),
        (7, range(7)),
        (9, range(7)),
        (1, [0]),
        (2, [0, 6]),
        (3, [0, 3, 6]),
        (4, [0, 2, 4, 6]),
    ):
        for ends in (True, False):
            counts = piece_counts(data, "train", ends=ends, most=most)
            expected = Counter(piece for part in chosen for row in parts[part] for piece in [*row, *[EOS_ID] * ends])
            assert {piece: count for piece, count in enumerate(counts.tolist()) if count} == expected
    assert facts_of_lines([], []) == {"piece_share": 0.0, "distinct": 0, "reference_piece_share": 0.0, "reference_distinct": 0}


def test_the_frequencies_are_of_the_runs_own_train_if_its_pieces_are_the_same(tmp_path):
    data = write_toy_data(tmp_path / "data", train=50, valid=6, test=25)
    own = write_toy_data(tmp_path / "own", train=20, seed=3)
    of_data = {"unigram_nll": pytest.approx(slow_unigram(data, "tgt_pieces", ends=True), rel=1e-12)}
    assert facts_of_nll(own, data, "test") == of_data, "the pieces of the other train are others"
    index = json.loads((own / "encoded" / "index.json").read_text())
    there = json.loads((data / "encoded" / "index.json").read_text())
    index |= {name: there[name] for name in ("vocab_fingerprint", "files", "num_pieces") if name in there}
    (own / "encoded" / "index.json").write_text(json.dumps(index))
    train, test = (piece_counts(*split) for split in ((own, "train"), (data, "test")))
    share = (train + 1) / (train + 1).sum()
    expected = -sum(count * math.log(p) for count, p in zip(test.tolist(), share.tolist(), strict=True)) / test.sum()
    assert facts_of_nll(own, data, "test") == {"unigram_nll": pytest.approx(expected)} != of_data
    assert test[EOS_ID] == 25 and piece_counts(data, "test", "leaves", ends=False)[EOS_ID] == 0
    index["totals"] = {"valid": index["totals"]["train"]}
    (own / "encoded" / "index.json").write_text(json.dumps(index))
    assert facts_of_nll(own, data, "test") == of_data
    assert facts_of_nll(tmp_path / "none", tmp_path / "data", "test") == of_data


def test_tables_of_scores_name_the_results_and_at_most_six():
    entry = {"steps": [1], "num_examples": 60, "accuracy": 0.3, "learning": {"class_share": 1.0, "label_share": 0.5}}
    table = format_scores({"test": entry, "valid": entry | {"learning": {}}}).split("\n")
    assert table[-1] == "nothing was learned; train longer: test (one class has 100.0% of the predictions)" and len(table) == 4
    (line,) = say_unlearned({str(number): "why" for number in range(8)})
    assert line.endswith("4 (why), 5 (why), and 2 more") and say_unlearned({}) == []


def slow_unigram(data: Path, column: str, *, ends: bool) -> float:
    def pieces(split: str) -> list[int]:
        rows = [row["leaves"]["piece"] if column == "leaves" else row[column] for row in read_split(data, "encoded", split)]
        return [piece for row in rows for piece in [*row.tolist(), *[EOS_ID] * ends]]

    vocabulary = json.loads((data / "encoded" / "index.json").read_text())["num_pieces"]
    counts, test = Counter(pieces("train")), pieces("test")
    total = counts.total() + vocabulary
    return -sum(math.log((counts[piece] + 1) / total) for piece in test) / len(test)


def test_the_nll_of_frequencies_is_that_of_a_slow_count(tmp_path, capsys):
    data = write_toy_data(tmp_path / "data", train=50, valid=6, test=25)
    for column, ends in (("tgt_pieces", True), ("leaves", True), ("leaves", False)):
        found = facts_of_nll(tmp_path / "missing", data, "test", column, ends=ends)
        assert found == {"unigram_nll": pytest.approx(slow_unigram(data, column, ends=ends), rel=1e-12)}
    next((data / "encoded").glob("train-*.arrow")).write_bytes(b"")
    assert facts_of_nll(data, data, "test") == {}
    assert "note: the nll is not compared with that of a unigram model of train: " in capsys.readouterr().err


def test_a_comparison_of_models_at_chance_has_no_p_but_its_file_has():
    config = CompareConfig(num=1, samples=50)
    found = compare(System("A", COMMAS), System("B", ONE_LINE), None, REFERENCES, "test", config)
    printed = format_comparison(found)
    assert (
        "nothing was learned; train longer: A (one piece is 100.0% of the output), B (different outputs: 1, different "
        "references: 30)" in printed.split("\n")
    )
    assert "95 %" not in printed and "interval and p" not in printed and found["metrics"]["chrf"]["p_two_sided"] <= 1
    for systems in ((System("A", COMMAS), System("B", REFERENCES)), (System("A", REFERENCES), System("B", COMMAS))):
        assert "95 %" not in format_comparison(compare(*systems, None, REFERENCES, "test", config))
    weak = [f"the {line}" for line in REFERENCES]
    found = compare(System("A", weak), System("B", REFERENCES), None, REFERENCES, "test", config)
    found["metrics"]["chrf"]["p_two_sided"] = 1e-5  # as of many samples
    printed = format_comparison(found)
    assert "95 %" in printed and "nothing was learned" not in printed and "] < 0.001\n" in printed


def test_no_record_of_our_results_is_a_model_that_learned_nothing():
    judged = 0
    for path in sorted(RECORDS.rglob("*.json")):
        record = json.loads(path.read_text())
        for name, entry in record["scores"].items():
            assert not why_unlearned(entry)
            if "confusion" in entry:
                cells = {(row, column): n for row, counts in enumerate(entry["confusion"]) for column, n in enumerate(counts)}
                assert not why_unlearned(entry | {"learning": facts_of_classes(cells)}), (path, name)
                judged += 1
        for name in ("test", "test.last"):
            if f"{name}.scores" in record["sentences"]:
                sides = (np.array(record["sentences"][one].split(), float) for one in (name, f"{name}.scores"))
                assert not why_unlearned(record["scores"][name] | {"learning": facts_of_scores(*sides)}), (path, name)
                judged += 1
    assert judged > 1000


UNLEARNED = {"class_share": 1.0, "label_share": 0.3}


def of_records(name: str, unlearned: set[str], facts: dict, keep: int) -> tuple[dict, dict]:
    """The report of a study from its records, as it is, and if some cells learned nothing."""
    records = [one for one in read_records(RECORDS / name).values() if one["labels"]["seed"] <= keep]
    before = report_records(records)
    for record in records:
        if record["cell"] in unlearned:
            record["scores"]["test"]["learning"] = facts
    return before, report_records(records)


def without_marks(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_marks(one) for key, one in value.items() if key != "unlearned"}
    return [without_marks(one) for one in value] if isinstance(value, list) else value


def test_a_comparison_over_seeds_shows_no_p_of_a_system_that_learned_nothing():
    before, report = of_records("sst5_pretrained_tenth", {"layer-seed2"}, UNLEARNED, 3)
    base = before["baseline"]
    assert base != "layer" and without_marks(report) == before == without_marks(before)  # files keep p
    lines, several = seeds_report.format_table(report).split("\n"), len(report["systems"])
    table = {line.split()[0]: line for line in lines[1 : 1 + several]}
    whole = {line.split()[0]: line for line in seeds_report.format_table(before).split("\n")[1 : 1 + several]}
    assert "[" in whole["layer"] and "[" not in table["layer"] and table["layer"].split()[-6:-2] == ["–"] * 4
    others = {row["system"] for row in report["systems"]} - {"layer"}
    assert {name: table[name] for name in others} == {name: whole[name] for name in others}
    assert "nothing was learned; train longer: layer-seed2 (one class has 100.0% of the predictions)" in lines
    assert seeds_report.FORM.picture(before).get_suptitle() == ""
    assert seeds_report.FORM.picture(report).get_suptitle() == f"nothing was learned in 1 of {len(report['cells'])} cells"
    study = ReportStudy("study", "study", seeds_report.FORM, report, [])
    answer = answer_study(study)
    assert answer.sentence == (
        "study, test: nothing was learned; train longer: layer (seed 2: one class has 100.0% of the predictions)."
    )
    assert {row.system for row in answer.shown_rows if row.test and row.test.interval} == others - {base}
    of_base = of_records("sst5_pretrained_tenth", {f"{base}-seed1"}, UNLEARNED, 3)[1]
    assert "[" not in "".join(seeds_report.format_table(of_base).split("\n")[1 : 1 + len(report["systems"])])


def test_a_study_of_sizes_shows_no_p_of_a_model_that_learned_nothing():
    facts = {"distinct": 1, "reference_distinct": 900, "piece_share": 0.5, "reference_piece_share": 0.1}
    before, report = of_records("multi30k", {f"shuffled-1-seed{seed}" for seed in (1, 2, 3)}, facts, 3)
    assert without_marks(report) == before == without_marks(before)
    rows = {line.split()[0]: line for line in scaling_report.format_table(report).split("\n")[1:4]}
    assert " to " not in rows["shuffled"] and " to " in rows["tree_transformer"]
    table = scaling_report.format_table(report)
    assert "nothing was learned; train longer: shuffled-1-seed1 (different outputs: 1, different references: 900), " in table
    pooled = table.partition("unpaired")[2].partition("Dunnett")[0].split("\n")[1:-1]
    assert pooled and not any("[" in line for line in pooled)  # one variance for all
    assert scaling_report.FORM.picture(report).get_suptitle() == f"nothing was learned in 3 of {len(report['cells'])} cells"
    answer = answer_study(ReportStudy("study", "study", scaling_report.FORM, report, []))
    assert "highest" not in answer.sentence and "shuffled (seeds 1, 2, 3: different outputs: 1" in answer.sentence
    assert "highest" in answer_study(ReportStudy("study", "study", scaling_report.FORM, before, [])).sentence


@pytest.mark.slow
def test_runs_that_learned_nothing_are_named_where_they_are_scored(tmp_path, capsys):
    data = write_toy_data(tmp_path / "data", train=20, valid=6, test=24)
    evaluate, report = main_of("evaluate.py"), main_of("report.py")
    for name, seed in (("a", 1), ("b", 2)):
        run_training(make_config(data, "max_steps=1", "checkpoint_every=1", f"seed={seed}"), tmp_path / name)
        evaluate(["--out", str(tmp_path / name)])
        entry = json.loads((tmp_path / name / "scores.json").read_text())["test"]
        assert entry["learning"].keys() > {"unigram_nll", "piece_share", "distinct"} and entry["nll"] > 0
        (line,) = say_unlearned(find_unlearned({"test": entry}))
        assert line in capsys.readouterr().out.split("\n")
    folders = [str(tmp_path / name) for name in "ab"]
    evaluate(["--compare", *folders, "--out", str(tmp_path / "ab")])
    printed = capsys.readouterr().out
    assert "nothing was learned; train longer: A (" in printed and "95 %" not in printed
    assert json.loads((tmp_path / "ab" / "comparison.json").read_text())["metrics"]["bleu"]["p_two_sided"] > 0
    report(["--out", str(tmp_path / "page"), *folders, "bootstrap_samples=20"])
    page = (tmp_path / "page" / "index.html").read_text()
    assert "nothing was learned; train longer: tree_transformer (seeds 1, 2: " in page and "has the highest" not in page
    numbers = json.loads((tmp_path / "page" / "report.json").read_text())
    assert any(row["tests"] for row in numbers["scores"][0]["rows"])  # files keep p


def test_facts_of_pieces_and_of_references_are_counted_apart():
    found = facts_of_lines([(5, 5), (5, 6)], [[7, 8], [7, 8], [9, 10, 11]])
    assert found == {
        "piece_share": 0.75,
        "distinct": 2,
        "reference_piece_share": pytest.approx(2 / 7),
        "reference_distinct": 2,
    }
