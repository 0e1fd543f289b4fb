"""A small data set with the pieces of a tiny pretrained tokenizer: given trees with classes, and words that pieces cross."""

from pathlib import Path

from tiny_tokenizers import write_tokenizer

from treeproc.stages.preprocess import PreprocessConfig, preprocess

TREES = """(3 (2 We) (3 (3 (2 do) (2 n't)) (3 know)))
(1 (2 He) (1 (1 knows) (2 her)))
(0 (1 They) (0 (1 can) (0 not)))
(2 (2 😀) (2 (2 know) (2 us)))
"""


def settings(folder: Path, tokenizer: Path, **changes: object) -> dict:
    """Settings of a data set of SST's format in `folder`, which gets its file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_text(TREES * 10, encoding="utf-8")
    return {
        "splits": {name: {"source": [folder / "train.txt"]} for name in ("train", "valid")},
        "filters": {"drop_duplicates": False, "drop_overlap": "none"},
        "format": "sst",
        "parser": {"name": "given"},
        "subwords": {"tokenizer": tokenizer},
        "workers": 0,
        **changes,
    }


def write_data(folder: Path, family: str = "wordpiece", tokenizer: Path | None = None, **changes: object) -> Path:
    """Write a tokenizer, unless one is given, and a data set below `folder`; returns the data set."""
    tokenizer = tokenizer or write_tokenizer(folder / "encoder", family)
    preprocess(PreprocessConfig.model_validate(settings(folder, tokenizer, **changes)), folder / "data")
    return folder / "data"
