"""The commands of studies: over models, sizes of data and seeds in translation, and over systems and seeds of other tasks."""

import argparse
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any

from treenet.cli.shipped import CONFIGS, find_config, find_settings
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.settings import ScalingConfig
from treenet.experiments.study_grid import StudyConfig, add_study_options
from treeproc.common.command_line import ArgumentParser, Command, build_arg_parser, loading
from treeproc.common.errors import require
from treeproc.common.settings import UserError, load_settings, refuse_relative_in_job
from treeproc.readers import read_lines

# Settings of compare-seeds without a configuration.
_DEFAULTS: dict[str, Any] = {"task": "classification"}


def _scaling() -> ArgumentParser:
    """Run a data-size study, as in figure 5a of the paper: several models, shares of the training data, and seeds.

        tree-attention scaling --config FILE.yaml --out STUDY data=DATA grid.fractions=[0.1,1] grid.seeds=[1,2]
        tree-attention scaling --sample --out STUDY data=DATA

    FILE.yaml is a configuration of tree-attention train, with or without a `grid`. All cells use the same shards and the same
    vocabulary. A larger share contains every smaller one. Each cell is a separate run in STUDY/cells. STUDY/ledger.json has the
    state of every cell: done, running or failed.

    The same command continues: it runs missing and failed cells. A larger grid adds cells. With workers=0, several such commands
    may work on one study. At the end, the command prints a table and writes STUDY/scaling.json and the plot STUDY/scaling.png and
    .svg. Intervals and tests over seeds need three seeds.
    """
    return _parser(getdoc(_scaling), ScalingConfig, has_sample=True)


def _compare_seeds() -> ArgumentParser:
    """Compare classifiers, models of relatedness or language models over seeds, as in Tables 2 and 3.

        tree-attention compare-seeds --config seeds_sst5 --out COMPARISON data=DATA
        tree-attention compare-seeds --config FILE.yaml --out COMPARISON data=DATA grid.seeds=[1,2,3]

    FILE.yaml is a configuration of tree-attention train with a `grid` of systems and seeds. Each cell is a separate run in
    COMPARISON/cells. COMPARISON/ledger.json has the state of every cell: done, running or failed.

    The same command continues: it runs missing and failed cells. A larger grid adds cells. At the end, the command prints a table
    and writes COMPARISON/comparison.json. The table has statistical tests from three seeds on.
    """
    return _parser(getdoc(_compare_seeds), SeedsConfig, without_config=_DEFAULTS)


def _parser(doc: str | None, settings: type[StudyConfig], **more: Any) -> ArgumentParser:
    parser = build_arg_parser(str(doc), settings, find_config=find_config, remote_out=True, **more)
    add_study_options(parser)
    return parser


def _run(args: argparse.Namespace, settings: type[StudyConfig], sample: Path | None = None, **defaults: Any) -> None:
    require(("matplotlib", "scipy"), "the report of a study")  # at the end of the study: refused here, before the first cell
    path = find_settings(args, "data=DATA", sample)
    if args.out is None:
        raise UserError("give --out DIR, the folder of the study")
    config = load_settings(settings, path, args.overrides, **({} if path else defaults))
    places = {"data": config.data, "grid.protocol": config.grid.protocol}
    refuse_relative_in_job({**places, "--out": args.out, "--records": args.records})
    with loading():
        from treenet.experiments import scaling_report, seeds_report  # here, as below, because it loads PyTorch
        from treenet.experiments.study import make_study, run_study, show_study

    form = scaling_report.FORM if settings is ScalingConfig else seeds_report.FORM
    more = [list(read_lines([path])) for path in getattr(config.grid, "more_references", ())]
    study = make_study(form, config, args.out.resolve(), args.records and args.records.resolve(), more)
    if args.dry_run:
        print(show_study(study))
        return
    run_study(study)


scaling = Command(_scaling, partial(_run, settings=ScalingConfig, sample=CONFIGS / "scaling_sample.yaml"))
compare_seeds = Command(_compare_seeds, partial(_run, settings=SeedsConfig, **_DEFAULTS))
