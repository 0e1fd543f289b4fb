"""Batches made in processes beside the training, in order.

Process k of n makes every n-th item. The items come through shared memory, which has a slot for every item that is under way.
A socket carries the number of the requested item, and the layout of the answer. So an item costs the consumer about
30 microseconds and one copy. The processes share no lock of Python.

One server (`loader_server.py`) opens the data once and starts all processes. They end when their sockets close: at the end,
and also if this process is killed. The memory has no name, so nothing of it is left behind.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from treenet.data.loader_server import DEPTH, SLOT_BYTES, Answer
from treenet.data.packing import Packed
from treeproc.common.messages import warn
from treeproc.common.settings import UserError

# Starts of the processes, without an item in between, after which a run gives up.
MAX_STARTS = 4
# Seconds for the processes to end after their sockets are closed, before they are killed.
_END_S = 10
_PROGRAM = (
    "import json, sys; sys.path = json.loads(sys.argv[1]); from treenet.data.loader_server import main; main(*sys.argv[2:])"
)

Item = TypeVar("Item")
Make = Callable[..., Item]


class LoaderProcesses(Generic[Item]):
    """Yields the packed `make(step, **options())` of every step, made by `count` processes a few steps ahead.

    `open_make()` gives `make` in the server, and must survive pickling. Each request of a step calls `options()`. An error of
    `make` is raised here, at its step. If a process was killed, a line on standard error names it, and all start again.
    `waited` is the time in seconds that the consumer spent waiting for an item.
    """

    def __init__(
        self,
        open_make: Callable[[], Make[Item]],
        steps: range,
        count: int,
        options: Callable[[], Mapping[str, Any]] = dict,
        pin_memory: bool = False,
    ):
        self._open_make, self._steps, self._count, self._options = open_make, steps, count, options
        self._pin_memory, self._starts = pin_memory, 0
        self.waited = 0.0
        self._memory: Tensor
        self._server: subprocess.Popen[bytes]
        self._control: Connection
        self._connections: list[Connection]
        self._start(0)

    def __enter__(self) -> "LoaderProcesses[Item]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Packed[Item]]:
        for index in range(len(self._steps)):
            started = time.monotonic()
            while (received := self._receive(index)) is None:
                self._restart(index)
            answer, large = received
            if isinstance(answer, BaseException):
                raise answer
            self._starts = 1  # what ended before this item did not stop the training
            packed = Packed(self._take(index, answer, large), answer.layout)
            self._ask(index + DEPTH * self._count)
            self.waited += time.monotonic() - started
            yield packed

    def close(self) -> None:
        """End the processes."""
        for connection in (self._control, *self._connections):
            connection.close()
        self._memory = torch.empty(0)
        try:
            self._server.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _start(self, first: int) -> None:
        """Start the processes and ask for their first items, from number `first` on."""
        self._starts += 1
        memory = _shared_memory(self._count * DEPTH * SLOT_BYTES)
        self._memory = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.uint8)
        pairs = [socket.socketpair() for _ in range(1 + self._count)]
        theirs = [pair[1].fileno() for pair in pairs]
        # In a group of its own: Ctrl-C, and a signal to the group of this process, are for this process.
        self._server = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, (memory, *theirs))],
            pass_fds=(memory, *theirs),
            stdin=subprocess.DEVNULL,
            process_group=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        os.close(memory)
        for _, end in pairs:
            end.close()
        self._control, *self._connections = [Connection(end.detach()) for end, _ in pairs]
        try:
            self._control.send(self._open_make)
        except OSError:  # ended already; the first item that is waited for says so
            return
        for index in range(first, first + DEPTH * self._count):
            self._ask(index)

    def _restart(self, index: int) -> None:
        """Name the process that ended, and start all again. Raises UserError if earlier starts gave no item."""
        what = self._describe_end()
        self.close()
        if self._starts >= MAX_STARTS:
            raise UserError(
                f"{what}, and so did {self._starts - 1} before it at step {self._steps[index]}; if memory is short, lower "
                f"loader_workers = {self._count}, or set it to 0 to prepare batches without processes"
            )
        warn(f"warning: {what}; the loader starts it again, from step {self._steps[index]}")
        self._start(index)

    def _describe_end(self) -> str:
        try:
            pid, status = self._control.recv()
        except (EOFError, OSError):
            pid, status = self._server.pid, self._server.wait()
        ended = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
        return f"process {pid} of the loader has ended with {ended}"

    def _ask(self, index: int) -> None:
        if index < len(self._steps):
            try:
                self._connection(index).send((self._steps[index], self._slot(index), dict(self._options())))
            except OSError:  # its process has ended, which is said when the item is waited for
                return

    def _receive(self, index: int) -> tuple[Answer | BaseException, bytes] | None:
        """Return the answer for an item, and the bytes of a large one; None if its process has ended."""
        connection = self._connection(index)
        try:
            answer = connection.recv()
            return answer, connection.recv_bytes() if isinstance(answer, Answer) and answer.is_large else b""
        except (EOFError, OSError):
            return None

    def _take(self, index: int, answer: Answer, large: bytes) -> Tensor:
        """Return a copy of what was made; its slot may then be used again."""
        if answer.is_large:
            buffer = torch.frombuffer(bytearray(large), dtype=torch.uint8)
            return buffer.pin_memory() if self._pin_memory else buffer
        start = self._slot(index) * SLOT_BYTES
        buffer = self._memory[start : start + answer.layout.num_bytes]
        return buffer.pin_memory() if self._pin_memory else buffer.clone()

    def _connection(self, index: int) -> Connection:
        return self._connections[index % self._count]

    def _slot(self, index: int) -> int:
        return index % (self._count * DEPTH)


def _shared_memory(num_bytes: int) -> int:
    """Open a file of memory without a name, which takes no room before it is written to."""
    memory = os.memfd_create("batches")
    os.ftruncate(memory, num_bytes)
    return memory
