"""The library on runs and shards: what it returns is what the commands write; every row comes once; the page's code runs."""

import itertools
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from bracketed_data import write_bracketed_data
from torch.utils.data import DataLoader

from treenet import UserError, collate, load_run, read_shards
from treenet.cli import preprocess, train_wmt, translate
from treenet.data.examples import ExampleSource
from treeproc.shards.shard import SplitShards


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with test files, a data set of several shards and a run."""
    folder = tmp_path_factory.mktemp("world")
    write_bracketed_data(folder)
    data = ["--config", str(folder / "data.yaml"), "--out", str(folder / "data"), "rows_per_shard=7"]
    preprocess.main(data)
    train_wmt.main(["--config", str(folder / "train.yaml"), "--out", str(folder / "run"), f"data={folder / 'data'}"])
    return folder


@pytest.fixture(scope="module")
def run(world):
    return load_run(world / "run")


def lines_of(world, name: str) -> list[str]:
    return (world / name).read_text().splitlines()


@pytest.fixture(scope="module")
def given(world):
    """Lines, trees and targets of the test split."""
    targets = lines_of(world, "test.txt")
    return [" ".join(reversed(target.split())) for target in targets], lines_of(world, "test.mrg"), targets


def written(world, capfdbinary, *settings: str) -> list[str]:
    translate.main(["--out", str(world / "run"), f"trees={world / 'test.mrg'}", *settings])
    return capfdbinary.readouterr().out.decode().split("\n")[:-1]


def test_translations_are_those_of_the_command(world, run, given, capfdbinary):
    lines, trees, targets = given
    assert run.translate(lines, trees=trees) == written(world, capfdbinary)
    best = [
        f"{number}\t{one.score:.6f}\t{one.text}" for number, two in enumerate(run.candidates(lines, trees, 2), 1) for one in two
    ]
    assert best == written(world, capfdbinary, "nbest=2", "scores=true")
    assert run.translate(lines, trees=trees, beam_size=1) == written(world, capfdbinary, "decoding.beam_size=1")
    scored = run.score(lines, targets, trees=trees)
    expected = written(world, capfdbinary, f"score={world / 'test.txt'}")
    assert [f"{one.score:.6f}\t{one.text}" for one in scored] == expected
    for one, target in zip(scored, targets, strict=True):
        assert one.text == target and len(one.piece_log_probs) == len(one.pieces) + 1
        assert sum(one.piece_log_probs) == pytest.approx(one.log_prob, rel=1e-5)


def test_attention_has_a_name_for_every_weight(run, given):
    lines, trees, targets = given
    found = run.attention(lines[0], targets[0], trees[0])
    layers, heads = run.config.model.num_decoder_layers, run.config.model.num_heads
    assert found.weights.shape == (layers, heads, len(found.targets), len(found.positions))
    np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(found.mean, found.weights.mean((0, 1)))
    leaves = [one for one in found.positions if not one.is_node]
    assert "".join(one.name for one in leaves).replace("▁", " ").strip() == lines[0] and found.targets[-1] == "</s>"
    assert found.positions[len(leaves)][1:] == (True, 0, len(leaves))  # the root
    own = run.attention(lines[0], tree=trees[0])
    assert own.targets[:-1] == list(run.candidates(lines[:1], trees[:1], 1)[0][0].pieces)
    if find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    frame = found.to_pandas()
    assert list(frame.columns) == [
        "layer", "head", "target_index", "target", "position", "name", "is_node", "start", "end", "weight",
    ]  # fmt: skip
    for row in frame.sample(20, random_state=0).itertuples():
        assert row.weight == found.weights[row.layer, row.head, row.target_index, row.position]
        assert row.target == found.targets[row.target_index]
        assert (row.name, row.is_node, row.start, row.end) == tuple(found.positions[row.position])


def test_a_line_that_cannot_be_read_is_warned_about_and_the_others_go_on(run, given):
    lines, trees, targets = given
    spoilt = [trees[0], "(S (N a)", trees[1]]
    with pytest.warns(UserWarning, match=r"^line 2: tree: 1 bracket\(s\) of this tree are not closed") as caught:
        found = run.translate([lines[0], "a", lines[1]], trees=spoilt)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert found == [*run.translate(lines[:1], trees[:1]), "", *run.translate(lines[1:2], trees[1:2])]
    with pytest.warns(UserWarning, match="^line [12]: ") as caught:
        assert run.score([lines[0], "a"], targets[:2], trees=spoilt[:2])[1] is None
        assert run.candidates(["a"], trees=["(S"]) == [[]]
    assert {one.filename for one in caught} == {__file__} and len(caught) == 2
    mistakes = {
        "text must be a list of strings, one a line, but is one string": lambda: run.translate("a b"),
        "trees must be one a line, 1, but are 2": lambda: run.translate(["a"], trees=trees[:2]),
        "num_best must be from 1 to beam_size = 5, but is 6": lambda: run.candidates(lines, trees, 6),
        "decoding: beam: unknown": lambda: run.translate(lines, trees, beam=3),
        "was made of trees of its input files": lambda: run.translate(lines),
        r"cannot read the line: tree: 1 bracket\(s\) of this tree are not closed": lambda: run.attention("a", tree="(S (N a)"),
    }
    for message, call in mistakes.items():
        with pytest.raises(UserError, match=message):
            call()


def place(row: dict) -> int:
    return int(row["example_id"])


def ids_of_worker(dataset) -> list[int]:
    return list(map(place, dataset))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_and_workers_share_the_rows_without_repeats(world, world_size, monkeypatch):
    shards = read_shards(world / "data", "train")
    everything = [place(row) for shard in SplitShards(world / "data/encoded", "train") for row in shard.rows()]
    assert len(shards) == len(everything) and [place(row) for row in shards.to_torch()] == everything
    for workers in (1, 2, 5, 50):
        found, sizes = [], []
        for rank in range(world_size):
            dataset = shards.to_torch(rank, world_size)
            for worker in range(workers):
                info = type("Info", (), {"id": worker, "num_workers": workers})
                monkeypatch.setattr("treenet.api.shards.get_worker_info", lambda info=info: info)
                sizes.append(len(found))
                found += ids_of_worker(dataset)
            assert len(dataset) == len(everything) * (rank + 1) // world_size - len(everything) * rank // world_size
        assert found == everything  # in order, so every row once
        shares = [b - a for a, b in itertools.pairwise([*sizes, len(found)])]
        assert max(shares) - min(shares) <= 1


def test_processes_of_a_data_loader_share_the_rows(world):
    dataset = read_shards(world / "data", "train").to_torch()
    everything = sorted(map(place, dataset))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
    assert sorted(torch.cat([batch.example_ids for batch in loader]).tolist()) == everything
    sent = pickle.dumps(dataset)  # as to a process that is not a fork: it maps the files anew
    assert len(sent) < 2000 and sorted(map(place, pickle.loads(sent))) == everything


def test_batches_are_those_of_training(world):
    shards = read_shards(world / "data", "train")
    batch = next(iter(DataLoader(shards.to_torch(), batch_size=5, collate_fn=collate)))
    expected = ExampleSource(world / "data/encoded", "train").batch(range(5))
    for name in ("example_ids", "leaf_pieces", "node_labels", "tgt_in", "tgt_out"):
        assert torch.equal(getattr(batch, name), getattr(expected, name))
    assert torch.equal(batch.structure.start, expected.structure.start)


def test_arrow_has_the_rows(world):
    shards = read_shards(world / "data", "valid", "text")
    table = shards.to_arrow().to_pylist()
    assert [row["target"] for row in table] == lines_of(world, "valid.txt")
    with pytest.raises(UserError, match="to_duckdb.* reads leaves, nodes and spans|to_duckdb.* needs duckdb"):
        shards.to_duckdb()
    with pytest.raises(UserError, match="stage must be one of encoded, parsed, text, but is 'raw'"):
        read_shards(world / "data", "train", "raw")
    with pytest.raises(UserError, match="has no split 'dev'"):
        read_shards(world / "data", "dev")
    with pytest.raises(UserError, match="rank must be from 0 to world_size - 1, and both must be given, but are 2 of 2"):
        shards.to_torch(2, 2)


@pytest.mark.skipif(find_spec("duckdb") is None, reason="duckdb is not installed: pip install duckdb")
def test_duckdb_counts_what_the_index_counts(world):
    connection = read_shards(world / "data", "train").to_duckdb()
    rows = list(read_shards(world / "data", "train").to_torch())
    for name, count in (("leaves", "piece"), ("nodes", "label"), ("spans", "start")):
        expected = sum(len(row[name][count]) for row in rows)
        assert connection.sql(f"select count(*) from {name}").fetchall() == [(expected,)]


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed: pip install datasets")
def test_hugging_face_datasets_have_the_rows(world):
    shards = read_shards(world / "data", "train")
    assert shards.to_datasets().to_list() == shards.to_arrow().to_pylist()


@pytest.mark.cluster
def test_ray_datasets_have_the_rows(world):
    """The code runs in a separate process, whose end also ends its Ray."""
    code = (
        "import sys; from treenet import read_shards; from treeproc.common.ray_session import start_ray; start_ray()\n"
        "shards = read_shards(sys.argv[1]); key = lambda row: row['example_id']\n"
        "found = sorted(shards.to_ray().take_all(), key=key)\n"
        "same = lambda a, b: all(list(a[n]) == list(b[n]) for n in ('leaves', 'nodes', 'spans', 'tgt_pieces'))\n"
        "wanted = sorted(shards.to_arrow().to_pylist(), key=key)\n"
        "sys.exit(not (list(map(key, found)) == list(map(key, wanted)) and all(map(same, found, wanted))))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(world / "data")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_code_of_the_page_runs(world, given, repository, capsys):
    """Blocks of docs/api.md in order, in one namespace. One that needs packages that are not installed is left out."""
    lines, trees, targets = given
    names: dict = {"RUN": world / "run", "DATA": world / "data", "LINES": lines, "TREES": trees, "TARGETS": targets}
    blocks = re.findall(r"```python\n(.*?)```", (repository / "docs" / "api.md").read_text(), re.DOTALL)
    missing = []
    for block in blocks:
        needs = re.match(r"# needs: (.*)\n", block)
        lacks = [name for name in (needs[1].split(", ") if needs else []) if name not in names and find_spec(name) is None]
        missing += lacks
        if not lacks:
            exec(compile(block, "docs/api.md", "exec"), names)
    assert len(blocks) == 5 and names["batch"].structure is not None
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed; the other blocks ran")
    assert names["sentence_states"].shape == (2, 16)
