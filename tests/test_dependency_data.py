"""Data sets whose trees are made of arcs: from CoNLL-U to shards, controls beside them, and what is refused."""

import pytest

from treeproc.inspect import describe
from treeproc.parsers import ParserConfig, build_parser, find_models
from treeproc.preprocess import PreprocessConfig, preprocess
from treeproc.report import summary
from treeproc.settings import UserError
from treeproc.shards import open_shards
from treeproc.subwords import LabelVocab
from treeproc.verify import verify

SENTENCES = """\
# text = We saw a dog yesterday which barked.
1\tWe\t_\tPRON\t_\t_\t2\tnsubj\t_\t_
2\tsaw\t_\tVERB\t_\t_\t0\troot\t_\t_
3\ta\t_\tDET\t_\t_\t4\tdet\t_\t_
4\tdog\t_\tNOUN\t_\t_\t2\tobj\t_\t_
5\tyesterday\t_\tADV\t_\t_\t2\tadvmod\t_\t_
6\twhich\t_\tPRON\t_\t_\t7\tnsubj\t_\t_
7\tbarked\t_\tVERB\t_\t_\t4\tacl:relcl\t_\tSpaceAfter=No
8\t.\t_\tPUNCT\t_\t_\t2\tpunct\t_\t_

# text = Dogs bark.
1\tDogs\t_\tNOUN\t_\t_\t2\tnsubj\t_\t_
2\tbark\t_\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
3\t.\t_\tPUNCT\t_\t_\t2\tpunct\t_\t_

"""
TWO_ROOTS = SENTENCES.replace("\t2\tnsubj", "\t0\tnsubj")


def settings_of(folder, text=SENTENCES, **changes) -> PreprocessConfig:
    (folder / "a.conllu").write_text(text, encoding="utf-8")
    values = {
        "splits": {"train": {"source": [folder / "a.conllu"]}},
        "format": "conllu",
        "parser": {"name": "given", "dependencies": True},
        "tree": {"tree_source": "dependencies"},
        "subwords": {"vocab_size": 290, "lowercase": True},
        "workers": 0,
    }
    return PreprocessConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arcs")
    index = preprocess(settings_of(folder), folder / "data")
    return folder / "data", index


def nodes_over_words(data) -> list[list[tuple[str, int, int]]]:
    """(label, first word, one past the last) of the nodes of every example, without those of split words."""
    names, out = LabelVocab.load(data / "encoded/vocab/labels.txt").names, []
    for row in (row for shard in open_shards(data / "encoded", "train") for row in shard.rows()):
        word, spans = row["leaves"]["word_index"], zip(row["spans"]["start"], row["spans"]["end"], strict=True)
        named = zip((names[i] for i in row["nodes"]["label"]), spans, strict=True)
        out.append([(n, int(word[s]), int(word[e - 1]) + 1) for n, (s, e) in named if not n.startswith("POS=")])
    return out


def test_arcs_become_the_trees_of_a_data_set(data):
    folder, index = data
    first, second = nodes_over_words(folder)
    # The arc from *dog* to *barked* crosses the one from *saw* to *yesterday*: it goes to *saw*.
    assert first[:3] == [("S", 0, 8), ("NP", 0, 1), ("VP", 1, 7)] and ("NP", 2, 4) in first and ("S", 5, 7) in first
    assert second == [("S", 0, 3), ("NP", 0, 1), ("VP", 1, 2)]
    assert index["tree_settings"]["phrases"] == "layered"
    told = "arcs that cross: 1 were lifted, in 1 sentences"
    trees = "trees: dependencies (phrases=layered, phrase_labels=upos)"
    assert all(told in text and trees in text for text in (summary(index, folder), describe(folder)[0]))
    assert not verify(folder).problems


def test_other_shapes_and_labels_of_the_same_arcs(data, tmp_path):
    folder, index = data
    again = {"parsed": folder, "subwords": {"vocab_size": 290, "lowercase": True}, "workers": 0}
    tree = {"tree_source": "dependencies", "phrases": "flat", "phrase_labels": "deprel"}
    other = preprocess(PreprocessConfig.model_validate(again | {"tree": tree}), tmp_path / "flat")
    assert nodes_over_words(tmp_path / "flat")[1] == [("root", 0, 3)]
    assert other["tree_fingerprint"] != index["tree_fingerprint"]
    assert other["text_fingerprint"] == index["text_fingerprint"]
    pieces = [(path / "encoded/vocab/pieces.model").read_bytes() for path in (folder, tmp_path / "flat")]
    assert pieces[0] == pieces[1]


def test_vocab_from_a_data_set_of_arcs_takes_its_phrases(data, tmp_path):
    folder, index = data
    new = {"splits": {"more": {"source": [folder.parent / "a.conllu"]}}, "vocab_from": folder, "workers": 0}
    made = preprocess(PreprocessConfig.model_validate(new), tmp_path / "new")
    assert made["tree_fingerprint"] == index["tree_fingerprint"]
    control = {"parsed": tmp_path / "new", "vocab_from": folder, "tree": {"tree_source": "random"}, "workers": 0}
    assert preprocess(PreprocessConfig.model_validate(control), tmp_path / "random")["tree_source"] == "random"
    with pytest.raises(UserError, match=r"made otherwise \(tree.phrases: 'layered' -> 'flat'\)"):
        preprocess(PreprocessConfig.model_validate(new | {"tree": {"phrases": "flat"}}), tmp_path / "flat")


def test_other_trees_do_not_know_of_the_settings_of_phrases(data, tmp_path):
    again = {"parsed": data[0], "subwords": {"vocab_size": 290, "lowercase": True}, "workers": 0}
    marks = []
    for name, tree in (("one", {}), ("two", {"phrases": "flat"})):
        tree |= {"tree_source": "balanced"}
        marks.append(preprocess(PreprocessConfig.model_validate(again | {"tree": tree}), tmp_path / name))
    assert marks[0]["fingerprint"] == marks[1]["fingerprint"] and "phrases" not in marks[0]["tree_settings"]


def test_data_sets_without_arcs_are_refused(tmp_path):
    config = settings_of(tmp_path, parser={"name": "given"})
    with pytest.raises(UserError, match=r"tree.tree_source: dependencies .* parser.dependencies=true"):
        preprocess(config, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_arcs_that_are_no_tree_are_named_by_sentence(tmp_path):
    with pytest.raises(UserError, match=r"line 1, sentence 1: 2 words have no governor"):
        preprocess(settings_of(tmp_path, TWO_ROOTS), tmp_path / "data")


def test_a_parser_without_constituency_gives_arcs_and_universal_tags():
    whole = ParserConfig(name="shipped", dependencies=True, device="cpu")
    arcs_alone = whole.model_copy(update={"constituency": False})
    assert set(find_models(arcs_alone).read()) == {"tokenize", "pos", "depparse"}
    lines = ["The dogs of my neighbour have not eaten.", "Stop!"]
    for own, other in zip(build_parser(arcs_alone).parse(lines), build_parser(whole).parse(lines), strict=True):
        assert own.arcs == other.arcs and own.words["text"] == other.words["text"]
        assert own.parse_status == "parsed" and own.trees[0].startswith("(X ")
        assert {"NOUN", "VERB", "PUNCT", "DET", "ADP", "PRON", "AUX", "PART"} >= set(own.words["pos_tag"])


def test_constituency_is_left_out_where_arcs_are_made_alone():
    with pytest.raises(ValueError, match="constituency: false is for name: stanza, .* with dependencies: true"):
        ParserConfig(name="shipped", constituency=False)
