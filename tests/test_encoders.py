"""The bases of encoders and the encoders over trees: what their layers read, written out, and the limits of their settings."""

import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from model_cases import VOCAB, batch_of, example_of, tiny_model
from reference import sinusoids
from strategies import Tree, right_branching

from treenet.config import ModelConfig
from treenet.data.batch import collate
from treenet.data.input_kinds import LEAVES
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import prepare_trees, run_layers
from treenet.layers.core import Scratch
from treenet.layers.phrase_attention import PhraseAttention
from treenet.layers.relations import RelativeTreeSelfAttention
from treenet.models import ARCHITECTURES, DataFacts, Encoder, VocabSizes, build_model
from treenet.models.encoders.base import (
    LSTMEncoder,
    LSTMStates,
    Memory,
    PieceEmbedding,
    TransformerEncoder,
    build_embedding,
    mean_state,
)
from treenet.models.encoders.tree import MultiGranularityEncoder
from treeproc.common.settings import UserError

# The first and last leaf have no word of their own in the tree; a node of one leaf; several nodes over the same leaves.
WIDE = Tree(6, [[0, 5, 5], [0, 2, 2], [3, 5, 5], [3, 5, 5], [4, 5, 5]], [-1, 0, 0, 2, 3])
TREES = [WIDE, right_branching(3), Tree(2, [[0, 1, 1], [1, 2, 2]], [-1, -1])]


# Embeddings.


@pytest.mark.parametrize(("options", "std", "scale"), [({}, 0.125, 8.0), ({"std": 0.5, "scale": 1.0}, 0.5, 1.0)])
def test_pieces_are_scaled_rows_and_logits_are_products_with_all_rows(options, std, scale):
    embedding = PieceEmbedding(500, 64, **options)
    assert embedding.weight.std().item() == pytest.approx(std, rel=0.02) and abs(embedding.weight.mean().item()) < std / 50
    pieces = torch.tensor([[3, 499], [0, 3]])
    assert torch.equal(embedding(pieces), scale * embedding.weight[pieces])
    assert torch.equal(embedding.vectors(pieces), embedding.weight[pieces]) and not embedding.has_order
    x = torch.randn(3, 64)
    torch.testing.assert_close(embedding.logits(x), x @ embedding.weight.t())


def test_tables_of_labels_have_unit_variance_after_the_scale():
    assert build_embedding(2000, 16).weight.std().item() == pytest.approx(1 / 4, rel=0.02)


def test_logits_are_written_into_scratch_memory_in_float32_alone():
    table, scratch = PieceEmbedding(9, 4), Scratch()
    x = torch.randn(3, 4)
    with torch.no_grad():
        first = table.logits(x, scratch)
        torch.testing.assert_close(first, x @ table.weight.t())
        assert table.logits(x + 1, scratch).data_ptr() == first.data_ptr() != table.logits(x).data_ptr()
        torch.testing.assert_close(first, (x + 1) @ table.weight.t())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = table.logits(x, scratch)
        assert half.dtype == torch.float32 and half.data_ptr() != first.data_ptr()
        torch.testing.assert_close(half, x @ table.weight.t(), rtol=0.05, atol=0.05)
        double = table.double().logits(x.double(), scratch)
        assert double.dtype == torch.float64 and double.data_ptr() != first.data_ptr()
        assert table.to("meta").logits(torch.empty(3, 4, dtype=torch.float64, device="meta"), scratch).shape == (3, 9)


# What encoders say of themselves.


def test_sizes_and_facts_are_values():
    sizes = VocabSizes(3, 4)
    assert (sizes.pos_tags, sizes.deprels, sizes.pretrained) == (0, 0, None) and len({sizes, VocabSizes(3, 4)}) == 1
    with pytest.raises(FrozenInstanceError):
        DataFacts("data", bool).folder = "other"
    memory = Memory(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.bool))
    assert memory.structure is None and memory.summary is None


def test_settings_of_transformer_layers_are_for_encoders_that_have_some():
    without = {name for name, architecture in ARCHITECTURES.items() if not architecture.encoder.has_transformer_layers}
    recurrent = {"bilstm", "tree_lstm", "tree2seq", "child_sum_tree_lstm", "child_sum_tree2seq"}
    assert without == recurrent | {"convs2s", "pretrained"}
    named = {name: architecture.encoder.auxiliary_loss for name, architecture in ARCHITECTURES.items()}
    assert (named["transformer"], named["multi_granularity"]) == ("", "tag_loss")


def test_an_encoder_needs_the_methods_that_its_base_lacks():
    config, embedding = ModelConfig(d_model=4, num_heads=1), PieceEmbedding(9, 4)
    for base, methods in ((Encoder, ["forward"]), (LSTMEncoder, ["run", "own_state"])):
        for missing in methods:
            others = {name: lambda self: None for name in methods if name != missing}
            with pytest.raises(TypeError, match="abstract"):
                type("Incomplete", (base,), others)(config, VocabSizes(9, 4), embedding)
        type("Complete", (base,), {name: lambda self: None for name in methods})(config, VocabSizes(9, 4), embedding)


def test_plain_encoders_need_nothing_of_the_data_and_have_no_loss():
    model, facts = tiny_model("transformer"), DataFacts("data", lambda name: False)
    TransformerEncoder.check_data(ModelConfig(), facts)
    assert TransformerEncoder.reads_with(ModelConfig()) is TransformerEncoder.reads
    batch = batch_of(TREES, model.reads)
    memory, loss = model.encoder.encode_to_train(batch)
    assert loss is None and torch.equal(memory.states, model.encoder(batch).states)
    assert list(model.encoder.probed_layers()) == list(model.encoder.layers)
    assert tuple(tiny_model("bilstm").encoder.probed_layers()) == ()


def test_the_state_of_a_sequence_is_the_mean_of_its_real_positions():
    states = torch.randn(3, 4, 5, dtype=torch.float64)
    lengths = [4, 1, 2]
    memory = Memory(states, torch.arange(4) >= torch.tensor(lengths)[:, None])
    expected = torch.stack([state[:length].mean(0) for state, length in zip(states, lengths, strict=True)])
    torch.testing.assert_close(mean_state(memory), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tiny_model("transformer").encoder.summarize(memory, None), expected, rtol=1e-12, atol=1e-12)


class TableEncoder(LSTMEncoder):
    """An `LSTMEncoder` whose states are embedded leaves."""

    def run(self, batch, *, with_cells):
        states = self.embed_leaves(batch)
        return LSTMStates(states, states + 1 if with_cells else None, batch.leaf_pad_mask)

    def own_state(self, states, batch):
        return states[:, 0]

    def drop(self, states):
        assert states.cells is None  # nobody has asked for them
        return super().drop(states)


def test_memory_of_a_recurrent_encoder_is_its_hidden_states():
    encoder = TableEncoder(ModelConfig(d_model=4, num_heads=1), VOCAB, PieceEmbedding(VOCAB.pieces, 4)).eval()
    batch = batch_of(TREES)
    memory = encoder(batch)
    assert torch.equal(memory.states, 2 * encoder.embedding.weight[batch.leaf_pieces])
    assert torch.equal(memory.pad_mask, batch.leaf_pad_mask)
    assert torch.equal(encoder.summarize(memory, batch), memory.states[:, 0])


# Transformer layers.


@pytest.mark.parametrize("case", ["transformer", "pre_norm"])
def test_leaves_of_a_transformer_have_sinusoids(case):
    model = tiny_model(case)
    batch, encoder = batch_of(TREES, model.reads), model.encoder
    x = 4.0 * encoder.embedding.weight[batch.leaf_pieces] + sinusoids(6, 16)
    torch.testing.assert_close(encoder.embed_leaves(batch), x, rtol=1e-6, atol=1e-6)  # the table is one of float32
    for layer in encoder.layers:
        x = layer(x, padding_to_attend_mask(batch.leaf_pad_mask))
    memory = encoder(batch)
    torch.testing.assert_close(memory.states, x, rtol=1e-5, atol=1e-5)
    assert torch.equal(memory.pad_mask, batch.leaf_pad_mask) and memory.structure is None
    assert [layer.final_norm is not None for layer in encoder.layers] == [False, case == "pre_norm"]


def test_an_encoder_has_the_layers_that_it_is_given():
    config, built = ModelConfig(d_model=8, num_heads=2, num_encoder_layers=3), []

    def build(number: int) -> SelfAttention:
        built.append(number)
        return SelfAttention(8, 2, 0.0)

    for asked, count in ((None, 3), (1, 1), (5, 5)):
        encoder = TransformerEncoder(config, VOCAB, PieceEmbedding(9, 8), build, asked)
        assert len(encoder.layers) == count and built == list(range(count))
        built.clear()
    assert all(type(layer.self_attention) is SelfAttention for layer in tiny_model("transformer").encoder.layers)


# Trees.


def reference_means(tree: Tree, leaves: torch.Tensor, width: int) -> torch.Tensor:
    means = torch.zeros(width, leaves.shape[1], dtype=leaves.dtype)
    for node, (start, end) in enumerate(tree.leaf_spans):
        means[node] = leaves[start:end].mean(0)
    return means


@pytest.mark.parametrize("nodes", ["labels", "labels_and_leaves"])
def test_nodes_are_embedded_labels_without_a_position(nodes):
    model = tiny_model("tree_transformer", tree={"nodes": nodes})
    batch, encoder = batch_of(TREES), model.encoder
    leaves = 4.0 * encoder.embedding.weight[batch.leaf_pieces] + encoder.positions.rows(6)
    labels = 4.0 * encoder.label_embedding.weight[batch.node_labels]
    if nodes == "labels_and_leaves":
        width = labels.shape[1]
        labels = labels + torch.stack([reference_means(*pair, width) for pair in zip(TREES, leaves, strict=True)])
    pad_mask = torch.cat([batch.leaf_pad_mask, batch.node_pad_mask], 1)
    structure = prepare_trees(batch.structure, encoder.tree, encoder.embedding.weight)
    x = run_layers(encoder.layers, torch.cat([leaves, labels], 1), structure, encoder.tree, pad_mask)
    memory = encoder(batch)
    assert torch.equal(memory.pad_mask, pad_mask) and memory.structure.num_leaves == 6
    torch.testing.assert_close(memory.states[~pad_mask], x[~pad_mask], rtol=1e-12, atol=1e-12)
    assert torch.equal(encoder.summarize(memory, batch), memory.states[:, 6])


def test_padding_nodes_have_no_part_in_gradients():
    model = tiny_model("tree_transformer", tree={"nodes": "labels_and_leaves"})
    states = model.encode(batch_of([right_branching(7), Tree(3)])).states
    assert states.isfinite().all()
    grads = torch.autograd.grad(states[:, :3].square().sum(), list(model.encoder.parameters()), allow_unused=True)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)


def test_relative_positions_take_their_own_attention():
    kinds = {
        case: type(tiny_model(case).encoder.layers[0].self_attention) for case in ("tree_transformer", "tree_relative_positions")
    }
    assert kinds == {"tree_transformer": SelfAttention, "tree_relative_positions": RelativeTreeSelfAttention}


def test_brackets_have_two_rows_a_label_and_sinusoids_only_if_asked():
    places = torch.tensor([[0, 1, 2]])
    for case, adds in (("linearized_transformer", False), ("linearized_sinusoids", True)):
        encoder = tiny_model(case).encoder
        assert encoder.brackets.num_embeddings == 2 * VOCAB.labels and encoder.adds_sinusoids == adds
    assert encoder.positions.rows(3)[places].shape == (1, 3, 16)


@pytest.mark.parametrize("relations", [{"tree_distance": {"clip": 2}}, {"label_head": "pos_tag"}, {"label_head": "deprel"}])
def test_a_linearised_tree_has_no_relations_of_words(relations):
    with pytest.raises(UserError, match="brackets have no arcs or tags"):
        build_model(ModelConfig(name="linearized_transformer", relations=relations), VOCAB)


# Granularities.


def granular(layers: int = 2, heads: int = 4, **phrases: object) -> MultiGranularityEncoder:
    sizes = dict(d_model=4 * heads, d_ff=8, num_heads=heads, num_encoder_layers=layers, num_decoder_layers=1)
    phrases = {"ngrams": [2], "levels": [1], "chunk_size": 2} | phrases
    return build_model(ModelConfig(name="multi_granularity", phrases=phrases, **sizes), VOCAB).encoder


@pytest.mark.parametrize(
    ("ngrams", "levels", "fits"),
    [([], [], False), ([2], [], True), ([], [1], True), ([2, 3], [1], True), ([2, 3], [1, 2], False), ([2, 3, 4], [1, 2], False)],
)
def test_each_granularity_takes_a_head_and_one_is_for_the_words(ngrams, levels, fits):
    if fits:
        heads = granular(ngrams=ngrams, levels=levels, tag_loss=0).layers[0].self_attention
        assert heads.num_leaf_heads == 4 - len(ngrams) - len(levels)
        return
    with pytest.raises(UserError, match=f"must name 1 to 3 granularities together, but name {len(ngrams) + len(levels)}: "):
        granular(ngrams=ngrams, levels=levels, tag_loss=0)


@pytest.mark.parametrize(
    ("layers", "asked", "phrase_layers"), [(1, None, 1), (2, None, 1), (3, None, 2), (6, None, 3), (3, 1, 1), (3, 3, 3)]
)
def test_the_lowest_layers_attend_to_phrases(layers, asked, phrase_layers):
    encoder = granular(layers, num_layers=asked)
    kinds = [type(layer.self_attention) for layer in encoder.layers]
    assert kinds == [PhraseAttention] * phrase_layers + [SelfAttention] * (layers - phrase_layers)
    states, loss = encoder.eval().encode_to_train(batch_of(TREES, encoder.reads))
    assert states.states.isfinite().all() and loss > 0


def test_more_layers_of_phrases_than_layers_are_refused():
    with pytest.raises(UserError, match=r"num_layers must be at most model.num_encoder_layers = 3, but is 4$"):
        granular(3, num_layers=4)


def test_a_loss_of_tags_needs_labels_that_differ():
    for weight, told, refused in ((1.0, False, True), (0.5, False, True), (0.0, False, False), (1.0, True, False)):
        config = ModelConfig(name="multi_granularity", phrases={"tag_loss": weight})
        facts = DataFacts("data", lambda name, told=told: told and name == "labels")
        if refused:
            with pytest.raises(UserError, match="data has one label for all phrases"):
                MultiGranularityEncoder.check_data(config, facts)
        else:
            MultiGranularityEncoder.check_data(config, facts)


def test_the_loss_of_tags_is_weighted_and_of_all_layers():
    sizes = {"num_heads": 4, "num_encoder_layers": 3}
    found = {}
    for weight in (0.0, 0.5, 1.0, 3.0):
        phrases = {"ngrams": [2], "levels": [1, 2], "chunk_size": 2, "num_layers": 2, "tag_loss": weight}
        model = tiny_model("multi_granularity", **sizes, phrases=phrases)
        batch = batch_of(TREES, model.reads)
        memory, loss = model.encoder.encode_to_train(batch)
        found[weight] = loss.item(), memory.states
    whole = found[1.0][0]
    assert whole > 0 and {weight: loss for weight, (loss, _) in found.items()} == pytest.approx(
        {weight: weight * whole for weight in found}
    )
    alone = [collate([example_of(tree, seed, reads=model.reads)], model.reads) for seed, tree in enumerate(TREES)]
    assert sum(model.encoder.encode_to_train(one)[1].item() for one in alone) == pytest.approx(3 * whole)
    assert np.allclose(model.encoder(batch).states.detach(), memory.states.detach(), rtol=1e-12)
    assert model.encoder._encode(batch, with_tags=False)[1] == 0


# The page for developers.


def test_the_encoder_of_the_page_for_developers_ignores_padding(repository, monkeypatch):
    page = (repository / "docs" / "development.md").read_text()
    [code] = re.findall(r"```python\n(from torch import nn\n.*?)```", page, re.DOTALL)
    monkeypatch.setattr("treenet.models.registry.ARCHITECTURES", registered := dict(ARCHITECTURES))
    exec(code, {})
    model = (
        registered["uniform"].encoder(ModelConfig(d_model=8, d_ff=8, num_heads=2), VOCAB, PieceEmbedding(VOCAB.pieces, 8)).eval()
    )
    alone, together = (model(batch_of(trees, LEAVES)).states for trees in ([right_branching(3)], [right_branching(3), WIDE]))
    torch.testing.assert_close(together[0, :3], alone[0])
