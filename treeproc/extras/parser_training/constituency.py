"""Training of Stanza's in-order shift-reduce constituency parser.

The loss is Stanza's: cross entropy of the gold transition in every state of the gold derivation. Stanza goes through the states
one transition at a time. Here, the derivations of a batch are index arrays, and words, nodes, stacks and scores of all its
sentences are computed level by level (`derivations`).
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch
from stanza.models.common.pretrain import Pretrain, PretrainedWordVocab
from stanza.models.common.vocab import VOCAB_PREFIX
from stanza.models.constituency.lstm_model import LSTMModel
from stanza.models.constituency.parse_transitions import CloseConstituent, OpenConstituent, Shift
from stanza.models.constituency_parser import parse_args
from torch import Tensor, nn

from treeproc.common.files import atomic_output
from treeproc.extras.parser_training.config import CONSTITUENCY_CONSTANTS as FIXED
from treeproc.extras.parser_training.config import ConstituencySettings
from treeproc.extras.parser_training.derivations import Derivations, transition_logits, transitions_of, word_states
from treeproc.extras.parser_training.layers import word_vectors
from treeproc.parsers.shift_reduce import ShiftReduceParser
from treeproc.parsers.weights import ConstituencyModel
from treeproc.shards.rows import edges_of, flatten, ranges
from treeproc.trees.scores import score
from treeproc.trees.spans import SpanTree

_PARSED_WORDS = 2048  # words of dev that are parsed at once
_VECTOR_SCALE = 0.3  # standard deviation of word vectors
_UNKNOWN = 1  # row of Stanza's embeddings


@dataclass(frozen=True)
class TaggedTree:
    """A sentence of the training data."""

    words: Sequence[str]
    taggings: Sequence[Sequence[str]]  # one tagging is drawn at random in every epoch
    tree: SpanTree


def write_vectors(path: Path, sentences: Sequence[Sequence[str]]) -> None:
    """Write a file of word vectors for `build_model`: of lower-cased words, learned from their neighbours in the sentences.

    The parser reads them beside its own embeddings. The embeddings cover only words of the training trees.
    """
    counts = Counter(word.lower() for sentence in sentences for word in sentence)
    words = sorted(word for word, count in counts.items() if count >= FIXED["min_vector_count"])
    vectors = _VECTOR_SCALE * word_vectors(sentences, words, FIXED["vector_dim"], seed=0)
    table = torch.cat([vectors.new_zeros(len(VOCAB_PREFIX), FIXED["vector_dim"]), vectors])
    with atomic_output(path) as file:
        torch.save({"vocab": PretrainedWordVocab(words).state_dict(), "emb": table.half()}, file)


def build_model(trees: Sequence[TaggedTree], settings: ConstituencySettings, vectors: Path, language: str = "en") -> LSTMModel:
    """Build Stanza's parser with fresh weights for the words, tags and labels of these trees, and the word vectors of a file."""
    name = f"{language}_treebank"
    # All else is Stanza's default: in-order transitions, nodes as the maximum of their children, two layers in LSTMs.
    args = parse_args(["--shorthand", name, "--no_multistage", "--optim", "adamw", "--seed", "0", "--save_name", f"{name}.pt"])
    args |= {
        "wordvec_pretrain_file": vectors.name,  # the loader of the model gives the folder
        # The parser reads the tagger's fine-grained tags.
        "retag_package": language, "retag_method": "xpos", "retag_xpos": True,
        "hidden_size": settings.hidden_size, "transition_hidden_size": FIXED["transition_hidden_size"],
        "transition_embedding_dim": FIXED["transition_embedding_dim"], "tag_embedding_dim": FIXED["tag_embedding_dim"],
        "delta_embedding_dim": FIXED["word_embedding_dim"], "word_dropout": FIXED["word_dropout"],
        "lstm_input_dropout": FIXED["stack_dropout"], "predict_dropout": FIXED["output_dropout"],
        "lstm_layer_dropout": FIXED["layer_dropout"], "rare_word_threshold": FIXED["rare_words"],
        "rare_word_unknown_frequency": FIXED["rare_word_dropout"], "tag_unknown_frequency": FIXED["tag_dropout"],
        "pattn_num_layers": 0, "use_lattn": False, "charlm_forward_file": None, "charlm_backward_file": None, "device": "cpu",
    }  # fmt: skip
    counts = Counter(word for tree in trees for word in tree.words)
    words = [word for word, count in counts.items() if count >= settings.min_word_count]
    rare = sorted(words, key=lambda word: (counts[word], word))[: round(FIXED["rare_words"] * len(words))]
    labels = sorted({label for tree in trees for label in tree.tree.labels})
    return LSTMModel(
        Pretrain(str(vectors)), None, None, None, None, False, None,
        transitions=[Shift(), CloseConstituent(), *(OpenConstituent(label) for label in labels)],
        constituents=labels,
        tags=sorted({tag for tree in trees for tagging in tree.taggings for tag in tagging}),
        words=words, rare_words=rare,
        root_labels=sorted({tree.tree.labels[0] for tree in trees}),
        constituent_opens=[(label,) for label in labels],
        unary_limit=max(_longest_chain(tree.tree) for tree in trees) + 1,
        args=args,
    )  # fmt: skip


def _longest_chain(tree: SpanTree) -> int:
    """Return the most nodes in a row with a single child. A word counts as a child."""
    chains = [(span, len(list(nodes))) for span, nodes in groupby(zip(tree.starts, tree.ends, strict=True))]
    return max(count - (end - start > 1) for (start, end), count in chains)


@dataclass(frozen=True)
class _Batch:
    sentences: np.ndarray
    taggings: np.ndarray  # index of the tagging of a sentence in this epoch


class ConstituencyLearner:
    """The parser, its training trees and its dev trees."""

    def __init__(
        self,
        model: LSTMModel,
        train: Sequence[TaggedTree],
        dev: Sequence[TaggedTree],
        settings: ConstituencySettings,
        seed: int,
        weights: Sequence[float] | None = None,
    ):
        """Take `weights`: how often every training tree occurs in an epoch, by default once."""
        self.model, self._dev, self._settings, self._seed = model, dev, settings, seed
        self._weights = np.ones(len(train)) if weights is None else np.asarray(weights, float)
        opens = {names.label[0]: i for i, names in enumerate(model.transitions) if isinstance(names, OpenConstituent)}
        self._num_labels = len(opens)
        self._derivations = Derivations([transitions_of(tree.tree, len(tree.words), opens) for tree in train])
        self._lengths = np.array([len(tree.words) for tree in train])
        self._word_edges = edges_of(self._lengths)
        vocab = model.emb_vocab
        pretrained = {word: vocab.unit2id(word) for tree in train for word in tree.words}
        pretrained = {word: i if i != _UNKNOWN else vocab.unit2id(word.lower()) for word, i in pretrained.items()}
        self._pretrained, _ = flatten([[pretrained[word] for word in tree.words] for tree in train])
        self._words, _ = flatten([[model.delta_word_map.get(word, _UNKNOWN) for word in tree.words] for tree in train])
        taggings = [tagging for tree in train for tagging in tree.taggings]
        self._tags, tagging_lengths = flatten([[model.tag_map.get(tag, _UNKNOWN) for tag in tagging] for tagging in taggings])
        self._tag_edges = edges_of(tagging_lengths)
        self._num_taggings = np.array([len(tree.taggings) for tree in train])
        self._first_tagging = edges_of(self._num_taggings)[:-1]
        rare = np.zeros(len(model.delta_words) + 2, bool)
        rare[[model.delta_word_map[word] for word in model.rare_words]] = True
        self._rare = torch.from_numpy(rare)

    def batches(self, epoch: int) -> list[_Batch]:
        """Return batches of sentences of about one length and `batch_words` words together, in random order."""
        random = np.random.default_rng([self._seed, epoch])
        draws = self._weights + random.random(len(self._weights))
        times = np.floor(draws).astype(int)
        times[draws.argmax()] = max(1, times.max())  # small weights may draw no tree
        rows = np.repeat(np.arange(len(times)), times)
        # Noise on the lengths changes the companions of a sentence.
        rows = rows[np.argsort(self._lengths[rows] * random.uniform(0.9, 1.1, len(rows)))]
        taggings = self._first_tagging[rows] + random.integers(self._num_taggings[rows])
        ends = np.cumsum(self._lengths[rows])
        cuts = np.searchsorted(ends, np.arange(self._settings.batch_words, ends[-1], self._settings.batch_words))
        edges = np.unique([0, *cuts, len(rows)])
        batches = [_Batch(rows[a:b], taggings[a:b]) for a, b in pairwise(edges)]
        return [batches[i] for i in random.permutation(len(batches))]

    def loss(self, batch: _Batch) -> Tensor:
        """Return the mean cross entropy of the gold transitions."""
        derivations = self._derivations.batch(batch.sentences, self._num_labels)
        hidden = self._word_states(batch.sentences, batch.taggings)
        logits = transition_logits(self.model, hidden, derivations)
        return nn.functional.cross_entropy(logits, torch.from_numpy(derivations.targets))

    def _word_states(self, sentences: np.ndarray, taggings: np.ndarray) -> Tensor:
        model, lengths = self.model, self._lengths[sentences]
        at = ranges(self._word_edges[sentences], lengths)
        words, pretrained = torch.from_numpy(self._words[at]), torch.from_numpy(self._pretrained[at])
        tags = torch.from_numpy(self._tags[ranges(self._tag_edges[taggings], lengths)])
        if model.training:
            unknown = self._rare[words] & (torch.rand(len(words)) < model.args["rare_word_unknown_frequency"])
            words = words.masked_fill(unknown, _UNKNOWN)
            tags = tags.masked_fill(torch.rand(len(tags)) < model.args["tag_unknown_frequency"], _UNKNOWN)
        inputs = torch.cat([model.embedding(pretrained), model.delta_embedding(words), model.tag_embedding(tags)], 1)
        return word_states(model, inputs, lengths)

    def evaluate(self) -> dict[str, float]:
        """Return labelled F1 on dev, in percent, without punctuation."""
        parser = ShiftReduceParser(ConstituencyModel.of(self.model.eval()))
        found = parser.parse([list(zip(t.words, t.taggings[0], strict=True)) for t in self._dev], _PARSED_WORDS)
        return {"score": 100 * score([(t.taggings[-1], t.tree) for t in self._dev], found).f1}

    def save(self, path: Path) -> None:
        """Save in Stanza's format, weights in half precision. Its own trainer writes other bytes for the same model each time."""
        params = copy.deepcopy(self.model).half().get_params()
        params["rare_words"].sort()  # they come from a set
        with atomic_output(path) as file:
            torch.save({"params": params, "epochs_trained": 0, "best_f1": 0.0, "best_epoch": 0, "model_type": "LSTM"}, file)
