"""How the jobs of a stage are run: a worker is built of its arguments, then called with the arguments of each job.

Ray's driver takes some milliseconds a job, however small it is. So small pieces of work are grouped to jobs of GROUP_ROWS rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

GROUP_ROWS = 50_000

Item = TypeVar("Item")
# Yields the number of every job and what the worker returned, in any order.
Run = Callable[[type, dict, Sequence[dict]], Iterator[tuple[int, Any]]]


def run_here(worker: type, arguments: dict, jobs: Sequence[dict]) -> Iterator[tuple[int, Any]]:
    """Run the jobs in this process, one after the other."""
    if jobs:
        built = worker(**arguments)
        yield from ((number, built(**job)) for number, job in enumerate(jobs))


def grouped(items: Sequence[tuple[int, Item]]) -> list[list[Item]]:
    """The items, given with their numbers of rows, in groups of neighbours that have GROUP_ROWS rows or little more together."""
    groups: list[list[Item]] = []
    left = 0
    for rows, item in items:
        if left <= 0:
            groups.append([])
            left = GROUP_ROWS
        groups[-1].append(item)
        left -= rows
    return groups
