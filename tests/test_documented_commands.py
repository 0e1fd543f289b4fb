"""The shell commands of pages, configurations and docstrings: our commands take their arguments and settings."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from string import Template

import pytest
from commands import run_installed_here
from conftest import REPOSITORY
from search_runs import write_vocabulary

from treenet.cli import shipped
from treenet.cli.main import COMMANDS, command_of
from treenet.cli.shipped import CONFIGS
from treeproc.common.settings import load_settings

pytestmark = pytest.mark.slow

PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted(CONFIGS.glob("*.yaml")),
    *sorted(CONFIGS.parent.glob("*.py")),
]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLES = re.compile(r"^((?:[A-Z_]+=(?:\"[^\"]*\"|\S+) *)+)(?:#.*)?$", re.MULTILINE)
WRITTEN = re.compile(r"^cat > (\S+) <<(\w+)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^#? {3,}(\S.*?)(?: {3,}.*)?$", re.MULTILINE)  # in a comment or a docstring; a remark may follow
MAKE = re.compile(r"^make (?:-\S+ )*([^#\n]*)", re.MULTILINE)
LOOP = re.compile(r"\bfor (\w+) in ([^\s;]+)")
OURS = re.compile(r"(?:^|[ (/])(?:python workflows/(\w+)\.py|(?<!name )(?<!description )tree-attention ([a-z]\S*))(?= |$)")
END = re.compile(r"[|&;<>]+|2?>.*|.*[;)]")  # a word that ends a command
# What stands in for a configuration that the user writes.
YOURS = {
    "preprocess": "sample_data",
    "train": "sample",
    "train-classifier": "sst5",
    "train-lm": "masked_lm",
    "train-parser": "parser_en",
    "scaling": "scaling_sample",
    "compare-seeds": "seeds_sst5",
    "tune": "tune_sample",
}


class Loaded(Exception):
    """A command has read its settings."""


def blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return BLOCK.findall(text) if page.suffix == ".md" else ["\n".join(INDENTED.findall(introduction_of(text)))]


def introduction_of(text: str) -> str:
    """The comment or the docstring at the start of a file."""
    return ast.get_docstring(ast.parse(text)) or "" if text.startswith('"""') else text.partition("\n\n")[0]


def our_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, arguments) of the commands of a page. Variables have the first values that the page gives them."""
    values: dict[str, str] = {}
    for block in blocks(page):
        for text in VARIABLES.findall(block):
            values |= dict(one.split("=", 1) for one in shlex.split(text))
        values |= dict(LOOP.findall(block))
        for line in block.replace("\\\n", " ").splitlines():
            for found in OURS.finditer(line.partition("  #")[0]):
                text = Template(line[found.end() :].replace(" ...", " --config FILE --out RUN data=DATA"))
                words = shlex.split(text.safe_substitute(values), comments=True)
                ends = [at for at, word in enumerate(words) if END.fullmatch(word)]
                yield command_of((found[1] or found[2]).replace("-", "_")), words[: min(ends, default=None)]


def with_what_the_user_has(name: str, arguments: list[str]) -> list[str]:
    """The arguments, with a shipped configuration in place of the user's, and a data set for `vocab_from`."""
    found = list(arguments)
    if "--config" in found:
        at = found.index("--config") + 1
        if not (Path(found[at]).is_file() or (CONFIGS / Path(found[at]).with_suffix(".yaml").name).is_file()):
            found[at] = YOURS[name]
    for one in found:
        if one.startswith("vocab_from=") and not (folder := Path(one.partition("=")[2])).is_dir():
            write_vocabulary(folder)
            (folder / "config.yaml").write_text((CONFIGS / "sample_data.yaml").read_text())
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md" and blocks(page)], ids=lambda page: page.stem)
def test_the_shell_reads_the_blocks(page):
    for block in blocks(page):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert done.returncode == 0, (block, done.stderr)


@pytest.mark.parametrize("page", [page for page in PAGES if any(our_commands(page))], ids=lambda page: page.stem)
def test_commands_take_their_arguments_and_settings(page, monkeypatch, tmp_path):
    (tmp_path / "workflows").symlink_to(REPOSITORY / "workflows")
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        for file, _, text in WRITTEN.findall(block):
            Path(file).write_text(text)

    def load(*arguments, **values):
        load_settings(*arguments, **values)
        raise Loaded

    for name, arguments in our_commands(page):
        module = import_module(COMMANDS[name][0].partition(":")[0])
        if module is not shipped and (hasattr(module, "load_settings") or hasattr(module, "on_a_run")):
            for reader in (module, shipped):
                monkeypatch.setattr(reader, "load_settings", load, raising=False)
            print(name, *arguments)  # pytest shows the command that fails
            with pytest.raises(Loaded):
                resolve_name(COMMANDS[name][0])(with_what_the_user_has(name, arguments))
        else:
            resolve_name(COMMANDS[name][0]).parser().parse_intermixed_args(arguments)


def test_make_has_the_targets():
    targets = re.search(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[1].split()
    named = [one for page in PAGES for block in blocks(page) for words in MAKE.findall(block) for one in words.split()]
    assert len(named) > 5 and not {one for one in named if "=" not in one} - set(targets)


def test_bash_completes_commands_options_settings_and_configurations(tmp_path):
    done = run_installed_here("completion")
    assert done.returncode == 0, done.stderr
    (tmp_path / "script").write_text(done.stdout)
    cases = {
        "pre": ["preprocess"],
        "train --conf": ["--config"],
        "train --config sst": ["sst2", "sst2_data", "sst5", "sst5_data"],
        "configs sample_": ["sample_data"],
        "train optimizer.l": ["optimizer.learning_rate=", "optimizer.label_smoothing="],
        "translate decoding.beam": ["decoding.beam_size="],
        "preprocess splits": ["splits=", "splits."],
        "inspect --s": ["--split"],
        "train data =": [],  # bash completes files
    }
    for typed, expected in cases.items():
        words = ["tree-attention", *typed.split()]
        code = f"source ./script; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _tree_attention"
        code += '; echo "${COMPREPLY[@]}"'
        found = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert (found.stdout.split(), found.stderr) == (expected, ""), typed


def test_make_installs_without_hundreds_of_lines():
    recipes = (REPOSITORY / "Makefile").read_text()
    assert "INSTALL := -m pip install --quiet " in recipes and recipes.count("pip install") == 1
    assert re.search(r"@echo '.*90 seconds.*'\n\t\$\(RUN\) \$\(INSTALL\)", recipes)


def test_commands_are_found_in_all_their_forms(tmp_path):
    (tmp_path / "page.md").write_text(
        "```bash\nTASK=a\nfor x in 1 2; do python workflows/train_wmt.py data=$TASK \\\n  --out=b$x all; done  # tree-attention\n"
        "$S -- python workflows/tune.py c < d\nX=1 nice tree-attention score-lm 2> e\naws --description tree-attention f\n```\n"
    )
    assert list(our_commands(tmp_path / "page.md")) == [
        ("train", ["data=a", "--out=b1"]),
        ("tune", ["c"]),
        ("score-lm", []),
    ]
