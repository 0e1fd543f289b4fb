"""Kills and restarts of a workflow: the shared code of the two kill benchmarks."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from preprocess_million import REPOSITORY, descendants

KINDS = ("driver", "worker", "group")
LIMIT_S = 300  # a longer run has hung


def session_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


def orphans(session: int) -> list[int]:
    """Return processes of a session whose leader is gone. If it has a leader, it is another session by now."""
    found = []
    if Path(f"/proc/{session}").exists():
        return found
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if session_of(int(entry.name)) == session:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def workers_of(driver: int, name: str) -> list[int]:
    """Return the Ray workers below a driver with the name ray::`name`."""
    found = []
    for pid in descendants(driver):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


@dataclass
class Workflow:
    """Starts a workflow with its own Ray, and ends the processes that killed drivers leave behind."""

    script: str  # its file in workflows/
    config: Path
    scratch: Path
    limit_s: float = LIMIT_S
    started: list[int] = field(default_factory=list)
    left: int = 0  # processes of killed drivers that outlived the next run: idle agents of Ray

    @contextmanager
    def run(self, out: Path) -> Iterator[subprocess.Popen]:
        """Run the driver as leader of a session. At the end, processes of earlier ones are ended too."""
        earlier = list(self.started)
        command = [sys.executable, str(REPOSITORY / "workflows" / self.script), "--config", str(self.config), "--out", str(out)]
        # Ray searches RAY_TMPDIR for a cluster to join, and finds none there
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        env |= {"RAY_TMPDIR": str(self.scratch), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with open(self.scratch / "log", "w") as log:
            driver = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        self.started.append(driver.pid)
        try:
            yield driver
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.wait()
                earlier = list(self.started)
            self._end(earlier)

    def end(self) -> None:
        """End all processes of all drivers."""
        self._end(list(self.started))

    def _end(self, sessions: list[int]) -> None:
        for session in sessions:
            pids = orphans(session)
            self.left += len(pids)
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.started.remove(session)

    def finish(self, out: Path) -> float:
        """Run to the end without kills. Returns seconds."""
        begin = time.monotonic()
        with self.run(out) as driver:
            if status := driver.wait(self.limit_s):
                raise SystemExit(f"{self.script} ended with status {status}:\n{self.log()}")
        return time.monotonic() - begin

    def log(self) -> str:
        return (self.scratch / "log").read_text()[-3000:]


def lives(driver: subprocess.Popen, seconds: float) -> bool:
    """Return whether the driver still runs after some time."""
    try:
        driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def wait_for(driver: subprocess.Popen, condition: Callable[[], object]) -> bool:
    """Return whether the driver lived until the condition held. Raises TimeoutExpired if it hangs."""
    deadline = time.monotonic() + LIMIT_S
    while lives(driver, 0.02):
        if condition():
            return True
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(driver.args, LIMIT_S)
    return False


def kill(what: str, driver: subprocess.Popen, workers: Sequence[int], rng: random.Random) -> bool:
    """Send SIGKILL to one of KINDS; False if there is no worker to kill."""
    if what == "worker":
        if workers:
            os.kill(rng.choice(workers), signal.SIGKILL)
        return bool(workers)
    (os.killpg if what == "group" else os.kill)(driver.pid, signal.SIGKILL)
    driver.wait()
    return True
