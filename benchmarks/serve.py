"""Requests a second and latency of workflows/serve.py, with 1, 8 and 64 clients, with and without batches.

    python benchmarks/serve.py RUN                              # as in docs/results/serving.md
    python benchmarks/serve.py RUN --seconds 5 --clients 1 8

RUN is the run of a demo; sentences are those of the shipped sample, one a request. A client is a thread with one connection that
sends its next request when it has the answer. One JSON line per figure: `requests_per_s`, and `p50_ms` and `p95_ms` of a
request. `batch_requests` is the setting of the server: 1 turns batches off. Each case begins requests for
`--seconds`, after as many seconds of warming up. Clients and server share the machine.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from measure import emit

from treeproc.readers import read_lines

REPOSITORY = Path(__file__).resolve().parent.parent
SENTENCES = REPOSITORY / "treeproc" / "sample" / "test.en.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--batch-requests", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    lines = list(read_lines([SENTENCES]))
    for batch_requests in args.batch_requests:
        command = [sys.executable, str(REPOSITORY / "workflows" / "serve.py"), "--out", str(args.run), "port=0"]
        server = subprocess.Popen(
            [*command, f"batch_requests={batch_requests}"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_ADDRESS": "local"},
        )
        server.stdout.readline()
        address = urlsplit(server.stdout.readline().strip()).netloc
        if not address:
            sys.exit("the server did not start")
        try:
            for clients in args.clients:
                send_for(address, lines, clients, args.seconds)
                times, seconds = send_for(address, lines, clients, args.seconds)
                figures = {"requests_per_s": len(times) / seconds}
                figures |= {f"p{share}_ms": 1000 * float(np.percentile(times, share)) for share in (50, 95)}
                for name, value in figures.items():
                    case = f"batch_requests={batch_requests}"
                    emit("serve", case, name, value, clients=clients, requests=len(times))
        finally:
            server.terminate()
            server.wait()


def send_for(address: str, lines: list[str], clients: int, seconds: float) -> tuple[list[float], float]:
    """The seconds of each request that begins within `seconds`, and those until the last answer."""
    times: list[float] = []
    begun = time.monotonic()

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=120)
        for i in range(number, 1 << 40, clients):
            started = time.monotonic()
            if started >= begun + seconds:
                break
            body = json.dumps({"lines": [lines[i % len(lines)]]})
            connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {text[:200]!r}")
            times.append(time.monotonic() - started)
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, time.monotonic() - begun


if __name__ == "__main__":
    main()
