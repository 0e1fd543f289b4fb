"""Translate raw text with a trained model: one line out for every line in, in order.

    python workflows/translate.py --out RUN input=FILE
    echo "The old man saw a dog." | python workflows/translate.py --out RUN

RUN is the folder of a training run. The lines are parsed on the fly by the parser that the data set
of the run was made with.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from pydantic import Field, PositiveInt

from treenet.config import DecodingConfig
from treenet.inference.evaluate import decoding_of
from treenet.inference.run import AVERAGED, checkpoint_names, load_run
from treenet.inference.translate import detokenize, translate_examples
from treenet.training.remote_run import read_run
from treeproc.line_encoder import LineEncoder
from treeproc.readers import read_lines
from treeproc.settings import Settings, UserError, build_arg_parser, load_settings, run_cli


class TranslateSettings(Settings):
    """What to translate and how."""

    input: Path = Field(Path("/dev/stdin"), description="raw text, one sentence a line, plain or .gz; unset, standard input")
    checkpoint: str = Field(
        AVERAGED, coerce_numbers_to_str=True, description="'averaged', the number of a step, or the path of a checkpoint folder"
    )
    lines_at_once: PositiveInt = Field(2000, description="lines that are parsed and translated together")
    decoding: DecodingConfig = Field(DecodingConfig(), description="beam search; what is not set here is as in the run")


def main(argv: Sequence[str]) -> None:
    args = build_arg_parser(__doc__, TranslateSettings, remote_out=True).parse_intermixed_args(argv)
    if args.out is None or args.sample:
        raise UserError("translate.py needs --out RUN, the folder of a training run; it has no sample of its own")
    settings = load_settings(TranslateSettings, args.config, args.overrides)
    with read_run(args.out, *checkpoint_names(settings.checkpoint)) as folder:
        run = load_run(folder, checkpoint=settings.checkpoint)
    encoder = LineEncoder(run.data)

    def rows() -> Iterator[dict]:
        lines, count = read_lines([settings.input]), 0
        while chunk := list(islice(lines, settings.lines_at_once)):
            yield from encoder.encode(chunk, first_id=count)
            count += len(chunk)

    decoding = decoding_of(settings.decoding, run)
    for found in translate_examples(run.model, rows(), decoding, window=settings.lines_at_once):
        print(detokenize(run.processor, found[0]), flush=True)


if __name__ == "__main__":
    run_cli(main)
