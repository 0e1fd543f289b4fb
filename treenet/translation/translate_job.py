"""Translate or classify a stream of raw lines, part by part, in one process or in many. The one output has their order.

Memory holds a few parts of `lines_at_once` lines, even if the input is long. The number of workers changes neither the parts nor
the output.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice, tee
from typing import IO

from treenet.translation.line_translator import LineSource, LineTranslator, LineWorker, Translated
from treenet.translation.part_store import PartStore
from treenet.translation.translate_settings import LineSettings
from treeproc.common.command_line import check_output
from treeproc.common.extras import require
from treeproc.common.files import is_stream, named_output
from treeproc.common.messages import tell, warn
from treeproc.common.progress import Progress
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

# Longer inputs get a progress report.
LONG = 100
_LISTED = 10

Part = tuple[Sequence, int]  # raw lines, and the 0-based number of the first


def translate_lines(
    lines: Iterable,
    settings: LineSettings,
    runs: Sequence[AnyPath],
    encoder: type[LineSource],
    *,
    name: str,
    total: int | None = None,
    worker: type[LineWorker] = LineTranslator,
) -> None:
    """Write the results of `lines` to `settings.output`, or standard output: translations, or those of another worker.

    `name` is the input's name in messages. Lines that have no result have an empty line in the output, and a message on standard
    error lists them. Raises UserError if there are no lines. On any error, an earlier output file stays as it was.
    """
    if settings.workers:
        require("ray", f"workers={settings.workers}", "leave workers out to work in this process")
    parts = _parts(lines, settings.lines_at_once)
    first = next(parts, None)
    if first is None:
        raise UserError(f"{name} is empty, but must have one sentence a line")
    # Text that went into a pipe cannot be continued.
    store = PartStore(settings, runs) if settings.output and not is_stream(settings.output) else None
    with ExitStack() as stack:
        output = stack.enter_context(_open_output(settings.output))
        progress = None
        if (len(first[0]) if total is None else total) > LONG:
            progress = stack.enter_context(Progress(worker.done, total, unit="lines"))
        failed: list[int] = []
        shown_kinds: set[str] = set()
        count = 0
        for translated in _compute(chain([first], parts), store, settings, runs, encoder, worker):
            output.write(translated.text.encode())
            output.flush()
            _print_messages(translated, name, shown_kinds, worker.result)
            failed += [number for number, _ in translated.problems]
            count += translated.num_lines
            if progress:
                progress.update(translated.num_lines)
    if store:
        store.remove()
    if failed:
        listed = ", ".join(map(str, failed[:_LISTED])) + (", ..." if len(failed) > _LISTED else "")
        _print_message(f"{len(failed):,} of {count:,} lines have no {worker.result}: {listed}")


def answer_lines(
    lines: Iterable,
    settings: LineSettings,
    runs: Sequence[AnyPath],
    encoder: type[LineSource],
    *,
    name: str,
    explain: bool,
    worker: type[LineWorker] = LineTranslator,
) -> None:
    """Write the result of each line to standard output before `lines` gives the next one.

    It asks for the first line after the models are loaded. With `explain`, it also writes trees and scores. Messages are as in
    `translate_lines`.
    """
    check_output()
    translator = worker(settings, runs, encoder)
    tell(translator.describe())
    shown_kinds: set[str] = set()
    for number, line in enumerate(lines):
        translated = (translator.explain if explain else translator)([line], number)
        sys.stdout.buffer.write(translated.text.encode())
        sys.stdout.buffer.flush()
        _print_messages(translated, name, shown_kinds, worker.result)


def _print_messages(translated: Translated, name: str, shown_kinds: set[str], result: str) -> None:
    """Print messages about lines.

    A message about the complete input appears once for each kind; `shown_kinds` were printed before.
    """
    for kind in sorted(translated.notices.keys() - shown_kinds):
        _print_message(f"{name}: {translated.notices[kind]}")
        shown_kinds.add(kind)
    empty = [(number, f"{problem}; its {result} is empty") for number, problem in translated.problems]
    for number, message in sorted(empty + translated.notes):
        _print_message(f"{name}, line {number}: {message}")


def _compute(
    parts: Iterable[Part],
    store: PartStore | None,
    settings: LineSettings,
    runs: Sequence[AnyPath],
    encoder: type[LineSource],
    worker: type[LineWorker],
) -> Iterator[Translated]:
    """Yield the results of parts in their order: first those in the store, then new ones, which it stores."""
    given, remaining = tee(parts)  # the second iterator is behind the first by the parts in work
    if store:
        for lines, first in given:
            if (found := store.find(lines, first)) is None:
                if first:
                    tell(f"{first:,} lines are {worker.done} already; the command continues after them")
                given = chain([(lines, first)], given)
                break
            next(remaining)
            yield found
        else:
            return
    for result in _map(given, settings, runs, encoder, worker):
        lines, first = next(remaining)
        if store:
            store.keep(lines, first, result)
        yield result


def _map(
    parts: Iterable[Part],
    settings: LineSettings,
    runs: Sequence[AnyPath],
    encoder: type[LineSource],
    worker: type[LineWorker],
) -> Iterator[Translated]:
    """Compute in this process, or with workers."""
    if settings.workers:
        from treenet.translation.ray_translate import map_with_ray

        yield from map_with_ray(parts, settings, runs, encoder, worker)
        return
    translator = worker(settings, runs, encoder)
    tell(translator.describe())
    for part in parts:
        yield translator(*part)


def _parts(lines: Iterable, lines_at_once: int) -> Iterator[Part]:
    iterator, first = iter(lines), 0
    while part := list(islice(iterator, lines_at_once)):
        yield part, first
        first += len(part)


@contextmanager
def _open_output(path: AnyPath | None) -> Iterator[IO[bytes]]:
    if path is None:
        check_output("give output=FILE")
        yield sys.stdout.buffer
        return
    with named_output(path) as file:
        yield file


def _print_message(message: str) -> None:
    warn(f"warning: {message}")
