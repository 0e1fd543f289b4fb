"""Scores of single sentences by learned metrics."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from treeproc.common.files import file_sha256


@dataclass(frozen=True)
class SentenceScores:
    """Scores of every line of some systems. The score of a system is their mean."""

    values: np.ndarray  # [systems, lines]
    signature: str
    num_cut: int = 0  # texts that are longer than the model reads
    details: Mapping[str, Sequence[float]] = field(default_factory=dict)  # further numbers of each system


def folder_sha256(folder: Path) -> str:
    """Return a hash of the names and contents of the files of a model. Raises OSError if they cannot be read."""
    kinds = (".safetensors", ".json", ".txt", ".model", ".ckpt", ".yaml")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in kinds and path.is_file())
    return hashlib.sha256("".join(f"{path} {file_sha256(folder / path)}\n" for path in files).encode()).hexdigest()
