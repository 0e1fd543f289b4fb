"""The answer of a report: which system scores highest, by how much, and in which interval.

Runs that differ in their seed alone are one system. A difference has an interval where three seeds or more have both
systems; with fewer, other seeds may reverse it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import fmean

import numpy as np

from treenet.config import OPERATIONAL, flatten
from treenet.evaluation.bootstrap import compare_seeds, sample_metric, sentence_statistics
from treenet.evaluation.significance import FEWEST_SEEDS, POWER, SIGNIFICANT, SYSTEMS, SeedTest, correct_family
from treenet.experiments.scaling_table import read_comparison
from treenet.experiments.seeds import MEASURES
from treenet.experiments.seeds_report import headline_test
from treenet.experiments.study import UNLEARNED
from treenet.report.compare import ScoreTable, references_of, table_of
from treenet.report.report_inputs import ReportRun, ReportStudy
from treenet.tasks.learning import find_unlearned, say_unlearned
from treenet.tasks.translation_metrics import (
    INTERNATIONAL,
    MAIN,
    MAIN_OF_TOKENS,
    METRIC_TITLES,
    SECOND,
    describe_blanks,
    needed_tokenizer,
)
from treeproc.common.folder_kinds import SEEDS
from treeproc.common.messages import tell


@dataclass(frozen=True)
class SystemResult:
    """A system's mean scores over its seeds. `difference` is to the system `against`, over the seeds that both have."""

    system: str
    seeds: tuple[int, ...]
    score: float
    chrf: float | None
    difference: float | None = None
    against: str = ""
    test: SeedTest | None = None
    seed_differences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Results of all systems: the baseline, then the others, best first.

    `about` names the split, or the study and the size of its training data. Numbers of the metric have `digits` places.
    """

    about: str
    metric: str
    title: str
    baseline: str | None
    rows: list[SystemResult]
    of_study: bool = False
    digits: int = 2
    lower_is_better: bool = False
    note: str = ""  # after the sentence
    unlearned: dict[str, str] = field(default_factory=dict)  # why systems learned nothing
    incomparable: str = ""  # why the scores cannot be compared

    @property
    def extreme(self) -> str:
        """The word for the best score."""
        return "lowest" if self.lower_is_better else "highest"

    @property
    def best(self) -> SystemResult:
        """Return the result with the best score."""
        return (min if self.lower_is_better else max)(self.rows, key=lambda row: row.score)

    @property
    def best_rows(self) -> list[int]:
        """Return the places of the best scores; empty where no system can be called the best."""
        if self.unlearned or self.incomparable or self._reversed:
            return []
        return [place for place, row in enumerate(self.rows) if row.score == self.best.score]

    @property
    def _compared(self) -> SystemResult | None:
        """The result with the difference between the best system and another one."""
        best = self.best
        found = [row for row in self.rows if row.difference is not None and best.system in (row.system, row.against)]
        return self._reversed or (best if best in found else next(iter(found), None))

    @property
    def _reversed(self) -> SystemResult | None:
        """The first result for which `_is_reversed`."""
        return next(filter(self._is_reversed, self.rows), None)

    def _is_reversed(self, row: SystemResult) -> bool:
        """Return whether the difference over shared seeds says that another system is better than the one with the best mean.

        That may be where the means have other seeds too.
        """
        best, rows = self.best, {one.system: one for one in self.rows}
        if not row.difference or best.system not in (row.system, row.against) or row.against not in rows:
            return False
        other = rows[row.against if row.system == best.system else row.system]
        if other.score == best.score or set(other.seeds) == set(best.seeds):
            return False
        return (row.difference < 0) == ((row.system == best.system) != self.lower_is_better)

    @property
    def shown_rows(self) -> list[SystemResult]:
        """Return the rows as people see them: without an inference about systems that learned nothing, or of other metrics."""
        if self.incomparable:
            return [replace(row, difference=None, against="", test=None, seed_differences=()) for row in self.rows]
        return [
            replace(row, test=row.test.without_inference())
            if row.test and {row.system, row.against} & self.unlearned.keys()
            else row
            for row in self.rows
        ]

    def show(self, value: float, sign: str = "") -> str:
        """Format a score, or with "+" a difference."""
        return f"{value:{sign}.{self.digits}f}".replace("-", "−")

    @property
    def sentence(self) -> str:
        """Return the result in a few sentences."""
        return " ".join(filter(None, (self._sentence(), self.note)))

    def _sentence(self) -> str:
        if self.unlearned:
            return f"{self.about}: {say_unlearned(self.unlearned)[0]}."
        if self.incomparable:
            return f"{self.about}: {self.incomparable}, so no system has the best {self.title}."
        best = self.best
        *others, last = [row.system for row in self.rows if row.score == best.score]
        who = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        first = f"{self.about}: {who} the {self.extreme} {self.title}, {self.show(best.score)}"
        if len(self.rows) == 1:
            return f"{first}. It is the only system{' with scores at this size' if self.of_study else ''}."
        if (compared := self._compared) is None or compared.difference is None:
            return f"{first}. Its differences from the others are not tested."
        other = best.against if compared is best else compared.system
        difference = compared.difference if compared is best else 0.0 - compared.difference  # never -0.0
        seeds = {row.system: set(row.seeds) for row in self.rows}
        shared = seeds[best.system] & seeds.get(other, set())
        over = " over the seeds that both have" if shared and seeds[best.system] != seeds[other] else ""
        but = "but " if self._reversed else ""
        certainty = self._certainty(compared, compared is best)
        return f"{first}, {but}{self.show(difference, '+')} against {other}{over}. {certainty}"

    def _certainty(self, row: SystemResult, as_given: bool) -> str:
        """Return what other seeds and sentences may change. If not `as_given`, the sentence turns the difference around."""
        test = row.test
        if test is None or test.interval is None:
            if test is not None and test.seeds >= FEWEST_SEEDS and test.sentences_error == 0:
                return "There is no interval: the difference is the same on all sentences."
            enough = len(row.seed_differences) >= FEWEST_SEEDS  # of runs alone: a study has an interval from so many seeds on
            needed = f"{FEWEST_SEEDS} seeds that both systems have"
            if enough:
                needed = "the data set, the scored translations, and scores of the data set's own references alone"
            return f"There is no interval: it needs {needed}. Other seeds may reverse the difference."
        low, high = test.interval if as_given else (-test.interval[1], -test.interval[0])
        message = f"The 95 % interval (t over {test.seeds} paired seeds) is {self.show(low, '+')} to {self.show(high, '+')}."
        if low <= 0 <= high:
            message += " It contains 0, so the difference may be chance."
        elif test.holm_p_value is not None and test.holm_p_value >= SIGNIFICANT:
            message += f" But after Holm's correction for several comparisons, p is {test.holm_p_value:.3f}"
            message += ": the difference may be chance."
        else:
            return message
        if test.seen is None:
            return message
        seen = f"a true difference of {self.show(test.seen)} with probability {POWER:g}"
        return f"{message} By the observed variance and without correction, as many seeds and sentences find {seen}."

    def to_json(self) -> dict:
        return asdict(self) | {"sentence": self.sentence}


def answer_runs(
    tables: Sequence[ScoreTable],
    runs: Sequence[ReportRun],
    baseline: ReportRun | None,
    split: str,
    num_samples: int,
) -> Answer | None:
    """Return the answer of the runs on `split`, of the baseline's text. Controls and stale results take no part."""
    if (table := table_of(tables, split)) is None:
        return None
    own = {row.run: row for row in table.rows if row.result == split and not row.status.changed}
    if not own:
        return None
    more = (table.baseline or next(iter(own.values()))).more_references  # scores of other references are not comparable
    scored = [run for run in runs if run.name in own and own[run.name].more_references == more]
    _, references = references_of(table, runs) or (None, None)
    tokenizer = needed_tokenizer([run.scores[split] for run in scored])
    metric = MAIN_OF_TOKENS if tokenizer else MAIN
    has_chrf = all(SECOND in run.scores[split] for run in scored)
    if metric == MAIN and has_chrf and describe_blanks(references or [], INTERNATIONAL):
        metric = SECOND
    systems = {
        name: seeds for name, seeds in group_systems(scored).items() if all(metric in r.scores[split] for r in seeds.values())
    }
    if not systems:
        return None
    base = next((name for name, seeds in systems.items() if any(run is baseline for run in seeds.values())), None)

    @cache
    def sampled(name: str) -> np.ndarray:
        lines = next(run.translations[split] for run in scored if run.name == name)
        return sample_metric(metric, sentence_statistics(metric, lines, references or [], tokenizer), num_samples)

    rows = []
    for name, seeds in systems.items():
        scores = [run.scores[split] for run in seeds.values()]
        chrf = [score[SECOND] for score in scores if SECOND in score]
        row = SystemResult(name, tuple(seeds), fmean(score[metric] for score in scores), fmean(chrf) if chrf else None)
        if base is not None and name != base:
            row = _compare(row, seeds, base, systems[base], metric, split)
            shared = [seed for seed in seeds if seed in systems[base]]
            pairs = [(systems[base][seed], seeds[seed]) for seed in shared]
            readable = all(len(run.translations.get(split, ())) == len(references or ()) for pair in pairs for run in pair)
            if references and not more and readable and len(shared) >= FEWEST_SEEDS:
                tell(f"interval over seeds: {name} against {base}")
                theirs, ours = ([sampled(pair[side].name) for pair in pairs] for side in (0, 1))
                row = replace(row, test=compare_seeds(theirs, ours, len(references)).over_seeds)
        rows.append(row)
    entries = {(name, seed): run.scores[split] for name, seeds in systems.items() for seed, run in seeds.items()}
    unlearned = _of_systems(find_unlearned(entries))
    signatures = {score[name] for score in entries.values() if (name := f"{metric}_signature") in score}
    incomparable = f"the signatures differ ({', '.join(sorted(signatures))})" if len(signatures) > 1 else ""
    ordered = _in_order(_corrected(rows), base)
    return Answer(f"On {split}", metric, METRIC_TITLES[metric], base, ordered, unlearned=unlearned, incomparable=incomparable)


def _of_systems(reasons: Mapping[tuple[str, int], str]) -> dict[str, str]:
    """Return why systems learned nothing, from the reasons by system and seed: that of the first seed, with the seeds."""
    found: dict[str, dict[int, str]] = {}
    for (system, seed), why in reasons.items():
        found.setdefault(system, {})[seed] = why
    return {
        system: f"{'seed' if len(of_seeds) == 1 else 'seeds'} {', '.join(map(str, of_seeds))}: {next(iter(of_seeds.values()))}"
        for system, of_seeds in found.items()
    }


def _compare(
    row: SystemResult, seeds: dict[int, ReportRun], base: str, others: dict[int, ReportRun], metric: str, split: str
) -> SystemResult:
    """Return the difference over shared seeds; of the means where no seed is shared."""
    shared = [seed for seed in seeds if seed in others]
    mine, theirs = ([side[s].scores[split][metric] for s in shared or side] for side in (seeds, others))
    single = tuple(one - other for one, other in zip(mine, theirs, strict=True)) if shared else ()
    return replace(row, difference=fmean(mine) - fmean(theirs), against=base, seed_differences=single)


def _in_order(rows: Sequence[SystemResult], baseline: str | None, lowest_first: bool = False) -> list[SystemResult]:
    return sorted(rows, key=lambda row: (row.system != baseline, row.score if lowest_first else -row.score, row.system))


def _corrected(rows: Sequence[SystemResult]) -> list[SystemResult]:
    """Return the rows with p-values that are corrected for the number of systems."""
    tested = {row.system: row.test for row in rows if row.test is not None}
    tests = dict(zip(tested, correct_family([*tested.values()], SYSTEMS), strict=True)) if tested else {}
    return [replace(row, test=tests.get(row.system)) for row in rows]


def group_systems(runs: Sequence[ReportRun]) -> dict[str, dict[int, ReportRun]]:
    """Return runs by seed of every system, by its name: the model's where no other system has it, else that of the first run.

    Two runs are of one system where they differ in the seed alone. A second run of the same seed counts as another system.
    """
    groups: list[tuple[str, dict[int, ReportRun]]] = []
    for run in runs:
        flat = flatten(run.config)
        kept = {key: value for key, value in flat.items() if key != "seed" and key not in OPERATIONAL}
        key, seed = repr((sorted(kept.items(), key=str), run.fingerprints)), int(run.config.get("seed", 1))
        found = next((seeds for other, seeds in groups if other == key and seed not in seeds), None)
        if found is None:
            groups.append((key, found := {}))
        found[seed] = run
    firsts = [next(iter(seeds.values())) for _, seeds in groups]
    models = [str(first.config["model"].get("name")) for first in firsts]
    taken = {run.name for run in runs}
    named = {}
    for (_, seeds), first, model in zip(groups, firsts, models, strict=True):
        unclear = len(seeds) == 1 or models.count(model) > 1 or model in taken
        more = len(seeds) - 1
        others = f" and {more} more {'seed' if more == 1 else 'seeds'}" if more else ""
        named[f"{first.name}{others}" if unclear else model] = seeds
    return named


def answer_study(study: ReportStudy) -> Answer | None:
    """Return the answer of a study: of one over data sizes, at its largest share. None before a cell is done."""
    make = _answer_comparison if study.form.kind is SEEDS else _answer_scaling
    answer = None if study.report is None else make(study.name, study.report)
    if answer is None or not study.stale:
        return answer
    cells = "1 cell" if len(study.stale) == 1 else f"{len(study.stale)} cells"
    stale = f"The weights of {cells} have changed since these numbers: run the study again."
    return replace(answer, note=" ".join(filter(None, (answer.note, stale))))


def _answer_comparison(name: str, report: dict) -> Answer | None:
    measures = MEASURES[report["task"]]
    headline, unit, base = f"test.{measures.headline}", measures.unit, report["baseline"]
    rows = []
    for system in (system for system in report["systems"] if headline in system):
        row = SystemResult(system["system"], tuple(system["seeds"]), unit * system[headline]["mean"], None)
        if found := headline_test(system, measures):
            test = _in_unit(found, unit)
            row = replace(row, difference=test.difference, against=base, test=test)
        rows.append(row)
    if not rows:
        return None
    lower = measures.lower_is_better
    rows = _in_order(rows, base, lower)
    joint = [system["system"] for system in report["systems"] if "test.perplexity_given_tree" in system]
    note = f"The nll of {' and '.join(joint)} is of sentence and tree together: an upper bound of that of the sentence."
    note = note if 0 < len(joint) < len(rows) else ""
    unlearned = _of_cells(report.get("cells", ()), "system")
    return Answer(f"{name}, test", measures.headline, measures.title, base, rows, True, measures.digits, lower, note, unlearned)


def _of_cells(cells: Iterable[Mapping], system: str) -> dict[str, str]:
    return _of_systems({(cell[system], cell["seed"]): cell[UNLEARNED] for cell in cells if UNLEARNED in cell})


def _in_unit(test: SeedTest, unit: float) -> SeedTest:
    numbers = {name: getattr(test, name) for name in ("difference", "seeds_error", "sentences_error", "seen")}
    interval = (unit * test.interval[0], unit * test.interval[1]) if test.interval else None
    return replace(test, interval=interval, **{name: value and unit * value for name, value in numbers.items()})


def _answer_scaling(name: str, report: dict) -> Answer:
    metric = report["metric"]
    largest = max(point["fraction"] for point in report["points"])
    rows = []
    for point in (point for point in report["points"] if point["fraction"] == largest):
        row = SystemResult(point["model"], tuple(point["seeds"]), point[metric]["mean"], point[SECOND]["mean"])
        if found := read_comparison(point):
            row = replace(row, difference=found[0].difference, against=point["comparison"]["against"], test=found[0])
        rows.append(row)
    pairs = max(point["pairs"] for point in report["points"] if point["fraction"] == largest)
    about = f"{name}, {report['split']}, {pairs:,.0f} training pairs"
    unlearned = _of_cells((cell for cell in report.get("cells", ()) if cell["fraction"] == largest), "model")
    rows = _in_order(rows, report["baseline"])
    return Answer(about, metric, METRIC_TITLES[metric], report["baseline"], rows, True, unlearned=unlearned)
