"""Kills of a training run: it must end with the losses and weights of an undisturbed run, bit for bit.

    python benchmarks/training_kills.py              # 40 kills over 2,400 steps, about 15 minutes on two cores
    python benchmarks/training_kills.py --quick      # 3 kills over 240 steps

`workflows/train_wmt.py` trains on two Ray workers, once undisturbed. Then it trains into another folder, and SIGKILL hits the
driver, its process group, or one worker, at random steps. One time in five, it hits a driver at its start. The next driver starts
at once, beside the remaining processes of the one before.

It prints one JSON line per figure, and one line per kill on standard error. The exit status is 1 if a loss or a byte of the
weights differs, or if a driver fails without a kill.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kills import KINDS, LIMIT_S, Workflow, kill, lives, wait_for, workers_of
from measure import emit
from training_data import write_captions

from treenet.runs.checkpoint import WEIGHTS, latest_checkpoint
from treenet.runs.metrics_log import read_metrics
from treeproc.common.files import file_sha256

WORKER = "RayTrainWorker"  # as Ray Train calls them
LAST_KILL = 0.9  # share of the steps: after a late kill there may be nothing left to do
START_SHARE = 0.2  # share of the kills that hit a driver at its start
SETTINGS = {
    "model": {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100},
    "batch": {"max_tokens": 128},
    "validate_every": 200,
    "checkpoint_every": 20,
    "keep_checkpoints": 5,
    "log_every": 1,
    "workers": 2,
}


def last_step(run: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, 0 without one. It reads only the end of the file."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1])["step"]
    except (FileNotFoundError, IndexError, ValueError):
        return 0


@dataclass
class TrainingKiller:
    """Kills at planned steps, in random ways."""

    training: Workflow
    random: random.Random
    ready_s: float  # from the start of the undisturbed driver to its first step
    plan: list[tuple[int, str]]  # (step, what), the next one at the end
    done: Counter = field(default_factory=Counter)
    failed: int = 0
    begin: float = field(default_factory=time.monotonic)

    def disturb(self, folder: Path) -> None:
        """Run drivers until all kills are done or the run is finished, then one to the end."""
        while self.plan:
            with self.training.run(folder) as driver:
                early = self.done and self.plan[-1][1] != "worker" and self.random.random() < START_SHARE
                if early and lives(driver, self.random.uniform(0.2, self.ready_s)):
                    self.kill(driver, folder, "starting")
                while self.plan and driver.poll() is None:
                    step = self.plan[-1][0]
                    if wait_for(driver, lambda step=step: last_step(folder) >= step and workers_of(driver.pid, WORKER)):
                        self.kill(driver, folder, "training")
                if not self.plan and driver.poll() is None:  # the last one was a worker
                    driver.wait(LIMIT_S)
            if driver.returncode == 0:
                break
            if driver.returncode > 0:
                self.failed += 1
                print(f"a driver ended with status {driver.returncode}:\n{self.training.log()}", file=sys.stderr)
                if self.failed > 3:
                    return
        self.training.finish(folder)

    def kill(self, driver: subprocess.Popen, folder: Path, moment: str) -> None:
        what = self.plan[-1][1]
        if not kill(what, driver, workers_of(driver.pid, WORKER), self.random):
            return
        self.plan.pop()
        self.done[what, moment] += 1
        number, seconds = sum(self.done.values()), time.monotonic() - self.begin
        print(f"kill {number} at {seconds:.0f} s: {what}, {moment}, step {last_step(folder)}", file=sys.stderr, flush=True)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run) if line["event"] == "train"]


def validations(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["nll"]) for line in read_metrics(run) if line["event"] == "valid"]


def measure(folder: Path, scratch: Path, options: argparse.Namespace) -> bool:
    """Print all figures. Returns whether all is correct."""
    figure, rng = partial(emit, "training_kills"), random.Random(options.seed)
    data = write_captions(folder / "data", rows=1000, num_pieces=500)
    config = folder / "train.yaml"
    config.write_text(json.dumps(SETTINGS | {"data": str(data), "max_steps": options.steps}))
    training, undisturbed, killed = (
        Workflow("train_wmt.py", config, scratch, 4 * LIMIT_S),
        folder / "undisturbed",
        folder / "killed",
    )
    seconds = training.finish(undisturbed)
    trained = read_metrics(undisturbed)[-1]["elapsed"]
    figure("undisturbed", "seconds", seconds, steps=options.steps)
    kinds = [KINDS[i % len(KINDS)] for i in range(options.kills)]
    rng.shuffle(kinds)
    steps = sorted((rng.randrange(1, int(LAST_KILL * options.steps)) for _ in kinds), reverse=True)
    killer = TrainingKiller(training, rng, max(1.0, seconds - trained), list(zip(steps, kinds, strict=True)))
    killer.disturb(killed)
    training.end()
    for kind in KINDS:
        moments = {moment: count for (what, moment), count in sorted(killer.done.items()) if what == kind}
        figure(kind, "kills", sum(moments.values()), moments=moments)
    figure("all", "kills", sum(killer.done.values()), seconds=round(time.monotonic() - killer.begin, 1))
    figure("all", "drivers_failed_that_nobody_killed", killer.failed)
    expected, found = losses(undisturbed), losses(killed)
    different = sum(a != b for a, b in zip(expected, found, strict=False)) + abs(len(expected) - len(found))
    figure("all", "different_losses", different, steps=len(found))
    different += validations(undisturbed) != validations(killed)
    weights = [file_sha256(latest_checkpoint(run) / WEIGHTS) for run in (undisturbed, killed)]
    averages = [file_sha256(run / "averaged" / WEIGHTS) for run in (undisturbed, killed)]
    figure("all", "same_weights", int(weights[0] == weights[1] and averages[0] == averages[1]))
    passed = not different and not killer.failed and weights[0] == weights[1] and averages[0] == averages[1]
    figure("all", "passed", int(passed))
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="how many processes to kill (default %(default)s)")
    parser.add_argument("--steps", type=int, default=2400, help="updates of the run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed and when (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="3 kills over 240 steps")
    options = parser.parse_args()
    if options.quick:
        options.kills, options.steps = 3, 240
    scratch = Path(tempfile.mkdtemp(prefix="kills-"))  # Ray's sockets need a short path
    try:
        folder = scratch / "runs"
        folder.mkdir()
        sys.exit(not measure(folder, scratch, options))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
