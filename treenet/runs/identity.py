"""Which weights belong to a run: those of its settings, data and vocabulary, in an unbroken chain of checkpoints.

The settings are those that a continued run must keep. A checkpoint names its ancestors: the checkpoints beside it that it
continues, with the hashes of their weights. An average names those that it is the mean of. So a checkpoint of another run is
found, and all that continues it. This reads meta.json alone, and no weights.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from treenet.config import TrainConfig
from treenet.models.pretrained_folder import FACTS as PRETRAINED
from treenet.models.pretrained_folder import OF_THE_FILE
from treenet.runs.checkpoint import (
    ANCESTORS,
    AVERAGED,
    INITIAL,
    WEIGHTS,
    check_frozen,
    checkpoint_folders,
    checkpoint_step,
    find_fault,
    folder_name,
    read_meta,
)
from treenet.runs.metrics_log import read_metrics
from treenet.runs.run_folder import EXPORT_FACTS, FACTS, checkpoint_path, choose_remedy, hash_in, read_facts
from treeproc.common.errors import one_line
from treeproc.common.folder_kinds import CONFIG
from treeproc.common.hub import are_other_models
from treeproc.common.setting_facts import default_values
from treeproc.common.settings import UserError, differences, load_settings
from treeproc.common.storage import AnyPath

_SIZES = ("vocab_fingerprint", "num_pieces", "num_labels", "num_pos_tags", "num_deprels", "num_classes", "pairs")
# What shapes the function that a model computes. Weights that a user names by a path may differ in all else, also in how they
# were drawn.
_OF_THE_MODEL = ("task:", "model.", "classifier.", "config.json", *(f"{name}:" for name in _SIZES))
_DRAWN = "model.paired_weights:"

_MOST_NAMED = 10
_DIGITS = 16  # of a hash, as fingerprints have


def checkpoint_folder(run: Path, checkpoint: str) -> Path:
    """Return the folder `checkpoint_path`. Raises UserError if it has no complete checkpoint, or one of another run."""
    folder = checkpoint_path(run, checkpoint)
    if read_meta(folder):
        check_weights(run, folder)
    if (fault := find_fault(folder)) is None:
        return folder
    check_frozen(folder)
    if (folder / WEIGHTS).is_file():
        remedy = choose_remedy(
            run,
            f"run tree-attention average-checkpoints --out {run}, or choose another checkpoint",
            "run tree-attention average-checkpoints on the run that was zipped, and zip it again",
        )
        raise UserError(f"{folder} is damaged ({fault}); {remedy}")
    if (run / EXPORT_FACTS).is_file() and folder.is_relative_to(run):
        raise UserError(f"{folder / WEIGHTS} is missing: an exported run has one checkpoint, {AVERAGED}; give the run itself")
    steps = ", ".join(str(checkpoint_step(path)) for path in checkpoint_folders(run)) or "none"
    raise UserError(f"{folder / WEIGHTS} is missing; train to the end, or choose a step as checkpoint (there are: {steps})")


def identity(config: TrainConfig, facts: Mapping) -> dict[str, Any]:
    """Return what all weights of a run share: the facts of its run.json, and its lasting settings."""
    return {**facts, "settings": config.lasting()}


def list_changes(own: Mapping, other: Mapping) -> list[str]:
    """Return the lines `name: OWN -> OTHER` of all that differs between the identities of two runs.

    A setting that is absent has its default. Another fact that is absent is unknown, and so the same. The folder of a pretrained
    encoder may move; its config.json and its commit on the hub may not change.
    """
    lines, encoders = [], [encoder for one in (own, other) if (encoder := _encoder_of(one))]
    ours, theirs = own.get("settings"), other.get("settings")
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        defaults = default_values(TrainConfig)  # a record leaves later settings out at theirs
        for key in {**ours, **theirs}:
            before, now = (one.get(key, defaults.get(key)) for one in (ours, theirs))
            may_move = key == "model.pretrained.folder" and len(encoders) == 2 and not are_other_models(before, now)
            if before != now and not may_move:
                lines.append(f"{key}: {before!r} -> {now!r}")
        patterns = ([key for key in one if key.startswith("lr_scale.")] for one in (ours, theirs))
        if not lines and len({tuple(one) for one in patterns}) == 2:
            lines.append("lr_scale: another order of the same patterns")  # of which the first that matches counts
    if len(encoders) == 2:
        lines += differences(encoders[0], encoders[1], "config.json of model.pretrained.folder")
    facts = {"data_fingerprint": "data fingerprint", **{name: name for name in (*_SIZES, INITIAL)}}
    common = [name for name in facts if name in own and name in other]
    changed = [name for name in common if own[name] != other[name]]
    return lines + [f"{facts[name]}: {str(own[name])[:_DIGITS]} -> {str(other[name])[:_DIGITS]}" for name in changed]


def _encoder_of(facts: Mapping) -> dict[str, Any]:
    """Return config.json of the pretrained encoder of a run, without what only its file says; empty if there is none."""
    config = facts[PRETRAINED].get("config") if isinstance(facts.get(PRETRAINED), Mapping) else None
    return {name: one for name, one in config.items() if name not in OF_THE_FILE} if isinstance(config, Mapping) else {}


def check_weights(run: Path, *folders: Path, own: Mapping | None = None, name: AnyPath | None = None) -> None:
    """Raise UserError if a folder of weights is not of the run, or continues a checkpoint that is not.

    The message names all checkpoints to remove. `own` is the identity of the run, if not that in its folder; `name` is its name
    in the message. Another folder, which a user gave by its path, needs the same model and vocabulary alone. So does a copy of a
    checkpoint inside the run: the run may have trained again since then.
    """
    own, name = own or identity(load_settings(TrainConfig, run / CONFIG), read_facts(run)), name or run
    beside = [*checkpoint_folders(run), run / AVERAGED]
    known = {folder.resolve(): folder for folder in (*beside, run / INITIAL)}
    asked = []
    for folder in folders:
        if own_folder := known.get(folder.resolve()):
            asked.append(own_folder)
            continue
        changes = [line for line in list_changes(own, read_meta(folder)) if line.startswith(_OF_THE_MODEL)]
        if changes := [line for line in changes if not line.startswith(_DRAWN)]:
            raise UserError(
                f"{folder} has weights of another model or vocabulary ({_shorten(changes)}); give a checkpoint of {name}, "
                "or the run that it is of"
            )
    metas = {folder: meta for folder in dict.fromkeys((*beside, *asked)) if (meta := _read(folder))}
    others: dict[Path, list[str]] = {}  # those of another run: what differs, or nothing where one continues another
    for folder, meta in metas.items():  # by ascending step, and then the average
        changes = list_changes(own, meta)
        if changes or any(_is_made_of(meta, other, metas[other]) for other in others):
            others[folder] = changes
    if not others.keys().isdisjoint(asked):
        raise UserError(_describe(run, others, name, all_are=len(others) == len(metas)))
    _check_chain({folder: meta for folder, meta in metas.items() if folder not in others}, asked, name)


def find_other_metrics(run: AnyPath, metrics: Iterable[Mapping]) -> int | None:
    """Return the first update at which the loss on valid is another one in the metrics than in a checkpoint of the run."""
    logged = {line["step"]: line.get("nll") for line in metrics if line["event"] == "valid"}
    for folder in checkpoint_folders(run):
        meta = read_meta(folder)
        nll, step = meta.get("valid_nll"), meta.get("step")
        # Beside a damaged checkpoint, the log may be that of a run that has continued before it.
        if nll is not None and logged.get(step, nll) != nll and not (isinstance(folder, Path) and find_fault(folder)):
            return step
    return None


def check_metrics(run: AnyPath, hint: str, name: AnyPath | None = None) -> None:
    """Raise UserError with `hint` if metrics.jsonl is that of another run. `name` is the name of the run in the message."""
    if (step := find_other_metrics(run, read_metrics(run))) is not None:
        said = f"is of another run: its loss on valid at update {step:,} is not that of the checkpoint"
        raise UserError(f"{(name or run) / 'metrics.jsonl'} {said}; {hint}")


def _read(folder: Path) -> dict:
    """Read meta.json. That of RUN/initial gets the hash of its weights, which run.json has too."""
    meta = read_meta(folder)
    return meta | {INITIAL: hash_in(meta, WEIGHTS)} if meta and folder.name == INITIAL else meta


def _ancestors(meta: Mapping) -> dict[str, tuple[str, str]]:
    """Return name and hash of a file of weights by the checkpoint that has it, for all that a folder was made of."""
    try:
        if "averaged_steps" in meta:
            pairs = zip(meta["averaged_steps"], meta["averaged_files"], strict=True)
            return {folder_name(step): (file["name"], file["sha256"]) for step, file in pairs}
        return {name: (WEIGHTS, sha256) for name, sha256 in meta[ANCESTORS].items()}
    except (KeyError, TypeError, ValueError, AttributeError):  # damaged
        return {}


def _is_made_of(meta: Mapping, other: Path, of_other: Mapping) -> bool:
    """Return whether the folder with `meta` was made of a checkpoint."""
    file, sha256 = _ancestors(meta).get(other.name, (WEIGHTS, ""))
    return hash_in(of_other, file) == sha256


def _describe(run: Path, others: Mapping[Path, list[str]], name: AnyPath, *, all_are: bool) -> str:
    """Describe weights of another run, with the remedy. If all are, the settings of the run may have been changed instead."""
    first = next(folder for folder, changes in others.items() if changes)
    place = name / first.relative_to(run).as_posix() if first.is_relative_to(run) else first
    found = f"{place} has weights of another run ({_shorten(others[first])})"
    if first.name == INITIAL:
        own = zipped = "copy that folder from a copy of the run"
    else:
        instead = f"restore {CONFIG} and {FACTS} if they were changed, or " if all_are else ""
        own = f"{instead}remove {_join(others)} from the run, then repeat its training command"
        zipped = f"remove {_join(others)} from the run that was zipped, repeat its training command, and zip it again"
    return f"{found}; {choose_remedy(run, own, zipped)}"


def _check_chain(metas: Mapping[Path, Mapping], asked: Collection[Path], name: AnyPath) -> None:
    """Raise UserError if a folder of `asked` was made of another checkpoint than the one beside it, or is that checkpoint.

    All have the settings of the run. A damaged checkpoint does not count, because training may have replaced those before it.
    """
    places = {folder.name: folder for folder in metas}
    for later, meta in metas.items():
        for ancestor in places.keys() & _ancestors(meta).keys():
            earlier = places[ancestor]
            ends = [later, *([earlier] if later.name != AVERAGED else ())]  # training replaces an average
            if _is_made_of(meta, earlier, metas[earlier]) or not set(asked) & set(ends) or any(map(find_fault, (later, earlier))):
                continue
            sides = [[one for one in metas if one == end or _are_linked(metas, one, end)] for end in ends]
            ways = " or else ".join(map(_join, sides if len(sides) > 1 else [ends]))
            raise UserError(
                f"{name}: {later.name} was made of another {earlier.name} than the one beside it, so they are of two trainings; "
                f"remove {ways}, then repeat the training command"
            )


def _are_linked(metas: Mapping[Path, Mapping], one: Path, other: Path) -> bool:
    return _is_made_of(metas[one], other, metas[other]) or _is_made_of(metas[other], one, metas[one])


def _join(folders: Iterable[Path]) -> str:
    """Return the names of folders as words of a sentence. A message has no room for more than ten."""
    *most, last = (folder.name for folder in folders)
    if len(most) >= _MOST_NAMED:
        return f"all {len(most) + 1} folders from {most[0]} to {last}"
    return f"{', '.join(most)} and {last}" if most else last


def _shorten(changes: list[str]) -> str:
    return one_line("; ".join(changes[:5]), 120) + (" and more" if len(changes) > 5 else "")
