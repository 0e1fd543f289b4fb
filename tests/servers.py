"""Servers of other programs that tests start, each on a port that it chooses itself."""

import re
import subprocess
import time
from pathlib import Path


def wait_for_line(server: subprocess.Popen, log: Path, pattern: str) -> str:
    """Return the first group of the pattern in what the server writes, as the port that it chose."""
    deadline = time.monotonic() + 100
    while not (found := re.search(pattern, log.read_text())):
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found[1]
