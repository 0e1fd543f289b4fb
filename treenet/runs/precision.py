"""The precision that a device computes in: types of matrix products under autocast, and TF32.

`auto` is the best choice for a device: float32 on CPUs, bfloat16 on GPUs. GPUs without bfloat16 use float16 with scaled losses.
Only matrix products use these types. All else, with the sums of the loss, is at least float32.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from treeproc.common.errors import UserError, check_choice

_TRAINED_IN = "trained_in"
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(use_gpu: bool) -> str:
    """Return the device that scores or translates: cuda or cpu. Raises UserError if a GPU is asked for, and there is none."""
    if use_gpu and not torch.cuda.is_available():
        raise UserError("use_gpu=true needs a GPU, but there is none; leave it out")
    return "cuda" if use_gpu else "cpu"


def has_bf16(device: torch.device) -> bool:
    """Return whether a GPU computes in bfloat16 itself, without emulation."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Resolve `auto` for this device; return any other precision unchanged."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "float32"
    return "bf16" if has_bf16(device) else "fp16"


def best_precision_here() -> str:
    """Return the precision of this process' GPU; `auto` without a GPU."""
    return resolve_precision("auto", torch.device("cuda")) if torch.cuda.is_available() else "auto"


def computing_in(precision: str, device: torch.device) -> AbstractContextManager:
    """Return a context in which matrix products have this precision."""
    check_choice("precision", precision, (*_TYPES, "float32", "tf32", "auto"))
    if precision not in _TYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision])


def allow_tf32(precision: str, device: torch.device) -> None:
    """Let float32 products of this process be TF32 on a GPU, unless the precision is float32 to the last bit."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


def remember_precision(model: nn.Module, precision: str) -> None:
    """Record the precision of the training on a model, for `scoring`."""
    setattr(model, _TRAINED_IN, precision)


def scoring(model: nn.Module) -> AbstractContextManager:
    """Return a context for a trained model, or several as one. A GPU computes as in its training, other devices in float32."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return nullcontext()
    trained_in = next((getattr(part, _TRAINED_IN) for part in model.modules() if hasattr(part, _TRAINED_IN)), "float32")
    precision = precision_of_scores(trained_in, has_bf16(device))
    allow_tf32(precision, device)
    return computing_in(precision, device)


def precision_of_scores(trained_in: str, with_bf16: bool) -> str:
    """Return the precision of scores on a GPU: as in training, but fp16 instead of bf16 if the GPU lacks bf16."""
    return "fp16" if trained_in == "bf16" and not with_bf16 else trained_in
