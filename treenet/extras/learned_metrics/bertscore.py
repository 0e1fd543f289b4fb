"""BERTScore (Zhang et al., 2020): words match by the similarity of their contextual embeddings, not by their letters.

Every token of a translation is matched with the most similar token of the reference, by the cosine of their embeddings in one
layer of a masked language model. The mean of these similarities over the tokens of the translation is the precision. The mean
over the tokens of the reference, each matched with its most similar token of the translation, is the recall. The score is F1, the
harmonic mean of both.

The definition is that of the authors' package `bert-score`, with two differences. Padding never takes part in a match. In the
package, it has the similarity 0, so a negative similarity depends on the other lines of a batch. If all tokens of a line have
the weight 0, they count equally. In the package, the line scores 0.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treenet.data.batch import cut_batches
from treenet.evaluation.learned_metrics import SentenceScores, folder_sha256
from treenet.evaluation.settings import BertScoreConfig
from treenet.models.pretrained_folder import encoder_folder
from treeproc.common.errors import one_line, require
from treeproc.common.hub import TOKENIZER, HubModel, pin
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

Weights = dict[int, float]  # of tokens; a token that is not in it has `_UNSEEN`
_UNSEEN = -1
_TRIED = 64  # tokens of a line that tries an encoder
_TOLERANCE = 1e-4  # of states with and without padding, relative to the greatest
_LOCAL: Any = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class Match:
    """Precision, recall and F1 of one line, 0 to 1."""

    precision: float
    recall: float
    f1: float


class BertScorer:
    """Scores translations against references with an encoder.

    Raises UserError if the package is missing, or if the folder holds no encoder in safetensors. Also for several lines a batch,
    if padding changes the states of its encoder.
    """

    def __init__(self, config: BertScoreConfig, device: str = "cpu"):
        if config.model is None or config.layer is None:
            raise UserError("bertscore.model: give the folder of an encoder")
        self._config = config
        self._tokenizer, self._model = _load(_folder_of(config.model), config.layer)
        self._model.eval()
        self._prefix = _prefix_of(self._tokenizer)
        self._longest = _longest_input(self._tokenizer, self._model)
        self._special = {self._tokenizer.cls_token_id, self._tokenizer.sep_token_id}
        self.cut: set[str] = set()  # texts of which only the beginning counts
        if config.batch_tokens > 1 and self._sees_padding():
            raise UserError(
                f"bertscore.model: the states of a line in {config.model} change with the padding after it; add "
                "bertscore.batch_tokens=1, which reads each line alone"
            )
        self._model.to(device)  # only now: a GPU may round states of other shapes differently

    @torch.inference_mode()
    def _sees_padding(self) -> bool:
        """Return whether the states of a short line depend on a longer line beside it, as with ConvBERT."""
        begin, end = self._tokenizer.cls_token_id, self._tokenizer.sep_token_id
        short, long = (begin, end), (begin, *[end] * (min(self._longest, _TRIED) - 1))
        alone, beside = self._embed([short])[0][0], self._embed([short, long])[0][0, :2]
        return bool((alone - beside).abs().max() > _TOLERANCE * alone.abs().max())

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a line, with those of its begin and end; only these for a blank line."""
        text = text.strip()
        tokens = self._tokenizer(self._prefix + text if text else "", add_special_tokens=True, verbose=False)["input_ids"]
        if len(tokens) > self._longest:
            self.cut.add(text)
            tokens = [*tokens[: self._longest - 1], tokens[-1]]
        return tuple(tokens)

    def token_weights(self, references: Sequence[str]) -> Weights:
        """Return the weights of tokens: 1 each, or with `idf` the log of (lines + 1) / (lines with the token + 1)."""
        weights: Weights = {_UNSEEN: 1.0}
        if self._config.idf:
            lines = len(references)
            counts = Counter(token for line in references for token in set(self.encode(line)))
            weights = {_UNSEEN: math.log(lines + 1)} | {token: math.log((lines + 1) / (n + 1)) for token, n in counts.items()}
        return weights | dict.fromkeys(self._special, 0.0)

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[str, str]], weights: Weights) -> list[Match]:
        """Return the scores of pairs of a translation and a reference. A pair with a blank line scores 0."""
        tokens = {text: self.encode(text) for pair in pairs for text in pair}
        found: dict[tuple[str, str], Match] = {}
        for batch in _batches(list(dict.fromkeys(pairs)), tokens, self._config.batch_tokens):
            sides = [[tokens[pair[side]] for pair in batch] for side in (0, 1)]
            matches = match_greedily(*(part for side in sides for part in (*self._embed(side), self._weigh(side, weights))))
            found |= dict(zip(batch, matches, strict=True))
        return [found[pair] if all(map(str.strip, pair)) else Match(0.0, 0.0, 0.0) for pair in pairs]

    def _embed(self, lines: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states [B, T, D] and the mask [B, T] of real tokens."""
        width = max(map(len, lines))
        ids = torch.tensor(
            [[*line, *[self._tokenizer.pad_token_id] * (width - len(line))] for line in lines], device=self._model.device
        )
        is_token = torch.tensor([[place < len(line) for place in range(width)] for line in lines], device=self._model.device)
        found = self._model(input_ids=ids, attention_mask=is_token.long(), output_hidden_states=True)
        return found.hidden_states[self._config.layer], is_token

    def _weigh(self, lines: Sequence[tuple[int, ...]], weights: Weights) -> torch.Tensor:
        """Return weights [B, T], which are 0 for padding and sum to 1 in every line."""
        width, rows = max(map(len, lines)), []
        for line in lines:
            row = [weights.get(token, weights[_UNSEEN]) for token in line]
            row = row if sum(row) else [float(token not in self._special) for token in line]
            rows.append([value / (sum(row) or 1.0) for value in row] + [0.0] * (width - len(line)))
        return torch.tensor(rows, device=self._model.device)


def match_greedily(
    states: torch.Tensor,
    is_token: torch.Tensor,
    weights: torch.Tensor,
    ref_states: torch.Tensor,
    ref_is_token: torch.Tensor,
    ref_weights: torch.Tensor,
) -> list[Match]:
    """Match each token with the most similar one of the other side.

    Of B translations: states [B, T, D], the mask [B, T] of real tokens, and their weights [B, T]; then the same of B references.
    """
    similarity = torch.einsum("btd,brd->btr", *(torch.nn.functional.normalize(one, dim=-1) for one in (states, ref_states)))
    nothing = torch.finfo(similarity.dtype).min
    best = similarity.masked_fill(~ref_is_token[:, None], nothing).amax(2)
    ref_best = similarity.masked_fill(~is_token[:, :, None], nothing).amax(1)
    # Padding has the weight 0.
    precision, recall = (best * weights).sum(1).tolist(), (ref_best * ref_weights).sum(1).tolist()
    return [Match(p, r, 2 * p * r / (p + r) if p + r else 0.0) for p, r in zip(precision, recall, strict=True)]


def bert_scores(
    config: BertScoreConfig, systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]], device: str = "cpu"
) -> SentenceScores:
    """Return BERTScore F1 of every line of every system, times 100. With several references, the best one of a line counts."""
    scorer = BertScorer(config, device)
    weights = scorer.token_weights([line for one in references for line in one])
    pairs = [(line, refs[row]) for lines in systems for row, line in enumerate(lines) for refs in references]
    matches = scorer.score(pairs, weights)
    parts = np.array([[match.precision, match.recall, match.f1] for match in matches])
    precision, recall, f1 = 100 * parts.reshape(len(systems), -1, len(references), 3).max(2).transpose(2, 0, 1)
    assert config.model is not None  # BertScorer has refused it
    place = pin("bertscore.model", config.model)
    if isinstance(place, HubModel):
        state = f"revision:{str(place.revision)[:8]}"
    else:
        state = f"sha256:{folder_sha256(Path(str(place)))[:8]}"
    idf = "yes" if config.idf else "no"
    signature = f"nrefs:{len(references)}|model:{place.name}|{state}|layer:{config.layer}|idf:{idf}|F1 times 100"
    details = {"precision": precision.mean(1).tolist(), "recall": recall.mean(1).tolist()}
    return SentenceScores(f1, signature, len(scorer.cut), details)


def check_bertscore(config: BertScoreConfig) -> None:
    """Raise UserError if the package or the encoder is missing, or if it has not so many layers. The weights are not read."""
    require("transformers", "bertscore.model")
    if config.model is None or config.layer is None or not ((folder := _folder_of(config.model)) / "config.json").is_file():
        raise UserError(f"bertscore.model: {config.model} must be a folder with an encoder, but has no config.json")
    _check_encoder(folder, config.layer)


def _folder_of(place: AnyPath | HubModel) -> Path:
    return encoder_folder(place, "bertscore.model", TOKENIZER)


def _check_encoder(folder: Path, layer: int) -> int:
    """Return the number of the encoder's layers. Raises UserError if the folder describes no encoder of so many layers."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        if config.is_encoder_decoder or config.get_text_config() is not config:
            raise ValueError(f"a model of the type {config.model_type} is not a plain encoder")
        if layer > config.num_hidden_layers:
            raise ValueError(f"layer must be at most {config.num_hidden_layers}, but is {layer}")
        return int(config.num_hidden_layers)
    except Exception as error:  # transformers raises any kind on damaged files
        raise _cannot_load(folder, error) from None


def _cannot_load(folder: Path, error: Exception) -> UserError:
    return UserError(f"bertscore.model: cannot load {folder}: {one_line(f'{error}', 300)}")


def _load(folder: Path, layer: int) -> tuple[Any, Any]:
    """Load tokeniser and encoder up to the layer after `layer`, from files in the folder alone. Nothing in them is executed."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # One layer more: after their last one, some encoders have a norm, which the states of an inner layer must not have.
    layers = min(layer + 1, _check_encoder(folder, layer))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
        model, report = AutoModel.from_pretrained(
            folder, num_hidden_layers=layers, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **_LOCAL
        )
    except Exception as error:
        raise _cannot_load(folder, error) from None
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise UserError(f"bertscore.model: the weights of {folder} lack {missing[0]} and {len(missing) - 1} more")
    if None in (tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id):
        raise UserError(f"bertscore.model: the tokeniser of {folder} must have tokens for padding, begin and end of a line")
    return tokenizer, model


def _prefix_of(tokenizer: Any) -> str:
    """Return the blank that tokenisers of bytes need before the first word, so that it is encoded as inside of a line."""
    from transformers import GPT2Tokenizer, RobertaTokenizer

    return " " if isinstance(tokenizer, GPT2Tokenizer | RobertaTokenizer) else ""


def _longest_input(tokenizer: Any, model: Any) -> int:
    """Return the largest number of tokens. RoBERTa and its relatives do not use the first positions of their table."""
    positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if (padding := getattr(table, "padding_idx", None)) is not None:
        positions -= padding + 1
    return min(positions, tokenizer.model_max_length)


def _batches(pairs: Sequence[tuple[str, str]], tokens: dict[str, tuple[int, ...]], most: int) -> list[list[tuple[str, str]]]:
    """Cut pairs into batches of similar lengths, with at most `most` padded tokens on each side, or one pair."""
    lengths = {pair: max(len(tokens[text]) for text in pair) for pair in pairs}
    ordered = sorted(pairs, key=lambda pair: lengths[pair])
    starts = cut_batches(np.array([lengths[pair] for pair in ordered], dtype=np.int64), most)
    return [ordered[start:stop] for start, stop in pairwise(starts.tolist())]
