"""A vocabulary that grows: byte-pair encoding that goes on, against a slow one, and data sets made with it."""

import gzip
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from sentencepiece import SentencePieceProcessor
from test_initial_weights import pieces as names

from treeproc.common.settings import UserError, load_settings
from treeproc.shards.store import read_index
from treeproc.stages.borrowed_vocabulary import _may_join, add_pieces, learn_pieces
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.preprocess import SAMPLE, preprocess
from treeproc.subwords import SubwordConfig, train_pieces
from treeproc.verify import verify


def slow_pieces(sequences: dict, known: set[str], most: int, may_join) -> list[str]:
    """Byte-pair encoding that counts all pairs again before each merge."""
    words, known, new = [(list(word), count) for word, count in sequences.items()], set(known), []
    while len(new) < most:
        counts = Counter()
        for word, count in words:
            for pair in pairwise(word):
                if all(pair) and may_join(*pair):
                    counts[pair] += count
        allowed = [pair for pair, count in counts.items() if count >= 2 or "".join(pair) in known]
        if not allowed:
            break
        best = min(allowed, key=lambda pair: ("".join(pair) not in known, -counts[pair], "".join(pair), pair))
        if "".join(best) not in known:
            known.add("".join(best))
            new.append("".join(best))
        words = [(merge(word, best), count) for word, count in words]
    return new


def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged, place = [], 0
    while place < len(word):
        step = 2 if tuple(word[place : place + 2]) == pair else 1
        merged.append("".join(word[place : place + step]))
        place += step
    return merged


SYMBOLS = st.sampled_from(["a", "b", "ab", "c", "\u2581", "1", ""])
WORDS = st.dictionaries(st.lists(SYMBOLS, min_size=1, max_size=8).map(tuple), st.integers(1, 5), max_size=8)


@pytest.mark.slow
@num_examples(150)
@given(words=WORDS, most=st.integers(0, 8), may_join=st.sampled_from([_may_join, lambda left, right: True]))
def test_pieces_equal_those_of_a_slow_encoder(words, most, may_join):
    known = {"a", "b", "ab", "c", "\u2581", "1", "abc"}
    assert learn_pieces(words, known, most, may_join) == slow_pieces(words, known, most, may_join)


def test_pieces_by_hand():
    words = {("a", "b", "c"): 3, ("a", "b"): 2, ("x", "y"): 4}
    assert learn_pieces(words, {"a", "b", "c", "x", "y"}, 3, lambda left, right: True) == ["ab", "xy", "abc"]
    assert learn_pieces({("a", "b"): 1}, {"a", "b"}, 3, lambda left, right: True) == []  # it occurs once


@pytest.mark.parametrize(
    ("left", "right", "joins"),
    [("\u2581", "a", True), ("\u2581a", "b", True), ("a", "1", False), ("1", "9", True), ("a", ".", False), (".", ".", True),
     ("\u0915", "\u093f", True), ("abcdefgh", "ijklmnop", True), ("abcdefgh", "ijklmnopq", False)],
)  # fmt: skip
def test_letters_digits_and_signs_stay_apart(left, right, joins):
    assert _may_join(left, right) == joins


CONFIG = SubwordConfig(vocab_size=300)
OLD = Counter(["the", "dog", "saw", "the", "cat", "and", "the", "dog", "ran", "to", "the", "house", "of", "the", "man"] * 3)
NEW = Counter(["the", "zebra", "žebra", "saw", "zebras", "and", "žebras", "at", "the", "zoo,", "zoo", "1990", "1990"] * 2)


@pytest.fixture(scope="module")
def grown() -> tuple[SentencePieceProcessor, SentencePieceProcessor, int]:
    old = train_pieces(OLD, CONFIG)
    model, added = add_pieces(old, NEW, 12, CONFIG)
    return SentencePieceProcessor(model_proto=old), SentencePieceProcessor(model_proto=model), added


def test_old_pieces_keep_their_numbers_and_new_ones_follow(grown):
    old, new, added = grown
    assert 0 < added <= 12 and len(new) == len(old) + added
    assert [new.id_to_piece(i) for i in range(len(old))] == [old.id_to_piece(i) for i in range(len(old))]
    assert "ž" in [new.id_to_piece(i) for i in range(len(old), len(new))]


@pytest.mark.slow
@num_examples(200)
@given(text=st.text(alphabet="abcdefghimnorstuwzž 190,.", max_size=30))
def test_new_pieces_join_old_ones_and_lose_nothing(grown, text):
    """The boundaries of the new segmentation are boundaries of the old one: so a model knows all parts of a new piece."""
    old, new, _ = grown
    before, after = old.encode(text), new.encode(text)
    assert edges_of(new, after) <= edges_of(old, before)
    assert new.decode(after) == old.decode(before) and len(after) <= len(before)


def edges_of(model: SentencePieceProcessor, pieces: list[int]) -> set[int]:
    """The ends of pieces, in bytes."""
    sizes = [1 if model.is_byte(piece) else len(model.id_to_piece(piece).encode()) for piece in pieces]
    return set(accumulate(sizes))


def test_new_text_gets_shorter(grown):
    old, new, _ = grown
    assert len(new.encode("the zebras at the zoo")) < len(old.encode("the zebras at the zoo"))
    assert new.encode("the dog ran") == old.encode("the dog ran")


@pytest.mark.slow
def test_lower_case_stays_lower_case():
    config = SubwordConfig(vocab_size=300, lowercase=True)
    model, _ = add_pieces(train_pieces(OLD, config), Counter(["Zebra", "ZEBRA", "zebra"] * 2), 4, config)
    new = SentencePieceProcessor(model_proto=model)
    assert new.encode("ZEBRA") == new.encode("zebra") and new.decode(new.encode("ZEBRA")) == "zebra"
    assert max(new.encode("zebra")) >= 300


def test_a_new_tag_in_front_of_lines_is_one_piece():
    old = train_pieces(OLD, CONFIG, ["<2de>"])
    words = Counter(["<2de>", "<2fr>", "zebra", "zebra"] * 3)
    model, added = add_pieces(old, words, 3, CONFIG, ["<2de>", "<2fr>"])
    before, new = SentencePieceProcessor(model_proto=old), SentencePieceProcessor(model_proto=model)
    pieces = new.encode("<2fr> the zebra")
    assert new.id_to_piece(pieces[0]) == "\u2581<2fr>" and pieces[0] == len(before)
    assert new.encode("<2de> the dog") == before.encode("<2de> the dog") and len(new) == len(before) + 1 + added


# Data sets.


def write_lines(folder: Path, name: str, first: int, last: int, change=lambda line: line) -> dict:
    for side in ("en", "de"):
        lines = gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).decode().split("\n")[first:last]
        (folder / f"{name}.{side}").write_text("\n".join(map(change, lines)) + "\n")
    return {"source": [str(folder / f"{name}.en")], "target": [str(folder / f"{name}.de")]}


@pytest.fixture(scope="module")
def old_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    values = {
        "splits": {"train": write_lines(folder, "train", 0, 60)},
        "parser": {"name": "words"},
        "tree": {"tree_source": "right"},
        "subwords": {"vocab_size": 400},
        "workers": 0,
    }
    preprocess(PreprocessConfig.model_validate(values), folder / "data")
    return folder / "data"


def grow(old_data: Path, folder: Path, **changes) -> dict:
    lines = write_lines(folder, "more", 60, 120, lambda line: line.replace("e", "ę"))
    return {"splits": {"train": lines}, "vocab_from": str(old_data), "new_pieces": 50, "workers": 0} | changes


@pytest.mark.slow
def test_a_data_set_gains_pieces_and_keeps_the_others(old_data, tmp_path):
    values = grow(old_data, tmp_path)
    index = preprocess(PreprocessConfig.model_validate(values), tmp_path / "data")
    assert names(tmp_path / "data")[:400] == names(old_data) and "ę" in names(tmp_path / "data")[400:]
    assert index["num_pieces"] == 450 and index["vocab_fingerprint"] != read_index(old_data / "encoded")["vocab_fingerprint"]
    assert not verify(tmp_path / "data").problems
    before, after = ((folder / "encoded/vocab/labels.txt").read_text().split("\n") for folder in (old_data, tmp_path / "data"))
    assert set(before) <= set(after)
    shards = {path.name: path.read_bytes() for path in (tmp_path / "data" / "encoded").rglob("*.arrow")}
    assert (
        preprocess(load_settings(PreprocessConfig, tmp_path / "data" / "config.yaml", ["workers=0"]), tmp_path / "data") == index
    )
    (tmp_path / "data" / "encoded" / "vocab" / "pieces.model").unlink()
    assert preprocess(PreprocessConfig.model_validate(values), tmp_path / "data") == index
    assert {path.name: path.read_bytes() for path in (tmp_path / "data" / "encoded").rglob("*.arrow")} == shards


@pytest.mark.slow
def test_a_later_test_set_takes_the_grown_vocabulary_as_it_is(old_data, tmp_path):
    preprocess(PreprocessConfig.model_validate(grow(old_data, tmp_path)), tmp_path / "data")
    test = {"splits": {"test": write_lines(tmp_path, "test", 120, 130)}, "vocab_from": str(tmp_path / "data"), "workers": 0}
    index = preprocess(PreprocessConfig.model_validate(test), tmp_path / "test")
    assert index["vocab_fingerprint"] == read_index(tmp_path / "data" / "encoded")["vocab_fingerprint"]
    assert names(tmp_path / "test") == names(tmp_path / "data")


@pytest.mark.slow
def test_an_encoding_of_parsed_text_grows_too(old_data, tmp_path):
    values = grow(old_data, tmp_path)
    plain = {name: value for name, value in values.items() if name not in ("vocab_from", "new_pieces")}
    own = plain | {"parser": {"name": "words"}, "tree": {"tree_source": "right"}, "subwords": {"vocab_size": 400}}
    preprocess(PreprocessConfig.model_validate(own), tmp_path / "own")
    again = {"parsed": str(tmp_path / "own"), "vocab_from": str(old_data), "new_pieces": 50, "workers": 0}
    first = preprocess(PreprocessConfig.model_validate(again), tmp_path / "again")
    second = preprocess(PreprocessConfig.model_validate(values), tmp_path / "data")
    assert first["vocab_fingerprint"] == second["vocab_fingerprint"] and first["fingerprint"] == second["fingerprint"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_from": None}, "new_pieces: adds to the vocabulary of another data set; give vocab_from=DATA as well"),
        ({"new_pieces": -1}, "greater than or equal to 0"),
        ({"subwords": {"lowercase": True}}, "new pieces can only follow the same settings"),
        ({"splits": {}}, "splits"),
    ],
)
def test_vocabularies_that_cannot_grow_are_refused(old_data, tmp_path, changes, message):
    with pytest.raises((UserError, ValueError), match=message):
        preprocess(PreprocessConfig.model_validate(grow(old_data, tmp_path, **changes)), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_without_a_train_split_nothing_can_be_learnt(old_data, tmp_path):
    test = grow(old_data, tmp_path)
    test["splits"] = {"test": test["splits"]["train"]}
    with pytest.raises(UserError, match="new_pieces: learns from a train split, and there is none"):
        preprocess(PreprocessConfig.model_validate(test), tmp_path / "data")
