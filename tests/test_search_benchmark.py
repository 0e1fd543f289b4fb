"""The search benchmark: a search without a cache finds the same, its output is a line a figure."""

import json

import numpy as np
import pytest
import search
import torch

from treenet.config import DecodingConfig, ModelConfig
from treenet.models import VocabSizes, build_model
from treenet.translation.search import search_batch

TINY = ModelConfig(name="transformer", d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2)


def test_a_search_without_a_cache_finds_the_same():
    torch.manual_seed(0)
    model = build_model(TINY, VocabSizes(30, search.NUM_LABELS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model = model.double()
    batch = search.random_sentences(4, 30, np.random.default_rng(0))
    decoding = DecodingConfig(beam_size=3, max_length_factor=0.3)
    cached, uncached = (search_batch(m, batch, decoding, num_best=3) for m in (model, search.Uncached(model)))
    assert [[h.ids for h in nbest] for nbest in cached] == [[h.ids for h in nbest] for nbest in uncached]
    for one, other in zip(cached, uncached, strict=True):
        assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-6)


def test_one_json_line_per_figure(capsys, monkeypatch):
    monkeypatch.setitem(search.CASES, "tiny", search.SearchCase(TINY, 40))
    monkeypatch.setattr(search, "TARGET_PIECES", 3)
    search.measure_case("tiny", sentences=2, rounds=2, device=torch.device("cpu"))
    figures = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert all(line["benchmark"] == "search" and line["case"] == "tiny" and line["value"] > 0 for line in figures.values())
    assert {"cached_to_uncached", "tree_to_plain", "grid_to_static", "pieces_per_s"} <= figures.keys()
