"""Scores belong to weights: a run is continued, averaged anew or decoded otherwise, and earlier scores become stale."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import yaml
from commands import main_of
from toydata import write_toy_data
from toyruns import make_config

from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.jobs.train_run import run_training
from treenet.report.build import write_report
from treenet.report.settings import ReportSettings
from treenet.runs import result_entries
from treenet.runs.checkpoint import read_meta
from treenet.runs.result_entries import add_entry, read_scores
from treenet.runs.result_provenance import ResultStatus, RunState
from treeproc.common.files import file_sha256
from treeproc.common.provenance import describe_packages, software
from treeproc.common.settings import UserError, dump_settings

pytestmark = pytest.mark.slow

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"
STEPS = ("checkpoint_every=1", "validate_every=1", "average_checkpoints=2", "decoding.max_length_factor=0.5")


def workflow(name: str):
    return main_of(f"{name}.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Two runs of three updates, evaluated."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_toy_data(folder / "data", train=20, valid=6, test=9, every=3)  # two of three lines were dropped
    for name, seed in (("a", 1), ("b", 2)):
        run_training(make_config(data, *STEPS, "max_steps=3", f"seed={seed}"), folder / name)
        evaluate_run(folder / name, EvaluateSettings())
    return folder


@pytest.fixture
def runs(trained, tmp_path) -> Path:
    """Copies that tests may write to."""
    for name in ("a", "b"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


def continue_run(run: Path, *overrides: str) -> None:
    """The command of a run once more, to five updates."""
    values = yaml.safe_load((run / "config.yaml").read_text())
    config = make_config(values["data"], *STEPS, f"seed={values['seed']}", "max_steps=5", *overrides)
    path = run.parent / "again.yaml"
    path.write_text(dump_settings(config))
    workflow("train_wmt")(["--config", str(path), "--out", str(run)])


def compare(runs: Path, *arguments: str) -> dict:
    workflow("evaluate")(["--compare", str(runs / "a"), str(runs / "b"), "--out", str(runs / "ab"), *arguments])
    return json.loads((runs / "ab" / "comparison.json").read_text())


def renew(command: str) -> None:
    """Run a command as a message has it."""
    program, name, *arguments = command.split()
    assert program == "tree-attention"
    workflow(name.replace("-", "_"))(arguments)


def forget_origin(run: Path) -> None:
    """Remove what tells where the scores come from."""
    old = {"weights_sha256", "weights", "own_data", "asked", "software"}
    scores = {name: {key: entry[key] for key in entry.keys() - old} for name, entry in read_scores(run).items()}
    (run / "scores.json").write_text(json.dumps(scores))


def test_every_result_names_its_weights_data_decoding_and_software(runs):
    run = runs / "a"
    evaluate_run(run, EvaluateSettings(checkpoint="1", decoding={"beam_size": 2}))
    evaluate_run(run, EvaluateSettings(random_trees=True))
    evaluate_run(run, EvaluateSettings(untrained=True))
    scores = read_scores(run)
    averaged = file_sha256(run / "averaged" / "model.safetensors")
    assert scores["test"]["weights_sha256"] == scores["test.random_trees_1"]["weights_sha256"] == averaged
    assert scores["test.step_00000001"]["weights_sha256"] == file_sha256(run / "checkpoints/step_00000001/model.safetensors")
    assert scores["test.untrained"]["weights_sha256"] is None and "steps" not in scores["test.untrained"]
    assert scores["test.step_00000001"]["steps"] == [1]  # where loggers put them
    assert scores["test"]["steps"] == read_meta(run / "averaged")["averaged_steps"]
    assert scores["test.untrained"]["weights"] == "untrained, drawn with seed 1"
    for entry in scores.values():
        assert entry["data"]["fingerprint"] and entry["software"] == software() and entry["decoding"]["beam_size"]


def test_a_comparison_names_both_systems(runs, capsys):
    found = compare(runs)
    for side, name in (("baseline", "a"), ("system", "b")):
        entry = read_scores(runs / name)["test"]
        assert found[f"{side}_origin"]["weights_sha256"] == entry["weights_sha256"]
        assert found[f"{side}_origin"]["decoding"] == entry["decoding"] and found["software"] == software()
    assert f"weights {found['system_origin']['weights_sha256'][:8]} (averaged); data " in capsys.readouterr().out


def test_scores_of_before_a_run_was_continued_are_refused_until_they_are_renewed(runs, capsys):
    compare(runs)
    old = read_scores(runs / "b")["test"]["weights_sha256"]
    continue_run(runs / "b")
    new = file_sha256(runs / "b" / "averaged" / "model.safetensors")
    message = capsys.readouterr().err
    command = f"tree-attention evaluate --out {runs / 'b'} split=test"
    changed = rf"weights {old[:8]}, now {new[:8]}"
    assert f"b/scores.json, test is stale: the run has changed since then ({changed}); to renew it: {command}\n" in message
    with pytest.raises(
        UserError, match=r"b/translations.test.txt is stale: the run has changed since " rf"then \({changed}\); .*: {command}$"
    ):
        compare(runs)
    renew(command)
    assert compare(runs)["system_origin"]["weights_sha256"] == new
    continue_run(runs / "b")
    assert "stale" not in capsys.readouterr().err


def test_another_average_makes_scores_stale_and_the_first_one_makes_them_right_again(runs, capsys):
    average = workflow("average_checkpoints")
    compare(runs)
    average(["--out", str(runs / "a"), "last=1"])
    command = f"tree-attention evaluate --out {runs / 'a'} split=test"
    assert capsys.readouterr().err.endswith(f"; to renew it: {command}\n")
    with pytest.raises(UserError, match=r"a/translations.test.txt is stale: the run has changed since then \(weights .*, now "):
        compare(runs)
    average(["--out", str(runs / "a")])
    assert not capsys.readouterr().err
    compare(runs)


def test_other_decoding_settings_make_scores_stale_unless_they_were_asked_for(runs, capsys):
    evaluate_run(runs / "b", EvaluateSettings(decoding={"beam_size": 2}))
    for name in ("a", "b"):
        path = runs / name / "config.yaml"
        config = yaml.safe_load(path.read_text())
        config["decoding"] |= {"beam_size": 3, "max_tokens": 17}
        path.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=r"a/translations.test.txt is stale: .* \(decoding.beam_size 5, now 3\); to renew it"):
        compare(runs)
    evaluate_run(runs / "a", EvaluateSettings())
    found = compare(runs)
    assert [found[f"{side}_origin"]["decoding"]["beam_size"] for side in ("baseline", "system")] == [3, 2]


def test_the_command_to_renew_has_the_users_settings(runs, capsys):
    evaluate_run(runs / "a", EvaluateSettings(split="valid", target_language="de", decoding={"beam_size": 2}, random_trees=True))
    continue_run(runs / "a")
    message = [line for line in capsys.readouterr().err.splitlines() if "valid.random_trees_1" in line]
    asked = "split=valid random_trees=true decoding.beam_size=2 target_language=de"
    assert message[0].endswith(f"tree-attention evaluate --out {runs / 'a'} {asked}")


def test_results_of_other_checkpoints_and_files_do_not_go_stale(runs, capsys):
    evaluate_run(runs / "a", EvaluateSettings(checkpoint="3"))
    evaluate_run(runs / "a", EvaluateSettings(untrained=True))
    workflow("evaluate")(["--out", str(runs / "a"), f"hypotheses={runs / 'b' / 'translations.test.txt'}"])
    continue_run(runs / "a")
    message = [line for line in capsys.readouterr().err.splitlines() if " is stale: " in line]
    assert len(message) == 1 and "scores.json, test is stale: " in message[0]


def test_scores_that_name_no_weights_are_compared_and_marked(runs, capsys):
    expected = compare(runs)
    forget_origin(runs / "a")
    continue_run(runs / "a")  # nothing is known of them, so nothing is said to have changed
    assert " is stale: " not in capsys.readouterr().err
    found = compare(runs)
    printed = capsys.readouterr().out
    assert found["metrics"] == expected["metrics"]
    assert printed.count("without provenance: recorded before results named their weights") == 1
    assert found["baseline_origin"]["weights_sha256"] is None and found["system_origin"] == expected["system_origin"]


def report(runs: Path, *names: str, **settings) -> tuple[dict, str]:
    """report.json and the page."""
    given = tuple(str(runs / name) for name in names or ("a", "b"))
    out = runs / "report"
    write_report(ReportSettings(runs=given, **{"sentences": 0, "bootstrap_samples": 50, **settings}), out)
    return json.loads((out / "report.json").read_text()), (out / "index.html").read_text()


def test_a_report_names_what_its_numbers_are_of(runs):
    numbers, page = report(runs)
    assert numbers["software"] == software()
    for run, row in zip(numbers["runs"], numbers["scores"][0]["rows"], strict=True):
        weights = file_sha256(runs / run["name"] / "averaged" / "model.safetensors")
        assert run["weights_sha256"] == row["origin"]["weights_sha256"] == weights
        assert numbers["attention_weights_sha256"][run["name"]] == weights and row["stale"] == "" and run["stale"] == []
        assert f"<td>{weights[:8]} (averaged)</td>" in page
    assert "(stale)" not in page and "(without provenance)" not in page
    (session,) = numbers["provenance"]["a"]
    assert session["software"] == software() and session["did"] and session["wall_s"] > 0
    assert "How each run was made" in page and f"<td>{describe_packages(session['packages'])}</td>" in page
    assert numbers["provenance"]["data of a, b"] == [] and "<td>without provenance</td>" in page  # toy data, made by hand


def test_a_report_marks_what_is_stale_beside_attention_of_other_weights(runs):
    old = read_scores(runs / "b")["test"]
    continue_run(runs / "b")
    now = file_sha256(runs / "b" / "averaged" / "model.safetensors")
    numbers, page = report(runs)
    row = next(row for row in numbers["scores"][0]["rows"] if row["run"] == "b")
    changed = f"weights {old['weights_sha256'][:8]}, now {now[:8]}"
    assert row["bleu"] == old["bleu"] and row["stale"] == changed and row["tests"] == {}
    assert numbers["attention_weights_sha256"]["b"] == now
    command = f"tree-attention evaluate --out {runs / 'b'} split=test"
    assert numbers["runs"][1]["stale"] == [{"said": f"the scores of test ({changed})", "command": command}]
    assert "b (stale)" in page and f"<code>{command}</code>" in page and "a (stale)" not in page
    renew(command)
    numbers, page = report(runs)
    assert "stale)" not in page and numbers["runs"][1]["stale"] == []
    assert any(row["tests"] for row in numbers["scores"][0]["rows"])


def test_a_report_marks_scores_that_name_no_weights(runs):
    forget_origin(runs / "a")
    numbers, page = report(runs)
    rows = {row["run"]: row for row in numbers["scores"][0]["rows"]}
    assert rows["a"]["bleu"] == read_scores(runs / "a")["test"]["bleu"] and rows["a"]["stale"] == ""
    assert "a (without provenance)" in page and "b (without provenance)" not in page
    assert any(row["tests"] for row in rows.values())  # as before: nothing speaks against them


def test_a_line_has_one_number_in_reports_and_comparisons(runs, capsys):
    found = compare(runs, "compare.num=9")
    numbers, page = report(runs, sentences=9)
    shown = {one["line"]: one["source"] for one in numbers["sentences"]}
    compared = {row["line"]: row["source"] for row in found["wins"] + found["losses"]}
    assert compared and compared.items() <= shown.items() and set(shown) == set(range(1, 27, 3))
    line = next(iter(compared))
    assert f"\nline {line}: chrF " in capsys.readouterr().out and f">Line {line} of test</h3>" in page
    numbers, _ = report(runs, lines=(line,))
    assert {one["line"] for one in numbers["sentences"]} == {line}
    with pytest.raises(UserError, match=r"test of .*data has no line 2; its lines are 1 to 25, except dropped ones$"):
        report(runs, lines=(2,))


def test_entries_are_judged_by_what_they_name(runs):
    state, now = RunState(runs / "a", "RUN"), file_sha256(runs / "a" / "averaged" / "model.safetensors")
    probes = {"checkpoint": "averaged", "weights_sha256": now, "data": {"fingerprint": "of another data set"}}
    assert state.check(probes, "probe") == ResultStatus("", "tree-attention probe --out RUN")
    of_step = {"checkpoint": "step_00000002", "weights_sha256": "0" * 64}
    step = file_sha256(runs / "a" / "checkpoints" / "step_00000002" / "model.safetensors")
    command = "tree-attention probe --out RUN checkpoint=2"
    assert state.check(of_step, "probe") == ResultStatus(f"weights 00000000, now {step[:8]}", command)
    assert state.check({"bleu": 1.0, "split": "test"}) == ResultStatus("", "tree-attention evaluate --out RUN split=test", False)


def test_commands_that_add_results_at_a_time_keep_each_others(runs, monkeypatch):
    """Two other commands want to write when this one has read the file."""
    folder, names = runs / "a", ("first", "second")
    before = read_scores(folder).keys()
    threads = [threading.Thread(target=add_entry, args=(folder / "scores.json", name, {"split": name})) for name in names]
    real = result_entries.atomic_write

    def write(path, content):
        for thread in threads:
            if not thread.ident:
                thread.start()
                thread.join(0.3)
        real(path, content)

    monkeypatch.setattr(result_entries, "atomic_write", write)
    add_entry(folder / "scores.json", "own", {"split": "own"})
    for thread in threads:
        thread.join()
    assert read_scores(folder).keys() == {*before, "own", *names}


def test_a_result_that_replaces_one_of_other_data_or_settings_is_told(tmp_path, capsys):
    """`data=a/news` and `data=b/news` are both the result `test.data-news`."""
    path, entry = tmp_path / "scores.json", {"asked": {"data": "a/news"}, "data": {"fingerprint": "one"}, "bleu": 1.0}
    for one in (entry, entry | {"bleu": 2.0}):  # the same command once more
        add_entry(path, "test.data-news", one)
    assert not capsys.readouterr().err
    add_entry(path, "test.data-news", {"asked": {"data": "b/news"}, "data": {"fingerprint": "two"}})
    changed = "asked.data: 'a/news' -> 'b/news'; data.fingerprint: 'one' -> 'two'"
    told = f"note: {path}, test.data-news: this result replaces one of other settings or data ({changed})\n"
    assert capsys.readouterr().err == told


def test_a_checkpoint_of_another_run_has_a_result_of_its_own(runs):
    before = read_scores(runs / "a")
    assert evaluate_run(runs / "a", EvaluateSettings(checkpoint=str(runs / "a" / "averaged")))[0] == "test"
    name, entry = evaluate_run(runs / "a", EvaluateSettings(checkpoint=str(runs / "b" / "averaged")))
    assert name == "test.weights-b-averaged" and entry["weights_sha256"] == RunState(runs / "b").weights_sha256()
    step = EvaluateSettings(checkpoint=f"{runs}/b/checkpoints/step_00000002")
    assert evaluate_run(runs / "a", step)[0] == "test.weights-b-step_00000002"
    found = RunState(runs / "a").check_scores(read_scores(runs / "a"))
    assert found.keys() >= before.keys() and not any(status.changed for status in found.values())


def test_damaged_places_of_an_entry_are_unknown(runs):
    """Data and checkpoints of an entry come from a file that anything may have written."""
    state, entry = RunState(runs / "a", "RUN"), {"weights_sha256": "0" * 64, "own_data": False, "data": {"fingerprint": "x"}}
    for place in (5, ["data"], {"data": 1}):
        assert "data" not in state.check({**entry, "asked": {"data": place}}).changed
    assert not state.check({"checkpoint": "step_²", "weights_sha256": "0" * 64}).changed
