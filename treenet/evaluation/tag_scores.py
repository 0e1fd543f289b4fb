"""Scores of lines by the tag in front of their source, such as the language to write (`parser.tags`)."""

from collections.abc import Collection, Sequence

from treenet.tasks.translation_metrics import COMPARED, METRICS

UNTAGGED = "none"


def score_tags(sources: Sequence[str], tags: Collection[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[dict]:
    """Return the number of examples and the compared metrics of the lines with each tag, and of the lines without a tag.

    Tags are in alphabetical order, with `UNTAGGED` last. A tag without lines is left out.
    """
    first = [source.partition(" ")[0] for source in sources]
    of_line = [word if word in tags else UNTAGGED for word in first]
    found = []
    for tag in (*sorted(tags), UNTAGGED):
        rows = [row for row, own in enumerate(of_line) if own == tag]
        if rows:
            lines, correct = [hypotheses[row] for row in rows], [[references[row] for row in rows]]
            scores = {name: METRICS[name].build(True).corpus_score(lines, correct).score for name in COMPARED}
            found.append({"tag": tag, "num_examples": len(rows), **scores})
    return found


def without_tags(sources: Sequence[str], tags: Collection[str]) -> list[str]:
    """Return lines without the tag in front of them."""
    split = (source.partition(" ") for source in sources)
    return [rest if first in tags else f"{first}{blank}{rest}" for first, blank, rest in split]


def format_tags(scores: Sequence[dict]) -> str:
    """Return a table with a line for each tag."""
    shown = [name for name in COMPARED if all(name in row for row in scores)]
    lines = [f"{'tag of the source':22}{'lines':>7}" + "".join(f"{METRICS[name].column:>8}" for name in shown)]
    for row in scores:
        lines.append(f"  {row['tag']:20}{row['num_examples']:7d}" + "".join(f"{row[name]:8.2f}" for name in shown))
    return "\n".join(lines)
