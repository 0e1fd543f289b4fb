"""The folder of an exported model: its files, and export.json with what they are and where they come from."""

from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.runs.checkpoint import publish_folder
from treenet.runs.loading import LoadedRun
from treeproc.common.files import read_json
from treeproc.common.provenance import software
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from treeproc.shards.store import read_index, vocabulary_files

EXPORT = "export.json"


class _Exported(TypedDict):
    """The fields of export.json that are read."""

    files: dict[str, dict]


# The fields of an index that name shards, which an export leaves behind.
_OF_SHARDS = ("shards", "parts", "totals", "files", "dropped", "stages")


def write_export(out: Path, run: LoadedRun, form: str, fill: Callable[[Path], Sequence[str]], **facts: object) -> None:
    """Write the folder `out`: what `fill` writes into a temporary folder, and export.json. It returns the names of its files.

    An earlier export in `out` is replaced. Raises UserError if `out` holds anything else, or if the disk refuses.
    """
    _check_replaceable(out)
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
    publish_folder(out, fill, meta, EXPORT)


def _check_replaceable(out: Path) -> None:
    """Raise UserError if `out` is neither free nor an earlier export, or if it has files that this export did not write."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / EXPORT).is_file():
        raise UserError(f"{out} must be a new folder or an earlier export, but is something else; choose another --out")
    own = {EXPORT, *read_json(out / EXPORT, "choose another --out", _Exported)["files"]}
    names = (path.relative_to(out).as_posix() for path in sorted(out.rglob("*")) if not path.is_dir())
    if added := next((name for name in names if name not in own and not name.rpartition("/")[2].startswith(".")), None):
        raise UserError(f"{out} is an earlier export, but has {added} too, which would be lost; move it, or choose another --out")


def read_vocabulary(run: LoadedRun) -> dict[str, bytes]:
    """Return the files of the vocabulary of a run by their names below DATA/encoded: pieces, labels, tags."""
    folder = run.data / "encoded"
    return {name: (folder / name).read_bytes() for name in vocabulary_files(folder)}


def index_without_shards(run: LoadedRun) -> dict:
    """Return the index of a data set as that of one without rows, which has only a vocabulary and the settings of its making."""
    index = read_index(run.data / "encoded")
    return {**{name: value for name, value in index.items() if name not in _OF_SHARDS}, "totals": {}, "shards": []}
