"""Converts English Moses tokens to the words of treebanks, on which taggers and parsers are trained.

Moses writes `don 't`, treebanks write `do n't`. The parser reads the treebank's words; leaves stay the characters of the line. So
a token is still a leaf, except if treebanks split it (`cannot`) or join it with another (`o 'clock`). The rules are those of the
Penn Treebank as GUM, CRAFT and EWT follow them. Treebanks also split hyphenated tokens, which stay whole here: to split them does
not improve the trees (docs/results/parser.md).
"""

import re
from collections.abc import Sequence

from treeproc.parsers.tokens import Token

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
            verb = before.words[-1]
            out[-2:] = [Token(before.start, before.end, (verb[:-1],)), Token(start, end, (verb[-1] + text,))]
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
