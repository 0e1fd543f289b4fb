"""Dropout by key inside a compiled model, as on GPUs: plain operations, which are the same for batches of all sizes."""

import numpy as np
import pytest
import torch
from model_cases import VOCAB, batch_of
from strategies import right_branching
from torch._dynamo.utils import counters

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import TREES
from treenet.layers import core
from treenet.layers.core import keys_of, share_dropout_keys
from treenet.models import build_model
from treenet.models.compiling import Compiled

pytestmark = pytest.mark.slow

GPU = torch.device("cuda")


@pytest.mark.cluster
@torch.no_grad()
def test_a_compiled_model_drops_what_it_drops_on_a_cpu(monkeypatch):
    """Traced as for Inductor, which takes minutes, and run by the kernels of always."""
    true_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda method, **options: true_compile(method, backend="eager", **options))
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dropout=0.4)
    model = build_model(ModelConfig(name="tree_transformer", **sizes), VOCAB)
    shared, kind = share_dropout_keys(model), TREES.for_device(GPU)

    def encode(batch: TreeBatch) -> torch.Tensor:  # a decoder has the same dropout, and takes as long again to trace
        return model.encode(batch).states

    compiled = Compiled(encode)
    for leaves, target in ((16, 15), (9, 4), (24, 7)):
        batch = batch_of([right_branching(leaves), right_branching(leaves - 3)], kind, target_length=target)
        found = []
        for on_gpu, forward in ((False, encode), (True, compiled)):
            monkeypatch.setattr(core, "_in_kernel", lambda device, answer=on_gpu: answer)
            shared.set(keys_of(np.arange(len(batch), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)))
            found.append(forward(batch))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
