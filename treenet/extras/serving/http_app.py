"""The entrance: which requests come in, what answers each, and the description of the interface.

One table decides which requests come in. Its keys are paths byte for byte as clients send them, so no second reader of a path can
disagree. What the table does not list as a public page needs the token. The guard reads a body last, after the token and all
limits. A question goes to a replica, and once again to another one if that replica died.
"""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from treenet import report
from treenet.extras.serving.messages import (
    Answer,
    ClassAnswer,
    Health,
    NoAnswer,
    Problem,
    Question,
    ReplicaLost,
    Served,
    Serving,
    request_model,
)
from treenet.extras.serving.settings import ServeSettings
from treeproc import __version__
from treeproc.common.errors import one_line
from treeproc.common.files import repeated_key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

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
_AGAIN = {"Retry-After": "1"}
_GONE = "the client closed the connection"
_PROBLEMS = {"401": "no token", "413": "too large", "422": "bad request", "500": "the model failed", "503": "not now"}


# By task: the address that takes questions, what it does, and the form of its answers.
QUESTIONS = {
    "translation": ("/translate", "Translate lines of text, one sentence each.", Answer),
    "classification": ("/classify", "Classify lines of text, one sentence each.", ClassAnswer),
}
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Reply:
    """An answer: its status, body and headers."""

    status: int
    body: bytes
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Page = Callable[[], Awaitable[Reply]]
Handler = Callable[[bytes], Coroutine[Any, Any, Reply]]  # it gets the body


class Refused(Exception):
    """A request that gets no answer but a status and a reason."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None):
        super().__init__(reason)
        self.reply = Reply(status, json.dumps({"error": one_line(reason)}).encode(), headers=headers or {})


class Guard:
    """An ASGI application: public pages for GET, and questions for POST, which need the token and keep the limits."""

    def __init__(self, settings: ServeSettings, token: str | None, pages: Mapping[str, Page], questions: Mapping[str, Handler]):
        self._settings, self._token = settings, token
        self._pages = {path.encode(): page for path, page in pages.items()}
        self._questions = {path.encode(): question for path, question in questions.items()}
        self.waiting = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the server has no {scope['type']}")
        try:
            reply = await self._answer(scope, receive)
        except Refused as refused:
            reply = refused.reply
        except asyncio.CancelledError:  # by uvicorn, which waits for answers for some seconds only
            reply = Refused(503, "the server ends", {"Connection": "close"}).reply
        with suppress(asyncio.CancelledError):
            await _send(send, reply)

    async def _answer(self, scope: Message, receive: Receive) -> Reply:
        self._check_name(scope)
        path, method = scope.get("raw_path"), scope["method"]
        if path in self._pages and method in ("GET", "HEAD"):
            return await self._pages[path]()
        self._check_token(scope)
        if path in self._questions and method == "POST":
            return await self._accept(self._questions[path], scope, receive)
        for known, methods in ((self._pages, "GET, HEAD"), (self._questions, "POST")):
            if path in known:
                raise Refused(405, f"this address takes {methods}", {"Allow": methods})
        tasks = {address.encode(): task for task, (address, *_) in QUESTIONS.items()}
        if path in tasks:
            own = next(iter(self._questions))
            raise Refused(404, f"the model of this server does {tasks[own]}; send requests to {own.decode()}")
        raise Refused(404, "there is nothing at this address")

    async def _accept(self, question: Handler, scope: Message, receive: Receive) -> Reply:
        if _header(scope, b"content-type").partition(";")[0].strip().lower() != "application/json":
            # A page of another site may send other types without asking the browser's leave.
            raise Refused(422, "the body must be JSON, sent as Content-Type: application/json")
        if self.waiting >= self._settings.waiting_requests:
            raise Refused(503, f"{self.waiting:,} requests are waiting already; ask again later", _AGAIN)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                body = await self._read(scope, receive)
                return await _while_there(question(body), receive)
        except TimeoutError:
            raise Refused(503, f"no answer in {self._settings.timeout_s:g} s", _AGAIN) from None
        finally:
            self.waiting -= 1

    def _check_name(self, scope: Message) -> None:
        """Refuse other names if there is no token: a page of another site must not reach the server by a name that leads here."""
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
        """Return the body. Raises Refused if it is too large."""
        most = self._settings.request_bytes
        refused = Refused(413, f"a request may have {most:,} bytes; send fewer lines at once", {"Connection": "close"})
        length = _header(scope, b"content-length")
        if length.isdigit() and len(length) < 20 and int(length) > _FORGOTTEN * most:
            raise refused
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, _GONE)
            size += len(message.get("body", b""))
            if size <= most:
                chunks.append(message.get("body", b""))
            more = message.get("more_body", False) and size <= _FORGOTTEN * most
        if size > most:
            raise refused
        return b"".join(chunks)


async def _while_there(answer: Coroutine[Any, Any, Reply], receive: Receive) -> Reply:
    """Return the answer. Cancel its computation, and raise Refused, when the client closes the connection."""
    work, gone = asyncio.create_task(answer), asyncio.create_task(_wait_for_end(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Refused(400, _GONE)
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _header(scope: Message, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _send(send: Send, reply: Reply) -> None:
    headers = {"Content-Type": reply.media_type, "Content-Length": str(len(reply.body)), **reply.headers, **HEADERS}
    written = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": written})
    await send({"type": "http.response.body", "body": reply.body})


def describe_interface(request: type[BaseModel], served: Served) -> dict:
    """Return the content of /openapi.json, for questions of the form `request`."""
    path, summary, answer = QUESTIONS[served.task]
    models: list = [(request, "validation"), *((one, "serialization") for one in (answer, Health, Problem))]
    references, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")

    def holds(model: type[BaseModel], mode: JsonSchemaMode = "serialization") -> dict:
        return {"content": {"application/json": {"schema": references[model, mode]}}}

    problems = {status: {"description": what, **holds(Problem)} for status, what in _PROBLEMS.items()}
    question = {
        "summary": summary,
        "requestBody": {"required": True, **holds(request, "validation")},
        "responses": {"200": {"description": "one answer a line", **holds(answer)}, **problems},
        "security": [{}, {"token": []}],
    }
    states = {status: {"description": what, **holds(Health)} for status, what in (("200", "yes"), ("503", "no"))}
    health = {"summary": "Whether a replica runs.", "responses": states}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tree-attention", "version": __version__},
        "paths": {path: {"post": question}, "/healthz": {"get": health}},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def build_entrance(settings: ServeSettings, serving: Serving, token: str | None) -> Guard:
    """Return the ASGI application."""
    wanted = request_model(settings, serving.served)

    async def answer(body: bytes) -> Reply:
        try:
            request = wanted.model_validate_json(body)
            json.loads(body, object_pairs_hook=_refuse_repeated)  # pydantic takes the last value of a key in silence
        except ValidationError as error:
            raise Refused(422, _describe(error, wanted)) from None
        try:
            return Reply(200, await _ask(serving, request.question()))
        except NoAnswer as reason:
            raise Refused(500, str(reason)) from None
        except ReplicaLost:
            said = "two replicas ended while they worked on this request; it may need too much memory"
            raise Refused(503, said) from None

    async def health() -> Reply:
        running = await asyncio.to_thread(serving.running)
        status = "ok" if running else "starting"
        found = Health(status=status, model=serving.served.name, replicas=running, waiting=guard.waiting)
        return Reply(200 if running else 503, found.model_dump_json().encode())

    pages = {
        "/": _page("text/html; charset=utf-8", _HERE / "page.html"),
        "/page.js": _page("text/javascript; charset=utf-8", _HERE / "page.js"),
        # Pictures of trees look as they do in reports.
        "/page.css": _page("text/css; charset=utf-8", Path(report.__file__).parent / "page.css", _HERE / "page.css"),
        "/openapi.json": _fixed(Reply(200, json.dumps(describe_interface(wanted, serving.served)).encode())),
        "/healthz": health,
    }
    guard = Guard(settings, token, pages, {QUESTIONS[serving.served.task][0]: answer})
    return guard


async def _ask(serving: Serving, question: Question) -> bytes:
    try:
        return await serving.ask(question)
    except ReplicaLost:  # another question of its batch may have been too much
        return await serving.ask(question, alone=True)


def _page(media_type: str, *files: Path) -> Page:
    return _fixed(Reply(200, b"".join(file.read_bytes() for file in files), media_type))


def _fixed(reply: Reply) -> Page:
    async def give() -> Reply:
        return reply

    return give


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if (key := repeated_key(pairs)) is not None:
        raise Refused(422, f"{key}: must be given once, but the body repeats it")


def _describe(error: ValidationError, wanted: type[BaseModel]) -> str:
    """Return the first mistake, an unknown key before all others, by its place and without other text of the request."""
    errors = error.errors(include_url=False, include_input=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    if first["type"] == "json_invalid":
        return f"the body must be JSON, but is not: {first['ctx']['error']}"
    if not first["loc"]:
        return "the body must be a JSON object with the key lines"
    said = {"extra_forbidden": f"unknown key; the keys are {', '.join(wanted.model_fields)}", "missing": "is missing"}
    place = ".".join(one_line(str(part), 80) for part in first["loc"])
    return f"{place}: {said.get(first['type']) or first['msg'].removeprefix('Value error, ')}"
