"""Requests at the door of the server: without the token, nothing but the public pages answers 200, and no body is read.

The requests are ASGI scopes as uvicorn makes them. Behind the door stand replicas that count the questions.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from urllib.parse import unquote_to_bytes

TOKEN = "a-token-of-many-characters"
PUBLIC = ("/", "/page.js", "/page.css", "/openapi.json", "/healthz")
QUESTIONS = {"/translate": "translation", "/classify": "classification"}  # with the task of the model that answers
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "post", "POST ", "\nPOST", "X")
_AROUND = (
    b"//",
    b"/.",
    b"/..",
    b"/../",
    b"/./",
    b"%00",
    b"%2f",
    b"%2F",
    b"%0a",
    b"%0D%0A",
    b"%C2%85",
    b"%E2%80%A8",
    b";x",
    b"?x",
    b"#x",
    b"/x",
)
_TOKENS = ("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, f"Bearer,{TOKEN}")
_BODY = json.dumps({"lines": ["a"]}).encode()


class _Counting:
    """Replicas that count the questions that reach them."""

    def __init__(self, task: str) -> None:
        from treenet.extras.serving.messages import Served

        self.asked, self.served = 0, Served("model", task, 3)

    async def ask(self, question: object) -> bytes:
        self.asked += 1
        return b"[]"

    def running(self) -> int:
        return 1


@dataclass
class Request:
    method: str
    target: bytes  # as a client sends it, without a query
    authorization: str

    def scope(self) -> dict:
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY))]
        headers += [(b"authorization", self.authorization.encode())] if self.authorization else []
        target, _, query = self.target.partition(b"?")
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method, "scheme": "http",
            "path": unquote_to_bytes(target).decode("utf-8", "replace"), "raw_path": target, "query_string": query,
            "root_path": "", "headers": headers, "client": ("10.0.0.1", 1), "server": ("0.0.0.0", 8000),
        }  # fmt: skip


def requests(random: Random, count: int) -> Iterator[Request]:
    """Yield every byte before, in and after every address, and then `count` requests by chance."""
    known = [path.encode() for path in (*PUBLIC, *QUESTIONS)]
    for path in known:
        for byte in range(256):
            one = bytes([byte])
            for added in {one, b"%%%02X" % byte, b"%%%02x" % byte}:
                for target in (path + added, added + path, path[:1] + added + path[1:]):
                    yield Request("POST" if path.decode() in QUESTIONS else "GET", target, "")
        for method in _METHODS:
            yield Request(method, path, "")
    for _ in range(count):
        target = random.choice(known)
        for _ in range(random.randint(0, 3)):
            at, added = random.randrange(len(target) + 1), random.choice(_AROUND)
            kind = random.randrange(5)
            target = (
                target[:at] + added + target[at:],
                target + added,
                b"".join(b"%%%02X" % byte if random.random() < 0.3 else bytes([byte]) for byte in target),
                random.choice([b"http://127.0.0.1:8000", b"http://x", b"//x", b"*"]) + target,
                target.swapcase(),
            )[kind]
        yield Request(random.choice(_METHODS), target, random.choice([*_TOKENS, f"Bearer {TOKEN}", f"bearer  {TOKEN} "]))


def _is_given(authorization: str) -> bool:
    scheme, _, token = authorization.partition(" ")
    return scheme.lower() == "bearer" and token.strip() == TOKEN


async def _ask(app, request: Request) -> tuple[int, int, bytes]:
    """Return the status, the bytes of the body that were read, and the answer."""
    read, sent = 0, []

    async def receive() -> dict:
        nonlocal read
        if read:
            await asyncio.sleep(60)
        read += len(_BODY)
        return {"type": "http.request", "body": _BODY, "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    await app(request.scope(), receive, send)
    return sent[0]["status"], read, b"".join(message.get("body", b"") for message in sent)


def fuzz_server(count: int, seed: int = 1) -> tuple[dict[str, int], list[str]]:
    """Send all requests to a server of each task. Returns the figures, and what got past the door."""
    figures, past = {"inputs": 0, "done": 0, "refused": 0, "silent": 0}, []
    for address, task in QUESTIONS.items():
        asyncio.run(_fuzz_one(address, task, Random(seed), count, figures, past))
    figures["silent"] = len(past)
    return figures, past


async def _fuzz_one(address: str, task: str, random: Random, count: int, figures: dict[str, int], past: list[str]) -> None:
    """Send all requests to a server that takes questions at one address."""
    from treenet.extras.serving.http_app import build_entrance
    from treenet.extras.serving.settings import ServeSettings

    replicas = _Counting(task)
    app = build_entrance(ServeSettings(host="0.0.0.0"), replicas, TOKEN)
    for request in requests(random, count):
        before = replicas.asked
        try:
            status, read, answer = await _ask(app, request)
        except Exception as error:
            status, read, answer = 0, 0, repr(error).encode()
        path = request.target.partition(b"?")[0].decode("latin-1")
        is_page = path in PUBLIC and request.method in ("GET", "HEAD")
        is_question = path == address and request.method == "POST" and _is_given(request.authorization)
        wanted = 200 if is_page or is_question else None
        figures["inputs"] += 1
        figures["done" if status == 200 else "refused"] += 1
        if (status == 200) != (wanted == 200) or (read and not is_question) or replicas.asked != before + is_question:
            past.append(f"{request}: status {status}, {read} bytes read: {answer[:80]!r}")
        elif status != 200 and not 400 <= status < 500:
            past.append(f"{request}: status {status}: {answer[:80]!r}")
