"""Gumbel noise that is a function of keys, so a draw depends on nothing else.

The largest of `log p + noise` over the pieces is a draw from p (Gumbel, 1954). Unlike a walk along the cumulative
probabilities, the draw hardly ever changes with the last digits of p. Shapes: R rows, V pieces.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treenet.data.hashed_sampling import hash_ids
from treenet.layers.dropout import mix

_LOWEST, _HIGHEST = 2.0**-32, 1 - 2.0**-24  # of uniform numbers in float32


def draw_keys(seed: int, examples: Sequence[int], numbers: Sequence[int], step: int) -> Tensor:
    """Return keys [R, 2] int32, by the seed, the id of the example, the number of the sample, and the number of pieces so far."""
    keys = hash_ids(np.array([seed]))
    for part in (examples, numbers, [step]):
        keys = hash_ids(keys ^ hash_ids(np.asarray(part)))
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int32).reshape(-1, 2))


def gumbel_noise(keys: Tensor, pieces: Tensor) -> Tensor:
    """Return noise [R, V] float32 for `pieces` [V] or [R, V] by keys [R, 2]."""
    bits = mix(mix(mix(pieces.int()) ^ keys[:, :1]) ^ keys[:, 1:])
    # 31 bits, so that small numbers keep their digits.
    uniform = ((bits & 0x7FFFFFFF).float() * 2.0**-31 + _LOWEST).clamp_(max=_HIGHEST)
    return -(-torch.log1p(-uniform)).log()
