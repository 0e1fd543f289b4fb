"""Ray's nodes, which may take minutes to start. Ray ends a node that needs half a minute, and so would a busy machine."""

import time
from socket import socket
from types import SimpleNamespace

from ray._private import node, parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

node.time = SimpleNamespace(**vars(time) | {"monotonic": lambda: time.monotonic() / 8})
_Params = parameter.RayParams


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _with_ports(**options) -> parameter.RayParams:
    """A node whose agents have ports from the start does not wait for them."""
    params = _Params(**options)
    params.metrics_agent_port, params.metrics_export_port = free_port(), free_port()
    params.runtime_env_agent_port, params.dashboard_agent_listen_port = free_port(), free_port()
    return params


parameter.RayParams = _with_ports


class PatientNodes(FakeMultiNodeProvider):
    """The provider of `fake_autoscaler.py`, in Ray's monitor. The head imports this file too."""
