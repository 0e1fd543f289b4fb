"""Trees of a batch as integer maps: built once per batch, shared by every layer, head and attention."""

from treenet.structure.attention_maps import AttentionMaps, AttentionPath, choose_attention_path
from treenet.structure.base import SpanTable, Structure
from treenet.structure.branches import BranchMaps, choose_sparse
from treenet.structure.collation import TreeCollator
from treenet.structure.maps import TreeStructure
from treenet.structure.phrases import NO_TAG, Partition, PhraseLevels, SplitPoints
from treenet.structure.sequences import Actions, LinearizedTrees
from treenet.structure.tree_levels import ArcLevels, TreeLevels
from treenet.structure.words import Dependencies, Words

__all__ = [
    "NO_TAG",
    "Actions",
    "ArcLevels",
    "AttentionMaps",
    "AttentionPath",
    "BranchMaps",
    "Dependencies",
    "LinearizedTrees",
    "Partition",
    "PhraseLevels",
    "SpanTable",
    "SplitPoints",
    "Structure",
    "TreeCollator",
    "TreeLevels",
    "TreeStructure",
    "Words",
    "choose_attention_path",
    "choose_sparse",
]
