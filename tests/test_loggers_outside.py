"""Loggers against the real thing: MLflow with a SQLite store, W&B offline. Skipped where the packages are missing."""

import json
import os
import socket
import struct
from pathlib import Path

import pytest
from test_loggers import Cut
from toyruns import make_config
from waiting import wait_for

from treenet.jobs.train_run import run_training
from treenet.loggers import feed
from treenet.runs.metrics_log import MetricLog, read_metrics
from treeproc.common.files import atomic_write, json_bytes

pytestmark = pytest.mark.slow

# A test that has not set them would write to the user's own place.
OWN = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Own settings are away, and an address outside this machine fails the test."""
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(feed, "POLL_S", 0.05)
    monkeypatch.setattr(feed, "END_S", 200.0)  # a busy machine
    connected = socket.socket.connect

    def connect(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        return connected(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


def train_and_cut(config, run, monkeypatch, is_sent):
    """Cut the run after update 8, when its logger has the line; its last checkpoint is that of update 5."""
    written = MetricLog.write

    def write(self, event, at, **values):
        written(self, event, at, **values)
        if at == 8:
            self._file.flush()
            wait_for(is_sent)
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(MetricLog, "write", write)
        with pytest.raises(Cut):
            run_training(config, run)


def add_scores(run: Path, bleu: float) -> None:
    atomic_write(run / "scores.json", json_bytes({"test": {"split": "test", "steps": [5, 10], "bleu": bleu}}))
    feed.log_scores(run)


def test_a_run_in_mlflow_is_one_run_without_doubled_points(data, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    run, config = tmp_path / "tree", make_config(data, "max_steps=10", "loggers=[mlflow]", "lr_scale={'*norm*': 0.5}")

    def client():
        return mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")

    def runs():
        return client().search_runs([client().get_experiment_by_name("tree-attention").experiment_id])

    def history(name):
        return [(point.step, point.value) for point in client().get_metric_history(runs()[0].info.run_id, name)]

    def is_sent():
        return (tmp_path / "mlflow.db").exists() and runs() and (8, 8.0) in history("train/update")

    train_and_cut(config, run, monkeypatch, is_sent)
    assert runs()[0].info.status == "FAILED"
    summary = run_training(config, run)
    assert summary.loggers == (f"mlflow: run tree of experiment tree-attention in {tmp_path / 'mlflow.db'}",)
    [there] = runs()
    assert (there.info.status, there.info.run_name) == ("FINISHED", "tree")
    lines = read_metrics(run)
    assert {name for line in lines for name in line} - {"event", "step"} <= {name.split("/")[1] for name in there.data.metrics}
    for event in ("train", "valid"):
        expected = [(line["step"], line["nll"]) for line in lines if line["event"] == event]
        assert sorted(history(f"{event}/nll")) == expected
    assert there.data.params["model.d_model"] == "16" and json.loads(there.data.params["lr_scale"]) == {"*norm*": 0.5}
    assert there.data.tags["max_steps"] == "10" and there.data.tags["provenance.outcome"] == "finished"
    for bleu in (12.5, 12.5, 13.0, 12.5):
        add_scores(run, bleu)
    assert [value for _, value in history("test/bleu")] == [12.5, 13.0, 12.5]
    assert run_training(config.model_copy(update={"max_steps": 12, "log_every": 2}), run).finished
    assert client().get_run(there.info.run_id).data.tags["max_steps"] == "12"
    assert sorted(history("train/update")) == [(step, step) for step in (*range(1, 11), 12)]


def read_wandb(path: Path) -> list:
    """The records of a file of W&B: a log of LevelDB, with records of protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, records, parts = path.read_bytes(), 7, [], b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_a_run_in_wandb_is_one_file_without_doubled_points(data, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    run, config = tmp_path / "tree", make_config(data, "max_steps=10", "loggers=[wandb]")

    def files():
        return sorted((run / "wandb").glob("offline-run-*/*.wandb"))

    def records():
        return [record for file in files() for record in read_wandb(file)]

    def history():
        found = [record.history for record in records() if record.HasField("history")]
        return [{(item.key or item.nested_key[0]): json.loads(item.value_json) for item in one.item} for one in found]

    def is_ended():  # the process that writes the file may do so after the command
        return any(record.HasField("exit") for record in records())

    train_and_cut(config, run, monkeypatch, lambda: os.path.isdir(run / "wandb"))
    assert len(files()) == 1
    summary = run_training(config, run)
    wait_for(is_ended)
    [file] = files()
    assert summary.loggers == (f"wandb: {file.parent}, which `wandb sync {file.parent}` uploads",)
    lines, points = read_metrics(run), history()
    for event in ("train", "valid"):
        got = [(point[f"{event}/update"], point[f"{event}/nll"]) for point in points if f"{event}/update" in point]
        assert got == [(line["step"], line["nll"]) for line in lines if line["event"] == event]
    add_scores(run, 12.5)
    add_scores(run, 12.5)
    wait_for(is_ended)
    assert len(files()) == 1 and len(history()) == len(points)
    [start] = [record.run for record in records() if record.HasField("run")]
    assert start.display_name == "tree" and not start.host
    text = b"".join(record.SerializeToString() for record in records())
    assert b"test/bleu" in text and b"model.d_model" in text and b"provenance.outcome" in text
    assert socket.gethostname().encode() not in files()[0].read_bytes()
