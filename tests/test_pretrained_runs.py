"""Runs with a pretrained encoder: continued elsewhere, on several workers, and shared."""

import json
import os
import pickle
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from commands import PROCESSES, main_of, print_to, run_here, without_times
from test_pretrained import config_of, damage_config, leaves_of, made
from tiny_pretrained import write_both
from toyruns import losses, train_ranks

from treenet import from_pretrained, load_run
from treenet.experiments import study as study_module
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.seeds_report import FORM
from treenet.experiments.study import make_study, run_study, show_study
from treenet.extras.frozen_states import write_states
from treenet.jobs.train_run import run_training
from treenet.runs.loading import load_model
from treeproc.common.command_line import run_cli
from treeproc.common.settings import UserError, load_settings

pytestmark = pytest.mark.slow

__all__ = ["made"]  # a fixture


def test_a_run_continues_if_its_encoder_moves_and_not_if_its_settings_change(made, tmp_path):
    encoder = shutil.copytree(made[0], tmp_path / "first")
    config = config_of(made, model={"name": "tree_transformer"})
    run_training(config, tmp_path / "whole")
    run_training(config_of((encoder, made[1]), model={"name": "tree_transformer"}, max_steps=2), tmp_path / "run")
    encoder = encoder.rename(tmp_path / "second")
    damage_config(encoder, hidden_dropout_prob=0.4, transformers_version="9")
    config = config_of((encoder, made[1]), model={"name": "tree_transformer"})
    changed = r"other settings \(config.json of model.pretrained.folder.hidden_dropout_prob: 0.1 -> 0.4\)"
    with pytest.raises(UserError, match=changed):
        run_training(config, tmp_path / "run")
    damage_config(encoder, hidden_dropout_prob=0.1)
    assert run_training(config, tmp_path / "run").step == 4
    whole, moved = (load_model(tmp_path / name).model.state_dict() for name in ("whole", "run"))
    assert all(torch.equal(value, moved[name]) for name, value in whole.items())


def two_ranks_learn_as_one(made, folder, **changes):
    """Train in `folder` / "one" and "two". Dropout of states is by key; that of attention weights is PyTorch's, and off here."""
    encoder = shutil.copytree(made[0], folder / "encoder")
    damage_config(encoder, attention_probs_dropout_prob=0.0)
    settings = {"model": {"name": "tree_transformer"}, "batch": {"max_tokens": 64}, "log_every": 1} | changes
    config = config_of((encoder, made[1]), **settings)
    run_training(config, folder / "one")
    (folder / "two").mkdir()
    shutil.copytree(folder / "one" / "initial", folder / "two" / "initial")
    assert train_ranks(2, config, folder / "two") == [None, None]
    first, second = ([loss for _, loss in losses(folder / run)] for run in ("one", "two"))
    assert len(first) == 4 and first == pytest.approx(second, rel=1e-4)


def test_two_ranks_learn_as_one(made, tmp_path):
    two_ranks_learn_as_one(made, tmp_path)


@pytest.mark.cluster
def test_workers_of_ray_learn_as_one_process_does(made, tmp_path, monkeypatch):
    """They are started elsewhere, and get the folder of the encoder by its absolute path."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'tree-attention[ray]'")
    monkeypatch.chdir(made[0].parent)
    config = config_of((made[0].relative_to(made[0].parent), made[1]), model={"name": "tree_transformer"}, log_every=1)
    run_training(config, tmp_path / "here")
    run_training(config.model_copy(update={"workers": 1}), tmp_path / "ray")
    here, ray = (load_model(tmp_path / name).model.state_dict() for name in ("here", "ray"))
    assert losses(tmp_path / "here") == losses(tmp_path / "ray")
    assert all(torch.equal(value, ray[name]) for name, value in here.items())


def test_a_classifier_is_shared_without_its_encoder(made, tmp_path):
    """`save_pretrained` writes all that `from_pretrained` and the server need, and no place of this machine."""
    encoder = shutil.copytree(made[0], tmp_path / "private" / "encoder")
    config = config_of((encoder, made[1]), classifier={"supervision": "all_phrases"})
    run_training(config, tmp_path / "private" / "run")
    run = load_run(tmp_path / "private" / "run")
    lines, trees = (
        ["We do n't know", "He knows her"],
        ["(S (X We) (S (S (X do) (X n't)) (X know)))", "(S (X He) (S (X knows) (X her)))"],
    )
    wanted = run.classify(lines, trees=trees)
    with pytest.raises(UserError, match="no classes of phrases, because model.name = pretrained has no nodes; leave"):
        run.classify(lines, trees=trees, phrases=True)
    run.save_pretrained(tmp_path / "shared")
    shutil.rmtree(tmp_path / "private")
    shared = from_pretrained(tmp_path / "shared")
    assert shared.classify(lines, trees=trees) == wanted and shared.classes == run.classes
    texts = [path.read_text() for path in (tmp_path / "shared").rglob("*") if path.suffix in (".json", ".yaml", ".md")]
    assert len(texts) > 4 and not any(str(tmp_path) in text for text in texts)


def change_weights(encoder: Path, **values: torch.Tensor) -> None:
    path = encoder / "model.safetensors"
    save_file(load_file(path) | values, path, {"format": "pt"})


def cast_weights(encoder: Path, dtype: torch.dtype) -> None:
    change_weights(encoder, **{name: value.to(dtype) for name, value in load_file(encoder / "model.safetensors").items()})


def name_weights(encoder: Path, name: str) -> None:
    """Move the weights to a file with this name, which the index names."""
    names = dict.fromkeys(load_file(encoder / "model.safetensors"), name)
    (encoder / "model.safetensors").rename(encoder / name)
    (encoder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda encoder: (encoder / "model.safetensors").write_bytes(pickle.dumps([1] * 99)), "cannot read the weights of .*"),
        (lambda encoder: os.truncate(encoder / "model.safetensors", 4000), "cannot read the weights of .*"),
        (lambda encoder: change_weights(encoder, **{"embeddings.LayerNorm.bias": torch.full((16,), torch.nan)}), "not finite"),
        (
            lambda encoder: cast_weights(encoder, torch.int8),
            "weights of type I8: .*; choose an encoder in full or half precision",
        ),
        (lambda encoder: cast_weights(encoder, torch.float8_e4m3fn), "weights of type F8_E4M3: "),
        (lambda encoder: damage_config(encoder, intermediate_size=8), r"of shape \(24,\), and its config.json describes \(8,\)"),
        (lambda encoder: damage_config(encoder, num_attention_heads=3), "config.json .* describes no model"),
        (lambda encoder: damage_config(encoder, hidden_act="evil"), "config.json .* describes no model"),
        (lambda encoder: damage_config(encoder, hidden_size="16"), "config.json .* describes no model"),
        (lambda encoder: damage_config(encoder, vocab_size=None), "a number as vocab_size"),
        (lambda encoder: damage_config(encoder, model_type=["bert"]), "a model of type .*, which is not an encoder"),
        (lambda encoder: name_weights(encoder, "../outside.safetensors"), "must name files of safetensors in its folder"),
        (lambda encoder: name_weights(encoder, "weights.bin"), "must name files of safetensors in its folder"),
    ],
)
def test_a_damaged_encoder_is_one_line(made, tmp_path, damage, message, capfd):
    encoder = shutil.copytree(made[0], tmp_path / "encoder")
    damage(encoder)
    with pytest.raises(UserError, match=message) as raised:
        run_training(config_of((encoder, made[1])), tmp_path / "run")
    with pytest.raises(UserError, match=message):
        write_states(made[1], encoder, tmp_path / "states", in_this_process=True)
    assert not (tmp_path / "states").exists()
    assert "\n" not in str(raised.value) and capfd.readouterr().err == ""


def test_weights_of_half_precision_and_other_heads_say_nothing(made, tmp_path, capfd):
    """Old folders also hold the numbers of positions, which are no weights."""
    encoder = shutil.copytree(made[0], tmp_path / "encoder")
    cast_weights(encoder, torch.float16)
    change_weights(encoder, **{"cls.predictions.bias": torch.zeros(78), "embeddings.position_ids": torch.arange(40)[None]})
    leaves = leaves_of(encoder, made[1])
    assert {value.dtype for value in leaves.pretrained.parameters()} == {torch.float32}
    assert capfd.readouterr().err == ""


def test_code_that_a_configuration_names_is_not_run(made, tmp_path):
    """Transformers would download the layer from there, and run its code."""
    encoder = shutil.copytree(made[0], tmp_path / "encoder")
    (encoder / "evil.py").write_text("raise SystemExit(9)\n")
    damage_config(encoder, _attn_implementation="somebody/kernel", attn_implementation="somebody/kernel")
    damage_config(encoder, auto_map={"AutoModel": "evil.Model", "AutoConfig": "evil.Config"})
    config = config_of((encoder, made[1]), log_every=1)
    run_training(config, tmp_path / "run")
    run_training(config_of(made, log_every=1), tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


# Studies over seeds.


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """An encoder, and a data set with a test split."""
    folder = tmp_path_factory.mktemp("compared")
    splits = {name: {"source": [folder / "train.txt"]} for name in ("train", "valid", "test")}
    return write_both(folder, splits=splits)


def study_of(made, out: Path, systems: dict, records: Path | None = None, **changes: object):
    """A study of two seeds over the settings of `config_of`."""
    cells = {name: {"model": {"name": "pretrained"}, **one} for name, one in systems.items()}
    grid = {"systems": cells, "seeds": [1, 2], "baseline": next(iter(systems))}
    values = config_of(made).model_dump(mode="json") | {"max_steps": 2, "average_checkpoints": 1, "keep_checkpoints": 1} | changes
    return make_study(FORM, load_settings(SeedsConfig, None, **values, grid=grid), out, records)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ({"model": {"pretrained": {"folder": "/nowhere/bert"}}}, "model.pretrained.folder: /nowhere/bert has no config.json"),
        ({"freeze": ["encoder.embedding.pretrained.*"], "frozen_states": "/nowhere/states"}, "/nowhere/states"),
        ({"freeze": ["encoder.embedding.pretrained.*"], "lr_scale": {"encoder.embedding.*": 2}}, "lr_scale: .* changes nothing"),
        ({"model": {"name": "child_sum_tree_lstm"}}, "has no arcs, which this model reads; preprocess again with parser.depend"),
        ({"freeze": ["encoder.pretrained.*"]}, "freeze: 'encoder.pretrained.*' matches no parameter"),
    ],
)
def test_a_study_finds_before_its_first_cell_what_a_later_system_lacks(compared, tmp_path, system, message):
    with pytest.raises(UserError, match=f"^other-seed1: .*{message}"):
        run_study(study_of(compared, tmp_path / "out", {"good": {}, "other": system}))
    assert not (tmp_path / "out").exists()


def test_a_system_takes_back_a_rate_and_a_finished_study_needs_no_encoder(compared, tmp_path, capsys):
    encoder = shutil.copytree(compared[0], tmp_path / "encoder")
    frozen = {"freeze": ["encoder.embedding.pretrained.*"], "lr_scale": {}}
    arguments = ((encoder, compared[1]), tmp_path / "out", {"trained": {}, "frozen": frozen})
    scale, records = {"lr_scale": {"encoder.embedding.pretrained.*": 0.05}}, tmp_path / "records"
    run_study(study_of(*arguments, records, **scale))
    weights = load_file(path := encoder / "model.safetensors")
    save_file({name: weight + 0.01 for name, weight in weights.items()}, path, {"format": "pt"})
    with pytest.raises(UserError, match=rf"holds cells with other settings \(trained-seed1: the weights in {encoder}\)"):
        run_study(study_of(*arguments, **scale))
    with pytest.raises(UserError, match=rf"trained-seed1.json is a record with other settings \(the weights in {encoder}\)"):
        run_study(study_of(arguments[0], tmp_path / "other", arguments[2], records, **scale))
    shutil.copytree(compared[0], encoder, dirs_exist_ok=True)
    ledger = json.loads(kept := (tmp_path / "out" / "ledger.json").read_text())
    for name, changes in (("config.json", {"hidden_act": "relu"}), ("tokenizer.json", {"version": "2.0"})):
        described = (encoder / name).read_text()
        (encoder / name).write_text(json.dumps(json.loads(described) | changes))
        for folder, kind in ((tmp_path / "out", None), (tmp_path / "other", records)):
            with pytest.raises(UserError, match=rf"with other settings \((trained-seed1: )?{name} in {encoder}\)"):
                run_study(study_of(arguments[0], folder, arguments[2], kind, **scale))
        for entry in ledger["cells"].values():  # as some of our records have it
            entry["encoder"] = entry["encoder"].split()[0]
        (tmp_path / "out" / "ledger.json").write_text(json.dumps(ledger))
        run_study(study_of(*arguments, **scale))
        (tmp_path / "out" / "ledger.json").write_text(kept)
        (encoder / name).write_text(described)
    described = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(described | {"transformers_version": "1"}))
    run_study(study_of(*arguments, **scale))
    shutil.rmtree(encoder)
    capsys.readouterr()
    run_study(study_of(*arguments, **scale))
    assert "frozen " in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out" / "cells" / "frozen-seed2")
    with pytest.raises(UserError, match="^frozen-seed2: model.pretrained.folder: .* has no config.json"):
        run_study(study_of(*arguments, **scale))


def test_the_dry_run_of_a_study_says_how_much_disk_all_cells_take(compared, tmp_path, monkeypatch, capsys):
    """Two cells have a trained encoder, two a frozen one, which stands once in each."""
    frozen = {"freeze": ["encoder.embedding.pretrained.*"], "lr_scale": {}}
    study = study_of(compared, tmp_path / "out", {"trained": {}, "frozen": frozen}, log_every=1)
    monkeypatch.setattr(study_module, "show_size", lambda count: f"{count} bytes")

    def said() -> int:
        return int(re.search(r"\ndisk: (\d+) bytes at most for all cells that are not done; the disk has ", show_study(study))[1])

    needed = said()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(study_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    run_study(study)
    warned = f"warning: the cells that are not done may take {needed} bytes, and {tmp_path / 'out'} has {needed - 1} bytes free"
    assert warned in capsys.readouterr().err and said() == 0
    taken = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.suffix in (".safetensors", ".pt"))
    assert 0.5 * needed < taken < needed


def killed_at(pattern: str, argv: list[str], log: Path) -> None:
    """Run the command until it renames a file that fits the pattern."""

    def kill(event: str, arguments: tuple) -> None:
        if event == "os.rename" and re.search(pattern, str(arguments[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    print_to(log)
    sys.argv = argv
    sys.addaudithook(kill)
    run_cli(main_of(argv[0]))


@pytest.mark.cluster
def test_a_killed_study_ends_as_one_that_was_not(compared, tmp_path):
    """The study has a trained encoder and one with states in files. The kills come before files have their names."""
    encoder, data = compared
    write_states(data, encoder, tmp_path / "states", in_this_process=True)
    frozen = {"freeze": ["encoder.embedding.pretrained.*"], "lr_scale": {}, "frozen_states": str(tmp_path / "states")}
    tree = {"name": "tree_transformer", "tree": {"nodes": "labels_and_leaves"}}
    systems = {"trained": {}, "tree": {"model": tree, **frozen}}
    values = config_of(compared, lr_scale={"encoder.embedding.pretrained.*": 0.05}, log_every=1).model_dump(mode="json")
    values |= {"loggers": [], "keep_checkpoints": 1, "grid": {"systems": systems, "seeds": [1], "baseline": "trained"}}
    (tmp_path / "study.yaml").write_text(json.dumps(values))

    def arguments(name: str) -> list[str]:
        places = {"--config": tmp_path / "study.yaml", "--out": tmp_path / name, "--records": tmp_path / f"{name}_records"}
        return [str(part) for pair in places.items() for part in pair]

    for pattern in ("trained-seed1/.*step_00000004", "tree-seed1/.*initial", "tree-seed1/.*step_00000004"):
        process = PROCESSES.Process(
            target=killed_at, args=(pattern, ["compare_seeds.py", *arguments("killed")], tmp_path / "log")
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (pattern, (tmp_path / "log").read_text())
    for name in ("killed", "whole"):
        done = run_here("compare_seeds.py", *arguments(name))
        assert done.returncode == 0, done.stderr
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert without_times(killed / "comparison.json") == without_times(whole / "comparison.json")
    for cell in ("trained-seed1", "tree-seed1"):
        one, other = whole / "cells" / cell, killed / "cells" / cell
        assert len(losses(one)) == 4 and losses(one) == losses(other)
        for file in ("averaged/model.safetensors", "predictions.test.tsv", "checkpoints/step_00000004/model.safetensors"):
            assert (one / file).read_bytes() == (other / file).read_bytes(), file
        one, other = (json.loads((tmp_path / f"{name}_records" / f"{cell}.json").read_text()) for name in ("whole", "killed"))
        for record in (one, other):
            record["training"] = {name: record["training"][name] for name in ("updates", "averaged_steps")}
        assert one == other
