"""Sentences of the shipped sample."""

import gzip

from treeproc.stages.preprocess import SAMPLE


def lines_of(name: str) -> list[str]:
    """The lines of a file, such as train.en."""
    return gzip.decompress((SAMPLE / f"{name}.gz").read_bytes()).decode().splitlines()


def sample_lines(count: int) -> list[str]:
    """English sentences, evenly over the sample."""
    lines = lines_of("train.en")
    return lines[:: len(lines) // count][:count]
