"""Treebanks of Universal Dependencies, as they are distributed: a folder of LANGUAGE_NAME-ud-SPLIT.conllu files."""

import re
from pathlib import Path

from treeproc.common.settings import UserError
from treeproc.extras.parser_training.corpus import Files, TreebankConfig

_NAME = re.compile(r"(([a-z]{2,3})_\w+)-ud-(train|dev|test)\.conllu(\.gz|\.bz2|\.xz)?")


def ud_treebanks(folder: Path, language: str) -> dict[str, TreebankConfig]:
    """Return the treebanks of a language in a folder, by name.

    A treebank without a train file learns from dev. If it has only a test file, it learns from four fifths of it; a tenth is
    valid, and a tenth is test. Raises UserError if there is no treebank of the language.
    """
    found: dict[str, dict[str, Path]] = {}
    others: set[str] = set()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := _NAME.fullmatch(path.name):
            others.add(match[2])
            if match[2] == language:
                found.setdefault(match[1], {})[match[3]] = path
    if not found:
        there = f"its languages are {', '.join(sorted(others))}" if others else "it has no file LANGUAGE_NAME-ud-SPLIT.conllu"
        raise UserError(f"treebank: {folder} has no treebank of language {language}; {there}")
    return {name: TreebankConfig(conllu=_files(files)) for name, files in found.items()}


def _files(files: dict[str, Path]) -> Files:
    if len(files) == 1:
        return Files(train=[files["train"]]) if "train" in files else Files(sentences=list(files.values()))
    train = files.get("train") or files["dev"]
    valid = [files["dev"]] if "train" in files and "dev" in files else []
    return Files(train=[train], valid=valid, test=[files["test"]] if "test" in files else [])
