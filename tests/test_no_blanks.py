"""Targets without blanks between words, from text to a study: Japanese and Chinese, by the commands."""

import itertools
import json
import re
from pathlib import Path

import pytest
from commands import run_here

from treenet.runs.metrics_log import read_metrics
from treenet.runs.result_entries import read_scores

pytestmark = [pytest.mark.slow, pytest.mark.long]

SUBJECTS = [("My mother", "母は", "我妈妈"), ("The teacher", "先生は", "老师"), ("A student", "学生は", "那个学生")]
SUBJECTS += [("The old man", "老人は", "老人"), ("Our friend", "友達は", "我们的朋友")]
TIMES = [("every day", "毎日", "每天"), ("in the morning", "朝に", "早上"), ("on Sunday", "日曜日に", "星期天")]
ACTS = [("reads a book", "本を読みます", "看书"), ("drinks hot tea", "熱いお茶を飲みます", "喝热茶")]
ACTS += [("writes a letter", "手紙を書きます", "写信"), ("eats rice", "ご飯を食べます", "吃米饭")]
MODEL = {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
TINY = [*(f"model.{name}={size}" for name, size in MODEL.items()), "max_steps=4", "checkpoint_every=2", "validate_every=2"]
TINY += ["workers=0", "valid_metric=chrf", "decoding.beam_size=2", "batch.max_tokens=256"]
TOKENS = {"ja": "ja-mecab-", "zh": "zh|"}


def command(*arguments: object) -> str:
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["ja", pytest.param("zh", marks=pytest.mark.cluster)])
def made(request, tmp_path_factory) -> tuple[str, Path]:
    """A data set and two runs of one language."""
    folder, column = tmp_path_factory.mktemp(request.param), {"ja": 1, "zh": 2}[request.param]
    triples = list(itertools.product(SUBJECTS, TIMES, ACTS))
    lines = {
        "en": [f"{who[0]} {act[0]} {when[0]}." for who, when, act in triples],
        request.param: ["".join(part[column] for part in triple) + "。" for triple in triples],
    }
    files = {}
    for split, place in {"train": lambda n: n % 6 > 1, "valid": lambda n: n % 6 == 0, "test": lambda n: n % 6 == 1}.items():
        for side, name in zip(("source", "target"), lines, strict=True):
            files[f"splits.{split}.{side}"] = path = folder / f"{split}.{name}"
            path.write_text("".join(f"{line}\n" for number, line in enumerate(lines[name]) if place(number)))
    settings = ["workers=0", "parser.name=words", "tree.tree_source=balanced", "subwords.vocab_size=370"]
    command("preprocess.py", "--out", folder / "data", *(f"{key}={path}" for key, path in files.items()), *settings)
    for name in ("tree_transformer", "transformer"):
        command("train.py", "--out", folder / name, f"data={folder / 'data'}", *TINY, f"model.name={name}")
    return request.param, folder


def test_text_without_blanks_goes_from_lines_to_scores_a_comparison_and_a_page(made):
    language, folder = made
    runs = [folder / name for name in ("transformer", "tree_transformer")]
    assert all("chrf" in line for line in read_metrics(runs[0]) if line["event"] == "valid")
    printed = [command("evaluate.py", "--out", run, f"target_language={language}") for run in runs for _ in range(2)]

    for text in printed:
        assert "compare the tokenised BLEU or chrF: without blanks between words, BLEU and TER take sentences" in text
        assert "tok. BLEU" in text and f"tok:{TOKENS[language]}" in text and "note:" not in text
    entry = read_scores(runs[0])["test"]
    assert all("bleu_tokenized" in bucket for rows in entry["buckets"].values() for bucket in rows)
    lines = (runs[0] / "translations.test.txt").read_text().splitlines()
    assert len(lines) == entry["num_examples"] == 10
    command("train.py", "--out", runs[0], f"data={folder / 'data'}", *TINY, "model.name=transformer")
    compared = command("evaluate.py", "--compare", *runs, f"target_language={language}", "--out", folder / "compared")
    assert re.search(r"^tok\. BLEU ", compared, re.MULTILINE) and f"tok:{TOKENS[language]}" in compared
    assert "bleu_tokenized" in json.loads((folder / "compared" / "comparison.json").read_text())["metrics"]
    command("report.py", "--out", folder / "page", f"runs=[{','.join(map(str, runs))}]", "bootstrap_samples=20", "sentences=1")
    page = (folder / "page" / "index.html").read_text()
    assert "tokenised BLEU on test by depth" in page and "Differences are in tokenised BLEU" in page
    assert f"Words are tokens of sacrebleu&#39;s {TOKENS[language].strip('-|')}" in page


def test_a_study_compares_the_tokens_of_the_language(made):
    language, folder = made
    grid = ["grid.seeds=[1]", "grid.fractions=[1.0]", "grid.bootstrap_samples=20", f"grid.target_language={language}"]
    study = ["scaling.py", "--out", folder / "study", f"data={folder / 'data'}", *TINY, *grid, "grid.metric=bleu_tokenized"]
    printed = command(*study)
    assert "tokenised BLEU" in printed and f"tok:{TOKENS[language]}" in printed and "without blanks" not in printed
    assert "bleu_tokenized" in printed.partition("done after")[2].partition("\n")[0]
    again = command(*study)
    assert "(1 running" not in again and f"tok:{TOKENS[language]}" in again, "all cells are done"
    told = command(*study[:-1], "grid.metric=bleu", "--dry-run")
    assert "set grid.metric=chrf, or grid.metric=bleu_tokenized and grid.target_language" in told
