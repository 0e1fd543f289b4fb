"""Examples of language models, which read the source side of a data set of any kind."""

from dataclasses import replace

import numpy as np

from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import InputKind
from treeproc.common.storage import AnyPath


class SourceSide(ExampleSource):
    """One split of a data set, with targets or without. Only the leaves plan and cut batches, so all models have the same."""

    def __init__(self, folder: AnyPath, split: str, reads: InputKind):
        super().__init__(folder, split, reads)
        self.lengths = {**self.lengths, "tgt_pieces": np.broadcast_to(np.int32(0), len(self))}  # takes no memory
        if shards := self.shards:
            self.shards = replace(shards, count=lambda first, last: shards.count(first, last).without_targets())
