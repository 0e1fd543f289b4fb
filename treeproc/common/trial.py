"""Another process tries the files of other people, with limits of memory and time, before this process loads them.

What passed is noted in the user's cache folder, which only this user can write to. So a machine tries each file once, also when
many processes of a job load it. Without a cache folder, every process that loads a file tries it.
"""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from treeproc.common.errors import UserError, one_line

CPU_SECONDS = 120  # the largest known models take a tenth
_WALL_SECONDS = 1200  # for a busy machine
_MOST_CHARACTERS = 200
_REFUSED = 2  # exit status if the check raised UserError
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from treeproc.common.trial import run_child; run_child()"
# One thread each; no GPU, whose memory has no such limit.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def try_first(check: str, argument: bytes, memory: int, failed: str, *facts: str) -> None:
    """Call the function `check`, named "module:function", with `argument` in another process that gets `memory` bytes.

    Everything that decides must be in `argument` and `facts`: what passed once is not tried again. Raises UserError, which begins
    with `failed`, if it raises an error or passes a limit. A UserError comes as it is.
    """
    spec = find_spec(check.partition(":")[0])
    code = Path(spec.origin).read_bytes() if spec is not None and spec.origin is not None else b""
    digest = hashlib.sha256(json.dumps([check, memory, facts]).encode() + hashlib.sha256(code).digest() + argument)
    with _note(digest.hexdigest()) as note:
        if note is not None and note.stat().st_size:
            return
        _run(check, argument, memory, failed)
        if note is not None:
            with suppress(OSError):  # of a full disk
                note.write_bytes(b"passed\n")


@contextmanager
def _note(name: str) -> Iterator[Path | None]:
    """Hold the note of a file, which is empty until the file has passed; None if this user has no cache."""
    from treeproc.common.files import file_lock, private_folder  # here, because the child does not need what they import

    with ExitStack() as held:
        note = None
        with suppress(OSError, UserError):
            place = private_folder("tried") / name
            held.enter_context(file_lock(place))
            note = place
        yield note


def _run(check: str, argument: bytes, memory: int, failed: str) -> None:
    command = [sys.executable, "-I", "-c", _START, json.dumps(sys.path), check, str(memory), str(CPU_SECONDS)]
    try:
        done = subprocess.run(
            command, input=argument, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_WALL_SECONDS,
            env=os.environ | _ENVIRONMENT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"{failed}: it takes more than {_WALL_SECONDS} seconds") from None
    if done.returncode == _REFUSED:
        raise UserError(done.stdout.decode())
    if done.returncode == -signal.SIGXCPU:
        raise UserError(f"{failed}: it takes more than {CPU_SECONDS} seconds of one core")
    if done.returncode < 0:
        limit, name = f"{memory / 2**30:.1f} GiB", signal.Signals(-done.returncode).name
        raise UserError(f"{failed}: it is damaged, or takes more than {limit} of memory (its trial ended with {name})")
    if done.returncode:
        raise UserError(f"{failed}: {done.stdout.decode()}")


def run_child() -> None:
    """Call the check of the command line with standard input, within the limits. Ends with a status and a text if it fails."""
    check, memory, seconds = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    try:
        resolve_name(check)(sys.stdin.buffer.read())
    except UserError as error:
        os.write(answer, str(error).encode())
        os._exit(_REFUSED)
    except BaseException as error:  # also a panic of Rust
        is_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        limit = f"it takes more than {memory / 2**30:.1f} GiB of memory"
        os.write(answer, (limit if is_memory else one_line(f"{error}", _MOST_CHARACTERS)).encode())
        os._exit(1)
