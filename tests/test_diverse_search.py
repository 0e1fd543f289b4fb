"""Diverse beam search against a slow search of one sentence, written from the paper, and against plain search."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from test_constrained_search import PIECES, allowed, meets
from test_search import TableModel, batch_of, decoding, drawn_model, next_log_probs, penalised, random_model, ranked

from treenet.config import DecodingConfig
from treenet.translation.line_constraints import BatchConstraints, LineConstraints
from treenet.translation.search import search_batch
from treeproc.common.settings import UserError
from treeproc.shards.schema import EOS_ID


def reference_search(model: TableModel, sentence: int, config: DecodingConfig, line: LineConstraints):
    """Groups of hypotheses (pieces, log-probability, what it has lost); a step of one group after the other."""
    width = config.beam_size // config.diversity_groups
    live = [[((), 0.0, 0.0)] for _ in range(config.diversity_groups)]
    finished = [[] for _ in live]
    for _ in range(config.max_length_offset + 1):
        taken = []  # pieces at this step
        for group, hypotheses in enumerate(live):
            extensions = []
            for ids, log_prob, lost in hypotheses:
                values = next_log_probs(model, sentence, ids).tolist()
                pieces = [piece for piece in range(len(values)) if allowed(ids, piece, line, config)]
                loss = {piece: config.diversity_strength * taken.count(piece) for piece in pieces}
                best = sorted(pieces, key=lambda piece: (-(values[piece] - loss[piece]), piece))[:width]
                extensions += [(ids, piece, log_prob + values[piece], lost + loss[piece]) for piece in best]
            extensions.sort(key=lambda one: -(one[2] - one[3]))
            live[group], chosen = [], extensions[: width - len(finished[group])]
            for ids, piece, log_prob, lost in chosen:
                if piece == EOS_ID:
                    finished[group].append((ids, penalised(log_prob, len(ids), config)))
                else:
                    live[group].append(((*ids, piece), log_prob, lost))
            taken += [piece for _, piece, _, _ in chosen]
    return ranked(dict(ranked(found for group in finished for found in group)).items())


LINE = st.builds(
    LineConstraints,
    prefix=st.lists(st.integers(4, 6), max_size=2).map(tuple),
    forbidden=st.lists(st.sampled_from(["ab", "bb", "b "]), max_size=1).map(tuple),
)


@num_examples(60)
@given(
    lines=st.tuples(LINE, LINE, LINE),
    logits=st.lists(st.integers(-3, 3), min_size=40, max_size=40),
    groups=st.integers(2, 4),
    width=st.integers(1, 3),
    strength=st.sampled_from([0.0, 0.3, 0.7, 3.1]),
    max_length=st.integers(1, 6),
    min_length=st.integers(0, 3),
    ngram=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_the_search_is_that_of_one_sentence_in_plain_python(
    lines, logits, groups, width, strength, max_length, min_length, ngram, seed
):
    model = drawn_model(logits, seed)
    noise = torch.rand(model.table.shape, generator=torch.Generator().manual_seed(seed + 100))
    model.table += noise / 10  # equal sums would be rounded apart
    settings = {"beam_size": groups * width, "diversity_groups": groups, "diversity_strength": strength}
    config = decoding(max_length, min_length=min_length, no_repeat_ngram=ngram, **settings)
    constraints = BatchConstraints(lines, PIECES, "cpu")
    everything = search_batch(model, batch_of(0, 1, 2), config, num_best=groups * width, constraints=constraints)
    for sentence, (line, found) in enumerate(zip(lines, everything, strict=True)):
        expected = reference_search(model, sentence, config, line)
        assert [(h.ids, h.score) for h in found] == [(ids, pytest.approx(score, abs=1e-5)) for ids, score in expected]
        assert all(meets(h.ids, line) for h in found)


def test_strength_makes_translations_that_differ_more():
    model = random_model(seed=2, vocab=12, scale=1.0)
    plain = search_batch(model, batch_of(0, 1, 2, 3), decoding(8, beam_size=4), num_best=4)
    diverse = search_batch(
        model, batch_of(0, 1, 2, 3), decoding(8, beam_size=4, diversity_groups=4, diversity_strength=4.0), num_best=4
    )
    for many, few in zip(diverse, plain, strict=True):
        assert len({h.ids[:1] for h in many}) == 4 >= len({h.ids[:1] for h in few}), "each group begins in another way"


def test_required_phrases_are_refused():
    config = decoding(beam_size=4, diversity_groups=2)
    with pytest.raises(UserError, match="must_appear needs decoding.diversity_groups = 1"):
        search_batch(
            random_model(0), batch_of(0), config, constraints=BatchConstraints([LineConstraints(required=((4,),))], None, "cpu")
        )
