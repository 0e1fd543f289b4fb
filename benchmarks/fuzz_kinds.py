"""The kinds of cases of the command fuzzer."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz_cases import (
    FuzzCase,
    archives,
    command_line,
    configuration_file,
    data_sets,
    file_names,
    input_files,
    outputs,
    parser_models,
    run_folders,
    settings,
    wrong_folders,
)
from fuzz_foreign import mixed_runs, pairs, tokenizers

KINDS: dict[str, Callable[[Random, FuzzCase, Path], None]] = {
    "settings": settings,
    "command line": command_line,
    "configuration file": configuration_file,
    "input files": input_files,
    "data sets": data_sets,
    "run folders": run_folders,
    "parser models": parser_models,
    "outputs": outputs,
    "archives": archives,
    "file names": file_names,
    "wrong folders": wrong_folders,
    "tokenizers": tokenizers,
    "mixed runs": mixed_runs,
    "pairs": pairs,
}


def make_case(seed: int, kind: str, world: Path, scratch: Path) -> FuzzCase:
    """Return the case of a number. It is always the same."""
    random = Random(f"{seed} {kind}")
    folder = scratch / f"{kind.replace(' ', '-')}-{seed}"
    for name in ("tmp", "home", "cache"):
        (folder / name).mkdir(parents=True)
    case = FuzzCase(kind, "", [], folder, [folder / "out"], "")
    KINDS[kind](random, case, world)
    return case
