"""Classification of sentences and of their phrases, or of pairs of sentences.

Shapes: B batch, P positions, C classes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treenet.config import ClassifierConfig
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import LEAVES
from treenet.data.labelled import NO_CLASS, LabelledBatch, LabelledSource, PairSource, PhraseSource, check_all_roots
from treenet.models import ClassLogits, build_classifier
from treenet.tasks.base import PredictionTask, check_structure, vocab_sizes
from treenet.tasks.class_scores import class_scores
from treenet.tasks.learning import LEARNING, facts_of_classes
from treenet.tasks.losses import LossSums, label_smoothed_nll, r_drop_loss, take_counted
from treeproc.common.settings import UserError
from treeproc.shards.store import class_names, read_index

_DEFAULT = ClassifierConfig()


class Classification(PredictionTask[LabelledBatch]):
    """Classifiers of examples, which may also learn the classes of phrases, or of pairs, if those of the data set are pairs."""

    num_sums = 8
    score = "accuracy"
    targets = "classes"

    @property
    def neutral_class(self) -> int | None:
        return self.config.classifier.neutral_class

    def check(self, index: Mapping) -> None:
        data, encoder = self.config.data, self.encoder  # refuses an unknown model before it looks for the model's input
        if "label" not in index["columns"]:
            raise UserError(f"{data} has no classes (its columns: {', '.join(index['columns'])}); choose a data set with labels")
        if "num_classes" not in index:
            raise UserError(f"{data} does not record its number of classes; run its tree-attention preprocess command again")
        if index["num_classes"] < 2:
            raise UserError(f"{data} has one class, and a classifier needs two; choose another data set")
        if self.neutral_class is not None and self.neutral_class >= index["num_classes"]:
            raise UserError(
                f"classifier.neutral_class must be one of the {index['num_classes']} classes of {data}, counted from 0, but is "
                f"{self.neutral_class}"
            )
        check_structure(self.config, index, encoder)
        check_all_roots(self.config.data / "encoded", index, self.reads)

    def unread_settings(self, index: Mapping) -> list[str]:
        options, pairs = self.config.classifier, index.get("pairs")
        learns_nodes = options.supervision == "all_phrases" and self.reads.positions == "tree" and not pairs
        ignored = {"split_words": not learns_nodes, "pair_hidden": not pairs, "pair_features": not pairs}
        unread = [
            name for name, is_ignored in ignored.items() if is_ignored and getattr(options, name) != getattr(_DEFAULT, name)
        ]
        return [*super().unread_settings(index), *(f"classifier.{name}" for name in unread)]

    def notes(self, index: Mapping) -> list[str]:
        notes, neutral, num_classes = super().notes(index), self.neutral_class, index["num_classes"]
        if neutral is None:
            return notes
        if has_both_sides(neutral, num_classes):
            names = class_names(index)
            below, above = (_some(side) for side in (names[:neutral], names[neutral + 1 :]))
            said = f"two classes: {below} against {above}, without {names[neutral]}"
        else:
            side = "above" if neutral else "below"
            said = f"of the {num_classes} classes of {self.config.data}, none is {side} it; the run has no binary_accuracy"
        return [*notes, f"classifier.neutral_class = {neutral}: {said}"]

    def open(self, split: str, *, training: bool = False, device: torch.device | str = "cpu") -> ExampleSource | PairSource:
        encoded, reads = self.config.data / "encoded", self.reads
        if read_index(encoded).get("pairs"):
            return PairSource(encoded, split, reads.for_device(device), "label", self.config.frozen_states)
        phrases = self.config.classifier.supervision == "all_phrases"
        if training and phrases and reads is LEAVES:
            if self.config.frozen_states is not None:
                raise UserError(
                    f"frozen_states has the states of whole examples, but model.name = {self.config.model.name} learns "
                    "from phrases read alone; set classifier.supervision=root, or leave frozen_states out"
                )
            return PhraseSource(encoded, split, reads.for_device(device))
        split_words = self.config.classifier.split_words
        return LabelledSource(
            encoded, split, reads.for_device(device), phrases=phrases, split_words=split_words, states=self.config.frozen_states
        )

    def build_model(self, sizes: Mapping) -> nn.Module:
        vocab = vocab_sizes(sizes)
        pairs = sizes.get("pairs", False)
        return build_classifier(self.config.model, vocab, self.config.classifier, sizes["num_classes"], pairs=pairs)

    def counted_targets(self, batch: LabelledBatch) -> Tensor:
        # A batch with classes of positions is for a model that learns only from these.
        targets = batch.position_labels if batch.position_labels.shape[1] else batch.labels
        return (targets != NO_CLASS).flatten().nonzero()[:, 0]

    def sum_losses(
        self,
        model: Any,
        batch: LabelledBatch,
        first: ClassLogits,
        second: ClassLogits | None = None,
        counted: Tensor | None = None,
    ) -> LossSums:
        options = self.config.optimizer
        labels = batch.labels if first.positions is None else batch.position_labels
        outputs = [one.examples if one.positions is None else one.positions for one in (first, second) if one]
        targets, ignored, passes = take_counted(counted, labels, NO_CLASS, *outputs)
        if second is None:
            return label_smoothed_nll(passes[0], targets, options.label_smoothing, ignored)
        return r_drop_loss(passes[0], passes[1], targets, options.label_smoothing, options.r_drop, ignored)

    def count_right(self, batch: LabelledBatch, output: ClassLogits) -> Sequence[Tensor]:
        return count_right(batch, output, self.neutral_class)

    def score_predictions(self, predictions: Iterable[tuple[LabelledBatch, ClassLogits]]) -> tuple[list[str], dict[str, Any]]:
        rows, counts, cells = {}, torch.zeros(()), Counter[tuple[int, int]]()
        for batch, output in predictions:
            counts = counts + torch.stack(list(self.count_right(batch, output))).double()
            probabilities = output.examples.softmax(-1)
            columns = (batch.numbers, batch.labels, output.examples.argmax(-1), probabilities)
            for example, label, predicted, row in zip(*(column.tolist() for column in columns), strict=True):
                cells[label, predicted] += 1
                rows[example] = "\t".join([str(example), str(label), str(predicted), *(f"{p:.6f}" for p in row)]) + "\n"
        head = ["example_id", "label", "predicted", *(f"p{c}" for c in range(len(row)))]
        scores = summarize_counts(counts.cpu()) | class_scores(cells, len(row)) | {LEARNING: facts_of_classes(cells)}
        return ["\t".join(head) + "\n", *(rows[example] for example in sorted(rows))], scores

    def sizes(self, index: Mapping) -> dict[str, Any]:
        return super().sizes(index) | {name: index[name] for name in ("num_classes", "pairs") if name in index}

    def metrics(self, sums: Tensor, targets: int) -> dict[str, float]:
        loss, nll = (sums[:2] / targets).tolist()
        return {"loss": loss, "nll": nll, **summarize_counts(sums[2:])}

    def describe(self, line: Mapping[str, float]) -> str:
        return f"accuracy {line['accuracy']:.2%}, nll {line['nll']:.3f}"

    def describe_best(self, line: Mapping[str, float]) -> str:
        return f"{line['accuracy']:.2%}"

    def next_commands(self) -> list[tuple[str, str, str]]:
        index = read_index(self.config.data / "encoded")
        parser, tree = index.get("parser_settings", {}), index.get("tree_settings", {})
        if parser.get("name") != "given":
            return [("classify text", "classify", " input=FILE output=FILE")]
        if tree.get("tree_source") == "dependencies" and parser.get("given_labels") != "parsed":
            return []  # lines get no arcs
        return [("classify text", "classify", " input=FILE trees=FILE output=FILE")]


def count_right(batch: LabelledBatch, output: ClassLogits, neutral: int | None) -> list[Tensor]:
    """Count examples and how many are right. Count the same for examples read as two classes, and for labelled positions.

    Without classes on both sides of the neutral one, no example is read as two classes.
    """
    labels = batch.labels
    right = output.examples.argmax(-1) == labels
    counts = [torch.full((), len(labels), device=labels.device), right.sum()]
    if neutral is None or not has_both_sides(neutral, output.examples.shape[-1]):
        counts += [torch.zeros_like(counts[0])] * 2
    else:
        is_above = above_neutral(output.examples.softmax(-1), neutral)
        counted = labels != neutral
        counts += [counted.sum(), (counted & (is_above == (labels > neutral))).sum()]
    if output.positions is None:
        return counts + [torch.zeros_like(counts[0])] * 2
    counted = batch.position_labels != NO_CLASS
    return [*counts, counted.sum(), (counted & (output.positions.argmax(-1) == batch.position_labels)).sum()]


def _some(names: Sequence[str]) -> str:
    """Return names of classes, of many the first and the last."""
    return ", ".join(names if len(names) <= 5 else [*names[:2], "...", names[-1]])


def has_both_sides(neutral: int, num_classes: int) -> bool:
    """Return whether there are classes below and above the neutral one."""
    return 0 < neutral < num_classes - 1


def above_neutral(probabilities: Tensor, neutral: int) -> Tensor:
    """Return [B] for probabilities [B, C]: whether the classes above the neutral one have more probability than those below."""
    return probabilities[:, neutral + 1 :].sum(-1) > probabilities[:, :neutral].sum(-1)


def summarize_counts(counts: Tensor) -> dict[str, float]:
    """Return accuracies, as fractions, from the sums of `count_right`. If something was not counted, its accuracy is left out."""
    pairs = counts.view(3, 2).tolist()
    names = ("accuracy", "binary_accuracy", "phrase_accuracy")
    return {name: right / count for name, (count, right) in zip(names, pairs, strict=True) if count}
