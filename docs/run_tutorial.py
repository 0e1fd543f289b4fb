"""Run the blocks of docs/tutorial.md in an empty folder, in their order: `python docs/run_tutorial.py`. `make docs` does.

A block behind `<!-- fails -->` must end with the status 2. Each line of a block of text must be a line that the block of
commands before it prints.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
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


def run(folder: Path, environment: Mapping[str, str] | None = None, smaller: Callable[[str], str] = str) -> None:
    """Run all blocks as a user does, and show what they print. `smaller` changes code and output, for tests.

    Raises AssertionError if a block does not do what the page says.
    """
    for block in blocks():
        code = smaller(block.code)
        print(f"\n{code}" + "-" * 80, flush=True)
        command = ["bash", "-euc", code] if block.language == "bash" else ["python", "-c", code]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        said = []
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line.rstrip("\n"))
        status = process.wait()
        assert status == block.status, f"status {status} of:\n{code}"
        missing = [line for line in block.prints if smaller(line) not in said]
        assert not missing, f"not printed: {missing} by:\n{code}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        run(Path(made))
