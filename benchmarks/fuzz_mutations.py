"""Damage to settings, to files of any kind, and to folders. Every function draws from the given `Random`."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml
from pydantic import BaseModel

from treeproc.common.setting_errors import setting_names

BOMB = "a0: &a0 [x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))

# Values as YAML has them.
VALUES = (
    "true", "false", "null", "0", "-1", "1.5", "1e308", "1e-308", "1000000000000", "99999999999999999999", ".nan", ".inf", "-0.0",
    '""', "x", "[]", "{}", "[1, 2]", "[[[]]]", "{a: {b: 1}}", '"\\0"', '"\\ud800"', '"a\\nb"', '"\\u202e"', "'http://a b'",
    "../..", "/dev/null", "/proc/nowhere/x", "/dev/full", "~", "s3://", "file:///etc/passwd", "2024-01-01", "0x10",
    "1_000", "٣", "!!python/object:os.system x", "!!binary x", "*nothing", "&a [*a]", "9" * 5000, "x" * 5000,
    "[" * 500 + "]" * 500,
    "[" + ",".join("1" for _ in range(3000)) + "]", "'%s%n'", "'$(touch x)'", "..", "/", "|", "{", "]", "@", "`", "\t", "- a",
    "a: b",
)  # fmt: skip
# More of these makes a correct run longer than the fuzzer's limit.
_LENGTHS = ("max_steps", "epochs", "patience", "seeds", "evaluations", "taggings", "max_iterations", "bootstrap_samples", "num")
_LONG = ("1e308", "1000000000000", "[1, 2]")
_NAMES = (
    "", "x" * 300, "a\nb", "\0", "\udcff", "é", "名前", "a b", "$HOME", "-rf", "%s", "\u202e", "con.",
    "x" * 5000,
)  # fmt: skip
# Possible contents of a JSON value, a line of text, or a folder.
_JSON = (
    None, True, -1, 0, 10**30, 1e308, "", "x", "../../x", "/etc/passwd", [], {}, [1], {"a": 1}, "a\nb", "\ud800", "x" * 9999,
)  # fmt: skip
_LINES = (
    "", "x " * 3000, "x" * 50_000, "(" * 5000, ")", "()", "\t", "\0", "\u2028", "1\t2", "(S", "((((x))))", "999999999999",
    "١\tx\t_\t_\t_\t_\t٠\tx\t_\t_", "# text = x",
)  # fmt: skip
# Parts of words and labels that separate, join or escape something somewhere.
_ODD = (
    "\u2028", "\x85", "\x1c", "\x0b", "\r", "\x01", "\0", "\t", "\xa0", "\u3000",
    "\u200b", "\ufeff", "\xad", "\u3164", "\ufe0f", "e\u0301", "\u212b", "\u2581",
    "##", "@@", "-LRB-", "\\/", "&amp;", "&#10;", "<unk>", "</s>", "<0x41>",
    "<bt>", "POS=DT", "-NONE-", "|", "=", "-", "\U0001f600",
    "\ufffd", "\u0130", "<seg id=\"1\">", "1-2", "_", "SpaceAfter=No",
)  # fmt: skip
_STRANGERS = ("step_9999999x", "step_00000009", "step_-0000001", "step_00000002x", "index.json", ".lock", "averaged")
_DOCUMENTS = (
    BOMB, "[" * 3000, "a: " * 3000, "&a [*a]", "- a", "x", "", "#", "%YAML 9.9\n---\na", "? [a]\n: b", "a: 1\n---\nb: 2",
    "!!python/object/apply:os.system [x]", "a: !!timestamp x", "{" * 40, "#" * 2_000_000,
)  # fmt: skip


def _set(values: dict, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            return
    values[last] = value


def override(random: Random, cls: type[BaseModel]) -> str:
    """Return a setting of a class with an arbitrary value."""
    name = random.choice([name for name in setting_names(cls) if "NAME" not in name])
    of_length = name.rpartition(".")[2] in _LENGTHS
    value = random.choice([value for value in VALUES if not (of_length and value in _LONG)])
    return f"{name}={value}"


def misspelt(random: Random, cls: type[BaseModel]) -> str:
    """Return a setting with a misspelt name."""
    name = random.choice(setting_names(cls))
    place = random.randrange(len(name))
    other = random.choice(
        [name[:place] + name[place + 1 :], name[:place] + random.choice("._-x\n=é\0") + name[place:], name.rpartition(".")[2],
         name.upper(), name.replace("_", "-"), f"{name}.x", f"x.{name}", ".".join([name] * 30), random.choice(_NAMES)]
    )  # fmt: skip
    return f"{other}={random.choice(['1', 'x', 'true', ''])}"


def arguments(random: Random, cls: type[BaseModel], valid: list[str], out: Path) -> list[str]:
    """Return a command line with options that conflict, are malformed, or mislead."""
    name = random.choice(setting_names(cls))
    wild = random.choice(_NAMES)
    more = [
        [f"--{name}", "10"], [f"--{name}=10"], ["--out", ""], ["--out", wild], ["--out", "/proc/nowhere"], ["--out", "/dev/null"],
        ["--out", str(out / ("x" * 300))], ["--out", "/dev/null/x"], ["--config", wild], ["--config", "/dev/null"],
        ["--config", str(out.parent)], ["--config", "/proc/self/mem"], ["--config", "/dev/zero"], [wild], ["--sample"],
        ["--nothing"], [f"{name}"], ["--"], ["--out"], ["-x"], [f"{name}="], ["=1"], ["=" * 50], ["--dry-run", "--dry-run", wild],
    ]  # fmt: skip
    found = [*valid, *random.choice(more)]
    if random.random() < 0.3:
        del found[random.randrange(len(found))]
    return found


def yaml_text(random: Random, cls: type[BaseModel], values: dict) -> bytes:
    """Return a configuration with an error in it, or in its bytes."""
    values = json.loads(json.dumps(values))
    kind = random.randrange(6)
    if kind == 0:
        name = random.choice(setting_names(cls))
        _set(values, name, random.choice([None, True, "x" * 99_999, -1, [], {}]))
    elif kind == 1:
        del values[random.choice([name for name in values if name not in ("max_steps", "grid", "model", "workers")])]
    elif kind == 2:
        wrong = random.choice(["model", "nam", "x" * 9999, "a\nb", "\u202e", "seeed", "beam_size", "1"])
        values[wrong] = random.choice([1, {}, None])
    text = yaml.safe_dump(values)
    if kind == 3:
        text = random.choice([*_DOCUMENTS, text + text, text + f"\n{random.choice(list(values))}: 1"])
    if kind == 4:
        lines = text.split("\n")
        place = random.randrange(len(lines))
        lines[place : place + 1] = [f"{lines[place].partition(':')[0]}: {random.choice(VALUES)}"]
        text = "\n".join(lines)
    content = text.encode("utf-8", "surrogatepass")
    return damaged_bytes(random, content) if kind == 5 else content


def damaged_bytes(random: Random, content: bytes) -> bytes:
    """Return bytes with flipped bits, cut, repeated, mixed, in another encoding, or replaced."""
    place = random.randrange(len(content) + 1)
    noise = bytes(random.randrange(256) for _ in range(random.choice([1, 4, 40])))
    kind = random.randrange(12)
    if kind == 0 and content:
        at = random.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]
    return (
        content[:place] + noise + content[place + len(noise) :],
        content[:place],
        content[:place] + noise + content[place:],
        content[:place] + content[place // 2 : place] + content[place:],
        b"",
        b"\0" * len(content),
        b"\x89PNG\r\n\x1a\n" + noise,
        gzip.compress(content),
        gzip.compress(content)[: place // 2 + 5],
        content.decode("latin-1").encode("utf-16"),
        b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"),
        content + content,
    )[kind]


def damaged_json(random: Random, value: Any) -> Any:
    """Return a JSON value with one part removed, renamed, or replaced by one of another type."""
    places = list(_places(value))
    if not places:
        return random.choice([None, [], 1, "x"])
    # Half of the time it takes a top-level key, which would be rare among the many parts below.
    top = [(value, key) for key in value] if isinstance(value, dict) else places
    parent, key = random.choice(top if random.randrange(2) else places)
    kind = random.randrange(4)
    if kind == 0 and isinstance(parent, dict):
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    else:
        parent[key] = random.choice(_JSON)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def damaged_content(random: Random, path: Path) -> bytes:
    """Return other content for a file: values of JSON, lines of text, else bytes."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and random.random() < 0.7:
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        place = random.randrange(len(lines)) if lines else 0
        if lines:
            lines[place] = json.dumps(damaged_json(random, json.loads(lines[place]))).encode()
        return b"\n".join(lines) + b"\n" * bool(random.randrange(3))
    if path.suffix in (".yaml", ".txt", ".en", ".de", ".mrg", ".sst", ".conllu") and random.random() < 0.5:
        lines = content.decode().split("\n")
        for _ in range(random.randint(1, 3)):
            place = random.randrange(len(lines))
            line = lines[place]
            changed = [line * 2, line[::-1], line[: len(line) // 2], line.replace("\t", " "), line.replace("(", "")]
            tokens = re.split(r"([()\s]+)", line)
            at = random.randrange(0, len(tokens), 2)
            tokens[at] = random.choice([tokens[at], ""]) + random.choice(_ODD) + random.choice([tokens[at], ""])
            lines[place] = "".join(tokens) if random.random() < 0.6 else random.choice([*_LINES, *changed])
        return "\n".join(lines).encode()
    return damaged_bytes(random, content)


def damage_file(random: Random, path: Path) -> str:
    """Change a file, or replace it. Returns a description of the damage."""
    kind = random.choice(["content"] * 12 + ["removed", "folder", "loop", "dangling", "device", "other", "link"])
    if kind == "content":
        content = damaged_content(random, path)
        path.write_bytes(content)
        return f"{path.name} damaged"
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to(random.choice(["/dev/null", "/proc/self/status"]))
    elif kind == "link":
        target = path.parent.with_name(f"{path.parent.name}-moved-{path.name}")
        target.write_bytes(content)
        path.symlink_to(target)
    elif kind == "other":
        others = [other for other in path.parent.iterdir() if other.is_file()]
        shutil.copyfile(random.choice(others), path) if others else path.touch()
    return f"{path.name} {kind}"


def damage_folder(random: Random, folder: Path) -> str:
    """Damage one file below a folder, or add names that look like those of a valid folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.name != ".lock")
    if random.random() < 0.1:
        name = random.choice(_STRANGERS)
        place = random.choice([path for path in (folder, *folder.rglob("*")) if path.is_dir()]) / name
        if not os.path.lexists(place):
            place.mkdir() if random.random() < 0.5 else place.write_text("x")
            return f"{name} added"
    # Most files of a run are pictures and logs, which no command reads.
    facts = [path for path in files if path.suffix in (".json", ".jsonl", ".yaml")]
    return damage_file(random, random.choice(facts if facts and random.random() < 0.6 else files))


_PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
PACKED = (".gz", ".bz2", ".xz")


def packed(content: bytes, suffix: str) -> bytes:
    """Return the content as a compressed file with this suffix. `.tar` is not compressed."""
    kind = {"tgz": "gz", "tbz2": "bz2", "txz": "xz"}.get(suffix[1:], suffix.rpartition(".")[2])
    return _PACK[kind](content) if kind in _PACK else content


def archive(random: Random, files: list[tuple[str, bytes]]) -> tuple[bytes, list[tuple[str, int, int]]]:
    """Return a tar archive of the files, and the name, place and length of their data in it. Some archives have other members."""
    stream = io.BytesIO()
    form = random.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    with tarfile.open(fileobj=stream, mode="w", format=form, pax_headers={"comment": "x"}) as tar:
        for name, content in random.sample(files, len(files)):
            if random.random() < 0.2:
                folder = tarfile.TarInfo("folder")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), random.choice([0, 1.5])
            tar.addfile(member, io.BytesIO(content))
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        places = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    return stream.getvalue(), places


def damaged_archive(random: Random, content: bytes) -> tuple[str, bytes]:
    """Return the damage to an archive or compressed file, and the damaged bytes. Some of it is none."""
    kind = random.choice(["none", "flip", "flip", "flip", "cut", "cut", "block", "zeros", "junk", "twice", "swap", "end"])
    at = random.randrange(len(content))
    block = at // 512 * 512
    if kind == "flip":
        return f"flip at {at}", content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]
    return kind, {
        "none": content,
        "cut": content[:at],
        "block": content[:block],
        "end": content[: len(content) - random.randint(1, 2048)],
        "zeros": content[:block] + bytes(min(512, len(content) - block)) + content[block + 512 :],
        "junk": content + bytes(random.choice([0, 0, 512])) + random.choice([b"x", b"\n", b"\x1f\x8b"]),
        "twice": content + content,
        "swap": content[:block] + content[block + 512 : block + 1024] + content[block : block + 512] + content[block + 1024 :],
    }[kind]
