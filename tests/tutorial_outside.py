"""Runs the demo and the tutorial with an installed wheel: `python tutorial_outside.py DOCS FOLDER DEMO_CONFIG`.

The Python is that of the environment of the wheel. The `tree-attention` commands run in this process: each would load PyTorch
again. They get few sentences and updates.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.append(sys.argv[1])
import run_tutorial

from treenet.cli.main import main

FEWER = {
    "6000": "400", "5000": "300", "200": "20", "201": "21", "5800": "380", "5801": "381", "max_steps=400": "max_steps=4",
    "vocab_size: 2000": "vocab_size: 400", "vocab_size=2000": "vocab_size=400",
}  # fmt: skip
WORDS = re.compile("|".join(rf"\b{word}\b" for word in FEWER))
COMMAND = re.compile(r"^(tree-attention (?:.*\\\n)*.*)\n", re.MULTILINE)


def run_here(block: run_tutorial.Block, folder: Path) -> tuple[int, str]:
    status, said = 0, io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.chdir(folder):
        if block.language == "python":
            exec(block.code, {"__name__": "__main__"})
            return 0, ""
        for part in filter(str.strip, COMMAND.split(block.code)):
            if part.startswith("tree-attention "):
                sys.argv = shlex.split(part.replace("\\\n", ""), comments=True)
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    try:
                        main()
                    except SystemExit as end:
                        status = end.code or 0
            else:
                done = subprocess.run(["bash", "-euc", part], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                said.write(done.stdout)
                status = done.returncode
            if status:
                break
    said.seek(0)
    return status, said.read()


folder, demo_config = sys.argv[2:]
sys.argv = ["tree-attention", "demo", "--config", demo_config]
main()
run_tutorial.run(Path(folder), run_here, lambda text: WORDS.sub(lambda word: FEWER[word[0]], text))
