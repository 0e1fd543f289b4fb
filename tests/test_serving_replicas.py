"""Replicas of the server: what they get together. A killed one loses no request while another goes on."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn", reason="needs the extra [serve]")
import ray
from ray.serve.exceptions import RayServeException
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from serving_process import Server, answers_while_killing

from treenet.extras.serving import server as serving_server
from treenet.extras.serving.messages import NoAnswer, Question, ReplicaLost, Served
from treenet.extras.serving.server import Replicas, start_replicas
from treenet.extras.serving.settings import ServeSettings
from treenet.translation.line_translator import LineTranslator
from treenet.translation.settings import TranslateSettings
from treeproc.online.raw_lines import RawLine

pytestmark = pytest.mark.slow

LINES = [" ".join(SEARCH_WORDS[:length]) for length in (2, 5, 7)]


@pytest.mark.cluster
def test_killing_one_of_two_replicas_loses_no_accepted_request(tmp_path):
    run = write_run(tmp_path / "run", write_vocabulary(tmp_path / "data"))
    translate = LineTranslator(TranslateSettings(), [run])
    expected = translate([RawLine(line.encode()) for line in LINES], 0).text.splitlines()
    server = Server(run, tmp_path / "log", "replicas=2")
    try:
        assert server.model == "tree_transformer averaged, 2 replica(s)\n"
        before = server.replicas()
        assert len(before) == 2 and server.health() == {
            "status": "ok", "model": "tree_transformer averaged", "replicas": 2, "waiting": 0,
        }  # fmt: skip
        answers = answers_while_killing(server, LINES, before[0])
        assert len(answers) >= 18 and all(answer == expected for answer in answers)
        assert before[0] not in server.replicas() and before[1] in server.replicas()
    finally:
        server.end()


class Handle:
    """The part of Ray Serve that `Replicas` calls: answers batches one by one, and dies of 'poison'. At 'fault', Serve fails."""

    def __init__(self):
        self.batches: list[list[str]] = []
        self.answer = self

    async def remote(self, questions: list[Question]) -> list[bytes]:
        self.batches.append([question.lines[0] for question in questions])
        await asyncio.sleep(0.05)
        if "poison" in self.batches[-1]:
            raise ray.exceptions.ActorDiedError
        if "fault" in self.batches[-1]:
            raise RayServeException("of Serve\nwith lines")
        return [line.encode() for line in self.batches[-1]]


def test_requests_come_together_while_a_replica_works():
    async def ask() -> tuple[Handle, list]:
        handle, settings = Handle(), ServeSettings(batch_requests=4, batch_wait_ms=0, request_lines=8)
        replicas = Replicas(handle, "application", Served("model"), settings)

        def asked(line: str, count: int = 1, **options) -> asyncio.Task:
            return asyncio.create_task(replicas.ask(Question([line] * count, 1, False), **options))

        first = asked("a")
        await asyncio.sleep(0.02)  # its batch is under way
        later = [asked(line) for line in "bcdef"]
        gone = asked("gone")
        last = [asked("long", count=8), asked("poison"), asked("beside"), asked("again", alone=True), asked("end")]
        gone.cancel()
        return handle, await asyncio.gather(first, *later, *last, return_exceptions=True)

    handle, answers = asyncio.run(ask())
    assert handle.batches == [["a"], ["b", "c", "d", "e"], ["f"], ["long"], ["poison", "beside"], ["again"], ["end"]]
    assert answers[:7] == [b"a", b"b", b"c", b"d", b"e", b"f", b"long"]
    assert [type(answer) for answer in answers[7:9]] == [ReplicaLost] * 2 and answers[9:] == [b"again", b"end"]


def test_a_fault_of_ray_serve_is_an_answer_and_the_next_request_is_served(capfd):
    """It was a traceback of uvicorn, and an answer that is no JSON."""

    async def ask() -> list:
        replicas = Replicas(Handle(), "application", Served("model"), ServeSettings(batch_wait_ms=0))
        asked = [replicas.ask(Question((line,), 1, False)) for line in ("fault", "a")]
        return [(await asyncio.gather(one, return_exceptions=True))[0] for one in asked]

    faulty, served = asyncio.run(ask())
    assert isinstance(faulty, NoAnswer) and str(faulty) == "the request could not be answered (RayServeException)"
    assert served == b"a" and capfd.readouterr().err == "a request failed: RayServeException: of Serve with lines\n"


@pytest.mark.parametrize("place", ["run", "result"])
def test_an_interrupted_start_leaves_no_application_on_the_cluster(place, monkeypatch, tmp_path):
    """Ctrl-C, or SIGTERM: the controller of Ray Serve, and with it the application, would outlive this process."""
    started, deleted = [], []

    def interrupt_at(name: str) -> None:
        if name == place:
            raise KeyboardInterrupt

    def run(*_, name: str, **options) -> SimpleNamespace:
        started.append(name)
        interrupt_at("run")
        answer = SimpleNamespace(result=lambda: interrupt_at("result"))
        return SimpleNamespace(describe=SimpleNamespace(remote=lambda: answer))

    monkeypatch.setattr(serving_server, "start_ray", lambda **_: None)
    monkeypatch.setattr(serving_server, "_check_room", lambda _: None)
    for name, fake in (("start", lambda **_: None), ("run", run), ("delete", deleted.append)):
        monkeypatch.setattr(serving_server.serve, name, fake)
    with pytest.raises(KeyboardInterrupt), start_replicas(ServeSettings(), tmp_path):
        pass
    assert len(started) == 1 and deleted == started
