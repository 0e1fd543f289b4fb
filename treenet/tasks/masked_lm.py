"""Masked language models: encoders that predict hidden pieces.

They predict max(1, round(rate * n)) of the n pieces of a text. This number depends only on the length, so the targets of a batch
can be counted without reading it. The choice of pieces and their replacements follow only from (seed, step, example, position).
They do not depend on batch-mates, workers or resume. Shapes: B batch, L leaves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import nn

from treenet.config import MaskedLMConfig
from treenet.data.batch import SourceBatch
from treenet.data.examples import ExampleSource, SourceSide
from treenet.data.input_kinds import InputKind
from treenet.models import build_masked_lm, find_encoder
from treenet.tasks.base import Task, vocab_sizes
from treeproc.common.storage import AnyPath
from treeproc.shards.rows import hash_ids
from treeproc.shards.schema import EOS_ID, PAD_ID
from treeproc.shards.store import read_index

# Validations of all steps, and of runs with the same settings and vocabulary, predict the same pieces.
_VALIDATION_SEED = 0


@dataclass
class MaskedBatch(SourceBatch):
    """A padded batch whose targets [B, L] are pieces of its leaves. Other places have PAD_ID."""


class MaskedSource(SourceSide):
    """One split. It uses only the leaves, and the other inputs that a model reads with them."""

    def __init__(self, folder: AnyPath, split: str, reads: InputKind, rate: float):
        super().__init__(folder, split, reads)
        self._rate = rate

    def batch(self, rows: Sequence[int] | np.ndarray) -> MaskedBatch:
        """Return the rows as one padded batch, without targets: `mask_pieces` chooses them."""
        batch = super().batch(rows)
        none = torch.full_like(batch.leaf_pieces, PAD_ID)
        return MaskedBatch(**{**vars(batch), "tgt_in": none, "tgt_out": none})

    def count_targets(self, leaves: np.ndarray, tgt_pieces: np.ndarray) -> np.ndarray:
        """Return the number of pieces to predict of each example [n]."""
        return count_masked(leaves, self._rate)


def count_masked(lengths: np.ndarray, rate: float) -> np.ndarray:
    """Return the number of predicted pieces in texts of these lengths [n]."""
    return np.where(lengths > 0, np.maximum(1, np.floor(rate * lengths + 0.5)), 0).astype(np.int64)


def mask_pieces(batch: MaskedBatch, config: MaskedLMConfig, mask_id: int, seed: int) -> MaskedBatch:
    """Return the batch, on a CPU, with targets and with masked leaves; `mask_id` is one past the last piece.

    The share `config.mask` of the predicted pieces is masked, and the share `config.random` becomes any normal piece. The rest
    stays.
    """
    pieces, padding = batch.leaf_pieces.numpy(), batch.leaf_pad_mask.numpy()
    examples = hash_ids(batch.example_ids.numpy() + (seed << 31))[:, None]
    drawn = hash_ids(examples + np.arange(pieces.shape[1], dtype=np.uint64))
    # The predicted pieces are those with the lowest hashes; padding has the highest.
    rank = np.where(padding, np.iinfo(np.uint64).max, drawn).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    chosen = rank < count_masked((~padding).sum(axis=1), config.rate)[:, None]
    high, low = np.divmod(hash_ids(drawn), np.uint64(2**32))
    share, specials = high / 2**32, EOS_ID + 1
    other = specials + (low * np.uint64(mask_id - specials) >> np.uint64(32)).astype(np.int64)
    seen = np.where(share < config.mask, mask_id, np.where(share < config.mask + config.random, other, pieces))
    return replace(
        batch,
        leaf_pieces=torch.from_numpy(np.where(chosen, seen, pieces)),
        tgt_out=torch.from_numpy(np.where(chosen, pieces, PAD_ID)),
    )


class MaskedLanguageModel(Task[MaskedBatch]):
    """Encoders that predict masked pieces of the leaves, of data sets with targets or without."""

    use = "masked_lm"
    targets = "masked pieces"
    scorer = "score-lm"

    def check(self, index: Mapping) -> None:
        """Check the name of the model. Any data set has leaves."""
        find_encoder(self.config.model, self.use)

    def open(self, split: str, *, training: bool = False, device: torch.device | str = "cpu") -> ExampleSource:
        return MaskedSource(self.config.data / "encoded", split, self.reads.for_device(device), self.config.masked_lm.rate)

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_masked_lm(self.config.model, vocab_sizes(sizes))

    def next_commands(self) -> list[tuple[str, str, str]]:
        finds_trees = self.config.model.name == "constituent_transformer"
        return [*super().next_commands(), *(("parse", "unsupervised-parse", one) for one in self.scored_split() * finds_trees)]

    @cached_property
    def _num_pieces(self) -> int:
        return read_index(self.config.data / "encoded")["num_pieces"]

    def choose_targets(self, batch: MaskedBatch, seed: int | None) -> MaskedBatch:
        return mask_pieces(batch, self.config.masked_lm, self._num_pieces, _VALIDATION_SEED if seed is None else seed)
