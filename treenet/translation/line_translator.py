"""Settings of commands that read lines of text, and raw lines to lines of output: what one process does with one part."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

import torch
from pydantic import Field, PositiveInt, field_validator, model_validator

from treenet.config import DecodingConfig
from treenet.data.input_kinds import LEAVES
from treenet.models.compiling import wants_compiling
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.chosen_checkpoint import Checkpoint, checkpoint_names
from treenet.runs.loading import LoadedModel
from treenet.runs.mirror import read_run
from treenet.runs.precision import choose_device
from treenet.translation.ensemble import Ensemble, load_ensemble
from treenet.translation.hypotheses import Hypothesis, check_num_best
from treenet.translation.line_constraints import CONSTRAINTS, check_method, unmet
from treenet.translation.reranking import check_attends
from treenet.translation.translate import ScoredTarget, can_compile, decoding_of, detokenize, score_examples, translate_rows
from treeproc.common.settings import Effect, Settings, UserError
from treeproc.common.storage import AnyPath, DataPath


class LineSettings(Settings):
    """Settings of commands that read lines of text, and write an output for each: input, output and workers."""

    input: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="raw text, one sentence a line, plain or compressed; unset, standard input, or the words of `trees`"
    )
    trees: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="trees in Penn Treebank brackets, one line for each line of the input; unset, the command parses the lines",
    )
    output: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="file to write; unset, standard output. The file appears when it is complete. Until then OUTPUT.parts holds "
        "the finished lines, and the same command continues after them",
    )
    json_lines: bool = Field(False, description="write a JSON object a line instead of text")
    max_leaves: PositiveInt = Field(1000, description="most pieces of a line; the model does not read longer lines")
    lines_at_once: PositiveInt = Field(1000, description="lines that a worker parses and computes together")
    workers: Annotated[int, Effect.NONE] = Field(
        0, ge=0, description="Ray actors that compute, each with a CPU; 0: compute in this process, without Ray"
    )
    use_gpu: Annotated[bool, Effect.NONE] = Field(False, description="compute on GPUs, one for each worker")

    @property
    def checkpoints(self) -> list[str]:
        """Return the checkpoints to load."""
        raise NotImplementedError


class TranslateSettings(LineSettings):
    """Settings of translate.py: input, models, decoding and output."""

    score: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="given translations, one for each line of the input: the command scores them, and searches none"
    )
    prefix: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="beginnings of the translations, one for each line of the input, which may be empty"
    )
    must_appear: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="phrases that each translation must contain, one line for each line of the input, separated by tabs; beam "
        "search alone",
    )
    must_not_appear: Annotated[DataPath | None, Effect.NONE] = Field(
        None,
        description="strings that each translation must not contain, one line for each line of the input, separated by tabs",
    )
    checkpoint: Checkpoint | list[Checkpoint] = Field(
        AVERAGED,
        description="'averaged', the number of a step, or the path of a checkpoint folder; several form an ensemble",
    )
    ensemble: list[DataPath] = Field([], description="further runs of the same vocabulary, which form an ensemble with the run")
    nbest: PositiveInt = Field(
        1,
        description="translations a line, best first, or samples in the order of their numbers; from 2 on an output line begins "
        "with its number",
    )
    scores: bool = Field(False, description="write the score before every translation")
    compile: Annotated[bool, Effect.NONE] = Field(
        False,
        description="compile the steps of beam search with torch.compile, for much text on a GPU; the first batches take minutes",
    )
    decoding: DecodingConfig = Field(DecodingConfig(), description="the search; what is not set here is as in the run")

    @field_validator("checkpoint")
    @classmethod
    def _check_some(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("must name a checkpoint, for example averaged")
        return value

    @model_validator(mode="after")
    def _check_searched(self) -> Self:
        if self.score is not None and (names := [name for name in CONSTRAINTS if getattr(self, name) is not None]):
            raise ValueError(f"score takes translations as they are, and nothing is searched; leave out {', '.join(names)}")
        return self

    @property
    def checkpoints(self) -> list[str]:
        return [self.checkpoint] if isinstance(self.checkpoint, str) else self.checkpoint


class EncodedLine(Protocol):
    """A line as a model reads it, or the reason why the model cannot read it."""

    source: str
    target: str
    row: dict | None
    problem: str
    note: str


class LineSource(Protocol):
    """Makes rows of raw lines; built in each process as `encoder(data, given_trees=..., max_pieces=...)`."""

    @property
    def gives_arcs(self) -> bool: ...

    def encode(self, lines: Sequence, first_id: int = 0) -> list[EncodedLine]: ...

    def encode_pairs(self, lines: Sequence, first_id: int = 0) -> list[EncodedLine]: ...

    def notices(self, lines: Sequence[EncodedLine], first_id: int = 0) -> dict[str, str]: ...

    def draw(self, row: dict) -> str: ...

    def text_of(self, pieces: Sequence[int]) -> str: ...


# (number of the line, the line, its hypotheses) -> what is written.
Writer = Callable[[int, EncodedLine, Sequence[Hypothesis]], str]


@dataclass(frozen=True)
class Translated:
    """A part of the output, with messages: about its lines, by 1-based number, and about the input, by kind."""

    num_lines: int
    text: str
    problems: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    notices: dict[str, str] = field(default_factory=dict)


def local_runs(settings: LineSettings, runs: Sequence[AnyPath]) -> list[Path]:
    """Folders of runs with the requested checkpoints. Runs in an object store are copied to this machine."""
    names = [name for checkpoint in settings.checkpoints for name in checkpoint_names(checkpoint)]
    folders = []
    for run in runs:
        with read_run(run, *names) as folder:
            folders.append(folder)
    return folders


def build_line_source(encoder: type[LineSource], run: LoadedModel, *, given_trees: bool, max_pieces: int) -> LineSource:
    """Build the maker of rows from raw lines, for the model of a run. Raises UserError if lines lack what the model reads."""
    models = run.model.models if isinstance(run.model, Ensemble) else [run.model]
    most: int | None = models[0].encoder.embedding.most_leaves  # the models of an ensemble read the same pieces
    source = encoder(run.data, given_trees=given_trees, max_pieces=max_pieces if most is None else min(max_pieces, most))
    if run.model.reads.reads_arcs and not source.gives_arcs:
        raise UserError(
            "the model reads arcs of words, but bracketed trees have none; leave trees out, or choose a run on a data set with "
            "arcs of a parser"
        )
    return source


def with_unmet(line: EncodedLine, hypotheses: Sequence[Hypothesis], decoding: DecodingConfig) -> EncodedLine:
    """Return the line with the problem that no translation meets its constraints, if that is so."""
    found = line.row is None or hypotheses
    return line if found else replace(line, problem=unmet(decoding))  # type: ignore[type-var]


class LineWorker(Protocol):
    """What one process computes of lines, built as `worker(settings, runs, encoder)`. It is for people described in one line.

    `result` names its result of a line in messages, and `done` what it has done with one.
    """

    result: ClassVar[str]
    done: ClassVar[str]

    def __init__(self, settings: Any, runs: Sequence[AnyPath], encoder: type[LineSource]): ...

    def __call__(self, lines: Sequence, first: int) -> Translated: ...

    def describe(self) -> str: ...

    def explain(self, lines: Sequence, first: int) -> Translated: ...


class LineTranslator:
    """Models, parser and vocabulary of one or more runs, loaded once a process.

    Raises UserError when the runs do not go together or cannot be loaded.
    """

    result, done = "translation", "translated"

    def __init__(self, settings: TranslateSettings, runs: Sequence[AnyPath], encoder: type[LineSource]):
        self._settings = settings
        self._device = choose_device(settings.use_gpu)
        self._run = load_ensemble(local_runs(settings, runs), settings.checkpoints, device=self._device)
        self._decoding = decoding_of(settings.decoding, self._run)
        check_num_best(settings.nbest, self._decoding, "nbest")
        if self._decoding.coverage_penalty and settings.score is None:
            check_attends(self._run.model)
        if settings.must_appear is not None:
            check_method(self._decoding)
        if settings.compile:
            self._check_compile(settings.score is not None)
        given_trees = settings.trees is not None
        self._encoder = build_line_source(encoder, self._run, given_trees=given_trees, max_pieces=settings.max_leaves)

    def _check_compile(self, only_scores: bool) -> None:
        if only_scores or not can_compile(self._run.model, self._decoding):
            raise UserError(
                "compile=true needs plain beam search and a decoder with self-attention, and this run lacks one; leave it out"
            )
        wants_compiling(True, torch.device(self._device), as_it_is=False)

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
        return Translated(
            len(encoded),
            "".join(write(number, line, hypotheses) for (number, line), hypotheses in zip(numbered, found, strict=True)),
            [(number, line.problem) for number, line in numbered if line.problem],
            [(number, line.note) for number, line in numbered if line.note and not line.problem],
            self._encoder.notices(encoded, first),
        )

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
        drawn = line.row is not None and self._run.model.reads is not LEAVES and len(line.row["leaves"]["piece"])
        out = [self._encoder.draw(line.row)] if drawn else []
        out += [f"{rank}\t{found.score:.4f}\t{self._words(line, found)}" for rank, found in enumerate(hypotheses, 1) if found.ids]
        return "".join(f"{text}\n" for text in out)

    def _json(self, number: int, line: EncodedLine, hypotheses: Sequence[Hypothesis]) -> str:
        found = []
        for hypothesis in hypotheses:
            one = {
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
