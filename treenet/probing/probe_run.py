"""The probes of a training run: their order, their computation, and the reuse of earlier results.

A probe is multinomial logistic regression on frozen states. Shapes: m examples, D width of the states, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treenet.data.input_kinds import hint_for_arcs
from treenet.evaluation.significance import t_quantile
from treenet.layers.backend import choose_device
from treenet.probing.inputs import EMBEDDINGS, ProbeInputs, ProbeTask, States, build_probe_task, collect_states, num_layers
from treenet.probing.probe_results import draw_layers, figure_name, read_probes
from treenet.probing.sentences import choose_sentences
from treenet.probing.settings import ARC_TASKS, PROBE_TASKS, ProbeSettings, TaskName
from treenet.runs.loading import UNTRAINED, LoadedModel, load_model
from treenet.runs.metrics_log import write_png
from treenet.runs.result_entries import PROBES, add_entry, name_data
from treenet.runs.result_provenance import origin
from treeproc.common.messages import Progress, warn
from treeproc.common.provenance import software
from treeproc.common.settings import UserError, differences
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import SPLITS
from treeproc.shards.shard import check_hashes
from treeproc.shards.store import line_tags, read_index


@dataclass(frozen=True)
class Examples:
    """States and classes of a split. A probe never predicts the class UNSEEN (-1)."""

    x: Tensor  # [m, D]
    y: Tensor  # [m] int64
    sentence: np.ndarray | None = None  # [m] sentence of each example; None: every example is one


@dataclass(frozen=True)
class ProbeScore:
    """Accuracies of the probe with the best penalty on valid, and half of the 95 % interval of that on test."""

    test: float
    half_interval: float | None
    valid: float
    train: float
    l2: float


def fit(train: Examples, l2: float, max_iterations: int, start: Tensor) -> Tensor:
    """Return weights [D + 1, C], biases last, that minimise mean cross-entropy + l2 / 2 |weights|^2. Biases have no penalty.

    It runs L-BFGS over all examples at once, from `start`. The problem is convex, and there is no learning rate to choose.
    """
    table = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [table], max_iter=max_iterations, tolerance_grad=1e-5, tolerance_change=1e-6, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(scores(table, train.x), train.y) + 0.5 * l2 * table[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return table.detach()


def scores(table: Tensor, x: Tensor) -> Tensor:
    """Return logits [m, C] of x [m, D]."""
    return torch.addmm(table[-1], x, table[:-1])


def predicted(table: Tensor, examples: Examples) -> np.ndarray:
    """Return whether the class of each example is predicted rightly [m]."""
    return (scores(table, examples.x).argmax(1) == examples.y).cpu().numpy()


def half_interval(right: np.ndarray, sentence: np.ndarray | None) -> float | None:
    """Return half of the 95 % interval of the mean of `right` [m], over sentences; None if nothing varies.

    Words of a sentence are not independent. So the error is that of a ratio of two sums over sentences (Cochran, 1977).
    """
    places = np.unique(np.arange(len(right)) if sentence is None else sentence, return_inverse=True)[1]
    sums = np.bincount(places, weights=right - right.mean())
    if len(sums) < 2 or not sums.any():
        return None
    return t_quantile(len(sums) - 1) * float(np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum())) / len(right)


def train_probe(
    train: Examples, valid: Examples, test: Examples, num_classes: int, strengths: Sequence[float], max_iterations: int
) -> ProbeScore:
    """Fit on train, choose the penalty on valid (the strongest of equal ones), and score on test.

    States are standardised by mean and deviation of train. The strongest penalty is fitted first. Each fit starts from the one
    before.
    """
    mean, deviation = train.x.mean(0), train.x.std(0, correction=0)
    deviation = torch.where(deviation > 1e-6 * deviation.max(), deviation, 1.0)  # a constant column carries no information
    train, valid, test = (replace(one, x=(one.x - mean) / deviation) for one in (train, valid, test))
    table = train.x.new_zeros(train.x.shape[1] + 1, num_classes)
    best, chosen, chosen_table = -1.0, 0.0, table
    for l2 in sorted(set(strengths), reverse=True):
        table = fit(train, l2, max_iterations, table)
        if (found := float(predicted(table, valid).mean())) > best:
            best, chosen, chosen_table = found, l2, table
    right, of_train = predicted(chosen_table, test), predicted(chosen_table, train)
    return ProbeScore(float(right.mean()), half_interval(right, test.sentence), best, float(of_train.mean()), chosen)


TRAINED, PIECES, CONTROL = "trained", "embeddings", "control"
# Keys of an entry that may differ between earlier and new probes.
_MAY_DIFFER = {"tasks", "asked", "own_data", "software", "continued_with", "steps"}
STATES = (PIECES, UNTRAINED, TRAINED, CONTROL)


@dataclass(frozen=True)
class Probe:
    """One probe: its task and its states. `of` is "mean" or "root" of a sentence, "first" or "mean" of a word's pieces.

    The states CONTROL are the trained ones; their probe learns the control labels of the task.
    """

    task: TaskName
    states: str
    layer: int
    of: str

    @property
    def place(self) -> tuple:
        """Return the sort key of its result."""
        return PROBE_TASKS.index(self.task), STATES.index(self.states), self.layer, self.of


def probe_run(folder: Path, settings: ProbeSettings) -> tuple[str, dict]:
    """Add the entry NAME to `probes.json` of a run folder, and a figure if there are several layers.

    Returns NAME, that of the checkpoint, and the entry. Every probe is written as soon as it is trained. An existing probe of the
    same model, data and settings is not trained again. The first probe of others replaces all existing ones of NAME.

    Raises UserError if the folder is not a run, if run and data do not fit, or if the data set has no parsed trees. It also does
    so if the settings ask for something that the model or the data set lacks.
    """
    device = choose_device(settings.use_gpu)
    trained = load_model(folder, checkpoint=settings.checkpoint, data=settings.data, device=device)
    if trained.config.task == "causal_lm":
        raise UserError(f"{folder} is a run of causal_lm, whose model reads other inputs than an encoder; probes read encoders")
    layers = choose_layers(settings.layer, num_layers(trained.model))
    names = choose_tasks(settings.tasks, trained.data)
    earlier = read_probes(folder)
    inputs = read_inputs(trained, settings)
    tasks = {name: build_probe_task(name, inputs) for name in names}
    entry = _start_entry(trained, settings)
    name = ".".join([trained.checkpoint, *([] if trained.own_data else [name_data(trained.data)])])
    old = earlier.get(name, {})
    if _are_alike(old, entry):
        kept = [name for name in ("software", "continued_with") if name in old]
        entry = {**entry, "software": None, **{name: old[name] for name in kept}}
    entry["tasks"] = {name: _describe(task) for name, task in tasks.items()}
    entry = _join(old, entry)

    def write(cell: Probe | None = None, score: ProbeScore | None = None) -> None:
        if cell is not None:
            entry["tasks"][cell.task]["results"].append(
                {"states": cell.states, "layer": cell.layer, "of": cell.of, **vars(score)}
            )
        # Another command may probe other tasks or layers of the same model at the same time.
        add_entry(folder / PROBES, name, entry, _join)

    done = {_probe(name, result) for name, facts in entry["tasks"].items() for result in facts["results"]}
    rooted = trained.model.reads.rooted
    cells = [cell for task in tasks.values() for cell in _cells(task, layers, rooted, settings.word_state) if cell not in done]
    made_by = [entry["software"], *entry.get("continued_with", [])]
    if cells and (now := software()) not in made_by:
        entry["continued_with"] = [*made_by[1:], now]
    if replaced := _describe_replaced(old, entry):
        warn(f"note: {folder / PROBES}, {name}: the first new probe replaces {replaced}; copy the file to keep them")
    if not (replaced and cells):  # otherwise a stop before the first probe would lose the old ones
        write()
    for states in (TRAINED, UNTRAINED):
        todo = [cell for cell in cells if (cell.states == UNTRAINED) == (states == UNTRAINED)]
        if not todo:
            continue
        loaded = trained if states == TRAINED else load_model(folder, data=settings.data, untrained=True, device=device)
        found = _collect(loaded, inputs, sorted({cell.layer for cell in todo}), settings.word_state, states)
        with Progress(f"probes of the {states} model", len(todo), unit="probes") as progress:
            for cell in todo:
                of_layer = {split: one[cell.layer] for split, one in found.items()}
                write(cell, _train(cell, tasks[cell.task], of_layer, settings, device))
                progress.update(1, f"{cell.task}, layer {cell.layer}")
    entry, path = read_probes(folder)[name], folder / figure_name(name)
    if figure := draw_layers(entry):
        write_png(figure, path)
    else:
        path.unlink(missing_ok=True)  # of results that were dropped
    return name, entry


def choose_layers(layer: int | str, count: int) -> list[int]:
    """Return the numbers of layers, from 1. Raises UserError for a layer that the encoder lacks."""
    if layer == "all":
        return list(range(1, count + 1))
    if layer == "last":
        return [count]
    if int(layer) > count:
        has = f"{count} layers" if count > 1 else "one layer with states to probe, its last"
        raise UserError(f"layer must be last, all or at most {count}, but is {layer}: the encoder has {has}")
    return [int(layer)]


def choose_tasks(chosen: Sequence[TaskName] | None, data: AnyPath) -> list[TaskName]:
    """Return the tasks in their order, by default all that the data set has labels for. Raises UserError for others."""
    index = read_index(data / "encoded")
    wanted = [name for name in PROBE_TASKS if chosen is None or name in chosen]
    missing = [name for name in wanted if name in ARC_TASKS and "arcs" not in index.get("columns", [])]
    if missing and chosen is not None:
        raise UserError(
            f"tasks: {', '.join(missing)} need the arcs between words, but {data} has none; leave them out, or "
            f"{hint_for_arcs(index)}"
        )
    return [name for name in wanted if name not in missing]


def read_inputs(trained: LoadedModel, settings: ProbeSettings) -> dict[str, ProbeInputs]:
    """Read the sentences of each split, in the form that the model reads."""
    device = next(trained.model.parameters()).device
    data, reads, found = trained.data, trained.model.reads.for_device(device), {}
    check_hashes(data / "encoded", "valid", "test")
    with Progress("reading sentences", len(SPLITS), unit="splits") as progress:
        for split in SPLITS:
            sizes = (
                (settings.train_sentences, settings.train_words)
                if split == "train"
                else (settings.eval_sentences, settings.eval_words)
            )
            sentences = choose_sentences(data, split, sizes[0], trained.config.batch.max_leaves, settings.seed)
            found[split] = ProbeInputs.build(data, split, reads, sentences, sizes[1], settings.seed)
            progress.update(1, f"{len(sentences.rows):,} of {split}")
    known, texts = set(found["train"].texts()), found["test"].texts()
    if shared := sum(text in known for text in texts):
        warn(f"note: {shared:,} of {len(texts):,} sentences of test are also among those of train, which makes accuracies higher")
    tags = line_tags(read_index(data / "encoded"))
    every = [one.sentences.syntax for one in found.values()]
    if tagged := sum(one.form[first] in tags for one in every for first in one.word_edges[:-1].tolist()):
        count = sum(len(one.top) for one in every)
        warn(
            f"note: {tagged:,} of {count:,} sentences begin with a tag, which counts as a word and adds a node; "
            "compare their accuracies only with those of the same text"
        )
    return found


def _start_entry(trained: LoadedModel, settings: ProbeSettings) -> dict:
    """Return an entry of probes.json before any probe: the weights, data and settings of its results."""
    return {
        **origin(trained, settings),
        "settings": {**settings.identity(), "max_leaves": trained.config.batch.max_leaves},
        "layers": num_layers(trained.model),
        "tasks": {},
    }


def _are_alike(before: Mapping, entry: Mapping) -> bool:
    """Return whether two entries are of the same model, data and settings."""
    return all(before.get(key) == entry.get(key) for key in (before.keys() | entry.keys()) - _MAY_DIFFER)


def _describe_replaced(before: Mapping, entry: Mapping) -> str:
    """Return the number of results that an entry takes the place of, and why; empty if there are none."""
    count = sum(len(facts["results"]) for facts in before.get("tasks", {}).values())
    if not count or _are_alike(before, entry):
        return ""
    changed = [line for key in ("settings", "data") for line in differences(before.get(key), entry.get(key), key)]
    why = f"other settings or data ({'; '.join(changed)})" if changed else "earlier weights"
    return f"{count:,} result{'s' if count > 1 else ''} of {why}"


def _join(before: dict, entry: dict) -> dict:
    """Return an entry with the tasks and results of an earlier one, if they are alike."""
    if not _are_alike(before, entry):
        return entry
    tasks = {}
    for name in PROBE_TASKS:
        if found := [one["tasks"][name] for one in (before, entry) if name in one["tasks"]]:
            results = {_probe(name, result): result for facts in found for result in facts["results"]}
            tasks[name] = {**found[0], "results": [results[probe] for probe in sorted(results, key=lambda probe: probe.place)]}
    return {**entry, "tasks": tasks}


def _probe(task: TaskName, result: Mapping) -> Probe:
    """Return the probe that gave a result of an entry."""
    return Probe(task, result["states"], result["layer"], result["of"])


def _describe(task: ProbeTask) -> dict:
    counts = np.bincount(task.labels["train"], minlength=len(task.classes)).tolist()
    return {
        "classes": dict(zip(task.classes, counts, strict=True)),
        "examples": {split: len(labels) for split, labels in task.labels.items()},
        "majority": task.majority(),
        "results": [],
    }


def _cells(task: ProbeTask, layers: Sequence[int], rooted: bool, word_state: str) -> list[Probe]:
    """Return the probes of a task; none if the task has only one class."""
    if task.empty:
        return []
    kinds = [word_state] if task.of_words else ["mean", "root"] if rooted else ["mean"]
    names = [UNTRAINED, TRAINED, *([CONTROL] if task.of_words else [])]
    of_layers = [Probe(task.name, states, layer, of) for states in names for layer in layers for of in kinds]
    return [Probe(task.name, PIECES, EMBEDDINGS, kinds[0]), *of_layers]


def _collect(
    loaded: LoadedModel, inputs: dict[str, ProbeInputs], layers: Sequence[int], word_state: str, states: str
) -> dict[str, dict[int, States]]:
    """Collect states of all splits, by layer."""
    total = sum(one.num_rows for one in inputs.values())
    with Progress(f"states of the {states} model", total, unit="sentences") as progress:
        return {split: collect_states(loaded.model, one, layers, word_state, progress.update) for split, one in inputs.items()}


def _train(cell: Probe, task: ProbeTask, states: dict[str, States], settings: ProbeSettings, device: str) -> ProbeScore:
    examples = {}
    for split, one in states.items():
        table = one.sentences[cell.of] if one.words is None or not task.of_words else one.words
        rows = torch.from_numpy(task.rows[split])
        labels = task.control_labels(split, settings.seed) if cell.states == CONTROL else task.labels[split]
        examples[split] = Examples(table[rows].to(device), torch.from_numpy(labels).to(device), task.sentences.get(split))
    train, valid, test = (examples[split] for split in SPLITS)
    return train_probe(train, valid, test, len(task.classes), settings.l2, settings.max_iterations)
