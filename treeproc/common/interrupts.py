"""Ctrl-C for a command: it leaves no lock broken, and is never lost.

Python raises KeyboardInterrupt wherever the main thread is. In the middle of the standard library's locks, the exception leaves
a lock that is held for ever, or one that its owner no longer holds. In a finaliser or a callback of a weak reference, Python
drops it.
"""

import _thread
import concurrent.futures._base
import concurrent.futures.thread
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LOCKING = {module.__file__ for module in (threading, queue, concurrent.futures._base, concurrent.futures.thread)}
_AGAIN_S = 0.01


@contextmanager
def careful_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt inside only where it does no harm. Does nothing if Ctrl-C is ignored or somebody else's."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    previous = sys.unraisablehook

    def dropped(what: Any) -> None:
        if what.exc_type is KeyboardInterrupt:
            _send_again()
        else:
            previous(what)

    signal.signal(signal.SIGINT, _Handler())
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = previous
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Handler:
    """Raises KeyboardInterrupt, but in the code of a lock only if the main thread waits there: at the same place as last time."""

    def __init__(self) -> None:
        self._place: tuple[FrameType, int] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        place = (frame, frame.f_lasti) if frame is not None and frame.f_code.co_filename in _LOCKING else None
        if place is None or place == self._place:
            self._place = None
            raise KeyboardInterrupt
        self._place = place
        _send_again()


def _send_again() -> None:
    """Send the signal to this thread, the main one, a little later. `Thread` would take locks, which it may hold itself."""
    _thread.start_new_thread(_send, (threading.get_ident(),))


def _send(thread: int) -> None:
    time.sleep(_AGAIN_S)
    signal.pthread_kill(thread, signal.SIGINT)
