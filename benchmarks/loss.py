"""The loss from decoder states (treenet/tasks/losses.py) beside the loss of logits by PyTorch: time and memory.

    python benchmarks/loss.py --quick
    PYTHONPATH=. python benchmarks/loss.py                              # as in docs/results/training.md, a minute
    PYTHONPATH=. python benchmarks/loss.py --device cuda --dtype bf16

It prints one JSON line per figure. `time_ratio` and `memory_ratio` compare forward and backward of `projected_nll` with a linear
map to logits and their `cross_entropy`. Label smoothing is 0.1; there are 2,048 target tokens of a small and of the base model.
Time is CPU time on one thread, or time on a GPU; alternatives take turns.
"""

import argparse

import torch
import torch.nn.functional as F
from measure import Step, emit, peak_bytes, time_interleaved

from treenet.tasks.losses import projected_nll

TOKENS, SMOOTHING = 2048, 0.1
CASES = {"small": (128, 10_000), "base": (512, 32_000)}  # width, pieces


def measure(case: str, tokens: int, rounds: int, device: torch.device, half: bool) -> None:
    width, pieces = CASES[case]
    torch.manual_seed(0)
    states = torch.randn(tokens, width, device=device, requires_grad=True)
    table = (torch.randn(pieces, width, device=device) * width**-0.5).requires_grad_()
    targets = torch.randint(1, pieces, (tokens,), device=device)

    def from_logits() -> torch.Tensor:
        return F.cross_entropy(F.linear(states, table).float(), targets, reduction="sum", label_smoothing=SMOOTHING)

    def from_states() -> torch.Tensor:
        return projected_nll(states, table, targets, SMOOTHING).loss

    steps = {name: Step([states, table], forward, half) for name, forward in (("states", from_states), ("logits", from_logits))}
    times = time_interleaved(steps, device, rounds, budget_s=60)
    ratio, spread = times.ratio("states", "logits")
    emit("loss", case, "time_ratio", ratio, ms=round(1e3 * times.best("states"), 1), tokens=tokens, **spread)
    emit("loss", case, "memory_ratio", peak_bytes(steps["states"], device) / peak_bytes(steps["logits"], device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds, under 50 seconds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="bf16 is autocast")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        tokens, rounds = (256, 2) if options.quick else (TOKENS, 7)
        measure(case, tokens, rounds, torch.device(options.device), options.dtype == "bf16")


if __name__ == "__main__":
    main()
