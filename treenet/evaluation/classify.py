"""Predictions of a trained model for a split of an encoded data set, and their scores."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treenet.data.examples import ExampleSource
from treenet.data.frozen_states import check_states
from treenet.data.labelled import PairSource
from treenet.data.plan import plan_in_order
from treenet.evaluation.settings import ClassifySettings
from treenet.layers.backend import choose_device, scoring
from treenet.models import ClassLogits
from treenet.runs.checkpoint import AVERAGED, checkpoint_folders, checkpoint_step
from treenet.runs.loading import OF_CLASSES, check_classes, data_of, load_model, scored_splits
from treenet.runs.result_entries import SCORES, add_entry, name_result, read_scores
from treenet.runs.result_provenance import LAST, asked_for, is_recorded, origin
from treenet.runs.run_folder import checkpoint_names, read_facts
from treenet.runs.run_results import stale_scores, write_predictions
from treenet.tasks.base import PredictionTask, build_task
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.shard import check_hashes
from treeproc.shards.store import Index, class_names, read_index

_BATCH_TOKENS = 8192
PEAK = "peak"


def classify_run(folder: Path, settings: ClassifySettings) -> tuple[str, dict]:
    """Write `predictions.NAME.tsv` and the entry NAME of `scores.json` into the run folder.

    Returns NAME and its scores. Raises UserError if the folder is not a run of a classifier, or if run and data do not fit.
    """
    name, lines, scores = classify_split(folder, settings)
    return name, write_predictions(folder, name, lines, scores)


def score_peak(folder: Path, split: str, *, use_gpu: bool = False) -> dict:
    """Write the entry SPLIT.peak of `scores.json`: the best of all kept checkpoints, chosen on that same split.

    This choice is not valid for a model. The figure shows how much the choice would add. Returns its scores.
    """
    found = []
    for place in checkpoint_folders(folder):
        step = str(checkpoint_step(place))
        found.append(classify_split(folder, ClassifySettings(split=split, checkpoint=step, use_gpu=use_gpu))[2])
    best = max(found, key=lambda scores: scores["accuracy"] if "accuracy" in scores else scores["pearson"])
    peak = best | {"chosen_on": split, "chosen_from": len(found)}
    add_entry(folder / SCORES, f"{split}.{PEAK}", peak)
    return peak


def classify_split(folder: Path, settings: ClassifySettings) -> tuple[str, list[str], dict]:
    """Return the name of a result, the lines of its predictions, and its entry. Raises UserError as `classify_run` does."""
    device = choose_device(settings.use_gpu)
    checkpoint = settings.checkpoint
    if checkpoint == LAST:
        checkpoint = str(next(map(checkpoint_step, reversed(checkpoint_folders(folder))), 0))
    run = load_model(folder, checkpoint=checkpoint, data=settings.data, device=device)
    assert run.weights  # of a checkpoint
    data, model = run.data, run.model
    task = build_task(run.config.model_copy(update={"data": data}))
    if not isinstance(task, PredictionTask):
        raise UserError(f"{folder} is a run of {run.config.task}; score it with tree-attention {task.scorer}")
    index = read_index(data / "encoded")
    facts = read_facts(folder, needed=OF_CLASSES if "num_classes" in index else ())
    task.check(index)
    _check_pairs(data, index, facts)
    check_classes(data, index, data_of(folder, run.config), facts)
    check_hashes(data / "encoded", settings.split)
    states = run.config.frozen_states
    if states is not None and not _has_states(states, index, facts, settings.split):
        task.config = task.config.model_copy(update={"frozen_states": None})
    source = task.open(settings.split, device=device)
    lines, found = task.score_predictions(predict(model, source))
    is_path = settings.checkpoint != LAST and not checkpoint_names(settings.checkpoint)
    name = name_result(settings.split, run.checkpoint if is_path else settings.checkpoint, data, own_data=run.own_data)
    scores = {
        **found,
        **({"classes": class_names(index)} if "confusion" in found else {}),
        "num_examples": len(source),
        "split": settings.split,
        **origin(run, settings),
        # The same for training, which sets all of them, and for a user, who may leave out what is so anyway.
        "asked": {"split": settings.split, "checkpoint": settings.checkpoint} | ({} if run.own_data else asked_for(settings)),
    }
    return name, lines, scores


def _has_states(folder: AnyPath, index: Index, facts: Mapping, split: str) -> bool:
    """Return whether files have the states of this model for this data set. If not, it prints a note."""
    try:
        if check_states(folder, index, split)["encoder_sha256"] == facts.get("states"):
            return True
        why = f"{folder} has the states of another encoder"
    except UserError as error:
        why = str(error).partition("; ")[0]  # its remedy is that of a training
    warn(f"note: the encoder computes the states of {split} again, because it cannot read them: {why}")
    return False


def _check_pairs(data: AnyPath, index: Mapping, facts: Mapping) -> None:
    """Raise UserError if only one of a data set and the model has pairs of texts."""
    if facts.get("pairs", False) != index.get("pairs", False):
        here, there = ("pairs of texts", "single texts") if index.get("pairs") else ("single texts", "pairs of texts")
        raise UserError(f"{data} has {here}, but the model learned {there}; choose a data set with {there}")


def score_run(folder: Path, *, use_gpu: bool = False) -> dict[str, dict]:
    """Score a finished run: its model and its last checkpoint, on valid and test if the data set has them.

    A result in scores.json that names the same weights and data is not computed again.
    """
    done, stale = read_scores(folder), stale_scores(folder)
    for split in scored_splits(folder):
        for checkpoint in (AVERAGED, LAST):
            name = split if checkpoint == AVERAGED else f"{split}.{LAST}"
            if name in stale or not is_recorded(done.get(name, {})):
                classify_run(folder, ClassifySettings(split=split, checkpoint=checkpoint, use_gpu=use_gpu))
    return read_scores(folder)


@torch.no_grad()
def predict(model: nn.Module, source: ExampleSource | PairSource) -> Iterator[tuple[Any, ClassLogits]]:
    """Yield every batch of a split, of examples of similar length, with the output of the model in evaluation mode.

    Raises UserError if an output is not finite.
    """
    model.eval()
    device = next(model.parameters()).device
    for rows in plan_in_order(source.lengths, _BATCH_TOKENS):
        batch = source.batch(rows).to(device)
        with scoring(model):
            output = model(batch)
        if not output.examples.isfinite().all():  # NaN would count as the first class
            raise UserError(
                "the predictions of the model are not finite, because its training diverged; score an earlier "
                "checkpoint, or train again with a lower optimizer.learning_rate and another --out"
            )
        yield batch, output
