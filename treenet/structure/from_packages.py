"""Trees of other packages: text in CoNLL-U, and objects of spaCy, Stanza and nltk. None of the packages is imported.

A leaf is a word as the package has it: a token of spaCy, a syntactic word of Stanza, a leaf of nltk.
"""

from collections.abc import Callable
from typing import Any

from treenet.structure.from_trees import Arcs, NumberedTree, in_normal_form, phrases_of
from treeproc.common.errors import UserError, as_list, check_flag, check_string, kind_of, quoted
from treeproc.trees.conllu import read_leaves
from treeproc.trees.dependency_trees import PhraseShape
from treeproc.trees.spans import SpanTree


def read_conllu(text: str, shape: PhraseShape) -> list[NumberedTree]:
    """Read the sentences of a text in CoNLL-U. Raises UserError with the line at fault."""
    if not isinstance(text, str):
        raise UserError(f"text must be a string, but is {kind_of(text)}; give the content of a file, as Path(NAME).read_text()")
    if text.strip() and not {"\t", "\n"} & set(text) and not text.lstrip()[:1].isdigit():
        raise UserError(f"text must be CoNLL-U, but is {quoted(text)}; give the content of a file, as Path(NAME).read_text()")
    lines = iter(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"))
    sentences = []
    for leaves in read_leaves(lines, "CoNLL-U"):
        tags = [universal or other for universal, other in zip(leaves.upos, leaves.xpos, strict=True)]
        sentences.append(Arcs(leaves.governors, leaves.deprels, tags, leaves.words))
    return phrases_of(sentences, shape)


def read_spacy(docs: Any, shape: PhraseShape) -> list[NumberedTree]:
    """Read a Doc with a tree for each of its sentences, a Span with one, or a list with one an item.

    Raises UserError for a document that no parser has read, and for an item of several sentences.
    """
    if hasattr(docs, "has_annotation"):
        return phrases_of([_spacy_arcs("docs", span) for span in _parsed("docs", docs).sents], shape)
    if hasattr(docs, "sents"):
        return phrases_of([_spacy_arcs("docs", docs)], shape)
    sentences = []
    for number, item in enumerate(as_list("docs", docs, "documents or spans of spaCy")):
        name = f"docs[{number}]"
        if not hasattr(item, "sents"):
            raise UserError(f"{name} must be a Doc or a Span of spaCy, but is {kind_of(item)}")
        if hasattr(item, "has_annotation"):
            spans = list(_parsed(name, item).sents)
            if len(spans) > 1:
                raise UserError(f"{name} has {len(spans)} sentences, but an example is one tree: give list(doc.sents)")
            item = item[:]
        sentences.append(_spacy_arcs(name, item))
    return phrases_of(sentences, shape)


def _parsed(name: str, doc: Any) -> Any:
    if len(doc) and not doc.has_annotation("DEP"):
        raise UserError(f"{name} has no arcs: read the text with a pipeline that has a parser")
    return doc


def _spacy_arcs(name: str, span: Any) -> Arcs:
    _parsed(name, span.doc)
    for word in span:
        if not span.start <= word.head.i < span.end:
            raise UserError(
                f"{name}: the head of word {word.i - span.start} is outside of the span; give whole sentences, as of doc.sents"
            )
    governors = [-1 if word.head.i == word.i else word.head.i - span.start for word in span]
    return Arcs(governors, [word.dep_ for word in span], [word.pos_ for word in span], [word.text for word in span])


def read_stanza(document: Any, shape: PhraseShape | None, *, collapse_unary: bool) -> list[NumberedTree]:
    """Read a Document with a tree for each of its sentences, a Sentence with one, or a list with one an item.

    Without a shape, the trees are the constituents. Raises UserError if a sentence lacks what is asked for.
    """
    check_flag("collapse_unary", collapse_unary)
    if hasattr(document, "sentences"):
        sentences = list(document.sentences)
    elif hasattr(document, "words"):
        sentences = [document]
    else:
        sentences = []
        for number, item in enumerate(as_list("document", document, "documents or sentences of Stanza")):
            found = getattr(item, "sentences", [item])
            if not all(hasattr(sentence, "words") for sentence in found):
                raise UserError(f"document[{number}] must be a Document or a Sentence of Stanza, but is {kind_of(item)}")
            if len(found) != 1:
                raise UserError(f"document[{number}] has {len(found)} sentences, but an example is one tree: give doc.sentences")
            sentences += found
    if shape is not None:
        return phrases_of([_stanza_arcs(number, sentence) for number, sentence in enumerate(sentences)], shape)
    out = []
    for number, sentence in enumerate(sentences):
        root, count = getattr(sentence, "constituency", None), len(sentence.words)
        if root is None:
            wanted = "give the pipeline the processor 'constituency', or set shape='flat' for phrases of its arcs"
            raise UserError(f"sentence {number} of the batch has no constituency tree: {wanted}")
        tags, tree = _walk(number, root, _stanza_parts)
        if len(tags) != count:
            raise UserError(f"sentence {number} of the batch has {count} words, but its constituency tree has {len(tags)}")
        out.append(in_normal_form(number, tags, tree, collapse_unary=collapse_unary))
    return out


def _stanza_arcs(number: int, sentence: Any) -> Arcs:
    if any(word.head is None for word in sentence.words):
        raise UserError(f"sentence {number} of the batch has no arcs: give the pipeline the processor 'depparse'")
    columns = [(word.head - 1, word.deprel or "", word.upos or word.xpos or "", word.text) for word in sentence.words]
    return Arcs(*map(list, zip(*columns, strict=True))) if columns else Arcs([], [], [], [])


def _stanza_parts(node: Any) -> tuple[str, list]:
    return node.label, [child if child.children else child.label for child in node.children]


def read_nltk(trees: Any, *, collapse_unary: bool) -> list[NumberedTree]:
    """Read one nltk.Tree, or a list of them. Raises UserError for a leaf that is not a word with a tag."""
    check_flag("collapse_unary", collapse_unary)
    given = [trees] if _is_node(trees) else as_list("trees", trees, "nltk trees")
    out = []
    for number, root in enumerate(given):
        if not _is_node(root):
            raise UserError(
                f"tree {number} of the batch must be an nltk.Tree, but is {kind_of(root)}; from_brackets reads strings"
            )
        out.append(in_normal_form(number, *_walk(number, root, _nltk_parts), collapse_unary=collapse_unary))
    return out


def _is_node(node: Any) -> bool:
    return callable(getattr(node, "label", None))


def _nltk_parts(node: Any) -> tuple[str, list]:
    return node.label(), list(node)


def _walk(number: int, root: Any, parts: Callable[[Any], tuple[str, list]]) -> tuple[list[str], SpanTree]:
    """Return the tags of the leaves, and the nodes. `parts` gives the label and the children of a node.

    A child is a node, a word, or a pair of a word and its tag, as chunks of nltk have it.
    """
    name = f"tree {number} of the batch"
    tags: list[str] = []
    tree = SpanTree([], [], [])
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, int):  # the end of this node
            tree.ends[node] = len(tags)
            continue
        if isinstance(node, tuple):
            tags.append(node[1])
            continue
        label, children = parts(node)
        check_string(f"{name}: the label of a node", label)
        if len(children) == 1 and isinstance(children[0], str):
            tags.append(label)
            continue
        _check_children(f"{name}: node {quoted(label)}", children)
        stack += [len(tree), *reversed(children)]
        tree.labels.append(label)
        tree.starts.append(len(tags))
        tree.ends.append(-1)
    return tags, tree


def _check_children(name: str, children: list) -> None:
    if not children:
        raise UserError(f"{name} has nothing below it")
    for child in children:
        if isinstance(child, str):
            raise UserError(f"{name} has the word {quoted(child)} beside others; give each word a node with its tag, as (DT the)")
        is_pair = isinstance(child, tuple) and len(child) == 2 and all(isinstance(part, str) for part in child)
        if not is_pair and not hasattr(child, "label"):
            raise UserError(f"{name} must have words or pairs of word and tag below it, but has {quoted(child)}")
