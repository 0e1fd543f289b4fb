"""Checkpoints in tests/data/old_checkpoints, written when models had other parameter names and another order of parameters."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_cases import VOCAB, batch_of
from safetensors.torch import save_file
from test_models import right_branching
from torch import Tensor, nn

from treenet.config import ModelConfig, OptimizerConfig
from treenet.models import build_model
from treenet.runs.averaging import average_weights
from treenet.runs.checkpoint import WEIGHTS
from treenet.runs.checkpoint_io import load_checkpoint, load_weights
from treenet.training.optimizer import MovingAverage, build_optimizer
from treeproc.common.settings import UserError

PLACE = Path(__file__).parent / "data" / "old_checkpoints"
CASES = [path.stem for path in sorted(PLACE.glob("*.json"))]


def open_case(case: str) -> tuple[Path, dict, nn.Module]:
    facts = json.loads((PLACE / f"{case}.json").read_text())
    return PLACE / case / "checkpoints" / "step_00000003", facts, build_model(ModelConfig(**facts["config"]), VOCAB)


def loss_of(model: nn.Module) -> Tensor:
    batch = batch_of([right_branching(n) for n in (5, 3, 1)], model.reads, target_length=5)
    return F.cross_entropy(model(batch).flatten(0, 1), batch.tgt_out.flatten(), ignore_index=0, reduction="sum")


@pytest.mark.parametrize("case", CASES)
def test_an_old_run_goes_on_as_it_would_have(case):
    """Weights, moments of Adam and the moving average find their parameters: the next update does what it did then."""
    folder, facts, model = open_case(case)
    optimizer, average = build_optimizer(model, OptimizerConfig(learning_rate=0.01)), MovingAverage(model, 0.9)
    assert load_checkpoint(folder, model, optimizer, average=average.weights) == {"step": 3}
    assert all(torch.equal(average.weights[name], parameter) for name, parameter in model.named_parameters())
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    assert loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    assert loss_of(model).item() == pytest.approx(facts["loss_after"], rel=1e-5)


def test_an_old_checkpoint_of_another_model_is_refused():
    folder, facts, _ = open_case("tree_transformer")
    plain = build_model(ModelConfig(**facts["config"] | {"name": "transformer"}), VOCAB)
    with pytest.raises(UserError, match=r"cannot load .*model\.safetensors: .* encoder\.label_embedding\.weight"):
        load_weights(plain, folder)


def test_old_and_new_checkpoints_are_averaged_together(tmp_path):
    folder, _, model = open_case("tree_transformer")
    load_weights(model, folder)
    new = tmp_path / "new.safetensors"
    save_file(dict(model.named_parameters()), new)
    averaged = average_weights([folder / WEIGHTS, new])
    assert averaged.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(averaged[name], parameter) for name, parameter in model.named_parameters())
