"""Slow and obvious: tree regularisation and Transformer Grammars as in their papers, one span and one action at a time."""

import math
from dataclasses import dataclass, field

import torch
from strategies import Tree
from torch import Tensor


@dataclass
class Nested:
    """A node with its children in order; a child is a node or the number of a leaf."""

    start: int
    end: int
    number: int
    children: list = field(default_factory=list)


def nest(tree: Tree, leaves: range, parent: int = -1) -> list:
    """The nodes and bare leaves below `parent`, or side by side at the top, over these leaves."""
    out: list = []
    place = leaves.start
    for number, (start, end, _) in enumerate(tree.spans):
        if tree.parents[number] == parent:
            out += range(place, start)
            out.append(Nested(start, end, number, nest(tree, range(start, end), number)))
            place = end
    return out + list(range(place, leaves.stop))


# Tree regularisation (Nandi, Manning and Murty, 2024).


def orthogonal_norm(x: Tensor, y: Tensor) -> Tensor:
    """The norm of x less its projection on y."""
    length = y.norm()
    direction = y / length if length > 0 else y
    return (x - (x @ direction) * direction).norm()


def scin(states: Tensor, start: int, end: int) -> Tensor:
    """The span contextual independence score of the leaves [start, end)."""
    zero = states.new_zeros(())
    from_left = orthogonal_norm(states[end - 1], states[start - 1]) if start > 0 else zero
    to_right = orthogonal_norm(states[end], states[end - 1]) if end < len(states) else zero
    return from_left + to_right


def binary_splits(node: Nested) -> list[tuple[int, int, int]]:
    """Start, split and end of every binary split of a tree made binary from the right."""
    starts = [child if isinstance(child, int) else child.start for child in node.children]
    found = [(first, second, node.end) for first, second in zip(starts, starts[1:], strict=False)]
    for child in node.children:
        if isinstance(child, Nested):
            found += binary_splits(child)
    return found


def reference_tree_reg(tree: Tree, words: list[int], states: Tensor) -> Tensor:
    """The mean cross-entropy of the splits of a sentence; 0 without any."""
    begins = [place for place, word in enumerate(words) if place == 0 or words[place - 1] != word]
    losses = []
    for root in nest(tree, range(tree.num_leaves)):
        for start, split, end in binary_splits(root) if isinstance(root, Nested) else ():
            candidates = [place for place in begins if start < place < end]
            if split in candidates and len(candidates) > 1:
                scores = torch.stack([scin(states, start, k) + scin(states, k, end) for k in candidates])
                losses.append(-scores.log_softmax(0)[candidates.index(split)])
    return torch.stack(losses).mean() if losses else states.new_zeros(())


# Transformer Grammars (Sartran et al., 2022).


def linearise(tree: Tree, words: list[int], pieces: list[int], labels: list[int]) -> list[tuple[str, int]]:
    """The actions of a sentence: ("piece", id), ("open", label), ("close", label). Words of several pieces have no node."""
    out: list[tuple[str, int]] = []

    def is_word(node: Nested) -> bool:
        """Whether the node is the lowest one over the pieces of a word, or a part of such a word."""
        word = [place for place in range(len(words)) if words[place] == words[node.start]]
        if len(word) == 1 or node.end - 1 > word[-1]:
            return False
        whole = node.start == word[0] and node.end == word[-1] + 1
        child = node.children[0]
        return not whole or not (isinstance(child, Nested) and (child.start, child.end) == (node.start, node.end))

    def visit(item: Nested | int) -> None:
        if isinstance(item, int):
            out.append(("piece", pieces[item]))
            return
        keep = not is_word(item)
        if keep:
            out.append(("open", labels[item.number]))
        for child in item.children:
            visit(child)
        if keep:
            out.append(("close", labels[item.number]))

    for item in nest(tree, range(tree.num_leaves)):
        visit(item)
    return out


@dataclass
class Position:
    """A position of the transformed sequence: what it reads, what it attends to, how deep it is, and what it predicts."""

    symbol: tuple[str, int]
    attends: list[int]
    depth: int
    predicts: tuple[str, int] | None


def stack_machine(actions: list[tuple[str, int]]) -> list[Position]:
    """Algorithm 1: a closing nonterminal comes twice. COMPOSE pops the constituent and pushes its composition; STACK reads."""
    out = [Position(("bos", 0), [0], 0, None)]
    stack, open_at = [0], []
    for action in actions:
        out[-1].predicts = action
        here = len(out)
        if action[0] != "close":
            out.append(Position(action, [*stack, here], 1 + len(open_at), None))
            stack.append(here)
            if action[0] == "open":
                open_at.append(here)
            continue
        popped = []
        while stack[-1] != open_at[-1]:
            popped.append(stack.pop())
        popped.append(stack.pop())
        open_at.pop()
        depth = 1 + len(open_at)
        out.append(Position(action, [*reversed(popped), here], depth, None))  # COMPOSE
        stack.append(here)
        out.append(Position(action, [*stack, here + 1], depth, None))  # STACK, which is not pushed
    out[-1].predicts = ("eos", 0)
    return out


def reference_depth_attention(layer: torch.nn.Module, x: Tensor, positions: list[Position], sinusoids: Tensor) -> Tensor:
    """One sentence [A, D] through a `DepthAttention`, pair by pair, with its own parameters."""
    heads, width = layer.num_heads, x.shape[1] // layer.num_heads
    queries, keys, values = layer.queries_keys_values(x).chunk(3, dim=1)
    relative = layer.positions(sinusoids)
    rows = []
    for i, position in enumerate(positions):
        parts = []
        for h in range(heads):
            of_head = slice(h * width, (h + 1) * width)
            u, v = layer.content_bias[h, 0], layer.position_bias[h, 0]
            scores = []
            for j in position.attends:
                difference = min(max(position.depth - positions[j].depth, -1), 62)
                by_content = (queries[i, of_head] + u) @ keys[j, of_head]
                by_depth = (queries[i, of_head] + v) @ relative[difference + 1, of_head]
                scores.append((by_content + by_depth) / math.sqrt(width))
            weights = torch.stack(scores).softmax(0)
            parts.append(sum(weight * values[j, of_head] for weight, j in zip(weights, position.attends, strict=True)))
        rows.append(torch.cat(parts))
    return layer.output(torch.stack(rows))
