"""Folders that `transformers` loads as GPT-2, with a tokenizer: plain causal language models with pre-norm.

GPT-2 has learned positions and GELU; here, its table of positions holds the sinusoids, and its feed-forward layers have ReLU.
The tokenizer reads a line without a parser, so a piece may cross the border of two words that touch, as in `don't`. It
reads a written `<unk>`, `<s>`, `</s>` or `<pad>` as the special piece.
"""

import base64
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from torch import Tensor, nn

from treenet.config import TrainConfig
from treenet.layers.blocks import compute_sinusoids
from treenet.models.encoders.causal import CausalTransformerEncoder
from treenet.runs.exported_run import read_vocabulary, write_export
from treenet.runs.loading import LoadedModel
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from treeproc.shards.store import read_index

_NAME, _PIECES = "causal_transformer", "vocab/pieces.model"
_BLANK = "\u2581"


def export_gpt2(run: LoadedModel, out: Path, max_positions: int) -> None:
    """Write a folder for `AutoModelForCausalLM` and `AutoTokenizer`, and export.json. Lines may have `max_positions` pieces.

    Raises UserError for every model but the plain causal Transformer with pre-norm, and for pieces that the job has not learned.
    """
    if problem := _why_not(run.config):
        raise UserError(f"GPT-2 is a causal_transformer with pre-norm, but {problem}; --to safetensors takes every model")
    vocabulary = read_vocabulary(run)
    if _PIECES not in vocabulary or read_index(run.data / "encoded").get("normalization", "none") != "none":
        raise UserError("--to gpt2 takes learned pieces of text as it is, but the data set changes its text or has a tokenizer")
    files = {
        "config.json": _config(run.config, run.model.encoder, max_positions),
        "tokenizer.json": tokenizer_of(vocabulary[_PIECES]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>",
            "eos_token": "</s>", "model_max_length": max_positions, "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip

    def fill(folder: Path) -> list[str]:
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
        save_file(weights_of(run.model.encoder, max_positions), folder / "model.safetensors", {"format": "pt"})
        return [*files, "model.safetensors"]

    write_export(out, run, "gpt2", fill, max_positions=max_positions)


def _why_not(config: TrainConfig) -> str:
    model = config.model
    if model.name != _NAME:
        return f"the run is {model.name}"
    return "" if model.norm == "pre" else f"the run has {model.norm}-norm"


def _config(config: TrainConfig, encoder: CausalTransformerEncoder, max_positions: int) -> dict:
    model = config.model
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "relu", "tie_word_embeddings": False,
        "vocab_size": encoder.embedding.num_embeddings, "n_positions": max_positions, "n_embd": model.d_model,
        "n_layer": model.num_encoder_layers, "n_head": model.num_heads, "n_inner": model.d_ff,
        "layer_norm_epsilon": encoder.layers[0].self_attention_norm.eps, "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout, "attn_pdrop": model.attention_dropout, "pad_token_id": PAD_ID, "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }  # fmt: skip


def weights_of(encoder: CausalTransformerEncoder, max_positions: int) -> dict[str, Tensor]:
    """Return the weights by GPT-2's names. Its linear maps are transposed, and its table of pieces has no scale."""
    table = encoder.embedding.weight
    found = {"transformer.wte.weight": encoder.embedding.scale * table, "lm_head.weight": table}
    found["transformer.wpe.weight"] = compute_sinusoids(max_positions, encoder.d_model)
    for number, layer in enumerate(encoder.layers):
        attention, feed_forward = layer.self_attention, layer.feed_forward
        parts: dict[str, nn.Module] = {
            "ln_1": layer.self_attention_norm, "attn.c_attn": attention.queries_keys_values, "attn.c_proj": attention.output,
            "ln_2": layer.feed_forward_norm, "mlp.c_fc": feed_forward.inner, "mlp.c_proj": feed_forward.outer,
        }  # fmt: skip
        for name, part in parts.items():
            found |= {f"transformer.h.{number}.{name}.{kind}": value.t() for kind, value in part.named_parameters()}
    found |= {f"transformer.ln_f.{kind}": value for kind, value in encoder.layers[-1].final_norm.named_parameters()}
    return {name: value.detach().to("cpu", torch.float32).contiguous().clone() for name, value in found.items()}


def tokenizer_of(pieces_model: bytes) -> dict:
    """Return `tokenizer.json` of byte-pair pieces: all that it needs of sentencepiece's model.

    A merge is a pair of pieces that make a third one; earlier pieces are merged first. Raises UserError for words that are one
    piece by a setting.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(pieces_model)
    names = {one.piece: number for number, one in enumerate(model.pieces)}
    if whole := next((one.piece for one in model.pieces if one.type == one.USER_DEFINED), None):
        raise UserError(f"--to gpt2 takes no pieces that a setting names, but the data set has {whole}")
    learned = [one.piece for one in model.pieces if one.type == one.NORMAL]
    merges = [
        (piece[:place], piece[place:])
        for piece in learned
        for place in range(1, len(piece))
        if piece[:place] in names and piece[place:] in names
    ]
    special = {PAD_ID: "<pad>", UNK_ID: "<unk>", BOS_ID: "<s>", EOS_ID: "</s>"}
    rules = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()  # of lower case
    lower = [{"type": "Precompiled", "precompiled_charsmap": rules}] if rules else []
    blanks = [{"type": "Prepend", "prepend": _BLANK}, {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    begin, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": name, **flags} for number, name in special.items()],
        "normalizer": {"type": "Sequence", "normalizers": [*lower, *blanks]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, other],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": names, "merges": merges,
        },
    }  # fmt: skip
