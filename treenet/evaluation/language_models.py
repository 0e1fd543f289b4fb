"""Scores of language models: log-probabilities of examples and words, perplexities, and choices in minimal pairs.

A causal model gives log p(sentence). A grammar gives log p(sentence, tree) for the tree of the data set, or the log of the sum
over the trees of a beam. Both are lower bounds of log p(sentence), which is the sum over all trees.

A masked model gives a pseudo-log-likelihood (Salazar et al., 2020): each piece is masked alone, and its log-probability added up.

Shapes: B batch, T positions, L leaves.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treenet.data.batch import TreeBatch, collate, count_leaves
from treenet.data.examples import SourceSide
from treenet.data.input_kinds import LEAVES, SPLIT_POINTS, InputKind
from treenet.data.plan import plan_in_order
from treenet.data.splits import read_split
from treenet.evaluation.kept_scores import KeptScores, SentenceScore
from treenet.evaluation.minimal_pairs import PairInput, open_pairs, pair_facts, pair_rows, summarize_pairs
from treenet.evaluation.prefix_trees import ROWS, reads_prefix_trees, score_pieces
from treenet.evaluation.settings import ScoreLMSettings
from treenet.evaluation.surprisal import END, score_words
from treenet.evaluation.tree_beam import TreeBeam, cut_words, reads_grammar, spans_of
from treenet.evaluation.unsupervised_parse import gold_trees, has_unknown_gold, warn_of_gold
from treenet.layers.backend import choose_device, scoring
from treenet.models import CausalLM, MaskedLM, VocabSizes
from treenet.runs.loading import load_model, scored_splits
from treenet.runs.metrics_log import read_metrics
from treenet.runs.result_entries import name_result, read_scores
from treenet.runs.result_provenance import origin
from treenet.runs.run_results import LANGUAGE_MODEL, SURPRISAL_COLUMNS, stale_scores, write_predictions
from treenet.tasks.base import build_task, vocab_sizes
from treenet.tasks.causal_lm import to_causal
from treenet.tasks.learning import LEARNING, facts_of_nll, facts_of_training, why_unlearned
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.online.minimal_pairs import encode_pairs
from treeproc.online.spaced_words import encode_spaced
from treeproc.shards.schema import PAD_ID, SPLIT_WORD_PREFIX
from treeproc.shards.shard import check_hashes, read_names
from treeproc.shards.store import read_index
from treeproc.trees.flat_trees import BINARY_PREFIX
from treeproc.trees.scores import BracketScore, score_sentence
from treeproc.trees.spans import ROOT_LABELS, SpanTree, write_brackets

_BATCH_TOKENS = 4096
_UNKNOWN = {"<unk>", *(f"<0x{byte:02X}>" for byte in range(256))}  # names of the unknown piece, and of bytes of rare characters


@dataclass(frozen=True)
class Scored:
    """The score of one example: nll are -log-probabilities in nats."""

    example: int
    words: int
    pieces: int  # targets: pieces, and the end of the sentence of causal models
    nll: float  # of these targets
    tree_nll: float = 0.0  # of the nonterminals of a grammar
    found: SentenceScore | None = None  # by a beam over trees, whose sum is then the nll

    @property
    def total(self) -> float:
        return self.nll + self.tree_nll


def score_lm_run(folder: Path, settings: ScoreLMSettings, name: str = "") -> tuple[str, dict]:
    """Write `language_model.NAME.tsv`, an example a line, and the entry NAME of `scores.json` into the run folder.

    Returns NAME and the entry. Raises UserError if the folder is not a run of a language model, or if run and data do not fit.
    It also does so if a score is not finite. The result of pairs or words has another name than a split; `name` replaces it.
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
    scorer = Scorer(run.model, reads.for_device(device), vocab_sizes(index))
    kept = None
    if settings.trees == "beam":
        if not reads_grammar(run.model):
            raise UserError(f"trees must be given for {folder}, a run of model.name={run.config.model.name}, but is beam")
        kept = KeptScores(folder, run.weights_sha256 or f"seed {run.config.seed}", settings.beam.model_dump_json())
        scorer = replace(scorer, beam=TreeBeam(run.model, scorer.sizes, settings.beam, kept))
    if given := open_pairs(settings):
        text = given.name
        rows, entry = score_pairs(scorer, given, run.data)
    elif settings.surprisal:
        text = f"surprisal-{settings.surprisal.name.partition('.')[0]}"
        rows, entry = score_text(scorer, settings.surprisal, run.data)
    else:
        text = settings.split
        check_hashes(run.data / "encoded", text)
        if scorer.beam:
            examples = list(read_split(run.data, "encoded", text))
            scored = scorer.score(examples)
            columns, scores = describe_parses(scored, examples, run.data)
        else:
            source = task.open(text, device=device)
            assert isinstance(source, SourceSide)
            scored = check_finite(score_batches(run.model, source_batches(source), index["num_pieces"]))
            columns, scores = [""] * len(scored), {}
        facts = facts_of_nll(run.config.data, run.data, text, "leaves", ends=scorer.kind != "pseudo")
        entry = summarize(scored, scorer.kind) | {"split": text, **scores, **({LEARNING: facts} if facts else {})}
        if why_unlearned(entry):
            last = max(origin(run, settings).get("steps", [0]))
            facts |= facts_of_training(facts, read_metrics(folder), last)
        rows = ["\t".join(["example\twords\tpieces\tnll\ttree_nll", *["trees\tbest_nll\tparse"] * bool(scorer.beam)]) + "\n"]
        for one, column in zip(scored, columns, strict=True):
            rows.append(f"{one.example}\t{one.words}\t{one.pieces}\t{one.nll:.6f}\t{one.tree_nll:.6f}{column}\n")
    more = [f"every_{settings.every}"] if settings.every > 1 else []
    if scorer.beam:
        more, entry = ["beam", *more], entry | {"beam": settings.beam.model_dump()}
    name = name_result(name or text, run.checkpoint, run.data, *more, own_data=run.own_data)
    entry = write_predictions(folder, name, rows, entry | origin(run, settings), LANGUAGE_MODEL)
    if kept:
        kept.remove()
    return name, entry


@dataclass(frozen=True)
class Scorer:
    """A model with what turns encoded rows into its batches."""

    model: CausalLM | MaskedLM
    reads: InputKind
    sizes: VocabSizes
    beam: TreeBeam | None = None

    @property
    def kind(self) -> str:
        """Return which log-probability of a sentence the scores are."""
        if isinstance(self.model, MaskedLM):
            return "pseudo"
        return "beam" if self.beam else "joint" if reads_grammar(self.model) else "exact"

    def score(self, rows: Iterable[dict]) -> list[Scored]:
        """Return the scores of rows of a shard, which are numbered from 0."""
        if self.beam:
            every = [(row["example_id"], cut_words(row["leaves"]["piece"], row["leaves"]["word_index"])) for row in rows]
            searched = zip(every, self.beam.score_all([words for _, words in every]), strict=True)
            return check_finite(Scored(n, len(ws), len(one.nll), math.fsum(one.nll), found=one) for (n, ws), one in searched)
        if not reads_prefix_trees(self.model):
            return check_finite(score_batches(self.model, example_batches([*rows], self.reads, self.sizes), self.sizes.pieces))
        kept = [(row["leaves"]["piece"].tolist(), len({*row["leaves"]["word_index"].tolist()})) for row in rows]
        found = score_pieces(self.model, [pieces for pieces, _ in kept])
        return check_finite(Scored(n, kept[n][1], len(one.nll), math.fsum(one.nll)) for n, one in found)


def check_finite(scored: Iterable[Scored]) -> list[Scored]:
    """Return the scores by the numbers of their examples. Raises UserError if one is not finite."""
    found = sorted(scored, key=lambda one: one.example)
    if not all(math.isfinite(one.total) for one in found):
        raise UserError(
            "the scores of the model are not finite, because its training diverged; score an earlier checkpoint, or train again "
            "with a lower optimizer.learning_rate and another --out"
        )
    return found


def score_pairs(scorer: Scorer, given: PairInput, data: AnyPath) -> tuple[list[str], dict]:
    """Return the lines of the file of scores, and the entry, of minimal pairs."""
    counts, reads = Counter[str](), LEAVES if scorer.beam else scorer.reads

    def counted() -> Iterator[dict]:
        words_only = not (reads.constituents or reads.columns)
        encoded = encode_pairs(given.pairs, data, reads_trees=reads.constituents, words_only=words_only)
        for number, (row, names) in enumerate(encoded):
            count_unread(counts, given.pairs[number // 2].sentences[number % 2], names)
            yield row

    scored = scorer.score(counted())
    nll, pieces = (np.array([getattr(one, name) for one in scored]).reshape(-1, 2) for name in ("total", "pieces"))
    equal = [pair.is_equal for pair in given.pairs]
    nll[equal, 1] = nll[equal, 0]  # in two batches, sums of a sentence may round in two ways
    entry = {name: value for name, value in summarize(scored, scorer.kind).items() if "perplexity" not in name}
    entry |= {**counts, **summarize_pairs(given, nll, pieces)}
    return pair_rows(given, nll, pieces), entry | pair_facts(given)


def count_unread(counts: Counter[str], text: str, names: Sequence[str]) -> None:
    """Count in a sentence what its pieces, with these names, do not tell: unknown pieces and bytes, and capital letters."""
    unknown, pieces = sum(name in _UNKNOWN for name in names), "".join(names)
    lowered = not unknown and text != text.lower() and pieces == pieces.lower()
    counts.update(num_unknown_pieces=unknown, num_with_unknown=unknown > 0, num_lowercased=lowered)


def score_text(scorer: Scorer, path: Path, data: AnyPath) -> tuple[list[str], dict]:
    """Return the lines of the file of words, and the entry, of a file of text."""
    model = scorer.beam or (scorer.model if reads_prefix_trees(scorer.model) else None)
    if model is None:
        raise UserError(
            "surprisal: needs a run of model.name=causal_transformer, which gives p(word) from the words before it, or a grammar "
            "with trees=beam"
        )
    lines, beginners = encode_spaced(path, data)
    scored, rows, start, counts = [], {}, 0.0, Counter[str]()
    for number, scores, bits in score_words(model, lines, beginners):
        line = lines[number]
        count_unread(counts, " ".join(line.words), line.names)
        scored.append(Scored(number, len(line.words), len(scores.nll), math.fsum(scores.nll)))
        rows[number] = [f"{line.number}\t{word}\t{one:.6f}\n" for word, one in zip([*line.words, END], bits, strict=True)]
        start = -math.expm1(-scores.begins[0])  # the same before every line
    entry = summarize(check_finite(scored), scorer.kind) | counts | ({} if scorer.beam else {"other_first_pieces": start})
    return [f"{SURPRISAL_COLUMNS}\n", *(row for number in sorted(rows) for row in rows[number])], entry


def describe_parses(scored: Sequence[Scored], examples: Sequence[dict], data: AnyPath) -> tuple[list[str], dict]:
    """Return more columns for the line of each example: the trees found, and the best; and the best trees' scores by brackets.

    As in the trees of the data set, nodes that make a tree binary, or a word of pieces, are left out. Without labels that tell
    them, there are no scores by brackets.
    """
    names, rows, total = read_names(data / "encoded" / "vocab" / "labels.txt"), list[str](), BracketScore()

    def as_tree(words: int, spans: Iterable[tuple[tuple[int, int], str]]) -> SpanTree:
        kept = [(name, *span) for span, name in spans if not name.startswith((BINARY_PREFIX, SPLIT_WORD_PREFIX))]
        return SpanTree(*map(list, zip((ROOT_LABELS[0], 0, words), *kept, strict=True)))

    for one, gold in zip(scored, gold_trees(data, examples), strict=True):
        assert one.found
        best = as_tree(one.words, spans_of(one.found.best, names))
        total += score_sentence(gold.tags, as_tree(one.words, gold.spans), best)
        rows.append(f"\t{one.found.trees}\t{one.found.best_nll:.6f}\t{write_brackets(best, gold.words, gold.tags)}")
    index = read_index(data / "encoded")
    if has_unknown_gold(index):
        return rows, {}
    warn_of_gold(data, index)
    return rows, {f"bracket_{name}": getattr(total, name) for name in ("f1", "precision", "recall")}


def score_splits(folder: Path, *, use_gpu: bool = False) -> dict[str, dict]:
    """Score a finished run on valid and test if the data set has them. A result of the same weights and data stays."""
    done, stale = read_scores(folder), stale_scores(folder)
    for split in scored_splits(folder):
        if split not in done or split in stale:
            score_lm_run(folder, ScoreLMSettings(split=split, use_gpu=use_gpu))
    return read_scores(folder)


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
    parts = zip(states[counted].split(ROWS), targets[counted].split(ROWS), strict=True)
    found = [-model.compute_logits(x).log_softmax(-1).gather(1, target[:, None])[:, 0].double() for x, target in parts]
    out[counted] = torch.cat(found) if found else out.new_zeros(0)
    return out


def summarize(scored: Sequence[Scored], kind: str) -> dict:
    """Return nll and perplexities of all examples. Those of words count the end of a sentence as a word."""
    nll, pieces, total = (math.fsum(getattr(one, name) for one in scored) for name in ("nll", "pieces", "total"))
    words = sum(one.words for one in scored)
    counts = {"num_examples": len(scored), "num_targets": int(pieces), "num_words": words}
    out: dict[str, float | str] = {"nll": total / max(pieces, 1), **counts, "kind": kind}
    if kind == "pseudo":
        return out | {"pseudo_perplexity": perplexity(total, pieces)}
    out |= {"perplexity": perplexity(total, pieces), "word_perplexity": perplexity(total, words + len(scored))}
    return out | {"perplexity_given_tree": perplexity(nll, pieces)} if kind == "joint" else out


def perplexity(nll: float, count: float) -> float:
    """Return exp(nll / count), at most exp(700)."""
    return math.exp(min(nll / max(count, 1), 700.0))
