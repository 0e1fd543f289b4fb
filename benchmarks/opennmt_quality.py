"""OpenNMT-py's translations against ours: the same pieces, sizes, budget and updates. A gate of studies.

    python benchmarks/opennmt_quality.py RUN DIR --work FOLDER      # DIR: OpenNMT-py's packages, as for benchmarks/opennmt.py

RUN is a finished run of a Transformer, plain or with relative positions (`relation_transformer`, `positions: sequence`).
OpenNMT-py trains one with RUN's sizes, budget, dropout, label smoothing, peak rate and warm-up, and averages as many checkpoints.
It differs in these: its rate falls as 1 / sqrt(update). Its norms stand before each block. It has dropout inside of the
feed-forward layers, and no weight decay. It has no sinusoids beside relative positions, whose table keys and values share.
It leaves repeated sources out of a batch. It computes in float32. It searches with RUN's beam, and divides scores by the length.

One JSON line per figure of each program: the nll a token on valid, and scores of the translations of --split. FOLDER keeps the
translations and the models; a training that is done is not repeated.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from measure import emit
from opennmt import arguments, common_options

from treenet.config import TrainConfig
from treenet.data.splits import read_references, read_split
from treenet.evaluation.evaluate import score_references, translate_split
from treenet.evaluation.settings import EvaluateSettings
from treenet.runs.loading import LoadedRun, load_run
from treenet.tasks.translation_metrics import compute_scores, tokenizer_of
from treenet.translation.translate import detokenize

SCORES = ("bleu_tokenized", "chrf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("packages", help="folder of OpenNMT-py")
    parser.add_argument("--work", type=Path, required=True, help="folder for its files, models and translations")
    parser.add_argument("--split", default="test", help="split that is translated")
    parser.add_argument("--language", help="target language, such as ja, which chooses the tokens of BLEU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    run = load_run(args.run)
    check_run(run.config)
    references, tokenizer = read_references(run.data, args.split), tokenizer_of(run.data, args.language)
    for program, (nll, lines) in {
        "ours": ours(run, args.split),
        "opennmt": theirs(run, args.packages, args.work, args.split),
    }.items():
        (args.work / f"{program}.{args.split}.txt").write_text("".join(f"{line}\n" for line in lines))
        scores = compute_scores(lines, references, tokenizer)
        for name, value in {"nll": nll, **{name: scores[name] for name in SCORES}}.items():
            emit("opennmt_quality", args.run.name, name, value, program=program)


def check_run(config: TrainConfig) -> None:
    """Leave the program for runs that OpenNMT-py's training would not be like."""
    model, batch = config.model, config.batch
    wanted = {
        "model.name: transformer, or relation_transformer with positions: sequence": model.name == "transformer"
        or (model.name == "relation_transformer" and model.relations.positions == "sequence" and model.relations.decoder),
        "as many layers in encoder and decoder": model.num_encoder_layers == model.num_decoder_layers,
        "all pairs with equal weights": batch.fraction == 1 and not batch.corpora,
        "average: last": config.average == "last",
        "max_steps, a multiple of checkpoint_every": config.max_steps % config.checkpoint_every == 0,
    }
    if missing := [what for what, there in wanted.items() if not there]:
        raise SystemExit(f"RUN must have {missing[0]}")


def ours(run: LoadedRun, split: str) -> tuple[float, list[str]]:
    """Return the nll a token on valid, and the translations of a split."""
    nll = score_references(run, EvaluateSettings(split="valid"))
    found = translate_split(run, EvaluateSettings(split=split))
    return math.fsum(nll.nll) / sum(nll.tokens), [detokenize(run.processor, nbest[0]) for nbest in found]


def theirs(run: LoadedRun, packages: str, work: Path, split: str) -> tuple[float, list[str]]:
    """Train OpenNMT-py's model, and return the same of it."""
    counts = {name: write_pieces(run, work, name) for name in ("train", "valid", split)}
    (work / "vocab").write_text("".join(f"{piece}\t1\n" for piece in range(run.processor.get_piece_size())))
    corpus = {"path_src": f"{work}/train.src", "path_tgt": f"{work}/train.tgt", "transforms": [], "weight": 1}
    (work / "opennmt.yaml").write_text(json.dumps({"data": {"corpus": corpus}}))
    config = run.config
    every, last = config.checkpoint_every, config.max_steps
    kept = [work / f"model_step_{last - every * place}.pt" for place in range(config.average_checkpoints)]
    if not kept[0].exists():
        own = {"config": work / "opennmt.yaml", "save_model": work / "model"}
        call("train", packages, own | training_options(config, work, counts["train"]))
    call("average_models", packages, {"models": kept, "output": work / "average.pt"})
    search = {
        "model": work / "average.pt",
        "batch_type": "tokens",
        "batch_size": 4096,
        "length_penalty": "avg",
        "max_length_ratio": 2,
    }
    valid = {"src": work / "valid.src", "tgt": work / "valid.tgt", "output": work / "valid.out"}
    printed = call("translate", packages, {**search, **valid, "beam_size": 1})
    gold = re.findall(r"GOLD SCORE: (-[0-9.]+)", printed)
    lines = (work / "valid.tgt").read_text().splitlines()
    nll = -float(gold[-1]) * len(lines) / sum(len(line.split()) + 1 for line in lines)
    tested = {"src": work / f"{split}.src", "output": work / f"{split}.out"}
    call("translate", packages, {**search, **tested, "beam_size": config.decoding.beam_size})
    ids = [[int(piece) for piece in line.split() if piece.isdigit()] for line in (work / f"{split}.out").read_text().splitlines()]
    return nll, [" ".join(line.splitlines()) for line in run.processor.decode(ids)]


def write_pieces(run: LoadedRun, work: Path, split: str) -> int:
    """Write both sides of a split as lines of piece numbers, and return their number; of train, what a training of RUN reads."""
    rows = [(row["leaves"]["piece"].tolist(), row["tgt_pieces"].tolist()) for row in read_split(run.data, "encoded", split)]
    if split == "train":
        batch = run.config.batch
        rows = [(a, b) for a, b in rows if 1 <= len(a) <= batch.max_leaves and len(b) <= batch.max_target_pieces]
    for side, lines in zip(("src", "tgt"), zip(*rows, strict=True), strict=True):
        (work / f"{split}.{side}").write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    return len(rows)


def training_options(config: TrainConfig, work: Path, pairs: int) -> dict[str, object]:
    """Return the settings of OpenNMT-py's training that mean what those of our run mean."""
    model, optimizer = config.model, config.optimizer
    relative = model.relations.sequence.clip if model.name == "relation_transformer" else 0
    return common_options(work) | {
        "layers": model.num_encoder_layers, "hidden_size": model.d_model, "word_vec_size": model.d_model,
        "transformer_ff": model.d_ff, "heads": model.num_heads, "dropout": model.dropout,
        "attention_dropout": model.attention_dropout, "max_relative_positions": relative, "position_encoding": not relative,
        "batch_size": config.batch.max_tokens, "bucket_size": pairs, "seed": config.seed, "param_init_glorot": True,
        "param_init": 0, "adam_beta2": optimizer.adam_betas[1], "label_smoothing": optimizer.label_smoothing,
        "warmup_steps": optimizer.warmup_steps, "max_grad_norm": 0,
        "learning_rate": optimizer.learning_rate * math.sqrt(model.d_model * optimizer.warmup_steps),
        "train_steps": config.max_steps, "save_checkpoint_steps": config.checkpoint_every,
        "keep_checkpoint": config.average_checkpoints, "report_every": 100,
    }  # fmt: skip


def call(program: str, packages: str, options: dict[str, object]) -> str:
    """Run a program of OpenNMT-py, and return what it printed."""
    command = [sys.executable, "-m", f"onmt.bin.{program}", *arguments(options)]
    own = {"PYTHONPATH": packages, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # its checkpoints hold its options as an object
    ended = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise SystemExit(ended.stdout[-2000:])
    return ended.stdout


if __name__ == "__main__":
    main()
