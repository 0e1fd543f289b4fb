"""Shard verifiers in this process, in processes of this machine, or in the actors of a Ray cluster."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from treeproc.common.errors import UserError
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import in_parallel
from treeproc.inspection.shard_verifier import ShardVerifier

_JOBS_AHEAD = 4  # for each process
_verifier: ShardVerifier  # of a process of the pool


def run_here(arguments: dict, jobs: Sequence[dict]) -> Iterator[tuple[int, dict]]:
    """Return (number of the job, result of the verifier), one after the other."""
    verifier = ShardVerifier(**arguments)
    return ((number, verifier(**job)) for number, job in enumerate(jobs))


def run_in_processes(arguments: dict, jobs: Sequence[dict], processes: int) -> Iterator[tuple[int, dict]]:
    """Yield as `run_here` does. Raises UserError if a process dies."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of Arrow
    pool = ProcessPoolExecutor(processes, context, _begin, (arguments,))
    with _without_interrupts():
        for _ in range(processes):  # each starts one
            pool.submit(os.getpid)
    try:
        yield from enumerate(in_parallel(_run, jobs, _JOBS_AHEAD * processes, pool))
    except BrokenProcessPool:
        raise UserError(
            "the system killed a process that verified shards; free memory, then run the same command again"
        ) from None


def run_on_ray(arguments: dict, jobs: Sequence[dict], folder: AnyPath) -> Iterator[tuple[int, dict]]:
    """Yield as `run_here` does, in any order. Raises UserError if a node does not see `folder`."""
    from treeproc.stages.ray_job import run_jobs  # whoever needs no Ray does not load it

    return run_jobs(ShardVerifier, arguments, jobs, folder=folder)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes that start here ignore Ctrl-C: it reaches the command, which ends its processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _begin(arguments: dict) -> None:
    global _verifier
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _verifier = ShardVerifier(**arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(job: dict) -> dict:
    return _verifier(**job)
