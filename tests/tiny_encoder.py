"""Makes a tiny BERT with its tokeniser, in the format of transformers."""

from pathlib import Path

import torch

WORDS = ["a", "the", "cat", "dog", "##s", "sat", "on", "mat", ".", "not"]
LONGEST = 16


def write_tiny_encoder(folder: Path, num_layers: int = 3) -> Path:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocab = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    BertTokenizerFast(vocab=vocab, model_max_length=LONGEST).save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": LONGEST}
    model = BertModel(BertConfig(vocab_size=len(vocab), num_hidden_layers=num_layers, **sizes))
    for name, parameter in model.named_parameters():  # so that states differ, and some similarities are negative
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "word_embeddings" in name else 0.15)
    model.save_pretrained(folder)
    return folder
