"""Count code lines by room, and the lines of the functions that the four main commands enter: `python benchmarks/lines.py`.

    python benchmarks/lines.py                    # lines of each room
    python benchmarks/lines.py --roads            # also runs preprocess, train, evaluate and scaling on ten sentences, traced
    python benchmarks/lines.py --root CHECKOUT    # those of another checkout, with this script

A code line has code: no blank, comment, docstring or import. Lines of templates count, blank ones do not. A function is entered
if any process of the commands enters it, also one of Ray. Lines of functions in it are not counted with it.
"""

import argparse
import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

PACKAGES = ("treenet", "treeproc")
TEMPLATES = ("*.html", "*.j2", "*.jinja")
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Each process writes a line at the first call of each function: a worker of Ray may be killed.
TRACER = """
import os, sys, threading
_packages, _out, _seen = tuple(os.environ["LINES_OF"].split(os.pathsep)), os.environ["LINES_OUT"], set()
def _profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in _seen:
        _seen.add(code)
        if code.co_filename.startswith(_packages):
            with open(os.path.join(_out, str(os.getpid())), "a") as file:
                file.write(f"{code.co_filename}\\t{code.co_firstlineno}\\n")
sys.setprofile(_profile)
threading.setprofile(_profile)
"""
SENTENCES = ("The dog ran home .", "I want to know where Tom lives .", "A cat sleeps .", "She reads a book .", "We eat bread .")
PAIRS = [(f"{one[:-2]} and {other}", f"{other[:-2]} {one}") for one in SENTENCES for other in SENTENCES if one != other]
SMALL = ["data=data", "max_steps=4", "checkpoint_every=2", "validate_every=2", "average_checkpoints=2", "workers=0"]
MODEL = ["d_model=16", "d_ff=32", "num_heads=2", "num_encoder_layers=1", "num_decoder_layers=1"]


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of a module that have code."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node, clean=False) is not None:
            left_out.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - left_out


def count_rooms(root: Path) -> Counter[str]:
    """Count the code lines of each room: a folder of a package."""
    rooms: Counter[str] = Counter()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            inside = path.relative_to(root).parts
            rooms["/".join(inside[:2]) if len(inside) > 2 else package] += len(code_lines(path.read_text(encoding="utf-8")))
        for pattern in TEMPLATES:
            for path in sorted((root / package).rglob(pattern)):
                rooms["templates"] += sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    return rooms


def own_lines(text: str) -> dict[int, int]:
    """Map the first line of each function, a decorator's if it has one, to its number of code lines, without functions in it."""
    code, counts, inner = code_lines(text), {}, {}

    def visit(node: ast.AST, function: int | None) -> None:
        for child in ast.iter_child_nodes(node):
            owner = function
            if isinstance(child, _FUNCTIONS):
                owner = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                for line in range(owner, child.end_lineno + 1):
                    inner[line] = owner  # an inner function is visited later
            visit(child, owner)

    visit(ast.parse(text), None)
    for line, owner in inner.items():
        counts[owner] = counts.get(owner, 0) + (line in code)
    return counts


def entered_lines(root: Path, traces: Path) -> Counter[str]:
    """Count the lines of the functions that the traced processes entered, by room."""
    entered: dict[str, set[int]] = {}
    for trace in traces.iterdir():
        for line in trace.read_text().splitlines():
            name, _, number = line.rpartition("\t")
            entered.setdefault(name, set()).add(int(number))
    rooms: Counter[str] = Counter()
    for name, numbers in entered.items():
        if not Path(name).is_file():
            continue
        inside, counts = Path(name).relative_to(root).parts, own_lines(Path(name).read_text(encoding="utf-8"))
        rooms["/".join(inside[:2]) if len(inside) > 2 else inside[0]] += sum(counts.get(number, 0) for number in numbers)
    return rooms


def run_roads(root: Path, folder: Path) -> Path:
    """Run the four commands on ten pairs in `folder`, traced. Returns the folder of traces."""
    traces, hook = folder / "traces", folder / "hook"
    for made in (traces, hook):
        made.mkdir()
    (hook / "sitecustomize.py").write_text(TRACER)
    for number, side in enumerate(("en", "de")):
        (folder / f"mine.{side}").write_text("".join(f"{pair[number]}\n" for pair in PAIRS))
    model = [f"model.{setting}" for setting in MODEL]
    split = "{source: mine.en, target: mine.de}"
    preprocess = ["preprocess", "--out", "data", f"splits.train={split}", "splits.valid.hold_out=3", f"splits.test={split}"]
    preprocess += ["subwords.vocab_size=320", "filters.drop_overlap=none"]
    grid = ["grid.fractions=[0.5, 1.0]", "grid.seeds=[1, 2]"]
    commands = (
        preprocess,
        ["train", "--config", "sample", "--out", "run", *SMALL, *model],
        ["evaluate", "--out", "run", "split=test"],
        ["scaling", "--config", "scaling_sample", "--out", "study", *SMALL, *model, *grid],
    )
    packages = os.pathsep.join(str(root / package) + os.sep for package in PACKAGES)
    environment = os.environ | {"LINES_OF": packages, "LINES_OUT": str(traces), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(hook), str(root)))}
    for name, *arguments in commands:
        print(f"running {name}", file=sys.stderr)
        script = root / "workflows" / f"{name}.py"
        subprocess.run([sys.executable, script, *arguments], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--roads", action="store_true", help="run the four commands and count the functions that they enter")
    given = parser.parse_args()
    root = given.root.resolve()
    rooms, entered = count_rooms(root), Counter[str]()
    if given.roads:
        with tempfile.TemporaryDirectory() as made:
            entered = entered_lines(root, run_roads(root, Path(made)))
    for room, lines in sorted(rooms.items()):
        print(f"{room:<28}{lines:>7,}" + (f"{entered[room]:>8,}" if given.roads else ""))
    print(f"{'all':<28}{sum(rooms.values()):>7,}" + (f"{sum(entered.values()):>8,}" if given.roads else ""))


if __name__ == "__main__":
    main()
