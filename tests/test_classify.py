"""Classes of raw lines: against the data set of the run, alone and in batches, with phrases; bad lines and bad runs."""

import asyncio
import json
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import MISSING, browser
from commands import run_here
from test_labelled_data import TREES
from test_own_labels import WORDS, settings_of, toy_lines, write_files

from treenet import load_run
from treenet.config import TrainConfig
from treenet.data.input_kinds import TREES as READS_TREES
from treenet.data.labelled import LabelledSource
from treenet.data.splits import read_split
from treenet.evaluation.classify import classify_run, score_run
from treenet.evaluation.line_classifier import LineClassifier
from treenet.evaluation.settings import ClassifySettings
from treenet.extras.serving.messages import Question, Served
from treenet.jobs.train_run import run_training
from treenet.runs.loading import load_trained
from treenet.runs.metrics_log import read_metrics
from treenet.runs.result_entries import read_scores
from treenet.tasks.class_scores import class_scores, wilson_interval
from treenet.tasks.scores import ABOUT_INTERVALS
from treeproc.common.files import file_sha256
from treeproc.common.settings import UserError, load_settings
from treeproc.readers.treebanks import read_sentiment
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


def test_the_files_of_a_data_set_come_back_with_the_classes_of_its_splits(run, tmp_path):
    """Each in its own form, also from an exported run, which has no data set: as many rows as examples, in their order."""
    load_run(run).save_pretrained(tmp_path / "export")
    for folder, name in ((run, "train.tsv"), (tmp_path / "export", "valid.csv"), (run, "test.jsonl")):
        split, suffix = name.split(".")
        whole = (run.parent / name).read_text()
        result, _ = classify_run(run, ClassifySettings(split=split))
        rows = [line.split("\t") for line in (run / f"predictions.{result}.tsv").read_text().splitlines()[1:]]
        done = run_here("classify.py", "--out", folder, f"input={run.parent / name}", "lines_at_once=50")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert all(line.startswith(one.removesuffix("}")) for line, one in zip(lines, whole.splitlines(), strict=True))
        if suffix == "jsonl":
            found = [(one["predicted"], one["probability"]) for one in map(json.loads, lines)]
        else:
            cells = [line.split("\t" if suffix == "tsv" else ",")[-2:] for line in lines]
            found = [(label, float(number)) for label, number in cells[suffix == "csv" :]]
        assert [label for label, _ in found] == [sorted(WORDS)[int(row[2])] for row in rows]
        assert [number for _, number in found] == pytest.approx([max(map(float, row[3:])) for row in rows], abs=2e-6)


def test_trees_in_a_table_are_those_of_a_file_of_trees(tmp_path):
    trees = {"x": "(S (NP (DT The) (NN dog)) (VP (VBD ran)))", "y": "(NP (DT a) (JJ blue) (NN cat))"}
    (tmp_path / "train.tsv").write_text("".join(f"{label}\t{tree}\n" for label, tree in trees.items()) * 20)
    values = {"format": "labelled", "labelled": {"brackets": True}, "parser": {"name": "given"}, "subwords": {"vocab_size": 280}}
    splits = {split: {"source": [tmp_path / "train.tsv"]} for split in ("train", "valid")}
    preprocess(PreprocessConfig.model_validate(values | {"splits": splits, "workers": 0}), tmp_path / "data")
    run = train(tmp_path / "data", tmp_path / "run", "max_steps=2", "validate_every=2", "checkpoint_every=2", "log_every=2")
    (tmp_path / "new.csv").write_text("text\n" + "".join(f"{tree}\n" for tree in trees.values()))
    (tmp_path / "new.trees").write_text("".join(f"{tree}\n" for tree in trees.values()))
    table = run_here("classify.py", "--out", run, f"input={tmp_path / 'new.csv'}")
    beside = run_here("classify.py", "--out", run, f"trees={tmp_path / 'new.trees'}", "--scores")
    assert table.returncode == beside.returncode == 0, table.stderr + beside.stderr
    found = [line.split(",")[-2:] for line in table.stdout.splitlines()[1:]]
    assert ["\t".join(reversed(one)) for one in found] == beside.stdout.splitlines() and len(found) == 2


def test_rows_without_a_class_and_tables_under_another_name(run, tmp_path):
    table, output = tmp_path / "a.csv", tmp_path / "output"
    table.write_text('id,text\n1,A day.\n2," "\n3,"a\x01\nb"\n')
    done = run_here("classify.py", "--out", run, f"input={table}", f"output={output}")
    assert done.returncode == 0 and "a.csv, row 2: is empty" in done.stderr and "2 of 3 rows have no class: 2, 3" in done.stderr
    head, first, *others = output.read_text().splitlines()
    assert head == "id,text,predicted,probability" and first.startswith("1,A day.,")
    assert others == ['2," ",,', '3,"a\x01', 'b",,']
    done = run_here("classify.py", "--out", run, f"input={table}", f"output={output}.jsonl")
    assert (
        done.returncode == 2 and "output.jsonl is named as a table (jsonl), but the command writes a table (csv);" in done.stderr
    )
    table.rename(tmp_path / "a.txt")
    done = run_here("classify.py", "--out", run, f"input={tmp_path / 'a.txt'}", f"output={output}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "a.txt, line 1: expected a text, but found" in done.stderr


def test_a_diverged_model_classifies_nothing(run):
    loaded = load_run(run)
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="the model's predictions are not finite"):
        loaded.classify(["the cat sees"])


def test_lines_that_begin_with_their_class_are_told(run, tmp_path):
    """In a file of examples, the model would read the class as text."""
    labelled = [f"{label}\t{text}" for label, text in toy_lines(25, 200)]
    _, messages = classify(run, tmp_path, [*labelled, *texts()[:20]], "lines_at_once=50")
    assert (
        "begins with a class and a tab, which the model reads as text: 25 of 45 lines, for example line 1 with 'so so'; name "
        in messages
    )
    for lines in (texts(), [*labelled[:9], *texts()], [f"new\t{text}" for text in texts()]):
        assert "begins with a class" not in classify(run, tmp_path, lines)[1]


def test_tables_without_a_header_say_what_they_read(run, tmp_path):
    table = tmp_path / "new.tsv"
    for name, rows, told in (
        ("labels first", [f"good\t{text}" for text in texts()], ""),
        ("labels last", [f"{text}\tgood" for text in texts()], "row 1 with 'good'"),
        ("numbers", [f"{text}\t{number}" for number, text in enumerate(texts())], "row 1 with '0'"),
        ("texts", texts(), ""),
        ("named", ["text\tlabel", *(f"{text}\tgood" for text in texts())], ""),
    ):
        table = tmp_path / f"{name}.tsv"
        table.write_text("".join(f"{row}\n" for row in rows))
        done = run_here("classify.py", "--out", run, f"input={table}")
        assert done.returncode == 0 and len(done.stdout.splitlines()) == len(rows)
        read = f"note: {table} has no header, so the command reads column 1 as the class, and column 2 as the text\n"
        assert done.stderr.count(read) == (name not in ("texts", "named"))
        doubt = f"the text is a class or a number: {len(texts())} of {len(texts())} texts, for example {told}"
        assert (doubt in done.stderr) == bool(told) and (
            "a header line, or the keys, must name those 'text'" in done.stderr
        ) == bool(told)


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


@pytest.mark.cluster  # the job is that of translate, whose test runs always
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
        (
            ["--json", "phrases=true"],
            "phrases: the run has no classes of phrases, because it learned only the classes of whole texts",
        ),
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


def test_lines_have_the_classes_of_the_data_set_above_a_pretrained_encoder(tmp_path):
    for package in ("transformers", "tokenizers"):
        pytest.importorskip(package)
    from tiny_pretrained import WIDTH, write_both

    encoder, data = write_both(tmp_path / "bert")
    model = f"model={{d_model: {WIDTH}, d_ff: 24, num_heads: 2, num_encoder_layers: 1, pretrained: {{folder: {encoder}}}}}"
    run = train(data, tmp_path / "run", model, "model.name=tree_transformer", "classifier.supervision=all_phrases", "max_steps=4")
    name, _ = classify_run(run, ClassifySettings(split="train"))
    rows = [line.split("\t") for line in (run / f"predictions.{name}.tsv").read_text().splitlines()[1:5]]
    sources = [row["source"] for row in read_split(data, "text", "train")][:4]
    trees = [row["trees"][0] for row in read_split(data, "parsed", "train")][:4]
    for row, source, found in zip(rows, sources, load_run(run).classify(sources, trees=trees, phrases=True), strict=True):
        assert found.label == row[2]
        assert [*found.probabilities.values()] == pytest.approx([float(p) for p in row[3:]], abs=2e-6)
        assert found.phrases[0].text.replace(" ", "").lower() == source.replace(" ", "").lower() or "😀" in source


# The server


def test_answers_of_the_server_are_those_of_the_command(run, tmp_path):
    pytest.importorskip("uvicorn", reason="needs the extra [serve]")
    from treenet.extras.serving.sentences import load_reader
    from treenet.extras.serving.settings import ServeSettings

    lines = [*texts()[:7], "", "a\x01", "a " * 1001, "a \ud800"]
    reader = load_reader(ServeSettings(), run)
    assert reader.served == Served("tree_transformer averaged", "classification")
    questions = [Question(tuple(lines[i : i + 3]), 1, False) for i in range(0, len(lines), 3)]
    together = [json.loads(answer) for answer in reader.answer(questions)]
    alone = [json.loads(reader.answer([question])[0]) for question in questions]
    expected, _ = classify(run, tmp_path, [line.encode("utf-8", "surrogatepass") for line in lines], "--json")
    assert [len(answer["lines"]) for answer in together] == [3, 3, 3, 2]
    for answers in (together, alone):
        found = [line for answer in answers for line in answer["lines"]]
        for one, line in zip(found, expected, strict=True):
            wanted = json.loads(line)
            assert (one["source"], one["label"], one["error"]) == (wanted["source"], wanted["label"], wanted.get("error"))
            assert list(one["probabilities"].values()) == pytest.approx([*wanted["probabilities"].values()], abs=2e-6)
            assert (one["tree"] is not None) == (one["error"] is None or one["source"] == "") and one["phrases"] == []
    with pytest.raises(UserError, match="decoding: is for translation, but this run is a classifier"):
        load_reader(ServeSettings(decoding={"beam_size": 2}), run)


@pytest.fixture(scope="module")
def served_run(run, tmp_path_factory):
    """A run that learned the classes of phrases, whose lines the shipped parser reads."""
    data = load_trained(run)[0].data
    return train(data, tmp_path_factory.mktemp("served") / "run", "classifier.supervision=all_phrases", "max_steps=4")


def test_in_a_browser_a_sentence_has_its_classes(served_run):
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra [serve]")
    if MISSING:
        pytest.skip(MISSING)
    from treenet.extras.serving.http_app import build_entrance
    from treenet.extras.serving.sentences import load_reader
    from treenet.extras.serving.server import build_config
    from treenet.extras.serving.settings import ServeSettings

    reader = load_reader(ServeSettings(), served_run)

    class Here:
        served = reader.served

        async def ask(self, question, *, alone=False):
            return (await asyncio.to_thread(reader.answer, [question]))[0]

        def running(self):
            return 1

    config = build_config(ServeSettings(), build_entrance(ServeSettings(), Here(), None))
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with tempfile.TemporaryDirectory() as profile, browser(Path(profile) / "profile") as window:
            window.visit(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/")
            text = "The <b>dog</b> was lovely."
            window.run(
                "document.getElementById('text').value = arguments[0]; document.getElementById('send').disabled = true;"
                "document.getElementById('form').requestSubmit()",
                text,
            )
            deadline = time.monotonic() + 120
            while not window.run("return document.querySelectorAll('#answers .phrases li').length"):
                assert time.monotonic() < deadline, window.run("return document.getElementById('status').textContent")
                time.sleep(0.05)
            [line] = json.loads(reader.answer([Question((text,), 1, False, phrases=True)])[0])["lines"]
            texts_of = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
            assert window.run(texts_of, ".translation") == [line["label"]] and window.run(texts_of, ".source") == [text]
            order = sorted(line["probabilities"].items(), key=lambda one: -one[1])
            assert window.run(texts_of, ".classes li") == [f"{name}  {100 * p:.1f} %" for name, p in order]
            assert len(window.run(texts_of, ".phrases li")) == len(line["phrases"])
            assert window.run(texts_of, "#send") == ["Classify"] and window.run(texts_of, "#address") == ["POST /classify"]
            assert window.run("return document.querySelectorAll('#answers b').length") == 0
            assert window.run("return document.getElementById('num-best-field').hidden")
    finally:
        server.should_exit = True
        thread.join()


def test_the_server_gives_the_classes_of_phrases(served_run, tmp_path):
    pytest.importorskip("uvicorn", reason="needs the extra [serve]")
    from treenet.extras.serving.sentences import load_reader
    from treenet.extras.serving.settings import ServeSettings

    reader = load_reader(ServeSettings(), served_run)
    assert reader.served.has_phrases
    questions = [Question((text,), 1, False, phrases=place % 2 == 0) for place, text in enumerate(texts()[:4])]
    answers = [json.loads(answer)["lines"][0] for answer in reader.answer(questions)]
    lines, _ = classify(served_run, tmp_path, texts()[:4], "--json", "phrases=true")
    for place, (answer, line) in enumerate(zip(answers, map(json.loads, lines), strict=True)):
        assert (answer["source"], answer["label"]) == (line["source"], line["label"])
        wanted = [(p["text"], p["start"], p["end"], p["label"], max(p["probabilities"].values())) for p in line["phrases"]]
        found = [(p["text"], p["start"], p["end"], p["label"], p["probability"]) for p in answer["phrases"]]
        assert [one[:4] for one in found] == ([one[:4] for one in wanted] if place % 2 == 0 else [])
        assert [one[4] for one in found] == pytest.approx([one[4] for one in wanted][: len(found)], abs=2e-6)


# Python


def test_classes_of_a_data_set_that_was_made_again_are_told(run, capsys):
    """Their names went to the numbers that the model learned, in silence; another number of them was a traceback."""
    path, facts_path = run.parent / "data" / "encoded" / "index.json", run / "run.json"
    before, facts_before = path.read_text(), facts_path.read_text()
    index, facts = json.loads(before), json.loads(facts_before)
    assert facts["classes"] == index["classes"]
    try:
        path.write_text(json.dumps(index | {"fingerprint": "other"}))
        assert load_run(run).classes == index["classes"]
        assert "data was made again since" in capsys.readouterr().err
        path.write_text(json.dumps({name: value for name, value in index.items() if name != "classes"}))
        assert load_run(run).classes == index["classes"]
        path.write_text(json.dumps(index | {"fingerprint": "other", "classes": index["classes"][::-1]}))
        with pytest.raises(UserError, match="has the classes so so, good, bad, but the model learned bad, good, so so; it was"):
            load_run(run)
        count = index["num_classes"]
        path.write_text(json.dumps(index | {"num_classes": count + 1, "classes": [*index["classes"], "more"]}))
        with pytest.raises(UserError, match=f"has {count + 1} classes, but the model learned {count}; it was made again"):
            load_run(run)
    finally:
        path.write_text(before)
        facts_path.write_text(facts_before)
    capsys.readouterr()
    load_run(run)
    assert "warning" not in capsys.readouterr().err


def test_the_library_gives_the_classes_of_the_command(run, phrases_run, tmp_path):
    lines = [*texts()[:5], "", "a\x01b"]
    expected, _ = classify(run, tmp_path, lines, "--json")
    model = load_run(run)
    assert model.classes == sorted(WORDS) and repr(model).startswith("ClassifierRun(tree_transformer, weights 'averaged', ")
    model.model.train()  # as a program leaves it that trained it further: units were dropped, with more dropout than here
    with pytest.warns(UserWarning) as warned:
        found = model.classify(lines)
    assert model.model.training
    said = [str(one.message) for one in warned]
    assert [text.partition(":")[0] for text in said] == ["line 6", "line 7"] and "is empty" in said[0]
    assert {one.filename for one in warned} == {__file__}
    assert found[5:] == [None, None]
    for one, line in zip(found[:5], expected, strict=False):
        wanted = json.loads(line)
        assert (one.label, list(one.probabilities)) == (wanted["label"], model.classes)
        assert list(one.probabilities.values()) == pytest.approx([*wanted["probabilities"].values()], abs=2e-6)
        assert one.probability == max(one.probabilities.values()) and one.phrases == ()
    shown = f"label={found[0].label!r}, probability={found[0].probability}, probabilities={found[0].probabilities}"
    assert repr(found[0]) == f"LineClasses({shown}, phrases=())"
    with pytest.raises(AttributeError, match="^ClassifierRun has no translate; a run of classification has classify and "):
        model.translate(lines)
    with pytest.raises(UserError, match=r"no classes of phrases, because it learned only the classes of whole texts"):
        model.classify(lines[:1], phrases=True)
    with pytest.raises(UserError, match=r"lines must be a list of strings, one a line"):
        model.classify("a day")
    rows = list(read_sentiment(iter(TREES.splitlines()), "trees"))
    sources, trees = [row["source"] for row in rows], [row["trees"][0] for row in rows]
    for line in load_run(phrases_run).classify(sources, trees=trees, phrases=True):
        assert line.phrases[0].text in sources and line.phrases[0].label == line.label
    given = TREES.splitlines()  # labels that are classes: the model read none of them
    assert load_run(phrases_run).classify(sources, trees=given) == load_run(phrases_run).classify(sources, trees=trees)
    [word] = load_run(phrases_run).classify(["brilliancy"], trees=["(4 brilliancy)"], phrases=True)
    assert word.phrases[0].probabilities == pytest.approx(word.probabilities, abs=2e-6)
    with pytest.warns(UserWarning, match="line 1: has several trees side by side"):
        assert load_run(phrases_run).classify(["a b"], trees=["(X (X a)) (X (X b))"]) == [None]
    with pytest.warns(UserWarning, match="^lines: has escapes such as &apos;") as warned:
        model.classify(["a &apos;s day"] * 2)
    assert [one.filename for one in warned] == [__file__]


# Scores on new test sets


def test_new_test_sets_are_scored(run, tmp_path):
    """A file of other texts: accuracy, macro F1, intervals and the confusion matrix, from the predictions of the same run."""
    lines = [*toy_lines(20, 300), ("bad", "The dog was lovely number 1.")]
    (tmp_path / "news.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in lines))
    data = load_trained(run)[0].data
    made = run_here(
        "preprocess.py",
        "--out",
        tmp_path / "news",
        f"vocab_from={data}",
        f"splits.a.source=[{tmp_path / 'news.tsv'}]",
        "workers=0",
    )
    assert made.returncode == 0, made.stderr
    done = run_here("evaluate.py", "--out", run, f"data={tmp_path / 'news'}", "split=a")
    assert done.returncode == 0, done.stderr
    scores = read_scores(run)["a.data-news"]
    rows = [line.split("\t") for line in (run / "predictions.a.data-news.tsv").read_text().splitlines()[1:]]
    names = sorted(WORDS)
    assert [names[int(row[1])] for row in rows] == [label for label, _ in lines]
    found, _ = classify(run, tmp_path, [text for _, text in lines])
    assert [names[int(row[2])] for row in rows] == found
    matrix = np.array(scores["confusion"])
    for label, predicted in ((a, b) for a in range(3) for b in range(3)):
        assert matrix[label, predicted] == sum(row[1:3] == [str(label), str(predicted)] for row in rows)
    assert scores["accuracy"] == np.trace(matrix) / 21 and scores["classes"] == names
    assert scores["accuracy_interval"][0] < scores["accuracy"] <= scores["accuracy_interval"][1]
    assert scores["split"] == "a" and not scores["own_data"] and len(scores["weights_sha256"]) == 64
    assert "macro F1 (%)" in done.stdout and ABOUT_INTERVALS in done.stdout
    assert str(run / "predictions.a.data-news.tsv") in done.stdout
    table = done.stdout.partition("predicted class (column)")[2].splitlines()[1:5]
    assert [line.split()[-3:] for line in table[1:]] == [list(map(str, counts)) for counts in matrix.tolist()]
    before = read_scores(run)
    (tmp_path / "news.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for label, text in lines))
    alone = run_here("evaluate.py", "--out", run, f"input={tmp_path / 'news.csv'}")
    assert alone.stdout.splitlines()[2:] == done.stdout.splitlines()[2:-1], alone.stderr
    assert alone.stdout.splitlines()[1].split()[1:] == done.stdout.splitlines()[1].split()[1:] and read_scores(run) == before
    config = load_trained(run)[0].data / "config.yaml"
    settings = config.read_text()
    assert "device: auto" in settings
    config.write_text(settings.replace("device: auto", "device: cuda"))  # of a machine with a GPU
    again = run_here("evaluate.py", "--out", run, f"input={tmp_path / 'news.csv'}")
    config.write_text(settings.replace("  models: null", f"  models: {tmp_path / 'gone'}"))
    gone = run_here("evaluate.py", "--out", run, f"input={tmp_path / 'news.csv'}")
    config.write_text(settings)
    assert again.stdout == alone.stdout, again.stderr
    assert gone.stderr.endswith(f"; install here the parser that {config.parent} was made with\n"), gone.stderr
    (tmp_path / "three.tsv").write_text("good\ta\tb\n")
    done = run_here("evaluate.py", "--out", run, f"input={tmp_path / 'three.tsv'}")
    assert done.returncode == 2 and done.stderr.endswith("; give these columns alone, or add a header line\n"), done.stderr
    done = run_here("evaluate.py", "--out", run, f"input={tmp_path / 'news.tsv'}", f"data={tmp_path / 'news'}", "split=a")
    assert done.returncode == 2 and "input: its rows are scored instead of a split; leave out data, split" in done.stderr


def test_a_result_that_is_computed_again_replaces_itself(run, tmp_path):
    """Training and a user name one result by different settings; a note appears only if the result is another one."""
    other = train(load_trained(run)[0].data, tmp_path / "run", "max_steps=4")
    score_run(other)
    for options in ([], ["split=test"], [f"data={load_trained(run)[0].data}", "checkpoint=averaged"]):
        before = read_scores(other)
        done = run_here("evaluate.py", "--out", other, *options)
        assert done.returncode == 0 and "replaces" not in done.stderr, done.stderr
        assert read_scores(other) == before


def test_a_report_has_scores_intervals_matrices_and_examples_of_classifiers(run, tmp_path):
    other = train(load_trained(run)[0].data, tmp_path / "other", "model.name=transformer", "max_steps=4")
    for one in (run, other):
        classify_run(one, ClassifySettings(split="test"))
    done = run_here("report.py", "--out", tmp_path / "report", run, other, "lines=[2,5]", "bootstrap_samples=10")
    assert done.returncode == 0, done.stderr
    page, report = ((tmp_path / "report" / name).read_text() for name in ("index.html", "report.json"))
    report = json.loads(report)
    scores = read_scores(other)["test"]
    for value in (scores["accuracy"], *scores["accuracy_interval"], scores["macro_f1"], *scores["macro_f1_interval"]):
        assert f"{100 * value:.2f}" in page
    matrices = re.findall(r"predicted class \(column\)\..*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    counts = [[int(count) for count in re.findall(r"<td[^>]*>(\d+)</td>", matrix)] for matrix in matrices]
    assert counts == [np.array(read_scores(one)["test"]["confusion"]).ravel().tolist() for one in (other, run)]
    labels = [label for label, _ in toy_lines(25, 200)]
    assert [(one["line"], one["text"], one["label"]) for one in report["examples"]] == [
        (line, texts()[line - 1], labels[line - 1]) for line in (2, 5)
    ]
    found, _ = classify(other, tmp_path, texts())
    assert [one["predicted"]["other"] for one in report["examples"]] == [found[1], found[4]]
    assert "learning_curves.svg" in report["figures"] and "Classifiers" in page
    best = [max(line["accuracy"] for line in read_metrics(one) if line["event"] == "valid") for one in (other, run)]
    shown = re.search(r"best validation accuracy(.*?)</tr>", page, re.DOTALL)[1]
    assert re.findall(r"[\d.]+%", shown) == [f"{accuracy:.2%}" for accuracy in best]
    wrong = run_here("report.py", "--out", tmp_path / "report", run, "lines=[26]")
    assert wrong.returncode == 2 and "lines: test has no line 26" in wrong.stderr


def test_a_report_needs_no_text_and_takes_every_result(run, tmp_path):
    data = load_trained(run)[0].data
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns("text"))
    one = Path(shutil.copytree(run, tmp_path / "run"))
    config = one / "config.yaml"
    config.write_text(config.read_text().replace(str(data), str(tmp_path / "data")))
    classify_run(one, ClassifySettings(split="test"))
    done = run_here("report.py", "--out", tmp_path / "report", one)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert "text/index.json is missing" in report["runs"][0]["missing"][0]["said"] and "examples" not in report
    assert run_here("report.py", "--out", tmp_path / "report", one, "split=test.last").returncode == 0
    missing = json.loads((tmp_path / "report" / "report.json").read_text())["runs"][0]["missing"][0]
    assert missing["said"] == "no scores of test.last" and missing["command"].endswith("split=test checkpoint=last")
    names = [classify_run(run, ClassifySettings(split="test", checkpoint=name))[0] for name in ("last", f"{run}/averaged/")]
    assert names == ["test.last", "test"]
    assert classify_run(run, ClassifySettings(split="test", checkpoint=str(one / "averaged")))[0] == "test.weights-run-averaged"
    done = run_here("report.py", "--out", tmp_path / "last", run, "split=test.last", "lines=[3]")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "last" / "report.json").read_text())["examples"][0]["text"] == texts()[2]
    predictions = run / "predictions.test.last.tsv"
    whole, scores = predictions.read_text(), json.loads((run / "scores.json").read_text())
    predictions.write_text(whole.replace("0.", "0.1", 1))
    done = run_here("report.py", "--out", tmp_path / "last", run, "split=test.last", "lines=[3]")
    assert done.returncode == 2 and f"{predictions} has changed since scores.json got its scores; run " in done.stderr
    for damaged in (
        whole.rpartition("\n24\t")[0] + "\n",
        re.sub(r"(?m)^2\t\d", "2\t7", whole),
    ):  # a line less, a class that is none
        predictions.write_text(damaged)
        scores["test.last"]["predictions_sha256"] = file_sha256(predictions)
        (run / "scores.json").write_text(json.dumps(scores))
        done = run_here("report.py", "--out", tmp_path / "last", run, "split=test.last", "lines=[3]")
        assert done.returncode == 2 and f"{predictions} is damaged: its examples or classes" in done.stderr
        assert f"evaluate --out {run} split=test checkpoint=last\n" in done.stderr and done.stderr.count("\n") == 1
    predictions.write_text(whole)


def test_settings_of_translations_and_other_classes_are_refused(run, tmp_path):
    done = run_here("evaluate.py", "--out", run, "decoding.beam_size=2", "untrained=true")
    assert done.returncode == 2 and "decoding, untrained: is for translations; leave it out" in done.stderr
    data = load_trained(run)[0].data
    other = tmp_path / "other" / "encoded"
    shutil.copytree(data / "encoded", other)
    index = json.loads((other / "index.json").read_text())
    for change, message in (
        ({"classes": ["good", "bad", "so so"]}, "has the classes good, bad, so so, but the model learned bad, good, so so"),
        ({"num_classes": 4, "classes": ["a", "b", "c", "d"]}, "has 4 classes, but the model learned 3"),
    ):
        (other / "index.json").write_text(json.dumps(index | change))
        done = run_here("evaluate.py", "--out", run, f"data={tmp_path / 'other'}")
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_macro_f1_and_intervals():
    cells = {(0, 0): 3, (0, 1): 1, (1, 1): 4, (2, 1): 2}
    scores = class_scores(cells, 5)
    f1 = [2 * 3 / (4 + 3), 2 * 4 / (4 + 7), 0]  # classes 3 and 4 do not occur
    assert scores["macro_f1"] == pytest.approx(np.mean(f1))
    assert scores["confusion"] == [[3, 1, 0, 0, 0], [0, 4, 0, 0, 0], [0, 2, 0, 0, 0], [0] * 5, [0] * 5]
    low, high = scores["macro_f1_interval"]
    assert low < scores["macro_f1"] < high and class_scores(cells, 5) == scores
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # as in tables
    assert wilson_interval(10, 10)[1] == pytest.approx(1) and wilson_interval(0, 10)[0] == 0.0
    assert "confusion" not in class_scores({(0, 101): 1, (101, 101): 2}, 102)
    right = class_scores({(0, 0): 2, (1, 1): 1}, 2)  # a bootstrap cannot tell what other examples would give
    assert right["macro_f1"] == 1 and "macro_f1_interval" not in right
