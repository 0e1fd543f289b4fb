"""The text stage in blocks of cut files against splits read from front to back: the same files, the same messages."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.readers import FORMATS, numbered_lines
from treeproc.readers.line_ranges import CutSide, cut_file, look_at_ends, read_range, stamp_of
from treeproc.readers.numbered_lines import read_lines
from treeproc.stages import cut_inputs, filters, keys, run_jobs, text_work
from treeproc.stages.cut_inputs import bytes_that_can_be_cut
from treeproc.stages.filters import FilterConfig, drop_reason
from treeproc.stages.inputs import Inputs, SplitFiles
from treeproc.stages.job_report import DROPPED, line_list
from treeproc.stages.keys import example_key
from treeproc.stages.ray_job import from_json, to_json
from treeproc.stages.text_warnings import TextNotices, Wanted
from treeproc.stages.text_work import TextWork, remove_work

WANTED = {"source": Wanted(("escapes", "tokens", "sentences"), "en"), "target": Wanted(("placeholders",))}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks, chunks, partitions and samples of a few lines."""
    monkeypatch.setattr(text_work, "LEAST_BLOCK", 3)
    monkeypatch.setattr(text_work, "MOST_BLOCK", 3)
    monkeypatch.setattr(cut_inputs, "CHUNK_BYTES", 7)
    monkeypatch.setattr(cut_inputs, "COUNTED_BYTES", 20)
    monkeypatch.setattr(keys, "_PARTITION_KEYS", 4)
    monkeypatch.setattr(filters, "_MOST_LINES", 3)
    monkeypatch.setattr(run_jobs, "GROUP_ROWS", 5)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def hundreds(small, monkeypatch):
    """Blocks and chunks of hundreds of lines."""
    monkeypatch.setattr(cut_inputs, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(cut_inputs, "COUNTED_BYTES", 1 << 13)
    monkeypatch.setattr(text_work, "LEAST_BLOCK", 300)
    monkeypatch.setattr(text_work, "MOST_BLOCK", 300)


class Killed(Exception):
    """The job is killed here."""


def test_few_keys_have_partitions_for_several_tasks(monkeypatch):
    monkeypatch.undo()
    assert [keys.number_of_partitions(n) for n in (0, 1 << 19, 1 << 20, 4 << 20, 1 << 30)] == [1, 1, 2, 8, 256]


def runner(seed: int = 0, lives: int = 10**9):
    """Runs jobs in this process as Ray would: through JSON, in any order. After so many jobs, it is killed."""
    shuffled, left = random.Random(seed), [lives]

    def run(worker, arguments, jobs):
        built = worker(**arguments) if jobs else None
        for number in shuffled.sample(range(len(jobs)), len(jobs)):
            if not left[0]:
                raise Killed
            left[0] -= 1
            yield number, from_json(to_json(built(**from_json(to_json(jobs[number])))))

    return run


def inputs_of(folder: Path, splits: dict[str, tuple], tokenized: str = "none", form: str = "parallel") -> Inputs:
    """`splits` gives the contents of the files of both sides, or the n of `hold_out`."""
    folder.mkdir(exist_ok=True)
    files = {}
    for split, sides in splits.items():
        if isinstance(sides, int):
            files[split] = SplitFiles(hold_out=sides)
            continue
        paths: dict[str, list[Path]] = {}
        for side, contents in zip(("source", "target"), sides, strict=True):
            paths[side] = [folder / f"{split}.{i}.{side[0]}" for i in range(len(contents))]
            for path, content in zip(paths[side], contents, strict=True):
                path.write_bytes(content)
        files[split] = SplitFiles(**paths)
    return Inputs(files, form, tokenized, None)


def here(out: AnyPath, inputs: Inputs, filters: FilterConfig) -> TextWork:
    return TextWork(out, inputs, filters, WANTED)


def on_ray(out: AnyPath, inputs: Inputs, filters: FilterConfig, run) -> TextWork:
    return TextWork(out, inputs, filters, WANTED, lambda folder: run)


def stage(out: AnyPath, work, inputs: Inputs, rows: int) -> dict:
    """Run a text stage; the content of all its files, and what was returned. An error is its message."""
    try:
        counts, digests = work.counts(), work.digests()
        train_files = work.train_files()
        assert inputs.examples_before("train", sum(train_files)) == counts["train"]
        notices = TextNotices(WANTED, inputs.line)
        (out / "text").mkdir(exist_ok=True)
        with line_list(out / "text" / DROPPED, "split", "line", "reason") as dropped:
            records = {record.name: record for record in work.write("mark", rows, notices, dropped)}
    except UserError as error:
        work.remove()
        return {"error": str(error)}
    remove_work(out)
    names = out.objects() if isinstance(out, RemotePath) else [str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()]
    files = {name: (out / name).read_bytes() for name in names}
    found = {"counts": counts, "train_files": train_files, "digests": digests}
    return found | {"records": records, "notices": notices.facts(), "files": files}


def slow(inputs: Inputs, filters: FilterConfig) -> tuple[dict[str, str], dict[int, str]]:
    """The digests of splits, and the reasons to drop lines of train, by code that holds everything."""
    rows, digests, dropped = {split: list(inputs.rows(split)) for split in inputs.splits}, {}, {}
    for split in inputs.splits:
        beyond, waiting, state = inputs.columns_beyond_key(), b"", hashlib.sha256()
        for number, row in enumerate(rows[split], start=1):
            state.update(json.dumps([row[name] for name in beyond], separators=(",", ":")).encode() if beyond else b"")
            waiting += example_key(row)
            if number % keys.KEYS_AT_ONCE == 0 and not (filters.drop_duplicates and split == "train"):
                state.update(waiting)
                waiting = b""
        state.update(waiting)
        digests[split] = state.hexdigest()

    def plain(row: dict) -> str:
        return "".join(c.lower()[0] for c in row["source"] if c.isalnum())

    def whole(row: dict) -> tuple:
        return row["source"], row.get("target"), row.get("label")

    others = [row for split, some in rows.items() if split != "train" for row in some]
    same = {"none": lambda row: None, "source": lambda row: row["source"], "example": whole}[filters.drop_overlap]
    overlaps, leaks, seen = {same(row) for row in others} - {None}, {plain(row) for row in others} - {""}, set()
    for number, row in enumerate(rows.get("train", ())):
        reason = drop_reason(row["source"], row.get("target"), "train", filters)
        reason = reason or ("overlap" if same(row) in overlaps else None)
        reason = reason or ("duplicate" if filters.drop_duplicates and whole(row) in seen else None)
        reason = reason or ("leak" if filters.drop_leaks and plain(row) in leaks else None)
        seen.add(whole(row))
        dropped |= {inputs.line("train", number): reason} if reason else {}
    return digests, dropped


def both(folder: Path, inputs: Inputs, filters: FilterConfig, rows: int = 2, seed: int = 0) -> dict:
    """The result of the stage, which must be the same either way."""
    one, there = folder / "here", folder / "there"
    for out in (one, there):
        (out / "text").mkdir(parents=True)
    expected = stage(one, here(one, inputs, filters), inputs, rows)
    if "error" not in expected:
        digests, dropped = slow(inputs, filters)
        listed = expected["files"]["text/dropped.tsv"].decode().split("\n")
        lines = [line.split("\t")[1:] for line in listed if line.startswith("train")]
        assert expected["digests"] == digests and {int(number): reason for number, reason in lines} == dropped
    assert stage(there, on_ray(there, inputs, filters, runner(seed)), inputs, rows) == expected
    assert "error" not in expected or not [path for path in there.rglob("*") if path.is_file() or ".work" in path.name]
    return expected


LINE_FILES = [b"a\nb\r\n\n c \nlast", b"", b"\xef\xbb\xbfx\ny\n", b"\xef\xbb\xbf", b"\n", "ä\u2028ö\n".encode() * 9]


def check_ranges(paths: Sequence[AnyPath], chunk: int) -> CutSide:
    """Read every range of lines of the files, cut at chunks, and compare it with a pass over all. Returns the cut files."""
    lines, files = list(read_lines(paths)), []
    for path in paths:
        stamp = stamp_of(path)
        files.append(cut_file(path, str(path), stamp, look_at_ends(path, "lines", 0, stamp.size, chunk), chunk))
    side = CutSide(tuple(files))
    assert side.lines == len(lines)
    for start in range(len(lines) + 1):
        for stop in range(start, len(lines) + 1):
            assert list(read_range(side.pieces(start, stop))) == lines[start:stop]
    return side


def test_ranges_of_lines_against_a_pass_over_all(tmp_path):
    paths = [tmp_path / str(i) for i in range(len(LINE_FILES))]
    for path, content in zip(paths, LINE_FILES, strict=True):
        path.write_bytes(content)
    for chunk in (1, 3, 64):
        side = check_ranges(paths, chunk)
    paths[0].write_bytes(b"other")
    with pytest.raises(UserError, match="0 changed while it was read"):
        list(read_range(side.pieces(0, 1)))


LINES = st.lists(
    st.sampled_from(["a b", "A, b!", "c", "", " ", "d &apos;s e . f", "It is so. Then it is not.", "<unk> \ufffd", "ü\u2028"]),
    min_size=1, max_size=14,
)  # fmt: skip
FILTERS = st.builds(
    FilterConfig,
    drop_duplicates=st.booleans(), drop_overlap=st.sampled_from(["none", "source", "example"]), drop_leaks=st.booleans(),
)  # fmt: skip


TOKEN = "\t_\tNN\tNN\t_\t{}\tdep\t_\t_\n"
SENTENCES = [
    f"1\ta{TOKEN.format(0)}\n",
    f"# text = ü b\n1\tü{TOKEN.format(2)}2\tb{TOKEN.format(0)}\r\n",
    "1-2\tim" + "\t_" * 8 + f"\n1\tin{TOKEN.format(2)}2\tdem{TOKEN.format(0)}\u3000 \n",
    f"1\tc{TOKEN.format(0)}\x1c\n \n\n",
    "\n",
    "\ufeff\n",
]
TREES = ["(S (NN a) (VB b))", "( (S\n  (X (-NONE- *)) (NN -LRB-)) )\n", "\n(S\r\n (NN ü)\n)", "(NN a)", " \n"]
# Of each format: examples, and what is rare and mostly bad.
FRAGMENTS = {
    "brackets": (TREES, [")", "x", "(S (NN a)"]),
    "sst": (["(3 (2 It) (1 is))", "(2 a)\n", "\n(4 (3\n (2 a) (1 b)) (0 c))"], ["\n\ufeff", "(5 a)"]),
    "conllu": (SENTENCES, ["1\ta\n", f"1\ta{TOKEN.format(2)}", f"1\ta{TOKEN.format(0)}"]),
    "agreement": (["VBZ\tthe cat\n", "VBP\tthe cats\n", "VBP\t\r\n"], ["\n", "VBZ\tno end"]),
}


@num_examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.parametrize("form", list(FRAGMENTS))
@given(filters=FILTERS, rows=st.integers(1, 6), seed=st.integers(0, 9), data=st.data())
def test_the_same_files_of_other_formats(form, filters, rows, seed, data, tmp_path_factory, monkeypatch):
    folder, (good, bad) = tmp_path_factory.mktemp("text"), FRAGMENTS[form]
    monkeypatch.setitem(globals(), "WANTED", {"source": Wanted(("placeholders",), "en")})
    monkeypatch.setattr(keys, "KEYS_AT_ONCE", 3)
    one = st.lists(st.sampled_from(good), min_size=1, max_size=9)
    damaged = data.draw(st.integers(0, 3)) == 0

    def file() -> bytes:
        parts = data.draw(one)
        if damaged:
            parts.insert(data.draw(st.integers(0, len(parts))), data.draw(st.sampled_from(bad)))
        return "".join(parts).encode()

    def target(files: list[bytes]) -> list[bytes]:
        folder.joinpath("count").write_bytes(b"".join(files))
        try:
            count = sum(1 for _ in FORMATS[form].read([folder / "count"], []))
        except UserError:
            count = 3
        return [f"t{i % 3}\n".encode() for i in range(count + (damaged and seed == 0))]

    has_target = FORMATS[form].target == "optional" and data.draw(st.booleans())
    splits: dict[str, tuple | int] = {"valid": data.draw(st.integers(2, 4))} if data.draw(st.booleans()) else {}
    for split in data.draw(st.permutations(["train", "test"])):
        files = [file() for _ in range(data.draw(st.integers(1, 2)))]
        splits[split] = (files, [b"".join(target(files))] if has_target else [])
    both(folder, inputs_of(folder / "files", splits, form=form), filters, rows, seed)


def test_other_formats_in_chunks_of_many_examples(tmp_path, monkeypatch, hundreds):
    """Trees of many lines over several chunks of 4 kB, with a target side; the last sentence has no blank line."""
    monkeypatch.setitem(globals(), "WANTED", {"source": Wanted(("placeholders",))})
    trees = "\n".join(f"(S\n (NP (NN w{i % 350}))\n (VP (VB does) (NN it)))" for i in range(900)).encode()
    sentences = "\n".join(f"# sent_id = {i}\n1\tw{i % 350}{TOKEN.format(0)}" for i in range(900)).encode()
    lines = "".join(f"line {i % 350}\n" for i in range(900)).encode()
    for form, source in (("brackets", trees), ("conllu", sentences)):
        inputs = inputs_of(tmp_path / f"{form}-files", {"train": ([source], [lines]), "valid": 100}, form=form)
        found = both(tmp_path / form, inputs, FilterConfig(drop_duplicates=True), rows=400)
        assert found["counts"] == {"train": 891, "valid": 9} and b"duplicate" in found["files"]["text/dropped.tsv"]


@num_examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(train=LINES, valid=LINES | st.integers(2, 4), test=LINES, filters=FILTERS, rows=st.integers(1, 6), data=st.data())
def test_the_same_files_either_way(train, valid, test, filters, rows, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    ends, seed = data.draw(st.sampled_from([b"\n", b"\r\n"])), data.draw(st.integers(0, 9))
    parts, last = data.draw(st.integers(1, 3)), data.draw(st.booleans())

    def contents(lines: list[str]) -> list[bytes]:
        files = [lines[i::parts] for i in range(parts)]
        return [ends.join(line.encode() for line in one) + ends * (last and bool(one)) for one in files]

    def sides(lines: list[str]) -> tuple:
        return contents(lines), contents([line[:1] or "z" for line in lines])

    splits = {name: lines if isinstance(lines, int) else sides(lines) for name, lines in
              data.draw(st.permutations([("train", train), ("valid", valid), ("test", test)]))}  # fmt: skip
    inputs = inputs_of(folder / "files", splits, data.draw(st.sampled_from(["none", "moses"])))
    both(folder, inputs, filters, rows, seed)


def everything(folder: Path, count: int) -> tuple[Inputs, FilterConfig]:
    """Duplicates over blocks and shards, overlap, near copies, held out lines, several files, a packed one."""
    lines = [f"line {i % 9} of the text is here again" for i in range(count)] + [
        "Line 2, of the text is HERE AGAIN!",
        "",
        "once",
    ]
    content = [("\n".join(part) + "\n").encode() for part in (lines[:11], lines[11:12], lines[12:])]
    inputs = inputs_of(folder, {"valid": 7, "train": (content, content), "test": ([content[1]], [b"x\n"])})
    packed = folder / "train.2.s.gz"
    packed.write_bytes(gzip.compress(content[2]))
    train = inputs.splits["train"]
    train = train.model_copy(update={"source": [*train.source[:2], packed]})
    return replace(inputs, splits={**inputs.splits, "train": train}), FilterConfig(drop_duplicates=True, drop_overlap="source")


def test_a_stage_that_has_everything(tmp_path):
    found = both(tmp_path, *everything(tmp_path / "files", 40), rows=5)
    reasons = [line.split(b"\t")[2] for line in found["files"]["text/dropped.tsv"].splitlines()[1:]]
    assert {b"duplicate", b"overlap", b"empty_source"} == set(reasons) and len(reasons) > 25
    assert found["counts"] == {"valid": 6, "train": 37, "test": 1} and found["notices"]["train"]["source"]["leaks"]["count"]
    assert found["notices"]["train"]["source"]["language"]["looked_at"] > 1


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": ([b"a\n" * 9 + b"\xff\n"], [b"a\n" * 10])}, "train.0.s, line 10: not valid UTF-8 (byte 0xff at column 1)"),
        ({"train": ([b"a\n" * 10], [b"a\n" * 4 + b"bb\xff\n" + b"a\n" * 5])}, "train.0.t, line 5: not valid UTF-8"),
        # Of two bad lines the first is named, of one number that of the source.
        ({"train": ([b"a\n" * 8 + b"\xff\n"], [b"a\n" * 2 + b"\xff\n" + b"a\n" * 6])}, "train.0.t, line 3: not valid"),
        ({"train": ([b"a\n" * 5 + b"\xff\n"], [b"a\n" * 5 + b"\xff\n"])}, "train.0.s, line 6: not valid UTF-8"),
        ({"train": ([b"a\n", b"a\n" * 5 + b"\xfe"], [b"a\n" * 7])}, "train.1.s, line 6: not valid UTF-8"),
        ({"train": ([b"a\n" * 9], [b"a\n" * 4, b"b"])}, "has 9 lines, but"),
        # What is wrong in the rest of the longer side comes first, and what is wrong before comes before.
        ({"train": ([b"a\n" * 9 + b"\xff"], [b"a\n" * 4])}, "train.0.s, line 10: not valid"),
        ({"train": ([b"a\n" * 9], [b"a\n\xff\n"])}, "train.0.t, line 2: not valid"),
        ({"train": ([b"a\n" * 3], [b"a\n" * 3]), "test": ([b"b\n\xff"], [b"c\n" * 2])}, "test.0.s, line 2: not valid"),
        ({"test": ([b"b\n"], [b"c\n" * 2]), "train": ([b"\xff"], [b"a\n"])}, "test.0.s has 1 lines, but"),
        ({"train": ([b""], [b"\xef\xbb\xbf"])}, "no example of format parallel in"),
        ({"train": ([b"a\n" * 3], [b"a\n" * 3]), "valid": 4}, "splits.valid: hold_out takes no example"),
    ],
)  # fmt: skip
def test_the_same_message_either_way(splits, message, tmp_path):
    assert message in both(tmp_path, inputs_of(tmp_path / "files", splits), FilterConfig(drop_duplicates=True))["error"]


def test_damaged_packed_files_have_the_same_message(tmp_path):
    inputs = inputs_of(tmp_path / "files", {"train": ([b"a\n" * 5000], [b"a\n" * 5000])})
    for i, content in enumerate([gzip.compress(b"a\n" * 5000)[:-12], b"no gzip", gzip.compress(random.randbytes(9000))[:-9]]):
        packed = tmp_path / "files" / f"{i}.gz"
        packed.write_bytes(content)
        broken = replace(inputs, splits={"train": SplitFiles(source=[packed], target=inputs.splits["train"].target)})
        error = both(tmp_path / str(i), broken, FilterConfig())["error"]
        assert f"cannot read {packed}" in error or "not valid UTF-8" in error


def test_shifted_pairs_are_told_either_way(tmp_path, hundreds):
    """More pairs than are looked at, over several shards."""
    numbers = iter(random.Random(0).choices(range(60), k=9000))
    triples = list(zip(numbers, numbers, numbers, strict=True))
    content = ["".join(f"{side}{a} {side}{b} {side}{c}\n" for a, b, c in triples).encode() for side in "ax"]
    shifted = [content[0].partition(b"\n")[2], content[1][: content[1].rindex(b"\n", 0, -1) + 1]]
    for (source, target), told in ((content, None), (shifted, {"by": 1, "looked_at": 2048, "count": 2048})):
        inputs = inputs_of(tmp_path / f"files{told is None}", {"train": ([source], [target])})
        found = both(tmp_path / str(told is None), inputs, FilterConfig(), rows=100)["notices"]["train"]["target"].get("shifted")
        assert (found and {name: found[name] for name in told}) == told


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files_give_the_bytes_of_plain_ones(suffix, pack, tmp_path):
    content = b"".join(b"line %d\n" % i for i in range(50))
    inputs = inputs_of(tmp_path / "files", {"train": ([content], [content])})
    packed = tmp_path / "files" / f"a.{suffix}"
    packed.write_bytes(pack(content[:200]) + pack(content[200:]))
    other = replace(inputs, splits={"train": SplitFiles(source=[packed], target=inputs.splits["train"].target)})
    assert both(tmp_path / "packed", other, FilterConfig()) == both(tmp_path / "plain", inputs, FilterConfig())


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("parallel", b'<?xml version="1.0"?>\n<tmx version="1.4">\n', "expected lines of text, but found TMX, XLIFF or HTML"),
        ("parallel", gzip.compress(b"a\n"), "is a gzip file, but must be text"),
        ("conllu", b"SQLite format 3\0", "is a database of SQLite, but must be text"),
    ],
    ids=["tmx", "gzip", "sqlite"],
)
def test_files_of_another_format_have_the_same_message(form, content, message, tmp_path):
    splits = {"test": ([b"1\ta\t_\tX\tX\t_\t0\troot\t_\t_\n"], [b"b\n"]), "train": ([content], [b"a\n" * 2])}
    splits |= {"test": ([b"b\n"], [b"b\n"])} if form == "parallel" else {}
    error = both(tmp_path, inputs_of(tmp_path / "files", splits, form=form), FilterConfig())["error"]
    assert f"train.0.s{':' if message.startswith('expected') else ''} {message}" in error
    splits["train"] = (splits["test"][0], [b"1\ta\t_\tX\tX\t_\t0\troot\t_\t_\n"])
    error = both(tmp_path / "target", inputs_of(tmp_path / "files", splits, form=form), FilterConfig())["error"]
    assert "train.0.t: expected lines of text, but found a treebank in CoNLL-U" in error


def test_a_line_that_is_too_long_is_refused_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(numbered_lines, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(numbered_lines, "MOST_LINE_BYTES", 20)
    for before in range(6):
        for length, refused in ((19, False), (20, True)):  # the line end counts
            content = b"a\n" * before + b"b" * length + b"\nc\n"
            inputs = inputs_of(tmp_path / "files", {"train": ([content], [content])})
            found = both(tmp_path / f"{before} {length}", inputs, FilterConfig())
            assert ("has a line of more than" in found.get("error", "")) == refused


def counted(run, names: list[str]):
    """`run`, which notes in `names` the worker of each part that is done."""

    def count(worker, arguments, jobs):
        for result in run(worker, arguments, jobs):
            if worker.__name__ != "ReadLines":  # the sample of lines is no work that is kept
                names.extend([worker.__name__] * len(jobs[result[0]].get("shards", [1])))
            yield result

    return count


def test_killed_after_any_job_the_same_command_goes_on(tmp_path):
    lines = [f"line {i % 7} of this" for i in range(12)]
    content = "\n".join(lines).encode()
    inputs = inputs_of(tmp_path / "files", {"train": ([content], [content]), "test": ([b"line 2, of this\n"], [b"x"])})
    filters = FilterConfig(drop_duplicates=True)
    expected = both(tmp_path, inputs, filters, rows=3)
    assert check_kills(tmp_path, inputs, filters, {"CheckBlock", "GatherKeys", "WriteText"}) == expected


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_killed_stage_goes_on_with_its_splits_in_another_order(is_cut, tmp_path):
    """The work folder numbers unpacked files and blocks in the order of the splits."""
    splits = {}
    (tmp_path / "files").mkdir()
    for split, lines in {"train": b"a\nb\nc\n", "valid": b"d\ne\nf\n"}.items():
        packed = tmp_path / "files" / f"{split}.gz"
        packed.write_bytes(gzip.compress(lines))
        splits[split] = SplitFiles(source=[packed], target=[packed])
    inputs = Inputs(splits, "parallel", "none", None)
    other = replace(inputs, splits=dict(reversed(splits.items())))

    def work_of(out: Path, of: Inputs) -> TextWork:
        (out / "text").mkdir(parents=True, exist_ok=True)
        return on_ray(out, of, FilterConfig(), runner()) if is_cut else here(out, of, FilterConfig())

    out, fresh = tmp_path / "out", tmp_path / "fresh"
    work_of(out, inputs).digests()
    next(out.glob(".work-*/checked.json")).unlink()  # as if it was killed before
    assert stage(out, work_of(out, other), other, 2) == stage(fresh, work_of(fresh, other), other, 2)


def test_files_of_two_sides_that_do_not_end_together_are_told(tmp_path, caplog):
    sides = [b"a\nb\nc\n", b"d\n" * 11], [b"a\nb\n", b"d\n" * 12]
    inputs = inputs_of(tmp_path / "files", {"train": sides, "valid": 3, "test": ([b"a\n", b"b\n"], [b"a\n", b"b\n"])})
    on_ray(tmp_path / "out", inputs, FilterConfig(), runner()).digests()
    first = tmp_path / "files" / "train.0"
    wanted = f"warning: {first}.s has 3 lines, but {first}.t has 2; their pairs go over the ends of files"
    assert [record.getMessage() for record in caplog.records] == [wanted]


def check_kills(folder: AnyPath, inputs: Inputs, filters: FilterConfig, workers: set[str]) -> dict:
    """Kill a stage of these `workers` after each of its jobs. Returns what each of them has at the end."""
    undisturbed: list[str] = []
    (folder / "whole" / "text").mkdir(parents=True)
    expected = stage(folder / "whole", on_ray(folder / "whole", inputs, filters, counted(runner(), undisturbed)), inputs, 3)
    assert workers == set(undisturbed)
    for lives in range(len(undisturbed) + 1):
        out, names = folder / f"killed-{lives}", []
        (out / "text").mkdir(parents=True)
        with suppress(Killed):
            stage(out, on_ray(out, inputs, filters, counted(runner(lives, lives), names)), inputs, 3)
            assert lives > 10  # this one was not killed
            break
        before = {path: path.stat().st_mtime_ns for path in (out / "text").glob("*.arrow")} if isinstance(out, Path) else {}
        assert stage(out, on_ray(out, inputs, filters, counted(runner(lives), names)), inputs, 3) == expected
        assert sorted(names) == sorted(undisturbed), "a part that was done was done again"
        assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items()), "a finished shard was written again"
    return expected


def test_files_that_change_are_refused(tmp_path):
    inputs = inputs_of(tmp_path / "files", {"train": ([b"a\n" * 9], [b"a\n" * 9])})
    out = tmp_path / "out"
    (out / "text").mkdir(parents=True)
    work = on_ray(out, inputs, FilterConfig(), runner())
    work.digests()
    inputs.splits["train"].source[0].write_bytes(b"b\n" * 10)
    with pytest.raises(UserError, match="changed while"), line_list(out / "text" / DROPPED) as dropped:
        list(work.write("mark", 2, TextNotices(WANTED, inputs.line), dropped))


def test_a_sample_of_lines_is_neither_large_nor_small():
    for count in range(40):
        assert min(count, 2) <= len(range(0, count, filters.stride_of(count))) <= 3


def test_inputs_that_cannot_be_cut_are_read_in_this_process(tmp_path):
    inputs = inputs_of(tmp_path, {"train": ([b"a\n"], [b"a\n"])})
    assert bytes_that_can_be_cut(inputs) == 4
    assert bytes_that_can_be_cut(replace(inputs, format="sgm")) == 0
    (tmp_path / "folder").mkdir()
    assert bytes_that_can_be_cut(replace(inputs, splits={"train": SplitFiles(source=[tmp_path / "folder"])})) == 0
    trees, packed = tmp_path / "trees", tmp_path / "trees.tar.gz"
    for path in (trees, packed):
        path.write_bytes(b"(NN a)")
    for source, target, found in (([trees], [], 6), ([packed], [], 0), ([trees], [trees], 0)):
        splits = {"train": SplitFiles(source=source, target=target)}
        assert bytes_that_can_be_cut(Inputs(splits, "brackets", "none", None)) == found
