"""Words of sentences in the order of PyTorch's packed sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence


@dataclass(frozen=True)
class Packing:
    """The positions of words in a packed sequence, ordered by step. A step has one word of each sentence that is long enough.

    Sentences are sorted by length, longest first. Shapes: B sentences, L words of the longest, N words in all.
    """

    sizes: np.ndarray  # [B] words
    batch_sizes: np.ndarray  # [L] number of sentences that have a step
    before: np.ndarray  # [L] number of words before a step
    taken: np.ndarray  # [N] index in the concatenated sentences of the word at a packed place
    sentence: np.ndarray  # [N] sentence of a packed place
    step: np.ndarray  # [N] index of its word in the sentence

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Packing":
        lengths = np.array(sizes)
        begins = np.cumsum(lengths) - lengths
        batch_sizes = (lengths[None] > np.arange(lengths[0])[:, None]).sum(1)
        taken = np.concatenate([begins[:n] + step for step, n in enumerate(batch_sizes.tolist())])
        sentence = np.concatenate([np.arange(n) for n in batch_sizes.tolist()])
        step = np.repeat(np.arange(len(batch_sizes)), batch_sizes)
        return cls(lengths, batch_sizes, np.cumsum(batch_sizes) - batch_sizes, taken, sentence, step)

    def pad(self, data: Tensor) -> Tensor:
        """Pad [N, ...] to [B, L, ...]."""
        return pad_packed_sequence(PackedSequence(data, torch.from_numpy(self.batch_sizes)), batch_first=True)[0]
