"""The files of a vocabulary: pieces, and one name a line of labels, tags and relations. One function reads each kind."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from treeproc.common.errors import UserError
from treeproc.common.extras import require
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import FIRST_PIECE, UNK_ID, line_end_in

_AGAIN = "run workflows/preprocess.py again"


def names_bytes(names: Sequence[str]) -> bytes:
    """Encode a file of labels, tags or relations, for `read_names`. Raises UserError for a name with a line end."""
    if wrong := line_end_in(names):
        raise UserError(f"the trees have the label, tag or relation {wrong}; remove it from the input, or choose another parser")
    return "".join(f"{name}\n" for name in names).encode()


def read_names(path: AnyPath) -> list[str]:
    """Read labels, tags or relations by id, as `names_bytes` wrote them. Raises UserError for a missing or damaged file."""
    try:
        names = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {_AGAIN}") from None
    if not names[-1]:
        names.pop()
    if wrong := line_end_in(names):
        raise UserError(f"{path} is damaged: it has the name {wrong}; {_AGAIN}")
    return names


def read_pieces(path: AnyPath) -> tuple[Any, SentencePieceProcessor]:
    """Return the trained model of a file, as a message and loaded. Raises UserError if the file is missing, empty or broken."""
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf makes it when it is imported
    try:
        model.ParseFromString(path.read_bytes())
        # The message ends with the normaliser. sentencepiece takes an empty or shorter message for a model.
        if model.HasField("normalizer_spec"):
            return model, SentencePieceProcessor(model_proto=model.SerializeToString())
    except (OSError, DecodeError, RuntimeError):
        pass
    raise UserError(f"{path} is not a sentencepiece model; {_AGAIN}")


def read_tokenizer(path: AnyPath) -> Any:
    """Return the fast tokenizer of a file tokenizer.json, which cuts texts of any length, and reads `[SEP]` as text.

    Raises UserError if the file is missing or broken, or if the package `tokenizers` is not installed.
    """
    require("tokenizers", f"{path.name} of a pretrained encoder")
    # A process of a job has one core, and threads would not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except Exception as error:  # the package raises no other class
        raise UserError(f"{path} is not a fast tokenizer: {str(error)[:200]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenizer_names(tokenizer: Any) -> list[str]:
    """Return the pieces of a fast tokenizer by their ids in a data set, behind the special ones of every vocabulary."""
    names = {number: name for name, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    return ["<pad>", "<unk>", "<s>", "</s>", *(names.get(number, "") for number in range(1 + max(names, default=-1)))]


def decode_tokens(tokenizer: Any, unknown: int | None, pieces: Iterable[Sequence[int]]) -> list[str]:
    """Return the text that a fast tokenizer makes of sequences of piece ids of a data set. It need not be the original one.

    `unknown` is the tokenizer's own number of its unknown piece.
    """
    rows = ([unknown if piece == UNK_ID else int(piece) - FIRST_PIECE for piece in row] for row in pieces)
    own = [[piece for piece in row if piece is not None and piece >= 0] for row in rows]
    return tokenizer.decode_batch(own, skip_special_tokens=False)
