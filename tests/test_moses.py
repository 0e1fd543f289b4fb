"""Moses tokens to plain text and places: every escape undone once, every token where it says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeproc.readers.moses import undo_moses, unescape

ESCAPES = {"&": "&amp;", "|": "&#124;", "<": "&lt;", ">": "&gt;", "'": "&apos;", '"': "&quot;", "[": "&#91;", "]": "&#93;"}


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("it &apos;s &quot; R &amp; D &quot;", ["it", "'s", '"', "R", "&", "D", '"']),
        ("well @-@ known &#91; 1 &#93; a &#124; b &lt;x&gt;", ["well", "-", "known", "[", "1", "]", "a", "|", "b", "<x>"]),
        ("&amp;quot; &amp;amp;", ["&quot;", "&amp;"]),  # once: an escape that stood in the text stays text
        ("&copy; a@-@b @-@x", ["&copy;", "a@-@b", "@-@x"]),
        ("", []),
    ],
)
def test_escapes(line, tokens):
    assert unescape(line) == tokens


@given(st.lists(st.text(st.sampled_from("ab&|<>'\"[]-;ä "), min_size=1).filter(lambda t: t == t.replace(" ", "")), max_size=8))
@settings(deadline=None, max_examples=200)
def test_tokens_stand_where_they_say(tokens):
    escaped = ["@-@" if token == "-" else "".join(ESCAPES.get(c, c) for c in token) for token in tokens]
    row = undo_moses({"source": " ".join(escaped), "target": " ".join(escaped)})
    words = row["words"]
    assert words["text"] == tokens and row["source"] == row["target"] == " ".join(tokens)
    assert [row["source"][a:b] for a, b in zip(words["start_char"], words["end_char"], strict=True)] == tokens
