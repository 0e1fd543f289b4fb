"""A study on a machine that is lent for half an hour (docs/results/gpu.md), on a CPU and without Ray and Stanza."""

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_here
from conftest import REPOSITORY
from toydata import write_toy_data

from treenet.experiments.ledger import INTERRUPTED, WAITING, Ledger, last_step
from treenet.runs.metrics_log import read_metrics
from treeproc.stages.preprocess import SAMPLE

pytestmark = pytest.mark.slow

PAGE = REPOSITORY / "docs" / "results" / "gpu.md"
NEEDED = ("config.yaml", "run.json", "metrics.jsonl", "provenance.json", "checkpoints")  # of an unfinished cell
STEPS = 150
TINY = (
    "model.d_model=16 model.d_ff=32 model.num_heads=2 model.num_encoder_layers=1 model.num_decoder_layers=1 batch.max_tokens=256 "
    f"decoding.beam_size=1 max_steps={STEPS} validate_every=50 checkpoint_every=15 log_every=1 precision=float32 "
    "grid.seeds=[1,2] grid.bootstrap_samples=50 use_gpu=false"
).split()
# What that machine lacks.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "stanza", "py3langid", "sacremoses"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """The environment of commands on that machine."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(WITHOUT)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{folder}:{REPOSITORY}"}
    for name in ("ray", "stanza"):
        assert subprocess.run([sys.executable, "-c", f"import {name}"], env=environment, capture_output=True).returncode == 1
    return environment


def command_of_page(start: str) -> str:
    """The command of the page that begins with `start`, on one line."""
    [found] = re.findall(rf"^{re.escape(start)}.*$", PAGE.read_text(encoding="utf-8").replace("\\\n", " "), re.MULTILINE)
    return found


def make_place(folder: Path) -> Path:
    """Make a checkout."""
    (folder / "runs").mkdir(parents=True)
    (folder / "workflows").symlink_to(REPOSITORY / "workflows")
    return folder


def write_data(runs: Path) -> None:
    """Write a small data set of the shipped sample, and its twin with trees of other sentences."""
    splits = []
    for split, count in (("train", 120), ("valid", 20), ("test", 20)):
        for side, language in (("source", "en"), ("target", "de")):
            lines = gzip.decompress((SAMPLE / f"{split}.{language}.gz").read_bytes()).splitlines(keepends=True)
            (runs / f"{split}.{language}").write_bytes(b"".join(lines[:count]))
            splits.append(f"splits.{split}.{side}=[{runs / split}.{language}]")
    shared, data = ("workers=0", "subwords.vocab_size=400"), runs / "iwslt14_part"
    twin = ("tree.tree_source=shuffled", "tree.binarize=none", f"parsed={data}")
    for done in (
        run_here("preprocess.py", "--config", "iwslt14_part_en_de_data", "--out", data, *shared, *splits),
        run_here("preprocess.py", "--config", "control_data", "--out", f"{data}_shuffled", *shared, *twin),
    ):
        assert done.returncode == 0, done.stderr


def results(folder: Path) -> dict[str, dict]:
    """The records of a folder, without times, machines and commits."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    for record in records:
        assert record["training"]["updates"] == STEPS and len(record["training"]["averaged_steps"]) == 5
        del record["training"], record["scores"]["test"]["software"]
    return {record["cell"]: record for record in records}


def steps_of(out: Path) -> dict[str, int]:
    """The last logged update of every cell that has begun."""
    logs = {folder.name: read_metrics(folder) for folder in (out / "cells").glob("*")}
    return {name: lines[-1]["step"] for name, lines in logs.items() if lines}


def two_cells(folder: Path, parallel: int) -> list[str]:
    """Arguments of `scaling` for a study of two cells, beside its data in `folder`."""
    models = (
        "grid.models={relative: {model: {name: relation_transformer}}, relative_tree: {model: {tree: {relative_positions: 4}}}}"
    )
    settings = ["max_steps=4", "checkpoint_every=2", "grid.seeds=[1]", f"grid.parallel={parallel}", models]
    data = write_toy_data(folder / "toy")
    places = ["--out", str(folder / "study"), "--records", str(folder / "records")]
    return ["--config", "scaling_iwslt14_relative", *places, *TINY, *settings, f"data={data}"]


def check_two_cells(folder: Path) -> None:
    assert sorted(path.stem for path in (folder / "records").iterdir()) == ["relative-1-seed1", "relative_tree-1-seed1"]


@pytest.mark.cluster
def test_two_cells_at_a_time_need_neither_ray_nor_stanza(tmp_path, environment):
    """`tests/test_light_imports.py` runs one at a time."""
    command = [sys.executable, REPOSITORY / "workflows" / "scaling.py", *two_cells(tmp_path, parallel=2)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_two_cells(tmp_path)


@pytest.mark.cluster
@pytest.mark.timeout(2400)
def test_a_study_of_carried_data_that_is_stopped_twice_has_the_records_of_one_that_is_not(tmp_path, environment):
    """The commands of the page, with a tiny model: SIGTERM, then SIGKILL, then the needed files alone on another machine."""
    here, there, elsewhere = (make_place(tmp_path / name) for name in ("here", "there", "elsewhere"))
    write_data(here / "runs")
    command = command_of_page("timeout -k 60 300 python workflows/scaling.py").replace("-k 60 300", "-k 3000 3000")
    study = [*shlex.split(command), *TINY, "grid.parallel=3"]
    out = Path("runs") / "iwslt14_relative"

    def shell(command: str, place: Path) -> None:
        subprocess.run(["bash", "-ec", command], cwd=place, env=environment, check=True)

    def take_along(start: Path, to: Path) -> None:
        shutil.copy(start / "runs" / "data.tgz", to / "runs")
        shell(command_of_page("tar -xzf runs/data.tgz"), to)

    def run(place: Path, until: Callable[[], bool], number: signal.Signals) -> int:
        """Run the study until a cell is in its middle, and send a signal to all its processes, as `timeout` does."""
        log, deadline = place / "log", time.monotonic() + 900
        with open(log, "w") as file, subprocess.Popen(study, cwd=place, env=environment, stderr=file) as driver:
            try:
                while not until():
                    assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.01)
                os.killpg(driver.pid, number)  # `timeout` has made a group of this number
                return driver.wait(timeout=900)
            finally:
                if driver.poll() is None:
                    os.killpg(driver.pid, signal.SIGKILL)

    shell(command_of_page("tar -czf runs/data.tgz"), here)
    take_along(here, there)
    carried = [path.relative_to(there / "runs") for path in (there / "runs").rglob("*") if path.is_file()]
    assert not [path for path in carried if "parsed" in path.parts or path.match("text/train-*")]
    assert {Path("iwslt14_part/config.yaml"), Path("iwslt14_part_shuffled/encoded/index.json")} <= {*carried}

    middle = lambda: any(30 <= step < STEPS - 30 for step in steps_of(there / out).values())  # noqa: E731
    assert run(there, middle, signal.SIGTERM) == 143
    assert {entry.status for entry in Ledger.read(there / out).entries.values()} == {INTERRUPTED, WAITING}
    stopped = steps_of(there / out)
    assert any(0 < step < STEPS for step in stopped.values())
    saved = {name for name, step in stopped.items() if last_step(there / out / "cells" / name) == step and step % 15}
    assert saved, "SIGTERM saves a checkpoint between two that are due"

    records = there / "runs" / "records"
    recorded = lambda: {path.stem for path in records.glob("*.json")}  # noqa: E731
    assert run(there, lambda: recorded() and middle(), signal.SIGKILL) == -signal.SIGKILL
    finished, begun = recorded(), steps_of(there / out)
    assert 1 <= len(finished) < 6 and any(step < STEPS for step in begun.values())

    take_along(here, elsewhere)
    shutil.copytree(records, elsewhere / "runs" / "records")
    for name in begun.keys() - finished:
        for needed in NEEDED:
            source, target = (place / out / "cells" / name / needed for place in (there, elsewhere))
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    done = subprocess.run(study, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [name for name in finished if f"{name} (" in done.stderr], "a cell with a record ran again"
    assert {path.name for path in (elsewhere / out / "cells").iterdir()} == {*Ledger.read(elsewhere / out).entries}

    undisturbed = [part for part in study if not part.startswith("grid.parallel")]
    done = run_here("scaling.py", *undisturbed[undisturbed.index("--config") :], "--records", "runs/whole", cwd=here)
    assert done.returncode == 0, done.stderr
    expected = results(here / "runs" / "whole")
    found = results(elsewhere / "runs" / "records")
    assert len(expected) == 6 and found.keys() == expected.keys()
    for name, record in expected.items():
        assert [key for key in record if found[name][key] != record[key]] == [], name
    signature = next(iter(expected.values()))["scores"]["test"]["bleu_tokenized_signature"]
    assert "tok:none" in signature, "the carried config.yaml tells that lines are tokens"
