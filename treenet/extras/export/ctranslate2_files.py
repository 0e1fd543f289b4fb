"""Folders that `ctranslate2.Translator` opens: the plain Transformer for a program that translates faster on CPUs.

Weights are float32 or int8.
"""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from treenet.layers.blocks import DecoderLayer, EncoderLayer, compute_sinusoids
from treenet.models.composed import Seq2Seq
from treenet.runs.exported_run import read_vocabulary, write_export
from treenet.runs.loading import LoadedRun
from treeproc.common.settings import UserError

_NAME = "transformer"
_PIECES = "vocab/pieces.model"
_FILES = ("config.json", "model.bin", "shared_vocabulary.json")


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


def _set_self_attention(into: Any, layer: EncoderLayer | DecoderLayer) -> None:
    attention = layer.self_attention
    _set_attention(into.self_attention, layer.self_attention_norm, attention.queries_keys_values, attention.output)


def _set_attention(into: Any, norm: nn.LayerNorm, *linears: nn.Linear) -> None:
    """Set the norm after an attention and its linear maps: all fused, or queries, then keys and values; the output last."""
    _set_norm(into.layer_norm, norm)
    for place, linear in zip(into.linear, linears, strict=True):
        _set_linear(place, linear)


def _set_feed_forward(into: Any, layer: EncoderLayer | DecoderLayer) -> None:
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
