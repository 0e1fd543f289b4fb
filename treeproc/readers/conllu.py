"""Dependency treebanks in CoNLL-U; `treeproc/trees/conllu.py` defines a leaf."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from treeproc.readers.numbered_lines import read_texts
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.conllu import Leaves, read_leaves
from treeproc.trees.spans import flat_tree, write_brackets


def read_conllu(source: Sequence[Path], target: Sequence[Path]) -> Iterator[dict]:
    """Read the sentences of `.conllu` files."""
    return (row for name, lines in read_texts(source) for row in read_sentences(lines, name))


def read_sentences(lines: Iterator[str], name: str) -> Iterator[dict]:
    """Return rows: source, words, arcs, and one flat tree with the tags. Raises UserError with file and line."""
    return map(_row, read_leaves(lines, name))


def _row(leaves: Leaves) -> dict:
    tags = [xpos or upos or UNANALYSED for xpos, upos in zip(leaves.xpos, leaves.upos, strict=True)]
    return {
        "source": leaves.text,
        "words": {"text": leaves.words, "start_char": leaves.starts, "end_char": leaves.ends},
        "trees": [write_brackets(flat_tree(len(tags)), leaves.words, tags)],
        "arcs": {"governor": leaves.governors, "deprel": leaves.deprels},
    }
