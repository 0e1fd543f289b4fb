"""The tokeniser's training against Stanza's own data, loss and pipeline."""

import random
from unittest.mock import patch

import pytest
import stanza
import torch
from stanza.models.tokenization.data import TokenizationDataset
from stanza.models.tokenization.trainer import Trainer

from treeproc.extras.parser_training.config import TOKENIZER_CONSTANTS as FIXED
from treeproc.extras.parser_training.config import FitSettings, TokenizerSettings
from treeproc.extras.parser_training.loop import fit
from treeproc.extras.parser_training.tokenizer import Spaced, TokenizerLearner, f1, line_of, spans
from treeproc.parsers.tokenizer import supports
from treeproc.parsers.weights import Weights

pytestmark = pytest.mark.slow

QUIET = TokenizerSettings(dropout=0, batch_chars=400)
WITHOUT_NOISE = {"unit_dropout": 0, "drop_final_punct": 0, "spaced": 0, "dashes": 0}


def sentences(count: int, seed: int) -> list[Spaced]:
    """Words, a full stop at the end, now and then "do" + "n't" and a comma."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        words, spaces = [], []
        for _ in range(rng.randint(1, 6)):
            for word, space in rng.choice([[("We", 1)], [("cat", 1)], [("do", 0), ("n't", 1)], [("7", 0), (",", 1)]]):
                words.append(word)
                spaces.append(bool(space))
        spaces[-1] = False
        out.append(Spaced([*words, "."], [*spaces, True]))
    return out


def test_labels_of_a_line():
    first, second = Spaced(["I", "do", "n't", "."], [True, False, False, True]), Spaced(["a b", "c"], [True, False])
    line = line_of([first, second])
    assert line.text == "I don't. a b c"
    assert "".join(map(str, line.labels)) == "1001001" + "2" + "0" + "001" + "0" + "2"
    assert spans(line) == [(0, 1), (2, 4), (4, 7), (7, 8), (9, 12), (13, 14)]
    assert spans(line, 2) == [(0, 8), (9, 14)]
    assert line_of([first], spaced=True).text == "I do n't ."


def test_f1_counts_pairs():
    assert f1([[(0, 1), (1, 3)], [(0, 2)]], [[(0, 1), (1, 2), (2, 3)], [(0, 2)]]) == pytest.approx(100 * 2 * 2 / (3 + 4))


@patch.dict(FIXED, WITHOUT_NOISE)
def test_arrays_and_loss_are_stanzas():
    learner = TokenizerLearner([sentences(40, 1)], {}, QUIET, seed=3)
    learner.args["feat_dropout"] = learner.args["tok_noise"] = 0
    learner.model.dropout_feat.p = learner.model.toknoise.p = 0
    batch = max(learner.batches(0), key=len)
    assert len({len(line.text) for line in batch}) > 1
    units, features, labels = learner.arrays(batch)
    trainer = Trainer(args=learner.args, vocab=learner.vocab, device="cpu")
    trainer.model.load_state_dict(learner.model.state_dict())
    for i, line in enumerate(batch):
        data = TokenizationDataset(learner.args, input_text=line.text, vocab=learner.vocab, evaluation=True)
        ((u, _, f, _),) = data.para_to_sentences(data.data[0])
        size = len(line.text)
        assert u.tolist() == units[i, :size].tolist() and f.tolist() == features[i, :size].tolist()
        assert labels[i, :size].tolist() == line.labels.tolist() and (labels[i, size:] == -1).all()
    model = trainer.model.train()
    scores = model(units, features, [len(line.text) + 1 for line in batch])
    expected = trainer.criterion(scores.view(-1, 3), labels.view(-1))
    assert learner.loss(batch).item() == pytest.approx(expected.item()) and expected.item() > 0.1


@patch.dict(FIXED, drop_final_punct=1, spaced=0)
def test_noise_keeps_labels_in_place():
    learner = TokenizerLearner([sentences(60, 1)], {}, TokenizerSettings(), seed=3)
    lines = [line for batch in learner.batches(0) for line in batch]
    assert all(len(line.text) == len(line.labels) and line.labels[-1] == 2 and "." not in line.text for line in lines)
    assert all(piece[0] < piece[1] for line in lines for piece in spans(line))
    again = [line.text for batch in learner.batches(0) for line in batch]
    assert [line.text for line in lines] == again != [line.text for batch in learner.batches(1) for line in batch]


@patch.dict(FIXED, WITHOUT_NOISE)
def test_lines_have_the_sentences_that_are_asked_for():
    settings = TokenizerSettings(**QUIET.model_dump() | {"sentences": [2, 4]})
    learner = TokenizerLearner([sentences(60, 1)], {}, settings, seed=3)
    counts = {int((line.labels == 2).sum()) for batch in learner.batches(0) for line in batch}
    assert {2, 4} <= counts <= {1, 2, 3, 4}  # the last line has what is left


@patch.dict(FIXED, WITHOUT_NOISE)
def test_half_precision_has_about_the_same_loss():
    losses = []
    for precision in ("fp32", "bf16"):
        settings = TokenizerSettings(**QUIET.model_dump() | {"precision": precision})
        learner = TokenizerLearner([sentences(40, 1)], {}, settings, seed=3)
        learner.model.eval()
        losses.append(learner.loss(max(learner.batches(0), key=len)))
    assert losses[0].dtype == losses[1].dtype and losses[1].item() == pytest.approx(losses[0].item(), rel=0.01)


@patch.dict(FIXED, drop_final_punct=0, spaced=0, dashes=1)
def test_dashes_stand_with_and_without_blanks():
    learner = TokenizerLearner([sentences(80, 1)], {}, TokenizerSettings(), seed=3)
    lines = [line for batch in learner.batches(0) for line in batch]
    around = set()
    for line in lines:
        for start, end in spans(line):
            piece = line.text[start:end]
            if set(piece) & set("–—-"):
                assert piece in ("–", "—", "--")
                around.add((line.text[start - 1] == " ", line.text[end] == " "))
    assert len(around) == 4 and not any("7," in line.text for line in lines)
    assert learner.vocab.unit2id("—") != learner.vocab.unit2id("<UNK>")


def test_stanza_loads_the_trained_tokenizer(tmp_path):
    dev = sentences(40, 2)
    learner = TokenizerLearner([sentences(400, 1)], {"toy": dev}, TokenizerSettings(batch_chars=1500), seed=3)
    best = fit(learner, tmp_path / "run", FitSettings(epochs=6, learning_rate=0.02, average=0.9, evaluations=3), seed=1)
    assert best["toy_tokens"] > 99 and best["toy_sentences"] > 90
    assert best["score"] == pytest.approx((best["toy_tokens"] + best["toy_sentences"]) / 2)
    learner.save(tmp_path / "tokenizer.pt")
    (tmp_path / "resources.json").write_text("{}")
    pipeline = stanza.Pipeline(
        lang="en",
        dir=str(tmp_path),
        package=None,
        processors={"tokenize": "default"},
        tokenize_model_path=str(tmp_path / "tokenizer.pt"),
        tokenize_no_ssplit=True,
        download_method=None,
        allow_unknown_language=True,
        use_gpu=False,
        logging_level="ERROR",
    )
    texts = [line_of([s]).text for s in dev]
    theirs = [[t.text for t in pipeline(text).sentences[0].tokens] for text in texts]
    right = sum(a == list(b.words) for a, b in zip(theirs, dev, strict=True))
    assert right >= 36
    trainer = pipeline.processors["tokenize"].trainer
    assert supports(Weights(trainer.model.state_dict(), trainer.args, {}))
    assert torch.allclose(trainer.model.tok_clf.weight, learner.model.tok_clf.weight, atol=1e-3)
