"""Loader processes: the items of one process, in order, whatever happens to those that make them."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from commands import PROCESSES

from treenet.data import loader_processes
from treenet.data.loader_processes import LoaderProcesses
from treenet.data.loader_server import SLOT_BYTES, _sendable
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow


class Numbers:
    """Makes a tensor, with its step and the process; one step goes wrong."""

    def __call__(self, step: int, size: int = 3) -> list:
        if step == 13 and size == 3:
            raise UserError("line 13 is damaged")
        return [torch.full((size,), step), step, os.getpid()]


def refuse() -> Numbers:
    raise UserError("the data are gone")


def ended(pid: int, seconds: float = 100) -> bool:
    """Whether a process is gone, or waits to be reaped, within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_items_come_in_order_with_the_options_of_their_time_and_nothing_stays():
    """No slot holds one of them. Signals to the group of the training are not for those that make items."""
    sizes = [SLOT_BYTES // 4 + 1 if step == 31 else step - 15 for step in range(15, 60)]  # of int32
    before, given, found = open_files(), iter(sizes), []
    with LoaderProcesses(Numbers, range(15, 40), 3, options=lambda: {"size": next(given)}) as stream:
        for packed in stream:
            found.append(packed.unpack())
            pid = found[-1][2]
            assert os.getpgid(pid) != os.getpgid(0)
            os.kill(pid, signal.SIGINT if pid % 2 else signal.SIGTERM)
        assert stream.waited > 0
    assert [step for _, step, _ in found] == list(range(15, 40))
    assert all(torch.equal(tensor, torch.full((sizes[step - 15],), step)) for tensor, step, _ in found)
    pids = {pid for _, _, pid in found}
    assert len(pids) == 3 and os.getpid() not in pids and all(map(ended, pids))
    assert open_files() == before


def test_an_error_is_raised_at_its_item(forked_loaders):
    seen = []
    with pytest.raises(UserError, match="^line 13 is damaged$"), LoaderProcesses(Numbers, range(10, 20), 2) as stream:
        for packed in stream:
            seen.append(packed.unpack()[1])
    assert seen == [10, 11, 12]
    with pytest.raises(UserError, match="^the data are gone$"), LoaderProcesses(refuse, range(3), 2) as stream:
        next(iter(stream))


def test_an_error_without_a_pickle_keeps_its_traceback():
    assert isinstance(_sendable(UserError("x")), UserError)
    try:
        raise LookupError(lambda: "no pickle of this")
    except LookupError as error:
        sent = _sendable(error)
    assert isinstance(sent, RuntimeError) and "LookupError" in str(sent) and "line" in str(sent)


class Deadly(Numbers):
    """Its process dies at one step, every time."""

    def __call__(self, step: int, size: int = 3) -> list:
        if step == 60:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(step, size)


def test_killed_processes_are_replaced_as_long_as_items_come(capfd, monkeypatch, forked_loaders):
    """Two starts without an item in between end the training: not those after the steps 30 and 60, but the second at step 60."""
    monkeypatch.setattr(loader_processes, "MAX_STARTS", 2)
    message = "signal 9 .*, and so did 1 before it at step 60; .*lower loader_workers = 2, or set it to 0"
    seen = []
    with pytest.raises(UserError, match=message), LoaderProcesses(Deadly, range(20, 80), 2) as stream:
        for packed in stream:
            _, step, pid = packed.unpack()
            seen.append(step)
            if step == 30:
                os.kill(pid, signal.SIGKILL)
    assert seen == list(range(20, 60))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and all("signal 9 (SIGKILL)" in line and "starts it again, from step " in line for line in lines)
    assert lines[1].endswith("from step 60")


def test_a_process_killed_while_its_large_item_waits_is_replaced(capfd, forked_loaders):
    """It is still sending when it is killed, because nobody takes the item."""
    size = {"size": SLOT_BYTES // 4 + 1}
    with LoaderProcesses(Numbers, range(20, 24), 2, options=lambda: size) as stream:
        items = iter(stream)
        first, second = next(items).unpack(), next(items).unpack()
        for pid in (first[2], second[2]):
            os.kill(pid, signal.SIGKILL)
            assert ended(pid)
        assert [int(item.unpack()[0][-1]) for item in items] == [22, 23]
    assert "signal 9 (SIGKILL)" in capfd.readouterr().err


def read_two_and_wait(ends: tuple[Connection, Connection]) -> None:
    ends[0].close()
    with LoaderProcesses(Numbers, range(20, 10**6), 2) as stream:
        items = iter(stream)
        ends[1].send([*{next(items).unpack()[2] for _ in range(2)}, stream._server.pid])
        time.sleep(100)


def test_nothing_stays_where_the_training_is_killed():
    ends = PROCESSES.Pipe()
    parent = PROCESSES.Process(target=read_two_and_wait, args=(ends,))
    parent.start()
    ends[1].close()
    pids = ends[0].recv()
    assert len(pids) == 3
    parent.kill()
    parent.join(100)
    assert parent.exitcode == -signal.SIGKILL and all(map(ended, pids))
