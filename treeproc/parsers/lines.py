"""The base of parsers that read characters or given words: tokens, the words of treebanks, and sentences to results.

English Moses tokens become the words of treebanks, on which taggers and parsers are trained. Moses writes `don 't`, treebanks
write `do n't`. The parser reads the treebank's words; leaves stay the characters of the line. So a token is still a leaf, except
if treebanks split it (`cannot`) or join it with another (`o 'clock`). The rules are those of the Penn Treebank as GUM, CRAFT and
EWT follow them. Treebanks also split hyphenated tokens, which stay whole here: to split them does not improve the trees.
"""

import bisect
import logging
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from treeproc.common.errors import UserError, one_line
from treeproc.parsers.config import ARCS_FAILED, PARSED, PARTLY, Given, ParsedLine, Parser, ParserConfig, fallback, flat_arcs
from treeproc.shards.rows import edges_of
from treeproc.shards.schema import SCORE_PLACES, UNANALYSED, UNSCORED
from treeproc.trees.arcs import check_arcs, contract
from treeproc.trees.spans import EMPTY_TAG, SpanTree, flat_tree, keep_leaves, write_brackets

_NEGATED = {"ain", "aren", "can", "couldn", "daren", "didn", "doesn", "don", "hadn", "hasn", "haven", "isn", "mayn", "mightn"}
_NEGATED |= {"mustn", "needn", "oughtn", "shan", "shouldn", "wasn", "weren", "won", "wouldn"}
_APOSTROPHES = ("'", "’")
_CLITICS = frozenset({"s", "m", "d", "t", "re", "ve", "ll"})
# The positions at which treebanks split one token.
_CUTS = {"cannot": 3, "gonna": 3, "gotta": 3, "wanna": 3, "lemme": 3, "gimme": 3}
# After an apostrophe, these form one word with it. Before any other word it is a quotation mark.
_WITH_APOSTROPHE = _CLITICS | {"all", "am", "bout", "cause", "em", "mon", "n", "round", "til", "till", "tis", "twas"}
_QUOTED = re.compile(r"['’]([^\W\d_]{2,})")
# Prefixes that Moses splits from a name or an hour: O 'Reilly, o 'clock, d 'Art.
_NAME_STARTS = frozenset({"o", "d", "l"})

Word = tuple[int, int, str]  # first character, one past the last, text
logger = logging.getLogger(__name__)

_SMALLEST_BATCH = 16
Tags = list[tuple[str, str]]  # (UPOS, XPOS) of every word of a sentence
Arcs = list[tuple[int, str]]  # (governor, relation) of every word; governors are 0-based, -1 a root


def batches(sizes: Sequence[int], budget: int) -> Iterator[range]:
    """Group neighbours whose sizes add up to at most `budget`. A larger item is a batch by itself."""
    start = 0
    while start < len(sizes):
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and total + sizes[stop] <= budget:
            total += sizes[stop]
            stop += 1
        yield range(start, stop)
        start = stop


def longest_first(sizes: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield batches of positions, longest first, which pad to at most `budget`. A larger item is a batch by itself."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    start = 0
    while start < len(order):
        stop = start + max(1, budget // sizes[order[start]])
        yield order[start:stop]
        start = stop


@dataclass(frozen=True)
class Token:
    """A token of a line, [start, end), and the syntactic words that it stands for: one, or more (don't = do + n't)."""

    start: int
    end: int
    words: tuple[str, ...]


def treebank_tokens(words: Sequence[Word]) -> list[Token]:
    """Return the tokens of a line, each with the words of a treebank for it."""
    out: list[Token] = []
    opened = False
    for start, end, text in _joined(words):
        if text == '"':
            opened = not opened
            out.append(Token(start, end, ("``" if opened else "''",)))
            continue
        cut = _cut(text)
        out.append(Token(start, end, (text[:cut], text[cut:]) if cut else (text,)))
        if len(out) > 1 and _is_negation(out[-2].words[-1], text):
            before = out[-2]
            *quote, verb = before.words  # 'Don is a quotation mark and a verb
            first = before.start + len("".join(quote))
            marks = [Token(before.start, first, tuple(quote))] if quote else []
            out[-2:] = [*marks, Token(first, before.end, (verb[:-1],)), Token(start, end, (verb[-1] + text,))]
    return out


def _joined(words: Sequence[Word]) -> list[Word]:
    """Join tokens that treebanks write as one word: `’` and `s` of `it ’ s`, `O` and `'Reilly`."""
    out: list[Word] = []
    for start, end, text in words:
        if out:
            first, last, before = out[-1]
            parted = len(out) > 1 and before == "’" and text.lower() in _CLITICS and out[-2][2].isalpha()
            named = before.lower() in _NAME_STARTS and _QUOTED.fullmatch(text) and not _is_clitic(text)
            if parted or named:
                out[-1] = (first, end, before + text)
                continue
        out.append((start, end, text))
    return out


def _is_clitic(text: str) -> bool:
    return text[0] in _APOSTROPHES and text[1:].lower() in _CLITICS


def _is_negation(verb: str, text: str) -> bool:
    return text[0] in _APOSTROPHES and text[1:].lower() == "t" and verb.lower() in _NEGATED


def _cut(text: str) -> int:
    """Return the position at which a treebank splits a token; 0 for no split."""
    if (found := _QUOTED.fullmatch(text)) and found[1].lower() not in _WITH_APOSTROPHE:
        return 1
    return _CUTS.get(text.lower(), 0)


@dataclass
class Sentence:
    """A sentence during parsing. `tree` stays None if there is no tree, and `arcs` if there are none; `status` has the reason."""

    tokens: list[Token]
    tags: list[tuple[str, str]] = field(default_factory=list)  # (UPOS, XPOS) of every word
    arcs: list[tuple[int, str]] | None = None  # (0-based governor or -1, relation) of every word
    tree: SpanTree | None = None
    status: str = PARSED
    score: float = UNSCORED

    @property
    def words(self) -> list[str]:
        return [word for token in self.tokens for word in token.words]


def make_flat(sentences: Sequence[Sentence]) -> None:
    """Give sentences flat trees, and tags that all languages share, because the labels of phrases come from them."""
    for sentence in sentences:
        sentence.tags = [(upos, "") for upos, _ in sentence.tags]
        sentence.tree = flat_tree(len(sentence.words))


@dataclass(frozen=True)
class Line:
    """The cache key of a line: its characters, and its words if they are given."""

    text: str
    words: tuple[tuple[int, int, str], ...] | None

    def given_words(self) -> dict[str, list] | None:
        if not self.words:
            return None
        columns = zip(("start_char", "end_char", "text"), zip(*self.words, strict=True), strict=True)
        return {name: list(values) for name, values in columns}


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out: of Python, of the GPU, or of PyTorch's CPU allocators."""
    signs = ("out of memory", "can't allocate memory", "Cannot allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def _is_broken_gpu(error: Exception) -> bool:
    """Return whether an error is of the GPU. Then all later calls of this process fail, too."""
    return any(sign in str(error) for sign in ("CUDA error", "cuDNN error"))


class LineParser(Parser):
    """A parser that cuts lines into sentences. A line is one sentence unless `split_sentences`."""

    def __init__(self, config: ParserConfig):
        self._config, self._batch_words = config, config.batch_words

    @abstractmethod
    def _sentences(self, lines: Sequence[Line]) -> list[list[Sentence]]:
        """Return the sentences of every line, with trees, or with a status that gives the reason for a missing tree."""

    def parse(self, lines: Sequence[str], given: Sequence[Given] | None = None) -> list[ParsedLine]:
        """Analyse non-empty lines without line ends. A line that occurs twice is analysed once."""
        words = [g.words for g in given] if given else [None] * len(lines)
        keys = [Line(line, _word_tuples(w)) for line, w in zip(lines, words, strict=True)]
        unique = list(dict.fromkeys(keys))
        results = dict(zip(unique, self._parse_or_halve(unique), strict=True))
        return [results[key] for key in keys]

    def _parse_or_halve(self, lines: list[Line]) -> list[ParsedLine]:
        """Parse lines. If the parser fails, try halves again until the faulty line is alone.

        Raises UserError if what fails is not a line: a server that has ended, or the GPU.
        """
        if not lines:
            return []
        try:
            return self._analyse(lines)
        except UserError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                # If memory runs out, the batch shrinks. If that cannot help, the job fails. The tree never changes.
                if self._batch_words <= _SMALLEST_BATCH:
                    raise
                self._batch_words //= 2
                logger.warning("warning: out of memory: the parser goes on with batches of %d words", self._batch_words)
                return self._parse_or_halve(lines)
            if _is_broken_gpu(error):
                raise UserError(f"the GPU failed ({one_line(str(error), 200)}); run the same command again") from None
            if len(lines) > 1:
                middle = len(lines) // 2
                return self._parse_or_halve(lines[:middle]) + self._parse_or_halve(lines[middle:])
            logger.warning(
                "warning: the parser failed on a line of %d characters: %r; the line gets a flat tree", len(lines[0].text), error
            )
            return [self._fallback(lines[0], "flat_parser_failed")]

    def _analyse(self, lines: list[Line]) -> list[ParsedLine]:
        groups = self._sentences(lines)
        if self._config.dependencies:
            _remove_bad_arcs([sentence for group in groups for sentence in group if sentence.tree])
        return [self._line(line, group) for line, group in zip(lines, groups, strict=True)]

    def _given_tokens(self, words: Sequence[tuple[int, int, str]]) -> list[Token]:
        """Return the given words of a line in the form that the parser reads."""
        if self._config.treebank_words:
            return treebank_tokens(words)
        return [Token(start, end, (text,)) for start, end, text in words]

    def _fallback(self, line: Line, status: str) -> ParsedLine:
        return fallback(line.text, status, line.given_words(), self._config.dependencies)

    def _line(self, line: Line, sentences: list[Sentence]) -> ParsedLine:
        """Join the sentences of one line. A line of one sentence without a tree keeps its blank-separated words."""
        without_tree = [s.status for s in sentences if s.tree is None]
        if not sentences or (without_tree and not self._config.split_sentences):
            return self._fallback(line, without_tree[0] if sentences else "flat_no_tokens")
        words: dict[str, list] = {"text": [], "start_char": [], "end_char": [], "pos_tag": []}
        arcs: dict[str, list] = {"governor": [], "deprel": []}
        trees = []
        for sentence in sentences:
            first = len(words["text"])
            leaves = list(_leaves(line.text, sentence.tokens))
            own = [number for number, leaf in enumerate(leaves) for _ in leaf.words]  # the leaf of a word
            kept = [word == leaf.words[0] for leaf in leaves for word in leaf.words]
            tags = [_tag(sentence, leaf) for leaf in leaves]
            texts = [leaf.text for leaf in leaves]
            tree = keep_leaves(sentence.tree, kept) if sentence.tree else flat_tree(len(leaves))
            trees.append(write_brackets(tree, texts, tags))
            words["text"] += texts
            words["start_char"] += [leaf.start for leaf in leaves]
            words["end_char"] += [leaf.end for leaf in leaves]
            words["pos_tag"] += tags
            if self._config.dependencies:
                part = _arcs(sentence.arcs, own, first) if sentence.tree and sentence.arcs else flat_arcs(len(leaves))
                arcs["governor"] += part["governor"]
                arcs["deprel"] += part["deprel"]
        status = PARSED
        if failed := [s.status for s in sentences if s.status != PARSED]:
            status = failed[0] if len(failed) == len(sentences) else f"{PARTLY}{failed[0]}"
        return ParsedLine(words, trees, status, arcs if self._config.dependencies else None, _mean_score(sentences))


def _mean_score(sentences: Sequence[Sentence]) -> float:
    """Return the mean of the scores, weighted by words."""
    sizes = [len(sentence.words) for sentence in sentences]
    total = sum(size * sentence.score for size, sentence in zip(sizes, sentences, strict=True))
    return round(total / sum(sizes), SCORE_PLACES)


@dataclass(frozen=True)
class _Leaf:
    """A leaf: characters of the line, and the positions of its words in the sentence."""

    text: str
    start: int
    end: int
    words: range


def _leaves(line: str, tokens: Sequence[Token]) -> Iterator[_Leaf]:
    """Cut leaves: one per syntactic word if the words of a token spell it (do + n't), else one per token (im = in + dem)."""
    position = 0
    for token in tokens:
        after = position + len(token.words)
        if len(token.words) == 1 or "".join(token.words) != line[token.start : token.end]:
            yield _Leaf(line[token.start : token.end], token.start, token.end, range(position, after))
        else:
            start = token.start
            for word, text in enumerate(token.words, start=position):
                yield _Leaf(text, start, start + len(text), range(word, word + 1))
                start += len(text)
        position = after


def _tag(sentence: Sentence, leaf: _Leaf) -> str:
    """Return the tag of the leaf's first word."""
    if not sentence.tags:
        return UNANALYSED
    upos, xpos = sentence.tags[leaf.words[0]]
    return upos or UNANALYSED if xpos == EMPTY_TAG else xpos or upos  # readers of brackets drop words with that tag


def _remove_bad_arcs(sentences: Sequence[Sentence]) -> None:
    """Remove arcs unless they are a tree with one root over the words of their sentence. Its status says so."""
    fitting: list[Sentence] = []
    bad: list[Sentence] = []
    for sentence in sentences:
        count, arcs = len(sentence.words), sentence.arcs or []
        fits = len(arcs) == count and all(-1 <= above < count and isinstance(name, str) for above, name in arcs)
        (fitting if fits else bad).append(sentence)
    edges = edges_of(np.array([len(sentence.arcs or ()) for sentence in fitting], dtype=np.int64))
    starts = zip(fitting, edges.tolist(), strict=False)
    governors = [above + first if above >= 0 else -1 for sentence, first in starts for above, _ in sentence.arcs or ()]
    problems = zip(fitting, check_arcs(edges, np.array(governors, dtype=np.int64)), strict=True)
    for sentence in [*bad, *(sentence for sentence, problem in problems if problem)]:
        sentence.arcs, sentence.status = None, ARCS_FAILED


def _arcs(arcs: Arcs, own: Sequence[int], first: int) -> dict[str, list]:
    """Return one arc per leaf, that of its topmost word; `own` is the leaf of every word."""
    governors, topmost = contract([above for above, _ in arcs], own)
    return {"governor": [first + above if above >= 0 else -1 for above in governors], "deprel": [arcs[i][1] for i in topmost]}


def cut_at(tokens: Sequence[Token], starts: Sequence[int]) -> list[list[Token]]:
    """Cut the tokens of a line into sentences that start at these characters. A token belongs to the sentence of its start."""
    sentences: dict[int, list[Token]] = {}
    for token in tokens:
        sentences.setdefault(bisect.bisect_right(starts, token.start), []).append(token)
    return list(sentences.values())


def _word_tuples(words: dict[str, list] | None) -> tuple[tuple[int, int, str], ...] | None:
    if words is None:
        return None
    return tuple(zip(map(int, words["start_char"]), map(int, words["end_char"]), words["text"], strict=True))
