"""States of a frozen pretrained encoder in files: those that training computes, whole after a kill, of one encoder and data."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from commands import PROCESSES, run_here, tasks_here  # noqa: E402
from folder_store import store  # noqa: E402, F401
from pretrained_data import write_data  # noqa: E402
from test_pretrained import config_of, damage_config, leaves_of  # noqa: E402
from tiny_pretrained import FAMILIES, write_both, write_encoder  # noqa: E402

from treenet.data.frozen_states import SHARDS, FrozenStates, check_states  # noqa: E402
from treenet.evaluation.classify import classify_run  # noqa: E402
from treenet.evaluation.settings import ClassifySettings  # noqa: E402
from treenet.extras import frozen_states  # noqa: E402
from treenet.extras.frozen_states import write_states  # noqa: E402
from treenet.jobs.train_run import run_training  # noqa: E402
from treenet.runs.loading import load_model  # noqa: E402
from treenet.tasks.base import build_task  # noqa: E402
from treeproc.common.settings import UserError  # noqa: E402
from treeproc.common.storage import RemotePath  # noqa: E402
from treeproc.shards.store import read_index  # noqa: E402
from treeproc.stages.preprocess import PreprocessConfig, preprocess  # noqa: E402

pytestmark = pytest.mark.slow

FROZEN = {"freeze": ["encoder.embedding.pretrained.*"]}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / SHARDS).iterdir()) if path.name[0] != "."}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An encoder that reads four leaves at once, its data set of several shards, and the states."""
    folder = tmp_path_factory.mktemp("states")
    encoder = write_encoder(folder / "encoder", positions=6)
    data = write_data(folder, tokenizer=encoder, rows_per_shard=9)
    assert len(read_index(data / "encoded").records("train")) == 5
    write_states(data, encoder, folder / "states", in_this_process=True)
    return encoder, data, folder / "states"


def config_with(made, states=True, **changes):
    encoder, data, folder = made
    return config_of((encoder, data), frozen_states=folder if states else None, **FROZEN | changes)


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_states_are_those_that_training_computes(tmp_path, kind):
    encoder, data = write_both(tmp_path, kind, rows_per_shard=9)
    write_states(data, encoder, tmp_path / "states", in_this_process=True)
    check_states_of(encoder, data, tmp_path / "states", leaves_of(encoder, data))


def check_states_of(encoder, data, states, leaves):
    pair = encoder, data, states
    for split in ("train", "valid"):
        with_states, without = (build_task(config_with(pair, states)).open(split) for states in (True, False))
        for rows in ([3, 20, 9, 8, 39], [1], np.arange(40)[::-1]):
            batch, other = with_states.batch(rows), without.batch(rows)
            assert other.leaf_states is None
            assert batch.leaf_states.shape == (len(rows), 1 + batch.leaf_pieces.shape[1], leaves.width)
            (found, first), (wanted, first_wanted) = leaves.encode(batch), leaves.encode(other)
            real = ~batch.leaf_pad_mask
            torch.testing.assert_close(found[real], wanted[real], atol=1e-5, rtol=0)
            torch.testing.assert_close(first, first_wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_long_texts_have_the_states_of_their_windows(made):
    check_states_of(*made, leaves_of(*made[:2]))
    totals = read_index(made[2] / SHARDS)["totals"]["train"]
    lengths = build_task(config_with(made)).open("train").lengths["leaves"][:]
    assert totals["in_windows"] == (lengths > 4).sum() > 0
    assert totals["states"] == (lengths + 1).sum() and totals["rows"] == 40


def test_a_run_reads_the_states_and_learns_the_same(made, tmp_path, monkeypatch, forked_loaders):
    """With another width there is a map above the states, which is trained. Batches may come from another process."""
    for number, model in enumerate(({"name": "pretrained"}, {"name": "transformer"}, {"name": "tree_transformer", "d_model": 8})):
        name = model["name"]
        attends = {"classifier": {"supervision": "root", "pooling": "attention"}} if name == "transformer" else {}
        run_training(config_with(made, states=False, model=model, **attends), tmp_path / f"{name}_own")
        with monkeypatch.context() as patch:
            patch.setattr(transformers.BertModel, "forward", None)  # nothing runs the encoder
            run_training(config_with(made, model=model, loader_workers=number // 2, **attends), tmp_path / name)
            classify_run(tmp_path / name, ClassifySettings(split="valid"))
        own, read = (load_model(tmp_path / folder).model.state_dict() for folder in (f"{name}_own", name))
        start = load_model(tmp_path / name, untrained=True).model.state_dict()
        for key, value in own.items():
            torch.testing.assert_close(read[key], value, atol=1e-4, rtol=1e-3)
            assert torch.equal(start[key], read[key]) == (".pretrained." in key), key


def test_the_bytes_are_those_of_one_call_however_the_job_is_run(made, tmp_path, monkeypatch):
    encoder, data, states = made
    wanted = files(states)
    write_states(data, encoder, states, in_this_process=True)
    assert files(states) == wanted
    with monkeypatch.context() as patch:  # blocks of a few examples
        patch.setattr(frozen_states, "BLOCK_POSITIONS", 12)
        write_states(data, encoder, tmp_path / "blocks", in_this_process=True)
    found = FrozenStates(tmp_path / "blocks", "train", build_task(config_with(made)).open("train").lengths["leaves"])
    own = FrozenStates(states, "train", build_task(config_with(made)).open("train").lengths["leaves"])
    torch.testing.assert_close(found.pad(np.arange(40), 6), own.pad(np.arange(40), 6), atol=1e-6, rtol=0)
    assert len(found._open[0].batches) > 2


def test_tasks_write_the_same_bytes(made, tmp_path, monkeypatch):
    """Jobs go to a worker of Ray, and their results back, by the same way within this process."""
    encoder, data, states = made
    ran = tasks_here(monkeypatch)
    write_states(data, encoder, tmp_path / "states", in_this_process=False)
    assert ran == ["StatesOfShard"] and files(tmp_path / "states") == files(states)


@pytest.mark.cluster
def test_ray_s_workers_write_the_same_bytes(made, tmp_path, one_core_of_ray):
    encoder, data, states = made
    write_states(data, encoder, tmp_path / "states", in_this_process=False)
    assert files(tmp_path / "states") == files(states)


def test_states_may_lie_in_an_object_store(made, tmp_path, store):  # noqa: F811
    encoder, data, states = made
    remote = RemotePath("s3", "bucket/states")
    write_states(data, encoder, remote, in_this_process=True)
    assert files(tmp_path / "store" / "bucket" / "states") == files(states)
    with torch.no_grad():
        check_states_of(encoder, data, remote, leaves_of(encoder, data))
    run_training(config_with((encoder, data, remote)), tmp_path / "run")


def write_two_files(data: Path, encoder: Path, out: Path) -> None:
    whole, left = frozen_states._record_batch, [3]

    def record_batch(*given):
        left[0] -= 1
        return whole(*given) if left[0] else os.kill(os.getpid(), signal.SIGKILL)

    frozen_states._record_batch = record_batch
    write_states(data, encoder, out, in_this_process=True)


def test_killed_in_the_middle_the_same_command_continues(made, tmp_path):
    """A kill leaves finished files and temporary ones; a cut and a changed file are made again, the others are not."""
    encoder, data, states = made
    out = tmp_path / "states"
    process = PROCESSES.Process(target=write_two_files, args=(data, encoder, out))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = sorted((out / SHARDS).glob("train-*.arrow"))
    assert len(finished) == 2 and list((out / SHARDS).glob(".tmp-*")) and not (out / SHARDS / "index.json").exists()
    with pytest.raises(UserError, match=r"is not complete; run its .*frozen.states.* command again"):
        run_training(config_with((encoder, data, out)), tmp_path / "run")
    os.truncate(finished[0], 1000)
    before = finished[1].stat().st_mtime_ns
    time.sleep(0.01)
    write_states(data, encoder, out, in_this_process=True)
    assert files(out) == files(states)
    assert finished[1].stat().st_mtime_ns == before
    assert not list((out / SHARDS).glob(".tmp-*"))


def test_a_cut_or_changed_file_is_refused_and_made_again(made, tmp_path):
    encoder, data, states = made
    out = shutil.copytree(states, tmp_path / "states")
    shard = sorted((out / SHARDS).glob("train*.arrow"))[1]
    content = shard.read_bytes()
    for damaged in (content[:-100], content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]):
        shard.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{shard.name} is missing or damaged.*run .*frozen.states.* again"):
            run_training(config_with((encoder, data, out)), tmp_path / "run")
    (out / SHARDS / "index.json").write_text("{")
    with pytest.raises(UserError, match="index.json.*run .*frozen.states.* again"):
        run_training(config_with((encoder, data, out)), tmp_path / "run")
    write_states(data, encoder, out, in_this_process=True)
    assert shard.read_bytes() == content
    source = build_task(config_with((encoder, data, out))).open("train")
    shard.write_bytes(content[:-100])
    with pytest.raises(UserError, match=rf"{shard.name} must have {len(content)} bytes.*run .*frozen.states.* again"):
        source.batch([9])


def test_states_of_something_else_are_refused(made, tmp_path):
    encoder, data, states = made
    other = write_encoder(tmp_path / "other", positions=6, seed=2)
    shutil.copy(encoder / "tokenizer.json", other)
    pair = write_both(tmp_path / "pair", "roberta")
    again = write_data(tmp_path / "again", tokenizer=encoder, rows_per_shard=20)
    heads = shutil.copytree(encoder, tmp_path / "heads")
    damage_config(heads, num_attention_heads=4)
    for case, message in (
        ((other, data, states), r"has the states of another encoder than this run begins with; give those of .*frozen.states"),
        ((heads, data, states), "has the states of another encoder than this run begins with"),
        ((*pair, states), "has the states of the pieces of another tokenizer"),
        ((encoder, again, states), "has the states of another data set; make those of this data set with"),
        ((encoder, data, tmp_path), r"states.json is missing; give the --out folder of .*frozen.states"),
    ):
        with pytest.raises(UserError, match=message):
            run_training(config_with(case), tmp_path / "run")
    for case, message in (
        ((data, other), "has the states of another encoder; choose another --out"),
        (pair[::-1], "has the states of another encoder; choose another --out"),
        ((again, encoder), "has the states of another data set; choose another --out"),
    ):
        with pytest.raises(UserError, match=message):
            write_states(*case, states, in_this_process=True)
    for changes, message in (
        (
            {"freeze": ["encoder.embedding.pretrained.encoder.*"]},
            r"embeddings.* is trained; set freeze=\[encoder.embedding.pretr",
        ),
        ({"classifier": {"supervision": "root", "word_dropout": 0.1}}, "set classifier.word_dropout=0"),
        ({"classifier": {"supervision": "all_phrases"}}, "set classifier.supervision=root"),
        ({"model": {"name": "transformer", "pretrained": {"folder": None}}, "freeze": []}, "model.pretrained.folder is null"),
    ):
        with pytest.raises(UserError, match=message):
            run_training(config_with(made, **changes), tmp_path / "run")


@torch.no_grad()
def test_controls_have_the_states_of_their_data_set(made, tmp_path):
    """Other trees over the same pieces; the job would change nothing for them."""
    encoder, data, states = made
    values = {"parsed": data, "vocab_from": data, "workers": 0, "tree": {"tree_source": "right"}}
    preprocess(PreprocessConfig.model_validate(values), tmp_path / "right")
    assert read_index(tmp_path / "right" / "encoded")["fingerprint"] != read_index(data / "encoded")["fingerprint"]
    check_states_of(encoder, tmp_path / "right", states, leaves_of(encoder, data))
    before = {path: path.stat().st_mtime_ns for path in (states / SHARDS).glob("*.arrow")}
    write_states(tmp_path / "right", encoder, states, in_this_process=True)
    assert before == {path: path.stat().st_mtime_ns for path in (states / SHARDS).glob("*.arrow")}


def test_a_run_keeps_to_the_states_that_it_began_with(made, tmp_path):
    """They may move. A run that began without them goes on without them."""
    encoder, data, states = made
    run_training(config_with(made, max_steps=2), tmp_path / "run")
    moved = shutil.move(shutil.copytree(states, tmp_path / "copy"), tmp_path / "moved")
    run_training(config_with((encoder, data, moved)), tmp_path / "run")
    run_training(config_with(made, states=False, max_steps=2), tmp_path / "own")
    for name, with_states in (("run", False), ("own", True)):
        with pytest.raises(UserError, match=r"holds a run with other settings \(encoder of frozen_states: .*None"):
            run_training(config_with(made, states=with_states, max_steps=6), tmp_path / name)


def test_scoring_runs_the_encoder_where_the_states_are_of_something_else(made, tmp_path, capsys):
    encoder, data, states = made
    folder = shutil.copytree(states, tmp_path / "states")
    run_training(config_with((encoder, data, folder)), tmp_path / "run")
    wanted = classify_run(tmp_path / "run", ClassifySettings(split="valid"))[1]
    assert "note: the encoder computes" not in capsys.readouterr().err
    for file in (folder / "shards" / "index.json", folder / "states.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"encoder_sha256": "0" * 64}))
        if file.name == "index.json":
            with pytest.raises(UserError, match=r"shards is of other states than states.json \(encoder_sha256\); run"):
                check_states(folder, read_index(data / "encoded"), "valid")
    for said in ("has the states of another encoder", "is missing"):
        found = classify_run(tmp_path / "run", ClassifySettings(split="valid"))[1]
        error = capsys.readouterr().err
        assert error.count("note: the encoder computes the states of valid again") == 1 and said in error
        assert found["accuracy"] == wanted["accuracy"] and found["confusion"] == wanted["confusion"]
        shutil.rmtree(folder, ignore_errors=True)


def test_the_command_prints_sizes_and_refuses_a_second_one(made, tmp_path):
    encoder, data, states = made
    arguments = [f"data={data}", f"encoder={encoder}", "workers=0"]
    done = run_here("frozen_states.py", "--out", tmp_path / "states", *arguments)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "states") == files(states)
    size = sum(path.stat().st_size for path in (states / SHARDS).glob("*.arrow"))
    totals = read_index(states / SHARDS)["totals"]
    told = sum(total["states"] for total in totals.values()) * 64
    assert told < size < 3 * told  # the tiny files are headers for the greater part
    assert f"states of 80 examples: {told / 1e6:.1f} MB, 64 bytes a piece" in done.stderr
    assert f"train: {totals['train']['states']} states of 40 examples, {totals['train']['in_windows']} examples in" in done.stdout
    code = (
        "import sys, time; from pathlib import Path; from treeproc.common.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "states"], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"1\n"
        done = run_here("frozen_states.py", "--out", tmp_path / "states", *arguments)
        other.kill()
    assert done.returncode == 2 and "another process is writing to" in done.stderr and done.stderr.count("\n") == 1


def test_a_full_disk_is_one_line(made, tmp_path, monkeypatch):
    """It is found before the work. A disk that fills up meanwhile, here with the second file, stops the job."""
    encoder, data, states = made
    out, usage = tmp_path / "states", shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
        with pytest.raises(UserError, match=r"needs 0.\d MB, but its disk has 0.0 MB; free space, or choose another --out"):
            write_states(data, encoder, out, in_this_process=True)
    hashed, left = frozen_states._Hashed.write, [30]

    def write(file, content):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return hashed(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(frozen_states._Hashed, "write", write)
        with pytest.raises(UserError, match=r"cannot write .*arrow: No space left on device; "):
            write_states(data, encoder, out, in_this_process=True)
    names = {path.name for path in (out / SHARDS).iterdir()}
    assert any(name.endswith(".arrow") for name in names) and not any(name.startswith(".tmp-") for name in names)
    write_states(data, encoder, out, in_this_process=True)
    assert files(out) == files(states)
