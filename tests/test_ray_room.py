"""Rooms of trainings, and workers, on a Ray of two cores and a made-up GPU: what is given is used, and nothing stays behind."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from commands import run_here
from ray.util.placement_group import placement_group_table
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from test_training_faults import fit_with_restarts
from toyruns import make_config, without_phases
from training_jobs import tiny_config
from waiting import wait_for

from treenet.extras.tuning.ray_trials import cpus_of_trial
from treenet.extras.tuning.trials import TuningConfig
from treenet.jobs import ray_train
from treenet.jobs.ray_room import Room, given_to_training, refuse_more_than_there_is
from treeproc.common import ray_session
from treeproc.common.ray_internals import without_cluster_processes
from treeproc.common.ray_session import refuse_without_gpu
from treeproc.common.settings import UserError, build_settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_gpu():
    ray.shutdown()  # of a module that ran before in this process
    with without_cluster_processes():
        ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def there(bundle: dict[str, float]) -> Room:
    room = Room.ask([bundle])
    wait_for(room.node, seconds=60)
    return room


def groups() -> list[str]:
    return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_a_cell_that_has_the_last_gpu_asks_it_for_its_precision(data):
    """A request beside the room would wait for ever for the GPU of this room."""
    room, answers = there({"GPU": 1.0}), []

    def ask() -> None:
        with given_to_training(room):
            answers.append(ray_train.precision_of_workers(make_config(data, "use_gpu=true", "workers=1")))

    asking = threading.Thread(target=ask, daemon=True)  # Ray would start a process of a task, and load PyTorch there
    asking.start()
    asking.join(60)
    room.give_back()
    assert answers and answers[0] in ("auto", "float32", "tf32", "bf16", "fp16")


def test_the_room_that_replaced_a_given_one_ends_with_it(data):
    """A cell that lost its workers asks for another room. If its process dies then, Ray keeps this demand."""

    def lose(room: Room) -> None:  # without functions of the tests, which its process cannot load
        with given_to_training(room):
            for _ in range(2):  # workers are lost again
                room.give_back()
                room = Room.ask([{"CPU": 2.0}])
                while not room.node():
                    time.sleep(0.02)
            os._exit(1)

    room = there({"CPU": 2.0})
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(ray.remote(num_cpus=0, max_retries=0)(lose).remote(room))
    assert groups() == ["CREATED"]
    room.give_back()
    wait_for(lambda: not groups(), seconds=60)


def test_a_node_that_ends_takes_its_given_room_with_it(data, tmp_path, monkeypatch):
    """Otherwise the cell would hold this room, and wait for a second one."""
    outcomes = iter([{"step": 1, "finished": False, "node_ends": True}, {"step": 2, "finished": True}])

    class Trainer(ray_train.InterruptibleTrainer):
        def fit(self):
            return SimpleNamespace(return_value=next(outcomes))

    monkeypatch.setattr(ray_train, "InterruptibleTrainer", Trainer)
    room = there({"CPU": 1.0})
    other = there({"CPU": 1.0})  # the cluster has no more room
    with given_to_training(room):
        assert fit_with_restarts(tiny_config(data, "workers=1"), tmp_path)["finished"]
    other.give_back()
    assert not groups()


def test_two_workers_translate_to_the_bytes_of_one_process(tmp_path):
    run, random = write_run(tmp_path / "run", write_vocabulary(tmp_path / "data")), np.random.default_rng(0)
    lines = [" ".join(random.choice(SEARCH_WORDS, random.integers(1, 9))) for _ in range(23)]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in [*lines, "ba\x01", *lines[::-1]]))
    command = ["translate.py", "--out", run, f"input={tmp_path / 'in.txt'}", "lines_at_once=4", "--json"]
    here = run_here(*command)
    there = run_here(*command, "workers=2", f"output={tmp_path / 'out.json'}")
    assert (here.returncode, there.returncode, there.stdout) == (0, 0, ""), there.stderr
    assert (tmp_path / "out.json").read_text() == here.stdout and here.stdout.count("\n") == 47
    said, said_there = without_phases(here.stderr), without_phases(there.stderr)
    assert len(said) == 3 and said_there[-3:] == said


def test_a_trial_never_asks_for_more_cpus_than_a_node_has(data):
    """A search with `workers: 0` shares the CPUs. Those of two nodes together are in no node, so such a trial never begins."""

    def cpus(nodes: list[dict[str, float]], parallel: int | None = None, use_gpu: bool = False) -> int:
        settings = {"data": str(data), "workers": 0, "use_gpu": use_gpu, "tune": {"parallel": parallel}}
        return cpus_of_trial(build_settings(TuningConfig, settings, "here"), nodes)

    small, with_gpus = {"CPU": 4.0}, {"CPU": 96.0, "GPU": 8.0}
    assert cpus([small]) == 1 and cpus([small], parallel=2) == 2
    assert cpus([small, small], parallel=1) == 4
    assert cpus([], parallel=2) == cpus([{"CPU": 0.0}]) == 1
    assert cpus([small, with_gpus], use_gpu=True) == 12


def test_more_workers_than_there_are_cores_are_refused_unless_the_node_has_died(data, monkeypatch):
    """A node that had died had 0 CPUs, and the advice was to lower the workers."""
    monkeypatch.setattr(ray_session, "_embedded", True)
    config, there = tiny_config(data, "workers=3"), {"CPU": 2.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    with pytest.raises(UserError, match="workers = 3 need as many CPUs, but Ray on this machine has 2; lower workers"):
        refuse_more_than_there_is(config)
    there.clear()
    refuse_more_than_there_is(config)


def test_a_search_for_gpus_is_refused_where_none_can_come(monkeypatch):
    monkeypatch.setattr(ray_session, "_embedded", True)
    refuse_without_gpu(True, "set use_gpu=false")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    refuse_without_gpu(False, "set use_gpu=false")
    with pytest.raises(UserError, match="Ray sees no GPU on this machine; set use_gpu=false"):
        refuse_without_gpu(True, "set use_gpu=false")
    monkeypatch.setattr(ray_session, "_embedded", False)
    refuse_without_gpu(True, "set use_gpu=false")
