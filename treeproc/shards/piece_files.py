"""Files of pieces: sentencepiece models, and fast tokenizers of pretrained encoders. Both may come from others."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from treeproc.common.errors import UserError, one_line, require
from treeproc.common.files import cannot_read
from treeproc.common.storage import AnyPath
from treeproc.common.trial import try_first
from treeproc.shards.schema import FIRST_PIECE, UNK_ID
from treeproc.shards.tokenizer_forms import check_pieces

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_AGAIN = "run tree-attention preprocess again"
# Memory for trying a tokenizer: 250,000 pieces in 17 to 19 MB take 300 to 450 MiB.
_TRIAL_BYTES, _TRIAL_FACTOR = 1 << 30, 64


def read_pieces(path: AnyPath) -> tuple[Any, "SentencePieceProcessor"]:
    """Return the trained model of a file, as a message and loaded. Raises UserError if the file is missing, empty or broken."""
    from google.protobuf.message import DecodeError
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
        # The message ends with the normaliser. sentencepiece takes an empty or shorter message for a model.
        if model.HasField("normalizer_spec"):
            check_pieces(model)
            return model, SentencePieceProcessor(model_proto=model.SerializeToString())
    except (OSError, DecodeError, RuntimeError, ValueError):
        pass
    raise UserError(f"{path} is not a sentencepiece model; {_AGAIN}")


def read_tokenizer(path: AnyPath) -> Any:
    """Return the fast tokenizer of a file tokenizer.json, which cuts texts of any length.

    Raises UserError if the file is missing or broken, if no known family has such a tokenizer, or if the package `tokenizers` is
    not installed.
    """
    require("tokenizers", f"{path.name} of a pretrained encoder")
    # A process of a job has one core, and threads would not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    try:
        content = path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from None
    memory = _TRIAL_BYTES + _TRIAL_FACTOR * len(content)
    failed = f"{path} is not a fast tokenizer of a known family"
    try_first("treeproc.shards.tokenizer_forms:try_tokenizer", content, memory, failed, version("tokenizers"))
    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@contextmanager
def blamed_on_tokenizer() -> Iterator[None]:
    """Turn errors of the package `tokenizers` into UserError, also a panic, after which it has printed where it happened."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer.json cannot cut a text, or join its pieces: {one_line(str(error), 200)}") from None


def tokenizer_names(tokenizer: Any) -> list[str]:
    """Return the pieces of a fast tokenizer by their ids in a data set, behind the special ones of every vocabulary."""
    names = {number: name for name, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    return ["<pad>", "<unk>", "<s>", "</s>", *(names.get(number, "") for number in range(1 + max(names, default=-1)))]


@blamed_on_tokenizer()
def decode_tokens(tokenizer: Any, unknown: int | None, pieces: Iterable[Sequence[int]]) -> list[str]:
    """Return the text that a fast tokenizer makes of sequences of piece ids of a data set. It need not be the original one.

    `unknown` is the tokenizer's own number of its unknown piece.
    """
    rows = ([unknown if piece == UNK_ID else int(piece) - FIRST_PIECE for piece in row] for row in pieces)
    own = [[piece for piece in row if piece is not None and piece >= 0] for row in rows]
    return tokenizer.decode_batch(own, skip_special_tokens=False)
