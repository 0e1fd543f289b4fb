"""Whole models, each of tests/model_cases.py: independence of padding and batch, causality, decoding, sizes, degenerate trees."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis_profiles import num_examples
from model_cases import MODEL_CASES, VOCAB, batch_of, example_of, tiny_model
from strategies import Tree, batches, right_branching
from torch.nn.attention import SDPBackend, sdpa_kernel

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch, collate
from treenet.layers.core import share_dropout_keys
from treenet.models import DecoderState, build_model
from treenet.structure import TreeStructure
from treenet.structure.attention_maps import OneCall
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID

slow = pytest.mark.slow


def with_trees(*configs: dict) -> list[tuple[str, dict]]:
    """Every model as it is, and the Tree Transformer with other settings of `model.tree`."""
    return [(name, {}) for name in MODEL_CASES] + [("tree_transformer", {"tree": config}) for config in configs]


def real_logits(logits: torch.Tensor, batch: TreeBatch, row: int) -> torch.Tensor:
    return logits[row, batch.tgt_out[row] != PAD_ID]


@slow
@pytest.mark.parametrize(("name", "config"), with_trees({"subtree_mask": False}, {"accumulation_rule": "released"}))
@given(sentences=batches(max_size=4))
@num_examples(6)
def test_a_sentence_does_not_see_its_batch(name, config, sentences):
    """Alone, or in a batch with a much longer and deeper sentence first: the same logits."""
    model = tiny_model(name, **config)
    examples = [example_of(tree, seed, reads=model.reads) for seed, tree in enumerate(sentences)]
    longest = example_of(right_branching(14), seed=99, target_length=9)
    together = collate([longest, *examples], model.reads)
    logits = model(together)
    assert logits.isfinite().all()
    for row, example in enumerate(examples, start=1):
        alone = collate([example], model.reads)
        expected = real_logits(model(alone), alone, 0)
        torch.testing.assert_close(real_logits(logits, together, row), expected, rtol=1e-12, atol=1e-12)


@slow
@pytest.mark.parametrize("piece", [1e9, np.inf, np.nan])
@pytest.mark.parametrize(("name", "config"), with_trees({"accumulation_rule": "released", "leaf_weights": "per_head"}))
def test_a_batch_mate_that_is_not_finite_stays_alone(name, config, piece):
    """A piece whose vector is huge, infinite or NaN changes no bit of the sentences that do not hold it."""
    model = tiny_model(name, **config)
    examples = [example_of(right_branching(n), n, reads=model.reads) for n in (9, 7, 14)]
    for example in examples:
        for pieces in (example["leaves"]["piece"], example["tgt_pieces"]):
            pieces[pieces == VOCAB.pieces - 1] = 4
    expected = model(collate(examples, model.reads))
    examples[1]["leaves"]["piece"][3] = VOCAB.pieces - 1
    with torch.no_grad():
        model.encoder.embedding.weight[VOCAB.pieces - 1] = piece
    logits = model(collate(examples, model.reads))
    seen = torch.arange(VOCAB.pieces) != VOCAB.pieces - 1  # the logit of the piece itself is not finite anywhere
    for row in (0, 2):
        assert torch.equal(logits[row][:, seen], expected[row][:, seen])


@pytest.mark.parametrize("name", MODEL_CASES)
def test_dropout_is_the_same_in_every_batch(name):
    """Dropout by key gives a text the same logits alone and beside a longer text, also with several roots."""
    model = tiny_model(name, dropout=0.3).train()
    keys = share_dropout_keys(model)
    examples = [example_of(tree, seed, reads=model.reads) for seed, tree in enumerate([right_branching(14), right_branching(5)])]
    for example in examples:
        example["arcs"]["governor"] = np.where(np.arange(len(example["arcs"]["governor"])) % 2, example["arcs"]["governor"], -1)
    together, alone = collate(examples, model.reads), collate(examples[1:], model.reads)
    logits = []
    for batch, of_examples in ((together, [7, 8]), (alone, [8])):
        keys.set(np.array(of_examples, dtype=np.uint64))
        logits.append(real_logits(model(batch), batch, len(of_examples) - 1))
    torch.testing.assert_close(*logits, rtol=1e-12, atol=1e-12)


@slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [name for name in MODEL_CASES if "convs2s" not in name])  # it scales its gradients
def test_second_derivatives_are_right_or_refused(name, device):
    """Compare second derivatives of the loss by the vectors of pieces with differences of gradients, in both forms of batches."""
    model = tiny_model(name)
    batch = batch_of([right_branching(5), right_branching(3)], model.reads.for_device(torch.device(device)))
    weight = model.encoder.embedding.weight
    direction = torch.randn_like(weight)

    def gradient(**options) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the others of PyTorch have no second derivative
            loss = torch.nn.functional.cross_entropy(model(batch).transpose(1, 2), batch.tgt_out)
            return torch.autograd.grad(loss, weight, **options)[0]

    try:
        found = torch.autograd.grad(gradient(create_graph=True), weight, direction)[0]
    except (UserError, RuntimeError) as error:
        assert "no second derivatives" in str(error) or "is not implemented" in str(error)
        return
    around = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            weight += step * direction
        around.append(gradient())
        with torch.no_grad():
            weight -= step * direction
    torch.testing.assert_close(found, (around[0] - around[1]) / 2e-6, rtol=1e-4, atol=1e-6)


@slow
@pytest.mark.parametrize("path", ["two", "window"])
@given(sentences=batches(max_size=3, max_leaves=12))
@num_examples(8)
def test_every_path_gives_the_same_whatever_the_batch(path, sentences):
    """Alone on the path of short sentences, and in a padded batch on another path, summed entry by entry."""
    model = tiny_model("tree_transformer")
    trees = [right_branching(14), *sentences]
    together = batch_of(trees)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treenet.structure.attention_maps.WINDOW", 4)
        together.structure = TreeStructure.build(
            [t.num_leaves for t in trees], [t.span_array for t in trees], attention_path=path, sparse=True
        )
    logits = model(together)
    for row, tree in enumerate(trees):
        alone = collate([example_of(tree, row)])
        assert isinstance(alone.structure.attention, OneCall)
        expected = real_logits(model(alone), alone, 0)
        torch.testing.assert_close(real_logits(logits, together, row), expected, rtol=1e-12, atol=1e-12)


@slow
@pytest.mark.parametrize("path", ["one", "two", "window"])
def test_the_encoder_compiles_without_graph_breaks(path):
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    model = build_model(ModelConfig(**sizes), VOCAB).eval()
    trees = [right_branching(6), right_branching(3)]
    batch = batch_of(trees)
    batch.structure = TreeStructure.build(
        [t.num_leaves for t in trees], [t.span_array for t in trees], attention_path=path, sparse=path == "window"
    )
    torch.compiler.reset()
    states = [encode(batch).states for encode in (model.encode, torch.compile(model.encode, fullgraph=True, backend="aot_eager"))]
    torch.testing.assert_close(*states)
    grads = [torch.autograd.grad(x.square().sum(), list(model.encoder.layers.parameters())) for x in states]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", MODEL_CASES)
def test_content_of_padding_does_not_matter(name):
    model = tiny_model(name)
    batch = batch_of([right_branching(3), right_branching(9)], model.reads)
    expected = [real_logits(model(batch), batch, row) for row in (0, 1)]
    total = sum(e.sum() for e in expected)
    grads = torch.autograd.grad(total, list(model.parameters()), allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    batch.leaf_pieces[batch.leaf_pad_mask] = 11
    batch.node_labels[batch.node_pad_mask] = 5
    batch.tgt_in[batch.tgt_in == PAD_ID] = 12
    for row in (0, 1):
        torch.testing.assert_close(real_logits(model(batch), batch, row), expected[row], rtol=1e-12, atol=1e-12)


@slow
@pytest.mark.parametrize("name", MODEL_CASES)
def test_the_decoder_does_not_see_the_future(name):
    model = tiny_model(name)
    batch = batch_of([right_branching(5), right_branching(2)], model.reads, target_length=6)
    expected = model(batch)
    for t in range(1, 7):
        changed = batch.to("cpu")
        changed.tgt_in = batch.tgt_in.clone()
        changed.tgt_in[:, t:] = (batch.tgt_in[:, t:] + 3) % VOCAB.pieces
        logits = model(changed)
        torch.testing.assert_close(logits[:, :t], expected[:, :t], rtol=1e-12, atol=1e-12)
        assert (logits[:, t] - expected[:, t]).abs().max() > 1e-6


@slow
@pytest.mark.parametrize(("name", "config"), with_trees({"accumulate_on": "key"}, {"leaf_weights": "per_head"}))
@given(sentences=batches())
@num_examples(5)
def test_decoding_steps_equal_teacher_forcing(name, config, sentences):
    model = tiny_model(name, **config)
    batch = batch_of(sentences, model.reads, target_length=4)
    expected = model(batch)
    state = model.start_decoding(model.encode(batch))
    for t in range(batch.tgt_in.shape[1]):
        logits, state = model.decode_step(batch.tgt_in[:, t], state)
        torch.testing.assert_close(logits, expected[:, t], rtol=1e-12, atol=1e-12)


@slow
@pytest.mark.parametrize("name", MODEL_CASES)
def test_selected_hypotheses_continue_their_own_sentence(name):
    """Expand to a beam, reorder within sentences, drop sentences: each row equals teacher forcing of its history."""
    model, lengths = tiny_model(name), (4, 1, 7, 2, 3)
    batch = batch_of([right_branching(n) for n in lengths], model.reads, target_length=5)
    torch.manual_seed(1)
    memory = model.encode(batch)
    state, sources = model.start_decoding(memory), torch.arange(5)
    history = torch.zeros(5, 0, dtype=torch.long)
    # The sentences of which the memory is kept after each selection. A quarter without hypotheses is worth a copy.
    selections = {
        (0, 0, 1, 1, 2, 2, 3, 4): 5,
        (1, 0, 2, 2, 5, 4, 6, 7): 5,
        (0, 1, 4, 4, 6, 7): 5,
        (5, 3, 1, 2): 3,
        (2, 1): 2,
        (1,): 1,
    }
    for chosen, kept in selections.items():
        rows, before = torch.tensor(chosen), state
        state, sources, history = state.select(rows), sources[rows], history[rows]
        if isinstance(state, DecoderState):
            assert len(state.memory_attend_mask) == kept
            if kept == len(before.memory_attend_mask):
                assert all(now is then for now, then in zip(state.memory, before.memory, strict=True))  # it was not copied
        tokens = torch.randint(4, VOCAB.pieces, (len(rows),))
        history = torch.cat([history, tokens[:, None]], dim=1)
        logits, state = model.decode_step(tokens, state)
        assert state.step == history.shape[1]
        examples = [example_of(right_branching(lengths[one]), seed=one, target_length=5) for one in sources.tolist()]
        whole = collate(examples, model.reads)
        whole.tgt_in = history
        torch.testing.assert_close(logits, model(whole)[:, -1], rtol=1e-12, atol=1e-12)


def test_old_states_stay_valid():
    model, batch = tiny_model("tree_transformer"), batch_of([right_branching(3)])
    state = model.start_decoding(model.encode(batch))
    first, _ = model.decode_step(torch.tensor([5]), state)
    again, _ = model.decode_step(torch.tensor([5]), state)
    assert torch.equal(first, again)


DEGENERATE = {
    "one word": Tree(1, [[0, 1, 1]], [-1]),
    "one word without nodes": Tree(1),
    "no leaves": Tree(0),
    "no nodes": Tree(4),
    "unary chain": Tree(2, [[0, 2, 3], [0, 2, 3], [0, 2, 3]], [-1, 0, 1]),
    "unary chain of one word": Tree(1, [[0, 1, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4]], [-1, 0, 1, 2]),
    "document of two roots": Tree(4, [[0, 2, 1], [2, 4, 2]], [-1, -1]),
    "deeper than the tables": right_branching(130),
}


@slow
@pytest.mark.parametrize("name", MODEL_CASES)
def test_degenerate_trees_train(name):
    model = tiny_model(name)
    parameters = list(model.parameters())
    short = [tree for tree in DEGENERATE.values() if tree.num_leaves < 10]
    batches = {what: [tree] for what, tree in DEGENERATE.items()}
    batches |= {"together": [*short, right_branching(3)], "deep beside short": [right_branching(130), right_branching(3)]}
    for what, sentences in batches.items():
        logits = model(batch_of(sentences, model.reads))
        grads = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
        assert logits.isfinite().all() and all(grad.isfinite().all() for grad in grads if grad is not None), what


def test_longer_than_the_position_table():
    """A sentence alone and beside one longer than the first table of sinusoids."""
    model = tiny_model("transformer")
    short, long = example_of(Tree(5)), example_of(Tree(530))
    alone, together = collate([short]), collate([short, long])
    expected = model(alone)
    torch.testing.assert_close(real_logits(model(together), together, 0), real_logits(expected, alone, 0), rtol=1e-12, atol=1e-12)


def test_trees_matter_to_the_tree_model_alone():
    left = Tree(4, [[0, 4, 3], [0, 3, 3], [0, 2, 3]], [-1, 0, 1])
    right = right_branching(4)
    for name, differs in (("transformer", False), ("tree_transformer", True)):
        model = tiny_model(name)
        first, second = model(batch_of([left])), model(batch_of([right]))
        assert ((first - second).abs().max() > 1e-3) == differs


@slow
@pytest.mark.parametrize("name", MODEL_CASES)
def test_logits_are_float32_under_autocast(name):
    model = tiny_model(name).float()
    batch = batch_of([right_branching(6), right_branching(2)], model.reads)
    expected = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch)
        step, _ = model.decode_step(batch.tgt_in[:, 0], model.start_decoding(model.encode(batch)))
    assert logits.dtype == step.dtype == torch.float32
    assert (logits - expected).norm() / expected.norm() < 0.05


@slow
@pytest.mark.parametrize("name", MODEL_CASES)
def test_overfits_eight_sentences(name):
    model = tiny_model(name, dropout=0.0).float().train()
    batch = batch_of([right_branching(n) for n in range(2, 10)], model.reads, target_length=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, fused=True)  # the fastest one
    for _ in range(60):  # the slowest model needs 44
        loss = torch.nn.functional.cross_entropy(model(batch).transpose(1, 2), batch.tgt_out)
        if loss < 0.25:  # without the source, the first of five pieces costs log(8), a mean of 0.42
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.2f}")
