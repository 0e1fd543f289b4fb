"""Training of Stanza's part-of-speech tagger (UPOS, XPOS) on batches laid out for speed.

The model, the vocabularies and the loss are Stanza's. The computation differs. The character LSTM reads every distinct word of a
batch once. Sentences of about one length share a padded batch. Each direction of the word LSTM is one call. The bilinear XPOS
scores are computed for the few UPOS tags, not for every word. On one thread this gives about five times as many words per second
as Stanza's own trainer.

Shapes: B sentences, L words of the longest, D inputs of the word LSTM, N words of the batch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from stanza.models.common.vocab import UNK_ID, CharVocab
from stanza.models.pos.model import Tagger as StanzaTagger
from stanza.models.pos.tag_columns import tag_columns_from_args, tag_columns_to_config
from stanza.models.pos.vocab import FeatureVocab, MultiVocab, WordVocab
from stanza.models.tagger import build_argparse
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from treeproc.extras.parser_training.config import TAGGER_CONSTANTS as FIXED
from treeproc.extras.parser_training.config import TaggerSettings
from treeproc.extras.parser_training.layers import dropout, highway, save_halved, spell, start_words
from treeproc.extras.parser_training.treebank import Tagged
from treeproc.parsers.lines import Tags
from treeproc.parsers.tagger import Tagger, simplify_marks
from treeproc.parsers.weights import Weights, with_one
from treeproc.trees.scores import Share, tag_accuracy

_PAD = -1
_EVALUATION_WORDS = 4096
_SAMPLE = 500  # sentences on which noise is measured
_MOST_NOISE = 1.0  # share of the training's dropout


class Source(NamedTuple):
    """Sentences of one treebank, and the share of them that an epoch draws."""

    sentences: Sequence[Tagged]
    share: float = 1.0


class TaggerLearner:
    """Learns from all sources at once. It is scored on every dev set, and the mean XPOS accuracy decides."""

    def __init__(
        self,
        sources: Sequence[Source],
        dev: Mapping[str, Sequence[Tagged]],
        settings: TaggerSettings,
        seed: int,
        unlabelled: Iterable[Sequence[str]] = (),
    ):
        """Take further sentences, `unlabelled`, for the initial word embeddings."""
        self.settings, self._dev, self._seed, self._noise = settings, dev, seed, 1.0
        sentences = with_upos([sentence for source in sources for sentence in source.sentences])
        ends = np.cumsum([len(source.sentences) for source in sources])
        self._ranges = [(end - len(s.sentences), end, s.share) for end, s in zip(ends.tolist(), sources, strict=True)]
        self._build(sentences)
        self._encode(sentences)
        start_words(self.model.word_emb, self.vocab["word"], [*(sentence.words for sentence in sentences), *unlabelled], seed)

    def _build(self, sentences: list[Tagged]) -> None:
        """Build Stanza's vocabularies and model."""
        data = [[[simplify_marks(word), upos, xpos, "_"] for word, upos, xpos in zip(*s, strict=True)] for s in sentences]
        settings = self.settings
        args = vars(build_argparse().parse_args([])) | settings.model_dump(include={"hidden_dim", "word_cutoff", "dropout"})
        args |= {name: FIXED[name] for name in ("char_hidden_dim", "word_emb_dim", "word_dropout")}
        args |= {"char_emb_dim": 50, "deep_biaff_hidden_dim": 128, "composite_deep_biaff_hidden_dim": 64, "pretrain": False}
        args |= {"rec_dropout": 0, "char_rec_dropout": 0, "charlm": False, "shorthand": "en"}
        # Characters that occur once are left out, as examples of unknown ones.
        self.vocab = MultiVocab(
            {
                "char": CharVocab(data, "en", cutoff=2),
                "word": WordVocab(data, "en", cutoff=settings.word_cutoff, lower=True),
                "upos": WordVocab(data, "en", idx=1),
                "xpos": WordVocab(data, "en", idx=2, ignore=["_"]),
                "feats": FeatureVocab(data, "en", idx=3),
            }
        )
        torch.manual_seed(self._seed)
        self.model = StanzaTagger(args, self.vocab)
        self.args = args

    def _encode(self, sentences: list[Tagged]) -> None:
        """Encode sentences as arrays of distinct forms and tags; forms are rows of characters."""
        forms = [list(map(simplify_marks, s.words)) for s in sentences]
        ids: dict[str, int] = {}
        self._forms = [np.array([ids.setdefault(form, len(ids)) for form in row]) for row in forms]
        self._upos = [np.array(self.vocab["upos"].map(s.upos)) for s in sentences]
        self._xpos = [np.array(self.vocab["xpos"].map(s.xpos)) for s in sentences]
        self._sizes = np.array([len(s.words) for s in sentences])
        self._word_of_form = torch.tensor(self.vocab["word"].map(ids))
        counts = Counter(form.lower() for row in forms for form in row)
        rare = FIXED["unknown_word"]
        self._unknown = torch.tensor([rare / (rare + counts[form.lower()]) for form in ids])
        self._form_sizes = torch.tensor([len(form) for form in ids])
        self._characters = pad_sequence([torch.tensor(self.vocab["char"].map(form)) for form in ids], batch_first=True)
        self._punct = self.vocab["upos"].unit2id("PUNCT")

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Return batches of indices of sentences of about one length, in random order."""
        rng = np.random.default_rng([self._seed, epoch])
        drawn = [rng.permutation(np.arange(a, b))[: max(1, round(share * (b - a)))] for a, b, share in self._ranges]
        order = rng.permutation(np.concatenate(drawn))
        order = order[np.argsort(self._sizes[order], kind="stable")]
        out, start = [], 0
        for stop in range(1, len(order) + 1):
            if stop == len(order) or (stop + 1 - start) * self._sizes[order[stop]] > self.settings.batch_words:
                out.append(order[start:stop])
                start = stop
        return [out[i] for i in rng.permutation(len(out))]

    def loss(self, batch: np.ndarray) -> Tensor:
        """Return the mean cross entropy of UPOS plus that of XPOS given the true UPOS (Stanza's loss)."""
        self._set_noise(1.0)
        sizes = self._sizes[batch]
        ends_in_punct = np.array([self._upos[i][-1] == self._punct for i in batch])
        sizes = sizes - (ends_in_punct & (sizes > 1) & (np.random.random(len(batch)) < FIXED["drop_final_punct"]))
        forms, upos, xpos = (_padded([rows[i] for i in batch], sizes) for rows in (self._forms, self._upos, self._xpos))
        states = self._states(forms, torch.from_numpy(sizes))
        there = forms != _PAD
        upos_scores, xpos_scores = self._scores(states[there], upos[there])
        return F.cross_entropy(upos_scores, upos[there]) + F.cross_entropy(xpos_scores, xpos[there])

    def _states(self, forms: Tensor, sizes: Tensor) -> Tensor:
        """Return states of the word LSTM, [B, L, 2 hidden], from the indices of forms, [B, L]."""
        model = self.model
        distinct, place = forms.clamp(min=0).unique(return_inverse=True)
        words = self._word_of_form[distinct][place]
        words = words.masked_fill(torch.rand(words.shape) < self._noise * self._unknown[distinct][place], UNK_ID)
        spelled = spell(model.charmodel, self._characters[distinct], self._form_sizes[distinct], self._drop)
        spelled = model.trans_char(self._drop(spelled))
        x = torch.cat([model.word_emb(words), spelled[place]], 2)
        x = self._drop(model.worddrop(x, model.drop_replacement))
        return highway(model.taggerlstm, x, sizes, model.taggerlstm_h_init, model.taggerlstm_c_init, self._drop)

    def _scores(self, states: Tensor, upos: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return scores of UPOS and, given UPOS (else that of the highest score), of XPOS: [N, tags] each."""
        model, drop = self.model, self._drop
        upos_scores = model.upos_clf(drop(torch.relu(model.upos_hid(drop(states)))))
        upos = upos_scores.argmax(1) if upos is None else upos
        hidden = with_one(drop(torch.relu(model.tag_hid["xpos"](drop(states)))))
        # One dropout mask per tag and batch; Stanza has one per word.
        parents = with_one(drop(model.upos_emb.weight))
        form = model.tag_clf["xpos"].W_bilin
        table = torch.einsum("tij,uj->iut", form.weight, parents).flatten(1)
        scores = (hidden @ table).view(len(states), len(parents), -1)
        return upos_scores, scores[torch.arange(len(states)), upos] + form.bias

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self._noise * self.settings.dropout)

    def _set_noise(self, share: float) -> None:
        """Set all dropout to this share of the training's dropout."""
        self._noise = share
        self.model.worddrop.dropprob = share * FIXED["word_dropout"]

    def noisy_tags(self, source: int, accuracy: float, copies: int) -> list[list[list[str]]]:
        """Return several XPOS taggings of the training sentences of a source, with the error rate of unseen text.

        The tagger has learnt its training sentences. A parser trained on those tags would trust tags too much. Here the tagger
        reads the sentences with dropout. The dropout is scaled to bring the accuracy down to `accuracy` percent.
        """
        start, end, _ = self._ranges[source]
        sample = np.random.default_rng(self._seed).permutation(np.arange(start, end))[:_SAMPLE]
        low, high = 0.0, _MOST_NOISE
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (middle, high) if self._accuracy(sample, middle) > accuracy else (low, middle)
        names = self.vocab["xpos"]
        everything = np.arange(start, end)
        return [[names.unmap(row) for row in self._noisy(everything, (low + high) / 2, copy)] for copy in range(copies)]

    def _accuracy(self, sentences: np.ndarray, noise: float) -> float:
        rows = self._noisy(sentences, noise, 0)
        right = sum((row == self._xpos[i]).sum() for i, row in zip(sentences, rows, strict=True))
        return 100 * right / self._sizes[sentences].sum()

    @torch.no_grad()
    def _noisy(self, sentences: np.ndarray, noise: float, copy: int) -> list[np.ndarray]:
        """Return XPOS of the given sentences, tagged with noise. Every copy has different noise."""
        torch.manual_seed(self._seed + copy)
        np.random.seed(self._seed + copy)
        self.model.train()
        self._set_noise(noise)
        order = np.argsort(self._sizes[sentences], kind="stable")
        out: list[np.ndarray] = [np.empty(0)] * len(sentences)
        for batch in np.array_split(order, max(1, int(self._sizes[sentences].sum()) // _EVALUATION_WORDS)):
            numbers = sentences[batch]
            forms = _padded([self._forms[i] for i in numbers], self._sizes[numbers])
            states = self._states(forms, torch.from_numpy(self._sizes[numbers]))
            tags = self._scores(states[forms != _PAD])[1].argmax(1).numpy()
            for i, row in zip(batch, np.split(tags, np.cumsum(self._sizes[numbers])[:-1]), strict=True):
                out[i] = row
        return out

    def evaluate(self) -> dict[str, float]:
        """Return UPOS and XPOS accuracy in percent on every dev set, tagged as the parser would."""
        scores: dict[str, float] = {}
        for name, sentences in self._dev.items():
            shares = tag_shares(tag(self.model, [s.words for s in sentences]), sentences)
            scores |= {f"{name}_{column}": 100 * share.value for column, share in shares.items()}
        return scores | {"score": float(np.mean([value for name, value in scores.items() if name.endswith("_xpos")]))}

    def save(self, path: Path) -> None:
        """Save in Stanza's format, weights in half precision: for `stanza.Pipeline(pos_model_path=...)`."""
        config = self.args | {"tag_columns": tag_columns_to_config(tag_columns_from_args(self.args))}
        save_halved(path, self.model, vocab=self.vocab.state_dict(), config=config)


def with_upos(sentences: Sequence[Tagged]) -> list[Tagged]:
    """Add UPOS to sentences without it.

    It is the most frequent UPOS of words with the same spelling and XPOS, else of words with the same XPOS.
    """
    seen: dict[object, Counter] = defaultdict(Counter)
    for sentence in sentences:
        if sentence.upos:
            for word, upos, xpos in zip(*sentence, strict=True):
                seen[xpos][upos] += 1
                seen[word.lower(), xpos][upos] += 1
    best = {key: counts.most_common(1)[0][0] for key, counts in seen.items()}

    def guess(word: str, xpos: str) -> str:
        return best.get((word.lower(), xpos)) or best.get(xpos, "X")

    return [
        sentence if sentence.upos else sentence._replace(upos=[*map(guess, sentence.words, sentence.xpos)])
        for sentence in sentences
    ]


def tag(model: StanzaTagger, sentences: Sequence[Sequence[str]]) -> list[list[tuple[str, str]]]:
    """Return (UPOS, XPOS) of every word, by the tagger that the parser uses."""
    return Tagger(Weights.of(model.eval())).tag(sentences, _EVALUATION_WORDS)[0]


def tag_shares(tagged: Sequence[Tags], gold: Sequence[Tagged]) -> dict[str, Share]:
    """Return the share of the words with a gold tag that have it, by column, without a column that no gold sentence has."""
    found = {}
    for column, name in enumerate(("upos", "xpos")):
        pairs = [(getattr(one, name), [tag[column] for tag in tags]) for one, tags in zip(gold, tagged, strict=True)]
        if pairs := [pair for pair in pairs if pair[0]]:
            found[name] = tag_accuracy(*zip(*pairs, strict=True))
    return found


def _padded(rows: Sequence[np.ndarray], sizes: np.ndarray) -> Tensor:
    """Return the first `sizes` values of every row: [B, L], the rest -1."""
    cut = [torch.from_numpy(row[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]
    return pad_sequence(cut, batch_first=True, padding_value=_PAD)
