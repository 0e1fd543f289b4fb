"""Change one place of the core, and see whether the quick tests of its room notice: `make mutants` takes ten minutes.

    python benchmarks/mutants.py --seed 1 --count 300 --out mutants.jsonl    # hours; the same command continues
    python benchmarks/mutants.py --table mutants.jsonl                       # outcomes by room, and the survivors

The changes are those of cosmic-ray: operators, comparisons, numbers, conditions, loops, decorators. Messages, annotations and
docstrings stay as they are, and no comparison becomes `is`. Every room gets a share by its code lines. The draw takes a place
first, then one of its changes.

Each change runs in a copy of this checkout, in a process forked from one that has loaded the libraries. A mutant is killed if
a test fails, or if the tests take three times their usual CPU seconds, twice.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lines import code_lines

REPOSITORY = Path(__file__).resolve().parent.parent
# Rooms of the core, and the files of them that are changed.
CORE: dict[str, tuple[str, ...]] = {
    "treeproc/shards": ("treeproc/shards/*.py",),
    "treeproc/trees": ("treeproc/trees/*.py",),
    "treeproc/subwords": ("treeproc/subwords.py",),
    "treenet/paper": ("treenet/paper/*.py",),
    "treenet/structure": ("treenet/structure/*.py",),
    "treenet/data": ("treenet/data/plan.py",),
    "treenet/layers": ("treenet/layers/*.py",),
    "treenet/models": ("treenet/models/encoders/base.py", "treenet/models/encoders/tree.py"),
    "treenet/translation": ("treenet/translation/*.py",),
    "treenet/tasks": ("treenet/tasks/*.py",),
    "treenet/evaluation": ("treenet/evaluation/bootstrap.py", "treenet/evaluation/significance.py"),
    "treenet/training": ("treenet/training/*.py",),
}
_MESSAGES = {"tell", "warn", "print", "phase", "note", "describe"}
_PRELOADED = (
    "hypothesis", "matplotlib.figure", "numpy", "pyarrow", "pytest", "sacrebleu", "sentencepiece", "torch", "torch._dynamo",
)  # fmt: skip
# CPU seconds and bytes that the tests of a mutant may take beside the usual seconds.
_SECONDS, _BYTES = 30, 8 * 2**30


class Mutant(NamedTuple):
    """One change of one place; `occurrence` is that of cosmic-ray's operator in the file."""

    room: str
    path: str
    line: int
    operator: str
    occurrence: int


def files_of(copy: Path, room: str) -> list[Path]:
    """Return the files of a room that are changed."""
    return sorted(path for pattern in CORE[room] for path in copy.glob(pattern) if path.name != "__init__.py")


def tests_of(room: str) -> list[str]:
    """Return the test files of a room, by the page that lists them."""
    page = (REPOSITORY / "docs" / "development.md").read_text()
    [names] = re.findall(rf"^- `{room}`: ([^.]*)\.$", page, re.MULTILINE)
    return [f"tests/test_{name}.py" for name in re.split(r",\s+", names)]


def left_alone(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the spans of annotations, of text, of the arguments of messages and of what is raised."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            nodes.append(node.returns)
        is_text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        is_told = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _MESSAGES
        if is_text or is_told or isinstance(node, ast.Raise):
            nodes.append(node)
    return [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes if node is not None]


def mutants_of(copy: Path, room: str) -> dict[tuple[str, tuple[int, int]], list[Mutant]]:
    """Return the changes of a room by their places."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.operators.provider import _OPERATORS

    found = defaultdict(list)
    for path in files_of(copy, room):
        name, kept = str(path.relative_to(copy)), left_alone(ast.parse(path.read_text()))
        nodes = list(ast_nodes(get_ast_from_path(path)))
        for operator, kind in _OPERATORS.items():
            if operator.startswith("Variable") or re.search(r"_Is(Not)?$", operator):
                continue
            change = kind()
            positions = (position for node in nodes for position in change.mutation_positions(node))
            for occurrence, (start, end) in enumerate(positions):
                if not any(first <= start and end <= last for first, last in kept):
                    found[name, start].append(Mutant(room, name, start[0], operator, occurrence))
    return found


def mutated(copy: Path, mutant: Mutant) -> str | None:
    """Return the text of the changed file; None if it is not Python, or is the same code."""
    from cosmic_ray.ast import get_ast_from_path
    from cosmic_ray.mutating import MutationVisitor
    from cosmic_ray.operators.provider import _OPERATORS

    path = copy / mutant.path
    visitor = MutationVisitor(mutant.occurrence, _OPERATORS[mutant.operator]())
    text = visitor.walk(get_ast_from_path(path)).get_code()
    try:
        return text if ast.dump(ast.parse(text)) != ast.dump(ast.parse(path.read_text())) else None
    except SyntaxError:
        return None


def shares(copy: Path, count: int) -> dict[str, int]:
    """Divide `count` among the rooms by their code lines; the largest remainders get what is left."""
    lines = {room: sum(len(code_lines(path.read_text())) for path in files_of(copy, room)) for room in CORE}
    exact = {room: count * lines[room] / sum(lines.values()) for room in CORE}
    given = {room: int(share) for room, share in exact.items()}
    for room in sorted(CORE, key=lambda room: given[room] - exact[room])[: count - sum(given.values())]:
        given[room] += 1
    return given


def draw(copy: Path, seed: int, count: int) -> list[Mutant]:
    """Draw so many mutants, no two at one place, in an order without rooms."""
    source, drawn = random.Random(seed), list[Mutant]()
    for room, share in shares(copy, count).items():
        places = mutants_of(copy, room)
        chosen = (source.choice(places[place]) for place in source.sample(sorted(places), len(places)))
        good = (mutant for mutant in chosen if mutated(copy, mutant) is not None)
        drawn += [mutant for mutant, _ in zip(good, range(share), strict=False)]
    source.shuffle(drawn)
    return drawn


def run_tests(copy: Path, room: str, limit_s: float | None) -> tuple[str, str, float]:
    """Run the quick tests of a room. Return the outcome, the test that failed, and CPU seconds."""
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryFile(dir=own) as output:
        process = os.fork()
        if not process:
            os.chdir(copy)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            tempfile.tempdir = os.environ["TMPDIR"] = own  # `os._exit` leaves what the tests have there
            sys.path[:0] = [str(copy), str(copy / "tests")]
            sys.dont_write_bytecode = True  # a file that changes twice in a second has the same note in its bytecode
            resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
            if limit_s:
                resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s)))
            import pytest

            options = ["-m", "quick", "-x", "-q", "-p", "no:cacheprovider", f"--rootdir={copy}"]
            os._exit(pytest.main([*options, *tests_of(room)]))
        _, status, used = os.wait4(process, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    seconds = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status):
        return ("time-out" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "killed"), "", seconds
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if os.WEXITSTATUS(status) == 0:
        return "survived", "", seconds
    return "killed", failed[1] if failed else text[-300:], seconds


def run(seed: int, count: int, out: Path, minutes: float) -> None:
    """Draw mutants, run those that `out` does not have yet, and append their outcomes, until `minutes` are over."""
    until, known = time.monotonic() + 60 * minutes, {json.dumps(line["mutant"]) for line in read(out)}
    for name in _PRELOADED:
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "-q", "--shared", str(REPOSITORY), str(copy)], check=True)
        usual: dict[str, float] = {}
        for mutant in draw(copy, seed, count):
            if json.dumps(mutant) in known:
                continue
            if time.monotonic() > until:
                return
            if mutant.room not in usual:
                outcome, test, usual[mutant.room] = run_tests(copy, mutant.room, None)
                if outcome != "survived":
                    sys.exit(f"error: the tests of {mutant.room} fail without a change: {test}")
            path, text = copy / mutant.path, mutated(copy, mutant)
            before = path.read_text()
            path.write_text(text or "")
            for _ in range(2):  # a time-out counts only if it repeats
                outcome, test, seconds = run_tests(copy, mutant.room, 3 * usual[mutant.room] + _SECONDS)
                if outcome != "time-out":
                    break
            path.write_text(before)
            found = {"mutant": mutant, "outcome": outcome, "test": test, "seconds": round(seconds, 1)}
            with out.open("a") as file:
                file.write(json.dumps(found | {"change": difference(before, text or "")}) + "\n")
            print(f"{mutant.path}:{mutant.line} {mutant.operator}: {outcome} {test}", flush=True)


def difference(before: str, after: str) -> list[str]:
    """Return the lines that differ, old and new."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def read(out: Path) -> Iterator[Mapping]:
    if out.exists():
        yield from map(json.loads, out.read_text().splitlines())


def table(lines: Sequence[Mapping]) -> str:
    """Return a Markdown table of outcomes by room, and the changes that no test noticed."""
    counts = Counter((line["mutant"][0], line["outcome"]) for line in lines)
    outcomes, rows = ("killed", "time-out", "survived"), []
    for room in [*(room for room in CORE if any(counts[room, outcome] for outcome in outcomes)), None]:
        found = [sum(n for (of, what), n in counts.items() if what == outcome and room in (of, None)) for outcome in outcomes]
        share = (found[0] + found[1]) / sum(found)
        rows.append(f"| {room or 'all'} | {' | '.join(map(str, found))} | {share:.0%} |")
    survivors = [line for line in lines if line["outcome"] == "survived"]
    shown = ["\n".join([f"{line['mutant'][1]}:{line['mutant'][2]} {line['mutant'][3]}", *line["change"]]) for line in survivors]
    return "\n".join(["| room | killed | time-out | survived | noticed |", "|---|---|---|---|---|", *rows, "", *shown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(list(read(options.table))))
        return
    run(options.seed, options.count, options.out, options.minutes)
    print(table(list(read(options.out))))


if __name__ == "__main__":
    main()
