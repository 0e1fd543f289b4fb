"""The filters of one text shard, in their order, for both ways of the text stage."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from treeproc.stages.filters import FilterConfig, drop_reason

UNLABELLED = -1


class Seen(Protocol):
    """What the first pass knows of all examples. Every answer is the places of the rows that it holds for."""

    def overlaps(self, rows: Sequence[dict]) -> Sequence[int]:
        """Return the rows whose source, or all of it, stands in another split, as `drop_overlap` says."""

    def duplicates(self, rows: Sequence[dict]) -> Sequence[int]:
        """Return the rows that an earlier example of train equals."""

    def near_copies(self, rows: Sequence[dict]) -> Sequence[int]:
        """Return the rows whose source is nearly that of an example of another split."""


class Filtered(NamedTuple):
    """Rows that stay, counts, (example_id, reason) of dropped rows, places of rows that are leaks but stay."""

    rows: list[dict]
    counts: Counter
    dropped: list[tuple[int, str]]
    leaks: Sequence[int]


@dataclass(frozen=True)
class ShardFilter:
    """Filters and classes of the examples of a shard."""

    filters: FilterConfig
    labels: Mapping[int, int] | None
    seen: Seen

    def __call__(self, examples: Iterable[dict], split: str) -> Filtered:
        rows: list[dict] = []
        dropped: list[tuple[int, str]] = []
        for row in examples:
            if reason := self._reason(row, split):
                dropped.append((row["example_id"], reason))
            else:
                rows.append(row)
        leaks: Sequence[int] = ()
        if split == "train":
            if self.filters.drop_overlap != "none":
                rows = _without(rows, self.seen.overlaps(rows), "overlap", dropped)
            if self.filters.drop_duplicates:
                rows = _without(rows, self.seen.duplicates(rows), "duplicate", dropped)
            leaks = self.seen.near_copies(rows)
            if self.filters.drop_leaks:
                rows, leaks = _without(rows, leaks, "leak", dropped), ()
        dropped.sort()
        counts = Counter(f"dropped.{reason}" for _, reason in dropped)
        for row in rows if rows and "label" in rows[0] else ():
            self._relabel(row)
            counts[f"class.{row['label']}"] += 1
        return Filtered(rows, counts, dropped, leaks)

    def _reason(self, row: dict, split: str) -> str | None:
        if reason := drop_reason(row["source"], row.get("target"), split, self.filters):
            return reason
        return f"label_{row['label']}" if self.labels is not None and row["label"] not in self.labels else None

    def _relabel(self, row: dict) -> None:
        if self.labels is not None:
            row["label"] = self.labels[row["label"]]
            for name in ("node_labels", "leaf_labels"):
                if name in row:
                    row[name] = [self.labels.get(value, UNLABELLED) for value in row[name]]


def _without(rows: list[dict], places: Sequence[int], reason: str, dropped: list[tuple[int, str]]) -> list[dict]:
    """Return the rows at other places; those at these are added to `dropped`."""
    if not len(places):
        return rows
    gone = set(places)
    dropped += [(rows[place]["example_id"], reason) for place in gone]
    return [row for place, row in enumerate(rows) if place not in gone]
