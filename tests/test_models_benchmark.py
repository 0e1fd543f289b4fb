"""The benchmark of all models: every registered one has a row, at the same size, and a line a figure."""

import json
from types import SimpleNamespace

import models
import numpy as np
import pytest

from treenet.config import ModelConfig
from treenet.models import names_for

pytestmark = pytest.mark.slow

TINY = {"d_model": 64, "d_ff": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
SIZE = models.Size(TINY, pieces=40, sentences=3, searched=2)
OPTIONS = SimpleNamespace(device="cpu", dtype="float32", rounds=2)


def test_rows_are_the_registry_and_the_configurations():
    rows = models.all_models()
    assert next(iter(rows)) == "transformer" and {settings["name"] for settings in rows.values()} == set(names_for("translation"))
    assert rows["lightconv"]["convolution"]["gated"] is False and rows["tree_transformer"]["name"] == "tree_transformer"
    base = ModelConfig()
    for settings in rows.values():
        config = ModelConfig(**{**settings, **models.BASE})
        assert all(getattr(config, name) == getattr(base, name) for name in models.BASE)


@pytest.mark.parametrize("binary", [False, True])
def test_examples_are_captions(binary):
    for index in range(20):
        row = models.random_example(index, 30, binary)
        leaves, nodes = len(row["leaves"]["piece"]), len(row["nodes"]["label"])
        assert 4 <= leaves <= 40 and nodes == (leaves - 1 if binary else round(0.7 * leaves))
        assert row["spans"]["end"][0] == leaves and row["nodes"]["parent"][0] == -1
        governors = row["arcs"]["governor"]
        assert (governors == -1).sum() == 1
        above = np.arange(leaves)
        for _ in range(leaves):  # every word ends at the root
            above = np.where(above >= 0, governors[above], -1)
        assert (above == -1).all()
    other = models.random_example(19, 30, not binary)  # the same sentence under a tree of the other kind
    assert np.array_equal(other["arcs"]["governor"], governors) and len(other["nodes"]["label"]) != nodes


@pytest.mark.cluster
def test_one_json_line_per_figure_of_every_model(capsys, tmp_path):
    rows = models.all_models()
    plain = models.Alternative.build(rows["transformer"], SIZE, OPTIONS)
    figures = {}
    for name, settings in rows.items():
        model = models.Alternative.build(settings, SIZE, OPTIONS)
        figures[name] = models.measure_model(name, model, plain, SIZE, OPTIONS)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["benchmark"] == "models" and line["value"] > 0 for line in lines)
    assert [(line["case"], line["metric"]) for line in lines] == [(name, metric) for name in rows for metric in models.METRICS]
    assert lines[0]["to_plain"] == 1 and figures["transformer"]["parameters"] == plain.parameters
    models.write_table(tmp_path / "new" / "models.md", figures)
    table = (tmp_path / "new" / "models.md").read_text().splitlines()
    assert len(table) == 2 + len(rows) and table[2].startswith("| transformer | 0.1 M | ")
