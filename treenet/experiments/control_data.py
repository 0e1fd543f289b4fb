"""The corpora of the positive control. A seed gives the same files everywhere.

Each rung has another reason why the tree decides the order of the target's words: see `RUNGS` in treenet/experiments/settings.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from treenet.experiments.control_trees import (
    INVERTED,
    WRITERS,
    Places,
    Rule,
    Tree,
    damage,
    depth_of,
    draw_tree,
    order_entropy,
    order_of,
    parse_infix,
    postfix,
    reorder,
    to_brackets,
)
from treeproc.common.files import atomic_write
from treeproc.shards.schema import SPLITS

WORDS = ["".join(letters) for letters in product("bdgk", "aeiou")]
OPERATORS = ["".join(letters) for letters in product("wxyz", "aei")]  # the first letter decides the precedence
MOST_WORDS = 8  # of rung a: beyond, listing all orders takes minutes
_SHALLOW, _DEEP = (0, 4), (6, 8)  # depths of rung d
_LENGTHS = (7, 9)  # of rung d: lengths that have trees of both depths
RULES: dict[str, Rule] = {"arcs": "governor_first", "levels": "longer_first"}  # of rung a, where it is not 'swap'
REVERSED = "VP"  # of rung c: the label of the nodes whose children are reversed


@dataclass(frozen=True)
class Sentence:
    """Words, the tree that a model is given, and the places of the words in the target."""

    words: tuple[str, ...]
    tree: Tree
    order: Places
    tags: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return " ".join(self.words[place] for place in self.order)


@dataclass(frozen=True)
class Corpus:
    """Sentences of all splits, and how they are written.

    `reads` is a key of `WRITERS`. `bounds` has the entropy of the order for each test sentence, in nats. On average, no model
    without the tree has a lower nll. It is empty if such a model can know the order. `groups` are kinds of test sentences.
    """

    splits: Mapping[str, Sequence[Sentence]]
    reads: str = "labels"
    bounds: Sequence[float] = ()
    groups: Sequence[str] = ()
    subwords: Mapping[str, object] = field(default_factory=lambda: {"vocab_size": None})  # settings; by default, words stay whole

    @property
    def tree(self) -> dict[str, object]:
        """The settings of its trees. Chains of nodes are part of a shape."""
        return {"collapse_unary": False, "binarize": "right"} if self.reads == "shape" else {}

    def write(self, folder: Path) -> dict:
        """Write the files of all splits. Returns the settings of the preprocessing job that reads them."""
        splits, is_arcs = {}, self.reads == "arcs"
        for split, sentences in self.splits.items():
            source, target = folder / f"{split}.{'conllu' if is_arcs else 'mrg'}", folder / f"{split}.target"
            write = WRITERS[self.reads]
            lines = [to_brackets(one.tree, one.words, one.tags) if one.tags else write(one.tree, one.words) for one in sentences]
            write_lines(source, lines)
            write_lines(target, [one.target for one in sentences])
            splits[split] = {"source": [str(source)], "target": [str(target)]}
        return {
            "splits": splits,
            "format": "conllu" if is_arcs else "brackets",
            "parser": {"name": "given", "dependencies": is_arcs},
            "subwords": self.subwords,
            "tree": self.tree,
        }


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file of these lines, unless it has them."""
    content = "".join(f"{line}\n" for line in lines).encode()
    if not path.exists() or path.read_bytes() != content:  # the job takes an unchanged file for read
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content)


def _make(draw: Callable[[np.random.Generator, str], Sentence], sizes: Mapping[str, int], seed: int) -> dict[str, list[Sentence]]:
    """Draw all splits, each with its own generator: the size of one changes no sentence of another."""
    generators = {split: np.random.default_rng([seed, number]) for number, split in enumerate(SPLITS)}
    return {split: [draw(generators[split], split) for _ in range(count)] for split, count in sizes.items()}


def _choose_words(length: int, random: np.random.Generator) -> tuple[str, ...]:
    """Choose different words, so that a target shows its order."""
    return tuple(str(word) for word in random.choice(WORDS, length, replace=False))


def random_orders(length: int, sizes: Mapping[str, int], seed: int, reads: str = "labels") -> Corpus:
    """Return the corpus of rung a: different words whose order a random tree decides, and nothing else."""
    rule = RULES.get(reads, "swap")

    def draw(random: np.random.Generator, split: str) -> Sentence:
        words, tree = _choose_words(length, random), draw_tree(length, random)
        return Sentence(words, tree, order_of(tree, rule))

    return Corpus(_make(draw, sizes, seed), reads, [order_entropy(length, rule)] * sizes["test"])


def expressions(sizes: Mapping[str, int], seed: int) -> Corpus:
    """Return the corpus of rung b: infix to postfix notation. The words decide the tree, by the precedence of operators."""

    def draw(random: np.random.Generator, split: str) -> Sentence:
        operands = random.choice(WORDS, random.integers(4, 8))
        words = [str(operands[0])]
        for operator, operand in zip(random.choice(OPERATORS, len(operands) - 1), operands[1:], strict=True):
            words += [str(operator), str(operand)]
        tree = parse_infix(words, lambda operator: ord(operator[0]))
        return Sentence(tuple(words), tree, postfix(tree))

    return Corpus(_make(draw, sizes, seed))


def deep_orders(sizes: Mapping[str, int], seed: int) -> Corpus:
    """Return the corpus of rung d: as rung a, with trees of depth 4 at most in train and valid, and half of test deeper."""
    shallow, deep = f"depth to {_SHALLOW[1]}", f"depth {_DEEP[0]} to {_DEEP[1]}"
    counts = dict.fromkeys(SPLITS, 0)

    def draw(random: np.random.Generator, split: str) -> Sentence:
        low, high = _DEEP if split == "test" and counts[split] % 2 else _SHALLOW
        counts[split] += 1
        length = int(random.integers(_LENGTHS[0], _LENGTHS[1] + 1))
        tree = draw_tree(length, random)
        while not low <= depth_of(tree) <= high:
            tree = draw_tree(length, random)
        return Sentence(_choose_words(length, random), tree, reorder(tree, {INVERTED}))

    splits = _make(draw, sizes, seed)
    is_deep = [depth_of(one.tree) >= _DEEP[0] for one in splits["test"]]
    bounds = [
        order_entropy(len(one.words), "swap", _DEEP if below else _SHALLOW)
        for one, below in zip(splits["test"], is_deep, strict=True)
    ]
    return Corpus(splits, "labels", bounds, [deep if below else shallow for below in is_deep])


def reversed_phrases(
    parsed: Mapping[str, Sequence[tuple[Sequence[str], Sequence[str], Tree]]], share: float, seed: int
) -> Corpus:
    """Return a corpus of rung c: English lines, whose target has the children of all VPs reversed.

    `parsed` has words, tags and tree of each line. These trees make the target. A model gets them with a `share` of the brackets
    moved.
    """
    random = np.random.default_rng([seed, round(100 * share)])

    def sentence(words: Sequence[str], tags: Sequence[str], tree: Tree) -> Sentence:
        return Sentence(tuple(words), damage(tree, share, random), reorder(tree, {REVERSED}), tuple(tags))

    splits = {split: [sentence(*line) for line in lines] for split, lines in parsed.items()}
    return Corpus(splits, subwords={"vocab_size": 2000})
