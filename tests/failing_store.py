"""A proxy before an S3 server on loopback that fails as stores do: it throttles, resets connections, loses answers, and waits."""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from treeproc.common import storage

# As Amazon's answers, with the ids that make them longer than small objects.
_ERROR = (
    "<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>{code}</Code><Message>{code}</Message>"
    "<RequestId>{id}</RequestId><HostId>{id}</HostId></Error>"
)
_CODES = {403: "AccessDenied", 404: "NoSuchBucket", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}

# What happens to a request: a status to answer with, "reset" (before it is passed on), "lost" (the server has done it, and
# the answer is lost), "cut" (half of the answer's body), seconds to wait, or None.
Fault = int | float | str | None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "FailingStore"

    def setup(self) -> None:
        super().setup()
        self._onward = http.client.HTTPConnection("127.0.0.1", self.server.behind)

    def finish(self) -> None:
        super().finish()
        self._onward.close()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, http.client.HTTPException):
            self.close_connection = True

    def _pass(self) -> None:
        body = self._body()
        fault = self.server.decide(self.command, self.path)
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "reset":
            return self._reset()
        if isinstance(fault, int):
            content = _ERROR.format(code=_CODES[fault], id="0123456789ABCDEF" * 4).encode()
            return self._answer(fault, [("Content-Type", "application/xml")], content)
        self._onward.request(self.command, self.path, body, dict(self.headers.items()))
        answer = self._onward.getresponse()
        content = answer.read()
        if fault == "lost":
            return self._reset()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in ("connection", "transfer-encoding")]
        self._answer(answer.status, kept, content, cut=fault == "cut")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        del self.headers["Transfer-Encoding"]
        return b"".join(parts)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in headers}:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._reset()

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


class FailingStore(ThreadingHTTPServer):
    """The proxy. `fault(method, path)` decides over each request; `counts` has the requests by method and fault."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behind: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.counts = behind, Counter()
        self._lock = threading.Lock()
        self.works()

    def works(self) -> None:
        """Pass everything on from now, and count anew."""
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        self.counts.clear()

    def decide(self, method: str, path: str) -> Fault:
        with self._lock:
            found = self.fault(method, path)
            self.counts[method, found] += 1
        return found

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients leave."""


def some(seed: int, shares: dict[Fault, float]) -> Callable[[str, str], Fault]:
    """Return a `fault` that draws: each fault with its share of the requests."""
    draws = random.Random(seed)
    return lambda method, path: draws.choices([*shares, None], [*shares.values(), 1 - sum(shares.values())])[0]


@contextmanager
def failing_store(endpoint: str) -> Iterator[FailingStore]:
    """Put a proxy before the server of `endpoint`; the environment of this process names the proxy."""
    proxy = FailingStore(int(endpoint.rpartition(":")[2]))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        storage._file_system.cache_clear()
        try:
            yield proxy
        finally:
            storage._file_system.cache_clear()
            proxy.shutdown()
            proxy.server_close()
