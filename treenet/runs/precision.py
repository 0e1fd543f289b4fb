"""The precision that a device computes in: types of matrix products under autocast, and TF32.

`auto` stands for what a device does best. On CPUs that is float32, on GPUs bfloat16, and on GPUs without it float16, whose
losses are scaled. What is no product, and the sums of the loss, is float32 at least in all of them.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

_TRAINED_IN = "trained_in"
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bfloat16 itself, and does not emulate it."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_precision(precision: str, device: torch.device) -> str:
    """What `auto` is on this device; any other precision as it is."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "float32"
    return "bf16" if has_bf16(device) else "fp16"


def best_precision_here() -> str:
    """The precision of this process' GPU; `auto` where there is none."""
    return resolve_precision("auto", torch.device("cuda")) if torch.cuda.is_available() else "auto"


def computing_in(precision: str, device: torch.device) -> AbstractContextManager:
    """A context in which matrix products are of this precision."""
    if precision not in _TYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision])


def allow_tf32(precision: str, device: torch.device) -> None:
    """From now on, float32 products of this process are TF32 on a GPU, unless the precision is float32 to the last bit."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


def remember_precision(model: nn.Module, precision: str) -> None:
    """Note on a model what it was trained in, for `scoring`."""
    setattr(model, _TRAINED_IN, precision)


def scoring(model: nn.Module) -> AbstractContextManager:
    """A context for a trained model, or several as one: on a GPU it computes as in its training, elsewhere in float32."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return nullcontext()
    trained_in = next((getattr(part, _TRAINED_IN) for part in model.modules() if hasattr(part, _TRAINED_IN)), "float32")
    precision = precision_of_scores(trained_in, has_bf16(device))
    allow_tf32(precision, device)
    return computing_in(precision, device)


def precision_of_scores(trained_in: str, with_bf16: bool) -> str:
    """What a GPU computes scores in: as in training, but fp16 in place of the bf16 that it has not."""
    return "fp16" if trained_in == "bf16" and not with_bf16 else trained_in
