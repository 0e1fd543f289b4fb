"""The ground of the layers: the precision of a device, freed memory, functions compiled for GPUs, undocumented operators.

The precision is the type of matrix products under autocast, and TF32. `auto` is the best choice for a device: float32 on CPUs,
bfloat16 on GPUs. GPUs without bfloat16 use float16 with scaled losses. All else, with the sums of the loss, is at least float32.

Undocumented operators have public replacements, for versions without them. Shapes: R rows, D columns, E entries, G groups of
entries.
"""

import ctypes
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treeproc.common.errors import UserError, check_choice, first_line
from treeproc.common.messages import warn

_TRAINED_IN = "trained_in"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(use_gpu: bool) -> str:
    """Return the device that scores or translates: cuda or cpu. Raises UserError if a GPU is asked for, and there is none."""
    if use_gpu and not torch.cuda.is_available():
        raise UserError("use_gpu=true needs a GPU, but there is none; leave it out")
    return "cuda" if use_gpu else "cpu"


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensors, on Linux with glibc.

    By default, it returns the free end of its memory to the system. The system then clears that memory page by page at the next
    update, or at the next step of a search. With a small model on a CPU, this costs about a twentieth of the time. The library
    still returns pieces above 32 MiB.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune:
        tune(_TRIM_THRESHOLD, 2**30)
        tune(_MMAP_THRESHOLD, 2**25)  # glibc would reach this value by itself, but the other setting prevents that


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


def set_up_gpu(precision: str, device: torch.device) -> None:
    """Choose the operators of this process on a GPU.

    Float32 products may be TF32, unless the precision is float32 to the last bit. Attention is never cuDNN's. In half precision,
    PyTorch prefers it on some GPUs, but it plans anew for each shape of a batch.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
        torch.backends.cuda.enable_cudnn_sdp(False)


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
    set_up_gpu(precision, device)
    return computing_in(precision, device)


def precision_of_scores(trained_in: str, with_bf16: bool) -> str:
    """Return the precision of scores on a GPU: as in training, but fp16 instead of bf16 if the GPU lacks bf16."""
    return "fp16" if trained_in == "bf16" and not with_bf16 else trained_in


# Decorator of a function that torch.compile must leave as it is. The public one loads the compiler at once.
uncompiled = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in which operations compute in the types of their inputs."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product with `x` is computed: that of autocast if it is on."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


_SUM = 0  # a mode of embedding bags


def _operator(name: str) -> Any:
    return getattr(torch.ops.aten, name, None)


# Attention on the CPU with the logarithms of its normalisers, and its gradient. Without them `attend_subtrees` composes
# `scaled_dot_product_attention`.
flash_attention = _operator("_scaled_dot_product_flash_attention_for_cpu")
flash_attention_backward = _operator("_scaled_dot_product_flash_attention_for_cpu_backward")
_bag = _operator("_embedding_bag_forward_only")
_bag_weights_backward = _operator("_embedding_bag_per_sample_weights_backward")


def has_flash_attention() -> bool:
    """Return whether both CPU operators of attention exist."""
    return flash_attention is not None and flash_attention_backward is not None


def sum_weighted_rows(rows: Tensor, index: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Return sums [G, D] of rows [R, D] by weights [E]. `index` [E] is the row of an entry, `first` [G] a group's first entry.

    If the rows are a part of fused projections, `F.embedding_bag` would first copy them.
    """
    if _bag is None:
        return F.embedding_bag(index, rows, first, mode="sum", per_sample_weights=weights)
    return _bag(rows, index, first, per_sample_weights=weights, mode=_SUM)[0]


def multiply_rows(left: Tensor, right: Tensor, left_index: Tensor, right_index: Tensor) -> Tensor:
    """Return products [E] of a row of `left` [R, D] with a row of `right` [R, D].

    This is the gradient of the weights in a weighted sum of rows, without a copy of the rows.
    """
    if _bag_weights_backward is None:
        return (left.index_select(0, left_index) * right.index_select(0, right_index)).sum(1)
    # It reads the group of each entry from `left_index`, and no offsets.
    return _bag_weights_backward(left, right, right_index, left_index[:0], left_index, _SUM)


def first_derivative(backward: Callable) -> Callable:
    """Wrap the backward pass of an autograd function that has no second derivative. It raises UserError if one is prepared.

    `once_differentiable` of PyTorch says nothing where the input has another way to the output, such as a residual connection:
    `torch.autograd.grad` then returns the second derivative of that way alone.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError("this model has no second derivatives; take gradients without create_graph")
        return backward(ctx, *grads)

    return checked


# Graphs of one function: types of numbers, with nodes or without, sizes of one.
_MOST_GRAPHS = 32
_OPTIONS: dict[str, Any] = {"dynamic": True}
if "recompile_limit" in inspect.signature(torch.compile).parameters:
    _OPTIONS["recompile_limit"] = _MOST_GRAPHS
else:  # PyTorch 2.11 has one limit for all functions
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS


class CompiledOnGpu:
    """A function that runs compiled on CUDA and uncompiled elsewhere. It has no gradient.

    If the compiler is missing or fails, it prints one line, and the function runs uncompiled from then on.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function, self._failed = function, False

    def __call__(self, x: Tensor, *arguments: Any) -> Any:
        """Call the function on `x`, whose device decides, and other arguments."""
        if self._failed or torch.compiler.is_compiling() or not _is_gpu(x.device):
            return self._function(x, *arguments)
        from torch._dynamo.exc import TorchDynamoException  # here, because it takes longer to load than the rest of PyTorch

        try:
            # Forward and backward passes, with or without autocast, would have separate graphs.
            with torch.no_grad(), without_autocast(x.device):
                return compiled(self._function)(x, *arguments)
        except TorchDynamoException as error:
            self._failed = True
            warn(f"warning: {self._function.__name__} runs slower, because it is not compiled: {first_line(error)}")
            return self._function(x, *arguments)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `torch.compile`, for all sizes, with one graph for each value of a Python float."""
    from torch._dynamo import config  # it takes longer to load than the rest of PyTorch

    run = torch.compile(function, **_OPTIONS)

    def call(*arguments: Any, **named: Any) -> Any:
        # Else PyTorch's cache of graphs may give one with an older value (its issue 197889). From 2.13 on, a thread sets this for
        # itself alone.
        if not config.specialize_float:
            config.specialize_float = True
        return run(*arguments, **named)

    return call
