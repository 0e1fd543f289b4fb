"""Paired tests of two runs by their predictions of single sentences: of classes, scores of pairs, and language models."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treenet.data.splits import read_sources, read_split
from treenet.evaluation.bootstrap import Comparison
from treenet.evaluation.comparison import describe
from treenet.evaluation.evaluate import data_of
from treenet.evaluation.minimal_pairs import compare_groups
from treenet.evaluation.settings import EvaluateSettings
from treenet.evaluation.significance import SEED, correlate
from treenet.runs.result_provenance import data_fingerprint
from treenet.runs.run_results import SURPRISAL_COLUMNS, System, parse_columns
from treenet.tasks.base import task_of
from treenet.tasks.class_scores import macro_f1
from treenet.tasks.learning import find_overfitted, find_unlearned
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, as_path
from treeproc.shards.store import read_index

Arrays = Mapping[str, np.ndarray]  # columns of both runs [2, sentences], by name


@dataclass(frozen=True)
class _Form:
    """The columns of a task's predictions, and its scores of sentences and of samples."""

    example: str  # the column that numbers the sentences from 0
    shared: Mapping[str, type]  # columns that must be the same for both runs
    own: Mapping[str, type]
    by: str  # the score of a sentence
    values: Callable[[Arrays], np.ndarray]  # that score [2, sentences]
    sample: Callable[[Arrays, int, np.ndarray], dict[str, np.ndarray]]  # of one side: scores [samples], from counts [samples, n]


def _sample_classes(columns: Arrays, side: int, counts: np.ndarray) -> dict[str, np.ndarray]:
    label, predicted = columns["label"][side], columns["predicted"][side]
    return {
        "accuracy": counts @ (label == predicted) / counts[0].sum(),
        "macro_f1": macro_f1(label, predicted, counts),
    }


def _sample_pearson(columns: Arrays, side: int, counts: np.ndarray) -> dict[str, np.ndarray]:
    return {"pearson": correlate(columns["predicted"][side][None], columns["score"][side], counts.astype(float))[0]}


def _sample_nll(columns: Arrays, side: int, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return the nll of a piece: a ratio of two sums over sentences."""
    nll, weights = columns["nll"][side] + columns["tree_nll"][side], counts.astype(float)
    return {"nll": weights @ nll / (weights @ columns["pieces"][side])}


_CLASSES = _Form(
    "example_id",
    {"label": int},
    {"predicted": int},
    "right",
    lambda columns: (columns["label"] == columns["predicted"]).astype(float),
    _sample_classes,
)
_PAIRS = _Form(
    "pair",
    {"score": float},
    {"predicted": float},
    "error",
    lambda columns: np.abs(columns["predicted"] - columns["score"]),
    _sample_pearson,
)
_LANGUAGE_MODELS = _Form(
    "example",
    {"words": int, "pieces": int},
    {"nll": float, "tree_nll": float},
    "nll",
    lambda columns: (columns["nll"] + columns["tree_nll"]) / np.maximum(columns["pieces"], 1),
    _sample_nll,
)
_MINIMAL_PAIRS = _Form(
    "pair",
    {},
    {"right": int},
    "right",
    lambda columns: columns["right"].astype(float),
    lambda columns, side, counts: {"pair_accuracy": counts @ columns["right"][side] / counts[0].sum()},
)
_FORMS = {"classification": _CLASSES, "relatedness": _PAIRS, "causal_lm": _LANGUAGE_MODELS, "masked_lm": _LANGUAGE_MODELS}


def compare_predictions(baseline: System, system: System, settings: EvaluateSettings) -> dict:
    """Return the content of comparison.json for the results of two runs of a task.

    Raises UserError if task, split, sentences or vocabulary differ, and for stale or damaged results.
    """
    sides = (baseline, system)
    if baseline.task != system.task:
        said = " and ".join(f"{one.name} is of {one.task}" for one in sides)
        raise UserError(f"--compare takes two results of one task, but {said}")
    assert baseline.scores is not None and system.scores is not None
    for one in (one for one in sides if one.lines and one.lines[0] == SURPRISAL_COLUMNS):
        raise UserError(
            f"{one.name} has the surprisal of words, but --compare takes scores of sentences or pairs; run "
            "tree-attention score-lm without surprisal on both runs"
        )
    ours, theirs = (scores.get("pairs_fingerprint") for scores in (baseline.scores, system.scores))
    if ours != theirs:
        raise UserError(f"{baseline.name} and {system.name} are of other minimal pairs; score both runs on the same files")
    of_pairs = ours is not None
    form = _MINIMAL_PAIRS if of_pairs else _FORMS[system.task]
    split = "minimal pairs" if of_pairs else baseline.scores.get("split", settings.split)
    for one in sides:
        one.check_split(split)
    if settings.data is not None and not of_pairs:
        _check_data(sides, settings.data, split)
    columns = {form.example: int, **form.shared, **form.own}
    read = [parse_columns("\n".join(one.lines), one.name, columns, f"run {one.status.command}") for one in sides]
    given = 1 + len(form.shared)
    differing = [] if of_pairs else [*_other_data(*sides)]
    if differing := differing + (["the sentences"] if read[0][:given] != read[1][:given] else []):
        raise UserError(
            f"{baseline.name} and {system.name} differ in {differing[0]}; score both on one data set, made with vocab_from or "
            "parsed set to that of the other"
        )
    if not read[0][0]:
        raise UserError(f"{baseline.name} and {system.name} have no sentences to compare")
    numbers = [number + 1 for number in read[0][0]]
    every = dict(zip(columns, np.array(read, dtype=float).swapaxes(0, 1), strict=True))
    every = {name: both.astype(columns[name]) for name, both in every.items()}
    kinds = {one.scores.get("kind") for one in (baseline, system) if one.scores}
    if kinds & {"joint", "beam"} and len(kinds) > 1:
        warn("note: the nll of one run is of given trees, or of those of a beam: an upper bound of that of the sentence")
    metrics = _test(form, every, settings.compare.samples)
    shown = {"source": [] if of_pairs else _texts(system, settings, split, numbers)}
    if "label" in every:
        names = dict(enumerate(baseline.scores.get("classes", ())))
        classes = {"reference": every["label"][0], "baseline": every["predicted"][0], "system": every["predicted"][1]}
        shown |= {name: [names.get(one, str(one)) for one in column.tolist()] for name, column in classes.items()}
    entries = {"baseline": baseline.scores, "system": system.scores}
    facts: dict = {"unlearned": find_unlearned(entries)}
    if overfitted := find_overfitted(entries):
        facts["overfitted"] = overfitted
    if of_pairs:
        facts["groups"] = compare_groups("\n".join(baseline.lines), "\n".join(system.lines))
    found = describe(baseline, system, metrics, form.by, form.values(every), shown, split, settings.compare.num, numbers, facts)
    for one in found["metrics"].values():
        del one["p_sacrebleu"]  # sacrebleu has no such metric
    return found


def _check_data(sides: Sequence[System], data: AnyPath, split: str) -> None:
    """Raise UserError for a result of other text than that of the data set that was asked for."""
    text = read_index(data / "encoded")["text_fingerprint"]
    for one in sides:
        scored = (one.scores or {}).get("data")
        if isinstance(scored, dict) and scored.get("text_fingerprint", text) != text:
            run = shlex.quote(str(as_path(one.name).parent))
            command = f"tree-attention {task_of(one.task).scorer} --out {run} data={shlex.quote(str(data))} split={split}"
            raise UserError(f"{one.name} is of other text than {data}; run {command}, or leave data out")


def _other_data(baseline: System, system: System) -> Iterator[str]:
    """Yield what differs in the recorded data of two results: the text, or for language models the vocabulary."""
    ours, theirs = (one.scores.get("data") if one.scores else None for one in (system, baseline))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = {"text_fingerprint": "the text of their data"}
        if task_of(system.task).results == "language_model":
            names["vocab_fingerprint"] = "the vocabulary of their data"
        for name, what in names.items():
            if None not in (ours.get(name), theirs.get(name)) and ours[name] != theirs[name]:
                yield what


def _test(form: _Form, columns: Arrays, samples: int) -> dict[str, Comparison]:
    """Test every score by a bootstrap over sentences.

    Sentences with equal columns are drawn together. Those on which a score of the two is the same tell nothing about its
    difference: they do not count in the degrees of freedom of `two_sided_p`.
    """
    names = [*form.shared, *form.own]
    rows, counts = np.unique(np.concatenate([columns[name] for name in names]).T, axis=0, return_counts=True)
    places = rows.T.reshape(len(names), 2, -1)
    groups = {name: place.astype(columns[name].dtype) for name, place in zip(names, places, strict=True)}
    total = int(counts.sum())
    drawn = np.random.default_rng(SEED).multinomial(total, counts / total, samples)
    baseline, system = (form.sample(groups, side, np.stack([counts, *drawn])) for side in (0, 1))
    by_sentence = form.values(groups)
    moved = np.any([groups[name][0] != groups[name][1] for name in form.own], axis=0)
    found = {}
    for place, name in enumerate(baseline):
        differing = moved if place else by_sentence[0] != by_sentence[1]
        signature = f"{name}|bs:{samples}|seed:{SEED}"
        found[name] = Comparison.of(baseline[name], system[name], max(1, int(counts[differing].sum())), signature)
    return found


def _texts(system: System, settings: EvaluateSettings, split: str, numbers: Sequence[int]) -> list[str]:
    """Read the sentences, or both of each pair. There is none, and a note, if the data set of the result is not there."""
    assert system.scores is not None and system.run is not None
    try:
        data = settings.data or data_of(system.run)
        if data is None:
            raise UserError(f"{system.run} names no data set")
        index = read_index(data / "encoded")
        if index["fingerprint"] != data_fingerprint(system.scores):
            raise UserError(f"{data} is not the data set that was scored")
        texts = dict(zip((row["example_id"] for row in read_split(data, "text", split)), read_sources(data, split), strict=True))
        of_pairs = system.task == "relatedness" or index.get("pairs")
        return [f"{texts[2 * one - 2]} | {texts[2 * one - 1]}" if of_pairs else texts[one - 1] for one in numbers]
    except (UserError, KeyError) as error:
        warn(f"note: the comparison shows no sentences: {error}")
        return []
