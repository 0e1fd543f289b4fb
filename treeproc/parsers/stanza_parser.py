"""Stanza's tokeniser, tagger and parsers, offline, with one CPU thread or on one GPU."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from treeproc.common.errors import UserError, one_line
from treeproc.common.torch_files import check_archive, load_archive
from treeproc.parsers import dependency, documents, shift_reduce, tagger, tokenizer
from treeproc.parsers.config import PARSED, ParserConfig
from treeproc.parsers.lines import Line, LineParser, Sentence, cut_at, is_out_of_memory
from treeproc.parsers.model_files import VECTORS, ModelFiles, find_models
from treeproc.trees.spans import flat_tree

_PROBE = "A dog barks ."
_CHARS_PER_WORD = 4  # words of a batch; the tokeniser's states are smaller than the tagger's


class Processors(NamedTuple):
    """The steps of a parse; None for a step without a model."""

    tokenizer: tokenizer.Tokenizer | documents.DocumentTokenizer | None
    tagger: tagger.Tagger | documents.DocumentTagger | None
    arcs: dependency.DependencyParser | None  # None also if the tagger gives them
    parser: shift_reduce.ShiftReduceParser | documents.ObjectParser | None
    uses_xpos: bool  # the parser reads XPOS, else UPOS


def load_processors(config: ParserConfig, models: ModelFiles) -> Processors:
    """Load fast forms of the models if they are supported, else Stanza's own processors. Raises UserError for a damaged model."""
    with blamed_on(models):
        for path in models.read().values():
            check_archive(path, models.hint)
        return _load_processors(config, models)


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


def _load_processors(config: ParserConfig, models: ModelFiles) -> Processors:
    torch.set_num_threads(1)
    import stanza

    loaded = stanza.Pipeline(**stanza_options(config, models)).processors
    depparse, constituency = (loaded.get(name) for name in ("depparse", "constituency"))
    fast_arcs = depparse and dependency.supports(depparse.trainer.model)
    return Processors(
        tokenizer=_tokenizer(loaded, config.split_sentences) if loaded["tokenize"].trainer else None,
        tagger=_tagger(loaded, document_arcs=bool(depparse) and not fast_arcs) if "pos" in loaded else None,
        arcs=dependency.DependencyParser(depparse.trainer.model.eval()) if fast_arcs else None,
        parser=_constituency_parser(constituency.trainer.model) if constituency else None,
        uses_xpos=bool(constituency) and constituency.trainer.model.uses_xpos(),
    )


def _tokenizer(loaded: Mapping, split_sentences: bool) -> tokenizer.Tokenizer | documents.DocumentTokenizer:
    tokenize = loaded["tokenize"]
    if "mwt" not in loaded and tokenizer.supports(tokenize.trainer, tokenize.config):
        longest = tokenize.config.get("max_seqlen", tokenize.MAX_SEQ_LENGTH_DEFAULT)
        return tokenizer.Tokenizer(tokenize.trainer, tokenize.vocab, longest, split_sentences)
    return documents.DocumentTokenizer([loaded[name] for name in ("tokenize", "mwt") if name in loaded])


def _tagger(loaded: Mapping, document_arcs: bool) -> tagger.Tagger | documents.DocumentTagger:
    model = loaded["pos"].trainer.model
    if tagger.supports(model) and not document_arcs:
        return tagger.Tagger(model.eval())
    names = ["pos", *(("lemma", "depparse") if document_arcs else ())]
    return documents.DocumentTagger([loaded[name] for name in names], document_arcs)


def _constituency_parser(model) -> shift_reduce.ShiftReduceParser | documents.ObjectParser:
    return shift_reduce.ShiftReduceParser(model) if shift_reduce.supports(model) else documents.ObjectParser(model)


class StanzaParser(LineParser):
    """Stanza's models on lines."""

    def __init__(self, config: ParserConfig):
        super().__init__(config)
        models = find_models(config)
        loaded = load_processors(config, models)
        self._tokenizer, self._tagger, self._arcs, self._parser, self._uses_xpos = loaded
        with blamed_on(models):  # models of wrong sizes fail at their first use, and every line would get a flat tree
            self._analyse([Line(_PROBE, None)])

    def _sentences(self, lines: Sequence[Line]) -> list[list[Sentence]]:
        # Given words are only read to find the ends of sentences.
        raw = [line.text for line in lines if line.words is None or (line.words and self._config.split_sentences)]
        split = iter(self._tokenizer.tokenize(raw, self._batch_words * _CHARS_PER_WORD))
        groups = []
        for line in lines:
            if line.words is None:
                sentences = next(split)
            elif line.words and self._config.split_sentences:
                sentences = cut_at(self._given_tokens(line), [s[0].start for s in next(split)])
            else:
                sentences = [self._given_tokens(line)] if line.words else []
            groups.append([Sentence(s) for s in sentences])
        short = []
        for group in groups:
            for sentence in group:
                if len(sentence.words) > self._config.max_words:
                    sentence.status = "flat_too_long"
                else:
                    short.append(sentence)
        if short:
            self._parse(short)
        return groups

    def _parse(self, sentences: list[Sentence]) -> None:
        words = [s.words for s in sentences]
        tags, arcs = self._tagger.tag(words, self._batch_words)
        if self._arcs:
            arcs = self._arcs.parse(words, tags, self._batch_words)
        for i, sentence in enumerate(sentences):
            sentence.tags, sentence.arcs = tags[i], arcs[i] if arcs else None
        if self._parser is None:
            for sentence in sentences:  # tags that all languages share, because the labels of phrases come from them
                sentence.tags = [(upos, "") for upos, _ in sentence.tags]
                sentence.tree = flat_tree(len(sentence.words))
            return
        column = 1 if self._uses_xpos else 0
        tagged = [[(word, tag[column]) for word, tag in zip(s.words, s.tags, strict=True)] for s in sentences]
        for sentence, tree in zip(sentences, self._parser.parse(tagged, self._batch_words), strict=True):
            sentence.tree = tree
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
