"""RUN/run.json: the facts of a run about its data, its plan and its model."""

from pathlib import Path

from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treeproc.common.files import read_json

FACTS = "run.json"


class RunFacts(TypedDict, total=False):
    """The fields of run.json that readers use. Runs of earlier versions lack some."""

    data_fingerprint: str
    vocab_fingerprint: str
    num_pieces: int
    num_labels: int
    num_pos_tags: int
    num_deprels: int
    num_classes: int
    parameters: int
    examples: int
    leaves: int
    nodes: int
    target_tokens: int
    left_out: dict[str, int]
    batches_per_epoch: int


def read_facts(run_dir: Path, hint: str = "restore it, or choose another --out", needed: tuple[str, ...] = ()) -> RunFacts:
    """Read the facts of a run. Raises UserError, which ends in `hint`, if they cannot be read or lack something `needed`."""
    return read_json(run_dir / FACTS, hint, RunFacts, needed)
