"""Writes checkpoints during the training."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from treenet.runs.checkpoint import Snapshot, write_checkpoint
from treeproc.common.settings import UserError


class CheckpointWriter:
    """Writes snapshots in a thread, one at a time and in order. Training waits only if the writer is one checkpoint behind."""

    def __init__(self, run_dir: Path, *, keep: int, best: bool):
        self._run_dir, self._keep, self._best = run_dir, keep, best
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown()

    def write(self, snapshot: Snapshot) -> None:
        """Start to write, unless the write before failed. `failure` has its error."""
        self.wait()
        if self.failure is None:
            self._writing = self._thread.submit(write_checkpoint, self._run_dir, snapshot, keep=self._keep, best=self._best)

    def wait(self) -> None:
        """Wait until the started write is on disk or has failed."""
        if self._writing:
            self._writing.exception()

    @property
    def failure(self) -> str | None:
        """Return the error of the last write, once it is known."""
        error = self._writing.exception() if self._writing and self._writing.done() else None
        if error is None:
            return None
        if isinstance(error, UserError):
            return str(error)
        raise error
