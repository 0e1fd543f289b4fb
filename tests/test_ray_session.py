"""Starts of Ray: clusters that are gone, machines that are busy, and the messages."""

import socket
import subprocess
import sys

import pytest

from treeproc.common.ray_session import _cluster_is_running, there_is_a_cluster

# A start that fails when its processes are there, as on a busy machine, and the next one; then one that fails twice.
SLOW_STARTS = """
from pathlib import Path
import ray
from ray._private import services
from treeproc.common.ray_session import start_ray
from treeproc.common.settings import UserError

def children():
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}

def names(pids):
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids if Path(f"/proc/{pid}").exists()}

get_node, of_first = services.get_node, set()

def slow_once(*arguments):
    if not of_first:
        of_first.update(children())
        assert {"raylet", "gcs_server"} <= names(of_first)
        raise Exception("The current node timed out during startup. This could happen because ...")
    return get_node(*arguments)

services.get_node = slow_once
start_ray()
assert ray.get(ray.remote(lambda: 7).remote()) == 7
assert not {"raylet", "gcs_server"} & names(of_first), "the first start goes on"
ray.shutdown()

tries = []

def never(**options):
    tries.append(options)
    raise Exception("The current node timed out during startup.\\nMore of it.")

ray.init = never
try:
    start_ray()
except UserError as error:
    print(error)
assert len(tries) == 2
"""


def test_a_slow_start_is_tried_once_more_and_then_told_in_one_line(repository):
    run = subprocess.run([sys.executable, "-c", SLOW_STARTS], capture_output=True, text=True, cwd=repository, timeout=280)
    assert run.returncode == 0, run.stderr
    assert run.stdout == (
        "cannot start Ray on this machine (The current node timed out during startup.; tried twice); run the same command again "
        "when the machine is less busy, or with workers=0, which needs no Ray\n"
    )
    assert run.stderr == "starting Ray ...\n" * 2


@pytest.mark.parametrize(("address", "there"), [("local", False), ("ray://somewhere:1", True), ("10.0.0.1:6379", True)])
def test_the_environment_names_a_cluster(monkeypatch, address, there):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert there_is_a_cluster() == there


def test_only_a_cluster_that_answers_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not _cluster_is_running()
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        note.write_text(f"127.0.0.1:{port}")
        assert _cluster_is_running()
    assert not _cluster_is_running()


@pytest.mark.parametrize("content", ["", "nonsense", "127.0.0.1:notaport"])
def test_a_broken_note_counts_as_none(tmp_path, monkeypatch, content):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(content)
    assert not _cluster_is_running()
