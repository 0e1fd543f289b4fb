"""Shared by all tests: repository paths, threads, the command line as a user has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent

# Sums come out differently with other numbers of threads; one in this process, one in those that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# A cluster that happens to run on this machine is none of the tests' business.
os.environ.setdefault("RAY_ADDRESS", "local")
# Ray's workers are nice to other processes, and get next to nothing where these are busy.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def run_workflow():
    """Run `python workflows/NAME ARGS...` to its end; returns the completed process with its output."""

    def run(name: str, *args: object, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, str(REPOSITORY / "workflows" / name), *map(str, args)]
        options.setdefault("env", os.environ.copy())
        return subprocess.run(command, capture_output=True, text=True, timeout=280, **options)

    return run
