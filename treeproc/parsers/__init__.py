"""Lines of text to words and constituency trees.

A parser is built inside the actor that uses it, because it owns a model. It never loses a line. A line that it cannot analyse
gets a flat tree and a `parse_status` with the reason.
"""

from importlib import import_module

from treeproc.parsers.config import PARSERS, Given, ParsedLine, Parser, ParserConfig, fallback, read_trees
from treeproc.parsers.model_files import describe_in_words, describe_parser, find_models
from treeproc.parsers.tags import TagReader


def build_parser(config: ParserConfig) -> Parser:
    """Build the parser of the settings. Raises UserError if it cannot run here."""
    module, name = PARSERS[config.name]  # imported here: some parsers load PyTorch, or packages that may be missing
    parser: Parser = getattr(import_module(f"{__name__}.{module}"), name)(config)
    return TagReader(parser, config.tags) if config.tags else parser


__all__ = [
    "Given",
    "ParsedLine",
    "Parser",
    "ParserConfig",
    "build_parser",
    "describe_in_words",
    "describe_parser",
    "fallback",
    "find_models",
    "read_trees",
]
