"""The report of a data-size study: STUDY/scaling.json, a table, and a plot like figure 5a of the paper.

The main model of a study is its first model that is not the baseline. There are two primary comparisons: its difference from the
baseline at the largest share, and the slope of that difference over log2 of the size. All other models are compared with the main
model, and form a second family at the largest share. The p-values of both families are corrected. All else is exploratory.

A difference has two p-values, for two questions. The first is about other seeds of training, scored on other sentences. It needs
three seeds, and only it gives a star. The second is about the present weights on the present sentences.

A study is a training configuration with a grid. Each cell is the training run of `tree-attention train` with another model,
`batch.fraction` and `seed`, in STUDY/cells/MODEL-FRACTION-seedSEED.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import or_
from statistics import fmean
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.data.splits import read_references
from treenet.evaluation.bootstrap import (
    compare_seeds,
    compare_slopes,
    sample_metric,
    sample_nll,
    sentence_statistics,
    statistics_of,
)
from treenet.evaluation.evaluate import References, evaluate_run, more_fingerprint
from treenet.evaluation.settings import EvaluateSettings
from treenet.evaluation.significance import (
    ABOUT_WEIGHTS_OF_SEEDS,
    EXPLORATORY,
    PAIRED_BOOTSTRAP,
    PRIMARY,
    SYSTEMS,
    SeedTest,
    compare_over_seeds,
    correct_family,
    summarize,
)
from treenet.experiments.comparable import check_one_study, find_confounded, find_unlike, find_unlike_sizes
from treenet.experiments.grid import CellWork
from treenet.experiments.records import Record, read_numbers, show_numbers
from treenet.experiments.results import SAMPLED, Results
from treenet.experiments.scaling_table import (
    ABOUT_VALID,
    NLL_COMPARISON,
    OF_TRAINING,
    SCALING,
    SECONDS,
    TRAIN_NLL,
    VALID_NLL,
    compare_sizes,
    draw,
    format_table,
    read_test,
)
from treenet.experiments.settings import GridConfig, ScalingConfig, StudyMetric
from treenet.experiments.study import StudyCell, StudyForm, describe_stale, note_unlearned, read_fresh_scores, unlearned_in
from treenet.jobs.train_run import run_training
from treenet.loggers.feed import log_scores
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import open_results
from treenet.runs.result_entries import Finite, read_scores
from treenet.runs.result_provenance import recorded_origin
from treenet.runs.run_results import read_nll, read_system
from treenet.tasks.translation_metrics import COMPARED, MAIN, METRICS, SECOND, named_tokenizers, tokenizer_of
from treeproc.common import folder_kinds
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.store import fingerprint_of


def study_work(config: ScalingConfig, more: References = ()) -> CellWork:
    """Return the work of a cell: it trains as tree-attention train does, and scores as tree-attention evaluate does.

    `more` has the lines of the files `grid.more_references`.
    """
    grid = config.grid
    asked = {"more_references": grid.more_references, "target_language": grid.target_language}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value}
    settings = EvaluateSettings(split=grid.split, use_gpu=config.use_gpu, **options)
    fingerprint = more_fingerprint(more)
    stale, unlike = partial(describe_stale_cell, config, fingerprint), partial(describe_other_scoring, grid, fingerprint)
    return CellWork(run_training, partial(score_cell, settings, more, grid.metric), stale, unlike)


def score_cell(settings: EvaluateSettings, more: References, metric: str, folder: AnyPath) -> dict:
    """Translate and score a trained cell. Returns its line for the log."""
    with open_results(folder, AVERAGED) as run:
        _, scores = evaluate_run(run, settings, more)
        log_scores(run)
    return {name: scores[name] for name in dict.fromkeys((metric, *COMPARED))}


def describe_stale_cell(config: ScalingConfig, more: str | None, folder: AnyPath) -> str:
    """Describe why scores of a cell are missing, or do not fit its model, its references or the grid; empty if they fit.

    `more` is the fingerprint of the further references.
    """
    grid, results = config.grid, read_scores(folder)
    if not _needed(grid.metric) <= (scores := results.get(grid.split, {})).keys():
        return f"none of {grid.split}"
    if scores.get("asked", {}).get("decoding"):
        return "decoding is another"
    return (
        describe_stale((grid.split,), folder)
        or describe_other_scoring(grid, more, results)
        or describe_other_references(scores, read_references(config.data, grid.split))
    )


def describe_other_scoring(grid: GridConfig, more: str | None, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe why the scores of a cell are not of the further references with this fingerprint, or not of the compared metric.

    Empty if they are, or are missing.
    """
    if (scores := results.get(grid.split)) is None:
        return ""
    if scores.get("more_references_fingerprint") != more:
        return "the files of grid.more_references are others"
    if METRICS[grid.metric].reads == "tokens" and scores.get("asked", {}).get("target_language") != grid.target_language:
        return "grid.target_language is another"
    return ""


def describe_other_references(scores: Mapping[str, Any], references: Sequence[str]) -> str:
    """Describe why the scores of a split are not against these references; empty if they are, or do not say so."""
    known = fingerprint_of(references)
    return "its references are others" if scores.get("references_fingerprint", known) != known else ""


_AGAIN = "run the same command again without --dry-run"

# Of each sentence in a record: the nll of its reference, in whole ten-thousandths of a nat, and the tokens of the reference.
NLL, TARGET_TOKENS, NLL_SCALE = "nll", "target_tokens", 10_000
LABELS = {"model": str, "fraction": float, "seed": int}


class _Summary(TypedDict):
    mean: float
    values: list[float]
    half_interval: Finite | None


class _Comparison(TypedDict):
    against: str


class _Point(TypedDict):
    """The fields of a point that every scaling.json has, and its comparison if there is one."""

    fraction: Finite
    model: str
    pairs: Finite
    seeds: list[int]
    bleu: _Summary
    chrf: _Summary
    comparison: NotRequired[_Comparison]


class ScalingReport(TypedDict):
    """The fields of scaling.json that a report reads."""

    split: str
    metric: StudyMetric
    baseline: str
    cells: list[StudyCell]
    points: list[_Point]
    slopes: list[dict]
    pooled: list[dict]
    unlike: dict
    confounded: dict[str, list[str]]
    unlike_sizes: NotRequired[list[str]]  # only of sizes that differ in settings


def read_result(config: ScalingConfig, folder: AnyPath, more: References = ()) -> tuple[dict[str, dict], dict[str, str]]:
    """Read the recorded results of a cell's translations: their scores, and the numbers of each sentence.

    These are the statistics of the metric, the nll of the reference and its target tokens. Old scores have no nll.
    """
    split, metric = config.grid.split, config.grid.metric
    scores = read_fresh_scores((split,), folder)
    if not _needed(metric) <= scores.get(split, {}).keys():
        raise UserError(f"{folder / 'scores.json'} has no scores of {split}; {_AGAIN}")
    tokenizer, references = tokenizer_of(config.data, config.grid.target_language), read_references(config.data, split)
    changed = describe_other_scoring(config.grid, more_fingerprint(more), scores)
    if changed := changed or describe_other_references(scores[split], references):
        raise UserError(f"{folder}: the scores of {split} are stale ({changed}); {_AGAIN}")
    statistics = sentence_statistics(metric, read_system(folder, split).lines, references, tokenizer, more)
    sentences = dict(zip(statistics_of(metric), map(show_numbers, statistics.T), strict=True))
    if nll := read_nll(folder, split):
        sentences |= {NLL: show_numbers(round(NLL_SCALE * one) for one in nll.nll), TARGET_TOKENS: show_numbers(nll.tokens)}
    return {split: scores[split]}, sentences


def _needed(metric: str) -> set[str]:
    return {metric, f"{metric}_signature", MAIN, SECOND}


def build_report(grid: GridConfig, records: Sequence[Record]) -> dict:
    """Build the content of scaling.json from the records."""
    check_one_study(records, "model")
    cells = [_read_cell(record, grid) for record in records]
    tokenizers = named_tokenizers(record["scores"][grid.split] for record in records)
    if METRICS[grid.metric].reads == "tokens" and len(tokenizers) > 1:
        raise UserError(
            f"the cells have {grid.metric} over different tokens: {', '.join(sorted(tokenizers))}; give grid.target_language as "
            "in the records, or another --records"
        )
    models = list(dict.fromkeys([*grid.models, *(cell["model"] for cell in cells)]))
    primary = next((model for model in models if model != grid.baseline), grid.baseline)
    against = {model: grid.baseline if model == primary else primary for model in models if model != grid.baseline}
    largest = max([*grid.fractions, *(cell["fraction"] for cell in cells)])
    metrics = [name for name in dict.fromkeys((grid.metric, *COMPARED)) if all(name in cell for cell in cells)]
    table = Results.of(map(or_, cells, sample_scores(records, grid)), "model")
    num_examples = len(read_numbers(records[0], statistics_of(grid.metric)[-1])) if records else 0
    points, pairs = [], []
    families: dict[str, list[dict]] = {PRIMARY: [], SYSTEMS: [], EXPLORATORY: []}

    def add(place: dict, test: SeedTest, family: str, **facts: object) -> None:
        place["comparison"] = asdict(test) | {"against": against[place["model"]], **facts}
        families[family].append(place["comparison"])

    for fraction, of_size in sorted(table.by("size").items()):
        for model in models:
            here, there = (of_size.where(system=name) for name in (model, against.get(model)))
            if not here:
                continue
            names = here.by_seed("cell")
            point = {"fraction": fraction, "model": model, "pairs": fmean(here.by_seed("pairs").values())}
            for metric in (*metrics, NLL, *OF_TRAINING):
                if len(values := here.by_seed(metric)) == len(names):
                    point[metric] = summarize([*values.values()])
            point["seeds"] = list(names)
            if shared := here.paired(there, "cell"):
                theirs, ours = zip(*there.paired(here, grid.metric, SAMPLED), strict=True)
                found = compare_seeds(theirs, ours, num_examples)
                unlearned = unlearned_in(here, there)
                family = EXPLORATORY if fraction < largest else PRIMARY if model == primary else SYSTEMS
                weights = {"p_two_sided": found.weights_p_two_sided, "test": PAIRED_BOOTSTRAP, "about": ABOUT_WEIGHTS_OF_SEEDS}
                add(point, found.over_seeds, family, weights=weights, **unlearned)
                pairs += shared
                of_valid = here.paired(there, VALID_NLL)
                if len(of_valid) == len(shared):
                    test = compare_over_seeds([one - other for one, other in of_valid], 0.0, None)
                    point[NLL_COMPARISON] = asdict(replace(test, about=ABOUT_VALID, family=EXPLORATORY)) | unlearned
            points.append(point)
    slopes = []
    for model in against:
        here, there = (table.where(system=name) for name in (model, against[model]))
        if slope := _slope(there, here, grid.metric, num_examples):
            slopes.append({"model": model, **slope[0]})
            add(slopes[-1], slope[1], PRIMARY if model == primary else EXPLORATORY, **unlearned_in(here, there))
    for family, comparisons in families.items():
        for one, test in zip(comparisons, correct_family([*map(read_test, comparisons)], family), strict=True):
            one |= asdict(test)
    return {
        "split": grid.split,
        "metric": grid.metric,
        "num_examples": num_examples,
        "baseline": grid.baseline,
        "bootstrap_samples": grid.bootstrap_samples,
        f"{grid.metric}_signature": cells[0][f"{grid.metric}_signature"] if cells else None,
        "cells": cells,
        "points": points,
        "slopes": slopes,
        "pooled": list(compare_sizes(table, grid.baseline, num_examples)),
        "unlike": find_unlike(records, pairs),
        "confounded": find_confounded(records, pairs, "model"),
        **({"unlike_sizes": unlike_sizes} if (unlike_sizes := find_unlike_sizes(records, "model")) else {}),
    }


def _read_cell(record: Record, grid: GridConfig) -> dict:
    where, split, metric = f"the record of {record['cell']}", grid.split, grid.metric
    scores, facts = record["scores"].get(split, {}), record["facts"]
    if split in record["scores"] and not record["sentences"].keys() >= set(statistics_of(metric)):
        raise UserError(
            f"{where} has no numbers of single sentences for grid.metric = {metric}; give the metric of the records, or another "
            "--records"
        )
    if missing := [*(_needed(metric) - scores.keys()), *({"examples", "parameters"} - facts.keys())]:
        raise UserError(f"{where} has no {', '.join(sorted(missing))} of {split}; give the split of the records as grid.split")
    count = f"nrefs:{1 + len(grid.more_references)}"
    if not scores[f"{metric}_signature"].startswith((f"{count}|", "nrefs:var")):
        raise UserError(f"{where} has scores of another number of references than {count} of grid.more_references; remove it")
    shown = sorted({*_needed(metric), *COMPARED} & scores.keys())
    kept = {name: scores[name] for name in shown} | recorded_origin(scores)
    step = record["training"]["averaged_steps"][-1]
    places = {"pairs": facts["examples"], "parameters": facts["parameters"], "step": step}
    return {"cell": record["cell"], **record["labels"], **places, **_of_training(record), **kept, **note_unlearned(scores)}


def _of_training(record: Record) -> dict[str, float]:
    """Return the lowest nll on valid, the last nll of training batches, and the seconds, where the record has them."""
    curve = record.get("curve", {})
    valid, train = ([one for one in curve.get(event, {}).get("nll", ()) if one is not None] for event in ("valid", "train"))
    nll = {VALID_NLL: min(valid)} if valid else {}
    return nll | ({TRAIN_NLL: train[-1]} if train else {}) | {SECONDS: record["training"]["seconds"]}


def _read_sentences(records: Sequence[Record], grid: GridConfig) -> Iterator[np.ndarray]:
    """Yield `sentence_statistics` of every cell. Raises UserError if two were scored against different references."""
    first: tuple[str, object] | None = None
    for record in records:
        columns = [read_numbers(record, name) for name in statistics_of(grid.metric)]
        # With several references, the length is that of the closest one, which differs from cell to cell.
        scores = record["scores"][grid.split]
        used = scores.get("more_references_fingerprint") or (
            columns[-1].tolist() if METRICS[grid.metric].kind == "BLEU" else scores.get("references_fingerprint")
        )
        first = first or (record["cell"], used)
        if used != first[1]:
            raise UserError(
                f"{record['cell']} and {first[0]} have scores against different references; keep the records of one split"
            )
        yield np.stack(columns, axis=1)


def sample_scores(records: Sequence[Record], grid: GridConfig) -> Iterator[dict]:
    """Yield the SAMPLED scores of each cell: of the grid's metric, and the nll a token if all records have it, also itself."""
    samples, has_nll = grid.bootstrap_samples, all(NLL in record["sentences"] for record in records)
    for record, statistics in zip(records, _read_sentences(records, grid), strict=True):
        found: dict[str, np.ndarray | float] = {f"{SAMPLED}.{grid.metric}": sample_metric(grid.metric, statistics, samples)}
        if has_nll:
            sentences, tokens = read_numbers(record, NLL, 10**9) / NLL_SCALE, read_numbers(record, TARGET_TOKENS)
            found[f"{SAMPLED}.{NLL}"] = sampled = sample_nll(sentences, tokens, samples)
            found[NLL] = float(sampled[0])
        yield found


def _slope(baselines: Results, systems: Results, metric: str, num_examples: int) -> tuple[dict, SeedTest] | None:
    """Return the slope of a model's difference, over the seeds that have all its sizes; None with one size or no such seed.

    Small shares of few examples may have the same size.
    """
    fractions = sorted(systems.by("size"))
    theirs, ours = ([side.where(size=fraction) for fraction in fractions] for side in (baselines, systems))
    seeds = sorted(set.intersection(*(set(here.by("seed")) for here in (*theirs, *ours)))) if fractions else []
    if len(fractions) < 2 or not seeds:
        return None

    def stacked(side: Sequence[Results], *name: str) -> np.ndarray:  # [seeds, sizes, ...]
        by_size = [here.by_seed(*name) for here in side]
        return np.array([[values[seed] for values in by_size] for seed in seeds])

    pairs = stacked(ours, "pairs")
    if not np.ptp(pairs, axis=1).all():
        return None
    test = compare_slopes(stacked(theirs, metric, SAMPLED), stacked(ours, metric, SAMPLED), pairs, num_examples)
    return {"fractions": fractions, "seeds": seeds}, test


FORM = StudyForm(
    kind=folder_kinds.SCALING,
    content=ScalingReport,
    name="scaling",
    command="scaling",
    labels=LABELS,
    report=SCALING,
    rows="points",
    pictures=("scaling.png", "scaling.svg"),
    work=study_work,
    read=lambda config, more: partial(read_result, config, more=more),
    build=lambda config, records: build_report(config.grid, records),
    table=format_table,
    draw=draw,
)
