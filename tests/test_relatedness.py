"""Pairs of sentences with scores, from the table to scores.json: the reader, the data set, targets, correlations, training."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from toylabels import NUM_LABELS, NUM_PIECES, make_rows, write_labelled

from treenet.config import ClassifierConfig, ModelConfig, TrainConfig
from treenet.data.input_kinds import BINARY_TREES, LEAVES
from treenet.data.labelled import PairSource
from treenet.evaluation.classify import score_run
from treenet.evaluation.significance import compare_correlations
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.seeds_report import FORM
from treenet.experiments.study import make_study, run_study
from treenet.experiments.study_grid import study_cells
from treenet.jobs.train_run import run_training
from treenet.models import ClassLogits, VocabSizes, build_relatedness, find_encoder
from treenet.models.composed import PairHead, expected_score, score_distribution
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import build_task
from treenet.tasks.relatedness import Relatedness, average_ranks, correlations, moments, pearson, summarize_moments
from treenet.tasks.scores import format_scores
from treeproc.common.settings import UserError, load_settings
from treeproc.readers import read_rows
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.verify import verify

slow = pytest.mark.slow

NAMES = ["bilstm", "child_sum_tree_lstm", "transformer", "tree_lstm", "tree_transformer"]
HEADER = "pair_ID\tsentence_A\tsentence_B\tentailment_label\trelatedness_score\tSemEval_set\n"
TABLE = (
    HEADER
    + "1\tTwo dogs run on the beach\tThe beach is full of dogs\tNEUTRAL\t3.7\tTRAIN\n"
    + "2\tA man cooks 'eggs'\tNobody is cooking\tCONTRADICTION\t2.15\tTRIAL\n"
    + "3\tA cat sleeps\tA cat is sleeping\tENTAILMENT\t5\tTRAIN\n"
)
COLUMNS = ("leaves", "nodes", "spans", "score", "arcs")


# The reader.


def read(tmp_path, text: str, part: str = "") -> list[dict]:
    (tmp_path / "SICK.txt").write_text(text, encoding="utf-8")
    return list(read_rows("sick", [tmp_path / "SICK.txt" / part if part else tmp_path / "SICK.txt"], []))


def test_every_two_rows_are_the_sentences_of_a_pair(tmp_path):
    rows = read(tmp_path, TABLE)
    assert [row["score"] for row in rows] == [3.7, 3.7, 2.15, 2.15, 5.0, 5.0]
    assert rows[2] == {"source": "A man cooks 'eggs'", "score": 2.15} and rows[3]["source"] == "Nobody is cooking"
    assert read(tmp_path, TABLE, "TRIAL") == rows[2:4] and read(tmp_path, TABLE, "TRAIN") == rows[:2] + rows[4:]


@slow
def test_a_table_becomes_a_data_set_of_pairs(tmp_path):
    (tmp_path / "SICK.txt").write_text(TABLE, encoding="utf-8")
    config = {
        "splits": {name: {"source": [tmp_path / "SICK.txt" / part]} for name, part in (("train", "TRAIN"), ("valid", "TRIAL"))},
        "format": "sick",
        "parser": {"name": "words"},
        "tree": {"tree_source": "balanced", "binarize": "right"},
        "subwords": {"vocab_size": 300},
        "rows_per_shard": 2,
        "workers": 0,
    }
    preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    verify(tmp_path / "data")
    assert read_index(tmp_path / "data" / "encoded")["columns"] == ["example_id", "leaves", "nodes", "spans", "score"]
    assert [len(shard) for shard in SplitShards(tmp_path / "data" / "encoded", "train")] == [2, 2]
    source = PairSource(tmp_path / "data" / "encoded", "train", BINARY_TREES)
    batch = source.batch([1, 0])
    assert len(source) == 2 and batch.scores.tolist() == [5.0, 3.7] and batch.example_ids.tolist() == [2, 3, 0, 1]
    sizes = (~batch.leaf_pad_mask).sum(1)
    assert source.lengths["leaves"].tolist() == [2 * max(sizes[2:]), 2 * max(sizes[:2])]
    for change, message in (
        ({"splits": {**config["splits"], "valid": {"hold_out": 2}}}, "would separate the two sentences of a pair"),
        ({"filters": {"drop_duplicates": True}}, "drop_duplicates and drop_leaks must be false"),
    ):
        with pytest.raises(ValueError, match=message):
            PreprocessConfig.model_validate(config | change)
    # A filter that drops a sentence would not find the other one in the next shard.
    with pytest.raises(UserError, match="rows_per_shard: must be even for format sick, .* but is 3"):
        preprocess(PreprocessConfig.model_validate(config | {"rows_per_shard": 3}), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@slow
def test_a_filter_that_drops_one_sentence_of_a_pair_drops_both(tmp_path):
    pairs = [("a b", "c d"), ("a b c d e", "f"), ("g", "bro\ufffdken"), ("h", "i"), ("a b c d e", "bro\ufffdken")]
    lines = "".join(f"{number % 2}\t{first}\t{second}\n" for number, (first, second) in enumerate(pairs))
    for name in ("train", "test"):
        (tmp_path / name).write_text(lines)
    config = {
        "splits": {name: {"source": [tmp_path / name]} for name in ("train", "test")},
        "format": "labelled",
        "labelled": {"second_text": "hypothesis"},
        "filters": {"max_words": 4},
        "parser": {"name": "words"},
        "tree": {"tree_source": "balanced"},
        "subwords": {"vocab_size": None},
        "workers": 0,
    }
    preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    data = tmp_path / "data"
    dropped = ["2 too_long", "3 too_long", "4 damaged", "5 damaged", "8 too_long", "9 damaged"]
    expected = [f"train\t{int(one[0]) + 1}\tsource_{one[2:]}" for one in dropped]
    assert (data / "text" / "dropped.tsv").read_text().splitlines()[1:] == expected
    assert PairSource(data / "encoded", "train", LEAVES, "label").lengths["example_id"].tolist() == [0, 3]
    assert len(PairSource(data / "encoded", "test", LEAVES, "label")) == 5
    assert not verify(data).problems


# Targets and correlations.


def test_targets_are_those_of_the_paper():
    scores = [1 + step / 30 for step in range(121)]
    found = score_distribution(torch.tensor(scores, dtype=torch.float64))
    for row, y in zip(found.tolist(), scores, strict=True):
        floor = math.floor(y)
        wanted = [y - floor if i == floor + 1 else floor - y + 1 if i == floor else 0.0 for i in range(1, 6)]
        assert row == pytest.approx(wanted, abs=1e-12)
    assert expected_score(found.log().clamp(min=-1e9)).tolist() == pytest.approx(scores)


def test_the_loss_is_the_divergence_and_its_gradient():
    torch.manual_seed(0)
    logits, scores = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), [1.0, 2.3, 4.5, 5.0]
    batch = type("Batch", (), {"scores": torch.tensor(scores, dtype=torch.float64)})
    found = Relatedness.sum_losses(None, None, batch, ClassLogits(logits, None))
    loss = nll = 0.0
    for row, y in zip(logits, scores, strict=True):
        q = row.exp() / row.exp().sum()
        p = [max(0.0, 1 - abs(y - i)) for i in range(1, 6)]
        for i in range(5):
            if p[i]:
                loss, nll = loss + p[i] * (math.log(p[i]) - q[i].log()), nll - p[i] * q[i].log()
    torch.testing.assert_close((found.loss, found.nll), (loss, nll))
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (found.loss, loss)))


def test_the_head_compares_neighbours():
    torch.manual_seed(0)
    head, states = PairHead(3, 4).double(), torch.randn(4, 3, dtype=torch.float64)
    for pair, (left, right) in enumerate([(states[0], states[1]), (states[2], states[3])]):
        product, distance = head.compare.weight.split(3, dim=1)
        hidden = torch.sigmoid(product @ (left * right) + distance @ abs(left - right) + head.compare.bias)
        torch.testing.assert_close(head(states)[pair], head.scores.weight @ hidden + head.scores.bias)


def reference_pearson(x: list[float], y: list[float]) -> float:
    """Covariance over deviations; 0 where a side does not vary."""
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    covariance = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    spread = math.fsum((a - mean_x) ** 2 for a in x) * math.fsum((b - mean_y) ** 2 for b in y)
    return covariance / math.sqrt(spread) if len(set(x)) > 1 and len(set(y)) > 1 else 0.0


def reference_ranks(values: list[float]) -> list[float]:
    return [1 + sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


@num_examples(60)
@given(pairs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_correlations_agree_with_formulas_where_values_are_tied(pairs):
    x, y = ([1 + value / 2 for value in side] for side in zip(*pairs, strict=True))
    found = correlations(np.array(x), np.array(y))
    assert found["pearson"] == pytest.approx(reference_pearson(x, y), abs=1e-12)
    assert found["spearman"] == pytest.approx(reference_pearson(reference_ranks(x), reference_ranks(y)), abs=1e-12)
    assert found["mse"] == pytest.approx(math.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x))
    sums = torch.stack(moments(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)))
    summary = summarize_moments(sums)
    assert summary == pytest.approx({name: found[name] for name in ("pearson", "mse")}, abs=1e-9)


@slow
@given(values=st.lists(st.sampled_from([0.5, 1.0, 2.5, -3.0, math.inf, math.nan]), min_size=1, max_size=12))
def test_ranks_are_those_of_scipy_to_the_last_bit(values):
    from scipy.stats import rankdata  # here: it loads for more than a second, in every process of pytest-xdist

    assert np.array_equal(average_ranks(np.array(values)), rankdata(values), equal_nan=True)


# Models and training.


def pair_rows(count: int, seed: int = 0) -> list[dict]:
    """Sentences of pairs whose score is the share of pieces that both have."""
    rows = make_rows(2 * count, seed)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        one, other = (set(row["leaves"]["piece"]) for row in (first, second))
        first["score"] = second["score"] = 1 + 4 * len(one & other) / len(one | other)
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    splits = {split: pair_rows(count, seed) for seed, (split, count) in enumerate({"train": 40, "valid": 12, "test": 8}.items())}
    return write_labelled(tmp_path_factory.mktemp("pairs"), splits, columns=COLUMNS, num_classes=None)


def make_config(data, *overrides: str) -> TrainConfig:
    tiny = {
        "task": "relatedness",
        "model": {"name": "tree_lstm", "d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 4, "label_smoothing": 0.0},
        "batch": {"max_tokens": 256},
        "max_steps": 6,
        "checkpoint_every": 3,
        "validate_every": 3,
        "keep_checkpoints": 1,
        "average": "best",
        "average_checkpoints": 1,
        "workers": 0,
    }
    return load_settings(TrainConfig, None, overrides, **json.loads(json.dumps(tiny)), data=data)


@slow
@pytest.mark.parametrize("name", NAMES)
def test_a_pair_does_not_see_its_batch_and_pairs_can_be_learned(data, name):
    torch.manual_seed(0)
    config = ModelConfig(name=name, d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, dropout=0.0)
    model = build_relatedness(config, VocabSizes(NUM_PIECES, NUM_LABELS), ClassifierConfig())
    source = PairSource(data / "encoded", "train", find_encoder(config, "classification").reads)
    together = source.batch([5, 2, 9])
    output = model.double()(together).examples
    for row, pair in enumerate([5, 2, 9]):
        torch.testing.assert_close(output[row : row + 1], model(source.batch([pair])).examples, rtol=1e-12, atol=1e-12)
    model, batch = model.float(), source.batch(range(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(80):
        loss = Relatedness.sum_losses(None, None, batch, model(batch)).loss / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert correlations(expected_score(model(batch).examples).detach().numpy(), batch.scores.numpy())["pearson"] > 0.9


@slow
@pytest.mark.parametrize("name", ["tree_lstm", "child_sum_tree_lstm"])
def test_a_run_trains_resumes_and_is_scored(data, tmp_path, name):
    for steps in (3, 6):
        run_training(make_config(data, f"model.name={name}", f"max_steps={steps}"), tmp_path)
    scores = score_run(tmp_path)
    assert list(scores) == ["valid", "valid.last", "test", "test.last"]
    lines = [line.split("\t") for line in (tmp_path / "predictions.test.tsv").read_text().splitlines()]
    assert lines[0] == ["pair", "score", "predicted"] and [int(line[0]) for line in lines[1:]] == list(range(8))
    wanted, predicted = (np.array([float(line[column]) for line in lines[1:]]) for column in (1, 2))
    assert wanted == pytest.approx([row["score"] for row in pair_rows(8, 2)[::2]], rel=1e-4)
    for metric, value in correlations(predicted, wanted).items():
        assert scores["test"][metric] == pytest.approx(value, abs=1e-3)
    valid = {line["step"]: line for line in read_metrics(tmp_path) if line["event"] == "valid"}
    best = max(valid.values(), key=lambda line: line["pearson"])["pearson"]
    assert scores["valid"]["pearson"] == pytest.approx(best, abs=1e-6)
    assert f"{scores['test']['spearman']:.4f}".replace("-", "−") in format_scores(scores)


@pytest.mark.parametrize(
    ("overrides", "facts", "message"),
    [
        (["optimizer.label_smoothing=0.1"], {}, "label_smoothing and optimizer.r_drop must be 0 for task relatedness"),
        (["classifier.neutral_class=2"], {}, "neutral_class must be null for task relatedness"),
        ([], {"tree_settings": {"binarize": "none"}}, "preprocess again with tree.binarize=right"),
    ],
)
def test_settings_that_do_not_fit_are_refused(data, overrides, facts, message):
    with pytest.raises(UserError, match=message):
        build_task(make_config(data, *overrides)).check(read_index(data / "encoded") | facts)


def test_a_pair_that_lost_a_sentence_is_refused(tmp_path):
    rows = pair_rows(4)
    for name, kept in (("inner", rows[:3] + rows[4:]), ("last", rows[:-1])):
        folder = write_labelled(tmp_path / name, {"train": kept}, columns=COLUMNS, num_classes=None)
        with pytest.raises(UserError, match="a filter dropped one sentence of a pair"):
            PairSource(folder / "encoded", "train", LEAVES)
    folder = write_labelled(tmp_path / "classes", {"train": make_rows(4)})
    with pytest.raises(UserError, match="has no scores .* choose a data set of format sick"):
        PairSource(folder / "encoded", "train", LEAVES)


# Over seeds.


@slow
def test_a_comparison_over_seeds_tests_pearson_on_shared_pairs(data, tmp_path, capsys):
    systems = {"trees": {}, "words": {"model": {"name": "bilstm", "recurrent": {"directions": "forward"}}}}
    grid = {"systems": systems, "baseline": "words", "seeds": [1, 2, 3], "peak_on_test": True}
    values = json.loads(make_config(data, "max_steps=10").model_dump_json())
    config = load_settings(SeedsConfig, None, **{**values, "data": data, "grid": grid})
    run_study(make_study(FORM, config, tmp_path / "out", tmp_path / "records"))
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    cells = {cell["cell"]: cell for cell in report["cells"]}
    assert len(cells) == 6
    scores, predicted = {}, {}
    for name, cell in cells.items():
        lines = (tmp_path / "out" / "cells" / name / "predictions.test.tsv").read_text().splitlines()[1:]
        columns = zip(*(map(float, line.split("\t")) for line in lines), strict=True)
        _, scores[name], predicted[name] = map(np.array, columns)
        assert cell["test.pearson"] == pytest.approx(correlations(predicted[name], scores[name])["pearson"], abs=1e-3)
        assert {"test.spearman", "test.mse", "test.peak.pearson", "valid.pearson"} <= cell.keys()
    words, trees = sorted(report["systems"], key=lambda row: row["system"] == "trees")
    test = trees["tests"]["test.pearson"]
    differences = [cells[f"trees-seed{seed}"]["test.pearson"] - cells[f"words-seed{seed}"]["test.pearson"] for seed in (1, 2, 3)]
    assert test["difference"] == pytest.approx(np.mean(differences), abs=5e-5) and test["interval"] is not None
    assert "tests" not in words and "test, rho" in capsys.readouterr().out


@slow
def test_the_error_over_sentences_of_a_correlation_is_that_of_a_slow_bootstrap():
    random = np.random.default_rng(0)
    scores = random.normal(size=40)
    baselines, systems = (scores + share * random.normal(size=(3, 40)) for share in (1.0, 0.7))
    test = compare_correlations(baselines, systems, scores, samples=300)
    drawn = np.random.default_rng(12345).integers(40, size=(300, 40))

    def difference(rows) -> float:
        pairs = zip(baselines, systems, strict=True)
        return np.mean([pearson(y[rows], scores[rows]) - pearson(x[rows], scores[rows]) for x, y in pairs])

    assert test.difference == pytest.approx(difference(slice(None)))
    assert test.sentences_error == pytest.approx(np.std([difference(rows) for rows in drawn]) * (40 / 39) ** 0.5)
    same = compare_correlations(np.ones((3, 40)), np.ones((3, 40)), scores, samples=10)
    assert same.difference == 0 and same.interval is None


def test_all_systems_of_a_comparison_have_one_task(data, tmp_path):
    with pytest.raises(UserError, match="trees: task must be one of classification, relatedness, causal_lm, masked_lm, "):
        config = load_settings(SeedsConfig, None, data=data, workers=0, grid={"systems": {"trees": {}}, "baseline": "trees"})
        make_study(FORM, config, tmp_path, None)
    values = {**json.loads(make_config(data).model_dump_json()), "data": data}
    mixed = {"systems": {"a": {}, "b": {"task": "classification"}}, "baseline": "a"}
    with pytest.raises(UserError, match="task must be one of .*, the same for all systems, but is classification"):
        study_cells(load_settings(SeedsConfig, None, **{**values, "grid": mixed}), tmp_path)
