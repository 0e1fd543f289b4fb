"""The overhead of training beside its arithmetic, and the cost of trees: ratios, measured in turn in one run.

    python benchmarks/training.py --quick                     # every case, under 50 seconds
    python benchmarks/training.py                             # as in docs/results/training.md, some minutes on two cores
    python benchmarks/training.py --cases tree --device cuda --dtype bf16

One JSON line per figure.
`data_wait_share`: share of the time that training waits for batches, of the demo's model and of the base model.
`resume_start_ratio`: CPU time of workflows/train_wmt.py from its start to its first update, resumed at step 10,000 / fresh.
`tree_to_plain_same_source`: tokens/s of a Tree Transformer / of a Transformer on the same leaves, at base size. It measures whole
updates with loader and optimiser.
`tree_to_plain_same_positions`: / of a Transformer with a leaf instead of each node.
`two_workers_to_one`: tokens/s of two gloo workers / of one, a thread each, the same global batches; wants two idle cores.
`checkpoint_share`: share of wall time that a checkpoint every 500 steps of the demo's model costs, from runs with and
without checkpoints.
`loader`: one process of the loader prepares batches of 4,096 tokens for an accelerator. The figures are leaves/s, and the bytes
of a batch in one buffer and as separate tensors. It also measures the time per batch of the training's own process: with such a
process, with a thread, and with a process of PyTorch's DataLoader.

The data are random trees of the shape of captions (15 leaves, n + m = 1.7 n). Times of one process are CPU time on one
thread, or wall time on a GPU; alternatives take turns; `min`, `median` and `max` are over rounds.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from measure import emit
from training_data import write_captions
from training_loader import measure_loader

from treenet.config import TrainConfig
from treenet.data.examples import Prefetcher
from treenet.jobs.train_run import run_training
from treenet.runs.checkpoint import ANCESTORS, take_snapshot, write_checkpoint
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import build_task
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer, train
from treeproc.common.settings import load_settings

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / "workflows" / "configs" / "sample.yaml"
NEVER = 10**9
RESUME_AT = 10_000
CHECKPOINT_EVERY = 500  # what `checkpoint_share` is for


def demo_config(data: Path, *overrides: str) -> TrainConfig:
    """Return the settings of the model of workflows/demo.py."""
    quiet = [f"{name}_every={NEVER}" for name in ("validate", "checkpoint")]
    return load_settings(TrainConfig, DEMO, ["workers=0", f"max_steps={NEVER}", "log_every=1", *quiet, *overrides], data=data)


def base_config(data: Path, *overrides: str) -> TrainConfig:
    """Transformer base, whose sizes are the defaults."""
    return load_settings(TrainConfig, None, ["workers=0", f"max_steps={NEVER}", *overrides], data=data)


def spread(values: Sequence[float]) -> dict[str, float]:
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()} | {"rounds": len(values)}


def measure_data_wait(case: str, config: TrainConfig, steps: int) -> None:
    """Measure the loop's own use of the batches, after two steps that warm up."""
    trainer = Trainer(build_task(config), Ranks(0, 1, torch.device("cpu")))
    with Prefetcher(trainer.rank_batches()) as stream:
        for index, rank_batch in enumerate(stream):
            if index == 2:
                begin, waited = time.monotonic(), stream.waited
            trainer.step(rank_batch)
            if index == steps + 1:
                break
        seconds = time.monotonic() - begin
        emit("training", case, "data_wait_share", (stream.waited - waited) / seconds, steps=steps, seconds=round(seconds, 2))


def resumed_folder(config: TrainConfig, folder: Path) -> Path:
    """Make a run whose last checkpoint is of step RESUME_AT."""
    run_training(config.model_copy(update={"max_steps": 1, "checkpoint_every": 1}), folder)
    trainer = Trainer(build_task(config), Ranks(0, 1, torch.device("cpu")))
    trainer.resume(folder)
    trainer.state.step = RESUME_AT
    meta = trainer.meta | {ANCESTORS: trainer.ancestors}
    snapshot = take_snapshot(RESUME_AT, trainer.train_step.model, trainer.train_step.optimizer, asdict(trainer.state), meta)
    write_checkpoint(folder, snapshot, keep=1)
    return folder


def start_seconds(config: Path, folder: Path) -> tuple[float, float]:
    """CPU and wall seconds of the command from its start to its first update."""
    known = len(read_metrics(folder)) if folder.exists() else 0
    command = [sys.executable, str(REPOSITORY / "workflows" / "train_wmt.py"), "--config", str(config), "--out", str(folder)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(read_metrics(folder)) <= known:
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
        time.sleep(0.005)
    wall = time.monotonic() - begin
    process.kill()
    usage = os.wait4(process.pid, 0)[2]
    return usage.ru_utime + usage.ru_stime, wall


def measure_resume(case: str, data: Path, scratch: Path, rounds: int) -> None:
    """Fresh and resumed starts take turns, every one from an untouched copy of its folder."""
    config = demo_config(data)
    path = scratch / "resume.yaml"
    path.write_text(config.model_dump_json())
    template, folder = resumed_folder(config, scratch / "resumed"), scratch / "start"
    seconds: dict[str, list[tuple[float, float]]] = {"fresh": [], "resumed": []}
    for _ in range(rounds):
        for name, times in seconds.items():
            if name == "resumed":
                shutil.copytree(template, folder)
            times.append(start_seconds(path, folder))
            shutil.rmtree(folder)
    cpu, wall = ([min(pair[i] for pair in seconds[name]) for name in ("resumed", "fresh")] for i in (0, 1))
    emit(
        "training",
        case,
        "resume_start_ratio",
        cpu[0] / cpu[1],
        wall_ratio=round(wall[0] / wall[1], 4),
        fresh_s=round(cpu[1], 2),
        rounds=rounds,
    )


def measure_trees(case: str, data: Path, flat: Path, options: argparse.Namespace, tokens: int, rounds: int) -> None:
    """Whole updates of three models on the same examples."""
    device = torch.device(options.device)
    settings = [f"batch.max_tokens={tokens}", f"precision={options.dtype}", f"use_gpu={str(device.type == 'cuda').lower()}"]
    configs = {
        "tree": base_config(data, *settings),
        "plain": base_config(data, *settings, "model.name=transformer"),
        "positions": base_config(flat, *settings, "model.name=transformer", f"batch.max_tokens={2 * tokens}"),
    }
    trainers = {name: Trainer(build_task(config), Ranks(0, 1, device)) for name, config in configs.items()}
    clock = time.monotonic if device.type == "cuda" else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    names = list(trainers)
    for index in range(rounds + 1):
        rows = trainers["tree"].plan.batch(index)
        for name in names[index % 3 :] + names[: index % 3]:
            begin = clock()
            trainers[name].step(trainers[name].micro_batches.rank_batch(rows))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if index:  # the first warms up
                seconds[name].append(clock() - begin)
    plan, source = trainers["tree"].plan, trainers["tree"].micro_batches.source
    target_tokens = sum(source.target_tokens(plan.batch(index)) for index in range(1, rounds + 1))
    for name, metric in (("plain", "tree_to_plain_same_source"), ("positions", "tree_to_plain_same_positions")):
        ratios = [other / tree for other, tree in zip(seconds[name], seconds["tree"], strict=True)]
        emit("training", case, metric, sum(seconds[name]) / sum(seconds["tree"]), **spread(ratios))
    for name, times in seconds.items():
        emit("training", case, f"{name}_tokens_per_s", target_tokens / sum(times), batch_tokens=tokens)


def _workers(rank: int, config: TrainConfig, steps: int, rounds: int, rendezvous: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    both = Trainer(build_task(config), Ranks(rank, 2, torch.device("cpu")))
    alone = Trainer(build_task(config), Ranks(0, 1, torch.device("cpu"))) if rank == 0 else None
    lines = []
    for index in range(rounds + 1):
        first = index * steps
        seconds = []
        for trainer in (alone, both):
            dist.barrier()
            begin = time.monotonic()
            if trainer:
                for step in range(first, first + steps):
                    trainer.step(trainer.micro_batches.rank_batch(trainer.plan.batch(step)))
            dist.barrier()
            seconds.append(time.monotonic() - begin)
        if index:
            lines.append(seconds[0] / seconds[1])
    if rank == 0:
        out.write_text(" ".join(map(str, lines)))
    dist.destroy_process_group()


def measure_workers(case: str, data: Path, scratch: Path, steps: int, rounds: int) -> None:
    """Run one worker, then both, on the same batches. The second waits during the first part."""
    sizes = ["model.d_model=256", "model.d_ff=1024", "model.num_encoder_layers=3", "model.num_decoder_layers=3"]
    config, out = base_config(data, *sizes, "batch.max_tokens=1024"), scratch / "ratios"
    rendezvous = f"file://{scratch / 'rendezvous'}"
    torch.multiprocessing.spawn(_workers, (config, steps, rounds, rendezvous, out), nprocs=2)
    ratios = [float(value) for value in out.read_text().split()]
    emit("training", case, "two_workers_to_one", statistics.median(ratios), d_model=256, **spread(ratios))


def measure_checkpoints(case: str, data: Path, scratch: Path, steps: int, rounds: int) -> None:
    """Seconds that a checkpoint adds to a run, over those of 500 steps."""
    every = steps // 4
    added: list[float] = []
    per_step: list[float] = []
    for _ in range(rounds):
        seconds = []
        for count in (NEVER, every):
            folder = scratch / "checkpoints"
            folder.mkdir()
            # One step more: the checkpoint at the end of a run is waited for, and belongs to no step.
            config = demo_config(data, f"max_steps={steps + 1}", f"checkpoint_every={count}")
            train(build_task(config), folder, show_progress=False)
            lines = [line["elapsed"] for line in read_metrics(folder) if line["event"] == "train"]
            seconds.append(lines[-1] - lines[0])
            shutil.rmtree(folder)
        added.append((seconds[1] - seconds[0]) / 4)
        per_step.append(seconds[0] / steps)
    step_s = statistics.median(per_step)
    share = statistics.median(added) / (CHECKPOINT_EVERY * step_s)
    emit("training", case, "checkpoint_share", share, added_s=[round(value, 4) for value in added], step_s=round(step_s, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ("wait", "resume", "tree", "workers", "checkpoint", "loader")
    parser.add_argument("--quick", action="store_true", help="few steps, under 50 seconds")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, metavar="CASE", help=f"of {', '.join(cases)}")
    parser.add_argument("--tokens", type=int, help="batch.max_tokens of the case tree (default 1024, or 128 with --quick)")
    parser.add_argument("--rounds", type=int, help="rounds of every case (default 7, or 2 with --quick)")
    parser.add_argument("--device", default="cpu", help="of the case tree: cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="of the case tree; bf16 is autocast")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    rows, rounds = (600, options.rounds or 2) if quick else (5000, options.rounds or 7)
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        scratch = Path(name)
        data = write_captions(scratch / "data", rows=rows, num_pieces=10_000)

        def wait() -> None:
            measure_data_wait("demo", demo_config(data), 10 if quick else 200)
            measure_data_wait("base", base_config(data, f"batch.max_tokens={128 if quick else 512}"), 2 if quick else 20)

        def tree() -> None:
            flat = write_captions(scratch / "flat", rows=rows, num_pieces=10_000, flat=True)
            measure_trees("base", data, flat, options, options.tokens or (128 if quick else 1024), rounds)

        run: dict[str, Callable[[], None]] = {
            "wait": wait,
            "resume": lambda: measure_resume("demo", data, scratch, 1 if quick else rounds),
            "tree": tree,
            "workers": lambda: measure_workers("d256", data, scratch, 2 if quick else 6, rounds),
            "checkpoint": lambda: measure_checkpoints("demo", data, scratch, 8 if quick else 60, 1 if quick else rounds),
            "loader": lambda: measure_loader("base", data, base_config, 3 if quick else 20, rounds),
        }
        for case in options.cases:
            run[case]()


if __name__ == "__main__":
    main()
