"""The encode stage: parsed words and trees to integers, for a model or for a shard."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.rows import Batches, Lists, WordEnds, batch_views, column_batch, edges_of, numbers_of, record_batches
from treeproc.shards.schema import FULL_ENCODED_SCHEMA, FULL_PARSED_SCHEMA, UNANALYSED, select
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, write_shard
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.lengths import TASK_ROWS
from treeproc.stages.run_jobs import Run, grouped, run_here
from treeproc.stages.shuffle import Donated, DonorTrees, ShapeDonors, cut, keep
from treeproc.subwords import LabelVocab, Subwords, load_pieces
from treeproc.trees.arcs import check_arcs
from treeproc.trees.controls import control_spans, hash_parts, hide_labels, permute_labels, put_labels
from treeproc.trees.dependency_trees import DependencySentences, dependency_phrases
from treeproc.trees.flat_trees import (
    Brackets,
    FlatTrees,
    binarise,
    join_documents,
    normal_form,
    read_flat_trees,
    split_words,
    with_classes,
)
from treeproc.trees.spans import SpanTree

# Columns of one batch of a shard, by name, as `rows.batch_views` gives them.
Views = Mapping[str, Any]


def encoded_columns(text: Collection[str], parsed: Collection[str], tree: TreeConfig) -> pa.Schema:
    """Return the columns of an encoded shard, from those of its text and parsed shard."""
    names = {"leaves", "nodes", "spans"}
    names |= {"tgt_pieces"} if tree.other_side in text else set()
    names |= {"arcs"} if tree.arcs_column in parsed else set()
    names |= {"label", "score"} & set(text)
    if tree.side == "source":
        names |= {"leaf_labels", "node_labels"} & set(text)
    return select(FULL_ENCODED_SCHEMA, names)


class RowEncoder:
    """Parsed rows to encoded rows: pieces within words, words' subtrees, ids instead of names."""

    def __init__(self, vocab: AnyPath, tree: TreeConfig):
        self.subwords = load_pieces(vocab)
        other = vocab / "pieces.tgt.model"
        self.other_subwords = Subwords(other) if other.exists() else self.subwords  # of the side that models write
        self.labels = LabelVocab.load(vocab / "labels.txt")
        self.tags = LabelVocab.load(vocab / "pos_tags.txt")
        deprels = vocab / "deprels.txt"
        self._deprels = LabelVocab.load(deprels) if deprels.exists() else LabelVocab([])
        self._config = tree

    def word_tree(self, parsed: dict) -> tuple[list[str], SpanTree]:
        """Return the tags and the tree over the words of one parsed row, in the normal form of the settings."""
        (batch,) = record_batches([parsed], select(FULL_PARSED_SCHEMA, parsed.keys()))
        views = batch_views(batch)
        brackets = read_flat_trees(views[self._config.parsed_columns[1]][1])
        flat_trees = self._word_trees(brackets, views, views["example_id"], {}, None, None)
        tags = [brackets.tag_names[tag] for tag in brackets.tags]
        return tags, SpanTree(
            [flat_trees.names[i] for i in flat_trees.labels], flat_trees.starts.tolist(), flat_trees.ends.tolist()
        )

    def encode(self, text: Views, parsed: Views, counts: Counter | None = None, donated: Donated | None = None) -> pa.RecordBatch:
        """Encode rows of a text batch and its parsed batch as rows of `schema.FULL_ENCODED_SCHEMA`, with the columns there are.

        `counts` is that of `_word_trees`; `donated` are the trees of other lines, if `tree_source` needs them. Raises ValueError
        when words, trees and lines do not belong together.
        """
        config, ids = self._config, text["example_id"]
        words_column, trees_column = config.parsed_columns
        (word_edges, words), (tree_edges, trees) = parsed[words_column], parsed[trees_column]
        brackets = read_flat_trees(trees)
        wrong = np.flatnonzero(np.diff(brackets.leaf_edges[tree_edges]) != np.diff(word_edges))
        if len(wrong):
            raise ValueError(f"line {ids[wrong[0]] + 1}: its trees have another number of leaves than it has words")
        pieces, piece_counts = self.subwords.encode_words(text[config.side], WordEnds(word_edges, words["end_char"]), counts)
        flat_trees = self._word_trees(brackets, parsed, ids, text, counts, donated)
        every_word = config.tree_source == "flat_tags"
        flat_trees = split_words(flat_trees, brackets.tags, brackets.tag_names, piece_counts, every_word=every_word)
        if config.binarize != "none":
            flat_trees = binarise(flat_trees, len(pieces), config.binarize)
        if config.tree_source == "unlabelled":
            flat_trees = hide_labels(flat_trees)
        leaf_edges = edges_of(piece_counts)[word_edges]
        word_index = np.arange(word_edges[-1]) - np.repeat(word_edges[:-1], np.diff(word_edges))
        tag_ids = np.array([self.tags[name] for name in brackets.tag_names], dtype=np.int64)
        columns: dict[str, np.ndarray | Lists] = {
            "example_id": ids,
            "leaves": Lists(
                np.diff(leaf_edges),
                {
                    "piece": pieces,
                    "word_index": np.repeat(word_index, piece_counts),
                    "pos_tag": np.repeat(tag_ids[brackets.tags], piece_counts),
                },
            ),
            **(nodes := self._node_columns(flat_trees, leaf_edges)),
        }
        schema = encoded_columns(text.keys(), parsed.keys(), config)
        if "tgt_pieces" in schema.names:
            flat, lengths = self.other_subwords.encode_lines(text[config.other_side])
            columns["tgt_pieces"] = Lists(lengths, flat)
        columns |= {name: text[name] for name in ("label", "score") if name in schema.names}
        if "node_labels" in schema.names and flat_trees.classes is not None:
            columns["node_labels"] = Lists(nodes["nodes"].lengths, flat_trees.classes)
        if "leaf_labels" in schema.names:
            # A piece has the label of its word; arcs stay between words.
            columns["leaf_labels"] = Lists(np.diff(leaf_edges), np.repeat(text["leaf_labels"][1], piece_counts))
        if "arcs" in schema.names:
            edges, arcs = parsed[config.arcs_column]
            coded = arcs["deprel"].dictionary_encode()
            ids_of = np.array([self._deprels[name] for name in coded.dictionary.to_pylist()], dtype=np.int64)
            deprels = ids_of[numbers_of(coded.indices)]
            columns["arcs"] = Lists(np.diff(edges), {"governor": arcs["governor"], "deprel": deprels})
        return column_batch(columns, schema)

    def _node_columns(self, flat_trees: FlatTrees, leaf_edges: np.ndarray) -> dict[str, Lists]:
        """Return the nodes and spans, counted from the first leaf and the first node of each row."""
        node_edges = flat_trees.node_edges(leaf_edges)
        counts = np.diff(node_edges)
        first_leaf, first_node = np.repeat(leaf_edges[:-1], counts), np.repeat(node_edges[:-1], counts)
        parents = flat_trees.parents()
        label_ids = np.array([self.labels[name] for name in flat_trees.names], dtype=np.int64)
        labels = label_ids[flat_trees.labels] if len(flat_trees) else flat_trees.labels
        spans = {
            "start": flat_trees.starts - first_leaf,
            "end": flat_trees.ends - first_leaf,
            "subtree_end": flat_trees.subtree_ends() - first_node,
        }
        nodes = {"label": labels, "parent": np.where(parents < 0, -1, parents - first_node)}
        return {"nodes": Lists(counts, nodes), "spans": Lists(counts, spans)}

    def _word_trees(
        self, brackets: Brackets, parsed: Views, ids: np.ndarray, text: Views, counts: Counter | None, donated: Donated | None
    ) -> FlatTrees:
        """Return trees over words, in the normal form of the settings; `text` may hold labels of nodes and leaves.

        `counts`, if given, takes up lifted arcs, and what control trees have in common with the lines' own trees.
        """
        config = self._config
        word_edges, tree_edges = (parsed[name][0] for name in config.parsed_columns)
        classes = leaf_classes = None
        if "node_labels" in text:
            node_edges, classes = text["node_labels"]
            wrong = np.flatnonzero(np.diff(brackets.node_edges[tree_edges]) != np.diff(node_edges))
            if len(wrong):
                raise ValueError(f"line {ids[wrong[0]] + 1}: its node labels and its nodes differ in number")
            leaf_classes = text["leaf_labels"][1] if "leaf_labels" in text else None
        source, own = config.tree_source, None
        is_control = source not in ("parsed", "dependencies")
        if config.of_constituents or classes is not None or (is_control and counts is not None):
            own = normal_form(brackets, collapse_unary=config.collapse_unary, classes=classes, leaf_classes=leaf_classes)
        if source == "dependencies":
            made = _dependency_trees(config, brackets, parsed, ids, Counter() if counts is None else counts)
        elif source == "shuffled":
            assert donated is not None  # the trees of other lines
            tree_edges, texts = donated
            brackets = read_flat_trees(texts)
            if not np.array_equal(np.diff(brackets.leaf_edges[tree_edges]), np.diff(word_edges)):
                raise ValueError("a shuffled tree has another number of leaves than its line has words")
            made = normal_form(brackets, collapse_unary=config.collapse_unary)
        elif own is not None and config.of_constituents:
            made = _change_parse(config, own, brackets.leaf_edges, word_edges, ids, donated)
        else:
            made = _control_trees(config, word_edges, ids)
        flat_trees = made if own is None or made.classes is own.classes else with_classes(made, own)
        if is_control and counts is not None and own is not None:
            counts.update(_agreement(own, made, word_edges, shapes=source == "other_shape"))
            if source == "permuted_labels":
                counts.update(_kept_labels(own, made))
        if (config.of_constituents or source == "dependencies") and config.documents == "dummy_root":
            holds_words = np.concatenate([[0], np.cumsum(np.diff(brackets.leaf_edges) > 0)])
            flat_trees = join_documents(flat_trees, word_edges, np.diff(holds_words[tree_edges]))
        return hide_labels(flat_trees) if source == "unlabelled" else flat_trees


def _agreement(own: FlatTrees, given: FlatTrees, word_edges: np.ndarray, *, shapes: bool) -> Counter:
    """Count what trees of lines share with the lines' own trees: nodes over the same words, and trees of the same shape.

    Lines whose own tree is one node without a label are left out: no parser analysed them. With `shapes`, also count the lines
    whose own tree has more nodes than one, so that there are other shapes, and those of them that keep their own.
    """
    width = int(word_edges[-1]) + 1
    (keys, numbers), (given_keys, given_numbers) = (
        np.unique(trees.starts * width + trees.ends, return_counts=True) for trees in (own, given)
    )
    shared, mine, theirs = np.intersect1d(keys, given_keys, assume_unique=True, return_indices=True)
    line = np.searchsorted(word_edges, shared // width, side="right") - 1
    node_edges = own.node_edges(word_edges)
    num_own, num_given = np.diff(node_edges), np.diff(given.node_edges(word_edges))
    num_shared = np.bincount(line, np.minimum(numbers[mine], given_numbers[theirs]), len(num_own)).astype(np.int64)
    is_label = np.array([name != UNANALYSED for name in own.names], dtype=bool)[own.labels]
    compared = num_own > 1
    alone = num_own == 1
    compared[alone] = is_label[node_edges[:-1][alone]]
    same = (num_shared == num_own) & (num_shared == num_given)
    sums = {"own_nodes": num_own, "given_nodes": num_given, "shared_nodes": num_shared, "own_shapes": same}
    sums |= {"shaped_lines": num_own > 1, "kept_shapes": same & (num_own > 1)} if shapes else {}
    return Counter({name: int(values[compared].sum()) for name, values in sums.items()} | {"compared_lines": int(compared.sum())})


def _kept_labels(own: FlatTrees, given: FlatTrees) -> Counter:
    """Count the nodes below a root, and those of them that have their own label, of trees of the same shapes."""
    below = own.parents() >= 0
    codes = np.unique(own.names, return_inverse=True)[1]  # NP and NP-SBJ are one label
    kept = codes[own.labels[below]] == codes[given.labels[below]] if len(own) else below
    return Counter(inner_nodes=int(below.sum()), kept_labels=int(kept.sum()))


def _change_parse(
    config: TreeConfig, own: FlatTrees, leaf_edges: np.ndarray, word_edges: np.ndarray, ids: np.ndarray, donated: Donated | None
) -> FlatTrees:
    """Return the lines' own trees as `tree_source` has them, with their labels: as they are, permuted, or on other shapes.

    `leaf_edges` are those of the trees. `donated` has a tree for each, which gives the shape. Raises ValueError if one has
    another number of leaves.
    """
    if config.tree_source == "permuted_labels":
        return permute_labels(own, hash_parts(ids, own.node_edges(word_edges), config.seed))
    if config.tree_source != "other_shape" or donated is None:
        return own
    brackets = read_flat_trees(donated[1])
    if not np.array_equal(brackets.leaf_edges, leaf_edges):
        raise ValueError("a tree of another shape has another number of leaves than the line's own tree")
    shapes = normal_form(brackets, collapse_unary=config.collapse_unary)
    return put_labels(own, shapes, hash_parts(ids, shapes.node_edges(word_edges), config.seed))


def _control_trees(config: TreeConfig, word_edges: np.ndarray, ids: np.ndarray) -> FlatTrees:
    """Build one control tree per example, over its words."""
    kind = "flat" if config.tree_source == "flat_tags" else config.tree_source
    starts, ends = control_spans(kind, np.diff(word_edges), ids, config.seed)
    return FlatTrees(np.zeros(len(starts), dtype=np.int64), starts, ends, [UNANALYSED])


def _dependency_trees(config: TreeConfig, brackets: Brackets, parsed: Views, ids: np.ndarray, counts: Counter) -> FlatTrees:
    """Build the trees that the arcs make, one for each sentence of an example; `counts` takes up the arcs that were lifted."""
    (word_edges, words), (tree_edges, _) = (parsed[name] for name in config.parsed_columns)
    arcs = parsed[config.arcs_column][1]
    first = np.repeat(word_edges[:-1], np.diff(word_edges))
    governors = np.where(arcs["governor"] < 0, -1, arcs["governor"] + first)
    for number, problem in enumerate(check_arcs(brackets.leaf_edges, governors)):
        if problem:
            row = int(np.searchsorted(tree_edges, number, side="right")) - 1
            raise ValueError(f"line {ids[row] + 1}, sentence {number - tree_edges[row] + 1}: {problem}")
    relations = arcs["deprel"].dictionary_encode()
    flat_trees, lifted = dependency_phrases(
        DependencySentences(
            brackets.leaf_edges,
            governors,
            numbers_of(relations.indices).astype(np.int64),
            relations.dictionary.to_pylist(),
            brackets.tags,
            brackets.tag_names,
            words["text"],
        ),
        config.phrases,
        config.phrase_labels,
    )
    counts["lifted_arcs"] += int(lifted.sum())
    counts["lifted_sentences"] += int(np.count_nonzero(lifted))
    return flat_trees


# Columns of classes of parts of an example.
_CLASSES = ("node_labels", "leaf_labels")


class EncodeShard:
    """Text and parsed shard to encoded shard. `base` holds text and parsed stage, if not `data` itself.

    With `pairs`, examples 2k and 2k + 1 are dropped together.
    """

    def __init__(self, data: AnyPath, tree: TreeConfig, base: AnyPath | None = None, pairs: bool = False):
        self._data, self._base, self._tree, self._pairs = data, base or data, tree, pairs
        self._encoder = RowEncoder(data / "encoded" / "vocab", tree)
        place = self._base / "parsed", *tree.parsed_columns, tree.seed
        self._donors: DonorTrees | ShapeDonors | None = None
        if tree.tree_source == "shuffled":
            self._donors = DonorTrees(*place, collapse_unary=tree.collapse_unary)
        elif tree.tree_source == "other_shape":
            self._donors = ShapeDonors(*place, collapse_unary=tree.collapse_unary)

    def __call__(
        self, text: ShardRecord, parsed: ShardRecord, fingerprint: str, place: int = 0, window: Sequence[int] = (0, 0)
    ) -> ShardRecord:
        """Encode a shard. Trees of other lines need `place` and `window`, as `of_shard` of the donors takes them."""
        lines, trees = Shard(self._base / "text", text), Shard(self._base / "parsed", parsed)
        schema = encoded_columns(lines.schema.names, trees.schema.names, self._tree)
        counts: Counter[str] = Counter()
        longest: dict[str, int] = {}
        donated, told = None, np.zeros(0, dtype=bool)
        if self._donors is not None:
            donated, told = self._donors.of_shard(place, window)
        stages: tuple[Iterable[dict], Iterable[dict]] = lines.columns, trees.columns
        if (least := self._tree.least_score(text.split)) is not None:
            kept = self._at_least(least, trees)
            counts["dropped.parse_score"] = len(lines) - len(kept)
            stages = lines.some_columns(kept), trees.some_columns(kept)
            if donated is not None:
                donated, told = keep(donated, kept), told[kept]
        if self._donors is not None:
            counts[self._donors.counted] = int(told.sum())
        first, batches = 0, []
        try:
            for views in zip(*stages, strict=True):
                rows = len(views[0]["example_id"])
                part = None if donated is None else cut(donated, first, rows)
                batches.append(self._encoder.encode(*views, counts, part))
                first += rows
        except ValueError as error:
            raise UserError(
                f"{self._base / 'parsed' / parsed.name}: {error}; correct that line of the input or parse it again, if need be "
                "with another parser, into another --out"
            ) from None
        if least is not None and "label" in schema.names:  # those of the text stage count dropped examples too
            counts.update(f"class.{label}" for batch in batches for label in numbers_of(batch.column("label")).tolist())
        for name in ("leaves", "nodes", "tgt_pieces"):
            sizes = np.concatenate([[0], *(_lengths(batch, name) for batch in batches)])
            counts[name], longest[name] = int(sizes.sum()), int(sizes.max())
        return write_shard(
            self._data / "encoded", text.name, Batches(batches), schema,
            split=text.split, index=text.index, fingerprint=fingerprint, counts=counts, longest=longest,
        )  # fmt: skip

    def _at_least(self, least: float, trees: Shard) -> np.ndarray:
        """Return the rows whose parse has at least this score."""
        low = np.concatenate([np.zeros(0, bool), *(views[self._tree.score_column] < least for views in trees.columns)])
        if self._pairs:
            low = np.isin(trees.ids // 2, trees.ids[low] // 2)
        return np.flatnonzero(~low)


class CountClasses:
    """Finds the highest class in encoded shards."""

    def __init__(self, folder: AnyPath):
        self._folder = folder

    def __call__(self, shards: Sequence[ShardRecord]) -> int:
        """Return one more than the highest class of an example, a node or a leaf of these shards."""
        columns = (views for record in shards for views in Shard(self._folder, record).columns)
        parts = (part for views in columns for part in (views["label"], *(views[n][1] for n in _CLASSES if n in views)))
        return 1 + max((int(part.max(initial=-1)) for part in parts), default=-1)  # the filters may drop all rows of a shard


def count_classes(folder: AnyPath, records: Sequence[ShardRecord], run: Run = run_here) -> int:
    """Return one more than the highest class in encoded shards."""
    jobs = [{"shards": group} for group in grouped([(record.rows, record) for record in records], TASK_ROWS)]
    return max(found for _, found in run(CountClasses, {"folder": folder}, jobs))


def _lengths(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Return the number of items of a list column per row; none if the data set has no such column."""
    return np.diff(numbers_of(batch.column(name).offsets)) if name in batch.schema.names else np.zeros(0, dtype=np.int64)
