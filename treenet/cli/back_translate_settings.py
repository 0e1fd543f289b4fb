"""Settings of back_translate.py."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from treenet.translation.line_constraints import CONSTRAINTS
from treenet.translation.translate_settings import TranslateSettings
from treeproc.common.setting_effects import Effect
from treeproc.common.settings import Settings
from treeproc.common.storage import DataPath
from treeproc.parsers import ParserConfig
from treeproc.parsers.config import TAG_FORM

# What this command decides itself.
_OWN = ("input", "trees", "score", *CONSTRAINTS, "output", "nbest", "scores", "json_lines")


class BackTranslateConfig(Settings):
    """Settings of back-translation."""

    data: Annotated[DataPath, Effect.NONE] = Field(description="finished data set of real pairs, of workflows/preprocess.py")
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
        description="settings of that training, as for workflows/train.py; the default model is a transformer, whose sizes "
        "go by the number of pairs",
    )
    backward_parser: ParserConfig | None = Field(
        None, description="parser of the target language, for a backward model that reads trees; null: none"
    )
    translate: TranslateSettings = Field(TranslateSettings(), description="translation, as for workflows/translate.py")
    workers: Annotated[Literal[0] | None, Effect.NONE] = Field(
        None, description="0: preprocess in this process, without Ray; unset: as many Ray actors as there is room for"
    )

    @model_validator(mode="after")
    def _check_parts(self):
        if chosen := [name for name in _OWN if getattr(self.translate, name) != getattr(TranslateSettings(), name)]:
            raise ValueError(f"translate.{chosen[0]}: this command chooses the lines and what is written; leave it out")
        if "data" in self.backward:
            raise ValueError("backward.data: this command makes that data set; leave it out")
        if self.run is not None and (self.backward or self.backward_parser):
            raise ValueError("run is a finished model, so none is trained; leave out backward and backward_parser")
        return self
