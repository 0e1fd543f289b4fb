"""Every translation model goes the whole way: it trains, resumes to the same weights, averages and translates."""

import pytest
from model_cases import CASES
from toydata import write_toy_data
from toyruns import final_weights, make_config, same

from treenet.inference.run import load_run
from treenet.inference.translate import read_split, translate_examples
from treenet.models import MODELS
from treenet.training.loop import train
from treenet.training.run import run_training

# Settings beside those of the model's case: one case a model, of those that need most of the data.
SETTINGS = {name: CASES.get(name, {}) for name in MODELS} | {
    "relation_transformer": {
        "relations": {
            "positions": "both",
            "structural": {"clip": 3},
            "tree_traversal": {"clip": 3},
            "label_head": "deprel",
        }  # fmt: skip
    },
    "multi_granularity": CASES["multi_granularity"] | {"phrases": CASES["multi_granularity"]["phrases"] | {"tag_loss": 0.1}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Its trees are binary, so that all models can read it."""
    return write_toy_data(tmp_path_factory.mktemp("systems"), arcs=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_trains_resumes_averages_and_translates(tmp_path, data, name):
    config = make_config(data, f"model.name={name}")
    config = config.model_copy(
        update={"model": type(config.model)(**config.model.model_dump() | {"name": name} | SETTINGS[name])}
    )
    summary = run_training(config, tmp_path / "whole")
    stop = iter([False] * 7 + [True])
    (tmp_path / "parts").mkdir()
    train(config, tmp_path / "parts", should_stop=lambda: next(stop))
    train(config, tmp_path / "parts")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    assert summary.averaged is not None
    run = load_run(tmp_path / "whole")
    found = list(translate_examples(run.model, read_split(data, "encoded", "test"), run.config.decoding))
    assert len(found) == 8 and all(best.score <= 0 for best, *_ in found)
