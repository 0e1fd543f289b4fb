"""The tasks of probing: the classes of sentences, copies and words, and their rows of states."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treenet.probing.inputs import ProbeInputs
from treenet.probing.settings import BINS, TOP_SEQUENCES, WORD_TASKS, TaskName
from treeproc.common.errors import check_choice

OTHER = "other"
UNSEEN = -1  # a class that train does not have, so no probe can predict it


@dataclass(frozen=True)
class ProbeTask:
    """A classification task. Its classes are those of train. A row is one of `States.sentences`, or of `States.words`."""

    name: TaskName
    classes: list[str]
    rows: dict[str, np.ndarray]  # split -> [m]
    labels: dict[str, np.ndarray]  # split -> [m] place in `classes`, or UNSEEN

    @property
    def of_words(self) -> bool:
        return self.name in WORD_TASKS

    @property
    def empty(self) -> bool:
        """Return whether the task is trivial: it has one class, or a split without examples."""
        return len(np.unique(self.labels["train"])) < 2 or not all(len(one) for one in self.labels.values())

    def majority(self, split: str) -> float:
        """Return the accuracy of a constant prediction, the most frequent class of train."""
        most = np.bincount(self.labels["train"], minlength=len(self.classes)).argmax()
        return float((self.labels[split] == most).mean()) if len(self.labels[split]) else 0.0


def build_probe_task(name: TaskName, splits: Mapping[str, ProbeInputs]) -> ProbeTask:
    """Build the examples of a task in each split. `train` is required, and gives the classes."""
    check_choice("name", name, TaskName)
    if name == "word_order":
        rows = {split: _order_rows(inputs) for split, inputs in splits.items()}
        labels = {split: (rows[split] >= len(inputs.pair)).astype(np.int64) for split, inputs in splits.items()}
        return ProbeTask(name, ["as written", "exchanged"], rows, labels)
    values = {split: _values(name, inputs) for split, inputs in splits.items()}
    rows = {split: np.arange(len(one)) for split, one in values.items()}
    if name in ("depth", "length", "arc_depth"):
        classes, ends = bin_values(values["train"], BINS)
        return ProbeTask(name, classes, rows, {split: np.searchsorted(ends, one) for split, one in values.items()})
    most = TOP_SEQUENCES if name == "top_constituents" else None
    classes = frequent_classes(values["train"], most)
    numbers = {value: number for number, value in enumerate(classes)}
    rest = numbers[OTHER] if most is not None and len(classes) > most else UNSEEN
    return ProbeTask(name, classes, rows, {s: np.array([numbers.get(value, rest) for value in one]) for s, one in values.items()})


def _values(name: TaskName, inputs: ProbeInputs) -> Sequence[str] | np.ndarray:
    """Return the gold value of a task for every sentence, or for every chosen word."""
    syntax, words = inputs.sentences.syntax, inputs.words
    if name == "depth":
        return syntax.depth
    if name == "length":
        return np.diff(syntax.word_edges)
    if name == "top_constituents":
        return syntax.top
    if name == "arc_depth":
        return syntax.arc_depth[words]
    return [getattr(syntax, name)[word] for word in words.tolist()]


def _order_rows(inputs: ProbeInputs) -> np.ndarray:
    """Return a row for every sentence with an exchangeable pair: its copy if it has one, else the sentence itself."""
    rows = np.arange(len(inputs.pair))
    rows[inputs.copies] = len(inputs.pair) + np.arange(len(inputs.copies))
    return rows[inputs.pair[:, 1] > 0]


def bin_values(values: np.ndarray, count: int) -> tuple[list[str], np.ndarray]:
    """Split whole numbers into at most `count` ranges, each with about the same number of `values`.

    Returns their names, and the last number of each range except the last range. There are fewer ranges if one number is very
    frequent.
    """
    lasts = np.unique(np.quantile(values, np.arange(1, count) / count, method="inverted_cdf")).astype(np.int64)
    lasts = lasts[lasts < values.max()]
    firsts = [None, *(last + 1 for last in lasts.tolist())]
    names = []
    for first, last in zip(firsts, [*lasts.tolist(), None], strict=True):
        if first is None or last is None:
            names.append("all" if first is last else f"up to {last}" if first is None else f"{first} and more")
        else:
            names.append(str(first) if first == last else f"{first} to {last}")
    return names, lasts


def frequent_classes(values: Sequence[str], most: int | None) -> list[str]:
    """Return values by frequency, ties by name. With `most`, it returns so many of them, and OTHER if there are more."""
    ordered = [value for value, _ in sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))]
    return ordered if most is None or len(ordered) <= most else [*ordered[:most], OTHER]
