"""Starts of Ray: clusters that are gone, machines that are busy, and the messages."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import exceptions
from ray.train import ControllerError, WorkerGroupError
from waiting import wait_for

from treenet.config import MAY_CHANGE, TrainConfig
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.settings import ScalingConfig
from treenet.extras.tuning.trials import TuningConfig
from treeproc.common import ray_session
from treeproc.common.command_line import run_cli
from treeproc.common.errors import UserError
from treeproc.common.ray_internals import note_unread, read_note, read_other_notes, shorten_notices
from treeproc.common.ray_session import _find_cluster, describe_ray_failure, there_is_a_cluster

pytestmark = pytest.mark.slow

# A start that fails when its processes are there, as on a busy machine, and the next one; then one that fails twice.
SLOW_STARTS = """
from pathlib import Path
import ray
from ray._private import services
from treeproc.common.ray_session import start_ray
from treeproc.common.settings import UserError

def children():
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}

def names(pids):
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids if Path(f"/proc/{pid}").exists()}

get_node, of_first = services.get_node, set()

def slow_once(*arguments):
    if not of_first:
        of_first.update(children())
        assert {"raylet", "gcs_server"} <= names(of_first)
        raise Exception("The current node timed out during startup. This could happen because ...")
    return get_node(*arguments)

services.get_node = slow_once
start_ray()
assert ray.get(ray.remote(lambda: 7).remote()) == 7
assert not {"raylet", "gcs_server"} & names(of_first), "the first start goes on"
ray.shutdown()

tries = []

def never(**options):
    tries.append(options)
    raise Exception("The current node timed out during startup.\\nMore of it.")

ray.init = never
try:
    start_ray()
except UserError as error:
    print(error)
assert len(tries) == 2
"""


@pytest.mark.cluster
def test_a_slow_start_is_tried_once_more_and_then_told_in_one_line(repository, one_core_of_ray):
    run = subprocess.run([sys.executable, "-c", SLOW_STARTS], capture_output=True, text=True, cwd=repository, timeout=280)
    assert run.returncode == 0, run.stderr
    assert run.stdout == (
        "cannot start Ray on this machine (The current node timed out during startup.; tried twice); run the same command again "
        "when the machine is less busy\n"  # no command runs here, so the message names no setting
    )
    assert run.stderr == "starting Ray ...\n" * 2


@pytest.mark.parametrize(("address", "there"), [("local", False), ("ray://somewhere:1", True), ("10.0.0.1:6379", True)])
def test_the_environment_names_a_cluster(monkeypatch, address, there):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert there_is_a_cluster() == there


def test_the_address_for_jobs_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(UserError, match=r"^RAY_ADDRESS must be HOST:PORT, but is http://127.0.0.1:8265, an address for `ray job"):
        ray_session.start_ray()


# What a server of gRPC says first: an empty frame of settings.
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture
def note(tmp_path, monkeypatch):
    """The place of the note of `ray start`, where Ray looks for it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(ray_session, "read_other_notes", set)  # others may run clusters on this machine
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@contextmanager
def answering(content: bytes = SETTINGS):
    """A port that accepts a client and says `content`. Gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    clients.append(client)
                    client.sendall(content)

        clients: list[socket.socket] = []
        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for client in clients:
            client.close()


def test_only_a_cluster_that_answers_counts(note, monkeypatch):
    assert _find_cluster() == ("", "")
    with answering() as address:
        note.write_text(f"{address}\n")
        assert _find_cluster() == (address, "") and there_is_a_cluster()
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        assert _find_cluster() == (address, "")
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert not there_is_a_cluster()
        monkeypatch.delenv("RAY_ADDRESS")
        note.chmod(0o666)
        assert _find_cluster() == ("", f"every user may write to {note}")
        note.chmod(0o644)
    assert _find_cluster() == ("", f"the noted Ray cluster at {address} does not run any more")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(UserError, match="RAY_ADDRESS=auto: the noted Ray cluster at .*; set RAY_ADDRESS to HOST:PORT"):
        there_is_a_cluster()
    note.unlink()
    with pytest.raises(UserError, match="RAY_ADDRESS=auto: no Ray cluster runs on this machine"):
        there_is_a_cluster()


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_that_is_not_of_ray_is_left_alone(note, monkeypatch, says):
    monkeypatch.setattr(ray_session, "ANSWER_S", 0.2)
    with answering(says) as address:
        note.write_text(address)
        assert _find_cluster() == ("", f"no Ray cluster answers at the noted address {address}")


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"127.0.0.1:notaport", b"127.0.0.1:0", b"127.0.0.1:70000", b"\xff:80", b"a\0b:80", b"h" * 400 + b":80"],
)
def test_a_note_without_an_address_is_not_believed(note, content):
    note.write_bytes(content)
    assert read_note() == ("", f"{note} does not hold an address")


def test_a_note_that_is_not_a_file_is_neither_waited_for_nor_followed(note, tmp_path):
    os.mkfifo(note)
    assert read_note() == ("", f"{note} is not a regular file")
    note.unlink()
    note.mkdir()
    assert read_note() == ("", f"{note} is not a regular file")
    note.rmdir()
    (tmp_path / "mine").write_text("127.0.0.1:6379")
    note.symlink_to(tmp_path / "mine")
    assert read_note() == ("", f"{note} is a link")
    note.unlink()
    note.parent.rmdir()
    note.parent.write_text("a file")
    assert read_note() == ("", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_what_another_user_wrote_is_not_believed(note, tmp_path, monkeypatch):
    note.write_text("127.0.0.1:6379")
    assert read_note() == ("127.0.0.1:6379", "")
    os.chown(note, 12345, 12345)
    assert read_note() == ("", f"{note} belongs to another user")
    os.chown(note, 0, 0)
    note.parent.rename(tmp_path / "elsewhere")
    note.parent.symlink_to(tmp_path / "elsewhere")
    assert read_note() == ("127.0.0.1:6379", "")
    os.lchown(note.parent, 12345, 12345)
    assert read_note() == ("", f"{note.parent} is a link of another user")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_a_cluster_of_root_counts_if_this_user_may_use_it(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        sockets = Path(folder) / "ray" / "session_1" / "sockets"
        sockets.mkdir(parents=True)
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")
        for mode, address in ((0o755, ""), (0o777, "127.0.0.1:6379")):
            (sockets / "raylet").touch()
            (sockets / "raylet").chmod(mode)
            os.seteuid(12345)
            try:
                found, doubt = read_note()
            finally:
                os.seteuid(0)
            assert found == address and ("permission" in doubt) == (not address)


@pytest.fixture
def other_node(note, tmp_path):
    """Start a process that looks like a node of `ray start --temp-dir`, as a user. Gives the place of its note."""
    folder, nodes = tmp_path / "elsewhere", []
    folder.mkdir()

    def start(user: int) -> Path:
        command = ["/x/raylet", "-c", "echo; read line", f"--temp_dir={folder}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        nodes.append(subprocess.Popen(command, executable="/bin/sh", user=user, **pipes))
        nodes[-1].stdout.readline()
        return folder / "ray_current_cluster"

    yield start
    for node in nodes:
        node.communicate()


def test_the_note_of_a_cluster_with_a_folder_of_its_own_is_read_with_the_same_checks(other_node):
    elsewhere = other_node(os.geteuid())
    before = read_other_notes()  # of clusters that happen to run on this machine; the Ray of a command leaves no note
    elsewhere.write_text("127.0.0.1:1")
    assert read_other_notes() == before | {"127.0.0.1:1"}
    elsewhere.chmod(0o666)
    assert read_other_notes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_cluster_of_another_user_is_not_looked_for(other_node):
    other_node(12345).write_text("127.0.0.1:1")
    assert "127.0.0.1:1" not in read_other_notes()
    other_node(0)
    assert "127.0.0.1:1" in read_other_notes()


def test_a_cluster_with_a_folder_of_its_own_is_told_and_not_joined(note, monkeypatch):
    with answering() as address:
        monkeypatch.setattr(ray_session, "read_other_notes", lambda: {address, "127.0.0.1:1"})  # nothing answers at port 1
        told = f"the Ray cluster at {address} has another folder than /tmp/ray"
        assert _find_cluster() == ("", told) and not there_is_a_cluster()
        note.write_text(address)
        assert _find_cluster() == (address, "")
        note.unlink()
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        with pytest.raises(UserError, match=f"RAY_ADDRESS=auto: {told}; set RAY_ADDRESS to HOST:PORT"):
            there_is_a_cluster()
        monkeypatch.delenv("RAY_ADDRESS")
    assert _find_cluster() == ("", "")


@pytest.mark.cluster
def test_a_real_cluster_with_a_folder_of_its_own_is_told(note, monkeypatch):
    """And the remedy of the line is right: with that address, a command uses the cluster."""
    monkeypatch.setattr(ray_session, "read_other_notes", read_other_notes)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        ray = Path(sys.executable).with_name("ray")
        subprocess.run([ray, "get-auth-token", "--generate"], check=True, stdout=subprocess.DEVNULL)  # so the cluster asks for it
        ray_start = [ray, "start", "--head", "--port=0", "--block", f"--temp-dir={folder}"]
        options = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--include-dashboard=false"]
        head = subprocess.Popen([*ray_start, *options, "--num-cpus=1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for((Path(folder) / "ray_current_cluster").exists, head)
            address = (Path(folder) / "ray_current_cluster").read_text()
            assert address in _find_cluster()[1] and "has another folder than /tmp/ray" in _find_cluster()[1]
            code = (
                "import ray; from treeproc.common import ray_session as s; s.start_ray(); print(ray.cluster_resources()['CPU'])"
            )
            run = [sys.executable, "-c", code]
            told = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
            joined = subprocess.run(run, capture_output=True, text=True, env=os.environ | told, timeout=200)
            assert joined.stdout == "1.0\n" and "note:" not in joined.stderr, joined.stderr
        finally:
            head.terminate()
            head.wait()


def test_ray_looks_where_we_look_and_does_not_read_the_note_itself(note, monkeypatch):
    from ray._common.utils import get_ray_address_file
    from ray._private import services

    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(note.parent.parent))
    assert get_ray_address_file(None) == str(note)
    note.write_text("127.0.0.1:6379")
    assert read_note()[0] == services.find_bootstrap_address(None) == "127.0.0.1:6379"
    with note_unread():
        assert services.find_bootstrap_address(None) is None
    assert services.find_bootstrap_address(None) == "127.0.0.1:6379"


def test_training_uses_ray_by_itself_only_where_a_cluster_is_meant(monkeypatch):
    def workers(cls=TrainConfig, **values) -> int:
        return cls(data="x", **values).workers

    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    for address, expected in (("local", 0), ("", 0), ("auto", 1), ("10.0.0.1:6379", 1)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert (workers(), workers(TuningConfig), workers(workers=0), workers(workers=3)) == (expected, expected, 0, 3)
    monkeypatch.delenv("RAY_ADDRESS")
    assert workers() == 0 and workers(ScalingConfig) == workers(SeedsConfig) == 1  # Ray runs the cells side by side
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert workers() == 1
    assert "workers" in MAY_CHANGE  # so a run that recorded workers: 1 continues


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (exceptions.RaySystemError("broken"), "RaySystemError: System error: broken"),
        (exceptions.RuntimeEnvSetupError("no folder"), "RuntimeEnvSetupError: Failed to set up runtime environment."),
        (exceptions.LocalRayletDiedError(), "LocalRayletDiedError: The task's local raylet died."),
        (exceptions.NodeDiedError("gone"), "NodeDiedError: gone"),
        (exceptions.GetTimeoutError("late\nmore"), "GetTimeoutError: late"),
        (exceptions.ActorDiedError(), "ActorDiedError: The actor died unexpectedly before finishing this task."),
        (exceptions.WorkerCrashedError(), "WorkerCrashedError: The worker died unexpectedly"),
        (exceptions.OutOfMemoryError("too large"), "OutOfMemoryError: too large); choose nodes with more memory"),
        (exceptions.RayTaskError("f", "trace", exceptions.NodeDiedError("gone")), "NodeDiedError: gone"),
        (WorkerGroupError("many lines", {1: exceptions.NodeDiedError("gone")}), "NodeDiedError: gone"),
        (ControllerError(RuntimeError("why")), "ControllerError: why)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failure_of_ray_is_one_line_and_status_1(error, message, capsys, monkeypatch):
    def fail(arguments):
        raise error

    monkeypatch.setattr(sys, "argv", ["train_wmt.py"])
    with pytest.raises(SystemExit) as ended:
        run_cli(fail)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith(f"error: Ray failed ({message}") and "the same command continues" in line


@pytest.mark.parametrize("error", [ValueError("a bug"), WorkerGroupError("many lines", {0: TypeError("a bug")})])
def test_an_error_of_our_code_in_ray_keeps_its_traceback(error):
    assert describe_ray_failure(error) is None
    assert describe_ray_failure(exceptions.RayTaskError("f", "trace", error)) is None


KILLED_AGENT = """
import os, signal, time
from pathlib import Path
from treeproc.common.ray_session import start_ray
from treeproc.common.command_line import run_cli

def agent():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"runtime_env/agent" in command and os.environ["RAY_TMPDIR"].encode() in command:
            return int(folder.name)

def main(arguments):
    import ray
    start_ray()
    print("begun")  # waits in the buffer
    os.kill(agent(), signal.SIGKILL)
    ray.get(ray.remote(lambda: time.sleep(200)).remote())

run_cli(main)
"""


@pytest.mark.cluster
def test_a_killed_agent_of_ray_ends_a_command_with_one_line(repository):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        run = subprocess.run(
            [sys.executable, "-c", KILLED_AGENT],
            capture_output=True,
            text=True,
            cwd=repository,
            timeout=280,
            env=os.environ | {"RAY_TMPDIR": folder},
        )
    assert run.returncode == 1 and run.stdout == "begun\n", run.stderr
    line = run.stderr.splitlines()[-1]  # Ray may have told of it too, in one line
    assert run.stderr.count("\n") <= 3 and "state-dump" not in run.stderr, run.stderr
    assert line.startswith("error: Ray failed (its node on this machine died); the same command continues; Ray's logs are in ")


def test_notices_of_nodes_are_one_line_outside_of_the_results(capsys, monkeypatch):
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    lost = []
    shorten_notices(lambda: lost.append(1))
    notice = "A worker was killed because memory was short. Last 20 lines of the Raylet logs:\n  [state-dump] 40 lines\n  of logs"
    worker.print_to_stdstream({"lines": [notice], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    said = capsys.readouterr()
    assert said.out == "" and said.err == "warning: Ray: A worker was killed because memory was short.\n" and not lost
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "4bf08e"))
    for node in ("77aa31", "4bf08e"):  # another one, and that of this process
        worker.print_to_stdstream({"lines": [f"The node with node id: {node} has been marked dead"], "pid": "", "is_err": False})
    assert capsys.readouterr().err == "warning: Ray: The node with node id: 77aa31 has been marked dead\n" and lost == [1]


def test_sigterm_ends_a_command_at_once_while_ray_starts():
    """Ray's own handler ends it with status 15, which no scheduler takes for a signal."""
    start = "from treeproc.common.ray_session import start_ray; start_ray(); print('started')"
    environment = os.environ | {"RAY_ADDRESS": "local"}
    command = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    try:
        while b"starting Ray" not in (line := command.stderr.readline()):
            assert line, "it ended before Ray started"
        time.sleep(1)
        command.terminate()
        output, _ = command.communicate(timeout=60)
        assert command.returncode == -signal.SIGTERM and b"started" not in output
    finally:
        command.kill()
