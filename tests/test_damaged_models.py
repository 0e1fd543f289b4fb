"""Parser models that are cut off, changed, exchanged or hostile: one line that names the file, and nothing is executed."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from treeproc.common.settings import UserError
from treeproc.parsers import ParserConfig, build_parser, describe_parser
from treeproc.parsers.model_files import SHIPPED_MODELS

pytestmark = pytest.mark.slow

MODELS = ("tokenizer", "pos", "constituency", "vectors")


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def folder(tmp_path):
    """The shipped models as links."""
    models = tmp_path / "models"
    models.mkdir()
    for path in (SHIPPED_MODELS / "en").iterdir():
        (models / path.name).symlink_to(path)
    return models


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def flipped(content: bytes, place: float = 0.5) -> bytes:
    content = bytearray(content)
    content[int(place * len(content))] ^= 1
    return bytes(content)


def compressed(path: Path) -> None:
    path.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))


DAMAGES = {
    "cut off": lambda path: replace(path, path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: replace(path, b""),
    "a flipped bit": lambda path: replace(path, flipped(path.read_bytes())),
    "a flipped bit at the end": lambda path: replace(path, flipped(path.read_bytes(), 0.99)),
    "text": lambda path: replace(path, b"<html>404</html>\n" * 100),
    "zeros": lambda path: replace(path, bytes(path.stat().st_size)),
    "compressed": compressed,
}


def refused(folder: Path, load: bool) -> str:
    config = ParserConfig(models=folder)
    with pytest.raises(UserError) as error:
        build_parser(config) if load else describe_parser(config)
    assert "\n" not in str(error.value) and len(str(error.value)) < 490 and "tree-attention train-parser" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_found_before_work_begins(folder, name, damage):
    DAMAGES[damage](folder / f"{name}.pt")
    assert str(folder / f"{name}.pt") in refused(folder, load=False)


@pytest.mark.parametrize("damage", ["cut off"])
def test_a_damaged_model_of_a_folder_without_hashes(folder, damage):
    (folder / "scores.json").unlink()
    DAMAGES[damage](folder / "constituency.pt")  # of the form that has no checksums
    assert "constituency.pt" in refused(folder, load=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [("pos", {}), ("tokenizer", [1, 2]), ("constituency", {"params": {"model": {}, "config": {}}}), ("vectors", {"vocab": 3})],
)
def test_a_file_of_something_else_is_one_line(folder, name, content):
    (folder / "scores.json").unlink()
    (folder / f"{name}.pt").unlink()
    torch.save(content, folder / f"{name}.pt")
    assert f"{name}.pt" in refused(folder, load=True)


def test_exchanged_models_are_one_line(folder):
    os.rename(folder / "pos.pt", folder / "other.pt")
    os.rename(folder / "tokenizer.pt", folder / "pos.pt")
    os.rename(folder / "other.pt", folder / "tokenizer.pt")
    assert "is not the model that" in refused(folder, load=False)
    (folder / "scores.json").unlink()
    assert "of different trainings" in refused(folder, load=True)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_model_is_not_executed(folder, tmp_path, name, zipped):
    (folder / "scores.json").unlink()
    (folder / f"{name}.pt").unlink()
    if zipped:
        torch.save({"model": Payload(tmp_path / "executed")}, folder / f"{name}.pt")
    else:
        (folder / f"{name}.pt").write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    assert str(folder / f"{name}.pt") in refused(folder, load=True)
    assert not (tmp_path / "executed").exists()
