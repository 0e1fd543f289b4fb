"""Beam search beside the same search without a cache, beside trees, and beside the transformers library: ratios of one run.

    python benchmarks/search.py --quick                  # under 50 seconds
    python benchmarks/search.py                          # as in docs/results/search.md
    python benchmarks/search.py --cases base --sentences 32
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from layer_trees import random_tree
from measure import emit
from torch import Tensor, nn

from treenet.batch import TreeBatch, collate
from treenet.config import DecodingConfig, ModelConfig
from treenet.inference.search import Hypothesis, beam_search
from treenet.models import Memory, Seq2Seq, VocabSizes, build_model
from treeproc.schema import BOS_ID, EOS_ID, PAD_ID

LABELS, SPECIAL_PIECES = 60, 4
LEAVES, NODES_PER_LEAF = 28, 0.7
BEAM_SIZE = 5


@dataclass(frozen=True)
class Case:
    model: ModelConfig
    pieces: int


CASES = {
    "base": Case(ModelConfig(d_model=512, d_ff=2048, num_heads=8, num_encoder_layers=6, num_decoder_layers=6), 32_000),
    "small": Case(ModelConfig(d_model=256, d_ff=1024, num_heads=4, num_encoder_layers=3, num_decoder_layers=3), 8_000),
}


def random_sentences(count: int, pieces: int, seed: int = 0) -> TreeBatch:
    """Random pieces under random trees of the shape of parses, around LEAVES leaves."""
    rng = np.random.default_rng(seed)
    examples = []
    for index in range(count):
        leaves = int(rng.integers(LEAVES - 4, LEAVES + 5))
        spans = random_tree(leaves, round(NODES_PER_LEAF * leaves), rng)
        examples.append(
            {
                "example_id": index,
                "leaves": {"piece": rng.integers(SPECIAL_PIECES, pieces, leaves)},
                "nodes": {"label": rng.integers(1, LABELS, len(spans))},
                "spans": {name: spans[:, i] for i, name in enumerate(("start", "end", "subtree_end"))},
                "tgt_pieces": np.zeros(0, dtype=np.int64),
            }
        )
    return collate(examples)


@dataclass
class Prefixes:
    """The state of a search without a cache: the encoder's output and the pieces so far, one row a hypothesis."""

    states: Tensor
    pad_mask: Tensor
    structure: object
    tokens: Tensor

    def select(self, rows: Tensor) -> "Prefixes":
        return Prefixes(self.states[rows], self.pad_mask[rows], None, self.tokens[rows])


class Uncached:
    """A model that decodes every prefix anew."""

    def __init__(self, model: Seq2Seq):
        self.model = model

    def encode(self, batch: TreeBatch) -> Memory:
        return self.model.encode(batch)

    def start_decoding(self, memory: Memory) -> Prefixes:
        return Prefixes(memory.states, memory.pad_mask, None, torch.zeros(len(memory.states), 0, dtype=torch.long))

    def decode_step(self, tokens: Tensor, state: Prefixes) -> tuple[Tensor, Prefixes]:
        tokens = torch.cat([state.tokens, tokens[:, None]], dim=1)
        x = self.model.embed_pieces(tokens)
        attend = ~state.pad_mask[:, None, None]
        for layer in self.model.decoder_layers:
            x, _ = layer(x, layer.cross_attention.project_memory(state.states), attend)
        return self.model.compute_logits(x[:, -1]), Prefixes(state.states, state.pad_mask, None, tokens)


def build_marian(case: Case, length: int):
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError as error:
        print(f"ours_to_transformers left out: {error}", file=sys.stderr)
        return None
    sizes = case.model
    config = MarianConfig(
        vocab_size=case.pieces,
        d_model=sizes.d_model,
        encoder_layers=sizes.num_encoder_layers,
        decoder_layers=sizes.num_decoder_layers,
        encoder_attention_heads=sizes.num_heads,
        decoder_attention_heads=sizes.num_heads,
        encoder_ffn_dim=sizes.d_ff,
        decoder_ffn_dim=sizes.d_ff,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=512,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=BOS_ID,
        forced_eos_token_id=EOS_ID,
    )
    torch.manual_seed(0)
    return MarianMTModel(config).eval()


def main():
    torch.set_num_threads(1)
    p = argparse.ArgumentParser()
    p.add_argument("--case", default="base")
    p.add_argument("--sentences", type=int, default=8)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--only", nargs="*")
    p.add_argument("--profile", action="store_true")
    o = p.parse_args()
    case = CASES[o.case]
    batch = random_sentences(o.sentences, case.pieces)
    T = 50
    config = DecodingConfig(beam_size=BEAM_SIZE, max_length_factor=1e-6, max_length_offset=T, min_length=T, max_tokens=10**6)
    models = {}
    for name in ("tree_transformer", "transformer"):
        torch.manual_seed(0)
        models[name] = build_model(case.model.model_copy(update={"name": name}), VocabSizes(case.pieces, LABELS)).eval()
    marian = build_marian(case, T)
    ids, mask = batch.leaf_pieces, (~batch.leaf_pad_mask).long()

    def hf():
        with torch.inference_mode():
            out = marian.generate(input_ids=ids, attention_mask=mask, num_beams=5, min_new_tokens=T + 1, max_new_tokens=T + 1, do_sample=False)
        assert out.shape[1] == T + 2, out.shape

    def ours(m):
        def f():
            out = beam_search(m, batch, config)
            assert all(len(h[0].ids) == T for h in out)
        return f

    steps = {"tree": ours(models["tree_transformer"]), "plain": ours(models["transformer"]), "hf": hf, "uncached": ours(Uncached(models["transformer"]))}
    if o.only: steps = {k: steps[k] for k in o.only}
    if o.profile:
        for name, s in steps.items():
            s()
            with torch.profiler.profile() as prof:
                s()
            print(name); print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=40))
        return
    for r in range(o.rounds):
        line = {}
        for name, s in steps.items():
            b = time.process_time(); s(); line[name] = round(time.process_time() - b, 3)
        print(line, flush=True)

main()
