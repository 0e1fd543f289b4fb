"""Every shipped configuration is one that its workflow takes, and survives a round trip through YAML."""

from pathlib import Path

import pytest

from treenet.config import ArchitectureSection, ModelConfig, TrainConfig
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.settings import ScalingConfig
from treenet.extras.tuning.trials import TuningConfig
from treenet.models import ARCHITECTURES
from treeproc.common.settings import UserError, dump_settings, load_settings, read_yaml
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.stages.preprocess import PreprocessConfig, sample_splits

FOLDER = Path(__file__).resolve().parent.parent / "workflows" / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configuration_loads(path, tmp_path):
    if path.stem.endswith("_data"):
        values = {} if "splits" in read_yaml(path.read_text(), path.name) else {"splits": sample_splits()}
        config = load_settings(PreprocessConfig, path, **values)
    elif path.stem.startswith("parser_"):
        config = load_settings(TrainParserConfig, path)
    else:
        cls = {"scaling": ScalingConfig, "seeds": SeedsConfig, "tune": TuningConfig}.get(path.stem.partition("_")[0], TrainConfig)
        config = load_settings(cls, path, ["data=somewhere"])
    (tmp_path / "again.yaml").write_text(dump_settings(config))
    assert load_settings(type(config), tmp_path / "again.yaml") == config


# Updates, tokens an update, learning rate, dropout, d_model, d_ff, length penalty: section 5.1 and appendix 7.4 of the paper.
# The paper gives no learning rate, dropout, d_ff and length penalty for the big model: those are the base model's and the
# released code's.
PAPER = {
    "iwslt14_en_de": (60_000, 4_096, 5e-4, 0.3, 512, 1024, 1.0),
    "iwslt14_de_en": (60_000, 4_096, 5e-4, 0.3, 512, 1024, 1.0),
    "iwslt13_en_fr": (60_000, 4_096, 5e-4, 0.3, 512, 1024, 0.7),
    "iwslt13_fr_en": (60_000, 4_096, 5e-4, 0.3, 512, 1024, 0.7),
    "wmt14_en_de_base": (200_000, 32_768, 7e-4, 0.1, 512, 2048, 0.6),
    "wmt14_en_de_big": (20_000, 524_288, 7e-4, 0.1, 1024, 4096, 0.6),
    "wmt14_en_de_data_size": (100_000, 32_768, 7e-4, 0.1, 512, 2048, 0.6),
}


@pytest.mark.parametrize("name", PAPER)
def test_translation_settings_are_those_of_the_paper(name):
    config = load_settings(TrainConfig, CONFIGS[0].with_name(f"{name}.yaml"), ["data=somewhere"])
    model, optimizer = config.model, config.optimizer
    assert PAPER[name] == (
        config.max_steps,
        config.batch.max_tokens,
        optimizer.learning_rate,
        model.dropout,
        model.d_model,
        model.d_ff,
        config.decoding.length_penalty,
    )
    assert (optimizer.warmup_steps, optimizer.weight_decay, config.decoding.beam_size) == (4000, 1e-4, 5)
    assert (config.average, config.average_checkpoints) == ("last", 5)
    assert (model.tree.vertical_rows, model.tree.horizontal_rows) == (100, 100)
    assert (model.num_encoder_layers, model.num_decoder_layers, model.attention_dropout) == (6, 6, 0.2)
    assert model.tree.accumulation_rule == "paper"


def test_every_translation_experiment_has_its_data_set():
    data = {path.stem.removesuffix("_data") for path in CONFIGS if path.stem.endswith("_data")}
    assert all(any(name.startswith(task) for task in data) for name in PAPER)


# Peak rate, warm-up, dropout: appendix 7.4. The sizes and the budget are the same for all.
PAPER_CLASSIFIERS = {
    "sst5": (7e-4, 8000, 0.5),
    "sst2": (7e-4, 8000, 0.5),
    "imdb": (0.01, 20, 0.2),
    "agreement": (0.01, 20, 0.2),
}


@pytest.mark.parametrize("name", PAPER_CLASSIFIERS)
def test_classification_settings_are_those_of_the_paper(name):
    config = load_settings(TrainConfig, CONFIGS[0].with_name(f"{name}.yaml"), ["data=somewhere"])
    model, optimizer = config.model, config.optimizer
    assert PAPER_CLASSIFIERS[name] == (optimizer.learning_rate, optimizer.warmup_steps, model.dropout)
    assert (model.d_model, model.d_ff, model.num_heads, model.num_encoder_layers) == (64, 128, 4, 2)
    assert (config.task, config.max_steps, config.batch.max_tokens) == ("classification", 15_000, 2048)
    assert (config.average, config.average_checkpoints) == ("best", 1)
    assert config.classifier.neutral_class == (2 if name == "sst5" else None)
    assert CONFIGS[0].with_name(f"{name}_data.yaml").exists()


@pytest.mark.parametrize("name", ["seeds_sst5", "seeds_sst2", "seeds_sst5_controls", "seeds_sst5_split_words"])
def test_comparisons_have_one_budget_and_the_models_of_the_paper(name):
    """Chosen on valid: rate, word dropout, updates; all else is sst5.yaml's."""
    config = load_settings(SeedsConfig, CONFIGS[0].with_name(f"{name}.yaml"), ["data=somewhere"])
    paper = load_settings(TrainConfig, CONFIGS[0].with_name("sst5.yaml"), ["data=somewhere"])
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps, config.max_steps) == (1.4e-3, 2000, 5000)
    assert config.classifier.word_dropout == 0.1 and optimizer.label_smoothing == 0
    assert config.model == paper.model
    assert config.batch == paper.batch
    same = ("task", "validate_every", "checkpoint_every", "average", "average_checkpoints", "keep_checkpoints")
    assert all(getattr(config, key) == getattr(paper, key) for key in same)
    assert config.classifier.neutral_class == (None if name == "seeds_sst2" else 2)


@pytest.mark.parametrize("name", ["agreement", "imdb"])
def test_comparisons_of_the_other_tasks_have_the_settings_of_the_single_run(name):
    comparison = load_settings(SeedsConfig, CONFIGS[0].with_name(f"seeds_{name}.yaml"), ["data=somewhere"])
    single = load_settings(TrainConfig, CONFIGS[0].with_name(f"{name}.yaml"), ["data=somewhere"])
    assert all(getattr(comparison, field) == getattr(single, field) for field in TrainConfig.model_fields)
    names = {system["model"]["name"] for system in comparison.grid.systems.values()}
    assert names >= {"tree_transformer", "transformer", "bilstm"}


def test_null_takes_a_system_of_the_file_away():
    file, shared = CONFIGS[0].with_name("seeds_sst5_pretrained.yaml"), ["data=somewhere"]
    whole = load_settings(SeedsConfig, file, shared).grid.systems
    fewer = load_settings(SeedsConfig, file, [*shared, "grid.systems.child_sum=null"]).grid.systems
    assert fewer == {name: system for name, system in whole.items() if name != "child_sum"} != whole
    with pytest.raises(UserError, match="baseline must be one of tree_shuffled, .*, but is tree"):
        load_settings(SeedsConfig, file, [*shared, "grid.systems.tree=null"])
    file = CONFIGS[0].with_name("scaling_multi30k.yaml")
    assert "shuffled" in load_settings(ScalingConfig, file, shared).grid.models
    assert "shuffled" not in load_settings(ScalingConfig, file, [*shared, "grid.models.shuffled=null"]).grid.models


def test_a_key_of_the_command_line_leaves_the_other_systems_also_where_they_are_defaults():
    for cls, key in ((SeedsConfig, "grid.systems"), (ScalingConfig, "grid.models"), (TuningConfig, "tune.systems")):
        keys = [f"{key}.{own}" for own in ("lstm.model.name=bilstm", "transformer.model.d_ff=8", "tree_transformer.patience=9")]
        config = load_settings(cls, None, ["data=somewhere", *keys])
        systems = getattr(getattr(config, key.split(".")[0]), key.split(".")[1])
        assert systems == {
            "tree_transformer": {"model": {"name": "tree_transformer"}, "patience": 9},
            "transformer": {"model": {"name": "transformer", "d_ff": 8}},
            "lstm": {"model": {"name": "bilstm"}},
        }
        assert len(getattr(getattr(load_settings(cls, None, ["data=x"]), key.split(".")[0]), key.split(".")[1])) == 2


@pytest.mark.parametrize("name", ["iwslt14", "iwslt14_tuning", "multi30k"])
def test_the_translation_study_follows_its_protocol(name):
    """docs/results/translation.md, "Protocol"."""
    config = load_settings(ScalingConfig, CONFIGS[0].with_name(f"scaling_{name}.yaml"), ["data=somewhere"])
    assert (config.average, config.average_checkpoints, config.patience, config.validate_every) == ("best", 5, 0, 100)
    assert config.max_steps == config.optimizer.decay_steps == 3000 and config.batch.max_tokens == 4096
    assert config.batch.subset == "by_seed" and config.grid.metric == "bleu_tokenized"
    assert (config.decoding.beam_size, config.decoding.length_penalty, config.precision) == (5, 1.0, "bf16")
    if name == "iwslt14_tuning":
        assert config.grid.split == "valid" and config.grid.seeds == (101,)
    else:
        controls = ["shuffled"] if name == "multi30k" else []
        assert list(config.grid.models) == ["tree_transformer", config.grid.baseline, *controls] and len(config.grid.seeds) >= 3


def test_all_systems_of_the_translation_study_have_the_settings_and_the_first_models_of_its_main_part():
    """So that they share the records of these models."""
    main, systems = (
        load_settings(ScalingConfig, CONFIGS[0].with_name(f"scaling_{name}.yaml"), ["data=somewhere"])
        for name in ("iwslt14", "iwslt14_systems")
    )
    assert all(getattr(main, name) == getattr(systems, name) for name in TrainConfig.model_fields)
    assert list(main.grid.models.items()) == list(systems.grid.models.items())[:2]
    assert (main.grid.seeds, main.grid.metric, systems.grid.fractions) == (systems.grid.seeds, systems.grid.metric, (1.0,))


def test_a_run_records_the_sections_of_its_own_architecture():
    """Sections of others are left out unless they were set; older settings, with all sections, read back the same."""
    plain, tree = ModelConfig(name="transformer"), ModelConfig(name="tree_transformer")
    assert "tree" in tree.model_dump() and not {"tree", "relations", "phrases"} & plain.model_dump().keys()
    everything = {name: value.model_dump() for name, value in plain if isinstance(value, ArchitectureSection)}
    assert ModelConfig(name="transformer", **everything) == plain
    foreign = ModelConfig(name="transformer", tree={"subtree_mask": False})
    assert foreign.unread_sections() == ["tree"] and foreign.model_dump()["tree"]["subtree_mask"] is False
    named = {name for _, section in ModelConfig() if isinstance(section, ArchitectureSection) for name in section.architectures}
    assert named <= ARCHITECTURES.keys()


def test_other_systems_than_those_of_a_study_need_no_word_about_the_old_ones():
    systems = "grid.systems={tree_transformer: {}, no_sub_mask: {model: {tree: {subtree_mask: false}}}}"
    grid = load_settings(SeedsConfig, FOLDER / "seeds_sst5.yaml", ["data=x", systems]).grid
    assert list(grid.systems) == ["tree_transformer", "no_sub_mask"] and grid.fewer_seeds == {"no_sub_mask": 5}
    for name, cls, key in (("seeds_sst5", SeedsConfig, "grid.fewer_seeds"), ("tune_sample", TuningConfig, "tune.more_trials")):
        with pytest.raises(UserError, match="but is (of )?typo"):
            load_settings(cls, FOLDER / f"{name}.yaml", ["data=x", f"{key}={{typo: 3}}"])
    tuned = load_settings(TuningConfig, FOLDER / "tune_sample.yaml", ["data=x", "tune.more_trials={transformer: 3}"])
    assert tuned.tune.more_trials == {"transformer": 3}
