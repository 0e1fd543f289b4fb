"""Searches over settings: the space, the record of trials, and a whole search on Ray Tune that is killed and continues."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run_here
from waiting import wait_for

from treenet.config import TrainConfig
from treenet.experiments.ledger import DONE, FAILED, INTERRUPTED, STOPPED, CellResult
from treenet.extras.tuning.report import LEAST_TRIALS, build_report, draw, format_table, importance, write_tuning
from treenet.extras.tuning.trials import Trials, TuningConfig, best_trial, check_systems, end_without_result
from treenet.runs.metrics_log import read_metrics
from treeproc.common.errors import CommandEnded
from treeproc.common.settings import UserError, build_settings, dump_settings, load_settings

ROOT = Path(__file__).resolve().parent.parent
SEARCH = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "batch": {"max_tokens": 64},
    "max_steps": 30,
    "log_every": 5,
    "checkpoint_every": 5,
    "validate_every": 5,
    "workers": 0,
    "tune": {"trials": 3, "parallel": 2},
}


SYSTEM = {"transformer": {"model": {"name": "transformer"}}}


def settings(data: Path, **tune) -> TuningConfig:
    return build_settings(TuningConfig, {**SEARCH, "data": str(data), "tune": {**SEARCH["tune"], **tune}}, "here")


def test_settings_of_the_space_that_a_system_does_not_read_are_told(data, tmp_path, capsys):
    space = {
        "model.dropout": {"choices": [0.1, 0.2]},
        "model.tree.subtree_mask": {"choices": [True, False]},
        "model.tree_reg.weight": {"choices": [0.0, 0.1]},  # of causal language models
    }
    config = settings(data, space=space)
    with pytest.raises(UserError, match=r"tune.space.model.tree_reg.weight: no system reads it; leave it out"):
        check_systems({name: Trials(tmp_path, config, name) for name in config.tune.systems})
    del space["model.tree_reg.weight"]
    config = settings(data, space=space)
    check_systems({name: Trials(tmp_path, config, name) for name in config.tune.systems})
    assert capsys.readouterr().err == "note: tune.space: transformer does not read model.tree.subtree_mask\n"
    space["model.name"] = {"choices": ["transformer", "tree_transformer"]}  # whose last value reads it
    check_systems({"any": Trials(tmp_path, settings(data, space=space, systems={"any": {}}), "any")})
    assert capsys.readouterr().err == ""


def test_systems_with_other_pieces_are_refused(data, tmp_path):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    index = json.loads((other / "encoded" / "index.json").read_text())
    (other / "encoded" / "index.json").write_text(json.dumps(index | {"text_fingerprint": "0" * 16}))
    config = settings(data, systems={"one": {}, "two": {"data": str(other)}})
    with pytest.raises(UserError, match="other and .* differ in text, but all models of a study must read the same pieces"):
        check_systems({name: Trials(tmp_path, config, name) for name in config.tune.systems})


def test_a_training_that_sigterm_stopped_continues(data, tmp_path, monkeypatch):
    from treenet.extras.tuning import ray_trials

    trials = Trials(tmp_path, settings(data), "transformer")
    trial = trials.begin({"optimizer.learning_rate": 0.001, "model.dropout": 0.2})
    starts = iter([(10, INTERRUPTED), (30, DONE)])

    def train(cell, *arguments):
        step, status = next(starts)
        lines = [{"event": "valid", "step": at, "nll": 5 - at / 10} for at in range(5, step + 1, 5)]
        (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return CellResult(status, 1.0)

    class Task:
        options = lambda self, **options: self  # noqa: E731
        remote = staticmethod(train)

    ray = SimpleNamespace(remote=lambda function: Task(), wait=lambda refs, timeout: (refs, []), get=lambda ref: ref)
    said = []
    monkeypatch.setattr(ray_trials, "ray", ray)
    monkeypatch.setattr(ray_trials, "tune", SimpleNamespace(report=said.append))
    room = SimpleNamespace(in_first_bundle=dict)
    ray_trials._run_trial({"trial": trial, "room": room}, trials, 1)
    assert [(line["step"], line.get("status")) for line in said] == [*((at, None) for at in range(5, 31, 5)), (30, DONE)]


def test_a_data_set_without_validation_is_refused_before_the_first_trial(data, tmp_path):
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    index = json.loads((folder / "encoded" / "index.json").read_text())
    del index["totals"]["valid"]
    (folder / "encoded" / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="a search needs a validation split, but .*data has none; preprocess with splits.valid"):
        Trials(tmp_path, settings(folder), "transformer")


def test_trials_are_kept_and_continue_only_with_the_same_search(data, tmp_path):
    config = settings(data)
    trials = Trials(tmp_path, config, "transformer")
    trials.begin({"optimizer.learning_rate": 0.001, "model.dropout": 0.2})
    trials.end(trials.trials[0], DONE, [(5, 4.0)])
    trials.end(trials.trials[0], FAILED, [], "late")  # what ended stays
    Trials(tmp_path, config, "tree_transformer").begin({"optimizer.learning_rate": 0.002, "model.dropout": 0.1})
    (tmp_path / "config.yaml").write_text(dump_settings(config))

    again = Trials(tmp_path, settings(data, trials=9, parallel=1), "transformer")
    [trial] = again.trials
    assert [trial] == again.ended() and (trial.number, trial.entry.status) == (0, DONE)
    assert trial.values == {"optimizer.learning_rate": 0.001, "model.dropout": 0.2} and (trial.updates, trial.best) == (5, 4.0)
    assert (trial.cell.folder, trial.cell.config.model.name) == (tmp_path / "cells" / "transformer-000", "transformer")
    assert (trial.cell.config.optimizer.learning_rate, trial.cell.config.model.dropout) == (0.001, 0.2)
    assert list(again.ledger.entries) == ["transformer-000", "tree_transformer-000"]

    with pytest.raises(UserError, match="trials of another search .*tune.search: 'optuna' -> 'random'.*choose another --out"):
        Trials(tmp_path, settings(data, search="random"), "transformer")
    wider = {"optimizer.learning_rate": {"low": 3e-4, "high": 1, "scale": "log"}, "model.dropout": {"choices": [0.1, 0.2, 0.3]}}
    with pytest.raises(UserError, match="tune.space.optimizer.learning_rate.high: 0.01 -> 1"):
        Trials(tmp_path, settings(data, space=wider), "transformer")
    space = {key: dimension.model_dump() for key, dimension in reversed(config.tune.space.items())}
    with pytest.raises(UserError, match="another search .tune.space: another order of the same settings.; choose another --out"):
        Trials(tmp_path, settings(data, space=space), "transformer")
    with pytest.raises(UserError, match="max_steps: 30 -> 40"):
        Trials(tmp_path, config.model_copy(update={"max_steps": 40}), "transformer")


def test_relative_paths_are_those_of_the_command_in_any_process(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.parent)
    values = {"optimizer.learning_rate": 0.001, "model.dropout": 0.2}
    config = settings(Path(data.name), systems={"one": {"init": "run"}, "other": {"data": data.name}})
    systems = [pickle.loads(pickle.dumps(Trials(tmp_path, config, name))) for name in config.tune.systems]
    monkeypatch.chdir(tmp_path)  # as Ray Tune does for the process of a trial
    one, other = (trials.config_of(values) for trials in systems)
    assert one.data == other.data == data.resolve() and one.init == data.resolve().parent / "run"


def test_a_search_in_which_a_system_has_no_result_ends_with_an_error(data, tmp_path, capsys):
    config, systems = settings(data, systems=SYSTEM), {}
    for folder, statuses in (("some", (DONE, FAILED)), ("none", (FAILED, STOPPED))):
        (tmp_path / folder).mkdir()
        trials = systems[folder] = Trials(tmp_path / folder, config, "transformer")
        for status in statuses:
            trials.end(trials.begin({}), status, [(5, 1.0)], "data is missing" if status == FAILED else "")
    end_without_result({"transformer": systems["some"]}, tmp_path)
    warning = f"warning: 1 of 2 trials of transformer failed, the first: data is missing; see {tmp_path / 'ledger.json'}\n"
    assert capsys.readouterr().err == warning
    with pytest.raises(CommandEnded, match="no trial of transformer is done.*remove .*ledger.json") as ended:
        end_without_result({"transformer": systems["none"]}, tmp_path)
    assert ended.value.status == 1 and capsys.readouterr().err == warning


def test_systems_that_write_in_turn_keep_each_other(data, tmp_path):
    config, values = settings(data), {"optimizer.learning_rate": 0.001, "model.dropout": 0.2}
    systems = [Trials(tmp_path, config, name) for name in config.tune.systems]
    for trials in (*systems, *systems):
        trials.begin(values)
    for trials in systems:
        trials.end(trials.trials[0], DONE, [(5, 4.0)])
    again = [Trials(tmp_path, config, name).trials for name in config.tune.systems]
    assert again == [trials.trials for trials in systems]
    assert [[trial.entry.status for trial in trials] for trials in again] == [[DONE, "running"]] * 2


def test_a_search_does_not_continue_with_another_encoder(data, tmp_path):
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "model.safetensors").write_bytes(b"weights")
    config = settings(data, systems={"transformer": {"model": {"pretrained": {"folder": str(encoder)}}}})
    Trials(tmp_path, config, "transformer").begin({"optimizer.learning_rate": 0.001, "model.dropout": 0.2})
    assert len(Trials(tmp_path, config, "transformer").trials) == 1
    (encoder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(UserError, match=r"holds cells with other settings \(transformer-000: the weights in .*encoder\)"):
        Trials(tmp_path, config, "transformer")


@pytest.mark.parametrize(
    "damage", [{"labels": []}, {"labels": {"number": 0}}, {"result": {"criterion": None}}, {"status": "new"}, {"more": 1}]
)
def test_a_damaged_record_is_refused(damage, data, tmp_path):
    trials = Trials(tmp_path, settings(data), "transformer")
    trials.end(trials.begin({"optimizer.learning_rate": 0.001, "model.dropout": 0.2}), DONE, [(5, 4.0)])
    content = json.loads((tmp_path / "ledger.json").read_bytes())
    content["cells"]["transformer-000"] |= damage
    (tmp_path / "ledger.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="ledger.json is damaged"):
        Trials(tmp_path, settings(data), "transformer")


def record(data: Path, folder: Path, config: TuningConfig) -> dict[str, Trials]:
    """Two systems whose criterion depends on the learning rate alone, with one stopped and one failed trial."""
    systems = {name: Trials(folder, config, name) for name in config.tune.systems}
    for trials in systems.values():
        for number in range(LEAST_TRIALS + 4):
            rate = 3e-4 * 1.3**number
            trial = trials.begin({"optimizer.learning_rate": rate, "model.dropout": (0.1, 0.2, 0.3)[number % 3]})
            trials.end(trial, STOPPED if number == 0 else DONE, [(5, 5.0), (30, 1 + number / 10)])
        trials.end(trials.begin({"optimizer.learning_rate": 0.005, "model.dropout": 0.1}), FAILED, [], "no")
    return systems


@pytest.mark.slow
def test_the_report_has_the_best_finished_trial_and_the_importances(data, tmp_path, rendered, monkeypatch):
    config = settings(data)
    systems = record(data, tmp_path, config)
    said = write_tuning(config, systems, tmp_path)
    report = json.loads((tmp_path / "tuning.json").read_bytes())
    facts = report["systems"]["transformer"]
    assert (facts[DONE], facts[STOPPED], facts[FAILED], facts["best"]["number"]) == (LEAST_TRIALS + 3, 1, 1, 1)  # 0 was stopped
    assert facts["importance"]["optimizer.learning_rate"] > 0.7 and sum(facts["importance"].values()) == pytest.approx(
        1, abs=1e-3
    )
    assert (tmp_path / "importance.png").read_bytes().startswith(b"\x89PNG") and "not fair" not in said
    best = load_settings(TrainConfig, tmp_path / "best-transformer.yaml")
    assert best.optimizer.learning_rate == pytest.approx(3e-4 * 1.3) and best.model.name == "transformer"
    assert len(draw(report).axes[0].patches) == 2 * 2
    assert f"{report['criterion']}" == "validation nll" and "1.1000" in format_table(report)
    assert "tree-attention scaling" in said
    for task in ("classification", "causal_lm"):
        assert "tree-attention compare-seeds" in format_table({**report, "task": task})

    for tied in (0, 1):  # all trials, or all but the best one, have one criterion: nothing is known
        trials = Trials(tmp_path / f"tied{tied}", config, "transformer")
        (tmp_path / f"tied{tied}").mkdir()
        for number in range(LEAST_TRIALS + 2):
            values = {"optimizer.learning_rate": 3e-4 * 1.1**number, "model.dropout": (0.1, 0.2)[number % 2]}
            trials.end(trials.begin(values), DONE, [(5, 2.0 - 0.1 * tied * (number == 3))])
        assert importance(config, trials) == {}
    write_tuning(config, {"transformer": trials}, tmp_path)
    assert not (tmp_path / "importance.png").exists()  # it was that of fewer trials

    longer = systems["transformer"]  # as a system that is added later, with fewer trials
    longer.end(longer.begin({"optimizer.learning_rate": 1e-3, "model.dropout": 0.1}), DONE, [(5, 2.0)])
    assert "not fair" in format_table(build_report(config, systems))
    few = Trials(tmp_path / "few", config, "transformer")
    assert importance(config, few) == {} and best_trial(few.trials) is None
    assert "no trial is done" in format_table(build_report(config, {"transformer": few}))

    assert "nothing was learned" not in said
    (tmp_path / "few").mkdir()
    few.end(few.begin({"optimizer.learning_rate": 1e-3, "model.dropout": 0.1}), DONE, [(5, 9.0)])
    monkeypatch.setattr("treenet.tasks.learning._FEWEST", 1)  # the data set has few lines
    table = format_table(build_report(config, {**systems, "few": few}))
    assert "nothing was learned; train longer: few (nll 9.000, a unigram model of train has" in table


class Room:
    """Rooms of a cluster that has `left` of them."""

    def __init__(self, left: int):
        self.left, self.wanted = left, []

    def want(self, count: int) -> None:
        self.wanted.append(count)

    def take(self) -> str | None:
        self.left -= 1
        return "room" if self.left >= 0 else None

    def describe(self) -> str:
        return "waits"


def test_a_trial_is_drawn_when_there_is_room_and_asks_for_no_more_than_run_at_a_time(data, tmp_path):
    from treenet.extras.tuning.ray_trials import _Search

    trials, rooms = Trials(tmp_path, settings(data, trials=3, parallel=2), "transformer"), Room(1)
    search = _Search(settings(data, trials=3, parallel=2), trials, rooms, 3)
    assert search.suggest("a")["room"] == "room" and search.suggest("b") is None
    assert len(trials.trials) == 1 and rooms.wanted == [2, 1]
    search.on_trial_complete("a", {"criterion": 1.0})
    rooms.left = 5
    assert search.suggest("b")["trial"].number == 1 and search.suggest("c")["trial"].number == 2 and rooms.wanted[2:] == [2, 1]


@pytest.mark.slow
def test_systems_begin_with_the_same_draws_and_recorded_trials_come_first(data, tmp_path):
    from treenet.extras.tuning.ray_trials import _Search

    config = settings(data)
    drawn = {}
    for name in config.tune.systems:
        trials = Trials(tmp_path, config, name)
        search = _Search(config, trials, Room(9), 4)
        drawn[name] = [search.suggest(f"trial{number}") for number in range(4)]
        drawn[name] = [draw["trial"].values for draw in drawn[name]]
        assert [trial.values for trial in trials.trials] == drawn[name] and [t.number for t in trials.trials] == [0, 1, 2, 3]
        for values in drawn[name]:
            assert 3e-4 <= values["optimizer.learning_rate"] <= 1e-2 and values["model.dropout"] in (0.1, 0.2, 0.3)
    assert drawn["transformer"] == drawn["tree_transformer"]

    again = Trials(tmp_path, config, "transformer")
    search = _Search(config, again, Room(9), 5)
    repeated = [search.suggest(f"again{number}")["trial"] for number in range(5)]
    assert [trial.values for trial in repeated][:4] == drawn["transformer"] and len(again.trials) == 5
    (tmp_path / "whole").mkdir()
    whole = _Search(config, Trials(tmp_path / "whole", config, "transformer"), Room(9), 5)
    assert [whole.suggest(f"trial{number}")["trial"].values for number in range(5)] == [trial.values for trial in repeated]
    assert [trial.entry.starts for trial in again.trials] == [2, 2, 2, 2, 1]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_search_is_killed_and_continues(data, tmp_path):
    """A search with a run that fails, and a kill in the middle."""
    space = {"optimizer.learning_rate": {"low": 1e-3, "high": 1e-2, "scale": "log"}, "model.num_heads": {"choices": [2, 3]}}
    config = {**SEARCH, "data": str(data), "tune": {**SEARCH["tune"], "space": space, "grace_steps": 10, "systems": SYSTEM}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, str(ROOT / "workflows" / "tune.py"), "--config", str(tmp_path / "config.yaml")]
    command += ["--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ledger = tmp_path / "out" / "ledger.json"
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        wait_for(lambda: any((tmp_path / "out" / "cells").glob("*/checkpoints/step_*")), job, 250, tmp_path / "log")
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    before = _trials(ledger)

    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = _trials(ledger)
    assert [trial["labels"] for trial in found[: len(before)]] == [trial["labels"] for trial in before]
    assert [trial["labels"]["number"] for trial in found] == [0, 1, 2] and any(trial["starts"] == 2 for trial in found)
    for trial in found:
        bad = trial["labels"]["model.num_heads"] != 2
        assert (trial["status"] == FAILED) == bad and ("d_model" in trial["error"]) == bad, trial
        assert bad or (trial["status"] == DONE) == (trial["result"]["updates"] == 30)
        assert bad or trial["settings"]["optimizer"]["learning_rate"] == trial["labels"]["optimizer.learning_rate"]
        lines = read_metrics(tmp_path / "out" / "cells" / f"transformer-{trial['labels']['number']:03d}")
        valid = [line["nll"] for line in lines if line["event"] == "valid" and line["step"] <= trial["result"].get("updates", 0)]
        assert bad or trial["result"]["criterion"] == min(valid)
    assert "validation nll" in done.stdout and (tmp_path / "out" / "tuning.json").exists()

    content = ledger.read_bytes()
    again = run_here("tune.py", *command[2:])
    assert again.returncode == 0 and ledger.read_bytes() == content and "Ray" not in again.stderr


def _trials(path: Path) -> list[dict]:
    return list(json.loads(path.read_bytes())["cells"].values())
