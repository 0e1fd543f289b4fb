"""Loggers: what they get, at which moment, and that their failures stay theirs. With loggers of the test."""

import threading
from pathlib import Path
from typing import ClassVar

import pytest
from toyruns import make_config
from waiting import wait_for

from treenet.extras.loggers import mlflow
from treenet.jobs.train_run import check_same_run, describe_run, run_training
from treenet.loggers import content, feed
from treenet.runs.metrics_log import MetricLog, read_metrics
from treeproc.common.files import atomic_write, json_bytes
from treeproc.common.settings import UserError
from treeproc.common.storage import as_path

pytestmark = pytest.mark.slow

SHORT = ("max_steps=10", "loggers=[mlflow]")


class Cut(Exception):
    """Stands for a power cut."""


class FakeLogger(mlflow.Logger):
    """Keeps what it gets, over all sessions: `points` are those of a server."""

    points: ClassVar[list]
    sessions: ClassVar[list]
    faults: ClassVar[list]  # for each `send`, the error it raises, or None

    def __init__(self, identity, trains):
        self.identity, self.trains, self.place = identity, trains, "https://user:s@secret@there?token=secret"
        self.sessions.append(self)
        self.states = []

    def open(self):
        pass

    def send(self, now):
        if self.faults and (fault := self.faults.pop(0)):
            raise fault
        there = {(line["event"], line["step"]) for line in self.points}
        self.points += [line for line in now.lines if (line["event"], line["step"]) not in there]
        self.content = now

    def close(self, state):
        self.states.append(state)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    class Fake(FakeLogger):
        points, sessions, faults = [], [], []

    monkeypatch.setattr(mlflow, "Logger", Fake)
    monkeypatch.setattr(feed, "require", lambda *arguments: None)
    monkeypatch.setattr(feed, "POLL_S", 0.02)
    monkeypatch.setattr(feed, "RETRY_S", 0.02)
    return Fake


def cut_when_sent(monkeypatch, fake, step):
    """The run ends at this update without a checkpoint, when its logger has the line."""
    written = MetricLog.write

    def write(self, event, at, **values):
        written(self, event, at, **values)
        if at == step:
            self._file.flush()
            wait_for(lambda: any(line["step"] == step for line in fake.points))
            raise Cut

    monkeypatch.setattr(MetricLog, "write", write)


def test_a_run_that_was_cut_has_every_line_once_and_stays_the_same_run(data, tmp_path, monkeypatch, fake):
    with monkeypatch.context() as patch:
        cut_when_sent(patch, fake, 8)
        with pytest.raises(Cut):
            run_training(make_config(data, *SHORT), tmp_path / "run")  # the last checkpoint is that of update 5
    assert fake.sessions[-1].states == ["failed"]
    summary = run_training(make_config(data, *SHORT), tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    sent = {(line["event"], line["step"]): line["nll"] for line in fake.points}
    assert len(fake.points) == len(sent) == len(lines)
    assert sent == {(line["event"], line["step"]): line["nll"] for line in lines}
    assert len({session.identity.id for session in fake.sessions}) == 1 and fake.sessions[-1].states == ["finished"]
    assert "  mlflow: https://***@there?***" in describe_run(summary) and "secret" not in describe_run(summary)
    got = fake.sessions[-1].content
    assert got.params["model.d_model"] == "16" and got.params["run.parameters"] == str(summary.parameters)
    assert got.notes["max_steps"] == "10" and got.notes["provenance.outcome"] == "finished"


def test_a_logger_that_fails_is_one_warning_and_gets_the_numbers_later(data, tmp_path, capsys, fake):
    fake.faults += [OSError("no route to https://me:s@secret@there\x1b[2J\nsecond line")] * 3
    run_training(make_config(data, *SHORT), tmp_path / "run")
    assert len(fake.points) == len(read_metrics(tmp_path / "run"))
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warned) == 1 and "mlflow: no route to https://***@there\\x1b[2J;" in warned[0]


def test_a_logger_that_never_works_is_said_at_the_end_and_the_same_command_sends_all(data, tmp_path, fake):
    fake.faults += [ValueError("broken")] * 100_000
    summary = run_training(make_config(data, *SHORT), tmp_path / "run")
    assert summary.finished and summary.averaged
    assert summary.loggers == ("mlflow: numbers are missing there (broken); the same command sends them",)
    fake.faults.clear()
    assert run_training(make_config(data, *SHORT), tmp_path / "run").loggers == ("mlflow: https://***@there?***",)
    assert len(fake.points) == len(read_metrics(tmp_path / "run"))


def test_a_logger_that_hangs_does_not_hold_the_training(data, tmp_path, monkeypatch, fake):
    monkeypatch.setattr(feed, "END_S", 0.1)
    never = threading.Event()
    monkeypatch.setattr(fake, "open", lambda self: never.wait())
    assert "no answer" in run_training(make_config(data, *SHORT), tmp_path / "run").loggers[0]
    never.set()


def test_scores_follow_and_a_failure_is_a_warning(data, tmp_path, capsys, fake):
    run = tmp_path / "run"
    run_training(make_config(data, *SHORT), run)
    atomic_write(run / "scores.json", json_bytes({"test": {"split": "test", "steps": [5, 10], "bleu": 12.5, "own_data": True}}))
    feed.log_scores(run)
    assert fake.sessions[-1].content.scores == [content.Score("test/bleu", 10, 12.5)]
    assert (fake.sessions[-1].trains, fake.sessions[-1].states) == (False, [None])
    (run / "loggers.json").write_text('{"id": "../../x", "name": "run", "of": "", "local": true}')
    feed.log_scores(run)
    assert "the loggers did not get the scores" in capsys.readouterr().err


def test_other_settings_before_the_first_checkpoint_are_another_run(data, tmp_path):
    config = make_config(data, *SHORT)
    ids = []
    for settings in (config, config, config.model_copy(update={"seed": 7})):
        content.identify(tmp_path, tmp_path, settings, "data")
        ids.append(content.read_identity(tmp_path).id)
    assert ids[0] == ids[1] != ids[2]
    (tmp_path / "checkpoints/step_00000005").mkdir(parents=True)
    content.identify(tmp_path, tmp_path, config, "data")
    assert content.read_identity(tmp_path).id == ids[2]


def test_the_setting_changes_no_result_and_old_runs_lack_it(data, tmp_path):
    plain, logged = make_config(data), make_config(data, "loggers=[mlflow,tensorboard]")
    assert "loggers" not in plain.model_dump() and plain.lasting() == logged.lasting()
    assert not (run_training(make_config(data, *SHORT), tmp_path / "run").run_dir / "tensorboard").exists()
    facts = {"data_fingerprint": content.read_facts(tmp_path / "run")["data_fingerprint"]}
    check_same_run(tmp_path / "run", make_config(data, "max_steps=10"), facts, tmp_path / "run")
    with pytest.raises(UserError, match="must name each one once"):
        make_config(data, "loggers=[wandb,wandb]")


def test_a_run_in_a_store_needs_the_address_of_a_server(data, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name, needed in (("mlflow", "MLFLOW_TRACKING_URI"), ("wandb", "WANDB_MODE=online")):
        config = make_config(data, f"loggers=[{name}]")
        feed.check_loggers(config, Path("here"))
        with pytest.raises(UserError, match=needed):
            feed.check_loggers(config, as_path("s3://bucket/run"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    feed.check_loggers(make_config(data, "loggers=[mlflow]"), as_path("s3://bucket/run"))


def test_a_missing_package_is_said_before_the_work(data, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("treeproc.common.errors.is_installed", lambda module: False)
    with pytest.raises(UserError, match=r"pip install 'tree-attention\[wandb\]'"):
        run_training(make_config(data, "loggers=[wandb]"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
