"""Trees that no parser made, over the same words: what every claim about syntax is checked against.

All nonterminals carry one label, so that a control differs from a parse in nothing but the tree.
"""

import random

from treeproc.trees import UNANALYSED, SpanTree

CONTROL_TREES = ("balanced", "left", "right", "flat", "random")


def control_tree(kind: str, num_words: int, seed: int = 0) -> SpanTree:
    """A control tree over `num_words` >= 1 words; `seed` matters to the random trees alone.

    balanced, left, right and random are binary: num_words - 1 nonterminals (one for a single word).
    A random tree draws every split point uniformly.
    """
    if kind == "flat" or num_words == 1:
        return SpanTree([UNANALYSED], [0], [num_words])
    draw = random.Random(seed)
    starts: list[int] = []
    ends: list[int] = []
    stack = [(0, num_words)]
    while stack:
        start, end = stack.pop()
        if end - start < 2:
            continue
        starts.append(start)
        ends.append(end)
        match kind:
            case "balanced":
                middle = (start + end) // 2
            case "left":
                middle = end - 1
            case "right":
                middle = start + 1
            case "random":
                middle = draw.randrange(start + 1, end)
            case _:
                raise ValueError(f"control tree must be one of {', '.join(CONTROL_TREES)}, but is {kind!r}")
        stack.append((middle, end))
        stack.append((start, middle))
    return SpanTree([UNANALYSED] * len(starts), starts, ends)
