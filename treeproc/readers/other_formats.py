"""Files that plainly are not what their reader takes them for. A reader of lines takes everything that is UTF-8.

Only the first 64 KiB of a file are looked at. Text is refused only if all of these lines show another format, or if they have
markup of segments. What may be meant so, such as trees as the text of a model, is a warning.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from treeproc.common.errors import UserError, quoted
from treeproc.readers.packed_files import warn_once

# How a file is read: as lines (of the format `parallel`, of something else, or as bytes), or by a reader with rules of its own.
Reading = Literal["parallel", "lines", "bytes", "iwslt_xml", "brackets", "any"]

_SHOWN = 40
_LOOKED_AT = 1 << 16
_MOST_NULS = 0.3  # of the bytes: UTF-16 of Latin letters has half of them

_UNPACK = "unpack it, and give its files"
_EXTRACT = "write its text to a file, one sentence a line"
_BYTES = (
    (rb"\x1f\x8b", "a gzip file", "rename it so that its name ends in .gz"),
    (rb"BZh[1-9]1AY&SY", "a bzip2 file", "rename it so that its name ends in .bz2"),
    (rb"\xfd7zXZ\0", "an xz file", "rename it so that its name ends in .xz"),
    (rb"\x28\xb5\x2f\xfd", "a Zstandard file", _UNPACK),
    (rb"PK\x03\x04", "a zip archive or a document of an office program", _UNPACK),
    (rb"(?s:.){257}ustar", "a tar archive", _UNPACK),
    (rb"%PDF-1", "a PDF", _EXTRACT),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an office program", _EXTRACT),
    (rb"SQLite format 3\0", "a database of SQLite", _EXTRACT),
    (rb"ARROW1\0\0", "an Arrow file", _EXTRACT),
    (rb"PAR1[\x15\x00]", "a Parquet file", _EXTRACT),
    (rb"\xff\xfe|\xfe\xff", "in UTF-16", "convert the file to UTF-8"),
)

_LINES: tuple[Reading, ...] = ("parallel", "lines")
_ALL_LINES: tuple[Reading, ...] = (*_LINES, "bytes")
_MARKUP = re.compile(r"<(?:\?xml\b|!doctype\b|(?:tmx|xliff|html|mteval|srcset|refset|tstset)\b[^<>]*>)", re.IGNORECASE)
_OTHER_XML = re.compile(r"<(?:!doctype\s+)?(?:tmx|xliff|html)\b", re.IGNORECASE)
_SEGMENT = re.compile(r"<seg\b[^<>]*>", re.IGNORECASE)
_IWSLT = re.compile(r"<(url|keywords|speaker|talkid|title|description)>.*</\1>", re.IGNORECASE)
_CONLLU = re.compile(r"[0-9]+(?:[-.][0-9]+)?(?:\t[^\t]*){9}")
_LEAF = re.compile(r"\([^\s()]+ [^\s()]+\)")
_NESTED = re.compile(r"\([^\s()]* ?\(")
_LABELS = re.compile(r"\(([^\s()]*)")


def _is_other_xml(lines: Sequence[str]) -> bool:
    return bool(_MARKUP.match(lines[0])) and any(map(_OTHER_XML.match, lines[:20]))


def _has_segments(lines: Sequence[str]) -> bool:
    tagged = sum(line.startswith("<") for line in lines)
    return bool(_MARKUP.match(lines[0])) or (2 * tagged > len(lines) and any(map(_SEGMENT.match, lines)))


def _has_talks(lines: Sequence[str]) -> bool:
    return len({match[1].lower() for match in map(_IWSLT.fullmatch, lines) if match}) > 1


def _is_conllu(lines: Sequence[str]) -> bool:
    words = [line for line in lines if not line.startswith("#")]
    return bool(words) and all(map(_CONLLU.fullmatch, words))


def _is_sentiment(lines: Sequence[str]) -> bool:
    labels = {label for line in lines for label in _LABELS.findall(line)}
    return bool(labels) and labels <= set("01234")


def _are_trees(lines: Sequence[str]) -> bool:
    leaves = sum(bool(_LEAF.search(line)) for line in lines)
    return all(line.startswith("(") for line in lines) and 2 * leaves > len(lines) and any(map(_NESTED.search, lines))


def _are_objects(lines: Sequence[str]) -> bool:
    try:
        return all(line.startswith("{") and isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True)
class _Evidence:
    """A format, the readings that it is not, and the setting `format` that reads it. `seen` gets the lines that are not empty."""

    what: str
    readings: tuple[Reading, ...]
    seen: Callable[[Sequence[str]], bool]
    format: str | None = None
    is_certain: bool = True


_TEXT = (
    _Evidence("TMX, XLIFF or HTML", (*_ALL_LINES, "iwslt_xml"), _is_other_xml),
    _Evidence("a file of segments in XML", _ALL_LINES, _has_segments, "sgm or format=iwslt_xml"),
    _Evidence("IWSLT's text with metadata", _ALL_LINES, _has_talks, "iwslt_xml"),
    _Evidence("a treebank in CoNLL-U", (*_ALL_LINES, "iwslt_xml"), _is_conllu, "conllu"),
    _Evidence("sentiment trees", ("brackets",), _is_sentiment, "sst", is_certain=False),
    _Evidence("trees in brackets", (*_LINES, "iwslt_xml"), _are_trees, "brackets", is_certain=False),
    _Evidence("JSON", (*_LINES, "iwslt_xml"), _are_objects, is_certain=False),
)


def check_text(block: bytes, name: str, reading: Reading) -> None:
    """Raise UserError if the first block of a file shows that it is not text, or not what this reader reads.

    Warn if it may be something else.
    """
    for magic, what, remedy in _BYTES:
        if re.match(magic, block):
            raise UserError(f"{name} is {what}, but must be text; {remedy}")
    if block.count(0) > _MOST_NULS * len(block):
        raise UserError(f"{name} has bytes that are 0, so it is in UTF-16 or not text; convert the file to UTF-8")
    evidence = [one for one in _TEXT if reading in one.readings]
    lines = _lines(block) if evidence else []
    for one in evidence if lines else ():
        if one.seen(lines):
            remedy = f"set format={one.format}" if one.format and reading not in ("lines", "bytes") else _EXTRACT
            if one.is_certain:
                expected = "IWSLT's files" if reading == "iwslt_xml" else "lines of text"
                raise UserError(f"{name}: expected {expected}, but found {one.what}: {quoted(lines[0][:_SHOWN])}; {remedy}")
            meant = "trees whose labels are numbers" if reading == "brackets" else "plain text"
            warn_once(f"{name} looks like {one.what}: {quoted(lines[0][:_SHOWN])}; the command reads {meant}, or {remedy}")
            return


def _lines(block: bytes) -> list[str]:
    """Return the lines at the beginning of a block that are not empty; a last one that is cut off only if it is alone."""
    lines = block[:_LOOKED_AT].decode("utf-8-sig", "replace").split("\n")
    if len(lines) > 1 and len(block) > _LOOKED_AT:
        lines.pop()
    return [line for line in map(str.strip, lines) if line]
