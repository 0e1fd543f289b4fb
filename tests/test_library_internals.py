"""Parts of libraries that no documentation promises, against the public ones that stand in for them where they are gone.

`make upgrade-check` runs these tests on the newest PyTorch, Ray, Stanza and uvicorn.
"""

from pathlib import Path

import pytest
import torch
from ray._private import ray_constants, state
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator
from ray.train import TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchTrainer
from stanza.models.common.vocab import VOCAB_PREFIX
from stanza.models.pos.vocab import WordVocab
from stanza.models.tokenization.vocab import Vocab
from stanza.pipeline.processor import UDProcessor
from strategies import right_branching
from test_accumulation import FIGURE_1, UNARY, build_accumulation, build_structure
from test_tree_attention import build_on_path, randomise
from torch._inductor.ir import Layout

from treenet.config import TreeAttentionConfig
from treenet.jobs import ray_interrupt
from treenet.jobs.ray_interrupt import InterruptibleTrainer, callbacks_into
from treenet.layers import backend
from treenet.layers.attention import SelfAttention
from treeproc.common import ray_internals, settings
from treeproc.extras.parser_training import layers

SENTENCES = [FIGURE_1, UNARY, right_branching(9)]
FLASH = ["flash_attention", "flash_attention_backward"]
BAGS = ["_bag", "_bag_weights_backward"]


def values_and_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)]


def real_rows(out: torch.Tensor, structure) -> torch.Tensor:
    """Positions [., D] that are no padding; what stands there is each way's own."""
    return out[~torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)]


def states(structure) -> torch.Tensor:
    torch.manual_seed(1)
    positions = structure.num_leaves + structure.num_nodes
    return torch.randn(len(SENTENCES), positions, 8, dtype=torch.float64, requires_grad=True)


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_the_private_parts_are_there():
    """Their lack changes no result, but costs time: a version that lacks one is worth a look."""
    assert all(getattr(backend, name) is not None for name in FLASH + BAGS)
    assert layers._lstm is not None
    assert backend.uncompiled is not torch.compiler.disable
    assert hasattr(Layout, "_stride_expr_ge_or_false")
    assert hasattr(ray_interrupt.worker_group, "placement_group")
    assert hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")  # in rayjob.yaml
    assert default_autoscaling_coordinator.get_or_create_autoscaling_coordinator
    assert hasattr(ray_interrupt.placement_group_handle, "remove_placement_group")
    assert ray_internals.store_of_keys() and state.actors
    assert hasattr(state.state, "get_draining_nodes")
    assert "_register_sigint_handler" in vars(InterruptibleTrainer) and hasattr(TorchTrainer, "_register_sigint_handler")


@pytest.mark.parametrize("path", ["two", "window"])
@pytest.mark.parametrize("missing", FLASH)
def test_subtree_attention_without_the_operators_of_the_cpu(monkeypatch, path, missing):
    module = randomise(SelfAttention(8, 2, 0.0, TreeAttentionConfig()))
    structure = build_on_path(SENTENCES, path)
    x = states(structure)
    inputs = [x, *module.parameters()]
    called = []
    kernel = backend.flash_attention
    monkeypatch.setattr("treenet.layers.scaled_dot_product.flash_attention", lambda *a, **k: called.append(1) or kernel(*a, **k))
    private = values_and_gradients(real_rows(module(x, None, structure), structure), inputs)
    assert called
    called.clear()
    monkeypatch.setattr(backend, missing, None)
    agree(values_and_gradients(real_rows(module(x, None, structure), structure), inputs), private)
    assert not called


@pytest.mark.parametrize("leaf_weights", ["shared", "per_head"])
@pytest.mark.parametrize("missing", [BAGS[:1], BAGS[1:], BAGS])
def test_accumulation_without_the_operators_of_embedding_bags(monkeypatch, leaf_weights, missing):
    module = randomise(build_accumulation(leaf_weights=leaf_weights))
    structure = build_structure(SENTENCES, sparse=True)
    x = states(structure)
    inputs = [x, *module.parameters()]
    private = values_and_gradients(module.accumulate(x, 2 * x, structure), inputs)
    for name in missing:
        monkeypatch.setattr(backend, name, None)
    agree(values_and_gradients(module.accumulate(x, 2 * x, structure), inputs), private)


def test_lstms_without_the_function_behind_the_module(monkeypatch):
    torch.manual_seed(1)
    lstm = torch.nn.LSTM(5, 3, bidirectional=True, batch_first=True).double()
    x, h, c = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 7, 5), (2, 4, 3), (2, 4, 3)))
    sizes, inputs = torch.tensor([7, 5, 5, 1]), [x, h, c, *lstm.parameters()]
    private = values_and_gradients(layers.both_ways(lstm, x, sizes, h, c), inputs)
    monkeypatch.setattr(layers, "_lstm", None)
    agree(values_and_gradients(layers.both_ways(lstm, x, sizes, h, c), inputs), private)
    with torch.no_grad():
        agree([layers.both_ways(lstm, x, sizes, h, c)], private[:1])


def test_stanza_names_its_units_and_its_models():
    """Attributes of vocabularies and processors that parser training and parsers use."""
    words = WordVocab([["a", "b", "b"]], idx=0)
    assert words.unmap(range(len(VOCAB_PREFIX), len(words))) == ["b", "a"]
    characters = Vocab([[("a", None), ("b", None), ("b", None)]], "en")
    assert characters.unmap(range(len(characters))) == ["<PAD>", "<UNK>", "b", "a"]
    assert isinstance(UDProcessor.trainer, property)


def test_ray_train_names_the_workers_that_failed():
    error = WorkerGroupError("why", {3: ValueError("this")})
    assert isinstance(error, TrainingFailedError) and list(error.worker_failures) == [3]


class Room:
    """A room that notes when it is given back."""

    def __init__(self):
        self.bundles, self.group, self.given_back = [{"CPU": 1.0}], object(), 0

    def give_back(self) -> None:
        self.given_back += 1


def test_workers_start_in_their_room_again_and_again_while_it_fits(monkeypatch):
    """Others would wait for ever for place beside the room, which nobody uses."""
    monkeypatch.setattr(ray_interrupt.worker_group, "placement_group", lambda bundles, **options: bundles)
    removed = []
    for module in (ray_interrupt, ray_interrupt.placement_group_handle):
        monkeypatch.setattr(module, "remove_placement_group", removed.append)
    make, one, two = ray_interrupt.worker_group.placement_group, [{"CPU": 1.0}], [{"CPU": 1.0}] * 2
    for asked in ((one, one, two, one), (two, one)):
        room, fits = Room(), True
        (callback,) = callbacks_into(room)
        for bundles in asked:
            fits = fits and bundles == one
            callback.before_worker_group_start(None)
            found = ray_interrupt.worker_group.placement_group(bundles=bundles, strategy="PACK")
            assert found is (room.group if fits else bundles) and room.given_back == (not fits)
            assert ray_interrupt.worker_group.placement_group is make
            ray_interrupt.placement_group_handle.remove_placement_group(found)  # Ray Train ends the workers: the room stays
            assert (found in removed) == (not fits)


@pytest.mark.parametrize("missing", ["placement_group", "remove_placement_group"])
def test_without_a_name_that_ray_train_uses_a_room_is_given_back(monkeypatch, missing):
    monkeypatch.delattr(ray_interrupt.worker_group, missing, raising=False)
    monkeypatch.delattr(ray_interrupt.placement_group_handle, missing, raising=False)
    room = Room()
    assert callbacks_into(room) == [] and room.given_back == 1


def test_a_submitted_job_is_known_by_its_environment_or_by_its_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert not settings.in_submitted_job()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert settings.in_submitted_job()
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert settings.in_submitted_job()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    Path(gone).rmdir()
    assert not settings.in_submitted_job()


class Node:
    """A node of Ray's in the frames of a call that fails."""

    def __init__(self, ended: list[dict]):
        self._ended = ended

    def kill_all_processes(self, **options) -> None:
        self._ended.append(options)

    def start(self) -> None:
        raise TimeoutError


def test_a_node_whose_start_failed_is_ended_where_it_can_be():
    ended = []
    for node, count in ((Node(ended), 1), (type("Other", (), {"start": Node.start})(), 1)):
        with pytest.raises(TimeoutError) as raised:
            node.start()
        ray_internals.end_failed_start(raised.value)
        assert len(ended) == count
