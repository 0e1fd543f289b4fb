"""The model card: the models, their training data, their scores, and the sources to cite."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from treeproc.common.files import atomic_write, file_size
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.extras.parser_training.corpus import SPLITS, Treebank

_WHAT = {
    "tokenizer": "tokeniser",
    "pos": "part-of-speech tagger",
    "constituency": "transition-based constituency parser",
    "vectors": "word vectors of the constituency parser",
    "depparse": "graph-based dependency parser",
}

_SCORES = {
    "token F1": ("tokens", "f1"),
    "UPOS": ("tags", "upos"),
    "XPOS": ("tags", "xpos"),
    "F1": ("brackets", "predicted_tags", "labelled", "f1"),
    "F1, gold tags": ("brackets", "gold_tags", "labelled", "f1"),
    "UAS": ("arcs", "uas"),
    "LAS": ("arcs", "las"),
}


def write_card(folder: Path, config: TrainParserConfig, treebanks: Sequence[Treebank], scores: Mapping) -> None:
    """Write README.md beside the models."""
    files = [path for name in _WHAT if (path := folder / f"{name}.pt").exists()]
    lines = [
        f"# {config.title or f'Parser models for {config.language!r}'}",
        "",
        f"Models of [Stanza](https://stanfordnlp.github.io/stanza/) {version('stanza')}, trained from scratch by "
        "`workflows/train_parser.py`.",
        "`parser.models` of `workflows/preprocess.py` takes this folder.",
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
        "Percent. NAME_lower is the treebank NAME in lower case. Tags, brackets and arcs are on the treebank's words, brackets",
        "and arcs with predicted tags. F1: labelled brackets without ROOT, tags and punctuation (EVALB's set, by gold tag).",
        "LAS: with punctuation, relations without subtypes.",
        "`scores.json` has precision, recall, exact match, scores without labels and by sentence length.",
        "",
        *_table(list(_SCORES), _score_rows(scores["treebanks"])),
        "",
        *_by_length(scores["treebanks"]),
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
    return {
        f"{name} {split}": [_at(part, path) for path in _SCORES.values()]
        for name, parts in treebanks.items()
        for split, part in parts.items()
    }


def _at(part: Mapping, path: Sequence[str]) -> str:
    value = part
    for key in path:
        value = value.get(key, {})
    return f"{value:.2f}" if isinstance(value, float) else ""


def _by_length(treebanks: Mapping) -> list[str]:
    """Return the table of F1 by words of a sentence; empty without such scores."""
    rows = {
        f"{name} {split}": part["brackets"]["predicted_tags"]["by_length"]
        for name, parts in treebanks.items()
        for split, part in parts.items()
        if "predicted_tags" in part.get("brackets", {})
    }
    if not rows:
        return []
    lengths = list(dict.fromkeys(length for row in rows.values() for length in row))
    return [
        f"| F1 by words of a sentence | {' | '.join(lengths)} |",
        f"|---|{'---|' * len(lengths)}",
        *(f"| {name} | {' | '.join(_at(row, (length, 'f1')) for length in lengths)} |" for name, row in rows.items()),
        "",
    ]
