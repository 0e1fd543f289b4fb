"""The entrance: the HTTP interface in front of the replicas. It checks a request, asks a replica, and asks once again where
that replica died."""

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from treenet import report
from treenet.serving.asking import NoAnswer, ReplicaLost, Serving
from treenet.serving.guard import Guard
from treenet.serving.messages import Answer, Health, Problem, Question, request_model
from treenet.serving.settings import ServeSettings
from treeproc import __version__
from treeproc.common.errors import one_line

_HERE = Path(__file__).parent
# Pictures of trees look as they do in reports.
_PAGE = {
    "/": ([_HERE / "page.html"], "text/html"),
    "/page.js": ([_HERE / "page.js"], "text/javascript"),
    "/page.css": ([Path(report.__file__).parent / "page.css", _HERE / "page.css"], "text/css"),
}


def build_entrance(settings: ServeSettings, serving: Serving, token: str | None) -> Guard:
    """The ASGI application."""
    # The pages of FastAPI for people load scripts from elsewhere; the page of this server is `/`.
    app = FastAPI(title="tree-attention", version=__version__, docs_url=None, redoc_url=None)
    guard = Guard(app, settings, token)
    wanted = request_model(settings, serving.beam_size)
    problems: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "description": what}
        for status, what in ((401, "no token"), (413, "too large"), (422, "bad request"), (503, "not now"))
    }

    @app.post("/translate", responses={200: {"model": Answer}, **problems}, response_class=Response)
    async def translate(request: wanted) -> Response:  # type: ignore[valid-type]
        """Translate lines of text, one sentence each."""
        try:
            return Response(await _ask(serving, request.question()), media_type="application/json")  # type: ignore[attr-defined]
        except NoAnswer as reason:
            return _problem(500, str(reason))
        except ReplicaLost:
            return _problem(503, "two replicas ended while they worked on this request; it may need too much memory")

    @app.get("/healthz", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """Whether a replica runs."""
        running = await asyncio.to_thread(serving.running)
        response.status_code = 200 if running else 503
        return Health(status="ok" if running else "starting", model=serving.name, replicas=running, waiting=guard.waiting)

    for path, (files, media_type) in _PAGE.items():
        app.get(path, include_in_schema=False)(_file(b"".join(file.read_bytes() for file in files), media_type))
    app.exception_handler(RequestValidationError)(_describe)
    app.exception_handler(HTTPException)(_describe_status)
    return guard


async def _ask(serving: Serving, question: Question) -> bytes:
    try:
        return await serving.ask(question)
    except ReplicaLost:
        return await serving.ask(question)


def _file(content: bytes, media_type: str):
    async def send() -> Response:
        return Response(content, media_type=media_type)

    return send


def _problem(status: int, reason: str, headers: Any = None) -> JSONResponse:
    return JSONResponse({"error": one_line(reason)}, status, headers)


async def _describe(_: Request, error: RequestValidationError) -> JSONResponse:
    """The first mistake, by its place and without the text of the request."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _problem(422, f"the body must be JSON, but is not: {first.get('ctx', {}).get('error', 'it cannot be read')}")
    if len(first["loc"]) == 1:
        return _problem(422, "the body must be a JSON object with the key lines, sent as Content-Type: application/json")
    place = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, str | int))
    return _problem(422, f"{place}: {first['msg'].removeprefix('Value error, ')}")


async def _describe_status(_: Request, error: HTTPException) -> JSONResponse:
    return _problem(error.status_code, str(error.detail), getattr(error, "headers", None))
