"""Commands whose standard streams are closed, and what they say while their libraries load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_here, run_installed_here

from treenet.cli import main as cli
from treeproc.common import command_line
from treeproc.common.command_line import run_cli

pytestmark = pytest.mark.slow


def make_inputs(folder: Path) -> list[str]:
    for side in ("en", "de"):
        (folder / side).write_text("".join(f"the dog number {i} sees a cat .\n" for i in range(20)), encoding="utf-8")
    (folder / "c.yaml").write_text(
        f"splits: {{train: {{source: [{folder / 'en'}], target: [{folder / 'de'}]}}}}\n"
        "parser: {name: words}\nsubwords: {vocab_size: 300}\nworkers: 0\n"
    )
    return ["--config", str(folder / "c.yaml")]


def content(data: Path) -> dict[str, bytes]:
    files = (path for path in data.rglob("*") if path.is_file() and path.name not in ("provenance.json", "inputs.json", ".lock"))
    return {str(path.relative_to(data)): path.read_bytes() for path in files}


def test_a_command_without_standard_streams_does_its_work(repository, tmp_path):
    arguments = [*make_inputs(tmp_path), "--out"]
    command = [sys.executable, str(repository / "workflows" / "preprocess.py"), *arguments]
    for closed in ("2>&-", "<&- >&- 2>&-"):
        shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command, str(tmp_path / f"d{closed}")]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    assert run_here("preprocess.py", *arguments, tmp_path / "d").returncode == 0
    assert content(tmp_path / "d2>&-") == content(tmp_path / "d<&- >&- 2>&-") == content(tmp_path / "d") != {}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("place", ["/dev/full", "cut"])
def test_an_output_that_is_not_complete_is_an_error(tmp_path, place, unbuffered):
    program = """import sys
from treeproc.common.command_line import run_cli
sys.argv = ["tree-attention", "translate"]
run_cli(lambda arguments: sys.stdout.buffer.write(3000 * b"x"))
"""
    limited = f'ulimit -f 1; exec {sys.executable} -c "$0" > {place}'  # of 1,024 bytes, or 512: a part of the text is written
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", limited, program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    why = "No space left on device" if place == "/dev/full" else "File too large"
    assert (done.returncode, done.stderr) == (
        2,
        f"error: cannot write standard output: {why}; free space, or write to another place\n",
    )


@pytest.fixture
def no_output(monkeypatch):
    """For tests that close sys.stdout."""
    monkeypatch.setattr(command_line, "_output_is_lost", False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)


def run_without_output(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(argv))
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"\\xb1 \\u2013 r\\udcff"), ("utf-8", b"\xc2\xb1 \xe2\x80\x93 r\\udcff")]
)
def test_a_character_that_a_terminal_lacks_ends_no_command(encoding, shown):
    program = """from treeproc.common.command_line import run_cli
run_cli(lambda arguments: print("\\xb1 \\u2013 r\\udcff"))
"""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown + b"\n", b"")


def test_a_command_that_only_prints_refuses_a_closed_output(no_output, capsys):
    for argv in (["inspect", "DATA"], ["configs"], ["train", "--sample", "--out", "x", "data=DATA", "--dry-run"]):
        sys.stdout = None
        assert run_without_output("tree-attention", *argv) == 2
        assert capsys.readouterr().err == "error: standard output is closed, but the result goes there; open it\n"
    sys.stdout = None
    assert run_without_output("tree-attention", "verify") == 2
    note, error = capsys.readouterr().err.splitlines()
    assert note == "note: standard output is closed, so the command does not show what it prints there"
    assert error.startswith("error: the following arguments are required: DATA")


def test_a_result_without_a_place_is_an_error(no_output, capsys):
    def translate(arguments):
        command_line.check_output("give output=FILE")

    sys.stdout = None
    with pytest.raises(SystemExit):
        run_cli(translate)
    assert capsys.readouterr().err.endswith("but the result goes there; open it, or give output=FILE\n")


def test_slow_imports_are_told_but_not_for_help(monkeypatch, tmp_path):
    monkeypatch.setattr(command_line, "LOADING_S", 0)
    started = run_installed_here("train", "--out", tmp_path / "run", f"data={tmp_path / 'none'}", "workers=0")
    assert started.stderr.startswith("loading the libraries of train ...\n")
    assert run_installed_here("train", "--help").stderr == ""
    assert "loading" not in run_installed_here("train", "--out", tmp_path / "run", "no_setting=1").stderr
