"""Training of the constituency parser: the loss of Stanza's own trainer, from index arrays."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from stanza.models.common.vocab import VOCAB_PREFIX
from stanza.models.constituency import parser_training, transition_sequence
from stanza.models.constituency.parse_transitions import TransitionScheme
from stanza.models.constituency.parse_tree import Tree
from stanza.models.constituency.trainer import Trainer

from tests.strategies import trees
from treeproc.extras.parser_training.config import CONSTITUENCY_CONSTANTS as FIXED
from treeproc.extras.parser_training.config import ConstituencySettings, FitSettings
from treeproc.extras.parser_training.constituency import ConstituencyLearner, TaggedTree, build_model, write_vectors
from treeproc.extras.parser_training.derivations import transitions_of
from treeproc.extras.parser_training.layers import _LevelLSTM
from treeproc.extras.parser_training.loop import fit
from treeproc.parsers.shift_reduce import ShiftReduceParser
from treeproc.parsers.weights import ConstituencyModel
from treeproc.trees.spans import SpanTree, parents_and_subtree_ends, read_brackets

pytestmark = pytest.mark.slow

PRETRAIN = Path(__file__).parent.parent / "treeproc/models/en/vectors.pt"
SMALL = {"hidden_size": 6, "min_word_count": 1}
NARROW = {"transition_hidden_size": 4, "transition_embedding_dim": 3, "word_embedding_dim": 5, "tag_embedding_dim": 3}
DRY = {"word_dropout": 0, "stack_dropout": 0, "output_dropout": 0, "rare_word_dropout": 0, "tag_dropout": 0}


@st.composite
def tagged_trees(draw) -> TaggedTree:
    """A random tree under ROOT: unary chains, sentences of one word, words right below the root."""
    tree = draw(trees())
    words = draw(st.lists(st.sampled_from("abcdefgh"), min_size=tree.num_leaves, max_size=tree.num_leaves))
    labels = draw(st.lists(st.sampled_from(["NP", "S", "VP"]), min_size=len(tree.spans), max_size=len(tree.spans)))
    spans = [(0, tree.num_leaves), *tree.leaf_spans]
    return _tagged(words, SpanTree(["ROOT", *labels], [s for s, _ in spans], [e for _, e in spans]))


def _tagged(words: list[str], tree: SpanTree) -> TaggedTree:
    return TaggedTree(words, [[word.upper() for word in words]], tree)


def _left_branching(length: int) -> TaggedTree:
    ends = [length, *range(length, 1, -1)]
    return _tagged(["a", "b"] * (length // 2), SpanTree(["ROOT", *["S"] * (length - 1)], [0] * length, ends))


def _right_branching(length: int) -> TaggedTree:
    starts = [0, *range(length - 1)]
    return _tagged(["c", "d"] * (length // 2), SpanTree(["ROOT", *["NP"] * (length - 1)], starts, [length] * length))


DEEP = [_left_branching(30), _right_branching(30), _tagged(["a"], SpanTree(["ROOT"] + ["S"] * 6, [0] * 7, [1] * 7))]


def _stanza_tree(tree: TaggedTree) -> Tree:
    parents, _ = parents_and_subtree_ends(tree.tree)

    def build(node: int) -> Tree:
        inner = [(tree.tree.starts[n], tree.tree.ends[n], build(n)) for n, parent in enumerate(parents) if parent == node]
        covered = {i for start, end, _ in inner for i in range(start, end)}
        bare = [i for i in range(tree.tree.starts[node], tree.tree.ends[node]) if i not in covered]
        inner += [(i, i + 1, Tree(tree.taggings[0][i], [Tree(tree.words[i])])) for i in bare]
        return Tree(tree.tree.labels[node], [child for _, _, child in sorted(inner, key=lambda c: c[:2])])

    return build(0)


def _learner(data: list[TaggedTree], **changes) -> ConstituencyLearner:
    fixed = {name: changes.pop(name) for name in FIXED.keys() & changes}
    config = ConstituencySettings(**SMALL | changes)
    torch.manual_seed(0)
    with patch.dict(FIXED, NARROW | fixed):
        return ConstituencyLearner(build_model(data, config, PRETRAIN), data, data, config, seed=1)


def _all(learner: ConstituencyLearner):
    """The whole training data as one batch."""
    (batch,) = learner.batches(0)
    return batch


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _check_against_stanza(data: list[TaggedTree]) -> None:
    learner = _learner(data, **DRY)
    model = learner.model.double().train()
    loss = learner.loss(_all(learner))
    loss.backward()
    ours = _gradients(model)

    built = [_stanza_tree(tree) for tree in data]
    gold = transition_sequence.build_treebank(built, TransitionScheme.IN_ORDER)
    numbers = {t: torch.tensor([i]) for i, t in enumerate(model.transitions)}
    entropy = torch.nn.CrossEntropyLoss(reduction="sum")
    items = parser_training.compose_train_data(built, gold)
    args = model.args | {"watch_regex": None}
    stats = parser_training.train_model_one_batch(1, 0, model, items, numbers, lambda x: x, entropy, None, args)
    steps = sum(map(len, gold))
    assert stats.epoch_loss == pytest.approx(loss.item() * steps, rel=1e-12)
    theirs = _gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name] * steps, gradient, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@num_examples(12)
@given(data=st.lists(tagged_trees(), min_size=1, max_size=4))
def test_loss_and_gradients_are_those_of_stanzas_trainer(data):
    torch.set_default_dtype(torch.float64)
    try:
        _check_against_stanza(data)
    finally:
        torch.set_default_dtype(torch.float32)


def test_loss_and_gradients_of_deep_trees(double):
    _check_against_stanza(DEEP)


@num_examples(50)
@given(tree=tagged_trees())
def test_transitions_are_stanzas(tree):
    labels = sorted(set(tree.tree.labels))
    found = transitions_of(tree.tree, len(tree.words), {label: 2 + i for i, label in enumerate(labels)})
    names = ["Shift", "CloseConstituent", *(f"OpenConstituent(('{label}',))" for label in labels)]
    wanted = transition_sequence.build_sequence(_stanza_tree(tree), TransitionScheme.IN_ORDER)
    assert [names[t] for t in found] == [repr(t) for t in wanted]


@num_examples(10)
@given(data=st.lists(tagged_trees(), min_size=1, max_size=3))
def test_model_knows_the_longest_chain(data):
    model = _learner(data).model
    assert model.unary_limit == max(_stanza_tree(tree).count_unary_depth() for tree in data) + 1


@num_examples(20)
@given(
    below=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=4),
    first=st.integers(1, 3),
)
def test_gradients_of_the_level_lstm(below, first):
    """Any tree of rows, several of which continue one."""
    edges, rows = [0, first], [0] * first
    for level in below:
        rows += [number % edges[-1] for number in level]
        edges.append(len(rows))
    generator = torch.Generator().manual_seed(len(rows))
    projected, recurrent = (
        torch.randn(n, m, generator=generator, dtype=torch.float64, requires_grad=True) for n, m in ((len(rows), 8), (8, 2))
    )
    assert torch.autograd.gradcheck(lambda p, r: _LevelLSTM.apply(p, r, torch.tensor(rows), edges), (projected, recurrent))


def test_dropout_comes_from_the_seeds():
    learner = _learner(DEEP)
    learner.model.train()

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        np.random.seed(seed)
        return learner.loss(_all(learner)).item()

    assert loss(1) == loss(1) != loss(2)


def test_rare_words_and_tags_are_now_and_then_unknown():
    data = [_tagged([*"aaaab"], SpanTree(["ROOT"], [0], [5]))]
    for changes, words, tags in (
        ({}, ("a", "b"), ("A", "B")),
        ({"rare_words": 0.5, "rare_word_dropout": 1}, ("a", None), ("A", "B")),
        ({"tag_dropout": 1}, ("a", "b"), (None,)),
        ({"min_word_count": 2}, ("a", None), ("A", "B")),
    ):
        learner = _learner(data, **DRY | changes)
        model = learner.model.train()
        learner.loss(_all(learner)).backward()
        for names, known, gradient in (
            (words, model.delta_word_map, model.delta_embedding.weight.grad),
            (tags, model.tag_map, model.tag_embedding.weight.grad),
        ):
            used = {known[name] if name else 1 for name in names}
            assert set(gradient.abs().sum(1).nonzero().flatten().tolist()) == used, changes


def test_batches_are_a_function_of_seed_and_epoch():
    random = np.random.default_rng(0)
    sizes = random.integers(1, 40, 300)
    words = [[f"w{i}"] * size for i, size in enumerate(sizes)]
    data = [TaggedTree(w, [["A"] * len(w), ["B"] * len(w)], SpanTree(["ROOT"], [0], [len(w)])) for w in words]
    config = ConstituencySettings(**SMALL, batch_words=200)
    model = build_model(data, config, PRETRAIN)
    weights = [2.0] * 100 + [1.0] * 100 + [0.5] * 100
    learner = ConstituencyLearner(model, data, data, config, 3, weights)

    def drawn(learner, epoch):
        return [(b.sentences.tolist(), b.taggings.tolist()) for b in learner.batches(epoch)]

    epochs = [drawn(learner, epoch) for epoch in range(6)]
    assert epochs == [drawn(ConstituencyLearner(model, data, data, config, 3, weights), epoch) for epoch in range(6)]
    assert epochs[0] != epochs[1] and epochs[0] != drawn(ConstituencyLearner(model, data, data, config, 4, weights), 0)
    taken = np.zeros((6, 300), int)
    taggings = set()
    for epoch, batches in enumerate(epochs):
        assert max(sizes[sentences].sum() for sentences, _ in batches) <= 200 + 39
        for sentences, chosen in batches:
            np.add.at(taken[epoch], sentences, 1)
            assert all(number // 2 == sentence for number, sentence in zip(chosen, sentences, strict=True))
            taggings |= set(chosen)
    assert (taken[:, :100] == 2).all() and (taken[:, 100:200] == 1).all()
    assert 0.3 < taken[:, 200:].mean() < 0.7 and len(taggings) > 500
    seldom = ConstituencyLearner(model, data, data, config, 3, [1e-9] * 300)
    assert [[len(sentences) for sentences, _ in drawn(seldom, epoch)] for epoch in range(6)] == [[1]] * 6


def test_words_without_a_tree_have_the_vectors_of_their_neighbours(tmp_path):
    """Two words that stand in the same places in the text are one to the parser, whether a tree has them or not."""
    data = [_tagged(["the", "Cat", "sleeps"], SpanTree(["ROOT", "NP"], [0, 0], [3, 2]))]
    text = [[word, pet, verb] for word in ("the", "a", "The") for pet in ("cat", "dog", "mouse") for verb in ("sleeps", "eats")]
    config = ConstituencySettings(**SMALL)
    with patch.dict(FIXED, vector_dim=4):
        write_vectors(tmp_path / "vectors.pt", [*text, ["once", "seen"]])
    model = build_model(data, config, tmp_path / "vectors.pt")
    assert set(model.emb_vocab) - set(VOCAB_PREFIX) == {"the", "a", "cat", "dog", "mouse", "sleeps", "eats"}
    assert model.embedding.weight.dtype == torch.float16 and not model.embedding.weight.requires_grad
    known = {word: model.embedding.weight[model.emb_vocab.unit2id(word)].float() for word in ("cat", "dog", "the")}
    torch.testing.assert_close(known["cat"], known["dog"])
    assert (known["cat"] - known["the"]).abs().max() > 0.1
    parser = ShiftReduceParser(ConstituencyModel.of(model.eval()))
    dog, cat, unknown = (parser._word_states([[("the", "D"), (pet, "N")]]) for pet in ("Dog", "mouse", "snake"))
    torch.testing.assert_close(dog, cat)
    assert (dog - unknown).abs().max() > 1e-4
    learner = ConstituencyLearner(model, data, data, config, 1)
    assert learner._pretrained.tolist() == [model.emb_vocab.unit2id(word) for word in ("the", "cat", "sleeps")]


def test_overfits_and_stanza_loads_what_is_saved(tmp_path):
    texts = [
        "(ROOT (S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .)))",
        "(ROOT (S (NP (PRP I)) (VP (VBP see) (NP (NP (DT a) (NN man)) (PP (IN with) (NP (DT a) (NN dog)))))))",
        "(ROOT (S (S (NP (PRP it)) (VP (VBZ barks))) (CC and) (S (NP (PRP I)) (VP (VBP see) (NP (PRP it))))))",
        "(ROOT (NP (NN dog)))",
        "(ROOT (FRAG (ADVP (RB often)) (. .)))",
    ]
    data = [TaggedTree(words, [tags], tree) for words, tags, tree in map(read_brackets, texts)]
    learner = _learner(data, **SMALL | DRY | {"hidden_size": 24, "word_embedding_dim": 16, "batch_words": 10})
    assert learner.evaluate()["score"] < 50
    best = fit(learner, tmp_path, FitSettings(epochs=80, learning_rate=2e-2, average=0.9, evaluations=3), seed=1)
    assert best["score"] == 100
    learner.save(tmp_path / "constituency.pt")
    stored = torch.load(tmp_path / "constituency.pt", weights_only=True)["params"]["model"]
    assert {value.dtype for value in stored.values() if value.is_floating_point()} == {torch.float16}
    loaded = Trainer.load(str(tmp_path / "constituency.pt"), {"wordvec_pretrain_file": str(PRETRAIN)}).model.eval()
    read = ConstituencyModel.of(loaded)
    assert read.is_supported and read.is_plain and read.reads_xpos and loaded.uses_xpos()
    sentences = [list(zip(tree.words, tree.taggings[0], strict=True)) for tree in data]
    assert ShiftReduceParser(read).parse(sentences, 100) == [tree.tree for tree in data]
