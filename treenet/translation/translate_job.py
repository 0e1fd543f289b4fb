"""Translate a stream of raw lines: part by part, in one process or in many, to one output in the order of the input.

What is held at a time are a few parts of `lines_at_once` lines, however long the input is. The parts are the same whatever
the number of workers, and so is the output.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice, tee
from typing import IO

from treenet.translation.line_translator import LineSource, LineTranslator, Translated, TranslateSettings
from treenet.translation.part_store import PartStore
from treeproc.common.extras import require
from treeproc.common.files import is_stream, named_output
from treeproc.common.progress import Progress
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

# Inputs of more lines than this are worth a report of progress.
LONG = 100
_LISTED = 10

Part = tuple[Sequence, int]  # raw lines, and the 0-based number of the first


def translate_lines(
    lines: Iterable,
    settings: TranslateSettings,
    runs: Sequence[AnyPath],
    encoder: type[LineSource],
    *,
    name: str,
    total: int | None = None,
) -> None:
    """Write the translations of `lines` to `settings.output`, or standard output; `name` is what messages call the input.

    Lines that cannot be translated are listed on standard error, and have an empty line in the output. Raises UserError when
    there are no lines; an output file then stays as it was, as with every other error.
    """
    if settings.workers:
        require("ray", f"workers={settings.workers}", "leave workers out to translate in this process")
    parts = _parts(lines, settings.lines_at_once)
    first = next(parts, None)
    if first is None:
        raise UserError(f"{name} is empty; it must have a sentence a line")
    # What went into a pipe cannot be taken up again.
    store = PartStore(settings, runs) if settings.output and not is_stream(settings.output) else None
    with ExitStack() as stack:
        output = stack.enter_context(_open_output(settings.output))
        progress = None
        if (len(first[0]) if total is None else total) > LONG:
            progress = stack.enter_context(Progress("translated", total, unit="lines"))
        failed: list[int] = []
        shown_kinds: set[str] = set()
        count = 0
        for translated in _translate(chain([first], parts), store, settings, runs, encoder):
            output.write(translated.text.encode())
            output.flush()
            _print_messages(translated, name, shown_kinds)
            failed += [number for number, _ in translated.problems]
            count += translated.num_lines
            if progress:
                progress.update(translated.num_lines)
    if store:
        store.remove()
    if failed:
        listed = ", ".join(map(str, failed[:_LISTED])) + (", ..." if len(failed) > _LISTED else "")
        _print_message(f"{len(failed):,} of {count:,} lines have no translation: {listed}")


def answer_lines(
    lines: Iterable, settings: TranslateSettings, runs: Sequence[AnyPath], encoder: type[LineSource], *, name: str, explain: bool
) -> None:
    """Write the translation of each line to standard output before the next one is asked of `lines`, the first of which is
    asked for when the models are loaded; with `explain`, trees and scores too. Messages are those of `translate_lines`.
    """
    translator = LineTranslator(settings, runs, encoder)
    print(translator.describe(), file=sys.stderr, flush=True)
    shown_kinds: set[str] = set()
    for number, line in enumerate(lines):
        translated = (translator.explain if explain else translator)([line], number)
        sys.stdout.buffer.write(translated.text.encode())
        sys.stdout.buffer.flush()
        _print_messages(translated, name, shown_kinds)


def _print_messages(translated: Translated, name: str, shown_kinds: set[str]) -> None:
    """Prints the messages about lines; of those about the complete input each kind once (`shown_kinds` were printed before)."""
    for kind in sorted(translated.notices.keys() - shown_kinds):
        _print_message(f"{name}: {translated.notices[kind]}")
        shown_kinds.add(kind)
    empty = [(number, f"{problem}; its translation is empty") for number, problem in translated.problems]
    for number, message in sorted(empty + translated.notes):
        _print_message(f"{name}, line {number}: {message}")


def _translate(
    parts: Iterable[Part],
    store: PartStore | None,
    settings: TranslateSettings,
    runs: Sequence[AnyPath],
    encoder: type[LineSource],
) -> Iterator[Translated]:
    """The results of parts in their order: first those that are in the store, then what is made now, and kept there."""
    given, remaining = tee(parts)  # the second is behind the first by what is at work
    if store:
        for lines, first in given:
            if (found := store.find(lines, first)) is None:
                if first:
                    print(f"{first:,} lines were translated before; going on after them", file=sys.stderr)
                given = chain([(lines, first)], given)
                break
            next(remaining)
            yield found
        else:
            return
    for result in _map(given, settings, runs, encoder):
        lines, first = next(remaining)
        if store:
            store.keep(lines, first, result)
        yield result


def _map(
    parts: Iterable[Part], settings: TranslateSettings, runs: Sequence[AnyPath], encoder: type[LineSource]
) -> Iterator[Translated]:
    """Translate here, or by workers."""
    if settings.workers:
        from treenet.translation.ray_translate import map_with_ray

        yield from map_with_ray(parts, settings, runs, encoder)
        return
    translator = LineTranslator(settings, runs, encoder)
    print(translator.describe(), file=sys.stderr)
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
        yield sys.stdout.buffer
        return
    with named_output(path) as file:
        yield file


def _print_message(message: str) -> None:
    # Not `print`: a line of a progress bar ends with this one.
    sys.stderr.write(f"warning: {message}\n")
    sys.stderr.flush()
