"""The command serve.py in a process, asked over HTTP, and its replicas, which tests kill."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from search_runs import write_run, write_vocabulary

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    return write_run(folder / "run", write_vocabulary(folder / "data"))


class Server:
    """The command in a process of its own."""

    def __init__(self, run: Path, log: Path, *settings: str):
        import forked_ray  # loads Ray

        command = [forked_ray.python, str(ROOT / "workflows" / "serve.py"), "--out", str(run), "port=0", *settings]
        self._of_ray = tempfile.TemporaryDirectory(prefix="serve-", dir="/tmp")  # a short name: it has sockets
        environment = os.environ | {"RAY_TMPDIR": self._of_ray.name}
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        self.model = self.process.stdout.readline()
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("http://127.0.0.1:"), log.read_text()

    def ask(self, lines: list[str], **options: object) -> list[dict]:
        body = json.dumps({"lines": lines, **options}).encode()
        request = urllib.request.Request(f"{self.address}translate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["lines"]

    def health(self) -> dict:
        """The answer of /healthz, whatever its status."""
        try:
            with urllib.request.urlopen(f"{self.address}healthz", timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=200) == 0

    def replicas(self) -> list[int]:
        """Process numbers of replicas: Ray names their processes after the deployment, and they write its logs."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if b"ServeReplica" in (folder / "cmdline").read_bytes() and self._of_ray.name in open_files(folder):
                    found.append(int(folder.name))
        return found


def open_files(process: Path) -> str:
    """The names of the files that a process has open; `process` is its folder in /proc."""
    names = []
    for file in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            names.append(os.readlink(file))
    return "\n".join(names)


def answers_while_killing(server: Server, lines: list[str], replica: int) -> list[list[str]]:
    """Translations of `lines`, asked for by six clients without pause, before and after the replica is killed.

    An answer with another status than 200 is an error.
    """
    answers, failures, stopped = [], [], threading.Event()

    def ask() -> None:
        try:
            while not stopped.is_set():
                answers.append([line["translation"] for line in server.ask(lines)])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    while len(answers) < 6 and not failures:
        time.sleep(0.01)
    os.kill(replica, signal.SIGKILL)
    before = len(answers)
    while len(answers) < before + 12 and not failures:
        time.sleep(0.05)
    stopped.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return answers
