"""Which cells of a study may be compared, and what differs between compared ones beside what is studied.

Cells that are compared should share device, packages and software. Another processor or package rounds differently, so the same
cell gets other weights from it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from treenet.config import OPERATIONAL, ArchitectureSection, ModelConfig, TrainConfig, flatten
from treenet.experiments.records import Record, Training
from treeproc.common.setting_facts import default_values
from treeproc.common.settings import UserError, is_below

_SHOWN = 3  # pairs in a line
_APART = "give each study its own --out and --records"
_WORDS = {"device": "kinds of device", "packages": "versions of packages", "software": "commits of this software"}


def check_one_study(records: Sequence[Record], system: str) -> None:
    """Raise UserError for cells of two studies: of other text or pieces, or of one system with other settings or trees.

    `system` is the label of a cell's system. Sizes of a system may have other settings; see `find_unlike_sizes`.
    """
    _check_same_text(records)
    _check_same_pieces(records)
    _check_same_settings(records, system)
    _check_same_trees(records, system)


def _check_same_text(records: Sequence[Record]) -> None:
    """Raise UserError for cells of data sets of other text, which are of two studies. Scores on other data do not count."""
    cells = dict[str, str]()
    for record in records:
        for data in (entry.get("data") for entry in record["scores"].values() if entry.get("own_data", True)):
            if isinstance(data, dict) and (text := data.get("text_fingerprint")):
                cells.setdefault(text, record["cell"])
    _refuse_several(cells, "text")


def _check_same_pieces(records: Sequence[Record]) -> None:
    """Raise UserError for cells over other pieces, if scores depend on pieces. Earlier records have their number alone."""
    for name in ("num_pieces", "pieces_fingerprint"):
        cells = dict[str, str]()
        for record in records:
            if record["settings"].get("task") not in _OF_PREDICTIONS and (pieces := record["facts"].get(name)):
                cells.setdefault(str(pieces), record["cell"])
        _refuse_several(cells, "pieces")


def _refuse_several(cells: Mapping[str, str], what: str) -> None:
    """Raise UserError if `cells` has the names of cells of several texts or pieces."""
    if len(cells) > 1:
        one, other, *_ = cells.values()
        raise UserError(f"{one} and {other} are of data sets of other {what}, so they are of two studies; {_APART}")


def _check_same_settings(records: Sequence[Record], system: str) -> None:
    """Raise UserError for cells of one system and size that differ in more than the seed. `system` is the label of the system."""
    first = dict[tuple, Record]()
    for record in records:
        one = first.setdefault((record["labels"][system], record["labels"].get("fraction")), record)
        if differing := list(_differing(one, record)):
            raise UserError(
                f"{one['cell']} and {record['cell']} are of one system, but not only their seeds differ: {', '.join(differing)}; "
                f"{_APART}"
            )


def _check_same_trees(records: Sequence[Record], system: str) -> None:
    """Raise UserError for cells of one system, of any size, that read other trees."""
    first = dict[object, Record]()
    for record in records:
        one = first.setdefault(record["labels"][system], record)
        if _TREES in _differing(one, record):
            raise UserError(
                f"{one['cell']} and {record['cell']} are of one system, but read other trees, so they are of two "
                f"studies; {_APART}"
            )


def find_unlike_sizes(records: Sequence[Record], system: str) -> list[str]:
    """Return a line for each system whose sizes differ in other settings, too: each smaller size beside the largest."""
    sizes: dict[str, dict[float, Record]] = {}
    for record in records:
        sizes.setdefault(str(record["labels"][system]), {}).setdefault(float(record["labels"]["fraction"]), record)
    lines = []
    for name, of_size in sizes.items():
        largest = max(of_size)
        found = {size: [*_differing(of_size[size], of_size[largest])] for size in sorted(of_size)}
        parts = [f"{size:g} and {largest:g} of {name} also differ in {', '.join(one)}" for size, one in found.items() if one]
        lines += [f"sizes {'; sizes '.join(parts)}"] if parts else []
    return lines


def find_unlike(records: Iterable[Record], pairs: Sequence[tuple[str, str]]) -> dict:
    """Return the number of `pairs` of compared cells, by name, and for each condition the pairs in which the cells differ.

    A cell that was trained under several conditions differs from every other one.
    """
    conditions = {record["cell"]: _conditions(record["training"]) for record in records}
    differing: dict[str, list[list[str]]] = {name: [] for name in _WORDS}
    for one, other in pairs:
        for name, found in differing.items():
            if len({*conditions[one][name], *conditions[other][name]}) > 1:
                found.append([one, other])
    return {"compared": len(pairs), **differing}


def _conditions(training: Training) -> dict[str, list[str]]:
    """Return the different conditions of a cell's sessions; none if they are not recorded."""
    return {
        "device": [str(machine.get("gpu") or machine.get("processor")) for machine in training.get("machines", [])],
        "packages": [str(sorted(packages.items())) for packages in training.get("packages", [])],
        "software": [str(sorted(software.items())) for software in training.get("software", [])],
    }


_TREES = "the trees of the data"
_OF_PREDICTIONS = ("classification", "relatedness")  # tasks whose scores do not depend on the pieces
_SECTIONS = tuple(f"model.{name}" for name, section in ModelConfig() if isinstance(section, ArchitectureSection))
_NOT_COMPARED = ("seed", "batch.fraction", *OPERATIONAL)
# Models that read no trees, unless a setting of `_reads_trees` is there.
READ_NO_TREES = (
    "transformer", "causal_transformer", "constituent_transformer", "on_lstm_hybrid", "lightconv", "dynamicconv", "convs2s",
    "bilstm", "pretrained",
)  # fmt: skip


def find_confounded(records: Iterable[Record], pairs: Sequence[tuple[str, str]], system: str) -> dict[str, list[str]]:
    """Return what differs between two compared systems, by both names, where it is more than one thing.

    `pairs` are compared cells by name, and `system` is the label of a cell's system. A section that another architecture does not
    read goes with `model.name`. Data sets of a study differ in their trees alone. Other trees do not count beside a system
    that reads none: with these trees, it is the same.
    """
    of_cell = {record["cell"]: record for record in records}
    found: dict[str, dict[str, None]] = {}
    for pair in pairs:
        ours, theirs = (of_cell[name] for name in pair)
        name = " - ".join(str(one["labels"][system]) for one in (ours, theirs))
        found.setdefault(name, {}).update(dict.fromkeys(_differing(ours, theirs)))
    return {name: list(lines) for name, lines in found.items() if len(lines) > 1}


def _differing(ours: Record, theirs: Record) -> Iterator[str]:
    """Yield a line for each setting in which two cells differ, also of their trees, and one for other trees.

    Records lack some defaults, and earlier ones how their trees were made.
    """
    one, other = (default_values(TrainConfig) | flatten(record["settings"]) for record in (ours, theirs))
    if ours["data_fingerprint"] != theirs["data_fingerprint"] and _reads_trees(one) and _reads_trees(other):
        yield _TREES
        made, otherwise = (record["facts"].get("tree_settings", {}) for record in (ours, theirs))
        for key in sorted(made.keys() & otherwise.keys() - {"tree_source", "seed"}):
            if made[key] != otherwise[key]:
                yield f"tree.{key} ({made[key]}, not {otherwise[key]})"
    left_out = _NOT_COMPARED + (_SECTIONS if one.get("model.name") != other.get("model.name") else ())
    for key in dict.fromkeys((*one, *other)):
        if one.get(key) != other.get(key) and not is_below(key, left_out):
            yield f"{key} ({', not '.join(str(side.get(key)) for side in (one, other))})"


def _reads_trees(settings: Mapping) -> bool:
    """Return whether the trees of the data change a run: through its model, the phrases that it learns, or its batches."""
    learns_phrases = settings.get("task") == "classification" and settings.get("classifier.supervision") != "root"
    counts_nodes = settings.get("batch.budget_counts", "leaves") != "leaves"
    is_plain = settings.get("model.name") in READ_NO_TREES and not settings.get("model.tree_reg.weight")
    return not is_plain or learns_phrases or counts_nodes


def describe_unlike(report: Mapping) -> Iterator[str]:
    """Return lines for compared systems that differ in more than one thing, sizes with own settings, and unlike conditions."""
    for name, lines in report["confounded"].items():
        yield f"{name}: the two differ in {len(lines)} things, so the difference has no single cause: {', '.join(lines)}"
    yield from report.get("unlike_sizes", ())
    unlike = report["unlike"]
    for name, words in _WORDS.items():
        if pairs := unlike.get(name):
            shown = ", ".join(" - ".join(pair) for pair in pairs[:_SHOWN])
            more = f", and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
            count = f"{len(pairs)} of {unlike['compared']} compared pairs of cells"
            yield f"{count} were trained with different {words}: {shown}{more}"
