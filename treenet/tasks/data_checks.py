"""Checks that a data set has the trees, arcs, tags and labels that a model needs."""

from collections.abc import Mapping
from functools import partial

import torch

from treenet.config import TrainConfig
from treenet.data.input_kinds import InputKind
from treenet.models import DataFacts, Encoder
from treenet.models.pretrained import FACTS as PRETRAINED
from treenet.models.pretrained import PretrainedLeaves
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED, UNKNOWN_LABEL
from treeproc.shards.store import read_index
from treeproc.shards.vocabulary_files import read_names
from treeproc.trees.flat_trees import BINARY_PREFIX

PARSER_TREES = ("parsed", "dependencies")  # tree.tree_source of data sets whose trees are no control


def check_structure(config: TrainConfig, index: Mapping, encoder: type[Encoder]) -> None:
    """Raise UserError if the data set lacks trees, arcs, tags or labels that the encoder is made for."""
    model, data, reads = config.model, config.data, encoder.reads_with(config.model)
    if reads.binary and index.get("tree_settings", {}).get("binarize") == "none":
        raise UserError(
            f"{data} has trees that need not be binary, and model.name = {model.name} reads binary ones; preprocess again with "
            "tree.binarize=right and parsed set to its folder"
        )
    check_no_control(data, index, reads, model.name)
    encoder.check_data(model, DataFacts(data, partial(_says_anything, data)))


def check_valid_lengths(config: TrainConfig, sizes: Mapping) -> None:
    """Raise UserError if an example of valid is too long for its pretrained encoder. `batch.max_leaves` holds for train."""
    if PRETRAINED in sizes:
        longest = [record.longest.get("leaves", 0) for record in read_index(config.data / "encoded").records("valid")]
        with torch.device("meta"):
            PretrainedLeaves(sizes[PRETRAINED], config.model.d_model).check_length(max(longest, default=0))


def check_no_control(data: AnyPath, index: Mapping, reads: InputKind, name: str) -> None:
    """Raise UserError for control trees if the model reads arcs, because arcs always come from the parser."""
    source = index.get("tree_settings", {}).get("tree_source", "parsed")
    if reads.reads_arcs and source not in PARSER_TREES and "arcs" in index.get("columns", ["arcs"]):
        raise UserError(
            f"{data} has {source} trees, but the arcs of the parser, which model.name = {name} reads, so it is not a control; "
            f"choose a data set of tree.tree_source={' or '.join(PARSER_TREES)}"
        )


def _says_anything(data: AnyPath, vocabulary: str) -> bool:
    """Return whether there are two tags or labels at least, without the unknown one and those of split words and binarisation."""
    names = read_names(data / "encoded" / "vocab" / f"{vocabulary}.txt")
    informative = {name for name in names if not name.startswith((SPLIT_WORD_PREFIX, BINARY_PREFIX))}
    return len(informative - {UNKNOWN_LABEL, UNANALYSED}) > 1
