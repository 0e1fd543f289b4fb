"""Segments in tags: WMT's .sgm test sets and IWSLT's files. Neither is reliable XML, so both are read line by line."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.readers.numbered_lines import join_names, pair_up, pair_up_files, read_texts

_TAG = re.compile(r"<(/?)(seg|doc)\b([^<>]*)>|<!--|-->", re.IGNORECASE)
_SEGMENT = re.compile(r"<seg\b[^<>]*\bid\s*=", re.IGNORECASE)
_NO_TEXT = re.compile(r"\s*(?:<[^<>]*>)?\s*")
_ID = re.compile(r"\b(?:doc)?id\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>]+))", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|#([0-9]{1,7})|#x([0-9a-fA-F]{1,6}));")
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}
_LINE_ENDS = re.compile(r"(?:\r?\n)+")  # for which a reference may stand

# Lines of IWSLT's training files that are not text. Titles and descriptions are parallel text.
_METADATA = re.compile(r"</?(?:doc|url|keywords|speaker|talkid|reviewer|translator|\?xml|mteval|srcset|refset)\b", re.IGNORECASE)
_TEXT_TAG = re.compile(r"</?(?:title|description)>", re.IGNORECASE)

Segment = tuple[tuple[str, str], str, str]  # (document id, segment id), text, "file, line n"


def read_sgm(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Iterator[dict]:
    """Read the pairs of two `.sgm` files. Raises UserError if the ids of the segments differ."""
    names = join_names(source), join_names(target)
    for left, right in pair_up(_all_segments(source), _all_segments(target), *names, unit="segments"):
        if left[0] != right[0]:
            raise UserError(
                f"{left[2]} is segment {left[0][1]} of document {left[0][0]!r}, but {right[2]} is segment {right[0][1]} of "
                f"document {right[0][0]!r}; both sides must have the same segments in the same order"
            )
        yield {"source": left[1], "target": right[1]}


def read_iwslt(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Iterator[dict]:
    """Read the pairs of IWSLT's files: lines, as in `train.tags.*`, or segments, as in `.xml`. The content of a file decides."""
    for left, right in pair_up_files(read_iwslt_side, source, read_iwslt_side, target, "text lines"):
        yield {"source": left, "target": right}


def _all_segments(paths: Sequence[AnyPath]) -> Iterator[Segment]:
    for name, lines in read_texts(paths):
        yield from segments(lines, name)


def read_sgm_side(paths: Sequence[AnyPath]) -> Iterator[str]:
    """Read the segments of one side."""
    return (text for _, text, _ in _all_segments(paths))


def read_iwslt_side(paths: Sequence[AnyPath]) -> Iterator[str]:
    """Read the text lines or segments of one side."""
    for name, lines in read_texts(paths, "iwslt_xml"):
        head = []
        for line in lines:
            head.append(line)
            if _SEGMENT.search(line) or not (_METADATA.match(line) or _TEXT_TAG.match(line) or _NO_TEXT.fullmatch(line)):
                break
        has_segments, lines = bool(head and _SEGMENT.search(head[-1])), chain(head, lines)
        yield from (text for _, text, _ in segments(lines, name)) if has_segments else _text_lines(lines, name)


def _text_lines(lines: Iterator[str], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if _SEGMENT.search(line):
            raise UserError(f"{name}, line {number}: expected text as in the lines before, but found a segment: {line[:40]!r}")
        if not _METADATA.match(line):
            yield _LINE_ENDS.sub(" ", _unescape(_TEXT_TAG.sub("", line))).strip()


def segments(lines: Iterator[str], name: str) -> Iterator[Segment]:
    """Return the `<seg id>` elements of one file, without those in comments.

    Raises UserError for one without an id or an end, for a comment without an end, and for a file that has something else.
    """
    document, open_id, opened, parts, comment = "", None, 0, [], 0
    found, other = False, ""
    for number, line in enumerate(lines, start=1):
        position, other = 0, other or line
        for tag in _TAG.finditer(line):
            if tag[2] is None and open_id is None:
                comment = 0 if tag[0] == "-->" else comment or number
            if comment or tag[2] is None:
                continue
            closes, kind = tag[1] == "/", tag[2].lower()
            if open_id is not None and not (closes and kind == "seg"):
                raise UserError(f"{name}, line {opened}: segment {open_id} has no </seg> before line {number}")
            if kind == "doc":
                document = "" if closes else _attribute(tag[3]) or ""
            elif closes:
                if open_id is None:
                    raise UserError(f"{name}, line {number}: </seg> without <seg>")
                parts.append(line[position : tag.start()])
                yield (document, open_id), " ".join(_unescape(" ".join(parts)).split()), f"{name}, line {opened},"
                open_id, parts = None, []
            else:
                open_id, opened, found = _attribute(tag[3]), number, True
                if open_id is None:
                    raise UserError(f'{name}, line {number}: a segment without an id; expected <seg id="...">')
            position = tag.end()
        if open_id is not None:
            parts.append(line[position:])
    if open_id is not None:
        raise UserError(f"{name}, line {opened}: segment {open_id} has no </seg>")
    if comment:
        raise UserError(f"{name}, line {comment}: expected --> at the end of a comment, but found none")
    if other and not found:
        raise UserError(f'{name} has no <seg id="...">, but {other[:40]!r}; choose the `format` of this file')


def _attribute(attributes: str) -> str | None:
    match = _ID.search(attributes)
    return None if match is None else next(value for value in match.groups() if value is not None)


def _unescape(text: str) -> str:
    """Replace XML's five entities and character references; all else stays unchanged."""
    return _ENTITY.sub(_character, text) if "&" in text else text


def _character(match: re.Match) -> str:
    if match[0] in _ENTITIES:
        return _ENTITIES[match[0]]
    code = int(match[1]) if match[1] else int(match[2], 16)
    # Surrogates and numbers beyond Unicode are no characters: the reference stays as text.
    return chr(code) if code < 0xD800 or 0xE000 <= code < 0x110000 else match[0]
