"""Slow oracle of the encode stage: one example, one tree, one word at a time, with the functions of `treeproc.trees.spans`."""

from collections.abc import Sequence
from itertools import chain

from treeproc.shards.schema import SPLIT_WORD_PREFIX
from treeproc.trees.spans import SpanTree, keep_leaves, normalise, parents_and_subtree_ends, read_brackets


def join(trees: Sequence[SpanTree], num_leaves: Sequence[int]) -> SpanTree:
    """Trees side by side over the concatenated leaves: a document with several roots."""
    joined = SpanTree([], [], [])
    offset = 0
    for tree, count in zip(trees, num_leaves, strict=True):
        joined.labels.extend(tree.labels)
        joined.starts.extend(start + offset for start in tree.starts)
        joined.ends.extend(end + offset for end in tree.ends)
        offset += count
    return joined


def split_words(tree: SpanTree, tags: Sequence[str], pieces_per_word: Sequence[int], least: int = 2) -> SpanTree:
    """The tree over subword pieces instead of words (paper, section 7.4 and figure 7).

    A word of several pieces, `least` or more, becomes a subtree of its own, whose root is labelled with its tag.
    """
    edges = [0]
    for count in pieces_per_word:
        edges.append(edges[-1] + count)
    nodes = [(edges[start], -edges[end], 0, label) for label, start, end in zip(tree.labels, tree.starts, tree.ends, strict=True)]
    nodes += [
        (edges[word], -edges[word + 1], 1, SPLIT_WORD_PREFIX + tags[word])
        for word, count in enumerate(pieces_per_word)
        if count >= least
    ]
    # Pre-order is the order by (start, longest first); the sort is stable, so unary chains keep theirs.
    nodes.sort(key=lambda node: node[:3])
    return SpanTree([n[3] for n in nodes], [n[0] for n in nodes], [-n[1] for n in nodes])


def binarise(tree: SpanTree, num_leaves: int, side: str) -> SpanTree:
    """Divide one node of more than two children after the other, until there is none."""
    nodes = list(zip(tree.starts, tree.ends, tree.labels, strict=True))
    while True:
        current = SpanTree([n[2] for n in nodes], [n[0] for n in nodes], [n[1] for n in nodes])
        parents = parents_and_subtree_ends(current)[0]
        for node, (start, end, label) in enumerate(nodes):
            below = [nodes[i][:2] for i, parent in enumerate(parents) if parent == node]
            covered = {leaf for s, e in below for leaf in range(s, e)}
            children = sorted(below + [(leaf, leaf + 1) for leaf in range(start, end) if leaf not in covered])
            if len(children) > 2:
                added = (children[1][0], end) if side == "right" else (start, children[-2][1])
                name = label if label.startswith("@") else "@" + label
                # Before the nodes that it holds, behind those that hold it.
                place = next((i for i, (s, e, _) in enumerate(nodes) if (s, -e) > (added[0], -added[1])), len(nodes))
                nodes.insert(place, (*added, name))
                break
        else:
            return current


def word_pieces(line: str, ends: Sequence[int], encode) -> list[list[int]]:
    """Pieces of the words of a line, each with the characters before it; `encode` takes one string."""
    edges = [0, *ends[:-1], len(line)]
    return [encode((" " if i == 0 else "") + line[edges[i] : edges[i + 1]]) for i in range(len(ends))]


def _mixed(number: int) -> int:
    """SplitMix64."""
    x = (number + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
    return x ^ x >> 31


def part_key(example_id: int, seed: int, place: int) -> int:
    """The random number of a part of an example, such as a node or a tree."""
    return _mixed((_mixed((_mixed(seed % 2**64) + example_id) % 2**64) + place) % 2**64)


def permute_labels(trees: Sequence[SpanTree], example_id: int, seed: int) -> list[SpanTree]:
    """The trees of an example with the labels of each permuted below its root."""
    found, first = [], 0
    for tree in trees:
        order = sorted(range(1, len(tree)), key=lambda node: part_key(example_id, seed, first + node))
        found.append(SpanTree([*tree.labels[:1], *(tree.labels[node] for node in order)], tree.starts, tree.ends))
        first += len(tree)
    return found


Numbered = tuple[int, int, SpanTree]  # example id, place of the tree in its line, and a tree with words


def other_shapes(trees: Sequence[Numbered], seed: int) -> list[SpanTree]:
    """The trees of one split, each with its labels on the shape of another one."""

    def size(tree: Numbered) -> tuple[int, int]:
        return tree[2].ends[0], len(tree[2])

    def key(tree: Numbered) -> int:
        return part_key(tree[0], seed, tree[1])

    def shape(tree: Numbered) -> tuple[list[int], list[int]]:
        return tree[2].starts, tree[2].ends

    donors = []
    for tree in trees:
        ring = sorted((one for one in trees if size(one) == size(tree)), key=key)
        at = next(place for place, one in enumerate(ring) if one is tree)
        others = [one for one in [*ring[at:], *ring[:at]] if shape(one) != shape(tree)]
        wider = sorted(size(one) for one in trees if size(one)[0] == size(tree)[0] and size(one)[1] > size(tree)[1])
        wide = sorted((one for one in trees if size(one) == wider[0]), key=key) if wider else [tree]
        donors.append(others[0] if others else wide[key(tree) % len(wide)])
    found, first = [], 0
    for number, ((example_id, _, own), (_, _, shape_of)) in enumerate(zip(trees, donors, strict=True)):
        if number and trees[number - 1][0] != example_id:
            first = 0
        order = sorted(range(1, len(shape_of)), key=lambda node: part_key(example_id, seed, first + node))
        kept = sorted([0, *order[len(shape_of) - len(own) :]])
        found.append(SpanTree(own.labels, [shape_of.starts[node] for node in kept], [shape_of.ends[node] for node in kept]))
        first += len(shape_of)
    return found


def control_tree(kind: str, num_words: int, example_id: int, seed: int) -> SpanTree:
    """A control tree over `num_words` >= 1 words, one cut after the other."""
    key = _mixed((_mixed(seed % 2**64) + example_id) % 2**64)
    nodes = [(0, num_words)]
    waiting = [] if kind == "flat" else [(0, num_words)]
    while waiting:
        start, end = waiting.pop()
        if end - start < 2:
            continue
        draw = _mixed((key + (start << 32) + end) % 2**64) >> 32
        uniform = start + 1 + (draw * (end - start - 1) >> 32)
        middle = {"balanced": (start + end) // 2, "left": end - 1, "right": start + 1, "random": uniform}[kind]
        waiting += [(start, middle), (middle, end)]
        nodes += [(s, e) for s, e in ((start, middle), (middle, end)) if e - s > 1]
    nodes.sort(key=lambda node: (node[0], -node[1]))
    return SpanTree(["X"] * len(nodes), [n[0] for n in nodes], [n[1] for n in nodes])


def read_trees(parsed: dict, config) -> list[tuple[list[str], SpanTree]]:
    """Tags and trees of a line, of those trees that have words."""
    trees = []
    for brackets in parsed["trees"]:
        words, word_tags, tree = read_brackets(brackets)
        kept = [tag != "-NONE-" for tag in word_tags]
        if any(kept):
            normal = normalise(keep_leaves(tree, kept), collapse_unary=config.collapse_unary)
            trees.append(([tag for tag in word_tags if tag != "-NONE-"], normal))
    return trees


def encode_example(text: dict, parsed: dict, encode, config, labels, tags, others: Sequence[SpanTree] = ()) -> dict:
    """An encoded row; `labels` and `tags` give ids. `others` are its trees for `tree_source: other_shape`."""
    trees = read_trees(parsed, config)
    word_tags = list(chain.from_iterable(tags for tags, _ in trees))
    if config.tree_source in ("parsed", "unlabelled", "permuted_labels", "other_shape"):
        normal = [tree for _, tree in trees]
        if config.tree_source == "permuted_labels":
            normal = permute_labels(normal, text["example_id"], config.seed)
        elif config.tree_source == "other_shape":
            normal = others
        tree = join(normal, [len(t) for t, _ in trees])
        if config.documents == "dummy_root" and len(trees) > 1:
            tree = SpanTree(["DOC", *tree.labels], [0, *tree.starts], [len(word_tags), *tree.ends])
    elif word_tags:
        kind = "flat" if config.tree_source == "flat_tags" else config.tree_source
        tree = control_tree(kind, len(word_tags), text["example_id"], config.seed)
    else:
        tree = SpanTree([], [], [])
    pieces = word_pieces(text["source"], parsed["words"]["end_char"], encode)
    counts = [len(ids) for ids in pieces]
    tree = split_words(tree, word_tags, counts, 1 if config.tree_source == "flat_tags" else 2)
    if config.binarize != "none":
        tree = binarise(tree, sum(counts), config.binarize)
    if config.tree_source == "unlabelled":
        shown = [label if label.removeprefix("@").startswith("POS=") else "X" for label in tree.labels]
        tree = SpanTree(shown, tree.starts, tree.ends)
    parents, subtree_ends = parents_and_subtree_ends(tree)
    return {
        "example_id": text["example_id"],
        "leaves": {
            "piece": list(chain.from_iterable(pieces)),
            "word_index": [i for i, count in enumerate(counts) for _ in range(count)],
            "pos_tag": [tags[word_tags[i]] for i, count in enumerate(counts) for _ in range(count)],
        },
        "nodes": {"label": [labels[label] for label in tree.labels], "parent": parents},
        "spans": {"start": tree.starts, "end": tree.ends, "subtree_end": subtree_ends},
        "tgt_pieces": list(chain.from_iterable(encode(" " + word) for word in text["target"].split(" "))),
    }


def slow_depths(parents) -> list[int]:
    """Depth of every node by its parent; a root has depth 0."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


def check_tree(tree: SpanTree, num_leaves: int) -> None:
    """Raise ValueError unless the spans are non-empty, nested, in pre-order and cover every leaf."""
    for node, parent in enumerate(parents_and_subtree_ends(tree)[0]):
        start, end = tree.starts[node], tree.ends[node]
        if not 0 <= start < end <= num_leaves:
            raise ValueError(f"node {node} has the span [{start}, {end}), but there are {num_leaves} leaves")
        if parent >= 0 and not (tree.starts[parent] <= start and end <= tree.ends[parent]):
            raise ValueError(f"node {node} crosses node {parent}")
        if node and start < tree.starts[node - 1]:
            raise ValueError(f"node {node} is not in pre-order")
    roots = [i for i, parent in enumerate(parents_and_subtree_ends(tree)[0]) if parent < 0]
    edges = [0] + [tree.ends[root] for root in roots]
    if [tree.starts[root] for root in roots] != edges[:-1] or edges[-1] != num_leaves:
        raise ValueError(f"the roots do not cover all {num_leaves} leaves")
