"""Settings of the commands that read lines of text, without the code that they run."""

from typing import Annotated, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from treenet.config import DecodingConfig
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.run_folder import Checkpoint
from treeproc.common.settings import Effect, Settings
from treeproc.common.storage import DataPath

# Settings, and columns of an example, that hold constraints.
PREFIX, MUST_APPEAR, MUST_NOT_APPEAR = "prefix", "must_appear", "must_not_appear"

CONSTRAINTS = (PREFIX, MUST_APPEAR, MUST_NOT_APPEAR)


class LineSettings(Settings):
    """Settings of commands that read lines of text, and write an output for each: input, output and workers."""

    input: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="raw text, one sentence a line, or a table or markup in the format of the run's data set (labelled, sgm, "
        "iwslt_xml), plain or compressed; bracketed trees are for `trees`. Unset: standard input, or the words of `trees`",
    )
    trees: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="trees in Penn Treebank brackets, one line for each line of the input; unset, the command parses the lines",
    )
    output: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="file to write; unset, standard output. The file appears when it is complete. Until then OUTPUT.parts holds "
        "the finished lines, and the same command continues after them",
    )
    json_lines: bool = Field(False, description="write a JSON object a line instead of text")
    max_leaves: PositiveInt = Field(1000, description="most pieces of a line; the model does not read longer lines")
    lines_at_once: PositiveInt = Field(1000, description="lines that a worker parses and computes together")
    workers: Annotated[int, Effect.NONE] = Field(
        0, ge=0, description="Ray actors that compute, each with a CPU; 0: compute in this process, without Ray"
    )
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="compute on GPUs, one for each worker")

    @property
    def checkpoints(self) -> list[str]:
        """Return the checkpoints to load."""
        raise NotImplementedError


class TranslateSettings(LineSettings):
    """Settings of translate.py: input, models, decoding and output."""

    score: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="given translations, one for each line of the input: the command scores them, and searches none"
    )
    prefix: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="beginnings of the translations, one for each line of the input, which may be empty"
    )
    must_appear: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="phrases that each translation must contain, one line for each line of the input, separated by tabs; beam "
        "search alone",
    )
    must_not_appear: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="strings that each translation must not contain, one line for each line of the input, separated by tabs",
    )
    checkpoint: Checkpoint | list[Checkpoint] = Field(
        AVERAGED,
        description="'averaged', the number of a step, or the path of a checkpoint folder; several form an ensemble",
    )
    ensemble: list[DataPath] = Field([], description="further runs of the same vocabulary, which form an ensemble with the run")
    nbest: PositiveInt = Field(
        1,
        description="translations a line, best first, or samples in the order of their numbers; from 2 on an output line begins "
        "with its number",
    )
    scores: bool = Field(False, description="write the score before every translation")
    compile: Annotated[bool, Effect.NONE] = Field(
        False,
        description="compile the steps of beam search with torch.compile, for much text on a GPU; the first batches take minutes",
    )
    decoding: DecodingConfig = Field(DecodingConfig(), description="the search; what is not set here is as in the run")

    @field_validator("checkpoint")
    @classmethod
    def _check_some(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("must name a checkpoint, for example averaged")
        return value

    @model_validator(mode="after")
    def _check_searched(self) -> Self:
        if self.score is not None and (names := [name for name in CONSTRAINTS if getattr(self, name) is not None]):
            raise ValueError(f"score takes translations as they are, and nothing is searched; leave out {', '.join(names)}")
        return self

    @property
    def checkpoints(self) -> list[str]:
        return [self.checkpoint] if isinstance(self.checkpoint, str) else self.checkpoint
