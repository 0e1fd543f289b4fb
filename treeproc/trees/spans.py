"""Constituency trees as spans: pure functions without recursion.

A tree (or a document of several trees) is the list of its nonterminals in pre-order. Each has a label and a half-open span of
leaves. Parents and subtrees follow from order and spans alone (the paper's Proposition 1). A node's parent is the last earlier
node whose span is still open, so unary chains need no extra mark.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from treeproc.shards.schema import UNANALYSED

# Only ASCII blanks count: words of treebanks may contain no-break spaces.
_TOKEN = re.compile(r"\(|\)|[^\s()]+", re.ASCII)
_BRACKETS = {"LRB": "(", "RRB": ")", "LSB": "[", "RSB": "]", "LCB": "{", "RCB": "}"}
_ROUND = {"(": "-LRB-", ")": "-RRB-"}
# What readers take for a character: treebanks' escapes, and our own, with the number of the character.
_ESCAPE = re.compile(r"-(?:([LR][RSC]B)|U\+([0-9A-F]{4}))-|\\([/*])")
# What a written word cannot hold, or would be read as the beginning of an escape.
_SPECIAL = re.compile(r"[\s()]|-(?=(?:[LR][RSC]B|U\+[0-9A-F]{4})(?:[-\s()]|\\[/*]))|\\(?=[/*])")

# Tag of traces and other empty elements, which are no words.
EMPTY_TAG = "-NONE-"

# Root labels without information: of English treebanks, which also leave them empty, and of TIGER.
ROOT_LABELS = ("ROOT", "TOP", "VROOT", "")


@dataclass(frozen=True)
class SpanTree:
    """Nonterminals in pre-order: `labels[i]` spans leaves [starts[i], ends[i])."""

    labels: list[str]
    starts: list[int]
    ends: list[int]

    def __len__(self) -> int:
        return len(self.labels)


def parents_and_subtree_ends(tree: SpanTree) -> tuple[list[int], list[int]]:
    """Return the parent index of every node (-1 for a root) and the end of its subtree in pre-order."""
    open_nodes: list[int] = []
    parents, subtree_ends = [], [len(tree)] * len(tree)
    for node, start in enumerate(tree.starts):
        while open_nodes and tree.ends[open_nodes[-1]] <= start:
            subtree_ends[open_nodes.pop()] = node
        parents.append(open_nodes[-1] if open_nodes else -1)
        open_nodes.append(node)
    return parents, subtree_ends


def read_brackets(text: str) -> tuple[list[str], list[str], SpanTree]:
    """Read words without escapes, tags and nonterminals of one tree in Penn Treebank brackets.

    A pre-terminal `(TAG word)` gives a word and its tag; a bracket above it gives a nonterminal. Raises ValueError with the
    character position if the brackets do not form one tree.
    """
    words: list[str] = []
    tags: list[str] = []
    labels: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    # An open bracket is [label, node]; node is -1 while the bracket is empty, -2 for a pre-terminal.
    open_brackets: list[list] = []
    previous = ""
    for match in _TOKEN.finditer(text):
        token, at = match.group(), match.start()
        if token == "(":
            if words and not open_brackets:
                raise ValueError(f"a second tree starts at character {at + 1}")
            if open_brackets and open_brackets[-1][1] < 0:
                if open_brackets[-1][1] == -2:
                    raise ValueError(f"a word and a bracket share a parent at character {at + 1}")
                open_brackets[-1][1] = len(labels)
                labels.append(open_brackets[-1][0])
                starts.append(len(words))
                ends.append(-1)
            open_brackets.append(["", -1])
        elif token == ")":
            if not open_brackets:
                raise ValueError(f"unbalanced ')' at character {at + 1}")
            node = open_brackets.pop()[1]
            if node == -1:
                raise ValueError(f"empty bracket at character {at + 1}")
            if node >= 0:
                ends[node] = len(words)
        elif not open_brackets:
            raise ValueError(f"text outside of brackets at character {at + 1}")
        elif previous == "(":
            open_brackets[-1][0] = token
        elif open_brackets[-1][1] == -1:
            open_brackets[-1][1] = -2
            words.append(_ESCAPE.sub(_character, token))
            tags.append(open_brackets[-1][0])
        else:
            raise ValueError(f"a word beside brackets or a second word at character {at + 1}")
        previous = token
    if open_brackets:
        raise ValueError(f"{len(open_brackets)} bracket(s) are not closed")
    if not words:
        raise ValueError("no tree found")
    return words, tags, SpanTree(labels, starts, ends)


def read_nodes(root: Any, inside: Callable[[Any], tuple[str, Sequence] | None]) -> tuple[SpanTree, list]:
    """Read the nonterminals and the pre-terminals of a tree of objects, as other packages have them.

    `inside` gives the label and the children of a nonterminal, and None for a pre-terminal.
    """
    tree = SpanTree([], [], [])
    leaves: list = []
    stack: list = [(root, -1)]
    while stack:
        node, opened = stack.pop()
        if opened >= 0:
            tree.ends[opened] = len(leaves)
        elif (found := inside(node)) is None:
            leaves.append(node)
        else:
            label, children = found
            stack.append((node, len(tree)))
            tree.labels.append(label)
            tree.starts.append(len(leaves))
            tree.ends.append(-1)
            stack.extend((child, -1) for child in reversed(children))
    return tree, leaves


def write_brackets(tree: SpanTree, words: Sequence[str], tags: Sequence[str]) -> str:
    """Write a tree with one root in Penn Treebank brackets; the inverse of `read_brackets`."""
    out: list[str] = []
    open_ends: list[int] = []
    node = 0
    for i, (word, tag) in enumerate(zip(words, tags, strict=True)):
        while node < len(tree) and tree.starts[node] == i:
            out.append(f" ({tree.labels[node]}")
            open_ends.append(tree.ends[node])
            node += 1
        out.append(f" ({_escape_tag(tag)} {escape(word)})")
        while open_ends and open_ends[-1] == i + 1:
            open_ends.pop()
            out.append(")")
    return "".join(out).lstrip()


def escape(word: str) -> str:
    """Return a word as a leaf of a written tree, from which `read_brackets` makes the word again.

    Round brackets are `-LRB-` and `-RRB-`. White space is `-U+0020-`, with the number of the character. So is the first
    character of what readers would take for an escape. An empty word, which no line has, is `_`.
    """
    return _SPECIAL.sub(lambda match: _ROUND.get(match[0]) or f"-U+{ord(match[0]):04X}-", word) or "_"


def _character(match: re.Match[str]) -> str:
    """Return the character that an escape stands for. No escape stands for a line end, or for what needs none."""
    bracket, number, treebanks = match.groups()
    if number is None:
        return _BRACKETS[bracket] if bracket else treebanks
    character = chr(int(number, 16))
    return character if character in "-\\" or (character.isspace() and character != "\n") else match[0]


@lru_cache(4096)
def _escape_tag(tag: str) -> str:
    # A tag stands for itself: models and tables know it in this form.
    return re.sub(r"[\s()]", "_", _ROUND.get(tag, tag)) or "_"


def flat_tree(num_leaves: int) -> SpanTree:
    """Return one node over all leaves: the fallback for sentences that the parser could not analyse."""
    return SpanTree([UNANALYSED], [0], [num_leaves])


def plain_label(label: str) -> str:
    """Return a label without function tags and indices: NP-SBJ-1 -> NP."""
    return label if label.startswith("-") else re.split(r"(?<=.)[-=|]", label, maxsplit=1)[0]


def normalise(tree: SpanTree, *, collapse_unary: bool) -> SpanTree:
    """Return the normal form that models read.

    It removes function tags and indices (NP-SBJ-1 -> NP). It removes root labels of treebank files, such as ROOT, if another
    node spans the same leaves. With `collapse_unary`, a chain of nodes over the same leaves keeps its lowest label, as in the
    released code.
    """
    labels: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for label, start, end in zip(tree.labels, tree.starts, tree.ends, strict=True):
        label = plain_label(label)
        chained = bool(labels) and (starts[-1], ends[-1]) == (start, end)
        if chained and (collapse_unary or labels[-1] in ROOT_LABELS):
            labels[-1] = label
            continue
        labels.append(label)
        starts.append(start)
        ends.append(end)
    # A bare pre-terminal has no nonterminal, but every tree needs at least one.
    return SpanTree([label or UNANALYSED for label in labels], starts, ends) if labels else flat_tree(1)


def keep_leaves(tree: SpanTree, kept: Sequence[bool]) -> SpanTree:
    """Return the tree over the kept leaves. Nodes without a leaf are removed."""
    before = [0, *accumulate(map(int, kept))]
    nodes = [
        (label, before[start], before[end])
        for label, start, end in zip(tree.labels, tree.starts, tree.ends, strict=True)
        if before[start] < before[end]
    ]
    return SpanTree([n[0] for n in nodes], [n[1] for n in nodes], [n[2] for n in nodes])


def draw(tree: SpanTree, words: Sequence[str], tags: Sequence[str] | None = None) -> str:
    """Draw the tree as indented text, one node or word per line."""
    parents, _ = parents_and_subtree_ends(tree)
    lowest = [-1] * len(words)
    for node in range(len(tree)):
        lowest[tree.starts[node] : tree.ends[node]] = [node] * (tree.ends[node] - tree.starts[node])
    # Rows in reading order: (parent node, text); a node comes before the words and nodes below it.
    rows: list[tuple[int, int, str]] = []
    node = 0
    for i, word in enumerate(words):
        while node < len(tree) and tree.starts[node] == i:
            rows.append((parents[node], node, tree.labels[node]))
            node += 1
        rows.append((lowest[i], -1, f"{tags[i]} {word}" if tags else word))
    last_child = {parent: row for row, (parent, _, _) in enumerate(rows)}
    lines: list[str] = []
    indent: dict[int, str] = {-1: ""}
    for row, (parent, node, text) in enumerate(rows):
        is_last = last_child[parent] == row
        branch = "" if parent == -1 else ("└─ " if is_last else "├─ ")
        lines.append(indent[parent] + branch + text)
        if node >= 0:
            indent[node] = indent[parent] + ("" if parent == -1 else ("   " if is_last else "│  "))
    return "\n".join(lines)
