"""Studies in an object store, over a real S3 server: cells, ledger, records and report, on machines without a shared disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import run_here, without_times
from test_remote_run import bucket
from test_scaling import STUDY, statuses
from test_train_classifier import GRID as SEEDS
from test_train_classifier import TINY
from test_tuning import SEARCH, SYSTEM
from toydata import write_toy_data
from toylabels import write_toy_labels
from toyruns import losses

from treenet.config import TrainConfig
from treenet.experiments import scaling_report
from treenet.experiments.ledger import DONE, FAILED
from treenet.experiments.settings import ScalingConfig
from treenet.experiments.study_grid import study_cells
from treenet.extras.tuning.trials import Trials, TuningConfig
from treenet.jobs.train_run import run_training
from treeproc.common.settings import build_settings, load_settings
from treeproc.common.storage import AnyPath

pytestmark = pytest.mark.slow

__all__ = ["bucket"]  # a fixture

GRID = {"fractions": [1.0], "seeds": [1, 2], "bootstrap_samples": 100}
SHORT = {"max_steps": 12, "checkpoint_every": 4, "validate_every": 12}
CELLS = ["transformer-1-seed1", "transformer-1-seed2", "tree_transformer-1-seed1", "tree_transformer-1-seed2"]


@pytest.fixture(autouse=True)
def another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "disk"))


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> list[str]:
    """The arguments of a study of four cells, without --out."""
    folder = tmp_path_factory.mktemp("study")
    data = write_toy_data(folder / "data")
    (folder / "study.yaml").write_text(json.dumps({**STUDY, "grid": GRID, **SHORT}))
    return ["scaling.py", "--config", str(folder / "study.yaml"), f"data={data}"]


@pytest.fixture(scope="module")
def local(study, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("local") / "study"
    assert run_here(*study, "--out", out, "--records", out.parent / "records").returncode == 0
    return out


def comparable(path: AnyPath) -> dict:
    """A record or a report without what tells of time and machine."""
    found = without_times(path)
    for one in (found, *found.get("cells", ()), *found.get("training", {}).values()):
        for name in ("training", "tokens_per_s", "memory_gib"):
            one.pop(name, None) if isinstance(one, dict) else None
    return found


def test_a_study_in_a_store_that_another_machine_continues_gives_what_a_local_one_gives(
    bucket, study, local, tmp_path, monkeypatch
):
    """Two cells are done, one has a checkpoint, one was never started; the second machine has only the store."""
    out, records = bucket / "study", bucket / "records"
    arguments = [*study, "--out", out, "--records", records]
    shown = run_here(*arguments, "--dry-run")
    assert shown.returncode == 0 and "transformer-1-seed1: new" in shown.stdout and not (out / "ledger.json").exists()
    first = run_here(*arguments, "grid.seeds=[1]")
    assert first.returncode == 0, first.stderr
    cell = study_cells(load_settings(ScalingConfig, Path(study[2]), study[3:]), out)[-1]
    assert run_training(cell.config.model_copy(update={"max_steps": 4}), cell.folder).step == 4
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "second disk"))
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"{out}/scaling.json\n{out}/scaling.png\n{out}/scaling.svg" in done.stdout
    assert f"{CELLS[0]}: done after" not in done.stderr and f"{CELLS[3]}: done after" in done.stderr
    refused = run_here(*study, "--out", out, "model.d_ff=64")
    assert refused.returncode == 2 and f"{out} holds cells with other settings" in refused.stderr
    assert statuses(out) == dict.fromkeys(CELLS, DONE)
    assert comparable(out / "scaling.json") == comparable(local / "scaling.json")
    assert [path.name for path in records.glob("*")] == [f"{name}.json" for name in CELLS]
    for name in CELLS:
        assert losses(out / "cells" / name) == losses(local / "cells" / name)
        found, expected = (comparable(folder / f"{name}.json") for folder in (records, local.parent / "records"))
        if name == cell.folder.name:
            assert found["curve"].pop("valid")["step"] == [4, 12] and expected["curve"].pop("valid")["step"] == [12]
        assert found == expected
        weights = "averaged/model.safetensors"
        assert (out / "cells" / name / weights).read_bytes() == (local / "cells" / name / weights).read_bytes()
    assert (out / "scaling.png").exists() and (out / "scaling.svg").exists()
    again = run_here(*arguments)
    assert again.returncode == 0 and "after" not in again.stderr, "a study that is done trains nothing"


def test_records_in_a_store_continue_a_study_whose_folder_is_lost(bucket, study, local):
    records = bucket / "kept"
    for path in (local.parent / "records").glob("*.json"):
        (records / path.name).write_bytes(path.read_bytes())
    done = run_here(*study, "--out", bucket / "lost", "--records", records)
    assert done.returncode == 0 and not (bucket / "lost" / "cells").exists()
    assert comparable(bucket / "lost" / "scaling.json") == comparable(local / "scaling.json")


def test_a_failed_cell_leaves_its_error_in_the_store(bucket, study, monkeypatch):
    def fail(*arguments: object) -> tuple:
        raise ValueError("no figure")

    monkeypatch.setattr(scaling_report, "evaluate_run", fail)
    out = bucket / "failing"
    done = run_here(*study, "--out", out, "grid.seeds=[1]", "max_steps=2")
    assert done.returncode == 1 and f"2 of 2 cells failed, see {out}/ledger.json" in done.stderr
    assert set(statuses(out).values()) == {FAILED}
    assert "ValueError: no figure" in (out / "cells" / CELLS[0] / "error.txt").read_text()


@pytest.mark.cluster
def test_cells_side_by_side_log_to_the_store(bucket, study, local):
    out = bucket / "parallel"
    done = run_here(*study, "--out", out, "grid.parallel=2", "grid.seeds=[1]")
    assert done.returncode == 0, done.stderr
    for name in (CELLS[0], CELLS[2]):
        assert "train: " in (out / "cells" / name / "log.txt").read_text()
        assert [step for step, _ in losses(out / "cells" / name)] == [step for step, _ in losses(local / "cells" / name)]


@pytest.mark.cluster
def test_a_comparison_over_seeds_in_a_store(bucket, tmp_path):
    """Its scores need the last checkpoints, and its peak needs all of them."""
    settings = {**TINY, "data": str(write_toy_labels(tmp_path / "data")), "grid": {**SEEDS, "peak_on_test": True}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    arguments = ["compare_seeds.py", "--config", str(tmp_path / "config.yaml")]
    for out, records in ((tmp_path / "out", tmp_path / "kept"), (bucket / "seeds", bucket / "seeds-kept")):
        done = run_here(*arguments, "--out", out, "--records", records)
        assert done.returncode == 0, done.stderr
    names = ["trees-seed1", "words-seed1", "trees-seed2"]
    assert statuses(bucket / "seeds") == dict.fromkeys(names, DONE)
    assert comparable(bucket / "seeds" / "comparison.json") == comparable(tmp_path / "out" / "comparison.json")
    for name in names:
        assert comparable(bucket / "seeds-kept" / f"{name}.json") == comparable(tmp_path / "kept" / f"{name}.json")
        scores = json.loads((bucket / "seeds" / "cells" / name / "scores.json").read_bytes())
        assert {"test", "test.last", "test.peak"} <= scores.keys()
    assert (bucket / "seeds" / "comparison.png").exists()


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_study_on_ray_needs_no_shared_folder(bucket, study, local, repository):
    """Workers keep nothing but copies on their disks."""
    out = bucket / "ray"
    command = [sys.executable, str(repository / "workflows" / study[0]), *study[1:], "--out", str(out)]
    done = subprocess.run([*command, "grid.seeds=[1]", "workers=1"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert statuses(out) == dict.fromkeys([CELLS[0], CELLS[2]], DONE) and (out / "scaling.svg").exists()
    for name in (CELLS[0], CELLS[2]):
        assert [step for step, _ in losses(out / "cells" / name)] == [step for step, _ in losses(local / "cells" / name)]


def test_systems_of_a_search_share_the_ledger_in_a_store(bucket, tmp_path):
    config = build_settings(TuningConfig, {**SEARCH, "data": str(write_toy_data(tmp_path / "data"))}, "here")
    one, other = (Trials(bucket / "trials", config, system) for system in config.tune.systems)
    for trials in (one, other):
        trials.end(trials.begin({"model.dropout": 0.1, "optimizer.learning_rate": 0.001}), DONE, [(5, 1.0)])
    assert [len(Trials(bucket / "trials", config, system).trials) for system in config.tune.systems] == [1, 1]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_search_in_a_store(bucket, tmp_path, repository):
    data, out = write_toy_data(tmp_path / "data"), bucket / "search"
    space = {"optimizer.learning_rate": {"low": 1e-3, "high": 1e-2, "scale": "log"}}
    (tmp_path / "config.yaml").write_text(json.dumps({**SEARCH, "tune": {**SEARCH["tune"], "space": space, "systems": SYSTEM}}))
    options = ["--config", str(tmp_path / "config.yaml"), "--out", str(out), f"data={data}"]
    command = [sys.executable, str(repository / "workflows" / "tune.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    trials = json.loads((out / "ledger.json").read_bytes())["cells"]
    assert sorted(trials) == [f"transformer-00{number}" for number in range(3)] and all(one["result"] for one in trials.values())
    assert load_settings(TrainConfig, None, [], **yaml.safe_load((out / "best-transformer.yaml").read_text())).max_steps == 30
    # The process of a trial that the search stops is killed, before its log is in the store.
    finished = next(name for name, trial in trials.items() if trial["status"] == "done")
    assert "train: " in (out / "cells" / finished / "log.txt").read_text()
    again = run_here("tune.py", *options)
    assert again.returncode == 0 and "Ray" not in again.stderr and f"written: {out}/tuning.json" in again.stdout
