"""Runs in an object store: killed here, continued on another machine, read by every command; a real S3 server on loopback."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import Started, main_of
from moto_store import SECRET, s3_server
from safetensors.torch import load_file
from toyruns import losses, same
from training_jobs import tiny_config
from waiting import wait_for

from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.jobs.train_run import run_training
from treenet.report.report_inputs import read_report_inputs
from treenet.runs.averaging import average_checkpoints
from treenet.runs.checkpoint import checkpoint_folders, is_complete, latest_checkpoint
from treenet.runs.identity import check_metrics, find_other_metrics
from treenet.runs.metrics_log import read_metrics
from treenet.runs.mirror import STOP_FILE, mirror_of, read_run
from treenet.runs.result_provenance import LAST, RunState
from treenet.runs.run_folder import recorded_sha256
from treenet.runs.run_results import read_system, warn_of_stale_results, write_result
from treenet.tasks.base import build_task
from treenet.training.trainer import train
from treeproc.common.cache import cache_folder
from treeproc.common.files import json_bytes, read_json
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import RemotePath, as_path
from treeproc.shards.shard import check_hashes

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS = 30


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as uri:
        yield as_path(uri)


@pytest.fixture(autouse=True)
def another_machine(tmp_path, monkeypatch):
    """Every test has a disk of its own."""
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "disk"))
    monkeypatch.setattr("treenet.runs.mirror.POLL_S", 0.05)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> list[tuple[int, float]]:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    train(build_task(tiny_config(data, f"max_steps={STEPS}")), run_dir)
    return losses(run_dir)


def steps_there(run: RemotePath) -> list[str]:
    names = (run / "checkpoints").objects()
    return sorted({name.split("/")[0] for name in names if name.endswith("/meta.json")})


def workflow(repository: Path, name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(repository / "workflows" / name), *map(str, arguments)]


@pytest.fixture(scope="module")
def finished(bucket, data, tmp_path_factory):
    """A run of two checkpoints in the store."""
    out = bucket / "finished"
    run_training(tiny_config(data, "max_steps=10"), out)
    return out


def test_killed_on_one_machine_and_finished_on_another(bucket, data, undisturbed, tmp_path, monkeypatch):
    out, config = bucket / "killed", tmp_path / "config.yaml"
    config.write_text(dump_settings(tiny_config(data, "max_steps=20000", "checkpoint_every=10", "keep_checkpoints=3")))
    first = Started(tmp_path / "log", "train_wmt.py", "--config", config, "--out", out)
    wait_for(lambda: steps_there(out), first, 100, tmp_path / "log")
    first.kill()
    first.join()
    assert SECRET not in (tmp_path / "log").read_text()
    step = int(steps_there(out)[-1].removeprefix("step_"))

    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "second disk"))
    summary = run_training(tiny_config(data, f"max_steps={step + 20}", "checkpoint_every=10", "keep_checkpoints=3"), out)
    assert summary.finished and summary.run_dir == out and summary.averaged == out / "averaged"
    assert steps_there(out) == [f"step_{number:08d}" for number in (step, step + 10, step + 20) if number]
    found = losses(out)
    assert [number for number, _ in found] == list(range(1, step + 21))
    assert found[:STEPS] == undisturbed[: len(found)]
    names = set(out.objects())
    assert {".kind", "config.yaml", "run.json", "metrics.jsonl", "averaged/meta.json", "averaged/model.safetensors"} <= names
    assert not any(name.startswith(("ray/", ".", STOP_FILE)) or "/.tmp-" in name for name in names - {".kind"})
    assert not any(SECRET.encode() in (out / name).read_bytes() for name in names)


def test_an_incomplete_upload_is_not_loaded(bucket, data, undisturbed, tmp_path):
    """The last checkpoint has no meta.json, the one before is cut off: the first of three is the one to continue from."""
    out = bucket / "cut-off"
    run_training(tiny_config(data, "max_steps=15"), out)
    assert steps_there(out) == ["step_00000005", "step_00000010", "step_00000015"]
    (out / "checkpoints" / "step_00000015" / "meta.json").unlink()
    weights = out / "checkpoints" / "step_00000010" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.rmtree(tmp_path / "disk")
    mirror = mirror_of(out)
    mirror.pull()
    assert [path.name for path in checkpoint_folders(mirror.folder)] == ["step_00000005", "step_00000010"]
    assert latest_checkpoint(mirror.folder).name == "step_00000005"
    assert steps_there(out) == ["step_00000005", "step_00000010"]
    assert run_training(tiny_config(data, f"max_steps={STEPS}"), out).finished
    assert losses(out) == undisturbed
    shutil.rmtree(tmp_path / "disk")
    mirror.pull()
    assert all(map(is_complete, checkpoint_folders(mirror.folder))) and len(checkpoint_folders(mirror.folder)) == 6


def test_a_local_copy_of_a_run_that_was_removed_from_the_store_does_not_count(bucket, data):
    out = bucket / "removed"
    run_training(tiny_config(data, "max_steps=5"), out)
    for name in out.objects():
        (out / name).unlink()
    run_training(tiny_config(data, "max_steps=5", "seed=2"), out)
    assert steps_there(out) == ["step_00000005"]


def test_other_settings_and_a_second_writer_are_refused(finished, data):
    with pytest.raises(UserError, match="seed: 1 -> 2"):
        run_training(tiny_config(data, "max_steps=10", "seed=2"), finished)
    from treeproc.common.files import locked

    with locked(finished), pytest.raises(UserError, match="another process is writing to s3://bucket/finished"):
        run_training(tiny_config(data, "max_steps=10"), finished)


def test_every_command_reads_the_run(finished, repository, capsys):
    def run(name: str, *arguments: object) -> str:
        main_of(name)([*map(str, arguments)])
        return capsys.readouterr().out

    with read_run(finished, "averaged") as folder:
        assert is_complete(folder / "averaged") and not (folder / "checkpoints").exists()
    assert "mean of the last checkpoints, steps 10" in run("average_checkpoints.py", "--out", finished, "last=1")
    assert "s3://bucket/finished/translations.test.txt" in run("evaluate.py", "--out", finished)
    run("evaluate.py", "--out", finished, "checkpoint=5")
    assert {"scores.json", "translations.test.txt", "translations.test.step_00000005.txt"} <= set(finished.objects())
    assert steps_there(finished) == ["step_00000005", "step_00000010"]
    with pytest.raises(UserError, match=r"step_00000007 is missing.*step_00000005"):
        run("evaluate.py", "--out", finished, "checkpoint=7")


def test_an_error_names_the_run_in_the_store(finished):
    weights = finished / "averaged" / "model.safetensors"
    own = weights.read_bytes()
    weights.write_bytes(own[:-1])
    with pytest.raises(UserError, match=f"^{finished}/averaged is damaged .* average-checkpoints --out {finished}, or"):
        main_of("evaluate.py")(["--out", str(finished)])
    weights.write_bytes(own)


def test_results_in_the_store_are_judged_by_the_weights_there(finished, capsys):
    for count in (1, 2):
        with read_run(finished, "checkpoints/*") as run:
            average_checkpoints(run, "last", count)
        if count == 1:
            with read_run(finished, "averaged") as run:
                evaluate_run(run, EvaluateSettings())
            warn_of_stale_results(finished)
            assert not capsys.readouterr().err
    warn_of_stale_results(finished)
    command = f"tree-attention evaluate --out {finished} split=test"
    message = capsys.readouterr().err
    assert f"{finished}/scores.json, test is stale: the run has changed since then (weights " in message and message.endswith(
        f": {command}\n"
    )
    with read_run(finished) as run:  # without the weights
        status = read_system(run, "test", finished).status
    assert status.changed.startswith("weights ") and status.command == command


def test_log_last_checkpoint_and_updates_are_those_in_the_store(finished):
    assert checkpoint_folders(finished) == [finished / "checkpoints" / name for name in ("step_00000005", "step_00000010")]
    assert RunState(finished).weights_sha256(LAST) == recorded_sha256(finished / "checkpoints" / "step_00000010")
    (read,) = read_report_inputs([str(finished)], "test").runs
    assert read.step == 10 and not any("metrics.jsonl" in one.said for one in read.missing)
    check_metrics(finished, "restore it")
    other = [line | {"nll": 0.5} if line["event"] == "valid" else line for line in read_metrics(finished)]
    assert find_other_metrics(finished, other) == 10


def test_foreign_pieces_of_a_data_set_in_a_store_are_not_read(bucket, data):
    there = bucket / "mixed" / "encoded"
    for path in (path for path in (data / "encoded").rglob("*") if path.is_file()):
        (there / path.relative_to(data / "encoded").as_posix()).write_bytes(path.read_bytes())
    pieces = there / "vocab" / "pieces.model"
    own = pieces.read_bytes()
    files = {"vocab/pieces.model": hashlib.sha256(own).hexdigest()}  # which toy data lack
    index = read_json(data / "encoded" / "index.json") | {"files": files}
    (there / "index.json").write_bytes(json.dumps(index).encode())
    pieces.write_bytes(own[::-1])
    with pytest.raises(UserError, match=r"pieces.model is damaged: its hash is not the one in index.json"):
        check_hashes(there, "train")
    pieces.write_bytes(own)
    check_hashes(there, "train")


def add_result(run: Path, name: str) -> None:
    """Write a result as `evaluate` does."""
    write_result(run, name, ["a"], ["a"], {"split": name, "bleu": 1.0})


def test_results_that_two_machines_add_at_a_time_are_all_in_the_store(finished, tmp_path, monkeypatch):
    out = finished.parent / "two"
    for name in finished.objects():
        (out / name).write_bytes((finished / name).read_bytes())
    with read_run(out) as here:
        monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "of another machine"))
        with read_run(out) as there:
            assert here != there
            add_result(there, "valid")
        add_result(here, "other")
    assert {"valid", "other"} <= json.loads((out / "scores.json").read_bytes()).keys()
    assert {"translations.valid.txt", "translations.other.txt"} <= out.objects().keys()


def test_a_file_that_is_replaced_while_it_is_uploaded_is_uploaded_again(finished, monkeypatch):
    mirror = mirror_of(finished)
    mirror.pull()
    path = mirror.folder / "provenance.json"
    path.write_text("old")

    def open_and_replace(file, mode):
        opened = open(file, mode)
        if file == path:
            new = path.with_name("new")
            new.write_text("new")
            new.replace(path)
        return opened

    monkeypatch.setattr("treenet.runs.mirror.open", open_and_replace, raising=False)
    before = (finished / "provenance.json").read_bytes()
    mirror.push()
    monkeypatch.undo()
    mirror.push()
    assert (finished / "provenance.json").read_bytes() == b"new"
    path.write_bytes(before)
    mirror.push()


def test_results_that_a_killed_command_left_or_that_were_removed_in_the_store_are_not_read(finished):
    out = finished.parent / "left"
    for name in finished.objects():
        if not name.startswith(("scores", "translations", "nll")):
            (out / name).write_bytes((finished / name).read_bytes())
    mirror = mirror_of(out, only=())
    mirror.pull()
    add_result(mirror.folder, "killed")  # and no push
    with read_run(out) as run:
        assert not (run / "scores.json").exists() and not (run / "translations.killed.txt").exists()
        add_result(run, "first")
        with read_run(out) as other:
            assert (other / "scores.json").exists(), "another command on this machine has not uploaded it yet"
    assert json.loads((out / "scores.json").read_bytes()).keys() == {"first"}
    with read_run(out) as run:  # now the store has a file of results
        add_result(run, "second")
        (out / "metrics.jsonl").write_bytes(b"{}\n")
        with read_run(out) as other:
            assert json.loads((other / "scores.json").read_bytes()).keys() == {"first", "second"}
            assert (other / "metrics.jsonl").read_bytes() == b"{}\n", "the training of another machine goes on"
        add_result(run, "third")
    with read_run(out):  # another machine adds a result while this one has written none
        there = json.loads((out / "scores.json").read_bytes())
        (out / "scores.json").write_bytes(json_bytes(there | {"elsewhere": there["first"]}))
        with read_run(out) as other:
            assert "elsewhere" in json.loads((other / "scores.json").read_bytes())
    (out / "scores.json").write_bytes(json_bytes(there))
    assert json.loads((out / "scores.json").read_bytes()).keys() == {"first", "second", "third"}
    for name in ("scores.json", "translations.first.txt"):
        (out / name).unlink()
    with read_run(out) as run:
        assert not (run / "scores.json").exists()


def test_a_search_for_trees_that_was_killed_continues_from_its_file(finished):
    """The store has no file of it, or a shorter one; then a longer one, of another machine."""
    out = finished.parent / "searched"
    for name in ("config.yaml", "run.json"):
        (out / name).write_bytes((finished / name).read_bytes())
    mirror = mirror_of(out, only=())
    mirror.pull()
    name = "tree_beam.0123456789abcdef.jsonl"
    (mirror.folder / name).write_text("[0]\n[1]\n")  # and no push
    for there, wanted in ((None, "[0]\n[1]\n"), ("[0]\n", "[0]\n[1]\n"), ("[0]\n[1]\n[2]\n", "[0]\n[1]\n[2]\n")):
        if there:
            (out / name).write_bytes(there.encode())
        mirror.pull()
        assert (mirror.folder / name).read_text() == wanted
    (mirror.folder / name).unlink()  # the search is complete
    mirror.push()
    assert name not in out.objects()


def test_asked_to_stop_through_the_store(bucket, data):
    out, outcome = bucket / "stopped", []
    config_of_checkpoints = ("checkpoint_every=10", "keep_checkpoints=5")
    config = tiny_config(data, "max_steps=100000", *config_of_checkpoints)
    training = threading.Thread(target=lambda: outcome.append(run_training(config, out)))
    training.start()
    while not steps_there(out):
        time.sleep(0.02)
    mirror_of(out).ask_to_stop()
    training.join(timeout=60)
    assert not outcome[0].finished and steps_there(out)[-1] == f"step_{outcome[0].step:08d}"
    assert (out / STOP_FILE).exists()
    assert run_training(tiny_config(data, f"max_steps={outcome[0].step + 5}", *config_of_checkpoints), out).finished, "only once"


def test_training_goes_on_while_the_store_is_away_and_uploads_later(bucket, data, monkeypatch, capsys):
    out, write, refused = bucket / "away", RemotePath.write_bytes, []

    def refuse_at_first(path, content):
        if "step_" in str(path) and len(refused) < 3:
            refused.append(str(path))
            raise UserError(f"{path}: the object store refuses")
        write(path, content)

    monkeypatch.setattr(RemotePath, "write_bytes", refuse_at_first)
    run_training(tiny_config(data, "max_steps=24", "checkpoint_every=4"), out)
    assert len(refused) == 3 and "training goes on" in capsys.readouterr().err
    assert len(steps_there(out)) == 6
    monkeypatch.setattr(RemotePath, "write_bytes", lambda path, content: (_ for _ in ()).throw(UserError(f"{path}: refused")))
    with pytest.raises(UserError, match="refused"):
        run_training(tiny_config(data, "max_steps=28", "checkpoint_every=4"), out)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_ray_workers_write_to_the_store(bucket, data, tmp_path, repository):
    """Two workers; the driver's folder is rank 0's here, but nothing relies on that but speed."""
    out, config = bucket / "ray", tmp_path / "config.yaml"
    config.write_text(dump_settings(tiny_config(data, "workers=2", "max_steps=30", "checkpoint_every=10", "keep_checkpoints=5")))
    command = workflow(repository, "train_wmt.py", "--config", config, "--out", out)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert steps_there(out) == ["step_00000010", "step_00000020", "step_00000030"]
    assert len(losses(out)) == 30 and "averaged/meta.json" in out.objects()
    assert not any(name.startswith("ray/") for name in out.objects())
    (session,) = read_sessions(out)
    assert session.did == {"from update": 0, "to update": 30} and session.outcome == "finished"
    assert "Ray's workers" in session.cpu_covers and len(session.workers) == 1 and session.cpu_s > 1
    assert SECRET not in done.stdout + done.stderr and ".cc:" not in done.stderr
    assert cache_folder().is_dir()


def test_a_run_in_the_store_starts_from_another_one_there(bucket, data, finished):
    """The initial weights are in the store too: another machine scores them."""
    config = tiny_config(data, f"init={finished}", "max_steps=5", "checkpoint_every=5", "average_checkpoints=1")
    run_training(config, bucket / "tuned")
    place = mirror_of(bucket / "tuned")
    with read_run(bucket / "tuned", "averaged") as run:
        assert run != place.folder
        first = load_file(run / "initial" / "model.safetensors")
    with read_run(finished, "averaged") as run:
        expected = load_file(run / "averaged" / "model.safetensors")
    assert same(first, expected)
    assert json.loads((bucket / "tuned" / "run.json").read_bytes())["init"]["new"] == 0


def test_uploads_are_in_an_order_that_a_kill_may_cut(bucket, data, finished, monkeypatch):
    """The first weights come before the checkpoints. Of a folder, the old meta.json goes first, and the new one comes last."""
    out, order, write, remove = bucket / "order", [], RemotePath.write_file, RemotePath.unlink

    def note(path, file):
        order.append(str(path).removeprefix(f"{out}/"))
        return write(path, file)

    def note_removal(path, **options):
        order.append(f"- {str(path).removeprefix(f'{out}/')}")
        return remove(path, **options)

    monkeypatch.setattr(RemotePath, "write_file", note)
    monkeypatch.setattr(RemotePath, "unlink", note_removal)
    monkeypatch.setattr("treenet.runs.mirror.POLL_S", 1000)
    run_training(tiny_config(data, f"init={finished}", "max_steps=5", "checkpoint_every=5", "average_checkpoints=1"), out)
    metas = [name for name in order if name.endswith("/meta.json") and not name.startswith("-")]
    assert metas[0] == "initial/meta.json" and {"averaged/meta.json", "checkpoints/step_00000005/meta.json"} < set(metas)
    for meta in metas:
        files = [place for place, name in enumerate(order) if name.startswith(meta.removesuffix("meta.json")) and name != meta]
        assert files and order.index(f"- {meta}") < min(files) and max(files) < order.index(meta)
