"""The vectorised encode stage against the slow oracle, on Hypothesis trees; labels, arcs, sides, vocabularies."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_encoding import binarise as reference_binarise
from reference_encoding import check_tree, encode_example

from treeproc.shards.rows import Batches, batch_views, ipc_bytes, pick, record_batches
from treeproc.shards.schema import ENCODED_SCHEMA, FULL_ENCODED_SCHEMA, PARSED_SCHEMA, TEXT_SCHEMA
from treeproc.stages.encode import RowEncoder
from treeproc.stages.inputs import TreeConfig
from treeproc.subwords import LabelVocab, SubwordConfig, train_pieces
from treeproc.trees.flat_trees import FlatTrees, binarise, normal_form, read_flat_trees, with_classes
from treeproc.trees.spans import SpanTree, normalise, parents_and_subtree_ends, read_brackets, write_brackets

LABELS = ["ROOT", "S", "NP-SBJ-1", "NP", "VP=2", "", "TOP", "VROOT", "-X-"]
WORDS = ["know", "don't", "é", "日本", "Zyx", "a", "(", "😀😀"]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab")
    (folder / "pieces.model").write_bytes(train_pieces({"know": 5, "do\x01n't": 5, "a": 2}, SubwordConfig(vocab_size=275)))
    tags = ["X", "A", "B"]
    names = ["X", "S", "NP", "VP", "ROOT", "DOC", *(f"POS={tag}" for tag in tags)]
    (folder / "labels.txt").write_bytes(LabelVocab([*names, *("@" + name for name in names)]).file_bytes())
    (folder / "pos_tags.txt").write_bytes(LabelVocab(tags).file_bytes())
    (folder / "deprels.txt").write_bytes(LabelVocab(["root", "obj"]).file_bytes())
    return folder


@st.composite
def nested(draw, num_leaves: int) -> SpanTree:
    """Spans of one root with unary chains, n-ary nodes and bare leaves; sometimes no node over a single leaf."""
    tree = SpanTree([], [], [])
    if num_leaves == 1 and draw(st.booleans()):
        return tree
    stack = [(0, num_leaves)]
    while stack:
        start, end = stack.pop()
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            tree.labels.append(draw(st.sampled_from(LABELS)))
            tree.starts.append(start)
            tree.ends.append(end)
        cuts = sorted(draw(st.sets(st.integers(start + 1, end - 1), max_size=4))) if end - start > 1 else []
        edges = [start, *cuts, end]
        stack += [(a, b) for a, b in zip(edges, edges[1:], strict=False) if (a, b) != (start, end) and draw(st.booleans())][::-1]
    return tree


@st.composite
def examples(draw, example_id: int = 0) -> tuple[dict, dict]:
    """A text row and its parsed row; trees may hold traces, which are no words."""
    words, tags, brackets = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        kinds = draw(st.lists(st.sampled_from(["word", "word", "word", "trace"]), min_size=1, max_size=7))
        leaves = [draw(st.sampled_from(WORDS)) if kind == "word" else "*T*-1" for kind in kinds]
        leaf_tags = [draw(st.sampled_from("ABC")) if kind == "word" else "-NONE-" for kind in kinds]
        tree = draw(nested(len(leaves)))
        brackets.append(write_brackets(tree, leaves, leaf_tags))
        words += [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "word"]
        tags += [tag for tag in leaf_tags if tag != "-NONE-"]
    line, starts, ends = "", [], []
    for word in words:
        line += draw(st.sampled_from(["", " ", "  "])) if line else ""
        starts.append(len(line))
        line += word
        ends.append(len(line))
    spans = {"text": words, "start_char": starts, "end_char": ends, "pos_tag": tags}
    target = " ".join(draw(st.lists(st.sampled_from([*WORDS, ""]), max_size=4)))
    text = {"example_id": example_id, "source": line, "target": target}
    return text, {"example_id": example_id, "words": spans, "trees": brackets, "parse_status": "parsed"}


configs = st.builds(
    TreeConfig,
    tree_source=st.sampled_from(
        ["parsed", "parsed", "parsed", "balanced", "left", "right", "flat", "random"]
        + 2 * ["unlabelled", "permuted_labels", "flat_tags"]
    ),
    collapse_unary=st.booleans(),
    binarize=st.sampled_from(["none", "left", "right"]),
    documents=st.sampled_from(["separate", "dummy_root"]),
)


def views_of(text: list[dict], parsed: list[dict]) -> tuple[dict, dict]:
    (lines,), (trees,) = record_batches(text, TEXT_SCHEMA), record_batches(parsed, PARSED_SCHEMA)
    return batch_views(lines), batch_views(trees)


def plain(value):
    """NumPy to lists."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def rows_of(batch: pa.RecordBatch) -> list[dict]:
    views = batch_views(batch)
    return [{name: plain(pick(column, i)) for name, column in views.items()} for i in range(len(batch))]


@pytest.mark.slow
@num_examples(75)
@given(st.lists(examples(), min_size=1, max_size=4), configs)
def test_batches_agree_with_the_slow_oracle(vocab, cases, config):
    text, parsed = [case[0] for case in cases], [case[1] for case in cases]
    for i, row in enumerate(text):
        row["example_id"] = parsed[i]["example_id"] = i
    encoder = RowEncoder(vocab, config)
    batch = encoder.encode(*views_of(text, parsed))
    encode = encoder.subwords._encoder.encode  # one string at a time
    expected = [encode_example(t, p, encode, config, encoder.labels, encoder.tags) for t, p in zip(text, parsed, strict=True)]
    assert rows_of(batch) == expected
    for row in expected:
        leaves = len(row["leaves"]["piece"])
        if leaves and (config.tree_source != "parsed" or row["nodes"]["label"]):
            check_tree(SpanTree(row["nodes"]["label"], row["spans"]["start"], row["spans"]["end"]), leaves)
    # The bytes are those of the rows, and a row does not depend on its neighbours.
    assert ipc_bytes(Batches([batch]), ENCODED_SCHEMA) == ipc_bytes(expected, ENCODED_SCHEMA)
    alone = [rows_of(encoder.encode(*views_of([t], [p])))[0] for t, p in zip(text, parsed, strict=True)]
    assert alone == expected


BLANKS, NAMES = st.sampled_from([" ", "  ", "\n", "\t"]), st.sampled_from(["NP", "-NONE-", "é", "à", "ROOT"])
BRACKETS = st.recursive(
    st.tuples(NAMES, BLANKS, st.sampled_from(["a", "é", "à", "1.0", "-NONE-"])).map(lambda one: f"({''.join(one)})"),
    lambda inner: st.tuples(NAMES | st.just(""), BLANKS, st.lists(inner, min_size=1, max_size=3)).map(
        lambda one: f"({one[0]}{one[1].join(['', *one[2]])})"
    ),
    max_leaves=5,
)


@num_examples(150)
@given(st.lists(BRACKETS, min_size=1, max_size=3))
def test_trees_in_brackets_are_read_alike(texts):
    check_readers(texts)


@num_examples(300)
@given(BRACKETS, st.integers(0, 30), st.sampled_from(["(", ")", " ", "NP", "-NONE-", "é", "\u00a0"]), st.booleans())
def test_damaged_brackets_are_accepted_by_both_readers_or_by_none(text, at, more, cut):
    check_readers([text[:at] + more + text[at + cut :]])


def check_readers(texts):
    try:
        expected = [read_brackets(text) for text in texts]
    except ValueError as error:
        with pytest.raises(ValueError, match="tree [0-9]+: ") as raised:
            read_flat_trees(pa.array(texts, pa.string()))
        assert str(raised.value).endswith(str(error))
        return
    brackets = read_flat_trees(pa.array(texts, pa.string()))
    assert [brackets.tag_names[i] for i in brackets.tags] == [tag for _, tags, _ in expected for tag in tags if tag != "-NONE-"]
    assert [brackets.trees.names[i] for i in brackets.trees.labels] == [label for *_, t in expected for label in t.labels]
    assert np.diff(brackets.node_edges).tolist() == [len(tree) for *_, tree in expected]


def flat_trees_of(tree: SpanTree) -> FlatTrees:
    return FlatTrees(np.arange(len(tree)), np.array(tree.starts), np.array(tree.ends), tree.labels)


@num_examples(200)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(nested(n), st.just(n))), st.sampled_from(["left", "right"]))
def test_binarised_trees(case, side):
    tree, num_leaves = normalise(case[0], collapse_unary=True), case[1]
    trees = binarise(flat_trees_of(tree), num_leaves, side)
    expected = reference_binarise(tree, num_leaves, side)
    assert [trees.names[i] for i in trees.labels] == expected.labels
    assert (trees.starts.tolist(), trees.ends.tolist()) == (expected.starts, expected.ends)
    assert trees.parents().tolist() == parents_and_subtree_ends(expected)[0]
    assert trees.subtree_ends().tolist() == parents_and_subtree_ends(expected)[1]


def test_deep_trees_do_not_overflow():
    depth = 10_000
    trees = read_flat_trees(pa.array(["(S " * depth + "(N a)" + ")" * depth] * 2)).trees
    assert len(trees) == 2 * depth and trees.parents().max() == 2 * depth - 2


def test_classes_of_a_chain_are_the_topmost_ones():
    brackets = read_flat_trees(pa.array(["(ROOT (S (NP (A a)) (VP (B b))))", "(C c)", "(S (VP (A d)))"]))
    trees = normal_form(
        brackets,
        collapse_unary=True,
        classes=np.array([3, 1, -1, 2, -1, 4], dtype=np.int8),
        leaf_classes=np.array([0, 1, 2, 0], dtype=np.int8),
    )
    assert [trees.names[i] for i in trees.labels] == ["S", "NP", "VP", "X", "VP"]
    assert trees.classes.tolist() == [3, -1, 2, 2, 4]


@num_examples(150)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(nested(n), nested(n))), st.randoms(use_true_random=False))
def test_other_trees_take_the_classes_of_equal_spans(trees, random):
    given_tree, other = (normalise(tree, collapse_unary=False) for tree in trees)
    classes = [random.randint(-1, 2) for _ in given_tree.labels]
    expected = []
    for span in zip(other.starts, other.ends, strict=True):
        nodes = zip(given_tree.starts, given_tree.ends, classes, strict=True)
        expected.append(next((c for start, end, c in nodes if (start, end) == span and c >= 0), -1))
    found = with_classes(flat_trees_of(other), replace(flat_trees_of(given_tree), classes=np.array(classes, dtype=np.int8)))
    assert found.classes.tolist() == expected and found.classes.dtype == np.int8


def with_schema(rows: list[dict], **types: pa.DataType) -> dict:
    """Views of rows with columns of the given types."""
    schema = pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types.items()])
    (batch,) = record_batches(rows, schema)
    return batch_views(batch)


def test_labels_and_arcs_follow_the_leaves_and_nodes(vocab):
    text = with_schema(
        [{"example_id": 4, "source": "know Zyx", "label": 3, "node_labels": [3], "leaf_labels": [1, 2]}],
        example_id=pa.int64(),
        source=pa.string(),
        label=pa.int32(),
        node_labels=pa.list_(pa.int8()),
        leaf_labels=pa.list_(pa.int8()),
    )
    words = {"text": ["know", "Zyx"], "start_char": [0, 5], "end_char": [4, 8], "pos_tag": ["A", "B"]}
    arcs = {"governor": [1, -1], "deprel": ["obj", "odd"]}
    parsed = with_schema(
        [{"example_id": 4, "words": words, "trees": ["(S (A know) (B Zyx))"], "arcs": arcs}],
        example_id=pa.int64(),
        words=PARSED_SCHEMA.field("words").type,
        trees=pa.list_(pa.string()),
        arcs=pa.list_(pa.struct([pa.field("governor", pa.int32()), pa.field("deprel", pa.string())])),
    )
    encoder = RowEncoder(vocab, TreeConfig())
    batch = encoder.encode(text, parsed)
    assert batch.schema.names == [name for name in FULL_ENCODED_SCHEMA.names if name not in ("tgt_pieces", "score")]
    (row,) = rows_of(batch)
    assert row["leaves"]["word_index"] == [0, 1, 1, 1, 1]
    assert row["leaf_labels"] == [1, 2, 2, 2, 2] and row["label"] == 3
    # The sentence, and the split word: its pieces have its label, the node over them none.
    assert [encoder.labels.names[i] for i in row["nodes"]["label"]] == ["S", "POS=B"] and row["node_labels"] == [3, -1]
    assert row["arcs"] == {"governor": [1, -1], "deprel": [encoder._deprels["obj"], 0]}


def test_the_target_side_can_be_the_leaves(vocab):
    text = {"example_id": 0, "source": "know a", "target": "a don't"}
    words = {"text": ["a", "do", "n't"], "start_char": [0, 2, 4], "end_char": [1, 4, 7], "pos_tag": ["A", "B", "B"]}
    parsed = with_schema(
        [{"example_id": 0, "target_words": words, "target_trees": ["(S (A a) (VP (B do) (B n't)))"]}],
        example_id=pa.int64(),
        target_words=PARSED_SCHEMA.field("words").type,
        target_trees=pa.list_(pa.string()),
    )
    (lines,) = record_batches([text], TEXT_SCHEMA)
    encoder = RowEncoder(vocab, TreeConfig(side="target"))
    (row,) = rows_of(encoder.encode(batch_views(lines), parsed))
    assert encoder.subwords.decode([row["leaves"]["piece"], row["tgt_pieces"]]) == ["a don't", "know a"]


def test_trees_over_other_words_are_refused(vocab):
    text = {"example_id": 7, "source": "a b", "target": ""}
    words = {"text": ["a", "b"], "start_char": [0, 2], "end_char": [1, 3], "pos_tag": ["A", "A"]}
    parsed = {"example_id": 7, "words": words, "trees": ["(S (A a))"], "parse_status": "parsed"}
    with pytest.raises(ValueError, match="line 8: its trees have another number of leaves than it has words"):
        RowEncoder(vocab, TreeConfig()).encode(*views_of([text], [parsed]))
