"""The sizes of all encoded rows, which `lengths.arrow` holds, so that planning batches opens no shard."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute

from treeproc.common.cache import local_copy
from treeproc.common.errors import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.schema import LENGTHS_SCHEMA
from treeproc.shards.store import read_index


def read_lengths(folder: AnyPath, split: str) -> dict[str, np.ndarray]:
    """Columns of `lengths.arrow` for one split: shard, row, example_id, leaves, nodes, tgt_pieces."""
    path = folder / "lengths.arrow"
    try:
        local = path
        if not isinstance(path, Path):
            if "lengths.arrow" not in (files := read_index(folder).get("files", {})):
                raise BadArrowFile("is not in index.json")
            local = local_copy(path, files["lengths.arrow"])
        with pa.memory_map(str(local)) as source:
            schema, batches = read_arrow(source, [LENGTHS_SCHEMA])
        if schema != LENGTHS_SCHEMA:
            raise BadArrowFile(f"must have the columns {', '.join(LENGTHS_SCHEMA.names)}")
    except (OSError, BadArrowFile) as error:
        raise UserError(f"{path} {error}; run workflows/preprocess.py again") from None
    table = pa.Table.from_batches(batches, LENGTHS_SCHEMA)
    chosen = table.filter(pa.compute.equal(table["split"].cast(pa.string()), split))
    return {name: chosen[name].to_numpy() for name in LENGTHS_SCHEMA.names if name != "split"}
