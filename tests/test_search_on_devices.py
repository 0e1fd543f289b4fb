"""Beam search as devices beside CPUs run it: over whole grids, and without making the host wait."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from device_waits import Waits
from model_cases import MODEL_CASES, batch_of, tiny_model
from strategies import Tree

from treenet.config import DecodingConfig
from treenet.translation.beam import END_TEST_EVERY
from treenet.translation.caches import Captured, Steps, _is_gpu, choose_steps, has_static_cache
from treenet.translation.hypotheses import best_by_key, best_pieces, known_all_false, normalise
from treenet.translation.search import search_batch
from treenet.translation.translate import Ensemble

SENTENCES = [
    Tree(5, [(0, 5, 3), (0, 2, 2), (3, 5, 3)]),
    Tree(1, [(0, 1, 1)]),
    Tree(3, [(0, 3, 2), (1, 3, 2)]),
]
PIECES = 16  # two tests for the end
DECODING = DecodingConfig(beam_size=3, max_length_factor=1e-6, max_length_offset=PIECES, min_length=PIECES)


@pytest.mark.parametrize("case", [*MODEL_CASES, "ensemble"])
@pytest.mark.parametrize("steps", [Steps.GRID, Steps.STATIC])
def test_whole_grids_are_searched_without_waiting(case, steps):
    """The host waits once every END_TEST_EVERY steps, beside `tolist` of limits and results, which is not counted here."""
    names = ["transformer", "tree_transformer"] if case == "ensemble" else [case]
    models = [tiny_model(name) for name in names]
    model = Ensemble(models) if case == "ensemble" else models[0]
    if steps is Steps.STATIC and not has_static_cache(model):
        pytest.skip("the decoder keeps no keys and values of self-attention")
    batch = batch_of(SENTENCES, model.reads)
    expected = search_batch(model, batch, DECODING, num_best=3)
    with ExitStack() as stack:
        stack.enter_context(patch("treenet.translation.beam.best_pieces", best_by_key))
        stack.enter_context(patch("treenet.translation.hypotheses.known_all_false", lambda mask: False))
        waits = stack.enter_context(Waits())
        found = search_batch(model, batch, DECODING, num_best=3, steps=steps)
    for hypotheses, others in zip(found, expected, strict=True):
        assert [h.ids for h in hypotheses] == [h.ids for h in others]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in others], abs=1e-5)
    assert waits.found == ["is_nonzero"] * ((PIECES + 1) // END_TEST_EVERY)


def test_waits_are_seen():
    """The same count finds the waits of a search that decodes what is live."""
    model = tiny_model("transformer")
    with Waits() as waits:
        search_batch(model, batch_of(SENTENCES), DECODING, steps=Steps.LIVE)
    assert {"nonzero", "equal"} < set(waits.found) and len(waits.found) > 4 * PIECES


def test_values_on_other_devices_are_not_read():
    """A device without data has no values that the host could read."""
    values, pieces = best_pieces(torch.zeros(2, 9, device="meta"), 3)
    assert values.shape == pieces.shape == (2, 3) and values.device.type == "meta"
    assert not known_all_false(torch.zeros(3, dtype=torch.bool, device="meta"))
    assert known_all_false(torch.zeros(3, dtype=torch.bool)) and not known_all_false(torch.tensor([False, True]))
    assert normalise(torch.zeros(2, 9, device="meta", dtype=torch.bfloat16)).dtype == torch.float32
    logits = torch.randn(2, 9)
    expected = logits.log_softmax(1)
    assert normalise(logits) is logits and torch.equal(logits, expected)
    assert not Captured._failed, "no step of this process could not be captured"
    assert _is_gpu(torch.device("cuda", 1)) and not _is_gpu(torch.device("cpu"))


@pytest.mark.parametrize(
    ("case", "found"), [("transformer", ("LIVE", "STATIC", "COMPILED")), ("bilstm", ("LIVE", "GRID", "LIVE"))]
)
def test_steps_follow_from_the_model_and_the_device(case, found):
    model, cpu, gpu = tiny_model(case), torch.device("cpu"), torch.device("cuda")
    assert [choose_steps(model, cpu).name, choose_steps(model, gpu).name, choose_steps(model, cpu, True).name] == [*found]
    assert choose_steps(model, gpu, compiled=True).name == ("COMPILED" if case == "transformer" else "GRID")
    assert [steps.is_static for steps in (Steps.LIVE, Steps.GRID, Steps.STATIC, Steps.COMPILED)] == [False, False, True, True]
