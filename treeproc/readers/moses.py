"""Text from the Moses tokeniser. The reader undoes its escapes; its tokens stay the words."""

import re

from treeproc.readers.given_words import join_with_blanks

_ESCAPES = {
    "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'",
    "&#91;": "[", "&#93;": "]", "&#124;": "|",
}  # fmt: skip
_ESCAPE = re.compile("|".join(_ESCAPES))
_SPLIT_HYPHEN = "@-@"


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
