"""Charts of scores by length, depth and frequency: every dot is the number of its table."""

import math

import pytest

from treenet.evaluation.buckets import FrequencyBucket, bucket_columns, gather_buckets
from treenet.report.compare import ScoreRow, ScoreTable, _notes, comparable_buckets
from treenet.report.figures import SERIES, save_chart, style
from treenet.report.lines import Frequencies
from treenet.report.score_sections import draw_scores


def entry(first: int, last: int | None, bleu: float) -> dict:
    return {"from": first, "to": last, "num_examples": 1000 + first, "bleu": bleu, "chrf": 2 * bleu}


def make_table() -> ScoreTable:
    """Two runs and a control; the second run has no sentence in the last bucket of words."""
    words = [entry(0, 10, 7.25), entry(11, 20, 8.5), entry(21, None, 3.0)]
    records = {
        ("tree", "test"): {"words": words, "depth": [entry(0, 4, 6.0)]},
        ("plain", "test"): {"words": [entry(0, 10, 5.0), entry(11, 20, 9.0)], "depth": [entry(0, 4, 5.5)]},
        ("tree", "test.untrained"): {"words": [entry(0, 10, 0.5), entry(11, 20, 0.25), entry(21, None, 0.0)]},
    }
    rows = [ScoreRow(run, result, {"buckets": buckets}, {}) for (run, result), buckets in records.items()]
    return ScoreTable("test", "text", ["bleu"], rows)


@pytest.fixture
def charts():
    buckets = (FrequencyBucket(0, 0, 12, [10.0, None]), FrequencyBucket(1000, None, 3456, [50.0, 40.0]))
    with style():
        return dict(
            draw_scores([make_table()], [Frequencies(rows=(0, 1), buckets=buckets)], {"tree": SERIES[0], "plain": SERIES[1]})
        )


def dots(figure) -> dict[str, list[float | None]]:
    """Scores by result, from the top down."""
    (axes,) = figure.axes
    found = {}
    for line in axes.get_lines():
        assert list(line.get_ydata()) == sorted(line.get_ydata(), reverse=True)
        found[line.get_label()] = [None if math.isnan(value) else value for value in line.get_xdata()]
    return found


def rows_of(figure) -> list[str]:
    (axes,) = figure.axes
    return [label.get_text() for label in axes.get_yticklabels()]


def test_every_dot_is_a_number_of_the_table(charts):
    assert list(charts) == ["scores_by_words_1", "scores_by_frequency_1"]  # one bucket of depth: nothing to see
    words = charts["scores_by_words_1"]
    assert rows_of(words) == ["up to 10 (1,000)", "11 to 20 (1,011)", "21 and more (1,021)"]
    expected = {"tree": [7.25, 8.5, 3.0], "plain": [5.0, 9.0, None], "tree (untrained)": [0.5, 0.25, 0.0]}
    assert dots(words) == expected
    frequency = charts["scores_by_frequency_1"]
    assert rows_of(frequency) == ["0 (12)", "1,000 and more (3,456)"]
    assert list(dots(frequency).values()) == [[10.0, 50.0], [None, 40.0]]
    assert words.axes[0].get_xlabel() == "BLEU on test"  # the first metric


def test_runs_on_other_trees_share_no_bucket_of_depth():
    table = make_table()
    for row, trees in zip(table.rows, ("parsed", "shuffled", "parsed"), strict=True):
        row.record["data"] = {"fingerprint": trees, "parsed_fingerprint": "same"}
    assert list(_notes(table, [])) == ["plain, test: no scores by depth; its data set has other sentences in a bucket."]
    found = comparable_buckets(table)
    assert list(found["depth"]) == [0] and list(found["words"]) == [0, 1, 2]
    columns = bucket_columns("words", gather_buckets(list(found["words"].values())), ["tree", "plain", "untrained"])
    assert [one.title for one in columns[:4]] == ["words", "sentences", "tree, BLEU", "tree, chrF"] and len(columns) == 8
    assert list(columns[1].cells) == ["1,000", "1,011", "1,021"] and list(columns[4].cells) == ["5.00", "9.00", "–"]


def test_runs_keep_their_colours_and_controls_are_hollow(charts):
    (axes,) = charts["scores_by_words_1"].axes
    lines = axes.get_lines()
    assert [line.get_color() for line in lines] == [SERIES[0], SERIES[1], SERIES[0]]
    assert [line.get_markerfacecolor() for line in lines] == [SERIES[0], SERIES[1], "#ffffff"]
    assert len({line.get_marker() for line in lines}) == 3  # without colours too


def test_the_chart_is_saved_wide_and_narrow_with_its_labels(charts, tmp_path, rendered):
    with style():
        svg = save_chart(charts["scores_by_words_1"], tmp_path, "scores_by_words_1")
    assert svg.count("<svg") == 2 and svg.count("21 and more (1,021)") == 2 and "<script" not in svg
    assert (tmp_path / "scores_by_words_1.png").stat().st_size > 1000
