"""`TreeStructure`: the trees of a batch, as tree attention reads them.

Shapes: B batch, L leaves, N nonterminals, S = L + N positions (leaves, then nodes in pre-order).
Names of the paper, for leaf j and node i:

- |V_j^i| is the height of node i above leaf j: the number of nodes from j up to i. Node i counts, the leaf does not.
- |H_j^i| is the rank of leaf j in the span of node i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from treenet.structure.attention_maps import (
    AttentionMaps,
    AttentionPath,
    Blocks,
    build_attend_mask,
    build_attention_maps,
    choose_attention_path,
)
from treenet.structure.base import SpanTable, Structure, tensors_of
from treenet.structure.branches import COMPACT_BELOW_POSITIONS, WIDTH_MULTIPLE, BranchMaps, BranchMatrices, Depths
from treenet.structure.from_packages import read_conllu, read_nltk, read_spacy, read_stanza
from treenet.structure.from_trees import NumberedTree, Span, read_arcs, read_bracketed, read_spans
from treeproc.common.errors import UserError, as_integer, as_list, check_type, quoted
from treeproc.trees.dependency_trees import PhraseShape

_MOST_NESTED = 32  # trees[0][0]...: PyTorch goes to 128 before it gives up


@dataclass
class TreeStructure(Structure):
    """Trees of a batch. Padding nodes cover nothing, so nothing of a padding position reaches a real one."""

    positions_of_node: ClassVar[int] = 1
    _nested = 0  # how often the one tree of a batch was chosen from the batch before it

    start: Tensor  # [B, N] int64, first leaf of a node; for accelerators int32, as the next two
    end: Tensor  # [B, N] int64, one past its last leaf; 0 for padding
    subtree_end: Tensor  # [B, N] int64, one past the last node of its subtree; 0 for padding
    leaf_pad_mask: Tensor  # [B, L] bool, True = padding
    node_pad_mask: Tensor  # [B, N] bool, True = padding
    branches: BranchMaps | Depths | BranchMatrices  # for hierarchical accumulation; of depths `prepare` makes matrices
    attention: AttentionMaps | Blocks | None  # for subtree attention; None if `prepare` makes them of the spans
    labels: tuple[tuple[str, ...], ...] | None = None  # of the nodes of each tree, where `from_...` read names

    @classmethod
    def build(
        cls,
        num_leaves: Sequence[int] | np.ndarray,
        spans: Sequence[np.ndarray],
        *,
        attention_path: AttentionPath | None = None,
        sparse: bool | None = None,
    ) -> "TreeStructure":
        """Build maps of a padded batch, L = max(num_leaves) and N = max nodes, both at least 1.

        `spans[b]` is [N_b, 3]: start, end, subtree_end of each node in pre-order; several roots and N_b = 0 are
        legal. `attention_path` and `sparse` override the choices by size. Raises UserError if nodes are not trees in
        pre-order: a span that leaves its sentence or its parent, or begins before the end of an earlier sibling or root.
        """
        table = SpanTable.build(num_leaves, spans)
        path = attention_path or choose_attention_path(table.num_leaves, table.num_nodes)
        return cls._from_table(table, np.int64, BranchMaps.build(table, sparse), build_attention_maps(table, path))

    @classmethod
    def build_compact(cls, num_leaves: Sequence[int] | np.ndarray, spans: Sequence[np.ndarray]) -> "TreeStructure":
        """Build the same trees for an accelerator, which makes masks and weights of spans and depths; L and N are rounded up.

        Batches of long trees keep index lists of branches.
        """
        table = SpanTable.build(num_leaves, spans, WIDTH_MULTIPLE)
        compact = table.num_leaves + table.num_nodes < COMPACT_BELOW_POSITIONS
        return cls._from_table(table, np.int32, Depths.build(table) if compact else BranchMaps.build(table), None)

    @classmethod
    def _from_table(
        cls, table: SpanTable, dtype: type[np.integer], branches: BranchMaps | Depths, attention: AttentionMaps | None
    ) -> "TreeStructure":
        """Build from a table, whose spans become numbers of `dtype`."""
        spans = table.start, table.end, table.subtree_end
        start, end, subtree_end = (torch.from_numpy(np.ascontiguousarray(column, dtype=dtype)) for column in spans)
        masks = torch.from_numpy(table.leaf_pad_mask), torch.from_numpy(table.node_pad_mask)
        return cls(start, end, subtree_end, *masks, branches, attention)

    @classmethod
    def from_brackets(cls, trees: Sequence[str], *, collapse_unary: bool = True) -> "TreeStructure":
        """Build one tree an example in Penn Treebank brackets: `["(S (NP (DT the) (NN dog)) (VP (VBD ran)))"]`.

        The trees get the normal form of data sets: function tags and empty elements are removed, and a unary chain keeps its
        lowest label, unless `collapse_unary` is false. Tags of words are not nodes. Raises UserError with the tree and the
        character at fault.
        """
        return cls._of(read_bracketed(trees, collapse_unary=collapse_unary))

    @classmethod
    def from_spans(cls, trees: Sequence[Sequence[Span]], num_leaves: Sequence[int] | None = None) -> "TreeStructure":
        """Build one tree an example as its nodes: `[[(0, 3, "S"), (0, 2, "NP"), (2, 3, "VP")]]`, leaves [start, end).

        Labels are optional. Nodes may have any order. If two have the same span, the first is the upper one. `num_leaves` [B]
        is needed for a tree that goes on after its last span, or has no span. Raises UserError for spans that cross or leave
        their tree.
        """
        return cls._of(read_spans(trees, num_leaves))

    @classmethod
    def from_arcs(
        cls,
        governors: Sequence[Sequence[int]],
        *,
        shape: PhraseShape = "flat",
        relations: Sequence[Sequence[str]] | None = None,
        tags: Sequence[Sequence[str]] | None = None,
    ) -> "TreeStructure":
        """Build one dependency tree an example: `[[1, 2, -1]]`, the governor of each word, -1 for the root, counted from 0.

        A head and what depends on it make a phrase. Arcs that cross are lifted.
        Universal `relations` and `tags`, one a word, name the nodes; "layered" needs both. Raises UserError for arcs that do
        not form a tree with one root.
        """
        return cls._of(read_arcs(governors, shape, relations, tags))

    @classmethod
    def from_conllu(cls, text: str, *, shape: PhraseShape = "flat") -> "TreeStructure":
        """Build one tree a sentence of a text in CoNLL-U, with the phrases of `from_arcs`, and PRN over what stands in brackets.

        Phrases follow from universal tags where there are any. A data set reads Penn's tags of an English file, with other
        phrases over some single words.

        A multiword token whose words do not spell it is one leaf, as in data sets. Raises UserError with the line at fault.
        """
        return cls._of(read_conllu(text, shape))

    @classmethod
    def from_spacy(cls, docs: Any, *, shape: PhraseShape = "flat") -> "TreeStructure":
        """Build one tree a sentence of a Doc of spaCy, or one tree an item of a list of documents or spans.

        The phrases are those of `from_arcs`, and every token is a leaf. Raises UserError without a parse, and if an item of
        a list is not one sentence.
        """
        return cls._of(read_spacy(docs, shape))

    @classmethod
    def from_stanza(cls, document: Any, *, shape: PhraseShape | None = None, collapse_unary: bool = True) -> "TreeStructure":
        """Build one tree a sentence of a Document of Stanza, or one tree an item of a list of documents or sentences.

        Without a `shape`, the trees are the constituents, in the form of `from_brackets`; with one, the phrases of `from_arcs`.
        The leaves are the syntactic words. Raises UserError if a sentence lacks what is asked for.
        """
        return cls._of(read_stanza(document, shape, collapse_unary=collapse_unary))

    @classmethod
    def from_nltk(cls, trees: Any, *, collapse_unary: bool = True) -> "TreeStructure":
        """Build one tree an nltk.Tree of a list, in the form of `from_brackets`. A leaf has a node with its tag, or is a pair.

        Raises UserError for leaves of other kinds.
        """
        return cls._of(read_nltk(trees, collapse_unary=collapse_unary))

    @classmethod
    def _of(cls, trees: Sequence[NumberedTree]) -> "TreeStructure":
        if not trees:
            raise UserError("a batch must have at least one tree, but has none")
        structure = cls.build([tree.num_leaves for tree in trees], [tree.spans for tree in trees])
        return replace(structure, labels=tuple(tree.labels for tree in trees))

    @classmethod
    def cat(cls, structures: Sequence["TreeStructure"]) -> "TreeStructure":
        """Join batches to one, padded anew, on the device of the first. It has labels if all of them have."""
        given = as_list("structures", structures, "TreeStructures")
        for number, structure in enumerate(given):
            check_type(f"structures[{number}]", structure, TreeStructure)
        if not given:
            raise UserError("a batch must have at least one tree, but has none")
        counts, spans = (
            [tree for part in parts for tree in part] for parts in zip(*(one.unpadded() for one in given), strict=True)
        )
        labelled = [one.labels for one in given if one.labels is not None]
        labels = tuple(names for own in labelled for names in own) if len(labelled) == len(given) else None
        return given[0]._like(counts, spans, labels)

    def __len__(self) -> int:
        """Return the number of trees in the batch. Raises UserError if PyTorch reads a tree as nested lists of numbers."""
        if self._nested > _MOST_NESTED:
            raise UserError(
                "PyTorch cannot make a tensor of a TreeStructure, as this collator asks it to; wrap the collator: "
                "treenet.TreeCollator(collator)"
            )
        return len(self.leaf_pad_mask)

    def __getitem__(self, place: "int | slice | Sequence[int]") -> "TreeStructure":
        """Return the chosen trees as a batch, padded anew; for one place a batch of one tree.

        Raises IndexError for a place beyond the batch, so a loop over a batch ends.
        """
        if isinstance(place, slice):
            rows = list(range(len(self)))[place]
        elif hasattr(place, "__len__") and getattr(place, "ndim", None) != 0:
            rows = [as_integer("a place in the batch", one) for one in as_list("places in the batch", place, "integers")]
        else:
            rows = [as_integer("a place in the batch", place)]
        if not rows:
            raise UserError(f"a batch must have at least one tree, but {quoted(place)} chooses none of {len(self)}")
        rows = [range(len(self))[row] for row in rows]
        labels = tuple(self.labels[row] for row in rows) if self.labels is not None else None
        chosen = self._like(*self.unpadded(rows), labels)
        chosen._nested = self._nested + 1 if len(self.leaf_pad_mask) == 1 else 0
        return chosen

    def unpadded(self, rows: list[int] | slice = slice(None)) -> tuple[list[int], list[np.ndarray]]:
        """Return the number of leaves, and the spans [nodes, 3], of each chosen tree."""
        spans = torch.stack([column[rows] for column in (self.start, self.end, self.subtree_end)], dim=2).numpy(force=True)
        leaves, nodes = ((~mask[rows]).sum(1).tolist() for mask in (self.leaf_pad_mask, self.node_pad_mask))
        return leaves, [own[:count] for own, count in zip(spans, nodes, strict=True)]

    def _like(self, counts: list[int], spans: list[np.ndarray], labels: tuple | None) -> "TreeStructure":
        """Return a batch of other trees, in the form and on the device of this one."""
        build = type(self).build if self.attention is not None else type(self).build_compact
        return replace(build(counts, spans).to(self.device), labels=labels)

    def __repr__(self) -> str:
        sizes = f"trees={len(self)}, leaves={self.num_leaves}, nodes={self.num_nodes}"
        return f"{type(self).__name__}({sizes}, device={str(self.device)!r})"

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.leaf_pad_mask.device

    def node_means(self, leaves: Tensor) -> Tensor:
        """Return the mean of the leaves of each node: [B, L, D] -> [B, N, D], 0 for padding. Node states to begin with.

        Raises UserError for states of another shape, or of integers.
        """
        if not isinstance(leaves, Tensor) or leaves.dim() != 3 or leaves.shape[:2] != self.leaf_pad_mask.shape:
            found = list(leaves.shape) if isinstance(leaves, Tensor) else f"a {type(leaves).__name__}"
            wanted = f"[{len(self)}, {self.num_leaves}, any number]"
            raise UserError(f"the states of the leaves must be a tensor {wanted}, but are {found}")
        if not leaves.is_floating_point():
            raise UserError(f"the states of the leaves must be floating-point numbers, but are {leaves.dtype}")
        position = torch.arange(self.num_leaves, device=leaves.device)
        start, end = (x.to(leaves.device)[..., None] for x in (self.start, self.end))
        inside = (start <= position) & (position < end)
        real = leaves.masked_fill(self.leaf_pad_mask.to(leaves.device)[..., None], 0)
        shares = inside.to(torch.promote_types(leaves.dtype, torch.float32)) / (end - start).clamp(min=1)
        return shares.to(leaves.dtype) @ real

    @property
    def num_leaves(self) -> int:
        """Return L, padding included."""
        return self.leaf_pad_mask.shape[1]

    @property
    def num_nodes(self) -> int:
        """Return N, padding included."""
        return self.node_pad_mask.shape[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all maps."""
        return sum(tensor.nbytes for tensor in tensors_of(self))

    def attend_mask(self) -> Tensor:
        """Return [B, S, S] bool of equation 11, made anew: True = may attend; a padding query sees itself alone."""
        leaf_counts, node_counts = ((~mask).sum(1).numpy(force=True) for mask in (self.leaf_pad_mask, self.node_pad_mask))
        start, end, subtree_end = (x.numpy(force=True) for x in (self.start, self.end, self.subtree_end))
        table = SpanTable(leaf_counts, node_counts, start, end, subtree_end, self.num_leaves)
        return torch.from_numpy(build_attend_mask(table)).to(self.start.device)
