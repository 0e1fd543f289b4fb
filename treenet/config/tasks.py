"""The names of tasks, the settings that single tasks have, and those of other forms of the training examples."""

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


class SamplingConfig(Settings):
    """Other forms of the training examples in every epoch. Validation, scoring and translation read the data as they are."""

    bpe_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that a merge is skipped when a word is cut into pieces (BPE-dropout; Provilkov et al., 2020); "
        "0: the pieces of the data set",
    )
    sides: Literal["both", "source", "target"] = Field(
        "both", description="sides with bpe_dropout. 'source': the side that models read; 'target': the side that they write"
    )

    shuffle_distance: int = Field(
        0, ge=0, le=1000, description="places that a source word moves at most (Lample et al., 2018); its tree stays; 0: none"
    )
    word_dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a source word is left out, and its place in the tree"
    )
    word_mask: float = Field(0.0, ge=0, lt=1, description="probability that a source word becomes one unknown piece")

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        if self.sides != "both" and not self.bpe_dropout:
            raise ValueError(f"sides = '{self.sides}' needs bpe_dropout, for example 0.1, but it is 0")
        return self

    @property
    def has_noise(self) -> bool:
        """Return whether source words move, are left out or become unknown."""
        return bool(self.shuffle_distance or self.word_dropout or self.word_mask)

    @property
    def is_off(self) -> bool:
        """Return whether training reads the examples as they are."""
        return not (self.bpe_dropout or self.has_noise)
