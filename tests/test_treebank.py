"""Treebanks in one normal form, against trees written by hand."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_encoding import check_tree

from treeproc.common.settings import UserError
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.extras.parser_training.corpus import (
    Files,
    Treebank,
    TreebankConfig,
    detokenise,
    read_treebank,
    tagged,
    tagged_splits,
    texts,
    with_arcs,
)
from treeproc.extras.parser_training.job import possible_models, read_treebanks
from treeproc.extras.parser_training.treebank import (
    Notation,
    Retag,
    Tagged,
    Tree,
    conllu_of,
    plain_tree,
    sentences_in,
    trees_in,
    trees_of,
)
from treeproc.readers.numbered_lines import read_texts
from treeproc.trees.spans import SpanTree, parents_and_subtree_ends

PLAIN = Notation()


def read(folder: Path, text: str, notation: Notation = PLAIN) -> list[Tree]:
    (folder / "a.mrg").write_text(text)
    return trees_in(read_texts([folder / "a.mrg"]), notation)


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        # Function tags, indices and gaps go, the empty label is ROOT.
        ("( (S (NP-SBJ-1 (PRP It)) (VP=2 (VBZ is))) )", "(ROOT (S (NP (PRP It)) (VP (VBZ is))))"),
        # Traces go, and the phrases that they leave empty; two words stay.
        (
            "( (S (NP-SBJ-1 (PRP We)) (VP (VBD tried) (S (NP-SBJ (-NONE- *-1)) (VP (-NONE- *T*))) (. .))) )",
            "(ROOT (S (NP (PRP We)) (VP (VBD tried) (. .))))",
        ),
        # What a trace leaves of adjunction, NP over NP, is one NP; NP over S over NP is not.
        ("(TOP (NP (NP (NN a)) (SBAR (-NONE- 0))))", "(ROOT (NP (NN a)))"),
        ("(VROOT (S (NP (NN a))))", "(ROOT (S (NP (NN a))))"),  # as in TIGER
        ("(TOP (NP (S (NP (NN a)))))", "(ROOT (NP (S (NP (NN a)))))"),
        # NP over NP and more words stays.
        ("(ROOT (NP (NP (NN a)) (PP (IN of))))", "(ROOT (NP (NP (NN a)) (PP (IN of))))"),
        # Several trees, or bare words, under one root.
        ("(ROOT (S (NN a)) (. .))", "(ROOT (S (NN a)) (. .))"),
        ("(S (NN a))", "(ROOT (S (NN a)))"),
        ("(NN a)", "(ROOT (NN a))"),
        # Brackets are words; as parts of words they are escaped too.
        ("(X (-LRB- -LRB-) (LS -LRB-a-RRB-) (-RRB- ]))", "(ROOT (X (-LRB- -LRB-) (LS -LRB-a-RRB-) (-RRB- ])))"),
        # A sentence that is a trace alone is no sentence.
        ("(S (NP (-NONE- *)))", ""),
    ],
)
def test_plain_trees(tmp_path, raw, plain):
    text = trees_of(read(tmp_path, raw))
    assert text == (f"{plain}\n" if plain else "")
    assert trees_of(read(tmp_path, text)) == text


def test_words_are_not_escaped(tmp_path):
    (tree,) = read(tmp_path, "(X (-LRB- -LRB-) (LS -LRB-a-RRB-) (SYM and\\/or))")
    assert tree.words == ["(", "(a)", "and/or"] and tree.tags == ["-LRB-", "LS", "SYM"]


def test_notation(tmp_path):
    notation = Notation(
        labels={"CAPTION": "", "NML": "", "CIT": "PRN"},
        tags=[Retag(tag=",", words="[^,]+", to=":"), Retag(tag="HYPH", words="/", to="SYM")],
    )
    raw = "((CAPTION (NP (NP (NML (NN a) (HYPH /) (NN b)) (HYPH -) (NN c)) (, ,) (CIT-X (, ;) (CD 1)))))"
    plain = "(ROOT (NP (NP (NN a) (SYM /) (NN b) (HYPH -) (NN c)) (, ,) (PRN (: ;) (CD 1))))\n"
    assert trees_of(read(tmp_path, raw, notation)) == plain
    # What was between two nodes of one label is gone, so one of them is.
    assert trees_of(read(tmp_path, "((NP (NML (NP (NN a)))))", notation)) == "(ROOT (NP (NN a)))\n"


def test_notation_by_phrase_and_words_taken_out(tmp_path):
    notation = Notation(tags=[Retag(tag="TO", below="PP", to="IN"), Retag(tag="CODE", to=""), Retag(tag=".", words="-?/", to="")])
    raw = "((S (CODE <TURN>) (VP (VB go) (PP-DIR (TO to) (NP (NN bed))) (S (VP (TO to) (VP (VB rest))))) (. /)))\n((CODE x))"
    plain = "(ROOT (S (VP (VB go) (PP (IN to) (NP (NN bed))) (S (VP (TO to) (VP (VB rest)))))))\n"
    assert trees_of(read(tmp_path, raw, notation)) == plain  # nothing is left of the second tree


LABELS = st.sampled_from(["NP", "NP-SBJ", "VP", "", "ROOT", "NML", "S"])


@given(st.lists(st.tuples(LABELS, st.integers(0, 6), st.integers(1, 7)), max_size=9))
def test_plain_trees_are_trees(nodes):
    """One ROOT, over all words; a tree; never a node right over its like; every plain label that was there, on its span."""
    spans: list[tuple[str, int, int]] = []
    for label, start, end in sorted(nodes, key=lambda n: (n[1], -n[2])):
        if start < end and all(b <= start or (a <= start and end <= b) for _, a, b in spans):
            spans.append((label, start, end))
    tree = plain_tree(SpanTree(*(list(column) for column in zip(*spans, strict=True))) if spans else SpanTree([], [], []), 7)
    check_tree(tree, 7)
    assert (tree.labels[0], tree.starts[0], tree.ends[0]) == ("ROOT", 0, 7) and tree.labels.count("ROOT") == 1
    found = list(zip(tree.labels, tree.starts, tree.ends, strict=True))
    assert set(found[1:]) == {(label.partition("-")[0], a, b) for label, a, b in spans if label not in ("", "ROOT")}
    for node, parent in enumerate(parents_and_subtree_ends(tree)[0]):
        assert parent < 0 or found[node] != found[parent]


CONLLU = """\
# text = I don't go (im Haus).
1	I	_	PRON	PRP	_	4	nsubj	_	_
2-3	don't	_	_	_	_	_	_	_	_
2	do	_	AUX	VBP	_	4	aux	_	_
3	n't	_	PART	RB	_	4	advmod	_	_
4	go	_	VERB	VB	_	0	root	_	_
5	(	_	PUNCT	-LRB-	_	8	punct	_	SpaceAfter=No
6-7	im	_	_	_	_	_	_	_	_
6	in	_	ADP	IN	_	8	case	_	_
7	dem	_	DET	DT	_	8	det	_	_
8	Haus	_	NOUN	NN	_	4	obl:to	_	SpaceAfter=No
9	)	_	PUNCT	-RRB-	_	8	punct	_	SpaceAfter=No
10	.	_	PUNCT	.	_	4	punct	_	_

"""


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_sentences_of_conllu(tmp_path):
    notation = Notation(tags=[Retag(tag="RB", words="n.t", to="NOT")])
    (sentence,) = sentences_in(read_texts([write(tmp_path, "a.conllu", CONLLU)]), notation)
    assert sentence.words == ["I", "do", "n't", "go", "(", "im", "Haus", ")", "."]
    assert [sentence.text[a:b] for a, b in zip(sentence.starts, sentence.ends, strict=True)] == sentence.words
    assert sentence.space_after == [True, False, True, True, False, True, False, False, True]
    assert sentence.upos == ["PRON", "AUX", "PART", "VERB", "PUNCT", "ADP", "NOUN", "PUNCT", "PUNCT"]
    assert sentence.xpos == ["PRP", "VBP", "NOT", "VB", "-LRB-", "IN", "NN", "-RRB-", "."]
    assert sentence.governors == [3, 3, 3, -1, 6, 6, 3, 6, 3]
    assert sentence.deprels == ["nsubj", "aux", "advmod", "root", "punct", "case", "obl:to", "punct", "punct"]
    again = sentences_in(read_texts([write(tmp_path, "b.conllu", conllu_of([sentence]))]))
    assert conllu_of(again) == conllu_of([sentence])


WORDS = [f"w{i}" for i in range(200)]


def bracket_file(words) -> str:
    return "".join(f"(ROOT (NP (NN {word})))\n" for word in words)


def conllu_file(words, xpos: str = "NN", upos: str = "NOUN") -> str:
    return "".join(f"1\t{word}\t_\t{upos}\t{xpos}\t_\t0\troot\t_\t_\n\n" for word in words)


def test_a_held_out_part_by_hash(tmp_path):
    files = Files(train=[write(tmp_path, "a.mrg", bracket_file(WORDS))])
    conllu = Files(train=[write(tmp_path, "a.conllu", conllu_file(reversed(WORDS)))])
    treebank = read_treebank("a", TreebankConfig(brackets=files, conllu=conllu), hold_out=5)
    both = treebank.trees, treebank.sentences
    trees, sentences = ({split: {item.words[0] for item in part} for split, part in kind.items()} for kind in both)
    assert trees == sentences  # trees and arcs of one sentence are on one side
    assert trees["train"] | trees["valid"] == set(WORDS) and not trees["train"] & trees["valid"]
    assert 20 < len(trees["valid"]) < 60
    # Other sentences change nothing for these.
    more = Files(train=[write(tmp_path, "b.mrg", bracket_file(["new", *WORDS]))])
    again = read_treebank("a", TreebankConfig(brackets=more), hold_out=5)
    assert {tree.words[0] for tree in again.trees["valid"]} - {"new"} == trees["valid"]


def test_documents(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for number in reversed(range(23)):
            content = bracket_file([f"d{number:02}"]).encode()
            info = tarfile.TarInfo(f"top/{number:02}.tree")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    treebank = read_treebank("a", TreebankConfig(brackets=Files(documents=[tmp_path / "a.tar.gz"])), hold_out=2)
    found = {split: [tree.words[0] for tree in trees] for split, trees in treebank.trees.items()}
    assert found["test"] == ["d00", "d10", "d20"] and found["valid"] == ["d05", "d15"] and len(found["train"]) == 18
    few = Files(documents=[write(tmp_path, "one.mrg", bracket_file(["a"]))])
    with pytest.raises(UserError, match="1 documents are too few to split"):
        read_treebank("a", TreebankConfig(brackets=few), hold_out=2)


def test_compressed_files_and_several(tmp_path):
    (tmp_path / "a.mrg.gz").write_bytes(gzip.compress(bracket_file(["a"]).encode()))
    files = Files(train=[tmp_path / "a.mrg.gz", write(tmp_path, "b.mrg", bracket_file(["b"]))], valid=[tmp_path / "a.mrg.gz"])
    treebank = read_treebank("a", TreebankConfig(brackets=files), hold_out=2)
    assert [tree.words for tree in treebank.trees["train"]] == [["a"], ["b"]]
    assert treebank.counts() == {"trees": {"train": {"sentences": 2, "words": 2}, "valid": {"sentences": 1, "words": 1}}}


def test_an_empty_split_is_named(tmp_path):
    files = Files(train=[write(tmp_path, "a.mrg", "\n")])
    with pytest.raises(UserError, match=r"treebanks.a: no sentence in the train split of .*a.mrg"):
        read_treebank("a", TreebankConfig(brackets=files), hold_out=2)


def test_tags_of_both_formats(tmp_path):
    """Trees that the CoNLL-U lacks add words and XPOS; XPOS that it lacks comes from the tree of the same words."""
    brackets = Files(train=[write(tmp_path, "a.mrg", bracket_file("ab"))], valid=[write(tmp_path, "c.mrg", bracket_file("c"))])
    conllu = Files(
        train=[write(tmp_path, "a.conllu", conllu_file("b", xpos="_"))], valid=[write(tmp_path, "c.conllu", conllu_file("c"))]
    )
    both = read_treebank("a", TreebankConfig(brackets=brackets, conllu=conllu), hold_out=2)
    assert tagged(both, "train") == [Tagged(["b"], ["NOUN"], ["NN"]), Tagged(["a"], [], ["NN"])]
    alone = read_treebank("a", TreebankConfig(conllu=conllu), hold_out=2)
    assert tagged(alone, "train") == [Tagged(["b"], ["NOUN"], [])]
    # The tags that train lacks are left out of valid too, so that it scores what was learnt.
    universal = Tagged(["b"], ["NOUN"], ["NOUN"]), Tagged(["c"], ["NOUN"], ["NOUN"])
    assert tagged_splits([alone]) == {"train": {"a": [universal[0]]}, "valid": {"a": [universal[1]]}}
    # Where others have XPOS, UPOS does not pass for it.
    both.name = "b"
    assert tagged_splits([alone, both])["train"] == {"a": [], "b": tagged(both, "train")}
    trees = read_treebank("a", TreebankConfig(brackets=brackets), hold_out=2)
    assert tagged_splits([trees])["valid"] == {"a": [Tagged(["c"], ["NN"], ["NN"])]}
    assert [(s.upos, s.xpos) for s in with_arcs(alone, "train")] == [(["NOUN"], ["NOUN"])]
    assert with_arcs(trees, "train") == []
    # Scores count a sentence as often as the file has it; the tagger learns it once.
    twice = Treebank("a", {}, "", {"test": trees.trees["valid"] * 2 + both.trees["train"]}, {"test": both.sentences["train"]})
    assert [s.words for s in tagged(twice, "test", repeated=True)] == [["b"], ["c"], ["c"], ["a"]]
    assert [s.words for s in tagged(twice, "test")] == [["b"], ["c"], ["a"]]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("He/PRP did/VBD n't/RB go/VB ./.", "He didn't go."),
        ("``/`` Yes/UH ,/, ''/'' she/PRP said/VBD (/-LRB- twice/RB )/-RRB- :/: no/UH ./.", '"Yes," she said (twice): no.'),
        ("well/RB -/HYPH known/VBN Smith/NNP 's/POS 10/CD %/NN at/IN $/$ 5/CD", "well-known Smith's 10% at $5"),
        ("a/NN and//SYM", "a and/"),
    ],
)
def test_text_of_brackets(tokens, text):
    words, tags = zip(*(token.rsplit("/", 1) for token in tokens.split()), strict=True)
    found = detokenise(words, tags)
    assert found.text == text
    spelled = [{"``": '"', "''": '"'}.get(word, word) for word in words]
    assert [found.text[a:b] for a, b in found.tokens] == spelled


def test_texts_are_those_of_conllu_where_there_are_any(tmp_path):
    conllu = Files(train=[write(tmp_path, "a.conllu", CONLLU)], valid=[tmp_path / "a.conllu"])
    brackets = Files(train=[write(tmp_path, "a.mrg", bracket_file("ab"))], valid=[tmp_path / "a.mrg"])
    both = read_treebank("a", TreebankConfig(brackets=brackets, conllu=conllu), hold_out=2)
    (text,) = texts(both, "train")
    assert text.text == "I don't go (im Haus)." and text.tokens[1:3] == [(2, 4), (4, 7)]
    assert [t.text for t in texts(read_treebank("a", TreebankConfig(brackets=brackets), hold_out=2), "train")] == ["a", "b"]
    scored = TreebankConfig(brackets=brackets, conllu=Files(test=conllu.train))
    found = read_treebank("a", scored, hold_out=2)
    assert [[t.text for t in texts(found, split)] for split in ("train", "test")] == [["a", "b"], ["I don't go (im Haus)."]]


def test_a_treebank_with_the_name_of_another_in_lower_case_is_refused(tmp_path):
    """One of the two would be lost."""
    values = {"brackets": {"train": [write(tmp_path, "a.mrg", bracket_file("abc"))], "valid": [tmp_path / "a.mrg"]}}
    config = TrainParserConfig.model_validate({"treebanks": {"a": values, "a_lower": values}, "lower_case": 0.5})
    with pytest.raises(UserError, match="treebanks.a_lower: is the name of a in lower case; rename it, or set lower_case=0"):
        read_treebanks(config)
    assert len(read_treebanks(config.model_copy(update={"lower_case": 0}))) == 2


def test_models_learn_from_data_that_train_and_valid_have(tmp_path):
    """A split that only scores teaches nothing, and a model without data to choose its weights is left out."""
    trees, lines = write(tmp_path, "a.mrg", bracket_file("ab")), write(tmp_path, "a.conllu", conllu_file("a"))
    no_tags = write(tmp_path, "no_tags.conllu", conllu_file("a", xpos="_", upos="_"))
    no_xpos = write(tmp_path, "no_xpos.conllu", conllu_file("a", xpos="_"))
    no_arcs = write(tmp_path, "no_arcs.conllu", conllu_file("a").replace("root", "_"))

    def plan(**files: dict) -> list[str]:
        treebanks = {name: TreebankConfig.model_validate({name: splits}) for name, splits in files.items()}
        config = TrainParserConfig(treebanks=treebanks)
        return possible_models(config, read_treebanks(config))

    whole = {"train": [trees], "valid": [trees]}, {"train": [lines], "valid": [lines]}
    assert plan(brackets=whole[0], conllu=whole[1]) == ["tokenizer", "pos", "constituency", "depparse"]
    assert plan(brackets=whole[0], conllu={"test": [lines]}) == ["tokenizer", "pos", "constituency"]
    assert plan(brackets={"test": [trees]}, conllu=whole[1]) == ["tokenizer", "pos", "depparse"]
    assert plan(conllu={"train": [lines], "valid": [no_arcs]}) == ["tokenizer", "pos"]
    assert (
        plan(conllu={"train": [lines], "valid": [no_tags]})
        == plan(conllu={"train": [lines], "valid": [no_xpos]})
        == ["tokenizer"]
    )
    with pytest.raises(UserError, match=r"no model can be trained: tokenizer: no treebank has text in train; pos: .* in train;"):
        plan(brackets={"test": [trees]}, conllu={"test": [lines]})
