"""Studies, searches, preprocessing, training and servers on a cluster that starts with no node, under Ray's own autoscaler.

They state what they need, so that the cluster grows; they take what comes, and give it back.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from search_runs import write_run, write_vocabulary

pytestmark = pytest.mark.slow

TINY = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "optimizer": {"learning_rate": 5e-3, "warmup_steps": 10},
    "batch": {"max_tokens": 64},
    "decoding": {"beam_size": 2},
    "max_steps": 300,
    "log_every": 10,
    "checkpoint_every": 100,
    "validate_every": 100,
    "workers": 1,
}
STUDY = {**TINY, "grid": {"fractions": [0.5, 1.0], "seeds": [1, 2], "bootstrap_samples": 100}}
SEARCH = {**TINY, "tune": {"trials": 4, "systems": {"transformer": {"model": {"name": "transformer"}}}, "stop_early": False}}


def run_job(name: str, folder: Path, data: Path, settings: dict) -> dict:
    (folder / "data").symlink_to(data)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, str(Path(__file__).parent / "autoscaling_jobs.py"), name, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    job = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment | {"RAY_AUTH_MODE": "disabled"})
    assert job.returncode == 0, job.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def grows_and_shrinks(nodes: list, most: int = 3) -> None:
    counts = [count for _, count in nodes]
    assert counts[0] == counts[-1] == 0 and max(counts) == most, nodes


@pytest.mark.cluster
@pytest.mark.timeout(1600)
def test_a_study_grows_the_cluster_and_gives_it_back(data, tmp_path):
    result = run_job("study", tmp_path, data, STUDY)
    assert result["status"] == 0, result["said"][-3000:]
    grows_and_shrinks(result["nodes"])
    # The first node may be there before the first line of progress.
    assert re.search(r"needs 1 CPU, the cluster has \d( \(\d free\))?, waiting for nodes since", result["said"])


@pytest.mark.cluster
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_search_grows_the_cluster_and_gives_it_back(data, tmp_path, workers):
    result = run_job("search", tmp_path, data, {**SEARCH, "workers": workers})
    assert result["status"] == 0, result["said"][-3000:]
    grows_and_shrinks(result["nodes"])


@pytest.mark.cluster
@pytest.mark.timeout(1600)
def test_preprocessing_grows_the_cluster_and_gives_it_back(data, tmp_path):
    for result in run_job("preprocessing", tmp_path, data, {}).values():
        grows_and_shrinks(result["nodes"])
        assert result["results"] == list(range(24))


@pytest.mark.cluster
@pytest.mark.timeout(1600)
def test_a_demand_ends_with_its_killed_driver(data, tmp_path):
    counts = [count for _, count in run_job("killed", tmp_path, data, STUDY)["nodes"]]
    assert counts[-1] == 0 and max(counts) > 0


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_training_that_waits_says_for_what_and_stops_at_once(data, tmp_path):
    result = run_job("waiting", tmp_path, data, TINY)
    assert "needs 4 CPUs, the cluster has" in result["said"] and "waiting for nodes since" in result["said"]
    assert result["status"] == 143 and result["seconds"] < 60, result


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_server_grows_the_cluster_and_gives_it_back(data, tmp_path):
    write_run(tmp_path / "run", write_vocabulary(tmp_path / "vocabulary"))
    result = run_job("serving", tmp_path, data, {})
    grows_and_shrinks(result["nodes"], most=2)
    assert "needs 2 CPUs, the cluster has 0, waiting for nodes since" in result["said"]
