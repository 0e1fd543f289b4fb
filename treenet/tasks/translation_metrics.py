"""Translation scores by sacrebleu. It scores text that is already here and downloads nothing.

`bleu` is sacrebleu's default, of detokenised lines: the number to publish. `bleu_tokenized` is case-sensitive BLEU over the
tokens of the Moses tokeniser, as in the paper and most earlier papers. Compare it only with numbers over the same tokens.

`bleu_compound_split` is the same, with hyphenated words cut at their hyphens on both sides. The published scores of WMT'14
English-German use it since Vaswani et al. (2017). It is higher by some tenths.

`ter` is the number of edits to the closest reference, in per cent of the words of a reference (Snover et al., 2006). An edit
inserts, removes or replaces a word, or moves a block of words. Lower is better.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal
from unicodedata import is_normalized, normalize

import numpy as np

from treenet.tasks.tables import Score
from treeproc.common.errors import UserError, require
from treeproc.common.files import read_text
from treeproc.common.processes import map_in_processes
from treeproc.common.storage import AnyPath
from treeproc.common.yaml_reader import read_yaml
from treeproc.shards.store import stage_folder

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as SacrebleuMetric


def check_lines(hypotheses: Sequence[str], references: Sequence[str], what: str = "translations", of: str = "") -> None:
    """Raise UserError if the two differ in number of lines, or are empty; `what` and `of` are their names."""
    if len(hypotheses) != len(references):
        longer, name = (hypotheses, what) if len(hypotheses) > len(references) else (references, of or "the references")
        blank = "" if longer[-1].strip() else f"; the last line of {name} is blank"
        of = f" of {of}" if of else ""
        raise UserError(f"{what}: must have one line per reference, {len(references)}{of}, but have {len(hypotheses)}{blank}")
    if not references:
        raise UserError(f"{what}: there are no lines to score")


@dataclass(frozen=True, kw_only=True)
class Metric(Score):
    """A corpus metric of sacrebleu: its class there, and options of the class."""

    kind: Literal["BLEU", "CHRF", "TER"]
    options: Mapping[str, Any] = field(default_factory=dict)
    reads: Literal["lines", "tokens", "tokens_of_compounds"] = "lines"
    compared: bool = False  # whether it is shown where systems are compared, by tags and in studies
    is_slow: bool = False  # some 10 ms a line
    digits: int = 2

    def build(self, tokenized: bool = True) -> "SacrebleuMetric":
        """Build the metric. Unless the input of the data set was `tokenized`, BLEU may advise to detokenise."""
        from sacrebleu import metrics  # here, because trainings by the nll do not need it

        force = {"force": tokenized or self.reads != "lines"} if self.kind == "BLEU" else {}
        return getattr(metrics, self.kind)(**self.options, **force)


_TOKENS = {"tokenize": "none"}
# The metrics of every evaluation, in the order of its table. Settings and reports take their names from here.
METRICS = {
    "bleu": Metric(title="BLEU", kind="BLEU", options={"tokenize": "13a"}, compared=True, hub="sacrebleu"),
    "bleu_tokenized": Metric(title="tokenised BLEU", short="tok. BLEU", kind="BLEU", options=_TOKENS, reads="tokens"),
    "bleu_compound_split": Metric(
        title="compound-split BLEU", short="split BLEU", kind="BLEU", options=_TOKENS, reads="tokens_of_compounds"
    ),
    "chrf": Metric(title="chrF", kind="CHRF", compared=True, hub="chrf"),
    "ter": Metric(title="TER (lower is better)", short="TER", kind="TER", lower_is_better=True, is_slow=True, hub="ter"),
}
# The metric of a table with one, for lines, and for lines that came as tokens; and the second one of a small table.
MAIN, MAIN_OF_TOKENS, SECOND = "bleu", "bleu_tokenized", "chrf"
COMPARED = tuple(name for name, metric in METRICS.items() if metric.compared)
# The choices of the setting `grid.metric`.
OF_STUDIES = tuple(name for name, metric in METRICS.items() if metric.reads in ("lines", "tokens") and not metric.lower_is_better)
# The choices of the setting `valid_metric` beside the nll.
OF_VALIDATIONS = tuple(name for name, metric in METRICS.items() if metric.reads == "lines")
# Those of settings, in treenet/evaluation/learned_metrics.py.
LEARNED = {name.lower(): Score(title=name, digits=2, hub=name.lower()) for name in ("BERTScore", "COMET")}
METRIC_TITLES = {name: one.title for name, one in (METRICS | LEARNED).items()}
# The types of scores and signatures in an entry of scores.json.
SCORE_TYPES: dict[str, type] = dict.fromkeys(METRIC_TITLES, float) | {f"{name}_signature": str for name in METRICS}
_FEWEST_LINES, _LINES_AT_ONCE = 500, 100  # of a slow metric: for each process, which takes a second to start, and of a job
NO_TOKENIZER, INTERNATIONAL, MOSES, MECAB = "none", "intl", "moses.", "ja-mecab"
# Sacrebleu's tokenisers for languages without blanks between words. Those of Moses leave whole sentences as words.
_WITHOUT_BLANKS = {"zh": "zh", "ja": MECAB} | dict.fromkeys(("km", "lo", "my", "th"), "char")
OF_NO_BLANKS = frozenset(_WITHOUT_BLANKS.values())
_LETTERS_OF_THESE = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_TOKENIZER = re.compile(rf"tok:({MECAB}|[^|]+)")  # in a signature, where that of MeCab has its version too
_TOO_MANY = 0.05  # of the lines


def choose_tokenizer(tokenized: bool, language: str | None) -> str:
    """Return the name of the tokeniser for tokenised BLEU.

    Lines that are already tokens stay as they are. Otherwise the rules of Moses for the target language hold, or those of
    sacrebleu if it has no blanks between words. For an unknown language it is `intl`, the tokeniser of mteval-v14, which is close
    to Moses but not the same.
    """
    if tokenized:
        return NO_TOKENIZER
    return _WITHOUT_BLANKS.get(language, f"{MOSES}{language}") if language else INTERNATIONAL


def describe_blanks(references: Sequence[str], tokenizer: str) -> str:
    """Describe why metrics of words do not fit the references of a tokeniser; empty if they fit."""
    if tokenizer in (NO_TOKENIZER, *OF_NO_BLANKS):
        return ""
    count = sum(2 * len(_LETTERS_OF_THESE.findall(line)) > sum(map(str.isalpha, line)) for line in references)
    if count <= _TOO_MANY * len(references):
        return ""
    return (
        f"{count:,} of {len(references):,} references are in a script without blanks between words, so BLEU and TER take whole "
        "sentences for words"
    )


def describe_forms(hypotheses: Sequence[str], references: Sequence[str]) -> str:
    """Describe how many lines lose matches because of the forms of Unicode; empty if none does."""

    def shared(line: str, reference: str, compose: Callable[[str], str]) -> int:
        return len({*compose(line).split()} & {*compose(reference).split()})

    nfc, pairs = partial(normalize, "NFC"), list(zip(hypotheses, references, strict=True))
    other = [pair for pair in pairs if not all(is_normalized("NFC", line) for line in pair)]
    count = sum(shared(*pair, nfc) > shared(*pair, str) for pair in other)
    if not count:
        return ""
    return (
        f"in {count:,} of {len(pairs):,} lines, translation and reference have a word in two forms of Unicode (é as one "
        "character or two), and it never matches"
    )


def describe_case(hypotheses: Sequence[str], references: Sequence[str]) -> str:
    """Describe that one side alone has capital letters; empty if both or none have them, and in scripts without case."""
    sides = {"translations": hypotheses, "references": references}
    if not all(any(line.upper() != line.lower() for line in lines) for lines in sides.values()):
        return ""
    (fewer, without), (count, side) = sorted((sum(line != line.lower() for line in lines), name) for name, lines in sides.items())
    if fewer or count <= _TOO_MANY * len(references):
        return ""
    return f"{count:,} of {len(references):,} {side} have capital letters, but no {without[:-1]} has one, and case counts"


def tokenizer_of(data: AnyPath | None, language: str | None = None) -> str:
    """Return the name of the tokeniser for tokenised BLEU. If the input of a data set was tokenised, its tokens are kept."""
    path = stage_folder(data, "text").parent / "config.yaml" if data is not None else None
    made_with = read_yaml(read_text(path, "restore it"), str(path)) if path is not None and path.exists() else None
    return choose_tokenizer(isinstance(made_with, dict) and made_with.get("tokenized", "none") != "none", language)


def build_tokenizer(name: str) -> Any:
    """Build a function from a line to tokens with blanks between them.

    Moses keeps hyphens inside words, and nothing is escaped.
    """
    if name == NO_TOKENIZER:
        return str
    if not name.startswith(MOSES):
        require(("MeCab", "ipadic") if name == MECAB else (), "target_language=ja", "leave target_language out")
        from sacrebleu.metrics import BLEU

        return BLEU(tokenize=name).tokenizer
    require("sacremoses", f"target_language={name.removeprefix(MOSES)}", "leave target_language out")
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=name.removeprefix(MOSES))
    return lambda line: moses.tokenize(line, return_str=True, escape=False)


def split_compounds(tokens: str) -> str:
    """Split `well-known` into `well ##AT##-##AT## known`.

    Hyphens with one letter between them are split as in Vaswani et al.'s script.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokens)


def compute_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenizer: str = INTERNATIONAL,
    more_references: Sequence[Sequence[str]] = (),
    processes: int = 1,
) -> dict:
    """Compute the `METRICS` of a corpus with their signatures, in the form of scores.json. `tokenizer` makes the tokens.

    `more_references` are further references, each with a line for every hypothesis. A signature names the tokeniser and the
    number of references. At most so many `processes` share the lines of a slow metric.
    """
    for more in (references, *more_references):
        check_lines(hypotheses, more)
    split = build_tokenizer(tokenizer)
    lines: list[Sequence[str]] = [hypotheses, references, *more_references]
    tokens = [[split(line) for line in side] for side in lines]
    compounds = [[split_compounds(line) for line in side] for side in tokens]
    forms: dict[str, Sequence[Sequence[str]]] = {"lines": lines, "tokens": tokens, "tokens_of_compounds": compounds}
    scores: dict = {"num_examples": len(references)}
    for name, one in METRICS.items():
        metric = one.build(tokenizer == NO_TOKENIZER)
        system, *every_reference = forms[one.reads]
        shared = min(processes, len(system) // _FEWEST_LINES) if one.is_slow else 1
        if shared > 1:
            statistics = map_in_processes(partial(_statistics_of, one), _parts(forms[one.reads]), shared, "scored translations")
            scores[name] = metric._aggregate_and_compute(list(chain.from_iterable(statistics))).score
            metric.num_refs = len(every_reference)  # for its signature
        else:
            scores[name] = metric.corpus_score(system, every_reference).score
        scores[f"{name}_signature"] = name_tokenizer(metric.get_signature().format(), one, tokenizer)
    return scores


def named_tokenizers(records: Iterable[Mapping]) -> set[str]:
    """Return the tokenisers that the signatures of tokenised BLEU name; `?` for a result without one."""
    return {name for record in records for name in _TOKENIZER.findall(record.get("bleu_tokenized_signature", "tok:?"))}


def needed_tokenizer(records: Sequence[Mapping]) -> str | None:
    """Return the tokeniser of tokenised BLEU of all results, where detokenised lines are not the ones to compare, else None."""
    found = named_tokenizers(records)
    return found.pop() if len(found) == 1 and found <= {NO_TOKENIZER, *OF_NO_BLANKS} else None


def name_tokenizer(signature: str, metric: Metric, tokenizer: str) -> str:
    """Return the signature of a metric with the name of the tokeniser, if the metric reads its tokens."""
    if metric.reads == "lines":
        return signature
    compounds = "+compounds" if metric.reads == "tokens_of_compounds" else ""
    moses = f"|sacremoses:{version('sacremoses')}" if tokenizer.startswith(MOSES) else ""
    name = build_tokenizer(MECAB).signature() if tokenizer == MECAB else tokenizer
    return signature.replace("tok:none", f"tok:{name}{compounds}{moses}")


def _parts(sides: Sequence[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    """Yield a few lines of all sides at a time."""
    for start in range(0, len(sides[0]), _LINES_AT_ONCE):
        yield [side[start : start + _LINES_AT_ONCE] for side in sides]


def _statistics_of(metric: Metric, sides: Sequence[Sequence[str]]) -> list:
    """Return the statistics of every line, from which sacrebleu computes the score of a corpus."""
    system, *references = sides
    return metric.build()._extract_corpus_statistics(system, references)


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return chrF [lines] of every single line, 0 to 100."""
    metric = METRICS[SECOND].build()
    pairs = zip(hypotheses, references, strict=True)
    return np.array([metric.sentence_score(hypothesis, [reference]).score for hypothesis, reference in pairs])
