"""Waiting for what another thread, process or program does. Servers that tests start choose their ports themselves."""

import re
import subprocess
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(
    condition: Callable[[], Found],
    process: subprocess.Popen | BaseProcess | None = None,
    seconds: float = 200,
    log: Path | None = None,
    pause: float = 0.02,
) -> Found:
    """Return the first true value of the condition. It must come within so many seconds and before the end of the process."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        ended = process.poll() if isinstance(process, subprocess.Popen) else process and process.exitcode
        assert ended is None and time.monotonic() < deadline, log and log.read_text()[-3000:]
        time.sleep(pause)
    return found


def wait_for_line(server: subprocess.Popen | BaseProcess, log: Path, pattern: str) -> str:
    """Return the first group of the pattern in what the server writes, as the port that it chose."""
    return wait_for(lambda: re.search(pattern, log.read_text()), server, 100, log)[1]
