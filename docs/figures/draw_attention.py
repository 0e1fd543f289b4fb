"""Draws the README's picture: one sentence's tree, shaded by the attention of one target token.

    make demo
    PYTHONPATH=. python docs/figures/draw_attention.py demo-output/tree_transformer 38 wo docs/figures/attention.svg

The weights are means over the decoder's layers and heads.
"""

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib

from treenet.report.figures import draw_tree
from treenet.report.sentence_views import build_views, lay_out, piece_text
from treenet.runs.loading import load_run


def main(run: str, line: str, token: str, output: str) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "tree-attention"  # the same bytes every time
    (view,) = build_views("tree", load_run(Path(run)), "test", [int(line) - 1])
    place = [piece_text(piece) for piece in view.tokens].index(token)
    view = replace(view, weights=view.weights[:, :, place : place + 1])
    draw_tree(view, lay_out(view)).savefig(output, metadata={"Date": None})
    print(f"{view.source} -> {view.translation}")


if __name__ == "__main__":
    main(*sys.argv[1:])
