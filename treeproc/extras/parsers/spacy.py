"""Words, tags and arcs of a spaCy pipeline: a parser by itself, and the input of benepar and SuPar."""

import logging
import re
from collections.abc import Sequence

from treeproc.common.errors import one_line
from treeproc.common.settings import UserError
from treeproc.extras.parsers.packages import describe_package, pipeline_folder
from treeproc.parsers.config import PARSED, ParserConfig
from treeproc.parsers.documents import batches
from treeproc.parsers.lines import Line, LineParser, Sentence
from treeproc.parsers.tokens import Token
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.spans import flat_tree

logger = logging.getLogger(__name__)

_CHARS_PER_WORD = 6
_PROBE = "A dog barks ."
_UNREAD = ("ner", "lemmatizer", "entity_linker", "entity_ruler", "textcat")  # components whose results are not read here


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
        named = {label for labels in self._nlp.pipe_labels.values() for label in labels}
        if self._config.name == "spacy" and "case" not in named:
            logger.warning(
                "the relations of %s are not those of Universal Dependencies; set tree.phrases=flat", self._config.package
            )

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

    def _document(self, line: Line):
        """Return the tokens of the line, and spaCy's document of their words."""
        from spacy.tokens import Doc

        if line.words is None:
            pieces = list(re.finditer(r"\S+", line.text))  # spaCy would make words from blanks
            document = self._nlp.tokenizer(" ".join(piece.group() for piece in pieces))
            place = [at for piece in pieces for at in range(piece.start(), piece.end() + 1)]
            spans = [(place[word.idx], place[word.idx + len(word) - 1] + 1) for word in document]
            tokens = [Token(start, end, (line.text[start:end],)) for start, end in spans]
        else:
            tokens = self._given_tokens(line)
            words = [word for token in tokens for word in token.words]
            spaces = [False] * len(words)
            at = -1
            for token, after in zip(tokens, [*tokens[1:], None], strict=True):
                at += len(token.words)
                spaces[at] = after is not None and token.end < after.start
            document = Doc(self._nlp.vocab, words, spaces)
        firsts, at = set(), 0
        for token in tokens:
            firsts.add(at)
            at += len(token.words)
        for word in list(document)[1:]:  # a sentence does not end within a token, and ends within a line only if requested
            if not self._config.split_sentences or word.i not in firsts:
                word.is_sent_start = False
        return tokens, document

    def _parse(self, sentences: list[Sentence]) -> None:
        """Fill in the trees. Here there are only arcs.

        The tags are universal ones, because the labels of phrases come from them.
        """
        for sentence in sentences:
            sentence.tags = [(upos, "") for upos, _ in sentence.tags]
            sentence.tree = flat_tree(len(sentence.words))


def _arcs(span) -> list[tuple[int, str]]:
    """Return the arcs of a sentence with one root.

    If spaCy finds several roots, the others depend on the first as `parataxis`.
    """
    roots = [word.i - span.start for word in span if word.head.i == word.i]
    out = [(word.head.i - span.start, word.dep_ or UNANALYSED) for word in span]
    for root in roots:
        out[root] = (-1, "root") if root == roots[0] else (roots[0], "parataxis")
    return out


def load_pipeline(config: ParserConfig):
    """Load the pipeline of the settings, or the tokeniser of the language. Raises UserError if it cannot be loaded."""
    import spacy

    folder = pipeline_folder(config)
    try:
        if folder is None:
            pipeline = spacy.blank(config.language)
            if config.split_sentences:
                pipeline.add_pipe("sentencizer")
            return pipeline
        pipeline = spacy.load(folder if "/" in config.package else config.package, exclude=list(_UNREAD))
    except Exception as error:  # any kind of error, for a damaged file or a missing library of the language
        message = one_line(f"{type(error).__name__}: {error}", 200)
        name = f"package: {config.package}" if folder else f"language: {config.language}"
        raise UserError(f"spaCy cannot load parser.{name} ({message}); install it again, or set parser.package") from None
    if pipeline.lang not in ("xx", config.language.split("-")[0]):
        raise UserError(f"parser.package: {config.package} is for {pipeline.lang!r}, but parser.language is {config.language!r}")
    return pipeline
