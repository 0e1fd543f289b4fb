"""Which pairs stay. Every pair that goes has a reason, and the index counts them."""

from pydantic import Field, PositiveInt

from treeproc.settings import Settings


class FilterConfig(Settings):
    """Length limits hold for the training split alone; a pair with an empty side is always dropped."""

    max_words: PositiveInt = Field(250, description="training pairs with more blank-separated words on a side are dropped")
    max_word_chars: PositiveInt = Field(1000, description="training pairs with a longer word are dropped")


def drop_reason(source: str, target: str, split: str, config: FilterConfig) -> str | None:
    """Why a pair is dropped, or None when it stays."""
    for side, line in (("source", source), ("target", target)):
        if not line:
            return f"empty_{side}"
        if split == "train":
            words = line.split()
            if len(words) > config.max_words:
                return f"{side}_too_long"
            if max(map(len, words)) > config.max_word_chars:
                return f"{side}_word_too_long"
    return None
