"""Exported models: folders with all that they need, and export.json with what they are and where they come from.

An exported run needs neither its data set nor its checkpoints: it has weights in safetensors, settings, vocabulary and a model
card. It is a run folder that every machine may read, so it names no place of the machine that made it.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treenet.config import TrainConfig
from treenet.runs.checkpoint import AVERAGED, FROZEN, META, WEIGHTS, publish, publish_folder, read_meta
from treenet.runs.checkpoint_io import copy_weights
from treenet.runs.loading import CARD, EXPORT_FACTS, HELD_DATA, Exported, LoadedModel
from treenet.runs.model_card import PARSER_FOLDER, model_card
from treenet.runs.run_json import FACTS as RUN_FACTS
from treenet.runs.run_json import read_facts
from treeproc.common.files import file_sha256, json_bytes, read_json
from treeproc.common.folder_kinds import CONFIG, EXPORT, claim_folder
from treeproc.common.provenance import software
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import inside
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from treeproc.shards.store import read_index, vocabulary_files

# The fields of an index that name shards, which an export leaves behind.
_OF_SHARDS = ("shards", "parts", "totals", "files", "dropped", "stages", "train_files")
# The keys of settings and facts whose values are places on a machine, also behind a dot.
_PLACES = ("data", "init", "folder", "file", "package", "_name_or_path")


def write_export(
    out: Path, run: LoadedModel, form: str, fill: Callable[[Path], Sequence[str]], option: str = "--out", **facts: object
) -> None:
    """Write the folder `out`: what `fill` writes into a temporary folder, and export.json. It returns the names of its files.

    An earlier export in `out` is replaced. Raises UserError if `out`, which `option` names, holds anything else, or if the disk
    refuses.
    """
    out = out.resolve()
    claim_folder(out, EXPORT, option=option)
    _own_files(out, option)
    index = read_index(run.data / "encoded")
    meta = {
        "format": form,
        "task": run.config.task,
        "model": without_places(run.config.model.model_dump(mode="json")),
        "checkpoint": run.checkpoint,
        "weights_sha256": run.weights_sha256,
        "vocab_fingerprint": index["vocab_fingerprint"],
        "special_pieces": {"pad": PAD_ID, "unk": UNK_ID, "bos": BOS_ID, "eos": EOS_ID},
        "decoding": run.config.decoding.model_dump(mode="json", exclude={"max_tokens"}),
        "parser": index.get("parser"),
        "software": software(),
        **facts,
    }
    publish_folder(out, fill, meta, EXPORT_FACTS, lambda folder: _remove(folder, option))


def _own_files(out: Path, option: str) -> list[Path]:
    """Return the files of an earlier export in `out`, its facts last; none if `out` is free.

    Raises UserError if `out` is anything else, or if it has a file or an empty folder that the export did not record. So too for
    a model card that was edited.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return []
    if not (out / EXPORT_FACTS).is_file():
        raise UserError(f"{out} must be a new folder or an earlier export, but is something else; choose another {option}")
    recorded = read_json(out / EXPORT_FACTS, f"choose another {option}", Exported)["files"]
    own = [*(Path(str(inside(out, name))) for name in recorded), out / EXPORT_FACTS]
    kept = {folder for path in own for folder in path.parents}
    if added := next((path for path in sorted(out.rglob("*")) if path not in own and path not in kept), None):
        name = added.relative_to(out)
        raise UserError(
            f"{out} is an earlier export, but has {name} too, which would be lost; move it, or choose another {option}"
        )
    if (out / CARD).is_file() and file_sha256(out / CARD) != recorded[CARD]["sha256"]:
        raise UserError(f"{out / CARD} was edited and would be lost; move it, or choose another {option}")
    return own


def _remove(out: Path, option: str) -> None:
    """Remove an earlier export, file by file, so that nothing else can be lost."""
    own = [path for path in _own_files(out, option) if os.path.lexists(path)]
    for path in own:
        path.unlink()
    for folder in sorted({folder for path in own for folder in path.parents if folder.is_relative_to(out)}, reverse=True):
        folder.rmdir()


def read_vocabulary(run: LoadedModel) -> dict[str, bytes]:
    """Return the files of the vocabulary of a run by their names below DATA/encoded: pieces, labels, tags."""
    folder = run.data / "encoded"
    return {name: (folder / name).read_bytes() for name in vocabulary_files(folder)}


def export_run(run: LoadedModel, out: Path, option: str = "--out") -> None:
    """Write a run folder that `load_run` and all commands read: `out`, with the vocabulary in `out`/data, and a model card.

    The weights are those that `run` was loaded from, byte for byte, and in the same file the frozen ones. Raises UserError as
    `write_export` does, and for a model without trained weights.
    """
    if run.weights is None:
        raise UserError(f"{run.run} was loaded without trained weights, so there is nothing to write; load a checkpoint")
    weights, held = run.weights, f"{HELD_DATA}/encoded"
    meta = {name: value for name, value in read_meta(weights).items() if name not in ("files", "sha256", FROZEN)}
    config = TrainConfig.model_validate(without_places(run.config.model_dump(mode="json")))
    held_card = run.run / CARD  # of an exported run, perhaps edited

    def fill(folder: Path) -> list[str]:
        (folder / held / "vocab").mkdir(parents=True)
        (folder / CONFIG).write_text(dump_settings(config.model_copy(update={"data": Path(HELD_DATA)})), "utf-8")
        (folder / RUN_FACTS).write_bytes(json_bytes(without_places(read_facts(run.run))))
        publish(folder / AVERAGED, {WEIGHTS: lambda path: copy_weights(weights, path)}, without_places(meta))
        (folder / held / "index.json").write_bytes(json_bytes(_held_index(run)))
        vocabulary = {f"{held}/{name}": content for name, content in read_vocabulary(run).items()}
        for name, content in vocabulary.items():
            (folder / name).write_bytes(content)
        (folder / CARD).write_bytes(held_card.read_bytes() if held_card.is_file() else model_card(run, out.resolve().name))
        names = [CARD, CONFIG, RUN_FACTS, f"{AVERAGED}/{WEIGHTS}", f"{AVERAGED}/{META}", f"{held}/index.json"]
        return [*names, *vocabulary]

    write_export(out, run, "safetensors", fill, option)


def without_places(value: Any) -> Any:
    """Return settings or facts with the last part alone of every path in them."""
    if isinstance(value, dict):
        return {
            name: Path(one).name if isinstance(one, str) and name.split(".")[-1] in _PLACES else without_places(one)
            for name, one in value.items()
        }
    return [without_places(one) for one in value] if isinstance(value, list | tuple) else value


def _held_index(run: LoadedModel) -> dict:
    """Return the index of a data set as that of one without rows: its vocabulary, and the settings of its making.

    Its parser looks for trained models in the data set itself, and for a server where CORENLP_ENDPOINT says.
    """
    index = without_places({name: value for name, value in read_index(run.data / "encoded").items() if name not in _OF_SHARDS})
    settings = index.get("parser_settings", {})
    if settings.get("models"):
        settings["models"] = PARSER_FOLDER
    settings.pop("endpoint", None)
    return {**index, "totals": {}, "shards": []}
