"""Tell Ray when EC2 takes this spot node back. cluster.yaml starts this on every worker node (docs/cluster.md).

EC2 announces the end of a spot node two minutes before. Then Ray drains the node, and training saves a checkpoint and leaves it.
Options go to `ray drain-node`. AWS_EC2_METADATA_SERVICE_ENDPOINT is another address of the metadata service. This needs only the
standard library.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from http.client import HTTPException

SERVICE = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
# Seconds between two questions, and those that `ray drain-node` may take.
POLL_S, DRAIN_S = 5, 60
DRAIN = ["ray", "drain-node", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=EC2 takes the spot node back"]
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach the service of this machine


def ask(method: str, path: str, **headers: str) -> str:
    headers = {f"X-aws-ec2-metadata-{name}": value for name, value in headers.items()}
    request = urllib.request.Request(f"{SERVICE}/latest/{path}", headers=headers, method=method)
    with _direct.open(request, timeout=POLL_S) as answer:
        return answer.read().decode()


def read_notice() -> datetime | None:
    """Return when EC2 ends or stops this node; None without a notice."""
    token = ask("PUT", "api/token", **{"token-ttl-seconds": "60"})
    try:
        notice = ask("GET", "meta-data/spot/instance-action", token=token)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    try:
        return datetime.fromisoformat(json.loads(notice)["time"]).astimezone(UTC)
    except (KeyError, TypeError):
        raise ValueError(f"expected a notice with a time, but found {notice!r}") from None


def drain(end: datetime) -> bool:
    """Return whether Ray's node on this machine drains."""
    left = max(0, int((end - datetime.now(UTC)).total_seconds()))
    print(f"EC2 takes this node back in {left} seconds", flush=True)
    command = [*DRAIN, f"--deadline-remaining-seconds={left}", *sys.argv[1:]]
    # Without an address, Ray may start a cluster of its own, drain nothing and return 0.
    environment = os.environ | {"RAY_ADDRESS": "auto"}
    try:
        return subprocess.run(command, env=environment, timeout=DRAIN_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    """Ask until the node drains. If Ray starts again on it, so does this."""
    problem = ""
    while True:
        try:
            if (end := read_notice()) and drain(end):
                return
            found = ""
        except (OSError, ValueError, HTTPException) as error:
            found = f"warning: cannot ask {SERVICE} for a spot notice ({error}); asking again"
        if found not in ("", problem):
            print(found, flush=True)
        problem = found
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
