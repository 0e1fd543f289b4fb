"""EC2's metadata service of a spot node (IMDSv2), as a server of this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "of-this-session"


class MetadataService(ThreadingHTTPServer):
    """Answers whoever has a token with `notice`, or with 404 as long as there is none. If it is broken, it answers nothing."""

    notice: str | None = None
    broken = False
    asked = 0

    def announce(self, seconds: float) -> None:
        end = datetime.now(UTC) + timedelta(seconds=seconds)
        self.notice = json.dumps({"action": "terminate", "time": f"{end:%Y-%m-%dT%H:%M:%SZ}"})

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: MetadataService

    def do_PUT(self) -> None:
        self.server.asked += 1
        known = self.path == "/latest/api/token" and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        self._answer(200 if known else 400, TOKEN)

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != TOKEN:
            self._answer(401, "")
        elif self.path != "/latest/meta-data/spot/instance-action" or self.server.notice is None:
            self._answer(404, "")
        else:
            self._answer(200, self.server.notice)

    def _answer(self, status: int, text: str) -> None:
        if self.server.broken:
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *message: object) -> None:
        pass


@contextmanager
def metadata_service() -> Iterator[MetadataService]:
    with MetadataService(("127.0.0.1", 0), _Handler) as service:
        Thread(target=service.serve_forever, daemon=True).start()
        yield service
        service.shutdown()
