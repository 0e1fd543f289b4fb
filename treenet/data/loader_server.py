"""The processes that make batches: a server that opens the data, and copies of it that work. See `loader_processes.py`.

The server starts as a separate program, not as a copy of the training: a copy would break the threads and the CUDA context.
Copies of the server share the data that it has read. The plan and the lengths of a large data set take gigabytes.
"""

import gc
import mmap
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch import Tensor

from treenet.data.packing import Layout, pack

# Items under way in each process: one that waits to be taken, one that is made.
DEPTH = 2
# Addresses, not memory: a slot takes as much as the largest item that it has held. A larger one goes through the socket.
SLOT_BYTES = 64 << 20


@dataclass(frozen=True)
class Answer:
    """What an item was packed as; `is_large` where its bytes follow, and are not in its slot."""

    layout: Layout
    is_large: bool


def main(memory: str, control: str, *connections: str) -> None:
    """Run the server. Arguments are the numbers of open files."""
    # For the training alone, which closes the sockets when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    slots = torch.frombuffer(mmap.mmap(int(memory), 0), dtype=torch.uint8)
    boss = Connection(int(control))
    ends = [Connection(int(connection)) for connection in connections]
    try:
        make = boss.recv()()
    except EOFError:
        return
    except Exception as error:  # raised by every item, and so in the training
        make = partial(_raise, error)
    gc.freeze()  # or its copies would soon have pages of their own
    for index, end in enumerate(ends):
        if not os.fork():
            for other in (boss, *ends[:index], *ends[index + 1 :]):
                other.close()
            _work(make, end, slots)
            os._exit(0)
    for end in ends:
        end.close()
    _watch(boss, len(ends))


def _watch(boss: Connection, count: int) -> None:
    """Wait for the end of all processes, and report how they ended."""
    for _ in range(count):
        pid, status = os.wait()
        try:
            boss.send((pid, os.waitstatus_to_exitcode(status)))
        except OSError:  # nobody asks any more
            continue


def _work(make: Callable[..., Any], end: Connection, slots: Tensor) -> None:
    """Answer until the socket is closed."""
    while True:
        try:
            step, slot, options = end.recv()
            room = slots[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
            answer, rest = _answer(make, room, step, options)
            end.send(answer)
            if rest is not None:
                end.send_bytes(rest.numpy().data)
        except (EOFError, OSError):
            return


def _answer(
    make: Callable[..., Any], room: Tensor, step: int, options: dict[str, Any]
) -> tuple[Answer | Exception, Tensor | None]:
    """Return what is sent for an item: its layout or the error, and the bytes that no slot holds."""
    try:
        packed = pack(make(step, **options), lambda size: room if size <= len(room) else torch.empty(size, dtype=torch.uint8))
    except Exception as error:
        return _sendable(error), None
    is_large = packed.layout.num_bytes > len(room)
    return Answer(packed.layout, is_large), packed.buffer if is_large else None


def _sendable(error: Exception) -> Exception:
    """Return the error itself, or its traceback if it does not survive pickling."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _raise(error: Exception, step: int, **options: Any) -> NoReturn:
    raise error
