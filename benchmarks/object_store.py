"""Objects in flight and MB/s between this machine and an S3 server on loopback, one object at a time and as the code does it.

    python benchmarks/object_store.py              # 96 objects of 2 MB, with 0 and 30 ms before each answer; about a minute
    python benchmarks/object_store.py --quick      # 24 objects of 0.2 MB

The server is moto's, an S3 in Python of one process. The proxy before it (`slow_s3.py`) makes every request wait and counts
those that are in flight. A wait of 30 ms is that of a request to S3; the figures with it show how much of the waiting is
hidden. `upload` is `run_all` over `write_bytes`, as a run in the store uploads its files. `copy` is `CopiesAhead`. `hash` is what
preprocessing does with finished shards when it is run again. Copies are compared with what was uploaded.
"""

import argparse
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

from measure import emit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from moto_store import s3_server

from treeproc.common import storage
from treeproc.common.cache import CopiesAhead, find_changed, local_copy
from treeproc.common.files import file_sha256
from treeproc.common.storage import AnyPath, as_path
from treeproc.common.store_requests import run_all

PROXY = Path(__file__).resolve().parent / "slow_s3.py"


@contextlib.contextmanager
def slow_store(folder: Path, seconds: float) -> Iterator[int]:
    """Yield the port of a proxy before an empty bucket. The environment names the proxy."""
    with s3_server(folder), socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        server = os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]
        proxy = subprocess.Popen([sys.executable, str(PROXY), str(port), server, str(seconds)])
        try:
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
            storage._file_system.cache_clear()
            for _ in range(100):
                with contextlib.suppress(OSError):
                    counts(port)
                    break
                time.sleep(0.1)
            yield port
        finally:
            proxy.terminate()
            proxy.wait()


def counts(port: int) -> dict[str, int]:
    """Return the counts of the proxy since the last question."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as proxy:
        proxy.sendall(b"?")
        return json.loads(proxy.makefile("rb").read())


def measured(port: int, work: Callable[[], object]) -> dict[str, float]:
    """Seconds of the work, and the requests in flight."""
    counts(port)
    began = time.monotonic()
    work()
    return {"seconds": time.monotonic() - began, **counts(port)}


def ways(folder: AnyPath, contents: dict[str, bytes]) -> dict[str, Callable[[], object]]:
    """Return the measurements by name. Each way runs once with one object after the other, and once as the code does it."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    objects = [(folder / name, sha256) for name, sha256 in hashes.items()]

    def upload(name: str) -> None:
        (folder / name).write_bytes(contents[name])

    def check() -> None:
        if find_changed(folder, hashes):
            raise SystemExit("an object has not got its hash")

    return {
        "upload, one at a time": lambda: [upload(name) for name in contents],
        "upload": lambda: run_all(upload, contents),
        "copy, one at a time": lambda: [local_copy(*one) for one in objects],
        "copy": lambda: wait(CopiesAhead().begin(objects)),
        "hash, one at a time": lambda: [file_sha256(path) for path, _ in objects],
        "hash": check,
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(argv).quick
    count, size = (24, 200_000) if quick else (96, 2_000_000)
    contents = {f"{number:05d}.bin": os.urandom(size) for number in range(count)}
    for milliseconds in (0, 30):
        with tempfile.TemporaryDirectory() as name, slow_store(Path(name), milliseconds / 1000) as port:
            folder = as_path("s3://bucket/data")
            for way, work in ways(folder, contents).items():
                os.environ["TREE_ATTENTION_CACHE"] = str(Path(name) / way)
                found = measured(port, work)
                if way.startswith("copy"):
                    for object_name, content in contents.items():
                        path = local_copy(folder / object_name, hashlib.sha256(content).hexdigest())
                        if path.read_bytes() != content:
                            raise SystemExit(f"the copy of {object_name} differs")
                rate = count * size / 1e6 / found["seconds"]
                emit(
                    "object_store", f"{way}, {milliseconds} ms", "MB/s", rate, in_flight=found["most"], requests=found["requests"]
                )


if __name__ == "__main__":
    main(sys.argv[1:])
