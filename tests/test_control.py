"""The positive control: orders and their entropy against oracles, corpora, verdicts, and a small control that must pass."""

import io
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_here
from reference_encoding import check_tree

from treenet.cli.control import make_data
from treenet.config import ModelConfig
from treenet.data.batch import collate
from treenet.data.splits import read_split
from treenet.experiments import control_data
from treenet.experiments.control import NONE, OTHER, PART, RIGHT, WORSE, draw_corpora, study_config, systems_of
from treenet.experiments.control_data import RULES, Corpus, Sentence, deep_orders, expressions, random_orders, reversed_phrases
from treenet.experiments.control_table import Row, build_result, judge_bounds, judge_parses, judge_sizes
from treenet.experiments.control_trees import (
    INVERTED,
    STRAIGHT,
    Node,
    damage,
    depth_of,
    draw_tree,
    find_governors,
    hidden_labels_entropy,
    hide_labels,
    order_entropy,
    order_of,
    permuted_labels_entropy,
    reorder,
    spans_of,
    to_brackets,
    to_conllu,
    tree_of,
)
from treenet.experiments.settings import ControlSettings
from treenet.models.registry import build_model, find_encoder, names_for
from treenet.tasks.base import vocab_sizes
from treeproc.shards.schema import SPLITS
from treeproc.shards.store import read_index
from treeproc.trees.conllu import read_leaves
from treeproc.trees.scores import BracketScore, score_sentence
from treeproc.trees.spans import read_brackets

SIZES = {"train": 30, "valid": 5, "test": 20}


def all_trees(length: int, first: int = 0):
    """Every binary tree with every labelling, and its probability."""
    if length == 1:
        yield first, 1.0
        return
    for split in range(1, length):
        for (left, p), (right, q) in product(all_trees(split, first), list(all_trees(length - split, first + split))):
            for label in (STRAIGHT, INVERTED):
                yield Node(label, (left, right)), p * q / 2 / (length - 1)


def slow_swap(tree: Node) -> tuple[int, ...]:
    """Of two words, the lowest node above both decides which comes first."""
    spans = spans_of(tree)

    def comes_before(one: int, other: int) -> bool:
        nodes = zip(spans.labels, spans.starts, spans.ends, strict=True)
        _, label = min((end - start, label) for label, start, end in nodes if start <= min(one, other) and max(one, other) < end)
        return (one < other) == (label == STRAIGHT)

    words = range(max(spans.ends))
    return tuple(sorted(words, key=lambda word: sum(comes_before(other, word) for other in words if other != word)))


def slow_governor_first(governors: list[int]) -> tuple[int, ...]:
    """Walk down the arcs from the root with a stack."""
    stack, found = [governors.index(-1)], []
    while stack:
        found.append(stack.pop())
        stack += reversed([word for word, governor in enumerate(governors) if governor == found[-1]])
    return tuple(found)


def slow_longer_first(tree: Node) -> tuple[int, ...]:
    """Sort words by the sizes of the phrases that they are in, from the top down; equal ones by their place."""
    spans = spans_of(tree)
    nodes = sorted({*zip(spans.starts, spans.ends, strict=True), *((at, at + 1) for at in range(max(spans.ends)))})

    def sizes(word: int) -> list[tuple[int, int]]:
        return sorted((start - end, start) for start, end in nodes if start <= word < end)

    return tuple(sorted(range(max(spans.ends)), key=sizes))


@pytest.mark.parametrize("length", range(2, 9))
def test_orders_equal_the_oracles(length):
    random = np.random.default_rng(length)
    for _ in range(20):
        tree = draw_tree(length, random)
        assert reorder(tree, {INVERTED}) == order_of(tree, "swap") == slow_swap(tree)
        assert order_of(tree, "governor_first") == slow_governor_first(find_governors(tree))
        assert order_of(tree, "longer_first") == slow_longer_first(tree)


@pytest.mark.parametrize("rule", ["swap", "governor_first", "longer_first"])
@pytest.mark.parametrize(
    ("length", "depths"), [(2, None), (3, None), (4, None), (2, (0, 2)), (3, (0, 2)), (4, (0, 2)), (4, (3, 8))]
)
def test_the_bound_is_the_entropy_over_all_trees(length, rule, depths):
    found = Counter()
    for tree, probability in all_trees(length):
        if depths is None or depths[0] <= depth_of(tree) <= depths[1]:
            found[order_of(tree, rule)] += probability
    total = sum(found.values())
    expected = -sum(p / total * math.log(p / total) for p in found.values())
    assert order_entropy(length, rule, depths) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_the_bound_of_a_part_of_the_trees_is_the_entropy_over_what_is_seen(length):
    """From the definition: all trees with what is shown of them, all permutations of the labels below the root alike."""
    joint = {"hidden": Counter(), "permuted": Counter()}
    for tree, probability in all_trees(length):
        spans, order = spans_of(tree), order_of(tree, "swap")
        shape = tuple(spans.starts), tuple(spans.ends)
        joint["hidden"][shape, order] += probability
        shown = list(permutations(spans.labels[1:]))
        for labels in shown:
            joint["permuted"][(shape, spans.labels[0], labels), order] += probability / len(shown)
    for bound, found in ((hidden_labels_entropy, joint["hidden"]), (permuted_labels_entropy, joint["permuted"])):
        seen = Counter()
        for (what, _), probability in found.items():
            seen[what] += probability
        expected = -sum(probability * math.log(probability / seen[what]) for (what, _), probability in found.items())
        assert bound(length) == pytest.approx(expected, abs=1e-12)


def test_known_bounds():
    assert order_entropy(2) == pytest.approx(math.log(2))
    # Three words: 6 orders. Those of one inverted node under a straight one, or the other way round, have probability 1/8 each.
    assert order_entropy(3) == pytest.approx(-(4 / 8 * math.log(1 / 8) + 2 / 4 * math.log(1 / 4)))
    assert order_entropy(5) == pytest.approx(4.1785, abs=1e-4)
    assert hidden_labels_entropy(5) == pytest.approx(2.7726, abs=1e-4)
    assert permuted_labels_entropy(5) == pytest.approx(0.8240, abs=1e-4)


def test_all_forms_of_a_tree_can_be_read_back():
    random = np.random.default_rng(0)
    shapes = set()
    for tree, _ in all_trees(4):
        shapes.add(hide_labels(tree, mark_inverted=True))
    assert len(shapes) == sum(1 for _ in all_trees(4))  # a shape tells all labels
    for length in range(2, 8):
        tree, words = draw_tree(length, random), list("abcdefgh"[:length])
        assert tree_of(spans_of(tree)) == tree
        assert read_brackets(to_brackets(tree, words)) == (words, ["W"] * length, spans_of(tree))
        (leaves,) = read_leaves(iter(io.StringIO(to_conllu(tree, words)).read().split("\n")), "file")
        assert (leaves.words, leaves.governors) == (words, find_governors(tree))


def test_operators_bind_by_precedence():
    for sentence in expressions(SIZES, seed=3).splits["train"]:
        waiting, out = [], []  # Dijkstra's shunting yard
        for word in sentence.words:
            if word not in control_data.OPERATORS:
                out.append(word)
                continue
            while waiting and waiting[-1][0] >= word[0]:
                out.append(waiting.pop())
            waiting.append(word)
        assert sentence.target == " ".join([*out, *reversed(waiting)])


@pytest.mark.parametrize("make", [lambda sizes, seed: random_orders(5, sizes, seed), expressions, deep_orders])
def test_a_seed_gives_the_same_corpus(make, tmp_path):
    one, same, other = make(SIZES, 1), make({**SIZES, "train": 10}, 1), make(SIZES, 2)
    assert one.splits["test"] == same.splits["test"] and one.splits["train"][:10] == same.splits["train"]
    assert one.splits["train"] != other.splits["train"] and one.splits["train"][:5] != one.splits["valid"]
    written = [corpus.write(tmp_path / name) for corpus, name in ((one, "a"), (make(SIZES, 1), "b"))]
    for split in SIZES:
        files = [file for values in written for side in ("source", "target") for file in values["splits"][split][side]]
        assert len({open(file).read() for file in files}) == 2


def test_half_of_the_test_trees_of_rung_d_are_deeper_than_those_of_training():
    corpus = deep_orders(SIZES, 1)
    depths = {split: [depth_of(one.tree) for one in sentences] for split, sentences in corpus.splits.items()}
    assert max(depths["train"] + depths["valid"]) <= 4
    assert {(depth > 4, group) for depth, group in zip(depths["test"], corpus.groups, strict=True)} == {
        (False, "depth to 4"),
        (True, "depth 6 to 8"),
    }
    assert all(6 <= depth <= 8 for depth in depths["test"][1::2])


def test_damaged_trees_are_trees_with_a_lower_f1():
    random = np.random.default_rng(0)
    words = list("abcdefghijkl")
    trees = [Node("S", (0, Node("VP", (1, draw_tree(7, random, 2), 9)), 10, 11)) for _ in range(50)]
    lines = {"test": [(words, ["W"] * 12, tree) for tree in trees]}
    assert [one.tree for one in reversed_phrases(lines, 0.0, 1).splits["test"]] == trees
    scores = []
    for share in (0.1, 0.4, 1.0):
        found = reversed_phrases(lines, share, 1).splits["test"]
        assert [one.order for one in found] == [reorder(tree, {"VP"}) for tree in trees]  # the target is that of the right trees
        for one in found:
            check_tree(spans_of(one.tree), 12)
        pairs = [(spans_of(tree), spans_of(one.tree)) for tree, one in zip(trees, found, strict=True)]
        scores.append(sum((score_sentence([""] * 12, *pair, labelled=False) for pair in pairs), BracketScore()).f1)
    assert 1 > scores[0] > scores[1] > scores[2]
    assert damage(3, 1.0, random) == 3


def test_every_translation_model_that_reads_a_tree_is_in_the_control():
    systems = systems_of(ControlSettings(all=True))
    assert len({system.name for system in systems}) == len(systems)
    readers = set()
    for name in names_for("translation"):
        config = ModelConfig(name=name)
        reads = find_encoder(config, "translation").reads_with(config)
        if reads.constituents or reads.reads_arcs:
            readers.add(name)
    with_trees = [system for system in systems if system.trees == RIGHT]
    assert readers <= {system.model["name"] for system in with_trees} and len(readers) > 4
    for system in systems:
        config = ModelConfig.model_validate({"d_model": 64, "num_heads": 4, **system.model})
        reads = find_encoder(config, "translation").reads_with(config)
        assert (reads.constituents or reads.reads_arcs) == (system.trees != NONE), system.name
        assert reads.reads_arcs == (system.corpus == "arcs" and system.trees != NONE)


def test_sizes_are_shares_of_the_largest(tmp_path):
    settings = ControlSettings(rung="b", sizes=(4000, 250), training={"model": {"d_model": 32}})
    config = study_config(settings, list(systems_of(settings)), tmp_path)
    assert config.grid.fractions == (0.0625, 1.0) and settings.split_sizes["train"] == 4000
    assert config.model.d_model == 32 and config.grid.baseline == "transformer"


def test_the_table_has_the_pairs_that_were_trained_on():
    settings = ControlSettings(rung="b")
    folder = Path(__file__).parents[1] / "docs" / "results" / "runs" / "control_b" / "labels"
    records = [json.loads(path.read_text()) for path in folder.glob("*-seed1.json")]
    result = build_result(settings, systems_of(settings), {"labels": Corpus({})}, {"labels": records}, {})
    assert [row.pairs for row in result.rows] == [258, 1003, 3996, 16_000] * 3  # shares of the largest are drawn by line


ROW = Row("tree", RIGHT, "", 100, 1, "", nll=2.0, half=0.1, bound=4.0, exact=50.0, chrf=60.0)
PLAIN = replace(ROW, system="plain", trees=NONE, nll=5.0)


def test_verdict_about_a_bound():
    found, text = judge_bounds([ROW, PLAIN])
    assert found and "is 2.00, below the bound of 4.00 nats" in text and "stays 1.00 above" in text
    found, text = judge_bounds([ROW, replace(PLAIN, nll=3.95)])  # below it by chance
    assert found
    found, text = judge_bounds([ROW, replace(PLAIN, nll=3.8, trees=OTHER)])
    assert not found and "plain cannot know the order, but is below the bound" in text
    part = replace(ROW, system="unlabelled", trees=PART, nll=2.9, bound=2.8)  # below the bound of those that see no tree
    found, text = judge_bounds([ROW, part, PLAIN])
    assert found and "below the bound of 4.00 nats" in text and "stays 0.10 above" in text
    assert not judge_bounds([ROW, replace(part, nll=2.6), PLAIN])[0]
    found, text = judge_bounds([ROW, replace(ROW, system="second", nll=3.95), PLAIN])
    assert not found and "1 of 2 rows with right trees are below the bound; not below: second (3.95)" in text


def test_verdict_about_sizes():
    def rows(*gains):
        sizes = [100 * 2**number for number in range(len(gains))]
        return [
            row
            for size, gain in zip(sizes, gains, strict=True)
            for row in (replace(ROW, pairs=size, nll=5 - gain, bound=None), replace(PLAIN, pairs=size, bound=None))
        ]

    assert judge_sizes(rows(2.0, 1.0, 0.1))[0] and judge_sizes(rows(0.2, 3.0, 0.1))[0] and judge_sizes(rows(2.0))[0]
    assert "less than a tenth" in judge_sizes(rows(0.3, 0.1))[1]
    hard = [replace(one, pairs=50, nll=nll) for one, nll in ((ROW, 33.0), (PLAIN, 35.3))]  # a larger gain, but not by a tenth
    assert judge_sizes([*hard, *rows(2.0, 0.5)])[0]
    assert "does not fall to a half" in judge_sizes(rows(1.0, 2.0))[1] and not judge_sizes(rows(1.0, 2.0))[0]
    as_good = replace(PLAIN, system="other", trees=OTHER, nll=3.0, bound=None)
    found, text = judge_sizes([*rows(2.0, 0.1), as_good])
    assert not found and "less than a tenth at all sizes: 100 pairs +0.00" in text


def test_verdict_about_parses():
    worse = [replace(ROW, system=f"damaged_{f1}", trees=WORSE, f1=f1, nll=nll) for f1, nll in ((90.0, 3.0), (70.0, 4.0))]
    gold = replace(ROW, f1=100.0)
    assert judge_parses([gold, *worse, PLAIN]) == (
        True,
        "The instrument finds the tree, and worse trees help less: nll of a sentence by quality of trees: F1 100: 2.00, F1 90: "
        "3.00, F1 70: 4.00.",
    )
    assert "does not rise" in judge_parses([gold, *worse[::-1], PLAIN])[1]
    assert "not better than plain (2.10) by a tenth" in judge_parses([gold, *worse, replace(PLAIN, nll=2.1)])[1]
    small = [replace(row, pairs=10, nll=5 + row.nll) for row in (gold, *worse, PLAIN)]  # each size: its own order
    of_two_sizes = [row for pair in zip(small, (gold, *worse, PLAIN), strict=True) for row in pair]
    assert judge_parses(of_two_sizes) == judge_parses([gold, *worse, PLAIN])


def test_a_part_of_the_trees_has_its_own_bound():
    """In the record of the plain Transformer, as if it were one of each."""
    settings = ControlSettings(all=True)
    folder = Path(__file__).parents[1] / "docs" / "results" / "runs" / "control_a" / "labels"
    record = json.loads((folder / "transformer-1-seed1.json").read_text())
    systems = [system for system in systems_of(settings) if system.corpus == "labels"]
    records = [record | {"labels": record["labels"] | {"model": system.name}} for system in systems]
    result = build_result(settings, systems, draw_corpora(ControlSettings(), ["train"]), {"labels": records}, {})
    bounds = {row.system: row.bound for row in result.rows}
    assert bounds.pop("without_labels") == pytest.approx(hidden_labels_entropy(5))
    assert bounds.pop("permuted_labels") == pytest.approx(permuted_labels_entropy(5))
    assert len(bounds) == 5 and list(bounds.values()) == pytest.approx([order_entropy(5)] * 5)


def test_corpora_have_a_form_for_every_system():
    corpora = draw_corpora(ControlSettings(all=True, sizes=(10,), test_pairs=10))
    assert list(corpora) == ["labels", "shape", "levels", "arcs"]
    assert {len(corpus.bounds) for corpus in corpora.values()} == {10}
    words = [[one.words for one in corpus.splits["test"]] for corpus in corpora.values()]
    assert all(own == words[0] for own in words)  # of one seed


@pytest.mark.slow
def test_systems_see_what_decides_the_order(tmp_path):
    """Trees over the same words that give different orders give different states, in the form of each system."""
    systems = [system for system in systems_of(ControlSettings(all=True)) if system.tree_source == "parsed"]
    corpora = {}
    for form in dict.fromkeys(system.corpus for system in systems):
        trees = [tree for tree, _ in all_trees(4)]
        sentences = [Sentence(tuple("abcd"), tree, order_of(tree, RULES.get(form, "swap"))) for tree in trees]
        corpora[form] = Corpus(dict.fromkeys(SPLITS, sentences), form)
    make_data(systems, corpora, ControlSettings(all=True), tmp_path)
    for system in systems:
        encoded = tmp_path / system.data / "encoded"
        relations = encoded / "vocab" / "deprels.txt"
        sizes = {**read_index(encoded), "num_deprels": len(relations.read_text().split()) if relations.exists() else 0}
        torch.manual_seed(0)
        config = ModelConfig.model_validate({"d_model": 64, "num_heads": 4, **system.model})
        model = build_model(config, vocab_sizes(sizes)).double().eval()
        memory = model.encode(collate(list(read_split(tmp_path / system.data, "encoded", "test")), model.reads))
        states = memory.states.masked_fill(memory.pad_mask[:, :, None], 0.0).flatten(1)
        orders = [one.order for one in corpora[system.corpus].splits["test"]]
        same = (states[:, None] - states).abs().amax(2) < 1e-9
        differs = torch.tensor([[left != right for right in orders] for left in orders])
        if system.name == "tree_distance":  # distances do not say which of two words governs the other
            assert (same & differs).any() and not same.all()
        elif system.trees == RIGHT:
            assert not (same & differs).any(), system.name
        else:
            assert same.all(), system.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "pairs", "steps", "rate", "exact"),
    [(2, 2000, 80, 1e-2, (90, 60)), pytest.param(3, 3000, 450, 5e-3, (40, 30), marks=pytest.mark.cluster)],
)
def test_right_trees_beat_the_bound_and_others_do_not(tmp_path, words, pairs, steps, rate, exact):
    """`exact` is what the system with right trees must exceed, and no other may reach."""
    small = [
        f"words={words}", f"sizes=[{pairs}]", "test_pairs=200", f"max_steps={steps}", "parallel=1",
        f"training.optimizer.learning_rate={rate}", "training.model={num_encoder_layers: 1, num_decoder_layers: 1}",
    ]  # fmt: skip
    command = ["control.py", "--records", tmp_path / "records", *small, "--out"]
    done = run_here(*command, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The instrument finds a tree when there is one" in done.stdout
    result = json.loads((tmp_path / "out" / "control.json").read_text())
    right, *rest = result["rows"]
    assert result["found"] and right["nll"] + right["half"] < right["bound"] == pytest.approx(order_entropy(words))
    assert [row["trees"] for row in rest] == [OTHER, NONE] and all(row["nll"] > row["bound"] for row in rest)
    assert right["exact"] > exact[0] and exact[1] > max(row["exact"] for row in rest)
    again = run_here(*command, tmp_path / "again")  # from the records alone
    assert again.returncode == 0 and not (tmp_path / "again" / "labels" / "cells").exists()
    assert json.loads((tmp_path / "again" / "control.json").read_text()) == result
