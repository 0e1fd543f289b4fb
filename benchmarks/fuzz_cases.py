"""The cases of the command fuzzer. A number and a kind determine a command, its folder, and the damage."""

import json
import os
import shutil
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random

import yaml
from fuzz_mutations import (
    ARCHIVES,
    PACKED,
    archive,
    arguments,
    damage_file,
    damage_folder,
    damaged_archive,
    misspelt,
    override,
    packed,
    yaml_text,
)
from fuzz_world import ALL_COMMANDS, ENDS, REPOSITORY, WORKFLOWS, configurations


@dataclass
class FuzzCase:
    """A command, the folders that it may write to, and the damage."""

    kind: str
    workflow: str
    argv: list[str]
    folder: Path  # of this case only; everything else must stay unchanged
    writes: list[Path]
    damage: str
    # The plain texts that an input stands for: of archives, and of files with odd names.
    truth: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    reference: Path | None = None  # results of the commands on undamaged inputs
    lines: int | None = None  # that the output must have
    keeps: bool = False  # whether also its outputs must stay as they are
    same: dict[str, Path] = field(default_factory=dict)  # what files below --out must be, to the last byte
    tells: str | None = None  # what a notice about the text must say; empty: it must say nothing; None: it may

    def may_change(self) -> list[Path]:
        """Return the paths that the comparison ignores: requested outputs, and the caches of libraries."""
        if self.keeps:
            return [self.folder / name for name in ("home", "cache", "stdout", "stderr")]
        asked = [self.folder / value.removeprefix("output=") for value in map(str, self.argv) if value.startswith("output=")]
        return [*self.writes, *asked, *(self.folder / name for name in ("home", "cache", "stdout", "stderr"))]


def configured(case: FuzzCase, values: dict) -> list[str]:
    path = case.folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--config", str(path), "--out", str(case.folder / "out")]


def copy(world: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(world / name, folder / name, symlinks=True)


_TREES = ("brackets", "sst", "conllu")  # formats with given trees
_PLAIN = {"parser": {"name": "words"}, "tree": {"tree_source": "balanced"}}  # settings of the others
_SIZES = (330, None)  # of the vocabulary: words of several pieces, and as many pieces as odd characters need
_NO_DATA = ("train_parser", "average_checkpoints", "align", "export", "back_translate")
_READS_RUN = {name: "run" for name in ("evaluate", "translate", "probe", "average_checkpoints", "align")} | {
    "unsupervised_parse": "lm",
    "score_lm": "lm",
}
_TRAINS = {"train_wmt": "run", "train_classifier": "classifier", "train_lm": "lm", "scaling": "study", "compare_seeds": "seeds"}
_READS_CLASSES = ("train_classifier", "compare_seeds")
_READS_DATA = {name: "classes" if name in _READS_CLASSES else "pairs" for name in ALL_COMMANDS if name not in _NO_DATA}


_SETTINGS = {
    "preprocess": "treeproc.stages.config.PreprocessConfig",
    "train_parser": "treeproc.extras.parser_training.config.TrainParserConfig",
    "evaluate": "treenet.evaluation.evaluate.EvaluateSettings",
    "translate": "treenet.translation.line_translator.TranslateSettings",
    "probe": "treenet.probing.settings.ProbeSettings",
    "report": "treenet.report.settings.ReportSettings",
    "scaling": "treenet.experiments.scaling_report.ScalingConfig",
    "compare_seeds": "treenet.experiments.seeds.SeedsConfig",
    "unsupervised_parse": "treenet.evaluation.unsupervised_parse.ParseSettings",
    "score_lm": "treenet.evaluation.language_models.ScoreLMSettings",
    "average_checkpoints": "treenet.cli.average_checkpoints.AverageConfig",
    "align": "treenet.cli.align.AlignSettings",
    "export": "treenet.cli.export.ExportSettings",
    "back_translate": "treenet.cli.synthetic_pairs.BackTranslateConfig",
}


def settings_class(workflow: str):
    """Return the class of the settings of a command."""
    module, _, name = _SETTINGS.get(workflow, "treenet.config.TrainConfig").rpartition(".")
    return getattr(import_module(module), name)


def base(case: FuzzCase, workflow: str, world: Path) -> tuple[dict, list[str]]:
    """Return settings and a command line that work, on a copy of the inputs."""
    case.workflow = workflow
    values = configurations(world / "inputs", world)[workflow]
    argv = configured(case, values)
    if workflow == "export":
        argv.append(str(world / "run"))
    if run := _READS_RUN.get(workflow):
        copy(world, case.folder, run)
        (case.folder / run).rename(case.folder / "out")
    return values, argv


def settings(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice(WORKFLOWS)
    _, argv = base(case, workflow, world)
    cls = settings_class(workflow)
    wrong = [override(random, cls) if random.random() < 0.75 else misspelt(random, cls) for _ in range(random.choice([1, 1, 2]))]
    case.argv, case.damage = [*argv, *wrong], " ".join(wrong)


def command_line(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice(WORKFLOWS)
    _, argv = base(case, workflow, world)
    case.argv = arguments(random, settings_class(workflow), argv, case.folder / "out")
    case.damage = " ".join(case.argv)
    for option, value in pairwise(case.argv):
        if option == "--out" and "\0" not in value:  # to write to a folder with an odd name
            case.writes += [case.folder / place for place in (value, os.path.normpath(value), value.partition("/")[0]) if place]


def configuration_file(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice(WORKFLOWS)
    values, case.argv = base(case, workflow, world)
    (case.folder / "config.yaml").write_bytes(yaml_text(random, settings_class(workflow), values))
    case.damage = "config.yaml"


def input_files(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice([*["preprocess"] * 3, "train_parser", "translate", "evaluate", "unsupervised_parse"])
    copy(world, case.folder, "inputs")
    inputs = case.folder / "inputs"
    base(case, workflow, world)
    values = configurations(inputs, world)[workflow]
    used = [inputs / "test.en", inputs / "test.mrg"]
    if workflow == "preprocess":
        form = random.choice([*ENDS, "brackets", "sst", "conllu", "parallel"])
        source, target = ENDS[form]
        splits = {s: {"source": [str(inputs / f"{s}.{source}")]} for s in ("train", "valid", "test")}
        if target:
            splits = {s: {**files, "target": [str(inputs / f"{s}.{target}")]} for s, files in splits.items()}
        values |= {"format": form, "splits": splits, "subwords": {"vocab_size": random.choice(_SIZES)}}
        values |= {} if form in _TREES else _PLAIN
        used = [inputs / f"{split}.{end}" for split in ("train", "valid", "test") for end in ENDS[form] if end]
    elif workflow == "train_parser":
        used = [inputs / "train.conllu", inputs / "valid.conllu"]
    elif workflow == "evaluate":
        values |= {"hypotheses": str(inputs / "test.en"), "references": str(inputs / "test.de")}
        used = [inputs / "test.en", inputs / "test.de"]
    elif workflow == "unsupervised_parse":
        values["treebank"] = [str(inputs / "test.mrg")]
        used = [inputs / "test.mrg"]
    case.argv = configured(case, values)
    case.damage = f"{values.get('format', workflow)}: {damage_file(random, random.choice(used))}"


def data_sets(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice(list(_READS_DATA))
    name = _READS_DATA[workflow]
    copy(world, case.folder, name)
    data = case.folder / name
    if workflow in ("verify", "inspect"):
        case.workflow, case.argv = workflow, [str(data)]
    elif workflow == "preprocess":
        values, _ = base(case, workflow, world)
        case.argv = [*configured(case, values)[:2], "--out", str(data)]
        case.writes = [data]
    else:
        values, argv = base(case, workflow, world)
        case.argv = configured(case, {**values, "data": str(data)}) if "data" in values else argv
        if workflow in ("evaluate", "probe", "unsupervised_parse", "score_lm"):
            case.argv += [f"data={data}"]
        elif workflow in ("translate", "report"):
            run = case.folder / "out" if workflow == "translate" else case.folder / "run"
            if workflow == "report":
                copy(world, case.folder, "run")
                case.argv = ["--out", str(case.folder / "out"), str(run), "sentences=1", "bootstrap_samples=20"]
            text = (run / "config.yaml").read_text()
            (run / "config.yaml").write_text(text.replace(str(world / "pairs"), str(data)))
    case.damage, case.reference, case.lines = damage_folder(random, data), world / "results.json", 12


def run_folders(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice([*_READS_RUN, *_TRAINS, "report", "train_parser"])
    if workflow == "report":
        name = random.choice(["run", "study"])
        copy(world, case.folder, name)
        case.workflow = workflow
        case.argv = ["--out", str(case.folder / "out"), str(case.folder / name), "sentences=1", "bootstrap_samples=20"]
        case.damage = damage_folder(random, case.folder / name)
        return
    values, case.argv = base(case, workflow, world)
    if workflow in _TRAINS or workflow == "train_parser":
        name = _TRAINS.get(workflow, "parser")
        copy(world, case.folder, name)
        (case.folder / name).rename(case.folder / "out")
        if workflow in ("train_wmt", "train_classifier", "train_lm") and random.random() < 0.7:
            case.argv.append("max_steps=6")
    case.damage = damage_folder(random, case.folder / "out")
    if not any(name in case.damage for name in ("config.yaml", "metrics.jsonl", "scores.json", "probes.json")):
        # Those are settings, which people change, and the results themselves.
        case.reference, case.lines = world / "results.json", 12


def parser_models(random: Random, case: FuzzCase, world: Path) -> None:
    """Damage one of the shipped models. Translation of lines without trees loads them."""
    copy(world, case.folder, "inputs")
    models = case.folder / "models"
    shutil.copytree(REPOSITORY / "treeproc" / "models" / "en", models)
    values, _ = base(case, "preprocess", world)
    inputs = case.folder / "inputs"
    splits = {"train": {"source": [str(inputs / "test.en")], "target": [str(inputs / "test.de")]}}
    values |= {"format": "parallel", "splits": splits, "parser": {"models": str(models), "device": "cpu"}}
    case.argv = configured(case, values)
    if random.random() < 0.5:
        (models / "scores.json").unlink()
    for name in ("README.md", "curves.png", "depparse.pt"):
        (models / name).unlink()
    case.damage = damage_folder(random, models)


def outputs(random: Random, case: FuzzCase, world: Path) -> None:
    """Replace output paths by other kinds of paths."""
    others = ["report", "train_wmt", "preprocess", "evaluate", "average_checkpoints", "scaling"]
    workflow = random.choice(["translate", "translate", *others])
    _, case.argv = base(case, workflow, world)
    outside = case.folder / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    if workflow == "translate":
        place = outside / "output"
        kind = random.choice(["null", "full", "loop", "link", "folder", "parts", "dangling", "below a file", "long"])
        targets = {"null": "/dev/null", "full": "/dev/full", "loop": "output", "link": "target", "dangling": "nowhere/x"}
        if kind in targets:
            place.symlink_to(targets[kind])
        elif kind == "folder":
            place.mkdir()
        elif kind == "parts":
            (outside / "output.parts").symlink_to("file")
        case.argv.append(f"output={ {'below a file': outside / 'file' / 'x', 'long': outside / ('x' * 300)}.get(kind, place) }")
        case.writes.append(outside)
    else:
        out = case.folder / "out"
        kind = random.choice(["file", "link", "loop", "null", "lock", "inside", "read-only"])
        if kind == "read-only":
            case.argv[case.argv.index("--out") + 1] = "/proc/self/fdinfo/x"
        elif kind in ("lock", "inside"):
            out.mkdir(exist_ok=True)
            names = ["config.yaml", "text", "checkpoints", "scores.json", "averaged", "ledger.json"]
            name = ".lock" if kind == "lock" else random.choice(names)
            if not os.path.lexists(out / name):
                (out / name).symlink_to(outside / "file")
        elif not out.exists():
            if kind == "file":
                out.write_text("x")
            else:
                out.symlink_to({"link": outside, "loop": "out", "null": "/dev/null"}[kind])
                case.writes += [outside] if kind == "link" else []
    case.damage = kind


def _formatted(case: FuzzCase, world: Path, form: str, source: str, target: str) -> None:
    """Make the command that preprocesses these files as training data, with settings that suit the format."""
    base(case, "preprocess", world)
    splits = {"train": {"source": [source]} | ({"target": [target]} if target else {})}
    values = configurations(world / "inputs", world)["preprocess"]
    values |= {"format": form, "splits": splits, "subwords": {"vocab_size": _SIZES[-1]}}
    case.argv = configured(case, values if form in _TREES else values | _PLAIN)


def archives(random: Random, case: FuzzCase, world: Path) -> None:
    """Pack the training text, and damage the archive. What is accepted must be the text, except damage to data of a `.tar`."""
    form = random.choice([*_TREES, "imdb", "agreement", "parallel"])
    path = world / "inputs" / f"train.{ENDS.get(form, ('en', ''))[0]}"
    content = path.read_bytes()
    suffix = random.choice(ARCHIVES if form == "imdb" or (form != "parallel" and random.random() < 0.7) else PACKED)
    odd = random.random()
    if odd < 0.05:
        content = b"x" * (70 << 20)  # a bomb: one line
    if suffix in PACKED:
        files, whole, places = [(path.name, content)], packed(content, suffix), []
    else:
        end, parts = ("\n\n" if form == "conllu" else "\n"), []
        examples = content.decode().strip("\n").split(end)
        for number in range(0, len(examples), 15):
            name = f"data/{['neg', 'pos'][number // 15 % 2]}/{number:02}.txt"
            parts.append((name, (end.join(examples[number : number + 15]) + end).encode()))
        if odd > 0.95:
            parts.append(random.choice(parts))  # two members of one name
        files = sorted(parts)
        made, places = archive(random, parts)
        whole = packed(made, suffix)
    case.damage, whole = damaged_archive(random, whole)
    if case.damage == "twice" and suffix in PACKED:
        files = [(name, 2 * text) for name, text in files]  # joined streams are one file
    inputs = case.folder / "inputs"
    inputs.mkdir()
    place = inputs / f"train{suffix}"
    place.write_bytes(whole)
    if suffix == ".tar" and len(whole) >= len(made):
        # Its data has no checksum, so the bytes that are there are right. A flip in a header changes nothing of them.
        there = {name: whole[at : at + size] for name, at, size in places}
        files = [(name, there[name]) for name, _ in files]
    case.damage = f"{form} {suffix}: {case.damage}"
    target = str(world / "inputs" / "train.de") if form in ("parallel", "brackets") else ""
    given = place / "data" if form == "imdb" or (suffix in ARCHIVES and random.random() < 0.3) else place
    _formatted(case, world, form, str(given), target)
    case.truth = {str(given): [(f"{place}/{name}", text) for name, text in files]}


_FILE_NAMES = (
    "a b.en", "-x.en", "--out", "a=b.en", "a\nb.en", "x.EN", "x.xml", "s.XML", "s.xml.txt", "x.sgm", "x", "x.tar", "x.GZ", "x.gz",
    "é.en", "e\u0301.en", "\udcff.en", " x", "x ", "~x", "$HOME", "*.en", "x,y.en", "[x].en", "{x}", "null", "1e3", "true", "#x",
    "s3:x", "x:y", "a\u2028b", "a'b", 'a"b', "&x", "!x", "%s", "x\\y", ".x", "x.en\u00a0", "train.tags.en", "index.json", "x\ty",
)  # fmt: skip


def file_names(random: Random, case: FuzzCase, world: Path) -> None:
    """Give the inputs other names. The content decides, so the result is the same, or the command refuses the name."""
    form = random.choice([*_TREES, "parallel", "sgm", "iwslt_xml", "translate"])
    content = (world / "inputs" / f"train.{ENDS.get(form, ('en', ''))[0]}").read_bytes()
    target = (world / "inputs" / f"train.{ENDS.get(form, ('', 'de'))[1] or 'de'}").read_bytes()
    folder = case.folder / random.choice(["inputs", "in=x", "a b", "x.tar.gz", "\udcff"])
    folder.mkdir()
    names = random.sample(_FILE_NAMES, 2)
    source, other = (folder / name for name in names)
    for path, text in ((source, content), (other, target)):
        path.write_bytes(packed(text, random.choice([".gz", ".bz2", ".xz"])) if random.random() < 0.15 else text)
    case.damage = f"{form}: {source.relative_to(case.folder)} {other.relative_to(case.folder)}"
    if form == "translate":
        content, case.lines = (world / "inputs" / "test.en").read_bytes(), 12
        source.write_bytes(content)
        _, case.argv = base(case, form, world)
        outputs = case.folder / "outputs"
        outputs.mkdir()
        for key, path in (("input", source), ("output", outputs / names[1])):
            case.argv.append(f"{key}={json.dumps(str(path), ensure_ascii=False)}")  # values are YAML
        case.writes.append(outputs)
        return
    has_target = form not in ("sst", "conllu")
    if random.random() < 0.5:
        _formatted(case, world, form, str(source), str(other) if has_target else "")
    else:  # on the command line
        _formatted(case, world, form, "x", "x" if has_target else "")
        for side, path in [("source", source), ("target", other)][: 1 + has_target]:
            case.argv.append(f"splits.train.{side}={json.dumps([str(path)], ensure_ascii=False)}")
    case.truth = {str(source): [(str(source), content)]} | ({str(other): [(str(other), target)]} if has_target else {})


# The kinds of folders, and the commands that write to them.
_FOLDERS = {
    "pairs": ("preprocess",), "run": ("train_wmt", *_READS_RUN), "lm": ("train_lm", *_READS_RUN), "study": ("scaling",),
    "classifier": ("train_classifier", *_READS_RUN), "seeds": ("compare_seeds",), "parser": ("train_parser",),
    "page": ("report",), "exported": ("export", *_READS_RUN), "synthetic": ("back_translate",),
}  # fmt: skip


def wrong_folders(random: Random, case: FuzzCase, world: Path) -> None:
    """Give `--out` a folder of another kind, or an output of one file a place in a folder. Nothing in it may change."""
    name = random.choice(list(_FOLDERS))
    others = [w for w in WORKFLOWS if w not in ("average_checkpoints", *_FOLDERS[name])]
    workflow = random.choice([*others, *["translate", "align"] * 3])
    place = case.folder / "other"
    shutil.copytree(world / name, place, symlinks=True)
    _, case.argv = base(case, workflow, world)
    if workflow not in _READS_RUN:
        case.argv[case.argv.index("--out") + 1] = str(place)
    elif workflow in ("translate", "align"):
        files = sorted(path for path in place.rglob("*") if path.is_file())
        case.argv.append(f"output={random.choice(files)}")
    else:
        shutil.rmtree(case.folder / "out")
        place.rename(case.folder / "out")
    case.writes = []
    case.damage = f"{workflow} in {name}: {case.argv[-1]}"
    case.keeps = True
