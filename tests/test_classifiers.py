"""Classifiers: what they read, independence of padding and batch, supervision, and that each can learn its sentences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from toylabels import LABELLED_COLUMNS, NUM_CLASSES, NUM_LABELS, NUM_PIECES, labelled_row, make_rows, write_labelled

from treenet import collate, read_shards
from treenet.config import BatchConfig, ClassifierConfig, ModelConfig, TrainConfig
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import hint_for_arcs
from treenet.data.labelled import NO_CLASS, LabelledSource, PhraseSource
from treenet.data.plan import BatchPlan
from treenet.layers.core import share_dropout_keys
from treenet.models import VocabSizes, build_classifier, find_encoder, names_for
from treenet.tasks.base import build_task
from treenet.tasks.classification import above_neutral, count_right, summarize_counts
from treenet.tasks.losses import label_smoothed_nll, r_drop_loss
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID, UNK_ID
from treeproc.shards.store import read_index

NAMES = [name for name in names_for("classification") if name != "pretrained"]  # of tests/test_pretrained.py
OF_PHRASES = [name for name in NAMES if name != "linearized_transformer"]  # those that learn the classes of all phrases
CASES = [*((name, "all_phrases") for name in OF_PHRASES), *((name, "root") for name in NAMES)]


def tiny_model(
    name: str, supervision: str = "all_phrases", pooling: str = "own", word_dropout: float = 0.0, **config
) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = ModelConfig(name=name, d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, **{"dropout": 0.0, **config})
    classifier = ClassifierConfig(supervision=supervision, pooling=pooling, word_dropout=word_dropout)
    return build_classifier(sizes, VocabSizes(NUM_PIECES, NUM_LABELS), classifier, NUM_CLASSES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_labelled(tmp_path_factory.mktemp("labels"), {"train": make_rows(40)})


def open_source(data, name: str, supervision: str = "all_phrases") -> LabelledSource:
    reads = find_encoder(ModelConfig(name=name), "classification").reads
    return LabelledSource(data / "encoded", "train", reads, phrases=supervision == "all_phrases")


def of_row(output, row: int, batch) -> list[torch.Tensor]:
    """The prediction of a model for an example: its class, and those of the positions that have one."""
    message = [output.examples[row]]
    return message if output.positions is None else [*message, output.positions[row][batch.position_labels[row] != NO_CLASS]]


def test_rows_of_the_library_are_the_batches_of_training(data):
    """A data set without a target side has empty targets."""
    found, expected = collate(list(read_shards(data))[:5]), ExampleSource(data / "encoded", "train").batch(range(5))
    for name in ("example_ids", "leaf_pieces", "node_labels", "tgt_in", "tgt_out"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


# Independence.


@pytest.mark.parametrize(("name", "supervision"), CASES)
def test_an_example_does_not_see_its_batch(data, name, supervision):
    model, source = tiny_model(name, supervision).double().eval(), open_source(data, name, supervision)
    rows = [7, 3, 21, 30, int(np.argmax(source.lengths["leaves"]))]
    together = source.batch(rows)
    assert together.leaf_pad_mask.any()
    output = model(together)
    for row, number in enumerate(rows):
        alone = source.batch([number])
        expected = of_row(model(alone), 0, alone)
        torch.testing.assert_close(of_row(output, row, together), expected, rtol=1e-12, atol=1e-12)


def ask(model: torch.nn.Module) -> torch.nn.Module:
    """Give attention pooling a query. It is 0 at first, as for the mean."""
    if model.pooling == "attention":
        torch.nn.init.normal_(model.query, std=4.0)
    return model


@pytest.mark.parametrize("pooling", ["own", "mean", "first", "attention"])
@pytest.mark.parametrize("name", NAMES)
def test_content_of_padding_does_not_matter(data, name, pooling):
    model, batch = ask(tiny_model(name, "root", pooling)).double().eval(), open_source(data, name, "root").batch(range(8))
    expected = model(batch).examples
    grads = torch.autograd.grad(expected.square().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)
    batch.leaf_pieces[batch.leaf_pad_mask] = 11
    batch.node_labels[batch.node_pad_mask] = 3
    torch.testing.assert_close(model(batch).examples, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_attention_pooling_follows_its_equation_in_any_batch(data, name):
    model, source = tiny_model(name, "root", "attention").double().eval(), open_source(data, name, "root")
    batch = source.batch(range(8))
    mean = tiny_model(name, "root", "mean").double().eval()  # of the same weights: the query takes no random numbers
    torch.testing.assert_close(model(batch), mean(batch), rtol=1e-12, atol=1e-12)
    ask(model)
    memory, found = model.encoder(batch), model(batch).examples
    assert memory.pad_mask.any()
    for row in range(8):
        states = [h for h, is_padding in zip(memory.states[row], memory.pad_mask[row], strict=True) if not is_padding]
        weights = [math.exp(sum(q * x for q, x in zip(model.query.tolist(), h.tolist(), strict=True)) / 16**0.5) for h in states]
        expected = model.head(sum(w * h for w, h in zip(weights, states, strict=True)) / sum(weights))
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(model(source.batch([row])).examples[0], expected, rtol=1e-10, atol=1e-10)
    found.square().sum().backward()
    assert model.query.grad.abs().max() > 0


@pytest.mark.parametrize("name", OF_PHRASES)
def test_dropped_words_are_the_unknown_piece_in_training_alone(data, name):
    model, source = tiny_model(name, word_dropout=0.4).double(), open_source(data, name)
    seen = []
    model.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].leaf_pieces))
    keys = share_dropout_keys(model)

    def pieces_read(rows: list[int]) -> torch.Tensor:
        keys.set(np.array(rows, dtype=np.uint64))
        batch = source.batch(rows)
        model(batch)
        return seen.pop().masked_fill(batch.leaf_pad_mask, PAD_ID)

    given = source.batch(range(30)).leaf_pieces
    read = pieces_read(list(range(30)))
    assert ((read == given) | (read == UNK_ID)).all()
    assert 0.3 < ((read != given).sum() / (given != PAD_ID).sum()) < 0.5
    assert pieces_read([7])[0].tolist() == read[7][: source.lengths["leaves"][7]].tolist()
    model.eval()
    assert (pieces_read(list(range(30))) == given).all()


@pytest.mark.parametrize("pooling", ["own", "attention"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_learns(data, name, pooling):
    model, batch = ask(tiny_model(name, "root", pooling)), open_source(data, name, "root").batch(range(8))
    expected = model(batch).examples
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(batch).examples
    assert output.dtype == torch.float32
    assert (output - expected).norm() < 0.1 * (expected - expected.mean(0)).norm()
    learnt = [p for p in model.parameters() if p.requires_grad]
    found, wanted = (torch.autograd.grad(one[:, 0].sum(), learnt, allow_unused=True) for one in (output, expected))
    assert [grad is None for grad in found] == [grad is None for grad in wanted]
    pairs = [(half, whole) for half, whole in zip(found, wanted, strict=True) if whole is not None and whole.norm() > 1e-4]
    assert pairs and all((half - whole).norm() < 0.2 * whole.norm() for half, whole in pairs)


# What is learned.


@pytest.mark.slow
@pytest.mark.parametrize(("name", "supervision"), CASES)
def test_every_model_learns_eight_sentences(data, name, supervision):
    model, source = tiny_model(name, supervision), open_source(data, name, supervision)
    batch = source.batch(range(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=True)  # the fastest one
    for _ in range(60):
        output = model(batch)
        logits, targets = (
            (output.examples, batch.labels) if output.positions is None else (output.positions, batch.position_labels)
        )
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=NO_CLASS)
        if loss < 0.1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(batch).examples.argmax(-1) == batch.labels).all()
    assert loss < 0.3


def reference_phrases(row: dict) -> dict[tuple[int, int], int]:
    """Class by span of every phrase of a row that has one."""
    spans = list(zip(row["spans"]["start"], row["spans"]["end"], strict=True))
    found = {(i, i + 1): c for i, c in enumerate(row["leaf_labels"]) if c >= 0}
    found |= {span: c for span, c in zip(spans, row["node_labels"], strict=True) if c >= 0}
    return found | {(0, len(row["leaves"]["piece"])): row["label"]}


def test_all_phrases_are_sequences_of_their_own(data):
    rows, source = make_rows(40), PhraseSource(data / "encoded", "train")
    batch = source.batch(range(len(source.lengths["leaves"])))
    found = {}
    for example, pieces, padding, label in zip(
        source.lengths["example_id"], batch.leaf_pieces, batch.leaf_pad_mask, batch.labels.tolist(), strict=True
    ):
        found.setdefault(int(example), []).append((tuple(pieces[~padding].tolist()), label))
    for row in rows:
        pieces = row["leaves"]["piece"]
        expected = sorted((tuple(pieces[start:end]), c) for (start, end), c in reference_phrases(row).items())
        assert sorted(found[row["example_id"]]) == expected
    assert batch.example_ids.unique().numel() == len(batch) and batch.position_labels.shape == (len(batch), 0)
    assert source.target_tokens(np.arange(7)) == 7


def test_a_share_of_the_phrases_is_one_of_the_examples(data):
    sources = PhraseSource(data / "encoded", "train"), open_source(data, "transformer")
    batch = BatchConfig(max_tokens=64, fraction=0.4)
    plans = [BatchPlan.build(s.lengths, batch, text_fingerprint="text", seed=1) for s in sources]
    chosen = [set(s.lengths["example_id"][plan.rows].tolist()) for s, plan in zip(sources, plans, strict=True)]
    assert chosen[0] == chosen[1] and 0 < len(chosen[0]) < 40


@pytest.mark.parametrize("name", ["tree_transformer", "tree_lstm", "child_sum_tree_lstm"])
def test_positions_have_the_classes_of_their_phrases(data, name):
    rows, source = make_rows(40), open_source(data, name)
    batch, counted = source.batch(range(40)), 0
    leaves = batch.leaf_pieces.shape[1]
    for b, row in enumerate(rows):
        phrases, num_leaves = reference_phrases(row), len(row["leaves"]["piece"])
        if name == "child_sum_tree_lstm":
            spans = [tuple(span) for span in batch.structure.span[b, :num_leaves].tolist()]
            expected = [phrases.get(span, NO_CLASS) for span in spans]
            expected[row["arcs"]["governor"].index(-1)] = row["label"]
            places = list(range(num_leaves))
        else:
            expected = row["leaf_labels"] + [row["label"], *row["node_labels"][1:]]
            places = [*range(num_leaves), *range(leaves, leaves + len(row["node_labels"]))]
        assert batch.position_labels[b, places].tolist() == expected
        counted += sum(c != NO_CLASS for c in expected)
        assert source.target_tokens(np.array([b])) == sum(c != NO_CLASS for c in expected)
    assert counted == source.target_tokens(np.arange(40)) == int((batch.position_labels != NO_CLASS).sum())


def test_a_word_of_several_pieces_is_one_phrase(tmp_path):
    row = {
        "example_id": 0,
        "leaves": {"piece": [5, 6, 7], "word_index": [0, 0, 1], "pos_tag": [0] * 3},
        "nodes": {"label": [1, 2], "parent": [-1, 0]},
        "spans": {"start": [0, 0], "end": [3, 2], "subtree_end": [2, 2]},
        "label": 2,
        "node_labels": [2, -1],
        "leaf_labels": [1, 1, 0],
        "arcs": {"governor": [1, -1], "deprel": [0, 0]},
    }
    data = write_labelled(tmp_path, {"train": [row]}, shards=1)
    batch = PhraseSource(data / "encoded", "train").batch([0, 1, 2])
    phrases = {(tuple(p[p != PAD_ID].tolist()), c) for p, c in zip(batch.leaf_pieces, batch.labels.tolist(), strict=True)}
    assert phrases == {((5, 6), 1), ((7,), 0), ((5, 6, 7), 2)}
    assert open_source(data, "child_sum_tree_lstm").batch([0]).position_labels.tolist() == [[1, 2, NO_CLASS]]
    # A word's vector is the mean of its pieces': the order of pieces within a word is not seen.
    model = tiny_model("child_sum_tree_lstm").double().eval()
    batch = open_source(data, "child_sum_tree_lstm").batch([0])
    expected = model(batch).examples
    batch.leaf_pieces = batch.leaf_pieces[:, [1, 0, 2]]
    torch.testing.assert_close(model(batch).examples, expected)


def test_a_text_of_several_roots_is_read_from_one_more_place(tmp_path):
    row = labelled_row(0, np.random.default_rng(5))
    row["arcs"]["governor"] = [-1] * len(row["arcs"]["governor"])
    others = (labelled_row(1, np.random.default_rng(seed)) for seed in range(6, 30))
    longer = next(other for other in others if len(other["arcs"]["governor"]) > len(row["arcs"]["governor"]))
    data = write_labelled(tmp_path, {"train": [row, longer]}, shards=1)
    source = open_source(data, "child_sum_tree_lstm")
    batch = source.batch([0, 1])
    assert batch.structure.root[0] == batch.position_labels.shape[1] - 1
    assert batch.position_labels[0, -1] == row["label"]
    assert tiny_model("child_sum_tree_lstm")(batch).examples.isfinite().all()
    model = tiny_model("child_sum_tree_lstm", dropout=0.3).train()
    keys = share_dropout_keys(model)
    keys.set(np.array([7, 8]))
    beside = model(batch).examples[0]
    keys.set(np.array([7]))
    alone = source.batch([0])
    assert alone.structure.root[0] < batch.structure.root[0]  # the place is where the longest text ends
    torch.testing.assert_close(model(alone).examples[0], beside)


# What is refused.


def test_data_that_a_model_cannot_read_is_refused(tmp_path, data):
    rows = make_rows(4)
    no_arcs = write_labelled(tmp_path / "no_arcs", {"train": rows}, columns=LABELLED_COLUMNS[:-1])
    with pytest.raises(UserError, match=r"has no arcs.*parser\.dependencies=true"):
        open_source(no_arcs, "child_sum_tree_lstm")
    of_target, of_words = {"tree_settings": {"side": "target"}}, {"parser_settings": {"name": "words"}}
    assert hint_for_arcs(of_target) == "preprocess again with target_parser.dependencies=true"
    assert hint_for_arcs(of_words) == "preprocess again with parser.name=stanza parser.dependencies=true"
    no_classes = write_labelled(tmp_path / "no_classes", {"train": rows}, columns=LABELLED_COLUMNS[:3])
    with pytest.raises(UserError, match="has no classes"):
        PhraseSource(no_classes / "encoded", "train")
    two = rows[1]
    two["nodes"] = {"label": [1, 1], "parent": [-1, -1]}
    two["spans"] = {"start": [0, 1], "end": [1, len(two["leaves"]["piece"])], "subtree_end": [1, 2]}
    two["node_labels"] = [0, 1]
    side_by_side = write_labelled(tmp_path / "two", {"train": rows})
    with pytest.raises(UserError, match=r"^example_id 1 has several trees side by side.* tree\.documents: dummy_root"):
        open_source(side_by_side, "tree_transformer").batch([0, 1])
    later = write_labelled(tmp_path / "later", {"train": make_rows(4), "test": rows})
    task = build_task(
        TrainConfig.model_validate({"task": "classification", "data": later, "model": {"name": "tree_transformer"}})
    )
    with pytest.raises(UserError, match="^test, example_id 1 has several trees side by side"):  # before a training, not after it
        task.check(read_index(later / "encoded"))


# Losses and counting.


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_positions_without_a_class_do_not_count_and_class_0_does(smoothing):
    logits = torch.randn(4, 6, 3, dtype=torch.float32, requires_grad=True)
    targets = torch.randint(NO_CLASS, 3, (4, 6))
    targets[0, :3] = torch.tensor([0, NO_CLASS, 2])
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NO_CLASS, reduction="sum", label_smoothing=smoothing
    )
    sums = label_smoothed_nll(logits, targets, smoothing, NO_CLASS)
    torch.testing.assert_close(sums.loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (sums.loss, expected)))
    again = r_drop_loss(logits, logits, targets, smoothing, 5.0, NO_CLASS)  # equal passes do not diverge
    torch.testing.assert_close(again.loss, 2 * expected)


@num_examples(30)
@given(seed=st.integers(0, 10**6))
def test_accuracies_are_those_of_counting_one_by_one(seed):
    from treenet.models import ClassLogits

    generator = torch.Generator().manual_seed(seed)
    examples, positions = (torch.randn(*shape, 5, generator=generator) for shape in ((6,), (6, 4)))
    labels, position_labels = torch.randint(0, 5, (6,), generator=generator), torch.randint(-1, 5, (6, 4), generator=generator)
    batch = type("Batch", (), {"labels": labels, "position_labels": position_labels})
    found = summarize_counts(torch.stack(count_right(batch, ClassLogits(examples, positions), 2)).double())
    right = [int(row.argmax() == label) for row, label in zip(examples, labels, strict=True)]
    two = []
    for row, label in zip(examples.softmax(-1).tolist(), labels.tolist(), strict=True):
        if label != 2:
            two.append((row[3] + row[4] > row[0] + row[1]) == (label > 2))
    phrases = [
        int(positions[i, j].argmax() == position_labels[i, j]) for i in range(6) for j in range(4) if position_labels[i, j] >= 0
    ]
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert math.isclose(found["phrase_accuracy"], np.mean(phrases))
    assert ("binary_accuracy" in found) == bool(two) and (not two or math.isclose(found["binary_accuracy"], np.mean(two)))
    assert above_neutral(torch.tensor([[0.3, 0.1, 0.2, 0.1, 0.25], [0.1, 0.1, 0.5, 0.2, 0.1]]), 2).tolist() == [False, True]
