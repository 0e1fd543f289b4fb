"""Workers and agents of Ray, and commands that start Ray, as forks of the process that those of pytest-xdist come from.

As programs, they load Ray, PyTorch and our packages: one to five CPU seconds each. A fork takes a tenth of a second.
"""

import atexit
import marshal
import os
import pickle
import runpy
import select
import sys
import threading
from functools import wraps
from multiprocessing import forkserver
from pathlib import Path

from ray._private import services
from ray._raylet import Config

REPOSITORY = Path(__file__).resolve().parent.parent
# This runs in place of Python. It sends its command and its open files as `multiprocessing` does, and lives as long as the fork.
PROGRAM = """#!{python} -IS
import _signal, _socket, marshal, os, sys
(theirs, ours), (status, statuses), (end, _), none = os.pipe(), os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR)
files = [theirs, statuses, none, none, 0, 1, 2, end]
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
server.sendmsg([bytes([len(files)])], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
os.close(theirs)
os.close(statuses)
command = marshal.dumps([sys.argv, dict(os.environ)])
with open(ours, "wb") as pickled:
    pickled.write({preparation!r} + b"cforked_ray\\nFork\\nB" + len(command).to_bytes(4, "little") + command + b"\\x85R.")
pid = int.from_bytes(os.read(status, 8), sys.byteorder)
for number in (_signal.SIGINT, _signal.SIGTERM):
    _signal.signal(number, lambda number, frame: os.kill(pid, number))
os._exit(int.from_bytes(os.read(status, 8), sys.byteorder, signed=True) & 255)
"""

# What starts as Python does.
python = sys.executable


class Fork:
    """The command of a program, which `multiprocessing` runs in the fork."""

    def __init__(self, command: bytes):
        (self._program, *argv), self._environment = marshal.loads(command)
        self._argv = argv[argv[0] == "-u" :]

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.setpgid(0, 0)  # Ray ends groups of processes
        *files, end = forkserver.get_inherited_fds()
        for stream, file in enumerate(files):
            os.dup2(file, stream)
            os.close(file)
        sys.stdin = open(0, closefd=False)
        os.environ.clear()
        os.environ.update(self._environment)
        ends = [end]  # that of the program, and that of the node
        if raylet := os.environ.get("RAY_RAYLET_PID"):
            ends.append(os.pidfd_open(int(raylet)))
        threading.Thread(target=lambda: os._exit(len(select.select(ends, [], [])[0])), daemon=True).start()
        Config.initialize("")  # from the environment
        of_tests = tuple(str(REPOSITORY / folder) for folder in ("tests", "benchmarks", "docs"))
        sys.path[:] = [str(Path(self._argv[0]).parent), *(path for path in sys.path if not path.startswith(of_tests))]
        sys.argv = self._argv
        _start_with(self._program)
        try:
            runpy.run_path(self._argv[0], run_name="__main__")
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, int) else bool(exit.code)
        finally:
            atexit._run_exitfuncs()  # not run otherwise
        return 0


def fork_processes_of_ray(folder: Path) -> None:
    """Let each Ray that starts in this process, or in a command of `python`, fork its workers and agents.

    The folder gets the program.
    """
    if sys.version_info >= (3, 14):  # the process to fork from asks for a key
        return
    program = folder / "python"
    address, preparation = forkserver._forkserver._forkserver_address, pickle.dumps({"sys_path": sys.path})
    program.write_text(PROGRAM.format(python=sys.executable, address=address, preparation=preparation))
    program.chmod(0o755)
    # An agent ends when its parent is another one than the node, unless it listens to the node.
    os.environ |= {"RAY_enable_pipe_based_agent_to_parent_health_check": "1"}
    _start_with(str(program))


def _start_with(program: str) -> None:
    global python
    python, start = program, services.start_raylet

    @wraps(start)
    def start_raylet(*arguments: object, **options: object) -> services.ProcessInfo:
        executable, sys.executable = sys.executable, program
        try:
            return start(*arguments, **options)
        finally:
            sys.executable = executable

    services.start_raylet = start_raylet
