"""Real sentences for the tests of parsers."""

import gzip

from treeproc.stages.preprocess import SAMPLE


def sample_lines(count: int) -> list[str]:
    """English sentences of the shipped sample, evenly over it."""
    lines = gzip.decompress((SAMPLE / "train.en.gz").read_bytes()).decode().split("\n")
    return lines[:: len(lines) // count][:count]
