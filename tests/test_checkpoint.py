"""Checkpoints: whole or passed over, the last k kept, averages."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from treenet.training.checkpoint import (
    average_checkpoints,
    average_weights,
    checkpoint_folders,
    is_whole,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from treeproc.settings import UserError

META = {"data_fingerprint": "abc"}


class Tied(nn.Module):
    """Two layers that share one table, as the embeddings of the models do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.second(model.first(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    return model, optimizer


def save(run_dir, step, seed=0, keep=5):
    model, optimizer = trained(seed)
    return save_checkpoint(run_dir, step, model, optimizer, {"step": step}, META, keep=keep), model, optimizer


def test_load_restores_weights_optimiser_and_state(tmp_path):
    folder, model, optimizer = save(tmp_path, 7, seed=1)
    other, other_optimizer = trained(2)
    assert load_checkpoint(folder, other, other_optimizer, data_fingerprint="abc") == {"step": 7}
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert other.first.weight is other.second.weight
    old, new = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert all(torch.equal(old[i][name], new[i][name]) for i in old for name in old[i])


def test_the_last_k_are_kept_and_the_latest_is_found(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=2)
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step_00000030", "step_00000040"]
    assert latest_checkpoint(tmp_path).name == "step_00000040"
    assert latest_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, name, damage, capsys):
    save(tmp_path, 1)
    folder, _, _ = save(tmp_path, 2)
    content = (folder / name).read_bytes()
    if damage == "remove":
        (folder / name).unlink()
    elif damage == "truncate":
        (folder / name).write_bytes(content[: len(content) // 2])
    else:
        (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert not is_whole(folder)
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    assert "step_00000002 is not whole" in capsys.readouterr().err


def test_a_save_that_was_killed_midway_leaves_nothing_to_load(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("treenet.training.checkpoint.os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    save(tmp_path, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000001", "step_00000003"]


def test_a_full_disk_is_a_user_error_and_keeps_the_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)
    error = OSError(28, "No space left on device")
    monkeypatch.setattr("treenet.training.checkpoint.torch.save", lambda *args: (_ for _ in ()).throw(error))
    with pytest.raises(UserError, match="No space left"):
        save(tmp_path, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_other_data_and_other_shapes_are_refused(tmp_path):
    folder, model, optimizer = save(tmp_path, 1)
    with pytest.raises(UserError, match="abc"):
        load_checkpoint(folder, model, optimizer, data_fingerprint="xyz")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_checkpoint(folder, nn.Linear(3, 3), optimizer, data_fingerprint="abc")


def test_nothing_that_is_loaded_executes_code(tmp_path):
    folder, model, optimizer = save(tmp_path, 1)
    torch.save({"optimizer": print, "state": {}}, folder / "trainer.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        load_checkpoint(folder, model, optimizer, data_fingerprint="abc")


def test_averaging_identical_checkpoints_is_the_identity(tmp_path):
    for step in (1, 2, 3):
        folder, _, _ = save(tmp_path, step, seed=5)
    averaged = load_file(average_checkpoints(tmp_path, 3) / "model.safetensors")
    single = load_file(folder / "model.safetensors")
    assert averaged.keys() == single.keys()
    assert all(torch.equal(averaged[name], single[name]) for name in single)


def test_average_is_the_mean_of_the_last_whole_checkpoints(tmp_path):
    folders = [save(tmp_path, step, seed=step)[0] for step in (1, 2, 3, 4)]
    (folders[3] / "meta.json").unlink()
    averaged = average_checkpoints(tmp_path, 2)
    assert json.loads((averaged / "meta.json").read_text())["averaged_steps"] == [2, 3]
    second, third = (load_file(folder / "model.safetensors") for folder in folders[1:3])
    for name, value in load_file(averaged / "model.safetensors").items():
        torch.testing.assert_close(value, (second[name] + third[name]) / 2)


def test_averages_of_different_models_are_refused(tmp_path):
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, weights in zip(paths, ({"a": torch.ones(2)}, {"b": torch.ones(2)}, {"a": torch.ones(3)}), strict=True):
        save_file(weights, path)
    with pytest.raises(UserError, match="different weights: a, b"):
        average_weights(paths[:2])
    with pytest.raises(UserError, match="a must have shape"):
        average_weights([paths[0], paths[2]])
    with pytest.raises(UserError, match="no whole checkpoint"):
        average_checkpoints(tmp_path, 2)
