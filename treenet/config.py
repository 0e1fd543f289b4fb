"""Settings of models and training runs. An ablation is a value here, never a class."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from treeproc.settings import Settings
from treeproc.storage import DataPath


class TreeAttentionConfig(Settings):
    """Tree attention of the paper's section 4. The defaults are the paper's rules."""

    accumulation_rule: Literal["paper", "released"] = Field(
        "paper", description="'released' divides a branch by its nodes without the leaf and counts depth from the root"
    )
    accumulate_on: Literal["value", "key", "scores"] = Field(
        "value", description="what hierarchical accumulation is applied to (appendix 7.3)"
    )
    leaf_weights: Literal["shared", "per_head"] = Field(
        "shared", description="w of eq 7: one scalar a leaf, or one a leaf and head"
    )
    hierarchical_embeddings: bool = Field(True, description="eqs 9-10; false is Table 3's -HierEmb")
    subtree_mask: bool = Field(True, description="eq 11; false is Table 3's -SubMask")
    vertical_rows: PositiveInt = Field(100, description="rows of the vertical embedding table")
    horizontal_rows: PositiveInt = Field(100, description="rows of the horizontal embedding table")


RecurrentCell = Literal["on_lstm", "lstm"]
PHRASE_LEVELS = 6  # levels of constituency trees that batches are prepared for
NGram = Annotated[int, Field(ge=2)]
PhraseLevel = Annotated[int, Field(ge=1, le=PHRASE_LEVELS)]


class HybridConfig(Settings):
    """Recurrent layers below the self-attention layers of the encoder (Hao et al., 2019, arXiv 1909.01562)."""

    num_recurrent_layers: PositiveInt | None = Field(
        None, description="how many of num_encoder_layers are recurrent, the lowest ones; null is half of them"
    )
    cell: RecurrentCell = Field("on_lstm", description="'lstm' is the plain LSTM")
    chunk_size: PositiveInt = Field(8, description="neurons that share the master gates of an ON-LSTM; divides d_model")
    short_cut: bool = Field(True, description="the memory is the sum of both encoders, and not the upper one alone")


class PhraseConfig(Settings):
    """Multi-granularity self-attention (Hao et al., 2019, arXiv 1909.02222): heads of the encoder that attend to phrases."""

    ngrams: tuple[NGram, ...] = Field((2, 3, 4), description="a head for the n-grams of each of these sizes")
    levels: tuple[PhraseLevel, ...] = Field(
        (1, 2), description="a head for the phrases at each of these levels of the tree; level 1 is what the root consists of"
    )
    num_layers: PositiveInt | None = Field(
        None, description="how many of num_encoder_layers have such heads, the lowest ones; null is half of them"
    )
    composition: Literal["max_pool", "convolution", "lstm", "attention"] = Field(
        "max_pool", description="what makes a vector of the words of a phrase"
    )
    interaction: Literal[RecurrentCell, "none"] = Field("on_lstm", description="what runs over the phrases of a sentence")
    chunk_size: PositiveInt = Field(8, description="neurons that share the master gates of an ON-LSTM; divides the head's width")
    tag_loss: float = Field(1.0, ge=0, description="weight of the loss of phrase labels; 0 is off")


KernelSizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class ConvolutionConfig(Settings):
    """Lightweight and dynamic convolution (Wu et al., 2019). The defaults are the paper's for WMT."""

    encoder_kernels: KernelSizes = Field(
        (3, 7, 15, 31), description="kernel size of each encoder layer, lowest first; layers above the last have the last's"
    )
    decoder_kernels: KernelSizes = Field((3, 7, 15, 31), description="kernel size of each decoder layer, in the same way")
    gated: bool = Field(True, description="a GLU after the input projection; the paper's IWSLT models have none")
    weight_dropout: float = Field(0.1, ge=0, lt=1, description="dropout of kernel weights after their softmax (DropConnect)")


class ConvS2SConfig(Settings):
    """Convolutional sequence to sequence learning (Gehring et al., 2017); all widths are d_model."""

    encoder_kernel: PositiveInt = Field(3, description="kernel size of the encoder layers")
    decoder_kernel: PositiveInt = Field(3, description="kernel size of the decoder layers")
    position_rows: PositiveInt = Field(1024, description="rows of each table of positions; positions beyond share the last row")
    rule: Literal["paper", "released"] = Field(
        "paper",
        description="'released' attends inside the residual block, projects what it reads, and scales every sum of two by "
        "sqrt(0.5)",
    )


class RelationConfig(Settings):
    """One kind of relation between two leaves, embedded on the keys of self-attention, and on the values."""

    clip: int
    values: bool = Field(False, description="also on the values, not on the keys alone")


class SequenceRelationConfig(RelationConfig):
    """Relative positions in the sentence, within -clip..clip (Shaw et al., 2018)."""

    clip: int = Field(16, ge=0, description="distance up to where relative positions are told apart; 0 leaves them out")
    values: bool = Field(True, description="also on the values, not on the keys alone")


class StructuralRelationConfig(RelationConfig):
    """Relative positions in the dependency tree, from depths, within -clip..clip (Wang et al., 2019)."""

    clip: int = Field(0, ge=0, description="distance up to where structural positions are told apart; 0 leaves them out")
    values: bool = Field(True, description="also on the values, not on the keys alone")
    same: Literal["path", "edge"] = Field(
        "path",
        description="words of which one governs the other, over any number of arcs ('path') or one ('edge'), have the "
        "difference of their depths; all others the signed sum",
    )


class TreeDistanceConfig(RelationConfig):
    """Arcs between two words of a dependency tree."""

    clip: int = Field(0, ge=0, description="most arcs between two words that are told apart; 0 leaves tree distances out")


class TreeTraversalConfig(RelationConfig):
    """Paths U*D*, LD*, RD* between two words of a dependency tree."""

    clip: int = Field(0, ge=0, description="longest path between two words that is told apart; 0 leaves paths out")


class RelationsConfig(Settings):
    """Relations between words in the self-attention of a relation_transformer. The defaults are those of Shaw et al., 2018."""

    positions: Literal["none", "sequence", "depth", "both"] = Field(
        "none",
        description="what is added to source embeddings: nothing, sinusoids of the place in the sentence or of the depth in the "
        "dependency tree, or tanh of maps of both sinusoids",
    )
    sequence: SequenceRelationConfig = SequenceRelationConfig()
    structural: StructuralRelationConfig = StructuralRelationConfig()
    tree_distance: TreeDistanceConfig = TreeDistanceConfig()
    tree_traversal: TreeTraversalConfig = TreeTraversalConfig()
    decoder: bool = Field(
        True, description="the decoder's self-attention has relative positions too, of sequence.clip, and no sinusoids"
    )
    label_head: Literal["none", "pos_tag", "deprel"] = Field(
        "none", description="what the first head of the first layer has queries and keys from, in place of the states"
    )

    @property
    def kinds(self) -> dict[str, RelationConfig]:
        """The kinds that are not left out, by name; those on values first."""
        kinds = {name: getattr(self, name) for name in ("sequence", "structural", "tree_distance", "tree_traversal")}
        return dict(sorted(((name, kind) for name, kind in kinds.items() if kind.clip), key=lambda item: not item[1].values))

    @property
    def read_arcs(self) -> bool:
        """Whether dependency trees are needed."""
        return self.positions in ("depth", "both") or bool(self.kinds.keys() - {"sequence"}) or self.label_head == "deprel"

    @model_validator(mode="after")
    def _check_decoder(self):
        if self.decoder and not self.sequence.clip:
            raise ValueError("decoder needs sequence.clip, for example 16, but it is 0; set decoder=false")
        return self


class RecurrentConfig(Settings):
    """Tree2Seq (Shi et al., 2018), and the LSTM decoder that it shares with its sequence baseline."""

    leaf_lstm: bool = Field(
        True,
        description="tree2seq: a bidirectional LSTM of num_encoder_layers layers computes the leaves of the trees; false: each "
        "from its own piece alone",
    )
    start: Literal["own", "mean", "max", "attention"] = Field(
        "own",
        description="the state that the decoder starts from: 'own' is the root of tree2seq and the last states of both "
        "directions of bilstm; the others pool the states of all positions",
    )
    attend: bool = Field(
        True, description="the decoder attends to all positions; false: what it starts from is all that it knows of the source"
    )


class ModelConfig(Settings):
    """Architecture. The sizes are those of the Transformer base model."""

    name: str = Field(
        "tree_transformer",
        description="tree_transformer, transformer, bilstm, tree_lstm or another name of docs/models.md",
    )
    d_model: PositiveInt = Field(512, description="width of the states")
    d_ff: PositiveInt = Field(2048, description="width of the feed-forward layer")
    num_heads: PositiveInt = Field(8, description="attention heads")
    num_encoder_layers: PositiveInt = Field(6, description="encoder layers")
    num_decoder_layers: PositiveInt = Field(6, description="decoder layers")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout of embeddings and sub-layer outputs")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
    tree: TreeAttentionConfig = TreeAttentionConfig()
    hybrid: HybridConfig = HybridConfig()
    phrases: PhraseConfig = PhraseConfig()
    convolution: ConvolutionConfig = ConvolutionConfig()
    convs2s: ConvS2SConfig = ConvS2SConfig()
    relations: RelationsConfig = RelationsConfig()
    recurrent: RecurrentConfig = RecurrentConfig()

    @model_validator(mode="after")
    def _check_heads(self):
        if self.d_model % (2 * self.num_heads):
            raise ValueError(f"d_model must be a multiple of 2 * num_heads = {2 * self.num_heads}, but is {self.d_model}")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """Adam with decoupled weight decay and the inverse square root schedule."""

    learning_rate: float = Field(7e-4, gt=0, description="peak learning rate, reached after warm-up")
    warmup_steps: PositiveInt = Field(4000, description="updates of linear warm-up from 1e-7")
    adam_betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="Adam's betas")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    weight_decay: float = Field(1e-4, ge=0, description="decoupled weight decay")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="label smoothing")
    r_drop: float = Field(
        0.0, ge=0, description="alpha of R-Drop: two passes with different dropout, and the weight of their divergence; 0 is off"
    )


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
    tokens_per_device: PositiveInt | None = Field(
        None,
        description="a worker's part of max_tokens is computed in micro-batches of at most so many, and their gradients are "
        "added up; null takes the part at once. An update has max_tokens either way",
    )


class DecodingConfig(Settings):
    """Beam search."""

    beam_size: PositiveInt = Field(5, description="hypotheses kept a sentence")
    length_penalty: float = Field(1.0, ge=0, description="exponent a of the length penalty")
    length_penalty_form: Literal["length", "gnmt"] = Field(
        "length", description="score / length^a (the paper's), or score / ((5 + length) / 6)^a; length counts EOS"
    )
    max_length_factor: float = Field(1.5, gt=0, description="a hypothesis has at most factor * leaves + max_length_offset pieces")
    max_length_offset: PositiveInt = Field(10, description="see max_length_factor")
    min_length: int = Field(0, ge=0, description="a hypothesis has at least this many pieces, unless its maximum is lower")
    max_tokens: PositiveInt = Field(4096, description="padded source leaves of one search batch")


class ClassifierConfig(Settings):
    """What a classifier learns from and how it is read. The number of classes is that of the data set."""

    supervision: Literal["all_phrases", "root"] = Field(
        "all_phrases",
        description="the classes that are learned: of all phrases that have one (tree models predict them at the leaves and "
        "nodes of the tree, transformer and bilstm from the phrase as an example of its own), or of whole examples alone",
    )
    pooling: Literal["own", "mean", "first"] = Field(
        "own",
        description="what an example's class is read from: 'own' is the root, or dummy root, of tree models, the mean of the "
        "leaves of a transformer and the last states of both directions of a bilstm; or the mean of all, or the first leaf",
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


class TrainConfig(Settings):
    """A training run, as written to RUN/config.yaml."""

    data: DataPath = Field(description="data set that workflows/preprocess.py wrote: a folder, s3://... or gs://...")
    task: Literal["translation", "classification", "relatedness"] = Field(
        "translation",
        description="what is trained; 'classification' reads data sets with classes, see classifier; 'relatedness' pairs of "
        "sentences with scores, whose encoder is a classifier's",
    )
    model: ModelConfig = ModelConfig()
    classifier: ClassifierConfig = ClassifierConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    decoding: DecodingConfig = DecodingConfig()
    seed: int = Field(1, ge=0, lt=2**63, description="seed of initialisation, dropout and batch order")
    max_steps: PositiveInt = Field(100_000, description="updates")
    validate_every: PositiveInt = Field(1000, description="updates between validations")
    checkpoint_every: PositiveInt = Field(1000, description="updates between checkpoints")
    keep_checkpoints: PositiveInt = Field(5, description="checkpoints kept on disk")
    average: Literal["last", "best", "ema"] = Field(
        "last",
        description="what the trained model is: the mean of the last checkpoints, the mean of those with the best validation, "
        "nll or a classifier's accuracy (which are then the ones that are kept, beside the latest), or the moving average of "
        "ema_decay",
    )
    average_checkpoints: PositiveInt = Field(5, description="checkpoints averaged at the end")
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="decay of a moving average of the weights, which is then what is validated; 0 keeps none"
    )
    patience: int = Field(
        0,
        ge=0,
        description="validations in a row that are not better after which training is finished; 0 goes to max_steps",
    )
    max_skipped_updates: PositiveInt = Field(
        20, description="updates in a row that are not finite, and so skipped, after which training gives up"
    )
    log_every: PositiveInt = Field(100, description="updates between metric lines")
    workers: int = Field(1, ge=0, description="Ray Train workers; 0 trains in this process, without Ray")
    min_workers: int = Field(
        0, ge=0, description="with nodes missing, train with as few workers as this until they come; 0 waits for all workers"
    )
    use_gpu: bool = Field(False, description="one GPU a worker")
    precision: Literal["float32", "bf16"] = Field(
        "float32", description="'bf16' computes products in bfloat16, under autocast: on GPUs, and on CPUs that have it"
    )
    compile: bool = Field(False, description="compile the model with torch.compile; the first steps take minutes")

    @model_validator(mode="after")
    def _check_checkpoints(self):
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
