"""Text that the Moses tokeniser went over: its escapes are undone, its tokens stay the words."""

import re

from treeproc.readers.given_words import join_with_blanks

_ESCAPES = {
    "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'",
    "&#91;": "[", "&#93;": "]", "&#124;": "|",
}  # fmt: skip
_ESCAPE = re.compile("|".join(_ESCAPES))
_SPLIT_HYPHEN = "@-@"


def unescape(line: str) -> list[str]:
    """The tokens as they are in plain text: `&apos;s` is `'s`, `@-@` is `-`. Every escape is undone once."""
    if "&" in line:
        line = _ESCAPE.sub(lambda match: _ESCAPES[match[0]], line)
    tokens = line.split()
    return ["-" if token == _SPLIT_HYPHEN else token for token in tokens] if _SPLIT_HYPHEN in line else tokens


def undo_moses(row: dict) -> dict:
    """A row whose sides are Moses tokens to plain tokens between blanks; `words` are the source's, with their places."""
    source, words = join_with_blanks(unescape(row["source"]))
    plain = {**row, "source": source, "words": words}
    if "target" in row:
        plain["target"] = " ".join(unescape(row["target"]))
    return plain
