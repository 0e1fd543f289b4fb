"""Rules that find lines of a kind: escapes, tokens, several sentences, placeholders, traces of encodings and of tables.

Rules and thresholds were measured. Shares of lines in tokenised and in plain text:

- Marks of tokens: 94 to 100 % in tokenised text, at most 0.7 % in plain text.
- Escapes: 0.8 to 40 % in tokenised text (SST has none), at most 0.06 % in plain text.
- The last mark is attached: 0 to 3 % in tokenised text, 75 to 100 % in plain text.
- Placeholders: 0 % in both.
- Marks of subwords, ▁ and ##: 0 % in both. In text cut into subwords, they stand in almost every line.
- Quotation marks around a line, and two doubled ones inside: 0 % in both.
- Sentences that go on in the next line: 11 to 28 % of the rows of text wrapped at 40 to 120 characters, at most 1.3 % elsewhere.
- Damage: benchmarks/damaged_text.py measures all corpora and damaged copies. Healthy sides have at most 0.9 % lines with tags,
  0.08 % with lost letters, 0.05 % with escapes of URLs, 0.09 % with mixed scripts, and at most 0.04 % of the others.

The tokenised text is IWSLT'14, WMT'14, Multi30k lc.norm.tok and SST. The plain text is Tatoeba, Multi30k, Europarl, news, and UD
treebanks of English, German, French and Spanish. In the UD treebanks, at most 0.4 % of the single sentences look like several.
Two sentences that are joined look like several in 84 to 98 % of the cases.
"""

import base64
import re
from collections.abc import Callable, Sequence
from html.entities import html5

import numpy as np

from treeproc.readers.line_forms import csv_quotes, is_composed

_ESCAPE = re.compile(rb"&(?:amp|lt|gt|quot|apos|#91|#93|#124|bar|bra|ket);|(?<![^ \n])@-@(?![^ \n])")
_CLITIC = re.compile(rb" (?:'s|n't) ")
_PLACEHOLDER = re.compile(
    rb"<(?:/?s|unk|pad|mask|url|num|number|email|user|name|[A-Z][A-Z0-9_]*|[A-Za-z]+_?\d+)>|__[A-Za-z]\w*__|(?<=[^\s@])@@ "
    rb"|\[(?:UNK|MASK|CLS|SEP|PAD)\]|\{\{[^{}\n]+\}\}|%(?:\d\$)?[sd](?!\w)|%\(\w+\)[sd]"
)
_SUBWORD = re.compile(rb"(?<=\xe2)\x96\x81|(?<![^ \n])##[^\s#]")  # the former is ▁, from its second byte on
# UTF-8 that was read as cp1252: a letter from its first byte, and those from the bytes that follow.
_MISCODED = re.compile(
    rb"(?:\xc3[\x82-\xb4](?:\xc2[\x80-\xbf]|\xc5[\x92\x93\xa0\xa1\xb8\xbd\xbe]|\xc6\x92|\xcb[\x86\x9c]"
    rb"|\xe2\x80[\x93-\xba]|\xe2\x82\xac|\xe2\x84\xa2){1,3})+"
)
_PUNCTUATION = "–—‘’‚“”„†‡•…‰‹›€™"
# `&name;` stands in code too, so the names of HTML alone count.
_ENTITY = re.compile(
    rb"&(?!(?:amp|lt|gt|quot|apos|#91|#93|#124|bar|bra|ket);)(?:#[0-9]{1,7};|#[xX][0-9a-fA-F]{1,6};|(?:%s))"
    % "|".join(name for name in html5 if name.endswith(";")).encode()
)
_MARKUP = re.compile(
    rb"</?(?:[pbiua]|br|hr|em|strong|span|div|font|img|sub|sup|[uod]l|li|d[dt]|table|t[rdh]|h[1-6]|html|head|body|seg|code|pre"
    rb"|small|big|center|blockquote)(?:[ /][^<>\n]{0,300})?>",
    re.IGNORECASE,
)
_CODE = re.compile(rb"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2})")
_PERCENT = re.compile(
    rb"(?<![0-9% \n])%[2-7][0-9A-Fa-f](?=[0-9A-Za-z%])|%[Cc][2-9A-Fa-f]%[89AaBb][0-9A-Fa-f]|%[Ee][0-9A-Fa-f]%[89AaBb]"
)
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4}){2,}|(?:[A-Za-z0-9+/]{4})+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)")
_COLUMNS = re.compile(rb"\|\|\|(?=[ \n])|\t")
# A question mark in the place of a letter, but not before the first name=value of a URL, or four in those of a word.
_LOST = re.compile(rb"(?:(?<=[A-Za-z])|(?<![^ \n])(?=\?[A-Za-z]{2}))\?(?!\w+=)[A-Za-z]|(?<![^ \n])\?{4}")
# A Cyrillic letter beside a Latin one, which does not belong to %s, \n or -x.
_SCRIPTS = re.compile(rb"(?<=[A-Za-z])(?<![%\\-][A-Za-z])[\xd0\xd1]|[\xd0\xd1][\x80-\xbf](?=[A-Za-z])")
_OPEN = r"""["“„‘'«(\[¿¡-]* ?"""
_CLOSE = r"""["”’'»)\]]*"""
# After the mark that ends a sentence, in plain text: another one begins. In tokens: any word follows.
_NEXT_SENTENCE = re.compile(rf"[.?!]{_CLOSE} +{_OPEN}[A-ZÀ-ÖØ-Þ]")
_NEXT_TOKENS = re.compile(
    r"""(?<=[\w"”’'»)\];] )[.?!](?: (?:["”’'»)\]]|&quot;|&apos;|''))* (?:(?:["“„‘'«(\[¿¡]|&quot;|``) )?\w"""
)
# Short words before a full stop that ends no sentence.
_SHORT = (
    "vs|ca|bzw|usw|etc|cf|vol|nos?|pp|al|inc|ltd|cos?|st|dr|mr|ms|mrs|jr|sr|sra|fig|eq|eds?|est|gen|col|sgt|lt|op|art|nr|hl|ggf"
    "|sog|vgl|resp|min|max|mio|mrd|sec|hrs?|av|eg|ie"
)
_LAST_WORD = re.compile(rf"""(?:(?:^|[^\w.'’-])(?!(?:{_SHORT})$)[a-zß-ÿ]{{2,3}}|[^\W\d_]{{4}}|\d{{3}}|[)"”’'»])$""")
_LAST_WORD_CHARS = 5


class Chunk:
    """Lines as one array of UTF-8 codes [N], each line with its end: most questions are answered without a loop over lines."""

    def __init__(self, lines: Sequence[str]):
        self.content = "\n".join([*lines, ""]).encode()
        if self.content.count(b"\n") != len(lines):  # a format let a line end into a line
            lines = [line.replace("\n", " ") for line in lines]
            self.content = "\n".join([*lines, ""]).encode()
        self.lines = lines
        self.codes = np.frombuffer(self.content, np.uint8)
        self.ends = np.flatnonzero(self.codes == ord("\n"))
        self.blank = self.codes == ord(" ")

    def among(self, characters: str) -> np.ndarray:
        """Return whether each code is one of these ASCII characters [N]."""
        return np.logical_or.reduce([self.codes == ord(character) for character in characters])

    def lines_at(self, places: np.ndarray | list[int]) -> list[int]:
        """Return the numbers in the chunk of the lines that hold these places."""
        return np.unique(np.searchsorted(self.ends, places)).tolist()

    def places_of(self, code: int) -> np.ndarray:
        """Return the places of a code, fast where there is none."""
        return np.flatnonzero(self.codes == code) if bytes([code]) in self.content else np.zeros(0, np.int64)


def _tokens(chunk: Chunk) -> list[int]:
    after = chunk.blank | (chunk.codes == ord("\n"))
    alone = np.flatnonzero(chunk.blank[:-2] & chunk.among(",.")[1:-1] & after[2:])
    clitics = np.flatnonzero(chunk.blank[:-3] & ((chunk.codes[1:-2] == ord("'")) | (chunk.codes[2:-1] == ord("'"))))
    return chunk.lines_at([*alone.tolist(), *(at for at in clitics.tolist() if _CLITIC.match(chunk.content, at))])


def _attached(chunk: Chunk) -> list[int]:
    """Return the lines whose last mark has no blank before it."""
    ends = chunk.ends[np.diff(chunk.ends, prepend=-1) > 2]
    return chunk.lines_at(ends[chunk.among(".?!")[ends - 1] & ~chunk.blank[ends - 2]])


def _quoted(chunk: Chunk) -> list[int]:
    """Return the lines with the quotation marks of CSV: around the text, and two doubled ones, or more, inside it.

    In code, three of them stand around a text.
    """
    marks = chunk.among('"')
    places = chunk.lines_at(np.flatnonzero(marks[:-1] & marks[1:]))
    return [place for place in places if (csv_quotes(line := chunk.lines[place]) or 0) > 1 and '""' in line[3:-3]]


def _decomposed(chunk: Chunk) -> list[int]:
    return [] if chunk.content.isascii() else [place for place, line in enumerate(chunk.lines) if not is_composed(line)]


def _sentences(chunk: Chunk) -> list[int]:
    marks = chunk.among(".?!")
    inner = marks[:-2] & (chunk.blank[1:-1] | (chunk.among("\"'")[1:-1] & chunk.blank[2:]))
    return [place for place in chunk.lines_at(np.flatnonzero(inner)) if has_several_sentences(chunk.lines[place])]


def has_several_sentences(line: str) -> bool:
    """Return whether a mark that ends a sentence stands before the end of the line."""
    return any(_ends_sentence(line, match) for match in _NEXT_SENTENCE.finditer(line)) or _NEXT_TOKENS.search(line) is not None


def _ends_sentence(line: str, match: re.Match) -> bool:
    at = match.start()
    if line[at] != "." and line[at - 1 : at].isalnum():
        return True
    return _LAST_WORD.search(line[max(0, at - _LAST_WORD_CHARS) : at]) is not None


# A line that begins a sentence with a capital letter, though not with `I`, and one that goes on in lower case.
_BEGINS = re.compile(r"""["“„‘'«(\[¿¡]*(?!I\b)[^\W\d_]""")
_FINAL = re.compile(rf"""[.?!…:;。？！]{_CLOSE}$""")


def breaks_sentence(line: str, following: str) -> bool:
    """Return whether a line begins a sentence that seems to go on in the following line; never in text in lower case."""
    begin = _BEGINS.match(line)
    return begin is not None and begin[0][-1].isupper() and following[:1].islower() and _FINAL.search(line) is None


def _miscoded(chunk: Chunk) -> list[int]:
    """Return the lines with UTF-8 read as cp1252. The last letter and the quotation mark of „SCHÖ“ are none."""
    places = chunk.places_of(0xC3)
    places = places[chunk.codes[places + 2] >= 0xC2] if len(places) else places  # a line ends after the second byte of a letter
    matches = (_MISCODED.match(chunk.content, at) for at in places.tolist())
    return chunk.lines_at([match.start() for match in matches if match and _is_miscoded(match[0].decode())])


def _is_miscoded(text: str) -> bool:
    try:
        meant = b"".join(bytes([ord(c)]) if c < "\u0100" else c.encode("cp1252") for c in text).decode()
    except UnicodeError:
        return False
    return len(meant) > 1 or text[0] in "ÂÃÄÅ" or meant in _PUNCTUATION


def _base64(chunk: Chunk) -> list[int]:
    alone = ((place, line) for place, line in enumerate(chunk.lines) if line.isascii() and " " not in line)
    return [place for place, line in alone if _BASE64.fullmatch(line) and _is_base64(line)]


def _is_base64(line: str) -> bool:
    try:
        return base64.b64decode(line).decode().isprintable()
    except ValueError:
        return False


def _with(pattern: re.Pattern, firsts: bytes) -> Callable[[Chunk], list[int]]:
    """Return the rule for lines in which a pattern matches, which begins with one of these codes."""

    def rule(chunk: Chunk) -> list[int]:
        places = np.concatenate([chunk.places_of(code) for code in firsts]).tolist()
        return chunk.lines_at([at for at in places if pattern.match(chunk.content, at)])

    return rule


RULES: dict[str, Callable[[Chunk], list[int]]] = {
    "escapes": _with(_ESCAPE, b"&@"),
    "tokens": _tokens,
    "attached": _attached,
    "placeholders": _with(_PLACEHOLDER, b"<[{%_@"),
    "subwords": _with(_SUBWORD, b"#\x96"),  # many marks begin with \xe2 as ▁ does
    "quoted": _quoted,
    "decomposed": _decomposed,
    "sentences": _sentences,
    "miscoded": _miscoded,
    "entities": _with(_ENTITY, b"&"),
    "markup": _with(_MARKUP, b"<"),
    "codes": _with(_CODE, b"\\"),
    "percent": _with(_PERCENT, b"%"),
    "base64": _base64,
    "columns": _with(_COLUMNS, b"|\t"),
    "lost": _with(_LOST, b"?"),
    "scripts": _with(_SCRIPTS, b"\xd0\xd1"),
}
# What may have happened to lines of every side, and to names of classes.
DAMAGE = ("miscoded", "entities", "markup", "codes", "percent", "base64", "columns", "lost", "scripts")
