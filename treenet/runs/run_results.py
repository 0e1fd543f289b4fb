"""Results in a run folder: each has a file translations.NAME.txt and the entry NAME of scores.json.

Those of a model also have nll.NAME.tsv: the negative log-likelihood of every reference. Classifiers and models of relatedness
have predictions.NAME.tsv instead, language models language_model.NAME.tsv.
"""

import csv
import hashlib
import io
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treenet.runs.result_entries import PROBES, SCORES, add_entry, read_entries, read_scores
from treenet.runs.result_provenance import LAST, PARSE, ResultStatus, RunState
from treenet.tasks.base import task_of
from treenet.tasks.translation_metrics import check_lines
from treeproc.common.files import atomic_write, read_text
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, inside
from treeproc.shards.store import fingerprint_of

PREDICTIONS, LANGUAGE_MODEL = "predictions", "language_model"  # kinds of files with a row for each example
_RESULT = re.compile(r"(?:translations|predictions|language_model)\.(.+)\.(?:txt|tsv)")


def translations_path(folder: AnyPath, name: str) -> AnyPath:
    """Return the path of translations. Raises UserError for a recorded name that leaves the folder."""
    return inside(folder, f"translations.{name}.txt")


def nll_path(folder: AnyPath, name: str) -> AnyPath:
    """Return the path of the nll of references. Raises UserError for a recorded name that leaves the folder."""
    return inside(folder, f"nll.{name}.tsv")


def predictions_path(folder: AnyPath, name: str, kind: str = PREDICTIONS) -> AnyPath:
    """Return the path of predictions of each example. Raises UserError for a recorded name that leaves the folder."""
    return inside(folder, f"{kind}.{name}.tsv")


def stale_scores(folder: AnyPath) -> dict[str, ResultStatus]:
    """Return the stale results in scores.json."""
    found = RunState(folder).check_scores(read_scores(folder))
    return {result: status for result, status in found.items() if status.changed}


def warn_of_stale_results(folder: AnyPath, name: AnyPath | None = None) -> None:
    """Print on standard error which results in scores.json and probes.json are stale, and the command that renews each.

    The folder is called `name` in commands.
    """
    state = RunState(folder, name)
    found = {f"{SCORES}, {result}": status for result, status in state.check_scores(read_scores(folder)).items()}
    found |= {f"{PROBES}, {result}": state.check(entry, "probe") for result, entry in read_entries(folder / PROBES).items()}
    for result, status in found.items():
        if status.changed:
            warn(f"warning: {name or folder}/{result} is {status.describe()}")


@dataclass(frozen=True)
class ReferenceNll:
    """Negative log-likelihoods [lines] of references under a model, by the natural logarithm, and their target tokens with EOS.

    A line that the model does not read, because its source is empty, has no tokens and the nll 0.
    """

    nll: Sequence[float]
    tokens: Sequence[int]

    def entries(self) -> dict:
        """Return the numbers in the form of scores.json: `nll` is that of a token, as in validations."""
        total, tokens = math.fsum(self.nll), sum(self.tokens)
        lines = max(1, sum(count > 0 for count in self.tokens))
        facts = {
            "total": total,
            "tokens": tokens,
            "per_sentence": total / lines,
            "sha256": hashlib.sha256(self.to_bytes()).hexdigest(),
        }
        return {"nll": total / max(1, tokens), "reference_nll": facts}

    def to_bytes(self) -> bytes:
        """Return the file nll.NAME.tsv of a run folder: a line for each reference, in their order."""
        rows = (f"{count}\t{value:.4f}\n" for count, value in zip(self.tokens, self.nll, strict=True))
        return "".join(["tokens\tnll\n", *rows]).encode()


def write_result(
    folder: Path, name: str, lines: Sequence[str], references: Sequence[str], scores: dict, nll: ReferenceNll | None = None
) -> dict:
    """Write translations, scores and nll. Returns the entry, with hashes of the translations and the references."""
    content = "".join(f"{line}\n" for line in lines).encode()
    scores = scores | {
        "translations_sha256": hashlib.sha256(content).hexdigest(),
        "references_fingerprint": fingerprint_of(list(references)),
    }
    if nll is not None:
        scores |= nll.entries()
        atomic_write(nll_path(folder, name), nll.to_bytes())
    read_scores(folder)  # a damaged file is refused before anything is replaced
    atomic_write(translations_path(folder, name), content)
    add_entry(folder / SCORES, name, scores)
    return scores


def read_nll(folder: AnyPath, name: str) -> ReferenceNll | None:
    """Read the nll of the references of a result; None if the search could not score them. Raises UserError if it was changed."""
    if (facts := read_scores(folder).get(name, {}).get("reference_nll")) is None:
        return None
    path = nll_path(folder, name)
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != facts["sha256"]:
        command = _renewal(RunState(folder), name, read_scores(folder)[name])
        raise UserError(f"{path} is not the file that was scored; run {command}")
    rows = [line.split("\t") for line in content.decode().split("\n")[1:-1]]
    return ReferenceNll([float(value) for _, value in rows], [int(count) for count, _ in rows])


def write_predictions(folder: Path, name: str, lines: Sequence[str], scores: dict, kind: str = PREDICTIONS) -> dict:
    """Write KIND.NAME.tsv and its scores. Returns the entry, with the hash of the predictions."""
    content = "".join(lines).encode()
    scores = scores | {"predictions_sha256": hashlib.sha256(content).hexdigest()}
    atomic_write(predictions_path(folder, name, kind), content)
    add_entry(folder / SCORES, name, scores)
    return scores


def read_predictions(folder: AnyPath, name: str, hint: str = "", kind: str = PREDICTIONS) -> str:
    """Read KIND.NAME.tsv. Raises UserError, which ends in `hint` or in the command that renews it, if it was changed."""
    path, entry = predictions_path(folder, name, kind), read_scores(folder).get(name, {})
    hint = hint or f"run {RunState(folder).check(entry).command}"
    content = read_text(path, hint)
    if entry.get("predictions_sha256") != hashlib.sha256(content.encode()).hexdigest():
        raise UserError(f"{path} has changed since {SCORES} got its scores; {hint}")
    return content


def parse_columns(content: str, path: AnyPath | str, columns: Mapping[str, type], hint: str) -> list[list]:
    """Return columns of predictions, each as numbers of its type. Raises UserError, which ends in `hint`, if they are damaged."""
    found: list[list] = [[] for _ in columns]
    rows = csv.DictReader(io.StringIO(content), delimiter="\t", quoting=csv.QUOTE_NONE)  # a group may begin with a quote
    for number, row in enumerate(rows, start=2):
        for values, (name, kind) in zip(found, columns.items(), strict=True):
            try:
                values.append(kind(row[name]))
            except (KeyError, TypeError, ValueError):
                values.append(math.nan)
            if not math.isfinite(values[-1]) or (kind is int and values[-1] < 0):
                what = "a whole number, not below 0" if kind is int else "a finite number"
                raise UserError(f"{path}, line {number}: {name} must be {what}, but is {row.get(name)!r}; {hint}")
    return found


@dataclass(frozen=True)
class System:
    """Translations of a split, or rows of predictions, and their entry of scores.json. A file of another system has no entry."""

    name: str
    lines: list[str]
    scores: dict | None = None
    run: AnyPath | None = None
    status: ResultStatus = field(default_factory=ResultStatus)
    task: str = "translation"

    def check_split(self, split: str) -> None:
        """Raise UserError if these are not of that split, or are stale."""
        if self.status.changed:
            raise UserError(f"{self.name} is {self.status.describe()}")
        if self.scores is not None and self.scores.get("split", split) != split:
            kind = _content_of(self.task)
            raise UserError(f"{self.name} holds {kind} of {self.scores['split']}, but the command compares {split}")

    def check(self, split: str, references: Sequence[str], of: str, remedy: str = "") -> None:
        """Raise UserError if these are not translations of that split, are of other references, or are stale.

        `of` is the name of the references. `remedy` is what to do with other references, if there is something better than usual.
        """
        self.check_split(split)
        if self.scores is not None and self.scores.get("references_fingerprint") != fingerprint_of(list(references)):
            remedy = remedy or "compare translations of the same lines"
            raise UserError(f"{self.name} has scores against other references than those of {of}; {remedy}")
        check_lines(self.lines, references, self.name, of)


def _content_of(task: str) -> str:
    """Return what a file of results of a task holds, in words."""
    return task_of(task).results.replace(LANGUAGE_MODEL, "scores")


def is_result(path: Path) -> bool:
    """Return whether a file has the name of a result, as in RUN/translations.NAME.txt."""
    return _RESULT.fullmatch(path.name) is not None


def result_in_run(path: Path) -> str | None:
    """Return NAME of a file such as RUN/translations.NAME.txt that has an entry in RUN/scores.json; None for any other file."""
    match = _RESULT.fullmatch(path.name)
    return match[1] if match and match[1] in read_scores(path.parent) else None


BEAM = "beam"
_OPTIONS = {LAST: f"checkpoint={LAST}", r"step_0*(\d+)": r"checkpoint=\1", BEAM: "trees=beam", r"every_(\d+)": r"every=\1"}

# What makes a result of no split, by the first word of its name.
_GIVEN = {"pairs": "blimp=FOLDER, or pairs.files=[FILE]", "surprisal": "surprisal=FILE"}
SURPRISAL_COLUMNS = "line\tword\tbits"


def scoring_command(task: str, folder: str, name: str) -> str:
    """Return the command that makes the result `name` of a run, as far as the name tells it."""
    text, *more = name.split(".")
    asked = [re.sub(form, option, part) for part in more for form, option in _OPTIONS.items() if re.fullmatch(form, part)]
    scorer, kind = task_of(task).scorer, text.partition("-")[0]
    if text.startswith(PARSE):
        scorer, text = "unsupervised-parse", text.removeprefix(PARSE)
    given = [*asked, _GIVEN[kind]] if kind in _GIVEN else [f"split={text}", *asked]
    return " ".join([f"tree-attention {scorer} --out {shlex.quote(folder)}", *given])


def _renewal(state: RunState, name: str, entry: object) -> str:
    """Return the command that makes a result again: with all that its entry of scores.json asked for, if there is one."""
    if isinstance(entry, dict) and isinstance(entry.get("asked"), dict):
        return state.check(entry, "unsupervised-parse" if name.startswith(PARSE) else None).command
    return scoring_command(state.task, state.name, name)


def _without_beam(name: str) -> str:
    """Return the name of the result without a beam."""
    return ".".join(part for part in name.split(".") if part != BEAM)


def read_system(run: AnyPath, name: str, given: AnyPath | None = None) -> System:
    """Read the result `name` of a run folder. `given` is the folder as the user wrote it, perhaps in an object store.

    Raises UserError if it does not exist, or if its file is not the one that was scored.
    """
    given = given or run
    state, everything = RunState(given), read_scores(run)
    task, scores = task_of(state.task), everything.get(name)
    is_lines = task.results == "translations"
    path = translations_path(run, name) if is_lines else predictions_path(run, name, task.results)
    redo = f"run {_renewal(state, name, scores)}"
    if not path.is_file() or not isinstance(scores, dict):
        kind = _content_of(state.task)
        if task.results == LANGUAGE_MODEL and _without_beam(name) != name and not state.is_grammar:
            own = shlex.quote(f"{state.name}/{LANGUAGE_MODEL}.{_without_beam(name)}.tsv")
            redo = f"a beam needs a grammar; give two files: --compare {own} GRAMMAR/{path.name}"
        raise UserError(f"{given} has no {kind} of {name} (it has scores of: {', '.join(everything) or 'none'}); {redo}")
    if is_lines and hashlib.sha256(path.read_bytes()).hexdigest() != scores.get("translations_sha256"):
        raise UserError(f"{path} has changed since {SCORES} got its scores; {redo}")
    content = path.read_bytes().decode() if is_lines else read_predictions(run, name, redo, task.results)
    return System(str(given / path.name), content.split("\n")[:-1], scores, run, state.check(scores), state.task)
