"""The parsing benchmark needs nothing but the shipped sample, and prints a JSON line a figure."""

import json
import sys

import preprocess
import preprocess_formats
import pytest
from text_steps import Step, two_to_one

pytestmark = pytest.mark.slow


@pytest.mark.cluster
def test_quick_is_of_the_shipped_sample_and_prints_json_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["preprocess.py", "--quick", "--sentences", "20", "--plain", "2"])
    preprocess.main()
    figures = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {(line["benchmark"], line["case"]) for line in figures.values()} == {("preprocess", "parse_sample")}
    assert figures["sentences_per_cpu_second"]["lines"] == 20 and figures["different_trees"]["value"] == 0
    assert {"ratio_to_plain", "ratio_to_bulk", "plain_differs"} < figures.keys()


def test_every_format_is_measured_and_those_that_can_be_cut_in_tasks_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["preprocess_formats.py", "--examples", "30"])
    preprocess_formats.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    in_tasks = {line["case"] for line in lines if line["metric"] == "tasks_microseconds"}
    assert in_tasks == {"parallel", "brackets", "sst", "conllu", "agreement"} and all(line["value"] > 0 for line in lines)
    assert {line["case"] for line in lines} - in_tasks == {"linzen", "sick", "sgm", "iwslt_xml", "imdb"}


def test_the_gain_of_a_second_core_counts_the_serial_share_and_the_longest_task():
    assert two_to_one([Step("Check", 4, [1.0] * 4)], driver_s=0.0) == 2
    assert two_to_one([Step("Check", 4, [1.0] * 4)], driver_s=2.0) == 6 / 4  # two seconds outside of steps
    assert two_to_one([Step("Check", 4, [1.0] * 4, driver_s=1.0)], driver_s=1.0) == 4 / 2.5  # the driver shares the cores
    assert two_to_one([Step("Gather", 2, [3.0, 1.0])], driver_s=0.0) == 4 / 3
