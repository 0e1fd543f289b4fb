"""Entries of scores.json and probes.json in a run folder: their names, their types, and how commands add one.

This module loads no PyTorch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NotRequired, Required

from annotated_types import Len, MinLen
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.runs.checkpoint import AVERAGED
from treenet.tasks import scores as score_names
from treenet.tasks.translation_metrics import METRICS, SCORE_TYPES
from treeproc.common.files import atomic_write, file_lock, json_bytes, read_json
from treeproc.common.messages import warn
from treeproc.common.settings import differences
from treeproc.common.storage import AnyPath

SCORES, PROBES = "scores.json", "probes.json"
RESULTS_LOCK = ".results-lock"  # held while one of them is written
SEARCHED = "tree_beam."  # begins the name of a file of a search for trees that is not complete

RESULTS_HINT = "restore it, or move it away and run the same command again"  # not "remove": it may hold good results


def _check_metric(bucket: dict) -> dict:
    if bucket.keys().isdisjoint(METRICS):
        raise ValueError(f"Needs one of {', '.join(METRICS)}")
    return bucket


# Which metrics a bucket has depends on the target language: see `score_buckets`.
_Bucket = TypedDict(
    "_Bucket",
    {
        "from": Required[int | float | None],
        "to": Required[int | float | None],
        "num_examples": Required[int],
        **dict.fromkeys(METRICS, float),  # type: ignore[misc]  # names of a table
    },
    total=False,
)


class _ReferenceNll(TypedDict):
    total: float
    tokens: int
    per_sentence: float
    sha256: str


Finite = Annotated[float, Field(allow_inf_nan=False)]
_Interval = Annotated[list[Finite], Len(2, 2)]


class _Pairs(TypedDict):
    num_pairs: int
    num_ties: int
    pair_accuracy: Finite
    accuracy_per_piece: NotRequired[Finite]
    interval: _Interval
    published: NotRequired[dict[str, Finite]]


class _Entry(TypedDict, total=False):
    """The types of the fields that readers use. Each kind of result has some of them."""

    split: str
    checkpoint: str
    steps: Annotated[list[int], MinLen(1)]
    num_examples: int
    nll: float
    perplexity: float
    word_perplexity: float
    perplexity_given_tree: float
    pseudo_perplexity: float
    reference_nll: _ReferenceNll
    accuracy: Finite
    binary_accuracy: Finite
    pearson: Finite
    spearman: Finite
    mse: Finite
    sentence_f1: float
    pair_accuracy: Finite
    interval: _Interval
    pairs_fingerprint: str
    groups: dict[str, Annotated[dict[str, _Pairs], MinLen(1)]]
    learning: dict[str, float]  # see treenet/tasks/learning.py
    buckets: dict[str, list[Annotated[_Bucket, AfterValidator(_check_metric)]]]
    data: dict[str, str | None] | str | None
    weights_sha256: str | None
    translations_sha256: str
    predictions_sha256: str
    references_fingerprint: str
    more_references_fingerprint: str
    own_data: bool
    asked: dict
    decoding: dict | None


if TYPE_CHECKING:  # mypy knows no keys of a type that is made of others
    ScoredEntry = dict
else:
    _ends = Annotated[list[float], Len(2, 2)] | None
    _types = dict.fromkeys(score_names.SCORES, Finite) | {f"{name}_interval": _ends for name in score_names.SCORES}
    ScoredEntry = TypedDict("ScoredEntry", {**_types, **_Entry.__annotations__, **SCORE_TYPES}, total=False)


class _Probe(TypedDict):
    states: str
    layer: int
    of: Literal["root", "mean", "first"]
    test: Finite
    half_interval: Finite | None


class _ProbeTask(TypedDict):
    classes: dict[str, int]
    examples: dict[str, int]
    majority: Finite
    results: list[_Probe]


class _ProbeEntry(TypedDict):
    """The fields of an entry of probes.json that readers use."""

    settings: dict
    data: dict[str, str]
    tasks: dict[str, _ProbeTask]


# The form of each file, by which commands write and read it.
FORMS = {SCORES: dict[str, ScoredEntry], PROBES: dict[str, _ProbeEntry]}


def name_result(text: str, checkpoint: str, data: AnyPath, *more: str, own_data: bool) -> str:
    """Return the name of a result in file names and scores.json: the split or file, and all that differs from the run.

    So a baseline or a control never replaces the score of the run. Names of splits and words such as `last` have no hyphen. All
    that users name freely has one: see `name_data` and `name_in_results`.
    """
    parts = [text, *([] if checkpoint == AVERAGED else [checkpoint]), *more]
    return ".".join(parts if own_data else [*parts, name_data(data)])


def name_data(data: AnyPath) -> str:
    """Return the name of another data set than that of the run, in names of results."""
    return f"data-{data.resolve().name}"


def read_scores(folder: AnyPath) -> dict[str, dict]:
    """Read the entries of scores.json; empty if there is no such file yet."""
    return read_entries(folder / SCORES)


def read_entries(path: AnyPath) -> dict[str, dict]:
    """Read a file of entries; empty if there is no such file yet. Raises UserError for a damaged one."""
    return read_json(path, RESULTS_HINT, FORMS[path.name]) if path.exists() else {}


def add_entry(path: Path, name: str, entry: dict, join: Callable[[dict, dict], dict] | None = None) -> None:
    """Write an entry of scores.json or probes.json. Commands that work on one run at a time keep each other's entries.

    `join` gets the entry that is there, empty if there is none, and the new one; it returns the one to write. Without it, the new
    one replaces the other, with a note if that is of other settings or of other data with the same folder name.
    """
    with file_lock(path.with_name(RESULTS_LOCK)):
        entries = read_entries(path)
        before = entries.get(name, {})
        atomic_write(path, json_bytes({**entries, name: join(before, entry) if join else entry}, FORMS[path.name]))
    compared = [key for key in ("asked", "data") if key in before and key in entry and join is None]
    if changed := [line for key in compared for line in differences(before[key], entry[key], key)]:
        warn(f"note: {path}, {name}: this result replaces one of other settings or data ({'; '.join(changed)})")
