"""The pieces contract: pieces lie within parser words and decode to the raw text exactly."""

from collections import Counter
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from sample_lines import sample_lines
from sentencepiece import sentencepiece_model_pb2

from treenet.data.noise import Merges
from treenet.runs.loading import load_processor
from treeproc.common.settings import UserError, build_settings
from treeproc.shards.rows import WordEnds
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID, lower_case
from treeproc.shards.shard import read_names
from treeproc.subwords import (
    LabelVocab,
    SubwordConfig,
    Subwords,
    blank_separated,
    describe_characters,
    mark_boundaries,
    train_pieces,
)

LINES = ["I don't know (yet).", "We don't know him.", "He knows  her, doesn't he?", "They know us."] * 5
COUNTS = Counter(word for line in LINES for word in line.split(" "))


def encode_words(subwords: Subwords, line: str, words: dict) -> list[list[int]]:
    """Pieces of every word of one line."""
    ends = WordEnds(np.array([0, len(words["end_char"])]), np.array(words["end_char"]))
    pieces, counts = subwords.encode_words(pa.array([line]), ends)
    return [part.tolist() for part in np.split(pieces, np.cumsum(counts)[:-1])]


def encode_line(subwords: Subwords, line: str) -> list[int]:
    return subwords.encode_lines(pa.array([line]))[0].tolist()


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
    path.write_bytes(train_pieces(COUNTS, SubwordConfig(vocab_size=320)))
    return Subwords(path)


@num_examples(200)
@given(st.data())
def test_pieces_decode_to_the_line(subwords, data):
    alphabet = st.one_of(
        st.sampled_from("aknow don't()  \t\u2028é日😀\x00"), st.characters(exclude_categories=["Cs"], exclude_characters="▁")
    )
    line = data.draw(st.text(alphabet, min_size=1, max_size=30)).strip()
    words = boundaries(line, data.draw(st.sets(st.integers(1, 30))))
    if not words["start_char"]:
        return
    pieces = encode_words(subwords, line, words)
    assert len(pieces) == len(words["start_char"]) and all(pieces)
    assert subwords.decode([list(chain.from_iterable(pieces))]) == [line]
    assert subwords.decode([encode_line(subwords, line)]) == [line]
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
    pieces = encode_words(subwords, line, boundaries(line, set()))
    assert list(chain.from_iterable(pieces)) == encode_line(subwords, line)


def test_a_blank_is_marked_only_where_the_text_has_one(subwords):
    line = "I don't know"
    pieces = encode_words(subwords, line, {"end_char": [1, 4, 7, 12]})
    first = ["".join(subwords.decode([[0x41 + 4, word[0]]])[0][1:]) for word in pieces]
    assert [text.startswith(" ") for text in first] == [True, True, False, True]


def test_no_piece_is_learned_across_words():
    line = "I don't know"
    words = WordEnds(np.array([0, 4]), np.array([1, 4, 7, 12]))
    marked = mark_boundaries(pa.array([line]), words)
    assert marked.to_pylist() == ["I do\x01n't know"]
    import sentencepiece

    counts = dict.fromkeys(blank_separated(marked).to_pylist(), 3)
    model = sentencepiece.SentencePieceProcessor(model_proto=train_pieces(counts, SubwordConfig(vocab_size=275)))
    pieces = [model.id_to_piece(i) for i in range(len(model))]
    assert not any("on" in piece and "'" in piece for piece in pieces)
    assert not any("\x01" in piece for piece in pieces)
    assert [model.pad_id(), model.unk_id(), model.bos_id(), model.eos_id()] == [PAD_ID, UNK_ID, BOS_ID, EOS_ID]


def test_words_of_the_training_text_can_be_kept_whole(tmp_path):
    words = {"don": 1, "n't": 3, "co-writer": 1, "21st": 2, "Москва-river": 1, "a" * 40: 1, "🙂ok": 1, "7": 4}
    (tmp_path / "whole.model").write_bytes(train_pieces(words, SubwordConfig(vocab_size=None)))
    whole = Subwords(tmp_path / "whole.model")
    for word in words:
        assert [len(part) for part in encode_words(whole, word, boundaries(word, set()))] == [1], word
    unseen = encode_words(whole, "writer 2121", boundaries("writer 2121", set()))
    assert all(len(part) > 1 for part in unseen) and not any(UNK_ID in part for part in unseen)
    long = [letter * length for letter, length in (("b", 511), ("c", 900))]  # sentencepiece has pieces of up to 512 characters
    (tmp_path / "long.model").write_bytes(train_pieces(dict.fromkeys(long, 2), SubwordConfig(vocab_size=None)))
    pieces = [encode_words(Subwords(tmp_path / "long.model"), word, boundaries(word, set()))[0] for word in long]
    assert len(pieces[0]) == 1 and 1 < len(pieces[1]) < 5


def test_many_words_can_be_kept_whole(tmp_path):
    words = [f"{number:04d}" for number in range(250)]  # a thousand letters
    (tmp_path / "whole.model").write_bytes(train_pieces(dict.fromkeys(words, 2), SubwordConfig(vocab_size=None)))
    whole = Subwords(tmp_path / "whole.model")
    assert all(len(encode_words(whole, word, boundaries(word, set()))[0]) == 1 for word in words)


def test_training_is_deterministic():
    assert train_pieces(COUNTS, SubwordConfig(vocab_size=300)) == train_pieces(COUNTS, SubwordConfig(vocab_size=300))


def test_too_large_vocabulary_is_a_user_error():
    with pytest.raises(UserError, match=r"vocab_size = 9999 does not suit the training text: Vocabulary size .*<= \d+"):
        train_pieces(COUNTS, SubwordConfig(vocab_size=9999))
    with pytest.raises(UserError, match=r"vocab_size = 10000000 .*<= \d+"):
        train_pieces(COUNTS, SubwordConfig(vocab_size=10_000_000))
    for size in (10_000_001, 2**31):  # sentencepiece reads 32 bits
        with pytest.raises(UserError, match=rf"vocab_size: .* 10000000 or null, but is {size}"):
            build_settings(SubwordConfig, {"vocab_size": size}, "subwords")


def test_a_pretrained_encoder_has_a_fast_tokenizer_in_its_folder(tmp_path):
    config = SubwordConfig(tokenizer=str(tmp_path / "encoder"))
    with pytest.raises(UserError, match="encoder is not a folder; give the folder of a pretrained encoder"):
        config.tokenizer_file()
    (tmp_path / "encoder").mkdir()
    with pytest.raises(UserError, match=r"encoder has no tokenizer\.json"):
        config.tokenizer_file()
    (tmp_path / "encoder" / "tokenizer.json").touch()
    assert config.tokenizer_file() == tmp_path / "encoder" / "tokenizer.json"


def test_a_file_that_is_no_model_is_one_line(tmp_path):
    """A file that is missing, empty, cut at any place, or that holds no piece: for every function that loads one."""
    encoded, model = tmp_path / "encoded" / "vocab", train_pieces(COUNTS, SubwordConfig(vocab_size=300))
    encoded.mkdir(parents=True)
    path = encoded / "pieces.model"
    without_pieces = sentencepiece_model_pb2.ModelProto.FromString(model)
    del without_pieces.pieces[:]
    cuts = [model[:end] for end in range(0, len(model) - 1, 7)]  # a cut between two fields is a message too
    for content in (b"\xff\xfe\xfd", without_pieces.SerializeToString(), *cuts, None):
        path.unlink() if content is None else path.write_bytes(content)
        for load in (lambda: Subwords(path), lambda: load_processor(tmp_path), lambda: Merges.load(path)):
            with pytest.raises(UserError, match="is not a sentencepiece model; run tree-attention preprocess again"):
                load()
    path.write_bytes(model)
    assert len(Subwords(path)) == load_processor(tmp_path).vocab_size() == 300


def test_label_vocabulary(tmp_path):
    vocab = LabelVocab(["VP", "NP", "NP"])
    assert vocab.names == ["<unk>", "NP", "VP"] and vocab["VP"] == 2 and vocab["QP"] == 0
    (tmp_path / "labels.txt").write_bytes(vocab.file_bytes())
    assert LabelVocab.load(tmp_path / "labels.txt").names == vocab.names


@pytest.mark.parametrize("end", [*"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"])
def test_no_name_of_a_vocabulary_holds_a_line_end(tmp_path, end):
    """Every program reads as many names as there are, so no name may be one line for one program and two for another."""
    with pytest.raises(UserError, match=rf"with the line end U\+{ord(end):04X}; remove it"):
        LabelVocab(["NP", f"V{end}P"]).file_bytes()
    path = tmp_path / "labels.txt"
    path.write_bytes(f"<unk>\nN\xa0P\tx\nV{end}P\n".encode())
    if end != "\n":
        with pytest.raises(UserError, match=r"labels.txt is damaged: it has the name 'V.*P' with the line end"):
            read_names(path)
    path.write_bytes("<unk>\nN\xa0P\tx\n".encode())
    assert read_names(path) == ["<unk>", "N\xa0P\tx"]
    with pytest.raises(UserError, match=r"cannot read .*missing.txt: No such file"):
        read_names(tmp_path / "missing.txt")


@num_examples(100)
@given(st.lists(st.text(st.sampled_from("aknow \t▁é日😀\u2028"), max_size=20), max_size=4))
def test_lines_have_the_pieces_of_the_whole_line(subwords, lines):
    """Lines are encoded word by word; sentencepiece on the whole line says the same."""
    pieces, counts = subwords.encode_lines(pa.array(lines, pa.string()))
    assert [part.tolist() for part in np.split(pieces, np.cumsum(counts))[:-1]] == subwords._encoder.encode(
        [" " + line for line in lines]
    )


@num_examples(100)
@given(st.lists(st.text(st.sampled_from("ab é日"), max_size=12), max_size=4), st.data())
def test_marks_stand_where_words_touch(lines, data):
    words = [boundaries(line, data.draw(st.sets(st.integers(1, 12)))) for line in lines]
    counts = [len(spans["end_char"]) for spans in words]
    ends = WordEnds(np.cumsum([0, *counts]), np.array([end for spans in words for end in spans["end_char"]], dtype=np.int64))
    expected = []
    for line, spans in zip(lines, words, strict=True):
        touching = set(spans["end_char"][:-1]) & set(spans["start_char"][1:])
        expected += ["".join("\x01" * (i in touching) + c for i, c in enumerate(line))] * bool(spans["end_char"])
    assert mark_boundaries(pa.array(lines, pa.string()), ends).to_pylist() == expected


def test_counted_words_teach_what_the_lines_teach():
    """The model is the one that sentencepiece learns from the lines themselves."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, model_type="bpe", vocab_size=300, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True, num_threads=1, minloglevel=2,
        pad_id=PAD_ID, unk_id=UNK_ID, bos_id=BOS_ID, eos_id=EOS_ID,
    )  # fmt: skip
    models = [
        sentencepiece.SentencePieceProcessor(model_proto=proto)
        for proto in (model.getvalue(), train_pieces(COUNTS, SubwordConfig(vocab_size=300)))
    ]
    first, second = ([(m.id_to_piece(i), m.get_score(i)) for i in range(300)] for m in models)
    assert first == second


def test_lower_case(tmp_path):
    config = SubwordConfig(vocab_size=300, lowercase=True)
    model = train_pieces(Counter({**COUNTS, "ÄRGER": 3}), config)
    assert model == train_pieces(Counter({**COUNTS, "ÄRGER": 3}), config)
    (tmp_path / "pieces.model").write_bytes(model)
    lower = Subwords(tmp_path / "pieces.model")
    line = "I KNOW Ärger İ ΣΟΦΟΣ 日."
    assert lower.decode([encode_line(lower, line)]) == [lower_case(line)] == ["i know ärger i̇ σοφοσ 日."]
    words = encode_words(lower, line, boundaries(line, {1}))
    assert lower.decode([list(chain.from_iterable(words))]) == [lower_case(line)]
    (tmp_path / "tagged.model").write_bytes(train_pieces(COUNTS, config, ["<2ΕΣ>"]))  # <2εσ>, where Python writes ς
    assert len(encode_line(Subwords(tmp_path / "tagged.model"), "<2ΕΣ>")) == 1


def test_rare_characters_are_bytes(tmp_path):
    counts = {"a" * 10: 1000, "日": 1}
    for coverage in (1.0, 0.99):
        (tmp_path / "pieces.model").write_bytes(train_pieces(counts, SubwordConfig(vocab_size=264, character_coverage=coverage)))
        subwords = Subwords(tmp_path / "pieces.model")
        assert (len(encode_line(subwords, "日")) > 2) == (coverage < 1)
        assert subwords.decode([encode_line(subwords, "日")]) == ["日"]


def test_a_vocabulary_that_is_too_small_is_refused_with_our_settings():
    with pytest.raises(
        UserError, match="subwords.vocab_size = 262 does not suit .* or decrease subwords.character_coverage"
    ) as found:
        train_pieces(Counter("abcdefghijkl"), SubwordConfig(vocab_size=262, character_coverage=1.0))
    assert "--" not in str(found.value)


@pytest.mark.parametrize("size", [700, 1400])
def test_a_vocabulary_of_single_characters_is_told_with_a_size_that_helps(size):
    """Lines without blanks, of words of two out of 400 signs; with more pieces, words have their own."""
    random = np.random.default_rng(1)
    words = [chr(0x4E00 + 2 * number) + chr(0x4E01 + 2 * number) for number in range(200)]
    counts = Counter("".join(words[number] for number in random.integers(200, size=8)) for _ in range(400))
    told = describe_characters(train_pieces(counts, SubwordConfig(vocab_size=size)))
    if size == 700:
        count = int(told.partition(" of 700 pieces are single characters")[0])
        assert 400 < count < 440 and "subwords.vocab_size=2000 leaves" in told
    else:
        assert told == ""


def test_small_vocabularies_of_languages_with_blanks_are_not_told():
    lines = sample_lines(60)
    for size in (350, 500, 800):
        model = train_pieces(Counter(word for line in lines for word in line.split()), SubwordConfig(vocab_size=size))
        assert describe_characters(model) == ""
