"""Trees in the samples of a `DataLoader`: each sample has a batch of one tree, and the batch has them all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data._utils.collate import default_collate_fn_map

from treenet.structure.maps import TreeStructure
from treeproc.common.errors import UserError, as_list, kind_of


class TreeCollator:
    """Collates samples that have trees: those by itself, and everything else by `collator`, for example one of Hugging Face.

    Samples are mappings. A value that is a `TreeStructure` is the tree of its sample. Raises UserError for samples of other
    kinds, for a sample with several trees, and for one without a tree if others have one.
    """

    def __init__(self, collator: Callable[[list[dict]], Mapping]):
        if not callable(collator):
            raise UserError(f"collator must be a function of a list of samples, but is {kind_of(collator)}")
        self.collator = collator

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one batch."""
        given = as_list("samples", samples, "dictionaries")
        for number, sample in enumerate(given):
            if not isinstance(sample, Mapping):
                raise UserError(f"samples[{number}] must be a dictionary, but is {kind_of(sample)}")
        names = list(dict.fromkeys(name for sample in given for name in sample if isinstance(sample[name], TreeStructure)))
        others = [{name: value for name, value in sample.items() if name not in names} for sample in given]
        batch = dict(self.collator(others))
        return batch | {name: collate_trees([sample.get(name) for sample in given]) for name in names}


def collate_trees(structures: Sequence[Any], **_: Any) -> TreeStructure:
    """Return the batch of the trees of samples. Raises UserError unless each has one."""
    for number, structure in enumerate(structures):
        if not isinstance(structure, TreeStructure) or len(structure) != 1:
            found = f"{len(structure)} trees" if isinstance(structure, TreeStructure) else kind_of(structure)
            raise UserError(f"each sample must have a TreeStructure of one tree, as trees[0] is, but sample {number} has {found}")
    return TreeStructure.cat(structures)


default_collate_fn_map[TreeStructure] = collate_trees  # for torch.utils.data.default_collate
