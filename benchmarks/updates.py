"""Ten updates of a tiny model of each architecture and task: hashes of their losses and weights, to compare two checkouts.

    python benchmarks/updates.py --checkouts . ../earlier

Each checkout trains with its own `workflows/train.py` on the same toy data. A line has a hash of the losses of all updates and
one of the last checkpoint's weights, for each checkout. The exit status is 1 if two checkouts differ.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from test_relatedness import COLUMNS, pair_rows
from test_unread_settings import NEEDED, VARIANTS
from toydata import write_toy_data
from toylabels import make_rows, write_labelled

from treenet.models import names_for

REPOSITORY = Path(__file__).resolve().parent.parent
RUN = {
    "optimizer": {"warmup_steps": 4},
    "batch": {"max_tokens": 128},
    "max_steps": 10,
    "log_every": 1,
    "checkpoint_every": 10,
    "validate_every": 10,
    "average_checkpoints": 1,
    "loggers": [],
    "workers": 0,
}
MODEL = {"d_model": 32, "d_ff": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.1}
SETTINGS = {
    "classification": {"classifier": {"supervision": "root"}},
    "relatedness": {"optimizer": {"warmup_steps": 4, "label_smoothing": 0.0}},
}
USES = {"relatedness": "classification"}  # the use of models for a task of another name


def write_data(folder: Path) -> dict[str, Path]:
    """Write the data sets. Returns them by task."""
    toy = write_toy_data(folder / "pairs", arcs=True)
    counts = {"train": 40, "valid": 12, "test": 8}
    classes = {split: make_rows(count, seed) for seed, (split, count) in enumerate(counts.items())}
    scored = {split: pair_rows(count, seed) for seed, (split, count) in enumerate(counts.items())}
    data = dict.fromkeys(("translation", "masked_lm", "causal_lm"), toy)
    data["classification"] = write_labelled(folder / "classes", classes)
    data["relatedness"] = write_labelled(folder / "scored", scored, columns=COLUMNS, num_classes=None)
    return data


def cases(data: dict[str, Path]) -> Iterator[tuple[str, dict]]:
    """Yield the name and the settings of each run."""
    for task, place in data.items():
        use = USES.get(task, task)
        models = {name: {"name": name} for name in names_for(use) if name != "pretrained"}  # its folder is nowhere
        for name, own in (models | (VARIANTS[use] if use == task else {})).items():
            model = {key: value for key, value in MODEL.items() if use == "translation" or key != "num_decoder_layers"}
            model |= NEEDED.get(own["name"], {}) | own
            yield f"{task} {name}", RUN | SETTINGS.get(task, {}) | {"task": task, "data": str(place), "model": model}


def train(checkout: Path, folder: Path, settings: dict) -> str:
    """Train one model. Returns the hashes of its losses and weights, or what was refused."""
    config, out = folder / "config.json", folder / "run"
    folder.mkdir(parents=True)
    config.write_text(json.dumps(settings))
    command = [sys.executable, "workflows/train.py", "--config", str(config), "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [(line["step"], line["loss"]) for line in lines if line["event"] == "train"]
    [path] = out.glob("checkpoints/*/model.safetensors")
    weights = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        weights.update(name.encode() + value.numpy().tobytes())
    return f"{len(losses)} {hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:12]} {weights.hexdigest()[:12]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[REPOSITORY])
    options, differ = parser.parse_args(), 0
    with tempfile.TemporaryDirectory(prefix="updates-") as scratch:
        for number, (name, settings) in enumerate(cases(write_data(Path(scratch)))):
            found = [
                train(checkout.resolve(), Path(scratch, str(number), str(place)), settings)
                for place, checkout in enumerate(options.checkouts)
            ]
            differ += len(set(found)) > 1
            print(name, *dict.fromkeys(found), sep="\t", flush=True)
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
