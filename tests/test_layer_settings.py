"""Settings of Transformer layers for little data: norms, dropout of units, words and layers, relative positions beside trees."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis_profiles import num_examples
from model_cases import VOCAB, batch_of, tiny_model
from reference import may_attend, reference_attention, sinusoids
from reference_relations import reference_attention as reference_related
from strategies import Tree, batches, right_branching
from test_accumulation import by_equations, check_close_with_grads, real_positions
from test_tree_attention import D_MODEL, HEADS, build_on_path, randomise, structure_masks

from treenet.config import ModelConfig, TreeAttentionConfig
from treenet.experiments.settings import ScalingConfig
from treenet.layers.attention import SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import EncoderLayer, FeedForward, compute_sinusoids, end_stack
from treenet.layers.core import DropoutKeys, Scratch, WordDropout, multiply_by_table, share_dropout_keys
from treenet.layers.relations import RelativeTreeSelfAttention
from treenet.models import build_model
from treeproc.common.settings import load_settings

CONFIGS = Path(__file__).resolve().parent.parent / "workflows" / "configs"
SIZES = dict(d_model=8, d_ff=16, num_heads=2, num_encoder_layers=2, num_decoder_layers=2)


def test_products_with_a_table_stand_in_memory_that_is_used_again():
    scratch, places = Scratch(), []
    for rows, columns in ((3, 2049), (1, 5), (4, 2050), (2, 4096)):
        x, table = torch.randn(rows, 4, dtype=torch.float64), torch.randn(columns, 4, dtype=torch.float64)
        found = multiply_by_table(x, table, scratch)
        torch.testing.assert_close(found, x @ table.t())
        places.append(found.data_ptr())
    assert places[0] == places[1] and places[2] == places[3]


@pytest.mark.parametrize("width", [2, 6, 7])
def test_sinusoids_are_those_of_the_formula(width):
    torch.testing.assert_close(compute_sinusoids(5, width).double(), sinusoids(5, width), rtol=0, atol=1e-6)


def test_pre_norm_equals_torch():
    config = ModelConfig(name="transformer", norm="pre", dropout=0.0, **SIZES)
    ours = end_stack(
        torch.nn.ModuleList(EncoderLayer(config, SelfAttention(config.d_model, config.num_heads, 0.0)) for _ in range(2)), config
    )
    randomise(ours)
    options = dict(dropout=0.0, batch_first=True, norm_first=True)
    layer = torch.nn.TransformerEncoderLayer(config.d_model, config.num_heads, config.d_ff, **options)
    theirs = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(config.d_model), enable_nested_tensor=False).double()
    names = {
        "self_attn.in_proj_": "self_attention.queries_keys_values.", "self_attn.out_proj.": "self_attention.output.",
        "linear1.": "feed_forward.inner.", "linear2.": "feed_forward.outer.",
        "norm1.": "self_attention_norm.", "norm2.": "feed_forward_norm.",
    }  # fmt: skip
    own = ours.state_dict()
    loaded = {f"layers.{n}.{theirs_}{part}": own[f"{n}.{ours_}{part}"] for n in range(2) for theirs_, ours_ in names.items()
              for part in ("weight", "bias")}  # fmt: skip
    theirs.load_state_dict(loaded | {f"norm.{part}": own[f"1.final_norm.{part}"] for part in ("weight", "bias")})
    x, pad_mask = torch.randn(2, 5, 8).double(), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    found = x
    for each in ours:
        found = each(found, padding_to_attend_mask(pad_mask))
    expected = theirs(x, src_key_padding_mask=pad_mask)
    torch.testing.assert_close(found[~pad_mask], expected[~pad_mask], rtol=1e-12, atol=1e-12)


def keys_for(module: torch.nn.Module, ids: list[int]) -> DropoutKeys:
    keys = share_dropout_keys(module.train())
    keys.set(np.array(ids, dtype=np.uint64))
    return keys


def test_dropout_of_inner_units_is_after_the_relu():
    feed_forward = randomise(FeedForward(8, 16, dropout=0.4))
    x = torch.randn(3, 5, 8).double()
    keys_for(feed_forward, [4, 5, 6])
    oracle = DropoutKeys()
    oracle.set(np.array([4, 5, 6], dtype=np.uint64))
    threshold = round(0.4 * 2**16)
    keep = oracle.keep_mask(torch.Size((3, 5, 16)), threshold, 3).double() * (2**16 / (2**16 - threshold))
    expected = feed_forward.outer(torch.relu(feed_forward.inner(x)) * keep)
    torch.testing.assert_close(feed_forward(x, 3), expected, rtol=1e-12, atol=1e-12)
    assert 0.3 < (keep == 0).double().mean() < 0.5


@pytest.mark.parametrize("by_key", [True, False])
def test_dropped_words_lose_all_their_units(by_key):
    module = WordDropout(0.25).train()
    if by_key:
        keys_for(module, list(range(40)))
    x = torch.ones(40, 50, 6, dtype=torch.float64)
    dropped = module(x)
    assert ((dropped == 0).all(2) | torch.isclose(dropped, x / 0.75, rtol=1e-4).all(2)).all()
    assert (dropped[..., 0] == 0).double().mean() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(module.eval()(x), x)


@pytest.mark.parametrize("name", ["transformer", "tree_transformer", "relative_positions"])
def test_source_and_target_words_are_dropped(name):
    """The states differ from those without dropout only through the embeddings of one side."""
    trees = [right_branching(9), right_branching(4)]
    for side in ("source", "target"):
        model = tiny_model(name, dropout=0.0, **{f"{side}_word_dropout": 0.5})
        batch = batch_of(trees, model.reads)
        memory, logits = model.encode(batch).states, model(batch)
        keys_for(model, [1, 2])
        assert torch.equal(model.encode(batch).states, memory) == (side == "target")
        assert not torch.equal(model(batch), logits)


def compose(layers, kept, x, mask):
    for layer, is_kept in zip(layers, kept, strict=True):
        x = layer(x, mask) if is_kept else x
    return x


def test_every_example_skips_its_own_layers():
    """An example is one of the four compositions of two layers. Shares are as set, and batch-mates change nothing."""
    config = ModelConfig(name="transformer", encoder_layer_drop=0.3, dropout=0.0, **SIZES)
    layers = randomise(torch.nn.ModuleList(EncoderLayer(config, SelfAttention(8, 2, 0.0)) for _ in range(2)))
    x, mask = torch.randn(200, 3, 8).double(), torch.ones(200, 1, 1, 3, dtype=torch.bool)
    layers.eval()
    ways = {kept: compose(layers, kept, x, mask) for kept in itertools.product((True, False), repeat=2)}
    torch.testing.assert_close(compose(layers, (True, True), x, mask), ways[True, True])
    keys_for(layers, list(range(200)))
    found = compose(layers, (True, True), x, mask)
    matches = torch.stack([torch.isclose(found, way, rtol=1e-12).all(2).all(1) for way in ways.values()])
    assert (matches.sum(0) == 1).all()
    skipped = torch.tensor([[not kept for kept in way] for way in ways]).double()
    shares = (matches.double().T @ skipped).mean(0)
    assert ((shares > 0.2) & (shares < 0.4)).all()
    keys_for(layers, [7])
    torch.testing.assert_close(compose(layers, (True, True), x[7:8], mask[7:8]), found[7:8], rtol=1e-12, atol=1e-12)


def test_the_decoder_drops_layers_too():
    model = tiny_model("tree_transformer", dropout=0.0, decoder_layer_drop=0.5)
    batch = batch_of([right_branching(5)] * 6, model.reads)
    expected = model(batch)
    keys_for(model, list(range(6)))
    same = torch.isclose(model(batch), expected).all(2).all(1)
    assert 0 < same.sum() < 6


@pytest.mark.parametrize("subtree_mask", [True, False])
@pytest.mark.parametrize("path", ["one", "two", "window"])
@given(sentences=batches(max_size=2, max_leaves=6))
@num_examples(8)
def test_relative_positions_of_leaves_equal_the_oracle(subtree_mask, path, sentences):
    """Loops: a pair of leaves has the relation of its distance, a pair with a node has none."""
    tree_config = TreeAttentionConfig(vertical_rows=3, horizontal_rows=3, relative_positions=2, subtree_mask=subtree_mask)
    module = randomise(RelativeTreeSelfAttention(D_MODEL, HEADS, 0.0, tree_config))
    structure = build_on_path(sentences, path)
    x = torch.randn(len(sentences), structure.num_leaves + structure.num_nodes, D_MODEL, dtype=torch.float64, requires_grad=True)
    fast = module(x, structure_masks(structure, subtree_mask), structure)
    pairs = []
    with by_equations(module):
        projected = module.project(x, structure)
    for b, tree in enumerate(sentences):
        rows = real_positions(structure, b)
        pairs.append((fast[b, rows], reference_tree(module, tree, [part[b, rows] for part in projected], subtree_mask)))
    check_close_with_grads(pairs, [x, *module.parameters()])


def reference_tree(
    module: RelativeTreeSelfAttention, tree: Tree, projected: list[torch.Tensor], subtree_mask: bool
) -> torch.Tensor:
    n, out, positions = tree.num_leaves, [], len(projected[0])
    tables = [torch.cat([table, torch.zeros_like(table[:1])]) for table in (module.key_relations, module.value_relations)]
    ids = torch.tensor([
        [min(max(j - i, -2), 2) + 2 if i < n and j < n else 5 for j in range(positions)] for i in range(positions)
    ])  # fmt: skip
    for q, k, v in zip(*(part.chunk(HEADS, dim=1) for part in projected), strict=True):
        seen = n if subtree_mask else positions
        on_leaves = reference_related(q[:n], k[:seen], v[:seen], [ids[:n, :seen]], *tables, 1)

        def allowed(i, j):
            return not subtree_mask or may_attend(n + i, j, n, tree.leaf_spans, tree.parents)

        on_nodes = reference_attention(q[n:], k, v, allowed) if positions > n else q[:0]
        out.append(torch.cat([on_leaves, on_nodes]))
    return module.output(torch.cat(out, dim=1))


@pytest.mark.parametrize("study", ["scaling_iwslt14_relative", "scaling_multi30k_systems"])
def test_the_relative_tree_model_of_a_study_is_the_relative_model_with_nodes(study):
    """Leaves attend to leaves alone, so both models give them the same states, and only the decoder reads nodes."""
    models = load_settings(ScalingConfig, CONFIGS / f"{study}.yaml", ["data=somewhere"]).grid.models
    states = []
    for name in ("relative", "relative_tree"):
        torch.manual_seed(5)
        model = build_model(ModelConfig(paired_weights=True, **SIZES, **models[name]["model"]), VOCAB).double().eval()
        batch = batch_of([right_branching(5), right_branching(3)], model.reads)
        states.append(model.encoder(batch).states[:, :5])
    real = ~batch.leaf_pad_mask
    torch.testing.assert_close(states[1][real], states[0][real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "pre"},
        {"activation_dropout": 0.1},
        {"encoder_layer_drop": 0.2},
        {"decoder_layer_drop": 0.2},
        {"source_word_dropout": 0.1},
        {"target_word_dropout": 0.1},
        {"paired_weights": True},
        {"tree": {"relative_positions": 4}},
    ],
    ids=str,
)
def test_records_hold_a_setting_only_if_it_is_set(settings):
    plain, changed = ModelConfig().model_dump(), ModelConfig(**settings).model_dump()
    (name, value), *_ = settings.items()
    if name == "tree":
        plain, changed, name, value = plain["tree"], changed["tree"], "relative_positions", 4
    assert name not in plain and changed == plain | {name: value}
