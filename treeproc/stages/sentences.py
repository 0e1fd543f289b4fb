"""Running text as sentences, for format `documents`: a parser's tokeniser cuts the lines before the text stage writes them."""

from collections.abc import Iterator
from itertools import islice, pairwise

import pyarrow as pa

from treeproc.parsers import ParsedLine, ParserConfig, build_parser
from treeproc.trees.flat_trees import read_flat_trees

_LINES = 4096  # cut at once


def cut_sentences(rows: Iterator[dict], config: ParserConfig) -> Iterator[dict]:
    """Yield a row for each sentence of the lines `source`, with the other columns of its line.

    The words between blanks of the sentences are those of the line.
    """
    parser = build_parser(config.model_copy(update={"split_sentences": True, "scores": False}), words_only=True)
    while some := list(islice(rows, _LINES)):
        for row, parsed in zip(some, parser.parse([row["source"] for row in some]), strict=True):
            yield from (row | {"source": text} for text in sentences_of(row["source"], parsed))


def sentences_of(line: str, parsed: ParsedLine) -> list[str]:
    """Return the text of every sentence. One that ends without a blank after it goes on with the next one."""
    firsts = read_flat_trees(pa.array(parsed.trees)).leaf_edges[1:-1].tolist()
    starts = [place for place in map(parsed.words["start_char"].__getitem__, firsts) if line[place - 1].isspace()]
    return [line[start:end].strip() for start, end in pairwise([0, *starts, len(line)])]
