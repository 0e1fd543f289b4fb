"""Names of the hub in the place of folders: real requests of the client to a local server, and prepared caches."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

from commands import run_here  # noqa: E402
from hub_server import serving  # noqa: E402
from pretrained_data import settings  # noqa: E402
from test_pretrained import config_of  # noqa: E402
from test_pretrained_runs import study_of  # noqa: E402
from tiny_pretrained import write_both, write_encoder  # noqa: E402

from treenet.evaluation.classify import classify_run  # noqa: E402
from treenet.evaluation.settings import BertScoreConfig, ClassifySettings  # noqa: E402
from treenet.experiments.records import _with_places, _without_places  # noqa: E402
from treenet.extras.learned_metrics.bertscore import bert_scores  # noqa: E402
from treenet.extras.tuning.trials import Trials, TuningConfig  # noqa: E402
from treenet.jobs.train_run import run_training  # noqa: E402
from treenet.runs.checkpoint import AVERAGED, WEIGHTS  # noqa: E402
from treenet.runs.exported_run import without_places  # noqa: E402
from treeproc.common.errors import UserError  # noqa: E402
from treeproc.common.files import file_sha256  # noqa: E402
from treeproc.common.hub import HubModel, local_folder, model_place, pin  # noqa: E402
from treeproc.common.settings import build_settings, dump_settings  # noqa: E402
from treeproc.common.storage import RemotePath  # noqa: E402
from treeproc.common.yaml_reader import read_yaml  # noqa: E402
from treeproc.stages.preprocess import PreprocessConfig, preprocess  # noqa: E402

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent
NAME = "org/tiny"
KEY = "model.pretrained.folder"
HASH = "0123456789" * 4
ALL = "config.json tokenizer.json 'model*.safetensors*'"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An encoder with files that nobody should fetch, and a data set of its pieces."""
    encoder, data = write_both(tmp_path_factory.mktemp("bert"))
    for name in ("pytorch_model.bin", "modeling.py", "README.md", "tf_model.h5"):
        (encoder / name).write_bytes(b"1")
    return encoder, data


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
        move_to(tmp_path / "cache", monkeypatch)
        yield server


def move_to(cache: Path, monkeypatch: pytest.MonkeyPatch, *, offline: bool = False) -> None:
    """Act as another machine, with its own cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)


def recorded(folder: Path, *keys: str) -> str:
    value = read_yaml((folder / "config.yaml").read_text(), "config.yaml")
    for key in keys:
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("google-bert/bert-base-uncased", HubModel("google-bert/bert-base-uncased")),
        ("gpt2", HubModel("gpt2")),
        ("org/na.me_1@refs/pr/3", HubModel("org/na.me_1", "refs/pr/3")),
        (f"bert@{HASH}", HubModel("bert", HASH)),
        ("s3://bucket/bert", RemotePath("s3", "bucket/bert")),
        *(
            (value, Path(value))
            for value in ("./org/name", "/org/name", "a/b/c", "org/name/", "../name", "org/..", "org/a b", "x@")
        ),
        *((value, Path(value)) for value in ("~/bert", "org/na..me", "@main", "bert@--all", "org/näme", "a" * 97)),
    ],
)
def test_what_is_a_name(value, place):
    assert model_place(value) == place


def test_a_folder_wins_over_a_name(made, hub, tmp_path, monkeypatch):
    hub.publish(NAME, made[0])
    (tmp_path / "org").mkdir()
    (tmp_path / NAME).symlink_to(made[0])
    monkeypatch.chdir(tmp_path)
    config = config_of((NAME, made[1]), max_steps=2)
    assert config.model.pretrained.folder == Path(NAME)
    run_training(config, tmp_path / "run")
    assert recorded(tmp_path / "run", *KEY.split(".")) == str(made[0])
    monkeypatch.chdir("/")  # where the process of a trial may work
    there = config_of((NAME, made[1])).with_absolute_paths(tmp_path)
    assert there.model.pretrained.folder == made[0] and not hub.requests


def test_records_and_exports_keep_a_name_with_its_hash_and_no_folder():
    for place, kept in ((f"{NAME}@{HASH}", f"{NAME}@{HASH}"), ("/home/me/bert", "bert"), ("models/bert", "bert")):
        values = {"data": "/home/me/data", "model": {"pretrained": {"folder": place}}}
        assert _without_places(values)["model"] == without_places(values)["model"] == {"pretrained": {"folder": kept}}
        assert _with_places(_without_places(values), values) == values
    other = {"data": "data", "model": {"pretrained": {"folder": f"{NAME}@{'f' * 40}"}}}
    assert _with_places(_without_places({"model": {"pretrained": {"folder": f"{NAME}@{HASH}"}}}), other) != other


def test_a_name_gives_what_the_folder_gives_also_after_its_branch_has_moved(made, hub, tmp_path, monkeypatch):
    """Data set and run record the commit. The same commands continue with it on another machine, and need no hub for scoring."""
    encoder, data_of_folder = made
    first = hub.publish(NAME, encoder)
    pinned, data = f"{NAME}@{first}", tmp_path / "data"
    config = PreprocessConfig.model_validate(settings(tmp_path, NAME))
    index = preprocess(config, data)
    assert hub.fetched() == ["config.json", "tokenizer.json"]
    assert recorded(data, "subwords", "tokenizer") == pinned
    assert index["fingerprint"] == read_yaml((data_of_folder / "encoded" / "index.json").read_text(), "")["fingerprint"]

    run_training(config_of((encoder, data)), tmp_path / "of_folder")
    half = config_of((NAME, data), max_steps=2)
    run_training(half, tmp_path / "run")
    assert hub.fetched() == ["model.safetensors"]
    assert recorded(tmp_path / "run", *KEY.split(".")) == pinned

    shutil.copy(encoder / "tokenizer.json", write_encoder(tmp_path / "new", seed=2))
    second = hub.publish(NAME, tmp_path / "new")
    assert pin(KEY, HubModel(NAME)) == HubModel(NAME, second)
    hub.requests.clear()
    move_to(tmp_path / "other_cache", monkeypatch)
    preprocess(config, data)
    run_training(config_of((NAME, data)), tmp_path / "run")  # of half a run
    run_training(half, tmp_path / "another")  # with the commit of the data set
    again = {"parsed": data, "subwords": {"tokenizer": NAME}, "workers": 0}
    preprocess(PreprocessConfig.model_validate(again), tmp_path / "again")
    assert recorded(tmp_path / "again", "subwords", "tokenizer") == pinned
    assert first in str(hub.requests) and second not in str(hub.requests)
    assert hub.fetched() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert {recorded(tmp_path / run, *KEY.split(".")) for run in ("run", "another")} == {pinned}
    weights = [file_sha256(tmp_path / run / AVERAGED / WEIGHTS) for run in ("of_folder", "run")]
    assert weights[0] == weights[1]

    with pytest.raises(UserError, match=f"other settings .*{pinned}.* -> .*{NAME}@{second}.*choose another --out"):
        run_training(config_of((f"{NAME}@main", data)), tmp_path / "run")
    run_training(config_of((f"{NAME}@main", data), max_steps=2), tmp_path / "newest")
    assert recorded(tmp_path / "newest", *KEY.split(".")) == f"{NAME}@{second}"
    initial = [file_sha256(tmp_path / run / "initial" / WEIGHTS) for run in ("another", "run", "newest")]
    assert initial[0] == initial[1] != initial[2]

    move_to(tmp_path / "third_cache", monkeypatch, offline=True)
    hub.requests.clear()
    classify_run(tmp_path / "run", ClassifySettings(split="valid"))
    assert not hub.requests and not (tmp_path / "third_cache").exists()


def test_frozen_states_are_those_of_the_folder(made, hub, tmp_path):
    commit = hub.publish(NAME, made[0])
    for out, encoder in (("of_folder", made[0]), ("of_name", NAME), ("of_commit", f"{NAME}@{commit}")):
        done = run_here("frozen_states.py", "--out", tmp_path / out, f"data={made[1]}", f"encoder={encoder}", "workers=0")
        assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "of_folder" / "shards").glob("*.arrow"))
    for out in ("of_name", "of_commit"):
        assert names and all(
            (tmp_path / out / "shards" / name).read_bytes() == (tmp_path / "of_folder" / "shards" / name).read_bytes()
            for name in names
        )


def test_a_study_and_a_search_have_one_commit(made, hub, tmp_path):
    first = HubModel(NAME, hub.publish(NAME, made[0]))
    of_name, systems = (NAME, made[1]), {"plain": {}, "own": {"model": {"pretrained": {"folder": "org/own"}}}}
    own = HubModel("org/own", hub.publish("org/own", made[0]))
    values = config_of(made, loggers=[]).model_dump(mode="json")
    values["model"]["pretrained"]["folder"] = NAME
    values |= {"tune": {"systems": systems, "space": {"model.dropout": {"low": 0, "high": 0.3}}}}
    search = build_settings(TuningConfig, values, "here").with_pinned_encoder(tmp_path / "search")
    trials = {name: Trials(tmp_path / "search", search, name) for name in systems}
    study = study_of(of_name, tmp_path / "study", systems)
    assert {cell.labels["system"]: cell.config.model.pretrained.folder for cell in study.cells} == {"plain": first, "own": own}
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "config.yaml").write_text(dump_settings(study.config))

    hub.publish(NAME, made[0])
    hub.publish("org/own", made[0])
    hub.requests.clear()
    again = study_of(of_name, tmp_path / "study", {"plain": {}})
    assert not hub.requests  # a finished study needs neither the hub nor the cache
    assert {cell.config.model.pretrained.folder for cell in again.cells} == {first}
    for name, place in (("plain", first), ("own", own)):
        assert trials[name].config_of({"model.dropout": 0.1}).model.pretrained.folder == place


def test_bertscore_names_the_commit(made, hub, tmp_path):
    commit = hub.publish(NAME, made[0])
    lines = [["We know her", "He knows us"]], [["We know us", "He knows"]]
    found, of_folder = (bert_scores(BertScoreConfig(model=model, layer=1), *lines) for model in (NAME, made[0]))
    assert found.values.tolist() == of_folder.values.tolist()
    assert f"model:{NAME}|revision:{commit[:8]}|layer:1" in found.signature


def test_a_prepared_cache_is_enough_without_the_hub(made, hub, tmp_path, monkeypatch):
    """Other programs of Hugging Face wrote it: with a branch and without a list of the model's files."""
    cache, encoder = tmp_path / "prepared", made[0]
    model = cache / "models--org--tiny"
    shutil.copytree(encoder, model / "snapshots" / HASH)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(HASH)
    move_to(cache, monkeypatch, offline=True)
    for place in (HubModel(NAME), HubModel(NAME, HASH)):
        assert pin(KEY, place) == HubModel(NAME, HASH)
        assert local_folder(KEY, place, weights=True) == model / "snapshots" / HASH
    (model / "snapshots" / HASH / "model.safetensors").unlink()
    assert local_folder(KEY, HubModel(NAME, HASH)) == model / "snapshots" / HASH
    with pytest.raises(UserError, match=f"hf download {NAME} --revision {HASH} {ALL}".replace("*", r"\*")):
        local_folder(KEY, HubModel(NAME, HASH), weights=True)
    assert not hub.requests


def refuse(status, code=""):
    return lambda hub, monkeypatch, path: hub.refused.update({NAME: (status, code)})


def cut(hub, monkeypatch, path):
    hub.cut = True


def no_weights(hub, monkeypatch, path):
    hub.publish(NAME, shutil.copytree(next(iter(hub.folders[NAME].values())), path / "encoder"))
    (path / "encoder" / "model.safetensors").unlink()


def full_disk(hub, monkeypatch, path):
    """Python sees an error of the system as on a full disk: no file may have more than 300 bytes."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, most[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, most)


WRONG = {
    "unknown": ("org/other", None, "org/other is not a folder here, and {hub} shows no model of this name (401); correct it"),
    "forbidden": (NAME, refuse(403), f"{NAME} is not a folder here, and {{hub}} shows no model of this name (403)"),
    "missing": (NAME, refuse(404, "RepoNotFound"), f"{NAME} is not a folder here, and {{hub}} shows no model of this name (404)"),
    "gated": (NAME, refuse(403, "GatedRepo"), f"only to users who accepted its terms; accept them at {{hub}}/{NAME}, then"),
    "branch": (f"{NAME}@v2", None, f"{NAME} has no revision v2 on {{hub}}; give a branch, a tag or a commit hash"),
    "commit": (f"{NAME}@{HASH}", None, f"{NAME} has no revision {HASH} on {{hub}}"),
    "weights": (NAME, no_weights, f"{NAME} has no model.safetensors; choose an encoder with config.json, tokenizer.json and we"),
    "cut": (NAME, cut, f"cannot fetch {NAME} from {{hub}}: peer closed connection"),
    "disk": (NAME, full_disk, f"cannot write {NAME} to {{cache}}: File too large; free space, or set HF_HOME to another folder"),
    "offline": (
        NAME,
        lambda hub, monkeypatch, path: move_to(path / "cache", monkeypatch, offline=True),
        f"{NAME} is not a folder here, the cache {{cache}} lacks it or a part of it, and HF_HUB_OFFLINE is set; where there is a "
        f"network: hf download {NAME} {ALL}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_fetched_is_one_line(made, hub, tmp_path, monkeypatch, case):
    hub.publish(NAME, made[0])
    name, change, message = WRONG[case]
    restore = change(hub, monkeypatch, tmp_path) if change else None
    try:
        local_folder(KEY, model_place(name), weights=True)
        said = ""
    except UserError as error:
        said = str(error)
    finally:
        if restore:
            restore()
    assert message.format(hub=hub.url, cache=tmp_path / "cache") in said and said.startswith(f"{KEY}: ") and "\n" not in said
    if case == "cut":  # and nothing half-fetched is taken for the file
        hub.cut = False
        folder = local_folder(KEY, HubModel(NAME), weights=True)
        assert file_sha256(folder / "model.safetensors") == file_sha256(made[0] / "model.safetensors")


@pytest.mark.parametrize("value", ["/no/such/folder", "./bert", "s3://bucket/bert"])
def test_neither_a_folder_nor_a_name_is_one_line(made, hub, tmp_path, monkeypatch, value):
    monkeypatch.setenv("AWS_ENDPOINT_URL", hub.url)
    with pytest.raises(UserError, match=r"model\.pretrained\.folder: .*(or its name on the hub|folder on this machine)"):
        run_training(config_of((value, made[1])), tmp_path / "run")
    if not value.startswith("s3"):
        with pytest.raises(
            UserError, match=r"subwords\.tokenizer: .* is not a folder; give the folder of .*or its name on the hub"
        ):
            preprocess(PreprocessConfig.model_validate(settings(tmp_path, value)), tmp_path / "data")


def test_a_command_finds_the_hub_and_the_cache_by_their_environment(made, hub, tmp_path):
    commit = hub.publish(NAME, made[0])
    source = settings(tmp_path, made[0])["splits"]["train"]["source"][0]
    command = [
        sys.executable, str(REPOSITORY / "workflows" / "preprocess.py"), "--out", str(tmp_path / "data"), "workers=0",
        f"splits.train.source={source}", "format=sst", "parser.name=given", f"subwords.tokenizer={NAME}",
    ]  # fmt: skip
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / commit / "tokenizer.json").is_file()
    assert recorded(tmp_path / "data", "subwords", "tokenizer") == f"{NAME}@{commit}"
