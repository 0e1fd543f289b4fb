"""Sentencepiece within the parser's words, and the vocabularies of labels and tags.

Every piece lies inside one word of the parser, and `▁` stands exactly where the text has a blank:
the pieces of a line decode to the line itself, and a piece can be a leaf of the tree. The plain
models read the same pieces.
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece
from google.protobuf.message import DecodeError
from pydantic import Field, PositiveInt
from sentencepiece import sentencepiece_model_pb2

from treeproc.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID, UNKNOWN_LABEL, UNKNOWN_LABEL_ID
from treeproc.settings import Settings, UserError

# Marks word boundaries that have no blank in training text; never part of a vocabulary.
_BOUNDARY = "\x01"


class SubwordConfig(Settings):
    """One byte-pair vocabulary for both sides."""

    vocab_size: PositiveInt = Field(32_000, description="pieces of the joint vocabulary, special and byte pieces included")
    max_training_lines: PositiveInt = Field(
        10_000_000, description="lines, over both sides, that the vocabulary is learned from at the most"
    )


def mark_boundaries(line: str, starts: Sequence[int], ends: Sequence[int]) -> str:
    """The line with a mark wherever two words touch, so that no piece is learned across."""
    parts, previous = [], 0
    for start, end in zip(starts, ends, strict=True):
        parts.append(line[previous:start] if start > previous else _BOUNDARY if previous else "")
        parts.append(line[start:end])
        previous = end
    return "".join(parts) + line[previous:]


def train_pieces(lines: Iterable[str], config: SubwordConfig) -> bytes:
    """Learn a BPE model. The same lines give the same bytes.

    Raises UserError when the text is too small for the vocabulary size.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=config.vocab_size,
            character_coverage=1.0,
            # What is written must be what was read: no Unicode folding, no blanks lost, no unknown character.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            pretokenization_delimiter=_BOUNDARY,
            input_sentence_size=config.max_training_lines,
            shuffle_input_sentence=False,
            max_sentence_length=65536,
            num_threads=1,
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", maxsplit=1)[-1].strip()
        raise UserError(f"subwords.vocab_size = {config.vocab_size} does not suit the training text: {reason}") from None
    return model.getvalue()


class Subwords:
    """A trained sentencepiece model. Raises UserError when the file is missing or broken."""

    def __init__(self, path: Path):
        model = sentencepiece_model_pb2.ModelProto()
        try:
            model.ParseFromString(path.read_bytes())
            self._decoder = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        except (OSError, DecodeError, RuntimeError):
            raise UserError(f"{path} is not a sentencepiece model; run workflows/preprocess.py again to restore it") from None
        # The blank before a line's first word is written by `encode_*`, the others stand in the text.
        model.normalizer_spec.add_dummy_prefix = False
        self._encoder = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def __len__(self) -> int:
        return self._decoder.vocab_size()

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Pieces of whole lines, for the side that has no parser."""
        return self._encoder.encode([" " + line for line in lines])

    def encode_words(self, lines: Sequence[str], words: Sequence[dict]) -> list[list[list[int]]]:
        """Pieces of every word of every line; a word takes the blanks before it along.

        `words` holds `start_char` and `end_char` of each line's words, which cover all but blanks.
        """
        texts, counts = [], []
        for line, spans in zip(lines, words, strict=True):
            counts.append(len(spans["start_char"]))
            edges = [0, *spans["end_char"][:-1], len(line)]
            padded = " " + line
            # Line position p is position p + 1 of the padded line; the first word starts at its blank.
            texts += [padded[edges[i] + (i > 0) : edges[i + 1] + 1] for i in range(counts[-1])]
        pieces = iter(self._encoder.encode(texts))
        return [[next(pieces) for _ in range(count)] for count in counts]

    def decode(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Text of sequences of piece ids."""
        return self._decoder.decode([list(map(int, row)) for row in pieces])

    def names(self, pieces: Sequence[int]) -> list[str]:
        """The pieces as they stand in the vocabulary."""
        return [self._decoder.id_to_piece(int(piece)) for piece in pieces]


class LabelVocab:
    """Names to ids by line of a text file; unknown names get `UNKNOWN_LABEL_ID`."""

    def __init__(self, names: Iterable[str]):
        self.names = [UNKNOWN_LABEL, *sorted(set(names) - {UNKNOWN_LABEL})]
        self._ids = {name: i for i, name in enumerate(self.names)}

    @classmethod
    def load(cls, path: Path) -> "LabelVocab":
        return cls(path.read_text(encoding="utf-8").splitlines())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> int:
        return self._ids.get(name, UNKNOWN_LABEL_ID)

    def file_bytes(self) -> bytes:
        return ("\n".join(self.names) + "\n").encode()
