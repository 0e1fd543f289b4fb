"""Translate raw text with a trained model: one line out for every line in, in order.

    python workflows/translate.py --out RUN input=FILE output=FILE
    echo "The old man saw a dog." | python workflows/translate.py --out RUN
    python workflows/translate.py --out RUN input=FILE --nbest 5 --scores --json
    python workflows/translate.py --out RUN input=FILE trees=FILE checkpoint=[20000,21000] ensemble=[RUN2]
    python workflows/translate.py --out RUN input=FILE score=FILE

RUN is the folder of a training run. The lines are parsed on the fly by the parser that the data set
of the run was made with, or have their trees in a file of brackets. A line that cannot be translated
gives an empty line and a warning that says why; docs/translate.md has more.
"""

from collections.abc import Sequence

from treenet.inference.line_translator import TranslateSettings
from treenet.inference.run import checkpoint_names
from treenet.inference.translate_job import translate_lines
from treeproc.raw_lines import RawLineEncoder, count_lines, read_raw_lines
from treeproc.settings import UserError, build_arg_parser, load_settings, refuse_relative_in_job, run_cli
from treeproc.storage import as_path

STDIN = as_path("/dev/stdin")


def main(argv: Sequence[str]) -> None:
    parser = build_arg_parser(__doc__, TranslateSettings, remote_out=True)
    parser.add_argument("--nbest", type=int, metavar="N", help="the same as nbest=N")
    parser.add_argument("--scores", action="store_true", help="the same as scores=true")
    parser.add_argument("--json", action="store_true", help="the same as json_lines=true")
    args = parser.parse_intermixed_args(argv)
    if args.out is None or args.sample:
        raise UserError("translate.py needs --out RUN, the folder of a training run; it has no sample of its own")
    flags = {"nbest": args.nbest, "scores": args.scores or None, "json_lines": args.json or None}
    settings = load_settings(
        TranslateSettings, args.config, args.overrides, **{name: value for name, value in flags.items() if value is not None}
    )
    source = settings.input if settings.input or settings.trees else STDIN
    paths = {"--out": args.out, "input": settings.input, "trees": settings.trees, "score": settings.score}
    paths |= {"output": settings.output} | {f"ensemble.{i}": path for i, path in enumerate(settings.ensemble)}
    paths |= {f"checkpoint {name}": as_path(name) for name in settings.checkpoints if not checkpoint_names(name)}
    refuse_relative_in_job({name: path for name, path in paths.items() if path is not None})
    files = [path for path in (source, settings.trees, settings.score) if path is not None]
    # Files are counted before hours of work; what comes through a pipe is counted while it is translated.
    total = count_lines(files) if all(path.is_file() or not path.exists() for path in files) else None
    lines = read_raw_lines(source, settings.trees, settings.score)
    translate_lines(lines, settings, [args.out, *settings.ensemble], RawLineEncoder, name=str(files[0]), total=total)


if __name__ == "__main__":
    run_cli(main)
