"""Trees of a batch as integer maps: built once per batch, shared by every layer, head and attention."""

from treenet.structure.attention import AttentionMaps, AttentionPath, choose_attention_path
from treenet.structure.branches import BranchMaps, choose_sparse
from treenet.structure.maps import TreeStructure

__all__ = ["AttentionMaps", "AttentionPath", "BranchMaps", "TreeStructure", "choose_attention_path", "choose_sparse"]
