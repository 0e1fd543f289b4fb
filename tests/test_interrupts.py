"""Ctrl-C for a command: it leaves no lock broken, and is never lost."""

import os
import queue
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from treeproc.common.interrupts import careful_interrupts

interrupt = partial(signal.raise_signal, signal.SIGINT)  # in C, so the handler sees the frame of the caller


def test_a_lock_that_is_being_taken_is_taken_and_released():
    done = []
    lock = SimpleNamespace(acquire=None, release=None, __enter__=interrupt, __exit__=lambda *error: done.append("released"))
    with pytest.raises(KeyboardInterrupt), careful_interrupts(), threading.Condition(lock):
        done.append("taken")
        time.sleep(30)
    assert done == ["taken", "released"]


def test_a_thread_that_waits_in_a_lock_is_interrupted():
    waiting = queue.Queue()
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), careful_interrupts():
        waiting.get(timeout=30)
    assert waiting.mutex.acquire(blocking=False)


def test_an_interrupt_in_a_finalizer_is_not_lost():
    class Finalized:
        def __del__(self):
            interrupt()

    with pytest.raises(KeyboardInterrupt), careful_interrupts():
        Finalized()
        time.sleep(30)


def test_other_handlers_stay():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with careful_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with careful_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is before
