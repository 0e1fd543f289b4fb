"""Weights that a run freezes stand once in its folder, in RUN/initial: checkpoints and average read them there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from commands import run_here
from folder_store import store
from test_pretrained import config_of, made
from test_pretrained_runs import two_ranks_learn_as_one
from toyruns import losses

from treenet import from_pretrained, load_run
from treenet.jobs.train_run import run_training
from treenet.runs.checkpoint import _seal, latest_checkpoint
from treenet.runs.checkpoint_io import load_weights
from treenet.runs.loading import load_model
from treeproc.common.files import json_bytes
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import as_path

pytestmark = pytest.mark.slow

__all__ = ["made", "store"]  # fixtures

ENCODER = "encoder.embedding.pretrained."
FROZEN = {"freeze": [f"{ENCODER}*"], "keep_checkpoints": 5, "average_checkpoints": 2}
LINES, TREES = ["We do n't know"], ["(S (X We) (S (S (X do) (X n't)) (X know)))"]


def frozen_config(made, **changes):
    return config_of(made, **FROZEN | {"model": {"name": "tree_transformer"}, "log_every": 1} | changes)


@pytest.fixture(scope="module")
def run(made, tmp_path_factory) -> Path:
    """A finished run with a moving average, so that all files of weights are there."""
    return run_training(frozen_config(made, ema_decay=0.9), tmp_path_factory.mktemp("run") / "run").run_dir


def names_in(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


def same_model(one: Path, other: Path, **options) -> bool:
    first, second = (load_model(folder, **options).model.state_dict() for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_frozen_weights_stand_once_in_a_run(run):
    whole = load_file(run / "initial" / "model.safetensors")
    frozen = {name for name in whole if name.startswith(ENCODER)}
    files = [path for path in run.rglob("*.safetensors") if path.parent.name != "initial"]
    assert sorted(path.name for path in files) == 2 * ["ema.safetensors"] + 3 * ["model.safetensors"]
    assert frozen and all(names_in(path) == whole.keys() - frozen for path in files)
    trained = load_model(run).model.state_dict()
    assert all(torch.equal(trained[name], whole[name]) for name in frozen)
    assert any(not torch.equal(trained[name], whole[name]) for name in whole.keys() - frozen)


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9, "average": "ema"}, {"freeze": [f"{ENCODER}embeddings.*"]}])
def test_a_run_in_parts_ends_as_one_at_once(made, tmp_path, settings):
    config = frozen_config(made, **settings)
    run_training(config, tmp_path / "whole")
    run_training(config.model_copy(update={"max_steps": 2}), tmp_path / "parts")
    assert run_training(config, tmp_path / "parts").step == 4
    assert same_model(tmp_path / "whole", tmp_path / "parts") and losses(tmp_path / "whole") == losses(tmp_path / "parts")
    files = [f"averaged/{name}" for name in ("model.safetensors", "meta.json")] + ["checkpoints/step_00000004/trainer.pt"]
    assert (tmp_path / "whole" / files[0]).read_bytes() == (tmp_path / "parts" / files[0]).read_bytes()


def test_a_saved_run_and_a_run_that_starts_from_one_have_all_weights(made, run, tmp_path):
    wanted = load_run(run).classify(LINES, trees=TREES)
    load_run(run).save_pretrained(tmp_path / "saved")
    assert from_pretrained(tmp_path / "saved").classify(LINES, trees=TREES) == wanted
    assert names_in(tmp_path / "saved" / "averaged" / "model.safetensors") == names_in(run / "initial" / "model.safetensors")
    assert same_model(run, tmp_path / "saved")
    for name, init in {"first": run, "second": tmp_path / "saved", "step": run / "checkpoints" / "step_00000002"}.items():
        run_training(frozen_config(made, init=init, max_steps=2), tmp_path / name)
    start = load_model(tmp_path / "first", untrained=True).model.state_dict()
    assert all(torch.equal(value, start[name]) for name, value in load_model(run).model.state_dict().items())
    assert same_model(tmp_path / "first", tmp_path / "second")


def test_two_ranks_with_weights_in_parts_learn_as_one_and_leave_out_the_same(made, tmp_path):
    two_ranks_learn_as_one(made, tmp_path, **FROZEN, shard_weights=True)
    one, two = (names_in(tmp_path / name / "checkpoints" / "step_00000004" / "model.safetensors") for name in ("one", "two"))
    assert one == two and latest_checkpoint(tmp_path / "two").name == "step_00000004"


def test_a_run_in_a_store_is_loaded_from_there(made, store, tmp_path, monkeypatch):
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "first"))
    out = as_path("s3://bucket/run")
    run_training(frozen_config(made, max_steps=2), out)
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "second"))
    assert run_training(frozen_config(made), out).step == 4
    run_training(frozen_config(made), tmp_path / "here")
    assert load_run(str(out)).classify(LINES, trees=TREES) == load_run(tmp_path / "here").classify(LINES, trees=TREES)


# Damage.


def cut(run: Path) -> None:
    (run / "initial" / "model.safetensors").write_bytes(b"cut off")


def remove(run: Path) -> None:
    shutil.rmtree(run / "initial")


@pytest.mark.parametrize(("damage", "fault"), [(cut, "model.safetensors has another size"), (remove, "meta.json is missing")])
def test_missing_frozen_weights_are_named_and_the_training_command_writes_them_again(made, run, tmp_path, damage, fault, capsys):
    config = frozen_config(made, ema_decay=0.9)
    (tmp_path / "config.yaml").write_text(dump_settings(config))
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run")
    line = f"{tmp_path / 'run' / 'averaged'}: its frozen weights are in {tmp_path / 'run' / 'initial'}: {fault}"
    (tmp_path / "lines.txt").write_text("We know\n")
    for options in (["classify.py", f"input={tmp_path / 'lines.txt'}"], ["evaluate.py"], ["serve.py"]):
        done = run_here(options[0], "--out", str(tmp_path / "run"), *options[1:])
        assert done.returncode == 2 and line in done.stderr and "repeat its training command" in done.stderr, done.stderr
    (tmp_path / "run" / "averaged" / "meta.json").unlink()
    done = run_here("average_checkpoints.py", "--out", str(tmp_path / "run"))
    assert done.returncode == 2 and "its frozen weights are in" in done.stderr and "repeat its training command" in done.stderr
    done = run_here("train.py", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"))
    assert done.returncode == 0 and "missing or damaged; writing it again" in done.stderr, done.stderr
    for name in ("initial", "averaged"):
        assert (tmp_path / "run" / name / "model.safetensors").read_bytes() == (run / name / "model.safetensors").read_bytes()


def test_frozen_weights_that_the_encoder_no_longer_has_are_not_written(made, run, tmp_path):
    encoder = shutil.copytree(made[0], tmp_path / "encoder")
    weights = load_file(encoder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] += 1
    save_file(weights, encoder / "model.safetensors", {"format": "pt"})
    shutil.copytree(run, tmp_path / "run")
    cut(tmp_path / "run")
    with pytest.raises(UserError, match="what the run began with has other weights now"):
        run_training(frozen_config((encoder, made[1]), ema_decay=0.9), tmp_path / "run")
    assert (tmp_path / "run" / "initial" / "model.safetensors").read_bytes() == b"cut off"


@pytest.mark.parametrize("settings", [{}, {"freeze": []}])
def test_weights_above_another_encoder_are_of_another_run(made, tmp_path, settings):
    """The folder of an encoder may move. The other one has the same settings under another path, and other weights."""
    encoder = shutil.copytree(made[0], tmp_path / "encoder")
    weights = load_file(encoder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] += 1
    save_file(weights, encoder / "model.safetensors", {"format": "pt"})
    shutil.copytree(made[0], tmp_path / "moved")
    for name, place in {"run": made[0], "other": encoder}.items():
        run_training(frozen_config((place, made[1]), **settings, max_steps=3), tmp_path / name)
    for name in ("averaged", "checkpoints/step_00000002"):
        shutil.move(tmp_path / "run" / name, tmp_path / "kept")
        shutil.copytree(tmp_path / "other" / name, tmp_path / "run" / name)
        with pytest.raises(
            UserError, match=rf"{name} has weights of another run \(initial: \w+ -> \w+\); remove {Path(name).name} from"
        ):
            load_run(tmp_path / "run", checkpoint="2" if "2" in name else "averaged")
        if "2" in name:
            with pytest.raises(UserError, match=rf"{name} has weights of another run"):
                run_training(frozen_config(made, **settings), tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / name)
        shutil.move(tmp_path / "kept", tmp_path / "run" / name)
    assert run_training(frozen_config((tmp_path / "moved", made[1]), **settings), tmp_path / "run").finished
    load_run(tmp_path / "run")


def test_a_weight_that_is_missing_for_another_reason_is_named(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "averaged"
    weights = load_file(folder / "model.safetensors")
    del weights["head.bias"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"averaged/model.safetensors: its parameters and the model's differ: head.bias"):
        load_weights(load_model(run).model, folder)


@pytest.mark.parametrize("frozen", [7, {}, {"names": "x", "sha256": "y"}, {"names": [7], "sha256": "y"}, {"names": ["x"]}])
def test_a_damaged_list_of_frozen_weights_is_no_traceback(run, tmp_path, frozen):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "averaged" / "meta.json"
    meta = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    path.write_bytes(json_bytes(_seal({**meta, "frozen": frozen})))
    with pytest.raises(UserError, match=r"averaged is damaged \(its meta.json does not name its frozen weights\)"):
        load_run(tmp_path / "run")
