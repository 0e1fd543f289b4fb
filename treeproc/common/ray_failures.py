"""Failures of Ray itself as one line: a node or a process that died, memory that ran out, a connection that broke."""

import os
import select
import sys
import threading
from contextlib import suppress

from treeproc.common.errors import one_line
from treeproc.common.messages import warn
from treeproc.common.ray_internals import logs_folder, raylet_pid

# Exit status of a command that failed although its input is right.
FAILED = 1
# Characters of Ray's own message.
_MOST = 300


def describe_ray_failure(error: BaseException) -> str | None:
    """Return the message for a user when Ray failed; None for all other errors, also for those of our code in Ray's processes."""
    exceptions = sys.modules.get("ray.exceptions")
    if exceptions is None or not type(error).__module__.startswith("ray."):
        return None
    if isinstance(error, exceptions.RayTaskError):
        return describe_ray_failure(error.cause) if isinstance(error.cause, BaseException) else None
    if failures := getattr(error, "worker_failures", None):  # of Ray Train, by rank
        return describe_ray_failure(next(iter(failures.values())))
    what = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    what = ": ".join(filter(None, [type(error).__name__, what]))
    room = isinstance(error, exceptions.OutOfMemoryError | exceptions.ObjectStoreFullError | exceptions.OutOfDiskError)
    return _with_hint(what, "choose nodes with more memory and disk space; " if room else "")


def _with_hint(what: str, first: str = "") -> str:
    logs = f"; Ray's logs are in {logs_folder()}" if logs_folder() else ""
    return f"Ray failed ({one_line(what, _MOST)}); {first}the same command continues{logs}"


def end_with_the_node() -> None:
    """End this process, from now on, with one line if Ray's node on this machine dies before `ray.shutdown`.

    Then this process cannot go on. Ray itself would end it without a word as soon as it touches the object store. As after any
    kill, the same command continues.
    """
    pid = raylet_pid()
    if pid is None:
        return
    with suppress(OSError):  # it has ended already, or the system has no such descriptor
        threading.Thread(
            target=_watch, args=(os.pidfd_open(pid), _with_hint("its node on this machine died")), daemon=True
        ).start()


def _watch(raylet: int, message: str) -> None:
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.poll()
    os.close(raylet)
    import ray

    if not ray.is_initialized():  # `ray.shutdown` has ended the node
        return
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        warn(f"{chr(10) if sys.stderr.isatty() else ''}error: {message}")  # a bar may be on the line
    os._exit(FAILED)
