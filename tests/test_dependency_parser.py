"""The fast dependency parser gives Stanza's arcs: in any batch, for any length, for any model."""

import itertools

import numpy as np
import pytest
import stanza
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from sample_lines import sample_lines
from stanza.models.depparse.data import DataLoader
from stanza.models.depparse.model import GraphParser
from stanza.models.depparse.trainer import GraphTrainer
from torch import nn

from treeproc.parsers import ParserConfig, build_parser, find_models
from treeproc.parsers.dependency import DependencyParser, best_trees, supports
from treeproc.parsers.stanza_parser import DocumentTagger, stanza_options
from treeproc.parsers.weights import Weights

pytestmark = pytest.mark.slow

SHIPPED = ParserConfig(name="shipped", device="cpu", dependencies=True)
ODD = ["Stop", "?!?!", "see http://a.b.com/x. and me@x.org!", "é", "x" * 100 + " y", "🙂 smiles , 𝔘nicode", "Wait ... what ?!"]
LONG = "The man who saw the dog in the park with two cats and a very old bird that sang , said that it was late . " * 6


LINES = [*sample_lines(24), *ODD, " ".join(LONG.split()[:148])]


@pytest.fixture(scope="module")
def parser():
    return build_parser(SHIPPED)


@pytest.fixture(scope="module")
def plain():
    """Stanza as its manual says."""
    return stanza.Pipeline(**stanza_options(SHIPPED, find_models(SHIPPED)))


@pytest.fixture(scope="module")
def tagged(parser):
    """Words and tags of the lines."""
    words = [line.split() for line in LINES]
    return words, parser._tagger.tag(words, 4096)[0]


def test_a_real_parse(parser):
    row = parser.parse(["The old man saw two dogs in the park."])[0]
    assert row.arcs["governor"] == [2, 2, 3, -1, 5, 3, 8, 8, 3, 3]
    assert row.arcs["deprel"] == ["det", "amod", "nsubj", "root", "nummod", "obj", "case", "det", "obl", "punct"]


def test_arcs_are_those_of_stanza(parser, plain):
    assert supports(Weights.of(plain.processors["depparse"].trainer.model)) and parser._arcs
    for line, parsed, sentence in zip(LINES, parser.parse(LINES), plain(LINES).sentences, strict=True):
        assert parsed.arcs["governor"] == [word.head - 1 for word in sentence.words], line
        assert parsed.arcs["deprel"] == [word.deprel for word in sentence.words], line


def test_the_rest_is_the_same_without_arcs(parser):
    without = build_parser(SHIPPED.model_copy(update={"dependencies": False})).parse(LINES[:20])
    for row, other in zip(parser.parse(LINES[:20]), without, strict=True):
        assert (row.words, row.trees, row.parse_status) == (other.words, other.trees, other.parse_status)
        assert row.arcs and other.arcs is None


def test_documents_give_the_same_arcs(parser, plain, tagged):
    """The slow path, for models that the fast one does not support."""
    words, tags = tagged
    read = DocumentTagger([plain.processors[name] for name in ("pos", "depparse")], dependencies=True).tag(words, 100)
    assert read == (tags, parser._arcs.parse(words, tags, 4096))


def test_neighbours_and_batches_do_not_matter(parser, tagged):
    words, tags = tagged
    expected = parser._arcs.parse(words, tags, 4096)
    assert max(len(sentence) for sentence in words) > 140 and min(len(sentence) for sentence in words) == 1
    assert parser._arcs.parse(words, tags, 1) == expected
    assert parser._arcs.parse(words[::-1], tags[::-1], 60)[::-1] == expected
    for sentence in expected:
        assert [relation for governor, relation in sentence if governor == -1] == ["root"]


@pytest.fixture(scope="module")
def bad(plain):
    """Stanza's parser with weights by chance: cycles, and words with many subjects, in every sentence."""
    shipped = plain.processors["depparse"].trainer.model
    torch.manual_seed(4)
    # In double precision, as such scores are often the same to the last bits of a float.
    model = GraphParser(shipped.args, shipped.vocab).eval().double()
    for scorer in (model.unlabeled.scorer, model.deprel.scorer):
        nn.init.normal_(scorer.W_bilin.weight, std=0.2)
    # Few relations, so that there are always words with two subjects.
    names = shipped.vocab["deprel"]
    kept = [names.unit2id(name) - 4 for name in ("nsubj", "root")]
    with torch.no_grad():
        model.deprel.scorer.W_bilin.bias.fill_(-100)[kept] = 0
    return model


@pytest.mark.filterwarnings("ignore:resolve_head_constraint")
def test_bad_models_are_mended_as_stanza_mends_them(bad, plain, tagged):
    words, tags = ([sentence[:12] for sentence in column[:12]] for column in tagged)
    document = stanza.Document([[{"id": (i + 1,), "text": word} for i, word in enumerate(s)] for s in words])
    document.set(["upos", "xpos"], [tag for sentence in tags for tag in sentence])
    trainer = GraphTrainer(args=bad.args, vocab=bad.vocab, model=bad, device="cpu")
    (batch,) = list(DataLoader(document, 1000, bad.args, None, vocab=bad.vocab, evaluation=True))
    both = []
    for corrects in (False, True):
        expected = trainer.predict(batch, resolve_head_constraints=corrects)
        bad.args = bad.args | {"resolve_head_constraints": corrects}
        arcs = DependencyParser(Weights.of(bad)).parse(words, tags, 4096)
        assert arcs == [[(head - 1, name) for head, name in sentence] for sentence in expected]
        both.append(arcs)
    assert both[0] != both[1]


def reference_best_score(scores: np.ndarray) -> float:
    """The best of all trees with one root, by trying all governors of all words."""
    size = len(scores)
    best = -np.inf
    for governors in itertools.product(range(size), repeat=size - 1):
        tree = (0, *governors)
        above = list(range(size))
        for _ in range(size):
            above = [tree[i] for i in above]
        if governors.count(0) == 1 and not any(above):
            best = max(best, sum(scores[i, tree[i]] for i in range(1, size)))
    return best


@given(seed=st.integers(0, 10**6), sizes=st.lists(st.integers(2, 5), min_size=1, max_size=4), root=st.sampled_from([-3, 0, 3]))
@num_examples(40)
def test_trees_are_the_best_with_one_root(seed, sizes, root):
    random = np.random.default_rng(seed)
    sizes = np.array(sorted(sizes, reverse=True))
    raw = torch.from_numpy(random.normal(size=(len(sizes), sizes[0], sizes[0])) * 2)
    raw[:, :, 0] += root
    raw.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    raw.masked_fill_(torch.from_numpy(np.arange(sizes[0]) >= sizes[:, None])[:, None], -torch.inf)
    scores = raw.log_softmax(2).numpy()
    for governors, score, size in zip(best_trees(scores, sizes), scores, sizes.tolist(), strict=True):
        assert (governors[1:size] == 0).sum() == 1 and (governors[size:] == 0).all()
        found = sum(score[i, governors[i]] for i in range(1, size))
        assert found == pytest.approx(reference_best_score(score[:size, :size]))
