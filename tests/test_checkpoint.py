"""Checkpoints: complete or passed over, the last k kept."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from treenet.runs.checkpoint import (
    _meta_sha256,
    checkpoint_folders,
    checkpoint_step,
    find_fault,
    is_complete,
    latest_checkpoint,
    read_meta,
    take_snapshot,
    write_checkpoint,
)
from treenet.runs.checkpoint_io import load_checkpoint
from treenet.runs.run_folder import absolute_checkpoint, checkpoint_path
from treeproc.common.settings import UserError

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


def save(run_dir, step, seed=0, keep=5, **options):
    model, optimizer = trained(seed)
    meta = {**META, **{name: options.pop(name) for name in ("valid_nll", "due") if name in options}}
    folder = write_checkpoint(run_dir, take_snapshot(step, model, optimizer, {"step": step}, meta), keep=keep, **options)
    return folder, model, optimizer


def test_load_restores_weights_optimiser_and_state(tmp_path):
    folder, model, optimizer = save(tmp_path, 7, seed=1)
    other, other_optimizer = trained(2)
    assert load_checkpoint(folder, other, other_optimizer) == {"step": 7}
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


def test_the_best_k_and_the_latest_are_kept(tmp_path):
    for step, nll in ((10, 3.0), (20, None), (30, 2.0), (40, 2.5), (50, 2.6), (60, None)):
        save(tmp_path, step, keep=2, best=True, valid_nll=nll)
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step_00000030", "step_00000040", "step_00000060"]


def test_a_checkpoint_where_a_run_was_stopped_takes_no_place_and_goes_with_the_next(tmp_path):
    for best in (False, True):
        for step, due in ((10, True), (20, True), (25, False)):
            save(tmp_path / str(best), step, keep=2, best=best, due=due, valid_nll=2.0)
        assert [checkpoint_step(folder) for folder in checkpoint_folders(tmp_path / str(best))] == [10, 20, 25]
        save(tmp_path / str(best), 30, keep=2, best=best, due=True, valid_nll=1.0)
    assert [checkpoint_step(folder) for folder in checkpoint_folders(tmp_path / "False")] == [20, 30]
    assert [checkpoint_step(folder) for folder in checkpoint_folders(tmp_path / "True")] == [10, 30]


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
    assert not is_complete(folder)
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    assert "step_00000002 is not complete" in capsys.readouterr().err


def test_every_flipped_bit_of_the_meta_is_noticed(tmp_path):
    folder, _, _ = save(tmp_path, 1, valid_nll=2.5)
    content = (folder / "meta.json").read_bytes()
    assert is_complete(folder)
    for place in range(len(content)):
        flipped = content[place] ^ (1 << place % 8)
        (folder / "meta.json").write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        assert not is_complete(folder), (place, chr(content[place]), chr(flipped))


def test_a_changed_fact_of_the_meta_is_noticed(tmp_path):
    folder, _, _ = save(tmp_path, 1, valid_nll=2.5)
    meta = json.loads((folder / "meta.json").read_text())
    for changed in ({**meta, "valid_nll": 0.5}, {name: value for name, value in meta.items() if name != "sha256"}):
        (folder / "meta.json").write_text(json.dumps(changed))
        assert find_fault(folder) == "meta.json is damaged" and read_meta(folder) == {}


@pytest.mark.parametrize(
    "files",
    [
        None, [], "model.safetensors", 7, {}, {"trainer.pt": {}}, {"model.safetensors": None}, {"model.safetensors": []},
        {"model.safetensors": {"bytes": "5", "sha256": 5}}, {"../step_00000001/model.safetensors": {"bytes": 1}},
        {"..": {}}, {"": {}}, {"a/b": {}}, {"a\0b": {}}, {"x" * 5000: {}}, {"\ud800": {}},
    ],
)  # fmt: skip
def test_files_of_any_kind_are_no_traceback(tmp_path, files):
    folder, _, _ = save(tmp_path, 1)
    meta = json.loads((folder / "meta.json").read_text())
    kept = {} if not isinstance(files, dict) or files.keys() <= meta["files"].keys() else meta["files"]
    listed = {**kept, **files} if isinstance(files, dict) else files
    content = {"step": 1, "data_fingerprint": "abc", "files": listed}
    (folder / "meta.json").write_text(json.dumps({**content, "sha256": _meta_sha256(content)}))
    assert read_meta(folder)["files"] == listed
    assert not is_complete(folder) and latest_checkpoint(tmp_path) is None
    for text in ("[1]", "5", "null", '{"files"', "[" * 100_000):
        (folder / "meta.json").write_text(text)
        assert not is_complete(folder)


def test_a_folder_that_merely_looks_like_a_checkpoint_is_none(tmp_path, capsys):
    folder, _, _ = save(tmp_path, 1)
    place = folder.parent
    shutil.copytree(folder, place / "step_9999999x")
    shutil.copytree(folder, place / "step_00000007")
    (place / "step_00000009").write_text("a file")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step_00000001", "step_00000007"]
    assert latest_checkpoint(tmp_path) == folder
    assert "step_00000007 is not complete (its meta.json is of step 1)" in capsys.readouterr().err


def test_steps_of_nine_digits_come_after_those_of_eight(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert [checkpoint_step(folder) for folder in checkpoint_folders(tmp_path)] == [99_999_999, 100_000_000]


def test_a_save_that_was_killed_midway_leaves_nothing_to_load(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("treenet.runs.checkpoint.os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    save(tmp_path, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000001", "step_00000003"]


def test_a_full_disk_is_a_user_error_and_keeps_the_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)
    error = OSError(28, "No space left on device")
    monkeypatch.setattr("torch.save", lambda *args: (_ for _ in ()).throw(error))
    with pytest.raises(UserError, match="No space left"):
        save(tmp_path, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_other_shapes_are_refused(tmp_path):
    folder, _, optimizer = save(tmp_path, 1)
    with pytest.raises(UserError, match="cannot load"):
        load_checkpoint(folder, nn.Linear(3, 3), optimizer)


def test_nothing_that_is_loaded_executes_code(tmp_path):
    folder, model, optimizer = save(tmp_path, 1)
    torch.save({"optimizer": print, "state": {}}, folder / "trainer.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        load_checkpoint(folder, model, optimizer)


def test_a_checkpoint_for_another_process_does_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["averaged", "initial", "20", "run/checkpoints/step_00000020", "/x/y"]
    assert [absolute_checkpoint(name) for name in names] == [*names[:3], str(tmp_path / names[3]), "/x/y"]
    uri = "s3://b/run/checkpoints/step_00000010"
    assert absolute_checkpoint(uri) == uri and checkpoint_path(tmp_path, "x/y") == Path("x/y")
    with pytest.raises(
        UserError, match=f"^checkpoint must be averaged, a step or a local path, but is {uri}; give its run as --out"
    ):
        checkpoint_path(tmp_path, uri)
