"""The surprisal of words: against the enumeration of words of a toy vocabulary, and the command."""

import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import run_here
from test_causal_lm import make_config
from test_minimal_pairs import VOCAB, build, score_alone, write
from toydata import WORDS

from treenet.evaluation.prefix_trees import PieceScores, score_pieces
from treenet.evaluation.surprisal import word_bits
from treenet.jobs.train_run import run_training
from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.settings import UserError
from treeproc.online.spaced_words import _starts, encode_spaced
from treeproc.shards.schema import EOS_ID

OPENING = [4, 5, 6]  # pieces of the toy vocabulary that begin a word
INNER = [piece for piece in range(VOCAB.pieces) if piece not in (*OPENING, EOS_ID)]


def test_words_have_the_probabilities_of_an_enumeration():
    """After each beginning, words up to three pieces, longer words and the end have the probability 1 together."""
    model = build().double()
    lines = [[], [4], [5, INNER[0]], [4, INNER[1], INNER[0], 6]]
    words = [(first, *rest) for size in (0, 1) for first in OPENING for rest in itertools.product(INNER, repeat=size)]
    for line in lines:
        starts = [place for place, piece in enumerate(line) if piece in OPENING]
        nll, begins = score_alone(model, line, [*OPENING, EOS_ID])
        reached = math.exp(-math.fsum(nll[:-1]))  # p(the pieces so far)
        is_first = not line
        boundary = 1.0 if is_first else math.exp(-begins[-1])
        total = math.exp(-nll[-1]) / boundary  # the end
        found = dict(score_pieces(model, [line, *([*line, *word] for word in words)], [*OPENING, EOS_ID]))
        bits = word_bits(found[0], starts)
        assert 2 ** -bits[-1] == pytest.approx(total)
        longer = 0.0
        for number, word in enumerate(words, start=1):
            scores = found[number]
            joint = math.exp(-math.fsum(scores.nll[: len(line) + len(word)])) / reached  # p(pieces | line)
            ends = math.exp(-scores.begins[-1])  # p(a word begins or the line ends | pieces)
            probability = 2 ** -word_bits(scores, [*starts, len(line)])[-2]
            assert probability == pytest.approx(joint * ends / boundary)
            total += probability
            longer += joint * (1 - ends) / boundary if len(word) == 2 else 0.0
        others = 1 - math.exp(-score_alone(model, [], [*OPENING, EOS_ID])[1][0]) if is_first else 0.0
        assert total + longer + others == pytest.approx(1, abs=1e-9)


def test_rows_sum_to_the_nll():
    nll, begins = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([0.1, 0.2, 0.4, 0.8, 1.6])
    bits = word_bits(PieceScores(nll, begins), [0, 2, 3])
    expected = [3 + 0.4, 4 - 0.4 + 0.8, 8 - 0.8 + 1.6, 16 - 1.6]
    assert np.array(bits) * math.log(2) == pytest.approx(expected) and sum(bits) * math.log(2) == pytest.approx(31)


def test_words_begin_at_blanks():
    assert _starts(["▁", "do", "n't", "▁", "▁go", "."]) == [0, 3]
    assert _starts(["▁a", "▁b", "<0xE2>", "▁c"]) == [0, 1, 3]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    text = write(folder, "text.en", "".join(f"ba be {word} bo\n" for word in WORDS))
    splits = [f"splits.train.source=[{text}]", f"splits.valid.source=[{text}]"]
    options = ["format=text", "parser.name=words", "subwords.vocab_size=290", "filters.drop_overlap=none", "workers=0"]
    done = run_here("preprocess.py", "--out", folder / "data", *splits, *options)
    assert done.returncode == 0, done.stderr
    run_training(make_config(folder / "data", "model.name=causal_transformer", "max_steps=4"), folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_the_command_writes_words_and_ends(run, tmp_path):
    text = write(tmp_path, "story.txt", "ba  be Ü.\n\n  bo ba▁be\n")
    done = run_here("score_lm.py", "--out", run, f"surprisal={text}")
    assert done.returncode == 0 and "first pieces is of pieces that begin no word" in done.stdout, done.stderr
    rows = [line.split("\t") for line in (run / "language_model.surprisal-story.tsv").read_text().splitlines()]
    assert [row[:2] for row in rows[1:5]] == [["1", "ba"], ["1", "be"], ["1", "Ü."], ["1", "</s>"]]
    assert [row[:2] for row in rows[5:]] == [["3", "bo"], ["3", "ba"], ["3", "be"], ["3", "</s>"]]
    entry = read_json(run / "scores.json")["surprisal-story"]
    assert entry["nll"] * entry["num_targets"] == pytest.approx(
        math.log(2) * math.fsum(float(row[2]) for row in rows[1:]), rel=1e-6
    )
    assert (entry["num_words"], entry["num_examples"]) == (6, 2) and 0 < entry["other_first_pieces"] < 1
    assert f"has {-math.log2(1 - entry['other_first_pieces']):.2f} bits too many; leave it out, or train longer" in done.stdout
    assert "note: 1 of 2 sentences have unknown pieces or bytes" in done.stdout and "several sentences" not in done.stderr
    encoded = Path(shutil.copytree(run.parent / "data" / "encoded", tmp_path / "given" / "encoded"))
    facts = read_json(encoded / "index.json")
    facts["parser_settings"]["name"] = "given"
    atomic_write(encoded / "index.json", json_bytes(facts))
    with pytest.raises(UserError, match="input files, but surprisal reads text alone; give a run whose data set has a parser$"):
        encode_spaced(text, encoded.parent)
    several = write(tmp_path, "several.txt", "ba be.\nba be. Ba be bi. Bo.\n")
    index = run.parent / "data" / "text" / "index.json"
    known = read_json(index)
    said = "1 of 2 lines, for example line 2: 'ba be. Ba be bi. Bo.'; each line is"
    # Of texts with one sentence a line, with several, and of texts without a parser, which are not looked at.
    for notices, is_told in (({"sentences": {"count": 5}}, True), ({"sentences": {"count": 6}}, False), ({}, False)):
        of_train = known["notices"]["train"]["source"] | notices | {"lines": 100}
        atomic_write(index, json_bytes(known | {"notices": {"train": {"source": of_train}}}))
        done = run_here("score_lm.py", "--out", run, f"surprisal={several}")
        assert done.returncode == 0 and (said in done.stderr) == is_told
    atomic_write(index, json_bytes(known))
    done = run_here("score_lm.py", "--out", run, f"surprisal={write(tmp_path, 'a.csv', 'ba,be')}")
    assert done.returncode == 2 and "a.csv must have one text a line, but its name is that of a table (csv)" in done.stderr
    done = run_here("score_lm.py", "--out", run, f"surprisal={tmp_path / 'none'}")
    assert done.returncode == 2 and "none: No such file" in done.stderr
    for content, message in (
        ("ba\nba\tbe\n", "story.txt, line 2: expected words between blanks, but found a tab"),
        ("\n \n", "story.txt has no words; give a file with one sentence a line"),
    ):
        text.write_text(content)
        done = run_here("score_lm.py", "--out", run, f"surprisal={text}")
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("error") == 1
    done = run_here("score_lm.py", "--out", run, f"surprisal={text}", f"blimp={text}")
    assert done.returncode == 2 and "surprisal: leave it out, or leave" in done.stderr
    file = run / "language_model.surprisal-story.tsv"
    done = run_here("evaluate.py", "--compare", file, file, "--out", tmp_path / "compared")
    assert done.returncode == 2 and "has the surprisal of words, but --compare takes scores of sentences" in done.stderr
    done = run_here("evaluate.py", "--compare", run, run, "split=surprisal-story", "--out", tmp_path / "compared")
    assert done.returncode == 2 and "has the surprisal of words, but --compare takes scores of sentences" in done.stderr
