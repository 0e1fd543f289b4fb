"""Loads a checkpoint into a model and its optimiser. The weights may be in parts. Nothing that is loaded executes."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from treenet.runs.checkpoint import AVERAGE, META, TRAINER, WEIGHTS
from treenet.runs.old_checkpoints import is_old, rename_weights, reorder_optimizer
from treenet.runs.sharded_tensors import copy_complete, in_parts_like, is_sharded
from treeproc.common.files import check_archive, read_json
from treeproc.common.settings import UserError


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data_fingerprint: str,
    average: dict[str, Tensor] | None = None,
) -> dict:
    """Load weights, optimiser and moving average in place, and return `state`.

    Raises UserError if the checkpoint is of another run.
    """
    trained_on = read_json(folder / META).get("data_fingerprint")
    if trained_on != data_fingerprint:
        raise UserError(f"{folder} is of data {trained_on}, but this run is on data {data_fingerprint}; choose another --out")
    was_old = load_weights(model, folder)
    device = next(model.parameters()).device
    check_archive(folder / TRAINER, "remove the folder and run the same command again")
    in_parts = any(map(is_sharded, model.parameters()))  # then one device may be too small for the complete state
    trainer = torch.load(folder / TRAINER, map_location="cpu" if in_parts else device, weights_only=True)
    moments = reorder_optimizer(trainer["optimizer"], model) if was_old else trainer["optimizer"]
    if in_parts:
        _cut_moments(moments["state"], optimizer)
    optimizer.load_state_dict(moments)
    if average is not None:
        for name, value in rename_weights(load_file(folder / AVERAGE)).items():
            copy_complete(value, average[name])
    return trainer["state"]


def _cut_moments(state: dict, optimizer: torch.optim.Optimizer) -> None:
    """Cut the optimiser's state, by the number of a parameter, into parts as the parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.items():
        like = parameters[number]
        state[number] = {name: in_parts_like(v, like) if v.shape == like.shape else v for name, v in values.items()}


def load_weights(model: nn.Module, folder: Path) -> bool:
    """Load model.safetensors of a checkpoint or of RUN/averaged. Returns whether its names were those of an old checkpoint.

    Raises UserError if it is missing or does not fit.
    """
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            was_old = is_old(dict.fromkeys(file.keys()))
        if was_old or any(map(is_sharded, model.parameters())):
            _load_by_name(model, folder)
        else:
            load_model(model, folder / WEIGHTS)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"cannot load {folder / WEIGHTS}: {' '.join(str(error).split())[:300]}") from None
    return was_old


def _load_by_name(model: nn.Module, folder: Path) -> None:
    """Load weights by the names of parameters, also old names, into a model whose weights may be in parts."""
    weights, parameters = rename_weights(load_file(folder / WEIGHTS)), dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        raise RuntimeError(f"its parameters and the model's differ: {', '.join(sorted(weights.keys() ^ parameters.keys()))}")
    for name, value in weights.items():
        if value.shape != parameters[name].shape:
            raise RuntimeError(f"{name} has the shape {list(value.shape)}, but in the model {list(parameters[name].shape)}")
        copy_complete(value, parameters[name])
