"""Provenance: records of the software, machine and time of runs and data sets."""

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from training_jobs import tiny_config

from treenet.experiments.records import _read_training
from treenet.jobs.train_run import run_training
from treeproc.common.provenance import PROVENANCE, Meter, Session, describe_sessions, packages, read_sessions, recorded, software
from treeproc.common.settings import UserError
from treeproc.inspect import describe

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    """A run of ten updates that was continued to 15, and then asked for again."""
    out = tmp_path_factory.mktemp("run") / "run"
    for steps in (10, 15, 15):
        run_training(tiny_config(data, f"max_steps={steps}"), out)
    return out


def test_a_continued_run_keeps_its_sessions_and_one_without_work_adds_none(run):
    sessions = read_sessions(run)
    assert [session.did for session in sessions] == [{"from update": 0, "to update": 10}, {"from update": 10, "to update": 15}]
    for session in sessions:
        assert (session.command, session.outcome) == ("train", "finished")
        assert session.software == software() and session.packages == packages()
        assert session.packages["python"] == platform.python_version() and session.packages["torch"] == version("torch")
        assert session.machine["processor"] and session.machine["cores"] >= 1 and session.machine["gpu"] is None
        assert session.wall_s > 0 and session.cpu_s > 0 and session.workers == []


def test_a_processor_has_its_generation_beside_its_name():
    found = re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)\nmodel name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    if found is None:
        pytest.skip("this processor says no family")
    family, model, name = found.groups()
    assert Meter.machine()["processor"] == f"{name} (family {family}, model {model})"


def test_no_name_and_no_place_is_recorded(run):
    content = (run / PROVENANCE).read_text()
    assert platform.node() not in content and str(run) not in content and str(REPOSITORY) not in content
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', content)
    user = re.compile(rf"(?<!\w){re.escape(getpass.getuser())}(?!\w)")
    assert strings and not any(map(user.search, strings))


def test_versions_are_read_without_loading_the_libraries():
    code = (
        "import sys; from treeproc.common.provenance import Meter, packages, software; packages(); software(); Meter().usage(); "
        "sys.exit(bool({'torch', 'ray', 'stanza', 'sentencepiece', 'sacrebleu'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_the_time_of_the_first_update_is_that_of_the_first_start(data, tmp_path, monkeypatch):
    for steps, time in ((10, "2026-01-01T00:00:00Z"), (15, "2026-01-02T00:00:00Z")):
        monkeypatch.setattr("treenet.training.trainer.now", lambda time=time: time)
        run_training(tiny_config(data, f"max_steps={steps}"), tmp_path / "run")
        training = _read_training(tmp_path / "run")
        assert (training["updates"], training["first_update"]) == (steps, "2026-01-01T00:00:00Z")


def test_a_killed_session_stays_as_it_was_noted(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from treeproc.common.provenance import recorded\n"
        "with recorded(Path(sys.argv[1]), 'preprocess') as record:\n"
        "    record.note(text=3)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY).returncode == -9
    with recorded(tmp_path, "preprocess") as record:
        record.note(parsed=3)
    killed, last = read_sessions(tmp_path)
    assert (killed.outcome, killed.did) == ("unfinished", {"text": 3})
    assert (last.outcome, last.did) == ("finished", {"parsed": 3})


def test_many_shards_are_few_writes(tmp_path, monkeypatch):
    with recorded(tmp_path, "preprocess") as record:
        record.note(parsed=0)
        for number in range(1, 1001):
            record.keep_up(parsed=number)
        assert read_sessions(tmp_path)[0].did == {"parsed": 0}
        monkeypatch.setattr("treeproc.common.provenance.NOTE_S", 0.0)
        record.keep_up(parsed=1001)
        assert read_sessions(tmp_path)[0].did == {"parsed": 1001}


@pytest.mark.parametrize(("error", "outcome"), [(UserError("full"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_an_error_is_an_outcome_and_goes_on(tmp_path, error, outcome):
    with pytest.raises(type(error)), recorded(tmp_path, "train") as record:
        record.note()
        raise error
    assert read_sessions(tmp_path)[0].outcome == outcome and "full" not in (tmp_path / PROVENANCE).read_text()


def test_other_processes_are_counted(tmp_path):
    with recorded(tmp_path, "train") as record:
        for _ in range(2):
            record.session.add_worker(
                {"cpu_s": 1000.0, "machine": {"processor": "P", "cores": 8, "gpu": "G"}, "packages": packages()}
            )
        record.session.add_worker(Meter().usage() | {"cpu_s": 1000.0})
        record.note()
    (session,) = read_sessions(tmp_path)
    assert 3000 <= session.cpu_s < 3010 and "Ray's workers" in session.cpu_covers
    assert session.workers == [{"processor": "P", "cores": 8, "gpu": "G"}, Meter.machine()]
    assert describe_sessions([session])[2].endswith("; workers on P, 8 cores, G")


def test_workers_tell_their_own_packages(run, tmp_path):
    """The head of a cluster has PyTorch for CPUs, and the nodes that train have it with CUDA."""
    shutil.copytree(run, tmp_path / "run")
    gpu = {"processor": "P", "cores": 8, "gpu": "G"}
    with recorded(tmp_path / "run", "train") as record:
        record.session.add_worker({"cpu_s": 1.0, "machine": gpu, "packages": packages() | {"torch": "2.9.0+cu128"}})
        record.note()
    session = read_sessions(tmp_path / "run")[-1]
    assert session.packages == packages() and session.packages_at_work() == [packages() | {"torch": "2.9.0+cu128"}]
    assert session.machines() == [gpu]
    assert describe_sessions([session])[2].endswith("; workers on P, 8 cores, G, torch 2.9.0+cu128")
    found = _read_training(tmp_path / "run")
    assert found["machines"] == [gpu] and found["packages"] == [packages() | {"torch": "2.9.0+cu128"}]


DAMAGED = {
    "cut": b'{"sessions": [{"comm',
    "no JSON": b"\xff\xfe",
    "a list": b"[]",
    "too deep": b"[" * 100_000,
    "wrong types": b'{"sessions": [{"command": 3}]}',
    "empty": b"",
    "escapes": json.dumps(
        {"sessions": [{"command": "\x1b[2J", "software": {}, "packages": {}, "machine": {}, "started": ""}]}
    ).encode(),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_stops_nothing_and_is_kept(tmp_path, capsys, content):
    path = tmp_path / PROVENANCE
    for number in (1, 2):
        path.write_bytes(content)
        assert read_sessions(tmp_path) == []
        with recorded(tmp_path, "train") as record:
            record.note()
        message = capsys.readouterr().err
        assert message.startswith(f"warning: {path} is damaged (") and message.count("\n") == 1
        assert (tmp_path / f"provenance.damaged-{number}.json").read_bytes() == content
        assert len(read_sessions(tmp_path)) == 1


def test_folders_pipes_and_links_in_the_place_of_the_record_are_set_aside(tmp_path):
    path = tmp_path / PROVENANCE
    for number, make in enumerate((Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")), start=1):
        make(path)
        assert read_sessions(tmp_path) == []
        with recorded(tmp_path, "train") as record:
            record.note()
        assert len(read_sessions(tmp_path)) == 1 and path.is_file() and not path.is_symlink()
        assert not (tmp_path / f"provenance.damaged-{number}.json").is_file()
        path.unlink()


def test_keys_of_a_later_version_are_kept(tmp_path):
    with recorded(tmp_path, "train") as record:
        record.note()
    content = json.loads((tmp_path / PROVENANCE).read_text())
    content["sessions"][0]["energy_kwh"] = 7
    (tmp_path / PROVENANCE).write_text(json.dumps(content))
    with recorded(tmp_path, "train") as record:
        record.note()
    assert [session.get("energy_kwh") for session in json.loads((tmp_path / PROVENANCE).read_text())["sessions"]] == [7, None]


def test_sessions_as_a_person_reads_them(data, tmp_path):
    assert "made by:\n  without provenance\n" in describe(data)[0]
    session = Session(
        command="preprocess",
        software={"version": "1.0", "commit": "0123456789abcdef", "clean": False},
        packages={"python": "3.12.1", "ray": None},
        machine={"processor": "Some CPU", "cores": 4, "gpu": None},
        started="2026-01-02T03:04:05Z",
        wall_s=75.2,
        cpu_s=140.0,
        did={"text": 3, "parsed": 1200},
        outcome="finished",
    )
    again = session.model_copy(update={"outcome": "unfinished", "wall_s": None, "cpu_s": None})
    assert describe_sessions([session, again]) == [
        "2026-01-02 03:04:05 UTC, preprocess (text 3, parsed 1,200): finished after 1:15, 2:20 of CPU",
        "  tree-attention 1.0 (commit 0123456789ab with changes); python 3.12.1, ray missing",
        "  Some CPU, 4 cores, no GPU",
        "2026-01-02 03:04:05 UTC, preprocess (text 3, parsed 1,200): unfinished after an unknown time",
        "  with the same software and machine",
    ]
