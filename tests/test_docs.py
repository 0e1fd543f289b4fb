"""The documentation: links lead somewhere, and the code that a page marks as runnable runs."""

import re
import shlex
from contextlib import chdir
from pathlib import Path

import pytest
import settings_tables
from bracketed_data import write_bracketed_data
from commands import run_installed_here
from conftest import REPOSITORY

from treenet.cli.settings import Described
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


def test_the_pages_of_settings_are_of_the_present_settings():
    texts = {page.name: page.read_text(encoding="utf-8") for page in settings_tables.pages()}
    stale = [name for name, text in texts.items() if settings_tables.fill(text) != text]
    assert not stale, "run: python docs/settings_tables.py"


def test_every_setting_is_on_a_page_once():
    """Sections of several commands, such as `decoding`, are on the page of one. Words of other toolkits lead to settings."""
    shown: list[tuple[str, Described]] = []
    for page in settings_tables.pages():
        for _, kind, arguments in settings_tables.TABLE.findall(page.read_text(encoding="utf-8")):
            if kind == "settings":
                command, *sections = arguments.split()
                shown += [(command, one) for one in settings_tables.chosen(command, *sections)]
    assert len(shown) == len(set(shown)) > 400
    on_pages = {(one.name.rpartition(".")[2], one.meaning) for _, one in shown}
    for command, settings in settings_tables.settings_by_command().items():
        assert not [one for one in settings if (one.name.rpartition(".")[2], one.meaning) not in on_pages], command
    known = {one.name for _, one in shown}
    assert not [word for word, meant in SYNONYMS.items() if " " not in meant and meant not in known]


@pytest.mark.parametrize(
    ("word", "names", "part"),
    [
        ("optimizer.warmup_steps", ["optimizer.warmup_steps"], "values: integer > 0; default: 4000\n"),
        ("lr", ["optimizer.learning_rate"], "other toolkits: lr, peak_lr\n"),
        ("epochs", ["max_steps"], "epochs of other toolkits: training counts updates"),
        ("model.hybrid.cell", ["model.hybrid.cell"], "models: on_lstm_hybrid\n"),
        ("tree_reg", [f"model.tree_reg.{name}" for name in ("weight", "layer", "heads")], "models: causal_transformer\n"),
        ("output_dir", [], "output_dir of other toolkits: give --out DIR, the folder of the results\n"),
        ("R-Drop", ["optimizer.r_drop"], "read by: train, train-classifier, train-lm, scaling, compare-seeds, tune\n"),
        ("parser.endpoint", ["parser.endpoint"], "read by: preprocess\n"),
    ],
)
def test_settings_are_found_by_key_section_and_word(word, names, part):
    done = run_installed_here("settings", word)
    assert done.returncode == 0 and part in done.stdout, done.stdout
    found = re.findall(r"^\S+$", done.stdout, re.MULTILINE)
    assert set(names) <= set(found) if word == "epochs" else names == found


def test_settings_that_are_not_there_are_one_line():
    done = run_installed_here("settings", "label_smoothin_")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: there is no setting 'label_smoothin_', and no meaning has this word; did you mean optimizer.label_smoothing?\n"
    )
