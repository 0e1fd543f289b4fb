"""Translate or classify a stream of raw lines, part by part, in one process or in many. The one output has their order.

Memory holds a few parts of `lines_at_once` lines, even if the input is long. The number of workers changes neither the parts nor
the output."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import chain, islice, tee
from pathlib import Path
from typing import IO, Any

from treenet.config import TrainConfig
from treenet.runs.checkpoint import META
from treenet.runs.loading import data_of
from treenet.runs.result_provenance import asked_for
from treenet.runs.run_folder import checkpoint_path
from treenet.translation.line_translator import LineTranslator, LineWorker, Translated, local_runs
from treenet.translation.settings import LineSettings
from treeproc.common.command_line import check_output
from treeproc.common.errors import require
from treeproc.common.files import atomic_write, json_bytes, read_json, remove_leftovers
from treeproc.common.messages import Progress, tell, warn
from treeproc.common.named_output import is_stream, named_output
from treeproc.common.settings import Effect, UserError, load_settings, settings_with
from treeproc.common.storage import AnyPath
from treeproc.shards.store import read_index


class PartStore:
    """Results in OUTPUT.parts, one file for each part.

    A file counts only if lines, settings, checkpoints and data sets are the same as before.
    """

    def __init__(self, output: AnyPath, settings: LineSettings, runs: Sequence[AnyPath]):
        self._folder = output.parent / f"{output.name}.parts"
        self._made_of = [settings.model_dump_json(exclude=settings_with(type(settings), Effect.NONE))]
        # A default that is set overrides the value of the run, but a default that is not set does not.
        self._made_of.append(json_bytes(asked_for(settings).get("decoding", {})).decode())
        for run in local_runs(settings, runs):
            files = [run / "config.yaml", *(checkpoint_path(run, checkpoint) / META for checkpoint in settings.checkpoints)]
            self._made_of += [path.read_bytes().decode(errors="replace") if path.is_file() else "" for path in files]
            with suppress(UserError):  # of a run or data set that is missing, which its reader tells
                data = data_of(run, load_settings(TrainConfig, run / "config.yaml"))
                self._made_of.append(read_index(data / "encoded")["fingerprint"])

    def find(self, lines: Sequence, first: int) -> Translated | None:
        """Return the stored translation of these lines, or None. The first line has the 0-based number `first`."""
        path = self._path(first)
        try:
            stored = read_json(path) if path.is_file() else {}
            if stored.pop("key", None) != self._key(lines, first):
                return None
            messages: dict[str, Any] = {
                name: [(number, message) for number, message in stored.pop(name)] for name in ("problems", "notes")
            }
            return Translated(**stored, **messages)
        except (UserError, KeyError, TypeError, ValueError):  # damaged, so it is translated again
            return None

    def keep(self, lines: Sequence, first: int, result: Translated) -> None:
        """Store a part. Raises UserError if the disk or the store refuses."""
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self._folder}: {error.strerror}; choose another output") from None
        atomic_write(self._path(first), json_bytes({"key": self._key(lines, first), **asdict(result)}))

    def remove(self) -> None:
        """Remove the parts, because the output is complete. What others put beside them stays."""
        for path in self._folder.glob("*.json"):
            if path.name.removesuffix(".json").isdecimal():
                path.unlink(missing_ok=True)
        if isinstance(self._folder, Path):
            remove_leftovers(self._folder)
            with suppress(OSError):
                self._folder.rmdir()

    def _path(self, first: int) -> AnyPath:
        return self._folder / f"{first + 1}.json"

    def _key(self, lines: Sequence, first: int) -> str:
        return hashlib.sha256(repr((self._made_of, first, list(lines))).encode()).hexdigest()


# Longer inputs get a progress report.
LONG = 100
_LISTED = 10

Part = tuple[Sequence, int]  # raw lines, and the 0-based number of the first


def translate_lines(
    lines: Iterable,
    settings: LineSettings,
    runs: Sequence[AnyPath],
    *,
    name: str,
    unit: str = "line",
    total: int | None = None,
    worker: type[LineWorker] = LineTranslator,
) -> None:
    """Write the results of `lines` to `settings.output`, or standard output: translations, or those of another worker.

    `name` is the input's name in messages, and `unit` that of a line. Lines that have no result have an empty line in the output,
    and a message on standard error lists them. Raises UserError if there are no lines. On any error, an earlier output file stays
    as it was.
    """
    if settings.workers:
        require("ray", f"workers={settings.workers}", "leave workers out to work in this process")
    parts = _parts(lines, settings.lines_at_once)
    first = next(parts, None)
    if first is None:
        raise UserError(f"{name} is empty, but must have one sentence a line")
    # Text that went into a pipe cannot be continued.
    store = PartStore(settings.output, settings, runs) if settings.output and not is_stream(settings.output) else None
    with ExitStack() as stack:
        output = stack.enter_context(_open_output(settings.output))
        progress = None
        if (len(first[0]) if total is None else total) > LONG:
            progress = stack.enter_context(Progress(worker.done, total, unit=f"{unit}s"))
        failed: list[int] = []
        shown_kinds: set[str] = set()
        count = 0
        for translated in _compute(chain([first], parts), store, settings, runs, worker):
            output.write(translated.text.encode())
            output.flush()
            _print_messages(translated, name, shown_kinds, worker.result, unit)
            failed += [number for number, _ in translated.problems]
            count += translated.num_lines
            if progress:
                progress.update(translated.num_lines)
    if store:
        store.remove()
    if failed:
        listed = ", ".join(map(str, failed[:_LISTED])) + (", ..." if len(failed) > _LISTED else "")
        _print_message(f"{len(failed):,} of {count:,} {unit}s have no {worker.result}: {listed}")


def answer_lines(
    lines: Iterable,
    settings: LineSettings,
    runs: Sequence[AnyPath],
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
    translator = worker(settings, runs)
    tell(translator.describe())
    shown_kinds: set[str] = set()
    for number, line in enumerate(lines):
        translated = (translator.explain if explain else translator)([line], number)
        sys.stdout.buffer.write(translated.text.encode())
        sys.stdout.buffer.flush()
        _print_messages(translated, name, shown_kinds, worker.result)


def _print_messages(translated: Translated, name: str, shown_kinds: set[str], result: str, unit: str = "line") -> None:
    """Print messages about lines.

    A message about the complete input appears once for each kind; `shown_kinds` were printed before.
    """
    for kind in sorted(translated.notices.keys() - shown_kinds):
        _print_message(f"{name}: {translated.notices[kind]}")
        shown_kinds.add(kind)
    empty = [(number, f"{problem}; its {result} is empty") for number, problem in translated.problems]
    for number, message in sorted(empty + translated.notes):
        _print_message(f"{name}, {unit} {number}: {message}")


def _compute(
    parts: Iterable[Part],
    store: PartStore | None,
    settings: LineSettings,
    runs: Sequence[AnyPath],
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
    for result in _map(given, settings, runs, worker):
        lines, first = next(remaining)
        if store:
            store.keep(lines, first, result)
        yield result


def _map(
    parts: Iterable[Part],
    settings: LineSettings,
    runs: Sequence[AnyPath],
    worker: type[LineWorker],
) -> Iterator[Translated]:
    """Compute in this process, or with workers."""
    if settings.workers:
        from treenet.translation.ray_translate import map_with_ray

        yield from map_with_ray(parts, settings, runs, worker)
        return
    translator = worker(settings, runs)
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
