"""Operations of PyTorch that would make the host wait for a GPU, noted while a block runs on a CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their result, or the shape of it, is known after they have run. `tolist` of a tensor on a CPU is no operation, and not seen.
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}


class Waits(TorchDispatchMode):
    """The names of such operations, in order, in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in WAITS or _indexes_by_mask(name, args) or _has_open_length(name, args, kwargs or {}):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _indexes_by_mask(name: str, args: tuple) -> bool:
    return name in {"index", "index_put", "index_put_"} and any(
        isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
    )


def _has_open_length(name: str, args: tuple, kwargs: dict) -> bool:
    """`repeat_interleave` by a tensor of counts, without the length of the result."""
    return name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], torch.Tensor)
