"""Parsers of optional packages: checks that they are installed, the files that they read, and the pipelines of spaCy.

A pipeline gives words, tags and arcs. It is a parser by itself, and the input of benepar and SuPar.
"""

import re
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treeproc.common.errors import one_line, require
from treeproc.common.files import file_sha256
from treeproc.common.settings import UserError
from treeproc.parsers.config import PARSED, ParserConfig
from treeproc.parsers.lines import Line, LineParser, Sentence, Token, batches, make_flat
from treeproc.shards.rows import edges_of
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.spans import SpanTree, read_nodes

_NEEDED = {"spacy": ("spacy",), "benepar": ("spacy", "benepar"), "supar": ("spacy", "supar")}

_CHARS_PER_WORD = 6
_PROBE = "A dog barks ."
_UNREAD = ("ner", "lemmatizer", "entity_linker", "entity_ruler", "textcat")  # components whose results are not read here


def describe_package(config: ParserConfig) -> dict:
    """Return the description of these parsers in fingerprints: versions of the packages and hashes of the files, no paths.

    Raises UserError if a package or a file is missing.
    """
    needed = _NEEDED[config.name]
    require(needed, f"parser.name={config.name}")
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


def span_tree(root: Any) -> tuple[SpanTree, list[str]]:
    """Convert a tree of NLTK to spans, and the tags of its leaves."""
    tree, leaves = read_nodes(root, lambda node: None if isinstance(node[0], str) else (node.label() or "ROOT", node))
    return (tree if len(tree) else SpanTree(["ROOT"], [0], [1])), [leaf.label() for leaf in leaves]


def spaces_after(tokens: Sequence[Token]) -> list[bool]:
    """Return whether a blank follows, for every word of the tokens."""
    out = []
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        out += [False] * (len(token.words) - 1) + [after is not None and token.end < after.start]
    return out


class SpacyParser(LineParser):
    """Analyses lines with a spaCy pipeline on the CPU. Without a pipeline (benepar, SuPar), the language's rules make words."""

    describe = staticmethod(describe_package)

    def __init__(self, config: ParserConfig):
        super().__init__(config)
        describe_package(config)
        self._nlp = load_pipeline(config)
        self._check()

    def _check(self) -> None:
        """Raise UserError for a pipeline that does not give the requested results."""
        document = self._nlp(_PROBE)
        wanted = {
            "DEP": (self._config.dependencies and self._config.name != "supar", "arcs (component parser)"),
            "POS": (not self._config.constituency, "universal tags (component morphologizer, or tagger and attribute_ruler)"),
            "SENT_START": (self._config.split_sentences, "ends of sentences (component parser, senter or sentencizer)"),
        }
        for attribute, (asked, what) in wanted.items():
            if asked and not document.has_annotation(attribute):
                raise UserError(f"parser.package: {self._config.package} gives no {what}; choose a pipeline that gives them")

    def _sentences(self, lines: Sequence[Line]) -> list[list[Sentence]]:
        out: list[list[Sentence]] = []
        budget = self._batch_words * _CHARS_PER_WORD
        for batch in batches([len(line.text) for line in lines], budget):
            with self._nlp.memory_zone():  # new words are removed from the vocabulary after the batch
                out += self._batch([lines[i] for i in batch])
        short = [sentence for group in out for sentence in group if sentence.status == PARSED]
        if short:
            self._parse(short)
        return out

    def _batch(self, lines: Sequence[Line]) -> list[list[Sentence]]:
        tokens, documents = zip(*(self._document(line) for line in lines), strict=True)
        split, longest = self._config.split_sentences, self._config.max_words
        run = [i for i, document in enumerate(documents) if len(document) and (split or len(document) <= longest)]
        analysed = dict(zip(run, self._nlp.pipe([documents[i] for i in run], batch_size=len(run) or 1), strict=True))
        out = []
        for i, own in enumerate(tokens):
            if i not in analysed:
                out.append([Sentence(own, status="flat_too_long")] if own else [])
                continue
            rest, group = iter(own), []
            for span in analysed[i].sents if split else [analysed[i][:]]:
                taken: list[Token] = []
                while sum(len(token.words) for token in taken) < len(span):
                    taken.append(next(rest))
                too_long = len(span) > longest
                tags = [(word.pos_ or UNANALYSED, word.tag_) for word in span]
                group.append(Sentence(taken, tags, _arcs(span), None, "flat_too_long" if too_long else PARSED))
            out.append(group)
        return out

    def _document(self, line: Line) -> tuple[list[Token], Any]:
        """Return the tokens of the line, and spaCy's document of their words."""
        from spacy.tokens import Doc

        if line.words is None:
            pieces = list(re.finditer(r"\S+", line.text))  # spaCy would make words from blanks
            document = self._nlp.tokenizer(" ".join(piece.group() for piece in pieces))
            place = [at for piece in pieces for at in range(piece.start(), piece.end() + 1)]
            spans = [(place[word.idx], place[word.idx + len(word) - 1] + 1) for word in document]
            tokens = [Token(start, end, (line.text[start:end],)) for start, end in spans]
        else:
            tokens = self._given_tokens(line.words)
            words = [word for token in tokens for word in token.words]
            document = Doc(self._nlp.vocab, words, spaces_after(tokens))
        firsts = set(edges_of([len(token.words) for token in tokens]).tolist())
        for word in list(document)[1:]:  # a sentence does not end within a token, and ends within a line only if requested
            if not self._config.split_sentences or word.i not in firsts:
                word.is_sent_start = False
        return tokens, document

    def _parse(self, sentences: list[Sentence]) -> None:
        """Fill in the trees. Here there are only arcs."""
        make_flat(sentences)


def _arcs(span: Any) -> list[tuple[int, str]]:
    """Return the arcs of a sentence with one root.

    If spaCy finds several roots, the others depend on the first as `parataxis`.
    """
    roots = [word.i - span.start for word in span if word.head.i == word.i]
    out = [(word.head.i - span.start, word.dep_ or UNANALYSED) for word in span]
    for root in roots:
        out[root] = (-1, "root") if root == roots[0] else (roots[0], "parataxis")
    return out


def load_pipeline(config: ParserConfig) -> Any:
    """Load the pipeline of the settings, or the tokeniser of the language. Raises UserError if it cannot be loaded."""
    import spacy

    folder = pipeline_folder(config)
    try:
        if folder is None:
            pipeline = spacy.blank(config.language)
            if config.split_sentences:
                pipeline.add_pipe("sentencizer")
            return pipeline
        pipeline = spacy.load(folder if "/" in (config.package or "") else config.package, exclude=list(_UNREAD))
    except Exception as error:  # any kind of error, for a damaged file or a missing library of the language
        message = one_line(f"{type(error).__name__}: {error}", 200)
        name = f"package: {config.package}" if folder else f"language: {config.language}"
        raise UserError(f"spaCy cannot load parser.{name} ({message}); install it again, or set parser.package") from None
    if pipeline.lang not in ("xx", config.language.split("-")[0]):
        raise UserError(f"parser.package: {config.package} is for {pipeline.lang!r}, but parser.language is {config.language!r}")
    return pipeline
