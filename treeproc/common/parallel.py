"""Several files or objects at a time: transfers wait for the store, and hashing leaves the interpreter free."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from treeproc.common.store_requests import give_up_after, may_give_up

Item = TypeVar("Item")
Result = TypeVar("Result")

# Objects in flight: one request to S3 takes tens of milliseconds before its first byte, and gives some 100 MB/s.
AT_ONCE = 16


def run_all(function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call the function for every item, several at a time; errors as `in_parallel` raises them."""
    for _ in in_parallel(function, items):
        pass


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int = AT_ONCE, pool: Executor | None = None
) -> Iterator[Result]:
    """Yield the results in the order of the items, computed by threads, or by `pool`, which is shut down at the end.

    At most `at_once` items are begun beyond the last result. The first error in the order of the items is raised, after
    those that were begun have ended; nothing new is begun then. After Ctrl-C, they repeat no request to a store.
    """
    ahead: deque[Future] = deque()
    with may_give_up(), pool or ThreadPoolExecutor(at_once) as pool:
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) == at_once:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except KeyboardInterrupt as error:
            give_up_after(error)
            raise
        finally:
            for future in ahead:
                future.cancel()
