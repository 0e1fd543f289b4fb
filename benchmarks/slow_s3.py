"""A proxy before an S3 server on loopback: every request waits as it does on the way to a real store, and requests are counted.

    python benchmarks/slow_s3.py PORT SERVER_PORT SECONDS

A request is in flight from its first byte to the first byte of its answer. A connection that sends `?` gets {"most": N,
"requests": M}: the most requests in flight since the last such question, and their number.
"""

import asyncio
import json
import sys

_CONTINUE = b"HTTP/1.1 100"  # no answer yet: the client may send the body now
_BYTES = 1 << 18


class Proxy:
    def __init__(self, server_port: int, seconds: float):
        self._server_port, self._seconds = server_port, seconds
        self._now = self._most = self._requests = 0

    async def connect(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        """Handle one connection of a client, with one connection to the server for it."""
        first = await client.read(_BYTES)
        if first == b"?":
            answer.write(json.dumps({"most": self._most, "requests": self._requests}).encode())
            self._most = self._requests = 0
            answer.close()
            return
        response, server = await asyncio.open_connection("127.0.0.1", self._server_port)
        waiting = [False]
        await asyncio.gather(self._requests_of(first, client, server, waiting), self._answers_of(response, answer, waiting))

    async def _requests_of(
        self, content: bytes, client: asyncio.StreamReader, server: asyncio.StreamWriter, waiting: list[bool]
    ) -> None:
        while content:
            if not waiting[0]:
                waiting[0] = True
                self._now += 1
                self._requests += 1
                self._most = max(self._most, self._now)
                await asyncio.sleep(self._seconds)
            server.write(content)
            await server.drain()
            content = await client.read(_BYTES)
        server.close()

    async def _answers_of(self, response: asyncio.StreamReader, answer: asyncio.StreamWriter, waiting: list[bool]) -> None:
        while content := await response.read(_BYTES):
            if waiting[0] and not content.startswith(_CONTINUE):
                waiting[0] = False
                self._now -= 1
            answer.write(content)
            await answer.drain()
        answer.close()


async def main(port: int, server_port: int, seconds: float) -> None:
    """Serve until the process is ended."""
    server = await asyncio.start_server(Proxy(server_port, seconds).connect, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
