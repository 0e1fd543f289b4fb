"""Copies of tensors from the host to a device. The host does not wait for them."""

from typing import TypeVar

import torch
from torch import Tensor

from treenet.data.packing import Packed, pack

Value = TypeVar("Value")


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
