"""The vocabulary of another data set: byte for byte, or with the new pieces, labels and tags of a training split."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from treeproc.common.files import atomic_write, read_text, remove_leftovers
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.store import (
    OPTIONAL_VOCABULARY_FILES,
    PIECES_FILES,
    TOKENIZER_FILE,
    VOCABULARY_FILES,
    ShardRecord,
    fingerprint_of,
    read_index,
)
from treeproc.shards.vocabulary_files import read_names, read_pieces
from treeproc.stages.new_pieces import add_pieces
from treeproc.stages.run_jobs import Run, run_here
from treeproc.stages.tree_config import TreeConfig
from treeproc.stages.vocabulary import count_vocabulary, fingerprint_of_inputs, node_labels, vocabulary_note
from treeproc.subwords import LabelVocab, SubwordConfig

logger = logging.getLogger(__name__)

_NAMES = {"labels": "vocab/labels.txt", "tags": "vocab/pos_tags.txt", "deprels": "vocab/deprels.txt"}


def copy_vocabulary(data: Path, other: AnyPath) -> str:
    """Copy the vocabulary of the data set `other`, byte for byte, to `encoded/vocab` of `data`; returns its fingerprint.

    Raises UserError when a file of it is missing or damaged, and when `data` was encoded with another one.
    """
    folder, index = data / "encoded", read_index(other / "encoded")
    if (folder / "index.json").exists() and read_index(folder)["vocab_fingerprint"] != index["vocab_fingerprint"]:
        raise UserError(f"{data} has another vocabulary than {other}; choose another --out")
    contents, inputs_fingerprint = _read_vocabulary(other)
    if not _is_done(folder, inputs_fingerprint):
        _write(folder, contents, inputs_fingerprint)
    return inputs_fingerprint


def grow_vocabulary(
    data: Path,
    other: AnyPath,
    new_pieces: int,
    text: Sequence[ShardRecord],
    parsed: Sequence[ShardRecord],
    config: SubwordConfig,
    tree: TreeConfig,
    base: Path | None = None,
    run: Run = run_here,
    line_tags: Sequence[str] = (),
) -> str:
    """Extend the vocabulary of the data set `other` by what the training split adds; returns its fingerprint.

    It gains at most `new_pieces` pieces, after the others. Labels, tags and relations of both are sorted together. The other
    arguments are as in `write_vocabulary`. Raises UserError when a file of `other` is missing or damaged.
    """
    folder = data / "encoded"
    contents, theirs = _read_vocabulary(other)
    inputs_fingerprint = fingerprint_of(theirs, new_pieces, fingerprint_of_inputs(text, parsed, config, tree))
    if line_tags:
        inputs_fingerprint = fingerprint_of(inputs_fingerprint, line_tags)
    if _is_done(folder, inputs_fingerprint):
        return inputs_fingerprint
    read_pieces(other / "encoded" / "vocab" / "pieces.model")  # it may not be a model, even with the right hash
    counts = count_vocabulary(base or data, text, parsed, config, tree, run)
    model, added = add_pieces(contents["vocab/pieces.model"], counts.words["source"], new_pieces, config, line_tags)
    if added < new_pieces:
        logger.info("the training split has %s new pieces that occur twice, fewer than new_pieces = %s", added, new_pieces)
    found = {"labels": node_labels(counts, tree), "tags": counts.tags, "deprels": counts.deprels}
    for kind, name in _NAMES.items():
        before = read_names(other / "encoded" / name) if name in contents else []
        if names := {*before, *found[kind]}:
            contents[name] = LabelVocab(names).file_bytes()
    _write(folder, contents | {"vocab/pieces.model": model}, inputs_fingerprint)
    return inputs_fingerprint


def _is_done(folder: Path, inputs_fingerprint: str) -> bool:
    """Return whether a vocabulary from these inputs is there, and undamaged."""
    done = folder / "vocab" / "fingerprint.txt"
    return done.exists() and done.read_bytes() == vocabulary_note(folder / "vocab", inputs_fingerprint)


def _read_vocabulary(other: AnyPath) -> tuple[dict[str, bytes], str]:
    """Read the files of a vocabulary by name, and the fingerprint of its inputs. Raises UserError for a file that is damaged."""
    source = other / "encoded"
    index, contents = read_index(source), {}
    for name in (*VOCABULARY_FILES, *OPTIONAL_VOCABULARY_FILES, TOKENIZER_FILE):
        if sha256 := index["files"].get(name):
            try:
                contents[name] = (source / name).read_bytes()
            except OSError:
                contents[name] = b""
            if hashlib.sha256(contents[name]).hexdigest() != sha256:
                raise UserError(f"vocab_from: {source / name} is missing or damaged; run its workflows/preprocess.py again")
    note = source / "vocab" / "fingerprint.txt"
    inputs_fingerprint = read_text(note, "run its workflows/preprocess.py again").partition("\n")[0] if note.exists() else ""
    pieces = [index["files"][name] for name in contents if name in PIECES_FILES]
    if fingerprint_of(inputs_fingerprint, *pieces) != index["vocab_fingerprint"]:
        raise UserError(f"vocab_from: {note} is missing or damaged; run its workflows/preprocess.py again")
    return contents, inputs_fingerprint


def _write(folder: Path, contents: Mapping[str, bytes], inputs_fingerprint: str) -> None:
    """Write the files of a vocabulary, and last the note that says that they are complete."""
    (folder / "vocab").mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder / "vocab")
    for name in (*OPTIONAL_VOCABULARY_FILES, TOKENIZER_FILE):
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        atomic_write(folder / name, content)
    atomic_write(folder / "vocab" / "fingerprint.txt", vocabulary_note(folder / "vocab", inputs_fingerprint))
