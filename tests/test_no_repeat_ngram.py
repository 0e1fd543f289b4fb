"""`no_repeat_ngram` against enumeration and slow searches, with every chooser and both caches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import batch_of as batch_of_trees
from test_constrained_search import repeats
from test_search import Rows, batch_of, decoding, enumerate_all, random_model
from test_static_search import DECODING, SENTENCES, graphs, model_of, same, small_capacity  # noqa: F401 (fixtures)

from treenet.config import UNRECORDED, DecodingConfig
from treenet.translation.caches import Steps
from treenet.translation.hypotheses import restrictions_of
from treenet.translation.line_constraints import BatchConstraints, LineConstraints, unmet
from treenet.translation.search import search_batch
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID


@num_examples(100)
@given(
    rows=st.lists(st.lists(st.integers(4, 6), min_size=8, max_size=8), min_size=1, max_size=4),
    size=st.integers(1, 5),
    step=st.integers(0, 8),
)
def test_pieces_that_would_repeat_are_forbidden_whatever_stands_after_the_step(rows, size, step):
    [restriction] = restrictions_of(DecodingConfig(no_repeat_ngram=size))
    expected = torch.zeros(len(rows), 9)
    expected[:, PAD_ID] = -torch.inf
    found = [expected.clone(), expected.clone(), expected.clone()]
    for row, ids in enumerate(rows):
        for piece in range(4, 9):
            written = (*ids[:step], piece)  # may repeat already, as forced beginnings do
            if written[-size:] in [written[place : place + size] for place in range(step - size + 1)]:
                expected[row, piece] = -torch.inf
    pieces, numbers = torch.tensor(rows), torch.arange(len(rows))
    restriction.apply(found[0], Rows(step, numbers, pieces))
    restriction.apply(found[1], Rows(step, numbers, pieces[:, :step]))
    restriction.apply(found[2], Rows(torch.tensor([step]), numbers, pieces))
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("steps", [Steps.LIVE, Steps.GRID, Steps.STATIC])
def test_a_beam_that_holds_everything_finds_all_without_repeats(size, steps):
    model, config = random_model(seed=4, num_sentences=2, vocab=6), decoding(5, beam_size=64, no_repeat_ngram=size)
    found = search_batch(model, batch_of(0, 1), config, num_best=64, steps=steps)
    for sentence in (0, 1):
        everything = enumerate_all(model, sentence, config)
        expected = [one for one in everything if not repeats(one[0], size)]
        assert 1 < len(expected) < len(everything)
        assert [h.ids for h in found[sentence]] == [ids for ids, _ in expected]
        assert [h.score for h in found[sentence]] == pytest.approx([score for _, score in expected], abs=1e-5)


WAYS = {
    "beam": {},
    "greedy": {"beam_size": 1},
    "diverse": {"diversity_groups": 2, "diversity_strength": 1.0},
    "sampling": {"method": "sampling", "top_k": 5},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["transformer", "bilstm", "ensemble"])
def test_no_way_to_decode_repeats_and_batch_mates_change_nothing(case, way):
    """Sentences of different lengths, so with padding, and with beside them fewer or more steps."""
    model = model_of(case)
    decoding = DECODING.model_copy(update=WAYS[way] | {"min_length": 9})
    free = search_batch(model, batch_of_trees(SENTENCES, model.reads), decoding, num_best=decoding.beam_size)
    assert any(repeats(h.ids, 2) for own in free for h in own)
    decoding = decoding.model_copy(update={"no_repeat_ngram": 2})
    batch = batch_of_trees(SENTENCES, model.reads)
    together = search_batch(model, batch, decoding, num_best=decoding.beam_size)
    assert all(len(h.ids) > 4 and not repeats(h.ids, 2) for own in together for h in own)
    for number in range(len(SENTENCES)):
        part = batch_of_trees(SENTENCES[: number + 1], model.reads)
        same(search_batch(model, part, decoding, num_best=decoding.beam_size)[number:], together[number : number + 1])


def test_records_without_it_stay_as_they_are():
    for values in ({}, {"method": "sampling"}, {"method": "mbr"}, {"diversity_groups": 5}):
        assert "no_repeat_ngram" not in DecodingConfig(**values).model_dump()
        config = DecodingConfig(**values, no_repeat_ngram=3)
        config.check()
        assert config.model_dump()["no_repeat_ngram"] == 3 and DecodingConfig(**config.model_dump()) == config
    assert UNRECORDED["no_repeat_ngram"] == 0


def test_a_search_without_hypotheses_says_why():
    """Three pieces make no translation of four without a repeat."""
    config = decoding(5, beam_size=2, min_length=4, no_repeat_ngram=1)
    for values in ({}, {"diversity_groups": 2}, {"method": "sampling"}):
        with pytest.raises(UserError) as caught:
            search_batch(random_model(0), batch_of(1, 2), config.model_copy(update=values))
        assert str(caught.value) == (
            "line 2: no translation within the limits of length is allowed; lower decoding.min_length, or set "
            "decoding.no_repeat_ngram=0"
        )


def test_a_prefix_that_repeats_has_no_translation_and_the_message_names_the_setting():
    config = decoding(5, beam_size=2, no_repeat_ngram=1)
    lines = BatchConstraints([LineConstraints(prefix=(4, 4)), LineConstraints()], None, "cpu")
    first, second = search_batch(random_model(0), batch_of(0, 1), config, constraints=lines)
    assert first == [] and second
    assert unmet(config) == (
        "no translation within the limits of length meets the constraints; raise decoding.max_length_offset, set "
        "decoding.no_repeat_ngram=0, or relax them"
    )
    assert unmet(decoding()).endswith("; raise decoding.max_length_offset, or relax them")
