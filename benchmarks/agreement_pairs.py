"""Minimal pairs of subject-verb agreement as Penn Treebank trees, made from templates.

    python benchmarks/agreement_pairs.py simple > simple.mrg
    python workflows/score_lm.py --out RUN 'pairs.files=[simple.mrg]'

Lines 2n - 1 and 2n are a pair: the right sentence, and the same with the verb in the other number. Both have the same tree, so it
gives a grammar no hint. The tags differ, and no language model reads them. The kinds:

- pronoun: "He is here"
- simple: "The boy is here"
- phrase: "The boy with the dogs is here". The noun before the verb has the other number.
- clause: "The boy who likes the dogs is here". The same, in a relative clause.

All combinations of the words below are written, 20, 48 or 144 pairs a kind. The words are frequent in the shipped sample.
"""

import argparse
import itertools
from collections.abc import Iterator

NOUNS = [
    ("boy", "boys"),
    ("girl", "girls"),
    ("teacher", "teachers"),
    ("student", "students"),
    ("friend", "friends"),
    ("man", "men"),
]
OBJECTS = [("dog", "dogs"), ("book", "books"), ("car", "cars")]
VERBS = {
    ("is", "are"): ("(ADVP (RB here))", "(ADJP (JJ tired))"),
    ("was", "were"): ("(ADJP (JJ right))",),
    ("has", "have"): ("(NP (DT a) (NN problem))",),
}
LIKES = ("likes", "like")
PRONOUNS = [("He", False), ("She", False), ("It", False), ("We", True), ("They", True)]
KINDS = ("pronoun", "simple", "phrase", "clause")


def noun_phrase(article: str, noun: str, plural: bool) -> str:
    return f"(NP (DT {article}) ({'NNS' if plural else 'NN'} {noun}))"


def verb_form(forms: tuple[str, str], plural: bool) -> str:
    return f"({'VBP' if plural else 'VBZ'} {forms[plural]})"


def subjects(kind: str) -> Iterator[tuple[str, bool]]:
    """Subjects, and whether they are plural."""
    if kind == "pronoun":
        yield from ((f"(NP (PRP {pronoun}))", plural) for pronoun, plural in PRONOUNS)
        return
    for noun, plural in itertools.product(NOUNS, (False, True)):
        head = noun_phrase("The", noun[plural], plural)
        if kind == "simple":
            yield head, plural
            continue
        for other in OBJECTS:
            attractor = noun_phrase("the", other[not plural], not plural)
            clause = f"(SBAR (WHNP (WP who)) (S (VP {verb_form(LIKES, plural)} {attractor})))"
            yield f"(NP {head} {f'(PP (IN with) {attractor})' if kind == 'phrase' else clause})", plural


def pairs(kind: str) -> Iterator[tuple[str, str]]:
    """The right and the wrong sentence of every pair."""
    for (subject, plural), (forms, rests) in itertools.product(subjects(kind), VERBS.items()):
        for rest in rests:
            right, wrong = (f"(S {subject} (VP {verb_form(forms, number)} {rest}))" for number in (plural, not plural))
            yield right, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    for pair in pairs(parser.parse_args().kind):
        print(*pair, sep="\n")


if __name__ == "__main__":
    main()
