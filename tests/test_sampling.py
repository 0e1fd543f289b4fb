"""Sampling against a slow sampler of one sentence, and against the probabilities of all translations."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from model_cases import example_of, tiny_model
from strategies import Tree
from test_constrained_search import allowed
from test_search import TableModel, batch_of, decoding, enumerate_all, example, next_log_probs, penalised, random_model

from treenet.config import DecodingConfig
from treenet.data.batch import collate
from treenet.translation.line_constraints import LineConstraints
from treenet.translation.sampling import choose_pieces, draw_keys, gumbel_noise
from treenet.translation.search import search_batch
from treenet.translation.translate import score_targets
from treeproc.shards.schema import EOS_ID

# One model for each form of a decoder's state.
CASES = ["bilstm", "convs2s", "dynamicconv", "relative_positions", "transformer", "tree2seq", "tree_transformer"]
BITS_64, BITS_32 = 2**64 - 1, 2**32 - 1


def sampling(max_length: int = 5, **values) -> DecodingConfig:
    return decoding(max_length, **{"method": "sampling"} | values)


def reference_splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & BITS_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & BITS_64
    return value ^ (value >> 31)


def reference_mix(value: int) -> int:
    for _ in range(2):
        value = ((value ^ (value >> 16)) * 0x45D9F3B) & BITS_32
    return value ^ (value >> 16)


def reference_noise(seed: int, example: int, number: int, step: int, piece: int) -> float:
    key = reference_splitmix(seed)
    for part in (example, number, step):
        key = reference_splitmix(key ^ reference_splitmix(part))
    bits = reference_mix(reference_mix(reference_mix(piece) ^ (key & BITS_32)) ^ (key >> 32))
    uniform = min((bits & 0x7FFFFFFF) / 2**31 + 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-uniform))


def reference_weights(log_probs: list[float], config: DecodingConfig, allowed: list[int]) -> dict[int, float]:
    """Log-weights of the pieces that may be drawn: the temperature, then top_k, then top_p."""
    scaled = {piece: log_probs[piece] / config.temperature for piece in allowed}
    ordered = sorted(allowed, key=lambda piece: (-scaled[piece], piece))[: config.top_k or None]
    total, before, kept = sum(math.exp(scaled[piece]) for piece in ordered), 0.0, []
    for piece in ordered:
        if before < config.top_p:
            kept.append(piece)
        before += math.exp(scaled[piece]) / total
    return {piece: scaled[piece] for piece in kept}


def allowed_pieces(vocab: int, ids: tuple[int, ...], config: DecodingConfig) -> list[int]:
    return [piece for piece in range(vocab) if allowed(ids, piece, LineConstraints(), config)]


def reference_sample(model: TableModel, sentence: int, number: int, config: DecodingConfig) -> tuple[tuple[int, ...], float]:
    ids, total = (), 0.0
    for step in range(config.max_length_offset + 1):
        log_probs = next_log_probs(model, sentence, ids).tolist()
        weights = reference_weights(log_probs, config, allowed_pieces(model.table.shape[2], ids, config))
        piece = max(weights, key=lambda one: weights[one] + reference_noise(config.seed, sentence, number, step, one))
        total += log_probs[piece]
        if piece == EOS_ID:
            break
        ids += (piece,)
    return ids, total


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.5, "seed": 9},
        {"temperature": 2.0, "min_length": 3},
        {"top_k": 2},
        {"top_k": 4, "no_repeat_ngram": 1},
        {"top_p": 0.8, "no_repeat_ngram": 2},
        {"top_p": 0.6, "beam_size": 4},
        {"top_k": 3, "top_p": 0.7, "temperature": 1.5, "beam_size": 1},
    ],
)
def test_samples_are_those_of_a_slow_sampler(values):
    model, config = random_model(seed=1, vocab=9), sampling(6, length_penalty=0.7, **values)
    found = search_batch(model, batch_of(0, 1, 2, 3), config, num_best=11)
    for sentence, samples in enumerate(found):
        expected = [reference_sample(model, sentence, number, config) for number in range(11)]
        assert [one.ids for one in samples] == [ids for ids, _ in expected]
        assert [one.log_prob for one in samples] == pytest.approx([total for _, total in expected], abs=1e-5)
        assert [one.score for one in samples] == pytest.approx([penalised(total, len(ids), config) for ids, total in expected])


@pytest.mark.parametrize("values", [{}, {"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.75}, {"top_k": 3, "top_p": 0.5}])
def test_translations_are_drawn_as_often_as_they_are_probable(values):
    """The table has 40 translations of at most 3 pieces. The bound is six standard deviations of each count."""
    model, config, draws = random_model(seed=2, num_sentences=1), sampling(3, beam_size=500, **values), 6000
    counts = Counter(one.ids for one in search_batch(model, batch_of(0), config, num_best=draws)[0])
    total = 0.0
    for ids, _ in enumerate_all(model, 0, config):
        probability = 1.0
        for step, piece in enumerate((*ids, EOS_ID)):
            weights = reference_weights(
                next_log_probs(model, 0, ids[:step]).tolist(), config, allowed_pieces(7, ids[:step], config)
            )
            mass = sum(map(math.exp, weights.values()))
            probability *= math.exp(weights[piece]) / mass if piece in weights else 0.0
        total += probability
        assert abs(counts[ids] - draws * probability) <= 6 * math.sqrt(draws * probability * (1 - probability)) + 1e-9, ids
    assert total == pytest.approx(1)


def test_a_sample_depends_on_seed_line_and_number_alone():
    model, config = random_model(seed=5), sampling(8, beam_size=3, top_p=0.9)
    alone = [search_batch(model, batch_of(i), config, num_best=7)[0] for i in range(4)]
    for order in [(0, 1, 2, 3), (3, 1), (2, 2, 0)]:
        assert search_batch(model, batch_of(*order), config, num_best=7) == [alone[i] for i in order]
    assert [one[:4] for one in alone] == search_batch(model, batch_of(0, 1, 2, 3), config, num_best=4), (
        "no number changes another"
    )
    at_once = config.model_copy(update={"beam_size": 7})
    assert search_batch(model, batch_of(0, 1, 2, 3), at_once, num_best=7) == alone, "however many are drawn at a time"
    other = config.model_copy(update={"seed": 2})
    assert search_batch(model, batch_of(0, 1, 2, 3), other, num_best=7) != alone
    assert len({tuple(one.ids for one in samples) for samples in alone}) == 4


def test_the_most_probable_piece_alone_is_greedy_search():
    model = random_model(seed=3)
    greedy = search_batch(model, batch_of(0, 1, 2, 3), decoding(12, beam_size=1))
    for values in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0.01}):
        found = search_batch(model, batch_of(0, 1, 2, 3), sampling(12, **values), num_best=2)
        assert [[one.ids for one in samples] for samples in found] == [[best.ids] * 2 for (best,) in greedy]


def test_a_nucleus_of_many_pieces_is_found_in_widths_as_in_all():
    log_probs = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    log_probs[3] = torch.full((3000,), 1 / 3000).log()  # even, so the nucleus is wider than what is sorted first
    keys = draw_keys(1, range(5), [0] * 5, 0)
    noise = gumbel_noise(keys, torch.arange(3000))
    for top_k, top_p in [(0, 0.3), (0, 0.999), (2000, 0.5), (70, 0.9), (10, 1.0)]:
        config = DecodingConfig(method="sampling", top_k=top_k, top_p=top_p)
        expected = []
        for row, own in zip(log_probs, noise, strict=True):
            weights = reference_weights(row.double().tolist(), config, list(range(3000)))
            expected.append(max(weights, key=lambda piece: weights[piece] + float(own[piece])))
        assert choose_pieces(log_probs, keys, config).tolist() == expected


def test_noise_is_that_of_integers_and_finite_at_both_ends():
    keys = draw_keys(7, [3, 4], [0, 5], 2)
    noise = gumbel_noise(keys, torch.arange(50))
    for row, (line, number) in enumerate([(3, 0), (4, 5)]):
        assert noise[row].tolist() == pytest.approx([reference_noise(7, line, number, 2, i) for i in range(50)], rel=1e-4)
    many = gumbel_noise(draw_keys(1, range(2000), [0] * 2000, 0), torch.arange(500))
    assert many.isfinite().all()
    assert float(many.mean()) == pytest.approx(0.5772, abs=0.005)  # Euler's constant
    assert float(many.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)


def unmix(value: int) -> int:
    """The inverse of `reference_mix`: its steps backwards."""
    inverse = pow(0x45D9F3B, -1, 2**32)
    for _ in range(2):
        value = ((value ^ (value >> 16)) * inverse) & BITS_32
    return value ^ (value >> 16)


@pytest.mark.parametrize(
    ("bits", "uniform"),
    [(0, 2.0**-32), (2**31, 2.0**-32), (1, 2.0**-31 + 2.0**-32), (2**30, 0.5), (2**31 - 1, 1 - 2.0**-24), (-1, 1 - 2.0**-24)],
)
def test_noise_of_the_lowest_and_highest_bits(bits, uniform):
    assert unmix(reference_mix(12345)) == 12345
    key = reference_mix(reference_mix(0)) ^ unmix(bits & BITS_32)  # of piece 0, with a first key of 0
    keys = torch.tensor([[0, key - 2**32 if key >= 2**31 else key]], dtype=torch.int32)
    assert gumbel_noise(keys, torch.tensor([0])).item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-6)


def test_a_nucleus_ends_with_the_piece_that_reaches_its_share():
    """All shares are powers of two, so they are exact."""
    log_probs = torch.tensor([0.5, 0.25, 0.125, 0.125]).log2().mul(math.log(2)).repeat(200, 1)
    keys = draw_keys(3, range(200), [0] * 200, 0)
    even = torch.zeros(200, 4)
    for rows, top_p, top_k, drawn in (
        (even, 0.25, 0, {0}), (even, 0.5, 0, {0, 1}), (even, 0.51, 0, {0, 1, 2}), (even, 0.5, 2, {0}), (even, 1.0, 2, {0, 1}),
        (even, 1.0, 0, {0, 1, 2, 3}), (even, 1.0, 9, {0, 1, 2, 3}), (log_probs, 0.7, 0, {0, 1}), (log_probs, 0.8, 0, {0, 1, 2}),
    ):  # fmt: skip
        config = DecodingConfig(method="sampling", top_p=top_p, top_k=top_k)
        assert set(choose_pieces(rows.clone(), keys, config).tolist()) == drawn, (top_p, top_k)


def test_lengths_stay_within_their_limits():
    table = torch.zeros(2, 61, 6)
    table[..., EOS_ID] = -30.0
    batch = collate([example(0, 3), example(1, 7)])
    config = DecodingConfig(method="sampling", max_length_factor=1.5, max_length_offset=2)
    assert [[len(one.ids) for one in samples] for samples in search_batch(TableModel(table), batch, config, num_best=2)] == [
        [6] * 2,
        [12] * 2,
    ]
    table[..., EOS_ID] = 30.0
    config = config.model_copy(update={"min_length": 4})
    assert [[len(one.ids) for one in samples] for samples in search_batch(TableModel(table), batch, config, num_best=2)] == [
        [4] * 2
    ] * 2


def test_records_of_beam_search_are_as_before_and_those_of_samples_are_complete():
    assert list(DecodingConfig().model_dump()) == [
        "beam_size", "length_penalty", "length_penalty_form", "max_length_factor", "max_length_offset", "min_length", "max_tokens"
    ]  # fmt: skip
    for values in ({"method": "sampling", "top_k": 4}, {"method": "mbr"}, {"diversity_groups": 5}, {"coverage_penalty": 0.2}):
        config = DecodingConfig(**values)
        dump = config.model_dump()
        assert DecodingConfig(**dump) == config and dump.items() >= values.items()
    assert {"seed", "temperature", "top_k", "top_p"} < DecodingConfig(method="mbr").model_dump().keys()


@pytest.mark.parametrize("case", CASES)
def test_samples_of_every_model_are_those_of_a_sentence_alone_with_the_scores_of_given_translations(case):
    model = tiny_model(case)
    trees = [Tree(5, [(0, 5, 3), (0, 2, 2), (3, 5, 3)]), Tree(1, [(0, 1, 1)]), Tree(3, [(0, 3, 2), (1, 3, 2)])]
    examples = [example_of(tree, number, reads=model.reads) for number, tree in enumerate(trees)]
    config = DecodingConfig(method="sampling", beam_size=2, top_p=0.95, length_penalty=0.6)
    found = search_batch(model, collate(examples, model.reads), config, num_best=5)
    for row, samples in zip(examples, found, strict=True):
        alone = search_batch(model, collate([row], model.reads), config, num_best=5)[0]
        assert [one.ids for one in alone] == [one.ids for one in samples]
        given = collate([{**row, "tgt_pieces": np.array(one.ids, dtype=np.int32)} for one in samples], model.reads)
        expected = score_targets(model, given, config)
        assert [one.log_prob for one in samples] == pytest.approx([one.log_prob for one in expected], abs=1e-4)
        assert [one.score for one in samples] == pytest.approx([one.score for one in expected], abs=1e-4)
    assert len({one.ids for samples in found for one in samples}) > 5
