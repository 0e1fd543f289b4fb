"""The case `loader` of training.py: how fast one process makes batches for an accelerator, and their cost for the training."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measure import Times, emit, time_once
from torch.utils.data import DataLoader, Dataset

from treenet.config import TrainConfig
from treenet.data.examples import Prefetcher
from treenet.data.loader_processes import LoaderProcesses
from treenet.data.loader_server import DEPTH
from treenet.data.packing import Packed, pack
from treenet.structure.base import tensors_of
from treenet.tasks.base import build_task
from treenet.training.batch_stream import OpenTraining, TrainingData

CPU, ACCELERATOR = torch.device("cpu"), torch.device("meta")  # "meta" asks for batches as a GPU does, and takes no time
NAMES = {"tree": "tree_transformer", "plain": "transformer"}


def measure_loader(case: str, data: Path, config: Callable[..., TrainConfig], steps: int, rounds: int) -> None:
    """Measure trees and plain leaves; for trees also the index lists of CPUs."""
    tasks = {kind: build_task(config(data, "batch.max_tokens=4096", f"model.name={name}")) for kind, name in NAMES.items()}
    made = {kind: TrainingData(task, 0, 1, ACCELERATOR) for kind, task in tasks.items()}
    made["tree_index_lists"] = TrainingData(tasks["tree"], 0, 1, CPU)
    found: dict[str, Any] = {}

    def run(kind: str) -> None:
        for step in range(steps):
            found[kind] = pack(made[kind].prepared(step))

    times = Times({kind: [] for kind in made})
    for index in range(rounds + 1):
        for kind in made:
            seconds = time_once(lambda kind=kind: run(kind), CPU)
            if index:  # the first reads the files
                times.seconds[kind].append(seconds)
    source, plan = made["tree"].micro_batches.source, made["tree"].plan
    leaves = sum(int(source.lengths["leaves"][plan.batch(step)].sum()) for step in range(steps))
    for kind in made:
        emit("training", case, f"{kind}_leaves_per_s", leaves / times.best(kind), leaves_a_batch=leaves // steps, rounds=rounds)
        separate = sum(tensor.nbytes for tensor in tensors_of(found[kind].unpack()))
        emit("training", case, f"{kind}_bytes", found[kind].layout.num_bytes, separate=separate)
    ratio, spread = times.ratio("tree_index_lists", "tree")
    emit("training", case, "index_lists_to_spans", ratio, **spread)
    steps_of_stream = range(10 + 10 * steps)
    open_tree = OpenTraining(tasks["tree"], 0, 1, ACCELERATOR.type)
    streams: dict[str, Callable[[], Any]] = {
        "thread": lambda: Prefetcher(made["tree"].packed(steps_of_stream)),
        "process": lambda: LoaderProcesses(open_tree, steps_of_stream, 1, options=lambda: {"limit": None}),
        "dataloader": lambda: nullcontext(_dataloader(open_tree, steps_of_stream)),
    }
    for name, open_stream in streams.items():
        with open_stream() as stream:
            batches = iter(stream)
            for _ in islice(batches, 10):  # while the process starts
                pass
            begin = time.process_time()
            for packed in batches:
                packed.unpack()
            cpu = (time.process_time() - begin) / (len(steps_of_stream) - 10)
        emit("training", case, f"us_of_the_training_a_batch_{name}", cpu * 1e6)


class _Batches(Dataset):
    """The batches of updates for PyTorch's own loader: one tensor each, and its layout."""

    def __init__(self, open_make: OpenTraining):
        self._open_make, self._make = open_make, None

    def __getitem__(self, step: int) -> Packed:
        self._make = self._make or self._open_make()
        return pack(self._make(step, None))


def _dataloader(open_make: OpenTraining, steps: range) -> DataLoader:
    options = {"prefetch_factor": DEPTH, "multiprocessing_context": "forkserver"}
    return DataLoader(_Batches(open_make), batch_size=None, sampler=steps, num_workers=1, **options)
