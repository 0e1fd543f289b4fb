"""The settings of a preprocessing job, and the defaults that depend on other settings."""

import hashlib
from collections.abc import Collection, Container, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from treeproc.common.folder_kinds import EXPORT, RUN, kind_of
from treeproc.common.settings import Effect, Settings, UserError, differences, later_field, read_yaml
from treeproc.common.storage import AnyPath, DataPath, as_path
from treeproc.parsers import ParserConfig
from treeproc.readers import Format, FormatName, find_format
from treeproc.readers.labelled import LabelledConfig
from treeproc.readers.line_forms import Normalization
from treeproc.shards.schema import auto_rows_per_shard, lower_case
from treeproc.shards.store import TOKENIZER_FILE, class_names, forms_of_trees, read_index, stage_folder
from treeproc.stages.filters import FilterConfig
from treeproc.stages.inputs import Inputs, SplitFiles, TreeConfig
from treeproc.stages.text_warnings import TextNotices, wanted
from treeproc.subwords import SubwordConfig

_MOST_CLASS = 127  # the classes of nodes and leaves are int8


class PreprocessConfig(Settings):
    """A preprocessing job, as written to DATA/config.yaml."""

    splits: Annotated[dict[str, SplitFiles], Effect.NONE] = Field(
        {}, description="files of train, valid and test, and of further test splits with names such as newstest or test_2017"
    )
    vocab_from: DataPath | None = Field(
        None,
        description="folder of a finished data set, for new test splits of its models. The job takes its vocabulary, and its "
        "values of all settings that you do not give. It then needs no train split",
    )
    new_pieces: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        None,
        description="with vocab_from and a train split: the most pieces of that split that join the vocabulary, together with "
        "its labels and tags. For models that start from a run on the other data set (init). null: none",
    )
    parsed: DataPath | None = Field(
        None, description="folder of a finished data set: the job uses its text and parsed trees instead of splits"
    )
    format: FormatName = Field("parallel", description="format of the files")
    tokenized: Literal["none", "moses"] = Field(
        "none",
        description="'moses': the files hold tokens of the Moses tokeniser. The job undoes its escapes, and takes its tokens as "
        "words. An English parser reads them as treebanks write them",
    )
    normalization: Normalization = Field(
        "none",
        description="'nfc': the job writes a letter and its marks as one character if Unicode has one (é for e + U+0301). Lines "
        "that are translated later are treated alike",
    )
    labels: dict[int, int] | None = Field(
        None,
        description="class in the files -> class of the data set, for formats whose classes are numbers; the job drops examples "
        "of other classes",
    )
    labelled: LabelledConfig = later_field(LabelledConfig())
    parser: ParserConfig = ParserConfig()
    target_parser: ParserConfig | None = Field(None, description="parser of the target side, if you need its trees too")
    filters: FilterConfig = FilterConfig()
    subwords: SubwordConfig = SubwordConfig()
    tree: TreeConfig = TreeConfig()
    rows_per_shard: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="input examples of a shard; a job works and resumes shard by shard. auto: 2000, and more above 8 million "
        "examples",
    )
    # Changes nothing that is written: it is in no config.yaml.
    workers: Literal[0] | None = Field(
        None,
        exclude=True,
        description="0: the job runs in this process, without Ray; unset: as many Ray actors as there is room for",
    )

    @model_validator(mode="before")
    @classmethod
    def _settings_left_open(cls, values: Any) -> Any:
        other = values.get("vocab_from") if isinstance(values, dict) else None
        return borrow_settings(values) if other and isinstance(other, str | AnyPath) else values

    @model_validator(mode="after")
    def _inputs_fit_the_format(self) -> Self:
        form = self.form
        if self.new_pieces is not None and self.vocab_from is None:
            raise ValueError("new_pieces: adds to the vocabulary of another data set; give vocab_from=DATA as well")
        for split, files in self.splits.items():
            if files.hold_out is not None and split != "valid":
                raise ValueError(f"splits.{split}: hold_out can make only the valid split")
            if files.hold_out is not None and "train" not in self.splits:
                raise ValueError(f"splits.{split}: hold_out takes examples of train, but there is no train split")
            if files.source and bool(files.target) != _has_target(form, self.splits):
                needs = "takes no target files" if files.target else f"needs target files, as splits.{split}.target=FILE"
                other = "; for text without translations, set format=text" if self.format == "parallel" else ""
                raise ValueError(f"splits.{split}: format {self.format} {needs}, in all splits alike{other}")
        if self.tokenized == "moses" and form.columns:
            raise ValueError(f"tokenized: must be none for format {self.format}, which already has words or labels")
        for name, side in (("parser", self.parser), ("target_parser", self.target_parser)):
            if side and side.treebank_words and self.tokenized != "moses":
                raise ValueError(f"{name}.treebank_words: needs tokenized: moses; set it to null")
            if side and side.tags and "words" in self.inputs().columns():
                raise ValueError(f"{name}.tags: needs text whose words the parser finds, but this input has words; leave it out")
        of_lower: dict[str, str] = {}
        for tag in self.tags() if self.subwords.lowercase else ():
            if (other := of_lower.setdefault(lower_case(tag), tag)) != tag:
                raise ValueError(f"parser.tags: {other} and {tag} are one piece with subwords.lowercase; rename one of them")
        whole = "the two sentences of a pair" if form.has_pairs else "the sentences of a document"
        if (form.has_pairs or self.format == "documents") and any(files.hold_out for files in self.splits.values()):
            raise ValueError(
                f"splits.valid.hold_out: would separate {whole} of format {self.format}; give the files of valid instead"
            )
        if self.format == "documents" and self.parser.name in ("given", "words"):
            raise ValueError(f"parser.name: must find sentences for format documents, but is {self.parser.name}; choose stanza")
        filters = self.filters
        if form.has_pairs and (filters.drop_duplicates or filters.drop_leaks or filters.drop_overlap != "none"):
            raise ValueError(
                f"filters: drop_duplicates and drop_leaks must be false and drop_overlap none for format {self.format}, whose "
                "pairs share sentences"
            )
        if self.labels is not None and "label" not in form.columns:
            raise ValueError(f"labels: format {self.format} has no labels")
        if wrong := [number for number in (self.labels or {}).values() if not 0 <= number <= _MOST_CLASS]:
            raise ValueError(f"labels: a class of the data set must be a number from 0 to {_MOST_CLASS}, but one is {wrong[0]}")
        if self.labels is not None and self.format == "labelled":
            raise ValueError("labels: classes of format labelled have names; leave it out, and write other names into the files")
        if self.labelled != LabelledConfig() and self.format != "labelled":
            raise ValueError(
                f"labelled: is for format labelled, but format is {self.format}; leave it out, or set format=labelled"
            )
        return self

    @property
    def form(self) -> Format:
        """Return the format of the files."""
        return find_format(self.format, self.labelled)

    def inputs(self) -> Inputs:
        """Return the inputs of the text stage."""
        cuts = self.parser if self.format == "documents" else None
        return Inputs(self.splits, self.format, self.tokenized, self.labels, self.normalization, self.labelled, cuts)

    def classes(self) -> list[str]:
        """Return the names of the classes in the order of their numbers; none if they are numbers alone."""
        return [] if self.labels is not None else list(self.form.classes)

    def tags(self) -> list[str]:
        """Return the tags of lines of both sides."""
        return sorted({tag for side in (self.parser, self.target_parser) if side is not None for tag in side.tags})

    def parsers(self) -> dict[str, ParserConfig | None]:
        """Return the parser of each side that there is."""
        sides = {"source": self.parser, "target": self.target_parser}
        return sides if _has_target(self.form, self.splits) else {"source": self.parser}

    def notices(self) -> TextNotices:
        """Return the notices that the text stage collects about the lines of each side."""
        languages = {side: p.language if p is not None and p.reads_language else None for side, p in self.parsers().items()}
        kinds = wanted(self.tokenized, self.form.columns, languages, self.normalization, self.tags())
        return TextNotices(kinds, self.inputs().line)

    def settled(self, begun: Mapping | None = None) -> "PreprocessConfig":
        """Return the settings with defaults filled in: `settle_tree`, `treebank_words` of Moses tokens, given trees and arcs.

        `rows_per_shard: auto` becomes that of a data set that was begun; else `with_shard_size` settles it, which needs a scan.

        `begun` are the settings of a data set that was begun; it keeps its values.
        """
        begun = begun or {}
        columns = {*self.form.columns, *(["target"] if any(files.target for files in self.splits.values()) else [])}
        parser = self.with_given_trees(begun)
        tree = settle_tree(self.tree, (parser, self.target_parser), columns, begun)
        decided: dict = {
            "tree": tree,
            "parser": self._with_given_arcs(parser, tree, begun),
            "labelled": self._with_classes(begun),
        }
        if self.rows_per_shard == "auto":
            decided["rows_per_shard"] = begun.get("rows_per_shard", "auto")
        for name in ("parser", "target_parser") if self.tokenized == "moses" else ():
            side = decided.get(name, getattr(self, name))
            if side is not None and side.treebank_words is None:
                before = (begun.get(name) or {}).get("treebank_words")
                chosen = side.knows_treebank_words if before is None else before
                decided[name] = side.model_copy(update={"treebank_words": chosen})
        return self.model_copy(update=decided)

    def _with_classes(self, begun: Mapping) -> LabelledConfig:
        """Return the settings of format `labelled` with the names of all classes.

        If they are not set, they are those of a data set that was begun, or of the data set `vocab_from`, or those in train.
        """
        if self.format != "labelled" or self.labelled.classes is not None:
            return self.labelled
        classes = (begun.get("labelled") or {}).get("classes")
        if classes is None and self.vocab_from is not None and self.new_pieces is None:
            index = read_index(self.vocab_from.absolute() / "encoded")
            if "num_classes" not in index:
                raise UserError(f"vocab_from: {self.vocab_from} has no classes; give a data set with classes")
            classes = class_names(index)
        if classes is None and "train" in self.splits:
            classes = self.inputs().classes_of_train()
        return self.labelled.model_copy(update={"classes": classes})

    def with_given_trees(self, begun: Mapping) -> ParserConfig:
        """Return the parser of the source. Constituents of the input are taken unless another parser, or arcs, are set."""
        parser, tree = self.parser, self.tree
        is_open = parser.model_fields_set <= _OPEN and not parser.dependencies
        if not (is_open and self.form.gives_constituents and tree.side == "source" and tree.tree_source != "dependencies"):
            return parser
        before = begun.get("parser")
        if isinstance(before, dict) and before.get("name") == parser.name:  # begun when a parser was the default
            return parser
        return parser.model_copy(update={"name": "given"})

    def _with_given_arcs(self, parser: ParserConfig, tree: TreeConfig, begun: Mapping) -> ParserConfig:
        """Return the `parser` of the source. For trees of arcs, those of the input are taken unless another parser is set."""
        if tree.tree_source != "dependencies" or tree.side != "source" or "arcs" not in self.form.columns:
            return parser
        if parser.model_fields_set <= _OPEN:
            parser = parser.model_copy(update={"name": (begun.get("parser") or {}).get("name", "given")})
        if parser.name == "given" and "dependencies" not in parser.model_fields_set:
            parser = parser.model_copy(update={"dependencies": True})
        return parser

    def with_shard_size(self, rows: int) -> "PreprocessConfig":
        """Return the settings with the number that `rows_per_shard: auto` means: a function of the `rows` of all splits alone."""
        return self if self.rows_per_shard != "auto" else self.model_copy(update={"rows_per_shard": auto_rows_per_shard(rows)})


def settle_tree(
    tree: TreeConfig, parsers: tuple[ParserConfig, ParserConfig | None], columns: Container[str], begun: Mapping
) -> TreeConfig:
    """Return the settings of trees with defaults filled in.

    Without constituents, trees are made of arcs unless the user has it otherwise. The sentences of a line with a target, a class
    or a score stand under one root, unless the user or a data set that was begun has it otherwise.
    """
    parser = parsers[tree.side == "target"]
    if parser and not parser.constituency and "tree_source" not in tree.model_fields_set:
        tree = tree.model_copy(update={"tree_source": "dependencies"})
    has_one_answer = any(name in columns for name in ("target", "label", "score"))
    if "documents" in tree.model_fields_set or not (has_one_answer and parser and parser.split_sentences):
        return tree
    return tree.model_copy(update={"documents": (begun.get("tree") or {}).get("documents", "dummy_root")})


def _has_target(form: Format, splits: dict[str, SplitFiles]) -> bool:
    return form.target == "required" or (form.target == "optional" and any(files.target for files in splits.values()))


_PARSERS = ("parser", "target_parser")
_OPEN = {"dependencies", "language", "device", "batch_words"}  # settings that choose no parser
# Settings of the reading of files and of the parse, which the folder of the text and parsed stage knows; and of encoding.
_OF_TEXT = ("format", "tokenized", "normalization", "labels", "labelled", *_PARSERS)
_OF_ENCODING = ("subwords", "tree")
# Settings that every config.yaml of a data set has: it is complete without the data set `vocab_from`, which may have moved.
_WRITTEN = PreprocessConfig().model_dump().keys()


def borrow_settings(values: Mapping) -> dict:
    """Complete the settings of a job as a user gives them: the data set `vocab_from` gives those that are left open.

    Raises UserError when that data set has no settings.
    """
    out = dict(values)
    own_text = not values.get("parsed")  # with `parsed`, text and trees are those of a third data set
    wanted = [*(_OF_TEXT if own_text else ()), *_OF_ENCODING]
    if all(name in values for name in wanted) or values.keys() >= _WRITTEN:
        return out
    data = as_path(values["vocab_from"]).absolute()
    if (kind := kind_of(data)) in (RUN, EXPORT):
        raise UserError(f"vocab_from: {data} is {kind.name}; give the data set that it was trained on")
    there = _read_settings(data)
    if (there.get("subwords") or {}).get("tokenizer"):
        encoded = data / "encoded"
        read_vocabulary_file(encoded, TOKENIZER_FILE, read_index(encoded)["files"].get(TOKENIZER_FILE))
        there["subwords"] = {"tokenizer": str((encoded / TOKENIZER_FILE).parent)}  # its own copy
    if own_text:
        there |= {name: value for name, value in _read_settings(stage_folder(data, "text").parent).items() if name in _OF_TEXT}
        for name in _PARSERS:
            if isinstance(there.get(name), dict):  # a data set does not decide who reads the text
                there[name] = {key: value for key, value in there[name].items() if key != "endpoint"}
        other_format = values.get("format", there.get("format")) != there.get("format")
        has_tokens = there.get("tokenized") == "moses" and any((there.get(name) or {}).get("treebank_words") for name in _PARSERS)
        if has_tokens and (other_format or values.get("tokenized", "moses") != "moses"):
            raise UserError(
                f"vocab_from: {data} was made of Moses tokens, which its parser reads as treebank words; give files of Moses "
                "tokens, and leave out tokenized and format"
            )
        if other_format:
            for name in ("labels", "labelled"):  # the classes of other files
                there.pop(name, None)
    for name in wanted:
        if name in there:
            whole = name not in values or name == "labels"  # a mapping of classes is not completed
            out[name] = values.get(name, there[name]) if whole else _merged(there[name], values[name])
    return out


def read_vocabulary_file(encoded: AnyPath, name: str, sha256: str | None) -> bytes:
    """Read a file of the vocabulary of another data set. Raises UserError if it does not have the hash of its index."""
    try:
        content = (encoded / name).read_bytes()
    except OSError:
        content = b""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"vocab_from: {encoded / name} is missing or damaged; run its tree-attention preprocess again")
    return content


def _merged(base: object, own: object) -> object:
    return base | own if isinstance(base, dict) and isinstance(own, dict) else own


def read_written_settings(out: AnyPath) -> dict | None:
    """Read the settings of the data set `out` as they were written; None if there are no readable settings."""
    try:
        values = read_yaml((out / "config.yaml").read_text(encoding="utf-8"), str(out / "config.yaml"))
    except (OSError, UnicodeDecodeError):
        return None
    return values if isinstance(values, dict) else None


def _read_settings(folder: AnyPath) -> dict:
    if (values := read_written_settings(folder)) is None:
        raise UserError(f"vocab_from: cannot read {folder / 'config.yaml'}; give the folder of a finished data set")
    return values


def check_reuse(
    data: AnyPath, *, parser: Mapping, subwords: Mapping, tree: Mapping, normalization: str, columns: Collection[str]
) -> Mapping:
    """Return the index of the encoded stage of `data`, the data set whose vocabulary is taken.

    `parser` describes the parser of the leaves' side; `columns` are those of the encoded shards to come. Raises UserError if
    a model would read examples of the two data sets differently: their scores would mean nothing.
    """
    index = read_index(data / "encoded")
    parsers = [{name: value for name, value in one.items() if name != "device"} for one in (index["parser"], parser)]
    trees = forms_of_trees(index["tree_settings"], tree)
    for name, theirs, own in (
        ("parser", parsers[0], parsers[1]),
        ("subwords", index["subword_settings"], subwords),
        ("", {"normalization": index.get("normalization", "none")}, {"normalization": normalization}),
        ("tree", trees[0], trees[1]),
    ):
        if changed := differences(theirs, dict(own), name):
            way_out = "leave these settings out, and --config if its file has them"
            way_out += ", or install that parser" if name == "parser" else ""
            if name == "parser" and own.get("treebank_words") and theirs.get("treebank_words") is None:
                way_out = "give plain text, and leave tokenized out"  # the default of Moses tokens
            raise UserError(
                f"vocab_from: {data} was made with other settings ({'; '.join(changed)}), so scores of its models would mean "
                f"nothing; {way_out}"
            )
    if missing := [name for name in index["columns"] if name not in columns]:
        hint = "; give splits.NAME.target" if "tgt_pieces" in missing else ""
        raise UserError(f"vocab_from: the examples of {data} have {', '.join(missing)}, but those of these splits do not{hint}")
    return index


def check_extension(data: AnyPath, *, subwords: Mapping) -> None:
    """Raise UserError if new pieces cannot follow those of the data set `data`."""
    if changed := differences(read_index(data / "encoded")["subword_settings"], dict(subwords), "subwords"):
        raise UserError(
            f"vocab_from: {data} was made with other settings ({'; '.join(changed)}), but new pieces can only follow the same "
            "settings; leave these settings out"
        )
    if "tokenizer" in subwords:
        raise UserError(f"new_pieces: {data} has the pieces of a pretrained tokenizer, which cannot grow; leave new_pieces out")
    if not subwords["joint"]:
        raise UserError(f"new_pieces: {data} has a vocabulary for each side (subwords.joint=false); only joint ones can grow")
