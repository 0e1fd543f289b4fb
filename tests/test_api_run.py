"""The library on runs and shards: what it returns is what the commands write; every row comes once; the page's code runs."""

import itertools
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from bracketed_data import write_bracketed_data
from torch.utils.data import DataLoader

from treenet import UserError, collate, load_run, read_shards
from treenet.cli import preprocess, train, translate
from treenet.data.examples import ExampleSource
from treeproc.shards import shard as shard_module
from treeproc.shards.shard import SplitShards

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with test files, a data set of several shards and a run."""
    folder = tmp_path_factory.mktemp("world")
    write_bracketed_data(folder)
    data = ["--config", str(folder / "data.yaml"), "--out", str(folder / "data"), "rows_per_shard=7"]
    preprocess.main(data)
    train.main(["--config", str(folder / "train.yaml"), "--out", str(folder / "run"), f"data={folder / 'data'}"])
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
    run.model.train()  # as a program leaves it that trained it further: attention was that of dropped units
    np.testing.assert_array_equal(run.attention(lines[0], targets[0], trees[0]).weights, found.weights)
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


def test_threads_get_what_one_gets(run, given):
    """Attention came from batches of other threads, which also failed."""
    lines, trees, targets = given
    calls = [
        lambda: run.translate(lines, trees=trees),
        lambda: [one.text for one in run.score(lines, targets, trees=trees)],
        lambda: run.attention(lines[0], targets[0], trees[0]).weights.tolist(),
        lambda: run.attention(lines[1], tree=trees[1]).weights.tolist(),
    ] * 4
    expected = [call() for call in calls[:4]] * 4
    with ThreadPoolExecutor(8) as threads:
        assert [one.result() for one in [threads.submit(call) for call in calls]] == expected


def test_a_program_keeps_its_random_numbers_its_threads_and_the_mode_of_the_model(world, given):
    lines, trees, targets = given
    torch.manual_seed(7)
    expected = torch.rand(6)
    torch.manual_seed(7)
    first, own = torch.rand(3), load_run(world / "run")
    assert torch.cat([first, torch.rand(3)]).equal(expected)
    own.model.train()
    own.model.encoder.eval()
    before = [module.training for module in own.model.modules()]
    torch.set_num_threads(2)
    calls = (
        lambda: own.translate(lines[:2], trees=trees[:2]),
        lambda: own.score(lines[:2], targets[:2], trees=trees[:2]),
        lambda: own.attention(lines[0], targets[0], trees[0]),
    )
    own._encoders[False] = own._encoder(True)  # as a parser, which takes one thread
    try:
        for call in (*calls, lambda: own.translate(lines[:1])):
            with suppress(UserError):
                call()
            assert [module.training for module in own.model.modules()] == before and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_candidates_are_as_many_as_the_beam_holds(run, given):
    lines, trees, _ = given
    for beam_size, expected in ((3, 3), (5, 5), (7, 5)):
        found = run.candidates(lines[:1], trees[:1], beam_size=beam_size)
        assert found == run.candidates(lines[:1], trees[:1], expected, beam_size=beam_size)


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


def test_doubtful_trees_are_warned_about_once_a_call(run, given):
    lines, trees, targets = given
    other = [re.sub(r"\((?=\w+ \()", "(ODD", tree) for tree in trees]
    calls = [
        lambda: run.translate(lines, trees=other),
        lambda: run.candidates(lines, trees=other),
        lambda: run.score(lines, targets, trees=other),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="^lines: labels: .* have labels that the training data lacks; ") as caught:
            call()
        assert [one.filename for one in caught] == [__file__]


def test_an_empty_line_is_warned_about(run, given):
    lines, trees, targets = given
    with pytest.warns(UserWarning, match="^line 2: is empty, so the model does not read it$") as caught:
        found = run.translate([lines[0], "", lines[1]], trees=[trees[0], "", trees[1]])
        assert found == [*run.translate(lines[:1], trees[:1]), "", *run.translate(lines[1:2], trees[1:2])]
        assert np.isnan(run.score([lines[0], " "], [targets[0], ""], trees=[trees[0], ""])[1].score)
        assert np.isnan(run.candidates([lines[0], ""], trees=[trees[0], ""])[1][0].score)
    assert {one.filename for one in caught} == {__file__} and len(caught) == 3


MISTAKES = {
    "lines must be a list of strings, one a line, but is one string": lambda run, a, b: run.translate("a b"),
    "lines must be a list of strings, one a line, but is a generator": lambda run, a, b: run.translate(line for line in a),
    "lines must be a list of strings, one a line, but is None": lambda run, a, b: run.translate(None),
    "lines must be a list of strings, one a line, but is a dict": lambda run, a, b: run.translate({"a": 1}),
    r"lines\[1\] must be a string, but is None": lambda run, a, b: run.translate(["a", None], trees=b[:2]),
    r"lines\[0\] must be a string, but is a bytes": lambda run, a, b: run.translate([b"a"], trees=b[:1]),
    r"lines\[0\] must be text that UTF-8 can hold": lambda run, a, b: run.translate(["\ud800"], trees=b[:1]),
    "trees must be one a line, 1, but are 2": lambda run, a, b: run.translate(["a"], trees=b[:2]),
    r"trees\[0\] must be a string, but is 7": lambda run, a, b: run.translate(["a"], trees=[7]),
    "targets must be a list of strings, one a line, but is one string": lambda run, a, b: run.score(a[:1], "a", trees=b[:1]),
    "targets must be a list of strings, one a line, but is None": lambda run, a, b: run.score(a[:1], None, trees=b[:1]),
    "prefixes must be one a line, 1, but are 2": lambda run, a, b: run.translate(a[:1], trees=b[:1], prefixes=["a", "b"]),
    "must_appear must be a list of phrases for each line, but is one string": lambda run, a, b: run.translate(
        a[:1], trees=b[:1], must_appear="a"
    ),
    r"must_appear\[0\] must be a list of phrases, but is one string": lambda run, a, b: run.translate(
        a[:1], trees=b[:1], must_appear=["a"]
    ),
    r"must_not_appear\[0\]: a phrase must be a string, but is 7": lambda run, a, b: run.translate(
        a[:1], trees=b[:1], must_not_appear=[[7]]
    ),
    "must_appear needs method = beam, but it is sampling": lambda run, a, b: run.translate(
        a[:1], trees=b[:1], must_appear=[["a"]], method="sampling"
    ),
    "num_best must be from 1 to beam_size = 5, but is 6": lambda run, a, b: run.candidates(a, b, 6),
    "num_best must be an integer, but is 2.0": lambda run, a, b: run.candidates(a, b, 2.0),
    "num_best must be an integer, but is True": lambda run, a, b: run.candidates(a, b, True),
    "decoding: beam: unknown key; did you mean beam_size?": lambda run, a, b: run.translate(a, b, beam=3),
    r"decoding: prefix: unknown key; did you mean prefixes\?$": lambda run, a, b: run.translate(a, b, prefix=["a"]),
    r"decoding: num_best: unknown key; did you mean run\.candidates\(lines, num_best": lambda run, a, b: run.translate(
        a, b, num_best=2
    ),
    "decoding: num_beams: unknown key; ": lambda run, a, b: run.translate(a, b, num_beams=3),
    "decoding: xyz: unknown key; the keys are method, beam_size, ": lambda run, a, b: run.translate(a, b, xyz=3),
    "decoding: beam_size: must be a valid integer.*, but is '3x'": lambda run, a, b: run.translate(a, b, beam_size="3x"),
    "decoding: method: must be 'beam', .* but is 'Beam'": lambda run, a, b: run.translate(a, b, method="Beam"),
    "decoding: temperature needs method = sampling or mbr": lambda run, a, b: run.translate(a, b, temperature=0.5),
    "was made of trees of its input files": lambda run, a, b: run.translate(a),
    r"cannot read the line: tree: 1 bracket\(s\) of this tree are not closed": lambda run, a, b: run.attention(
        "a", tree="(S (N a)"
    ),
    "line must be a string, but is a list": lambda run, a, b: run.attention(a, tree=b[0]),
    "tree must be a string, but is 7": lambda run, a, b: run.attention(a[0], tree=7),
    "the line is empty, so it has no attention": lambda run, a, b: run.attention("", tree=""),
    "device must be one of this machine, where PyTorch finds [0-9]+ GPUs, but is cuda:99": lambda run, a, b: run.to("cuda:99"),
    "device must be a device of PyTorch, .* but is 'gpu'": lambda run, a, b: run.to("gpu"),
}
PLACES = {
    "/nope is not a folder; give a data set of tree-attention preprocess": lambda data, run: read_shards("/nope"),
    "data must be the path of a folder, but is None": lambda data, run: read_shards(None),
    "data must be the path of a folder, but is ''": lambda data, run: read_shards(""),
    "stage must be encoded, parsed or text, but is 'raw'": lambda data, run: read_shards(data, "train", "raw"),
    "stage must be encoded, parsed or text, but is \\['text'\\]": lambda data, run: read_shards(data, "train", ["text"]),
    "split must be a string, but is None": lambda data, run: read_shards(data, None),
    "has no split 'dev'; there are: train, valid, test": lambda data, run: read_shards(data, "dev"),
    "rank must be from 0 to 1, but is 2": lambda data, run: read_shards(data).to_torch(2, 2),
    "rank must be an integer, but is 1.0": lambda data, run: read_shards(data).to_torch(1.0, 2),
    "world_size must be at least 1, but is 0": lambda data, run: read_shards(data).to_torch(0, 0),
    "rank and world_size must both be given, but are 1 and None": lambda data, run: read_shards(data).to_torch(1),
    "a row must be an integer, but is 'a'": lambda data, run: read_shards(data)["a"],
    "a row must be an integer, but is slice": lambda data, run: read_shards(data)[:2],
    "to_duckdb.* reads leaves, nodes and spans|to_duckdb.* needs duckdb": lambda data, run: read_shards(
        data, stage="text"
    ).to_duckdb(),
    "seed must be at least 0, but is -1": lambda data, run: read_shards(data).to_torch(shuffle=True, seed=-1),
    "shuffle must be True or False, but is 1": lambda data, run: read_shards(data).to_torch(shuffle=1),
    "epoch must be an integer, but is 0.5": lambda data, run: read_shards(data).to_torch(shuffle=True).set_epoch(0.5),
    "view must be leaves, nodes or spans, but is 'words'": lambda data, run: read_shards(data).to_pandas("words"),
    r"to_pandas\(view\) reads leaves, nodes and spans, but .*/text has none; read its stage encoded": lambda data, run: (
        read_shards(data, stage="text").to_pandas("nodes")
    ),
    "that are read as trees, but one lacks 'leaves'": lambda data, run: collate(list(read_shards(data, stage="text"))[:2]),
    r"me/nope is missing; .* huggingface_hub.snapshot_download\('me/nope'\)": lambda data, run: load_run("me/nope"),
    "/nope is not a run: /nope/config.yaml is missing; give the folder of a training run": lambda data, run: load_run("/nope"),
    "/run.json is missing; give the folder of a training run": lambda data, run: load_run(data),
    "path must be the path of a folder, but is None": lambda data, run: load_run(None),
    "checkpoint must be 'averaged', the number of a step or a folder, but is None": lambda data, run: load_run(
        run, checkpoint=None
    ),
    r"step_00000099/model.safetensors is missing; train to the end, or choose a step": lambda data, run: load_run(
        run, checkpoint=99
    ),
    "^model.safetensors is missing; train to the end, or choose a step": lambda data, run: load_run(run, checkpoint=""),
    "max_leaves must be an integer, but is '9'": lambda data, run: load_run(run, max_leaves="9"),
    "max_leaves must be at least 1, but is 0": lambda data, run: load_run(run, max_leaves=0),
    "device must be one of this machine, where PyTorch finds [0-9]+ GPUs, but is cuda:99": lambda data, run: load_run(
        run, device="cuda:99"
    ),
    "device must be a device of PyTorch, such as 'cpu' or 'cuda:1', but is None": lambda data, run: load_run(run, device=None),
}


@pytest.mark.parametrize("message", [*MISTAKES, *PLACES])
def test_a_mistake_is_one_sentence_of_python(world, run, given, message):
    """It names arguments, and no options or scripts of commands."""
    with pytest.raises(UserError, match=message) as error:
        if message in MISTAKES:
            MISTAKES[message](run, *given[:2])
        else:
            PLACES[message](world / "data", world / "run")
    assert not re.search(r"\n|--|workflows/|decoding\.", str(error.value))


def test_messages_of_a_command_stay_those_of_a_command(world, run, given):
    with pytest.raises(UserError, match="unknown key; the keys are"):
        run.translate(given[0], given[1], xyz=3)
    with pytest.raises(UserError, match=r"decoding\.xyz: unknown key; --help lists all keys"):
        translate.main(["--out", str(world / "run"), "decoding.xyz=3"])
    with pytest.raises(UserError, match=r"run tree-attention preprocess to the end"):
        SplitShards(world / "nope", "train")


def test_a_run_moves_and_says_what_it_is(world, run):
    assert re.fullmatch(r"Run\(tree_transformer, weights 'averaged', [0-9,]+ parameters, device='cpu'\)", repr(run))
    moved = load_run(world / "run", checkpoint=4)
    assert moved.to("meta") is moved and repr(moved).endswith("weights 'step_00000004', " + repr(moved).split(", ", 2)[2])
    assert {parameter.device.type for parameter in moved.model.parameters()} == {"meta"}


def test_weights_that_a_program_changed_are_not_lost_when_it_saves_the_run(world, tmp_path):
    """The loaded weights were saved, without a word."""
    changed = load_run(world / "run")
    changed.model.half()
    changed.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        next(changed.model.parameters()).add_(1)
    with pytest.raises(UserError, match=r"run\.model has another \S+ than averaged, .* call torch\.save"):
        changed.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


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


def test_workers_that_are_no_forks_know_the_rank(world, monkeypatch):
    """Such a process has no process group: it would take the rows of all ranks."""
    dataset = read_shards(world / "data", "train").to_torch()
    everything, sent = ids_of_worker(dataset), []
    for rank in range(2):
        with monkeypatch.context() as patch:
            for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", 2)):
                patch.setattr(f"treenet.api.shards.dist.{name}", lambda value=value: value)
            sent.append(pickle.dumps(dataset))
    assert [ids_of_worker(pickle.loads(one)) for one in sent] == [everything[:20], everything[20:]]
    assert ids_of_worker(pickle.loads(pickle.dumps(dataset))) == everything  # a process group may be made later


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("held", [2, 64])
def test_shuffled_rows_come_once_on_all_ranks_and_workers(world, world_size, held, monkeypatch):
    opened = []
    monkeypatch.setattr("treenet.api.shards.HELD_SHARDS", held)
    monkeypatch.setattr("treeproc.shards.shard.HELD_SHARDS", held)
    everything = sorted(map(place, read_shards(world / "data", "train")))
    shard = shard_module.Shard
    monkeypatch.setattr(shard_module, "Shard", lambda folder, record: opened.append(record.name) or shard(folder, record))

    def order(seed: int, epoch: int, workers: int) -> list[int]:
        found = []
        for rank in range(world_size):
            dataset = read_shards(world / "data", "train").to_torch(rank, world_size, shuffle=True, seed=seed)
            dataset.set_epoch(epoch)
            before = len(found)
            for worker in range(workers):
                info = type("Info", (), {"id": worker, "num_workers": workers})
                monkeypatch.setattr("treenet.api.shards.get_worker_info", lambda info=info: info)
                opened.clear()
                found += ids_of_worker(pickle.loads(pickle.dumps(dataset)))
                assert len(opened) == len(set(opened))  # none is opened twice
            assert len(found) - before == len(dataset)
        return found

    for workers in (1, 3):
        first = order(0, 0, workers)
        assert first == order(0, 0, workers) and sorted(first) == everything
        others = [order(0, 1, workers), order(1, 0, workers)]
        assert all(sorted(other) == everything and other != first for other in others) and others[0] != others[1]
        steps = sum(abs(after - before) == 1 for before, after in itertools.pairwise(first))
        assert steps < len(first) / 2  # neighbours are seldom neighbours of the split
        if world_size == workers == 1:
            of_shard = {place(row) for row in SplitShards(world / "data/encoded", "train")[0].rows()}
            assert len({tuple(one for one in found if one in of_shard) for found in (first, *others)}) == 3
            if held == 2:  # the first two shards are others
                assert len({frozenset(found[:14]) for found in (first, *others)}) == 3


def test_rows_of_one_shard_have_another_order_in_every_epoch(world):
    dataset = read_shards(world / "data", "test").to_torch(shuffle=True)
    orders = set()
    for epoch in range(4):
        dataset.set_epoch(epoch)
        orders.add(tuple(map(place, dataset)))
    assert len(orders) > 2 and len({frozenset(order) for order in orders}) == 1


def test_processes_that_a_loader_keeps_see_the_epoch(world):
    dataset = read_shards(world / "data", "train").to_torch(shuffle=True)
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate, **options)

    def ids() -> list[int]:
        return torch.cat([batch.example_ids for batch in loader]).tolist()

    first = ids()
    assert ids() == first
    dataset.set_epoch(1)
    second = ids()
    assert second != first and sorted(second) == sorted(first) == sorted(map(place, read_shards(world / "data", "train")))


@pytest.mark.parametrize("options", [{}, {"shuffle": True}])
def test_processes_of_accelerate_share_the_rows(world, options):
    loaders = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed: pip install accelerate")
    dataset = read_shards(world / "data", "train").to_torch(0, 1, **options)
    everything = ids_of_worker(dataset)
    found = [
        ids_of_worker(loaders.IterableDatasetShard(dataset, batch_size=5, num_processes=2, process_index=rank))
        for rank in range(2)
    ]
    assert sorted(found[0] + found[1]) == sorted(everything)


def test_pandas_has_the_rows(world):
    pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    shards = read_shards(world / "data", "train")
    frame = shards.to_pandas()
    assert frame.to_dict("records") == shards.to_arrow().to_pylist()
    rows = list(shards)
    for view, names in (("leaves", ["piece"]), ("nodes", ["label"]), ("spans", ["start", "end"])):
        found = shards.to_pandas(view)
        assert found["example_id"].tolist() == [place(row) for row in rows for _ in row[view][names[0]]]
        for name in names:
            assert found[name].tolist() == [value for row in rows for value in row[view][name].tolist()]
    text = read_shards(world / "data", "valid", "text")
    assert text.to_pandas()["target"].tolist() == lines_of(world, "valid.txt")


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


def rows_of(shards) -> list:
    return list(map(place, shards))


def test_shards_are_a_sequence_of_rows(world):
    shards = read_shards(world / "data", "train")
    ids = list(map(place, shards.to_torch()))
    assert list(map(place, shards)) == [place(shards[row]) for row in range(len(shards))] == ids
    assert place(shards[-1]) == ids[-1] and place(shards[np.int64(1)]) == ids[1]
    with pytest.raises(IndexError):
        shards[len(shards)]
    assert repr(shards) == f"Shards({str(world / 'data/encoded')!r}, 'train': 40 rows in 6 shards)"
    every = DataLoader([shards] * 2, batch_size=None, num_workers=2, collate_fn=rows_of, multiprocessing_context="fork")
    assert list(every) == [ids, ids]  # a worker reads all rows
    shuffled = DataLoader(shards, batch_size=4, shuffle=True, collate_fn=collate)
    assert sorted(torch.cat([batch.example_ids for batch in shuffled]).tolist()) == sorted(ids)


@pytest.mark.skipif(find_spec("duckdb") is None, reason="duckdb is not installed: pip install duckdb")
def test_duckdb_counts_what_the_index_counts(world):
    connection = read_shards(world / "data", "train").to_duckdb()
    rows = list(read_shards(world / "data", "train").to_torch())
    for name, count in (("leaves", "piece"), ("nodes", "label"), ("spans", "start")):
        expected = sum(len(row[name][count]) for row in rows)
        assert connection.sql(f"select count(*) from {name}").fetchall() == [(expected,)]
    with pytest.raises(UserError, match="the connection already has leaves, nodes, spans; give another connection, or none"):
        read_shards(world / "data", "train").to_duckdb(connection)


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


CONLLU = "1\ta\t_\tDET\t_\t_\t2\tdet\t_\t_\n2\tcat\t_\tNOUN\t_\t_\t0\troot\t_\t_\n"


def write_classifier(folder, trees):
    """A classifier of the trees: whether their number is even."""
    (folder / "classes.tsv").write_text("".join(f"{('even', 'odd')[i % 2]}\t{tree}\n" for i, tree in enumerate(trees)))
    files = f"splits.train.source=[{folder / 'classes.tsv'}]", f"splits.valid.source=[{folder / 'classes.tsv'}]"
    settings = "format=labelled", "labelled.brackets=true", "parser.name=given", "subwords.vocab_size=300", "workers=0"
    preprocess.main(["--out", str(folder / "classes"), *files, *settings])
    sizes = "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_encoder_layers=1", "max_steps=1"
    train.main(["--out", str(folder / "classifier"), f"data={folder / 'classes'}", "task=classification", *sizes, "workers=0"])
    return folder / "classifier"


def test_the_code_of_the_page_runs(world, given, repository, tmp_path):
    """Blocks of docs/api.md in order, in one namespace. One that needs packages that are not installed is left out."""
    lines, trees, targets = given
    names: dict = {"RUN": world / "run", "DATA": world / "data", "LINES": lines, "TREES": trees, "TARGETS": targets}
    names |= {"CONLLU": tmp_path / "a.conllu"}
    names["CONLLU"].write_text(CONLLU)
    names["CLASSIFIER"] = write_classifier(world, trees)
    blocks = re.findall(r"```python\n(.*?)```", (repository / "docs" / "api.md").read_text(), re.DOTALL)
    missing = []
    for block in blocks:
        needs = re.match(r"# needs: (.*)\n", block)
        lacks = [name for name in (needs[1].split(", ") if needs else []) if name not in names and find_spec(name) is None]
        missing += lacks
        if not lacks:
            exec(compile(block, "docs/api.md", "exec"), names)
    assert len(blocks) == 9 and names["batch"].structure is not None and len(names["again"]) == 2
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed; the other blocks ran")
    assert names["sentence_states"].shape == (2, 16)
