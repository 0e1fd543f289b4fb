"""Raw lines to encoded rows, with the parser and vocabulary of an existing data set."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from unicodedata import normalize
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from treeproc.common.messages import phase, warn
from treeproc.common.settings import UserError, build_settings, differences
from treeproc.common.storage import AnyPath, inside
from treeproc.parsers import Given, ParsedLine, Parser, ParserConfig, build_parser, describe_parser
from treeproc.parsers.config import PARSED, check_endpoint, flat_arcs, public_endpoint
from treeproc.readers import read_rows
from treeproc.readers.line_forms import FORMS, is_blank
from treeproc.shards.rows import WordEnds, arrow_array, batch_views, edges_of, pick, record_batches
from treeproc.shards.schema import FULL_PARSED_SCHEMA, select
from treeproc.shards.store import read_index, side_of, stage_folder
from treeproc.stages.encode import RowEncoder
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.text_warnings import is_noticed
from treeproc.subwords import Pieces


def _endpoint(data: AnyPath, recorded: str) -> str:
    """Return the address of the CoreNLP server: $CORENLP_ENDPOINT, else the local one that `data` was made with.

    Raises UserError for a server elsewhere: a data set must not decide who reads the user's text.
    """
    if chosen := os.environ.get("CORENLP_ENDPOINT"):
        try:
            return check_endpoint(chosen)
        except ValueError as error:
            raise UserError(f"$CORENLP_ENDPOINT {error}") from None
    if urlsplit(recorded).hostname not in ("localhost", "127.0.0.1", "::1"):
        raise UserError(
            f"a CoreNLP server at {public_endpoint(recorded)} parsed {data}, and would now read your text; set CORENLP_ENDPOINT "
            "to a server that you trust"
        )
    return recorded


def _check_arcs(data: AnyPath, config: ParserConfig, given_trees: bool) -> None:
    """Raise UserError if the trees of `data` are made of arcs, and the lines get no arcs."""
    if config.name == "given" and config.given_labels != "parsed":
        raise UserError(
            f"{data} has trees made of arcs of its input files, but these lines have no arcs; preprocess files of its format "
            f"with vocab_from={data}"
        )
    if given_trees and config.name != "given":
        raise UserError(f"{data} has trees made of arcs, but bracketed trees have no arcs; give the lines without trees")


# Where a remedy begins; a `; ` may also stand in a path, or in a command.
_REMEDIES = re.compile(
    r"; (?=(?:install|remove|restore|run|give|choose|set|put|save|start|or|shipped|models|leave) |parser\.|Stanza )"
)
_POSSIBLE = ("install ", "remove ", "restore ", "run ")  # without settings of parsers


@contextmanager
def possible_remedies(data: AnyPath) -> Iterator[None]:
    """Leave out of the errors of the parser what the commands for lines cannot do: they have no settings of parsers."""
    try:
        yield
    except UserError as error:
        said, *remedies = _REMEDIES.split(str(error))
        if not any("parser." in one or one.startswith(("give ", "choose ")) for one in remedies):
            raise
        possible = [re.sub(r",? or (set parser\.|give ).*$", "", one) for one in remedies if one.startswith(_POSSIBLE)]
        raise UserError("; ".join([said, *(possible or [f"install here the parser that {data} was made with"])])) from None


class LineEncoder:
    """Parses and encodes lines with the parser and vocabulary of the data set in folder `data`.

    With `given_trees`, the lines come with their trees, and no parser is loaded. Unless the model `reads_trees`, the trees of the
    rows are the parser's or the given ones, also if `data` has others. With `words_only`, tags, trees and arcs need not be the
    parser's. Raises UserError if the parser's models are not the ones in the index of `data`. It also does so if the data set has
    given trees and these lines have none. The same holds if its trees are made of arcs and these lines get none, and if they
    come from other lines. `instead_of_shuffled` is a remedy, and `instead_of_given` the end of a message with one.
    """

    def __init__(
        self,
        data: AnyPath,
        *,
        given_trees: bool = False,
        reads_trees: bool = True,
        words_only: bool = False,
        instead_of_shuffled: str = "",
        instead_of_given: str = "; give trees for these lines as well (trees=FILE), or, where only text fits, a run whose data "
        "set has a parser",
    ) -> None:
        index = read_index(data / "encoded")
        parser = dict(index["parser_settings"])
        if (models := parser.get("models")) and not Path(models).is_absolute():  # of an exported run
            parser["models"] = inside(data, models)
        config = build_settings(ParserConfig, parser, f"{data / 'encoded' / 'index.json'}: parser_settings")
        # One side is enough here. The leaves' side of the data set is the source of these lines.
        settings = {**index["tree_settings"], "side": "source", **({} if reads_trees else {"tree_source": "parsed"})}
        tree = build_settings(TreeConfig, settings, f"{data / 'encoded' / 'index.json'}: tree_settings")
        if tree.tree_source == "dependencies":
            _check_arcs(data, config, given_trees)
        if tree.of_other_lines:
            remedy = instead_of_shuffled or (
                f"preprocess your lines with vocab_from={data} and tree.tree_source={tree.tree_source}, and score them with "
                "data= of tree-attention evaluate, or of tree-attention score-lm"
            )
            raise UserError(
                f"{data} has {tree.tree_source} trees, which come from other lines of a split, but this is a single line; "
                f"{remedy}"
            )
        if given_trees and config.name != "given":
            config = ParserConfig(name="given", language=config.language)
        elif given_trees and config.given_labels != "parsed":
            config = config.model_copy(update={"dependencies": False})
        elif config.name == "given" and not given_trees:
            raise UserError(f"{data} was made of trees of its input files{instead_of_given}")
        else:
            if config.device == "cuda":  # which this machine may lack
                config = config.model_copy(update={"device": "auto"})
            with possible_remedies(data):
                there = describe_parser(config)
            device = {name: value for name, value in there.items() if name == "device"}
            if changed := differences(index["parser"] | device, there):
                differs = f"the parser differs from that of {data} ({'; '.join(changed)})"
                raise UserError(f"{differs}; install the parser of the data set")
        if config.name == "corenlp":
            config = config.model_copy(update={"endpoint": _endpoint(data, config.endpoint)})
        with phase("loading the parser"), possible_remedies(data):
            self._parser: Parser = build_parser(config, words_only=words_only)
        self.gives_arcs = config.dependencies
        self.tags = config.tags  # that may stand in front of lines
        self.language = config.language if config.reads_language else None  # of the parser; None if no parser reads the lines
        side = side_of(index)
        self.learned = _learned_notices(data, side)
        self.notice_kinds = _notice_kinds(self.learned)
        self.target_notice_kinds = _target_notice_kinds(data, "source" if side == "target" else "target")
        self.normalize = FORMS[index.get("normalization", "none")]  # of the text of the data set
        self._encoder = RowEncoder(data / "encoded" / "vocab", tree)

    @property
    def subwords(self) -> Pieces:
        """The pieces of the leaves' side."""
        return self._encoder.subwords

    def knows(self, word: str) -> bool:
        """Return whether the parser learned the word; False if it cannot tell."""
        return self._parser.knows(word)

    def encode(self, lines: Sequence[str], first_id: int = 0) -> list[dict]:
        """Return rows of an encoded shard without target, one per line. A line without a visible character has no leaves."""
        lines = list(map(self.normalize, lines))
        return self.encode_parsed(lines, self.parse(lines), range(first_id, first_id + len(lines)))

    def parse(self, lines: Sequence[str], given: Sequence[Given] | None = None) -> list[ParsedLine]:
        """Return words and trees of every line. A line without a visible character has none."""
        full = [i for i, line in enumerate(lines) if not is_blank(line)]
        none: dict[str, list] = {"text": [], "start_char": [], "end_char": [], "pos_tag": []}
        parsed = [ParsedLine(none, [], PARSED, flat_arcs(0) if self.gives_arcs else None)] * len(lines)
        own = [given[i] for i in full] if given is not None else None
        for i, analysed in zip(full, self._parser.parse([lines[i] for i in full], own), strict=True):
            parsed[i] = analysed
        return parsed

    def encode_parsed(self, lines: Sequence[str], parsed: Sequence[ParsedLine], ids: Sequence[int]) -> list[dict]:
        """Return rows of an encoded shard without target. Raises ValueError if a line and its words do not belong together."""
        rows: list[dict] = []
        with_ids = [{"example_id": number, **vars(line)} for number, line in zip(ids, parsed, strict=True)]
        columns = ("words", "trees", "parse_status", *(("arcs",) if self.gives_arcs else ()))
        for batch in record_batches(with_ids, select(FULL_PARSED_SCHEMA, columns)):
            views = batch_views(batch)
            text = {
                "example_id": views["example_id"],
                "source": arrow_array(lines[len(rows) : len(rows) + len(batch)], pa.string()),
            }
            encoded = batch_views(self._encoder.encode(text, views))
            rows += [{name: pick(column, i) for name, column in encoded.items()} for i in range(len(batch))]
        return [row | {"tgt_pieces": np.zeros(0, dtype=np.int32)} for row in rows]

    def encode_leaves(self, lines: Sequence[str], parsed: Sequence[ParsedLine], ids: Sequence[int]) -> list[dict]:
        """Return rows as `encode_parsed` does, but without nodes, tags and arcs: for models that read the leaves alone."""
        edges = edges_of([len(line.words["end_char"]) for line in parsed])
        ends = np.fromiter(chain.from_iterable(line.words["end_char"] for line in parsed), np.int64, edges[-1])
        pieces, counts = self.subwords.encode_words(arrow_array(lines, pa.string()), WordEnds(edges, ends))
        word_index = np.repeat(np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges)), counts)
        cuts = edges_of(counts)[edges].tolist()
        leaves = ({"piece": pieces[slice(*cut)], "word_index": word_index[slice(*cut)]} for cut in pairwise(cuts))
        none = np.zeros(0, dtype=np.int32)
        empty = {"nodes": {"label": none}, "spans": dict.fromkeys(("start", "end", "subtree_end"), none), "tgt_pieces": none}
        return [{"example_id": number, "leaves": own, **empty} for number, own in zip(ids, leaves, strict=True)]

    def encode_targets(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Return the pieces of lines on the side that models write."""
        flat, counts = self._encoder.other_subwords.encode_lines(arrow_array(lines, pa.string()))
        return np.split(flat, np.cumsum(counts)[:-1]) if len(lines) else []


def read_treebank(files: Sequence[Path], data: AnyPath, *, reads_trees: bool = True) -> tuple[list[dict], list[str]]:
    """Return the examples of the trees of Penn Treebank files, and the trees as they are written.

    Trees without words are left out, and the others keep their numbers. Raises UserError with file and line on bad input, and as
    `LineEncoder` does.
    """
    normalization = read_index(data / "encoded").get("normalization", "none")
    every = list(read_rows("brackets", files, (), normalization=normalization))
    found = [(number, row) for number, row in enumerate(every) if row["trees"]]
    if missing := [number + 1 for number, row in enumerate(every) if not row["trees"]]:
        warn(f"note: {len(missing):,} of {len(every):,} trees have no words, such as tree {missing[0]:,}, and are left out")
    numbers, rows = [number for number, _ in found], [row for _, row in found]
    lines, given = [row["source"] for row in rows], [Given(row["words"], row["trees"]) for row in rows]
    encoder = LineEncoder(data, given_trees=True, reads_trees=reads_trees)
    examples = encoder.encode_parsed(lines, encoder.parse(lines, given), numbers)
    return examples, [row["trees"][0] for row in rows]


def _learned_notices(data: AnyPath, side: str) -> dict | None:
    """Return the notices about the lines on `side` of train; None if they are not known, or came as words."""
    folder = stage_folder(data, "text")
    if not (folder / "index.json").exists():
        return None
    index = read_index(folder)
    return None if "words" in index.get("columns", ()) else index.get("notices", {}).get("train", {}).get(side, {})


def _notice_kinds(learned: dict | None) -> tuple[str, ...]:
    """Return the kinds of notices that tell new lines apart from the lines that a model learned, with their notices.

    Where these lines look tokenised, or have escapes, new lines should too.
    """
    if learned is None:
        return ("escapes",)
    escapes = () if is_noticed("escapes", learned) else ("escapes",)
    return (*escapes, "tokens", *(("attached",) if is_noticed("tokens", learned) else ()))


def learned_kinds(data: AnyPath, side: str) -> tuple[str, ...]:
    """Return the kinds of notices that tell new lines apart from the lines on `side` of a data set."""
    return _notice_kinds(_learned_notices(data, side))


def _target_notice_kinds(data: AnyPath, side: str) -> tuple[str, ...]:
    """Return the kinds of notices about given targets, on `side` of the data set; none if it did not look for tokens there."""
    learned = _learned_notices(data, side)
    looked = learned is not None and "tokens" in learned
    return tuple(kind for kind in _notice_kinds(learned) if kind != "escapes") if looked else ()


CONSTRAINTS = ("prefix", "must_appear", "must_not_appear")  # columns of an encoded row
# Limits of a line. A search holds a table of the forbidden strings, and the state of each phrase for each of its hypotheses.
MOST_BYTES, MOST_PHRASES = 1000, 50


@dataclass(frozen=True)
class Constraints:
    """The constraints of one line, as text."""

    prefix: str = ""
    must_appear: tuple[str, ...] = ()
    must_not_appear: tuple[str, ...] = ()

    @classmethod
    def read(cls, prefix: str = "", must_appear: str = "", must_not_appear: str = "") -> "Constraints":
        """Make constraints from lines of files, whose phrases are separated by tabs; blank ones are left out.

        A blank before a forbidden string counts: a word begins there. Raises ValueError if a line has too many of them.
        """
        required = tuple(phrase.strip() for phrase in must_appear.split("\t") if phrase.strip())
        forbidden = tuple(phrase for phrase in must_not_appear.split("\t") if phrase.strip())
        size = sum(len(text.encode()) for text in forbidden)
        if size > MOST_BYTES:
            raise ValueError(f"must_not_appear: {size:,} bytes of strings are more than {MOST_BYTES:,}; give fewer strings")
        if len(required) > MOST_PHRASES:
            raise ValueError(f"must_appear: {len(required):,} phrases are more than {MOST_PHRASES}; give fewer phrases")
        # The same text in the form that most models write: pieces are compared by their bytes.
        composed = (text for text in map(partial(normalize, "NFC"), forbidden) if text not in forbidden)
        return cls(prefix.strip(), required, (*forbidden, *composed))

    def __bool__(self) -> bool:
        return bool(self.prefix or self.must_appear or self.must_not_appear)

    @property
    def pieces_of(self) -> list[str]:
        """Return the texts that a search needs as pieces: the prefix, if there is one, and the phrases that must appear."""
        return [text for text in (self.prefix, *self.must_appear) if text]

    def columns(self, pieces: Sequence[np.ndarray]) -> dict:
        """Return the columns of an encoded row. `pieces` are of the texts in `pieces_of`."""
        prefix, phrases = (pieces[:1], pieces[1:]) if self.prefix else ([], pieces)
        return {
            "prefix": prefix[0] if prefix else np.zeros(0, dtype=np.int32),
            "must_appear": list(phrases),
            "must_not_appear": list(self.must_not_appear),
        }
