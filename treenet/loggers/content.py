"""What a logger gets: the settings, facts, provenance, metrics and scores of a run folder, and nothing else.

The run folder is the truth. A logger is a copy that any session can complete.
"""

import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.config import MAY_CHANGE, TrainConfig
from treenet.config.training import flatten
from treenet.runs.checkpoint import checkpoint_folders
from treenet.runs.metrics_log import read_metrics
from treenet.runs.result_entries import read_scores
from treenet.runs.run_folder import RunFacts, read_facts
from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import UserError, is_below, load_settings
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.shards.store import fingerprint_of

LOGGERS = "loggers.json"
_ID = re.compile(r"[0-9a-f]{32}")
_HINT = "remove it, and the loggers begin a new run"


class _Identity(TypedDict):
    id: str
    name: str
    of: str  # fingerprint of the settings and the data that the run began with
    local: bool  # whether the run folder is on a disk


@dataclass(frozen=True)
class RunIdentity:
    """The name of a run in loggers. `id` is the same for all sessions; `folder` is None for a run in an object store."""

    id: str
    name: str
    folder: Path | None


@dataclass(frozen=True)
class Score:
    """A test score of a run, for example `test/bleu`, and the last update of the scored weights."""

    name: str
    step: int
    value: float


@dataclass(frozen=True)
class RunContent:
    """A run at one moment. `params` never change; `notes` may. `lines` are those of metrics.jsonl."""

    params: dict[str, str]
    notes: dict[str, str]
    lines: list[dict]
    scores: list[Score]


def numbers_of(line: Mapping) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl by their names in loggers: `train/update`, `train/loss` and so on."""
    numbers = {"update": line["step"], **{name: value for name, value in line.items() if name not in ("event", "step")}}
    return {f"{line['event']}/{name}": value for name, value in numbers.items() if value is not None}


def identify(run_dir: Path, out: AnyPath, config: TrainConfig, data_fingerprint: str) -> None:
    """Give the run an identity in loggers, in RUN/loggers.json, if it has none.

    A run without a checkpoint may change its settings. It then gets a new identity, because it begins again.
    """
    of = fingerprint_of([config.lasting(), data_fingerprint])
    path = run_dir / LOGGERS
    if path.exists() and (checkpoint_folders(run_dir) or _read_identity(run_dir)["of"] == of):
        return
    identity = {"id": uuid.uuid4().hex, "name": out.name, "of": of, "local": not isinstance(out, RemotePath)}
    atomic_write(path, json_bytes(identity, _Identity))


def read_identity(run_dir: Path) -> RunIdentity:
    """Read RUN/loggers.json. Raises UserError if it is missing or damaged."""
    identity = _read_identity(run_dir)
    return RunIdentity(identity["id"], identity["name"], run_dir if identity["local"] else None)


def _read_identity(run_dir: Path) -> _Identity:
    identity = read_json(run_dir / LOGGERS, _HINT, _Identity)
    if not _ID.fullmatch(identity["id"]):  # a part of file names and of queries
        raise UserError(f"{run_dir / LOGGERS}: id must have 32 hexadecimal digits; {_HINT}")
    return identity


class RunReader:
    """Reads the content of a run folder again and again. `metrics` is the folder or the store of metrics.jsonl."""

    def __init__(self, run_dir: Path, metrics: AnyPath | None = None):
        self._run_dir, self._metrics = run_dir, metrics or run_dir
        self.config = load_settings(TrainConfig, run_dir / "config.yaml")
        self._params = dict(_params(self.config, read_facts(run_dir)))
        self._settings = {
            key: _text(value) for key, value in flatten(self.config.model_dump(mode="json")).items() if is_below(key, MAY_CHANGE)
        }

    def read(self) -> RunContent:
        """Return the present content. Raises UserError if a file is damaged."""
        return RunContent(
            params=self._params,
            notes={**self._settings, **_provenance(self._run_dir)},
            lines=read_metrics(self._metrics),
            scores=list(_scores(self._run_dir)),
        )


def _params(config: TrainConfig, facts: RunFacts) -> Iterator[tuple[str, str]]:
    lasting = config.lasting()
    for key, value in lasting.items():
        if not key.startswith("lr_scale."):  # its keys are patterns, which no logger takes as names
            yield key, _text(value)
    if config.lr_scale:
        yield "lr_scale", _text(config.lr_scale)
    for key, value in flatten(facts).items():
        yield f"run.{key}", _text(value)


def _provenance(run_dir: Path) -> dict[str, str]:
    """Return the last session of training in provenance.json, as flat notes."""
    trained = [session for session in read_sessions(run_dir) if session.command.startswith("train")]
    if not trained:
        return {}
    session = trained[-1].model_dump(mode="json")
    return {f"provenance.{key}": _text(value) for key, value in flatten(session).items() if value is not None}


def _scores(run_dir: Path) -> Iterator[Score]:
    for name, entry in read_scores(run_dir).items():
        step = max(entry.get("steps") or [0]) if isinstance(entry, Mapping) else 0
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                yield Score(f"{name}/{key}", step, float(value))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
