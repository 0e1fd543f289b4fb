"""The server: replicas, the entrance in this process, and a socket; from its start to Ctrl-C."""

import signal
import socket
from contextlib import suppress
from functools import partial

import uvicorn

from treenet.extras.serving.connections import TimedProtocol
from treenet.extras.serving.guard import Guard
from treenet.extras.serving.http_app import build_entrance
from treenet.extras.serving.replicas import start_replicas
from treenet.extras.serving.settings import ServeSettings, read_token
from treenet.runs.chosen_checkpoint import checkpoint_folder, checkpoint_names
from treenet.runs.mirror import read_run
from treeproc.common.errors import UserError
from treeproc.common.messages import tell
from treeproc.common.storage import AnyPath

_BACKLOG = 128
_SECONDS_TO_END = 5  # for answers under way


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
        http=partial(TimedProtocol, client_s=settings.timeout_s),  # type: ignore[arg-type]  # it also bounds the bytes of headers
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        limit_concurrency=2 * settings.waiting_requests,
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
