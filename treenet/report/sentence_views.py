"""The sentences of a report: their selection, trees, translations and attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import numpy as np

from treenet.analysis.attention_stats import SentenceAttention, attend_examples, node_heights, read_labels, translated
from treenet.analysis.self_attention import encode_examples, has_self_attention
from treenet.data.splits import read_split
from treenet.report.report_runs import ReportRun
from treenet.runs.loading import LoadedRun, load_processor
from treenet.tasks.translation_metrics import sentence_chrf
from treeproc.common.settings import UserError
from treeproc.shards.lengths import read_lengths

# A picture of more leaves than this is hard to read, one of fewer than that says little: chosen are sentences between.
_FEWEST, _MOST = 5, 30
WORD_START = "\u2581"  # the mark of sentencepiece for a blank
END = "end"


@dataclass(frozen=True)
class View:
    """One model's translation of one sentence and where it looked, over the tree that the model read.

    Positions are leaves, then nodes in pre-order; a plain model has no nodes.
    """

    run: str
    example_id: int
    source: str
    reference: str
    translation: str
    chrf: float  # of this line alone
    leaves: list[str]
    labels: list[str]  # of nodes
    starts: list[int]
    ends: list[int]
    parents: list[int]
    heights: list[int]
    tokens: list[str]  # target pieces as the vocabulary has them, the last one END
    weights: np.ndarray  # [A, H, T, S]
    self_weights: np.ndarray | None = None  # of the encoder [layers, H, S, S]; None if they are not known, or left out

    @property
    def line(self) -> int:
        """Return the number of the line in its split, from 1, as in `evaluate.py --compare`."""
        return self.example_id + 1

    @property
    def figure(self) -> str:
        """Return the name of the files of its picture; a run may have any name."""
        return f"line_{self.line}.{quote(self.run, safe='')}"


def choose_examples(runs: Sequence[ReportRun], baseline: ReportRun, split: str, count: int, given: Sequence[int]) -> list[int]:
    """Return the ids of the examples to show; `given` are lines. Raises UserError for a line that the split does not have.

    Unless they are given: those on which the baseline and the next run of the same text differ most in chrF. Wins and losses
    take turns. With one run: sentences of all lengths.
    """
    lengths = read_lengths(baseline.data / "encoded", split)
    order = np.argsort(lengths["example_id"], kind="stable")
    ids, leaves = lengths["example_id"][order], lengths["leaves"][order]
    if given:
        if missing := sorted(set(given) - set((ids + 1).tolist())):
            there = f"its lines are {ids[0] + 1} to {ids[-1] + 1}, except dropped ones"
            raise UserError(f"lines: {split} of {baseline.data} has no line {missing[0]}; {there}")
        return [line - 1 for line in dict.fromkeys(given)]
    legible = np.flatnonzero((leaves >= _FEWEST) & (leaves <= _MOST))
    rows = legible if len(legible) >= count else np.flatnonzero(leaves > 0)
    if not count or not len(rows):
        return []
    base = baseline.current_translations(split)
    others = [run for run in runs if run is not baseline and len(run.current_translations(split) or ()) == len(ids)]
    if base is None or len(base) != len(ids) or not others:
        by_length = rows[np.argsort(leaves[rows], kind="stable")]
        return ids[by_length[np.linspace(0, len(by_length) - 1, min(count, len(by_length))).astype(int)]].tolist()
    processor = load_processor(baseline.data)
    references = [processor.decode(row["tgt_pieces"].tolist()) for row in read_split(baseline.data, "encoded", split)]
    gains = sentence_chrf(others[0].translations[split], references) - sentence_chrf(base, references)
    ranked = rows[np.argsort(gains[rows], kind="stable")].tolist()
    chosen = [row for pair in zip(reversed(ranked), ranked, strict=True) for row in pair]
    return ids[list(dict.fromkeys(chosen))[:count]].tolist()


def build_views(name: str, run: LoadedRun, split: str, ids: Sequence[int]) -> list[View]:
    """Build the views of one model on the examples `ids`, in that order, translated with the decoding settings of its run."""
    wanted = set(ids)
    references = {row["example_id"]: row for row in read_split(run.data, "encoded", split) if row["example_id"] in wanted}
    own = translated(run, list(references.values()))
    labels = read_labels(run.data)
    encoded: dict[int, np.ndarray | None] = {}
    if has_self_attention(run.model):
        found = encode_examples(run.model, references.values())
        encoded = dict(zip(references, found, strict=True))
    views = {}
    for sentence in attend_examples(run.model, own):
        number = sentence.example["example_id"]
        view = _view(name, run, sentence, references[number]["tgt_pieces"].tolist(), labels)
        views[number] = replace(view, self_weights=encoded.get(number))
    return [views[number] for number in ids if number in views]


def _view(name: str, run: LoadedRun, sentence: SentenceAttention, reference: list[int], labels: list[str]) -> View:
    example, processor, shown = sentence.example, run.processor, slice(0, sentence.num_nodes)
    leaves, target = example["leaves"]["piece"].tolist(), example["tgt_pieces"].tolist()
    translation, reference_text = processor.decode(target), processor.decode(reference)
    return View(
        run=name,
        example_id=int(example["example_id"]),
        source=processor.decode(leaves),
        reference=reference_text,
        translation=translation,
        chrf=float(sentence_chrf([translation], [reference_text])[0]),
        leaves=[processor.id_to_piece(piece) for piece in leaves],
        labels=[labels[label] for label in example["nodes"]["label"][shown].tolist()],
        starts=example["spans"]["start"][shown].tolist(),
        ends=example["spans"]["end"][shown].tolist(),
        parents=example["nodes"]["parent"][shown].tolist(),
        heights=node_heights(example["spans"]["subtree_end"][shown]).tolist(),
        tokens=[*(processor.id_to_piece(piece) for piece in target), END],
        weights=sentence.weights,
    )
