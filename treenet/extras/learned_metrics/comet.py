"""COMET (Rei et al., 2020): a trained model scores a translation beside its source and its reference.

COMET needs older libraries than this project, so it runs in another environment, as a process: `comet_process.py`. Both exchange
JSON lines. The model is a local folder.
"""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from treenet.evaluation.learned_metrics import SentenceScores, folder_sha256
from treenet.evaluation.settings import INSTALL, PYTHON, CometConfig
from treeproc.common.errors import one_line
from treeproc.common.files import check_archive
from treeproc.common.hub import TOKENIZER, local_folder
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

_SCRIPT = Path(__file__).with_name("comet_process.py")
# Nothing is fetched, and torch.load reads weights alone.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "PYTHONUTF8": "1"}


def check_comet(config: CometConfig) -> None:
    """Raise UserError if the model, its encoder or the environment is missing, or if the checkpoint is damaged."""
    find_python(config)
    model = config.model
    for name in ("hparams.yaml", "checkpoints/model.ckpt"):
        if model is None or not (model / name).is_file():
            raise UserError(f"comet.model: {model} must be the folder of a COMET model, but has no {name}")
    if (folder := _encoder_of(config)) is not None and not (folder / "config.json").is_file():
        raise UserError(f"comet.encoder: {config.encoder} must be a folder with the tokeniser and config.json of an encoder")
    if model is not None:
        check_archive(model / "checkpoints" / "model.ckpt", "copy the model again")


def _encoder_of(config: CometConfig) -> AnyPath | None:
    return None if config.encoder is None else local_folder("comet.encoder", config.encoder, TOKENIZER)


def find_python(config: CometConfig) -> Path:
    """Return the Python of the environment of COMET. Raises UserError, with the commands that make one, if it is missing."""
    chosen = config.python or (Path(os.environ[PYTHON]) if os.environ.get(PYTHON) else None)
    if chosen is None:
        raise UserError(f"comet.model needs an environment with COMET: {INSTALL}; then add comet.python=COMET/bin/python")
    if not (chosen.is_file() and os.access(chosen, os.X_OK)):
        raise UserError(f"comet.python: {chosen} is not a program; make an environment: {INSTALL}")
    return chosen.absolute()


def comet_scores(
    config: CometConfig,
    systems: Sequence[Sequence[str]],
    sources: Sequence[str],
    references: Sequence[str],
    use_gpu: bool = False,
) -> SentenceScores:
    """Return the score of every line of every system, times 100. Raises UserError if COMET cannot score them.

    Equal samples are scored once, so that equal lines of two systems have equal scores.
    """
    samples = [sample for lines in systems for sample in zip(sources, lines, references, strict=True)]
    different = list(dict.fromkeys(samples))
    answer, scores = _ask(config, different, use_gpu)
    of_sample = dict(zip(different, scores, strict=True))
    values = 100 * np.array([of_sample[sample] for sample in samples]).reshape(len(systems), -1)
    assert config.model is not None  # COMET has read it
    made_by = f"{answer['kind']}|unbabel-comet:{answer['version']}"
    signature = f"model:{config.model.name}|sha256:{folder_sha256(config.model)[:8]}|{made_by}|times 100"
    return SentenceScores(values, one_line(signature), int(answer["cut"]))


def _ask(config: CometConfig, samples: Sequence[tuple[str, str, str]], use_gpu: bool) -> tuple[dict[str, Any], list[float]]:
    """Score samples of a source, a translation and a reference in the process of COMET. Returns the first line and the scores."""
    request = {
        "model": str(config.model and config.model.absolute()),
        "encoder": str(folder.absolute()) if (folder := _encoder_of(config)) else None,
        "count": len(samples),
        "batch_size": config.batch_size,
        "gpus": int(use_gpu),
    }
    lines = [request, *(dict(zip(("src", "mt", "ref"), sample, strict=True)) for sample in samples)]
    # -I: paths of this environment do not reach the other one.
    command = [str(find_python(config)), "-I", str(_SCRIPT)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | _ENVIRONMENT
            )
        except OSError as error:
            raise UserError(f"comet.python: cannot start {command[0]}: {error.strerror or error}") from None
        answer = ""
        with suppress(BrokenPipeError), process:  # its end is told below
            try:
                answer = _exchange(process, "".join(json.dumps(line) + "\n" for line in lines))
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        said = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "nothing")
    first, scores = _read(answer)
    if first is None:
        why = f"the process ended with status {process.returncode}; its last words: {said}"
    elif "error" in first:
        hint = "" if config.encoder else "; if the cache of the hub lacks the model's encoder, give comet.encoder=DIR"
        why = f"{one_line(str(first['error']), 400)}{hint}"
    elif len(scores) != len(samples):
        why = f"it gave {len(scores)} for {len(samples)} samples"
    elif not all(map(math.isfinite, scores)):
        why = "some are not finite"
    else:
        return first, scores
    raise UserError(f"COMET gave no scores: {one_line(why, 600)}")


def _read(answer: str) -> tuple[dict[str, Any] | None, list[float]]:
    """Read the first line and the scores of an answer; None if there is none."""
    with suppress(ValueError, TypeError, KeyError):
        first, *rest = (json.loads(line) for line in answer.splitlines())
        if "error" in first or {"version", "kind", "cut"} <= first.keys():
            return first, [float(line["score"]) for line in rest]
    return None, []


def _exchange(process: "subprocess.Popen[str]", request: str) -> str:
    """Send the request and return the answer. Standard input stays open meanwhile: its end tells the process to end."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    return process.stdout.read()
