"""The flat gradient of all parameters, and the buckets in which ranks send it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from treenet.training import gradients as gradient_sums
from treenet.training.gradients import (
    BUCKET_BYTES,
    FlatGradient,
    MustRepeat,
    OverlappedSums,
    add_gradients_by_row,
    cut_buckets,
)
from treenet.training.ranks import Ranks

CPU = torch.device("cpu")
RANK_0 = Ranks(0, 1, CPU)


def small_model() -> nn.Sequential:
    """Sizes of parameters: 6, 2, 10, 8."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Embedding(5, 2), nn.Linear(2, 4, bias=False))
    model[0].weight.requires_grad_()
    return model


def loss_of(model: nn.Sequential, rows: list[int] = (1, 3)) -> torch.Tensor:
    x = model[0](torch.tensor([[1.0, -2.0, 0.5]])) + model[1](torch.tensor(rows)).sum(0)
    return model[2](x).square().sum()


def test_gradients_are_views_of_one_tensor_in_the_order_of_parameters():
    model = small_model()
    expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    model[2].weight.requires_grad_(False)
    flat = FlatGradient(model)
    assert flat.sizes == [6, 2, 10] and flat.flat.shape == (18,) and not flat.flat.any()
    loss_of(model).backward()
    torch.testing.assert_close(flat.flat, torch.cat([grad.flatten() for grad in expected[:3]]))
    assert flat.norm() == pytest.approx(math.sqrt(sum(grad.square().sum().item() for grad in expected[:3])))
    assert torch.equal(flat.part(0, 1), flat.flat[:6]) and torch.equal(flat.part(1, 3), flat.flat[6:18])
    assert flat.part(2, 2).numel() == 0 and flat.part(0, 3).data_ptr() == flat.flat.data_ptr()
    before = flat.flat.clone()
    flat.sum(RANK_0, None)
    flat.sum(RANK_0, torch.bfloat16)
    flat.finish_pass()
    assert torch.equal(flat.flat, before)
    flat.zero()
    assert not flat.flat.any() and all(p.grad.data_ptr() >= flat.flat.data_ptr() for p in list(model.parameters())[:3])


def test_tables_begin_the_tensor_if_asked():
    assert FlatGradient(small_model(), tables_first=True).sizes == [10, 6, 2, 8]
    assert FlatGradient(small_model(), tables_first=False).sizes == FlatGradient(small_model()).sizes == [6, 2, 10, 8]


def test_separate_gradients_of_a_pass_are_added_at_its_end():
    model = small_model()
    flat, expected = (
        FlatGradient(model),
        torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model), model.parameters())]),
    )
    for times in (1, 2):
        with flat.collecting():
            assert all(parameter.grad is None for parameter in model.parameters())
            loss_of(model).backward()
        torch.testing.assert_close(flat.flat, times * expected)
    with flat.collecting():
        model[2](torch.ones(1, 2)).sum().backward()  # the others have no gradient
    torch.testing.assert_close(flat.flat[-8:], 2 * expected[-8:] + 1)
    torch.testing.assert_close(flat.flat[:-8], 2 * expected[:-8])
    before = flat.flat.clone()
    with flat.collecting():
        pass  # nothing has a gradient
    with pytest.raises(KeyError), flat.collecting():
        loss_of(model).backward()
        raise KeyError
    assert torch.equal(flat.flat, before)
    loss_of(model).backward()  # the views are back
    torch.testing.assert_close(flat.flat, before + expected)


def test_embeddings_add_the_rows_that_were_read():
    model = small_model()
    flat = FlatGradient(model)
    loss_of(model).backward()
    expected = flat.flat.clone()
    add_gradients_by_row(model)
    table = model[1].weight
    for times in (2, 3):
        loss_of(model).backward()
        torch.testing.assert_close(flat.flat, times * expected)
    assert torch.autograd.grad(loss_of(model), table)[0].is_sparse


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 20))
def test_buckets_are_filled_from_the_end_up_to_the_limit(sizes, limit):
    expected, last = [], len(sizes)
    while last:
        first = last - 1
        while first and sum(sizes[first - 1 : last]) <= limit:
            first -= 1
        expected.append((first, last))
        last = first
    assert cut_buckets(sizes, limit) == expected
    assert cut_buckets([5, 3, 4, 9, 1, 1], 8) == [(4, 6), (3, 4), (1, 3), (0, 1)]


def overlapped(monkeypatch, limit: int = 10) -> tuple[nn.Sequential, FlatGradient, OverlappedSums, list[int]]:
    """Sums in buckets of up to `limit` numbers, and the first number of each part that is sent."""
    sent = []

    class Sender(Ranks):
        def start_sum(self, tensor, dtype):
            sent.append(tensor.storage_offset())
            assert dtype == torch.float32
            return super().start_sum(tensor, dtype)

    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 4 * limit + 3)
    model = small_model()
    flat = FlatGradient(model)
    return model, flat, OverlappedSums(flat, Sender(0, 1, CPU), None), sent


@pytest.mark.parametrize(("limit", "parts"), [(10, [18, 8, 0]), (9, [18, 8, 0]), (12, [18, 6, 0]), (18, [8, 0]), (26, [0])])
def test_parts_are_sent_in_the_last_pass_alone_each_once_and_in_order(monkeypatch, limit, parts):
    model, flat, sums, sent = overlapped(monkeypatch, limit)
    for _ in range(2):
        sums.begin()
        flat.zero()
        with flat.collecting():
            loss_of(model).backward()
        assert not sent and flat.flat.any()
        once = flat.flat.clone()
        sums.watch()
        with flat.collecting():
            loss_of(model).backward()
        assert sent == parts
        torch.testing.assert_close(flat.flat, 2 * once)
        sums.finish()
        assert sent == parts
        with flat.collecting():
            loss_of(model).backward()  # as for another update
        assert sent == parts
        sent.clear()


def test_a_pass_before_the_first_update_sends_nothing(monkeypatch):
    model, flat, _, sent = overlapped(monkeypatch)
    with flat.collecting():
        model[0](torch.ones(1, 3)).sum().backward()
    assert not sent


def test_a_rank_without_gradients_sends_all_parts_at_the_end(monkeypatch):
    model, flat, sums, sent = overlapped(monkeypatch)
    sums.begin()
    sums.finish()
    assert sent == [18, 8, 0]
    sums.watch()
    with flat.collecting():
        model[2](torch.ones(1, 2)).sum().backward()  # the last bucket alone is complete
    assert sent == [18, 8, 0, 18]
    with pytest.raises(MustRepeat):
        sums.begin()
    sums.finish()
    assert sent == [18, 8, 0] * 2
    sums.watch()
    sums.begin()  # memory ran out before a bucket was complete
    with flat.collecting():
        loss_of(model).backward()
    assert sent == [18, 8, 0] * 2


def test_one_trained_parameter_is_a_gradient():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    flat = FlatGradient(model)
    model(torch.ones(1, 3)).sum().backward()
    assert flat.flat.tolist() == [1.0] * 6


def test_buckets_are_as_large_as_those_of_pytorch():
    assert BUCKET_BYTES == 25 * 1024 * 1024
