"""The cases of the command fuzzer. A number and a kind determine a command, its folder, and the damage."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import yaml
from fuzz_mutations import arguments, damage_file, damage_folder, misspelt, override, yaml_text
from fuzz_world import MODULES, REPOSITORY, configurations


@dataclass
class FuzzCase:
    """A command, the folders that it may write to, and the damage."""

    kind: str
    workflow: str
    argv: list[str]
    folder: Path  # of this case only; everything else must stay unchanged
    writes: list[Path]
    damage: str

    def may_change(self) -> list[Path]:
        """Return the paths that the comparison ignores: requested outputs, and the caches of libraries."""
        asked = [self.folder / value.removeprefix("output=") for value in map(str, self.argv) if value.startswith("output=")]
        return [*self.writes, *asked, *(self.folder / name for name in ("home", "cache", "stdout", "stderr"))]


def _configured(case: FuzzCase, values: dict) -> list[str]:
    path = case.folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--config", str(path), "--out", str(case.folder / "out")]


def _copy(world: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(world / name, folder / name, symlinks=True)


_NO_DATA = ("train_parser", "average_checkpoints")
_READS_RUN = {name: "run" for name in ("evaluate", "translate", "probe", "average_checkpoints")} | {
    "unsupervised_parse": "lm",
    "score_lm": "lm",
}
_TRAINS = {"train_wmt": "run", "train_classifier": "classifier", "train_lm": "lm", "scaling": "study", "compare_seeds": "seeds"}
_READS_CLASSES = ("train_classifier", "compare_seeds")
_READS_DATA = {name: "classes" if name in _READS_CLASSES else "pairs" for name in MODULES if name not in _NO_DATA}


def settings_class(workflow: str):
    from treenet.config import TrainConfig
    from treenet.evaluation.evaluate import EvaluateSettings
    from treenet.evaluation.language_models import ScoreLMSettings
    from treenet.evaluation.unsupervised_parse import ParseSettings
    from treenet.experiments.scaling import ScalingConfig
    from treenet.experiments.seeds import SeedsConfig
    from treenet.probing.probe_settings import ProbeSettings
    from treenet.report.report_settings import ReportSettings
    from treenet.translation.line_translator import TranslateSettings
    from treeproc.job.preprocess import PreprocessConfig
    from treeproc.parser_training.config import TrainParserConfig

    classes = {
        "preprocess": PreprocessConfig, "train_parser": TrainParserConfig, "evaluate": EvaluateSettings,
        "translate": TranslateSettings, "probe": ProbeSettings, "report": ReportSettings, "scaling": ScalingConfig,
        "compare_seeds": SeedsConfig, "unsupervised_parse": ParseSettings, "score_lm": ScoreLMSettings,
    }  # fmt: skip
    if workflow == "average_checkpoints":
        return sys.modules["average_checkpoints"].AverageConfig
    return classes.get(workflow, TrainConfig)


def make_case(seed: int, kind: str, world: Path, scratch: Path) -> FuzzCase:
    """Return the case of a number. It is always the same."""
    random = Random(f"{seed} {kind}")
    folder = scratch / f"{kind.replace(' ', '-')}-{seed}"
    for name in ("tmp", "home", "cache"):
        (folder / name).mkdir(parents=True)
    case = FuzzCase(kind, "", [], folder, [folder / "out"], "")
    KINDS[kind](random, case, world)
    return case


def _base(case: FuzzCase, workflow: str, world: Path) -> tuple[dict, list[str]]:
    """Return settings and a command line that work, on a copy of the inputs."""
    case.workflow = workflow
    values = configurations(world / "inputs", world)[workflow]
    argv = _configured(case, values)
    if run := _READS_RUN.get(workflow):
        _copy(world, case.folder, run)
        (case.folder / run).rename(case.folder / "out")
    return values, argv


def _settings(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice([name for name in MODULES if name not in ("verify", "inspect")])
    _, argv = _base(case, workflow, world)
    cls = settings_class(workflow)
    wrong = [override(random, cls) if random.random() < 0.75 else misspelt(random, cls) for _ in range(random.choice([1, 1, 2]))]
    case.argv, case.damage = [*argv, *wrong], " ".join(wrong)


def _command_line(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice([name for name in MODULES if name not in ("verify", "inspect")])
    _, argv = _base(case, workflow, world)
    case.argv = arguments(random, settings_class(workflow), argv, case.folder / "out")
    case.damage = " ".join(case.argv)
    for option, value in pairwise(case.argv):
        if option == "--out" and "\0" not in value:  # to write to a folder with an odd name
            case.writes += [case.folder / place for place in (value, os.path.normpath(value), value.partition("/")[0]) if place]


def _configuration_file(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice([name for name in MODULES if name not in ("verify", "inspect")])
    values, case.argv = _base(case, workflow, world)
    (case.folder / "config.yaml").write_bytes(yaml_text(random, settings_class(workflow), values))
    case.damage = "config.yaml"


def _input_files(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice([*["preprocess"] * 3, "train_parser", "translate", "evaluate", "unsupervised_parse"])
    _copy(world, case.folder, "inputs")
    inputs = case.folder / "inputs"
    formats = dict.fromkeys(("parallel", "sgm", "iwslt_xml", "sick", "linzen", "agreement", "imdb"), "en")
    formats |= {"brackets": "mrg", "sst": "sst", "conllu": "conllu"}
    _base(case, workflow, world)
    values = configurations(inputs, world)[workflow]
    used = [inputs / "test.en", inputs / "test.mrg"]
    if workflow == "preprocess":
        form = random.choice([*formats, "brackets", "sst", "conllu", "parallel"])
        end = formats[form]
        splits = {s: {"source": [str(inputs / f"{s}.{end}")]} for s in ("train", "valid", "test")}
        if form in ("brackets", "parallel", "sgm", "iwslt_xml"):
            splits = {s: {**files, "target": [str(inputs / f"{s}.de")]} for s, files in splits.items()}
        parser = {"name": "given" if form in ("brackets", "sst", "conllu") else "words"}
        tree = {"tree_source": "balanced"} if parser["name"] == "words" else {"tree_source": "parsed"}
        values = {**values, "format": form, "splits": splits, "parser": parser, "tree": tree}
        used = [inputs / f"{split}.{e}" for split in ("train", "valid", "test") for e in (end, "de")]
    elif workflow == "train_parser":
        used = [inputs / "train.conllu", inputs / "valid.conllu"]
    elif workflow == "evaluate":
        values |= {"hypotheses": str(inputs / "test.en"), "references": str(inputs / "test.de")}
        used = [inputs / "test.en", inputs / "test.de"]
    elif workflow == "unsupervised_parse":
        values["treebank"] = [str(inputs / "test.mrg")]
        used = [inputs / "test.mrg"]
    case.argv = _configured(case, values)
    case.damage = f"{values.get('format', workflow)}: {damage_file(random, random.choice(used))}"


def _data_sets(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice(list(_READS_DATA))
    name = _READS_DATA[workflow]
    _copy(world, case.folder, name)
    data = case.folder / name
    if workflow in ("verify", "inspect"):
        case.workflow, case.argv = workflow, [str(data)]
    elif workflow == "preprocess":
        values, _ = _base(case, workflow, world)
        case.argv = [*_configured(case, values)[:2], "--out", str(data)]
        case.writes = [data]
    else:
        values, argv = _base(case, workflow, world)
        case.argv = _configured(case, {**values, "data": str(data)}) if "data" in values else argv
        if workflow in ("evaluate", "probe", "unsupervised_parse", "score_lm"):
            case.argv += [f"data={data}"]
        elif workflow in ("translate", "report"):
            run = case.folder / "out" if workflow == "translate" else case.folder / "run"
            if workflow == "report":
                _copy(world, case.folder, "run")
                case.argv = ["--out", str(case.folder / "out"), str(run), "sentences=1", "bootstrap_samples=20"]
            text = (run / "config.yaml").read_text()
            (run / "config.yaml").write_text(text.replace(str(world / "pairs"), str(data)))
    case.damage = damage_folder(random, data)


def _run_folders(random: Random, case: FuzzCase, world: Path) -> None:
    workflow = random.choice([*_READS_RUN, *_TRAINS, "report", "train_parser"])
    if workflow == "report":
        name = random.choice(["run", "study"])
        _copy(world, case.folder, name)
        case.workflow = workflow
        case.argv = ["--out", str(case.folder / "out"), str(case.folder / name), "sentences=1", "bootstrap_samples=20"]
        case.damage = damage_folder(random, case.folder / name)
        return
    values, case.argv = _base(case, workflow, world)
    if workflow in _TRAINS or workflow == "train_parser":
        name = _TRAINS.get(workflow, "parser")
        _copy(world, case.folder, name)
        (case.folder / name).rename(case.folder / "out")
        if workflow in ("train_wmt", "train_classifier", "train_lm") and random.random() < 0.7:
            case.argv.append("max_steps=6")
    case.damage = damage_folder(random, case.folder / "out")


def _parser_models(random: Random, case: FuzzCase, world: Path) -> None:
    """Damage one of the shipped models. Translation of lines without trees loads them."""
    _copy(world, case.folder, "inputs")
    models = case.folder / "models"
    shutil.copytree(REPOSITORY / "treeproc" / "models" / "en", models)
    values, _ = _base(case, "preprocess", world)
    inputs = case.folder / "inputs"
    splits = {"train": {"source": [str(inputs / "test.en")], "target": [str(inputs / "test.de")]}}
    values |= {"format": "parallel", "splits": splits, "parser": {"models": str(models), "device": "cpu"}}
    case.argv = _configured(case, values)
    if random.random() < 0.5:
        (models / "scores.json").unlink()
    for name in ("README.md", "curves.png", "depparse.pt"):
        (models / name).unlink()
    case.damage = damage_folder(random, models)


def _outputs(random: Random, case: FuzzCase, world: Path) -> None:
    """Replace output paths by other kinds of paths."""
    others = ["report", "train_wmt", "preprocess", "evaluate", "average_checkpoints", "scaling"]
    workflow = random.choice(["translate", "translate", *others])
    _, case.argv = _base(case, workflow, world)
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


KINDS: dict[str, Callable[[Random, FuzzCase, Path], None]] = {
    "settings": _settings,
    "command line": _command_line,
    "configuration file": _configuration_file,
    "input files": _input_files,
    "data sets": _data_sets,
    "run folders": _run_folders,
    "parser models": _parser_models,
    "outputs": _outputs,
}
