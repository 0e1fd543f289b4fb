"""Parsers of optional packages: checks that they are installed, and the files that they read."""

import re
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

from treeproc.common.files import file_sha256
from treeproc.common.settings import UserError
from treeproc.parsers.config import ParserConfig
from treeproc.trees.spans import SpanTree

_NEEDED = {"spacy": ("spacy",), "benepar": ("spacy", "benepar"), "supar": ("spacy", "supar")}


def describe_package(config: ParserConfig) -> dict:
    """Return the description of these parsers in fingerprints: versions of the packages and hashes of the files, no paths.

    Raises UserError if a package or a file is missing.
    """
    needed = _NEEDED[config.name]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UserError(
            f"parser.name: is {config.name}, but {' and '.join(missing)} is not installed; run "
            f"pip install --constraint constraints.txt '.[{config.name}]'"
        )
    folders = {"package": pipeline_folder(config), "models": config.models}
    files = {f"{kind}/{name}": sha256 for kind, path in folders.items() if path for name, sha256 in _hashes(path).items()}
    library = ", ".join(f"{name} {version(name)}" for name in needed)
    return {"library": library, "models": {"origin": "installed", "files": files}}


def pipeline_folder(config: ParserConfig) -> Path | None:
    """Return the folder of `config.package`; None if only spaCy's rules are used. It runs no code of the package.

    Raises UserError for a folder that is not a spaCy pipeline.
    """
    if config.package is None:
        return None
    if "/" in config.package:
        folder = Path(config.package)
        if not (folder / "config.cfg").is_file():
            raise UserError(f"parser.package: {folder} holds no config.cfg; give the folder of a spaCy pipeline")
        if re.search(r"^\s*source\s*=", (folder / "config.cfg").read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            raise UserError(
                f"parser.package: {folder}/config.cfg takes components from other packages (source); save the complete pipeline"
            )
        return folder
    # Packages made by `spacy package` carry this mark. So a setting cannot import any other module.
    found = list(entry_points(group="spacy_models", name=config.package))
    spec = find_spec(found[0].module) if found else None
    if spec is None or spec.origin is None:
        raise UserError(
            f"parser.package: no spaCy pipeline {config.package!r} is installed; run python -m spacy download {config.package}, "
            "or give the folder of a pipeline"
        )
    return Path(spec.origin).parent


def _hashes(path: Path) -> dict[str, str]:
    if path.is_file():
        return {path.name: file_sha256(path)[:16]}
    files = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    if not files:
        raise UserError(f"parser.models: there are no files in {path}; give the folder of the models")
    return {file.relative_to(path).as_posix(): file_sha256(file)[:16] for file in files}


def span_tree(root) -> tuple[SpanTree, list[str]]:
    """Convert a tree of NLTK to spans, and the tags of its leaves, without recursion."""
    tree, tags = SpanTree([], [], []), []
    stack: list = [(root, -1)]
    while stack:
        node, opened = stack.pop()
        if opened >= 0:
            tree.ends[opened] = len(tags)
        elif isinstance(node[0], str):
            tags.append(node.label())
        else:
            stack.append((node, len(tree)))
            tree.labels.append(node.label() or "ROOT")
            tree.starts.append(len(tags))
            tree.ends.append(-1)
            stack.extend((child, -1) for child in reversed(node))
    return (tree if len(tree) else SpanTree(["ROOT"], [0], [1])), tags
