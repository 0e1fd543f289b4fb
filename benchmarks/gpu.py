"""All measurements on a GPU in one command: checks first, then speed at base size, then the other sizes.

    PYTHONPATH=. python benchmarks/gpu.py --out FILE.md            # on a GPU, a few minutes or more
    PYTHONPATH=. python benchmarks/gpu.py --out FILE.md --quick    # every section at toy size, also on a CPU
    PYTHONPATH=. python benchmarks/gpu.py --out FILE.md --sections training search

FILE.md is complete after every row. So an interrupted run keeps all its measurements; FILE.png is drawn at the end. Rows are also
JSON lines on standard output. Neither Ray nor Stanza is needed. If a library for comparison is not installed, the section "Left
out" names it.

Sections: *Checks* compares gradients of whole updates (float32, with dropout), searches (float64) and repeated steps with the
CPU. *Training* has target tokens per second of whole updates, with loader and optimiser. MFU is the FLOPs of matrix products on
real tokens, divided by the peak of the card's data sheet. It also has the kernels of one update, their time, and how often
the host waits.

*Search*: batch 64, beam 5, 50 pieces. *Encoder layer*: forward and backward, beside `nn.TransformerEncoderLayer` and a plain
layer with FlexAttention over packed rows. *Loss*: `projected_nll` beside others. Data and weights are random. A GPU computes in
bf16.
"""

import argparse
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_checks import run_checks
from gpu_layers import CASES, QUICK_CASES, measure_layers
from gpu_report import Report
from gpu_search import measure_search
from gpu_training import SIZES, measure_losses, measure_training
from search import SearchCase
from training_data import write_captions

from treenet.config import ModelConfig

MODELS = ("tree_transformer", "transformer")
SECTIONS = CHECKS, TRAINING, SEARCH, LAYER, LOSS = ("checks", "training", "search", "layer", "loss")
Part = tuple[str, Callable[[], None]]  # a section, and a measurement for it


def parts(report: Report, data: Path, long_data: Path, device: torch.device) -> Iterator[Part]:
    """Return the measurements, the most important first."""

    def train(size: str, model: str, tokens: int, compiled: bool) -> Part:
        return TRAINING, lambda: measure_training(report, data, size, model, tokens, 30, device, compiled)

    def search(size: str, compiled: bool) -> Part:
        case = SearchCase(ModelConfig(**SIZES[size]), 32_000)
        return SEARCH, lambda: measure_search(report, size, case, device, 64, 5, compiled)

    def layers(case: str, compiled: bool) -> Part:
        return LAYER, lambda: measure_layers(report, case, CASES[case], device, compiled, 20)

    # What is compiled comes after what is not: it takes minutes.
    yield CHECKS, lambda: run_checks(report, data, long_data, device)
    yield from (train("base", model, 32_768, False) for model in MODELS)
    yield search("base", False)
    yield from (layers(case, False) for case in ("base, sentences", "base, documents"))
    yield LOSS, lambda: measure_losses(report, 32_768, 512, 32_000, device, 10)
    yield from (train("base", model, 32_768, True) for model in MODELS)
    yield from (layers(case, True) for case in ("base, sentences", "base, documents"))
    yield search("base", True)
    for size, tokens in (("tiny", 4_096), ("big", 16_384)):
        yield search(size, False)
        yield from (train(size, model, tokens, True) for model in MODELS)
        yield search(size, True)
    yield layers("big, sentences", True)


def quick_parts(report: Report, data: Path, long_data: Path, device: torch.device) -> Iterator[Part]:
    """Return every section at toy size."""
    small = SearchCase(ModelConfig(**{**SIZES["tiny"], "num_encoder_layers": 1, "num_decoder_layers": 1}), 500)
    yield CHECKS, lambda: run_checks(report, data, long_data, device)
    for model in MODELS:
        yield TRAINING, lambda model=model: measure_training(report, data, "tiny", model, 256, 2, device, False)
    yield SEARCH, lambda: measure_search(report, "tiny", small, device, 2, 1)
    for name, case in QUICK_CASES.items():
        yield LAYER, lambda name=name, case=case: measure_layers(report, name, case, device, False, 2)
    yield LOSS, lambda: measure_losses(report, 64, 32, 500, device, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.md", help="the page to write")
    parser.add_argument("--quick", action="store_true", help="toy sizes, under two minutes")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--device", type=torch.device, help="default: cuda where there is one, else cpu")
    options = parser.parse_args()
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        if not options.quick:
            parser.error("there is no GPU here: --quick tries every section at toy size on the CPU")
        torch.set_num_threads(1)
    report = Report(options.out, shlex.join(["python", *sys.argv]), device)
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        rows, pieces = (300, 500) if options.quick else (16_000, 32_000)
        data = write_captions(Path(name) / "data", rows=rows, num_pieces=pieces, mean_leaves=15 if options.quick else 28)
        long_data = write_captions(Path(name) / "long", rows=16, num_pieces=pieces, mean_leaves=400)
        for section, measure in (quick_parts if options.quick else parts)(report, data, long_data, device):
            if section not in options.sections:
                continue
            try:
                measure()
            except Exception as error:  # the other parts are still useful
                traceback.print_exc()
                report.note(f"a part that failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    report.finish()


if __name__ == "__main__":
    main()
