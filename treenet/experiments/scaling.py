"""Data-size studies: models at several shares of the training data and several seeds, on one set of shards.

A study is a training configuration with a grid: each cell is the training run of `workflows/train.py` with another
model, `batch.fraction` and `seed`, in STUDY/cells/MODEL-FRACTION-seedSEED.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from treenet.evaluation.evaluate import References, evaluate_run, more_fingerprint
from treenet.evaluation.settings import EvaluateSettings
from treenet.experiments.grid import CellWork
from treenet.experiments.settings import ScalingConfig
from treenet.experiments.study import describe_stale
from treenet.jobs.train_run import run_training
from treenet.loggers.feed import log_scores
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import open_results
from treenet.runs.run_results import read_scores
from treenet.tasks.translation_metrics import COMPARED
from treeproc.common.storage import AnyPath


def study_work(config: ScalingConfig, more: References = ()) -> CellWork:
    """Return the work of a cell: it trains as workflows/train.py does, and scores as workflows/evaluate.py does.

    `more` has the lines of the files `grid.more_references`.
    """
    split, files = config.grid.split, config.grid.more_references
    options: dict[str, Any] = {"more_references": files} if files else {}
    settings = EvaluateSettings(split=split, use_gpu=config.use_gpu, **options)
    stale = partial(describe_stale_cell, split, more_fingerprint(more))
    return CellWork(run_training, partial(score_cell, settings, more), stale)


def score_cell(settings: EvaluateSettings, more: References, folder: AnyPath) -> dict:
    """Translate and score a trained cell. Returns its line for the log."""
    with open_results(folder, AVERAGED) as run:
        _, scores = evaluate_run(run, settings, more)
        log_scores(run)
    return {name: scores[name] for name in COMPARED}


def describe_stale_cell(split: str, more: str | None, folder: AnyPath) -> str:
    """Describe why scores of a cell do not fit its model or the fingerprint of further references; empty if they fit."""
    return describe_stale((split,), folder) or describe_other_references(read_scores(folder).get(split), more)


def describe_other_references(scores: Mapping[str, Any] | None, more: str | None) -> str:
    """Describe why scores are not of the further references with this fingerprint; empty if they are."""
    if scores is None or scores.get("more_references_fingerprint") == more:
        return ""
    return "the files of grid.more_references are others"
