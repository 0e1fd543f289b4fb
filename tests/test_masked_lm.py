"""Masked language models: what is hidden, that it does not depend on the batch, training, resume and the parse at the end."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_here
from pretrained_data import write_data
from test_causal_lm import check_micro_batches, run
from test_sampling import reference_splitmix
from toydata import with_given_trees, write_toy_data
from toylabels import make_rows, write_labelled
from toyruns import TINY_RUN, check_stop_and_resume

from treenet.config import MaskedLMConfig, ModelConfig, TrainConfig
from treenet.data.batch import collate_rows
from treenet.data.input_kinds import LEAVES, RowLists
from treenet.data.splits import read_split
from treenet.evaluation.settings import ParseSettings
from treenet.evaluation.unsupervised_parse import find_links, gold_trees, has_unknown_gold, parse_examples, parse_links, parse_run
from treenet.jobs.train_run import run_training
from treenet.models import VocabSizes, build_masked_lm, names_for
from treenet.runs.loading import load_processor, load_trained
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.masked_lm import MaskedBatch, MaskedSource, count_masked, mask_pieces
from treeproc.common.files import read_json
from treeproc.common.settings import UserError, load_settings
from treeproc.shards.schema import PAD_ID
from treeproc.trees.spans import read_brackets

slow = pytest.mark.slow

VOCAB = VocabSizes(pieces=23, labels=7)


def make_batch(lengths: list[int], first_id: int = 0) -> MaskedBatch:
    """Random pieces that follow from the number of an example."""
    rows, none = RowLists(), np.zeros(0, dtype=np.int64)
    for number, length in enumerate(lengths, start=first_id):
        rows.example_ids.append(number)
        rows.pieces.append(np.random.default_rng(number).integers(4, VOCAB.pieces, length))
        for column in (rows.labels, rows.starts, rows.ends, rows.subtree_ends, rows.targets):
            column.append(none)
    return MaskedBatch(**vars(collate_rows(rows, LEAVES)))


def test_the_number_of_masked_pieces_is_berts():
    assert count_masked(np.array([0, 1, 3, 9, 10, 11, 100]), 0.15).tolist() == [0, 1, 1, 1, 2, 2, 15]


def test_masks_follow_from_seed_example_and_position_alone():
    config = MaskedLMConfig(rate=0.4)
    lengths = [5, 1, 17, 9]
    together = mask_pieces(make_batch(lengths), config, VOCAB.pieces, seed=3)
    for row, length in enumerate(lengths):
        alone = mask_pieces(make_batch([length], first_id=row), config, VOCAB.pieces, seed=3)
        for name in ("leaf_pieces", "tgt_out"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row, :length])
            assert (getattr(together, name)[row, length:] == PAD_ID).all()
    others = [mask_pieces(make_batch(lengths), config, VOCAB.pieces, seed=seed).tgt_out for seed in range(4, 8)]
    assert all(not torch.equal(other, together.tgt_out) for other in others)


def test_masked_pieces_are_those_of_a_slow_choice():
    """The lowest hashes of (seed, example, position), and what is seen there by a further hash."""
    config, lengths, whole = MaskedLMConfig(rate=0.4, mask=0.5, random=0.3), [12, 1, 9, 20], 2**64
    for first, seed in ((0, 1), (0, 3), (5, 3)):
        batch = make_batch(lengths, first)
        masked = mask_pieces(batch, config, VOCAB.pieces, seed)
        for row, length in enumerate(lengths):
            key = reference_splitmix(first + row + (seed << 31))
            drawn = [reference_splitmix((key + place) % whole) for place in range(length)]
            chosen = sorted(range(length), key=drawn.__getitem__)[: max(1, math.floor(0.4 * length + 0.5))]
            for place, piece in enumerate(batch.leaf_pieces[row, :length].tolist()):
                high, low = divmod(reference_splitmix(drawn[place]), 2**32)
                share, other = high / 2**32, 4 + (low * (VOCAB.pieces - 4) >> 32)
                seen = (VOCAB.pieces if share < 0.5 else other if share < 0.8 else piece) if place in chosen else piece
                assert masked.leaf_pieces[row, place] == seen
                assert masked.tgt_out[row, place] == (piece if place in chosen else PAD_ID)


def test_shares_of_masks_and_of_other_pieces():
    batch = make_batch([50] * 400)
    masked = mask_pieces(batch, MaskedLMConfig(), VOCAB.pieces, seed=1)
    chosen = masked.tgt_out != PAD_ID
    assert (chosen.sum(1) == 8).all() and masked.num_target_tokens == 8 * 400
    assert torch.equal(masked.tgt_out[chosen], batch.leaf_pieces[chosen])
    assert torch.equal(masked.leaf_pieces[~chosen], batch.leaf_pieces[~chosen])
    seen, truth = masked.leaf_pieces[chosen], masked.tgt_out[chosen]
    assert (seen == VOCAB.pieces).double().mean().item() == pytest.approx(0.8, abs=0.03)
    kept = 0.1 + 0.1 / (VOCAB.pieces - 4)  # some random pieces are the right ones
    assert (seen == truth).double().mean().item() == pytest.approx(kept, abs=0.02)
    others = seen[(seen != VOCAB.pieces) & (seen != truth)]
    assert others.unique().tolist() == list(range(4, VOCAB.pieces))  # no special piece, and every other one
    assert chosen.double().mean(0).std() < 0.05  # every position as often


@pytest.mark.parametrize("name", names_for("masked_lm"))
def test_a_text_does_not_see_its_batch(name):
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2)
    model = build_masked_lm(ModelConfig(name=name, **sizes), VOCAB).double().eval()
    config = MaskedLMConfig(rate=0.3, mask=1.0, random=0.0)
    batch = mask_pieces(make_batch([4, 1, 9]), config, VOCAB.pieces, seed=1)
    states = model(batch)
    assert (batch.leaf_pieces == model.mask_id).any(dim=1).all()
    for row, length in enumerate((4, 1, 9)):
        alone = mask_pieces(make_batch([length], first_id=row), config, VOCAB.pieces, seed=1)
        torch.testing.assert_close(states[row, :length], model(alone)[0], rtol=1e-12, atol=1e-12)
    assert model.compute_logits(states).shape == (3, 9, VOCAB.pieces)
    assert torch.autograd.grad(states.square().sum(), model.encoder.embedding.mask)[0].abs().min() > 0


# Training, on data with targets and without.


def make_config(data: Path, *overrides: str) -> TrainConfig:
    values = json.loads(json.dumps(TINY_RUN)) | {"task": "masked_lm"}
    values["model"] |= {"name": "constituent_transformer", "num_encoder_layers": 2, "dropout": 0.2}
    return load_settings(TrainConfig, None, overrides, **values, data=data)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    """A data set without a target side."""
    folder = tmp_path_factory.mktemp("labelled")
    return write_labelled(folder / "data", {"train": make_rows(40), "valid": make_rows(8, seed=1)})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    data = with_given_trees(write_toy_data(folder / "data", train=40, valid=8, test=10))
    run_training(make_config(data, "max_steps=30", "validate_every=15"), folder / "run")
    return folder / "run"


@slow
def test_stopped_and_resumed_equals_uninterrupted(labelled, tmp_path):
    config = make_config(labelled, "max_steps=8", "validate_every=4")
    check_stop_and_resume(config, tmp_path, 5)


@slow
def test_micro_batches_mask_the_same(labelled, tmp_path):
    check_micro_batches(partial(make_config, labelled), tmp_path)


def test_targets_are_counted_without_reading_shards(labelled):
    source = MaskedSource(labelled / "encoded", "train", LEAVES, 0.15)
    rows = np.arange(7, 30)
    batch = mask_pieces(source.batch(rows), MaskedLMConfig(), 24, seed=5)
    assert batch.num_target_tokens == source.target_tokens(rows)
    assert [mask.shape for mask in batch.pad_masks()] == [batch.leaf_pieces.shape]


@slow
def test_it_learns_and_its_parse_is_scored(finished, caplog):
    lines = [line for line in read_metrics(finished) if line["event"] == "valid"]
    assert lines[-1]["nll"] < lines[0]["nll"]
    name, scores = parse_run(finished, ParseSettings(parsing={"min_layer": 0}))
    assert name == "test" and read_json(finished / "scores.json")["unsupervised_parse-test"] == scores
    assert " words have tags that the training data lacks; punctuation among them counts as words" in caplog.text
    assert "the gold trees are random trees" in caplog.text
    assert scores["num_sentences"] + scores["left_out"] == 10 and "random" in scores["baselines"]
    assert scores["trees"] == "random" and scores["checkpoint"] == "averaged" and 0 <= scores["sentence_f1"] <= 1
    lines = (finished / "parses.test.txt").read_text().splitlines()
    assert len(lines) == 10 and all(line.startswith("(X ") and line.count("(") == line.count(")") for line in lines)
    name, _ = parse_run(finished, ParseSettings(split="valid", checkpoint="30", parsing={"min_layer": 0}))
    assert name == "valid.step_00000030"


@slow
def test_links_that_are_not_finite_give_no_tree(finished):
    config, model = load_trained(finished)
    examples = list(read_split(config.data, "encoded", "test"))
    assert len(list(find_links(model, examples))) == len(examples)
    with torch.no_grad():
        next(model.encoder.layers.parameters()).fill_(torch.nan)
    with pytest.raises(
        UserError, match="the link probabilities are not finite, so the model has diverged; parse with an earlier"
    ):
        list(find_links(model, examples))


@slow
def test_a_word_of_several_pieces_is_one_word(finished):
    """The same leaves as half as many words: links inside a word are not asked, gold spans are of words."""
    config, model = load_trained(finished)
    rows = list(read_split(config.data, "encoded", "test"))
    for row in rows:
        row["leaves"] = {**row["leaves"], "word_index": np.arange(len(row["leaves"]["piece"])) // 2}
    settings = ParseSettings(parsing={"min_layer": 0})
    sentences = parse_examples(model, rows, list(gold_trees(config.data, rows)), settings)
    for row, link_probs, sentence in zip(rows, find_links(model, rows), sentences, strict=True):
        pieces, spans = row["leaves"]["piece"], row["spans"]
        assert link_probs.shape == (2, len(pieces) - 1) and (link_probs[1] >= link_probs[0]).all()
        words, tags, gold = sentence.gold
        assert len(words) == len(tags) == (len(pieces) + 1) // 2
        assert sentence.parse == parse_links(link_probs[:, 1::2], settings.parsing)
        expected = [(start // 2, (end + 1) // 2) for start, end in zip(spans["start"], spans["end"], strict=True)]
        assert [span for span, _ in gold] == expected
        assert "".join(words).replace(" ", "") == load_processor(config.data).decode(pieces.tolist()).replace(" ", "")


@slow
def test_binary_trees_without_labels_are_no_gold_trees(finished, tmp_path):
    """No label says which of their nodes only make them binary."""
    data = Path(shutil.copytree(load_settings(TrainConfig, finished / "config.yaml").data, tmp_path / "data"))
    path = data / "encoded" / "index.json"
    index = read_json(path)
    for source, binarize, is_unknown in (
        ("unlabelled", "none", False),
        ("parsed", "right", False),
        ("unlabelled", "right", True),
    ):
        settings = {"tree_settings": index["tree_settings"] | {"tree_source": source, "binarize": binarize}}
        assert has_unknown_gold(settings) is is_unknown
    path.write_text(json.dumps(index | settings))
    with pytest.raises(UserError, match=r"has unlabelled binary trees, .*; give the trees as treebank=\[FILE\]$"):
        parse_run(finished, ParseSettings(data=data, parsing={"min_layer": 0}))


@slow
def test_words_of_a_pretrained_tokenizer_are_read_from_its_pieces(tmp_path):
    """A run on such a data set is scored; the written words are the text, against its own trees and those of a treebank."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install tokenizers")
    data = write_data(tmp_path, "bytes")
    run_training(make_config(data, "max_steps=2"), tmp_path / "run")
    settings = {"parsing": {"min_layer": 0}, "punctuation": []}
    name, scores = parse_run(tmp_path / "run", ParseSettings(split="valid", **settings))
    assert scores["num_sentences"] == 40 and scores["trees"] == "given"
    lines = (tmp_path / "run" / f"parses.{name}.txt").read_text().splitlines()
    words = [read_brackets(line)[0] for line in lines[:4]]
    assert words == [["We", "do", "n't", "know"], ["He", "knows", "her"], ["They", "can", "not"], ["😀", "know", "us"]]
    (tmp_path / "gold.mrg").write_text("(S (NP (X we)) (VP (X know) (X him)))\n")
    done = run_here(
        "unsupervised_parse.py", "--out", tmp_path / "run", "parsing.min_layer=0", f"treebank=[{tmp_path / 'gold.mrg'}]"
    )
    assert done.returncode == 0, done.stderr


@slow
def test_the_workflows_from_configuration_to_scores(finished, tmp_path):
    config = finished / "config.yaml"
    out = tmp_path / "run"
    status, message, _ = run("train_lm.py", "--config", config, "--out", out, "max_steps=6")
    assert status == 0 and "masked pieces/s" in message and "tree-attention unsupervised-parse --out" in message
    status, message, _ = run("unsupervised_parse.py", "--out", out, "parsing.min_layer=0")
    assert status == 0 and "random" in message and "sent. F1" in message
    assert list(read_json(out / "scores.json")) == ["unsupervised_parse-test"]
    treebank = tmp_path / "gold.mrg"
    treebank.write_text("(S (NP (X ba) (X be)) (VP (X bibo) (X ba)))\n( (S (NP (X gu) (X da)) (. .)) )\n")
    status, message, error = run("unsupervised_parse.py", "--out", out, "parsing.min_layer=0", f"treebank=[{treebank}]")
    assert status == 0, error
    scores = read_json(out / "scores.json")["unsupervised_parse-treebank-gold"]
    assert (scores["num_sentences"], scores["num_brackets"], scores["trees"]) == (2, 2, "treebank")
    assert scores["baselines"]["balanced"]["sentence_f1"] == 1.0 and len(scores["recall_by_label"]) == 2
    # The trees and tags are the treebank's, in a run on random trees whose vocabulary has none of these tags.
    assert (out / "parses.treebank-gold.txt").read_text().splitlines()[0].count("(X ba)") == 2
    treebank.write_text("(S (NP (X ba) (X be)) (X gu))\n(S (-NONE- *))\n(S (X gu) (X da))\n")
    status, _, error = run("unsupervised_parse.py", "--out", out, "parsing.min_layer=0", f"treebank=[{treebank}]")
    assert status == 0 and "note: 1 of 3 trees have no words, such as tree 2, and are left out" in error
    treebank.write_text("(S (X ba)\n")
    status, _, error = run("unsupervised_parse.py", "--out", out, "parsing.min_layer=0", f"treebank=[{treebank}]")
    assert status == 2 and "gold.mrg, line 1: 1 bracket(s) of this tree are not closed" in error
    status, _, error = run("unsupervised_parse.py", "--out", out)
    assert status == 2 and error.count("\n") == 1 and "min_layer 2" in error
    status, _, error = run("train.py", "--config", config, "--out", tmp_path / "other", "task=classification")
    assert status == 2 and "model.name" in error
    plain = tmp_path / "plain"
    status, *_ = run("train_lm.py", "--config", config, "--out", plain, "max_steps=2", "model.name=transformer")
    assert status == 0
    status, _, error = run("unsupervised_parse.py", "--out", plain)
    assert status == 2 and "model.name = transformer, which finds no constituents" in error
    status, _, error = run("evaluate.py", "--out", plain)
    assert status == 2 and "is a run of masked_lm; score it with tree-attention score-lm" in error
