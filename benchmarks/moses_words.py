"""Tags and trees of Moses tokens, as they are and as treebanks write them, against gold treebanks.

    python benchmarks/moses_words.py --brackets gum/test.mrg.gz --conllu gum/test.conllu.gz ewt/en_ewt-ud-test.conllu.gz \\
        --moses iwslt/train.en.gz iwslt/valid.en.gz iwslt/test.en.gz

Gold sentences are put through sacremoses. A gold word has the tag of the leaf that holds its last character. Brackets are
spans of characters, without blanks and punctuation. `--moses` files, of Moses tokens, have no gold tags: of the negations in them
those are counted that are tagged as a verb and RB.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import sacremoses
from measure import emit

from treeproc.parsers import Given, ParserConfig, build_parser, read_trees
from treeproc.readers import FORMATS, read_lines
from treeproc.readers.line_forms import undo_moses
from treeproc.stages.preprocess import SAMPLE
from treeproc.trees.scores import PUNCTUATION
from treeproc.trees.spans import ROOT_LABELS, SpanTree, plain_label

FORMS = {"tokens": False, "treebank words": True}
QUOTES = {'"', "'", "``", "''", "“", "”", "‘", "’"}
CLITICS = {mark + ending for mark in "'’" for ending in ("s", "m", "d", "re", "ve", "ll")}
NEGATION = re.compile(r"\w+n ['’]t")
QUICK_LINES = 2000


def places(words: Sequence[str]) -> list[tuple[int, int]]:
    """First and last character of every word, counted without blanks."""
    out, at = [], 0
    for word in words:
        size = len("".join(word.split()))
        out.append((at, at + size))
        at += size
    return out


def kind(word: str) -> str:
    word = word.lower()
    if word in ("n't", "n’t"):
        return "negation"
    return "clitic" if word in CLITICS else "quotation mark" if word in QUOTES else "other"


def brackets(tree: SpanTree, spans: Sequence[tuple[int, int]], ignored: set[int]) -> Counter:
    out: Counter = Counter()
    for label, start, end in zip(tree.labels, tree.starts, tree.ends, strict=True):
        inside = [at for at in range(spans[start][0], spans[end - 1][1]) if at not in ignored]
        if inside and label not in ROOT_LABELS:
            out[plain_label(label), inside[0], inside[-1]] += 1
    return out


def score_tags(name: str, gold: Sequence[dict], rows: Sequence[dict], *, trees: bool) -> None:
    """`rows` are Moses tokens of the gold sentences."""
    right, all_ = {form: Counter() for form in FORMS}, Counter()
    f1 = {form: Counter() for form in FORMS}
    parsed = {form: parse(rows, treebank_words) for form, treebank_words in FORMS.items()}
    for number, sentence in enumerate(gold):
        ((tags, tree),) = read_trees(sentence)
        words, spans = sentence["words"]["text"], places(sentence["words"]["text"])
        kinds = [kind(word) for word in words]
        for i, (before, after) in enumerate(pairwise(kinds)):
            if after == "negation" and before == "other":
                kinds[i] = "verb before a negation"
        all_.update(kinds)
        ignored = {at for (a, b), tag in zip(spans, tags, strict=True) if tag in PUNCTUATION for at in range(a, b)}
        for form in FORMS:
            leaves = parsed[form][number]
            found = places(leaves.words["text"])
            tag_at = {b - 1 - k: tag for (a, b), tag in zip(found, leaves.words["pos_tag"], strict=True) for k in range(b - a)}
            right[form].update(
                k for k, (a, b), tag in zip(kinds, spans, tags, strict=True)
                if tag_at[a if k == "verb before a negation" else b - 1] == tag
            )  # fmt: skip
            if trees:
                sides = ((tree, spans), (read_trees(vars(leaves))[0][1], found))
                one, other = (brackets(*side, ignored) for side in sides)
                f1[form].update({"both": one.total() + other.total(), "matched": (one & other).total()})
    for form in FORMS:
        emit("moses_words", f"{name}, {form}", "xpos", round(100 * right[form].total() / all_.total(), 2))
        for one in sorted(set(all_) - {"other"}):
            emit("moses_words", f"{name}, {form}", f"{one}s tagged right", right[form][one], of=all_[one])
        if f1[form]["both"]:
            emit("moses_words", f"{name}, {form}", "f1", round(200 * f1[form]["matched"] / f1[form]["both"], 2))


def parse(rows: Sequence[dict], treebank_words: bool):
    parser = build_parser(ParserConfig(name="shipped", device="cpu", treebank_words=treebank_words))
    return parser.parse([row["source"] for row in rows], [Given(row["words"]) for row in rows])


def count_negations(name: str, rows: Sequence[dict]) -> None:
    rows = [row for row in rows if NEGATION.search(row["source"])]
    for form, treebank_words in FORMS.items():
        right = total = 0
        for leaves in parse(rows, treebank_words):
            pairs = zip(leaves.words["text"], leaves.words["pos_tag"], strict=True)
            for (verb, tag), (text, negation) in pairwise(pairs):
                if NEGATION.fullmatch(f"{verb} {text}"):
                    total += 1
                    right += (tag == "MD" or tag.startswith("VB")) and negation == "RB"
        emit("moses_words", f"{name}, {form}", "negations tagged verb and RB", right, of=total)


def to_moses(sentences: Sequence[dict]) -> list[dict]:
    tokenizer = sacremoses.MosesTokenizer("en")
    return [undo_moses({"source": " ".join(tokenizer.tokenize(sentence["source"]))}) for sentence in sentences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brackets", type=Path, help="gold trees of the first --conllu file's sentences")
    parser.add_argument("--conllu", type=Path, nargs="*", default=[], help="gold tags and the raw text")
    parser.add_argument("--moses", type=Path, nargs="*", default=[], help="lines of Moses tokens")
    parser.add_argument("--quick", action="store_true", help="negations of the shipped sample alone")
    options = parser.parse_args()
    if options.quick:
        sample = [{"source": line} for line in read_lines([SAMPLE / "train.en.gz"]) if "n't" in line][:QUICK_LINES]
        count_negations("sample", to_moses(sample))
        return
    for number, path in enumerate(options.conllu):
        gold = list(FORMATS["conllu"].read([path], []))
        if has_trees := number == 0 and options.brackets is not None:
            trees = FORMATS["brackets"].read([options.brackets], [])
            gold = [row | {"trees": tree["trees"]} for row, tree in zip(gold, trees, strict=True)]
        score_tags(path.name, gold, to_moses(gold), trees=has_trees)
    if options.moses:
        rows = [undo_moses({"source": line}) for line in read_lines(options.moses)]
        count_negations("moses files", rows)


if __name__ == "__main__":
    main()
