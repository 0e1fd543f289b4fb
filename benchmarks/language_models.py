"""Causal language models beside the plain causal Transformer: parameters and time of an update, in one run.

    python benchmarks/language_models.py --quick     # small models, under 50 seconds
    python benchmarks/language_models.py             # Transformer base, minutes

One JSON line per figure; `case` is the model: `tree_reg` is the plain model with tree regularisation, `grammar` a Transformer
Grammar. `parameters`: of the model, with `to_plain`. `update_to_plain`: time of whole updates (batch with its trees, forward,
backward, Adam) / that of the plain model on the same sentences.

Random examples of the shape of captions (15 leaves, 0.7 nodes a leaf), with random trees. Times are CPU time on one thread. Each
model takes turns with the plain one: `value` is the median of the rounds' ratios.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from measure import emit, time_interleaved
from models import SIZES, Size, random_example, trainer
from training_data import NUM_LABELS

from treenet.config import TrainConfig
from treenet.data.batch import collate
from treenet.data.examples import Examples
from treenet.data.input_kinds import InputKind
from treenet.models import VocabSizes, build_causal_lm
from treenet.tasks.causal_lm import CausalBatch, to_causal

PLAIN = "plain"
CASES: Mapping[str, dict] = {
    PLAIN: {"name": "causal_transformer"},
    "tree_reg": {"name": "causal_transformer", "tree_reg": {"weight": 0.1}},
    "grammar": {"name": "transformer_grammar"},
}


@dataclass(frozen=True)
class Sentences(Examples):
    """Random examples, as updates of causal models read them."""

    examples: Sequence[dict]
    reads: InputKind
    sizes: VocabSizes

    def batch(self, rows: Sequence[int] | np.ndarray) -> CausalBatch:
        return to_causal(collate([self.examples[row] for row in rows], self.reads), self.sizes)

    def target_tokens(self, rows: Sequence[int] | np.ndarray) -> int:
        return sum(len(self.examples[row]["leaves"]["piece"]) + 1 for row in rows)


def build(case: str, size: Size) -> tuple[int, Callable[[], None]]:
    """Return the parameters of a model, and one update on all sentences."""
    config = TrainConfig(data="unused", task="causal_lm", model={**CASES[case], **size.model})
    torch.manual_seed(0)
    sizes = VocabSizes(size.pieces, NUM_LABELS)
    model = build_causal_lm(config.model, sizes)
    examples = [random_example(index, size.pieces, False) for index in range(size.sentences)]
    sources = [{**example, "tgt_pieces": example["leaves"]["piece"]} for example in examples]
    update = trainer(model, config, Sentences(sources, model.reads, sizes), torch.device("cpu"))
    return sum(parameter.numel() for parameter in model.parameters()), update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of updates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES["small" if options.quick else "base"]
    plain_parameters, plain = build(PLAIN, size)
    for case in CASES:
        parameters, update = build(case, size)
        emit("language_models", case, "parameters", parameters, to_plain=round(parameters / plain_parameters, 4))
        times = time_interleaved({"plain": plain, "model": update}, torch.device("cpu"), options.rounds, float("inf"))
        spread = times.ratio("model", "plain")[1]
        emit("language_models", case, "update_to_plain", spread["median"], **spread)


if __name__ == "__main__":
    main()
