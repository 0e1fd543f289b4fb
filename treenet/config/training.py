"""Settings of training runs, of scoring and of search."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from treenet.config.models import ModelConfig
from treeproc.common.setting_effects import Effect, is_below, keys_with
from treeproc.common.settings import Settings
from treeproc.common.storage import DataPath

Beta = Annotated[float, Field(ge=0, lt=1)]
SplitWords = Literal["pieces", "node", "both"]


def flatten(values: Mapping, prefix: str = "") -> dict[str, object]:
    """Nested settings as dotted keys."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _without(values: dict, **defaults: object) -> dict:
    """Settings without those that have these values."""
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


class OptimizerConfig(Settings):
    """Adam with decoupled weight decay; after warm-up the inverse square root schedule, or a linear one."""

    learning_rate: float = Field(7e-4, gt=0, description="peak learning rate, reached after warm-up")
    warmup_steps: PositiveInt = Field(4000, description="updates of linear warm-up from 1e-7")
    decay_steps: PositiveInt | None = Field(
        None, description="update at which the rate has fallen to 0, linearly from its peak; null falls as 1 / sqrt(update)"
    )
    adam_betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="Adam's betas")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    weight_decay: float = Field(1e-4, ge=0, description="decoupled weight decay, of all but biases and layer norms")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="label smoothing")
    clip_norm: float = Field(0.0, ge=0, description="a gradient with a larger norm is made shorter, to this norm; 0 is off")
    r_drop: float = Field(
        0.0, ge=0, description="alpha of R-Drop: two passes with different dropout, and the weight of their divergence; 0 is off"
    )

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps must be more than warmup_steps = {self.warmup_steps}, but is {self.decay_steps}")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_is_as_ever(self, dump: SerializerFunctionWrapHandler) -> dict:
        """The settings without `clip_norm: 0`, which runs made before that setting do not record either."""
        return _without(dump(self), clip_norm=0.0)


class BatchConfig(Settings):
    """The global batch. It depends on the data and these values, never on workers or model."""

    max_tokens: PositiveInt = Field(
        4096, description="padded leaves or target pieces of one update over all workers, the larger of both"
    )
    budget_counts: Literal["leaves", "leaves_and_nodes"] = Field(
        "leaves", description="'leaves_and_nodes' is the released code's; batches differ by tree"
    )
    max_leaves: PositiveInt = Field(256, description="training examples with more leaves are left out")
    max_target_pieces: PositiveInt = Field(256, description="training examples with more target pieces are left out")
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of the training examples to use; smaller shares nest in larger ones"
    )
    subset: Literal["fixed", "by_seed"] = Field(
        "fixed",
        description="examples of a share: the same for all seeds, or others with each seed, but for all models alike; "
        "shares nest within a seed",
    )
    tokens_per_device: Annotated[PositiveInt | None, Effect.NONE] = Field(
        None,
        description="a worker's part of max_tokens is computed in micro-batches of at most so many, and their gradients are "
        "added up; null takes the part at once. An update has max_tokens either way",
    )

    @model_serializer(mode="wrap")
    def _leave_out_what_is_as_ever(self, dump: SerializerFunctionWrapHandler) -> dict:
        """The settings without `subset: fixed`, which runs made before that setting do not record either."""
        return _without(dump(self), subset="fixed")


class DecodingConfig(Settings):
    """Beam search."""

    beam_size: PositiveInt = Field(5, description="hypotheses kept a sentence")
    length_penalty: float = Field(1.0, ge=0, description="exponent a of the length penalty")
    length_penalty_form: Literal["length", "gnmt"] = Field(
        "length", description="score / length^a (the paper's), or score / ((5 + length) / 6)^a; length counts EOS"
    )
    max_length_factor: float = Field(
        1.5, gt=0, le=1000, description="a hypothesis has at most factor * leaves + max_length_offset pieces"
    )
    max_length_offset: PositiveInt = Field(10, description="see max_length_factor")
    min_length: int = Field(0, ge=0, description="a hypothesis has at least this many pieces, unless its maximum is lower")
    max_tokens: Annotated[PositiveInt, Effect.NONE] = Field(4096, description="padded source leaves of one search batch")


class ClassifierConfig(Settings):
    """Settings of a classifier: its supervision and its head. The number of classes is that of the data set."""

    supervision: Literal["all_phrases", "root"] = Field(
        "all_phrases",
        description="the classes that are learned: of all phrases that have one (tree models predict them at the leaves and "
        "nodes of the tree, transformer and bilstm from the phrase as an example of its own), or of whole examples alone",
    )
    pooling: Literal["own", "mean", "first"] = Field(
        "own",
        description="source of an example's class: 'own' is the root, or dummy root, of tree models, the mean of the "
        "leaves of a transformer and the last states of both directions of a bilstm; or the mean of all, or the first leaf",
    )
    split_words: SplitWords = Field(
        "pieces",
        description="class of a word of several pieces in tree models: at its pieces, at the node over them, or both",
    )
    word_dropout: float = Field(
        0.0, ge=0, lt=1, description="probability with which a piece is read as an unknown one in training (Iyyer et al., 2015)"
    )
    neutral_class: int | None = Field(
        None,
        ge=0,
        description="classes below and above this one are also scored as two, by their summed probabilities, over the examples "
        "of other classes: 2 reads SST-5 as SST-2",
    )
    pair_hidden: PositiveInt = Field(50, description="relatedness: width of the layer that compares two sentences")


class MaskedLMConfig(Settings):
    """Settings of masked language modelling. The defaults are those of BERT (Devlin et al., 2019)."""

    rate: float = Field(0.15, gt=0, le=1, description="share of a text's pieces to be predicted, rounded; at least one")
    mask: float = Field(0.8, ge=0, le=1, description="share of them that the model sees as the mask")
    random: float = Field(0.1, ge=0, le=1, description="share of them that it sees as any piece; the rest it sees as they are")

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.mask + self.random > 1:
            raise ValueError(f"mask + random must be at most 1, but is {self.mask + self.random:g}")
        return self


class TrainConfig(Settings):
    """A training run, as written to RUN/config.yaml."""

    data: Annotated[DataPath, Effect.NONE] = Field(
        description="data set that workflows/preprocess.py wrote: a folder, s3://... or gs://..."
    )
    task: Literal["translation", "classification", "relatedness", "masked_lm"] = Field(
        "translation",
        description="the task; 'classification' reads data sets with classes, see classifier; 'relatedness' pairs of "
        "sentences with scores, whose encoder is a classifier's; 'masked_lm' predicts pieces of the source side alone, see "
        "masked_lm",
    )
    model: ModelConfig = ModelConfig()
    classifier: ClassifierConfig = ClassifierConfig()
    masked_lm: MaskedLMConfig = MaskedLMConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    decoding: Annotated[DecodingConfig, Effect.PROGRESS] = DecodingConfig()
    seed: int = Field(1, ge=0, lt=2**63, description="seed of initialisation, dropout and batch order")
    max_steps: Annotated[PositiveInt, Effect.PROGRESS] = Field(100_000, description="updates")
    validate_every: Annotated[PositiveInt, Effect.PROGRESS] = Field(1000, description="updates between validations")
    checkpoint_every: Annotated[PositiveInt, Effect.PROGRESS] = Field(1000, description="updates between checkpoints")
    keep_checkpoints: Annotated[PositiveInt, Effect.NONE] = Field(5, description="checkpoints kept on disk")
    average: Annotated[Literal["last", "best", "ema"], Effect.PROGRESS] = Field(
        "last",
        description="the trained model: the mean of the last checkpoints, the mean of those with the best validation, "
        "by nll, accuracy or correlation (which are then the ones that are kept, beside the latest), or the moving average of "
        "ema_decay",
    )
    average_checkpoints: Annotated[PositiveInt, Effect.PROGRESS] = Field(5, description="checkpoints averaged at the end")
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="decay of a moving average of the weights, which is then what is validated; 0 keeps none"
    )
    patience: Annotated[int, Effect.PROGRESS] = Field(
        0,
        ge=0,
        description="validations in a row that are not better after which training is finished; 0 goes to max_steps",
    )
    max_skipped_updates: Annotated[PositiveInt, Effect.NONE] = Field(
        20, description="updates in a row that are not finite, and so skipped, after which training gives up"
    )
    log_every: Annotated[PositiveInt, Effect.NONE] = Field(100, description="updates between metric lines")
    workers: Annotated[int, Effect.NONE] = Field(1, ge=0, description="Ray Train workers; 0 trains in this process, without Ray")
    min_workers: Annotated[int, Effect.NONE] = Field(
        0, ge=0, description="with nodes missing, train with as few workers as this until they come; 0 waits for all workers"
    )
    loader_workers: Annotated[int | None, Effect.NONE] = Field(
        None,
        ge=0,
        le=64,
        description="processes that prepare a worker's batches; 0 is a thread; null is 0 on CPUs, and up to 4 on GPUs, by the "
        "number of cores",
    )
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="one GPU a worker")
    precision: Literal["auto", "float32", "tf32", "bf16", "fp16"] = Field(
        "auto",
        description="'bf16' and 'fp16' compute products in half precision, under autocast, bf16 on CPUs too that have it; 'tf32' "
        "rounds what float32 products read, on GPUs; 'auto' is float32 on CPUs, bf16 on GPUs, and fp16 on GPUs without it; a "
        "run keeps what it began with",
    )
    gradient_sums: Literal["float32", "bf16"] = Field(
        "float32", description="numbers that workers add their gradients in; 'bf16' sends half the bytes and rounds"
    )
    shard_weights: Annotated[bool, Effect.NONE] = Field(
        False,
        description="every worker holds a part of weights, gradient and optimiser (FSDP2), for models that do not fit into one "
        "GPU; the model is not compiled then",
    )
    checkpoint_activations: Annotated[bool, Effect.NONE] = Field(
        False,
        description="Transformer layers keep their input alone, and are computed again for backward: less memory, about a "
        "third more work, the same results",
    )
    deterministic: Annotated[bool, Effect.NONE] = Field(
        False, description="kernels that give the same bits every time, on GPUs too, where others are faster; those without raise"
    )
    compile: Annotated[bool | None, Effect.NONE] = Field(
        None,
        description="compile the model with torch.compile; the first steps take minutes; null is true on GPUs, unless "
        "checkpoint_activations or shard_weights is, and false on CPUs",
    )

    @model_validator(mode="after")
    def _check_checkpoints(self) -> Self:
        if self.average_checkpoints > self.keep_checkpoints:
            raise ValueError(
                f"average_checkpoints must be at most keep_checkpoints = {self.keep_checkpoints}, "
                f"but is {self.average_checkpoints}"
            )
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers must be at most workers = {self.workers}, but is {self.min_workers}")
        if self.average == "ema" and not self.ema_decay:
            raise ValueError("average = 'ema' needs ema_decay, for example 0.999, but it is 0")
        return self

    @model_validator(mode="before")
    @classmethod
    def _choose_precision(cls, values: Any) -> Any:
        """On CPUs `auto` has one meaning; on GPUs it is found out where the run begins."""
        if isinstance(values, dict) and not values.get("use_gpu") and values.get("precision", "auto") == "auto":
            return {**values, "precision": "float32"}
        return values

    @model_validator(mode="after")
    def _check_recomputing(self) -> Self:
        if self.compile and self.checkpoint_activations:
            raise ValueError("compile must be false where checkpoint_activations is true: a compiled layer cannot be run again")
        if self.compile and self.shard_weights:
            raise ValueError("compile must be false where shard_weights is true: the weights of a layer come and go")
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.precision == "fp16" and not self.use_gpu:
            raise ValueError("precision = 'fp16' needs use_gpu = true; on CPUs 'bf16' and 'float32' are computed")
        return self

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        last = self.optimizer.decay_steps
        if last is not None and self.max_steps > last:
            raise ValueError(
                f"max_steps must be at most optimizer.decay_steps = {last}, where the rate is 0, but is {self.max_steps}"
            )
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_is_as_ever(self, dump: SerializerFunctionWrapHandler) -> dict:
        """The settings without `gradient_sums: float32`, which runs made before that setting do not record either."""
        return _without(dump(self), gradient_sums="float32")

    def lasting(self) -> dict[str, object]:
        """The settings that all commands on one run folder have in common, as dotted keys."""
        return {key: value for key, value in flatten(self.model_dump(mode="json")).items() if not is_below(key, MAY_CHANGE)}


# May change between two commands on one run folder: none of them changes what a step computes. The data set may move; its
# fingerprint may not change.
MAY_CHANGE = keys_with(TrainConfig, Effect.NONE, Effect.PROGRESS)
# Of two runs that differ in these alone, both are the same experiment.
OPERATIONAL = keys_with(TrainConfig, Effect.NONE)
