"""The linearised tree against a sequence that is written out by recursion."""

import pytest
import torch
from hypothesis import given
from hypothesis_profiles import num_examples
from model_cases import VOCAB, batch_of, tiny_model
from strategies import Tree, batches, right_branching

from treenet.config import ModelConfig
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.relations import Related, relative_positions
from treenet.models import build_model
from treenet.models.composed import attend_batch, record_attention
from treeproc.common.settings import UserError


def write_out(tree: Tree) -> list[tuple[str, int]]:
    """The sequence of ("leaf", number), ("open", node) and ("close", node)."""
    out: list[tuple[str, int]] = []

    def visit(node: int) -> None:
        out.append(("open", node))
        start, end = tree.leaf_spans[node]
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        position = start
        for child in sorted(children, key=lambda c: (tree.leaf_spans[c][0], c)):
            out.extend(("leaf", leaf) for leaf in range(position, tree.leaf_spans[child][0]))
            visit(child)
            position = tree.leaf_spans[child][1]
        out.extend(("leaf", leaf) for leaf in range(position, end))
        out.append(("close", node))

    position = 0
    for root in [node for node, parent in enumerate(tree.parents) if parent == -1]:
        out.extend(("leaf", leaf) for leaf in range(position, tree.leaf_spans[root][0]))
        visit(root)
        position = tree.leaf_spans[root][1]
    out.extend(("leaf", leaf) for leaf in range(position, tree.num_leaves))
    return out


@given(sentences=batches(max_size=3, max_leaves=8))
@num_examples(40)
def test_places_are_those_of_the_written_sequence(sentences):
    model = tiny_model("linearized_transformer")
    batch = batch_of(sentences, model.reads)
    leaves = batch.leaf_pieces.shape[1]
    for row, tree in enumerate(sentences):
        for place, (kind, number) in enumerate(write_out(tree)):
            position = number if kind == "leaf" else leaves + 2 * number + (kind == "close")
            assert batch.structure.place[row, position] == place and not batch.source_pad_mask()[row, position]
        assert (~batch.source_pad_mask()[row]).sum() == len(write_out(tree)) == tree.num_leaves + 2 * len(tree.spans)


@pytest.mark.parametrize("name", ["linearized_transformer", "linearized_sinusoids"])
@given(sentences=batches(max_size=2, max_leaves=6))
@num_examples(10)
def test_states_are_those_of_the_sequence_in_order(name, sentences):
    """The layers run over the written sequence, with plain relative positions or sinusoids, give the same states."""
    model = tiny_model(name)
    encoder, batch = model.encoder, batch_of(sentences, model.reads)
    states, leaves = model.encode(batch).states, batch.leaf_pieces.shape[1]
    for row, tree in enumerate(sentences):
        sequence, rows = write_out(tree), []
        for kind, number in sequence:
            if kind == "leaf":
                rows.append(encoder.embedding(batch.leaf_pieces[row, number]))
            else:
                table = encoder.brackets.weight[2 * batch.node_labels[row, number] + (kind == "close")]
                rows.append(encoder.embedding.scale * table)
        x = torch.stack(rows)[None]
        if encoder.adds_sinusoids:
            x = encoder.positions(x)
        ids = relative_positions(len(sequence), len(sequence), 3, x.device)[None]
        mask = padding_to_attend_mask(torch.zeros(1, len(sequence), dtype=torch.bool))
        for layer in encoder.layers:
            x = layer(x, mask, Related([] if encoder.adds_sinusoids else [ids]))
        for place, (kind, number) in enumerate(sequence):
            position = number if kind == "leaf" else leaves + 2 * number + (kind == "close")
            torch.testing.assert_close(states[row, position], x[0, place], rtol=1e-10, atol=1e-10)


def test_attention_to_a_node_is_that_to_both_its_brackets():
    model = tiny_model("linearized_transformer")
    tree = right_branching(4)
    batch = batch_of([tree, right_branching(2)], model.reads)
    with record_attention(model) as recorded:
        model(batch)
    targets = int((batch.tgt_out[0] != 0).sum())
    leaves, nodes = tree.num_leaves, len(tree.spans)
    weights = attend_batch(model, batch)[0]
    assert weights.shape[-1] == leaves + nodes
    torch.testing.assert_close(torch.from_numpy(weights).sum(-1), torch.ones(weights.shape[:-1]).double())
    first = recorded[0][0, :, :targets]
    expected = first[..., leaves : leaves + 2 * nodes : 2] + first[..., leaves + 1 : leaves + 2 * nodes : 2]
    torch.testing.assert_close(torch.from_numpy(weights[0][..., leaves:]), expected.detach()[:, : weights.shape[2]])


def test_relations_of_words_are_refused():
    config = ModelConfig(name="linearized_transformer", relations={"tree_distance": {"clip": 2}})
    with pytest.raises(UserError, match="brackets have no arcs or tags"):
        build_model(config, VOCAB)
