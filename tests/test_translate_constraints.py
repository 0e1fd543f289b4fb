"""Sampling, minimum Bayes risk and constraints by translate.py, `load_run` and evaluate, on a run of random weights."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from test_translate import translate, write

from treenet import load_run
from treenet.runs.loading import load_run as load_folder
from treenet.translation.reranking import chrf_matrix
from treeproc.common.settings import UserError

slow = pytest.mark.slow

__all__ = ["translate"]  # a fixture

ROOT = Path(__file__).parents[1]
SAMPLING = "decoding.method=sampling"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", write_vocabulary(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def lines() -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(SEARCH_WORDS, random.integers(1, 9))) for _ in range(9)]


@slow
def test_samples_have_the_form_of_n_best_lists_and_do_not_depend_on_parts(translate, lines, tmp_path, run):
    source = write(tmp_path / "in.txt", [*lines, ""])
    found, errors = translate(f"input={source}", SAMPLING, "--nbest", "4", "--scores")
    columns = [line.split("\t") for line in found]
    assert [one[0] for one in columns] == [str(n) for n in range(1, 10) for _ in range(4)] + ["10"]
    assert len({one[2] for one in columns}) > 20
    assert (
        errors[0].startswith("tree_transformer averaged: method=sampling beam_size=3 ") and "seed=1 temperature=1.0" in errors[0]
    )
    arguments = f"input={source}", SAMPLING, "--nbest", "4", "--scores", "lines_at_once=2", "decoding.max_tokens=12"
    again = [line.split("\t") for line in translate(*arguments, "decoding.beam_size=1")[0]]
    assert [(one[0], one[2]) for one in again] == [(one[0], one[2]) for one in columns]
    assert all(abs(float(one[1]) - float(other[1])) < 1e-5 for one, other in zip(again[:-1], columns[:-1], strict=True))
    first = translate(f"input={source}", SAMPLING)[0]
    assert first[:9] == [one[2] for one in columns[:36:4]], "one sample is the first one"
    assert translate(f"input={source}", SAMPLING, "decoding.seed=2")[0] != first


@slow
def test_minimum_risk_takes_the_sample_that_is_nearest_to_all(translate, lines, tmp_path):
    source = write(tmp_path / "in.txt", lines[:3])
    settings = "decoding.temperature=0.7", "decoding.max_length_factor=0.5", "decoding.max_length_offset=3"
    samples = [line.split("\t") for line in translate(f"input={source}", SAMPLING, "--nbest", "16", *settings)[0]]
    found, errors = translate(
        f"input={source}", "decoding.method=mbr", "decoding.mbr_samples=16", "--json", "--nbest", "3", *settings
    )
    assert errors[0].endswith("; score = mean chrF against the samples")
    for line in map(json.loads, found):
        texts = [text for number, text in samples if int(number) == line["line"]]
        means = chrf_matrix(texts).mean(1)
        assert line["hypotheses"][0]["text"] == texts[int(means.argmax())]
        assert line["hypotheses"][0]["score"] == pytest.approx(means.max(), abs=1e-5)
        assert len({one["text"] for one in line["hypotheses"]}) == len(line["hypotheses"])
    with pytest.raises(UserError, match="nbest must be from 1 to mbr_samples = 4, but is 5"):
        translate(f"input={source}", "decoding.method=mbr", "decoding.mbr_samples=4", "--nbest", "5")


def test_constraints_hold_line_by_line(translate, lines, tmp_path):
    source = write(tmp_path / "in.txt", [*lines, ""])
    plain = translate(f"input={source}")[0]
    banned = Counter(word for line in plain for word in line.split()).most_common(1)[0][0]
    files = {
        "prefix": ["do ki", "", "do", *[""] * 7],
        "must_appear": ["", "ku gi\tbe", "", "xyz", *[""] * 6],
        "must_not_appear": ["", "", "", "", banned, f"{banned}\tk", *[""] * 4],
    }
    paths = [f"{name}={write(tmp_path / name, values)}" for name, values in files.items()]
    found, errors = translate(f"input={source}", *paths)
    assert found[6:] == plain[6:], "lines without constraints are translated as before"
    assert found[0].startswith("do ki") and found[2].startswith("do")
    assert "ku gi" in found[1] and "be" in found[1] and "xyz" in found[3]
    assert banned not in found[4] and banned not in found[5] and "k" not in found[5]
    assert [line for line in errors if "warning" in line] == []
    assert translate(f"input={source}", *paths, "lines_at_once=2", "decoding.max_tokens=12")[0] == found
    with_samples = translate(f"input={source}", paths[0], paths[2], SAMPLING, "--nbest", "5")[0]
    texts = [[text for number, text in (line.split("\t") for line in with_samples) if int(number) == n] for n in range(1, 11)]
    assert all(text.startswith("do ki") for text in texts[0]) and not any("k" in text or banned in text for text in texts[5])


def test_unmet_constraints_are_reported_and_undefined_ones_refused(translate, lines, tmp_path):
    source = write(tmp_path / "in.txt", [*lines[:4], ""])
    limits = "decoding.max_length_factor=1e-9", "decoding.max_length_offset=3"
    phrases = write(tmp_path / "phrases", ["be", "ba bi bo bu", "", "be ku", "be"])
    found, errors = translate(f"input={source}", f"must_appear={phrases}", *limits)
    assert "be" in found[0] and found[1] == "" and "be ku" in found[3]
    assert errors[1:] == [
        f"warning: {source}, line 2: no translation within the limits of length meets the constraints; raise "
        "decoding.max_length_offset, or relax them; its translation is empty",
        f"warning: {source}, line 5: the line is empty, but it has constraints; its translation is empty",
        "warning: 2 of 5 lines have no translation: 2, 5",
    ]
    record = json.loads(translate(f"input={source}", f"must_appear={phrases}", *limits, "--json")[0][1])
    assert record["hypotheses"] == [] and record["error"].startswith("no translation within the limits")
    many = write(tmp_path / "many", ["x" * 1001, "", "", "", ""])
    assert (
        "must_not_appear: 1,001 bytes of strings are more than 1,000"
        in translate(f"input={source}", f"must_not_appear={many}")[1][1]
    )
    crowded = write(tmp_path / "crowded", ["\t".join(["be"] * 51), "", "", "", ""])
    assert "must_appear: 51 phrases are more than 50; give fewer" in translate(f"input={source}", f"must_appear={crowded}")[1][1]
    prefixes, mbr = write(tmp_path / "prefixes", ["", "ba bi bo bu", "", "", ""]), "decoding.method=mbr"
    found, errors = translate(f"input={source}", f"prefix={prefixes}", mbr, "decoding.mbr_samples=4", *limits)
    assert found[0] and found[1] == "" and "line 2: no translation within the limits of length" in errors[1]
    short = write(tmp_path / "short", ["be"])
    for arguments, message in [
        ((f"must_appear={phrases}", SAMPLING), "must_appear needs decoding.method = beam, but it is sampling"),
        ((f"must_appear={phrases}", "decoding.diversity_groups=3"), "must_appear needs decoding.diversity_groups = 1"),
        (("compile=true", SAMPLING), "compile=true needs plain beam search and a decoder with self-attention"),
        ((f"score={phrases}", f"prefix={phrases}"), "score takes translations as they are, .*leave out prefix"),
        ((f"prefix={short}",), "in.txt has 5 lines, but .*short has 1"),
        (("decoding.top_k=5",), "top_k needs method = sampling or mbr, but the method is beam"),
        (("--interactive", f"prefix={phrases}"), "--interactive reads lines that you type.*leave out input, prefix"),
    ]:
        with pytest.raises(UserError, match=message):
            translate(f"input={source}", *arguments)


@slow
def test_the_library_does_as_the_command(run, lines, translate, tmp_path):
    source = write(tmp_path / "in.txt", lines[:3])
    loaded = load_run(run)
    samples = loaded.candidates(lines[:3], num_best=6, method="sampling", top_p=0.9)
    assert [one.text for line in samples for one in line] == [
        line.split("\t")[1] for line in translate(f"input={source}", SAMPLING, "decoding.top_p=0.9", "--nbest", "6")[0]
    ]
    found = loaded.translate(
        lines[:3], prefixes=["do", "", ""], must_appear=[[], ["ku gi", "be"], []], must_not_appear=[[], [], ["a"]]
    )
    assert found[0].startswith("do") and "ku gi" in found[1] and "be" in found[1] and "a" not in found[2]
    with pytest.warns(UserWarning, match="line 2: no translation within the limits") as caught:
        assert loaded.translate(lines[:2], must_appear=[[], ["ku " * 30]], max_length_offset=1)[1] == ""
    assert caught[0].filename == __file__
    for wrong in ({"must_appear": ["be", "", ""]}, {"must_not_appear": [["a\tb"], [], []]}, {"prefixes": ["a"]}):
        with pytest.raises(UserError):
            loaded.translate(lines[:3], **wrong)
    assert load_folder(run).config.decoding.beam_size == 3
