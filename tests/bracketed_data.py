"""A small translation corpus with trees in brackets, in the files that `preprocess` reads: no parser is needed."""

from pathlib import Path

import numpy as np
import yaml

_WORDS = ["the", "old", "man", "saw", "a", "dog", "in", "park", "she", "likes", "cats", "and", "birds", "today"]
_TRAINING = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "batch": {"max_tokens": 64},
    "optimizer": {"warmup_steps": 10},
    "max_steps": 4,
    "validate_every": 2,
    "checkpoint_every": 2,
    "log_every": 1,
    "workers": 0,
}


def write_bracketed_data(folder: Path) -> None:
    """Writes data.yaml and train.yaml, and the files of three splits that data.yaml names: the target reverses the source."""
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 40), ("valid", 8), ("test", 5)):
        lines = [[str(word) for word in random.choice(_WORDS, random.integers(3, 8))] for _ in range(count)]
        (folder / f"{split}.mrg").write_text("".join(f"(ROOT {_tree(words, random)})\n" for words in lines))
        (folder / f"{split}.txt").write_text("".join(" ".join(reversed(words)) + "\n" for words in lines))
        splits[split] = {"source": [str(folder / f"{split}.mrg")], "target": [str(folder / f"{split}.txt")]}
    data = {"format": "brackets", "splits": splits, "subwords": {"vocab_size": 300}, "parser": {"name": "given"}, "workers": 0}
    (folder / "data.yaml").write_text(yaml.safe_dump(data))
    (folder / "train.yaml").write_text(yaml.safe_dump(_TRAINING))


def _tree(words: list[str], random: np.random.Generator) -> str:
    if len(words) == 1:
        return f"(NN {words[0]})"
    middle = int(random.integers(1, len(words)))
    return f"(NP {_tree(words[:middle], random)} {_tree(words[middle:], random)})"
