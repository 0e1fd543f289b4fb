"""Every task on tiny data, without training: refusals, notes, sources, losses, counts, and the words for a person."""

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toydata import write_toy_data
from toylabels import NUM_CLASSES, make_rows, write_labelled
from toyruns import TINY_RUN

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource
from treenet.data.sampled import SampledSource
from treenet.tasks import base, classification
from treenet.tasks.base import TASKS, build_task, check_fits, machine_memory, task_of, vocab_sizes
from treenet.tasks.causal_lm import CausalSource
from treenet.tasks.classification import has_both_sides
from treenet.tasks.masked_lm import MaskedSource, mask_pieces
from treeproc.common.files import json_bytes, read_json
from treeproc.common.settings import UserError, load_settings
from treeproc.shards.schema import PAD_ID, SPLIT_WORD_PREFIX, UNANALYSED, UNKNOWN_LABEL
from treeproc.shards.store import read_index
from treeproc.trees.flat_trees import BINARY_PREFIX

PAIRS_OF_CLASSES = ("leaves", "nodes", "spans", "label", "arcs")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_toy_data(tmp_path_factory.mktemp("toy") / "data", train=12, valid=4, test=4, arcs=True)


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("labels") / "data", {"train": make_rows(12), "valid": make_rows(4, 1)})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Pairs of sentences with a class and a score."""
    rows = make_rows(12)
    for number, row in enumerate(rows):
        row["label"], row["score"] = number // 2 % NUM_CLASSES, 1 + number // 2 * 0.7
    columns = (*PAIRS_OF_CLASSES, "score")
    return write_labelled(tmp_path_factory.mktemp("pairs") / "data", {"train": rows}, columns=columns, pairs=True)


def task(data: Path, *overrides: str, name: str = "classification", model: str = "tree_lstm"):
    values = json.loads(json.dumps(TINY_RUN)) | {"task": name}
    values["model"] |= {"name": model}
    if name != "translation":
        del values["model"]["num_decoder_layers"]
    if name == "relatedness":
        values["optimizer"]["label_smoothing"] = 0.0
    return build_task(load_settings(TrainConfig, None, overrides, **values, data=data))


def all_tasks(data: Path) -> dict:
    models = dict(translation="transformer", causal_lm="causal_transformer", masked_lm="transformer")
    return {name: task(data, name=name, model=models.get(name, "tree_lstm")) for name in TASKS}


# Memory.


def test_the_memory_is_that_of_the_machine_or_of_its_container():
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    memory, limit = int(total[1]) * 1024, Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        memory = min(memory, int(text))
    assert machine_memory() == pytest.approx(memory, rel=0.05)


def test_weights_that_just_fit_are_allowed_and_a_byte_less_is_not(toy, monkeypatch):
    one = task(toy, name="translation", model="transformer")
    sizes = one.sizes(read_index(toy / "encoded"))
    count = sum(parameter.numel() for parameter in one.build_model(sizes).parameters())
    for copies in (1, 4):
        monkeypatch.setattr(base, "machine_memory", lambda there=4 * copies * count: there)
        assert one.count_parameters(sizes, copies) == count
        monkeypatch.setattr(base, "machine_memory", lambda there=4 * copies * count - 1: there)
        with pytest.raises(UserError, match=f"{count:,} parameters need"):
            one.count_parameters(sizes, copies)
    monkeypatch.setattr(base, "machine_memory", lambda: 4 * count)
    assert one.count_parameters(sizes) == count
    assert sum(parameter.numel() for parameter in one.build_model_that_fits(sizes).parameters()) == count
    monkeypatch.setattr(base, "machine_memory", lambda: 4 * count - 1)
    with pytest.raises(UserError, match="smaller sizes"):
        one.build_model_that_fits(sizes)
    monkeypatch.setattr(base, "machine_memory", lambda: 3 * 2**29)
    for copies, needed, what in ((1, 4, "weights"), (4, 16, "weights, gradients and Adam's two moments")):
        with pytest.raises(UserError) as caught:
            check_fits(2**30, copies)
        assert f"need {needed} GiB of memory ({what}), but this machine has 1.5 GiB" in str(caught.value)
    huge = task(toy, "model.d_ff=4611686018427387904", name="translation", model="transformer")
    with pytest.raises(UserError, match="its sizes are larger than any memory"):
        huge.count_parameters(sizes)


# What a data set must have.


@pytest.mark.parametrize(
    ("model", "index", "message"),
    [
        ("tree_lstm", {"tree_settings": {"binarize": "none"}}, "and its settings of subwords$"),
        (
            "tree_lstm",
            {"tree_settings": {"binarize": "none"}, "tokenizer": {}},
            "and subwords.tokenizer=the folder of its encoder$",
        ),
        ("tree_lstm", {"tree_settings": {"binarize": "right"}}, None),
        ("tree_lstm", {"tree_settings": {}}, None),
        ("tree_lstm", {}, None),
        ("tree_transformer", {"tree_settings": {"binarize": "none"}}, None),
        ("child_sum_tree_lstm", {"tree_settings": {"tree_source": "random"}}, "has random trees, but the arcs of the parser"),
        ("child_sum_tree_lstm", {"tree_settings": {"tree_source": "random"}, "columns": ["arcs"]}, "not a control"),
        ("child_sum_tree_lstm", {"tree_settings": {"tree_source": "random"}, "columns": ["leaves"]}, None),
        ("child_sum_tree_lstm", {"tree_settings": {"tree_source": "parsed"}, "columns": ["arcs"]}, None),
        ("child_sum_tree_lstm", {"tree_settings": {"tree_source": "dependencies"}}, None),
        ("child_sum_tree_lstm", {"tree_settings": {}}, None),
        ("child_sum_tree_lstm", {}, None),
        ("tree_lstm", {"tree_settings": {"tree_source": "random"}}, None),
    ],
)
def test_trees_that_do_not_fit_the_encoder_are_refused(labels, model, index, message):
    one = task(labels, model=model)
    if message is None:
        base.check_structure(one.config, index, one.encoder)
    else:
        with pytest.raises(UserError, match=message):
            base.check_structure(one.config, index, one.encoder)


@pytest.mark.parametrize(
    ("names", "informative"),
    [
        (["NP", "VP"], True),
        (["NP"], False),
        ([], False),
        ([UNKNOWN_LABEL, "NP"], False),
        ([UNANALYSED, "NP"], False),
        ([SPLIT_WORD_PREFIX, SPLIT_WORD_PREFIX + "A", BINARY_PREFIX + "B", "NP"], False),
        ([UNKNOWN_LABEL, UNANALYSED, "NP", "VP"], True),
    ],
)
def test_a_list_of_labels_says_something_if_two_real_ones_differ(tmp_path, names, informative):
    (tmp_path / "encoded" / "vocab").mkdir(parents=True)
    (tmp_path / "encoded" / "vocab" / "labels.txt").write_text("".join(f"{name}\n" for name in names))
    assert base._says_anything(tmp_path, "labels") is informative


def test_a_grammar_reads_no_flat_trees_with_nodes_of_words(toy):
    one, index = task(toy, name="causal_lm", model="transformer_grammar"), read_index(toy / "encoded")
    for source, is_refused in (("flat", False), ("flat_tags", True), ("parsed", False)):
        given = index | {"tree_settings": {"tree_source": source}}
        with pytest.raises(UserError, match="choose a data set of tree.tree_source=flat$") if is_refused else nullcontext():
            one.check(given)


def test_texts_that_are_read_in_windows_are_counted_in_both_splits(tmp_path, monkeypatch):
    """An encoder of at most 5 positions. Training leaves out texts of more than 7 pieces; a validation does not."""
    leaves = {"train": [3, 5, 6, 7, 8, 5], "valid": [5, 6, 9, 5], "test": [9]}
    rows = {split: [shortened(length) for length in lengths] for split, lengths in leaves.items()}
    data = write_labelled(tmp_path / "data", rows)
    index = json.loads((data / "encoded" / "index.json").read_text())
    for record, longest in zip(index["shards"], (6, 8, 6, 9, 9, 0), strict=True):  # of two shards for each split
        record["longest"] = {"leaves": longest}
    (data / "encoded" / "index.json").write_text(json.dumps(index))
    one = task(data, "batch.max_leaves=7", model="transformer")
    sizes = {base.PRETRAINED: {}}

    def told(most, sizes=sizes) -> list[str]:
        monkeypatch.setattr(base, "PretrainedLeaves", lambda facts, width: SimpleNamespace(most_leaves=most))
        return base.describe_windows(one.config, sizes)

    assert told(5) == ["2 of 6 texts of train and 2 of 4 texts of valid have more than 5 pieces, and are read in windows"]
    assert told(7) == ["1 of 4 texts of valid have more than 7 pieces, and are read in windows"]
    assert told(9) == told(None) == told(5, {}) == []
    # A pair counts as twice its longer text: with 14, training leaves out that of 8 leaves, and so the pair of it and 5.
    (data / "encoded" / "index.json").write_text(json.dumps(index | {"pairs": True}))
    one = task(data, "batch.max_leaves=14", model="transformer")
    assert told(4)[0].startswith("3 of 6 texts of train and 4 of 4 texts of valid")


def shortened(length: int) -> dict:
    """A row of so many leaves."""
    random = np.random.default_rng(length)
    while True:
        [row] = make_rows(1, int(random.integers(10**6)))
        if len(row["leaves"]["piece"]) == length:
            return row


# Settings without effect, and words.


def test_settings_of_other_tasks_are_told(labels, toy):
    everything = ["classifier.pair_hidden=3", "masked_lm.rate=0.3", "decoding.beam_size=9", "model.recurrent.directions=forward"]
    expected = {
        "translation": ["classifier", "masked_lm"],
        "classification": ["masked_lm", "decoding", "classifier.pair_hidden"],
        "relatedness": ["masked_lm", "decoding"],
        "masked_lm": ["classifier", "decoding"],
        "causal_lm": ["classifier", "masked_lm", "decoding"],
    }
    models = dict(translation="transformer", causal_lm="causal_transformer", masked_lm="transformer")
    for name, unread in expected.items():
        one = task(labels, *everything, name=name, model=models.get(name, "tree_lstm"))
        found = [key for key in one.unread_settings({}) if not key.startswith("model.")]
        assert found == unread, name
        assert "model.recurrent" in ",".join(one.unread_settings({}))
        model = one.config.model.name
        [note] = [line for line in one.notes({"num_classes": 3}) if "does not read this" in line]
        assert note.startswith(unread[0]) and note.endswith(
            f": set, but task = {name} with model.name = {model} does not read this"
        )
    silent = task(labels, name="masked_lm", model="transformer")
    assert silent.unread_settings({}) == silent.notes({}) == []


@pytest.mark.parametrize(
    ("model", "overrides", "index", "unread"),
    [
        ("relatedness", ["split_words=node"], {}, ["split_words"]),
        ("relatedness", ["pair_hidden=3"], {}, []),
        ("tree_transformer", ["split_words=node"], {}, []),
        ("tree_transformer", ["split_words=node", "supervision=root"], {}, ["split_words"]),
        ("tree_transformer", ["split_words=node"], {"pairs": True}, ["split_words"]),
        ("transformer", ["split_words=node"], {}, ["split_words"]),
        ("child_sum_tree_lstm", ["split_words=node"], {}, ["split_words"]),
        ("tree_transformer", ["pair_hidden=3", "pair_features=ordered"], {}, ["pair_hidden", "pair_features"]),
        ("tree_transformer", ["pair_hidden=3", "pair_features=ordered"], {"pairs": True}, []),
        ("tree_transformer", ["split_words=pieces", "pair_hidden=50"], {}, []),
    ],
)
def test_settings_of_classifiers_without_effect_are_told(labels, model, overrides, index, unread):
    name, model = ("relatedness", "tree_lstm") if model == "relatedness" else ("classification", model)
    one = task(labels, *(f"classifier.{override}" for override in overrides), name=name, model=model)
    found = [key for key in one.unread_settings(index) if not key.startswith("model.")]
    assert found == [f"classifier.{name}" for name in unread]


def test_a_neutral_class_has_classes_on_both_sides(labels):
    assert [[has_both_sides(neutral, count) for neutral in range(count)] for count in (1, 2, 3, 4)] == [
        [False], [False, False], [False, True, False], [False, True, True, False],
    ]  # fmt: skip
    for neutral, told in ((None, ""), (1, "0 against 2, without 1"), (0, "none is below it"), (2, "none is above it")):
        one = task(labels, f"classifier.neutral_class={json.dumps(neutral)}", model="tree_transformer")
        notes = one.notes({"num_classes": 3})
        assert len(notes) == bool(told) and all(told in note for note in notes)
    one = task(labels, "classifier.neutral_class=3", model="tree_transformer")
    [note] = one.notes({"num_classes": 5, "classes": list("12345")})
    assert note == "classifier.neutral_class = 3: two classes: 1, 2, 3 against 5, without 4"


def test_what_a_person_is_told_of_a_task(toy, tmp_path, monkeypatch):
    line = {"nll": 1.23456, "perplexity": 3.456, "accuracy": 0.87654, "pearson": 0.123456, "mse": 1.5, "bleu": 12.345}
    nll, score = ("nll 1.235, perplexity 3.46", "1.235"), [("score", "evaluate", "")]
    of_lm = [("score", "score-lm", "")]
    files = " input=FILE output=FILE"
    expected = {
        "translation": (nll, [*score, ("translate", "translate", files)], 1.23456, 2),
        "classification": (("accuracy 87.65%, nll 1.235", "87.65%"), [("classify text", "classify", files)], 1 - 0.87654, 8),
        "relatedness": (("Pearson 0.1235, squared error 1.500", "0.1235"), [], 1 - 0.123456, 8),
        "masked_lm": (nll, of_lm, 1.23456, 2),
        "causal_lm": (nll, of_lm, 1.23456, 2),
    }
    given = {"parser_settings": {"name": "given", "given_labels": "phrase"}, "tree_settings": {"tree_source": "dependencies"}}
    for index, commands in (
        ({"parser_settings": {"name": "given"}}, [("classify text", "classify", " input=FILE trees=FILE output=FILE")]),
        (given, []),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(classification, "read_index", lambda folder, index=index: index)
            assert task(toy).next_commands() == commands
    for name, one in all_tasks(toy).items():
        words, commands, criterion, sums = expected[name]
        assert (one.describe(line), one.describe_best(line)) == words
        assert one.next_commands() == commands and one.num_sums == sums and one.auxiliary_loss == ""
        assert one.criterion(line) == pytest.approx(criterion) and one.is_judged(line)
        assert one.ties_embeddings == (name in ("translation", "masked_lm", "causal_lm"))
        assert type(one) is task_of(name)
        assert name == "masked_lm" or one.choose_targets(batch := object(), 1) is batch
        facts = one.checkpoint_facts(line)
        assert facts == ({"valid_criterion": pytest.approx(criterion)} if one.score else {}) and one.checkpoint_facts(None) == {}
        for value in (math.nan, math.inf):
            broken = line | {"nll": value, "pearson": math.nan, "accuracy": 0.3}
            assert not math.isfinite(one.criterion(broken))
            assert one.checkpoint_facts(broken) == ({"valid_criterion": None} if one.score else {})
    parse = task(toy, name="masked_lm", model="constituent_transformer").next_commands()
    assert parse == [*of_lm, ("parse", "unsupervised-parse", "")]
    index = read_json(toy / "encoded" / "index.json")
    for splits, split in (("train valid", [" split=valid"]), ("train", [])):  # as BabyLM, which has no test
        data = tmp_path / splits / "encoded"
        data.mkdir(parents=True)
        (data / "index.json").write_bytes(json_bytes(index | {"totals": {split: {} for split in splits.split()}}))
        found = task(data.parent, name="masked_lm", model="constituent_transformer").next_commands()
        scored = [("score", "score-lm"), ("parse", "unsupervised-parse")]
        assert found == [(*one, option) for one in scored for option in split]
    regular = task(toy, "model.tree_reg.weight=0.5", name="causal_lm", model="causal_transformer")
    assert (regular.auxiliary_loss, regular.num_sums) == ("tree_reg", 3)
    assert task(toy, name="causal_lm", model="transformer_grammar").num_sums == 2


@pytest.mark.parametrize("missing", ["check", "open", "build_model", "score_predictions"])
def test_a_task_that_lacks_a_part_is_no_task(toy, missing):
    parts = {name: lambda self: None for name in ("check", "open", "build_model", "score_predictions")}
    kind = base.PredictionTask if missing == "score_predictions" else base.Task
    type("Whole", (kind,), parts)(task(toy).config)
    del parts[missing]
    with pytest.raises(TypeError, match=missing):
        type("Lacking", (kind,), parts)(task(toy).config)


def test_sizes_of_checkpoints_may_be_older_than_tags():
    older = vocab_sizes({"num_pieces": 9, "num_labels": 3})
    assert (older.pieces, older.labels, older.pos_tags, older.deprels) == (9, 3, 0, 0)
    found = vocab_sizes({"num_pieces": 9, "num_labels": 3, "num_pos_tags": 4, "num_deprels": 5})
    assert (found.pieces, found.labels, found.pos_tags, found.deprels) == (9, 3, 4, 5)


def test_sizes_are_those_of_the_data_set(toy, labels, pairs):
    assert task(toy, name="translation", model="transformer").sizes(read_index(toy / "encoded")) == {
        "num_pieces": read_index(toy / "encoded")["num_pieces"], "num_labels": 5, "num_pos_tags": 1, "num_deprels": 3,
    }  # fmt: skip
    assert task(labels).sizes(read_index(labels / "encoded")) == {"num_pieces": 24, "num_labels": 5, "num_classes": 3}
    assert task(pairs).sizes(read_index(pairs / "encoded"))["pairs"] is True


# Translation.


@pytest.mark.parametrize(
    ("overrides", "model", "index", "message"),
    [
        ([], "transformer", {}, None),
        ([], "transformer", {"columns": ["leaves", "nodes"]}, r"no target side \(its columns: leaves, nodes\)"),
        ([], "transformer", {"columns": ["tgt_pieces"]}, None),
        ([], "transformer", {"subword_settings": {"joint": False}}, "a vocabulary for each side"),
        ([], "transformer", {"subword_settings": {"joint": True}}, None),
        ([], "transformer", {"subword_settings": {}}, None),
        (["valid_metric=bleu"], "transformer", {"totals": {"train": {}}}, "valid_metric=bleu needs a validation split"),
        (["valid_metric=bleu"], "transformer", {"totals": {"train": {}, "valid": {}}}, None),
        ([], "transformer", {"totals": {"train": {}}}, None),
        (["sampling.word_dropout=0.1"], "child_sum_tree2seq", {}, "set it to 0, and use sampling.word_mask instead"),
        (["sampling.word_mask=0.1"], "child_sum_tree2seq", {}, None),
        (["sampling.word_dropout=0.1"], "transformer", {}, None),
        ([], "tree2seq", {"tree_settings": {"binarize": "none"}}, "reads binary ones"),
    ],
)
def test_data_that_a_translation_model_cannot_learn_from_are_refused(toy, overrides, model, index, message):
    one = task(toy, *overrides, name="translation", model=model)
    if message is None:
        one.check(index)
    else:
        with pytest.raises(UserError, match=message):
            one.check(index)


def test_other_forms_of_examples_are_for_training_alone(toy):
    one = task(toy, "sampling.word_mask=0.2", name="translation", model="transformer")
    assert type(one.open("train", training=True)) is SampledSource
    assert type(one.open("train")) is type(one.open("valid", training=False)) is ExampleSource
    assert type(task(toy, name="translation", model="transformer").open("train", training=True)) is ExampleSource


def test_translations_are_judged_by_the_metric_if_they_have_it(toy):
    task_of_bleu = task(toy, "valid_metric=bleu", name="translation", model="transformer")
    line = {"nll": 1.0, "perplexity": 2.0, "bleu": 12.25}
    without = {"nll": 1.0, "perplexity": 2.0}
    assert task_of_bleu.criterion(line) == 87.75 and math.isnan(task_of_bleu.criterion(without))
    assert task_of_bleu.is_judged(line) and not task_of_bleu.is_judged(without)
    assert task_of_bleu.checkpoint_facts(line) == {"valid_criterion": 87.75}
    assert task_of_bleu.checkpoint_facts(without) == task_of_bleu.checkpoint_facts(None) == {"valid_criterion": None}
    assert task_of_bleu.describe(line) == "nll 1.000, perplexity 2.00, BLEU 12.25"
    assert task_of_bleu.describe(without) == "nll 1.000, perplexity 2.00"
    assert task_of_bleu.describe_best(line) == "12.25"
    ter = task(toy, "valid_metric=ter", name="translation", model="transformer")
    assert ter.criterion({"ter": 30.0}) == 30.0
    assert task(toy, name="translation", model="transformer").checkpoint_facts(line) == {}
    granular = ["model.num_heads=4", "model.phrases.ngrams=[2]", "model.phrases.levels=[1,2]", "model.phrases.chunk_size=2"]
    one = task(toy, *granular, name="translation", model="multi_granularity")
    assert one.auxiliary_loss and one.num_sums == 3


# Language models.


def test_masked_pieces_of_validations_are_always_the_same(toy):
    one = task(toy, "masked_lm.rate=0.5", name="masked_lm", model="transformer")
    source = one.open("valid")
    assert type(source) is MaskedSource and one.output == "forward"
    batch, num_pieces = source.batch([0, 1, 2]), read_index(toy / "encoded")["num_pieces"]
    assert (batch.tgt_in == PAD_ID).all() and (batch.tgt_out == PAD_ID).all() and batch.tgt_in.shape == batch.leaf_pieces.shape
    for given, seed in ((None, 0), (0, 0), (7, 7)):
        found, expected = one.choose_targets(batch, given), mask_pieces(batch, one.config.masked_lm, num_pieces, seed)
        assert torch.equal(found.tgt_out, expected.tgt_out) and torch.equal(found.leaf_pieces, expected.leaf_pieces)
    assert one.counted_targets(found).tolist() == (found.tgt_out.flatten() != PAD_ID).nonzero().flatten().tolist()
    assert (found.tgt_out != PAD_ID).sum().item() == source.count_targets(source.lengths["leaves"][:3], None).sum()


def test_causal_targets_are_the_leaves_or_the_actions(toy):
    plain = task(toy, name="causal_lm", model="causal_transformer").open("train")
    grammar = task(toy, name="causal_lm", model="transformer_grammar").open("train")
    assert type(plain) is CausalSource
    batch, rows = plain.batch([2, 0]), ExampleSource(toy / "encoded", "train").batch([2, 0])
    for row in range(2):
        pieces = rows.leaf_pieces[row][~rows.leaf_pad_mask[row]].tolist()
        assert batch.tgt_out[row].tolist()[: len(pieces)] == pieces == batch.tgt_in[row].tolist()[1 : len(pieces) + 1]
    assert torch.equal(batch.pad_masks()[0], batch.tgt_in == PAD_ID) and len(batch.pad_masks()) == 1
    assert grammar.batch([2, 0]).tgt_in.shape[1] > batch.tgt_in.shape[1]
    assert plain.count_targets(np.array([3, 5]), np.array([9, 9])).tolist() == [4, 6]
