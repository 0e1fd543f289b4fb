"""The sections of sentences: all of them with their translations, and some with their tree and attention."""

import base64

import numpy as np

from treenet.report.report_model import Report
from treenet.report.sentence_views import BOX_HEIGHT, WORD_START, View, lay_out, piece_text


def lines_section(report: Report) -> dict:
    """Return the sentences, and the data of their script."""
    lines = report.scored.lines
    pictures = [views[0].line for views in report.inside.views.values()]
    return {"lines": lines, "data": lines and vars(lines) | {"pictures": pictures}}


def sentences_section(report: Report) -> dict:
    """Return the pictures of sentences, in order."""
    return {"pictures": list(map(_picture, report.inside.pictures)), "box_height": BOX_HEIGHT}


def _picture(view: View) -> dict:
    """Return a view, the layout of its tree, the target pieces by word with their places, and the data of its script."""
    layers, heads, _, positions = view.weights.shape
    layout, pieces, leaves = lay_out(view), list(map(piece_text, view.tokens[:-1])), list(map(piece_text, view.leaves))
    words: list[list[tuple[int, str]]] = []  # buttons of a word stay on one line
    for place, (token, piece) in enumerate(zip(view.tokens, pieces, strict=False)):
        if not place or token.startswith(WORD_START):
            words.append([])
        words[-1].append((place, piece))
    own = view.self_weights
    data = {
        "layers": layers,
        "heads": heads,
        "positions": positions,
        "leaves": len(leaves),
        "tokens": [*pieces, "end of sentence"],
        "names": leaves + [f"{box.text}\t{box.phrase}" for box in layout.boxes[len(leaves) :]],
        "weights": pack(view.weights),
        "encoder": own is not None and {"layers": own.shape[0], "weights": pack(own)},
    }
    return {"view": view, "layout": layout, "words": words, "data": data}


def pack(weights: np.ndarray) -> str:
    """Pack weights between 0 and 1 as base64 of little-endian 16-bit numbers; page.js reads them."""
    return base64.b64encode(np.rint(weights * 65535).astype("<u2").tobytes()).decode()
