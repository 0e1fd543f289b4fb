"""Run the blocks of docs/tutorial.md in an empty folder, in their order: `python docs/run_tutorial.py`. `make docs` does.

A block behind `<!-- fails -->` must end with the status 2. Each line of a block of text must be a line that the block of
commands before it prints.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "tutorial.md"
_BLOCK = re.compile(r"^(<!-- fails -->\n)?```(bash|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str  # "bash" or "python"
    code: str
    status: int
    prints: list[str]


def blocks() -> Iterator[Block]:
    """Yield the blocks of the page that run."""
    found = [(bool(fails), language, code) for fails, language, code in _BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    for (fails, language, code), (_, next_language, next_code) in zip(found, [*found[1:], (False, "", "")], strict=True):
        if language != "text":
            yield Block(language, code, 2 if fails else 0, next_code.splitlines() if next_language == "text" else [])


def run_as_user(block: Block, folder: Path) -> tuple[int, str]:
    """Run a block in a process, and show what it prints. Returns the exit status and what it printed."""
    command = ["bash", "-euc", block.code] if block.language == "bash" else ["python", "-c", block.code]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line)
    return process.wait(), "".join(said)


def run(folder: Path, run_block: Callable[[Block, Path], tuple[int, str]], smaller: Callable[[str], str] = str) -> None:
    """Run all blocks. `smaller` changes code and output, for tests.

    Raises AssertionError if a block does not do what the page says.
    """
    for block in blocks():
        block = block._replace(code=smaller(block.code))
        print(f"\n{block.code}" + "-" * 80, flush=True)
        status, said = run_block(block, folder)
        assert status == block.status, f"status {status} of:\n{block.code}\n{said[-3000:]}"
        missing = [line for line in block.prints if smaller(line) not in said.splitlines()]
        assert not missing, f"not printed: {missing}, but:\n{said[-3000:]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        run(Path(made), run_as_user)
