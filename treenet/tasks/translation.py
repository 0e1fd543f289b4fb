"""Translation: encoder-decoder models on pairs of sentences."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource
from treenet.data.sampled import SampledSource
from treenet.data.splits import read_references
from treenet.models import build_model
from treenet.tasks.base import Task, check_structure, vocab_sizes
from treenet.tasks.translation_metrics import INTERNATIONAL, METRICS, OF_VALIDATIONS, SECOND, describe_blanks
from treeproc.common.settings import UserError


class Translation(Task):
    """Encoder-decoder models on pairs."""

    use = "translation"
    results = "translations"
    examples, targets = "pairs", "target tokens"
    output = "decode_to_train"

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        if config.valid_metric not in (choices := ("nll", *OF_VALIDATIONS)):
            raise UserError(f"valid_metric must be {', '.join(choices[:-1])} or {choices[-1]}, but is {config.valid_metric}")
        self.auxiliary_loss = self.encoder.auxiliary_loss
        self.num_sums = 3 if self.auxiliary_loss else 2
        self.score = "" if config.valid_metric == "nll" else config.valid_metric

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
        if self.score and "valid" not in index["totals"]:
            raise UserError(
                f"valid_metric={self.score} needs a validation split, but {data} has none; preprocess with splits.valid"
            )
        check_structure(self.config, index, self.encoder)
        if self.config.sampling.word_dropout and self.reads.reads_arcs:
            raise UserError(
                "sampling.word_dropout leaves out words that govern others, but this model reads arcs "
                f"(model.name = {self.config.model.name}); set it to 0, and use sampling.word_mask instead"
            )

    def notes(self, index: Mapping) -> list[str]:
        notes = super().notes(index)
        if self.score in ("", SECOND):
            return notes
        note = describe_blanks(read_references(self.config.data, "valid"), INTERNATIONAL)
        return [*notes, f"{note}; set valid_metric={SECOND}"] if note else notes

    def open(self, split: str, *, training: bool = False, device: torch.device | str = "cpu") -> ExampleSource:
        folder, reads = self.config.data / "encoded", self.reads.for_device(device)
        if training and not self.config.sampling.is_off:
            return SampledSource(folder, split, reads, self.config.sampling, self.config.seed)
        return ExampleSource(folder, split, reads)

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_model(self.config.model, vocab_sizes(sizes))

    def criterion(self, line: Mapping[str, float]) -> float:
        if not self.score:
            return super().criterion(line)
        score = line.get(self.score, math.nan)
        return score if METRICS[self.score].lower_is_better else 100.0 - score

    @property
    def criterion_name(self) -> str:
        if not self.score:
            return super().criterion_name
        return self.score if METRICS[self.score].lower_is_better else f"100 - {self.score}"

    def score_lines(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        return METRICS[self.score].build(True).corpus_score(hypotheses, [references]).score

    def is_judged(self, line: Mapping[str, float]) -> bool:
        return not self.score or self.score in line

    def checkpoint_facts(self, valid: Mapping[str, float] | None) -> dict[str, float | None]:
        if not self.score:
            return {}
        # None: a validation without translations is no validation for `average=best`, whatever its nll is.
        return {"valid_criterion": self.criterion(valid) if valid and self.is_judged(valid) else None}

    def next_commands(self) -> list[tuple[str, str, str]]:
        return [*super().next_commands(), ("translate", "translate", " input=FILE output=FILE")]

    def describe(self, line: Mapping[str, float]) -> str:
        judged = f", {METRICS[self.score].column} {line[self.score]:.2f}" if self.score and self.is_judged(line) else ""
        return super().describe(line) + judged

    def describe_best(self, line: Mapping[str, float]) -> str:
        return f"{line[self.score]:.2f}" if self.score else super().describe_best(line)
