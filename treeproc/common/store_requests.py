"""Requests to an object store. They are repeated while the store throttles, fails or does not answer, and not when it refuses.

Arrow's own strategies are not enough. They give up after a count of attempts, and they tell nothing. They never repeat a read of
an object that is smaller than the store's error, because the text of the error does not fit into the buffer of the object. Only
the parts of a large upload are left to Arrow (`part_repeats`), because nothing else has them any more. It repeats them after HTTP
5xx and lost connections, but not after HTTP 429, which some stores send.
"""

import io
import math
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pyarrow

from treeproc.common.errors import UserError, quoted
from treeproc.common.messages import tell, warn

Answer = TypeVar("Answer")

LIMIT = "TREE_ATTENTION_STORE_RETRY_S"
_LIMIT_S = 300.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 20.0
# A store that never answered this process is more likely a wrong address than a store that is down.
_UNREACHED_S = 15.0
_PART_WAIT_S = 0.025  # Arrow waits so long before it sends a part again, then twice as long each time

# Variables of the environment, by the scheme of a URI: where a store is, and who asks it.
VARIABLES = {
    "s3": "AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE or keys",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
# Arrow tells of an error by its text alone. Names of objects stand in quotes there, and are left out first.
_NAMES = re.compile(r"'[^']*'")
_OF_NO_USE = re.compile(r"\(Request ID: [^)]*\)|^.*?(?=Azure Error: )")
_HIDDEN = "Failed to flush response stream"
_THROTTLES = re.compile(
    r"SLOW_?DOWN|THROTTL|TOO_?MANY_?REQUESTS|RESOURCE_EXHAUSTED|(?:HTTP STATUS|AZURE ERROR: \[\w*\]) (?:429|503)"
)
_UNREACHED = re.compile(r"CURLCODE: (?:6|7|35),|FAIL TO GET A NEW CONNECTION")
_CERTIFICATE = re.compile(r"CURLCODE: (?:51|58|60|77),")
_FAILS = re.compile(
    r"NETWORK_CONNECTION|INTERNAL_FAILURE|INTERNALERROR|SERVICE_?UNAVAILABLE|REQUEST_?TIMEOUT"
    r"|(?:HTTP STATUS|AZURE ERROR: \[\w*\]) (?:408|500|502|504)|AZURE ERROR: \[\] (?!\d)"  # without a status, it is the network's
    r"|NO_SUCH_UPLOAD"  # the answer to the end of an upload was lost
    r"|\bUNAVAILABLE\b|DEADLINE_EXCEEDED|\bABORTED\b|\bINTERNAL\b"
)

_draws = random.Random()  # its own, so that seeds of the work stay as they are
_lock = threading.Lock()
_repeats = 0
_answered = False

# While it is set, no request is repeated: Ctrl-C waits for the threads that are at work.
given_up = threading.Event()
_of_thread = threading.local()
_contexts = 0
Item = TypeVar("Item")
Result = TypeVar("Result")

# Objects in flight: one request to S3 takes tens of milliseconds before its first byte, and gives some 100 MB/s.
AT_ONCE = 16
_UPLOADS_BYTES = 64 << 20  # Arrow sends in the background, and would hold whatever the store has not taken yet


class StoreRefuses(UserError):
    """The store does not answer as it should. That says nothing about the content of an object."""


def ask(path: object, request: Callable[[], Answer], *, once: bool = False) -> Answer:
    """Return the answer to a request, which is repeated until `TREE_ATTENTION_STORE_RETRY_S` seconds are over.

    The request must do the same when it runs again. With `once`, it runs once. Raises FileNotFoundError for a missing object, and
    StoreRefuses for everything else.
    """
    global _answered
    began, tries, most = time.monotonic(), 0, retry_limit()
    no_more = getattr(_of_thread, "given_up", given_up)
    while True:
        tries += 1
        try:
            answer = request()
        except FileNotFoundError:
            _answered = True
            raise
        except (OSError, pyarrow.ArrowException) as error:
            reason = " ".join(_OF_NO_USE.sub("", str(error)).split())
            kind, wait = _kind_of(reason), _draws.uniform(0, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(tries, 10)))
            limit = min(_UNREACHED_S, most) if kind == "unreached" and not _answered else most
            passed = time.monotonic() - began
            if once or kind == "refuses" or passed + wait > limit or no_more.is_set():
                raise StoreRefuses(_describe(path, kind, reason, tries, passed)) from None
            _answered |= kind != "unreached"
            _count(path, kind, reason, limit)
        else:
            _answered = True
            return answer
        no_more.wait(wait)


def give_up_when(no_more: threading.Event) -> None:
    """In this thread, repeat no request once the event is set."""
    _of_thread.given_up = no_more


@contextmanager
def may_give_up() -> Iterator[None]:
    """Let `give_up_after` count inside. Behind the last of these contexts, of all threads, requests are repeated again."""
    global _contexts
    with _lock:
        _contexts += 1
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                given_up.clear()


def give_up_after(error: BaseException) -> None:
    """After Ctrl-C, repeat no request while the work is being ended."""
    if isinstance(error, KeyboardInterrupt):
        given_up.set()


def retry_limit() -> float:
    """Return the seconds for which a request is repeated: `TREE_ATTENTION_STORE_RETRY_S`, else five minutes.

    Raises UserError if the variable is not a number of seconds.
    """
    value = os.environ.get(LIMIT)
    if not value:
        return _LIMIT_S
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise UserError(f"{LIMIT} must be a number of seconds, 0 or more, but is {quoted(value)}")
    return limit


def part_repeats() -> int:
    """Return how often Arrow sends a part of an upload again, so that its waits add up to `retry_limit` at most."""
    return max(1, int(math.log2(retry_limit() / _PART_WAIT_S + 1)))


def tell_repeats() -> None:
    """Tell at the end of a command how many requests of this process were repeated."""
    if _repeats:
        tell(f"requests to the object store that were repeated: {_repeats}")


def _kind_of(reason: str) -> str:
    """Return what an error of Arrow means: the store throttles, fails, is not reached, or refuses."""
    text = _NAMES.sub("", reason).upper()
    if _CERTIFICATE.search(text):
        return "refuses"
    if _UNREACHED.search(text):
        return "unreached"
    if _THROTTLES.search(text):
        return "throttles"
    return "fails" if _FAILS.search(text) else "refuses"


def _count(path: object, kind: str, reason: str, limit: float) -> None:
    """Count a repeated request. The first one of a process is told."""
    global _repeats
    with _lock:
        _repeats += 1
        if _repeats > 1:
            return
    what = {"throttles": "throttles", "fails": "fails for the moment", "unreached": "cannot be reached"}[kind]
    warn(f"warning: {path}: the object store {what} ({reason[:200]}); each such request is repeated for up to {limit:.0f} s")


def _describe(path: object, kind: str, reason: str, tries: int, seconds: float) -> str:
    reason, again = reason[:200], "then run the same command again"
    check = f"check the bucket, your rights and the environment ({VARIABLES.get(str(path).partition(':')[0], 'keys')})"
    if kind == "refuses":
        return f"{path}: the object store refuses: {reason}; {check}, {again}"
    if kind == "unreached":
        return f"{path}: the object store cannot be reached: {reason}; check the network and the address, {again}"
    asked = f"asked {tries} times in {seconds:.0f} s, the last answer is: {reason}"
    if kind == "throttles":
        return f"{path}: the object store throttles: {asked}; use fewer workers, or set {LIMIT} to more seconds, {again}"
    if _HIDDEN in reason:  # Arrow hides what the store says to a read of a small object
        return f"{path}: the object store throttles, fails, or refuses to read this object: {asked}; {check}, {again}"
    return f"{path}: the object store fails: {asked}; wait until it works, or set {LIMIT} to more seconds, {again}"


def run_all(function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call the function for every item, several at a time; errors as `in_parallel` raises them."""
    for _ in in_parallel(function, items):
        pass


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int = AT_ONCE, pool: Executor | None = None
) -> Iterator[Result]:
    """Yield the results in the order of the items, computed by threads, or by `pool`, which is shut down at the end.

    At most `at_once` items are begun beyond the last result. The first error in the order of the items is raised, after
    those that were begun have ended; nothing new is begun then. After Ctrl-C, they repeat no request to a store.
    """
    ahead: deque[Future] = deque()
    with may_give_up(), pool or ThreadPoolExecutor(at_once) as pool:
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) == at_once:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except KeyboardInterrupt as error:
            give_up_after(error)
            raise
        finally:
            for future in ahead:
                future.cancel()


class InputStream(io.RawIOBase):
    """A stream of Arrow as one of Python. After an error of the store it is opened again, at the place where it was.

    `open_again` opens the object as a file that is read at any place; without `stream`, it opens it the first time, too.
    """

    def __init__(self, path: object, open_again: Callable[[], pyarrow.NativeFile], stream: pyarrow.NativeFile | None = None):
        self._path, self._open_again, self._place = path, open_again, 0
        self._stream: pyarrow.NativeFile | None = stream or ask(path, open_again)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._ask(lambda stream: stream.readinto(buffer))
        self._place += read
        return read

    def readall(self) -> bytes:
        content = self._ask(lambda stream: stream.read())
        self._place += len(content)
        return content

    def close(self) -> None:
        self._drop()
        super().close()

    def _ask(self, read: Callable[[pyarrow.NativeFile], Answer]) -> Answer:
        def request() -> Answer:
            if self._stream is None:
                self._stream = self._open_again()
                self._stream.seek(self._place)
            try:
                return read(self._stream)
            except OSError:
                self._drop()
                raise

        return ask(self._path, request)

    def _drop(self) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None


class SeekableStream(InputStream):
    """A file of Arrow that is read at any place."""

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: lambda: 0, io.SEEK_CUR: lambda: self._place, io.SEEK_END: lambda: self._ask(lambda s: s.size())}
        place = base[whence]() + offset
        self._ask(lambda stream: stream.seek(place))
        self._place = place
        return place

    def tell(self) -> int:
        return self._place


class OutputStream(io.RawIOBase):
    """An output stream of Arrow as one of Python. It waits for the store from time to time.

    Arrow repeats the request of a part. No request is repeated here, since the parts that were sent are not there any more.
    """

    def __init__(self, path: object, stream: pyarrow.NativeFile):
        self._path, self._stream, self._waiting = path, stream, 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        written = ask(self._path, lambda: self._stream.write(content), once=True)
        self._waiting += written
        if self._waiting >= _UPLOADS_BYTES:
            ask(self._path, self._stream.flush, once=True)
            self._waiting = 0
        return written

    def close(self) -> None:
        if not self.closed:
            ask(self._path, self._stream.close, once=True)
        super().close()
