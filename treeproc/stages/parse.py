"""Text shards to parsed shards."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from treeproc.common.settings import UserError
from treeproc.parsers import Given, ParsedLine, Parser, ParserConfig, build_parser, read_trees
from treeproc.parsers.config import split_at_blanks
from treeproc.shards.schema import FULL_PARSED_SCHEMA, line_end_in, select
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, write_shard
from treeproc.trees.spans import normalise


def parsed_columns(config: ParserConfig, target: ParserConfig | None) -> list[str]:
    """Return the columns of the parsed shards of a data set."""
    sides = {"": config} | ({"target_": target} if target else {})
    chosen = {
        prefix + name
        for prefix, side in sides.items()
        for name in ("words", "trees", "parse_status", *(("arcs",) if side.dependencies else ()))
    }
    return select(FULL_PARSED_SCHEMA, chosen).names


def check_columns(config: ParserConfig, target: ParserConfig | None, text_columns: Collection[str]) -> None:
    """Raise UserError if the text lacks columns that the parsers need."""
    if config.name == "given" and not {"words", "trees"} <= set(text_columns):
        raise UserError(
            "parser.name: is given, but this format gives no trees; choose another parser, or format: brackets or sst"
        )
    if config.name == "given" and config.dependencies and config.given_labels != "parsed" and "arcs" not in text_columns:
        raise UserError(
            "parser.dependencies: is true, but this format gives no arcs; set it to false, parser.given_labels to parsed, or "
            "format: conllu"
        )
    if target is not None and "target" not in text_columns:
        raise UserError("target_parser: this format has no target side; set it to null")
    if target is not None and target.name == "given":
        raise UserError("target_parser.name: is given, but no format gives trees of the target side; choose another parser")


class ParseShard:
    """Text shard to parsed shard. Holds the parsers, so they are built once per actor."""

    def __init__(self, data: Path, config: ParserConfig, target: ParserConfig | None = None):
        self._text, self._parsed = data / "text", data / "parsed"
        self._schema = select(FULL_PARSED_SCHEMA, parsed_columns(config, target))
        self._source: Parser = build_parser(config)
        self._target: Parser | None = None
        self._target_tokens = target is not None and bool(target.treebank_words)
        if target is not None:
            self._target = self._source if target == config else build_parser(target)

    def __call__(self, text: ShardRecord, fingerprint: str) -> ShardRecord:
        examples = list(Shard(self._text, text).rows())
        given = [Given(e.get("words"), e.get("trees"), e.get("arcs")) for e in examples]
        counts: Counter = Counter()
        longest = {"words": 0}
        rows = [{"example_id": e["example_id"]} for e in examples]
        for row, parsed in zip(rows, self._source.parse([e["source"] for e in examples], given), strict=True):
            row |= vars(parsed)
            counts.update(_counts(parsed))
            longest["words"] = max(longest["words"], len(parsed.words["text"]))
            for tags, tree in read_trees(row):
                counts.update(f"tag.{tag}" for tag in tags)
                counts.update(f"label.{label}" for label in normalise(tree, collapse_unary=False).labels)
        if self._target is not None:
            lines = [e["target"] for e in examples]
            given = [Given(split_at_blanks(line)) for line in lines] if self._target_tokens else None
            for row, parsed in zip(rows, self._target.parse(lines, given), strict=True):
                row |= {f"target_{name}": value for name, value in vars(parsed).items()}
                counts.update({f"target_{name}": count for name, count in _counts(parsed).items()})
        if wrong := line_end_in(counts):
            raise UserError(
                f"{self._text / text.name}: the parser gives {wrong}; remove it from the input, or choose another parser"
            )
        return write_shard(
            self._parsed, text.name, rows, self._schema,
            split=text.split, index=text.index, fingerprint=fingerprint, counts=counts, longest=longest,
        )  # fmt: skip


def _counts(parsed: ParsedLine) -> Counter:
    """Count the fallback, the words and the relations of a line."""
    counts = Counter({f"status.{parsed.parse_status}": 1, "words": len(parsed.words["text"])})
    if parsed.arcs is not None:
        counts.update(f"deprel.{name}" for name in parsed.arcs["deprel"])
    return counts
