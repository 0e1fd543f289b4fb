"""The Stanza models of a parser: their choice, and their description in fingerprints."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from treeproc.common.errors import require
from treeproc.common.files import check_archive, file_sha256, read_json
from treeproc.common.settings import UserError
from treeproc.parsers.config import CORENLP_LANGUAGES, PARSERS, ParserConfig, ParserName
from treeproc.shards.schema import SCHEMA_VERSION

SHIPPED_MODELS = Path(__file__).parent.parent / "models"

# Names of files in a folder of models, by Stanza's names of the processors.
_FILES = {"tokenize": "tokenizer.pt", "pos": "pos.pt", "constituency": "constituency.pt", "depparse": "depparse.pt"}

# Word vectors of the constituency parser, beside models that are not from Stanza.
VECTORS = "vectors.pt"
SCORES = "scores.json"  # scores and hashes of trained models
WITHOUT_STANZA = (
    "set parser.name=given if your files have trees, or parser.name=words tree.tree_source=balanced for trees without a parser"
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of the models of a Stanza pipeline."""

    origin: Literal["installed", "shipped", "trained"]
    folder: Path
    files: dict[str, Path]

    @property
    def hint(self) -> str:
        """Return the hint for a damaged file."""
        return {
            "installed": "remove it and download Stanza's models again",
            "shipped": "install this project again",
            "trained": "restore it, or remove it and run its tree-attention train-parser command again",
        }[self.origin]

    def read(self) -> dict[str, Path]:
        """Return all files that are read, by name."""
        if self.origin == "installed" or "constituency" not in self.files:
            return self.files
        return {**self.files, "vectors": self.folder / VECTORS}

    def describe(self) -> dict:
        """Return the description of the models in the index and in fingerprints: names and hashes, no paths.

        Raises UserError for a damaged file.
        """
        return {"origin": self.origin, "files": {name: sha256[:16] for name, sha256 in self.check().items()}}

    def check(self) -> dict[str, str]:
        """Return the sha256 of every file that is read. Raises UserError for a file that has changed since it was written."""
        hashes = {}
        for name, path in self.read().items():
            check_archive(path, self.hint)
            hashes[name] = file_sha256(path)
        written = self._written()
        for name, path in self.read().items():
            if hashes[name] != written.get(path.stem, hashes[name]):
                raise UserError(f"{path} is not the model that {path.parent / SCORES} describes; {self.hint}")
        return hashes

    def _written(self) -> dict[str, str]:
        """Return hashes by name of the file, as train_parser.py records them at its end."""
        path = self.folder / SCORES
        if self.origin == "installed" or not path.is_file():
            return {}
        models = read_json(path, self.hint).get("models")
        if not isinstance(models, dict) or not all(isinstance(sha256, str) for sha256 in models.values()):
            raise UserError(f"{path} is damaged: it does not name the models; {self.hint}")
        return models


def find_models(config: ParserConfig) -> ModelFiles:
    """Find the model files: those of `config.models`; else complete installed Stanza models, if wanted; else the shipped ones.

    Raises UserError if the language has neither.
    """
    needed = [*config.processors, *(("lemma",) if config.dependencies else ())]
    if config.models is not None:
        return _trained_models(config.models, config)
    if config.name != "shipped":
        resources = Path(os.environ.get("STANZA_RESOURCES_DIR", Path.home() / "stanza_resources"))
        folder = resources / config.language
        if all(any((folder / name).glob("*.pt")) for name in needed) and (resources / "resources.json").exists():
            # Stanza chooses among them, with word vectors and character models, so all of them count.
            files = {str(path.relative_to(folder)): path for path in sorted(folder.glob("*/*.pt"))}
            return ModelFiles("installed", resources, files)
    folder = SHIPPED_MODELS / config.language
    files = trained_files(folder)
    if missing := set(config.processors) - set(files):
        raise UserError(_choices(config) if config.constituency and missing != {"depparse"} else _choices_of_arcs(config))
    return ModelFiles("shipped", folder, _wanted(files, config))


def trained_files(folder: Path) -> dict[str, Path]:
    """Return the models in a folder of `tree-attention train-parser`, by Stanza's names of the processors."""
    return {name: path for name, file in _FILES.items() if (path := folder / file).is_file()}


def _trained_models(folder: Path, config: ParserConfig) -> ModelFiles:
    files = trained_files(folder)
    missing = [_FILES[name] for name in config.processors if name not in files]
    if config.constituency and not (folder / VECTORS).is_file():
        missing.append(VECTORS)
    if missing:
        hint = "give the folder OUT/models of tree-attention train-parser"
        if {"tokenize", "pos", "depparse"} <= set(files):
            hint = "set parser.dependencies=true parser.constituency=false, which makes trees of its arcs"
        raise UserError(f"parser.models: {folder} has no {', '.join(missing)}; {hint}")
    return ModelFiles("trained", folder, _wanted(files, config))


def _wanted(files: Mapping[str, Path], config: ParserConfig) -> dict[str, Path]:
    return {name: path for name, path in files.items() if name in config.processors}


def _download(language: str) -> str:
    return f"python -c \"import stanza; stanza.download('{language}')\""


def _shipped(kind: str) -> str:
    """Return the languages with a shipped model of a kind."""
    return " ".join(sorted(folder.name for folder in SHIPPED_MODELS.iterdir() if kind in trained_files(folder))) or "none"


def _choices_of_arcs(config: ParserConfig) -> str:
    """Describe the alternatives for a language without a dependency parser, in one line."""
    from stanza.resources.default_packages import default_treebanks

    download = f"install Stanza's own ({_download(config.language)})"
    stanza = download if config.language in default_treebanks else "Stanza publishes none"
    without = ", parser.name=corenlp, or parser.dependencies=false" if config.constituency else ""
    return (
        f"parser.dependencies: no dependency parser for {config.language!r}; shipped languages: {_shipped('depparse')}; choose "
        f"one of these: parser.name=stanza: {stanza}; models that tree-attention train-parser trains on a treebank; "
        f"parser.name=spacy or supar with your own model{without}"
    )


def _choices(config: ParserConfig) -> str:
    """Describe the alternatives for a language without a constituency parser, in one line."""
    from stanza.resources.default_packages import default_constituency, optional_constituency

    language, published = config.language, {*default_constituency, *optional_constituency}
    stanza = f"install Stanza's own ({_download(language)})" if language in published else "Stanza publishes none"
    corenlp = f"parser.name=corenlp has {'one' if language in CORENLP_LANGUAGES else 'none'}"
    return (
        f"parser.language: no constituency parser for {language!r}; shipped languages: {_shipped('constituency')}; {stanza}; "
        f"{corenlp}; choose one of these: parser.dependencies=true parser.constituency=false, for trees of arcs (shipped: "
        f"{_shipped('depparse')}); parser.name=spacy, benepar or supar with your own model; models "
        "that tree-attention train-parser trains on a treebank; parser.name=given with trees in the input, or words with a "
        "control tree"
    )


def describe_parser(config: ParserConfig) -> dict:
    """Describe everything that determines the results of the parser; part of `tree_fingerprint`.

    Raises UserError if the parser cannot run here: no models for the language, or no GPU although the settings need one.
    """
    facts = {name: value for name, value in config.facts().items() if name not in ("endpoint", "models", "package")}
    out = facts | {"schema_version": SCHEMA_VERSION}
    if config.runs_stanza:
        require("stanza", f"parser.name={config.name}", WITHOUT_STANZA)
        config.torch_device()
        models = find_models(config)
        if config.scores and models.origin == "installed":
            raise no_scores(config, models)
        out |= {"library": f"stanza {version('stanza')}", "models": models.describe()}
    elif config.reads_language:
        if config.runs_torch:
            config.torch_device()
        out |= parser_class(config.name).describe(config)
    return out


def no_scores(config: ParserConfig, models: ModelFiles) -> UserError:
    """Return the error of models that give no scores of parses."""
    has_shipped = config.models is None and set(config.processors) <= set(trained_files(SHIPPED_MODELS / config.language))
    do = f"{'set parser.name=shipped, or ' if has_shipped else ''}leave parser.scores out"
    return UserError(f"parser.scores: the models in {models.folder} give no scores of parses; {do}")


def parser_class(name: ParserName) -> Any:
    """Return the class of a parser. Its module is imported now: it may load PyTorch, or packages that may be missing."""
    module, class_name = PARSERS[name]
    return getattr(import_module(module), class_name)


def describe_in_words(parser: dict) -> str:
    """Return one line of a description, for the log."""
    if "models" in parser:
        return f"{parser['library']}, {parser['models']['origin']} models for {parser['language']}"
    return parser.get("library") or parser["name"]
