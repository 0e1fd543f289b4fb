"""The actor pool on real clusters: nodes that see other files, actors that die, nodes that come later."""

import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from ray.exceptions import RayError
from waiting import wait_for

from treeproc.common.settings import UserError
from treeproc.shards.schema import TEXT_SCHEMA, shard_name
from treeproc.shards.store import ShardRecord, write_shard
from treeproc.stages import ray_late_jobs, run_jobs
from treeproc.stages.ray_job import _JobRunner, from_json, to_json

pytestmark = pytest.mark.slow


def run_job(name: str, folder: Path) -> dict:
    command = [sys.executable, str(Path(__file__).parent / "cluster_jobs.py"), name, str(folder)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert job.returncode == 0, job.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.cluster
def test_a_node_that_does_not_see_the_folder_is_refused_before_any_work(tmp_path):
    result = run_job("nodes", tmp_path)
    if "skip" in result:
        pytest.skip("mount namespaces need rights that this process does not have")
    assert result["seen"]["numbers"] == list(range(8)) and result["seen"]["left"] == []
    assert result["seen"]["inputs"] == [True, False]
    assert "does not see" in result["blind"]["error"] and "storage that all nodes share" in result["blind"]["error"]
    assert result["blind"]["started"] == 0


@pytest.mark.cluster
def test_a_killed_actor_is_replaced(tmp_path):
    result = run_job("dying", tmp_path)
    assert result["numbers"] == list(range(8)) and result["died"] and result["left"] == []


@pytest.mark.cluster
def test_a_shard_whose_actor_hangs_is_made_by_another_process(tmp_path):
    """Ray waited for the actor without end."""
    result = run_job("hanging", tmp_path)
    assert result["numbers"] == list(range(8)) and result["died"] and result["left"] == []
    assert re.search(
        r"warning: job 3 takes more than 4 times as long as others \(0:0\d\); another process tries it, too", result["said"]
    )


class Pipeline:
    """A pipeline of Ray Data whose rows come when a test puts them. It ends with its executor."""

    def __init__(self, *rows: dict):
        self.rows: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._current_executor = SimpleNamespace(shutdown=lambda force: self.rows.put(None))
        self.put(*rows)

    def put(self, *rows: dict) -> None:
        for one in rows:
            self.rows.put(one)

    def iter_batches(self, **options) -> Iterator[pa.Table]:
        while (one := self.rows.get(timeout=60)) is not None:
            yield pa.Table.from_pylist([one])


def row(number: int, seconds: float = 0.001) -> dict:
    return {"number": number, "error": "", "usage": json.dumps({"seconds": seconds})}


@pytest.fixture
def tries(monkeypatch) -> list[int]:
    """Second tries, in this process; that of job 7 dies."""

    def get(number: int) -> dict:
        if number == 7:
            raise RayError
        return row(number)

    monkeypatch.setattr(ray_late_jobs, "ray", SimpleNamespace(wait=lambda tries, timeout: (tries[:1], tries[1:]), get=get))
    monkeypatch.setattr(ray_late_jobs, "POLL_S", 0.01)
    monkeypatch.setattr(ray_late_jobs, "LEAST_S", 0.05)
    return []


def test_late_jobs_are_tried_once_more_and_the_first_result_counts(tries):
    pipeline = Pipeline(row(0), row(4), row(2))

    def try_again(number: int, median: float) -> int:
        tries.append(number)
        if number == 7:  # its second try dies, and the first one ends later
            threading.Timer(0.5, pipeline.put, [row(3), row(7)]).start()
        return number

    found = [one["number"] for one in ray_late_jobs.first_results(pipeline, (0, 2, 3, 4, 7), try_again)]
    assert found == [0, 4, 2, 3, 7] and tries == [3, 7]
    wait_for(lambda: pipeline.rows.empty(), seconds=10)  # the end of the executor ends the thread that reads


@pytest.mark.parametrize("first", [(), (row(0),), (row(0, seconds=60.0),)], ids=["no result", "many jobs", "slow jobs"])
def test_jobs_are_not_tried_again_before_the_end(tries, monkeypatch, first):
    monkeypatch.setattr(ray_late_jobs, "MOST_LATE", 3 if first == (row(0),) else 64)
    pipeline = Pipeline(*first)
    threading.Timer(0.5, pipeline.put, [row(number) for number in range(len(first), 5)]).start()
    found = ray_late_jobs.first_results(pipeline, range(5), lambda number, median: tries.append(number))
    assert [one["number"] for one in found] == list(range(5)) and not tries


def test_a_late_shard_is_named_with_its_longest_line(tmp_path):
    (tmp_path / "text").mkdir()
    lines = [{"example_id": 7, "source": "a bc", "target": "d"}, {"example_id": 9, "source": "a", "target": "d" * 1234}]
    facts = {"split": "train", "index": 0, "fingerprint": "f"}
    shard = write_shard(tmp_path / "text", shard_name("train", 0, 1), lines, TEXT_SCHEMA, **facts)
    described = "train-00000-of-00001.arrow (its longest line has 1,234 characters, in example 9)"
    assert run_jobs._describe_shard(tmp_path / "text", shard) == described
    for other in (replace(shard, bytes=shard.bytes + 1), replace(shard, name="train-00001.arrow")):  # of another stage
        assert run_jobs._describe_shard(tmp_path / "text", other) == other.name


@pytest.mark.cluster
def test_processes_stay_from_step_to_step_and_a_killed_one_is_replaced(tmp_path):
    steps = run_job("tasks", tmp_path)
    assert all(step["numbers"] == list(range(8)) for step in steps.values())
    assert steps["first"]["died"] and not steps["second"]["died"]
    assert set(steps["first"]["processes"]) & set(steps["second"]["processes"])


@pytest.mark.cluster
def test_the_pool_grows_from_no_core_to_two_nodes(tmp_path):
    result = run_job("growing", tmp_path)
    assert result == {"before": 0, "numbers": list(range(8)), "started": 2, "died": False, "left": []}


def test_jobs_hold_records_of_shards_at_any_depth():
    record = ShardRecord("train-0.arrow", "train", 0, 1, 2, "a" * 64, "f", counts={"label.NP": 3})
    job = {
        "text": record,
        "shards": [{"parsed": record, "first": 1}, [record, [4]]],
        "words": {"shard_record": 5},
        "window": None,
    }
    assert from_json(to_json(job)) == job and from_json(to_json(record)) == record
    with pytest.raises(TypeError, match="Path is not JSON"):
        to_json({"folder": Path("x")})


def test_an_actor_on_a_late_node_looks_for_the_folder(tmp_path, monkeypatch):
    class Forbidden:
        def __init__(self):
            raise UserError("built")

    monkeypatch.setattr("treeproc.stages.ray_job._PAUSE_S", 0.0)
    actor = _JobRunner(Forbidden, {}, tmp_path / "token")
    assert f"does not see {tmp_path}" in actor({"job": "{}"})["error"]
    (tmp_path / "token").touch()
    assert _JobRunner(Forbidden, {}, tmp_path / "token")({"job": "{}"})["error"] == "built"
