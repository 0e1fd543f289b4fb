"""Checks that trees, arcs, tags and labels of a data set are those that a model is about."""

from collections.abc import Mapping

from treenet.config import TrainConfig
from treenet.data.batch import READS_ARCS, Reads
from treeproc.common.files import read_text
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED, UNKNOWN_LABEL
from treeproc.trees.forest import BINARY_PREFIX

PARSER_TREES = ("parsed", "dependencies")  # tree.tree_source of data sets whose trees are no control


def check_structure(config: TrainConfig, index: Mapping, reads: Reads) -> None:
    """Raises UserError where trees, arcs, tags or labels of the data set are not those that the model is about."""
    trees, model, data = index.get("tree_settings", {}), config.model, config.data
    if reads == "binary_trees" and trees.get("binarize") == "none":
        raise UserError(
            f"{data} has trees that need not be binary, and model.name = {model.name} reads binary ones; preprocess again with "
            "tree.binarize=right and parsed set to its folder"
        )
    check_no_control(data, index, reads, model.name)
    if reads in ("words", "dependencies") and model.relations.label_head == "pos_tag" and not _says_anything(data, "pos_tags"):
        raise UserError(
            f"{data} has no part-of-speech tags, which model.relations.label_head = pos_tag reads; preprocess again with "
            "parser.name=stanza, or of given trees with parser.given_labels=parsed"
        )
    if reads == "phrases" and model.phrases.tag_loss and not _says_anything(data, "labels"):
        raise UserError(
            f"{data} has one label for all phrases, which model.phrases.tag_loss has nothing to learn from; set it to 0, or "
            "preprocess again with parser.name=stanza, or of given trees with parser.given_labels=parsed"
        )


def check_no_control(data: AnyPath, index: Mapping, reads: Reads, name: str) -> None:
    """Raises UserError for control trees where the model reads arcs, which are the parser's whatever the trees."""
    source = index.get("tree_settings", {}).get("tree_source", "parsed")
    if reads in READS_ARCS and source not in PARSER_TREES and "arcs" in index.get("columns", ["arcs"]):
        raise UserError(
            f"{data} has {source} trees, but the parser's arcs, which model.name = {name} reads: it would be no control; choose "
            f"a data set of tree.tree_source={' or '.join(PARSER_TREES)}"
        )


def _says_anything(data: AnyPath, vocabulary: str) -> bool:
    """Whether tags or labels tell apart: two of them at least, beside the unknown and those of split words and of binarising."""
    names = read_text(data / "encoded" / "vocab" / f"{vocabulary}.txt", "run workflows/preprocess.py again").splitlines()
    told = {name for name in names if not name.startswith((SPLIT_WORD_PREFIX, BINARY_PREFIX))}
    return len(told - {UNKNOWN_LABEL, UNANALYSED}) > 1
