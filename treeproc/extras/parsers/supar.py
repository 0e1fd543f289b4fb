"""Constituents and arcs of SuPar over the words of a spaCy pipeline."""

import re
from pathlib import Path
from typing import Any

from treeproc.common.errors import UserError, one_line
from treeproc.common.files import check_archive
from treeproc.extras.parsers.spacy import SpacyParser, span_tree
from treeproc.parsers.config import ParserConfig
from treeproc.parsers.lines import Sentence, batches, is_out_of_memory

_FILES = {"constituency": "constituency.pt", "dependencies": "depparse.pt"}
_HINT = "give a file that SuPar 1.1 wrote, of a model without transformers"
_ENDS = {"(": "-LRB-", ")": "-RRB-"}


class SuparParser(SpacyParser):
    """Trees and arcs of SuPar; tags are those of the pipeline."""

    def __init__(self, config: ParserConfig):
        super().__init__(config)
        assert config.models is not None  # `ParserConfig` asks for it
        wanted = {name: config.models / file for name, file in _FILES.items() if getattr(config, name)}
        if missing := [path.name for path in wanted.values() if not path.is_file()]:
            raise UserError(
                f"parser.models: {config.models} has no {', '.join(missing)}; put SuPar's files there with these names"
            )
        self._parsers = {name: load_supar(config, path, name) for name, path in wanted.items()}

    def _parse(self, sentences: list[Sentence]) -> None:
        order = sorted(sentences, key=lambda sentence: len(sentence.words))
        for batch in batches([len(sentence.words) for sentence in order], self._batch_words):
            chosen = [order[i] for i in batch]
            words = [[_plain(word) for word in sentence.words] for sentence in chosen]
            if trees := self._parsers.get("constituency"):
                for sentence, tree in zip(chosen, _predict(trees, words).trees, strict=True):
                    sentence.tree = span_tree(tree)[0]
            else:
                super()._parse(chosen)
            if arcs := self._parsers.get("dependencies"):
                predicted = _predict(arcs, words, tree=True)
                for sentence, heads, relations in zip(chosen, predicted.arcs, predicted.rels, strict=True):
                    sentence.arcs = [(int(head) - 1, relation) for head, relation in zip(heads, relations, strict=True)]


def _predict(parser: Any, words: list[list[str]], **options: Any) -> Any:
    """Predict one batch of one bucket. Other batches would be drawn at random, and sums of float32 depend on the batch."""
    return parser.predict([list(w) for w in words], buckets=1, batch_size=10**9, verbose=False, **options)


def _plain(word: str) -> str:
    """Return a word that SuPar's formats can hold: brackets within words and blanks would end it."""
    return word if word in _ENDS else re.sub(r"\s", "_", word.replace("(", "-LRB-").replace(")", "-RRB-"))


def load_supar(config: ParserConfig, path: Path, kind: str) -> Any:
    """Load a parser of SuPar on the device of the settings. Raises UserError for other files."""
    import torch

    torch.set_num_threads(1)
    state = read_supar(path)
    try:
        import supar
        from supar.utils.field import Field

        parser_class, args = supar.PARSER[state["name"]], state["args"]
        if ("constituency" in state["name"]) != (kind == "constituency") or "semantic" in state["name"]:
            raise UserError(f"{path} is SuPar's {state['name']}, which does not parse {kind}; {_HINT}")
        if args.encoder != "lstm" or set(args.feat) - {"char"}:
            raise UserError(f"{path} reads other input than words and characters ({args.encoder}, {args.feat}); {_HINT}")
        args.device = config.torch_device().type
        Field.device = args.device  # SuPar's batches go to a GPU whenever there is one
        model = parser_class.MODEL(**args)
        model.load_pretrained(state["pretrained"])
        loaded = model.load_state_dict(state["state_dict"], strict=False)
        # The table of pretrained vectors is stored separately in the file.
        if wrong := sorted({*loaded.missing_keys, *loaded.unexpected_keys} - {"pretrained.weight"}):
            raise UserError(f"{path} is damaged: its weights do not fit the model: {', '.join(wrong[:3])}; {_HINT}")
        parser = parser_class(args, model.to(args.device), state["transform"])
        _predict(parser, [["A", "dog", "barks", "."]])
    except UserError:
        raise
    except Exception as error:  # any kind of error, for a file that is no model of SuPar
        if is_out_of_memory(error):
            raise
        message = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"SuPar cannot load {path} ({message}); {_HINT}") from None
    return parser


class _Dropped:
    """A placeholder for code in a file. It creates and runs nothing, and no prediction needs it."""

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_supar(path: Path) -> dict:
    """Load a file of SuPar. It is a pickle with code, which SuPar itself would run; here only tables and settings are read.

    Raises UserError for anything that SuPar does not write.
    """
    import torch
    from supar.utils import Config, field, transform, vocab

    kinds = [Config, vocab.Vocab, field.RawField, field.Field, field.SubwordField, field.ChartField]
    code = [(_Dropped, f"dill._dill.{name}") for name in ("_create_function", "_create_code")]
    named: list[tuple[Any, str]] = [(_Dropped, "supar.utils.transform.__dict__"), (_plain_type, "dill._dill._load_type")]
    check_archive(path, _HINT)
    try:
        with torch.serialization.safe_globals([*kinds, transform.Tree, transform.CoNLL, _Dropped, *code, *named]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch and pickle raise any kind of error on damaged files
        message = one_line(f"{type(error).__name__}: {error}", 150)
        raise UserError(f"{path} is damaged, or holds more than SuPar's tables ({message}); {_HINT}") from None


def _plain_type(name: str) -> type:
    """Return the type for dill's name of a type."""
    return {"set": set}.get(name, _Dropped)
