"""The kinds of folders that commands write, and which command may write where.

FOLDER/.kind names the kind. A command writes this marker before anything else, so a killed command leaves it. Reading needs no
marker. An export has none, because it appears whole, with its export.json.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from treeproc.common.errors import UserError
from treeproc.common.files import atomic_write, remove_leftovers
from treeproc.common.named_output import is_stream
from treeproc.common.storage import AnyPath, RemotePath

CONFIG = "config.yaml"
MARKER = ".kind"
_MOST_BYTES = 100  # of a marker
_LOCKS = ".*lock"


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of folder.

    `written` has patterns of the names that its command replaces or removes, and `kept` those of its other files. `inner` has
    the kinds of the folders in it. Its files may also be added to folders of the kinds `beside`.
    """

    name: str
    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    inner: Mapping[str, "Kind"] = field(default_factory=dict)
    beside: tuple["Kind", ...] = ()

    def owns(self, name: str) -> bool:
        """Return whether a name right below such a folder belongs to it."""
        return any(fnmatchcase(name, pattern) for pattern in (*self.written, *self.kept, MARKER, _LOCKS))


DATA_SET = Kind("a data set", (CONFIG, "text", "parsed", "encoded"), ("provenance*.json", ".work-*"))
STATES = Kind("states of an encoder", ("states.json", "shards"), ("provenance*.json",))
RUN = Kind(
    "a training run",
    (CONFIG, "run.json", "checkpoints", "averaged", "initial", "metrics.jsonl", "curves.png", "tensorboard", "ray"),
    (
        "stop-requested", "provenance*.json", "loggers.json", "wandb", "scores.json", "translations.*.txt", "predictions.*.tsv",
        "nll.*.tsv", "parses.*.txt", "language_model.*.tsv", "probes.json", "probes.*.png", "log.txt", "error.txt",
    ),
)  # fmt: skip
EXPORT = Kind(
    "an export",
    (
        "export.json", "README.md", CONFIG, "run.json", "averaged", "data", "vocab", "encoder.onnx", "decoder.onnx",
        "config.json", "model.bin", "shared_vocabulary.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ),
)  # fmt: skip
SCALING = Kind(
    "a scaling study", (CONFIG, "scaling.json", "scaling.png", "scaling.svg"), ("ledger.json", "cells"), {"cells/*": RUN}
)
SEEDS = Kind("a comparison over seeds", (CONFIG, "comparison.json", "comparison.png"), ("ledger.json", "cells"), {"cells/*": RUN})
SEARCH = Kind(
    "a search over settings",
    (CONFIG, "tuning.json", "importance.png", "best-*.yaml"),
    ("ledger.json", "trials.json", "cells"),
    {"cells/*": RUN},
)
BACK_TRANSLATION = Kind(
    "a back-translation",
    (
        CONFIG, "real", "synthetic.source", "synthetic.target", "train.source", "train.target", "text.target", "text.translated",
        "backward_data", "backward", "data",
    ),
    ("made.json",),
    {"backward_data": DATA_SET, "backward": RUN, "data": DATA_SET},
)  # fmt: skip
PARSER = Kind("a training of parsers", (CONFIG, "run.json", "training", "models"))
DEMO = Kind(
    "a demo",
    ("report.txt", "learning_curves.png"),
    ("data", "tree_transformer", "transformer"),
    {"data": DATA_SET, "tree_transformer": RUN, "transformer": RUN},
)
_CORPORA = ("labels", "shape", "arcs", "damaged_*")  # of a positive control, each with a study
CONTROL = Kind(
    "a positive control",
    ("control.json", "data"),
    _CORPORA,
    {"data/*": DATA_SET, **dict.fromkeys(_CORPORA, SCALING)},
)
REPORT = Kind("a report", ("report.json", "index.html", "figures"))
# A config.yaml would be that of a run without a marker, which must not become a comparison.
COMPARISON = Kind("a comparison of two systems", ("comparison.json", CONFIG), beside=(RUN, EXPORT))
RESULTS = Kind("results of a run", beside=(RUN, EXPORT))
RECORDS = Kind("records of a study")

KINDS = (
    DATA_SET, STATES, RUN, EXPORT, SCALING, SEEDS, SEARCH, BACK_TRANSLATION, PARSER, DEMO, CONTROL, REPORT, COMPARISON,
)  # fmt: skip


def claim_folder(out: AnyPath, kind: Kind, option: str = "--out") -> None:
    """Check that a command may write a folder of this kind as `out`, which `option` names. Every writer calls this first.

    It also removes temporary files of commands that were killed. Raises UserError if `out` is a folder of another kind, or lies
    at a place for files of another kind, or is a file. It also does so for a file that the command would replace in a folder
    without a marker. Cells of a study that has one need none.
    """
    if isinstance(out, Path):
        there = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"{option}: {there} is a file, but must be a folder; choose another {option}")
    is_inner = _refuse_owned(out, kind, option)
    found = kind_of(out)
    if found is not None and found not in (kind, *kind.beside):
        raise UserError(f"{out} is {found.name}, and this command would write {kind.name} there; choose another {option}")
    for name in sorted(_names(out)) if found is None and not is_inner else ():
        if any(fnmatchcase(name, pattern) for pattern in kind.written) and not _is_empty(out / name):
            raise UserError(
                f"{out / name} is there already, but no {MARKER} says that it is of {kind.name}, and the command would replace "
                f"it; choose another {option}, or, if it is, write {kind.name!r} into {out / MARKER}"
            )
    if isinstance(out, Path):
        remove_leftovers(out)


def mark_folder(out: AnyPath, kind: Kind, option: str = "--out") -> None:
    """Make a folder that `claim_folder` allowed, and its marker if it has none, before the command writes anything else.

    Raises UserError if the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}; choose another {option}") from None
    if kind_of(out) is None:
        atomic_write(out / MARKER, f"{kind.name}\n".encode())


def claim_output(path: AnyPath, inputs: Mapping[str, AnyPath | None], option: str = "output") -> None:
    """Check the place of a single file that `option` names, before anything is written. Devices and pipes may be anywhere.

    Raises UserError if it is one of `inputs`, perhaps by another name, or a place for files of a folder of `KINDS`. Also if it
    is a folder, or lies in a folder that is missing.
    """
    streams = is_stream(path)
    for name, one in inputs.items() if not streams or path.is_file() else ():  # a redirect may lead to a file, too
        if one is not None and is_same_file(path, one):
            raise UserError(f"{option} must be another file than {name}, which it would replace, but both are {one}")
    if streams:
        return
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
    """Return the kind that a folder's marker names; None without one."""
    with suppress(OSError):
        if (folder / MARKER).is_file():
            with (folder / MARKER).open("rb") as file:
                name = file.read(_MOST_BYTES).decode(errors="replace").strip()
            return next((kind for kind in KINDS if kind.name == name), None)
        if (folder / "export.json").is_file():
            return EXPORT
    return None


def _is_empty(path: AnyPath) -> bool:
    """Return whether a path is a folder without a file at any depth."""
    if isinstance(path, RemotePath):
        return path.is_dir() and not path.objects()
    return path.is_dir() and all(one.is_dir() and not one.is_symlink() for one in path.rglob("*"))


def _names(folder: AnyPath) -> set[str]:
    """Return the names right below a folder; none if it is not a readable folder."""
    if isinstance(folder, RemotePath):
        return {path.name for path in (*folder.glob("*"), *folder.folders())}
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _refuse_owned(path: AnyPath, kind: Kind | None, option: str) -> bool:
    """Return whether a folder above has a folder of `kind` at `path`. Raise UserError if it has other files there."""
    is_inner, allowed = False, () if kind is None else (kind, *kind.beside)
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
                    is_inner = inner is kind and len(parts) == length
                    break
            else:
                if found.owns(parts[0]):
                    raise UserError(f"{option}: {path} is a place for files of {found.name}, {folder}; choose another {option}")
            break
    return is_inner


def _above(path: AnyPath) -> Iterator[tuple[AnyPath, tuple[str, ...]]]:
    """Return the folders above a path, the nearest first, each with the names from it to the path."""
    parts = PurePosixPath(path.key).parts if isinstance(path, RemotePath) else path.parts
    folder: AnyPath = path
    for count in range(1, len(parts)):
        folder = folder.parent
        yield folder, parts[-count:]
