"""How the jobs of a stage are run: a worker is built of its arguments, then called with the arguments of each job.

Ray's driver takes some milliseconds a job, however small it is. So small pieces of work are grouped to jobs of GROUP_ROWS rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

GROUP_ROWS = 50_000

Item = TypeVar("Item")


class Jobs(Sequence[dict]):
    """The jobs of items, each made when it is asked for: half a million jobs would take gigabytes."""

    def __init__(self, items: Sequence[Item], make: Callable[[Item], dict]):
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, number: int) -> dict: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict]: ...
    def __getitem__(self, number: int | slice) -> dict | list[dict]:
        if isinstance(number, slice):
            return [self._make(item) for item in self._items[number]]
        return self._make(self._items[number])


# Yields the number of every job and what the worker returned, in any order.
Run = Callable[[type, dict, Sequence[dict]], Iterator[tuple[int, Any]]]


def run_here(worker: type, arguments: dict, jobs: Sequence[dict]) -> Iterator[tuple[int, Any]]:
    """Run the jobs in this process, one after the other."""
    if jobs:
        built = worker(**arguments)
        yield from ((number, built(**job)) for number, job in enumerate(jobs))


def grouped(items: Sequence[tuple[int, Item]], of_rows: int | None = None) -> list[list[Item]]:
    """Group items, given with their numbers of rows, with neighbours until they have `of_rows` rows or little more together.

    GROUP_ROWS if nothing else is given.
    """
    groups: list[list[Item]] = []
    left = 0
    for rows, item in items:
        if left <= 0:
            groups.append([])
            left = of_rows or GROUP_ROWS
        groups[-1].append(item)
        left -= rows
    return groups


def in_number_order(results: Iterable[tuple[int, Any]]) -> Iterator[Any]:
    """Yield the results of numbered jobs in the order of their numbers."""
    waiting, number = {}, 0
    for found, result in results:
        waiting[found] = result
        while number in waiting:
            yield waiting.pop(number)
            number += 1
