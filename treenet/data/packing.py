"""Batches as one buffer of bytes: for shared memory between processes, and for one copy to a device, without a wait.

A buffer has two parts. The first holds, as int32, the int64 tensors whose values fit: they are widened all at once. The second
holds all other tensors as they are. Every tensor begins at a multiple of ALIGNMENT bytes, because kernels on GPUs need it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from treenet.structure.base import map_parts, tensors_of

ALIGNMENT = 64
# No tensor begins at a smaller place of its memory: torch.compile takes an offset that happens to be a size for that size, and
# makes one more graph for the next batch.
FIRST_OFFSET = 8192
_INT32 = np.iinfo(np.int32)

Value = TypeVar("Value")


class _Place(NamedTuple):
    """Where a tensor is: its first byte in the buffer, or where it is `narrow`, its first item in the widened part."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    narrow: bool


@dataclass(frozen=True)
class Layout(Generic[Value]):
    """What a buffer holds: small, without tensors, and so cheap to send."""

    value: Any  # what was packed, with the place of every tensor instead of it
    num_bytes: int  # of the buffer
    num_narrow: int  # int32 items of the first part


@dataclass(frozen=True)
class Packed(Generic[Value]):
    """A value whose tensors are in one buffer [bytes] uint8."""

    buffer: Tensor
    layout: Layout[Value]

    def unpack(self) -> Value:
        """Return the value on the device of the buffer. Its int64 tensors may be copies; others are in the buffer's memory."""
        layout, buffer = self.layout, self.buffer
        wide = torch.empty(FIRST_OFFSET + layout.num_narrow, dtype=torch.int64, device=buffer.device)
        wide[FIRST_OFFSET:] = buffer[: 4 * layout.num_narrow].view(torch.int32)

        def tensor(place: Any) -> Tensor:
            assert isinstance(place, _Place)
            source, start = (
                (wide, FIRST_OFFSET + place.start) if place.narrow else (buffer, buffer.storage_offset() + place.start)
            )
            start //= 1 if place.narrow else place.dtype.itemsize
            # Not a view, or torch.compile would also look at what it is a view of.
            out = torch.empty(0, dtype=place.dtype, device=source.device)
            return out.set_(source.untyped_storage(), start, place.shape)  # type: ignore[call-overload]  # rows without gaps

        return map_parts(layout.value, _Place, tensor)


def pack(value: Value, allocate: Callable[[int], Tensor] | None = None) -> Packed[Value]:
    """Pack a value of dataclasses, lists and tuples, with tensors on the CPU and anything else in them.

    `allocate(bytes)` gives the buffer, uint8 at a multiple of ALIGNMENT bytes; without it, it is new.
    """
    arrays = [tensor.numpy() for tensor in tensors_of(value)]
    narrow = [_fits_int32(array) for array in arrays]
    starts = np.zeros(len(arrays), dtype=np.int64)
    end = 0
    for part in (True, False):
        for index, array in enumerate(arrays):
            if narrow[index] == part:
                starts[index] = end
                end = -(-(end + array.size * (4 if part else array.itemsize)) // ALIGNMENT) * ALIGNMENT
        if part:
            num_narrow = end // 4
            end = max(end, 8 * FIRST_OFFSET)
    buffer = allocate(end) if allocate else torch.empty(end, dtype=torch.uint8)
    out = buffer.numpy()
    for array, start, is_narrow in zip(arrays, starts.tolist(), narrow, strict=True):
        dtype = np.dtype(np.int32) if is_narrow else array.dtype
        out[start : start + array.size * dtype.itemsize].view(dtype)[:] = array.ravel()
    places = zip(starts.tolist(), narrow, strict=True)

    def place(tensor: Any) -> _Place:
        start, is_narrow = next(places)
        return _Place(start // 4 if is_narrow else start, tuple(tensor.shape), tensor.dtype, is_narrow)

    return Packed(buffer[:end], Layout(map_parts(value, Tensor, place), end, num_narrow))


def _fits_int32(array: np.ndarray) -> bool:
    """Return whether an array is int64 and loses nothing as int32."""
    if array.dtype != np.int64:
        return False
    return not array.size or bool(array.min() >= _INT32.min and array.max() <= _INT32.max)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor of the host to `device`. On CUDA the copy goes from pinned memory, and the host does not wait for it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def send_packed(value: Value, device: torch.device) -> Value:
    """Copy a value that `pack` accepts from the host to an accelerator, in one copy."""
    packed = pack(value)
    return Packed(send(packed.buffer, device), packed.layout).unpack()


class Sender:
    """Sends packed values to an accelerator while it computes. On CUDA it uses a separate stream and pinned memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, packed: Packed[Value]) -> Value:
        """Return the value on the device, for what is started from now on."""
        if self._stream is None:
            return Packed(packed.buffer.to(self._device), packed.layout).unpack()
        with torch.cuda.stream(self._stream):
            buffer = packed.buffer.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        buffer.record_stream(computing)  # its memory is not given away before what reads it is done
        return Packed(buffer, packed.layout).unpack()
