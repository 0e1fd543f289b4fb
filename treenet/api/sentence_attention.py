"""The attention of one translated line, as NumPy and as pandas.

Shapes: A decoder layers, H heads, T target positions, L leaves, N nodes, S = L + N positions.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from sentencepiece import SentencePieceProcessor

from treeproc.common.errors import require

if TYPE_CHECKING:
    import pandas

    from treenet.analysis.attention_stats import SentenceAttention


class Position(NamedTuple):
    """A leaf or a node of the source tree."""

    name: str  # piece of a leaf, label of a node
    is_node: bool
    start: int  # leaves [start, end)
    end: int


@dataclass(frozen=True)
class SentenceWeights:
    """Attention of target pieces to leaves and nodes. Every row of weights adds up to 1."""

    weights: np.ndarray  # [A, H, T, S] float32
    targets: list[str]  # [T] pieces, the last one </s>
    positions: list[Position]  # [S] leaves, then nodes in pre-order; of plain models leaves alone

    @property
    def mean(self) -> np.ndarray:
        """Return the mean over layers and heads [T, S]."""
        return self.weights.mean((0, 1))

    def to_pandas(self) -> "pandas.DataFrame":
        """Return one row a weight: layer, head, target_index, target, position, name, is_node, start, end, weight.

        Raises UserError if pandas is not installed.
        """
        require("pandas", "to_pandas()")
        import pandas

        axes = np.indices(self.weights.shape).reshape(4, -1)
        columns = dict(zip(("layer", "head", "target_index", "position"), axes, strict=True))
        frame = pandas.DataFrame(columns | {"weight": self.weights.ravel()})
        frame.insert(3, "target", np.array(self.targets, dtype=object)[frame["target_index"]])
        for place, name in enumerate(Position._fields, start=5):
            frame.insert(place, name, np.array([getattr(one, name) for one in self.positions])[frame["position"]])
        return frame


def name_positions(sentence: "SentenceAttention", processor: SentencePieceProcessor, labels: list[str]) -> list[Position]:
    """Return the positions of an example that a model attends to."""
    example, spans = sentence.example, sentence.example["spans"]
    pieces = [processor.id_to_piece(piece) for piece in example["leaves"]["piece"].tolist()]
    names = [labels[label] for label in example["nodes"]["label"][: sentence.num_nodes].tolist()]
    leaves = [Position(piece, False, place, place + 1) for place, piece in enumerate(pieces)]
    return leaves + [Position(name, True, int(spans["start"][i]), int(spans["end"][i])) for i, name in enumerate(names)]
