"""The results of parser training: scores of the models on every treebank, learning curves as one picture, and the model card."""

import io
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from matplotlib.figure import Figure

from treeproc.common.files import atomic_write, file_size
from treeproc.common.messages import Progress
from treeproc.common.setting_facts import value_at
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.extras.parser_training.corpus import SPLITS, Treebank, tagged, texts, with_arcs
from treeproc.extras.parser_training.loop import read_fit_metrics
from treeproc.extras.parser_training.tagger import tag_shares
from treeproc.extras.parser_training.treebank import Sentence, Tree
from treeproc.parsers.config import ParserConfig
from treeproc.parsers.dependency import DependencyParser
from treeproc.parsers.lines import Tags
from treeproc.parsers.model_files import ModelFiles, trained_files
from treeproc.parsers.shift_reduce import ShiftReduceParser
from treeproc.parsers.stanza_parser import DocumentTokenizer, ObjectParser, Processors, load_processors
from treeproc.parsers.tokenizer import Tokenizer
from treeproc.trees.scores import BracketScore, attachment, score, score_by_length, span_f1

BATCH_WORDS = 4096
_BATCH_CHARS = 4 * BATCH_WORDS
_WHAT = {
    "tokenizer": "tokeniser",
    "pos": "part-of-speech tagger",
    "constituency": "transition-based constituency parser",
    "vectors": "word vectors of the constituency parser",
    "depparse": "graph-based dependency parser",
}

_SCORES = {
    "token F1": "tokens.f1",
    "UPOS": "tags.upos",
    "XPOS": "tags.xpos",
    "F1": "brackets.predicted_tags.labelled.f1",
    "F1, gold tags": "brackets.gold_tags.labelled.f1",
    "UAS": "arcs.uas",
    "LAS": "arcs.las",
}


def evaluate(folder: Path, models: Sequence[str], treebanks: Sequence[Treebank], language: str) -> dict:
    """Compute scores in percent, {treebank: {split: {...}}}.

    tokens: precision, recall, f1 of tokens in raw sentences. tags: UPOS and XPOS accuracy. brackets: with the treebank's tags
    (gold_tags) and with predicted ones (predicted_tags). arcs: with predicted tags; `words` excludes punctuation. All except
    tokens use the treebank's words.
    """
    processors = load_models(folder, models, language)
    jobs = [(treebank, split) for treebank in treebanks for split in ("valid", "test")]
    out: dict[str, dict] = {}
    with Progress("scores", len(jobs), unit="parts") as progress:
        for treebank, split in jobs:
            if results := _evaluate_split(processors, treebank, split):
                out.setdefault(treebank.name, {})[split] = results
            progress.update()
    return out


def load_models(folder: Path, models: Sequence[str], language: str) -> Processors:
    """Load the named models of a folder."""
    files = {name: path for name, path in trained_files(folder).items() if path.stem in models}
    return load_processors(ParserConfig(language=language, device="cpu"), ModelFiles("trained", folder, files))


def _evaluate_split(processors: Processors, treebank: Treebank, split: str) -> dict:
    out = {}
    if processors.tokenizer and treebank.sentences.get(split):
        out["tokens"] = _tokens(processors.tokenizer, treebank, split)
    if processors.tagger and (found := tagged(treebank, split, repeated=True)):
        tags = tag_words(processors, [s.words for s in found])
        out["tags"] = {name: _percent(share.value) for name, share in tag_shares(tags, found).items()}
    if processors.parser and (trees := treebank.trees.get(split)):
        out["brackets"] = _brackets(processors, processors.parser, trees)
    if processors.arcs and processors.tagger and (sentences := with_arcs(treebank, split)):
        out["arcs"] = _arcs(processors, processors.arcs, sentences)
    return out


def tag_words(processors: Processors, sentences: Sequence[Sequence[str]]) -> list[Tags]:
    """Return (UPOS, XPOS) of every word, from the tagger."""
    assert processors.tagger is not None  # the caller has one
    return processors.tagger.tag(sentences, BATCH_WORDS)[0]


def _tokens(tokenizer: Tokenizer | DocumentTokenizer, treebank: Treebank, split: str) -> dict[str, float]:
    wanted = texts(treebank, split)
    found = tokenizer.tokenize([text.text for text in wanted], _BATCH_CHARS)
    spans = [[(token.start, token.end) for sentence in line for token in sentence] for line in found]
    names = ("precision", "recall", "f1")
    return dict(zip(names, map(_percent, span_f1([text.tokens for text in wanted], spans)), strict=True))


def _brackets(processors: Processors, parser: ShiftReduceParser | ObjectParser, trees: Sequence[Tree]) -> dict:
    gold = [(tree.tags, tree.spans) for tree in trees]
    out: dict = {"sentences": len(trees), "words": sum(len(tree.words) for tree in trees)}
    taggings = {"gold_tags": [tree.tags for tree in trees]}
    if processors.tagger:
        column = 1 if processors.uses_xpos else 0
        taggings["predicted_tags"] = [[tag[column] for tag in s] for s in tag_words(processors, [tree.words for tree in trees])]
    for name, tags in taggings.items():
        tagged_words = [list(zip(tree.words, own, strict=True)) for tree, own in zip(trees, tags, strict=True)]
        parsed = parser.parse(tagged_words, BATCH_WORDS)
        out[name] = {
            "labelled": _describe(score(gold, parsed)),
            "unlabelled": _describe(score(gold, parsed, labelled=False)),
            "by_length": {length: _describe(part) for length, part in score_by_length(gold, parsed).items() if part.sentences},
            "failed": sum(tree is None for tree in parsed),
        }
    return out


def _describe(score: BracketScore) -> dict[str, float | int]:
    names = ("precision", "recall", "f1", "exact_match")
    return {"sentences": score.sentences} | {name: _percent(getattr(score, name)) for name in names}


def _arcs(processors: Processors, parser: DependencyParser, sentences: Sequence[Sentence]) -> dict:
    words = [s.words for s in sentences]
    parsed = parser.parse(words, tag_words(processors, words), BATCH_WORDS)
    gold = [(s.governors, s.deprels) for s in sentences]
    found = [([governor for governor, _ in arcs], [relation for _, relation in arcs]) for arcs in parsed]
    every = attachment(gold, found)
    without = attachment(gold, found, [s.upos for s in sentences])
    return {
        "sentences": len(sentences),
        "uas": _percent(every.unlabelled.value),
        "las": _percent(every.labelled.value),
        "uas_words": _percent(without.unlabelled.value),
        "las_words": _percent(without.labelled.value),
    }


def _percent(value: float) -> float:
    return round(100 * value, 2)


def write_curves(training: Path, models: Sequence[str], path: Path) -> None:
    """Write a PNG with one column per model: loss above, dev score below, over epochs. A model trained elsewhere has no curve."""
    models = [name for name in models if any("score" in record for record in read_fit_metrics(training / name))]
    if not models:
        return
    figure = Figure(figsize=(3.2 * len(models), 4.6), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex="col")
    for name, (upper, lower) in zip(models, axes.T, strict=True):
        records = read_fit_metrics(training / name)
        for axis, key in ((upper, "loss"), (lower, "score")):
            points = [(record["epoch"], record[key]) for record in records if isinstance(record.get(key), int | float)]
            axis.plot(*zip(*points, strict=True), marker="." if key == "score" else "", linewidth=1)
            axis.grid(alpha=0.3)
        upper.set_title(name)
        upper.set_yscale("log")
        lower.set_xlabel("epoch")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("dev score")
    figure.savefig(buffer := io.BytesIO(), format="png")
    atomic_write(path, buffer.getvalue())


def write_card(folder: Path, config: TrainParserConfig, treebanks: Sequence[Treebank], scores: Mapping) -> None:
    """Write README.md beside the models."""
    files = [path for name in _WHAT if (path := folder / f"{name}.pt").exists()]
    lines = [
        f"# {config.title or f'Parser models for {config.language!r}'}",
        "",
        f"Models of [Stanza](https://stanfordnlp.github.io/stanza/) {version('stanza')}, trained from scratch by "
        "`tree-attention train-parser`.",
        "`parser.models` of `tree-attention preprocess` takes this folder.",
        "",
        "| file | what | size |",
        "|---|---|---|",
        *(f"| `{path.name}` | {_WHAT[path.stem]} | {_megabytes([path])} |" for path in files),
        f"| all | | {_megabytes(files)} |",
        "",
        "## Treebanks",
        "",
        *_table(["trees: sentences (words)", "arcs: sentences (words)", "weights"], dict(chain(*map(_size_rows, treebanks)))),
        "",
        "## Scores",
        "",
        "Percent, on test, or on valid if there is no test. NAME_lower is the treebank NAME in lower case. Tags, brackets and",
        "arcs are on the treebank's words, brackets and arcs with predicted tags. F1: labelled brackets without ROOT, tags and",
        "punctuation (EVALB's set, by gold tag). LAS: with punctuation, relations without subtypes. `scores.json` has more:",
        "valid, precision, recall, exact match, scores without labels and by sentence length.",
        "",
        *_table(list(_SCORES), _score_rows(scores["treebanks"])),
        "",
        "## Limits",
        "",
        "Scores hold for text like that of the treebanks. The models parse other text worse: other domains, questions, speech,",
        "noisy text, and sentences with many rare words.",
        "",
        *_in_runs(config),
        "## Licence and attribution",
        "",
        config.licence or "No licence was stated.",
        "",
        *(
            f"- {name}: {treebank.attribution or 'no attribution was stated'}"
            for name, treebank in config.all_treebanks().items()
        ),
    ]
    atomic_write(folder / "README.md", ("\n".join(lines) + "\n").encode())


def _in_runs(config: TrainParserConfig) -> list[str]:
    """Return the limit of treebanks whose files do not mark documents; empty without such treebanks."""
    names = [name for name, one in config.all_treebanks().items() if one.brackets.sentences or one.conllu.sentences]
    if not names:
        return []
    return [
        f"The files of {', '.join(names)} mark no documents. So test has runs of up to 100 sentences, and the models learnt",
        "other sentences of the same documents. These scores are higher than those of documents that the models never saw.",
        "",
    ]


def _megabytes(paths: Sequence[Path]) -> str:
    return f"{sum(map(file_size, paths)) / 1e6:.1f} MB"


def _table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a table without the columns that are empty in every row."""
    kept = [i for i in range(len(heads)) if any(cells[i] for cells in rows.values())]
    lines = [["", *(heads[i] for i in kept)], ["---"] * (1 + len(kept))]
    lines += [[name, *(cells[i] for i in kept)] for name, cells in rows.items()]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _size_rows(treebank: Treebank) -> list[tuple[str, list[str]]]:
    counts = treebank.counts()
    weights = ", ".join(f"{name} {weight:g}" for name, weight in treebank.weights.items())
    rows = []
    for split in SPLITS:
        cells = [counts.get(kind, {}).get(split) for kind in ("trees", "arcs")]
        if any(cells):
            texts = [f"{cell['sentences']:,} ({cell['words']:,})" if cell else "" for cell in cells]
            rows.append((f"{treebank.name} {split}", [*texts, weights if split == "train" else ""]))
    return rows


def _score_rows(treebanks: Mapping) -> dict[str, list[str]]:
    """Return the scores of the last part of each treebank."""
    last = {name: list(parts.items())[-1] for name, parts in treebanks.items()}
    return {f"{name} {split}": [_cell(value_at(part, key)) for key in _SCORES.values()] for name, (split, part) in last.items()}


def _cell(score: object) -> str:
    return f"{score:.2f}" if isinstance(score, float) else ""
