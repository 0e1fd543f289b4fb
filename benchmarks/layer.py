"""A layer of the Tree Transformer beside a plain layer on the same positions: time and memory of forward + backward.

    python benchmarks/layer.py --quick                       # every case, under 50 seconds
    python benchmarks/layer.py --rounds 11                   # as in docs/results/layer.md
    python benchmarks/layer.py --data DIR --split train      # trees of an encoded data set in place of random ones
    PYTHONPATH=. python benchmarks/layer.py --device cuda --dtype bf16 --compile   # nothing installed but torch and NumPy

One JSON line per figure. `time_ratio` and `memory_ratio` are tree layer / plain layer, which is a post-norm layer over the
same leaves and nodes without a mask. If a batch of --data is padded, it has a padding mask.
`naive_...` is the paper's tensor S as written, `released_...` the released code; they are left out where they need
more than 4 GB. `plain_to_torch` is our plain layer / torch.nn's. All alternatives of a case run in one process, in turn;
seconds are CPU time of the process on one thread, or GPU time. A time ratio is that of the minima; `min`, `median` and
`max` are over single rounds. Memory is the peak above inputs and parameters, gradients included; the structure of the
trees, which all layers share, stands apart as `structure_mib`. Dropout is 0. Random trees need torch and NumPy alone.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from layer_baselines import SlowTreeAttention, released_accumulation, slow_bytes
from layer_trees import encoded_structure, random_structure
from measure import MIB, Step, emit, peak_bytes, time_interleaved, time_once
from torch import Tensor, nn

from treenet.layers.attention import CausalSelfAttention, CrossAttention, SelfAttention, padding_to_attend_mask
from treenet.layers.blocks import DecoderLayer, EncoderLayer
from treenet.structure import TreeStructure

TARGET_LENGTH = 28
SLOW_LIMIT_BYTES = 4e9


@dataclass(frozen=True)
class TreeDefaults:
    """The defaults of `TreeAttentionConfig`, which needs pydantic."""

    accumulation_rule: str = "paper"
    accumulate_on: str = "value"
    implementation: str = "fast"
    leaf_weights: str = "shared"
    nodes: str = "labels"
    hierarchical_embeddings: bool = True
    subtree_mask: bool = True
    vertical_rows: int = 100
    horizontal_rows: int = 100
    relative_positions: int = 0


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of a layer, and layers of these sizes; over trees when `tree` is given."""

    d_model: int = 512
    d_ff: int = 1024
    num_heads: int = 8
    norm: str = "post"
    dropout: float = 0.0
    activation_dropout: float = 0.0
    encoder_layer_drop: float = 0.0
    decoder_layer_drop: float = 0.0

    def encoder_layer(self, tree: TreeDefaults | None = None) -> EncoderLayer:
        attention = SelfAttention(self.d_model, self.num_heads, 0.0, tree)
        return EncoderLayer(self, attention)

    def decoder_layer(self, tree: TreeDefaults | None = None) -> DecoderLayer:
        sizes = self.d_model, self.num_heads, 0.0
        attentions = CausalSelfAttention(*sizes), CrossAttention(*sizes, tree)
        return DecoderLayer(self, *attentions)


@dataclass(frozen=True)
class LayerCase:
    """Sizes of a batch; `quick_s` is its seconds in a --quick run."""

    batch: int
    num_leaves: int
    num_nodes: int
    quick_s: float
    document: bool = False
    decoder: bool = False


CASES = {
    "base": LayerCase(32, 28, 20, 2),
    "mid": LayerCase(8, 128, 100, 2),
    "long": LayerCase(2, 512, 420, 2, document=True),
    "document": LayerCase(1, 2000, 1700, 1, document=True),
    "decoder": LayerCase(32, 28, 20, 2, decoder=True),
    "long_one_sentence": LayerCase(2, 512, 420, 0),
    "document_one_sentence": LayerCase(1, 2000, 1700, 0),
}


def build_structure(case: LayerCase, options: argparse.Namespace) -> TreeStructure:
    if options.data:
        structure = encoded_structure(options.data, options.split, case.batch, case.num_leaves)
    else:
        structure = random_structure(case.batch, case.num_leaves, case.num_nodes, case.document)
    return structure.to(options.device)


def time_build(structure: TreeStructure) -> float:
    """Return the CPU seconds to build the maps, as the loader's thread does it; best of five."""
    leaves, spans = structure.unpadded()
    return min(time_once(lambda: TreeStructure.build(leaves, spans), torch.device("cpu")) for _ in range(5))


def build_steps(case: LayerCase, structure: TreeStructure, options: argparse.Namespace) -> dict[str, Step]:
    """Return the alternatives of a case, tree layer and plain layer first, and the outputs of the exact ones."""
    torch.manual_seed(0)
    config, tree, device = LayerConfig(), TreeDefaults(), torch.device(options.device)
    pad_mask = torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)
    padding = padding_to_attend_mask(pad_mask) if pad_mask.any() else None
    source = torch.randn(*pad_mask.shape, config.d_model, device=device, requires_grad=True)
    if case.decoder:
        return build_decoder_steps(source, padding, structure, options)
    ours, plain = config.encoder_layer(tree).to(device), config.encoder_layer().to(device)
    torch_layer = nn.TransformerEncoderLayer(config.d_model, config.num_heads, config.d_ff, dropout=0.0, batch_first=True)
    torch_layer = torch_layer.to(device)
    torch_mask = None if padding is None else pad_mask
    run_ours, run_plain = (torch.compile(m) if options.compile else m for m in (ours, plain))

    def step(module: nn.Module, forward: Callable[[], Tensor]) -> Step:
        return Step([source, *module.parameters()], forward, half=options.dtype == "bf16")

    steps = {
        "tree": step(ours, lambda: run_ours(source, None, structure)),
        "plain": step(plain, lambda: run_plain(source, padding)),
        "torch": step(torch_layer, lambda: torch_layer(source, src_key_padding_mask=torch_mask)),
    }
    if options.slow and slow_bytes(structure, config.d_model) < SLOW_LIMIT_BYTES:
        naive, released = (config.encoder_layer(tree).to(device) for _ in range(2))
        naive.load_state_dict(ours.state_dict())
        naive.self_attention = SlowTreeAttention(naive.self_attention, structure)
        released.self_attention = SlowTreeAttention(released.self_attention, structure, released_accumulation)
        check_agreement(ours, naive, source, structure, ~pad_mask)
        steps["naive"] = step(naive, lambda: naive(source, None))
        steps["released"] = step(released, lambda: released(source, None))
    return steps


def build_decoder_steps(source: Tensor, padding: Tensor | None, structure: TreeStructure, options) -> dict[str, Step]:
    """Build a decoder layer over the memory of leaves and nodes. The step also projects its keys and values."""
    config, tree, device = LayerConfig(), TreeDefaults(), source.device
    target = torch.randn(len(source), TARGET_LENGTH, config.d_model, device=device, requires_grad=True)
    half = options.dtype == "bf16"
    steps = {}
    for name, layer, trees in (("tree", config.decoder_layer(tree), structure), ("plain", config.decoder_layer(), None)):
        layer = layer.to(device)

        def forward(layer=layer, trees=trees) -> Tensor:
            return layer(target, layer.cross_attention.project_memory(source, trees), padding)[0]

        run = torch.compile(forward) if options.compile else forward
        steps[name] = Step([target, source, *layer.parameters()], run, half)
    torch_layer = nn.TransformerDecoderLayer(config.d_model, config.num_heads, config.d_ff, dropout=0.0, batch_first=True)
    torch_layer = torch_layer.to(device)
    causal = nn.Transformer.generate_square_subsequent_mask(TARGET_LENGTH, device=device)
    steps["torch"] = Step(
        [target, source, *torch_layer.parameters()],
        lambda: torch_layer(target, source, tgt_mask=causal, tgt_is_causal=True),
        half,
    )
    return steps


@torch.no_grad()
def check_agreement(ours: nn.Module, naive: nn.Module, source: Tensor, structure: TreeStructure, real: Tensor) -> None:
    """Check that the fast layer computes the same as the naive one. Otherwise the figures would be worthless."""
    torch.testing.assert_close(ours(source, None, structure)[real], naive(source, None)[real], rtol=1e-3, atol=1e-4)


def run_case(name: str, case: LayerCase, options: argparse.Namespace) -> None:
    """Measure and print one case."""
    device = torch.device(options.device)
    structure = build_structure(case, options)
    steps = build_steps(case, structure, options)
    slow = {key: steps.pop(key) for key in ("naive", "released") if key in steps}
    if options.quick:  # the slow implementations, and torch.nn's layer on documents, take too long
        slow = {key: step for key, step in slow.items() if (name, key) == ("base", "naive")}
        if name == "document":
            del steps["torch"]

    times = time_interleaved(steps, device, options.rounds, case.quick_s if options.quick else 1e9)
    value, spread = times.ratio("tree", "plain")
    emit("layer", name, "time_ratio", value, **spread)
    if "torch" in steps:
        value, spread = times.ratio("plain", "torch")
        emit("layer", name, "plain_to_torch", value, **spread)
    emit("layer", name, "plain_ms", 1e3 * times.best("plain"))
    peaks = {key: peak_bytes(steps[key], device) for key in ("tree", "plain")}
    emit("layer", name, "memory_ratio", peaks["tree"] / peaks["plain"])
    emit("layer", name, "plain_mib", peaks["plain"] / MIB)
    emit("layer", name, "structure_mib", structure.num_bytes / MIB)
    emit("layer", name, "structure_build_ms", 1e3 * time_build(structure))
    for key, step in slow.items():
        slow_times = time_interleaved({key: step, "plain": steps["plain"]}, device, options.slow, 0)
        value, spread = slow_times.ratio(key, "plain")
        emit("layer", name, f"{key}_time_ratio", value, **spread)
        emit("layer", name, f"{key}_memory_ratio", peak_bytes(step, device) / peaks["plain"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, under 50 seconds")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of a case")
    parser.add_argument("--slow", type=int, default=2, help="rounds of the naive and released implementations; 0: without them")
    parser.add_argument("--data", type=Path, metavar="DIR", help="data set folder that workflows/preprocess.py wrote")
    parser.add_argument("--split", default="train", help="split of --data")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="bf16 runs under autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile the tree layer and the plain one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.cases or [name for name, case in CASES.items() if case.quick_s or not options.quick]:
        run_case(name, CASES[name], options)


if __name__ == "__main__":
    main()
