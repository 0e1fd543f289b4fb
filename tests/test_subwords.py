"""The pieces contract: pieces lie within parser words and decode to the raw text exactly."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeproc.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from treeproc.settings import UserError
from treeproc.subwords import LabelVocab, SubwordConfig, Subwords, mark_boundaries, train_pieces

LINES = ["I don't know (yet).", "We don't know him.", "He knows  her, doesn't he?", "They know us."] * 5


def boundaries(line: str, cuts: set[int]) -> dict:
    """Words of a line, cut at blanks and at `cuts`."""
    words = {"start_char": [], "end_char": []}
    start = None
    for position, character in enumerate(line + " "):
        if start is not None and (character.isspace() or position in cuts):
            words["start_char"].append(start)
            words["end_char"].append(position)
            start = None
        if start is None and not character.isspace():
            start = position
    return words


@pytest.fixture(scope="module")
def subwords(tmp_path_factory) -> Subwords:
    path = tmp_path_factory.mktemp("vocab") / "pieces.model"
    path.write_bytes(train_pieces(LINES, SubwordConfig(vocab_size=320)))
    return Subwords(path)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_pieces_decode_to_the_line(subwords, data):
    alphabet = st.one_of(
        st.sampled_from("aknow don't()  \t\u2028é日😀\x00"), st.characters(exclude_categories=["Cs"], exclude_characters="▁")
    )
    line = data.draw(st.text(alphabet, min_size=1, max_size=30)).strip()
    words = boundaries(line, data.draw(st.sets(st.integers(1, 30))))
    if not words["start_char"]:
        return
    pieces = subwords.encode_words([line], [words])[0]
    assert len(pieces) == len(words["start_char"]) and all(pieces)
    assert subwords.decode([list(chain.from_iterable(pieces))]) == [line]
    assert subwords.decode(subwords.encode_lines([line])) == [line]
    # Each word's pieces are its own characters and the blanks before it.
    edges = [0, *words["end_char"][:-1], len(line)]
    for i, ids in enumerate(pieces):
        expected = (" " if i == 0 else "") + line[edges[i] : edges[i + 1]]
        assert (
            "".join(
                subwords.decode([[*pieces[0], *ids]])[0][len(subwords.decode([pieces[0]])[0]) :]
                if i
                else " " + subwords.decode([ids])[0]
            )
            == expected
        )


def test_whole_line_and_word_pieces_agree_between_blanks(subwords):
    line = "We know him they know her"
    pieces = subwords.encode_words([line], [boundaries(line, set())])[0]
    assert list(chain.from_iterable(pieces)) == subwords.encode_lines([line])[0]


def test_a_blank_is_marked_only_where_the_text_has_one(subwords):
    line = "I don't know"
    pieces = subwords.encode_words([line], [{"start_char": [0, 2, 4, 8], "end_char": [1, 4, 7, 12]}])[0]
    first = ["".join(subwords.decode([[0x41 + 4, word[0]]])[0][1:]) for word in pieces]
    assert [text.startswith(" ") for text in first] == [True, True, False, True]


def test_no_piece_is_learned_across_words():
    line = "I don't know"
    words = {"start_char": [0, 2, 4, 8], "end_char": [1, 4, 7, 12]}
    assert mark_boundaries(line, **{"starts": words["start_char"], "ends": words["end_char"]}) == "I do\x01n't know"
    import sentencepiece

    marked = [mark_boundaries(line, words["start_char"], words["end_char"])] * 3
    model = sentencepiece.SentencePieceProcessor(model_proto=train_pieces(marked, SubwordConfig(vocab_size=275)))
    pieces = [model.id_to_piece(i) for i in range(len(model))]
    assert not any("on" in piece and "'" in piece for piece in pieces)
    assert not any("\x01" in piece for piece in pieces)
    assert [model.pad_id(), model.unk_id(), model.bos_id(), model.eos_id()] == [PAD_ID, UNK_ID, BOS_ID, EOS_ID]


def test_training_is_deterministic():
    assert train_pieces(LINES, SubwordConfig(vocab_size=300)) == train_pieces(LINES, SubwordConfig(vocab_size=300))


def test_too_large_vocabulary_is_a_user_error():
    with pytest.raises(UserError, match=r"vocab_size = 9999 .*<= \d+"):
        train_pieces(LINES, SubwordConfig(vocab_size=9999))


def test_broken_model_file(tmp_path):
    (tmp_path / "pieces.model").write_bytes(b"\xff\xfe\xfd")
    for name in ("pieces.model", "missing.model"):
        with pytest.raises(UserError, match="not a sentencepiece model"):
            Subwords(tmp_path / name)


def test_label_vocabulary(tmp_path):
    vocab = LabelVocab(["VP", "NP", "NP"])
    assert vocab.names == ["<unk>", "NP", "VP"] and vocab["VP"] == 2 and vocab["QP"] == 0
    (tmp_path / "labels.txt").write_bytes(vocab.file_bytes())
    assert LabelVocab.load(tmp_path / "labels.txt").names == vocab.names
