"""Pairs of texts with classes: the model, and a run from the files to classes of new pairs."""

import json

import numpy as np
import pytest
import torch
from commands import run_here
from pydantic import ValidationError
from safetensors.torch import load_file
from test_classify import TINY
from tiny_pretrained import write_encoder
from toylabels import NUM_CLASSES, NUM_LABELS, NUM_PIECES, make_rows, write_labelled

from treenet import load_run
from treenet.config import ClassifierConfig, ModelConfig, TrainConfig
from treenet.data.labelled import PairSource
from treenet.evaluation.classify import ClassifySettings, classify_run
from treenet.extras.serving.messages import request_model
from treenet.extras.serving.sentences import load_reader
from treenet.extras.serving.settings import ServeSettings
from treenet.jobs.train_run import run_training
from treenet.models import VocabSizes, build_classifier, find_encoder
from treenet.models.composed import PairHead
from treenet.tasks.base import build_task
from treeproc.common.settings import UserError, load_settings
from treeproc.shards.store import read_index

slow = pytest.mark.slow

NAMES = ["bilstm", "child_sum_tree_lstm", "transformer", "tree_lstm", "tree_transformer"]
COLUMNS = ("leaves", "nodes", "spans", "label", "arcs")


def toy_pairs(count: int, seed: int = 0) -> list[dict]:
    """Rows of pairs: the class says whether the first sentence is longer, as long, or shorter. So a swap changes it."""
    rows = make_rows(2 * count, seed)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        one, other = (len(row["leaves"]["piece"]) for row in (first, second))
        first["label"] = second["label"] = 1 + (one > other) - (one < other)
    return rows


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A data set of pairs whose pieces may be those of the tiny pretrained encoder beside it."""
    folder = tmp_path_factory.mktemp("pairs")
    encoder = write_encoder(folder / "encoder")
    (encoder / "tokenizer.json").unlink()
    facts = {"pieces": NUM_PIECES - 4, "unknown": 1, "before": [2], "after": [3]}
    splits = {"train": toy_pairs(40), "valid": toy_pairs(12, 1), "test": toy_pairs(8, 2)}
    return write_labelled(folder / "data", splits, columns=COLUMNS, pairs=True, tokenizer=facts), encoder


def make_config(data, *overrides: str, **model: object) -> TrainConfig:
    values = json.loads(json.dumps(TINY))
    values["model"] |= model
    return load_settings(TrainConfig, None, overrides, **values, data=data)


def build(name: str, **options: object):
    torch.manual_seed(0)
    config = ModelConfig(name=name, d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, dropout=0.0)
    options = ClassifierConfig(**options)
    model = build_classifier(config, VocabSizes(NUM_PIECES, NUM_LABELS), options, NUM_CLASSES, pairs=True)
    return model.double(), find_encoder(config, "classification").reads


@pytest.mark.parametrize("ordered", [False, True])
def test_the_head_and_its_gradient_are_those_of_a_slow_composition(ordered):
    torch.manual_seed(0)
    head, states = PairHead(3, 4, 2, ordered=ordered).double(), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found, rows = head(states), []
    for left, right in ((states[0], states[1]), (states[2], states[3])):
        parts = [x * y for x, y in zip(left, right, strict=True)] + [abs(x - y) for x, y in zip(left, right, strict=True)]
        parts += [*left, *right] if ordered else []
        hidden = [
            1 / (1 + (-sum(w * x for w, x in zip(row, parts, strict=True)) - bias).exp())
            for row, bias in zip(head.compare.weight, head.compare.bias, strict=True)
        ]
        rows += [
            sum(w * h for w, h in zip(row, hidden, strict=True)) + bias
            for row, bias in zip(head.scores.weight, head.scores.bias, strict=True)
        ]
    slow = torch.stack(rows).view(2, 2)
    torch.testing.assert_close(found, slow)
    weights = torch.randn(2, 2, dtype=torch.float64)
    wanted = [states, *head.parameters()]
    gradients = (torch.autograd.grad((weights * x).sum(), wanted, retain_graph=True) for x in (found, slow))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    swapped = head(states[[1, 0, 3, 2]])
    assert torch.allclose(swapped, found) is not ordered


@slow
@pytest.mark.parametrize("name", NAMES)
def test_a_pair_does_not_see_its_batch_nor_padding_and_directions_can_be_learned(toy, name):
    model, reads = build(name)
    source = PairSource(toy[0] / "encoded", "train", reads, "label")
    together = source.batch([5, 2, 9])
    assert together.numbers.tolist() == [5, 2, 9] and len(together) == 6
    output = model(together).examples
    assert output.shape == (3, NUM_CLASSES)
    for row, pair in enumerate([5, 2, 9]):
        torch.testing.assert_close(output[row : row + 1], model(source.batch([pair])).examples, rtol=1e-12, atol=1e-12)
    together.leaf_pieces[together.leaf_pad_mask] = 7
    together.node_labels[together.node_pad_mask] = 2
    torch.testing.assert_close(model(together).examples, output, rtol=1e-12, atol=1e-12)
    model, batch = model.float(), source.batch(range(12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        loss = torch.nn.functional.cross_entropy(model(batch).examples, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(batch).examples.argmax(1) == batch.labels).all()


@slow
def test_each_side_goes_through_a_pretrained_encoder_by_itself(toy):
    data, encoder = toy
    config = make_config(data, name="pretrained", pretrained={"folder": str(encoder)})
    task, index = build_task(config), read_index(data / "encoded")
    task.check(index)
    torch.manual_seed(0)
    model, source = task.build_model(task.sizes(index)).double().eval(), task.open("train")
    together = model(source.batch([3, 1])).examples
    torch.testing.assert_close(together[1:], model(source.batch([1])).examples)
    sides = source.batch([1])
    states = model.encoder.summarize(model.encoder(sides), sides)
    torch.testing.assert_close(model.head(states), together[1:])
    together.sum().backward()
    assert model.encoder.embedding.weight.grad.abs().sum() > 0


@slow
def test_what_does_not_fit_is_refused(toy, tmp_path):
    data = toy[0]
    related = build_task(make_config(data, "task=relatedness"))
    with pytest.raises(UserError, match="has no scores .*choose a data set of format sick"):
        related.open("train")
    kept = toy_pairs(4)
    folder = write_labelled(tmp_path / "lost", {"train": kept[:3] + kept[4:]}, columns=COLUMNS, pairs=True)
    with pytest.raises(UserError, match="a filter dropped one sentence of a pair of split train"):
        build_task(make_config(folder)).open("train")


# From files to classes.

NOUNS = ("dog", "cat", "bird", "horse", "child")


def lines_of(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Class and two texts: whether the animal is the same."""
    rows = []
    for i in range(seed, seed + count):
        first, second = NOUNS[i % 5], NOUNS[i % 5 if i % 2 else (i + 1 + i // 10 % 4) % 5]
        rows.append(("same" if first == second else "other", f"The {first} sleeps.", f"We see the {second} number {i}."))
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, count, seed in (("train", 80, 0), ("valid", 20, 100), ("test", 15, 200)):
        (folder / f"{name}.tsv").write_text("".join("\t".join(line) + "\n" for line in lines_of(count, seed)))
    splits = [f"splits.{name}.source=[{folder / name}.tsv]" for name in ("train", "valid", "test")]
    settings = ["format=labelled", "labelled.second_text=b", "parser.name=words", "tree.tree_source=right"]
    settings += ["subwords.vocab_size=300", "rows_per_shard=8", "workers=0"]
    made = run_here("preprocess.py", "--out", folder / "data", *splits, *settings)
    assert made.returncode == 0, made.stderr
    assert "train: 160 sentences of pairs" in made.stdout and "classes: other 40 (50.0%), same 40 (50.0%)" in made.stdout
    run_training(make_config(folder / "data", "classifier.supervision=all_phrases"), folder / "run")
    return folder / "run"


@slow
def test_another_run_of_pairs_may_start_from_one(run, tmp_path):
    options = "classifier.supervision=all_phrases", f"init={run}", "max_steps=1", "optimizer.warmup_steps=1"
    run_training(make_config(run.parent / "data", *options), tmp_path / "next")
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "next" / "initial", run / "averaged"))
    assert mine.keys() == theirs.keys() and all(weight.equal(theirs[name]) for name, weight in mine.items())


def classify(run, tmp_path, lines: list[str], *options: str) -> tuple[list[str], str]:
    (tmp_path / "input").write_text("".join(line + "\n" for line in lines))
    done = run_here("classify.py", "--out", run, f"input={tmp_path / 'input'}", f"output={tmp_path / 'output'}", *options)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "output").read_text().splitlines(), done.stderr


@slow
def test_pairs_of_files_are_scored_and_classified(run, tmp_path):
    index = read_index(run.parent / "data" / "encoded")
    assert index["pairs"] and index["classes"] == ["other", "same"]
    done = run_here("evaluate.py", "--out", run, "split=test")
    assert done.returncode == 0 and "macro F1 (%)" in done.stdout and "predicted class (column)" in done.stdout, done.stderr
    name, scores = classify_run(run, ClassifySettings(split="test"))
    rows = [line.split("\t") for line in (run / f"predictions.{name}.tsv").read_text().splitlines()[1:]]
    pairs = lines_of(15, 200)
    assert [int(row[0]) for row in rows] == list(range(15)) and scores["num_examples"] == 15
    assert [index["classes"][int(row[1])] for row in rows] == [label for label, *_ in pairs]
    assert np.sum(scores["confusion"]) == 15
    assert scores["accuracy"] == np.mean([row[1] == row[2] for row in rows])
    lines = ["\t".join(pair[1:]) for pair in pairs]
    found, messages = classify(run, tmp_path, lines, "--json")
    assert "2 classes of pairs: other, same" in messages
    for line, text, row in zip(map(json.loads, found), lines, rows, strict=True):
        assert (line["source"], line["label"]) == (text, index["classes"][int(row[2])])
        assert list(line["probabilities"].values()) == pytest.approx([float(p) for p in row[3:]], abs=2e-6)
    alone, _ = classify(run, tmp_path, lines, "lines_at_once=1")
    assert alone == [json.loads(line)["label"] for line in found]
    model = load_run(run)
    assert [one.label for one in model.classify([pair[1:] for pair in pairs])] == alone


@slow
def test_a_table_of_pairs_comes_back_with_classes(run, tmp_path):
    pairs = lines_of(9, 200)
    expected, _ = classify(run, tmp_path, ["\t".join(pair[1:]) for pair in pairs], "--scores")
    (tmp_path / "a.csv").write_text("b,text\n" + "".join(f'{second},"{first}"\n' for _, first, second in pairs) + ",x\n")
    (tmp_path / "a.tsv").write_text("".join("\t".join(pair) + "\n" for pair in pairs))
    for name, between, labelled in (("a.csv", ",", 1), ("a.tsv", "\t", 0)):
        done = run_here("classify.py", "--out", run, f"input={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        rows, given = done.stdout.splitlines(), (tmp_path / name).read_text().splitlines()
        found = [row.removeprefix(line + between).split(between) for row, line in zip(rows, given, strict=True)][labelled:]
        assert ["\t".join(reversed(row)) for row in found[:9]] == expected and found[9:] == [["", ""]] * labelled
    done = run_here("evaluate.py", "--out", run, f"input={tmp_path / 'a.tsv'}")
    right = sum(label == one.split("\t")[1] for (label, *_), one in zip(pairs, expected, strict=True))
    assert done.stdout.splitlines()[1].split()[2:4] == ["9", f"{100 * right / 9:.2f}"], done.stderr


@slow
def test_bad_pairs_are_empty_and_harm_no_other(run, tmp_path):
    good = "The dog sleeps.\tWe see the dog."
    (expected,), _ = classify(run, tmp_path, [good])
    found, messages = classify(run, tmp_path, [good, "only one", "a\tb\tc", "\tsecond", "first\t", "a\tb\x01", good])
    assert found == [expected, "", "", "", "", "", expected]
    for number, reason in (
        (2, "expected two columns with a tab between them, but found 1 of text"),
        (3, "expected two columns with a tab between them, but found 3 of text"),
        (4, "first text: is empty"),
        (5, "second text: is empty"),
        (6, "second text: control character U+0001"),
    ):
        assert f"line {number}: {reason}" in messages
    model = load_run(run)
    with pytest.raises(UserError, match=r"lines\[1\] must be a pair of strings, as the model learned, but is 'only one'"):
        model.classify([("a", "b"), "only one"])
    with pytest.warns(UserWarning, match="line 1: second text: is empty"):
        assert model.classify([("a", "")]) == [None]
    with pytest.raises(UserError, match="no classes of phrases, because it classifies pairs of texts"):
        model.classify([("a", "b")], phrases=True)


@slow
def test_the_server_answers_pairs_as_the_command_does(run, tmp_path):
    """The request that a client sends, through the checks of the entrance, to the answer of a replica."""
    reader = load_reader(ServeSettings(), run)
    assert (reader.served.reads_pairs, reader.served.has_phrases) == (True, False)
    request = request_model(ServeSettings(line_words=6), reader.served)
    pairs = [list(pair[1:]) for pair in lines_of(5, 200)] + [["", "The dog."], ["The dog.", "a\x01"]]
    [answer] = reader.answer([request.model_validate_json(json.dumps({"lines": pairs})).question()])
    lines, expected = json.loads(answer)["lines"], classify(run, tmp_path, list(map("\t".join, pairs)), "--json")[0]
    for one, wanted in zip(lines, map(json.loads, expected), strict=True):
        assert (one["source"], one["label"], one["error"]) == (wanted["source"], wanted["label"], wanted.get("error"))
        assert one["probabilities"] == pytest.approx(wanted["probabilities"], abs=2e-6) and one["phrases"] == []
        assert (one["second_tree"] is None) == (one["error"] is not None)
    words = ["".join(leaf["piece"] for leaf in lines[0][tree]["leaves"]) for tree in ("tree", "second_tree")]
    assert [text.replace("▁", "") for text in words] == [text.replace(" ", "") for text in pairs[0]]
    for wrong, message in (
        (["The dog."], "valid array"), ([["a", "b", "c"]], "at most 2 items"), ([["a\tb", "c"]], "must not have tabs"),
        ([["a", "b c d e f g h"]], "must have at most 6 words"),
    ):  # fmt: skip
        with pytest.raises(ValidationError, match=message):
            request.model_validate_json(json.dumps({"lines": wrong}))


@slow
def test_single_texts_are_refused(run, tmp_path):
    (tmp_path / "one.tsv").write_text("same\tThe dog sleeps.\nother\tThe cat.\n")
    data = run.parent / "data"
    base = ("preprocess.py", "--out", tmp_path / "one", f"vocab_from={data}", f"splits.a.source=[{tmp_path / 'one.tsv'}]")
    done = run_here(*base, "workers=0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "expected 3 columns" in done.stderr
    done = run_here(*base, "workers=0", "labelled.second_text=null")
    assert done.returncode == 0, done.stderr
    done = run_here("evaluate.py", "--out", run, f"data={tmp_path / 'one'}", "split=a")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has single texts, but the model learned pairs of texts; choose a data set with pairs of texts" in done.stderr
