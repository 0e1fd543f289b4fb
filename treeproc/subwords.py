"""Sentencepiece within the parser's words, and the vocabularies of labels and tags.

Every piece lies inside one word of the parser, and `▁` stands exactly where the text has a blank. So the pieces of a line decode
to the line itself, and a piece can be a leaf of the tree. The plain models read the same pieces.
"""

import hashlib
import io
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Self

import numpy as np
import pyarrow as pa
import sentencepiece
from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator
from sentencepiece import sentencepiece_model_pb2

from treeproc.common.hub import ModelPlace, local_folder
from treeproc.common.settings import Effect, Settings, UserError
from treeproc.common.storage import AnyPath
from treeproc.pretrained_pieces import TokenizerPieces
from treeproc.shards.piece_files import read_pieces
from treeproc.shards.rows import WordEnds, arrow_array, edges_of, flatten, numbers_of, string_bytes, strings_of, take
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID, UNKNOWN_LABEL, UNKNOWN_LABEL_ID, lower_case
from treeproc.shards.shard import names_bytes, read_names
from treeproc.shards.store import TOKENIZER_FILE

# Marks word boundaries without a blank in training text. It is never part of a vocabulary.
BOUNDARY = "\x01"
_BLANK = ord(" ")

_LONGEST_PIECE = 512  # of sentencepiece, in characters, with the blank before a word

# Number of words in the cache of pieces. When it is full, the cache is emptied.
_MOST_KNOWN = 200_000


class SubwordConfig(Settings):
    """The pieces: a byte-pair vocabulary for both sides, one for each side, or the tokenizer of a pretrained encoder."""

    vocab_size: PositiveInt | None = Field(
        32_000,
        le=10_000_000,
        description="number of pieces of a vocabulary, special and byte pieces included; null: as many as it takes to split no "
        "word of the training text that has less than 512 characters",
    )
    joint: bool = Field(
        True,
        description="one vocabulary for both sides, which translation models need; false: one of vocab_size pieces for each side",
    )
    character_coverage: float = Field(
        1.0,
        gt=0.9,
        le=1.0,
        description="share of the characters of the training text that become pieces; the others become bytes",
    )
    lowercase: bool = Field(False, description="lower-case the text for the pieces; the parser still reads the original text")
    max_training_lines: PositiveInt = Field(
        4_000_000, description="most lines of both sides to learn a vocabulary from; the job takes them evenly from all lines"
    )
    tokenizer: Annotated[ModelPlace | None, Effect.NONE] = Field(
        None,
        description="folder of a pretrained encoder, with tokenizer.json, or its name on the hub of Hugging Face: the leaves are "
        "the pieces of its tokenizer, cut at the parser's words. The job learns no pieces, and no other setting of subwords has "
        "an effect. null: the job learns pieces",
    )

    @model_validator(mode="after")
    def _tokenizer_alone(self) -> Self:
        others = [name for name, field in type(self).model_fields.items() if name != "tokenizer"]
        if self.tokenizer is not None and (set_ := [n for n in others if getattr(self, n) != type(self).model_fields[n].default]):
            raise ValueError(f"{set_[0]}: is for pieces that the job learns, but tokenizer has its own; leave one of them out")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_has_no_effect(self, dump: SerializerFunctionWrapHandler) -> dict:
        values = dump(self)
        tokenizer = values.pop("tokenizer", None)
        return values if self.tokenizer is None else {"tokenizer": tokenizer}

    def facts(self) -> dict:
        """Return what decides about the pieces: the settings, or the hash of the tokenizer. Raises UserError if it is missing."""
        if self.tokenizer is None:
            return self.model_dump()
        return {"tokenizer": hashlib.sha256(self.tokenizer_file().read_bytes()).hexdigest()}

    def tokenizer_file(self) -> AnyPath:
        """Return the fast tokenizer in the folder of the pretrained encoder. Raises UserError if there is none."""
        assert self.tokenizer is not None  # the pieces are not learned
        folder = local_folder("subwords.tokenizer", self.tokenizer)
        path = folder / "tokenizer.json"
        if path.exists():
            return path
        if not folder.is_dir():
            raise UserError(
                f"subwords.tokenizer: {folder.absolute()} is not a folder; give the folder of a pretrained encoder, or its name "
                "on the hub"
            )
        raise UserError(
            f"subwords.tokenizer: {self.tokenizer} has no tokenizer.json, the fast tokenizer, whose pieces have offsets; if "
            "transformers has one for it, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it"
        )


class UnsuitableSize(UserError):
    """The text is too small for the vocabulary size."""


def train_pieces(counts: Mapping[str, int], config: SubwordConfig, tags: Sequence[str] = ()) -> bytes:
    """Learn a BPE model from blank-separated words and their counts. The same counts give the same bytes.

    Each of the `tags`, as a word, is one piece. Words may contain the mark of `blank_separated`, which no piece crosses. Raises
    UserError if the text is too small for the vocabulary size.
    """
    model = io.BytesIO()
    # A tab separates word and count, so a word that contains a tab is left out.
    lines = (f"{word}\t{count}" for word, count in sorted(counts.items()) if "\t" not in word)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".tsv") as rules:
        rules.write(_lowercase_rules() if config.lowercase else "")
        rules.flush()
        # Decoding must give the input: no Unicode folding, no lost blanks, no unknown character.
        folding: dict[str, Any] = (
            {"normalization_rule_tsv": rules.name} if config.lowercase else {"normalization_rule_name": "identity"}
        )
        symbols = [f"\u2581{lower_case(tag) if config.lowercase else tag}" for tag in tags]
        whole: dict[str, Any] = {"user_defined_symbols": symbols} if symbols else {}
        size = {"vocab_size": config.vocab_size} if config.vocab_size else _keep_words_whole(counts)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines,
                model_writer=model,
                input_format="tsv",
                model_type="bpe",
                **size,
                character_coverage=config.character_coverage,
                **folding,
                **whole,
                remove_extra_whitespaces=False,
                byte_fallback=True,
                pretokenization_delimiter=BOUNDARY,
                shuffle_input_sentence=False,
                max_sentence_length=65536,
                num_threads=1,
                pad_id=PAD_ID,
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                minloglevel=2,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).rsplit("] ", maxsplit=1)[-1].strip()
            reason = re.sub(r"\S+ with --(character_coverage) option", r"subwords.\1", reason)
            raise UnsuitableSize(f"subwords.vocab_size = {config.vocab_size} does not suit the training text: {reason}") from None
    return _without_paths(model.getvalue())


_MOST_CHARACTERS, _PIECES_A_CHARACTER = 0.5, 4


def describe_characters(model: bytes) -> str:
    """Describe a model whose pieces are mostly single characters, with the size that helps; empty for any other.

    For 20,000 lines of KFTT's Japanese, the shares of single characters are 93 % of 4,000 pieces, 48 % of 8,000, and 25 % of
    16,000. With their English in one vocabulary, they are 48 % of 8,000, 25 % of 16,000, and 13 % of 32,000. For Multi30k and
    Europarl, English with German or French, they are at most 16 % of 1,000 pieces and 5 % of 4,000.
    """
    pieces = sentencepiece_model_pb2.ModelProto.FromString(model).pieces
    count = sum(piece.type == piece.NORMAL and len(piece.piece.removeprefix("\u2581")) <= 1 for piece in pieces)
    if count <= _MOST_CHARACTERS * len(pieces):
        return ""
    helps = math.ceil(_PIECES_A_CHARACTER * count / 1000) * 1000
    return (
        f"{count:,} of {len(pieces):,} pieces are single characters, so sequences are long; subwords.vocab_size={helps} leaves "
        "room for words"
    )


def _keep_words_whole(counts: Mapping[str, int]) -> dict[str, object]:
    """Return settings of sentencepiece with which it merges until every word is one piece, as far as pieces can be so long."""
    return {
        "vocab_size": min(1000 + sum(map(len, counts)), 2**31 - 1),  # an upper limit; the rest is special pieces and bytes
        "hard_vocab_limit": False,
        "max_sentencepiece_length": min(1 + max(map(len, counts), default=1), _LONGEST_PIECE),
        "split_by_unicode_script": False,
        "split_by_number": False,
    }


@cache
def _lowercase_rules() -> str:
    """Return sentencepiece's normalisation rules, code points in hexadecimal, for every character with a lower case."""
    lower = ((code, chr(code).lower()) for code in range(sys.maxunicode + 1))
    return "".join(f"{code:X}\t{' '.join(f'{ord(c):X}' for c in text)}\n" for code, text in lower if text != chr(code))


def _without_paths(model: bytes) -> bytes:
    """Return the model without the name of the file of its rules, which differs from run to run."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.normalization_rule_tsv = ""
    return proto.SerializeToString()


def blank_separated(lines: pa.Array) -> pa.Array:
    """Return the words of all lines, separated at blanks."""
    import pyarrow.compute as pc  # here, because it loads slowly, and only training of pieces needs it

    return pc.list_flatten(pc.split_pattern(lines, " "))


def mark_boundaries(lines: pa.Array, words: WordEnds) -> pa.Array:
    """Return the lines with a mark between words that touch, so that no learned piece crosses the boundary."""
    import pyarrow.compute as pc

    padded, cuts, row_edges = _word_cuts(lines, words)
    inner = cuts[1:-1]
    touching = inner[(padded[inner] != _BLANK) & ~np.isin(inner, row_edges)] if len(inner) else inner
    data = np.insert(padded, touching, ord(BOUNDARY))
    edges = row_edges + np.searchsorted(touching, row_edges)
    # Every line of the padded text begins with a blank.
    return pc.utf8_slice_codeunits(strings_of(data, edges), 1)


def _word_cuts(lines: pa.Array, words: WordEnds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes of all lines, each after a blank, the places that cut them into words, and the starts of the lines.

    A word includes the characters before it, and the last word also those after it. Lines without words are left out.
    """
    counts = np.diff(words.edges)
    full = np.flatnonzero(counts)
    if len(full) < len(counts):
        lines = lines.take(arrow_array(full, pa.int64()))
    data, row_edges = _after_blanks(lines)
    characters = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
    first = np.searchsorted(characters, row_edges)
    row = np.repeat(np.arange(len(full)), counts[full])
    # Character p of a line is character p + 1 of the padded line.
    place = first[row] + 1 + words.ends
    cuts = characters[np.minimum(place, first[row + 1])]
    cuts[words.edges[full + 1] - 1] = row_edges[1:]
    return data, np.concatenate([[0], cuts]), row_edges


def _after_blanks(lines: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of all lines, each after a blank, and the edges of the lines in them."""
    data, edges = string_bytes(lines)
    return np.insert(data, edges[:-1], _BLANK), edges + np.arange(len(edges))


class Subwords:
    """A trained sentencepiece model. Raises UserError if the file is missing or broken."""

    def __init__(self, path: AnyPath):
        model, self._decoder = read_pieces(path)
        # `encode_*` writes the blank before a line's first word; the others are in the text.
        model.normalizer_spec.add_dummy_prefix = False
        self._encoder = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self._known: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return self._decoder.vocab_size()

    def encode_lines(self, lines: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of whole lines, for the side without a parser: (pieces of all lines, pieces per line)."""
        data, row_edges = _after_blanks(lines)
        # A piece contains a blank only at its beginning, so a line's pieces are those of its parts.
        cuts = np.append(np.flatnonzero(data == _BLANK), len(data))
        pieces, counts = self._encode(strings_of(data, cuts))
        edges = edges_of(counts)
        return pieces, np.diff(edges[np.searchsorted(cuts, row_edges)])

    def encode_words(self, lines: pa.Array, words: WordEnds, counts: Counter | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of every word of every line: (pieces of all words, pieces per word).

        A word includes the blanks before it. `counts` stays as it is: no piece crosses a border.
        """
        data, cuts, _ = _word_cuts(lines, words)
        if np.any(np.diff(cuts) <= 0):
            raise ValueError("words that lie outside of their line, or not one after the other")
        return self._encode(strings_of(data, cuts))

    def decode(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of sequences of piece ids."""
        return self._decoder.decode([list(map(int, row)) for row in pieces])

    def names(self, pieces: Sequence[int]) -> list[str]:
        """Return the pieces as in the vocabulary."""
        return [self._decoder.id_to_piece(int(piece)) for piece in pieces]

    def _encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces of all texts, pieces per text). Every different text is encoded once."""
        coded = texts.dictionary_encode()
        different = coded.dictionary.to_pylist()
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        missing = [text for text in different if text not in self._known]
        self._known.update(zip(missing, self._encoder.encode(missing, num_threads=1), strict=True))
        flat, counts = flatten([self._known[text] for text in different])
        return take(flat, edges_of(counts), numbers_of(coded.indices))


Pieces = Subwords | TokenizerPieces


def load_pieces(vocab: AnyPath) -> Pieces:
    """Load the pieces of leaves from the folder `vocab` of a data set. Raises UserError if the file is missing or broken."""
    tokenizer = vocab / TOKENIZER_FILE.rpartition("/")[2]
    return TokenizerPieces(tokenizer) if tokenizer.exists() else Subwords(vocab / "pieces.model")


class LabelVocab:
    """Maps names to ids by line of a text file. Unknown names get `UNKNOWN_LABEL_ID`."""

    def __init__(self, names: Iterable[str]):
        self.names = [UNKNOWN_LABEL, *sorted(set(names) - {UNKNOWN_LABEL})]
        self._ids = {name: i for i, name in enumerate(self.names)}

    @classmethod
    def load(cls, path: AnyPath) -> "LabelVocab":
        return cls(read_names(path))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> int:
        return self._ids.get(name, UNKNOWN_LABEL_ID)

    def file_bytes(self) -> bytes:
        return names_bytes(self.names)
