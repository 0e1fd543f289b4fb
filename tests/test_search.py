"""Beam search against enumeration and against a slow search of one sentence at a time."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treenet.config import DecodingConfig
from treenet.data.batch import collate
from treenet.translation import beam
from treenet.translation.caches import Steps
from treenet.translation.hypotheses import Lengths, best_by_key, best_pieces, length_penalties
from treenet.translation.line_constraints import BatchConstraints, LineConstraints
from treenet.translation.search import search_batch
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID

NUM_HISTORIES = 61


@dataclass
class TableState:
    """One row per hypothesis: which sentence it belongs to and a hash of everything it was fed."""

    sentence: torch.Tensor
    history: torch.Tensor

    def select(self, rows, beam_width=None):
        return TableState(self.sentence[rows], self.history[rows])


@dataclass
class StaticTableState(TableState):
    """The same in place, with a capacity."""

    capacity: int = 2

    def grow(self):
        self.capacity *= 2

    def select(self, rows, beam_width=None):
        self.sentence.copy_(self.sentence[rows])
        self.history.copy_(self.history[rows])
        return self


class TableModel:
    """Logits [sentence piece, hash of the whole prefix, V] looked up in a table."""

    has_static_cache = True

    def __init__(self, table: torch.Tensor):
        self.table = table
        self.rows_decoded = 0

    def encode(self, batch):
        return batch.leaf_pieces[:, 0]

    def start_decoding(self, memory):
        return TableState(memory, torch.zeros_like(memory))

    def decode_step(self, tokens, state):
        self.rows_decoded += len(tokens)
        history = (state.history * 31 + tokens * 7 + 1) % NUM_HISTORIES
        return self.table[state.sentence, history], replace(state, history=history)

    def start_static(self, memory, beam_width, most_positions):
        sentence = memory.repeat_interleave(beam_width)
        return StaticTableState(sentence, torch.zeros_like(sentence))

    def step_static(self, tokens, state):
        logits, after = self.decode_step(tokens, state)
        state.history.copy_(after.history)
        return logits


def random_model(seed: int, num_sentences: int = 4, vocab: int = 7, scale: float = 1.5) -> TableModel:
    return TableModel(torch.randn(num_sentences, NUM_HISTORIES, vocab, generator=torch.Generator().manual_seed(seed)) * scale)


def drawn_model(logits: list[int], seed: int) -> TableModel:
    """Return a model of three sentences whose logits are drawn from a few whole numbers, so that there are many ties."""
    index = torch.randint(len(logits), (3, NUM_HISTORIES, 7), generator=torch.Generator().manual_seed(seed))
    return TableModel(torch.tensor(logits, dtype=torch.float32)[index])


def example(first_piece: int, num_leaves: int) -> dict:
    pieces = np.full(num_leaves, first_piece)
    return {
        "example_id": first_piece,
        "leaves": {"piece": pieces},
        "nodes": {"label": np.array([1])},
        "spans": {"start": np.array([0]), "end": np.array([num_leaves]), "subtree_end": np.array([1])},
        "tgt_pieces": np.array([4]),
    }


def batch_of(*sentences: int, num_leaves: int = 1):
    return collate([example(sentence, num_leaves) for sentence in sentences])


def decoding(max_length: int = 5, **values) -> DecodingConfig:
    return DecodingConfig(max_length_factor=1e-6, max_length_offset=max_length, **values)


def next_log_probs(model: TableModel, sentence: int, prefix: tuple[int, ...]) -> torch.Tensor:
    state = model.start_decoding(torch.tensor([sentence]))
    for token in (BOS_ID, *prefix):
        logits, state = model.decode_step(torch.tensor([token]), state)
    return logits[0].log_softmax(0)


def penalised(log_prob: float, num_pieces: int, config: DecodingConfig) -> float:
    length = num_pieces + 1
    base = length if config.length_penalty_form == "length" else (5 + length) / 6
    return log_prob / base**config.length_penalty


def ranked(hypotheses) -> list:
    return sorted(hypotheses, key=lambda h: (-h[1], len(h[0]), h[0]))


def enumerate_all(model: TableModel, sentence: int, config: DecodingConfig) -> list[tuple[tuple[int, ...], float]]:
    """Every hypothesis of up to max_length pieces, best first."""
    vocab = model.table.shape[2]
    found = []
    for length in range(config.min_length, config.max_length_offset + 1):
        for ids in product(range(4, vocab), repeat=length):
            log_prob = sum(float(next_log_probs(model, sentence, ids[:i])[piece]) for i, piece in enumerate((*ids, EOS_ID)))
            found.append((ids, penalised(log_prob, length, config)))
    return ranked(found)


def reference_search(model: TableModel, sentence: int, config: DecodingConfig) -> list[tuple[tuple[int, ...], float]]:
    """The same search for one sentence in plain Python, which never stops early."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for step in range(config.max_length_offset + 1):
        extensions = []
        for rank, (ids, log_prob) in enumerate(live):
            for piece, value in enumerate(next_log_probs(model, sentence, ids).tolist()):
                allowed = piece == EOS_ID if step == config.max_length_offset else piece not in (PAD_ID, UNK_ID, BOS_ID)
                if allowed and not (piece == EOS_ID and step < min(config.min_length, config.max_length_offset)):
                    extensions.append((-(log_prob + value), rank, piece, ids))
        live_next = []
        for negative, _, piece, ids in sorted(extensions)[: config.beam_size - len(finished)]:
            if piece == EOS_ID:
                finished.append((ids, penalised(-negative, step, config)))
            else:
                live_next.append(((*ids, piece), -negative))
        live = live_next
    return ranked(finished)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["length", "gnmt"])
@pytest.mark.parametrize(("exponent", "min_length"), [(0.0, 0), (0.6, 0), (1.0, 0), (2.5, 0), (0.6, 3), (1.0, 5)])
def test_a_beam_that_holds_everything_finds_the_best_of_all_hypotheses(form, exponent, min_length):
    model = random_model(seed=int(exponent * 10), num_sentences=2, vocab=6)
    config = decoding(beam_size=64, length_penalty=exponent, length_penalty_form=form, min_length=min_length)
    found = search_batch(model, batch_of(0, 1), config, num_best=64)
    for sentence in (0, 1):
        expected = enumerate_all(model, sentence, config)
        assert len(expected) == sum(2**length for length in range(min_length, 6))
        assert [h.ids for h in found[sentence]] == [ids for ids, _ in expected]
        assert [h.score for h in found[sentence]] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_scores_follow_from_log_probs_and_lengths_with_eos():
    config = decoding(beam_size=4, length_penalty=0.7, length_penalty_form="gnmt")
    for h in search_batch(random_model(1), batch_of(2), config, num_best=4)[0]:
        assert h.score == pytest.approx(h.log_prob / ((5 + len(h.ids) + 1) / 6) ** 0.7)
        assert h.score == pytest.approx(penalised(h.log_prob, len(h.ids), config))
    assert length_penalties(2, decoding(length_penalty=2)).tolist() == [1, 4, 9]


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_beam_1_is_greedy(exponent):
    model = random_model(seed=3)
    config = decoding(max_length=12, beam_size=1, length_penalty=exponent)
    for sentence, found in enumerate(search_batch(model, batch_of(0, 1, 2, 3), config)):
        ids: tuple[int, ...] = ()
        while len(ids) < 12:
            log_probs = next_log_probs(model, sentence, ids)
            log_probs[[PAD_ID, UNK_ID, BOS_ID]] = -torch.inf
            if log_probs.argmax() == EOS_ID:
                break
            ids += (int(log_probs.argmax()),)
        assert [h.ids for h in found] == [ids]


@num_examples(60)
@given(
    logits=st.none() | st.lists(st.integers(-2, 2), min_size=40, max_size=40),
    beam_size=st.integers(1, 6),
    num_best=st.integers(1, 6),
    max_length=st.integers(1, 9),
    min_length=st.integers(0, 4),
    exponent=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
    form=st.sampled_from(["length", "gnmt"]),
    seed=st.integers(0, 99),
)
def test_stopping_early_and_batching_change_no_result(logits, beam_size, num_best, max_length, min_length, exponent, form, seed):
    """Ties, of which whole numbers make many, are in the order of the reference, too. Real numbers make scores that are close."""
    model = random_model(seed, num_sentences=3) if logits is None else drawn_model(logits, seed)
    config = decoding(max_length, beam_size=beam_size, min_length=min_length, length_penalty=exponent, length_penalty_form=form)
    num_best = min(num_best, beam_size)
    everything = search_batch(model, batch_of(0, 1, 2), config, num_best=num_best)
    for sentence, found in enumerate(everything):
        expected = reference_search(model, sentence, config)[:num_best]
        assert [(h.ids, h.score) for h in found] == [(ids, pytest.approx(score)) for ids, score in expected]
    for steps in (Steps.GRID, Steps.STATIC):
        assert search_batch(model, batch_of(0, 1, 2), config, num_best=num_best, steps=steps) == everything


def test_stopping_early_saves_steps():
    """A sentence whose best hypothesis is certain leaves the batch long before the maximum length."""
    table = torch.zeros(2, NUM_HISTORIES, 7)
    table[0, :, EOS_ID] = 20.0  # sentence 0 ends at once; sentence 1 never wants to end
    table[1, :, EOS_ID] = -20.0
    model = TableModel(table)
    config = decoding(max_length=30, beam_size=3)
    found = search_batch(model, batch_of(0, 1), config)
    assert found[0][0].ids == () and len(found[1][0].ids) == 30
    together, model.rows_decoded = model.rows_decoded, 0
    search_batch(model, batch_of(1), config)
    assert together == model.rows_decoded + 1


@pytest.mark.parametrize("form", ["length", "gnmt"])
@pytest.mark.parametrize("better", [-1e-3, 1e-3])
def test_a_search_stops_exactly_when_no_live_hypothesis_can_win(better, form):
    """After the first step, the empty translation is finished, and one piece may still win by its score at the full length."""
    config = decoding(max_length=1, beam_size=2, length_penalty=1.0, length_penalty_form=form)
    finished, factor = penalised(np.log(0.3), 0, config), penalised(-1.0, 1, config)
    live = (finished + better) / -factor  # its log-probability: then EOS is certain
    table = torch.full((1, NUM_HISTORIES, 7), -torch.inf)
    table[:, :, EOS_ID] = 0.0
    first = torch.tensor([0.3, np.exp(live), 0.7 - np.exp(live)]).float()
    table[0, (BOS_ID * 7 + 1) % NUM_HISTORIES, [EOS_ID, 4, PAD_ID]] = first.log()
    model = TableModel(table)
    (found,) = search_batch(model, batch_of(0), config)
    assert found[0].ids == ((4,) if better > 0 else ()) and model.rows_decoded == (2 if better > 0 else 1)


def test_an_equal_score_does_not_go_on():
    """The shorter hypothesis comes first. Each sentence is judged by itself."""
    config = decoding(max_length=1, beam_size=3, length_penalty=0.0)
    logits = torch.full((3, NUM_HISTORIES, 7), -torch.inf)
    logits[:, :, EOS_ID] = 0.0
    first = (BOS_ID * 7 + 1) % NUM_HISTORIES
    logits[0, first, [EOS_ID, 4, PAD_ID]] = torch.tensor([0.25, 0.25, 0.5]).log()
    logits[1, first, [EOS_ID, 5, 4, PAD_ID]] = torch.tensor([0.25, 0.26, 0.2, 0.29]).log()
    logits[2, first, [EOS_ID, PAD_ID]] = torch.tensor([0.25, 0.75]).log()
    model = TableModel(logits)
    found = search_batch(model, batch_of(0, 1, 2), config)
    assert [own[0].ids for own in found] == [(), (5,), ()]
    assert model.rows_decoded == 3 + 2  # both live ones of the second sentence


def test_lengths_stay_within_their_limits_and_depend_on_the_own_leaves():
    table = torch.zeros(2, NUM_HISTORIES, 6)
    table[..., EOS_ID] = -30.0
    config = DecodingConfig(beam_size=2, max_length_factor=1.5, max_length_offset=2)
    batch = collate([example(0, 3), example(1, 7)])
    assert [len(h[0].ids) for h in search_batch(TableModel(table), batch, config)] == [6, 12]
    table[..., EOS_ID] = 30.0
    config = config.model_copy(update={"min_length": 9})
    assert [len(h[0].ids) for h in search_batch(TableModel(table), batch, config)] == [6, 9]


def test_pad_bos_and_unk_are_never_produced():
    table = random_model(seed=11).table
    table[..., [PAD_ID, UNK_ID, BOS_ID]] += 20
    found = search_batch(TableModel(table), batch_of(0, 1, 2, 3), decoding(max_length=6, beam_size=4), num_best=4)
    assert all(piece >= 4 for hypotheses in found for h in hypotheses for piece in h.ids)
    assert all(h.log_prob < -20 for hypotheses in found for h in hypotheses), "their probability is not given to others"


@dataclass
class Rows:
    """Hypotheses as restrictions see them."""

    step: int | torch.Tensor
    sentences: torch.Tensor
    pieces: torch.Tensor | None = None


@num_examples(50)
@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 5),
    st.lists(st.integers(2, 5), min_size=2, max_size=2),
)
def test_limits_of_length_are_those_of_an_oracle_with_the_step_on_the_host_or_the_device(values, step, min_length, limits):
    config = DecodingConfig(max_length_factor=1, max_length_offset=1, min_length=min_length)
    lengths = Lengths(collate([example(number, limit - 1) for number, limit in enumerate(limits)]), config)
    for now in (step, torch.tensor([step])):
        found, sentences = torch.tensor(values, dtype=torch.float32), torch.arange(len(values)) % 2
        lengths.apply(found, Rows(now, sentences))
        for row, own in enumerate(values):
            limit = limits[row % 2]
            for piece, value in enumerate(own if step <= limit else ()):  # all hypotheses end at the limit
                allowed = step >= min(min_length, limit) if piece == EOS_ID else step != limit
                allowed &= piece not in (PAD_ID, UNK_ID, BOS_ID)
                assert found[row, piece] == (value if allowed else -torch.inf)


@given(st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=4), st.integers(1, 9))
@num_examples(50)
def test_best_pieces_takes_the_lowest_ids_of_equal_values(rows, count):
    values, pieces = best_pieces(torch.tensor(rows, dtype=torch.float32), count)
    assert all(map(torch.equal, best_by_key(torch.tensor(rows, dtype=torch.float32), count), (values, pieces)))
    for row, best, chosen in zip(rows, values.tolist(), pieces.tolist(), strict=True):
        expected = sorted(range(9), key=lambda i: (-row[i], i))[:count]
        assert chosen == expected and best == [row[i] for i in expected]


@pytest.mark.parametrize("columns", [320, 700, 1024])
@pytest.mark.parametrize("count", [1, 2])
def test_best_pieces_of_many_columns_come_from_the_blocks_of_the_largest_maxima(columns, count, monkeypatch):
    """Few different values: equal ones are in one block, in several blocks, and in columns that fill no block."""
    monkeypatch.setattr("treenet.translation.hypotheses._FEW", 0)
    for seed, scale in enumerate((1, 20, 2000)):
        rows = torch.randn(50, columns, generator=torch.Generator().manual_seed(seed)).mul(scale).round()
        rows[7], rows[8, 4:], rows[9, :-1] = -torch.inf, -torch.inf, -torch.inf
        values, pieces = best_pieces(rows, count)
        expected = rows.sort(dim=1, descending=True, stable=True)
        assert torch.equal(values, expected.values[:, :count])
        finite = values.isfinite()
        assert torch.equal(pieces[finite], expected.indices[:, :count][finite])


@pytest.mark.parametrize("rows_of_part", [1, 3, 8])
def test_log_probabilities_of_a_few_hypotheses_at_a_time_change_nothing(rows_of_part, monkeypatch):
    """Beams of 4 for 4 sentences, with phrases and n-grams, which restrictions see in parts too."""
    model, config = random_model(seed=9), decoding(max_length=8, beam_size=4, no_repeat_ngram=2)
    lines = LineConstraints(required=((5,), (6,))), LineConstraints(), LineConstraints(prefix=(4,)), LineConstraints()
    for own in (None, lines):
        found = []
        for rows in (1000, rows_of_part):
            monkeypatch.setattr(beam, "ROWS_OF_PART", rows)
            constraints = own and BatchConstraints(own, None, "cpu")
            found.append(search_batch(model, batch_of(0, 1, 2, 3), config, num_best=4, constraints=constraints))
        assert found[0] == found[1]


def test_more_translations_than_hypotheses_are_refused():
    with pytest.raises(UserError, match="from 1 to beam_size = 2, but is 3"):
        search_batch(random_model(0), batch_of(0), decoding(beam_size=2), num_best=3)


@pytest.mark.parametrize("values", [{}, {"diversity_groups": 2}, {"method": "sampling"}, {"no_repeat_ngram": 1}], ids=str)
@pytest.mark.parametrize("prefix", [(), (4, 5)])
def test_scores_that_are_not_finite_are_refused(values, prefix):
    model, lines = random_model(0), (LineConstraints(), LineConstraints(prefix=prefix), LineConstraints())
    model.table[2] = torch.nan
    constraints = BatchConstraints(lines, None, "cpu") if prefix else None
    with pytest.raises(UserError, match="line 3: the model's scores are not finite"):
        search_batch(model, batch_of(1, 2, 3), decoding(beam_size=4, **values), num_best=2, constraints=constraints)
