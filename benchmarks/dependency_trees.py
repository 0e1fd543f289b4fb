"""Compare trees made from arcs with the constituents of a treebank that has both.

    python benchmarks/dependency_trees.py --brackets gum/test.mrg.gz --conllu gum/test.conllu.gz

Brackets are counted as by EVALB, without labels and with them. `gold` are the treebank's arcs and universal tags. `parsed` are
those of the shipped English models on its words. Control trees and the shipped constituency parser are in the same table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from measure import emit

from treeproc.extras.parser_training.treebank import Sentence, Tree, sentences_in, trees_in
from treeproc.parsers import Given, ParserConfig, build_parser, read_trees
from treeproc.readers.numbered_lines import read_texts
from treeproc.shards.rows import edges_of
from treeproc.trees.controls import control_spans
from treeproc.trees.dependency_trees import DependencySentences, dependency_phrases
from treeproc.trees.scores import score
from treeproc.trees.spans import SpanTree, normalise, parents_and_subtree_ends

SHAPES = ("layered", "flat", "left", "right")
CONTROLS = ("balanced", "left", "right", "random", "flat")
QUICK_SENTENCES = 60


def coded(columns: Sequence[Sequence[str]]) -> tuple[np.ndarray, list[str]]:
    """Return indices of names, and the names."""
    names = {name: number for number, name in enumerate(sorted({name for column in columns for name in column}))}
    return np.array([names[name] for column in columns for name in column], dtype=np.int64), list(names)


def trees_of(sentences: Sequence[Sentence], shape: str) -> tuple[list[SpanTree], np.ndarray]:
    """Return the tree of every sentence, and the number of lifted arcs."""
    edges = edges_of(np.array([len(s.words) for s in sentences]))
    governors = [g + first if g >= 0 else -1 for s, first in zip(sentences, edges.tolist(), strict=False) for g in s.governors]
    columns = (*coded([s.deprels for s in sentences]), *coded([s.upos for s in sentences]))
    words = pa.array([word for s in sentences for word in s.words], pa.string())
    flat_trees, lifted = dependency_phrases(DependencySentences(edges, np.array(governors), *columns, words), shape, "upos")
    cuts = flat_trees.node_edges(edges)
    names = np.array(flat_trees.names)
    trees = []
    for first, low, high in zip(edges.tolist(), cuts, cuts[1:], strict=False):
        starts, ends = flat_trees.starts[low:high] - first, flat_trees.ends[low:high] - first
        trees.append(SpanTree(names[flat_trees.labels[low:high]].tolist(), starts.tolist(), ends.tolist()))
    return trees, lifted


def control_trees(sentences: Sequence[Sentence], kind: str) -> list[SpanTree]:
    out = []
    for number, sentence in enumerate(sentences):
        starts, ends = control_spans(kind, np.array([len(sentence.words)]), np.array([number]), 1)
        out.append(SpanTree(["X"] * len(starts), starts.tolist(), ends.tolist()))
    return out


def depth(tree: SpanTree) -> int:
    levels: list[int] = []
    for parent in parents_and_subtree_ends(tree)[0]:
        levels.append(1 + levels[parent] if parent >= 0 else 1)
    return max(levels, default=0)


def show(case: str, gold: Sequence[tuple[list[str], SpanTree]], found: Sequence[SpanTree]) -> None:
    """Print bracket scores and shape of the trees."""
    plain, labelled = score(gold, found, labelled=False), score(gold, found)
    figures = {"precision": plain.precision, "recall": plain.recall, "f1": plain.f1, "labelled_f1": labelled.f1}
    for name, value in figures.items():
        emit("dependency_trees", case, name, value)
    emit("dependency_trees", case, "nodes_per_leaf", sum(map(len, found)) / sum(len(tags) for tags, _ in gold))
    emit("dependency_trees", case, "depth", float(np.mean([depth(tree) for tree in found])))


def matched(trees: Sequence[Tree], sentences: Sequence[Sentence]) -> list[tuple[Sentence, Tree]]:
    """Return sentences with the tree over the same words."""
    by_words = {tuple(tree.words): tree for tree in trees}
    return [(s, by_words[tuple(s.words)]) for s in sentences if tuple(s.words) in by_words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brackets", type=Path, required=True)
    parser.add_argument("--conllu", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK_SENTENCES} sentences")
    args = parser.parse_args()
    pairs = matched(trees_in(read_texts([args.brackets])), sentences_in(read_texts([args.conllu])))[
        : QUICK_SENTENCES if args.quick else None
    ]
    sentences = [sentence for sentence, _ in pairs]
    gold = [(tree.tags, normalise(tree.spans, collapse_unary=True)) for _, tree in pairs]
    show("treebank", gold, [tree for _, tree in gold])
    texts = [sentence.text for sentence in sentences]
    given = [Given({"text": s.words, "start_char": s.starts, "end_char": s.ends}) for s in sentences]
    config = ParserConfig(name="shipped", dependencies=True, device="cpu")
    whole = build_parser(config).parse(texts, given)
    show("shipped constituency parser", gold, [normalise(read_trees(vars(p))[0][1], collapse_unary=True) for p in whole])
    arcs_alone = build_parser(config.model_copy(update={"constituency": False})).parse(texts, given)
    parsed = [
        Sentence(s.text, s.words, s.starts, p.words["pos_tag"], [], p.arcs["governor"], p.arcs["deprel"], s.where)
        for s, p in zip(sentences, arcs_alone, strict=True)
    ]
    for name, own in (("gold", sentences), ("parsed", parsed)):
        for shape in SHAPES:
            trees, lifted = trees_of(own, shape)
            show(f"{name} {shape}", gold, trees)
        emit("dependency_trees", name, "lifted_arcs", int(lifted.sum()), sentences=int(np.count_nonzero(lifted)))
    for kind in CONTROLS:
        show(f"control {kind}", gold, control_trees(sentences, kind))


if __name__ == "__main__":
    main()
