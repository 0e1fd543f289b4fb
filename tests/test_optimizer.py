"""The optimiser: chosen parameters, its groups, the schedule, the scale of losses, the moving average, each by its definition."""

import math

import pytest
import torch
from torch import nn

from treenet.config import ModelConfig, OptimizerConfig, TrainConfig
from treenet.models import VocabSizes, build_model
from treenet.training.optimizer import (
    FACTOR,
    LossScale,
    MovingAverage,
    build_optimizer,
    count_frozen,
    freeze_parameters,
    frozen_names,
    learning_rate,
    rate_factors,
    set_rate,
)
from treeproc.common.settings import UserError

CPU = torch.device("cpu")


class Shared(nn.Module):
    """Eight parameters, one with two names."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"table": nn.Embedding(5, 2), "inner": nn.Linear(2, 3), "norm": nn.LayerNorm(3)})
        self.decoder = nn.ModuleDict({"table": self.encoder["table"], "outer": nn.Linear(3, 2)})
        self.scale = nn.Parameter(torch.ones(()))


def settings(**options: object) -> TrainConfig:
    return TrainConfig(data="x", **options)


# Chosen parameters.


def test_patterns_freeze_the_parameters_that_they_match():
    inner = {"encoder.inner.weight", "encoder.inner.bias"}
    norm, table = {"encoder.norm.weight", "encoder.norm.bias"}, {"encoder.table.weight"}
    for patterns, frozen, values in (
        ([], set(), 0),
        (["scale"], {"scale"}, 1),
        (["encoder.*", "*.bias"], inner | norm | table | {"decoder.outer.bias"}, 27),
        (["encoder.inner.*", "encoder.*.weight"], inner | table | {"encoder.norm.weight"}, 22),
    ):
        model, config = Shared(), settings(freeze=patterns)
        assert frozen_names(config, model) == frozen and count_frozen(config, model) == values
        freeze_parameters(config, model)
        assert {name for name, value in model.named_parameters() if not value.requires_grad} == frozen


def test_all_parameters_but_one_can_be_frozen():
    config = settings(freeze=["encoder.*", "decoder.*"])
    assert len(frozen_names(config, Shared())) == 7
    with pytest.raises(UserError, match="^freeze: the patterns match all parameters"):
        frozen_names(settings(freeze=["encoder.*", "decoder.*", "scale"]), Shared())


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("decoder.table.*", "decoder.table.weight is shared and has the name encoder.table.weight"),
        ("decoder.outr.*", ["decoder.outer", "decoder.outer.bias", "encoder.norm"]),
        ("encoder.inner.wait", ["encoder.inner.weight", "encoder.inner", "encoder.inner.bias"]),
    ],
)
def test_a_pattern_without_a_parameter_is_told_with_the_three_nearest_names(pattern, told):
    for setting, value in (("freeze", [pattern]), ("lr_scale", {pattern: 2.0})):
        with pytest.raises(UserError) as error:
            count_frozen(settings(**{setting: value}), Shared())
        end = f": {told}" if isinstance(told, str) else f"; similar names are {', '.join(told)}"
        assert str(error.value) == f"{setting}: '{pattern}' matches no parameter{end}"


def test_the_first_pattern_that_matches_has_the_factor():
    scales = {"encoder.inner.*": 0.5, "*.bias": 2.0, "encoder.*": 3.0}
    expected = {"encoder.inner.weight": 0.5, "encoder.inner.bias": 0.5, "encoder.norm.bias": 2.0, "decoder.outer.bias": 2.0}
    expected |= {"encoder.table.weight": 3.0, "encoder.norm.weight": 3.0}
    assert rate_factors(settings(lr_scale=scales), Shared()) == expected
    assert rate_factors(settings(lr_scale=scales, freeze=["*.norm.*"]), Shared()) == {
        name: factor for name, factor in expected.items() if "norm" not in name
    }
    for useless in ({"scale": 2.0, "sc*": 3.0}, {"encoder.*": 1.0, "*.inner.*": 3.0}):
        with pytest.raises(UserError, match="^lr_scale: .* changes nothing"):
            rate_factors(settings(lr_scale=useless), Shared())
    with pytest.raises(UserError, match="^lr_scale: 'scale' changes nothing: its parameters are frozen"):
        rate_factors(settings(lr_scale={"scale": 2.0}, freeze=["scale"]), Shared())


# Schedule, groups.


def test_schedule_rises_linearly_and_falls_by_the_square_root():
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=100)
    assert learning_rate(config, 1) == pytest.approx(1e-7 + (1e-3 - 1e-7) / 100)
    assert learning_rate(config, 50) == pytest.approx(0.5 * (1e-3 + 1e-7))
    assert learning_rate(config, 100) == pytest.approx(1e-3)
    assert learning_rate(config, 400) == pytest.approx(5e-4)
    linear = OptimizerConfig(learning_rate=1e-3, warmup_steps=100, decay_steps=500)
    rates = [learning_rate(linear, update) for update in (50, 100, 200, 499, 500)]
    assert rates == pytest.approx([learning_rate(config, 50), 1e-3, 7.5e-4, 2.5e-6, 0])


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    decaying, constant = build_optimizer(model, OptimizerConfig(weight_decay=0.5)).param_groups
    assert (decaying["weight_decay"], [p.ndim for p in decaying["params"]]) == (0.5, [2])
    assert (constant["weight_decay"], [p.ndim for p in constant["params"]]) == (0.0, [1, 1, 1])


@pytest.mark.parametrize("leaf_weights", ["shared", "per_head"])
def test_leaf_weights_and_tables_decay_as_in_the_released_code(leaf_weights):
    model = build_model(ModelConfig(d_model=16, num_heads=2, tree={"leaf_weights": leaf_weights}), VocabSizes(9, labels=4))
    decaying, constant = build_optimizer(model, OptimizerConfig(weight_decay=0.5)).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p].split(".")[-1] for p in decaying["params"]} == {"weight", "leaf_weight", "vertical", "horizontal"}
    assert {names[p].split(".")[-1] for p in constant["params"]} == {"weight", "bias"}
    assert all("norm" in names[p] for p in constant["params"] if names[p].endswith("weight"))
    assert sum("leaf_weight" in names[p] for p in decaying["params"]) == 12  # of six encoder layers, and six decoder layers
    assert len(decaying["params"]) + len(constant["params"]) == len(names)


def test_the_schedule_is_its_formula_at_every_update():
    for peak, warmup, decay in ((1e-3, 1, None), (0.5, 7, None), (2.0, 4, 9), (1e-3, 1, 2)):
        config = OptimizerConfig(learning_rate=peak, warmup_steps=warmup, decay_steps=decay)
        for update in range(1, 12 if decay is None else decay + 1):
            expected = 1e-7 + (peak - 1e-7) * update / warmup
            if update > warmup:
                expected = peak * math.sqrt(warmup / update) if decay is None else peak * (decay - update) / (decay - warmup)
            assert learning_rate(config, update) == pytest.approx(expected, rel=1e-12)


def test_groups_of_factors_partition_the_parameters():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    optimizer = build_optimizer(model, TrainConfig(data="x").optimizer, {"b.weight": 0.5, "c.bias": 0.5, "c.weight": 1.0})
    assert [(group.get(FACTOR), len(group["params"]), group["weight_decay"] > 0) for group in optimizer.param_groups] == [
        (None, 2, True),
        (None, 2, False),
        (0.5, 1, True),
        (0.5, 1, False),
    ]


def test_a_group_has_the_rate_of_the_schedule_times_its_factor():
    model = Shared()
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=0.5), {"scale": 0.0, "encoder.inner.weight": 3.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5] * 4
    set_rate(optimizer, 0.25)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == {"scale": 0.0, "encoder.inner.weight": 0.75}.get(name, 0.25)


def test_parameters_without_gradients_are_left_out_and_only_matrices_decay():
    model = nn.ParameterDict({f"of_{ndim}": nn.Parameter(torch.zeros([2] * ndim)) for ndim in range(4)})
    model["of_3"].requires_grad_(False)
    config = OptimizerConfig(weight_decay=0.5, adam_betas=(0.8, 0.9), adam_eps=1e-3, learning_rate=0.1)
    decaying, constant = build_optimizer(model, config).param_groups
    assert [p.ndim for p in decaying["params"]] == [2] and [p.ndim for p in constant["params"]] == [0, 1]
    for group, decay in ((decaying, 0.5), (constant, 0.0)):
        assert (group["weight_decay"], group["betas"], group["eps"], group["lr"]) == (decay, (0.8, 0.9), 1e-3, 0.1)


def test_the_optimiser_reads_what_to_skip_and_what_to_divide_by_on_the_device():
    weights = []
    for divisor, skip in ((None, None), (4.0, 0.0), (1.0, 1.0)):
        parameter = nn.Parameter(torch.ones(2, 2))
        optimizer = build_optimizer(nn.ParameterList([parameter]), OptimizerConfig(adam_eps=0.1))
        parameter.grad = torch.full((2, 2), 3.0 * (divisor or 1))
        optimizer.found_inf = None if skip is None else torch.tensor(skip)
        optimizer.grad_scale = None if divisor is None else torch.tensor(divisor)
        optimizer.step()
        weights.append(parameter.detach())
    torch.testing.assert_close(weights[1], weights[0])
    assert (weights[0] < 1).all() and (weights[2] == 1).all()


# The scale of losses.


def test_the_scale_doubles_after_2000_updates_and_halves_at_each_skip():
    scale, kept, skipped = LossScale(CPU), torch.zeros(()), torch.ones(())
    assert scale.state() == (65536.0, 0)
    for state, skip, expected in (
        ((65536.0, 0), kept, (65536.0, 1)),
        ((8.0, 1998), kept, (8.0, 1999)),
        ((8.0, 1999), kept, (16.0, 0)),
        ((8.0, 1999), skipped, (4.0, 0)),
        ((8.0, 3), skipped, (4.0, 0)),
    ):
        scale.load(state)
        assert scale.state() == state
        scale.update(skip)
        assert scale.state() == expected


# The moving average.


def test_moving_average_follows_its_definition():
    model = nn.Linear(2, 2)
    average = MovingAverage(model, 0.7)
    expected = model.weight.detach().clone()
    for updates in range(1, 40):
        with torch.no_grad():
            model.weight.normal_()
        average.update(updates)
        decay = min(0.7, (1 + updates) / (10 + updates))
        expected = decay * expected + (1 - decay) * model.weight.detach()
        torch.testing.assert_close(average.weights["weight"], expected)
    before = model.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight.detach(), before)
    torch.testing.assert_close(average.weights["weight"], expected)


def average_of(model: nn.Module, decay: float = 0.999) -> tuple[MovingAverage, dict[str, torch.Tensor]]:
    return MovingAverage(model, decay), {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_the_first_averages_forget_the_initial_weights(skip):
    """d is 2 / 11 after the first update and 3 / 12 after the second. Updates that are skipped change nothing."""
    model = Shared()
    average, expected = average_of(model)
    for updates, decay in ((1, 2 / 11), (2, 3 / 12), (3, 4 / 13), (8990, 8991 / 9000), (8992, 0.999), (10**6, 0.999)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        average.update(updates, None if skip is None else torch.tensor(skip))
        for name, parameter in model.named_parameters():
            if skip != 1:
                expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
            torch.testing.assert_close(average.weights[name], expected[name], rtol=1e-5, atol=1e-6)
    assert not any(value.requires_grad for value in average.weights.values())


def test_an_average_begins_anew_and_changes_places_with_the_weights():
    model = Shared()
    model.encoder["inner"].weight.requires_grad_(False)
    average, first = average_of(model)
    assert average.weights.keys() == first.keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    frozen = "encoder.inner.weight"
    assert torch.equal(average.weights[frozen], first[frozen] + 1)  # it is its own average
    with pytest.raises(KeyError), average.in_place():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, first[name] + (name == frozen))
        raise KeyError
    assert all(torch.equal(parameter, first[name] + 1) for name, parameter in model.named_parameters())
    assert all(torch.equal(value, first[name] + (name == frozen)) for name, value in average.weights.items())
    average.restart()
    assert all(torch.equal(value, first[name] + 1) for name, value in average.weights.items())
    assert not any(value.requires_grad for value in average.weights.values())
