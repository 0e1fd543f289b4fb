"""Lines of text to words and constituency trees.

A parser is built inside the actor that uses it, because it owns a model. It never loses a line:
what it cannot analyse comes back with a flat tree and a `parse_status` that names the reason.
"""

from treeproc.parsers.config import Given, ParsedLine, Parser, ParserConfig, fallback, read_trees
from treeproc.parsers.models import describe_in_words, describe_parser, find_models


def build_parser(config: ParserConfig) -> Parser:
    """The parser that the settings name. Raises UserError when it cannot run here."""
    if config.name == "corenlp":
        from treeproc.parsers.corenlp import CoreNLPParser

        return CoreNLPParser(config)
    if config.name == "spacy":
        from treeproc.parsers.spacy_parser import SpacyParser

        return SpacyParser(config)
    if config.name == "benepar":
        from treeproc.parsers.benepar_parser import BeneparParser

        return BeneparParser(config)
    if config.name == "supar":
        from treeproc.parsers.supar_parser import SuparParser

        return SuparParser(config)
    if config.name == "given":
        from treeproc.parsers.given import GivenTrees

        return GivenTrees(config)
    if config.name == "words":
        from treeproc.parsers.given import WordsOnly

        return WordsOnly()
    from treeproc.parsers.stanza_parser import StanzaParser

    return StanzaParser(config)


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
