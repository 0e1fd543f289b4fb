"""`model.paired_weights`: models of one seed share each matrix that both have by name, shape and initialiser."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from model_cases import MODEL_CASES, VOCAB
from torch import nn
from toydata import write_toy_data
from toyruns import TINY_RUN

from treenet.config import ClassifierConfig, ModelConfig
from treenet.experiments.scaling_report import FORM
from treenet.experiments.settings import ScalingConfig
from treenet.experiments.study import describe_pairing, make_study
from treenet.models import (
    build_causal_lm,
    build_classifier,
    build_masked_lm,
    build_model,
    build_relatedness,
    names_for,
)
from treenet.models.paired_weights import matrix_draws
from treenet.models.registry import only_shapes
from treeproc.common.settings import load_settings

SIZES = {"d_model": 32, "d_ff": 48, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
OPTIONS = ClassifierConfig(supervision="root")
CLASSIFIERS = {name: {} for name in names_for("classification") if name != "pretrained"}  # its folder gives the weights
TASKS: dict[str, tuple[Callable[[ModelConfig], nn.Module], dict[str, dict]]] = {
    "translation": (lambda config: build_model(config, VOCAB), {name: {} for name in names_for("translation")} | MODEL_CASES),
    "classification": (lambda config: build_classifier(config, VOCAB, OPTIONS, 5), CLASSIFIERS),
    "pairs": (lambda config: build_classifier(config, VOCAB, OPTIONS, 5, pairs=True), CLASSIFIERS),
    "relatedness": (lambda config: build_relatedness(config, VOCAB, OPTIONS), CLASSIFIERS),
    "masked_lm": (lambda config: build_masked_lm(config, VOCAB), {name: {} for name in names_for("masked_lm")}),
    "causal_lm": (lambda config: build_causal_lm(config, VOCAB), {name: {} for name in names_for("causal_lm")}),
}
# Only ConvS2S has other initialisers: its table has a deviation of 0.1, and norms of weights follow the width of the kernel.
OTHER_INITIALISERS = ("embedding.weight", "original0")


def settings_of(case: str, values: dict, **more) -> ModelConfig:
    return ModelConfig(**{"name": case, **SIZES, **values, **more})


def matrices(build: Callable[[ModelConfig], nn.Module], config: ModelConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: one.detach() for name, one in build(config).named_parameters() if one.dim() > 1}


@pytest.mark.parametrize("task", TASKS)
def test_all_pairs_of_models_share_the_matrices_that_both_have(task):
    build, cases = TASKS[task]
    found: dict[tuple, dict[tuple, list]] = {}  # (case, values) by draws, of each name and shape
    for case, values in cases.items():
        config = settings_of(case, values, paired_weights=True)
        with only_shapes():
            draws = matrix_draws(partial(build, config))
        own = matrices(build, config)
        assert own.keys() == draws.keys()
        for name, matrix in own.items():
            found.setdefault((name, matrix.shape), {}).setdefault(draws[name], []).append((config.name, matrix))
    assert any(len(same) == len(cases) for alike in found.values() for same in alike.values()) or task == "translation"
    for (name, _), alike in found.items():
        for same in alike.values():
            assert all(torch.equal(matrix, same[0][1]) for _, matrix in same), name
        if len(alike) > 1:
            others = [one for one, _ in min(alike.values(), key=len)]
            assert set(others) == {"convs2s"} and name.endswith(OTHER_INITIALISERS), (name, others)


@pytest.mark.parametrize("case", ["tree_transformer", "convs2s", "on_lstm_hybrid", "tree2seq", "dynamicconv"])
def test_values_depend_on_seed_and_name_and_keep_their_distribution(case):
    build, cases = TASKS["translation"]
    paired, other, plain = (
        matrices(build, settings_of(case, cases[case], paired_weights=paired), seed)
        for paired, seed in ((True, 5), (True, 6), (False, 5))
    )
    assert paired.keys() == plain.keys()
    for name, matrix in paired.items():
        assert not torch.equal(matrix, plain[name]) and not torch.equal(matrix, other[name]), name
        assert 0.5 < matrix.std() / plain[name].std() < 2 or matrix.numel() < 64, name
    again = [matrix for matrix in paired.values() if matrix.shape == (32, 32)]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(again, 2))


def test_the_generator_is_that_of_the_seed_afterwards():
    states = []
    for case in ("transformer", "tree_transformer"):
        matrices(TASKS["translation"][0], settings_of(case, {}, paired_weights=True))
        states.append(torch.rand(1).item())
    torch.manual_seed(5)
    assert states == [torch.rand(1).item()] * 2


@pytest.mark.slow
def test_a_study_says_how_many_matrices_are_shared(tmp_path):
    models = {"tree": {"model": {"name": "tree_transformer"}}, "plain": {"model": {"name": "transformer"}}}
    models["lstm"] = {"model": {"name": "bilstm"}}
    grid = {"models": models, "baseline": "plain", "seeds": [1], "fractions": [1.0]}
    values = {**TINY_RUN, "model": {**TINY_RUN["model"], "paired_weights": True}}
    config = load_settings(ScalingConfig, None, **values, grid=grid, data=write_toy_data(tmp_path / "data"))
    study = make_study(FORM, config, tmp_path / "study", None)
    found = dict(line.split(": ") for line in describe_pairing(study))
    assert found.keys() == {"tree", "lstm"}
    # The plain one has 12: a table, 4 of its encoder layer and 7 of its decoder layer. The tree's 7 more are those of nodes.
    assert found["tree"] == "12 of 19 matrices are shared with plain (model.paired_weights)"
    assert found["lstm"].startswith("1 of ")
    values["model"]["paired_weights"] = False
    config = load_settings(ScalingConfig, None, **values, grid=grid, data=tmp_path / "data")
    assert not list(describe_pairing(make_study(FORM, config, tmp_path / "study", None)))
