"""Beam search for benchmarks/gpu.py: ours over three caches, plain and over trees, beside transformers and CTranslate2."""

from collections.abc import Callable

import numpy as np
import torch
from gpu_ctranslate2 import ctranslate2_searcher
from gpu_measure import count_kernels, count_waits, seconds_of
from gpu_report import Report
from search import NUM_LABELS, TARGET_PIECES, SearchCase, marian_searcher, random_sentences, searcher

from treenet.data.input_kinds import LEAVES
from treenet.models import VocabSizes, build_model
from treenet.translation.caches import Steps

CACHES = {Steps.GRID: "growing cache", Steps.STATIC: "static cache", Steps.COMPILED: "static cache, compiled"}


def measure_search(
    report: Report, size: str, case: SearchCase, device: torch.device, sentences: int, rounds: int, compiled: bool = False
) -> None:
    """Measure a batch of sentences, beam 5, exactly TARGET_PIECES pieces and EOS for every hypothesis; bf16 on a GPU.

    `compiled`: our search with compiled steps, which takes minutes. Without it, all other searches.
    """
    half = device.type == "cuda"
    ways: dict[str, Callable[[], None]] = {}
    sources = random_sentences(sentences, case.pieces, np.random.default_rng(0), LEAVES).to(device)
    for name in ("transformer", "tree_transformer"):
        torch.manual_seed(0)
        sizes = case.model.model_copy(update={"name": name})
        model = build_model(sizes, VocabSizes(case.pieces, NUM_LABELS)).eval().to(device)
        batch = random_sentences(sentences, case.pieces, np.random.default_rng(0), model.reads.for_device(device)).to(device)
        for steps, cache in CACHES.items():
            if (steps is Steps.COMPILED) == compiled:
                ways[f"{name}, {cache}"] = autocast(searcher(model, batch, steps), device, half)
        if name == "transformer" and not compiled:
            try:
                ways["CTranslate2"] = ctranslate2_searcher(model, sizes, sources, half)
            except ImportError:
                report.note("the search of CTranslate2: the library is not installed")
    if not compiled:
        theirs = marian_searcher(case, sources, torch.bfloat16 if half else torch.float32)
        if theirs is None:
            report.note("the search of transformers: the library is not installed")
        else:
            ways["transformers"] = theirs
        if not half:
            report.note("searches with compiled steps: measured on GPUs alone, since compiling for a CPU takes minutes")
    seconds = {name: seconds_of(way, device, warm_up=2, rounds=rounds) for name, way in ways.items()}
    for name, way in ways.items():
        report.add(
            "Search",
            size=size,
            by=name,
            **{"pieces/s": sentences * TARGET_PIECES / seconds[name]},
            **{f"time of {other}": ratio(seconds, other, name) for other in ("transformers", "CTranslate2")},
            **{"ms": 1e3 * seconds[name], **count_kernels(way, device).columns(), "waits": count_waits(way, device)},
        )


def ratio(seconds: dict[str, float], other: str, name: str) -> float | None:
    return seconds[other] / seconds[name] if other in seconds else None


def autocast(search: Callable[[], None], device: torch.device, half: bool) -> Callable[[], None]:
    """Run the search under bf16 autocast."""

    def run() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            search()

    return run
