"""Counts of a vocabulary, shard by shard: names from sidecars and from trees are the same, and so are words of any cut."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from commands import run_jobs_here

from treeproc.shards.shard import Shard
from treeproc.shards.store import read_index
from treeproc.stages import run_jobs
from treeproc.stages.inputs import TreeConfig
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages.vocabulary import TrainSplit, count_vocabulary
from treeproc.subwords import SubwordConfig

pytestmark = pytest.mark.slow

TREES = [
    "( (S (NP-SBJ-1 (DT The) (NN dog)) (VP (VBD was) (VP (VBN seen) (NP (-NONE- *-1)))) (. .)) )",
    "(ROOT (S (S (NP (PRP It)) (VP (VBZ is)))))",
    "(NN word)",
    "(TOP (X (NP (NP=2 (NN a)) (PP (IN of) (NP (NN b)))) (ADVP|PRT (RB up))))",
    "(S (NP (-NONE- *)) (VP (VB go)))",
    "(FRAG (NP-SBJ (-LRB- -LRB-) (NN c) (-RRB- -RRB-)))",
]
CONLLU = """# text = Hi you
1\tHi\t_\tINTJ\tUH\t_\t0\troot\t_\t_
2\tyou\t_\tPRON\tPRP\t_\t1\tnsubj:x\t_\t_

# text = No
1\tNo\t_\tINTJ\t_\t_\t0\troot\t_\t_
"""


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(run_jobs, "GROUP_ROWS", 5)


def make(folder, rows: int, name: str, content: str, **changes) -> dict:
    """A data set of one file with its target lines; the records of its stages by name."""
    file, target = folder / name, folder / f"{name}.target"
    file.write_text(content)
    count = content.count("text =") or content.count("\n")
    target.write_text("".join(f"Zeile {i} hier\n" for i in range(count)))
    values = {
        "splits": {"train": {"source": [file], "target": [target]}}, "rows_per_shard": rows, "workers": 0,
        "parser": {"name": "given"}, "subwords": {"vocab_size": None}, **changes,
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(values), folder / f"{name}-{rows}")
    return {stage: list(read_index(folder / f"{name}-{rows}" / stage).records()) for stage in ("text", "parsed")}


def names(counts) -> tuple:
    return counts.labels, counts.tags, counts.deprels


@pytest.mark.parametrize("name", ["trees", "arcs"])
def test_names_in_sidecars_are_those_of_the_trees(name, tmp_path):
    arcs = {"format": "conllu", "parser": {"name": "given", "dependencies": True}}
    content, changes = ("\n".join(TREES) + "\n", {"format": "brackets"}) if name == "trees" else (CONLLU, arcs)
    records = make(tmp_path, 1, name, content, **changes)
    # Without names in the sidecars, the shards are read.
    bare = [replace(record, counts={"words": record.counts["words"]}) for record in records["parsed"]]
    for tree in (TreeConfig(), TreeConfig(tree_source="dependencies")):
        found = [
            count_vocabulary(TrainSplit(tmp_path / f"{name}-1", records["text"], parsed, SubwordConfig(), tree, run_jobs_here))
            for parsed in (records["parsed"], bare)
        ]
        assert names(found[0]) == names(found[1]) and found[0].words == found[1].words
        assert len(found[0].tags) > 2 and (name == "trees" or found[0].deprels == {"root", "nsubj:x"})


def test_words_are_those_of_a_loop_over_all_lines_however_they_are_cut(tmp_path):
    lines = [" ".join(f"(N w{i * j % 13})" for j in range(1 + i % 5)) for i in range(23)]
    content = "".join(f"(S {line})\n" for line in lines)
    for joint in (True, False):
        found = []
        for rows in (3, 23):
            records = make(tmp_path, rows, "trees", content, format="brackets")
            config = SubwordConfig(max_training_lines=14, joint=joint)
            data = tmp_path / f"trees-{rows}"
            found.append(
                count_vocabulary(TrainSplit(data, records["text"], records["parsed"], config, TreeConfig(), run_jobs_here)).words
            )
            rows_ = list(chain.from_iterable(Shard(data / "text", record).rows() for record in records["text"]))
            kept = [row for k, row in enumerate(rows_) if (k + 1) * 7 // 23 > k * 7 // 23]
            expected = {side: Counter(word for row in kept for word in row[side].split(" ")) for side in ("source", "target")}
            assert found[-1] == ({"source": expected["source"] + expected["target"]} if joint else expected)
        assert found[0] == found[1]


def test_a_shard_without_a_chosen_row_is_not_opened(tmp_path):
    records = make(tmp_path, 2, "trees", "".join(f"(S (N w{i}))\n" for i in range(12)), format="brackets")
    opened = []

    def watched(worker, arguments, jobs):
        opened.extend(shard["first"] for job in jobs for shard in job["shards"])
        return run_jobs_here(worker, arguments, jobs)

    config, tree = SubwordConfig(max_training_lines=4), TreeConfig()
    counts = count_vocabulary(TrainSplit(tmp_path / "trees-2", records["text"], records["parsed"], config, tree, watched))
    assert opened == [4, 10] and sum(counts.words["source"].values()) == 2 * (1 + 3) and counts.tags == {"N", "X"}
