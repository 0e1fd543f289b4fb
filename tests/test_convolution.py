"""Lightweight, dynamic and gated convolutions, and ConvS2S, against explicit loops over positions: values and gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import VOCAB, batch_of, tiny_model
from strategies import Tree, right_branching
from torch import Tensor

from treenet.config import ModelConfig, TrainConfig
from treenet.layers import convolution
from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.convolution import (
    CausalConvolution,
    CentredConvolution,
    DynamicKernels,
    GatedConvolution,
    LightweightKernels,
    convolve,
)
from treenet.layers.core import share_dropout_keys
from treenet.models import VocabSizes, build_model
from treenet.models.encoders.convolution import scale_gradient
from treeproc.common.settings import load_settings

HEADS, CHANNELS = 2, 3
D_MODEL = HEADS * CHANNELS * 2  # a multiple of 2 * HEADS


def reference_convolve(x: Tensor, kernels: Tensor, left: int) -> Tensor:
    """x [S, K] of one head, kernels [S, W]: a loop over positions and taps."""
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[0])
        for tap in range(kernels.shape[1]):
            if 0 <= t + tap - left < len(x):
                row = row + kernels[t, tap] * x[t + tap - left]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("at_once", "chunk"), [(99, 99), (0, 1), (0, 3)])
@given(size=st.integers(1, 9), width=st.integers(1, 12), shared=st.booleans(), data=st.data())
@num_examples(20)
def test_products_with_bands_equal_loops(at_once, chunk, size, width, shared, data):
    left = data.draw(st.integers(0, width - 1))
    torch.manual_seed(size * width)
    x = torch.randn(2, HEADS, size, CHANNELS, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(*((1, HEADS, 1) if shared else (2, HEADS, size)), width, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_AT_ONCE", at_once)
        patch.setattr(convolution, "_CHUNK", chunk)
        out = convolve(x, kernels, left)
    all_kernels = kernels.expand(2, -1, size, -1)
    expected = torch.stack(
        [torch.stack([reference_convolve(x[b, h], all_kernels[b, h], left) for h in range(HEADS)]) for b in range(2)]
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(out)
    grads, expected_grads = (torch.autograd.grad((y * weight).sum(), (x, kernels)) for y in (out, expected))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


def build(cls: type, dynamic: bool, size: int, **options) -> CentredConvolution | CausalConvolution:
    """Build a convolution in float64 and evaluation mode, with random biases."""
    config = ModelConfig(d_model=D_MODEL, num_heads=HEADS, convolution=options)
    torch.manual_seed(0)
    module = cls(config, (DynamicKernels if dynamic else LightweightKernels)(config, size))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def reference_module(module: CentredConvolution | CausalConvolution, x: Tensor, left: int) -> Tensor:
    """x [S, D] of one sentence without padding."""
    x = module.input(x)
    if module.gated:
        first, second = x.chunk(2, dim=1)
        x = first * torch.sigmoid(second)
    heads = []
    for head, channels in enumerate(x.chunk(HEADS, dim=1)):
        if isinstance(module.kernels, DynamicKernels):
            size = module.kernels.shape[1]
            logits = torch.stack([module.kernels.logits.weight[head * size : (head + 1) * size] @ row for row in x])
        else:
            logits = module.kernels.weight[head].expand(len(x), -1)
        exponentials = logits.exp()
        heads.append(reference_convolve(channels, exponentials / exponentials.sum(1, keepdim=True), left))
    return module.output(torch.cat(heads, dim=1))


SIZES = [(1, True), (3, False), (4, True), (31, True)]
CONVOLUTIONS = [(dynamic, *size) for dynamic in (False, True) for size in SIZES]


@pytest.mark.parametrize(("dynamic", "size", "gated"), CONVOLUTIONS)
def test_centred_convolution_equals_the_formula_whatever_the_padding(dynamic, size, gated):
    module = build(CentredConvolution, dynamic, size, gated=gated)
    lengths = [5, 1, 3]
    pad_mask = torch.arange(5) >= torch.tensor(lengths)[:, None]
    x = torch.randn(3, 5, D_MODEL, dtype=torch.float64, requires_grad=True)
    out = module(x, padding_to_attend_mask(pad_mask))
    expected = [reference_module(module, row[:length], (size - 1) // 2) for row, length in zip(x, lengths, strict=True)]
    for row, length, right in zip(out, lengths, expected, strict=True):
        torch.testing.assert_close(row[:length], right, rtol=1e-12, atol=1e-12)
    inputs = (x, *module.parameters())
    grads = torch.autograd.grad(out[~pad_mask].square().sum(), inputs)
    expected_grads = torch.autograd.grad(sum(right.square().sum() for right in expected), inputs)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dynamic", "size", "gated"), CONVOLUTIONS)
def test_causal_convolution_equals_the_formula_at_once_and_step_by_step(dynamic, size, gated):
    module = build(CausalConvolution, dynamic, size, gated=gated)
    x = torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    expected = torch.stack([reference_module(module, row, size - 1) for row in x])
    out, last = module(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    past = module.start(x.unflatten(2, (HEADS, -1)).transpose(1, 2))
    for t in range(6):
        step, past = module(x[:, t : t + 1], past)
        torch.testing.assert_close(step[:, 0], expected[:, t], rtol=1e-12, atol=1e-12)
        assert past[0].shape[2] == min(t + 1, size - 1)
    torch.testing.assert_close(past, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_are_dropped_after_the_softmax_by_example(dynamic):
    kernels = build(CentredConvolution, dynamic, 7, weight_dropout=0.4).kernels
    x = torch.randn(50, 20, D_MODEL, dtype=torch.float64)
    full = kernels(x).expand(50, HEADS, 20 if dynamic else 1, 7)
    torch.testing.assert_close(full.sum(3), torch.ones_like(full[..., 0]))
    kernels.train()
    shared = share_dropout_keys(kernels)

    def dropped(rows: list[int]) -> Tensor:
        shared.set(np.array(rows, dtype=np.uint64) * np.uint64(0x9E3779B1))
        return kernels(x[rows])

    weights = dropped(list(range(50)))
    assert weights.shape == full.shape
    gone = weights == 0
    share = float(gone.double().mean())
    assert abs(share - 0.4) < 4 * (0.24 / gone.numel()) ** 0.5
    torch.testing.assert_close(weights[~gone], full[~gone] / 0.6, rtol=1e-4, atol=0)
    torch.testing.assert_close(dropped([17, 3]), weights[[17, 3]], rtol=1e-12, atol=1e-12)
    if dynamic:  # each position has its own
        assert not torch.equal(gone[:, :, 0], gone[:, :, 1])


def test_layers_have_the_kernels_of_the_list_and_those_above_it_the_last():
    sizes = {"encoder_kernels": [3, 5], "decoder_kernels": [2, 4, 6]}
    config = ModelConfig(name="lightconv", d_model=16, d_ff=16, num_heads=2, num_encoder_layers=4, convolution=sizes)
    model = build_model(config, VOCAB)
    assert [layer.self_attention.kernels.weight.shape[1] for layer in model.encoder.layers] == [3, 5, 5, 5]
    assert [layer.self_attention.kernels.weight.shape[1] for layer in model.decoder.layers] == [2, 4, 6, 6, 6, 6]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gated_convolution_equals_torch_and_steps(size, causal):
    """`conv1d` with the weights v * g / |v| of each output channel."""
    torch.manual_seed(0)
    module = GatedConvolution(6, size, 0.0, causal=causal).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weights = module.windows.parametrizations.weight
    v = weights.original1.unflatten(1, (size, 6)).transpose(1, 2)  # [2 D, D, W]
    kernel = v * (weights.original0 / v.flatten(1).norm(dim=1, keepdim=True))[..., None]
    before = size - 1 if causal else (size - 1) // 2
    padded = torch.nn.functional.pad(x.transpose(1, 2), (before, size - 1 - before))
    first, second = torch.nn.functional.conv1d(padded, kernel, module.windows.bias).transpose(1, 2).chunk(2, dim=2)
    expected = first * torch.sigmoid(second)
    out = module(x)[0]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    inputs = (x, *module.parameters())
    grads, expected_grads = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-11, atol=1e-11)
    if causal:
        past = module.start(x)
        for t in range(5):
            step, past = module(x[:, t : t + 1], past)
            torch.testing.assert_close(step[:, 0], expected[:, t], rtol=1e-12, atol=1e-12)
            assert past.shape == (2, size - 1, 6)


def reference_gated(module: GatedConvolution, x: Tensor, before: int) -> Tensor:
    """x [T, D]: a loop over positions, zeros beyond the ends."""
    size, zero, rows = module.before + module.after + 1, torch.zeros_like(x[0]), []
    for t in range(len(x)):
        window = [x[t + tap - before] if 0 <= t + tap - before < len(x) else zero for tap in range(size)]
        first, second = module.windows(torch.cat(window)).chunk(2)
        rows.append(first * torch.sigmoid(second))
    return torch.stack(rows)


def reference_convs2s(model, source: Tensor, target: Tensor, released: bool) -> Tensor:
    """One sentence, position by position: pieces [S] and [T] -> logits [T, V]."""
    half, layers = math.sqrt(0.5), len(model.decoder.layers)
    embedded = torch.stack([model.encoder.embedding.weight[p] + model.encoder.positions.table[i] for i, p in enumerate(source)])
    x = model.encoder.input(embedded)
    for layer in model.encoder.layers:
        size = layer.convolution.before + layer.convolution.after + 1
        x = half * (x + reference_gated(layer.convolution, x, (size - 1) // 2))
    z = model.encoder.output(x)
    z.register_hook(lambda grad: grad / layers / (2 if released else 1))
    values = (z + embedded) * (half if released else 1)
    g = torch.stack([model.encoder.embedding.weight[p] + model.decoder.positions.table[i] for i, p in enumerate(target)])
    h = model.decoder.input(g)
    for layer in model.decoder.layers:
        convolved = reference_gated(layer.convolution, h, layer.convolution.before + layer.convolution.after)
        states = convolved if released else half * (convolved + h)
        rows = []
        for t in range(len(target)):
            query = (layer.queries(states[t]) + g[t]) * (half if released else 1)
            odds = torch.stack([torch.exp(query @ z[j]) for j in range(len(source))])
            context = sum(odds[j] / odds.sum() * values[j] for j in range(len(source)))
            context = context * len(source) * math.sqrt(1 / len(source))
            if released:
                rows.append(half * (half * (layer.output(context) + states[t]) + h[t]))
            else:
                rows.append(states[t] + context)
        h = torch.stack(rows)
    return model.decoder.output(h) @ model.encoder.embedding.weight.T


@pytest.mark.parametrize("case", ["convs2s", "convs2s_released"])
def test_convs2s_equals_its_formulas(case):
    model = tiny_model(case)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    batch = batch_of([right_branching(n) for n in (4, 1, 6)], target_length=3)
    logits = model(batch)
    inputs = list(model.parameters())
    expected = []
    for pieces, padding, target in zip(batch.leaf_pieces, batch.leaf_pad_mask, batch.tgt_in, strict=True):
        expected.append(reference_convs2s(model, pieces[~padding], target, case == "convs2s_released"))
    expected = torch.stack(expected)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(logits)
    grads, expected_grads = (torch.autograd.grad((y * weight).sum(), inputs) for y in (logits, expected))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-9)


def test_positions_beyond_the_table_share_its_last_row():
    model = tiny_model("convs2s", convs2s={"position_rows": 3})
    batch = batch_of([Tree(7)], target_length=6)
    expected = model(batch)
    state = model.start_decoding(model.encode(batch))
    for t in range(7):
        logits, state = model.decode_step(batch.tgt_in[:, t], state)
        torch.testing.assert_close(logits, expected[:, t], rtol=1e-12, atol=1e-12)
    grad = torch.autograd.grad(expected.sum(), model.decoder.positions.table)[0]
    assert grad.shape == (3, 16) and grad.abs().sum(1).min() > 0


def test_a_scaled_gradient_leaves_values():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    out = scale_gradient(x, 0.25)
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 0.25))


# Parameters with 32,000 pieces: the first two are compared with the Transformer's at equal size, ConvS2S is smaller.
IWSLT = {"lightconv": 43_202_092, "dynamicconv": 43_747_840, "convs2s": 11_938_304}


@pytest.mark.parametrize("name", IWSLT)
def test_sizes_of_the_configurations(name, repository):
    folder = repository / "workflows" / "configs"
    config = load_settings(TrainConfig, folder / f"iwslt14_en_de_{name}.yaml", ["data=somewhere"])
    base = load_settings(TrainConfig, folder / "iwslt14_en_de.yaml", ["data=somewhere", "model.name=transformer"])
    assert config.model.name == name
    without = {"model": {}, "data": config.data}
    assert config.model_copy(update=without) == base.model_copy(update=without)
    with torch.device("meta"):
        sizes = [
            sum(parameter.numel() for parameter in build_model(model, VocabSizes(32_000, 60)).parameters())
            for model in (config.model, base.model)
        ]
    assert sizes[0] == IWSLT[name] and sizes[1] == 47_927_296
    assert name == "convs2s" or sizes[0] / sizes[1] > 0.9
