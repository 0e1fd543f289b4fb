"""Scores by their names in scores.json, and how every table, figure and model card writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treenet.tasks.tables import NONE, Column, typeset
from treenet.tasks.translation_metrics import LEARNED_TITLES, METRICS


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score of runs or of single sentences."""

    title: str
    unit: float = 1  # a value times this is the printed number, with `digits` places
    digits: int
    lower_is_better: bool = False
    short: str = ""  # its title in tables with many scores, if that is another one
    hub: str = ""  # its name on Hugging Face, if it has one

    def show(self, value: float, sign: str = "") -> str:
        """Format a value or a difference."""
        return f"{self.unit * value:{sign}.{self.digits}f}"

    def show_interval(self, interval: Sequence[float] | None) -> str:
        """Format the interval of a difference; a dash if there is none."""
        return f"[{', '.join(self.show(end, '+') for end in interval)}]" if interval else "-"

    def show_ends(self, interval: Sequence[float] | None) -> str:
        """Format the interval of a value; a dash if there is none."""
        return " to ".join(map(self.show, interval)) if interval else NONE


def _percent(title: str, hub: str = "") -> Score:
    return Score(title=f"{title} (%)", unit=100, digits=2, hub=hub)


def _nats(title: str, hub: str = "") -> Score:
    """Return the nll of a piece, or a perplexity: its exponential function."""
    return Score(title=title, digits=3, lower_is_better=True, hub=hub)


# In the order of columns.
SCORES = {
    "accuracy": _percent("accuracy", "accuracy"),
    "macro_f1": _percent("macro F1", "f1"),
    "binary_accuracy": _percent("accuracy of two classes"),
    "phrase_accuracy": _percent("accuracy of phrases"),
    **{
        name: Score(title=one.title, digits=2, lower_is_better=one.lower_is_better, short=one.column, hub=one.hub)
        for name, one in METRICS.items()
    },
    **{name: Score(title=title, digits=2, hub=name) for name, title in LEARNED_TITLES.items()},
    "pearson": Score(title="Pearson's r", digits=4, hub="pearsonr"),
    "spearman": Score(title="Spearman's rho", digits=4, hub="spearmanr"),
    "mse": Score(title="mean squared error", digits=4, lower_is_better=True, hub="mse"),
    "nll": _nats("nll of a piece (nats)"),
    "perplexity": _nats("perplexity of pieces", "perplexity"),
    "word_perplexity": _nats("perplexity of words"),
    "perplexity_given_tree": _nats("perplexity given the tree"),
    "pseudo_perplexity": _nats("pseudo-perplexity of pieces"),
    "pair_accuracy": _percent("right in minimal pairs"),
}


def interval_of(entry: Mapping, name: str) -> Sequence[float] | None:
    """Return the 95 % interval of a score in an entry of scores.json, if it has one."""
    found: Sequence[float] | None = entry.get("interval" if name == "pair_accuracy" else f"{name}_interval")
    return found


def score_columns(entries: Sequence[Mapping], of: str = "") -> list[Column]:
    """Return a column for every score that an entry has, and one for its intervals. The titles begin with `of`."""
    columns = []
    for name, score in SCORES.items():
        if any(name in one for one in entries):
            title, intervals = score.short or score.title, [interval_of(one, name) for one in entries]
            cells = [typeset(score.show(one[name])) if name in one else NONE for one in entries]
            columns.append(Column(f"{of}, {title}" if of else title, cells, "n"))
            if any(intervals):
                columns.append(Column("95 %", list(map(score.show_ends, intervals)), "n"))
    return columns
