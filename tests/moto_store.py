"""A real S3 server on loopback for tests: moto's, as a process of its own."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_for_line

from treeproc.common import storage

SECRET = "never-to-be-seen-in-any-file"


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Set this process's environment for an empty bucket; yields its URI. Skips the test where moto is not installed."""
    # An older moto that lies elsewhere on PATH may not speak what Arrow's client expects.
    command = os.environ.get("MOTO_SERVER") or str(Path(sys.executable).parent / "moto_server")
    if not os.path.exists(command):
        pytest.skip("moto_server is not installed; it comes with the extra 'test'")
    with open(folder / "moto.log", "w") as log, pytest.MonkeyPatch.context() as patch:
        server = subprocess.Popen([command, "-H", "127.0.0.1", "-p", "0"], stdout=log, stderr=log)
        try:
            endpoint = wait_for_line(server, folder / "moto.log", r"Running on (http://127\.0\.0\.1:\d+)")
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
            server.wait()
