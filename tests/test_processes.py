"""Processes that share work, and those that run the tests: one that dies costs the test that it was in, and no other."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from treeproc.common import processes as work
from treeproc.common.errors import UserError, check_flag

pytestmark = pytest.mark.slow

ENDED = "def test_{}(): pass\n"
DIES = "import os, time\ndef test_dies(): time.sleep(1); os._exit(1)\ndef test_after_it(): pass\n"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_run_ends_when_a_process_dies(processes, tmp_path):
    """pytest-xdist 3.8 alone gives modules out again that have ended, and then waits for ever."""
    for module in range(6):
        (tmp_path / f"test_{module}.py").write_text("".join(map(ENDED.format, "ab" if module < 3 else "a")))
    (tmp_path / "test_2_dies.py").write_text(DIES)
    (tmp_path / "conftest.py").write_text("from scheduling import pytest_xdist_make_scheduler\n")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "xdist", "-n", processes]
    # Without other plugins, whose start takes two CPU seconds in each process.
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [*command, "--dist", "loadfile", "--no-loadscope-reorder"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "1 failed, 10 passed" in run.stdout and "crashed while running 'test_2_dies.py::test_dies'" in run.stdout, run.stdout
    assert run.returncode == 1


def with_an_interrupt(number: int) -> tuple[int, bool, bool]:
    """Return three times the number, and whether this process lets Ctrl-C pass: by its mask, and by its handler."""
    os.kill(os.getpid(), signal.SIGINT)
    is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return 3 * number, is_blocked, signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_processes_that_share_work_leave_interrupts_to_the_command():
    before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    found = list(work.map_in_processes(with_an_interrupt, range(5), 2, "works"))
    assert found == [(3 * number, True, True) for number in range(5)]
    assert (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


def test_what_the_begin_of_a_process_raises_is_raised():
    with pytest.raises(UserError, match="^parser.x must be True or False, but is 3$"):
        list(work.map_in_processes(os.path.basename, ["a"], 1, "works", check_flag, ("parser.x", 3)))


def test_an_interrupt_while_processes_start_is_not_lost(monkeypatch):
    class Interrupted(ProcessPoolExecutor):
        def submit(self, function, *job, **options):
            if function is os.getpid:  # the job that starts a process
                os.kill(os.getpid(), signal.SIGINT)
            return super().submit(function, *job, **options)

    monkeypatch.setattr(work, "ProcessPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(work.map_in_processes(with_an_interrupt, range(5), 2, "works"))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
