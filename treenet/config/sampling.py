"""Settings of other forms of the training examples: pieces drawn anew, and noise on words."""

from typing import Literal, Self

from pydantic import Field, model_validator

from treeproc.common.settings import Settings


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
