"""The provenance of a result: its weights, data and decoding, and whether its run still has them.

A result records the sha256 of its weights, the fingerprints of its data, its decoding settings, the user's own settings, and the
software. It is valid as long as its command would read the same weights and data, and decode in the same way.
"""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from treenet.config import UNRECORDED, flatten
from treenet.runs.checkpoint import AVERAGED, INITIAL, META, checkpoint_folders
from treenet.runs.loading import UNTRAINED, LoadedModel
from treenet.runs.run_folder import checkpoint_path, recorded_sha256
from treenet.tasks.base import TASKS, task_of
from treeproc.common.files import read_json, read_text
from treeproc.common.provenance import describe_software, software
from treeproc.common.settings import Effect, Settings, UserError, read_yaml, settings_with
from treeproc.common.storage import AnyPath, as_path
from treeproc.shards.store import read_index

LAST = "last"
PARSE = "unsupervised_parse-"  # prefix of the names of parses in scores.json
NOT_RECORDED = "without provenance: recorded before results named their weights"
_RECORDED = ("checkpoint", "weights_sha256", "weights", "data", "decoding", "software")
_SHOWN = 8  # digits of a hash


def fingerprints(index: Mapping) -> dict[str, str]:
    """Return the fingerprints of a data set, from its index."""
    return {key: value for key, value in index.items() if key.endswith("fingerprint")}


def asked_for(settings: Settings) -> dict:
    """Return the settings that the user set and that the result depends on."""
    return settings.model_dump(mode="json", exclude_unset=True, exclude=settings_with(type(settings), Effect.NONE))


def origin(run: LoadedModel, settings: Settings) -> dict:
    """Return the origin of a result of `run`, for its entry. `steps` are the updates of the weights, which may be a mean.

    Untrained weights have no file: the named seed gives them.
    """
    untrained = {} if run.weights_sha256 else {"weights": f"untrained, drawn with seed {run.config.seed}"}
    meta = read_json(run.weights / META) if run.weights and run.checkpoint != UNTRAINED else {}
    steps = meta.get("averaged_steps", [meta["step"]] if "step" in meta else [])
    return {
        "checkpoint": run.checkpoint,
        **({"steps": steps} if steps else {}),
        "weights_sha256": run.weights_sha256,
        **untrained,
        "data": fingerprints(read_index(run.data / "encoded")),
        "own_data": run.own_data,
        "asked": asked_for(settings),
        "software": software(),
    }


@dataclass(frozen=True)
class ResultStatus:
    """The status of a result: whether it belongs to the present state of its run.

    `changed` names the differences, and is empty without one. `command` renews the result. `recorded` is False for old results
    that do not name their weights; then nothing is known about them.
    """

    changed: str = ""
    command: str = ""
    recorded: bool = True

    @property
    def mark(self) -> str:
        """Return a mark for a result that is not known to be of the run as it is; empty for all others."""
        return "stale" if self.changed else "" if self.recorded else "without provenance"

    def marked(self, name: str) -> str:
        """Return the name of the result with the mark behind it."""
        return f"{name} ({self.mark})" if self.mark else name

    def describe(self) -> str:
        """Describe a stale result for a person, after its name and a verb."""
        return f"stale: the run has changed since then ({self.changed}); to renew it: {self.command}"


class RunState:
    """The present weights, data and decoding of a run folder, local or in an object store. `name` is its name in commands."""

    def __init__(self, folder: AnyPath, name: AnyPath | str | None = None):
        self.folder, self.name = folder, str(name or folder)

    def check_scores(self, scores: Mapping[str, Mapping]) -> dict[str, ResultStatus]:
        """Check the entries of scores.json, by name."""
        return {
            name: self.check(entry, "unsupervised-parse" if name.startswith(PARSE) else None)
            for name, entry in scores.items()
            if isinstance(entry, Mapping)
        }

    def check(self, entry: Mapping, command: str | None = None) -> ResultStatus:
        """Check an entry of scores.json or probes.json.

        `command` made it; if unset, that is the command that scores the task of the run.
        """
        asked = entry.get("asked")
        if not isinstance(asked, dict):
            asked = {"checkpoint": _asked_checkpoint(str(entry.get("checkpoint", AVERAGED)))}
        command = self._command(command or task_of(self.task).scorer, entry, asked)
        if not is_recorded(entry):
            return ResultStatus(command=command, recorded=False)
        if "hypotheses" in entry:  # lines of another system; a change of this run's weights does not concern them
            return ResultStatus(command=command)
        changed = [*self._other_weights(entry, asked), *self._other_data(entry, asked), *self._other_decoding(entry, asked)]
        return ResultStatus(", ".join(changed), command)

    def weights_sha256(self, checkpoint: str = AVERAGED) -> str | None:
        """Return the sha256 of the weights that a command would load; None if there are none or it is unknown."""
        if checkpoint == LAST:
            folders = checkpoint_folders(self.folder)
            return recorded_sha256(folders[-1]) if folders else None
        return recorded_sha256(checkpoint_path(self.folder, checkpoint))

    @cached_property
    def _config(self) -> dict:
        path = self.folder / "config.yaml"
        found = read_yaml(read_text(path, "restore it"), str(path)) if path.exists() else None
        return found if isinstance(found, dict) else {}

    @property
    def task(self) -> str:
        """The task of the run; translation in a folder without settings."""
        task = self._config.get("task")
        return task if task in TASKS else "translation"

    @property
    def is_grammar(self) -> bool:
        """Whether it is a run of a Transformer Grammar."""
        model = self._config.get("model")
        return isinstance(model, dict) and model.get("name") == "transformer_grammar"

    @cached_property
    def _facts(self) -> dict:
        path = self.folder / "run.json"
        return read_json(path, "restore it") if path.exists() else {}

    def _other_weights(self, entry: Mapping, asked: Mapping) -> list[str]:
        then = entry.get("weights_sha256")
        checkpoint = INITIAL if asked.get("untrained") else str(asked.get("checkpoint", AVERAGED))
        now = self.weights_sha256(checkpoint) if then else None
        return [f"weights {short(then)}, now {short(now)}"] if now not in (None, then) else []

    def _other_data(self, entry: Mapping, asked: Mapping) -> list[str]:
        then, now = data_fingerprint(entry), None
        if "own_data" not in entry:
            return []
        if entry["own_data"]:
            now = self._facts.get("data_fingerprint")
        elif isinstance(place := asked.get("data") or self._config.get("data"), str):
            with suppress(UserError):  # unknown if it has moved
                now = read_index(as_path(place) / "encoded").get("fingerprint")
        return [f"data {short(then)}, now {short(now)}"] if None not in (then, now) and then != now else []

    def _other_decoding(self, entry: Mapping, asked: Mapping) -> list[str]:
        then, own, chosen = entry.get("decoding"), self._config.get("decoding"), asked.get("decoding", {})
        if not all(isinstance(one, dict) for one in (then, own, chosen)):
            return []
        then, now = UNRECORDED | dict(then or {}), UNRECORDED | dict(own or {}) | chosen
        names = [name for name in then if name in now and name != "max_tokens" and then[name] != now[name]]
        return [f"decoding.{name} {then[name]}, now {now[name]}" for name in names]

    def _command(self, command: str, entry: Mapping, asked: Mapping) -> str:
        out = f"--out {shlex.quote(self.name)}"
        split = {"split": entry["split"]} if "split" in entry and "treebank" not in asked else {}
        values = flatten(split | dict(asked)).items()
        options = [shlex.quote(f"{key}={_as_yaml(value)}") for key, value in values if (key, value) != ("checkpoint", AVERAGED)]
        return " ".join([f"tree-attention {command}", out, *options])


def _asked_checkpoint(folder: str) -> str:
    """Convert `step_00001000` to `1000`, the form of the setting."""
    number = folder.removeprefix("step_")
    return str(int(number)) if number.isdecimal() else folder


def _as_yaml(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def is_recorded(entry: Mapping) -> bool:
    """Return whether the entry names its weights, or the reason why it has none."""
    return bool(entry.get("weights_sha256") or "weights" in entry)


def recorded_origin(entry: Mapping) -> dict:
    """Return the origin that an entry records, for a table over runs. Its weights are None if the entry names none."""
    return {"weights_sha256": None, **{name: entry[name] for name in _RECORDED if name in entry}}


def short(sha256: str | None) -> str:
    """Return the first digits of a hash, for people."""
    return str(sha256)[:_SHOWN] if sha256 else "unknown"


def data_fingerprint(entry: Mapping) -> str | None:
    """Return the fingerprint of the encoded data set of a result."""
    data = entry.get("data")
    return data.get("fingerprint") if isinstance(data, dict) else None


def describe_weights(entry: Mapping) -> str:
    """Describe the weights, as in `1a2b3c4d (averaged)`, or return the text that is recorded instead of weights."""
    if sha256 := entry.get("weights_sha256"):
        return f"{short(sha256)} ({entry.get('checkpoint', AVERAGED)})"
    return entry.get("weights", NOT_RECORDED)


def describe_decoding(entry: Mapping) -> str:
    """Describe the settings of decoding; empty if nothing was decoded."""
    found = entry.get("decoding")
    return " ".join(f"{name}={value}" for name, value in found.items() if name != "max_tokens") if isinstance(found, dict) else ""


def describe_origin(entry: Mapping) -> str:
    """Describe the origin on one line."""
    if not is_recorded(entry):
        return NOT_RECORDED
    data = data_fingerprint(entry)
    parts = [f"weights {describe_weights(entry)}", f"data {short(data)}" if data else "", describe_decoding(entry)]
    parts.append(describe_software(entry["software"]) if isinstance(entry.get("software"), dict) else "")
    return "; ".join(filter(None, parts))
