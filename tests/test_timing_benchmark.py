"""The timing benchmark: its lines have the words asked for, its trees are binary, its models learn, and it prints figures."""

import json
from types import SimpleNamespace

import pytest
import timing
import torch

from treenet.models import VocabSizes
from treeproc.parsers import ParserConfig, build_parser
from treeproc.shards.schema import EOS_ID

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reader():
    return timing.Reader(build_parser(ParserConfig(name="shipped", device="cpu")), {}, {})


@pytest.fixture(scope="module")
def rows(reader):
    lines = list(timing.long_lines(reader.parser, 17, 5))
    assert len(set(lines)) == 5
    return reader.read(lines)


def test_lines_have_so_many_words_and_trees_are_binary(rows, reader):
    for row in rows:
        assert len(row.pieces[0]) == 17
        spans = list(zip(row.starts[0].tolist(), row.ends[0].tolist(), row.subtree_ends[0].tolist(), strict=True))
        assert spans[0] == (0, 17, len(spans)) and len(spans) >= 16
        for node, (start, end, subtree_end) in enumerate(spans):
            children, child, covered = 0, node + 1, 0
            while child < subtree_end:
                children, covered, child = children + 1, covered + spans[child][1] - spans[child][0], spans[child][2]
            assert children + (end - start - covered) == (1 if end - start == 1 else 2)
    assert max(row.pieces[0].max() for row in rows) == EOS_ID + len(reader.pieces)


@pytest.mark.parametrize("name", timing.MODELS)
def test_a_model_learns_the_labels_of_its_lines(name, rows, reader):
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = timing.build(name, VocabSizes(EOS_ID + 1 + len(reader.pieces), 1 + len(reader.labels))).train()
    step = timing.train_step(model, rows, device)

    def loss() -> float:
        with torch.no_grad():
            logits = torch.cat([model.eval()(timing.collated(model, row, device)).examples for row in rows])
        return torch.nn.functional.cross_entropy(logits, torch.arange(5)).item()

    before = loss()
    model.train()
    for _ in range(100):
        step()
    assert loss() < before - 0.05


def test_figures_of_one_length(reader, capsys, tmp_path):
    options = SimpleNamespace(device="cpu", sentences=2, updates=4, rounds=2)
    found = timing.measure_length(reader, 9, options)
    printed = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert all(line["benchmark"] == "timing" and line["case"] == "n9" and line["value"] > 0 for line in printed.values())
    assert printed.keys() == found.keys() and found["leaves"] == 9
    for name in timing.MODELS:
        assert (f"{name}_infer_with_parser_ms" in found) == (name != "transformer")
    assert found["tree_transformer_infer_with_parser_ms"] == found["tree_transformer_infer_ms"] + found["parser_ms"]
    timing.plot({9: found, 18: found}, tmp_path / "new" / "timing.png")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"timing.png", "timing.svg"}
