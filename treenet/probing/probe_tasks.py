"""Settings of probing, and its tasks: the classes of sentences, copies and words, and their rows of states."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from treenet.probing.inputs import ProbeInputs
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.chosen_checkpoint import Checkpoint, OtherData
from treeproc.common.errors import check_choice
from treeproc.common.settings import Settings

TaskName = Literal["depth", "top_constituents", "length", "word_order", "pos_tag", "phrase", "deprel", "arc_depth"]
SENTENCE_TASKS: tuple[TaskName, ...] = ("depth", "top_constituents", "length", "word_order")
WORD_TASKS: tuple[TaskName, ...] = ("pos_tag", "phrase", "deprel", "arc_depth")
ARC_TASKS: tuple[TaskName, ...] = ("deprel", "arc_depth")
PROBE_TASKS = SENTENCE_TASKS + WORD_TASKS

BINS = 6  # classes for depths and lengths, of about equal numbers of examples
TOP_SEQUENCES = 19  # frequent sequences of top constituents with separate classes; all others share one
# Settings that choose what is computed. They do not change the result of a probe.
_CHOICES = {"tasks", "layer", "word_state", "data", "checkpoint"}


class ProbeSettings(Settings):
    """Settings of probing: the states and tasks to probe, and the training of the probes."""

    tasks: tuple[TaskName, ...] | None = Field(
        None,
        min_length=1,
        description="depth, top_constituents, length, word_order of sentences; pos_tag, phrase, deprel, arc_depth of words; "
        "unset, all that the data set has labels of",
    )
    layer: PositiveInt | Literal["last", "all"] = Field(
        "last", description="encoder layer whose states are probed, counted from 1; 'all' probes each and draws accuracy by layer"
    )
    word_state: Literal["first", "mean"] = Field(
        "first", description="state of a word: that of its first piece, or the mean over its pieces"
    )
    data: OtherData = None
    checkpoint: Checkpoint = AVERAGED
    use_gpu: bool = Field(False, description="encode and train the probes on the GPU")
    seed: int = Field(1, ge=0, lt=2**63, description="seed of the choice of sentences and words, and of the exchanged words")
    train_sentences: PositiveInt = Field(10_000, description="most sentences of train, to train the probes on")
    eval_sentences: PositiveInt = Field(2_000, description="most sentences of valid, and of test")
    train_words: PositiveInt = Field(30_000, description="most words of those sentences of train")
    eval_words: PositiveInt = Field(10_000, description="most words of valid, and of test")
    l2: tuple[float, ...] = Field(
        (1e-4, 1e-3, 1e-2, 1e-1), description="strengths of the L2 penalty to choose from by accuracy on valid"
    )
    max_iterations: PositiveInt = Field(100, description="most iterations of L-BFGS, for each strength")

    @field_validator("l2")
    @classmethod
    def _check_strengths(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or min(values) < 0:
            raise ValueError(f"must be numbers of at least 0, for example [0.001, 0.01], but is {list(values)}")
        return values

    def identity(self) -> dict:
        """Return the settings that results depend on, beside the model and the data."""
        return {**self.model_dump(mode="json", exclude=_CHOICES), "bins": BINS, "top_sequences": TOP_SEQUENCES}


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
