"""Steps over a static cache by the real Inductor: the same translations, few graphs, no copy of the cache."""

import pytest
import torch
from model_cases import batch_of
from test_static_search import DECODING, LINES, SENTENCES, model_of, same
from torch._dynamo.utils import counters

from treenet.models.compiling import what_is_missing
from treenet.models.decoders import transformer
from treenet.translation.caches import Steps
from treenet.translation.line_constraints import BatchConstraints
from treenet.translation.search import compiled_steps, search_batch

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(what_is_missing(CPU) is not None, reason="torch.compile has no C++ compiler here"),
    pytest.mark.timeout(900),
]


def test_compiled_steps_find_the_same_with_few_graphs(monkeypatch):
    """With batches of several sizes and three capacities, with and without constraints.

    One graph is of the step, one of the choice of pieces. The plain model's step is a part of the tree model's.
    """
    monkeypatch.setattr(transformer, "FIRST_CAPACITY", 4)
    compiled_steps.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    model = model_of("tree_transformer", num_encoder_layers=1, num_decoder_layers=1)
    for trees, lines in ((SENTENCES, None), (SENTENCES[1:3], None), (SENTENCES, LINES)):
        batch = batch_of(trees, model.reads)
        constraints = BatchConstraints(lines, None, CPU) if lines else None
        options = {"num_best": 3, "constraints": constraints}
        expected = search_batch(model, batch, DECODING, **options, steps=Steps.LIVE)
        same(search_batch(model, batch, DECODING, **options, steps=Steps.COMPILED), expected)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
