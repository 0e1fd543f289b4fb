"""`load_run`: a trained model that translates, scores and shows where it looked, or a classifier that classifies.

Shapes: A decoder layers, H heads, T target positions, L leaves, N nodes, S = L + N positions.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import torch

from treenet.api.results import LineClasses, PhraseClasses, Translation, check_keywords, line_messages
from treenet.api.sentence_attention import SentenceWeights, name_positions
from treenet.api.shards import given_path
from treenet.config import DecodingConfig
from treenet.evaluation.line_classifier import (
    Classes,
    Item,
    check_phrases,
    classify_items,
    describe_classes,
    describe_phrases,
    join_sides,
)
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.runs.checkpoint import AVERAGED, WEIGHTS
from treenet.runs.checkpoint_io import open_weights
from treenet.runs.loading import LoadedClassifier, LoadedModel, LoadedRun, load_classifier, task_of
from treenet.runs.loading import load_run as load_folder
from treenet.runs.mirror import read_run
from treenet.runs.run_folder import checkpoint_names
from treenet.structure.base import refusing_device
from treenet.translation.hypotheses import Hypothesis, check_num_best
from treenet.translation.line_constraints import check_method, constraint_columns, unmet
from treenet.translation.line_translator import build_line_encoder
from treenet.translation.settings import MUST_APPEAR
from treenet.translation.translate import ScoredTarget, decoding_of, detokenize, score_examples, translate_examples
from treeproc.common.errors import UserError, as_integer, as_list, check_string, from_python, naming_arguments, quoted
from treeproc.common.hub import HubModel, model_place
from treeproc.common.settings import build_settings
from treeproc.common.storage import AnyPath
from treeproc.online.raw_lines import EncodedLine, RawLine, RawLineEncoder

Found = TypeVar("Found")
# Calls of several threads wait for each other: hooks that record attention would see the batches of all, and parsers keep states.
_ALONE = RLock()
# Arguments by the columns of a line, where the names differ.
_ARGUMENTS = {"text": "lines", "target": "targets", "prefix": "prefixes"}


class _LineReader:
    """A model in evaluation mode, with the vocabulary and the parser of its data set.

    Lines are plain text, one sentence each. They are parsed as the data set was, or come with `trees` in Penn Treebank brackets,
    one a line. A line that cannot be read is warned about and has no result; the others go on.
    """

    _has: ClassVar[str]

    def __init__(self, loaded: LoadedModel, max_leaves: int = 1000):
        self.loaded, self.model, self.config = loaded, loaded.model, loaded.config
        self._max_leaves = as_integer("max_leaves", max_leaves, least=1)
        self._encoders: dict[bool, RawLineEncoder] = {}

    if not TYPE_CHECKING:  # where every name would be one of the run

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{type(self).__name__} has no {name}; {self._has}", name=name, obj=self)

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        name, weights = self.config.model.name, self.loaded.checkpoint
        return f"{type(self).__name__}({name}, weights {weights!r}, {size:,} parameters, device={str(self._device)!r})"

    def to(self, device: torch.device | str | int) -> Self:
        """Move the model to `device`, and return the run. Raises UserError if this machine has no such device."""
        with refusing_device(device):
            self.model.to(device)
        return self

    @from_python()
    def save_pretrained(self, folder: AnyPath | str) -> None:
        """Write a local folder that `from_pretrained` reads on every machine: weights, settings, vocabulary and a model card.

        An earlier one is replaced. Raises UserError for a folder of something else, and if the model has other weights than were
        loaded.
        """
        place = given_path("folder", folder)
        if not isinstance(place, Path):
            raise UserError(f"folder must be local, but is {place}; copy the folder there when it is written")
        if place.resolve() == self.loaded.run.resolve():
            raise UserError(f"folder must be another one than that of the run, which it would replace, but both are {place}")
        from treenet.runs.exported_run import export_run  # here, because few programs need it

        self._check_unchanged()
        export_run(self.loaded, place, "folder")

    def _check_unchanged(self) -> None:
        """Raise UserError if the model has other weights than its checkpoint, whose file and scores a saved run has."""
        own = self.model.state_dict()
        assert self.loaded.weights is not None  # `load_run` loads a checkpoint
        with open_weights(self.loaded.weights / WEIGHTS) as stored:
            for name, weight in stored.items():
                if not torch.allclose(own[name].cpu(), weight.read().to(own[name].dtype), rtol=0, atol=0, equal_nan=True):
                    raise UserError(
                        f"run.model has another {name} than {self.loaded.checkpoint}, which would be written; to keep these "
                        "weights, call torch.save(run.model.state_dict(), FILE)"
                    )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold other calls back. Leave the number of PyTorch's threads and the mode of the model as they were."""
        with _ALONE:
            threads, modes = torch.get_num_threads(), [(module, module.training) for module in self.model.modules()]
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                for module, training in modes:
                    module.training = training

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _encode(
        self,
        lines: Sequence[str],
        trees: Sequence[str] | None,
        targets: Sequence[str] | None = None,
        *,
        caller: int | None = 5,
        **constraints: Any,
    ) -> list[EncodedLine]:
        """Return the lines as the model reads them. Warn at the `caller`, so many calls up, of those that are in doubt."""
        columns = {"text": lines, "trees": trees, "target": targets, **constraints}
        given: dict[str, list[str]] = {}
        for column, values in columns.items():
            if values is not None or column == "text":
                name = _ARGUMENTS.get(column, column)
                given[column] = as_list(name, values, "strings, one a line")
                for number, value in enumerate(given[column]):
                    check_string(f"{name}[{number}]", value)
                if len(given[column]) != len(given["text"]):
                    raise UserError(f"{name} must be one a line, {len(given['text'])}, but are {len(given[column])}")
        raw = []
        for i in range(len(given["text"])):
            fields: dict[str, Any] = {column: values[i].encode() for column, values in given.items()}
            raw.append(RawLine(**fields))
        if trees is None:
            torch.set_num_threads(1)  # as the data set was parsed
        encoder = self._encoder(trees is not None)
        encoded = encoder.encode(raw)
        if caller is not None:
            for message in line_messages(encoder, encoded):
                warnings.warn(message, stacklevel=caller)
        return encoded

    def _encoder(self, given_trees: bool) -> RawLineEncoder:
        """Return the parser and the vocabulary, loaded once."""
        if given_trees not in self._encoders:
            encoder = build_line_encoder(self.loaded, given_trees=given_trees, max_pieces=self._max_leaves)
            self._encoders[given_trees] = encoder
        return self._encoders[given_trees]

    def _compute(self, compute: Callable[[list[dict]], Iterable[Found]], encoded: Sequence[EncodedLine]) -> list[Found | None]:
        """Apply `compute` to the rows that there are, and put the results at the places of their lines."""
        found = iter(compute([line.row for line in encoded if line.row is not None]))
        return [next(found) if line.row is not None else None for line in encoded]


class Run(_LineReader):
    """A translation model in evaluation mode, with the vocabulary and the parser of its data set.

    Lines are plain text, one sentence each. They are parsed as the data set was, or come with `trees` in Penn Treebank brackets,
    one a line. A line that cannot be read is warned about and has no translation; the others go on.
    """

    loaded: LoadedRun
    _has = "a run of translation has translate, candidates, score and attention"

    @from_python()
    def translate(
        self,
        lines: Sequence[str],
        trees: Sequence[str] | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        must_appear: Sequence[Sequence[str]] | None = None,
        must_not_appear: Sequence[Sequence[str]] | None = None,
        **decoding: Any,
    ) -> list[str]:
        """Return the best translation of every line; "" of an empty one. `decoding`: settings of the search, such as beam_size=1.

        `prefixes` are beginnings of the translations. `must_appear` and `must_not_appear` are lists of phrases, one list a line.
        """
        constraints = constraint_columns(prefixes, must_appear, must_not_appear)
        return [found[0].text if found else "" for found in self._search(lines, trees, 1, decoding, constraints)]

    @from_python()
    def candidates(
        self,
        lines: Sequence[str],
        trees: Sequence[str] | None = None,
        num_best: int | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        must_appear: Sequence[Sequence[str]] | None = None,
        must_not_appear: Sequence[Sequence[str]] | None = None,
        **decoding: Any,
    ) -> list[list[Translation]]:
        """Return the `num_best` translations of every line, best first; none of a line that could not be read. By default five,
        or as many as the beam holds.

        With method="sampling", they are samples in the order of their numbers. Constraints are as in `translate`. Raises
        UserError for wrong settings, and for more translations than the beam holds.
        """
        constraints = constraint_columns(prefixes, must_appear, must_not_appear)
        return self._search(lines, trees, num_best, decoding, constraints)

    def _search(
        self,
        lines: Sequence[str],
        trees: Sequence[str] | None,
        num_best: int | None,
        decoding: dict[str, Any],
        constraints: dict[str, Any],
    ) -> list[list[Translation]]:
        check_keywords(decoding)
        settings = decoding_of(build_settings(DecodingConfig, decoding, "decoding"), self.loaded)
        if num_best is None:
            num_best = min(5, settings.most_translations or 5)
        check_num_best(as_integer("num_best", num_best), settings, "num_best")
        if MUST_APPEAR in constraints:
            check_method(settings)

        def search(rows: list[dict]) -> Iterable[list[Hypothesis]]:
            return translate_examples(
                self.model, rows, settings, num_best=num_best, processor=self.loaded.processor, device=self._device
            )

        with self._alone():
            encoded = self._encode(lines, trees, **constraints)
            found = self._compute(search, encoded)
        for number, (line, best) in enumerate(zip(encoded, found, strict=True), start=1):
            if line.row is not None and not best:
                warnings.warn(f"line {number}: {naming_arguments(unmet(settings))}", stacklevel=4)
        return [[self._translation(one) for one in best or ()] for best in found]

    @from_python()
    def score(
        self, lines: Sequence[str], targets: Sequence[str], trees: Sequence[str] | None = None, **decoding: Any
    ) -> list[Translation | None]:
        """Score the given translation of every line under the model; None of a line that could not be read.

        `decoding` takes a length penalty other than that of the run. Raises UserError unless there is a target a line.
        """
        settings = decoding_of(build_settings(DecodingConfig, decoding, "decoding"), self.loaded)

        def score(rows: list[dict]) -> Iterable[ScoredTarget]:
            return score_examples(self.model, rows, settings, device=self._device)

        with self._alone():
            encoded = self._encode(lines, trees, as_list("targets", targets, "strings, one a line"), caller=4)
            scored = self._compute(score, encoded)
        return [self._translation(found, line.target) if found else None for line, found in zip(encoded, scored, strict=True)]

    @from_python()
    def attention(self, line: str, target: str | None = None, tree: str | None = None) -> SentenceWeights:
        """Return where each piece of the translation looked: of `target`, or without one of the model's own translation.

        Raises UserError for a line that cannot be read or is empty, and for a model whose decoder is not that of a Transformer.
        """
        from treenet.analysis.attention_stats import attend_examples, read_labels, translated  # here, because few need it

        for name, text in (("line", line), ("target", target), ("tree", tree)):
            if text is not None or name == "line":
                check_string(name, text)
        if not isinstance(getattr(self.model, "decoder", None), TransformerDecoder):
            raise UserError(f"{self.config.model.name} has no Transformer decoder, so it has no attention weights")
        with self._alone():
            [encoded] = self._encode([line], None if tree is None else [tree], None if target is None else [target], caller=None)
            if encoded.row is None:
                raise UserError(f"cannot read the line: {encoded.problem}")
            row = encoded.row if target is not None else translated(self.loaded, [encoded.row])[0]
            found = next(attend_examples(self.model, [row]), None)
        if found is None:
            raise UserError("the line is empty, so it has no attention")
        processor, labels = self.loaded.processor, read_labels(self.loaded.data)
        pieces = [processor.id_to_piece(int(piece)) for piece in found.example["tgt_pieces"]]
        return SentenceWeights(found.weights, [*pieces, "</s>"], name_positions(found, processor, labels))

    def _translation(self, found: Hypothesis, text: str | None = None) -> Translation:
        processor = self.loaded.processor
        return Translation(
            detokenize(processor, found) if text is None else text,
            found.score,
            found.log_prob,
            tuple(map(processor.id_to_piece, found.ids)),
            found.token_log_probs if isinstance(found, ScoredTarget) else (),
        )


class ClassifierRun(_LineReader):
    """A classifier in evaluation mode, with the vocabulary, the parser and the classes of its data set.

    Lines are as in `Run`. If the model learned pairs, lines and trees are pairs of such strings.
    """

    loaded: LoadedClassifier
    _has = "a run of classification has classify and classes"

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes, in the order of their numbers."""
        return list(self.loaded.classes)

    @from_python()
    def classify(
        self,
        lines: Sequence[str] | Sequence[tuple[str, str]],
        trees: Sequence[str] | Sequence[tuple[str, str]] | None = None,
        *,
        phrases: bool = False,
    ) -> list[LineClasses | None]:
        """Return the classes of every line, or pair of lines; None of one that could not be read or is empty.

        With `phrases`, also those of the phrases in it. Raises UserError if the model has not learned them.
        """
        if phrases:
            check_phrases(self.loaded)
        if self.loaded.model.reads_pairs:
            sides: list[Any] = [_sides("lines", lines), None if trees is None else _sides("trees", trees)]
        else:
            sides = [lines, trees]
        with self._alone():
            items = join_sides(self.loaded, self._encode(*sides, caller=None))
            found = list(classify_items(self.loaded, items, phrases=phrases))  # here, where no other call computes
            encoder = self._encoder(trees is not None)
            messages = list(line_messages(encoder, [line for line, _ in items]))
        for message in messages:
            warnings.warn(message, stacklevel=3)
        return [self._named(one, item, encoder) if one else None for one, item in zip(found, items, strict=True)]

    def _named(self, found: Classes, item: Item, encoder: RawLineEncoder) -> LineClasses:
        names = self.loaded.classes
        parts = describe_phrases(names, found, item.line.row, encoder)
        return LineClasses(
            **describe_classes(names, found),
            probability=found.probabilities[found.best],
            phrases=tuple(PhraseClasses(**part) for part in parts),
        )


def _sides(name: str, pairs: Sequence) -> list[str]:
    """Return the texts of pairs, those of a pair as neighbours. Raises UserError for other values."""
    sides: list[str] = []
    for number, pair in enumerate(as_list(name, pairs, "pairs of strings")):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise UserError(f"{name}[{number}] must be a pair of strings, as the model learned, but is {repr(pair)[:40]}")
        sides += pair
    return sides


@from_python()
def load_run(
    path: AnyPath | str,
    *,
    checkpoint: str | int | PathLike = AVERAGED,
    device: torch.device | str | int = "cpu",
    max_leaves: int = 1000,
) -> Run | ClassifierRun:
    """Load the translation model or the classifier of a run folder or of a zip of one, which may lie in an object store.

    `checkpoint` is "averaged", the number of a step, or a folder. Lines of more than `max_leaves` pieces are not read.
    Raises UserError when there is no such run, checkpoint or device, or when it belongs to another kind of model.
    """
    if isinstance(checkpoint, bool) or not isinstance(checkpoint, str | int | PathLike):
        raise UserError(f"checkpoint must be 'averaged', the number of a step or a folder, but is {quoted(checkpoint)}")
    max_leaves = as_integer("max_leaves", max_leaves, least=1)
    with refusing_device(device):
        torch.empty(0, device=device)
    place = given_path("path", path)
    if isinstance(model_place(str(place)), HubModel):
        raise UserError(
            f"{place} is missing; give the folder of a training run, or for a name on the hub of Hugging Face, the folder that "
            f"huggingface_hub.snapshot_download({str(place)!r}) returns"
        )
    with read_run(place, *checkpoint_names(str(checkpoint))) as folder:
        which: dict[str, Any] = {"checkpoint": str(checkpoint), "device": torch.device(device)}
        if task_of(folder) == "classification":
            return ClassifierRun(load_classifier(folder, **which), max_leaves)
        return Run(load_folder(folder, **which), max_leaves)


from_pretrained = load_run  # the name that users of Hugging Face look for
