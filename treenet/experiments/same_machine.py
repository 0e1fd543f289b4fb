"""The conditions under which the cells of a study were trained: device, packages, software. A comparison should share them.

Another processor or package rounds differently, so the same cell gets other weights from it (docs/results/demo.md has figures).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from treenet.experiments.records import Record, Training

_SHOWN = 3  # pairs in a line
_WORDS = {"device": "kinds of device", "packages": "versions of packages", "software": "commits of this software"}


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


def describe_unlike(report: Mapping) -> Iterator[str]:
    """Return a line for each condition in which compared cells of a report differ; nothing for reports of earlier versions."""
    unlike = report.get("unlike", {})
    for name, words in _WORDS.items():
        if pairs := unlike.get(name):
            shown = ", ".join(" - ".join(pair) for pair in pairs[:_SHOWN])
            more = f", and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
            count = f"{len(pairs)} of {unlike['compared']} compared pairs of cells"
            yield f"{count} were trained with different {words}: {shown}{more}"
