"""The weights that a run starts from if `init` names another run, or if it has a pretrained encoder: RUN/initial, made once.

A parameter takes the value of the parameter of the same name and shape. Rows of pieces, labels, tags, relations and classes are
matched by their names, so the two vocabularies may have other orders and sizes. All else keeps the initial value of the
run's seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from treenet.config import TrainConfig, flatten
from treenet.models.pretrained import ENCODER, PretrainedLeaves, hash_encoder, load_pretrained, try_encoder
from treenet.models.pretrained_folder import FACTS as PRETRAINED
from treenet.models.pretrained_folder import encoder_folder
from treenet.runs.checkpoint import (
    AVERAGED,
    INITIAL,
    WEIGHTS,
    checkpoint_folders,
    checkpoint_step,
    find_fault_of_frozen,
    frozen_sha256,
    is_checkpoint_name,
    publish,
    read_meta,
    remove_checkpoint,
    stored_weights,
)
from treenet.runs.checkpoint_io import open_weights
from treenet.runs.identity import checkpoint_folder
from treenet.runs.loading import data_of
from treenet.runs.mirror import read_run
from treenet.runs.parameter_matching import (
    KINDS,
    Matches,
    Parameter,
    Vocabularies,
    describe_matches,
    match_parameters,
    model_parameters,
)
from treenet.runs.run_folder import InitFacts, checkpoint_names, checkpoint_path, read_facts, recorded_sha256
from treenet.tasks.base import Task, build_task
from treeproc.common.files import file_sha256
from treeproc.common.messages import phase, tell, warn
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath

_SHAPES = (*KINDS, "pairs", PRETRAINED)


@dataclass(frozen=True)
class _Source:
    """Complete weights of another run, in a local folder."""

    folder: Path
    parameters: dict[str, Parameter]  # by present names
    vocabularies: Vocabularies
    sha256: str


def start_from_init(config: TrainConfig, sizes: Mapping, run_dir: Path) -> dict[str, Any]:
    """Write RUN/initial if the run has no checkpoint, and print what was taken. Returns what run.json records of it.

    `sizes` are those of the model, with the fingerprint of its vocabulary. A run that continues reads nothing of the other run.
    It does so only if its checkpoints need the frozen weights in RUN/initial, and these are missing or damaged: then the same
    file is written again. Raises UserError if the other run cannot be read, if none of its weights fit, or if they are no longer
    the same.
    """
    needed, begun = None, checkpoint_folders(run_dir)
    if begun:
        frozen = [folder for folder in begun if frozen_sha256(read_meta(folder))]
        if not (frozen and find_fault_of_frozen(frozen[-1])):
            return {name: fact for name, fact in read_facts(run_dir).items() if name in ("init", INITIAL)}
        needed = frozen_sha256(read_meta(frozen[-1]))
        warn(f"warning: {run_dir / INITIAL} has the frozen weights of this run, and is missing or damaged; writing it again")
    else:
        remove_checkpoint(run_dir / INITIAL)
    if config.init is None:
        if config.model.pretrained.folder is not None:
            _publish_initial(config, sizes, _pretrained_weights(config, sizes), run_dir / INITIAL, needed)
            return {INITIAL: recorded_sha256(run_dir / INITIAL)}
        return {}
    meta = _write_initial(config, config.init, sizes, run_dir / INITIAL, needed)
    facts = meta["init"]
    lines = [describe_start(facts), *describe_matches(meta["matches"])]
    lines += [f"  other settings of the model: {', '.join(meta['changes'])}"] if meta["changes"] else []
    tell("\n".join(lines))
    return {"init": facts, INITIAL: recorded_sha256(run_dir / INITIAL)}


def _publish_initial(
    config: TrainConfig, sizes: Mapping, weights: dict[str, Tensor], folder: Path, needed: str | None, **more: object
) -> None:
    """Write RUN/initial, with `more` in its meta.json. Raises UserError if the file does not have the hash `needed`."""
    _check_states(config, sizes, weights)

    def write(path: Path) -> None:
        save_file(weights, path, {"format": "pt"})
        if needed not in (None, file_sha256(path)):
            raise UserError(
                f"{folder} has the frozen weights of this run, and is missing or damaged; what the run began with has other "
                "weights now. Copy the folder or the encoder back, or choose another --out"
            )

    shape = {name: value for name, value in sizes.items() if name in _SHAPES or name.endswith("fingerprint")}
    own = {"model": config.model.model_dump(mode="json"), "settings": config.lasting()}
    publish(folder, {WEIGHTS: write}, {**shape, **own, **more})


def describe_start(facts: InitFacts) -> str:
    """Describe the weights that a run started from, on one line."""
    counts = f"{facts['taken']} parameters taken, {facts['in_part']} in part, {facts['new']} new"
    return f"init: weights {facts['weights_sha256'][:8]} ({facts['checkpoint']} of a run of {facts['model']}): {counts}"


def keep_recorded_init(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """Return the settings with the path of `init` that the run has recorded, if a moved run has the same weights there."""
    if config.init is None or not checkpoint_folders(run_dir):
        return config
    recorded, facts = load_settings(TrainConfig, run_dir / "config.yaml").init, read_facts(run_dir).get("init")
    if recorded is None or facts is None or recorded == config.init:
        return config
    run, checkpoint = split_init(config.init)
    is_same = recorded_sha256(checkpoint_path(run, checkpoint)) == facts["weights_sha256"]
    return config.model_copy(update={"init": recorded}) if is_same else config


def split_init(init: AnyPath) -> tuple[AnyPath, str]:
    """Return run and checkpoint of `init`: the folder of a run, of its average, or of a checkpoint in RUN/checkpoints."""
    if init.name == AVERAGED:
        return init.parent, AVERAGED
    if is_checkpoint_name(init.name) and init.parent.name == "checkpoints":
        return init.parent.parent, str(checkpoint_step(init))
    return init, AVERAGED


def _write_initial(config: TrainConfig, init: AnyPath, sizes: Mapping, target: Path, needed: str | None) -> dict:
    """Write the folder `target`, with all weights of the new model. Returns what its meta.json has of the other run."""
    run, checkpoint = split_init(init)
    if missing := next((name for name in ("config.yaml", "run.json") if not (run / name).is_file()), None):
        raise UserError(f"init: {run} is not a run: {missing} is missing; give the --out folder of a training command")
    task = build_task(config)
    own = Vocabularies(config.data, sizes["vocab_fingerprint"], sizes)
    with read_run(run, *checkpoint_names(checkpoint)) as local:
        their_config = load_settings(TrainConfig, local / "config.yaml")
        source = _open_source(local, checkpoint_folder(local, checkpoint), build_task(their_config))
        _refuse_other_encoder(run, sizes, read_facts(local))
        matches = match_parameters(model_parameters(task, sizes), source.parameters, own, source.vocabularies)
        if not (matches.taken or matches.rows):
            raise UserError(f"init: no parameter of {run} fits this model: {describe_matches(matches.record())[0].strip()}")
        weights = _pretrained_weights(config, sizes)
        _copy_values(source, matches, weights)
    facts: InitFacts = {
        "checkpoint": source.folder.name,
        "weights_sha256": source.sha256,
        "vocab_fingerprint": source.vocabularies.fingerprint,
        "task": their_config.task,
        "model": their_config.model.name,
        "taken": len(matches.taken),
        "in_part": len(matches.in_part),
        "new": len(matches.new),
    }
    more = {"init": facts, "changes": _changed_settings(their_config, config), "matches": matches.record()}
    _publish_initial(config, sizes, weights, target, needed, **more)
    return more


def _refuse_other_encoder(run: AnyPath, own: Mapping, theirs: Mapping) -> None:
    """Raise UserError if both models have pretrained encoders, of two architectures or over two tables of pieces."""
    if PRETRAINED in own and PRETRAINED in theirs:
        there, here = (facts[PRETRAINED]["config"].get("model_type") for facts in (theirs, own))
        pieces = {facts["pieces_fingerprint"] for facts in (theirs, own) if "pieces_fingerprint" in facts}
        why = f"{there} instead of {here}" if there != here else "its pieces are others" if len(pieces) > 1 else ""
        if why:
            raise UserError(f"init: {run} has another pretrained encoder ({why}); leave init out")


def _pretrained_weights(config: TrainConfig, sizes: Mapping) -> dict[str, Tensor]:
    """Return the weights of the run's seed, and those of its pretrained encoder if it has one."""
    torch.manual_seed(config.seed)  # so that the other parameters are those of a run that starts from no weights
    model = build_task(config).build_model_that_fits(sizes)
    if (place := config.model.pretrained.folder) is not None:
        folder = encoder_folder(place)
        [leaves] = (module for module in model.modules() if isinstance(module, PretrainedLeaves))
        with phase("loading the pretrained encoder"):
            load_pretrained(leaves, folder)
            if config.frozen_states is None:  # else the command that made them has tried it
                try_encoder(leaves, folder)
    return stored_weights(model)


def _check_states(config: TrainConfig, sizes: Mapping, weights: Mapping[str, Tensor]) -> None:
    """Raise UserError if the files of states are of an encoder with other weights."""
    if config.frozen_states is None:
        return
    own = {name.removeprefix(ENCODER): value for name, value in weights.items() if name.startswith(ENCODER)}
    if hash_encoder(sizes[PRETRAINED]["config"], own) != sizes["states"]:
        given = "; init gives the encoder the weights of another run" if config.init is not None else ""
        raise UserError(
            f"frozen_states: {config.frozen_states} has the states of another encoder than this run begins with{given}; give "
            f"those of tree-attention frozen-states encoder={config.model.pretrained.folder}, or leave frozen_states out"
        )


def _changed_settings(before: TrainConfig, now: TrainConfig) -> list[str]:
    """Return the settings of the model that both architectures read and that differ. Some of them change no shape."""
    theirs, own = (flatten(config.model.model_dump(mode="json")) for config in (before, now))
    names = [name for name in own if name in theirs and name != "name" and theirs[name] != own[name]]
    return [f"{name}: {theirs[name]} -> {own[name]}" for name in names]


def _open_source(run: Path, folder: Path, task: Task) -> _Source:
    """Open complete weights. Raises UserError if the run does not record their sizes."""
    meta = read_meta(folder)
    facts = {**read_facts(run), **meta}
    sizes = {name: facts[name] for name in _SHAPES if name in facts}
    numbers = {name: size for name, size in sizes.items() if name in KINDS}
    if wrong := [name for name, size in numbers.items() if type(size) is not int or not 0 < size < 2**31]:
        raise UserError(f"init: {folder / 'meta.json'}: {wrong[0]} is damaged; choose another checkpoint")
    try:
        task.count_parameters(sizes)
        own, fingerprint = model_parameters(task, sizes), facts["vocab_fingerprint"]
    except KeyError as error:
        raise UserError(f"init: {run} does not record {error}; continue that run with its training command") from None
    try:
        with open_weights(folder / WEIGHTS) as stored:
            shapes = {name: weight.shape for name, weight in stored.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"init: cannot read {folder / WEIGHTS}: {error}") from None
    parameters = {name: Parameter(shape, own[name].place if name in own else None) for name, shape in shapes.items()}
    vocabularies = Vocabularies(data_of(run, task.config), fingerprint, sizes)
    return _Source(folder, parameters, vocabularies, meta["files"][WEIGHTS]["sha256"])


def _copy_values(source: _Source, matches: Matches, weights: Mapping[str, Tensor]) -> None:
    """Copy the matched values into `weights`, in place. Raises UserError if the file is replaced meanwhile."""
    with open_weights(source.folder / WEIGHTS) as stored:
        for name in set(matches.taken) - matches.rows.keys():
            weights[name].copy_(stored[name].read())
        for name, rows in matches.rows.items():
            values = stored[name].read().to(weights[name].dtype)
            weights[name].index_copy_(rows.dim, rows.own, values.index_select(rows.dim, rows.theirs))
    if recorded_sha256(source.folder) != source.sha256:
        raise UserError(f"init: {source.folder} changed while it was read; run the same command again")
