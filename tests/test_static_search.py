"""Beam search over a static cache: the same translations, the same shapes and addresses at every step, and graphs of steps."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from meta_device import DeviceOperations
from model_cases import MODEL_CASES, batch_of, tiny_model
from recorded_graph import RecordedGraph, operations_of
from strategies import Tree, right_branching

from treenet.config import DecodingConfig
from treenet.models.decoders import transformer
from treenet.translation import caches
from treenet.translation.caches import Steps, choose_steps, has_static_cache
from treenet.translation.hypotheses import Lengths
from treenet.translation.line_constraints import BatchConstraints, LineConstraints
from treenet.translation.search import Search, begin_beam_search, search_batch
from treenet.translation.translate import Ensemble

SENTENCES = [
    Tree(5, [(0, 5, 3), (0, 2, 2), (3, 5, 3)]),
    Tree(1, [(0, 1, 1)]),
    right_branching(9),
    Tree(3, [(0, 3, 2), (1, 3, 2)]),
]
DECODING = DecodingConfig(beam_size=4, max_length_factor=1.5, max_length_offset=4)  # 5 to 17 pieces
LINES = LineConstraints(prefix=(7, 9)), LineConstraints(required=((5, 6, 5),)), LineConstraints(), LineConstraints(prefix=(4,))
STATIC = [name for name in MODEL_CASES if has_static_cache(tiny_model(name))]


@pytest.fixture(autouse=True)
def small_capacity(monkeypatch):
    """Searches begin with 4 positions and go on with 8, 16 and 32."""
    monkeypatch.setattr(transformer, "FIRST_CAPACITY", 4)


@pytest.fixture
def graphs(monkeypatch) -> list[RecordedGraph]:
    """A CPU captures graphs too: the list of them."""
    made: list[RecordedGraph] = []

    def capture(step, device):
        made.append(RecordedGraph(step))
        return made[-1]

    monkeypatch.setattr(caches, "_is_gpu", lambda device: True)
    monkeypatch.setattr(caches, "capture", capture)
    monkeypatch.setattr(caches.Captured, "_failed", False)
    return made


def model_of(case: str, **sizes: int):
    """A model of which some hypotheses end early and others late."""
    if case == "ensemble":
        return Ensemble([model_of("transformer"), model_of("tree_transformer")])
    model = tiny_model(case, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    return model


def begin(model) -> Search:
    """A search over a static cache before its first step."""
    batch = batch_of(SENTENCES, model.reads)
    return begin_beam_search(model, model.encode(batch), Lengths(batch, DECODING), [], DECODING, num_best=2, steps=Steps.STATIC)


def same(found, expected) -> None:
    assert [[h.ids for h in own] for own in found] == [[h.ids for h in own] for own in expected]
    for own, others in zip(found, expected, strict=True):
        assert [h.score for h in own] == pytest.approx([h.score for h in others], abs=1e-5)


def test_decoders_with_self_attention_have_a_static_cache():
    assert {"transformer", "tree_transformer", "relative_positions", "constituent_transformer"} < set(STATIC)
    others = {"convs2s", "lightconv", "dynamicconv", "bilstm", "tree2seq"}
    assert not others & set(STATIC)
    for name in others:
        assert choose_steps(tiny_model(name), torch.device("cuda")) is Steps.GRID
        with pytest.raises(ValueError, match="no static cache"):
            search_batch(tiny_model(name), batch_of(SENTENCES, tiny_model(name).reads), DECODING, steps=Steps.STATIC)
    model, gpu, cpu = tiny_model("transformer"), torch.device("cuda"), torch.device("cpu")
    assert [choose_steps(model, gpu), choose_steps(model, cpu), choose_steps(model, cpu, compiled=True)] == [
        Steps.STATIC,
        Steps.LIVE,
        Steps.COMPILED,
    ]


@pytest.mark.parametrize("case", [*STATIC, "ensemble"])
def test_a_static_cache_finds_the_same(case):
    """With padding, hypotheses that end early, and three capacities."""
    model = model_of(case)
    batch = batch_of(SENTENCES, model.reads)
    expected = search_batch(model, batch, DECODING, num_best=4, steps=Steps.LIVE)
    lengths = [len(h.ids) for own in expected for h in own]
    assert max(lengths) > 8 and len(set(lengths)) > 3
    same(search_batch(model, batch, DECODING, num_best=4, steps=Steps.STATIC), expected)


@pytest.mark.parametrize("case", ["transformer", "tree_transformer"])
@pytest.mark.parametrize(("constrained", "no_repeats"), [(False, 0), (True, 0), (False, 2)])
def test_replayed_graphs_find_the_same(case, constrained, no_repeats, graphs):
    """A graph repeats operations on the tensors of its capture. There is one for each capacity, with and without constraints."""
    model = model_of(case)
    batch = batch_of(SENTENCES, model.reads)
    decoding = DECODING.model_copy(update={"min_length": 17, "no_repeat_ngram": no_repeats})
    constraints = BatchConstraints(LINES, None, "cpu") if constrained else None
    expected = search_batch(model, batch, decoding, num_best=3, constraints=constraints, steps=Steps.LIVE)
    assert not graphs
    same(search_batch(model, batch, decoding, num_best=3, constraints=constraints, steps=Steps.STATIC), expected)
    # Each first step runs as it is: steps 0, 4, 8 and 16, and a step after 17 pieces.
    assert [graph.replays for graph in graphs] == [3, 3, 7, 1]


def test_the_best_one_alone_and_greedy_search(graphs):
    model = model_of("tree_transformer")
    for decoding in (DECODING, DECODING.model_copy(update={"beam_size": 1})):
        for trees in (SENTENCES, SENTENCES[:1]):
            batch = batch_of(trees, model.reads)
            same(search_batch(model, batch, decoding, steps=Steps.STATIC), search_batch(model, batch, decoding))


@pytest.mark.parametrize("case", ["transformer", "tree_transformer", "ensemble"])
def test_steps_differ_in_nothing_but_values(case):
    """All operations of a step, and the shapes, strides and addresses of what outlives it, are those of the step before."""
    model = model_of(case)
    search = begin(model)
    with torch.inference_mode():
        for _ in range(3):
            first, *others = [operations_of(search.step) for _ in range(search.cache.state.capacity // 2)]
            assert others and all(other == first for other in others)
            while int(search.chooser.step) < search.cache.state.capacity:
                search.step()
            search.cache.state.grow()


# Of a plain layer and of what is not in layers. A linear map counts as one, and so does attention; CUDA may have some more.
KERNELS_OF_LAYER, OTHER_KERNELS = 17, 76


def test_a_step_launches_few_kernels_and_copies_nothing():
    counts = []
    for layers in (1, 3):
        model = tiny_model("transformer", num_decoder_layers=layers).float()
        search = begin(model)
        on_meta(search)
        with torch.inference_mode(), DeviceOperations() as seen:
            search.step()
        assert not seen.copies
        counts.append(seen.kernels.total())
    of_layer = (counts[1] - counts[0]) / 2
    assert of_layer <= KERNELS_OF_LAYER and counts[0] - of_layer <= OTHER_KERNELS


def on_meta(search: Search) -> None:
    """Move a search to a device without data."""
    state, beam, lengths = search.cache.state, search.chooser, search.restrictions[0]
    search.cache._model.to("meta")
    state.memory = [tuple(x.to("meta") for x in pair) for pair in state.memory]
    state.past = [tuple(x.to("meta") for x in pair) for pair in state.past]
    for part in (state, state.paths, beam, lengths, beam.finished):
        vars(part).update({name: x.to("meta") for name, x in vars(part).items() if isinstance(x, torch.Tensor)})


def test_a_step_that_cannot_be_captured_runs_as_it_is(graphs, monkeypatch, capsys):
    def fail(step, device):
        raise RuntimeError("not permitted while capturing\nmore")

    monkeypatch.setattr(caches, "capture", fail)
    model = model_of("transformer")
    batch = batch_of(SENTENCES, model.reads)
    for _ in range(2):
        same(search_batch(model, batch, DECODING, steps=Steps.STATIC), search_batch(model, batch, DECODING))
    assert capsys.readouterr().err.splitlines() == [
        "warning: searches run slower, because a step cannot become a CUDA graph: not permitted while capturing"
    ]


class TwoGpus:
    """What `capture` uses of torch.cuda, for two GPUs of which number 0 is the present one."""

    def __init__(self):
        self.gpu, self.stream_now, self.begun = 0, SimpleNamespace(gpu=0, wait_stream=lambda other: None), []

    @contextmanager
    def device(self, device):
        before, self.gpu = self.gpu, device.index
        yield
        self.gpu = before

    @contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def current_device(self):
        return self.gpu

    def current_stream(self):
        return SimpleNamespace(gpu=self.gpu, wait_stream=lambda other: None)

    def Stream(self):
        return SimpleNamespace(gpu=self.gpu, wait_stream=lambda other: None)

    def CUDAGraph(self):
        number = len(self.begun)
        begin = lambda pool, capture_error_mode: self.begun.append((self.stream_now, pool))  # noqa: E731
        return SimpleNamespace(pool=lambda: number, capture_begin=begin, capture_end=lambda: None)


def test_a_step_is_captured_on_its_own_gpu(monkeypatch):
    """A stream of the present GPU would capture nothing of a step on another one. Memory stays on its GPU."""
    gpus = TwoGpus()
    monkeypatch.setattr(torch, "cuda", gpus)
    monkeypatch.setattr(caches, "_last", caches._Last())
    steps = []
    for gpu in (1, 0, 1, 0):
        caches.capture(lambda: steps.append(gpus.stream_now.gpu), torch.device("cuda", gpu))
    assert steps == [1, 0, 1, 0] and gpus.gpu == 0
    first, second, third, fourth = gpus.begun
    assert first[0] is third[0] and second[0] is fourth[0]
    assert [pool for _, pool in gpus.begun] == [None, None, 0, 1]


def test_the_cache_has_the_type_of_products_under_autocast():
    """Accumulated values of nodes may have another one."""
    model = model_of("tree_transformer").float()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        search = begin(model)
        for _ in range(4):
            search.step()
    assert {x.dtype for pair in search.cache.state.past for x in pair} == {torch.bfloat16}
    assert search.chooser.log_prob.isfinite().any()


def test_scores_that_are_not_finite_are_refused():
    model = model_of("transformer")
    with torch.no_grad():
        model.encoder.embedding.weight[4:] = math.nan
    with pytest.raises(Exception, match="line 1: the model's scores are not finite"):
        search_batch(model, batch_of(SENTENCES, model.reads), DECODING, steps=Steps.STATIC)
