"""Real models: ensembles and given translations against enumeration, hypotheses alone and in any batch, beam 1 as greedy."""

from itertools import product

import numpy as np
import pytest
import torch
from toydata import encode_row

from treenet.config import DecodingConfig, ModelConfig
from treenet.data.batch import collate
from treenet.models import VocabSizes, build_model
from treenet.translation.search import search_batch
from treenet.translation.translate import Ensemble, score_examples, score_targets, translate_examples
from treeproc.shards.schema import UNK_ID

slow = pytest.mark.slow

NAMES = ["transformer", "tree_transformer"]
PIECES = 12


def real_model(name: str, seed: int, pieces: int = PIECES):
    """Random weights of twice the usual size, so that next pieces depend on source and history; float64, so that what differs
    is the search and not a kernel's rounding, which such weights make larger."""
    config = ModelConfig(name=name, d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2)
    torch.manual_seed(seed)
    model = build_model(config, VocabSizes(pieces, 5)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.double()


def random_examples(count: int, pieces: int = PIECES, seed: int = 0) -> list[dict]:
    random = np.random.default_rng(seed)
    rows = [encode_row(i, random.integers(4, pieces, random.integers(1, 12)).tolist(), [4], random) for i in range(count)]
    return [
        {name: {k: np.array(v) for k, v in value.items()} if isinstance(value, dict) else value for name, value in row.items()}
        for row in rows
    ]


def with_target(example: dict, ids) -> dict:
    return {**example, "tgt_pieces": np.array(ids, dtype=np.int64)}


def mean_probability(models, example: dict, ids: tuple[int, ...]) -> float:
    """log of the product of the mean probabilities of the pieces and EOS, in float64 by teacher forcing."""
    batch = collate([with_target(example, ids)])
    with torch.no_grad():
        probabilities = sum(model(batch)[0].double().softmax(-1) for model in models) / len(models)
    return float(probabilities.gather(1, batch.tgt_out[0][:, None]).log().sum())


@slow
@pytest.mark.parametrize(("form", "exponent", "min_length"), [("length", 1.0, 0), ("gnmt", 0.6, 2)])
def test_an_ensemble_of_two_models_finds_the_best_of_all_hypotheses(form, exponent, min_length):
    """All hypotheses of up to 4 pieces of two kinds, by a tree model and a plain one together."""
    models = [real_model("tree_transformer", 1, pieces=6), real_model("transformer", 2, pieces=6)]
    examples = random_examples(2, pieces=6)
    decoding = DecodingConfig(
        beam_size=32, max_length_factor=1e-6, max_length_offset=4, length_penalty=exponent, length_penalty_form=form,
        min_length=min_length,
    )  # fmt: skip
    for example, found in zip(examples, search_batch(Ensemble(models), collate(examples), decoding, num_best=32), strict=True):
        expected = []
        for length in range(min_length, 5):
            divisor = (length + 1 if form == "length" else (5 + length + 1) / 6) ** exponent
            for ids in product((4, 5), repeat=length):
                expected.append((mean_probability(models, example, ids) / divisor, ids))
        expected.sort(reverse=True)
        assert [h.ids for h in found] == [ids for _, ids in expected]
        assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-5)


@slow
@pytest.mark.parametrize("name", NAMES)
def test_an_ensemble_of_one_model_twice_is_the_model(name):
    model, examples = real_model(name, 3), random_examples(6)
    decoding = DecodingConfig(beam_size=4)
    alone, twice = (list(translate_examples(m, examples, decoding, num_best=4)) for m in (model, Ensemble([model, model])))
    for first, second in zip(alone, twice, strict=True):
        assert [h.ids for h in first] == [h.ids for h in second]
        assert [h.score for h in first] == pytest.approx([h.score for h in second], abs=1e-5)


@pytest.mark.parametrize("form", ["length", "gnmt"])
@pytest.mark.parametrize(
    "members",
    [
        pytest.param(["transformer"], marks=slow),
        pytest.param(["tree_transformer"], marks=slow),
        ["tree_transformer", "transformer"],
    ],
)
def test_forced_decoding_gives_the_score_of_the_search(members, form):
    models = [real_model(name, seed) for seed, name in enumerate(members)]
    model = models[0] if len(models) == 1 else Ensemble(models).eval()
    examples = random_examples(7)
    decoding = DecodingConfig(beam_size=4, length_penalty=0.7, length_penalty_form=form, max_tokens=60)
    found = list(translate_examples(model, examples, decoding, num_best=3))
    given = [with_target(example, h.ids) for example, nbest in zip(examples, found, strict=True) for h in nbest]
    for h, target in zip([h for nbest in found for h in nbest], score_examples(model, given, decoding), strict=True):
        assert target.ids == h.ids
        assert (target.score, target.log_prob) == pytest.approx((h.score, h.log_prob), abs=1e-5)
        assert len(target.token_log_probs) == len(h.ids) + 1
        assert sum(target.token_log_probs) == pytest.approx(h.log_prob, abs=1e-5)


def test_given_translations_may_be_empty_or_hold_unknown_pieces():
    model, example = real_model("tree_transformer", 5), random_examples(1)[0]
    batch = collate([with_target(example, []), with_target(example, [UNK_ID, 5])])
    empty, unknown = score_targets(model, batch, DecodingConfig())
    assert empty.log_prob == empty.score == pytest.approx(mean_probability([model], example, ()), abs=1e-5)
    assert unknown.log_prob == pytest.approx(mean_probability([model], example, (UNK_ID, 5)), abs=1e-5)
    assert unknown.score == pytest.approx(unknown.log_prob / 3)


@slow
@pytest.mark.parametrize("name", NAMES)
def test_rounding_of_float32_moves_scores_by_less_than_a_millionth(name):
    torch.manual_seed(1)
    config = ModelConfig(name=name, d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2)
    model, examples = build_model(config, VocabSizes(PIECES, 5)).eval(), random_examples(8)
    together = search_batch(model, collate(examples), DecodingConfig(), num_best=5)
    for example, hypotheses in zip(examples, together, strict=True):
        alone = search_batch(model, collate([example]), DecodingConfig(), num_best=5)[0]
        assert [h.ids for h in alone] == [h.ids for h in hypotheses]
        assert [h.score for h in alone] == pytest.approx([h.score for h in hypotheses], abs=1e-6)


@slow
@pytest.mark.parametrize("name", [*NAMES, "ensemble"])
def test_a_sentence_gets_the_same_hypotheses_alone_and_in_any_batch_of_real_sentences(name):
    model = Ensemble([real_model(n, 7) for n in NAMES]).eval() if name == "ensemble" else real_model(name, 6)
    examples, decoding = random_examples(8, seed=1), DecodingConfig(beam_size=4)
    alone = [search_batch(model, collate([example]), decoding, num_best=4)[0] for example in examples]
    assert len({h[0].ids for h in alone}) > 4, "the model looks at its source"
    for order in [range(8), range(7, -1, -1), (3, 0), (5, 5, 2), (6, 1, 4, 7)]:
        found = search_batch(model, collate([examples[i] for i in order]), decoding, num_best=4)
        for i, hypotheses in zip(order, found, strict=True):
            assert [h.ids for h in hypotheses] == [h.ids for h in alone[i]]
            assert [h.score for h in hypotheses] == pytest.approx([h.score for h in alone[i]], abs=1e-6)
