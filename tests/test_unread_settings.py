"""Settings without effect are told, and no others.

Each setting of each model is changed. Shapes of the weights, losses and outputs in training mode say whether it has an effect.
"""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from toydata import write_toy_data
from toylabels import make_rows, write_labelled
from toyruns import make_config

from treenet.config import ModelConfig, TrainConfig
from treenet.config.unread import unread_settings
from treenet.jobs.train_job import check_job
from treenet.layers.core import share_dropout_keys
from treenet.models import names_for
from treenet.tasks.base import build_task
from treeproc.common.setting_facts import SettingFacts, list_settings
from treeproc.common.settings import UserError
from treeproc.shards.store import read_index

pytestmark = pytest.mark.slow

SIZES = {"d_model": 32, "d_ff": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "attention_dropout": 0.1}
# Models in which settings lose or get their effect by another one.
VARIANTS = {
    "translation": {
        "scores": {"name": "tree_transformer", "tree": {"accumulate_on": "scores"}},
        "no_hierarchical_embeddings": {"name": "tree_transformer", "tree": {"hierarchical_embeddings": False}},
        "does_not_attend": {"name": "bilstm", "recurrent": {"attend": False}},
        "pieces_alone": {"name": "tree2seq", "recurrent": {"leaf_lstm": False}},
        "hybrid_of_lstm": {"name": "on_lstm_hybrid", "hybrid": {"cell": "lstm"}},
        "phrases_of_lstm": {"name": "multi_granularity", "num_heads": 8, "phrases": {"interaction": "lstm"}},
    },
    "classification": {"relations": {"name": "relation_transformer", "relations": {"tree_distance": {"clip": 1}}}},
    "masked_lm": {},
    "causal_lm": {"tree_reg": {"name": "causal_transformer", "tree_reg": {"weight": 0.5}}},
}
NEEDED = {"multi_granularity": {"num_heads": 8, "phrases": {"chunk_size": 2}}, "on_lstm_hybrid": {"num_encoder_layers": 3}}
OTHER = {
    "d_model": 48, "d_ff": 16, "num_encoder_layers": 4, "num_decoder_layers": 1, "dropout": 0.3, "attention_dropout": 0.5,
    "relations.sequence.clip": 1, "phrases.chunk_size": 1, "hybrid.chunk_size": 4, "phrases.ngrams": (5,),
    "num_heads": 1,
}  # fmt: skip
# The seed of models with `paired_weights` gives other weights; shapes and losses say nothing of it.
NOT_COMPARED = ("name", "paired_weights", "pretrained.folder")
RELATIONS = {"name": "relation_transformer"}
NO_SEQUENCE = {"decoder": False, "positions": "sequence", "sequence": {"clip": 0}}  # refused with another decoder
CASES = {f"{use}-{name}": (use, {"name": name}) for use in VARIANTS for name in names_for(use) if name != "pretrained"}
CASES |= {f"{use}-{case}": (use, values) for use, variants in VARIANTS.items() for case, values in variants.items()}


@pytest.fixture(scope="module")
def data_of(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    toy = write_toy_data(folder / "pairs", arcs=True)
    labelled = write_labelled(folder / "labels", {"train": make_rows(12), "valid": make_rows(4)})
    return {"translation": toy, "masked_lm": toy, "causal_lm": toy, "classification": labelled}


def merge(values: dict, key: str, value: Any) -> dict:
    """`values` with the value of a dotted key."""
    name, _, rest = key.partition(".")
    return {**values, name: merge(values.get(name, {}), rest, value) if rest else value}


def values_of(setting: SettingFacts) -> list[Any]:
    """Values besides the default."""
    if setting.name in OTHER:
        return [OTHER[setting.name]]
    if setting.annotation is bool:
        return [not setting.default]
    choices = get_args(setting.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return [choice for choice in choices if choice != setting.default]
    if isinstance(setting.default, tuple):
        return [setting.default[:1]]
    return [0.4] if isinstance(setting.default, float) else [1, 2] if setting.default is None else [setting.default + 1]


def outcome(config: TrainConfig) -> tuple[dict[str, torch.Size], list[torch.Tensor]]:
    """Shapes of the weights, and loss and output of a batch of training, with dropout."""
    task = build_task(config)
    torch.manual_seed(0)
    model = task.build_model(task.sizes(read_index(config.data / "encoded"))).train()
    batch = task.choose_targets(task.open("train", training=True).batch(range(4)), 1)
    share_dropout_keys(model).set(np.arange(4, dtype=np.uint64))
    torch.manual_seed(1)
    output = getattr(model, task.output)(batch)
    sums = task.sum_losses(model, batch, output, counted=task.counted_targets(batch))
    parts = [*sums, *(output if isinstance(output, tuple) else (output,))]
    return {name: value.shape for name, value in model.state_dict().items()}, [x for x in parts if x is not None]


def are_same(left: tuple, right: tuple) -> bool:
    return left[0] == right[0] and all(torch.equal(x, y) for x, y in zip(left[1], right[1], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_setting_is_told_exactly_if_it_has_no_effect(data_of, case):
    (use, own), wrong = CASES[case], []
    base = SIZES | NEEDED.get(own["name"], {}) | own

    def of(model: dict) -> TrainConfig:
        values = {"data": data_of[use], "task": use, "model": model, "classifier": {"supervision": "root"}}
        return TrainConfig.model_validate(values)

    config = of(base)
    before, read = outcome(config), config.model.model_dump()
    for setting in list_settings(ModelConfig):
        section, *inside = setting.name.split(".")
        if setting.name in NOT_COMPARED or (inside and section not in read):
            continue
        same, told = [], set()
        for value in values_of(setting):
            try:
                config = of(merge(base, setting.name, value))
                if config == of(base):
                    continue
                same.append(are_same(before, outcome(config)))
            except UserError:  # refused
                continue
            told |= set(unread_settings(config.model, translates=use == "translation"))
        if same and all(same) != (setting.name in told):
            wrong.append(f"{setting.name}: {'not ' * (setting.name not in told)}told")
    assert wrong == []


@pytest.mark.parametrize(
    ("use", "settings", "told"),
    [
        ("classification", {"model": {"name": "pretrained", "num_encoder_layers": 1}}, "model.num_encoder_layers"),
        ("classification", {"decoding": {"beam_size": 1}, "masked_lm": {"rate": 0.2}}, "masked_lm, decoding"),
        ("classification", {"classifier": {"pair_hidden": 4}}, "classifier.pair_hidden"),
        ("classification", {"classifier": {"supervision": "root", "split_words": "node"}}, "classifier.split_words"),
        ("classification", {"classifier": {"split_words": "node"}}, None),
        ("classification", {"model": {"name": "bilstm"}, "classifier": {"split_words": "node"}}, "classifier.split_words"),
        ("translation", {"classifier": {"word_dropout": 0.1}, "decoding": {"beam_size": 1}}, "classifier"),
        (
            "translation",
            {"model": {"name": "bilstm", "tree": {"nodes": "labels_and_leaves"}, "d_ff": 8}},
            "model.tree, model.d_ff",
        ),
        ("classification", {"model": {"name": "bilstm", "num_heads": 4}}, "model.num_heads"),
        ("classification", {"model": {"name": "bilstm", "d_model": 150, "num_heads": 5}}, None),  # d_model is refused without it
        ("classification", {"model": {**RELATIONS, "relations": {"decoder": False}}}, "model.relations.decoder"),
        ("classification", {"model": {**RELATIONS, "relations": NO_SEQUENCE}}, None),
        ("causal_lm", {"model": {"name": "causal_transformer", "num_decoder_layers": 1}}, "model.num_decoder_layers"),
        ("translation", {}, None),
    ],
    ids=str,
)
def test_a_run_tells_its_settings_without_effect_in_one_line(data_of, use, settings, told):
    if settings.get("model", {}).get("name") == "pretrained":
        settings["model"]["pretrained"] = {"folder": data_of[use]}
    config = TrainConfig.model_validate({"data": data_of[use], "task": use, **settings})
    name, lines = config.model.name, build_task(config).notes(read_index(data_of[use] / "encoded"))
    assert lines == ([f"{told}: set, but task = {use} with model.name = {name} does not read this"] if told else [])


def test_patience_needs_a_validation_split(tmp_path):
    data, task = write_labelled(tmp_path / "data", {"train": make_rows(4)}), ("task=classification", "workers=0")
    with pytest.raises(UserError, match="patience needs validations, but .*data has no split valid; .* set patience=0"):
        check_job(make_config(data, *task, "patience=2"))
    check_job(make_config(data, *task, "patience=0"))
