"""RUN/run.json: the facts of a run about its data, its plan and its model."""

from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treeproc.common.command_names import advise
from treeproc.common.files import read_json
from treeproc.common.storage import AnyPath

FACTS = "run.json"


class InitFacts(TypedDict):
    """The weights of another run that a run started from, and how many parameters took values of them."""

    checkpoint: str
    weights_sha256: str
    vocab_fingerprint: str
    task: str
    model: str
    taken: int
    in_part: int
    new: int


class CorpusFacts(TypedDict):
    """A file of the training split: its examples, their weight, and how many of them an epoch has, copies included."""

    file: str
    examples: int
    weight: float
    in_epoch: int


class RunFacts(TypedDict, total=False):
    """The fields of run.json that readers use. Runs of earlier versions lack some."""

    data_fingerprint: str
    vocab_fingerprint: str
    num_pieces: int
    num_labels: int
    num_pos_tags: int
    num_deprels: int
    num_classes: int
    pairs: bool  # only with classes of pairs
    parameters: int
    frozen: int  # of the parameters; only with `freeze`
    init: InitFacts  # only with `init`
    examples: int
    leaves: int
    nodes: int
    target_tokens: int
    left_out: dict[str, int]
    batches_per_epoch: int
    pretrained: dict  # the settings and the tokenizer of a pretrained encoder
    states: str  # sha256 of the encoder whose states the run reads; only with `frozen_states`
    corpora: list[CorpusFacts]  # only with `batch.corpora`


def read_facts(run_dir: AnyPath, hint: str = "", needed: tuple[str, ...] = ()) -> RunFacts:
    """Read the facts of a run. Raises UserError with `hint` if they cannot be read or lack something `needed`."""
    return read_json(run_dir / FACTS, hint or advise("restore it", "choose another --out"), RunFacts, needed)
