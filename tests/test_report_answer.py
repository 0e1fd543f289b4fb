"""The answer of a report: systems of several seeds, differences, intervals, and the sentence that says them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from treenet.evaluation.bootstrap import compare_seeds, sample_metric, sentence_statistics
from treenet.evaluation.significance import EXPLORATORY
from treenet.experiments.scaling_report import FORM
from treenet.experiments.seeds_report import FORM as SEEDS_FORM
from treenet.report import answer as answers
from treenet.report import compare
from treenet.report.answer import answer_runs, answer_study, group_systems
from treenet.report.answer_sections import answer_section, draw_answer
from treenet.report.compare import score_tables
from treenet.report.report_inputs import ReportRun, ReportStudy
from treenet.runs.result_provenance import ResultStatus
from treenet.tasks.translation_metrics import compute_scores

REFERENCES = [f"the {animal} saw a {thing} near the old house" for animal in ("cat", "dog", "owl") for thing in ("tree", "mouse")]


def make_run(name: str, model: str, seed: int, wrong: int, **config) -> ReportRun:
    """A run whose translations have `wrong` words that no reference has, at places that its seed chooses."""
    random = np.random.default_rng(100 * seed + wrong)
    words = [line.split() for line in REFERENCES]
    for _ in range(wrong):
        line = words[random.integers(len(words))]
        line[random.integers(len(line))] = "wrong"
    lines = [" ".join(line) for line in words]
    scores = compute_scores(lines, REFERENCES) | {"split": "test"}
    settings = {"model": {"name": model}, "seed": seed, "data": "nowhere", "workers": seed, **config}
    run = ReportRun(name, Path(), name, settings, {}, [], {"test": scores}, {"test": lines}, {}, None, 0, True)
    run.statuses = {"test": ResultStatus()}
    return run


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """The data set of every run has these references."""
    monkeypatch.setattr(answers, "references_of", lambda table, runs: (next(iter(runs)), REFERENCES))


def answer(runs: list[ReportRun], baseline: ReportRun | None):
    tables = score_tables(runs, None, 10)
    return answer_runs(tables, runs, baseline, "test", 40)


PLAIN = [make_run(f"plain-{seed}", "transformer", seed, 9) for seed in (1, 2, 3)]
TREE = [make_run(f"tree-{seed}", "tree_transformer", seed, 2) for seed in (1, 2, 3)]


def test_runs_that_differ_in_their_seed_alone_are_one_system():
    other = make_run("other", "transformer", 1, 5, max_steps=7)
    again = make_run("again", "tree_transformer", 1, 5)
    assert {name: list(seeds) for name, seeds in group_systems([*PLAIN, *TREE]).items()} == {
        "transformer": [1, 2, 3],
        "tree_transformer": [1, 2, 3],
    }
    assert list(group_systems([*PLAIN, other])) == ["plain-1 and 2 more seeds", "other"]  # two systems of one model
    assert {name: list(seeds) for name, seeds in group_systems([*TREE, again]).items()} == {
        "tree-1 and 2 more seeds": [1, 2, 3],
        "again": [1],
    }
    taken = make_run("transformer", "tree_transformer", 1, 5)
    assert list(group_systems([taken, *PLAIN])) == ["transformer", "plain-1 and 2 more seeds"]


def test_three_seeds_of_both_have_the_interval_of_the_house():
    found = answer([*PLAIN, *TREE], PLAIN[0])
    base, best = found.rows
    assert found.best is best
    assert (best.system, base.system, found.baseline) == ("tree_transformer", "transformer", "transformer")
    assert best.score == np.mean([run.scores["test"]["bleu"] for run in TREE])
    statistics = ([sentence_statistics("bleu", run.translations["test"], REFERENCES) for run in runs] for runs in (PLAIN, TREE))
    sides = ([sample_metric("bleu", one, 40) for one in side] for side in statistics)
    expected = compare_seeds(*sides, len(REFERENCES)).over_seeds
    assert best.test.interval == expected.interval and best.difference == pytest.approx(expected.difference)
    assert best.seed_differences == tuple(
        tree.scores["test"]["bleu"] - plain.scores["test"]["bleu"] for tree, plain in zip(TREE, PLAIN, strict=True)
    )
    low, high = expected.interval
    assert found.sentence.startswith(f"On test: tree_transformer has the highest BLEU, {best.score:.2f}, +{best.difference:.2f}")
    assert f"(t over 3 paired seeds) is {low:+.2f} to {high:+.2f}".replace("-", "−") in found.sentence
    assert ("may be chance" in found.sentence) == (low <= 0 <= high)
    assert draw_answer(found) is not None


def test_fewer_than_three_shared_seeds_have_no_interval():
    two = answer([*PLAIN, *TREE[:2]], PLAIN[0])
    assert two.rows[1].test is None and "it needs 3 seeds that both systems have. Other" in two.sentence
    assert "over the seeds that both have" in two.sentence
    shared = [tree.scores["test"]["bleu"] - plain.scores["test"]["bleu"] for tree, plain in zip(TREE[:2], PLAIN, strict=False)]
    assert two.rows[1].difference == pytest.approx(np.mean(shared))
    apart = answer([PLAIN[0], make_run("tree", "tree_transformer", 8, 2)], PLAIN[0])
    assert apart.rows[1].seed_differences == () and apart.rows[1].difference is not None
    assert "both have." not in apart.sentence


def test_no_system_is_the_best_where_shared_seeds_contradict_the_means():
    """A third, better seed of one system alone raises its mean above that of the other, which is better on both shared seeds."""
    runs = []
    for model, seed, bleu in (
        ("transformer", 1, 60.0),
        ("transformer", 2, 62.0),
        ("transformer", 9, 100.0),
        ("tree", 1, 63.0),
        ("tree", 2, 65.0),
    ):
        runs.append(make_run(f"{model}-{seed}", model, seed, 3))
        runs[-1].scores["test"]["bleu"] = bleu
    found = answer(runs, runs[0])
    means = {row.system: row.score for row in found.rows}
    assert means["transformer"] > means["tree"] and found.rows[1].difference > 0
    assert found.best_rows == []
    assert "transformer has the highest BLEU, 74.00, but −3.00 against tree over the seeds that both have" in found.sentence
    for seed, bleu in ((1, 59.0), (2, 61.0), (9, 99.0)):  # a third system, which does not contradict
        runs.append(make_run(f"close-{seed}", "close", seed, 3))
        runs[-1].scores["test"]["bleu"] = bleu
    assert answer(runs, runs[0]).best_rows == [] and "but −3.00 against tree" in answer(runs, runs[0]).sentence
    alike = answer([run for run in runs if run.name != "transformer-9" and "close" not in run.name], runs[0])
    assert alike.best_rows == [1] and "but" not in alike.sentence


def test_scores_of_other_signatures_have_no_best():
    other = make_run("other", "tree_transformer", 1, 2)
    other.scores["test"]["bleu_signature"] += ".other"
    found = answer([PLAIN[0], other], PLAIN[0])
    assert (
        found.best_rows == [] and "the signatures differ" in found.sentence and "so no system has the best BLEU" in found.sentence
    )
    assert draw_answer(found) is None and all(row.difference is None for row in found.shown_rows)


def test_equal_systems_are_both_the_highest():
    twin = make_run("twin", "tree_transformer", 1, 9)
    assert answer([PLAIN[0], twin], PLAIN[0]).sentence.startswith("On test: plain-1 and twin have the highest BLEU")
    assert answer([PLAIN[0], twin], PLAIN[0]).best_rows == [0, 1]
    twins = [make_run(f"twin-{seed}", "tree_transformer", seed, 9) for seed in (1, 2, 3)]  # they differ nowhere
    assert answer([*PLAIN, *twins], PLAIN[0]).sentence.endswith(
        ", +0.00 against tree_transformer. There is no interval: the difference is the same on all sentences."
    )


def test_scores_of_more_references_are_not_compared_with_scores_of_one(monkeypatch):
    """The bootstraps of a report have the references of the data set alone."""
    more = [make_run(f"tree-{seed}", "tree_transformer", seed, 2) for seed in (1, 2, 3)]
    for run in more:
        scores = compute_scores(run.translations["test"], REFERENCES, more_references=[REFERENCES[::-1]])
        run.scores["test"] = {**scores, "split": "test", "more_references_fingerprint": "f"}
    monkeypatch.setattr(compare, "references_of", lambda table, runs: (PLAIN[0], REFERENCES))
    table = score_tables([*PLAIN, *more], PLAIN[0], 10)[0]
    assert [bool(row.tests) for row in table.rows] == [False, True, True, False, False, False]
    assert "tree-1, test: no test, because its scores are of more references." in table.notes
    assert not any(row.tests for row in score_tables(more, more[0], 10)[0].rows)
    assert any("Do not compare the values of BLEU" in note and "nrefs:2" in note for note in table.notes)
    found = answer([*PLAIN, *more], PLAIN[0])
    assert [row.system for row in found.rows] == ["transformer"]
    alike = answer(more, more[0])
    assert [row.system for row in alike.rows] == ["tree_transformer"]
    both = answer([*more, *(replace(run, name=f"{run.name}-b", config=run.config | {"max_steps": 7}) for run in more)], more[0])
    assert [row.test for row in both.rows] == [None, None] and both.rows[1].difference == 0
    assert "and scores of the data set's own references alone. Other" in both.sentence  # three seeds it has


@pytest.mark.parametrize(("tokenizers", "tested"), [(("zh", "zh"), True), (("zh", "char"), False), (("intl", "intl"), False)])
def test_tokenised_bleu_is_tested_where_it_is_the_one_to_compare(monkeypatch, tokenizers, tested):
    lines = [["我们今天去看电影"] * 5, ["我们昨天去看电影"] * 5]
    runs = [make_run(name, name, 1, 0) for name in ("first", "second")]
    for run, own, tokenizer in zip(runs, reversed(lines), tokenizers, strict=True):
        run.translations["test"] = own
        run.scores["test"] = compute_scores(own, lines[0], tokenizer) | {"split": "test"}
    monkeypatch.setattr(compare, "references_of", lambda table, runs: (next(iter(runs)), lines[0]))
    (table,) = score_tables(runs, runs[0], 10)
    tests = table.rows[1].tests
    assert ("bleu_tokenized" in tests) == tested
    if tested:
        values = [run.scores["test"]["bleu_tokenized"] for run in runs]
        assert tests["bleu_tokenized"].difference == pytest.approx(values[1] - values[0]) and values[1] == pytest.approx(100)
        assert "second has the highest tokenised BLEU, 100.00" in answer(runs, runs[0]).sentence


def test_a_baseline_that_is_best_is_said_to_be_so():
    found = answer([*PLAIN, *TREE], TREE[0])
    assert [row.system for row in found.rows] == ["tree_transformer", "transformer"] and found.rows[1].difference < 0
    assert f"+{-found.rows[1].difference:.2f} against transformer" in found.sentence
    low, high = found.rows[1].test.interval
    assert f"{-high:+.2f} to {-low:+.2f}".replace("-", "−") in found.sentence


def test_stale_results_controls_and_missing_scores_give_no_answer():
    assert answer([], None) is None
    stale = make_run("stale", "transformer", 1, 3)
    stale.statuses = {"test": ResultStatus("weights")}
    assert answer([stale], stale) is None
    control = make_run("control", "transformer", 1, 3)
    control.scores["test.untrained"], control.statuses["test.untrained"] = control.scores["test"], ResultStatus()
    alone = answer([control], control)
    assert [row.system for row in alone.rows] == ["control"] and "only system" in alone.sentence
    assert draw_answer(alone) is None


def test_a_study_answers_at_its_largest_share():
    def point(fraction: float, model: str, mean: float, **more) -> dict:
        return {"fraction": fraction, "model": model, "pairs": 1000 * fraction, "seeds": [1],
                "bleu": {"mean": mean, "values": [mean]}, "chrf": {"mean": 40.0}, **more}  # fmt: skip

    test = {"difference": -2.0, "seeds": 3, "interval": [-3.0, -1.0], "p_value": 0.01, "seeds_error": 0.1, "sentences_error": 0.1,
            "against": "plain", "weights": {"p_two_sided": 0.02}}  # fmt: skip
    points = [point(0.5, "tree", 30.0), point(1.0, "plain", 22.0), point(1.0, "tree", 20.0, comparison=test)]
    report = {"split": "test", "metric": "bleu", "baseline": "plain", "points": points}
    found = answer_study(ReportStudy("study", "study", FORM, report))
    assert found.sentence == (
        "study, test, 1,000 training pairs: plain has the highest BLEU, 22.00, +2.00 against tree. "
        "The 95 % interval (t over 3 paired seeds) is +1.00 to +3.00."
    )
    assert answer_study(ReportStudy("study", "study", FORM, None)) is None
    stale = answer_study(ReportStudy("study", "study", FORM, report, ("tree-1",)))
    assert stale.sentence == f"{found.sentence} The weights of 1 cell have changed since these numbers: run the study again."
    test |= {"holm_p_value": 0.08, "seen": 1.234}  # of several comparisons
    corrected = answer_study(ReportStudy("study", "study", FORM, report))
    assert corrected.sentence.endswith(
        "comparisons, p is 0.080: the difference may be chance. By the observed variance and without correction, as many seeds "
        "and sentences find a true difference of 1.23 with probability 0.8."
    )
    test |= {"holm_p_value": None, "family": EXPLORATORY}  # of a share below the largest, whose cells are missing
    report = SimpleNamespace(answers=[answer_study(ReportStudy("study", "study", FORM, report))])
    [(_, columns, _, _)] = answer_section(report)["answers"]
    assert next(column for column in columns if column.title == "p, Holm").cells == ["–", "exploratory"]


def test_a_comparison_over_seeds_answers_in_its_unit():
    test = {"difference": 0.02, "seeds": 3, "interval": [-0.01, 0.05], "p_value": 0.1, "seeds_error": 0.004,
            "sentences_error": None, "seen": 0.0311}  # fmt: skip
    rows = [
        {"system": "plain", "seeds": [1, 2, 3], "test.accuracy": {"mean": 0.4}},
        {"system": "tree", "seeds": [1, 2, 3], "test.accuracy": {"mean": 0.42}, "tests": {"test.accuracy": test}},
        {"system": "only valid", "seeds": [1]},
    ]
    report = {"task": "classification", "baseline": "plain", "systems": rows}
    study = ReportStudy("study", "study", SEEDS_FORM, report)
    found = answer_study(study)
    assert found.sentence == (
        "study, test: tree has the highest accuracy (%), 42.00, +2.00 against plain. The 95 % interval (t over 3 paired seeds) "
        "is −1.00 to +5.00. It contains 0, so the difference may be chance. By the observed variance and without correction, as "
        "many seeds and sentences find a true difference of 3.11 with probability 0.8."
    )
    assert found.rows[1].test.seeds_error == pytest.approx(0.4) and draw_answer(found) is not None
    assert answer_study(replace(study, report=report | {"systems": rows[2:]})) is None
    nll = [{"system": name, "seeds": [1], "test.nll": {"mean": mean}} for name, mean in (("plain", 3.0), ("grammar", 8.0))]
    nll[1] |= {"test.perplexity_given_tree": {"mean": 60.0}, "tests": {"test.nll": test | {"interval": [4.0, 6.0]}}}
    grammar = answer_study(replace(study, report={"task": "causal_lm", "baseline": "plain", "systems": nll}))
    told = "The nll of grammar is of sentence and tree together: an upper bound of that of the sentence."
    assert grammar.sentence.endswith(f" {told}") and told not in found.sentence
