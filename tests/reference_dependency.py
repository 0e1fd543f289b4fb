"""Phrases from arcs, one sentence and one head at a time: the slow, obvious form of `treeproc.trees.dependency_trees`."""

from treeproc.trees.dependency_trees import _ARGUMENTS, _NOMINAL, _PHRASES, _SUBJECTS, _UNIVERSAL, CLOSING, OPENING

CORE, MODIFIERS, CASE, PREDICATE, AUXILIARIES, CLAUSE, MARK, COORDINATION = range(1, 9)
NAMES = {CASE: "PP", PREDICATE: "VP", AUXILIARIES: "VP", CLAUSE: "S", MARK: "SBAR"}


def reference_projective(governors):
    """Lift the shortest, leftmost arc that is not projective until there is none: (governors, lifts)."""
    governors, lifts = list(governors), 0

    def below(head):
        found = {head}
        while grown := {word for word, above in enumerate(governors) if above in found} - found:
            found |= grown
        return found

    while True:
        crossing = [
            (abs(word - head), min(word, head), word)
            for word, head in enumerate(governors)
            if head >= 0 and not set(range(min(word, head) + 1, max(word, head))) <= below(head)
        ]
        if not crossing:
            return governors, lifts
        word = min(crossing)[2]
        governors[word] = governors[governors[word]]
        lifts += 1


def reference_contraction(governors, leaf_of):
    """By the definition: the governor of every leaf, and its word with the fewest arcs to the root, the first of equal ones."""

    def arcs_to_root(word):
        return 0 if governors[word] < 0 else 1 + arcs_to_root(governors[word])

    above, topmost = [], []
    for leaf in range(max(leaf_of) + 1):
        own = [word for word in range(len(leaf_of)) if leaf_of[word] == leaf]
        best = min(map(arcs_to_root, own))
        topmost.append(next(word for word in own if arcs_to_root(word) == best))
        above.append(-1 if governors[topmost[-1]] < 0 else leaf_of[governors[topmost[-1]]])
    return above, topmost


class ReferenceSentence:
    """One sentence: lists of governors, relations, tags and words."""

    def __init__(self, governors, relations, tags, words, shape):
        self.governors, self.lifted = reference_projective(governors)
        self.relations = [name.partition(":")[0] for name in relations]
        self.tags, self.words, self.shape = [_UNIVERSAL.get(tag, tag) for tag in tags], words, shape
        size = range(len(words))
        self.punctuation = {i for i in size if self.relations[i] == "punct" and i not in self.governors}
        self.pairs = {}
        for head in size:
            inside = self.below(head) - self.punctuation
            if inside:
                left, right = min(inside) - 1, max(inside) + 1
                pair = {left, right}
                own = pair <= self.punctuation and all(self.governors[i] == head for i in pair)
                if own and (words[left], words[right]) in zip(OPENING, CLOSING, strict=True):
                    self.pairs[head] = pair
        self.edges = set().union(*self.pairs.values()) if self.pairs else set()
        if shape == "layered":
            self.governors = [self.joined(i) for i in size]

    def below(self, head):
        return {head}.union(*(self.below(i) for i, above in enumerate(self.governors) if above == head))

    def joined(self, word):
        head = self.governors[word]
        joins = self.relations[word] == "cc" and head >= 0 and self.relations[head] == "conj" and self.governors[head] >= 0
        begins = joins and min(self.below(head) - (self.punctuation - self.edges)) == word
        return self.governors[head] if begins else head

    def dependents(self, head):
        return [i for i, above in enumerate(self.governors) if above == head and i not in self.punctuation]

    def layer(self, word, head):
        relation, tag, left = self.relations[word], self.tags[word], word < head
        verb = self.tags[head] in ("VERB", "AUX")
        adjective = self.tags[head] == "ADJ"
        children = [self.relations[i] for i, above in enumerate(self.governors) if above == head]
        clause = verb or any(name in (*_SUBJECTS, "cop") for name in children)
        if relation in ("conj", "cc", "parataxis", "list"):
            return COORDINATION
        if relation == "mark":
            return AUXILIARIES if tag == "PART" else MARK
        if relation == "case":
            return CASE if left or tag == "ADP" else CORE
        if relation in ("aux", "cop") or (clause and left and relation == "advmod" and tag == "PART"):
            return AUXILIARIES
        if not clause:
            flat = relation in ("flat", "fixed", "compound", "goeswith", "nummod")
            return CORE if left or flat else MODIFIERS
        if left and relation in _SUBJECTS:
            return CLAUSE
        if verb:
            return PREDICATE if not left or relation in ("advmod", "compound") else CLAUSE
        inner = relation in ("det", "amod", "nummod", "compound", "flat", "fixed", "goeswith", "nmod")
        if left:
            return CORE if inner or relation == "advmod" else CLAUSE
        inner |= relation in ("acl", "appos") or (adjective and relation in ("obl", "xcomp", "ccomp"))
        if not inner:
            return PREDICATE
        return CORE if relation in ("flat", "fixed", "compound", "goeswith", "nummod") else MODIFIERS

    def groups(self, head):
        """Dependents of a head in groups, those that attach first in front: [(layer, dependents)]."""
        found = self.dependents(head)
        left, right = [i for i in found if i < head][::-1], [i for i in found if i > head]
        if self.shape == "flat":
            return [(0, found)] if found else []
        if self.shape in ("left", "right"):
            ordered = left + right if self.shape == "left" else right + left
            return [(0, [i]) for i in ordered]
        layers = {}
        for side in (left, right):
            outward = 0
            for i in side:
                outward = max(outward, self.layer(i, head))
                layers.setdefault(outward, []).append(i)
        return sorted(layers.items())

    def nodes(self, head, top):
        """(start, end, label) of the phrases of a head, from the inside out."""
        groups = self.groups(head)
        tag, relation = self.tags[head], self.relations[head]
        label = _PHRASES.get(tag, "X")
        out, covered = [], {head}
        used = [layer for layer, _ in groups]
        if self.shape == "layered" and head not in self.punctuation:
            if not groups:
                alone = (tag in _NOMINAL and relation in _ARGUMENTS) or (relation == "advmod" and tag == "ADV")
            else:
                alone = (tag in _NOMINAL and CORE not in used) or (tag in ("VERB", "AUX") and not {CORE, PREDICATE} & set(used))
            if alone:
                out.append((head, head + 1, label))
        for layer, group in groups:
            for i in group:
                covered |= self.below(i) - (self.punctuation - self.edges)
            if self.shape == "layered":
                label = NAMES.get(layer, label)
            elif any(self.relations[i] in _SUBJECTS for i in group):
                label = "S"
            out.append((min(covered), max(covered) + 1, label))
        if head in self.pairs:
            out.append((min(self.pairs[head]), max(self.pairs[head]) + 1, "PRN"))
        if top:
            out = [*out[:-1], (0, len(self.words), out[-1][2] if out else label)]
        return out

    def tree(self, labels):
        """[(start, end, label)] in pre-order."""
        if self.governors.count(-1) > 1:
            return [(0, len(self.words), self.relations[0] if labels == "deprel" else "X")]
        found = []
        for head, above in enumerate(self.governors):
            for start, end, label in self.nodes(head, above == -1):
                found.append((start, end, self.relations[head] if labels == "deprel" else label))
        return sorted(found, key=lambda node: (node[0], -node[1]))
