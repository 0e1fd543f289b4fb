"""Relations between words: paths in dependency trees, attention over relations, and the models that are made of both."""

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import MODEL_CASES, VOCAB, batch_of, example_of, tiny_model
from reference_relations import reference_attention, reference_distances, reference_path, reference_structural
from search_runs import write_run, write_vocabulary
from strategies import governors, right_branching
from toydata import write_toy_data
from toylabels import LABELLED_COLUMNS, make_rows, write_labelled
from toyruns import make_config

from treenet.config import ClassifierConfig, ModelConfig, RelationsConfig, TrainConfig
from treenet.data.batch import collate
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import DEPENDENCIES, LEAVES, WORDS
from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.jobs.train_run import run_training
from treenet.layers.blocks import SinusoidalPositions, StructuralPositions, compute_sinusoids
from treenet.layers.relations import (
    Related,
    RelatedSelfAttention,
    Relations,
    RelativeCausalSelfAttention,
    attend_related,
)
from treenet.models import VocabSizes, build_classifier, build_model
from treenet.models.encoders.relations import RelationEncoder
from treenet.runs.loading import load_run
from treenet.structure import Dependencies, Words
from treenet.structure.words import build_path_ids, list_paths
from treenet.tasks.base import build_task, check_structure, vocab_sizes
from treenet.translation.line_translator import LineTranslator
from treenet.translation.settings import TranslateSettings
from treeproc.common.settings import UserError, load_settings
from treeproc.online.raw_lines import RawLine
from treeproc.parsers import build_parser
from treeproc.parsers.config import ParserConfig
from treeproc.shards.store import read_index

CONFIGS = Path(__file__).resolve().parent.parent / "workflows" / "configs"


def arcs_of(texts: Sequence[Sequence[int]]) -> Dependencies:
    return Dependencies.build([np.array(text) for text in texts], [np.arange(len(text)) for text in texts])


def words_of(texts: Sequence[Sequence[int]], pieces: int = 1) -> Words:
    """Words of `pieces` leaves each; the tag of word w is w + 1."""
    word = [np.repeat(np.arange(len(text)), pieces) for text in texts]
    return Words.build(word, [row + 1 for row in word], arcs_of(texts))


def test_columns_of_other_lengths_are_refused():
    """Each column would be padded by itself, and a word would have the tag of another."""
    long, short = [np.array([-1, 0]), np.array([-1])], [np.array([1, 2, 3]), np.array([2])]
    for build in (Dependencies.build, Words.build):
        with pytest.raises(ValueError, match=r"rows of the same lengths, but have \[2, 1\] and \[3, 1\]"):
            build(long, short)
        with pytest.raises(ValueError, match=r"\[2, 1\] and \[1, 2\]"):
            build(long, [np.array([1]), np.array([2, 3])])


SHAPES = [(-1,), (-1, -1), (-1, 0, 1, 2, 3, 4, 5), (1, 2, 3, 4, -1), (3, 3, 3, -1, 3), (-1, -1, 0, 1, 2, 0)]
TEXTS = st.lists(governors().map(tuple), min_size=1, max_size=2)


# Ways between words.


@pytest.mark.slow
@given(texts=TEXTS)
@num_examples(25)
def test_ways_and_depths_are_those_of_the_trees(texts):
    texts = [*texts, *SHAPES]
    arcs = arcs_of(texts)
    assert arcs.up.dtype == arcs.down.dtype == torch.int16 and arcs.side.dtype == torch.int8
    for row, text in enumerate(texts):
        distance, n = reference_distances(text), len(text)
        assert arcs.deprel[row, :n].tolist() == list(range(n))
        assert arcs.depth[row, :n].tolist() == [way[n] - 1 for way in distance[:n]]
        assert (arcs.up + arcs.down)[row, :n, :n].tolist() == [way[:n] for way in distance[:n]]
        for i, j in itertools.product(range(n), repeat=2):
            path = reference_path(text, i, j)
            side = int(arcs.side[row, i, j])
            assert side == {"L": -1, "R": 1}.get(path[:1], 0)
            if not side:
                assert path == "U" * arcs.up[row, i, j] + "D" * arcs.down[row, i, j]
        assert not arcs.depth[row, n:].any()


def test_arcs_in_a_cycle_are_refused():
    with pytest.raises(UserError, match="arcs must form trees, but form a cycle"):
        arcs_of([[-1, 0], [1, 2, 0]])


@pytest.mark.parametrize(("longest", "size"), [(3, 14), (4, 20), (5, 27), (6, 35), (8, 54)])
def test_paths_are_as_many_as_there_are(longest, size):
    paths = list_paths(longest)
    assert len(paths) == len(set(paths)) == size
    ids = build_path_ids(longest)
    assert sorted(set(ids.flatten().tolist())) == list(range(size + 1))
    if longest < 6:
        strings = ("".join(steps) for length in range(longest + 1) for steps in itertools.product("UDLR", repeat=length))
        assert set(paths) == {s for s in strings if re.fullmatch("U*D*|[LR]D*", s) and not s.startswith("UD")}


@pytest.mark.parametrize("clip", [1, 3, 5])
@given(texts=TEXTS)
@num_examples(8)
def test_relations_of_pairs(clip, texts):
    texts = [*texts, *SHAPES]
    kinds = {name: {"clip": clip} for name in ("sequence", "tree_distance", "tree_traversal")}
    words = words_of(texts, pieces=2)
    length, paths = words.word.shape[1], list_paths(clip)
    for rule in ("path", "edge"):
        relations = Relations(RelationsConfig(structural={"clip": clip, "same": rule}, **kinds))
        sizes = relations.rows
        rows = {"sequence": 2 * clip + 1, "structural": 2 * clip + 1, "tree_distance": clip + 2, "tree_traversal": len(paths) + 1}
        assert list(sizes.items()) == list(rows.items())
        assert (relations.num_keys, relations.num_values, relations.num_value_kinds) == (sum(rows.values()), 4 * clip + 2, 2)
        ids = relations(length, words, torch.device("cpu"))
        starts = np.cumsum([0, *sizes.values()])
        found = {name: each - start for name, each, start in zip(sizes, ids, starts, strict=False)}
        assert all(each.min() >= 0 and each.max() < sizes[name] for name, each in found.items())
        assert found["sequence"].tolist() == [
            [[max(-clip, min(clip, j - i)) + clip for j in range(length)] for i in range(length)]
        ]
        for row, text in enumerate(texts):
            n, distance = len(text), reference_distances(text)
            expected = {name: np.zeros((n, n), dtype=int) for name in ("structural", "tree_distance", "tree_traversal")}
            for i, j in itertools.product(range(n), repeat=2):
                path, place = reference_path(text, i, j), reference_structural(text, i, j, rule)
                expected["structural"][i, j] = max(-clip, min(clip, place)) + clip
                expected["tree_distance"][i, j] = min(distance[i][j], clip + 1)
                expected["tree_traversal"][i, j] = paths.index(path) if len(path) <= clip else len(paths)
            for name, of_words in expected.items():  # pieces of a word have its relations
                assert found[name][row, : 2 * n, : 2 * n].tolist() == of_words.repeat(2, 0).repeat(2, 1).tolist()


def test_the_figures_of_the_source():
    """Figures show the relations from `is` in "I think this is a good idea .". Its ROOT is above `think` and the full stop."""
    text = [1, -1, 3, 1, 6, 6, 3, -1]
    words = words_of([text])
    paths, distances = (
        Relations(RelationsConfig(decoder=False, sequence={"clip": 0}, **{kind: {"clip": 5}}))(8, words, torch.device("cpu"))[0]
        for kind in ("tree_traversal", "tree_distance")
    )
    assert [list_paths(5)[i] for i in paths[0, 3]] == ["L", "U", "D", "", "DD", "DD", "D", "UUD"]
    assert distances[0, 3].tolist() == [2, 1, 1, 0, 2, 2, 1, 3] == distances[0, :, 3].tolist()


# Attention.


def parameters_and_inputs(batch: int, heads: int, queries: int, keys: int, width: int, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(queries)
    shapes = [(batch, heads, queries, width), *[(batch, heads, keys, width)] * 2, *[(rows, width)] * 2]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("value_kinds", [0, 1, 2])
def test_attention_is_that_of_a_loop_over_pairs(value_kinds):
    batch, heads, length, rows = 3, 2, 5, 7
    inputs = parameters_and_inputs(batch, heads, length, length, 4, rows)
    lengths = [5, 1, 3]
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None])[:, None, None]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(rows, (1, length, length), generator=generator)]  # one for all sentences, and one of each
    ids.append(torch.randint(rows, (batch, length, length), generator=generator))
    q, k, v, key_table, value_table = inputs
    values_of = value_table if value_kinds else None
    out = attend_related(q, k, v, mask, ids, key_table, values_of, value_kinds, 0.0)
    found, expected = [], []
    for b, h in itertools.product(range(batch), range(heads)):
        n = lengths[b]
        own = [each.expand(batch, -1, -1)[b, :n, :n] for each in ids]
        args = q[b, h, :n], k[b, h, :n], v[b, h, :n], own, key_table, values_of, value_kinds
        found.append(out[b, h, :n])
        expected.append(reference_attention(*args))
    torch.testing.assert_close(found, expected)
    needed = inputs if value_kinds else inputs[:4]
    weight = torch.randn(sum(map(len, found)), 4, dtype=torch.float64)
    grads = [torch.autograd.grad((torch.cat(x) * weight).sum(), needed, retain_graph=True) for x in (found, expected)]
    torch.testing.assert_close(*grads)


def test_tables_are_shared_by_heads_and_nothing_is_larger_than_the_weights():
    relations = Relations(RelationsConfig(structural={"clip": 4}))
    attention = RelatedSelfAttention(16, 2, 0.0, relations)
    assert attention.key_relations.shape == attention.value_relations.shape == (33 + 9, 8)
    text = [[-1, *range(39)]] * 3
    x, related = torch.randn(3, 40, 16), Related(relations(40, words_of(text), torch.device("cpu")))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        attention(x, None, related)
    assert max(saved) <= 3 * 2 * 40 * 42


def test_dropped_weights_are_dropped_for_values_and_relations_alike():
    """With values and rows of ones, an output is twice the sum of the weights that are kept."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 300, 4)
    ones = torch.ones(1, 2, 300, 4)
    ids = [torch.randint(3, (1, 300, 300))]
    out = attend_related(q, k, ones, None, ids, torch.zeros(3, 4), torch.ones(3, 4), 1, 0.5)
    assert 1.9 < out.mean() < 2.1 and out.std() > 0.01
    torch.testing.assert_close(out, out[..., :1].expand_as(out))


def test_a_head_of_labels():
    """The first head's queries and keys are W^Q and W^K of labels, the others' and all values those of states."""
    torch.manual_seed(2)
    attention = RelatedSelfAttention(8, 2, 0.0, Relations(RelationsConfig()), label_head=True).double()
    x, labels = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    ids = Relations(RelationsConfig())(5, None, torch.device("cpu"))
    found = attention(x, None, Related(ids, labels))
    (wq, wk, wv), (bq, bk, bv) = attention.queries_keys_values.weight.chunk(3), attention.queries_keys_values.bias.chunk(3)
    for b in range(3):
        heads = []
        for h, source in ((0, labels), (1, x)):
            q, k = source[b] @ wq.t() + bq, source[b] @ wk.t() + bk
            cut = slice(4 * h, 4 * h + 4)
            args = q[:, cut], k[:, cut], (x[b] @ wv.t() + bv)[:, cut], [ids[0][0]]
            heads.append(reference_attention(*args, attention.key_relations, attention.value_relations, 1))
        torch.testing.assert_close(found[b], attention.output(torch.cat(heads, dim=1)))


@pytest.mark.parametrize("values", [True, False])
def test_the_decoders_relative_positions(values):
    """Position i attends to j <= i by max(j - i, -clip)."""
    torch.manual_seed(3)
    attention = RelativeCausalSelfAttention(8, 2, 0.0, clip=2, values=values).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    found, _ = attention(x)
    q, k, v = attention.queries_keys_values(x)[0].chunk(3, dim=1)
    for i in range(6):
        ids, heads = torch.tensor([[max(j - i, -2) + 2 for j in range(i + 1)]]), []
        for cut in (slice(0, 4), slice(4, 8)):
            args = q[i : i + 1, cut], k[: i + 1, cut], v[: i + 1, cut], [ids], attention.key_relations
            heads.append(reference_attention(*args, attention.value_relations, int(values)))
        torch.testing.assert_close(found[:, i], attention.output(torch.cat(heads, dim=1)))


# Positions.


@pytest.mark.parametrize("fused", [True, False])
def test_structural_positions(fused):
    torch.manual_seed(0)
    positions = StructuralPositions(SinusoidalPositions(6, length=2), fused).double()
    x, depth = torch.randn(2, 4, 6, dtype=torch.float64), torch.tensor([[1, 0, 2, 3], [0, 1, 1, 0]])
    table = compute_sinusoids(4, 6).double()
    found = positions(x, depth)
    for b, i in itertools.product(range(2), range(4)):
        place, below = table[i], table[depth[b, i]]
        added = torch.tanh(positions.place(place) + positions.depth(below)) if fused else below
        torch.testing.assert_close(found[b, i], x[b, i] + added)


# Models.


@pytest.mark.parametrize("case", [name for name, config in MODEL_CASES.items() if config.get("name") == "relation_transformer"])
def test_models_see_what_they_say_they_read(case):
    """Another tree, or other labels, over the same pieces change the translation where they are read, and only there."""
    model = tiny_model(case)
    relations = model_config(case).relations
    example = example_of(right_branching(9), reads=model.reads)
    logits = model(collate([example], model.reads))

    def changes(part: str, name: str, values: list[int]) -> bool:
        other = example | {part: example[part] | {name: np.array(values)}}
        return not torch.equal(model(collate([other], model.reads)), logits)

    words = len(example["arcs"]["governor"])
    reads_trees = bool(relations.kinds.keys() - {"sequence"}) or relations.positions in ("depth", "both")
    assert changes("arcs", "governor", [*range(1, words), -1]) == reads_trees
    assert changes("arcs", "deprel", [4] * words) == (relations.label_head == "deprel")
    assert changes("leaves", "pos_tag", [3] * 9) == (relations.label_head == "pos_tag")
    assert model.reads == {"relative_positions": LEAVES, "pos_tag_head": WORDS}.get(case, DEPENDENCIES)


def model_config(case: str) -> ModelConfig:
    return ModelConfig(**MODEL_CASES[case])


@pytest.mark.parametrize("case", ["relative_positions", "tree_traversal"])
def test_order_matters_without_sinusoids(case):
    """The decoder alone has no other way to know it: BOS, a, b and BOS, b, a."""
    model, batch = tiny_model(case), batch_of([right_branching(4)], tiny_model(case).reads, target_length=4)
    turned = batch.to("cpu")
    turned.tgt_in = batch.tgt_in[:, [0, 2, 1, 3, 4]]
    assert (model(batch)[:, 3:] - model(turned)[:, 3:]).abs().max() > 1e-6


def test_classifiers_of_phrases_without_relations_and_of_whole_examples_with_them_are_built():
    for relations, supervision in (({}, "all_phrases"), ({"tree_distance": {"clip": 3}}, "root")):
        config = ModelConfig(name="relation_transformer", d_model=16, num_heads=2, relations=relations)
        build_classifier(config, VOCAB, ClassifierConfig(supervision=supervision), 3)


# Data.


@pytest.mark.slow
def test_batches_of_a_data_set(tmp_path):
    rows = make_rows(12)
    folder = write_labelled(tmp_path / "arcs", {"train": rows})
    for reads in (WORDS, DEPENDENCIES):
        source = ExampleSource(folder / "encoded", "train", reads)
        chosen = [5, 0, 11]
        found = source.batch(chosen).structure
        texts = [rows[i]["arcs"]["governor"] for i in chosen]
        assert torch.equal(found.word, words_of(texts).word) and not found.pos_tag.any()
        if reads is WORDS:
            assert found.arcs is None
        else:
            expected = arcs_of(texts)
            assert all(torch.equal(getattr(found.arcs, name), getattr(expected, name)) for name in ("depth", "up", "side"))
    bare = write_labelled(tmp_path / "bare", {"train": rows}, columns=[name for name in LABELLED_COLUMNS if name != "arcs"])
    ExampleSource(bare / "encoded", "train", WORDS)
    with pytest.raises(UserError, match=r"bare/encoded has no arcs, which this model reads; .* parser.dependencies=true"):
        ExampleSource(bare / "encoded", "train", DEPENDENCIES)


def test_vocabulary_sizes_are_those_of_the_files(tmp_path):
    data = write_vocabulary(tmp_path / "data")
    config = TrainConfig(data=data, model={"name": "relation_transformer", "d_model": 16, "num_heads": 2})
    index = read_index(data / "encoded")
    assert build_task(config).sizes(index) == {"num_pieces": 300, "num_labels": 5, "num_pos_tags": 3}
    assert vocab_sizes(build_task(config).sizes(index)) == VocabSizes(300, 5, 3, 0)
    assert vocab_sizes({"num_pieces": 300, "num_labels": 5}) == VocabSizes(300, 5)  # checkpoints of earlier times


@pytest.mark.slow
def test_data_that_a_model_cannot_read_is_refused(tmp_path):
    changes = ["model.name=relation_transformer", "model.relations.tree_traversal.clip=3"]
    data, bare = write_toy_data(tmp_path / "data", arcs=True), write_toy_data(tmp_path / "bare")
    with pytest.raises(UserError, match="has no arcs, which this model reads"):
        run_training(make_config(bare, *changes), tmp_path / "refused")
    run_training(make_config(data, *changes, "max_steps=2"), tmp_path / "run")
    with pytest.raises(UserError, match="has no arcs, which this model reads"):
        load_run(tmp_path / "run", data=bare)
    with pytest.raises(UserError, match=r"bare has no part-of-speech tags, which model\.relations\.label_head = pos_tag reads"):
        run_training(make_config(bare, changes[0], "model.relations.label_head=pos_tag"), tmp_path / "refused")
    index = read_index(data / "encoded") | {"tree_settings": {"tree_source": "random", "binarize": "none"}}
    with pytest.raises(
        UserError, match=r"random trees, but the arcs of the parser, .* not a " r"control; .*=parsed or dependencies$"
    ):
        check_structure(make_config(data, *changes), index, RelationEncoder)
    of_arcs = index | {"tree_settings": {"tree_source": "dependencies", "binarize": "none"}}
    check_structure(make_config(data, *changes), of_arcs, RelationEncoder)
    control = tmp_path / "control"
    shutil.copytree(data, control)
    (control / "encoded" / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="control has random trees, but the arcs of the parser"):
        evaluate_run(tmp_path / "run", EvaluateSettings(data=control))


@pytest.mark.slow
def test_raw_lines_have_the_arcs_of_the_parser(tmp_path):
    data = write_vocabulary(tmp_path / "data", parser="shipped", tree_source="parsed", dependencies=True)
    relations = {"tree_traversal": {"clip": 4}, "label_head": "deprel"}
    run = write_run(tmp_path / "run", data, name="relation_transformer", relations=relations)
    lines = ["The old man saw a dog.", "", "Where is it?"]
    translator = LineTranslator(TranslateSettings(max_leaves=100), [run])
    raw = [RawLine(line.encode()) for line in lines]
    rows = [line.row for line in translator._encoder.encode(raw)]
    parsed = build_parser(ParserConfig(name="shipped", dependencies=True, device="cpu")).parse([lines[0], lines[2]])
    assert [row["arcs"]["governor"].tolist() for row in rows] == [parsed[0].arcs["governor"], [], parsed[1].arcs["governor"]]
    names = ["<unk>", "nsubj", "obj", "root"]
    assert [names[i] for i in rows[0]["arcs"]["deprel"]] == [n if n in names else "<unk>" for n in parsed[0].arcs["deprel"]]
    translated = translator(raw, 0)
    assert translated.num_lines == 3 and not translated.problems and translated.text.split("\n")[1] == ""
    with pytest.raises(UserError, match="the model reads arcs of words, but bracketed trees have none; leave trees out"):
        LineTranslator(TranslateSettings(trees=tmp_path / "trees.txt"), [run])


# Experiments.

SYSTEMS = ("relative_positions", "structural_positions", "tree_distance", "tree_traversal", "pos_tag_head", "deprel_head")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_experiments_differ_from_the_base_model_in_relations_alone(system):
    base, other = (
        load_settings(TrainConfig, CONFIGS / f"iwslt14_en_de{name}.yaml", ["data=somewhere"]) for name in ("", f"_{system}")
    )
    assert other.model.name == "relation_transformer"
    plain = base.model.model_copy(update={"name": "transformer"})
    assert other.model_copy(update={"model": base.model}) == base
    assert other.model.model_copy(update={"name": "transformer", "relations": plain.relations}) == plain
    counts = []
    for config in (plain, other.model):
        with torch.device("meta"):
            model = build_model(config, VocabSizes(32_000, 80, 60, 60))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert counts[0] < counts[1] < 1.05 * counts[0]
