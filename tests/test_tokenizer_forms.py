"""The forms of tokenizers that are loaded: what is accepted, and one step beyond each limit."""

import base64
import re
import struct

import pytest
from sentencepiece import sentencepiece_model_pb2

from treeproc.shards.tokenizer_forms import LONGEST_PIECE, MOST_GROWTH, check_pieces, check_tokenizer, longest_text, try_tokenizer

tokenizers = pytest.importorskip("tokenizers")

LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
WORDS = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1}, "max_input_chars_per_word": 100}
PAIRS = {"type": "BPE", "unk_token": None, "byte_fallback": False, "dropout": None}
LEAF = 1 << 31  # a unit of a trie with a value


def spec(model: dict = UNIGRAM, added: tuple[str, ...] = (), **parts) -> dict:
    return {"model": model, "added_tokens": [{"content": name} for name in added], **parts}


def sequence(kind: str, *parts: dict) -> dict:
    return {kind: {"type": "Sequence", {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[kind]: list(parts)}}


def pairs(names: list[str], **more) -> dict:
    return PAIRS | {"vocab": {name: number for number, name in enumerate(names)}} | more


def replace(content: str, **pattern: str) -> dict:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def split(**pattern: str) -> dict:
    return {"type": "Split", "pattern": pattern}


def template(*single: str) -> dict:
    return {"type": "TemplateProcessing", "single": [{name: {}} for name in single]}


def charsmap(units: list[int], texts: bytes) -> bytes:
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


def trie(value: int = 0, length: int = 512, texts: bytes = b"ss\0") -> bytes:
    """A trie whose first unit leads to a leaf of text `value` in the next block of 256 units; the others lead nowhere."""
    units = [LEAF] * length
    units[0] = 256 << 10 | 1 << 8
    units[256] = LEAF | value
    return charsmap(units, texts)


def precompiled(content: bytes) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


NOTHING = {"type": "Lowercase"}
ACCEPTED = {
    "no components": spec(),
    "WordPiece": spec(WORDS, ("[MASK]", "x" * LONGEST_PIECE)),
    "the longest piece": spec(WORDS | {"vocab": {"[UNK]": 0, "x" * LONGEST_PIECE: 1}}),
    "the longest words": spec(WORDS | {"max_input_chars_per_word": 1000}),
    "BPE of letters": spec(pairs(LETTERS), pre_tokenizer={"type": "ByteLevel"}),
    "BPE of letters, normalised": spec(pairs(LETTERS), normalizer={"type": "ByteLevel"}),
    "BPE of letters, after others": spec(pairs(LETTERS), **sequence("pre_tokenizer", split(String="a"), {"type": "ByteLevel"})),
    "BPE of bytes": spec(pairs(BYTES, byte_fallback=True)),
    "BPE with an unknown piece": spec(pairs(["<unk>", "a"], unk_token="<unk>")),
    "no dropout": spec(pairs(["<unk>"], unk_token="<unk>", dropout=0.0)),
    "known expressions": spec(pre_tokenizer=split(Regex=r"\s+(?!\S)|[^\r\n\p{L}\p{N}]?\p{L}+")),
    "line ends as characters": spec(pre_tokenizer=split(Regex=r"\s*[\r\n]+".replace(r"\r", "\r").replace(r"\n", "\n"))),
    "a string that is no known expression": spec(pre_tokenizer=split(String="(a*)*")),
    "the longest expression": spec(pre_tokenizer=split(Regex="|".join([r"\s+"] * 249 + [r"\n", "."]))),
    "the text once": spec(post_processor=template("SpecialToken", "Sequence", "SpecialToken")),
    "marks of 16": spec(WORDS | {"continuing_subword_prefix": "#" * 16}, normalizer={"type": "Prepend", "prepend": "a" * 16}),
    "a replacement of 16": spec(pre_tokenizer={"type": "Metaspace", "replacement": "a" * 16}),
    "32 components": spec(**sequence("normalizer", *[NOTHING] * 32), **sequence("pre_tokenizer", *[{"type": "Digits"}] * 32)),
    "growth to the limit": spec(**sequence("normalizer", replace("b" * 8), replace("bb" * 8, String="aa"))),
    "an expression counts as one character": spec(normalizer=replace("b" * MOST_GROWTH, Regex=r"\s+")),
    "shorter is not below one": spec(**sequence("normalizer", replace("b" * MOST_GROWTH), replace(""))),
    "decoders begin again": spec(normalizer=replace("b" * MOST_GROWTH), decoder=replace("b" * MOST_GROWTH)),
    "a table of characters": spec(normalizer=precompiled(trie())),
    "the last byte of its texts": spec(normalizer=precompiled(trie(value=2))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_forms_of_known_families_are_accepted(name):
    check_tokenizer(ACCEPTED[name])


REFUSED = {
    "33 components": (spec(**sequence("normalizer", *[NOTHING] * 33)), "normalizer must have at most 32 components"),
    "unknown component": (spec(pre_tokenizer={"type": "ByteFallback"}), "pre_tokenizer: ByteFallback is not a component"),
    "unknown, inside": (spec(**sequence("normalizer", NOTHING, {"type": "Foo"})), "normalizer.1: Foo is not a component"),
    "growth": (spec(normalizer=replace("b" * (MOST_GROWTH + 1))), "normalizer makes a text more than 64 times as long"),
    "growth together": (spec(**sequence("normalizer", replace("b" * 8), replace("b" * 9))), "normalizer.1 makes a text more"),
    "shorter first": (spec(**sequence("normalizer", replace(""), replace("b" * 65))), "normalizer.1 makes a text more"),
    "growth over kinds": (
        spec(normalizer=replace("b" * 33), pre_tokenizer={"type": "Metaspace"}), "pre_tokenizer makes a text more"
    ),
    "growth of an expression": (spec(normalizer=replace("b" * 65, Regex=r"\s+")), "normalizer makes a text more"),
    "growth of decoders": (spec(decoder=replace("b" * 65)), "decoder makes a text more"),
    "unknown expression": (spec(pre_tokenizer=split(Regex="(a*)*")), "pre_tokenizer: '(a*)*' is not a regular expression"),
    "a known one, then another": (spec(pre_tokenizer=split(Regex=r"\s+|(a*)*")), "is not a regular expression"),
    "the longest expression": (spec(pre_tokenizer=split(Regex="|".join([r"\s+"] * 250 + ["."]))), "is not a regular expression"),
    "no pattern": (spec(pre_tokenizer=split(String="")), "pre_tokenizer: the pattern is empty"),
    "no text": (spec(post_processor=template("SpecialToken")), "post_processor must have the text once"),
    "the text twice": (spec(post_processor=template("Sequence", "Sequence")), "post_processor must have the text once"),
    "a long prefix": (spec(normalizer={"type": "Prepend", "prepend": "a" * 17}), "normalizer.prepend must have at most 16"),
    "a long replacement": (
        spec(pre_tokenizer={"type": "Metaspace", "replacement": "a" * 17}), "pre_tokenizer.replacement must have at most 16"
    ),
    "a long continuation": (spec(WORDS | {"continuing_subword_prefix": "#" * 17}), "model.continuing_subword_prefix must have"),
    "a long end": (spec(WORDS | {"end_of_word_suffix": "#" * 17}), "model.end_of_word_suffix must have at most 16"),
    "unknown model": (spec(UNIGRAM | {"type": "Words"}), "model: Words is not a model"),
    "long words": (spec(WORDS | {"max_input_chars_per_word": 1001}), "max_input_chars_per_word must be at most 1000"),
    "dropout": (spec(pairs(["<unk>"], unk_token="<unk>", dropout=0.1)), "dropout must be null"),
    "Unigram without an unknown piece": (spec(UNIGRAM | {"unk_id": None}), "no unknown piece, which a tokenizer of type Unigram"),
    "WordPiece without one": (spec(WORDS | {"vocab": {"a": 0}}), "no unknown piece, which a tokenizer of type WordPiece"),
    "letters without ByteLevel": (spec(pairs(LETTERS)), "no unknown piece, which a tokenizer of type BPE"),
    "a letter is missing": (spec(pairs(LETTERS[1:]), normalizer={"type": "ByteLevel"}), "no unknown piece"),
    "bytes without their use": (spec(pairs(BYTES)), "no unknown piece"),
    "a byte is missing": (spec(pairs(BYTES[:-1], byte_fallback=True)), "no unknown piece"),
    "letters of WordPiece": (
        spec(pairs(LETTERS, type="WordPiece"), normalizer={"type": "ByteLevel"}), "which a tokenizer of type WordPiece"
    ),
    "a long piece": (spec(WORDS | {"vocab": {"[UNK]": 0, "x" * 4097: 1}}), "name of a piece must have at most 4096 characters"),
    "a long piece of Unigram": (spec(UNIGRAM | {"vocab": [["x" * 4097, 0.0]]}), "at most 4096 characters, but has 4,097"),
    "a long added piece": (spec(added=("x" * 4097,)), "name of a piece must have at most 4096"),
    "no base64": (spec(normalizer=precompiled(trie()) | {"precompiled_charsmap": "a"}), "precompiled_charsmap is damaged"),
    "long texts": (spec(normalizer=precompiled(trie(texts=b"s" * 65 + b"\0"))), "normalizer makes a text more than 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_are_refused_in_one_line(name):
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        check_tokenizer(given)


def test_every_component_is_known_with_its_growth():
    """One more character before it than it leaves room for is refused."""
    normalizers = ("BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "Prepend")
    pre_tokenizers = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "UnicodeScripts")
    growth = {("normalizer", name): 1 for name in normalizers} | {("normalizer", "ByteLevel"): 4}
    growth |= {("pre_tokenizer", name): 1 for name in (*pre_tokenizers, "CharDelimiterSplit")}
    growth |= {("pre_tokenizer", "ByteLevel"): 5, ("pre_tokenizer", "Metaspace"): 2}
    growth |= {("post_processor", name): 1 for name in ("BertProcessing", "RobertaProcessing", "ByteLevel")}
    for (kind, name), times in growth.items():
        for before, is_refused in ((MOST_GROWTH // times, False), (MOST_GROWTH // times + 1, times > 1)):
            parts = (
                sequence("normalizer", replace("b" * before), {"type": name})
                if kind == "normalizer"
                else {"normalizer": replace("b" * before), kind: {"type": name}}
            )
            if times == 1 and before > MOST_GROWTH:
                continue
            found = None
            try:
                check_tokenizer(spec(**parts))
            except ValueError as error:
                found = str(error)
            assert (found is not None) == is_refused, (name, before, found)
    for name in ("WordPiece", "ByteLevel", "Metaspace", "BPEDecoder", "CTC", "Fuse", "Strip", "ByteFallback"):
        check_tokenizer(spec(decoder={"type": "Sequence", "decoders": [replace("b" * MOST_GROWTH), {"type": name}]}))


TABLES = {
    "nothing": (b"", "its trie does not fit in"),
    "three bytes": (b"\1\0\0", "its trie does not fit in"),
    "no trie": (charsmap([], b"a\0"), "its trie does not fit in"),
    "half a unit": (struct.pack("<I", 6) + b"abcdef\0", "its trie does not fit in"),
    "longer than the table": (struct.pack("<I", 8) + b"abcdefg", "its trie does not fit in"),
    "no texts": (charsmap([0], b""), "its texts have no end"),
    "texts without an end": (charsmap([LEAF], b"ss"), "its texts have no end"),
    "a step outside": (trie(length=511), "its trie leads outside"),
    "a step outside by a long way": (charsmap([1 << 10 | 1 << 9] + [LEAF] * 510, b"a\0"), "its trie leads outside"),
    "behind the texts": (trie(value=3), "its trie leads to no text"),
    "inside of a character": (trie(value=1, texts="é\0".encode()), "its trie leads to no text"),
    "from another place": (charsmap([LEAF, 256 << 10 | 1 << 8] + [LEAF] * 255 + [LEAF | 9] + [LEAF] * 254, b"a\0"), "no text"),
    "by the long way": (charsmap([1 << 10 | 1 << 9 | 1 << 8] + [LEAF] * 255 + [9] + [LEAF] * 255, b"a\0"), "no text"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_damaged_table_of_characters_is_refused(name):
    content, message = TABLES[name]
    with pytest.raises(ValueError, match=f"normalizer: precompiled_charsmap is damaged: .*{message}"):
        check_tokenizer(spec(normalizer=precompiled(content)))


def test_the_longest_text_of_a_table_counts_characters():
    assert longest_text(charsmap([0], "é\0ßßß\0a\0".encode())) == 3


def model(*pieces: str, unknown: str = "?", **specs: bytes) -> sentencepiece_model_pb2.ModelProto:
    """A message of sentencepiece; `specs` are tables of characters."""
    found = sentencepiece_model_pb2.ModelProto()
    found.trainer_spec.unk_surface = unknown
    for piece in pieces:
        found.pieces.add().piece = piece
    for name, content in specs.items():
        getattr(found, name).precompiled_charsmap = content
    return found


def test_pieces_of_sentencepiece_have_a_length():
    long, growing = "x" * LONGEST_PIECE, charsmap([0], b"s" * 65 + b"\0")
    check_pieces(model())
    check_pieces(model("a", long, unknown=long, normalizer_spec=charsmap([0], b"s" * 64 + b"\0")))
    for wrong in (model("a", long + "x"), model("a", unknown=long + "x")):
        with pytest.raises(ValueError, match="a piece must have at most 4096 characters, but has 4,097"):
            check_pieces(wrong)
    for name in ("normalizer_spec", "denormalizer_spec"):
        with pytest.raises(ValueError, match="a character becomes more than 64"):
            check_pieces(model("a", **{name: growing}))


def test_numbers_of_pieces_are_all_different_and_not_far_above_their_count():
    def content(vocab: dict[str, int]) -> bytes:
        return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]")).to_str().encode()

    try_tokenizer(content({"[UNK]": 0, "a": 10_004}))
    with pytest.raises(ValueError, match="a piece has a number far above 2, the number of its pieces"):
        try_tokenizer(content({"[UNK]": 0, "a": 10_005}))
    with pytest.raises(ValueError, match="two pieces have the same number"):
        try_tokenizer(content({"[UNK]": 0, "a": 1}).replace(b'"a":1', b'"a":0'))
    with pytest.raises(ValueError, match="no unknown piece"):
        try_tokenizer(content({"a": 0}))
