"""Settings of the trees of a data set."""

from typing import Literal

from pydantic import Field

from treeproc.common.settings import Settings
from treeproc.trees.dependency_trees import PhraseLabels, PhraseShape
from treeproc.trees.flat_trees import ControlTree


class TreeConfig(Settings):
    """Settings of the trees that models read: their source and their form."""

    tree_source: Literal["parsed", "dependencies", "shuffled", ControlTree] = Field(
        "parsed",
        description="'parsed': the parser's constituents. 'dependencies': phrases made of its arcs (parser.dependencies=true); "
        "the default with parser.constituency=false. 'shuffled': the constituents of another line of the split with as many "
        "words. The others are control trees over the same words",
    )
    phrases: PhraseShape = Field(
        "layered",
        description="for tree_source: dependencies. 'layered': as in a treebank, NP in PP in VP in S. 'flat': a node for a head "
        "with its dependents. 'left', 'right': a node for every dependent, those of that side first",
    )
    phrase_labels: PhraseLabels = Field(
        "upos",
        description="for tree_source: dependencies; labels by the head's tag (NP, VP, ...), or by its relation (nsubj, obl, ...)",
    )
    side: Literal["source", "target"] = Field(
        "source", description="the side whose words are leaves; models write the other side"
    )
    collapse_unary: bool = Field(
        True, description="join a chain of nodes over the same words into one node, with the lowest label"
    )
    binarize: Literal["none", "left", "right"] = Field(
        "none", description="make trees binary: a node with more than two children gets inner nodes, labelled @ and its label"
    )
    documents: Literal["separate", "dummy_root"] = Field(
        "separate",
        description="'separate': the trees of an example are side by side. 'dummy_root': they are below one more node, labelled "
        "DOC. If unset: dummy_root for translation pairs with parser.split_sentences",
    )
    seed: int = Field(1, description="seed of random and of shuffled trees")

    def facts(self) -> dict:
        """Return the settings that decide on the trees, for fingerprints and the index."""
        return self.model_dump(exclude=set() if self.tree_source == "dependencies" else {"phrases", "phrase_labels"})

    @property
    def other_side(self) -> str:
        """Return the side that models write."""
        return "target" if self.side == "source" else "source"

    @property
    def parsed_columns(self) -> tuple[str, str]:
        """Return the words and trees of the leaves' side in a parsed shard."""
        return ("words", "trees") if self.side == "source" else ("target_words", "target_trees")

    @property
    def arcs_column(self) -> str:
        """Return the dependencies of the leaves' side in a parsed shard that has them."""
        return "arcs" if self.side == "source" else "target_arcs"
