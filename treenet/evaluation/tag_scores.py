"""Scores of lines by the tag in front of their source, such as the language to write (`parser.tags`)."""

from collections.abc import Collection, Sequence

from sacrebleu.metrics import BLEU, CHRF

UNTAGGED = "none"


def score_tags(sources: Sequence[str], tags: Collection[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[dict]:
    """Return the number of examples, corpus BLEU (13a) and chrF of the lines with each tag, and of the lines without a tag.

    Tags are in alphabetical order, with `UNTAGGED` last. A tag without lines is left out.
    """
    first = [source.partition(" ")[0] for source in sources]
    of_line = [word if word in tags else UNTAGGED for word in first]
    found = []
    for tag in (*sorted(tags), UNTAGGED):
        rows = [row for row, own in enumerate(of_line) if own == tag]
        if rows:
            lines, correct = [hypotheses[row] for row in rows], [[references[row] for row in rows]]
            bleu, chrf = (metric.corpus_score(lines, correct).score for metric in (BLEU(tokenize="13a", force=True), CHRF()))
            found.append({"tag": tag, "num_examples": len(rows), "bleu": bleu, "chrf": chrf})
    return found


def without_tags(sources: Sequence[str], tags: Collection[str]) -> list[str]:
    """Return lines without the tag in front of them."""
    split = (source.partition(" ") for source in sources)
    return [rest if first in tags else f"{first}{blank}{rest}" for first, blank, rest in split]


def format_tags(scores: Sequence[dict]) -> str:
    """Return a table with a line for each tag."""
    lines = [f"{'tag of the source':22}{'lines':>7}{'BLEU':>8}{'chrF':>8}"]
    lines += [f"  {row['tag']:20}{row['num_examples']:7d}{row['bleu']:8.2f}{row['chrf']:8.2f}" for row in scores]
    return "\n".join(lines)
