"""Connection to a Ray cluster, or start of an embedded one, for preprocessing and training."""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from treeproc.common.errors import UserError
from treeproc.common.progress import phase
from treeproc.common.ray_internals import end_failed_start, noted_address


def start_ray() -> None:
    """Connect to the cluster of a submitted job or of `ray start` on this machine, else start Ray in this process.

    RAY_ADDRESS names another cluster. With `local`, Ray starts in this process even if a cluster runs on the machine.
    Workers' own output stays in Ray's logs: the jobs report progress themselves. If the start fails, it is tried once more,
    because the machine may be busy. Raises UserError if that fails too.
    """
    import ray  # commands without Ray may call `there_is_a_cluster`

    if ray.is_initialized():
        return
    options: dict = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not there_is_a_cluster():
        options |= {"address": "local", "include_dashboard": False}
        # Ray's C++ side writes notes about its own actors to the terminal.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with phase("starting Ray", after=0), _sigterm_kept():
        try:
            _try_to_start(options)
        except Exception:  # Ray raises many kinds, Exception itself among them
            try:
                _try_to_start(options)
            except Exception as error:
                raise UserError(_describe_failure(error)) from None


def _try_to_start(options: dict) -> None:
    """`ray.init`; where it fails, nothing of it goes on."""
    import ray

    try:
        with _without_notice():
            ray.init(**options)
    except Exception as error:
        end_failed_start(error)
        ray.shutdown()
        raise


def _describe_failure(error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
    if there_is_a_cluster():
        return f"cannot connect to the Ray cluster ({reason}); start the cluster again, or set RAY_ADDRESS=local"
    return (
        f"cannot start Ray on this machine ({reason}; tried twice); run the same command again when the machine is less busy, or "
        "with workers=0, which needs no Ray"
    )


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """The caller's handler of SIGTERM, which `ray.init` replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _without_notice() -> Iterator[None]:
    """Standard error without the line in which Ray's C++ side says that it took its log level from the environment.

    It is written before that level counts. What else is written meanwhile follows at the end.
    """
    try:
        kept = os.dup(2)
    except OSError:  # this process has no standard error
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if b"RAY_BACKEND_LOG_LEVEL" not in line:
                    os.write(2, line)


def there_is_a_cluster() -> bool:
    """Whether `start_ray` would connect to a cluster."""
    address = os.environ.get("RAY_ADDRESS")
    return _cluster_is_running() if address is None else address != "local"


def _cluster_is_running() -> bool:
    """Whether the cluster that `ray start` noted on this machine answers.

    Ray itself would wait for minutes for one that was killed or did not survive a reboot.
    """
    address = noted_address()
    if address is None:
        return False
    try:
        with socket.create_connection(address, timeout=5):
            return True
    except (OSError, OverflowError):  # the latter: no port has this number
        return False
