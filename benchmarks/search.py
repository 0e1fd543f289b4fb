"""Beam search beside one without a cache, beside that of a tree model, and beside the transformers library: ratios of one run.

    python benchmarks/search.py --quick                       # the model `small`, under 50 seconds
    python benchmarks/search.py                               # as in docs/results/search.md
    python benchmarks/search.py --cases base --sentences 32

One JSON line per figure.
`cached_to_uncached`: time without a cache / with it, at 50 target pieces. Without a cache, every step decodes the whole prefix
and projects the encoder's output anew, as `generate(use_cache=False)` of transformers does.
`tree_to_plain`: time of a Tree Transformer / of a Transformer, encoder and beam search, on the same sentences.
`grid_to_static`: time of a search whose cache grows / of one with a static cache, both over whole grids, as on GPUs;
`grid_to_compiled` with --compile: the same with compiled steps.
`ours_to_transformers`: time of transformers' `MarianMTModel.generate` / ours, for a Transformer of the same sizes. It needs the
library, which is not a dependency of this project: pip install --no-deps --target DIR transformers; PYTHONPATH=DIR.
`ctranslate2_to_ours`: our time / that of CTranslate2 with the same weights and as many steps, on a CPU, if it is installed.
`rss_of_ten_times_the_lines`: highest memory of workflows/translate.py on 100,000 lines / on 10,000; not with --quick.

Random weights and random trees; all searches have beam 5 and produce exactly 50 pieces and EOS for every hypothesis. Times are
CPU time on one thread, or GPU time; alternatives take turns, `value` is the median of the rounds' ratios.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from layer_trees import random_tree
from measure import emit, time_interleaved
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from search_runs import SEARCH_WORDS, write_run, write_vocabulary

from treenet.config import DecodingConfig, ModelConfig
from treenet.data.batch import TreeBatch, collate
from treenet.data.input_kinds import TREES, InputKind
from treenet.layers.attention import padding_to_attend_mask
from treenet.models import Memory, Seq2Seq, VocabSizes, build_model
from treenet.translation.caches import Decodable, Steps
from treenet.translation.search import search_batch
from treeproc.common.errors import is_installed
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_LABELS = 60
LEAVES, NODES_PER_LEAF = (24, 33), 0.7
BEAM_SIZE, TARGET_PIECES = 5, 50
LINES = (10_000, 100_000)


@dataclass(frozen=True)
class SearchCase:
    """Sizes of a model and of its vocabulary."""

    model: ModelConfig
    pieces: int


CASES = {
    "small": SearchCase(ModelConfig(d_model=256, d_ff=1024, num_heads=4, num_encoder_layers=3, num_decoder_layers=3), 8_000),
    "base": SearchCase(ModelConfig(), 32_000),
}


def random_sentences(count: int, num_pieces: int, rng: np.random.Generator, reads: InputKind = TREES) -> TreeBatch:
    """Return random pieces under random trees with the shape of parses, in the form that a model `reads`."""
    examples = []
    for index in range(count):
        leaves = int(rng.integers(*LEAVES))
        spans = random_tree(leaves, round(NODES_PER_LEAF * leaves), rng)
        examples.append(
            {
                "example_id": index,
                "leaves": {"piece": rng.integers(EOS_ID + 1, num_pieces, leaves)},
                "nodes": {"label": rng.integers(1, NUM_LABELS, len(spans))},
                "spans": {name: spans[:, i] for i, name in enumerate(("start", "end", "subtree_end"))},
                "tgt_pieces": np.zeros(0, dtype=np.int64),
            }
        )
    return collate(examples, reads)


@dataclass(frozen=True)
class Prefixes:
    """The state of a search without a cache, one row per hypothesis: the encoder's output, and the pieces so far."""

    states: Tensor
    attend_mask: Tensor
    pieces: Tensor

    def select(self, rows: Tensor, beam_width: int | None = None) -> "Prefixes":
        return Prefixes(self.states[rows], self.attend_mask[rows], self.pieces[rows])


class Uncached:
    """A plain Transformer that decodes every prefix from its start."""

    def __init__(self, model: Seq2Seq):
        self.model = model

    def encode(self, batch: TreeBatch) -> Memory:
        return self.model.encode(batch)

    def start_decoding(self, memory: Memory) -> Prefixes:
        none = torch.zeros(len(memory.states), 0, dtype=torch.long, device=memory.states.device)
        return Prefixes(memory.states, padding_to_attend_mask(memory.pad_mask), none)

    def decode_step(self, tokens: Tensor, state: Prefixes) -> tuple[Tensor, Prefixes]:
        pieces = torch.cat([state.pieces, tokens[:, None]], dim=1)
        decoder = self.model.decoder
        x = decoder.positions(decoder.embedding(pieces))
        for layer in decoder.layers:
            x, _ = layer(x, layer.cross_attention.project_memory(state.states), state.attend_mask)
        return self.model.compute_logits(x[:, -1]), Prefixes(state.states, state.attend_mask, pieces)


def searcher(model: Decodable, batch: TreeBatch, way: Steps | None = None) -> Callable[[], None]:
    """Return a beam search of exactly TARGET_PIECES pieces and EOS, with the steps of the device or in another `way`."""
    decoding = DecodingConfig(
        beam_size=BEAM_SIZE, max_length_factor=1e-6, max_length_offset=TARGET_PIECES, min_length=TARGET_PIECES
    )

    def search() -> None:
        found = search_batch(model, batch, decoding, steps=way)
        assert all(len(hypotheses[0].ids) == TARGET_PIECES for hypotheses in found)

    return search


def marian_searcher(case: SearchCase, batch: TreeBatch, dtype: torch.dtype = torch.float32) -> Callable[[], None] | None:
    """Return the same search with transformers, with weights of `dtype`; None, and a note, if the library is missing."""
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError as error:
        print(f"ours_to_transformers is left out: {error}; --help shows how to install the library", file=sys.stderr)
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
    model = MarianMTModel(config).eval().to(batch.leaf_pieces.device, dtype)
    length = TARGET_PIECES + 1  # EOS is one of its tokens

    def search() -> None:
        with torch.inference_mode():
            found = model.generate(
                input_ids=batch.leaf_pieces,
                attention_mask=(~batch.leaf_pad_mask).long(),
                num_beams=BEAM_SIZE,
                do_sample=False,
                min_new_tokens=length,
                max_new_tokens=length,
            )
        assert found.shape == (len(batch), 1 + length)

    return search


def measure_case(name: str, sentences: int, rounds: int, device: torch.device, compiled: bool = False) -> None:
    case = CASES[name]
    batch = random_sentences(sentences, case.pieces, np.random.default_rng(0), TREES.for_device(device)).to(device)
    torch.manual_seed(0)
    tree, plain = (
        build_model(case.model.model_copy(update={"name": model}), VocabSizes(case.pieces, NUM_LABELS)).eval().to(device)
        for model in ("tree_transformer", "transformer")
    )
    steps = {"plain": searcher(plain, batch), "tree": searcher(tree, batch), "uncached": searcher(Uncached(plain), batch)}
    steps |= {"grid": searcher(plain, batch, Steps.GRID), "static": searcher(plain, batch, Steps.STATIC)}
    if compiled:
        steps["compiled"] = searcher(plain, batch, Steps.COMPILED)
        steps["compiled"]()
    if marian := marian_searcher(case, batch):
        steps["transformers"] = marian
    if device.type == "cpu" and is_installed("ctranslate2"):
        from gpu_ctranslate2 import ctranslate2_searcher

        steps["ctranslate2"] = ctranslate2_searcher(plain, case.model, batch, half=False)
    times = time_interleaved(steps, device, rounds, float("inf"))
    for metric, other, base in (
        ("cached_to_uncached", "uncached", "plain"),
        ("tree_to_plain", "tree", "plain"),
        ("grid_to_static", "grid", "static"),
        ("grid_to_compiled", "grid", "compiled"),
        ("ours_to_transformers", "transformers", "plain"),
        ("ctranslate2_to_ours", "plain", "ctranslate2"),
    ):
        if other in steps and base in steps:
            spread = times.ratio(other, base)[1]
            emit("search", name, metric, spread["median"], **spread, sentences=sentences)
    best = {f"{step}_s": round(times.best(step), 3) for step in steps}
    emit("search", name, "pieces_per_s", sentences * TARGET_PIECES / times.best("plain"), **best)


def measure_memory(scratch: Path) -> None:
    """Return the highest resident memory of the command by number of lines, with a tiny model and no parser."""
    run = write_run(scratch / "run", write_vocabulary(scratch / "data"))
    random, source = np.random.default_rng(0), scratch / "source.txt"
    peaks, seconds = [], []
    for count in LINES:
        with open(source, "w") as file:
            file.writelines(" ".join(random.choice(SEARCH_WORDS, random.integers(3, 12))) + "\n" for _ in range(count))
        command = [sys.executable, str(REPOSITORY / "workflows" / "translate.py"), "--out", str(run), f"input={source}"]
        command += ["decoding.beam_size=2", "decoding.max_length_factor=0.5", "decoding.max_length_offset=2"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
        begin = time.monotonic()
        with open(scratch / "out.txt", "wb") as out, open(scratch / "errors.txt", "wb") as errors:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit((scratch / "errors.txt").read_text())
        assert (scratch / "out.txt").read_bytes().count(b"\n") == count
        peaks.append(usage.ru_maxrss / 1024)
        seconds.append(round(time.monotonic() - begin, 1))
    more = {"peak_mib": [round(peak) for peak in peaks], "lines": LINES, "seconds": seconds}
    emit("search", "stream", "rss_of_ten_times_the_lines", peaks[1] / peaks[0], **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*CASES, "stream")
    parser.add_argument("--quick", action="store_true", help="the case small alone, two rounds: under 50 seconds")
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help=f"of {', '.join(names)} (default all)")
    parser.add_argument("--sentences", type=int, default=8, help="sentences of a batch (default 8)")
    parser.add_argument("--rounds", type=int, help="rounds of every case (default 7, or 2 with --quick)")
    parser.add_argument("--device", type=torch.device, default="cpu", help="of all cases but stream: cpu (default) or cuda")
    parser.add_argument("--compile", action="store_true", help="also measure compiled steps, after minutes of compiling")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.cases or (("small",) if options.quick else names):
        if name == "stream":
            with tempfile.TemporaryDirectory(prefix="search-") as scratch:
                measure_memory(Path(scratch))
        else:
            rounds = options.rounds or (2 if options.quick else 7)
            measure_case(name, options.sentences, rounds, options.device, options.compile)


if __name__ == "__main__":
    main()
