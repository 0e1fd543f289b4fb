"""A local server with models, which speaks to the client of the Hugging Face hub as the hub does."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

_NAME = r"((?:[\w.-]+/)?[\w.-]+)"
_FILE = re.compile(rf"/{_NAME}/resolve/([^/]+)/(.+)")
_FACTS = re.compile(rf"/api/models/{_NAME}/(revision|tree)/([^/?]+)(\?.*)?")


@dataclass
class HubServer:
    """The models by name, each with folders by commit and commits by branch, and the requests so far."""

    url: str = ""
    folders: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)  # status and code of an error, by the model's name
    cut: bool = False  # the connection ends in the middle of each file
    requests: list[str] = field(default_factory=list)

    def publish(self, name: str, folder: Path, branch: str = "main") -> str:
        """Give a branch of a model a new commit, which has the files of a folder; returns the commit."""
        commits = self.folders.setdefault(name, {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = folder
        self.branches.setdefault(name, {})[branch] = commit
        return commit

    def fetched(self) -> list[str]:
        """Return the names of the files that were read, and forget all requests."""
        names = [request.rpartition("/")[2] for request in self.requests if re.match("GET .*/resolve/", request)]
        self.requests.clear()
        return sorted(names)


@contextmanager
def serving() -> Iterator[HubServer]:
    """Serve models on a port of this machine."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            file, facts = _FILE.fullmatch(self.path), _FACTS.fullmatch(self.path)
            name, revision = file.group(1, 2) if file else facts.group(1, 3) if facts else ("", "")
            if name in hub.refused:
                return self._refuse(*hub.refused[name])
            if name not in hub.folders:
                return self._refuse(401, "")  # as the hub answers who is not logged in
            commit = hub.branches[name].get(revision, revision)
            if commit not in hub.folders[name]:
                return self._refuse(404, "RevisionNotFound")
            folder = hub.folders[name][commit]
            if file:
                path = folder / file[3]
                return self._send(path.read_bytes(), commit) if path.is_file() else self._refuse(404, "EntryNotFound")
            files = [{"type": "file", "path": one.name, "size": one.stat().st_size, "oid": ""} for one in folder.iterdir()]
            self._send(json.dumps(files if facts[2] == "tree" else {"id": name, "sha": commit}).encode())

        do_GET = do_HEAD

        def _send(self, content: bytes, commit: str = "") -> None:
            self.send_response(200)
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                is_cut = bool(commit and hub.cut)
                self.wfile.write(content[: len(content) // 2] if is_cut else content)
                self.close_connection = is_cut

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
