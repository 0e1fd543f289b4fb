"""Pieces, labels and tags of the training split."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from treeproc.files import atomic_write, file_sha256
from treeproc.schema import SPLIT_WORD_PREFIX
from treeproc.shards import Shard, ShardRecord, fingerprint
from treeproc.subwords import LabelVocab, SubwordConfig, mark_boundaries, train_pieces
from treeproc.trees import UNANALYSED

# Below DATA/encoded.
VOCABULARY_FILES = ("vocab/pieces.model", "vocab/labels.txt", "vocab/pos_tags.txt")


def _training_lines(data: Path, text: Sequence[ShardRecord], parsed: Sequence[ShardRecord]) -> Iterator[str]:
    for text_record, parsed_record in zip(text, parsed, strict=True):
        for example, row in zip(
            Shard(data / "text", text_record).rows(), Shard(data / "parsed", parsed_record).rows(), strict=True
        ):
            yield mark_boundaries(example["source"], row["words"]["start_char"], row["words"]["end_char"])
            yield example["target"]


def write_vocabulary(data: Path, text: Sequence[ShardRecord], parsed: Sequence[ShardRecord], config: SubwordConfig) -> str:
    """Pieces, labels and tags of the training split, under `encoded/vocab`; returns the fingerprint.

    A vocabulary that is there already and came from the same shards and settings is kept.
    """
    folder = data / "encoded" / "vocab"
    mark = fingerprint([record.sha256 for record in parsed], [record.sha256 for record in text], config.model_dump())
    done = folder / "fingerprint.txt"
    if done.exists() and done.read_bytes() == _vocabulary_note(folder, mark):
        return mark
    folder.mkdir(parents=True, exist_ok=True)
    names = {name for record in parsed for name in record.counts}
    # Fallback and control trees may come later, so their label and tag are always there.
    tags = [UNANALYSED, *(name.removeprefix("tag.") for name in names if name.startswith("tag."))]
    labels = [UNANALYSED, *(name.removeprefix("label.") for name in names if name.startswith("label."))]
    atomic_write(folder / "pieces.model", train_pieces(_training_lines(data, text, parsed), config))
    atomic_write(folder / "pos_tags.txt", LabelVocab(tags).file_bytes())
    atomic_write(folder / "labels.txt", LabelVocab(labels + [SPLIT_WORD_PREFIX + tag for tag in tags]).file_bytes())
    atomic_write(done, _vocabulary_note(folder, mark))
    return mark


def _vocabulary_note(folder: Path, mark: str) -> bytes:
    """What fingerprint.txt holds: the mark, and the hash of every file, so that a damaged one is made again."""
    paths = [folder.parent / name for name in VOCABULARY_FILES]
    hashes = [f"{file_sha256(path) if path.exists() else 'missing'}  {path.name}" for path in paths]
    return "\n".join([mark, *hashes, ""]).encode()
