"""Align the words of sentence pairs by the cross-attention of a trained model.

    tree-attention align --out RUN input=FILE target=FILE
    tree-attention align --out RUN input=FILE target=FILE trees=FILE json_lines=true
    tree-attention align --out RUN input=FILE target=FILE references=LINKS

RUN is the folder of a training run of a model with a Transformer decoder. The model reads the given translations, and each target
word is linked to the source word that gets most of its attention. Words are what stands between blanks. The command writes one
line for each pair, with links such as 0-0 1-2. With references, it prints the alignment error rate on standard error.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from treenet.cli.shipped import on_a_run
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.mirror import read_run
from treenet.runs.run_folder import Checkpoint, checkpoint_names
from treeproc.common.command_line import check_output, loading
from treeproc.common.folder_kinds import claim_output
from treeproc.common.messages import warn
from treeproc.common.named_output import is_stream, named_output
from treeproc.common.settings import Effect, Settings, UserError, refuse_relative_in_job
from treeproc.common.storage import AnyPath, DataPath
from treeproc.online.input_files import count_lines, read_raw_lines, refuse_output_name
from treeproc.online.raw_lines import EncodedLine, RawLine
from treeproc.readers import read_lines
from treeproc.readers.numbered_lines import unequal

if TYPE_CHECKING:
    from treenet.analysis.alignment import ReferenceLinks
    from treenet.analysis.attention_stats import SentenceAttention
    from treenet.runs.loading import LoadedRun


class AlignSettings(Settings):
    """Settings of align.py."""

    input: DataPath = Field(description="raw text, one sentence a line, plain or compressed")
    target: DataPath = Field(description="its translations, one line for each line of the input")
    trees: DataPath | None = Field(
        None,
        description="trees in Penn Treebank brackets, one line for each line of the input; unset, the command parses the lines",
    )
    references: Path | None = Field(
        None, description="reference links, one line for each line of the input: 2-3 is sure, 2p3 is only possible"
    )
    output: DataPath | None = Field(
        None, description="file to write; unset, standard output. The file appears when it is complete"
    )
    checkpoint: Checkpoint = AVERAGED
    layer: PositiveInt | None = Field(
        None, description="decoder layer whose attention counts, 1 is the lowest; null: the mean of all"
    )
    json_lines: bool = Field(
        False, description="write a JSON object a line, also with the nodes to which target words attend most"
    )
    max_leaves: PositiveInt = Field(1000, description="most pieces of a line; the command does not align longer lines")
    lines_at_once: Annotated[PositiveInt, Effect.NONE] = Field(1000, description="lines that the command reads together")


class Aligner:
    """A model, its parser and its vocabulary. Raises UserError if the model has no Transformer decoder, or not the layer."""

    def __init__(self, run: "LoadedRun", settings: AlignSettings):
        from treenet.analysis.attention_stats import read_labels  # here, as below, because it loads PyTorch
        from treenet.models.decoders.transformer import TransformerDecoder
        from treenet.translation.line_translator import build_line_encoder

        decoder = getattr(run.model, "decoder", None)
        if not isinstance(decoder, TransformerDecoder):
            raise UserError(
                f"{run.config.model.name} has no Transformer decoder, so it has no attention weights; choose another run"
            )
        if settings.layer is not None and settings.layer > len(decoder.layers):
            raise UserError(f"layer must be at most {len(decoder.layers)}, but is {settings.layer}")
        self._run, self._settings, self._labels = run, settings, read_labels(run.data)
        given_trees = settings.trees is not None
        self._source = build_line_encoder(run, given_trees=given_trees, max_pieces=settings.max_leaves)
        self._noticed: set[str] = set()  # kinds of notices about the complete input

    def align(self, lines: Sequence[RawLine], first: int) -> Iterator[tuple[EncodedLine, list[tuple[int, int]], list[dict]]]:
        """Yield each line with its links and its links to nodes. `first` is the 0-based number of the first line."""
        from treenet.analysis.attention_stats import map_attention

        encoded = self._source.encode(lines, first)
        rows = ({**(line.row or {}), "sides": (line.source, line.target)} for line in encoded if self._has_pieces(line))
        found = map_attention(self._links, self._run.model, rows)
        for kind, notice in self._source.notices(encoded, first).items():
            if kind not in self._noticed:
                warn(f"warning: {self._settings.input}: {notice}")
                self._noticed.add(kind)
        for line in encoded:
            yield (line, *(next(found) if self._has_pieces(line) else ([], [])))

    def _has_pieces(self, line: EncodedLine) -> bool:
        return line.row is not None and all(len(side) for side in (line.row["leaves"]["piece"], line.row["tgt_pieces"]))

    def _links(self, attention: "SentenceAttention") -> tuple[list[tuple[int, int]], list[dict]]:
        from treenet.analysis.alignment import link_nodes, link_words, number_words, word_attention

        names = self._run.processor.id_to_piece
        pieces = attention.example["leaves"]["piece"], attention.example["tgt_pieces"]
        source, target = (
            number_words([names(int(piece)) for piece in side], line)
            for side, line in zip(pieces, attention.example["sides"], strict=True)
        )
        links = link_words(word_attention(attention, source, target, self._settings.layer))
        nodes = link_nodes(attention, source, target, self._settings.layer)
        return links, [{**asdict(node), "label": self._labels[node.label], "weight": round(node.weight, 4)} for node in nodes]


def read_references(settings: AlignSettings) -> "list[ReferenceLinks] | None":
    """Read the reference links. Raises UserError for a line of another form."""
    if settings.references is None:
        return None
    from treenet.analysis.alignment import parse_links

    references = []
    for number, line in enumerate(read_lines([settings.references]), start=1):
        try:
            references.append(parse_links(line))
        except ValueError as error:
            raise UserError(f"{settings.references}, line {number}: {error}") from None
    return references


def check_reference(references: "Sequence[ReferenceLinks]", number: int, line: EncodedLine, name: Path | None) -> None:
    """Raise UserError if the line with the 0-based `number` has no reference links, or if they name words that it lacks."""
    from treenet.analysis.alignment import count_words

    if number >= len(references):
        raise UserError(f"{name} must have one line for each line of the input, but has {len(references):,}")
    sizes = [count_words(side) for side in (line.source, line.target)]
    for link in sorted(references[number].possible) if not line.problem else ():
        if link[0] >= sizes[0] or link[1] >= sizes[1]:
            raise UserError(
                f"{name}, line {number + 1}: the link {link[0]}-{link[1]} must be of {sizes[0]} source and {sizes[1]} target "
                "words, which count from 0"
            )


@on_a_run(__doc__, AlignSettings)
def main(out: AnyPath, settings: AlignSettings) -> None:
    named = {name: getattr(settings, name) for name in ("input", "target", "trees", "references", "output")}
    paths = {"--out": out} | {name: path for name, path in named.items() if path is not None}
    refuse_relative_in_job(paths)
    if settings.output is None:
        check_output("give output=FILE")
    else:
        claim_output(settings.output, {name: path for name, path in named.items() if name != "output"})
        refuse_output_name(settings.output, "jsonl" if settings.json_lines else None)
    with loading():
        from treenet.analysis.alignment import alignment_error_rate, format_links
        from treenet.runs.loading import load_run

    references = read_references(settings)
    read = partial(read_raw_lines, settings.input, settings.trees, settings.target)
    sides = (settings.input, settings.trees, settings.target)
    total = None if any(is_stream(path) for path in sides if path is not None) else count_lines(read(), settings.input)
    if references is not None and total not in (None, len(references)):
        raise unequal(str(settings.input), total, str(settings.references), len(references))
    with ExitStack() as stack:
        folder = stack.enter_context(read_run(out, *checkpoint_names(settings.checkpoint)))
        aligner = Aligner(load_run(folder, checkpoint=settings.checkpoint), settings)
        file = stack.enter_context(named_output(settings.output)) if settings.output is not None else sys.stdout.buffer
        lines = read()
        found: list[list[tuple[int, int]]] = []  # kept only to be compared
        number = unread = 0
        while part := list(islice(lines, settings.lines_at_once)):
            for line, links, nodes in aligner.align(part, number):
                if references is not None:
                    found.append(links)
                    check_reference(references, number, line, settings.references)
                number += 1
                unread += bool(line.problem)
                if problem := line.problem or line.note:
                    warn(f"warning: {settings.input}, line {number}: {problem}")
                record = {"line": number, "links": sorted(links), "nodes": nodes}
                text = json.dumps(record, ensure_ascii=False) if settings.json_lines else format_links(links)
                file.write(f"{text}\n".encode())
        if references is not None and number < len(references):
            raise UserError(f"{settings.references} must have one line for each line of the input, {number:,}, but has more")
        file.flush()
    if references is not None:
        rate = alignment_error_rate(found, references)
        shown = "not defined, because neither side has a link," if rate is None else f"{100 * rate:.1f} %"
        message = f"alignment error rate {shown} on {len(references):,} lines"
        message += f", {unread:,} of them not aligned" if unread else ""
        print(message, file=sys.stderr)
