"""The folder of a pretrained encoder, or its name on the hub: its settings, its files of weights, its tokenizer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treenet.config import ModelConfig
from treeproc.common.errors import UserError, require
from treeproc.common.files import file_sha256, read_json
from treeproc.common.hub import PIECES, HubModel, local_folder
from treeproc.common.storage import AnyPath
from treeproc.shards.store import TOKENIZER_FILE

FACTS = "pretrained"  # of run.json and meta.json
OF_THE_FILE = ("_name_or_path", "transformers_version")  # of config.json: where it was and what wrote it
_SETTING = "model.pretrained.folder"
CHOOSE = "choose BERT, RoBERTa, DeBERTa, XLM-R, ModernBERT or a similar one"


def pretrained_facts(config: ModelConfig, data: AnyPath, index: Mapping, setting: str = _SETTING) -> dict[str, dict]:
    """Return what a model needs to be built beside its settings; nothing without a pretrained encoder. Messages name `setting`.

    Raises UserError if the folder holds no encoder of safetensors, or if the data set has the pieces of another tokenizer.
    """
    place = config.pretrained.folder
    if place is None:
        return {}
    if "tokenizer" not in index:
        raise UserError(
            f"{data} has its own pieces, and model.pretrained reads those of {place}; preprocess again with "
            f"subwords.tokenizer={place}"
        )
    described = _read_config(encoder_folder(place, setting, weights=False), setting)  # before the weights are fetched
    folder = encoder_folder(place, setting)
    weight_files(folder, setting)
    _check_tokenizer(folder, place, data, described, index["tokenizer"]["pieces"])
    return {FACTS: {"config": described, "tokenizer": index["tokenizer"]}}


def encoder_folder(
    place: AnyPath | HubModel, setting: str = _SETTING, files: Sequence[str] = PIECES, *, weights: bool = True
) -> Path:
    """Return the folder of an encoder. Of a model of the hub, it has these files, and its weights, fetched if they are missing.

    Raises UserError for a folder in an object store, and for a model without weights in safetensors.
    """
    folder = local_folder(setting, place, files, weights=weights)
    if not isinstance(folder, Path):
        raise UserError(f"{setting}: {folder} must be a folder on this machine, or a name of the hub; copy it here")
    return folder


def hash_files(folder: AnyPath) -> str:
    """Return the sha256 of weights, config.json and tokenizer.json, with blanks between them; empty if there are no weights.

    A file that is missing has "-". In config.json, place and writer do not count. The encoder is not loaded.
    """
    weights = sorted([*folder.glob("*.safetensors")])
    if not weights:
        return ""
    config = folder / "config.json"
    described = read_json(config, "copy it from the pretrained encoder again") if config.exists() else None
    settings = {name: value for name, value in (described or {}).items() if name not in OF_THE_FILE}
    tokenizer = folder / "tokenizer.json"
    return " ".join([
        hashlib.sha256("".join(map(file_sha256, weights)).encode()).hexdigest(),
        "-" if described is None else hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        file_sha256(tokenizer) if tokenizer.exists() else "-",
    ])  # fmt: skip


def _read_config(folder: Path, setting: str) -> dict[str, Any]:
    """Return the content of config.json. Raises UserError if it describes no encoder that transformers knows."""
    require("transformers", "model.pretrained")
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    path = folder / "config.json"
    if not path.exists():
        raise UserError(
            f"{setting}: {folder} has no config.json; give the folder of a pretrained encoder, or its name on the hub"
        )
    described = read_json(path, "copy it from the pretrained encoder again")
    kind = described.get("model_type")
    decodes = described.get("is_encoder_decoder") or described.get("is_decoder") or kind in ("bart", "mbart", "mvp")
    if not isinstance(kind, str) or kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or decodes:
        raise UserError(
            f"{setting}: {folder} holds a model of type {kind}, which is not an encoder that transformers "
            f"trains as a masked language model; {CHOOSE}"
        )
    if "quantization_config" in described or not isinstance(described.get("vocab_size", 0), int):
        raise UserError(
            f"{path} must have no quantization_config, and a number as vocab_size; choose an encoder in full precision"
        )
    return described


def weight_files(folder: Path, setting: str = _SETTING) -> list[Path]:
    """Return the files of weights. Raises UserError if they are not of safetensors in the folder."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if not index.exists():
        raise UserError(
            f"{setting}: {folder} has no model.safetensors, and no other form of weights is read; "
            "AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it"
        )
    files = read_json(index, "copy it again").get("weight_map")
    if not isinstance(files, dict) or not all(
        str(file).endswith(".safetensors") and Path(file).name == file for file in files.values()
    ):
        raise UserError(f"{setting}: {index} must name files of safetensors in its folder; copy it again")
    return [folder / file for file in sorted(set(files.values()))]


def _check_tokenizer(folder: Path, place: AnyPath | HubModel, data: AnyPath, described: Mapping, pieces: int) -> None:
    """Raise UserError if the pieces of the data set are not those that the encoder was trained with."""
    size = described.get("vocab_size", pieces)
    own = folder / "tokenizer.json"
    other = own.exists() and _vocabulary(own) != _vocabulary(data / "encoded" / TOKENIZER_FILE)
    if pieces > size or other:
        why = f"{pieces:,} pieces, and the encoder has {size:,}" if pieces > size else "the pieces of another tokenizer"
        raise UserError(f"{data} does not belong to {place}: it has {why}; preprocess again with subwords.tokenizer={place}")


def _vocabulary(path: AnyPath) -> object:
    try:
        return json.loads(path.read_bytes())["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a fast tokenizer; copy it again") from None
