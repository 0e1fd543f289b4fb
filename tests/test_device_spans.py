"""The compact form of trees, as accelerators get it: from the same spans as the index lists, checked as strictly."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import batch_of
from reference import ancestors
from strategies import Tree, batches, right_branching

from treenet.data.input_kinds import BINARY_TREES, LEAVES, TREES
from treenet.structure import BranchMaps, SpanTable, TreeStructure
from treenet.structure.attention_maps import choose_attention_path
from treenet.structure.branches import COMPACT_BELOW_POSITIONS, Depths
from treeproc.common.settings import UserError


def build_compact(sentences: list[Tree]) -> TreeStructure:
    return TreeStructure.build_compact([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])


@given(sentences=batches())
@num_examples(50)
def test_spans_and_depths_are_those_of_the_trees(sentences):
    compact = build_compact([*sentences, right_branching(110)])
    assert compact.num_leaves % 8 == compact.num_nodes % 8 == compact.branches.levels % 8 == 0
    for b, tree in enumerate(sentences):
        count = len(tree.spans)
        found = torch.stack([compact.start[b], compact.end[b], compact.subtree_end[b]], dim=1)
        assert found.dtype == torch.int32 and not found[count:].any()
        assert found[:count].tolist() == tree.spans
        depths = [len(ancestors(node, tree.parents)) - 1 for node in range(count)]
        assert compact.branches.node[b, :count].tolist() == depths
        above = [sum(start <= leaf < end for start, end, _ in tree.spans) for leaf in range(tree.num_leaves)]
        assert compact.branches.leaf[b, : tree.num_leaves].tolist() == above
        assert compact.branches.levels >= max(above)
        assert (~compact.leaf_pad_mask[b]).sum() == tree.num_leaves and (~compact.node_pad_mask[b]).sum() == count


def intervals(count: int) -> st.SearchStrategy[list[list[int]]]:
    """[start, end, subtree_end] of nodes in their order; whether they are trees is left to chance."""
    leaves = st.integers(0, 4).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 5)))
    spans = [st.tuples(leaves, st.integers(i + 1, count)).map(lambda node: [*node[0], node[1]]) for i in range(count)]
    return st.tuples(*spans).map(list)


def are_trees(spans: list[list[int]]) -> bool:
    """Hold every node against all later ones: each is within it, or after it."""
    return all(
        (start <= other[0] and other[1] <= end and other[2] <= subtree_end) if later < subtree_end else other[0] >= end
        for node, (start, end, subtree_end) in enumerate(spans)
        for later, other in enumerate(spans)
        if later > node
    )


@given(trees=st.lists(st.integers(1, 4).flatmap(intervals), min_size=1, max_size=3))
@num_examples(150)
def test_spans_that_are_no_trees_are_refused(trees):
    """The check reads the parent alone, and the last end of the subtrees before a node."""
    arrays, found = [np.array(tree) for tree in trees], []
    for build in (SpanTable.build, TreeStructure.build, TreeStructure.build_compact):
        try:
            build([5] * len(trees), arrays)
            found.append(True)
        except UserError as error:
            assert re.match(r"tree \d of the batch, node \d: (leaves and nodes of its subtree must|must start at)", str(error))
            found.append(False)
    assert found == [all(map(are_trees, trees))] * 3


@given(sentences=batches())
@num_examples(50)
def test_trees_are_trees(sentences):
    assert all(are_trees(tree.spans) for tree in sentences)
    SpanTable.build([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])


def test_kinds_change_their_form_for_accelerators_alone():
    assert TREES.for_device("cpu") is TREES and LEAVES.for_device("cpu") is LEAVES
    assert BINARY_TREES.for_device("cuda").build is BINARY_TREES.build
    trees = [right_branching(9), right_branching(3)]
    for kind in (LEAVES, TREES):
        batch, plain = (batch_of(trees, form) for form in (kind.for_device("cuda"), kind))
        assert batch.leaf_pieces.shape == (2, 16) and batch.node_labels.shape == (2, 8) and plain.leaf_pieces.shape == (2, 9)
        assert torch.equal(batch.leaf_pieces[:, :9], plain.leaf_pieces) and batch.leaf_pad_mask[:, 9:].all()
        targets = batch_of(trees, kind.for_device("cuda"), target_length=0)
        assert targets.tgt_in.shape == targets.tgt_out.shape == (2, 2) and targets.num_target_tokens == 2
    assert isinstance(batch.structure.branches, Depths)
    assert torch.equal(batch.structure.node_pad_mask, batch.node_pad_mask)
    assert batch.structure.num_bytes < plain.structure.num_bytes


def test_long_trees_keep_index_lists():
    structure = build_compact([right_branching(COMPACT_BELOW_POSITIONS // 2 + 1)])
    assert isinstance(structure.branches, BranchMaps) and structure.attention is None
    with pytest.raises(UserError, match="must lie within its own"):
        TreeStructure.build_compact([4], [np.array([[0, 2, 2], [0, 4, 2]])])


def test_the_first_node_that_is_no_span_is_named():
    """A node without a leaf, one that ends behind the last leaf or node, or before it begins; the second one is not named."""
    whole = [0, 3, 3]
    for wrong in ([2, 2, 2], [0, 4, 2], [-1, 1, 2], [0, 1, 1], [0, 1, 4]):
        with pytest.raises(
            UserError, match=r"^tree 1 of the batch, node 1: .* <= 3 leaves and 1 < subtree_end <= 3 nodes"
        ) as found:
            SpanTable.build([5, 3], [np.array([[0, 5, 1]]), np.array([whole, wrong, [3, 3, 3]])])
        assert f"start, end, subtree_end are {', '.join(map(str, wrong))}; encode the data again" in str(found.value)
    SpanTable.build([5, 3], [np.array([[0, 5, 1]]), np.array([whole, [0, 1, 2], [2, 3, 3]])])


@pytest.mark.parametrize(
    ("positions", "path"), [(2, "one"), (319, "one"), (320, "two"), (479, "two"), (480, "window"), (9999, "window")]
)
def test_the_path_of_attention_is_chosen_by_positions(positions, path):
    assert {choose_attention_path(leaves, positions - leaves) for leaves in (1, positions // 2, positions - 1)} == {path}
