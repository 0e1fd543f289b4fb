"""The cost of a layer by the length of the input, from 32 to 4096 leaves; a plot for docs/results.

    python benchmarks/layer_growth.py --out docs/results/layer_growth.png

One document of sentences per batch; the number of nodes is 0.8 times that of leaves. Times are CPU time of one thread, forward +
backward, float32. The curves are the tree layer, its accumulation alone, a plain layer on leaves and nodes, and the paper's
tensor S while it needs less than 4 GB. It prints one JSON line per figure as `layer.py` does. --quick stops at 512 leaves,
without a plot.
"""

import argparse
from pathlib import Path

import torch
from layer import SLOW_LIMIT_BYTES, LayerConfig, TreeDefaults
from layer_baselines import SlowTreeAttention, slow_bytes
from layer_trees import random_structure
from measure import Step, emit, time_interleaved

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CURVES = {"plain": "plain layer", "tree": "tree layer", "accumulation": "accumulation alone", "naive": "tensor S as written"}


def measure_length(num_leaves: int, rounds: int) -> dict[str, float]:
    """Measure the seconds of each curve."""
    torch.manual_seed(0)
    config, device = LayerConfig(), torch.device("cpu")
    structure = random_structure(1, num_leaves, num_leaves * 4 // 5, document=num_leaves > 100)
    shape = (1, num_leaves + structure.num_nodes, config.d_model)
    source, vectors = (torch.randn(shape, requires_grad=True) for _ in range(2))
    tree, plain = config.encoder_layer(TreeDefaults()), config.encoder_layer()
    accumulation = tree.self_attention.accumulation
    steps = {
        "tree": Step([source, *tree.parameters()], lambda: tree(source, None, structure)),
        "plain": Step([source, *plain.parameters()], lambda: plain(source)),
        "accumulation": Step(
            [source, vectors, *accumulation.parameters()], lambda: accumulation.accumulate(source, vectors, structure)
        ),
    }
    if slow_bytes(structure, config.d_model) < SLOW_LIMIT_BYTES:
        naive = config.encoder_layer(TreeDefaults())
        naive.self_attention = SlowTreeAttention(naive.self_attention, structure)
        steps["naive"] = Step([source, *naive.parameters()], lambda: naive(source))
    times = time_interleaved(steps, device, rounds, budget_s=60)
    return {name: times.best(name) for name in steps}


def plot(results: dict[int, dict[str, float]], path: Path) -> None:
    """Plot seconds over leaves, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, label in CURVES.items():
        points = [(length, seconds[name]) for length, seconds in results.items() if name in seconds]
        axes.loglog(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xticks(list(results), [str(length) for length in results], minor=False)
    axes.minorticks_off()
    axes.set(xlabel="leaves (nodes = 0.8 leaves)", ylabel="seconds, forward + backward, one CPU thread")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 512 leaves, under 50 seconds")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of a length")
    parser.add_argument("--out", type=Path, metavar="PNG", help="plot to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for length in LENGTHS[:5] if options.quick else LENGTHS:
        results[length] = measure_length(length, 2 if options.quick else options.rounds)
        for name, seconds in results[length].items():
            emit("layer_growth", f"n{length}", f"{name}_ms", 1e3 * seconds)
    if options.out:
        plot(results, options.out)


if __name__ == "__main__":
    main()
