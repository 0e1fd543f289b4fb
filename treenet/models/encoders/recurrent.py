"""Recurrent encoders: the LSTM over leaves, and Tree-LSTMs (Tai et al., 2015).

Tree-LSTMs are N-ary over binary constituency trees, or child-sum over dependencies. They also exist with the settings of Tree2Seq
(Shi et al., 2018).

Shapes: B batch, L leaves, S positions of leaves and nodes, W words, M nodes, D model.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.data.input_kinds import ARCS, BINARY_TREES
from treenet.layers.cells import binary_tree_lstm, child_sum_tree_lstm
from treenet.layers.core import Modules, build_linear
from treenet.layers.recurrent import build_bilstm, build_lstm, last_state, last_states, run_bilstm, run_lstm
from treenet.models.decoders.recurrent import RecurrentDecoder
from treenet.models.encoders.base import LSTMEncoder, LSTMStates, Memory, PieceEmbedding, VocabSizes
from treenet.models.registry import Architecture, register
from treenet.structure import ArcLevels, TreeLevels


class BiLSTMEncoder(LSTMEncoder):
    """`num_encoder_layers` layers of two directions, of d_model / 2 each; dropout before, between and after them.

    The state of the whole source is the last states of both directions: forward at the last leaf, backward at the first. With
    `recurrent.directions: forward`, layers have only that direction, with d_model.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding)
        sizes = config.d_model, config.num_encoder_layers
        self.backward_layers: Modules[nn.LSTM] | None = None
        if config.recurrent.directions == "both":
            self.forward_layers, self.backward_layers = build_bilstm(*sizes)
        else:
            self.forward_layers = build_lstm(config.d_model, *sizes)

    def run(self, batch: TreeBatch, *, with_cells: bool) -> LSTMStates:
        """Return all directions side by side at every leaf: S = L."""
        x, pad_mask = self.embed_leaves(batch), batch.leaf_pad_mask
        if self.backward_layers is None:
            return LSTMStates(*run_lstm(x, self.forward_layers, self.dropout, with_cells=with_cells), pad_mask)
        layers = self.forward_layers, self.backward_layers
        return LSTMStates(*run_bilstm(x, pad_mask, *layers, self.dropout, with_cells=with_cells), pad_mask)

    def own_state(self, states: Tensor, batch: TreeBatch) -> Tensor:
        return (last_state if self.backward_layers is None else last_states)(states, batch.leaf_pad_mask)


register("bilstm", Architecture(BiLSTMEncoder, RecurrentDecoder, uses=("classification",)))


# Initial bias of forget gates. Tai et al. name no value, and their code adds nothing. The code of Shi et al. adds 1 before
# the sigmoid of every forget gate, so that trees remember states from far below.
TREE_LSTM_FORGET_BIAS = 0.0
TREE2SEQ_FORGET_BIAS = 1.0


class TreeLSTMEncoder(LSTMEncoder):
    """The N-ary cell, N = 2. Nodes have no input except their children.

    A leaf is its piece through an output gate, without an input gate, as in the released code: c = W x + b, h = sigmoid(V x + e)
    tanh(c). By the paper's equations 9 to 14 it would have one: c = sigmoid(U x + a) tanh(W x + b). With `leaf_lstm`, it is its
    state in a bidirectional LSTM. Positions are leaves, then nodes. There is dropout of embeddings and of states.
    """

    reads = BINARY_TREES
    forget_bias: ClassVar[float] = TREE_LSTM_FORGET_BIAS

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding, *, leaf_lstm: bool = False):
        super().__init__(config, vocab, embedding)
        self.leaf = None if leaf_lstm else build_linear(config.d_model, config.d_model, num_blocks=2)  # its cell and output gate
        if leaf_lstm:
            self.forward_layers, self.backward_layers = build_bilstm(config.d_model, config.num_encoder_layers)
        self.composer = _build_composer(config.d_model, self.forget_bias)

    def run(self, batch: TreeBatch, *, with_cells: bool) -> LSTMStates:
        """Return states of leaves and nodes: S = L + N."""
        levels: TreeLevels = batch.structure
        x = self.embed_leaves(batch)
        if self.leaf is not None:
            leaves = _leaf_states(self.leaf, x)
        else:
            layers = self.forward_layers, self.backward_layers
            x, leaf_cells = run_bilstm(x, batch.leaf_pad_mask, *layers, self.dropout, with_cells=True)
            assert leaf_cells is not None  # they are asked for
            leaves = x, leaf_cells
        hidden, cells = _run_tree_lstm(*leaves, self.composer, levels)
        own_cells = _lay_out(cells, levels.row) if with_cells else None
        return LSTMStates(_lay_out(hidden, levels.row), own_cells, levels.row == 0, levels.num_leaves)

    def own_state(self, states: Tensor, batch: TreeBatch) -> Tensor:
        """Return the mean state of trees side by side and of leaves outside all nodes; zeros without leaves."""
        weights = batch.structure.root[..., None].to(states.dtype)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        return (weights * states).sum(1)

    def summarize(self, memory: Memory, batch: TreeBatch) -> Tensor:
        """Return the root's state [B, D]. Examples of classification have one root."""
        return memory.states[:, batch.structure.num_leaves]


class Tree2SeqEncoder(TreeLSTMEncoder):
    """The N-ary cell with the settings of Tree2Seq, and `recurrent.leaf_lstm`.

    Chosen where Shi et al. leave it open, or different from their code. Without `leaf_lstm`, a leaf has c = W x and h = sigmoid(V
    x) tanh(c); their code has h = V x. If a sentence has several trees, its root state is the mean of all positions without a
    parent. All states have the width d_model; their nodes have 600 over two leaf LSTMs of 300. Forget gates of the leaf LSTM
    start as in PyTorch, theirs with 1. They have no child-sum cell.
    """

    forget_bias = TREE2SEQ_FORGET_BIAS

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding, leaf_lstm=config.recurrent.leaf_lstm)


class ChildSumEncoder(LSTMEncoder):
    """The child-sum cell over words. Its inputs are the means of their pieces' vectors, or of their states in an LSTM.

    Positions are words, and one further node without input that governs the roots if a text has several. Dropout is as in
    `TreeLSTMEncoder`.
    """

    reads = ARCS
    forget_bias: ClassVar[float] = TREE_LSTM_FORGET_BIAS

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding, *, leaf_lstm: bool = False):
        super().__init__(config, vocab, embedding)
        self.leaf_lstm = leaf_lstm
        if leaf_lstm:
            self.forward_layers, self.backward_layers = build_bilstm(config.d_model, config.num_encoder_layers)
        self.word, self.states = _build_child_sum(config.d_model, self.forget_bias)

    def run(self, batch: TreeBatch, *, with_cells: bool) -> LSTMStates:
        """Return states of words: S = W + 1."""
        levels: ArcLevels = batch.structure
        x = self.embed_leaves(batch)
        if self.leaf_lstm:
            x, _ = run_bilstm(x, batch.leaf_pad_mask, self.forward_layers, self.backward_layers, self.dropout)
            x = self.dropout(x)
        hidden, cells = _run_child_sum(x, batch.leaf_pad_mask, self.word, self.states, levels)
        hidden = _lay_out_words(hidden, levels)
        own_cells = _lay_out_words(cells, levels) if with_cells else None
        return LSTMStates(hidden, own_cells, levels.pad_mask, hidden.shape[1] - 1)

    def own_state(self, states: Tensor, batch: TreeBatch) -> Tensor:
        """Return the root's state [B, D]."""
        root = batch.structure.root
        return states[torch.arange(len(root), device=states.device), root]


class ChildSumTree2SeqEncoder(ChildSumEncoder):
    """The child-sum cell with the settings of Tree2Seq, and `recurrent.leaf_lstm`."""

    forget_bias = TREE2SEQ_FORGET_BIAS

    def __init__(self, config: ModelConfig, vocab: VocabSizes, embedding: PieceEmbedding):
        super().__init__(config, vocab, embedding, leaf_lstm=config.recurrent.leaf_lstm)


def _build_composer(width: int, forget_bias: float) -> nn.Linear:
    """Build the map from the states of both children to the gates of a node: i, f left, f right, o, u."""
    composer = build_linear(2 * width, width, num_blocks=5)
    nn.init.constant_(composer.bias[width : 3 * width], forget_bias)
    return composer


def _build_child_sum(width: int, forget_bias: float) -> tuple[nn.Linear, nn.Parameter]:
    """Build the maps from inputs, and from hidden states, to the gates: i, o, u, f."""
    inputs, states = (build_linear(width, width, num_blocks=4) for _ in range(2))
    nn.init.constant_(inputs.bias[3 * width :], forget_bias)
    return inputs, nn.Parameter(states.weight.detach().t().contiguous())


def _run_child_sum(x: Tensor, pad_mask: Tensor, word: nn.Linear, states: Tensor, levels: ArcLevels) -> tuple[Tensor, Tensor]:
    """Map vectors of leaves [B, L, D] to hidden states and cells [M, D] of words and governors of several roots, by level."""
    leaves = x.masked_fill(pad_mask[..., None], 0)
    words = leaves.new_zeros(levels.row.numel(), leaves.shape[2]).index_add(0, levels.word.flatten(), leaves.flatten(0, 1))
    words = words / levels.pieces.view(-1, 1)
    arcs = levels.child, levels.governor, levels.edges, levels.arc_edges
    return child_sum_tree_lstm(word(words.index_select(0, levels.place)), states, *arcs)


def _lay_out_words(table: Tensor, levels: ArcLevels) -> Tensor:
    """Reorder states [M, D] by level to those of words and of the governor of several roots [B, W + 1, D]; padding is 0."""
    return _lay_out(F.pad(table, (0, 0, 1, 0)), levels.row)


def _leaf_states(leaf: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute hidden states and cells [B, L, D] of leaves from their pieces alone, x [B, L, D]."""
    cell, gate = leaf(x).chunk(2, dim=2)
    return gate.sigmoid() * cell.tanh(), cell


def _run_tree_lstm(hidden: Tensor, cell: Tensor, composer: nn.Linear, levels: TreeLevels) -> tuple[Tensor, Tensor]:
    """Map hidden states and cells of leaves [B, L, D] to rows: zeros, leaves and nodes [1 + leaves + M, D]."""
    hidden, cell = (x.flatten(0, 1).index_select(0, levels.leaf) for x in (hidden, cell))
    return binary_tree_lstm(hidden, cell, composer.weight.t(), composer.bias, levels.children, levels.edges)


def _lay_out(table: Tensor, row: Tensor) -> Tensor:
    """Put rows of a table at their positions: row [B, S] -> [B, S, D]. The first row of the table is zeros."""
    return table.index_select(0, row.flatten()).unflatten(0, row.shape)


register("tree_lstm", Architecture(TreeLSTMEncoder, uses=("classification",)))
register("tree2seq", Architecture(Tree2SeqEncoder, RecurrentDecoder))
register("child_sum_tree_lstm", Architecture(ChildSumEncoder, uses=("classification",)))
register("child_sum_tree2seq", Architecture(ChildSumTree2SeqEncoder, RecurrentDecoder))
