"""Steps that a GPU replays as one CUDA graph: the host starts one graph instead of hundreds of kernels.

We capture graphs ourselves, without mode "reduce-overhead" of torch.compile. That mode keeps one graph for every shape of a
batch, for as long as the process lives, and batches of a translation have many shapes. Ours lives as long as its search. So its
tensors stay where they are, nothing is copied into it, and a graph needs no compiler.
"""

import threading
from collections.abc import Callable

import torch

from treeproc.common.messages import warn


class Captured:
    """A step that changes tensors in place: at every call the same operations on the same shapes at the same addresses.

    The first call runs the step as it is, which loads its kernels. On CUDA, the second call captures a graph, and all calls from
    then on replay it. If a step cannot be captured, a line reports it, and all steps of the process run as they are.
    """

    _failed = False

    def __init__(self, step: Callable[[], None], device: torch.device):
        self._step, self._device = step, device
        self._is_warm, self._graph = False, None

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
            self._graph = capture(self._step)
        except RuntimeError as error:
            Captured._failed = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warn(f"warning: searches run slower, because a step cannot become a CUDA graph: {reason}")


class _Last(threading.local):
    """The stream that captures, and the last graph of a thread. The next graph takes over its memory."""

    stream: torch.cuda.Stream | None = None
    graph: torch.cuda.CUDAGraph | None = None


_last = _Last()


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture the operations of `step`, without running them. Graphs that the thread captured before must not run any more."""
    stream = _last.stream = _last.stream or torch.cuda.Stream()
    graph, pool = torch.cuda.CUDAGraph(), (_last.graph.pool(),) if _last.graph else ()
    stream.wait_stream(torch.cuda.current_stream())
    # Not `torch.cuda.graph`, which gives all free memory back first: the next batch would have to ask for it again.
    with torch.cuda.stream(stream):
        # Other threads may go on to use the GPU, for example to copy batches.
        graph.capture_begin(*pool, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    _last.graph = graph
    return graph


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
