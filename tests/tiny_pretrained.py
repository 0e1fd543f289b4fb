"""Tiny random encoders of the families of transformers, each with the tokenizer of its family, and data sets of their pieces."""

from pathlib import Path

import torch
from pretrained_data import write_data
from tiny_tokenizers import write_tokenizer

# The tokenizer of each type of model.
FAMILIES = {
    "bert": "wordpiece", "roberta": "bytes", "xlm-roberta": "unigram", "deberta-v2": "metaspace", "modernbert": "bytes"
}  # fmt: skip
WIDTH = 16


def write_encoder(folder: Path, kind: str = "bert", *, seed: int = 1, positions: int = 40) -> Path:
    """Write an encoder with random weights: config.json, model.safetensors and tokenizer.json."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModel

    family = FAMILIES.get(kind, "wordpiece")
    write_tokenizer(folder, family)
    pieces = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    pad = 0 if family in ("wordpiece", "metaspace") else 1
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {} if kind == "funnel" else {"num_hidden_layers": 3}
    own = {"modernbert": {"cls_token_id": 0, "sep_token_id": 2, "bos_token_id": 0, "eos_token_id": 2}, "deberta-v2": {
        "relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8
    }, "squeezebert": {"embedding_size": WIDTH}, "xlm": {"causal": True}, "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "funnel": {
        "d_head": 8, "block_sizes": [1, 1], "block_repeats": [1, 1], "truncate_seq": False, "architectures": ["FunnelModel"]
    }}.get(kind, {})  # fmt: skip
    config = AutoConfig.for_model(kind, vocab_size=pieces, pad_token_id=pad, max_position_embeddings=positions, **sizes, **own)
    torch.manual_seed(seed)
    model = AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def write_both(folder: Path, kind: str = "bert", **settings: object) -> tuple[Path, Path]:
    """Write an encoder and a data set of its pieces; returns both."""
    encoder = write_encoder(folder / "encoder", kind)
    return encoder, write_data(folder, tokenizer=encoder, **settings)
