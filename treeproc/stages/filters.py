"""Filters of examples. Every dropped example has a reason, and the index counts them."""

import re
import unicodedata
from functools import cache
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from treeproc.common.settings import Settings
from treeproc.readers.line_forms import is_blank

Script = Literal["latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "thai", "hangul", "cjk", "kana"]

# Traces of a broken conversion: the replacement character and control characters other than the tab.
_DAMAGE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ufffd]")
_KANA = {"HIRAGANA", "KATAKANA"}


class FilterConfig(Settings):
    """The filters apply to the training split alone. Every split drops examples with a side without a visible character."""

    max_words: PositiveInt = Field(250, description="drop training examples with more blank-separated words on a side")
    max_word_chars: PositiveInt = Field(1000, description="drop training examples with a word of more characters")
    max_ratio: PositiveFloat | None = Field(
        None, ge=1, description="drop training pairs if one side has more than this many times the words of the other side"
    )
    drop_damaged: bool = Field(
        True, description="drop training examples with U+FFFD, or control characters other than the tab, on a side"
    )
    drop_duplicates: bool = Field(
        False, description="keep only the first of equal training examples (both sides, or text and label)"
    )
    drop_overlap: Literal["none", "source", "example"] = Field(
        "none", description="drop training examples if their source, or the complete example, is in another split too"
    )
    drop_leaks: bool = Field(
        False,
        description="drop training examples if their source equals that of a valid or test example, except for case, punctuation "
        "and blanks",
    )
    source_script: Script | None = Field(
        None, description="drop training examples if the source has too few letters of this script"
    )
    target_script: Script | None = Field(None, description="the same for the target side")
    min_script_share: float = Field(0.5, ge=0, le=1, description="smallest share of the letters that must be of the script")

    def identity(self) -> dict:
        """Return the filters in fingerprints, without unused filters of a later version, so that old fingerprints stay valid."""
        return self.model_dump(exclude=set() if self.drop_leaks else {"drop_leaks"})


def drop_reason(source: str, target: str | None, split: str, config: FilterConfig) -> str | None:
    """Return the reason to drop an example for its text, or None. `target` is None if there is no such side."""
    if is_blank(source):
        return "empty_source"
    if target is not None and is_blank(target):
        return "empty_target"
    if split != "train":
        return None
    if reason := _side_reason(source, config.source_script, config):
        return f"source_{reason}"
    if target is not None and (reason := _side_reason(target, config.target_script, config)):
        return f"target_{reason}"
    if config.max_ratio is not None and target is not None:
        fewer, more = sorted((len(source.split()), len(target.split())))
        if more > config.max_ratio * fewer:
            return "ratio"
    return None


def _side_reason(line: str, script: Script | None, config: FilterConfig) -> str | None:
    # A line shorter than the limits cannot break them: most lines are never split into words.
    if len(line) >= 2 * config.max_words and len(line.split()) > config.max_words:
        return "too_long"
    if len(line) > config.max_word_chars and max(map(len, line.split()), default=0) > config.max_word_chars:
        return "word_too_long"
    # Every damaged line is unprintable or has U+FFFD; the two tests are far cheaper than the pattern.
    if (not line.isprintable() or "\ufffd" in line) and config.drop_damaged and _DAMAGE.search(line):
        return "damaged"
    return "script" if script is not None and script_share(line, script) < config.min_script_share else None


def script_share(line: str, script: Script) -> float:
    """Return the share of the letters of a line that are of a script; 1 for a line without letters."""
    letters = [_script(character) for character in line if character.isalpha()]
    return letters.count(script) / len(letters) if letters else 1.0


@cache
def _script(letter: str) -> str:
    """Return the first word of the letter's Unicode name, in lower case; full-width and modifier letters have no script."""
    name = unicodedata.name(letter, "").split(" ")[0]
    return "kana" if name in _KANA else name.lower()
