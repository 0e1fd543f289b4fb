"""Translate raw text with a trained model: one line out for every line in, in order.

    tree-attention translate --out RUN input=FILE output=FILE
    echo "The old man saw a dog." | tree-attention translate --out RUN
    tree-attention translate --out RUN input=FILE --nbest 5 --scores --json
    tree-attention translate --out RUN input=FILE trees=FILE checkpoint=[20000,21000] ensemble=[RUN2]
    tree-attention translate --out RUN input=FILE score=FILE
    tree-attention translate --out RUN input=FILE --nbest 5 decoding.method=sampling decoding.top_p=0.9
    tree-attention translate --out RUN input=FILE must_appear=FILE must_not_appear=FILE prefix=FILE
    tree-attention translate --out RUN --interactive

RUN is the folder of a training run. The command parses the lines with the parser of the run's data set, or reads their trees from
a file of brackets. On a terminal, it translates each line after you type it. If it cannot translate a line, it writes an empty
line and a warning with the reason.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from treenet.cli.shipped import find_config, given_run
from treenet.runs.run_folder import checkpoint_names
from treenet.translation.settings import CONSTRAINTS, TranslateSettings
from treeproc.common.command_line import INTERRUPTED, ArgumentParser, build_arg_parser, command, loading
from treeproc.common.errors import CommandEnded
from treeproc.common.folder_kinds import claim_output
from treeproc.common.settings import UserError, load_settings, refuse_relative_in_job
from treeproc.common.storage import AnyPath, as_path
from treeproc.online.input_files import ask_for_lines, count_lines, read_raw_lines, refuse_output_name
from treeproc.online.raw_lines import RawLine

STDIN = as_path("/dev/stdin")


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, TranslateSettings, find_config=find_config, remote_out=True, reads_run=True)
    parser.add_argument("--nbest", type=int, metavar="N", help="the same as nbest=N")
    parser.add_argument("--scores", action="store_true", help="the same as scores=true")
    parser.add_argument("--json", action="store_true", help="the same as json_lines=true")
    parser.add_argument(
        "--interactive", action="store_true", help="translate lines of standard input one by one, with trees, n-best and scores"
    )
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    out = given_run(args)
    flags = {"nbest": args.nbest, "scores": args.scores or None, "json_lines": args.json or None}
    settings = load_settings(
        TranslateSettings, args.config, args.overrides, **{name: value for name, value in flags.items() if value is not None}
    )
    runs = [out, *settings.ensemble]
    source = settings.input if settings.input or settings.trees else STDIN
    constraints = {name: path for name in CONSTRAINTS if (path := getattr(settings, name)) is not None}
    paths = {"--out": out, "input": settings.input, "trees": settings.trees, "score": settings.score, **constraints}
    paths |= {"output": settings.output} | {f"ensemble.{i}": path for i, path in enumerate(settings.ensemble)}
    paths |= {f"checkpoint {name}": as_path(name) for name in settings.checkpoints if not checkpoint_names(name)}
    refuse_relative_in_job(paths)
    if args.interactive and (asked_for := _not_interactive(settings)):
        raise UserError(f"--interactive reads lines that you type, and shows text; leave out {', '.join(asked_for)}")
    typed = source is STDIN and sys.stdin is not None and sys.stdin.isatty()
    with loading():
        from treenet.translation.line_translator import input_form  # here, because it loads PyTorch
        from treenet.translation.translate_job import answer_lines, translate_lines

    if args.interactive or (typed and not _not_interactive(settings, shows_text=False)):
        with typed_lines() as lines:
            answer_lines(lines, settings, runs, name=str(STDIN), explain=args.interactive)
        return
    if settings.output is not None:
        claim_output(settings.output, {"input": source, "trees": settings.trees, "score": settings.score, **constraints})
        refuse_output_name(settings.output, "jsonl" if settings.json_lines else None)
    files = [path for path in (source, settings.trees, settings.score, *constraints.values()) if path is not None]
    form = input_form(settings, out)
    read = partial(read_raw_lines, source, settings.trees, settings.score, form, **constraints)
    total = count_if_files(files, read)
    translate_lines(read(), settings, runs, name=str(files[0]), unit=form.unit(source), total=total)


@contextmanager
def typed_lines() -> Iterator[Iterator[RawLine]]:
    """Ask for lines on the terminal. After the last one, and after Ctrl-C, the shell's prompt starts on a new line."""
    try:
        yield ask_for_lines(sys.stdin.buffer, lambda: print("> ", end="", file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise CommandEnded(INTERRUPTED) from None
    print(file=sys.stderr)


def count_if_files(paths: Sequence[AnyPath], read: Callable[[], Iterator[RawLine]]) -> int | None:
    """Return the number of lines of files, before hours of work; None if there is a pipe, which is counted during it."""
    return count_lines(read(), paths[0]) if all(path.is_file() or not path.exists() for path in paths) else None


def _not_interactive(settings: TranslateSettings, *, shows_text: bool = True) -> list[str]:
    """Return the settings that are only for files or many lines, and with `shows_text` those of the form of the output."""
    names = ["input", "trees", "score", *CONSTRAINTS, "output", "workers", *(["json_lines"] if shows_text else [])]
    return [name for name in names if getattr(settings, name)]
