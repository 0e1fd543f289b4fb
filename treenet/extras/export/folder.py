"""The folder of an exported model: its files, and export.json with what they are and where they come from."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.runs.checkpoint import publish_folder
from treenet.runs.loading import LoadedRun
from treeproc.common.files import read_json
from treeproc.common.folder_kinds import EXPORT, claim_folder
from treeproc.common.provenance import software
from treeproc.common.settings import UserError
from treeproc.common.storage import inside
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from treeproc.shards.store import read_index, vocabulary_files

FACTS = "export.json"


class _Exported(TypedDict):
    """The fields of export.json that are read."""

    files: dict[str, dict]


# The fields of an index that name shards, which an export leaves behind.
_OF_SHARDS = ("shards", "parts", "totals", "files", "dropped", "stages")


def write_export(out: Path, run: LoadedRun, form: str, fill: Callable[[Path], Sequence[str]], **facts: object) -> None:
    """Write the folder `out`: what `fill` writes into a temporary folder, and export.json. It returns the names of its files.

    An earlier export in `out` is replaced. Raises UserError if `out` holds anything else, or if the disk refuses.
    """
    out = out.resolve()
    claim_folder(out, EXPORT)
    _own_files(out)
    index = read_index(run.data / "encoded")
    meta = {
        "format": form,
        "model": run.config.model.model_dump(mode="json"),
        "checkpoint": run.checkpoint,
        "weights_sha256": run.weights_sha256,
        "vocab_fingerprint": index["vocab_fingerprint"],
        "special_pieces": {"pad": PAD_ID, "unk": UNK_ID, "bos": BOS_ID, "eos": EOS_ID},
        "decoding": run.config.decoding.model_dump(mode="json", exclude={"max_tokens"}),
        "software": software(),
        **facts,
    }
    publish_folder(out, fill, meta, FACTS, _remove)


def _own_files(out: Path) -> list[Path]:
    """Return the files of an earlier export in `out`, its facts last; none if `out` is free.

    Raises UserError if `out` is anything else, or if it has a file or an empty folder that the export did not record.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return []
    if not (out / FACTS).is_file():
        raise UserError(f"{out} must be a new folder or an earlier export, but is something else; choose another --out")
    recorded = read_json(out / FACTS, "choose another --out", _Exported)["files"]
    own = [*(Path(str(inside(out, name))) for name in recorded), out / FACTS]
    kept = {folder for path in own for folder in path.parents}
    if added := next((path for path in sorted(out.rglob("*")) if path not in own and path not in kept), None):
        name = added.relative_to(out)
        raise UserError(f"{out} is an earlier export, but has {name} too, which would be lost; move it, or choose another --out")
    return own


def _remove(out: Path) -> None:
    """Remove an earlier export, file by file, so that nothing else can be lost."""
    own = [path for path in _own_files(out) if os.path.lexists(path)]
    for path in own:
        path.unlink()
    for folder in sorted({folder for path in own for folder in path.parents if folder.is_relative_to(out)}, reverse=True):
        folder.rmdir()


def read_vocabulary(run: LoadedRun) -> dict[str, bytes]:
    """Return the files of the vocabulary of a run by their names below DATA/encoded: pieces, labels, tags."""
    folder = run.data / "encoded"
    return {name: (folder / name).read_bytes() for name in vocabulary_files(folder)}


def index_without_shards(run: LoadedRun) -> dict:
    """Return the index of a data set as that of one without rows, which has only a vocabulary and the settings of its making."""
    index = read_index(run.data / "encoded")
    return {**{name: value for name, value in index.items() if name not in _OF_SHARDS}, "totals": {}, "shards": []}
