"""Limits on workers that hang: what ends them, and what does not. Real processes are stopped at the end of the file."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest
from commands import Started
from moto_store import s3_server
from test_on_ray import workers_of
from training_jobs import tiny_config
from waiting import wait_for

from treenet.config.training import WatchConfig
from treenet.jobs import ray_train, ray_watch
from treenet.jobs.ray_watch import ENDED, GRACE_S, UPDATE, Beat, Heart, Watch
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import build_task
from treenet.training import ranks
from treenet.training.trainer import Trainer, train
from treeproc.common.messages import phase, under_way
from treeproc.common.settings import dump_settings
from treeproc.common.storage import as_path

LIMITS = WatchConfig(start_s=60, update_s=100, stop_s=40)
VALIDATION = "validating"


class Group:
    """A group of two ranks without processes, a second of which passes in no time."""

    def __init__(self, monkeypatch, limits: WatchConfig = LIMITS):
        self.is_stopping, self.did = False, []
        self.watch = Watch(limits, Path("run"), lambda: self.is_stopping)
        monkeypatch.setattr(self.watch, "end_group", lambda: self.did.append("end"))
        monkeypatch.setattr(self.watch, "_note_stacks", lambda what: self.did.append("note"))
        monkeypatch.setattr(ray_watch, "_start", lambda call, *arguments: call(*arguments))
        monkeypatch.setattr(ray_watch, "end_command", lambda message: self.did.append("exit"))
        self.beats = [Beat("group", 1, UPDATE, 1, 2, 7, "here")] * 2

    def passes(self, seconds: int, *, silent: tuple = (), updates: bool = False, beats: bool = True) -> list[str]:
        """Return what is done in so many seconds."""
        self.did.clear()
        for _ in range(seconds):
            for rank, beat in enumerate(self.beats):
                if rank not in silent:
                    self.beats[rank] = beat._replace(number=beat.number + 1, updates=beat.updates + updates)
            if beats:
                self.watch._beats = list(self.beats)
            self.watch.tick(1.0)
        return list(self.did)

    def do(self, phase: str) -> None:
        self.beats = [beat._replace(phase=phase) for beat in self.beats]


@pytest.fixture
def group(monkeypatch):
    group = Group(monkeypatch)
    with group.watch.over(object(), "group"):
        yield group


def test_the_start_has_a_limit_and_the_workers_of_the_next_start_have_it_again(group):
    for number in range(2):
        with group.watch.over(object(), f"group {number}"):
            assert group.passes(30, beats=False) == [] and group.passes(20, beats=False) == ["note"]
            assert group.passes(20, beats=False) == ["end"]


def test_an_update_has_a_limit_also_where_all_processes_answer(group):
    assert group.passes(300, updates=True) == []
    assert group.passes(49) == [] and group.passes(3) == ["note"] and group.passes(49) == ["end"]
    assert "exit" not in group.passes(int(GRACE_S) - 5) and "exit" in group.passes(10)


@pytest.mark.parametrize("phase", [VALIDATION, "saving a checkpoint", "compiling, trying the largest batch"])
def test_other_work_takes_its_time_while_its_processes_answer(group, phase):
    group.passes(60)
    group.do(phase)
    assert group.passes(5000) == []
    assert group.passes(101, silent=(1,)) == ["note", "end"]


def test_after_a_long_validation_the_update_counts_from_where_it_was(group):
    group.passes(20)
    group.do(VALIDATION)
    group.passes(500)
    group.do(UPDATE)
    assert group.passes(29) == []


def test_the_rank_that_is_silent_is_named(group, caplog):
    group.passes(101, silent=(1,))
    assert "rank 1 (process 7 on here) has not answered for 1:4" in caplog.text and "rank 0" not in caplog.text


def test_ranks_that_have_ended_wait_for_ray_and_not_for_ever(group):
    group.do(ENDED)
    assert group.passes(101, silent=(0, 1)) == ["note", "end"]


def test_a_stop_ends_within_its_limit_whatever_the_workers_do(group):
    group.do(VALIDATION)
    group.passes(5)
    group.is_stopping = True
    assert (
        group.passes(19) == []
        and group.passes(10) == ["note"]
        and group.passes(10) == ["end"]
        and group.passes(3) == ["exit"] * 2
    )


def test_a_stop_before_any_rank_began_ends_the_group_at_once(group):
    group.is_stopping = True
    assert set(group.passes(5, beats=False)) == {"end"}


def test_without_workers_only_the_stop_is_limited(monkeypatch):
    """So waiting for room has no limit."""
    group = Group(monkeypatch)
    assert group.passes(5000, beats=False) == []
    group.is_stopping = True
    assert group.passes(41, beats=False)[:2] == ["note", "end"]


def test_null_switches_each_limit_off(monkeypatch):
    group = Group(monkeypatch, WatchConfig(start_s=None, update_s=None, stop_s=None))
    with group.watch.over(object(), "group"):
        assert group.passes(9000, beats=False) == group.passes(9000, silent=(0, 1)) == []
        group.is_stopping = True
        assert group.passes(9000) == []


def test_a_pause_of_the_whole_machine_does_not_count(monkeypatch):
    """The clock of the threads jumps by an hour three times, as after SIGSTOP of everything."""
    group, clock = Group(monkeypatch), iter([0.0, 1.0, 3601.0, 3602.0, 7202.0, 10802.0])
    monkeypatch.setattr(ray_watch.time, "monotonic", lambda: next(clock))
    is_over = iter([False] * 5 + [True])
    monkeypatch.setattr(group.watch._end, "wait", lambda seconds: next(is_over))
    with group.watch.over(object(), "group"):
        group.watch._look()
    assert group.did == ["note"] and group.watch._lasting["start"][1] < 60


def test_the_driver_reads_what_the_ranks_of_its_group_write(monkeypatch):
    """Not what those of an earlier group wrote, and not before all ranks have written."""
    store: dict[str, bytes] = {}
    put = lambda key, value: store.__setitem__(key, value.encode())  # noqa: E731
    monkeypatch.setattr(ray_watch, "BEAT_S", 0.01)
    monkeypatch.setattr(ray_watch, "store_of_keys", lambda: (put, store.get))
    with Watch(LIMITS, Path("run"), lambda: False) as watch, watch.over(object(), "new"):
        with closing(Heart("run", "old", 0, 2)), closing(Heart("run", "old", 1, 2)), closing(Heart("run", "new", 2, 2)):
            wait_for(lambda: len(store) == 3, seconds=60)
        with closing(Heart("run", "new", 0, 2)) as heart:
            wait_for(lambda: Beat(*json.loads(store["run/0"])).group == "new", seconds=60)
            assert not watch._beats
            with closing(Heart("run", "new", 1, 2)):
                heart.update()
                wait_for(lambda: [beat.phase for beat in watch._beats] == [UPDATE, "the start of the rank"], seconds=60)
                with phase(VALIDATION):
                    wait_for(lambda: {beat.phase for beat in watch._beats} == {VALIDATION}, seconds=60)
                assert watch._beats[0].process == os.getpid() and watch._beats[0].updates == 1
            wait_for(lambda: watch._beats[1].phase == ENDED, seconds=60)


@pytest.mark.slow
def test_the_trainer_names_what_is_no_update(data, tmp_path, monkeypatch):
    seen = {}

    def noted(name, method):
        def call(self, *values, **named):
            seen[name] = under_way()
            return method(self, *values, **named)

        return call

    for name in ("check_memory", "step", "validate", "_save"):
        monkeypatch.setattr(Trainer, name, noted(name, getattr(Trainer, name)))
    train(build_task(tiny_config(data, "max_steps=2", "validate_every=2")), tmp_path)
    assert seen == {
        "check_memory": "trying the largest batch",
        "step": "",
        "validate": VALIDATION,
        "_save": "saving a checkpoint",
    }


def test_the_defaults_fit_the_limits_of_others(data):
    """Slurm and Ray's jobs give 300 s from SIGTERM to SIGKILL. Collectives give up after their own limit."""
    limits, off = tiny_config(data).watch, dump_settings(tiny_config(data, "watch.update_s=null"))
    assert limits.stop_s < 300 and limits.update_s > ray_train.COLLECTIVE_TIMEOUT_S
    assert "watch" not in dump_settings(tiny_config(data)) and "update_s: null" in off


def test_the_flight_recorder_of_gpus_writes_into_the_run(tmp_path):
    recorder = ranks.flight_recorder(tmp_path)
    assert int(recorder["TORCH_FR_BUFFER_SIZE"]) > 0 and recorder["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert {Path(value).parent for name, value in recorder.items() if name.endswith("TEMP_FILE")} == {tmp_path}


@contextmanager
def training(data: Path, folder: Path, out, *limits: str) -> Iterator[Started]:
    """Start a training on two workers, with a Ray of its own."""
    changes = ("workers=2", "max_steps=300", "validate_every=300", "loggers=[]", *limits)
    (folder / "train.yaml").write_text(dump_settings(tiny_config(data, *changes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        patch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 2}')
        driver = Started(folder / "log", "train.py", "--config", folder / "train.yaml", "--out", out)
    try:
        yield driver
    finally:
        driver.kill()
        driver.join()


def stop_worker(driver: Started, log: Path, ready=lambda: True) -> int:
    pids = wait_for(lambda: ready() and sorted(workers_of(driver.pid, "RayTrainWorker")), driver, 400, log)
    os.kill(pids[-1], signal.SIGSTOP)
    return pids[-1]


def status_after_sigterm(driver: Started, seconds: float) -> int | None:
    os.kill(driver.pid, signal.SIGTERM)
    driver.join(seconds)
    return driver.exitcode


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["folder", "store"])
def test_sigterm_ends_a_training_whose_worker_hangs_in_its_start(data, tmp_path, place):
    with (
        s3_server(tmp_path) if place == "store" else nullcontext(str(tmp_path)) as root,
        training(data, tmp_path, as_path(f"{root}/run")) as driver,
    ):
        stop_worker(driver, tmp_path / "log")
        assert status_after_sigterm(driver, 120) == 143, (tmp_path / "log").read_text()


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_sigterm_ends_a_training_whose_rank_hangs_in_an_update(data, tmp_path):
    run = tmp_path / "run"
    with training(data, tmp_path, run, "watch.stop_s=60") as driver:
        stop_worker(driver, tmp_path / "log", lambda: (run / "metrics.jsonl").exists() and read_metrics(run))
        assert status_after_sigterm(driver, 120) == 143, (tmp_path / "log").read_text()
    assert "after the request to stop" in (tmp_path / "log").read_text()
    (stacks,) = run.glob("hung-*.txt")
    assert "RayTrainWorker" in stacks.read_text()


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_workers_that_hang_in_their_start_are_replaced(data, tmp_path):
    with training(data, tmp_path, tmp_path / "run", "watch.start_s=150") as driver:
        stopped = stop_worker(driver, tmp_path / "log")
        driver.join(600)
        assert driver.exitcode == 0, (tmp_path / "log").read_text()
    assert not Path(f"/proc/{stopped}").exists()
    assert "the workers have not started for 2:3" in (tmp_path / "log").read_text()
