"""The import order that keeps the house in order: who may import whom, read from the source files."""

import ast
import functools
import graphlib
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import pytest

from treenet.tasks.translation_metrics import METRICS
from treeproc.common.errors import EXTRAS

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("treeproc", "treenet")

# What `treenet` may use of `treeproc` below its library and commands: what commands share, the shard contract, trees, new lines.
SHARED = {"common", "shards", "trees", "online"}
# The rooms of `treeproc`, lowest first: a room imports from itself and from lower ones.
TREEPROC_ROOMS = (
    "common",
    "shards",
    "trees",
    "readers",
    "parsers",
    "pretrained_pieces",
    "subwords",
    "stages",
    "inspection",
    "online",
    "verify",
    "inspect",
    "extras",
)
# The files of `treeproc` that run models; nothing loads them before a parser is built.
RUN_MODELS = {
    f"treeproc/parsers/{name}.py"
    for name in ("characters", "dependency", "parse_scores", "shift_reduce", "stanza_parser", "tagger", "tokenizer", "weights")
}
# The rooms of `treenet`, lowest first: a room imports from itself and from lower ones.
TREENET_ROOMS = (
    "paper",
    "config",
    "structure",
    "data",
    "layers",
    "models",
    "tasks",
    "runs",
    "translation",
    "loggers",
    "training",
    "jobs",
    "analysis",
    "evaluation",
    "probing",
    "experiments",
    "report",
    "api",
    "extras",
    "cli",
)
# The files of `treenet` that run on Ray.
ON_RAY = {
    ("api", "shards"),  # inside a method
    ("experiments", "ray_cells"),
    ("extras", "tuning", "ray_trials"),
    ("jobs", "ray_interrupt"),
    ("jobs", "ray_room"),
    ("jobs", "ray_watch"),
    ("jobs", "ray_train"),
    ("extras", "serving", "server"),
    ("runs", "ray_metrics"),
    ("translation", "ray_translate"),
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, module_level_only: bool = False) -> set[str]:
    """Names of imported modules, and of what is imported from them; the version is no module of a room."""
    tree = parsed(path)
    nodes = tree.body if module_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__"}
    return found


def files(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def top_level(names: Collection[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def offenders(paths: Iterable[Path], forbidden: Callable[[Path], Collection[str]]) -> list[str]:
    """Return a line for each file that has something forbidden: its place and what that is."""
    found = {path.relative_to(REPOSITORY): sorted(forbidden(path)) for path in paths}
    return [f"{path}: {', '.join(names)}" for path, names in found.items() if names]


def test_treeproc_loads_neither_torch_nor_models():
    def forbidden(path: Path) -> set[str]:
        models = {"stanza", "torch"}
        if str(path.relative_to(REPOSITORY)) in RUN_MODELS:
            models = {"stanza"}
        if path.parent.name == "parser_training":  # makes the models
            models = set()
        if path.name not in ("ray_job.py", "ray_late_jobs.py", "ray_session.py"):
            models = models | {"ray"}
        everywhere = imports(path)
        return top_level(imports(path, module_level_only=True)) & models | top_level(everywhere) & {"treenet"}

    assert not offenders(files("treeproc"), forbidden)


def test_packages_of_extras_are_loaded_where_they_are_used():
    """An installation without extras imports everything but these rooms and files, which are loaded after `require`."""

    def forbidden(path: Path) -> set[str]:
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        allowed = set()
        if parts[:2] == ("treenet", "report"):
            allowed = {"matplotlib"}
        elif parts[:3] == ("treeproc", "extras", "parser_training"):
            allowed = {"matplotlib", "stanza"}
        elif parts[:3] == ("treenet", "extras", "serving"):
            allowed = {"ray", "uvicorn"} if parts[3] == "server" else set()
        elif parts == ("treenet", "extras", "tuning", "ray_trials"):
            allowed = {"optuna", "ray"}
        elif parts[1:] in ON_RAY or (parts[:2] == ("treeproc", "stages") and parts[2] in ("ray_job", "ray_late_jobs")):
            allowed = {"ray"}
        return top_level(imports(path, module_level_only=True)) & EXTRAS.keys() - allowed

    assert not offenders([*files("treeproc"), *files("treenet")], forbidden)


def test_the_core_imports_no_extras():
    """Commands import them, and registries name them."""
    commands = {
        REPOSITORY / "treenet" / "cli" / f"{name}.py" for name in ("export", "frozen_states", "serve", "train_parser", "tune")
    }

    def forbidden(path: Path) -> Iterator[str]:
        return (name for name in imports(path) if name.split(".")[:2] in (["treeproc", "extras"], ["treenet", "extras"]))

    core = [path for package in PACKAGES for path in files(package) if path.relative_to(REPOSITORY).parts[1] != "extras"]
    assert not offenders(set(core) - commands, forbidden)


@pytest.mark.slow
def test_the_job_and_its_parsers_start_without_torch():
    code = "import sys, treenet.cli.preprocess, treeproc.parsers; sys.exit(bool({'torch', 'stanza'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_treenet_uses_lower_rooms_alone():
    def forbidden(path: Path) -> Iterator[str]:
        parts = path.relative_to(REPOSITORY / "treenet").with_suffix("").parts
        room = parts[0]
        for name in imports(path):
            head, *rest = name.split(".")
            if head in ("workflows", "stanza") or (head == "ray" and parts not in ON_RAY):
                yield name
            elif head == "treeproc" and rest:
                whole = room in ("api", "extras", "cli", "__init__")
                if not (whole or rest[0] in SHARED) or (rest[:2] == ["common", "ray_session"] and parts not in ON_RAY):
                    yield name
            elif head == "treenet" and rest and room != "__init__" and TREENET_ROOMS.index(rest[0]) > TREENET_ROOMS.index(room):
                yield name

    assert not offenders(files("treenet"), forbidden)


def test_treeproc_uses_lower_rooms_alone():
    def forbidden(path: Path) -> Iterator[str]:
        room = path.relative_to(REPOSITORY / "treeproc").with_suffix("").parts[0]
        if room in ("__init__", "sample"):
            return
        for name in imports(path):
            head, *rest = name.split(".")
            if head == "treeproc" and rest and TREEPROC_ROOMS.index(rest[0]) > TREEPROC_ROOMS.index(room):
                yield name

    assert not offenders(files("treeproc"), forbidden)


def test_the_engine_of_training_knows_no_concrete_task():
    used = {name for path in files("treenet/training") for name in imports(path) if name.startswith("treenet.tasks.")}
    assert {name.split(".")[2] for name in used} == {"base", "losses"}


def test_metrics_of_translations_are_named_in_one_file():
    """So a new metric is one entry there. The chrF of a single line, as reports show it, is no metric of a corpus."""
    lines = {REPOSITORY / "treenet" / "report" / name for name in ("lines.py", "report_model.py")}
    home = REPOSITORY / "treenet" / "tasks" / "translation_metrics.py"
    for path in {*files("treenet")} - {home, *lines}:
        constants = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)}
        assert not {*METRICS, *(f"{name}_signature" for name in METRICS)} & {one for one in constants if isinstance(one, str)}, (
            path
        )


def test_training_knows_no_evaluation():
    used = {name for path in files("treenet/training") for name in imports(path) if name.startswith("treenet.")}
    assert not {name for name in used if name.split(".")[1] in ("evaluation", "analysis", "probing", "report")}


def modules_imported(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of `modules` that a file imports; a package only where more of it is meant than a module inside."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in inside}
    return found & set(modules)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_imports_go_in_a_cycle(package):
    names = {path: path.relative_to(REPOSITORY).with_suffix("").parts for path in files(package)}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}
    graph = {name: modules_imported(path, modules) for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_no_encoder_imports_another_encoder():
    """Each stands alone on the bases."""
    for path in files("treenet/models/encoders"):
        used = {name.split(".")[3] for name in imports(path) if name.startswith("treenet.models.encoders.")}
        assert used <= {"base"}, path


def test_the_page_names_the_tests_of_every_room():
    page = (REPOSITORY / "docs" / "development.md").read_text()
    table = page.partition("## Where the tests of a room are")[2].partition("\n## ")[0]
    rows = re.findall(r"^- (.+?): (.+?)\.$", table, re.MULTILINE | re.DOTALL)
    inits = [path for package in PACKAGES for path in (REPOSITORY / package).glob("*/__init__.py")]
    rooms = {f"`{path.parent.relative_to(REPOSITORY)}`" for path in inits}
    assert rooms - {room for room, _ in rows} <= {"`treeproc/sample`", "`treeproc/models`"}  # files of data
    named = sorted({name for _, names in rows for name in re.split(r",\s+", names)})
    assert named == sorted(path.stem.removeprefix("test_") for path in (REPOSITORY / "tests").glob("test_*.py"))


def test_every_python_file_has_a_docstring():
    for package in (*PACKAGES, "workflows", "tests"):
        for path in files(package):
            assert re.match(r'r?"""\S', path.read_text(encoding="utf-8")), path  # faster than to parse it


def test_every_workflow_explains_every_setting(monkeypatch, capsys):
    for path in sorted((REPOSITORY / "workflows").glob("*.py")):
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        message = capsys.readouterr().out
        assert not ended.value.code and any(out in message for out in ("--out DIR", "--out RUN")), path.name
        listing = message.partition("settings (in the --config file")[2].strip().split("\n")[1:]
        assert listing and all(
            line.strip().partition(": ")[2][:2] not in ("", " (") for line in listing if line.startswith("  ")
        ), path.name
