"""Search for good settings, with the same number of trials for every system.

    tree-attention tune --config FILE.yaml --out TUNING data=DATA tune.trials=16
    tree-attention tune --sample --out TUNING data=DATA

FILE.yaml is a configuration of a training run, with or without a section `tune`. The section names the systems and the space: the
settings that trials draw. Ray Tune runs the trials. Optuna proposes their values, and ASHA stops bad ones early. A trial is a
training run in TUNING/cells.

The same command continues, also after a kill; more trials add to those that ended. TUNING/ledger.json has the state of every
trial. At the end, the command prints a table, and writes TUNING/tuning.json, TUNING/importance.png, and the best settings of each
system as TUNING/best-SYSTEM.yaml. If no trial of a system is done, the exit status is 1.
"""

import argparse

from treenet.cli.shipped import CONFIGS, find_config, find_settings
from treenet.extras.tuning.trials import Trials, TuningConfig, check_systems, end_without_result
from treeproc.common.command_line import ArgumentParser, build_arg_parser, command, loading
from treeproc.common.errors import require
from treeproc.common.files import atomic_write, locked
from treeproc.common.folder_kinds import CONFIG, SEARCH, claim_folder, mark_folder
from treeproc.common.settings import UserError, dump_settings, load_settings, refuse_relative_in_job

SAMPLE = CONFIGS / "tune_sample.yaml"


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, TuningConfig, find_config=find_config, remote_out=True, has_sample=True)
    parser.add_argument("--dry-run", action="store_true", help="show the trials so far; run nothing")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    require(("ray", "optuna", "matplotlib"), "a search over settings")
    path = find_settings(args, "data=DATA", SAMPLE)
    if args.out is None:
        raise UserError("give --out DIR, the folder of the search")
    config = load_settings(TuningConfig, path, args.overrides)
    refuse_relative_in_job({"data": config.data, "--out": args.out})
    out = args.out.resolve()
    config = config.with_pinned_encoder(out)
    if args.dry_run:
        for name in config.tune.systems:
            trials = Trials(out, config, name)
            states = ", ".join(f"{trial.number}: {trial.entry.status}" for trial in trials.trials) or "none yet"
            print(f"{name}: {len(trials.ended())} of {config.tune.trials_of(name)} trials ended ({states})")
        return
    claim_folder(out, SEARCH)
    with loading():
        from treenet.extras.tuning.ray_trials import run_trials  # here, as below, because it loads Ray and PyTorch
        from treenet.extras.tuning.report import write_tuning

    def read() -> dict[str, Trials]:
        return {name: Trials(out, config, name) for name in config.tune.systems}

    check_systems(read())  # settings that do not fit leave no folder
    mark_folder(out, SEARCH)
    with locked(out):
        systems = read()
        atomic_write(out / CONFIG, dump_settings(config).encode())
        for trials in systems.values():
            run_trials(config, trials)
        print(f"\n{write_tuning(config, systems, out)}")
    end_without_result(systems, out)
