"""The server without Ray: what its entrance refuses, what it answers, and when it asks again."""

import asyncio
import json
import socket
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

pytest.importorskip("uvicorn", reason="needs the extra [serve]")
from serving_process import run
from starlette.testclient import TestClient

from treenet.cli.serve import main
from treenet.extras.serving.http_app import build_entrance
from treenet.extras.serving.messages import NoAnswer, Question, ReplicaLost, Served
from treenet.extras.serving.settings import ServeSettings, read_token
from treeproc.common.errors import UserError

pytestmark = pytest.mark.slow

__all__ = ["run"]  # a fixture

TOKEN = "a-token-of-many-characters"
TRANSLATOR = Served("model averaged", beam_size=3)
CLASSIFIER = Served("model averaged", "classification", has_phrases=True)


class Replicas:
    """Replicas that fail as they are told, and otherwise repeat what they were asked."""

    def __init__(self, *failures: Exception, served: Served = TRANSLATOR):
        self.failures, self.asked, self.alive, self.served = list(failures), [], 1, served

    async def ask(self, question: Question, *, alone: bool = False) -> bytes:
        self.asked.append(question)
        if self.failures:
            raise self.failures.pop(0)
        return json.dumps(question.lines).encode()

    def running(self) -> int:
        return self.alive


def client(replicas: object, token: str | None = None, **settings: object) -> TestClient:
    entrance = build_entrance(ServeSettings(**settings), replicas, token)
    return TestClient(entrance, base_url="http://127.0.0.1:8000")


def test_a_request_reaches_the_replicas_with_its_defaults():
    replicas = Replicas()
    answer = client(replicas).post("/translate", json={"lines": ["one", ""]})
    assert (answer.status_code, answer.json(), replicas.asked) == (200, ["one", ""], [Question(("one", ""), 1, False)])
    assert answer.headers["content-type"] == "application/json" and answer.headers["cache-control"] == "no-store"
    client(replicas).post("/translate", json={"lines": ["a"], "num_best": 3, "attention": True})
    assert replicas.asked[-1] == Question(("a",), 3, True)


def test_a_classifier_has_its_own_address_and_requests():
    """A server answers the questions of its model alone. Limits and checks are those of translations."""
    replicas = Replicas(served=CLASSIFIER)
    app = client(replicas, line_words=3, request_lines=2, line_characters=40)
    assert app.post("/classify", json={"lines": ["one", ""]}).status_code == 200
    assert app.post("/classify", json={"lines": ["one"], "phrases": True}).status_code == 200
    assert replicas.asked == [Question(("one", ""), 1, False), Question(("one",), 1, False, phrases=True)]
    for server, wrong, task, own in (
        (app, "/translate", "classification", "/classify"),
        (client(Replicas()), "/classify", "translation", "/translate"),
    ):
        refused = server.post(wrong, json={"lines": ["a"]})
        assert refused.status_code == 404 and server.post("/other", json={}).status_code == 404
        assert refused.json() == {"error": f"the model of this server does {task}; send requests to {own}"}
    for body, place in (
        ({"lines": ["a"], "num_best": 2}, "num_best"),
        ({"lines": ["a"], "phrases": 1}, "phrases"),
        ({"lines": ["a b c d"]}, "lines.0: must have at most 3 words"),
        ({"lines": ["a" * 41]}, "lines.0"),
        ({"lines": ["a"] * 3}, "lines"),
        ({"lines": []}, "lines"),
        ({}, "lines"),
    ):
        answer = app.post("/classify", json=body)
        assert answer.status_code == 422 and answer.json()["error"].startswith(place), answer.text
    without = client(Replicas(served=Served("model", "classification")))
    assert without.post("/classify", json={"lines": ["a"], "phrases": True}).status_code == 422
    api = app.get("/openapi.json").json()
    assert sorted(api["paths"]) == ["/classify", "/healthz"] and "ClassAnswer" in api["components"]["schemas"]
    assert sorted(client(Replicas()).get("/openapi.json").json()["paths"]) == ["/healthz", "/translate"]


def test_a_request_has_constraints_for_each_line():
    replicas = Replicas()
    wanted = {"prefix": ["x", ""], "must_appear": [["y z", "a"], []], "must_not_appear": [[], [" b"]]}
    assert client(replicas).post("/translate", json={"lines": ["one", "two"], **wanted}).status_code == 200
    columns = {"prefix": ("x", ""), "must_appear": ("y z\ta", ""), "must_not_appear": ("", " b")}
    assert replicas.asked == [Question(("one", "two"), 1, False, columns)]


LIMITS = {"request_lines": 2, "line_characters": 20, "line_words": 3, "request_bytes": 400, "line_phrases": 1}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lines": ["a", "b", "c"]}, 422, "lines: List should have at most 2 items"),
        ({"lines": []}, 422, "lines: List should have at least 1 item"),
        ({"lines": ["x" * 21]}, 422, "lines.0: String should have at most 20 characters"),
        ({"lines": ["a", "a b c d"]}, 422, "lines.1: must have at most 3 words, but has 4"),
        ({"lines": ["a"], "prefix": ["b", "c"]}, 422, "prefix: must have one entry for each line, 1, but has 2"),
        ({"lines": ["a"], "prefix": ["b" * 21]}, 422, "prefix.0: String should have at most 20 characters"),
        ({"lines": ["a"], "must_appear": ["b"]}, 422, "must_appear.0: Input should be a valid array"),
        ({"lines": ["a"], "must_appear": [["b", "c"]]}, 422, "must_appear.0: List should have at most 1 item"),
        ({"lines": ["a"], "must_appear": [["b\tc"]]}, 422, "must_appear.0.0: must not have tabs"),
        ({"lines": ["a"], "must_not_appear": []}, 422, "must_not_appear: must have one entry for each line"),
        ({"lines": ["a"], "num_best": 4}, 422, "num_best: Input should be less than or equal to 3"),
        ({"lines": ["a"], "num_best": 0}, 422, "num_best: Input should be greater than or equal to 1"),
        ({"lines": ["a"], "num_best": "2"}, 422, "num_best: Input should be a valid integer"),
        ({"lines": ["a"], "num_best": True}, 422, "num_best: Input should be a valid integer"),
        ({"lines": "a"}, 422, "lines: Input should be a valid array"),
        ({"lines": [None]}, 422, "lines.0: Input should be a valid string"),
        ({"lines": ["a"], "nbest": 2}, 422, "nbest: unknown key; the keys are lines, "),
        ({"line": ["a"]}, 422, "line: unknown key; the keys are lines, "),
        ({"x" * 99 + "\n": 1}, 422, "x" * 53 + " ... "),
        ({}, 422, "lines: is missing"),
        ([], 422, "the body must be a JSON object with the key lines"),
        (b"", 422, "the body must be JSON, but is not: EOF"),
        (b'{"lines": [', 422, "the body must be JSON, but is not: "),
        (b'{"lines": ["\xff"]}', 4, "body"),
        (b'{"lines": ["a"], "lines": ["b"]}', 422, "lines: must be given once, but the body repeats it"),
        (b'{"num_best": 1, "lines": ["a"], "num_\\u0062est": 1}', 422, "num_best: must be given once"),
        (b'{"lines": {"a": {}}, "prefix": null, "lines": ["b"]}', 422, "lines: must be given once"),
        (b"[" * 400, 4, "body"),
        (b'{"num_best": ' + b"9" * 380 + b"}", 422, "lines: is missing"),
        (b" " * 401, 413, "a request may have 400 bytes; send fewer lines at once"),
        (b" " * 40_000, 413, "a request may have 400 bytes; send fewer lines at once"),
    ],
)
def test_bad_requests_get_a_status_and_one_line(body, status, message):
    replicas = Replicas()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = client(replicas, **LIMITS).post("/translate", content=content, headers={"Content-Type": "application/json"})
    assert sent.status_code == status or sent.status_code // 100 == status
    assert list(sent.json()) == ["error"] and message in sent.json()["error"] and "\n" not in sent.json()["error"]
    assert replicas.asked == []


def test_limits_hold_up_to_their_values():
    at_most = {"lines": ["x" * 20, "a b c"], "num_best": 3}
    assert client(Replicas(), **LIMITS).post("/translate", json=at_most).status_code == 200
    content = b'{"lines": ["a"]}'
    exact = client(Replicas(), request_bytes=len(content), waiting_requests=1)
    headers = {"Content-Type": "application/json"}
    assert exact.post("/translate", content=content, headers=headers).status_code == 200
    assert exact.post("/translate", content=content + b" ", headers=headers).status_code == 413
    assert exact.post("/translate", content=(part for part in (content, b" " * 99)), headers=headers).status_code == 413
    assert exact.post("/translate", content=(part for part in (content[:5], content[5:])), headers=headers).status_code == 200


def test_a_form_of_another_site_is_no_request():
    """A page elsewhere may send text/plain without asking the browser's leave, but no JSON."""
    replicas = Replicas()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        sent = client(replicas).post("/translate", content=b'{"lines": ["a"]}', headers={"Content-Type": kind})
        assert sent.status_code == 422 and "Content-Type: application/json" in sent.json()["error"]
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "[::1", "127.0.0.1@evil.example"):
        sent = client(replicas).post("/translate", json={"lines": ["a"]}, headers={"Host": host})
        assert sent.status_code == 403, host
    assert replicas.asked == []
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "[::1]"):
        assert client(replicas).post("/translate", json={"lines": ["a"]}, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "sent", [None, "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", "Bearer \xe4"]
)
def test_without_the_token_nothing_is_read(sent):
    replicas = Replicas()
    headers = {} if sent is None else {"Authorization": sent.encode("latin-1")}
    refused = client(replicas, TOKEN).post("/translate", content=b"x" * (2 << 20), headers=headers)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert TOKEN not in refused.text and replicas.asked == []


def test_with_the_token_any_name_is_served():
    headers = {"Authorization": f"bearer {TOKEN}", "Host": "translate.example"}
    served = client(Replicas(), TOKEN)
    assert served.post("/translate", json={"lines": ["a"]}, headers=headers).status_code == 200
    assert served.get("/", headers={"Host": "translate.example"}).status_code == 200


def test_a_lost_replica_is_asked_again_once():
    replicas = Replicas(ReplicaLost())
    assert client(replicas).post("/translate", json={"lines": ["a"]}).json() == ["a"] and len(replicas.asked) == 2
    replicas = Replicas(ReplicaLost(), ReplicaLost())
    sent = client(replicas).post("/translate", json={"lines": ["a"]})
    assert sent.status_code == 503 and "two replicas ended" in sent.json()["error"] and len(replicas.asked) == 2
    replicas = Replicas(NoAnswer("the scores are not finite"))
    sent = client(replicas).post("/translate", json={"lines": ["a"]})
    assert (sent.status_code, sent.json(), len(replicas.asked)) == (500, {"error": "the scores are not finite"}, 1)


class Slow(Replicas):
    """Answers when it is told."""

    def __init__(self):
        super().__init__()
        self.begun, self.done, self.cancelled = asyncio.Event(), asyncio.Event(), 0

    async def ask(self, question: Question, *, alone: bool = False) -> bytes:
        self.asked.append(question)
        self.begun.set()
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b"[]"


async def request_of(app, body: bytes, path: bytes = b"/translate", method: str = "POST", **headers: str) -> int:
    """A request as uvicorn makes it; gives the status. Its client never leaves."""
    given = {"host": "localhost", "content-type": "application/json", **headers}
    scope = {
        "type": "http", "method": method, "path": unquote(path.decode("latin-1")), "raw_path": path, "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    sent, parts = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] != 401 or parts, "the body was read without the token"
    return sent[0]["status"]


PUBLIC = (b"/", b"/page.js", b"/page.css", b"/openapi.json", b"/healthz")


def spellings(path: bytes) -> Iterator[bytes]:
    """Paths that some reader of paths might take for `path`."""
    for number in range(256):
        for byte in (bytes([number]), b"%%%02X" % number, b"%%%02x" % number, b"%%25%02X" % number):
            yield from (byte + path, path + byte, path[:1] + byte + path[1:], path + b"/" + byte, path + byte + b"/")
    for place in range(len(path)):
        yield path[:place] + b"%%%02X" % path[place] + path[place + 1 :]
    yield from (b"/" + path, path + b"/", path.upper(), path.title(), path + b";a", path + b";a=b/", path + b"#a")
    yield from (b"/." + path, b"/x/.." + path, b"/.." + path, b"/%2e%2e" + path, path + b"/..", path + b"/.", b"\\" + path[1:])
    yield from (b"http://localhost" + path, b"http://localhost:8000/" + path, b"//localhost" + path, b"*", b"", b"localhost:80")
    yield from (b"/docs", b"/redoc", b"/docs/oauth2-redirect", b"/-/routes", path + b".html", path + "ｅ".encode())


QUESTIONS = [(b"/translate", TRANSLATOR), (b"/classify", CLASSIFIER)]


@pytest.mark.parametrize("path", [*(one for one, _ in QUESTIONS), *PUBLIC], ids=bytes.decode)
def test_only_exact_public_pages_need_no_token(path):
    """The guard once compared the path, and a router matched it: `/translate%0A` was not guarded, but was routed."""

    question, served = QUESTIONS[1] if path == b"/classify" else QUESTIONS[0]

    async def check() -> None:
        replicas = Replicas(served=served)
        closed, body = build_entrance(ServeSettings(), replicas, TOKEN), b'{"lines": ["a"]}'
        for given in {*spellings(path), *(one for one, _ in QUESTIONS)} - set(PUBLIC):
            for method in ("POST", "GET"):
                assert await request_of(closed, body, given, method) == 401, (method, given)
            if given == question:
                for method in ("POST", "GET"):
                    assert await request_of(closed, body, given, method, authorization=f"Bearer {TOKEN}x") == 401, method
            else:
                assert await request_of(closed, body, given, authorization=f"Bearer {TOKEN}") == 404, given
        assert replicas.asked == []

    asyncio.run(check())


@pytest.mark.parametrize(("question", "served"), QUESTIONS, ids=["translate", "classify"])
def test_other_methods_need_the_token_too(question, served):
    methods = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "post", "HEAD ", "GET\n", "")

    async def check() -> None:
        replicas = Replicas(served=served)
        app, body = build_entrance(ServeSettings(), replicas, TOKEN), b'{"lines": ["a"]}'
        for path in (*PUBLIC, question):
            for method in methods:
                assert await request_of(app, body, path, method) == 401, (method, path)
                expected = 200 if (method, path) == ("POST", question) else 405
                assert await request_of(app, body, path, method, authorization=f"Bearer {TOKEN}") == expected, (method, path)
        assert {await request_of(app, body, path, method) for path in PUBLIC for method in ("GET", "HEAD")} == {200}
        assert len(replicas.asked) == 1
        for kind in ("websocket", "lifespan", "other"):
            with pytest.raises(ValueError, match=f"the server has no {kind}"):
                await app({"type": kind, "path": "/translate", "raw_path": b"/translate", "headers": []}, None, None)

    asyncio.run(check())


def test_more_requests_than_may_wait_are_refused_at_once():
    async def check() -> None:
        slow = Slow()
        app = build_entrance(ServeSettings(waiting_requests=2), slow, None)
        body = b'{"lines": ["a"]}'
        first = [asyncio.create_task(request_of(app, body)) for _ in range(2)]
        while len(slow.asked) < 2:
            await asyncio.sleep(0)
        assert app.waiting == 2 and await request_of(app, body) == 503
        slow.done.set()
        assert await asyncio.gather(*first) == [200, 200]
        assert app.waiting == 0 and await request_of(app, body) == 200

    asyncio.run(check())


def test_a_request_that_takes_too_long_ends_and_makes_room():
    async def check() -> None:
        app = build_entrance(ServeSettings(waiting_requests=1, timeout_s=0.01), Slow(), None)
        assert await request_of(app, b'{"lines": ["a"]}') == 503
        assert app.waiting == 0

    asyncio.run(check())


def test_health_says_whether_a_replica_runs():
    replicas = Replicas()
    served = client(replicas)
    expected = {"status": "ok", "model": "model averaged", "replicas": 1, "waiting": 0}
    assert (served.get("/healthz").status_code, served.get("/healthz").json()) == (200, expected)
    replicas.alive = 0
    assert (served.get("/healthz").status_code, served.get("/healthz").json()["status"]) == (503, "starting")


def test_the_page_loads_its_own_files_alone():
    served = client(Replicas())
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        got = served.get(path)
        assert got.status_code == 200 and got.headers["content-type"].startswith(kind)
        policy = got.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "*" not in policy
        text = got.text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "innerHTML" not in text
    assert served.get("/docs").status_code == served.get("/redoc").status_code == 404
    assert served.get("/translate").status_code == 405
    api = served.get("/openapi.json").json()
    wanted = api["components"]["schemas"]["Request"]["properties"]
    assert wanted["num_best"]["maximum"] == 3 and wanted["lines"]["maxItems"] == 100
    assert wanted["lines"]["items"]["maxLength"] == 2000
    score = api["components"]["schemas"]["Hypothesis"]["properties"]["score"]["description"]
    assert "plus the coverage penalty" in score and "with minimum Bayes risk, mean chrF" in score
    assert set(api["paths"]) == {"/translate", "/healthz"} and {"401", "413", "422", "503"} <= set(
        api["paths"]["/translate"]["post"]["responses"]
    )


def test_a_server_that_others_reach_needs_a_token(tmp_path, monkeypatch):
    assert read_token(ServeSettings()) is None
    assert all(read_token(ServeSettings(host=host)) is None for host in ("localhost", "::1", "127.0.0.2"))
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UserError, match="can be reached by other machines: give token_file=FILE or token_variable=NAME"):
            read_token(ServeSettings(host=host))
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    assert read_token(ServeSettings(host="0.0.0.0", token_file=file)) == TOKEN
    assert read_token(ServeSettings(token_variable="MY_TOKEN")) == TOKEN
    with pytest.raises(UserError, match="not both"):
        read_token(ServeSettings(token_file=file, token_variable="MY_TOKEN"))
    for text in ("", "short", "with a blank in the middle", "ä" * 20, "x" * 5000):
        file.write_text(text)
        with pytest.raises(UserError, match="must hold a token of 16 to 4096 ASCII characters") as error:
            read_token(ServeSettings(token_file=file))
        assert len(text) < 2 or text not in str(error.value)
    for settings in (ServeSettings(token_variable="NO_SUCH"), ServeSettings(token_file=tmp_path / "none")):
        with pytest.raises(UserError, match=r"NO_SUCH must hold|cannot be read: No such file"):
            read_token(settings)


def test_bad_settings_are_one_line_before_anything_starts(run, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, message in (
            ([], "give --out RUN"),
            (["--out", str(run), "host=0.0.0.0"], "can be reached by other machines"),
            (["--out", str(run), "port=65536"], "port"),
            (["--out", str(run), f"port={port}"], f"cannot listen at 127.0.0.1, port {port}: Address already in use"),
            (["--out", str(run), "host=no.such.invalid", "token_variable=HOME"], "the variable HOME must hold a token"),
        ):
            with pytest.raises(UserError, match=message):
                main(arguments)
