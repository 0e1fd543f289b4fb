"""The states of a frozen pretrained encoder, computed once: STATES/shards, files beside those of an encoded data set.

A file has the name, the examples and their order of the shard whose pieces were read. It is an Arrow IPC file with one column,
`states`: of each example the state of the first position ([CLS] of BERT), then those of its leaves, float32. Record batches have
as many examples as fit into BLOCK_POSITIONS states, so memory has few of them at a time.

Shapes: B batch, L leaves, H width of the pretrained states.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treeproc.common.cache import find_changed
from treeproc.common.files import read_json
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.lengths import Column
from treeproc.shards.rows import edges_of
from treeproc.shards.shard import check_size, lacks
from treeproc.shards.store import Index, fingerprint_of, pieces_fingerprint, read_index

SHARDS = "shards"
FACTS = "states.json"  # what the states were made of; it is there from the beginning
BLOCK_POSITIONS = 32_768
AGAIN = "run tree-attention frozen-states again"
_MOST_OPEN = 8192  # Linux allows a process 65,530 memory maps


class StatesFacts(TypedDict):
    """The content of states.json."""

    leaves_fingerprint: str
    pieces_fingerprint: str
    encoder_sha256: str  # of weights and settings of the encoder
    width: int


def states_schema(width: int) -> pa.Schema:
    """Return the columns of a file of states [H]."""
    state = pa.list_(pa.field("item", pa.float32(), nullable=False), width)
    states = pa.list_(pa.field("item", state, nullable=False))
    return pa.schema([pa.field("states", states, nullable=False)])


def leaves_fingerprint(index: Index) -> str:
    """Return the fingerprint of the leaves of a data set: of its lines, words and pieces. Its controls have the same."""
    parts = (index.get("text_fingerprint"), index.get("parsed_fingerprint"), index.get("tree_settings", {}).get("side"))
    return fingerprint_of(parts if all(parts) else index["fingerprint"], pieces_fingerprint(index))


def read_states_facts(folder: AnyPath) -> StatesFacts:
    """Read what the states of a folder were made of. Raises UserError if it has no such file."""
    facts = read_json(folder / FACTS, "give the --out folder of tree-attention frozen-states", StatesFacts)
    if not 0 < facts["width"] < 1 << 20:
        raise UserError(f"{folder / FACTS} is damaged: width must be that of an encoder, but is {facts['width']}; {AGAIN}")
    return facts


def check_states(folder: AnyPath, index: Index, *splits: str) -> StatesFacts:
    """Check the states of the data set with this index, and the files of these splits; returns what they were made of.

    Files are hashed, but for those that were found right before. Raises UserError if the states are of other leaves, incomplete
    or damaged.
    """
    facts = read_states_facts(folder)
    if facts["leaves_fingerprint"] != leaves_fingerprint(index):
        is_other = facts["pieces_fingerprint"] != pieces_fingerprint(index)
        what = "the pieces of another tokenizer" if is_other else "another data set"
        raise UserError(
            f"frozen_states: {folder} has the states of {what}; make those of this data set with "
            "tree-attention frozen-states --out OTHER, or leave frozen_states out"
        )
    if not (folder / SHARDS / "index.json").exists():
        raise UserError(f"frozen_states: {folder} is not complete; run its tree-attention frozen-states command again")
    shards = read_index(folder / SHARDS, AGAIN)
    if other := next((name for name, value in facts.items() if shards.get(name) != value), ""):
        raise UserError(f"{folder / SHARDS} is of other states than {FACTS} ({other}); {AGAIN}")
    records = [record for split in splits for record in shards.records(split)]
    if isinstance(folder, Path):  # an object is hashed when it is copied here
        for name in find_changed(folder / SHARDS, {record.name: record.sha256 for record in records}):
            raise UserError(f"{folder / SHARDS / name} is missing or damaged: its hash is not the one in index.json; {AGAIN}")
    return facts


class _File(NamedTuple):
    """An open file of states."""

    edges: np.ndarray  # of record batches, counted in examples
    batches: list[tuple[np.ndarray, np.ndarray]]  # edges of examples, counted in states; the states [n, H]


class FrozenStates:
    """The states of a split, memory-mapped. A file is opened when one of its examples is asked for.

    `leaves` has the number of leaves of every example. Raises UserError if a file is missing, cut off, or has other examples.
    """

    def __init__(self, folder: AnyPath, split: str, leaves: np.ndarray | Column):
        self._folder, self._leaves = folder / SHARDS, leaves
        self._records = list(read_index(self._folder, AGAIN).records(split))
        self.width = read_states_facts(folder)["width"]
        self._schema = states_schema(self.width)
        self._edges = edges_of(np.array([record.rows for record in self._records], dtype=np.int64))
        if self._edges[-1] != len(leaves):
            raise UserError(
                f"{folder} has the states of {self._edges[-1]:,} {split} examples, but there are {len(leaves):,}; {AGAIN}"
            )
        self._open: dict[int, _File] = {}

    def pad(self, rows: np.ndarray, leaves: int) -> Tensor:
        """Return the states of examples [B, 1 + L, H], 0 where padded, for so many padded `leaves`."""
        out = np.zeros((len(rows), 1 + leaves, self.width), dtype=np.float32)
        for padded, row in zip(out, np.asarray(rows).tolist(), strict=True):
            states = self._of(row)
            padded[: len(states)] = states
        return torch.from_numpy(out)

    def _of(self, row: int) -> np.ndarray:
        number = int(np.searchsorted(self._edges, row, side="right")) - 1
        file = self._open.get(number)
        if file is None:
            if len(self._open) >= _MOST_OPEN:
                self._open = {}
            file = self._open[number] = self._read(number)
        row -= int(self._edges[number])
        batch = int(np.searchsorted(file.edges, row, side="right")) - 1
        edges, states = file.batches[batch]
        row -= int(file.edges[batch])
        return states[edges[row] : edges[row + 1]]

    def _read(self, number: int) -> _File:
        record = self._records[number]
        path = self._folder / record.name
        try:
            with pa.memory_map(str(check_size(self._folder, record, AGAIN))) as source:  # what was read keeps its memory map
                columns = [batch.column(0) for batch in read_arrow(source, [self._schema])[1]]
        except (OSError, BadArrowFile) as error:
            raise UserError(lacks(error, path) or f"{path} {error}; {AGAIN}") from None
        batches = [
            (column.offsets.to_numpy(), column.flatten().flatten().to_numpy().reshape(-1, self.width)) for column in columns
        ]
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(edges) for edges, _ in batches)])
        if not np.array_equal(lengths, 1 + self._leaves[slice(*self._edges[number : number + 2].tolist())]):
            raise UserError(f"{path} has the states of other examples; {AGAIN}")
        return _File(edges_of(np.array([len(edges) - 1 for edges, _ in batches], dtype=np.int64)), batches)
