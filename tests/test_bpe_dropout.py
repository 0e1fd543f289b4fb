"""BPE-dropout: against sentencepiece without dropout, a slow reference with it, its exact distribution, and the encode stage."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import reference_bpe_dropout as reference
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_encoding import encode_example
from sample_lines import sample_lines
from test_encode import configs, examples, vocab  # noqa: F401 (vocab is a fixture)
from toyruns import make_config, make_task

from treenet.config import BatchConfig, SamplingConfig
from treenet.data.batch import TreeBatch
from treenet.data.examples import Examples, ExampleSource
from treenet.data.input_kinds import ALWAYS, COLUMNS, TREES, WORDS, RowLists
from treenet.data.noise import Merges, over_words
from treenet.data.sampled import SampledSource, Sampler
from treenet.training.micro_batches import MicroBatches
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID
from treeproc.stages.encode import RowEncoder
from treeproc.subwords import SubwordConfig, Subwords, train_pieces

LINES = sample_lines(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A path of a model, its merges, the scores of its normal pieces, and sentencepiece's functions."""
    path = tmp_path_factory.mktemp("model") / "pieces.model"
    path.write_bytes(train_pieces(Counter(word for line in LINES for word in line.split(" ")), SubwordConfig(vocab_size=900)))
    subwords = Subwords(path)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return SimpleNamespace(merges=Merges.load(path), subwords=subwords, scores=scores_of(pieces), pieces=pieces)


def scores_of(pieces: sentencepiece.SentencePieceProcessor) -> dict[str, float]:
    """The scores of the normal pieces."""
    normal = [i for i in range(len(pieces)) if not (pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i))]
    return {pieces.id_to_piece(i): pieces.get_score(i) for i in normal}


def characters(pieces: sentencepiece.SentencePieceProcessor, ids: list[int]) -> list[str]:
    """The characters of a word, where unknown ones are their bytes."""
    names = [pieces.id_to_piece(int(i)) for i in ids]
    return [symbol for name in names for symbol in ([name] if name.startswith("<0x") else name)]


@num_examples(150)
@given(st.lists(st.one_of(st.sampled_from(LINES), st.text("aeinst don't日😀\x00. ", min_size=1)), min_size=1, max_size=4))
def test_without_dropout_pieces_are_those_of_sentencepiece(model, lines):
    pieces, counts = model.subwords.encode_lines(pa.array(lines))
    begins = model.merges.begins_word(pieces)
    first = np.append(np.flatnonzero(begins), len(pieces))
    words = np.diff(first)
    keys = np.arange(len(words), dtype=np.uint64)
    again, per_word = model.merges.divide(pieces, words, keys, 0.0)
    assert again.tolist() == pieces.tolist() and per_word.tolist() == words.tolist()
    assert begins[np.cumsum(counts) - counts].all()


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.95])
def test_equals_the_slow_reference(model, dropout):
    words = [*sorted({word for line in LINES[:60] for word in line.split(" ")}), "日本a", "x" * 40, "don't日don't"]
    stored = [model.subwords.encode_lines(pa.array([word]))[0].tolist() for word in words]
    keys = np.array([reference.mix(number) for number in range(len(words))], dtype=np.uint64)
    found, counts = model.merges.divide(np.concatenate(stored), np.array([len(row) for row in stored]), keys, dropout)
    edges, more = np.cumsum([0, *counts]), 0
    for number, row in enumerate(stored):
        draws = reference.keyed_draws(int(keys[number]))
        expected = reference.divide(characters(model.pieces, row), model.scores, dropout, draws)
        assert [model.pieces.id_to_piece(int(i)) for i in found[edges[number] : edges[number + 1]]] == expected
        more += len(expected) > len(row)
    assert more > len(words) * dropout / 2
    assert model.subwords.decode([found.tolist()]) == model.subwords.decode([np.concatenate(stored).tolist()])


@pytest.mark.parametrize("dropout", [0.1, 0.6])
def test_divisions_have_the_probabilities_of_the_algorithm(model, dropout):
    """Chi-square over 20,000 keys: far from both ends."""
    (row,) = [model.subwords.encode_lines(pa.array(["there"]))[0]]
    count = 20_000
    keys = np.array([reference.mix(number) for number in range(count)], dtype=np.uint64)
    pieces, counts = model.merges.divide(np.tile(row, count), np.full(count, len(row)), keys, dropout)
    names = [model.pieces.id_to_piece(i) for i in range(len(model.pieces))]
    found = Counter(tuple(names[i] for i in part) for part in np.split(pieces, np.cumsum(counts)[:-1]))
    expected = reference.distribution(tuple(characters(model.pieces, row)), model.scores, dropout)
    assert sum(expected.values()) == pytest.approx(1) and found.keys() <= expected.keys()
    large = {division: count * share for division, share in expected.items() if count * share >= 10}
    chi_square = sum((found[division] - mean) ** 2 / mean for division, mean in large.items())
    assert len(large) >= 8 and abs(chi_square - len(large)) < 5 * np.sqrt(2 * len(large))


def rows_of(examples: list[dict]) -> RowLists:
    """All columns of encoded rows."""
    rows = RowLists(example_ids=[row["example_id"] for row in examples])
    for name, (column, part) in COLUMNS.items():
        if column in examples[0]:
            setattr(
                rows, name, [np.array(row[column] if part is None else row[column][part], dtype=np.int64) for row in examples]
            )
    return rows


@pytest.mark.slow
@num_examples(60)
@given(st.lists(examples(), min_size=1, max_size=3), configs, st.sampled_from([0.0, 0.3, 0.9]), st.integers(0, 9))
def test_trees_are_those_that_the_encode_stage_makes_of_the_pieces(vocab, cases, config, dropout, epoch):  # noqa: F811
    encoder, pieces = RowEncoder(vocab, config), sentencepiece.SentencePieceProcessor(model_file=str(vocab / "pieces.model"))
    plain, scores = encoder.subwords._encoder.encode, scores_of(pieces)
    for number, (text, parsed) in enumerate(cases):
        text["example_id"] = parsed["example_id"] = 7 * number
    encode = partial(encode_example, config=config, labels=encoder.labels, tags=encoder.tags)
    rows = rows_of([encode(text, parsed, plain) for text, parsed in cases])
    sampler = Sampler(vocab, config.facts(), SamplingConfig(bpe_dropout=dropout), seed=3)
    sampled, targets = sampler.source(rows, epoch), sampler.targets(rows, epoch)
    for number, (text, parsed) in enumerate(cases):
        counts = len(parsed["words"]["text"]), len(text["target"].split(" "))
        keys = iter([key for side in (0, 1) for key in reference.word_keys(7 * number, 3, epoch, side, counts[side])])

        def divide(word: str, keys: Iterator[int] = keys) -> list[int]:
            symbols = characters(pieces, plain(word))
            divided = reference.divide(symbols, scores, dropout, reference.keyed_draws(next(keys)))
            return [pieces.piece_to_id(name) for name in divided]

        expected = encode(text, parsed, divide)
        for name in (*ALWAYS[:-1], "words", "pos_tags"):
            column, part = COLUMNS[name]
            assert list(getattr(sampled, name))[number].tolist() == expected[column][part], name
        assert list(targets)[number].tolist() == expected["tgt_pieces"]


def open_epoch(data: Path, epoch: int, **sampling) -> Examples:
    """The training examples of an epoch, with words and tags."""
    config = SamplingConfig(**{"bpe_dropout": 0.5} | sampling)
    return SampledSource(data / "encoded", "train", WORDS, config, seed=1).in_epoch(epoch)


def batch_values(batch: TreeBatch, place: int) -> list:
    """The pieces, labels and targets of an example of a batch, without padding."""
    lists = batch.leaf_pieces, batch.node_labels, batch.tgt_out
    masks = batch.leaf_pad_mask, batch.node_pad_mask, batch.tgt_out == PAD_ID
    return [tensor[place][~mask[place]].tolist() for tensor, mask in zip(lists, masks, strict=True)]


def test_an_example_follows_from_seed_epoch_and_id(data):
    rows = np.arange(40)
    epoch, again = open_epoch(data, 2), open_epoch(data, 2)
    sizes, batch = epoch.sizes(rows), epoch.batch(rows)
    assert epoch.target_tokens(rows) == sizes["tgt_pieces"].sum() + 40 == batch.num_target_tokens
    assert (~batch.leaf_pad_mask).sum(1).tolist() == sizes["leaves"].tolist()
    assert (~batch.node_pad_mask).sum(1).tolist() == sizes["nodes"].tolist()
    for cut in (rows[[3]], rows[[30, 3, 17]]):
        for examples_of_epoch in (epoch, again):  # one holds all rows, the other reads the cut
            part = examples_of_epoch.batch(cut)
            for place, row in enumerate(cut):
                assert batch_values(part, place) == batch_values(batch, row)
    stored, other = ExampleSource(data / "encoded", "train").batch(rows), open_epoch(data, 3).batch(rows)
    changed = [np.mean([batch_values(batch, row) != batch_values(b, row) for row in rows]) for b in (stored, other)]
    assert min(changed) > 0.9


def test_micro_batches_are_cut_by_the_sampled_lengths(data):
    rows, config = np.arange(40), BatchConfig(tokens_per_device=40)
    sampled = SampledSource(data / "encoded", "train", TREES, SamplingConfig(bpe_dropout=0.5), seed=1)
    stored = MicroBatches(ExampleSource(data / "encoded", "train"), config, 0, 1).rank_batch(rows)
    found = MicroBatches(sampled, config, 0, 1).rank_batch(rows, epoch=2)
    widths = [max(batch.leaf_pieces.numel(), batch.tgt_out.numel()) for batch in found.batches]
    assert max(widths) <= 40 and len(found.batches) > len(stored.batches)
    assert found.global_tokens == sum(batch.num_target_tokens for batch in found.batches) > stored.global_tokens
    assert np.concatenate(found.cuts).tolist() == rows.tolist()


@pytest.mark.parametrize(("sides", "changes"), [("source", (True, False)), ("target", (False, True))])
def test_one_side_alone(data, sides, changes):
    rows, source = np.arange(40), ExampleSource(data / "encoded", "train", WORDS)
    batch, stored = open_epoch(data, 0, sides=sides).batch(rows), source.batch(rows)
    assert (not torch.equal(batch.leaf_pieces, stored.leaf_pieces), not torch.equal(batch.tgt_out, stored.tgt_out)) == changes


def test_nothing_is_recorded_where_it_is_off(data):
    assert "sampling" not in make_config(data).model_dump()
    assert make_config(data, "sampling.bpe_dropout=0.1").lasting()["sampling.bpe_dropout"] == 0.1
    assert type(make_task(data).open("train", training=True)) is ExampleSource


def test_only_training_samples(data):
    task = make_task(data, "sampling.bpe_dropout=0.1")
    assert isinstance(task.open("train", training=True), SampledSource)
    assert type(task.open("train")) is type(task.open("valid")) is ExampleSource


def test_refusals(tmp_path):
    model = tmp_path / "pieces.model"
    with open(model, "wb") as file:
        options = {"model_type": "unigram", "vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=file, **options)
    with pytest.raises(UserError, match=r"pieces.model is not a byte-pair model, but sampling needs its merges"):
        Merges.load(model)
    model.write_bytes(b"no model")
    with pytest.raises(UserError, match="is not a sentencepiece model"):
        Merges.load(model)


def test_a_word_without_the_node_of_its_tag_is_an_error():
    row = {"pieces": [4, 5], "labels": [1], "starts": [0], "ends": [2], "words": [0, 0], "pos_tags": [0, 0]}
    wrong = RowLists([3], **{name: [np.array(values)] for name, values in row.items()})
    over_words(wrong)  # the lowest node over a word is that of its tag
    wrong.starts, wrong.ends, wrong.labels = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0, int)]
    with pytest.raises(UserError, match="a word of several pieces has no node"):
        over_words(wrong)
