"""The tagger's training against Stanza's own model and pipeline."""

import random
from unittest.mock import patch

import numpy as np
import pytest
import stanza
import torch
from stanza.models.common.doc import Document
from stanza.models.pos.data import Dataset
from stanza.models.pos.trainer import unpack_batch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from treeproc.extras.parser_training.config import TAGGER_CONSTANTS as FIXED
from treeproc.extras.parser_training.config import FitSettings, TaggerSettings
from treeproc.extras.parser_training.layers import both_ways, dropout, word_vectors
from treeproc.extras.parser_training.loop import fit
from treeproc.extras.parser_training.tagger import Source, TaggerLearner, tag, tag_shares, with_upos
from treeproc.extras.parser_training.treebank import Tagged
from treeproc.parsers.tagger import supports
from treeproc.parsers.weights import Weights

pytestmark = pytest.mark.slow

LEXICON = {
    "the": ("DET", "DT"),
    "dog": ("NOUN", "NN"),
    "dogs": ("NOUN", "NNS"),
    "Rover": ("PROPN", "NNP"),
    "barks": ("VERB", "VBZ"),
    "bark": ("VERB", "VBP"),
    "extraordinarily": ("ADV", "RB"),
    "old": ("ADJ", "JJ"),
    "!?!": ("PUNCT", "."),
}
QUIET = TaggerSettings(dropout=0, word_cutoff=1, batch_words=60)
SMALL = patch.dict(FIXED, char_hidden_dim=16, word_emb_dim=16)


def sentences(count: int, seed: int) -> list[Tagged]:
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        words = rng.choices(list(LEXICON), k=rng.randint(1, 9))
        out.append(Tagged(words, *([LEXICON[w][i] for w in words] for i in (0, 1))))
    return out


@pytest.fixture
def learner(monkeypatch):
    """Weights that leave no term of the loss at zero."""
    for name in ("word_dropout", "unknown_word", "drop_final_punct"):
        monkeypatch.setitem(FIXED, name, 0)
    out = TaggerLearner([Source(sentences(60, 1))], {"toy": sentences(9, 2)}, QUIET, seed=5)
    with torch.no_grad():
        for p in out.model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) / 8)
    return out


def test_loss_and_gradients_are_stanzas(learner):
    batch = max(learner.batches(0), key=len)
    chosen = [sentences(60, 1)[i] for i in batch]
    assert len({len(s.words) for s in chosen}) > 1
    document = Document(
        [[{"id": (i + 1,), "text": w, "upos": u, "xpos": x} for i, (w, u, x) in enumerate(zip(*s, strict=True))] for s in chosen]
    )
    model = learner.model.train()
    data = Dataset(document, learner.args | {"augment_nopunct": 0}, None, vocab=learner.vocab)
    inputs, _, word_order, sizes, word_sizes, text = unpack_batch(next(iter(data.to_loader(batch_size=len(batch)))), "cpu")
    gradients = []
    losses = [model(*inputs, word_order, sizes, word_sizes, text)[0], learner.loss(batch)]
    for loss in losses:
        model.zero_grad()
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[0], losses[1])
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 30
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-6), name


@SMALL
def test_stanza_loads_the_trained_tagger(tmp_path):
    settings = TaggerSettings(hidden_dim=16, word_cutoff=1, batch_words=200)
    learner = TaggerLearner([Source(sentences(200, 3))], {"toy": sentences(40, 4)}, settings, seed=5)
    best = fit(learner, tmp_path / "run", FitSettings(epochs=8, learning_rate=0.02, average=0.9, evaluations=2), seed=1)
    assert best["toy_xpos"] > 95 and best["toy_upos"] > 95 and best["score"] == best["toy_xpos"]
    learner.save(tmp_path / "pos.pt")
    (tmp_path / "resources.json").write_text("{}")
    pipeline = stanza.Pipeline(
        lang="en",
        dir=str(tmp_path),
        package=None,
        processors={"tokenize": "default", "pos": "default"},
        tokenize_pretokenized=True,
        pos_model_path=str(tmp_path / "pos.pt"),
        download_method=None,
        allow_unknown_language=True,
        use_gpu=False,
        logging_level="ERROR",
    )
    words = [s.words for s in sentences(20, 6)] + [["Zyzzyva", "…"]]
    theirs = [[(w.upos, w.xpos) for w in s.words] for s in pipeline([list(s) for s in words]).sentences]
    assert theirs == tag(learner.model, words)
    model = pipeline.processors["pos"].trainer.model
    assert supports(Weights.of(model)) and model.word_emb.weight.dtype == torch.float32


@SMALL
def test_noisy_tags_are_as_wrong_as_wanted(tmp_path):
    settings = TaggerSettings(hidden_dim=16, word_cutoff=1, batch_words=200)
    sources = [Source(sentences(150, 3)), Source(sentences(150, 4))]
    learner = TaggerLearner(sources, {"toy": sentences(40, 5)}, settings, seed=5)
    fit(learner, tmp_path, FitSettings(epochs=6, learning_rate=0.02, average=0.9, evaluations=1), seed=1)
    gold = sources[1].sentences
    assert tag_shares(tag(learner.model, [s.words for s in gold]), gold)["xpos"].value > 0.97
    first, second = learner.noisy_tags(1, accuracy=90, copies=2)
    assert first != second and first == learner.noisy_tags(1, accuracy=90, copies=1)[0]
    for tagging in (first, second):
        assert [len(tags) for tags in tagging] == [len(s.words) for s in gold]
        right = [a == b for tags, s in zip(tagging, gold, strict=True) for a, b in zip(tags, s.xpos, strict=True)]
        assert 0.86 < sum(right) / len(right) < 0.94


def test_batches_depend_on_seed_and_epoch_alone():
    def drawn(seed, epoch):
        sources = [Source(sentences(50, 1)), Source(sentences(40, 2), share=0.25)]
        return TaggerLearner(sources, {}, QUIET, seed).batches(epoch)

    first, again, later = drawn(1, 0), drawn(1, 0), drawn(1, 1)
    assert [b.tolist() for b in first] == [b.tolist() for b in again] != [b.tolist() for b in later]
    assert sorted(np.concatenate(first).tolist())[:50] == list(range(50)) and len(np.concatenate(first)) == 60
    assert set(np.concatenate(first)) != set(np.concatenate(later))
    sizes = [len(s.words) for s in sentences(50, 1) + sentences(40, 2)]
    assert all(max(sizes[i] for i in batch) * len(batch) <= QUIET.batch_words for batch in first)


def test_missing_upos_is_what_word_and_xpos_have_elsewhere():
    known = [Tagged(["is", "has", "runs", "Is"], ["AUX", "AUX", "VERB", "AUX"], ["VBZ"] * 4), Tagged(["is"], ["VERB"], ["VBZ"])]
    unknown = Tagged(["IS", "walks", "runs", "§"], None, ["VBZ", "VBZ", "VBZ", "SYM"])
    assert with_upos([*known, unknown])[2].upos == ["AUX", "AUX", "VERB", "X"]
    assert with_upos(known) == known


def test_vectors_tell_words_by_their_neighbours():
    rng = random.Random(1)
    animals, verbs = [f"animal{i}" for i in range(6)], [f"verb{i}" for i in range(6)]
    text = [["The", rng.choice(animals), rng.choice(verbs), "it", "."] for _ in range(600)]
    vectors = word_vectors(text, [*animals, *verbs, "never"], size=4, seed=1)
    assert vectors.shape == (13, 4) and not vectors[-1].any() and vectors.square().mean().item() == pytest.approx(1)
    cosines = torch.nn.functional.cosine_similarity(vectors[:12, None], vectors[None, :12], dim=2)
    same = torch.block_diag(torch.ones(6, 6), torch.ones(6, 6)).bool()
    assert cosines[same].min() > cosines[~same].max() + 0.3


def test_words_that_prefer_no_neighbour_have_zero_vectors():
    assert not word_vectors([["Yes"], ["No"]], ["yes", "no"], size=4, seed=1).any()  # they were NaN


def test_information_is_that_of_the_definition():
    text = [["a", "b", "c"], ["b", "a"], ["c", "c", "a", "b"]]
    words = ["a", "b", "c"]
    contexts = ["a", "b", "c", "<edge>"]
    counts = np.zeros((3, 4, 4))
    for sentence in text:
        padded = ["<edge>"] * 2 + sentence + ["<edge>"] * 2
        for i, word in enumerate(sentence, start=2):
            for k, place in enumerate((-2, -1, 1, 2)):
                counts[words.index(word), k, contexts.index(padded[i + place])] += 1
    counts = counts.reshape(3, -1)
    columns = counts.sum(0) ** 0.75
    with np.errstate(divide="ignore", invalid="ignore"):
        matrix = np.maximum(np.log(counts / counts.sum(1, keepdims=True) / (columns / columns.sum())), 0)
    matrix = np.nan_to_num(matrix)
    left, scale, _ = np.linalg.svd(matrix, full_matrices=False)
    expected = left * np.sqrt(scale)
    expected /= np.sqrt(np.square(expected).mean())
    vectors = word_vectors(text, words, size=3, seed=1).numpy()
    np.testing.assert_allclose(vectors @ vectors.T, expected @ expected.T, atol=1e-4)


def test_lstms_on_padded_rows_are_those_on_packed_ones():
    torch.manual_seed(1)
    lstm = torch.nn.LSTM(5, 3, bidirectional=True, batch_first=True)
    x, sizes = torch.randn(4, 7, 5, requires_grad=True), torch.tensor([7, 5, 5, 1])
    first = torch.randn(2, 2, 4, 3)
    packed = lstm(pack_padded_sequence(x, sizes, batch_first=True), tuple(first))[0]
    expected = pad_packed_sequence(packed, batch_first=True)[0]
    there = torch.arange(7) < sizes[:, None]
    found = both_ways(lstm, x, sizes, *first)
    torch.testing.assert_close(found[there], expected[there])
    weights = torch.randn(int(there.sum()), 6)
    ours, theirs = (torch.autograd.grad((out[there] * weights).sum(), [x, *lstm.parameters()]) for out in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_keeps_the_mean():
    np.random.seed(1)
    out = dropout(torch.ones(400, 500), 0.3)
    assert out.unique().tolist() == pytest.approx([0, 1 / (1 - 77 / 256)])
    assert out.mean().item() == pytest.approx(1, abs=0.01) and (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert dropout(out, 0) is out
