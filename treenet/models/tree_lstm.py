"""Tree-LSTMs (Tai et al., 2015): N-ary over binary constituency trees, child-sum over dependencies; Tree2Seq (Shi et al., 2018)
with either.

Shapes: B batch, L leaves, S positions of leaves and nodes, W words, M nodes, D model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.config import ClassifierConfig, ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.labelled import LabelledBatch
from treenet.layers.bilstm import build_bilstm, run_bilstm
from treenet.layers.cells import binary_tree_lstm, child_sum_tree_lstm
from treenet.layers.dropout import Dropout
from treenet.layers.linear import build_linear
from treenet.models.classifier import Classifier
from treenet.models.encoders import Memory, VocabSizes, build_embedding
from treenet.models.recurrent import RecurrentDecoder, RecurrentMemory
from treenet.structure import ArcLevels, TreeLevels

# What biases of forget gates start with. Tai et al. name no value and their code adds nothing; the code of Shi et al. adds 1 to
# what every forget gate is computed from, so that trees remember what is far below.
CLASSIFIER_FORGET_BIAS = 0.0
TREE2SEQ_FORGET_BIAS = 1.0


class TreeLSTMClassifier(Classifier):
    """The N-ary cell, N = 2; a leaf has an output gate, but no input gate, and nodes have no input but their children.

    Positions are leaves, then nodes; dropout of embeddings and of states before the head.
    """

    reads = "binary_trees"

    def __init__(self, config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int):
        super().__init__()
        self.piece_embedding = build_embedding(vocab.pieces, config.d_model)
        self.embedding_scale = config.d_model**0.5
        self.dropout = Dropout(config.dropout)
        self.leaf = _build_leaf(config.d_model)
        self.composer = _build_composer(config.d_model, CLASSIFIER_FORGET_BIAS)
        self.add_head(config, classifier, num_classes)

    def encode(self, batch: LabelledBatch) -> Memory:
        """States of leaves and nodes: S = L + N."""
        levels = batch.structure
        x = self.dropout(self.embedding_scale * self.piece_embedding(batch.leaf_pieces))
        hidden, _ = _run_tree_lstm(*_leaf_states(self.leaf, x), self.composer, levels)
        return Memory(self.dropout(_lay_out(hidden, levels.row), levels.num_leaves), levels.row == 0)

    def summarize(self, memory: Memory, batch: LabelledBatch) -> Tensor:
        """The root's state [B, D]."""
        return memory.states[:, batch.structure.num_leaves]


class Tree2Seq(RecurrentDecoder):
    """The same cell below an LSTM decoder that starts from the state and the cell of the root.

    With `recurrent.leaf_lstm`, states and cells of leaves are those of a bidirectional LSTM, else of their pieces alone.
    """

    reads = "binary_trees"

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        width = config.d_model
        self.leaf = None if config.recurrent.leaf_lstm else _build_leaf(width)
        if config.recurrent.leaf_lstm:
            self.forward_layers, self.backward_layers = build_bilstm(width, config.num_encoder_layers)
        self.composer = _build_composer(width, TREE2SEQ_FORGET_BIAS)

    def encode(self, batch: TreeBatch) -> RecurrentMemory:
        """States of leaves and nodes: S = L + N."""
        levels, x = batch.structure, self.embed_pieces(batch.leaf_pieces)
        if self.leaf:
            leaves = _leaf_states(self.leaf, x)
        else:
            layers = self.forward_layers, self.backward_layers
            leaves = run_bilstm(x, batch.leaf_pad_mask, *layers, self.dropout, with_cells=True)
        hidden, cells = (_lay_out(x, levels.row) for x in _run_tree_lstm(*leaves, self.composer, levels))
        # Of several trees side by side, and of leaves outside all nodes, the mean; zeros of a text without leaves.
        weights = levels.root[..., None].to(hidden.dtype)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        own = (weights * hidden).sum(1), (weights * cells).sum(1)
        return self.remember(hidden, cells, levels.row == 0, own, levels.num_leaves)


class ChildSumTreeLSTMClassifier(Classifier):
    """The child-sum cell over words, whose vectors are the means of their pieces'.

    Positions are words, and one more, as a node, that governs the roots where a text has several, without input. Dropout
    as above.
    """

    reads = "arcs"

    def __init__(self, config: ModelConfig, vocab: VocabSizes, classifier: ClassifierConfig, num_classes: int):
        super().__init__()
        self.piece_embedding = build_embedding(vocab.pieces, config.d_model)
        self.embedding_scale = config.d_model**0.5
        self.dropout = Dropout(config.dropout)
        self.word, self.states = _build_child_sum(config.d_model, CLASSIFIER_FORGET_BIAS)
        self.add_head(config, classifier, num_classes)

    def encode(self, batch: LabelledBatch) -> Memory:
        """States of words: S = W + 1."""
        x = self.dropout(self.embedding_scale * self.piece_embedding(batch.leaf_pieces))
        levels = batch.structure
        hidden, _ = _run_child_sum(x, batch.leaf_pad_mask, self.word, self.states, levels)
        hidden = _lay_out_words(hidden, levels)
        return Memory(self.dropout(hidden, hidden.shape[1] - 1), levels.pad_mask)

    def summarize(self, memory: Memory, batch: LabelledBatch) -> Tensor:
        """The root's state [B, D]."""
        return _at_root(memory.states, batch.structure)


class ChildSumTree2Seq(RecurrentDecoder):
    """The child-sum cell below the decoder of Tree2Seq; positions are those of the classifier.

    With `recurrent.leaf_lstm`, a word's input is the mean of its pieces' states in a bidirectional LSTM, else of its pieces.
    """

    reads = "arcs"

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__(config, vocab)
        width = config.d_model
        self.leaf_lstm = config.recurrent.leaf_lstm
        if self.leaf_lstm:
            self.forward_layers, self.backward_layers = build_bilstm(width, config.num_encoder_layers)
        self.word, self.states = _build_child_sum(width, TREE2SEQ_FORGET_BIAS)

    def encode(self, batch: TreeBatch) -> RecurrentMemory:
        """States of words: S = W + 1."""
        levels, x = batch.structure, self.embed_pieces(batch.leaf_pieces)
        if self.leaf_lstm:
            x, _ = run_bilstm(x, batch.leaf_pad_mask, self.forward_layers, self.backward_layers, self.dropout)
            x = self.dropout(x)
        tables = _run_child_sum(x, batch.leaf_pad_mask, self.word, self.states, levels)
        hidden, cells = (_lay_out_words(table, levels) for table in tables)
        own = _at_root(hidden, levels), _at_root(cells, levels)
        return self.remember(hidden, cells, levels.pad_mask, own, hidden.shape[1] - 1)


def _build_leaf(width: int) -> nn.Linear:
    """Cell and output gate of a leaf from its piece."""
    return build_linear(width, width, num_blocks=2)


def _build_composer(width: int, forget_bias: float) -> nn.Linear:
    """The gates of a node from the states of both children: i, f left, f right, o, u."""
    composer = build_linear(2 * width, width, num_blocks=5)
    nn.init.constant_(composer.bias[width : 3 * width], forget_bias)
    return composer


def _build_child_sum(width: int, forget_bias: float) -> tuple[nn.Linear, nn.Parameter]:
    """The gates' shares of inputs, and of hidden states: i, o, u, f."""
    inputs, states = (build_linear(width, width, num_blocks=4) for _ in range(2))
    nn.init.constant_(inputs.bias[3 * width :], forget_bias)
    return inputs, nn.Parameter(states.weight.detach().t().contiguous())


def _run_child_sum(x: Tensor, pad_mask: Tensor, word: nn.Linear, states: Tensor, levels: ArcLevels) -> tuple[Tensor, Tensor]:
    """Vectors of leaves [B, L, D] -> hidden states and cells [M, D] of words and of what governs several roots, by level."""
    leaves = x.masked_fill(pad_mask[..., None], 0)
    words = leaves.new_zeros(levels.row.numel(), leaves.shape[2]).index_add(0, levels.word.flatten(), leaves.flatten(0, 1))
    words = words / levels.pieces.view(-1, 1)
    arcs = levels.child, levels.governor, levels.edges, levels.arc_edges
    return child_sum_tree_lstm(word(words.index_select(0, levels.place)), states, *arcs)


def _lay_out_words(table: Tensor, levels: ArcLevels) -> Tensor:
    """States [M, D] by level -> of every word, and of what governs several roots [B, W + 1, D], 0 where padded."""
    return _lay_out(F.pad(table, (0, 0, 1, 0)), levels.row)


def _at_root(states: Tensor, levels: ArcLevels) -> Tensor:
    """The root's of states [B, S, D]."""
    return states[torch.arange(len(levels.root), device=states.device), levels.root]


def _leaf_states(leaf: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and cells [B, L, D] of leaves from their pieces alone, x [B, L, D]."""
    cell, gate = leaf(x).chunk(2, dim=2)
    return gate.sigmoid() * cell.tanh(), cell


def _run_tree_lstm(hidden: Tensor, cell: Tensor, composer: nn.Linear, levels: TreeLevels) -> tuple[Tensor, Tensor]:
    """Hidden states and cells of leaves [B, L, D] -> rows of zeros, of leaves and of nodes [1 + leaves + M, D]."""
    leaves = (x.flatten(0, 1).index_select(0, levels.leaf) for x in (hidden, cell))
    return binary_tree_lstm(*leaves, composer.weight.t(), composer.bias, levels.children, levels.edges)


def _lay_out(table: Tensor, row: Tensor) -> Tensor:
    """Rows of a table whose first is zeros, at their positions: row [B, S] -> [B, S, D]."""
    return table.index_select(0, row.flatten()).unflatten(0, row.shape)
