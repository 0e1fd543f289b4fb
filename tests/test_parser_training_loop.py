"""The training loop on a model that is small enough to follow."""

import json

import pytest
import torch
from test_damage import flip
from torch import nn

from treeproc.common.errors import UserError
from treeproc.extras.parser_training import loop
from treeproc.extras.parser_training.config import FitSettings
from treeproc.extras.parser_training.loop import fit

pytestmark = pytest.mark.slow


class Line:
    """Learns y = 2 x + 1, with dropout, from epochs of 7 and 8 batches; stops like a killed process where it is told to."""

    def __init__(self, stop: int | None = None):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
        self.stop, self.calls, self.scored = stop, 0, []

    def batches(self, epoch):
        x = torch.rand(7 + epoch % 2, 5, 1, generator=torch.Generator().manual_seed(epoch))
        return [(part, 2 * part + 1) for part in x]

    def loss(self, batch):
        assert self.model.training
        if self.calls == self.stop:
            raise KeyboardInterrupt
        self.calls += 1
        return (self.model(batch[0]) - batch[1]).square().mean()

    def evaluate(self):
        self.model.eval()
        torch.rand(11)  # what is drawn here must not reach the training
        x = torch.linspace(0, 1, 20)[:, None]
        score = -(self.model(x) - 2 * x - 1).square().mean().item()
        self.scored.append(([p.clone() for p in self.model.parameters()], score))
        return {"score": score}


SETTINGS = FitSettings(epochs=4, learning_rate=0.05, evaluations=5, warmup=0.2)
STEPS = 7 + 8 + 7 + 8


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def save_often(monkeypatch):
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_CHECKPOINTS", 0)


@pytest.mark.parametrize("stop", [1, 7, 13, STEPS - 1])
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path, monkeypatch, stop, save_often):
    whole, first, second = Line(), Line(stop), Line()
    best = fit(whole, tmp_path / "whole", SETTINGS, seed=1)
    with pytest.raises(KeyboardInterrupt):
        fit(first, tmp_path / "killed", SETTINGS, seed=1)
    # A record without its checkpoint: killed in between.
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": stop + 1, "loss": -1.0}) + "\n")
    torch.manual_seed(99)
    assert fit(second, tmp_path / "killed", SETTINGS, seed=1) == best
    assert second.calls == STEPS - stop
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    undisturbed, in_two_parts = metrics(tmp_path / "whole"), metrics(tmp_path / "killed")
    for line in (*undisturbed, *in_two_parts):
        del line["seconds"]
    assert undisturbed == in_two_parts and [line["step"] for line in undisturbed] == list(range(1, STEPS + 1))


def test_without_a_checkpoint_a_killed_run_starts_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(Line(stop=3), tmp_path, SETTINGS, seed=1)
    learner = Line()
    fit(learner, tmp_path, SETTINGS, seed=1)
    assert learner.calls == STEPS


def test_a_finished_run_returns_at_once(tmp_path):
    learner = Line()
    best = fit(learner, tmp_path, SETTINGS, seed=1)
    again = Line(stop=0)
    assert fit(again, tmp_path, SETTINGS, seed=1) == best
    assert torch.equal(again.model[0].weight, learner.model[0].weight) and not again.scored


def test_a_training_that_diverges_is_one_line_with_what_to_do(tmp_path):
    learner = Line()
    learner.loss = lambda batch: learner.model(batch[0]).sum() * torch.inf
    folder = tmp_path / "pos"
    with pytest.raises(UserError, match=rf"pos: .* not finite at step 1; remove {folder}, and set a lower pos.fit.learning_rate"):
        fit(learner, folder, SETTINGS, seed=1)


def test_the_best_of_the_evaluated_weights_is_kept(tmp_path):
    learner = Line()
    best = fit(learner, tmp_path, SETTINGS, seed=1)
    assert len(learner.scored) == SETTINGS.evaluations
    weights, score = max(learner.scored, key=lambda pair: pair[1])
    assert best == {"score": score}
    assert all(torch.equal(a, b) for a, b in zip(weights, learner.model.parameters(), strict=True))
    lines = [line for line in metrics(tmp_path) if "score" in line]
    assert [line["step"] for line in lines] == [6, 12, 18, 24, 30] and lines[-1]["epoch"] == 4


def test_dev_is_scored_with_the_running_average(tmp_path, monkeypatch):
    history = []
    update = loop._Run._update

    def record(run, batch, rate):
        out = update(run, batch, rate)
        history.append([p.detach().clone() for p in run.parameters])
        return out

    monkeypatch.setattr(loop._Run, "_update", record)
    learner = Line()
    start = [p.detach().clone() for p in learner.model.parameters()]
    fit(learner, tmp_path, FitSettings(epochs=2, average=0.8, evaluations=1), seed=1)
    average = start
    for step, weights in enumerate(history):
        decay = min(0.8, (1 + step) / (10 + step))
        average = [decay * a + (1 - decay) * b for a, b in zip(average, weights, strict=True)]
    for a, b in zip(learner.scored[0][0], average, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(average[0], history[-1][0])
    last = Line()
    history.clear()
    fit(last, tmp_path / "last", FitSettings(epochs=2, average=0, evaluations=1), seed=1)
    assert torch.equal(last.scored[0][0][0], history[-1][0])


def test_the_learning_rate_rises_and_falls_to_zero(tmp_path, save_often):
    fit(Line(), tmp_path, SETTINGS, seed=1)
    rates = [line["learning_rate"] for line in metrics(tmp_path)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert 4 <= top <= 7 and 0.95 < max(rates) / SETTINGS.learning_rate <= 1 and 0 < rates[-1] < 0.03 * SETTINGS.learning_rate


def test_other_settings_are_refused(tmp_path):
    fit(Line(), tmp_path, SETTINGS, seed=1)
    with pytest.raises(UserError, match=r"epochs: 4 -> 5"):
        fit(Line(), tmp_path, SETTINGS.model_copy(update={"epochs": 5}), seed=1)
    with pytest.raises(UserError, match=r"seed: 1 -> 2"):
        fit(Line(), tmp_path, SETTINGS, seed=2)
    wider = Line()
    wider.model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="is of other data, or of a model with other sizes"):
        fit(wider, tmp_path, SETTINGS, seed=1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:500]),
        lambda path: path.write_bytes(b""),
        flip,
        lambda path: torch.save({}, path),
        lambda path: torch.save([1], path),
        lambda path: torch.save({**torch.load(path), "averaged": []}, path),
        lambda path: torch.save({**torch.load(path), "step": "many"}, path),
        lambda path: torch.save({**torch.load(path), "optimizer": {}}, path),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    fit(Line(), tmp_path, SETTINGS, seed=1)
    damage(tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match=r"checkpoint\.pt is .*; remove its folder and run the same command again") as error:
        fit(Line(), tmp_path, SETTINGS, seed=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tail", ['{"step": 3', '{"epoch": 1}\n', "[]\n", '{"step": "x", "epoch": 1}\n', "\0\0\n", "\udcff\n"])
def test_a_damaged_end_of_the_metrics_is_dropped(tmp_path, tail, save_often):
    fit(Line(), tmp_path, SETTINGS, seed=1)
    before = metrics(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a", errors="surrogateescape") as file:
        file.write(tail)
    fit(Line(), tmp_path, SETTINGS, seed=1)
    assert metrics(tmp_path) == before
    (tmp_path / "metrics.jsonl").unlink()
    fit(Line(), tmp_path, SETTINGS, seed=1)
    assert metrics(tmp_path) == []
