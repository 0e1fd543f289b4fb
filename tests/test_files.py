"""Outputs at the places that users name: files complete or not at all, links kept, devices and pipes written to."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from treeproc.common.files import atomic_output, locked
from treeproc.common.named_output import named_output
from treeproc.common.settings import UserError

FULL = """
import resource, signal, sys
from pathlib import Path
from treeproc.common.named_output import named_output
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with named_output(Path(sys.argv[1])) as file:
    file.write(bytes(100_000))
"""

TO_OUTPUT = """
import sys
from pathlib import Path
from treeproc.common.folder_kinds import claim_output
from treeproc.common.named_output import is_stream, named_output
path = Path(sys.argv[1])
claim_output(path, {"input": None})
assert is_stream(path)
with named_output(path) as file:
    file.write(b"new\\n")
"""


def write(path, content=b"new") -> None:
    with named_output(path) as file:
        file.write(content)


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("there/target")
    write(tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "there/target"
    assert (tmp_path / "there" / "target").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "target", "there"]


def test_a_link_to_nothing_makes_its_target(tmp_path):
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"new"


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UserError, match="cannot write .*link: "):
        write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("linked", [False, True])
def test_a_device_stays_a_device(tmp_path, linked):
    (tmp_path / "link").symlink_to("/dev/null")
    write(tmp_path / "link" if linked else type(tmp_path)("/dev/null"))
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null") and not os.path.exists("/dev/null.parts")
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_stays_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write(tmp_path / "pipe")
    reader.join(timeout=20)
    assert got == [b"new"] and (tmp_path / "pipe").is_fifo()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_an_output_that_the_shell_redirects_keeps_what_its_file_holds(tmp_path, name):
    """Also between what others write there, as `{ command; command; } > FILE` does."""
    (tmp_path / "all.txt").write_text("EARLIER\n")
    with (tmp_path / "all.txt").open("ab") as file:
        file.write(b"before\n")
        file.flush()
        subprocess.run([sys.executable, "-c", TO_OUTPUT, name], stdout=file, check=True, timeout=100)
        file.write(b"after\n")
    assert (tmp_path / "all.txt").read_text() == "EARLIER\nbefore\nnew\nafter\n"
    assert [one.name for one in tmp_path.iterdir()] == ["all.txt"]


def test_an_output_that_is_not_open_is_one_line():
    with pytest.raises(UserError, match="cannot write /dev/fd/987654: Bad file descriptor"):
        write(Path("/dev/fd/987654"))


def test_a_full_device_is_one_line(tmp_path):
    (tmp_path / "link").symlink_to("/dev/full")
    with pytest.raises(UserError, match="cannot write .*link: No space left"):
        write(tmp_path / "link")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    message = rf"{tmp_path} is on a file system without locks \({os.strerror(number)}\); choose a folder on another one"
    with pytest.raises(UserError, match=message), locked(tmp_path):
        pass


def test_two_writers_of_one_file_leave_a_complete_one(tmp_path):
    """Process ids may be equal: those of two containers that share a folder often are."""
    path = tmp_path / "shard"
    with ExitStack() as ends_last:
        with atomic_output(path) as first:
            first.write(b"first")
            second = ends_last.enter_context(atomic_output(path))
            second.write(b"second")
        assert path.read_bytes() == b"first"
    assert path.read_bytes() == b"second" and [one.name for one in tmp_path.iterdir()] == ["shard"]


@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True])
def test_a_full_disk_leaves_the_old_output(tmp_path, linked):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    name = "link" if linked else "target"
    full = subprocess.run([sys.executable, "-c", FULL, tmp_path / name], capture_output=True, text=True, timeout=100)
    assert "UserError: cannot write" in full.stderr and "File too large" in full.stderr
    assert (tmp_path / "target").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]
