"""Mistakes in calls of the library, each as one sentence with the shapes."""

from torch import Tensor

from treenet.structure import TreeStructure
from treeproc.common.errors import UserError


def check_width(width: int, num_heads: int) -> None:
    """Raises UserError if heads cannot share a width: half of each head's is embeddings of heights, half of ranks."""
    if num_heads < 1 or width < 1 or width % (2 * num_heads):
        raise UserError(f"the width must be a multiple of 2 * num_heads = {2 * num_heads}, but is {width}")


def check_structure(structure: TreeStructure | None) -> TreeStructure:
    """The structure. Raises UserError if there is none."""
    if structure is None:
        raise UserError("the trees are missing: give structure=..., for example TreeStructure.from_brackets([...])")
    if not isinstance(structure, TreeStructure):
        raise UserError(f"structure must be a TreeStructure, but is a {type(structure).__name__}")
    return structure


def check_shape(name: str, states: Tensor, pad_mask: Tensor, width: int) -> None:
    """Raises UserError unless states are [B, positions of the mask, width], on the device of the mask."""
    wanted, found = [*pad_mask.shape, width], list(states.shape)
    if found != wanted:
        raise UserError(f"the states of the {name} must be {wanted}, but are {found}")
    if states.device != pad_mask.device:
        raise UserError(f"the {name} are on {states.device}, but the trees on {pad_mask.device}; call structure.to(...)")


def check_positions(states: Tensor, structure: TreeStructure, pad_mask: Tensor, width: int) -> None:
    """`check_shape` of leaves and nodes in one tensor; says where the nodes are missing."""
    leaves, nodes = structure.num_leaves, structure.num_nodes
    if list(states.shape) == [len(pad_mask), leaves, width]:
        raise UserError(
            f"the states {list(states.shape)} have no nodes: {leaves} leaves come first, then {nodes} nodes, for example "
            "torch.cat([leaves, structure.node_means(leaves)], 1)"
        )
    check_shape(f"{leaves} leaves and {nodes} nodes", states, pad_mask, width)
