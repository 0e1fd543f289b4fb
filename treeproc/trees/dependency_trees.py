"""Constituents from dependency arcs: a head and its dependents make a phrase.

Crossing arcs are lifted first (`arcs.make_projective`), so that the words below a head stand side by side. Punctuation belongs to
the lowest phrase that has words on both of its sides. So it never begins or ends a phrase. There are two exceptions: the whole
sentence, and brackets, which make a phrase PRN with their content.

Shapes of a phrase:

- flat: one node over a head and all of its dependents.
- left, right: a node for every dependent, the nearest first; those on the left, or on the right, before the others.
- layered: a node for every layer of dependents, from the inside out (`_layers`). Nouns: noun phrase, its modifiers, its
  preposition. Verbs: objects and modifiers, auxiliaries, subject, subordinating conjunction, coordination.
  A dependent is at least as far out as those between it and its head. An argument noun and an adverb are phrases of one word.

All sentences are cut at once, with one step of numpy for each layer. Shapes: W words, S sentences, N nodes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa

from treeproc.common.errors import check_choice
from treeproc.shards.rows import numbers_of
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.arcs import UNIVERSAL_RELATIONS, make_projective, plain_relation, yields
from treeproc.trees.flat_trees import FlatTrees

PhraseShape = Literal["flat", "left", "right", "layered"]
PhraseLabels = Literal["upos", "deprel"]

# Universal tags for the tags of the Penn Treebank, which the English trees of other parsers have.
_PENN = {
    "NOUN": "NN NNS",
    "PROPN": "NNP NNPS",
    "PRON": "PRP WP EX",
    "DET": "DT PDT WDT PRP$ WP$",
    "NUM": "CD",
    "SYM": "$ #",
    "ADJ": "JJ JJR JJS AFX",
    "ADV": "RB RBR RBS WRB",
    "ADP": "IN RP",
    "PART": "TO POS",
    "VERB": "VB VBD VBG VBN VBP VBZ",
    "AUX": "MD",
    "INTJ": "UH",
    "CCONJ": "CC",
    "PUNCT": ". , : `` '' -LRB- -RRB- -LSB- -RSB- -LCB- -RCB- HYPH",
    "X": "FW LS ADD GW NFP XX",
}
_UNIVERSAL = {tag: name for name, tags in _PENN.items() for tag in tags.split()}
READ_TAGS = {*_PENN, *_UNIVERSAL, "SCONJ"}  # the universal tags and Penn's
# Labels of phrases by the universal tag of their head; X for all others.
_PHRASES = {
    **dict.fromkeys(("NOUN", "PROPN", "PRON", "NUM", "DET", "SYM"), "NP"),
    **dict.fromkeys(("VERB", "AUX"), "VP"),
    "ADJ": "ADJP",
    **dict.fromkeys(("ADV", "PART"), "ADVP"),
    "ADP": "PP",
    "SCONJ": "SBAR",
    "CCONJ": "CONJP",
    "INTJ": "INTJ",
}
PHRASE_LABELS = tuple(dict.fromkeys([UNANALYSED, "S", "SBAR", "PRN", *_PHRASES.values()]))
_NOMINAL = ("NOUN", "PROPN", "PRON", "NUM", "SYM")
_SUBJECTS = ("nsubj", "csubj", "expl")
# A single noun that has one of these relations to its governor is also a phrase.
_ARGUMENTS = (
    *("nsubj", "obj", "iobj", "obl", "nmod", "vocative", "expl", "dislocated"),
    *("conj", "appos", "parataxis", "list", "discourse"),
)
OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")

# The layers of a head, from the inside out, and the label of a phrase that ends at this layer.
_CORE, _MODIFIERS, _CASE, _PREDICATE, _AUXILIARIES, _CLAUSE, _MARK, _COORDINATION = range(1, 9)
_LAYER_LABELS = {_CASE: "PP", _PREDICATE: "VP", _AUXILIARIES: "VP", _CLAUSE: "S", _MARK: "SBAR"}


@dataclass(frozen=True)
class DependencySentences:
    """Sentences side by side; tags and relations are indices of their names."""

    edges: np.ndarray  # [S + 1] where each sentence begins
    governors: np.ndarray  # [W] index of the governor among all words, -1 for a root
    relations: np.ndarray  # [W]
    relation_names: Sequence[str]
    tags: np.ndarray  # [W] Penn's or universal ones
    tag_names: Sequence[str]
    words: pa.Array  # [W] strings


def dependency_phrases(sentences: DependencySentences, shape: PhraseShape, labels: PhraseLabels) -> tuple[FlatTrees, np.ndarray]:
    """Return one tree per sentence, with one root over all of its words, and the number of lifted arcs [S].

    If no word has a governor, the tree is flat. Labels by `upos` come from the head's tag (NP, VP, ADJP, ...) and from the added
    dependents (PP, S, SBAR, PRN). Labels by `deprel` are the relation of the head to its governor. Arcs must be trees: see
    `arcs.check_arcs`. Raises UserError for an unknown shape or kind of labels.
    """
    check_choice("shape", shape, PhraseShape)
    check_choice("labels", labels, PhraseLabels)
    governors, lifted = make_projective(sentences.edges, sentences.governors)
    words = _Words.of(sentences, governors)
    if shape == "layered":
        words = words.with_shared_conjunctions()
    layers = _layers(words) if shape == "layered" else _ranks(words, shape)
    heads, starts, ends, codes = _with_roots(sentences.edges, words, *_cut(words, layers, shape == "layered"))
    names = list(PHRASE_LABELS)
    if labels == "deprel":
        names, codes = [plain_relation(name) for name in sentences.relation_names], sentences.relations[heads]
    order = np.lexsort((-ends, starts))
    return FlatTrees(codes[order], starts[order], ends[order], names), lifted


def unread_names(
    relations: Collection[str], tags: Collection[str], shape: PhraseShape, labels: PhraseLabels
) -> tuple[list[str], list[str]]:
    """Return the relations and the tags that the rules of these phrases do not know, in order."""
    of_arcs = [name for name in relations if plain_relation(name) not in UNIVERSAL_RELATIONS] if shape == "layered" else []
    of_words = [tag for tag in tags if tag not in READ_TAGS] if shape == "layered" or labels == "upos" else []
    return sorted(of_arcs), sorted(of_words)


@dataclass(frozen=True)
class _Words:
    """Projective arcs over words, and the properties that decide where a word attaches."""

    governors: np.ndarray  # [W]
    relations: np.ndarray  # [W] strings without subtypes
    tags: np.ndarray  # [W] universal tags as strings
    labels: np.ndarray  # [W] label from the head's tag alone: index into PHRASE_LABELS
    punctuation: np.ndarray  # [W] whether a word is punctuation without dependents
    brackets: np.ndarray  # [W] whether the phrase of a word stands in brackets
    counted: np.ndarray  # [W] words that a phrase may begin or end with: all except punctuation, but with those brackets
    first: np.ndarray  # [W] first counted word at or below a word; W if there is none
    last: np.ndarray  # [W] one past the last such word; -1 if there is none

    @classmethod
    def of(cls, sentences: DependencySentences, governors: np.ndarray) -> "_Words":
        relations = np.array([plain_relation(name) for name in sentences.relation_names] or [""])[sentences.relations]
        universal = [_UNIVERSAL.get(name, name) for name in sentences.tag_names] or [""]
        tags = np.array(universal)[sentences.tags]
        labels = np.array([PHRASE_LABELS.index(_PHRASES.get(tag, UNANALYSED)) for tag in universal])[sentences.tags]
        punctuation = relations == "punct"
        punctuation[governors[governors >= 0]] = False
        first, last, _ = yields(governors, ~punctuation)
        counted, brackets = ~punctuation, np.zeros(len(punctuation), dtype=bool)
        heads = _bracketed(governors, punctuation, sentences.words, first, last)
        brackets[heads] = counted[first[heads] - 1] = counted[last[heads]] = True
        first, last, _ = yields(governors, counted)
        return cls(governors, relations, tags, labels, punctuation, brackets, counted, first, last)

    @property
    def dependents(self) -> np.ndarray:
        """Return the indices of all words with a governor that are not punctuation."""
        return np.flatnonzero((self.governors >= 0) & ~self.punctuation)

    def with_shared_conjunctions(self) -> "_Words":
        """Attach a conjunction that begins a conjunct (*and* in *cats and dogs*) to the first conjunct, because it joins both."""
        conjunct = self.governors
        begins = (self.relations == "cc") & (conjunct >= 0) & (self.governors[conjunct] >= 0)  # a root has no first conjunct
        begins &= (self.relations[conjunct] == "conj") & (self.first[conjunct] == np.arange(len(conjunct)))
        governors = np.where(begins, self.governors[conjunct], self.governors)
        first, last, _ = yields(governors, self.counted)
        return replace(self, governors=governors, first=first, last=last)

    def heads_with(self, relations: Collection[str]) -> np.ndarray:
        """Return whether a word has a dependent with one of the relations [W]."""
        out = np.zeros(len(self.governors), dtype=bool)
        out[self.governors[np.isin(self.relations, list(relations)) & (self.governors >= 0)]] = True
        return out


def _ranks(words: _Words, shape: PhraseShape) -> np.ndarray:
    """Return the layer of every dependent [W]: 1 in flat phrases, else its place in the order of attachment."""
    layers = np.zeros(len(words.governors), dtype=np.int64)
    places = words.dependents
    if shape == "flat":
        layers[places] = 1
        return layers
    heads = words.governors[places]
    other_side = (places < heads) == (shape == "right")
    order = np.lexsort((np.abs(places - heads), other_side, heads))
    ordered = heads[order]
    layers[places[order]] = 1 + np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return layers


def _layers(words: _Words) -> np.ndarray:
    """Return the layer of every dependent [W] by relation, side and head; at least that of those between it and the head."""
    governors, relations, tags = words.governors, words.relations, words.tags
    places = words.dependents
    heads = governors[places]
    relation, tag, left = relations[places], tags[places], places < heads
    verb = np.isin(tags, ("VERB", "AUX"))
    clause = (verb | words.heads_with((*_SUBJECTS, "cop")))[heads]
    verb, adjective = verb[heads], (tags == "ADJ")[heads]

    # Dependents of nouns and other words that are no predicate.
    layer = np.where(left, _CORE, _MODIFIERS)
    layer[~left & np.isin(relation, ("flat", "fixed", "compound", "goeswith", "nummod"))] = _CORE
    # Predicates that are no verb: dependents of the noun or adjective are nearer than those of the clause.
    inner = ("det", "amod", "nummod", "compound", "flat", "fixed", "goeswith", "nmod")
    right_inner = np.isin(relation, (*inner, "acl", "appos")) | (adjective & np.isin(relation, ("obl", "xcomp", "ccomp")))
    is_inner = np.where(left, np.isin(relation, inner) | ((relation == "advmod") & (tag != "PART")), right_inner)
    predicate = clause & ~verb
    layer[predicate & ~is_inner & ~left] = _PREDICATE
    layer[predicate & ~is_inner & left] = _CLAUSE
    # Dependents of verbs.
    layer[verb & (~left | np.isin(relation, ("advmod", "compound")))] = _PREDICATE
    layer[verb & left & ~np.isin(relation, ("advmod", "compound"))] = _CLAUSE
    # Dependents of all words.
    layer[clause & left & np.isin(relation, _SUBJECTS)] = _CLAUSE
    layer[np.isin(relation, ("aux", "cop")) | (clause & left & (relation == "advmod") & (tag == "PART"))] = _AUXILIARIES
    layer[(relation == "case") & (left | (tag == "ADP"))] = _CASE
    layer[(relation == "case") & ~left & (tag != "ADP")] = _CORE
    layer[(relation == "mark") & (tag != "PART")] = _MARK
    layer[(relation == "mark") & (tag == "PART")] = _AUXILIARIES
    layer[np.isin(relation, ("conj", "cc", "parataxis", "list"))] = _COORDINATION

    order = np.lexsort((np.abs(places - heads), left, heads))
    side = 2 * heads[order] + left[order]
    layers = np.zeros(len(governors), dtype=np.int64)
    layers[places[order]] = np.maximum.accumulate(side * 16 + layer[order]) % 16
    return layers


def _cut(words: _Words, layers: np.ndarray, layered: bool) -> tuple[np.ndarray, ...]:
    """Return heads, starts, ends and labels of the nodes; the nodes of a head are ordered from the inside out."""
    count = len(words.governors)
    code = {name: number for number, name in enumerate(PHRASE_LABELS)}
    label = words.labels.copy()
    low, high = np.arange(count), np.arange(count) + 1
    found: list[np.ndarray] = []

    def add(heads: np.ndarray) -> None:
        found.append(np.stack([heads, low[heads], high[heads], label[heads]]))

    if layered:
        core = np.zeros(count, dtype=bool)
        core[words.governors[(layers == _CORE)]] = True
        predicate = core.copy()
        predicate[words.governors[layers == _PREDICATE]] = True
        add(np.flatnonzero(_stands_alone(words, core, predicate)))
    for layer in range(1, int(layers.max(initial=0)) + 1):
        places = np.flatnonzero(layers == layer)
        above = words.governors[places]
        np.minimum.at(low, above, words.first[places])
        np.maximum.at(high, above, words.last[places])
        heads = np.unique(above)
        if layered and layer in _LAYER_LABELS:
            label[heads] = code[_LAYER_LABELS[layer]]
        elif not layered:
            label[above[np.isin(words.relations[places], _SUBJECTS)]] = code["S"]
        add(heads)
    bracketed = np.flatnonzero(words.brackets)
    low[bracketed], high[bracketed], label[bracketed] = words.first[bracketed], words.last[bracketed], code["PRN"]
    add(bracketed)
    return tuple(np.concatenate(found, axis=1))


def _stands_alone(words: _Words, core: np.ndarray, predicate: np.ndarray) -> np.ndarray:
    """Return [W]: whether a word is a phrase beside the phrases that it heads."""
    has_dependents = np.zeros(len(words.governors), dtype=bool)
    has_dependents[words.governors[words.dependents]] = True
    noun, verb = np.isin(words.tags, _NOMINAL), np.isin(words.tags, ("VERB", "AUX"))
    argument = np.isin(words.relations, _ARGUMENTS)
    adverb = (words.relations == "advmod") & (words.tags == "ADV")
    alone = ~has_dependents & ((noun & argument) | adverb)
    return (alone | (has_dependents & ((noun & ~core) | (verb & ~predicate)))) & ~words.punctuation


def _bracketed(
    governors: np.ndarray, punctuation: np.ndarray, words: pa.Array, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """Return the heads of phrases between two brackets that depend on them; phrases are [first, last) without punctuation."""
    coded, places = words.dictionary_encode(), {mark: place for place, mark in enumerate((*OPENING, *CLOSING))}
    kind = np.array([places.get(text, -1) for text in coded.dictionary.to_pylist()], np.int64)[numbers_of(coded.indices)]
    opening = np.flatnonzero(punctuation & (governors >= 0) & (kind >= 0) & (kind < len(OPENING)))
    heads = governors[opening]
    closing = np.minimum(last[heads], len(punctuation) - 1)
    fit = (first[heads] == opening + 1) & (last[heads] == closing) & (governors[closing] == heads) & punctuation[closing]
    return heads[fit & (kind[closing] == kind[opening] + len(OPENING))]


def _with_roots(
    edges: np.ndarray, words: _Words, heads: np.ndarray, starts: np.ndarray, ends: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Extend the outermost node of every root to its whole sentence, or add a node if the root has none."""
    lengths = np.diff(edges)
    sentences = np.flatnonzero(lengths)
    sentence = np.repeat(np.arange(len(lengths)), lengths)
    roots = np.flatnonzero(words.governors < 0)
    several = np.bincount(sentence[roots], minlength=len(lengths)) > 1
    root = np.full(len(lengths), -1)
    root[sentence[roots[::-1]]] = roots[::-1]  # the first one if there are several
    # Words that were not analysed are no heads.
    kept = ~several[sentence[heads]]
    heads, starts, ends, labels = heads[kept], starts[kept], ends[kept], labels[kept]
    outermost = np.full(len(words.governors), -1)
    outermost[heads] = np.arange(len(heads))  # the last one counts
    node = outermost[root[sentences]]
    there, missing = node >= 0, sentences[node < 0]
    starts[node[there]], ends[node[there]] = edges[sentences[there]], edges[sentences[there] + 1]
    own = np.where(several[missing], PHRASE_LABELS.index(UNANALYSED), words.labels[root[missing]])
    return (
        np.concatenate([heads, root[missing]]),
        np.concatenate([starts, edges[missing]]),
        np.concatenate([ends, edges[missing + 1]]),
        np.concatenate([labels, own]),
    )
