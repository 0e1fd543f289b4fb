"""Scores translations with COMET. This script runs in the Python of an environment that has COMET; see `comet.py`.

It reads JSON lines from standard input: first the request, then `count` samples with `src`, `mt` and `ref`. It writes JSON lines
to standard output: first the version, the kind of the model and the number of cut texts, then one score for each sample. If there
are no scores, it writes one line with the `error` instead.

If standard input ends before the scores are written, the process that asked is gone, and this one ends too. It also ends if it
hangs: the other process waits without a limit, because scores of many samples take hours.
"""

import functools
import json
import logging
import os
import sys
import threading
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

INSTALL = f"{sys.executable} -m pip install unbabel-comet 'setuptools<81'"
LOOK_S, LOOKS = 60.0, 10
IDLE_S = 0.1  # of CPU time between the first and the last look; this script's own threads use a hundredth of it
OLDEST_TORCH = (2, 6)  # from here on, torch.load reads weights alone where the caller says nothing


def main() -> None:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no part of the answer
    request = json.loads(sys.stdin.readline())
    samples = [json.loads(sys.stdin.readline()) for _ in range(request["count"])]
    for end in (_end_with_the_other, _end_if_it_hangs):
        threading.Thread(target=end, daemon=True).start()
    try:
        lines = answer_request(request, samples)
    except Exception as error:  # libraries raise any kind; the other process tells it
        traceback.print_exc()
        lines = [{"error": str(error) or type(error).__name__}]
    answer.write("".join(json.dumps(line) + "\n" for line in lines))
    answer.close()


def answer_request(request: dict[str, Any], samples: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the lines of the answer. Raises any exception if there are no scores."""
    model = load(Path(request["model"]), request["encoder"])
    scores = predict(model, samples, request["batch_size"], request["gpus"])
    first = {"version": version("unbabel-comet"), "kind": type(model).__name__, "cut": count_cut(model, samples)}
    return [first, *({"score": score} for score in scores)]


def load(folder: Path, encoder: str | None) -> Any:
    """Load a model from `checkpoints/model.ckpt` and `hparams.yaml`, offline. Its pickle may hold tensors and plain values only.

    `encoder` is a folder with tokeniser and configuration, in the place of the name that the model has for it.
    """
    try:
        import comet.models
    except ImportError as error:
        raise ValueError(f"{sys.executable} cannot import COMET ({error}); to install it: {INSTALL}") from None
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise ValueError(
            f"its environment has PyTorch {torch.__version__}, but only 2.6 and newer can load weights without running code"
        )
    logging.disable(logging.WARNING)
    if encoder is not None:
        for kind in set(comet.models.str2model.values()):
            kind.load_from_checkpoint = functools.partial(kind.load_from_checkpoint, pretrained_model=encoder)
    checkpoint = folder / "checkpoints" / "model.ckpt"
    model = comet.load_from_checkpoint(str(checkpoint), local_files_only=True)
    there = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["state_dict"].keys()
    # COMET itself keeps random values for weights that the checkpoint lacks.
    if missing := sorted(name for name, _ in model.named_parameters() if name not in there):
        raise ValueError(f"{checkpoint} lacks {missing[0]} and {len(missing) - 1} more weights")
    return model


def count_cut(model: Any, samples: list[dict[str, str]]) -> int:
    """Count the different texts that are longer than COMET reads."""
    longest, tokenizer = model.encoder.max_positions - 2, model.encoder.tokenizer
    texts = list({text for sample in samples for text in sample.values()})
    return sum(len(ids) > longest for ids in tokenizer(texts, verbose=False)["input_ids"])


def predict(model: Any, samples: list[dict[str, str]], batch_size: int, gpus: int) -> list[float]:
    """Return one score for each sample."""
    return list(map(float, model.predict(samples, batch_size=batch_size, gpus=gpus, progress_bar=False, num_workers=0).scores))


def _end_with_the_other() -> None:
    os.read(0, 1)  # not by sys.stdin, which Python locks at its end
    os._exit(1)


def _end_if_it_hangs() -> None:
    """End if the process used no CPU time for ten minutes. Looks are counted, because a machine may sleep."""
    used: list[float] = []
    while len(used) <= LOOKS or used[-1] - used[0] > IDLE_S:
        time.sleep(LOOK_S)
        used = [*used[-LOOKS:], time.process_time()]
    os.write(2, f"it hangs: no CPU time used for {LOOK_S * LOOKS / 60:.0f} minutes; run the same command again\n".encode())
    os._exit(1)


if __name__ == "__main__":
    main()
