"""cluster.yaml, checked by the cluster launcher's own validation, offline."""

import copy

import pytest
import yaml

launcher = pytest.importorskip("ray.autoscaler._private.util", reason="this Ray has no launcher validation to call")


def test_cluster_yaml_is_valid(repository):
    config = yaml.safe_load((repository / "cluster.yaml").read_text())
    launcher.validate_config(launcher.prepare_config(copy.deepcopy(config)))
    assert set(config["available_node_types"]) == {"head", "parse", "train"}
    assert any("constraints.txt" in command for command in config["setup_commands"])
    with pytest.raises(ValueError, match="head_node_type"):
        launcher.validate_config(launcher.prepare_config({**copy.deepcopy(config), "head_node_type": "none"}))
