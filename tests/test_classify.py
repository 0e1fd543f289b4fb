"""Classes of raw lines: against the data set of the run, alone and in batches, with phrases; bad lines and bad runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_here
from test_labelled_data import TREES
from test_own_labels import WORDS, settings_of, toy_lines, write_files

from treenet.config import TrainConfig
from treenet.data.input_kinds import TREES as READS_TREES
from treenet.data.labelled import LabelledSource
from treenet.evaluation.classify import ClassifySettings, classify_run
from treenet.evaluation.line_classifier import LineClassifier
from treenet.jobs.train_run import run_training
from treenet.runs.loading import load_trained
from treeproc.common.settings import UserError, load_settings
from treeproc.readers.brackets import read_sentiment
from treeproc.stages.preprocess import PreprocessConfig, preprocess

pytestmark = [pytest.mark.slow, pytest.mark.long]

TINY = {
    "task": "classification",
    "model": {"name": "tree_transformer", "d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "dropout": 0.0},
    "classifier": {"supervision": "root"},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5, "label_smoothing": 0.0},
    "batch": {"max_tokens": 256},
    "max_steps": 40,
    "log_every": 40,
    "checkpoint_every": 40,
    "validate_every": 40,
    "average": "best",
    "average_checkpoints": 1,
    "workers": 0,
}


def train(data: Path, run: Path, *overrides: str) -> Path:
    run_training(load_settings(TrainConfig, None, overrides, **json.loads(json.dumps(TINY)), data=data), run)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on own classes, whose lines the shipped parser reads."""
    folder = tmp_path_factory.mktemp("classify")
    write_files(folder)
    preprocess(settings_of(folder), folder / "data")
    return train(folder / "data", folder / "run")


@pytest.fixture(scope="module")
def phrases_run(tmp_path_factory) -> Path:
    """A run that learned the classes of phrases, from given trees."""
    folder = tmp_path_factory.mktemp("phrases")
    (folder / "train.txt").write_text(TREES * 20, encoding="utf-8")
    splits = {split: {"source": [folder / "train.txt"]} for split in ("train", "valid")}
    config = {"splits": splits, "format": "sst", "parser": {"name": "given"}, "subwords": {"vocab_size": 282}, "workers": 0}
    preprocess(PreprocessConfig.model_validate(config), folder / "data")
    return train(folder / "data", folder / "run", "classifier.supervision=all_phrases", "max_steps=20")


def texts() -> list[str]:
    return [text for _, text in toy_lines(25, 200)]


def classify(run: Path, tmp_path: Path, lines: list, *options: str) -> tuple[list[str], str]:
    """The lines of output, and the messages."""
    content = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    (tmp_path / "input.txt").write_bytes(content)
    done = run_here("classify.py", "--out", run, f"input={tmp_path / 'input.txt'}", f"output={tmp_path / 'output'}", *options)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "output").read_text(encoding="utf-8").splitlines(), done.stderr


def test_lines_have_the_classes_of_the_data_set(run, tmp_path):
    """The test split was encoded with the data set; its texts are given as raw lines."""
    name, _ = classify_run(run, ClassifySettings(split="test"))
    rows = [line.split("\t") for line in (run / f"predictions.{name}.tsv").read_text().splitlines()[1:]]
    found, messages = classify(run, tmp_path, texts(), "--json")
    names = sorted(WORDS)
    assert "tree_transformer averaged: 3 classes: bad, good, so so" in messages
    for number, (line, row, text) in enumerate(zip(found, rows, texts(), strict=True), start=1):
        one = json.loads(line)
        assert (one["line"], one["source"], one["label"]) == (number, text, names[int(row[2])])
        assert list(one["probabilities"]) == names
        assert list(one["probabilities"].values()) == pytest.approx([float(p) for p in row[3:]], abs=2e-6)
    plain, _ = classify(run, tmp_path, texts())
    assert plain == [json.loads(line)["label"] for line in found]
    scored, _ = classify(run, tmp_path, texts(), "--scores")
    best = [max(json.loads(line)["probabilities"].values()) for line in found]
    assert [float(line.split("\t")[0]) for line in scored] == pytest.approx(best, abs=2e-6)
    assert [line.split("\t")[1] for line in scored] == plain


def test_a_line_alone_has_the_classes_that_it_has_in_a_batch(run, tmp_path):
    lines = [" ".join(texts()[: 1 + i % 4]) for i in range(9)]
    together, _ = classify(run, tmp_path, lines, "--json")
    alone, _ = classify(run, tmp_path, lines, "--json", "lines_at_once=1")
    for one, other in zip(together, alone, strict=True):
        one, other = json.loads(one), json.loads(other)
        assert one["label"] == other["label"]
        assert [*one["probabilities"].values()] == pytest.approx([*other["probabilities"].values()], abs=2e-6)


def test_bad_lines_are_empty_and_harm_no_other(run, tmp_path):
    good = texts()[:3]
    expected, _ = classify(run, tmp_path, good)
    lines = [good[0], b"\xff", "", good[1], "a\x01b", " \u200b ", "a " * 1001, good[2]]
    found, messages = classify(run, tmp_path, lines)
    assert found == [expected[0], "", "", expected[1], "", "", "", expected[2]]
    for number, reason in (
        (2, "not valid UTF-8"),
        (3, "is empty"),
        (5, r"control character U\+0001"),
        (7, "1,001 words are more"),
    ):
        assert re.search(rf"input.txt, line {number}: {reason}.*; its class is empty", messages)
    assert "5 of 8 lines have no class: 2, 3, 5, 6, 7" in messages
    found, _ = classify(run, tmp_path, lines, "--json")
    assert [json.loads(line).get("error", "")[:8] for line in found][1:4] == ["not vali", "is empty", ""]
    assert json.loads(found[2]) == {
        "line": 3,
        "source": "",
        "label": None,
        "probabilities": {},
        "error": json.loads(found[2])["error"],
    }


def test_the_same_command_continues(run, tmp_path, monkeypatch):
    whole, _ = classify(run, tmp_path, texts(), "lines_at_once=10")
    (tmp_path / "output").unlink()
    true_call, first_lines = LineClassifier.__call__, []

    def failing(self, lines, first):
        first_lines.append(first)
        if len(first_lines) == 2:
            raise UserError("as if memory had run out")
        return true_call(self, lines, first)

    monkeypatch.setattr(LineClassifier, "__call__", failing)
    arguments = ["classify.py", "--out", run, f"input={tmp_path / 'input.txt'}", f"output={tmp_path / 'output'}"]
    assert run_here(*arguments, "lines_at_once=10").returncode != 0 and not (tmp_path / "output").exists()
    found, messages = classify(run, tmp_path, texts(), "lines_at_once=10")
    assert found == whole and first_lines == [0, 10, 10, 20] and "10 lines are classified already" in messages
    assert not list(tmp_path.glob("*.parts"))


def test_workers_give_the_same_output(run, tmp_path):
    expected, _ = classify(run, tmp_path, texts(), "--json", "lines_at_once=5")
    assert classify(run, tmp_path, texts(), "--json", "lines_at_once=5", "workers=2")[0] == expected


def test_phrases_have_the_classes_of_their_positions(phrases_run, tmp_path):
    rows = list(read_sentiment(iter(TREES.splitlines()), "trees"))
    (tmp_path / "trees").write_text("".join(row["trees"][0] + "\n" for row in rows), encoding="utf-8")
    output = tmp_path / "output"
    files = f"trees={tmp_path / 'trees'}", f"output={output}"
    done = run_here("classify.py", "--out", phrases_run, *files, "--json", "phrases=true")
    assert done.returncode == 0, done.stderr
    config, model = load_trained(phrases_run)
    source = LabelledSource(config.data / "encoded", "train", READS_TREES, phrases=True)
    for number, line in enumerate(output.read_text().splitlines()):
        one, batch = json.loads(line), source.batch([number])
        with torch.no_grad():
            [positions] = model(batch).positions.softmax(-1).numpy()
        row = source.pick([number])
        words = row.items("leaves", "word_index")[0]
        whole = one["phrases"][0]
        assert (whole["start"], whole["end"], whole["label"]) == (0, len(words), one["label"])
        assert whole["text"] == rows[number]["source"] == one["source"]
        places = {(phrase["start"], phrase["end"]): phrase for phrase in one["phrases"]}
        assert len(places) == len(one["phrases"])
        starts, ends = (row.items("spans", name)[0].tolist() for name in ("start", "end"))
        split = {int(words[s]) for s, e in zip(starts, ends, strict=True) if e - s > 1 and len(set(words[s:e])) == 1}
        for node, place in enumerate(zip(starts, ends, strict=True)):
            if len(set(words[slice(*place)])) > 1:
                assert [*places[place]["probabilities"].values()] == pytest.approx(positions[len(words) + node], abs=2e-6)
        for word in range(words[-1] + 1):
            leaves = np.flatnonzero(words == word)
            phrase = places[int(leaves[0]), int(leaves[-1]) + 1]
            if word in split or len(leaves) == 1:
                assert [*phrase["probabilities"].values()] == pytest.approx(positions[leaves].mean(0), abs=2e-6)


def test_phrases_need_a_model_that_learned_them_and_json(run, phrases_run, tmp_path):
    (tmp_path / "input.txt").write_text("A day.\n")
    for options, message in (
        (["--json", "phrases=true"], "phrases: tree_transformer with classifier.supervision=root has no classes of phrases"),
        (["phrases=true"], "phrases: are only in JSON; add --json"),
    ):
        done = run_here("classify.py", "--out", run, f"input={tmp_path / 'input.txt'}", *options)
        assert (done.returncode, done.stdout) == (2, "") and message in done.stderr and "\n" not in done.stderr.strip()
    done = run_here("classify.py", "--out", phrases_run, f"input={tmp_path / 'input.txt'}")
    assert done.returncode == 2 and "was made of trees of its input files; give trees" in done.stderr


def test_runs_of_other_tasks_are_refused(run, tmp_path):
    (tmp_path / "input.txt").write_text("A day.\n")
    done = run_here("translate.py", "--out", run, f"input={tmp_path / 'input.txt'}")
    assert done.returncode == 2 and "is a run of classification, which cannot translate" in done.stderr
    assert "classify" in done.stderr
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.yaml", "run.json"):
        (other / name).write_bytes((run / name).read_bytes().replace(b"task: classification", b"task: relatedness"))
    done = run_here("classify.py", "--out", other, f"input={tmp_path / 'input.txt'}")
    assert done.returncode == 2 and "is a run of relatedness, which cannot classify" in done.stderr
    done = run_here("classify.py", f"input={tmp_path / 'input.txt'}")
    assert done.returncode == 2 and "give --out RUN" in done.stderr
