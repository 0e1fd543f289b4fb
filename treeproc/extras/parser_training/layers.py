"""Parts that models in training share: LSTMs on padded rows and on rows that continue other rows, dropout, first word vectors.

On a CPU, training is several times faster than with PyTorch's packed sequences, with equal results. Rows that continue other rows
are chains, stacks and trees; they are computed level by level. Word vectors are factorised co-occurrence counts of unlabelled
text (Levy and Goldberg 2014, "Neural Word Embedding as Implicit Matrix Factorization"). They take a minute.

Shapes: B rows, L steps of the longest, D inputs, H states; in `level_lstm` N rows, I inputs, and gates in torch's order: in,
forget, cell, out.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stanza.models.common.vocab import VOCAB_PREFIX
from stanza.models.pos.vocab import WordVocab
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from treeproc.common.files import atomic_output

_SPELLING_CHUNKS = 4
_WORD_SCALE = 0.5  # standard deviation of the initial word embeddings
# This function is undocumented. A step of few rows takes a fifth longer without it.
_lstm = getattr(torch, "lstm", None)
_PLACES = (-2, -1, 1, 2)
_FREQUENT = 1500  # words that are contexts by themselves
_SMOOTHING = 0.75  # exponent of the frequencies of contexts, so that rare contexts weigh less
_WORD = re.compile(r"\w+(?=n't\b)|n't\b|'\w+|\w+|[^\w\s]")


def one_way(weights: Sequence[Tensor], x: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """Return states of one direction of one layer, [B, L, H], from x [B, L, D] and the first states [1, B, H]."""
    if _lstm is None:
        module = nn.LSTM(x.shape[2], h.shape[2], batch_first=True, device="meta")
        names = (name for name, _ in module.named_parameters())
        return functional_call(module, dict(zip(names, weights, strict=True)), (x, (h, c)))[0]
    # oneDNN has no LSTM in bf16 for processors without AVX-512; PyTorch then computes it itself.
    lacking = torch.is_autocast_enabled("cpu") and torch.backends.cpu.get_cpu_capability() != "AVX512"
    with torch.backends.mkldnn.flags(enabled=False) if lacking else nullcontext():
        return _lstm(x, (h, c), list(weights), True, 1, 0.0, torch.is_grad_enabled(), False, True)[0]


def both_ways(lstm: nn.LSTM, x: Tensor, sizes: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    """Return states of a bidirectional LSTM of one layer, [B, L, 2H]. Values after the `sizes` of the rows are meaningless.

    First states are [2, B, H], by default zero.
    """
    if h is None or c is None:
        h = c = x.new_zeros(2, len(x), lstm.hidden_size)
    steps = torch.arange(x.shape[1])
    # The backward direction reads every row from its own end, so its padding also comes last.
    back = torch.where(steps < sizes[:, None], sizes[:, None] - 1 - steps, steps)
    rows = torch.arange(len(x))[:, None]
    ahead, behind = lstm.all_weights
    forward, backward = one_way(ahead, x, h[:1], c[:1]), one_way(behind, x[rows, back], h[1:], c[1:])[rows, back]
    # To turn `back` twice is the identity.
    return torch.cat([forward, backward], 2)


def highway(module: Any, x: Tensor, sizes: Tensor, h: Tensor, c: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute Stanza's `HighwayLSTM`: [B, L, D] to [B, L, 2H], with first states [2 layers, 1, H] and dropout between layers."""
    h, c = (first.expand(-1, len(x), -1).contiguous() for first in (h, c))
    for layer, packed in enumerate(module.lstm):
        if layer:
            x = drop(x)
        states = both_ways(packed.lstm, x, sizes, h[2 * layer : 2 * layer + 2], c[2 * layer : 2 * layer + 2])
        x = states + torch.sigmoid(module.gate[layer](x)) * module.highway_func(module.highway[layer](x))
    return x


def spell(module: Any, characters: Tensor, sizes: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute word representations of Stanza's `CharacterModel`: [words, H] from padded characters [words, L] and counts."""
    order = sizes.argsort(stable=True)
    out = []
    for part in order.chunk(_SPELLING_CHUNKS):
        longest = int(sizes[part].max())
        x = drop(module.char_emb(characters[part, :longest]))
        first = [p.expand(-1, len(part), -1).contiguous() for p in (module.charlstm_h_init, module.charlstm_c_init)]
        states = one_way(module.charlstm.lstm.all_weights[0], x, *first)
        weights = torch.sigmoid(module.char_attn(drop(states)))
        there = torch.arange(longest) < sizes[part, None]
        out.append((states * weights * there[..., None]).sum(1))
    return torch.cat(out)[order.argsort()]


def dropout(x: Tensor, share: float) -> Tensor:
    """Apply dropout from random bytes: PyTorch's own takes a fifth of a step on a CPU. The share is rounded to 256ths."""
    dropped = round(256 * share)
    if not dropped:
        return x
    kept = np.frombuffer(np.random.bytes(x.numel()), np.uint8) >= dropped
    return x * torch.from_numpy(kept).view(x.shape).to(x.dtype).mul_(256 / (256 - dropped))


class Dropout(nn.Module):
    """`dropout` as a module."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def replace_dropout(model: nn.Module) -> None:
    """Replace all dropout modules of PyTorch by `Dropout`. Names and weights stay."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, Dropout(child.p))


def level_lstm(lstm: nn.LSTM, inputs: Tensor, below: Tensor, edges: Sequence[int], layer: str) -> Tensor:
    """Compute hidden states [N, H] of one layer ("l0", "l1", "l0_reverse", ...) of `lstm` over `inputs` [N, I].

    `below` [N] is the row that each row continues. The rows of level 0, which ends at edges[1], start from zeros.
    """
    weight, recurrent, bias, recurrent_bias = (
        getattr(lstm, f"{name}_{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    return _LevelLSTM.apply(nn.functional.linear(inputs, weight, bias + recurrent_bias), recurrent, below, edges)


class _LevelLSTM(torch.autograd.Function):
    """One layer, from the part of the gates that comes from the inputs [N, 4H].

    The gradient of the weights is one product at the end.
    """

    @staticmethod
    def forward(ctx: Any, projected: Tensor, recurrent: Tensor, below: Tensor, edges: Sequence[int]) -> Tensor:
        size = recurrent.shape[1]
        gates = projected.clone()
        hidden, cell = projected.new_empty(len(gates), size), projected.new_empty(len(gates), size)
        weight = recurrent.t()
        for start, end in pairwise(edges):
            level = gates[start:end]
            if start:
                before = below[start:end]
                level.addmm_(hidden.index_select(0, before), weight)
            enter_forget, candidate, out = level[:, : 2 * size], level[:, 2 * size : 3 * size], level[:, 3 * size :]
            enter_forget.sigmoid_()
            candidate.tanh_()
            out.sigmoid_()
            now = cell[start:end]
            torch.mul(candidate, level[:, :size], out=now)
            if start:
                now.addcmul_(cell.index_select(0, before), level[:, size : 2 * size])
            torch.mul(torch.tanh(now), out, out=hidden[start:end])
        ctx.save_for_backward(gates, hidden, cell, recurrent, below)
        ctx.edges = edges
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gates, hidden, cell, recurrent, below = ctx.saved_tensors
        size, first = recurrent.shape[1], ctx.edges[1]
        enter, forget, candidate, out = gates.chunk(4, 1)
        tanh = cell.tanh()
        # All factors of the gradients in the recurrence, for all rows at once.
        to_cell = torch.addcmul(out, out * tanh, tanh, value=-1)
        to_out = tanh * out * (1 - out)
        before = torch.cat([cell.new_zeros(first, size), cell.index_select(0, below[first:])])
        to_candidate = torch.addcmul(enter, enter * candidate, candidate, value=-1)
        to_gates = torch.cat([candidate * enter * (1 - enter), before * forget * (1 - forget), to_candidate], 1).view(-1, 3, size)
        grad_gates = torch.empty_like(gates)
        grad_hidden, grad_cell = grad.clone(), torch.zeros_like(cell)
        for start, end in reversed(list(pairwise(ctx.edges))):
            level, now = grad_gates[start:end], grad_cell[start:end]
            now.addcmul_(grad_hidden[start:end], to_cell[start:end])
            torch.mul(to_gates[start:end], now[:, None], out=level[:, : 3 * size].view(-1, 3, size))
            torch.mul(to_out[start:end], grad_hidden[start:end], out=level[:, 3 * size :])
            if start:
                grad_hidden.index_add_(0, below[start:end], level @ recurrent)
                grad_cell.index_add_(0, below[start:end], now * forget[start:end])
        return grad_gates, grad_gates[first:].t() @ hidden.index_select(0, below[first:]), None, None


def plain_words(text: str) -> list[str]:
    """Return words of raw English text, split roughly as in treebanks: do n't, the dog 's."""
    return _WORD.findall(text)


def word_vectors(sentences: Iterable[Sequence[str]], words: Sequence[str], size: int, seed: int) -> Tensor:
    """Return vectors of lower-cased words: [words, size], root mean square 1; zero for words without a sentence.

    The matrix of positive pointwise mutual information has words as rows. Its columns are the words one and two places before and
    after, each place separately. It is approximated by rank `size`; the vectors are U sqrt(S).
    """
    lowered = [[word.lower() for word in sentence] for sentence in sentences]
    frequent = Counter(word for sentence in lowered for word in sentence).most_common(_FREQUENT)
    contexts = {word: i for i, (word, _) in enumerate(frequent)}
    rows = {word: i for i, word in enumerate(words)}
    edge, other = len(contexts), len(contexts) + 1
    # All sentences in a row, with two separators between them.
    row, context = [-1, -1], [edge, edge]
    for sentence in lowered:
        row += [rows.get(word, -1) for word in sentence] + [-1, -1]
        context += [contexts.get(word, other) for word in sentence] + [edge, edge]
    rows_of, contexts_of = np.array(row), np.array(context)
    here = np.flatnonzero(rows_of >= 0)
    num_contexts = len(contexts) + 2
    pairs = [rows_of[here] * (4 * num_contexts) + i * num_contexts + contexts_of[here + place] for i, place in enumerate(_PLACES)]
    distinct, counts = np.unique(np.concatenate(pairs), return_counts=True)
    at_row, at_column = np.divmod(distinct, 4 * num_contexts)
    of_row = np.bincount(at_row, counts)
    of_column = np.bincount(at_column, counts) ** _SMOOTHING
    information = np.log(counts / of_row[at_row] / (of_column[at_column] / of_column.sum()))
    kept = information > 0
    places = np.stack([at_row[kept], at_column[kept]])
    shape = len(words), 4 * num_contexts
    entries = torch.from_numpy(places), torch.from_numpy(information[kept])
    matrix = torch.sparse_coo_tensor(*entries, shape, dtype=torch.float32, check_invariants=True).coalesce()
    torch.manual_seed(seed)
    rank = min(size, *matrix.shape)
    left, scale, _ = torch.svd_lowrank(matrix, q=rank, niter=3)
    vectors = torch.zeros(len(words), size)
    vectors[:, :rank] = left * scale.sqrt()
    mean = vectors.square().mean().sqrt()
    return vectors / mean if mean else vectors  # zero if no word prefers a neighbour, as in sentences of one word


def start_words(embedding: nn.Embedding, vocab: WordVocab, sentences: Iterable[Sequence[str]], seed: int) -> None:
    """Initialise word embeddings with vectors that describe words by their neighbours."""
    first = len(VOCAB_PREFIX)
    vectors = word_vectors(sentences, vocab.unmap(range(first, len(vocab))), embedding.embedding_dim, seed)
    with torch.no_grad():
        embedding.weight.mul_(_WORD_SCALE)
        embedding.weight[first:] = _WORD_SCALE * vectors


def save_halved(path: Path, model: nn.Module, **facts: object) -> None:
    """Save a model with weights in half precision, and further entries of Stanza's format."""
    weights = {name: value.half() for name, value in model.state_dict().items()}
    with atomic_output(path) as file:
        torch.save({"model": weights, **facts}, file)
