"""Parts of a long input in Ray actors, one model each; their results come back in the order of the input."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import ray

from treenet.translation.line_translator import LineSource, LineTranslator, Translated, TranslateSettings
from treeproc.common.ray_session import start_ray
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

# Parts for each actor that are at work, or done before their turn: what memory holds.
_AHEAD = 2
# A part whose actor died is given to another one so many times.
_RETRIES = 3


class _Actor:
    """Loads the models when it starts; what a user did wrong comes back as text, since Ray would print a traceback."""

    def __init__(self, settings: TranslateSettings, runs: Sequence[AnyPath], encoder: type[LineSource]):
        import torch

        torch.set_num_threads(1)  # a CPU each
        self._translator, self._error = None, ""
        try:
            self._translator = LineTranslator(settings, runs, encoder)
        except UserError as error:
            self._error = str(error)

    def describe(self) -> tuple[str, str]:
        """(what is searched, error): one of them is empty."""
        return (self._translator.describe() if self._translator else ""), self._error

    def translate(self, lines: Sequence, first: int) -> tuple[Translated | None, str]:
        """(result, error)."""
        try:
            return self._translator(lines, first), ""
        except UserError as error:
            return None, str(error)


def map_with_ray(
    parts: Iterable[tuple[Sequence, int]], settings: TranslateSettings, runs: Sequence[AnyPath], encoder: type[LineSource]
) -> Iterator[Translated]:
    """Translate `parts` by `settings.workers` actors: see `treenet.translation.translate_job`.

    Work begins as soon as one actor has started; those that the cluster has no room for join later, or never. Raises UserError
    when an actor does, or dies again and again.
    """
    start_ray()
    actor = ray.remote(num_cpus=1, num_gpus=int(settings.use_gpu), max_restarts=_RETRIES, max_task_retries=_RETRIES)(_Actor)
    starting = [actor.remote(settings, runs, encoder) for _ in range(settings.workers)]
    busy = {one.describe.remote(): one for one in starting}
    greetings, free, described = set(busy), deque(), False
    order: deque[ray.ObjectRef] = deque()  # of the parts at work or done, the first of which is the next to be handed on
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
                words = _result(reference)
                if not described:
                    print(words, file=sys.stderr)
                described = True
        while order and order[0] not in busy:
            yield _result(order.popleft())


def _result(reference: ray.ObjectRef):
    """The result of an actor. Raises UserError for its error."""
    try:
        value, error = ray.get(reference)
    except ray.exceptions.RayError as failure:
        reason = " ".join(str(failure).split())[:300]
        raise UserError(f"a worker failed: {reason}; with too little memory, lower decoding.max_tokens") from None
    if error:
        raise UserError(error)
    return value
