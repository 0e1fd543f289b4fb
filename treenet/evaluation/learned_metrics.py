"""The optional metrics of the settings `bertscore` and `comet`, for the scores of a system and for comparisons.

Each is a mean over sentences, so it has a paired bootstrap. Both cost much more than BLEU, and need a model in a local folder.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from treenet.evaluation.settings import BertScoreConfig, CometConfig
from treenet.layers.backend import choose_device
from treenet.tasks.translation_metrics import METRIC_TITLES
from treeproc.common.files import file_sha256
from treeproc.common.messages import warn
from treeproc.common.settings import UserError


@dataclass(frozen=True)
class SentenceScores:
    """Scores of every line of some systems. The score of a system is their mean."""

    values: np.ndarray  # [systems, lines]
    signature: str
    num_cut: int = 0  # texts that are longer than the model reads
    details: Mapping[str, Sequence[float]] = field(default_factory=dict)  # further numbers of each system


def folder_sha256(folder: Path) -> str:
    """Return a hash of the names and contents of the files of a model. Raises OSError if they cannot be read."""
    kinds = (".safetensors", ".json", ".txt", ".model", ".ckpt", ".yaml")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in kinds and path.is_file())
    return hashlib.sha256("".join(f"{path} {file_sha256(folder / path)}\n" for path in files).encode()).hexdigest()


@dataclass(frozen=True)
class LearnedMetrics:
    """The metrics that have a model in the settings."""

    bertscore: BertScoreConfig
    comet: CometConfig
    use_gpu: bool = False

    def check(self, has_sources: bool) -> None:
        """Raise UserError if something that a metric needs is missing."""
        if self.bertscore.model is not None:
            _module("bertscore").check_bertscore(self.bertscore)
            choose_device(self.use_gpu)
        if self.comet.model is not None:
            if not has_sources:
                raise UserError("comet.model: COMET reads the source lines; give sources=FILE")
            _module("comet").check_comet(self.comet)

    def score(
        self, systems: Sequence[Sequence[str]], sources: Sequence[str] | None, references: Sequence[Sequence[str]]
    ) -> dict[str, SentenceScores]:
        """Score systems, and warn of texts that are too long for a model. BERTScore takes all references, COMET the first."""
        self.check(sources is not None)
        found = {}
        if self.bertscore.model is not None:
            found["bertscore"] = _module("bertscore").bert_scores(
                self.bertscore, systems, references, "cuda" if self.use_gpu else "cpu"
            )
        if self.comet.model is not None:
            found["comet"] = _module("comet").comet_scores(self.comet, systems, sources or (), references[0], self.use_gpu)
        for name, scores in found.items():
            if count := scores.num_cut:
                texts = f"{count:,} different texts are" if count > 1 else "one text is"
                warn(f"warning: {METRIC_TITLES[name]}: {texts} longer than the model reads; only the beginning counts")
        return found


def _module(name: str) -> Any:
    """Import a metric of `treenet/extras`, where one is asked for."""
    return import_module(f"treenet.extras.learned_metrics.{name}")


def entries_of(found: dict[str, SentenceScores]) -> dict:
    """Return the scores of one system in the form of scores.json. `learned` has further numbers of each metric."""
    entries: dict = {}
    for name, scores in found.items():
        entries |= {name: float(scores.values[0].mean()), f"{name}_signature": scores.signature}
        details = {key: values[0] for key, values in scores.details.items()} | {"cut_texts": scores.num_cut}
        entries.setdefault("learned", {})[name] = details
    return entries
