"""MLflow: a run of an experiment, in the store of MLFLOW_TRACKING_URI, or in a SQLite file beside the run folder."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from treenet.loggers.content import RunContent, RunIdentity, Score, numbers_of
from treeproc.common.errors import UserError
from treeproc.common.files import file_lock

URI, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
_TAG = "tree_attention.id"
# The most entries of one request.
_METRICS, _PARAMS = 1000, 100
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Logger:
    """Sends what the MLflow run lacks. It asks MLflow for that, so a kill at any moment doubles no point and loses none."""

    package = "mlflow"
    remote_place = f"{URI}, the address of a server"

    @staticmethod
    def has_place(local: bool) -> bool:
        """Return whether MLflow can store a run. A run in an object store has no place for a SQLite file."""
        return local or bool(os.environ.get(URI))

    def __init__(self, identity: RunIdentity, trains: bool):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no network unless the user asks for it
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        import mlflow  # noqa: F401, the package is loaded before threads work beside each other

        self._identity, self._trains = identity, trains
        self._there: dict[str, set[int]] = {}
        self._last: dict[str, tuple[int, float]] = {}
        self._params: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self.place = ""

    def open(self) -> None:
        """Find the run of this identity, or make it."""
        from mlflow import MlflowClient

        folder = self._identity.folder
        uri, given = os.environ.get(URI), os.environ.get(EXPERIMENT) or "tree-attention"
        if not uri and folder is None:
            raise UserError(f"a run in an object store needs {URI}")
        beside = Path() if folder is None else folder.parent  # of the database, where there is no server
        # Runs of a study begin together. One of them makes the tables of a new SQLite file.
        with nullcontext() if uri else file_lock(beside / ".mlflow-lock"):
            self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{beside / DATABASE}")
            experiment = self._client.get_experiment_by_name(given)
            location = None if uri else (beside / ARTIFACTS).as_uri()
            number = experiment.experiment_id if experiment else self._client.create_experiment(given, location)
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{self._identity.id}'", max_results=1)
        if not found:
            found = [self._client.create_run(number, run_name=self._identity.name, tags={_TAG: self._identity.id})]
        elif self._trains:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        self._run = found[0].info.run_id
        self.place = f"run {self._identity.name} of experiment {given} in {uri or beside / DATABASE}"

    def send(self, content: RunContent) -> None:
        """Send the settings, notes, lines and scores that MLflow lacks."""
        from mlflow.entities import Param, RunTag

        for some in _chunks([Param(_name(k), v) for k, v in content.params.items() if self._params.get(k) != v], _PARAMS):
            self._client.log_batch(self._run, params=some)
        self._params = content.params
        for some in _chunks([RunTag(_name(k), v) for k, v in content.notes.items() if self._notes.get(k) != v], _PARAMS):
            self._client.log_batch(self._run, tags=some)
        self._notes = content.notes
        self._send_lines([line for line in content.lines if line["step"] not in self._steps(line["event"])])
        self._send_scores([score for score in content.scores if self._last_score(score.name) != (score.step, score.value)])

    def close(self, state: str | None) -> None:
        """Note how the training ended; None leaves the state as it is."""
        if state:
            self._client.set_terminated(self._run, _STATES[state])

    def _send_lines(self, lines: Sequence[dict]) -> None:
        """Send lines of metrics. All numbers of a line are in one request, which MLflow stores complete or not at all."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        batch: list = []
        for line in lines:
            metrics = [Metric(_name(name), value, now, line["step"]) for name, value in numbers_of(line).items()]
            if len(batch) + len(metrics) > _METRICS:
                self._client.log_batch(self._run, metrics=batch)
                batch = []
            batch += metrics
        if batch:
            self._client.log_batch(self._run, metrics=batch)
        for line in lines:
            self._there[line["event"]].add(line["step"])

    def _send_scores(self, scores: Sequence[Score]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        for some in _chunks([Metric(_name(score.name), score.value, now, score.step) for score in scores], _METRICS):
            self._client.log_batch(self._run, metrics=some)
        self._last |= {score.name: (score.step, score.value) for score in scores}

    def _steps(self, event: str) -> set[int]:
        """Return the updates whose lines of this event MLflow has."""
        if event not in self._there:
            self._there[event] = {point.step for point in self._client.get_metric_history(self._run, f"{event}/update")}
        return self._there[event]

    def _last_score(self, name: str) -> tuple[int, float] | None:
        if name not in self._last:
            points = self._client.get_metric_history(self._run, _name(name))
            if points:
                last = max(points, key=lambda point: point.timestamp)
                self._last[name] = (last.step, last.value)
        return self._last.get(name)


def _chunks(entries: Sequence, size: int) -> Iterator[Sequence]:
    return (entries[start : start + size] for start in range(0, len(entries), size))


def _name(name: str) -> str:
    """Return a name with the characters that MLflow takes."""
    return re.sub(r"[^\w.\- /]", "_", name, flags=re.ASCII)[:250]
