"""What the shared loop leaves to the kind of training: data, model, losses, and how a validation is judged."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from treenet.config import TrainConfig
from treenet.data.batch import READS_ARCS, Reads
from treenet.data.examples import ExampleSource
from treenet.data.labelled import LabelledSource, PhraseSource
from treenet.data.pairs import PairSource
from treenet.models import (
    VocabSizes,
    build_classifier,
    build_masked_lm,
    build_model,
    build_relatedness,
    classifier_class,
    masked_lm_class,
    model_class,
)
from treenet.training.classification import ClassifierStepper, summarize_counts
from treenet.training.masked_lm import MaskedLMStepper, MaskedSource
from treenet.training.memory import check_fits
from treenet.training.ranks import Ranks
from treenet.training.relatedness import RelatednessStepper, summarize_moments
from treenet.training.step import Stepper
from treeproc.common.files import read_text
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED, UNKNOWN_LABEL
from treeproc.trees.forest import BINARY_PREFIX

_AGAIN = "run workflows/preprocess.py again"
PARSER_TREES = ("parsed", "dependencies")  # tree.tree_source of data sets whose trees are no control


class Task(ABC):
    """One kind of training. `num_sums` is the length of what a validation adds up, loss and nll first."""

    num_sums = 2
    score = ""  # the metric of a validation that it is judged by, the higher the better; empty for its nll
    auxiliary_loss = ""  # what metrics call a loss of the model's own; empty for none
    examples, targets = "examples", "targets"  # what reports call them
    workflow = "train_wmt.py"  # what trains it

    def __init__(self, config: TrainConfig):
        self.config = config

    @property
    @abstractmethod
    def reads(self) -> Reads:
        """What the model reads. Raises UserError for an unknown name."""

    @abstractmethod
    def check(self, index: Mapping) -> None:
        """Raises UserError when the settings do not fit the data set with this index."""

    @abstractmethod
    def open(self, split: str, *, training: bool = False) -> ExampleSource:
        """Examples of a split; `training` ones may be others than those that are scored."""

    @abstractmethod
    def build_model(self, sizes: Mapping) -> nn.Module:
        """A freshly initialised model; `sizes` as `sizes` gives them, or as in meta.json of a checkpoint."""

    def count_parameters(self, sizes: Mapping, copies: int = 1) -> int:
        """Parameters of the model, without making it. Raises UserError when `copies` of them are more than memory holds."""
        try:
            with torch.device("meta"):
                parameters = sum(parameter.numel() for parameter in self.build_model(sizes).parameters())
        except (RuntimeError, OverflowError) as error:  # more than 2^63 bytes
            raise UserError(f"model: no machine has memory for these sizes ({error}); choose smaller ones") from None
        check_fits(parameters, copies)
        return parameters

    def build_model_that_fits(self, sizes: Mapping) -> nn.Module:
        """`build_model`. Raises UserError when this machine has no memory for it."""
        self.count_parameters(sizes)
        return self.build_model(sizes)

    def build_stepper(self, model: nn.Module, ranks: Ranks) -> Stepper:
        """What computes the updates of the model."""
        return Stepper(model, self.config, ranks)

    def sizes(self, index: Mapping) -> dict[str, int]:
        """What the model's shape follows from, as run.json and meta.json keep it."""
        sizes = {name: index[name] for name in ("num_pieces", "num_labels")}
        vocab = self.config.data / "encoded" / "vocab"
        files = {f"num_{name}": vocab / f"{name}.txt" for name in ("pos_tags", "deprels")}
        return sizes | {name: len(read_text(path, _AGAIN).splitlines()) for name, path in files.items() if path.exists()}

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

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        self.auxiliary_loss = model_class(config.model).auxiliary_loss
        self.num_sums = 3 if self.auxiliary_loss else 2

    @property
    def reads(self) -> Reads:
        return model_class(self.config.model).reads_with(self.config.model)

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
        check_structure(self.config, index, self.reads)

    def open(self, split: str, *, training: bool = False) -> ExampleSource:
        return ExampleSource(self.config.data / "encoded", split, self.reads)

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_model(self.config.model, vocab_sizes(sizes))

    def metrics(self, sums: Tensor, targets: int) -> dict[str, float]:
        metrics = super().metrics(sums, targets)
        return metrics | {self.auxiliary_loss: sums[2].item() / targets} if self.auxiliary_loss else metrics


class Classification(Task):
    """Classifiers of examples, which may learn the classes of phrases too."""

    num_sums = 8
    score = "accuracy"
    targets = "classes"
    workflow = "train_classifier.py"

    @property
    def reads(self) -> Reads:
        return classifier_class(self.config.model).reads_with(self.config.model)

    @property
    def neutral_class(self) -> int | None:
        return self.config.classifier.neutral_class

    def check(self, index: Mapping) -> None:
        data, reads = self.config.data, self.reads  # an unknown model is refused before what it would read is looked for
        if "label" not in index["columns"]:
            raise UserError(f"{data} has no classes (its columns: {', '.join(index['columns'])}); choose a data set with labels")
        if "num_classes" not in index:
            raise UserError(f"{data} does not say how many classes it has; run its workflows/preprocess.py command again")
        if self.neutral_class is not None and self.neutral_class >= index["num_classes"]:
            raise UserError(
                f"classifier.neutral_class must be one of the {index['num_classes']} classes of {data}, counted from 0, but is "
                f"{self.neutral_class}"
            )
        check_structure(self.config, index, reads)

    def open(self, split: str, *, training: bool = False) -> ExampleSource:
        encoded, reads = self.config.data / "encoded", self.reads
        phrases = self.config.classifier.supervision == "all_phrases"
        if training and phrases and reads == "leaves":
            return PhraseSource(encoded, split)
        return LabelledSource(encoded, split, reads, phrases=phrases, split_words=self.config.classifier.split_words)

    def build_model(self, sizes: Mapping) -> nn.Module:
        vocab = vocab_sizes(sizes)
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


class Relatedness(Task):
    """Scores of pairs of sentences, from a classifier's encoder that reads each of them."""

    num_sums = 8
    score = "pearson"
    examples, targets = "pairs", "pairs"
    workflow = "train_classifier.py"

    @property
    def reads(self) -> Reads:
        return classifier_class(self.config.model).reads_with(self.config.model)

    def check(self, index: Mapping) -> None:
        options = self.config.optimizer
        if self.config.classifier.neutral_class is not None:
            raise UserError("classifier.neutral_class must be null for task relatedness, which has scores and no classes")
        if options.label_smoothing or options.r_drop:
            raise UserError(
                "optimizer.label_smoothing and optimizer.r_drop must be 0 for task relatedness, whose targets are "
                f"distributions, but are {options.label_smoothing} and {options.r_drop}"
            )
        check_structure(self.config, index, self.reads)

    def open(self, split: str, *, training: bool = False) -> PairSource:
        return PairSource(self.config.data / "encoded", split, self.reads)

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_relatedness(self.config.model, vocab_sizes(sizes), self.config.classifier)

    def build_stepper(self, model: nn.Module, ranks: Ranks) -> Stepper:
        return RelatednessStepper(model, self.config, ranks)

    def metrics(self, sums: Tensor, targets: int) -> dict[str, float]:
        loss, nll = (sums[:2] / targets).tolist()
        return {"loss": loss, "nll": nll, **summarize_moments(sums[2:])}

    def describe(self, line: Mapping[str, float]) -> str:
        return f"Pearson {line['pearson']:.4f}, squared error {line['mse']:.3f}"

    def describe_best(self, line: Mapping[str, float]) -> str:
        return f"{line['pearson']:.4f}"


class MaskedLanguageModel(Task):
    """Encoders that predict masked pieces of the leaves, of data sets with targets or without."""

    targets = "masked pieces"
    workflow = "train_lm.py"

    @property
    def reads(self) -> Reads:
        return masked_lm_class(self.config.model).reads

    def check(self, index: Mapping) -> None:
        """Any data set has leaves; what may be wrong is the name of the model."""
        masked_lm_class(self.config.model)

    def open(self, split: str, *, training: bool = False) -> ExampleSource:
        return MaskedSource(self.config.data / "encoded", split, self.reads, self.config.masked_lm.rate)

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_masked_lm(self.config.model, vocab_sizes(sizes))

    def build_stepper(self, model: nn.Module, ranks: Ranks) -> Stepper:
        return MaskedLMStepper(model, self.config, ranks)


def vocab_sizes(sizes: Mapping) -> VocabSizes:
    """Sizes as meta.json keeps them; checkpoints of earlier times know of pieces and labels alone."""
    return VocabSizes(sizes["num_pieces"], sizes["num_labels"], sizes.get("num_pos_tags", 0), sizes.get("num_deprels", 0))


def check_structure(config: TrainConfig, index: Mapping, reads: Reads) -> None:
    """Raises UserError where trees, arcs, tags or labels of the data set are not those that the model is about."""
    trees, model, data = index.get("tree_settings", {}), config.model, config.data
    if reads == "binary_trees" and trees.get("binarize") == "none":
        raise UserError(
            f"{data} has trees that need not be binary, and model.name = {model.name} reads binary ones; preprocess again with "
            "tree.binarize=right and parsed set to its folder"
        )
    check_no_control(data, index, reads, model.name)
    if reads in ("words", "dependencies") and model.relations.label_head == "pos_tag" and not _says_anything(data, "pos_tags"):
        raise UserError(
            f"{data} has no part-of-speech tags, which model.relations.label_head = pos_tag reads; preprocess again with "
            "parser.name=stanza, or of given trees with parser.given_labels=parsed"
        )
    if reads == "phrases" and model.phrases.tag_loss and not _says_anything(data, "labels"):
        raise UserError(
            f"{data} has one label for all phrases, which model.phrases.tag_loss has nothing to learn from; set it to 0, or "
            "preprocess again with parser.name=stanza, or of given trees with parser.given_labels=parsed"
        )


def check_no_control(data: AnyPath, index: Mapping, reads: Reads, name: str) -> None:
    """Raises UserError for control trees where the model reads arcs, which are the parser's whatever the trees."""
    source = index.get("tree_settings", {}).get("tree_source", "parsed")
    if reads in READS_ARCS and source not in PARSER_TREES and "arcs" in index.get("columns", ["arcs"]):
        raise UserError(
            f"{data} has {source} trees, but the parser's arcs, which model.name = {name} reads: it would be no control; choose "
            f"a data set of tree.tree_source={' or '.join(PARSER_TREES)}"
        )


def _says_anything(data: AnyPath, vocabulary: str) -> bool:
    """Whether tags or labels tell apart: two of them at least, beside the unknown and those of split words and of binarising."""
    names = read_text(data / "encoded" / "vocab" / f"{vocabulary}.txt", _AGAIN).splitlines()
    told = {name for name in names if not name.startswith((SPLIT_WORD_PREFIX, BINARY_PREFIX))}
    return len(told - {UNKNOWN_LABEL, UNANALYSED}) > 1


TASKS: dict[str, type[Task]] = {
    "translation": Translation,
    "classification": Classification,
    "relatedness": Relatedness,
    "masked_lm": MaskedLanguageModel,
}


def build_task(config: TrainConfig) -> Task:
    """The task of a configuration."""
    return TASKS[config.task](config)


def workflow_of(run_dir: AnyPath) -> str:
    """The script that trains the run in this folder, as messages name it."""
    try:
        return f"workflows/{TASKS[load_settings(TrainConfig, run_dir / 'config.yaml').task].workflow}"
    except UserError:
        return "the workflow of the run"


def check_task(config: TrainConfig, *names: str) -> None:
    """Raises UserError when the configuration is one of other tasks than those of a workflow."""
    if config.task not in names:
        raise UserError(
            f"task must be {' or '.join(names)}, but is {config.task}; workflows/{TASKS[config.task].workflow} trains that"
        )
