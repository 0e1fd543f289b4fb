"""The entrance: the pages and questions of the HTTP interface in front of the replicas. It checks a request, asks a replica, and
asks once again if that replica died."""

import asyncio
import json
from pathlib import Path

from pydantic import ValidationError

from treenet import report
from treenet.extras.serving.guard import Guard, Page, Refused, Reply
from treenet.extras.serving.interface import QUESTIONS, describe_interface
from treenet.extras.serving.messages import Health, Question, request_model
from treenet.extras.serving.replica_protocol import NoAnswer, ReplicaLost, Serving
from treenet.extras.serving.settings import ServeSettings

_HERE = Path(__file__).parent


def build_entrance(settings: ServeSettings, serving: Serving, token: str | None) -> Guard:
    """Return the ASGI application."""
    wanted = request_model(settings, serving.served)

    async def answer(body: bytes) -> Reply:
        try:
            request = wanted.model_validate_json(body)
        except ValidationError as error:
            raise Refused(422, _describe(error)) from None
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
    except ReplicaLost:
        return await serving.ask(question)


def _page(media_type: str, *files: Path) -> Page:
    return _fixed(Reply(200, b"".join(file.read_bytes() for file in files), media_type))


def _fixed(reply: Reply) -> Page:
    async def give() -> Reply:
        return reply

    return give


def _describe(error: ValidationError) -> str:
    """Return the first mistake, by its place and without the text of the request."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return f"the body must be JSON, but is not: {first['ctx']['error']}"
    if not first["loc"]:
        return "the body must be a JSON object with the key lines"
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg'].removeprefix('Value error, ')}"
