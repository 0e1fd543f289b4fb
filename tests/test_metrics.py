"""Scores of known translations."""

import pytest
import sacrebleu

from treenet.inference.metrics import compare_systems, compute_scores
from treeproc.settings import UserError

REFERENCES = [
    f"the {animal} sat on the {thing} and looked at us ." for animal in ("cat", "dog", "cow") for thing in ("mat", "sofa", "car")
]


def test_the_references_score_100_with_signatures():
    scores = compute_scores(REFERENCES, REFERENCES)
    assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    assert scores["num_examples"] == 9
    version = f"version:{sacrebleu.__version__}"
    assert scores["bleu_signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}"
    assert scores["chrf_signature"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|{version}"


def test_bleu_of_a_known_case():
    """Six of seven words with one wrong at the end: precisions 5/6, 4/5, 3/4, 2/3 and brevity exp(1 - 7/6)."""
    scores = compute_scores(["a b c d e x"], ["a b c d e f g"])
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25 * 2.718281828 ** (1 - 7 / 6))


def test_case_and_tokenisation_are_those_of_13a():
    assert compute_scores(["Yes , we can go ."], ["Yes, we can go."])["bleu"] == pytest.approx(100)
    assert compute_scores(["yes, we can go."], ["Yes, we can go."])["bleu"] < 90


@pytest.mark.parametrize("lines", [REFERENCES[:-1], []])
def test_another_number_of_lines_is_refused(lines):
    with pytest.raises(UserError, match=f"must have one line per reference, that is 9, but have {len(lines)}"):
        compute_scores(lines, REFERENCES)


def test_nothing_to_score_is_refused():
    with pytest.raises(UserError, match="no lines to score"):
        compute_scores([], [])


def test_paired_bootstrap_tells_better_worse_and_equal():
    worse = [line.replace("looked at us", "left") for line in REFERENCES]
    better = compare_systems(worse, REFERENCES, REFERENCES, num_samples=200)
    assert better["bleu"].difference > 10 and better["bleu"].p_value < 0.05 and better["chrf"].p_value < 0.05
    assert "bs:200|seed:12345" in better["bleu"].signature
    assert compare_systems(REFERENCES, worse, REFERENCES, num_samples=200)["bleu"].difference == -better["bleu"].difference
    assert compare_systems(worse, worse, REFERENCES, num_samples=200)["chrf"].p_value == 1
    with pytest.raises(UserError, match="system translations: must have one line per reference"):
        compare_systems(worse, worse[1:], REFERENCES)
