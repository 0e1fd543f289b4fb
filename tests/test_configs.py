"""Every shipped configuration is one that its workflow takes, and survives a round trip through YAML."""

from pathlib import Path

import pytest

from treenet.config import TrainConfig
from treeproc.preprocess import PreprocessConfig, sample_splits
from treeproc.settings import dump_settings, load_settings, read_yaml

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "workflows" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configuration_loads(path, tmp_path):
    if path.stem.endswith("_data"):
        values = {} if "splits" in read_yaml(path.read_text(), path.name) else {"splits": sample_splits()}
        config = load_settings(PreprocessConfig, path, **values)
    else:
        config = load_settings(TrainConfig, path, ["data=somewhere"])
    (tmp_path / "again.yaml").write_text(dump_settings(config))
    assert load_settings(type(config), tmp_path / "again.yaml") == config
