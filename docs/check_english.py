"""Finds sentences that are long or twisted, in Markdown, docstrings and help texts: `python docs/check_english.py [FILE ...]`.

The rules are those of CONTRIBUTING.md. A finding is a line `FILE:LINE: what`, and the exit status is then 1.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 30  # the rule is 25; a few sentences of numbers and names need more
REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = ("README.md", "docs/**/*.md", "treeproc/**/*.py", "treenet/**/*.py", "workflows/*.py", "benchmarks/*.py")

# Turns that make a reader go back: (pattern, what to write instead).
BANNED = [
    (r"\bof which\b", "two sentences"),
    (r"\bthat of\b.*\bthat of\b", "name the things"),
    (r"\bsays? (?:what|which|how|why)\b", "what it prints, and where"),
    (r"\bas ever\b|\bof always\b|\bof before\b", "as before; earlier"),
    (r"\bnobody\b|\bnone of them\b", "a positive sentence"),
    (r"\b(?:is|are) said\b", "the command prints"),
    (r"\bfor want of\b", "without; because there is no"),
    (r"\bin vain\b", "without effect"),
    (r"\bwhoever\b|\bwhatever\b", "any; all; name the case"),
    (r"\bin place of\b", "instead of"),
    (r"\bof its own\b|\bof their own\b|\bof your own\b|\bof our own\b", "its own X"),
    (r"\ball but\b", "all except"),
    (r"\bby hand\b.*\bby hand\b", "manually, once"),
]
_BANNED = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in BANNED]

_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z0-9`]|'\w|\w+: )")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph, with code and links as single words."""
    text = _LINK.sub(r"\1", text)
    text = re.sub(r"``[^`]*``|`[^`]*`", "CODE", text)
    text = re.sub(r"\$[^$]*\$", "MATHS", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|cf|vs|Fig|Eq)\.", r"\1", text)
    return [part for part in _END.split(" ".join(text.split())) if part]


def findings(text: str) -> Iterator[str]:
    """What is wrong with the sentences of a paragraph."""
    for sentence in sentences(text):
        words = re.findall(r"\w[\w'’.,-]*", sentence)
        if len(words) > MOST_WORDS:
            yield f"{len(words)} words: {sentence[:400]}"
        for pattern, instead in _BANNED:
            if found := pattern.search(sentence):
                yield f"“{found[0]}” (write: {instead}): {sentence[:400]}"


def markdown_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs, items and cells of tables; code and formulas are left out."""
    paragraph: list[str] = []
    start, fence = 1, ""
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        stripped = line.strip()
        if fence:
            fence = "" if stripped == fence else fence
            continue
        mark = re.match(r"`{3,}|~{3,}|\$\$", stripped)
        begins = (
            bool(mark) or not stripped or bool(re.match(r"([-*+]|\d+\.|#+|>|\||<!--|:)\s?", stripped)) or line.startswith("    ")
        )
        if begins and paragraph:
            yield start, " ".join(paragraph)
            paragraph = []
        if mark:
            fence = "" if mark[0] == "$$" and stripped.count("$$") == 2 else mark[0]
        elif stripped.startswith("|"):
            yield from ((number, cell.strip()) for cell in stripped.strip("|").split("|") if cell.strip(" -:"))
        elif stripped and not stripped.startswith("<!--") and not (line.startswith("    ") and not paragraph):
            start = start if paragraph else number
            paragraph.append(re.sub(r"^([-*+]|\d+\.|#+|>|:)\s+", "", stripped))


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs of docstrings and of the descriptions of settings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            yield from ((node.body[0].lineno + line - 1, text) for line, text in markdown_paragraphs(doc))
        elif isinstance(node, ast.keyword) and node.arg in ("description", "help") and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value)


def check(path: Path) -> Iterator[str]:
    """The findings of a file, as lines."""
    text = path.read_text(encoding="utf-8")
    paragraphs = markdown_paragraphs(text) if path.suffix == ".md" else python_texts(text)
    for line, paragraph in paragraphs:
        for what in findings(paragraph):
            yield f"{path.relative_to(REPOSITORY)}:{line}: {what}"


def main(arguments: list[str]) -> int:
    """Check the files, or all of the repository."""
    paths = [Path(name).resolve() for name in arguments] or sorted(path for glob in SOURCES for path in REPOSITORY.glob(glob))
    lines = [line for path in paths if "_build" not in path.parts for line in check(path)]
    print("\n".join([*lines, f"{len(lines)} findings in {len(paths)} files"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
