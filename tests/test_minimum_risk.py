"""Minimum Bayes risk: chrF of all pairs against sacrebleu, and the choice against a slow one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from sacrebleu.metrics import CHRF

from treenet.translation.hypotheses import Hypothesis
from treenet.translation.reranking import choose_by_risk, chrf_matrix

TEXTS = [
    "",
    " ",
    "a",
    "Der alte Mann sah einen Hund.",
    "Der alte  Mann.",
    "ein Hund",
    "日本語のテキスト",
    "日本 a\u00a0b",
]


def reference_chrf(hypothesis: str, reference: str) -> float:
    return CHRF().sentence_score(hypothesis, [reference]).score


def test_chrf_of_all_pairs_is_that_of_sacrebleu():
    assert chrf_matrix(TEXTS).tolist() == [[reference_chrf(one, other) for other in TEXTS] for one in TEXTS]


@num_examples(60)
@given(st.lists(st.text("ab é.", max_size=12), min_size=1, max_size=5))
def test_chrf_of_any_pairs_is_that_of_sacrebleu(texts):
    assert chrf_matrix(texts).tolist() == [[reference_chrf(one, other) for other in texts] for one in texts]


@num_examples(60)
@given(st.lists(st.tuples(st.text("ab ", max_size=4), st.integers(-3, 0)), min_size=1, max_size=8), st.integers(1, 4))
def test_the_choice_is_that_of_a_slow_one(drawn, num_best):
    texts = [text for text, _ in drawn]
    samples = [Hypothesis((number,), 0.0, float(log_prob)) for number, (_, log_prob) in enumerate(drawn)]
    expected = []
    for text in set(texts):
        mean = sum(reference_chrf(text, other) for other in texts) / len(texts)
        sample = max((one for one, own in zip(samples, texts, strict=True) if own == text), key=lambda h: (h.log_prob, -h.ids[0]))
        expected.append((round(mean, 9), sample.log_prob, -sample.ids[0]))
    found = choose_by_risk(samples, texts, num_best)
    assert [(round(one.score, 9), one.log_prob, -one.ids[0]) for one in found] == sorted(expected, reverse=True)[:num_best]


def test_without_samples_there_is_no_choice():
    assert choose_by_risk([], [], 3) == []


def test_equal_means_tie_whatever_the_order_of_their_terms():
    texts = ["a", "ba", "aab", "ab", "baa"]
    samples = [Hypothesis((number,), 0.0, 0.0) for number in range(len(texts))]
    ranked = [texts[one.ids[0]] for one in choose_by_risk(samples, texts, 5)]
    assert ranked[2:4] == ["ba", "ab"]  # mirrored pairs: their terms are the same in another order


def test_a_text_that_was_drawn_often_counts_as_often():
    samples = [Hypothesis((n,), 0.0, -1.0) for n in range(5)]
    found = choose_by_risk(samples, ["ein Hund", "ein Hund", "ein Hund", "zwei Katzen", "zwei Katzen"], 5)
    assert [one.ids for one in found] == [(0,), (3,)]
    assert found[0].score == pytest.approx((3 * 100 + 2 * reference_chrf("ein Hund", "zwei Katzen")) / 5)
