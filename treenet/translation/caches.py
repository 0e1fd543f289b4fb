"""Caches of a model for the pieces so far, of two kinds behind one interface: one that grows, and one of fixed shape.

A static cache has keys and values in memory of fixed shape. So a GPU can replay a step as a CUDA graph. Only the capacity
changes: it doubles when it is used up, and each capacity has a graph. If all choices of a search run on the device, the whole
step is captured, else only the step of the model.

Shapes: B sentences, K beam size, R decoded hypotheses, V vocabulary."""

import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import InputKind
from treenet.layers.core import Scratch
from treeproc.common.errors import first_line
from treeproc.common.messages import warn


class Captured:
    """A step that changes tensors in place: at every call the same operations on the same shapes at the same addresses.

    The first call runs the step as it is, which loads its kernels. On CUDA, the second call captures a graph, and all calls from
    then on replay it. If a step cannot be captured, a line reports it, and all steps of the process run as they are.
    """

    _failed = False

    def __init__(self, step: Callable[[], None], device: torch.device):
        self._step, self._device = step, device
        self._is_warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the step once."""
        if self._graph is None and self._is_warm and _is_gpu(self._device) and not Captured._failed:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()
        self._is_warm = True

    def _capture(self) -> None:
        try:
            self._graph = capture(self._step, self._device)
        except RuntimeError as error:
            Captured._failed = True
            reason = first_line(error)
            warn(f"warning: searches run slower, because a step cannot become a CUDA graph: {reason}")


class _Last(threading.local):
    """The streams that capture, and the last graphs of a thread, by GPU. The next graph of a GPU takes over the memory."""

    def __init__(self) -> None:
        self.streams: dict[int, torch.cuda.Stream] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}


_last = _Last()


def capture(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture the operations of `step` on a GPU, without running them.

    Graphs that the thread captured there before must not run any more.
    """
    # A stream of another GPU would capture nothing: the step would run once, and its graph would be empty.
    with torch.cuda.device(device):
        gpu = torch.cuda.current_device()
        stream = _last.streams[gpu] = _last.streams.get(gpu) or torch.cuda.Stream()
        graph, pool = torch.cuda.CUDAGraph(), _last.graphs[gpu].pool() if gpu in _last.graphs else None
        stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`, which gives all free memory back first: the next batch would have to ask for it again.
        with torch.cuda.stream(stream):
            # Other threads may go on to use the GPU, for example to copy batches.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
    _last.graphs[gpu] = graph
    return graph


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


class Steps(Enum):
    """The ways to compute the steps of a beam search. All find the same translations, except for rounding."""

    LIVE = "live"  # decodes live hypotheses; the cache grows. The default on CPUs
    GRID = "grid"  # decodes the whole grid, so the host need not count; the cache grows
    STATIC = "static"  # decodes the whole grid over a static cache, on CUDA as a CUDA graph. The default on GPUs
    COMPILED = "compiled"  # the same, and torch.compile fuses the operations of a step

    @property
    def is_static(self) -> bool:
        """Whether the cache is static."""
        return self in (Steps.STATIC, Steps.COMPILED)


class SearchState(Protocol):
    """The state of a model between steps, one row per decoded hypothesis."""

    def select(self, rows: Tensor, beam_width: int | None = None) -> "SearchState":
        """Return the state of `rows` [R'], which may repeat, reorder and leave out rows.

        With `beam_width`, every sentence has this number of rows now, in the order of the batch. Then nothing needs to be looked
        up.
        """
        ...


class Decodable(Protocol):
    """A model that can be searched."""

    @property
    def reads(self) -> InputKind: ...

    def encode(self, batch: TreeBatch) -> Any: ...

    def start_decoding(self, memory: Any) -> SearchState:
        """Return the state for one row per sentence of the memory."""
        ...

    def decode_step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the logits [R, V] of the piece that follows `tokens` [R], and the new state."""
        ...


class StaticSearchState(SearchState, Protocol):
    """A state that steps and selections change in place."""

    @property
    def capacity(self) -> int: ...

    def grow(self) -> None: ...


class HasStaticCache(Decodable, Protocol):
    """A model whose search state has fixed shapes."""

    def start_static(self, memory: Any, beam_width: int, most_positions: int) -> StaticSearchState: ...

    def step_static(self, tokens: Tensor, state: Any) -> Tensor: ...


def has_static_cache(model: Any) -> bool:
    """Return whether a model can be searched with a static cache."""
    return getattr(model, "has_static_cache", False)


def choose_steps(model: Decodable, device: torch.device, compiled: bool = False) -> Steps:
    """Return the steps for a model on this device, with a static cache on GPUs if the model has one.

    `compiled` asks for compiled steps, on any device. They need a static cache.
    """
    if has_static_cache(model) and (compiled or device.type != "cpu"):
        return Steps.COMPILED if compiled else Steps.STATIC
    return Steps.LIVE if device.type == "cpu" else Steps.GRID


class GrowingCache:
    """A state of a model that grows at every step. It begins with a row for each sentence of the `memory`.

    The model is a `Decodable`. One with `decode_states` (see `Seq2Seq`) gives logits of a few hypotheses after the other, in the
    same memory.

    With `beam_width`, every selection has this number of rows for each sentence.
    """

    def __init__(self, model: Any, memory: Any, beam_width: int | None = None):
        self._model, self._state, self._beam_width = model, model.start_decoding(memory), beam_width
        self._has_states, self._scratch = hasattr(model, "decode_states"), Scratch()
        self._decoded = 0

    def run(self, step: Callable[[], None]) -> None:
        """Run a step of the search, which decodes one position and selects rows."""
        step()

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode `tokens` [R], and return what `logits` takes: a tensor with a row for each token."""
        decode = self._model.decode_states if self._has_states else self._model.decode_step
        decoded, self._state = decode(tokens, self._state)
        self._decoded = len(tokens)
        return decoded

    def logits(self, decoded: Tensor) -> Tensor:
        """Return the logits [R', V] of the pieces that follow some rows of `decode`. The next call may overwrite them."""
        return self._model.compute_logits(decoded, self._scratch) if self._has_states else decoded

    def select(self, rows: Tensor) -> None:
        """Go on with hypotheses `rows` [R'] of those that were decoded."""
        if self._beam_width is not None:
            self._state = self._state.select(rows, self._beam_width)
        elif not torch.equal(rows, torch.arange(self._decoded, device=rows.device)):
            self._state = self._state.select(rows)


class StaticCache:
    """A state of fixed shape with `beam_width` rows for each sentence. `decode_step` is `decode`, or the same compiled.

    If `whole`, steps are captured from end to end. Else only their decoding is, and the tokens must stay at their address. Raises
    ValueError if the model has no static cache.
    """

    def __init__(
        self,
        model: Any,
        memory: Any,
        beam_width: int,
        most_positions: int,
        device: torch.device,
        whole: bool,
        decode_step: Callable[..., Tensor],
    ):
        if not has_static_cache(model):
            raise ValueError("the model has no static cache")
        self._model: HasStaticCache = model
        self.state = model.start_static(memory, beam_width, most_positions)
        self._device, self._whole, self._decode_step, self._position = device, whole, decode_step, 0

    def run(self, step: Callable[[], None]) -> None:
        """See `GrowingCache`."""
        is_full = self._position == self.state.capacity
        if is_full:
            self.state.grow()
        if is_full or self._position == 0:
            self._captured = Captured(step if self._whole else self._decode, self._device)
        self._position += 1
        (self._captured if self._whole else step)()

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the logits [R, V] of the piece that follows `tokens` [R]. The next step overwrites them."""
        self._tokens = tokens
        (self._decode if self._whole else self._captured)()
        return self._logits

    def logits(self, decoded: Tensor) -> Tensor:
        """See `GrowingCache`."""
        return decoded

    def select(self, rows: Tensor) -> None:
        """See `GrowingCache`."""
        self.state.select(rows)

    def _decode(self) -> None:
        self._logits = self._decode_step(self._model, self._tokens, self.state)


Cache = GrowingCache | StaticCache


def decode(model: HasStaticCache, tokens: Tensor, state: StaticSearchState) -> Tensor:
    """Return the logits [B * K, V] of the piece that follows `tokens` [B * K]."""
    return model.step_static(tokens, state)
