"""The positive control: data in which the tree decides, and systems with right trees, with other trees, and without trees.

A result "the tree does not help" means little from software that has never found a tree. Here, models without the tree cannot
know the order of the target's words, so a working tree model must be better. The runs are studies of `scaling`: one for each
corpus.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treenet.experiments.control_data import Corpus, deep_orders, expressions, random_orders
from treenet.experiments.control_trees import hidden_labels_entropy, permuted_labels_entropy
from treenet.experiments.ledger import Cell
from treenet.experiments.records import Record
from treenet.experiments.scaling_report import FORM
from treenet.experiments.settings import RUNGS, ControlSettings, ScalingConfig
from treenet.experiments.study import Study, make_study
from treenet.experiments.study_grid import overlay
from treeproc.common.settings import build_settings

RIGHT, WORSE, PART, OTHER, NONE = "right", "worse", "part", "other", "none"  # trees of a system
BASELINE = "transformer"
BATCH = 64  # sentences of an update, about


# Shares of brackets in wrong places, in rung c.
DAMAGE = {"damaged_15": 0.15, "damaged_40": 0.4}


@dataclass(frozen=True)
class System:
    """A model on one of the corpora, with right, other or no trees. `reads` is what it reads of them.

    `tree_source` is the setting of control trees. `bound` maps the number of words of a sentence to the entropy of its order in
    nats, for a system whose trees show a part of it.
    """

    name: str
    corpus: str
    trees: str
    reads: str = "–"
    model: Mapping[str, Any] = field(default_factory=dict)
    tree_source: str = "parsed"
    bound: Callable[[int], float] | None = None

    @property
    def data(self) -> str:
        """The name of its data set."""
        return self.corpus if self.tree_source == "parsed" else f"{self.corpus}_{self.tree_source}"


_TREE, _LABELS = {"name": "tree_transformer"}, "labelled nodes"
_SEQUENCE = {"clip": 16}
_DEFAULTS = (
    System("tree_transformer", "labels", RIGHT, _LABELS, _TREE),
    System("other_trees", "labels", OTHER, _LABELS, _TREE, "shuffled"),
    System(BASELINE, "labels", NONE, model={"name": "transformer"}),
)


def _relations(name: str, reads: str, **relations: object) -> System:
    model = {"name": "relation_transformer", "relations": {"sequence": _SEQUENCE, **relations}}
    return System(name, "arcs", RIGHT if relations else NONE, reads, model)


_BY_LABELS = (
    System("tree_relative_positions", "labels", RIGHT, _LABELS, {**_TREE, "tree": {"relative_positions": 16}}),
    System("linearized_transformer", "labels", RIGHT, "brackets among the words", {"name": "linearized_transformer"}),
    System("without_labels", "labels", PART, "nodes without labels", _TREE, "unlabelled", hidden_labels_entropy),
    System("permuted_labels", "labels", PART, "nodes, permuted labels", _TREE, "permuted_labels", permuted_labels_entropy),
)
_BY_SHAPE = (
    System("tree2seq", "shape", RIGHT, "binary shape", {"name": "tree2seq"}),
    System("tree2seq_other_trees", "shape", OTHER, "binary shape", {"name": "tree2seq"}, "shuffled"),
    System("bilstm", "shape", NONE, model={"name": "bilstm"}),
)
_BY_LEVELS = (
    System(
        "multi_granularity",
        "levels",
        RIGHT,
        "phrases of six levels",
        {"name": "multi_granularity", "num_heads": 8}
        | {"phrases": {"ngrams": [], "levels": [1, 2, 3, 4, 5, 6], "tag_loss": 0, "chunk_size": 2}},
    ),
    System("sinusoids", "levels", NONE, model={"name": "transformer"}),
)
_BY_ARCS = (
    _relations("structural_positions", "depths", structural={"clip": 4}),
    _relations("tree_distance", "distances", tree_distance={"clip": 4, "values": True}),
    _relations("tree_traversal", "paths", tree_traversal={"clip": 4, "values": True}),
    _relations("deprel_head", "relations", label_head="deprel"),
    System("child_sum_tree2seq", "arcs", RIGHT, "arcs", {"name": "child_sum_tree2seq"}),
    _relations("relative_positions", "–"),
)
_OF_PARSES = (
    *_DEFAULTS,
    System("random_trees", "labels", OTHER, _LABELS, _TREE, "random"),
    *(System(name, name, WORSE, _LABELS, _TREE) for name in DAMAGE),
)


def systems_of(settings: ControlSettings) -> tuple[System, ...]:
    """Return the systems that are compared."""
    if settings.all:
        return (*_DEFAULTS, *_BY_LABELS, *_BY_SHAPE, *_BY_LEVELS, *_BY_ARCS)
    return _OF_PARSES if settings.rung == "c" else _DEFAULTS


def draw_corpora(settings: ControlSettings, without: Sequence[str] = ()) -> dict[str, Corpus]:
    """Return the corpora of the systems by name, with no sentences in the splits `without`.

    Those of rung c need parses, which the command makes.
    """
    sizes = settings.split_sizes | dict.fromkeys(without, 0)
    seed = settings.data_seed
    if settings.rung == "b":
        return {"labels": expressions(sizes, seed)}
    if settings.rung == "d":
        return {"labels": deep_orders(sizes, seed)}
    forms = dict.fromkeys(system.corpus for system in systems_of(settings))
    return {reads: random_orders(settings.words, sizes, seed, reads) for reads in forms}


class _ControlStudy(Study):
    """A study whose table is part of that of the control."""

    def write(self, records: Sequence[Record]) -> str:
        super().write(records)
        return f"{self.out.name}: {self.out / 'scaling.json'}, {self.out / 'scaling.png'}"

    def describe_start(self, planned: Sequence[Record], left: Iterable[Cell]) -> Iterator[str]:
        """Yield nothing: the control needs one seed, and says its sizes itself."""
        yield from ()


def studies_of(settings: ControlSettings, out: Path, records: Path | None) -> Iterator[tuple[str, Study]]:
    """Return a study for each corpus, with its name. OUT/data has the data sets."""
    systems = systems_of(settings)
    for corpus in dict.fromkeys(system.corpus for system in systems):
        members = [system for system in systems if system.corpus == corpus]
        config = study_config(settings, members, out / "data")
        yield corpus, _ControlStudy(**vars(make_study(FORM, config, out / corpus, records and records / corpus)))


def study_config(settings: ControlSettings, systems: list[System], data: Path) -> ScalingConfig:
    """Return the study of systems that share a corpus."""
    rung = RUNGS[settings.rung]
    steps = settings.max_steps or rung.max_steps
    names = [system.name for system in systems]
    without = [system.name for system in systems if system.trees == NONE]
    leaves = settings.words if settings.rung == "a" else rung.leaves
    values: dict[str, Any] = {
        "data": str(data / systems[0].data),
        "model": {
            "d_model": 64,
            "d_ff": 128,
            "num_heads": 4,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "dropout": 0.0,
        },
        "optimizer": {
            "learning_rate": 3e-3,
            "warmup_steps": max(1, steps // 8),
            "decay_steps": steps,
            "label_smoothing": 0.0,
        },
        "batch": {"max_tokens": BATCH * (leaves + 1)},  # with the end of a target
        "decoding": {"beam_size": 1},
        "max_steps": steps,
        "validate_every": max(1, steps // 4),
        "checkpoint_every": max(1, steps // 8),
        "keep_checkpoints": 1,
        "average_checkpoints": 1,
        "log_every": max(1, steps // 40),
        "loggers": [],
        "workers": 0,
        "grid": {
            "fractions": [size / settings.all_sizes[-1] for size in settings.all_sizes],
            "models": {system.name: {"model": dict(system.model), "data": str(data / system.data)} for system in systems},
            "seeds": list(settings.seeds),
            "baseline": [*without, *names][0],
            "parallel": settings.parallel,
        },
    }
    values = overlay(overlay(values, dict(rung.training)), settings.training)
    return build_settings(ScalingConfig, values, "training")
