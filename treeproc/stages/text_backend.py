"""The two ways to do the text stage, to the same bytes: in this process, or on Ray."""

import logging
from collections.abc import Iterator
from typing import Protocol

from treeproc.common.provenance import Recorder
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import in_order
from treeproc.shards.store import ShardRecord
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.cut_inputs import bytes_that_can_be_cut
from treeproc.stages.filters import FilterConfig
from treeproc.stages.line_lists import LineList
from treeproc.stages.shard_jobs import ray_runner
from treeproc.stages.text import Inputs, Scan, TextWriter, scan
from treeproc.stages.text_on_ray import TextOnRay
from treeproc.stages.text_warnings import TextNotices
from treeproc.stages.work_folders import work_folder

logger = logging.getLogger(__name__)

# Below, Ray takes longer to start than this process to read.
LEAST_BYTES = 64 << 20


class TextBackend(Protocol):
    """A way to read all inputs and to write the text shards."""

    def counts(self) -> dict[str, int]:
        """Count the examples of every split. Raises UserError on bad input, if only when `digests` is called."""

    def digests(self) -> dict[str, str]:
        """Return the hash of the content of every split. Raises UserError on bad input."""

    def train_files(self) -> list[int]:
        """Count the examples of each source file of train, before `hold_out`. The inputs were read without an error before."""

    def write(self, fingerprint: str, rows_per_shard: int, notices: TextNotices, dropped: LineList) -> Iterator[ShardRecord]:
        """Return the records of all shards as they land; notices and dropped lines are complete after the last one."""

    def remove(self) -> None:
        """Remove the files that this work left for a job that continues."""


class LocalText:
    """The text stage in this process: two passes over the inputs. Any format, and inputs wherever they are."""

    def __init__(self, folder: AnyPath, inputs: Inputs, filters: FilterConfig):
        self._folder, self._inputs, self._filters = folder, inputs, filters
        self._scans: dict[str, Scan] = {}

    def _scan(self) -> dict[str, Scan]:
        self._scans = self._scans or scan(self._inputs, self._filters)
        return self._scans

    def counts(self) -> dict[str, int]:
        return {split: one.count for split, one in self._scan().items()}

    def digests(self) -> dict[str, str]:
        return {split: one.digest for split, one in self._scan().items()}

    def train_files(self) -> list[int]:
        return self._inputs.count_train_files()

    def write(self, fingerprint: str, rows_per_shard: int, notices: TextNotices, dropped: LineList) -> Iterator[ShardRecord]:
        writer = TextWriter(
            self._folder, self._inputs, self._filters, self._scan(), rows_per_shard, fingerprint, notices, dropped
        )
        for split in in_order(self._inputs.splits):
            yield from writer.write(split)

    def remove(self) -> None:
        """Do nothing: a job continues from the shards alone."""


def can_run_on_ray(config: PreprocessConfig) -> bool:
    """Return whether the text stage of a job is for Ray: it is large, its lines can be cut, and all nodes see the files."""
    inputs = config.inputs()
    if config.workers == 0 or bytes_that_can_be_cut(inputs) < LEAST_BYTES:
        return False
    from treeproc.stages import ray_job  # a job without Ray must not load it

    if ray_job.all_nodes_see(inputs):
        return True
    logger.warning(
        "text: some nodes do not see the input files, so one process reads them; put the files on shared storage, or in an "
        "object store that all nodes may read"
    )
    return False


def text_on_ray(config: PreprocessConfig, out: AnyPath, record: Recorder) -> TextOnRay:
    """Return the text stage of a job on Ray, whose processes `record` counts."""
    inputs, wanted = config.inputs(), config.notices().wanted
    work = work_folder(out, inputs, config.filters, wanted)
    return TextOnRay(out, work, inputs, config.filters, wanted, ray_runner(work, record))
