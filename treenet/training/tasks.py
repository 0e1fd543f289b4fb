"""What the shared loop leaves to the kind of training: data, model, losses, and how a validation is judged."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from treenet.config import TrainConfig
from treenet.data import ExampleSource
from treenet.labelled import LabelledSource, PhraseSource
from treenet.models import VocabSizes, build_classifier, build_model, classifier_class, model_class
from treenet.training.classification import ClassifierStepper, summarize_counts
from treenet.training.ranks import Ranks
from treenet.training.step import Stepper
from treeproc.settings import UserError


class Task(ABC):
    """One kind of training. `num_sums` is the length of what a validation adds up, loss and nll first."""

    num_sums = 2
    score = ""  # the metric of a validation that it is judged by, the higher the better; empty for its nll
    examples, targets = "examples", "targets"  # what reports call them

    def __init__(self, config: TrainConfig):
        self.config = config

    @abstractmethod
    def check(self, index: Mapping) -> None:
        """Raises UserError when the settings do not fit the data set with this index."""

    @abstractmethod
    def open(self, split: str, *, training: bool = False) -> ExampleSource:
        """Examples of a split; `training` ones may be others than those that are scored."""

    @abstractmethod
    def build_model(self, sizes: Mapping) -> nn.Module:
        """A freshly initialised model; `sizes` as in the index of the data set, or in meta.json of a checkpoint."""

    def build_stepper(self, model: nn.Module, ranks: Ranks) -> Stepper:
        """What computes the updates of the model."""
        return Stepper(model, self.config, ranks)

    def sizes(self, index: Mapping) -> dict[str, int]:
        """What the model's shape follows from, as run.json and meta.json keep it."""
        return {name: index[name] for name in ("num_pieces", "num_labels")}

    def metrics(self, sums: Tensor, targets: int) -> dict[str, float]:
        """The metrics of a validation over so many targets."""
        loss, nll = (sums[:2] / targets).tolist()
        return {"loss": loss, "nll": nll, "perplexity": math.exp(min(nll, 700.0))}

    def criterion(self, line: Mapping[str, float]) -> float:
        """What a validation is judged by, the lower the better."""
        return 1.0 - line[self.score] if self.score else line["nll"]

    def checkpoint_facts(self, valid: Mapping[str, float] | None) -> dict[str, float]:
        """What meta.json has of the validation beside valid_nll."""
        return {"valid_criterion": self.criterion(valid)} if valid and self.score else {}

    def describe(self, line: Mapping[str, float]) -> str:
        """A validation as a person reads it."""
        return f"nll {line['nll']:.3f}, perplexity {line['perplexity']:.2f}"

    def describe_best(self, line: Mapping[str, float]) -> str:
        """What the best validation reached."""
        return f"{line['nll']:.3f}"


class Translation(Task):
    """Encoder-decoder models on pairs."""

    examples, targets = "pairs", "target tokens"

    def check(self, index: Mapping) -> None:
        data = self.config.data
        if "tgt_pieces" not in index.get("columns", ["tgt_pieces"]):
            raise UserError(
                f"{data} has no target side (its columns: {', '.join(index['columns'])}), and a translation model needs "
                "one; choose a data set of pairs"
            )
        if not index.get("subword_settings", {}).get("joint", True):
            raise UserError(
                f"{data} has a vocabulary for each side, but models share one table of pieces between the sides; "
                "preprocess again with subwords.joint=true and parsed set to its folder"
            )

    def open(self, split: str, *, training: bool = False) -> ExampleSource:
        return ExampleSource(self.config.data / "encoded", split, model_class(self.config.model).reads)

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_model(self.config.model, VocabSizes(sizes["num_pieces"], sizes["num_labels"]))


class Classification(Task):
    """Classifiers of examples, which may learn the classes of phrases too."""

    num_sums = 8
    score = "accuracy"
    targets = "classes"

    @property
    def neutral_class(self) -> int | None:
        return self.config.classifier.neutral_class

    def check(self, index: Mapping) -> None:
        data, reads = self.config.data, classifier_class(self.config.model).reads
        if "label" not in index["columns"]:
            raise UserError(f"{data} has no classes (its columns: {', '.join(index['columns'])}); choose a data set with labels")
        if "num_classes" not in index:
            raise UserError(f"{data} does not say how many classes it has; run its workflows/preprocess.py command again")
        if self.neutral_class is not None and self.neutral_class >= index["num_classes"]:
            raise UserError(
                f"classifier.neutral_class must be one of the {index['num_classes']} classes of {data}, counted from 0, but is "
                f"{self.neutral_class}"
            )
        if reads == "binary_trees" and index["tree_settings"]["binarize"] == "none":
            raise UserError(
                f"{data} has trees that need not be binary, and model.name = {self.config.model.name} reads binary ones; "
                "preprocess again with tree.binarize=right and parsed set to its folder"
            )

    def open(self, split: str, *, training: bool = False) -> ExampleSource:
        encoded, reads = self.config.data / "encoded", classifier_class(self.config.model).reads
        phrases = self.config.classifier.supervision == "all_phrases"
        if training and phrases and reads == "leaves":
            return PhraseSource(encoded, split)
        return LabelledSource(encoded, split, reads, phrases=phrases)

    def build_model(self, sizes: Mapping) -> nn.Module:
        vocab = VocabSizes(sizes["num_pieces"], sizes["num_labels"])
        return build_classifier(self.config.model, vocab, self.config.classifier, sizes["num_classes"])

    def build_stepper(self, model: nn.Module, ranks: Ranks) -> Stepper:
        return ClassifierStepper(model, self.config, ranks)

    def sizes(self, index: Mapping) -> dict[str, int]:
        return super().sizes(index) | {"num_classes": index["num_classes"]}

    def metrics(self, sums: Tensor, targets: int) -> dict[str, float]:
        loss, nll = (sums[:2] / targets).tolist()
        return {"loss": loss, "nll": nll, **summarize_counts(sums[2:])}

    def describe(self, line: Mapping[str, float]) -> str:
        return f"accuracy {line['accuracy']:.2%}, nll {line['nll']:.3f}"

    def describe_best(self, line: Mapping[str, float]) -> str:
        return f"{line['accuracy']:.2%}"


TASKS: dict[str, type[Task]] = {"translation": Translation, "classification": Classification}


def build_task(config: TrainConfig) -> Task:
    """The task of a configuration."""
    return TASKS[config.task](config)
