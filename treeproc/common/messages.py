"""The messages of a command: progress, notes and warnings, on standard error. Results go to standard output.

All go through the loggers of both packages. A program that imports the packages decides itself what it shows of them.
"""

import io
import logging
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from treeproc.common.errors import one_line, printable

PACKAGES = ("treeproc", "treenet")
_logger = logging.getLogger(__name__)


class _StandardError(logging.StreamHandler):
    """Writes to what `sys.stderr` is at the time. Names in damaged files give the terminal no command, by no logger."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


_handler = _StandardError()


def tell(message: str) -> None:
    """Show a line about progress, which `--quiet` leaves out."""
    _logger.info("%s", printable(message))


def warn(message: str) -> None:
    """Show a warning or a note, which `--quiet` keeps."""
    _logger.warning("%s", printable(message))


def is_quiet() -> bool:
    """Return whether the command runs with `--quiet`, and so shows no progress."""
    return _handler.level >= logging.WARNING


def choose_messages(*, quiet: bool = False, verbose: bool = False) -> None:
    """Show only warnings with `quiet`; show also details, and the time of each line, with `verbose`."""
    _handler.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    _handler.setFormatter(logging.Formatter("%(asctime)s %(message)s" if verbose else "%(message)s"))


@contextmanager
def messages_shown(*, quiet: bool = False) -> Iterator[None]:
    """Show the messages of both packages on standard error, and warnings of Python's libraries as lines among them."""
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before, show = [(logger.level, logger.handlers[:]) for logger in loggers], warnings.showwarning
    choose_messages(quiet=quiet)
    for logger in loggers:
        logger.addHandler(_handler)
        logger.setLevel(logging.DEBUG)
    # A warning of a library, without the line of code that it comes from.
    warnings.showwarning = lambda message, *place: warn(f"warning: {one_line(str(message))}")
    try:
        yield
    finally:
        warnings.showwarning = show
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
        choose_messages()


# Rates and times left are of about the last minute: work that began slowly does not count for ever.
WINDOW_S = 60.0
_SAMPLE_S = 1.0
# In a log, what is over sooner than this is not worth a line.
PHASE_S = 3.0


def format_seconds(seconds: float) -> str:
    """Format seconds: `75` -> `1:15`, `3675` -> `1:01:15`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Rate:
    """Counts a second over about the last WINDOW_S, or since the start where the last advance is older."""

    def __init__(self, now: float, count: int):
        self._samples = deque([(now, count)])

    def add(self, now: float, count: int) -> None:
        """Add the count at a time. Samples less than a second apart are one."""
        samples = self._samples
        if len(samples) > 1 and now - samples[-2][0] < _SAMPLE_S:
            samples.pop()
        samples.append((now, count))
        while len(samples) > 2 and now - samples[1][0] >= WINDOW_S:
            samples.popleft()

    def per_second(self, now: float) -> float:
        """Return the rate, 0.0 if nothing advanced yet."""
        count = self._samples[-1][1]
        old = (sample for sample in reversed(self._samples) if now - sample[0] >= WINDOW_S and sample[1] < count)
        since, base = next(old, self._samples[0])
        return (count - base) / (now - since) if now > since else 0.0


class _Bar(tqdm):
    """tqdm with the rate of a Progress."""

    def __init__(self, rate: Callable[[], float], **options: Any) -> None:
        self._rate = rate
        super().__init__(**options)

    @property
    def format_dict(self) -> dict:
        return super().format_dict | {"rate": self._rate()}


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
        clock: Callable[[], float] = time.monotonic,
    ):
        self.label, self.total, self.unit, self.initial, self.interval = label, total, unit, initial, interval
        self.stream, self._clock = stream or _messages(), clock
        self.count, self.postfix = initial, ""
        self.phase = ""
        self._bar: tqdm | None = None
        self._stop = threading.Event()
        self._timer = threading.Thread(target=self._report_regularly, daemon=True)

    def __enter__(self) -> "Progress":
        self._started = self._clock()
        self._rate = Rate(self._started, self.initial)
        if self.stream.isatty():
            self._bar = _Bar(
                self._rate_now, desc=self.label, total=self.total, initial=self.initial, unit=self.unit, file=self.stream
            )
        else:
            self._timer.start()
        _shown.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _shown.remove(self)
        if self._bar is not None:
            self._bar.close()
        else:
            self._stop.set()
            self._timer.join()
            self._print_line()

    def began(self, seconds_ago: float = 0.0) -> None:
        """Note that the work began then: what came before, such as the start of other processes, does not enter the rate."""
        self._rate = Rate(max(self._started, self._clock() - seconds_ago), self.count)

    def update(self, count: int = 1, postfix: str | None = None) -> None:
        """Advance by `count` and, when given, show another postfix."""
        self.count += count
        if count < 0:
            self.began()  # that work is lost, and begins again
        elif count:
            self._rate.add(self._clock(), self.count)
        if postfix is not None:
            self.postfix = postfix
        if self._bar is not None:
            if postfix is not None:
                self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.update(count)

    def show_phase(self, name: str) -> None:
        """Name what is under way, or nothing any more."""
        self.phase = name
        if self._bar is not None:
            self._bar.set_postfix_str(name or self.postfix)

    def line(self) -> str:
        """Return the state as one line of text."""
        elapsed, rate = self._clock() - self._started, self._rate_now()
        parts = [f"{self.label}: {self.count:,} {self.unit}"]
        if self.total is not None:
            parts[0] = f"{self.label}: {self.count:,}/{self.total:,} {self.unit} ({self.count / max(1, self.total):.1%})"
        parts += [f"{rate:,.1f} {self.unit}/s", f"elapsed {format_seconds(elapsed)}"]
        if self.total is not None and rate > 0:
            parts.append(f"left {format_seconds((self.total - self.count) / rate)}")
        return ", ".join([*parts, *filter(None, (self.postfix, self.phase))])

    def _rate_now(self) -> float:
        return self._rate.per_second(self._clock())

    def _report_regularly(self) -> None:
        while not self._stop.wait(self.interval):
            self._print_line()

    def _print_line(self) -> None:
        _write(self.stream, self.line() + "\n")


_shown: list[Progress] = []  # of this process, the innermost last
_under_way: list[str] = []  # the names of its phases, the innermost last


def under_way() -> str:
    """Return the innermost `phase` of this process, or nothing."""
    return _under_way[-1] if _under_way else ""


@contextmanager
def phase(name: str, *, after: float = PHASE_S) -> Iterator[None]:
    """Name what is under way where there is nothing to count: on standard error, or beside the Progress that is shown.

    On a terminal the name goes when the work is done. In a log it is one line, once the work has taken `after` seconds.
    """
    stream, progress = _messages(), _shown[-1] if _shown else None
    if progress is not None:
        outer = progress.phase
        progress.show_phase(name)
    elif stream.isatty():
        _write(stream, f"\r{name} ...\x1b[K")
    say_so = threading.Timer(after, lambda: _write(stream, f"{progress.line() if progress else name + ' ...'}\n"))
    say_so.daemon = True
    if not stream.isatty():
        say_so.run() if not after else say_so.start()
    _under_way.append(name)
    try:
        yield
    finally:
        _under_way.remove(name)
        say_so.cancel()
        if progress is not None:
            progress.show_phase(outer)
        elif stream.isatty():
            _write(stream, "\r\x1b[K")


class _Nowhere(io.TextIOBase):
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


def _messages() -> TextIO:
    """Choose the stream of progress: none with `--quiet`."""
    return _Nowhere() if is_quiet() else sys.stderr  # type: ignore[return-value]  # a TextIO for all that is done here


def _write(stream: TextIO, text: str) -> None:
    # Not `print`: Ray Train patches it to log every line a second time.
    stream.write(text)
    stream.flush()
