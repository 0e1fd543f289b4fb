"""Jobs on a real Ray, which starts once for all of them: the bytes of one process, killed, and begun again."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from commands import run_installed_here, tasks_here
from hostile_files import HOSTILE_FORMS, first_record, hostile, make_job, one_line, put, read_table
from moto_store import s3_server
from test_shuffled_trees import data as to_shuffle  # noqa: F401
from test_shuffled_trees import shuffled
from tiny_tokenizers import write_tokenizer
from toydata import write_toy_data
from toyruns import make_config
from waiting import wait_for

from treenet.data.examples import ExampleSource
from treenet.jobs.train_run import run_training
from treeproc.common.files import json_bytes
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import UserError
from treeproc.common.storage import as_path
from treeproc.stages import ray_job, run_jobs, text_stage, text_work
from treeproc.stages.encode import EncodeShard
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages.text_blocks import CheckBlock
from treeproc.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def inputs(tmp_path):
    """The settings of a job over 300 pairs, of which some are equal, some near copies and some empty."""
    folder = tmp_path / "files"
    folder.mkdir()
    pairs = [(f"Line {i % 211} is here, and it is long." if i % 50 else "", f"Zeile {i % 211}") for i in range(300)]
    pairs[7] = ("LINE 9 is here, and it is long", "Zeile")
    for side in (0, 1):
        lines = [pair[side] for pair in pairs]
        (folder / f"train.{side}").write_text("\n".join(lines))
        (folder / f"test.{side}").write_text("\n".join(lines[9:12]) + "\n")
    splits = {split: {"source": [folder / f"{split}.0"], "target": [folder / f"{split}.1"]} for split in ("train", "test")}
    splits["valid"] = {"hold_out": 31}
    filters = {"drop_duplicates": True, "drop_overlap": "example"}
    return {
        "splits": splits, "parser": {"name": "words"}, "filters": filters, "subwords": {"vocab_size": 290}, "rows_per_shard": 40,
    }  # fmt: skip


def contents(out) -> dict[str, bytes]:
    paths = [path for path in out.rglob("*") if path.is_file() and path.name not in (".lock", "provenance.json")]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.fixture
def small_is_large(monkeypatch):
    """Ray reads small files too, in small blocks."""
    monkeypatch.setattr(text_stage, "LEAST_BYTES", 1)
    monkeypatch.setattr(text_work, "LEAST_BLOCK", 1000)
    monkeypatch.setattr(text_work, "MOST_BLOCK", 1000)
    monkeypatch.setattr(run_jobs, "GROUP_ROWS", 80)
    monkeypatch.setattr("treeproc.stages.parse_and_encode.LEAST_SAMPLE", 1)  # of the vocabulary
    monkeypatch.setattr("treeproc.stages.parse_and_encode.LEAST_ROWS", 1)  # of the lengths


@pytest.fixture
def stages(monkeypatch) -> list[str]:
    """Run the tasks of Ray in this process. Returns the workers that have run."""
    return tasks_here(monkeypatch)


def test_on_ray_the_bytes_are_those_of_one_process(inputs, tmp_path, small_is_large, one_core_of_ray, monkeypatch):
    inputs["rows_per_shard"] = 100
    monkeypatch.setattr(text_work, "MOST_BLOCK", 3000)
    preprocess(PreprocessConfig.model_validate(inputs | {"workers": 0}), tmp_path / "here")
    config = PreprocessConfig.model_validate(inputs)
    preprocess(config, tmp_path / "there")
    expected = contents(tmp_path / "here")
    (session,) = read_sessions(tmp_path / "there")
    assert session.did == {"text": 5, "parsed": 5, "encoded": 5} and session.outcome == "finished"
    assert "Ray's workers" in session.cpu_covers and session.cpu_s > 1 and len(session.workers) == 1
    assert contents(tmp_path / "there") == expected and not list((tmp_path / "there").glob(".work-*"))
    assert b"duplicate" in expected["text/dropped.tsv"] and b"overlap" in expected["text/dropped.tsv"]
    # Bad input leaves nothing, whether it is found before any task runs or by one.
    target = inputs["splits"]["train"]["target"][0]
    target.write_bytes(target.read_bytes()[:-10] + b"\xff" + target.read_bytes()[-9:])
    for message in ("not valid UTF-8", "cannot read"):
        with pytest.raises(UserError, match=message):
            preprocess(config, tmp_path / "deep" / "bad")
        assert not (tmp_path / "deep").exists()
        target.unlink(missing_ok=True)


def test_in_tasks_pieces_of_a_pretrained_tokenizer_are_those_of_one_process(tmp_path, small_is_large, stages):
    """The text has accents, emoji, signs without a piece, contractions, other scripts and long words."""
    pytest.importorskip("tokenizers")
    odd = ["a cafe\u0301, naïve 👩\u200d👧", "again\u200b and\u00a0so", "I can't; they've", "東京 at night", "long" * 90]
    lines = [f"{'bad' if number % 3 else 'good'}\tLine {number}: {odd[number % len(odd)]}." for number in range(120)]
    (tmp_path / "text.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = {
        "splits": {"train": {"source": [tmp_path / "text.tsv"]}, "valid": {"hold_out": 20}}, "format": "labelled",
        "subwords": {"tokenizer": write_tokenizer(tmp_path / "encoder", "wordpiece")}, "parser": {"name": "words"},
        "rows_per_shard": 30,
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(values | {"workers": 0}), tmp_path / "here")
    preprocess(PreprocessConfig.model_validate(values), tmp_path / "there")
    assert stages and contents(tmp_path / "there") == contents(tmp_path / "here")


def test_a_whole_job_in_tasks_has_the_bytes_of_one_process(inputs, tmp_path, small_is_large, stages):
    """With the shipped parser, whose models the worker loads."""
    inputs |= {"parser": {"name": "shipped"}, "rows_per_shard": 15}
    for side in ("source", "target"):
        (path,) = inputs["splits"]["train"][side]
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:80]))
    preprocess(PreprocessConfig.model_validate(inputs | {"workers": 0}), tmp_path / "here")
    assert not stages
    config = PreprocessConfig.model_validate(inputs)
    preprocess(config, tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert {"CheckBlock", "GatherKeys", "WriteText", "CountShards", "ParseShard", "EncodeShard", "MeasureShards"} <= set(stages)
    stages.clear()
    preprocess(config, tmp_path / "there")
    assert not stages, "nothing is left to do"
    next((tmp_path / "there" / "text").glob("train-00002-of-*.arrow")).unlink()
    preprocess(config, tmp_path / "there")
    assert "WriteText" in stages and contents(tmp_path / "there") == contents(tmp_path / "here")


def test_inputs_that_not_all_nodes_see_are_read_by_one_process(inputs, tmp_path, small_is_large, monkeypatch, caplog):
    monkeypatch.setattr("treeproc.stages.ray_job.all_nodes_see", lambda inputs: False)
    assert not text_stage.can_run_on_ray(PreprocessConfig.model_validate(inputs))
    assert "put the files on shared storage" in caplog.text


def test_a_node_that_has_just_died_ends_no_job(monkeypatch, caplog, one_core_of_ray):
    """Ray still lists it, and refuses the task that is sent there."""
    ray_job.start_ray()
    gone = {"NodeID": "a" * 56, "Alive": True}
    monkeypatch.setattr(ray_job.ray, "nodes", lambda nodes=ray_job.ray.nodes: [gone, *nodes()])
    assert ray_job._on_all_nodes(lambda value: 2 / value, 4) == [0.5]
    assert "node aaaaaaaa of the cluster does not answer" in caplog.text
    with pytest.raises(ZeroDivisionError):  # errors of the function stay
        ray_job._on_all_nodes(lambda value: 2 / value, 0)


def test_a_node_that_hangs_is_named(monkeypatch, one_core_of_ray):
    ray_job.start_ray()
    (here,) = ray.nodes()
    other = {"NodeID": "a" * 56, "Alive": True}
    monkeypatch.setattr(ray_job.ray, "nodes", lambda: [here, other])
    monkeypatch.setattr(ray_job, "_ANSWER_S", 0.5)
    monkeypatch.setenv("TREE_ATTENTION_STORE_RETRY_S", "0")
    with pytest.raises(UserError, match=f"node {here['NodeManagerAddress']} lives, but does not answer; its storage may hang"):
        ray_job._on_all_nodes(lambda seconds: time.sleep(seconds), 5)


def test_a_ray_of_one_command_has_no_processes_for_clusters(one_core_of_ray):
    ray_job.start_ray()
    assert ray._private.worker._global_node.all_processes.keys() <= {"gcs_server", "raylet", "reaper"}


def test_a_result_keeps_the_number_of_its_job_in_whatever_order_it_comes(tmp_path, monkeypatch, one_core_of_ray):
    class Double:
        def __call__(self, value: int) -> int:
            return 2 * value

    first_first = ray.data.Dataset.iter_rows
    monkeypatch.setattr(ray.data.Dataset, "iter_rows", lambda rows: reversed([*first_first(rows)]))
    jobs = [{"value": value} for value in range(7, 11)]
    assert list(ray_job.run_on_ray(Double, {}, jobs, folder=tmp_path, in_tasks=True)) == [(3, 20), (2, 18), (1, 16), (0, 14)]


def test_inputs_that_did_not_change_are_not_read_again(inputs, tmp_path, monkeypatch):
    config, out, reads = PreprocessConfig.model_validate(inputs | {"workers": 0}), tmp_path / "out", []
    preprocess(config, out)
    before, check = contents(out), CheckBlock.__call__
    monkeypatch.setattr(CheckBlock, "__call__", lambda self, range: reads.append(range["split"]) or check(self, range))
    preprocess(config, out)
    assert contents(out) == before and not reads
    source = inputs["splits"]["train"]["source"][0]
    os.utime(source)  # the same content at another time is read, and from then on recognised
    preprocess(config, out)
    preprocess(config, out)
    assert reads == ["train", "test", "valid"]
    assert {name for name, content in contents(out).items() if before[name] != content} == {"text/inputs.json"}
    # What is damaged is mended from inputs that are read again.
    for name, content in (("train-00001-of-00008.arrow", b"cut"), ("dropped.tsv", b""), ("inputs.json", b"{}")):
        (out / "text" / name).write_bytes(content)
        preprocess(config, out)
        assert {k: v for k, v in contents(out).items() if k != "text/inputs.json"} == {
            k: v for k, v in before.items() if k != "text/inputs.json"
        }
    assert len(reads) == 4 * 3
    changed = source.read_text().replace("Line 3 ", "Line 4 ")
    source.write_text(changed)
    with pytest.raises(UserError, match="the text of train(, valid)? differs from the text of"):
        preprocess(config, out)


def test_the_old_stage_of_a_data_set_without_a_note_is_kept(inputs, tmp_path):
    config, out = PreprocessConfig.model_validate(inputs | {"workers": 0}), tmp_path / "out"
    preprocess(config, out)
    before = contents(out)
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.arrow") if path.name != "lengths.arrow"}
    (out / "text" / "inputs.json").unlink()
    preprocess(config, out)
    assert contents(out) == before and all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_verify_finds_the_same_in_the_same_order_in_processes_and_in_tasks(tmp_path, monkeypatch, stages):
    """Damage in the first shards of all stages, rows that are wrong though their hash is right, and lines in the wrong order."""
    for side in ("en", "de"):
        (tmp_path / side).write_text("".join(f"The cat number {i} sees a dog .\n" for i in range(24)))
    values = {
        "splits": {"train": {"source": [tmp_path / "en"], "target": [tmp_path / "de"]}}, "parser": {"name": "words"},
        "subwords": {"vocab_size": 300}, "rows_per_shard": 4, "workers": 0,
    }  # fmt: skip
    data = tmp_path / "data"
    preprocess(PreprocessConfig.model_validate(values), data)
    for stage in ("text", "parsed", "encoded"):
        flipped, cut, missing, swapped = sorted((data / stage).glob("train-*.arrow"))[:4]
        flipped.write_bytes(flipped.read_bytes()[:-9] + b"?" + flipped.read_bytes()[-8:])
        cut.write_bytes(cut.read_bytes()[:-100])
        missing.unlink()
        index = json.loads((data / stage / "index.json").read_bytes())
        later = index["shards"][5]
        record = index["shards"][3] | {name: later[name] for name in ("rows", "bytes", "sha256")}
        swapped.write_bytes((data / stage / later["name"]).read_bytes())
        swapped.with_suffix(".json").write_bytes(json_bytes(record))
        index["shards"][3] = record
        (data / stage / "index.json").write_bytes(json_bytes(index))
    here = [str(problem) for problem in verify(data).problems]
    assert sum("example_id does not rise" in one for one in here) == 3 and len(here) == 12
    monkeypatch.setattr("treeproc.verify._FEW_ROWS", 0)
    assert [str(problem) for problem in verify(data).problems] == here
    run = run_installed_here("verify", data, "--ray")
    assert run.returncode == 2 and run.stdout.splitlines()[:-1] == here and stages == ["ShardVerifier"], run.stderr


def test_in_tasks_shuffled_trees_have_the_same_bytes(to_shuffle, tmp_path, stages):  # noqa: F811
    shuffled(to_shuffle, tmp_path / "here")
    shuffled(to_shuffle, tmp_path / "ray", workers=None)
    assert "EncodeShard" in stages
    for path in sorted((tmp_path / "here" / "encoded").glob("*.arrow")):
        assert path.read_bytes() == (tmp_path / "ray" / "encoded" / path.name).read_bytes()


def test_more_workers_than_cores_are_refused(tmp_path, one_core_of_ray):
    config = make_config(write_toy_data(tmp_path / "data"), "workers=1000")
    with pytest.raises(UserError, match="workers = 1000 need as many CPUs, but Ray on this machine has 1; lower workers"):
        run_training(config, tmp_path / "run")


def test_no_actor_of_ray_runs_the_pickles_of_a_shard(tmp_path, one_core_of_ray, monkeypatch):
    """The encode stage, as preprocess.py runs it."""
    form = HOSTILE_FORMS[0]  # readers know no other way for the others
    data, marker = make_job(tmp_path), tmp_path / "marker"
    text, parsed = first_record(data / "text"), first_record(data / "parsed")
    put(data / "parsed", parsed.name, hostile(read_table(data / "parsed" / parsed.name), "parse_status", form, marker))
    jobs = [{"text": text, "parsed": first_record(data / "parsed"), "fingerprint": "x"}]
    arguments = {"data": data, "tree": TreeConfig(tree_source="balanced"), "base": None}
    with pytest.raises(UserError) as error:
        list(ray_job.run_on_ray(EncodeShard, arguments, jobs, folder=data / "encoded"))
    message = "column parse_status must be string, but is the extension type ray.data.arrow_pickled_object"
    one_line(error.value, parsed.name, message)
    (data / "encoded" / "index.json").unlink()  # which was made of another parsed stage
    with monkeypatch.context() as patch, pytest.raises(UserError, match="column parse_status must be string"):
        tasks_here(patch)
        preprocess(PreprocessConfig(parsed=data, tree=TreeConfig(tree_source="left")), tmp_path / "other")
    assert not marker.exists()


def test_no_worker_of_ray_runs_the_pickles_of_a_shard(tmp_path, one_core_of_ray, own_workers):
    """The reader of training, in a process that Ray starts as it does for users."""
    marker = tmp_path / "marker"

    def read_in_worker(folder: Path) -> str:
        import ray.data  # noqa: F401

        try:
            ExampleSource(folder, "train")
        except UserError as error:
            return str(error)

    encoded = make_job(tmp_path) / "encoded"
    name = first_record(encoded).name
    put(encoded, name, hostile(read_table(encoded / name), "leaves", HOSTILE_FORMS[0], marker))
    ray_job.start_ray()
    one_line(ray.get(ray.remote(num_cpus=0)(read_in_worker).remote(encoded)), "column leaves must be", "extension type")
    assert not marker.exists()


LARGE = """
import json, sys
from pathlib import Path
from treeproc.common.storage import as_path
from treeproc.stages import text_stage, text_work
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages import run_jobs
if __name__ == "__main__":
    text_stage.LEAST_BYTES, text_work.LEAST_BLOCK, text_work.MOST_BLOCK, run_jobs.GROUP_ROWS = 1, 1000, 1000, 80
    preprocess(PreprocessConfig.model_validate(json.loads(Path(sys.argv[1]).read_text())), as_path(sys.argv[2]))
"""


@pytest.mark.cluster
@pytest.mark.parametrize("moment", [".work-*/block-*.json", ".work-*/*.gathered", "text/train-*.json"])
def test_a_killed_text_stage_goes_on_to_the_same_bytes(inputs, tmp_path, moment, small_is_large):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    preprocess(PreprocessConfig.model_validate(inputs | {"workers": 0}), whole)
    (tmp_path / "settings").write_text(json.dumps(inputs, default=str))
    command = [sys.executable, "-c", LARGE, str(tmp_path / "settings"), str(out)]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_for(lambda: list(out.glob(moment)), job, 120, tmp_path / "log", pause=0.005)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert not (out / "text" / "index.json").exists()
    done = {path: path.stat().st_mtime_ns for path in out.glob("text/*.json")}
    preprocess(PreprocessConfig.model_validate(inputs), out)
    assert contents(out) == contents(whole)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items()), "a finished shard was done again"


def workers_of(pid: int, name: str = "Map(") -> list[int]:
    """The processes below a process that are at work on one of Ray's tasks, or on one whose name begins so."""
    parents, workers = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                workers.add(int(folder.name))

    def is_below(child: int) -> bool:
        return child == pid or (child in parents and is_below(parents[child]))

    return [worker for worker in workers if is_below(worker)]


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_text_stage_in_an_object_store_goes_on_after_kills(inputs, tmp_path):
    """Inputs and data set are objects of an S3 server. The driver is killed, then a process of the next job that runs a task."""
    with s3_server(tmp_path) as uri:
        out = as_path(uri) / "data"
        for side, packed in (("source", True), ("target", False)):
            path = inputs["splits"]["train"][side][0]
            place, content = as_path(uri) / f"train.{side}{'.gz' * packed}", path.read_bytes()
            place.write_bytes(gzip.compress(content) if packed else content)
            inputs["splits"]["train"][side] = [str(place)]
        preprocess(PreprocessConfig.model_validate(inputs | {"workers": 0}), tmp_path / "whole")
        (tmp_path / "settings").write_text(json.dumps(inputs, default=str))

        def start(log: str) -> subprocess.Popen:
            command = [sys.executable, "-c", LARGE, str(tmp_path / "settings"), str(out)]
            with open(tmp_path / log, "w") as file:
                return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

        job = start("first")
        marks_there = lambda: [mark for folder in out.folders() for mark in folder.glob("block-*.json")]  # noqa: E731
        marks = wait_for(marks_there, job, log=tmp_path / "first")
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        assert marks[0].parent.name.startswith(".work-") and not list((out / "text").glob("*.arrow"))
        job = start("second")
        os.kill(wait_for(lambda: workers_of(job.pid), job, log=tmp_path / "second")[0], signal.SIGKILL)
        assert job.wait(250) == 0, (tmp_path / "second").read_text()
        expected = contents(tmp_path / "whole")
        found = {name: (out / name).read_bytes() for name in out.objects() if name != "provenance.json"}
        for files in (expected, found):
            files.pop("text/inputs.json", None)  # only inputs that did not change just now are noted
        assert found == expected
