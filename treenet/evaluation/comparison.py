"""Two systems on the same sentences: paired bootstrap, and the sentences on which they differ most."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
from pydantic import Field, PositiveInt

from treenet.evaluation.bootstrap import Comparison, compare_systems
from treenet.evaluation.significance import ABOUT_WEIGHTS, PAIRED_BOOTSTRAP
from treenet.runs.result_provenance import describe_origin, recorded_origin
from treenet.runs.run_results import System
from treenet.tasks.translation_metrics import METRIC_TITLES, METRICS, sentence_chrf
from treeproc.common.command_names import as_called
from treeproc.common.provenance import software
from treeproc.common.settings import Settings
from treeproc.shards.store import fingerprint_of


class CompareConfig(Settings):
    """Settings of --compare."""

    num: int = Field(10, ge=0, description="number of the largest wins, and of the largest losses, to show")
    samples: PositiveInt = Field(1000, description="samples of the paired bootstrap")


def compare(
    baseline: System,
    system: System,
    sources: Sequence[str] | None,
    references: Sequence[str],
    split: str,
    config: CompareConfig,
    numbers: Sequence[int] | None = None,
    more_references: Sequence[Sequence[str]] = (),
    learned: Mapping[str, Comparison] | None = None,
) -> dict:
    """Return the content of comparison.json: paired bootstrap, and `wins` and `losses` of `system` by chrF of single sentences.

    The bootstrap also takes `more_references`; wins and losses are by `references` alone. `sources` are only shown.
    `learned` has the tests of further metrics.
    `numbers` are the line numbers in the input of the split, from 1; preprocessing may have dropped lines. If unset, the
    sentences are counted. The systems must have been checked against the references.
    """
    numbers = numbers or range(1, len(references) + 1)
    metrics = compare_systems(baseline.lines, system.lines, references, config.samples, more_references) | dict(learned or {})
    chrf = np.stack([sentence_chrf(one.lines, references) for one in (baseline, system)])
    difference = chrf[1] - chrf[0]
    order = np.argsort(difference, kind="stable")

    def show(rows: Sequence[int]) -> list[dict]:
        return [
            {
                "line": numbers[row],
                "baseline_chrf": float(chrf[0, row]),
                "system_chrf": float(chrf[1, row]),
                **({"source": sources[row]} if sources else {}),
                "reference": references[row],
                "baseline": baseline.lines[row],
                "system": system.lines[row],
            }
            for row in rows
        ]

    losses = [row for row in order if difference[row] < 0]
    wins = [row for row in np.argsort(-difference, kind="stable") if difference[row] > 0]
    return {
        "baseline": baseline.name,
        "system": system.name,
        "baseline_origin": _origin(baseline),
        "system_origin": _origin(system),
        "software": software(),
        "references_fingerprint": fingerprint_of(list(references)),
        "split": split,
        "num_examples": len(references),
        **({"num_references": 1 + len(more_references)} if more_references else {}),
        "metrics": {name: asdict(found) | {"difference": found.difference} for name, found in metrics.items()},
        "num_better": len(wins),
        "num_worse": len(losses),
        "wins": show(wins[: config.num]),
        "losses": show(losses[: config.num]),
    }


def _origin(system: System) -> dict:
    """Return the origin of a system's translations, from its entry of scores.json."""
    if system.scores is None:
        return {"weights_sha256": None, "weights": "not known: lines of a file"}
    return recorded_origin(system.scores)


def format_comparison(found: dict) -> str:
    """Return the test as a table, then wins and losses side by side."""
    lines = []
    for title, name in (("A", "baseline"), ("B", "system")):
        lines += [f"{title}  {found[name]}", f"   {describe_origin(found[f'{name}_origin'])}"]
    lines.append("")
    titles = {name: METRICS[name].column if name in METRICS else METRIC_TITLES[name] for name in found["metrics"]}
    width = max(6, *(len(title) + 1 for title in titles.values()))
    lines.append(f"{'':{width}}{'A':>8}{'B':>8}{'B - A':>8}{'p':>8}")
    for name, one in found["metrics"].items():
        lines.append(
            f"{titles[name]:{width}}{one['baseline']:8.2f}{one['system']:8.2f}{one['difference']:+8.2f}{one['p_two_sided']:8.4f}"
        )
    about = f"p ({PAIRED_BOOTSTRAP}) holds only for {ABOUT_WEIGHTS}, not for models trained with other seeds"
    lines.append(as_called(f"{about}; workflows/scaling.py compares over seeds"))
    lines += [one["signature"] for one in found["metrics"].values()]
    equal = found["num_examples"] - found["num_better"] - found["num_worse"]
    lines.append(
        f"{found['num_examples']} lines of {found['split']}, by chrF of the line: B is better on {found['num_better']}, "
        f"worse on {found['num_worse']}, equal on {equal}"
    )
    for title, rows in (("largest wins of B", found["wins"]), ("largest losses of B", found["losses"])):
        if rows:
            lines += ["", title]
        for row in rows:
            change = row["system_chrf"] - row["baseline_chrf"]
            lines.append(f"\nline {row['line']}: chrF {row['baseline_chrf']:.1f} -> {row['system_chrf']:.1f} ({change:+.1f})")
            for label, key in (("source", "source"), ("reference", "reference"), ("A", "baseline"), ("B", "system")):
                if key in row:
                    lines.append(f"  {label:10} {row[key]}")
    return "\n".join(lines)
