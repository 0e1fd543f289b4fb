"""The kinds of folders that commands write: how to recognise each, and which command may write where.

The content of a folder tells its kind. So folders of every version are recognised, and those of commands that were killed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from treeproc.common.errors import UserError
from treeproc.common.files import is_stream, remove_leftovers
from treeproc.common.settings import Settings, load_settings
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.common.yaml_reader import MOST_BYTES, read_yaml

CONFIG = "config.yaml"
_LOCKS = ".*lock"


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of folder.

    A folder is of this kind if it has everything in one of `marks`: names of files and folders. FILE#KEY is a key of a file of
    JSON or YAML. `written` has patterns of the names that its command replaces or removes, and `kept` those of its other
    files. `inner` has the kinds of the folders in it. Its files may also be added to folders of the kinds `beside`.
    """

    name: str
    marks: tuple[tuple[str, ...], ...] = ()
    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    inner: Mapping[str, "Kind"] = field(default_factory=dict)
    beside: tuple["Kind", ...] = ()

    def owns(self, name: str) -> bool:
        """Return whether a name right below such a folder belongs to it."""
        return any(fnmatchcase(name, pattern) for pattern in (*self.written, *self.kept, _LOCKS))


DATA_SET = Kind(
    "a data set",
    (("text/index.json",), ("parsed/index.json",), ("encoded/index.json",), (f"{CONFIG}#splits", f"{CONFIG}#subwords")),
    (CONFIG, "text", "parsed", "encoded"),
    ("provenance*.json", ".work-*"),
)
ENCODER = Kind("a pretrained encoder", (("config.json#model_type",),))  # which no command of ours writes
STATES = Kind("states of an encoder", (("states.json#encoder_sha256",),), ("states.json", "shards"), ("provenance*.json",))
RUN = Kind(
    "a training run",
    (
        (f"{CONFIG}#max_steps", f"{CONFIG}#checkpoint_every"), ("run.json", "metrics.jsonl"), ("averaged/meta.json",),
        ("initial/meta.json",),
    ),
    (CONFIG, "run.json", "checkpoints", "averaged", "initial", "metrics.jsonl", "curves.png", "tensorboard", "ray"),
    (
        "stop-requested", "provenance*.json", "loggers.json", "wandb", "scores.json", "translations.*.txt", "predictions.*.tsv",
        "nll.*.tsv", "parses.*.txt", "language_model.*.tsv", "probes.json", "probes.*.png", "log.txt", "error.txt",
    ),
)  # fmt: skip
EXPORT = Kind(
    "an export",
    (("export.json#files",),),
    (
        "export.json", "README.md", CONFIG, "run.json", "averaged", "data", "vocab", "encoder.onnx", "decoder.onnx",
        "config.json", "model.bin", "shared_vocabulary.json",
    ),
)  # fmt: skip
SCALING = Kind(
    "a scaling study",
    ((f"{CONFIG}#grid.fractions",), ("ledger.json", "scaling.json")),
    (CONFIG, "scaling.json", "scaling.png", "scaling.svg"),
    ("ledger.json", "cells"),
    {"cells/*": RUN},
)
SEEDS = Kind(
    "a comparison over seeds",
    ((f"{CONFIG}#grid.systems",), ("ledger.json", "comparison.json")),
    (CONFIG, "comparison.json", "comparison.png"),
    ("ledger.json", "cells"),
    {"cells/*": RUN},
)
SEARCH = Kind(
    "a search over settings",
    ((f"{CONFIG}#tune.space",), ("trials.json#systems",), ("tuning.json#systems",)),
    (CONFIG, "tuning.json", "importance.png", "best-*.yaml"),
    ("ledger.json", "trials.json", "cells"),
    {"cells/*": RUN},
)
BACK_TRANSLATION = Kind(
    "a back-translation",
    (("made.json",), (f"{CONFIG}#ratio", f"{CONFIG}#backward")),
    (
        CONFIG, "real", "synthetic.source", "synthetic.target", "train.source", "train.target", "text.target", "text.translated",
        "backward_data", "backward", "data",
    ),
    ("made.json",),
    {"backward_data": DATA_SET, "backward": RUN, "data": DATA_SET},
)  # fmt: skip
PARSER = Kind(
    "a training of parsers",
    ((f"{CONFIG}#constituency", f"{CONFIG}#depparse"), ("run.json#texts", "models")),
    (CONFIG, "run.json", "training", "models"),
)
DEMO = Kind(
    "a demo",
    (("report.txt", "data", "tree_transformer"),),
    ("report.txt", "learning_curves.png"),
    ("data", "tree_transformer", "transformer"),
    {"data": DATA_SET, "tree_transformer": RUN, "transformer": RUN},
)
_CORPORA = ("labels", "shape", "arcs", "damaged_*")  # of a positive control, each with a study
CONTROL = Kind(
    "a positive control",
    (("control.json#verdict",), ("data/text/labels",), ("data/text/english",)),
    ("control.json", "data"),
    _CORPORA,
    {"data/*": DATA_SET, **dict.fromkeys(_CORPORA, SCALING)},
)
REPORT = Kind(
    "a report",
    (("report.json#figures",), ("report.json", "index.html", "figures")),
    ("report.json", "index.html", "figures"),
)
COMPARISON = Kind(
    "a comparison of two systems", (("comparison.json#system_origin",),), ("comparison.json",), beside=(RUN, EXPORT)
)
RESULTS = Kind("results of a run", beside=(RUN, EXPORT))
RECORDS = Kind("records of a study")

# A folder with marks of several kinds is of the first: an export also looks like a run, and so do the settings of studies.
KINDS = (
    EXPORT,
    SCALING,
    SEEDS,
    SEARCH,
    BACK_TRANSLATION,
    DATA_SET,
    STATES,
    PARSER,
    RUN,
    DEMO,
    CONTROL,
    REPORT,
    COMPARISON,
    ENCODER,
)


def claim_folder(out: AnyPath, kind: Kind, settings: type[Settings] | None = None, option: str = "--out") -> None:
    """Check that a command may write a folder of this kind as `out`, which `option` names. Every writer calls this first.

    It also removes temporary files of commands that were killed. Raises UserError if `out` is a folder of another kind, or lies
    at a place for files of another kind, or is a file. It also does so for a file in `out` that is not ours and that the command
    would replace. A config.yaml is ours if it holds `settings`.
    """
    if isinstance(out, Path):
        there = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"{option}: {there} is a file, but must be a folder; choose another {option}")
    _refuse_owned(out, kind, option)
    found = kind_of(out)
    if found is not None and found not in (kind, *kind.beside):
        raise UserError(f"{out} is {found.name}, and this command would write {kind.name} there; choose another {option}")
    if found is None:
        for name in sorted(_names(out)):
            would_go = any(fnmatchcase(name, pattern) for pattern in kind.written) and not _is_empty(out / name)
            if would_go and not _holds(out / name, settings):
                raise UserError(
                    f"{out / name} is there already, but is not of {kind.name}, and the command would replace it; choose another "
                    f"{option}"
                )
    if isinstance(out, Path):
        remove_leftovers(out)


def claim_output(path: AnyPath, inputs: Mapping[str, AnyPath | None], option: str = "output") -> None:
    """Check the place of a single file that `option` names, before anything is written. Devices and pipes may be anywhere.

    Raises UserError if it is one of `inputs`, perhaps by another name, or a place for files of a folder of `KINDS`. Also if it
    is a folder, or lies in a folder that is missing.
    """
    if is_stream(path):
        return
    for name, one in inputs.items():
        if one is not None and is_same_file(path, one):
            raise UserError(f"{option} must be another file than {name}, which it would replace, but both are {one}")
    _refuse_owned(path, None, option)
    if isinstance(path, Path):
        place = Path(os.path.realpath(path))
        if place.is_dir():
            raise UserError(f"{option}: {path} is a folder; give the name of a file")
        if not place.parent.is_dir():
            raise UserError(f"{option}: there is no folder {place.parent} for this file; make it, or choose another {option}")


def is_same_file(one: AnyPath, other: AnyPath) -> bool:
    """Return whether two paths lead to one file or object, also through links."""
    if isinstance(one, RemotePath) or isinstance(other, RemotePath):
        return one == other
    with suppress(OSError, ValueError):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def kind_of(folder: AnyPath) -> Kind | None:
    """Return the kind of a folder, partly written ones too; None for a folder of something else, an empty or a missing one."""
    names = _names(folder)
    values: dict[str, object] = {}
    return next((kind for kind in KINDS if any(_has(folder, names, mark, values) for mark in kind.marks)), None)


def _has(folder: AnyPath, names: set[str], mark: tuple[str, ...], values: dict[str, object]) -> bool:
    """Return whether a folder with these `names` has everything of a mark. `values` are the files that were read already."""
    for one in mark:
        name, _, keys = one.partition("#")
        top, _, below = name.partition("/")
        if top not in names or (below and not (folder / name).exists()):
            return False
        if keys:
            if name not in values:
                values[name] = _read(folder / name)
            value = values[name]
            for key in keys.split("."):
                if not isinstance(value, dict) or key not in value:
                    return False
                value = value[key]
    return True


def _read(path: AnyPath) -> object:
    """Return the content of a file of JSON or settings; None if it cannot be read."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_bytes()) if path.is_file() else None
        with path.open("rb") as file:
            return read_yaml(file.read(MOST_BYTES + 1).decode(), str(path))
    except (OSError, ValueError, RecursionError, UserError):
        return None


def _is_empty(path: AnyPath) -> bool:
    """Return whether a path is a folder without a file at any depth."""
    if isinstance(path, RemotePath):
        return path.is_dir() and not path.objects()
    return path.is_dir() and all(one.is_dir() and not one.is_symlink() for one in path.rglob("*"))


def _holds(path: AnyPath, settings: type[Settings] | None) -> bool:
    """Return whether a file is a config.yaml of these settings."""
    if settings is None or path.name != CONFIG:
        return False
    with suppress(UserError):
        load_settings(settings, path)
        return True
    return False


def _names(folder: AnyPath) -> set[str]:
    """Return the names right below a folder; none if it is not a readable folder."""
    if isinstance(folder, RemotePath):
        return {path.name for path in (*folder.glob("*"), *folder.folders())}
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _refuse_owned(path: AnyPath, kind: Kind | None, option: str) -> None:
    """Raise UserError if `path` is a place for the files of a folder above it, unless that one has inner folders of `kind`."""
    allowed = () if kind is None else (kind, *kind.beside)
    places = {path} if isinstance(path, RemotePath) else {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
    for place in places:
        for folder, parts in _above(place):
            if not any(one.owns(parts[0]) for one in KINDS):
                continue
            found = None
            with suppress(UserError):  # a store may show less of what is above
                found = kind_of(folder)
            if found is None:
                continue
            for pattern, inner in found.inner.items():
                length = pattern.count("/") + 1
                if fnmatchcase("/".join(parts[:length]), pattern) and (len(parts) > length or inner in allowed):
                    break
            else:
                if found.owns(parts[0]):
                    raise UserError(f"{option}: {path} is a place for files of {found.name}, {folder}; choose another {option}")
            break


def _above(path: AnyPath) -> Iterator[tuple[AnyPath, tuple[str, ...]]]:
    """Return the folders above a path, the nearest first, each with the names from it to the path."""
    parts = PurePosixPath(path.key).parts if isinstance(path, RemotePath) else path.parts
    folder: AnyPath = path
    for count in range(1, len(parts)):
        folder = folder.parent
        yield folder, parts[-count:]
