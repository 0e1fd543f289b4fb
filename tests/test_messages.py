"""Results on standard output, messages on standard error, all in one way, and as much of them as the user asks for."""

import ast
import re
import warnings

import pytest
from conftest import REPOSITORY

from treenet.experiments.study_grid import add_study_options
from treeproc.common.command_line import build_arg_parser, run_cli
from treeproc.common.errors import rewording
from treeproc.common.messages import Progress, messages_shown, phase, tell, warn
from treeproc.common.settings import Settings, UserError

PROMPTS = {"treenet/cli/translate.py"}  # a prompt and the end of its line
BESIDE_OUTPUT = {"treenet/cli/align.py"}  # its rate, where standard output has the links
# Modules that print results. All others tell and warn.
PRINT = {
    "treenet/jobs/train_run.py", "treenet/experiments/study.py", "treenet/extras/serving/server.py", "treeproc/inspect.py",
    "treeproc/verify.py",
}  # fmt: skip


def work(argv):
    """A command with each kind of output."""
    parser = build_arg_parser("What it does.", Settings)
    add_study_options(parser)
    parser.parse_intermixed_args(argv)
    print("result")
    tell("progress")
    warn("warning: doubt")
    warnings.warn("a library\nhas a doubt", stacklevel=1)
    with Progress("bar", 2, unit="steps") as progress, phase("waiting", after=0):
        progress.update(2)


def test_warnings_of_the_loggers_begin_as_all_others():
    files = [path for package in ("treeproc", "treenet") for path in (REPOSITORY / package).rglob("*.py")]
    begins = [found for path in files for found in re.findall(r'logger\.warning\(\s*f?"([^"]*)', path.read_text())]
    assert len(begins) > 9 and {one for one in begins if not one.startswith("warning: ")} == {"%s"}  # of `warn`


@pytest.mark.parametrize("options", [[], ["--quiet"], ["-v"], ["--verbose"]])
def test_a_user_chooses_the_messages_and_gets_every_result(options, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", *options])
    run_cli(work)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "result\n"
    assert [line for line in lines if "doubt" in line][-1].endswith("warning: a library has a doubt") and ".py" not in err
    if options == ["--quiet"]:
        assert lines == ["warning: doubt", "warning: a library has a doubt"]
    else:
        assert any(line.startswith("bar: 2/2 steps") for line in lines) and any(line.endswith("progress") for line in lines)
        assert bool(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ progress$", lines[0])) == bool(options)


@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_an_error_is_one_line_on_standard_error(options, capsys, monkeypatch):
    def fail(argv):
        build_arg_parser("What it does.", Settings).parse_intermixed_args(argv)
        raise UserError("what and where")

    monkeypatch.setattr("sys.argv", ["x", *options])
    with pytest.raises(SystemExit):
        run_cli(fail)
    assert capsys.readouterr() == ("", "error: what and where\n")


def test_loud_and_quiet_exclude_each_other(capsys):
    with pytest.raises(UserError, match="not allowed with argument"):
        build_arg_parser("What it does.", Settings).parse_intermixed_args(["--quiet", "--verbose"])


def test_all_code_prints_results_alone_and_has_one_way_for_messages():
    for path in [*(REPOSITORY / "treeproc").rglob("*.py"), *(REPOSITORY / "treenet").rglob("*.py")]:
        name = path.relative_to(REPOSITORY).as_posix()
        text = path.read_text(encoding="utf-8")
        if "print(" not in text and "stderr" not in text and "basicConfig" not in text:
            continue
        assert "basicConfig" not in text and "sys.stderr.write" not in text, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                to_errors = any(word.arg == "file" for word in node.keywords)
                assert not to_errors or name in PROMPTS | BESIDE_OUTPUT, f"{name}, line {node.lineno}"
                assert name in PRINT or name.startswith("treenet/cli/"), f"{name}, line {node.lineno}"


def test_settings_of_a_step_are_named_as_its_command_names_them():
    with pytest.raises(UserError, match="^target_parser.tags: of /a/parser.x, target_parser.name; set b_parser.tags$"):  # noqa: SIM117
        with rewording({"parser.": "target_parser."}):
            raise UserError("parser.tags: of /a/parser.x, parser.name; set b_parser.tags")


@pytest.mark.parametrize("name", ["step_\ud800", "test\x1b]0;title\x07", "\x1b[2J", "a\rb"])
def test_what_is_no_text_is_escaped(capsys, name):
    """Names in damaged files may have half of a character, which no stream can write, or a command to the terminal."""
    with messages_shown():
        warn(f"{name} is damaged\nand more")
    assert capsys.readouterr().err == f"{name.encode('unicode_escape').decode()} is damaged\nand more\n"
