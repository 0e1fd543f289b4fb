"""The names of tasks, the settings that single tasks have, and those of decoding and of other forms of the training examples."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from treeproc.common.settings import Effect, Settings, later_field

TaskName = Literal["translation", "classification", "relatedness", "masked_lm", "causal_lm"]
SplitWords = Literal["pieces", "node", "both"]


class ClassifierConfig(Settings):
    """Settings of a classifier: its supervision and its head. The number of classes is that of the data set."""

    supervision: Literal["all_phrases", "root"] = Field(
        "all_phrases",
        description="'all_phrases': learn the classes of all phrases. Tree models predict them at leaves and nodes; "
        "transformer and bilstm read each phrase as an example. 'root': learn the classes of whole examples",
    )
    pooling: Literal["own", "mean", "first", "attention"] = Field(
        "own",
        description="states from which the model predicts the class of an example. 'own': the root of tree models, the mean of "
        "the leaves of a transformer (of a linearized_transformer, of brackets too), the last states of a bilstm's directions, "
        "or [CLS] of pretrained. 'mean': the mean of all. 'first': the first leaf. 'attention': the mean of all, "
        "weighted by softmax(H q / sqrt(d_model)) with a learnt query q",
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
        "out examples of this class. The number is its place from 0 in the order of the data set, not its name: 2 is the third "
        "class, and reads SST-5 as SST-2",
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


class DecodingConfig(Settings):
    """Beam search by default; sampling and minimum Bayes risk by `method`."""

    method: Literal["beam", "sampling", "mbr"] = later_field(
        "beam",
        description="'beam': beam search. 'sampling': draw translations from the model. 'mbr': draw samples, and choose the one "
        "with the highest mean chrF against all of them (minimum Bayes risk)",
    )
    beam_size: PositiveInt = Field(
        5,
        le=1000,
        description="hypotheses of the beam for each sentence; with sampling, the samples drawn at a time. Koehn and Knowles "
        "(2017, W17-3204) searched with up to 1,000, and translations got worse long before",
    )
    length_penalty: float = Field(1.0, ge=0, description="exponent a of the length penalty; mbr does not read it")
    length_penalty_form: Literal["length", "gnmt"] = Field(
        "length",
        description="'length': score / length^a, as in the paper; 'gnmt': score / ((5 + length) / 6)^a. The length counts EOS",
    )
    coverage_penalty: float = later_field(
        0.0,
        ge=0,
        description="beam search: weight beta of the coverage penalty (Wu et al., 2016, equation 14), which orders the "
        "hypotheses of the beam",
    )
    max_length_factor: float = Field(
        1.5, gt=0, le=1000, description="a hypothesis has at most factor * leaves + max_length_offset pieces"
    )
    max_length_offset: PositiveInt = Field(10, description="see max_length_factor")
    min_length: int = Field(0, ge=0, description="a hypothesis has at least this many pieces, unless its maximum is lower")
    no_repeat_ngram: int = later_field(
        0, ge=0, description="a translation contains no n-gram of this number of pieces twice; 0: no such rule"
    )
    diversity_groups: PositiveInt = later_field(
        1, description="diverse beam search (Vijayakumar et al., 2018): groups that the beam is divided into; 1 is plain search"
    )
    diversity_strength: float = Field(
        0.5,
        ge=0,
        le=1e6,
        description="diverse beam search: penalty of a piece for each hypothesis of earlier groups that took it at the same step",
    )
    seed: int = Field(1, ge=0, lt=2**63, description="sampling: seed; a sample depends on it, the line, and its own number")
    temperature: float = Field(1.0, ge=0.01, description="sampling: divisor of the logits; below 1 prefers probable pieces")
    top_k: int = Field(0, ge=0, description="sampling: draw from this number of most probable pieces; 0: from all")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sampling: draw from the fewest most probable pieces with this share of what top_k leaves",
    )
    mbr_samples: PositiveInt = Field(32, le=256, description="mbr: samples for each line")
    max_tokens: Annotated[PositiveInt, Effect.NONE] = Field(4096, description="padded source leaves of one search batch")

    @property
    def most_translations(self) -> int | None:
        """The largest number of translations of a line; None for no limit."""
        return {"beam": self.beam_size, "mbr": self.mbr_samples}.get(self.method)

    def check(self) -> None:
        """Raise ValueError if settings do not go together, or if the method would not read one of them.

        Settings of a command are checked after they were added to those of the run.
        """
        for name in self._unread():
            if getattr(self, name) != _DEFAULTS[name]:
                wanted = " or ".join(method for method, names in _READ.items() if name in names)
                raise ValueError(f"{name} needs method = {wanted}, but the method is {self.method}")
        if self.diversity_groups == 1 and self.diversity_strength != _DEFAULTS["diversity_strength"]:
            raise ValueError("diversity_strength needs diversity_groups of at least 2, but is 1")
        if self.beam_size % self.diversity_groups:
            raise ValueError(
                f"beam_size must be a multiple of diversity_groups = {self.diversity_groups}, but is {self.beam_size}"
            )

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_read(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Leave out defaults that the method does not read, and those that earlier runs do not record either.

        With `exclude_unset`, all settings that the user set stay: they override those of the run.
        """
        if info.exclude_unset:
            names = [name for name in _DEFAULTS if name in self.model_fields_set and name not in (info.exclude or ())]
            return {name: getattr(self, name) for name in names}
        idle = self._unread() | ({"diversity_strength"} if self.diversity_groups == 1 else set())
        return {name: value for name, value in dump(self).items() if name not in idle or value != _DEFAULTS[name]}

    def _unread(self) -> set[str]:
        return set(_OF_METHODS) - _READ[self.method]


_SAMPLING = {"seed", "temperature", "top_k", "top_p"}
# The newer settings that each method reads.
_READ = {
    "beam": {"coverage_penalty", "diversity_groups", "diversity_strength"},
    "sampling": _SAMPLING,
    "mbr": {*_SAMPLING, "mbr_samples"},
}
_OF_METHODS = tuple(name for name in DecodingConfig.model_fields if any(name in names for names in _READ.values()))
_DEFAULTS = {name: field.default for name, field in DecodingConfig.model_fields.items()}
# What a record without these settings was made with.
UNRECORDED = {
    name: field.default for name, field in DecodingConfig.model_fields.items() if field.exclude_if or name in _OF_METHODS
}
