"""The package as an installation has it: the wheel in an empty environment, without the packages of the extras."""

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from bracketed_data import write_bracketed_data
from toyruns import without_phases

from treenet import __version__
from treenet.cli.main import COMMANDS, command_of, describe_commands
from treenet.cli.shipped import CONFIGS, find_config, shipped_names
from treeproc.common.errors import EXTRAS, describe_missing, require
from treeproc.common.settings import UserError
from treeproc.stages.preprocess import SAMPLE

pytestmark = pytest.mark.long

# Site packages of the tests are on the path of the environment, but for these.
_WITHOUT = """
import sys
from importlib.machinery import PathFinder

BLOCKED = {"ray", "stanza", "py3langid", "requests", "matplotlib", "sacremoses", "scipy", "tensorboard", "pandas", "moto"}
BLOCKED |= {"uvicorn"}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else PathFinder.find_spec(name, path, target)


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""

# Connections to other machines fail.
_OFFLINE = """
import sys

HERE = {None, "", "localhost", "127.0.0.1", "::1"}


def refuse(event, arguments):
    if event == "socket.getaddrinfo" and arguments[0] not in HERE:
        raise OSError(f"a test asked for the address of {arguments[0]}")
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] not in HERE:
        raise OSError(f"a test connected to {arguments[1]}")


sys.addaudithook(refuse)
"""
_DEMO = """
splits:
  train: {source: [train.en], target: [train.de]}
  valid: {source: [valid.en], target: [valid.de]}
  test: {source: [test.en], target: [test.de]}
vocab_size: 500
max_steps: 4
checkpoint_every: 2
sentences: 1
workers: 0
"""

# Exit status, standard output and standard error of each command. A process for each would load PyTorch as often.
_ONE_PROCESS = """
import contextlib, io, json, sys
from treenet.cli.main import main

results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, said, status = ["tree-attention", *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as end:
            status = end.code
    results.append((status or 0, out.getvalue(), said.getvalue()))
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """The wheel, built from a copy: a build writes into the folder that it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("treenet", "treeproc"):
        shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "NOTICE", "MANIFEST.in"):
        shutil.copy(repository / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    stored = "--config-settings=--build-option=--compression=stored"  # to compress 55 MB of models takes longer than the rest
    subprocess.run([*pip, stored], check=True, timeout=120)
    [path] = out.glob("*.whl")
    return path


def empty_environment(tmp_path_factory) -> tuple[Path, Path]:
    """A virtual environment without pip, and its folder of packages."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=60)
    [site] = place.glob("lib/python*/site-packages")
    return place, site


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Run `tree-attention ARGS...` as it is installed, in an empty folder.

    Returns that function, one that runs many commands in one process, and the folder.
    """
    place, site = empty_environment(tmp_path_factory)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "-q", "--no-deps", "--no-index"]
    # This checkout may count as installed, by PYTHONPATH or its egg-info.
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True, timeout=60)
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (site / "sitecustomize.py").write_text(_WITHOUT)
    folder = tmp_path_factory.mktemp("work")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def start(*command: object) -> subprocess.CompletedProcess:
        return subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    def run_command(*arguments: object) -> subprocess.CompletedProcess:
        return start(place / "bin" / "tree-attention", *arguments)

    def run_all(commands: list[tuple[str, ...]]) -> list[tuple[int, str, str]]:
        done = start(place / "bin" / "python", "-c", _ONE_PROCESS, json.dumps(commands))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run_command, run_all, folder


@pytest.mark.slow
def test_the_wheel_has_what_a_user_needs(wheel, repository):
    names = set(ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"treenet", "treeproc", f"tree_attention-{__version__}.dist-info"}
    for name in ("treenet/cli/configs/sample.yaml", "treenet/py.typed", "treeproc/py.typed"):
        assert name in names
    pages = [(folder, f"page.{kind}") for folder in ("report", "extras/serving") for kind in ("css", "js")]
    templates = [("report/templates", path.name) for path in (repository / "treenet/report/templates").iterdir()]
    for folder, name in (*pages, ("report", "lines.js"), ("extras/serving", "page.html"), *templates):
        assert f"treenet/{folder}/{name}" in names
    assert {"treeproc/models/en/constituency.pt", "treeproc/sample/train.en.gz"} <= names
    licences = f"tree_attention-{__version__}.dist-info/licenses"
    assert {f"{licences}/LICENSE", f"{licences}/NOTICE"} <= names


@pytest.mark.slow
def test_the_installed_command_works_without_the_extras(run):
    """Preprocess trees that are given, train in one process and translate; what needs an extra says so in a line."""
    command, run_all, folder = run
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"tree-attention {__version__}\n")
    write_bracketed_data(folder)
    work = [
        ("preprocess", "--config", "data.yaml", "--out", "data"),
        ("train", "--config", "train.yaml", "--out", "run", "data=data"),
        ("translate", "--out", "run", "trees=test.mrg", "output=out.txt"),
        ("settings", "lr"),
        ("train-parser", "--help"),
    ]
    lacks = {
        ("demo", "--out", "x"): r"the demo needs stanza, matplotlib and ray, .*: .* 'tree-attention\[parse,report,ray\]'",
        ("preprocess", "--sample", "--out", "x"): r"needs ray and stanza, .*: pip install 'tree-attention\[ray,parse\]'",
        ("preprocess", "--config", "data.yaml", "--out", "x", "workers=null"): "needs ray, .*; or give workers=0",
        ("preprocess", "--sample", "--out", "x", "workers=0"): "parser.name=shipped needs stanza",
        ("train", "--config", "train.yaml", "--out", "x", "data=data", "workers=2"): "workers=2 needs ray",
        ("serve", "--out", "run"): "a server needs uvicorn and ray, .*: pip install 'tree-attention\\[serve,ray\\]'",
        ("train-parser", "--out", "x"): "the training of parsers needs stanza",
        ("tune",): "a search over settings needs ray and matplotlib, .*: pip install 'tree-attention\\[ray,report\\]'",
        ("report",): "a report needs matplotlib and scipy, which are not installed",
        ("scaling",): "the report of a study needs matplotlib and scipy, which are not installed",
        ("serve",): "a server needs uvicorn",
        ("train-classifier", "--out", "x"): r"give settings as data=DATA, or --config FILE.yaml \(tree-attention configs has",
    }
    done = run_all([*work, *lacks])
    done, lacking = done[: len(work)], done[len(work) :]
    assert [status for status, _, _ in done] == [0] * len(work), done
    trained = done[1][1]
    assert "TensorBoard, because tensorboard is not installed: pip install 'tree-attention[report]'" in trained
    assert "curves: not drawn, because matplotlib is not installed" in trained and not (folder / "run/tensorboard").exists()
    assert "score: tree-attention evaluate --out run" in trained
    assert len((folder / "out.txt").read_text().split("\n")) == 6
    for (arguments, message), (status, _, said) in zip(lacks.items(), lacking, strict=True):
        [line] = without_phases(said)
        assert status == 2 and re.fullmatch(f"error: .*{message}.*", line), (arguments, said)
    assert not (folder / "x").exists()


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_the_first_pages_run_outside_a_checkout(wheel, tmp_path, tmp_path_factory, repository):
    """All shell blocks of a page in turn: in an empty folder and environment, with borrowed packages, and without a network.

    `tree-attention demo` and the tutorial run in one process.
    """
    place, site = empty_environment(tmp_path_factory)
    borrowed = tmp_path_factory.mktemp("borrowed")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(("tree_attention", "__editable__")):
            (borrowed / path.name).symlink_to(path)
    (site / "others.pth").write_text(f"{borrowed}\n")
    (site / "sitecustomize.py").write_text(_OFFLINE)
    (place / "bin" / "pip").write_text(f'#!/bin/sh\nexec {place}/bin/python -m pip "$@"\n')
    (place / "bin" / "pip").chmod(0o755)
    shutil.copy(wheel, tmp_path)
    (tmp_path / "demo.yaml").write_text(_DEMO)
    for split, count in (("train", 40), ("valid", 4), ("test", 4)):
        for language in ("en", "de"):
            lines = gzip.decompress((SAMPLE / f"{split}.{language}.gz").read_bytes()).decode().split("\n")[:count]
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PIP_")}
    environment |= {"PATH": f"{place}/bin:{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= {"PIP_NO_INDEX": "1", "PIP_NO_COMPILE": "1"}  # Python compiles what is used
    page = (repository / "docs" / "install.md").read_text()
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert blocks.count("tree-attention demo\n") == 1
    (tmp_path / "tutorial").mkdir()
    in_one_process = f"python {repository / 'tests' / 'tutorial_outside.py'} {repository / 'docs'} tutorial demo.yaml\n"
    shell = ["bash", "-euxo", "pipefail", "-c", blocks.replace("tree-attention demo\n", in_one_process)]
    done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert (tmp_path / "demo-output" / "report.txt").exists()
    assert (site / "treenet" / "cli" / "main.py").exists()  # the wheel was installed, and not found in this checkout


@pytest.mark.slow
def test_help_and_version_load_nothing(repository):
    code = (
        "import sys; from treenet.cli.main import main; sys.argv = ['tree-attention', '--help']; main()\n"
        "sys.exit(bool({'torch', 'ray', 'pyarrow', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=repository, stdout=subprocess.DEVNULL).returncode == 0


def test_every_script_is_a_command(repository):
    paths = list((repository / "workflows").glob("*.py"))
    assert all(path.read_text().endswith("\n    run_script(__file__)\n") for path in paths)
    scripts = {path.stem for path in paths} - {"train_wmt"}  # another name of train.py
    assert set(COMMANDS) >= {command_of(script) for script in scripts}
    without_script = {"inspect", "verify", "settings", "configs", "completion"}
    assert set(COMMANDS) - {command_of(script) for script in scripts} == without_script
    assert all(f"\n  {name} " in describe_commands() for name in COMMANDS)


def test_no_text_of_the_wheel_names_a_page(repository):
    """An installation lacks `docs/`. Helps, messages and docstrings say the thing itself; comments in the code may name pages."""
    named = re.compile(r"\bdocs/(?!results/runs/)|(?<!README)\.md\b")
    texts = {path: re.findall(r"#.*", path.read_text()) for path in CONFIGS.glob("*.yaml")}
    for package in ("treenet", "treeproc"):
        texts |= {path: [path.read_text()] for kind in ("html", "js") for path in (repository / package).rglob(f"*.{kind}")}
        for path in (repository / package).rglob("*.py"):
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            texts[path] = [one for one in constants if isinstance(one, str)]
    assert len(texts) > 400
    assert not [(path.name, text) for path, found in texts.items() for text in found if named.search(text)]


def test_extras_name_what_pyproject_installs(project):
    extras = project["optional-dependencies"]
    names = ("benepar", "supar", "spacy", "serve", "tune", "ray", "parse", "report", "export", "bertscore", "pretrained")
    installed = {re.match(r"[\w-]+", line)[0]: name for name in names for line in extras[name]}
    assert {re.match(r"[\w-]+", line)[0] for line in extras["mlflow"]} == {"alembic", "mlflow-skinny", "sqlalchemy"}
    assert {re.match(r"[\w-]+", line)[0] for line in extras["ja"]} == {"ipadic", "mecab-python3"}
    assert installed | {"mlflow": "mlflow", "wandb": "wandb", "MeCab": "ja", "ipadic": "ja"} == EXTRAS
    assert extras["all"] == ["tree-attention[ray,parse,report,ja,serve,export,tune,bertscore,pretrained]"]
    base = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert not base & EXTRAS.keys()


def test_the_version_is_the_same_everywhere(repository):
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert f"\n## {__version__} ({citation['date-released']})\n" in (repository / "CHANGELOG.md").read_text()
    for page in ("README.md", "docs/install.md"):
        assert f"'./tree_attention-{__version__}-py3-none-any.whl[all]'" in (repository / page).read_text()


@pytest.mark.slow
def test_a_release_wants_committed_files_and_addresses(repository, tmp_path):
    """The commands between the refusals and the last lines have tests of their own: here, they do nothing."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(repository / name, tmp_path)

    def release() -> subprocess.CompletedProcess:
        return subprocess.run(["make", "release", "MAKE=true", "RUN=true"], cwd=tmp_path, capture_output=True, text=True)

    def commit() -> None:
        for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert "the checkout has changes; commit them\n" in release().stderr
    commit()
    assert 'pyproject.toml lacks Documentation in [project.urls]; write Documentation = "https://..."\n' in release().stderr
    text = (tmp_path / "pyproject.toml").read_text()
    added = 'Documentation = "https://a.example"\nSource = "https://b.example"\nPaper ='
    (tmp_path / "pyproject.toml").write_text(text.replace("Paper =", added))
    commit()
    done = release()
    assert done.returncode == 0 and "git tag --annotate v" in done.stdout, done.stderr
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Documentation", "Source"} <= set(urls)  # the place that the Makefile reads is that of the metadata


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(EXTRAS, "absent", "ray")
    with pytest.raises(UserError) as error:
        require("absent", "it", "wait")
    assert str(error.value) == "it needs absent, which is not installed: pip install 'tree-attention[ray]'; or wait"
    with pytest.raises(
        UserError, match=r"needs absent, stanza9 and other9, which are .*: pip install 'tree-attention\[ray\]' stanza9 other9$"
    ):
        require(("absent", "re", "stanza9", "other9"), "it")
    missing = ModuleNotFoundError("No module named 'ray.data'", name="ray.data")
    assert describe_missing(missing) == "this needs ray, which is not installed: pip install 'tree-attention[ray]'"
    assert describe_missing(ModuleNotFoundError("No module named 'x'", name="x")) is None


def test_a_configuration_is_a_file_or_a_shipped_name(tmp_path, monkeypatch, repository):
    assert (repository / "workflows" / "configs").resolve() == CONFIGS
    monkeypatch.chdir(tmp_path)
    assert find_config("sst5") == CONFIGS / "sst5.yaml" and "sst5" in shipped_names()
    assert find_config("own.yaml") == Path("own.yaml")
    with pytest.raises(UserError, match=r"cannot read the configuration workflows/configs/sst5.yaml: .*; --config sst5 takes"):
        find_config("workflows/configs/sst5.yaml")
    Path("sst5").write_text("max_steps: 1\n")
    assert find_config("sst5") == Path("sst5")
    Path("sst5").unlink()
    Path("sst5").mkdir()
    assert find_config("sst5") == CONFIGS / "sst5.yaml"
