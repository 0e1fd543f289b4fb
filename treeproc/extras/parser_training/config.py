"""The settings of `workflows/train_parser.py`, and the treebanks in a folder of Universal Dependencies, as it is distributed."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from treeproc.common.settings import Settings, UserError
from treeproc.extras.parser_training.corpus import Files, TreebankConfig
from treeproc.extras.parser_training.settings import (
    ConstituencySettings,
    DependencySettings,
    FitSettings,
    TaggerSettings,
    TokenizerSettings,
)

_NAME = re.compile(r"(([a-z]{2,3})_\w+)-ud-(train|dev|test)\.conllu(\.gz|\.bz2|\.xz)?")
ModelName = Literal["tokenizer", "pos", "constituency", "depparse"]
MODELS: tuple[ModelName, ...] = ("tokenizer", "pos", "constituency", "depparse")


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


class TokenizerTraining(TokenizerSettings):
    """The tokeniser and its training."""

    fit: FitSettings = FitSettings(epochs=6, learning_rate=4e-3, evaluations=6, average=0.995)


class TaggerTraining(TaggerSettings):
    """The tagger and its training."""

    fit: FitSettings = FitSettings(epochs=12, learning_rate=3e-3, evaluations=12, average=0.998)


class ConstituencyTraining(ConstituencySettings):
    """The constituency parser and its training."""

    fit: FitSettings = FitSettings(epochs=12, learning_rate=2e-3, weight_decay=0.05, warmup=0.03, evaluations=12, average=0.999)


class DependencyTraining(DependencySettings):
    """The dependency parser and its training."""

    fit: FitSettings = FitSettings(epochs=12, evaluations=4)


class TrainParserConfig(Settings):
    """A training of parser models, as written to OUT/config.yaml."""

    treebanks: dict[str, TreebankConfig] = Field(
        {}, description="treebanks by name; the models learn from all of them together, and get scores on each"
    )
    treebank: Path | None = Field(
        None,
        description="instead of treebanks: a folder of Universal Dependencies. Files have names such as de_gsd-ud-train.conllu; "
        "the command leaves out files of other languages",
    )
    tags: Literal["both", "upos"] = Field(
        "both", description="'upos': leave out language-specific tags, which may differ between the treebanks of a language"
    )
    lower_case: float = Field(
        0,
        ge=0,
        le=1,
        description="share of the sentences of train that are learnt in lower case too, so that the models read "
        "both; scored as NAME_lower",
    )
    language: str = Field("en", description="language code of the models; it may be a code that Stanza does not know")
    models: list[ModelName] = Field(
        list(MODELS), description="models to train; a model is left out if no treebank has data for it"
    )
    hold_out: int = Field(
        20, ge=2, description="without valid files, about every n-th sentence of train is held out for validation, by a hash"
    )
    unlabelled: list[Path] = Field(
        [],
        description="more text, a sentence a line, plain or compressed; the initial word embedding of the tagger comes from its "
        "statistics",
    )
    taggings: int = Field(
        4,
        ge=1,
        description="automatic taggings of each training tree, beside the treebank's tags, with as many errors as the tagger "
        "makes",
    )
    tokenizer: TokenizerTraining = TokenizerTraining()
    pos: TaggerTraining = TaggerTraining()
    constituency: ConstituencyTraining = ConstituencyTraining()
    depparse: DependencyTraining = DependencyTraining()
    seed: int = Field(1, ge=0, description="seed of initial weights, order and dropout")
    title: str = Field("", description="first line of the model card; default: made from the language")
    licence: str = Field("", description="licence of the models and its reason, for the model card")

    @model_validator(mode="after")
    def _something_to_do(self):
        if bool(self.treebanks) == bool(self.treebank):
            raise ValueError("must have either treebanks, with at least one, or treebank, a folder")
        if not self.models:
            raise ValueError("models: must name at least one model")
        if "pos" not in self.models and {"constituency", "depparse"} & set(self.models):
            raise ValueError("models: constituency and depparse read the tagger's tags; add pos")
        return self

    def all_treebanks(self) -> dict[str, TreebankConfig]:
        """Return the treebanks by name. Raises UserError if the folder `treebank` has none of the language."""
        return ud_treebanks(self.treebank, self.language) if self.treebank else self.treebanks
