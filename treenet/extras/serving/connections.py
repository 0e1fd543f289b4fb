"""Connections of the server that end when their client is too slow.

uvicorn waits without limit for a request, and for a client that does not take its answer. Each such client would hold a
connection and the memory of an answer, and there is room for a number of connections alone.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LOOKS = 8  # at a connection during its limit


class TimedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn. A client has `client_s` seconds to send a request, and as many to take the answer.

    The time that the server works on an answer does not count. The guard bounds it, and the time that a body takes.
    """

    def __init__(self, *arguments: Any, client_s: float, **named: Any):
        super().__init__(*arguments, **named)
        self._client_s = client_s
        self._since = self.loop.time()  # the client's turn
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._since = self.loop.time()
        self._check()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        """Abort where the client's turn lasts too long: what it has not taken of an answer is forgotten."""
        if self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing():
            self._since = self.loop.time()
        elif self.loop.time() - self._since >= self._client_s:
            self.transport.abort()
            return
        self._look = self.loop.call_later(self._client_s / _LOOKS, self._check)
