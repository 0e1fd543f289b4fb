"""Scores of language models: log-probabilities of examples, perplexities, and choices in minimal pairs.

A causal model gives log p(sentence). A grammar gives log p(sentence, tree) for the tree of the data set. It is a lower bound of
log p(sentence), because p(sentence) is the sum over all trees. That sum, or a sum over sampled trees, is not computed.

A masked model gives a pseudo-log-likelihood (Salazar et al., 2020): each piece is masked alone, and its log-probability added up.

Shapes: B batch, T positions, L leaves.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treenet.data.batch import TreeBatch, collate, count_leaves
from treenet.data.examples import SourceSide
from treenet.data.input_kinds import ACTIONS, LEAVES, SPLIT_POINTS, InputKind
from treenet.data.plan import plan_in_order
from treenet.evaluation.settings import ScoreLMSettings
from treenet.layers.backend import choose_device, scoring
from treenet.models import CausalLM, MaskedLM, VocabSizes
from treenet.runs.loading import load_model, scored_splits
from treenet.runs.result_entries import name_result, read_scores
from treenet.runs.result_provenance import origin
from treenet.runs.run_results import LANGUAGE_MODEL, stale_scores, write_predictions
from treenet.tasks.base import build_task, vocab_sizes
from treenet.tasks.causal_lm import to_causal
from treenet.tasks.learning import LEARNING, facts_of_nll
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.online.line_encoder import read_treebank
from treeproc.shards.schema import PAD_ID
from treeproc.shards.shard import check_hashes
from treeproc.shards.store import read_index

_BATCH_TOKENS = 4096
_ROWS = 1024  # positions whose logits are computed at once


@dataclass(frozen=True)
class Scored:
    """The score of one example: nll are -log-probabilities in nats."""

    example: int
    words: int
    pieces: int  # targets: pieces, and the end of the sentence of causal models
    nll: float  # of these targets
    tree_nll: float = 0.0  # of the nonterminals of a grammar

    @property
    def total(self) -> float:
        return self.nll + self.tree_nll


def score_lm_run(folder: Path, settings: ScoreLMSettings) -> tuple[str, dict]:
    """Write `language_model.NAME.tsv`, an example a line, and the entry NAME of `scores.json` into the run folder.

    Returns NAME and the entry. Raises UserError if the folder is not a run of a language model, or if run and data do not fit.
    It also does so if a score is not finite, and if pairs are asked for, and the input has none.
    """
    device = choose_device(settings.use_gpu)
    run = load_model(folder, checkpoint=settings.checkpoint, data=settings.data, device=device)
    task = build_task(run.config.model_copy(update={"data": run.data}))
    if not isinstance(run.model, CausalLM | MaskedLM):
        raise UserError(f"{folder} is a run of {run.config.task}; score it with tree-attention {task.scorer}")
    read_scores(folder)  # before the work, not after
    index = read_index(run.data / "encoded")
    task.check(index)
    reads = LEAVES if run.model.reads is SPLIT_POINTS else run.model.reads  # split points are for the training alone
    if settings.treebank:
        text = f"treebank-{settings.treebank[0].name.partition('.')[0]}"
        examples, _ = read_treebank(settings.treebank, run.data, reads_trees=reads.constituents, pairs=settings.pairs)
        batches = example_batches(examples, reads.for_device(device), vocab_sizes(index))
    else:
        text = settings.split
        check_hashes(run.data / "encoded", text)
        if settings.pairs:
            _warn_of_trees(run.data, index["tree_settings"]["tree_source"], reads)
        source = task.open(text, device=device)
        assert isinstance(source, SourceSide)
        batches = source_batches(source)
    scored = sorted(score_batches(run.model, batches, index["num_pieces"]), key=lambda one: one.example)
    if not all(math.isfinite(one.total) for one in scored):
        raise UserError(
            "the scores of the model are not finite, because its training diverged; score an earlier checkpoint, or train again "
            "with a lower optimizer.learning_rate and another --out"
        )
    is_pseudo = isinstance(run.model, MaskedLM)
    facts = {} if settings.treebank else facts_of_nll(run.config.data, run.data, text, "leaves", ends=not is_pseudo)
    name = name_result(text, run.checkpoint, run.data, own_data=run.own_data)
    entry = {
        **summarize(scored, pseudo=is_pseudo, with_trees=reads is ACTIONS),
        **(score_pairs(scored, text) if settings.pairs else {}),
        "split": text,
        **({LEARNING: facts} if facts else {}),
        **origin(run, settings),
    }
    lines = [f"{one.example}\t{one.words}\t{one.pieces}\t{one.nll:.6f}\t{one.tree_nll:.6f}\n" for one in scored]
    rows = ["example\twords\tpieces\tnll\ttree_nll\n", *lines]
    return name, write_predictions(folder, name, rows, entry, LANGUAGE_MODEL)


def score_splits(folder: Path, *, use_gpu: bool = False) -> dict[str, dict]:
    """Score a finished run on valid and test if the data set has them. A result of the same weights and data stays."""
    done, stale = read_scores(folder), stale_scores(folder)
    for split in scored_splits(folder):
        if split not in done or split in stale:
            score_lm_run(folder, ScoreLMSettings(split=split, use_gpu=use_gpu))
    return read_scores(folder)


def _warn_of_trees(data: AnyPath, trees: str, reads: InputKind) -> None:
    """Warn if the lines of a pair have different control trees, and the model reads them."""
    if trees in ("random", "shuffled", "permuted_labels", "other_shape") and reads.constituents:
        remedy = "; give the pairs as treebank=[FILE]: there, both get the same one" if trees == "random" else ""
        warn(f"warning: {data}: two lines of a pair have different {trees} trees, so the model compares trees, too{remedy}")


def source_batches(source: SourceSide) -> Iterator[tuple[TreeBatch, list[int]]]:
    """Yield batches of all examples of a split, with the number of words of each example."""
    for rows in plan_in_order(source.lengths, _BATCH_TOKENS):
        words = source.lists(source.pick(rows), "leaves", "word_index")
        yield source.batch(rows), [len(np.unique(row)) for row in words]


def example_batches(examples: Sequence[dict], reads: InputKind, sizes: VocabSizes) -> Iterator[tuple[TreeBatch, list[int]]]:
    """Yield batches of examples that are rows of a shard, with the number of words of each example."""
    columns = {"leaves": np.array(list(map(count_leaves, examples))), "tgt_pieces": np.zeros(len(examples), dtype=np.int64)}
    for rows in plan_in_order(columns, _BATCH_TOKENS) if examples else ():
        chosen = [{**examples[row], "tgt_pieces": examples[row]["leaves"]["piece"]} for row in rows]
        yield to_causal(collate(chosen, reads), sizes), [len(np.unique(row["leaves"]["word_index"])) for row in chosen]


@torch.no_grad()
def score_batches(
    model: CausalLM | MaskedLM, batches: Iterable[tuple[TreeBatch, list[int]]], num_pieces: int
) -> Iterator[Scored]:
    """Yield the score of every example."""
    device = next(model.parameters()).device
    for host_batch, words in batches:
        batch = host_batch.to(device)
        with scoring(model):
            if isinstance(model, CausalLM):
                counts, sums = _score_causal(model, batch, num_pieces)
            else:
                counts, sums = _score_masked(model, batch, num_pieces)
        columns = (column.tolist() for column in (batch.example_ids, counts, *sums.T))
        for num_words, example, pieces, *nlls in zip(words, *columns, strict=True):
            yield Scored(example, num_words, pieces, *nlls)


def _score_causal(model: CausalLM, batch: TreeBatch, num_pieces: int) -> tuple[Tensor, Tensor]:
    """Return the number of pieces and ends of sentences of each example [B], and the nll of these and of nonterminals [B, 2]."""
    states, _ = model(batch)
    is_node = batch.tgt_out >= num_pieces
    nll = _nll(model, states, batch.tgt_out)
    counts = ((batch.tgt_out != PAD_ID) & ~is_node).sum(1)
    return counts, torch.stack([nll.masked_fill(is_node, 0).sum(1), nll.masked_fill(~is_node, 0).sum(1)], dim=1)


def _score_masked(model: MaskedLM, batch: TreeBatch, num_pieces: int) -> tuple[Tensor, Tensor]:
    """Return the number of pieces of each example [B] and their nll, each from all others [B, 2]; the second column is 0."""
    pieces, total = batch.leaf_pieces, torch.zeros(len(batch), 2, dtype=torch.float64, device=batch.leaf_pieces.device)
    for place in range(pieces.shape[1]):
        hidden = pieces.clone()
        hidden[:, place] = torch.where(pieces[:, place] == PAD_ID, PAD_ID, model.mask_id)
        states = model(replace(batch, leaf_pieces=hidden))[:, place : place + 1]
        total[:, 0] += _nll(model, states, pieces[:, place : place + 1])[:, 0]
    return (~batch.leaf_pad_mask).sum(1), total


def _nll(model: CausalLM | MaskedLM, states: Tensor, targets: Tensor) -> Tensor:
    """Return the nll of targets [B, T] from states [B, T, D], float64; 0 for padding."""
    out = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
    counted = targets != PAD_ID
    parts = zip(states[counted].split(_ROWS), targets[counted].split(_ROWS), strict=True)
    found = [-model.compute_logits(x).log_softmax(-1).gather(1, target[:, None])[:, 0].double() for x, target in parts]
    out[counted] = torch.cat(found) if found else out.new_zeros(0)
    return out


def summarize(scored: Sequence[Scored], *, pseudo: bool, with_trees: bool) -> dict:
    """Return nll and perplexities of all examples. Those of words count the end of a sentence as a word."""
    nll, pieces, total = (math.fsum(getattr(one, name) for one in scored) for name in ("nll", "pieces", "total"))
    words = sum(one.words for one in scored)
    counts = {"num_examples": len(scored), "num_targets": int(pieces), "num_words": words}
    out: dict[str, float | str] = {"nll": total / max(pieces, 1), **counts}
    if pseudo:
        return out | {"kind": "pseudo", "pseudo_perplexity": perplexity(total, pieces)}
    out |= {
        "kind": "joint" if with_trees else "exact",
        "perplexity": perplexity(total, pieces),
        "word_perplexity": perplexity(total, words + len(scored)),
    }
    return out | {"perplexity_given_tree": perplexity(nll, pieces)} if with_trees else out


def perplexity(nll: float, count: float) -> float:
    """Return exp(nll / count), at most exp(700)."""
    return math.exp(min(nll / max(count, 1), 700.0))


def score_pairs(scored: Sequence[Scored], split: str) -> dict:
    """Return how often the first line of a pair has the higher probability. Equal ones count as wrong.

    Raises UserError if no pair has both lines.
    """
    nll = {one.example: one.total for one in scored}
    pairs = [(nll[number], nll[number + 1]) for number in nll if number % 2 == 0 and number + 1 in nll]
    if not pairs:
        raise UserError(f"{split} has no lines 2n - 1 and 2n, which are a minimal pair; leave out pairs=true")
    right = sum(good < bad for good, bad in pairs)
    return {"pair_accuracy": right / len(pairs), "num_pairs": len(pairs), "lines_without_pair": len(nll) - 2 * len(pairs)}
