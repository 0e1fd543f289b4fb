"""Averages of checkpoints: the last, the best, the moving average; what may not be averaged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from treenet.training.averaging import average_checkpoints, average_weights, choose_checkpoints
from treenet.training.checkpoint import META, WEIGHTS, checkpoint_step, load_weights, take_snapshot, write_checkpoint
from treeproc.settings import UserError

FACTS = {"data_fingerprint": "abc", "num_pieces": 7, "num_labels": 3, "model": {"d_model": 4}}


class Tied(nn.Module):
    """Two layers that share one table, as the embeddings of the models do."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def save(run_dir, step, seed, *, nll=None, ema=None, **facts):
    """A checkpoint of the random weights of `seed`, with those of seed `ema` as their moving average."""
    model = Tied(seed)
    average = ema and dict(Tied(ema).named_parameters())
    meta = {**FACTS, "valid_nll": nll, **facts}
    return write_checkpoint(run_dir, take_snapshot(step, model, torch.optim.SGD(model.parameters()), {}, meta, average), keep=9)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return dict(Tied(seed).named_parameters())


def steps(folders) -> list[int]:
    return [checkpoint_step(folder) for folder in folders]


@pytest.mark.parametrize("choice", ["last", "best"])
def test_averaging_identical_checkpoints_is_the_identity(tmp_path, choice):
    for step in (1, 2, 3):
        save(tmp_path, step, 5, nll=2.0)
    averaged = load_file(average_checkpoints(tmp_path, choice, 3) / WEIGHTS)
    assert averaged.keys() == weights_of(5).keys()
    assert all(torch.equal(averaged[name], value) for name, value in weights_of(5).items())


def test_average_is_the_mean_of_the_last_whole_checkpoints(tmp_path):
    folders = [save(tmp_path, step, step) for step in (1, 2, 3, 4)]
    (folders[3] / WEIGHTS).write_bytes(b"cut off")
    averaged = average_checkpoints(tmp_path, "last", 2)
    assert json.loads((averaged / META).read_text())["averaged_steps"] == [2, 3]
    second, third = weights_of(2), weights_of(3)
    for name, value in load_file(averaged / WEIGHTS).items():
        torch.testing.assert_close(value, (second[name] + third[name]) / 2)
    model = Tied(0)
    load_weights(model, averaged)
    assert model.first.weight is model.second.weight
    torch.testing.assert_close(model.second.bias, (second["second.bias"] + third["second.bias"]) / 2)


def test_the_best_are_those_of_the_lowest_validation_nll(tmp_path):
    for step, nll in ((10, 3.0), (20, 1.5), (25, None), (30, 1.0), (40, 2.0)):
        save(tmp_path, step, step, nll=nll)
    assert steps(choose_checkpoints(tmp_path, "best", 2)) == [20, 30]
    assert steps(choose_checkpoints(tmp_path, "best", 9)) == [10, 20, 30, 40]
    assert steps(choose_checkpoints(tmp_path, "last", 2)) == [30, 40]


def test_the_moving_average_is_that_of_the_latest_and_fits_the_model(tmp_path):
    save(tmp_path, 1, 1, ema=11)
    save(tmp_path, 2, 2, ema=12)
    folder, model = average_checkpoints(tmp_path, "ema", 5), Tied(0)
    load_weights(model, folder)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights_of(12).items())
    assert json.loads((folder / META).read_text())["averaged_steps"] == [2]


def test_the_same_average_is_not_written_twice_and_another_one_is(tmp_path):
    save(tmp_path, 1, 1, nll=1.0)
    save(tmp_path, 2, 2, nll=2.0)
    folder = average_checkpoints(tmp_path, "last", 2)
    before = (folder / WEIGHTS).stat().st_mtime_ns
    assert (average_checkpoints(tmp_path, "last", 2) / WEIGHTS).stat().st_mtime_ns == before
    save(tmp_path, 2, 3, nll=2.0)  # the same step, trained anew
    weights = load_file(average_checkpoints(tmp_path, "last", 2) / WEIGHTS)
    torch.testing.assert_close(weights["first.bias"], (weights_of(1)["first.bias"] + weights_of(3)["first.bias"]) / 2)
    assert torch.equal(load_file(average_checkpoints(tmp_path, "best", 1) / WEIGHTS)["first.bias"], weights_of(1)["first.bias"])


def test_a_damaged_average_is_made_again(tmp_path):
    save(tmp_path, 1, 1)
    folder = average_checkpoints(tmp_path, "last", 1)
    (folder / WEIGHTS).write_bytes(b"cut off")
    assert torch.equal(load_file(average_checkpoints(tmp_path, "last", 1) / WEIGHTS)["first.bias"], weights_of(1)["first.bias"])


def test_names_shapes_and_types_must_agree(tmp_path):
    files = {"a": {"a": torch.ones(2)}, "b": {"b": torch.ones(2)}, "c": {"a": torch.ones(3)}, "d": {"a": torch.ones(2).half()}}
    for name, weights in files.items():
        save_file(weights, tmp_path / name)
    with pytest.raises(UserError, match="different weights: a, b"):
        average_weights([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"a must have shape \(2,\) as in .*, but has \(3,\)"):
        average_weights([tmp_path / "a", tmp_path / "c"])
    with pytest.raises(UserError, match=r"a must have type torch.float32 as in .*, but has torch.float16"):
        average_weights([tmp_path / "a", tmp_path / "d"])


def test_half_precision_keeps_its_type_and_is_summed_exactly(tmp_path):
    for name, value in (("a", 60000.0), ("b", 60000.0), ("c", 0.0)):
        save_file({"w": torch.full((2,), value, dtype=torch.float16)}, tmp_path / name)
    average = average_weights(tmp_path / name for name in "abc")["w"]
    assert average.dtype == torch.float16 and average.tolist() == [40000.0, 40000.0]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"num_pieces": 8}, "num_pieces"), ({"data_fingerprint": "xyz", "num_labels": 4}, "num_labels, data_fingerprint")],
)
def test_checkpoints_of_other_vocabularies_are_refused(tmp_path, changed, named):
    save(tmp_path, 1, 1)
    save(tmp_path, 2, 2, **changed)
    with pytest.raises(UserError, match=f"step_00000002 and .*step_00000001 differ in {named}"):
        average_checkpoints(tmp_path, "last", 2)
    assert not (tmp_path / "averaged").exists()


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="no whole checkpoint"):
        average_checkpoints(tmp_path, "last", 2)
    save(tmp_path, 1, 1)
    with pytest.raises(UserError, match="no moving average; train with ema_decay"):
        average_checkpoints(tmp_path, "ema", 1)
    with pytest.raises(UserError, match="no checkpoint of an update that was validated"):
        average_checkpoints(tmp_path, "best", 1)
