"""Models under `torch.compile` for training: the limit of graphs, missing tools, and the messages about both.

One graph covers all sizes except 1. A batch of one example has a separate graph. So a form of a batch has 2 graphs, and 2 more in
validation. On CPUs, a batch of empty targets has separate graphs too; accelerators pad targets to two columns. An accelerator
gets three forms: compact trees, and long trees with or without deep paths. Plain models have one form. CPUs have more forms, by
the path of attention and by the way to sum rows.
"""

import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as shapes_config

from treeproc.common.errors import first_line
from treeproc.common.messages import warn
from treeproc.common.settings import UserError

# Graphs of one model. If a form of a batch needs more, it is computed without a graph.
MOST_GRAPHS = 32
_SETTINGS = {
    "specialize_float": True,  # see `backend.compiled`
    "recompile_limit": MOST_GRAPHS,
    "accumulated_recompile_limit": 8 * MOST_GRAPHS,
    "fail_on_recompile_limit_hit": True,
}


def check_tools(device: torch.device) -> None:
    """Raise UserError if `torch.compile` misses something for this device."""
    if missing := what_is_missing(device):
        raise UserError(f"compile=true needs {missing}, which is missing here; install it, or leave compile out")


def what_is_missing(device: torch.device) -> str | None:
    """Return what `torch.compile` needs for this device and does not find; None if it has all."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
        # Triton compiles the code that launches its kernels.
        return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "a C compiler (gcc or clang)"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++, clang++, or the one that $CXX names)"
    return None


class Compiled:
    """A method of a model under `torch.compile`, for batches of all sizes.

    If the compilation fails, it prints a message and computes uncompiled. It treats two sizes as different, even if they are
    equal in the first batch ("duck shapes").
    """

    def __init__(self, method: Callable[..., Any]):
        mend_stride_order()
        self._method, self._compiled = method, torch.compile(method, dynamic=True)
        self._told, self._failed = False, False

    def __call__(self, *arguments: Any) -> Any:
        if self._failed:
            return self._method(*arguments)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # here, because they load slowly

        try:
            with torch._dynamo.config.patch(_SETTINGS), shapes_config.patch(use_duck_shape=False):
                return self._compiled(*arguments)
        except FailOnRecompileLimitHit:
            self._tell()
        except TorchDynamoException as error:
            self._failed = True
            warn(f"warning: PyTorch cannot compile the model, which runs slower: {first_line(error)}")
        return self._method(*arguments)

    def _tell(self) -> None:
        if not self._told:
            warn(
                f"warning: torch.compile has compiled the model for {MOST_GRAPHS} forms of batches; other forms run slower, not "
                "compiled"
            )
        self._told = True


def mend_stride_order() -> None:
    """Let Inductor order strides of sizes that are sums, as leaves and nodes.

    PyTorch 2.13 raises "Invalid ranges [0:-1]" there. For a stride that is less than another, it asks whether the stride is a
    multiple of the other. It cannot bound a remainder that contains a quotient of polynomials. The correct answer is no.
    """
    import sympy
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    compare = getattr(ir.Layout, "_stride_expr_ge_or_false", None)
    if compare is None or hasattr(ir.Layout, "mended"):
        return

    def is_at_least(left: Any, right: Any) -> bool:
        powers = sympy.sympify(left % right).atoms(sympy.Pow) if right != 0 else ()
        if any(power.exp.is_negative for power in powers):
            return V.graph.sizevars.guard_or_false(sympy.Ge(left, right))
        return compare(left, right)

    ir.Layout.mended = True
    ir.Layout._stride_expr_ge_or_false = staticmethod(is_at_least)
