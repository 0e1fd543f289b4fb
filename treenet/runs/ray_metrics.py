"""Metrics of trainings for Prometheus, on the endpoint that Ray has on every node. Without Ray in this process, there are none.

workflows/clusters/grafana.json is a dashboard of them. Ray puts `ray_` before each name.
"""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

# The numbers of a training line, with the name and the description of each metric.
GAUGES = {
    "step": ("tree_attention_updates", "updates of the run"),
    "tokens_per_s": ("tree_attention_tokens_per_second", "target tokens a second, on all devices of the run"),
    "data_wait": ("tree_attention_data_wait", "share of the time in which the run waits for data"),
}
FAILURES = "tree_attention_failures"


def show_line(run: str, line: Mapping[str, Any]) -> None:
    """Set the metrics of a run to those of a training line."""
    for key, (name, what) in GAUGES.items() if _has_ray() else ():
        _metric("Gauge", name, what).set(line[key], {"run": run})


def count_failure(run: str) -> None:
    """Count a failure after which a run begins again."""
    if _has_ray():
        _metric("Counter", FAILURES, "losses and errors after which the run began again").inc(1, {"run": run})


def _has_ray() -> bool:
    ray = sys.modules.get("ray")  # training without Ray must not import it
    return ray is not None and ray.is_initialized()


@cache
def _metric(kind: str, name: str, what: str) -> Any:
    from ray.util import metrics

    return getattr(metrics, kind)(name, description=what, tag_keys=("run",))
