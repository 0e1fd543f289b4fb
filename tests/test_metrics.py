"""Scores of known translations."""

import numpy as np
import pytest
import sacrebleu

from treenet.inference.metrics import compare_seeds, compare_systems, compute_scores
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


def spoil(seed: int, share: float) -> list[str]:
    """The references with words of other places in a share of all places."""
    random = np.random.default_rng(seed)
    words = [line.split() for line in REFERENCES]
    return [" ".join(str(random.choice(line)) if random.random() < share else word for word in line) for line in words]


@pytest.mark.parametrize("shares", [(0.5, 0.1), (0.3, 0.25), (0.1, 0.4)])
def test_comparing_one_seed_is_the_paired_bootstrap_of_sacrebleu(shares):
    baseline, system = spoil(1, shares[0]), spoil(2, shares[1])
    found = compare_seeds([baseline], [system], REFERENCES, num_samples=300)
    expected = compare_systems(baseline, system, REFERENCES, num_samples=300)["bleu"]
    assert found.difference == pytest.approx(expected.difference) and found.p_value == pytest.approx(expected.p_value)
    assert found.interval[0] < found.difference < found.interval[1]


def test_comparing_seeds_takes_the_mean_over_seeds():
    groups = [[spoil(seed, share) for seed in seeds] for share, seeds in ((0.4, (1, 2, 3)), (0.2, (4, 5, 6)))]
    means = [np.mean([compute_scores(lines, REFERENCES)["bleu"] for lines in group]) for group in groups]
    found = compare_seeds(*groups, REFERENCES, num_samples=200)
    assert found.difference == pytest.approx(means[1] - means[0])
    back = compare_seeds(*groups[::-1], REFERENCES, num_samples=200)
    assert back.difference == pytest.approx(-found.difference) and back.p_value == found.p_value
    assert back.interval == pytest.approx((-found.interval[1], -found.interval[0]))
    same = compare_seeds(groups[0], groups[0][::-1], REFERENCES, num_samples=50)
    assert (same.difference, same.p_value) == (0, 1)
