"""The treebanks of one training: reading, checks and splits, and the training data of each model."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import Field, PositiveFloat, model_validator

from treeproc.common.errors import quoted
from treeproc.common.settings import Settings, UserError
from treeproc.extras.parser_training.treebank import (
    Notation,
    Sentence,
    Tagged,
    Texts,
    Tree,
    conllu_of,
    lowered,
    sentences_in,
    trees_in,
    trees_of,
)
from treeproc.readers.numbered_lines import read_texts
from treeproc.shards.schema import UNANALYSED
from treeproc.stages.keys import normalised

SPLITS = ("train", "valid", "test")
LEARNT_SPLITS = ("train", "valid")  # models learn from the first; the second chooses the best weights
# A treebank without splits is split by files (sorted by name) or by runs of its sentences. Every tenth is test, and every
# tenth from the sixth on is valid.
_EVERY, _TEST, _VALID = 10, 0, 5
_LONGEST_RUN, _LEAST_RUNS = 100, 2 * _EVERY


class Files(Settings):
    """The files of a treebank in one format, plain or compressed, also in folders and archives."""

    train: list[Path] = Field(
        default=[], description="files to learn from; a treebank with only test files serves only for scores"
    )
    valid: list[Path] = Field(default=[], description="files to choose the best weights; default: a part of train, see hold_out")
    test: list[Path] = Field(default=[], description="files to score at the end")
    documents: list[Path] = Field(
        default=[],
        description="instead of the three: a folder or archive with a file per document; by name, every tenth is test, every "
        "tenth from the sixth on is valid",
    )
    sentences: list[Path] = Field(
        default=[],
        description="instead of the three: files without splits. Runs of up to 100 sentences stay together, so that few "
        "documents are cut. Every tenth run is test; every tenth from the sixth on is valid",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        origins = [name for name in ("train", "documents", "sentences") if getattr(self, name)]
        if len(origins) > 1 or (not origins and self.valid):
            raise ValueError("must have either train files, or documents, or sentences")
        if origins and origins != ["train"] and (self.valid or self.test):
            raise ValueError(f"{origins[0]} make valid and test themselves; give train instead, or leave valid and test out")
        return self

    @property
    def are_learnt(self) -> bool:
        """Return whether a model learns from these files; false if they serve only for scores."""
        return bool(self.train or self.documents or self.sentences)

    def paths(self) -> list[Path]:
        """Return all files."""
        return [*self.train, *self.documents, *self.sentences, *self.valid, *self.test]


class TreebankConfig(Settings):
    """One treebank."""

    brackets: Files = Field(default=Files(), description="Penn Treebank trees")
    conllu: Files = Field(default=Files(), description="CoNLL-U: text, tags, arcs")
    notation: Notation = Field(default=Notation(), description="differences between its notation and that of the other treebanks")
    weights: dict[Literal["pos", "constituency"], PositiveFloat] = Field(
        default={}, description="number of times that a model sees its sentences in an epoch, default 1; pos: at most 1"
    )
    attribution: str = Field(default="", description="authors, source and licence, for the model card")

    @model_validator(mode="after")
    def _settings_that_go_together(self) -> Self:
        if self.weights.get("pos", 1) > 1:
            raise ValueError("weights: pos must be at most 1; give the other treebanks smaller weights")
        if self.brackets.sentences and self.conllu.sentences:
            raise ValueError("`sentences` would split brackets and conllu differently; give train, valid and test files")
        if not (self.brackets.paths() or self.conllu.paths()):
            raise ValueError("must have brackets or conllu with train files")
        return self


@dataclass
class Treebank:
    """Trees and sentences by split."""

    name: str
    weights: dict[str, float]
    attribution: str
    trees: dict[str, list[Tree]] = field(default_factory=dict)
    sentences: dict[str, list[Sentence]] = field(default_factory=dict)

    def drop_xpos(self) -> None:
        """Drop the language-specific tags, and keep the universal ones."""
        for found in self.sentences.values():
            for sentence in found:
                sentence.xpos[:] = [""] * len(sentence.words)

    def lower_cased(self, share: float) -> "Treebank":
        """Return the same sentences in lower case, in the same splits.

        It takes this share of train, chosen by a hash of the words.
        """

        def chosen(split: str, items: list) -> list:
            return items if split != "train" else [item for item in items if _hash(item.words) % 1000 < 1000 * share]

        trees = {s: [replace(t, words=list(map(lowered, t.words))) for t in chosen(s, found)] for s, found in self.trees.items()}
        sentences = {
            s: [replace(one, text=lowered(one.text), words=list(map(lowered, one.words))) for one in chosen(s, found)]
            for s, found in self.sentences.items()
        }
        return Treebank(f"{self.name}_lower", self.weights, self.attribution, trees, sentences)

    def digests(self) -> dict[str, str]:
        """Return a hash of the content of every split, as the models read it."""
        parts = {f"{self.name} brackets {split}": trees_of(trees) for split, trees in self.trees.items()}
        parts |= {f"{self.name} conllu {split}": conllu_of(found) for split, found in self.sentences.items()}
        return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in parts.items()}

    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the number of sentences and words of every split, with trees and with arcs."""
        return {
            kind: {split: {"sentences": len(found), "words": sum(len(s.words) for s in found)} for split, found in splits.items()}
            for kind, splits in (("trees", self.trees), ("arcs", self.sentences))
            if splits
        }


def read_treebank(name: str, config: TreebankConfig, hold_out: int) -> Treebank:
    """Read all files of a treebank. Without valid files, every `hold_out`-th sentence of train, by a hash of its words, is valid.

    Raises UserError with file and line for files that are not a treebank.
    """
    treebank = Treebank(name, {model: weight for model, weight in config.weights.items()}, config.attribution)
    kinds: list[tuple[Files, Callable, dict[str, list]]] = [
        (config.brackets, trees_in, treebank.trees),
        (config.conllu, sentences_in, treebank.sentences),
    ]
    for files, read, splits in kinds:
        splits |= {split: read(found, config.notation) for split, found in _texts(files).items()}
        if files.sentences:
            splits |= _in_runs(read(read_texts(files.sentences), config.notation))
        if "train" in splits and "valid" not in splits:
            held = [_hash(item.words) % hold_out == 0 for item in splits["train"]]
            both = list(zip(splits["train"], held, strict=True))
            splits["valid"] = [item for item, out in both if out]
            splits["train"] = [item for item, out in both if not out]
        for split, found in splits.items():
            if not found:
                raise UserError(f"treebanks.{name}: no sentence in the {split} split of {_names(files)}; give more files")
    return treebank


def seen_in_train(treebanks: Sequence[Treebank]) -> list[str]:
    """Return a line for each split of a treebank with sentences that are in train of any treebank too."""

    def texts_of(items: Sequence[Tree] | Sequence[Sentence]) -> list[str]:
        return [" ".join(item.words).replace("\n", " ") for item in items]

    def plain(texts: list[str]) -> list[str]:
        return normalised(texts) if texts else []

    kinds = [part for treebank in treebanks for part in (treebank.trees, treebank.sentences)]
    train = {text for part in kinds for text in plain(texts_of(part.get("train", []))) if text}
    lines = []
    for treebank in treebanks:
        for split in ("valid", "test"):
            # Brackets and CoNLL-U may hold the same sentences.
            texts = max(texts_of(treebank.trees.get(split, [])), texts_of(treebank.sentences.get(split, [])), key=len)
            seen = [text for text, key in zip(texts, plain(texts), strict=True) if key in train]
            if seen:
                lines.append(
                    f"{treebank.name}: {len(seen):,} of {len(texts):,} sentences of {split} ({len(seen) / len(texts):.1%}) "
                    f"are in train too, except for case, punctuation and blanks; for example {quoted(seen[0])}"
                )
    return lines


def _names(files: Files) -> str:
    return ", ".join(map(str, files.paths()))


def _texts(files: Files) -> Mapping[str, Texts]:
    """Return the texts of every split that exists."""
    if not files.documents:
        return {split: read_texts(paths) for split in SPLITS if (paths := getattr(files, split))}
    documents = list(read_texts(files.documents))
    if len(documents) < _EVERY:
        raise UserError(f"{_names(files)}: {len(documents)} documents are too few to split; give train and valid")
    return _in_runs(documents, longest=1)


def _in_runs(items: Sequence, longest: int = _LONGEST_RUN) -> dict[str, list]:
    """Split sentences or documents that have no splits, in runs of at most `longest`."""
    out: dict[str, list] = {split: [] for split in SPLITS}
    length = min(longest, max(1, len(items) // _LEAST_RUNS))
    for number, item in enumerate(items):
        out[{_TEST: "test", _VALID: "valid"}.get(number // length % _EVERY, "train")].append(item)
    return out


def _hash(words: Sequence[str]) -> int:
    # Brackets and CoNLL-U of one sentence come into the same split.
    return int.from_bytes(hashlib.sha256(" ".join(words).encode()).digest()[:8])


def tagged(treebank: Treebank, split: str, *, repeated: bool = False) -> list[Tagged]:
    """Return words and tags of CoNLL-U, and of the trees without CoNLL-U. If only the brackets have XPOS, these are used.

    Of several trees over the same words, the last one counts, unless `repeated`.
    """
    found = treebank.trees.get(split, [])
    trees = {tuple(tree.words): tree for tree in found}
    out = []
    for sentence in treebank.sentences.get(split, []):
        tree = trees.pop(tuple(sentence.words), None)
        upos, xpos = (column if all(column) else [] for column in (sentence.upos, sentence.xpos))
        if upos or xpos or tree:
            out.append(Tagged(sentence.words, upos, xpos or (tree.tags if tree else [])))
    alone = [tree for tree in found if tuple(tree.words) in trees] if repeated else trees.values()
    return out + [Tagged(tree.words, [], tree.tags) for tree in alone]


def tagged_splits(treebanks: Sequence[Treebank]) -> dict[str, dict[str, list[Tagged]]]:
    """Return sentences with XPOS by split and treebank, for train and valid.

    If no treebank has XPOS in train, UPOS replaces it in both splits; if none has UPOS, XPOS replaces it.
    """
    found = {split: {t.name: tagged(t, split) for t in treebanks} for split in LEARNT_SPLITS}
    train = [s for own in found["train"].values() for s in own]
    no_upos, no_xpos = (not any(getattr(s, name) for s in train) for name in ("upos", "xpos"))

    def alike(sentences: list[Tagged]) -> list[Tagged]:
        pairs = [Tagged(s.words, s.xpos if no_upos else s.upos, s.upos if no_xpos else s.xpos) for s in sentences]
        return [s for s in pairs if s.xpos]

    return {split: {name: alike(own) for name, own in by_name.items()} for split, by_name in found.items()}


class Text(NamedTuple):
    """A raw sentence, and its tokens as (first character, end)."""

    text: str
    tokens: list[tuple[int, int]]


def texts(treebank: Treebank, split: str) -> list[Text]:
    """Return texts of CoNLL-U. For a split of only brackets, they are detokenised."""
    if split in treebank.sentences:
        return [Text(s.text, list(zip(s.starts, s.ends, strict=True))) for s in treebank.sentences[split]]
    return [detokenise(tree.words, tree.tags) for tree in treebank.trees.get(split, [])]


_OPENING = frozenset("([{“‘$£€#")
_CLOSING = re.compile(r"[)\]}”’.,;:?!%…]+|n['’]t|['’](?:s|m|d|re|ve|ll|S|)", re.IGNORECASE)
_JOINING = frozenset(("HYPH", "SYM"))


def detokenise(words: Sequence[str], tags: Sequence[str]) -> Text:
    """Return a sentence of the Penn Treebank with the blanks of normal English writing."""
    parts: list[str] = []
    tokens: list[tuple[int, int]] = []
    position, glued = 0, True
    for word, tag in zip(words, tags, strict=True):
        closes = tag == "''" or (tag not in ("``", "-LRB-") and _CLOSING.fullmatch(word))
        joins = tag in _JOINING and word in ("-", "–", "/")
        if not (glued or closes or joins):
            parts.append(" ")
            position += 1
        word = {"``": '"', "''": '"'}.get(word, word)
        parts.append(word)
        tokens.append((position, position + len(word)))
        position += len(word)
        glued = joins or tag in ("``", "-LRB-") or word in _OPENING
    return Text("".join(parts), tokens)


def with_arcs(treebank: Treebank, split: str) -> list[Sentence]:
    """Return sentences with arcs, and both their tags. If one tag is missing, the other replaces it; if both are, it is X."""
    out = []
    for s in treebank.sentences.get(split, []):
        if all(relation not in ("", "_") for relation in s.deprels):
            pairs = list(zip(s.upos, s.xpos, strict=True))
            upos, xpos = [u or x or UNANALYSED for u, x in pairs], [x or u or UNANALYSED for u, x in pairs]
            out.append(replace(s, upos=upos, xpos=xpos))
    return out
