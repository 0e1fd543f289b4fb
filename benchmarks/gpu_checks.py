"""The checks of benchmarks/gpu.py before its measurements: the device computes the same as the CPU."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gpu_measure import noted_waits
from gpu_report import Report
from search import NUM_LABELS, random_sentences

from treenet.config import DecodingConfig, ModelConfig, TrainConfig
from treenet.models import VocabSizes, build_model
from treenet.tasks.base import build_task
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer
from treenet.translation.search import search_batch
from treeproc.common.settings import load_settings

GRADIENT_BOUND = 1e-3  # relative, in float32 of both
MODELS = ("transformer", "tree_transformer")
TINY = ["model.d_model=64", "model.d_ff=128", "model.num_heads=4", "model.num_encoder_layers=2", "model.num_decoder_layers=2"]


def run_checks(report: Report, data: Path, long_data: Path, device: torch.device) -> None:
    """Run one row per check. A failed check is also a row, and the measurements continue."""
    long_trees = ["batch.max_tokens=8192", "batch.max_leaves=2048", "batch.max_target_pieces=2048"]
    for name in MODELS:
        config, again = tiny_config(data, name), tiny_config(data, name, ["deterministic=true"])
        check(report, f"gradient, {name}", GRADIENT_BOUND, partial(gradient_error, config, device))
        long_config = tiny_config(long_data, name, long_trees)
        check(report, f"gradient, {name}, long trees", GRADIENT_BOUND, partial(gradient_error, long_config, device))
        check(report, f"search in float64, {name}", 0, partial(unequal_hypotheses, name, device))
        check(report, f"bits of a step done twice, {name}", 0, partial(unequal_bits, again, device))
        check(report, f"waits in a step, {name}", 0, partial(waits_of_step, config, device))


def check(report: Report, what: str, bound: float, error: Callable[[], float]) -> None:
    try:
        value, state = error(), ""
    except Exception as failure:  # one row reports it; the other rows are still useful
        value, state = float("nan"), f"{type(failure).__name__}: {str(failure).splitlines()[0][:120]}"
    report.add("Checks", check=what, error=float(value), bound=float(bound), holds=state or ("yes" if value <= bound else "NO"))


def tiny_config(data: Path, model: str, options: Sequence[str] = ()) -> TrainConfig:
    base = ["workers=0", "max_steps=1000", "precision=float32", "compile=false", "batch.max_tokens=1024", f"model.name={model}"]
    return load_settings(TrainConfig, None, [*base, *TINY, *options], data=data)


def trainer_on(config: TrainConfig, device: torch.device) -> Trainer:
    return Trainer(build_task(config), Ranks(0, 1, device))


def gradients(config: TrainConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter in the first step."""
    trainer = trainer_on(config, device)
    trainer.train_step.compute_gradient(trainer.micro_batches.rank_batch(trainer.plan.batch(0)), trainer.micro_batches, 0)
    return {name: parameter.grad for name, parameter in trainer.train_step.model.named_parameters()}


def gradient_error(config: TrainConfig, device: torch.device) -> float:
    """Return the largest relative error of a parameter's gradient against the CPU's, with dropout by the same masks."""
    ours, theirs = (
        {name: g.double().cpu() for name, g in gradients(config, one).items()} for one in (torch.device("cpu"), device)
    )
    scale = max(float(gradient.norm()) for gradient in ours.values())
    return max(float((theirs[name] - gradient).norm()) for name, gradient in ours.items()) / scale


def unequal_hypotheses(name: str, device: torch.device) -> int:
    """Return the number of sentences, of 32, whose hypotheses differ from the CPU's."""
    torch.manual_seed(0)
    sizes = ModelConfig(name=name, d_model=64, d_ff=128, num_heads=4, num_encoder_layers=2, num_decoder_layers=2)
    model = build_model(sizes, VocabSizes(500, NUM_LABELS)).double().eval()
    decoding = DecodingConfig(max_length_factor=0.5, max_length_offset=10)
    found = []
    for one in (torch.device("cpu"), device):
        batch = random_sentences(32, 500, np.random.default_rng(1), model.reads.for_device(one)).to(one)
        found.append([[h.ids for h in list_] for list_ in search_batch(model.to(one), batch, decoding, num_best=5)])
    return sum(one != other for one, other in zip(*found, strict=True))


def unequal_bits(config: TrainConfig, device: torch.device) -> int:
    """Return the number of parameters whose gradients differ between two runs of the same step."""
    first, again = (gradients(config, device) for _ in range(2))
    return sum(not torch.equal(gradient, again[name]) for name, gradient in first.items())


def waits_of_step(config: TrainConfig, device: torch.device) -> int:
    """Return how often the host waits for the device in an update, after one that warms up."""
    trainer = trainer_on(config, device)
    batches = [trainer.micro_batches.rank_batch(trainer.plan.batch(step)) for step in range(3)]
    trainer.step(batches[0])
    trainer.step(batches[1])
    with noted_waits(device) as waits:
        trainer.step(batches[2])
    if waits:
        print(f"waits of {config.model.name}: {', '.join(sorted(set(waits)))}", file=sys.stderr)
    return len(waits)
