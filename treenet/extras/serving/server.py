"""The server: replicas, the entrance in this process, and a socket, from its start to Ctrl-C.

uvicorn waits without limit for a request, and for a client that does not take its answer. Each such client would hold a
connection and the memory of an answer, and there is room for a number of connections alone. So connections have a time limit.
"""

import asyncio
import logging
import signal
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import ray
import torch
import uvicorn
from ray import serve
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import LoggingConfig
from uvicorn.protocols.http.h11_impl import H11Protocol

from treenet.extras.serving.http_app import Guard, build_entrance
from treenet.extras.serving.messages import NoAnswer, Question, ReplicaLost, Served, Serving
from treenet.extras.serving.sentences import SentenceReader, load_reader
from treenet.extras.serving.settings import ServeSettings, read_token
from treenet.runs.identity import checkpoint_folder
from treenet.runs.mirror import read_run
from treenet.runs.run_folder import absolute_checkpoint, checkpoint_names
from treeproc.common.errors import UserError, one_line
from treeproc.common.messages import phase, tell, warn
from treeproc.common.ray_session import can_grow, describe_wait, start_ray
from treeproc.common.storage import AnyPath

_DEPLOYMENT = "translator"
_HEALTH_CHECK_S = 1.0  # so soon a dead replica is replaced
_QUIET = LoggingConfig(log_level="ERROR", enable_access_log=False)
_LOOKS = 8  # at a connection during its limit
_BACKLOG = 128
_SECONDS_TO_END = 5  # for answers under way


class _Replica:
    """A process with a model. The error of a user comes back as text, or Serve would print a traceback and start it again."""

    def __init__(self, settings: ServeSettings, run: AnyPath):
        torch.set_num_threads(1)  # a CPU each
        self._reader: SentenceReader | None = None
        self._error = ""
        try:
            self._reader = load_reader(settings, run)
        except UserError as error:
            self._error = str(error)

    def describe(self) -> tuple[Served | None, str]:
        """Return (the model, error): one of them is empty."""
        return (self._reader.served if self._reader else None), self._error

    async def answer(self, questions: list[Question]) -> list[bytes | str]:
        """See `SentenceReader.answer`."""
        assert self._reader is not None  # else no request comes in
        return await asyncio.to_thread(self._reader.answer, questions)  # meanwhile the replica says that it lives


class _Waiting(NamedTuple):
    """A question that waits for its answer; `alone` if a replica died with its batch."""

    question: Question
    answer: asyncio.Future[bytes | str]
    alone: bool


class Replicas:
    """The replicas of an application of Ray Serve, as the entrance sees them."""

    def __init__(self, handle: serve.handle.DeploymentHandle, application: str, served: Served, settings: ServeSettings):
        self._handle, self._application, self.served, self._settings = handle, application, served, settings
        self._waiting: deque[_Waiting] = deque()
        self._come = asyncio.Event()
        self._senders: list[asyncio.Task[None]] = []

    async def ask(self, question: Question, *, alone: bool = False) -> bytes:
        """Return the answer as JSON. Raises ReplicaLost if the replica died meanwhile, NoAnswer if the model failed.

        Questions come together here and not in the replica: there, the model would keep them from their turn.
        """
        if not self._senders:  # in the event loop of the server
            self._senders = [asyncio.create_task(self._send()) for _ in range(self._settings.replicas)]
        waiting = _Waiting(question, asyncio.get_running_loop().create_future(), alone)
        self._waiting.append(waiting)
        self._come.set()
        answer = await waiting.answer  # cancelled where nobody waits any more
        if isinstance(answer, str):
            raise NoAnswer(answer)
        return answer

    async def _send(self) -> None:
        """Send batches to replicas, one at a time, until the loop ends."""
        while True:
            await self._come.wait()
            if self._size(self._waiting) < self._settings.batch_requests:
                await asyncio.sleep(self._settings.batch_wait_ms / 1000)
            if batch := self._take():
                await self._answer(batch)

    def _take(self) -> list[_Waiting]:
        """Take the questions of the next batch, without those whose clients left."""
        batch: list[_Waiting] = []
        while self._waiting:
            first = self._waiting[0]
            if not first.answer.done():
                full = self._size([*batch, first]) > self._settings.batch_requests
                if batch and (full or first.alone or batch[0].alone):
                    break
                batch.append(first)
            self._waiting.popleft()
        if not self._waiting:
            self._come.clear()
        return batch

    def _size(self, waiting: Iterable[_Waiting]) -> int:
        """Return the size of a batch in requests. A long one counts as several: a batch has no more lines than one may have."""
        requests = self._settings.batch_requests
        most = max(self._settings.request_lines, requests)
        return sum(-(-len(one.question.lines) * requests // most) for one in waiting)

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Give each question of a batch its answer, or the error of its replica. The batch is computed to its end."""
        answers: Sequence[bytes | str] = ()
        failure: Exception | None = None
        try:
            answers = await self._handle.answer.remote([one.question for one in batch])
        except (RayActorError, OutOfMemoryError, DeploymentUnavailableError) as error:
            failure = ReplicaLost(type(error).__name__)
        except Exception as error:  # of the replica or of Serve: the requests fail, and the next batch goes on
            warn(f"a request failed: {type(error).__name__}: {one_line(str(error))}")
            failure = NoAnswer(f"the request could not be answered ({type(error).__name__})")
        for place, one in enumerate(batch):
            if one.answer.done():  # nobody waits any more
                continue
            if failure is not None:
                one.answer.set_exception(failure)
            else:
                one.answer.set_result(answers[place])

    def running(self) -> int:
        """Return the number of replicas that run now."""
        with suppress(KeyError):
            states = serve.status().applications[self._application].deployments[_DEPLOYMENT].replica_states
            return sum(count for state, count in states.items() if state == "RUNNING")
        return 0


@contextmanager
def start_replicas(settings: ServeSettings, run: AnyPath) -> Iterator[Serving]:
    """Start replicas that answer until the context ends, on a cluster or on this machine.

    Raises UserError if the run cannot be loaded, or if Ray of this machine alone has fewer CPUs or GPUs than replicas.
    """
    start_ray(instead="")
    _check_room(settings)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    application = f"tree-attention-{uuid.uuid4().hex[:8]}"  # two servers of a cluster do not replace each other
    deployment = serve.deployment(_Replica).options(
        name=_DEPLOYMENT,
        num_replicas=settings.replicas,
        max_ongoing_requests=1,  # a request of Serve is a batch
        health_check_period_s=_HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=_HEALTH_CHECK_S,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(settings.use_gpu)},
        logging_config=_QUIET,
    )
    # The replicas have another working folder.
    settings = settings.model_copy(update={"checkpoint": absolute_checkpoint(settings.checkpoint)})
    try:
        with phase("starting the replicas"):
            try:
                # The entrance is a process of ours; Serve's own would listen on all addresses of every node.
                serve.start(proxy_location=ProxyLocation.Disabled, logging_config=_QUIET)
                handle = serve.run(
                    deployment.bind(settings, run.absolute()), name=application, route_prefix=None, logging_config=_QUIET
                )
                served, error = handle.describe.remote().result()
            except (RuntimeError, ray.exceptions.RayError) as failure:
                raise UserError(
                    f"the replicas did not start: {one_line(str(failure), 300)}; every node needs pip install "
                    "'tree-attention[serve]'"
                ) from None
        if error:
            raise UserError(error)
        yield Replicas(handle, application, served, settings)
    finally:  # also after Ctrl-C during the start: a cluster would keep the replicas
        with suppress(Exception):  # of Serve, which may not have started at all
            serve.delete(application)


def _check_room(settings: ServeSettings) -> None:
    """Print what the replicas wait for. Raises UserError if Ray runs on this machine alone: Serve would wait for ever."""
    there, wanted = ray.cluster_resources(), {"CPU": settings.replicas, "GPU": settings.replicas * settings.use_gpu}
    missing = [kind for kind, amount in wanted.items() if amount > there.get(kind, 0)]
    if missing and can_grow():
        tell(describe_wait([{kind: wanted[kind]} for kind in missing], time.time()))
    elif missing:
        kind = missing[0]
        found = there.get(kind, 0)
        remedy = "set use_gpu=false" if kind == "GPU" and not found else "choose fewer replicas"
        raise UserError(
            f"replicas={settings.replicas} need {wanted[kind]} {kind}s, but Ray on this machine has {found:g}; {remedy}"
        )


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
        super().connection_made(transport)
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


def serve_run(settings: ServeSettings, run: AnyPath) -> None:
    """Serve the translation model or the classifier in folder `run` until SIGINT or SIGTERM. Prints the address when it answers.

    Raises UserError if the address cannot be used, the token is missing, or the run cannot be loaded.
    """
    token = read_token(settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Mistakes are found before Ray and the models are waited for.
    with read_run(run, *checkpoint_names(settings.checkpoint)) as folder:
        checkpoint_folder(folder, settings.checkpoint)
    with _listen(settings.host, settings.port) as listener, start_replicas(settings, run) as serving:
        config = build_config(settings, build_entrance(settings, serving, token))
        listener.listen(_BACKLOG)  # who reads the address may connect at once
        host, port = listener.getsockname()[:2]
        print(
            f"{serving.served.name}, {settings.replicas} replica(s)\nhttp://{f'[{host}]' if ':' in host else host}:{port}/",
            flush=True,
        )
        tell("Ctrl-C ends it")
        with suppress(KeyboardInterrupt):  # it is how a server ends
            uvicorn.Server(config).run(sockets=[listener])


def build_config(settings: ServeSettings, entrance: Guard) -> uvicorn.Config:
    """Return the settings of uvicorn, with limits for connections and for slow clients."""
    return uvicorn.Config(
        entrance,
        http=partial(TimedProtocol, client_s=settings.timeout_s),  # it also bounds the bytes of headers
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        limit_concurrency=2 * settings.waiting_requests + 1,  # of uvicorn: the first number that is refused
        timeout_graceful_shutdown=_SECONDS_TO_END,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(f"host={host}: there is no such address ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another host or port") from None
    return listener
