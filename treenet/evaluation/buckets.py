"""Scores by the difficulty of a source: its length in words, and the depth of its tree."""

from collections.abc import Iterable, Sequence

import numpy as np
from pydantic import Field, field_validator

from treenet.tasks.translation_metrics import MAIN, METRICS
from treeproc.common.settings import Settings, UserError


class BucketConfig(Settings):
    """The upper ends of buckets, included. Values above the last one form another bucket."""

    words: tuple[int, ...] = Field(
        (10, 20, 30, 40, 50, 60), description="upper ends of the buckets by length of the source, in words"
    )
    depth: tuple[int, ...] = Field((4, 8, 12, 16, 20), description="upper ends of the buckets by depth of the source's tree")

    @field_validator("words", "depth")
    @classmethod
    def _check_ascending(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if not values or list(values) != sorted(set(values)) or values[0] < 0:
            raise ValueError(f"must be ascending numbers, for example [10, 20], but is {list(values)}")
        return values


def count_words(example: dict) -> int:
    """Count the words on the leaves' side of an encoded row. The pieces of one word count once."""
    return len(np.unique(example["leaves"]["word_index"]))


def tree_depth(example: dict) -> int:
    """Return the number of nonterminals on the longest path from a root down to a leaf; 0 without a tree.

    The roots of split words count too.
    """
    ends = np.asarray(example["spans"]["subtree_end"])
    # Node i lies below every earlier node whose subtree is still open.
    closed = np.cumsum(np.bincount(ends, minlength=len(ends) + 1))[: len(ends)]
    return int((np.arange(1, len(ends) + 1) - closed).max(initial=0))


def measure_sources(examples: Iterable[dict]) -> dict[str, np.ndarray]:
    """Return `words` and `depth` of every example."""
    sizes = [(count_words(example), tree_depth(example)) for example in examples]
    return dict(zip(("words", "depth"), np.array(sizes, dtype=np.int64).reshape(-1, 2).T, strict=True))


def score_buckets(
    sizes: dict[str, np.ndarray], config: BucketConfig, hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, list[dict]]:
    """Return the number of examples and corpus BLEU (13a) of every bucket with examples, for `words` and `depth`.

    BLEU of few sentences is noisy, and short sentences often have no matching 4-grams. So compare systems, not buckets.
    """
    metric = METRICS[MAIN].build(True)
    found: dict[str, list[dict]] = {}
    for name, values in sizes.items():
        if len(values) != len(references):
            raise UserError(f"the data set has {len(values)} examples, but there are {len(references)} references")
        lasts: tuple[int, ...] = getattr(config, name)
        places = np.searchsorted(lasts, values)  # values up to and including lasts[i] are in bucket i
        found[name] = []
        for place in np.unique(places).tolist():
            rows = np.flatnonzero(places == place).tolist()
            found[name].append(
                {
                    "from": lasts[place - 1] + 1 if place else 0,
                    "to": lasts[place] if place < len(lasts) else None,
                    "num_examples": len(rows),
                    MAIN: metric.corpus_score([hypotheses[i] for i in rows], [[references[i] for i in rows]]).score,
                }
            )
    return found


TITLES = {"words": "words of the source", "depth": "depth of its tree"}


def format_buckets(buckets: dict[str, list[dict]]) -> str:
    """Return a table for each kind of bucket."""
    blocks = []
    for name, rows in buckets.items():
        lines = [f"{TITLES[name]:22}{'lines':>7}{METRICS[MAIN].column:>8}"]
        for row in rows:
            title = f"up to {row['to']}" if not row["from"] else f"{row['from']} to {row['to']}"
            title = title if row["to"] is not None else f"{row['from']} and more"
            lines.append(f"  {title:20}{row['num_examples']:7d}{row[MAIN]:8.2f}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)
