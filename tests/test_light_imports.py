"""Imports before there is work: no PyTorch for `--help`, and no compiler for the first names of the library."""

import json
import subprocess
import sys

import pytest
from search_runs import write_vocabulary
from test_carried_study import WITHOUT, check_two_cells, two_cells

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
# Of some commands, in the same way: exit status, what it says of a wrong setting, and the heavy libraries.
REFUSALS = """
import contextlib, io, json, sys
from treenet.cli.main import run_command
found = {{}}
for command in {commands}:
    said, status = io.StringIO(), 0
    with contextlib.redirect_stderr(said):
        try:
            run_command(command, {arguments!r})
        except SystemExit as end:
            status = end.code or 0
    found[command] = [status, "no_setting" in said.getvalue(), [name for name in {heavy} if name in sys.modules]]
print(json.dumps(found))
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)


def test_help_loads_no_heavy_library():
    """All in one process. A library stays loaded, so the first command of those that have it loads it."""
    found = run_python(HELP_OF_ALL.format(heavy=HEAVY))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {command: [0, "usage:", []] for command in COMMANDS}


def test_a_wrong_setting_is_refused_before_heavy_libraries_are_loaded(tmp_path):
    commands = ["train", "translate", "report", "scaling", "preprocess", "train-parser"]
    arguments = ["--out", str(tmp_path / "out"), "no_setting=1"]
    found = run_python(REFUSALS.format(heavy=HEAVY, commands=commands, arguments=arguments))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {command: [2, True, []] for command in commands}


# What is loaded after each step of one process. A library stays loaded, so no step hides what one before it has loaded.
STEPS = """
import json, sys
from pathlib import Path
found = {{}}
def note(step):
    found[step] = [name for name in {heavy} if name in sys.modules]
import treenet.data.examples
note("processes that make batches")
import treenet
treenet.load_run, treenet.TreeAttention, treenet.TreeEncoder, treenet.collate
note("the first names of the library")
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
assert parser.parse([line])[0].trees[0].startswith("(ROOT (S") and len(encoded[0].row["nodes"]["label"]) > 5
assert encoder.notices(encoded) == {{}} and next(model.parameters()).is_meta
note("one line")
import treenet.jobs.train_run
note("training without Ray")
{without}
import contextlib, importlib
for name in ("ray", "stanza"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name + " is still there")
from treenet.cli.main import run_command
with contextlib.redirect_stdout(sys.stderr):
    run_command("scaling", {study!r})
print(json.dumps(found))
"""


def test_the_library_loads_nothing_that_it_does_not_need_and_a_study_needs_neither_ray_nor_stanza(tmp_path):
    data = write_vocabulary(tmp_path / "data", parser="shipped")
    heavy = [*HEAVY[1:], "torch._dynamo", "py3langid", "sympy"]
    done = run_python(STEPS.format(data=str(data), heavy=heavy, without=WITHOUT, study=two_cells(tmp_path, parallel=1)))
    assert done.returncode == 0, done.stderr
    check_two_cells(tmp_path)
    found = json.loads(done.stdout)
    assert "ray" not in found.pop("training without Ray")
    assert found == {step: [] for step in ("processes that make batches", "the first names of the library", "one line")}


# What is on the screen when a command begins to load a heavy library, which then ends it. `{heavy}` are none of it.
SCREENS = """
import importlib.machinery, io, json, sys
class Screen(io.TextIOBase):
    def __init__(self):
        self.lines, self.first = [""], None
    def isatty(self):
        return True
    def write(self, text):
        if self.first is None:
            self.first = [text, [name for name in ("numpy", "pyarrow", "pydantic", *{heavy}) if name in sys.modules]]
        for part in text.replace("\\x1b[K", "").splitlines(keepends=True):
            *_, self.lines[-1] = (self.lines[-1] + part).rstrip("\\n").split("\\r")
            self.lines += [""] * part.endswith("\\n")
        return len(text)
class Heavy:
    def find_spec(self, name, *_):
        return importlib.machinery.ModuleSpec(name, self) if name in {heavy} else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        found[command] = [line for line in sys.stderr.lines if line.strip()]
        raise SystemExit(0)
sys.meta_path.insert(0, Heavy())
found, firsts, out = {{}}, [], sys.stdout
from treenet.cli.main import run_command
for command, arguments in {commands!r}.items():
    sys.stdout, sys.stderr = io.StringIO(), Screen()
    try:
        run_command(command, arguments)
    except SystemExit:
        pass
    firsts.append(sys.stderr.first)
out.write(json.dumps([firsts[0], found]))
"""


def test_every_command_has_a_word_on_the_screen_before_it_loads_a_heavy_library(tmp_path):
    (tmp_path / "text").write_text("A dog runs .\n")
    out, data, text = f"--out={tmp_path / 'out'}", f"data={tmp_path / 'none'}", f"input={tmp_path / 'text'}"
    run = f"--out={tmp_path / 'none'}"
    commands = {
        "preprocess": ["--sample", out, "workers=0"],
        "demo": [out],
        "frozen-states": [out, data, f"encoder={tmp_path / 'none'}", "workers=0"],
        **{name: [out, data] for name in ("train", "train-classifier", "train-lm")},
        "train-parser": [out, "--config=parser_en"],
        **{name: [run] for name in ("average-checkpoints", "evaluate", "serve", "score-lm", "unsupervised-parse", "probe")},
        **{name: [run, text] for name in ("translate", "classify")},
        "align": [run, text, f"target={tmp_path / 'text'}"],
        "scaling": ["--sample", out, data],
        "compare-seeds": ["--config=seeds_sst5", out, data],
        "control": [out],
        "tune": ["--config=tune_sample", out, data],
        "report": [out, str(tmp_path / "none")],
    }
    done = run_python(SCREENS.format(heavy=HEAVY, commands=commands))
    first, found = json.loads(done.stdout)
    assert first == ["\rpreprocess: loading ...\x1b[K", []]
    assert found.keys() == commands.keys(), "a command ended before it loaded a heavy library"
    assert all(found.values()), f"an empty screen: {[name for name, lines in found.items() if not lines]}"
