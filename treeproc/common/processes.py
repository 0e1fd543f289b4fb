"""Work that processes of this machine share. They end with the process that started them, and leave Ctrl-C to it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from treeproc.common.errors import UserError
from treeproc.common.store_requests import in_parallel

Job = TypeVar("Job")
Result = TypeVar("Result")
_JOBS_AHEAD = 4  # for each process
_failed: list[Exception] = []  # in a process: what its `begin` raised


def map_in_processes(
    function: Callable[[Job], Result],
    jobs: Iterable[Job],
    processes: int,
    doing: str,
    begin: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """Yield the results of the jobs in their order. Each process first calls `begin(*arguments)`.

    Raises what `begin` or `function` raises, and UserError if a process dies; `doing` names its work.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of Arrow
    pool = ProcessPoolExecutor(processes, context, _begin, (begin, arguments))
    with _interrupts_wait():
        for _ in range(processes):  # each starts one
            pool.submit(os.getpid)
    try:
        yield from in_parallel(partial(_call, function), jobs, _JOBS_AHEAD * processes, pool)
    except BrokenProcessPool:
        raise UserError(f"the system killed a process that {doing}; free memory, then run the same command again") from None


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let processes that start here ignore Ctrl-C: it reaches the command, which ends its processes.

    They inherit the mask of this thread. An interrupt that comes meanwhile is raised at the end.
    """
    resource_tracker.ensure_running()  # its own start would let interrupts through
    came: list[int] = []  # through another thread, whose mask lets them pass
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number)) if is_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _begin(begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # if a library takes the mask away
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        try:
            begin(*arguments)
        except Exception as error:  # from here, it would be a process that died
            _failed.append(error)


def _call(function: Callable[[Job], Result], job: Job) -> Result:
    if _failed:
        raise _failed[0]
    return function(job)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
