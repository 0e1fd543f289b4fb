"""Dropout by key: the share that is dropped, no trace of batch or padding, no correlations."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from treenet.layers.core import Dropout, DropoutKeys, call_offsets, drop, keyed_dropout, keys_of, numbers, share_dropout_keys


def dropout(p: float, ids: list[int], shape: tuple[int, int], num_leaves: int | None = None, calls: int = 1) -> torch.Tensor:
    """Output [B, S, D] of the last of `calls` calls on ones, for examples with keys made of `ids`."""
    model = nn.Sequential(Dropout(p))
    keys = np.array(ids, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(7)
    share_dropout_keys(model).set(keys)
    for _ in range(calls):
        out = model[0](torch.ones(len(ids), *shape), num_leaves)
    return out


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_the_share_is_p_and_the_mean_stays(p):
    out = dropout(p, list(range(40)), (50, 128))
    spread = (p * (1 - p) / out.numel()) ** 0.5
    assert abs(float((out == 0).float().mean()) - p) < 4 * spread
    assert torch.unique(out).tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-4)
    for dimension in (0, 1, 2):  # no row, position or half of an entry is special
        others = [d for d in range(3) if d != dimension]
        shares = (out == 0).float().mean(dim=others)
        assert (shares - p).abs().max() < 5 * spread * out.shape[dimension] ** 0.5


@pytest.mark.parametrize("p", [0.99999, 0.999999, 1 - 2**-53])
def test_a_share_next_to_one_is_finite(p):
    out = dropout(p, list(range(40)), (50, 256))
    assert set(out.unique().tolist()) == {0, 2**16} and 0 < (out > 0).sum() < 40


def test_an_example_drops_the_same_whatever_it_is_batched_with():
    alone = dropout(0.4, [17], (5, 8))
    together = dropout(0.4, [3, 17, 8], (9, 8))
    assert torch.equal(alone[0], together[1, :5])
    assert not torch.equal(together[0], together[1])


def test_nodes_drop_the_same_however_far_the_leaves_are_padded():
    short, long = dropout(0.4, [17], (5 + 4, 8), 5), dropout(0.4, [17], (7 + 6, 8), 7)
    assert torch.equal(short[0, :5], long[0, :5]) and torch.equal(short[0, 5:], long[0, 7 : 7 + 4])
    assert not torch.equal(long[0, 5:7], short[0, 5:7])


def test_masks_are_not_correlated():
    def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
        return abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]))

    out, later = (dropout(0.3, list(range(30)), (40, 64), calls=calls) for calls in (1, 2))
    bound = 4 / out[1:, 1:, 1:].numel() ** 0.5
    assert correlation(out, later) < bound
    assert correlation(out[1:], out[:-1]) < bound
    assert correlation(out[:, 1:], out[:, :-1]) < bound
    assert correlation(out[:, :, 1:], out[:, :, :-1]) < bound
    assert correlation(out[:, :, 2:], out[:, :, :-2]) < bound
    # Of four corners of a rectangle, three would tell the fourth if the hash were linear.
    corners = [out[a::2, :, b::2] == 0 for a in (0, 1) for b in (0, 1)]
    assert correlation((corners[0] ^ corners[1]).float(), (corners[2] ^ corners[3]).float()) < 2 * bound


def test_without_keys_and_out_of_training_it_is_nn_dropout():
    layer, x = Dropout(0.3), torch.randn(2, 3, 4)
    torch.manual_seed(1)
    own = layer(x)
    torch.manual_seed(1)
    assert torch.equal(own, nn.Dropout(0.3)(x))
    share_dropout_keys(layer).set(np.zeros(2, dtype=np.uint64))
    assert torch.equal(layer.eval()(x), x)


# On accelerators.


def masks(p: float, shape: tuple[int, int, int], num_leaves: int | None, function) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout of ones by the mask of CPUs and by `function`, of the fifth call."""
    shared, keys = DropoutKeys(), np.arange(shape[0], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(3)
    shared.set(keys)
    threshold = round(p * 2**16)
    for _ in range(5):
        expected = shared.keep_mask(shape, threshold, num_leaves)
    here = torch.device("cpu")
    given = shared.keys, call_offsets(here)[5], numbers(here), threshold, -1 if num_leaves is None else num_leaves
    return expected * (2**16 / (2**16 - threshold)), function(torch.ones(shape), *given)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 9, 7), (5, 12, 64)])
@pytest.mark.parametrize(("p", "num_leaves"), [(0.1, None), (0.5, 0), (0.3, 1), (0.9, 6)])
def test_accelerators_drop_what_cpus_drop(shape, p, num_leaves):
    num_leaves = None if num_leaves is None else min(num_leaves, shape[1])
    assert torch.equal(*masks(p, shape, num_leaves, drop))
    assert torch.equal(*masks(p, shape, num_leaves, keyed_dropout))


def test_values_that_wrap_around_come_from_memory():
    """Triton kernels of PyTorch 2.11 compute with `torch.arange` in int64, and no compiler of CPUs does."""
    here = torch.device("cpu")
    given = keys_of(np.arange(2, dtype=np.uint64)), call_offsets(here)[5], numbers(here)
    for num_leaves in (-1, 3):
        traced = make_fx(drop)(torch.ones(2, 5, 8), *given, 2**14, num_leaves)
        assert not [node for node in traced.graph.nodes if "arange" in str(node.target)]


@pytest.mark.cluster
def test_compiled_dropout_drops_the_same():
    """The compiler of CPUs makes few graphs for all sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(drop, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        for shape, num_leaves in (((3, 9, 16), 4), ((2, 20, 32), 11), ((7, 5, 8), 2), ((7, 5, 8), None), ((4, 6, 10), None)):
            assert torch.equal(*masks(0.3, shape, num_leaves, compiled))


def test_the_gradient_is_the_same_dropout():
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    keys, offset = torch.tensor([3, 9], dtype=torch.int32), torch.tensor(7, dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x: keyed_dropout(x, keys, offset, numbers(x.device), 2**14, 3), x)


def test_an_accelerator_needs_no_data_for_it():
    layer, x = Dropout(0.3), torch.empty(2, 5, 8, device="meta", requires_grad=True)
    share_dropout_keys(layer).set(keys_of(np.arange(2, dtype=np.uint64)).to("meta"))
    out = layer(x, 3)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape
