"""Finds sentences that are long or twisted: `python docs/check_english.py [FILE ...]`.

It reads Markdown, the docstrings and all other texts of Python files, and the comments of configurations and of the Makefile.

The rules are those of CONTRIBUTING.md. A finding is a line `FILE:LINE: what`, and the exit status is then 1.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

MOST_WORDS = 30  # the rule is 25; a few sentences of numbers and names need more
REPOSITORY = Path(__file__).resolve().parent.parent
PROSE = ("README.md", "docs/**/*.md")
CODE = ("treeproc/**/*.py", "treenet/**/*.py", "workflows/*.py", "benchmarks/*.py")
COMMENTED = ("treenet/cli/configs/*.yaml", "cluster.yaml", "Makefile")

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
    (r"\braises? \w+ where\b|\bnone where\b", "if"),
    (r"(?<!there )\b(?:is|are) no (?!longer|better|more|other|less|such|worse|\w+er than)", "is not a"),
    (r"\b(?:has|have) not(?=[.,;:)]|$)", "lacks; does not have"),
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
        mark = re.match(r"`{3,}|~{3,}|\$\$|<!-- (?:settings|words) ", stripped)
        begins = (
            bool(mark) or not stripped or bool(re.match(r"([-*+]|\d+\.|#+|>|\||<!--|:)\s?", stripped)) or line.startswith("    ")
        )
        if begins and paragraph:
            yield start, " ".join(paragraph)
            paragraph = []
        if mark:
            is_over = mark[0] == "$$" and stripped.count("$$") == 2
            fence = "" if is_over else "<!-- end -->" if stripped.startswith("<!--") else mark[0]  # a table made of descriptions
        elif stripped.startswith("|"):
            yield from ((number, cell.strip()) for cell in stripped.strip("|").split("|") if cell.strip(" -:"))
        elif stripped and not stripped.startswith("<!--") and not (line.startswith("    ") and not paragraph):
            start = start if paragraph else number
            paragraph.append(re.sub(r"^([-*+]|\d+\.|#+|>|:)\s+", "", stripped))


def comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs of comments in YAML and in the Makefile. A comment beside a value is a paragraph."""
    whole = [re.fullmatch(r"\s*# ?(.*)", line) for line in text.split("\n")]
    yield from markdown_paragraphs("\n".join(found[1].replace("  ", "    ", 1) if found else "" for found in whole))
    for number, line in enumerate(text.split("\n"), start=1):
        if not whole[number - 1] and (beside := re.search(r"\s# (.*)", line)):
            yield number, beside[1]


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs of docstrings and of all other texts: messages, descriptions of settings, help, reports."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            docstrings.add(node.body[0].value)
            yield from ((node.body[0].lineno + line - 1, text) for line, text in markdown_paragraphs(doc))
    yield from messages(tree, docstrings)


def messages(node: ast.AST, left_out: Collection[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, part) of the string literals below a node. In a message, a semicolon and a colon end a part, as a full stop does."""
    if node in left_out:
        return
    if isinstance(node, ast.Constant | ast.JoinedStr):
        for part in re.split(r"[;:]\s", literal(node)):
            if " " in part:
                yield node.lineno, part
    values = [one for one in node.values if isinstance(one, ast.FormattedValue)] if isinstance(node, ast.JoinedStr) else None
    for child in ast.iter_child_nodes(node) if values is None else values:
        yield from messages(child, left_out)


def literal(node: ast.Constant | ast.JoinedStr) -> str:
    """The text of a string literal; a value in it is the word `VALUE`, a constant of another type the empty text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(literal(one) if isinstance(one, ast.Constant) else "VALUE" for one in node.values)


def check(path: Path) -> Iterator[str]:
    """The findings of a file, as lines."""
    text = path.read_text(encoding="utf-8")
    read = {".md": markdown_paragraphs, ".py": python_texts}.get(path.suffix, comments)
    for line, paragraph in read(text):
        for what in findings(paragraph):
            yield f"{path.relative_to(REPOSITORY)}:{line}: {what}"


def main(arguments: list[str]) -> int:
    """Check the files, or all of the repository."""
    globs = (*PROSE, *CODE, *COMMENTED)
    paths = [Path(name).resolve() for name in arguments] or sorted(path for glob in globs for path in REPOSITORY.glob(glob))
    lines = [line for path in paths if "_build" not in path.parts for line in check(path)]
    print("\n".join([*lines, f"{len(lines)} findings in {len(paths)} files"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
