"""Words that the input itself gives, with their positions in the source line."""

from collections.abc import Sequence


def join_with_blanks(words: Sequence[str]) -> tuple[str, dict[str, list]]:
    """Return the line of the words joined by blanks, and the words with their character offsets in it."""
    starts, ends, position = [], [], 0
    for word in words:
        starts.append(position)
        position += len(word)
        ends.append(position)
        position += 1
    return " ".join(words), {"text": list(words), "start_char": starts, "end_char": ends}
