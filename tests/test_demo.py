"""The demo's whole path on a slice of the sample: real parser, real training, done once more, and killed and continued on Ray."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from treenet.cli import demo, translate
from treenet.runs.checkpoint import checkpoint_folders
from treeproc.stages.preprocess import SAMPLE

pytestmark = pytest.mark.slow

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


def times(folder: Path, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern)}


def check_demo(out: Path, message: str) -> None:
    metrics = [json.loads(line) for line in (out / "tree_transformer" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["event"] == "train"] == list(range(1, STEPS + 1))
    assert sorted(json.loads((out / "tree_transformer" / "scores.json").read_text())) == [
        "test", "test.random_trees_1", "test.untrained",
    ]  # fmt: skip
    for name in ("tree_transformer", "transformer"):
        assert len((out / name / "translations.test.txt").read_text().split("\n")) == 12 + 1
        assert json.loads((out / name / "averaged" / "meta.json").read_text())["averaged_steps"] == [3, 6, 9, 12][-5:]
    report = (out / "report.txt").read_text()
    assert report in message and report.count("source  ") == 3 and "BLEU" in report and "└─ " in report
    assert message.index("One seed and minutes of training") < message.index("  Tree Transformer: BLEU")  # before any figure
    assert report.index("One seed and minutes of training") < report.index("valid nll")
    runs = " ".join(str(out / name) for name in ("tree_transformer", "transformer"))
    assert f"report --out {out}/page {runs}\n" in message.replace(".py", "") and "--sample --out run" in message
    assert (out / "learning_curves.png").stat().st_size > 5000
    same_data = [json.loads((out / name / "run.json").read_text()) for name in ("tree_transformer", "transformer")]
    assert len({run["data_fingerprint"] for run in same_data}) == len({run["batches_per_epoch"] for run in same_data}) == 1


def test_demo_interrupted_after_training_does_nothing_twice_and_reports(slice_config, tmp_path, capsys, monkeypatch, rendered):
    command = ["--config", str(slice_config), "--out", str(tmp_path), "workers=0"]

    def interrupt(out: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(demo, "evaluate", interrupt)
        demo.main(command)
    done = times(tmp_path, "*-of-*.arrow") | times(tmp_path, "model.safetensors")
    demo.main(command)
    check_demo(tmp_path, capsys.readouterr().out)
    assert times(tmp_path, "*-of-*.arrow") | times(tmp_path, "model.safetensors") == done
    (tmp_path / "lines.txt").write_text("I see a dog.\n\nNo\u2028one.\n", encoding="utf-8")
    translate.main(["--out", str(tmp_path / "tree_transformer"), f"input={tmp_path / 'lines.txt'}"])
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 3 + 1 and lines[1] == ""


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_demo_killed_in_training_continues_and_reports(slice_config, tmp_path, repository):
    out = tmp_path / "out"
    command = [sys.executable, str(repository / "workflows" / "demo.py"), "--config", str(slice_config), "--out", str(out)]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_for(lambda: checkpoint_folders(out / "tree_transformer"), job, log=tmp_path / "log")
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    shards = times(out / "data", "train-*.arrow")
    assert shards and not (out / "report.txt").exists()

    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert times(out / "data", "train-*.arrow") == shards, "finished shards were done again"
    check_demo(out, run.stdout)
