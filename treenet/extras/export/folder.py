"""Folders of exported models: their files, and export.json with what they are and where they come from.

An exported run needs neither its data set nor its checkpoints: it has weights in safetensors, settings and vocabulary. The plain
Transformer also has a form for CTranslate2, a program that translates faster on CPUs, with weights in float32 or int8.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.layers.positions import compute_sinusoids
from treenet.models.composed import Seq2Seq
from treenet.runs.checkpoint import AVERAGED, META, WEIGHTS, publish, publish_folder, read_meta
from treenet.runs.chosen_checkpoint import checkpoint_folder
from treenet.runs.loading import HELD_DATA, LoadedRun
from treenet.runs.run_json import FACTS as RUN_FACTS
from treeproc.common.files import json_bytes, read_json
from treeproc.common.folder_kinds import EXPORT, claim_folder
from treeproc.common.provenance import software
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import inside
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from treeproc.shards.store import read_index, vocabulary_files

FACTS = "export.json"
_NAME = "transformer"
_PIECES = "vocab/pieces.model"
_FILES = ("config.json", "model.bin", "shared_vocabulary.json")


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


def export_run(run_dir: Path, run: LoadedRun, out: Path, checkpoint: str) -> None:
    """Write a run folder that `load_run` and all commands read that translate: `out`, with the vocabulary in `out`/data.

    The weights are a copy, byte for byte, of those of `checkpoint`. Raises UserError as `write_export` does.
    """
    weights, held = checkpoint_folder(run_dir, checkpoint), f"{HELD_DATA}/encoded"
    meta = {name: value for name, value in read_meta(weights).items() if name not in ("files", "sha256")}

    def fill(folder: Path) -> list[str]:
        (folder / held / "vocab").mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_settings(run.config.model_copy(update={"data": Path(HELD_DATA)})), "utf-8")
        shutil.copyfile(run_dir / RUN_FACTS, folder / RUN_FACTS)
        publish(folder / AVERAGED, {WEIGHTS: lambda path: shutil.copyfile(weights / WEIGHTS, path)}, meta)
        (folder / held / "index.json").write_bytes(json_bytes(index_without_shards(run)))
        vocabulary = {f"{held}/{name}": content for name, content in read_vocabulary(run).items()}
        for name, content in vocabulary.items():
            (folder / name).write_bytes(content)
        return ["config.yaml", RUN_FACTS, f"{AVERAGED}/{WEIGHTS}", f"{AVERAGED}/{META}", f"{held}/index.json", *vocabulary]

    write_export(out, run, "safetensors", fill)


def export_ctranslate2(run: LoadedRun, out: Path, max_positions: int, quantization: str) -> None:
    """Write a folder that `ctranslate2.Translator` opens, with the pieces and export.json.

    `quantization` is "none" or "int8". Raises UserError for every model but the plain Transformer.
    """
    if (name := run.config.model.name) != _NAME:
        raise UserError(
            f"CTranslate2 reads no trees and takes only {_NAME}, but the run is {name}; --to onnx takes tree_transformer, and "
            "--to safetensors every model"
        )

    def fill(folder: Path) -> list[str]:
        converted = folder / "converted"  # the converter replaces the folder that it writes, and this one is locked
        write_model(run, converted, max_positions, quantization)
        for name in _FILES:
            (converted / name).rename(folder / name)
        converted.rmdir()
        (folder / _PIECES).parent.mkdir()
        (folder / _PIECES).write_bytes(read_vocabulary(run)[_PIECES])
        return [*_FILES, _PIECES]

    write_export(out, run, "ctranslate2", fill, max_positions=max_positions, quantization=quantization)


def write_model(run: LoadedRun, folder: Path, max_positions: int, quantization: str) -> None:
    """Write the files of CTranslate2 alone. The converter replaces a `folder` that exists."""
    from ctranslate2.converters import Converter

    class RunConverter(Converter):
        def _load(self) -> Any:
            return build_spec(run, max_positions)

    RunConverter().convert(str(folder), quantization=None if quantization == "none" else quantization, force=True)


def build_spec(run: LoadedRun, max_positions: int) -> Any:
    """Build the `TransformerSpec` of a run, with its vocabulary."""
    from ctranslate2.specs import common_spec, transformer_spec

    model: Seq2Seq = run.model
    encoder, decoder = model.encoder, model.decoder
    spec = transformer_spec.TransformerSpec.from_config(
        (len(encoder.layers), len(decoder.layers)),
        run.config.model.num_heads,
        pre_norm=run.config.model.norm == "pre",
        activation=common_spec.Activation.RELU,
    )
    # CTranslate2 multiplies embeddings with sqrt(D), as this project does.
    table, positions = _array(encoder.embedding.weight), compute_sinusoids(max_positions, encoder.d_model).numpy()
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = spec.decoder.projection.weight = table
    spec.encoder.position_encodings.encodings = spec.decoder.position_encodings.encodings = positions
    for stack, into in ((encoder, spec.encoder), (decoder, spec.decoder)):
        if (final_norm := stack.layers[-1].final_norm) is not None:
            _set_norm(into.layer_norm, final_norm)
    for layer, into in zip(encoder.layers, spec.encoder.layer, strict=True):
        _set_self_attention(into, layer)
        _set_feed_forward(into, layer)
    for layer, into in zip(decoder.layers, spec.decoder.layer, strict=True):
        cross = layer.cross_attention
        _set_self_attention(into, layer)
        _set_attention(into.attention, layer.cross_attention_norm, cross.queries, cross.keys_values, cross.output)
        _set_feed_forward(into, layer)
    pieces = [run.processor.id_to_piece(number) for number in range(len(table))]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.layer_norm_epsilon = encoder.layers[0].self_attention_norm.eps
    return spec


def _set_self_attention(into: Any, layer: nn.Module) -> None:
    attention = layer.self_attention
    _set_attention(into.self_attention, layer.self_attention_norm, attention.queries_keys_values, attention.output)


def _set_attention(into: Any, norm: nn.LayerNorm, *linears: nn.Linear) -> None:
    """Set the norm after an attention and its linear maps: all fused, or queries, then keys and values; the output last."""
    _set_norm(into.layer_norm, norm)
    for place, linear in zip(into.linear, linears, strict=True):
        _set_linear(place, linear)


def _set_feed_forward(into: Any, layer: nn.Module) -> None:
    _set_norm(into.ffn.layer_norm, layer.feed_forward_norm)
    _set_linear(into.ffn.linear_0, layer.feed_forward.inner)
    _set_linear(into.ffn.linear_1, layer.feed_forward.outer)


def _set_norm(into: Any, norm: nn.LayerNorm) -> None:
    into.gamma, into.beta = _array(norm.weight), _array(norm.bias)


def _set_linear(into: Any, linear: nn.Linear) -> None:
    into.weight, into.bias = _array(linear.weight), _array(linear.bias)


def _array(value: Tensor) -> np.ndarray:
    """Return a copy, since quantisation changes arrays in place."""
    return value.detach().numpy().copy()
