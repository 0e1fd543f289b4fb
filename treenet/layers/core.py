"""The core layers: linear maps and dropout.

Dropout is by key: the dropped units of an example depend on the example, not on its batch. So a step gives the same result with
any number of workers and any micro-batches, on CPUs and on GPUs. On CPUs it takes half the time of PyTorch's generator. On GPUs
it is one kernel, or a part of one in a compiled model. There every entry computes its own hash. So no mask is stored, and the
backward pass computes it again. The masks are those of CPUs, to the bit.

Shapes: B batch, S positions, D model.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.backend import CompiledOnGpu

if TYPE_CHECKING:
    Item = TypeVar("Item", bound=nn.Module)

    class Modules(nn.ModuleList, Generic[Item]):
        """A list of modules of one class."""

        def __init__(self, modules: Iterable[Item]): ...
        def __iter__(self) -> Iterator[Item]: ...
        def __getitem__(self, place: int) -> Item: ...  # type: ignore[override]  # no slices
else:
    Modules = nn.ModuleList

# The gain of queries, keys and values in torch.nn.MultiheadAttention and fairseq. If it is 1, a small model learns to read the
# source about a third later.
ATTENTION_GAIN = 2**-0.5


def build_linear(d_in: int, d_out: int, num_blocks: int = 1, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    """Build a linear layer of `num_blocks` fused maps d_in -> d_out. Each map is Xavier-uniform by itself; biases are 0.

    Initialising the fused matrix as one would make its maps depend on their number.
    """
    linear = nn.Linear(d_in, num_blocks * d_out, bias=bias)
    for block in linear.weight.chunk(num_blocks):
        nn.init.xavier_uniform_(block, gain)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class Scratch:
    """Memory for one result after the other. Each overwrites the last.

    The system clears new memory before it gives it away. For large logits, that takes half as long as to compute them.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return a tensor [rows, columns] of undefined values, with the type and device of `like`."""
        if self._memory is None or len(self._memory) < rows * columns:
            self._memory = like.new_empty(rows * columns)
        return self._memory[: rows * columns].view(rows, columns)


_ROWS_AT_ONCE = 2048  # of a table: MKL multiplies few rows by a long table a fifth faster in parts


def multiply_by_table(x: Tensor, table: Tensor, scratch: Scratch) -> Tensor:
    """Return the products [R, V] of x [R, D] and the rows of a table [V, D], in scratch memory. They have no gradient."""
    out = scratch.take(len(x), len(table), x)
    for rows, columns in zip(table.split(_ROWS_AT_ONCE), out.split(_ROWS_AT_ONCE, dim=1), strict=True):
        torch.mm(x, rows.t(), out=columns)
    return out


FIRST, SECOND = 0x45D9F3B, 0x2C1B3C6D  # odd multipliers of the hash
POSITION, CALL, NODES = 0x1E3779B1, 0x5851F42D, 0x40000000  # offsets of positions, calls and nodes in a key

_CALLS = 4096  # of a forward pass; no model has as many
_MOST = 2**16  # positions, and dimensions


def mix(x: Tensor) -> Tensor:
    """Return a hash of int32 with wrap-around."""
    for _ in range(2):
        x = (x ^ ((x >> 16) & 0xFFFF)) * FIRST
    return x ^ ((x >> 16) & 0xFFFF)


def call_offsets(device: torch.device) -> Tensor:
    """Return the offset of every call in a key [calls] int32. As Python numbers, each would need a separate compiled graph."""
    return torch.arange(_CALLS, dtype=torch.int32, device=device) * CALL


def numbers(device: torch.device) -> Tensor:
    """Return 0, 1, 2 and so on, int32, for `drop`."""
    return torch.arange(_MOST, dtype=torch.int32, device=device)


def drop(x: Tensor, keys: Tensor, offset: Tensor, counts: Tensor, threshold: int, num_leaves: int) -> Tensor:
    """Drop units of x [B, S, D] by keys [B] and the offset [] of the call, int32. `num_leaves` is -1 if there are only leaves.

    `counts` are the `numbers`, from memory. All values that wrap around must be int32. Triton kernels of PyTorch before 2.13
    compute products of `torch.arange` in int64, also where it is int32, and then drop about half of all units.
    """
    place, dimension = counts[: x.shape[1]], counts[: x.shape[2]]
    if num_leaves >= 0:  # in int64, and then cast, because the number may be a symbol
        index = place.long()
        place = torch.where(index < num_leaves, index, index - num_leaves + NODES).to(torch.int32)
    rows = mix(keys[:, None] + place * POSITION + offset)
    bits = rows[:, :, None] ^ mix((dimension >> 1) * POSITION)
    bits = bits * FIRST
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * SECOND
    half = torch.where(dimension & 1 == 1, bits, bits << 16) >> 16  # two dimensions share 32 bits; the shift keeps the sign
    return x * (half >= threshold - 2**15).to(x.dtype) * (2**16 / (2**16 - threshold))


_drop_on_gpu = CompiledOnGpu(drop)


class _KeyedDropout(torch.autograd.Function):
    """`drop` in one kernel on a GPU. It is linear, so its gradient is the same dropout. As a custom operator it takes longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, offset: Tensor, counts: Tensor, threshold: int, num_leaves: int) -> Tensor:
        ctx.save_for_backward(keys, offset, counts)
        ctx.threshold, ctx.num_leaves = threshold, num_leaves
        return _drop_on_gpu(x, keys, offset, counts, threshold, num_leaves)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _KeyedDropout.apply(grad, *ctx.saved_tensors, ctx.threshold, ctx.num_leaves), None, None, None, None, None


def keyed_dropout(x: Tensor, keys: Tensor, offset: Tensor, counts: Tensor, threshold: int, num_leaves: int) -> Tensor:
    """Apply `drop`, differentiably. In a compiled model it is plain operations, which fuse with their neighbours."""
    if torch.compiler.is_compiling():
        return drop(x, keys, offset, counts, threshold, num_leaves)
    return _KeyedDropout.apply(x, keys, offset, counts, threshold, num_leaves)


def keys_of(hashes: np.ndarray) -> Tensor:
    """Return keys [B] int32 from hashes uint64; 32 bits of each are used."""
    return torch.from_numpy(hashes.astype(np.uint32).view(np.int32))


def _in_kernel(device: torch.device) -> bool:
    """Return whether the kernel that drops also makes the masks."""
    return device.type != "cpu"


class DropoutKeys:
    """The keys of the examples of a batch, shared by all `Dropout` of a model."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.calls = 0
        self._offsets: Tensor | None = None
        self._counts: Tensor | None = None

    def set(self, keys: np.ndarray | Tensor) -> None:
        """Set the keys [B] of the next forward pass, as hashes or from `keys_of`. Its n-th dropout has the n-th mask."""
        self.keys, self.calls = keys if isinstance(keys, Tensor) else keys_of(keys), 0
        if _in_kernel(self.keys.device) and (self._offsets is None or self._offsets.device != self.keys.device):
            self._offsets, self._counts = call_offsets(self.keys.device), numbers(self.keys.device)

    def keep_mask(self, shape: torch.Size, threshold: int, num_leaves: int | None) -> Tensor:
        """Return [B, S, D] int16: 0 if a hash of key, call, position and dimension, 16 bits, is below `threshold`, else 1."""
        assert self.keys is not None  # `set` comes before a pass
        self.calls += 1
        positions = torch.arange(shape[1], dtype=torch.int32)
        if num_leaves is not None:  # the place of a node in its tree; it does not depend on the padding of the leaves
            positions[num_leaves:] += NODES - num_leaves
        rows = mix(self.keys[:, None] + positions * POSITION + self.calls * CALL)
        columns = mix(torch.arange((shape[2] + 1) // 2, dtype=torch.int32) * POSITION)
        # One multiplication and xor less than `mix`. These tensors have full size, with two dimensions per entry.
        bits = rows[:, :, None] ^ columns
        bits *= FIRST
        bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
        bits *= SECOND
        return bits.view(torch.int16)[..., : shape[2]].ge_(threshold - 2**15)  # a bool result would take six times as long

    def drop(self, x: Tensor, threshold: int, num_leaves: int | None) -> Tensor:
        """Drop units of x [B, S, D] on an accelerator with the mask of `keep_mask`, and scale up the rest."""
        assert self.keys is not None and self._offsets is not None and self._counts is not None
        self.calls += 1
        offset = self._offsets[self.calls % len(self._offsets)]
        return keyed_dropout(x, self.keys, offset, self._counts, threshold, -1 if num_leaves is None else num_leaves)


class Dropout(nn.Module):
    """`nn.Dropout`, with masks by key if the model has keys (see `share_dropout_keys`).

    Probabilities are then multiples of 1 / 65536, and less than 1. Dropout of attention weights is different: it is inside
    PyTorch's kernels, and draws from PyTorch's generator.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.shared: DropoutKeys | None = None

    def forward(self, x: Tensor, num_leaves: int | None = None) -> Tensor:
        """Apply dropout to x [B, S, D]. With `num_leaves`, positions from there on are nodes."""
        if not self.training or not self.p:
            return x
        if self.shared is None or self.shared.keys is None:
            return F.dropout(x, self.p)
        threshold = min(round(self.p * 2**16), 2**16 - 1)
        if _in_kernel(x.device):
            return self.shared.drop(x, threshold, num_leaves)
        keep = self.shared.keep_mask(x.shape, threshold, num_leaves).to(x.dtype)
        return x * keep * (2**16 / (2**16 - threshold))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class WordDropout(Dropout):
    """Dropout of whole positions, for the embeddings of pieces (Sennrich et al., 2016, WMT): all units of a position or none."""

    def forward(self, x: Tensor, num_leaves: int | None = None) -> Tensor:
        """Apply dropout to positions of x [B, S, D]."""
        if not self.training or not self.p:
            return x
        return x * super().forward(torch.ones(*x.shape[:2], 1, dtype=x.dtype, device=x.device), num_leaves)


def share_dropout_keys(model: nn.Module) -> DropoutKeys:
    """Make all `Dropout` of a model read common keys, and return these."""
    shared = DropoutKeys()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.shared = shared
    return shared
