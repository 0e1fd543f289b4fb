"""Settings of probing, without the code that it runs."""

from typing import Literal, get_args

from pydantic import Field, PositiveInt, field_validator

from treenet.runs.checkpoint import AVERAGED
from treenet.runs.run_folder import Checkpoint, OtherData
from treeproc.common.settings import Settings

TaskName = Literal["depth", "top_constituents", "length", "word_order", "pos_tag", "phrase", "deprel", "arc_depth"]

WORD_TASKS: tuple[TaskName, ...] = ("pos_tag", "phrase", "deprel", "arc_depth")

ARC_TASKS: tuple[TaskName, ...] = ("deprel", "arc_depth")

PROBE_TASKS: tuple[TaskName, ...] = get_args(TaskName)

BINS = 6  # classes for depths and lengths, of about equal numbers of examples

TOP_SEQUENCES = 19  # frequent sequences of top constituents with separate classes; all others share one

# Settings that choose what is computed. They do not change the result of a probe.
_CHOICES = {"tasks", "layer", "word_state", "data", "checkpoint"}


class ProbeSettings(Settings):
    """Settings of probing: the states and tasks to probe, and the training of the probes."""

    tasks: tuple[TaskName, ...] | None = Field(
        None,
        min_length=1,
        description="depth, top_constituents, length, word_order of sentences; pos_tag, phrase, deprel, arc_depth of words; "
        "unset, all that the data set has labels of",
    )
    layer: PositiveInt | Literal["last", "all"] = Field(
        "last", description="encoder layer whose states are probed, counted from 1; 'all' probes each and draws accuracy by layer"
    )
    word_state: Literal["first", "mean"] = Field(
        "first", description="state of a word: that of its first piece, or the mean over its pieces"
    )
    data: OtherData = None
    checkpoint: Checkpoint = AVERAGED
    use_gpu: bool = Field(False, description="encode and train the probes on the GPU")
    seed: int = Field(1, ge=0, lt=2**63, description="seed of chosen sentences and words, exchanged words and control labels")
    train_sentences: PositiveInt = Field(10_000, description="most sentences of train, to train the probes on")
    eval_sentences: PositiveInt = Field(2_000, description="most sentences of valid, and of test")
    train_words: PositiveInt = Field(30_000, description="most words of those sentences of train")
    eval_words: PositiveInt = Field(10_000, description="most words of valid, and of test")
    l2: tuple[float, ...] = Field(
        (1e-4, 1e-3, 1e-2, 1e-1), description="strengths of the L2 penalty to choose from by accuracy on valid"
    )
    max_iterations: PositiveInt = Field(100, description="most iterations of L-BFGS, for each strength")

    @field_validator("l2")
    @classmethod
    def _check_strengths(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or min(values) < 0:
            raise ValueError(f"must be numbers of at least 0, for example [0.001, 0.01], but is {list(values)}")
        return values

    def identity(self) -> dict:
        """Return the settings that results depend on, beside the model and the data."""
        return {**self.model_dump(mode="json", exclude=_CHOICES), "bins": BINS, "top_sequences": TOP_SEQUENCES}
