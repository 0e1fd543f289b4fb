"""What a preprocessing job says of its work: what it dropped, what was not parsed, the sizes of a data set."""

from collections.abc import Iterable, Sequence

from treeproc.shards import ShardRecord, read_index, stage_folder
from treeproc.storage import AnyPath


def dropped(records: Iterable[ShardRecord]) -> dict[str, dict[str, int]]:
    """Dropped rows by split and reason."""
    out: dict[str, dict[str, int]] = {}
    for record in records:
        counts = out.setdefault(record.split, {})
        for name, count in record.counts.items():
            if name.startswith("dropped."):
                reason = name.removeprefix("dropped.")
                counts[reason] = counts.get(reason, 0) + count
    return out


def parse_statuses(parsed: AnyPath, split: str, side: str = "source") -> dict[str, int]:
    """Examples by parse_status of a side; empty where the parsed stage is not there: training does not need it."""
    if not (parsed / "index.json").exists():
        return {}
    totals = read_index(parsed)["totals"].get(split, {})
    prefix = "status." if side == "source" else "target_status."
    return {name.removeprefix(prefix): count for name, count in totals.items() if name.startswith(prefix)}


def fallbacks(counts: dict[str, int]) -> int:
    """Examples that got a flat tree because no parser could analyse them."""
    return sum(count for name, count in counts.items() if name.startswith("status.") and name != "status.parsed")


def reasons(counts: dict[str, int]) -> str:
    """Counts by name, as a person reads them."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"


def summary(index: dict, out: AnyPath) -> str:
    """What a person wants to know at the end of the job."""
    lines = [f"data set in {out}: {index['num_pieces']:,} pieces, {index['num_labels']} labels, trees: {index['tree_source']}"]
    for split, total in index["totals"].items():
        pairs = "tgt_pieces" in index["columns"]
        names = {"rows": "pairs" if pairs else "examples", "leaves": "leaves", "nodes": "nodes"}
        names |= {"tgt_pieces": "target pieces"} if pairs else {}
        sizes = [f"{total[key]:,} {name}" for key, name in names.items()]
        lines.append(f"  {split}: {', '.join(sizes)}; dropped: {reasons(index['dropped'].get(split, {}))}")
        if statuses := parse_statuses(stage_folder(out, "parsed"), split, index["tree_settings"]["side"]):
            lines.append(f"    parse_status: {reasons(statuses)}")
    return "\n".join(lines)


def count_lines(records: Sequence[ShardRecord]) -> list[str]:
    """Examples that stay, and those dropped by reason, one line a split."""
    rows: dict[str, int] = {}
    for record in records:
        rows[record.split] = rows.get(record.split, 0) + record.rows
    by_split = dropped(records)
    return [f"  {split}: {count:,} examples; dropped: {reasons(by_split[split])}" for split, count in rows.items()]
