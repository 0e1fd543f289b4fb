"""Clients that send or read too slowly lose their connection, and take no room from others."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress

import pytest

pytest.importorskip("uvicorn", reason="needs the extra [serve]")
import uvicorn
from test_serving import Replicas, Slow
from uvicorn.server import ServerState

from treenet.extras.serving.http_app import build_entrance
from treenet.extras.serving.messages import Question
from treenet.extras.serving.server import build_config
from treenet.extras.serving.settings import ServeSettings

pytestmark = pytest.mark.slow

# Tests wait for an event at most so long; none measures a time.
PATIENCE_S = 60
HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n"
REQUEST = HEAD + b'{"lines": ["a"]}'


class Answers(Replicas):
    """One answer, after some seconds."""

    def __init__(self, answer: bytes = b"[]", wait_s: float = 0):
        super().__init__()
        self.answer, self.wait_s = answer, wait_s

    async def ask(self, question: Question, *, alone: bool = False) -> bytes:
        await asyncio.sleep(self.wait_s)
        return self.answer


@asynccontextmanager
async def serve(replicas: Replicas, timeout_s: float, client_s: float | None = None, token: str | None = None):
    """The entrance behind a socket of this process: its address, its connections, and the guard."""
    guard = build_entrance(ServeSettings(timeout_s=timeout_s), replicas, token)
    config, state = build_config(ServeSettings(timeout_s=client_s or timeout_s), guard), ServerState()
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: config.http_protocol_class(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], state.connections, guard


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes that the server sends until it closes the connection."""
    with suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    return b""


def test_a_client_that_sends_nothing_loses_its_connection():
    async def check() -> None:
        async with serve(Answers(), 0.2) as (port, connections, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await ended(reader) == b"" and not connections
            writer.close()

    asyncio.run(check())


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nHost: localhost\r\n", REQUEST + b"GET / HTTP/1.1\r\n"])
def test_a_client_that_sends_headers_for_ever_loses_its_connection(start):
    """The client is slow at its first request, or at a later one."""

    async def check() -> None:
        async with serve(Answers(), 0.5) as (port, connections, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            for _ in range(PATIENCE_S * 20):
                with suppress(ConnectionError):
                    writer.write(b"X: a\r\n")
                    await writer.drain()
                await asyncio.sleep(0.05)
                if reader.at_eof() or writer.is_closing() or not connections:
                    break
            assert not connections
            writer.close()

    asyncio.run(check())


def test_a_body_that_does_not_come_is_refused():
    async def check() -> None:
        replicas = Answers()
        async with serve(replicas, 0.3) as (port, connections, guard):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b'{"lines"')
            answer = await asyncio.wait_for(reader.readuntil(b"}"), PATIENCE_S)
            assert answer.startswith(b"HTTP/1.1 503") and b"no answer in 0.3 s" in answer
            assert guard.waiting == 0
            await ended(reader)
            assert not connections
            writer.close()

    asyncio.run(check())


def test_a_client_that_does_not_take_its_answer_loses_it():
    async def check() -> None:
        async with serve(Answers(b"x" * (64 << 20)), 0.5) as (port, connections, guard):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setblocking(False)
                client.sendall(REQUEST)
                while not connections:
                    await asyncio.sleep(0.01)
                for _ in range(PATIENCE_S * 20):
                    await asyncio.sleep(0.05)
                    if not connections:
                        break
                assert not connections and guard.waiting == 0

    asyncio.run(check())


TARGETS = (
    "/translate", "/translate%0A", "/translate%00", "/translate%20", "/translate/", "//translate", "/%74ranslate", "/TRANSLATE",
    "/translate;a", "/./translate", "/x/../translate", "http://localhost/translate", "http://localhost/translate%0A",
    "//localhost/translate", "*", "/docs", "/translate?", "/?/translate", "/healthz%0A", "/nothing",
)  # fmt: skip


@pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT"])
def test_through_a_socket_nothing_is_read_without_the_token(method):
    """The bodies that the heads promise never come, so an answer does not wait for them."""
    headers = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 300000000\r\n"
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YWJjZGVmZ2hpamtsbW5vcA==\r\n"
    upgrade += "Sec-WebSocket-Version: 13\r\n"

    async def check() -> None:
        replicas = Replicas()
        async with serve(replicas, PATIENCE_S, token="a-token-of-many-characters") as (port, _, guard):
            for target in TARGETS:
                for more in ("", upgrade, "Expect: 100-continue\r\n"):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(f"{method} {target} HTTP/1.1\r\n{headers}{more}\r\n".encode())
                    status = int((await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1])
                    public = target == "/?/translate" and method in ("GET", "HEAD")
                    assert status == (200 if public else 401), (target, more)
                    writer.transport.abort()
        assert replicas.asked == [] and guard.waiting == 0

    asyncio.run(check())


def test_a_client_that_leaves_takes_its_request_along():
    async def check() -> None:
        slow = Slow()
        async with serve(slow, PATIENCE_S) as (port, connections, guard):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await asyncio.wait_for(slow.begun.wait(), PATIENCE_S)
            assert guard.waiting == 1
            writer.close()
            for _ in range(PATIENCE_S * 20):
                if not guard.waiting:
                    break
                await asyncio.sleep(0.05)
            assert (guard.waiting, slow.cancelled) == (0, 1)

    asyncio.run(check())


def test_the_end_of_the_server_is_an_answer(capfd):
    """Ctrl-C gave a request that took longer than five seconds status 500, and a traceback on the standard error."""

    async def check() -> bytes:
        slow = Slow()
        config = build_config(ServeSettings(), build_entrance(ServeSettings(), slow, None))
        config.timeout_graceful_shutdown, config.port = 1, 0
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await asyncio.wait_for(slow.begun.wait(), PATIENCE_S)
        server.should_exit = True
        answer = await ended(reader)
        await serving
        writer.close()
        return answer

    answer = asyncio.run(check())
    assert answer.startswith(b"HTTP/1.1 503 ") and answer.endswith(b'{"error": "the server ends"}')
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_that_takes_long_comes():
    """The time of the server does not count as the client's."""

    async def check() -> None:
        async with serve(Answers(b"[1]", wait_s=1.5), PATIENCE_S, client_s=0.3) as (port, _, __):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            answer = await ended(reader)
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"[1]")
            writer.close()

    asyncio.run(check())
