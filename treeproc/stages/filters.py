"""Filters of examples, and the language of lines. Every dropped example has a reason, and the index counts them.

Languages are identified by py3langid: a naive Bayes model of 139 languages, 4.6 MB, offline.

Measured on up to 2,000 lines of each of 28 corpora in English, German, French and Spanish: sentence pairs, captions, speeches,
talks, news, web text and treebanks. Only lines with `_LEAST_LETTERS` letters and a probability above `_SURE` count.

- All lines that were taken for another language are in that language: 0.24 % of WMT's web text is French, and 0.05 % of German
  of 1800 is Italian. `NOTICED_SHARE` is eight times that.
- The model finds 92 to 93 % of the lines in another language than the parser's (Tatoeba, Multi30k).
- A line takes 30 to 75 microseconds, and loading takes 0.4 s.
- The shipped English tagger learned three quarters of the words in 96 to 99.6 % of English lines, in 0.3 % of French ones and in
  0.1 % of German ones. So commands that read a few lines load the model only for the others.
"""

import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from treeproc.common.errors import how_to_install, is_installed
from treeproc.common.messages import warn
from treeproc.common.settings import Settings, UserError
from treeproc.readers.line_forms import is_blank
from treeproc.shards.schema import without_tag

Script = Literal["latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "thai", "hangul", "cjk", "kana"]

# Traces of a broken conversion: the replacement character and control characters other than the tab.
_DAMAGE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ufffd]")
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_KANA = {"HIRAGANA", "KATAKANA"}


class FilterConfig(Settings):
    """The filters apply to the training split alone. Every split drops examples with a side without a visible character.

    A tag in front of a line is no such character, nor does it count for the ratio and the scripts.
    """

    max_words: PositiveInt = Field(250, description="drop training examples with more blank-separated words on a side")
    max_word_chars: PositiveInt = Field(1000, description="drop training examples with a word of more characters")
    max_ratio: PositiveFloat | None = Field(
        None,
        ge=1,
        description="drop training pairs if one side has more than this many times the words of the other side, without tags",
    )
    drop_damaged: bool = Field(
        True, description="drop training examples with U+FFFD, or control characters other than the tab, on a side"
    )
    drop_duplicates: bool = Field(
        False, description="keep only the first of equal training examples (both sides, or text and class in the files)"
    )
    drop_overlap: Literal["none", "source", "example"] = Field(
        "none",
        description="drop training examples if their source, or the complete example as the files have it, is in another split "
        "too",
    )
    drop_leaks: bool = Field(
        False,
        description="drop training examples if their source equals that of a valid or test example, except for case, punctuation "
        "and blanks",
    )
    source_script: Script | None = Field(
        None, description="drop training examples if the source, without its tag, has too few letters of this script"
    )
    target_script: Script | None = Field(None, description="the same for the target side")
    min_script_share: float = Field(0.5, ge=0, le=1, description="smallest share of the letters that must be of the script")

    def identity(self, *, earlier: bool = False) -> dict:
        """Return the filters in fingerprints, without unused filters of a later version, so that old fingerprints stay valid.

        `earlier` gives those of a version that found near copies without the marks of letters.
        """
        if not self.drop_leaks:
            return self.model_dump(exclude={"drop_leaks"})
        return self.model_dump() | ({} if earlier else {"near_copies": "with marks"})  # the rule of `normalised`


def drop_reason(source: str, target: str | None, split: str, config: FilterConfig, tags: Collection[str] = ()) -> str | None:
    """Return the reason to drop an example for its text, or None. `target` is None if there is no such side."""
    texts = {name: without_tag(line, tags) for name, line in (("source", source), ("target", target)) if line is not None}
    for name, text in texts.items():
        if is_blank(text):
            return f"empty_{name}"
    if split != "train":
        return None
    if reason := _side_reason(source, texts["source"], config.source_script, config):
        return f"source_{reason}"
    if target is not None and (reason := _side_reason(target, texts["target"], config.target_script, config)):
        return f"target_{reason}"
    if config.max_ratio is not None and target is not None:
        fewer, more = sorted(len(text.split()) for text in texts.values())
        if more > config.max_ratio * fewer:
            return "ratio"
    return None


def _side_reason(line: str, text: str, script: Script | None, config: FilterConfig) -> str | None:
    # A line shorter than the limits cannot break them: most lines are never split into words.
    if len(line) >= 2 * config.max_words and len(line.split()) > config.max_words:
        return "too_long"
    if len(line) > config.max_word_chars and max(map(len, line.split()), default=0) > config.max_word_chars:
        return "word_too_long"
    # Every damaged line is unprintable or has U+FFFD; the two tests are far cheaper than the pattern.
    if (not line.isprintable() or "\ufffd" in line) and config.drop_damaged and _DAMAGE.search(line):
        return "damaged"
    return "script" if script is not None and script_share(text, script) < config.min_script_share else None


def has_control(line: str) -> bool:
    """Return whether a line has a control character other than the tab; `translate` and `classify` leave such a line empty."""
    return not line.isprintable() and CONTROL.search(line) is not None


def script_share(line: str, script: Script) -> float:
    """Return the share of the letters of a line that are of a script; 1 for a line without letters."""
    letters = [_script(character) for character in line if character.isalpha()]
    return letters.count(script) / len(letters) if letters else 1.0


@cache
def _script(letter: str) -> str:
    """Return the first word of the letter's Unicode name, in lower case; full-width and modifier letters have no script."""
    name = unicodedata.name(letter, "").split(" ")[0]
    return "kana" if name in _KANA else name.lower()


# A line counts as foreign from this many letters and above this probability.
_LEAST_LETTERS = 20
_SURE = 0.9
# Lines of one side of a split that are looked at, at most; they lie evenly.
_MOST_LINES = 2000
# Share of the lines with enough letters from which on a user is warned.
NOTICED_SHARE = 0.02
# Codes of one language, and languages that short lines do not tell apart.
_ALIKE = (("no", "nb", "nn", "da"), ("hr", "bs", "sr"), ("id", "ms"), ("zh", "wuu", "yue"), ("en", "pcm"), ("ar", "ary", "arz"))
_NO_LANGUAGE = "zxx"
# A line of which a parser learned this share of the words is in its language.
_FAMILIAR = 0.75
_WORD = re.compile(r"[^\W\d_]+")


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    try:
        return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    except OSError as error:  # py3langid unpacks its model into a temporary file, which may lie on another disk than --out
        raise UserError(
            f"cannot unpack the model of py3langid in {tempfile.gettempdir()}: {error.strerror}; free space there, or set TMPDIR "
            "to another folder"
        ) from None


@cache
def _can_identify() -> bool:
    """Return whether py3langid is installed. If not, the function logs a note, once a process."""
    if not is_installed("py3langid"):
        warn(f"note: no line is checked for its language, since {how_to_install('py3langid')}")
        return False
    return True


def other_language(line: str, language: str) -> str | None:
    """Return the code of the language of a line where it is surely another one, else None."""
    found, probability = _identifier().classify(line)
    return found if probability > _SURE and found not in {*_accepted(language), _NO_LANGUAGE} else None


def _accepted(language: str) -> set[str]:
    """Return the codes that count as `language`, which may name a script too: zh-hans."""
    code = language.replace("_", "-").partition("-")[0].lower()
    return {code, *(name for names in _ALIKE if code in names for name in names)}


def known(language: str | None) -> str | None:
    """Return the language if lines can be checked for it, else None."""
    if language is None or not _can_identify():
        return None
    return language if _accepted(language) & {*_identifier().labels} else None


def has_letters(line: str) -> bool:
    """Return whether a line has letters enough to tell its language."""
    return len(line) >= _LEAST_LETTERS and sum(map(str.isalpha, line)) >= _LEAST_LETTERS


def is_doubtful(line: str, knows: Callable[[str], bool]) -> bool:
    """Return whether a line may be in another language than that of a parser, which `knows` the words that it learned."""
    words = _WORD.findall(line)
    return has_letters(line) and sum(map(knows, words)) < _FAMILIAR * len(words)


def stride_of(lines: int) -> int:
    """Return n: of so many lines, every n-th is looked at. It is a power of two."""
    stride = 1
    while -(-lines // stride) > _MOST_LINES:
        stride *= 2
    return stride


def foreign_lines(lines: Sequence[tuple[int, str]], language: str) -> tuple[int, list[tuple[int, str]], str]:
    """Return (lines looked at, those of the commonest other language, that language), of numbers and lines of text.

    `other_language` decides.
    """
    checked = [(number, line) for number, line in lines if has_letters(line)]
    others = [(number, line, other_language(line, language)) for number, line in checked]
    counts = Counter(found for *_, found in others if found)
    name = min(counts, key=lambda code: (-counts[code], code), default="")
    return len(checked), [(number, line) for number, line, found in others if name and found == name], name
