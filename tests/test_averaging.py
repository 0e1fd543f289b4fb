"""Averages of checkpoints: the last, the best, the moving average; what may not be averaged."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from treenet.config import TrainConfig
from treenet.runs.averaging import average_checkpoints, average_weights, choose_checkpoints, describe_gaps
from treenet.runs.checkpoint import META, WEIGHTS, checkpoint_step, take_snapshot, write_checkpoint
from treenet.runs.checkpoint_io import load_weights
from treeproc.common.settings import UserError, dump_settings

FACTS = {"data_fingerprint": "abc", "num_pieces": 7, "num_labels": 3}
CONFIG = TrainConfig(data="data", workers=0)


@pytest.fixture(autouse=True)
def run_files(tmp_path):
    """The facts that say which run the folder holds."""
    (tmp_path / "config.yaml").write_text(dump_settings(CONFIG))
    (tmp_path / "run.json").write_text(json.dumps(FACTS))


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


def chosen_steps(run_dir, choice, count) -> list[int]:
    return [checkpoint_step(folder) for folder in choose_checkpoints(run_dir, choice, count).folders]


def meta_of(folder) -> dict:
    return json.loads((folder / META).read_text())


def same_weights(folder, weights) -> bool:
    found = load_file(folder / WEIGHTS)
    return all(torch.equal(found[name], value) for name, value in weights.items())


def mean_of(*seeds) -> dict[str, torch.Tensor]:
    """The mean of the weights of seeds, as an average has it."""
    return {name: torch.stack([weights_of(seed)[name].double() for seed in seeds]).mean(0).float() for name in weights_of(1)}


@pytest.mark.parametrize("choice", ["last", "best"])
def test_averaging_identical_checkpoints_is_the_identity(tmp_path, choice):
    for step in (1, 2, 3):
        save(tmp_path, step, 5, nll=2.0)
    averaged = load_file(average_checkpoints(tmp_path, choice, 3) / WEIGHTS)
    assert averaged.keys() == weights_of(5).keys()
    assert all(torch.equal(averaged[name], value) for name, value in weights_of(5).items())


def test_average_is_the_mean_of_the_last_checkpoints(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, step)
    averaged = average_checkpoints(tmp_path, "last", 2)
    meta = meta_of(averaged)
    assert (meta["averaged_steps"], meta["averaged_asked"], meta["averaged_left_out"]) == ([2, 3], 2, {})
    assert meta["averaged_choice"] == "last" and describe_gaps(meta) == ""
    second, third = weights_of(2), weights_of(3)
    for name, value in load_file(averaged / WEIGHTS).items():
        torch.testing.assert_close(value, (second[name] + third[name]) / 2)
    model = Tied(0)
    load_weights(model, averaged)
    assert model.first.weight is model.second.weight
    torch.testing.assert_close(model.second.bias, (second["second.bias"] + third["second.bias"]) / 2)


@pytest.mark.parametrize(("choice", "count"), [("last", 20), ("best", 20), ("best", 3)])
def test_fewer_than_asked_for_are_refused_unless_they_may_be_missing(tmp_path, choice, count):
    save(tmp_path, 1, 1, nll=2.0)
    save(tmp_path, 2, 2, nll=1.0)
    with pytest.raises(UserError, match=rf"has fewer .*checkpoints than {choice}={count}: 2 \(steps 1, 2\); .*allow_fewer=true"):
        average_checkpoints(tmp_path, choice, count)
    assert not (tmp_path / "averaged").exists()
    averaged = average_checkpoints(tmp_path, choice, count, allow_fewer=True)
    meta = meta_of(averaged)
    assert (meta["averaged_steps"], meta["averaged_asked"]) == ([1, 2], count)
    assert describe_gaps(meta) == f" (2 of the {count} asked for)"


def test_a_run_without_a_complete_checkpoint_is_not_told_to_average_the_complete_ones(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step, step) / "trainer.pt").unlink()
    for damaged in (False, True):
        with pytest.raises(UserError, match="trainer.pt is missing; .*; none of these is complete; copy them again, or repeat"):
            average_checkpoints(tmp_path, "last", 2, allow_fewer=True, allow_damaged=damaged)


@pytest.mark.parametrize("choice", ["last", "best"])
@pytest.mark.parametrize("damage", ["weights", "meta", "another step"])
def test_a_damaged_checkpoint_is_named_and_never_left_out_in_silence(tmp_path, choice, damage):
    folders = [save(tmp_path, step, step, nll=2.0) for step in (1, 2, 3)]
    if damage == "another step":
        (folders[1] / META).write_bytes((folders[0] / META).read_bytes())
    else:
        path = folders[1] / (WEIGHTS if damage == "weights" else META)
        content = path.read_bytes()
        path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    faults = {"weights": "model.safetensors is damaged", "meta": "meta.json is damaged"}
    why = faults.get(damage, "its meta.json is of step 1")
    message = f"cannot average .*step_00000002: {why}; .*average-checkpoints --out .* allow_fewer=true averages the complete ones"
    for fewer in (False, True):  # also at the end of training, where there may be fewer
        with pytest.raises(UserError, match=message):
            average_checkpoints(tmp_path, choice, 3, allow_fewer=fewer)
    assert not (tmp_path / "averaged").exists() and len(list((tmp_path / "checkpoints").iterdir())) == 3
    averaged = average_checkpoints(tmp_path, choice, 3, allow_fewer=True, allow_damaged=True)
    assert same_weights(averaged, mean_of(1, 3))
    assert meta_of(averaged)["averaged_left_out"] == {"step_00000002": why}
    assert describe_gaps(meta_of(averaged)) == f" (2 of the 3 asked for); left out: step_00000002 ({why})"


def test_a_damaged_checkpoint_that_is_not_asked_for_does_not_matter(tmp_path):
    folders = [save(tmp_path, step, step, nll=3.0 - step) for step in (1, 2, 3)]
    (folders[0] / WEIGHTS).write_bytes(b"cut off")
    for choice in ("last", "best"):
        assert same_weights(average_checkpoints(tmp_path, choice, 2), mean_of(2, 3))


def test_averaging_leaves_out_and_names_folders_that_look_like_checkpoints(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, step, nll=1.0)
    place = tmp_path / "checkpoints"
    shutil.copytree(place / "step_00000001", place / "step_9999999x")
    shutil.copytree(place / "step_00000001", place / "step_000000003")
    (place / "step_00000009").write_text("a note")
    (place / "step_00000004").mkdir()  # a kill while it was removed
    (place / "step_00000004" / WEIGHTS).write_bytes(b"")
    message = {
        "step_000000003": "not the name of a checkpoint",
        "step_00000004": "meta.json is missing",
        "step_00000009": "not a folder",
        "step_9999999x": "not the name of a checkpoint",
    }
    for choice in ("last", "best"):
        averaged = average_checkpoints(tmp_path, choice, 2)
        assert same_weights(averaged, mean_of(1, 2)) and meta_of(averaged)["averaged_left_out"] == message
    save(tmp_path, 5, 5)  # training goes on beside them
    assert (place / "step_00000009").is_file()


def test_a_checkpoint_of_another_run_is_refused_wherever_it_lies(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, step, nll=3.0 - step, settings=CONFIG.lasting())
    other = save(tmp_path / "other", 4, 4, nll=0.1, settings=CONFIG.lasting() | {"seed": 2, "optimizer.decay_steps": 9})
    shutil.copytree(other, tmp_path / "checkpoints" / other.name)
    said = (
        r"step_00000004 has weights of another run \(optimizer.decay_steps: None -> 9; seed: 1 -> 2\); remove step_00000004 from"
    )
    for choice, count in (("last", 1), ("best", 1), ("last", 2)):
        with pytest.raises(UserError, match=said):
            average_checkpoints(tmp_path, choice, count, allow_fewer=True, allow_damaged=True)


def test_the_best_are_those_of_the_lowest_validation_nll(tmp_path):
    for step, nll in ((10, 3.0), (20, 1.5), (25, None), (30, 1.0), (40, 2.0)):
        save(tmp_path, step, step, nll=nll)
    assert chosen_steps(tmp_path, "best", 2) == [20, 30]
    assert chosen_steps(tmp_path, "best", 9) == [10, 20, 30, 40]
    assert chosen_steps(tmp_path, "last", 2) == [30, 40]


def test_the_moving_average_is_that_of_the_latest_and_fits_the_model(tmp_path):
    save(tmp_path, 1, 1, ema=11)
    save(tmp_path, 2, 2, ema=12)
    folder, model = average_checkpoints(tmp_path, "ema", 5), Tied(0)
    load_weights(model, folder)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights_of(12).items())
    assert (meta_of(folder)["averaged_steps"], meta_of(folder)["averaged_asked"]) == ([2], 1)
    (tmp_path / "checkpoints" / "step_00000002" / "ema.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match="cannot average .*step_00000002: ema.safetensors has another size"):
        average_checkpoints(tmp_path, "ema", 5)
    assert same_weights(average_checkpoints(tmp_path, "ema", 5, allow_damaged=True), weights_of(11))


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


def test_names_shapes_and_types_must_agree(tmp_path):
    files = {"a": {"a": torch.ones(2)}, "b": {"b": torch.ones(2)}, "c": {"a": torch.ones(3)}, "d": {"a": torch.ones(2).half()}}
    for name, weights in files.items():
        save_file(weights, tmp_path / name)
    with pytest.raises(UserError, match="weights with different names: a, b"):
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
    [({"num_pieces": 8}, "num_pieces: 7 -> 8"), ({"data_fingerprint": "xyz"}, "data fingerprint: abc -> xyz")],
)
def test_checkpoints_of_other_vocabularies_are_refused(tmp_path, changed, named):
    save(tmp_path, 1, 1)
    save(tmp_path, 2, 2, **changed)
    with pytest.raises(UserError, match=rf"step_00000002 has weights of another run \({named}\)"):
        average_checkpoints(tmp_path, "last", 2)
    assert not (tmp_path / "averaged").exists()


def test_averaging_names_the_missing_checkpoints(tmp_path):
    command = f"run tree-attention train --config {tmp_path / 'config.yaml'} --out {tmp_path} first"
    with pytest.raises(UserError, match=f"no complete checkpoint; {command}$"):
        average_checkpoints(tmp_path, "last", 2)
    save(tmp_path, 1, 1)
    with pytest.raises(UserError, match="no moving average; train with ema_decay"):
        average_checkpoints(tmp_path, "ema", 1)
    with pytest.raises(UserError, match="no checkpoint with a finite validation"):
        average_checkpoints(tmp_path, "best", 1)
