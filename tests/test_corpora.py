"""Weights of corpora: the examples of an epoch against a slow count, the same epochs in any order and with any windows."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_bpe_dropout import mix
from test_plan import build, random_lengths
from toyruns import TINY_RUN

from treenet.config import BatchConfig, TrainConfig
from treenet.data.hashed_sampling import Corpora, read_corpora
from treenet.data.plan import BatchPlan
from treenet.data.windows import ShardSizes
from treenet.jobs.train_job import check_job
from treenet.jobs.train_run import run_training
from treenet.tasks.base import build_task
from treenet.training.batch_stream import plan_batches
from treeproc.common.settings import UserError, load_settings
from treeproc.readers import FORMATS
from treeproc.shards.lengths import SizeCounts
from treeproc.shards.shard import SplitShards
from treeproc.stages.inputs import Inputs, SplitFiles
from treeproc.stages.preprocess import PreprocessConfig, preprocess

WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 2.5, 3.0]), min_size=1, max_size=4)


def reference_copies(example_id: int, examples: list[int], weights: list[float], seed: int | None) -> int:
    """How often an example occurs, one file after the other."""
    file, first = 0, 0
    while example_id >= first + examples[file]:
        first += examples[file]
        file += 1
    key = mix(mix(0x636F70696573) ^ (0 if seed is None else seed + 1))
    draw = (mix(mix(example_id) ^ key) >> 11) / 2**53
    return int(weights[file]) + (draw < weights[file] % 1)


def weigh(examples: list[int], weights: list[float]) -> Corpora:
    return Corpora(tuple(f"{i}.en" for i in range(len(examples))), np.array(examples), np.array(weights))


def plan_weighted(lengths, examples: list[int], weights: list[float], seed: int = 1, **batch) -> BatchPlan:
    config = BatchConfig(**{"max_tokens": 120, "corpora": {f"{i}.en": weight for i, weight in enumerate(weights)}, **batch})
    return BatchPlan.build(lengths, config, text_fingerprint="text", seed=seed, corpora=weigh(examples, weights))


@num_examples(60)
@given(WEIGHTS, st.data())
def test_an_epoch_has_every_example_as_often_as_the_slow_count(weights, data):
    sizes = [data.draw(st.integers(1, 30)) for _ in weights]
    lengths = random_lengths(sum(sizes))
    subset, seed = data.draw(st.sampled_from([("fixed", None), ("by_seed", 5)])), 5
    expected = [reference_copies(i, sizes, weights, subset[1]) for i in lengths["example_id"].tolist()]
    if not any(expected):
        return
    plan = plan_weighted(lengths, sizes, weights, seed, subset=subset[0])
    for epoch in (0, 3):
        steps = range(epoch * plan.num_batches, (epoch + 1) * plan.num_batches)
        again = plan_weighted(lengths, sizes, weights, seed, subset=subset[0])
        assert again.batch(steps[0]).tolist() == plan.batch(steps[0]).tolist()  # a plan that was just made: resume
        found = Counter(np.concatenate([plan.batch(step) for step in steps]).tolist())
        assert [found[i] for i in range(len(expected))] == expected
    assert plan.used_sizes().rows.sum() == len(plan.rows) == sum(expected)
    assert plan.left_out.get("weight", 0) == expected.count(0)


def test_batches_stay_within_the_budget_and_copies_are_spread():
    lengths = random_lengths(200)
    plan = plan_weighted(lengths, [50, 150], [4, 1])
    twice = 0
    for step in range(plan.num_batches):
        rows = plan.batch(step)
        assert len(rows) * lengths["leaves"][rows].max() <= 120 and len(rows) * (lengths["tgt_pieces"][rows].max() + 1) <= 120
        twice += len(rows) - len(set(rows.tolist()))
    assert twice < 120  # of 150 further copies, many are in other batches


def test_windows_count_the_same_rows():
    lengths = random_lengths(300)
    leaves, targets, nodes = (np.asarray(lengths[name]) for name in ("leaves", "tgt_pieces", "nodes"))
    shards = ShardSizes(np.full(10, 30), lambda a, b: SizeCounts.of(*(c[30 * a : 30 * b] for c in (leaves, targets, nodes))))
    config = BatchConfig(max_tokens=120, corpora={"0.en": 1.5, "1.en": 0.5}, window_rows=90)
    corpora = weigh([100, 200], [1.5, 0.5])
    plan = BatchPlan.build(lengths, config, text_fingerprint="text", seed=1, shards=shards, corpora=corpora)
    expected = np.repeat(np.arange(300), corpora.count_copies(lengths["example_id"], None))
    epoch = np.concatenate([plan.batch(step) for step in range(plan.num_batches, 2 * plan.num_batches)])
    assert sorted(epoch.tolist()) == expected.tolist() == plan.rows.tolist()


def test_weight_one_is_the_plan_without_corpora():
    lengths = random_lengths(120)
    plain, weighted = build(lengths), plan_weighted(lengths, [60, 60], [1, 1])
    assert all(np.array_equal(plain.batch(step), weighted.batch(step)) for step in range(2 * plain.num_batches))
    assert "corpora" not in BatchConfig().model_dump() and plain.left_out == {"fraction": 0, "length": 0}
    with pytest.raises(ValueError, match="a plan needs the examples of each file"):
        build(lengths, corpora={"a.en": 2})


# Files of a data set.

COUNTS = {"news/train.en": 37, "synthetic.en.gz": 61, "ted/train.en": 23}
WEIGHTED = {"news/train.en": 3.0, "synthetic.en.gz": 0.5, "ted/train.en": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data set of three files, one of them a .gz file, with held out, duplicate and filtered lines. Words name their file."""
    folder = tmp_path_factory.mktemp("weighted")
    draw, source, target = random.Random(4), [], []
    for place, (name, count) in enumerate(COUNTS.items()):
        words = [f"{'xyz'[place]}{letter}" for letter in "abcdef"]
        lines = [" ".join(draw.choices(words, k=draw.randint(2, 6))) for _ in range(count)]
        for number in range(5, count, 9):
            lines[number] = draw.choice(["", lines[0], " ".join(words * 9)])  # empty, a duplicate, too long
        for side, paths in (("en", source), ("de", target)):
            paths.append(path := folder / name.replace("en", side))
            path.parent.mkdir(exist_ok=True)
            text = "".join(f"{line}\n" for line in lines).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    splits = {"train": {"source": source, "target": target}, "valid": {"hold_out": 4}}
    settings = {
        "splits": splits, "parser": {"name": "words"}, "tree": {"tree_source": "balanced"}, "subwords": {"vocab_size": 300},
        "filters": {"drop_duplicates": True, "max_words": 20}, "rows_per_shard": 16, "workers": 0,
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(settings), folder / "data")
    return folder / "data"


def weighted_config(data: Path, weights: object, *more: str) -> TrainConfig:
    overrides = [f"batch.corpora={json.dumps(weights)}", *more]
    return load_settings(TrainConfig, None, overrides, **json.loads(json.dumps(TINY_RUN)), data=data)


def origin(text: str) -> str:
    """The file that a line came from."""
    return list(COUNTS)["xyz".index(text[0])]


def test_every_example_has_the_weight_of_its_file(data):
    rows = [row for shard in SplitShards(data / "text", "train") for row in shard.rows()]
    index = json.loads((data / "text" / "index.json").read_text())
    assert set(index["dropped"]["train"]) == {"empty_source", "duplicate", "source_too_long"} and len(index["shards"]) > 4
    held_out = sum(COUNTS.values()) // 4
    assert sum(file["examples"] for file in index["train_files"]) == sum(COUNTS.values()) - held_out
    for weights in (WEIGHTED, {"synthetic.en.gz": 0.5, "news/train.en": 3}, {str(data.parent / "news" / "train.en"): 2}):
        config = weighted_config(data, weights)
        by_file = dict.fromkeys(COUNTS, 1.0) | {
            next(name for name in COUNTS if key.endswith(name)): w for key, w in weights.items()
        }
        found = read_corpora(data, config.batch.corpora)
        ids = np.array([row["example_id"] for row in rows])
        of_file = [found.files[place] for place in found.places(ids)]
        assert all(file.endswith(origin(row["source"])) for file, row in zip(of_file, rows, strict=True))
        source = build_task(config).open("train", training=True)
        copies = Counter(np.asarray(source.lengths["example_id"])[plan_batches(config, source).rows].tolist())
        for row in rows:
            weight = by_file[origin(row["source"])]
            assert copies[row["example_id"]] in {int(weight), int(np.ceil(weight))}
        facts = check_job(config).facts["corpora"]
        assert [fact["weight"] for fact in facts] == list(by_file.values())
        assert sum(fact["in_epoch"] for fact in facts) == copies.total()


@pytest.mark.slow
def test_training_prints_the_files_and_records_them(data, tmp_path, capsys):
    config = weighted_config(data, {"synthetic.en.gz": 0.5}, "max_steps=1")
    run_training(config, tmp_path / "run")
    (file,) = [one for one in json.loads((tmp_path / "run" / "run.json").read_text())["corpora"] if one["weight"] == 0.5]
    line = f"  {file['file']}: {file['examples']:,} pairs, weight 0.5; {file['in_epoch']:,} in an epoch"
    assert {"corpora of train:", line} <= set(capsys.readouterr().err.split("\n"))
    run_training(config, tmp_path / "run")  # its config.yaml reads back to the same settings
    with pytest.raises(UserError, match=r"holds a run with other settings \(batch.corpora: "):
        run_training(weighted_config(data, {"synthetic.en.gz": 0.6}, "max_steps=1"), tmp_path / "run")


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        ({"test.en": 2}, "must name files of train, but test.en fits none of "),
        ({"train.en": 2}, r"train.en fits 2 of .*; give more of the path"),
        ({"ted/train.en": 2, "/ted/train.en": 2}, "/ted/train.en fits none"),
        ({"synthetic.en.gz": 2, "weighted0/synthetic.en.gz": 2}, "synthetic.en.gz twice; give it one weight"),
    ],
)
def test_weights_that_do_not_fit_the_files_are_refused(data, corpora, message):
    with pytest.raises(UserError, match=message):
        read_corpora(data, weighted_config(data, corpora).batch.corpora)


@pytest.mark.parametrize("name", FORMATS)
def test_examples_of_a_file_are_counted_in_every_format(name, tmp_path):
    """Against a pass over both files."""
    head, words = "sentence_A\tsentence_B\trelatedness_score\n", "1\t{}\t_\tX\tX\t_\t0\troot\t_\t_\n"
    table = "sentence\tverb_pos\tverb_index\n"
    texts = {
        "parallel": ["a\nb\n", "c"],
        "text": ["a\nb\n", "c"],
        "documents": ["a\n\nb\n", "c"],
        "sgm": ['<seg id="1">a</seg><seg id="2">b</seg>', '<seg id="3">c</seg>'],
        "iwslt_xml": ["<url>u</url>\na\nb\n", "c\n"],
        "brackets": ["(S (A a))(S\n(A b))", "(S (A c))"],
        "sst": ["(3 a)\n(2 b)\n", "(1 c)"],
        "agreement": ["VBZ\ta\nVBP\tb\n", "VBZ\tc\n"],
        "labelled": ["x\ta\ny\tb\n", "x\tc\n"],
        "linzen": [f"{table}a is\tVBZ\t2\nb is\tVBZ\t2\n", f"{table}c is\tVBZ\t2\n"],
        "sick": [f"{head}a\tb\t3\n", head],
        "conllu": [f"{words.format('a')}\n{words.format('b')}", words.format("c")],
        "imdb": [],
    }
    paths = [tmp_path / f"{i}.txt" for i in range(2)]
    for path, text in zip(paths, texts[name], strict=False):
        path.write_text(text)
    expected = [2, 0 if name == "sick" else 1]
    if name == "imdb":  # a folder without reviews is no error beside another
        paths, expected = [tmp_path / folder for folder in ("one", "none")], [2, 0]
        for path in ("one/pos/0.txt", "one/neg/1.txt", "none/unsup/2.txt"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text("text\n")
    target = paths if FORMATS[name].target == "required" else []
    inputs = Inputs({"train": SplitFiles(source=paths, target=target)}, name, "none", None)
    assert inputs.count_train_files() == expected and sum(expected) == sum(1 for _ in inputs.rows("train"))
