"""Translate a split with a trained model and score it: BLEU and chrF by sacrebleu.

    python workflows/evaluate.py --out RUN
    python workflows/evaluate.py --out RUN split=valid checkpoint=20000 decoding.beam_size=10

RUN is the folder of a training run. Writes RUN/translations.<split>.txt, one line per example in
the order of the input, and adds the scores to RUN/scores.json. Baselines and controls get names of
their own, for example translations.test.untrained.txt.
"""

from collections.abc import Sequence

from treenet.inference.evaluate import EvaluateSettings, evaluate_run, format_scores
from treenet.inference.run import checkpoint_names
from treenet.training.remote_run import read_run
from treeproc.settings import UserError, build_arg_parser, load_settings, run_cli
from treeproc.storage import as_path


def main(argv: Sequence[str]) -> None:
    parser = build_arg_parser(__doc__, EvaluateSettings, remote_out=True)
    parser.add_argument("--run", dest="out", type=as_path, metavar="DIR", help="the same as --out")
    args = parser.parse_intermixed_args(argv)
    if args.sample:
        raise UserError("evaluate.py has no sample of its own; run workflows/train_wmt.py --sample and give its folder as --out")
    if args.out is None:
        raise UserError("--out is missing: give the folder of a training run; --help shows the settings")
    settings = load_settings(EvaluateSettings, args.config, args.overrides)
    with read_run(args.out, *() if settings.untrained else checkpoint_names(settings.checkpoint)) as run:
        name, scores = evaluate_run(run, settings)
    print(format_scores({name: scores}))
    print(f"{scores['bleu_signature']}\n{scores['chrf_signature']}\n{args.out / f'translations.{name}.txt'}")


if __name__ == "__main__":
    run_cli(main)
