"""Self-attention of encoders: weights are those of the model, and padding and batch-mates change none of them."""

import numpy as np
import pytest
import torch
from test_attention_stats import ABLATIONS, SENTENCES, make_model

from treenet.analysis.encoder_attention import encode_examples, has_self_attention
from treenet.config import ModelConfig
from treenet.data.batch import collate
from treenet.layers.scaled_dot_product import merge_heads
from treenet.models import VocabSizes, build_model
from treenet.models.composed import compute_self_weights


@pytest.mark.parametrize(("name", "tree"), ABLATIONS)
def test_weights_times_values_are_the_output_of_the_fast_path(name, tree):
    model, compared = make_model(name, **tree), []

    def compare(module, inputs, named, output):
        weights = compute_self_weights(module, *inputs, **named)
        x, structure = inputs[0], (*inputs, None, None)[2]
        _, keys, values = module.queries_keys_values(x).chunk(3, dim=2)
        if module.accumulation is not None:
            _, values = module.accumulation(x, keys, values, structure)
        found = module.output(merge_heads(weights @ module.split_heads(values)))
        real = ~batch.leaf_pad_mask
        if structure is not None:
            real = torch.cat([real, ~batch.node_pad_mask], dim=1)
        compared.append((found - output)[real].abs().max())
        assert torch.allclose(weights.sum(3)[real[:, None].expand(weights.shape[:3])], torch.ones(1), atol=1e-6)

    batch = collate(SENTENCES)
    for layer in model.encoder.layers:
        layer.self_attention.register_forward_hook(compare, with_kwargs=True)
    with torch.inference_mode():
        model.encode(batch)
    assert len(compared) == 2 and max(compared) < 1e-6


@pytest.mark.parametrize("name", ["transformer", "tree_transformer"])
def test_neither_padding_nor_batch_mates_matter(name):
    model = make_model(name)
    together = list(encode_examples(model, SENTENCES))
    for example, found in zip(SENTENCES, together, strict=True):
        positions = len(example["leaves"]["piece"]) + (len(example["nodes"]["label"]) if name == "tree_transformer" else 0)
        assert found.shape == (2, 2, positions, positions)
        (alone,) = encode_examples(model, [example])
        np.testing.assert_allclose(found, alone, atol=1e-6)


def test_a_node_attends_to_its_subtree_and_a_leaf_to_leaves():
    """Equation 11, by the spans of the example."""
    example = SENTENCES[4]
    (found,) = encode_examples(make_model(), [example])
    num_leaves = len(example["leaves"]["piece"])
    spans = [example["spans"][name] for name in ("start", "end", "subtree_end")]
    assert (found[:, :, :num_leaves, num_leaves:] == 0).all() and (found[:, :, :num_leaves, :num_leaves] > 0).all()
    for node, (start, end, subtree_end) in enumerate(zip(*spans, strict=True)):
        inside = [*range(start, end), *range(num_leaves + node, num_leaves + subtree_end)]
        row = found[:, :, num_leaves + node]
        assert (row[:, :, inside] > 0).all() and (np.delete(row, inside, axis=2) == 0).all()


def test_other_encoders_are_known_to_have_none():
    sizes = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    for name, expected in (("transformer", True), ("relation_transformer", False), ("convs2s", False)):
        assert has_self_attention(build_model(ModelConfig(name=name, **sizes), VocabSizes(60, 6))) is expected
