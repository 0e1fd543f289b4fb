"""The commands of docs/reproduce.md: their configurations are there, and their settings are ones that the workflows take."""

import re
import shlex
from pathlib import Path

import pytest

from treenet.cli.shipped import find_config
from treenet.config import TrainConfig
from treenet.evaluation.settings import EvaluateSettings
from treenet.experiments.settings import ScalingConfig
from treeproc.common.settings import load_settings
from treeproc.stages.preprocess import PreprocessConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]+ \| `(\w+)` \| `(\w+)` \| (?:`(\w+)`|the same) \| (?:`([^`]+)`)? ?\|", TEXT, re.MULTILINE)
BLOCKS = [block.replace("\\\n", " ") for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)]
SETTINGS = {
    "preprocess": PreprocessConfig,
    "train": TrainConfig,
    "evaluate": EvaluateSettings,
    "scaling": ScalingConfig,
}


def commands(names: dict[str, str]) -> list[list[str]]:
    """Words of every command that runs a workflow, shell variables filled in."""
    found, names = [], dict(names)
    for line in (line for block in BLOCKS for line in block.split("\n")):
        if match := re.match(r'(train)="(.*)"$', line):
            names[match[1]] = match[2]
            continue
        while (filled := re.sub(r"\$\{?(\w+)\}?", lambda match: names.get(match[1], match[0]), line)) != line:
            line = filled
        if "tree-attention " in line:
            found.append(shlex.split(line))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_commands_name_configurations_and_settings_that_exist(row):
    task, target, data_task, _ = row
    listed = commands({"TASK": task, "DATA_TASK": data_task or task, "TARGET": target, "row": "no_mask"})
    assert {words[1] for words in listed} == {*SETTINGS, "report"}
    for words in listed:
        name = words[1]
        if name not in SETTINGS:
            continue
        config = find_config(words[words.index("--config") + 1]) if "--config" in words else None
        overrides = [word for word in words if "=" in word]
        settings = load_settings(SETTINGS[name], config, overrides)
        if name == "evaluate" and "--compare" not in words:
            assert settings.target_language == target
        if name == "preprocess":
            assert set(settings.splits) == {"train", "valid", "test"}


def test_parsers_that_the_text_names_are_settings_of_the_configurations():
    english, others = re.search(r"For English add `([^`]+)` [^,]*, for German and French\s`([^`]+)`", TEXT).groups()
    configs = {"English": ("iwslt13_en_fr", english), "German": ("iwslt14_de_en", others), "French": ("iwslt13_fr_en", others)}
    for language, (name, corenlp) in configs.items():
        path = ROOT / "workflows" / "configs" / f"{name}_data.yaml"
        row = next(line for line in TEXT.split("\n") if line.startswith(f"| {language} |"))
        (own,) = re.findall(r"`(parser\.[^`]+=[^`]+)`", row)
        changed = load_settings(PreprocessConfig, path, own.split())
        assert changed.parser != load_settings(PreprocessConfig, path).parser
        parser = load_settings(PreprocessConfig, path, corenlp.split()).parser
        assert (parser.name, parser.constituency, parser.language) == ("corenlp", True, changed.parser.language)


def test_every_row_of_table_1_is_there():
    tasks = {row[0] for row in ROWS}
    assert len(ROWS) == 6 and all((ROOT / "workflows" / "configs" / f"{task}.yaml").is_file() for task in tasks)
    for _, _, _, more in ROWS:
        assert not more or load_settings(PreprocessConfig, None, more.split())
