"""The interface of a task: its data, its model, its losses, and the criterion of a validation; checks that all tasks share.

The module of a task is loaded when the task is asked for.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from treenet.config import BatchConfig, TrainConfig
from treenet.config.unread import unread_settings
from treenet.data.batch import TreeBatch
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import ACTIONS, InputKind, check_columns
from treenet.data.labelled import PairSource
from treenet.models import ClassLogits, DataFacts, Encoder, VocabSizes, find_encoder
from treenet.models.pretrained import PretrainedLeaves
from treenet.models.pretrained_folder import FACTS as PRETRAINED
from treenet.models.pretrained_folder import pretrained_facts
from treenet.models.registry import Use, only_shapes
from treenet.tasks.losses import LossSums, sum_tied_losses
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.lengths import open_lengths
from treeproc.shards.schema import PAD_ID, SPLIT_WORD_PREFIX, UNANALYSED, UNKNOWN_LABEL
from treeproc.shards.shard import read_names
from treeproc.shards.store import read_index
from treeproc.trees.flat_trees import BINARY_PREFIX


def machine_memory() -> int:
    """Return the bytes of memory that a process may have: of the machine, or of the container if that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def check_fits(parameters: int, copies: int) -> None:
    """Raise UserError if so many copies of a model's float32 parameters exceed the memory of this machine."""
    needed, there = 4 * copies * parameters, machine_memory()
    if needed > there:
        what = "weights, gradients and Adam's two moments" if copies > 1 else "weights"
        raise UserError(
            f"model: {parameters:,} parameters need {needed / 2**30:,.0f} GiB of memory ({what}), but this machine has "
            f"{there / 2**30:,.1f} GiB; choose smaller sizes, for example model.d_model, model.d_ff or fewer layers"
        )


# Sections that only some tasks read.
_READ_BY = {"classifier": ("classification", "relatedness"), "masked_lm": ("masked_lm",), "decoding": ("translation",)}
PARSER_TREES = ("parsed", "dependencies")  # tree.tree_source of data sets whose trees are no control


def check_structure(config: TrainConfig, index: Mapping, encoder: type[Encoder]) -> None:
    """Raise UserError if the data set lacks trees, arcs, tags or labels that the encoder is made for."""
    model, data, reads = config.model, config.data, encoder.reads_with(config.model)
    if reads.binary and index.get("tree_settings", {}).get("binarize") == "none":
        tokenizer = f"subwords.tokenizer={model.pretrained.folder or 'the folder of its encoder'}"
        subwords = tokenizer if "tokenizer" in index else "its settings of subwords"
        raise UserError(
            f"{data} has trees that need not be binary, and model.name = {model.name} reads binary ones; preprocess again with "
            f"tree.binarize=right and parsed set to its folder, and {subwords}"
        )
    if reads is ACTIONS and index.get("tree_settings", {}).get("tree_source") == "flat_tags":
        raise UserError(
            f"{data} has flat_tags trees, and model.name = {model.name} would read their nodes over words of one piece alone; "
            "choose a data set of tree.tree_source=flat"
        )
    check_columns(data / "encoded", reads)
    check_no_control(data, index, reads, model.name)
    encoder.check_data(model, DataFacts(data, partial(_says_anything, data)))


def has_text_pairs(config: TrainConfig, facts: Mapping) -> bool:
    """Return whether the examples are pairs of texts. Then their leaves and nodes are those of the padding."""
    return config.task == "relatedness" or bool(facts.get("pairs"))


def describe_windows(config: TrainConfig, sizes: Mapping) -> list[str]:
    """Return a line if the pretrained encoder of a run reads texts in windows: how many of train and of valid."""
    if PRETRAINED not in sizes:
        return []
    with only_shapes():
        most = PretrainedLeaves(sizes[PRETRAINED], config.model.d_model).most_leaves
    folder, found = config.data / "encoded", []
    index = read_index(folder)
    for split in ("train", "valid"):
        if most is not None and any(record.longest.get("leaves", 0) > most for record in index.records(split)):
            lengths = open_lengths(folder, split)["leaves"][:]
            of_rows = lengths  # as the limits of training count them: a pair as twice its longer text
            if has_text_pairs(config, index):
                of_rows = 2 * np.maximum(lengths[::2], lengths[1::2]).repeat(2)
            count = int(((lengths > most) & ((of_rows <= config.batch.max_leaves) | (split != "train"))).sum())
            found += [f"{count:,} of {len(lengths):,} texts of {split}"] * bool(count)
    return [f"{' and '.join(found)} have more than {most:,} pieces, and are read in windows"] if found else []


def check_no_control(data: AnyPath, index: Mapping, reads: InputKind, name: str) -> None:
    """Raise UserError for control trees if the model reads arcs, because arcs always come from the parser."""
    source = index.get("tree_settings", {}).get("tree_source", "parsed")
    if reads.reads_arcs and source not in PARSER_TREES and "arcs" in index.get("columns", ["arcs"]):
        raise UserError(
            f"{data} has {source} trees, but the arcs of the parser, which model.name = {name} reads, so it is not a control; "
            f"choose a data set of tree.tree_source={' or '.join(PARSER_TREES)}"
        )


def _says_anything(data: AnyPath, vocabulary: str) -> bool:
    """Return whether there are two tags or labels at least, without the unknown one and those of split words and binarisation."""
    names = read_names(data / "encoded" / "vocab" / f"{vocabulary}.txt")
    informative = {name for name in names if not name.startswith((SPLIT_WORD_PREFIX, BINARY_PREFIX))}
    return len(informative - {UNKNOWN_LABEL, UNANALYSED}) > 1


Batch = TypeVar("Batch", bound=TreeBatch)


class Task(ABC, Generic[Batch]):
    """One kind of training. `num_sums` is the length of the sums of a validation; the first two are loss and nll.

    Losses and counts are computed from the result of the model's method `output`.
    """

    use: Use  # the models of the registry that it trains
    num_sums = 2
    score = ""  # the metric that judges a validation; empty for the nll
    auxiliary_loss = ""  # name of the model's own loss in metrics; empty for none
    examples, targets = "examples", "targets"  # their names in reports
    scorer = "evaluate"  # the command that scores its models
    results = "language_model"  # the kind of its files of results, each with a line for every example
    output = "forward"  # a method of the model
    ties_embeddings = True  # whether the output also reads the table of pieces

    def __init__(self, config: TrainConfig):
        self.config = config

    @property
    def encoder(self) -> type[Encoder]:
        """Return the class of the model's encoder. Raises UserError for an unknown name."""
        return find_encoder(self.config.model, self.use)

    @property
    def reads(self) -> InputKind:
        """Return the input kind of the model's encoder."""
        return self.encoder.reads_with(self.config.model)

    @abstractmethod
    def check(self, index: Mapping) -> None:
        """Raise UserError if the settings do not fit the data set with this index."""

    def unread_settings(self, index: Mapping) -> list[str]:
        """Return settings, as dotted keys, that were set, but that a run on the data set with this index does not read."""
        sections = [name for name, tasks in _READ_BY.items() if self.config.task not in tasks]
        unread = [name for name in sections if getattr(self.config, name) != TrainConfig.model_fields[name].default]
        if self.config.task != "translation" and self.config.batch.max_target_pieces != BatchConfig().max_target_pieces:
            unread.append("batch.max_target_pieces")
        of_model = unread_settings(self.config.model, translates=self.use == "translation")
        return [*unread, *(f"model.{key}" for key in of_model)]

    def notes(self, index: Mapping) -> list[str]:
        """Return what has no effect, or cannot be measured, on the data set with this index, a line each."""
        unread, config = self.unread_settings(index), self.config
        said = f"{', '.join(unread)}: set, but task = {config.task} with model.name = {config.model.name} does not read this"
        return [said] if unread else []

    @abstractmethod
    def open(self, split: str, *, training: bool = False, device: torch.device | str = "cpu") -> ExampleSource | PairSource:
        """Open examples of a split for a model on `device`. Examples for `training` may differ from those for scoring."""

    @abstractmethod
    def build_model(self, sizes: Mapping) -> nn.Module:
        """Build a freshly initialised model. `sizes` are as from `sizes`, or from meta.json of a checkpoint."""

    def count_parameters(self, sizes: Mapping, copies: int = 1) -> int:
        """Count the parameters of the model without making it. Raises UserError if memory cannot hold `copies` of them."""
        try:
            with only_shapes():
                parameters = sum(parameter.numel() for parameter in self.build_model(sizes).parameters())
        except (RuntimeError, OverflowError) as error:  # more than 2^63 bytes
            raise UserError(f"model: its sizes are larger than any memory ({error}); choose smaller sizes") from None
        check_fits(parameters, copies)
        return parameters

    def build_model_that_fits(self, sizes: Mapping) -> nn.Module:
        """Call `build_model`. Raises UserError if this machine lacks the memory."""
        self.count_parameters(sizes)
        return self.build_model(sizes)

    def choose_targets(self, batch: Batch, seed: int | None) -> Batch:
        """Return a batch, still on the CPU, with its targets. They come from the data set, or are drawn by the seed.

        Without a seed, the drawn targets are those of all validations.
        """
        return batch

    def sum_losses(self, model: Any, batch: Batch, first: Any, second: Any = None, counted: Tensor | None = None) -> LossSums:
        """Compute the losses of a batch from the model's output in one pass, or in two with R-Drop.

        Those of pieces or actions go through the table that the model also reads. `counted` is from `counted_targets`.
        """
        return sum_tied_losses(model, batch.tgt_out, self.config.optimizer, first, second, counted)

    def counted_targets(self, batch: Batch) -> Tensor | None:
        """Return flat places [M] of the targets that count in the loss, of a batch on the CPU; None if all count."""
        return (batch.tgt_out != PAD_ID).flatten().nonzero()[:, 0]

    def count_right(self, batch: Batch, output: Any) -> Sequence[Tensor]:
        """Return the sums of a validation beside loss and nll."""
        return ()

    def sizes(self, index: Mapping) -> dict[str, Any]:
        """Return the sizes and facts that determine the model's shape, for run.json and meta.json."""
        sizes = {name: index[name] for name in ("num_pieces", "num_labels")}
        vocab = self.config.data / "encoded" / "vocab"
        files = {f"num_{name}": vocab / f"{name}.txt" for name in ("pos_tags", "deprels")}
        sizes |= {name: len(read_names(path)) for name, path in files.items() if path.exists()}
        return sizes | pretrained_facts(self.config.model, self.config.data, index)

    def metrics(self, sums: Tensor, targets: int) -> dict[str, float]:
        """Return the metrics of a validation over so many targets."""
        loss, nll = (sums[:2] / targets).tolist()
        own = {self.auxiliary_loss: sums[2].item() / targets} if self.auxiliary_loss else {}
        return {"loss": loss, "nll": nll, "perplexity": math.exp(min(nll, 700.0)), **own}

    def criterion(self, line: Mapping[str, float]) -> float:
        """Return the criterion of validations, lower is better. It is not finite if the model's outputs are not."""
        return 1.0 - line[self.score] if self.score and math.isfinite(line["nll"]) else line["nll"]

    @property
    def criterion_name(self) -> str:
        """The formula of `criterion`."""
        return f"1 - {self.score}" if self.score else "validation nll"

    def score_lines(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        """Return `score` of the decoded lines of a validation, for a task that decodes."""
        raise NotImplementedError

    def is_judged(self, line: Mapping[str, float]) -> bool:
        """Return whether a validation has what `criterion` reads. Others count neither for patience nor for `average=best`."""
        return True

    def checkpoint_facts(self, valid: Mapping[str, float] | None) -> dict[str, float | None]:
        """Return the facts of a validation for meta.json, beside valid_nll."""
        if not valid or not self.score:
            return {}
        return {"valid_criterion": found if math.isfinite(found := self.criterion(valid)) else None}

    def next_commands(self) -> list[tuple[str, str, str]]:
        """Return what to do with a trained model: a word for it, the command, and its arguments after --out RUN."""
        return [("score", self.scorer, split) for split in self.scored_split()]

    def scored_split(self) -> list[str]:
        """Return the argument for the split to score, in a list: nothing for test, else valid; an empty list without both."""
        splits = read_index(self.config.data / "encoded")["totals"]
        return [option for split, option in (("test", ""), ("valid", " split=valid")) if split in splits][:1]

    def describe(self, line: Mapping[str, float]) -> str:
        """Describe a validation for a person."""
        return f"nll {line['nll']:.3f}, perplexity {line['perplexity']:.2f}"

    def describe_best(self, line: Mapping[str, float]) -> str:
        """Describe the best validation."""
        return f"{line['nll']:.3f}"


def vocab_sizes(sizes: Mapping) -> VocabSizes:
    """Return the sizes as in meta.json. Older checkpoints only have those of pieces and labels."""
    return VocabSizes(
        sizes["num_pieces"], sizes["num_labels"], sizes.get("num_pos_tags", 0), sizes.get("num_deprels", 0), sizes.get(PRETRAINED)
    )


class PredictionTask(Task[Batch]):
    """A task that is scored by its predictions."""

    use = "classification"
    ties_embeddings = False
    results = "predictions"

    def next_commands(self) -> list[tuple[str, str, str]]:
        return []

    @abstractmethod
    def score_predictions(self, predictions: Iterable[tuple[Batch, ClassLogits]]) -> tuple[list[str], dict[str, Any]]:
        """Return the lines of predictions.tsv in the order of examples, after a header, and the metrics of all predictions."""


# The tasks by their names in a configuration.
TASKS: dict[str, str] = {
    "translation": "treenet.tasks.translation:Translation",
    "classification": "treenet.tasks.classification:Classification",
    "relatedness": "treenet.tasks.relatedness:Relatedness",
    "masked_lm": "treenet.tasks.masked_lm:MaskedLanguageModel",
    "causal_lm": "treenet.tasks.causal_lm:CausalLanguageModel",
}


def task_of(name: str) -> type[Task]:
    """Return the class of a task."""
    task: type[Task] = resolve_name(TASKS[name])
    return task


def build_task(config: TrainConfig) -> Task:
    """Build the task of a configuration."""
    return task_of(config.task)(config)
