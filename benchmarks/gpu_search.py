"""Beam search for benchmarks/gpu.py: ours, plain and over trees, beside `generate` of the transformers library."""

from collections.abc import Callable

import numpy as np
import torch
from gpu_measure import count_kernels, count_waits, seconds_of
from gpu_report import Report
from search import NUM_LABELS, TARGET_PIECES, SearchCase, marian_searcher, random_sentences, searcher

from treenet.data.input_kinds import LEAVES
from treenet.models import VocabSizes, build_model


def measure_search(report: Report, size: str, case: SearchCase, device: torch.device, sentences: int, rounds: int) -> None:
    """Measure a batch of sentences, beam 5, exactly TARGET_PIECES pieces and EOS for every hypothesis; bf16 on a GPU."""
    half = device.type == "cuda"
    steps: dict[str, Callable[[], None]] = {}
    for name in ("transformer", "tree_transformer"):
        torch.manual_seed(0)
        model = build_model(case.model.model_copy(update={"name": name}), VocabSizes(case.pieces, NUM_LABELS)).eval().to(device)
        batch = random_sentences(sentences, case.pieces, np.random.default_rng(0), model.reads.for_device(device)).to(device)
        steps[name] = autocast(searcher(model, batch), device, half)
    sources = random_sentences(sentences, case.pieces, np.random.default_rng(0), LEAVES).to(device)
    theirs = marian_searcher(case, sources, torch.bfloat16 if half else torch.float32)
    if theirs is None:
        report.note("the search of transformers: the library is not installed")
    else:
        steps["transformers"] = theirs
    seconds = {name: seconds_of(step, device, warm_up=2, rounds=rounds) for name, step in steps.items()}
    for name, step in steps.items():
        report.add(
            "Search",
            size=size,
            by=name,
            **{"pieces/s": sentences * TARGET_PIECES / seconds[name]},
            **{"time of transformers": seconds["transformers"] / seconds[name] if theirs else None},
            **{"kernels a step": per_step(count_kernels(step, device)), "waits": count_waits(step, device)},
        )


def per_step(count: int | None) -> float | None:
    return None if count is None else count / (TARGET_PIECES + 1)


def autocast(search: Callable[[], None], device: torch.device, half: bool) -> Callable[[], None]:
    """Run the search under bf16 autocast."""

    def run() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            search()

    return run
