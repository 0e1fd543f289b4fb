"""Records: the results of a finished cell, without its weights, as one small file DIR/NAME.json for tables and other machines.

A study can continue from its records alone: a cell with a record is done, on any machine. A record holds settings, fingerprints,
scores with their signatures, a thinned training curve, speed and machines. It also holds the statistics of each sentence that a
test needs. It contains no paths.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Required

import numpy as np
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.config import TrainConfig
from treenet.experiments.ledger import DONE, Cell, Entry, Ledger, changed_settings, check_labels, entry_of
from treenet.runs.checkpoint import AVERAGED, FIRST_UPDATE, META, describe_choices, read_meta
from treenet.runs.metrics_log import logged_step, read_metrics
from treenet.runs.result_entries import ScoredEntry
from treenet.runs.run_folder import FACTS, RunFacts, read_facts
from treeproc.common.files import TEMPORARY_PREFIX, atomic_write, json_bytes, read_json
from treeproc.common.hub import name_elsewhere
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import UserError, build_settings, load_settings
from treeproc.common.storage import AnyPath
from treeproc.shards.store import pieces_fingerprint

VERSION = 1
CURVE_POINTS = 200  # of training, and the same number of validation
HINT = "restore it, or remove the folder and run the same command again"
_DIGITS = 5
_MOST = 1_000_000  # the most words of a sentence, so that no sum over sentences overflows


class Training(TypedDict, total=False):
    """The training of a cell: updates, time, speed, machines."""

    updates: Required[int]
    averaged_steps: Required[list[int]]
    seconds: Required[float]
    tokens_per_s: Required[float | None]
    memory_gib: float | None
    software: list[dict]
    machines: list[dict]
    packages: list[dict]
    first_update: str  # the time, UTC; missing in earlier records


class Record(TypedDict, total=False):
    """The record of a cell. `sentences` are lines of numbers: one line per statistic, one number per sentence."""

    version: Required[int]
    cell: Required[str]
    labels: Required[dict[str, str | float | int]]
    settings: Required[dict]
    data_fingerprint: Required[str]
    encoder: str  # see `Cell.encoder`; missing in earlier records
    facts: Required[RunFacts]
    training: Required[Training]
    scores: Required[dict[str, ScoredEntry]]
    sentences: Required[dict[str, str]]
    curve: dict[str, dict[str, list[float | None]]]
    protocol: dict[str, str]  # of a study that names one: its file and the commit that changed it last


@dataclass(frozen=True)
class Recording:
    """The recording of a study's cells: types of their labels, and the results that are read from a finished run.

    The results are entries of its scores.json, and numbers of single sentences. Raises UserError if they are stale. `folder` has
    the files; it is None if no records are kept. `protocol` is that of the records.
    """

    labels: Mapping[str, type]
    read: Callable[[AnyPath], tuple[dict[str, dict], dict[str, str]]]
    folder: AnyPath | None = None
    protocol: dict[str, str] | None = None

    def write(self, run_dir: AnyPath, entry: Entry) -> None:
        """Write the record of a cell that is done, if records are kept."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.folder / f"{run_dir.name}.json", record_bytes(self.make(run_dir, entry)))

    def make(self, run_dir: AnyPath, entry: Entry) -> Record:
        """Make the record of a cell that is done. Raises UserError if its folder is incomplete, or that of another cell."""
        facts = read_facts(run_dir, HINT, ("parameters",))
        _refuse_other_run(run_dir, facts, entry)
        scores, sentences = self.read(run_dir)
        _refuse_other_decoding(run_dir, scores, entry)
        record = Record(
            version=VERSION,
            cell=run_dir.name,
            labels=dict(entry.labels),
            settings=_without_places(entry.settings),
            data_fingerprint=entry.data_fingerprint,
            encoder=entry.encoder,
            facts=facts,
            training=_read_training(run_dir),
            scores=scores,
            sentences=sentences,
            curve=read_curve(run_dir),
        )
        if self.protocol is not None:
            record["protocol"] = self.protocol
        return record

    def kept(self, cells: Iterable[Cell] = ()) -> dict[str, Record]:
        """Return the records in the folder by the names of their cells.

        Raises UserError for a file that is not a record, and for one of `cells` with other settings, data or encoder.
        """
        if self.folder is None or not self.folder.is_dir():
            return {}
        found = read_records(self.folder)
        for name, record in found.items():
            check_labels(record["labels"], str(self.folder / f"{name}.json"), self.labels)
        for cell in cells:
            if cell.name in found:
                record, path = found[cell.name], self.folder / f"{cell.name}.json"
                before = _with_places(record["settings"], cell.config.model_dump(mode="json"))
                fingerprints = record["data_fingerprint"], record.get("encoder", "")
                if changed := changed_settings(record["labels"], before, *fingerprints, cell, str(path)):
                    raise UserError(
                        f"{path} is a record with other settings ({'; '.join(changed)}); choose another --records, or give the "
                        "old settings"
                    )
        return found

    def plan(self, cells: Sequence[Cell], indices: Mapping[AnyPath, Mapping], ledger: Ledger, out: AnyPath) -> dict[str, Record]:
        """Return by name what records will have beside results: of `cells`, and of those that are done, also of earlier grids.

        `indices` has those of the data sets of the cells.
        """
        found: dict[str, Record] = {}
        for cell in cells:
            index = indices[cell.config.data]
            facts = RunFacts(
                num_pieces=index["num_pieces"],
                pieces_fingerprint=pieces_fingerprint(index),
                tree_settings=index.get("tree_settings", {}),
            )
            found[cell.name] = _planned(cell.name, entry_of(cell), facts)
        for name, entry in ledger.entries.items():
            if entry.status == DONE and (out / "cells" / name / FACTS).exists():
                check_labels(entry.labels, f"{out}: {name}", self.labels)
                found[name] = _planned(name, entry, read_facts(out / "cells" / name, HINT))
        return found

    def read_all(self, ledger: Ledger, out: AnyPath) -> list[Record]:
        """Read the records of the cells that are done, by name, also of earlier grids: from kept records, else from the runs."""
        for name, entry in ledger.entries.items():
            check_labels(entry.labels, f"{out}: {name}", self.labels)
        kept = self.kept()
        done = {name: entry for name, entry in ledger.entries.items() if entry.status == DONE and name not in kept}
        found = kept | {name: self.make(out / "cells" / name, entry) for name, entry in done.items()}
        return [found[name] for name in sorted(found)]


def _planned(name: str, entry: Entry, facts: RunFacts) -> Record:
    return Record(  # type: ignore[typeddict-item] # a record that has no results
        cell=name,
        labels=dict(entry.labels),
        settings=_without_places(entry.settings),
        data_fingerprint=entry.data_fingerprint,
        facts=facts,
        scores={},
    )


def _refuse_other_run(run_dir: AnyPath, facts: Mapping, entry: Entry) -> None:
    """Raise UserError if a folder has not the run of this cell, or weights or the log of another run."""
    from treenet.runs.identity import check_metrics, check_weights, identity, list_changes  # here, because it loads PyTorch

    own = identity(load_settings(TrainConfig, run_dir / "config.yaml"), facts)
    config = build_settings(TrainConfig, entry.settings, str(run_dir))
    asked = {"settings": config.lasting(), "data_fingerprint": entry.data_fingerprint}
    if changed := [line for line in list_changes(asked, own) if not _is_chosen(line)]:
        raise UserError(f"{run_dir} has the run of another cell ({'; '.join(changed)}); {HINT}")
    if isinstance(run_dir, Path):
        check_weights(run_dir, run_dir / AVERAGED)
    check_metrics(run_dir, HINT)
    refuse_other_budget(run_dir, config)


def refuse_other_budget(run_dir: AnyPath, config: TrainConfig) -> None:
    """Raise UserError if a run has more updates, or another average, than the settings of its cell ask for."""
    if (updates := logged_step(run_dir)) > config.max_steps:
        raise UserError(f"{run_dir} has {updates:,} updates, but the study asks for {config.max_steps:,}; {HINT}")
    own, asked = describe_choices(config, read_meta(run_dir / AVERAGED))
    if own != asked:
        raise UserError(
            f"{run_dir} has the average of {own}, not of {asked}; make it again with tree-attention average-checkpoints --out "
            f"{quote(str(run_dir))} {asked}, or remove the folder and run the same command again"
        )


def _refuse_other_decoding(run_dir: AnyPath, scores: Mapping[str, Mapping], entry: Entry) -> None:
    """Raise UserError if translations of a run were decoded in another way than the settings of its cell say."""
    asked = entry.settings.get("decoding", {})
    for split, result in scores.items():
        own = {name: value for name, value in result.get("decoding", {}).items() if name != "max_tokens"}
        if changed := [name for name, value in own.items() if asked.get(name, value) != value]:
            raise UserError(f"{run_dir}: translations of {split} have another decoding.{changed[0]} than its settings; {HINT}")


def _is_chosen(change: str) -> bool:
    """Return whether `name: ASKED -> OWN` is of a setting that a run chooses, or a folder that it may name in another way."""
    name, _, values = change.partition(": ")
    asked, _, own = values.partition(" -> ")
    if name == "precision":
        return asked == "'auto'"
    return name in ("init", "model.pretrained.folder") and "None" not in (asked, own)


def _without_places(settings: Mapping) -> dict:
    """Return settings for a record. It names no folder of this machine: of a run or an encoder to start from, the last name."""
    kept = {name: value for name, value in settings.items() if name not in ("data", "frozen_states")}
    for name, section in _sections_of_places(kept).items():
        section[name] = name_elsewhere(section[name])
    return kept


def _with_places(recorded: Mapping, present: Mapping) -> dict:
    """Return recorded settings with the folders of the `present` settings of a cell, if their last names are the same."""
    found = {**recorded, "data": present["data"]}
    now = _sections_of_places({**present})
    for name, section in _sections_of_places(found).items():
        if name in now and name_elsewhere(section[name]) == name_elsewhere(now[name][name]):
            section[name] = now[name][name]
    return found


def _sections_of_places(settings: dict) -> dict[str, dict]:
    """Return the sections that name a folder to start from, by the name of the setting. Those in `settings` become copies."""
    found = {"init": settings} if settings.get("init") else {}
    if settings.get("model", {}).get("pretrained", {}).get("folder"):
        found["folder"] = {**settings["model"]["pretrained"]}
        settings["model"] = {**settings["model"], "pretrained": found["folder"]}
    return found


def read_records(folder: AnyPath) -> dict[str, Record]:
    """Read the records in a folder by the names of their cells, in order. Raises UserError for a file that is not a record."""
    paths = [path for path in folder.glob("*.json") if not path.name.startswith(TEMPORARY_PREFIX)]
    return {path.name.removesuffix(".json"): _read_record(path) for path in sorted(paths)}


def _read_record(path: AnyPath) -> Record:
    hint = "restore it, or remove it and run the same command again"
    record = read_json(path, hint, Record)
    if record["version"] > VERSION or f"{record['cell']}.json" != path.name:
        raise UserError(f"{path} is of a later version, or of another cell ({record['cell']!r}); {hint}")
    if wrong := _find_infinite(record):
        raise UserError(f"{path} is damaged: the score {wrong} is not finite; {hint}")
    if "parameters" not in record["facts"]:
        raise UserError(f"{path} is damaged: facts has no parameters; {hint}")
    of_split = [line for name, line in record["sentences"].items() if name != "pairs"]
    if len({len(line.split()) for line in of_split}) > 1:
        raise UserError(f"{path} is damaged: lines of sentences have different numbers of sentences; {hint}")
    return record


def _find_infinite(record: Record) -> str | None:
    """Return the name of a score that is not finite; None if all are."""
    scores = ((f"{name}.{key}", value) for name, entry in record["scores"].items() for key, value in entry.items())
    return next((name for name, value in scores if isinstance(value, float) and not math.isfinite(value)), None)


def show_numbers(values: Iterable[int]) -> str:
    """Write numbers as a line of `Record.sentences`."""
    return " ".join(map(str, values))


def read_numbers(record: Record, name: str, most: int = _MOST) -> np.ndarray:
    """Return the numbers [sentences] that `show_numbers` wrote. Raises UserError if they are missing, damaged or above `most`."""
    try:
        found = np.array([int(one) for one in record["sentences"][name].split()], dtype=np.int64)
    except (KeyError, ValueError, OverflowError):
        found = np.zeros(0, np.int64)
    if not len(found) or found.min() < 0 or found.max() > most:
        raise UserError(f"the record of {record['cell']} is damaged: sentences.{name} must be a line of counts; restore it")
    return found


def record_bytes(record: Record) -> bytes:
    """Return JSON with one line per key. Raises UserError for a score that is not finite, which a reader refuses."""
    json_bytes(record, Record)
    if wrong := _find_infinite(record):
        raise UserError(
            f"the score {wrong} of the cell {record['cell']} is not finite; remove its scores.json, then repeat the command"
        )
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in record.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _read_training(run_dir: AnyPath) -> Training:
    lines, sessions = read_metrics(run_dir), read_sessions(run_dir)
    trained = [session for session in sessions if session.workers] or sessions  # of lost workers, nothing is known
    if not lines or "elapsed" not in lines[-1]:
        raise UserError(f"{run_dir / 'metrics.jsonl'} is damaged: it has no complete line; {HINT}")
    meta = read_json(run_dir / "averaged" / META, HINT, needed=("step",))
    train = [line for line in lines if line["event"] == "train"]
    rates, memory = ([line[name] for line in train if name in line] for name in ("tokens_per_s", "memory_gib"))
    training = Training(
        updates=lines[-1]["step"],
        averaged_steps=meta.get("averaged_steps", [meta["step"]]),
        seconds=lines[-1]["elapsed"],
        tokens_per_s=statistics.median(rates) if rates else None,
        memory_gib=max(memory, default=None),
        software=_different(session.software for session in sessions),
        machines=_different(machine for session in trained for machine in session.machines()),
        packages=_different(packages for session in trained for packages in session.packages_at_work()),
    )
    if FIRST_UPDATE in meta:
        training["first_update"] = meta[FIRST_UPDATE]
    return training


def _different(values: Iterable[dict]) -> list[dict]:
    return list({json.dumps(value): value for value in values}.values())


def read_curve(run_dir: AnyPath) -> dict[str, dict[str, list[float | None]]]:
    """Return columns by event: lines at even distances over the training, with the first and the last, and the lowest nll."""
    curve, every = {}, read_metrics(run_dir)
    for event, names in (("train", ("step", "loss", "nll")), ("valid", ("step", "nll", "accuracy"))):
        lines = [line for line in every if line["event"] == event]
        last, points = len(lines) - 1, min(len(lines), CURVE_POINTS)
        places = {round(last * index / max(points - 1, 1)) for index in range(points)}
        if event == "valid":  # tables of studies have the lowest one of each cell
            known = [place for place, line in enumerate(lines) if _short(line.get("nll")) is not None]
            if known:
                places.add(min(known, key=lambda place: lines[place]["nll"]))
        lines = [lines[place] for place in sorted(places)]
        there = [name for name in names if lines and name in lines[0]]
        curve[event] = {name: [_short(line.get(name)) for line in lines] for name in there}
    return curve


def _short(value: float | None) -> float | None:
    return round(value, _DIGITS) if value is not None and math.isfinite(value) else None
