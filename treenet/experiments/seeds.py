"""Comparisons over seeds: models, ablations, control trees, all with the same seeds, of any task except translation.

A comparison is a configuration of tree-attention train with a grid. Each cell is one run of that workflow, with the
settings of one system and one seed, in OUT/cells/SYSTEM-seedSEED. Its measures are of the task: accuracy of classes,
correlation of relatedness, or nll of language models.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from treenet.config import TrainConfig
from treenet.evaluation.settings import PairsConfig, PairsInput, ScoreLMSettings
from treenet.evaluation.significance import SeedTest, compare_correlations, compare_examples
from treenet.experiments.ledger import Cell
from treenet.experiments.records import show_numbers
from treenet.experiments.study_grid import Parallel, Place, Protocol, Seed, StudyConfig, Systems, check_name, check_once
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import open_results
from treenet.runs.result_entries import read_scores
from treenet.tasks.scores import SCORES
from treenet.tasks.tables import Score
from treeproc.common.errors import rewording
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.store import OF_OTHER_LINES

if TYPE_CHECKING:
    from treenet.evaluation.evaluate import References
    from treenet.experiments.grid import CellWork

Numbers = Mapping[str, np.ndarray]  # of examples, by the name that `Measures.read` gave

# Records hold whole numbers: scores of pairs have six digits, as files of predictions, and an nll four.
_SCALE, _NLL_SCALE = 1_000_000, 10_000
TESTED = ("test", "test.last")  # entries of scores.json
PAIRS = "pairs"  # the entry of minimal pairs in a cell


@dataclass(frozen=True, kw_only=True)
class Measures(Score):
    """The scores of a task, and the numbers of single examples that a test over them needs. The `headline` has title and unit."""

    columns: Mapping[tuple[str, str], str]  # (entry of scores.json, score): the column title
    headline: str  # the score whose differences are tested, in the results TESTED
    read: Callable[[AnyPath, str], dict[str, str]]  # the lines for the record of a run folder's result
    compare: Callable[[Sequence[Numbers], Sequence[Numbers], str], SeedTest]  # of a result of baselines and of systems, by seed
    score: Callable[[Path, bool], dict[str, dict]]  # scores a finished run, on a GPU or not, and returns its scores.json
    results: tuple[str, ...] = TESTED
    others: Mapping[str, str] = field(default_factory=dict)  # further results that may be tested, each with its score

    def show_mean(self, summary: Mapping, name: str) -> str:
        """Format mean and deviation over seeds of the score `name`."""
        score = SCORES["pair_accuracy" if name == "paradigm_accuracy" else name]  # the mean of its groups
        return f"{score.show(summary['mean'])} ± {'-' if summary['deviation'] is None else score.show(summary['deviation'])}"

    def show_seen(self, test: SeedTest) -> str:
        """Format the smallest difference that the design finds; a dash if it is not known."""
        return "-" if test.seen is None else self.show(test.seen)

    def tested(self) -> dict[str, str]:
        """Return the tested measures, and the result of each."""
        scores = {**dict.fromkeys(self.results, self.headline), **self.others}
        return {f"{result}.{score}": result for result, score in scores.items()}


_AGAIN = "remove its folder and run the same command again"


def _read_columns(folder: AnyPath, result: str, columns: Mapping[str, type], kind: str = "predictions") -> list[list]:
    """Read columns of a file of predictions, in the order of the examples."""
    from treenet.runs.run_results import parse_columns, predictions_path, read_predictions  # here, because it loads PyTorch

    content = read_predictions(folder, result, kind=kind)
    return parse_columns(content, predictions_path(folder, result, kind), columns, _AGAIN)


def _read_right(folder: AnyPath, result: str) -> dict[str, str]:
    """Read whether each prediction is right."""
    columns = _read_columns(folder, result, {"predicted": int, "label": int})
    return {result: show_numbers(int(predicted == label) for predicted, label in zip(*columns, strict=True))}


def _read_scores(folder: AnyPath, result: str) -> dict[str, str]:
    """Read predicted scores of pairs, and the human scores."""
    columns = _read_columns(folder, result, {"predicted": float, "score": float})
    predicted, scores = (show_numbers(round(_SCALE * value) for value in column) for column in columns)
    return {result: predicted, f"{result}.scores": scores}


def _read_nll(folder: AnyPath, result: str) -> dict[str, str]:
    """Read the nll of each sentence, of a grammar with that of its tree, and the number of pieces; of pairs which are right."""
    if result == PAIRS:
        return {result: show_numbers(*_read_columns(folder, result, {"right": int}, "language_model"))}
    nll, tree_nll, pieces = _read_columns(folder, result, {"nll": float, "tree_nll": float, "pieces": int}, "language_model")
    both = show_numbers(round(_NLL_SCALE * (one + tree)) for one, tree in zip(nll, tree_nll, strict=True))
    return {result: both, f"{result}.pieces": show_numbers(pieces)}


def _stack(side: Sequence[Numbers], result: str) -> np.ndarray:
    """Return the numbers of a result [seeds, examples]."""
    return np.array([one[result] for one in side], dtype=float)


def _compare_accuracies(baselines: Sequence[Numbers], systems: Sequence[Numbers], result: str) -> SeedTest:
    return compare_examples(_stack(systems, result) - _stack(baselines, result))


def _compare_correlations(baselines: Sequence[Numbers], systems: Sequence[Numbers], result: str) -> SeedTest:
    return compare_correlations(_stack(baselines, result), _stack(systems, result), systems[0][f"{result}.scores"])


def _compare_nll(baselines: Sequence[Numbers], systems: Sequence[Numbers], result: str) -> SeedTest:
    """Test the nll of a piece: a ratio of two sums over sentences. Their variance is that of its linear approximation.

    Of minimal pairs, test the accuracy.
    """
    if result == PAIRS:
        return _compare_accuracies(baselines, systems, result)
    theirs, ours = (_stack(side, result) / _NLL_SCALE for side in (baselines, systems))
    differences, pieces = ours - theirs, systems[0][f"{result}.pieces"]
    ratios = differences.sum(1, keepdims=True) / pieces.sum()
    return compare_examples(ratios + (differences - ratios * pieces) / pieces.mean())


def _score_predictions(run: Path, use_gpu: bool) -> dict[str, dict]:
    from treenet.evaluation.classify import score_run  # here, as below, because it loads PyTorch

    return score_run(run, use_gpu=use_gpu)


def _score_language_model(run: Path, use_gpu: bool) -> dict[str, dict]:
    from treenet.evaluation.language_models import score_splits

    return score_splits(run, use_gpu=use_gpu)


# A grammar has the nll of sentence and tree, and a masked model one of each piece from all others.
_LANGUAGE_MODELS = Measures(
    **vars(SCORES["nll"]),
    columns={
        ("valid", "perplexity"): "valid, ppl",
        ("test", "perplexity"): "test, ppl",
        ("test", "perplexity_given_tree"): "given tree",
        ("test", "word_perplexity"): "of words",
        ("valid", "pseudo_perplexity"): "valid, pseudo-ppl",
        ("test", "pseudo_perplexity"): "test, pseudo-ppl",
        ("test", "nll"): "test, nll",
        (PAIRS, "pair_accuracy"): "pairs",
        (PAIRS, "paradigm_accuracy"): "paradigms",
    },
    headline="nll",
    read=_read_nll,
    compare=_compare_nll,
    score=_score_language_model,
    results=TESTED[:1],
    others={PAIRS: "pair_accuracy"},
)
MEASURES = {
    "classification": Measures(
        **vars(SCORES["accuracy"]),
        columns={
            ("valid", "accuracy"): "valid",
            ("test", "accuracy"): "test",
            ("test.last", "accuracy"): "last",
            ("test", "binary_accuracy"): "two",
            ("test.last", "binary_accuracy"): "two, last",
            ("test.peak", "accuracy"): "peak on test!",
        },
        headline="accuracy",
        read=_read_right,
        compare=_compare_accuracies,
        score=_score_predictions,
    ),
    "relatedness": Measures(
        **vars(SCORES["pearson"]),
        columns={
            ("valid", "pearson"): "valid, r",
            ("test", "pearson"): "test, r",
            ("test.last", "pearson"): "last, r",
            ("test", "spearman"): "test, rho",
            ("test", "mse"): "test, MSE",
            ("test.peak", "pearson"): "peak on test!",
        },
        headline="pearson",
        read=_read_scores,
        compare=_compare_correlations,
        score=_score_predictions,
    ),
    "causal_lm": _LANGUAGE_MODELS,
    "masked_lm": _LANGUAGE_MODELS,
}


# Entries of scores.json that a cell has.
SCORED = ("valid", "test", "valid.last", "test.last", PAIRS)


class SeedGridConfig(PairsInput):
    """Settings of a comparison: the systems, their baselines and the seeds."""

    systems: Systems = Field(
        {name: {"model": {"name": name}} for name in ("tree_transformer", "transformer")},
        min_length=1,
        description="the compared systems: {name: {model: {...}, data: DIR, ...}}; these settings override the others",
    )
    seeds: tuple[Seed, ...] = Field(
        tuple(range(1, 11)), min_length=1, description="seeds of initialisation, dropout and batch order"
    )
    fewer_seeds: dict[str, PositiveInt] = Field({}, description="systems that run only with the first N seeds: {name: N}")
    baseline: str = Field(
        "tree_transformer", description="the name in `systems` of the baseline, against which the study tests the others"
    )
    parallel: Parallel = None
    protocol: Protocol = None
    peak_on_test: bool = Field(
        False,
        description="also score every kept checkpoint on test, and show the score of the best with a mark. This choice is not "
        "valid for a model, but some published results may use it. keep_checkpoints sets the number of checkpoints",
    )

    _check_values = field_validator("seeds")(check_once)

    @model_validator(mode="after")
    def _check_systems(self) -> Self:
        for name, settings in self.systems.items():
            check_name("systems", name)
            if "seed" in settings:
                raise ValueError(f"systems.{name}: leave seed out; the grid gives it")
        for what, names in (("baseline", [self.baseline]), ("fewer_seeds", self.fewer_seeds)):
            for name in names:
                if name not in self.systems:
                    raise ValueError(f"{what} must be one of {', '.join(self.systems)}, but is {name}")
        return self


class SeedsConfig(StudyConfig):
    """A comparison over seeds. The grid has the seeds."""

    names_of: ClassVar[Mapping[str, str]] = {"grid.fewer_seeds": "grid.systems"}

    grid: SeedGridConfig = SeedGridConfig()

    def places(self) -> Iterator[Place]:
        """Yield all systems with one seed, then with the next."""
        for number, seed in enumerate(self.grid.seeds):
            for system, settings in self.grid.systems.items():
                if number < self.grid.fewer_seeds.get(system, len(self.grid.seeds)):
                    yield Place(f"systems.{system}", {"system": system, "seed": seed}, (settings, {"seed": seed}))

    def check_task(self, run: TrainConfig, where: str) -> None:
        if run.task != self.task or run.task not in MEASURES:
            names = ", ".join(MEASURES)
            raise UserError(f"{where}: task must be one of {names}, the same for all systems, but is {run.task}")
        measures = MEASURES[run.task]
        if pairs_of(self) and not measures.others:
            raise UserError(f"grid.blimp and grid.pairs are for language models, but task is {run.task}; leave them out")
        if self.grid.peak_on_test and ("test.peak", measures.headline) not in measures.columns:
            raise UserError("grid.peak_on_test: must be false for language models; leave it out")

    def check_data(self, cells: Sequence[Cell], indices: Mapping[AnyPath, Mapping]) -> None:
        """Raise UserError if their classes differ, or for a data set that a system cannot learn from or be scored with."""
        if pairs_of(self):
            self._check_pairs(cells, indices)
        (first, index), *others = indices.items()
        if "test" not in index["totals"]:
            if self.grid.peak_on_test:
                raise UserError(f"grid.peak_on_test: {first} has no split test; leave peak_on_test out")
            found = (
                "valid and minimal pairs, and tests the pairs alone" if pairs_of(self) else "valid alone, and tests no difference"
            )
            warn(f"note: {first} has no split test, so the study has scores on {found}")
        for data, other in others:
            if other.get("num_classes") != index.get("num_classes"):
                raise UserError(
                    f"{data} and {first} differ in num_classes, but all systems must learn the same classes; preprocess one with "
                    "parsed set to the other"
                )

    def _check_pairs(self, cells: Sequence[Cell], indices: Mapping[AnyPath, Mapping]) -> None:
        """Raise UserError for a system that reads trees of other lines of a split, which sentences of pairs do not have."""
        from treenet.data.input_kinds import SPLIT_POINTS  # here, as below, because it loads PyTorch
        from treenet.tasks.base import build_task

        for cell in cells:
            source, reads = indices[cell.config.data].get("tree_settings", {}).get("tree_source"), build_task(cell.config).reads
            if source in OF_OTHER_LINES and reads.constituents and reads is not SPLIT_POINTS:  # which only the training reads
                raise UserError(
                    f"grid.systems.{cell.labels['system']} reads {source} trees, which come from other lines of a split, so it "
                    "cannot be scored on pairs; leave grid.blimp and grid.pairs out, or set "
                    f"grid.systems.{cell.labels['system']}=null"
                )


# The names that the settings of minimal pairs have in a study.
_OF_GRID = {f"pairs.{name}": f"grid.pairs.{name}" for name in PairsConfig.model_fields} | {
    "instead of blimp": "instead of grid.blimp"
}


def seed_work(config: SeedsConfig, more: "References" = ()) -> "CellWork":
    """Return the work of a cell: it trains and scores as tree-attention train does."""
    from treenet.experiments.grid import CellWork
    from treenet.jobs.train_run import run_training

    peak, pairs = config.grid.peak_on_test, pairs_of(config)
    fingerprint, problem = _fingerprint_pairs(pairs) if pairs else (None, "")
    score = partial(score_cell, config.task, peak, config.use_gpu, pairs, fingerprint)
    stale = partial(describe_stale_cell, peak, pairs, fingerprint)
    return CellWork(run_training, score, stale, partial(_describe_other_pairs, fingerprint), problem)


def _describe_other_pairs(fingerprint: str | None, results: Mapping[str, Mapping]) -> str:
    """Describe that results are of other minimal pairs than those with the fingerprint; empty if they are not, or have none."""
    of_pairs = results.get(PAIRS, {}).get("pairs_fingerprint")
    return "its minimal pairs are others" if None not in (fingerprint, of_pairs) and of_pairs != fingerprint else ""


def pairs_of(config: SeedsConfig) -> ScoreLMSettings | None:
    """Return the settings with which every cell is scored on minimal pairs; None if there are none."""
    given = config.grid.model_dump(include={*PairsInput.model_fields}, exclude_unset=True)
    return ScoreLMSettings(**given, use_gpu=config.use_gpu) if config.grid.blimp or config.grid.pairs.files else None


def _fingerprint_pairs(pairs: ScoreLMSettings) -> tuple[str | None, str]:
    """Return the fingerprint of the pairs that the files have now; or None, which is enough for a table, and what is wrong."""
    from treenet.evaluation.minimal_pairs import open_pairs, pair_facts

    try:
        with rewording(_OF_GRID):
            found = open_pairs(pairs)
    except UserError as error:
        return None, str(error)
    return pair_facts(found)["pairs_fingerprint"] if found else None, ""


def describe_stale_cell(peak_on_test: bool, pairs: ScoreLMSettings | None, fingerprint: str | None, folder: AnyPath) -> str:
    """Describe why scores of a cell do not fit its model or the study; empty if they fit. `fingerprint` is of the pairs."""
    from treenet.evaluation.classify import PEAK
    from treenet.experiments.study import describe_stale
    from treenet.runs.result_provenance import asked_for

    if peak_on_test and f"test.{PEAK}" not in read_scores(folder):
        return f"none of test.{PEAK}"
    of_pairs = read_scores(folder).get(PAIRS, {})
    if pairs and (of_pairs.get("asked") != asked_for(pairs) or fingerprint not in (None, of_pairs.get("pairs_fingerprint"))):
        return "none of these minimal pairs"
    return describe_stale(SCORED, folder)


def score_cell(
    task: str, peak_on_test: bool, use_gpu: bool, pairs: ScoreLMSettings | None, fingerprint: str | None, folder: AnyPath
) -> dict:
    """Score a trained cell. Returns its headline scores for the log, in the unit of the table."""
    from treenet.evaluation.classify import score_peak
    from treenet.loggers.feed import log_scores

    measures = MEASURES[task]
    needed = ("checkpoints/*",) if measures.results == TESTED else ()
    with open_results(folder, AVERAGED, *needed) as run:
        scores = measures.score(run, use_gpu)
        if pairs and describe_stale_cell(False, pairs, fingerprint, run):
            from treenet.evaluation.language_models import score_lm_run

            with rewording(_OF_GRID):
                scores |= dict([score_lm_run(run, pairs, PAIRS)])
        if peak_on_test:
            score_peak(run, "test", use_gpu=use_gpu)
        log_scores(run)
    shown = {name: scores[name] for name in ("valid", *measures.results) if name in scores}
    return {name: measures.unit * entry[measures.headline] for name, entry in shown.items()}
