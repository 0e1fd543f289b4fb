"""Runs of every task as one folder: the same results to the bit, a model card, nothing of the machine that made it."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import run_here
from pretrained_data import write_data
from search_runs import write_run, write_vocabulary
from test_causal_lm import make_config as causal_config
from test_own_labels import settings_of, toy_lines, write_files
from test_pretrained import config_of
from tiny_pretrained import write_encoder
from toydata import with_given_trees, write_toy_data

from treenet import UserError, from_pretrained, load_run
from treenet.config import TrainConfig
from treenet.jobs.train_run import run_training
from treenet.runs.exported_run import export_run
from treenet.runs.result_entries import read_scores
from treeproc.common.files import file_sha256, json_bytes, read_json
from treeproc.common.settings import load_settings
from treeproc.parsers import ParserConfig, describe_parser
from treeproc.parsers.model_files import SHIPPED_MODELS
from treeproc.stages.preprocess import preprocess

pytestmark = pytest.mark.slow

LINES = ["ba de", "gu ki bo da", "ke"]
CLASSIFIER = {
    "task": "classification",
    "model": {"name": "tree_transformer", "d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1},
    "classifier": {"supervision": "root"},
    "max_steps": 10,
    "checkpoint_every": 10,
    "validate_every": 10,
    "workers": 0,
}
# All that a saved folder may hold: no pickle, no shards, no logs.
ALLOWED = {
    "README.md", "config.yaml", "run.json", "export.json", "averaged/model.safetensors", "averaged/meta.json",
    "data/encoded/index.json", "data/encoded/vocab/pieces.model", "data/encoded/vocab/tokenizer.json",
    "data/encoded/vocab/labels.txt", "data/encoded/vocab/pos_tags.txt", "data/encoded/vocab/deprels.txt",
}  # fmt: skip


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """A run on classes of our own, with scores, whose lines the shipped parser reads."""
    folder = tmp_path_factory.mktemp("saved")
    write_files(folder)
    preprocess(settings_of(folder), folder / "data")
    run_training(load_settings(TrainConfig, None, (), **json.loads(json.dumps(CLASSIFIER)), data=folder / "data"), folder / "run")
    assert run_here("evaluate.py", "--out", folder / "run", "split=test").returncode == 0
    return folder / "run"


def check_saved(folder: Path, *places: Path) -> None:
    """A saved folder has only what it may have, the hashes that it records, and no path of this machine."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    assert set(files) <= ALLOWED and {"README.md", "averaged/model.safetensors"} <= set(files)
    recorded = read_json(folder / "export.json")["files"]
    assert set(recorded) == set(files) - {"export.json"}
    for name, path in files.items():
        assert name == "export.json" or recorded[name]["sha256"] == file_sha256(path)
        content = path.read_bytes()
        assert not path.is_symlink() and not content.startswith(b"\x80") and not content.startswith(b"PK")
        for place in (*places, Path.home(), Path(__file__).parents[1]):
            assert str(place).encode() not in content, (name, place)


def card_of(folder: Path) -> tuple[dict, str]:
    """The YAML head of the model card, and its text."""
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def test_translations_are_the_same_to_the_bit(tmp_path):
    run = load_run(write_run(tmp_path / "run", write_vocabulary(tmp_path / "data")))
    expected = run.candidates(LINES, num_best=3), run.score(LINES, ["de ba"] * 3)
    run.save_pretrained(tmp_path / "saved")
    for gone in ("run", "data"):
        shutil.rmtree(tmp_path / gone)
    check_saved(tmp_path / "saved", tmp_path)
    found = from_pretrained(tmp_path / "saved")
    assert (found.candidates(LINES, num_best=3), found.score(LINES, ["de ba"] * 3)) == expected
    head, text = card_of(tmp_path / "saved")
    assert head["library_name"] == "tree-attention" and head["pipeline_tag"] == "translation" and head["language"] == ["en"]
    assert "license" not in head and "metrics" not in head and "# license: " in (tmp_path / "saved" / "README.md").read_text()
    assert "## Scores" not in text


def test_the_lines_of_a_card_load_the_run(classifier, tmp_path, monkeypatch):
    run = load_run(classifier)
    run.save_pretrained(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    [code] = re.findall("```python\n(.+?)```", card_of(tmp_path / "saved")[1], re.DOTALL)
    assert len(code.strip().replace("\n\n", "\n").splitlines()) == 3
    names: dict = {}
    exec(code, names)
    assert names["run"].classify(["A sentence."]) == run.classify(["A sentence."])
    assert code.rstrip().endswith('run.classify(["A sentence."])'), "the model learned from plain text"


def test_classes_and_scores_of_a_classifier(classifier, tmp_path):
    lines = [text for _, text in toy_lines(25, 200)]
    load_run(classifier).save_pretrained(tmp_path / "saved")
    assert from_pretrained(tmp_path / "saved").classify(lines) == load_run(classifier).classify(lines)
    check_saved(tmp_path / "saved", classifier.parent, tmp_path)
    head, text = card_of(tmp_path / "saved")
    assert head["pipeline_tag"] == "text-classification" and {"accuracy", "f1"} <= set(head["metrics"])
    scores = read_scores(classifier)["test"]
    low, high = (f"{100 * end:.2f}" for end in scores["accuracy_interval"])
    assert f"| test | accuracy (%) | {100 * scores['accuracy']:.2f} | {low} to {high} |" in text
    facts, index = read_json(classifier / "run.json"), read_json(classifier.parent / "data" / "encoded" / "index.json")
    assert facts["data_fingerprint"] in text and scores["weights_sha256"] in text
    assert "trained with" in text and "torch " in text
    for sha256 in index["parser"]["models"]["files"].values():
        assert sha256 in text
    assert "it comes with tree-attention" in text
    result = run_here("evaluate.py", "--out", tmp_path / "saved", f"data={classifier.parent / 'data'}", "split=test")
    assert result.returncode == 0, result.stderr
    again = read_scores(tmp_path / "saved")["test"]
    assert {name: again[name] for name in ("accuracy", "confusion")} == {n: scores[n] for n in ("accuracy", "confusion")}
    result = run_here("evaluate.py", "--out", tmp_path / "saved", "split=test")
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr


def test_scores_of_other_weights_are_not_in_the_card(classifier, tmp_path):
    run = shutil.copytree(classifier, tmp_path / "run")
    scores = read_scores(run)
    (run / "scores.json").write_bytes(json_bytes({name: entry | {"weights_sha256": "0" * 64} for name, entry in scores.items()}))
    load_run(run).save_pretrained(tmp_path / "saved")
    assert "## Scores" not in card_of(tmp_path / "saved")[1]


def test_a_run_above_a_pretrained_encoder(tmp_path):
    encoder = write_encoder(tmp_path / "encoder")
    config = read_json(encoder / "config.json")
    (encoder / "config.json").write_bytes(json_bytes(config | {"_name_or_path": str(encoder)}))
    data = write_data(tmp_path, tokenizer=encoder)
    run_training(config_of((encoder, data), model={"name": "tree_transformer"}), tmp_path / "run")
    trees = ["(S (X We) (S (X know) (X us)))", "(S (X They) (X can))"]
    lines, run = ["We know us", "They can"], load_run(tmp_path / "run")
    expected = run.classify(lines, trees=trees)
    run.save_pretrained(tmp_path / "saved")
    for gone in ("run", "data", "encoder"):
        shutil.rmtree(tmp_path / gone)
    check_saved(tmp_path / "saved", tmp_path)
    assert from_pretrained(tmp_path / "saved").classify(lines, trees=trees) == expected and None not in expected


def test_a_language_model_scores_the_same(tmp_path):
    data = with_given_trees(write_toy_data(tmp_path / "data", train=40, valid=8, test=10))
    run_training(causal_config(data, "model.name=transformer_grammar", "max_steps=10", "validate_every=5"), tmp_path / "run")
    assert run_here("score_lm.py", "--out", tmp_path / "run", "split=test").returncode == 0
    result = run_here("export.py", tmp_path / "run", "--out", tmp_path / "saved")
    assert result.returncode == 0, result.stderr
    check_saved(tmp_path / "saved", tmp_path)
    assert card_of(tmp_path / "saved")[0]["metrics"] == ["perplexity"]
    (tmp_path / "run" / "config.yaml").rename(tmp_path / "gone")
    result = run_here("score_lm.py", "--out", tmp_path / "saved", f"data={data}", "split=test")
    assert result.returncode == 0, result.stderr
    name = "language_model.test.tsv"
    assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_a_trained_parser_is_looked_for_in_the_folder(tmp_path):
    """The card says where its models belong. A copy there reads the lines as the run does; other models are refused."""
    data = write_vocabulary(tmp_path / "data", parser="shipped", tree_source="parsed")
    index = read_json(data / "encoded" / "index.json")
    own = tmp_path / "mine"
    shutil.copytree(SHIPPED_MODELS / "en", own, copy_function=os.symlink)  # links are loaded once (tests/conftest.py)
    config = ParserConfig(name="shipped", models=own)
    settings = {"parser": describe_parser(config), "parser_settings": config.model_dump(mode="json")}
    (data / "encoded" / "index.json").write_bytes(json_bytes(index | settings))
    run = load_run(write_run(tmp_path / "run", data))
    expected = run.candidates(LINES, num_best=3)
    run.save_pretrained(tmp_path / "saved")
    check_saved(tmp_path / "saved", tmp_path)
    assert "copy the files of its models into `data/parser`" in card_of(tmp_path / "saved")[1]
    own.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="saved/data/parser has no tokenizer.pt"):
        from_pretrained(tmp_path / "saved").translate(LINES)
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "saved" / "data" / "parser", copy_function=os.symlink)
    assert from_pretrained(tmp_path / "saved").candidates(LINES, num_best=3) == expected


@pytest.mark.parametrize("name", sorted(name for name in ALLOWED if not name.endswith(("README.md", "export.json"))))
def test_a_missing_file_is_named_in_one_line(tmp_path, name):
    run = load_run(write_run(tmp_path / "run", write_vocabulary(tmp_path / "data")))
    run.save_pretrained(tmp_path / "saved")
    assert name.endswith(("tokenizer.json", "deprels.txt")) != (tmp_path / "saved" / name).exists()
    if not (tmp_path / "saved" / name).exists():
        return  # of other runs
    (tmp_path / "saved" / name).unlink()
    with pytest.raises(UserError, match=re.escape(name.split("/")[-1])) as error:
        from_pretrained(tmp_path / "saved").translate(LINES)
    assert "\n" not in str(error.value)


def test_a_changed_file_is_named_in_one_line(tmp_path):
    """A label less would give all nodes behind it other vectors, and so other translations."""
    run = load_run(write_run(tmp_path / "run", write_vocabulary(tmp_path / "data")))
    run.save_pretrained(tmp_path / "saved")
    for path in sorted((tmp_path / "saved").rglob("*.*")):
        if path.name in ("README.md", "export.json"):
            continue
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(UserError, match=f"{path.name} is damaged: .*; copy the exported run again"):
            from_pretrained(tmp_path / "saved")
        path.write_bytes(content)
    from_pretrained(tmp_path / "saved")


def test_a_model_that_this_checkout_lacks_is_named_with_its_file(tmp_path):
    run = write_run(tmp_path / "run", write_vocabulary(tmp_path / "data"))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: tree_transformer", "name: uniform"))
    with pytest.raises(UserError, match=rf"^{config}: model\.name must be one of .*, but is uniform instead$"):
        load_run(run)


def test_a_changed_vocabulary_of_the_data_set_is_named(classifier):
    labels = classifier.parent / "data" / "encoded" / "vocab" / "labels.txt"
    content = labels.read_bytes()
    labels.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"labels.txt is damaged: .*preprocess.* again"):
        load_run(classifier)
    labels.write_bytes(content)
    load_run(classifier)


def test_an_edited_card_is_kept(tmp_path):
    run = load_run(write_run(tmp_path / "run", write_vocabulary(tmp_path / "data")))
    run.save_pretrained(tmp_path / "saved")
    run.save_pretrained(tmp_path / "saved")
    card = tmp_path / "saved" / "README.md"
    card.write_text(card.read_text().replace('# license: add a line such as "license: cc-by-4.0"', "license: mit"))
    with pytest.raises(UserError, match="README.md was edited and would be lost; move it, or choose another folder"):
        run.save_pretrained(tmp_path / "saved")
    from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "again")
    assert card_of(tmp_path / "again")[0]["license"] == "mit"


def test_what_cannot_be_saved_is_one_line(tmp_path):
    run = load_run(write_run(tmp_path / "run", write_vocabulary(tmp_path / "data")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for place, message in (
        ("s3://bucket/run", "folder must be local"),
        (tmp_path / "run", "folder must be another one than that of the run"),
        (tmp_path / "mine", "must be a new folder or an earlier export.*choose another folder"),
        ("", "folder must be the path of a folder"),
    ):
        with pytest.raises(UserError, match=message) as error:
            run.save_pretrained(place)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="without trained weights"):
        export_run(replace(run.loaded, weights=None), tmp_path / "saved")
