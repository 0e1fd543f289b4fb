"""Forced prefixes, phrases that must appear, and strings that must not: against enumeration and against a slow search."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from test_search import (
    TableModel,
    batch_of,
    decoding,
    drawn_model,
    enumerate_all,
    next_log_probs,
    penalised,
    random_model,
    ranked,
)
from torch.utils._python_dispatch import TorchDispatchMode

from treenet.config import DecodingConfig
from treenet.translation.caches import Steps
from treenet.translation.hypotheses import Lengths, restrictions_of
from treenet.translation.line_constraints import (
    BatchConstraints,
    ForbiddenStrings,
    LineConstraints,
    PieceTexts,
    RequiredPhrases,
    batch_constraints,
)
from treenet.translation.search import begin_beam_search, compiled_steps, search_batch
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID

NAMES = ["<pad>", "<unk>", "<s>", "</s>", "▁a", "b", "▁"]  # by id
NAMES[EOS_ID], NAMES[BOS_ID], NAMES[PAD_ID], NAMES[UNK_ID] = "</s>", "<s>", "<pad>", "<unk>"


@dataclass
class Processor:
    """A stand-in for a sentencepiece processor, with the methods that the search calls."""

    names: list[str]

    def vocab_size(self) -> int:
        return len(self.names)

    def id_to_piece(self, piece: int) -> str:
        return self.names[piece]

    def is_byte(self, piece: int) -> bool:
        return self.names[piece].startswith("<0x")

    def is_control(self, piece: int) -> bool:
        return self.names[piece].startswith("<") and not self.is_byte(piece)


PIECES = PieceTexts(Processor(NAMES))


def text_of(ids, names=NAMES) -> str:
    return " " + "".join(names[piece].replace("▁", " ") for piece in ids)


def contains(ids: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return any(ids[place : place + len(phrase)] == phrase for place in range(len(ids) - len(phrase) + 1))


def repeats(ids: tuple[int, ...], size: int) -> bool:
    """Whether pieces contain an n-gram of this size twice."""
    ngrams = [tuple(ids[place : place + size]) for place in range(len(ids) - size + 1)]
    return len(set(ngrams)) < len(ngrams)


def meets(ids: tuple[int, ...], line: LineConstraints) -> bool:
    return (
        ids[: len(line.prefix)] == line.prefix
        and all(contains(ids, phrase) for phrase in line.required)
        and not any(string in text_of(ids) for string in line.forbidden)
    )


def test_a_phrase_that_a_line_has_twice_counts_once():
    assert LineConstraints.of({"must_appear": [[4, 5], [4, 5]]}) == LineConstraints(required=((4, 5),))


def constraints_of(*lines: LineConstraints) -> BatchConstraints:
    return BatchConstraints(lines, PIECES, "cpu")


LINES = [
    LineConstraints(),
    LineConstraints(prefix=(5, 6)),
    LineConstraints(required=((4, 5), (5, 5, 6))),
    LineConstraints(required=((4, 4, 5),)),  # an end of "4 4 4 5" that a tracker without fallback would miss
    LineConstraints(forbidden=("bb", " ab")),
    LineConstraints(prefix=(6,), required=((6, 4),), forbidden=("b",)),
    LineConstraints(required=((4, 5),), forbidden=("ab",)),  # cannot be met
    LineConstraints(prefix=(4, 5, 4, 5, 4, 5)),  # longer than the longest translation
]


@pytest.mark.parametrize("line", LINES)
def test_a_beam_that_holds_everything_finds_all_that_meets_the_constraints(line):
    model, config = random_model(seed=4, num_sentences=2, vocab=7), decoding(4, beam_size=121, length_penalty=0.8)
    found = search_batch(model, batch_of(0, 1), config, num_best=121, constraints=constraints_of(line, LINES[2]))
    for sentence, own in enumerate((line, LINES[2])):
        expected = [one for one in enumerate_all(model, sentence, config) if meets(one[0], own)]
        assert [h.ids for h in found[sentence]] == [ids for ids, _ in expected]
        assert [h.score for h in found[sentence]] == pytest.approx([score for _, score in expected], abs=1e-5)


def reference_bank(ids: tuple[int, ...], line: LineConstraints) -> int:
    """Pieces of the phrases that are met, and of the longest beginning of another one at the end."""
    met = sum(len(phrase) for phrase in line.required if contains(ids, phrase))
    begun = [
        count
        for phrase in line.required
        if not contains(ids, phrase)
        for count in range(len(phrase))
        if ends_with(ids, phrase[:count])
    ]
    return met + max(begun, default=0)


def ends_with(ids: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return not phrase or ids[-len(phrase) :] == phrase


def allowed(ids: tuple[int, ...], piece: int, line: LineConstraints, config: DecodingConfig) -> bool:
    if len(ids) < len(line.prefix) and piece != line.prefix[len(ids)]:
        return False
    if piece == EOS_ID:
        enough = len(ids) >= min(config.min_length, config.max_length_offset)
        return enough and all(contains(ids, phrase) for phrase in line.required)
    fits = len(ids) < config.max_length_offset and piece not in (PAD_ID, UNK_ID, BOS_ID)
    fits = fits and not (config.no_repeat_ngram and repeats((*ids, piece), config.no_repeat_ngram))
    return fits and not any(string in text_of((*ids, piece)) for string in line.forbidden)


def reference_search(model: TableModel, sentence: int, config: DecodingConfig, line: LineConstraints):
    """Dynamic beam allocation for one sentence in plain Python; it never stops early."""
    live, finished = [((), 0.0)], []
    for _ in range(config.max_length_offset + 1):
        extensions = []
        for ids, log_prob in live:
            values = next_log_probs(model, sentence, ids).tolist()
            pieces = sorted(
                range(len(values)), key=lambda piece: (-values[piece] if allowed(ids, piece, line, config) else 1e9, piece)
            )
            proposals = pieces[: config.beam_size]
            for phrase in line.required:
                if not contains(ids, phrase):
                    longest = max(count for count in range(len(phrase)) if ends_with(ids, phrase[:count]))
                    proposals += [phrase[longest]] if phrase[longest] not in proposals else []
            extensions += [(ids, piece, log_prob + values[piece]) for piece in proposals if allowed(ids, piece, line, config)]
        extensions.sort(key=lambda one: -one[2])  # stable
        count, places = {}, []
        for ids, piece, _ in extensions:
            bank = reference_bank(ids if piece == EOS_ID else (*ids, piece), line)
            if piece == EOS_ID and line.required:
                bank = sum(map(len, line.required))
            count[bank] = count.get(bank, -1) + 1
            places.append((count[bank], -bank))
        order = sorted(range(len(extensions)), key=places.__getitem__)[: config.beam_size - len(finished)]
        live = []
        for ids, piece, log_prob in (extensions[place] for place in order):
            if piece == EOS_ID:
                finished.append((ids, penalised(log_prob, len(ids), config)))
            else:
                live.append(((*ids, piece), log_prob))
    return ranked(finished)


PHRASE = st.lists(st.integers(4, 6), min_size=1, max_size=3).map(tuple)
LINE = st.builds(
    LineConstraints,
    prefix=st.lists(st.integers(4, 6), max_size=2).map(tuple),
    required=st.lists(PHRASE, max_size=3, unique=True).map(tuple),
    forbidden=st.lists(st.sampled_from(["ab", "bb", " a a", "b ", "a  "]), max_size=2, unique=True).map(tuple),
)


@num_examples(80)
@given(
    lines=st.tuples(LINE, LINE, LINE),
    logits=st.lists(st.integers(-2, 2), min_size=40, max_size=40),
    beam_size=st.integers(1, 6),
    num_best=st.integers(1, 6),
    max_length=st.integers(1, 9),
    min_length=st.integers(0, 4),
    ngram=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_the_search_is_that_of_one_sentence_in_plain_python(
    lines, logits, beam_size, num_best, max_length, min_length, ngram, seed
):
    """Batching, stopping early, and decoding the whole grid change no result."""
    model = drawn_model(logits, seed)
    config = decoding(max_length, beam_size=beam_size, min_length=min_length, no_repeat_ngram=ngram)
    num_best = min(num_best, beam_size)
    everything = search_batch(model, batch_of(0, 1, 2), config, num_best=num_best, constraints=constraints_of(*lines))
    for sentence, (line, found) in enumerate(zip(lines, everything, strict=True)):
        expected = reference_search(model, sentence, config, line)[:num_best]
        assert [(h.ids, h.score) for h in found] == [(ids, pytest.approx(score)) for ids, score in expected]
        assert all(meets(h.ids, line) for h in found)
    constraints = constraints_of(*lines)
    for steps in (Steps.GRID, Steps.STATIC):
        found = search_batch(model, batch_of(0, 1, 2), config, num_best=num_best, constraints=constraints, steps=steps)
        assert found == everything


@pytest.mark.parametrize(
    ("values", "line", "on_device"),
    [
        ({}, LineConstraints(), True),
        ({"no_repeat_ngram": 2}, LineConstraints(), True),
        ({}, LineConstraints(prefix=(4,)), False),
        ({}, LineConstraints(forbidden=("b",)), False),
        ({}, LineConstraints(required=((4,),)), False),
    ],
)
def test_a_whole_step_runs_on_the_device_if_no_restriction_reads_values(values, line, on_device):
    """Then the number of pieces is there, too."""
    model, config, batch = random_model(0), decoding(4, beam_size=2, **values), batch_of(0)
    constraints = BatchConstraints([line], PIECES, "cpu")
    begun = Lengths(batch, config), [*restrictions_of(config), *constraints.restrictions], config, 1, constraints.required(2)
    for steps in (Steps.STATIC, Steps.GRID, Steps.LIVE):
        search = begin_beam_search(model, model.encode(batch), *begun, steps=steps)
        assert isinstance(search.chooser.step, torch.Tensor) == (on_device and steps is Steps.STATIC)
    assert compiled_steps() is compiled_steps(), "graphs are compiled once in a process"


def test_without_phrases_the_search_is_plain_search():
    model, config = random_model(seed=6), decoding(max_length=8, beam_size=3)
    expected = search_batch(model, batch_of(0, 1, 2), config, num_best=3)
    lines = LineConstraints(), LineConstraints(required=((4, 6, 5),)), LineConstraints()
    found = search_batch(model, batch_of(0, 1, 2), config, num_best=3, constraints=constraints_of(*lines))
    assert [found[0], found[2]] == [expected[0], expected[2]] and found[1] != expected[1]
    assert batch_constraints([{}, {"prefix": ()}], None, "cpu") is None


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_improbable_phrases_appear_as_soon_as_the_length_allows(beam_size):
    table = random_model(seed=8, vocab=9).table
    table[..., [7, 8]] -= 30
    line = LineConstraints(required=((7, 8, 7), (8, 4)))
    for max_length, expected in [(5, True), (4, False)]:
        config = decoding(max_length, beam_size=beam_size)
        for found in search_batch(TableModel(table), batch_of(0, 1, 2), config, constraints=constraints_of(line, line, line)):
            assert bool(found) == expected
            assert all(contains(h.ids, phrase) for h in found for phrase in line.required)


class Largest(TorchDispatchMode):
    """Notes the most numbers that a tensor has which an operation makes; a view has those of its storage."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [one for one in result if isinstance(one, torch.Tensor)] if isinstance(result, list | tuple) else [result]
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_the_memory_of_phrases_does_not_grow_with_their_length_times_their_extensions():
    """A client may ask for one long phrase and some short ones in each of many lines."""
    sentences, beam_size, longest = 4, 5, 400
    phrases = [[list(range(4, 4 + longest)), *([piece] for piece in range(5, 14))]] * sentences
    required = RequiredPhrases(phrases, torch.device("cpu"), 1)
    extensions = beam_size * (beam_size + 10)
    grid = torch.arange(3, 9).expand(sentences, 1, -1)
    chosen = torch.arange(extensions).expand(sentences, -1) % 20
    with Largest() as largest:
        required.allocate(torch.zeros(chosen.shape), chosen, torch.zeros_like(chosen), grid)
    assert largest.numbers <= sentences * 10 * max(extensions, longest)  # 10 phrases, and the first beam has one hypothesis


def test_samples_keep_to_a_prefix_and_avoid_strings():
    model, config = random_model(seed=4), decoding(method="sampling", top_p=0.9)
    lines = [LineConstraints(prefix=(6, 5), forbidden=("ba",)), LineConstraints(), LineConstraints(prefix=(4,) * 9)]
    found = search_batch(model, batch_of(0, 1, 2), config, num_best=40, constraints=constraints_of(*lines))
    assert all(meets(one.ids, lines[0]) for one in found[0]) and len(found[0]) == 40
    assert found[1] == search_batch(model, batch_of(1), config, num_best=40)[0]
    assert found[2] == [], "the prefix is longer than any translation"
    scored = sum(
        float(next_log_probs(model, 0, found[0][0].ids[:i])[piece]) for i, piece in enumerate((*found[0][0].ids, EOS_ID))
    )
    assert found[0][0].log_prob == pytest.approx(scored), "the model's own log-probability, with the prefix"
    with pytest.raises(UserError, match="must_appear needs decoding.method = beam, but it is sampling"):
        search_batch(model, batch_of(0), config, num_best=2, constraints=constraints_of(LineConstraints(required=((4,),))))


@num_examples(200)
@given(
    st.lists(st.text("ab é", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(4, 9), max_size=8),
)
def test_banned_pieces_are_those_that_complete_a_string(strings, ids):
    """The pieces are words, parts of words, a blank, and the bytes of a character."""
    names = [*NAMES, "ab", "<0xC3>", "<0xA9>"]
    texts = [name.replace("▁", " ").encode() for name in names[:-2]] + [b"\xc3", b"\xa9"]
    written = b" " + b"".join(texts[piece] for piece in ids)
    automaton = ForbiddenStrings(strings, PieceTexts(Processor(names)))
    if any(string.encode() in written for string in strings):
        return  # a search never comes here
    expected = [piece for piece in range(4, len(names)) if any(string.encode() in written + texts[piece] for string in strings)]
    assert automaton.banned(tuple(ids)).tolist() == expected
    assert all(np.diff(automaton.banned(tuple(ids))) > 0)
