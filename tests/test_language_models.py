"""Tree regularisation and Transformer Grammars against their references; causal models see no future and no batch-mate."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import VOCAB, example_of
from reference_language_models import (
    linearise,
    reference_depth_attention,
    reference_tree_reg,
    stack_machine,
)
from strategies import Tree, batches, right_branching

from treenet.config import ModelConfig
from treenet.data.batch import collate_rows
from treenet.data.input_kinds import ACTIONS, ALWAYS, COLUMNS, SPLIT_POINTS, RowLists
from treenet.layers.blocks import compute_sinusoids
from treenet.layers.constituents import split_scores, tree_reg_losses
from treenet.layers.relations import FARTHEST, NEAREST, DepthAttention, depth_differences
from treenet.models import CausalLM, build_causal_lm
from treenet.structure import Actions
from treenet.structure.sequences import COMPOSE, OPEN, PIECE, STACK
from treenet.tasks.causal_lm import CausalBatch, to_causal
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID

DEEP = right_branching(130)
UNARY = Tree(3, [[0, 3, 4], [0, 3, 4], [0, 2, 3], [2, 3, 4]], [-1, 0, 1, 1])
ONE_LEAF, BARE = Tree(1, [[0, 1, 1]], [-1]), Tree(4)
# A word of pieces 1 to 3: NP over it stays, the node of the word and the node of a part of it do not.
SPLIT_WORD = Tree(5, [[0, 5, 4], [1, 4, 4], [1, 4, 4], [2, 4, 4]], [-1, 0, 1, 2])


def rows_of(sentences: list[Tree], words: list[list[int]] | None = None) -> tuple[RowLists, list[dict]]:
    examples = [example_of(tree, seed) for seed, tree in enumerate(sentences)]
    for example, given_words in zip(examples, words or [], strict=False):
        example["leaves"]["word_index"] = np.array(given_words)
    rows = RowLists(example_ids=[example["example_id"] for example in examples])
    for name in (*ALWAYS, "words"):
        column, part = COLUMNS[name]
        setattr(rows, name, [example[column] if part is None else example[column][part] for example in examples])
    return rows, examples


# Tree regularisation.


def test_before_the_first_leaf_is_a_norm_of_zero():
    tree = Tree(3, [[0, 3, 1]], [-1])
    points = SPLIT_POINTS.build(rows_of([tree], [[0, 1, 2]])[0])
    assert split_scores(torch.eye(3)[None], points).tolist() == [2.0, 2.0]


def check_tree_reg(sentences: list[Tree], words: list[list[int]] | None = None) -> torch.Tensor:
    rows, examples = rows_of(sentences, words)
    points = SPLIT_POINTS.build(rows)
    torch.manual_seed(0)
    states = torch.randn(len(sentences), max(tree.num_leaves for tree in sentences) + 2, 5, dtype=torch.float64)
    states.requires_grad_()
    losses = tree_reg_losses(states, points)
    expected = torch.stack(
        [
            reference_tree_reg(tree, example["leaves"]["word_index"].tolist(), states[b, : tree.num_leaves])
            for b, (tree, example) in enumerate(zip(sentences, examples, strict=True))
        ]
    )
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    of_each = torch.randn(len(sentences), dtype=torch.float64)
    if expected.requires_grad:
        ours, naive = (torch.autograd.grad((x * of_each).sum(), states)[0] for x in (losses, expected))
        torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-12)
    return losses.detach()


@num_examples(60)
@given(batches(max_size=3))
def test_tree_reg_is_that_of_the_paper(sentences):
    check_tree_reg(sentences)


def test_tree_reg_of_special_trees():
    every = [UNARY, ONE_LEAF, BARE, SPLIT_WORD, right_branching(9), Tree(6, [[0, 3, 1], [3, 6, 2]], [-1, -1])]
    words = [list(range(tree.num_leaves)) for tree in every]
    words[3] = [0, 1, 1, 1, 2]
    losses = check_tree_reg(every, words)
    assert losses[1] == losses[2] == 0  # nothing to split
    assert (losses[[0, 3, 4, 5]] > 0).all()
    assert (check_tree_reg([UNARY, ONE_LEAF], [[0, 1, 1], [0]]) == 0).all()  # two words have one split


def test_tree_reg_of_deep_trees():
    """A chain of 130 leaves, against 25 of its spans: all of them take the reference minutes."""
    rows, _ = rows_of([DEEP], [list(range(130))])
    points = SPLIT_POINTS.build(rows)
    assert len(points.gold) == 128 and len(points.span) == sum(range(2, 130))
    assert (points.split[points.gold] == points.start[points.gold] + 1).all()
    check_tree_reg([right_branching(26)], [list(range(26))])


def test_equal_and_zero_states_have_finite_gradients():
    points = SPLIT_POINTS.build(rows_of([right_branching(6)])[0])
    for states in (torch.ones(1, 6, 4), torch.zeros(1, 6, 4)):
        states.requires_grad_()
        loss = tree_reg_losses(states, points).sum()
        assert loss.isfinite() and torch.autograd.grad(loss, states)[0].isfinite().all()


# Transformer Grammars.

KINDS = {"bos": PIECE, "piece": PIECE, "open": OPEN, "close": STACK}


def check_actions(sentences: list[Tree], words: list[list[int]] | None = None) -> Actions:
    rows, examples = rows_of(sentences, words)
    actions = ACTIONS.build(rows)
    mask = actions.attend_mask()
    following = actions.next_ids(VOCAB.pieces, VOCAB.labels)
    offsets = {"bos": BOS_ID, "eos": EOS_ID, "piece": 0, "open": VOCAB.pieces, "close": VOCAB.pieces + VOCAB.labels}
    for b, (tree, example) in enumerate(zip(sentences, examples, strict=True)):
        columns = (example["leaves"]["word_index"], example["leaves"]["piece"], example["nodes"]["label"])
        positions = stack_machine(linearise(tree, *(column.tolist() for column in columns)))
        assert (actions.kind[b] != 0).sum() == len(positions)
        for i, position in enumerate(positions):
            kind, symbol = position.symbol
            assert mask[b, i].nonzero()[:, 0].tolist() == sorted(set(position.attends))
            assert actions.depth[b, i] == position.depth
            assert actions.ids(VOCAB.pieces, VOCAB.labels)[b, i] == offsets[kind] + symbol
            composes = kind == "close" and position.predicts is None
            assert actions.kind[b, i] == (COMPOSE if composes else KINDS[kind])
            expected = PAD_ID if position.predicts is None else offsets[position.predicts[0]] + position.predicts[1]
            assert following[b, i] == expected
        padding = slice(len(positions), None)
        assert (following[b, padding] == PAD_ID).all() and not mask[b, : len(positions), padding].any()
    return actions


@num_examples(60)
@given(batches(max_size=3))
def test_actions_and_masks_are_those_of_a_stack_machine(sentences):
    check_actions(sentences)


def test_actions_of_special_trees():
    words = [[0, 1, 2], [0], [0, 1, 2, 3], [0, 1, 1, 1, 2], list(range(130)), list(range(6))]
    two_roots = Tree(6, [[0, 3, 1], [3, 6, 2]], [-1, -1])
    actions = check_actions([UNARY, ONE_LEAF, BARE, SPLIT_WORD, DEEP, two_roots], words)
    assert (actions.kind == OPEN).sum(1).tolist() == [4, 1, 0, 2, 129, 2]
    assert actions.depth.max() == 130


def test_the_example_of_the_paper():
    """(S (NP the hungry cat NP) (VP meows VP) S): NP) composes its four parts, then stands for them on the stack."""
    tree = Tree(4, [[0, 4, 3], [0, 3, 2], [3, 4, 3]], [-1, 0, 0])
    mask = check_actions([tree], [[0, 1, 2, 3]]).attend_mask()[0]
    composed = 6
    assert mask[composed].nonzero()[:, 0].tolist() == [2, 3, 4, 5, 6]
    assert mask[composed + 1].nonzero()[:, 0].tolist() == [0, 1, 6, 7]
    assert mask[composed + 2].nonzero()[:, 0].tolist() == [0, 1, 6, 8]


def test_crossing_spans_are_refused():
    crossing = Tree(4, [[0, 3, 2], [2, 4, 2]], [-1, 0])
    for kind in (ACTIONS, SPLIT_POINTS):
        with pytest.raises(UserError, match="must lie within its own"):
            kind.build(rows_of([crossing])[0])


@num_examples(15)
@given(batches(max_size=2, max_leaves=6), st.integers(0, 9))
def test_depth_attention_is_that_of_the_paper(sentences, seed):
    rows, examples = rows_of(sentences)
    actions = ACTIONS.build(rows)
    torch.manual_seed(seed)
    layer = DepthAttention(8, 2, dropout=0.0).double()
    torch.nn.init.normal_(layer.content_bias)
    torch.nn.init.normal_(layer.position_bias)
    sinusoids = compute_sinusoids(FARTHEST - NEAREST + 1, 8).double()
    x = torch.randn(*actions.kind.shape, 8, dtype=torch.float64)
    found = layer(x, actions.attend_mask(), depth_differences(actions.depth), sinusoids)
    for b, (tree, example) in enumerate(zip(sentences, examples, strict=True)):
        columns = (example["leaves"]["word_index"], example["leaves"]["piece"], example["nodes"]["label"])
        positions = stack_machine(linearise(tree, *(column.tolist() for column in columns)))
        expected = reference_depth_attention(layer, x[b, : len(positions)], positions, sinusoids)
        torch.testing.assert_close(found[b, : len(positions)], expected, rtol=1e-10, atol=1e-12)


def test_depth_differences_are_cut():
    depth = torch.tensor([[0, 1, 100]])
    assert depth_differences(depth)[0].tolist() == [[1, 0, 0], [2, 1, 0], [63, 63, 1]]


# Whole models.

MODELS = {
    "causal": {"name": "causal_transformer"},
    "tree_reg": {"name": "causal_transformer", "tree_reg": {"weight": 0.5}},
    "grammar": {"name": "transformer_grammar"},
}


def build(case: str) -> CausalLM:
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2)
    return build_causal_lm(ModelConfig(**sizes, **MODELS[case]), VOCAB).double().eval()


def batch_for(model: CausalLM, rows: RowLists) -> CausalBatch:
    rows.targets = rows.pieces
    return to_causal(collate_rows(rows, model.reads), VOCAB)


SENTENCES = [UNARY, ONE_LEAF, BARE, SPLIT_WORD, right_branching(9)]


@pytest.mark.parametrize("case", MODELS)
def test_a_sentence_does_not_see_its_batch(case):
    model = build(case)
    states, loss = model(batch_for(model, rows_of(SENTENCES)[0]))
    total = 0.0
    for b, tree in enumerate(SENTENCES):
        rows, _ = rows_of([tree])
        rows.pieces = [rows_of(SENTENCES)[0].pieces[b]]
        rows.labels = [rows_of(SENTENCES)[0].labels[b]]
        alone, loss_alone = model(batch_for(model, rows))
        torch.testing.assert_close(states[b, : alone.shape[1]], alone[0], rtol=1e-12, atol=1e-12)
        total += 0.0 if loss_alone is None else loss_alone
    if case == "tree_reg":
        torch.testing.assert_close(loss, total, rtol=1e-12, atol=1e-12)
        assert loss > 0
    else:
        assert loss is None


@pytest.mark.parametrize("case", MODELS)
def test_no_position_sees_a_later_one(case):
    model = build(case)
    batch = batch_for(model, rows_of([right_branching(6), SPLIT_WORD])[0])
    before, _ = model(batch)
    for place in range(1, batch.tgt_in.shape[1]):
        changed = batch.tgt_in.clone()
        changed[:, place] = 5
        after, _ = model(replace(batch, tgt_in=changed))
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place], before[:, place])


def test_the_regularised_model_is_the_plain_one_with_a_loss():
    """Weights, states and the loss of pieces do not depend on the regularisation."""
    rows = rows_of(SENTENCES)[0]
    plain, regularised = build("causal"), build("tree_reg")
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), regularised.parameters(), strict=True))
    states, loss = regularised(batch_for(regularised, rows))
    torch.testing.assert_close(states, plain(batch_for(plain, rows))[0], rtol=0, atol=0)
    expected = 0.0
    inner = states.new_zeros(())

    def keep(_module, _inputs, output) -> None:
        nonlocal inner
        inner = output

    hook = regularised.encoder.layers[1].register_forward_hook(keep)  # ceil(3/4 of 2) = layer 2, one of two heads
    regularised(batch_for(regularised, rows))
    hook.remove()
    for b, tree in enumerate(SENTENCES):
        words = rows.words[b].tolist()
        expected += (tree.num_leaves + 1) * reference_tree_reg(tree, words, inner[b, 1 : tree.num_leaves + 1, :8])
    torch.testing.assert_close(loss, 0.5 * expected, rtol=1e-12, atol=1e-12)
