"""Training that is judged by BLEU or chrF of greedy translations of the validation split."""

import itertools

import pytest
import sacrebleu
from toyruns import final_weights, make_config, make_task, same, train_ranks

from treenet.config import DecodingConfig
from treenet.data.splits import read_references, read_split
from treenet.jobs.train_run import run_training
from treenet.runs.averaging import choose_checkpoints
from treenet.runs.checkpoint import checkpoint_folders, latest_checkpoint, read_meta
from treenet.runs.loading import load_run
from treenet.runs.metrics_log import read_metrics
from treenet.tasks import translation
from treenet.tasks.base import build_task
from treenet.training.state import TrainState
from treenet.training.trainer import train
from treenet.translation.translate import detokenize, translate_examples
from treeproc.common.settings import UserError

slow = pytest.mark.slow

CHRF = [
    "valid_metric=chrf",
    "validate_every=5",
    "max_steps=15",
    "average=best",
    "average_checkpoints=1",
    "optimizer.learning_rate=0.02",
]


@pytest.fixture(scope="module")
def judged(data, tmp_path_factory):
    """A run that was judged by chrF."""
    folder = tmp_path_factory.mktemp("judged")
    run_training(make_config(data, *CHRF), folder)
    return folder


def validations(run_dir) -> list[dict]:
    return [line for line in read_metrics(run_dir) if line["event"] == "valid"]


@slow
def test_the_metric_is_that_of_a_slow_greedy_search_of_one_line_at_a_time(data, judged):
    for folder, line in zip(checkpoint_folders(judged), validations(judged), strict=True):
        run = load_run(judged, checkpoint=str(int(folder.name.removeprefix("step_"))))
        rows = list(read_split(data, "encoded", "valid"))
        greedy = DecodingConfig(beam_size=1, max_tokens=1)
        texts = [detokenize(run.processor, best) for [best] in translate_examples(run.model, rows, greedy, window=1)]
        expected = sacrebleu.corpus_chrf(texts, [read_references(data, "valid")]).score
        assert line["chrf"] == pytest.approx(expected, abs=1e-9)
    assert len({line["chrf"] for line in validations(judged)}) > 1


@slow
def test_the_best_checkpoint_is_that_of_the_metric(judged):
    best = max(validations(judged), key=lambda line: line["chrf"])
    [chosen] = choose_checkpoints(judged, "best", 1).folders
    assert read_meta(chosen)["step"] == best["step"]
    assert read_meta(chosen)["valid_criterion"] == pytest.approx(100 - best["chrf"])


@slow
def test_cut_off_and_resumed_equals_uninterrupted(data, judged, tmp_path):
    task, asked = make_task(data, *CHRF), itertools.count(1)
    assert not train(task, tmp_path, should_stop=lambda: next(asked) == 7).finished
    train(task, tmp_path)
    assert same(final_weights(tmp_path), final_weights(judged))
    times = ("seconds", "elapsed")
    first, second = (
        [{name: v for name, v in line.items() if name not in times} for line in validations(run)] for run in (tmp_path, judged)
    )
    assert first == second
    assert [read_meta(folder)["validations_since_best"] for folder in checkpoint_folders(tmp_path)] == [
        read_meta(folder)["validations_since_best"] for folder in checkpoint_folders(judged)
    ]


@slow
def test_two_ranks_give_the_score_of_one(data, judged, tmp_path):
    assert train_ranks(2, make_config(data, *CHRF, "decoding.max_tokens=40"), tmp_path) == [None, None]
    assert [line["chrf"] for line in validations(tmp_path)] == pytest.approx(
        [line["chrf"] for line in validations(judged)], abs=0.5
    )
    assert validations(tmp_path)[0]["chrf"] == validations(judged)[0]["chrf"]


def test_a_metric_of_words_that_does_not_fit_the_references_is_told(data, monkeypatch):
    monkeypatch.setattr(translation, "read_references", lambda *of: ["我想知道湯姆住在哪裡。"])
    tasks = {metric: make_task(data, f"valid_metric={metric}") for metric in ("nll", "chrf", "bleu", "ter")}
    assert [task.criterion_name for task in tasks.values()] == ["validation nll", "100 - chrf", "100 - bleu", "ter"]
    assert tasks["bleu"].criterion({"nll": 2.0, "bleu": 30.0}) == 70.0
    assert tasks["ter"].criterion({"nll": 2.0, "ter": 30.0}) == 30.0
    notes = {metric: tasks[metric].notes({}) for metric in ("nll", "chrf", "bleu")}
    assert notes.pop("bleu")[0].endswith("BLEU and TER take whole sentences for words; set valid_metric=chrf")
    assert notes == {"nll": [], "chrf": []}


@slow
def test_validations_without_translations_count_neither_for_patience_nor_as_the_best(data, tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(TrainState, "count_validation", lambda state, criterion: counted.append((state.step, criterion)))
    settings = ["valid_metric=bleu", "valid_metric_every=2", "validate_every=5", "max_steps=15", "ema_decay=0.9", "patience=1"]
    train(make_task(data, *settings, "average_checkpoints=3", "keep_checkpoints=3"), tmp_path)
    lines = {line["step"]: line for line in validations(tmp_path)}
    assert [step for step, line in lines.items() if "bleu" in line] == [10, 15] and list(lines) == [5, 10, 15]
    assert counted == [(step, 100 - lines[step]["bleu"]) for step in (10, 15)]
    found = {read_meta(folder)["step"]: read_meta(folder)["valid_criterion"] for folder in checkpoint_folders(tmp_path)}
    assert found[5] is None and found[10] is not None
    assert {folder.name for folder in choose_checkpoints(tmp_path, "best", 2).folders} == {"step_00000010", "step_00000015"}


@slow
def test_runs_judged_by_nll_record_what_they_always_did(data, tmp_path):
    config = make_config(data)
    assert not {"valid_metric", "valid_metric_every"} & (config.model_dump().keys() | config.lasting().keys())
    train(make_task(data, "max_steps=5", "validate_every=5"), tmp_path)
    assert "valid_criterion" not in read_meta(latest_checkpoint(tmp_path))
    assert validations(tmp_path)[0].keys() == {"event", "step", "loss", "nll", "perplexity", "seconds", "elapsed"}


@slow
def test_another_metric_continues_no_run(data, judged):
    with pytest.raises(UserError, match=r"valid_metric: 'chrf' -> 'bleu'"):
        run_training(make_config(data, *CHRF, "valid_metric=bleu"), judged)


def test_a_data_set_without_validation_is_refused(data):
    with pytest.raises(UserError, match="valid_metric=bleu needs a validation split"):
        make_task(data, "valid_metric=bleu").check({"columns": ["tgt_pieces"], "totals": {"train": {}}})


def test_any_metric_of_lines_judges_and_others_are_refused_by_name(data):
    with pytest.raises(UserError, match="valid_metric must be nll, bleu, chrf or ter, but is blue"):
        build_task(make_config(data, "valid_metric=blue"))
    better, worse = ({"ter": 40.0, "chrf": 60.0}, {"ter": 60.0, "chrf": 40.0})
    for name in ("ter", "chrf"):
        task = build_task(make_config(data, f"valid_metric={name}"))
        assert task.criterion(better) < task.criterion(worse)
        assert task.score_lines(["a b c d"], ["a b c d"]) == (0.0 if name == "ter" else 100.0)
