"""Trees of treebank files as examples in the vocabulary of a data set."""

from collections.abc import Sequence
from pathlib import Path

from treeproc.common.storage import AnyPath
from treeproc.online.line_encoder import LineEncoder
from treeproc.parsers import Given
from treeproc.readers import read_rows


def read_examples(files: Sequence[Path], data: AnyPath) -> tuple[list[dict], list[str]]:
    """Return the examples of the trees of Penn Treebank files, and the trees as they are written.

    Raises UserError with file and line on bad input.
    """
    rows = [row for row in read_rows("brackets", files, ()) if row["trees"]]
    lines, given = [row["source"] for row in rows], [Given(row["words"], row["trees"]) for row in rows]
    encoder = LineEncoder(data, given_trees=True)
    examples = encoder.encode_parsed(lines, encoder.parse(lines, given), range(len(lines)))
    return list(examples), [row["trees"][0] for row in rows]
