"""Runs in zip files: the same results from both layouts and from a store, and zips that mean harm."""

import os
import pickle
import shutil
import stat
import zipfile
from pathlib import Path

import pytest
from commands import run_here
from folder_store import store  # noqa: F401  # a fixture
from hostile_files import Payload
from search_runs import write_run, write_vocabulary

from treenet import UserError, from_pretrained, load_run
from treeproc.common.storage import as_path

pytestmark = pytest.mark.slow

LINES = ["ba de", "gu ki bo da", "ke"]


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """A saved run, with a cache of this test."""
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))
    load_run(write_run(tmp_path / "run", write_vocabulary(tmp_path / "data"))).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def pack(saved: Path, top: str = "", name: str = "run.zip", compression: int = zipfile.ZIP_DEFLATED) -> Path:
    out = saved.parent / name
    with zipfile.ZipFile(out, "w", compression) as archive:
        for path in sorted(saved.rglob("*")):
            archive.write(path, top + str(path.relative_to(saved)))
    return out


@pytest.mark.parametrize("top", ["", "saved/"])
def test_a_zip_is_the_run(saved, top):
    expected = load_run(saved).candidates(LINES, num_best=3)
    packed = pack(saved, top)
    shutil.rmtree(saved)
    assert (
        from_pretrained(packed).candidates(LINES, num_best=3)
        == from_pretrained(str(packed)).candidates(LINES, num_best=3)
        == expected
    )
    assert len([path for path in (saved.parent / "cache" / "runs").iterdir() if not path.name.startswith(".")]) == 1


def test_what_was_unpacked_is_unpacked_again_where_it_is_damaged(saved):
    """As by programs that remove old files from a cache."""
    packed = pack(saved)
    expected = from_pretrained(packed).candidates(LINES, num_best=3)
    (weights,) = (saved.parent / "cache" / "runs").glob("run.zip-*/averaged/model.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert from_pretrained(packed).candidates(LINES, num_best=3) == expected and weights.read_bytes() == content
    weights.unlink()
    assert from_pretrained(packed).candidates(LINES, num_best=3) == expected


def test_another_zip_of_the_same_name_is_another_run(saved):
    first = from_pretrained(pack(saved)).candidates(LINES, num_best=3)
    write_run(saved.parent / "other", saved.parent / "data", seed=2)
    expected = load_run(saved.parent / "other").candidates(LINES, num_best=3)
    load_run(saved.parent / "other").save_pretrained(saved.parent / "saved2")
    assert from_pretrained(pack(saved.parent / "saved2")).candidates(LINES, num_best=3) == expected != first


def test_a_store_has_the_folder_or_the_zip(saved, store):  # noqa: F811
    expected = load_run(saved).candidates(LINES, num_best=3)
    shutil.copytree(saved, saved.parent / "store" / "bucket" / "run")
    shutil.copy(pack(saved), saved.parent / "store" / "bucket" / "run.zip")
    for place in ("s3://bucket/run", "s3://bucket/run.zip", as_path("s3://bucket/run.zip")):
        assert from_pretrained(place).candidates(LINES, num_best=3) == expected


def test_commands_read_a_zip_and_write_nothing_beside_it(saved):
    packed, lines = pack(saved), saved.parent / "lines"
    lines.write_text("\n".join(LINES) + "\n")
    result = run_here("translate.py", "--out", packed, f"input={lines}", f"output={saved.parent / 'out'}")
    assert result.returncode == 0, result.stderr
    assert (saved.parent / "out").read_text().splitlines() == load_run(saved).translate(LINES)
    linked, exported = (saved.parent / name for name in ("links", "exported"))
    align = ("align.py", "--out", packed, f"input={lines}", f"target={saved.parent / 'out'}", f"output={linked}")
    for arguments in (align, ("export.py", packed, "--out", exported)):
        result = run_here(*arguments)
        assert result.returncode == 0, result.stderr
    assert len(linked.read_text().splitlines()) == len(LINES) and load_run(exported).translate(LINES)
    result = run_here("evaluate.py", "--out", packed, f"data={saved.parent / 'data'}")
    assert result.returncode == 2 and "unpack the zip, and give the folder" in result.stderr and result.stderr.count("\n") == 1


def member(name: str, content: bytes = b"x", mode: int = 0) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
    return info, content


HOSTILE = {
    "above": (member("../evil"), "does not name a file in its folder"),
    "above inside": (member("data/../../evil"), "does not name a file in its folder"),
    "absolute": (member("/evil"), "does not name a file in its folder"),
    "backslashes": (member("data\\..\\..\\evil"), "does not name a file in its folder"),
    "drive": (member("C:/evil"), "does not name a file in its folder"),
    "link": (member("link", b"/etc", stat.S_IFLNK | 0o777), "is a link or a device"),
    "pipe": (member("pipe", b"", stat.S_IFIFO | 0o666), "is a link or a device"),
    "bomb": (member("data/zeros", bytes(10_000_000)), "would become 10,000,000 bytes"),
    "twice": (member("./config.yaml"), "has a file twice"),
    "file and folder": (member("averaged"), "one that is a folder too"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused(saved, case):
    packed, (one, message) = pack(saved), HOSTILE[case]
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr(*one)
    before = set(saved.parent.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        from_pretrained(packed)
    assert "\n" not in str(error.value)
    assert {path.name for path in set(saved.parent.rglob("*")) - before} <= {"cache", "runs", ".unpack-lock"}
    assert not Path("/evil").exists()


def damage(packed: Path, member_name: str) -> None:
    with zipfile.ZipFile(packed) as archive:
        place = archive.getinfo(member_name).header_offset
    content = bytearray(packed.read_bytes())
    content[place + 30 + len(member_name) + 40] ^= 1
    packed.write_bytes(content)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_is_refused(saved, compression):
    packed = pack(saved, compression=compression)
    damage(packed, "averaged/model.safetensors")
    for _ in range(2):  # nothing half unpacked is taken for the run
        with pytest.raises(UserError, match="is damaged or not a zip file") as error:
            from_pretrained(packed)
        assert "\n" not in str(error.value)


def test_files_that_are_no_zip_of_a_run(saved):
    cut = saved.parent / "cut.zip"
    cut.write_bytes(pack(saved).read_bytes()[:-100])
    (saved.parent / "text.zip").write_text("hello")
    with zipfile.ZipFile(saved.parent / "other.zip", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with zipfile.ZipFile(saved.parent / "several.zip", "w") as archive:
        for run in ("two", "one"):
            archive.writestr(f"{run}/config.yaml", "seed: 1")
    of_each = {
        "cut": "damaged or not a zip", "text": "damaged or not a zip", "other": "not the zip of a run",
        "several": r"has several runs \(one, two\); zip the folder of one",
    }  # fmt: skip
    for name, message in of_each.items():
        with pytest.raises(UserError, match=message) as error:
            from_pretrained(saved.parent / f"{name}.zip")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="is not a run"):
        from_pretrained(saved.parent / "missing.zip")


def test_loading_executes_nothing(saved, tmp_path):
    mark = tmp_path / "executed"
    harm = pickle.dumps(Payload(mark))
    for name in ("averaged/model.safetensors", "averaged/trainer.pt", "data/encoded/vocab/pieces.model"):
        folder = shutil.copytree(saved, tmp_path / "harm")
        (folder / name).write_bytes(harm)
        (folder / "modeling.py").write_text(f"open({str(mark)!r}, 'w')")
        for place in (folder, pack(folder, name=f"{os.path.basename(name)}.zip")):
            if name.endswith("trainer.pt"):
                from_pretrained(place).translate(LINES)
            else:
                with pytest.raises(UserError) as error:
                    from_pretrained(place)
                assert "\n" not in str(error.value)
        assert not mark.exists()
        shutil.rmtree(folder)
