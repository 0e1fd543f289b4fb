"""The sentences of our pages that have figures of records. Each `{}` is a figure."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import fmean

import parts
from contrasts import (
    accuracies,
    of_control_page,
    of_other_claims,
    of_probe,
    over_seeds,
    over_seeds_of,
)
from figures import (
    CONTROL_TREES,
    SICK,
    Figures,
    Row,
    chain_of,
    difference,
    falls,
    from_model,
    holm,
    mean,
    other_mean,
    power,
    records,
    seen,
    spread,
    unpaired,
)
from page_template import Sentences
from translation import (
    HALF,
    IWSLT,
    MULTI30K,
    OTHER_CAPTIONS,
    OTHERS,
    QUARTER,
    RELATIVE,
    nll_as_bleu,
    of_alignment_protocol,
    of_block_a,
    of_multi30k_protocol,
    of_translation,
)

_accuracy, _difference = partial(spread, "test.accuracy"), partial(difference, "")
_sick = partial(Row, "sick", baseline="bilstm")
SST5 = SST5_TREE, SST5_PLAIN, SST5_PHRASES, SST5_LSTM = [
    Row("sst5_table", name) for name in ("tree_transformer", "transformer_root", "transformer_phrases", "tree_lstm")
]
PAPER_PLAIN = Row("sst5_paper", "transformer_root")
SST2_PLAIN, SST2_LSTM = (Row("sst2", name) for name in ("transformer_root", "tree_lstm"))
REGULARISED = Row("language_models", "tree_reg", baseline="causal")
OTHER_REGULARISED = Row("language_models", "tree_reg_shuffled", baseline="tree_reg")
ON_ROOT = [Row("agreement_pretrained_again", name, baseline="tree") for name in ("tree_shuffled", "layer")]
ON_MEAN = [Row("agreement_pretrained_mean_again", name, baseline="tree_mean") for name in ("tree_mean_shuffled", "layer")]
PARSED, *OTHER_TREES = (Row("sst5_controls", name, baseline="parsed") for name in CONTROL_TREES)
WHOLE_PLAIN, WHOLE_LSTM = (Row("sst5_whole_words", name) for name in ("transformer_root", "tree_lstm"))
ON_SICK = Row("sick", "tree_transformer", baseline="transformer", only=("tree_transformer", "transformer"))


def of_pretrained() -> Sentences:
    yield "yes, by {} points ({} to {}), if", falls(ON_ROOT[1])
    yield "both read [a mean](#the-same-pooling), it is {} ({} to {})", falls(ON_MEAN[1])
    yield "With a mean, they lose {} ({} to {})", falls(ON_MEAN[0])
    yield "Trees of other sentences lose {} points ({} to {})", falls(ON_ROOT[0])
    means = ("sick_pretrained_mean", "agreement_pretrained_mean")
    ours, theirs = (
        Row(study, name).values("test.pearson") for study, name in ((means[0], "tree_mean"), ("sick_pretrained", "child_sum"))
    )
    yield "`tree_mean` minus `child_sum` is {} ({} to {}) here.", over_seeds_of(ours, theirs)
    child_sum = accuracies("agreement_pretrained", "child_sum").mean(1)
    both = [accuracies(*one).mean(1) for one in (("agreement_pretrained", "tree"), (means[1], "tree_mean"))]
    yield (
        "`tree` minus `child_sum` is {} ({} to {}), and `tree_mean` minus it {} ({} to {}).",
        [figure for one in both for figure in over_seeds_of(one, child_sum)],
    )
    yield from of_parts()


def of_parts() -> Sentences:
    own = [parts.of_system(parts.OWN, part)[0] for part in ("test.1", "test.3")]
    yield "They have {} on test.1, and on test.3 {}, where a guess has 50.", own
    weak = [
        [parts.of_system(name, part)[0] for name in ("shuffled", "right", "attention", "layer")] for part in ("test.1", "test.3")
    ]
    yield "They have {} to {} on test.1, and {} to {} on test.3.", [end(of) for of in weak for end in (min, max)]
    yield (
        "permuted labels lose {} points ({} to {}), but keep {} ({} to {}) of the {} above `shuffled`.",
        [
            *parts.difference("permuted_labels", "test.2"), *parts.difference("shuffled", "test.2", "permuted_labels"),
            parts.own_minus("shuffled", "test.2").difference,
        ],
    )  # fmt: skip
    yield (
        "have {}, {} and {} % on test.2; earlier records have {}, {} and {}.",
        [parts.accuracy(name) for name in ("own", "shuffled", "layer")]
        + [fmean(Row("agreement_pretrained_again", name).values("test.accuracy")) for name in ("tree", "tree_shuffled", "layer")],
    )
    yield "All wall times add up to {} hours beside other work", [parts.hours("parts") + parts.hours(parts.SST5)]
    yield "On test.2, the root has {} points more than the mean ({} to {}).", parts.difference("own_mean", "test.2", parts.OWN)
    yield "`own_mean` is {} ({} to {}) above the linearised", parts.difference("linearized", "test.2", "own_mean")
    yield "on both has {} and {} % of test right", parts.on_two_machines()
    most = [Row(parts.SST5, parts.OWN, baseline=name).test().interval or (0, 0) for name in (*parts.PRIMARIES, "shuffled")]
    yield "tree itself are *no*: at most {}, {} and {} points.", [100 * end for _, end in most]
    both = (("own", "tree"), ("shuffled", "tree_shuffled"), ("layer", "layer"))
    studies = (parts.SST5, "sst5_pretrained")
    means = [[fmean(Row(study, name).values("test.accuracy")) for study, name in zip(studies, one, strict=True)] for one in both]
    yield "differ from [the first table](#results) by up to {} points.", [max(abs(now - before) for now, before in means)]


def of_classification() -> Sentences:
    tree = Row("sst5_paper", "tree_transformer")
    yield (
        "five seeds): {} ± {} on test, the Transformer with sentence labels {} ± {}. The difference is {} [{}, {}].",
        [*_accuracy(tree), *_accuracy(PAPER_PLAIN), *_difference(PAPER_PLAIN)],
    )
    last, last_plain = (row.values("test.last.accuracy") for row in (tree, PAPER_PLAIN))
    yield (
        "With the last checkpoints, it is {} [{}, {}] over seeds alone: the Transformer falls to {}.",
        [*over_seeds_of(last_plain, last), fmean(last_plain)],
    )
    yield (
        "the binary Tree-LSTM is above the BiLSTM: by {} [{}, {}] here, {} [{}, {}] with whole words, and {} [{}, {}] on SST-2",
        chain_of(from_model("bilstm_phrases", row) for row in (SST5_LSTM, WHOLE_LSTM, SST2_LSTM)),
    )
    names = ("tree_transformer", "transformer", "shuffled")
    last, *others = (Row("agreement", name).values("test.last.accuracy") for name in names)
    yield (
        "it has {}: it is {} [{}, {}] above the Transformer, and own trees are {} [{}, {}] above others.",
        [fmean(last), *chain_of(over_seeds_of(last, other) for other in others)],
    )
    last, *others = (accuracies("agreement", name, "test.last").mean(1) for name in names)
    yield (
        "By the mean of both numbers, these are {} [{}, {}] and {} [{}, {}].",
        chain_of(over_seeds_of(last, other) for other in others),
    )
    yield (
        "It is {} below the Transformer with the same settings ([{}, {}], Holm's p {})",
        [*falls(ON_SICK), *most_holm(ON_SICK)],
    )


def of_language_models() -> Sentences:
    found = [*_difference(OTHER_REGULARISED), *seen(OTHER_REGULARISED)]
    yield "The latter minus the former is {} [{}, {}]; the study finds {} with probability", found
    grammars = (Row("language_models", name) for name in ("grammar", "grammar_shuffled"))
    given = [figure for row in grammars for figure in spread("test.perplexity_given_tree", row)]
    yield "its perplexity of pieces is {} ± {}; with trees of other sentences, {} ± {}.", given


def of_claims() -> Sentences:
    yield "3,000 updates: {}, the Transformer {}: {}, {} to {} |", _both_scores(IWSLT)
    yield "it sees +1.1 with probability {}", power(IWSLT)
    yield (
        "| {}, the Transformer {}: {}, {} to {}; by the nll on valid {} to {} | not decided (power {}). The nll excludes +1.1",
        [*_both_scores(MULTI30K), *nll_as_bleu(MULTI30K), *power(MULTI30K)],
    )
    wrong = [*_difference(OTHER_CAPTIONS), *_difference(OTHERS), *seen(OTHER_CAPTIONS), *seen(OTHERS)]
    yield "{} on Multi30k ({} to {}), {} on IWSLT'14 ({} to {}); they see {} and {}.", wrong
    yield (
        "{} over the Transformer ({} to {} without pairs of seeds, exploratory), {} over the Tree Transformer ({} to {}, Holm's "
        "p {}). The latter without pairs, chosen afterwards: {} to {} | they help the Transformer here; against trees not "
        "decided (sees {})",
        [
            *unpaired("bleu_tokenized", RELATIVE), *_difference(RELATIVE), *holm(RELATIVE),
            *unpaired("bleu_tokenized", replace(RELATIVE, baseline="tree_transformer"), ("interval",)), *seen(RELATIVE),
        ],
    )  # fmt: skip
    tree, plain, phrases, lstm = means("test.accuracy", *SST5)
    yield (
        "(+9.8) | {}, {}: {}, {} to {}, Holm's p {}. With the paper's 15,000 updates: {}, {} to {}. Whole words: {}, {} to {}, "
        "Holm's p {} | holds, smaller than the paper's; with whole words not decided (sees {})",
        [tree, plain, *falls_with_holm(SST5_PLAIN), *falls(PAPER_PLAIN), *falls_with_holm(WHOLE_PLAIN), *seen(WHOLE_PLAIN)],
    )
    yield (
        "that learns all phrases, in 7 epochs instead of 28: {} ({}, {} to {}) | not decided: it sees {}. The labels of phrases "
        "alone give the Transformer {} ({} to {}, exploratory)",
        [phrases, *falls(SST5_PHRASES), *seen(SST5_PHRASES), *from_model("transformer_root", SST5_PHRASES)],
    )
    yield (
        "Tree-LSTM {}: {}, {} to {}, Holm's p {}; whole words {}, {} to {}, Holm's p {} | does not hold; whether the Tree-LSTM "
        "is better is not decided (sees {}; {})",
        [lstm, *falls_with_holm(SST5_LSTM), *falls_with_holm(WHOLE_LSTM), *seen(SST5_LSTM), *seen(WHOLE_LSTM)],
    )
    two = "test.binary_accuracy"
    yield "SST-5 models: {}, {}, {}. Trained on", means(two, SST5_TREE, SST5_PLAIN, SST5_LSTM)
    without = Row("sst5_table", "no_hier_emb")
    yield "falls by {}, {} to {} | not decided: it sees {} |", [*falls(without), *seen(without)]
    yield (
        "falls by {}, {} to {}, Holm's p {} | holds, and the loss is larger; with whole words not decided (sees {})",
        [*falls_with_holm(Row("sst5_table", "no_sub_mask")), *seen(Row("sst5_whole_words", "no_sub_mask"))],
    )
    both = Row("sst5_split_words", "tree_lstm_both", baseline="tree_transformer_pieces")
    yield (
        "On SST-2, below, it wins with Holm's p {}; with [classes on pieces and nodes](classification.md#the-place-of-a-"
        "split-words-class), with {} |",
        [*holm(SST2_LSTM), *holm(both)],
    )
    systems = ("tree_transformer", "transformer_root", "tree_lstm")
    trained = means("test.accuracy", *(Row("sst2", system) for system in systems))
    yield "Trained on two classes alone: {}, {}, {} |", trained
    of_two, half = over_seeds([ours - theirs for ours, theirs in zip(*(row.values(two) for row in SST5[:2]), strict=True)])
    yield (
        "against the Transformer: {}, {} to {} over seeds alone. Two classes alone: against the Transformer not decided (Holm's "
        "p {}, sees {})",
        [of_two, of_two - half, of_two + half, *holm(SST2_PLAIN), *seen(SST2_PLAIN)],
    )
    systems = ("tree_transformer", "bilstm", "tree_lstm")
    yield "on SVA with less data {}, BiLSTM {}, Tree-LSTM {};", means("test.accuracy", *(Row("agreement", s) for s in systems))
    yield "By the last checkpoint, the tree helps ([{}](", means("test.last.accuracy", Row("agreement", "tree_transformer"))
    child_sum, binary = _sick("child_sum_tree_lstm"), _sick("tree_lstm")
    correlations = means("test.pearson", child_sum, binary, _sick("bilstm"))
    yield "{}, {}, {} without word vectors", correlations
    found = [*_difference(child_sum), *holm(child_sum), *_difference(binary), *holm(binary), *seen(binary)]
    yield "child-sum ({}, {} to {}, p {}); not decided for binary ({}, {} to {}, p {}; sees {})", found
    correlations = means("test.pearson", _sick("tree_transformer"), _sick("transformer"))
    yield "{}, the Transformer {} ({}, {} to {}, exploratory)", [*correlations, *_difference(ON_SICK)]
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
    yield (
        "our sizes are {} to {} pairs. At a half: {}, {} to {}; at a quarter: {}, {} to {}.",
        [min(sizes), max(sizes), *_difference(HALF), *_difference(QUARTER)],
    )


def _both_scores(row: Row) -> Figures:
    """The scores of a system and of the other one, and their difference."""
    return [*mean("", row), *other_mean("", row), *_difference(row)]


def means(name: str, *rows: Row) -> Figures:
    """The mean of a score over seeds, of each row."""
    return [fmean(row.values(name)) for row in rows]


def falls_with_holm(row: Row) -> Figures:
    """The difference and its interval, the other way round, and Holm's p."""
    return [*falls(row), *holm(row)]


def most_holm(row: Row) -> Figures:
    """A value that Holm's p of a system of SICK is not above: p times the number of comparisons."""
    return [row.test().p_value * (len(SICK) - 1)]


SENTENCES: Mapping[str, Callable[[], Sentences]] = {
    "translation.md": lambda: chain(of_translation(), of_block_a()),
    "protocols/alignment.md": of_alignment_protocol,
    "protocols/multi30k.md": of_multi30k_protocol,
    "control.md": of_control_page,
    "classification.md": of_classification,
    "language_models.md": of_language_models,
    "pretrained.md": lambda: chain(of_pretrained(), of_probe()),
    "results/README.md": lambda: chain(of_claims(), of_other_claims()),
}
