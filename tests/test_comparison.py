"""Comparing systems and scoring files: runs on toy data, files of other systems, and what is wrong with them."""

import gzip
import json
import math
import re
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from commands import main_of, run_here
from toydata import write_toy_data
from toyruns import make_config

from treenet.data.splits import read_references
from treenet.evaluation.bootstrap import compare_systems
from treenet.evaluation.comparison import compare
from treenet.evaluation.settings import CompareConfig
from treenet.evaluation.significance import ABOUT_WEIGHTS
from treenet.jobs.train_run import run_training
from treenet.runs.run_results import System, read_system, scoring_command, write_predictions
from treenet.tasks.translation_metrics import sentence_chrf
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def main():
    return main_of("evaluate.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, main) -> Path:
    """Two evaluated runs `a` and `b` on `data`, and the references as a file."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_toy_data(folder / "data", train=20, valid=6, test=9)
    for name, seed in (("a", 1), ("b", 2)):
        steps = ("max_steps=2", "checkpoint_every=1", "validate_every=2")
        run_training(make_config(data, *steps, f"seed={seed}"), folder / name)
        main(["--out", str(folder / name)])
    (folder / "references.txt").write_text("".join(f"{line}\n" for line in read_references(data, "test")))
    return folder


@pytest.fixture
def runs(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_wins_and_losses_are_the_largest_differences():
    references = [f"the {word} sat on the mat and looked at us ." for word in ("cat", "dog", "cow", "owl", "hen", "fox")]
    worse = [line.replace("looked at us", "left") for line in references]
    baseline = System("A", worse[:3] + references[3:])
    system = System("B", [references[0], worse[1], references[2].replace("sat", "lay"), "nothing", *references[4:]])
    found = compare(baseline, system, list("abcdef"), references, "test", CompareConfig(num=2, samples=50))
    assert [row["line"] for row in found["wins"]] == [1, 3] and [row["line"] for row in found["losses"]] == [4]
    assert (found["num_better"], found["num_worse"], found["num_examples"]) == (2, 1, 6)
    win = found["wins"][0]
    assert (win["source"], win["reference"]) == ("a", references[0])
    assert (win["baseline"], win["system"]) == (worse[0], references[0])
    expected = sentence_chrf([worse[0], references[0]], [references[0]] * 2)
    assert [win["baseline_chrf"], win["system_chrf"]] == expected.tolist()
    test = compare_systems(baseline.lines, system.lines, references, 50)["bleu"]
    assert (
        found["metrics"]["bleu"] == asdict(test) | {"difference": test.difference} and "p_value" not in found["metrics"]["bleu"]
    )
    back = compare(system, baseline, None, references, "test", CompareConfig(num=2, samples=50))
    assert [row["line"] for row in back["losses"]] == [1, 3] and "source" not in back["wins"][0]


def test_two_runs_side_by_side(runs, main, capsys):
    main(["--compare", str(runs / "a"), str(runs / "b"), "compare.num=3", "--out", str(runs / "new" / "ab")])
    printed = capsys.readouterr().out
    found = json.loads((runs / "new" / "ab" / "comparison.json").read_text())
    scores = [json.loads((runs / name / "scores.json").read_text())["test"] for name in "ab"]
    assert [found["metrics"]["bleu"][side] for side in ("baseline", "system")] == [one["bleu"] for one in scores]
    assert [found["metrics"]["chrf"][side] for side in ("baseline", "system")] == [one["chrf"] for one in scores]
    assert 0 < len(found["wins"] + found["losses"]) <= 6 and found["num_examples"] == 9
    lines = {name: (runs / name / "translations.test.txt").read_text().split("\n") for name in "ab"}
    for row in found["wins"] + found["losses"]:
        assert row["source"].split() == row["reference"].split()[::-1]
        assert (row["baseline"], row["system"]) == (lines["a"][row["line"] - 1], lines["b"][row["line"] - 1])
        assert f"line {row['line']}: chrF" in printed and f"source     {row['source']}" in printed
    assert found["metrics"]["bleu"]["about"] == ABOUT_WEIGHTS
    assert (
        f"interval and p (two-sided paired bootstrap over sentences) hold only for {ABOUT_WEIGHTS}" in printed
        and "*" not in printed.partition("wins of B")[0]
    )
    assert "bs:1000|seed:12345" in printed and str(runs / "new" / "ab" / "comparison.json") in printed


def test_results_of_one_run_and_files_of_other_systems_can_be_compared(runs, main, capsys):
    main(["--out", str(runs / "a"), "untrained=true"])
    main(["--compare", str(runs / "a" / "translations.test.untrained.txt"), str(runs / "a")])
    assert "A  " + str(runs / "a" / "translations.test.untrained.txt") in capsys.readouterr().out
    references = str(runs / "references.txt")
    main(["--compare", str(runs / "b"), references])
    assert "BLEU" in capsys.readouterr().out
    main(["--compare", references, references, f"references={references}"])
    assert "B is better on 0, worse on 0, equal on 9" in capsys.readouterr().out


def write_turned(data: Path, out: Path) -> Path:
    """A copy of a data set whose models read the target."""
    shutil.copytree(data, out)
    index = json.loads((out / "encoded" / "index.json").read_text())
    (out / "encoded" / "index.json").write_text(json.dumps(index | {"tree_settings": {"side": "target"}}))
    return out


def test_a_file_is_scored_as_a_run_is(runs, main, capsys):
    translations, data = runs / "b" / "translations.test.txt", runs.parent / "runs" / "data"
    compressed = runs / "other.txt.gz"
    compressed.write_bytes(gzip.compress(translations.read_bytes().replace(b"\n", b"\r\n")))
    before = listing(runs)
    main([f"hypotheses={compressed}", f"data={data}", "buckets.words=[3,6]"])
    main([f"hypotheses={compressed}", f"references={runs / 'references.txt'}"])
    assert listing(runs) == before
    assert capsys.readouterr().out.count("test.file.other") == 2
    main([f"hypotheses={compressed}", f"data={data}", "--out", str(runs / "a")])
    scores = {name: json.loads((runs / name / "scores.json").read_text()) for name in "ab"}
    mine, theirs = scores["a"]["test.file.other"], scores["b"]["test"]
    shared = ["bleu", "bleu_tokenized", "bleu_compound_split", "chrf", "buckets", "data", "references_fingerprint"]
    assert {key: mine[key] for key in shared} == {key: theirs[key] for key in shared} and "test" in scores["a"]
    assert mine["hypotheses"] == "other.txt.gz"
    (runs / "more").mkdir()
    main([f"hypotheses={shutil.copy(compressed, runs / 'more')}", f"data={data}", "--out", str(runs / "a")])
    assert "test.file.other: this result replaces one of other settings" in capsys.readouterr().err
    turned = write_turned(data, runs / "turned")
    of_b = f"hypotheses={translations}"
    with pytest.raises(
        UserError, match=r"^hypotheses: .*/b/translations.test.txt has scores against other references than those "
    ):
        main([of_b, f"data={turned}", "--out", str(runs / "a")])
    main([of_b, f"data={data}", "--out", str(runs / "a")])
    main([of_b, f"references={runs / 'references.txt'}", "--out", str(runs / "a")])
    main([f"hypotheses={compressed}", f"data={turned}"])  # lines that no run is known to have
    main(["--compare", str(runs / "a" / "translations.test.file.other.txt"), str(runs / "b")])
    assert "equal on 9" in capsys.readouterr().out
    given = [f"hypotheses={compressed}", f"references={runs / 'references.txt'}", "--out", str(runs / "more")]
    for sources in ("one", "one", "two"):  # which COMET would read
        shutil.copy(runs / "references.txt", runs / sources)
        main([*given, f"sources={runs / sources}"])
    changed = f"(asked.sources: '{runs / 'one'}' -> '{runs / 'two'}')"
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: ") and note.endswith(f"this result replaces one of other settings or data {changed}")
    (runs / "a" / "translations.test.file.other.txt").write_text("")
    with pytest.raises(UserError, match=r"has changed since .*; run tree-attention evaluate --out \S+ split=test .*hypotheses="):
        read_system(runs / "a", "test.file.other")


def test_nothing_is_downloaded(runs, main, monkeypatch, tmp_path, capsys):
    def refuse(*args, **options):
        raise AssertionError("scoring went to the network")

    (tmp_path / "sacrebleu").mkdir()
    monkeypatch.setenv("SACREBLEU", str(tmp_path / "sacrebleu"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    main(["--out", str(runs / "a"), "target_language=de"])
    main(["--compare", str(runs / "a"), str(runs / "b")])
    assert not list((tmp_path / "sacrebleu").iterdir())
    assert "tok:moses.de|sacremoses:" in capsys.readouterr().out


def test_tokens_of_tokenised_data_are_taken_as_they_are(runs, main, capsys):
    (runs / "data" / "config.yaml").write_text("tokenized: moses\n")
    data = runs / "data"
    main([f"hypotheses={runs / 'references.txt'}", f"data={data}", "target_language=de"])
    printed = capsys.readouterr().out
    assert re.search(r"^tokenised BLEU +nrefs:1\|case:mixed\|eff:no\|tok:none\|", printed, re.MULTILINE)
    assert re.search(r"^TER \(lower is better\) +nrefs:1\|", printed, re.MULTILINE)  # the longest title has a space after it too
    assert "the lines of the data set are tokens" in printed
    main([f"hypotheses={runs / 'references.txt'}", f"references={runs / 'references.txt'}"])
    assert "are tokens" not in capsys.readouterr().out
    main(["--compare", str(runs / "references.txt"), str(runs / "a"), f"data={data}"])
    assert "|seed:12345|case:mixed|eff:no|tok:none|" in capsys.readouterr().out
    files = str(runs / "references.txt"), str(runs / "a" / "translations.test.txt"), f"references={runs / 'references.txt'}"
    main(["--compare", *files, "target_language=de"])
    assert "|seed:12345|case:mixed|eff:no|tok:moses.de|" in capsys.readouterr().out
    main(["--compare", *files])
    assert "tok. BLEU" not in capsys.readouterr().out


BAD = {
    "empty": (b"", "empty: must have one line per reference, 9 of test of .*data, but have 0$"),
    "short": (b"a\n" * 8, "short: must have one line per reference, 9 of test of .*data, but have 8$"),
    "blank": (b"a\n" * 9 + b"\n", "but have 10; the last line of .*blank is blank$"),
    "latin1": ("a\nfür\n".encode("latin-1"), r"latin1, line 2: not valid UTF-8 \(byte 0xfc at column 2\)"),
    "table.tsv": (None, "table.tsv must have one text a line, but its name is that of a table"),
    "missing": (None, "cannot read .*missing: No such file or directory$"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line_and_leave_nothing_behind(name, runs, main):
    content, message = BAD[name]
    path = runs / name
    if content is not None:
        path.write_bytes(content)
    before = listing(runs)
    data = f"data={runs / 'data'}"
    for arguments in (
        [f"hypotheses={path}", data, "--out", str(runs / "new")],
        [f"hypotheses={path}", data, "--out", str(runs / "a")],
        ["--compare", str(runs / "a"), str(path), data, "--out", str(runs / "new")],
    ):
        with pytest.raises(UserError, match=message):
            main(arguments)
    assert listing(runs) == before and not (runs / "new").exists()


def test_a_table_of_another_folder_is_told_to_be_no_result(runs, main):
    copy = runs / "copy" / "predictions.test.tsv"
    copy.parent.mkdir()
    copy.write_text("line\tlabel\tpredicted\n")
    message = f"^{copy} has no entry in {copy.parent / 'scores.json'}; give the file in its run$"
    with pytest.raises(UserError, match=message):
        main(["--compare", str(runs / "a"), str(copy)])


def test_a_new_file_is_scored_for_classifiers_alone(runs, main):
    with pytest.raises(
        UserError, match="input: needs the run of a classifier, but .* is none; for a translation model, translate"
    ):
        main(["--out", str(runs / "a"), "input=new.csv"])
    with pytest.raises(UserError, match="gone is not a run: .*config.yaml is missing"):
        main(["--out", str(runs / "gone"), "input=new.csv"])


def test_a_reference_file_one_line_short_is_told_with_both_counts(runs, main):
    references = runs / "references.txt"
    hypotheses = Path(shutil.copy(references, runs / "hypotheses.txt"))
    references.write_text(references.read_text() + "\n")
    with pytest.raises(UserError, match=r"10 of .*references.txt, but have 9; the last line of .* is blank$"):
        main([f"hypotheses={hypotheses}", f"references={references}"])
    references.write_text("\n".join(hypotheses.read_text().split("\n")[:-2]) + "\n")
    with pytest.raises(UserError, match=r"hypotheses.txt: .* 8 of .*references.txt, but have 9$"):
        main([f"hypotheses={hypotheses}", f"references={references}"])
    references.write_text("")
    hypotheses.write_text("")
    with pytest.raises(UserError, match="there are no lines to score"):
        main([f"hypotheses={hypotheses}", f"references={references}"])


@pytest.mark.parametrize(
    ("task", "name", "command"),
    [
        ("translation", "test", "evaluate --out RUN split=test"),
        ("classification", "valid.last", "evaluate --out RUN split=valid checkpoint=last"),
        ("causal_lm", "test.step_00000200.beam", "score-lm --out RUN split=test checkpoint=200 trees=beam"),
        ("causal_lm", "pairs-blimp.beam.every_10", "score-lm --out RUN trees=beam every=10 blimp=FOLDER, or pairs.files=[FILE]"),
        ("causal_lm", "pairs", "score-lm --out RUN blimp=FOLDER, or pairs.files=[FILE]"),
        ("causal_lm", "surprisal-story.beam", "score-lm --out RUN trees=beam surprisal=FILE"),
        ("masked_lm", "unsupervised_parse-valid", "unsupervised-parse --out RUN split=valid"),
        ("translation", "test.data-other", "evaluate --out RUN split=test"),
    ],
)
def test_the_name_of_a_result_tells_its_command(task, name, command):
    assert scoring_command(task, "RUN", name) == f"tree-attention {command}"
    assert scoring_command(task, "my run", name) == "tree-attention " + command.replace("RUN", "'my run'")


def test_translations_that_do_not_belong_together_are_refused(runs, main, tmp_path):
    a, b = runs / "a", runs / "b"
    main(["--out", str(a), "split=valid"])
    with pytest.raises(UserError, match=r"b/translations.test.txt holds translations of test, but the command compares valid"):
        main(["--compare", str(a / "translations.valid.txt"), str(b)])
    with pytest.raises(
        UserError, match=r"b has no translations of valid \(it has scores of: " r"test\); run .* --out .*b split=valid"
    ):
        main(["--compare", str(a), str(b), "split=valid"])
    other = write_toy_data(tmp_path / "other", train=20, valid=6, test=9, seed=1)
    with pytest.raises(UserError, match=r"has scores against other references than those of test of .*other"):
        main(["--compare", str(a), str(b), f"data={other}"])
    scores = {run: (run / "scores.json").read_text() for run in (a, b)}
    for run, text in scores.items():  # the references of the data set were corrected, and both runs scored on `other`
        found = json.loads(text)
        found["test.data-other"] = found["test"]
        found["test"] = found["test"] | {"references_fingerprint": "older"}
        (run / "scores.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="; both have scores on the data set other: add data=other, with the path of its folder"):
        main(["--compare", str(a), str(b)])
    for run, text in scores.items():
        (run / "scores.json").write_text(text)
    config = (a / "config.yaml").read_text()
    (a / "config.yaml").write_text(re.sub(r"(?m)^data: .*$", f"data: {tmp_path / 'nowhere'}", config))
    with pytest.raises(
        UserError, match=r"nowhere, the data set of .*/a, is missing; if it moved, give its new place as data=DIR$"
    ):
        main(["--compare", str(a), str(b)])
    (a / "config.yaml").write_text(config)
    (b / "translations.test.txt").write_text("")
    with pytest.raises(UserError, match="has changed since scores.json got its scores"):
        read_system(b, "test")
    before = listing(runs)
    done = run_here("evaluate.py", "--compare", a, b, "--out", runs / "new")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout
    assert listing(runs) == before


def test_a_data_set_of_one_side_has_no_references(runs, main):
    index = runs / "data" / "encoded" / "index.json"
    facts = json.loads(index.read_text())
    index.write_text(json.dumps({**facts, "columns": [name for name in facts["columns"] if name != "tgt_pieces"]}))
    with pytest.raises(UserError, match="data holds no translations: its examples have one side"):
        main([f"hypotheses={runs / 'references.txt'}", f"data={runs / 'data'}"])


def write_predicted(run: Path, task: str, head: str, rows: list[tuple], **entry: object) -> Path:
    """A run folder without weights, with the result `test`."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"task: {task}\ndata: {run.parent / 'moved'}\n")
    lines = ["\t".join(map(str, row)) + "\n" for row in (head.split(), *rows)]
    known = {"split": "test", "data": {"fingerprint": "f", "text_fingerprint": "t", "vocab_fingerprint": "v"}}
    write_predictions(run, "test", lines, known | entry, "language_model" if task.endswith("lm") else "predictions")
    return run


def write_classes(run: Path, labels: np.ndarray, predicted: np.ndarray, **entry: object) -> Path:
    rows = list(zip(range(len(labels)), labels, predicted, strict=True))
    return write_predicted(run, "classification", "example_id label predicted", rows, classes=["bad", "fair", "good"], **entry)


def slow_macro_f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    pairs = [(labels == one, predicted == one) for one in {*labels.tolist(), *predicted.tolist()}]
    return float(np.mean([2 * (there & said).sum() / (there.sum() + said.sum()) for there, said in pairs]))


def compare_runs(main, *arguments: object) -> dict:
    main(["--compare", *map(str, arguments), "--out", str(Path(str(arguments[0])).parents[0] / "ab")])
    return json.loads((Path(str(arguments[0])).parent / "ab" / "comparison.json").read_text())


def test_predictions_are_compared_as_by_a_slow_bootstrap(main, tmp_path, capsys):
    """Scores, intervals and p of classes, pairs and language models, from samples of single sentences."""
    random, count = np.random.default_rng(4), 120
    labels = random.integers(0, 3, count)
    classes = [np.where(random.random(count) < share, labels, random.integers(0, 3, count)) for share in (0.5, 0.8)]
    wanted = random.uniform(1, 5, count).round(1)
    scores = [(wanted + random.normal(0, deviation, count)).round(6) for deviation in (1.2, 0.6)]
    pieces = random.integers(2, 20, count)
    nll = [(pieces * level + random.normal(0, 3, count) + 9).round(6) for level in (3.0, 2.9)]
    for name, *own in zip("ab", classes, scores, nll, strict=True):
        write_classes(tmp_path / "c" / name, labels, own[0])
        pairs = list(zip(range(count), wanted, own[1], strict=True))
        write_predicted(tmp_path / "r" / name, "relatedness", "pair score predicted", pairs)
        rows = [(place, size - 1, size, value - 1, 1) for place, (size, value) in enumerate(zip(pieces, own[2], strict=True))]
        kind = {"a": "exact", "b": "joint"}[name]
        write_predicted(tmp_path / "l" / name, "causal_lm", "example words pieces nll tree_nll", rows, kind=kind)
    expected = {
        ("c", "accuracy"): lambda side, rows: (labels == classes[side])[rows].mean(),
        ("c", "macro_f1"): lambda side, rows: slow_macro_f1(labels[rows], classes[side][rows]),
        ("r", "pearson"): lambda side, rows: np.corrcoef(wanted[rows], scores[side][rows])[0, 1],
        ("l", "nll"): lambda side, rows: nll[side][rows].sum() / pieces[rows].sum(),
    }
    for (folder, metric), score in expected.items():
        found = compare_runs(main, tmp_path / folder / "a", tmp_path / folder / "b", "compare.samples=2000", "compare.num=1")
        test, everything = found["metrics"][metric], np.arange(count)
        assert (test["baseline"], test["system"]) == pytest.approx([score(side, everything) for side in (0, 1)], abs=1e-6)
        samples = random.integers(0, count, (2000, count))
        spread = np.std([score(1, rows) - score(0, rows) for rows in samples])
        low, high = test["interval"]
        assert low + high == pytest.approx(2 * test["difference"]) and high - low == pytest.approx(2 * 1.99 * spread, rel=0.12)
        assert (test["p_two_sided"] < 0.05) == (low > 0 or high < 0) and "p_sacrebleu" not in test
        assert found["num_better"] + found["num_worse"] <= found["num_examples"] == count and len(found["wins"]) == 1
        said = capsys.readouterr()
        assert "not for models trained with other seeds; tree-attention compare-seeds" in said.out.replace(
            "tree-attention compare-seeds", "tree-attention compare-seeds"
        )
        assert "moved" in said.err and ("an upper bound" in said.err) == (folder == "l")
        assert ("lower is better" in said.out) == (folder == "l")
    assert found["wins"][0]["system_nll"] < found["wins"][0]["baseline_nll"]
    win = compare_runs(main, tmp_path / "c" / "a", tmp_path / "c" / "b" / "predictions.test.tsv")["wins"][0]
    assert win["system"] == win["reference"] == ["bad", "fair", "good"][labels[win["line"] - 1]] != win["baseline"]


def test_classes_that_differ_on_few_sentences_have_the_p_of_a_sign_test_at_least(main, tmp_path):
    labels = np.zeros(300, dtype=int)
    for wins, least in ((0, 1.0), (1, 1.0), (4, 0.125), (12, 0.0005)):
        runs = [tmp_path / str(wins) / name for name in "ab"]
        for run, wrong in zip(runs, (wins, 0), strict=True):
            write_classes(run, labels, (np.arange(300) < wrong).astype(int))
        test = compare_runs(main, *runs)["metrics"]["accuracy"]
        assert least <= test["p_two_sided"] < least + 0.07 and (test["interval"] is None) == (wins < 6), wins
    one = [write_classes(tmp_path / "one" / name, labels[:1], np.array([place])) for place, name in enumerate("ab")]
    assert compare_runs(main, *one)["metrics"]["accuracy"]["p_two_sided"] == 1


def test_predictions_that_do_not_belong_together_are_refused(main, tmp_path, runs):
    labels = np.arange(12) % 3
    a = write_classes(tmp_path / "a", labels, labels)
    data = {"fingerprint": "g", "text_fingerprint": "u"}
    rows = list(zip(range(12), labels, labels, strict=True))
    lines = [(one, 2, 3, 1.5, 0.0) for one in range(12)]
    head = "example words pieces nll tree_nll"
    lm = write_predicted(tmp_path / "lm", "causal_lm", head, lines)
    nan = write_predicted(tmp_path / "nan", "causal_lm", head, [*lines[:-1], (11, 2, 3, math.nan, 0.0)])
    pairs = {
        write_predicted(
            tmp_path / "r", "relatedness", "pair score predicted", rows
        ): "two results of one task, but .*classification",
        runs / "a": "two results of one task, but .* of classification and .* of translation",
        runs / "references.txt": "two results of one task, but .* of translation",
        write_classes(
            tmp_path / "text", labels, labels, data=data
        ): "differ in the text of their data; score both on one data set",
        write_classes(tmp_path / "short", labels[:6], labels[:6]): "differ in the sentences; score both",
        write_classes(tmp_path / "labels", labels[::-1], labels): "differ in the sentences; score both",
        write_classes(
            tmp_path / "valid", labels, labels, split="valid"
        ): "holds predictions of valid, but the command compares test",
        write_predicted(tmp_path / "cut", "classification", "example_id label predicted", [*rows[:-1], (11, 1)]): (
            r"tsv, line 13: predicted must be a whole number, not below 0, but is None; run .*evaluate.* --out .*cut"
        ),
    }
    for other, message in pairs.items():
        with pytest.raises(UserError, match=message):
            main(["--compare", str(a), str(other), "--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match=r"nan.*line 13: nll must be a finite number, but is 'nan'; run .*score-lm.* --out .*nan"):
        main(["--compare", str(lm), str(nan)])
    others = write_predicted(
        tmp_path / "vocab", "causal_lm", head, lines, data={"text_fingerprint": "t", "vocab_fingerprint": "w"}
    )
    with pytest.raises(UserError, match="differ in the vocabulary of their data"):
        main(["--compare", str(lm), str(others)])
    with pytest.raises(UserError, match="target_language: leave it out, .* takes split, data, compare"):
        main(["--compare", str(a), str(a), "target_language=de"])
    with pytest.raises(UserError, match=r"checkpoint: leave it out, or give the file of a result"):
        main(["--compare", str(runs / "a"), str(runs / "b"), "checkpoint=last"])
    with pytest.raises(
        UserError, match=r"a/predictions.test.tsv is of other text than .*; run .*evaluate --out .*/a data=.* split=t"
    ):
        main(["--compare", str(a), str(a), f"data={runs / 'data'}"])
    text = json.loads((runs / "data" / "encoded" / "index.json").read_text())["text_fingerprint"]
    same = write_classes(tmp_path / "same", labels, labels, data=data | {"text_fingerprint": text})
    main(["--compare", str(same), str(same), f"data={runs / 'data'}"])
    (a / "predictions.test.tsv").write_text((a / "predictions.test.tsv").read_text()[:40])
    with pytest.raises(UserError, match="has changed since scores.json got its scores; run tree-attention evaluate --out"):
        main(["--compare", str(a), str(a)])
    assert not (tmp_path / "out").exists()


def test_classes_of_which_both_are_wrong_count_for_the_f1_alone(main, tmp_path):
    """Four sentences differ in whether they are right, and 20 more in their wrong classes."""
    labels = np.arange(300) % 3
    first, second = labels.copy(), labels.copy()
    first[:4], first[10:30], second[10:30] = (labels[:4] + 1) % 3, (labels[10:30] + 1) % 3, (labels[10:30] + 2) % 3
    runs = [write_classes(tmp_path / name, labels, found) for name, found in (("a", first), ("b", second))]
    tests = compare_runs(main, *runs)["metrics"]
    assert tests["accuracy"]["interval"] is None and tests["macro_f1"]["interval"] is not None


def test_the_largest_differences_come_first_whatever_their_lines():
    references = [f"the {word} sat on the mat and looked at us ." for word in ("cat", "dog", "cow", "owl", "hen")]
    worse = [line.replace("looked at us", "left") for line in references]
    little = [line.replace("sat", "lay") for line in references]
    baseline = System("A", worse[:2] + references[2:])
    system = System("B", [little[0], references[1], little[2], "nothing", references[4]])
    found = compare(baseline, system, None, references, "test", CompareConfig(num=2, samples=20))
    assert [row["line"] for row in found["wins"]] == [2, 1] and [row["line"] for row in found["losses"]] == [4, 3]
    found = compare(baseline, system, None, references, "test", CompareConfig(num=1, samples=20))
    assert [[row["line"] for row in found[side]] for side in ("wins", "losses")] == [[2], [4]]
