"""Noise on source words against a slow reference: one word, one node at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_bpe_dropout import word_keys
from reference_encoding import binarise, encode_example, split_words
from test_bpe_dropout import rows_of
from test_encode import configs, examples, vocab  # noqa: F401 (vocab is a fixture)
from toydata import write_toy_data
from toyruns import make_task

from treenet.config import SamplingConfig
from treenet.data.input_kinds import ALWAYS
from treenet.data.noise import WordDraws, WordTrees, add_noise
from treenet.data.sampled import Sampler
from treeproc.common.settings import UserError
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED, UNK_ID
from treeproc.shards.store import read_index
from treeproc.stages.encode import RowEncoder
from treeproc.trees.flat_trees import FlatTrees
from treeproc.trees.spans import SpanTree, parents_and_subtree_ends

NOISE = st.fixed_dictionaries(
    {
        "shuffle_distance": st.sampled_from([0, 1, 3]),
        "word_dropout": st.sampled_from([0.0, 0.3, 0.9]),
        "word_mask": st.sampled_from([0.0, 0.5]),
    }
)


def draws(example_id: int, epoch: int, purpose: int, count: int) -> list[float]:
    return [(key >> 11) / 2**53 for key in word_keys(example_id, 3, epoch, purpose, count)]


def reference_noise(words: list, tree: SpanTree, noise: dict, example_id: int, epoch: int) -> tuple[list, SpanTree]:
    """Words (pieces, tag) and the tree over them, with noise."""
    count = len(words)
    moved = [n + draw * (noise["shuffle_distance"] + 1) for n, draw in enumerate(draws(example_id, epoch, 2, count))]
    order = sorted(range(count), key=lambda n: moved[n]) if noise["shuffle_distance"] else list(range(count))
    dropped, masked = draws(example_id, epoch, 3, count), draws(example_id, epoch, 4, count)
    places = [n for n in range(count) if dropped[order[n]] >= noise["word_dropout"]]
    places = places or [n for n in range(count) if dropped[order[n]] == max(dropped)]
    out = [([UNK_ID] if masked[order[n]] < noise["word_mask"] else words[order[n]][0], words[order[n]][1]) for n in places]
    nodes = []
    for node in zip(tree.labels, tree.starts, tree.ends, strict=True):
        inside = [index for index, n in enumerate(places) if node[1] <= n < node[2]]
        if inside:
            nodes.append((node, inside[0], inside[-1] + 1))
    kept = []
    for node, following in zip(nodes, [*nodes, None][1:], strict=True):
        is_same = following is not None and node[1:] == following[1:]
        if not is_same or node[0][1:] == following[0][1:]:
            kept.append(node)
    return out, SpanTree([node[0][0] for node in kept], [node[1] for node in kept], [node[2] for node in kept])


@pytest.mark.slow
@num_examples(80)
@given(st.lists(examples(), min_size=1, max_size=3), configs, NOISE, st.integers(0, 9))
def test_equals_the_slow_reference(vocab, cases, config, noise, epoch):  # noqa: F811
    encoder = RowEncoder(vocab, config)
    plain, names = encoder.subwords._encoder.encode, encoder.labels.names
    for number, (text, parsed) in enumerate(cases):
        text["example_id"] = parsed["example_id"] = 7 * number
    stored = [encode_example(text, parsed, plain, config, encoder.labels, encoder.tags) for text, parsed in cases]
    sampler = Sampler(vocab, config.facts(), SamplingConfig(**noise), seed=3)
    sampled = sampler.source(rows_of(stored), epoch)
    assert sampler.targets(rows_of(stored), epoch).flat.tolist() == [piece for row in stored for piece in row["tgt_pieces"]]
    for number, ((text, parsed), row) in enumerate(zip(cases, stored, strict=True)):
        over_words = encode_example(text, parsed, lambda word: [9], config, encoder.labels, encoder.tags)
        spans, labels = over_words["spans"], [names[label] for label in over_words["nodes"]["label"]]
        leaves = row["leaves"]
        words = [
            ([p for p, w in zip(leaves["piece"], leaves["word_index"], strict=True) if w == word], tag)
            for word, tag in enumerate(over_words["leaves"]["pos_tag"])
        ]
        every_word = config.tree_source == "flat_tags"  # whose nodes follow their words
        nodes = list(zip(labels, spans["start"], spans["end"], strict=True))
        if every_word:  # in pre-order, the node of a word is the last over it
            ends = [node[1:] for node in nodes]
            own = {max(i for i, end in enumerate(ends) if end == (word, word + 1)) for word in range(len(words))}
            nodes = [node for i, node in enumerate(nodes) if i not in own]
        tree = SpanTree([node[0] for node in nodes], [node[1] for node in nodes], [node[2] for node in nodes])
        words, tree = reference_noise(words, tree, noise, 7 * number, epoch)
        tags = [encoder.tags.names[tag] for _, tag in words]
        tree = split_words(tree, tags, [len(pieces) for pieces, _ in words], 1 if every_word else 2)
        pieces = [piece for own, _ in words for piece in own]
        tree = binarise(tree, len(pieces), config.binarize) if config.binarize != "none" else tree
        if config.tree_source == "unlabelled":
            shown = [label if label.removeprefix("@").startswith(SPLIT_WORD_PREFIX) else UNANALYSED for label in tree.labels]
            tree = SpanTree(shown, tree.starts, tree.ends)
        ends = parents_and_subtree_ends(tree)[1]
        expected = [pieces, [encoder.labels[label] for label in tree.labels], tree.starts, tree.ends, ends]
        assert [list(getattr(sampled, name))[number].tolist() for name in ALWAYS[:-1]] == expected
        assert list(sampled.words)[number].tolist() == [n for n, (own, _) in enumerate(words) for _ in own]
        assert list(sampled.pos_tags)[number].tolist() == [tag for own, tag in words for _ in own]


def test_a_tag_stays_where_it_is():
    count = 6
    words = WordTrees(
        FlatTrees(np.zeros(1, int), np.zeros(1, int), np.full(1, count), []),
        np.arange(count), np.array([count]), np.arange(10, 10 + count), np.ones(count, int),
    )  # fmt: skip
    config = SamplingConfig(shuffle_distance=3, word_dropout=0.5, word_mask=0.5)
    fixed, seen = np.arange(count) == 0, set()
    for number in range(50):
        noisy = add_noise(words, config, WordDraws(np.array([number]), words.words, 3, 0), fixed)
        assert noisy.pieces[0] == 10 and noisy.tags[0] == 0 and len(noisy.pieces) >= 2
        assert noisy.words.tolist() == [len(noisy.counts)] == noisy.trees.ends.tolist()
        seen.add(tuple(noisy.pieces.tolist()))
    assert len(seen) > 30


def test_words_move_no_further_than_the_distance():
    keys = [draws(number, 0, 2, 30) for number in range(200)]
    for distance in (1, 3):
        order = np.argsort(np.arange(30) + (distance + 1) * np.array(keys), axis=1)
        moved = np.abs(order - np.arange(30))
        assert moved.max() == distance and (moved > 0).mean() > 0.2


def test_a_model_of_arcs_refuses_to_leave_out_words(tmp_path):
    data = write_toy_data(tmp_path / "toy", arcs=True)
    task = make_task(data, "model.name=child_sum_tree2seq", "sampling.word_dropout=0.1")
    with pytest.raises(UserError, match=r"sampling.word_dropout leaves out words that govern others"):
        task.check(read_index(data / "encoded"))
