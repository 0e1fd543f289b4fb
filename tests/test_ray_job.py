"""The actor pool on real clusters: nodes that see other files, actors that die, nodes that come later."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treeproc.common.settings import UserError
from treeproc.stages.ray_job import _JobRunner

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
def test_processes_stay_from_step_to_step_and_a_killed_one_is_replaced(tmp_path):
    steps = run_job("tasks", tmp_path)
    assert all(step["numbers"] == list(range(8)) for step in steps.values())
    assert steps["first"]["died"] and not steps["second"]["died"]
    assert set(steps["first"]["processes"]) & set(steps["second"]["processes"])


@pytest.mark.cluster
def test_the_pool_grows_from_no_core_to_two_nodes(tmp_path):
    result = run_job("growing", tmp_path)
    assert result == {"before": 0, "numbers": list(range(8)), "started": 2, "died": False, "left": []}


def test_an_actor_on_a_late_node_looks_for_the_folder(tmp_path, monkeypatch):
    class Forbidden:
        def __init__(self):
            raise UserError("built")

    monkeypatch.setattr("treeproc.stages.ray_job._PAUSE_S", 0.0)
    actor = _JobRunner(Forbidden, {}, tmp_path / "token")
    assert f"does not see {tmp_path}" in actor({"job": "{}"})["error"]
    (tmp_path / "token").touch()
    assert _JobRunner(Forbidden, {}, tmp_path / "token")({"job": "{}"})["error"] == "built"
