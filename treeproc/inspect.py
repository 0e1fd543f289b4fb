"""`tree-attention inspect DATA`: the content of a data set as numbers, histograms and drawn trees."""

import argparse
import json
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from treeproc.common.command_line import ArgumentParser, command, run_cli
from treeproc.common.errors import UserError, printable, require
from treeproc.common.folder_kinds import claim_output
from treeproc.common.named_output import named_output
from treeproc.common.provenance import describe_sessions, read_sessions
from treeproc.common.storage import AnyPath, as_path
from treeproc.inspection.drawing import draw_row
from treeproc.parsers import describe_in_words
from treeproc.shards.lengths import open_lengths
from treeproc.shards.schema import UNSCORED, in_order
from treeproc.shards.shard import Shard, SplitShards, check_stage, check_vocabulary_files
from treeproc.shards.store import describe_trees, read_index, side_of
from treeproc.stages.dropped_lines import why_dropped
from treeproc.stages.job_report import class_notes, noticed, parse_statuses, tree_notes
from treeproc.subwords import LabelVocab, Subwords, load_pieces
from treeproc.trees.flat_trees import node_depths
from treeproc.verify import stage_folders

_BAR = 40
_BINS = 12
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass
class SplitStatistics:
    """Sums and histograms over one split; index i of a histogram counts the value i."""

    rows: int = 0
    leaves: int = 0
    nodes: int = 0
    words: int = 0
    tgt_pieces: int = 0
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # nodes by label id
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # rows by leaves
    depths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # rows by levels of nodes

    def add(self, shard: Shard) -> None:
        """Add whole columns at once: nothing here runs once per row."""
        for views in shard.columns:
            leaf_offsets, leaves = views["leaves"]
            node_offsets, nodes = views["nodes"]
            sizes = np.diff(leaf_offsets)
            full = sizes > 0
            self.rows += len(sizes)
            self.leaves += int(sizes.sum())
            self.nodes += len(nodes["label"])
            self.words += int((leaves["word_index"][(leaf_offsets[1:] - leaf_offsets[0])[full] - 1].astype(np.int64) + 1).sum())
            if "tgt_pieces" in views:
                self.tgt_pieces += len(views["tgt_pieces"][1])
            self.labels = _added(self.labels, np.bincount(nodes["label"]))
            self.lengths = _added(self.lengths, np.bincount(sizes))
            levels = np.zeros(len(sizes), np.int64)
            filled = np.flatnonzero(np.diff(node_offsets))
            if len(filled):
                first = node_offsets[:-1] - node_offsets[0]
                depths = node_depths(np.repeat(first, np.diff(node_offsets)) + views["spans"][1]["subtree_end"])
                levels[filled] = np.maximum.reduceat(depths, first[filled]) + 1
            self.depths = _added(self.depths, np.bincount(levels))


def _added(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if len(left) < len(right):
        left, right = right.astype(np.int64), left
    left[: len(right)] += right
    return left


def statistics(encoded: AnyPath, split: str) -> SplitStatistics:
    """Read the shards of one split. Raises UserError when one is missing or cut off."""
    out = SplitStatistics()
    for record in read_index(encoded).records(split):
        out.add(Shard(encoded, record))
    return out


def histogram(counts: np.ndarray, name: str) -> list[str]:
    """Draw text bars over ranges of equal width."""
    if not counts.any():
        return []
    last = int(np.flatnonzero(counts)[-1])
    width = max(1, -(-(last + 1) // _BINS))
    bins = np.add.reduceat(counts[: last + 1], np.arange(0, last + 1, width))
    lines = [name]
    for i, count in enumerate(bins):
        low, high = i * width, min(last, (i + 1) * width - 1)
        lines.append(_bar_line(f"{low}-{high}" if width > 1 else str(low), int(count), int(bins.max()), int(bins.sum())))
    return lines


def _bar_line(name: str, count: int, most: int, total: int) -> str:
    return f"    {name:>14} {count:>12,} {count / total:>6.1%} {'#' * round(_BAR * count / most)}".rstrip()


def describe(data: AnyPath, num_labels: int = 20) -> tuple[str, dict[str, SplitStatistics]]:
    """Return the report as text, and the figures behind it. Raises UserError if the encoded stage is not finished."""
    folders = stage_folders(data)
    there = [stage for stage in ("text", "parsed") if (folders[stage] / "index.json").exists()]  # training needs none
    for stage in there:
        check_stage(data, stage)
    index = read_index(folders["encoded"])
    check_vocabulary_files(folders["encoded"], index)
    side = side_of(index)
    labels = LabelVocab.load(folders["encoded"] / "vocab" / "labels.txt").names
    notices = read_index(folders["text"]).get("notices", {}) if "text" in there else {}
    lines = [
        f"{data}: {index['num_pieces']:,} pieces, {index['num_labels']} labels, trees: {describe_trees(index)}, "
        f"parser: {describe_in_words(index['parser']) if 'parser' in index else 'unknown'}",
        "made by:",
        *(f"  {line}" for line in describe_sessions(read_sessions(data))),
    ]
    found = {}
    for split in in_order(index["totals"]):
        figures = found[split] = statistics(folders["encoded"], split)
        elements = max(1, figures.leaves + figures.nodes)
        lines += [
            f"{split}: {figures.rows:,} examples, {figures.leaves:,} leaves, {figures.nodes:,} nodes, "
            f"{figures.words:,} words" + (f", {figures.tgt_pieces:,} target pieces" if figures.tgt_pieces else ""),
            f"  leaves / nodes: {figures.leaves / elements:.1%} / {figures.nodes / elements:.1%} (paper, Table 4: 59.2-66.4 / "
            "33.6-40.8)",
            f"  pieces per word: {figures.leaves / max(1, figures.words):.3f}",
            f"  parse_status: {_counts(parse_statuses(folders['parsed'], split, side))}",
            *(f"  {note}" for note in _score_notes(folders["parsed"], split, side)),
            f"  dropped: {_counts(index.get('dropped', {}).get(split, {}))}",
            f"  noticed in the text: {noticed(notices, split)}",
            *(f"  {note}" for note in class_notes(folders["text"], split, index)),
            *(f"  {note}" for note in tree_notes(index["totals"][split])),
            *histogram(figures.lengths, "  leaves of an example"),
            *histogram(figures.depths, "  levels of nodes of an example"),
        ]
        order = np.argsort(-figures.labels, kind="stable")[:num_labels]
        lines += ["  labels"] + [
            _bar_line(labels[i], int(figures.labels[i]), int(figures.labels[order[0]]), figures.nodes)
            for i in order
            if figures.labels[i]
        ]
    return "\n".join(lines), found


def _score_column(parsed: AnyPath, side: str) -> str | None:
    """Return the column of the scores of parses; None if the parsed stage has none or is not there."""
    name = "parse_score" if side == "source" else "target_parse_score"
    return name if (parsed / "index.json").exists() and name in read_index(parsed).get("columns", ()) else None


def _score_notes(parsed: AnyPath, split: str, side: str) -> list[str]:
    """Describe the scores of the parses of a split, dropped examples included."""
    if (column := _score_column(parsed, side)) is None:
        return []
    values = np.concatenate([views[column] for shard in SplitShards(parsed, split) for views in shard.columns])
    found = values[values > UNSCORED]
    if not len(found):
        return [f"{column}: none"]
    lowest = ", ".join(f"{np.quantile(found, share):.3f} ({share:.0%})" for share in _SHARES)
    return [f"{column}: mean {found.mean():.3f}, quantiles {lowest}, without a score {len(values) - len(found):,}"]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in Counter(counts).most_common()) or "none"


def draw_line(data: AnyPath, split: str, line: int) -> str:
    """Draw one example: its tree over pieces with their tags, and its target. Raises UserError if the split has no such line."""
    folder = data / "encoded"
    index = read_index(folder)
    lengths = open_lengths(folder, split)
    ids = lengths["example_id"]  # they ascend; of a large split only some are read
    place = bisect_left(range(len(ids)), line - 1, key=lambda row: int(ids[[row]][0]))
    if place == len(ids) or ids[[place]][0] != line - 1:
        if split not in (there := index["totals"]):
            raise UserError(f"{data} has no split {split!r}; there are: {', '.join(there)}")
        folders = stage_folders(data)
        if why := why_dropped(folders["text"], folders["encoded"], split, line):
            raise UserError(f"{split} has no line {line}: the job dropped it, {why}; choose another --line")
        known = f"{ids[[0]][0] + 1} to {ids[[len(ids) - 1]][0] + 1}, except dropped ones" if len(ids) else "none"
        raise UserError(f"{split} has no line {line} (its lines are {known}); choose another --line")
    shard, number = (int(lengths[name][[place]][0]) for name in ("shard", "row"))
    shards = SplitShards(folder, split)
    row = shards[shards.by_index()[shard]].row(number)
    check_vocabulary_files(folder, index)
    vocab, side = folder / "vocab", side_of(index)
    other = "source" if side == "target" else "target"
    subwords = load_pieces(vocab)
    pieces, (tree, *arcs) = row["leaves"]["piece"], draw_row(row, vocab)
    lines = [
        f"{split} line {line}: {len(pieces)} leaves, {len(row['nodes']['label'])} nodes",
        tree,
        f"{side}: {subwords.decode([pieces])[0]}",
    ]
    if "tgt_pieces" in row:
        own = vocab / "pieces.tgt.model"
        others = Subwords(own) if own.exists() else subwords
        lines.append(f"{other}: {' '.join(others.names(row['tgt_pieces']))}")
    lines += arcs
    parsed = stage_folders(data)["parsed"]
    if column := _score_column(parsed, side):
        check_stage(data, "parsed")
        parse = SplitShards(parsed, split)
        found = parse[parse.by_index()[shard]].find(line - 1, number)
        lines.append(f"{column}: {'none' if found is None or found[column] == UNSCORED else found[column]}")
    given = {name: row[name] for name in ("label", "score", "node_labels", "leaf_labels") if name in row}
    lines += [f"{name}: {json.dumps(np.asarray(value).tolist())}" for name, value in given.items()]
    if "label" in given and (names := index.get("classes")):
        lines.append(f"class: {names[given['label']]}")
    return "\n".join(lines)


def plot(figures: dict[str, SplitStatistics], path: Path) -> None:
    """Plot lengths and depths of all splits as a figure."""
    from matplotlib.figure import Figure  # no pyplot, because it would choose a window system

    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, 2)
    for name, axis, title in (("lengths", axes[0], "leaves of an example"), ("depths", axes[1], "levels of nodes")):
        for split, values in figures.items():
            counts = vars(values)[name]
            axis.plot(np.arange(len(counts)), counts / max(1, values.rows), label=split)
        axis.set(xlabel=title, ylabel="share of examples")
        axis.legend()
    figure.tight_layout()
    with named_output(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix.removeprefix(".") or None)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="tree-attention inspect", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=as_path, metavar="DATA", help="a data set of tree-attention preprocess: a folder or a URI")
    parser.add_argument("--line", type=int, metavar="N", help="draw this line instead, counted from 1")
    parser.add_argument("--split", default="train", help="split of --line (default train)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the histograms")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    if args.plot:
        require("matplotlib", "--plot")
        claim_output(args.plot, {}, "--plot")
    if args.line is not None:
        print(printable(draw_line(args.data, args.split, args.line)))
        return
    text, figures = describe(args.data)
    print(printable(text))
    if args.plot:
        plot(figures, args.plot)
        print(f"histograms: {args.plot}")


if __name__ == "__main__":
    run_cli(main)
