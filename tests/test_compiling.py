"""Models by torch.compile: one graph for all sizes, trees by the real Inductor, what is missing and what is too much."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_cases import VOCAB, batch_of
from strategies import Tree, right_branching
from test_accumulation import UNARY, build_structure
from test_device_spans import build_compact
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from treenet.config import ModelConfig, TrainConfig, TreeAttentionConfig
from treenet.data.input_kinds import LEAVES, TREES
from treenet.layers.accumulation import HierarchicalAccumulation
from treenet.layers.attention import SelfAttention
from treenet.models import build_model, compiling
from treenet.models.compiling import Compiled, check_tools, what_is_missing
from treenet.structure import TreeStructure
from treenet.structure.prepare import prepare
from treeproc.common.settings import UserError

pytestmark = [pytest.mark.slow, pytest.mark.long]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
needs_compiler = pytest.mark.skipif(what_is_missing(CPU) is not None, reason="torch.compile has no C++ compiler here")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def traced(monkeypatch) -> None:
    """Graphs are found as for Inductor, and run by the kernels of always."""
    true_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda method, **options: true_compile(method, backend="eager", **options))


# Sizes.


@pytest.mark.parametrize(
    "name, kind", [("transformer", LEAVES), pytest.param("tree_transformer", TREES, marks=pytest.mark.cluster)]
)
def test_batches_of_all_sizes_have_one_graph_and_those_of_one_example_another(monkeypatch, name, kind):
    """Targets that are empty, which have only EOS, have two columns on a GPU, and need no graph."""
    traced(monkeypatch)
    model = build_model(ModelConfig(name=name, **SIZES), VOCAB).eval()
    method = model.decode if kind is LEAVES else lambda batch: model.encode(batch).states  # it takes half the time to trace
    compiled, kind = Compiled(method), kind.for_device(GPU)
    generator = np.random.default_rng(0)

    def check(trees: list[Tree], target: int) -> None:
        batch = batch_of(trees, kind, target_length=target)
        torch.testing.assert_close(compiled(batch), method(batch))

    # Equal sizes first: they are not taken for one.
    check([right_branching(16)] * 16, 15)
    for _ in range(12):
        leaves = generator.integers(1, 40, generator.integers(2, 9)).tolist()
        check([right_branching(n) for n in leaves], int(generator.integers(1, 20)))
    check([Tree(1), Tree(2)], 3)
    assert count_graphs() == 1
    for trees, target in (([UNARY], 4), ([Tree(1)], 9), ([right_branching(30)], 0), ([UNARY, UNARY], 0), ([Tree(3)] * 3, 0)):
        check(trees, target)
    assert count_graphs() == 2
    assert not counters["graph_break"]


def test_more_graphs_than_the_limit_are_said_once_and_computed_all_the_same(monkeypatch, capsys):
    traced(monkeypatch)
    monkeypatch.setitem(compiling._SETTINGS, "recompile_limit", 2)

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    compiled = Compiled(double)
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.float32):
        assert torch.equal(compiled(torch.ones(3, 2, dtype=dtype)), torch.full((3, 2), 2, dtype=dtype))
    assert count_graphs() == 2
    assert capsys.readouterr().err.count("forms of batches") == 1


def test_a_graph_that_fails_to_compile_warns_and_runs_uncompiled(monkeypatch, capsys):
    def fail(graph, inputs):
        raise ValueError("no such kernel")

    true_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda method, **options: true_compile(method, backend=fail, **options))
    compiled = Compiled(torch.Tensor.square)
    for _ in range(2):
        assert torch.equal(compiled(torch.full((3,), 2.0)), torch.full((3,), 4.0))
    assert capsys.readouterr().err.count("PyTorch cannot compile the model") == 1


# What is there.


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    without_compiler = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with without_compiler, pytest.raises(UserError, match=r"compile=true needs a C\+\+ compiler"):
        check_tools(CPU)


def test_settings_of_earlier_runs_have_no_choice():
    assert TrainConfig(data="data", compile=None).compile is False
    with pytest.raises(ValueError, match="compile"):
        TrainConfig(data="data", compile="")


# The real Inductor.


def check_inductor(method: Callable[..., torch.Tensor], batches: list[tuple], parameters: list[torch.Tensor]) -> None:
    """Values and gradients for arguments of several sizes, by one graph."""
    compiled = Compiled(method)
    for arguments in batches:
        inputs = [x for x in arguments if isinstance(x, torch.Tensor)] + parameters
        found = []
        for run in (compiled, method):
            out = run(*arguments)
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        for fast, slow in zip(*found, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    assert count_graphs() == 1 and not counters["graph_break"]


@pytest.mark.cluster
@needs_compiler
@pytest.mark.timeout(900)
def test_inductor_compiles_attention_over_sizes_that_are_sums():
    """Without `mend_stride_order` it cannot order the strides of a mask over leaves and nodes."""

    def attend(leaves: torch.Tensor, nodes: torch.Tensor, structure: TreeStructure) -> torch.Tensor:
        x = torch.cat([leaves, nodes], 1)[:, None]
        return F.scaled_dot_product_attention(x, x, x, structure.attention.bias)

    batches = []
    for trees in ([right_branching(9), UNARY], [right_branching(20), Tree(3), UNARY], [right_branching(5)] * 5):
        structure = build_structure(trees, attention_path="one", sparse=True)
        sizes = structure.num_leaves, structure.num_nodes
        batches.append((*(torch.randn(len(trees), size, 8, requires_grad=True) for size in sizes), structure))
    check_inductor(attend, batches, [])


def test_the_reference_implementation_is_left_as_it_is():
    structure = build_structure([right_branching(9), UNARY])
    module = SelfAttention(8, 2, 0.0, TreeAttentionConfig(implementation="reference"))
    x = torch.randn(2, structure.num_leaves + structure.num_nodes, 8)
    torch.testing.assert_close(torch.compile(module, backend="eager")(x, None, structure), module(x, None, structure))
    assert count_graphs() <= 4  # before and after the equations, which would be twelve more


@pytest.mark.cluster
@needs_compiler
@pytest.mark.timeout(900)
def test_inductor_computes_compact_trees_as_eager_does():
    config = TreeAttentionConfig(vertical_rows=3, horizontal_rows=4)
    torch.manual_seed(0)
    module = HierarchicalAccumulation(SIZES["d_model"], SIZES["num_heads"], config)

    def accumulate(x: torch.Tensor, structure: TreeStructure) -> torch.Tensor:
        return module.accumulate(x, x, prepare(structure, config, x.dtype, x.dtype))

    batches = []
    for trees in ([right_branching(9), UNARY], [right_branching(30), UNARY, Tree(2)], [right_branching(5)] * 5):
        structure = build_compact(trees)
        shape = len(trees), structure.num_leaves + structure.num_nodes, SIZES["d_model"]
        batches.append((torch.randn(shape, requires_grad=True), structure))
    check_inductor(accumulate, batches, list(module.parameters()))
