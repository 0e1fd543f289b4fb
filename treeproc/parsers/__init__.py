"""Lines of text to words and constituency trees.

A parser is built inside the actor that uses it, because it owns a model. It never loses a line. A line that it cannot analyse
gets a flat tree and a `parse_status` with the reason.
"""

import json

from treeproc.common.trial import try_first
from treeproc.parsers.config import CutsWords, Given, ParsedLine, Parser, ParserConfig, fallback, read_trees
from treeproc.parsers.given import TagReader
from treeproc.parsers.model_files import describe_in_words, describe_parser, find_models, parser_class

# Memory for trying models: PyTorch and Stanza, and the models several times.
_TRIAL_BYTES, _TRIAL_FACTOR = 4 << 30, 8


def build_parser(config: ParserConfig, *, words_only: bool = False) -> Parser:
    """Build the parser of the settings; for `words_only`, one that may give flat trees, if that saves time.

    Raises UserError if it cannot run here, or if its models take too much memory or time.
    """
    _try_models(config)
    parser: Parser = parser_class(config.name)(config)
    if words_only and isinstance(parser, CutsWords):
        parser.cut_only()
    return TagReader(parser, config.tags) if config.tags else parser


def _try_models(config: ParserConfig) -> None:
    """Build the parser in another process first, unless its models are those of this project."""
    if config.runs_stanza:
        models = find_models(config)
        files = [] if models.origin == "shipped" else [*models.read().values()]
    else:
        files = [path for path in (config.models, *config.models.rglob("*")) if path.is_file()] if config.models else []
    if not files:
        return
    memory = _TRIAL_BYTES + _TRIAL_FACTOR * sum(path.stat().st_size for path in files)
    facts = json.dumps(describe_parser(config), sort_keys=True)
    failed = f"cannot load the models of the parser, {files[0]} and others"
    try_first("treeproc.parsers:try_parser", config.model_dump_json().encode(), memory, failed, facts)


def try_parser(settings: bytes) -> None:
    """Build the parser of the settings, as JSON, on the CPU. Raises any error."""
    config = ParserConfig.model_validate_json(settings).model_copy(update={"device": "cpu"})
    parser_class(config.name)(config)


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
    "try_parser",
]
