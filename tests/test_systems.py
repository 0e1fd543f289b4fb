"""Every translation model end to end: it trains, resumes to the same weights, averages and translates."""

import pytest
from model_cases import MODEL_CASES
from toydata import write_toy_data
from toyruns import final_weights, make_config, same

from treenet.config import ModelConfig
from treenet.data.splits import read_split
from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.jobs.train_run import run_training
from treenet.models import names_for
from treenet.runs.loading import load_run
from treenet.tasks.base import build_task
from treenet.training.trainer import train
from treenet.translation.translate import translate_examples
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

RELATIONS = {"positions": "both", "structural": {"clip": 3}, "tree_traversal": {"clip": 3}, "label_head": "deprel"}
# Settings of models that need some, or that read more of the data with them.
SETTINGS = {
    "multi_granularity": MODEL_CASES["multi_granularity"]
    | {"phrases": MODEL_CASES["multi_granularity"]["phrases"] | {"tag_loss": 0.1}},
    "on_lstm_hybrid": MODEL_CASES["on_lstm_hybrid"],
    "relation_transformer": {"relations": RELATIONS},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Its trees are binary, so that all models can read it."""
    return write_toy_data(tmp_path_factory.mktemp("systems"), arcs=True)


def test_other_trees_for_a_model_that_reads_none_are_refused(tmp_path, data):
    run_training(make_config(data, "model.name=transformer", "max_steps=2"), tmp_path / "run")
    with pytest.raises(UserError, match="random_trees changes constituency trees, and transformer reads leaves alone"):
        evaluate_run(tmp_path / "run", EvaluateSettings(random_trees=True))


@pytest.mark.parametrize("name", names_for("translation"))
def test_a_run_trains_resumes_averages_and_translates(tmp_path, data, name):
    config = make_config(data, "max_steps=6", "checkpoint_every=3")
    model = ModelConfig(**config.model.model_dump() | {"name": name} | SETTINGS.get(name, {}))
    config = config.model_copy(update={"model": model})
    summary = run_training(config, tmp_path / "whole")
    stop = iter([False] * 3 + [True])
    (tmp_path / "parts").mkdir()
    train(build_task(config), tmp_path / "parts", should_stop=lambda: next(stop))
    train(build_task(config), tmp_path / "parts")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    assert summary.averaged is not None
    run = load_run(tmp_path / "whole")
    found = list(translate_examples(run.model, read_split(data, "encoded", "test"), run.config.decoding))
    assert len(found) == 8 and all(best.score <= 0 for best, *_ in found)
    if name == "tree2seq":
        with pytest.raises(
            UserError,
            match=r"random_trees draws trees that need not be binary.*; leave it out, and give .*tree\.tree_source=random",
        ):
            evaluate_run(tmp_path / "whole", EvaluateSettings(random_trees=True))
