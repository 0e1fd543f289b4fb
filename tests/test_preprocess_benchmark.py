"""The parsing benchmark needs nothing but the shipped sample, and prints a JSON line a figure."""

import json
import subprocess
import sys


def test_quick_is_of_the_shipped_sample_and_prints_json_alone(repository):
    command = [sys.executable, "benchmarks/preprocess.py", "--quick", "--sentences", "20", "--plain", "2"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, timeout=280)
    assert run.returncode == 0, run.stderr
    figures = {line["metric"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert {(line["benchmark"], line["case"]) for line in figures.values()} == {("preprocess", "parse_sample")}
    assert figures["sentences_per_cpu_second"]["lines"] == 20 and figures["different_trees"]["value"] == 0
    assert {"ratio_to_plain", "ratio_to_bulk", "plain_differs"} < figures.keys()
