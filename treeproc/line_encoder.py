"""Raw lines to encoded rows, with the parser and vocabulary of an existing data set."""

from collections.abc import Sequence
from pathlib import Path

from treeproc.parsers import Parser, ParserConfig, build_parser, describe_parser
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
        self._encoder = Encoder(data / "encoded" / "vocab", TreeConfig.model_validate(index["tree_settings"]))

    def encode(self, lines: Sequence[str], first_id: int = 0) -> list[dict]:
        """Rows of `schema.ENCODED_SCHEMA` without target, one a line; an empty line has no leaves."""
        full = [i for i, line in enumerate(lines) if line]
        sources = [lines[i] for i in full]
        parsed = [{"example_id": first_id + i, **vars(p)} for i, p in zip(full, self._parser.parse(sources), strict=True)]
        rows = dict(zip(full, self._encoder.encode(sources, parsed, [""] * len(full)), strict=True))
        return [rows.get(i) or self._encoder.empty_row(first_id + i) for i in range(len(lines))]
