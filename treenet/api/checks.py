"""Mistakes in calls of the library, each as one sentence with the shapes."""

from os import PathLike

import torch
from torch import Tensor, nn

from treenet.structure import TreeStructure
from treenet.structure.base import refusing_device
from treeproc.common.arguments import as_integer, check_type
from treeproc.common.command_names import from_python
from treeproc.common.errors import UserError, quoted
from treeproc.common.settings import Settings, build_settings
from treeproc.common.storage import AnyPath, RemotePath, as_path


def check_width(width: int, num_heads: int) -> None:
    """Raise UserError if heads cannot share a width: half of each head's is embeddings of heights, half of ranks."""
    as_integer("num_heads", num_heads, least=1)
    if as_integer("embed_dim", width, 1, 2**31 - 1) % (2 * num_heads):
        raise UserError(f"the width must be a multiple of 2 * num_heads = {2 * num_heads}, but is {width}")


def check_config(name: str, config: Settings, wanted: type[Settings]) -> None:
    """Raise UserError unless `config` has checked values: a copy of pydantic's `model_copy` may have any."""
    check_type(name, config, wanted)
    with from_python():
        build_settings(wanted, config.model_dump(), name)


def place(module: nn.Module, device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
    """Move a new module to `device` and `dtype`, where given. Raises UserError for one that it cannot have."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"dtype must be a floating-point type of PyTorch, such as torch.bfloat16, but is {quoted(dtype)}")
    if device is not None:
        with refusing_device(device):
            module.to(device)
    module.to(dtype)


def given_path(name: str, path: AnyPath | str) -> AnyPath:
    """Return the path of a file or an object. Raises UserError for an empty path, and for other types."""
    if not isinstance(path, str | PathLike | RemotePath) or not str(path).strip():
        raise UserError(f"{name} must be the path of a folder, but is {quoted(path)}")
    return as_path(str(path))


def check_states(name: str, states: Tensor) -> None:
    """Raise UserError unless states are a floating-point tensor of three dimensions."""
    if not isinstance(states, Tensor):
        raise UserError(f"{name} must be a tensor, but is a {type(states).__name__}")
    if states.dim() != 3 or not states.is_floating_point():
        raise UserError(f"{name} must be floating-point numbers in three dimensions, but are {states.dtype} {list(states.shape)}")


def check_structure(structure: TreeStructure | None) -> TreeStructure:
    """Return the structure. Raises UserError if there is none."""
    if structure is None:
        raise UserError("the trees are missing: give structure=..., for example TreeStructure.from_brackets([...])")
    if not isinstance(structure, TreeStructure):
        raise UserError(f"structure must be a TreeStructure, but is a {type(structure).__name__}")
    return structure


def check_shape(name: str, states: Tensor, pad_mask: Tensor, width: int) -> None:
    """Raise UserError unless states are [B, positions of the mask, width], on the device of the mask."""
    check_states(f"the states of the {name}", states)
    wanted, found = [*pad_mask.shape, width], list(states.shape)
    if found != wanted:
        raise UserError(f"the states of the {name} must be {wanted}, but are {found}")
    if states.device != pad_mask.device:
        raise UserError(f"the {name} are on {states.device}, but the trees on {pad_mask.device}; call structure.to(...)")


def check_positions(states: Tensor, structure: TreeStructure, pad_mask: Tensor, width: int) -> None:
    """Check leaves and nodes in one tensor, as `check_shape` does. Tell if the nodes are missing."""
    leaves, nodes = structure.num_leaves, structure.num_nodes
    if list(states.shape) == [len(pad_mask), leaves, width]:
        raise UserError(
            f"the states {list(states.shape)} have no nodes: {leaves} leaves come first, then {nodes} nodes, for example "
            "torch.cat([leaves, structure.node_means(leaves)], 1)"
        )
    check_shape(f"{leaves} leaves and {nodes} nodes", states, pad_mask, width)
