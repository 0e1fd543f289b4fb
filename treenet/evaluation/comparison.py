"""The comparison of two results, as comparison.json has it: its tests, the sentences that differ most, and a table for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from treenet.evaluation.bootstrap import Comparison, compare_systems
from treenet.evaluation.minimal_pairs import format_groups
from treenet.evaluation.settings import CompareConfig
from treenet.evaluation.significance import ABOUT_WEIGHTS, PAIRED_BOOTSTRAP
from treenet.runs.result_provenance import describe_origin, recorded_origin
from treenet.runs.run_results import System
from treenet.tasks.learning import LEARNING, facts_of_text, find_unlearned, say_overfitted, say_unlearned
from treenet.tasks.scores import SCORES
from treenet.tasks.tables import Score, show_p_value
from treenet.tasks.translation_metrics import INTERNATIONAL, SECOND, sentence_chrf
from treeproc.common.provenance import software
from treeproc.shards.store import fingerprint_of

# The scores of single sentences, by which wins and losses are chosen.
_OF_SENTENCES = {
    SECOND: replace(SCORES[SECOND], digits=1),
    "right": Score(title="correctness", digits=0),
    "error": Score(title="error", digits=3, lower_is_better=True),
    "nll": SCORES["nll"],
}


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
    tokenizer: str | None = None,
) -> dict:
    """Return the content of comparison.json: paired bootstrap, and `wins` and `losses` of `system` by chrF of single sentences.

    The bootstrap also takes `more_references`; wins and losses are by `references` alone. `sources` are only shown.
    `learned` has the tests of further metrics, and `tokenizer` is that of `compare_systems`. `numbers` are as in `describe`; if
    unset, the sentences are counted. The systems must have been checked against the references.
    """
    numbers = numbers or range(1, len(references) + 1)
    metrics = compare_systems(baseline.lines, system.lines, references, config.samples, more_references, tokenizer)
    metrics |= learned or {}
    chrf = np.stack([sentence_chrf(one.lines, references) for one in (baseline, system)])
    columns = {"source": sources or (), "reference": references, "baseline": baseline.lines, "system": system.lines}
    sides = {"baseline": baseline, "system": system}
    entries = {
        side: one.scores or {LEARNING: facts_of_text(one.lines, references, tokenizer or INTERNATIONAL)}
        for side, one in sides.items()
    }
    facts = {
        "references_fingerprint": fingerprint_of(list(references)),
        "unlearned": find_unlearned(entries),
        **({"num_references": 1 + len(more_references)} if more_references else {}),
    }
    return describe(baseline, system, metrics, SECOND, chrf, columns, split, config.num, numbers, facts)


def describe(
    baseline: System,
    system: System,
    metrics: Mapping[str, Comparison],
    by: str,
    values: np.ndarray,
    columns: Mapping[str, Sequence],
    split: str,
    num: int,
    numbers: Sequence[int],
    facts: Mapping,
) -> dict:
    """Return the content of comparison.json. Wins and losses are by `values` [2, sentences] of the score `by`.

    `columns` are shown, those that are not empty. `numbers` are the line numbers in the input of the split, from 1; preprocessing
    may have dropped lines.
    """
    gains = (values[0] - values[1]) if _OF_SENTENCES[by].lower_is_better else (values[1] - values[0])

    def show(rows: Sequence[int]) -> list[dict]:
        return [
            {
                "line": numbers[row],
                f"baseline_{by}": float(values[0, row]),
                f"system_{by}": float(values[1, row]),
                **{name: column[row] for name, column in columns.items() if column},
            }
            for row in rows
        ]

    losses = [row for row in np.argsort(gains, kind="stable") if gains[row] < 0]
    wins = [row for row in np.argsort(-gains, kind="stable") if gains[row] > 0]
    return {
        "baseline": baseline.name,
        "system": system.name,
        "baseline_origin": _origin(baseline),
        "system_origin": _origin(system),
        "software": software(),
        **facts,
        "task": system.task,
        "split": split,
        "num_examples": len(numbers),
        "metrics": {name: asdict(found) | {"difference": found.difference} for name, found in metrics.items()},
        "by": by,
        "num_better": len(wins),
        "num_worse": len(losses),
        "wins": show(wins[:num]),
        "losses": show(losses[:num]),
    }


def _origin(system: System) -> dict:
    """Return the origin of a system's result, from its entry of scores.json."""
    if system.scores is None:
        return {"weights_sha256": None, "weights": "not known: lines of a file"}
    return recorded_origin(system.scores)


def format_comparison(found: dict) -> str:
    """Return the test as a table, then wins and losses side by side."""
    lines = []
    for title, name in (("A", "baseline"), ("B", "system")):
        lines += [f"{title}  {found[name]}", f"   {describe_origin(found[f'{name}_origin'])}"]
    lines.append("")
    unlearned, overfitted = (
        {title: found[key][side] for title, side in (("A", "baseline"), ("B", "system")) if side in found.get(key, {})}
        for key in ("unlearned", "overfitted")
    )
    lines += [*say_unlearned(unlearned), *say_overfitted(overfitted)]
    is_tested = not unlearned
    scores = {name: SCORES[name] for name in found["metrics"]}
    titles = {name: one.column + ", lower is better" * one.lower_is_better for name, one in scores.items()}
    width = max(6, *(len(title) + 1 for title in titles.values()))
    lines.append(f"{'':{width}}{'A':>8}{'B':>8}{'B - A':>8}" + f"{'95 %':>20}{'p':>8}" * is_tested)
    for name, one in found["metrics"].items():
        values = f"{scores[name].show(one['baseline']):>8}{scores[name].show(one['system']):>8}"
        values += f"{scores[name].show(one['difference'], '+'):>8}"
        values += f"{scores[name].show_interval(one['interval']):>20}{show_p_value(one['p_two_sided']):>8}" * is_tested
        lines.append(f"{titles[name]:{width}}{values}")
    if is_tested:
        about = f"interval and p ({PAIRED_BOOTSTRAP}) hold only for {ABOUT_WEIGHTS}, not for models trained with other seeds"
        studies = "scaling" if found["task"] == "translation" else "compare-seeds"
        lines.append(f"{about}; tree-attention {studies} compares over seeds")
        lines += format_groups(found.get("groups", {}))
    lines += [one["signature"] for one in found["metrics"].values()]
    equal, by = found["num_examples"] - found["num_better"] - found["num_worse"], _OF_SENTENCES[found["by"]]
    lines.append(
        f"{found['num_examples']} lines of {found['split']}, by {by.title} of the line: B is better on {found['num_better']}, "
        f"worse on {found['num_worse']}, equal on {equal}"
    )
    for title, rows in (("largest wins of B", found["wins"]), ("largest losses of B", found["losses"])):
        if rows:
            lines += ["", title]
        for row in rows:
            before, after = (row[f"{side}_{found['by']}"] for side in ("baseline", "system"))
            change = f"{by.show(before)} -> {by.show(after)} ({by.show(after - before, '+')})"
            lines.append(f"\nline {row['line']}: {by.title} {change}")
            for label, key in (("source", "source"), ("reference", "reference"), ("A", "baseline"), ("B", "system")):
                if key in row:
                    lines.append(f"  {label:10} {row[key]}")
    return "\n".join(lines)
