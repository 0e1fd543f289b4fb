"""Constituents of the Berkeley Neural Parser (benepar) over the words of a spaCy pipeline."""

from pathlib import Path
from typing import Any

from treeproc.common.errors import UserError, one_line
from treeproc.common.files import load_archive, read_json
from treeproc.extras.parsers.spacy import SpacyParser, spaces_after, span_tree
from treeproc.parsers.config import ParserConfig
from treeproc.parsers.lines import Sentence, batches, is_out_of_memory

_WEIGHTS = "benepar_model.bin"
_HINT = "give the unpacked folder of a benepar model, or the file that its training wrote"
_NO_TAG = "UNK"  # of models without tags


class BeneparParser(SpacyParser):
    """Trees of benepar, and its tags if the model predicts them. Arcs are those of the pipeline."""

    def __init__(self, config: ParserConfig):
        super().__init__(config)
        self._parser = load_benepar(config)

    def _parse(self, sentences: list[Sentence]) -> None:
        from benepar import InputSentence
        from benepar.ptb_unescape import ptb_unescape

        order = sorted(sentences, key=lambda sentence: len(sentence.words))
        for batch in batches([len(sentence.words) for sentence in order], self._batch_words):
            chosen = [order[i] for i in batch]
            # It reads words as in running text: plain quotation marks, and the places of blanks.
            inputs = [InputSentence(words=ptb_unescape(s.words), space_after=spaces_after(s.tokens)) for s in chosen]
            self._parser.batch_size = len(chosen)
            for sentence, tree in zip(chosen, self._parser.parse_sents(inputs), strict=True):
                sentence.tree, tags = span_tree(tree)
                pairs = zip(sentence.tags, tags, strict=True)
                sentence.tags = [(upos, xpos if tag == _NO_TAG else tag) for (upos, xpos), tag in pairs]


def load_benepar(config: ParserConfig) -> Any:
    """Load a `benepar.Parser` on the device of the settings. Nothing is downloaded; no pickle and no code of the files runs.

    Raises UserError for files that are not a benepar model.
    """
    import torch

    torch.set_num_threads(1)
    assert config.models is not None  # `ParserConfig` asks for it
    _check(config.models)
    device = config.torch_device()
    try:
        import benepar

        _complete_transformers()
        parser = benepar.Parser(str(config.models))
        parser._parser.to(device)
        parser.parse(benepar.InputSentence(words=["A", "dog", "barks", "."], space_after=[True, True, False, False]))
    except Exception as error:  # benepar and transformers raise any kind of error on other files
        if is_out_of_memory(error):
            raise
        message = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"benepar cannot load {config.models} ({message}); {_HINT}") from None
    return parser


def _complete_transformers() -> None:
    """Add a method that benepar 0.2 calls and transformers 5 lacks: the special pieces around a text."""
    from transformers import PreTrainedTokenizerBase

    def build_inputs_with_special_tokens(self: Any, ids: list[int]) -> list[int]:
        encoded = self("a", return_special_tokens_mask=True)
        pieces, special = encoded["input_ids"], encoded["special_tokens_mask"]
        return pieces[: special.index(0)] + ids + pieces[len(special) - special[::-1].index(0) :]

    if not hasattr(PreTrainedTokenizerBase, "build_inputs_with_special_tokens"):
        PreTrainedTokenizerBase.build_inputs_with_special_tokens = build_inputs_with_special_tokens


def _check(models: Path) -> None:
    """Raise UserError for files with pickles, with code beside them, or that need other files from a network."""
    if models.is_dir():
        load_archive(models / _WEIGHTS, _HINT)
        for path in sorted(models.glob("*.json")):
            settings = read_json(path, _HINT)
            if "auto_map" in settings:
                raise UserError(f"{path} names additional code (auto_map), which this program does not run; {_HINT}")
        return
    content = load_archive(models, _HINT)
    try:
        needs_more = content["config"]["hparams"]["use_pretrained"]
    except (TypeError, KeyError):
        raise UserError(f"{models} is not a benepar model; {_HINT}") from None
    if needs_more:
        raise UserError(f"{models} needs a pretrained model from elsewhere, and this program downloads nothing; {_HINT}")
