"""A real S3 server on loopback for tests: moto's, as a process of its own."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import PROCESSES, print_to
from waiting import wait_for_line

from treeproc.common import storage

SECRET = "never-to-be-seen-in-any-file"


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Set this process's environment for an empty bucket; yields its URI. Skips the test where moto is not installed."""
    if find_spec("moto") is None:
        pytest.skip("moto is not installed; it comes with the extra 'test'")
    log = folder / "moto.log"
    log.touch()
    with pytest.MonkeyPatch.context() as patch:
        server = PROCESSES.Process(target=_serve, args=(log,))
        server.start()
        try:
            endpoint = wait_for_line(server, log, r"Running on (http://127\.0\.0\.1:\d+)")
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=60).close()
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
            patch.setenv("AWS_REGION", "us-east-1")
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            patch.setenv("TREE_ATTENTION_CACHE", str(folder / "cache"))
            storage._file_system.cache_clear()
            yield "s3://bucket"
        finally:
            storage._file_system.cache_clear()
            server.terminate()
            server.join()


def _serve(log: Path) -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    print_to(log)
    # The command `moto_server` has all services. It takes as long to choose one for a request as S3 to answer it.
    run_simple("127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=MotoRequestHandler)
