"""Weights of another run in the folder of a run: which commands refuse them, and what of its own a run never refuses."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import run_here
from safetensors.torch import load_file, save_file
from toydata import write_toy_data
from toylabels import write_toy_labels
from toyruns import make_config

from treenet import UserError, load_run
from treenet.jobs.train_run import run_training
from treenet.runs.checkpoint import AVERAGED, INITIAL, META, WEIGHTS, _seal, checkpoint_folders, folder_name, read_meta
from treeproc.common.files import file_sha256, json_bytes, read_json

pytestmark = pytest.mark.slow

SHORT = ("max_steps=4", "checkpoint_every=1", "keep_checkpoints=4", "average_checkpoints=2", "validate_every=4")
# Runs whose weights come into the folder of the run `own`: their settings, and what a message says of them.
OTHERS = {
    "seed": (["seed=2"], r"seed: 1 -> 2"),
    "dropout": (["model.dropout=0.5"], r"model.dropout: 0.1 -> 0.5"),
    "rate": (["optimizer.learning_rate=0.01"], r"optimizer.learning_rate: 0.005 -> 0.01"),
    "size": (["model.d_ff=48"], r"model.d_ff: 32 -> 48"),
    "a setting that records leave out at its default": (["optimizer.clip_norm=0.1"], r"optimizer.clip_norm: 0.0 -> 0.1"),
    "loss": (["optimizer.label_smoothing=0.3"], r"optimizer.label_smoothing: 0.1 -> 0.3"),
    "data and vocabulary": ([], r"data fingerprint: \w+ -> \w+; vocab_fingerprint: \w+ -> \w+"),
    "initial": (["init=INIT"], r"init: None -> "),
    "drawn by name": (["model.paired_weights=true"], r"model.paired_weights: False -> True"),
}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> Path:
    """The run `own`, and the others, by their names."""
    folder = tmp_path_factory.mktemp("identity")
    run_training(make_config(data, *SHORT), folder / "own")
    for name, (overrides, _) in OTHERS.items():
        place = write_toy_data(folder / "data", seed=3) if name.startswith("data") else data
        settings = [one.replace("INIT", str(folder / "own")) for one in overrides]
        run_training(make_config(place, *SHORT, *settings), folder / name)
    return folder


@pytest.fixture
def own(runs, tmp_path) -> Path:
    return shutil.copytree(runs / "own", tmp_path / "own")


def step(number: int) -> str:
    return f"checkpoints/{folder_name(number)}"


def put(source: Path, own: Path, name: str) -> None:
    """Replace a folder of weights by that of another run."""
    shutil.rmtree(own / name, ignore_errors=True)
    shutil.copytree(source / name, own / name)


def content(folder: Path) -> dict[str, str]:
    """The hash of every file that is not a lock."""
    return {str(path): file_sha256(path) for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}


def command(name: str, run: Path, *options: str) -> list[object]:
    """The arguments of a command on a run. Results beside the run are below its parent."""
    (run.parent / "lines.txt").write_text("ba de\n")
    lines = f"input={run.parent / 'lines.txt'}"
    return {
        "train": ["train.py", "--config", run / "config.yaml", "--out", run],
        "average": ["average_checkpoints.py", "--out", run],
        "evaluate": ["evaluate.py", "--out", run, "split=test", *options],
        "classify": ["classify.py", "--out", run, lines, *options],
        "score-lm": ["score_lm.py", "--out", run, "split=test", *options],
        "translate": ["translate.py", "--out", run, lines, *options],
        "align": ["align.py", "--out", run, lines, f"target={run.parent / 'lines.txt'}", *options],
        "probe": ["probe.py", "--out", run, *options],
        "serve": ["serve.py", "--out", run, *options],
        "export": ["export.py", run, "--out", run.parent / "exported", *options],
        "report": ["report.py", "--out", run.parent / "report", run],
    }[name]


def refused(run: Path, names: list[str], said: str, *options: str) -> str:
    """Every command ends with status 2 and one line, before it writes anything. Returns the last message."""
    before = content(run.parent)
    for name in names:
        arguments = command(name, run, *options)
        before |= content(run.parent)
        done = run_here(*arguments)
        assert done.returncode == 2 and not done.stdout, (name, done.stdout)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and done.stderr.endswith(f"{errors[0]}\n"), done.stderr
        assert re.search(said, errors[0]), errors[0]
        assert content(run.parent) == before, name
    return errors[0]


def accepted(run: Path, name: str, *options: str) -> None:
    done = run_here(*command(name, run, *options))
    assert done.returncode == 0, done.stderr


LOADS = ["translate", "align", "export"]


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_is_neither_continued_nor_averaged_nor_scored(runs, own, other):
    """The remedy in the message works for the commands that said it. They find any other run by the same comparison."""
    put(runs / other, own, step(4))
    for number in (1, 2, 3):
        shutil.rmtree(own / step(number))
    said = rf"{step(4)} has weights of another run \({OTHERS[other][1]}.*\); remove {folder_name(4)} from the run, then repeat"
    refused(own, ["train", "average"], said)
    if other != "seed":
        return
    refused(own, ["evaluate", "export"], said, "checkpoint=4")
    accepted(own, "evaluate")  # the average is the own one
    shutil.rmtree(own / step(4))
    accepted(own, "train")
    assert file_sha256(own / AVERAGED / WEIGHTS) == file_sha256(runs / "own" / AVERAGED / WEIGHTS)


@pytest.mark.parametrize("other", OTHERS)
def test_an_average_of_another_run_is_not_read(runs, own, other):
    put(runs / other, own, AVERAGED)
    names = [*LOADS, "evaluate", "probe", "serve", "report"] if other == "seed" else ["evaluate", "report"]
    refused(own, names, rf"averaged has weights of another run \({OTHERS[other][1]}.*remove averaged from the run, then repeat")
    with pytest.raises(UserError, match="averaged has weights of another run"):
        load_run(own)
    accepted(own, "average")
    assert (own / AVERAGED / META).read_bytes() == (runs / "own" / AVERAGED / META).read_bytes()


def test_the_remedy_for_a_packed_run_is_for_the_run_that_was_zipped(runs, own):
    """A mixed run in a zip: its copy in the cache is unpacked again, so the remedy is for the run that was zipped."""
    put(runs / "seed", own, AVERAGED)
    shutil.make_archive(str(own.parent / "packed"), "zip", own)
    said = r"has weights of another run \(seed: 1 -> 2\); remove averaged from the run that was zipped, .*, and zip it again"
    with pytest.raises(UserError, match=said):
        load_run(own.parent / "packed.zip")
    shutil.rmtree(own / AVERAGED)
    accepted(own, "train")
    weights = own / AVERAGED / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    shutil.make_archive(str(own.parent / "packed"), "zip", own)
    with pytest.raises(UserError, match="damaged .*; run .*average-checkpoints on the run that was zipped, and zip it again$"):
        load_run(own.parent / "packed.zip")
    weights.write_bytes(whole)
    shutil.make_archive(str(own.parent / "packed"), "zip", own)
    assert load_run(own.parent / "packed.zip").loaded.checkpoint == AVERAGED


@pytest.mark.parametrize("task", ["classification", "causal_lm"])
def test_runs_of_other_tasks_are_checked_too(data, tmp_path, task):
    place, model = data, "causal_transformer"
    if task == "classification":
        place, model = tmp_path / "data", "transformer"
        place.mkdir()
        write_toy_labels(place)
    settings = [*SHORT, f"task={task}", f"model.name={model}"]
    for name, seed in (("own", 1), ("other", 2)):
        run_training(make_config(place, *settings, f"seed={seed}"), tmp_path / name)
    own, reads = tmp_path / "own", ["classify", "evaluate", "report"] if task == "classification" else ["score-lm"]
    accepted(own, reads[-1])
    put(tmp_path / "other", own, AVERAGED)
    refused(own, [*reads, "export"], r"averaged has weights of another run \(seed: 1 -> 2\); remove averaged from")
    put(tmp_path / "other", own, step(2))
    said = r"step_00000002 has weights of another run \(seed: 1 -> 2\); remove step_00000002 and averaged from"
    refused(own, ["train", "average"], said)


def test_weights_to_start_from_must_be_of_their_own_run(data, runs, own):
    """They may be of another run than the one that starts."""
    put(runs / "seed", own, AVERAGED)
    with pytest.raises(UserError, match=r"own/averaged has weights of another run \(seed: 1 -> 2\)"):
        run_training(make_config(data, *SHORT, f"init={own}"), own.parent / "new")
    assert not (own.parent / "new" / INITIAL).exists()


def test_all_that_continues_a_checkpoint_of_another_run_is_named(runs, own):
    """The run has continued from it: its later checkpoints and its average have the settings of the run."""
    for name in (AVERAGED, *map(step, (2, 3, 4))):
        shutil.rmtree(own / name)
    put(runs / "seed", own, step(2))
    real = (own / step(2) / META).read_bytes()
    settings = read_meta(own / step(1))["settings"]
    change_meta(own / step(2), settings=settings, ancestors={})
    accepted(own, "train")
    (own / step(2) / META).write_bytes(real)
    said = r"step_00000002 has weights of another run \(seed: 1 -> 2\); remove {} from"
    whole = said.format("step_00000002, step_00000003, step_00000004 and averaged")
    refused(own, ["train", "average", "evaluate", "export", "report"], whole)
    refused(own, ["evaluate"], whole, "checkpoint=3")
    accepted(own, "evaluate", "checkpoint=1")
    for name in (AVERAGED, *map(step, (2, 3, 4))):
        shutil.rmtree(own / name)
    accepted(own, "train")
    assert file_sha256(own / AVERAGED / WEIGHTS) == file_sha256(runs / "own" / AVERAGED / WEIGHTS)


def test_a_checkpoint_of_a_training_with_the_same_settings_breaks_the_chain(runs, own):
    """As where a GPU rounds in another order: only the ancestors that later checkpoints name tell the two trainings apart."""
    put(runs / "seed", own, step(3))
    change_meta(own / step(3), settings=read_meta(own / step(1))["settings"])
    said = r"of another step_0000000\d than the one beside it, .*; remove {}, then repeat"
    others = "step_00000001, step_00000002 and step_00000004"
    refused(own, ["train", "average"], said.format(f"(step_00000003 or else {others}|{others} or else step_00000003)"))
    refused(own, ["evaluate"], "than the one beside it", "checkpoint=4")
    refused(own, ["evaluate", "report"], r"averaged was made of another step_00000003 than .*; remove averaged, then")
    shutil.rmtree(own / step(3))
    for name in ("train", "evaluate"):
        accepted(own, name)


def change_meta(folder: Path, **changes: object) -> None:
    """Write meta.json anew with a right hash, as a user can who wants to."""
    meta = {name: value for name, value in read_meta(folder).items() if name != "sha256"} | changes
    meta["files"] |= {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)} for name in meta["files"]
    }
    (folder / META).write_bytes(json_bytes(_seal(meta)))


def change_weights(folder: Path, change: Callable[[dict], dict]) -> None:
    """Write other weights, with a right hash in meta.json."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    change_meta(folder)


def test_the_weights_that_a_run_starts_from_are_those_that_it_recorded(runs, tmp_path):
    """Of another run, and of the same settings: an encoder may have got other weights under its name."""
    run = shutil.copytree(runs / "initial", tmp_path / "own")
    accepted(run, "evaluate", "untrained=true")
    change_weights(run / INITIAL, lambda weights: {name: value + 1 for name, value in weights.items()})
    said = r"initial has weights of another run \(initial: \w+ -> \w+\); copy that folder from a copy of the run"
    refused(run, ["evaluate"], said, "untrained=true")
    refused(run, ["evaluate", "translate", "export"], said, "checkpoint=initial")
    accepted(run, "evaluate")
    accepted(run, "train")
    put(runs / "initial", run, INITIAL)
    change_meta(run / INITIAL, settings=read_meta(runs / "seed" / AVERAGED)["settings"])
    refused(run, ["evaluate"], r"initial has weights of another run \(init: .*seed: 1 -> 2", "untrained=true")
    change_meta(run / step(4), initial="0" * 64)
    refused(run, ["train", "average"], r"step_00000004 has weights of another run \(initial: \w+ -> 0+\)")


def test_weights_outside_of_the_run_need_the_same_model_and_vocabulary(runs, own):
    """They may be drawn in another way."""
    for name in ("seed", "rate", "drawn by name"):
        accepted(own, "evaluate", f"checkpoint={runs / name / AVERAGED}")
        said = r"averaged has weights of another run \(.*\); give that run, with its settings"
        refused(own, ["export"], said, f"checkpoint={runs / name / AVERAGED}")
    for name in ("size", "dropout", "data and vocabulary"):
        said = r"averaged has weights of another model or vocabulary \(.*\); give a checkpoint of .*own, or the run that it is of"
        refused(own, ["evaluate", "translate", "export"], said, f"checkpoint={runs / name / AVERAGED}")
    (own / "link").symlink_to(runs / "seed" / AVERAGED)
    shutil.rmtree(own / AVERAGED)
    (own / "link").rename(own / AVERAGED)
    refused(own, ["evaluate", "report"], r"averaged has weights of another run \(seed")


# What a run never refuses.


def test_a_run_never_refuses_its_own_weights(runs, own, tmp_path):
    """More updates, fewer checkpoints kept, another average, another place, a packed run, lost checkpoints, a copied one."""
    (own / "config.yaml").write_text((own / "config.yaml").read_text().replace("max_steps: 4", "max_steps: 7"))
    changes = ["keep_checkpoints=2", "average=best", "average_checkpoints=1", "log_every=3", "validate_every=1"]
    done = run_here(*command("train", own), *changes)
    assert done.returncode == 0, done.stderr
    assert [folder.name for folder in checkpoint_folders(own)][-1] == folder_name(7)
    assert read_meta(own / step(7))["ancestors"].keys() >= {folder_name(6)}
    for name in ("average", "evaluate", "report", "export"):
        accepted(own, name)
    shutil.rmtree(own / step(6), ignore_errors=True)  # the parent of the last one
    moved = own.rename(tmp_path / "moved")
    shutil.make_archive(str(tmp_path / "packed"), "zip", moved)
    for place in (moved, tmp_path / "packed.zip", tmp_path / "exported"):
        assert load_run(place).loaded.checkpoint == AVERAGED
    shutil.copytree(moved / step(7), moved / "backup" / folder_name(7))
    accepted(moved, "evaluate", f"checkpoint={moved / 'backup' / folder_name(7)}")
    accepted(moved, "train")


def test_a_copy_of_a_checkpoint_inside_a_run_that_has_trained_again_is_accepted(own):
    """The copies are of the training before, so later checkpoints and the average were made of others."""
    for name in (step(3), AVERAGED):
        shutil.copytree(own / name, own / "before" / Path(name).name)
    change_weights(own / "before" / folder_name(3), lambda weights: {name: value + 1e-6 for name, value in weights.items()})
    change_meta(own / "before" / AVERAGED, averaged_files=[{"name": WEIGHTS, "sha256": "0" * 64}] * 2)
    for name in (folder_name(3), AVERAGED):
        for of_command in ("evaluate", "export"):
            accepted(own, of_command, f"checkpoint={own / 'before' / name}")
            shutil.rmtree(own.parent / "exported", ignore_errors=True)
    accepted(own, "train")


def test_a_checkpoint_that_replaces_a_damaged_one_is_not_refused(runs, own):
    """Both last ones are damaged. The first that is written again has other weights; the second one still names the old ones."""
    for number in (3, 4):
        (own / step(number) / "trainer.pt").write_bytes(b"cut off")
    put(runs / "seed", own, step(3))
    change_meta(own / step(3), settings=read_meta(own / step(2))["settings"], ancestors=read_meta(own / step(2))["ancestors"])
    accepted(own, "train")


# Exported runs.


def test_an_exported_run_has_no_other_weights_than_its_average(runs, tmp_path):
    run = shutil.copytree(runs / "initial", tmp_path / "own")
    accepted(run, "export")
    said = r"model.safetensors is missing: an exported run has one checkpoint, averaged; give the run itself"
    for option in ("checkpoint=3", "checkpoint=initial"):
        refused(tmp_path / "exported", ["translate"], said, option)


def seal_again(saved: Path, name: str) -> None:
    """Write the hash of a changed file into export.json."""
    facts = read_json(saved / "export.json")
    facts["files"][name] = {"bytes": (saved / name).stat().st_size, "sha256": file_sha256(saved / name)}
    (saved / "export.json").write_bytes(json_bytes(facts))


def test_an_exported_run_with_other_files_under_new_seals_is_refused(runs, own):
    accepted(own, "export")
    saved, pieces = own.parent / "exported", "data/encoded/vocab/pieces.model"
    changed = shutil.copytree(saved, own.parent / "pieces" / "run")
    shutil.copyfile(runs / "data" / "encoded" / "vocab" / "pieces.model", changed / pieces)
    seal_again(changed, pieces)
    refused(changed, LOADS, r"pieces.model is damaged: .*; copy the exported run again")
    changed = shutil.copytree(saved, own.parent / "int32" / "run")
    change_weights(changed / AVERAGED, lambda weights: {name: value.to(torch.int32) for name, value in weights.items()})
    for name in (WEIGHTS, META):
        seal_again(changed, f"{AVERAGED}/{name}")
    refused(changed, LOADS, r"must have floating-point numbers, but has the type I32")
    changed = shutil.copytree(saved, own.parent / "other" / "run")
    put(runs / "seed", changed, AVERAGED)
    refused(changed, LOADS, r"meta.json is damaged: .*; copy the exported run again")
    for name in (WEIGHTS, META):
        seal_again(changed, f"{AVERAGED}/{name}")
    refused(changed, LOADS, r"averaged has weights of another run \(.*seed: 1 -> 2\); copy the exported run again")
