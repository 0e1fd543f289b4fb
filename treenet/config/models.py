"""Settings of models. An ablation is a value here, never a class."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from treeproc.common.hub import ModelPlace
from treeproc.common.settings import Effect, Settings, later_field


class ArchitectureSection(Settings):
    """A section of `ModelConfig` that the named architectures read, and no other."""

    architectures: ClassVar[tuple[str, ...]] = ()


class TreeAttentionConfig(ArchitectureSection):
    """Tree attention of the paper's section 4. The defaults are the paper's rules."""

    architectures: ClassVar[tuple[str, ...]] = ("tree_transformer",)

    accumulation_rule: Literal["paper", "released"] = Field(
        "paper",
        description="'paper': the equations. 'released': the authors' code, which divides a branch by its nodes without the "
        "leaf, and counts depth from the root",
    )
    accumulate_on: Literal["value", "key", "scores"] = Field(
        "value", description="vectors that hierarchical accumulation works on (appendix 7.3)"
    )
    leaf_weights: Literal["shared", "per_head"] = Field(
        "shared", description="weights w of equation 7: one number for each leaf, or one for each leaf and head"
    )
    hierarchical_embeddings: bool = Field(
        True, description="hierarchical embeddings (equations 9 and 10); false: -HierEmb of Table 3"
    )
    subtree_mask: bool = Field(True, description="subtree masking (equation 11); false: -SubMask of Table 3")
    vertical_rows: PositiveInt = Field(100, description="rows of the vertical embedding table")
    horizontal_rows: PositiveInt = Field(100, description="rows of the horizontal embedding table")
    nodes: Literal["labels", "labels_and_leaves"] = later_field(
        "labels",
        description="what nodes start from. 'labels': the vector of their label. 'labels_and_leaves': its sum with the mean of "
        "the inputs of their leaves, which says more above a pretrained encoder",
    )
    implementation: Annotated[Literal["fast", "reference"], Effect.NONE] = later_field(
        "fast",
        description="'reference': the paper's equations one by one. Slow; equal but for rounding and attention dropout's masks",
    )
    relative_positions: int = later_field(
        0,
        ge=0,
        description="largest distance that has its own relative position (Shaw et al., 2018): between two leaves, beside "
        "sinusoids, and in the decoder's self-attention, instead of sinusoids. 0: sinusoids alone (none on pretrained leaves)",
    )

    @model_validator(mode="after")
    def _check_implementation(self) -> Self:
        if self.implementation == "reference" and self.relative_positions:
            raise ValueError("implementation must be fast with relative_positions, which the paper lacks, but is reference")
        return self


RecurrentCell = Literal["on_lstm", "lstm"]
PHRASE_LEVELS = 6  # levels of constituency trees that batches are prepared for
NGram = Annotated[int, Field(ge=2)]
PhraseLevel = Annotated[int, Field(ge=1, le=PHRASE_LEVELS)]


class HybridConfig(ArchitectureSection):
    """Recurrent layers below the self-attention layers of the encoder (Hao et al., 2019, arXiv 1909.01562)."""

    architectures: ClassVar[tuple[str, ...]] = ("on_lstm_hybrid",)

    num_recurrent_layers: PositiveInt | None = Field(
        None, description="number of recurrent layers, the lowest of num_encoder_layers; null: half of them, rounded up"
    )
    cell: RecurrentCell = Field("on_lstm", description="recurrent cell; 'lstm' is the plain LSTM")
    chunk_size: PositiveInt = Field(
        8, description="neurons that share the master gates of an ON-LSTM; divides d_model, and is less"
    )
    short_cut: bool = Field(True, description="true: the memory is the sum of both encoders; false: the output of the upper one")


class PhraseConfig(ArchitectureSection):
    """Multi-granularity self-attention (Hao et al., 2019, arXiv 1909.02222): heads of the encoder that attend to phrases."""

    architectures: ClassVar[tuple[str, ...]] = ("multi_granularity",)

    ngrams: tuple[NGram, ...] = Field((2, 3, 4), description="a head for the n-grams of each of these sizes")
    levels: tuple[PhraseLevel, ...] = Field(
        (1, 2), description="a head for the phrases at each of these levels of the tree; level 1 has the children of the root"
    )
    num_layers: PositiveInt | None = Field(
        None,
        description="number of layers with such heads, the lowest of num_encoder_layers; null: half of them, rounded up",
    )
    composition: Literal["max_pool", "convolution", "lstm", "attention"] = Field(
        "max_pool", description="encoder of the leaves of a phrase"
    )
    interaction: Literal[RecurrentCell, "none"] = Field("on_lstm", description="encoder of the phrases of a sentence")
    chunk_size: PositiveInt = Field(
        8, description="neurons that share the master gates of an ON-LSTM; divides the head's width, and is less"
    )
    tag_loss: float = Field(1.0, ge=0, description="weight of the loss of phrase labels; 0 is off")

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        for name in ("ngrams", "levels"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} must all be different, but are {list(getattr(self, name))}")
        if self.tag_loss and not self.levels:
            raise ValueError(
                f"tag_loss must be 0 without levels, because it learns the labels of their phrases, but is {self.tag_loss:g}"
            )
        return self


KernelSizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class ConvolutionConfig(ArchitectureSection):
    """Lightweight and dynamic convolution (Wu et al., 2019). The defaults are the paper's for WMT."""

    architectures: ClassVar[tuple[str, ...]] = ("lightconv", "dynamicconv")

    encoder_kernels: KernelSizes = Field(
        (3, 7, 15, 31), description="kernel size of each encoder layer, lowest first; further layers take the last size"
    )
    decoder_kernels: KernelSizes = Field((3, 7, 15, 31), description="kernel size of each decoder layer, in the same way")
    gated: bool = Field(True, description="use a GLU after the input projection; the paper's IWSLT models have none")
    weight_dropout: float = Field(0.1, ge=0, lt=1, description="dropout of kernel weights after their softmax (DropConnect)")


class ConvS2SConfig(ArchitectureSection):
    """Convolutional sequence to sequence learning (Gehring et al., 2017); all widths are d_model."""

    architectures: ClassVar[tuple[str, ...]] = ("convs2s",)

    encoder_kernel: PositiveInt = Field(3, description="kernel size of the encoder layers")
    decoder_kernel: PositiveInt = Field(3, description="kernel size of the decoder layers")
    position_rows: PositiveInt = Field(1024, description="rows of each table of positions; later positions share the last row")
    rule: Literal["paper", "released"] = Field(
        "paper",
        description="'paper': the equations. 'released': the authors' code, with attention inside the residual block, "
        "projected inputs, and sums of two scaled by sqrt(0.5)",
    )


class RelationConfig(Settings):
    """One kind of relation between two leaves, embedded on the keys of self-attention, and on the values."""

    clip: int
    values: bool = Field(False, description="true: act on keys and values; false: act only on keys")


class SequenceRelationConfig(RelationConfig):
    """Relative positions in the sentence, within -clip..clip (Shaw et al., 2018)."""

    clip: int = Field(16, ge=0, description="largest distance that has its own relative position; 0: no relative positions")
    values: bool = Field(True, description="true: act on keys and values; false: act only on keys")


class StructuralRelationConfig(RelationConfig):
    """Relative positions in the dependency tree, from depths, within -clip..clip (Wang et al., 2019)."""

    clip: int = Field(0, ge=0, description="largest distance that has its own structural position; 0: no structural positions")
    values: bool = Field(True, description="true: act on keys and values; false: act only on keys")
    same: Literal["path", "edge"] = Field(
        "path",
        description="pairs of words whose position is the difference of their depths: one governs the other over any number "
        "of arcs ('path'), or over one arc ('edge'). All other pairs get the signed sum of depths",
    )


class TreeDistanceConfig(RelationConfig):
    """Arcs between two words of a dependency tree."""

    clip: int = Field(
        0,
        ge=0,
        description="largest tree distance that has its own embedding; 0: no tree distances",
    )


class TreeTraversalConfig(RelationConfig):
    """Paths U*D*, LD*, RD* between two words of a dependency tree."""

    clip: int = Field(0, ge=0, description="longest path between two words that has its own embedding; 0: no paths")


class RelationsConfig(ArchitectureSection):
    """Relations between words in self-attention. The defaults are those of Shaw et al., 2018.

    A linearized_transformer has them between all positions, and of the relations only those of `sequence`.
    """

    architectures: ClassVar[tuple[str, ...]] = ("relation_transformer", "linearized_transformer")

    positions: Literal["none", "sequence", "depth", "both"] = Field(
        "none",
        description="positions added to source embeddings. 'sequence': sinusoids of the place in the sentence. 'depth': "
        "sinusoids of the depth in the dependency tree. 'both': tanh of linear maps of both",
    )
    sequence: SequenceRelationConfig = SequenceRelationConfig()
    structural: StructuralRelationConfig = StructuralRelationConfig()
    tree_distance: TreeDistanceConfig = TreeDistanceConfig()
    tree_traversal: TreeTraversalConfig = TreeTraversalConfig()
    decoder: bool = Field(
        True, description="relative positions (sequence.clip) in the decoder's self-attention too, instead of sinusoids"
    )
    label_head: Literal["none", "pos_tag", "deprel"] = Field(
        "none", description="input of the queries and keys of the first head in the first layer, instead of the states"
    )

    @property
    def kinds(self) -> dict[str, RelationConfig]:
        """Return the kinds that are not left out, by name; those on values first."""
        kinds = {name: value for name, value in self if isinstance(value, RelationConfig)}
        return dict(sorted(((name, kind) for name, kind in kinds.items() if kind.clip), key=lambda item: not item[1].values))

    @property
    def read_arcs(self) -> bool:
        """Return whether dependency trees are needed."""
        return self.positions in ("depth", "both") or bool(self.kinds.keys() - {"sequence"}) or self.label_head == "deprel"

    @model_validator(mode="after")
    def _check_decoder(self) -> Self:
        if self.decoder and not self.sequence.clip:
            raise ValueError("decoder needs sequence.clip, for example 16, but it is 0; set decoder=false")
        if self.positions == "none" and not self.kinds:
            raise ValueError(
                "positions must be sequence, depth or both if there is no relation, but is none: words would have no order"
            )
        return self


class RecurrentConfig(ArchitectureSection):
    """Tree2Seq (Shi et al., 2018), and what it shares with its sequence baseline: LSTMs over leaves, and the decoder."""

    architectures: ClassVar[tuple[str, ...]] = ("bilstm", "tree2seq", "child_sum_tree2seq")

    directions: Literal["both", "forward"] = Field(
        "both", description="directions of bilstm: 'both', each of width d_model / 2, or 'forward', of width d_model"
    )
    leaf_lstm: bool = Field(
        True,
        description="true: a bidirectional LSTM of num_encoder_layers layers computes the leaves (of child-sum trees: the "
        "pieces of words). false: each leaf comes from its own piece alone",
    )
    start: Literal["own", "mean", "max", "attention"] = Field(
        "own",
        description="state that the decoder starts from. 'own': the root of trees, or the last states of both directions of "
        "bilstm. The others pool the states of all positions",
    )
    attend: bool = Field(
        True, description="true: the decoder attends to all positions; false: it reads the source only through its start state"
    )


class ConstituentConfig(ArchitectureSection):
    """Constituent attention (Wang et al., 2019). The defaults are the paper's rules."""

    architectures: ClassVar[tuple[str, ...]] = ("constituent_transformer",)

    neighbour_scale: float | None = Field(
        None, gt=0, description="divisor of the scores of neighbours; null: d_model, as in the paper. The released code has 256"
    )
    diagonal: Literal["one", "official"] = Field(
        "one",
        description="prior of a leaf's attention to itself. 'one': the empty product of the formula; 'official': close to 0, "
        "as in the released code",
    )


class TreeRegConfig(ArchitectureSection):
    """Tree regularisation of a causal language model (Nandi, Manning and Murty, 2024)."""

    architectures: ClassVar[tuple[str, ...]] = ("causal_transformer",)

    weight: float = Field(
        0.0,
        ge=0,
        description="weight of tree regularisation, beside the nll of a piece; 0: off, and the model reads no trees",
    )
    layer: PositiveInt | None = Field(
        None,
        description="layer whose output the loss reads, counted from 1; null: three quarters of num_encoder_layers, rounded up, "
        "as in the paper (12 of 16)",
    )
    heads: PositiveInt | None = Field(
        None,
        description="number h of heads: the loss reads the first h * d_model / num_heads entries of a state; null: a quarter "
        "of num_heads, rounded up, as in the paper (2 of 8)",
    )


class PretrainedConfig(ArchitectureSection):
    """A pretrained encoder of transformers, whose states are the inputs of the leaves."""

    architectures: ClassVar[tuple[str, ...]] = (
        "pretrained", "bilstm", "child_sum_tree_lstm", "linearized_transformer", "relation_transformer", "transformer",
        "tree_lstm", "tree_transformer",
    )  # fmt: skip

    folder: ModelPlace | None = Field(
        None,
        description="folder with config.json and model.safetensors, and the tokenizer of the data set, or the name of a model on "
        "the hub of Hugging Face; a run reads it when it begins. null: a table of pieces",
    )


# A model of more layers takes minutes to be made, however small they are.
Layers = Annotated[int, Field(gt=0, le=200)]


_LAYER_SETTINGS = (
    "norm", "activation_dropout", "encoder_layer_drop", "decoder_layer_drop", "source_word_dropout", "target_word_dropout"
)  # fmt: skip


class ModelConfig(Settings):
    """Architecture: its sizes, whose defaults are those of the Transformer base model, and the sections of single architectures.

    What is recorded of it has the architecture's own sections, and of others those that were set.
    """

    name: str = Field(
        "tree_transformer",
        description="tree_transformer, transformer, pretrained; of the paper's baselines tree_lstm, child_sum_tree_lstm, bilstm, "
        "tree2seq, child_sum_tree2seq; convolutions: convs2s, lightconv, dynamicconv; relations: relation_transformer; "
        "phrases: multi_granularity, on_lstm_hybrid, constituent_transformer; trees as brackets: linearized_transformer; "
        "language models: causal_transformer, transformer_grammar",
    )
    d_model: PositiveInt = Field(512, description="width of the states")
    d_ff: PositiveInt = Field(2048, description="width of the feed-forward layer")
    num_heads: PositiveInt = Field(8, description="attention heads")
    num_encoder_layers: Layers = Field(6, description="encoder layers")
    num_decoder_layers: Layers = Field(6, description="decoder layers")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout of embeddings and sub-layer outputs")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
    norm: Literal["post", "pre"] = later_field(
        "post",
        description="place of the layer norms. 'post': after each residual connection, as in the paper; 'pre': before each "
        "sub-layer, and after the last layer; recurrent layers stay as they are",
    )
    activation_dropout: float = later_field(0.0, ge=0, lt=1, description="dropout of the inner units of the feed-forward layer")
    encoder_layer_drop: float = later_field(
        0.0,
        ge=0,
        lt=1,
        description="probability that training skips an encoder layer, but no recurrent one, for each example (Fan et al., 2020)",
    )
    decoder_layer_drop: float = later_field(0.0, ge=0, lt=1, description="the same for a decoder layer")
    source_word_dropout: float = later_field(
        0.0,
        ge=0,
        lt=1,
        description="probability that the embedding of a source piece is 0 in training; translation only",
    )
    target_word_dropout: float = later_field(0.0, ge=0, lt=1, description="the same for the pieces that the decoder reads")
    paired_weights: bool = later_field(
        False,
        description="true: each parameter is drawn by seed and name, so models with one seed share the initial weights of those "
        "with the same name, shape and initialiser. false: all weights are drawn in one sequence",
    )
    tree: TreeAttentionConfig = TreeAttentionConfig()
    hybrid: HybridConfig = HybridConfig()
    phrases: PhraseConfig = PhraseConfig()
    convolution: ConvolutionConfig = ConvolutionConfig()
    convs2s: ConvS2SConfig = ConvS2SConfig()
    relations: RelationsConfig = RelationsConfig()
    recurrent: RecurrentConfig = RecurrentConfig()
    constituents: ConstituentConfig = ConstituentConfig()
    tree_reg: TreeRegConfig = TreeRegConfig()
    pretrained: PretrainedConfig = later_field(PretrainedConfig())

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.d_model % (2 * self.num_heads):
            raise ValueError(f"d_model must be a multiple of 2 * num_heads = {2 * self.num_heads}, but is {self.d_model}")
        return self

    def unread_sections(self) -> list[str]:
        """Return the sections that were set, but that this architecture does not read."""
        return [name for name in self.foreign_sections() if getattr(self, name) != type(getattr(self, name))()]

    @property
    def layer_settings(self) -> list[str]:
        """Return the settings of Transformer layers, beside sizes and dropout, that were set."""
        return [name for name in _LAYER_SETTINGS if getattr(self, name) != type(self).model_fields[name].default]

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_read(self, dump: SerializerFunctionWrapHandler) -> dict:
        """Leave out foreign sections."""
        left_out = set(self.foreign_sections()) - set(self.unread_sections())
        return {name: value for name, value in dump(self).items() if name not in left_out}

    def foreign_sections(self) -> list[str]:
        """Return the sections that this architecture does not read."""
        sections = {name: value for name, value in self if isinstance(value, ArchitectureSection)}
        return [name for name, value in sections.items() if self.name not in value.architectures]
