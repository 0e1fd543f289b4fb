"""The entries of the vocabularies of a data set by their names, to match the rows of two models."""

from collections.abc import Mapping
from dataclasses import dataclass

from treenet.runs.loading import load_processor
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.store import TOKENIZER_FILE, read_index
from treeproc.shards.vocabulary_files import read_names, read_tokenizer, tokenizer_names

# What a size of `Task.sizes` counts.
KINDS = {
    "num_pieces": "pieces",
    "num_labels": "labels",
    "num_pos_tags": "part-of-speech tags",
    "num_deprels": "dependency relations",
}
_FILES = {"num_labels": "labels.txt", "num_pos_tags": "pos_tags.txt", "num_deprels": "deprels.txt"}


@dataclass(frozen=True)
class Vocabularies:
    """The vocabularies of a data set. `fingerprint` and `sizes` are those that its model recorded; files are read when asked."""

    data: AnyPath
    fingerprint: str
    sizes: Mapping

    def names(self, kind: str) -> list[str]:
        """Return the entries of one vocabulary in the order of its ids.

        Raises UserError if the data set is not there, or if it has another vocabulary now.
        """
        again = "run its workflows/preprocess.py again"
        if not self.data.is_dir():
            raise UserError(
                f"init: {self.data} is missing, but its vocabulary is needed to match rows; if it moved, run the training "
                "command of that run with data=NEW, which records the new place"
            )
        if (found := read_index(self.data / "encoded")["vocab_fingerprint"]) != self.fingerprint:
            raise UserError(
                f"init: the vocabulary of {self.data} must be {self.fingerprint}, as in the training, but is {found}; {again}"
            )
        if kind == "num_pieces":
            tokenizer = self.data / "encoded" / TOKENIZER_FILE
            if tokenizer.exists():
                names = tokenizer_names(read_tokenizer(tokenizer))
            else:
                processor = load_processor(self.data)
                names = [processor.id_to_piece(number) for number in range(processor.vocab_size())]
        else:
            names = read_names(self.data / "encoded" / "vocab" / _FILES[kind])
        if len(names) != self.sizes[kind]:
            raise UserError(f"init: {self.data} has {len(names)} {KINDS[kind]}, but its model has {self.sizes[kind]}; {again}")
        return names
