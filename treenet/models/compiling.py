"""Models by `torch.compile` for training: how many graphs there may be, what is missing, and what is said of both.

A graph is for all sizes but those of one: a batch of one example, or of targets of one piece, has its own. So a form of a batch
has 4 graphs, and as many in validation. An accelerator gets three forms: compact trees, and long trees with or without deep
paths; plain models have one form. CPUs have more forms, by the path of attention and by how rows are summed.
"""

import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as shapes_config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from treeproc.common.settings import UserError

# Graphs of one model; a form of a batch that would need more is computed without a graph.
MOST_GRAPHS = 32
_LIMITS = {
    "recompile_limit": MOST_GRAPHS,
    "accumulated_recompile_limit": 8 * MOST_GRAPHS,
    "fail_on_recompile_limit_hit": True,
}


def wants_compiling(setting: bool | None, device: torch.device, *, as_it_is: bool) -> bool:
    """Whether a model is compiled; None, the default, is yes on GPUs, unless other settings want the model `as_it_is`.

    Raises UserError where it is asked for and something is missing; where it is the default, a line says so.
    """
    wanted = device.type == "cuda" and not as_it_is if setting is None else setting
    if not wanted or (missing := what_is_missing(device)) is None:
        return wanted
    if setting:
        raise UserError(f"compile must be false here, for want of {missing}; install it, or leave compile out")
    print(f"note: the model runs slower, not compiled, for want of {missing}", file=sys.stderr)
    return False


def what_is_missing(device: torch.device) -> str | None:
    """What `torch.compile` wants for code of this device and does not find; None where it has all."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
        # Triton compiles what launches its kernels.
        return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "a C compiler (gcc or clang)"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++ or clang++, or what $CXX names)"
    return None


class Compiled:
    """A method of a model by `torch.compile`, for batches of all sizes.

    What fails to compile is said, and computed as it is. Two sizes that happen to be equal in the first batch are not taken
    for one ("duck shapes").
    """

    def __init__(self, method: Callable[..., Any]):
        mend_stride_order()
        self._method, self._compiled = method, torch.compile(method, dynamic=True)
        self._told, self._failed = False, False

    def __call__(self, *arguments: Any) -> Any:
        if self._failed:
            return self._method(*arguments)
        try:
            with torch._dynamo.config.patch(_LIMITS), shapes_config.patch(use_duck_shape=False):
                return self._compiled(*arguments)
        except FailOnRecompileLimitHit:
            self._tell()
        except TorchDynamoException as error:
            self._failed = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"warning: the model cannot be compiled and runs slower as it is: {reason}", file=sys.stderr)
        return self._method(*arguments)

    def _tell(self) -> None:
        if not self._told:
            print(
                f"warning: torch.compile tells more than {MOST_GRAPHS} forms of batches apart; others run slower, not compiled",
                file=sys.stderr,
            )
        self._told = True


def mend_stride_order() -> None:
    """Let Inductor order strides of sizes that are sums, as leaves and nodes.

    PyTorch 2.13 raises "Invalid ranges [0:-1]" there: of one stride that is less than another it asks whether it is a multiple
    of the other, and cannot bound a remainder that has a quotient of polynomials in it. The answer is no.
    """
    import sympy
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    compare = getattr(ir.Layout, "_stride_expr_ge_or_false", None)
    if compare is None or hasattr(compare, "mended"):
        return

    def is_at_least(left: Any, right: Any) -> bool:
        powers = sympy.sympify(left % right).atoms(sympy.Pow) if right != 0 else ()
        if any(power.exp.is_negative for power in powers):
            return V.graph.sizevars.guard_or_false(sympy.Ge(left, right))
        return compare(left, right)

    is_at_least.mended = True
    ir.Layout._stride_expr_ge_or_false = staticmethod(is_at_least)
