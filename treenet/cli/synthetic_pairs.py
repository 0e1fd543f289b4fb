"""Back-translation: its settings, its lines of text (pairs of a data set as files, a sample, the mixture), and what is made."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.translation.settings import CONSTRAINTS, TranslateSettings
from treeproc.common.files import atomic_output, atomic_write, file_sha256, json_bytes, read_json
from treeproc.common.settings import Effect, Settings, UserError
from treeproc.common.storage import AnyPath, DataPath
from treeproc.parsers import ParserConfig
from treeproc.parsers.config import TAG_FORM
from treeproc.readers.labelled import refuse_table
from treeproc.readers.line_forms import is_blank
from treeproc.readers.numbered_lines import pair_up, read_lines
from treeproc.shards.schema import lower_case
from treeproc.shards.shard import SplitShards, check_stage
from treeproc.shards.store import fingerprint_of

# What this command decides itself.
_OWN = ("input", "trees", "score", *CONSTRAINTS, "output", "nbest", "scores", "json_lines")


class BackTranslateConfig(Settings):
    """Settings of back-translation."""

    data: Annotated[DataPath, Effect.NONE] = Field(description="finished data set of real pairs, of tree-attention preprocess")
    text: Annotated[list[DataPath], Effect.NONE] = Field(
        min_length=1, description="text of the target language, one sentence a line, plain or compressed"
    )
    ratio: float = Field(1.0, gt=0, description="synthetic pairs for each real pair; fewer if the text has fewer lines")
    tag: Annotated[str, Field(pattern=TAG_FORM)] | None = Field(
        "<bt>", description="first word of synthetic sources, a leaf that no parser reads; null: none"
    )
    run: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="finished run that translates target to source; null: the command trains one in OUT/backward"
    )
    backward: dict[str, Any] = Field(
        {},
        description="settings of that training, as for tree-attention train; the default model is a transformer, whose sizes "
        "go by the number of pairs",
    )
    backward_parser: ParserConfig | None = Field(
        None, description="parser of the target language, for a backward model that reads trees; null: none"
    )
    translate: TranslateSettings = Field(TranslateSettings(), description="translation, as for tree-attention translate")
    workers: Annotated[Literal[0] | None, Effect.NONE] = Field(
        None, description="0: preprocess in this process, without Ray; unset: as many Ray actors as there is room for"
    )

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if chosen := [name for name in _OWN if getattr(self.translate, name) != getattr(TranslateSettings(), name)]:
            raise ValueError(f"translate.{chosen[0]}: this command chooses the lines and what is written; leave it out")
        if "data" in self.backward:
            raise ValueError("backward.data: this command makes that data set; leave it out")
        if self.run is not None and (self.backward or self.backward_parser):
            raise ValueError("run is a finished model, so none is trained; leave out backward and backward_parser")
        return self


MADE = "made.json"


class _Step(TypedDict):
    """A finished step: the fingerprint of its inputs, and the SHA-256 of its files by name."""

    inputs: str
    files: dict[str, str]


class MadeFiles:
    """The record FOLDER/made.json of finished steps."""

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / MADE
        self._steps: dict = read_json(self._path, "choose another --out", dict[str, _Step]) if self._path.exists() else {}

    def began(self, step: str) -> bool:
        """Return whether a step was made before, perhaps from other inputs."""
        return step in self._steps

    def has(self, step: str, files: Sequence[Path], *inputs: object) -> bool:
        """Return whether the files of a step are complete and unchanged.

        Raises UserError if they were made from other inputs.
        """
        if step not in self._steps:
            return False
        found = self._steps[step]
        if found["inputs"] != fingerprint_of(*inputs):
            raise UserError(f"{self._folder} holds the step '{step}' of other data or settings; choose another --out")
        return all(path.is_file() and found["files"].get(path.name) == file_sha256(path) for path in files)

    def add(self, step: str, files: Sequence[Path], *inputs: object) -> None:
        """Record the files of a step that is finished."""
        self._steps[step] = _Step(inputs=fingerprint_of(*inputs), files={path.name: file_sha256(path) for path in files})
        atomic_write(self._path, json_bytes(self._steps, dict[str, _Step]))


SIDES = ("source", "target")
Pairs = Iterator[tuple[str, str]]


def pair_files(folder: Path, split: str) -> list[Path]:
    """Return the paths of the source and the target of a split."""
    return [folder / f"{split}.{side}" for side in SIDES]


def read_pairs(data: AnyPath, split: str) -> Pairs:
    """Return the pairs of the text stage of a data set, in order."""
    for shard in SplitShards(check_stage(data, "text", split), split):
        yield from ((row["source"], row["target"]) for row in shard.rows())


def write_pairs(pairs: Pairs, files: Sequence[Path]) -> None:
    """Write pairs into two files, which appear when all pairs are written."""
    with ExitStack() as stack:
        outputs = [stack.enter_context(atomic_output(path)) for path in files]
        for pair in pairs:
            for output, line in zip(outputs, pair, strict=True):
                output.write(f"{line}\n".encode())


def sample_lines(files: Sequence[AnyPath], wanted: int, out: Path) -> tuple[int, int]:
    """Write `wanted` of the lines with text into `out`, spread evenly over all: (lines written, lines with text).

    If there are fewer, it writes all. Raises UserError if there is no line with text, and for a table.
    """
    for path in files:
        refuse_table(path)
    total = sum(1 for line in read_lines(files) if not is_blank(line))
    if not total:
        raise UserError(f"text: {', '.join(map(str, files))}: there is no line with text; give one sentence a line")
    most = min(wanted, total)
    with atomic_output(out) as output:
        for number, line in enumerate(line for line in read_lines(files) if not is_blank(line)):
            if (number + 1) * most // total > number * most // total:
                output.write(f"{line}\n".encode())
    return most, total


def synthetic_pairs(translations: Path, text: Path, tag: str | None, own_tags: Sequence[str] = ()) -> Pairs:
    """Return pairs of a translation, after the tag, and the line that it translates. Lines without a translation are left out.

    A model that learned lower-cased text writes `<2en>` for the tag `<2EN>`. It becomes the one of `own_tags` again.
    """
    lines = pair_up(read_lines([translations]), read_lines([text]), str(translations), str(text))
    own = {lower_case(one): one for one in own_tags} | {one: one for one in own_tags}

    def tagged(source: str) -> str:
        first, blank, rest = source.partition(" ")
        return f"{tag} {source}" if tag else f"{own.get(first, first)}{blank}{rest}"

    return ((tagged(source), target) for source, target in lines if not is_blank(source))


def mix(real: Pairs, num_real: int, synthetic: Pairs, num_synthetic: int) -> Pairs:
    """Return real pairs with the synthetic pairs spread evenly between them."""
    given = 0
    for number, pair in enumerate(real, start=1):
        yield pair
        due = number * num_synthetic // num_real
        yield from islice(synthetic, due - given)
        given = due
