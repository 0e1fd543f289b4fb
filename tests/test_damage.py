"""Damaged files are found before they are used, and what can be repaired is."""

import subprocess
import sys

import pytest
from toydata import write_toy_data

from treenet.analysis.attention_stats import run_attention
from treenet.config import TrainConfig
from treenet.jobs.train_run import run_training
from treenet.runs.loading import load_run
from treenet.runs.metrics_log import read_metrics
from treeproc.common.command_line import build_arg_parser, run_cli
from treeproc.common.errors import CommandEnded
from treeproc.common.settings import Settings, UserError, load_settings
from treeproc.shards.store import read_index

pytestmark = pytest.mark.slow

OVERRIDES = ("model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_encoder_layers=1", "model.num_decoder_layers=1")


@pytest.fixture
def data(tmp_path):
    write_toy_data(tmp_path / "data")
    return tmp_path / "data"


def config_of(data, *overrides) -> TrainConfig:
    return load_settings(TrainConfig, None, [f"data={data}", "workers=0", "max_steps=2", *OVERRIDES, *overrides])


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_in_a_shard_stops_training(data, tmp_path):
    flip(next((data / "encoded").glob("train-*.arrow")))
    with pytest.raises(UserError, match=r"train-.*\.arrow is damaged: its hash"):
        run_training(config_of(data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_average_is_refused_and_made_again(data, tmp_path):
    run = tmp_path / "run"
    run_training(config_of(data), run)
    load_run(run)
    flip(run / "averaged" / "model.safetensors")
    with pytest.raises(UserError, match=r"averaged is damaged \(.*\); run tree-attention average-checkpoints"):
        load_run(run)
    run_training(config_of(data), run)
    load_run(run)


@pytest.mark.parametrize("sizes", [{"d_model": 2_000_000}, {"d_ff": 10**18}])
def test_a_model_larger_than_the_memory_is_refused_before_it_is_made(data, tmp_path, sizes):
    overrides = [f"model.{name}={size}" for name, size in sizes.items()]
    with pytest.raises(UserError, match="^model: .*memory.*choose smaller") as error:
        run_training(config_of(data, *overrides), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_run_whose_sizes_were_edited_is_refused(data, tmp_path):
    run_training(config_of(data), tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("d_model: 16", "d_model: 2000000"))
    with pytest.raises(UserError, match=r"of another run \(model.d_model: 2000000 -> 16\); restore config.yaml and run.json if"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("stage", ["encoded", "text"])
def test_a_stage_in_the_place_of_a_data_set_is_told_apart(data, stage):
    (data / stage).mkdir(exist_ok=True)
    (data / stage / "index.json").touch()
    with pytest.raises(UserError, match=rf"{stage} is a single stage of a data set; give the data set: {data}$"):
        read_index(data / stage / "encoded")


_METRIC = '{"event": "train", "step": %d, "nll": 1.5}'


@pytest.mark.parametrize(
    "line",
    [
        "\0\0",  # after a power cut
        '{"event": "train", "nll": 1.5}',
        '{"step": 2, "nll": 1.5}',
        "[]",
        "3",
        '{"event": "train", "step": "2", "nll": 1.5}',
        '{"event": "train", "step": 2, "nll": "x"}',
        "[" * 100_000,
    ],
)
def test_reading_stops_at_a_line_that_is_no_metric(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text("\n".join([_METRIC % 1, line, _METRIC % 3, ""]))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("name", ["config.yaml", "vocab/labels.txt"])
def test_text_of_other_encodings_is_one_line(data, tmp_path, name):
    run_training(config_of(data), tmp_path / "run")
    path = tmp_path / "run" / name if name == "config.yaml" else data / "encoded" / name
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(UserError, match=f"^cannot read .*{name}: .*decode byte 0xff") as raised:
        load_run(tmp_path / "run") if name == "config.yaml" else run_attention(load_run(tmp_path / "run"), "test", "reference")
    assert "\n" not in str(raised.value)


def test_a_refused_setting_can_be_mended_in_the_same_folder(data, tmp_path):
    with pytest.raises(UserError, match=r"batch\.max_tokens"):
        run_training(config_of(data, "batch.max_tokens=1"), tmp_path / "run")
    assert run_training(config_of(data), tmp_path / "run").finished


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("what and where"), 2, "error: what and where\n"),
        (KeyboardInterrupt(), 130, "interrupted; to go on, run the same command again\n"),
        (CommandEnded(143, "stopped; the same command continues"), 143, "stopped; the same command continues\n"),
        (CommandEnded(2), 2, ""),
        (
            PermissionError(13, "Permission denied", "x"),
            2,
            "error: x: Permission denied; make its folder writable, or write to another place\n",
        ),
    ],
)
def test_every_end_has_its_status_and_one_line(error, status, message, capsys):
    def main(argv):
        build_arg_parser("What it does.", Settings).parse_intermixed_args([])
        raise error

    with pytest.raises(SystemExit) as end:
        run_cli(main)
    assert end.value.code == status and capsys.readouterr().err == message


def test_a_reader_that_leaves_is_no_traceback(repository):
    command = f"{sys.executable} {repository / 'workflows' / 'preprocess.py'} --help | head -n 1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert run.stdout.startswith("usage:") and "Traceback" not in run.stderr
