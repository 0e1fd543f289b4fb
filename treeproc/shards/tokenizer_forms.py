"""Which fast tokenizers and sentencepiece models are read: forms of known families, whose memory grows with the text alone.

A description may hold regular expressions that never end, and steps that double a text forty times. Components, expressions and
growth are therefore compared with what known families have: BERT, RoBERTa, XLM-R, T5, DeBERTa, ModernBERT, Llama, Qwen, GPT-4.
"""

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

MOST_GROWTH = 64  # characters for one of a text
LONGEST_PIECE = 4096  # characters; known families have at most a few hundred
_MOST_STEPS = 32
_MOST_NUMBERS = 10_000  # that a tokenizer may leave out
_LONGEST_MARK = 16  # characters that a step may add to a text, or a model to a piece
_LONGEST_WORD = 1000  # characters; WordPiece takes the square of it in time

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = [rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (rf"{_UPPER}*{_LOWER}+", rf"{_UPPER}+{_LOWER}*")]
# The alternatives of known regular expressions: each takes linear time where the next one takes what it leaves.
_ALTERNATIVES = (
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)",
    r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+", r"\s*[\r\n]+", r"\s*[\r\n]",  # GPT-2
    r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}",  # GPT-4, Llama 3, Qwen
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    *_WORDS, *(f"{word}{_CONTRACTIONS}?" for word in _WORDS),
    r"[\p{L}]+", r"[\p{N}]", r"[^\s\p{L}\p{N}]+",  # CLIP
    r" ?[^(\s|[.,!?…。，、।۔،])]+", "[0-9][0-9][0-9]",  # BLOOM, Falcon
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", "[一-龥぀-ゟ゠-ヿ]+",  # DeepSeek
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*",
    " ", ".", " {2,}", r"\s{2,}", r"[\n\r\t]", r"\n",  # normalisers of models of sentencepiece
)  # fmt: skip
_ALTERNATIVE = "|".join(map(re.escape, _ALTERNATIVES))
_KNOWN = re.compile(rf"(?:{_ALTERNATIVE})(?:\|(?:{_ALTERNATIVE}))*")
_LONGEST_EXPRESSION = 1000

# How many times as many characters a component can make, by kind; 0 if its description says it.
_COMPONENTS: dict[str, dict[str, int]] = {
    "normalizer": dict.fromkeys(
        ("BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "Prepend"), 1
    ) | {"Replace": 0, "Precompiled": 0, "ByteLevel": 4},
    "pre_tokenizer": dict.fromkeys(
        ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Split", "Punctuation", "Digits", "UnicodeScripts"), 1
    ) | {"CharDelimiterSplit": 1, "ByteLevel": 5, "Metaspace": 2},
    "post_processor": dict.fromkeys(("TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel"), 1),
    "decoder": dict.fromkeys(
        ("WordPiece", "ByteLevel", "Metaspace", "BPEDecoder", "CTC", "Fuse", "Strip", "ByteFallback"), 1
    ) | {"Replace": 0},
}  # fmt: skip
_SEQUENCES = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"
}  # fmt: skip
_ON_TEXT = ("normalizer", "pre_tokenizer")
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
# The characters that ByteLevel writes for the 256 bytes: itself if it is printable, else one from 256 on.
_LETTERS = {chr(byte) for byte in _PRINTABLE} | {chr(256 + number) for number in range(256 - len(_PRINTABLE))}
_MODELS = ("WordPiece", "BPE", "Unigram", "WordLevel")


# Texts that reach the steps of a tokenizer: words, numbers, blanks, long words, characters that are normalised, and none.
_PROBES = ("", "I don't know 12,345 (yet).", "a" * 2000, " " * 500, "ﬁ Ⅷ ﷺ İ e\u0301 한국어 日本語 😀\n\t\u200b", "</s> [MASK] ▁")


def try_tokenizer(content: bytes) -> None:
    """Load a fast tokenizer, check its form, and cut some texts. Raises any error, also panics of Rust."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content.decode())
    numbers = list(tokenizer.get_vocab(with_added_tokens=False).values())
    if len(set(numbers)) < len(numbers):
        raise ValueError("two pieces have the same number")
    if max(tokenizer.get_vocab().values(), default=0) > _MOST_NUMBERS + 2 * len(numbers):
        raise ValueError(f"a piece has a number far above {len(numbers):,}, the number of its pieces")
    check_tokenizer(json.loads(tokenizer.to_str()))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for encoding in tokenizer.encode_batch(_PROBES):
        tokenizer.decode(encoding.ids)


def check_pieces(model: Any) -> None:
    """Check the message of a sentencepiece model. Raises ValueError if its pieces are not text, or make long texts of short ones.

    The library itself refuses all other damage when it loads a model (benchmarks/fuzz_inputs.py).
    """
    for spec in (model.normalizer_spec, model.denormalizer_spec):
        if spec.precompiled_charsmap and longest_text(spec.precompiled_charsmap) > MOST_GROWTH:
            raise ValueError(f"a character becomes more than {MOST_GROWTH}")
    for piece in (model.trainer_spec.unk_surface, *(piece.piece for piece in model.pieces)):
        if not isinstance(piece, str):  # protobuf returns bytes that are no UTF-8 as they are
            raise ValueError("a piece is not UTF-8")
        _check_length("a piece", piece, LONGEST_PIECE)


def check_tokenizer(spec: Mapping[str, Any]) -> None:
    """Check the description that the library itself writes of a tokenizer. Raises ValueError for one of an unknown form."""
    growth = 1.0
    for kind, known in _COMPONENTS.items():
        growth = 1.0 if kind == "decoder" else growth  # it makes another text
        for number, (name, part) in enumerate(_parts(spec.get(kind), kind)):
            if number >= _MOST_STEPS:
                raise ValueError(f"{kind} must have at most {_MOST_STEPS} components")
            if part["type"] not in known:
                raise ValueError(f"{name}: {part['type']} is not a component of a known tokenizer")
            growth *= _growth(name, part, known[part["type"]])
            if growth > MOST_GROWTH:
                raise ValueError(f"{name} makes a text more than {MOST_GROWTH} times as long, with the components before it")
    model = spec["model"]
    _check_model(model, any(part["type"] == "ByteLevel" for kind in _ON_TEXT for _, part in _parts(spec.get(kind), kind)))
    pieces = (one[0] if isinstance(one, list) else one for one in model["vocab"])
    for piece in (*pieces, *(token["content"] for token in spec["added_tokens"])):
        _check_length("the name of a piece", piece, LONGEST_PIECE)


def _parts(value: Mapping[str, Any] | None, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the components of one kind with their names, in the order in which they act."""
    stack = [(kind, value)] if value is not None else []
    while stack:
        name, part = stack.pop()
        if part["type"] == "Sequence":
            inner = part[_SEQUENCES[kind]]
            stack += [(f"{name}.{number}", one) for number, one in reversed(list(enumerate(inner)))]
        else:
            yield name, part


def _growth(name: str, part: Mapping[str, Any], known: int) -> float:
    """Return how many times as long a component can make a text. Raises ValueError if it is not of a known form."""
    kind = part["type"]
    if kind in ("Split", "Replace"):
        [(form, pattern)] = part["pattern"].items()
        if form == "Regex" and not _is_known(pattern):
            raise ValueError(f"{name}: {pattern!r} is not a regular expression of a known tokenizer")
        if not pattern:
            raise ValueError(f"{name}: the pattern is empty")
        if kind == "Replace":
            return max(1.0, len(part["content"]) / (len(pattern) if form == "String" else 1))
    if kind == "Precompiled":
        try:
            charsmap = base64.b64decode(part["precompiled_charsmap"])
            _check_trie(charsmap)
            return max(1, longest_text(charsmap))
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{name}: precompiled_charsmap is damaged: {error}") from None
    if kind == "TemplateProcessing" and sum("Sequence" in piece for piece in part["single"]) != 1:
        raise ValueError(f"{name} must have the text once")
    for mark in ("prepend", "replacement"):
        _check_length(f"{name}.{mark}", part.get(mark), _LONGEST_MARK)
    return known


def _is_known(pattern: str) -> bool:
    """Return whether a regular expression consists of known alternatives."""
    escaped = pattern.replace("\r", "\\r").replace("\n", "\\n")
    return len(escaped) <= _LONGEST_EXPRESSION and _KNOWN.fullmatch(escaped) is not None


def _check_model(model: Mapping[str, Any], is_of_bytes: bool) -> None:
    if model["type"] not in _MODELS:
        raise ValueError(f"model: {model['type']} is not a model of a known tokenizer")
    for mark in ("continuing_subword_prefix", "end_of_word_suffix"):
        _check_length(f"model.{mark}", model.get(mark), _LONGEST_MARK)
    if model.get("max_input_chars_per_word", 0) > _LONGEST_WORD:
        raise ValueError(f"model.max_input_chars_per_word must be at most {_LONGEST_WORD}")
    if model.get("dropout"):
        raise ValueError("model.dropout must be null: pieces would be drawn at random")
    if model["type"] == "Unigram":
        knows_all = model["unk_id"] is not None
    else:
        names = model["vocab"].keys()
        is_whole = model["type"] == "BPE" and (
            (is_of_bytes and names >= _LETTERS) or (model["byte_fallback"] and names >= _BYTES)
        )
        knows_all = is_whole or model["unk_token"] in names
    if not knows_all:  # its package could not cut a text with another character, or would leave it out and give wrong places
        raise ValueError(
            f"it has no unknown piece, which a tokenizer of type {model['type']} needs if it lacks the pieces of bytes"
        )


def _check_length(name: str, text: str | None, most: int) -> None:
    if text is not None and len(text) > most:
        raise ValueError(f"{name} must have at most {most} characters, but has {len(text):,}")


def longest_text(charsmap: bytes) -> int:
    """Return how many characters one can become by sentencepiece's table of characters. Raises ValueError if it is damaged."""
    return max(len(text.decode()) for text in _charsmap(charsmap)[1].split(b"\0"))


def _charsmap(content: bytes) -> tuple[bytes, bytes]:
    """Return the two parts of the table: a double-array trie of UTF-8, and texts that end with NUL, whose places it has."""
    size = struct.unpack_from("<I", content)[0] if len(content) >= 4 else 0
    if size == 0 or size % 4 or size > len(content) - 4:
        raise ValueError("its trie does not fit in")
    if not content.endswith(b"\0", 4 + size):
        raise ValueError("its texts have no end")
    return content[4 : 4 + size], content[4 + size :]


def _check_trie(charsmap: bytes) -> None:
    """Raise ValueError if a step of the trie leads outside of it, or to no text: the package `tokenizers` does not look."""
    trie, texts = _charsmap(charsmap)
    units = struct.unpack(f"<{len(trie) // 4}I", trie)
    for place, unit in enumerate(units):
        if unit >> 31:  # the value of a leaf
            continue
        base = place ^ (unit >> 10 << ((unit & 1 << 9) >> 6))
        if base | 255 >= len(units):
            raise ValueError("its trie leads outside")
        if unit & 1 << 8:
            value = units[base] & 0x7FFF_FFFF
            if value >= len(texts) or texts[value] & 0xC0 == 0x80:
                raise ValueError("its trie leads to no text")
