"""Linear layers in int8 on a CPU, inside PyTorch: BLEU and CPU time of translations beside float32.

    python benchmarks/int8.py DATA RUN...                     # as in docs/results/search.md
    python benchmarks/int8.py DATA RUN... --wide --lines 32   # the same models, untrained, in the paper's size: time alone

RUN is a run of translation, DATA its data set; those of a demo are enough. `torch` is `torch.ao.quantization.quantize_dynamic`.
`torchao` is `Int8DynamicActivationInt8WeightConfig` of the package torchao, if it is installed. Both store weights in int8, and
make int8 of the inputs of every call. The programs have one thread and take turns.

One JSON line per figure. `time_ratio` is the CPU time of float32 over that of the form, the median of the rounds.
`batch_mates` is the largest difference of a log-probability of a reference's piece: of a sentence alone, and in a batch.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import emit
from sacrebleu.metrics import BLEU
from torch import nn

from treenet.config import DecodingConfig, TrainConfig
from treenet.data.splits import read_references, read_split
from treenet.runs.loading import load_run
from treenet.runs.run_folder import read_facts
from treenet.tasks.base import build_task
from treenet.translation.translate import score_examples, translate_examples
from treeproc.common.errors import is_installed
from treeproc.common.settings import load_settings

BEAMS = (1, 5)
MATES = 40
PAPER = ("d_model=512", "d_ff=2048", "num_heads=8", "num_encoder_layers=6", "num_decoder_layers=6")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--lines", type=int, help="only so many lines of test")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wide", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, references = list(read_split(args.data, "encoded", "test")), read_references(args.data, "test")
    # Untrained models hardly ever end. With this limit, all forms write translations of one length.
    limit = {"max_length_factor": 1.0, "max_length_offset": 5} if args.wide else {}
    for folder in args.runs:
        run = load_run(folder, data=args.data)
        model = untrained(folder) if args.wide else run.model
        forms = {"float32": model, **dict(quantized(model))}
        for form, one in forms.items():
            emit("int8", form, "batch_mates", batch_mates(one, rows[:MATES], run.config.decoding), model=run.config.model.name)
        for beam in BEAMS:
            found = compare(run.config.model.name, forms, rows[: args.lines], run.config.decoding, beam, args.rounds, limit)
            for form, ids in {} if args.wide else found.items():
                texts = run.processor.decode(ids)
                score = BLEU().corpus_score(texts, [references[: args.lines]]).score
                same = sum(a == b for a, b in zip(ids, found["float32"], strict=True))
                emit("int8", form, "bleu", score, model=run.config.model.name, beam=beam, same=same, lines=len(ids))


def untrained(folder: Path) -> nn.Module:
    """The model of a run in the paper's size, with random weights."""
    config = load_settings(TrainConfig, folder / "config.yaml", [f"model.{setting}" for setting in PAPER])
    torch.manual_seed(0)
    return build_task(config).build_model(read_facts(folder)).eval()


def quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Copies of the model whose linear layers compute in int8."""
    yield "torch", torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    if is_installed("torchao"):
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        other = copy.deepcopy(model)
        quantize_(other, Int8DynamicActivationInt8WeightConfig())
        yield "torchao", other


def batch_mates(model: nn.Module, rows: list[dict], decoding: DecodingConfig) -> float:
    """The largest difference that other sentences of a batch make."""
    together = [one.token_log_probs for one in score_examples(model, rows, decoding)]
    alone = [one.token_log_probs for row in rows for one in score_examples(model, [row], decoding)]
    return max(abs(a - b) for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True))


def compare(
    name: str, forms: dict, rows: list[dict], decoding: DecodingConfig, beam: int, rounds: int, limit: dict
) -> dict[str, list]:
    """Print the ratios of time. Returns the pieces that each form writes."""
    decoding = decoding.model_copy(update={"beam_size": beam, **limit})
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    found = {}
    for _ in range(rounds):
        for form, model in forms.items():
            began = time.process_time()
            found[form] = [[int(piece) for piece in best.ids] for [best] in translate_examples(model, rows, decoding)]
            seconds[form].append(time.process_time() - began)
    for form in forms:
        ratios = sorted(a / b for a, b in zip(seconds["float32"], seconds[form], strict=True))
        spread = {"least": round(ratios[0], 2), "most": round(ratios[-1], 2), "cpu_s": round(min(seconds[form]), 2)}
        pieces = sum(map(len, found[form]))
        emit("int8", form, "time_ratio", statistics.median(ratios), model=name, beam=beam, pieces=pieces, **spread)
    return found


if __name__ == "__main__":
    main()
