"""Computes the figures of studies on our pages from their records: `python docs/results/from_records.py` writes them anew.

A page is its own template. In a table, the columns of `TABLES` give the figures of a cell. In a sentence, each `{}` is a figure.
A figure keeps its place and its digits. Everything else on a page stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

import parts
from contrasts import mean_of_both, of_block_a, of_control_page, of_other_claims, of_probe
from figures import (
    RESULTS,
    Cell,
    Column,
    Figures,
    Row,
    above_right_trees,
    against,
    as_published,
    batches_per_epoch,
    budget,
    by_class,
    control_grid,
    convergence,
    correlation,
    difference,
    each,
    falls,
    from_model,
    grid,
    holm,
    last_valid,
    lowest_nll,
    mean,
    of_control,
    on_valid,
    other_mean,
    p_value,
    pairs,
    parameters,
    power,
    rate,
    records,
    seen,
    spread,
    test_p_values,
    turned,
    unpaired,
)
from page_template import Filled, Sentences, fill_page

from treenet.experiments.scaling_table import TRAIN_NLL, VALID_NLL, read_test

TUNING = ("drop20_smooth10", "drop30_smooth10", "drop40_smooth10", "drop30_smooth30", "drop30_smooth10_rate1")
_tree = partial(Row, system="tree_transformer")
SIZES = (_tree("iwslt14"), _tree("iwslt14", share=0.5), _tree("iwslt14", share=0.25), _tree("multi30k"))
BY_SEED: tuple[Column, ...] = tuple(partial(each, name) for name in ("", VALID_NLL, TRAIN_NLL))
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
SICK = (
    "bilstm", "bilstm_2_layers", "lstm", "lstm_2_layers", "child_sum_tree_lstm", "tree_lstm", "transformer", "tree_transformer",
)  # fmt: skip
SPLIT_WORDS = [f"{model}_{place}" for model in ("tree_transformer", "tree_lstm") for place in ("pieces", "node", "both")]
ABOVE_ENCODER = ("tree", "tree_shuffled", "layer", "head", "child_sum")
CONTROL_TREES = ("parsed", "balanced", "left", "right", "random", "transformer")
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


def _of_windows(study: str, before: Sequence[Cell] = (None,), more: Sequence[Column] = ()) -> list[list[Cell]]:
    one, eight = (Row(study, name, baseline="one_window") for name in ("one_window", "eight_windows"))
    rows = grid((*before, batches_per_epoch, partial(each, VALID_NLL), partial(mean, ""), *more), one, eight)
    return [*rows, *grid((*before, None, _nll, _difference, *(None for _ in more)), eight)]


def _of_control_groups(rung: str, groups: Sequence[str | int], systems: Sequence[str], names: Sequence[str]) -> list[list[Cell]]:
    return [[None, *(partial(of_control, rung, system, group, names) for group in groups)] for system in systems]


TABLES: Mapping[tuple[str, str], list[list[Cell]]] = {
    ("translation.md", "Does the tree pay in translation?#0"): turned(
        (pairs, budget, convergence, rate, lowest_nll, as_published, power, seen), *SIZES
    ),
    ("translation.md", "What the records show#0"): grid(
        (None, partial(mean, ""), partial(other_mean, ""), _difference, _p, _nll, partial(p_value, VALID_NLL)), *SIZES
    ),
    ("translation.md", "What the records show#1"): grid(
        (None, None, partial(mean, ""), _difference, test_p_values, partial(from_model, "transformer")),
        Row("iwslt14", "shuffled"),
        Row("iwslt14", "relative_positions"),
        Row("multi30k", "shuffled"),
    ),
    ("translation.md", "The second study#1"): [
        *grid((None, partial(mean, "nll"), partial(mean, "")), *(Row("iwslt14_relative_tuning_gpu", cell) for cell in TUNING)),
        *grid((None, partial(mean, "nll"), partial(mean, "")), Row("iwslt14_relative_tuning", "drop30_smooth10")),
    ],
    ("translation.md", "The second study#2"): grid(
        (None, partial(mean, TRAIN_NLL), last_valid, partial(mean, "nll"), partial(mean, "")),
        *(Row("iwslt14_relative_gate", model) for model in ("updates3000", "updates4500")),
    ),
    ("translation.md", "Block A#0"): grid(
        (None, partial(each, "nll"), partial(each, "")),
        *(Row("iwslt14_relative", model) for model in ("relative", "relative_tree", "relative_shuffled")),
    ),
    ("translation.md", "Block A#1"): grid(
        (None, *(partial(unpaired, "nll", names=(name,), level=0.975) for name in ("difference", "interval"))),
        *(Row("iwslt14_relative", "relative_tree", baseline=other) for other in ("relative", "relative_shuffled")),
    ),
    ("translation.md", "IWSLT'14#0"): grid(
        (None, pairs, *BY_SEED),
        *(Row("iwslt14", model) for model in ("transformer", "tree_transformer", "shuffled", "relative_positions")),
        *(Row("iwslt14", model, share) for share in (0.5, 0.25) for model in ("transformer", "tree_transformer")),
    ),
    ("translation.md", "Multi30k#0"): grid(
        (None, *BY_SEED), *(Row("multi30k", model) for model in ("transformer", "tree_transformer", "shuffled"))
    ),
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
    ("pretrained.md", "Labels, shape or place?#0"): parts.table(parts.PRIMARIES),
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
    ("translation.md", "Protocol#0"): (0,),
}


# The sentences of each page.
IWSLT, HALF, QUARTER, MULTI30K = SIZES
RELATIVE, OTHERS, OTHER_CAPTIONS = Row("iwslt14", "relative_positions"), Row("iwslt14", "shuffled"), Row("multi30k", "shuffled")
SST5 = SST5_TREE, SST5_PLAIN, SST5_PHRASES, SST5_LSTM = [
    Row("sst5_table", name) for name in ("tree_transformer", "transformer_root", "transformer_phrases", "tree_lstm")
]
SST2_PLAIN, SST2_LSTM = (Row("sst2", name) for name in ("transformer_root", "tree_lstm"))
REGULARISED = Row("language_models", "tree_reg", baseline="causal")
OTHER_REGULARISED = Row("language_models", "tree_reg_shuffled", baseline="tree_reg")
ON_ROOT = [Row("agreement_pretrained_again", name, baseline="tree") for name in ("tree_shuffled", "layer")]
ON_MEAN = [Row("agreement_pretrained_mean_again", name, baseline="tree_mean") for name in ("tree_mean_shuffled", "layer")]
PARSED, *OTHER_TREES = (Row("sst5_controls", name, baseline="parsed") for name in CONTROL_TREES)
WHOLE_PLAIN, WHOLE_LSTM = (Row("sst5_whole_words", name) for name in ("transformer_root", "tree_lstm"))
ON_SICK = Row("sick", "tree_transformer", baseline="transformer", only=("tree_transformer", "transformer"))
BLEU_A_NAT = 16.9  # of Multi30k, from the four points of multi30k.md, which have no record


def of_pretrained() -> Sentences:
    yield "yes, by {} points ({} to {}), if", falls(ON_ROOT[1])
    yield "both read [a mean](#the-same-pooling), it is {} ({} to {})", falls(ON_MEAN[1])
    yield "With a mean, they lose {} ({} to {})", falls(ON_MEAN[0])
    yield "Trees of other sentences lose {} points ({} to {})", falls(ON_ROOT[0])


def of_translation() -> Sentences:
    yield "the interval of the nll is {} to {} BLEU", nll_as_bleu(MULTI30K)
    plain = against(RELATIVE, "transformer")
    yield "by {} BLEU, and by {} nats on valid ({} to {})", [plain.test().difference, *falls(plain, VALID_NLL)]
    correlations = [correlation(row.values(), row.other.values()) for row in SIZES]
    yield "correlates by {}, {} and {} over the seeds (100, 50 and 25 %), and {} on Multi30k", correlations
    yield "At full size, its interval is {} to {} (chosen afterwards", unpaired("bleu_tokenized", IWSLT, ("interval",))
    models = ("transformer", "tree_transformer", "shuffled")
    found = [one for model in models for one in Row("iwslt14", model).records]
    nll = [dict(zip(one["curve"]["valid"]["step"], one["curve"]["valid"]["nll"], strict=True)) for one in found]
    bleu = [one["scores"]["test"]["bleu_tokenized"] for one in found]
    of_nll = [correlation(bleu, [curve[step] for curve in nll]) for step in (3000, 1200)]
    yield "The correlation is {} at the end, and {} after 1,200 of 3,000 updates", of_nll
    deviations = [stdev(Row("iwslt14", model).values()) for model in models]
    yield "deviation of {} over seeds, instead of {} to {}", [stdev(RELATIVE.values()), min(deviations), max(deviations)]
    yield "Ours has {} BLEU in that direction", mean("", Row("iwslt14_de_en", "transformer"))
    slope = read_test(IWSLT.report["slopes"][0]["comparison"])
    yield "| not decided | power {} |", power(IWSLT)
    yield (
        "| {}, {} to {} (p {}, Holm {}): no | none: two of its three sizes compare models as in points 1 and 2 |",
        [slope.difference, *(slope.interval or ()), slope.p_value, slope.holm_p_value],
    )
    elsewhere = Row("iwslt14_other_processor", "transformer", 0.5).values()
    yield "One cell ran on both: {} and {} BLEU", [HALF.other.values()[0], *elsewhere]
    counts = [row.records[0]["facts"]["parameters"] for row in (IWSLT.other, IWSLT, RELATIVE)]
    yield "{} (Transformer), {} (with trees), {} (relative positions)", counts
    batches = [on_valid("iwslt14_batches", f"b{size}") for size in (1024, 2048, 4096)]
    yield "1,024 tokens: {}; 2,048: {}; **4,096**: {}.", batches
    pieces = [on_valid(f"iwslt14_pieces_{count}", "plain_4_drop20") for count in (4000, 10000)]
    yield "4,000: {}; **10,000**: {}.", pieces
    tried = [on_valid("iwslt14_tuning", f"{name}_2_drop{dropout}") for dropout in (20, 30) for name in ("plain", "tree")]
    yield "**0.002, 0.2**: {} and {}; 0.002, 0.3: {} and {}; 0.003", tried
    small = [on_valid("multi30k_small_budget", model) for model in ("transformer", "tree_transformer")]
    yield "Transformer: {}; Tree Transformer: {}. Given up", small


def of_classification() -> Sentences:
    tree, plain = (Row("sst5_paper", name) for name in ("tree_transformer", "transformer_root"))
    yield (
        "five seeds): {} ± {} on test, the Transformer with sentence labels {} ± {}. The difference is {} [{}, {}].",
        [*_accuracy(tree), *_accuracy(plain), *_difference(plain)],
    )
    test = ON_SICK.test()
    yield "It is {} below the Transformer with the same settings ([{}, {}], Holm's p {})", [
        -test.difference, *(test.interval or ()), *most_holm(ON_SICK),
    ]  # fmt: skip


def of_language_models() -> Sentences:
    found = [*_difference(OTHER_REGULARISED), *seen(OTHER_REGULARISED)]
    yield "The latter minus the former is {} [{}, {}]; the study finds {} with probability", found
    grammars = (Row("language_models", name) for name in LANGUAGE_MODELS[3:])
    given = [figure for row in grammars for figure in spread("test.perplexity_given_tree", row)]
    yield "its perplexity of pieces is {} ± {}; with trees of other sentences, {} ± {}.", given


def of_claims() -> Sentences:
    yield "3,000 updates: {}, the Transformer {}: {}, {} to {} |", _both_scores(IWSLT)
    yield "it sees +1.1 with probability {}", power(IWSLT)
    yield (
        "| {}, the Transformer {}: {}, {} to {}; by the nll on valid {} to {} | not decided (power {}). The nll excludes +1.1",
        [*_both_scores(MULTI30K), *nll_as_bleu(MULTI30K), *power(MULTI30K)],
    )
    wrong = [*_difference(OTHER_CAPTIONS), *_difference(OTHERS)]
    yield "{} on Multi30k ({} to {}), {} on IWSLT'14 ({} to {})", wrong
    yield (
        "{} over the Transformer ({} to {}, exploratory), {} over the Tree Transformer ({} to {}, Holm's p {})",
        [*from_model("transformer", RELATIVE), *_difference(RELATIVE), *holm(RELATIVE)],
    )
    tree, plain, phrases, lstm = means("test.accuracy", *SST5)
    yield (
        "(+9.8) | {}, {}: {}, {} to {}, Holm's p {}. Whole words: {}, {} to {}, Holm's p {}",
        [tree, plain, *falls_with_holm(SST5_PLAIN), *falls_with_holm(WHOLE_PLAIN)],
    )
    yield "that learns all phrases: {} ({}, {} to {})", [phrases, *falls(SST5_PHRASES)]
    yield (
        "Tree-LSTM {}: {}, {} to {}, Holm's p {}; whole words {}, {} to {}, Holm's p {} |",
        [lstm, *falls_with_holm(SST5_LSTM), *falls_with_holm(WHOLE_LSTM)],
    )
    yield "SST-5 models: {}, {}, {}. Trained on", means("test.binary_accuracy", SST5_TREE, SST5_PLAIN, SST5_LSTM)
    yield "falls by {}, {} to {} | not decided", falls(Row("sst5_table", "no_hier_emb"))
    yield "falls by {}, {} to {}, Holm's p {} | holds, and the loss is larger", falls_with_holm(Row("sst5_table", "no_sub_mask"))
    yield "On SST-2, below, it wins with Holm's p {}", holm(SST2_LSTM)
    systems = ("tree_transformer", "transformer_root", "tree_lstm")
    trained = means("test.accuracy", *(Row("sst2", system) for system in systems))
    yield "Trained on two classes alone: {}, {}, {} |", trained
    yield "Two classes alone: against the Transformer not decided (Holm's p {})", holm(SST2_PLAIN)
    systems = ("tree_transformer", "bilstm", "tree_lstm")
    yield "on SVA with less data {}, BiLSTM {}, Tree-LSTM {};", means("test.accuracy", *(Row("agreement", s) for s in systems))
    child_sum, binary = _sick("child_sum_tree_lstm"), _sick("tree_lstm")
    correlations = means("test.pearson", child_sum, binary, _sick("bilstm"))
    yield "{}, {}, {} without word vectors", correlations
    found = [child_sum.test().difference, *holm(child_sum), *holm(binary)]
    yield "child-sum ({}, p {}); not decided for binary (p {})", found
    correlations = means("test.pearson", _sick("tree_transformer"), _sick("transformer"))
    yield "{}, the Transformer {} (p {})", [*correlations, *most_holm(ON_SICK)]
    yield (
        "{} with the parse. Minus that: {} ({} to {}) balanced, {} ({} to {}) left-branching, {} ({} to {}) right-branching, {} "
        "({} to {}) random, {} ({} to {}) without trees",
        [*means("test.accuracy", PARSED), *chain.from_iterable(map(_difference, OTHER_TREES))],
    )
    seen_by_trees = [seen(row)[0] for row in OTHER_TREES[:-1]]
    yield "the study sees {} to {} points between trees", [min(seen_by_trees), max(seen_by_trees)]
    yield (
        "nll of a piece: {} ({} to {}); with trees of other sentences instead of the parse {} ({} to {}) from there",
        [*_difference(REGULARISED), *_difference(OTHER_REGULARISED)],
    )
    sizes = [one["facts"]["examples"] for one in records("iwslt14")]
    yield "our sizes are {} to {} pairs. At a half: {}, {} to {} |", [min(sizes), max(sizes), *_difference(HALF)]


SENTENCES: Mapping[str, Callable[[], Sentences]] = {
    "translation.md": lambda: chain(of_translation(), of_block_a()),
    "control.md": of_control_page,
    "classification.md": of_classification,
    "language_models.md": of_language_models,
    "pretrained.md": lambda: chain(of_pretrained(), of_probe()),
    "results/README.md": lambda: chain(of_claims(), of_other_claims()),
}


def _both_scores(row: Row) -> Figures:
    """The scores of a system and of the other one, and their difference."""
    return [*mean("", row), *other_mean("", row), *_difference(row)]


def means(name: str, *rows: Row) -> Figures:
    """The mean of a score over seeds, of each row."""
    return [fmean(row.values(name)) for row in rows]


def falls_with_holm(row: Row) -> Figures:
    """The difference and its interval, the other way round, and Holm's p."""
    return [*falls(row), *holm(row)]


def nll_as_bleu(row: Row) -> Figures:
    """The interval of the difference in nll, in BLEU."""
    _, low, high = _nll(row)
    return [-BLEU_A_NAT * high, -BLEU_A_NAT * low]


def most_holm(row: Row) -> Figures:
    """A value that Holm's p of a system of SICK is not above: p times the number of comparisons."""
    return [row.test().p_value * (len(SICK) - 1)]


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
