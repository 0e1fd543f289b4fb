"""Run folders and studies as it reads them, with the commands that add missing results."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from treenet.config import TrainConfig
from treenet.experiments.ledger import LEDGER, last_step
from treenet.experiments.recorded_study import FORMS, form_of, report_records, systems_of
from treenet.experiments.records import read_records
from treenet.experiments.scaling_report import ScalingReport
from treenet.experiments.study import StudyForm
from treenet.probing.probe_results import read_probes
from treenet.runs.checkpoint import AVERAGED, is_complete
from treenet.runs.identity import check_weights, find_other_metrics
from treenet.runs.loading import data_of
from treenet.runs.metrics_log import read_metrics
from treenet.runs.mirror import mirror_of
from treenet.runs.result_entries import PROBES, SCORES, read_scores
from treenet.runs.result_provenance import PARSE, ResultStatus, RunState
from treenet.runs.run_folder import FACTS, RunFacts, read_facts, recorded_sha256
from treenet.runs.run_results import read_system, scoring_command
from treenet.tasks.base import task_of
from treeproc.common.errors import quoted, rewording
from treeproc.common.files import is_plausible, read_json
from treeproc.common.folder_kinds import CONFIG, SEARCH, kind_of
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath, as_path, inside
from treeproc.shards.store import describe_agreement, describe_trees, pieces_fingerprint, read_index

# Fingerprints of a data set, and what is the same in two runs that share one.
FINGERPRINTS = {"text_fingerprint": "text", "tree_fingerprint": "trees", "vocab_fingerprint": "vocabulary"}
LANGUAGE = ("causal_lm", "masked_lm")  # tasks of language models
_TRAIN_AGAIN = "run its tree-attention train command again"


@dataclass(frozen=True)
class Missing:
    """A missing or stale result of a run, and the command that makes or renews it where there is one."""

    said: str
    command: str = ""


@dataclass
class ReportRun:
    """A training run."""

    name: str
    folder: Path
    given: str  # as the user wrote it, for commands
    config: dict
    facts: RunFacts
    metrics: list[dict]
    scores: dict[str, dict]
    translations: dict[str, list[str]]  # by name of the result
    fingerprints: dict[str, str]  # those of FINGERPRINTS that are known, and of the pieces if the data set is there
    trees: str | None  # where the trees of its data set come from; None if that is not known
    step: int
    finished: bool
    agreement: str = ""  # of control trees with the lines' own trees; empty if that is not known
    weights_sha256: str | None = None  # of the averaged model as it is
    statuses: dict[str, ResultStatus] = field(default_factory=dict)  # of the scores, by name of the result
    missing: list[Missing] = field(default_factory=list)
    stale: list[Missing] = field(default_factory=list)
    probes: dict = field(default_factory=dict)  # the entry of probes.json of the averaged model, if there is one
    probes_status: ResultStatus = field(default_factory=ResultStatus)

    @property
    def data(self) -> AnyPath:
        return as_path(self.config["data"])

    @property
    def task(self) -> str:
        return self.config.get("task", "translation")

    def current_translations(self, result: str) -> list[str] | None:
        """Return the lines of a result; None if there are none, or if they are not of the run as it is."""
        status = self.statuses.get(result)
        return self.translations.get(result) if status and not status.changed else None


@dataclass(frozen=True)
class ReportStudy:
    """A data-size study, or a comparison over seeds. `stale` are names of its cells.

    `report` is its scaling.json or comparison.json, None before its first cell is done.
    """

    name: str
    given: str
    form: StudyForm
    report: dict | None
    stale: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Return the command that renews the results."""
        config = shlex.quote(f"{self.given}/config.yaml")
        return f"tree-attention {self.form.command} --config {config} --out {shlex.quote(self.given)}"


class ReportInputs(NamedTuple):
    """The folders of a report by their kind, each in the order given."""

    runs: list[ReportRun]
    studies: list[ReportStudy]


def task_of_runs(runs: Sequence[ReportRun]) -> str:
    """Return the task of all runs; of studies alone, translation."""
    return next((run.task for run in runs), "translation")


# A report has no settings of studies.
_OF_RECORDS = dict.fromkeys(
    (
        "give each study its own --out and --records",
        "give grid.target_language as in the records, or another --records",
        "give the metric of the records, or another --records",
        "give the split of the records as grid.split",
    ),
    "keep the records of each study in a separate folder",
) | {
    "grid.metric =": "the metric",
    "of grid.more_references; remove it": "of the first record; remove it, or keep the records of each study in a separate "
    "folder",
}


def read_report_inputs(given: Sequence[str], split: str, baseline: str | None = None, main: str | None = None) -> ReportInputs:
    """Read runs and studies of both forms. Raises UserError for a folder of another kind.

    A study may also be a folder of records, which `baseline` and `main` then order.
    """
    places = [as_path(one).resolve() for one in given]  # RUN, RUN/ and ./RUN are one
    if twice := next((one for one, place in zip(given, places, strict=True) if places.count(place) > 1), None):
        raise UserError(f"runs: {twice} is given twice")
    found, known = ReportInputs([], []), set[str]()
    for name, text in zip(short_names(given), given, strict=True):
        mirror = mirror_of(as_path(text), only=(AVERAGED,))
        mirror.pull()
        folder = mirror.folder
        kind = kind_of(as_path(text))
        if (folder / LEDGER).is_file() and kind is not SEARCH:
            form = next((form for form in FORMS if form.kind is kind or (folder / form.report).is_file()), FORMS[0])
            found.studies.append(_read_study(name, text, folder, form, mirror.out))
        elif kind is None and not (folder / CONFIG).is_file() and (records := list(read_records(folder).values())):
            known.update(systems_of(records))
            with rewording(_OF_RECORDS):
                study = report_records(records, baseline, main)
            found.studies.append(_in_order(name, text, form_of(records), study))
        else:
            found.runs.append(_read_run(name, text, folder, split, mirror.out))
    found.studies.sort(key=lambda study: FORMS.index(study.form))
    if len(tasks := {run.task: run.given for run in found.runs}) > 1:
        raise UserError(f"runs must be of one task, but are {' and '.join(f'{run} of {task}' for task, run in tasks.items())}")
    if main is not None and not known:
        raise UserError("main: is of records of a study, and none is given; leave it out")
    for setting, value, names in (("main", main, known), ("baseline", baseline, {*known, *(run.name for run in found.runs)})):
        if value not in (None, *names):
            raise UserError(f"{setting} must be one of {', '.join(sorted(names)) or 'no run'}, but is {value}")
    return found


def _read_study(name: str, given: str, folder: Path, form: StudyForm, out: AnyPath) -> ReportStudy:
    """Read the file of a study's results. Without a row in its table, there are no results yet."""
    path = folder / form.report
    report = read_json(path, "its own command makes it again", form.content) if path.is_file() else None
    _check_numbers(report, path)
    if report is None or not report[form.rows]:
        return ReportStudy(name, given, form, None)
    if form.content is ScalingReport:
        _check_compared(report, path)
    return _in_order(name, given, form, report, tuple(_stale_cells(out, report)))


def _in_order(name: str, given: str, form: StudyForm, report: dict, stale: tuple[str, ...] = ()) -> ReportStudy:
    """Return a study whose rows begin with the baseline, at each size."""
    rows = report[form.rows]
    sizes = list(dict.fromkeys(row.get("fraction") for row in rows))
    rows.sort(key=lambda row: (sizes.index(row.get("fraction")), row[form.system] != report["baseline"]))
    return ReportStudy(name, given, form, report, stale)


def _stale_cells(out: AnyPath, report: dict) -> Iterator[str]:
    """Yield the names of cells that have other weights now than those that the numbers of a study were made with."""
    for cell in report["cells"]:
        then, now = cell.get("weights_sha256"), recorded_sha256(inside(out / "cells", cell["cell"]) / AVERAGED)
        if None not in (then, now) and then != now:
            yield cell["cell"]


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
    parts = [[part for part in path.split("/") if part not in ("", ".")] or [path] for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def _read_run(name: str, given: str, folder: Path, split: str, place: AnyPath) -> ReportRun:
    """Read a run from its mirror `folder`; checkpoints, which are not mirrored, from its own `place`."""
    for file in (CONFIG, FACTS):
        if not (folder / file).is_file():
            raise UserError(
                f"{given} is neither a run nor a study: {folder / file} is missing; give --out folders of tree-attention train "
                "or tree-attention scaling"
            )
    config = load_settings(TrainConfig, folder / CONFIG)
    # The place in an exported run's settings is below the run, and not below the folder of the command.
    config = config.model_copy(update={"data": data_of(folder, config)})
    if (task := config.task) not in ("translation", "classification", *LANGUAGE):
        out = given.rstrip("/")
        scores_it = f"tree-attention {task_of(task).scorer} --out {shlex.quote(out)} scores it"
        raise UserError(
            f"{given} is a run of {task}, and a report reads runs of translation, classification and language models, and "
            f"studies of all tasks; {f'its scores are in {out}/{SCORES}' if (folder / SCORES).is_file() else scores_it}"
        )
    check_weights(folder, folder / AVERAGED, name=as_path(given))
    scores = {name: one for name, one in read_scores(folder).items() if isinstance(one, dict) and not name.startswith(PARSE)}
    state, probes, facts = RunState(place, given), read_probes(folder).get(AVERAGED, {}), read_facts(folder, _TRAIN_AGAIN)
    for values, file in ((scores, SCORES), (probes, PROBES), (facts, FACTS)):
        _check_numbers(values, folder / file)
    run = ReportRun(
        name=name,
        folder=folder,
        given=given,
        config=config.model_dump(mode="json"),
        facts=facts,
        metrics=read_metrics(folder),
        scores=scores,
        translations=dict(_translations(folder, scores)),
        fingerprints={},
        trees=None,
        step=last_step(place),
        finished=is_complete(folder / AVERAGED),
        weights_sha256=state.weights_sha256(),
        statuses=state.check_scores(scores),
        probes=probes,
        probes_status=state.check(probes, "probe") if probes else ResultStatus(),
    )
    index = own_index(run)
    run.fingerprints = _fingerprints(run, index)
    if index is None:
        run.missing.append(Missing("its data set is missing or was made again, so the page has nothing that needs its sentences"))
    elif not index["totals"]:
        run.missing.append(Missing("it was exported without its data set, so the page has nothing that needs its sentences"))
    if (step := find_other_metrics(place, run.metrics)) is not None:
        why = f"its loss on valid at update {step:,} is not that of the checkpoint, so curves and speed are not of this run"
        run.missing.append(Missing(f"metrics.jsonl is of another run: {why}"))
    if index and index.get("tree_source"):
        run.trees, run.agreement = describe_trees(index), describe_agreement(index)
    judged = {**{f"the scores of {result}": one for result, one in run.statuses.items()}, "the probes": run.probes_status}
    run.stale = [Missing(f"{what} ({one.changed})", one.command) for what, one in judged.items() if one.changed]
    out = shlex.quote(given)
    if not run.finished:
        steps = f"{run.step:,} of {config.max_steps:,} updates"
        command = f"tree-attention train --config {shlex.quote(given + '/config.yaml')} --out {out}"
        run.missing.append(Missing(f"no averaged model, after {steps}", command))
    what, there = ("translations", run.translations) if task == "translation" else ("scores", run.scores)
    if split not in there:
        command = "" if "-" in split else scoring_command(task, given, split)  # pairs need their files
        run.missing.append(Missing(f"no {what} of {split}", command))
    return run


def _check_numbers(values: object, path: Path) -> None:
    """Raise UserError for a number so large that sums overflow: no command writes it."""
    left = [("", values)]
    while left:
        place, value = left.pop()
        if isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            left += [(f"{place}.{key}" if place else str(key), one) for key, one in inner]
        elif isinstance(value, int | float) and not is_plausible(value):
            raise UserError(f"{path} is damaged: {place} must be at most 1e100, but is {quoted(value)}; restore the file")


def _check_compared(report: dict, path: Path) -> None:
    """Raise UserError for a comparison with a model that has no point at its size."""
    there = [(point["model"], point["fraction"]) for point in report["points"]]
    for number, point in enumerate(report["points"]):
        if point.get("comparison") and (against := point["comparison"]["against"], point["fraction"]) not in there:
            raise UserError(
                f"{path} is damaged: points.{number}.comparison.against must be a model with the share {point['fraction']}, but "
                f"is {quoted(against)}; its own command makes it again"
            )


def _translations(folder: Path, scores: dict[str, dict]) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines by result, where they are those that were scored."""
    for result in scores:
        with suppress(UserError):
            yield result, read_system(folder, result).lines


def _fingerprints(run: ReportRun, index: dict | None) -> dict[str, str]:
    """Return the fingerprints of a run: from its data set where it is still the one of the training, else from scores."""
    own = run.facts.get("data_fingerprint")
    scored = [record["data"] for record in run.scores.values() if isinstance(record.get("data"), dict)]
    found: Mapping = index or next((record for record in scored if record.get("fingerprint") == own), run.facts)
    known = {key: found[key] for key in FINGERPRINTS if key in found}
    return known | {"pieces_fingerprint": pieces_fingerprint(index)} if index else known


def own_index(run: ReportRun) -> dict | None:
    """Return the index of the run's encoded data set, None if it is not there any more or another one took its place."""
    if not (run.data / "encoded" / "index.json").exists():
        return None
    index = read_index(run.data / "encoded")
    return index if index.get("fingerprint") == run.facts.get("data_fingerprint") else None
