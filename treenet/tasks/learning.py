"""Whether a model learned anything: facts about its outputs, as `learning` of an entry in scores.json, and what they show.

BLEU and accuracy alone decide nothing, because a weak model has learned something. Few lines decide nothing either, nor does a
fact that also holds for the right outputs.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from treenet.tasks.translation_metrics import MAIN, MAIN_OF_TOKENS, build_tokenizer
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import EOS_ID
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import pieces_fingerprint, read_index

Name = TypeVar("Name", bound=Hashable)
LEARNING = "learning"  # of an entry of scores.json
LOWEST_NLL = "lowest_nll"  # in training, of a language model that is overfitted
_FEWEST = 20  # lines, right outputs that differ, or examples of other classes than the most frequent one
_OVERFITTED = 0.9  # of a unigram model's nll: a lower one of some updates on train, which is noisy, shows more than frequencies
_MOST_PIECE, _MOST_CLASS = 0.9, 0.99  # shares of one piece in translations, and of one class in predictions
_MOST_LABEL = 0.9  # share of one class in the labels: with more, a model may rightly give it to nearly all
_LEAST_DISTINCT = 0.01  # different outputs, as a share of different right ones
_LEAST_SPREAD = 0.01  # deviation of predicted scores, as a share of that of the right ones
_HIGHEST_BLEU = 1.0  # of a model whose nll counts: one that learned its training data by heart has a high nll, too
_SHOWN = 6  # models in a line
_SHARDS = 32  # of train, spread evenly: enough for frequencies of pieces, and few to copy from a store


def facts_of_lines(outputs: Sequence[Sequence[Hashable]], references: Collection[Sequence[Hashable]]) -> dict[str, float]:
    """Return facts about translations and their references, each a sequence of pieces or tokens."""
    found: dict[str, float] = {}
    for name, lines in (("", outputs), ("reference_", references)):
        counts = Counter(piece for line in lines for piece in line)
        found[f"{name}piece_share"] = max(counts.values(), default=0) / max(1, counts.total())
        found[f"{name}distinct"] = len(set(map(tuple, lines)))
    return found


def facts_of_classes(cells: Mapping[tuple[int, int], int]) -> dict[str, float]:
    """Return facts about predicted classes, from counts by (class, predicted class)."""
    found, total = {}, sum(cells.values())
    for name, side in (("class_share", 1), ("label_share", 0)):
        counts = Counter[int]()
        for cell, count in cells.items():
            counts[cell[side]] += count
        found[name] = max(counts.values()) / total
    return found


def facts_of_scores(predicted: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Return the facts about predicted scores [n] and the right ones [n]."""
    spread = float(np.std(scores))
    return {"spread": float(np.std(predicted)) / spread} if spread else {}


def facts_of_text(outputs: Sequence[str], references: Sequence[str], tokenizer: str) -> dict[str, float]:
    """Return `facts_of_lines` of lines of text, whose pieces are not known: of their tokens."""
    split = build_tokenizer(tokenizer)
    return facts_of_lines(*([split(line).split() for line in side] for side in (outputs, references)))


def piece_counts(
    data: AnyPath, split: str, column: str = "tgt_pieces", *, ends: bool = True, most: int | None = None
) -> np.ndarray:
    """Count the pieces of a split [V], from a column of encoded shards; with `ends`, one end of the sentence a line.

    With more shards than `most`, those that are spread evenly count. Raises UserError if a shard is missing or damaged.
    """
    shards = SplitShards(data / "encoded", split)
    counts = np.zeros(read_index(data / "encoded")["num_pieces"], dtype=np.int64)
    for place in np.unique(np.linspace(0, len(shards) - 1, min(len(shards), most or len(shards))).astype(int)).tolist():
        shard = shards[place]
        for views in shard.columns:
            _, flat = views[column]
            counts += np.bincount(flat["piece"] if isinstance(flat, dict) else flat, minlength=len(counts))
        counts[EOS_ID] += len(shard) * ends
    return counts


def facts_of_nll(own: AnyPath, data: AnyPath, split: str, column: str = "tgt_pieces", *, ends: bool = True) -> dict[str, float]:
    """Return the nll a piece of a split under a unigram model: the frequencies of pieces in the train of `own` or of `data`.

    There is no fact without a train of the same pieces, and a note if it cannot be read.
    """
    pieces = pieces_fingerprint(read_index(data / "encoded"))
    try:
        for place in (own, data):
            if not (place / "encoded" / "index.json").exists():
                continue
            there = read_index(place / "encoded")
            if "train" in there["totals"] and pieces_fingerprint(there) == pieces:
                train = piece_counts(place, "train", column, ends=ends, most=_SHARDS) + 1
                counts = piece_counts(data, split, column, ends=ends)
                return {"unigram_nll": float(-counts @ np.log(train / train.sum()) / max(1, counts.sum()))}
    except (UserError, ValueError) as error:
        warn(f"note: the nll is not compared with that of a unigram model of train: {error}")
    return {}


def why_unlearned(entry: Mapping) -> str:
    """Return a sign that the model of an entry of scores.json learned nothing; empty if there is none, or no fact.

    There is none of a model that the user wanted untrained.
    """
    facts, lines = entry.get(LEARNING) or {}, entry.get("num_examples", 0)
    if entry.get("asked", {}).get("untrained"):
        return ""
    if (right := facts.get("reference_distinct", 0)) >= _FEWEST:
        share, distinct = facts.get("piece_share", 0), facts.get("distinct", right)
        if share > _MOST_PIECE >= facts.get("reference_piece_share", 1):
            return f"one piece is {share:.1%} of the output"
        if distinct <= max(1, _LEAST_DISTINCT * right):
            return f"different outputs: {distinct:,}, different references: {right:,}"
    if lines < _FEWEST:
        return ""
    if facts.get("class_share", 0) >= _MOST_CLASS and facts.get("label_share", 1) <= min(_MOST_LABEL, 1 - _FEWEST / lines):
        return f"one class has {facts['class_share']:.1%} of the predictions"
    if facts.get("spread", 1) < _LEAST_SPREAD:
        return "the predicted scores hardly differ"
    return "" if LOWEST_NLL in facts else _why_high(entry, facts)


def _why_high(entry: Mapping, facts: Mapping) -> str:
    """Return how the nll of an entry is not below that of a unigram model; empty if it is, or if translations are better."""
    nll, unigram = entry.get("nll", -math.inf), facts.get("unigram_nll", math.inf)
    if given_tree := entry.get("perplexity_given_tree"):  # the nll of a grammar is of its trees, too
        nll = math.log(max(1.0, given_tree))
    if nll >= unigram and max(entry.get(MAIN, 0), entry.get(MAIN_OF_TOKENS, 0)) < _HIGHEST_BLEU:
        return f"nll {nll:.3f}, a unigram model of train has {unigram:.3f}"
    return ""


def facts_of_training(facts: Mapping[str, float], lines: Iterable[Mapping], last: float) -> dict[str, float]:
    """Return the lowest nll of the training of a model, of its `lines` of metrics.jsonl, if it is far below a unigram model's.

    Lines after the step `last` do not count.
    """
    found = [line["nll"] for line in lines if line["step"] <= last and line.get("nll") is not None]
    return {LOWEST_NLL: min(found)} if found and min(found) < _OVERFITTED * facts.get("unigram_nll", -math.inf) else {}


def why_overfitted(entry: Mapping) -> str:
    """Return a sign that the model of an entry learned its training data by heart; empty if there is none."""
    facts = entry.get(LEARNING) or {}
    lowest = facts.get(LOWEST_NLL)
    return f"{why}, but {lowest:.3f} was reached in training" if lowest is not None and (why := _why_high(entry, facts)) else ""


def find_overfitted(entries: Mapping[Name, Mapping]) -> dict[Name, str]:
    """Return why models are overfitted, by the names of their entries of scores.json; without the others."""
    return {name: why for name, entry in entries.items() if (why := why_overfitted(entry))}


def find_unlearned(entries: Mapping[Name, Mapping]) -> dict[Name, str]:
    """Return why models learned nothing, by the names of their entries of scores.json; without the others."""
    return {name: why for name, entry in entries.items() if (why := why_unlearned(entry))}


def say_unlearned(reasons: Mapping[str, str]) -> list[str]:
    """Return a line about the models that `find_unlearned` found, in a list; an empty list if there is none."""
    return _say("nothing was learned; train longer", reasons)


def say_overfitted(reasons: Mapping[str, str]) -> list[str]:
    """Return a line about the models that `find_overfitted` found, in a list; an empty list if there is none."""
    return _say("overfitted; set average=best, or train with fewer updates", reasons)


def _say(what: str, reasons: Mapping[str, str]) -> list[str]:
    said = [f"{name} ({why})" for name, why in reasons.items()]
    more = f", and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return [f"{what}: {', '.join(said[:_SHOWN])}{more}"] if said else []
