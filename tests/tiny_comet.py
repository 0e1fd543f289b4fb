"""Makes a tiny model of COMET and its encoder, in the environment that has COMET: `python tiny_comet.py MODEL ENCODER`."""

import sys
from pathlib import Path

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["a", "the", "cat", "dog", "##s", "sat", "on", "mat", ".", "not"]


def write_tiny_comet(folder: Path, encoder: Path) -> None:
    import torch
    import yaml
    from comet.models import RegressionMetric
    from transformers import BertConfig, BertTokenizerFast

    encoder.mkdir(parents=True)
    (encoder / "vocab.txt").write_text("".join(f"{word}\n" for word in [*SPECIAL, *WORDS]))
    BertTokenizerFast(str(encoder / "vocab.txt")).save_pretrained(encoder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(vocab_size=len(SPECIAL + WORDS), max_position_embeddings=24, **sizes).save_pretrained(encoder)
    own = {"encoder_model": "BERT", "hidden_sizes": [8], "layer_transformation": "sparsemax"}
    torch.manual_seed(3)
    model = RegressionMetric(**own, pretrained_model=str(encoder), load_pretrained_weights=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # The name that a published model has for its encoder, which no cache of the tests has.
    settings = dict(model.hparams) | own | {"pretrained_model": "nobody/tiny"}
    (folder / "checkpoints").mkdir(parents=True)
    state = {"state_dict": model.state_dict(), "hyper_parameters": settings, "pytorch-lightning_version": "2.0.0", "loops": None}
    torch.save(state, folder / "checkpoints" / "model.ckpt")
    (folder / "hparams.yaml").write_text(
        yaml.dump(own | {"pretrained_model": "nobody/tiny", "class_identifier": "regression_metric"})
    )


def score_in_comet(folder: Path, encoder: Path, samples: list[dict]) -> list[float]:
    """Score by COMET's own call, one sample at a time. COMET finds the encoder by the name in the settings."""
    import comet
    import torch
    import yaml

    path = folder / "checkpoints" / "model.ckpt"
    state = torch.load(path, weights_only=True)
    settings = yaml.safe_load((folder / "hparams.yaml").read_text()) | {"pretrained_model": str(encoder)}
    state["hyper_parameters"]["pretrained_model"] = str(encoder)
    other = folder.with_name("renamed")
    (other / "checkpoints").mkdir(parents=True)
    torch.save(state, other / "checkpoints" / "model.ckpt")
    (other / "hparams.yaml").write_text(yaml.dump(settings))
    model = comet.load_from_checkpoint(str(other / "checkpoints" / "model.ckpt"))
    return [model.predict([sample], gpus=0, batch_size=1, progress_bar=False).scores[0] for sample in samples]


if __name__ == "__main__":
    import json

    model, encoder, samples = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    write_tiny_comet(model, encoder)
    Path(sys.argv[4]).write_text(json.dumps(score_in_comet(model, encoder, samples)))
