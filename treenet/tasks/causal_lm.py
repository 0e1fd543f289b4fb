"""Causal language models: each piece of the source side from the pieces before it, or each action of its tree.

The losses of all models are per piece and end of sentence, so they can be compared. A grammar predicts pieces and their tree
together. Its loss is -log p(sentence, tree), which is an upper bound of -log p(sentence).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from treenet.config import TrainConfig
from treenet.data.batch import TreeBatch, collate_rows
from treenet.data.examples import SourceSide
from treenet.data.input_kinds import InputKind
from treenet.models import VocabSizes, build_causal_lm
from treenet.structure import Actions
from treenet.tasks.base import Task, check_structure, vocab_sizes
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import PAD_ID
from treeproc.shards.store import read_index


@dataclass
class CausalBatch(TreeBatch):
    """A padded batch whose model reads `tgt_in`: the pieces of the leaves, or actions. `tgt_out` is what follows each of them."""

    def pad_masks(self) -> list[Tensor]:
        return [self.tgt_in == PAD_ID]


def to_causal(batch: TreeBatch, sizes: VocabSizes) -> CausalBatch:
    """Return a batch, still on the CPU, whose targets are its leaves: for models of actions, the actions of its trees."""
    if isinstance(batch.structure, Actions):
        ids, following = (make(sizes.pieces, sizes.labels) for make in (batch.structure.ids, batch.structure.next_ids))
        batch = replace(batch, tgt_in=ids, tgt_out=following)
    return CausalBatch(**vars(batch))


class CausalSource(SourceSide):
    """One split. The model reads its leaves, and its trees if the model is made for them."""

    def __init__(self, folder: AnyPath, split: str, reads: InputKind, sizes: VocabSizes):
        super().__init__(folder, split, reads)
        self._sizes = sizes

    def batch(self, rows: Sequence[int] | np.ndarray) -> CausalBatch:
        """Return the rows as one padded batch."""
        lists = self.row_lists(rows)
        lists.targets = lists.pieces
        return to_causal(collate_rows(lists, self.reads), self._sizes)

    def count_targets(self, leaves: np.ndarray, tgt_pieces: np.ndarray) -> np.ndarray:
        """Return the number of pieces with EOS of each example [n]. The loss of actions is divided by it too."""
        return leaves + 1


class CausalLanguageModel(Task):
    """Plain, regularised and grammatical language models, of data sets with targets or without."""

    use = "causal_lm"
    targets = "pieces"
    scorer = "score-lm"

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        if config.model.name == "causal_transformer" and config.model.tree_reg.weight:
            self.auxiliary_loss, self.num_sums = "tree_reg", 3

    def check(self, index: Mapping) -> None:
        check_structure(self.config, index, self.encoder)

    def open(self, split: str, *, training: bool = False, device: torch.device | str = "cpu") -> CausalSource:
        encoded = self.config.data / "encoded"
        return CausalSource(encoded, split, self.reads.for_device(device), vocab_sizes(self.sizes(read_index(encoded))))

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_causal_lm(self.config.model, vocab_sizes(sizes))
