"""Data sets whose trees are made of arcs: from CoNLL-U to shards, controls beside them, translation, and what is refused."""

import json
import re

import numpy as np
import pytest
from sample_lines import sample_lines
from toyruns import make_config

from treenet import TreeStructure
from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.jobs.train_run import run_training
from treenet.report.build import write_report
from treenet.report.settings import ReportSettings
from treenet.translation.line_translator import LineTranslator
from treenet.translation.settings import TranslateSettings
from treeproc.common.settings import UserError
from treeproc.inspect import describe, draw_line
from treeproc.online.line_encoder import LineEncoder
from treeproc.online.raw_lines import RawLine, RawLineEncoder
from treeproc.parsers import ParserConfig, build_parser, find_models
from treeproc.shards.shard import SplitShards
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.subwords import LabelVocab
from treeproc.trees import conllu
from treeproc.verify import verify

pytestmark = pytest.mark.slow

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
    for row in (row for shard in SplitShards(data / "encoded", "train") for row in shard.rows()):
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
    message = "crossing arcs: 1 lifted, in 1 sentences"
    trees = "trees: dependencies (phrases=layered, phrase_labels=upos)"
    assert all(message in text and trees in text for text in (summary(index, folder), describe(folder)[0]))
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
    with pytest.raises(UserError, match=r"made with other settings \(tree.phrases: 'layered' -> 'flat'\)"):
        preprocess(PreprocessConfig.model_validate(new | {"tree": {"phrases": "flat"}}), tmp_path / "flat")


def test_other_trees_do_not_know_of_the_settings_of_phrases(data, tmp_path):
    again = {"parsed": data[0], "subwords": {"vocab_size": 290, "lowercase": True}, "workers": 0}
    fingerprints = []
    for name, tree in (("one", {}), ("two", {"phrases": "flat"})):
        tree |= {"tree_source": "balanced"}
        fingerprints.append(preprocess(PreprocessConfig.model_validate(again | {"tree": tree}), tmp_path / name))
    assert fingerprints[0]["fingerprint"] == fingerprints[1]["fingerprint"] and "phrases" not in fingerprints[0]["tree_settings"]


@pytest.mark.parametrize(
    ("parser", "hint"),
    [
        ({"name": "given", "dependencies": False}, "set parser.dependencies=true"),
        ({"name": "shipped"}, "set parser.dependencies=true"),
        ({"name": "words"}, "choose a parser that gives arcs: parser.name=stanza parser.dependencies=true"),
    ],
)
def test_data_sets_without_arcs_are_refused(tmp_path, parser, hint):
    config = settings_of(tmp_path, parser=parser)
    with pytest.raises(UserError, match=f"tree.tree_source: dependencies makes trees of arcs, but there are none; {hint}$"):
        preprocess(config, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("parser", [{}, {"language": "de"}, {"name": "given"}, {"dependencies": True}])
def test_arcs_of_the_input_are_taken(data, tmp_path, parser):
    """The trees of CoNLL-U files are those of their arcs, without a setting of the parser."""
    index = preprocess(settings_of(tmp_path, parser=parser), tmp_path / "data")
    assert index["parser"]["name"] == "given" and index["parser_settings"]["dependencies"]
    assert nodes_over_words(tmp_path / "data") == nodes_over_words(data[0])
    preprocess(settings_of(tmp_path, parser=parser), tmp_path / "data")  # the same command continues


def test_flat_trees_of_conllu_are_told(tmp_path, caplog):
    preprocess(settings_of(tmp_path, parser={"name": "given"}, tree={}), tmp_path / "flat")
    assert "CoNLL-U has no constituents, so every tree is flat; tree.tree_source=dependencies makes trees of arcs" in caplog.text


GERMAN = """\
1\tDer\t_\tDET\tART\t_\t2\tdet\t_\t_
2\tHund\t_\tNOUN\tNN\t_\t3\tnsubj\t_\t_
3\tsah\t_\tVERB\tVVFIN\t_\t0\troot\t_\t_
4\tim\t_\tADP\tAPPRART\t_\t5\tcase\t_\t_
5\tGarten\t_\tNOUN\tNN\t_\t3\tobl\t_\t_
6\tKatzen\t_\tNOUN\tNN\t_\t3\tobj\t_\tSpaceAfter=No
7\t.\t_\tPUNCT\t$.\t_\t3\tpunct\t_\t_

"""


def test_trees_of_arcs_follow_from_universal_tags_beside_those_of_a_language(tmp_path, caplog):
    """As the library has them."""
    preprocess(settings_of(tmp_path, GERMAN), tmp_path / "data")
    trees = TreeStructure.from_conllu(GERMAN, shape="layered")
    spans = zip(trees.labels[0], trees.start[0].tolist(), trees.end[0].tolist(), strict=True)
    assert nodes_over_words(tmp_path / "data") == [list(spans)] and ("VP", 2, 6) in nodes_over_words(tmp_path / "data")[0]
    assert "trees:" not in caplog.text


PENN = """\
1\tDogs\t_\tNOUN\tNNS\t_\t2\tnsubj\t_\t_
2\tsee\t_\tVERB\tVBP\t_\t0\tROOT\t_\t_
3\tcats\t_\tNOUN\tNNS\t_\t2\tdobj\t_\t_
4\t-\t_\tPUNCT\t:\t_\t2\tpunct\t_\t_

"""


def test_names_that_no_phrase_follows_from_are_told(tmp_path, caplog):
    preprocess(settings_of(tmp_path, PENN), tmp_path / "penn")
    assert "layered reads the relations of Universal Dependencies, but the arcs have others (dobj); set" in caplog.text
    assert "universal tags" not in caplog.text
    assert LabelVocab.load(tmp_path / "penn/encoded/vocab/pos_tags.txt").names == ["<unk>", ":", "NNS", "VBP", "X"]
    caplog.clear()
    without = re.sub(r"\t(DET|NOUN|VERB|ADP|PUNCT)(?=\t)", "\t_", GERMAN)
    preprocess(settings_of(tmp_path, without), tmp_path / "stts")
    assert "Penn Treebank, but the words have others ($., APPRART, ART, VVFIN); set tree.phrases=flat tree.phr" in caplog.text
    caplog.clear()
    preprocess(settings_of(tmp_path, re.sub(r"\t(ART|NN|VVFIN|APPRART|\$\.)(?=\t)", "\t_", without)), tmp_path / "none")
    assert "but the words have none; set tree.phrases=flat" in caplog.text
    caplog.clear()
    as_told = {"tree_source": "dependencies", "phrases": "flat", "phrase_labels": "deprel"}
    preprocess(settings_of(tmp_path, without, tree=as_told), tmp_path / "flat")
    assert "trees:" not in caplog.text
    no_tags = re.sub(r"\t(ART|NN|VVFIN|APPRART|\$\.)(?=\t)", "\t_", without)
    preprocess(settings_of(tmp_path, no_tags, tree=as_told), tmp_path / "flat without tags")
    assert "but the words have" not in caplog.text


def test_trees_are_made_of_arcs_where_there_are_no_constituents(tmp_path, caplog):
    """`constituency: false` never gives flat trees that are told as parsed ones."""
    (tmp_path / "a").write_text("The dogs of my neighbour have not eaten.\nStop the old red car!\n")
    values = {
        "splits": {"train": {"source": [tmp_path / "a"], "target": [tmp_path / "a"]}},
        "parser": {"name": "shipped", "dependencies": True, "constituency": False, "device": "cpu"},
        "subwords": {"vocab_size": 300}, "workers": 0,
    }  # fmt: skip
    data = tmp_path / "data"
    index = preprocess(PreprocessConfig.model_validate(values), data)
    assert "trees: dependencies (phrases=layered, phrase_labels=upos)" in summary(index, data)
    assert ("VP", 5, 8) in nodes_over_words(data)[0]
    again = {"parsed": data, "subwords": {"vocab_size": 300}, "workers": 0}
    assert preprocess(PreprocessConfig.model_validate(again), tmp_path / "again")["tree_source"] == "dependencies"
    for name in ("parsed", "shuffled"):
        for base in (values, again):
            config = PreprocessConfig.model_validate(base | {"tree": {"tree_source": name}})
            with pytest.raises(UserError, match=f"tree.tree_source: is {name}, but parser.constituency=false gives no"):
                preprocess(config, tmp_path / "out")
            assert not (tmp_path / "out").exists()
    flat = PreprocessConfig.model_validate(again | {"tree": {"tree_source": "flat"}})  # as the message says
    assert preprocess(flat, tmp_path / "flat")["tree_source"] == "flat"


def test_models_without_constituents_name_the_settings_that_use_them(tmp_path):
    for name in ("tokenizer.pt", "pos.pt", "depparse.pt"):
        (tmp_path / name).touch()
    with pytest.raises(
        UserError, match=r"has no constituency.pt, vectors.pt; set parser.dependencies=true parser.constituency=false"
    ):
        find_models(ParserConfig(models=tmp_path, device="cpu"))


def test_arcs_that_are_no_tree_are_named_by_sentence(tmp_path, monkeypatch):
    """By the text stage with the file's line, and by the encode stage, whose shards may be older than that check."""
    with pytest.raises(UserError, match=r"a\.conllu, line 3: expected one word with governor 0, but this is one of 2"):
        preprocess(settings_of(tmp_path, TWO_ROOTS), tmp_path / "data")
    monkeypatch.setattr(conllu, "_check_arcs", lambda words, name: None)
    with pytest.raises(UserError, match=r"line 1, sentence 1: 2 words have no governor, .*; correct that line of the input or"):
        preprocess(settings_of(tmp_path, TWO_ROOTS), tmp_path / "other")


def test_a_parser_without_constituency_gives_arcs_and_universal_tags():
    whole = ParserConfig(name="shipped", dependencies=True, device="cpu")
    arcs_alone = whole.model_copy(update={"constituency": False})
    assert set(find_models(arcs_alone).read()) == {"tokenize", "pos", "depparse"}
    lines = ["The dogs of my neighbour have not eaten.", "Stop!"]
    for own, other in zip(build_parser(arcs_alone).parse(lines), build_parser(whole).parse(lines), strict=True):
        assert own.arcs == other.arcs and own.words["text"] == other.words["text"]
        assert own.parse_status == "parsed" and own.trees[0].startswith("(X ")
        assert {"NOUN", "VERB", "PUNCT", "DET", "ADP", "PRON", "AUX", "PART"} >= set(own.words["pos_tag"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A data set of the shipped dependency parser, and a tiny run on it."""
    folder = tmp_path_factory.mktemp("run")
    lines = sample_lines(40)
    for name, part in (("train", lines), ("valid", lines[:4]), ("test", lines[:6])):
        (folder / name).write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
    values = {
        "splits": {name: {"source": [folder / name], "target": [folder / name]} for name in ("train", "valid", "test")},
        "parser": {"name": "shipped", "dependencies": True, "constituency": False},
        "tree": {"tree_source": "dependencies"},
        "subwords": {"vocab_size": 330},
        "workers": 0,
    }
    preprocess(PreprocessConfig.model_validate(values), folder / "data")
    small = (
        "max_steps=2",
        "checkpoint_every=1",
        "batch.max_tokens=400",
        "decoding.beam_size=2",
        "decoding.max_length_factor=0.5",
    )
    run_training(make_config(folder / "data", *small), folder / "run")
    return folder / "run", folder / "data", lines


def test_raw_lines_are_translated_with_the_trees_of_the_data_set(run):
    folder, data, lines = run
    rows = [row for shard in SplitShards(data / "encoded", "test") for row in shard.rows()]
    raw = [RawLine(line.encode()) for line in lines[:6]]
    encoded = RawLineEncoder(data, given_trees=False, max_pieces=1000).encode(raw)
    for line, row in zip(encoded, rows, strict=True):
        for group in ("leaves", "nodes", "spans", "arcs"):
            assert all(np.array_equal(line.row[group][name], row[group][name]) for name in row[group]), group
    assert max(len(row["nodes"]["label"]) for row in rows) > 8
    translated = LineTranslator(TranslateSettings(), [folder])(raw, 0)
    assert translated.num_lines == 6 and not translated.problems
    assert evaluate_run(folder, EvaluateSettings())[1]["num_examples"] == 6
    assert (folder / "translations.test.txt").read_text(encoding="utf-8") == translated.text
    assert not verify(data).problems
    assert "─ NP" in draw_line(data, "test", 1)


def test_a_report_shows_phrases_of_arcs(run, tmp_path):
    folder, _, _ = run
    evaluate_run(folder, EvaluateSettings())
    write_report(ReportSettings(runs=(str(folder),), sentences=1), tmp_path)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "dependencies (phrases=layered, phrase_labels=upos)" in page
    (found,) = json.loads((tmp_path / "report.json").read_text())["attention"].values()
    assert {"S", "NP", "VP"} <= {group["name"] for group in found["by_label"]}


def test_lines_without_arcs_are_refused(run, data):
    with pytest.raises(UserError, match="trees made of arcs, but bracketed trees have no arcs; give the lines without trees"):
        LineEncoder(run[1], given_trees=True)
    for given_trees in (False, True):
        with pytest.raises(UserError, match="made of arcs of its input files, .* preprocess files of its format with vocab_from"):
            LineEncoder(data[0], given_trees=given_trees)
