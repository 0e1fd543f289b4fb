"""workflows/clusters/spot_notice.py against a server. test_training_faults.py drains a real node with it."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from metadata_service import MetadataService, metadata_service
from waiting import wait_for

pytestmark = pytest.mark.slow

# In place of Ray's command: it notes its arguments, and fails the first time.
RAY = """#!/bin/bash
echo "$@ $RAY_ADDRESS" >> {folder}/called
[[ $(wc -l < {folder}/called) -gt 1 ]]
"""


@pytest.fixture
def service() -> Iterator[MetadataService]:
    with metadata_service() as service:
        yield service


@pytest.fixture
def poller(service, repository, tmp_path) -> Iterator[subprocess.Popen]:
    (tmp_path / "ray").write_text(RAY.format(folder=tmp_path))
    (tmp_path / "ray").chmod(0o755)
    # A proxy of the environment is not asked.
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address}
    environment["http_proxy"] = "http://127.0.0.1:1"
    script = (repository / "workflows" / "clusters" / "spot_notice.py").read_text()
    (tmp_path / "quick.py").write_text(script.replace("POLL_S, DRAIN_S = 5, 60", "POLL_S, DRAIN_S = 0.2, 60"))
    command = [sys.executable, tmp_path / "quick.py", "--node-id=abc"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


def test_the_node_drains_at_the_notice_and_is_tried_again(service, poller, tmp_path):
    wait_for(lambda: service.asked > 2, poller)
    assert not (tmp_path / "called").exists()
    service.announce(119)
    assert poller.wait(30) == 0
    calls = [line.split() for line in (tmp_path / "called").read_text().splitlines()]
    assert len(calls) == 2
    for *drain, left, node, address in calls:
        assert address == "auto"  # Ray never starts a cluster of its own here
        assert drain[:2] == ["drain-node", "--reason=DRAIN_NODE_REASON_PREEMPTION"] and node == "--node-id=abc"
        assert 90 < int(left.removeprefix("--deadline-remaining-seconds=")) < 119


@pytest.mark.parametrize("notice", ["", "no JSON", '{"action": "stop"}', "[]"])
def test_a_damaged_notice_is_told_once_and_asked_for_again(service, poller, tmp_path, notice):
    service.notice = notice
    wait_for(lambda: service.asked > 3, poller)
    [line] = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("warning: cannot ask") and not (tmp_path / "called").exists()
    service.announce(60)
    assert poller.wait(30) == 0


def test_a_past_time_drains_at_once(service, poller, tmp_path):
    service.announce(-5)
    assert poller.wait(30) == 0
    assert "--deadline-remaining-seconds=0 " in (tmp_path / "called").read_text()


def test_a_service_that_does_not_answer_is_asked_again(service, poller, tmp_path):
    service.broken = True
    wait_for(lambda: service.asked > 2, poller)
    service.broken = False
    service.announce(60)
    assert poller.wait(30) == 0
    assert (tmp_path / "log").read_text().startswith("warning: cannot ask")
