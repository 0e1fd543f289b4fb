"""Raw lines to lines of output: what one process does with one part."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from treenet.config import DecodingConfig, TrainConfig
from treenet.data.input_kinds import LEAVES
from treenet.layers.backend import choose_device, keep_freed_memory
from treenet.models.compiling import check_tools
from treenet.runs.loading import LoadedModel, check_is_run, check_there, data_of
from treenet.runs.mirror import read_run
from treenet.runs.run_folder import checkpoint_names
from treenet.translation.hypotheses import Hypothesis, check_num_best
from treenet.translation.line_constraints import check_method, unmet
from treenet.translation.reranking import check_attends
from treenet.translation.settings import LineSettings, TranslateSettings
from treenet.translation.translate import (
    ScoredTarget,
    can_compile,
    decoding_of,
    detokenize,
    load_ensemble,
    score_examples,
    translate_rows,
    warn_of_width,
)
from treeproc.common.folder_kinds import CONFIG
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath
from treeproc.online.input_files import InputForm, form_of
from treeproc.online.raw_lines import EncodedLine, RawLineEncoder

# (number of the line, the line, its result) -> what is written.
Writer = Callable[[int, EncodedLine, Any], str]


@dataclass(frozen=True)
class Translated:
    """A part of the output, with messages: about its lines, by 1-based number, and about the input, by kind."""

    num_lines: int
    text: str
    problems: list[tuple[int, str]]
    notes: list[tuple[int, str]]
    notices: dict[str, str]


def gather(numbered: Sequence[tuple[int, EncodedLine]], found: Iterable, write: Writer, notices: dict[str, str]) -> Translated:
    """Return the output for lines, by their numbers: what `write` makes of the result of each."""
    return Translated(
        len(numbered),
        "".join(write(number, line, one) for (number, line), one in zip(numbered, found, strict=True)),
        [(number, line.problem) for number, line in numbered if line.problem],
        [(number, line.note) for number, line in numbered if line.note and not line.problem],
        notices,
    )


def local_runs(settings: LineSettings, runs: Sequence[AnyPath]) -> list[Path]:
    """Folders of runs with the requested checkpoints. Runs in an object store are copied to this machine."""
    names = [name for checkpoint in settings.checkpoints for name in checkpoint_names(checkpoint)]
    folders = []
    for run in runs:
        with read_run(run, *names) as folder:
            folders.append(folder)
    return folders


def input_form(settings: LineSettings, run: AnyPath) -> InputForm:
    """Return the form of the files that the data set of a run was made of."""
    [folder] = local_runs(settings, [run])
    check_is_run(folder)
    data = data_of(folder, load_settings(TrainConfig, folder / CONFIG))
    check_there(data, folder)
    return form_of(data)


def build_line_encoder(run: LoadedModel, *, given_trees: bool, max_pieces: int) -> RawLineEncoder:
    """Build the maker of rows from raw lines, for the model of a run. Raises UserError if lines lack what the model reads."""
    reads_labels = run.model.reads.constituents
    encoder = RawLineEncoder(run.data, given_trees=given_trees, max_pieces=max_pieces, reads_labels=reads_labels)
    if run.model.reads.reads_arcs and not encoder.gives_arcs:
        raise UserError(
            "the model reads arcs of words, but bracketed trees have none; leave trees out, or choose a run on a data set with "
            "arcs of a parser"
        )
    return encoder


def with_unmet(line: EncodedLine, hypotheses: Sequence[Hypothesis], decoding: DecodingConfig) -> EncodedLine:
    """Return the line with the problem that no translation meets its constraints, if that is so."""
    found = line.row is None or hypotheses
    return line if found else replace(line, problem=unmet(decoding))


class LineWorker(Protocol):
    """A model that one process applies to lines, built as `worker(settings, runs)`. `describe` is one line for people.

    `result` names its result of a line in messages, and `done` what it has done with one.
    """

    result: ClassVar[str]
    done: ClassVar[str]

    def __init__(self, settings: Any, runs: Sequence[AnyPath]): ...

    def __call__(self, lines: Sequence, first: int) -> Translated: ...

    def describe(self) -> str: ...

    def explain(self, lines: Sequence, first: int) -> Translated: ...


class LineTranslator:
    """Models, parser and vocabulary of one or more runs, loaded once a process.

    Raises UserError when the runs do not go together or cannot be loaded.
    """

    result: ClassVar = "translation"
    done: ClassVar = "translated"

    def __init__(self, settings: TranslateSettings, runs: Sequence[AnyPath]):
        self._settings = settings
        self._device = choose_device(settings.use_gpu)
        keep_freed_memory()
        self._run = load_ensemble(local_runs(settings, runs), settings.checkpoints, device=self._device)
        self._decoding = decoding_of(settings.decoding, self._run)
        check_num_best(settings.nbest, self._decoding, "nbest")
        if settings.score is None:
            warn_of_width(self._decoding, len(self._run.processor))
        if self._decoding.coverage_penalty and settings.score is None:
            check_attends(self._run.model)
        if settings.must_appear is not None:
            check_method(self._decoding)
        if settings.compile:
            self._check_compile(settings.score is not None)
        given_trees = settings.trees is not None
        self._encoder = build_line_encoder(self._run, given_trees=given_trees, max_pieces=settings.max_leaves)

    def _check_compile(self, only_scores: bool) -> None:
        if only_scores or not can_compile(self._run.model, self._decoding):
            raise UserError(
                "compile=true needs plain beam search and a decoder with self-attention, and this run lacks one; leave it out"
            )
        check_tools(torch.device(self._device))

    def describe(self) -> str:
        """Describe the model, the decoding settings and the score, in one line."""
        form = {"length": "length^a", "gnmt": "((5 + length) / 6)^a"}[self._decoding.length_penalty_form]
        score = f"log-probability / {form}"
        if self._decoding.method == "mbr" and self._settings.score is None:
            score = "mean chrF against the samples"
        elif self._decoding.coverage_penalty and self._settings.score is None:
            score += " + coverage penalty"
        values = {name: value for name, value in self._decoding.model_dump().items() if name != "max_tokens"}
        words = " ".join(f"{name}={value}" for name, value in values.items())
        return f"{self._run.config.model.name} {self._run.checkpoint}: {words}; score = {score}"

    def __call__(self, lines: Sequence, first: int) -> Translated:
        """Return the output for `lines`. Their first line has the 0-based number `first` in the input."""
        return self._translate(lines, first, self._settings.nbest, self._json if self._settings.json_lines else self._text)

    def explain(self, lines: Sequence, first: int) -> Translated:
        """Return the same for a person: translations with rank and score, and trees if the model reads them. If `nbest` is not
        set, it shows all of the beam, or so many others."""
        given = "nbest" in self._settings.model_fields_set
        most = min(self._decoding.beam_size, self._decoding.most_translations or self._decoding.beam_size)
        return self._translate(lines, first, self._settings.nbest if given else most, self._explanation)

    def _translate(self, lines: Sequence, first: int, num_best: int, write: Writer) -> Translated:
        encoded = self._encoder.encode(lines, first)
        rows = [line.row for line in encoded if line.row is not None]
        results = iter(self._hypotheses(rows, num_best))
        found = [next(results) if line.row is not None else [] for line in encoded]
        encoded = [with_unmet(line, hypotheses, self._decoding) for line, hypotheses in zip(encoded, found, strict=True)]
        numbered = list(enumerate(encoded, start=first + 1))
        return gather(numbered, found, write, self._encoder.notices(encoded, first))

    def _hypotheses(self, rows: Sequence[dict], num_best: int) -> Sequence[Sequence[Hypothesis]]:
        if self._settings.score is None:
            return translate_rows(self._run, rows, self._decoding, num_best, self._device, self._settings.compile)
        window = max(1, len(rows))
        scored = score_examples(self._run.model, rows, self._decoding, device=self._device, window=window)
        return [[target] for target in scored]

    def _words(self, line: EncodedLine, hypothesis: Hypothesis) -> str:
        return line.target if self._settings.score is not None else detokenize(self._run.processor, hypothesis)

    def _text(self, number: int, line: EncodedLine, hypotheses: Sequence[Hypothesis]) -> str:
        """Columns are separated by tabs: the number with nbest, the score with scores, the text; empty if there is none."""
        out = []
        for hypothesis in hypotheses or (None,):
            columns = [str(number)] if self._settings.nbest > 1 else []
            if self._settings.scores or self._settings.score is not None:
                columns.append(f"{hypothesis.score:.6f}" if hypothesis and not math.isnan(hypothesis.score) else "")
            columns.append(self._words(line, hypothesis) if hypothesis else "")
            out.append("\t".join(columns) + "\n")
        return "".join(out)

    def _explanation(self, number: int, line: EncodedLine, hypotheses: Sequence[Hypothesis]) -> str:
        row = line.row if self._run.model.reads is not LEAVES else None
        out = [self._encoder.draw(row)] if row and len(row["leaves"]["piece"]) else []
        out += [f"{rank}\t{found.score:.4f}\t{self._words(line, found)}" for rank, found in enumerate(hypotheses, 1) if found.ids]
        return "".join(f"{text}\n" for text in out)

    def _json(self, number: int, line: EncodedLine, hypotheses: Sequence[Hypothesis]) -> str:
        found = []
        for hypothesis in hypotheses:
            one: dict[str, Any] = {
                "text": self._words(line, hypothesis),
                "score": rounded(hypothesis.score),
                "log_prob": rounded(hypothesis.log_prob),
                "pieces": len(hypothesis.ids),
            }
            if isinstance(hypothesis, ScoredTarget):
                names = [*map(self._run.processor.id_to_piece, hypothesis.ids), "</s>"]
                one["tokens"] = [[n, rounded(p)] for n, p in zip(names, hypothesis.token_log_probs, strict=False)]
            found.append(one)
        record = {"line": number, "source": line.source, "hypotheses": found}
        return json.dumps(record | ({"error": line.problem} if line.problem else {}), ensure_ascii=False) + "\n"


def rounded(value: float) -> float | None:
    """Six digits: the last ones of float32 differ from machine to machine. JSON has neither infinity nor NaN."""
    return round(value, 6) if math.isfinite(value) else None
