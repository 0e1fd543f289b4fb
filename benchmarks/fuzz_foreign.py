"""Cases of healthy and damaged things that do not belong together: tokenizers of others, parts of another run, other lines."""

import base64
import json
import shutil
from itertools import starmap
from pathlib import Path
from random import Random

from damaged_text import DAMAGES, SAMPLE, copies, read
from fuzz_cases import FuzzCase, base, configured
from fuzz_mutations import damaged_bytes, damaged_json
from fuzz_world import configurations
from tiny_tokenizers import FAMILIES


def _split(regex: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
# Components that take time or memory without end, that panic, or that are harmless.
_COMPONENTS = {
    "normalizer": (
        {"type": "Sequence", "normalizers": [_DOUBLES] * 40}, {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 3},
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\0\1\0\0" * 99).decode()}, _DOUBLES,
        {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"Regex": "(a*)*"}, "content": "a"}, None,
    ),
    "pre_tokenizer": (
        _split("(a+)+$"), _split("\\s+"), _split("("), {"type": "Sequence", "pretokenizers": [_LEVEL] * 20},
        {"type": "FixedLength", "length": 0}, {"type": "WhitespaceSplit"}, None,
    ),
}  # fmt: skip


def tokenizers(random: Random, case: FuzzCase, world: Path) -> None:
    """Damage the tokenizer of a pretrained encoder. What is read must cut whole lines as the package itself does."""
    family = random.choice(FAMILIES)
    place = case.folder / "encoder" / "tokenizer.json"
    place.parent.mkdir()
    content = (world / "tokenizers" / family / place.name).read_bytes()
    spec, kind = json.loads(content), random.choice(["none", "json", "json", "bytes", "component", "component", "vocabulary"])
    if kind == "json":
        for _ in range(random.choice([1, 1, 3])):
            spec = damaged_json(random, spec)
    elif kind == "component":
        name = random.choice(list(_COMPONENTS))
        spec[name] = random.choice(_COMPONENTS[name])
    elif kind == "vocabulary" and isinstance(spec["model"]["vocab"], dict):
        spec["model"]["vocab"][random.choice(list(spec["model"]["vocab"]))] = random.choice([0, 5, 10**6, 2**31])
    place.write_bytes(damaged_bytes(random, content) if kind == "bytes" else json.dumps(spec).encode())
    case.damage = f"{family}: {kind}"
    base(case, "preprocess", world)
    values = configurations(world / "inputs", world)["preprocess"]
    splits = {"train": {"source": [str(world / "inputs" / "train.mrg")]}}
    case.argv = configured(case, {**values, "splits": splits, "subwords": {"tokenizer": str(place.parent)}})


_PARTS = ("checkpoints", "checkpoints/step_00000002", "checkpoints/step_00000004", "averaged", "run.json")


def mixed_runs(random: Random, case: FuzzCase, world: Path) -> None:
    """Put a part of another run into a run. The result is that of the run alone, to the last byte, or the command refuses."""
    workflow = random.choice(["evaluate", "translate", "train_wmt", "export"])
    _, case.argv = base(case, workflow, world)
    run = case.folder / ("run" if workflow == "export" else "out")
    if not run.exists():
        shutil.copytree(world / "run", run)
    part = random.choice(_PARTS)
    if (world / "other" / part).is_dir() and random.random() < 0.5:
        part += random.choice(["/meta.json", "/model.safetensors"]) if part != "checkpoints" else "/step_00000004/trainer.pt"
    source, place = world / "other" / part, run / part
    if source.is_dir():
        shutil.rmtree(place)
        shutil.copytree(source, place)
    else:
        shutil.copyfile(source, place)
    case.damage = f"{part} of another run"
    if workflow == "train_wmt":
        case.argv.append("max_steps=6")
        weights = "checkpoints/step_00000006/model.safetensors"
        case.same = {weights: world / "continued" / weights}
    elif workflow == "export":
        case.argv[-1] = str(run)
        case.same = {"averaged/model.safetensors": world / "exported" / "averaged" / "model.safetensors"}
    case.reference, case.lines = world / "results.json", 12


_PAIRS = 1000  # docs/preprocessing.md: with fewer than 400 pairs, also of a half, the job says nothing about their order
# What a notice must say about each kind of damage.
_TOLD = {
    "shifted": "seem shifted", "unrelated": "seem not to belong together", "equal": "the target is the source",
    "constant": "one line again and again", "miscoded": "read as cp1252", "entities": "HTML entities", "markup": "HTML tags",
    "codes": "escapes such as \\u00fc", "percent": "escapes of URLs", "base64": "text in base64", "columns": "looks like columns",
    "tokens": "looks tokenised", "lost": "question marks in the place of letters", "scripts": "Latin and Cyrillic letters",
}  # fmt: skip


def pairs(random: Random, case: FuzzCase, world: Path) -> None:
    """Give pairs of the shipped sample, or a damaged copy. The command must tell the damage, and say nothing of healthy ones."""
    sample = [read(SAMPLE / f"train.{side}.gz") for side in ("en", "de")]
    start = random.randrange(len(sample[0]) - _PAIRS)
    part = source, target = tuple(side[start : start + _PAIRS] for side in sample)
    made = {name: (told, copy) for name, told, copy in copies(part, random.randrange(2**32))}
    made["tokens"] = "tokens", made["tokens"][1]
    name = random.choice(["aligned", "aligned", "aligned", *made, *DAMAGES])
    told, (source, target) = made[name] if name in made else (name, (source, list(starmap(DAMAGES[name], enumerate(target)))))
    inputs = case.folder / "inputs"
    inputs.mkdir()
    for end, side in (("en", source), ("de", target)):
        (inputs / f"train.{end}").write_text("".join(f"{line}\n" for line in side))
    base(case, "preprocess", world)
    values = configurations(inputs, world)["preprocess_plain"]
    values |= {"splits": {"train": values["splits"]["train"]}, "subwords": {"vocab_size": None}, "rows_per_shard": _PAIRS}
    case.argv = configured(case, values)
    case.damage, case.tells = f"{name} from line {start + 1}", _TOLD[told] if told else ""
