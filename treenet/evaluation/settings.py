"""Settings of scoring and of classifying lines, without the code that they run."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from treenet.config import DecodingConfig
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.run_folder import Checkpoint, OtherData
from treenet.translation.settings import LineSettings
from treeproc.common.errors import quoted
from treeproc.common.hub import ModelPlace
from treeproc.common.settings import Effect, Settings, later_field
from treeproc.common.storage import DataPath

PYTHON = "TREE_ATTENTION_COMET_PYTHON"

INSTALL = "python3 -m venv COMET && COMET/bin/pip install unbabel-comet 'setuptools<81'"


TargetLanguage = Annotated[str | None, Field(pattern=r"^[a-z]{2,3}$")]


class BertScoreConfig(Settings):
    """Settings of BERTScore."""

    model: ModelPlace | None = Field(
        None,
        description="folder of an encoder in the format of transformers, or its name on the hub of Hugging Face, such as "
        "FacebookAI/roberta-large: evaluate and --compare then compute BERTScore",
    )
    layer: PositiveInt | None = Field(
        None,
        description="the layer whose states are compared, from 1. The authors chose 17 for roberta-large and xlm-roberta-large, "
        "9 for bert-base-uncased, bert-base-multilingual-cased and xlm-roberta-base",
    )
    idf: bool = Field(False, description="weight tokens by their inverse document frequency in the references")
    batch_tokens: Annotated[PositiveInt, Effect.NONE] = Field(8192, description="padded tokens of a batch")

    @model_validator(mode="after")
    def _check_layer(self) -> Self:
        if self.model is not None and self.layer is None:
            raise ValueError("layer: must be a number with bertscore.model; 17 is usual for large encoders, 9 for base ones")
        return self


class CometConfig(Settings):
    """Settings of COMET."""

    model: Path | None = Field(
        None,
        description="folder of a COMET model, with hparams.yaml and checkpoints/model.ckpt, such as a copy of "
        "Unbabel/wmt22-comet-da: evaluate and --compare then compute COMET",
    )
    encoder: ModelPlace | None = Field(
        None,
        description="folder with config.json and the tokeniser of the model's encoder, or its name on the hub, such as "
        "FacebookAI/xlm-roberta-large. Unset, the cache of the hub must have the encoder that hparams.yaml names",
    )
    python: Annotated[Path | None, Effect.NONE] = Field(
        None, description=f"Python of the environment that has COMET; unset, that in ${PYTHON}. To make one: {INSTALL}"
    )
    batch_size: Annotated[PositiveInt, Effect.NONE] = Field(16, description="sentences of a batch")


class CompareConfig(Settings):
    """Settings of --compare."""

    num: int = Field(10, ge=0, description="number of the largest wins, and of the largest losses, to show")
    samples: PositiveInt = Field(1000, description="samples of the paired bootstrap")


class BucketConfig(Settings):
    """The upper ends of buckets, included. Values above the last one form another bucket."""

    words: tuple[int, ...] = Field(
        (10, 20, 30, 40, 50, 60), description="upper ends of the buckets by length of the source, in words"
    )
    depth: tuple[int, ...] = Field((4, 8, 12, 16, 20), description="upper ends of the buckets by depth of the source's tree")
    parse_score: tuple[float, ...] = later_field(
        (-0.06, -0.03, -0.02, -0.01, -0.005),
        description="upper ends of the buckets by `parse_score` of the source, if the data set has it (parser.scores: true)",
    )

    @field_validator("parse_score")
    @classmethod
    def _check_rising(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or list(values) != sorted(set(values)) or values[-1] >= 0:
            raise ValueError(f"must be ascending numbers below 0, for example [-0.06, -0.02], but is {list(values)}")
        return values

    @field_validator("words", "depth")
    @classmethod
    def _check_ascending(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if not values or list(values) != sorted(set(values)) or values[0] < 0:
            raise ValueError(f"must be ascending numbers, for example [10, 20], but is {list(values)}")
        return values


class EvaluateSettings(Settings):
    """Settings of evaluate.py: the split, the weights and the decoding."""

    split: str = Field("test", description="split of the data set to translate")
    data: OtherData = None
    input: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="for classifiers: a new file in the format of the run's data set, with its classes. The command prints its "
        "scores, and keeps none",
    )
    checkpoint: Checkpoint = AVERAGED
    untrained: bool = Field(False, description="a baseline: score the weights before the first update, of the seed or of init")
    random_trees: bool = Field(False, description="a control: every sentence gets a random tree of another shape over its leaves")
    seed: int = Field(1, ge=0, description="seed of random_trees")
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="translate on the GPU")
    decoding: DecodingConfig = Field(DecodingConfig(), description="the search; what is not set here is as in the run")
    target_language: TargetLanguage = Field(
        None,
        description="target language, such as de: tokenised BLEU then uses tokens of the Moses tokeniser, as papers do; for zh, "
        "sacrebleu's, for ja, MeCab's words (sacrebleu's ja-mecab), and for km, lo, my and th, characters. Unset: tokens of "
        "sacrebleu's intl. Lines that came tokenised keep their tokens",
    )
    buckets: BucketConfig = BucketConfig()
    hypotheses: Path | None = Field(
        None, description="score this file, one line per reference, plain or compressed, instead of translating"
    )
    references: Path | None = Field(
        None, description="with hypotheses or --compare: a file of references, instead of those of a data set"
    )
    sources: Path | None = Field(None, description="with references: a file of the lines that were translated, which COMET reads")
    more_references: list[Path] = Field(
        [],
        description="files of further references, plain or compressed, one line for each example of the split. BLEU, chrF, TER "
        "and BERTScore then use all references. COMET, and scores of single lines or by length, depth and tag use only the first",
    )
    bertscore: BertScoreConfig = BertScoreConfig()
    comet: CometConfig = CometConfig()
    compare: Annotated[CompareConfig, Effect.NONE] = CompareConfig()

    @model_validator(mode="after")
    def _of_what_is_scored(self) -> Self:
        if self.untrained and self.checkpoint != AVERAGED:
            raise ValueError("checkpoint: untrained weights are those before the first update; leave one of the two out")
        if self.seed != 1 and not self.random_trees:
            raise ValueError("seed: is of random_trees; leave it out")
        for name, metric in (("bertscore", self.bertscore), ("comet", self.comet)):
            if metric.model is None and metric != type(metric)():
                raise ValueError(f"{name}: needs {name}.model; give it, or leave {name} out")
        return self


class ClassifySettings(Settings):
    """Settings of scoring a classifier: the split and the model."""

    split: str = Field("test", description="split of the data set to classify")
    data: OtherData = None
    checkpoint: str = Field(
        AVERAGED,
        coerce_numbers_to_str=True,
        description="'averaged', 'last', the number of a step, or the path of a checkpoint folder",
    )
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="classify on the GPU")


class ClassifyLinesSettings(LineSettings):
    """Settings of classify.py: input, model and output."""

    checkpoint: Checkpoint = AVERAGED
    scores: bool = Field(False, description="write the probability of the class before its name")
    phrases: bool = Field(
        False, description="with json_lines: the classes of phrases too, for models that learned them (supervision: all_phrases)"
    )

    @property
    def checkpoints(self) -> list[str]:
        return [self.checkpoint]


class PairsConfig(Settings):
    """Minimal pairs of any files."""

    files: tuple[Path, ...] = Field(
        (),
        description="score minimal pairs: JSON Lines, or tables with a header (.tsv, .csv), also in folders and archives; or "
        "Penn Treebank trees: 1 and 2 are a pair, 3 and 4 the next, the good sentence first",
    )
    good: str = Field("good", description="name of the column, or key, with the good sentence")
    bad: str = Field("bad", description="name of the column, or key, with the bad sentence")
    by: tuple[str, ...] = Field((), description="columns or keys with groups of pairs; the paradigm comes first")

    @model_validator(mode="after")
    def _columns_that_differ(self) -> Self:
        if self.good == self.bad:
            raise ValueError(f"good and bad must be two columns, but both are {quoted(self.good)}")
        return self


class PairsInput(Settings):
    """The minimal pairs that a language model is scored on."""

    blimp: Path | None = later_field(
        None, description="score minimal pairs: a folder or zip archive of BLiMP, or of pairs in its format"
    )
    pairs: PairsConfig = later_field(PairsConfig())

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.blimp and self.pairs.files:
            raise ValueError("pairs.files: leave it out, or leave blimp out; score them one after the other")
        if not self.pairs.files and self.pairs != PairsConfig():
            raise ValueError("pairs: needs pairs.files; give them, or leave pairs out (BLiMP has its own columns)")
        return self


class TreeBeamConfig(Settings):
    """Settings of the search for the trees of a sentence."""

    actions: PositiveInt = Field(100, description="partial trees that are kept after each action between two words")
    words: PositiveInt = Field(10, description="partial trees that are kept after each word")
    fast_track: int = Field(
        1, ge=0, description="partial trees that reach the next word although `actions` better ones are there"
    )
    max_depth: PositiveInt = Field(50, description="most nodes that are open at once; the sum has no deeper tree")
    max_opens: PositiveInt = Field(8, description="most nodes that open between two words; the sum has no tree with more")


class ScoreLMSettings(PairsInput):
    """Settings of scoring a language model."""

    split: str = Field("test", description="split of the data set")
    every: PositiveInt = Field(1, description="score only every n-th minimal pair, from the first on")
    data: OtherData = None
    checkpoint: Checkpoint = AVERAGED
    trees: Literal["given", "beam"] = Field(
        "given",
        description="what a grammar scores: sentence and given tree; or the sentence alone, as the sum over the trees of a beam",
    )
    beam: TreeBeamConfig = TreeBeamConfig()
    surprisal: Path | None = Field(
        None, description="write the surprisal of every word of a file of text, one sentence a line; words stand between blanks"
    )
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="score on the GPU")

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        pairs = self.blimp or self.pairs.files
        if "split" in self.model_fields_set and (pairs or self.surprisal):
            raise ValueError("split: is of the data set, but this command reads other sentences; leave it out")
        if self.surprisal and pairs:
            raise ValueError("surprisal: leave it out, or leave blimp and pairs out; score them one after the other")
        if self.every > 1 and not pairs:
            raise ValueError("every: leave it out, or give blimp or pairs too; it takes a part of them")
        if self.beam != TreeBeamConfig() and self.trees != "beam":
            raise ValueError("beam: leave it out, or set trees=beam")
        return self


class ParsingConfig(Settings):
    """Settings of parsing from the link probabilities of the layers. The defaults are those of the released code."""

    start_layer: int | None = Field(
        None, ge=0, description="encoder layer, counted from 0, that cuts whole sentences; null: the last one"
    )
    min_layer: int = Field(2, ge=0, description="the lowest layer that the parser reads")
    split_threshold: float = Field(
        0.8, ge=0, le=1, description="if the weakest link of a span is stronger, the layer below decides"
    )
    descend_threshold: float = Field(
        0.7, ge=0, le=1, description="if the weakest link of a part is stronger, the layer below cuts it; 0: it cuts all parts"
    )


class ParseSettings(Settings):
    """Settings of unsupervised parsing: the sentences, the model and the scoring."""

    split: str = Field("test", description="split of the data set to parse")
    data: OtherData = None
    checkpoint: Checkpoint = AVERAGED
    treebank: tuple[Path, ...] = Field(
        (), description="instead of a split: files, folders or archives of Penn Treebank trees, encoded with the run's vocabulary"
    )
    parsing: ParsingConfig = ParsingConfig()
    # Bracketed trees have `$_` or `$*LRB*` for the German tag `$(`.
    punctuation: tuple[str, ...] = Field(
        (",", ".", ":", "``", "''", "-LRB-", "-RRB-", "$", "#", "PUNCT", "$,", "$.", "$_", "$*LRB*", "PU"),
        description="remove words with these tags from both trees before the comparison",
    )
    max_words: PositiveInt | None = Field(
        None, description="score only sentences of at most this many words without punctuation; 10 gives WSJ10"
    )
    seed: int = Field(1, ge=0, description="seed of the random trees beside the model's")
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="parse on the GPU")

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if self.treebank and "split" in self.model_fields_set:
            raise ValueError("split: is of the data set, but treebank gives other sentences; leave it out")
        return self
