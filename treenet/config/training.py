"""Settings of training runs and of scoring."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from treenet.config.models import ModelConfig
from treenet.config.tasks import ClassifierConfig, DecodingConfig, MaskedLMConfig, SamplingConfig, TaskName
from treeproc.common.hub import HubModel, model_place, pin
from treeproc.common.settings import Effect, Settings, is_below, is_sent_to_a_cluster, keys_with, later_field
from treeproc.common.storage import AnyPath, DataPath
from treeproc.shards.schema import WINDOW_ROWS

Beta = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=200)]
FileName = Annotated[str, StringConstraints(min_length=1)]
# Those besides TensorBoard are the files of `treenet/extras/loggers`.
_LOGGERS = Path(__file__).parents[1] / "extras" / "loggers"
LOGGER_NAMES = ("tensorboard", *sorted(path.stem for path in _LOGGERS.glob("[!_]*.py")))
LoggerName = Literal[LOGGER_NAMES]  # type: ignore[valid-type]  # names of files
Workers = Annotated[
    int,
    Effect.NONE,
    Field(
        ge=0,
        description="Ray Train workers; 0 trains in this process, without Ray. Unset: 1 in a submitted job and with RAY_ADDRESS, "
        "else 0",
    ),
]
RateFactor = Annotated[float, Field(ge=0, le=1000)]


def flatten(values: Mapping, prefix: str = "") -> dict[str, object]:
    """Return nested settings as dotted keys."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class OptimizerConfig(Settings):
    """Adam with decoupled weight decay; after warm-up the inverse square root schedule, or a linear one."""

    learning_rate: float = Field(7e-4, gt=0, description="peak learning rate, reached after warm-up")
    warmup_steps: PositiveInt = Field(4000, description="updates of linear warm-up from 1e-7")
    decay_steps: PositiveInt | None = Field(
        None, description="update at which the rate reaches 0, linearly from its peak; null: the rate falls as 1 / sqrt(update)"
    )
    adam_betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="Adam's betas")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    weight_decay: float = Field(
        1e-4, ge=0, description="decoupled weight decay of parameters of two or more dimensions: not of norms and most biases"
    )
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="label smoothing")
    clip_norm: float = later_field(
        0.0,
        ge=0,
        description="largest norm of the gradient: a larger gradient is scaled down to it; 0 is off",
    )
    r_drop: float = Field(
        0.0,
        ge=0,
        description="R-Drop (Liang et al., 2021): weight of the divergence between two passes with different dropout; 0 is off",
    )

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps must be more than warmup_steps = {self.warmup_steps}, but is {self.decay_steps}")
        return self


class CorpusConfig(Settings):
    """A corpus of the training split: one of its files."""

    file: FileName = Field(description="its source file, or the end of the file's path")
    weight: float = Field(1.0, gt=0, le=1000, description="how often each of its examples occurs in an epoch")


class BatchConfig(Settings):
    """The global batch. It depends on the data and these values, never on workers or model."""

    max_tokens: PositiveInt = Field(
        4096, description="size of an update over all workers: padded leaves or padded target pieces, the larger of the two"
    )
    budget_counts: Literal["leaves", "leaves_and_nodes"] = Field(
        "leaves",
        description="what max_tokens counts on the source side. 'leaves_and_nodes' is the rule of the released code; with it, "
        "other trees give other batches",
    )
    max_leaves: PositiveInt = Field(
        256, description="most leaves of a training example (of a pair: twice its longer sentence); longer ones are left out"
    )
    max_target_pieces: PositiveInt = Field(
        256, description="most target pieces of a training example; training leaves longer ones out"
    )
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of the training examples to use; larger shares contain smaller ones"
    )
    subset: Literal["fixed", "by_seed"] = later_field(
        "fixed",
        description="'fixed': all seeds train on the same share; 'by_seed': each seed draws its own share. All models get the "
        "same share, and larger shares contain smaller ones",
    )
    window_rows: PositiveInt = later_field(
        WINDOW_ROWS,
        description="training shuffles and batches consecutive shards in windows of so many rows, one window after the other. A "
        "smaller data set is one window. Another value makes other batches",
    )
    corpora: tuple[CorpusConfig, ...] = later_field(
        (),
        description="weights of the files of train, as {FILE: WEIGHT}. FILE is the source file in the data set's settings, or "
        "the end of its path; other files have weight 1. With weight 2.5, half of the examples of a file occur twice in an "
        "epoch and half of them three times, the same in every epoch; with subset: by_seed, each seed draws its own half",
    )
    tokens_per_device: Annotated[PositiveInt | None, Effect.NONE] = Field(
        None,
        description="largest micro-batch of a worker, in the units of max_tokens. A worker adds the gradients of its "
        "micro-batches; an update has max_tokens either way. null: one micro-batch, halved if memory runs out",
    )

    @field_validator("corpora", mode="before")
    @classmethod
    def _read_weights(cls, value: object) -> object:
        """Return {FILE: WEIGHT} as a list of corpora."""
        return [{"file": file, "weight": weight} for file, weight in value.items()] if isinstance(value, dict) else value


class WatchConfig(Settings):
    """Limits after which a training on Ray counts as hung. Waiting for nodes has none."""

    start_s: PositiveFloat | None = Field(
        900, description="seconds in which workers that have room must start; then new ones start. null: no limit"
    )
    update_s: PositiveFloat | None = Field(
        1200,
        description="seconds in which workers must make an update, or answer while they compile, validate or save; then new ones "
        "continue. Collectives give up after 900. null: no limit",
    )
    stop_s: PositiveFloat | None = Field(
        240,
        description="seconds from SIGTERM to the end; a training that hangs ends with its last checkpoint. null: no limit",
    )


class TrainConfig(Settings):
    """A training run, as written to RUN/config.yaml."""

    data: Annotated[DataPath, Effect.NONE] = Field(
        description="data set that tree-attention preprocess wrote: a folder, s3://..., gs://... or az://..."
    )
    task: TaskName = Field(
        "translation",
        description="the task. 'classification' reads examples, or pairs of them, with classes (see classifier). "
        "'relatedness' reads pairs of sentences with scores. 'masked_lm' predicts pieces of the source side (see masked_lm). "
        "'causal_lm' predicts each piece of the source side from those before it",
    )
    init: DataPath | None = later_field(
        None,
        description="run whose weights a new run starts from: its folder for the averaged model, or the folder of a checkpoint "
        "in it. Weights are matched by name and shape, rows of pieces and labels by piece and label",
    )
    freeze: tuple[Pattern, ...] = later_field(
        (),
        description="parameters that training leaves as they are, as patterns of names: encoder.layers.0.*, *.norm*. The shared "
        "table of pieces is encoder.embedding.weight",
    )
    # They may move: what they are of is recorded.
    frozen_states: Annotated[DataPath | None, Effect.NONE] = later_field(
        None,
        description="folder of states that `tree-attention frozen-states` computed, for a pretrained encoder that is frozen as a "
        "whole: training reads them instead of running the encoder",
    )
    lr_scale: dict[Pattern, RateFactor] = later_field(
        {},
        description="factors of the learning rate, as {pattern of parameter names: factor}; the first pattern that matches "
        "counts, and all other parameters have 1",
    )
    model: ModelConfig = ModelConfig()
    classifier: ClassifierConfig = ClassifierConfig()
    masked_lm: MaskedLMConfig = MaskedLMConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = later_field(SamplingConfig())
    decoding: Annotated[DecodingConfig, Effect.PROGRESS] = DecodingConfig()
    seed: int = Field(1, ge=0, lt=2**63, description="seed of initialisation, dropout and batch order")
    max_steps: Annotated[PositiveInt, Effect.PROGRESS] = Field(100_000, description="updates")
    validate_every: Annotated[PositiveInt, Effect.PROGRESS] = Field(1000, description="updates between validations")
    checkpoint_every: Annotated[PositiveInt, Effect.PROGRESS] = Field(1000, description="updates between checkpoints")
    keep_checkpoints: Annotated[PositiveInt, Effect.NONE] = Field(5, description="checkpoints kept on disk")
    valid_metric: str = later_field(
        "nll",
        description="translation: the score by which patience and average=best compare validations. 'nll', or a metric of "
        "sacrebleu by its name in scores.json, which then scores greedy translations of the validation split",
    )
    valid_metric_every: Annotated[PositiveInt, Effect.PROGRESS] = later_field(
        1,
        description="with a metric of sacrebleu: translate at every n-th validation, and at the last one",
    )
    average: Annotated[Literal["last", "best", "ema"], Effect.PROGRESS] = Field(
        "last",
        description="the trained model. 'last': the mean of the last checkpoints. 'best': the mean of the checkpoints with "
        "the best validation, which are then kept beside the latest one. 'ema': the moving average of ema_decay",
    )
    average_checkpoints: Annotated[PositiveInt, Effect.PROGRESS] = Field(5, description="checkpoints averaged at the end")
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of a moving average of the weights; validation then uses it, also where average is last or best, "
        "which take the mean of the weights themselves. 0: no average",
    )
    patience: Annotated[int, Effect.PROGRESS] = Field(
        0,
        ge=0,
        description="training ends after so many validations in a row without a better result; 0: train to max_steps",
    )
    max_skipped_updates: Annotated[PositiveInt, Effect.NONE] = Field(
        20, description="training stops with an error after so many updates in a row whose loss or gradient is not finite"
    )
    log_every: Annotated[PositiveInt, Effect.NONE] = Field(100, description="updates between metric lines")
    loggers: Annotated[tuple[LoggerName, ...], Effect.NONE] = later_field(
        ("tensorboard",),
        description=f"loggers that get the metrics too: {', '.join(LOGGER_NAMES)}. MLflow and W&B write to this machine, "
        "unless MLFLOW_TRACKING_URI or WANDB_MODE names another place",
    )
    workers: Workers = Field(default_factory=lambda: int(is_sent_to_a_cluster()))
    min_workers: Annotated[int, Effect.NONE] = Field(
        0, ge=0, description="fewest workers to train with while nodes are missing; 0: wait for all workers"
    )
    watch: Annotated[WatchConfig, Effect.NONE] = later_field(WatchConfig())
    loader_workers: Annotated[int | None, Effect.NONE] = Field(
        None,
        ge=0,
        le=64,
        description="number of processes that prepare a worker's batches; 0: a thread. null: 0 on CPUs, and up to 4 on GPUs, "
        "by the number of cores",
    )
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="one GPU a worker")
    precision: Literal["auto", "float32", "tf32", "bf16", "fp16"] = Field(
        "auto",
        description="precision of matrix products. 'bf16' and 'fp16' use autocast; some CPUs have bf16 too. 'tf32' rounds the "
        "inputs of float32 products on GPUs. 'auto': float32 on CPUs, bf16 on GPUs, fp16 on GPUs without bf16. A "
        "run keeps the precision that it began with",
    )
    gradient_sums: Literal["float32", "bf16"] = later_field(
        "float32",
        description="number format in which workers add their gradients; 'bf16' sends half the bytes, rounded",
    )
    shard_weights: Annotated[bool, Effect.NONE] = Field(
        False,
        description="each worker holds a part of weights, gradients and optimiser (FSDP2): for models that do not fit into one "
        "GPU. PyTorch does not compile such a model. No effect with fewer than two workers",
    )
    checkpoint_activations: Annotated[bool, Effect.NONE] = Field(
        False,
        description="keep only the inputs of Transformer layers, and compute the layers again in the backward pass: less memory, "
        "about a third more work, the same results. Other models do not change",
    )
    deterministic: Annotated[bool, Effect.NONE] = Field(
        False,
        description="use only kernels that give the same bits every time. Slower on GPUs; an operation without such a kernel "
        "raises an error",
    )
    compile: Annotated[bool, BeforeValidator(lambda value: False if value is None else value), Effect.NONE] = Field(
        False, description="compile the model with torch.compile; the first steps take minutes"
    )  # null in earlier runs

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

    @model_validator(mode="after")
    def _check_valid_metric(self) -> Self:
        if self.valid_metric == "nll":
            if self.valid_metric_every > 1:
                raise ValueError("valid_metric_every needs another valid_metric than 'nll'")
            return self
        if self.task != "translation":
            raise ValueError(f"valid_metric = '{self.valid_metric}' needs task = 'translation', but task is '{self.task}'")
        if self.shard_weights:
            raise ValueError("valid_metric must be nll where shard_weights is true: ranks translate batches one by one")
        return self

    @field_validator("precision")
    @classmethod
    def _choose_precision(cls, value: str, info: ValidationInfo) -> str:
        """Give `auto` its one meaning on CPUs; on GPUs it is found out where the run begins."""
        return "float32" if value == "auto" and not info.data.get("use_gpu") else value

    @model_validator(mode="after")
    def _check_loggers(self) -> Self:
        if len(set(self.loggers)) < len(self.loggers):
            raise ValueError(f"loggers must name each one once, but is {', '.join(self.loggers)}")
        return self

    @model_validator(mode="after")
    def _check_decoding(self) -> Self:
        self.decoding.check()
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.task != "translation" and not self.sampling.is_off:
            raise ValueError(f"sampling needs task = 'translation', but task is {self.task!r}")
        return self

    @model_validator(mode="after")
    def _check_recomputing(self) -> Self:
        if self.compile and self.checkpoint_activations:
            raise ValueError("compile must be false if checkpoint_activations is true: PyTorch cannot run a compiled layer twice")
        if self.compile and self.shard_weights:
            raise ValueError("compile must be false if shard_weights is true: the weights of a layer are not always there")
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.precision == "fp16" and not self.use_gpu:
            raise ValueError("precision = 'fp16' needs use_gpu = true; on CPUs choose 'bf16' or 'float32'")
        return self

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        last = self.optimizer.decay_steps
        if last is not None and self.max_steps > last:
            raise ValueError(
                f"max_steps must be at most optimizer.decay_steps = {last}, where the rate is 0, but is {self.max_steps}"
            )
        return self

    def with_absolute_paths(self, folder: Path | None = None) -> Self:
        """Return the settings with absolute paths of all that a run reads, for other working folders and other machines.

        Relative paths start at `folder`, by default the working folder.
        """

        def absolute(path: AnyPath | HubModel) -> AnyPath | HubModel:
            return (folder / path if folder and isinstance(path, Path) else path).resolve()

        own: dict[str, object] = {"data": absolute(self.data)}
        own |= {name: path and absolute(path) for name, path in (("init", self.init), ("frozen_states", self.frozen_states))}
        if (encoder := self.model.pretrained.folder) is not None:
            if isinstance(encoder, HubModel):  # which may be the path of a folder there
                encoder = model_place(str(encoder), folder)
            own["model"] = self._model_with(absolute(encoder))
        return self.model_copy(update=own)

    def with_pinned_encoder(self, out: AnyPath | None) -> Self:
        """Return the settings with the commit of an encoder of the hub.

        It is that of a run or study begun in `out`, else that whose tokenizer the data set has, else the newest.
        """
        key = "model.pretrained.folder"
        if (encoder := self.model.pretrained.folder) is None:
            return self
        begun = [(out, key)] if out is not None else []
        place = pin(key, encoder, *begun, (self.data, "subwords.tokenizer"))
        return self.model_copy(update={"model": self._model_with(place)})

    def _model_with(self, encoder: object) -> ModelConfig:
        pretrained = self.model.pretrained.model_copy(update={"folder": encoder})
        return self.model.model_copy(update={"pretrained": pretrained})

    @property
    def starts_from_weights(self) -> bool:
        """Return whether a new run starts from the weights of another run or of a pretrained encoder, in RUN/initial."""
        return self.init is not None or self.model.pretrained.folder is not None

    def lasting(self) -> dict[str, object]:
        """Return the settings that all commands on one run folder have in common, as dotted keys."""
        return {key: value for key, value in flatten(self.model_dump(mode="json")).items() if not is_below(key, MAY_CHANGE)}


# May change between two commands on one run folder: none of them changes what a step computes. The data set may move; its
# fingerprint may not change.
MAY_CHANGE = keys_with(TrainConfig, Effect.NONE, Effect.PROGRESS)
# Two runs that differ in these alone are the same experiment.
OPERATIONAL = keys_with(TrainConfig, Effect.NONE)
