"""Losses, counts and scores of tasks against torch, slow loops and equations."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_tasks import all_tasks, labels, pairs, task, toy

from treenet.data.labelled import NO_CLASS, LabelledSource, PairSource, PhraseSource
from treenet.models import ClassLogits
from treenet.tasks.class_scores import class_scores, wilson_interval
from treenet.tasks.classification import count_right, summarize_counts
from treenet.tasks.losses import LossSums, projected_nll, r_drop_loss, sum_tied_losses, take_counted
from treenet.tasks.relatedness import average_ranks, pearson, summarize_moments
from treenet.tasks.scores import ABOUT_INTERVALS, SCORES, format_scores, score_columns
from treeproc.common.settings import UserError
from treeproc.shards.schema import PAD_ID
from treeproc.shards.store import read_index

__all__ = ["labels", "pairs", "toy"]  # fixtures


def test_metrics_of_sums_are_their_means(toy):
    for name, one in all_tasks(toy).items():
        if one.score == "":
            found = one.metrics(torch.tensor([6.0, 4.0], dtype=torch.float64), 4)
            assert found == {"loss": 1.5, "nll": 1.0, "perplexity": pytest.approx(math.e)}, name
            assert one.metrics(torch.tensor([1.0, 1e6]), 1)["perplexity"] == math.exp(700)
    regular = task(toy, "model.tree_reg.weight=0.5", name="causal_lm", model="causal_transformer")
    assert regular.metrics(torch.tensor([6.0, 4.0, 3.0]), 4)["tree_reg"] == 0.75
    classes = task(toy).metrics(torch.tensor([6.0, 3.0, 10, 4, 8, 6, 0, 0]), 2)
    assert classes == {"loss": 3.0, "nll": 1.5, "accuracy": 0.4, "binary_accuracy": 0.75}
    x, y = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2.0, 3.0, 3.0])
    sums = [
        torch.tensor(7.0),
        torch.tensor(6.0),
        *(torch.tensor(3.0), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()),
    ]
    related = task(toy, name="relatedness").metrics(torch.stack(sums).double(), 2)
    assert related == {
        "loss": 3.5, "nll": 3.0, "pearson": pytest.approx(np.corrcoef(x, y)[0, 1]), "mse": pytest.approx(1.0),
    }  # fmt: skip
    # Deviations up to 1e-9 of the squared count are rounding.
    for deviation, varies in ((0.9e-9, False), (1.1e-9, True)):
        spread = summarize_moments(
            torch.tensor([4.0, 0.0, 0.0, 4 * deviation, 4 * deviation, 4 * deviation], dtype=torch.float64)
        )
        assert spread["pearson"] == (pytest.approx(1.0) if varies else 0.0)


# Classes.


@pytest.mark.parametrize(
    ("overrides", "change", "message"),
    [
        ([], {}, None),
        ([], {"columns": ["leaves", "nodes"]}, r"has no classes \(its columns: leaves, nodes\)"),
        ([], {"num_classes": None}, "does not record its number of classes"),
        ([], {"num_classes": 1}, "has one class, and a classifier needs two"),
        ([], {"num_classes": 2}, None),
        (["classifier.neutral_class=3"], {}, "must be one of the 3 classes of .*, counted from 0, but is 3"),
        (["classifier.neutral_class=2"], {}, None),
        (["classifier.neutral_class=0"], {}, None),
        ([], {"tree_settings": {"binarize": "none"}}, "reads binary ones"),
    ],
)
def test_data_without_fitting_classes_are_refused(labels, overrides, change, message):
    one = task(labels, *overrides)
    index = {name: value for name, value in (dict(read_index(labels / "encoded")) | change).items() if value is not None}
    if message is None:
        one.check(index)
    else:
        with pytest.raises(UserError, match=message):
            one.check(index)
    with pytest.raises(UserError, match="has scores and no classes"):
        task(labels, "classifier.neutral_class=0", name="relatedness").check(index)
    for setting in ("label_smoothing=0.1", "r_drop=0.5"):
        with pytest.raises(UserError, match="label_smoothing and optimizer.r_drop must be 0"):
            task(labels, f"optimizer.{setting}", name="relatedness").check(index)


def test_a_split_is_read_as_the_model_learns_it(labels, pairs):
    sources = {
        (model, supervision, training): task(labels, f"classifier.supervision={supervision}", model=model).open(
            "train", training=training
        )
        for model in ("transformer", "tree_lstm")
        for supervision in ("all_phrases", "root")
        for training in (False, True)
    }
    for (model, supervision, training), source in sources.items():
        of_phrases = (model, supervision, training) == ("transformer", "all_phrases", True)
        assert type(source) is (PhraseSource if of_phrases else LabelledSource)
        wide = source.batch([0, 1]).position_labels.shape[1] > 0 if not of_phrases else False
        assert wide == (model == "tree_lstm" and supervision == "all_phrases")
    assert type(task(pairs).open("train")) is type(task(pairs, name="relatedness").open("train")) is PairSource
    with pytest.raises(UserError, match="learns from phrases read alone"):
        task(labels, "frozen_states=states", model="transformer").open("train", training=True)


def test_losses_of_classes_are_those_of_torch(labels):
    torch.manual_seed(0)
    one, generator = task(labels, "optimizer.label_smoothing=0.2", "optimizer.r_drop=1.5"), torch.Generator().manual_seed(1)
    labels_of, places = torch.tensor([0, 2, 1, 1]), torch.randint(-1, 3, (4, 5), generator=generator)
    places[0, 0], places[3, 4] = NO_CLASS, 0
    outputs = [ClassLogits(torch.randn(4, 3, generator=generator), torch.randn(4, 5, 3, generator=generator)) for _ in range(2)]
    for with_positions in (False, True):
        batch = SimpleNamespace(labels=labels_of, position_labels=places if with_positions else places[:, :0])
        first, second = (ClassLogits(each.examples, each.positions if with_positions else None) for each in outputs)
        wanted = places.flatten() if with_positions else labels_of
        flat = [(each.positions if with_positions else each.examples).reshape(-1, 3) for each in (first, second)]
        counted = one.counted_targets(batch)
        assert counted.tolist() == [place for place, label in enumerate(wanted.tolist()) if label >= 0]
        cross = [F.cross_entropy(x, wanted, ignore_index=-1, reduction="sum", label_smoothing=0.2) for x in flat]
        plain = [F.cross_entropy(x, wanted, ignore_index=-1, reduction="sum") for x in flat]
        p, q = (x[wanted >= 0].log_softmax(-1) for x in flat)
        divergence = ((p.exp() - q.exp()) * (p - q)).sum() / 2
        for places_known in (None, counted):
            alone = one.sum_losses(None, batch, first, counted=places_known)
            torch.testing.assert_close((alone.loss, alone.nll), (cross[0], plain[0]))
            both = one.sum_losses(None, batch, first, second, places_known)
            torch.testing.assert_close((both.loss, both.nll), (sum(cross) + 1.5 * divergence, sum(plain) / 2))


@pytest.mark.parametrize(("neutral", "two_classes"), [(None, [0, 0]), (0, [0, 0]), (3, [0, 0]), (1, [4, 3]), (2, [5, 4])])
def test_what_is_right_is_counted_for_examples_two_classes_and_positions(neutral, two_classes):
    """There are four classes. The probabilities are shares of ten."""
    shares = [[1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 7, 1], [0, 5, 3, 2], [5, 1, 0, 4], [4, 0, 1, 5]]
    examples = (torch.tensor(shares) / 10).log()
    labels = torch.tensor([3, 1, 2, 0, 0, 1])
    places = torch.tensor([[2, NO_CLASS], [0, 0], [NO_CLASS, NO_CLASS], [3, 1], [1, 1], [NO_CLASS, 2]])
    positions = F.one_hot(torch.tensor([[2, 0], [0, 1], [0, 0], [3, 0], [1, 1], [1, 3]]), 4).float()
    batch = SimpleNamespace(labels=labels, position_labels=places)
    alone = [x.item() for x in count_right(batch, ClassLogits(examples, None), neutral)]
    assert alone == [6, 3, *two_classes, 0, 0]
    assert [x.item() for x in count_right(batch, ClassLogits(examples, positions), neutral)] == [6, 3, *two_classes, 8, 5]
    assert summarize_counts(torch.tensor(alone, dtype=torch.float64)) == {"accuracy": 0.5} | (
        {"binary_accuracy": two_classes[1] / two_classes[0]} if two_classes[0] else {}
    )


def test_predictions_are_sorted_lines_with_probabilities_and_scores(labels):
    one = task(labels, "classifier.neutral_class=1")
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.5], [0.0, 4.0, 0.0]])
    batches = [([7, 3], [0, 0]), ([5, 4], [2, 1])]
    given = [
        (SimpleNamespace(numbers=torch.tensor(numbers), labels=torch.tensor(right)), ClassLogits(logits[first : first + 2], None))
        for (numbers, right), first in zip(batches, (0, 2), strict=True)
    ]
    lines, scores = one.score_predictions(given)
    assert lines[0] == "example_id\tlabel\tpredicted\tp0\tp1\tp2\n"
    rows = {number: (label, row) for (numbers, right), part in zip(batches, (logits[:2], logits[2:]), strict=True)
            for number, label, row in zip(numbers, right, part.tolist(), strict=True)}  # fmt: skip
    for line, number in zip(lines[1:], sorted(rows), strict=True):
        label, row = rows[number]
        total = sum(map(math.exp, row))
        cells = [f"{math.exp(x) / total:.6f}" for x in row]
        assert line == "\t".join([str(number), str(label), str(row.index(max(row))), *cells]) + "\n"
    assert scores["accuracy"] == 0.5 and scores["binary_accuracy"] == pytest.approx(2 / 3) and "phrase_accuracy" not in scores
    assert scores["confusion"] == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert scores["learning"] == {"class_share": 0.5, "label_share": 0.5}


def slow_f1(cells: dict[tuple[int, int], int]) -> float:
    found = []
    for one in {side for pair, count in cells.items() if count for side in pair}:
        hits, right = cells.get((one, one), 0), sum(n for (label, _), n in cells.items() if label == one)
        found.append(2 * hits / (right + sum(n for (_, predicted), n in cells.items() if predicted == one)))
    return sum(found) / len(found)


def test_scores_of_classes_are_those_of_a_slow_bootstrap():
    """The seed and the number of samples are those of earlier results."""
    cells = {(0, 0): 9, (0, 1): 4, (1, 1): 6, (2, 1): 2, (3, 2): 1}
    scores, total = class_scores(cells, 5), sum(cells.values())
    drawn = np.random.default_rng(12345).multinomial(total, [count / total for count in cells.values()], 1000)
    sampled = sorted(slow_f1(dict(zip(cells, sample.tolist(), strict=True))) for sample in drawn)
    assert scores["macro_f1"] == pytest.approx(slow_f1(cells))

    def percentile(share: float) -> float:
        place = share * 999
        return sampled[int(place)] + (place - int(place)) * (sampled[int(place) + 1] - sampled[int(place)])

    assert scores["macro_f1_interval"] == pytest.approx([percentile(0.025), percentile(0.975)], abs=1e-12)
    assert scores["accuracy_interval"] == list(wilson_interval(15, 22))
    assert scores["confusion"] == [[9, 4, 0, 0, 0], [0, 6, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 1, 0, 0], [0] * 5]
    assert len(class_scores({(0, 0): 1}, 100)["confusion"]) == 100 and "confusion" not in class_scores({(0, 0): 1}, 101)
    certain = class_scores({(0, 0): 2, (1, 1): 1}, 2)
    assert certain["macro_f1"] == 1 and "macro_f1_interval" not in certain


@pytest.mark.parametrize(("right", "total"), [(0, 4), (1, 4), (3, 10), (10, 10), (50, 60)])
def test_intervals_of_shares_are_the_shares_from_which_the_observed_one_is_not_far(right, total):
    """Both ends p satisfy |right / total - p| = z sqrt(p (1 - p) / total)."""
    low, high = wilson_interval(right, total)
    assert 0 <= low <= right / total <= high + 1e-12 <= 1 + 1e-12
    for end in (low, high):
        distance = abs(right / total - end)
        assert distance == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / total), rel=1e-9, abs=1e-7)


# Scores.


def test_predictions_of_scores_are_sorted_and_counted(pairs):
    one, source = task(pairs, name="relatedness"), task(pairs, name="relatedness").open("train")
    torch.manual_seed(0)
    given, everything = [], {}
    for rows in ([4, 1], [0, 5, 2]):
        batch, logits = source.batch(rows), torch.randn(len(rows), 5) * 2
        given.append((batch, ClassLogits(logits, None)))
        for row, own in zip(rows, logits.double(), strict=True):
            everything[row] = 1 + row * 0.7, float((own.softmax(0) * torch.arange(1, 6)).sum())
        sums = torch.stack(list(one.count_right(batch, ClassLogits(logits, None)))).tolist()
        xs, ys = [everything[row][1] for row in rows], [everything[row][0] for row in rows]
        products = sum(x * y for x, y in zip(xs, ys, strict=True))
        assert sums == pytest.approx([len(rows), sum(xs), sum(ys), sum(x * x for x in xs), sum(y * y for y in ys), products])
    lines, scores = one.score_predictions(given)
    assert lines == [
        "pair\tscore\tpredicted\n", *(f"{n}\t{everything[n][0]:g}\t{everything[n][1]:.6f}\n" for n in sorted(everything)),
    ]  # fmt: skip
    wanted, predicted = (np.array([everything[n][side] for n in everything]) for side in (0, 1))
    assert scores["pearson"] == pytest.approx(np.corrcoef(predicted, wanted)[0, 1])
    assert scores["mse"] == pytest.approx(np.mean((predicted - wanted) ** 2))
    assert scores["learning"] == {"spread": pytest.approx(np.std(predicted) / np.std(wanted))}
    assert one.counted_targets(given[0][0]) is None


def test_sums_that_rounding_made_impossible_do_not_vary():
    """2 * 1.9999999999 < 2^2 on one side; the other one varies."""
    for x, y in ((1.9999999999, 2.5), (2.5, 1.9999999999), (2.0, 2.5)):
        found = summarize_moments(torch.tensor([2.0, 2.0, 2.0, x, y, 2.0], dtype=torch.float64))
        assert found == {"pearson": 0.0, "mse": pytest.approx((x + y) / 2 - 2)}


def test_ranks_with_ties_and_without_numbers():
    assert average_ranks(np.array([3.0, 1.0, 3.0, 2.0, 3.0])).tolist() == [4.0, 1.0, 4.0, 2.0, 4.0]
    assert np.isnan(average_ranks(np.array([1.0, math.nan, 2.0]))).tolist() == [True] * 3
    varied, constant = np.array([1.0, 2.0, 4.0]), np.ones(3)
    assert pearson(varied, constant) == pearson(constant, varied) == pearson(constant, constant) == 0.0
    assert pearson(varied, -3 * varied) == pytest.approx(-1.0)


# Losses.


class Tied:
    """A model whose table is also the output."""

    def __init__(self, table: torch.Tensor):
        self.encoder = SimpleNamespace(embedding=SimpleNamespace(weight=table))

    def compute_logits(self, states):
        return states @ self.encoder.embedding.weight.t()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("auxiliary", [False, True])
def test_losses_through_the_table_are_those_of_its_logits(toy, known, auxiliary):
    torch.manual_seed(0)
    one = task(toy, "optimizer.label_smoothing=0.2", "optimizer.r_drop=1.5", name="translation", model="transformer")
    table, targets = torch.randn(9, 4, dtype=torch.float64), torch.randint(1, 9, (2, 5))
    targets[0, 3:] = PAD_ID
    states = [torch.randn(2, 5, 4, dtype=torch.float64) for _ in range(2)]
    model, batch = Tied(table), SimpleNamespace(tgt_out=targets)
    counted = one.counted_targets(batch)
    assert counted.tolist() == [place for place, piece in enumerate(targets.flatten().tolist()) if piece != PAD_ID]
    own = [torch.tensor(0.25), torch.tensor(0.5)]
    given = [(x, loss) if auxiliary else x for x, loss in zip(states, own, strict=True)]
    alone = one.sum_losses(model, batch, given[0], None, counted if known else None)
    both = one.sum_losses(model, batch, *given, counted if known else None)
    chosen = [x.flatten(0, 1)[counted] @ table.t() for x in states]
    wanted = targets.flatten()[counted]
    cross = [F.cross_entropy(x, wanted, reduction="sum", label_smoothing=0.2) for x in chosen]
    plain = [F.cross_entropy(x, wanted, reduction="sum") for x in chosen]
    divergence = r_drop_loss(*chosen, wanted, 0.2, 1.5).loss - r_drop_loss(*chosen, wanted, 0.2, 0.0).loss
    for sums, loss, nll, more in ((alone, cross[0], plain[0], own[:1]), (both, sum(cross) + divergence, sum(plain) / 2, own)):
        extra = sum(float(x) for x in more) if auxiliary else 0.0
        assert float(sums.loss) == pytest.approx(float(loss) + extra, rel=1e-5)
        assert float(sums.nll) == pytest.approx(float(nll), rel=1e-5)
        assert (sums.auxiliary is not None) == auxiliary
        totals = sums.totals()
        assert totals.dtype == torch.float64 and totals.tolist() == pytest.approx(
            [float(loss) + extra, float(nll), extra / len(more)], rel=1e-5
        )
    assert sum_tied_losses(model, targets, one.config.optimizer, states[0]).loss == pytest.approx(float(cross[0]))


def test_places_that_count_are_taken_or_all_stay():
    targets, states = torch.tensor([[3, 0], [4, 5]]), torch.arange(8.0).view(2, 2, 2)
    same, ignored, [kept] = take_counted(None, targets, 0, states)
    assert same is targets and ignored == 0 and kept is states
    few, ignored, [kept, again] = take_counted(torch.tensor([0, 3]), targets, 0, states, states + 1)
    assert (few.tolist(), ignored, kept.tolist()) == ([3, 5], None, [[0.0, 1.0], [6.0, 7.0]]) and torch.equal(again, kept + 1)


def test_only_the_loss_has_a_gradient():
    states, table = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    sums = projected_nll(states, table, torch.tensor([3, 4, 5]), 0.1)
    assert sums.loss.requires_grad and not sums.nll.requires_grad and sums.auxiliary is None
    assert not LossSums(sums.loss, sums.nll, sums.loss).totals().requires_grad


def test_a_column_has_a_score_of_every_entry_in_its_unit_and_digits():
    entries = [
        {"accuracy": 0.51239, "accuracy_interval": [0.5, 0.53], "kind": "x"},
        {"pearson": -0.12345, "interval": [0.1, 0.2]},
    ]
    columns = {one.title: list(one.cells) for one in score_columns(entries, "run")}
    assert columns == {"run, accuracy (%)": ["51.24", "–"], "95 %": ["50.00 to 53.00", "–"], "run, Pearson's r": ["–", "−0.1235"]}
    assert [one.title for one in score_columns(entries, names=["pearson"])] == ["Pearson's r"] and not score_columns([{}])
    assert [one.title for one in score_columns([{"pair_accuracy": 0.5, "interval": [0.1, 0.2]}])] == ["right pairs (%)", "95 %"]


def test_every_score_has_a_title_of_its_own():
    assert len({one.title for one in SCORES.values()}) == len(SCORES)


def test_results_are_lines_of_one_table():
    everything = {
        "test": {"steps": [1000, 2000], "num_examples": 2210, "nll": 2.34567},
        "file": {"num_examples": 3, "bleu": 1.0},
    }
    assert [line.split() for line in format_scores(everything).splitlines()] == [
        ["result", "step", "examples", "BLEU", "nll", "a", "piece", "(nats)"],
        ["test", "2,000", "2,210", "–", "2.346"],
        ["file", "–", "3", "1.00", "–"],
    ]
    found = format_scores({"test": {"num_examples": 3, "accuracy": 0.5, "accuracy_interval": [0.1, 0.9]}})
    assert found.splitlines()[-1] == ABOUT_INTERVALS and "step" not in found
