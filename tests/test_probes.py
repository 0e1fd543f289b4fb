"""Probes: labels against brute force, states against sentences alone, planted signals, kills, errors, the workflow."""

import json
import math
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import main_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import MODEL_CASES, batch_of, tiny_model
from pictures import pictures
from strategies import right_branching
from toyprobes import NUM_WORDS, SUFFIX, TAGS, make_example, pieces_of, write_parsed, write_probe_data
from toyruns import make_config

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import LEAVES, TREES, InputKind
from treenet.evaluation.significance import t_quantile
from treenet.jobs.train_run import run_training
from treenet.probing import probe_run as probing
from treenet.probing.inputs import (
    OTHER,
    UNSEEN,
    ProbeInputs,
    ProbeTask,
    bin_values,
    build_probe_task,
    collect_states,
    encode_layers,
    exchange,
    exchangeable_pairs,
    frequent_classes,
    leaf_states,
    num_layers,
)
from treenet.probing.probe_results import COLUMNS, format_probes, read_probes, table_rows
from treenet.probing.probe_run import Examples, fit, half_interval, probe_run, scores, train_probe
from treenet.probing.sentences import choose_sentences, read_syntax
from treenet.probing.settings import ProbeSettings
from treenet.report.build import write_report
from treenet.report.settings import ReportSettings
from treenet.runs.loading import load_model
from treenet.runs.result_entries import add_entry
from treenet.runs.run_results import warn_of_stale_results
from treeproc.common.settings import UserError, load_settings
from treeproc.shards.shard import SplitShards

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TRANSLATORS = {"tree": (), "plain": ("model.name=transformer",)}
CLASSIFIERS = {
    "words": ("task=classification", "model.name=child_sum_tree_lstm"),
    "bilstm": ("task=classification", "model.name=bilstm"),
}
SMALL = ProbeSettings(train_sentences=60, eval_sentences=20, train_words=150, eval_words=60, l2=(0.01, 0.1), max_iterations=15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A data set, and runs of one update on it; tests copy those that they write to."""
    folder = tmp_path_factory.mktemp("probes")
    write_probe_data(folder / "data")
    for name, overrides in {**TRANSLATORS, **CLASSIFIERS}.items():
        steps = ("max_steps=1", "checkpoint_every=1", "validate_every=1", "average_checkpoints=1", "classifier.supervision=root")
        run_training(make_config(folder / "data", *steps, "model.num_encoder_layers=2", *overrides), folder / name)
    return folder


@pytest.fixture
def copied(folder, tmp_path):
    return lambda name: Path(shutil.copytree(folder / name, tmp_path / name))


def inputs_of(
    folder: Path, split: str = "train", reads: InputKind = LEAVES, sentences: int = 40, words: int = 100
) -> ProbeInputs:
    return ProbeInputs.build(folder / "data", split, reads, choose_sentences(folder / "data", split, sentences, 256, 1), words, 1)


# Labels.

NODES = st.recursive(
    st.tuples(st.sampled_from(["A", "B"]), st.just("w")),
    lambda below: st.tuples(st.sampled_from(["S", "NP-SBJ", "VP", "ROOT"]), st.lists(below, min_size=1, max_size=3)),
    max_leaves=8,
)


def written(node: tuple) -> str:
    label, below = node
    return f"({label} {below if isinstance(below, str) else ' '.join(map(written, below))})"


def collapsed(node: tuple) -> tuple:
    """A node above one other node alone is that node."""
    label, below = node
    while not isinstance(below, str) and len(below) == 1 and not isinstance(below[0][1], str):
        label, below = below[0]
    return label.split("-")[0], below if isinstance(below, str) else [collapsed(child) for child in below]


def height(node: tuple) -> int:
    return 0 if isinstance(node[1], str) else 1 + max(map(height, node[1]))


def words_below(node: tuple, phrase: str) -> list[tuple[str, str]]:
    """(tag, label of the phrase right above) of each word."""
    label, below = node
    return [(label, phrase)] if isinstance(below, str) else [word for child in below for word in words_below(child, label)]


@given(st.lists(NODES, min_size=1, max_size=4))
@num_examples(40)
def test_labels_are_those_of_the_trees(trees):
    rooted = [collapsed(tree if not isinstance(tree[1], str) else ("X", [tree])) for tree in trees]
    words = [words_below(tree, "") for tree in rooted]
    examples = [
        {"example_id": i, "trees": [written(tree)], "words": {"text": ["w"] * len(one)}}
        for i, (tree, one) in enumerate(zip(trees, words, strict=True))
    ]
    found = read_syntax(examples)
    assert found.depth.tolist() == [height(tree) for tree in rooted]
    assert found.top == [" ".join(label for label, _ in tree[1]) for tree in rooted]
    assert np.diff(found.word_edges).tolist() == [len(one) for one in words]
    assert list(zip(found.pos_tag, found.phrase, strict=True)) == [word for one in words for word in one]
    assert found.deprel is None and found.arc_depth is None


def test_arcs_are_counted_up_to_the_root():
    parsed = [make_example(number, np.random.default_rng(number))[0] for number in range(20)]
    found = read_syntax(parsed)
    expected = []
    for example in parsed:
        governor = example["arcs"]["governor"]
        for word in range(len(governor)):
            depth = 0
            while governor[word] >= 0:
                word, depth = governor[word], depth + 1
            expected.append(depth)
    assert found.arc_depth.tolist() == expected
    assert found.deprel == [name for example in parsed for name in example["arcs"]["deprel"]]
    other_side = [
        {"example_id": example["example_id"], **{f"target_{name}": value for name, value in example.items()}}
        for example in parsed
    ]
    assert read_syntax(other_side, "target_").arc_depth.tolist() == expected
    parsed[7]["arcs"]["governor"] = list(np.roll(np.arange(len(parsed[7]["arcs"]["governor"])), 1))
    with pytest.raises(ValueError, match="line 8 has arcs that form a cycle"):
        read_syntax(parsed)
    parsed[3]["words"]["text"].append("more")
    with pytest.raises(ValueError, match="line 4 has another number of words than its tree"):
        read_syntax(parsed)


def test_sentences_are_a_keyed_choice_of_those_with_one_tree(folder):
    def chosen(most: int, seed: int = 1, leaves: int = 256) -> list[int]:
        return choose_sentences(folder / "data", "train", most, leaves, seed).example_ids.tolist()

    everything = chosen(1000)
    assert everything == list(range(2, 120))  # 0 has a flat tree, 1 has two trees
    assert chosen(30) == sorted(chosen(30)) and set(chosen(30)) < set(chosen(60)) < set(everything)
    assert chosen(30) == chosen(30) != chosen(30, seed=2)
    lengths = ExampleSource(folder / "data" / "encoded", "train", LEAVES).lengths["leaves"]
    assert chosen(1000, leaves=4) == [number for number in everything if lengths[number] <= 4]


def test_numbers_are_put_into_bins_of_like_size():
    assert bin_values(np.array([1, 1, 2, 2, 3, 3, 7, 9]), 4)[0] == ["up to 1", "2", "3", "4 and more"]
    assert bin_values(np.array([5, 5, 5]), 4)[0] == ["all"]
    names, lasts = bin_values(np.arange(1000), 5)
    assert np.bincount(np.searchsorted(lasts, np.arange(1000))).tolist() == [200] * 5 and names[1] == "200 to 399"
    assert frequent_classes(["b", "a", "b", "c", "d"], 2) == ["b", "a", OTHER]
    assert frequent_classes(["b", "a", "b"], 2) == ["b", "a"] == frequent_classes(["b", "a", "b"], None)


# Exchanged words.


def test_words_that_can_change_places():
    #          0  1  1  2  2  3  4  6
    words = np.array([0, 1, 1, 2, 2, 3, 4, 6])
    pieces = np.array([5, 6, 7, 6, 8, 9, 9, 5])
    assert exchangeable_pairs(pieces, words).tolist() == [[1, 2]]  # 0|1 differ in size, 3 and 4 are the same, 5 has no piece
    assert exchangeable_pairs(pieces[:1], words[:1]).shape == (0, 2)
    assert exchange(torch.from_numpy(pieces), 1, 2).tolist() == [5, 6, 8, 6, 7, 9, 9, 5]


def test_a_copy_differs_in_two_words_and_in_nothing_else(folder):
    inputs = inputs_of(folder, reads=TREES, sentences=100)
    count = len(inputs.word_of_leaf)
    assert 0.3 * count < len(inputs.copies) < 0.7 * count
    rows = np.arange(count, inputs.num_rows)
    copies, own = inputs.batch(rows)[0], inputs.batch(inputs.copies)[0]
    for name in ("start", "end", "subtree_end", "leaf_pad_mask"):
        assert torch.equal(getattr(copies.structure, name), getattr(own.structure, name))
    assert torch.equal(copies.node_labels, own.node_labels) and torch.equal(copies.leaf_pad_mask, own.leaf_pad_mask)
    for row, sentence in enumerate(inputs.copies.tolist()):
        first, size = inputs.pair[sentence].tolist()
        expected = own.leaf_pieces[row].tolist()
        left, right = expected[first : first + size], expected[first + size : first + 2 * size]
        assert left != right and (size == 2) == (left[-1] == SUFFIX)
        expected[first : first + 2 * size] = right + left
        assert copies.leaf_pieces[row].tolist() == expected
    task = build_probe_task("word_order", {"train": inputs})
    sentence = np.concatenate([np.arange(count), inputs.copies])[task.rows["train"]]
    assert sentence.tolist() == np.flatnonzero(inputs.pair[:, 1]).tolist()  # each once, as it is or its copy
    assert task.labels["train"].tolist() == np.isin(sentence, inputs.copies).astype(int).tolist()


def test_labels_belong_to_the_rows_of_states(folder):
    inputs = inputs_of(folder)
    syntax = inputs.sentences.syntax
    assert len(inputs.words) == 100 and (np.diff(inputs.words) > 0).all()
    sentence = np.searchsorted(syntax.word_edges, inputs.words, side="right") - 1
    numbers = {"depth": syntax.depth, "length": np.diff(syntax.word_edges), "arc_depth": syntax.arc_depth[inputs.words]}
    for name, values in numbers.items():
        task = build_probe_task(name, {"train": inputs})
        by_class = [values[task.labels["train"] == number] for number in range(len(task.classes))]
        assert len(task.classes) > 2 and all(below.max() < above.min() for below, above in pairwise(by_class))
    for name in ("top_constituents", "pos_tag", "phrase", "deprel"):
        task = build_probe_task(name, {"train": inputs})
        values = syntax.top if name == "top_constituents" else [getattr(syntax, name)[word] for word in inputs.words]
        assert all(task.classes[n] in (value, OTHER) for n, value in zip(task.labels["train"], values, strict=True))
    # The tag of a word follows from its first piece.
    batch, _ = inputs.batch(np.arange(len(inputs.word_of_leaf)))
    first = batch.leaf_pieces[sentence, inputs.word_leaves[:, 0]] - 4
    assert [TAGS[word % 3] for word in first.tolist()] == [syntax.pos_tag[word] for word in inputs.words]
    assert inputs.word_leaves[:, 1].tolist() == [len(pieces_of(word)) for word in first.tolist()]
    unseen = replace(inputs.sentences, syntax=replace(syntax, pos_tag=["new"] * len(syntax.pos_tag)))
    task = build_probe_task("pos_tag", {"train": inputs, "test": replace(inputs, sentences=unseen)})
    assert set(task.labels["test"]) == {UNSEEN} and task.majority() == 0


# States.


@pytest.mark.parametrize("name", ["tree", "plain", "words", "bilstm"])
def test_states_are_those_of_each_sentence_alone(folder, name):
    loaded = load_model(folder / name)
    model, depth = loaded.model, num_layers(loaded.model)
    assert depth == (2 if name in TRANSLATORS else 1)
    inputs = inputs_of(folder, "test", model.reads, sentences=12, words=25)
    layers = list(range(depth + 1))
    found = {of: collect_states(model, inputs, layers, of, lambda count: None) for of in ("first", "mean")}
    copies = found["first"][0].sentences["mean"][len(inputs.word_of_leaf) :]
    torch.testing.assert_close(copies, found["first"][0].sentences["mean"][inputs.copies])  # embeddings know no order
    for layer in layers[1:]:
        below = deepcopy(model)
        if depth > 1:
            below.encoder.layers = below.encoder.layers[:layer]
        states, number = found["first"][layer].sentences, 0
        assert set(states) == ({"mean", "root"} if name == "tree" else {"mean"})
        for row in range(inputs.num_rows):
            batch, words = inputs.batch(np.array([row]))
            with torch.no_grad():
                alone = below.encoder(batch).states[0]
            leaves = alone[words[0]] if name == "words" else alone[: words.shape[1]]
            torch.testing.assert_close(states["mean"][row], leaves.mean(0), rtol=1e-4, atol=1e-5)
            if name == "tree":
                torch.testing.assert_close(states["root"][row], alone[words.shape[1]], rtol=1e-4, atol=1e-5)
            edges = inputs.sentences.syntax.word_edges
            while row < len(edges) - 1 and number < len(inputs.words) and inputs.words[number] < edges[row + 1]:
                mine = leaves[words[0] == inputs.words[number] - edges[row]]
                torch.testing.assert_close(found["first"][layer].words[number], mine[0], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(found["mean"][layer].words[number], mine.mean(0), rtol=1e-4, atol=1e-5)
                number += 1
        assert number == len(inputs.words)


@pytest.mark.parametrize("case", MODEL_CASES)
def test_every_layer_of_every_model_has_a_state_for_each_leaf(case):
    model = tiny_model(case)
    batch = batch_of([right_branching(5), right_branching(3)], model.reads)
    layers = list(range(num_layers(model) + 1))
    with torch.no_grad():
        states, memory = encode_layers(model, batch, layers), model.encode(batch)
    num_leaves, words = batch.leaf_pieces.shape[1], torch.zeros_like(batch.leaf_pieces)
    for layer in layers[1:]:
        assert leaf_states(states[layer], model.reads, num_leaves, words).shape[:2] == batch.leaf_pieces.shape
    assert torch.equal(states[layers[-1]], memory.states) and states[0].shape[:2] == batch.leaf_pieces.shape


def test_models_without_a_state_for_each_leaf_are_refused(folder):
    loaded = load_model(folder / "plain")

    def shorten(module, inputs, memory):
        return replace(memory, states=memory.states[:, :1], pad_mask=memory.pad_mask[:, :1])

    loaded.model.encoder.register_forward_hook(shorten)
    with pytest.raises(UserError, match="has no state for each leaf"):
        collect_states(loaded.model, inputs_of(folder, sentences=5), [2], "first", lambda count: None)


# The classifier.


def examples_of(x: torch.Tensor, y: torch.Tensor) -> list[Examples]:
    return [Examples(part, labels) for part, labels in zip(x.split(300), y.split(300), strict=True)]


def test_a_planted_signal_is_found_and_noise_is_not():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 10, generator=generator) * torch.logspace(-2, 2, 10) + 50
    planted = ((x - 50) / torch.logspace(-2, 2, 10))[:, :3].argmax(1)
    noise = torch.randint(3, (900,), generator=generator)
    train = partial(train_probe, num_classes=3, strengths=(1e-4, 1e-2), max_iterations=50)
    found, nothing = (train(*examples_of(x, y)) for y in (planted, noise))
    assert found.test > 0.9 and found.train > 0.95 and nothing.test < 0.42
    assert train(*examples_of(x, planted)) == found
    assert train(*examples_of(torch.ones(900, 4), noise)).test == pytest.approx(
        float((noise[600:] == noise[:300].bincount().argmax()).double().mean())
    )


def test_the_fit_is_the_minimum():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(80, 4, generator=generator).double(), torch.randint(3, (80,), generator=generator)
    table = fit(Examples(x, y), 0.1, 200, x.new_zeros(5, 3))
    probabilities = scores(table, x).softmax(1) - torch.nn.functional.one_hot(y, 3)
    assert (x.T @ probabilities / 80 + 0.1 * table[:-1]).abs().max() < 1e-3
    assert probabilities.mean(0).abs().max() < 1e-3


def test_the_interval_is_one_over_sentences():
    """Against a bootstrap over sentences, whose words are right or wrong together."""
    random = np.random.default_rng(0)
    sentence = np.sort(random.integers(300, size=3000))
    chance = random.beta(1, 1, size=300)[sentence]
    right = random.random(3000) < chance
    words = [right[sentence == one] for one in range(300)]
    drawn = (np.concatenate([words[one] for one in random.integers(300, size=300)]).mean() for _ in range(2000))
    low, high = np.percentile(list(drawn), [2.5, 97.5])
    share = right.mean()
    found, of_words = half_interval(right, sentence), half_interval(right, None)
    assert found == pytest.approx((high - low) / 2, rel=0.08) and found > 1.5 * of_words
    assert of_words == pytest.approx(t_quantile(2999) * math.sqrt(share * (1 - share) / 2999))
    assert half_interval(right[:1], None) is half_interval(np.ones(9, bool), None) is half_interval(right, 0 * sentence) is None


# Whole runs.


@pytest.fixture(scope="module")
def probed(folder, tmp_path_factory) -> Path:
    run = shutil.copytree(folder / "tree", tmp_path_factory.mktemp("probed") / "tree")
    with pictures():
        probe_run(run, SMALL.model_copy(update={"layer": "all", "tasks": ("depth", "word_order", "pos_tag", "arc_depth")}))
    return run


def test_a_tree_model_is_probed_beside_its_baselines(probed):
    entry = json.loads((probed / "probes.json").read_text())["averaged"]
    assert list(entry["tasks"]) == ["depth", "word_order", "pos_tag", "arc_depth"] and entry["layers"] == 2
    for name, facts in entry["tasks"].items():
        kinds = ["first"] if name in ("pos_tag", "arc_depth") else ["mean", "root"]
        names = ["untrained", "trained", *(["control"] if kinds == ["first"] else [])]
        layers = [(states, layer, of) for states in names for layer in (1, 2) for of in kinds]
        assert [(one["states"], one["layer"], one["of"]) for one in facts["results"]] == [("embeddings", 0, kinds[0]), *layers]
        assert all(0 <= one["test"] <= 1 and one["l2"] in SMALL.l2 for one in facts["results"])
        assert sum(facts["classes"].values()) == facts["examples"]["train"]
    tasks, tags = entry["tasks"], entry["tasks"]["pos_tag"]
    assert tags["majority"] < 0.6 < 0.9 < tags["results"][0]["test"]  # the tag follows from the first piece
    assert (probed / "probes.averaged.png").stat().st_size > 5000
    rows = list(table_rows(entry))
    assert len(rows) == 2 * (2 + 2 + 1 + 1)
    assert all(len(values) == 4 + (of == "first") + ("±" in values) for _, _, of, values in rows)
    halves = {
        (name, one["half_interval"]) for name, facts in tasks.items() for one in facts["results"] if one["states"] == "trained"
    }
    assert halves == {(name, values.get("±")) for name, _, _, values in rows} and len(halves) > 2
    lines = format_probes("averaged", entry).split("\n")
    assert len(lines) == 2 + len(rows) and lines[1].split()[-3:] == ["trained", "±", "control"]
    assert entry["layers"] == 2 and " last " not in "".join(lines[2:])
    of_one = format_probes("averaged", {**entry, "layers": 1}).split("\n")[2:]  # as those of a pretrained encoder
    assert all(line.split().count("last") == 1 for line in of_one)


def test_a_word_has_the_same_random_label_wherever_it_stands(folder):
    """The slow oracle: the control labels of pos_tag are those of a dictionary, and of words that the parsed shards name."""
    task = build_probe_task("pos_tag", {split: inputs_of(folder, split) for split in ("train", "valid", "test")})
    labels: dict[str, set[int]] = {}
    for split in ("train", "valid", "test"):
        inputs = inputs_of(folder, split)
        texts = []
        for shard in SplitShards(folder / "data" / "parsed", split):
            texts += [row for row in shard.rows() if row["example_id"] in inputs.sentences.example_ids]
        words = [text for row in sorted(texts, key=lambda row: row["example_id"]) for text in row["words"]["text"]]
        chosen = [words[word] for word in inputs.words.tolist()]
        found = task.control_labels(split, 1)
        assert task.forms[split] == chosen and len(found) == len(chosen) == len(task.labels[split])
        for text, label in zip(chosen, found.tolist(), strict=True):
            labels.setdefault(text, set()).add(label)
    assert len(labels) == NUM_WORDS and all(len(one) == 1 for one in labels.values())
    assert any(task.control_labels("train", 1) != task.control_labels("train", 2))


def test_random_labels_are_as_frequent_as_those_of_train():
    forms = [f"w{number}" for number in range(5000)]
    task = ProbeTask("pos_tag", ["A", "B", "C"], {}, {"train": np.repeat([0, 1, 2], [6, 3, 1])}, {"test": forms})
    shares = np.bincount(task.control_labels("test", 1), minlength=3) / 5000
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 0.03  # four standard errors
    other = replace(task, name="phrase").control_labels("test", 1)
    assert 0.4 < (other == task.control_labels("test", 1)).mean() < 0.52  # 0.46 if they are independent


def test_the_control_is_the_probe_of_the_random_labels_on_the_trained_states(folder, probed):
    """States that name the word have no selectivity, those that name only its tag have some."""
    splits = {
        split: inputs_of(folder, split, TREES, sentences=count, words=words)
        for split, count, words in (("train", 60, 150), ("valid", 20, 60), ("test", 20, 60))
    }
    task, model = build_probe_task("pos_tag", splits), load_model(probed).model
    labels = {split: torch.from_numpy(task.control_labels(split, 1)) for split in splits}

    def score(states: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
        return train_probe(*(Examples(states[split], wanted[split]) for split in splits), 3, SMALL.l2, SMALL.max_iterations).test

    states = {split: collect_states(model, one, [2], "first", lambda count: None)[2].words for split, one in splits.items()}
    results = json.loads((probed / "probes.json").read_text())["averaged"]["tasks"]["pos_tag"]["results"]
    assert [one["test"] for one in results if one["states"] == "control" and one["layer"] == 2] == [score(states, labels)]
    gold = {split: torch.from_numpy(found) for split, found in task.labels.items()}
    known = {form: number for number, form in enumerate(sorted(set(task.forms["train"])))}
    names = {s: torch.eye(len(known))[[known[form] for form in forms]] for s, forms in task.forms.items()}
    tags = {split: torch.eye(3)[found] for split, found in gold.items()}
    assert score(names, gold) == score(names, labels) == 1
    assert score(tags, gold) == 1 and score(tags, labels) < 0.8


def test_probes_of_earlier_versions_get_their_controls(probed, tmp_path):
    run = shutil.copytree(probed, tmp_path / "run")
    wanted = json.loads((run / "probes.json").read_text())
    earlier = deepcopy(wanted)
    assert len(earlier["averaged"].pop("steps")) == 1
    for facts in earlier["averaged"]["tasks"].values():
        facts["results"] = [one for one in facts["results"] if one["states"] != "control"]
    (run / "probes.json").write_text(json.dumps(earlier))
    probe_run(run, SMALL.model_copy(update={"layer": "all", "tasks": tuple(wanted["averaged"]["tasks"])}))
    assert json.loads((run / "probes.json").read_text()) == wanted


def test_killed_at_any_probe_the_same_command_ends_in_the_same_bytes(folder, copied, monkeypatch, capsys):
    settings = SMALL.model_copy(update={"tasks": ("length", "deprel")})
    expected = copied("plain")
    probe_run(expected, settings)
    run = Path(shutil.copytree(folder / "plain", expected.parent / "killed"))
    real, calls = probing.train_probe, []

    def train(*args):
        calls.append(args)
        if len(calls) in (2, 5, 10):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(probing, "train_probe", train)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            probe_run(run, settings)
    probe_run(run, settings)
    assert len(calls) == 3 + 4 + 2
    assert (run / "probes.json").read_bytes() == (expected / "probes.json").read_bytes()
    probe_run(run, settings)
    assert len(calls) == 9  # nothing is trained again
    probe_run(run, settings.model_copy(update={"word_state": "mean", "tasks": ("length",)}))
    assert len(calls) == 9 and "replaces" not in capsys.readouterr().err
    kept = (run / "probes.json").read_bytes()
    other = settings.model_copy(update={"seed": 2, "tasks": ("length",)})
    with pytest.raises(KeyboardInterrupt):
        probe_run(run, other)
    assert (run / "probes.json").read_bytes() == kept  # until the first probe of the other seed
    probe_run(run, other)
    note = f"note: {run / 'probes.json'}, averaged: the first new probe replaces 7 results of other settings or data "
    assert capsys.readouterr().err.count(f"{note}(settings.seed: 1 -> 2); copy the file to keep them\n") == 2
    entry = json.loads((run / "probes.json").read_text())["averaged"]
    assert len(calls) == 13 and list(entry["tasks"]) == ["length"] and entry["settings"]["seed"] == 2


def test_other_checkpoints_and_classifiers_have_entries_of_their_own(copied):
    run = copied("words")
    assert probe_run(run, SMALL.model_copy(update={"tasks": ("phrase",)}))[0] == "averaged"
    name, entry = probe_run(run, SMALL.model_copy(update={"tasks": ("phrase",), "checkpoint": "1", "word_state": "mean"}))
    assert name == "step_00000001" and [one["of"] for one in entry["tasks"]["phrase"]["results"]] == ["mean"] * 4
    assert set(json.loads((run / "probes.json").read_text())) == {"averaged", name}


def test_probes_of_other_tasks_at_the_same_time_are_kept(copied, tmp_path, monkeypatch):
    """Another command probes the same model when this one has trained its first probe."""
    run, real, begun = copied("tree"), probing.train_probe, []
    both = SMALL.model_copy(update={"tasks": ("depth", "length")})
    expected = probe_run(Path(shutil.copytree(run, tmp_path / "expected")), both)[1]["tasks"]

    def train(*args):
        if not begun:
            begun.append(True)
            probe_run(run, SMALL.model_copy(update={"tasks": ("depth",)}))
        return real(*args)

    monkeypatch.setattr(probing, "train_probe", train)
    entry = probe_run(run, SMALL.model_copy(update={"tasks": ("length",)}))[1]
    assert begun and entry == json.loads((run / "probes.json").read_text())["averaged"]
    assert entry["tasks"] == expected


def test_probes_of_another_checkpoint_at_the_same_time_are_kept(copied, monkeypatch):
    run, real = copied("plain"), probing.train_probe
    entry = {"settings": {}, "data": {}, "tasks": {}}

    def train(*args):
        add_entry(run / "probes.json", "of another command", entry)
        return real(*args)

    monkeypatch.setattr(probing, "train_probe", train)
    probe_run(run, SMALL.model_copy(update={"tasks": ("length",)}))
    assert json.loads((run / "probes.json").read_text())["of another command"] == entry


def test_baselines_stand_beside_the_same_state():
    found = [("embeddings", 0, "first", 0.1), ("embeddings", 0, "mean", 0.2), ("untrained", 2, "mean", 0.6)]
    found += [("trained", 2, of, test) for of, test in (("first", 0.3), ("mean", 0.4), ("root", 0.5))]
    results = [dict(zip(("states", "layer", "of", "test"), one, strict=True)) for one in found]
    rows = {of: values for *_, of, values in table_rows({"tasks": {"phrase": {"majority": 0.0, "results": results}}})}
    assert {of: values["embeddings"] for of, values in rows.items()} == {"first": 0.1, "mean": 0.2, "root": 0.2}
    assert [values.get("untrained") for values in rows.values()] == [None, 0.6, None]


def test_a_task_of_one_class_is_said_to_be_none(folder, copied, tmp_path):
    data, splits = tmp_path / "flat", {}
    shutil.copytree(folder / "data" / "encoded", data / "encoded")
    for seed, (split, count) in enumerate((("train", 120), ("valid", 30), ("test", 30))):
        random = np.random.default_rng(seed)
        splits[split] = [make_example(number, random)[0] for number in range(count)]
        for row in splits[split]:
            row["trees"] = [f"(S {' '.join(f'(A {word})' for word in row['words']['text'])})"]
    index = json.loads((data / "encoded" / "index.json").read_text())
    index["parsed_fingerprint"] = write_parsed(data, splits, arcs=True)
    (data / "encoded" / "index.json").write_text(json.dumps(index))
    name, entry = probe_run(copied("plain"), SMALL.model_copy(update={"tasks": ("depth",), "data": data}))
    assert entry["tasks"]["depth"]["results"] == [] and "nothing to predict: one class" in format_probes(name, entry)


def test_sentences_of_test_that_are_in_train_too_are_counted(copied, tmp_path, capsys):
    data = write_probe_data(tmp_path / "data", train=90, alike=True)
    settings = SMALL.model_copy(update={"tasks": ("length",), "data": data, "train_sentences": 88, "eval_sentences": 14})
    probe_run(copied("plain"), settings)
    assert "note: 14 of 14 sentences of test are also among those of train, which makes" in capsys.readouterr().err


def test_sentences_with_a_tag_are_counted(copied, tmp_path, capsys):
    data = write_probe_data(tmp_path / "data", train=90)
    settings = SMALL.model_copy(update={"tasks": ("length",), "data": data, "train_sentences": 88, "eval_sentences": 14})
    path = data / "encoded" / "index.json"
    index = json.loads(path.read_text())
    shards = [shard for split in ("train", "valid", "test") for shard in SplitShards(data / "parsed", split)]
    parsed = [shard.row(row) for shard in shards for row in range(len(shard))]
    first, run = parsed[0]["words"]["text"][0], copied("plain")
    for tags in (["<a>"], [first]):
        index["parser_settings"] = {**index.get("parser_settings", {}), "tags": tags}
        path.write_text(json.dumps(index))
        probe_run(run, settings)
        told = capsys.readouterr().err
        assert ("begin with a tag" in told) == (tags == [first])
    count = int(re.search(r"note: (\d+) of 116 sentences begin with a tag", told)[1])
    assert 0 < count <= sum(row["words"]["text"][0] == first for row in parsed)


def test_the_workflow_prints_a_table_and_says_what_is_wrong(folder, copied, tmp_path, capsys):
    main = main_of("probe.py")
    run = copied("plain")
    small = ["train_sentences=30", "eval_sentences=10", "train_words=50", "eval_words=20", "max_iterations=3", "l2=[0.1]"]
    main(["--out", str(run), "tasks=[length]", *small])
    facts = capsys.readouterr().out
    assert "majority" in facts and "length" in facts and str(run / "probes.json") in facts
    shutil.copytree(folder / "data" / "encoded", tmp_path / "bare" / "encoded")
    no_arcs = write_probe_data(tmp_path / "no_arcs", train=9, valid=3, test=3, columns=("leaves", "nodes", "spans", "tgt_pieces"))
    for overrides, message in (
        (["layer=3"], "layer must be last, all or at most 2, but is 3: the encoder has 2 layers"),
        (["tasks=[]"], "tasks"),
        (["tasks=[colour]"], "tasks.0"),
        (["l2=[-1]"], "must be numbers of at least 0"),
        ([f"data={tmp_path / 'bare'}"], "bare/parsed/index.json is missing; run tree-attention preprocess to the end"),
        ([f"data={no_arcs}", "tasks=[deprel]"], "tasks: deprel need the arcs between words, but .* has none"),
        ([f"data={tmp_path / 'gone'}"], "gone is not a folder; give a data set of tree-attention preprocess"),
        (["checkpoint=7"], "is missing; train to the end, or choose a step as checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            main(["--out", str(run), *overrides])
    with pytest.raises(UserError, match="is not a run"):
        main(["--out", str(tmp_path)])
    with pytest.raises(UserError, match="give --out RUN"):
        main([])
    (run / "probes.json").write_text("[]")
    with pytest.raises(UserError, match="probes.json must hold a JSON object"):
        main(["--out", str(run), *small])
    tasks = {"length": {"classes": {}, "examples": {}, "majority": math.nan, "results": []}}
    (run / "probes.json").write_text(json.dumps({"averaged": {"settings": {}, "data": {}, "tasks": tasks}}))
    with pytest.raises(UserError, match="probes.json.*majority.*finite"):
        read_probes(run)


def test_probes_that_no_sentence_is_left_for_are_refused(folder):
    with pytest.raises(UserError, match="has no sentence of test to probe: a sentence must have at most 1 leaves"):
        choose_sentences(folder / "data", "test", 5, 1, 1)


def test_a_report_shows_probes(folder, probed, tmp_path):
    shutil.copytree(folder / "plain", tmp_path / "plain")
    settings = ReportSettings(runs=(str(probed), str(tmp_path / "plain")), sentences=0)
    write_report(settings, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    entry = json.loads((probed / "probes.json").read_text())["averaged"]
    assert json.loads((tmp_path / "report" / "report.json").read_text())["probes"] == {"tree": entry}
    (root,) = (values for task, layer, of, values in table_rows(entry) if (task, layer, of) == ("depth", 2, "root"))
    shown = "".join(f'<td class="n">{100 * root[name]:.2f}</td>' for name in COLUMNS[:4])
    assert shown in page and 'id="probes"' in page and (tmp_path / "report" / "figures" / "probes_2.svg").is_file()
    assert f"weights {entry['weights_sha256'][:8]} (averaged)" in page and "stale" not in page


def test_a_report_marks_probes_of_earlier_weights(probed, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(probed, run)
    run_training(load_settings(TrainConfig, run / "config.yaml", ["max_steps=2"]), run)
    warn_of_stale_results(run)
    command = f"tree-attention probe --out {run} "
    facts = capsys.readouterr().err
    assert "probes.json, averaged is stale: the run has changed since then (weights " in facts and command in facts
    write_report(ReportSettings(runs=(str(run),), sentences=0), tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "run, stale: trained" in page and f"<code>{command}" in page
