"""Forms of lines: given words joined by blanks, text from the Moses tokeniser, Unicode's composed form (NFC), blank lines.

The reader undoes the escapes of the Moses tokeniser; its tokens stay the words.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from treeproc.trees.spans import read_brackets, write_brackets

_ESCAPES = {
    "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'",
    "&#91;": "[", "&#93;": "]", "&#124;": "|",
}  # fmt: skip
_ESCAPE = re.compile("|".join(_ESCAPES))
_SPLIT_HYPHEN = "@-@"
Normalization = Literal["none", "nfc"]

# Blanks, control characters, and marks without width, such as U+200B, U+FEFF and U+00AD.
_INVISIBLE = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})
# Letters, symbols and marks that fonts show as nothing: fillers of Hangul, variation selectors, the empty cell of Braille.
_FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {
    chr(code) for first, last in ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF)) for code in range(first, last + 1)
}

is_composed = partial(unicodedata.is_normalized, "NFC")
_compose = partial(unicodedata.normalize, "NFC")
FORMS: Mapping[Normalization, Callable[[str], str]] = {"none": str, "nfc": _compose}


def join_with_blanks(words: Sequence[str]) -> tuple[str, dict[str, list]]:
    """Return the line of the words joined by blanks, and the words with their character offsets in it."""
    starts, ends, position = [], [], 0
    for word in words:
        starts.append(position)
        position += len(word)
        ends.append(position)
        position += 1
    return " ".join(words), {"text": list(words), "start_char": starts, "end_char": ends}


def unescape(line: str) -> list[str]:
    """Return the tokens as in plain text: `&apos;s` is `'s`, `@-@` is `-`. Every escape is undone once."""
    if "&" in line:
        line = _ESCAPE.sub(lambda match: _ESCAPES[match[0]], line)
    tokens = line.split()
    return ["-" if token == _SPLIT_HYPHEN else token for token in tokens] if _SPLIT_HYPHEN in line else tokens


def undo_moses(row: dict) -> dict:
    """Convert a row of Moses tokens to plain tokens with blanks between.

    `words` are those of the source, with their positions.
    """
    source, words = join_with_blanks(unescape(row["source"]))
    plain = {**row, "source": source, "words": words}
    if "target" in row:
        plain["target"] = " ".join(unescape(row["target"]))
    return plain


def is_blank(line: str) -> bool:
    """Return whether a line has no visible character."""
    return all(character in _FILLERS or unicodedata.category(character) in _INVISIBLE for character in line)


def csv_quotes(text: str) -> int | None:
    """Return how many doubled quotation marks a text has that is quoted as in CSV; None if it is not quoted so.

    Marks stand around such a text, and each one inside is doubled.
    """
    inner = text[1:-1]
    if text != f'"{inner}"' or '"' in inner.replace('""', ""):
        return None
    return inner.count('""')


def compose_row(row: dict) -> dict:
    """Return a row of a reader with its lines, words and leaves in NFC. A word is composed by itself, so words stay apart."""
    composed = row | {side: _compose(row[side]) for side in ("source", "target") if side in row}
    if "words" in row and composed["source"] != row["source"]:
        composed["source"], composed["words"] = _compose_words(row["source"], row["words"])
        if "trees" in row:
            composed["trees"] = list(map(_compose_leaves, row["trees"]))
    return composed


def _compose_leaves(brackets: str) -> str:
    words, tags, tree = read_brackets(brackets)
    return write_brackets(tree, list(map(_compose, words)), tags)


def _compose_words(line: str, words: Mapping[str, list]) -> tuple[str, dict[str, list]]:
    """Return the line in NFC, and its words with their new positions."""
    out: dict[str, list] = {"text": [], "start_char": [], "end_char": []}
    composed, last = "", 0
    for start, end in zip(words["start_char"], words["end_char"], strict=True):
        composed += _compose(line[last:start])
        out["start_char"].append(len(composed))
        out["text"].append(_compose(line[start:end]))
        composed += out["text"][-1]
        out["end_char"].append(len(composed))
        last = end
    return composed + _compose(line[last:]), out
