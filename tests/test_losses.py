"""Losses against slow oracles: label smoothing, its form without logits, R-Drop."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from treenet.layers.backend import compiled
from treenet.tasks import losses
from treenet.tasks.losses import label_smoothed_nll, projected_nll, r_drop_loss, symmetric_divergence
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_loss_agrees_with_a_slow_oracle(smoothing):
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 11, dtype=torch.float64), torch.randint(1, 11, (3, 5))
    targets[0, 3:] = targets[2, 1:] = PAD_ID
    sums = label_smoothed_nll(logits, targets, smoothing)
    loss = nll = 0.0
    for row in range(3):
        for position in range(5):
            target = int(targets[row, position])
            if target == PAD_ID:
                continue
            z = [math.exp(v) for v in logits[row, position].tolist()]
            log_probs = [math.log(v / sum(z)) for v in z]
            nll -= log_probs[target]
            loss -= sum(((1 - smoothing) * (i == target) + smoothing / 11) * log_prob for i, log_prob in enumerate(log_probs))
    assert float(sums.loss) == pytest.approx(loss, rel=1e-5)
    assert float(sums.nll) == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_loss_of_states_equals_that_of_their_logits(smoothing, tokens, monkeypatch):
    """Values and gradients, in one chunk and in several with a rest; nothing is left of padding, not even of infinity."""
    monkeypatch.setattr(losses, "_ROWS", 64)
    torch.manual_seed(0)
    states, table = torch.randn(2, tokens, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    targets = torch.randint(1, 9, (2, tokens))
    targets[1, tokens // 2 :] = PAD_ID
    given = [x.clone().requires_grad_() for x in (states, table)]
    states[targets == PAD_ID] = float("inf")
    taken = [x.requires_grad_() for x in (states, table)]
    counted = targets != PAD_ID
    expected = F.cross_entropy((given[0] @ given[1].t())[counted], targets[counted], reduction="sum", label_smoothing=smoothing)
    sums = projected_nll(*taken, targets, smoothing)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        sums.nll, F.cross_entropy((given[0] @ given[1].t())[counted], targets[counted], reduction="sum"), rtol=1e-12, atol=0
    )
    expected_grads = torch.autograd.grad(expected * 0.7, given)
    torch.testing.assert_close(torch.autograd.grad(sums.loss * 0.7, taken), expected_grads, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert projected_nll(*taken, targets, smoothing).loss == sums.loss


def test_loss_of_states_under_autocast_rounds_no_more_than_bf16():
    torch.manual_seed(0)
    states, table, targets = torch.randn(40, 32, requires_grad=True), torch.randn(500, 32) / 6, torch.randint(1, 500, (40,))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            sums = projected_nll(states, table, targets, 0.1)
        results.append((sums.loss.detach(), *torch.autograd.grad(sums.loss, states)))
    (loss, grad), (rounded_loss, rounded_grad) = results
    assert rounded_loss != loss and abs(rounded_loss - loss) / loss < 0.003
    assert (rounded_grad - grad).norm() / grad.norm() < 0.02


def test_loss_of_states_in_float16_keeps_small_gradients():
    """Beside float32, with probabilities that float16 has no bits for."""
    torch.manual_seed(0)
    states, table, targets = torch.randn(40, 32), torch.randn(30_000, 32) / 6, torch.randint(1, 30_000, (40,))
    grads = []
    for enabled in (False, True):
        given = [x.clone().requires_grad_() for x in (states, table)]
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            sums = projected_nll(*given, targets, 0.1)
        grads.append(torch.autograd.grad(sums.loss, given))
    for exact, rounded in zip(*grads, strict=True):
        assert (rounded - exact).norm() / exact.norm() < 0.005
    rare = torch.ones(30_000, dtype=torch.bool).index_fill(0, targets, False)
    assert (grads[1][1][rare] - grads[0][1][rare]).norm() / grads[0][1][rare].norm() < 0.02


def test_the_factor_of_float16_changes_no_digit(monkeypatch):
    """It is a power of two. Probabilities are so large here that none is rounded to 0."""
    torch.manual_seed(0)
    states, table, targets = torch.randn(20, 8), torch.randn(12, 8) / 4, torch.randint(1, 12, (20,))
    grads = []
    for factor in (losses._FLOAT16_FACTOR, 8.0):
        monkeypatch.setattr(losses, "_FLOAT16_FACTOR", factor)
        given = [x.clone().requires_grad_() for x in (states, table)]
        with torch.autocast("cpu", dtype=torch.float16):
            grads.append(torch.autograd.grad(projected_nll(*given, targets, 0.1).loss, given))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.cluster
def test_a_compiled_chunk_of_the_loss_gives_the_same():
    """The compiler of CPUs makes two graphs for several sizes, and others for another smoothing, also from its cache on disk."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True, specialize_float=False):
        chunk = compiled(losses.score_chunk)
        for tokens, smoothing, with_grad in ((5, 0.1, True), (9, 0.1, True), (7, 0.1, False), (5, 0.3, True)):
            given = torch.randn(tokens, 6), torch.randn(20, 6), torch.randint(0, 20, (tokens, 1)), smoothing, 1.0, with_grad
            for found, expected in zip(chunk(*given), losses.score_chunk(*given), strict=True):
                torch.testing.assert_close(found, expected)


def test_a_loss_of_states_has_no_second_derivative():
    """Its gradients come from the forward pass; a graph through them would lack the curvature of the loss."""
    states, table = torch.randn(3, 6, requires_grad=True), torch.randn(9, 6)
    with pytest.raises(UserError, match="no second derivatives; take gradients without create_graph"):
        torch.autograd.grad(projected_nll(states, table, torch.tensor([3, 4, 5]), 0.1).loss, states, create_graph=True)


def test_divergence_agrees_with_both_divergences_of_torch():
    torch.manual_seed(0)
    first, second, targets = torch.randn(2, 4, 9), torch.randn(2, 4, 9), torch.randint(1, 9, (2, 4))
    targets[0, 2:] = PAD_ID
    expected = 0.0
    for row, position in itertools.product(range(2), range(4)):
        if targets[row, position] != PAD_ID:
            p, q = (logits[row, position].log_softmax(0) for logits in (first, second))
            kl = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))]
            expected += float(sum(kl)) / 2
    assert float(symmetric_divergence(first, second, targets)) == pytest.approx(expected, rel=1e-5)
    sums = r_drop_loss(first, second, targets, 0.1, 3.0)
    one, other = (label_smoothed_nll(logits, targets, 0.1) for logits in (first, second))
    assert float(sums.loss) == pytest.approx(float(one.loss + other.loss) + 3 * expected, rel=1e-5)
    assert float(sums.nll) == pytest.approx(float(one.nll + other.nll) / 2, rel=1e-5)


def test_equal_passes_do_not_diverge_and_padding_gets_no_gradient():
    first = torch.randn(1, 3, 7)
    first[0, 2] = float("inf")
    second = first.clone().requires_grad_()
    divergence = symmetric_divergence(first.requires_grad_(), second, torch.tensor([[4, 3, PAD_ID]]))
    divergence.backward()
    assert not divergence.any() and torch.isfinite(first.grad).all()
    assert not first.grad[0, 2].any()
