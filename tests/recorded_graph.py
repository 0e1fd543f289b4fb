"""A CUDA graph in slow motion on a CPU: the operations of a step, repeated on the very tensors of its recording."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))


def memory_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Keeps the calls with all their tensors, so no address is used twice, and the old content of memory that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for storage in (x.untyped_storage() for x in tensors((args, kwargs))):
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class RecordedGraph:
    """The operations of a step. Recording them changes nothing. To replay them runs no Python of the step."""

    def __init__(self, step: Callable[[], None]):
        self.replays = 0
        with _Recorder() as recorder:
            step()
        self._calls = recorder.calls
        for storage, before in recorder.before.values():
            storage.copy_(before)

    def replay(self) -> None:
        """Run the operations. What they made when they were recorded takes the new values."""
        self.replays += 1
        for func, args, kwargs, old in self._calls:
            given = {memory_of(x) for x in tensors((args, kwargs))}
            is_view = [memory_of(x) in given for x in tensors(old)]
            if all(is_view) and not func._schema.is_mutable:
                continue
            new = func(*args, **kwargs)
            for seen, fresh, view in zip(tensors(old), tensors(new), is_view, strict=True):
                if not view:
                    seen.copy_(fresh)


def operations_of(step: Callable[[], None]) -> list[tuple]:
    """Name, shapes and strides of all operations of a step, and the addresses of tensors that were there before it."""
    with _Recorder() as recorder:
        step()
    made: set[int] = set()
    found = []
    for func, args, kwargs, out in recorder.calls:
        given = list(tensors((args, kwargs)))
        addresses = [x.data_ptr() if memory_of(x) not in made else None for x in given]
        shapes = [(tuple(x.shape), x.stride(), x.dtype) for x in (*given, *tensors(out))]
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float | bool)]
        found.append((str(func), shapes, addresses, numbers))
        made |= {memory_of(x) for x in tensors(out)} - {memory_of(x) for x in given}
    return found
