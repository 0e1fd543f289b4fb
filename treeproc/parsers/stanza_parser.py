"""Stanza's tokeniser, tagger and constituency parser, offline, with one CPU thread or on one GPU."""

from collections.abc import Sequence

import torch

from treeproc.parsers import documents, shift_reduce, tagger, tokenizer
from treeproc.parsers.config import PARSED, ParserConfig
from treeproc.parsers.lines import Line, LineParser, Sentence, Token
from treeproc.parsers.models import ModelFiles, find_models

_CHARS_PER_WORD = 4  # of a batch; the tokeniser's states are smaller than the tagger's


class StanzaParser(LineParser):
    """Stanza's models: lean forms of them where they are known, else as Stanza runs them."""

    def __init__(self, config: ParserConfig):
        super().__init__(config)
        torch.set_num_threads(1)
        import stanza

        processors = stanza.Pipeline(**stanza_options(config, find_models(config))).processors
        tokenize, pos, constituency = (processors[name] for name in ("tokenize", "pos", "constituency"))
        if "mwt" not in processors and tokenizer.supports(tokenize.trainer, tokenize.config):
            longest = tokenize.config.get("max_seqlen", tokenize.MAX_SEQ_LENGTH_DEFAULT)
            self._tokenizer = tokenizer.Tokenizer(tokenize.trainer, tokenize.vocab, longest, config.split_sentences)
        else:
            names = [name for name in ("tokenize", "mwt") if name in processors]
            self._tokenizer = documents.DocumentTokenizer([processors[name] for name in names])
        if not config.dependencies and tagger.supports(pos.trainer.model):
            self._tagger = tagger.Tagger(pos.trainer.model.eval())
        else:
            names = ["pos", *(("lemma", "depparse") if config.dependencies else ())]
            self._tagger = documents.DocumentTagger([processors[name] for name in names], config.dependencies)
        model = constituency._model
        self._uses_xpos = model.uses_xpos()
        lean = shift_reduce.supports(model)
        self._parser = shift_reduce.ShiftReduceParser(model) if lean else documents.ObjectParser(model)

    def _sentences(self, lines: Sequence[Line]) -> list[list[Sentence]]:
        raw = [line.text for line in lines if line.words is None]
        split = iter(self._tokenizer.tokenize(raw, self._batch_words * _CHARS_PER_WORD))
        groups = []
        for line in lines:
            given = [[Token(start, end, (text,)) for start, end, text in line.words]] if line.words else []
            groups.append([Sentence(s) for s in (given if line.words is not None else next(split))])
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
        tags, arcs = self._tagger.tag([s.words for s in sentences], self._batch_words)
        for i, sentence in enumerate(sentences):
            sentence.tags, sentence.arcs = tags[i], arcs[i] if arcs else None
        column = 1 if self._uses_xpos else 0
        tagged = [[(word, tag[column]) for word, tag in zip(s.words, s.tags, strict=True)] for s in sentences]
        for sentence, tree in zip(sentences, self._parser.parse(tagged, self._batch_words), strict=True):
            sentence.tree = tree
            sentence.status = PARSED if tree else "flat_parser_failed"


def stanza_options(config: ParserConfig, models: ModelFiles) -> dict:
    """The arguments of `stanza.Pipeline` for these models, offline."""
    options: dict = {
        "lang": config.language,
        "dir": str(models.folder),
        "download_method": None,
        "use_gpu": config.torch_device().type == "cuda",
        "logging_level": "ERROR",
        "tokenize_no_ssplit": not config.split_sentences,
    }
    if models.origin == "shipped":
        return options | {
            "package": None,
            "processors": {name: "default" for name in models.files},
            "allow_unknown_language": True,
            "tokenize_model_path": str(models.files["tokenize"]),
            "pos_model_path": str(models.files["pos"]),
            "constituency_model_path": str(models.files["constituency"]),
            "constituency_pretrain_path": str(models.folder / "dummy.pretrain.pt"),
        }
    names = ["tokenize", "mwt", "pos", "constituency", *(("lemma", "depparse") if config.dependencies else ())]
    # A language without multi-word tokens has no such model.
    there = [name for name in names if name != "mwt" or (models.folder / config.language / name).is_dir()]
    return options | {"processors": ",".join(there)}
