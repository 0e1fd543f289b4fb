"""Computes the figures of studies on our pages from their records: `python docs/results/from_records.py` writes them anew.

A page is its own template. In a table, the columns of `TABLES` give the figures of a cell. In a sentence, each `{}` is a figure.
A figure keeps its place and its digits. Everything else on a page stays as it is.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import parts
from contrasts import mean_of_both
from figures import (
    CONTROL_TREES,
    RESULTS,
    SICK,
    SIZES,
    Cell,
    Column,
    Row,
    above_right_trees,
    batches_per_epoch,
    budget,
    by_class,
    control_grid,
    convergence,
    difference,
    each,
    grid,
    holm,
    lowest_nll,
    mean,
    of_control,
    other_mean,
    p_value,
    pairs,
    parameters,
    power,
    rate,
    seen,
    spread,
    turned,
    unpaired,
)
from page_template import Filled, fill_page
from sentences import SENTENCES
from translation import STUDY_M, alignment_table, systems_table

from treenet.experiments.scaling_table import VALID_NLL

_accuracy, _pearson = partial(spread, "test.accuracy"), partial(spread, "test.pearson")
_two, _peak, _difference = partial(spread, "test.binary_accuracy"), partial(spread, "test.peak.accuracy"), partial(difference, "")
_ppl, _word_ppl = partial(spread, "test.perplexity"), partial(spread, "test.word_perplexity")
_p, _nll = partial(p_value, ""), partial(difference, VALID_NLL)
ON_PROBE: tuple[Column, ...] = (partial(spread, "valid.accuracy"), _accuracy, by_class)
CLASSIFIERS = (
    "tree_transformer", "transformer_root", "transformer_phrases", "bilstm_root", "bilstm_phrases", "tree_lstm",
    "child_sum_tree_lstm",
)  # fmt: skip
VARIANTS = ("per_head", "released_rule", "released_rule_per_head", "no_hier_emb", "no_sub_mask", "no_hier_emb_no_sub_mask")
SPLIT_WORDS = [f"{model}_{place}" for model in ("tree_transformer", "tree_lstm") for place in ("pieces", "node", "both")]
ABOVE_ENCODER = ("tree", "tree_shuffled", "layer", "head", "child_sum")
LANGUAGE_MODELS = ("causal", "tree_reg", "tree_reg_shuffled", "grammar", "grammar_shuffled")
AGREEMENT = ("tree_transformer", "transformer", "bilstm", "tree_lstm", "shuffled")
SMALLER = ("sst5_pretrained_two_percent", "sst2_pretrained")
WITH_MEAN = ("tree_mean", "tree_mean_shuffled", "layer", "binary")
CONTROL = (
    "tree_transformer", "other_trees", "transformer", "tree_relative_positions", "linearized_transformer",
    "without_labels", "permuted_labels", "tree2seq", "tree2seq_other_trees", "bilstm", "multi_granularity", "sinusoids",
    "structural_positions", "tree_distance", "tree_traversal", "deprel_head", "child_sum_tree2seq", "relative_positions",
)  # fmt: skip
PARSED_CONTROL = ("tree_transformer", "damaged_15", "damaged_40", "other_trees", "random_trees", "transformer")
NLL_OF_CONTROL, DEPTHS = ("nll", "half"), ("depth to 4", "depth 6 to 8")
_above = partial(Row, "sst5_pretrained_tuning", baseline="tree_r1_d3")
_sick = partial(Row, "sick", baseline="bilstm")
_split_words = partial(Row, "sst5_split_words", baseline="tree_transformer_pieces")


def _against_first(study: str, scores: Sequence[Column], systems: Sequence[str] = ABOVE_ENCODER) -> list[list[Cell]]:
    rows = (Row(study, name, baseline=systems[0]) for name in systems)
    return grid((None, *scores, _difference, seen, holm), *rows)


def _own_minus(study: str, systems: Sequence[str]) -> list[list[Cell]]:
    """Accuracy of own trees and of systems, and how much own trees are above each."""
    own = parts.own_of(systems[0])
    against = (Row(study, own, baseline=name) for name in systems)
    differences = grid((_difference, seen), *against)
    accuracies = grid((None, _accuracy), *(Row(study, name) for name in (own, *systems)))
    return [[*score, *more] for score, more in zip(accuracies, [[None, None], *differences], strict=True)]


def _of_windows(study: str, before: Sequence[Cell] = (None,), more: Sequence[Column] = ()) -> list[list[Cell]]:
    one, eight = (Row(study, name, baseline="one_window") for name in ("one_window", "eight_windows"))
    rows = grid((*before, batches_per_epoch, partial(each, VALID_NLL), partial(mean, ""), *more), one, eight)
    return [*rows, *grid((*before, None, _nll, _difference, *(None for _ in more)), eight)]


def _of_control_groups(rung: str, groups: Sequence[str | int], systems: Sequence[str], names: Sequence[str]) -> list[list[Cell]]:
    return [[None, *(partial(of_control, rung, system, group, names) for group in groups)] for system in systems]


TABLES: Mapping[tuple[str, str], list[list[Cell]]] = {
    ("translation.md", "The first study#0"): turned(
        (pairs, budget, convergence, rate, lowest_nll, partial(other_mean, ""), _difference, _nll, power, seen), *SIZES
    ),
    ("translation.md", "Study M#0"): systems_table(*STUDY_M),
    ("translation.md", "Block A#0"): grid(
        (None, partial(each, "nll"), partial(each, "")),
        *(Row("iwslt14_relative", model) for model in ("relative", "relative_tree", "relative_shuffled")),
    ),
    ("translation.md", "Block A#1"): grid(
        (None, *(partial(unpaired, "nll", names=(name,), level=0.975) for name in ("difference", "interval"))),
        *(Row("iwslt14_relative", "relative_tree", baseline=other) for other in ("relative", "relative_shuffled")),
    ),
    ("translation.md", "Do tree models align late?#0"): alignment_table(),
    ("classification.md", "SST-5: Table 2#0"): grid(
        (None, _accuracy, None, _difference, holm, _two, None),
        *(Row("sst5_table", system) for system in (*CLASSIFIERS, *VARIANTS)),
    ),
    ("classification.md", "Trained on two classes alone (SST-2)#0"): grid(
        (None, _accuracy, None, _difference, holm), *(Row("sst2", system) for system in CLASSIFIERS)
    ),
    ("classification.md", "Words kept whole, and the best checkpoint on test#0"): grid(
        (None, _accuracy, _two, _peak, _difference, holm),
        *(Row("sst5_whole_words", system) for system in (*CLASSIFIERS, *VARIANTS)),
    ),
    ("classification.md", "The place of a split word's class#0"): grid(
        (None, _accuracy, _difference, holm), *map(_split_words, SPLIT_WORDS)
    ),
    ("classification.md", "Relatedness: SICK#0"): grid(
        (
            None, parameters,
            *(partial(spread, name) for name in ("test.pearson", "test.spearman", "test.mse")),
            _difference, holm, None,
        ),
        *map(_sick, SICK),
    ),
    ("classification.md", "Control trees#0"): _against_first("sst5_controls", (_accuracy,), CONTROL_TREES),
    ("classification.md", "Agreement, on small data#0"): [
        [*row, None] for row in _against_first("agreement", ON_PROBE, AGREEMENT)
    ],
    ("language_models.md", "Perplexity#0"): _against_first("language_models", (_ppl, _word_ppl), LANGUAGE_MODELS),
    ("finetuning.md", "Fine-tuning: from Tatoeba to Multi30k#0"): grid(
        (None, *(partial(spread, name) for name in (VALID_NLL, "", "chrf")), _difference, _p),
        *(Row("finetuning", name, 0.1, "scratch", "finetuned") for name in ("scratch", "finetuned")),
    ),
    ("pretrained.md", "Results#0"): _against_first("sst5_pretrained", (_accuracy,)),
    ("pretrained.md", "Results#1"): _against_first("sst5_pretrained_tenth", (_accuracy,)),
    ("pretrained.md", "Results#2"): _against_first("sst5_pretrained_mean", (_accuracy,), WITH_MEAN),
    ("pretrained.md", "Relatedness: SICK#0"): _against_first("sick_pretrained", (_pearson,)),
    ("pretrained.md", "Relatedness: SICK#1"): _against_first("sick_pretrained_mean", (_pearson,), WITH_MEAN),
    ("pretrained.md", "The probe: agreement#0"): _against_first("agreement_pretrained", ON_PROBE),
    ("pretrained.md", "The probe: agreement#1"): _against_first("agreement_pretrained_mean", ON_PROBE, WITH_MEAN),
    ("pretrained.md", "The probe: agreement#2"): _against_first("agreement_pretrained_again", ON_PROBE, ABOVE_ENCODER[:3]),
    ("pretrained.md", "The probe: agreement#3"): _against_first("agreement_pretrained_mean_again", ON_PROBE, WITH_MEAN[:3]),
    ("pretrained.md", "Simple readers of the probe#0"): [
        *([None] * 7 for _ in range(13)),  # of benchmarks/agreement_readers.py
        *grid(
            (None, None, partial(mean, "valid.accuracy"), partial(mean, "test.accuracy"), mean_of_both, None, None),
            *(Row("agreement", system) for system in ("bilstm", "tree_lstm")),
            *(Row("agreement_pretrained_again", system) for system in ("layer", "tree", "tree_shuffled")),
        ),
        *([None] * 7 for _ in range(2)),
    ],
    ("pretrained.md", "Labels, shape or place?#0"): parts.table((*parts.PRIMARIES, *parts.EXPLORATORY)),
    ("pretrained.md", "Labels, shape or place?#1"): [row[:-1] for row in parts.table(parts.MEANS)],
    ("pretrained.md", "Labels, shape or place?#2"): [
        *_own_minus(parts.SST5, (*parts.PRIMARIES, *parts.EXPLORATORY)), *_own_minus(parts.SST5, parts.MEANS)
    ],
    ("pretrained.md", "With a fine-tuned encoder: SST-5#0"): _against_first("sst5_finetuned", (_accuracy,), ABOVE_ENCODER[:4]),
    ("pretrained.md", "With a fine-tuned encoder: SST-5#1"): _against_first(
        "sst5_finetuned_tenth", (_accuracy,), ABOVE_ENCODER[:4]
    ),
    ("pretrained.md", "Fewer labels, and SST-2#0"): [
        [*few_labels[:4], *two_classes[1:4]]
        for few_labels, two_classes in zip(*(_against_first(study, (_accuracy,)) for study in SMALLER), strict=True)
    ],
    ("pretrained.md", "Tuning#0"): [
        [None, *(partial(mean, "valid.accuracy", _above(f"{name}_{settings}")) for name in ("tree", "layer"))]
        for settings in ("r1_d3", "r1_d1", "r03_d3", "r03_d1")
    ],
    ("control.md", "Order decided by a tree alone#0"): control_grid(
        ((), (), NLL_OF_CONTROL, ("exact",)), "a", *((system, "") for system in CONTROL[:3])
    ),
    ("control.md", "Every model that reads a tree#1"): control_grid(
        ((), (), (), NLL_OF_CONTROL, ("exact",)), "a", *((system, "") for system in CONTROL[3:])
    ),
    ("control.md", "Deeper trees than in training#0"): [
        *_of_control_groups("d", DEPTHS, CONTROL[:1], ("bound",)),
        *_of_control_groups("d", DEPTHS, CONTROL[:3], (*NLL_OF_CONTROL, "exact")),
    ],
    ("control.md", "The words show the order too#0"): _of_control_groups(
        "b", (258, 1003, 3996, 16_000), CONTROL[:3], NLL_OF_CONTROL
    ),
    ("control.md", "Worse trees of real sentences#0"): [
        [*row, None if system == PARSED_CONTROL[0] else partial(above_right_trees, system)]
        for system in PARSED_CONTROL
        for row in control_grid(((), (), NLL_OF_CONTROL, ("exact",)), "c", (system, ""))
    ],
    ("windows.md", "The effect of windows on quality#0"): _of_windows("windows", more=(partial(mean, "chrf"),)),
    ("windows.md", "The effect of windows on quality#1"): [
        row for study in ("windows_25", "windows_74") for row in _of_windows(study, (None, None))
    ],
}  # fmt: skip
# Tables of figures and text, which sentences cover. Of each, the columns of published figures.
MIXED: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("results/README.md", "The paper's claims, one by one#0"): (0, 1),
}


def fill(page: str, text: str) -> Filled:
    """Write the figures of all tables and sentences of a page anew."""
    tables = {place: rows for (of, place), rows in TABLES.items() if of == page}
    mixed = [place for of, place in MIXED if of == page]
    return fill_page(page, text, tables, mixed, SENTENCES[page]() if page in SENTENCES else ())


def path_of(page: str) -> Path:
    """Return the file of a page."""
    return RESULTS / page.removeprefix("results/")


def main() -> None:
    problems = list[str]()
    for page in sorted({*SENTENCES, *(page for page, _ in (*TABLES, *MIXED))}):
        before = path_of(page).read_text(encoding="utf-8")
        filled = fill(page, before)
        problems += filled.problems
        if filled.text != before:
            path_of(page).write_text(filled.text, encoding="utf-8")
            print(f"written: {page}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
