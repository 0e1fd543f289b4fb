"""What a request must pass before its text is looked at: who asks, how much, and how many ask at a time."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from treenet.serving.settings import ServeSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# The page loads its own files alone; what it shows is never markup.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# A body that is too large is read and forgotten up to so many times the limit, so that its client gets to read the answer.
_FORGOTTEN = 8


class Refused(Exception):
    """The status and the reason of a request that is not answered."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None):
        super().__init__(reason)
        self.status, self.headers = status, headers or {}


class Guard:
    """An ASGI application in front of another one: token, limits of size, number and time, and headers of all answers."""

    def __init__(self, app: App, settings: ServeSettings, token: str | None, guarded: str = "/translate"):
        self._app, self._settings, self._token, self._guarded = app, settings, token, guarded
        self.waiting = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            self._check_name(scope)
            if scope["path"] == self._guarded and scope["method"] == "POST":
                await self._accept(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Refused as refused:
            if not started:
                await _refuse(answer, refused)

    async def _accept(self, scope: Message, receive: Receive, send: Send) -> None:
        self._check_token(scope)
        if self.waiting >= self._settings.waiting_requests:
            raise Refused(503, f"{self.waiting:,} requests are waiting already; ask again later", {"Retry-After": "1"})
        self.waiting += 1
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                body = await self._read(scope, receive)
                await self._app(scope, _replay(body, receive), send)
        except TimeoutError:
            raise Refused(503, f"no answer in {self._settings.timeout_s:g} s", {"Retry-After": "1"}) from None
        finally:
            self.waiting -= 1

    def _check_name(self, scope: Message) -> None:
        """Without a token, a page of another site must not reach the server by a name that leads here."""
        if self._token is not None:
            return
        try:
            host = urlsplit(f"//{_header(scope, b'host')}").hostname
        except ValueError:
            host = None
        if host not in (*_LOCAL_NAMES, self._settings.host.lower()):
            raise Refused(403, "without a token, the server answers to the names localhost and 127.0.0.1 alone")

    def _check_token(self, scope: Message) -> None:
        if self._token is None:
            return
        scheme, _, given = _header(scope, b"authorization").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self._token.encode())
        if scheme.lower() != "bearer" or not same:
            raise Refused(401, "send the token as 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": "Bearer"})

    async def _read(self, scope: Message, receive: Receive) -> bytes:
        """The body. Raises Refused if it is too large."""
        most = self._settings.request_bytes
        refused = Refused(413, f"a request may have {most:,} bytes; send fewer lines at once", {"Connection": "close"})
        length = _header(scope, b"content-length")
        if length.isdigit() and len(length) < 20 and int(length) > _FORGOTTEN * most:
            raise refused
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the request ended early")
            size += len(message.get("body", b""))
            if size <= most:
                chunks.append(message.get("body", b""))
            more = message.get("more_body", False) and size <= _FORGOTTEN * most
        if size > most:
            raise refused
        return b"".join(chunks)


def _header(scope: Message, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that was read, for the next reader."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(send: Send, refused: Refused) -> None:
    body = json.dumps({"error": str(refused)}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **refused.headers}
    written = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": written})
    await send({"type": "http.response.body", "body": body})
