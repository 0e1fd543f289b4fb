"""Choices of a language model in minimal pairs: accuracy by the log-probability of whole sentences, for groups of pairs.

A pair is right if its good sentence has the higher probability. Equal probabilities are a tie, and count as wrong. Where the
sentences differ in length, the mean a piece is a second measure; ends of sentences count as pieces.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treenet.evaluation.settings import ScoreLMSettings
from treenet.evaluation.significance import holm
from treenet.tasks.class_scores import wilson_interval
from treenet.tasks.scores import SCORES, score_columns
from treenet.tasks.tables import Column, align, numbers, show_p_value
from treeproc.common.messages import warn
from treeproc.online.minimal_pairs import MinimalPair, PairColumns, read_pairs
from treeproc.shards.store import fingerprint_of

_OF_BLIMP = ("UID", "linguistics_term", "field")
_BLIMP = PairColumns("sentence_good", "sentence_bad", _OF_BLIMP, " with pairs.files instead of blimp")
GROUP = "by."  # begins the titles of columns with groups
_OF_GROUPS = ("pair_accuracy", "accuracy_per_piece")  # the scores of groups
SHOWN = 20  # groups of a column that a table for people has at most


@dataclass(frozen=True)
class PairInput:
    """The pairs to score, and the name of their result."""

    name: str
    pairs: Sequence[MinimalPair]
    by: tuple[str, ...]
    published: Mapping[str, Mapping[str, float]]


def name_pairs(settings: ScoreLMSettings) -> str:
    """Return the name of the result, which has a hyphen, as no name of a split; empty if there are no pairs."""
    files = [settings.blimp] if settings.blimp else settings.pairs.files
    return f"pairs-{'blimp' if settings.blimp else files[0].name.partition('.')[0]}" if files else ""


def open_pairs(settings: ScoreLMSettings) -> PairInput | None:
    """Read the pairs that the settings name, if they name any. Raises UserError as `read_pairs` does."""
    if not (name := name_pairs(settings)):
        return None
    chosen = settings.pairs
    columns = _BLIMP if settings.blimp else PairColumns(chosen.good, chosen.bad, chosen.by)
    pairs, published = read_pairs([settings.blimp] if settings.blimp else chosen.files, columns)
    if settings.blimp:  # one of BLiMP's fields has two spellings
        pairs = [pair._replace(groups=tuple(group.replace("/", "_") for group in pair.groups)) for pair in pairs]
        sizes = Counter(pair.groups[0] for pair in pairs)
        if min(sizes.values()) < max(sizes.values()):
            group, count = min(sizes.items(), key=lambda one: one[1])
            warn(
                f"warning: {settings.blimp}: {group} has {count:,} pairs, but others up to {max(sizes.values()):,}; if this is "
                "BLiMP itself, copy it again"
            )
    pairs = pairs[:: settings.every]
    if equal := sum(pair.is_equal for pair in pairs):
        warn(f"note: {equal:,} of {len(pairs):,} pairs are one sentence twice, which is a tie, and counts as wrong")
    return PairInput(name, pairs, columns.by, published)


def summarize_pairs(given: PairInput, nll: np.ndarray, pieces: np.ndarray) -> dict:
    """Return the accuracy of all pairs and of every group, from nll and numbers of pieces [pairs, 2].

    `paradigm_accuracy` is the mean of the groups of the first column.
    """
    right, per_piece = nll[:, 0] < nll[:, 1], nll / pieces
    ties, unequal = nll[:, 0] == nll[:, 1], pieces[:, 0] != pieces[:, 1]

    def summarize(rows: np.ndarray) -> dict:
        count, correct = len(rows), int(right[rows].sum())
        found: dict = {"num_pairs": count, "pair_accuracy": correct / count, "interval": wilson_interval(correct, count)}
        found |= {"num_ties": int(ties[rows].sum()), "num_unequal": int(unequal[rows].sum())}
        if found["num_unequal"]:
            found["accuracy_per_piece"] = float((per_piece[rows, 0] < per_piece[rows, 1]).mean())
        return found

    out = summarize(np.arange(len(right)))
    if not given.by:
        return out
    groups: dict[str, dict] = {}
    paradigms = np.array([pair.groups[0] for pair in given.pairs])
    for place, column in enumerate(given.by):
        of_pairs = np.array([pair.groups[place] for pair in given.pairs])
        of_names = {name: np.flatnonzero(of_pairs == name) for name in dict.fromkeys(of_pairs.tolist())}
        groups[column] = {name: summarize(rows) for name, rows in of_names.items()}
        for name, one in groups[column].items():
            if (inside := set(paradigms[of_names[name]].tolist())) <= given.published.keys():
                found = [given.published[paradigm] for paradigm in inside]
                one["published"] = {model: math.fsum(row[model] for row in found) / len(found) for model in found[0]}
    return out | {"paradigm_accuracy": _mean_accuracy(groups[given.by[0]]), "groups": groups}


def _mean_accuracy(groups: Mapping[str, Mapping]) -> float:
    return math.fsum(one["pair_accuracy"] for one in groups.values()) / len(groups)


def pair_rows(given: PairInput, nll: np.ndarray, pieces: np.ndarray) -> list[str]:
    """Return the lines of the file of scores: a line for each pair."""
    head = ["pair", "place", *(f"{GROUP}{name}" for name in given.by)]
    head += ["right", "good_nll", "bad_nll", "good_pieces", "bad_pieces"]
    rows = ["\t".join(head)]
    for number, (pair, (good, bad), sizes) in enumerate(zip(given.pairs, nll.tolist(), pieces.tolist(), strict=True)):
        cells = [number, pair.place, *pair.groups, int(good < bad), f"{good:.6f}", f"{bad:.6f}", *map(int, sizes)]
        rows.append("\t".join(map(str, cells)))
    return [f"{row}\n" for row in rows]


def pair_facts(given: PairInput) -> dict:
    """Return the facts by which two results are of the same pairs."""
    return {"pairs_fingerprint": fingerprint_of([[*pair.sentences, *pair.groups] for pair in given.pairs])}


def mcnemar(better: int, worse: int) -> float:
    """Return the two-sided p of McNemar's exact test: of the pairs that one system alone has right."""
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(better, worse), better + worse, 0.5))) if better + worse else 1.0


def compare_groups(baseline: str, system: str) -> dict[str, dict[str, dict]]:
    """Return McNemar's test of every group in the contents of two files of scores, by column; Holm's p is over its groups."""
    form: dict = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}  # a group may begin with a quote
    rows = [list(csv.DictReader(io.StringIO(content), **form)) for content in (baseline, system)]
    found: dict[str, dict[str, dict]] = {}
    for column in [name for name in rows[0][0] if name.startswith(GROUP)]:
        groups: dict[str, dict] = {}
        for one, other in zip(*rows, strict=True):
            group = groups.setdefault(one[column], {"num_pairs": 0, "baseline": 0, "system": 0, "better": 0, "worse": 0})
            sides = one["right"] == "1", other["right"] == "1"
            for name, counts in zip(group, (True, *sides, sides == (False, True), sides == (True, False)), strict=True):
                group[name] += counts
        for group in groups.values():
            group["p"] = mcnemar(group["better"], group["worse"])
        for group, p_value in zip(groups.values(), holm([one["p"] for one in groups.values()]), strict=True):
            group["holm_p"] = p_value
        found[column.removeprefix(GROUP)] = groups
    return found


def format_groups(columns: Mapping[str, Mapping[str, Mapping]]) -> list[str]:
    """Return a table of tests of groups."""
    lines = []
    for column, groups in columns.items():
        width = max(map(len, [*groups, column]))
        lines += ["", f"{column:{width}}{'pairs':>8}{'A, %':>8}{'B, %':>8}{'B alone':>9}{'A alone':>9}{'p':>9}{'p, Holm':>9}"]
        for name, one in groups.items():
            shares = "".join(f"{100 * one[side] / one['num_pairs']:8.2f}" for side in ("baseline", "system"))
            counts = f"{one['better']:9,}{one['worse']:9,}{show_p_value(one['p']):>9}{show_p_value(one['holm_p']):>9}"
            lines.append(f"{name:{width}}{one['num_pairs']:8,}{shares}{counts}")
    return [*lines, "groups: McNemar's exact test, with Holm's correction over the groups of a column"] if lines else []


def pair_columns(title: str, names: Sequence[str], runs: Mapping[str, Sequence[Mapping]]) -> list[Column]:
    """Return the table of groups of pairs, which are the same for all runs. Titles begin with the name of the run."""
    first = next(iter(runs.values()))
    columns = [Column(title, names), numbers("pairs", [one["num_pairs"] for one in first])]
    for run, groups in runs.items():
        columns += [*score_columns(groups, run, _OF_GROUPS), numbers("ties", [one["num_ties"] for one in groups])]
    for model in dict.fromkeys(model for one in first for model in one.get("published", ())):
        published = [100 * found[model] if model in (found := one.get("published", {})) else None for one in first]
        columns.append(numbers(f"{model}, published", published, ".1f"))
    return columns


def format_pairs(scores: Mapping) -> list[str]:
    """Return the lines of a table of an entry: all pairs, then the groups of columns with few of them."""
    columns = scores.get("groups", {})
    rows = [("all", scores), *(row for groups in columns.values() if len(groups) <= SHOWN for row in groups.items())]
    names, found = zip(*rows, strict=True)
    lines = align(pair_columns("minimal pairs", names, {"": found}))
    for column, groups in columns.items():
        if len(groups) > SHOWN:
            mean = SCORES["pair_accuracy"].show(_mean_accuracy(groups))
            lines.append(f"mean of {len(groups)} {column}: {mean} % right; scores.json has each")
    if scores["num_unequal"]:
        lines.append(f"by mean of pieces: {scores['num_unequal']:,} pairs differ in their number of pieces")
    return lines


def format_unread(scores: Mapping) -> list[str]:
    """Return notes about sentences of pairs or of a text that the pieces do not tell entirely."""
    kinds = {"num_with_unknown": "have unknown pieces or bytes", "num_lowercased": "lost their capital letters"}
    every = scores["num_examples"]
    return [f"note: {count:,} of {every:,} sentences {what}" for name, what in kinds.items() if (count := scores.get(name))]
