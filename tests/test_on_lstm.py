"""The ON-LSTM cell against a loop over neurons, and what it must be where its master gates are open."""

import pytest
import torch
from test_recurrent import random

from treenet.layers.recurrent import OnLSTM, on_lstm
from treeproc.common.settings import UserError


def reference_on_lstm(projected: torch.Tensor, weight: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Shen et al., 2019, equations 1 to 14, one sentence at a time and one neuron at a time: [T, B, G] -> [T, B, H]."""
    steps, batch, _ = projected.shape
    size = len(weight)
    chunks = size // chunk_size
    outputs = []
    for b in range(batch):
        hidden, cell = [projected.new_zeros(())] * size, [projected.new_zeros(())] * size
        for t in range(steps):
            gates = projected[t, b] + torch.stack(hidden) @ weight
            of_forget, of_input = (gates[s * chunks : (s + 1) * chunks].exp() for s in range(2))
            out, enter, forget, candidate = gates[2 * chunks :].view(4, size)
            states = []
            for k in range(size):
                rank = k // chunk_size
                keep = of_forget[: rank + 1].sum() / of_forget.sum()
                write = 1 - of_input[: rank + 1].sum() / of_input.sum()
                both = keep * write
                f = forget[k].sigmoid() * both + keep - both
                i = enter[k].sigmoid() * both + write - both
                states.append(f * cell[k] + i * candidate[k].tanh())
            cell = states
            hidden = [out[k].sigmoid() * cell[k].tanh() for k in range(size)]
            outputs.append(torch.stack(hidden))
    return torch.stack(outputs).view(batch, steps, size).transpose(0, 1)


@pytest.mark.parametrize(("steps", "batch", "size", "chunk_size"), [(5, 3, 6, 2), (1, 1, 4, 4), (4, 2, 3, 1), (3, 1, 8, 4)])
def test_the_cell_agrees_with_a_loop(steps, batch, size, chunk_size):
    gates = 4 * size + 2 * (size // chunk_size)
    projected, weight = random(steps, batch, gates, seed=1), random(size, gates, seed=2)
    fast, slow = on_lstm(projected, weight), reference_on_lstm(projected, weight, chunk_size)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    mixture = random(*fast.shape, seed=3).detach()
    grads = [torch.autograd.grad((x * mixture).sum(), [projected, weight]) for x in (fast, slow)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_gradients_against_differences():
    assert torch.autograd.gradcheck(on_lstm, (random(3, 2, 20, seed=4), random(4, 20, seed=5)))


def test_with_open_master_gates_it_is_an_lstm():
    """f~ = 1 where the first chunk has the whole softmax, and i~ = 1 but in the last chunk where that one has it."""
    torch.manual_seed(0)
    cell, plain = OnLSTM(5, 8, chunk_size=2).double(), torch.nn.LSTM(5, 8, batch_first=True).double()
    with torch.no_grad():
        for weight, ours in ((plain.weight_ih_l0, cell.input.weight), (plain.weight_hh_l0, cell.recurrent.t())):
            ours[:8] = 0
            enter, forget, candidate, out = weight.chunk(4)
            for block, gate in enumerate((out, enter, forget, candidate)):
                ours[8 + 8 * block : 16 + 8 * block] = gate
                ours[14 + 8 * block : 16 + 8 * block] = 0  # neurons of the last chunk, which differ, are switched off
                gate[6:] = 0
        cell.recurrent[6:] = plain.weight_hh_l0[:, 6:] = 0
        plain.bias_hh_l0.zero_(), plain.bias_ih_l0.zero_(), cell.input.bias.zero_()
        cell.input.bias[[0, 7]] = 1000.0
    x = random(2, 6, 5)
    torch.testing.assert_close(cell(x)[..., :6], plain(x)[0][..., :6], rtol=1e-10, atol=1e-10)


def test_padding_at_the_end_changes_nothing():
    cell, x = OnLSTM(4, 8, chunk_size=4).double(), random(2, 7, 4)
    padded = x.detach().clone()
    padded[0, 5:] = 1e3
    torch.testing.assert_close(cell(padded)[0, :5], cell(x[:1, :5])[0], rtol=1e-12, atol=1e-12)


def test_half_precision_stays_out_of_the_recursion():
    cell, x = OnLSTM(16, 16, chunk_size=4), torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, projected = cell(x), cell.input(x.transpose(0, 1))
    assert states.dtype == torch.float32 and projected.dtype == torch.bfloat16
    assert torch.equal(states, on_lstm(projected.float(), cell.recurrent).transpose(0, 1))
    states.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in cell.parameters())


def test_chunks_must_fill_the_states():
    with pytest.raises(UserError, match="chunk_size of an ON-LSTM .* must divide its width 10, and be smaller, but is 4"):
        OnLSTM(10, 10, chunk_size=4)
    with pytest.raises(UserError, match="must divide its width 4, and be smaller, but is 4"):  # all states would be 0
        OnLSTM(10, 4, chunk_size=4)
