"""Training of Stanza's tokeniser: the label of every character of a line, from words and the blanks between them.

Labels are Stanza's: 0 continues, 1 ends a token, 2 ends a sentence. B lines, C characters of the longest.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from stanza.models.tokenization.data import PER_CHAR_FEAT_FUNCS
from stanza.models.tokenization.model import Tokenizer as StanzaTokenizer
from stanza.models.tokenization.vocab import Vocab
from stanza.models.tokenizer import build_argparse
from torch import Tensor
from torch.nn import functional as F

from treeproc.extras.parser_training.config import TOKENIZER_CONSTANTS as FIXED
from treeproc.extras.parser_training.config import TokenizerSettings
from treeproc.extras.parser_training.layers import both_ways, replace_dropout, save_halved
from treeproc.parsers.lines import longest_first
from treeproc.parsers.tokenizer import LONGEST_TOKEN, Tokenizer
from treeproc.parsers.weights import Vocabulary, Weights, tensors_of

GOES_ON, ENDS_TOKEN, ENDS_SENTENCE = 0, 1, 2
_NO_LABEL = -1
_FEATURES = ["space_before", "capitalized", "numeric", "end_of_para", "start_of_para"]
_DASHES = ["–", "—", "--"]
_EVALUATION_CHARS = 16_384


class Spaced(NamedTuple):
    """A sentence, and whether a blank follows its words."""

    words: Sequence[str]
    space_after: Sequence[bool]


class LabelledLine(NamedTuple):
    text: str
    labels: np.ndarray


def line_of(sentences: Sequence[Spaced], spaced: bool = False) -> LabelledLine:
    """Join sentences with blanks to one line of labelled characters; with `spaced`, a blank stands between all words."""
    text, labels = [], []
    for words, space_after in sentences:
        for word, space in zip(words, space_after, strict=True):
            text.append(word)
            labels += [GOES_ON] * (len(word) - 1) + [ENDS_TOKEN]
            if space or spaced:
                text.append(" ")
                labels.append(GOES_ON)
        if text[-1] != " ":
            text.append(" ")
            labels.append(GOES_ON)
        labels[-2] = ENDS_SENTENCE
    return LabelledLine("".join(text[:-1]), np.array(labels[:-1]))


class TokenizerLearner:
    """Learns from lines of some neighbouring sentences.

    The mean F1 of tokens and of sentences on the dev sets decides.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Spaced]],
        dev: Mapping[str, Sequence[Spaced]],
        settings: TokenizerSettings,
        seed: int,
    ):
        self.settings, self._sources, self._dev, self._seed = settings, sources, dev, seed
        texts = [line_of(source).text for source in sources]
        self.vocab = Vocab([[(c, None) for c in text] for text in [*texts, *_DASHES]], "en")
        args = vars(build_argparse().parse_args([])) | settings.model_dump(include={"hidden_dim", "dropout"})
        args |= {"feat_funcs": _FEATURES, "feat_dim": len(_FEATURES), "vocab_size": len(self.vocab), "use_mwt": False}
        args |= {"lang": "en", "shorthand": "en", "use_dictionary": False, "hierarchical": True}
        args |= {"conv_res": None, "rnn_layers": 1, "emb_dim": FIXED["emb_dim"]}
        self.args = args
        torch.manual_seed(seed)
        self.model = StanzaTokenizer(
            args, len(self.vocab), args["emb_dim"], args["hidden_dim"], dropout=args["dropout"], feat_dropout=args["feat_dropout"]
        )
        replace_dropout(self.model)
        characters = self.vocab.unmap(range(len(self.vocab)))
        self._features = np.array([_features(c) if len(c) == 1 else [0] * 3 for c in characters], np.float32)

    def batches(self, epoch: int) -> list[list[LabelledLine]]:
        """Return batches of lines of about one length, in random order."""
        rng = np.random.default_rng([self._seed, epoch])
        lines = [line for source in self._sources for line in self._lines(source, rng)]
        lines = [lines[i] for i in rng.permutation(len(lines))]
        out = list(longest_first([len(line.text) + 1 for line in lines], self.settings.batch_chars))
        return [[lines[k] for k in out[i]] for i in rng.permutation(len(out))]

    def _lines(self, source: Sequence[Spaced], rng: np.random.Generator) -> list[LabelledLine]:
        out, start = [], 0
        while start < len(source):
            count = int(rng.choice(self.settings.sentences))
            sentences = source[start : start + count]
            start += count
            if rng.random() < FIXED["dashes"]:
                sentences = [_with_dashes(sentence, rng) for sentence in sentences]
            sentences = [
                _without_final_mark(sentence) if rng.random() < FIXED["drop_final_punct"] else sentence for sentence in sentences
            ]
            text, labels = line_of(sentences, bool(rng.random() < FIXED["spaced"]))
            out.append(LabelledLine(text[: self.settings.max_chars], labels[: self.settings.max_chars]))
        return out

    def loss(self, batch: list[LabelledLine]) -> Tensor:
        """Return the mean cross entropy of the labels (Stanza's loss)."""
        units, features, labels = self.arrays(batch)
        unknown = np.random.random(units.shape) < FIXED["unit_dropout"]
        units[unknown & (labels.numpy() != _NO_LABEL)] = self.vocab.unit2id("<UNK>")
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.precision == "bf16"):
            scores = self._scores(units, features, torch.tensor([len(line.text) + 1 for line in batch]))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=_NO_LABEL)

    def _scores(self, units: Tensor, features: Tensor, sizes: Tensor) -> Tensor:
        """Return log probabilities of the labels, [B, C + 1, 3]: the model's own `forward` on padded rows."""
        model = self.model
        x = torch.cat([model.dropout(model.embeddings(units)), model.dropout_feat(features)], 2)
        x = model.dropout(both_ways(model.rnn, x, sizes))
        token, sentence = model.tok_clf(x), model.sent_clf(x)
        # The second layer gets little input from places that are surely inside a token.
        outside = 1 - model.toknoise(torch.sigmoid(-token * self.args["hier_invtemp"]))
        x = model.dropout(both_ways(model.rnn2, x * outside, sizes))
        token, sentence = (token + model.tok_clf2(x)).float(), (sentence + model.sent_clf2(x)).float()
        ends = F.logsigmoid(token)
        return torch.cat([F.logsigmoid(-token), ends + F.logsigmoid(-sentence), ends + F.logsigmoid(sentence)], 2)

    def arrays(self, batch: Sequence[LabelledLine]) -> tuple[Tensor, Tensor, Tensor]:
        """Return units [B, C + 1], features [B, C + 1, 5], labels [B, C + 1] of lines, longest first. Padding ends every line."""
        shape = len(batch), len(batch[0].text) + 1
        units = np.full(shape, self.vocab.unit2id("<PAD>"))
        labels = np.full(shape, _NO_LABEL)
        features = np.zeros((*shape, len(_FEATURES)), np.float32)
        for i, line in enumerate(batch):
            size = len(line.text)
            units[i, :size] = self.vocab.map(line.text)
            labels[i, :size] = line.labels
            features[i, :size, :3] = self._features[units[i, :size]]
            features[i, size - 1, 3] = features[i, 0, 4] = 1
        return torch.from_numpy(units), torch.from_numpy(features), torch.from_numpy(labels)

    def evaluate(self) -> dict[str, float]:
        """Return F1 in percent of tokens of lines of one sentence, and of sentences of lines of three, on every dev set."""
        scores = {}
        for name, sentences in self._dev.items():
            scores[f"{name}_tokens"], scores[f"{name}_sentences"] = self.score(sentences)
        return scores | {"score": float(np.mean(list(scores.values())))}

    def score(self, sentences: Sequence[Spaced]) -> tuple[float, float]:
        """Return F1 of tokens, F1 of sentences; see `evaluate`."""
        weights = Weights(tensors_of(self.model.eval().state_dict()), self.args, {"char": Vocabulary(vars(self.vocab))})
        found = Tokenizer(weights, LONGEST_TOKEN, split_sentences=False)
        single = [line_of([sentence]) for sentence in sentences]
        lines = found.tokenize([line.text for line in single], _EVALUATION_CHARS)
        tokens = [[(token.start, token.end) for sentence in line for token in sentence] for line in lines]
        found = Tokenizer(weights, LONGEST_TOKEN, split_sentences=True)
        joined = [line_of(sentences[i : i + 3]) for i in range(0, len(sentences), 3)]
        lines = found.tokenize([line.text for line in joined], _EVALUATION_CHARS)
        breaks = [[(sentence[0].start, sentence[-1].end) for sentence in line] for line in lines]
        return f1(map(spans, single), tokens), f1((spans(line, ENDS_SENTENCE) for line in joined), breaks)

    def save(self, path: Path) -> None:
        """Save in Stanza's format, weights in half precision: for `stanza.Pipeline(tokenize_model_path=...)`."""
        save_halved(path, self.model, vocab=self.vocab.state_dict(), lexicon=None, external_dict=None, config=self.args)


def spans(line: LabelledLine, least: int = ENDS_TOKEN) -> list[tuple[int, int]]:
    """Return [start, end) of the pieces of a line that end at labels of `least` or more, without the blanks before them."""
    out, start = [], 0
    for last in np.flatnonzero(line.labels >= least).tolist():
        piece = line.text[start : last + 1]
        out.append((start + len(piece) - len(piece.lstrip()), last + 1))
        start = last + 1
    return out


def _with_dashes(sentence: Spaced, rng: np.random.Generator) -> Spaced:
    """Replace commas by dashes. Treebanks have few dashes, and almost none without blanks."""
    words, space_after = list(sentence.words), list(sentence.space_after)
    for i, word in enumerate(words):
        if word == "," and 0 < i < len(words) - 1:
            words[i] = str(rng.choice(_DASHES))
            space_after[i - 1], space_after[i] = rng.random(2) < 0.5
    return Spaced(words, space_after)


def _without_final_mark(sentence: Spaced) -> Spaced:
    """Remove a final mark of one character directly after a word."""
    words, space_after = sentence
    ends_in_mark = len(words) > 1 and len(words[-1]) == 1 and not words[-1].isalnum() and not space_after[-2]
    return Spaced(words[:-1], space_after[:-1]) if ends_in_mark else sentence


def f1(gold: Iterable[list[tuple[int, int]]], found: Iterable[list[tuple[int, int]]]) -> float:
    """Return F1 in percent of pairs over lines."""
    right = total = 0
    for a, b in zip(gold, found, strict=True):
        right += len(set(a) & set(b))
        total += len(a) + len(b)
    return 200 * right / total


def _features(character: str) -> list[int]:
    return [PER_CHAR_FEAT_FUNCS[name](character) for name in _FEATURES[:3]]
