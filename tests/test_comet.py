"""COMET in another environment: the exchange with a real process, and real scores where that environment is there.

Most tests run our script with a stand-in for the package COMET, in a Python of its own that cannot import this project.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import wait_for

from treenet.cli import evaluate
from treenet.extras.learned_metrics import comet
from treenet.extras.learned_metrics.comet import PYTHON, CometConfig, check_comet, comet_scores
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# The score of a sample is its number of letters `e`, over 100. Libraries print to standard output too.
STAND_IN = """
import os, sys, time
class Tokenizer:
    def __call__(self, texts, verbose): return {"input_ids": [text.split() for text in texts]}
class Encoder:
    max_positions, tokenizer = 6, Tokenizer()
class Prediction:
    def __init__(self, scores): self.scores = scores
class Model:
    encoder = Encoder()
    def named_parameters(self): return [("weight", None)]
    @classmethod
    def load_from_checkpoint(cls, path, pretrained_model="its own"): return cls()
    def predict(self, samples, batch_size, gpus, progress_bar, num_workers):
        print("chatter", os.environ["HF_HUB_OFFLINE"], sys.flags.isolated)
        if any(sample["mt"] == "fail" for sample in samples): raise RuntimeError("no such thing\\nas this")
        if any(sample["mt"] == "die" for sample in samples): os._exit(7)
        if any(sample["mt"] == "few" for sample in samples): samples = samples[1:]
        if any(sample["mt"] == "wait" for sample in samples):
            open(samples[0]["src"], "w").write(str(os.getpid()))
            time.sleep(60)
        if any(sample["mt"] == "compute" for sample in samples):
            end = time.monotonic() + 3
            while time.monotonic() < end: pass
        return Prediction([sum(text.count("e") for text in sample.values()) / 100 for sample in samples])
"""


@pytest.fixture
def python(tmp_path):
    """A program that runs a script as the Python of an environment with the stand-in would."""
    packages = tmp_path / "packages"
    (packages / "comet").mkdir(parents=True)
    (packages / "unbabel_comet-9.9.dist-info").mkdir()
    (packages / "unbabel_comet-9.9.dist-info" / "METADATA").write_text("Name: unbabel-comet\nVersion: 9.9\n")
    (packages / "comet" / "models.py").write_text(STAND_IN + "str2model = {'model': Model}\n")
    (packages / "torch.py").write_text("__version__ = '2.6.0'\ndef load(*_, **__): return {'state_dict': {'weight': 0}}\n")
    load = "def load_from_checkpoint(path, local_files_only):\n    return models.Model.load_from_checkpoint(path)\n"
    (packages / "comet" / "__init__.py").write_text(f"from . import models\n{load}")
    start = f"import runpy, sys; sys.path.insert(0, {str(packages)!r}); runpy.run_path(sys.argv[1], run_name='__main__')"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\n[ "$1" = -I ] || exit 9\nexec {sys.executable} -I -c "{start}" "$2"\n')
    program.chmod(0o755)
    return program


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "hparams.yaml").write_text("class_identifier: model\n")
    torch.save({"state_dict": {"weight": torch.zeros(1)}}, folder / "checkpoints" / "model.ckpt")
    return folder


SOURCES, REFERENCES = ["eins", "zwei", "drei"], ["one", "two two", "three"]
FIRST, SECOND = ["one", "twee", "teen"], ["one", "two", "e e e e e"]


def test_scores_come_back_in_order_and_equal_samples_are_scored_once(python, model):
    found = comet_scores(CometConfig(model=model, python=python), [FIRST, SECOND], SOURCES, REFERENCES)
    assert found.values == pytest.approx(np.array([[3, 3, 5], [3, 1, 8]])) and found.num_cut == 1
    assert found.signature.startswith("model:model|sha256:") and found.signature.endswith("|Model|unbabel-comet:9.9|times 100")


def test_the_command_compares_with_it(python, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(PYTHON, str(python))
    for name, lines in {"first": FIRST, "second": SECOND, "truth": REFERENCES, "sources": SOURCES, "short": SOURCES[:2]}.items():
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    options = ["--compare", str(tmp_path / "first"), str(tmp_path / "second"), f"references={tmp_path / 'truth'}"]
    options += [f"comet.model={model}", "compare.samples=50"]
    evaluate.main([*options, f"sources={tmp_path / 'sources'}", "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())["metrics"]["comet"]
    printed, warned = capsys.readouterr()
    assert [found["baseline"], found["system"]] == pytest.approx([11 / 3, 12 / 3]) and "\nCOMET " in printed
    assert "warning: COMET: one text is longer than the model reads" in warned
    with pytest.raises(UserError, match="COMET reads the source lines; give sources=FILE"):
        evaluate.main(options)
    with pytest.raises(UserError, match=r"sources: \S+short must have 3 lines, but has 2"):
        evaluate.main([*options, f"sources={tmp_path / 'short'}"])


@pytest.mark.parametrize(
    ("line", "why"), [("fail", "as this"), ("die", "the process ended with status 7"), ("few", "it gave 1 for 2 samples")]
)
def test_a_process_that_fails_is_one_line(python, model, line, why):
    with pytest.raises(UserError) as error:
        comet_scores(CometConfig(model=model, python=python), [["one", line]], SOURCES[:2], REFERENCES[:2])
    assert str(error.value).startswith("COMET gave no scores: ") and why in str(error.value) and "\n" not in str(error.value)


def test_messages_name_the_missing_part(python, model, tmp_path, monkeypatch):
    def message(**settings):
        with pytest.raises(UserError) as error:
            check_comet(CometConfig(**({"model": model, "python": python} | settings)))
        return str(error.value)

    monkeypatch.delenv(PYTHON, raising=False)
    assert "python3 -m venv COMET && COMET/bin/pip install unbabel-comet" in message(python=None)
    assert "none is not a program" in message(python=tmp_path / "none")
    assert "has no hparams.yaml" in message(model=tmp_path / "nothing")
    assert "comet.encoder: " in message(encoder=tmp_path / "nothing")
    (model / "checkpoints" / "model.ckpt").write_bytes(b"PK nonsense")
    assert "is damaged" in message()
    (model / "checkpoints" / "model.ckpt").unlink()
    assert "has no checkpoints/model.ckpt" in message()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_checkpoint_runs_nothing_and_must_have_all_weights(python, model, tmp_path):
    (python.parent / "packages" / "torch.py").unlink()  # the real one
    config = CometConfig(model=model, python=python)
    torch.save({"state_dict": {"weight": Evil(str(tmp_path / "executed"))}}, model / "checkpoints" / "model.ckpt")
    with pytest.raises(UserError, match="COMET gave no scores: "):
        comet_scores(config, [["one"]], ["eins"], ["one"])
    assert not (tmp_path / "executed").exists()
    torch.save({"state_dict": {"other": torch.zeros(1)}}, model / "checkpoints" / "model.ckpt")
    with pytest.raises(UserError, match="lacks weight and 0 more weights"):
        comet_scores(config, [["one"]], ["eins"], ["one"])


def test_an_environment_without_comet_says_what_to_install(model, tmp_path):
    program = tmp_path / "plain"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.raises(UserError, match="cannot import COMET .*-m pip install unbabel-comet"):
        comet_scores(CometConfig(model=model, python=program), [["one"]], ["eins"], ["one"])


def test_the_process_ends_with_the_one_that_asked(python, model, tmp_path):
    started = tmp_path / "started"
    code = (
        "from treenet.extras.learned_metrics.comet import CometConfig, comet_scores\n"
        f"comet_scores(CometConfig(model={str(model)!r}, python={str(python)!r}), [['wait']], [{str(started)!r}], ['one'])"
    )
    asking = subprocess.Popen([sys.executable, "-c", code], cwd=HERE.parent)
    wait_for(lambda: started.exists() and started.read_text(), asking, 60)
    asking.kill()
    asking.wait()
    number = int(started.read_text())
    stat = Path(f"/proc/{number}/stat")
    wait_for(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", seconds=60)


def test_a_process_that_hangs_is_ended_and_one_that_computes_is_not(python, model, tmp_path, monkeypatch):
    script = tmp_path / "quick.py"
    source = comet._SCRIPT.read_text()
    script.write_text(source.replace("LOOK_S, LOOKS = 60.0, 10\n", "LOOK_S, LOOKS = 0.1, 10\n"))
    assert script.read_text() != source
    monkeypatch.setattr(comet, "_SCRIPT", script)
    config, started = CometConfig(model=model, python=python), str(tmp_path / "started")
    with pytest.raises(UserError, match=r"status 1; its last words: it hangs: no CPU time .*; run the same command again$"):
        comet_scores(config, [["wait"]], [started], ["one"])
    assert comet_scores(config, [["compute"]], ["eins"], ["one"]).values.size == 1


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"${PYTHON} names no environment that has COMET")
def test_scores_are_those_of_comets_own_call(tmp_path):
    lines = [["the cat sat .", "a dog", "not a mat"], ["the cat sat on a mat .", "a dog", "cats"]]
    sources, references = ["the dog sat", "a cat", "."], ["the cat sat on the mat .", " ".join(["the dog"] * 20), "a mat"]
    samples = [{"src": s, "mt": m, "ref": r} for one in lines for s, m, r in zip(sources, one, references, strict=True)]
    model, encoder, out = tmp_path / "model", tmp_path / "encoder", tmp_path / "out.json"
    command = [os.environ[PYTHON], HERE / "tiny_comet.py", model, encoder, json.dumps(samples), out]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    config = CometConfig(model=model, encoder=encoder, batch_size=4)
    check_comet(config)
    found = comet_scores(config, lines, sources, references)
    assert found.values.reshape(-1) == pytest.approx(100 * torch.tensor(json.loads(out.read_text())).numpy(), abs=1e-3)
    assert found.values.std() > 0.01 and found.num_cut == 1 and "RegressionMetric" in found.signature
    with pytest.raises(UserError, match="if the cache of the hub lacks the model's encoder, give comet.encoder=DIR"):
        comet_scores(CometConfig(model=model), lines, sources, references)
    torch.save({"state_dict": {"weight": Evil(str(tmp_path / "executed"))}}, model / "checkpoints" / "model.ckpt")
    with pytest.raises(UserError, match="COMET gave no scores: "):
        comet_scores(config, lines, sources, references)
    assert not (tmp_path / "executed").exists()
