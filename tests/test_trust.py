"""Untrusted files never execute code and never leave their folder."""

import gzip
import json
import os
import re
import shutil
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hostile_files import first_record, one_line
from toydata import write_toy_data

from treenet.experiments.ledger import LEDGER, Ledger
from treenet.runs.checkpoint import META, WEIGHTS, _seal, is_complete
from treenet.runs.run_results import read_system
from treeproc.common.files import atomic_write, file_sha256, json_bytes, locked, read_json
from treeproc.common.settings import UserError
from treeproc.common.storage import as_path, inside
from treeproc.inspect import main as inspect
from treeproc.readers.numbered_lines import read_lines
from treeproc.shards.shard import check_hashes
from treeproc.shards.store import finished_shard, read_index, stage_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path) -> Path:
    return write_toy_data(tmp_path / "data")


def test_sidecars_and_indices_are_checked(data):
    folder = data / "encoded"
    record = first_record(folder)
    good = json.loads((folder / "index.json").read_bytes())

    def index_with(change) -> None:
        index = json.loads(json.dumps(good))
        change(index)
        (folder / "index.json").write_bytes(json_bytes(index))

    for change, message in [
        (lambda i: i["shards"][0].update(rows="9"), "shards.0.rows"),
        (lambda i: i["shards"][0].update(more=1), "shards.0.more"),
        (lambda i: i["shards"][0].pop("sha256"), "shards.0.sha256"),
        (lambda i: i["shards"][0].update(sha256="../../" + "a" * 58), "shards.0.sha256"),
        (lambda i: i["shards"][0].update(name="../text/train-00000-of-00002.arrow"), "shards.0.name"),
        (lambda i: i["shards"][0].update(name="/etc/x.arrow"), "shards.0.name"),
        (lambda i: i.update(shards={}), "shards"),
        (lambda i: i.update(columns="leaves"), "columns"),
        (lambda i: i.update(num_pieces=-1), "num_pieces"),
        (lambda i: i.update(files={"vocab/pieces.model": 3}), "files"),
        (lambda i: i.update(files={"../../secret": "a" * 64}), "'../../secret' does not name a file in that folder"),
        (lambda i: i.update(columns=["example_id", "leaves"]), "index.json names example_id, leaves"),
    ]:
        index_with(change)
        with pytest.raises(UserError) as error:
            check_hashes(folder, "train")
        one_line(error.value, message, str(folder))
    for key in ("fingerprint", "vocab_fingerprint", "tree_settings"):
        index_with(lambda i, key=key: i.pop(key, None))
        with pytest.raises(UserError) as error:
            read_index(folder)[key]
        one_line(error.value, f"index.json is damaged: it has no {key}", str(folder))
    index_with(lambda i: None)
    sidecar = (folder / record.name).with_suffix(".json")
    for change in ({"name": "../x.arrow"}, {"more": 1}, {"rows": "9"}):
        sidecar.write_bytes(json_bytes(asdict(record) | change))
        assert finished_shard(folder, record.name, record.fingerprint) is None


def test_borrowed_stages_are_neighbours_or_absolute(data):
    folder = data / "encoded"
    index = read_index(folder)
    for place, found in [
        ("../other/text", data.parent / "other" / "text"),
        ("/some/where/text", Path("/some/where/text")),
        ("s3://bucket/other/text", as_path("s3://bucket/other/text")),
        ("text", data / "text"),
    ]:
        (folder / "index.json").write_bytes(json_bytes(index | {"stages": {"text": place}}))
        assert stage_folder(data, "text") == found
    for place in ("../../other/text", "../other/parsed", "../..", "/etc", "/a/../etc/text", "x/text", "", "..", "/a\0/text"):
        (folder / "index.json").write_bytes(json_bytes(index | {"stages": {"text": place}}))
        with pytest.raises(UserError, match="stages.text must be"):
            stage_folder(data, "text")


def test_recorded_names_stay_inside(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "a", outside):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "own").symlink_to(root / "a")
    assert inside(root, "a/b.txt") == root / "a" / "b.txt" and inside(root, "own/x") == root / "own" / "x"
    assert inside(as_path("s3://b/run"), "a/b") == as_path("s3://b/run/a/b")
    for name in ("", ".", "/etc/passwd", "..", "a/../../x", "../root/a", "a\0b"):
        for place in (root, as_path("s3://b/run")):
            with pytest.raises(UserError, match="does not name a file in that folder"):
                inside(place, name)
    with pytest.raises(UserError, match="behind a link that leads out of"):
        inside(root, "link/x")


def test_names_in_ledgers_scores_and_checkpoints_stay_inside(tmp_path):
    (tmp_path / LEDGER).write_bytes(json_bytes({"cells": {"../../x": {"labels": {}, "settings": {}, "data_fingerprint": ""}}}))
    with pytest.raises(UserError, match="does not name a file in that folder"):
        Ledger.read(tmp_path)
    (tmp_path / "run" / "translations.x").mkdir(parents=True)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret\n")
    (tmp_path / "run" / "scores.json").write_bytes(
        json_bytes({"x/../../secret": {"translations_sha256": file_sha256(secret), "split": "test"}})
    )
    with pytest.raises(UserError, match="does not name a file in that folder"):
        read_system(tmp_path / "run", "x/../../secret")
    facts = {"bytes": secret.stat().st_size, "sha256": file_sha256(secret)}
    (tmp_path / "run" / WEIGHTS).write_text("secret\n")
    for more, whole in (({}, True), ({"../secret.txt": facts}, False), ({str(secret): facts}, False)):
        (tmp_path / "run" / META).write_bytes(json_bytes(_seal({"files": {WEIGHTS: facts, **more}})))
        assert is_complete(tmp_path / "run") is whole


def test_locks_and_outputs_are_never_written_through_links(tmp_path, monkeypatch):
    monkeypatch.setattr("treeproc.common.files.temporary_beside", lambda path: path.with_name(f".tmp-guessed-{path.name}"))
    target, out = tmp_path / "target", tmp_path / "out"
    target.write_text("precious")
    out.mkdir()
    for make in (lambda path: path.symlink_to(target), lambda path: path.mkdir(), lambda path: os.mkfifo(path)):
        make(out / ".lock")
        with pytest.raises(UserError, match=r"\.lock must be a lock file, but is a link or not a regular file"), locked(out):
            pass
        os.rmdir(out / ".lock") if (out / ".lock").is_dir() else (out / ".lock").unlink()
    os.link(target, out / ".lock")
    with locked(out), pytest.raises(UserError, match="another process is writing"), locked(out):
        pass
    temporary = out / ".tmp-guessed-result.txt"
    for make in (temporary.symlink_to, temporary.hardlink_to):
        make(target)
        atomic_write(out / "result.txt", b"new")
    assert target.read_text() == "precious" and (out / "result.txt").read_text() == "new"

    cache = tmp_path / "cache"
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(cache))
    run = as_path("s3://bucket/run")
    with locked(run), pytest.raises(UserError, match="another process is writing to s3://bucket/run"), locked(run):
        pass
    (lock,) = (cache / "locks").iterdir()
    assert (cache / "locks").stat().st_mode & 0o777 == 0o700
    lock.unlink()
    lock.symlink_to(target)
    with pytest.raises(UserError, match="must be a lock file, but is a link"), locked(run):
        pass
    shutil.rmtree(cache / "locks")
    (cache / "locks").symlink_to(out)
    with pytest.raises(UserError, match="must be a folder that belongs to you"), locked(run):
        pass
    assert target.read_text() == "precious"


def test_a_compressed_checkpoint_is_refused(tmp_path):
    """PyTorch would unpack it: a thousand times its size."""
    from treenet.runs.checkpoint import TRAINER, take_snapshot, write_checkpoint
    from treenet.runs.checkpoint_io import load_checkpoint

    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = write_checkpoint(tmp_path, take_snapshot(1, model, optimizer, {}, {"data_fingerprint": "x"}), keep=1)
    load_checkpoint(folder, model, optimizer)
    with zipfile.ZipFile(folder / TRAINER) as old, zipfile.ZipFile(folder / "new", "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    os.replace(folder / "new", folder / TRAINER)
    with pytest.raises(UserError, match=r"trainer.pt is not a PyTorch file: its parts are compressed"):
        load_checkpoint(folder, model, optimizer)


def test_a_line_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("treeproc.readers.numbered_lines.MOST_LINE_BYTES", 1 << 17)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"a line\n" * 100_000 + b"x" * (1 << 22)))
    with pytest.raises(UserError, match=r"x.gz has a line of more than"):
        list(read_lines([tmp_path / "x.gz"]))
    (tmp_path / "x.json").write_bytes(b"[" * 100_000)
    with pytest.raises(UserError, match=r"cannot read .*x.json"):
        read_json(tmp_path / "x.json")


def test_text_gives_a_terminal_no_commands(data, capsys):
    labels = data / "encoded" / "vocab" / "labels.txt"
    labels.write_text(labels.read_text().replace("NP", "\x1b]0;title\x07NP\x1b[2J"))
    inspect([str(data)])
    printed = capsys.readouterr().out
    assert r"\x1b]0;title\x07NP" in printed and "\x1b" not in printed and "\x07" not in printed


def test_nothing_in_the_source_unpickles():
    """torch.load takes weights alone, NumPy no pickles, YAML no tags of Python."""
    root = Path(__file__).resolve().parent.parent
    for path in [*root.glob("treeproc/**/*.py"), *root.glob("treenet/**/*.py"), *root.glob("workflows/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (pickle|cloudpickle|dill|joblib|marshal|shelve)\b", text, re.M), path
        assert not re.search(r"allow_pickle|yaml\.(full_load|unsafe_load|Loader|UnsafeLoader|FullLoader)|\bexec\(", text), path
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, (path, call)
        if path.name != "arrow_file.py":  # every Arrow file is read there
            assert "ipc.open" not in text and "read_message" not in text and "parquet" not in text, path
