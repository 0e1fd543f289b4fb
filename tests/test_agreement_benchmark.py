"""The simple readers of the probe of agreement: rules on trees, and a regression."""

import numpy as np
import pytest
from agreement_readers import Prefix, find_head, first_noun, fit, last_noun, mean_of_both

from treeproc.trees.spans import read_brackets

HEADS = (
    # brackets, the head, its base noun phrase, whether it is plural
    ("(ROOT (NP (NP (DT the) (NNS keys)) (PP (IN to) (NP (DT the) (NN door)))))", "keys", "the keys", True),
    ("(ROOT (NP (NP (NP (NNS boys)) (POS ')) (NN dog)))", "dog", "boys ' dog", False),
    ("(ROOT (S (NP (PRP i)) (VP (VBP know) (SBAR (IN that) (S (NP (DT the) (NN man) (PP (IN with) (NP (NNS cats)))))))))", "man",
     "the man with cats", False),
    ("(ROOT (NP (NP (DT the) (NN man)) (CC and) (NP (PRP$ his) (NN dog))))", "man", "the man", True),
    ("(ROOT (NP (NP (DT the) (NNS laws)) (PP (IN of) (NP (NN cause) (CC and) (NN effect)))))", "laws", "the laws", True),
    ("(ROOT (S (NP (DT the) (NN end)) (VP (VBD came) (SBAR (IN when) (S (NP (DT these)))))))", "these", "these", True),
    ("(ROOT (S (VP (VB go))))", "go", "go", False),
)  # fmt: skip


def prefix_of(brackets: str) -> Prefix:
    return Prefix(True, *read_brackets(brackets), np.zeros(1), np.zeros(1), np.zeros(1))


@pytest.mark.parametrize(("brackets", "word", "phrase", "plural"), HEADS)
def test_the_head_of_the_subject(brackets, word, phrase, plural):
    prefix = prefix_of(brackets)
    head = find_head(prefix)
    assert (prefix.words[head.word], " ".join(prefix.words[head.start : head.end]), head.plural) == (word, phrase, plural)


def test_nouns_are_plural_by_their_tags_or_by_those_of_the_data():
    prefix = prefix_of("(ROOT (NP (NP (DT the) (NNS keys)) (PP (IN to) (NP (DT the) (NN NNS)))))")
    assert first_noun(prefix) and not last_noun(prefix) and last_noun(prefix.with_given_tags())


def test_a_regression_learns_what_a_line_separates():
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(600, 3))
    plural = inputs @ np.array([2.0, -1.0, 0.0]) > 0.5
    predict = fit(inputs[:400], plural[:400])
    assert (predict(inputs[400:]) == plural[400:]).mean() > 0.95


def test_the_mean_of_both_numbers_and_its_interval():
    plural = np.array([False] * 100 + [True] * 900)
    right = np.array([True] * 50 + [False] * 50 + [True] * 900)
    mean, half, *of_number = mean_of_both(right, plural)
    assert (mean, of_number) == (75.0, [50.0, 100.0])
    draws = np.random.default_rng(1).binomial(100, 0.5, 20_000) / 100  # of the singular ones; the plural ones are always right
    assert half == pytest.approx(100 * 1.96 * draws.std() / 2, rel=0.03)
