"""Unsupervised parsing: the top-down algorithm against a recursive one, brackets counted by hand, trees without a model."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_encoding import check_tree

from treenet.evaluation.settings import ParseSettings, ParsingConfig
from treenet.evaluation.unsupervised_parse import (
    CUTS,
    GoldTree,
    ParsedSentence,
    _warn_of_punctuation,
    _warn_of_unknown_names,
    binary_tree,
    counted,
    format_parse,
    over_kept_words,
    parse_links,
    score_brackets,
    score_sentences,
    warn_of_gold,
    write_tree,
)
from treeproc.common.settings import UserError
from treeproc.trees.spans import SpanTree, read_brackets, write_brackets


def reference_parse(link_probs: np.ndarray, layer: int, start: int, end: int, config: ParsingConfig) -> set[tuple[int, int]]:
    """Spans inside and with [start, end], words that links start, ..., end - 1 stand between, recursively."""
    spans = {(start, end + 1)}
    if end - start == 1:
        return spans
    cut = min(range(start, end), key=lambda k: link_probs[layer, k])
    if link_probs[layer, cut] > config.split_threshold:
        return spans if layer == config.min_layer else reference_parse(link_probs, layer - 1, start, end, config)
    for first, last in ((start, cut), (cut + 1, end)):
        if last > first:
            strong = all(link_probs[layer, k] > config.descend_threshold for k in range(first, last))
            spans |= reference_parse(link_probs, max(layer - 1, config.min_layer) if strong else layer, first, last, config)
    return spans


@given(
    words=st.integers(2, 12),
    seed=st.integers(0, 10**6),
    thresholds=st.tuples(*[st.sampled_from([0.0, 0.5, 0.7, 0.8, 1.0])] * 2),
    layers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@num_examples(100)
def test_the_parse_is_that_of_the_recursive_algorithm(words, seed, thresholds, layers):
    link_probs = np.sort(np.random.default_rng(seed).random((4, words - 1)) ** 0.3, axis=0).astype(np.float32)
    config = ParsingConfig(
        start_layer=max(layers), min_layer=min(layers), split_threshold=thresholds[0], descend_threshold=thresholds[1]
    )
    found = parse_links(link_probs, config)
    assert len(set(found)) == len(found)
    assert set(found) == reference_parse(link_probs, max(layers), 0, words - 1, config)


def test_the_weakest_link_is_cut_and_strong_spans_are_left_to_lower_layers():
    link_probs = np.array([[0.2, 0.9, 0.1, 0.3], [0.75, 0.95, 0.5, 0.85]])  # a b c | d e, then a | b c
    assert sorted(parse_links(link_probs, ParsingConfig(min_layer=1))) == [(0, 3), (0, 5), (1, 3), (3, 5)]
    flat = np.array([[0.9, 0.95, 0.99]])
    assert parse_links(flat, ParsingConfig(min_layer=0)) == [(0, 4)]
    assert parse_links(np.zeros((1, 0)), ParsingConfig(min_layer=0)) == []


@pytest.mark.parametrize("config", [{}, {"start_layer": 2, "min_layer": 0}, {"start_layer": 0, "min_layer": 1}])
def test_layers_that_are_not_there_are_refused(config):
    with pytest.raises(UserError, match="with layers from 0 to 1, but start_layer is"):
        parse_links(np.zeros((2, 3)), ParsingConfig(**config))


def test_brackets_are_counted_as_by_hand():
    gold = [{(0, 2), (0, 3)}, {(1, 3)}, set(), set()]
    found = [{(0, 2), (2, 4)}, {(0, 2)}, {(0, 2)}, set()]
    scores = score_brackets(gold, found)
    assert scores["sentence_f1"] == pytest.approx((0.5 + 0 + 0 + 1) / 4)
    assert (scores["precision"], scores["recall"]) == pytest.approx((1 / 4, 1 / 3))
    assert scores["f1"] == pytest.approx(2 / 7)
    assert score_brackets([{(0, 2)}] * 2, [{(0, 2)}] * 2) == dict.fromkeys(("sentence_f1", "precision", "recall", "f1"), 1.0)


def test_punctuation_and_trivial_spans_go():
    kept = [True, False, True, True, False]  # the , old dog .
    spans = [(0, 5), (0, 4), (1, 4), (2, 4), (3, 5), (1, 2), (0, 2)]
    assert over_kept_words(spans, kept) == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (1, 1), (0, 1)]
    assert counted(over_kept_words(spans, kept), sum(kept)) == {(1, 3)}


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("words", [0, 1, 2, 9])
def test_trees_without_a_model_are_binary(kind, words):
    found = binary_tree(words, kind, np.random.default_rng(3))
    spans = [(start, end) for start, end in found if end - start > 1]
    assert sorted(set(found) - set(spans)) == ([(word, word + 1) for word in range(words)] or [(0, 0)])
    assert len(set(spans)) == len(spans) == max(0, words - 1)
    assert all(a[1] <= b[0] or b[1] <= a[0] or (a[0] - b[0]) * (a[1] - b[1]) <= 0 for a in spans for b in spans)
    if words == 9 and kind in ("left", "right"):
        assert set(spans) == ({(0, k) for k in range(2, 10)} if kind == "left" else {(k, 9) for k in range(8)})


def sentence(example_id: int, words: str, tags: str, gold: list, parse: list) -> ParsedSentence:
    return ParsedSentence(example_id, GoldTree(words.split(), tags.split(), gold), parse)


SENTENCES = [
    sentence(0, "the dog ( saw ) me .", "DT NN -LRB- VBD -RRB- PRP .", [((0, 7), "S"), ((0, 2), "NP"), ((2, 6), "VP")], [(0, 7)]),
    sentence(1, "I saw a dog run", "PRP VBD DT NN VB", [((0, 5), "S"), ((1, 5), "VP"), ((2, 5), "S")], [(0, 5), (1, 5), (2, 4)]),
    sentence(2, "Yes .", "UH .", [((0, 2), "INTJ")], [(0, 2)]),
]


def test_scores_of_sentences():
    scores = score_sentences(SENTENCES, ParseSettings())
    assert (scores["num_sentences"], scores["left_out"], scores["num_brackets"]) == (2, 1, 4)
    assert scores["sentence_f1"] == pytest.approx((0 + 0.5) / 2)
    assert scores["recall_by_label"] == {
        "VP": {"count": 2, "recall": 0.5},
        "NP": {"count": 1, "recall": 0.0},
        "S": {"count": 1, "recall": 0.0},
    }
    assert scores["baselines"]["right"]["sentence_f1"] == pytest.approx((0.5 + 0.8) / 2)
    assert scores["baselines"]["left"]["sentence_f1"] == pytest.approx((0.5 + 0) / 2)
    assert score_sentences(SENTENCES, ParseSettings(max_words=4))["num_sentences"] == 1
    with pytest.raises(UserError, match="none of the 3 gold trees has a bracket that counts.* and nodes, or a larger max_words$"):
        score_sentences(SENTENCES, ParseSettings(max_words=2))
    with pytest.raises(UserError, match="none of the 0 gold trees has a bracket that counts.* and nodes$"):
        score_sentences([], ParseSettings())
    assert "model" in format_parse("test", scores) and "VP 50.0 of 2" in format_parse("test", scores)


def test_written_trees_are_trees_of_the_treebank_format():
    lines = [write_tree(one) for one in SENTENCES]
    assert lines[2] == "(X (UH Yes) (. .))"
    for one, line in zip(SENTENCES, lines, strict=True):
        words, tags, tree = read_brackets(line)
        check_tree(tree, len(words))
        assert (words, tags) == (one.gold.words, one.gold.tags)
        assert set(zip(tree.starts, tree.ends, strict=True)) == set(one.parse)
    assert write_tree(sentence(3, "", "", [], [])) == "" and write_tree(sentence(4, "No", "UH", [], [])) == "(X (UH No))"


@pytest.mark.parametrize("is_binarised", [False, True])
def test_nodes_of_unknown_labels_are_told_where_trees_are_binary(caplog, is_binarised):
    """`@QP` of a label that train lacks is `<unk>`, as `QP` is, so it counts as a gold bracket."""
    one = sentence(0, "a b c", "DT NN NN", [((0, 3), "<unk>"), ((1, 3), "<unk>")], [])
    _warn_of_unknown_names("test", [one.gold], is_binarised)
    told = "test: 2 nodes have labels that the training data lacks; those that only make the trees binary count as gold brackets"
    assert (told in caplog.text) is is_binarised and "words have tags" not in caplog.text


@pytest.mark.parametrize(("tags", "f1"), [("ART NN $_ ART NN $.", 2 / 3), ("D N MARK D N MARK", 0.0)])
def test_german_punctuation_does_not_count_and_unknown_tags_of_it_are_told(caplog, tags, f1):
    assert "($_ -)" in write_brackets(SpanTree(["S"], [0], [2]), ["der", "-"], ["ART", "$("])
    gold = [((0, 6), "S"), ((0, 2), "NP"), ((3, 5), "NP")]
    one = sentence(0, "der Hund - die Katze .", tags, gold, [(0, 6), (2, 6)])
    _warn_of_punctuation("test", [one.gold], ParseSettings().punctuation)
    assert ("the most frequent tags are D, N, MARK" in caplog.text) is (f1 == 0)
    assert score_sentences([one], ParseSettings())["f1"] == pytest.approx(f1)


def test_trees_of_a_parser_are_not_gold(caplog):
    parsed = ("shipped", "parsed", "the parser's (shipped)")
    for name, source, said in (("given", "parsed", ""), parsed, ("given", "random", "random")):
        caplog.clear()
        warn_of_gold(Path("DATA"), {"tree_source": source, "parser_settings": {"name": name}})
        assert said in caplog.text and bool(caplog.text) == bool(said)
