"""Text shards to parsed shards."""

from collections import Counter
from pathlib import Path

from treeproc.parsers import Parser, ParserConfig, StanzaParser, read_trees
from treeproc.schema import PARSED_SCHEMA
from treeproc.shards import Shard, ShardRecord, write_shard
from treeproc.trees import normalise


class ParseShard:
    """Text shard to parsed shard. Holds the parser, so it is built once per actor."""

    def __init__(self, data: Path, config: ParserConfig):
        self._text, self._parsed = data / "text", data / "parsed"
        self._parser: Parser = StanzaParser(config)

    def __call__(self, text: ShardRecord, mark: str) -> ShardRecord:
        examples = list(Shard(self._text, text).rows())
        rows, counts, longest = [], Counter(), 0
        for example, parsed in zip(examples, self._parser.parse([e["source"] for e in examples]), strict=True):
            row = {"example_id": example["example_id"], **vars(parsed)}
            rows.append(row)
            counts[f"status.{parsed.parse_status}"] += 1
            counts["words"] += len(parsed.words["text"])
            longest = max(longest, len(parsed.words["text"]))
            for tags, tree in read_trees(row):
                counts.update(f"tag.{tag}" for tag in tags)
                counts.update(f"label.{label}" for label in normalise(tree, collapse_unary=False).labels)
        return write_shard(
            self._parsed, text.name, rows, PARSED_SCHEMA,
            split=text.split, index=text.index, fingerprint=mark, counts=counts, longest={"words": longest},
        )  # fmt: skip
