"""`report.py --watch`: what is made when, its end with the runs or with Ctrl-C, and the page that reloads itself."""

import json
import time
from pathlib import Path

import pytest
from axe import NO_AXE, WIDTHS, violations
from browser import MISSING, browser

from treenet.cli.report import main
from treenet.report import run_sections as module
from treenet.report.build import write_report
from treenet.report.run_sections import Live, watch
from treenet.report.settings import ReportSettings
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

META = '<meta http-equiv="refresh"'


def make_run(folder: Path, steps: int = 2) -> Path:
    """A run folder as training has it before its end."""
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {name: transformer}\ndata: nowhere\nmax_steps: 9\n")
    (folder / "run.json").write_text("{}")
    for step in range(1, steps + 1):
        log(folder, step)
    return folder


def log(folder: Path, step: int) -> None:
    lines = [{"event": "train", "step": step, "loss": 5.0 / step, "nll": 4.0 / step, "tokens_per_s": 100.0}]
    lines.append({"event": "valid", "step": step, "nll": 4.25 / step})
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def end(folder: Path) -> None:
    (folder / "averaged").mkdir()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(module, "is_complete", Path.is_dir)
    return make_run(tmp_path / "run<b>")


def watched(run: Path, monkeypatch, *events) -> tuple[list[Live | None], list[str], int]:
    """The pages that were made, what was said, and how often it waited; each wait brings the next of the events."""
    made, said, left, waits = [], [], list(events), []

    def wait(seconds: float) -> None:
        assert seconds == module.REFRESH_S
        waits.append(seconds)
        left.pop(0)()

    monkeypatch.setattr(module.time, "sleep", wait)
    monkeypatch.setattr(module, "tell", said.append)

    def make(live: Live | None) -> Path:
        made.append(live)
        return Path("page")

    watch(ReportSettings(runs=(str(run),)), make)
    assert not left
    return made, said, len(waits)


def test_a_page_is_made_when_there_is_something_new_and_the_whole_report_at_the_end(run, monkeypatch):
    made, said, waits = watched(run, monkeypatch, lambda: None, lambda: log(run, 3), lambda: None, lambda: end(run))
    assert waits == 4 and len(made) == 3 and made[-1] is None
    assert [live.refresh_s for live in made[:-1]] == [module.REFRESH_S] * 2
    assert len(said) == 1 and "page" in said[0] and "Ctrl-C" in said[0]


def test_ctrl_c_leaves_a_page_that_no_longer_reloads(run, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    made, said, _ = watched(run, monkeypatch, lambda: log(run, 3), interrupt)
    assert [live.refresh_s for live in made] == [module.REFRESH_S] * 2 + [None] and "stopped" in said[-1]


def test_a_live_report_of_ended_runs_is_complete_at_once(run, monkeypatch):
    end(run)
    assert watched(run, monkeypatch) == ([None], [], 0)


def test_a_study_ends_when_every_cell_is_done_or_has_failed(tmp_path, monkeypatch):
    study = tmp_path / "study"
    study.mkdir()

    def write(*states: str) -> None:
        cells = {
            f"cell{i}": {"labels": {}, "settings": {}, "data_fingerprint": "", "status": one} for i, one in enumerate(states)
        }
        (study / "ledger.json").write_text(json.dumps({"cells": cells}))

    write("done", "running")
    made, _, _ = watched(study, monkeypatch, lambda: write("done", "interrupted"), lambda: write("done", "failed"))
    assert [live and live.cells for live in made] == [{str(study): (1, 2)}] * 2 + [None]


def test_runs_in_an_object_store_are_refused():
    with pytest.raises(UserError, match="object store; leave --watch out"):
        watch(ReportSettings(runs=("s3://bucket/run",)), lambda live: pytest.fail("made a page"))


def test_a_live_page_of_a_classifier_has_its_best_accuracy(run, tmp_path):
    """It had the lowest nll, which is over phrases for a model that learns their classes."""
    config = run / "config.yaml"
    config.write_text(f"task: classification\n{config.read_text()}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"accuracy": 0.75 / line["step"]} if line["event"] == "valid" else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report(ReportSettings(runs=(str(run),)), tmp_path / "out", Live("noon", 10, {}))[0].read_text()
    assert "best validation accuracy" in text and "75.00%" in text and "2.125" not in text


def test_a_live_page_has_the_state_and_the_curves(run, tmp_path, capsys):
    settings = ReportSettings(runs=(str(run),))
    files = write_report(settings, tmp_path / "out", Live("noon", 10, {}))
    text = files[0].read_text()
    assert META + ' content="10">' in text and "Made at noon" in text and "run<b>" not in text and "run&lt;b&gt;" in text
    assert "2.500" in text and "2.125" in text and "learning_curves" in text  # the last loss, the best validation
    assert "evaluate.py" not in text  # nothing is missing yet
    write_report(settings, tmp_path / "out", Live("noon", None, {"study": (3, 4)}))
    text = files[0].read_text()
    assert META not in text and "study: 3 of 4 cells" in text
    end(run)
    main(["--out", str(tmp_path / "out"), str(run), "--watch"])  # the whole report: this run is not watched any more
    assert "index.html" in capsys.readouterr().out and META not in files[0].read_text()


def test_in_a_browser_the_page_reloads_itself(run, tmp_path):
    if MISSING:
        pytest.skip(MISSING)
    settings = ReportSettings(runs=(str(run),), title="first")
    page = write_report(settings, tmp_path / "out", Live("noon", 1, {}))[0]
    with browser(tmp_path / "profile") as window:
        window.open(page)
        page.write_text(page.read_text().replace("<title>first", "<title>second"))
        deadline = time.monotonic() + 30
        while window.run("return document.title;") != "second" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert window.run("return document.title;") == "second"


@pytest.mark.skipif(bool(NO_AXE), reason=NO_AXE)
def test_in_a_browser_axe_finds_nothing_in_a_live_page(run, tmp_path):
    if MISSING:
        pytest.skip(MISSING)
    page = write_report(ReportSettings(runs=(str(run),)), tmp_path / "out", Live("noon", None, {}))[0]
    with browser(tmp_path / "profile") as window:
        window.open(page)
        assert [violations(window, width) for width in WIDTHS] == [[], []]
