"""Lines of text to words and constituency trees.

A parser is built inside the actor that uses it, because it owns a model. It never loses a line. A line that it cannot analyse
gets a flat tree and a `parse_status` with the reason.
"""

from treeproc.parsers.config import Given, ParsedLine, Parser, ParserConfig, fallback, read_trees
from treeproc.parsers.given import TagReader
from treeproc.parsers.model_files import arc_rule, describe_in_words, describe_parser, find_models, parser_class


def build_parser(config: ParserConfig) -> Parser:
    """Build the parser of the settings. Raises UserError if it cannot run here."""
    parser: Parser = parser_class(config.name)(config)
    return TagReader(parser, config.tags) if config.tags else parser


__all__ = [
    "Given",
    "ParsedLine",
    "Parser",
    "ParserConfig",
    "arc_rule",
    "build_parser",
    "describe_in_words",
    "describe_parser",
    "fallback",
    "find_models",
    "read_trees",
]
