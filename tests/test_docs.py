"""The documentation: links lead somewhere, and the code that a page marks as runnable runs."""

import re
import shlex
from contextlib import chdir
from pathlib import Path

import pytest
from bracketed_data import write_bracketed_data
from commands import run_installed_here
from conftest import REPOSITORY

from treenet.config import TrainConfig
from treenet.jobs.train_run import run_training
from treeproc.common.settings import load_settings
from treeproc.common.synonyms import SYNONYMS
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.preprocess import preprocess

pytestmark = pytest.mark.long

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
RUNNABLE = re.compile(r"^<!-- run -->\n```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(#[^)]*)?\)")


def run_in_shell(line: str) -> None:
    """A `tree-attention` command, without where its output goes."""
    program, *arguments = shlex.split(line.partition(" 2>/dev/null")[0], comments=True)
    assert program == "tree-attention"
    done = run_installed_here(*arguments)
    assert done.returncode == 0, done.stderr


def runnable_blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of the blocks of a page that are marked as runnable, in order."""
    return RUNNABLE.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    missing = [target for target, _ in LINK.findall(text) if not (page.parent / target).exists()]
    assert not missing


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what runnable blocks name: workflows, my_data.yaml, data DATA (runs/data), the run RUN (runs/tree)."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "workflows").symlink_to(REPOSITORY / "workflows")
    write_bracketed_data(folder)
    (folder / "data.yaml").rename(folder / "my_data.yaml")
    preprocess(load_settings(PreprocessConfig, folder / "my_data.yaml"), folder / "runs" / "data")
    run_training(load_settings(TrainConfig, folder / "train.yaml", data=folder / "runs" / "data"), folder / "runs" / "tree")
    (folder / "DATA").symlink_to(folder / "runs" / "data")
    (folder / "RUN").symlink_to(folder / "runs" / "tree")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable_blocks(page)], ids=lambda page: page.stem)
def test_runnable_blocks_run(page, workplace):
    """Each block of Python is a program, each line of the others a command, in the order of the page."""
    with chdir(workplace):
        for language, code in runnable_blocks(page):
            if language == "python":
                exec(code, {"__name__": "__main__"})
            else:
                for line in code.splitlines():
                    run_in_shell(line)


def test_every_setting_is_on_one_page(monkeypatch):
    """A page leaves out sections of other commands, as `!decoding`. Words of other toolkits lead to settings."""
    monkeypatch.syspath_prepend(REPOSITORY / "docs" / "extensions")
    from chosen_settings import chosen_settings

    shown: dict[str, list[str]] = {}
    for page in (REPOSITORY / "docs" / "settings").glob("*.md"):
        for argument in re.findall(r"^```\{settings\} (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found = [fact.name for fact in chosen_settings(argument)]
            command, *sections = argument.split()
            for section in sections:
                assert chosen_settings(f"{command} {section.removeprefix('!')}"), f"{page.name}: {argument}: {section}"
                found += [fact.name for fact in chosen_settings(f"{command} {section[1:]}") if section[0] == "!"]
            shown.setdefault(command, []).extend(found)
    for command, names in shown.items():
        assert sorted(names) == sorted(fact.name for fact in chosen_settings(command)), command
    assert len(shown) == 20
    known = {name for names in shown.values() for name in names}
    assert not [word for word, meant in SYNONYMS.items() if " " not in meant and meant not in known]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch):
    """All cells and commands in this process, with few sentences and updates; `make docs` runs them as they are."""
    text = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```\{code-cell\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = "\n".join(cells).replace("PAIRS, UPDATES = 6000, 400", "PAIRS, UPDATES = 400, 4")
    code = code.replace('("valid", 200), ("test", 100)', '("valid", 20), ("test", 10)')
    code = re.sub(r"^!(.*)$", lambda line: f"run_in_shell(f{line[1]!r})", code, flags=re.MULTILINE)
    monkeypatch.setenv("MPLBACKEND", "agg")
    with chdir(tmp_path):
        exec(code, {"__name__": "__main__", "run_in_shell": run_in_shell})
