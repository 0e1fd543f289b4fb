"""Encoded rows as text for people."""

from collections.abc import Mapping

from treeproc.common.storage import AnyPath
from treeproc.subwords import LabelVocab, load_pieces
from treeproc.trees.spans import SpanTree, draw


def draw_row(row: Mapping, vocab: AnyPath) -> list[str]:
    """Draw the tree of a row (`Shard.row`) over its pieces with their tags, one node or piece a line.

    The names come from the vocabularies in folder `vocab`. A row with arcs has one more line: the governor (from 0, -1 is the
    root) and the relation of every word.
    """
    labels, tags = (LabelVocab.load(vocab / f"{name}.txt").names for name in ("labels", "pos_tags"))
    leaves, spans = row["leaves"], row["spans"]
    tree = SpanTree([labels[i] for i in row["nodes"]["label"]], spans["start"].tolist(), spans["end"].tolist())
    lines = [draw(tree, load_pieces(vocab).names(leaves["piece"]), [tags[i] for i in leaves["pos_tag"]])]
    if "arcs" in row:
        relations = LabelVocab.load(vocab / "deprels.txt").names
        arcs = zip(row["arcs"]["governor"], row["arcs"]["deprel"], strict=True)
        lines.append(f"arcs: {', '.join(f'{governor} {relations[deprel]}' for governor, deprel in arcs)}")
    return lines
