"""Learning curves, the progress line and the summary: what they show is what was measured."""

import json
import math

import pytest
from matplotlib import image

from treenet.runs.metrics_log import best_validation, describe_metrics, draw_curves, plot_curves, read_metrics


def train_line(step: int, nll: float | None, lr: float = 1e-3) -> dict:
    return {"event": "train", "step": step, "nll": nll, "loss": nll, "lr": lr}


def valid_line(step: int, nll: float) -> dict:
    return {"event": "valid", "step": step, "nll": nll}


LINES = [
    *(train_line(step, 50.0 / step + 2) for step in range(10, 1010, 10)),
    train_line(1010, None),
    *(valid_line(step, nll) for step, nll in ((250, 3.0), (500, 2.5), (750, 2.5), (1000, 2.7))),
]


def drawn(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_the_picture_shows_the_metrics_and_marks_the_lowest_nll():
    losses, rates = draw_curves({"run": LINES}, "a title").axes
    curves = drawn(losses)
    assert curves["training batches"] == [(step, 50.0 / step + 2) for step in range(10, 1010, 10)]
    assert curves["validation"] == [(250, 3.0), (500, 2.5), (750, 2.5), (1000, 2.7)]
    assert curves["lowest nll on validation 2.500 at 500"] == [(500, 2.5)]
    assert losses.get_title() == "a title" and len(rates.lines[0].get_xdata()) == 100
    assert 3.0 < losses.get_ylim()[1] < 7.0  # not the 7.0 of the first batches


@pytest.mark.parametrize("line", [{"event": "valid"}, {"event": "valid", "nll": None}, {"event": "train"}])
def test_a_line_without_a_loss_is_none_of_a_training(tmp_path, line):
    lines = [valid_line(1, 2.5), line | {"step": 2}, valid_line(3, 2.25)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    assert read_metrics(tmp_path) == lines[:1]


def test_runs_side_by_side_have_names_and_colors():
    losses, _ = draw_curves({"tree": LINES, "plain": LINES[:50]}, "two").axes
    assert set(drawn(losses)) == {
        "tree, training batches", "tree, validation", "tree, lowest nll on validation 2.500 at 500", "plain, training batches",
        "plain, validation",
    }  # fmt: skip
    colors = {line.get_label().split(",")[0]: line.get_color() for line in losses.lines}
    assert colors["tree"] != colors["plain"]


def test_scores_of_validations_stand_below():
    lines = [
        train_line(5, 3.0),
        {**valid_line(10, 2.0), "accuracy": 0.25},
        train_line(15, 2.0),
        {**valid_line(20, 1.5), "accuracy": 0.5},
    ]
    _, scores = draw_curves({"run": lines}, "", "accuracy", "validation\naccuracy").axes
    assert drawn(scores).popitem()[1] == [(10, 0.25), (20, 0.5)] and scores.get_ylabel() == "validation\naccuracy"
    assert scores.get_ylim()[0] == 0
    lines[1]["accuracy"] = -0.2  # as Pearson's r may be
    _, scores = draw_curves({"run": lines}, "", "accuracy", "validation\naccuracy").axes
    assert scores.get_ylim()[0] < -0.2


@pytest.mark.parametrize("lines", [[], LINES[:1], [train_line(1, None)], LINES[-2:]])
def test_a_picture_of_little_is_a_picture(tmp_path, lines, rendered):
    path = plot_curves({"run": lines}, tmp_path / "curves.png", "short")
    assert image.imread(path).shape[:2] == (825, 1125)


def test_the_best_validation_is_the_first_of_the_lowest_and_finite():
    assert best_validation(LINES)["step"] == 500
    assert best_validation([valid_line(1, math.nan), valid_line(2, 3.0), valid_line(3, math.inf)])["step"] == 2
    assert best_validation([valid_line(1, math.nan), train_line(2, 1.0)]) is None


def test_the_progress_line_names_what_is_watched():
    line = {"loss": 3.21987, "tokens_per_s_per_device": 12345.6, "padding": 0.0712, "data_wait": 0.001, "skipped": 0}
    assert describe_metrics(line) == "loss 3.220, 12,346 tokens/s a device, padding 7.1%, data wait 0.1%"
    assert describe_metrics({**line, "loss": None, "skipped": 3}).startswith("loss not finite, ")
    assert describe_metrics({**line, "skipped": 3}).endswith(", 3 updates skipped")
