"""Connection to a Ray cluster, or start of an embedded one, and failures of Ray itself as one line."""

import logging
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from treeproc.common.errors import UserError, one_line
from treeproc.common.messages import phase, warn
from treeproc.common.ray_internals import (
    end_failed_start,
    logs_folder,
    note_unread,
    raylet_pid,
    read_note,
    read_other_notes,
    shorten_notices,
    sigterm_kept,
    use_token,
    without_cluster_processes,
)

# Exit status of a command that failed although its input is right.
FAILED = 1
# Characters of Ray's own message.
_MOST = 300
# Seconds in which a cluster must answer.
ANSWER_S = 5.0
# The first bytes of a client of HTTP/2, which gRPC speaks, with an empty frame of settings; and the kind of frame that answers.
_HELLO, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", b"\4"

# Whether `start_ray` started Ray in this process.
_embedded = False


def describe_ray_failure(error: BaseException) -> str | None:
    """Return the message for a user when Ray failed; None for all other errors, also for those of our code in Ray's processes."""
    exceptions = sys.modules.get("ray.exceptions")
    if exceptions is None or not type(error).__module__.startswith("ray."):
        return None
    if isinstance(error, exceptions.RayTaskError):
        return describe_ray_failure(error.cause) if isinstance(error.cause, BaseException) else None
    if failures := getattr(error, "worker_failures", None):  # of Ray Train, by rank
        return describe_ray_failure(next(iter(failures.values())))
    what = next((line.strip() for line in str(cause_of(error)).splitlines() if line.strip()), "")
    what = ": ".join(filter(None, [type(error).__name__, what]))
    room = isinstance(error, exceptions.OutOfMemoryError | exceptions.ObjectStoreFullError | exceptions.OutOfDiskError)
    return _with_hint(what, "choose nodes with more memory and disk space; " if room else "")


def cause_of(error: BaseException) -> BaseException:
    """Return what failed in Ray Train's controller, which the message of its error has in the second line; else the error."""
    return getattr(error, "controller_failure", error)


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
        threading.Thread(target=_watch, args=(os.pidfd_open(pid),), daemon=True).start()


def _watch(raylet: int) -> None:
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.poll()
    os.close(raylet)
    _lose_node()


def _lose_node() -> None:
    """End this process, if it still uses Ray."""
    import ray

    if ray.is_initialized():  # `ray.shutdown` has not ended the node
        end_command(_with_hint("its node on this machine died"))


def end_command(message: str) -> None:
    """End this process at once with status 1, from any thread."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        warn(f"{chr(10) if sys.stderr.isatty() else ''}error: {message}")  # a bar may be on the line
    os._exit(FAILED)


def start_ray(instead: str = "or give workers=0, which needs no Ray") -> None:
    """Connect to the cluster of a submitted job or of `ray start` on this machine, else start Ray in this process.

    RAY_ADDRESS names another cluster. With `local`, Ray starts in this process even if a cluster runs on the machine.
    Workers' own output stays in Ray's logs: the jobs report progress themselves. If the start fails, it is tried once more,
    because the machine may be busy. Raises UserError if that fails too, with what the command can do `instead`.
    """
    global _embedded
    import ray  # commands without Ray may call `there_is_a_cluster`

    if ray.is_initialized():
        return
    address, doubt = _find_cluster()
    options: dict = {"logging_level": logging.ERROR, "log_to_driver": False, "address": address or "local"}
    if not address:
        if doubt:
            how = "to use a cluster, set RAY_ADDRESS=HOST:PORT, and RAY_AUTH_MODE=token if it asks for a token"
            warn(f"note: {doubt}, so this command starts Ray for itself; {how}")
        options["include_dashboard"] = False
        # Ray's C++ side writes notes about its own actors to the terminal.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        # A suspended machine or a paused container answers late. After two minutes, Ray would end its own node.
        os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", str(7 * 86_400_000))
    shorten_notices(_lose_node)  # the notice comes a moment before the node ends
    with phase("starting Ray", after=0), sigterm_kept():
        try:
            _try_to_start(options)
        except Exception:  # Ray raises many kinds, Exception itself among them
            try:
                _try_to_start(options)
            except Exception as error:
                raise UserError(_describe_failure(error, address, instead)) from None
    _embedded = not address
    end_with_the_node()


def _try_to_start(options: dict) -> None:
    """Call `ray.init`; if it fails, nothing of it goes on."""
    import ray

    try:
        with _without_notice(), note_unread(), without_cluster_processes() if options["address"] == "local" else nullcontext():
            if options["address"] != "local" and _asks_for_the_note():
                use_token()
            ray.init(**options)
    except Exception as error:
        end_failed_start(error)
        ray.shutdown()
        raise


def _describe_failure(error: Exception, address: str, instead: str) -> str:
    if address.startswith(("http://", "https://")):
        ways = "set RAY_ADDRESS=HOST:PORT for a cluster, or RAY_ADDRESS=local"
        return f"RAY_ADDRESS must be HOST:PORT, but is {address}, an address for `ray job submit`; {ways}"
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
    if address:
        again = "start the cluster again, set RAY_AUTH_MODE=token if it asks for a token, or set RAY_ADDRESS=local"
        return f"cannot connect to the Ray cluster at {address} ({reason}); {again}"
    again = "run the same command again when the machine is less busy"
    if isinstance(error, OSError):
        again = "set RAY_TMPDIR to your own folder, with a short name"
    return f"cannot start Ray on this machine ({reason}; tried twice); {', '.join(filter(None, [again, instead]))}"


@contextmanager
def _without_notice() -> Iterator[None]:
    """Remove from standard error the line in which Ray's C++ side says that it took its log level from the environment.

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


def can_grow() -> bool:
    """Return whether nodes may join the Ray of this process: not if `start_ray` started it here."""
    return not _embedded


def describe_wait(bundles: Sequence[dict[str, float]], since: float) -> str:
    """Describe a wait for `bundles` since then: `needs 4 CPUs, the cluster has 2, waiting for nodes since 13:22:05`."""
    import ray

    there, free, parts = ray.cluster_resources(), ray.available_resources(), []
    for kind, amount in sum_of(bundles).items():
        has = f"the cluster has {there.get(kind, 0):g}"
        if there.get(kind, 0) >= amount:
            has += f" ({free.get(kind, 0):g} free)"
        parts.append(f"needs {amount:g} {kind}{'s' * (amount != 1)}, {has}")
    what = "nodes" if can_grow() else "room"
    return f"{', '.join(parts)}, waiting for {what} since {time.strftime('%H:%M:%S', time.localtime(since))}"


def sum_of(bundles: Sequence[dict[str, float]]) -> Counter[str]:
    """Return the resources of all bundles together."""
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)  # counts may be fractions
    return total


def refuse_without_gpu(wanted: bool, instead: str) -> None:
    """Raise UserError if GPUs are wanted, and Ray runs in this process alone and has none. Clusters may get more nodes.

    `instead` is what the user can do without them, as the message tells.
    """
    import ray

    if wanted and not can_grow() and not ray.cluster_resources().get("GPU"):
        raise UserError(f"Ray sees no GPU on this machine; {instead}, or use a machine with a GPU")


def there_is_a_cluster() -> bool:
    """Return whether `start_ray` would connect to a cluster."""
    return bool(_find_cluster()[0])


def _asks_for_the_note() -> bool:
    return os.environ.get("RAY_ADDRESS") in (None, "", "auto")


def _find_cluster() -> tuple[str, str]:
    """Return the address of the cluster to connect to, empty without one, and a reason not to believe a note of a cluster.

    Raises UserError for RAY_ADDRESS=auto without a cluster.
    """
    asked_for = os.environ.get("RAY_ADDRESS", "")
    if not _asks_for_the_note():
        return ("", "") if asked_for == "local" else (asked_for, "")
    address, doubt = read_note()
    if address and (doubt := _why_not(address)):
        address = ""
    if not address and (others := [other for other in sorted(read_other_notes()) if not _why_not(other)]):
        # A job of Slurm may have started it, so it is told and not joined.
        doubt = f"the Ray cluster at {' or '.join(others)} has another folder than /tmp/ray"
    if asked_for == "auto" and not address:
        raise UserError(
            f"RAY_ADDRESS=auto: {doubt or 'no Ray cluster runs on this machine'}; set RAY_ADDRESS to HOST:PORT of a cluster, or "
            "to local"
        )
    return address, doubt


def _why_not(address: str) -> str:
    """Return why the noted cluster is none that runs; empty for one that answers.

    Ray itself would wait for minutes for one that was killed or did not survive a reboot, and for a port that is not Ray's.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):  # it says nothing without certificates
                return ""
            connection.sendall(_HELLO)
            if connection.recv(9)[3:4] == _SETTINGS:
                return ""
    except ConnectionRefusedError:
        return f"the noted Ray cluster at {address} does not run any more"
    except (OSError, UnicodeError):  # the latter: no name of a host
        pass
    return f"no Ray cluster answers at the noted address {address}"
