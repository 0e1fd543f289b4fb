"""The report of a search over settings: a table, the importance of each setting, and the best settings of each system as a file.

Importance is that of PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023): how much the distribution of a setting among the best
trials differs from that among all trials. The importances of a system add up to 1.
"""

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from treenet.experiments.study import UNLEARNED
from treenet.extras.tuning.trials import ENDS, Trial, Trials, TuningConfig, best_trial, describe_values
from treenet.runs.metrics_log import write_png
from treenet.tasks.base import build_task
from treenet.tasks.learning import LEARNING, facts_of_nll, say_unlearned, why_unlearned
from treenet.tasks.tables import Column, align
from treeproc.common.files import atomic_write, json_bytes
from treeproc.common.settings import dump_settings
from treeproc.common.storage import AnyPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fewer trials than these have no importance: PED-ANOVA compares the best quarter of them with all.
LEAST_TRIALS = 8
_BEST_SHARE = 0.25


def write_tuning(config: TuningConfig, systems: Mapping[str, Trials], out: AnyPath) -> str:
    """Write tuning.json, importance.png and best-SYSTEM.yaml. Returns the report for a person."""
    report = build_report(config, systems)
    atomic_write(out / "tuning.json", json_bytes(report))
    files = [out / "tuning.json"]
    if any(facts["importance"] for facts in report["systems"].values()):
        write_png(draw(report), out / "importance.png")
        files.append(out / "importance.png")
    else:
        (out / "importance.png").unlink(missing_ok=True)  # of fewer trials
    for name, trials in systems.items():
        if best := best_trial(trials.trials):
            path = out / f"best-{name}.yaml"
            atomic_write(path, dump_settings(trials.config_of(best.values)).encode())
            files.append(path)
    return "\n".join([format_table(report), "", *(f"written: {path}" for path in files)])


def build_report(config: TuningConfig, systems: Mapping[str, Trials]) -> dict:
    """Return the facts of all systems, as tuning.json has them."""
    task = build_task(config)
    return {
        "task": config.task,
        "criterion": task.criterion_name,
        "space": {key: dimension.model_dump(mode="json") for key, dimension in config.tune.space.items()},
        "systems": {name: _facts(config, trials) for name, trials in systems.items()},
    }


def _facts(config: TuningConfig, trials: Trials) -> dict:
    best = best_trial(trials.trials)
    return {
        "wanted": config.tune.trials_of(trials.system),
        **{status: sum(trial.entry.status == status for trial in trials.trials) for status in ENDS},
        "updates": sum(trial.updates for trial in trials.trials),
        "best": best and {"number": best.number, "criterion": best.best, "values": best.values},
        "importance": importance(config, trials),
        **({UNLEARNED: why} if best and (why := _why_unlearned(config, trials, best)) else {}),
    }


def _why_unlearned(config: TuningConfig, trials: Trials, best: Trial) -> str:
    """Return a sign that even the best trial of a system learned nothing; empty if there is none, or no nll of translations."""
    if config.task != "translation" or build_task(config).score:
        return ""
    rows, facts = trials.index["totals"]["valid"]["rows"], facts_of_nll(trials.data, trials.data, "valid")
    return why_unlearned({"nll": best.best, "num_examples": rows, LEARNING: facts})


def importance(config: TuningConfig, trials: Trials) -> dict[str, float]:
    """Return the importance of each setting, by the criterion of all trials with a validation.

    It is empty below LEAST_TRIALS, and where so many trials share the best criteria that all trials are among the best.
    """
    import optuna  # after the search, in the same process; a report of records alone does not need Ray

    from treenet.extras.tuning.ray_trials import distribution

    found = [trial for trial in trials.trials if math.isfinite(trial.best)]
    space = {key: distribution(dimension) for key, dimension in config.tune.space.items()}
    if len(found) < LEAST_TRIALS:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize")
    for trial in found:
        study.add_trial(optuna.trial.create_trial(params=dict(trial.values), distributions=space, value=trial.best))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BEST_SHARE)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    if any(one.category is UserWarning for one in said):  # all settings would be equally important
        return {}
    return {key: round(float(share), 4) for key, share in shares.items()}


def format_table(report: dict) -> str:
    """Return the table for a person."""
    rows = [("system", "done", "stopped", "failed", "updates", report["criterion"], "best settings")]
    for name, facts in report["systems"].items():
        best = facts["best"]
        shown = (f"{best['criterion']:.4f}", describe_values(best["values"])) if best else ("-", "no trial is done")
        rows.append((name, *(f"{facts[key]:,.0f}" for key in (*ENDS, "updates")), *shown))
    columns = zip(*rows, strict=True)
    lines = align([Column(title, cells, "n" * (title not in ("system", "best settings"))) for title, *cells in columns])
    lines += say_unlearned({name: facts[UNLEARNED] for name, facts in report["systems"].items() if UNLEARNED in facts})
    if len({sum(facts[status] for status in ENDS) for facts in report["systems"].values()}) > 1:
        lines.append("warning: the systems had different numbers of trials, so a comparison of their best is not fair")
    for name, facts in report["systems"].items():
        if facts["importance"]:
            shares = ", ".join(f"{key} {share:.0%}" for key, share in facts["importance"].items())
            lines.append(f"importance for {name}: {shares}")
    study, key = ("scaling", "grid.models") if report["task"] == "translation" else ("compare-seeds", "grid.systems")
    lines.append(
        "The validation score of the best of many trials is too optimistic. Compare the systems over seeds, on test, with these "
        f"settings in {key}: tree-attention {study} --config FILE.yaml"
    )
    return "\n".join(lines)


def draw(report: dict) -> "Figure":
    """Draw the importance of each setting, one group of bars for each system."""
    from matplotlib.figure import Figure

    shown = {name: facts["importance"] for name, facts in report["systems"].items() if facts["importance"]}
    keys = list(report["space"])
    figure = Figure(figsize=(7, 1.2 + 0.35 * len(keys) * len(shown)), layout="constrained")
    axes = figure.subplots()
    for number, (name, shares) in enumerate(shown.items()):
        places = [at + (number - (len(shown) - 1) / 2) * 0.8 / len(shown) for at in range(len(keys))]
        axes.barh(places, [shares.get(key, 0.0) for key in keys], height=0.8 / len(shown), label=name)
    axes.set_yticks(range(len(keys)), keys)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"importance for {report['criterion']}")
    axes.legend(loc="lower right", frameon=False)
    return figure
