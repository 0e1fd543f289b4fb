"""The settings and the interface of parsers: `ParserConfig`, `Parser`, and the parsed lines that parsers return."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, Self, runtime_checkable
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PlainSerializer, PositiveInt, model_validator

from treeproc.common.settings import Effect, Settings, UserError, later_field
from treeproc.shards.schema import UNANALYSED, UNSCORED
from treeproc.trees.spans import SpanTree, flat_tree, read_brackets, write_brackets

if TYPE_CHECKING:
    import torch

PARSED = "parsed"
# The status of lines that no parser was asked to analyse.
NO_PARSER = "flat_no_parser"
# The status of lines for which the parser gave arcs that are no tree: the words have none.
ARCS_FAILED = "arcs_failed"
PARTLY = "partly_"  # prefix of a fallback that only some of the sentences of a line got
# The languages of CoreNLP by code, with the names of its server.
CORENLP_LANGUAGES = {
    "ar": "arabic",
    "zh": "chinese",
    "en": "english",
    "fr": "french",
    "de": "german",
    "es": "spanish",
}


def is_fallback(status: str) -> bool:
    """Return whether a `parse_status` means that a parser could not analyse all of a line."""
    return status not in (PARSED, NO_PARSER)


def check_endpoint(endpoint: str) -> str:
    """Raise ValueError for anything except http://HOST or https://HOST. The message does not repeat a possible secret."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for a port that is no number, or an unclosed bracket
        good = False
    if not good or parts.query or parts.fragment or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT, without a query")
    return endpoint.rstrip("/")


def check_package(package: str) -> str:
    """Return a folder as an absolute path. Raises ValueError for a text that is neither a folder nor a package name."""
    if "/" in package:
        return str(Path(package).absolute())
    if not package.isidentifier():
        raise ValueError("must be the name of an installed spaCy pipeline, or a folder with a / in it")
    return package


# A tag contains nothing that ends a word or a bracket.
TAG_FORM = r"^<[^\s<>()]{1,40}>$"


def _once_each(values: list[str]) -> list[str]:
    """Return the values in order, each once."""
    return sorted(set(values))


def public_endpoint(endpoint: str) -> str:
    """Return the address without user and password, for files and messages."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


_Endpoint = Annotated[str, AfterValidator(check_endpoint), PlainSerializer(public_endpoint, when_used="json")]

ParserName = Literal["stanza", "shipped", "corenlp", "spacy", "benepar", "supar", "given", "words"]
# Each parser with its module and its class. Those of `extras` need further packages or a server.
PARSERS: dict[ParserName, tuple[str, str]] = {
    "stanza": ("treeproc.parsers.stanza_parser", "StanzaParser"),
    "shipped": ("treeproc.parsers.stanza_parser", "StanzaParser"),
    "corenlp": ("treeproc.extras.parsers.corenlp", "CoreNLPParser"),
    "spacy": ("treeproc.extras.parsers.spacy", "SpacyParser"),
    "benepar": ("treeproc.extras.parsers.benepar", "BeneparParser"),
    "supar": ("treeproc.extras.parsers.supar", "SuparParser"),
    "given": ("treeproc.parsers.given", "GivenTrees"),
    "words": ("treeproc.parsers.given", "WordsOnly"),
}


class ParserConfig(Settings):
    """The parser of one side."""

    name: ParserName = Field(
        "stanza",
        description="'stanza': Stanza's own models if they are installed, else the shipped models. 'shipped': the shipped "
        "models. 'corenlp': a CoreNLP server. 'spacy' (only arcs), 'benepar', 'supar': these packages. 'given': "
        "the trees of the input, the default if the files have trees. 'words': no parser, for control trees",
    )
    models: Annotated[Annotated[Path, AfterValidator(Path.absolute)] | None, Effect.NONE] = Field(
        None,
        description="models of the parser. stanza, shipped: a folder OUT/models of tree-attention train-parser. benepar: the "
        "folder or file of a model. supar: a folder with constituency.pt and depparse.pt",
    )
    package: Annotated[str, AfterValidator(check_package)] | None = Field(
        None,
        description="spaCy pipeline: an installed package (en_core_web_sm), or a folder (with a / in its name). For spacy, "
        "and for the words and tags of benepar and supar; null: spaCy's rules of the language make words, without "
        "tags",
    )
    language: str = Field("en", description="language of this side")
    max_words: PositiveInt = Field(
        150, description="most words of a sentence that is parsed; a longer one gets a flat tree and parse_status flat_too_long"
    )
    split_sentences: bool = Field(
        False, description="a line may hold several sentences; the parser splits it and gives each sentence a tree"
    )
    dependencies: bool = Field(False, description="also parse dependencies: one arc for each word, in the column `arcs`")
    constituency: bool = Field(
        True,
        description="false: the job loads only a dependency parser. It makes trees of the arcs (tree.tree_source: dependencies), "
        "and the tags are universal ones",
    )
    scores: bool = later_field(
        False,
        description="write how sure the parser is of each line, in the column `parse_score`. For the shipped models and "
        "those of tree-attention train-parser",
    )
    batch_words: PositiveInt = Field(4096, description="number of words that the models read at once; halved if memory runs out")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device of models on PyTorch; auto: a GPU if there is one")
    given_labels: Literal["keep", "none", "phrase", "parsed"] = Field(
        "keep",
        description="labels of given trees. keep: as given. none: X. phrase: PHRASE. parsed: those of the same spans in a Stanza "
        "parse, else X; the tags are those of that parse too",
    )
    treebank_words: bool | None = Field(
        None,
        description="for tokenized: moses. true: the parser reads English tokens as treebanks write them (don 't as do n't). "
        "false: as they are. null: true for English, except in a data set that began with false",
    )
    tags: Annotated[list[Annotated[str, Field(pattern=TAG_FORM)]], AfterValidator(_once_each)] = Field(
        [],
        description="first words of lines, before the text: <2de> for the language to write, or <bt> for synthetic pairs. The "
        "parser does not read them, and each is one piece",
    )
    endpoint: Annotated[_Endpoint, Effect.NONE] = Field(
        "http://localhost:9000",
        repr=False,
        description="address of a running CoreNLP server, http:// or https://. It may have a user and a password, which no file "
        "records; ~/.netrc may hold them instead",
    )

    @model_validator(mode="after")
    def _settings_that_go_together(self) -> Self:
        if self.given_labels != "keep" and self.name != "given":
            raise ValueError(f"given_labels: needs name: given, but name is {self.name}")
        if self.split_sentences and self.name in ("given", "words"):
            raise ValueError(
                f"split_sentences: name: {self.name} cannot split lines into sentences; choose stanza, shipped or corenlp"
            )
        if self.models is not None and not self.runs_torch:
            raise ValueError(f"models: needs name: stanza, shipped, benepar or supar, but name is {self.name}")
        if self.tags and self.name == "given":
            raise ValueError("tags: needs a parser that finds the words of a line, but name is given")
        if self.scores and not (self.name in ("stanza", "shipped") and self.constituency):
            kind = f"name is {self.name}" if self.constituency else "constituency is false"
            raise ValueError(f"scores: needs name: shipped or stanza, and constituency: true, but {kind}; leave scores out")
        if self.dependencies and self.name == "words":
            raise ValueError("dependencies: name: words parses nothing; choose stanza, corenlp or given")
        self._settings_of_packages()
        if self.treebank_words and not self.knows_treebank_words:
            raise ValueError("treebank_words: needs language: en, and a name other than given and words")
        if not self.constituency and not (self.dependencies and self.name in ("stanza", "shipped", "spacy", "supar")):
            raise ValueError("constituency: false needs dependencies: true, and name: stanza, shipped, spacy or supar")
        return self

    def _settings_of_packages(self) -> None:
        if self.package is not None and not self.runs_spacy:
            raise ValueError(f"package: needs name: spacy, benepar or supar, but name is {self.name}")
        if self.name == "spacy" and (self.constituency or self.package is None):
            raise ValueError("name: spacy gives only arcs; set package, constituency: false and dependencies: true")
        if self.name in ("benepar", "supar") and self.models is None:
            raise ValueError(f"models: is missing; name: {self.name} needs the path of its model")
        if self.name == "benepar" and self.dependencies and self.package is None:
            raise ValueError("dependencies: with name: benepar, a spaCy pipeline gives the arcs; set package")

    @property
    def runs_stanza(self) -> bool:
        """Return whether Stanza's models are loaded."""
        return self.name in ("stanza", "shipped") or self.given_labels == "parsed"

    @property
    def runs_spacy(self) -> bool:
        """Return whether spaCy makes the words."""
        return self.name in ("spacy", "benepar", "supar")

    @property
    def runs_torch(self) -> bool:
        """Return whether models run on PyTorch, and so on a GPU if there is one."""
        return self.runs_stanza or self.name in ("benepar", "supar")

    def facts(self) -> dict:
        """Return the settings for descriptions and the index.

        Newer settings are left out if they have the value of older data sets, and `scores`, which changes no tree.
        """
        as_then = {
            "scores": True,
            "constituency": self.constituency,
            "treebank_words": not self.treebank_words,
            "package": self.package is None,
            "tags": not self.tags,
        }
        return self.model_dump(mode="json", exclude={name for name, same in as_then.items() if same})

    @property
    def processors(self) -> tuple[str, ...]:
        """Return Stanza's names of the required processors."""
        kinds = {"constituency": self.constituency, "depparse": self.dependencies}
        return ("tokenize", "pos", *(name for name, wanted in kinds.items() if wanted))

    @property
    def knows_treebank_words(self) -> bool:
        """Return whether Moses tokens can be converted to the words that this parser was trained on."""
        return self.language == "en" and self.name not in ("given", "words")

    @property
    def reads_language(self) -> bool:
        """Return whether a parser of `language` reads the lines."""
        return self.runs_stanza or self.runs_spacy or self.name == "corenlp"

    @property
    def gpus_per_actor(self) -> int:
        """Return the GPUs that one actor with this parser requests from Ray, if the cluster has any: 1 or 0."""
        return int(self.runs_torch and self.device != "cpu")

    def torch_device(self) -> "torch.device":
        """Return the device in this process. Raises UserError if the settings need a GPU and there is none."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("parser.device: is cuda, but PyTorch sees no GPU here; choose auto or cpu")
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class ParsedLine:
    """One analysed line, in the form of `schema.PARSED_SCHEMA`."""

    words: dict[str, list]  # parallel lists: text, start_char, end_char, pos_tag
    trees: list[str]  # Penn Treebank brackets, one per sentence of the line
    parse_status: str  # PARSED, or the name of the fallback
    arcs: dict[str, list] | None = None  # parallel lists: governor (0-based, -1 a root), deprel; None if not requested
    parse_score: float = UNSCORED  # mean over the sentences, weighted by their words; UNSCORED also if it is not requested


@dataclass(frozen=True)
class Given:
    """The annotation of a line in a text shard: words, trees and arcs, if the input has them."""

    words: dict[str, list] | None = None  # parallel lists: text, start_char, end_char
    trees: list[str] | None = None
    arcs: dict[str, list] | None = None


class Parser(Protocol):
    """Analyses lines. The result of a line depends only on the lines of the call."""

    def parse(self, lines: Sequence[str], given: Sequence[Given] | None = None) -> list[ParsedLine]:
        """Return one result per non-empty line, in order. Given words stay unchanged."""
        ...

    def knows(self, word: str) -> bool:
        """Return whether the parser learned the word; False if it cannot tell."""
        return False


@runtime_checkable
class CutsWords(Protocol):
    """A parser that can stop after the words of a line."""

    def cut_only(self) -> None:
        """Give flat trees from now on, over the same words."""
        ...


def flat_arcs(num_words: int) -> dict[str, list]:
    """Return arcs in which every word is a root, for sentences that no parser could analyse."""
    return {"governor": [-1] * num_words, "deprel": [UNANALYSED] * num_words}


def split_at_blanks(line: str) -> dict[str, list]:
    """Return the words of a line, split at blanks, with their character offsets."""
    matches = list(re.finditer(r"\S+", line))
    return {
        "text": [match.group() for match in matches],
        "start_char": [match.start() for match in matches],
        "end_char": [match.end() for match in matches],
    }


def fallback(line: str, status: str, words: dict[str, list] | None = None, dependencies: bool = False) -> ParsedLine:
    """Return given or blank-separated words under one node: the result without a parse."""
    words = dict(words or split_at_blanks(line))
    count = len(words["text"])
    words["pos_tag"] = [UNANALYSED] * count
    tree = write_brackets(flat_tree(count), words["text"], words["pos_tag"])
    return ParsedLine(words, [tree], status, flat_arcs(count) if dependencies else None)


def read_trees(parsed: dict) -> list[tuple[list[str], SpanTree]]:
    """Return tags and spans of every tree of a parsed row."""
    return [read_brackets(text)[1:] for text in parsed["trees"]]
