"""Settings of evaluate.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from treenet.config import DecodingConfig
from treenet.evaluation.buckets import BucketConfig
from treenet.evaluation.comparison import CompareConfig
from treenet.evaluation.learned_metrics import BertScoreConfig, CometConfig, LearnedMetrics
from treenet.runs.checkpoint import AVERAGED
from treeproc.common.setting_effects import Effect
from treeproc.common.settings import Settings
from treeproc.common.storage import DataPath

References = Sequence[Sequence[str]]  # further references, each with a line for every example


@dataclass(frozen=True)
class GivenLines:
    """The lines of the files `references`, `more_references` and `sources`; None if a data set has them instead."""

    references: Sequence[str] | None = None
    more: References = ()
    sources: Sequence[str] | None = None


class EvaluateSettings(Settings):
    """Settings of evaluate.py: the split, the weights and the decoding."""

    split: str = Field("test", description="split of the data set to translate")
    data: DataPath | None = Field(None, description="another data set of the same vocabulary; unset, the data set of the run")
    checkpoint: str = Field(
        AVERAGED, coerce_numbers_to_str=True, description="'averaged', the number of a step, or the path of a checkpoint folder"
    )
    untrained: bool = Field(False, description="a baseline: score the weights before the first update, of the seed or of init")
    random_trees: bool = Field(False, description="a control: every sentence gets a random tree of another shape over its leaves")
    seed: int = Field(1, ge=0, description="seed of random_trees")
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="translate on the GPU")
    decoding: DecodingConfig = Field(DecodingConfig(), description="the search; other settings are as in the run")
    target_language: str | None = Field(
        None,
        pattern=r"^[a-z]{2,3}$",
        description="target language, such as de: tokenised BLEU then uses tokens of the Moses tokeniser, as papers do. Unset: "
        "tokens of sacrebleu's intl. Lines that came tokenised keep their tokens",
    )
    buckets: BucketConfig = BucketConfig()
    hypotheses: Annotated[Path | None, Effect.NONE] = Field(
        None, description="score this file, one line per reference, plain or compressed, instead of translating"
    )
    references: Annotated[Path | None, Effect.NONE] = Field(
        None, description="with hypotheses or --compare: a file of references, instead of those of a data set"
    )
    sources: Annotated[Path | None, Effect.NONE] = Field(
        None, description="with references: a file of the lines that were translated, which COMET reads"
    )
    more_references: list[Path] = Field(
        [],
        description="files of further references, plain or compressed, one line for each example of the split. BLEU, chrF, TER "
        "and BERTScore then use all references; COMET, scores of single lines and scores by length use only the first",
    )
    bertscore: BertScoreConfig = BertScoreConfig()
    comet: CometConfig = CometConfig()
    compare: Annotated[CompareConfig, Effect.NONE] = CompareConfig()

    def learned_metrics(self) -> LearnedMetrics:
        return LearnedMetrics(self.bertscore, self.comet, self.use_gpu)
