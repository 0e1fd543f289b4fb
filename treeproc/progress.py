"""Progress of long work: a bar on a terminal, plain lines in a log.

In a log the reporter prints at least every `interval` seconds, also while nothing advances, so
that a stalled job is told from a dead one.
"""

import sys
import threading
import time
from typing import TextIO

from tqdm import tqdm


def format_seconds(seconds: float) -> str:
    """`75` -> `1:15`, `3675` -> `1:01:15`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Context manager that reports count, total, rate, time left and a free postfix.

    `initial` counts as done before the start and does not enter the rate.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        *,
        unit: str = "it",
        initial: int = 0,
        interval: float = 10.0,
        stream: TextIO | None = None,
    ):
        self.label, self.total, self.unit, self.initial, self.interval = label, total, unit, initial, interval
        self.stream = stream or sys.stderr
        self.count, self.postfix = initial, ""
        self._bar: tqdm | None = None
        self._stop = threading.Event()
        self._timer = threading.Thread(target=self._report_regularly, daemon=True)

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        if self.stream.isatty():
            self._bar = tqdm(desc=self.label, total=self.total, initial=self.initial, unit=self.unit, file=self.stream)
        else:
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self._stop.set()
            self._timer.join()
            self._print_line()

    def update(self, count: int = 1, postfix: str | None = None) -> None:
        """Advance by `count` and, when given, show another postfix."""
        self.count += count
        if postfix is not None:
            self.postfix = postfix
        if self._bar is not None:
            if postfix is not None:
                self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.update(count)

    def line(self) -> str:
        """The state as one line of text."""
        elapsed = time.monotonic() - self._started
        rate = (self.count - self.initial) / elapsed if elapsed > 0 else 0.0
        parts = [f"{self.label}: {self.count:,} {self.unit}"]
        if self.total is not None:
            parts[0] = f"{self.label}: {self.count:,}/{self.total:,} {self.unit} ({self.count / max(1, self.total):.1%})"
        parts += [f"{rate:,.1f} {self.unit}/s", f"elapsed {format_seconds(elapsed)}"]
        if self.total is not None and rate > 0:
            parts.append(f"left {format_seconds((self.total - self.count) / rate)}")
        return ", ".join(parts + ([self.postfix] if self.postfix else []))

    def _report_regularly(self) -> None:
        while not self._stop.wait(self.interval):
            self._print_line()

    def _print_line(self) -> None:
        # Not `print`: Ray Train patches it to log every line a second time.
        self.stream.write(self.line() + "\n")
        self.stream.flush()
