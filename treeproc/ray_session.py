"""Connect to a Ray cluster or start an embedded one: the same for preprocessing and training."""

import logging
import os
import signal
import socket
import threading
from pathlib import Path

import ray


def start_ray() -> None:
    """Connect to the cluster of a submitted job or of `ray start` on this machine, else start Ray in this process.

    RAY_ADDRESS names another cluster; `local` starts Ray in this process whatever runs on the machine.
    Workers' own output stays in Ray's logs: the jobs report progress themselves. The caller's SIGTERM
    handler is kept, which `ray.init` replaces by its own.
    """
    if ray.is_initialized():
        return
    options: dict = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    if address == "local" or (address is None and not _cluster_is_running()):
        options |= {"address": "local", "include_dashboard": False}
        # Ray's C++ side writes notes about its own actors to the terminal.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if threading.current_thread() is not threading.main_thread():
        ray.init(**options)
        return
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(**options)
    signal.signal(signal.SIGTERM, handler)


def _cluster_is_running() -> bool:
    """Whether the cluster that `ray start` noted on this machine answers.

    Ray itself would wait for minutes for one that was killed or did not survive a reboot.
    """
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        host, _, port = note.read_text().strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5):
            return True
    except (OSError, ValueError):
        return False
