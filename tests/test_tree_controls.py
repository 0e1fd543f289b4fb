"""Controls that separate labels, shape and place: each keeps exactly what docs/comparisons.md says, and changes the rest."""

import shutil
import tempfile
from collections import Counter
from itertools import accumulate, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_encoding import encode_example, other_shapes, read_trees
from test_encode import examples, plain, rows_of, views_of
from test_encode import vocab as few  # noqa: F401 - a fixture
from test_shuffled_trees import data, shuffled, tree  # noqa: F401 - a fixture

from treenet.experiments.study_grid import check_other_shapes
from treeproc.common.settings import UserError
from treeproc.online.line_encoder import LineEncoder
from treeproc.shards.schema import PARSED_SCHEMA, TEXT_SCHEMA
from treeproc.shards.shard import Shard
from treeproc.shards.store import describe_agreement, read_index, write_index, write_shard
from treeproc.stages.encode import EncodeShard, RowEncoder
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, check_constituents, preprocess
from treeproc.stages.shuffle import find_shapes
from treeproc.subwords import LabelVocab
from treeproc.trees.controls import hash_parts, permute_labels, put_labels
from treeproc.trees.flat_trees import FlatTrees
from treeproc.verify import verify

KINDS = ["unlabelled", "permuted_labels", "other_shape", "flat_tags"]
lines = st.lists(examples(), min_size=1, max_size=4)
forms = st.fixed_dictionaries(
    {
        "collapse_unary": st.booleans(),
        "binarize": st.sampled_from(["none", "left", "right"]),
        "documents": st.sampled_from(["separate", "dummy_root"]),
    }
)


@pytest.fixture(scope="module")
def vocab(few, tmp_path_factory):  # noqa: F811
    """That of tests/test_encode.py with all labels and tags, so that none is the unknown one."""
    folder = shutil.copytree(few, tmp_path_factory.mktemp("whole") / "vocab")
    tags = ["X", "A", "B", "C"]
    names = ["X", "S", "NP", "VP", "ROOT", "DOC", "-X-", *(f"POS={tag}" for tag in tags)]
    (folder / "labels.txt").write_bytes(LabelVocab([*names, *("@" + name for name in names)]).file_bytes())
    (folder / "pos_tags.txt").write_bytes(LabelVocab(tags).file_bytes())
    return folder


def in_order(cases: list[tuple[dict, dict]]) -> tuple[list[dict], list[dict]]:
    """Text and parsed rows with the ids 0, 1, ..."""
    return tuple([row | {"example_id": number} for number, row in enumerate(rows)] for rows in zip(*cases, strict=True))


def encode(vocab, cases, **settings) -> tuple[list[dict], RowEncoder]:
    encoder = RowEncoder(vocab, TreeConfig(**settings))
    return rows_of(encoder.encode(*views_of(*in_order(cases)))), encoder


def is_of_word(name: str) -> bool:
    """Whether a label is that of a split word, or of a node that binarises it."""
    return name.removeprefix("@").startswith("POS=")


@num_examples(60)
@given(lines, forms)
def test_without_labels_all_but_the_labels_stays(vocab, cases, form):
    (own, encoder), (found, _) = (encode(vocab, cases, tree_source=kind, **form) for kind in ("parsed", "unlabelled"))
    for row in own:
        names = [encoder.labels.names[label] for label in row["nodes"]["label"]]
        row["nodes"]["label"] = [encoder.labels[name if is_of_word(name) else "X"] for name in names]
    assert found == own


@num_examples(60)
@given(lines, st.booleans(), st.integers(0, 9))
def test_permuted_labels_are_those_of_their_tree_and_the_rest_stays(vocab, cases, collapse_unary, seed):
    form = {"collapse_unary": collapse_unary, "seed": seed}
    (own, encoder), (found, _) = (encode(vocab, cases, tree_source=kind, **form) for kind in ("parsed", "permuted_labels"))
    for before, after in zip(own, found, strict=True):
        labels = [[encoder.labels.names[label] for label in row["nodes"].pop("label")] for row in (before, after)]
        assert after == before  # shape, words, pieces, tags
        tree_of = list(accumulate(parent < 0 for parent in before["nodes"]["parent"]))
        of_trees: list[dict[int, list[str]]] = [{}, {}]
        for found_labels, of_tree in zip(labels, of_trees, strict=True):
            for number, label in zip(tree_of, found_labels, strict=True):
                of_tree.setdefault(number, []).append(label)
        for mine, theirs in zip(of_trees[0].values(), of_trees[1].values(), strict=True):
            assert mine[0] == theirs[0] and Counter(mine) == Counter(theirs)
            assert [name if is_of_word(name) else "" for name in mine] == [name if is_of_word(name) else "" for name in theirs]


def test_all_permutations_are_as_likely():
    """All orders of three nodes below the root are equally frequent, in 6,000 lines."""
    rows = np.arange(6000)
    starts, ends = (np.tile(places, 6000) + np.repeat(4 * rows, 4) for places in ([0, 0, 0, 0], [4, 3, 2, 1]))
    trees = FlatTrees(np.tile(np.arange(4), 6000), starts, ends, list("rabc"))
    edges = 4 * np.arange(6001)
    found = permute_labels(trees, hash_parts(rows, edges, seed=1)).labels.reshape(-1, 4)
    counts = Counter(map(tuple, found.tolist()))
    assert set(counts) == {(0, *order) for order in permutations((1, 2, 3))}
    assert all(abs(count - 1000) < 5 * (6000 * 5 / 36) ** 0.5 for count in counts.values())


def test_a_shape_loses_nodes_of_the_smallest_keys_and_never_a_root():
    """Two shapes of three nodes for trees of two."""
    starts, ends = np.array([0, 0, 0, 3, 3, 4]), np.array([3, 2, 1, 6, 6, 6])
    shapes = FlatTrees(np.zeros(6, dtype=np.int64), starts, ends, ["X"])
    trees = FlatTrees(np.array([0, 1, 1, 0]), np.array([0, 1, 3, 3]), np.array([3, 3, 6, 5]), ["A", "B"])
    found = put_labels(trees, shapes, np.array([0.0, 0.1, 0.9, 0.0, 0.8, 0.2]))
    assert (found.labels.tolist(), found.names) == ([0, 1, 1, 0], ["A", "B"])
    assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == [(0, 3), (0, 1), (3, 6), (3, 6)]


@num_examples(60)
@given(lines, forms)
def test_a_flat_tree_with_tags_is_a_root_and_a_node_for_each_word(vocab, cases, form):
    (own, encoder), (found, _) = (encode(vocab, cases, tree_source=kind, **form) for kind in ("parsed", "flat_tags"))
    for (_, parsed), before, after in zip(cases, own, found, strict=True):
        assert {name: after[name] for name in ("leaves", "tgt_pieces")} == {
            name: before[name] for name in ("leaves", "tgt_pieces")
        }
        index, tags = after["leaves"]["word_index"], parsed["words"]["pos_tag"]
        words = [
            (encoder.labels[f"POS={tag}"], index.index(word), len(index) - index[::-1].index(word))
            for word, tag in enumerate(tags)
        ]
        expected = [(encoder.labels["X"], 0, len(index)), *words] if words else []
        nodes = zip(after["nodes"]["label"], after["spans"]["start"], after["spans"]["end"], strict=True)
        added = "@" if form["binarize"] != "none" else None
        assert [node for node in nodes if encoder.labels.names[node[0]][0] != added] == expected


def write_stages(folder: Path, cases, rows_per_shard: int) -> list[tuple]:
    """Write the text and the parsed stage: the first half of the lines is train. Returns the records of both."""
    cut, found = (len(cases) + 1) // 2, []
    for stage, schema, rows in zip(("text", "parsed"), (TEXT_SCHEMA, PARSED_SCHEMA), in_order(cases), strict=True):
        (folder / stage).mkdir(parents=True)
        records = []
        for split, of_split in (("train", rows[:cut]), ("test", rows[cut:])):
            count = -(-len(of_split) // rows_per_shard)
            for number in range(count):
                part = of_split[number * rows_per_shard : (number + 1) * rows_per_shard]
                name = f"{split}-{number:05d}-of-{count:05d}.arrow"
                records.append(write_shard(folder / stage, name, part, schema, split=split, index=number, fingerprint=""))
        write_index(folder / stage, records, fingerprint="")
        found.append(read_index(folder / stage).records())
    return list(zip(*found, strict=True))


@pytest.mark.slow
@num_examples(30)
@given(st.lists(examples(), min_size=2, max_size=9), forms, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_other_shapes_are_those_of_the_definition_in_any_shards(vocab, cases, form, rows_per_shard, seed, of_split):
    """The window may be that `of_split` or of all shards."""
    config = TreeConfig(tree_source="other_shape", seed=seed, **form)
    text, parsed = in_order(cases)
    own = [[(n, read_trees({"trees": [one]}, config)) for n, one in enumerate(row["trees"])] for row in parsed]
    of_rows = [[(number, place, trees[0][1]) for place, trees in row if trees] for number, row in enumerate(own)]
    cut = (len(cases) + 1) // 2
    given_trees = []
    for rows in (of_rows[:cut], of_rows[cut:]):
        shapes = iter(other_shapes([one for row in rows for one in row], seed))
        given_trees += [[next(shapes) for _ in row] for row in rows]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = write_stages(folder, cases, rows_per_shard)
        (folder / "encoded").mkdir()
        shutil.copytree(vocab, folder / "encoded" / "vocab")
        encode_shard = EncodeShard(folder, config)
        first = sum(text.split == "train" for text, _ in records)
        windows = [(0, first)] * first + [(first, len(records))] * (len(records) - first)
        windows = windows if of_split else [(0, len(records))] * len(records)
        made = [encode_shard(*pair, "", place, windows[place]) for place, pair in enumerate(records)]
        found = [plain(row) for record in made for row in Shard(folder / "encoded", record).rows()]
    encoder = RowEncoder(vocab, config)
    one_string = encoder.subwords._encoder.encode
    for number, row in enumerate(found):
        assert row == encode_example(
            text[number], parsed[number], one_string, config, encoder.labels, encoder.tags, given_trees[number]
        )
    counts = sum((Counter(record.counts) for record in made), Counter())
    pairs = [([one for _, _, one in row], others) for row, others in zip(of_rows, given_trees, strict=True)]
    shaped = [(row, others) for row, others in pairs if sum(map(len, row)) > 1]
    same = [[(a.starts, a.ends) for a in row] == [(b.starts, b.ends) for b in others] for row, others in shaped]
    assert (counts["shaped_lines"], counts["kept_shapes"]) == (len(shaped), sum(same))


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(0, 2)), max_size=25), st.randoms(use_true_random=False)
)
def test_shapes_come_from_trees_of_as_many_words_and_nodes(trees, random):
    """Else from one with the fewest nodes more; a tree keeps its own only if there is neither."""
    columns = np.array(trees, dtype=np.uint64).reshape(-1, 3).T
    keys = np.array(random.sample(range(1000), len(trees)), dtype=np.uint64)
    for own, donor in zip(trees, find_shapes(*columns, keys).tolist(), strict=True):
        alike = {one for one in trees if one[:2] == own[:2]} - {own}
        wider = [one[1] for one in trees if one[0] == own[0] and one[1] > own[1]]
        given_tree = trees[donor]
        assert given_tree in alike if alike else given_tree[:2] == (own[0], min(wider)) if wider else given_tree == own


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_control_changes_the_tree_alone(data, tmp_path, kind):  # noqa: F811
    out = tmp_path / "out"
    index, original = shuffled(data, out, tree={"tree_source": kind}), read_index(data / "encoded")
    for name in ("text_fingerprint", "vocab_fingerprint", "num_labels", "columns"):
        assert index[name] == original[name]
    assert index["tree_fingerprint"] != original["tree_fingerprint"] and not verify(out).problems
    told = {"permuted_labels": "permuted labels: ", "other_shape": "other shapes: lines that keep their own shape: "}
    assert all((note in summary(index, out)) == (kind == own) for own, note in told.items())
    if kind == "other_shape":
        with pytest.raises(UserError, match="has other_shape trees, which come from other lines of a split, but this"):
            LineEncoder(out, given_trees=True)
    else:
        LineEncoder(out, given_trees=True)


@pytest.mark.slow
def test_a_study_refuses_a_control_of_other_shapes_that_keeps_too_many(tmp_path):
    """Here, 1 of 20 lines of train has no other line of its length, and 1 of 19 of test."""
    for split, number in (("train", 19), ("test", 18)):
        trees = [tree(n, 6) for n in range(number)] + [tree(0, 9)]
        (tmp_path / f"{split}.mrg").write_text("\n".join(trees), encoding="utf-8")
    values = {
        "splits": {split: {"source": [tmp_path / f"{split}.mrg"]} for split in ("train", "test")},
        "format": "brackets",
        "parser": {"name": "given"},
        "tree": {"tree_source": "other_shape"},
        "filters": {"drop_overlap": "none"},
        "subwords": {"vocab_size": 300},
        "workers": 0,
    }
    index = preprocess(PreprocessConfig.model_validate(values), tmp_path / "data")
    assert [index["totals"][split]["kept_shapes"] for split in ("train", "test")] == [1, 1]
    with pytest.raises(UserError, match=r"at most 5% .* but 5\.3% of test do; choose another tree\.tree_source"):
        check_other_shapes({tmp_path / "data": index})
    assert describe_agreement(index).endswith("no control, because more than 5% of a split keep their own shape")
    index["totals"].pop("test")
    check_other_shapes({tmp_path / "data": index})


@pytest.mark.parametrize("kind", KINDS)
def test_without_constituents_only_flat_trees_can_be_made(kind):
    parser = {"name": "shipped", "language": "en", "constituency": False, "dependencies": True}
    of_text = PreprocessConfig.model_validate({"parser": parser})
    if kind == "flat_tags":
        check_constituents(TreeConfig(tree_source=kind), of_text)
        return
    with pytest.raises(UserError, match=f"is {kind}, but parser.constituency=false gives no constituents"):
        check_constituents(TreeConfig(tree_source=kind), of_text)
