"""Raw lines to encoded rows, with the parser and vocabulary of an existing data set."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from treeproc.arrow import batch_views, pick, record_batches
from treeproc.parsers import Parser, ParserConfig, build_parser, describe_parser
from treeproc.parsers.config import PARSED
from treeproc.schema import PARSED_SCHEMA
from treeproc.settings import UserError, differences
from treeproc.shards import read_index
from treeproc.stages.encode import Encoder, TreeConfig


class LineEncoder:
    """Parses and encodes lines as the data set in folder `data` was made.

    Raises UserError when the parser's models are not the ones that the index of `data` names.
    """

    def __init__(self, data: Path):
        index = read_index(data / "encoded")
        config = ParserConfig.model_validate(index["parser_settings"])
        changed = differences(index["parser"], describe_parser(config))
        if changed:
            raise UserError(f"the parser is not the one that {data} was made with ({'; '.join(changed)}); install that one")
        self._parser: Parser = build_parser(config)
        # One side is enough here: the leaves' side of the data set is called the source of these lines.
        tree = TreeConfig.model_validate({**index["tree_settings"], "side": "source"})
        self._encoder = Encoder(data / "encoded" / "vocab", tree)

    def encode(self, lines: Sequence[str], first_id: int = 0) -> list[dict]:
        """Rows of an encoded shard without target, one a line; an empty line has no leaves."""
        full = [i for i, line in enumerate(lines) if line]
        empty = {"words": {"text": [], "start_char": [], "end_char": [], "pos_tag": []}, "trees": [], "parse_status": PARSED}
        parsed = [{"example_id": first_id + i, **empty} for i in range(len(lines))]
        for i, analysed in zip(full, self._parser.parse([lines[i] for i in full]), strict=True):
            parsed[i].update(vars(analysed))
        rows = []
        for batch in record_batches(parsed, PARSED_SCHEMA):
            views = batch_views(batch)
            text = {"example_id": views["example_id"], "source": pa.array(lines[len(rows) : len(rows) + len(batch)])}
            encoded = batch_views(self._encoder.encode(text, views))
            rows += [{name: pick(column, i) for name, column in encoded.items()} for i in range(len(batch))]
        return [row | {"tgt_pieces": np.zeros(0, dtype=np.int32)} for row in rows]
