"""Questions to answers: what one replica does with the requests of a batch. Nothing here knows of HTTP or Ray.

A batch is encoded once. Lines are searched together where their requests want as many translations, so that each gets what
translate.py gives. Shapes: T target positions, S leaves and nodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
from pydantic import BaseModel

from treenet.analysis.attention_stats import attend_examples, read_labels
from treenet.config import DecodingConfig
from treenet.data.input_kinds import LEAVES
from treenet.evaluation.line_classifier import Classes, Item, classify_items, describe_classes, describe_phrases, read_items
from treenet.extras.serving.messages import (
    Answer,
    Attention,
    ClassAnswer,
    Hypothesis,
    Leaf,
    LineAnswer,
    LineClassAnswer,
    Node,
    PhraseClass,
    Question,
    Served,
    Tree,
)
from treenet.extras.serving.settings import ServeSettings
from treenet.layers.backend import choose_device
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.runs.loading import LoadedClassifier, LoadedRun, load_classifier, load_run, task_of
from treenet.runs.mirror import read_run
from treenet.runs.run_folder import checkpoint_names
from treenet.translation import hypotheses
from treenet.translation.line_constraints import check_method
from treenet.translation.line_translator import build_line_encoder, rounded, with_unmet
from treenet.translation.reranking import check_attends
from treenet.translation.translate import decoding_of, detokenize, translate_rows
from treeproc.common.errors import UserError
from treeproc.common.messages import warn
from treeproc.common.storage import AnyPath
from treeproc.online.raw_lines import EncodedLine, RawLine
from treeproc.shards.shard import read_names
from treeproc.subwords import load_pieces
from treeproc.trees.spans import SpanTree, write_brackets

_DIGITS = 4  # of an attention weight
_NO_WEIGHTS = "this model has no Transformer decoder, so it has no attention weights"

Found = Sequence[hypotheses.Hypothesis]


class SentenceReader(ABC):
    """Model, parser and vocabulary of a run, loaded once a process. Raises UserError when they cannot be loaded."""

    def __init__(self, settings: ServeSettings, run: LoadedRun | LoadedClassifier):
        self._settings = settings
        self._encoder = build_line_encoder(run, given_trees=False, max_pieces=settings.max_leaves)
        self._pieces, self._labels = load_pieces(run.data / "encoded" / "vocab"), read_labels(run.data)
        self._tags = read_names(run.data / "encoded" / "vocab" / "pos_tags.txt")
        self._name = f"{run.config.model.name} {run.checkpoint}"

    @property
    @abstractmethod
    def served(self) -> Served:
        """Return the model, and what a request may ask of it."""

    def answer(self, questions: Sequence[Question]) -> list[bytes | str]:
        """Return the answer to each question as JSON, or why there is none. What fails with a batch is tried again one by one."""
        try:
            return [answer.model_dump_json().encode() for answer in self._answer_all(questions)]
        except Exception as error:  # of any kind: the requests of other clients are in the same batch
            if len(questions) == 1:
                warn(f"a request failed: {type(error).__name__}: {error}")
                return [str(error) if isinstance(error, UserError) else "the request could not be answered"]
        return [self.answer([question])[0] for question in questions]

    @abstractmethod
    def _answer_all(self, questions: Sequence[Question]) -> Sequence[BaseModel]: ...

    def _tree(self, row: dict) -> Tree:
        leaves, nodes, spans = row["leaves"], row["nodes"], row["spans"]
        pieces = self._pieces.names(leaves["piece"])
        tags = [self._tags[tag] for tag in leaves["pos_tag"].tolist()]
        tree = SpanTree([self._labels[i] for i in nodes["label"].tolist()], spans["start"].tolist(), spans["end"].tolist())
        words, parents = leaves["word_index"].tolist(), nodes["parent"].tolist()
        return Tree(
            brackets=write_brackets(tree, pieces, tags),
            leaves=[Leaf(piece=p, tag=t, word=w) for p, t, w in zip(pieces, tags, words, strict=True)],
            nodes=[
                Node(label=label, start=start, end=end, parent=parent)
                for label, start, end, parent in zip(tree.labels, tree.starts, tree.ends, parents, strict=True)
            ],
        )

    def _notes(self, line: EncodedLine) -> list[str]:
        return [line.note] if line.note and not line.problem else []


def load_reader(settings: ServeSettings, run: AnyPath) -> SentenceReader:
    """Load the reader of a run, by its task. Raises UserError when it cannot be loaded, or is of another task."""
    which: dict = {"checkpoint": settings.checkpoint, "device": choose_device(settings.use_gpu)}
    with read_run(run, *checkpoint_names(settings.checkpoint)) as folder:
        if task_of(folder) == "classification":
            return SentenceClassifier(settings, load_classifier(folder, **which))
        return SentenceTranslator(settings, load_run(folder, **which))


class SentenceTranslator(SentenceReader):
    """A translation model."""

    def __init__(self, settings: ServeSettings, run: LoadedRun):
        super().__init__(settings, run)
        self._run, self._device = run, next(run.model.parameters()).device
        self._decoding = decoding_of(settings.decoding, run)
        if self._decoding.coverage_penalty:
            check_attends(run.model)
        self._no_phrases = _why_no_phrases(self._decoding)
        self._has_weights = isinstance(getattr(run.model, "decoder", None), TransformerDecoder)

    @property
    def served(self) -> Served:
        beam_size, most = self._decoding.beam_size, self._decoding.most_translations
        return Served(self._name, beam_size=beam_size if most is None else min(beam_size, most))

    def _answer_all(self, questions: Sequence[Question]) -> list[Answer]:
        raw = [line for question in questions for line in _raw_lines(question)]
        encoded = [self._without_method(line, one) for line, one in zip(raw, self._encoder.encode(raw), strict=True)]
        owners = [question for question in questions for _ in question.lines]
        numbers = [number for question in questions for number in range(len(question.lines))]
        for line, number in zip(encoded, numbers, strict=True):
            if line.row is not None:  # samples of a line depend on its number, which other questions must not change
                line.row["example_id"] = number
        found: list[Found] = [()] * len(encoded)
        for num_best in sorted({question.num_best for question in questions}):
            rows = {i: line.row for i, line in enumerate(encoded) if owners[i].num_best == num_best and line.row is not None}
            best = translate_rows(self._run, list(rows.values()), self._decoding, num_best, self._device)
            for place, one in zip(rows, best, strict=True):
                found[place] = one
        pairs = iter([(with_unmet(line, one, self._decoding), one) for line, one in zip(encoded, found, strict=True)])
        return [self._answer_one(question, [next(pairs) for _ in question.lines]) for question in questions]

    def _without_method(self, raw: RawLine, line: EncodedLine) -> EncodedLine:
        """Return the line with the problem that this server's search makes no phrases appear, if that is so."""
        if raw.must_appear and raw.must_appear.strip() and self._no_phrases and line.row is not None:
            return replace(line, row=None, problem=self._no_phrases)
        return line

    def _answer_one(self, question: Question, lines: Sequence[tuple[EncodedLine, Found]]) -> Answer:
        answers, numbers = [], self._settings.attention_numbers
        for line, found in lines:
            answer = self._line(line, found)
            answers.append(answer)
            if question.attention and line.row is not None and found and len(line.row["leaves"]["piece"]):
                nodes = 0 if self._run.model.reads is LEAVES else len(line.row["nodes"]["label"])
                size = (len(found[0].ids) + 1) * (len(line.row["leaves"]["piece"]) + nodes)
                if not self._has_weights:
                    answer.warnings.append(_NO_WEIGHTS)
                elif size > numbers:
                    most = self._settings.attention_numbers
                    answer.warnings.append(f"no attention: an answer has at most {most:,} weights; send fewer or shorter lines")
                else:
                    numbers -= size
                    answer.attention = self._attention(line.row, found[0].ids)
        return Answer(lines=answers)

    def _line(self, line: EncodedLine, found: Found) -> LineAnswer:
        written = [self._hypothesis(one) for one in found]
        return LineAnswer(
            source=line.source,
            translation=written[0].text if written else "",
            hypotheses=written,
            tree=self._tree(line.row) if line.row is not None else None,
            warnings=self._notes(line),
            error=line.problem or None,
        )

    def _hypothesis(self, found: hypotheses.Hypothesis) -> Hypothesis:
        processor = self._run.processor
        pieces = [processor.id_to_piece(piece) for piece in found.ids]
        text = detokenize(processor, found)
        return Hypothesis(text=text, score=rounded(found.score), log_prob=rounded(found.log_prob), pieces=pieces)

    def _attention(self, row: dict, target: Sequence[int]) -> Attention:
        """Compute the attention line by line: weights of all layers and heads take memory."""
        pieces = np.array(target, dtype=np.int32)
        [found] = attend_examples(self._run.model, [{**row, "tgt_pieces": pieces}])
        weights = found.weights.mean((0, 1)).round(_DIGITS).tolist()  # [T, S]
        names = [self._run.processor.id_to_piece(piece) for piece in target]
        return Attention(targets=[*names, "</s>"], weights=[[round(one, _DIGITS) for one in line] for line in weights])


class SentenceClassifier(SentenceReader):
    """A classifier."""

    def __init__(self, settings: ServeSettings, run: LoadedClassifier):
        if settings.decoding.model_fields_set:
            raise UserError("decoding: is for translation, but this run is a classifier; leave it out")
        super().__init__(settings, run)
        self._run = run

    @property
    def served(self) -> Served:
        model = self._run.model
        return Served(self._name, "classification", has_phrases=model.classifies_positions, reads_pairs=model.reads_pairs)

    def _answer_all(self, questions: Sequence[Question]) -> list[ClassAnswer]:
        answers = []
        for phrases in {question.phrases for question in questions}:  # questions of a kind are computed together
            chosen = [place for place, question in enumerate(questions) if question.phrases is phrases]
            lines = iter(self._classify([line for place in chosen for line in _raw_lines(questions[place])], phrases))
            answers += [(place, ClassAnswer(lines=[next(lines) for _ in questions[place].lines])) for place in chosen]
        return [answer for _, answer in sorted(answers, key=itemgetter(0))]

    def _classify(self, raw: Sequence[RawLine], phrases: bool) -> list[LineClassAnswer]:
        items = read_items(self._run, self._encoder, raw)
        found = classify_items(self._run, items, phrases=phrases)
        return [self._line(item, one) for item, one in zip(items, found, strict=True)]

    def _line(self, item: Item, found: Classes | None) -> LineClassAnswer:
        names, line = self._run.classes, item.line
        return LineClassAnswer(
            source=line.source,
            **describe_classes(names, found),
            phrases=[
                PhraseClass(**one, probability=one["probabilities"][one["label"]])
                for one in describe_phrases(names, found, line.row, self._encoder)
            ],
            tree=self._tree(line.row) if line.row is not None else None,
            second_tree=self._tree(item.rows[1]) if len(item.rows) > 1 else None,
            warnings=self._notes(line),
            error=line.problem or None,
        )


def _raw_lines(question: Question) -> list[RawLine]:
    columns = {"text": question.lines, **question.constraints}
    rows = zip(*columns.values(), strict=True)
    return [RawLine(**{n: v.encode("utf-8", "surrogatepass") for n, v in zip(columns, row, strict=True)}) for row in rows]


def _why_no_phrases(decoding: DecodingConfig) -> str:
    """Return why a search cannot make phrases appear; empty if it can."""
    try:
        check_method(decoding)
    except UserError as error:
        return str(error)
    return ""
