"""Arguments of the library: `UserError`, or the result of an obvious computation. Never another result without a word."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from fuzz_oracles import nodes, normal_nodes, trees
from fuzz_texts import WORDS, brackets, nested

# Python's own error is the promise of docs/api.md for an argument that a function lacks.
_WRONG = (
    None, True, False, 1.0, 0.5, "1", b"1", [], {}, (), -2, 10**30, float("nan"), "left ", "Left", "LEFT", "foo", object(),
    np.int64(1), np.float32(1), np.array(1), np.array([1]), 1j, "\ud800", [None], {"a": 1}, {1, 2}, iter([1]), range(1),
)  # fmt: skip


@dataclass
class Call:
    """A call of the library. `wanted` is its result, or None if it must be refused."""

    name: str
    arguments: str
    run: Callable[[], Any]
    wanted: Any


def _structure(found: Any) -> list[list[tuple[str, int, int]]]:
    """Return (label, start, end) of the nodes of all trees."""
    starts, ends = found.start.tolist(), found.end.tolist()
    return [list(zip(labels, start, end, strict=False)) for labels, start, end in zip(found.labels, starts, ends, strict=True)]


def _is_integer(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind == "i"
    return is_array or (isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_))


def _as_text(value: Any) -> str:
    return repr(value)[:200].encode("utf-8", "backslashreplace").decode()


def _brackets(random: Random) -> Call:
    from treenet import TreeStructure

    labels = ["S", "NP", "NP-SBJ", "ROOT", "-LRB-", "A=B", "X|Y", "\u2028", "N\x1cP"]
    batch: list[Any] = [
        brackets(random, labels, WORDS) if random.random() < 0.3 else nested(random, labels, WORDS, random.randint(0, 4))
        for _ in range(random.randint(0, 3))
    ]
    wrong = random.random() < 0.1
    if wrong:
        batch.insert(random.randint(0, len(batch)), random.choice([value for value in _WRONG if not isinstance(value, str)]))
    collapse = random.choice([True, True, False, random.choice(_WRONG)])
    wanted = None
    if isinstance(collapse, bool) and not wrong:
        read = [trees(text) if _is_tree(text) else None for text in batch]
        if read and None not in read:
            wanted = [_sorted(Counter(_over_words(tree[0], collapse))) for tree in read]
    return Call(
        "from_brackets", f"{_as_text(batch)}, collapse_unary={_as_text(collapse)}",
        lambda: [_sorted(Counter(tree)) for tree in _structure(TreeStructure.from_brackets(batch, collapse_unary=collapse))],
        wanted,
    )  # fmt: skip


def _is_tree(text: str) -> bool:
    """Return whether a text is one tree: every bracket has a label or none, and then a word or brackets."""
    tokens = [token for token in text.replace("(", " ( ").replace(")", " ) ").split(" ") if token.strip("\t\n\r\f\v")]
    tokens = [part for token in tokens for part in _ascii_split(token)]

    def read(at: int) -> int:
        if at >= len(tokens) or tokens[at] != "(":
            return -1
        at += 1
        has_label = at < len(tokens) and tokens[at] not in "()"
        at += has_label
        if at < len(tokens) and tokens[at] not in "()":
            at += 1
            return at + 1 if has_label and at < len(tokens) and tokens[at] == ")" else -1
        count = 0
        while at < len(tokens) and tokens[at] == "(":
            at, count = read(at), count + 1
            if at < 0:
                return -1
        return at + 1 if count and at < len(tokens) and tokens[at] == ")" else -1

    return read(0) == len(tokens) and bool(tokens)


def _ascii_split(token: str) -> list[str]:
    for blank in "\t\n\r\f\v":
        token = token.replace(blank, " ")
    return [part for part in token.split(" ") if part]


def _over_words(tree: Any, collapse: bool) -> list[tuple[str, int, int]]:
    """`from_brackets` keeps empty elements: its leaves are the words of the caller."""
    return normal_nodes(nodes(tree, keep_empty=True), collapse)


def _sorted(found: Counter) -> list:
    return sorted(found.items())


def _spans(random: Random) -> Call:
    from treenet import TreeStructure

    batch: list[Any] = []
    for _ in range(random.randint(1, 3)):
        tree: list[Any] = []
        for _ in range(random.randint(0, 4)):
            start = random.randint(0, 4)
            span: list[Any] = [start, start + random.randint(0 if random.random() < 0.05 else 1, 4)]
            span += [random.choice(["A", "B", ""])] if random.random() < 0.6 else []
            if random.random() < 0.06:
                span[random.randrange(len(span))] = random.choice(_WRONG)
            tree.append(random.choice([tuple, list])(span) if random.random() < 0.98 else random.choice(_WRONG))
        batch.append(tree)
    sizes: Any = None
    if random.random() < 0.4:
        sizes = [random.choice([4, 8, 9, random.choice(_WRONG)]) for _ in batch]
    known = all(batch) if sizes is None else all(_is_integer(n) and 1 <= n < 2**31 for n in sizes)  # the numbers of leaves
    valid = known and all(_are_spans(tree) for tree in batch)
    wanted = None
    if valid:
        counts = sizes if sizes is not None else [max(int(span[1]) for span in tree) for tree in batch]
        if all(_nest(tree, int(count)) for tree, count in zip(batch, counts, strict=True)):
            full = [[(str(span[2]) if len(span) > 2 else "X", int(span[0]), int(span[1])) for span in tree] for tree in batch]
            wanted = [_sorted(Counter(tree)) for tree in full]
    return Call(
        "from_spans", f"{_as_text(batch)}, num_leaves={_as_text(sizes)}",
        lambda: [_sorted(Counter(tree)) for tree in _structure(TreeStructure.from_spans(batch, num_leaves=sizes))], wanted,
    )  # fmt: skip


def _are_spans(tree: Any) -> bool:
    return isinstance(tree, list) and all(
        isinstance(span, list | tuple)
        and len(span) in (2, 3)
        and all(_is_integer(part) and part < 2**31 for part in span[:2])
        and (len(span) == 2 or (isinstance(span[2], str) and "\ud800" not in span[2]))
        for span in tree
    )


def _nest(tree: Any, count: int) -> bool:
    inside = all(0 <= span[0] < span[1] <= count for span in tree)
    return inside and not any(a[0] < b[0] < a[1] < b[1] for a in tree for b in tree)


def _arcs(random: Random) -> Call:
    from treenet import TreeStructure

    batch: list[Any] = []
    for _ in range(random.randint(1, 3)):
        count = random.randint(1, 6)
        order = random.sample(range(count), count)
        heads: list[Any] = [-1] * count
        for place, word in enumerate(order[1:], start=1):
            heads[word] = random.choice(order[:place])
        kind = random.randrange(10)
        if kind == 0:  # heads of CoNLL-U
            heads = [head + 1 for head in heads]
        elif kind == 1:  # heads of spaCy
            heads = [word if head < 0 else head for word, head in enumerate(heads)]
        elif kind == 2:
            heads[random.randrange(count)] = random.choice([-1, -2, 0, count, random.choice(_WRONG)])
        batch.append(heads if random.random() < 0.98 else random.choice(_WRONG))
    shape = random.choice(["flat", "left", "right", "flat", "left", "right", random.choice(_WRONG)])
    wanted = None
    if isinstance(shape, str) and shape in ("flat", "left", "right") and all(_is_dependency_tree(heads) for heads in batch):
        wanted = [_phrases(list(map(int, heads)), shape) for heads in batch]
    return Call(
        "from_arcs", f"{_as_text(batch)}, shape={_as_text(shape)}",
        lambda: [
            own if own is None else sorted((start, end) for _, start, end in tree)
            for own, tree in zip(wanted or [()] * 9, _structure(TreeStructure.from_arcs(batch, shape=shape)), strict=False)
        ],
        wanted,
    )  # fmt: skip


def _is_dependency_tree(heads: Any) -> bool:
    if not isinstance(heads, list) or not heads or not all(_is_integer(head) and -1 <= head < len(heads) for head in heads):
        return False
    for word in range(len(heads)):
        steps = 0
        while word != -1 and steps <= len(heads):
            word, steps = int(heads[word]), steps + 1
        if word != -1:
            return False
    return list(heads).count(-1) == 1


def _phrases(heads: list[int], shape: str) -> list[tuple[int, int]] | None:
    """Return the spans of the phrases of projective arcs, or None if the arcs cross."""

    def words(head: int) -> list[int]:
        below = [head]
        for word, above in enumerate(heads):
            if above == head:
                below += words(word)
        return sorted(below)

    found = []
    for head in range(len(heads)):
        covered = words(head)
        if covered != list(range(covered[0], covered[-1] + 1)):
            return None
        own = [word for word, above in enumerate(heads) if above == head]
        left, right = [word for word in reversed(own) if word < head], [word for word in own if word > head]
        first, last = head, head
        for word in left + right if shape == "left" else right + left:
            below = words(word)
            first, last = min(first, below[0]), max(last, below[-1])
            if shape != "flat":
                found.append((first, last + 1))
        if shape == "flat" and own:
            found.append((first, last + 1))
    return sorted(found) or [(0, 1)]


def _attention(random: Random) -> Call:
    import torch

    from treenet import TreeAttention, TreeStructure

    values: list[Any] = [random.choice([8, 16]), random.choice([1, 2]), random.choice([0.0, 0.1])]
    flags: dict[str, Any] = {"cross": False, "batch_first": random.choice([True, False])}
    given, place = True, random.randrange(8)
    if place < 3:
        values[place] = random.choice(_WRONG)
        given = place == 1 and _is_integer(values[1]) and values[1] == 1
        given = given or (place == 2 and type(values[2]) in (int, float) and 0 <= values[2] < 1)
    elif place < 5:
        name = ["cross", "batch_first"][place - 3]
        flags[name] = random.choice(_WRONG)
        given = isinstance(flags[name], bool)
    structure = TreeStructure.from_spans([[(0, 3), (0, 2)], [(0, 2)]])
    states = torch.randn(2, 5, 8 if not _is_integer(values[0]) else int(values[0]) if values[0] in (8, 16) else 8)

    def run() -> Any:
        module = TreeAttention(*values, **flags).eval()
        if flags["cross"]:
            return "made"
        inputs = states if flags["batch_first"] else states.transpose(0, 1)
        out = module(inputs, structure=structure)
        out = out[0] if isinstance(out, tuple) else out
        assert out.shape == inputs.shape and bool(torch.isfinite(out[:, :2] if flags["batch_first"] else out[:2]).all())
        return "made"

    return Call("TreeAttention", f"{_as_text(values)}, {_as_text(flags)}", run, "made" if given else None)


CALLS = (_brackets, _spans, _arcs, _attention)


def fuzz_api(count: int, seed: int = 1) -> tuple[dict[str, int], list[str]]:
    """Make so many calls of each function. Returns the figures, and the calls that gave something else than they must."""
    from treenet import UserError

    figures, wrong = {"inputs": 0, "done": 0, "refused": 0, "silent": 0}, []
    for make in CALLS:
        for number in range(count):
            call = make(Random(f"{seed} {make.__name__} {number}"))
            figures["inputs"] += 1
            try:
                found = call.run()
            except UserError as error:
                figures["refused"] += 1
                if call.wanted is not None or "\n" in str(error) or len(str(error)) > 500:
                    wrong.append(f"{call.name}({call.arguments}): refused: {error}")
                continue
            except Exception as error:
                wrong.append(f"{call.name}({call.arguments}): {error!r}")
                continue
            figures["done"] += 1
            if call.wanted is None or found != call.wanted:
                wrong.append(f"{call.name}({call.arguments}): gives {found!r:.200}, must be {call.wanted!r:.200}")
    figures["silent"] = len(wrong)
    return figures, wrong
