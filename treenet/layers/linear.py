"""Linear layers, and initial weights of parts that only some models have, drawn apart from those of all other parts.

By default all weights come from PyTorch's generator, one after the other, so one more part changes the weights of all later ones.
Drawn apart, they leave that sequence as it is. Then models with the same seed share the weights of the parts that all have.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_generators: ContextVar[dict[str, torch.Generator] | None] = ContextVar("generators", default=None)


@contextmanager
def drawing_apart(enabled: bool) -> Iterator[None]:
    """Build a model whose parts draw apart, or, if not `enabled`, in one sequence."""
    token = _generators.set({} if enabled else None)
    try:
        yield
    finally:
        _generators.reset(token)


def generator_of(part: str) -> torch.Generator | None:
    """Return the generator of the parameters of a part, by PyTorch's seed; None if all draw in one sequence."""
    generators = _generators.get()
    if generators is None:
        return None
    if part not in generators:
        digest = hashlib.sha256(f"{part} {torch.initial_seed()}".encode()).digest()
        generators[part] = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return generators[part]


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
