"""Select the shipped sample from Tatoeba's English-German pairs.

    python benchmarks/select_pairs.py deu-eng.tsv.gz

The rule is written in treeproc/sample/README.md. The same input gives the same files.
"""

import gzip
import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

NUM_TEST, NUM_VALID, NUM_TRAIN = 500, 500, 16_000
MIN_WORDS, MAX_WORDS = 4, 12
MIN_WORD_COUNT = 20
FOLDER = Path(__file__).resolve().parent.parent / "treeproc" / "sample"


def key(sentence: str) -> str:
    """Return a sentence without case and punctuation."""
    return " ".join(re.findall(r"\w+", sentence.lower()))


def digest(sentence: str) -> str:
    return hashlib.sha256(sentence.encode()).hexdigest()


def select(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Select pairs of frequent words and 4 to 12 words a side, in hash order; no key of a side occurs twice."""
    counts = [Counter(word for sentence in {pair[side] for pair in pairs} for word in key(sentence).split()) for side in (0, 1)]

    def suits(sentence: str, side: int) -> bool:
        return MIN_WORDS <= len(sentence.split()) <= MAX_WORDS and all(
            counts[side][w] >= MIN_WORD_COUNT for w in key(sentence).split()
        )

    chosen = []
    seen: tuple[set[str], set[str]] = set(), set()
    for source, target in sorted(pairs, key=lambda pair: (digest(key(pair[0])), len(pair[1]), pair)):
        keys = (key(source), key(target))
        if suits(source, 0) and suits(target, 1) and keys[0] not in seen[0] and keys[1] not in seen[1]:
            chosen.append((source, target))
            seen[0].add(keys[0])
            seen[1].add(keys[1])
    return chosen


def main() -> None:
    with gzip.open(sys.argv[1], "rt", encoding="utf-8", newline="\n") as file:
        pairs = [(line.split("\t")[0].strip(), line.split("\t")[1].strip()) for line in file]
    chosen = select(pairs)
    splits = {"test": (0, NUM_TEST), "valid": (NUM_TEST, NUM_VALID), "train": (NUM_TEST + NUM_VALID, NUM_TRAIN)}
    for split, (start, count) in splits.items():
        rows = chosen[start : start + count]
        for side, language in enumerate(("en", "de")):
            text = "".join(f"{row[side]}\n" for row in rows)
            # A fixed time stamp keeps the bytes of the archive the same.
            (FOLDER / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(f"{split}: {len(rows)} pairs")


if __name__ == "__main__":
    main()
