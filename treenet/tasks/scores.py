"""Scores by their names in scores.json, and how every table, figure and model card writes them."""

from collections.abc import Iterable, Mapping, Sequence

from treenet.tasks.learning import find_overfitted, find_unlearned, say_overfitted, say_unlearned
from treenet.tasks.tables import NONE, Column, Score, align, numbers, typeset
from treenet.tasks.translation_metrics import LEARNED, METRICS

ABOUT_INTERVALS = "The intervals hold for other examples or pairs, and not for other seeds of training."


def _percent(title: str, hub: str = "", short: str = "") -> Score:
    return Score(title=f"{title} (%)", unit=100, digits=2, hub=hub, short=short and f"{short} (%)")


def _nats(title: str, hub: str = "", short: str = "") -> Score:
    """Return the nll of a piece, or a perplexity: its exponential function."""
    return Score(title=title, digits=3, lower_is_better=True, hub=hub, short=short)


# In the order of columns.
SCORES: dict[str, Score] = {
    "accuracy": _percent("accuracy", "accuracy"),
    "macro_f1": _percent("macro F1", "f1"),
    "binary_accuracy": _percent("accuracy of two classes", short="two classes"),
    "phrase_accuracy": _percent("accuracy of phrases", short="phrases"),
    **METRICS,
    **LEARNED,
    "pearson": Score(title="Pearson's r", digits=4, hub="pearsonr"),
    "spearman": Score(title="Spearman's rho", digits=4, hub="spearmanr"),
    "mse": Score(title="mean squared error", digits=4, lower_is_better=True, hub="mse"),
    "nll": _nats("nll of a piece (nats)", short="nll a piece (nats)"),
    "perplexity": _nats("perplexity of pieces", "perplexity", "perplexity"),
    "word_perplexity": _nats("perplexity of words"),
    "perplexity_given_tree": _nats("perplexity given the tree"),
    "pseudo_perplexity": _nats("pseudo-perplexity of pieces", short="pseudo-perplexity"),
    "pair_accuracy": _percent("right in minimal pairs", short="right pairs"),
    "accuracy_per_piece": _percent("right in minimal pairs by the mean of pieces", short="by mean of pieces"),
    "bracket_f1": _percent("labelled F1 of the best parses", short="labelled F1"),
    "bracket_precision": _percent("precision of the best parses", short="precision"),
    "bracket_recall": _percent("recall of the best parses", short="recall"),
    "sentence_f1": _percent("F1, mean over sentences", short="sent. F1"),
    "f1": _percent("F1 of all brackets", short="F1"),
    "precision": _percent("precision of all brackets", short="precision"),
    "recall": _percent("recall of all brackets", short="recall"),
}


def interval_of(entry: Mapping, name: str) -> Sequence[float] | None:
    """Return the 95 % interval of a score in an entry of scores.json, if it has one."""
    found: Sequence[float] | None = entry.get("interval" if name == "pair_accuracy" else f"{name}_interval")
    return found


def score_columns(entries: Sequence[Mapping], of: str = "", names: Iterable[str] = tuple(SCORES)) -> list[Column]:
    """Return a column for every score of `names` that an entry has, and one for its intervals. The titles begin with `of`."""
    columns = []
    for name in names:
        if any(name in one for one in entries):
            score, intervals = SCORES[name], [interval_of(one, name) for one in entries]
            title = f"{of}, {score.column}" if of else score.column
            cells = [typeset(score.show(one[name])) if name in one else NONE for one in entries]
            columns.append(Column(title, cells, "n"))
            if any(intervals):
                columns.append(Column("95 %", list(map(score.show_ends, intervals)), "n"))
    return columns


def format_scores(everything: Mapping[str, Mapping], counts: str = "examples") -> str:
    """Return a table of entries of scores.json with a line for each, and what they say of learning. `counts` names examples."""
    entries = list(everything.values())
    steps = [one["steps"][-1] if "steps" in one else None for one in entries]
    scores = score_columns(entries)
    columns = [
        Column("result", list(everything)),
        *[numbers("step", steps)] * any(steps),
        numbers(counts, [one["num_examples"] for one in entries]),
        *scores,
    ]
    about = [ABOUT_INTERVALS] * any(one.title == "95 %" for one in scores)
    learning = [*say_unlearned(find_unlearned(everything)), *say_overfitted(find_overfitted(everything))]
    return "\n".join([*align(columns), *about, *learning])
