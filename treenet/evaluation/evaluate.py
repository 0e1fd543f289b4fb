"""Translates a split of an encoded data set with a trained model, and scores the result against the references."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from treenet.config import DecodingConfig, TrainConfig
from treenet.data.splits import read_parse_scores, read_references, read_sources, read_split
from treenet.evaluation.bootstrap import compare_means
from treenet.evaluation.buckets import measure_sources, score_buckets, score_tags
from treenet.evaluation.comparison import compare
from treenet.evaluation.learned_metrics import LearnedMetrics, entries_of
from treenet.evaluation.settings import EvaluateSettings
from treenet.evaluation.unsupervised_parse import binary_tree
from treenet.layers.backend import choose_device, keep_freed_memory
from treenet.runs.loading import LoadedRun, load_run
from treenet.runs.result_entries import name_result, read_scores
from treenet.runs.result_provenance import asked_for, fingerprints, origin
from treenet.runs.run_folder import EXPORT_FACTS
from treenet.runs.run_results import ReferenceNll, System, result_in_run, write_result
from treenet.tasks.base import check_no_control
from treenet.tasks.learning import LEARNING, facts_of_lines, facts_of_nll, facts_of_text
from treenet.tasks.translation_metrics import (
    METRIC_TITLES,
    NO_TOKENIZER,
    build_tokenizer,
    check_lines,
    compute_scores,
    describe_blanks,
    describe_case,
    describe_forms,
    needed_tokenizer,
    tokenizer_of,
)
from treenet.translation.hypotheses import Hypothesis
from treenet.translation.translate import decoding_of, detokenize, score_examples, translate_examples, warn_of_width
from treeproc.common.hub import pin
from treeproc.common.messages import phase, warn
from treeproc.common.provenance import software
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath
from treeproc.shards.schema import without_tag
from treeproc.shards.shard import check_hashes
from treeproc.shards.store import describe_dropped, fingerprint_of, line_tags, read_index
from treeproc.trees.flat_trees import FlatTrees

References = Sequence[Sequence[str]]  # further references, each with a line for every example


@dataclass(frozen=True)
class GivenLines:
    """The lines of the files `references`, `more_references` and `sources`; None if a data set has them instead."""

    references: Sequence[str] | None = None
    more: References = ()
    sources: Sequence[str] | None = None


_SCORED_TOKENS = 1024  # of a batch of references: their logits take 4 bytes a token and piece


def _learned_metrics(settings: EvaluateSettings) -> LearnedMetrics:
    place = settings.bertscore.model and pin("bertscore.model", settings.bertscore.model)
    return LearnedMetrics(settings.bertscore.model_copy(update={"model": place}), settings.comet, settings.use_gpu)


def result_name(settings: EvaluateSettings, run: LoadedRun) -> str:
    """Return the name of the result of a split: see `name_result`."""
    trees = [f"random_trees_{settings.seed}"] if settings.random_trees else []
    method = decoding_of(settings.decoding, run).method
    searched = [method] if method != "beam" else []
    return name_result(settings.split, run.checkpoint, run.data, *trees, *searched, own_data=run.own_data)


def translate_split(run: LoadedRun, settings: EvaluateSettings) -> Iterator[list[Hypothesis]]:
    """Return the hypotheses of every example of `settings.split`, best first, in example order."""
    device, decoding = next(run.model.parameters()).device, decoding_of(settings.decoding, run)
    examples = _read_examples(run, settings)
    return translate_examples(run.model, examples, decoding, processor=run.processor, device=device)


def score_references(run: LoadedRun, settings: EvaluateSettings) -> ReferenceNll:
    """Return the nll of the reference of every example of `settings.split` under the model, in example order."""
    decoding, device = DecodingConfig(max_tokens=_SCORED_TOKENS), next(run.model.parameters()).device
    found = list(score_examples(run.model, _read_examples(run, settings), decoding, device=device))
    return ReferenceNll([-math.fsum(one.token_log_probs) for one in found], [len(one.token_log_probs) for one in found])


def _read_examples(run: LoadedRun, settings: EvaluateSettings) -> Iterator[dict]:
    """Read the examples of `settings.split`, with random trees if they are asked for."""
    examples = read_split(run.data, "encoded", settings.split)
    return (with_random_tree(one, settings.seed) for one in examples) if settings.random_trees else examples


def evaluate_run(folder: Path, settings: EvaluateSettings, more: References = ()) -> tuple[str, dict]:
    """Write `translations.NAME.txt`, `nll.NAME.tsv` and the entry NAME of `scores.json` into the run folder.

    `more` has the lines of the files `settings.more_references`.
    Returns NAME and its scores. Raises UserError if the folder is not a run, or if run and data do not fit.
    """
    device = choose_device(settings.use_gpu)
    keep_freed_memory()
    run = load_run(folder, checkpoint=settings.checkpoint, data=settings.data, untrained=settings.untrained, device=device)
    if settings.random_trees and run.model.reads.binary:
        raise UserError(
            f"random_trees draws trees that need not be binary, and {run.config.model.name} reads binary ones; leave it out, and "
            "give data=DIR, a data set of tree.tree_source=random and tree.binarize=right"
        )
    if settings.random_trees and not run.model.reads.constituents:
        raise UserError(f"random_trees changes constituency trees, and {run.config.model.name} reads {run.model.reads} alone")
    check_no_control(run.data, read_index(run.data / "encoded"), run.model.reads, run.config.model.name)
    check_hashes(run.data / "encoded", settings.split)
    # Before hours of search.
    read_scores(folder)
    build_tokenizer(tokenizer_of(run.data, settings.target_language))
    _learned_metrics(settings).check(has_sources=True)
    warn_of_width(decoding_of(settings.decoding, run), len(run.processor))
    references = read_references(run.data, settings.split)
    sizes = read_sizes(run.data, settings.split)
    check_given(references, GivenLines(more=more), settings)
    nll = score_references(run, settings)
    found = [hypotheses[0] for hypotheses in translate_split(run, settings)]
    lines = [detokenize(run.processor, one) for one in found]
    right = [row["tgt_pieces"].tolist() for row in read_split(run.data, "encoded", settings.split)]
    facts = facts_of_lines([one.ids for one in found], right) | facts_of_nll(run.config.data, run.data, settings.split)
    scores = {
        **score_lines(lines, references, run.data, settings, more, sizes),
        LEARNING: facts,
        **origin(run, settings),
        "random_trees": settings.random_trees,
        "decoding": decoding_of(settings.decoding, run).model_dump(),
    }
    name = result_name(settings, run)
    written = {}
    if not _is_written(folder, name, lines, scores):
        # An hour of search is not lost, however the next ends.
        written = write_result(folder, name, lines, references, scores, nll)
    try:
        learned = learned_entries(lines, references, run.data, settings, more)
    except UserError as error:
        raise UserError(f"{error}; the translations and the other scores of {name} are in {folder}") from None
    return name, written if written and not learned else write_result(folder, name, lines, references, scores | learned, nll)


def _is_written(folder: Path, name: str, lines: Sequence[str], scores: Mapping) -> bool:
    """Return whether a result has these lines and these facts already: its learned metrics stay until there are new ones."""
    before = read_scores(folder).get(name, {})
    content = "".join(f"{line}\n" for line in lines).encode()
    now: dict[str, object] = {"translations_sha256": hashlib.sha256(content).hexdigest()}
    now |= {key: scores.get(key) for key in ("weights_sha256", "data", "asked")}
    return all(before.get(key) == value for key, value in now.items())


def read_sizes(data: AnyPath, split: str) -> dict[str, np.ndarray]:
    """Return what buckets of scores are made of: sizes of the sources of a split, and their parse scores if there are some."""
    sizes = measure_sources(read_split(data, "encoded", split))
    parse_scores = read_parse_scores(data, split)
    return sizes | ({} if parse_scores is None else {"parse_score": parse_scores})


def score_lines(
    lines: Sequence[str],
    references: Sequence[str],
    data: AnyPath | None,
    settings: EvaluateSettings,
    more: References = (),
    sizes: dict[str, np.ndarray] | None = None,
) -> dict:
    """Score translations, as in scores.json; also by bucket if a data set gives the sources. `sizes` were read before."""
    tokenizer = tokenizer_of(data, settings.target_language)
    warn_of_text([lines], references, tokenizer)
    with phase(f"scoring {len(lines):,} translations"):
        scores = compute_scores(lines, references, tokenizer, more, torch.get_num_threads())
    scores["split"] = settings.split
    if more:
        scores["more_references_fingerprint"] = more_fingerprint(more)
    if data is not None:
        sizes = sizes or read_sizes(data, settings.split)
        scores["buckets"] = score_buckets(sizes, settings.buckets, lines, references, tokenizer)
        index = read_index(data / "encoded")
        scores["data"] = fingerprints(index)
        if said := describe_dropped(index, settings.split):
            warn(f"note: {said}; the scores are those of the other lines")
        if tags := line_tags(index):
            scores["tags"] = score_tags(read_sources(data, settings.split), tags, lines, references, tokenizer)
    return scores


def warn_of_text(systems: Sequence[Sequence[str]], references: Sequence[str], tokenizer: str) -> None:
    """Warn of lines whose words no metric can match, or cannot tell apart."""
    if note := describe_blanks(references, tokenizer):
        warn(f"note: {note}; compare chrF, or set target_language (such as zh, ja or th) and compare the tokenised BLEU")
    for lines in systems:
        if note := describe_forms(lines, references):
            warn(f"note: {note}; write both in NFC, and score them again")
        if note := describe_case(lines, references):
            warn(f"note: {note}; if one side was made lower-case, do the same to the other, and score them again")


def learned_entries(
    lines: Sequence[str],
    references: Sequence[str],
    data: AnyPath | None,
    settings: EvaluateSettings,
    more: References = (),
    sources: Sequence[str] | None = None,
) -> dict:
    """Score translations with BERTScore and COMET if they are asked for. `sources` are for COMET if no data set gives them."""
    sources = plain_sources(data, settings.split) if data is not None else sources
    return entries_of(_learned_metrics(settings).score([lines], sources, [references, *more]))


def more_fingerprint(more: References) -> str | None:
    """Return the fingerprint of further references; None if there are none."""
    return fingerprint_of([list(lines) for lines in more]) if more else None


def plain_sources(data: AnyPath, split: str) -> list[str]:
    """Read the lines that a model translates, without the tags in front of them."""
    tags = line_tags(read_index(data / "encoded"))
    return [without_tag(source, tags) for source in read_sources(data, split)]


def check_given(references: Sequence[str], given: GivenLines, settings: EvaluateSettings) -> None:
    """Raise UserError if a given file has not as many lines as `references`."""
    names = ["more_references"] * len(given.more) + ["sources"]
    for name, path, lines in zip(names, [*settings.more_references, settings.sources], [*given.more, given.sources], strict=True):
        if lines is not None and len(lines) != len(references):
            raise UserError(f"{name}: {path} must have {len(references):,} lines, but has {len(lines):,}")


def data_of(run: AnyPath) -> AnyPath | None:
    """Return the data set of a run folder; None if the folder is not a run.

    Raises UserError if the data set is missing, or if the run is exported: then it has a vocabulary and no examples.
    """
    if not (run / "config.yaml").is_file():
        return None
    if (run / EXPORT_FACTS).is_file():
        raise UserError(f"{run} is an exported run, which holds no examples; give data=DATA")
    data = load_settings(TrainConfig, run / "config.yaml").data
    if not (data / "encoded" / "index.json").exists():
        raise UserError(f"{data}, the data set of {run}, is missing; if it moved, give its new place as data=DIR")
    return data


def score_file(lines: Sequence[str], given: GivenLines, settings: EvaluateSettings, out: Path | None) -> tuple[str, dict]:
    """Score the lines of `settings.hypotheses`, against the given references if there are some. Returns a name and the scores.

    `out` is a run folder or another folder. Translations and scores are written there as for a run. Raises UserError if there are
    no references, or not one per line.
    """
    data = None
    if (references := given.references) is None:
        data = settings.data or (data_of(out) if out else None)
        if data is None:
            raise UserError("hypotheses: needs references; give data=DATA, references=FILE, or the folder of a run as --out")
        references, of = read_references(data, settings.split), f"{settings.split} of {data}"
    else:
        of = str(settings.references)
    hypotheses = settings.hypotheses
    assert hypotheses is not None  # the file of the lines
    check_lines(lines, references, str(hypotheses), of)
    if data is not None and (result := result_in_run(hypotheses)):
        known = fingerprint_of(references)
        if read_scores(hypotheses.parent)[result].get("references_fingerprint", known) != known:
            raise UserError(
                f"hypotheses: {hypotheses} has scores against other references than those of {of}; give its own as "
                "references=FILE"
            )
    check_given(references, given, settings)
    scores = {
        **score_lines(lines, references, data, settings, given.more),
        **learned_entries(lines, references, data, settings, given.more, given.sources),
        LEARNING: facts_of_text(lines, references, tokenizer_of(data, settings.target_language)),
        "hypotheses": hypotheses.name,
        "weights_sha256": None,
        "weights": "none: lines of another system",
        "asked": asked_for(settings),
        "software": software(),
    }
    name = f"{settings.split}.file.{hypotheses.name.removesuffix('.gz').removesuffix('.txt')}"
    if out is None:
        return name, scores
    read_scores(out)
    out.mkdir(parents=True, exist_ok=True)
    return name, write_result(out, name, lines, references, scores)


def compare_results(baseline: System, system: System, given: GivenLines, settings: EvaluateSettings) -> dict:
    """Compare two systems on the references of a file, or else of the data set of a run."""
    data, shown, sources, numbers, of = None, None, given.sources, None, str(settings.references)
    split = next((one.scores.get("split", settings.split) for one in (baseline, system) if one.scores), settings.split)
    if (references := given.references) is None:
        data = settings.data or next((data_of(one.run) for one in (baseline, system) if one.run), None)
        if data is None:
            raise UserError("--compare: two files need references; give data=DATA or references=FILE")
        references, of = read_references(data, split), f"{split} of {data}"
        shown, sources = read_sources(data, split), plain_sources(data, split)
        numbers = [row["example_id"] + 1 for row in read_split(data, "text", split)]
    remedy = _common_data(baseline, system, split) if given.references is None and settings.data is None else ""
    for one in (baseline, system):
        one.check(split, references, of, remedy)
    check_given(references, given, settings)
    tokenizer = tokenizer_of(data, settings.target_language)
    warn_of_text([baseline.lines, system.lines], references, tokenizer)
    found = _learned_metrics(settings).score([baseline.lines, system.lines], sources, [references, *given.more])
    samples = settings.compare.samples
    learned = {}
    for name, scores in found.items():
        ours, theirs = scores.values
        learned[name] = compare_means(ours, theirs, samples, scores.signature)
    tokens_of = tokenizer if settings.target_language or tokenizer == NO_TOKENIZER else None
    return compare(baseline, system, shown, references, split, settings.compare, numbers, given.more, learned, tokens_of)


def _common_data(baseline: System, system: System, split: str) -> str:
    """Return how to compare two runs on another data set on which both have scores; empty if there is none."""
    of_data, runs = f"{split}.data-", [one.run for one in (baseline, system) if one.run is not None]
    names = [{name.removeprefix(of_data) for name in read_scores(run) if name.startswith(of_data)} for run in runs]
    if len(names) < 2 or not (both := sorted(names[0] & names[1])):
        return ""
    return f"both have scores on the data set {both[0]}: add data={both[0]}, with the path of its folder"


def format_signatures(scores: dict) -> str:
    """Return the definition of each number, one line per metric."""
    found = {title: scores.get(f"{key}_signature") for key, title in METRIC_TITLES.items()}
    width = max(map(len, found)) + 2
    lines = [f"{title:{width}}{signature}" for title, signature in found.items() if signature]
    tokenizer = needed_tokenizer([scores])
    if tokenizer == NO_TOKENIZER:
        lines.append("the lines of the data set are tokens; compare the tokenised BLEU, because BLEU is for detokenised lines")
    elif tokenizer:
        lines.append("compare the tokenised BLEU or chrF: without blanks between words, BLEU and TER take sentences for words")
    return "\n".join(lines)


# A control for translation: the model reads every sentence with a wrong tree. If its translations stay the same, it does not use
# its trees.
ATTEMPTS = 20


def random_spans(num_leaves: int, num_nodes: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """Draw nested or disjoint spans [start, end) of a random tree in pre-order. The first span covers all leaves.

    They are drawn from the `2 * num_leaves - 1` subtrees of a random binary tree, with its leaves. No span repeats while there
    are enough. Repeated spans are unary chains.
    """
    binary = binary_tree(num_leaves, "random", random)
    rounds = [random.permutation(len(binary)) for _ in range(num_nodes // len(binary))]
    others = np.concatenate([1 + random.permutation(len(binary) - 1), *rounds])
    chosen = [0, *others[: num_nodes - 1]]
    return sorted((binary[i] for i in chosen), key=lambda span: (span[0], -span[1]))


def with_random_tree(example: dict, seed: int) -> dict:
    """Return the example of an encoded shard with a random tree of another shape over its own leaves.

    Its nonterminals are the same, in random order. The tree is a function of `seed` and `example_id`. A sentence that is too
    short for a second shape keeps its tree.
    """
    num_leaves, num_nodes = len(example["leaves"]["piece"]), len(example["nodes"]["label"])
    if not num_leaves or not num_nodes:
        return example
    random = np.random.default_rng([seed, example["example_id"]])
    own = sorted(zip(example["spans"]["start"].tolist(), example["spans"]["end"].tolist(), strict=True))
    for _ in range(ATTEMPTS):
        spans = random_spans(num_leaves, num_nodes, random)
        if sorted(spans) != own:
            break
    start, end = np.array(spans, dtype=np.int32).T
    labels = np.asarray(example["nodes"]["label"])[random.permutation(num_nodes)]
    tree = FlatTrees(labels, start, end, names=[])
    return {
        **example,
        "nodes": {"label": labels, "parent": tree.parents().astype(np.int32)},
        "spans": {"start": start, "end": end, "subtree_end": tree.subtree_ends().astype(np.int32)},
    }
