"""Dropout by key: the dropped units of an example depend on the example, not on its batch.

So a step computes the same with any number of workers and any micro-batches, on CPUs and on GPUs. On CPUs it takes half the
time of PyTorch's generator; on GPUs it is one kernel, or a part of one in a compiled model. Shapes: B batch, S positions,
D model.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.keyed_dropout import CALL, FIRST, NODES, POSITION, SECOND, call_offsets, keyed_dropout, mix


def keys_of(hashes: np.ndarray) -> Tensor:
    """Keys [B] int32 of hashes uint64, of which 32 bits are used."""
    return torch.from_numpy(hashes.astype(np.uint32).view(np.int32))


def _in_kernel(device: torch.device) -> bool:
    """Whether masks are made in the kernel that drops."""
    return device.type != "cpu"


class DropoutKeys:
    """The keys of the examples of a batch, shared by all `Dropout` of a model."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.calls = 0
        self._offsets: Tensor | None = None

    def set(self, keys: np.ndarray | Tensor) -> None:
        """Keys [B] of the next forward pass, as hashes or of `keys_of`; its n-th dropout has the n-th mask."""
        self.keys, self.calls = keys if isinstance(keys, Tensor) else keys_of(keys), 0
        if _in_kernel(self.keys.device) and (self._offsets is None or self._offsets.device != self.keys.device):
            self._offsets = call_offsets(self.keys.device)

    def keep_mask(self, shape: torch.Size, threshold: int, num_leaves: int | None) -> Tensor:
        """[B, S, D] int16: 1 where a hash of key, call, position and dimension, 16 bits, is not below `threshold`, else 0."""
        self.calls += 1
        positions = torch.arange(shape[1], dtype=torch.int32)
        if num_leaves is not None:  # the place of a node in its tree, however many leaves the batch is padded to
            positions[num_leaves:] += NODES - num_leaves
        rows = mix(self.keys[:, None] + positions * POSITION + self.calls * CALL)
        columns = mix(torch.arange((shape[2] + 1) // 2, dtype=torch.int32) * POSITION)
        # One multiplication and xor less than `mix`: these are the tensors of full size, of two dimensions an entry.
        bits = rows[:, :, None] ^ columns
        bits *= FIRST
        bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
        bits *= SECOND
        return bits.view(torch.int16)[..., : shape[2]].ge_(threshold - 2**15)  # a bool result would take six times as long

    def drop(self, x: Tensor, threshold: int, num_leaves: int | None) -> Tensor:
        """x [B, S, D] on an accelerator, with the mask of `keep_mask` and the rest scaled up."""
        assert self.keys is not None and self._offsets is not None
        self.calls += 1
        offset = self._offsets[self.calls % len(self._offsets)]
        return keyed_dropout(x, self.keys, offset, threshold, -1 if num_leaves is None else num_leaves)


class Dropout(nn.Module):
    """`nn.Dropout`, with masks by key when the model was given keys (see `share_dropout_keys`).

    Probabilities are multiples of 1 / 65536 then. Dropout of attention weights is not of this kind: it is inside PyTorch's
    kernels, and draws from PyTorch's generator.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.shared: DropoutKeys | None = None

    def forward(self, x: Tensor, num_leaves: int | None = None) -> Tensor:
        """x [B, S, D]; with `num_leaves`, positions from there on are nodes."""
        if not self.training or not self.p:
            return x
        if self.shared is None or self.shared.keys is None:
            return F.dropout(x, self.p)
        threshold = round(self.p * 2**16)
        if _in_kernel(x.device):
            return self.shared.drop(x, threshold, num_leaves)
        keep = self.shared.keep_mask(x.shape, threshold, num_leaves).to(x.dtype)
        return x * keep * (2**16 / (2**16 - threshold))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def share_dropout_keys(model: nn.Module) -> DropoutKeys:
    """Keys that all `Dropout` of a model read from now on."""
    shared = DropoutKeys()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.shared = shared
    return shared
