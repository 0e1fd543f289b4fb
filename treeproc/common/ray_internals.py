"""Parts of Ray that its documentation does not promise, each with what holds where it is gone."""

import errno
import logging
import os
import re
import signal
import socket
import stat
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from treeproc.common.errors import one_line
from treeproc.common.messages import warn

# The end of the first line of a notice whose other lines, which are not shown, are of a log.
_LOG_FOLLOWS = re.compile(r"\s*Last \d+ lines of the Raylet logs:$")
_VALUES = "tree-attention"  # the namespace of our keys in Ray's store
# HOST:PORT, and the bytes of a note.
_ADDRESS, _MOST_BYTES = re.compile(rb"[0-9A-Za-z.:\[\]_-]+:([0-9]{1,5})"), 300


def end_failed_start(error: Exception) -> None:
    """End the processes of a node whose start failed with `error`.

    Ray knows a node that has started; one that has not is known to the frames of the call alone, by its method that ends
    it. Without such a method they go on until this process ends.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if end := getattr(frame.f_locals.get("self"), "kill_all_processes", None):
            end(check_alive=False, allow_graceful=False)


def read_note() -> tuple[str, str]:
    """Return the address that `ray start` left in a note on this machine, and a reason not to believe a note; both may be empty.

    The folder of the note is open to all users of a machine. Ray believes any note, and sends its token to the address in it.
    So only a plain file counts that this user or root wrote.
    """
    return _read_note(_default_folder())


def read_other_notes() -> set[str]:
    """Return the addresses of clusters of `ray start --temp-dir` that have a node on this machine, with the same checks.

    Ray does not look for them. Without the option of Ray's node that names its folder, none is found.
    """
    folders = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program, *options = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
            if Path(program).name == "raylet" and _is_trusted(process.stat()):
                folders |= {option.removeprefix("--temp_dir=") for option in options if option.startswith("--temp_dir=")}
    return {address for folder in folders - {str(_default_folder())} if (address := _read_note(Path(folder))[0])}


def _default_folder() -> Path:
    """Return the folder as Ray does."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def _read_note(folder: Path) -> tuple[str, str]:
    note = folder / "ray_current_cluster"
    try:
        if folder.is_symlink() and not _is_trusted(folder.lstat()):
            return "", f"{folder} is a link of another user"
        descriptor = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    except OSError as error:
        return "", f"{note} is a link" if error.errno == errno.ELOOP else f"cannot read {note}: {error.strerror}"
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return "", f"{note} is not a regular file"
        if not _is_trusted(facts):
            return "", f"{note} belongs to another user"
        if facts.st_mode & stat.S_IWOTH:
            return "", f"every user may write to {note}"
        content = os.read(descriptor, _MOST_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if len(content) > _MOST_BYTES or not (found := _ADDRESS.fullmatch(content)) or not 0 < int(found[1]) < 2**16:
        return "", f"{note} does not hold an address"
    if facts.st_uid != os.geteuid() and not _may_use_a_node(folder):
        return "", f"{note} belongs to root, and this user has no permission to use that cluster"
    return content.decode(), ""


def _may_use_a_node(folder: Path) -> bool:
    """Return whether a Ray node on this machine lets this user in. Without permission for its socket, Ray aborts the process."""
    return any(os.access(path, os.W_OK, effective_ids=True) for path in folder.glob("session_*/sockets/raylet"))


def _is_trusted(facts: os.stat_result) -> bool:
    return facts.st_uid in (0, os.geteuid())


@contextmanager
def _replaced(owner: Any, **functions: Callable) -> Iterator[None]:
    """Put functions in the place of those of a module or a class that are there, and put those back at the end."""
    kept = {name: getattr(owner, name) for name in functions if hasattr(owner, name)}
    for name in kept:
        setattr(owner, name, functions[name])
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(owner, name, function)


def note_unread() -> AbstractContextManager[None]:
    """Keep Ray from reading the note itself, which it does after a failed connection too.

    Without its function, `ray.init` still gets an explicit address.
    """
    from ray._private import utils

    return _replaced(utils, read_ray_address=lambda *arguments, **options: None)


def without_cluster_processes() -> AbstractContextManager[None]:
    """Start a node without the processes that serve clusters: the autoscaler, the dashboard's server and the reader of logs.

    Without Ray's functions that start them, they take three CPU seconds at the start, and memory.
    """
    from ray._private.node import Node

    names = ("start_monitor", "start_api_server", "start_log_monitor")
    return _replaced(Node, **dict.fromkeys(names, lambda self, **options: None))


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM. Those of `ray.init` end a command with status 1 or 15, after a while.

    Without Ray's function, its handlers count until the start is over.
    """
    from ray._private import utils

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _replaced(utils, set_sigterm_handler=lambda handler: None):
            yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def use_token() -> None:
    """Use the token of this user if there is one, as `ray.init` does without an address.

    Without its function, clusters that ask for a token need RAY_AUTH_MODE=token.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it found the token
    with suppress(ImportError):
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def shorten_notices(lose_node: Callable[[], None]) -> None:
    """Make one line on standard error of each notice of Ray's nodes, which Ray would write into the results with its logs.

    `lose_node` is called for the notice that the node of this process is dead. Without Ray's function, the notices stay as they
    are.
    """
    import ray
    from ray._private import worker

    def print_notice(data: dict, *arguments: object, **options: object) -> None:
        text = " ".join(str(line) for line in data.get("lines", ()))
        if "has been marked dead" in text and ray.get_runtime_context().get_node_id() in text:
            lose_node()
        elif first := next(filter(None, map(str.strip, text.splitlines())), ""):
            warn(f"warning: Ray: {one_line(_LOG_FOLLOWS.sub('', first), 300)}")

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = print_notice


def start_coordinator_here() -> None:
    """Start the actor with which Ray Train and Ray Data tell their demands to an autoscaler, on the node of this process.

    The actor never ends. Started by a training on another node, it would keep that node for ever. Without the function that
    starts it, this happens.
    """
    with suppress(ImportError):
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator

        get_or_create_autoscaling_coordinator()


def processes_of(actor: Any) -> dict[str, list[int]]:
    """Return the processes of an actor and of those that it started, by node. Without Ray's table of actors there are none."""
    import ray
    from ray._private import state

    found: dict[str, list[int]] = {}
    with suppress(AttributeError, KeyError, TypeError):
        table = state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
        first = table[actor._actor_id.hex()]
        place = {name: first["Address"][name] for name in ("NodeID", "Port")}
        for one in table.values():
            is_own = one is first or place.items() <= one["OwnerAddress"].items()
            if is_own and one["State"] == "ALIVE" and one["Pid"]:
                found.setdefault(one["Address"]["NodeID"], []).append(one["Pid"])
    return found


def store_of_keys() -> tuple[Callable[[str, str], object], Callable[[str], bytes | None]] | None:
    """Return how to put and to get a text under a key, in Ray's own store; without its functions, the limits do not hold."""
    try:
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
    except ImportError:
        return None
    return partial(_internal_kv_put, namespace=_VALUES), partial(_internal_kv_get, namespace=_VALUES)


def nodes_called_back() -> set[str]:
    """Return the nodes that announced their end, as spot nodes do two minutes before. Without Ray's function, none is known."""
    from ray._private import state

    find = getattr(state.state, "get_draining_nodes", None)
    return set(find()) if find else set()


def raylet_pid() -> int | None:
    """Return the process id of Ray's node on this machine; None without one, or if it cannot be found.

    Without the name of its socket, the command cannot tell that the node has died.
    """
    from ray._private import worker

    name = getattr(getattr(worker, "_global_node", None), "raylet_socket_name", None)
    if not name:
        return None
    with suppress(OSError, struct.error), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        connection.connect(name)
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return pid or None  # 0: in a container beside this one
    return None


def logs_folder() -> str:
    """Return the folder of Ray's logs on this machine; empty if it is not known."""
    from ray._private import worker

    get = getattr(getattr(worker, "_global_node", None), "get_logs_dir_path", None)
    return get() if get else ""
