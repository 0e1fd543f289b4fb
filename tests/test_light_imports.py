"""Imports before there is work: no PyTorch for `--help`, and no compiler for the first names of the library."""

import json
import subprocess
import sys

import pytest
from search_runs import write_vocabulary

from treenet.cli.main import COMMANDS

pytestmark = pytest.mark.slow

HEAVY = ["torch", "ray", "pandas", "matplotlib", "scipy", "stanza", "transformers", "sacrebleu"]
# Of every command: exit status, the begin of its help, and the heavy libraries that are loaded by then.
HELP_OF_ALL = """
import contextlib, io, json, sys
from treenet.cli.main import COMMANDS, run_command
found = {{}}
for command in COMMANDS:
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            run_command(command, ["--help"])
        except SystemExit as end:
            status = end.code or 0
    found[command] = [status, out.getvalue()[:6], [name for name in {heavy} if name in sys.modules]]
print(json.dumps(found))
"""
ONE = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in {heavy} if name in sys.modules]), file=sys.stderr))
from treenet.cli.main import run_command
run_command({command!r}, {arguments!r})
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_help_loads_no_heavy_library():
    """All in one process. A library stays loaded, so the first command of those that have it loads it."""
    found = run_python(HELP_OF_ALL.format(heavy=HEAVY))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {command: [0, "usage:", []] for command in COMMANDS}


@pytest.mark.parametrize("command", ["train", "translate", "report", "scaling", "preprocess", "train-parser"])
def test_a_wrong_setting_is_refused_before_heavy_libraries_are_loaded(command, tmp_path):
    found = run_python(ONE.format(heavy=HEAVY, command=command, arguments=["--out", str(tmp_path / "out"), "no_setting=1"]))
    assert found.returncode == 2
    *refusal, loaded = found.stderr.splitlines()
    assert "no_setting" in "\n".join(refusal)
    assert json.loads(loaded) == []


ONE_LINE = """
import sys
from pathlib import Path
from treenet.config import ModelConfig
from treenet.models import VocabSizes, build_model
from treenet.models.registry import only_shapes
from treeproc.online.raw_lines import RawLine, RawLineEncoder
from treeproc.parsers import ParserConfig, build_parser
line = "The old man saw a dog in the U.S. today."
parser = build_parser(ParserConfig(name="shipped", device="cpu", dependencies=True))
encoder = RawLineEncoder(Path({data!r}), given_trees=False, max_pieces=500)
encoded = encoder.encode([RawLine(line.encode())])
with only_shapes():
    model = build_model(ModelConfig(name="tree_transformer"), VocabSizes(pieces=100, labels=9))
print(parser.parse([line])[0].trees[0][:8], len(encoded[0].row["nodes"]["label"]) > 5, encoder.notices(encoded))
print(next(model.parameters()).is_meta, [name for name in {heavy} if name in sys.modules])
"""


def test_one_line_loads_no_library_that_it_does_not_need(tmp_path):
    data = write_vocabulary(tmp_path / "data", parser="shipped")
    found = run_python(ONE_LINE.format(data=str(data), heavy=[*HEAVY[1:], "torch._dynamo", "py3langid", "sympy"]))
    assert found.stdout == "(ROOT (S True {}\nTrue []\n", found.stderr


def test_the_first_names_of_the_library_load_no_compiler():
    names = "treenet.load_run, treenet.TreeAttention, treenet.TreeEncoder, treenet.collate"
    found = run_python(f"import sys, treenet; {names}; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)")
    assert found.stdout == "True False\n", found.stderr
