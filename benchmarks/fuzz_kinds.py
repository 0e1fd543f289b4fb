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

_MAKERS: tuple[Callable[[Random, FuzzCase, Path], None], ...] = (
    settings, command_line, configuration_file, input_files, data_sets, run_folders, parser_models, outputs, archives, file_names,
    wrong_folders, tokenizers, mixed_runs, pairs,
)  # fmt: skip
KINDS = {make.__name__.replace("_", " "): make for make in _MAKERS}


def make_case(seed: int, kind: str, world: Path, scratch: Path) -> FuzzCase:
    """Return the case of a number. It is always the same."""
    random = Random(f"{seed} {kind}")
    folder = scratch / f"{kind.replace(' ', '-')}-{seed}"
    for name in ("tmp", "home", "cache"):
        (folder / name).mkdir(parents=True)
    case = FuzzCase(kind, "", [], folder, [folder / "out"], "")
    KINDS[kind](random, case, world)
    return case
