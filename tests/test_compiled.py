"""Functions that are compiled for GPUs where the model is not: few graphs, and a word where that fails."""

from functools import cache
from threading import Thread

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from treenet.layers import backend
from treenet.layers.backend import CompiledOnGpu


def double(x: torch.Tensor, factor: float) -> torch.Tensor:
    return 2 * x * factor


@pytest.fixture
def on_gpu(monkeypatch):
    """CPUs count as GPUs; graphs are found as for Inductor and run by the kernels of always."""
    true_compile = torch.compile
    monkeypatch.setattr(backend, "_is_gpu", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda function, **options: true_compile(function, backend="eager", **options))
    monkeypatch.setattr(backend, "compiled", cache(backend.compiled.__wrapped__))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_sizes_passes_and_autocast_share_a_graph(on_gpu):
    function = CompiledOnGpu(double)
    for size in (3, 5, 9):
        for grad in (True, False):
            for autocast in (True, False):
                with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    assert torch.equal(function(torch.ones(size, 4), 3.0), torch.full((size, 4), 6.0))
    assert counters["stats"]["unique_graphs"] == 1


def test_every_float_has_a_graph_in_every_thread(on_gpu):
    """Threads have their own settings of the compiler. A graph for several floats may come back with one of them."""
    function, found = CompiledOnGpu(double), []
    for factor in (2.0, 3.0, 4.0):
        thread = Thread(target=lambda factor=factor: found.append(function(torch.ones(2), factor).tolist()))
        thread.start()
        thread.join()
    assert found == [[4, 4], [6, 6], [8, 8]]
    assert counters["stats"]["unique_graphs"] == 3


def test_on_cpus_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(backend, "compiled", lambda function: pytest.fail("compiled on a CPU"))
    assert CompiledOnGpu(double)(torch.ones(2), 1.0).tolist() == [2, 2]


def test_a_function_that_cannot_compile_warns_once_and_runs_uncompiled(on_gpu, monkeypatch, capsys):
    def fails(function):
        raise TorchDynamoException("no compiler")

    monkeypatch.setattr(backend, "compiled", fails)
    function = CompiledOnGpu(double)
    for _ in range(2):
        assert function(torch.ones(2), 1.0).tolist() == [2, 2]
    assert capsys.readouterr().err.count("warning: double runs slower, because it is not compiled: ") == 1
