"""Numbers of single sentences: scores by learned metrics, and the nll of references under a model."""

import hashlib
import math
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


@dataclass(frozen=True)
class ReferenceNll:
    """Negative log-likelihoods [lines] of references under a model, by the natural logarithm, and their target tokens with EOS.

    A line that the model does not read, because its source is empty, has no tokens and the nll 0.
    """

    nll: Sequence[float]
    tokens: Sequence[int]

    def entries(self) -> dict:
        """Return the numbers in the form of scores.json: `nll` is that of a token, as in validations."""
        total, tokens = math.fsum(self.nll), sum(self.tokens)
        lines = max(1, sum(count > 0 for count in self.tokens))
        facts = {
            "total": total,
            "tokens": tokens,
            "per_sentence": total / lines,
            "sha256": hashlib.sha256(self.to_bytes()).hexdigest(),
        }
        return {"nll": total / max(1, tokens), "reference_nll": facts}

    def to_bytes(self) -> bytes:
        """Return the file nll.NAME.tsv of a run folder: a line for each reference, in their order."""
        rows = (f"{count}\t{value:.4f}\n" for count, value in zip(self.tokens, self.nll, strict=True))
        return "".join(["tokens\tnll\n", *rows]).encode()


def folder_sha256(folder: Path) -> str:
    """Return a hash of the names and contents of the files of a model. Raises OSError if they cannot be read."""
    kinds = (".safetensors", ".json", ".txt", ".model", ".ckpt", ".yaml")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in kinds and path.is_file())
    return hashlib.sha256("".join(f"{path} {file_sha256(folder / path)}\n" for path in files).encode()).hexdigest()
