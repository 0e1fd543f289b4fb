"""Comparing systems and scoring files: runs on toy data, files of other systems, and what is wrong with them."""

import gzip
import json
import re
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

import pytest
from commands import main_of, run_here
from toydata import write_toy_data
from toyruns import make_config

from treenet.data.splits import read_references
from treenet.evaluation.bootstrap import compare, compare_systems
from treenet.evaluation.settings import CompareConfig
from treenet.evaluation.significance import ABOUT_WEIGHTS
from treenet.jobs.train_run import run_training
from treenet.runs.run_results import System, read_system
from treenet.tasks.translation_metrics import sentence_chrf
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


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
        f"p (two-sided paired bootstrap over sentences) holds only for {ABOUT_WEIGHTS}" in printed
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
    main(["--compare", str(runs / "a" / "translations.test.file.other.txt"), str(runs / "b")])
    assert "equal on 9" in capsys.readouterr().out


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


BAD = {
    "empty": (b"", "empty: must have one line per reference, 9 of test of .*data, but have 0$"),
    "short": (b"a\n" * 8, "short: must have one line per reference, 9 of test of .*data, but have 8$"),
    "blank": (b"a\n" * 9 + b"\n", "but have 10; the last line of .*blank is blank$"),
    "latin1": ("a\nfür\n".encode("latin-1"), r"latin1, line 2: not valid UTF-8 \(byte 0xfc at column 2\)"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hypotheses=h"], "needs references; give data=DATA, references=FILE, or the folder of a run"),
        (["--compare", "h", "h"], "two files need references"),
        (["--compare", "h", "h", "hypotheses=h"], "leave hypotheses out"),
        (["hypotheses=h", "references=h", "data=d"], "leave data out, or references"),
        (["--out", "a", "references=h"], "needs hypotheses=FILE or --compare"),
        (["--out", "a", "target_language=German"], "target_language: String should match pattern"),
        (["--out", "a", "buckets.depth=[4,2]"], "must be ascending numbers"),
    ],
)
def test_settings_that_do_not_go_together(arguments, message, main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("h").write_text("a\n")
    with pytest.raises(UserError, match=message):
        main(arguments)
