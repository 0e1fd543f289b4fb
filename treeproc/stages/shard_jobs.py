"""The missing shards of a stage: made in Ray's actors, or one after the other in this process."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from treeproc.common.files import read_json
from treeproc.common.hash_cache import hash_here
from treeproc.common.progress import Progress, phase
from treeproc.common.provenance import Recorder
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.packed_records import PackedRecords
from treeproc.shards.store import Index, ShardRecord, finished_shards, read_index
from treeproc.stages.hash_files import hasher
from treeproc.stages.job_report import fallbacks
from treeproc.stages.run_jobs import Jobs, Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageWork:
    """The work of a stage: `worker(**arguments)` is built once a process, then called with the keyword arguments of each job."""

    label: str  # for the progress
    loading: str  # the worker's first phase, for the progress
    worker: type
    arguments: dict
    gpus_per_actor: float = 0.0


def make_shards(
    work: StageWork,
    folder: AnyPath,
    text: Sequence[ShardRecord],
    fingerprints: Sequence[str],
    jobs: Sequence[dict],
    *,
    in_this_process: bool,
    record: Recorder,
) -> PackedRecords:
    """Run the jobs of the shards that are not finished; returns all records in the order of `text`.

    `fingerprints` are those that finished shards have. Raises UserError when a worker does.
    """
    names = [shard.name for shard in text]
    with phase("looking for finished shards"):
        found = finished_shards(folder, names, fingerprints, hash_here if in_this_process else hasher(ray_runner(folder, record)))
    missing, before = found.missing(), found.present()
    if before:
        logger.info("%s: %d of %d shards are finished already", work.label, len(before), len(text))
    if missing:
        record.note(**{folder.name: 0})
        todo, places = Jobs(missing, jobs.__getitem__), {names[place]: place for place in missing}
        total, finished = (sum(shard.rows for shard in shards) for shards in (text, before))
        failed = sum(fallbacks(shard.counts) for shard in before)
        with Progress(work.label, total, unit="examples", initial=finished) as progress:
            run = _run_here(work, todo, progress) if in_this_process else _run_on_ray(work, todo, folder, progress, record)
            for number, shard in enumerate(run, start=1):
                found.put(places[shard.name], shard)
                failed += fallbacks(shard.counts)
                progress.update(shard.rows, f"{failed:,} without a parse" if failed else None)
                record.keep_up(**{folder.name: number})
        record.note()
    return found.present()


def _run_here(work: StageWork, jobs: Sequence[dict], progress: Progress) -> Iterator[ShardRecord]:
    with phase(work.loading):
        worker = work.worker(**work.arguments)
    progress.began()
    yield from (worker(**job) for job in jobs)


def _run_on_ray(
    work: StageWork, jobs: Sequence[dict], folder: AnyPath, progress: Progress, record: Recorder
) -> Iterator[ShardRecord]:
    from treeproc.stages import ray_job  # a job without Ray must not load it

    def count_usage(usage: dict) -> None:
        if progress.phase:  # the first shard
            progress.show_phase("")
            progress.began(seconds_ago=usage["seconds"])
        record.session.add_worker(usage)

    progress.show_phase(f"starting actors, {work.loading}")
    yield from ray_job.run_shards(
        work.worker, work.arguments, jobs, folder=folder, gpus_per_actor=work.gpus_per_actor, count_usage=count_usage
    )


def ray_runner(folder: AnyPath, record: Recorder) -> Run:
    """Return what runs jobs in Ray's tasks, which `record` counts; every node must see `folder`. Processes stay between calls."""

    def run(worker: type, arguments: dict, jobs: Sequence[dict]) -> Iterator[tuple[int, Any]]:
        from treeproc.stages import ray_job  # a job without Ray must not load it

        return ray_job.run_jobs(worker, arguments, jobs, folder=folder, in_tasks=True, count_usage=record.session.add_worker)

    return run


def previous_index(folder: AnyPath, key: str) -> Index | None:
    """Return the index of a finished stage. It has `key`. None if it is missing or damaged: the caller then reads the shards."""
    path = folder / "index.json"
    if not path.exists():
        return None
    try:
        index = read_json(path)
    except UserError:
        index = {}
    if {"schema_version", key} <= set(index) and {"shards", "parts"} & set(index):
        found = read_index(folder)
        try:
            found.check_parts()
            return found
        except UserError as error:
            logger.warning("%s", error)
    logger.warning("%s is damaged; the job makes it again", path)
    return None
