"""Advice in messages can be followed: the commands, options and settings that it names exist, and lead to the end."""

import ast
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
from commands import run_here, run_installed_here
from conftest import REPOSITORY
from sample_lines import sample_lines

from treenet.cli.main import COMMANDS
from treenet.cli.shipped import CONFIGS, shipped_names
from treenet.config import TrainConfig
from treeproc.common.setting_errors import has_setting, nearest
from treeproc.common.synonyms import ELSEWHERE, SYNONYMS, settings_in

OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SETTING = re.compile(r"(?:(?<=[\s(])|^)([a-z][a-z_]*(?:\.[a-z_]+)*)=(?!\")")
NAMED = re.compile(r"tree-attention ([a-z][a-z-]*)")
# Clauses about another command, which they name in words.
IN_WORDS = {
    re.compile(r"\bpreprocess\b|\bdata set\b|\bmake it\b|\brun it\b|\bparsed=DATA\b"): "preprocess",
    re.compile(r"\btraining (?:command|workflow)\b|\ba new run\b"): "train",
}
# Their texts name arguments of functions, of other programs, attributes of HTML, or commands that a variable names.
NOT_OURS = (
    "treenet.api.", "treenet.structure.", "treenet.report.", "treenet.cli.completion.", "treeproc.readers.",
    "treeproc.common.synonyms.", "treenet.runs.exported_run.",
)  # fmt: skip
OTHER_PROGRAMS = re.compile(
    r"\bpip install [^;]*|\btensorboard --logdir\b|<[^>]*>|\bkey=value\b|\bcharset=utf-8\b|\{\} (?:COMMAND )?--\w+|"
    r"settings \(in the --config file"
)
SIDES = (("source", "en"), ("target", "de"))


@cache
def parsers() -> dict:
    return {name: resolve_name(place).parser() for name, (place, _) in COMMANDS.items()}


@cache
def takes(command: str, name: str) -> bool:
    parser = parsers()[command]
    return name in parser.options() if name.startswith("--") else has_setting(parser.settings, name)


@cache
def sources() -> dict[str, str]:
    """The modules of both packages by name."""
    paths = [*(REPOSITORY / "treeproc").rglob("*.py"), *(REPOSITORY / "treenet").rglob("*.py")]
    names = (".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, paths, strict=True)}


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(sources()[module])))


@cache
def imports(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    nodes = [node for node in nodes_of(module) if isinstance(node, ast.ImportFrom)]
    found = {node.module for node in nodes} | {f"{node.module}.{name.name}" for node in nodes for name in node.names}
    return found & sources().keys()


@cache
def users() -> dict[str, set[str]]:
    """The commands that import each module, also later."""
    found = defaultdict(set)
    for command, (place, _) in COMMANDS.items():
        todo = [place.partition(":")[0]]
        while todo:
            name = todo.pop()
            if command not in found[name]:
                found[name].add(command)
                todo += imports(name)
    return found


def texts(module: str) -> Iterator[tuple[str, bool]]:
    """The strings of a module except docstrings, and whether they are arguments of `require`."""
    nodes = nodes_of(module)
    left_out = {node.value for node in nodes if isinstance(node, ast.Expr)}
    left_out.update(part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values)
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    chosen = {part for call in calls if call.func.id == "require" for part in ast.walk(call)}
    for node in nodes:  # what a caller may replace
        if isinstance(node, ast.FunctionDef) and [one.arg for one in node.args.args] == ["instead"]:
            chosen.update(node.args.defaults)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        else:
            continue
        if " " in text:
            yield text, node in chosen


@cache
def all_texts() -> list[tuple[str, str, bool]]:
    """(module, text, chosen) of all strings that may advise a user."""
    ours = [name for name in sources() if not f"{name}.".startswith(NOT_OURS)]
    return [(name, *found) for name in ours for found in texts(name)]


def clauses(text: str) -> Iterator[tuple[set[str], set[str], set[str]]]:
    """Commands by name, commands in words, and options and settings, of each clause of an advice."""
    for clause in re.split(r"; |, or (?:with )?", OTHER_PROGRAMS.sub("", text)):
        named = set(NAMED.findall(clause))
        in_words = {command for words, command in IN_WORDS.items() if words.search(clause)}
        yield named, in_words, {*OPTION.findall(clause), *SETTING.findall(clause)}


def wrong_advice() -> Iterator[str]:
    for module, text, is_chosen in all_texts():
        running = users()[module]
        if not running or text.startswith(" "):  # a module that settings name; the end of a text that may name a command
            running = set(COMMANDS)
        for named, in_words, names in clauses(text):
            if unknown := named - set(COMMANDS):
                yield f"{module}: {text!r} names {unknown}, which are not commands"
                continue
            meant = named | in_words | (running if module.startswith("treenet.cli.") or not named else set())
            general = module.startswith("treeproc.common.") and not named and not in_words and not is_chosen
            for name in names:
                unable = {command for command in meant if not takes(command, name)}
                if unable == meant or (general and unable):
                    yield f"{module}: {text!r} names {name}, which {sorted(unable)} do not have"


def test_help_names_no_script():
    helps = {name: parser.format_help().partition("\n\n")[2] for name, parser in parsers().items()}
    assert not {name: found for name, text in helps.items() if (found := re.findall(r"\w+\.py\b", text))}


def test_all_advice_in_the_code_names_what_its_command_has():
    assert list(wrong_advice()) == []


def test_all_commands_have_a_quiet_and_a_verbose_form():
    assert all({"--quiet", "--verbose"} <= set(parser.options()) for parser in parsers().values())


def test_the_search_for_advice_finds_it():
    """Else the test above would hold for any code."""
    found = {name for _, text, _ in all_texts() for *_, names in clauses(text) for name in names}
    assert {"--out", "--dry-run", "workers", "vocab_from", "tree.binarize", "use_gpu"} <= found
    assert list(clauses("run tree-attention nothing --far, or give near=N")) == [
        ({"nothing"}, set(), {"--far"}),
        (set(), set(), {"near"}),
    ]


def test_without_stanza_the_sample_takes_a_setting_of_the_message(monkeypatch, tmp_path):
    monkeypatch.setattr("treeproc.common.errors.is_installed", lambda module: module != "stanza")
    words = "--sample", "--dry-run", "--out", str(tmp_path / "data"), "workers=0"
    refused = run_here("preprocess.py", *words)
    assert refused.returncode == 2 and "or set parser.name=given if your files have trees, or parser.name=words" in refused.stderr
    ways = re.search(r"(parser.name=words) (tree.tree_source=balanced) for", refused.stderr).groups()
    assert run_here("preprocess.py", *words, *ways).returncode == 0


def test_a_relative_path_that_is_missing_names_where_it_starts(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "data.yaml").write_text("splits: {train: {source: [in/a], target: [in/b]}}\nparser: {name: words}\n")
    command = "preprocess.py", "--config", "conf/data.yaml", "--out", "data", "workers=0", "tree.tree_source=balanced"
    done = run_here(*command, cwd=tmp_path)
    assert done.stderr == f"error: cannot read in/a: No such file or directory in the working folder {tmp_path}\n"
    (tmp_path / "a").write_text("x\ta b\ny\tc d\n")
    words = "splits.train={source: [a]}", "splits.valid={hold_out: 2}", "format=labelled", "subwords.tokenizer=./gone"
    done = run_here(*command, *words, cwd=tmp_path)
    assert f"subwords.tokenizer: {tmp_path}/gone is not a folder" in done.stderr


def test_words_of_other_toolkits_name_our_settings():
    assert len(SYNONYMS) == len(" ".join(ELSEWHERE.values()).split())  # no word stands in two entries
    classes = [parser.settings for parser in parsers().values()]
    for word, advice in SYNONYMS.items():
        names = settings_in(advice)
        assert names or "--out" in advice, word
        assert any(all(has_setting(cls, name) for name in names) for cls in classes), (word, advice)
        assert word == word.lower() and len(advice) < 120


def test_an_option_of_another_toolkit_is_answered_with_our_setting():
    done = run_here("train_wmt.py", "--out", "r", "data=x", "--lr", "0.1")
    assert "there is no option '--lr'; settings are written key=value; write optimizer.learning_rate=0.1" in done.stderr
    assert nearest(TrainConfig, "epochs") == [] and "set max_steps" in run_here("train_wmt.py", "--epochs", "3").stderr


def test_configurations_and_commands_have_names(tmp_path):
    assert "there is no command 'trnslate'; did you mean translate?" in run_installed_here("trnslate").stderr
    (tmp_path / "sst5").mkdir()  # a folder, for example of data
    shutil.copy(CONFIGS / "sst5.yaml", tmp_path / "own.yaml")
    for config, ways in (("sst5", ""), ("own.yaml", ", or data: ... into the file")):
        done = run_here("train_classifier.py", "--config", config, "--out", "x", cwd=tmp_path)
        assert "data: is missing" in done.stderr and done.stderr.endswith(f"write data=... on the command line{ways}\n")
    for command in (("train", "--out", "x", "--config"), ("configs",)):
        assert "there is no shipped configuration 'samp'; did you mean sample?" in run_installed_here(*command, "samp").stderr
        assert "'nosuch'; tree-attention configs lists them" in run_installed_here(*command, "nosuch").stderr
    assert "sample" in shipped_names()


def follow(words: list[str], files: dict[str, str], folder: Path) -> tuple[list[str], list[str]]:
    """Type what each message says until the command succeeds. Returns the messages and the last words."""
    messages = []
    while (done := run_installed_here(*words, cwd=folder)).returncode:
        message = done.stderr.splitlines()[-1]
        assert message.startswith("error: ") and message not in messages, messages
        messages.append(message)
        if "there is no option" in message:
            at = words.index(re.search(r"'(--\S+)'", message)[1])
            words = words[:at] + words[at + 2 :]
        added = [f"{name}={files[name]}" for name in re.findall(r"([a-z][\w.]*)=(?:FILE|DATA|\.\.\.)", message) if name in files]
        if limit := re.search(r"(subwords\.vocab_size) = .* a value <= (\d+)", message):
            added.append("=".join(limit.groups()))
        words = [*words, *(one for one in added if one not in words)]
    return messages, words


@pytest.mark.slow
def test_a_first_data_set_and_a_first_training_need_only_what_the_messages_say(tmp_path):
    lines = sample_lines(60)
    for name in ("train.en", "train.de", "valid.en", "valid.de"):
        (tmp_path / name).write_text("\n".join(lines if name.startswith("train") else lines[:5]) + "\n")
    files = {f"splits.{split}.{side}": f"{split}.{end}" for split in ("train", "valid") for side, end in SIDES}
    without_parser = ["workers=0", "parser.name=words", "tree.tree_source=balanced"]
    began = ["preprocess", "--out", "data", "--source", "train.en", "--target", "train.de", *without_parser]
    messages, words = follow(began, files, tmp_path)
    assert len(messages) <= 4 and "splits.train.source=train.en" in words and "--config" not in words
    assert (tmp_path / "data" / "encoded" / "index.json").exists()

    small = [f"model.{name}=16" for name in ("d_model", "d_ff")] + ["max_steps=1", "workers=0", "model.num_heads=2"]
    messages, words = follow(["train", "--out", "run", *small], {"data": "data"}, tmp_path)
    assert len(messages) == 1 and "data=data" in words and (tmp_path / "run" / "averaged").is_dir()
    messages, _ = follow(["train-lm", "--out", "lm", *small], {"data": "data"}, tmp_path)
    assert len(messages) == 1 and (tmp_path / "lm" / "averaged").is_dir()
