"""Training that is disturbed: killed workers, drivers and nodes, SIGTERM, full disks, checkpoints that are cut off.

Whatever happens, the losses must be those of `undisturbed`, bit for bit: two ranks without Ray that nobody disturbs.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from commands import PROCESSES
from safetensors.torch import load_file
from toyruns import losses, save_for_ever, train_ranks
from training_jobs import run_and_note, tiny_config
from waiting import wait_for

from treenet.jobs import ray_train
from treenet.jobs.train_run import run_training
from treenet.runs.checkpoint import checkpoint_folders, checkpoint_step, latest_checkpoint
from treeproc.common.files import locked, read_json
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import UserError, dump_settings

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent


def two_ranks(data: Path, run_dir: Path, steps: int) -> list[tuple[int, float]]:
    """Losses on two ranks, ten steps a line: a line a step would cost Ray more time than the steps."""
    train_ranks(2, tiny_config(data, f"max_steps={steps}", f"checkpoint_every={steps}", "log_every=10"), run_dir)
    return losses(run_dir)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> list[tuple[int, float]]:
    """Losses of 600 steps."""
    return two_ranks(data, tmp_path_factory.mktemp("undisturbed"), 600)


def run_job(name: str, folder: Path, data: Path, **environment: str) -> dict:
    (folder / "data").symlink_to(data)
    command = [sys.executable, str(TESTS / "training_jobs.py"), name, str(folder)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | environment)
    assert job.returncode == 0, job.stderr
    return json.loads((folder / "result.json").read_text())


def start_workflow(repository: Path, config, folder: Path, **environment: str) -> subprocess.Popen:
    """`train_wmt.py` as a process; what it says goes to FOLDER/log."""
    (folder / "config.yaml").write_text(dump_settings(config))
    command = [sys.executable, str(repository / "workflows" / "train_wmt.py"), "--config", str(folder / "config.yaml")]
    env = os.environ | {"PYTHONPATH": str(repository), **environment}
    with open(folder / "log", "a") as log:
        return subprocess.Popen([*command, "--out", str(folder / "run")], env=env, stdout=log, stderr=log)


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["while it starts", "while it trains"])
def test_a_killed_worker_is_replaced(data, tmp_path, capfd, moment):
    """Ray Train itself replaces workers that start: others waited for ever for place beside their own, on two cores."""
    import ray

    psutil = importlib.import_module("psutil")  # comes with ray, and is found once ray is imported
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    run_dir, killed = tmp_path / "run", []
    (tmp_path / "undisturbed").mkdir()

    def kill_one_worker() -> None:
        if moment == "while it trains":
            wait_for(lambda: checkpoint_folders(run_dir), seconds=260)
        while not killed:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "RayTrainWorker" in "".join(process.cmdline()):
                        process.kill()
                        killed.append(process.pid)
                        return

    killer = threading.Thread(target=kill_one_worker, daemon=True)
    killer.start()
    try:
        summary = run_training(tiny_config(data, "workers=2", "max_steps=150", "log_every=10"), run_dir)
    finally:
        if started_here:
            ray.shutdown()
    killer.join(timeout=1)
    assert len(killed) == 1 and summary.finished and summary.step == 150
    assert losses(run_dir) == two_ranks(data, tmp_path / "undisturbed", 150)
    assert ("new workers continue from step" in capfd.readouterr().err) == (moment == "while it trains")
    (session,) = read_sessions(run_dir)
    assert "Ray's workers" in session.cpu_covers and session.did == {"from update": 0, "to update": 150}


@pytest.mark.cluster
def test_a_dead_node_of_the_command_ends_it_with_one_line(data, tmp_path, repository):
    """Ray ended it before, without a word, after a warning that new workers continue."""
    run = start_workflow(repository, tiny_config(data, "workers=2", "max_steps=100000"), tmp_path)
    wait_for(lambda: checkpoint_folders(tmp_path / "run"), run, log=tmp_path / "log")
    [agent] = (one for one in psutil_processes(run.pid) if "".join(one.cmdline()) == "ray::RuntimeEnvAgent")
    agent.kill()
    assert run.wait(120) == 1
    log = (tmp_path / "log").read_text()
    assert "error: Ray failed (its node on this machine died); the same command continues" in log.splitlines()[-1]
    assert log.count("error:") == 1


@pytest.mark.cluster
def test_a_killed_driver_is_replaced_and_sigterm_saves(data, undisturbed, tmp_path, repository):
    """The second driver starts while workers of the first may still be at work; it is told to leave, and saves."""
    run_dir = tmp_path / "run"
    settings = ("workers=2", "max_steps=600", "checkpoint_every=10", "keep_checkpoints=5", "log_every=10")
    config = tiny_config(data, *settings)
    first = start_workflow(repository, config, tmp_path)
    wait_for(lambda: checkpoint_folders(run_dir), first, log=tmp_path / "log")
    first.kill()
    first.wait()
    second = start_workflow(repository, config, tmp_path)
    killed_at = checkpoint_step(latest_checkpoint(run_dir))
    logs = run_dir / "tensorboard"  # one file from each rank 0
    wait_for(lambda: len(list(logs.iterdir())) == 2, second, log=tmp_path / "log")
    wait_for(lambda: checkpoint_step(checkpoint_folders(run_dir)[-1]) > killed_at + 20, second, log=tmp_path / "log")
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=100) == 143, (tmp_path / "log").read_text()[-3000:]
    assert "the same command continues" in (tmp_path / "log").read_text()
    step = checkpoint_step(latest_checkpoint(run_dir))
    assert killed_at < step < 600 and losses(run_dir) == undisturbed[: step // 10]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.cluster)])
def test_ctrl_c_is_one_line_and_the_same_command_continues(data, request, tmp_path, repository, workers):
    """Ctrl-C on a terminal sends the signal to all processes of the foreground; none of them is left."""
    run_dir = tmp_path / "run"
    config = tiny_config(data, f"workers={workers}", "max_steps=5000", "checkpoint_every=10", "log_every=10")
    (tmp_path / "config.yaml").write_text(dump_settings(config))
    command = [sys.executable, str(repository / "workflows" / "train_wmt.py"), "--config", str(tmp_path / "config.yaml")]
    with open(tmp_path / "log", "a") as log:
        environment = os.environ | {"PYTHONPATH": str(repository)}
        arguments = dict(stdout=log, stderr=log, env=environment, start_new_session=True)
        process = subprocess.Popen([*command, "--out", str(run_dir)], **arguments)
    wait_for(lambda: checkpoint_folders(run_dir), process, log=tmp_path / "log")
    children = psutil_processes(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(lambda: process.poll() is not None, seconds=150, log=tmp_path / "log")
    status = process.returncode
    message = (tmp_path / "log").read_text()
    assert status == 130 and message.endswith("\ninterrupted; to go on, run the same command again\n"), message[-3000:]
    assert "Traceback" not in message and "Error" not in message and message.count("interrupted") == 1
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), seconds=60)
    assert (len(children) > 4) == (workers > 0)
    assert {path.name for path in run_dir.iterdir()} >= {"checkpoints", "config.yaml", "metrics.jsonl", "run.json"}

    step = checkpoint_step(latest_checkpoint(run_dir))
    if workers:
        assert two_ranks(data, run_dir, 600) == request.getfixturevalue("undisturbed")
    else:
        run_training(config.model_copy(update={"max_steps": step + 10}), run_dir)
        assert [at for at, _ in losses(run_dir)] == list(range(10, step + 11, 10))


def psutil_processes(pid: int) -> list:
    """The processes below `pid` as psutil knows them, which comes with ray and is found once ray is imported."""
    import ray  # noqa: F401

    return importlib.import_module("psutil").Process(pid).children(recursive=True)


@pytest.mark.cluster
def test_a_lost_node_is_replaced_by_another(data, undisturbed, tmp_path):
    result = run_job("lost_node", tmp_path, data)
    assert result["disturbed_at"] < 400 == result["step"] and "new workers continue" in result["said"], result
    assert losses(tmp_path / "run") == undisturbed[:40]


@pytest.mark.cluster
def test_fewer_workers_go_on_where_that_is_wanted(data, undisturbed, tmp_path):
    result = run_job("fewer_nodes", tmp_path, data)
    assert result["step"] == 400
    assert read_json(latest_checkpoint(tmp_path / "run") / "meta.json")["world_size"] == 1
    np.testing.assert_allclose([x for _, x in losses(tmp_path / "run")], [x for _, x in undisturbed[:40]], rtol=1e-3)


@pytest.mark.cluster
def test_more_workers_go_on_when_a_node_comes(data, undisturbed, tmp_path):
    """They waited for ever for place beside the first ones, which had ended."""
    result = run_job("more_nodes", tmp_path, data)
    assert result["step"] == 1000
    assert read_json(latest_checkpoint(tmp_path / "run") / "meta.json")["world_size"] == 2
    np.testing.assert_allclose([x for _, x in losses(tmp_path / "run")][:60], [x for _, x in undisturbed], rtol=1e-3)


@pytest.mark.cluster
@pytest.mark.parametrize("job", ["called_back", "deleted_pod"])
def test_workers_leave_a_node_that_announces_its_end(data, undisturbed, tmp_path, job):
    result = run_job(job, tmp_path, data)
    assert result["step"] == 400 and "the cluster took a node back" in result["said"], result
    assert losses(tmp_path / "run") == undisturbed[:40]


@pytest.mark.cluster
def test_a_submitted_job_is_stopped_with_a_checkpoint_and_continues(data, tmp_path):
    result = run_job("submitted", tmp_path, data, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789abcdef" * 4)
    assert result["without_token"] == 401
    assert result["stopped"] == "STOPPED" and "the same command continues" in result["first"], result
    assert result["status"] == 0 and "score: tree-attention evaluate" in result["output"], result
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, result["step"] + 6))
    assert (tmp_path / "run" / "averaged" / "model.safetensors").is_file()


@pytest.mark.parametrize("job", [pytest.param("full_disk", marks=pytest.mark.cluster), "limited_files"])
def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(data, tmp_path, job):
    if job == "limited_files":  # any process can do this
        (tmp_path / "data").symlink_to(data)
        process = PROCESSES.Process(target=run_and_note, args=(job, tmp_path))
        process.start()
        process.join()
        result = read_json(tmp_path / "result.json")
    else:
        result = run_job(job, tmp_path, data)
    if "skip" in result:
        pytest.skip("mount namespaces need rights that this process does not have")
    reason = "No space left on device" if job == "full_disk" else "File too large"
    assert reason in result["error"] and "step_00000010" in result["error"] and "\n" not in result["error"]
    assert result["whole"] == result["all"] == ["step_00000005"]


def test_a_checkpoint_that_was_cut_off_is_never_loaded(tmp_path):
    """A process that does nothing but save is killed ten times, and until three kills leave half a checkpoint."""
    rng, last, kills, half = random.Random(0), 0, 0, 0
    while kills < 10 or half < 3:
        assert kills < 100
        child = PROCESSES.Process(target=save_for_ever, args=(tmp_path, last + 1))
        child.start()
        is_saved = lambda before=last: any(checkpoint_step(folder) > before for folder in checkpoint_folders(tmp_path))  # noqa: E731
        wait_for(is_saved, child, 60, pause=0.001)
        if kills < 10:
            time.sleep(rng.uniform(0, 0.02))
        else:  # a busy machine may have hit too few halves by chance
            wait_for(lambda: any((tmp_path / "checkpoints").glob(".tmp-*")), child, 60, pause=0.0001)
        child.kill()
        child.join()
        kills += 1
        half += any((tmp_path / "checkpoints").glob(".tmp-*"))
        folder = latest_checkpoint(tmp_path)
        assert checkpoint_step(folder) > last
        last = checkpoint_step(folder)
        assert bool((load_file(folder / "model.safetensors")["weight"] == last).all())


def fit_with_restarts(config, run_dir: Path) -> dict:
    mirror, stop_file = ray_train.mirror_of(run_dir), run_dir / "stop"
    watch = ray_train.Watch(config.watch, run_dir, stop_file.exists)
    with ray_train._Follow(config, mirror, stop_file, watch) as follow:
        return ray_train._fit_with_restarts(config, mirror, stop_file, follow)


def test_a_store_that_does_not_answer_ends_no_training_and_is_told_later_to_stop(data, tmp_path, monkeypatch):
    answers = iter([UserError("the store does not answer")] * 3)

    def ask_to_stop(mirror):
        for error in answers:
            raise error
        (tmp_path / "told").touch()

    def read_metrics(folder, was_read=[]):  # noqa: B006
        was_read.append(folder)
        if len(was_read) > 1:
            raise UserError("the store does not answer")
        return []

    config, mirror, stop_file = tiny_config(data), ray_train.mirror_of(tmp_path), tmp_path / "stop"
    monkeypatch.setattr(type(mirror), "ask_to_stop", ask_to_stop)
    monkeypatch.setattr(ray_train, "read_metrics", read_metrics)
    monkeypatch.setattr(ray_train, "POLL_S", 0.01)
    stop_file.touch()
    with ray_train._Follow(config, mirror, stop_file, ray_train.Watch(config.watch, tmp_path, stop_file.exists)) as follow:
        while not (tmp_path / "told").exists():
            assert follow._thread.is_alive()
            time.sleep(0.01)
        follow.begin("again")


def test_failures_without_progress_end_a_run(data, tmp_path, monkeypatch):
    """Failures between which there is a checkpoint do not count: here after each of six, then none."""
    starts = []

    def fit(config, mirror, stop_file, follow):
        starts.append(mirror.last_step())
        if len(starts) <= 6:
            folder = mirror.folder / "checkpoints" / f"step_{10 * len(starts):08d}"
            folder.mkdir(parents=True)
        raise ray_train.RayActorError

    monkeypatch.setattr(ray_train, "_fit", fit)
    with pytest.raises(ray_train.RayActorError):
        fit_with_restarts(tiny_config(data), tmp_path)
    assert starts == [0, 10, 20, 30, 40, 50, 60, 60, 60]


def test_a_node_that_is_called_back_is_no_failure_and_no_end(data, tmp_path, monkeypatch):
    outcomes = iter([{"step": step, "finished": step == 9, "node_ends": step < 9} for step in range(10)])
    monkeypatch.setattr(ray_train, "_fit", lambda config, mirror, stop_file, follow: next(outcomes))
    assert fit_with_restarts(tiny_config(data), tmp_path) == {"step": 9, "finished": True}
    outcomes = iter([{"step": 3, "finished": False, "node_ends": True}])
    (tmp_path / "stop").touch()
    assert fit_with_restarts(tiny_config(data), tmp_path) == {"step": 3, "finished": False}


def test_workers_that_end_because_of_a_stop_are_not_started_again(data, tmp_path, monkeypatch):
    def fit(config, mirror, stop_file, follow):
        stop_file.touch()
        raise ray_train.RayActorError

    monkeypatch.setattr(ray_train, "_fit", fit)
    assert fit_with_restarts(tiny_config(data), tmp_path) == {"step": 0, "finished": False}


def test_after_lost_workers_the_progress_says_so_without_their_rate(data, tmp_path, monkeypatch):
    """The next workers begin at step 20. The rate was negative until they were beyond the lost ones."""
    lines, fits = [], []

    def fit(config, mirror, stop_file, follow):
        lines.append(follow._progress.line())
        for step in (20, 25) if fits else (30,):
            line = {"event": "train", "step": step, "seconds": 1.0, "nll": 1.0, "tokens_per_s": 1.0, "lr": 1.0}
            (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
            if fits:
                follow._show()
                lines.append(follow._progress.line())
        if fits:
            return {"step": 60, "finished": True}
        fits.append(1)
        raise ray_train.RayActorError

    monkeypatch.setattr(ray_train, "_fit", fit)
    monkeypatch.setattr(ray_train, "describe_metrics", lambda line: "")
    assert fit_with_restarts(tiny_config(data), tmp_path) == {"step": 60, "finished": True}
    assert (
        "restarting workers" in lines[1] and "30/60 steps" in lines[1] and " 0.0 steps/s" in lines[1] and "left" not in lines[1]
    )
    assert "20/60 steps" in lines[2] and " 0.0 steps/s" in lines[2] and "left" not in lines[2]
    assert "25/60 steps" in lines[3] and not any("-" in line for line in lines)


def test_rank_0_waits_for_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_train, "ORPHANS_S", 0.2)
    (tmp_path / "checkpoints").mkdir()
    orphan = locked(tmp_path / "checkpoints")
    orphan.__enter__()
    with pytest.raises(UserError, match="another process is writing"), ray_train._only_writer(tmp_path):
        pytest.fail("two writers")
    monkeypatch.setattr(ray_train, "ORPHANS_S", 60)
    threading.Timer(0.3, orphan.__exit__, (None, None, None)).start()
    with ray_train._only_writer(tmp_path):
        pass
