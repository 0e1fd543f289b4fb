"""Learner of the dependency parser: Stanza's own loss, batches and noise that are what they say, a file that Stanza loads."""

import copy

import numpy as np
import pytest
import stanza
import torch
from stanza.models.common.doc import Document
from stanza.models.depparse.data import DataLoader
from stanza.models.depparse.trainer import unpack_batch
from torch import nn

from treeproc.extras.parser_training.config import DEPENDENCY_CONSTANTS as FIXED
from treeproc.extras.parser_training.config import DependencySettings, FitSettings
from treeproc.extras.parser_training.dependency import DependencyLearner, TagNoise
from treeproc.extras.parser_training.loop import fit
from treeproc.extras.parser_training.treebank import sentences_in
from treeproc.parsers.dependency import DependencyParser, supports
from treeproc.parsers.weights import Weights
from treeproc.readers.numbered_lines import read_texts

pytestmark = pytest.mark.slow

TREEBANK = """
1 The the DET DT 2 det
2 dog dog NOUN NN 3 nsubj
3 barks bark VERB VBZ 0 root
4 !?! !?! PUNCT . 3 punct

1 Dogs dog NOUN NNS 2 nsubj
2 see see VERB VBP 0 root
3 the the DET DT 5 det
4 old old ADJ JJ 5 amod
5 cats cat NOUN NNS 2 obj
6 in in ADP IN 8 case
7 the the DET DT 8 det
8 garden garden NOUN NN 2 obl

1 Run run VERB VB 0 root

1 A a DET DT 2 det
2 cat cat NOUN NN 3 nsubj
3 sleeps sleep VERB VBZ 0 root
4 and and CCONJ CC 5 cc
5 barks bark VERB VBZ 3 conj
6 . . PUNCT . 3 punct
"""
TINY = DependencySettings(word_dim=12, word_cutoff=1, hidden_dim=16, scorer_dim=10, batch_words=12)
EXACT = TINY.model_copy(update={"dropout": 0.0, "tag_noise": 0.0})


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes of which no two are equal, and no hidden words."""
    for name, value in {"char_dim": 6, "char_hidden_dim": 8, "tag_dim": 7, "word_dropout": 0.0}.items():
        monkeypatch.setitem(FIXED, name, value)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("treebank") / "toy.conllu"
    rows = [line.split() for line in TREEBANK.strip().split("\n")]
    lines = ["\t".join([*row[:5], "_", *row[5:], "_", "_"]) if row else "" for row in rows]
    path.write_text("\n".join(lines) + "\n\n")
    return sentences_in(read_texts([path]))


def document(sentences) -> Document:
    columns = ("id", "text", "upos", "xpos", "head", "deprel")
    rows = [
        zip(range(1, len(s.words) + 1), s.words, s.upos, s.xpos, (g + 1 for g in s.governors), s.deprels, strict=True)
        for s in sentences
    ]
    return Document([[dict(zip(columns, row, strict=True)) for row in sentence] for sentence in rows])


def randomised(learner: DependencyLearner) -> None:
    """Stanza's biaffine forms start at zero, where most gradients are zero too."""
    torch.manual_seed(5)
    learner.model.double()
    for parameter in learner.model.parameters():
        nn.init.normal_(parameter, std=0.3)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    out = {name: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    model.zero_grad()
    return out


def test_loss_and_gradients_are_those_of_stanza(sentences):
    learner = DependencyLearner(sentences, sentences, EXACT, seed=1)
    randomised(learner)
    model = learner.model.train()
    order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i].words))
    loss = learner.loss(np.array(order))
    loss.backward()
    ours = gradients(model)
    loader = DataLoader(document(sentences), 1000, model.args, None, vocab=model.vocab, evaluation=True)
    (batch,) = list(loader)
    inputs, _, word_places, sizes, spelled_in, text = unpack_batch(batch, "cpu")
    theirs, _ = model(*inputs, word_places, sizes, spelled_in, text)
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-12)
    expected = gradients(model)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)
    # What the model does not read has no gradient; all the rest has one.
    still = {name for name, gradient in expected.items() if not gradient.any()}
    assert still <= {"drop_replacement"}


def test_bf16_is_close(sentences):
    losses = []
    for precision in ("fp32", "bf16"):
        learner = DependencyLearner(sentences, sentences, EXACT.model_copy(update={"precision": precision}), seed=1)
        randomised(learner)
        losses.append(learner.model.float().train() and learner.loss(np.array([1, 3, 0, 2])).item())
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def test_batches_take_every_sentence_once(sentences):
    learner = DependencyLearner(sentences * 30, sentences, TINY, seed=1)
    sizes = np.array([len(s.words) + 1 for s in sentences * 30])
    epochs = [learner.batches(epoch) for epoch in (0, 1)]
    for batches in epochs:
        assert sorted(np.concatenate(batches).tolist()) == list(range(120))
        for batch in batches:
            assert (np.diff(sizes[batch]) <= 0).all() and sizes[batch].sum() <= TINY.batch_words + sizes[batch].max()
    assert all((a == b).all() for a, b in zip(epochs[0], learner.batches(0), strict=True))
    assert [b.tolist() for b in epochs[0]] != [b.tolist() for b in epochs[1]]


def test_tag_noise_takes_tags_of_the_same_ending():
    words = ["", "walking", "King", "a", "sing", "mat", "format"]
    assert (TagNoise(words, 0.0).draw(np.arange(7)) == np.arange(7)).all()
    np.random.seed(0)
    drawn = np.array([TagNoise(words, 1.0).draw(np.arange(7)) for _ in range(200)])
    assert [set(column) for column in drawn.T.tolist()] == [{0}, {1, 2, 4}, {1, 2, 4}, {3}, {1, 2, 4}, {5, 6}, {5, 6}]
    places = np.full((2, 5000), 5)
    assert (TagNoise(words, 0.5).draw(places) == 6).mean() == pytest.approx(0.25, abs=0.02)


def test_learnt_arcs_are_those_that_stanza_reads_from_the_file(sentences, tmp_path):
    settings = EXACT.model_copy(update={"dropout": 0.1, "batch_words": 60})
    learner = DependencyLearner(sentences * 8, sentences, settings, seed=1)
    best = fit(learner, tmp_path / "run", FitSettings(epochs=32, learning_rate=0.03, average=0.9, evaluations=2), seed=1)
    assert best["las"] == 100 and best["uas"] == 100
    learner.save(tmp_path / "depparse.pt")
    saved = torch.load(tmp_path / "depparse.pt", weights_only=True)
    assert {value.dtype for value in saved["model"].values()} == {torch.float16}
    (tmp_path / "resources.json").write_text("{}")
    pipeline = stanza.Pipeline(
        "en",
        dir=str(tmp_path),
        package=None,
        processors={"tokenize": "default", "depparse": "default"},
        **{"tokenize_pretokenized": True, "depparse_model_path": str(tmp_path / "depparse.pt"), "depparse_pretagged": True},
        **{"allow_unknown_language": True, "download_method": None, "use_gpu": False, "logging_level": "ERROR"},
    )
    parsed = pipeline.processors["depparse"].process(document(sentences))
    model = pipeline.processors["depparse"].trainer.model
    assert supports(Weights.of(model))
    assert not any(supports(Weights.of(copy_with(model, **{name: True}))) for name in ("pretrain", "use_ufeats"))
    tags = [list(zip(s.upos, s.xpos, strict=True)) for s in sentences]
    arcs = DependencyParser(Weights.of(model.eval())).parse([s.words for s in sentences], tags, 100)
    for sentence, read, own in zip(sentences, parsed.sentences, arcs, strict=True):
        assert [(word.head - 1, word.deprel) for word in read.words] == own
        assert own == list(zip(sentence.governors, sentence.deprels, strict=True))


def copy_with(model: nn.Module, **args) -> nn.Module:
    other = copy.copy(model)
    other.args = model.args | args
    return other
