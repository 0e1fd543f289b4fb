"""Bracket and dependency scores against counts made by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import Tree, trees
from treeproc.trees import scores
from treeproc.trees.scores import (
    BracketScore,
    Share,
    attachment,
    brackets,
    score,
    score_by_length,
    score_sentence,
    span_f1,
    tag_accuracy,
)
from treeproc.trees.spans import SpanTree, read_brackets

GOLD = "(ROOT (S (NP (DT the) (NN man)) (VP (VBZ sees) (NP (DT a) (NN dog)) (PP (IN in) (NP (NN town)))) (. .)))"
# The PP hangs in the object.
WRONG = "(ROOT (S (NP (DT the) (NN man)) (VP (VBZ sees) (NP (NP (DT a) (NN dog)) (PP (IN in) (NP (NN town))))) (. .)))"


def compare(gold: str, predicted: str | None, **options) -> tuple[int, int, int, int]:
    _, tags, tree = read_brackets(gold)
    score = score_sentence(tags, tree, predicted and read_brackets(predicted)[2], **options)
    return score.gold, score.predicted, score.matched, score.exact


def test_attachment_of_a_phrase():
    # Gold: S 0-7, NP 0-2, VP 2-7, NP 3-5, PP 5-7, NP 6-7 = 6 brackets. Predicted: the same and NP 3-7 = 7.
    assert compare(GOLD, WRONG) == (6, 7, 6, 0)
    score = score_sentence(read_brackets(GOLD)[1], read_brackets(GOLD)[2], read_brackets(WRONG)[2])
    assert score.precision == 6 / 7 and score.recall == 1 and score.f1 == 12 / 13


def test_the_gold_tree_is_exact():
    assert compare(GOLD, GOLD) == (6, 6, 6, 1)


def test_labels():
    # One label of three is wrong: NP for S. The spans are right.
    gold, predicted = "(ROOT (S (NP (NN a)) (VP (VB b))))", "(ROOT (NP (NP (NN a)) (VP (VB b))))"
    assert compare(gold, predicted) == (3, 3, 2, 0)
    assert compare(gold, predicted, labelled=False) == (3, 3, 3, 1)


def test_function_tags_do_not_count():
    assert compare("(ROOT (S (NP-SBJ-1 (NN a)) (VP (VB b))))", "(ROOT (S (NP (NN a)) (VP (VB b))))") == (3, 3, 3, 1)


def test_punctuation_at_the_edges(monkeypatch):
    # Without the quotes and the stop, S 0-6 and S 1-5 of the two trees are both over words 1-4, and so is the VP's end.
    gold = "(ROOT (S (`` ``) (NP (NN a)) (VP (VB b) (NP (NN c))) ('' '') (. .)))"
    predicted = "(ROOT (`` ``) (S (NP (NN a)) (VP (VB b) (NP (NN c) ('' '')))) (. .))"
    assert compare(gold, predicted) == (4, 4, 4, 1)
    # With them, the two NPs of one word and nothing else are over the same words: only NP "a" is.
    monkeypatch.setattr(scores, "PUNCTUATION", ())
    assert compare(gold, predicted) == (4, 4, 1, 0)


def test_a_node_of_punctuation_alone_goes():
    # PRN holds a comma alone: it has no words. Gold: S, NP, VP.
    gold = "(ROOT (S (NP (NN a)) (PRN (, ,)) (VP (VB b))))"
    assert compare(gold, "(ROOT (S (NP (NN a)) (, ,) (VP (VB b))))") == (3, 3, 3, 1)
    # Nothing but punctuation: no brackets at all, and nothing is wrong.
    assert compare("(ROOT (NP (. .)))", "(ROOT (X (. .)))") == (0, 0, 0, 1)
    assert compare("(ROOT (NP ($*LRB* -) ($_ -)))", "(ROOT (X ($*LRB* -) ($_ -)))") == (0, 0, 0, 1)


def test_tags_of_the_gold_tree_say_what_punctuation_is(monkeypatch):
    # The parser took the hyphen for a word of the NP, or for punctuation: the gold tag HYPH makes it a word.
    gold, predicted = "(ROOT (NP (NN a) (HYPH -) (NN b)))", "(ROOT (NP (NN a)) (: -) (NN b))"
    assert compare(gold, predicted) == (1, 1, 0, 0)
    monkeypatch.setattr(scores, "PUNCTUATION", {"HYPH"})
    assert compare(gold, predicted) == (1, 1, 0, 0)  # NP is over words 0-2, not 0-1
    assert compare(gold, "(ROOT (NP (NN a) (: -) (NN b)))") == (1, 1, 1, 1)


def test_unary_chains_are_a_multiset():
    # NP over NP over one word is two brackets; one NP matches one of them.
    chain, single = "(ROOT (NP (NP (NN a))))", "(ROOT (NP (NN a)))"
    assert compare(chain, single) == (2, 1, 1, 0)
    assert compare(single, chain) == (1, 2, 1, 0)
    assert compare(chain, chain) == (2, 2, 2, 1)
    # S over VP against VP over S: the same brackets in another order.
    assert compare("(ROOT (S (VP (VB go))))", "(ROOT (VP (S (VB go))))") == (2, 2, 2, 1)


def test_several_roots():
    # Two trees over the words of one: NP 0-1 and S 1-3 (VP 1-3); one S 0-3 over NP 0-1 and VP 1-3.
    gold = SpanTree(["NP", "S", "VP"], [0, 1, 1], [1, 3, 3])
    predicted = SpanTree(["S", "NP", "VP"], [0, 0, 1], [3, 1, 3])
    score = score_sentence(["NN", "VB", "RB"], gold, predicted)
    assert (score.gold, score.predicted, score.matched) == (3, 3, 2)


def test_a_failed_parse_has_no_brackets():
    assert compare(GOLD, None) == (6, 0, 0, 0)
    total = score([(read_brackets(GOLD)[1], read_brackets(GOLD)[2])] * 2, [None, read_brackets(GOLD)[2]])
    assert total == BracketScore(sentences=2, exact=1, gold=12, predicted=6, matched=6)
    assert (total.precision, total.recall, total.exact_match) == (1, 0.5, 0.5)
    # A sentence of one bare word has no brackets in gold either; the failure is not exact all the same.
    assert compare("(ROOT (NN a))", None) == (0, 0, 0, 0)


def test_shares_of_nothing():
    """Nothing predicted is right where nothing is to be found, and only there."""
    for gold, predicted, shares in ((0, 0, (1.0, 1.0, 1.0)), (2, 0, (0.0, 0.0, 0.0)), (0, 2, (0.0, 0.0, 0.0))):
        score = BracketScore(1, 0, gold, predicted, 0)
        assert (score.precision, score.recall, score.f1) == shares
    assert BracketScore().exact_match == 0 and BracketScore(4, 1).exact_match == 0.25


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="the tree has 2 words, but the sentence has 8"):
        score_sentence(read_brackets(GOLD)[1], read_brackets(GOLD)[2], read_brackets("(S (A a) (B b))")[2])


def test_lengths_count_punctuation():
    one = (["NN"], SpanTree(["NP"], [0], [1]))
    ten = (["NN"] * 9 + ["."], SpanTree(["NP"], [0], [10]))
    eleven = (["NN"] * 10 + ["."], SpanTree(["NP", "X"], [0, 0], [11, 1]))
    long = (["NN"] * 41, SpanTree(["NP"], [0], [41]))
    gold = [one, ten, eleven, long]
    classes = score_by_length(gold, [tree for _, tree in gold])
    assert [(name, s.sentences, s.gold) for name, s in classes.items()] == [
        ("1-10", 2, 2), ("11-20", 1, 2), ("21-30", 0, 0), ("31-40", 0, 0), ("41+", 1, 1),
    ]  # fmt: skip


@given(st.lists(trees(max_leaves=9, max_roots=1), min_size=2, max_size=2), st.randoms())
def test_against_lists_of_brackets(drawn: list[Tree], rng: random.Random):
    """The multiset intersection, one bracket at a time; the score is symmetric."""
    count = min(tree.num_leaves for tree in drawn)
    gold, predicted = (labelled(tree, count, rng) for tree in drawn)
    left = list(brackets(predicted).elements())
    matched = 0
    for bracket in brackets(gold).elements():
        if bracket in left:
            left.remove(bracket)
            matched += 1
    found = score_sentence(["NN"] * count, gold, predicted)
    assert found.matched == matched
    assert 0 <= found.f1 <= 1 and found.f1 == score_sentence(["NN"] * count, predicted, gold).f1


def labelled(tree: Tree, count: int, rng: random.Random) -> SpanTree:
    """The tree over its first `count` words, with labels A and B."""
    spans = [(start, min(end, count)) for start, end, _ in tree.spans if start < count]
    return SpanTree([rng.choice("AB") for _ in spans], [s for s, _ in spans], [e for _, e in spans])


def test_tags():
    # Three of four words with a gold tag are right; the last word has none.
    gold, predicted = [["DT", "NN"], ["VB", "NN", ""]], [["DT", "NNS"], ["VB", "NN", "X"]]
    assert tag_accuracy(gold, predicted) == Share(3, 4)
    assert tag_accuracy([[]], [[]]).value == 0


def test_arcs():
    # "he was seen ." He -> seen, was -> seen, seen is the root, the stop -> seen.
    gold = ([2, 2, -1, 2], ["nsubj:pass", "aux:pass", "root", "punct"])
    # He: right, the subtype does not count. Was: right arc, wrong relation. Seen: right. Stop: wrong arc.
    predicted = ([2, 2, -1, 1], ["nsubj", "cop", "root", "punct"])
    both = attachment([gold], [predicted])
    assert (both.unlabelled, both.labelled) == (Share(3, 4), Share(2, 4))
    words = attachment([gold], [predicted], tags=[["PRON", "AUX", "VERB", "PUNCT"]])
    assert (words.unlabelled, words.labelled) == (Share(3, 3), Share(2, 3))
    # The right relation on a wrong arc is wrong.
    assert attachment([([1, -1], ["det", "root"])], [([-1, 0], ["det", "root"])]).labelled == Share(0, 2)


def test_tokens():
    # "can't": gold ca + n't; found can + 't, and the stop of both. One of three tokens matches.
    precision, recall, f1 = span_f1([[(0, 2), (2, 5), (5, 6)]], [[(0, 3), (3, 5), (5, 6)]])
    assert (precision, recall) == (1 / 3, 1 / 3) and f1 == pytest.approx(1 / 3)
    # One token for two: of 1 found none, of 2 wanted none, and the text after it is right.
    assert span_f1([[(0, 2), (2, 5)], [(0, 1)]], [[(0, 5)], [(0, 1)]]) == (1 / 2, 1 / 3, 2 / 5)
    # Tokens of another text do not count.
    assert span_f1([[(0, 1)], []], [[], [(0, 1)]]) == (0, 0, 0)
