"""tree-attention translate on a terminal: every line is answered before the next one is typed."""

import io
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import main_of
from search_runs import write_run, write_vocabulary
from toyruns import without_phases

from treeproc.common.settings import UserError

slow = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LINES = ["ba be bi", "", "bo", "da de di do"]
SECONDS = 150  # with much else on the machine


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    data = write_vocabulary(tmp_path_factory.mktemp("data"))
    return write_run(tmp_path_factory.mktemp("runs") / "run", data)


@contextmanager
def terminal(run: Path, *arguments: str):
    """The command with a pseudo terminal as standard input: (process, what types a line)."""
    typed, given = pty.openpty()
    attributes = termios.tcgetattr(given)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(given, termios.TCSANOW, attributes)
    command = [sys.executable, str(ROOT / "workflows" / "translate.py"), "--out", str(run), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = dict(stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    os.close(given)
    try:
        yield process, lambda text: os.write(typed, text)
    finally:
        process.kill()
        process.communicate()
        os.close(typed)


def read_until(stream: io.BufferedReader, end: bytes) -> bytes:
    """The output up to `end`; the process runs until the prompt comes."""
    found, deadline = b"", time.monotonic() + SECONDS
    os.set_blocking(stream.fileno(), False)
    while not found.endswith(end):
        assert time.monotonic() < deadline, found
        found += stream.read(1) or time.sleep(0.002) or b""
    return found


@pytest.fixture
def answer(run, monkeypatch, capfdbinary):
    """Run the command in this process on lines of standard input: (standard output, standard error)."""
    main = main_of("translate.py")

    def call(lines: list[str], *arguments: str, out: Path = run) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{x}\n" for x in lines).encode())))
        capfdbinary.readouterr()
        main(["--out", str(out), *arguments])
        printed = capfdbinary.readouterr()
        return printed.out.decode(), printed.err.decode()

    return call


@pytest.fixture
def in_a_file(answer, tmp_path):
    """The standard output for `LINES` as a file."""
    source = tmp_path / "lines.txt"
    source.write_text("".join(f"{x}\n" for x in LINES))
    return lambda *arguments: answer([], f"input={source}", *arguments)[0]


@slow
def test_a_terminal_is_answered_line_by_line_as_a_file_is(run, in_a_file):
    expected = [line.split("\t") for line in in_a_file("scores=true").splitlines()]
    with terminal(run, "scores=true") as (process, write):
        first = without_phases(read_until(process.stderr, b"> ").decode())  # the models are loaded before anything is asked
        assert first[0].startswith("tree_transformer averaged: beam_size=3") and first[1:] == ["> "]
        for line, (score, text) in zip(LINES, expected, strict=True):
            write(f"{line}\n".encode())
            found, translation = read_until(process.stdout, b"\n").decode().split("\t")
            assert translation == text + "\n"
            # A line alone and a line in a batch are summed in another order, so the last digit may differ.
            assert bool(found) == bool(score) and float(found or 0) == pytest.approx(float(score or 0), abs=1e-5)
            assert read_until(process.stderr, b"> ") == b"> "
        write(b"\xff\n")
        assert read_until(process.stdout, b"\n") == b"\t\n"
        message = read_until(process.stderr, b"> ").decode()
        assert message == "warning: /dev/stdin, line 5: not valid UTF-8 (byte 0xff at column 1); its translation is empty\n> "
        process.send_signal(signal.SIGINT)  # as Ctrl-C does; a process that is killed leaves status -9
        assert process.wait(SECONDS) == 130
        assert process.stderr.read() == b"\n" and not process.stdout.read()


def test_interactive_shows_the_tree_and_the_beam_with_scores(answer, in_a_file):
    found = in_a_file("--nbest", "3", "--scores").splitlines()[:3]
    out, err = answer(LINES[:1], "--interactive")
    drawn, ranked = out.splitlines()[:-3], [line.split("\t") for line in out.splitlines()[-3:]]
    assert [piece.rpartition(" ")[2] for piece in drawn if "▁" in piece] == ["▁ba", "▁be", "▁bi"]
    assert any(line.startswith(("├─ ", "└─ ")) for line in drawn) and "▁" not in drawn[0]
    assert [rank for rank, *_ in ranked] == ["1", "2", "3"]
    assert [text for *_, text in ranked] == [line.split("\t")[2] for line in found]
    assert [float(score) for _, score, _ in ranked] == pytest.approx([float(line.split("\t")[1]) for line in found], abs=1e-4)
    assert err.endswith("> > \n")
    assert answer([""], "--interactive")[0] == ""
    assert answer(LINES[:1], "--interactive", "nbest=1")[0] == out.rpartition("2\t")[0]


def test_a_model_that_reads_no_trees_shows_none(answer, tmp_path):
    plain = write_run(tmp_path / "plain", write_vocabulary(tmp_path / "data"), name="transformer")
    out, _ = answer(LINES[:1], "--interactive", out=plain)
    assert [line[:2] for line in out.splitlines()] == ["1\t", "2\t", "3\t"]


@pytest.mark.parametrize("argument", ["input=FILE", "output=FILE", "workers=2", "trees=FILE", "score=FILE", "--json"])
def test_interactive_is_for_what_is_typed(answer, argument):
    name = {"--json": "json_lines"}.get(argument, argument.partition("=")[0])
    with pytest.raises(UserError, match=f"--interactive reads lines that you type, and shows text; leave out {name}"):
        answer([], "--interactive", argument)
