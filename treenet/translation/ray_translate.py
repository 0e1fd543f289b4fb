"""Parts of a long input in Ray actors, one model each. Results return in the order of the input."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray

from treenet.runs.run_folder import absolute_checkpoint
from treenet.translation.line_translator import LineWorker, Translated
from treenet.translation.settings import LineSettings, TranslateSettings
from treeproc.common.messages import phase, tell
from treeproc.common.ray_session import describe_wait, refuse_without_gpu, start_ray
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

# Parts per actor that are in work, or finished before their turn. They are held in memory.
_AHEAD = 2
# If an actor dies, another one gets its part, at most this often.
_RETRIES = 3


class _Actor:
    """Loads the models when it starts. User errors come back as text, because Ray would print a traceback."""

    def __init__(self, worker: type[LineWorker], settings: LineSettings, runs: Sequence[AnyPath]):
        import torch

        torch.set_num_threads(1)  # one CPU each
        self._translator: LineWorker | None = None
        self._error = ""
        try:
            self._translator = worker(settings, runs)
        except UserError as error:
            self._error = str(error)

    def describe(self) -> tuple[str, str]:
        """Return (description of the search, error). One of them is empty."""
        return (self._translator.describe() if self._translator else ""), self._error

    def translate(self, lines: Sequence, first: int) -> tuple[Translated | None, str]:
        """Return (result, error)."""
        assert self._translator is not None  # else `describe` has returned an error
        try:
            return self._translator(lines, first), ""
        except UserError as error:
            return None, str(error)


def map_with_ray(
    parts: Iterable[tuple[Sequence, int]],
    settings: LineSettings,
    runs: Sequence[AnyPath],
    worker: type[LineWorker],
) -> Iterator[Translated]:
    """Compute `parts` with `settings.workers` actors: see `treenet.translation.translate_job`.

    Work begins when one actor has started. If the cluster has no room for the others yet, they join later, or never. Raises
    UserError if an actor does, or if actors die again and again.
    """
    start_ray()
    refuse_without_gpu(settings.use_gpu, "set use_gpu=false")
    there, needs = ray.cluster_resources(), {"CPU": 1.0, **({"GPU": 1.0} if settings.use_gpu else {})}
    has_room = all(there.get(kind, 0) >= amount for kind, amount in needs.items())
    waits = "starting workers" if has_room else describe_wait([needs], time.time())
    actor = ray.remote(num_cpus=1, num_gpus=int(settings.use_gpu), max_restarts=_RETRIES, max_task_retries=_RETRIES)(_Actor)
    # The actors have another working folder.
    names = [absolute_checkpoint(name) for name in settings.checkpoints]
    settings = settings.model_copy(update={"checkpoint": names[0] if len(names) == 1 else names})
    runs = [run.absolute() for run in runs]
    starting = [actor.remote(worker, settings, runs) for _ in range(settings.workers)]
    busy = {one.describe.remote(): one for one in starting}
    greetings, described = set(busy), False
    free: deque = deque()
    order: deque[ray.ObjectRef] = deque()  # of the parts in work or finished; the first is the next one to return
    with phase(waits):
        ray.wait(list(busy))
    parts = iter(parts)
    part = next(parts, None)
    while part is not None or order:
        while free and part is not None and len(order) < _AHEAD * settings.workers:
            chosen = free.popleft()
            reference = chosen.translate.remote(*part)
            busy[reference] = chosen
            order.append(reference)
            part = next(parts, None)
        for reference in ray.wait(list(busy))[0] if busy else ():
            free.append(busy.pop(reference))
            if reference in greetings:
                words = _result(reference, settings)
                if not described:
                    tell(words)
                described = True
        while order and order[0] not in busy:
            yield _result(order.popleft(), settings)


def _result(reference: ray.ObjectRef, settings: LineSettings) -> Any:
    """Return the result of an actor. Raises UserError for its error."""
    try:
        value, error = ray.get(reference)
    except ray.exceptions.RayError as failure:
        reason = " ".join(str(failure).split())[:300]
        do = "lower decoding.max_tokens" if isinstance(settings, TranslateSettings) else "give fewer workers"
        raise UserError(f"a worker failed: {reason}; if memory was short, {do}") from None
    if error:
        raise UserError(error)
    return value
