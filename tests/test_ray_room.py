"""Rooms of trainings, and workers, on a Ray of two cores and a made-up GPU: what is given is used, and nothing stays behind."""

import json
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from commands import run_here
from ray.util.placement_group import placement_group_table
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from test_training_faults import fit_with_restarts
from toyruns import losses, make_config, without_phases
from training_jobs import tiny_config
from waiting import wait_for

from treenet.experiments import ray_cells
from treenet.experiments.grid import CellWork
from treenet.experiments.ledger import DONE, FAILED, Cell, Entry, Ledger
from treenet.experiments.ray_cells import MAX_FAILURES, run_cells_with_ray
from treenet.extras.tuning.ray_trials import cpus_of_trial
from treenet.extras.tuning.trials import TuningConfig
from treenet.jobs import ray_train
from treenet.jobs.ray_room import ON_HEAD, Room, Rooms, given_to_training, refuse_more_than_there_is
from treenet.jobs.train_job import is_the_worker
from treenet.jobs.train_run import run_training
from treenet.runs.mirror import STOP_FILE
from treenet.runs.ray_metrics import FAILURES, GAUGES, count_failure
from treeproc.common import ray_session
from treeproc.common.ray_internals import without_cluster_processes
from treeproc.common.ray_session import refuse_without_gpu
from treeproc.common.settings import UserError, build_settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_gpu():
    ray.shutdown()  # of a module that ran before in this process
    with without_cluster_processes():
        fast = {"metrics_report_interval_ms": 1000}  # a test waits for metrics
        ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, _system_config=fast)
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


# Cells of a study.


def test_a_room_with_helpers_waits_for_the_memory_of_the_head():
    with Rooms([{"CPU": 1.0}], ON_HEAD) as fits, Rooms([{"CPU": 1.0}], [{**ON_HEAD[0], "memory": 1e15}]) as too_large:
        too_large.want(1)
        fits.want(1)
        wait_for(fits.take, seconds=60).give_back()
        assert too_large.take() is None
        assert too_large.describe().endswith(", and 1000000000 MB on the head")
    wait_for(lambda: not groups(), seconds=60)


def run_cell(folder, config, train) -> Entry:
    """Run a cell whose training is `train`, without functions of the tests, which its process cannot load."""
    cell = Cell("cell", {}, config, folder / "cells" / "cell", "d")
    ledger = Ledger.open(folder, [cell])
    run_cells_with_ray([cell], CellWork(train, lambda folder: {"bleu": 1.0}), ledger, None)
    wait_for(lambda: not groups(), seconds=60)
    return ledger.entries["cell"]


@pytest.mark.parametrize(("settings", "gpu"), [((), ""), (("use_gpu=true",), "0")])
def test_a_cell_of_one_worker_trains_in_its_room_without_ray_train(data, tmp_path, settings, gpu):
    """Ray Train's controller took memory on the node, and two helpers of a cell took 226 MB on the head."""

    def train(config, folder):
        seen = {
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "threads": torch.get_num_threads(),
            "alone": is_the_worker(config),
        }
        (folder / "seen.json").write_text(json.dumps(seen | ray.get_runtime_context().get_assigned_resources()))
        return SimpleNamespace(finished=True)

    assert run_cell(tmp_path, tiny_config(data, "workers=1", *settings), train).status == DONE
    seen = json.loads((tmp_path / "cells" / "cell" / "seen.json").read_text())
    assert (seen["gpu"], seen["alone"], seen.get("GPU", 0), seen.get("CPU", 0)) == (gpu, True, bool(gpu), not gpu)
    assert gpu or seen["threads"] == 1


def test_a_cell_of_one_worker_writes_the_bytes_of_one_process(data, tmp_path):
    config = tiny_config(data, "workers=1", "max_steps=10", "checkpoint_every=5", "validate_every=5")
    assert run_cell(tmp_path, config, run_training).status == DONE
    run_training(config.model_copy(update={"workers": 0}), tmp_path / "here")
    there = tmp_path / "cells" / "cell"
    assert losses(there) == losses(tmp_path / "here") and "workers: 1" in (there / "config.yaml").read_text()
    found = {path.relative_to(there) for path in there.rglob("*.safetensors")}
    assert len(found) == 3, found
    for path in [*found, Path("run.json")]:
        assert (there / path).read_bytes() == (tmp_path / "here" / path).read_bytes(), path


@pytest.mark.parametrize("dies", [True, False])
def test_a_cell_of_one_worker_begins_again_in_another_process(data, tmp_path, dies, capsys):
    def train(config, folder):
        (folder / str(os.getpid())).touch()
        if dies and len(list(folder.glob("[0-9]*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if not dies:
            raise ValueError("of no kind")
        return SimpleNamespace(finished=True)

    entry = run_cell(tmp_path, tiny_config(data, "workers=1"), train)
    assert (entry.status, entry.starts) == ((DONE, 2) if dies else (FAILED, 1 + MAX_FAILURES))
    assert len(list((tmp_path / "cells" / "cell").glob("[0-9]*"))) == entry.starts
    assert dies or "cell: interrupted after 0:00: ValueError: of no kind; see" in capsys.readouterr().err


def test_a_cell_leaves_a_node_that_announces_its_end(data, tmp_path, monkeypatch, capsys):
    """It saves, and continues when there is room elsewhere. That is no failure."""

    def train(config, folder):
        first = not (folder / "began").exists()
        (folder / "began").touch()
        while first and not (folder / STOP_FILE).exists():
            time.sleep(0.05)
        return SimpleNamespace(finished=not first)

    node, began = ray.get_runtime_context().get_node_id(), tmp_path / "cells" / "cell" / "began"
    calls = iter([{node}] * 3)  # then the node is gone
    monkeypatch.setattr(ray_cells, "nodes_called_back", lambda: next(calls, set()) if began.exists() else set())
    monkeypatch.setattr(ray_cells, "MAX_FAILURES", 0)
    monkeypatch.setattr(ray_cells, "POLL_S", 0.2)
    assert run_cell(tmp_path, tiny_config(data, "workers=1"), train).starts == 2
    assert "cell: interrupted after 0:00: the cluster takes its node back" in capsys.readouterr().err


def test_metrics_of_a_training_are_on_rays_endpoint_as_the_dashboard_asks(data, tmp_path, repository):
    run_training(tiny_config(data, "workers=0", "max_steps=10", "log_every=5"), tmp_path / "observed")
    count_failure("observed")
    [node] = ray.nodes()

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as answer:
            lines = [line for line in answer.read().decode().splitlines() if 'run="observed"' in line]
        return {line.partition("{")[0]: float(line.split()[-1]) for line in lines}

    queries = (repository / "workflows" / "clusters" / "grafana.json").read_text()
    asked = set(re.findall(r"ray_tree_attention_\w+", queries))
    assert asked == {f"ray_{name}" for name, _ in GAUGES.values()} | {f"ray_{FAILURES}_total"}
    found = wait_for(lambda: (found := scrape()).keys() >= asked and found, seconds=100)
    assert found["ray_tree_attention_updates"] == 10 and found["ray_tree_attention_failures_total"] == 1
    assert found["ray_tree_attention_tokens_per_second"] > 0 and 0 <= found["ray_tree_attention_data_wait"] < 1
