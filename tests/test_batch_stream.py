"""Batches from loader processes: those of the thread, to the bit, through a whole training."""

from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_device import DeviceOperations, stand_in_for_a_gpu
from test_packing import assert_same
from toydata import write_toy_data
from toylabels import make_rows, write_labelled
from toyruns import final_weights, losses, make_config, make_task, same

from treenet.data.loader_server import SLOT_BYTES, _answer
from treenet.data.packing import Packed
from treenet.tasks.base import build_task
from treenet.training.batch_stream import BatchStream, OpenTraining, TrainingData
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer, train
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PAIR_COLUMNS = ("leaves", "nodes", "spans", "score")
# Settings by task: a model of trees where there is one.
TASKS = {
    "translation": ["batch.tokens_per_device=24", "sampling.bpe_dropout=0.3", "sampling.word_dropout=0.1"],
    "classification": ["task=classification"],
    "relatedness": ["task=relatedness", "model.name=tree_lstm", "optimizer.label_smoothing=0"],
    "masked_lm": ["task=masked_lm", "model.name=transformer"],
    "grammar": ["task=causal_lm", "model.name=transformer_grammar"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """A data set for every task."""
    pairs = make_rows(40)
    for row in pairs:
        row["score"] = row["example_id"] // 2 / 5
    pairs_of = {"train": pairs, "valid": pairs[:8]}
    scores = write_labelled(tmp_path_factory.mktemp("pairs"), pairs_of, columns=PAIR_COLUMNS, num_classes=None)
    classes = write_labelled(tmp_path_factory.mktemp("classes"), {"train": make_rows(40), "valid": make_rows(8)})
    toy = write_toy_data(tmp_path_factory.mktemp("toy"))
    from_toy = dict.fromkeys(("translation", "masked_lm", "grammar"), toy)
    return from_toy | {"classification": classes, "relatedness": scores}


def test_processes_make_what_the_training_would_make_itself(data, forked_loaders):
    """The second of two ranks reads from the middle of an epoch into the next. Meanwhile, the limit of micro-batches falls."""
    task = build_task(make_config(data["translation"], *TASKS["translation"], "loader_workers=2"))
    here, limits, most = (TrainingData(task, 1, 2, CPU), TrainingData(task, 1, 2, CPU)), [], 0
    with BatchStream(task, Ranks(1, 2, CPU), here[0], range(5, 25)) as stream:
        for step, rank_batch in zip(range(5, 25), stream, strict=True):
            here[1].micro_batches.limit = rank_batch.limit
            assert_same(rank_batch, here[1].prepared(step))
            limits.append(rank_batch.limit)
            most = max(most, len(rank_batch.batches))
            if step == 13:
                here[0].micro_batches.limit = 12
    assert limits[0] != 12 and limits[-1] == 12 and most > 1


@pytest.mark.parametrize("name", TASKS)
def test_what_a_process_receives_and_sends_is_whole(data, name):
    """The data and the batches of every task go the way of a process, within this one."""

    def sent(value: object) -> Any:
        return ForkingPickler.loads(ForkingPickler.dumps(value))

    task = build_task(make_config(data[name], *TASKS[name]))
    make, here = sent(OpenTraining(task, 1, 2, "cpu"))(), TrainingData(task, 1, 2, CPU)
    room, most = torch.empty(SLOT_BYTES, dtype=torch.uint8), 0
    for step in range(5, 25):
        here.micro_batches.limit = 12 if step > 15 else here.micro_batches.limit
        answer, rest = _answer(make, room, step, {"limit": here.micro_batches.limit})
        found = Packed(room, sent(answer).layout).unpack()
        assert rest is None
        assert_same(found, here.prepared(step))
        most = max(most, len(found.batches))
    assert most > 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_comes_to_an_accelerator_in_one_copy(data, monkeypatch, workers, forked_loaders):
    """All of it: its update sends nothing more but the flags of the rank. Whatever would wait for data raises on "meta"."""
    ranks = Ranks(0, 1, stand_in_for_a_gpu(monkeypatch))
    settings = ["model.name=transformer", "model.attention_dropout=0", "batch.tokens_per_device=24"]
    trainer = Trainer(build_task(make_config(data["translation"], *settings, f"loader_workers={workers}")), ranks)
    with DeviceOperations() as seen, BatchStream(trainer.task, ranks, trainer.data, range(3)) as stream:
        for number, rank_batch in enumerate(stream, start=1):
            assert len(rank_batch.batches) > 1
            assert seen.copies.total() == number and seen.kernels.total() == number  # a kernel widens its indices
    with DeviceOperations() as seen:
        trainer.train_step.update(rank_batch, trainer.micro_batches, 2)
    assert seen.copies.total() == 1


def test_a_run_may_change_to_processes_and_back(data, tmp_path, forked_loaders):
    """Interrupted with processes and resumed with the thread, it equals one that was never interrupted."""
    settings = ("model.attention_dropout=0.1", "max_steps=16", "checkpoint_every=4")
    for name, stops in (("whole", [0]), ("cut", [2, 0])):
        (tmp_path / name).mkdir()
        for workers in stops:
            asked = iter(range(100))
            stop = (lambda asked=asked: next(asked) == 5) if workers else (lambda: False)
            train(make_task(data["translation"], *settings, f"loader_workers={workers}"), tmp_path / name, should_stop=stop)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and len(losses(tmp_path / "cut")) == 16
    assert same(final_weights(tmp_path / "cut"), final_weights(tmp_path / "whole"))


def test_processes_and_the_thread_report_a_bad_tree_alike(tmp_path, forked_loaders):
    rows = make_rows(30)
    rows[7]["spans"]["end"][0] = 99
    data, said = write_labelled(tmp_path / "data", {"train": rows, "valid": make_rows(3)}), []
    for workers in (0, 1):
        task = build_task(make_config(data, "task=classification", f"loader_workers={workers}", "batch.max_tokens=9"))
        with (
            pytest.raises(UserError) as error,
            BatchStream(task, Ranks(0, 1, CPU), TrainingData(task, 0, 1, CPU), range(90)) as s,
        ):
            for _ in s:
                pass
        said.append(str(error.value))
    assert said[0] == said[1] and "99" in said[0]
