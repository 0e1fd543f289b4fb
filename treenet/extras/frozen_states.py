"""The job that computes the states of a frozen pretrained encoder for a data set, shard by shard, here or on Ray.

A file depends on the shard and the encoder alone: batches are cut from its own examples, and a process computes with one thread.
So the bytes are the same with any number of workers, on one kind of machine. `treenet/data/frozen_states.py` describes the files.

Shapes: B batch, L leaves, H width of the pretrained states.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import torch

from treenet.config import ModelConfig
from treenet.data.batch import cut_batches
from treenet.data.frozen_states import (
    BLOCK_POSITIONS,
    FACTS,
    SHARDS,
    StatesFacts,
    leaves_fingerprint,
    read_states_facts,
    states_schema,
)
from treenet.layers.backend import choose_device
from treenet.models.pretrained import PretrainedLeaves, hash_encoder, load_pretrained, try_encoder
from treenet.models.pretrained_folder import FACTS as PRETRAINED
from treenet.models.pretrained_folder import encoder_folder, pretrained_facts
from treenet.runs.checkpoint import stored_weights
from treenet.structure.base import Ragged, pad
from treeproc.common.errors import UserError, rewording
from treeproc.common.files import atomic_output, atomic_write, json_bytes, locked, remove_leftovers
from treeproc.common.folder_kinds import STATES, mark_folder
from treeproc.common.hub import HubModel
from treeproc.common.messages import tell
from treeproc.common.provenance import recorded
from treeproc.common.storage import AnyPath
from treeproc.shards.rows import edges_of
from treeproc.shards.schema import PAD_ID
from treeproc.shards.shard import Shard, check_hashes
from treeproc.shards.store import ShardRecord, fingerprint_of, pieces_fingerprint, read_index, sidecar_path, write_index
from treeproc.stages.run_jobs import StageWork, make_shards

COMMAND = "frozen-states"
_BATCH_POSITIONS = {"cpu": 1024, "cuda": 16_384}  # with padding
_VERSION = 1  # of the bytes of a file


def write_states(
    data: AnyPath, encoder: AnyPath | HubModel, out: AnyPath, *, in_this_process: bool, use_gpu: bool = False
) -> dict:
    """Write the states of all splits, or those that are missing, to the folder `out`; returns their index.

    Raises UserError if encoder and data set do not fit, if the folder has other states, or if the disk has too little room.
    """
    if in_this_process:
        choose_device(use_gpu)
    index = read_index(data / "encoded")
    leaves, sha256 = _load(data, encoder)
    check_hashes(data / "encoded", *index["totals"])
    facts: StatesFacts = {
        "leaves_fingerprint": leaves_fingerprint(index),
        "pieces_fingerprint": pieces_fingerprint(index),
        "encoder_sha256": sha256,
        "width": leaves.width,
    }
    folder, shards = out / SHARDS, index.records()
    mark_folder(out, STATES)
    folder.mkdir(exist_ok=True)
    with locked(out), recorded(out, COMMAND) as record:
        _claim(out, facts)
        _check_room(out, shards, leaves)
        remove_leftovers(folder)
        fingerprints = [fingerprint_of(_VERSION, shard.name, shard.rows, "float32", facts) for shard in shards]
        arguments = {"data": data, "encoder": encoder, "out": out, "sha256": sha256, "use_gpu": use_gpu}
        work = StageWork("states", "loading the encoder", StatesOfShard, arguments, float(use_gpu))
        jobs = [{"shard": shard, "fingerprint": fingerprint} for shard, fingerprint in zip(shards, fingerprints, strict=True)]
        del leaves
        records = make_shards(work, folder, shards, fingerprints, jobs, in_this_process=in_this_process, record=record)
        return write_index(folder, records, fingerprint=fingerprint_of(fingerprints), **facts)


def _load(data: AnyPath, encoder: AnyPath | HubModel) -> tuple[PretrainedLeaves, str]:
    """Return the encoder, and the sha256 of its settings and weights."""
    config = ModelConfig(name="pretrained", pretrained={"folder": encoder})
    facts = pretrained_facts(config, data, read_index(data / "encoded"), "encoder")[PRETRAINED]
    leaves = PretrainedLeaves(facts, config.d_model)
    folder = encoder_folder(encoder, "encoder")
    with rewording({"model.pretrained.folder": "encoder"}):
        load_pretrained(leaves, folder)
        try_encoder(leaves, folder)
    leaves.pretrained.requires_grad_(False)
    return leaves.eval(), hash_encoder(facts["config"], stored_weights(leaves.pretrained))


def _claim(out: AnyPath, facts: StatesFacts) -> None:
    """Write states.json, or refuse a folder of other states."""
    if (out / FACTS).exists():
        written = {**read_states_facts(out)}
        kinds = {"encoder_sha256": "encoder", "pieces_fingerprint": "tokenizer", "leaves_fingerprint": "data set"}
        if other := next((kind for name, kind in kinds.items() if written[name] != {**facts}[name]), ""):
            raise UserError(f"{out} has the states of another {other}; choose another --out")
    else:
        atomic_write(out / FACTS, json_bytes(facts, StatesFacts))


def _check_room(out: AnyPath, shards: Sequence[ShardRecord], leaves: PretrainedLeaves) -> None:
    """Print the size of all states. Raises UserError if the disk has less room than those need that are missing."""
    of_state = 4 * leaves.width  # float32
    sizes = {shard.name: (shard.rows + shard.counts.get("leaves", 0)) * of_state for shard in shards}
    total, examples = sum(sizes.values()), sum(shard.rows for shard in shards)
    tell(f"states of {examples:,} examples: {_size(total)}, {of_state:,} bytes a piece")
    if isinstance(out, Path):
        needed = sum(size for name, size in sizes.items() if not (out / SHARDS / name).exists())
        free = shutil.disk_usage(out).free
        if needed > free:
            raise UserError(f"{out} needs {_size(needed)}, but its disk has {_size(free)}; free space, or choose another --out")


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


class _Hashed:
    """A file to write to from front to back, which knows its size and its hash."""

    def __init__(self, file: IO[bytes]):
        self._file, self._hash, self.size, self.closed = file, hashlib.sha256(), 0, False

    def write(self, content: bytes) -> int:
        self._file.write(content)
        self._hash.update(content)
        self.size += len(content)
        return len(content)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def sha256(self) -> str:
        return self._hash.hexdigest()


class StatesOfShard:
    """Encoded shard to its states. Holds the encoder, so it is loaded once a process."""

    def __init__(self, data: AnyPath, encoder: AnyPath | HubModel, out: AnyPath, sha256: str, use_gpu: bool):
        torch.set_num_threads(1)
        self._data, self._folder = data, out / SHARDS
        self._device = choose_device(use_gpu)
        leaves, found = _load(data, encoder)
        if found != sha256:
            raise UserError(f"{encoder} has other weights on this machine than where the command runs; copy it there again")
        self.leaves = leaves.to(self._device)

    def __call__(self, shard: ShardRecord, fingerprint: str) -> ShardRecord:
        most, schema, counts, longest = self.leaves.most_leaves, states_schema(self.leaves.width), Counter[str](), 0
        with atomic_output(self._folder / shard.name) as file:
            hashed = _Hashed(file)
            with pa.ipc.new_file(pa.PythonFile(hashed, "w"), schema) as writer:
                for pieces in self._blocks(shard):
                    states = self._states(pieces)
                    writer.write_batch(_record_batch(pieces.lengths, states, schema))
                    counts["states"] += len(states)
                    counts["in_windows"] += 0 if most is None else int((pieces.lengths > most).sum())
                    longest = max(longest, int(pieces.lengths.max()))
        record = ShardRecord(
            name=shard.name, split=shard.split, index=shard.index, rows=shard.rows, bytes=hashed.size, sha256=hashed.sha256(),
            fingerprint=fingerprint, counts=dict(sorted(counts.items())), longest={"leaves": longest},
        )  # fmt: skip
        atomic_write(sidecar_path(self._folder / shard.name), json_bytes(asdict(record)))
        return record

    def _blocks(self, shard: ShardRecord) -> Iterator[Ragged]:
        """Yield the pieces of neighbouring examples that have at most BLOCK_POSITIONS states, or of one example that has more."""
        for views in Shard(self._data / "encoded", shard).columns:
            edges, flat = views["leaves"]
            ends = np.cumsum(1 + np.diff(edges))
            start = 0
            while start < len(ends):
                before = int(ends[start - 1]) if start else 0
                stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK_POSITIONS, side="right")))
                yield Ragged(flat["piece"][edges[start] : edges[stop]], np.diff(edges[start : stop + 1]).astype(np.int64))
                start = stop

    @torch.no_grad()
    def _states(self, pieces: Ragged) -> np.ndarray:
        """Return the states of all examples [n, H], each the first position and then its leaves, computed in even batches."""
        edges, rows = edges_of(1 + pieces.lengths), list(pieces)
        out = np.empty((int(edges[-1]), self.leaves.width), dtype=np.float32)
        around = len(self.leaves.before) + len(self.leaves.after)
        order = np.argsort(pieces.lengths, kind="stable")
        starts = cut_batches(pieces.lengths[order] + around, _BATCH_POSITIONS[self._device])
        for batch in np.split(order, starts[1:-1]):
            padded, padding = pad([rows[row] for row in batch.tolist()], PAD_ID)
            states, first = self.leaves.read(*(torch.from_numpy(part).to(self._device) for part in (padded, padding)))
            found = states.cpu().numpy()
            for row, of_row in zip(batch.tolist(), found, strict=True):
                start, end = edges[row : row + 2]
                out[start] = of_row[0]
                out[start + 1 : end] = of_row[first : first + end - start - 1]
        return out


def _record_batch(lengths: np.ndarray, states: np.ndarray, schema: pa.Schema) -> pa.RecordBatch:
    of_positions = pa.FixedSizeListArray.from_arrays(pa.array(states.reshape(-1)), type=schema.field(0).type.value_type)
    edges = pa.array(edges_of(1 + lengths).astype(np.int32))
    return pa.record_batch([pa.ListArray.from_arrays(edges, of_positions, type=schema.field(0).type)], schema=schema)
