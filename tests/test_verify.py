"""Every kind of damage and every broken rule is found, and a rerun repairs the damage."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from commands import run_installed_here
from hypothesis import given
from hypothesis_profiles import num_examples
from killed import kill_this_process
from reference_encoding import check_tree, slow_depths
from strategies import batches, trees
from toydata import write_toy_data

from treeproc.common import cache
from treeproc.common.files import file_sha256, json_bytes
from treeproc.common.provenance import PROVENANCE
from treeproc.common.settings import UserError, load_settings
from treeproc.inspect import describe
from treeproc.inspection import shard_verifier
from treeproc.inspection.checks import arc_problems, tree_problems
from treeproc.shards.shard import SplitShards, check_hashes
from treeproc.shards.store import ShardRecord, read_index, write_index, write_shard
from treeproc.stages import run_jobs
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.trees.flat_trees import node_depths
from treeproc.trees.spans import SpanTree, parents_and_subtree_ends
from treeproc.verify import advice, verify

pytestmark = [pytest.mark.slow, pytest.mark.long]


@num_examples(60)
@given(batches())
def test_sound_trees_have_no_problem_and_their_depths(batch):
    offsets, spans, parents, leaves = flat(batch)
    bare = [(row, "leaves without a node") for row, tree in enumerate(batch) if not tree.spans]
    assert list(tree_problems(offsets, spans, parents, leaves)) == bare
    expected = [depth for tree in batch for depth in slow_depths(tree.parents)]
    assert node_depths(np.repeat(offsets[:-1], np.diff(offsets)) + spans["subtree_end"]).tolist() == expected


@num_examples(200)
@given(trees(max_roots=1), trees(max_roots=1))
def test_any_change_of_a_tree_is_found_in_its_row(first, second):
    """Against the slow oracle: whatever `check_tree` and a rebuilt tree refuse is found, and only there."""
    for node in range(len(second.spans)):
        for name in ("start", "end", "subtree_end", "parent"):
            for step in (-1, 1, 3):
                offsets, spans, parents, leaves = flat([first, second, first])
                changed = parents if name == "parent" else spans[name]
                changed[len(first.spans) + node] += step
                rows = {row for row, what in tree_problems(offsets, spans, parents, leaves) if what != "leaves without a node"}
                assert rows == ({1} if refused(offsets, spans, parents, leaves, 1) else set()), (name, step)


def flat(batch):
    spans = np.concatenate([tree.span_array for tree in batch])
    offsets = np.concatenate([[0], np.cumsum([len(tree.spans) for tree in batch])])
    columns = {name: spans[:, i].copy() for i, name in enumerate(("start", "end", "subtree_end"))}
    parents = np.array([parent for tree in batch for parent in tree.parents], int)
    return offsets, columns, parents, np.array([tree.num_leaves for tree in batch])


def refused(offsets, spans, parents, leaves, row) -> bool:
    part = slice(offsets[row], offsets[row + 1])
    tree = SpanTree(["X"] * len(parents[part]), spans["start"][part].tolist(), spans["end"][part].tolist())
    try:
        check_tree(tree, int(leaves[row]))
    except ValueError:
        return True
    rebuilt = parents_and_subtree_ends(tree)
    return rebuilt != (parents[part].tolist(), spans["subtree_end"][part].tolist())


def test_arcs_must_be_trees():
    offsets = np.array([0, 3, 6, 8, 9])
    good = np.array([1, -1, 1, -1, 0, 1, 1, -1, -1])
    words = np.array([3, 3, 2, 1])
    assert list(arc_problems(offsets, good, words)) == []
    cycle = good.copy()
    cycle[3:6] = [2, 0, 1]
    assert list(arc_problems(offsets, cycle, words)) == [(1, "arcs form a cycle")]
    outside = good.copy()
    outside[0] = 3
    assert list(arc_problems(offsets, outside, words)) == [(0, "a governor is not a word of the sentence")]
    assert list(arc_problems(offsets, good, np.array([3, 3, 2, 2]))) == [(3, "arcs and words differ in number")]


def rewrite(data, change, stage="encoded") -> ShardRecord:
    """Put changed rows into the first training shard of a stage, with right hashes everywhere."""
    folder = data / stage
    index = read_index(folder)
    shard = SplitShards(folder, "train")[0]
    rows = [{name: listed(value) for name, value in row.items()} for row in shard.rows()]
    change(rows)
    old = shard.record
    new = write_shard(
        folder, old.name, rows, shard.schema,
        split="train", index=old.index, fingerprint=old.fingerprint, counts=Counter(old.counts),
    )  # fmt: skip
    facts = {name: value for name, value in index.items() if name not in ("schema_version", "totals", "shards")}
    write_index(folder, [new if r["name"] == new.name else ShardRecord(**r) for r in index["shards"]], **facts)
    return new


def listed(value):
    if isinstance(value, dict):
        return {name: list(column) for name, column in value.items()}
    return value if isinstance(value, (int, str)) else list(value)


def set_item(row, column, name, value, place=0):
    def change(rows):
        rows[row][column][name][place] = value

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (set_item(2, "leaves", "piece", 10_000), r"leaves.piece is not below"),
        (set_item(2, "nodes", "label", 5), "nodes.label is not below 5"),
        (set_item(2, "leaves", "word_index", 1), "leaves.word_index does not count the words from 0"),
        (set_item(2, "spans", "end", 99), "a span is empty or leaves the sentence"),
        (set_item(2, "spans", "subtree_end", 0), "subtree_end does not follow"),
        (set_item(2, "nodes", "parent", 0), "parent does not follow"),
        (lambda rows: rows[2].update(tgt_pieces=[-1]), "tgt_pieces is not below"),
    ],
)
def test_wrong_rows_with_right_hashes_are_named(change, what, tmp_path):
    data = write_toy_data(tmp_path / "data")
    record = rewrite(data, change)
    report = verify(data)
    found = [problem for problem in report.problems if problem.row is not None]
    assert [(p.path.name, p.row, p.example_id) for p in found] == [(record.name, 2, 2)]
    assert what in found[0].what and "into a new --out" in advice(report, data)


def test_of_many_wrong_rows_the_first_are_listed_and_the_others_counted(tmp_path, monkeypatch):
    data = write_toy_data(tmp_path / "data", train=40, shards=1)
    rewrite(data, lambda rows: [row.update(tgt_pieces=[-1]) for row in rows])
    monkeypatch.setattr(shard_verifier, "MOST_LISTED", 3)
    wrong = [(p.row, p.what) for p in verify(data).problems if p.path.name.startswith("train") and "tgt_pieces" in p.what]
    assert [row for row, _ in wrong] == [0, 1, 2]
    others = [p.what for p in verify(data).problems if "not listed" in p.what]
    assert others == ["37 more problems of its rows are not listed"]


def wrong_files(data) -> list:
    """The files of the encoded stage with problems. Toy data have no parsed stage."""
    return [problem.path for problem in verify(data).problems if problem.path.parent.name == "encoded"]


def test_what_was_verified_is_not_hashed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))
    data = write_toy_data(tmp_path / "data", shards=4)
    for path in (data / "encoded").rglob("*"):
        os.utime(path, (time.time() - 10,) * 2)  # a file that changed just now is not noted
    assert wrong_files(data) == []
    read: list[str] = []
    monkeypatch.setattr(cache, "file_sha256", lambda path: read.append(path.name) or file_sha256(path))
    check_hashes(data / "encoded", "train", "valid")
    assert not read
    victim = data / "encoded" / "train-00002-of-00004.arrow"
    victim.write_bytes(victim.read_bytes()[::-1])
    os.utime(victim, (time.time() - 5,) * 2)
    assert wrong_files(data) == [victim]
    with pytest.raises(UserError, match="train-00002-of-00004.arrow is damaged"):
        check_hashes(data / "encoded", "train", "valid")
    assert read == [victim.name]


def test_lengths_and_examples_must_be_those_of_the_shards(tmp_path):
    data = write_toy_data(tmp_path / "data")
    rewrite(data, lambda rows: rows[1].update(example_id=0))
    whats = {(p.path.name, p.what) for p in verify(data).problems}
    assert ("lengths.arrow", "example_id of train differ from those of the shards") in whats
    assert any(what == "example_id does not rise" for _, what in whats)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    for side in ("en", "de"):
        (folder / side).write_text("".join(f"The cat number {i} sees a dog .\n" for i in range(24)))
    values = {
        "splits": {"train": {"source": [folder / "en"], "target": [folder / "de"]}},
        "parser": {"name": "shipped"}, "subwords": {"vocab_size": 300}, "rows_per_shard": 4, "workers": 0,
    }  # fmt: skip
    config, data = PreprocessConfig.model_validate(values), folder / "data"
    preprocess(config, data)
    return config, data


def contents(data) -> dict:
    return {path: path.read_bytes() for path in data.rglob("*") if path.is_file() and path.name != PROVENANCE}


def test_damage_of_every_stage_is_found_and_a_rerun_mends_it(job):
    """A flipped byte, a cut shard and a missing file in each stage, and the files beside them."""
    config, data = job
    assert not verify(data).problems
    before = contents(data)
    damaged = {}
    for stage in ("text", "parsed", "encoded"):
        flipped, cut, missing, sidecar = sorted((data / stage).glob("train-*.arrow"))[:4]
        content = flipped.read_bytes()
        flipped.write_bytes(
            content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]
        )
        cut.write_bytes(cut.read_bytes()[:-100])
        missing.unlink()
        sidecar.with_suffix(".json").unlink()
        damaged |= {flipped: "hash", cut: "bytes, but has", missing: "is missing", sidecar: ".json is missing"}
    for name, what in {"lengths.arrow": "hash", "vocab/labels.txt": "is missing"}.items():
        damaged[data / "encoded" / name] = what
    (data / "encoded" / "lengths.arrow").write_bytes(before[data / "encoded" / "lengths.arrow"][:-1] + b"?")
    (data / "encoded" / "vocab" / "labels.txt").unlink()

    run = subprocess.run([sys.executable, "-m", "treeproc.verify", str(data)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    *lines, last = run.stdout.splitlines()
    for path, what in damaged.items():
        assert any(line.startswith(f"{path}: ") and what in line for line in lines), (path, run.stdout)
    assert {line.split(": ")[0] for line in lines} <= {str(path) for path in damaged}
    assert last.endswith(f"tree-attention preprocess --config {data / 'config.yaml'} --out {data}")

    preprocess(config, data)
    assert contents(data) == before
    run = run_installed_here("verify", data)
    assert run.returncode == 0 and "no problem" in run.stdout.splitlines()[-1] and "24/24 rows" not in run.stdout


def test_wrong_trees_of_the_target_side_are_named(job, tmp_path):
    """Its words against its own line, its trees and statuses, as on the source side."""
    config, _ = job
    both = config.model_copy(update={"target_parser": config.parser})
    data = tmp_path / "data"
    preprocess(both, data)
    assert not verify(data).problems

    def change(rows):
        rows[0]["target_parse_status"] = ""
        rows[1]["target_words"]["text"][1] = "dog"
        rows[2]["target_trees"] = ["(S (X a))"]

    rewrite(data, change, "parsed")
    assert {(p.row, p.what) for p in verify(data).problems} == {
        (0, "target: parse_status is empty"),
        (1, "target: words differ from the characters of their line"),
        (2, "target: trees and words differ in their number of words"),
    }


def test_trees_over_text_that_was_made_again_are_named(tmp_path):
    """A control of `parsed=`: its base is another data set now."""
    words = {"parser": {"name": "words"}, "tree": {"tree_source": "balanced"}, "subwords": {"vocab_size": None}, "workers": 0}
    file, base, control = tmp_path / "a.tsv", tmp_path / "base", tmp_path / "control"

    def make(*lines: str) -> None:
        file.write_text("text\tlabel\n" + "".join(f"{line}\n" for line in lines))
        preprocess(
            load_settings(PreprocessConfig, None, format="labelled", splits={"train": {"source": [str(file)]}}, **words), base
        )

    make("a good film\tpos", "a bad film\tneg", "a dull one\tneg")
    tree = {"tree": {"tree_source": "random"}, "workers": 0}
    preprocess(load_settings(PreprocessConfig, None, parsed=str(base), vocab_from=str(base), **tree), control)
    assert not verify(control).problems and "neg 2" in describe(control)[0]
    shutil.rmtree(base)
    make("a good film\tpos", "a bad film\tneg", "a fine one\tpos")
    found = verify(control).problems
    assert len(found) == 2 and all("is not the stage that" in problem.what and not problem.mendable for problem in found)
    with pytest.raises(UserError, match="base/text is not the stage that"):
        describe(control)


def test_the_last_count_has_the_problems_of_files_that_are_no_shards(job, tmp_path):
    """A vocabulary of another data set, below the index of this one."""
    copy = shutil.copytree(job[1], tmp_path / "data")
    pieces = copy / "encoded" / "vocab" / "pieces.model"
    pieces.write_bytes(pieces.read_bytes() + b"\0")
    run = run_installed_here("verify", copy)
    assert run.returncode == 2 and run.stderr.splitlines()[-1].endswith(", 1 problems"), run.stderr


def test_a_process_that_is_killed_is_one_line(job, monkeypatch):
    monkeypatch.setattr("treeproc.verify._FEW_ROWS", 0)
    monkeypatch.setattr(run_jobs, "_run_job", kill_this_process)
    with pytest.raises(UserError, match="^the system killed a process that verified shards; free memory"):
        verify(job[1])


def test_a_shard_that_is_named_twice_is_found(job, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(job[1], data)
    index = json.loads((data / "text" / "index.json").read_bytes())
    index["shards"].append(index["shards"][-1])
    (data / "text" / "index.json").write_bytes(json_bytes(index))
    assert [str(problem) for problem in verify(data).problems] == [f"{data / 'text' / 'index.json'}: names a shard twice"]


def test_a_damaged_index_is_named_once(tmp_path):
    data = write_toy_data(tmp_path / "data", train=1, shards=1)
    index = data / "encoded" / "index.json"
    index.write_bytes(json_bytes(json.loads(index.read_bytes()) | {"num_pieces": -1}))
    what = "num_pieces: Input should be greater than or equal to 0, but is -1; run tree-attention preprocess again"
    assert f"{index}: is damaged: {what}" in map(str, verify(data).problems)


def test_no_data_set_is_one_line(tmp_path):
    for arguments, message in (([str(tmp_path)], "is not a data set"), ([], "required: DATA")):
        run = run_installed_here("verify", *arguments)
        assert run.returncode == 2 and message in run.stderr and run.stderr.count("\n") == 1
