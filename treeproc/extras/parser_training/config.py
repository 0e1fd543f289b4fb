"""The settings of `train-parser`: of treebanks, and of each parser with its constants, without code that trains."""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from treeproc.common.settings import Settings, UserError
from treeproc.extras.parser_training.corpus import Files, TreebankConfig

# AdamW's decay of the average of squared gradients. Gradients with a larger norm are scaled down to this norm.
FIT_CONSTANTS = {"beta2": 0.98, "grad_norm": 1.0}


class FitSettings(Settings):
    """Settings of a training loop: epochs, learning rate, regularisation and averaging."""

    epochs: int = Field(10, ge=1, description="passes over the training data")
    learning_rate: float = Field(2e-3, gt=0, description="highest learning rate of AdamW; it falls linearly to 0")
    weight_decay: float = Field(1e-2, ge=0, description="decoupled weight decay of matrices and embeddings")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the training in which the learning rate rises")
    average: float = Field(0.999, ge=0, lt=1, description="decay of the running average of the weights; 0 takes the last weights")
    evaluations: int = Field(
        10, ge=1, description="number of evaluations on dev, evenly over the training; the best weights are kept"
    )


CONSTITUENCY_CONSTANTS: dict[str, Any] = {
    "transition_hidden_size": 20,  # states of the transitions so far
    "transition_embedding_dim": 20,
    "word_embedding_dim": 100,
    "vector_dim": 64,  # of the fixed word vectors; words outside the trees can have one too
    "min_vector_count": 3,  # a word that is rarer in trees and text has no vector
    "tag_embedding_dim": 32,
    "word_dropout": 0.35,  # of the embeddings of words and tags
    "stack_dropout": 0.3,  # of the inputs of the stacks and of nodes
    "output_dropout": 0.35,  # before each output layer
    "layer_dropout": 0.0,  # between the layers of an LSTM
    "rare_words": 0.8,  # share of the words, the rarest, that become unknown at random
    "rare_word_dropout": 0.3,  # probability with which a rare word is unknown in training
    "tag_dropout": 0.001,  # probability with which a tag is unknown in training
}


class ConstituencySettings(Settings):
    """Sizes of the constituency parser, and its training."""

    hidden_size: int = Field(128, ge=1, description="states of words, nodes and the stack")
    min_word_count: int = Field(2, ge=1, description="a word that is rarer in the training trees becomes the unknown word")
    batch_words: int = Field(1000, ge=1, description="words of a batch")
    fit: FitSettings = FitSettings(epochs=12, learning_rate=2e-3, weight_decay=0.05, warmup=0.03, evaluations=12, average=0.999)


DEPENDENCY_CONSTANTS: dict[str, Any] = {
    "char_dim": 50,  # size of a character's embedding
    "char_hidden_dim": 100,  # size of the states of the character LSTM, and of its output for a word
    "tag_dim": 50,  # size of a tag's embedding
    "num_layers": 2,  # of the word LSTM
    "word_dropout": 0.15,  # share of words that are hidden completely
}


class DependencySettings(Settings):
    """Size and regularisation of the dependency parser, and its training."""

    word_dim: int = Field(75, ge=1, description="size of a word's embedding")
    word_cutoff: int = Field(3, ge=1, description="rarer words have only their characters and tags")
    hidden_dim: int = Field(200, ge=1, description="states of the word LSTM, in each direction")
    scorer_dim: int = Field(100, ge=1, description="hidden states of the scorers of arcs and relations")
    dropout: float = Field(0.33, ge=0, lt=1, description="dropout between all layers")
    tag_noise: float = Field(0.2, ge=0, le=1, description="share of words that get the tags of another word with the same ending")
    batch_words: int = Field(1200, ge=1, description="words of a batch")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 takes half the time on CPUs with AMX")
    fit: FitSettings = FitSettings(epochs=12, evaluations=4)

    def stanza_args(self) -> dict:
        """Return the arguments of Stanza's own trainer that make this model."""
        from stanza.models.parser import build_argparse  # here, because Stanza loads PyTorch

        return vars(build_argparse().parse_args([])) | {
            "lang": "",
            "shorthand": "",
            "word_emb_dim": self.word_dim,
            "word_cutoff": self.word_cutoff,
            "char_emb_dim": DEPENDENCY_CONSTANTS["char_dim"],
            "char_hidden_dim": DEPENDENCY_CONSTANTS["char_hidden_dim"],
            "transformed_dim": DEPENDENCY_CONSTANTS["char_hidden_dim"],
            "tag_emb_dim": DEPENDENCY_CONSTANTS["tag_dim"],
            "hidden_dim": self.hidden_dim,
            "num_layers": DEPENDENCY_CONSTANTS["num_layers"],
            "deep_biaff_hidden_dim": self.scorer_dim,
            "dropout": self.dropout,
            "word_dropout": DEPENDENCY_CONSTANTS["word_dropout"],
            "use_ufeats": False,
            "pretrain": False,
            "linearization": False,
            "distance": False,
        }


TAGGER_CONSTANTS: dict[str, Any] = {
    "char_hidden_dim": 100,  # states of the character LSTM
    "word_emb_dim": 100,  # dimensions of the embedding of frequent words
    "word_dropout": 0.2,  # share of the words whose complete input is replaced
    "unknown_word": 0.25,  # a word of count c loses its embedding with probability x / (x + c)
    "drop_final_punct": 0.1,  # share of the sentences read without their final punctuation
}


class TaggerSettings(Settings):
    """Sizes and noise of the tagger, and its training."""

    hidden_dim: int = Field(128, ge=1, description="states of the word LSTM, each direction")
    word_cutoff: int = Field(3, ge=1, description="rarer words have no separate embedding")
    dropout: float = Field(0.33, ge=0, lt=1, description="dropout of inputs and states")
    batch_words: int = Field(800, ge=1, description="words of a batch, with padding")
    fit: FitSettings = FitSettings(epochs=12, learning_rate=3e-3, evaluations=12, average=0.998)


TOKENIZER_CONSTANTS: dict[str, Any] = {
    "emb_dim": 32,  # dimensions of a character
    "unit_dropout": 0.2,  # share of the characters that become unknown
    "drop_final_punct": 0.15,  # share of the sentences that lose their final mark
    "spaced": 0.05,  # share of the lines that get a blank between all words
    "dashes": 0.04,  # share of the lines whose commas become dashes
}


class TokenizerSettings(Settings):
    """Sizes and noise of the tokeniser, and its training."""

    hidden_dim: int = Field(64, ge=1, description="states of the LSTM, each direction")
    dropout: float = Field(0.33, ge=0, lt=1, description="dropout of inputs and states")
    sentences: list[PositiveInt] = Field(
        [1, 1, 1, 2, 3], min_length=1, description="number of neighbouring sentences in a line, drawn from these values"
    )
    max_chars: int = Field(300, ge=1, description="longer lines are cut")
    batch_chars: int = Field(4000, ge=1, description="characters of a batch, with padding")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 takes four fifths of the time on CPUs with AMX")
    fit: FitSettings = FitSettings(epochs=6, learning_rate=4e-3, evaluations=6, average=0.995)


_NAME = re.compile(r"(([a-z]{2,3})_\w+)-ud-(train|dev|test)\.conllu(\.gz|\.bz2|\.xz)?")
ModelName = Literal["tokenizer", "pos", "constituency", "depparse"]
MODELS: tuple[ModelName, ...] = ("tokenizer", "pos", "constituency", "depparse")


def ud_treebanks(folder: Path, language: str) -> dict[str, TreebankConfig]:
    """Return the treebanks of a language in a folder, by name.

    A treebank without a train file learns from dev. If dev or test is its only file, it learns from four fifths of it; a tenth
    is valid, and a tenth is test. Raises UserError if there is no treebank of the language.
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
        description="more text, a sentence a line, plain or compressed; the word vectors of the tagger and of both parsers come "
        "from its statistics",
    )
    taggings: int = Field(
        4,
        ge=1,
        description="automatic taggings of each training tree, beside the treebank's tags, with as many errors as the tagger "
        "makes",
    )
    tokenizer: TokenizerSettings = TokenizerSettings()
    pos: TaggerSettings = TaggerSettings()
    constituency: ConstituencySettings = ConstituencySettings()
    depparse: DependencySettings = DependencySettings()
    seed: int = Field(1, ge=0, lt=2**43, description="seed of initial weights, order and dropout")
    title: str = Field("", description="first line of the model card; default: made from the language")
    licence: str = Field("", description="licence of the models and its reason, for the model card")

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if bool(self.treebanks) == bool(self.treebank):
            raise ValueError("must have either treebanks, with at least one, or treebank, a folder")
        if not self.models:
            raise ValueError("models: must name at least one model")
        if "pos" not in self.models and {"constituency", "depparse"} & set(self.models):
            raise ValueError("models: constituency and depparse read the tagger's tags; add pos")
        of_brackets, of_conllu = (
            [name for name, one in self.treebanks.items() if getattr(one, form).are_learnt] for form in ("brackets", "conllu")
        )
        if self.tags == "upos" and "pos" in self.models and of_brackets and of_conllu:
            raise ValueError(
                f"tags: upos leaves out language-specific tags of CoNLL-U, but {of_brackets[0]} has those of brackets, and the "
                "tagger would learn these alone; set tags=both"
            )
        return self

    def all_treebanks(self) -> dict[str, TreebankConfig]:
        """Return the treebanks by name. Raises UserError if the folder `treebank` has none of the language."""
        return ud_treebanks(self.treebank, self.language) if self.treebank else self.treebanks
