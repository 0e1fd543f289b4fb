"""The builder of reports: from run folders to index.html, report.json, figures/*.png and *.svg."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from treenet.analysis.attention_stats import run_attention
from treenet.analysis.encoder_attention import has_self_attention, run_encoder_attention
from treenet.experiments.recorded_study import FORMS
from treenet.layers.backend import choose_device
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.report.answer import answer_runs, answer_study
from treenet.report.answer_sections import ANSWER, draw_answer
from treenet.report.class_sections import CLASSIFICATION, choose_class_examples
from treenet.report.compare import ablations, choose_baseline, score_tables, settings_of, side_of_run, warnings
from treenet.report.example_sections import pack
from treenet.report.figures import draw_tree, run_colors, save_chart, save_figure, style
from treenet.report.inside_sections import draw_inside
from treenet.report.language_sections import draw_pairs
from treenet.report.lines import collect_lines, score_frequencies
from treenet.report.page import render_page
from treenet.report.report_inputs import LANGUAGE, Missing, ReportRun, own_index, read_report_inputs, task_of_runs
from treenet.report.report_model import Inside, Report, Scored, report_numbers
from treenet.report.run_sections import read_making
from treenet.report.score_sections import draw_scores
from treenet.report.sentence_views import View, build_views, choose_examples, lay_out
from treenet.report.settings import ReportSettings
from treenet.runs.loading import load_run
from treenet.runs.metrics_log import draw_curves
from treeproc.common.files import atomic_write, json_bytes, read_json, remove_leftovers
from treeproc.common.folder_kinds import REPORT, claim_folder, mark_folder
from treeproc.common.messages import tell
from treeproc.common.settings import UserError

PAGE, NUMBERS, FIGURES = "index.html", "report.json", "figures"
_TITLES = {CLASSIFICATION: "Classifiers", **dict.fromkeys(LANGUAGE, "Language models")}
# Bytes of attention weights in a page; with more, it would pass 3 MB.
_MOST_WEIGHTS = 2_200_000
# The same of encoder self-attention, which grows with the square of a sentence.
_MOST_SELF_WEIGHTS = 2_000_000


def write_report(settings: ReportSettings, out: Path) -> list[Path]:
    """Write a report of runs and studies into `out`, the page last.

    The page leaves out what a run lacks, and names the command that adds it. Returns the files. Raises UserError for a
    folder that is none of these, and for settings that fit no run.
    """
    if not settings.runs:
        raise UserError("runs: give the folders of runs or studies, for example: tree-attention report --out report RUN_A RUN_B")
    claim_folder(out, REPORT)
    choose_device(settings.use_gpu)
    runs, studies = read_report_inputs(settings.runs, settings.split, settings.baseline, settings.main)
    baseline = choose_baseline(runs, settings.baseline)
    runs.sort(key=lambda run: run is not baseline)  # the first one of all tables and figures
    task = task_of_runs(runs)
    if task in LANGUAGE:
        inside, scored = Inside(), Scored()
    elif task == CLASSIFICATION:
        inside, scored = Inside(), Scored(examples=choose_class_examples(runs, settings))
    else:
        inside = _look_inside(runs, baseline, settings)  # first: it is what finds wrong settings
        scored = _score(runs, baseline, settings)
    differing, shared = settings_of(runs)
    report = Report(
        title=settings.title if "title" in settings.model_fields_set else _TITLES.get(task, settings.title),
        split=settings.split,
        runs=runs,
        studies=studies,
        differing=differing,
        shared=shared,
        warnings=warnings(runs, baseline) if baseline else [],
        ablations=ablations(runs) if task == "translation" else [],
        made=read_making(runs),
        answers=[answer for answer in (scored.answer, *map(answer_study, studies)) if answer],
        inside=inside,
        scored=scored,
    )
    mark_folder(out, REPORT)
    (out / FIGURES).mkdir(exist_ok=True)
    remove_leftovers(out / FIGURES)
    tell("drawing figures")
    figures = _draw(report, out / FIGURES)
    names = sorted([*figures, *(view.figure for view in inside.pictures)])
    files = [out / FIGURES / f"{name}.{end}" for name in names for end in ("png", "svg")]
    _remove_old(out, {path.name for path in files})
    atomic_write(out / NUMBERS, json_bytes({**report_numbers(report), "figures": [path.name for path in files]}))
    atomic_write(out / PAGE, render_page(report, figures).encode())
    return [out / PAGE, out / NUMBERS, *files]


def _score(runs: list[ReportRun], baseline: ReportRun | None, settings: ReportSettings) -> Scored:
    samples, split = settings.bootstrap_samples, settings.split
    tables = score_tables(runs, baseline, samples)
    return Scored(
        tables,
        answer=answer_runs(tables, runs, baseline, split, samples),
        frequencies=[score_frequencies(table, runs) for table in tables],
        lines=collect_lines(tables, runs, split),
    )


def _look_inside(runs: list[ReportRun], baseline: ReportRun | None, settings: ReportSettings) -> Inside:
    """Look into every run whose model and data set are there."""
    there = [run for run in runs if run.finished and (own_index(run) or {}).get("totals", {}).get(settings.split)]
    for run in runs:
        if (index := own_index(run)) and index["totals"] and settings.split not in index["totals"]:
            run.missing.append(Missing(f"its data set has no split {settings.split}, but {', '.join(index['totals'])}"))
    anchor = next((run for run in there if run is baseline), there[0] if there else None)
    if anchor is None:
        return Inside()
    read = {run.name: (run.fingerprints.get("text_fingerprint"), side_of_run(run)) for run in there}
    same_text = [run for run in there if read[run.name] == read[anchor.name]]
    ids = choose_examples(same_text, anchor, settings.split, settings.sentences, settings.lines)
    attention, encoder = {}, {}
    views: dict[int, list[View]] = {number: [] for number in ids}
    for run in there:
        tell(f"attention of {run.name} on {settings.split}")
        try:
            loaded = load_run(run.folder, device=choose_device(settings.use_gpu))
        except UserError as error:
            run.missing.append(Missing(str(error)))
            continue
        if has_self_attention(loaded.model):
            encoder[run.name] = run_encoder_attention(loaded, settings.split)
        if not isinstance(loaded.model.decoder, TransformerDecoder):
            run.missing.append(Missing("it has no Transformer decoder, so it has no attention weights"))
            continue
        attention[run.name] = run_attention(loaded, settings.split, settings.targets)
        if run in same_text:
            for view in build_views(run.name, loaded, settings.split, ids):
                views[view.example_id].append(view)
    return Inside(attention, encoder, *_fit({number: of_line for number, of_line in views.items() if of_line}))


def _fit(views: dict[int, list[View]]) -> tuple[dict[int, list[View]], int, int]:
    """Return the views whose weights have room in the page, and the numbers of lines left out or without self-attention."""
    kept: dict[int, list[View]] = {}
    total = total_of_self = without_encoder = 0
    for number, of_line in views.items():
        total += sum(len(pack(view.weights)) for view in of_line)
        if total > _MOST_WEIGHTS and kept:
            break
        own = [len(pack(view.self_weights)) for view in of_line if view.self_weights is not None]
        total_of_self += sum(own)
        full = total_of_self > _MOST_SELF_WEIGHTS
        without_encoder += full and bool(own)
        kept[number] = [replace(view, self_weights=None) for view in of_line] if full else of_line
    return kept, len(views) - len(kept), without_encoder


def _draw(report: Report, folder: Path) -> dict[str, str]:
    """Write all figures. Return the SVG of those that the page shows, by name."""
    with style():
        figures = {name: save_chart(figure, folder, name) for name, figure in _charts(report)}
        for view in report.inside.pictures:
            save_figure(draw_tree(view, lay_out(view)), folder, view.figure)
    return figures


def _charts(report: Report) -> Iterator[tuple[str, Figure]]:
    colors = run_colors([run.name for run in report.runs])
    for answer in report.answers:
        if not answer.of_study and (chart := draw_answer(answer)):
            yield ANSWER, chart
    if curves := {run.name: run.metrics for run in report.runs if run.metrics}:
        with matplotlib.rc_context({"axes.prop_cycle": cycler(color=[colors[name] for name in curves])}):
            below = ("accuracy", "validation\naccuracy") if report.of_classes else ("tokens_per_s", "target tokens/s")
            yield "learning_curves", draw_curves(curves, "", *below)
    for name, study in (found for form in FORMS for found in report.of_form(form)):
        if study.report:
            yield name, study.form.picture(study.report)
    yield from draw_scores(report.scored.tables, report.scored.frequencies, colors)
    yield from draw_inside(report, colors)
    if report.of_language:
        yield from draw_pairs(report, colors)


def _remove_old(out: Path, kept: set[str]) -> None:
    """Remove figures of an earlier report in the same folder that this one lacks."""
    if (out / NUMBERS).is_file():
        for name in read_json(out / NUMBERS, "remove it and run the same command again").get("figures", []):
            if name not in kept and Path(name).name == name:
                (out / FIGURES / name).unlink(missing_ok=True)
