"""Texts for readers: well-formed, damaged, or pieces in any order. Every function draws from the given `Random`."""

from random import Random

WORDS = ["a", "der", "-LRB-", "-NONE-", "NP", "NP-SBJ-1", "3", "\\/", "½", "8\u00a01", "\u2028", "*", "_"]


def nested(random: Random, labels: list[str], words: list[str], depth: int) -> str:
    """Return well-formed brackets."""
    if depth == 0 or random.random() < 0.3:
        return f"({random.choice(labels)} {random.choice(words)})"
    children = " ".join(nested(random, labels, words, depth - 1) for _ in range(random.randint(1, 3)))
    return f"({random.choice(labels)} {children})"


def _mutated(random: Random, text: str, noise: str) -> str:
    """Return the text. Half of the time, one or two pieces are cut out or replaced by noise."""
    for _ in range(random.choice([0, 0, 1, 2])):
        start = random.randint(0, len(text))
        text = text[:start] + random.choice(["", *noise]) + text[start + random.randint(0, 12) :]
    return text


def brackets(random: Random, labels: list[str], words: list[str]) -> str:
    """Return trees, damaged trees, or brackets and words in any order."""
    if random.random() < 0.3:
        return " ".join(random.choices(["(", ")", "(", ")", " ", "\n", *labels, *words], k=random.randint(0, 25)))
    trees = (nested(random, labels, words, random.randint(0, 4)) for _ in range(random.randint(1, 3)))
    return _mutated(random, "\n".join(trees), "() \n\t\u00a0x")


def conllu(random: Random) -> str:
    """Return sentences, damaged sentences, or rows of any fields in any order."""
    comments = ["# text = im do n't", "# text = don't", "# newdoc", "#", ""]
    miscs = ["_", "SpaceAfter=No", "Gloss=a|SpaceAfter=No"]
    if random.random() < 0.4:
        numbers = ["1", "2", "3", "1-2", "2-3", "1.1", "x", "99999999999", "3-1"]
        forms, governors = ["im", "in", "dem", "do", "n't", "don't", "a b", "", "_"], ["0", "1", "2", "3", "4", "-1", "_", "²"]
        rows = [
            _row(random.choice(numbers), random.choice(forms), random.choice(governors), random.choice(miscs)) for _ in range(4)
        ]
        return "\n".join(random.sample([*rows, *comments], random.randint(0, 5)))
    # Governors come before their words, so there is no cycle until something is cut.
    words = [
        _row(i, random.choice(["im", "don't", "a b"]), random.randrange(i), random.choice(miscs))
        for i in range(1, random.randint(2, 6))
    ]
    if random.random() < 0.3:
        words.insert(0, _row("1-2", random.choice(["imdon't", "im"]), "_", "_"))
    if random.random() < 0.2:
        words.insert(0, random.choice(comments))
    return _mutated(random, "\n".join(words), "\t\n-.0#\u2028")


def _row(number: object, form: str, governor: object, misc: str) -> str:
    return f"{number}\t{form}\tl\tX\tX\t_\t{governor}\tdep\t_\t{misc}"


def sgml(random: Random) -> str:
    """Return segments, damaged segments, or tags in any order."""
    pieces = ['<doc docid="d">', "</doc>", '<seg id="1">', "<seg>", "</seg>", "&amp;", "&#xD800;", "&#99;", "a", "\n", "<"]
    if random.random() < 0.5:
        return "".join(random.choices(pieces, k=random.randint(0, 12)))
    text = "".join(f"<seg id={i}>{''.join(random.choices(pieces[5:], k=3))}</seg>\n" for i in range(random.randint(1, 3)))
    return _mutated(random, f"<doc docid='d'>\n{text}</doc>", '<>&\n"')
