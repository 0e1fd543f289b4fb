"""Lines of text to words and constituency trees.

A parser is built inside the actor that uses it, because it owns a model. It never loses a line:
what it cannot analyse comes back with a flat tree and a `parse_status` that names the reason.
"""

import bisect
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field, PositiveInt

from treeproc.files import file_sha256
from treeproc.schema import SCHEMA_VERSION
from treeproc.settings import Settings, UserError
from treeproc.trees import UNANALYSED, SpanTree, flat_tree, keep_leaves, read_brackets, write_brackets

logger = logging.getLogger(__name__)

SHIPPED_MODELS = Path(__file__).parent / "models"
PARSED = "parsed"


class ParserConfig(Settings):
    """The parser of the source side."""

    name: Literal["stanza", "shipped"] = Field(
        "stanza",
        description="'stanza' takes Stanza's own models where they are installed, else the shipped ones that 'shipped' takes",
    )
    language: str = Field("en", description="language of the source side")
    max_words: PositiveInt = Field(150, description="longer sentences get a flat tree, with parse_status flat_too_long")
    batch_sentences: PositiveInt = Field(256, description="sentences the parser sees at once")


@dataclass(frozen=True)
class ParsedLine:
    """One analysed line, in the form of `schema.PARSED_SCHEMA`."""

    words: dict[str, list]  # parallel lists: text, start_char, end_char, pos_tag
    trees: list[str]  # Penn Treebank brackets, one per sentence of the line
    parse_status: str  # PARSED, or the name of the fallback


class Parser(Protocol):
    """Analyses lines. The result of a line depends on the lines of the call alone."""

    def parse(self, lines: Sequence[str]) -> list[ParsedLine]: ...


@dataclass(frozen=True)
class ModelFiles:
    """Where the models of a Stanza pipeline lie, and which they are."""

    origin: Literal["installed", "shipped"]
    folder: Path
    files: dict[str, Path]

    def describe(self) -> dict:
        """What the index and the fingerprint say of the parser: names and hashes, no paths."""
        return {"origin": self.origin, "files": {name: file_sha256(path)[:16] for name, path in self.files.items()}}


def find_models(config: ParserConfig) -> ModelFiles:
    """Installed Stanza models if wanted and complete, else the shipped ones.

    Raises UserError when the language has neither.
    """
    if config.name == "stanza":
        resources = Path(os.environ.get("STANZA_RESOURCES_DIR", Path.home() / "stanza_resources"))
        folder = resources / config.language
        needed = all(any((folder / name).glob("*.pt")) for name in ("tokenize", "pos", "constituency"))
        if needed and (resources / "resources.json").exists():
            # Stanza chooses among them, with word vectors and character models: all of them count.
            files = {str(path.relative_to(folder)): path for path in sorted(folder.glob("*/*.pt"))}
            return ModelFiles("installed", resources, files)
    folder = SHIPPED_MODELS / config.language
    files = {"tokenize": folder / "tokenizer.pt", "pos": folder / "pos.pt", "constituency": folder / "constituency.pt"}
    missing = [path.name for path in files.values() if not path.exists()]
    if missing:
        shipped = ", ".join(sorted(path.name for path in SHIPPED_MODELS.iterdir() if path.is_dir()))
        raise UserError(
            f"parser.language: no parser model for {config.language!r} ({', '.join(missing)} missing); "
            f"shipped languages: {shipped}; or install Stanza's own: "
            f"python -c \"import stanza; stanza.download('{config.language}')\""
        )
    return ModelFiles("shipped", folder, files)


def describe_parser(config: ParserConfig) -> dict:
    """Everything that decides what the parser returns; part of `tree_fingerprint`."""
    from importlib.metadata import version

    return {
        "library": f"stanza {version('stanza')}",
        "language": config.language,
        "max_words": config.max_words,
        "batch_sentences": config.batch_sentences,
        "models": find_models(config).describe(),
        "schema_version": SCHEMA_VERSION,
    }


class StanzaParser:
    """Stanza's tokeniser, tagger and constituency parser, offline, on one CPU thread.

    Every line is one sentence: the tokeniser's sentence splitting is off.
    """

    def __init__(self, config: ParserConfig):
        import stanza
        import torch

        torch.set_num_threads(1)
        models = find_models(config)
        options: dict = {"lang": config.language, "dir": str(models.folder), "processors": "tokenize,pos,constituency"}
        if models.origin == "shipped":
            options |= {
                "package": None,
                "processors": {name: "default" for name in models.files},
                "allow_unknown_language": True,
                "tokenize_model_path": str(models.files["tokenize"]),
                "pos_model_path": str(models.files["pos"]),
                "constituency_model_path": str(models.files["constituency"]),
                "constituency_pretrain_path": str(models.folder / "dummy.pretrain.pt"),
            }
        pipeline = stanza.Pipeline(
            **options,
            download_method=None,
            use_gpu=False,
            logging_level="ERROR",
            tokenize_no_ssplit=True,
            pos_batch_size=config.batch_sentences,
            constituency_batch_size=config.batch_sentences,
        )
        self._tokenise = pipeline.processors["tokenize"].process
        self._analyse = [pipeline.processors["pos"].process, pipeline.processors["constituency"].process]
        self._config = config

    def parse(self, lines: Sequence[str]) -> list[ParsedLine]:
        """Analyse non-empty lines without line ends. Long ones stand together, so that batches pad little."""
        order = sorted(range(len(lines)), key=lambda i: (len(lines[i]), i))
        out: list[ParsedLine | None] = [None] * len(lines)
        for start in range(0, len(order), self._config.batch_sentences):
            batch = order[start : start + self._config.batch_sentences]
            for i, parsed in zip(batch, self._parse_or_halve([lines[i] for i in batch]), strict=True):
                out[i] = parsed
        return out

    def _parse_or_halve(self, lines: list[str]) -> list[ParsedLine]:
        """A batch that fails is tried again in halves, until the line at fault stands alone."""
        try:
            return self._parse_batch(lines)
        except Exception as error:
            if len(lines) > 1:
                middle = len(lines) // 2
                return self._parse_or_halve(lines[:middle]) + self._parse_or_halve(lines[middle:])
            if isinstance(error, MemoryError) or "out of memory" in str(error):
                # Less memory must never mean another tree: let the job fail and be rerun.
                raise
            logger.warning("parser failed on a line of %d characters: %r; it gets a flat tree", len(lines[0]), error)
            return [fallback(lines[0], "flat_parser_failed")]

    def _parse_batch(self, lines: list[str]) -> list[ParsedLine]:
        document = self._tokenise(lines)
        # The tokeniser joins the lines with a blank line in between and counts characters over all.
        offsets = [0]
        for line in lines:
            offsets.append(offsets[-1] + len(line) + 2)
        sentences: list[list] = [[] for _ in lines]
        for sentence in document.sentences:
            sentences[bisect.bisect_right(offsets, sentence.tokens[0].start_char) - 1].append(sentence)

        short = [i for i, group in enumerate(sentences) if group and sum(len(s.words) for s in group) <= self._config.max_words]
        document.sentences = [sentence for i in short for sentence in sentences[i]]
        document.num_tokens = sum(len(s.tokens) for s in document.sentences)
        document.num_words = sum(len(s.words) for s in document.sentences)
        if document.sentences:
            for processor in self._analyse:
                document = processor(document)

        parsed = {i: _parsed_line(lines[i], offsets[i], sentences[i]) for i in short}
        return [
            parsed[i] if i in parsed else fallback(line, "flat_too_long" if sentences[i] else "flat_no_tokens")
            for i, line in enumerate(lines)
        ]


def _parsed_line(line: str, offset: int, sentences: list) -> ParsedLine:
    """One leaf per syntactic word where the words of a token spell it (do + n't), else one per token.

    A token that its words do not spell (im = in + dem) belongs to its first word, with its tag; the
    other words have no leaf, and phrases of them alone no node.
    """
    words: dict[str, list] = {"text": [], "start_char": [], "end_char": [], "pos_tag": []}
    trees = []
    for sentence in sentences:
        texts, tags, kept = [], [], []
        for token in sentence.tokens:
            start, end = token.start_char - offset, token.end_char - offset
            spelled = "".join(word.text for word in token.words) == line[start:end]
            for word in token.words if spelled else token.words[:1]:
                stop = start + len(word.text) if spelled else end
                words["start_char"].append(start)
                words["end_char"].append(stop)
                texts.append(line[start:stop])
                tags.append(word.xpos or word.upos)
                start = stop
            kept += [spelled or word is token.words[0] for word in token.words]
        words["text"] += texts
        words["pos_tag"] += tags
        trees.append(write_brackets(keep_leaves(_span_tree(sentence.constituency), kept), texts, tags))
    return ParsedLine(words, trees, PARSED)


def _span_tree(root) -> SpanTree:
    """Stanza's tree of objects to spans, without recursion."""
    tree = SpanTree([], [], [])
    position = 0
    stack: list = [(root, None)]
    while stack:
        node, opened = stack.pop()
        if opened is not None:
            tree.ends[opened] = position
        elif node.is_leaf():
            position += 1
        else:
            if not node.is_preterminal():
                stack.append((node, len(tree)))
                tree.labels.append(node.label)
                tree.starts.append(position)
                tree.ends.append(-1)
            stack.extend((child, None) for child in reversed(node.children))
    return tree


def fallback(line: str, status: str) -> ParsedLine:
    """Blank-separated words under one node: what remains when no parser helps."""
    matches = list(re.finditer(r"\S+", line))
    words = {
        "text": [match.group() for match in matches],
        "start_char": [match.start() for match in matches],
        "end_char": [match.end() for match in matches],
        "pos_tag": [UNANALYSED] * len(matches),
    }
    return ParsedLine(words, [write_brackets(flat_tree(len(matches)), words["text"], words["pos_tag"])], status)


def read_trees(parsed: dict) -> list[tuple[list[str], SpanTree]]:
    """Tags and spans of every tree of a parsed row."""
    return [read_brackets(text)[1:] for text in parsed["trees"]]
