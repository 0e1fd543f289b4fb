"""The demo's whole path on a slice: real parser, real Ray, real training, killed and continued."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from treenet.training.checkpoint import checkpoint_folders
from treeproc.preprocess import SAMPLE

STEPS = 12


@pytest.fixture(scope="module")
def slice_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slice")
    splits = {}
    for split, count in {"train": 80, "valid": 8, "test": 12}.items():
        splits[split] = {}
        for side, language in (("source", "en"), ("target", "de")):
            lines = gzip.decompress((SAMPLE / f"{split}.{language}.gz").read_bytes()).decode().split("\n")[:count]
            path = folder / f"{split}.{language}"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            splits[split][side] = [str(path)]
    config = folder / "demo.yaml"
    config.write_text(
        json.dumps(
            {"splits": splits, "vocab_size": 500, "max_steps": STEPS, "checkpoint_every": 3, "log_every": 1, "sentences": 3}
        )
    )
    return config


@pytest.mark.timeout(400)
def test_demo_killed_in_training_continues_and_reports(slice_config, tmp_path, repository):
    out = tmp_path / "out"
    command = [sys.executable, str(repository / "workflows" / "demo.py"), "--config", str(slice_config), "--out", str(out)]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 200
        while not checkpoint_folders(out / "tree_transformer"):
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    shards = {path: path.stat().st_mtime_ns for path in (out / "data").rglob("train-*.arrow")}
    assert shards and not (out / "report.txt").exists()

    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert {path: path.stat().st_mtime_ns for path in shards} == shards, "finished shards were done again"
    metrics = [json.loads(line) for line in (out / "tree_transformer" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["event"] == "train"] == list(range(1, STEPS + 1))
    assert sorted(json.loads((out / "tree_transformer" / "scores.json").read_text())) == [
        "test", "test.shuffled_trees_1", "test.untrained",
    ]  # fmt: skip
    for name in ("tree_transformer", "transformer"):
        assert len((out / name / "translations.test.txt").read_text().split("\n")) == 12 + 1
        assert json.loads((out / name / "averaged" / "meta.json").read_text())["averaged_steps"] == [3, 6, 9, 12][-5:]
    report = (out / "report.txt").read_text()
    assert report in run.stdout and report.count("source  ") == 3 and "BLEU" in report and "└─ " in report
    assert (out / "learning_curves.png").stat().st_size > 5000

    translate = [sys.executable, str(repository / "workflows" / "translate.py"), "--out", str(out / "tree_transformer")]
    run = subprocess.run(translate, input="I see a dog.\n\nNo\u2028one.\n", capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and len(run.stdout.split("\n")) == 3 + 1 and run.stdout.split("\n")[1] == "", run.stderr
    run = subprocess.run([*translate, "input=none.txt"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and run.stderr == "error: cannot read none.txt: No such file or directory\n"

    same_data = [json.loads((out / name / "run.json").read_text()) for name in ("tree_transformer", "transformer")]
    assert len({run["data_fingerprint"] for run in same_data}) == len({run["batches_per_epoch"] for run in same_data}) == 1
