"""Training for benchmarks/gpu.py: whole updates with loader and optimiser, and the loss alone beside other implementations."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_flops import Work, peak_tflops, training_flops
from gpu_measure import count_kernels, count_waits, peak_gib, seconds_of, synchronize
from gpu_report import Report
from torch import Tensor

from treenet.config import TrainConfig
from treenet.tasks.base import build_task
from treenet.tasks.losses import projected_nll
from treenet.training.batch_stream import BatchStream
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer
from treeproc.common.settings import load_settings

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "d_ff": 256, "num_heads": 4, "num_encoder_layers": 4, "num_decoder_layers": 4},
    "base": {},  # the defaults
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16},
}
WARM_UP = 5


def training_config(data: Path, size: str, model: str, tokens: int, device: torch.device, compiled: bool) -> TrainConfig:
    sizes = [f"model.{name}={value}" for name, value in SIZES[size].items()]
    where = ["workers=0", f"use_gpu={str(device.type == 'cuda').lower()}", f"compile={str(compiled).lower()}"]
    settings = [*where, f"max_steps={10**9}", f"model.name={model}", f"batch.max_tokens={tokens}", *sizes]
    return load_settings(TrainConfig, None, settings, data=data)


def measure_training(
    report: Report, data: Path, size: str, model: str, tokens: int, steps: int, device: torch.device, compiled: bool
) -> None:
    """Updates of one model after some that warm up, and the same updates again; tokens are target tokens."""
    config = training_config(data, size, model, tokens, device, compiled)
    trainer = Trainer(build_task(config), Ranks(0, 1, device))
    pieces = trainer.meta["num_pieces"]
    tree = model == "tree_transformer"
    with BatchStream(trainer.task, trainer.ranks, trainer.data, range(WARM_UP + steps)) as stream:
        batches = iter(stream)
        for _ in range(WARM_UP):
            trainer.step(next(batches))
        trainer.settle()
        synchronize(device)
        waited, begin = stream.waited, time.perf_counter()
        measured = []
        for rank_batch in batches:
            trainer.step(rank_batch)
            measured.append(rank_batch)
        trainer.settle()
        synchronize(device)
        seconds = time.perf_counter() - begin
        share = (stream.waited - waited) / seconds

    def repeat() -> None:
        for rank_batch in measured:
            trainer.step(rank_batch)
        trainer.settle()

    again = seconds_of(repeat, device, warm_up=0, rounds=1)
    last = measured[-1]
    kernels = count_kernels(lambda: trainer.step(last), device)
    waits = count_waits(lambda: trainer.step(last), device)
    memory = peak_gib(lambda: trainer.step(last), device)
    targets, flops, padding, positions = 0, 0, 0, 0
    for rank_batch in measured:
        for batch in rank_batch.batches:
            work = Work.of(batch, tree)
            targets += work.targets
            flops += training_flops(work, config.model, pieces)
        padding += rank_batch.padding
        positions += rank_batch.positions
    rate, peak = flops / seconds / 1e12, peak_tflops(device)
    report.add(
        "Training",
        size=size,
        model=model,
        compiled=compiled,
        **{"tokens/s": targets / seconds, "TFLOP/s": rate, "MFU": rate / peak if peak else None},
        **{"ms": 1e3 * seconds / steps, "ms, shapes seen before": 1e3 * again / steps},
        **{"memory, GiB": memory, **kernels.columns(), "waits": waits},
        **{"padding": padding / positions, "waited for data": share, "batch": tokens},
    )


def measure_losses(report: Report, tokens: int, d_model: int, pieces: int, device: torch.device, rounds: int) -> None:
    """Loss and gradients of states [tokens, D] under a table [pieces, D], label smoothing 0.1."""
    half = device.type == "cuda"
    states = torch.randn(tokens, d_model, device=device, requires_grad=True)
    table = torch.nn.Parameter(torch.randn(pieces, d_model, device=device) * d_model**-0.5)
    targets = torch.randint(4, pieces, (tokens,), device=device)
    losses: dict[str, Callable[[], Tensor]] = {
        "projected_nll": lambda: projected_nll(states, table, targets, 0.1, ignored=None).loss,
        "linear and cross_entropy": lambda: F.cross_entropy(states @ table.t(), targets, label_smoothing=0.1, reduction="sum"),
    }
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        report.note("the fused linear cross-entropy of Liger: the library liger-kernel is not installed")
    else:
        liger = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1, reduction="sum")
        losses["Liger"] = lambda: liger(table.to(torch.bfloat16) if half else table, states.to(torch.bfloat16), targets)
    for name, loss in losses.items():

        def step(loss: Callable[[], Tensor] = loss) -> None:
            states.grad = table.grad = None
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
                value = loss()
            value.backward()

        seconds = seconds_of(step, device, warm_up=3, rounds=rounds)
        counts = {**count_kernels(step, device).columns(), "waits": count_waits(step, device)}
        report.add(
            "Loss", by=name, tokens=tokens, pieces=pieces, ms=1e3 * seconds, **{"memory, GiB": peak_gib(step, device)}, **counts
        )
