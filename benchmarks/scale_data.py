"""Metadata of data sets of up to a billion rows, without text: the index, the lengths and the counts of sizes.

Sizes are drawn from what 17,764 pairs of Europarl (English-German) have in words: a gamma distribution of shape 2.70 and scale
9.58 for one side, and a log ratio of mean -0.09 and deviation 0.21 for the other, at 1.25 pieces a word. Columns that
no plan of all rows reads (ids, rows, nodes) are zeros, which are holes in the file: it has its full length, but takes 8 bytes a
row.
"""

import io
from collections import Counter
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from treeproc.shards.lengths import LENGTHS, SIZE_COUNTS, SizeCounts
from treeproc.shards.schema import LENGTHS_SCHEMA, SIZE_COUNTS_SCHEMA, auto_rows_per_shard, shard_name
from treeproc.shards.store import ShardRecord, write_index

PIECES_A_WORD = 1.25
_POOL = 1 << 24  # pairs of sizes that are drawn; a shard has a part of them that begins anywhere


class HoledFile(io.RawIOBase):
    """Writes to a file, but leaves a hole where large blocks of zeros are."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        block = np.frombuffer(data, dtype=np.uint8)
        if len(block) >= 4096 and not block[:64].any() and not block.any():
            self._file.seek(len(block), io.SEEK_CUR)
        else:
            self._file.write(data)
        return len(block)

    def tell(self) -> int:
        return self._file.tell()


def draw_sizes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Leaves and target pieces [count], int32."""
    random = np.random.default_rng(0)
    words = random.gamma(2.70, 9.58, count)
    other = words * np.exp(random.normal(-0.09, 0.21, count))
    leaves, targets = (np.maximum(1, np.rint(PIECES_A_WORD * side)).astype(np.int32) for side in (words, other))
    return leaves, targets


def write_metadata(encoded: Path, rows: int) -> int:
    """Write DATA/encoded of one split, `train`, in shards of the default size, and return their number."""
    encoded.mkdir(parents=True)
    per_shard = auto_rows_per_shard(rows)
    sizes = [min(per_shard, rows - first) for first in range(0, rows, per_shard)]
    leaves, targets = draw_sizes(min(rows, _POOL))
    starts = np.random.default_rng(1).integers(0, len(leaves) - max(sizes) + 1, len(sizes)).tolist()
    records = []
    with (encoded / LENGTHS).open("wb") as lengths_file, (encoded / SIZE_COUNTS).open("wb") as counts_file:
        lengths = pa.ipc.new_file(pa.PythonFile(HoledFile(lengths_file), "w"), LENGTHS_SCHEMA)
        counted = pa.ipc.new_file(counts_file, SIZE_COUNTS_SCHEMA)
        for number, (size, start) in enumerate(zip(sizes, starts, strict=True)):
            part = {"leaves": leaves[start : start + size], "tgt_pieces": targets[start : start + size]}
            nothing = np.zeros(size, dtype=np.int64)
            lengths.write_batch(_batch({**dict.fromkeys(LENGTHS_SCHEMA.names, nothing), **part}, LENGTHS_SCHEMA))
            cells = vars(SizeCounts.of(*part.values(), nothing))
            counted.write_batch(_batch({**cells, "shard": np.full(len(cells["rows"]), number)}, SIZE_COUNTS_SCHEMA))
            sums = Counter({name: int(column.sum()) for name, column in part.items()})
            name = shard_name("train", number, len(sizes))
            longest = {name: int(column.max()) for name, column in part.items()}
            records.append(
                ShardRecord(name, "train", number, size, 400 * size, f"{number:064x}", "scale", 1, dict(sums), longest)
            )
        lengths.close()
        counted.close()
        lengths_file.truncate()
    files = dict.fromkeys((LENGTHS, SIZE_COUNTS), "0" * 64)
    fingerprints = {f"{kind}_fingerprint": kind for kind in ("text", "tree", "vocab")}
    write_index(encoded, records, fingerprint="scale", files=files, **fingerprints)
    return len(sizes)


def _batch(columns: dict[str, np.ndarray], schema: pa.Schema) -> pa.RecordBatch:
    size = len(columns["shard"])
    split = pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, dtype=np.int8)), pa.array(["train"]))
    arrays = [split if field.name == "split" else pa.array(columns[field.name], field.type) for field in schema]
    return pa.record_batch(arrays, schema=schema)
