"""A run folder that travels alone, and what `export` refuses."""

import os
import shutil
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import pytest
from search_runs import write_run, write_vocabulary

from treenet import load_run
from treenet.cli import export
from treenet.cli.evaluate import main as main_of_evaluate
from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.runs import exported_run
from treenet.runs.identity import checkpoint_folder
from treeproc.common.files import file_sha256, json_bytes, read_json
from treeproc.common.folder_kinds import RUN, mark_folder
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

LINES = ["ba de", "gu ki bo da", "", "ke"]


@pytest.fixture
def world(tmp_path):
    """A folder with a data set and runs of three models."""
    data = write_vocabulary(tmp_path / "data")
    for name in ("transformer", "tree_transformer", "lightconv"):
        write_run(tmp_path / name, data, name=name)
    return tmp_path


def run_export(world, name: str, *settings: str, out: str = "exported") -> Path:
    export.main([str(world / name), "--out", str(world / out), *settings])
    return world / out


@pytest.mark.parametrize("name", ["tree_transformer", "lightconv"])
def test_an_exported_run_translates_alone(world, name):
    expected = load_run(world / name).candidates(LINES, num_best=3)
    weights = file_sha256(world / name / "averaged" / "model.safetensors")
    out = run_export(world, name)
    for gone in (world / "data", world / name):
        shutil.rmtree(gone)
    out = out.rename(world / "moved")
    assert load_run(out).candidates(LINES, num_best=3) == expected
    facts = read_json(out / "export.json")
    assert facts["weights_sha256"] == weights == file_sha256(out / "averaged" / "model.safetensors")
    assert {file: file_sha256(out / file) for file in facts["files"]} == {
        file: found["sha256"] for file, found in facts["files"].items()
    }


@pytest.mark.parametrize("form", ["none", "nfc"])
def test_an_export_names_the_form_of_its_text(world, form):
    path = world / "data" / "encoded" / "index.json"
    path.write_bytes(json_bytes(read_json(path) | ({"normalization": form} if form != "none" else {})))
    assert read_json(run_export(world, "transformer") / "export.json")["normalization"] == form


def test_an_exported_run_names_no_folder_of_this_machine(world):
    path = world / "transformer" / "config.yaml"
    path.write_text(path.read_text() + f"frozen_states: {world / 'states'}\n")
    out = run_export(world, "transformer")
    for file in (path for path in out.rglob("*") if path.is_file()):
        assert str(world).encode() not in file.read_bytes(), file


def test_scoring_an_exported_run_says_that_it_needs_a_data_set(world):
    out = run_export(world, "tree_transformer")
    for split in ("test", "valid"):
        with pytest.raises(UserError, match="exported/data holds a vocabulary without examples; give a data set: data=DATA"):
            evaluate_run(out, EvaluateSettings(split=split))


def test_no_data_set_that_is_called_data_is_scored_for_an_exported_run(world, monkeypatch):
    out = run_export(world, "transformer")
    monkeypatch.chdir(world)  # where the data set is `data`, which is also the name in the exported run
    (world / "lines.txt").write_text("a\n")
    with pytest.raises(UserError, match="exported is an exported run, which holds no examples; give data=DATA"):
        main_of_evaluate(["--out", str(out), f"hypotheses={world / 'lines.txt'}"])
    for setting in ("checkpoint=2", "random_trees=true", "decoding.beam_size=9"):
        with pytest.raises(
            UserError, match=f"^{setting.partition('=')[0].partition('.')[0]}: does not change the scores of a file"
        ):
            main_of_evaluate([f"hypotheses={world / 'lines.txt'}", f"references={world / 'lines.txt'}", setting])
    with pytest.raises(UserError, match="^buckets: does not change the scores of a file"):
        main_of_evaluate([f"hypotheses={world / 'lines.txt'}", f"references={world / 'lines.txt'}", "buckets.words=[9]"])


def test_damaged_weights_of_an_exported_run_are_copied_again(world):
    out = run_export(world, "transformer")
    weights = out / "averaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged.*; copy the exported run again$"):
        load_run(out)
    with pytest.raises(UserError, match="averaged is damaged .*; copy the exported run again$"):
        checkpoint_folder(out, "averaged")


def test_a_checkpoint_of_a_step_becomes_the_trained_model(world):
    write_run(world / "transformer", world / "data", name="transformer", seed=2, checkpoint="checkpoints/step_00000007")
    expected = load_run(world / "transformer", checkpoint="7").translate(LINES)
    assert expected != load_run(world / "transformer").translate(LINES)
    assert load_run(run_export(world, "transformer", "checkpoint=7")).translate(LINES) == expected


def test_an_earlier_export_is_replaced_and_other_folders_are_not(world):
    out = run_export(world, "transformer")
    before = read_json(out / "export.json")
    assert read_json(run_export(world, "tree_transformer") / "export.json")["model"]["name"] == "tree_transformer"
    assert read_json(run_export(world, "transformer") / "export.json") == before
    (out / "scores.json").write_text("{}")
    with pytest.raises(UserError, match="is an earlier export, but has scores.json too, which would be lost"):
        run_export(world, "tree_transformer")
    (out / "translations.test.txt").write_text("")
    (out / ".results-lock").touch()  # as `evaluate` leaves it
    with pytest.raises(UserError, match="has scores.json, translations.test.txt too, which would be lost; move them, or choose"):
        run_export(world, "tree_transformer")
    (out / "translations.test.txt").unlink()
    assert read_json(out / "export.json") == before and (out / "scores.json").unlink() is None
    assert read_json(run_export(world, "transformer") / "export.json") == before
    (out / "export.json").write_bytes(json_bytes({**before, "format": "onnx"}))
    with pytest.raises(
        UserError, match="holds an export in the format onnx, but this one is in safetensors; choose another --out"
    ):
        run_export(world, "transformer")
    (out / "export.json").write_bytes(json_bytes(before))
    (world / "elsewhere").mkdir()
    for name, make in {
        ".gitattributes": lambda path: path.write_text("mine"),
        "averaged/.env": lambda path: path.write_text("mine"),
        "notes": lambda path: path.mkdir(),
        "link": lambda path: path.symlink_to(world / "elsewhere"),
    }.items():
        make(out / name)
        with pytest.raises(UserError, match=f"is an earlier export, but has {name} too, which would be lost"):
            run_export(world, "tree_transformer")
        assert os.path.lexists(out / name) and read_json(out / "export.json") == before
        (out / name).rmdir() if name == "notes" else (out / name).unlink()
    (out / "export.json").write_text('{"files": {}}')
    with pytest.raises(
        UserError, match="is an earlier export, but has README.md, averaged, config.yaml, data, run.json too, which would be lost"
    ):
        run_export(world, "tree_transformer")
    (out / "export.json").write_bytes(json_bytes(before))
    (out / "run.json").unlink()  # as a command that was killed while it replaced the export
    assert read_json(run_export(world, "transformer") / "export.json")["files"] == before["files"]


def test_an_export_is_removed_after_a_kill_at_any_step_of_its_removal(world, monkeypatch):
    out, place = run_export(world, "transformer"), world / "removed"
    steps = [*out.rglob("*"), out]
    for done in range(len(steps)):
        shutil.copytree(out, place)
        left = iter(range(done))

        def remove(path, *given, real, left=left, **named):
            if next(left, None) is None:
                raise KeyboardInterrupt
            real(path, *given, **named)

        with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
            for name in ("unlink", "rmdir"):
                context.setattr(Path, name, partialmethod(remove, real=getattr(Path, name)))
            exported_run._remove(place, "--out")
        exported_run._remove(place, "--out")
        assert not place.exists() or not any(place.iterdir())
        shutil.rmtree(place, ignore_errors=True)


def test_a_file_that_comes_while_an_export_is_made_is_not_lost(world, monkeypatch):
    out, publish = run_export(world, "transformer"), exported_run.publish_folder

    def with_a_new_file(place, fill, *more):
        publish(place, lambda temporary: [(out / "mine.txt").write_text("mine"), fill(temporary)][1], *more)

    monkeypatch.setattr(exported_run, "publish_folder", with_a_new_file)
    with pytest.raises(UserError, match="is an earlier export, but has mine.txt too, which would be lost"):
        run_export(world, "transformer")
    assert (out / "mine.txt").read_text() == "mine" and load_run(out).translate(LINES)
    assert not list(world.glob(".tmp-*"))


def test_what_is_neither_free_nor_an_export_is_refused(world):
    run_export(world, "transformer")
    with pytest.raises(UserError, match="--out must be another folder than RUN"):
        run_export(world, "exported")
    (world / "mine").mkdir()
    (world / "mine" / "notes.txt").write_text("mine")
    mark_folder(world / "lightconv", RUN)
    for other, message in (
        ("mine", "must be a new folder or an earlier export"),
        ("lightconv", "is a training run, and this command would write an export there"),
        ("mine/notes.txt", "is a file, but must be a folder; choose another --out"),
    ):
        with pytest.raises(UserError, match=message):
            run_export(world, "transformer", out=other)
    assert (world / "mine" / "notes.txt").read_text() == "mine"
    assert not [path for path in world.rglob(".tmp-*")]


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("lightconv", ["--to", "onnx"], "ONNX takes transformer and tree_transformer, but the run is lightconv"),
        ("tree_transformer", ["--to", "ctranslate2"], "takes only transformer, but the run is tree_transformer"),
        ("transformer", ["--to", "onnx", "quantization=int8"], "needs to = 'ctranslate2', but to is 'onnx'"),
        ("transformer", ["max_positions=9"], "max_positions needs to = 'onnx', 'ctranslate2' or 'gpt2', but to is 'safetensors'"),
        ("transformer", ["--to", "onnx", "max_positions=7"], "max_positions: must be greater than or equal to 8, but is 7"),
        ("transformer", ["checkpoint=9"], "model.safetensors is missing"),
        ("data", [], "is not a run"),
    ],
)
def test_export_refuses_unfit_models_in_one_line(world, monkeypatch, name, settings, message):
    monkeypatch.setattr("treeproc.common.errors.is_installed", lambda module: True)
    with pytest.raises(UserError, match=message) as error:
        run_export(world, name, *settings)
    assert "\n" not in str(error.value) and not (world / "exported").exists()


def test_a_run_and_a_folder_are_needed(world):
    for arguments in (["--out", str(world / "x")], [str(world / "transformer")], [str(world), str(world), "--out", "x"]):
        with pytest.raises(UserError, match="give one RUN"):
            export.main(arguments)


def test_a_package_that_is_missing_is_named(world, monkeypatch):
    monkeypatch.setattr("treeproc.common.errors.is_installed", lambda module: False)
    for form, package in (("onnx", "onnx"), ("ctranslate2", "ctranslate2")):
        with pytest.raises(
            UserError, match=rf"{package}.*, which (is|are) not installed: pip install 'tree-attention\[export\]'"
        ):
            export.main(["--to", form])  # before the command asks for anything else


def test_an_exported_run_loads_without_ray(world):
    out = run_export(world, "transformer")
    code = "import sys, treenet; print(treenet.load_run(sys.argv[1]).translate(['ba de'])); assert 'ray' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
