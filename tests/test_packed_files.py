"""Compressed files and archives: damage, limits, and members other than plain files."""

import bz2
import gzip
import io
import lzma
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from treeproc.common.settings import UserError
from treeproc.readers import packed_files, read_lines, read_rows
from treeproc.readers.numbered_lines import read_texts
from treeproc.readers.packed_files import open_input

TEXTS = {f"top/{'pos' if i % 2 else 'neg'}/{i:03}.txt": f"Text {i} is {i * i}, ü.\nEnd".encode() for i in range(200)}
PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
LINES = b"".join(b"line %d\n" % i for i in range(300))


def tar(mode: str, files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=form) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def texts_of(path: Path) -> list[tuple[str, list[str]]]:
    return [(name, list(lines)) for name, lines in read_texts([path])]


def damaged(content: bytes, seed: int, flips: int, cuts: int) -> list[tuple[int, bytes]]:
    """Copies with one bit flipped, and beginnings; with the damaged byte."""
    rng, out = random.Random(seed), []
    for place in rng.sample(range(8 * len(content)), flips):
        copy = bytearray(content)
        copy[place // 8] ^= 1 << place % 8
        out.append((place // 8, bytes(copy)))
    return out + [(place, content[:place]) for place in rng.sample(range(len(content)), cuts)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_standard_input_that_a_file_gives_is_read_from_where_it_stands(name, tmp_path):
    """As a pipe gives it, after `read -r header` of the shell, in every pass."""
    (tmp_path / "h.txt").write_bytes(b"header\n" + LINES)
    read = "import os, pathlib, sys; from treeproc.readers.numbered_lines import read_byte_lines; os.read(0, 7); "
    read += "print([b'\\n'.join(read_byte_lines(pathlib.Path(sys.argv[1]))) for _ in range(2)])"
    with (tmp_path / "h.txt").open("rb") as file:
        done = subprocess.run([sys.executable, "-c", read, name], stdin=file, capture_output=True, check=True, timeout=100)
    assert done.stdout.decode().strip() == repr([LINES.rstrip(b"\n")] * 2)


@pytest.mark.parametrize(
    ("suffix", "tries"), [("zip", 40), ("tar.gz", 60), ("tgz", 30), ("tar.bz2", 40), ("tar.xz", 40), ("txt.gz", 60)]
)
def test_damage_is_seen_wherever_it_is(suffix, tries, tmp_path):
    """One bit or a cut gives the same text, as in gzip's time of change, or one line that names the file."""
    path, read = tmp_path / f"a.{suffix}", (lambda p: list(read_lines([p]))) if suffix == "txt.gz" else texts_of
    if suffix == "zip":
        content = zipped(TEXTS)
    else:
        content = gzip.compress(LINES) if suffix == "txt.gz" else tar(f"w:{suffix[-3:].strip('.t')}", TEXTS)
    path.write_bytes(content)
    whole, same = read(path), 0
    assert len(whole) == (300 if suffix == "txt.gz" else 200)
    for _, copy in damaged(content, 1, tries, tries // 3):
        path.write_bytes(copy)
        try:
            assert read(path) == whole
            same += 1
        except UserError as error:
            assert str(error).startswith(f"cannot read {path}: ") and "\n" not in str(error)
    assert same < tries / (2 if suffix == "zip" else 10)  # zip has times and modes twice for each of its small files


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_a_plain_tar_has_whole_headers_and_an_end(form, tmp_path, caplog):
    """Only flips in the data of its files pass, as a warning says."""
    path = tmp_path / "a.tar"
    content = tar("w", dict(list(TEXTS.items())[:40]), form)
    path.write_bytes(content)
    whole = texts_of(path)
    assert len(whole) == 40 and "a.tar has no checksum of its data" in caplog.text
    for place, copy in damaged(content, 2, 90, 40):
        path.write_bytes(copy)
        try:
            found = texts_of(path)
            assert found == whole or (len(copy) == len(content) and place % 1024 >= 512 and place < 40 * 1024)
        except UserError as error:
            assert str(error).startswith(f"cannot read {path}: ") or "not valid UTF-8" in str(error)


def test_every_cut_between_members_is_seen(tmp_path):
    content, path = tar("w", dict(list(TEXTS.items())[:3])), tmp_path / "a.tar"
    for place in range(0, 3 * 1024 + 1024, 512):
        path.write_bytes(content[:place])
        with pytest.raises(UserError, match=r"a.tar: it has no end mark"):
            texts_of(path)
    path.write_bytes(content + tar("w", {"b": b"b"}))
    with pytest.raises(UserError, match=r"a.tar: it goes on after its end mark"):
        texts_of(path)


@pytest.mark.parametrize("suffix", PACK)
def test_streams_one_after_the_other(suffix, tmp_path):
    path, pack = tmp_path / f"a.{suffix}", PACK[suffix]
    parts = [pack(b"one\ntw"), pack(b""), pack(b"o\nthree\n")]
    path.write_bytes(b"".join(parts) + bytes(512))
    assert list(read_lines([path])) == ["one", "two", "three"]
    packed_twice = pack(pack(b"one\n"))
    for content, message in (
        (b"".join(parts) + b"more", f"a.{suffix}: other bytes follow its end"),
        (b"".join(parts)[:-5], f"a.{suffix}: it ends inside its|a.{suffix}: its .* data is damaged"),
        (parts[0] + parts[2][:4], f"a.{suffix}: it ends inside its"),
        (b"", f"a.{suffix}: it is not a .* file, but its name says so"),
        (b"text\n", f"a.{suffix}: it is not a .* file, but its name says so"),
        (packed_twice, f"a.{suffix} is an? .* file, but must be text"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            list(read_lines([path]))
    (tmp_path / "a.txt").write_bytes(parts[0])
    with pytest.raises(
        UserError, match=rf"a.txt is an? .* file, but must be text; rename it so that its name ends in \.{suffix}"
    ):
        list(read_lines([tmp_path / "a.txt"]))


def test_content_is_that_of_the_reference(tmp_path):
    """Blocks of any size, streams whose content is far longer than they are."""
    content = random.Random(0).randbytes(200_000) + bytes(3_000_000) + b"end"
    for suffix, pack in PACK.items():
        (tmp_path / f"a.{suffix}").write_bytes(pack(content[:150_000]) + pack(content[150_000:]))
        for size in (1000, 1 << 20, -1):
            with open_input(tmp_path / f"a.{suffix}") as file:
                assert b"".join(iter(lambda: file.read(size), b"")) == content  # noqa: B023


def test_a_dictionary_has_a_limit(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(LINES, preset=9))
    assert len(list(read_lines([path]))) == 300
    monkeypatch.setattr(packed_files, "_XZ_MEMORY", 60 << 20)
    with pytest.raises(UserError, match=f"cannot read {path}: it needs more than 60 MiB of memory to unpack; pack it again"):
        list(read_lines([path]))


def test_an_archive_has_limits(tmp_path, monkeypatch):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar("w:gz", {"a/x.txt.gz": gzip.compress(b"x" * (1 << 22)), "b/y.txt": b"y"}))
    assert path.stat().st_size < 5000 and texts_of(path / "b")[0][1] == ["y"]
    monkeypatch.setattr("treeproc.readers.numbered_lines.MOST_LINE_BYTES", 1 << 20)
    with pytest.raises(UserError, match=r"a/x.txt.gz has a line of more than 1 MiB"):
        texts_of(path)
    monkeypatch.setattr(packed_files, "MOST_ARCHIVE_BYTES", 1 << 20)
    with pytest.raises(UserError, match=r"a.tar.gz: its files have more than 1 MiB; unpack it"):
        texts_of(path)
    assert texts_of(path / "b")[0][1] == ["y"]
    path.write_bytes(tar("w:gz", {f"{i}.txt": bytes(300_000) for i in range(4)}))
    with pytest.raises(UserError, match=r"a.tar.gz: its files have more than 1 MiB; unpack it"):
        texts_of(path)


def member(name: str, change: Callable[[tarfile.TarInfo], object] = lambda info: None, content: bytes = b"x") -> bytes:
    """A header and the data of a file, without an end."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    change(info)
    has_data = info.type in (tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + (content.ljust(512, b"\0") if has_data else b"")


def of_type(kind: bytes) -> Callable[[tarfile.TarInfo], object]:
    return lambda info: setattr(info, "type", kind)


def test_what_is_left_out_is_counted(tmp_path, caplog):
    names = ["./b.txt", "/abs.txt", "top/\udcff.txt", f"{'long/' * 40}a.txt"]
    others = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE]
    parts = [*map(member, names), *(member(f"o{i}", of_type(kind)) for i, kind in enumerate(others)), member("top/.hidden")]
    (tmp_path / "a.tar").write_bytes(b"".join(parts) + bytes(1024))
    assert [name for name, _ in texts_of(tmp_path / "a.tar")] == [
        f"{tmp_path}/a.tar/{name}" for name in ["abs.txt", "b.txt", f"{'long/' * 40}a.txt", "top/\udcff.txt"]
    ]
    assert "a.tar has entries that are left out (devices or pipes: 2, hidden files: 1, links: 2)" in caplog.text
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x.txt").write_text("x")
    (folder / ".hidden").write_text("x")
    (folder / "other").symlink_to(folder / "sub")
    (folder / "gone").symlink_to(folder / "nothing")
    (folder / "link.txt").symlink_to(folder / "sub" / "x.txt")
    assert [name for name, _ in texts_of(folder)] == [str(folder / "link.txt"), str(folder / "sub" / "x.txt")]
    assert "folder has entries that are left out (hidden files: 1, links to folders: 1, links to nothing: 1)" in caplog.text
    texts_of(folder)
    assert caplog.text.count("folder has entries that are left out") == 1  # a command reads its input twice


def test_copies_in_hidden_folders_are_left_out(tmp_path):
    names = [".data/r.csv", ".data/.ipynb_checkpoints/r-checkpoint.csv", ".data/sub/.git/r.csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "a.tar").write_bytes(b"".join(map(member, names)) + bytes(1024))
    for folder in (tmp_path / ".data", tmp_path / "a.tar" / ".data"):
        assert [name for name, _ in texts_of(folder)] == [f"{folder}/r.csv"]
    (tmp_path / "a.tar").write_bytes(member("sub/../r.csv") + bytes(1024))
    with pytest.raises(UserError, match="leads out of it"):
        texts_of(tmp_path / "a.tar")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([member("a.txt"), member("./a.txt")], "two of its files have the name 'a.txt'"),
        ([member("a/b.txt"), member("a//b.txt")], "two of its files have the name 'a/b.txt'"),
        ([member("a/b.txt"), member("././a/./b.txt")], "two of its files have the name 'a/b.txt'"),
        ([member("a/../../b")], "the name 'a/../../b' of a file leads out of it"),
        ([member("a", of_type(tarfile.GNUTYPE_SPARSE))], "the file 'a' is sparse"),
        ([member("a", lambda i: i.pax_headers.update({"GNU.sparse.major": "1"}))], "the file 'a' is sparse"),
        ([member("a", lambda i: i.pax_headers.update({"size": "-7"}))], "the size of 'a' is '-7'"),
        ([member("a", lambda i: i.pax_headers.update({"size": "99999"}))], "it has no end mark"),
        ([member("a", of_type(b"x"), b"30 path=b\n")], "a pax header is damaged"),
        ([member("a", of_type(b"L"), b"name")], "it ends after the name of a file"),
        ([member("a", lambda i: setattr(i, "size", 1 << 40))], "it has no end mark"),
        ([b"no header".ljust(512, b"\0")], "it is not a tar archive, or is damaged: bad checksum in the header at byte 0"),
        ([member("a"), b"no header".ljust(512, b"\0")], "it is damaged: bad checksum in the header at byte 1024"),
    ],
)  # fmt: skip
def test_archives_that_are_refused(parts, message, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"".join(parts) + bytes(1024))
    with pytest.raises(UserError, match=f"cannot read .*a.tar: ({message})"):
        texts_of(tmp_path / "a.tar")


def test_an_archive_is_no_file_of_lines(tmp_path):
    for name, mode in (("a.tar.gz", "w:gz"), ("a.tar", "w"), ("d/a.tar", "w")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(tar(mode, TEXTS))
        with pytest.raises(UserError, match=rf"{name} is a tar archive, but must be text; unpack it"):
            list(read_lines([tmp_path / name]))
    with pytest.raises(UserError, match=r"d/a.tar is a tar archive"):
        texts_of(tmp_path / "d")
    (tmp_path / "b.tar").write_bytes(tar("w", {"a.tar.gz": tar("w:gz", TEXTS)}))
    with pytest.raises(UserError, match=r"b.tar/a.tar.gz is a tar archive"):
        texts_of(tmp_path / "b.tar")


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.bz2", "tar.xz", "tar"])
def test_reviews_of_any_archive(suffix, tmp_path):
    packed = {f"{name}.{kind}": pack(TEXTS[name]) for name, (kind, pack) in zip(TEXTS, PACK.items(), strict=False)}
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(tar(f"w:{suffix[4:]}", packed | dict(list(TEXTS.items())[3:])))
    rows = list(read_rows("imdb", [path / "top"], []))
    assert [row["source"] for row in rows] == [TEXTS[name].decode().replace("\n", " ") for name in sorted(TEXTS)]
