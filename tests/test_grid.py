"""Grids of runs: the ledger through kills and changes, and cells that fail, with work that takes no time."""

import json
import os
import re
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import toyruns  # noqa: F401 (the forkserver's modules: its processes start without the seconds that they take to load)
from commands import PROCESSES, forkserver_of_parent, print_to
from waiting import wait_for

from treenet.config import TrainConfig
from treenet.experiments import grid
from treenet.experiments.grid import CellWork
from treenet.experiments.ledger import DONE, FAILED, INTERRUPTED, RUNNING, WAITING, Cell, CellResult, Ledger
from treenet.experiments.study import run_cells
from treenet.jobs.train_job import stop_on_sigterm
from treeproc.common.files import locked
from treeproc.common.messages import messages_shown
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow


def make_cells(folder: Path, *names: str, data_fingerprint: str = "d", **settings) -> list[Cell]:
    config = TrainConfig(data=folder / "data", workers=0, **settings)
    return [Cell(name, {"name": name}, config, folder / "cells" / name, data_fingerprint) for name in names]


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True, exist_ok=True)


def make_work(log: list[str], troubles: dict[str, Exception] | None = None, unfinished: str = "") -> CellWork:
    """Work that notes which cells it is asked to do; cells in `troubles` raise."""

    def train(config, folder):
        log.append(folder.name)
        checkpoint(folder, 5)
        if folder.name in (troubles or {}):
            raise troubles[folder.name]
        return SimpleNamespace(finished=folder.name != unfinished)

    def score(folder):
        (folder / "scores.json").write_text("{}")
        return {"bleu": 12.5}

    return CellWork(train, score)


def run(folder: Path, cells: list[Cell], work: CellWork) -> dict[str, str]:
    """Run as a driver does, with the lock; statuses by name."""
    with locked(folder, shared=True):
        ledger = Ledger.open(folder, cells)
        run_cells(cells, work, ledger)
    assert ledger.entries == Ledger.read(folder).entries, "what is in memory is on disk"
    return {name: entry.status for name, entry in ledger.entries.items()}


def test_a_trained_model_whose_checkpoints_were_removed_is_only_scored(tmp_path):
    cells = make_cells(tmp_path, "a", "b")
    averaged = tmp_path / "cells" / "a" / "averaged"
    averaged.mkdir(parents=True)
    (averaged / "meta.json").write_text(json.dumps({"files": {"model.safetensors": {"sha256": "0"}}}))
    trained = []

    def train(config, folder):
        trained.append(folder.name)
        return SimpleNamespace(finished=True)

    assert run(tmp_path, cells, CellWork(train, make_work([]).score)) == {"a": DONE, "b": DONE} and trained == ["b"]


def test_cells_run_once_and_a_second_command_runs_nothing(tmp_path, capsys):
    log = []
    cells = make_cells(tmp_path, "a", "b")
    assert run(tmp_path, cells, make_work(log)) == {"a": DONE, "b": DONE}
    assert "a: done after 0:00: bleu 12.50" in capsys.readouterr().err
    assert run(tmp_path, cells, make_work(log)) == {"a": DONE, "b": DONE} and log == ["a", "b"]
    (tmp_path / "cells" / "a" / "scores.json").unlink()
    assert run(tmp_path, cells, make_work(log))["a"] == DONE and log == ["a", "b", "a"], "scores that are gone come again"


def test_a_cell_whose_record_a_kill_prevented_runs_again(tmp_path):
    """A record of earlier scores may be there, so the ledger must not say before the record that the cell is done."""
    log, cells = [], make_cells(tmp_path, "a")

    def kill(folder, entry):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, cells, replace(make_work(log), record=kill))
    recorded = []
    work = replace(make_work(log), record=lambda folder, entry: recorded.append(folder.name))
    assert run(tmp_path, cells, work) == {"a": DONE} and recorded == ["a"] and log == ["a", "a"]


def test_a_failing_cell_does_not_stop_the_others_and_is_tried_again_last(tmp_path):
    log, cells = [], make_cells(tmp_path, "a", "b", "c")
    troubles = {"a": UserError("too few cores"), "b": ValueError("of no\nkind")}
    assert run(tmp_path, cells, make_work(log, troubles)) == {"a": FAILED, "b": FAILED, "c": DONE}
    entries = Ledger.read(tmp_path).entries
    assert entries["a"].error == "too few cores"
    assert entries["b"].error == f"ValueError: of no kind; see {tmp_path / 'cells/b/error.txt'}"
    assert "Traceback" in (tmp_path / "cells" / "b" / "error.txt").read_text()
    log.clear()
    more = make_cells(tmp_path, "a", "b", "c", "d")
    assert set(run(tmp_path, more, make_work(log)).values()) == {DONE} and log == ["d", "a", "b"]
    assert not Ledger.read(tmp_path).entries["b"].error


def test_a_run_that_was_stopped_stops_the_grid_and_comes_first_next_time(tmp_path):
    log, cells = [], make_cells(tmp_path, "a", "b", "c")
    assert run(tmp_path, cells, make_work(log, unfinished="b")) == {"a": DONE, "b": INTERRUPTED, "c": WAITING}
    assert set(run(tmp_path, cells[::-1], make_work(log)).values()) == {DONE} and log == ["a", "b", "b", "c"]


def run_and_wait_in_c(folder: Path) -> None:
    work = make_work([])

    def train(config, folder):
        summary = work.train(config, folder)
        if folder.name == "c":
            (folder / "here").touch()
            time.sleep(60)
        return summary

    run(folder, make_cells(folder, "a", "b", "c", "d"), CellWork(train, work.score))


def test_sigkill_in_the_middle_loses_and_repeats_nothing(tmp_path):
    driver = PROCESSES.Process(target=run_and_wait_in_c, args=(tmp_path,))
    driver.start()
    wait_for((tmp_path / "cells" / "c" / "here").exists)
    with pytest.raises(UserError, match=f"another process is writing to {tmp_path}"), locked(tmp_path):
        pass  # as cells in Ray do
    driver.kill()
    driver.join()
    entries = Ledger.read(tmp_path).entries
    assert [entries[name].status for name in "abcd"] == [DONE, DONE, RUNNING, WAITING]
    log = []
    assert set(run(tmp_path, make_cells(tmp_path, "d", "c", "b", "a"), make_work(log)).values()) == {DONE}
    assert log == ["c", "d"] and Ledger.read(tmp_path).entries["c"].starts == 2


# Several processes.


class Slow:
    """Work of a cell that takes `seconds`, and longer while the test holds the cell; it notes its start and end. Can be sent."""

    def __init__(self, folder: Path, seconds: float):
        self.folder, self.seconds = folder, seconds

    def hold(self, names: str) -> None:
        for name in names:
            (self.folder / f"wait-{name}").touch()

    def release(self) -> None:
        for path in self.folder.glob("wait-*"):
            path.unlink()

    def note(self, *words) -> None:
        with open(self.folder / "log", "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def train(self, config, folder):
        print(f"training {folder.name}")
        self.note("start", folder.name, os.getpid())
        with stop_on_sigterm(folder / "stop"):
            deadline = time.monotonic() + self.seconds
            while time.monotonic() < deadline or (self.folder / f"wait-{folder.name}").exists():
                if (folder / "stop").exists():
                    checkpoint(folder, 5)
                    return SimpleNamespace(finished=False)
                time.sleep(0.01)
        return SimpleNamespace(finished=True)

    def score(self, folder):
        self.note("end", folder.name, os.getpid())
        (folder / "scores.json").write_text("{}")
        return {"bleu": 12.5}

    def read(self, event: str) -> list[tuple[str, int]]:
        path = self.folder / "log"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(name, int(pid)) for what, name, pid in lines if what == event]


class Forked(PROCESSES.Process):
    """A process of a command, which gets what it works on as a pickle and prints to the same file, but starts no program."""

    def __init__(self, output: Path, **options):
        super().__init__(**options)
        self.output = output

    def run(self) -> None:
        print_to(self.output)
        super().run()


def work_side_by_side(folder: Path, names: str, parallel: int, output: Path) -> None:
    """A command of a grid. All that it writes goes to `output`."""
    print_to(output)
    forkserver_of_parent()
    grid.multiprocessing = SimpleNamespace(
        get_context=lambda method: SimpleNamespace(Pipe=PROCESSES.Pipe, Process=partial(Forked, output))
    )
    slow = Slow(folder, 0.1)
    with messages_shown(), locked(folder, shared=True):
        cells = make_cells(folder, *names)
        run_cells(cells, CellWork(slow.train, slow.score), Ledger.open(folder, cells), parallel)


class Command(PROCESSES.Process):
    """A process with its output."""

    def __init__(self, folder: Path, names: str, parallel: int, number: int):
        self.output = folder / f"output-{number}"
        super().__init__(target=work_side_by_side, args=(folder, names, parallel, self.output))

    def ended(self) -> str:
        """Wait for the end, which must be a good one; return the output."""
        self.join(200)
        written = self.output.read_text()
        assert self.exitcode == 0, written
        return written


@contextmanager
def commands(folder: Path, names: str, count: int, parallel: int = 1):
    started = [Command(folder, names, parallel, number) for number in range(count)]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def test_two_commands_do_every_cell_once_and_both_wait_for_the_end(tmp_path):
    names, slow = "abcdefgh", Slow(tmp_path, 0)
    slow.hold("a")
    with commands(tmp_path, names, 2) as started:
        wait_for(lambda: len({pid for _, pid in slow.read("start")}) == 2 and len(slow.read("end")) == 7)
        time.sleep(1)
        assert all(process.is_alive() for process in started), "a cell is still at work"
        slow.release()
        written = [process.ended() for process in started]
    assert sorted(name for name, _ in slow.read("start")) == sorted(name for name, _ in slow.read("end")) == list(names)
    assert sum("waiting for cells of other processes: a" in output for output in written) == 1
    assert all(entry.starts == 1 and entry.status == DONE for entry in Ledger.read(tmp_path).entries.values())


def test_the_cell_of_a_killed_command_is_taken_up_by_the_other(tmp_path):
    slow = Slow(tmp_path, 0)
    slow.hold("b")
    with commands(tmp_path, "abcd", 2) as started:
        wait_for(lambda: "b" in dict(slow.read("start")) and {"a", "c", "d"} == dict(slow.read("end")).keys())
        killed = next(process for process in started if process.pid == dict(slow.read("start"))["b"])
        killed.kill()
        slow.release()
        next(process for process in started if process is not killed).ended()
    assert [name for name, _ in slow.read("start")].count("b") == 2
    entries = Ledger.read(tmp_path).entries
    assert {name: (entry.status, entry.starts) for name, entry in entries.items()} == {
        name: (DONE, 2 if name == "b" else 1) for name in "abcd"
    }


def test_a_cell_that_another_command_has_is_running_for_a_third(tmp_path):
    slow = Slow(tmp_path, 0)
    slow.hold("a")
    with commands(tmp_path, "a", 1):
        wait_for(lambda: slow.read("start"))
        assert Ledger.open(tmp_path, make_cells(tmp_path, "a", "b")).entries["a"].status == RUNNING
    wait_for(lambda: Ledger.open(tmp_path, make_cells(tmp_path, "a")).entries["a"].status == INTERRUPTED)


def test_a_cell_that_fails_is_tried_once_by_a_command_and_its_neighbours(tmp_path):
    log, cells = [], make_cells(tmp_path, "a")
    ours, theirs = Ledger.open(tmp_path, cells), Ledger.open(tmp_path, cells)
    work = make_work(log, {"a": UserError("too few cores")})
    for ledger in (ours, theirs):
        run_cells(cells, work, ledger)
    assert log == ["a"] and theirs.entries["a"].status == FAILED
    run_cells(cells, work, Ledger.open(tmp_path, cells))
    assert log == ["a", "a"]


def test_processes_of_one_command_share_the_cells_and_print_to_their_folders(tmp_path):
    slow = Slow(tmp_path, 0)
    slow.hold("ab")  # until both processes have a cell: else one that starts first might take them all
    with commands(tmp_path, "abcdef", 1, parallel=2) as (driver,):
        wait_for(lambda: len(slow.read("start")) == 2)
        slow.release()
        written = driver.ended()
    assert len({pid for _, pid in slow.read("start")} | {driver.pid}) == 3
    assert sorted(name for name, _ in slow.read("start")) == list("abcdef")
    assert "training" not in written and all(
        re.search(rf"^{name}: done after 0:\d\d: bleu 12.50$", written, re.MULTILINE) for name in "abcdef"
    )
    assert all((tmp_path / "cells" / name / "log.txt").read_text() == f"training {name}\n" for name in "abcdef")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.cluster), signal.SIGKILL])
def test_processes_save_and_end_when_their_driver_does(tmp_path, number):
    slow = Slow(tmp_path, 0)
    slow.hold("abc")
    with commands(tmp_path, "abc", 1, parallel=2) as (driver,):
        wait_for(lambda: len(slow.read("start")) == 2)
        os.kill(driver.pid, number)
        driver.join(200)
        wait_for(lambda: all(entry.status != RUNNING for entry in Ledger.read(tmp_path).entries.values()))
    entries = Ledger.read(tmp_path).entries
    assert [entries[name].status for name in "abc"] == [INTERRUPTED, INTERRUPTED, WAITING]
    assert all((tmp_path / "cells" / name / "checkpoints" / "step_00000005").is_dir() for name in "ab")
    assert set(run(tmp_path, make_cells(tmp_path, *"abc"), make_work([])).values()) == {DONE}


def test_the_cell_of_a_killed_process_is_taken_by_another_of_the_command(tmp_path):
    slow = Slow(tmp_path, 0)
    slow.hold("ab")
    with commands(tmp_path, "abc", 1, parallel=2) as (driver,):
        wait_for(lambda: {"a", "b"} == dict(slow.read("start")).keys())
        os.kill(dict(slow.read("start"))["a"], signal.SIGKILL)
        wait_for(lambda: Ledger.read(tmp_path).counts() == "1 running, 1 interrupted, 1 waiting")
        slow.release()
        written = driver.ended()
    assert "a process ended with status -9" in written
    assert Ledger.read(tmp_path).entries["a"].starts == 2 and [name for name, _ in slow.read("end")].count("a") == 1


# The order.


def test_a_cell_that_takes_the_driver_down_again_and_again_lets_the_others_go_first(tmp_path):
    cells = make_cells(tmp_path, "a", "b", "c")
    for start in range(2):
        ledger = Ledger.open(tmp_path, cells)
        ledger.start(cells[0])
        checkpoint(cells[0].folder, 5)  # the same one at both starts
        assert [cell.name for cell in Ledger.open(tmp_path, cells).in_order(cells)] == [["a", "b", "c"], ["b", "c", "a"]][start]


def test_a_larger_grid_adds_cells_and_a_smaller_one_forgets_none(tmp_path):
    log = []
    run(tmp_path, make_cells(tmp_path, "a", "b"), make_work(log))
    assert set(run(tmp_path, make_cells(tmp_path, "b", "c"), make_work(log))) == {"a", "b", "c"} and log == ["a", "b", "c"]


def test_cells_of_other_settings_are_refused_with_their_names(tmp_path):
    log = []
    run(tmp_path, make_cells(tmp_path, "a"), make_work(log))
    before = (tmp_path / "ledger.json").read_bytes()
    for settings, message in [
        ({"max_steps": 7}, r"cells with other settings \(a: max_steps: 100000 -> 7\)"),
        ({"batch": {"max_tokens": 99}}, r"batch\.max_tokens: 4096 -> 99"),
        ({"decoding": {"beam_size": 2}}, r"decoding\.beam_size: 5 -> 2"),
        ({"data_fingerprint": "e"}, "data fingerprint: d -> e"),
    ]:
        with pytest.raises(UserError, match=message):
            run(tmp_path, make_cells(tmp_path, "a", "b", **settings), make_work(log))
    assert (tmp_path / "ledger.json").read_bytes() == before and log == ["a"]
    run(tmp_path, make_cells(tmp_path, "a", log_every=3), make_work(log))
    assert log == ["a"], "how often a line is written changes no cell"


def test_a_cell_with_another_order_of_rates_is_another(tmp_path):
    """The first pattern that matches a parameter counts. A record of a cell has the same rule."""
    rates = [("encoder.*", 0.1), ("*norm*", 0.5)]
    run(tmp_path, make_cells(tmp_path, "a", lr_scale=dict(rates)), make_work([]))
    (other,) = make_cells(tmp_path, "a", lr_scale=dict(reversed(rates)))
    with pytest.raises(UserError, match=r"\(a: lr_scale: another order of the same patterns\)"):
        Ledger.open(tmp_path, [other])
    Ledger.open(tmp_path, make_cells(tmp_path, "a", lr_scale=dict(rates)))


def test_settings_of_cells_that_never_started_may_change(tmp_path):
    Ledger.open(tmp_path, make_cells(tmp_path, "a", max_steps=3))
    Ledger.open(tmp_path, make_cells(tmp_path, "a", max_steps=4))
    assert Ledger.read(tmp_path).entries["a"].settings["max_steps"] == 4


def test_settings_of_a_cell_that_failed_before_its_first_checkpoint_may_change(tmp_path):
    for steps in (3, 4):
        (cell,) = make_cells(tmp_path, "a", max_steps=steps)
        ledger = Ledger.open(tmp_path, [cell])
        assert ledger.in_order([cell]) == [cell]
        assert (ledger.entries["a"].settings["max_steps"], ledger.entries["a"].seconds) == (steps, float(steps == 4))
        ledger.start(cell)
        ledger.end(cell, CellResult(FAILED, 1.0, error="no"))
    checkpoint(cell.folder, 2)
    with pytest.raises(UserError, match="holds cells with other settings .a: max_steps: 4 -> 5"):
        Ledger.open(tmp_path, make_cells(tmp_path, "a", max_steps=5))


def test_a_ledger_of_an_earlier_version_lacks_new_settings(tmp_path):
    run(tmp_path, make_cells(tmp_path, "a"), make_work([]))
    path = tmp_path / "ledger.json"
    ledger = json.loads(path.read_text())
    del ledger["cells"]["a"]["settings"]["seed"]
    path.write_text(json.dumps(ledger))
    Ledger.open(tmp_path, make_cells(tmp_path, "a"))
    with pytest.raises(UserError, match="seed: 1 -> 2"):
        Ledger.open(tmp_path, make_cells(tmp_path, "a", seed=2))


@pytest.mark.parametrize("content", ["", "[]", '{"cells": 3}', '{"cells": {"a": {"what": 1}}}'])
def test_a_damaged_ledger_says_how_to_go_on(tmp_path, content):
    (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(UserError, match="ledger.json.*remove it and run the same command again"):
        Ledger.open(tmp_path, make_cells(tmp_path, "a"))
