"""The table of a data-size study, and how its comparisons are read from scaling.json, also those of earlier versions."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from treenet.evaluation.significance import EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS, SeedTest, half_interval
from treenet.experiments.pooled_tests import Table, align, list_pooled
from treenet.experiments.study import notes_about_cells, show_p_values
from treenet.tasks.translation_metrics import COMPARED, MAIN, MAIN_OF_TOKENS, METRIC_TITLES, METRICS

SCALING = "scaling.json"  # in the folder of a study
# Values of a cell, and of a point over its seeds: the lowest nll on valid, the last of training batches, the time of training.
VALID_NLL, TRAIN_NLL, SECONDS = OF_TRAINING = ("valid_nll", "train_nll", "seconds")
NLL_COMPARISON = "valid_nll_comparison"  # of a point
ABOUT_VALID = "training with other seeds, by the lowest nll on these sentences of valid (two-sided t over paired seeds)"
NLL_HEAD = ("pairs", "by nll on valid", "difference", "95 %", "p")
EXPLAIN_BY_SEED = (
    "Values of each seed: the scores, the lowest nll on valid, the last nll of training batches, minutes of training."
)
EXPLAIN_NLL = f"The interval and the p of the nll on valid hold for {ABOUT_VALID}. They are exploratory."
ONE_SIDED = " (one-sided)"  # after a p of an earlier version
_WIDTH, _WIDTHS = 8, {MAIN_OF_TOKENS: 16}  # of columns


def read_test(comparison: Mapping) -> SeedTest:
    """Return the test over seeds of a comparison of scaling.json."""
    return SeedTest(**{field.name: comparison[field.name] for field in fields(SeedTest) if field.name in comparison})


@dataclass(frozen=True)
class WeightsP:
    """The p of the weights of a point, from a paired bootstrap. Earlier versions wrote the one-sided p of sacrebleu."""

    value: float
    one_sided: bool


def read_comparison(point: dict) -> tuple[SeedTest, WeightsP] | None:
    """Return the test over seeds of a point of scaling.json, and the p of its weights; None for a baseline.

    A file of the earliest version has only the paired bootstrap. Its interval is not over seeds, so it is not returned.
    """
    test = point.get("comparison")
    if test is None:
        return None
    if "weights" not in test:
        return SeedTest(test["difference"], test["seeds"], None, None, None, None), WeightsP(test["p_value"], one_sided=True)
    weights = test["weights"]
    earlier = "p_two_sided" not in weights
    return read_test(test), WeightsP(weights["p_value" if earlier else "p_two_sided"], one_sided=earlier)


def metric_of(report: dict) -> str:
    """Return the metric that a study compares. Files of earlier versions do not name it."""
    return report.get("metric", MAIN)


def others_of(metric: str) -> list[str]:
    """Return the metrics that a table has beside the one that a study compares."""
    return [name for name in COMPARED if name not in (MAIN, metric)]


def against_of(report: dict, point: dict) -> str:
    """Return the system that a point or a slope was compared with. In files of earlier versions it is always the baseline."""
    return point["comparison"].get("against", report["baseline"])


def format_table(report: dict) -> str:
    """Return one line per size and model, the slopes, and notes about the numbers. A star marks p < 0.05 over seeds."""
    if not report["points"]:
        return "no cell is done yet"
    metric = metric_of(report)
    others = [name for name in COMPARED if name != metric and all(name in point for point in report["points"])]
    width_of_metric = _WIDTHS.get(metric, _WIDTH)
    width = max(20, *(2 + len(point["model"]) for point in report["points"]))
    head = f"{'pairs':>10} {'share':>6}  {'model':<{width}}{'seeds':>6}{METRIC_TITLES[metric]:>{width_of_metric}}{'± 95 %':>8}"
    head += "".join(f"{METRIC_TITLES[name]:>8}" for name in others)
    lines = [f"{head}  {'difference':>10} {'from':<18}{'95 %':>16}{'p':>8}{'p, Holm':>10}{'p, weights':>12}"]
    for point in report["points"]:
        half = half_interval(point[metric])
        line = f"{point['pairs']:>10,.0f} {point['fraction']:>6.4g}  {point['model']:<{width}}{len(point['seeds']):>6}"
        line += f"{point[metric]['mean']:>{width_of_metric}.2f}{'-' if half is None else f'{half:.2f}':>8}"
        line += "".join(f"{point[name]['mean']:>8.2f}" for name in others)
        if found := read_comparison(point):
            test, of_weights = found
            p_value, holm = show_p_values(test)
            line += f"  {test.difference:>+10.2f} {against_of(report, point):<18}{_show_interval(test):>16}{p_value:>9}{holm:>10}"
            line += f"{of_weights.value:>11.3f}{ONE_SIDED if of_weights.one_sided else ''}"
        lines.append(line)
    lines += describe_slopes(report)
    lines += report.get("explanations", [EXPLAIN_MEANS, EXPLAIN_SEEDS, EXPLAIN_WEIGHTS])
    lines.append(f"{report['num_examples']:,} examples of {report['split']}; {report[f'{metric}_signature']}")
    for head, rows, message in (list_pooled(report), list_by_seed(report), list_nll(report)):
        lines += [*align(head, rows), message] if rows else []
    lines += notes_about_cells(report)
    return "\n".join(lines)


def list_by_seed(report: Mapping) -> Table:
    """Return a table with the values of every seed. Files of earlier versions have fewer columns."""
    metric = metric_of(report)
    columns = {  # the title, the name in the report, a unit, and digits
        METRIC_TITLES[metric]: (metric, 1, 2),
        **{METRIC_TITLES[name]: (name, 1, 1) for name in others_of(metric)},
        "nll a token": ("nll", 1, 3),
        "nll on valid": (VALID_NLL, 1, 3),
        "nll of training": (TRAIN_NLL, 1, 2),
        "minutes": (SECONDS, 60, 0),
    }
    columns = {title: one for title, one in columns.items() if all(one[0] in point for point in report["points"])}
    rows = []
    for point in report["points"]:
        cells = [f"{point['pairs']:,.0f}", point["model"], ", ".join(map(str, point["seeds"]))]
        for name, unit, digits in columns.values():
            cells.append(", ".join(f"{value / unit:.{digits}f}" for value in point[name]["values"]))
        rows.append(tuple(cells))
    return ("pairs", "model", "seeds", *columns), rows, EXPLAIN_BY_SEED


def list_nll(report: Mapping) -> Table:
    """Return a table of the differences in nll on valid; files of earlier versions have none."""
    rows = []
    for point in report["points"]:
        if NLL_COMPARISON in point:
            test = read_test(point[NLL_COMPARISON])
            interval = "[{:+.3f}, {:+.3f}]".format(*test.interval) if test.interval else "-"
            p_value = f"{test.p_value:.3f}" if test.p_value is not None else "-"
            name = f"{point['model']} - {against_of(report, point)}"
            rows.append((f"{point['pairs']:,.0f}", name, f"{test.difference:+.3f}", interval, p_value))
    return NLL_HEAD, rows, EXPLAIN_NLL


def describe_slopes(report: dict) -> list[str]:
    """Return one line about the slope of every model; nothing for files of earlier versions."""
    lines, metric = [], metric_of(report)
    unit = METRICS[MAIN if METRICS[metric].kind == METRICS[MAIN].kind else metric].title
    for slope in report.get("slopes", ()):
        test = read_test(slope["comparison"])
        p_value, holm = (value.strip() for value in show_p_values(test))
        what = f"{slope['model']} - {against_of(report, slope)}, {test.seeds} seeds, {len(slope['fractions'])} sizes"
        values = f"{test.difference:+.2f} {unit} a doubling, 95 % {_show_interval(test)}, p {p_value}, p, Holm {holm}"
        lines.append(f"slope of {what}: {values}")
    return lines


def _show_interval(test: SeedTest) -> str:
    return f"[{test.interval[0]:+.2f}, {test.interval[1]:+.2f}]" if test.interval else "-"
