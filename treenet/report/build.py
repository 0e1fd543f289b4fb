"""The builder of reports: from run folders to index.html, report.json, figures/*.png and *.svg."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from treenet.analysis.attention_stats import run_attention
from treenet.analysis.encoder_stats import run_encoder_attention
from treenet.analysis.self_attention import has_self_attention
from treenet.experiments.scaling_plot import draw as draw_scaling
from treenet.experiments.seeds_report import draw as draw_seeds
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.probing.probe_results import draw_layers
from treenet.report.answer import answer_runs, answer_study
from treenet.report.answer_section import ANSWER, draw_answer
from treenet.report.bucket_charts import draw_scores
from treenet.report.compare import ablations, choose_baseline, score_tables, settings_of, warnings
from treenet.report.figures import draw_tree, run_colors, save_chart, save_figure, style
from treenet.report.frequencies import score_frequencies
from treenet.report.group_section import draw_attention
from treenet.report.lines import collect_lines
from treenet.report.live import Live
from treenet.report.numbers import report_numbers
from treenet.report.page import render_page
from treenet.report.pictures import pack
from treenet.report.probes import probes_name
from treenet.report.provenance_section import read_making
from treenet.report.report_model import Report
from treenet.report.report_runs import Missing, own_index, read_report_inputs
from treenet.report.report_settings import ReportSettings
from treenet.report.seeds_section import seeds_name
from treenet.report.sentence_views import build_views, choose_examples
from treenet.report.study_section import scaling_name
from treenet.report.tree_layout import lay_out
from treenet.runs.learning_curves import draw_curves
from treenet.runs.loading import load_run
from treenet.runs.precision import choose_device
from treeproc.common.files import atomic_write, json_bytes, read_json, remove_leftovers
from treeproc.common.folder_kinds import REPORT, claim_folder
from treeproc.common.settings import UserError

PAGE, NUMBERS, FIGURES = "index.html", "report.json", "figures"
# Bytes of attention weights in a page; with more, it would pass 3 MB.
_MOST_WEIGHTS = 2_200_000
# The same of encoder self-attention, which grows with the square of a sentence.
_MOST_SELF_WEIGHTS = 2_000_000


def write_report(settings: ReportSettings, out: Path, say: Callable[[str], None], live: Live | None = None) -> list[Path]:
    """Write a report of runs, studies and comparisons into `out`, the page last; `say` gets what is being done.

    The page leaves out what a run lacks, and names the command that adds it. With `live`, the page has the state of the runs and
    their curves alone, which takes seconds. Returns the files. Raises UserError for a folder that is none of these, and
    for settings that fit no run.
    """
    if not settings.runs:
        raise UserError(
            "runs: give the folders of runs or studies, for example: python workflows/report.py --out report RUN_A RUN_B"
        )
    claim_folder(out, REPORT)
    choose_device(settings.use_gpu)
    runs, studies, comparisons = read_report_inputs(settings.runs, settings.split, settings.baseline, settings.main)
    baseline = choose_baseline(runs, settings.baseline)
    runs.sort(key=lambda run: run is not baseline)  # the first one of all tables and figures
    differing, shared = settings_of(runs)
    report = Report(
        title=settings.title,
        split=settings.split,
        runs=runs,
        studies=studies,
        comparisons=comparisons,
        baseline=baseline,
        differing=differing,
        shared=shared,
        warnings=warnings(runs, baseline) if baseline else [],
        tables=[],
        ablations=ablations(runs),
        attention={},
        encoder={},
        views={},
        made=read_making(runs),
    )
    report.answers = [answer for answer in map(answer_study, studies) if answer]
    if live is None:
        _look_inside(report, settings, say)  # first: it is what finds wrong settings
        _score(report, settings, say)
    else:
        for run in runs:
            run.missing.clear()  # the whole report says what is missing

    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / NUMBERS).exists():  # it says whose folder this is, also if the command is killed
            atomic_write(out / NUMBERS, json_bytes({"figures": []}))
        (out / FIGURES).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out / FIGURES}: {error.strerror}; choose another --out") from None
    remove_leftovers(out / FIGURES)
    say("drawing figures")
    _draw(report, out / FIGURES)
    names = sorted([*report.figures, *(view.figure for views in report.views.values() for view in views)])
    files = [out / FIGURES / f"{name}.{end}" for name in names for end in ("png", "svg")]
    _remove_old(out, {path.name for path in files})
    atomic_write(out / NUMBERS, json_bytes({**report_numbers(report), "figures": [path.name for path in files]}))
    atomic_write(out / PAGE, render_page(report, live).encode())
    return [out / PAGE, out / NUMBERS, *files]


def _score(report: Report, settings: ReportSettings, say: Callable[[str], None]) -> None:
    """Scores with their tests, the answer, words by frequency, and all sentences."""
    runs, samples = report.runs, settings.bootstrap_samples
    report.tables = score_tables(runs, report.baseline, samples, say)
    if answer := answer_runs(report.tables, runs, report.baseline, settings.split, samples, say):
        report.answers.insert(0, answer)
    report.frequencies = [score_frequencies(table, runs, say) for table in report.tables]
    report.lines = collect_lines(report.tables, runs, settings.split, say)
    _fit(report)


def _look_inside(report: Report, settings: ReportSettings, say: Callable[[str], None]) -> None:
    """Attention statistics and sentences of every run whose model and data set are there."""
    there = [run for run in report.runs if run.finished and (own_index(run) or {}).get("totals", {}).get(settings.split)]
    for run in report.runs:
        if (index := own_index(run)) is None:
            run.missing.append(Missing("its data set is missing, so the page has no attention weights and no tests of it"))
        elif settings.split not in index["totals"]:
            run.missing.append(Missing(f"its data set has no split {settings.split}, but {', '.join(index['totals'])}"))
    anchor = next((run for run in there if run is report.baseline), there[0] if there else None)
    if anchor is None:
        return
    same_text = [run for run in there if run.fingerprints.get("text_fingerprint") == anchor.fingerprints.get("text_fingerprint")]
    ids = choose_examples(same_text, anchor, settings.split, settings.sentences, settings.lines)
    report.views = {number: [] for number in ids}
    for run in there:
        say(f"attention of {run.name} on {settings.split}")
        try:
            loaded = load_run(run.folder, device=choose_device(settings.use_gpu))
        except UserError as error:
            run.missing.append(Missing(str(error)))
            continue
        if has_self_attention(loaded.model):
            report.encoder[run.name] = run_encoder_attention(loaded, settings.split)
        if not isinstance(loaded.model.decoder, TransformerDecoder):
            run.missing.append(Missing("it has no Transformer decoder, so it has no attention weights"))
            continue
        report.attention[run.name] = run_attention(loaded, settings.split, settings.targets)
        if run in same_text:
            for view in build_views(run.name, loaded, settings.split, ids):
                report.views[view.example_id].append(view)
    report.views = {number: views for number, views in report.views.items() if views}


def _fit(report: Report) -> None:
    """Leave out the last sentences where their weights would make the page too large."""
    total = 0
    for count, views in enumerate(report.views.values()):
        total += sum(len(pack(view.weights)) for view in views)
        if total > _MOST_WEIGHTS and count:
            report.left_out = len(report.views) - count
            report.views = dict(list(report.views.items())[:count])
            break
    total = 0
    for number, views in report.views.items():
        total += sum(len(pack(view.self_weights)) for view in views if view.self_weights is not None)
        if total > _MOST_SELF_WEIGHTS:
            report.views[number] = [replace(view, self_weights=None) for view in views]
            report.without_encoder += any(view.self_weights is not None for view in views)


def _draw(report: Report, folder: Path) -> None:
    def draw(name: str, figure: Figure) -> None:
        report.figures[name] = save_chart(figure, folder, name)

    colors = run_colors([run.name for run in report.runs])
    with style():
        for answer in report.answers:
            if not answer.of_study and (chart := draw_answer(answer)):
                draw(ANSWER, chart)
        if curves := {run.name: run.metrics for run in report.runs if run.metrics}:
            with matplotlib.rc_context({"axes.prop_cycle": matplotlib.cycler(color=[colors[name] for name in curves])}):
                draw("learning_curves", draw_curves(curves, "", "tokens_per_s", "target tokens/s"))
        for index, study in enumerate(report.studies):
            if study.report:
                draw(scaling_name(index), draw_scaling(study.report))
        for index, study in enumerate(report.comparisons):
            if study.report:
                draw(seeds_name(index), draw_seeds(study.report))
        for name, figure in draw_scores(report.tables, report.frequencies, colors):
            draw(name, figure)
        for name, figure in draw_attention(report, colors):
            draw(name, figure)
        for index, run in enumerate(report.runs):
            if run.probes and (figure := draw_layers(run.probes)):
                draw(probes_name(index), figure)
        for views in report.views.values():
            for view in views:
                save_figure(draw_tree(view, lay_out(view)), folder, view.figure)


def _remove_old(out: Path, kept: set[str]) -> None:
    """Figures of an earlier report in the same folder that this one lacks."""
    if (out / NUMBERS).is_file():
        for name in read_json(out / NUMBERS, "remove it and run the same command again").get("figures", []):
            if name not in kept and Path(name).name == name:
                (out / FIGURES / name).unlink(missing_ok=True)
