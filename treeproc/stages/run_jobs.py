"""How the jobs of a stage are run: a worker is built of its arguments, then called with the arguments of each job.

Ray's driver takes some milliseconds a job, however small it is. So small pieces of work are grouped to jobs of GROUP_ROWS rows.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from treeproc.common.cache import HashFiles, hash_here, sha256_of
from treeproc.common.files import read_json
from treeproc.common.messages import Progress, phase
from treeproc.common.processes import map_in_processes
from treeproc.common.provenance import Recorder
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import StoreRefuses, in_parallel
from treeproc.shards.shard import Shard
from treeproc.shards.store import Index, OtherVersion, ShardRecord, finished_shards, read_index
from treeproc.stages.job_report import fallbacks

logger = logging.getLogger(__name__)

GROUP_ROWS = 50_000

Item = TypeVar("Item")


# Yields the number of every job and what the worker returned, in any order.
Run = Callable[[Callable[..., Any], dict, Sequence[dict]], Iterator[tuple[int, Any]]]


def run_here(
    worker: Callable[..., Any], arguments: dict, jobs: Sequence[dict], processes: int = 1, did: str = "ran jobs"
) -> Iterator[tuple[int, Any]]:
    """Run the jobs in this process, one after the other, or in several.

    Raises UserError if one of several dies. The message has `did`, its work.
    """
    if processes > 1:
        yield from enumerate(map_in_processes(_run_job, jobs, processes, did, _build_worker, (worker, arguments)))
    elif jobs:
        built = worker(**arguments)
        yield from ((number, built(**job)) for number, job in enumerate(jobs))


_worker: Callable[..., Any]  # of a process of several


def _build_worker(worker: Callable[..., Any], arguments: dict) -> None:
    global _worker
    _worker = worker(**arguments)


def _run_job(job: dict) -> Any:
    return _worker(**job)


def choose_run(on_ray: bool, folder: AnyPath, record: Recorder) -> Run:
    """Return what runs jobs here, or in Ray's tasks, which `record` counts. Every node must see `folder`."""
    if not on_ray:
        return run_here

    def run(worker: Any, arguments: dict, jobs: Sequence[dict]) -> Iterator[tuple[int, Any]]:
        from treeproc.stages.ray_job import run_on_ray  # what needs no job must not load Ray

        return run_on_ray(worker, arguments, jobs, folder=folder, in_tasks=True, count_usage=record.session.add_worker)

    return run


def grouped(items: Sequence[tuple[int, Item]], size: int | None = None) -> list[list[Item]]:
    """Group items, given with their sizes, with neighbours until they have `size` (GROUP_ROWS) or little more together."""
    groups: list[list[Item]] = []
    left = 0
    for own, item in items:
        if left <= 0:
            groups.append([])
            left = size or GROUP_ROWS
        groups[-1].append(item)
        left -= own
    return groups


def in_number_order(results: Iterable[tuple[int, Any]]) -> Iterator[Any]:
    """Yield the results of numbered jobs in the order of their numbers."""
    waiting, number = {}, 0
    for found, result in results:
        waiting[found] = result
        while number in waiting:
            yield waiting.pop(number)
            number += 1


# Below, Ray takes longer to start than the threads of one process to hash.
LEAST_BYTES = 8 << 30
# Bytes of a job: a task of a second or two, where the storage gives as much as a core hashes.
JOB_BYTES = 1 << 30
_FILES_AT_ONCE = 4


def hasher(run: Run) -> HashFiles:
    """Return what hashes many bytes by jobs that `run` runs, if not here, and few by threads of this process."""

    def hash_files(folder: AnyPath, sizes: Mapping[str, int]) -> Iterable[str | None]:
        if run is run_here or sum(sizes.values()) < LEAST_BYTES:
            return hash_here(folder, sizes)
        groups = grouped([(size, name) for name, size in sizes.items()], JOB_BYTES)
        results = run(HashNames, {"folder": folder}, [{"names": names} for names in groups])
        return (sha256 for some in in_number_order(results) for sha256 in some)

    return hash_files


class HashNames:
    """Hashes files of a folder."""

    def __init__(self, folder: AnyPath):
        self._folder = folder

    def __call__(self, names: Sequence[str]) -> list[str | None]:
        """Return the sha256 of each file; None for one that cannot be read."""
        return list(in_parallel(lambda name: sha256_of(self._folder / name), names, _FILES_AT_ONCE))


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
) -> list[ShardRecord]:
    """Run the jobs of the shards that are not finished; returns all records in the order of `text`.

    `fingerprints` are those that finished shards have. Raises UserError when a worker does.
    """
    names = [shard.name for shard in text]
    with phase("looking for finished shards"):
        found = finished_shards(folder, names, fingerprints, hasher(choose_run(not in_this_process, folder, record)))
    missing, before = [place for place, shard in enumerate(found) if shard is None], list(filter(None, found))
    if before:
        logger.info("%s: %d of %d shards are finished already", work.label, len(before), len(text))
    if missing:
        there = {path.name for path in folder.glob("*.arrow")}
        if again := sum(names[place] in there for place in missing):
            of = "not finished, damaged or of another input, parser or settings"
            logger.warning("warning: %s: %d of %d shards are %s; they are made again", work.label, again, len(text), of)
        record.note(**{folder.name: 0})
        todo, places = [jobs[place] for place in missing], {names[place]: place for place in missing}
        total, left = sum(shard.rows for shard in text), sum(text[place].rows for place in missing)
        failed = sum(fallbacks(shard.counts) for shard in before)
        with Progress(work.label, total, unit="examples", initial=total - left) as progress, ExitStack() as first_shard:
            first = f"of {text[missing[0]].rows:,} examples"  # the count does not move for minutes

            def build(**arguments: Any) -> Any:
                with phase(work.loading):
                    worker = work.worker(**arguments)
                progress.began()
                first_shard.enter_context(phase(f"in the first shard, {first}"))
                return worker

            def count_usage(usage: dict) -> None:
                if progress.phase:
                    progress.show_phase("")
                    progress.began(seconds_ago=usage["seconds"])
                record.session.add_worker(usage)

            if in_this_process:
                run = run_here(build, work.arguments, todo)
            else:
                from treeproc.stages.ray_job import run_on_ray  # a job without Ray must not load it

                progress.show_phase(f"starting actors, {work.loading}, then in the first shards, {first} each")
                texts = (work.arguments.get("base") or work.arguments["data"]) / "text"
                describe = lambda number: _describe_shard(texts, text[missing[number]])  # noqa: E731
                run = run_on_ray(
                    work.worker, work.arguments, todo,
                    folder=folder, gpus_per_actor=work.gpus_per_actor, count_usage=count_usage, describe=describe,
                )  # fmt: skip
            for number, (_, shard) in enumerate(run, start=1):
                first_shard.close()
                place = places[shard.name]
                found[place] = shard
                failed += fallbacks(shard.counts)
                progress.update(text[place].rows, f"{failed:,} without a parse" if failed else None)
                record.keep_up(**{folder.name: number})
        record.note()
    return list(filter(None, found))


def _describe_shard(texts: AnyPath, shard: ShardRecord) -> str:
    """Return the name of a shard, and its longest line if it is a shard of `texts`: states are made of encoded ones."""
    try:
        rows = Shard(texts, shard).rows()
        characters, example = max((len(row.get(side) or ""), row["example_id"]) for row in rows for side in ("source", "target"))
    except (UserError, ValueError):  # ValueError: it has no line
        return shard.name
    return f"{shard.name} (its longest line has {characters:,} characters, in example {example:,})"


def previous_index(folder: AnyPath, key: str) -> Index | None:
    """Return the index of a finished stage. It has `key`. None if it is missing or damaged: the caller then reads the shards.

    Raises UserError if it is of another version, and if the store refuses.
    """
    path = folder / "index.json"
    if not path.exists():
        return None
    try:
        if {"schema_version", key} <= set(read_json(path, "the job makes it again")):
            found = read_index(folder)
            found.records()
            return found
    except (OtherVersion, StoreRefuses):
        raise
    except UserError as error:
        logger.warning("warning: %s", error)
    logger.warning("warning: %s is damaged; the job makes it again", path)
    return None
