"""Trees of CoNLL-U, spaCy, Stanza and nltk: those that brackets and slow rules give; mistakes are one sentence.

The objects are those of the packages, made without their models.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from reference_dependency import ReferenceSentence
from strategies import trees
from test_api_trees import WITH_ROOT, check_same, name_labels
from test_dependency_trees import RELATIONS, TAGS, sentences

from treenet import TreeStructure, UserError
from treeproc.trees.spans import SpanTree, write_brackets

SHAPES = st.sampled_from(["flat", "left", "right", "layered"])
UNIVERSAL = [tag for tag in TAGS if tag not in ("NN", "VBD", "TO", "NNP")]


def conllu_of(governors, relations, tags, words) -> str:
    """One sentence, with a comment, an empty node and no multiword token."""
    rows = ["# sent_id = 1"]
    for number, (above, relation, tag, word) in enumerate(zip(governors, relations, tags, words, strict=True), start=1):
        rows.append(f"{number}\t{word}\t_\t{tag}\tXP\t_\t{above + 1}\t{relation}\t_\t_")
    return "\n".join([*rows, f"{len(words)}.1\tgone\t_\tNOUN\t_\t_\t_\t_\t_\t_"]) + "\n\n"


def check_nodes(found: TreeStructure, expected: list[list[tuple[int, int, str]]], num_leaves: list[int]) -> None:
    check_same(found, TreeStructure.from_spans(expected, num_leaves))
    assert found.labels == tuple(tuple(label for *_, label in nodes) for nodes in expected)


def reference(examples, shape) -> tuple[list, list[int]]:
    return [ReferenceSentence(*example, shape).tree("upos") for example in examples], [len(words) for *_, words in examples]


@num_examples(60)
@given(examples=st.lists(sentences(), min_size=1, max_size=3), shape=SHAPES)
def test_conllu_gives_the_phrases_of_the_rules(examples, shape):
    text = "".join(conllu_of(*example) for example in examples)
    check_nodes(TreeStructure.from_conllu(text, shape=shape), *reference(examples, shape))


def test_a_multiword_token_of_other_words_is_one_leaf():
    text = "\r\n".join(
        "\t".join((number, form, "_", tag, "_", "_", head, relation, "_", "_"))
        for number, form, tag, head, relation in (
            ("1-2", "im", "_", "_", "_"),
            ("1", "in", "ADP", "3", "case"),
            ("2", "dem", "DET", "3", "det"),
            ("3", "Haus", "NOUN", "0", "root"),
        )
    )
    check_nodes(TreeStructure.from_conllu(text), [[(0, 2, "NP")]], [2])
    check_nodes(TreeStructure.from_conllu("\ufeff" + text), [[(0, 2, "NP")]], [2])  # a file with a byte order mark


@num_examples(30)
@given(examples=st.lists(sentences(), min_size=1, max_size=3), shape=SHAPES, data=st.data())
def test_spacy_gives_the_phrases_of_the_rules(examples, shape, data):
    tokens = pytest.importorskip("spacy.tokens", reason="spacy is not installed: pip install spacy")
    examples = [
        (heads, relations, data.draw(st.lists(st.sampled_from(UNIVERSAL), min_size=len(heads), max_size=len(heads))), words)
        for heads, relations, _, words in examples
    ]
    docs = [spacy_doc(tokens, [example]) for example in examples]
    expected = reference(examples, shape)
    check_nodes(TreeStructure.from_spacy(docs, shape=shape), *expected)
    together = spacy_doc(tokens, examples)
    check_nodes(TreeStructure.from_spacy(together, shape=shape), *expected)  # one tree a sentence
    check_nodes(TreeStructure.from_spacy(list(together.sents), shape=shape), *expected)
    check_nodes(TreeStructure.from_spacy(docs[0][:], shape=shape), *reference(examples[:1], shape))


def spacy_doc(tokens, examples):
    """A parsed document of spaCy, in which the root is its own head."""
    from spacy.vocab import Vocab

    heads, relations, tags, words = [], [], [], []
    for own, *columns in examples:
        first = len(heads)
        heads += [first + (word if above < 0 else above) for word, above in enumerate(own)]
        for total, column in zip((relations, tags, words), columns, strict=True):
            total += column
    relations = ["ROOT" if head == word else relation for word, (head, relation) in enumerate(zip(heads, relations, strict=True))]
    return tokens.Doc(Vocab(), words=words, heads=heads, deps=relations, pos=tags)


@num_examples(30)
@given(examples=st.lists(sentences(), min_size=1, max_size=3), shape=SHAPES)
def test_stanza_gives_the_phrases_of_the_rules(examples, shape):
    document = stanza_document(examples)
    expected = reference(examples, shape)
    check_nodes(TreeStructure.from_stanza(document, shape=shape), *expected)
    check_nodes(TreeStructure.from_stanza(document.sentences, shape=shape), *expected)
    check_nodes(TreeStructure.from_stanza(document.sentences[0], shape=shape), *reference(examples[:1], shape))
    check_nodes(TreeStructure.from_stanza([stanza_document([one]) for one in examples], shape=shape), *expected)


def stanza_document(examples):
    pytest.importorskip("stanza", reason="stanza is not installed: pip install 'tree-attention[parse]'")
    from stanza.utils.conll import CoNLL

    return CoNLL.conll2doc(input_str="".join(conllu_of(*example) for example in examples))


def brackets_of(tree, traces=()) -> str:
    """The tree in brackets over words w0, w1, ...; those of `traces` are empty elements."""
    starts, ends = zip(*tree.leaf_spans, strict=True)
    tags = ["-NONE-" if leaf in traces else "T" for leaf in range(tree.num_leaves)]
    names = [f"{name}-SBJ" if number % 2 else name for number, name in enumerate(name_labels(tree))]
    return write_brackets(SpanTree(names, list(starts), list(ends)), [f"w{leaf}" for leaf in range(tree.num_leaves)], tags)


@num_examples(30)
@given(batch=st.lists(WITH_ROOT, min_size=1, max_size=3), collapse=st.booleans())
def test_constituents_of_stanza_and_nltk_are_those_of_brackets(batch, collapse):
    brackets = list(map(brackets_of, batch))
    expected = TreeStructure.from_brackets(brackets, collapse_unary=collapse)
    plain = [([-1] + [0] * (tree.num_leaves - 1), ["dep"] * tree.num_leaves, ["X"] * tree.num_leaves) for tree in batch]
    document = stanza_document([(*columns, [f"w{leaf}" for leaf in range(len(columns[0]))]) for columns in plain])
    from stanza.models.constituency.tree_reader import read_trees

    for sentence, text in zip(document.sentences, brackets, strict=True):
        (sentence.constituency,) = read_trees(text)
    check_both(TreeStructure.from_stanza(document, collapse_unary=collapse), expected)
    check_both(TreeStructure.from_stanza(document.sentences, collapse_unary=collapse), expected)
    nltk = pytest.importorskip("nltk", reason="nltk is not installed: pip install nltk")
    read = list(map(nltk.Tree.fromstring, brackets))
    check_both(TreeStructure.from_nltk(read, collapse_unary=collapse), expected)
    check_both(TreeStructure.from_nltk(list(map(nltk.ParentedTree.convert, read)), collapse_unary=collapse), expected)
    check_both(TreeStructure.from_nltk(read[0], collapse_unary=collapse), expected[0])


def check_both(found: TreeStructure, expected: TreeStructure) -> None:
    check_same(found, expected)
    assert found.labels == expected.labels


@num_examples(30)
@given(tree=trees(max_roots=1).filter(lambda tree: len(tree.spans) > 0), data=st.data())
def test_empty_elements_are_no_leaves(tree, data):
    """Taken out word by word, from the leaves of every node."""
    leaves = range(tree.num_leaves)
    kept = data.draw(st.sets(st.sampled_from(leaves), min_size=1))
    text = brackets_of(tree, set(leaves) - kept)
    spans = []
    for (start, end), name in zip(tree.leaf_spans, name_labels(tree), strict=True):
        below = [place for place, leaf in enumerate(sorted(kept)) if start <= leaf < end]
        if below:
            spans.append((below[0], below[-1] + 1, name))
    found = [TreeStructure.from_brackets([text], collapse_unary=False)]
    try:
        from nltk import Tree
    except ModuleNotFoundError:
        pass
    else:
        found.append(TreeStructure.from_nltk([Tree.fromstring(text)], collapse_unary=False))
    for structure in found:
        check_nodes(structure, [spans], [len(kept)])


def test_chunks_of_nltk_have_words_with_tags():
    nltk = pytest.importorskip("nltk", reason="nltk is not installed: pip install nltk")
    tagged = [("the", "DT"), ("dog", "NN"), ("ran", "VBD"), ("home", "RB")]
    chunks = nltk.RegexpParser("NP: {<DT><NN>}\nADVP: {<RB>}").parse(tagged)
    check_nodes(TreeStructure.from_nltk([chunks]), [[(0, 4, "S"), (0, 2, "NP"), (3, 4, "ADVP")]], [4])


def row(number: int, head: object, relation: str = "dep", tag: str = "NOUN") -> str:
    return f"{number}\tw{number}\t_\t{tag}\t_\t_\t{head}\t{relation}\t_\t_\n"


def words_of_spacy(heads=None, relations=("dep",) * 3):
    """Three words: without heads, unread by a parser."""
    from spacy.tokens import Doc
    from spacy.vocab import Vocab

    return Doc(Vocab(), words=["a", "b", "c"], heads=heads, deps=heads and list(relations), pos=["NOUN", "VERB", "PUNCT"])


def words_of_stanza():
    from stanza.models.common.doc import Document

    return Document([[{"text": "a", "id": 1}, {"text": "b", "id": 2}]])


def with_constituents(text: str):
    from stanza.models.constituency.tree_reader import read_trees

    document = words_of_stanza()
    (document.sentences[0].constituency,) = read_trees(text)
    return document


def nltk_tree(label, children):
    from nltk import Tree

    return Tree(label, children)


MISTAKES = {
    # CoNLL-U
    "text must be a string, but is a PosixPath; give the content": lambda: TreeStructure.from_conllu(Path("train.conllu")),
    "text must be a string, but is a list": lambda: TreeStructure.from_conllu([row(1, 0)]),
    "text must be CoNLL-U, but is 'train.conllu'; give the content of a file, as": lambda: TreeStructure.from_conllu(
        "train.conllu"
    ),
    "CoNLL-U, line 1: .* but found 1: '1 w1 0'": lambda: TreeStructure.from_conllu("1   w1   0"),
    "a batch must have at least one tree": lambda: TreeStructure.from_conllu("\n"),
    "CoNLL-U, line 2: the word is its own governor; the root has governor 0": lambda: TreeStructure.from_conllu(
        row(1, 2) + row(2, 2)
    ),
    "CoNLL-U, line 4: column 7 must be the number of the governor, but is '-1'": lambda: TreeStructure.from_conllu(
        row(1, 0) + "\n" + row(1, 1) + row(2, -1)
    ),
    "CoNLL-U, line 2: the arcs form a cycle": lambda: TreeStructure.from_conllu(row(1, 2) + row(2, 1)),
    "CoNLL-U, line 4: expected one word with governor 0, but this is one of 2$": lambda: TreeStructure.from_conllu(
        row(1, 0) + "\n" + row(1, 0) + row(2, 0) + row(3, 1)
    ),
    "sentence 0 of the batch: 2 words have no governor, but one must be the root$": lambda: TreeStructure.from_conllu(
        row(1, 0) + row(2, 0)
    ),
    "sentence 0 of the batch: shape='layered' reads universal relations, but word 1 has 'SBJ'; choose": lambda: (
        TreeStructure.from_conllu(row(1, 0) + row(2, 1, "SBJ"), shape="layered")
    ),
    "sentence 0 of the batch: shape='layered' reads universal tags, but no word has one; choose another shape": lambda: (
        TreeStructure.from_conllu(row(1, 0, tag="_"), shape="layered")
    ),
    "shape must be flat, left, right or layered, but is 'foo'": lambda: TreeStructure.from_conllu(row(1, 0), shape="foo"),
    # spaCy
    "docs must be a list of documents or spans of spaCy, but is a generator": lambda: TreeStructure.from_spacy(doc for doc in []),
    "docs must be a list of documents or spans of spaCy, but is one string": lambda: TreeStructure.from_spacy("a text"),
    r"docs\[0\] must be a Doc or a Span of spaCy, but is one string": lambda: TreeStructure.from_spacy(["a text"]),
    r"docs\[0\] has no arcs: read the text with a pipeline": lambda: TreeStructure.from_spacy([words_of_spacy()]),
    "docs has no arcs": lambda: TreeStructure.from_spacy(words_of_spacy()),
    r"docs\[0\] has 2 sentences, but an example is one tree: give list\(doc\.sents\)": lambda: TreeStructure.from_spacy(
        [words_of_spacy([0, 0, 2])]
    ),
    r"docs\[0\]: the head of word 0 is outside of the span; give whole sentences": lambda: TreeStructure.from_spacy(
        [words_of_spacy([2, 2, 2])[:2]]
    ),
    r"docs\[0\]: the head of word 1 is outside of the span": lambda: TreeStructure.from_spacy(
        [words_of_spacy([0, 2, 0])[1:]]  # right before it
    ),
    "sentence 0 of the batch: 2 words have no governor, but one must be the root": lambda: TreeStructure.from_spacy(
        [words_of_spacy([0, 0, 2])[:]]
    ),
    "'layered' reads universal relations, but word 0 has 'dobj'": lambda: TreeStructure.from_spacy(
        [words_of_spacy([1, 1, 1], ["dobj", "ROOT", "punct"])], shape="layered"
    ),
    # Stanza
    "document must be a list of documents or sentences of Stanza, but is one string": lambda: TreeStructure.from_stanza("a text"),
    r"document\[0\] must be a Document or a Sentence of Stanza, but is one string": lambda: TreeStructure.from_stanza(["a"]),
    "sentence 0 of the batch has no constituency tree: .*'constituency', or set shape='flat'": lambda: TreeStructure.from_stanza(
        words_of_stanza()
    ),
    "sentence 0 of the batch has no arcs: .* 'depparse'": lambda: TreeStructure.from_stanza(words_of_stanza(), shape="flat"),
    r"document\[0\] has 2 sentences, but an example is one tree: give doc\.sentences": lambda: TreeStructure.from_stanza(
        [stanza_document([([-1], ["root"], ["X"], ["a"])] * 2)]
    ),
    "sentence 0 of the batch has 2 words, but its constituency tree has 1": lambda: TreeStructure.from_stanza(
        with_constituents("(ROOT (NN a))")
    ),
    # nltk
    "trees must be a list of nltk trees, but is one string": lambda: TreeStructure.from_nltk("(S (N a))"),
    r"tree 0 of the batch must be an nltk\.Tree, but is one string; from_brackets reads": lambda: TreeStructure.from_nltk(
        ["(S (N a))"]
    ),
    "tree 0 of the batch: node 'NP' has the word 'the' beside others; .* as \\(DT the\\)": lambda: TreeStructure.from_nltk(
        [nltk_tree("NP", ["the", "dog"])]
    ),
    "tree 0 of the batch: node 'NP' has nothing below it": lambda: TreeStructure.from_nltk(
        [nltk_tree("S", [nltk_tree("NP", []), nltk_tree("V", ["ran"])])]
    ),
    "tree 0 of the batch: node 'NP' must have words or pairs of word and tag below it, but has 7": lambda: (
        TreeStructure.from_nltk([nltk_tree("NP", [7])])
    ),
    "tree 0 of the batch: the label of a node must be a string, but is None": lambda: TreeStructure.from_nltk(
        [nltk_tree(None, [nltk_tree("V", ["ran"])])]
    ),
    "tree 0 of the batch has no words, only empty elements$": lambda: TreeStructure.from_nltk(
        [nltk_tree("S", [nltk_tree("-NONE-", ["*"])])]
    ),
    "tree 0 of the batch has no words, only empty": lambda: TreeStructure.from_brackets(["(S (-NONE- *))"]),
    "collapse_unary must be True or False, but is 'no'": lambda: TreeStructure.from_nltk([], collapse_unary="no"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_sentence(message):
    try:
        with pytest.raises(UserError, match=message) as error:
            MISTAKES[message]()
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: pip install {missing.name}")
    assert not re.search(r"\n|--|workflows/", str(error.value))


def test_relations_of_the_cases_are_universal():
    from treenet.structure.from_trees import UNIVERSAL_RELATIONS

    assert {relation.partition(":")[0] for relation in RELATIONS} <= UNIVERSAL_RELATIONS and len(UNIVERSAL_RELATIONS) == 37
