"""Unsupervised parsing: trees from a model with constituent attention (Wang et al., 2019), scored against those of a data set.

A bracket is a half-open span of words. Unlabelled F1 follows the evaluation of PRPN and ON-LSTM (Shen et al., 2018, 2019).
Punctuation is first removed from both trees. Spans of one word, the whole sentence and repeated spans do not count.

Precision, recall and F1 are per sentence. The score is the mean of F1 over sentences. A sentence without gold brackets has the
recall 1; its precision is 1 if no bracket was predicted, else 0. The F1 over all brackets of all sentences is a second figure.

Shapes: E encoder layers, L leaves, W words.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from treenet.data.batch import WINDOW, TreeBatch, count_leaves, in_order
from treenet.data.splits import read_split
from treenet.evaluation.settings import ParseSettings, ParsingConfig
from treenet.layers.backend import choose_device, scoring
from treenet.models.encoders.latent import ConstituentEncoder
from treenet.runs.loading import load_decoder, load_model
from treenet.runs.result_entries import SCORES, add_entry, name_result, read_scores
from treenet.runs.result_provenance import PARSE, origin
from treenet.tasks.base import PARSER_TREES
from treenet.tasks.scores import score_columns
from treenet.tasks.tables import Column, align
from treeproc.common.files import atomic_write
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.online.line_encoder import read_treebank
from treeproc.shards.schema import UNKNOWN_LABEL
from treeproc.shards.shard import check_hashes, read_names
from treeproc.shards.store import read_index
from treeproc.trees.flat_trees import BINARY_PREFIX
from treeproc.trees.spans import escape, normalise, read_brackets

Bracket = tuple[int, int]

SIGNATURE = (
    "unlabelled; sent. F1: mean over sentences, the others: of all brackets; without punctuation, trivial and repeated spans"
)
# The position at which a span of two words or more is split.
CUTS: dict[str, Callable[[int, int, np.random.Generator], int]] = {
    "left": lambda start, end, random: end - 1,
    "right": lambda start, end, random: start + 1,
    "balanced": lambda start, end, random: (start + end) // 2,
    "random": lambda start, end, random: int(random.integers(start + 1, end)),
}


def binary_tree(num_words: int, kind: str, random: np.random.Generator) -> list[Bracket]:
    """Return the spans of a tree cut by one of CUTS, single words too; left is left-branching."""
    spans, uncut = [], [(0, num_words)]
    while uncut:
        start, end = uncut.pop()
        spans.append((start, end))
        if end - start > 1:
            middle = CUTS[kind](start, end, random)
            uncut += [(start, middle), (middle, end)]
    return spans


def over_kept_words(spans: Iterable[Bracket], kept: Sequence[bool]) -> list[Bracket]:
    """Convert spans [start, end) of words to spans of the kept words; some may be empty."""
    before = [0, *accumulate(map(int, kept))]
    return [(before[start], before[end]) for start, end in spans]


def counted(spans: Iterable[Bracket], num_words: int) -> set[Bracket]:
    """Return the brackets of a sentence that count, each once. Spans of one word or less and the whole sentence do not count."""
    return {(start, end) for start, end in spans if 1 < end - start < num_words}


def score_brackets(gold: Sequence[Collection[Bracket]], predicted: Sequence[Collection[Bracket]]) -> dict[str, float]:
    """Return `sentence_f1`, the mean over sentences, and `precision`, `recall` and `f1` over all brackets, as fractions."""
    sentences = []
    total: Counter[str] = Counter()
    for wanted, found in zip(gold, predicted, strict=True):
        matched = len(set(wanted) & set(found))
        total.update(gold=len(wanted), predicted=len(found), matched=matched)
        precision = matched / len(found) if found else float(not wanted)
        recall = matched / len(wanted) if wanted else 1.0
        sentences.append(2 * precision * recall / (precision + recall) if matched or not (wanted or found) else 0.0)
    both = total["gold"] + total["predicted"]
    return {
        "sentence_f1": sum(sentences) / len(sentences) if sentences else 0.0,
        "precision": total["matched"] / total["predicted"] if total["predicted"] else 0.0,
        "recall": total["matched"] / total["gold"] if total["gold"] else 0.0,
        "f1": 2 * total["matched"] / both if both else 0.0,
    }


def recall_by_label(
    labelled: Sequence[Mapping[Bracket, Collection[str]]], predicted: Sequence[Collection[Bracket]]
) -> dict[str, dict[str, float]]:
    """Return `count` and `recall` of the gold brackets of each label, frequent labels first.

    A span with several labels counts for each.
    """
    count: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    for wanted, found in zip(labelled, predicted, strict=True):
        for span, labels in wanted.items():
            count.update(labels)
            if span in found:
                matched.update(labels)
    return {label: {"count": n, "recall": matched[label] / n} for label, n in sorted(count.items(), key=lambda x: (-x[1], x[0]))}


_BATCH_TOKENS = 8192
_SHOWN_LABELS, _SHOWN_TAGS = 6, 20
_NO_TARGETS = np.zeros(0, dtype=np.int32)  # for data sets without a target side


class GoldTree(NamedTuple):
    """A sentence and its tree, with words, tags and labels as they are written."""

    words: list[str]
    tags: list[str]
    spans: list[tuple[Bracket, str]]  # with labels


class ParsedSentence(NamedTuple):
    """An example over its words, and the output of the model for it."""

    example_id: int
    gold: GoldTree
    parse: list[Bracket]


def check_layers(layers: int, config: ParsingConfig) -> int:
    """Return the layer, out of so many, that cuts whole sentences. Raises UserError for layers that do not exist."""
    first = layers - 1 if config.start_layer is None else config.start_layer
    if not config.min_layer <= first < layers:
        raise UserError(
            f"parsing must go down from start_layer to min_layer, with layers from 0 to {layers - 1}, but start_layer is {first} "
            f"and min_layer {config.min_layer}; set parsing.start_layer and parsing.min_layer"
        )
    return first


def parse_links(link_probs: np.ndarray, config: ParsingConfig) -> list[Bracket]:
    """Return the spans of two words or more of the tree over W words, from the link probabilities [E, W - 1].

    It works top-down: it cuts a span at the weakest link in the span's layer. If that link is stronger than `split_threshold`,
    the layer below decides; in `min_layer` the span stays flat. A part begins in the layer of its span, or in the layer below if
    all its links are stronger than `descend_threshold`. Raises UserError for layers that do not exist.
    """
    first = check_layers(len(link_probs), config)
    spans, open_spans = [], [(0, link_probs.shape[1] + 1, first)]
    while open_spans:
        start, end, layer = open_spans.pop()
        if end - start < 2:
            continue
        spans.append((start, end))
        while layer > config.min_layer and link_probs[layer, start : end - 1].min() > config.split_threshold:
            layer -= 1
        links = link_probs[layer, start : end - 1]
        if end - start == 2 or links.min() > config.split_threshold:
            continue
        middle = start + 1 + int(links.argmin())
        for part in ((middle, end), (start, middle)):
            strong = link_probs[layer, part[0] : part[1] - 1].min(initial=1.0) > config.descend_threshold
            open_spans.append((*part, max(layer - 1, config.min_layer) if strong else layer))
    return spans


def parse_run(folder: Path, settings: ParseSettings) -> tuple[str, dict]:
    """Write `parses.NAME.txt`, a tree a line, and the entry unsupervised_parse.NAME of `scores.json` into the run folder.

    Returns NAME and the entry. Raises UserError if the folder is not a run, if its model has no constituents, or if run and data
    do not fit.
    """
    device = choose_device(settings.use_gpu)
    run = load_model(folder, checkpoint=settings.checkpoint, data=settings.data, device=device)
    if not isinstance(run.model.encoder, ConstituentEncoder):
        raise UserError(
            f"{folder} is a run of model.name = {run.config.model.name}, which finds no constituents; give a run of "
            "constituent_transformer, for example of tree-attention train-lm --config masked_lm"
        )
    check_layers(len(run.model.encoder.layers), settings.parsing)
    read_scores(folder)  # before the work, not after
    index = read_index(run.data / "encoded")
    if settings.treebank:
        text, trees = f"treebank-{settings.treebank[0].name.partition('.')[0]}", "treebank"
        examples, brackets = read_treebank(settings.treebank, run.data, reads_trees=run.model.reads.constituents)
        gold = list(map(read_tree, brackets))
    else:
        text, trees = settings.split, index.get("tree_source", "parsed")
        if has_unknown_gold(index):
            raise UserError(
                f"{run.data} has unlabelled binary trees, in which no label marks what only makes them binary; give the trees as "
                "treebank=[FILE]"
            )
        warn_of_gold(run.data, index, "; give others as treebank=[FILE]")
        if trees == "parsed":
            trees = index["parser_settings"]["name"]
        check_hashes(run.data / "encoded", text)
        examples = list(read_split(run.data, "encoded", text))
        gold = list(gold_trees(run.data, examples))
        _warn_of_unknown_names(text, gold, index.get("tree_settings", {}).get("binarize", "none") != "none")
    _warn_of_punctuation(text, gold, settings.punctuation)
    sentences = list(parse_examples(run.model, examples, gold, settings))
    most = [f"max_words_{settings.max_words}"] if settings.max_words else []
    name = name_result(text, run.checkpoint, run.data, *most, own_data=run.own_data)
    scores = {
        **score_sentences(sentences, settings),
        "split": text,
        **origin(run, settings),
        "parsing": settings.parsing.model_dump(),
        "punctuation": list(settings.punctuation),
        "trees": trees,
        "treebank": list(map(str, settings.treebank)),
    }
    atomic_write(folder / f"parses.{name}.txt", "".join(f"{write_tree(sentence)}\n" for sentence in sentences).encode())
    add_entry(folder / SCORES, f"{PARSE}{name}", scores)
    return name, scores


def _warn_of_unknown_names(split: str, gold: Sequence[GoldTree], is_binarised: bool) -> None:
    """Warn of tags and labels that train lacks, where they change scores: binarising may have made these nodes."""
    tags = sum(tree.tags.count(UNKNOWN_LABEL) for tree in gold)
    nodes = sum(label == UNKNOWN_LABEL for tree in gold for _, label in tree.spans) if is_binarised else 0
    for count, what, effect in (
        (tags, "words have tags", "punctuation among them counts as words"),
        (nodes, "nodes have labels", "those that only make the trees binary count as gold brackets"),
    ):
        if count:
            warn(f"warning: {split}: {count:,} {what} that the training data lacks; {effect}. Give the trees as treebank=[FILE]")


def _warn_of_punctuation(text: str, gold: Sequence[GoldTree], punctuation: Collection[str]) -> None:
    """Warn if no word is punctuation: its tags may have other names in this language."""
    known = Counter(tag for tree in gold for tag in tree.tags)
    if punctuation and not known.keys() & set(punctuation):
        some = ", ".join(tag for tag, _ in known.most_common(_SHOWN_TAGS))
        warn(f"note: {text}: no tag is one of the setting punctuation, so all words count; the most frequent tags are {some}")


def read_tree(text: str) -> GoldTree:
    """Read a tree in Penn Treebank brackets. Tags and labels stay as they are written."""
    words, tags, tree = read_brackets(text)
    tree = normalise(tree, collapse_unary=True)
    spans = zip(tree.starts, tree.ends, strict=True)
    return GoldTree(words, tags, list(zip(spans, tree.labels, strict=True)))


def warn_of_gold(data: AnyPath, index: Mapping, remedy: str = "") -> None:
    """Note if the trees of a data set, against which trees are scored, are control trees or a parser's."""
    trees, parser = index.get("tree_source", "parsed"), index.get("parser_settings", {}).get("name", "given")
    if trees not in PARSER_TREES:
        warn(f"note: the gold trees are {trees} trees, because {data} has those{remedy}")
    elif parser != "given":
        warn(f"note: the gold trees are the parser's ({parser}), so F1 is the agreement with it, not with a treebank{remedy}")


def has_unknown_gold(index: Mapping) -> bool:
    """Return whether the trees of a data set have nodes that only make them binary, and no label that says so."""
    settings = index.get("tree_settings", {})
    return settings.get("tree_source") == "unlabelled" and settings.get("binarize", "none") != "none"


def gold_trees(data: AnyPath, examples: Sequence[dict]) -> Iterator[GoldTree]:
    """Return the trees of rows as from `Shard.row`, over words, in the vocabulary of `data`."""
    labels, tags = (read_names(data / "encoded" / "vocab" / f"{name}.txt") for name in ("labels", "pos_tags"))
    decode = load_decoder(data)
    for example in examples:
        # The first leaf of every word, and the word of every leaf.
        _, first, place = np.unique(example["leaves"]["word_index"], return_index=True, return_inverse=True)
        parts = [part.tolist() for part in np.split(example["leaves"]["piece"], first[1:])] if len(first) else []
        words = [word.strip() for word in decode(parts)]
        starts, ends = example["spans"]["start"], example["spans"]["end"]
        spans = zip(place[starts].tolist(), (place[ends - 1] + 1).tolist(), strict=True)
        names = (labels[label] for label in example["nodes"]["label"].tolist())
        yield GoldTree(
            words,
            [tags[tag] for tag in example["leaves"]["pos_tag"][first].tolist()],
            [(span, name) for span, name in zip(spans, names, strict=True) if not name.startswith(BINARY_PREFIX)],
        )


def parse_examples(
    model: nn.Module, examples: Sequence[dict], gold: Sequence[GoldTree], settings: ParseSettings
) -> Iterator[ParsedSentence]:
    """Return the sentences of `examples`, rows as from `Shard.row`, and their trees, in their order."""
    for example, tree, links in zip(examples, gold, find_links(model, examples), strict=True):
        _, first = np.unique(example["leaves"]["word_index"], return_index=True)
        # Links inside a word do not count: no bracket begins or ends there.
        yield ParsedSentence(example["example_id"], tree, parse_links(links[:, first[1:] - 1], settings.parsing))


def find_links(model: Any, examples: Sequence[dict]) -> Iterator[np.ndarray]:
    """Return link probabilities [E, L - 1] of every example. The model is put into evaluation mode.

    Raises UserError if one is not finite.
    """

    @torch.no_grad()
    def find(batch: TreeBatch, _: list[dict]) -> list[np.ndarray]:
        with scoring(model):
            found = model.encoder.link_probabilities(batch).float().cpu().numpy()
        lengths = (~batch.leaf_pad_mask).sum(1).tolist()
        links = [link_probs[:, : length - 1] for link_probs, length in zip(found, lengths, strict=True)]
        if not all(np.isfinite(one).all() for one in links):  # NaN would give a tree
            raise UserError("the link probabilities are not finite, so the model has diverged; parse with an earlier checkpoint")
        return links

    model.eval()
    none = np.zeros((len(model.encoder.layers), 0), dtype=np.float32)
    with_targets = ({"tgt_pieces": _NO_TARGETS, **example} for example in examples)
    device = next(model.parameters()).device
    return in_order(find, model.reads, with_targets, none, count_leaves, _BATCH_TOKENS, device, WINDOW)


def score_sentences(sentences: Sequence[ParsedSentence], settings: ParseSettings) -> dict:
    """Score the parses, and trees that need no model as `baselines`; in the form of scores.json.

    Sentences with fewer than two words without punctuation, or with more than `max_words`, do not count. Raises UserError if no
    gold tree has a bracket that counts.
    """
    gold, found, labelled = [], [], []
    others: dict[str, list[set[Bracket]]] = {kind: [] for kind in CUTS}
    for sentence in sentences:
        kept = [tag not in settings.punctuation for tag in sentence.gold.tags]
        length = sum(kept)
        if length < 2 or length > (settings.max_words or length):
            continue
        spans = over_kept_words([span for span, _ in sentence.gold.spans], kept)
        gold.append(counted(spans, length))
        found.append(counted(over_kept_words(sentence.parse, kept), length))
        names = defaultdict(set)
        for span, (_, label) in zip(spans, sentence.gold.spans, strict=True):
            if span in gold[-1]:
                names[span].add(label)
        labelled.append(names)
        for kind, trees in others.items():
            random = np.random.default_rng([settings.seed, sentence.example_id])
            trees.append(counted(binary_tree(length, kind, random), length))
    if not any(gold):
        larger = ", or a larger max_words" if settings.max_words else ""
        raise UserError(
            f"none of the {len(sentences):,} gold trees has a bracket that counts, so there is no F1; give trees with more words "
            f"and nodes{larger}"
        )
    return {
        **score_brackets(gold, found),
        "signature": SIGNATURE,
        "baselines": {kind: score_brackets(gold, trees) for kind, trees in others.items()},
        "recall_by_label": recall_by_label(labelled, found),
        "num_sentences": len(gold),
        "num_brackets": sum(map(len, gold)),
        "left_out": len(sentences) - len(gold),
        "max_words": settings.max_words,
    }


def write_tree(sentence: ParsedSentence) -> str:
    """Write the parse in Penn Treebank brackets, its nodes labelled X; empty without words."""
    opened: Counter[int] = Counter()
    closed: Counter[int] = Counter()
    for start, end in sentence.parse or [(0, len(sentence.gold.words))]:
        opened[start] += 1
        closed[end] += 1
    parts = []
    for place, (word, tag) in enumerate(zip(sentence.gold.words, sentence.gold.tags, strict=True)):
        parts.append("(X " * opened[place] + f"({tag} {escape(word)})" + ")" * closed[place + 1])
    return " ".join(parts)


def format_parse(name: str, scores: Mapping) -> str:
    """Return a small table: the model and the baselines, and the most frequent labels."""
    found = {"model": scores, **scores["baselines"]}
    rows = align([Column(name, list(found)), *score_columns(list(found.values()))])
    labels = list(scores["recall_by_label"].items())[:_SHOWN_LABELS]
    recalls = (f"{label} {100 * one['recall']:.1f} of {one['count']:,}" for label, one in labels)
    rows.append(f"recall by label: {', '.join(recalls)}")
    left_out = f", {scores['left_out']:,} left out" if scores["left_out"] else ""
    rows.append(f"{scores['num_sentences']:,} sentences, {scores['num_brackets']:,} brackets{left_out}; {scores['signature']}")
    return "\n".join(rows)
