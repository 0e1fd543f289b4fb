"""OpenNMT-py's training against ours: the same model, pieces and budget; target tokens a second of CPU time, one thread.

    pip install --target DIR --constraint constraints.txt configargparse pyonmttok waitress flask rapidfuzz tensorboard \
        ctranslate2 six spacy pyahocorasick fasttext-wheel
    pip install --target DIR --no-deps OpenNMT-py==3.5.1
    python benchmarks/opennmt.py DATA DIR                     # DATA: the data set of the demo

The plain Transformer has the demo's sizes. Both programs run as commands. Each runs for a few and for more updates, and the
difference is the time of the updates alone. Alternatives take turns. One JSON line per figure: `tokens_per_second` of each
program, and `ratio`, ours over theirs, with the smallest and the largest of the rounds. Padding is not counted as tokens.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import emit

from treenet.data.splits import read_split
from treenet.runs.metrics_log import read_metrics

REPOSITORY = Path(__file__).resolve().parent.parent
SIZES = {"d_model": 128, "d_ff": 256, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.1}
SHORT, LONG = 20, 320  # updates
BUDGET = 768  # padded tokens of a batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("packages", help="folder of OpenNMT-py")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_pieces(args.data, work)
        programs = {"ours": lambda n: ours(args.data.resolve(), work, n), "opennmt": lambda n: theirs(args.packages, work, n)}
        rates: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(args.rounds):
            for name, run in programs.items():
                (short, few), (long, many) = run(SHORT), run(LONG)
                rates[name].append((many - few) / (long - short))
    for name, values in rates.items():
        emit("opennmt", "demo", "tokens_per_second", statistics.median(values), program=name)
    ratios = [a / b for a, b in zip(rates["ours"], rates["opennmt"], strict=True)]
    emit("opennmt", "demo", "ratio", statistics.median(ratios), min=round(min(ratios), 3), max=round(max(ratios), 3))


def write_pieces(data: Path, work: Path) -> None:
    """Write the training pairs of `data` as lines of piece numbers, and their vocabulary, which both sides share."""
    rows = list(read_split(data, "encoded", "train"))
    sides = {"src": [row["leaves"]["piece"].tolist() for row in rows], "tgt": [row["tgt_pieces"].tolist() for row in rows]}
    for side, lines in sides.items():
        (work / side).write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    pieces = {piece for lines in sides.values() for line in lines for piece in line}
    (work / "vocab").write_text("".join(f"{piece}\t1\n" for piece in sorted(pieces)))


def cpu_seconds(command: Sequence[str], paths: Sequence[str]) -> tuple[float, str]:
    """Run `command` with `paths` to import from; return the CPU time of its processes, and what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended.stdout + ended.stderr


def ours(data: Path, work: Path, updates: int) -> tuple[float, float]:
    """Return seconds and target tokens of `updates` updates."""
    run = work / f"ours-{updates}-{time.monotonic_ns()}"
    settings = {f"model.{name}": value for name, value in SIZES.items()} | {"model.name": "transformer", "data": data}
    settings |= {"batch.max_tokens": BUDGET, "max_steps": updates, "log_every": 20, "workers": 0}
    settings |= {name: 10**6 for name in ("validate_every", "checkpoint_every")}
    command = [REPOSITORY / "workflows" / "train_wmt.py", "--out", run, *(f"{name}={value}" for name, value in settings.items())]
    seconds, _ = cpu_seconds(list(map(str, command)), [str(REPOSITORY)])
    return seconds, sum(row["tokens_per_s"] * row["seconds"] for row in read_metrics(run) if row["event"] == "train")


def theirs(packages: str, work: Path, updates: int) -> tuple[float, float]:
    """Return seconds and target tokens of `updates` updates."""
    same = {"layers": "num_encoder_layers", "hidden_size": "d_model", "word_vec_size": "d_model", "transformer_ff": "d_ff"}
    same |= {"heads": "num_heads", "dropout": "dropout"}
    options = {name: SIZES[ours] for name, ours in same.items()} | common_options(work) | {
        "attention_dropout": 0.0, "position_encoding": True, "max_relative_positions": 0, "batch_size": BUDGET,
        "bucket_size": 20_000, "adam_beta2": 0.98, "label_smoothing": 0.1, "warmup_steps": 200, "learning_rate": 1.0,
        "train_steps": updates, "save_checkpoint_steps": 10**6, "report_every": 20, "save_model": work / "opennmt",
    }  # fmt: skip
    corpus = {"path_src": str(work / "src"), "path_tgt": str(work / "tgt"), "transforms": [], "weight": 1}
    (work / "opennmt.yaml").write_text(json.dumps({"data": {"corpus": corpus}}))
    command = ["-m", "onmt.bin.train", *arguments({"config": work / "opennmt.yaml", **options})]
    seconds, printed = cpu_seconds(command, [packages])
    sizes = re.findall(r"bsz: +[0-9.]+/ *([0-9.]+)/", printed)
    return seconds, 20 * sum(map(float, sizes))


def common_options(work: Path) -> dict[str, object]:
    """Return the settings of OpenNMT-py's training that make it read piece numbers and be like ours at any size."""
    return {
        "encoder_type": "transformer", "decoder_type": "transformer", "add_qkvbias": True, "add_ffnbias": True,
        "share_embeddings": True, "share_decoder_embeddings": True, "share_vocab": True, "src_vocab": work / "vocab",
        "tgt_vocab": work / "vocab", "batch_type": "tokens", "normalization": "tokens", "accum_count": 1, "num_workers": 0,
        "optim": "adam", "decay_method": "noam", "valid_steps": 10**6,
    }  # fmt: skip


def arguments(options: Mapping[str, object]) -> list[str]:
    """Return settings as arguments of OpenNMT-py's programs. True is a flag, False none, and a list has several values."""
    out = []
    for name, value in options.items():
        if value is not False:
            out += [f"-{name}", *map(str, [] if value is True else value if isinstance(value, list) else [value])]
    return out


if __name__ == "__main__":
    main()
