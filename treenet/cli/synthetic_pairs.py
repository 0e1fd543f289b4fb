"""Lines of text files for back-translation: pairs of a data set as files, a sample of monolingual text, the mixture of pairs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from treeproc.common.files import atomic_output
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.readers.numbered_lines import pair_up, read_lines
from treeproc.readers.unicode_form import is_blank
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import stage_folder

SIDES = ("source", "target")
Pairs = Iterator[tuple[str, str]]


def pair_files(folder: Path, split: str) -> list[Path]:
    """Return the paths of the source and the target of a split."""
    return [folder / f"{split}.{side}" for side in SIDES]


def read_pairs(data: AnyPath, split: str) -> Pairs:
    """Return the pairs of the text stage of a data set, in order."""
    for shard in SplitShards(stage_folder(data, "text"), split):
        yield from ((row["source"], row["target"]) for row in shard.rows())


def write_pairs(pairs: Pairs, files: Sequence[Path]) -> None:
    """Write pairs into two files, which appear when all pairs are written."""
    with ExitStack() as stack:
        outputs = [stack.enter_context(atomic_output(path)) for path in files]
        for pair in pairs:
            for output, line in zip(outputs, pair, strict=True):
                output.write(f"{line}\n".encode())


def sample_lines(files: Sequence[Path], wanted: int, out: Path) -> tuple[int, int]:
    """Write `wanted` of the lines with text into `out`, spread evenly over all: (lines written, lines with text).

    If there are fewer, it writes all. Raises UserError if there is no line with text.
    """
    total = sum(1 for line in read_lines(files) if not is_blank(line))
    if not total:
        raise UserError(f"text: {', '.join(map(str, files))}: there is no line with text; give one sentence a line")
    most = min(wanted, total)
    with atomic_output(out) as output:
        for number, line in enumerate(line for line in read_lines(files) if not is_blank(line)):
            if (number + 1) * most // total > number * most // total:
                output.write(f"{line}\n".encode())
    return most, total


def synthetic_pairs(translations: Path, text: Path, tag: str | None) -> Pairs:
    """Return pairs of a translation, after the tag, and the line that it translates. Lines without a translation are left out."""
    lines = pair_up(read_lines([translations]), read_lines([text]), str(translations), str(text))
    return ((f"{tag} {source}" if tag else source, target) for source, target in lines if not is_blank(source))


def mix(real: Pairs, num_real: int, synthetic: Pairs, num_synthetic: int) -> Pairs:
    """Return real pairs with the synthetic pairs spread evenly between them."""
    given = 0
    for number, pair in enumerate(real, start=1):
        yield pair
        due = number * num_synthetic // num_real
        yield from islice(synthetic, due - given)
        given = due
