"""The names of tasks, and the settings that single tasks have."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from treeproc.common.settings import Settings, later_field

TaskName = Literal["translation", "classification", "relatedness", "masked_lm", "causal_lm"]
SplitWords = Literal["pieces", "node", "both"]


class ClassifierConfig(Settings):
    """Settings of a classifier: its supervision and its head. The number of classes is that of the data set."""

    supervision: Literal["all_phrases", "root"] = Field(
        "all_phrases",
        description="'all_phrases': learn the classes of all phrases. Tree models predict them at leaves and nodes; "
        "transformer and bilstm read each phrase as an example. 'root': learn the classes of whole examples",
    )
    pooling: Literal["own", "mean", "first"] = Field(
        "own",
        description="states from which the model predicts the class of an example. 'own': the root of tree models, the mean of "
        "the leaves of a transformer, the last states of both directions of a bilstm. 'mean': the mean of all. 'first': the "
        "first leaf",
    )
    split_words: SplitWords = Field(
        "pieces",
        description="where tree models learn the class of a word of several pieces: at its pieces, at the node above them, or at "
        "both places",
    )
    word_dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that training replaces a piece by the unknown piece (Iyyer et al., 2015)"
    )
    neutral_class: int | None = Field(
        None,
        ge=0,
        description="also score two classes: all below and all above this one, by their summed probabilities. This score leaves "
        "out examples of this class. 2 reads SST-5 as SST-2",
    )
    pair_hidden: PositiveInt = Field(50, description="pairs of sentences: width of the layer that compares the two")
    pair_features: Literal["symmetric", "ordered"] | None = later_field(
        None,
        description="pairs of sentences: what this layer reads. 'symmetric': product and distance of their two states, so their "
        "order does not count. 'ordered': these and both states (Mou et al., 2016), because entailment has a direction. null: "
        "'ordered' for classes, 'symmetric' for relatedness",
    )


class MaskedLMConfig(Settings):
    """Settings of masked language modelling. The defaults are those of BERT (Devlin et al., 2019)."""

    rate: float = Field(
        0.15, gt=0, le=1, description="share of the pieces of a text that the model predicts, rounded; at least one piece"
    )
    mask: float = Field(0.8, ge=0, le=1, description="share of the predicted pieces that are replaced by the mask")
    random: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the predicted pieces that are replaced by a random piece; the rest stay as they are",
    )

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.mask + self.random > 1:
            raise ValueError(f"mask + random must be at most 1, but is {self.mask + self.random:g}")
        return self
