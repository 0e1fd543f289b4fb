"""LSTM encoders and decoders: Tree2Seq and its sequence baseline against loops, values and gradients; roots; what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import example_of, tiny_model
from reference_recurrent import reference_bilstm, reference_lstm, reference_outputs, reference_states
from strategies import Tree, binary_trees, right_branching
from toyruns import make_config

from treenet.data.batch import collate
from treenet.data.input_kinds import BINARY_TREES
from treenet.layers.core import Dropout
from treenet.layers.recurrent import build_bilstm, build_lstm, last_state, last_states, run_bilstm, run_lstm
from treenet.tasks.base import build_task
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID

# Names of models, and settings of `model.recurrent`, so that each value of each is there.
SYSTEMS = [
    ("tree2seq", {}),
    ("tree2seq", {"leaf_lstm": False, "start": "max"}),
    ("tree2seq", {"start": "attention", "attend": False}),
    ("child_sum_tree2seq", {}),
    ("child_sum_tree2seq", {"leaf_lstm": False, "start": "attention"}),
    ("bilstm", {}),
    ("bilstm", {"start": "mean"}),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def assert_same_with_gradients(fast: torch.Tensor, slow: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    mixture = torch.linspace(-1, 1, fast.numel(), dtype=torch.float64).view_as(fast)
    grads = [torch.autograd.grad((x * mixture).sum(), inputs, materialize_grads=True, allow_unused=True) for x in (fast, slow)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@num_examples(10)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_forward_alone_is_a_loop_over_single_sentences(lengths):
    torch.manual_seed(0)
    layers = build_lstm(4, 4, 2).double()
    x = random(len(lengths), max(lengths), 4)
    pad_mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    hidden, cells = run_lstm(x, layers, Dropout(0.0), with_cells=True)
    zero = (torch.zeros(4, dtype=torch.float64),) * 2
    fast, slow = [], []
    for row, length in enumerate(lengths):
        lower = reference_lstm(layers[0], x[row, :length], zero)
        upper = reference_lstm(layers[1], [state for state, _ in lower], zero)
        fast += [hidden[row, :length], cells[row, :length]]
        slow += [torch.stack([state for state, _ in upper]), torch.stack([cell for _, cell in upper])]
        torch.testing.assert_close(last_state(hidden, pad_mask)[row], upper[-1][0])
    assert_same_with_gradients(torch.cat(fast), torch.cat(slow), [x, *layers.parameters()])


@pytest.mark.parametrize("directions", [1, 2])
def test_dropout_is_between_layers_alone(directions):
    """To double what a layer gets is to double its weights of inputs."""
    torch.manual_seed(0)
    doubled: list = []
    x, pad_mask = random(2, 3, 4), torch.tensor([[False] * 3, [False, True, True]])
    for _ in range(2):
        torch.manual_seed(1)
        layers = build_bilstm(4, 3) if directions == 2 else (build_lstm(4, 4, 3),)
        doubled.append([layer.double() for layer in layers])
    with torch.no_grad():
        for direction in doubled[1]:
            for layer in direction[1:]:
                layer.weight_ih_l0 *= 2
    run = (
        (lambda layers, dropout: run_lstm(x, *layers, dropout)[0])
        if directions == 1
        else (lambda layers, dropout: run_bilstm(x, pad_mask, *layers, dropout)[0])
    )
    torch.testing.assert_close(run(doubled[0], lambda values: 2 * values), run(doubled[1], lambda values: values))


@num_examples(10)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_both_directions_are_those_of_loops_over_single_sentences(lengths):
    torch.manual_seed(0)
    layers = [part.double() for part in build_bilstm(4, 2)]
    pad_mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    x = random(*pad_mask.shape, 4)
    states = run_bilstm(x, pad_mask, *layers, Dropout(0.0), with_cells=True)
    loops = [reference_bilstm(*layers, list(x[row, :length])) for row, length in enumerate(lengths)]
    slow = torch.stack([torch.stack(part) for part in zip(*(state for sentence in loops for state in sentence), strict=True)])
    parameters = [parameter for part in layers for parameter in part.parameters()]
    assert_same_with_gradients(torch.stack([part[~pad_mask] for part in states]), slow, [x, *parameters])
    for row, sentence in enumerate(loops):
        expected = torch.cat([sentence[-1][0][:2], sentence[0][0][2:]])
        torch.testing.assert_close(last_states(states[0], pad_mask)[row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recurrent"), SYSTEMS)
@num_examples(5)
@given(trees=st.lists(binary_trees(max_leaves=6), min_size=1, max_size=3))
def test_a_model_is_its_loop(name, recurrent, trees):
    model = tiny_model(name, recurrent=recurrent, d_model=8)
    examples = [example_of(tree, seed) for seed, tree in enumerate(trees)]
    batch = collate(examples, model.reads)
    found = model.decode(batch)
    fast = torch.cat([found[row, batch.tgt_out[row] != PAD_ID] for row in range(len(trees))])
    slow = []
    for row, (tree, example) in enumerate(zip(trees, examples, strict=True)):
        states, start = reference_states(model, example, tree)
        targets = batch.tgt_in[row, : len(example["tgt_pieces"]) + 1].tolist()
        slow.append(reference_outputs(model, targets, states, start))
    assert_same_with_gradients(fast, torch.cat(slow), list(model.parameters()))


def test_the_decoder_starts_from_the_root_of_several_from_their_mean():
    model = tiny_model("tree2seq")
    two_roots = Tree(5, [[0, 2, 1], [2, 4, 2]], [-1, -1])  # and a leaf outside of both
    trees = [two_roots, right_branching(4), Tree(1)]
    memory = model.encode(collate([example_of(tree, seed) for seed, tree in enumerate(trees)], model.reads))
    first_node = 5
    roots = [[first_node, first_node + 1, 4], [first_node], [0]]
    for row, places in enumerate(roots):
        torch.testing.assert_close(memory.start[0][row], memory.states[row, places].mean(0), rtol=1e-12, atol=1e-12)


def test_trees_matter_and_a_decoder_that_does_not_attend_knows_its_start_alone():
    left = Tree(4, [[0, 4, 3], [0, 3, 3], [0, 2, 3]], [-1, 0, 1])
    batches = [collate([example_of(tree)], BINARY_TREES) for tree in (left, right_branching(4))]
    batches[1].leaf_pieces, batches[1].tgt_in = batches[0].leaf_pieces, batches[0].tgt_in
    batches[1].tgt_out = batches[0].tgt_out
    first, second = map(tiny_model("tree2seq"), batches)
    assert (first - second).abs().max() > 1e-3
    model = tiny_model("tree2seq", recurrent={"attend": False})
    memory = model.encode(batches[0])
    logits, _ = model.decode_step(torch.tensor([5]), model.start_decoding(memory))
    memory.states = torch.zeros_like(memory.states)
    again, _ = model.decode_step(torch.tensor([5]), model.start_decoding(memory))
    assert torch.equal(logits, again)


def test_trees_that_need_not_be_binary_are_refused_at_the_start(tmp_path):
    index = {"columns": ["leaves", "tgt_pieces"], "tree_settings": {"binarize": "none"}}
    with pytest.raises(UserError, match=r"need not be binary, and model\.name = tree2seq .* with tree\.binarize=right"):
        build_task(make_config(tmp_path, "model.name=tree2seq")).check(index)
    build_task(make_config(tmp_path, "model.name=bilstm")).check(index)
    build_task(make_config(tmp_path, "model.name=tree2seq")).check({**index, "tree_settings": {"binarize": "left"}})
