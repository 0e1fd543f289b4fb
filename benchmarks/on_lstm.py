"""One layer of ON-LSTM against PyTorch's LSTM of the same width: forward and backward over whole sentences.

    python benchmarks/on_lstm.py [--quick] [--device cuda]

`to_lstm` is the time of the ON-LSTM divided by that of `nn.LSTM`, with master gates of 8 and of 16 neurons. Times are CPU time of
one thread or time on the GPU. `min`, `median` and `max` are ratios of single rounds.
"""

import argparse
from functools import partial

import torch
from measure import Step, emit, time_interleaved

from treenet.layers.recurrent import build_recurrence

CHUNK_SIZES = (8, 16)
# Sentences, steps and width: a batch of captions, of 4,096 tokens, and of phrases at the width of a head.
CASES = {"d 512, 64 x 16": (64, 16, 512), "d 512, 128 x 32": (128, 32, 512), "d 128, 64 x 12": (64, 12, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than 50 seconds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    for case, (sentences, length, width) in CASES.items():
        x = torch.randn(sentences, length, width, device=device, requires_grad=True)
        layers = {"lstm": build_recurrence("lstm", width, width, 0)}
        layers |= {f"chunk {chunk}": build_recurrence("on_lstm", width, width, chunk) for chunk in CHUNK_SIZES}
        steps = {}
        for name, layer in layers.items():
            layer.to(device)
            steps[name] = Step([x, *layer.parameters()], partial(layer, x))
        times = time_interleaved(steps, device, rounds=3 if options.quick else 20, budget_s=12.0 if options.quick else 120.0)
        emit("on_lstm", case, "lstm_ms", 1e3 * times.best("lstm"))
        for chunk in CHUNK_SIZES:
            ratio, spread = times.ratio(f"chunk {chunk}", "lstm")
            emit("on_lstm", f"{case}, chunk {chunk}", "to_lstm", ratio, **spread)


if __name__ == "__main__":
    main()
