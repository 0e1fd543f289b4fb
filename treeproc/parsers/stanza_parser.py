"""Stanza's tokeniser, tagger and parsers, offline, with one CPU thread or on one GPU.

Models that the fast path does not support run on Stanza's own processors and documents.
"""

import bisect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from treeproc.common.errors import UserError, one_line
from treeproc.common.files import check_archive, load_archive
from treeproc.parsers import dependency, shift_reduce, tagger, tokenizer
from treeproc.parsers.characters import CharacterReader, share_readers
from treeproc.parsers.config import PARSED, ParserConfig
from treeproc.parsers.lines import Arcs, Line, LineParser, Sentence, Tags, Token, batches, cut_at, is_out_of_memory, make_flat
from treeproc.parsers.model_files import VECTORS, ModelFiles, find_models, no_scores
from treeproc.parsers.parse_scores import ScoredParser
from treeproc.parsers.weights import ConstituencyModel, Vocabulary, Weights, can_read, tensors_of
from treeproc.shards.rows import edges_of
from treeproc.shards.schema import UNSCORED
from treeproc.trees.spans import SpanTree, read_nodes

_PROBE = "A dog barks ."
_CHARS_PER_WORD = 4  # words of a batch; the tokeniser's states are smaller than the tagger's


class DocumentTokenizer:
    """The processors `tokenize` and `mwt` on lines that are joined to one text."""

    def __init__(self, processors: Sequence):
        self._processors = processors

    def tokenize(self, lines: Sequence[str], batch_chars: int) -> list[list[list[Token]]]:
        """Return sentences of tokens of every line. One document has at most `batch_chars` characters."""
        out: list[list[list[Token]]] = []
        for batch in batches([len(line) for line in lines], batch_chars):
            out += self._tokenize([lines[i] for i in batch])
        return out

    def _tokenize(self, lines: Sequence[str]) -> list[list[list[Token]]]:
        document: Any = list(lines)
        for processor in self._processors:
            document = processor.process(document)
        # The tokeniser joins the lines with a blank line between them. Its offsets count over all lines.
        offsets = edges_of([len(line) + 2 for line in lines]).tolist()
        out: list[list[list[Token]]] = [[] for _ in lines]
        for sentence in document.sentences:
            number = bisect.bisect_right(offsets, sentence.tokens[0].start_char) - 1
            first = offsets[number]
            out[number].append(
                [Token(t.start_char - first, t.end_char - first, tuple(word.text for word in t.words)) for t in sentence.tokens]
            )
        return out


class DocumentTagger:
    """The processor `pos`; with `lemma` and `depparse` also the arcs."""

    def __init__(self, processors: Sequence, dependencies: bool):
        self._processors, self._dependencies = processors, dependencies

    def tag(self, sentences: Sequence[Sequence[str]], batch_words: int) -> tuple[list[Tags], list[Arcs] | None]:
        """Return tags of every word, and arcs if requested. One document has at most `batch_words` words."""
        documents = [self._run([sentences[i] for i in batch]) for batch in batches([len(s) for s in sentences], batch_words)]
        parsed = [sentence for document in documents for sentence in document.sentences]
        tags = [[(word.upos, word.xpos) for word in sentence.words] for sentence in parsed]
        if not self._dependencies:
            return tags, None
        return tags, [[(word.head - 1, word.deprel) for word in sentence.words] for sentence in parsed]

    def _run(self, sentences: Sequence[Sequence[str]]) -> Any:
        from stanza.models.common.doc import Document

        document = Document([[{"id": (i + 1,), "text": word} for i, word in enumerate(sentence)] for sentence in sentences])
        for processor in self._processors:
            document = processor.process(document)
        return document


class ObjectParser:
    """Calls `parse_tagged_words` of a constituency model."""

    def __init__(self, model: Any):
        self._model = model

    def parse(self, sentences: Sequence[Sequence[tuple[str, str]]], batch_words: int) -> list[SpanTree | None]:
        """Return one tree per sentence. Raises RuntimeError if Stanza finds no tree for one of them."""
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        trees = self._model.parse_tagged_words([list(sentences[i]) for i in order], max(1, batch_words // 32))
        if len(trees) != len(sentences):
            raise RuntimeError("the parser found no end of a sentence")
        out: list[SpanTree | None] = [None] * len(sentences)
        for i, tree in zip(order, trees, strict=True):
            out[i] = span_tree(tree)
        return out


def span_tree(root: Any) -> SpanTree:
    """Convert Stanza's tree of objects to spans. A word right below a nonterminal counts as a pre-terminal."""
    return read_nodes(root, lambda node: None if node.is_leaf() or node.is_preterminal() else (node.label, node.children))[0]


class Processors(NamedTuple):
    """The steps of a parse; None for a step without a model."""

    tokenizer: tokenizer.Tokenizer | DocumentTokenizer | None
    tagger: tagger.Tagger | DocumentTagger | None
    arcs: dependency.DependencyParser | None  # None also if the tagger gives them
    parser: shift_reduce.ShiftReduceParser | ObjectParser | None
    uses_xpos: bool  # the parser reads XPOS, else UPOS
    readers: Sequence[CharacterReader]  # that steps share


def load_processors(config: ParserConfig, models: ModelFiles) -> Processors:
    """Load fast forms of the models if they are supported, else Stanza's own processors. Raises UserError for a damaged model."""
    torch.set_num_threads(1)
    with blamed_on(models):
        if models.origin == "installed":
            for path in models.read().values():
                check_archive(path, models.hint)
        else:
            if models.origin == "shipped":
                models.check()
            files = {name: load_archive(path, models.hint) for name, path in models.read().items()}
            if found := _without_stanza(config, files):
                return found
        return _with_stanza(config, models)


@contextmanager
def blamed_on(models: ModelFiles) -> Iterator[None]:
    """Report any failure in this context as an error of the models, in one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Stanza raises any kind of error on files that are not its models
        if is_out_of_memory(error):
            raise
        for path in models.read().values():
            load_archive(path, models.hint)
        message = one_line(f"{type(error).__name__}: {error}", 150)
        names = ", ".join(path.name for path in models.read().values())
        raise UserError(
            f"{models.folder}: one of {names} is damaged, or they are of different trainings ({message}); {models.hint}"
        ) from None


def _without_stanza(config: ParserConfig, files: Mapping[str, Mapping]) -> Processors | None:
    """Build fast forms of the models from the content of their files; None if one of them needs Stanza."""
    device = config.torch_device()
    tokenize, trees = files.get("tokenize"), files.get("constituency")
    splitter, longest = None, tokenizer.LONGEST_TOKEN
    if tokenize:
        longest = tokenize["config"].get("max_seqlen", longest)
        tensors = tensors_of(tokenize["model"], device)
        splitter = Weights(tensors, {"use_mwt": True, **tokenize["config"]}, {"char": Vocabulary(tokenize["vocab"])})
    words, arcs = (Weights.read(files[name], device) if name in files else None for name in ("pos", "depparse"))
    brackets = ConstituencyModel.read(trees, files["vectors"], device) if trees else None
    if not (
        (splitter is None or tokenizer.supports(splitter))
        and (words is None or tagger.supports(words))
        and (arcs is None or dependency.supports(arcs))
        and (brackets is None or (brackets.is_supported and brackets.is_plain))
    ):
        return None
    return Processors(
        tokenizer=tokenizer.Tokenizer(splitter, longest, config.split_sentences) if splitter else None,
        tagger=tagger.Tagger(words) if words else None,
        arcs=dependency.DependencyParser(arcs) if arcs else None,
        parser=shift_reduce.ShiftReduceParser(brackets) if brackets else None,
        uses_xpos=brackets is not None and brackets.reads_xpos,
        readers=(),
    )


def _with_stanza(config: ParserConfig, models: ModelFiles) -> Processors:
    import stanza

    loaded = stanza.Pipeline(**stanza_options(config, models)).processors
    depparse, constituency = (loaded.get(name) for name in ("depparse", "constituency"))
    arcs = _supported(depparse, dependency.supports)
    read_characters = [one.trainer.model for name in ("pos", "depparse", "constituency") if (one := loaded.get(name))]
    return Processors(
        tokenizer=_tokenizer(loaded, config.split_sentences) if loaded["tokenize"].trainer else None,
        tagger=_tagger(loaded, document_arcs=bool(depparse) and arcs is None) if "pos" in loaded else None,
        arcs=dependency.DependencyParser(arcs) if arcs else None,
        parser=_constituency_parser(constituency.trainer.model) if constituency else None,
        uses_xpos=bool(constituency) and constituency.trainer.model.uses_xpos(),
        readers=share_readers(read_characters),
    )


def _supported(processor: Any, supports: Callable[[Weights], bool]) -> Weights | None:
    """Return the weights of a processor of Stanza; None if the fast form does not support them."""
    model = processor and processor.trainer.model
    weights = Weights.of(model.eval()) if model is not None and hasattr(model, "vocab") else None
    return weights if weights and supports(weights) else None


def _tokenizer(loaded: Mapping, split_sentences: bool) -> tokenizer.Tokenizer | DocumentTokenizer:
    tokenize = loaded["tokenize"]
    trainer, config = tokenize.trainer, tokenize.config
    vocab = {"char": Vocabulary(vars(tokenize.vocab))}
    weights = Weights(tensors_of(trainer.model.state_dict()), trainer.args, vocab)
    if "mwt" not in loaded and tokenizer.supports(weights) and not config.get("postprocessor"):
        longest = config.get("max_seqlen", tokenizer.LONGEST_TOKEN)
        return tokenizer.Tokenizer(weights, longest, split_sentences)
    return DocumentTokenizer([loaded[name] for name in ("tokenize", "mwt") if name in loaded])


def _tagger(loaded: Mapping, document_arcs: bool) -> tagger.Tagger | DocumentTagger:
    weights = _supported(loaded["pos"], tagger.supports)
    if weights and not document_arcs:
        return tagger.Tagger(weights)
    names = ["pos", *(("lemma", "depparse") if document_arcs else ())]
    return DocumentTagger([loaded[name] for name in names], document_arcs)


def _constituency_parser(model: Any) -> shift_reduce.ShiftReduceParser | ObjectParser:
    if can_read(model) and (read := ConstituencyModel.of(model)).is_supported:
        return shift_reduce.ShiftReduceParser(read)
    return ObjectParser(model)


class StanzaParser(LineParser):
    """Stanza's models on lines."""

    def __init__(self, config: ParserConfig):
        super().__init__(config)
        models = find_models(config)
        loaded = load_processors(config, models)
        assert loaded.tokenizer is not None and loaded.tagger is not None  # of a complete set of models
        self._tokenizer, self._arcs = loaded.tokenizer, loaded.arcs
        self._tagger: tagger.Tagger | DocumentTagger | None = loaded.tagger
        self._parser, self._uses_xpos, self._readers = loaded.parser, loaded.uses_xpos, loaded.readers
        self._scored = None
        if config.scores:
            if not (isinstance(self._parser, shift_reduce.ShiftReduceParser) and self._parser.model.is_plain):
                raise no_scores(config, models)
            self._scored = ScoredParser(self._parser)
        with blamed_on(models):  # models of wrong sizes fail at their first use, and every line would get a flat tree
            self._analyse([Line(_PROBE, None)])

    def knows(self, word: str) -> bool:
        """Return whether the tagger learned the word; False for one of Stanza's own."""
        return isinstance(self._tagger, tagger.Tagger) and self._tagger.knows(word)

    def cut_only(self) -> None:
        """Give flat trees from now on, over the same words: no tags, no arcs."""
        self._tagger, self._arcs, self._parser = None, None, None

    def _sentences(self, lines: Sequence[Line]) -> list[list[Sentence]]:
        # Given words are only read to find the ends of sentences.
        raw = [line.text for line in lines if line.words is None or (line.words and self._config.split_sentences)]
        split = iter(self._tokenizer.tokenize(raw, self._batch_words * _CHARS_PER_WORD))
        groups = []
        for line in lines:
            if line.words is None:
                sentences = next(split)
            elif line.words and self._config.split_sentences:
                sentences = cut_at(self._given_tokens(line.words), [s[0].start for s in next(split)])
            else:
                sentences = [self._given_tokens(line.words)] if line.words else []
            groups.append([Sentence(s) for s in sentences])
        short = []
        for group in groups:
            for sentence in group:
                if len(sentence.words) > self._config.max_words:
                    sentence.status = "flat_too_long"
                else:
                    short.append(sentence)
        # States of characters stay until all steps have read them, so only a batch of sentences goes through all steps at once.
        short.sort(key=lambda sentence: -len(sentence.words))
        for batch in batches([len(sentence.words) for sentence in short], self._batch_words if self._readers else sys.maxsize):
            self._parse(short[batch.start : batch.stop])
            for reader in self._readers:
                reader.forget()
        return groups

    def _parse(self, sentences: list[Sentence]) -> None:
        words = [s.words for s in sentences]
        if self._tagger is None:
            return make_flat(sentences)
        tags, arcs = self._tagger.tag(words, self._batch_words)
        if self._arcs:
            arcs = self._arcs.parse(words, tags, self._batch_words)
        for i, sentence in enumerate(sentences):
            sentence.tags, sentence.arcs = tags[i], arcs[i] if arcs else None
        if self._parser is None:
            return make_flat(sentences)
        column = 1 if self._uses_xpos else 0
        tagged = [[(word, tag[column]) for word, tag in zip(s.words, s.tags, strict=True)] for s in sentences]
        if self._scored is not None:
            found = self._scored.parse(tagged, self._batch_words)
        else:
            found = [(tree, UNSCORED) for tree in self._parser.parse(tagged, self._batch_words)]
        for sentence, (tree, score) in zip(sentences, found, strict=True):
            sentence.tree, sentence.score = tree, score
            sentence.status = PARSED if tree else "flat_parser_failed"


def stanza_options(config: ParserConfig, models: ModelFiles) -> dict:
    """Return the arguments of `stanza.Pipeline` for these models, offline."""
    options: dict = {
        "lang": config.language,
        "dir": str(models.folder),
        "download_method": None,
        "use_gpu": config.torch_device().type == "cuda",
        "logging_level": "CRITICAL",  # errors are reported here
        "tokenize_no_ssplit": not config.split_sentences,
    }
    if models.origin != "installed":
        options |= {f"{name}_model_path": str(path) for name, path in models.files.items()}
        if config.constituency:
            options["constituency_pretrain_path"] = str(models.folder / VECTORS)
        return options | {
            "package": None,
            "processors": {name: "default" for name in ("tokenize", *models.files)},
            # Without a model it uses the words unchanged.
            "tokenize_pretokenized": "tokenize" not in models.files,
            # Tags come from the tagger as usual. This setting tells Stanza that the parser reads no lemmas.
            "depparse_pretagged": True,
            "allow_unknown_language": True,
        }
    wanted = {"mwt", *config.processors, *(("lemma",) if config.dependencies else ())}
    names = [name for name in ("tokenize", "mwt", "pos", "constituency", "lemma", "depparse") if name in wanted]
    # A language without multi-word tokens has no such model.
    there = [name for name in names if name != "mwt" or (models.folder / config.language / name).is_dir()]
    return options | {"processors": ",".join(there)}
