"""The trained model of a run, with its settings and, for translation, its vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NotRequired, TypeVar

import torch
from sentencepiece import SentencePieceProcessor
from torch import nn
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes no other

from treenet.config import TrainConfig
from treenet.data.input_kinds import check_columns
from treenet.layers.backend import remember_precision
from treenet.models import Classifier, Seq2Seq
from treenet.runs.checkpoint import AVERAGED, INITIAL, META, WEIGHTS
from treenet.runs.checkpoint_io import load_weights
from treenet.runs.identity import checkpoint_folder
from treenet.runs.run_folder import EXPORT_FACTS, choose_remedy, name_in_results, read_facts, recorded_sha256
from treenet.tasks.base import build_task
from treeproc.common.files import file_sha256, file_size, read_json
from treeproc.common.messages import phase, warn
from treeproc.common.settings import UserError, differences, load_settings
from treeproc.common.storage import AnyPath, inside
from treeproc.shards.piece_files import decode_tokens, read_pieces, read_tokenizer
from treeproc.shards.shard import check_vocabulary_files
from treeproc.shards.store import TOKENIZER_FILE, forms_of_trees, read_index

UNTRAINED = "untrained"
# By the task that a command needs: what a run of another task cannot do, and a remedy.
_OTHER_TASK = {
    "translation": "translate; give a run of task translation (tree-attention classify reads classifiers)",
    "classification": "classify; give a run of task classification",
}
HELD_DATA = "data"  # the folder of an exported run with the vocabulary of its data set
CARD = "README.md"  # of an exported run, which people may edit


class _File(TypedDict):
    """The recorded size and hash of a file."""

    bytes: int
    sha256: str


class Exported(TypedDict):
    """The fields of export.json that are read."""

    files: dict[str, _File]
    format: NotRequired[str]


Model = TypeVar("Model", bound=nn.Module, covariant=True)


@dataclass(frozen=True)
class LoadedModel(Generic[Model]):
    """A model in evaluation mode, with its settings and its origin."""

    model: Model
    config: TrainConfig
    checkpoint: str  # its name in results, for example "averaged" or "step_00001000", or "untrained"
    data: AnyPath  # data set folder
    own_data: bool  # whether that is the data set of the training, with the same trees
    weights_sha256: str | None  # of model.safetensors; None for an untrained model
    run: Path  # folder of the run
    weights: Path | None  # folder of model.safetensors; None for an untrained model


@dataclass(frozen=True)
class LoadedRun(LoadedModel[Model]):
    """A translation model with its vocabulary."""

    processor: SentencePieceProcessor


@dataclass(frozen=True)
class LoadedClassifier(LoadedModel[Classifier]):
    """A classifier with the names of its classes, in the order of their numbers."""

    classes: list[str]


def load_run(
    run: Path,
    *,
    checkpoint: str = AVERAGED,
    data: AnyPath | None = None,
    untrained: bool = False,
    device: torch.device | str = "cpu",
) -> LoadedRun[Seq2Seq]:
    """Load the translation model of a run folder, and the vocabulary of its data set; see `load_model`."""
    loaded = load_model(run, task="translation", checkpoint=checkpoint, data=data, untrained=untrained, device=device)
    return LoadedRun(**vars(loaded), processor=load_processor(loaded.data))


def load_classifier(
    run: Path, *, checkpoint: str = AVERAGED, data: AnyPath | None = None, device: torch.device | str = "cpu"
) -> LoadedClassifier:
    """Load the classifier of a run folder, and the names of the classes that it learned; see `load_model`.

    Raises UserError if those of its data set are others.
    """
    loaded = load_model(run, task="classification", checkpoint=checkpoint, data=data, device=device)
    facts = read_facts(run, needed=OF_CLASSES)
    check_classes(loaded.data, read_index(loaded.data / "encoded"), data_of(run, loaded.config), facts)
    return LoadedClassifier(**vars(loaded), classes=facts["classes"])


OF_CLASSES = ("num_classes", "classes")  # in the facts of every classifier of single texts


def check_classes(data: AnyPath, index: Mapping, own: AnyPath, facts: Mapping) -> None:
    """Raise UserError if a data set has other classes than the model learned from the data set `own`.

    Classes without names fit if there are as many.
    """
    known, found = facts.get("num_classes"), index.get("num_classes")
    if known != found:
        raise UserError(f"{data} has {found} classes, but the model learned {known}; {advise(data, own)}")
    names = facts.get("classes")
    if index.get("classes") not in (None, names):
        found, known = (", ".join(some or ()) for some in (index["classes"], names))
        raise UserError(f"{data} has the classes {found}, but the model learned {known}; {advise(data, own)}")


def load_model(
    run: Path,
    *,
    task: str | None = None,
    checkpoint: str = AVERAGED,
    data: AnyPath | None = None,
    untrained: bool = False,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load the model of a run folder, by default with averaged weights.

    `data` takes another data set of the same vocabulary. `untrained` takes the weights before the first update. They are those of
    the run's seed, or with `init` those that the run started from.

    Raises UserError if the folder is not a run of `task`, or if the checkpoint is missing or does not fit the settings. It also
    does so if the vocabulary is not that of the training.
    """
    check_is_run(run)
    check_export(run)
    config = load_settings(TrainConfig, run / "config.yaml")
    hint = "restore it, or run its tree-attention train command again, into another folder"
    facts = read_facts(run, hint, ("vocab_fingerprint", "data_fingerprint"))
    if task not in (None, config.task):
        raise UserError(f"{run} is a run of {config.task}, which cannot {_OTHER_TASK[task]}")
    start = INITIAL if config.starts_from_weights else None
    chosen = start if untrained else checkpoint
    folder = None if chosen is None else checkpoint_folder(run, chosen)
    own = data_of(run, config)
    if not data:
        check_there(own, run)
    is_given, data = data is not None, data or own
    index = read_index(data / "encoded")
    own_data = index["fingerprint"] == facts["data_fingerprint"]
    if not (own_data or is_given or (run / EXPORT_FACTS).is_file()):  # an exported run has its own copy
        warn(f"warning: {own} was made again since {run} was trained, with other text or trees, so results name other data")
    check_own_vocabulary(data, index, facts, run, own)
    check_vocabulary_files(data / "encoded", index)
    if folder:
        _, model = load_trained(run, folder)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = build_task(config).build_model_that_fits(facts).eval()
        remember_precision(model, config.precision)
    check_columns(data / "encoded", model.reads)
    if is_given and model.reads.constituents:
        _check_form_of_trees(data, index, facts, run, own)
    return LoadedModel(
        model=model.to(device),
        config=config,
        checkpoint=name_in_results(run, folder) if folder and not untrained else UNTRAINED,
        data=data,
        own_data=own_data,
        weights_sha256=recorded_sha256(folder) if folder else None,
        run=run,
        weights=folder,
    )


def check_is_run(run: Path) -> None:
    """Raise UserError if a folder is not that of a run."""
    for name in ("config.yaml", "run.json"):
        if not (run / name).is_file():
            raise UserError(f"{run} is not a run: {run / name} is missing; give the folder of a training run")


def check_there(data: AnyPath, run: Path) -> None:
    """Raise UserError if the folder of the data set of a run is missing."""
    if not data.is_dir():
        remedy = choose_remedy(
            run,
            "if it moved, run the training command of the run with data=NEW, which records the new place",
            "where the data set is, run tree-attention export RUN --out FOLDER, and zip that folder",
        )
        raise UserError(f"{data}, the data set of {run}, is missing; {remedy}")


def check_own_vocabulary(data: AnyPath, index: Mapping, facts: Mapping, run: Path, own: AnyPath) -> None:
    """Raise UserError if a data set has another vocabulary than `run` learned, from the data set `own`."""
    if index["vocab_fingerprint"] != facts["vocab_fingerprint"]:
        raise UserError(
            f"{data}: the vocabulary must be {facts['vocab_fingerprint']}, which {run} was trained on, but is "
            f"{index['vocab_fingerprint']}; {advise(data, own)}"
        )


def _check_form_of_trees(data: AnyPath, index: Mapping, facts: Mapping, run: Path, own: AnyPath) -> None:
    """Raise UserError if trees have another form than those that `run` learned from, if its data set `own` can be read."""
    try:
        before = read_index(own / "encoded")
    except (UserError, OSError):
        return
    if before["fingerprint"] != facts["data_fingerprint"]:
        return
    learned, given = forms_of_trees(*(one.get("tree_settings", {}) for one in (before, index)))
    shared = learned.keys() & given.keys()  # indices of earlier versions lack some
    was, now = ({name: one[name] for name in sorted(shared)} for one in (learned, given))
    if changed := differences(was, now, "tree"):
        raise UserError(
            f"{data} has trees of another form than {own}, which {run} learned ({'; '.join(changed)}), so scores would mean "
            f"nothing; {advise(data, own)}, and without these settings"
        )


def advise(data: AnyPath, own: AnyPath) -> str:
    """Return the remedy for a data set with another vocabulary, or other classes, than the data set `own` had in training."""
    if data == own:
        return "it was made again since then; restore it, or train on it into another folder"
    return f"make it with vocab_from={own}"


def task_of(run: Path) -> str:
    """Return the task of a run folder; empty for any other folder. Raises UserError if its settings cannot be read."""
    path = run / "config.yaml"
    return load_settings(TrainConfig, path).task if path.is_file() and (run / "run.json").is_file() else ""


def data_of(run: AnyPath, config: TrainConfig) -> AnyPath:
    """Return the data set of a run: the part of it that an exported run holds, else the one of its settings."""
    held = run / HELD_DATA
    return held if (held / "encoded" / "index.json").is_file() or (run / EXPORT_FACTS).is_file() else config.data


def scored_splits(run: Path) -> list[str]:
    """Return those of valid and test that the data set of a run has."""
    index = read_index(data_of(run, load_settings(TrainConfig, run / "config.yaml")) / "encoded")
    return [split for split in ("valid", "test") if split in index["totals"]]


def load_trained(run_dir: Path, checkpoint: Path | None = None) -> tuple[TrainConfig, Any]:
    """Load configuration and model, in eval mode, of RUN/averaged or of the given checkpoint folder."""
    config = load_settings(TrainConfig, run_dir / "config.yaml")
    folder = checkpoint or checkpoint_folder(run_dir, AVERAGED)
    with phase("loading the model"), torch.random.fork_rng(devices=[]):  # a program's numbers go on as they were
        sizes = read_json(folder / META)
        try:
            model = build_task(config).build_model_that_fits(sizes)
        except UserError as error:
            if not str(error).startswith("model.name "):
                raise
            raise UserError(f"{run_dir / 'config.yaml'}: {error}") from None  # this checkout lacks the architecture
        load_weights(model, folder)
    remember_precision(model, config.precision)
    return config, model.eval()


def check_export(run: Path) -> None:
    """Raise UserError if an exported run lacks one of its files, or if one has changed. The model card may.

    The index of its data has the hashes of the vocabulary that it was trained with.
    """
    hint = "copy the exported run again"
    facts = run / EXPORT_FACTS
    for name, recorded in read_json(facts, hint, Exported)["files"].items() if facts.is_file() else ():
        path = inside(run, name)
        if not path.is_file():
            raise UserError(f"{run / name} is missing; {hint}")
        hashed = name != f"{AVERAGED}/{WEIGHTS}"  # loading hashes the weights
        is_whole = file_size(path) == recorded["bytes"] and (not hashed or file_sha256(path) == recorded["sha256"])
        if name != CARD and not is_whole:
            raise UserError(f"{path} is damaged: its size or hash is not the one in {EXPORT_FACTS}; {hint}")
    if facts.is_file():
        held = run / HELD_DATA / "encoded"
        check_vocabulary_files(held, read_index(held), hint)


def load_processor(data: AnyPath) -> SentencePieceProcessor:
    """Load the sentencepiece model of a data set. Raises UserError if it is missing or broken."""
    return read_pieces(data / "encoded" / "vocab" / "pieces.model")[1]


def load_decoder(data: AnyPath) -> Callable[[list[list[int]]], list[str]]:
    """Load what makes texts of sequences of piece ids of leaves: the sentencepiece model of a data set, or its fast tokenizer.

    Raises UserError if it is missing or broken.
    """
    known = read_index(data / "encoded").get("tokenizer")
    if known is None:
        return load_processor(data).decode
    return partial(decode_tokens, read_tokenizer(data / "encoded" / TOKENIZER_FILE), known["unknown"])
