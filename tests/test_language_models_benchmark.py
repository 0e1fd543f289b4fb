"""The benchmark of causal language models, and the minimal pairs of agreement."""

import agreement_pairs
import language_models
import models
import numpy as np
import pytest

from treeproc.trees.spans import read_brackets

TINY = {"d_model": 32, "d_ff": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}


def test_all_models_learn_from_the_same_sentences():
    size = models.Size(TINY, pieces=40, sentences=3, searched=2)
    parameters = {}
    for case in language_models.CASES:
        parameters[case], update = language_models.build(case, size)
        update()
    assert parameters["plain"] == parameters["tree_reg"] < parameters["grammar"]


@pytest.mark.parametrize("kind", agreement_pairs.KINDS)
def test_a_pair_differs_in_its_verb_alone(kind):
    found = list(agreement_pairs.pairs(kind))
    assert len(found) == len(set(found)) == {"pronoun": 20, "simple": 48}.get(kind, 144)
    for pair in found:
        (right, _, tree), (wrong, _, other) = map(read_brackets, pair)
        assert tree == other and len(right) == len(wrong)
        (place,) = np.flatnonzero([a != b for a, b in zip(right, wrong, strict=True)])
        assert right[place] in ("is", "was", "has", "are", "were", "have")
        plural = right[0] in ("We", "They") if kind == "pronoun" else right[1].endswith("s") or right[1] == "men"
        assert (right[place] in ("are", "were", "have")) == plural
        attractors = {word for word in right[2:place] if word in {form for noun in agreement_pairs.OBJECTS for form in noun}}
        assert all(word.endswith("s") != plural for word in attractors) and bool(attractors) == (kind in ("phrase", "clause"))
