"""Every translation model at a tiny size, and batches of the form that it reads: what tests/test_models.py holds of all."""

import numpy as np
import torch
from strategies import Tree, binarised

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch, collate
from treenet.data.input_kinds import TREES, InputKind
from treenet.models import Seq2Seq, VocabSizes, build_model

POS_TAGS, RELATIONS = 5, 6
VOCAB = VocabSizes(pieces=23, labels=7, pos_tags=POS_TAGS, deprels=RELATIONS)
# Settings by the name of the case, which is model.name where there is none.
MODEL_CASES: dict[str, dict] = {
    "lstm_hybrid": {"name": "on_lstm_hybrid", "hybrid": {"cell": "lstm", "short_cut": False}},
    "multi_granularity": {"num_heads": 4, "phrases": {"ngrams": [2], "levels": [1, 2], "chunk_size": 2}},
    "multi_granularity_attention": {
        "name": "multi_granularity",
        "num_heads": 4,
        "phrases": {"ngrams": [3], "levels": [2], "num_layers": 2, "composition": "attention", "interaction": "none"},
    },
    "on_lstm_hybrid": {"num_encoder_layers": 3, "hybrid": {"num_recurrent_layers": 2, "chunk_size": 4}},
    "convs2s": {},
    "convs2s_released": {"name": "convs2s", "convs2s": {"rule": "released", "encoder_kernel": 4, "decoder_kernel": 2}},
    "dynamicconv": {},
    "lightconv": {"convolution": {"encoder_kernels": [4, 31], "decoder_kernels": [1, 3], "gated": False}},
    "bilstm": {},
    "lstm": {"name": "bilstm", "num_encoder_layers": 2, "recurrent": {"directions": "forward"}},
    "child_sum_tree2seq": {"d_model": 32},
    "child_sum_tree2seq_pieces_alone": {"name": "child_sum_tree2seq", "recurrent": {"leaf_lstm": False, "start": "max"}},
    "constituent_transformer": {},
    "constituent_transformer_released": {
        "name": "constituent_transformer",
        "constituents": {"neighbour_scale": 4.0, "diagonal": "official"},
    },
    "transformer": {},
    "tree2seq": {},
    "tree2seq_pieces_alone": {
        "name": "tree2seq",
        "d_model": 32,
        "num_heads": 1,
        "recurrent": {"leaf_lstm": False, "start": "max"},
    },
    "tree2seq_pooled": {"name": "tree2seq", "d_model": 32, "recurrent": {"start": "attention", "attend": False}},
    "tree_transformer": {},
    "tree_relative_positions": {"name": "tree_transformer", "tree": {"relative_positions": 3}},
    "tree_relative_positions_no_sub_mask": {
        "name": "tree_transformer",
        "norm": "pre",
        "tree": {"relative_positions": 2, "subtree_mask": False},
    },
    "pre_norm": {"name": "transformer", "norm": "pre"},
    "relative_positions": {"name": "relation_transformer", "relations": {"sequence": {"clip": 3}}},
    "structural_positions": {
        "name": "relation_transformer",
        "relations": {"positions": "both", "structural": {"clip": 3}, "decoder": False},
    },
    "tree_distance": {
        "name": "relation_transformer",
        "relations": {"positions": "depth", "sequence": {"clip": 0}, "tree_distance": {"clip": 2}, "decoder": False},
    },
    "tree_traversal": {
        "name": "relation_transformer",
        "relations": {"sequence": {"clip": 2, "values": False}, "tree_traversal": {"clip": 3}, "label_head": "deprel"},
    },
    "linearized_transformer": {"relations": {"sequence": {"clip": 3}}},
    "linearized_sinusoids": {
        "name": "linearized_transformer",
        "relations": {"positions": "sequence", "sequence": {"clip": 0}, "decoder": False},
    },
    "pos_tag_head": {
        "name": "relation_transformer",
        "relations": {"positions": "sequence", "sequence": {"clip": 0}, "label_head": "pos_tag", "decoder": False},
    },
}


def tiny_model(case: str, **config) -> Seq2Seq:
    """Build the model of a case in float64 and evaluation mode, from a fixed seed."""
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2)
    return build_model(ModelConfig(**{"name": case, **sizes, **MODEL_CASES[case], **config}), VOCAB).double().eval()


def example_of(tree: Tree, seed: int = 0, target_length: int | None = None, reads: InputKind = TREES) -> dict:
    """An encoded row with random pieces, labels, tags and arcs; words have one or two pieces."""
    if reads.binary:
        tree = binarised(tree)
    rng = np.random.default_rng([seed, tree.num_leaves, len(tree.spans)])
    spans = tree.span_array
    example = {
        "example_id": seed,
        "leaves": {"piece": rng.integers(4, VOCAB.pieces, tree.num_leaves)},
        "nodes": {"label": rng.integers(1, VOCAB.labels, len(spans))},
        "spans": {"start": spans[:, 0], "end": spans[:, 1], "subtree_end": spans[:, 2]},
        "tgt_pieces": rng.integers(4, VOCAB.pieces, rng.integers(1, 6) if target_length is None else target_length),
    }
    words = np.arange(tree.num_leaves) * 2 // 3
    num_words = words.max(initial=-1) + 1
    example["leaves"] |= {"word_index": words, "pos_tag": rng.integers(0, POS_TAGS, num_words)[words]}
    order = rng.permutation(num_words)  # a random tree: the governor of a word is any before it in a random order
    governors = np.full(len(order), -1)
    for place in range(1, len(order)):
        governors[order[place]] = order[rng.integers(place)]
    return example | {"arcs": {"governor": governors, "deprel": rng.integers(0, RELATIONS, len(order))}}


def batch_of(sentences: list[Tree], reads: InputKind = TREES, **kwargs) -> TreeBatch:
    return collate([example_of(tree, seed, reads=reads, **kwargs) for seed, tree in enumerate(sentences)], reads)
