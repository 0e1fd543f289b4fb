"""Draws translation.png: the nll on valid along study M, and what the tree gives by the number of pairs, beside the paper's.

python docs/results/draw_translation.py
"""

import numpy as np
from figures import RESULTS, SIZES, Figures, Row, difference, pairs, valid_curve
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from translation import STUDY_M, bleu, minus

from treenet.report.figures import FAINT, INK, SERIES, style

PAPER = {90_000: 3.3, 900_000: 1.6, 4_500_000: 1.0}  # figure 5a: the tree minus the Transformer, English-German
BLOCK_A = [Row("iwslt14_relative", model) for model in ("relative_tree", "relative")]


def draw_curves(axes: Axes) -> None:
    """Draw the nll on valid of every run of the first arms."""
    names = ("relative positions", "+ own trees", "+ trees of other sentences")
    for color, name, row in zip(SERIES, names, STUDY_M, strict=False):
        for number, one in enumerate(row.records):
            axes.plot(*zip(*valid_curve(one).items(), strict=True), color=color, lw=0.8, label=None if number else name)
    axes.set(ylim=(1.5, 3.0), xlabel="update", ylabel="nll a token on valid")
    axes.set_title("Study M, Multi30k: every run", loc="left", color=FAINT)
    axes.legend()


def draw_sizes(axes: Axes) -> None:
    """Draw the difference in BLEU by the number of pairs."""

    def draw(label: str, color: str, shift: float, points: list[tuple[float, Figures]]) -> None:
        size, found = np.array([number for number, _ in points]) * shift, np.array([figures for _, figures in points]).T
        axes.errorbar(size, found[0], [found[0] - found[1], found[2] - found[0]], fmt="o", color=color, ms=5, lw=1.4, label=label)

    sinusoids = [(pairs(row)[0].high, difference("", row)) for row in SIZES]
    relative = [(20_764, minus(bleu, *BLOCK_A)), (29_000, minus(bleu, STUDY_M[1], STUDY_M[0]))]
    draw("ours, sinusoids (first study)", SERIES[1], 1.0, sinusoids)
    draw("ours, relative positions (block A, study M)", SERIES[0], 1.1, relative)
    axes.plot(PAPER.keys(), PAPER.values(), "D", color=INK, ms=5, label="the paper, figure 5a")
    axes.axhline(0, color=FAINT, lw=0.8)
    axes.set(xscale="log", xlabel="pairs in training", ylabel="BLEU with the tree minus without, 95 %")
    axes.set_xticks([10_000, 100_000, 1_000_000], ["10,000", "100,000", "1,000,000"])
    axes.set_title("By the number of pairs", loc="left", color=FAINT)
    axes.legend(loc="lower right")


def main() -> None:
    with style():
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        curves, sizes = figure.subplots(1, 2)
        draw_curves(curves)
        draw_sizes(sizes)
        figure.savefig(RESULTS / "translation.png", dpi=110)


if __name__ == "__main__":
    main()
