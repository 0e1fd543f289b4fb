"""Studies: they run the missing cells of a grid, report, and list the remaining ones."""

import io
import math
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.evaluation.evaluate import References
from treenet.evaluation.significance import FEWEST_SEEDS
from treenet.experiments.comparable import check_one_study, describe_unlike
from treenet.experiments.grid import CellWork, run_cells_here, run_cells_in_processes
from treenet.experiments.ledger import DONE, FAILED, LEDGER, Cell, Ledger
from treenet.experiments.records import Record, Recording, refuse_other_budget
from treenet.experiments.results import Results
from treenet.experiments.study_grid import StudyConfig, study_cells
from treenet.jobs.dry_run import disk_of_run, show_size
from treenet.jobs.train_job import check_model
from treenet.jobs.train_run import STOPPED_BY_SIGTERM
from treenet.loggers.feed import check_loggers
from treenet.models.paired_weights import matrix_draws
from treenet.models.registry import only_shapes
from treenet.runs.checkpoint import AVERAGED, checkpoint_folders, describe_choices, read_meta
from treenet.runs.metrics_log import write_png
from treenet.runs.result_entries import FORMS, RESULTS_HINT, SCORES
from treenet.runs.result_provenance import NOT_RECORDED
from treenet.runs.run_results import stale_scores
from treenet.tasks.base import build_task
from treenet.tasks.learning import say_overfitted, say_unlearned, why_overfitted, why_unlearned
from treenet.training.batch_stream import plan_batches
from treeproc.common.errors import CommandEnded, require
from treeproc.common.files import atomic_write, file_lock, json_bytes, lock_place, locked, read_json
from treeproc.common.folder_kinds import RECORDS, Kind, claim_folder, is_same_file, mark_folder
from treeproc.common.messages import warn
from treeproc.common.provenance import commit_of
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import AnyPath
from treeproc.shards.store import describe_agreement, keeps_most_shapes, read_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def need_ray(cells: Iterable[Cell]) -> bool:
    """Return whether cells have workers on Ray. Then their driver has the grid alone; otherwise processes share it."""
    return any(cell.config.workers for cell in cells)


def run_cells(cells: Iterable[Cell], work: CellWork, ledger: Ledger, parallel: int | None = None) -> None:
    """Run the cells that are not done in the ledger, and record how each cell ended.

    `parallel` cells run at a time: with `workers` on Ray (None: as many as the cluster has room for), else in processes. Without
    `workers`, None runs them one after another in this process. SIGTERM saves a checkpoint and stops. The next call runs the
    waiting and interrupted cells.
    """
    cells = ledger.in_order(cells)
    if need_ray(cells):
        require("ray", "a study with workers", "give workers=0 to train each cell in one process")
        from treenet.experiments.ray_cells import run_cells_with_ray  # a grid without Ray must not import it

        run_cells_with_ray(cells, work, ledger, parallel)
    elif cells and parallel and parallel > 1:
        run_cells_in_processes(cells, work, ledger, parallel)
    else:
        run_cells_here(cells, work, ledger)


_REPORT_LOCK = ".report-lock"


def describe_stale(names: Sequence[str], folder: AnyPath) -> str:
    """Describe the changes since the scores with these names were made; empty without a change."""
    stale = stale_scores(folder)
    return "; ".join(f"{name}: {stale[name].changed}" for name in names if name in stale)


def read_fresh_scores(names: Sequence[str], folder: AnyPath) -> dict[str, dict]:
    """Read scores.json of a run. Raises UserError if it is missing or damaged, or if those of `names` are stale."""
    scores = read_json(folder / SCORES, RESULTS_HINT, FORMS[SCORES])
    for name, status in stale_scores(folder).items():
        if name in names:
            raise UserError(f"{folder}: the scores of {name} are {status.describe()}")
    return scores


UNLEARNED = "unlearned"  # of a cell: why it learned nothing; of what is compared: that a cell of it learned nothing
OVERFITTED = "overfitted"  # of a cell: why


def note_unlearned(scores: Mapping) -> dict[str, str]:
    """Return the mark of a cell in a report that learned nothing, or is overfitted, from its scores; nothing for others."""
    marks = {UNLEARNED: why_unlearned(scores), OVERFITTED: why_overfitted(scores)}
    return {mark: why for mark, why in marks.items() if why}


def unlearned_in(*sides: Results) -> dict[str, bool]:
    """Return the mark of a comparison of the cells of all sides in a report; nothing if all of them learned something."""
    return {UNLEARNED: True} if any(side.where(metric=UNLEARNED) for side in sides) else {}


def say_unlearned_cells(report: Mapping) -> list[str]:
    """Return a line about the cells that learned nothing, and one about those that are overfitted; of each if there are any."""
    cells = report.get("cells", ())
    unlearned, overfitted = ({one["cell"]: one[mark] for one in cells if mark in one} for mark in (UNLEARNED, OVERFITTED))
    return [*say_unlearned(unlearned), *say_overfitted(overfitted)]


def notes_about_cells(report: Mapping) -> list[str]:
    """Return a line about cells whose scores do not name their weights, and lines about compared cells of unlike conditions."""
    cells = report.get("cells", ())
    count = sum(cell.get("weights_sha256") is None for cell in cells)
    return [*([f"{count} of {len(cells)} cells {NOT_RECORDED}"] if count else []), *describe_unlike(report)]


class StudyCell(TypedDict):
    """The field of a cell that the file of every study has."""

    cell: str


_FEW_EXAMPLES = 10
Read = Callable[[AnyPath], tuple[dict[str, dict], dict[str, str]]]  # see `Recording`


@dataclass(frozen=True)
class StudyForm:
    """One of the forms of a study: the axes of its records, how its cells are scored, and its report.

    `work` and `read` also get the lines of further references. `build` makes the content of the file `report` in the folder of
    the study, `table` formats it for a person, and `draw` draws the figure of the files `pictures`.
    """

    kind: Kind
    content: type  # the form of the file `report`
    name: str  # of its figures in a report
    command: str
    labels: Mapping[str, type]  # the first one names the system of a cell
    report: str
    rows: str  # the key of the report that has a row for each system, of each size
    pictures: Sequence[str]
    work: Callable[[Any, References], CellWork]
    read: Callable[[Any, References], Read]
    build: Callable[[Any, Sequence[Record]], dict]
    table: Callable[[dict], str]
    draw: Callable[[dict], "Figure"]

    @property
    def system(self) -> str:
        """The name of a row's system."""
        return next(iter(self.labels))

    def write(self, config: StudyConfig, records: Sequence[Record], out: AnyPath) -> str:
        """Write the report and its pictures into a folder. Returns the table and the paths."""
        found = self.build(config, records)
        atomic_write(out / self.report, json_bytes(found, self.content))
        pictures = [out / name for name in self.pictures] if found["cells"] else []
        if pictures:
            _save(self.picture(found), pictures)
        return f"{self.table(found)}\n\n" + "\n".join(map(str, [out / self.report, *pictures]))

    def picture(self, report: dict) -> "Figure":
        """Draw a report. A title says if cells learned nothing, because pictures go where the table does not."""
        figure, cells = self.draw(report), report.get("cells", ())
        if unlearned := sum(UNLEARNED in cell for cell in cells):
            figure.suptitle(f"nothing was learned in {unlearned} of {len(cells)} cells", fontsize="medium")
        return figure


def _save(figure: "Figure", paths: Sequence[AnyPath]) -> None:
    """Write a figure as PNG and SVG, the same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "none"}):
        for path in paths:
            if path.name.endswith(".png"):
                write_png(figure, path)
                continue
            content = io.BytesIO()
            figure.savefig(content, format="svg", metadata={"Date": None})
            atomic_write(path, content.getvalue())


@dataclass(frozen=True)
class Study:
    """A grid of runs in the folder `out`: its cells, how they run and are recorded.

    `out` and the records may be in an object store.
    """

    form: StudyForm
    config: StudyConfig
    out: AnyPath
    cells: Sequence[Cell]
    work: CellWork
    recording: Recording

    def write(self, records: Sequence[Record]) -> str:
        """Write the report. Returns what a person reads at the end."""
        return self.form.write(self.config, records, self.out)

    def describe_start(self, planned: Sequence[Record], left: Iterable[Cell]) -> Iterator[str]:
        """Yield notes before the training: too few seeds, and the examples of each share of the data, of the cells `left`."""
        seeds = len({record["labels"]["seed"] for record in planned})
        if seeds < FEWEST_SEEDS:
            yield f"note: an interval needs {FEWEST_SEEDS} seeds, but this study has {seeds}; a larger grid.seeds adds cells"
        for share, count in _count_examples(left).items():
            kind, more = ("note", "") if count >= _FEW_EXAMPLES else ("warning", "; leave such small grid.fractions out")
            yield f"{kind}: share {share:g} of the training data: {count:,} {'example' if count == 1 else 'examples'}{more}"


def _count_examples(cells: Iterable[Cell]) -> dict[float, int]:
    """Return the examples of each share below 1, of the first of its cells, from the lengths of the data."""
    found: dict[float, int] = {}
    for cell in cells:
        share = cell.labels.get("fraction", 1.0)
        if share < 1 and share not in found:
            with suppress(UserError):  # which the cell itself ends with
                source = build_task(cell.config).open("train", training=True)
                found[share] = int(plan_batches(cell.config, source).used_sizes().rows.sum())
    return found


def make_study(form: StudyForm, config: StudyConfig, out: AnyPath, records: AnyPath | None, more: References = ()) -> Study:
    """Make the study in the folder `out`, with the records of its cells in another folder, if they are kept.

    `more` has the lines of the files `grid.more_references`. Raises UserError if the study names a protocol that git does not
    have.
    """
    config = config.with_pinned_encoder(out)
    cells = study_cells(config, out)  # first, because it checks the settings
    protocol = config.grid.protocol and commit_of(config.grid.protocol)
    recording = Recording(form.labels, form.read(config, more), records, protocol)
    return Study(form, config, out, cells, form.work(config, more), recording)


def _is_scored(folder: AnyPath) -> bool:
    return (folder / SCORES).exists()


def _check_cells(study: Study, ledger: Ledger, kept: Container[str]) -> int:
    """Check loggers and models of the cells that are not done, of those that differ in the seed one.

    Returns the most bytes that all cells take that are not done. Raises UserError if a cell cannot be trained or scored.
    """
    alike: dict[str, list[Cell]] = {}
    for cell in study.cells:
        entry = ledger.entries.get(cell.name)
        done = entry is not None and entry.status == DONE and _is_scored(study.out / "cells" / cell.name)
        if not done and cell.name not in kept:
            alike.setdefault(cell.config.model_dump_json(exclude={"seed"}), []).append(cell)
    if alike and study.work.problem:
        raise UserError(study.work.problem)
    needed = 0
    for cell, *others in alike.values():
        try:
            check_loggers(cell.config, cell.folder)
            facts = check_model(cell.config, read_index(cell.config.data / "encoded"), build_task(cell.config))
        except UserError as error:
            raise UserError(f"{cell.name}: {error}") from None
        needed += (1 + len(others)) * disk_of_run(cell.config, facts)[1]
    return needed


def _check_with_done(study: Study, ledger: Ledger, kept: dict[str, Record]) -> list[str]:
    """Return `describe_start`, and a warning for trees of other sentences that are hardly other trees.

    Raises UserError if the cells of the grid are not of one study with those that are done, also of earlier grids.
    """
    indices = {data: read_index(data / "encoded") for data in {cell.config.data for cell in study.cells}}
    for cell in study.cells:
        if cell.name in kept and not _is_scored(cell.folder) and (why := study.work.unlike(kept[cell.name]["scores"])):
            raise UserError(
                f"the record of {cell.name} has other scores ({why}); give the settings and files of these scores, restore the "
                "run, or remove the record to train it again"
            )
    planned = [*(study.recording.plan(study.cells, indices, ledger, study.out) | kept).values()]
    check_one_study(planned, study.form.system)
    done = {name for name, entry in ledger.entries.items() if entry.status == DONE} | kept.keys()
    alike = [f"warning: {data}: {describe_agreement(index)}" for data, index in indices.items() if keeps_most_shapes(index)]
    return [*alike, *study.describe_start(planned, [cell for cell in study.cells if cell.name not in done])]


def describe_pairing(study: Study) -> Iterator[str]:
    """Yield for each system how many of its matrices begin as the baseline's do, where both have `model.paired_weights`."""
    system, drawn = study.form.system, {}
    paired = {cell.labels[system]: cell.config for cell in study.cells if cell.config.model.paired_weights}
    for name, config in paired.items() if len(paired) > 1 else ():
        task = build_task(config)
        sizes = task.sizes(read_index(config.data / "encoded"))
        with only_shapes():
            drawn[name] = matrix_draws(partial(task.build_model, sizes))
    baseline = study.config.grid.baseline
    for name, own in drawn.items():
        if name != baseline and baseline in drawn:
            count = len(own.items() & drawn[baseline].items())
            yield f"{name}: {count} of {len(own)} matrices are shared with {baseline} (model.paired_weights)"


def _free_space(out: AnyPath) -> float:
    """Return the free bytes of the disk; a store has room for all."""
    if not isinstance(out, Path):
        return math.inf
    return shutil.disk_usage(next(folder for folder in (out, *out.parents) if folder.exists())).free


def _own_cells(study: Study, recorded: Container[str]) -> list[Cell]:
    """Return the cells that need this folder: those without a record, and those whose scores are in it."""
    return [cell for cell in study.cells if cell.name not in recorded or _is_scored(cell.folder)]


def _other_average(cell: Cell) -> str:
    """Describe that a cell has another average than its settings ask for, which its checkpoints can give; else empty."""
    own, asked = describe_choices(cell.config, read_meta(cell.folder / AVERAGED))
    return f"its average is of {own}, not of {asked}" if own != asked and checkpoint_folders(cell.folder) else ""


def show_study(study: Study) -> str:
    """Return the state of every cell, one per line, the disk that they need, and the table so far.

    Raises UserError as `_check_cells`, and for started cells with other settings.
    """
    ledger, kept = Ledger.read(study.out), study.recording.kept(study.cells)
    needed, free = _check_cells(study, ledger, kept), _free_space(study.out)
    ledger.check(_own_cells(study, kept))
    notes = _check_with_done(study, ledger, kept)

    def state(name: str) -> str:
        return ledger.entries[name].status if name in ledger.entries else "recorded" if name in kept else "new"

    lines = [*(f"{cell.name}: {state(cell.name)}" for cell in study.cells), *describe_pairing(study), *notes]
    there = f"; the disk has {show_size(free)} free" if math.isfinite(free) else ""
    lines.append(f"disk: {show_size(needed)} at most for all cells that are not done{there}")
    report = study.form.build(study.config, study.recording.read_all(ledger, study.out))
    return "\n".join([*lines, study.form.table(report)])


def run_study(study: Study) -> None:
    """Run the cells that are not done, and print the report of all. If some cells remain, end the process with an error status.

    Without Ray, several such commands may work on one study. The last one to end reports on all cells. Raises UserError as
    `_check_cells`, before anything is written.
    """
    out, recording = study.out, study.recording
    claim_folder(out, study.form.kind)
    if recording.folder is not None:
        if is_same_file(recording.folder, out):
            raise UserError(f"--records must be another folder than --out, but both are {out}")
        claim_folder(recording.folder, RECORDS, option="--records")
    ledger, kept = Ledger.read(out), recording.kept(study.cells)
    needed, free = _check_cells(study, ledger, kept), _free_space(out)
    notes = _check_with_done(study, ledger, kept)
    if needed > free:
        warn(f"warning: the cells that are not done may take {show_size(needed)}, and {out} has {show_size(free)} free")
    for line in describe_pairing(study):
        warn(f"note: {line}")
    mark_folder(out, study.form.kind)
    with locked(out, shared=not need_ray(study.cells)):
        recorded = recording.kept(study.cells)
        cells = _own_cells(study, recorded)
        ledger = Ledger.open(out, cells)
        for line in notes:
            warn(line)
        atomic_write(out / "config.yaml", dump_settings(study.config).encode())
        for cell in cells:
            entry = ledger.entries[cell.name]
            if entry.status != DONE:
                continue
            if changed := study.work.stale(cell.folder) or _other_average(cell):
                message = f"{cell.name}: its scores are not those of this study ({changed}); it averages and scores the run again"
                warn(f"warning: {message}")
                ledger.reopen(cell)
                continue
            refuse_other_budget(cell.folder, cell.config)
            if cell.name not in recorded:
                recording.write(cell.folder, entry)
        run_cells(cells, replace(study.work, record=recording.write), ledger, study.config.grid.parallel)
        with file_lock(lock_place(out / _REPORT_LOCK)):
            ledger.refresh()
            print(f"\n{study.write(recording.read_all(ledger, out))}")
    left = {cell.name: ledger.entries[cell.name] for cell in cells if ledger.entries[cell.name].status != DONE}
    for name, entry in left.items():
        if entry.status == FAILED:
            warn(f"{name} failed: {entry.error}")
    if any(entry.status != FAILED for entry in left.values()):
        raise CommandEnded(STOPPED_BY_SIGTERM, f"stopped with {ledger.counts()}; the same command continues")
    if left:
        failed = f"{len(left)} of {len(cells)} cells failed, see {out / LEDGER}"
        raise CommandEnded(1, f"{failed}; the same command runs them again")
