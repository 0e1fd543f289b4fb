"""The dry run: what it says of sizes agrees with the plan, of hours with the probe, and it leaves nothing behind."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from treenet.config import TrainConfig
from treenet.data.examples import ExampleSource
from treenet.data.plan import BatchPlan
from treenet.jobs import dry_run as dry_run_module
from treenet.jobs.dry_run import disk_of_run, dry_run, show_size
from treenet.jobs.train_job import Job
from treenet.jobs.train_run import run_training
from treenet.runs import averaging as averaging_module
from treenet.runs import checkpoint as checkpoint_module
from treenet.runs.run_folder import read_facts
from treeproc.common.settings import UserError, dump_settings, load_settings
from treeproc.shards.store import read_index

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "batch": {"max_tokens": 64, "fraction": 0.7, "max_leaves": 8},
    "max_steps": 20,
    "validate_every": 10,
    "checkpoint_every": 5,
    "workers": 0,
}


def make_config(data: Path, *overrides: str) -> TrainConfig:
    return load_settings(TrainConfig, None, overrides, **json.loads(json.dumps(TINY)), data=data)


def test_sizes_are_those_of_the_plan_and_nothing_is_left_behind(data, tmp_path, caplog):
    config = make_config(data)
    with caplog.at_level("INFO"):
        text = dry_run(config, tmp_path / "run")
    assert "dry run: training 11 updates in a temporary folder, to measure speed and memory" in caplog.text
    source = ExampleSource(data / "encoded", "train")
    plan = BatchPlan.build(
        source.lengths, config.batch, text_fingerprint=read_index(data / "encoded")["text_fingerprint"], seed=config.seed
    )
    batches = [plan.batch(step) for step in range(plan.num_batches)]
    targets = sum(source.target_tokens(rows) for rows in batches) / len(batches)
    leaves = sum(int(source.lengths["leaves"][rows].sum()) for rows in batches) / len(batches)
    assert f"data: {sum(map(len, batches))} training pairs; left out: " in text
    assert f"{plan.left_out['fraction']} by fraction, {plan.left_out['length']} by length" in text
    assert f"update: {targets:,.0f} target tokens, {leaves:,.0f} leaves and " in text and "(budget 64), in this process" in text
    assert f"plan: 20 updates, {20 / len(batches):,.1f} epochs of {len(batches)}" in text
    assert "probe: 10 updates in " in text and text.splitlines()[-1].startswith("  training takes about ")
    assert list(tmp_path.iterdir()) == []


def test_the_sizes_of_pairs_of_texts_are_those_of_their_padding(data):
    facts = {"examples": 8, "target_tokens": 8, "leaves": 80, "nodes": 40, "batches_per_epoch": 4}
    facts |= {"left_out": {}, "parameters": 1}
    padded = "20 leaves and 10 nodes (of a pair, twice those of its longer sentence) of 2.0 "
    for task, pairs, said in (
        ("relatedness", {}, padded),
        ("classification", {"pairs": True}, padded),
        ("classification", {}, "20 leaves and 10 nodes of 2.0 "),
    ):
        assert said in "".join(dry_run_module._sizes(Job(make_config(data, f"task={task}"), facts | pairs)))


def write_probe(folder: Path, config: TrainConfig) -> None:
    """Metrics of a run of two seconds an update, the first one ten, 4 s a validation."""
    lines = [
        {
            "event": "train", "step": step, "seconds": 10.0 if step == 1 else 2.0, "padding": 0.25, "data_wait": 0.01,
            "memory_gib": 0.5 * step, "nll": 1.0,
        }
        for step in range(1, config.max_steps + 1)
    ]  # fmt: skip
    lines.append({"event": "valid", "step": config.max_steps, "seconds": 4.0, "nll": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = folder / "checkpoints" / f"step_{config.max_steps:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text("{}")


def test_hours_are_those_of_the_probe(data, tmp_path, monkeypatch):
    probes = []
    monkeypatch.setattr(dry_run_module, "train_job", lambda config, folder: (probes.append(config), write_probe(folder, config)))
    text = dry_run(make_config(data, "max_steps=1000", "validate_every=100", "keep_checkpoints=500", "workers=4"), None)
    assert (probes[0].max_steps, probes[0].log_every, probes[0].workers) == (11, 1, 4)
    assert "probe: 10 updates in 20.0 s, " in text and "padding 25.0%, data wait 1.0%; validation 4.0 s" in text
    assert "memory: 5.5 GiB at most, in the process of a worker" in text  # 0.5 GiB at each of 11 updates
    assert "on 4 CPU workers" in text
    # 1000 updates of 2 s and 10 validations of 4 s.
    assert text.splitlines()[-1] == "  training takes about 0.57 hours (34:00), 0:40 of them validation"


@pytest.mark.parametrize("overrides", [(), ("ema_decay=0.9", "keep_checkpoints=2"), ("average=best", "keep_checkpoints=1")])
def test_the_disk_is_that_of_the_largest_state_of_the_run(data, tmp_path, monkeypatch, caplog, overrides):
    sizes = []

    def size_of(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt"))

    def publish(*arguments, **options):
        before(*arguments, **options)
        sizes.append(size_of(tmp_path / "run"))

    before = checkpoint_module.publish
    monkeypatch.setattr(checkpoint_module, "publish", publish)
    monkeypatch.setattr(averaging_module, "publish", publish)
    model = ("model.d_model=128", "model.d_ff=512")
    config = make_config(data, "max_steps=15", "validate_every=5", "average_checkpoints=1", *model, *overrides)
    with caplog.at_level("WARNING"):
        run_training(config, tmp_path / "run")
    facts = read_facts(tmp_path / "run")
    left_out, examples = facts["left_out"]["length"], facts["examples"]
    longer = f"{left_out} pairs that are empty or longer than batch.max_leaves = 8 or batch.max_target_pieces = 256"
    assert left_out and f"note: training leaves out {longer}, and uses {examples}" in caplog.text
    of_checkpoint, of_run = disk_of_run(config, read_facts(tmp_path / "run"))
    assert of_checkpoint == pytest.approx(size_of(tmp_path / "run" / "checkpoints" / "step_00000015"), rel=0.05)
    assert 0.95 * max(sizes) < of_run < 1.8 * max(sizes)  # the best checkpoint may be the latest
    text = dry_run(config, None)
    assert f"disk: {show_size(of_run)} at most, {show_size(of_checkpoint)} a checkpoint" in text


def test_a_run_that_is_there_is_only_looked_at(data, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_training(make_config(data, "max_steps=5"), run_dir)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    monkeypatch.setattr(dry_run_module, "train_job", lambda config, folder: write_probe(folder, config))
    text = dry_run(make_config(data), run_dir)
    assert "--out holds update 5; 15 updates remain" in text
    assert "(0:34)" in text  # 15 updates of 2 s and one validation of 4 s
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_run_shorter_than_the_probe_is_probed_to_its_end(data):
    assert "probe: 1 updates in " in dry_run(make_config(data, "max_steps=1"), None)
    assert "probe: 2 updates in " in dry_run(make_config(data, "max_steps=3"), None)


def test_a_dry_run_refuses_the_settings_that_a_run_refuses(data, tmp_path):
    with pytest.raises(UserError, match="batch.max_tokens must be at least"):
        dry_run(make_config(data, "batch.max_tokens=3"), None)
    with pytest.raises(UserError, match="nowhere is not a folder; give a data set"):
        dry_run(make_config(tmp_path / "nowhere"), None)


def test_the_workflow_needs_no_out_for_a_dry_run(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text(dump_settings(make_config(data)))
    monkeypatch.setattr(sys, "argv", ["train_wmt.py", "--config", str(tmp_path / "config.yaml"), "--dry-run", "max_steps=2"])
    runpy.run_path(str(ROOT / "workflows" / "train_wmt.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("dry run: the command writes nothing to --out\n  data: ")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
