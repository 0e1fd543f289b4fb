"""The end of the work of a pool of actors: jobs that take far longer than the others are tried once more, beside the first try.

A process that hangs answers no more, and Ray waits for it without end. A slow node may take hours for the last shard. Both tries
write the same bytes, so the first result counts. The actors end with their pipeline, whose work is then done.
"""

import json
import queue
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator

import ray
import ray.data
from ray.exceptions import RayError, RayTaskError

# Jobs are late if no result came for so many times the median of their seconds, and at least for so many seconds.
MEDIANS, LEAST_S = 4, 60.0
# More jobs than these are no end: then all of them wait, as for nodes or for a store.
MOST_LATE = 64
POLL_S = 1.0


def first_results(
    results: ray.data.Dataset, numbers: Iterable[int], try_again: Callable[[int, float], ray.ObjectRef]
) -> Iterator[dict]:
    """Yield the first row of every job of the pipeline `results`, or one with an error, in any order.

    `try_again` gets the number of a late job and the median of the seconds of the others. It starts the second try.
    """
    left, seconds, silent_s = set(numbers), [], 0.0
    tries: list[ray.ObjectRef] | None = None
    rows: queue.SimpleQueue[dict | BaseException] = queue.SimpleQueue()
    row: dict | BaseException | None
    threading.Thread(target=_read, args=(results, rows), daemon=True).start()
    try:
        while left:
            try:
                row = rows.get(timeout=POLL_S)
            except queue.Empty:  # only time in which this process ran counts
                row, silent_s = _ended(tries or []), silent_s + POLL_S
            if isinstance(row, BaseException):
                raise row
            if row is not None and (row["error"] or row["number"] in left):
                yield row
                left.discard(row["number"])
                seconds.append(json.loads(row["usage"])["seconds"])
                silent_s = 0.0
            if tries is None and len(left) <= MOST_LATE and seconds and silent_s >= LEAST_S:
                median = statistics.median(seconds)
                if silent_s >= MEDIANS * median:
                    tries = [try_again(number, median) for number in sorted(left)]
    finally:
        if executor := getattr(results, "_current_executor", None):  # without it, hanging actors end with this process
            executor.shutdown(force=True)


def _read(results: ray.data.Dataset, rows: queue.SimpleQueue) -> None:
    """Put every row into `rows` as soon as it is there, and the error with which the pipeline ends."""
    try:
        for table in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for row in table.to_pylist():
                rows.put(row)
    except BaseException as error:
        rows.put(error)


def _ended(tries: list[ray.ObjectRef]) -> dict | None:
    """Return the row of a second try that has ended. One whose process died counts for nothing."""
    ended, _ = ray.wait(tries, timeout=0) if tries else ([], [])
    for reference in ended:
        tries.remove(reference)
        try:
            return ray.get(reference)
        except RayTaskError:
            raise
        except RayError:
            continue
    return None
