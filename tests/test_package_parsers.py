"""spaCy, benepar and SuPar as parsers, with small models trained here. A test is skipped where its package is not installed."""

import json
import random
import shutil
import sys

import pytest
import torch

from treeproc.common.settings import UserError
from treeproc.online.line_encoder import LineEncoder
from treeproc.parsers import Given, ParserConfig, build_parser, describe_in_words, describe_parser, fallback, read_trees
from treeproc.parsers.config import split_at_blanks
from treeproc.shards.shard import SplitShards
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.subwords import LabelVocab
from treeproc.verify import verify

pytestmark = pytest.mark.slow

LINES = ["The man saw a dog .", "I don't see dogs", "  Two\u00a0 blanks \t(a man) . ", "🙂", "A dog . I don't see dogs", "a"]
TREES = ["(TOP (S (NP (DT The) (NN man)) (VP (VBD saw) (NP (DT a) (NN dog))) (. .)))", "(TOP (S (NP (PRP I)) (VP (VBP see))))"]
SENTENCES = [  # words, XPOS, UPOS, governors, relations
    ("The man saw a dog .", "DT NN VBD DT NN .", "DET NOUN VERB DET NOUN PUNCT", (1, 2, 2, 4, 2, 2), "det nsubj ROOT det obj p"),
    ("I do n't see dogs", "PRP VBP RB VB NNS", "PRON AUX PART VERB NOUN", (3, 3, 3, 3, 3), "nsubj aux advmod ROOT obj"),
    ("A man of dogs", "DT NN IN NNS", "DET NOUN ADP NOUN", (1, 1, 3, 1), "det ROOT case nmod"),
]
SUPAR = dict(
    encoder="lstm", feat=["char"], unk="unk", build=True, min_freq=1, n_embed=16, n_pretrained=8, n_char_embed=8,
    n_char_hidden=8, n_feat_embed=8, n_lstm_hidden=16, n_encoder_hidden=16, n_lstm_layers=1, n_encoder_layers=1, n_span_mlp=16,
    n_arc_mlp=16, n_rel_mlp=8, n_label_mlp=8, lr=2e-2, mu=0.9, nu=0.9, eps=1e-12, weight_decay=0, decay=0.75, decay_steps=5000,
    epochs=8, patience=8, update_steps=1, buckets=1, mbr=True, checkpoint=False, partial=False, punct=True, verbose=False,
    delete=set(), equal={},
)  # fmt: skip


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """The folder of a spaCy pipeline that was trained for some steps."""
    spacy = pytest.importorskip("spacy")
    from spacy.tokens import Doc
    from spacy.training import Example

    random.seed(1)
    spacy.util.fix_random_seed(1)
    nlp = spacy.blank("en")
    nlp.add_pipe("tagger")
    nlp.add_pipe("morphologizer")
    nlp.add_pipe("parser", config={"min_action_freq": 1})
    examples = []
    for words, xpos, upos, heads, deps in SENTENCES:
        gold = {"words": words.split(), "tags": xpos.split(), "pos": upos.split(), "heads": list(heads), "deps": deps.split()}
        examples.append(Example.from_dict(Doc(nlp.vocab, words.split()), gold))
    optimizer = nlp.initialize(lambda: examples)
    for _ in range(20):
        nlp.update(examples, sgd=optimizer)
    folder = tmp_path_factory.mktemp("spacy") / "pipeline"
    nlp.to_disk(folder)
    return folder


@pytest.fixture(scope="module")
def spacy_config(pipeline):
    return ParserConfig(name="spacy", package=str(pipeline), dependencies=True, constituency=False)


def check_rows(lines, rows, dependencies: bool) -> None:
    """No line and no character is lost; trees and arcs stand over the words."""
    for line, row in zip(lines, rows, strict=True):
        spans = list(zip(row.words["start_char"], row.words["end_char"], strict=True))
        assert [line[start:end] for start, end in spans] == row.words["text"]
        assert sum(end - start for start, end in spans) == len("".join(line.split())), line
        trees = read_trees(vars(row))
        assert sum(len(tags) for tags, _ in trees) == len(spans) == len(row.words["pos_tag"])
        assert row.parse_status == "parsed" and (row.arcs is not None) == dependencies
        if dependencies:
            assert len(row.arcs["governor"]) == len(row.arcs["deprel"]) == len(spans)
            check_arcs_of(row, [len(tags) for tags, _ in trees])


def check_arcs_of(row, lengths) -> None:
    """Every sentence has one root, and every word is below it."""
    first = 0
    for length in lengths:
        governors = row.arcs["governor"][first : first + length]
        assert governors.count(-1) == 1
        for word in range(first, first + length):
            seen = set()
            while row.arcs["governor"][word] >= 0:
                assert word not in seen and first <= word < first + length
                seen.add(word)
                word = row.arcs["governor"][word]
        first += length


def test_spacy_gives_words_tags_and_arcs(spacy_config, pipeline):
    import spacy

    parser = build_parser(spacy_config)
    rows = parser.parse(LINES)
    check_rows(LINES, rows, dependencies=True)
    first = rows[0]
    assert first.words["pos_tag"] == SENTENCES[0][2].split() and first.arcs["governor"] == [1, 2, -1, 4, 2, 2]
    assert first.arcs["deprel"] == ["det", "nsubj", "root", "det", "obj", "p"] and first.trees[0].startswith("(X (DET The)")
    assert rows[1].words["text"] == ["I", "do", "n't", "see", "dogs"]
    plain = spacy.load(pipeline)(LINES[1])
    assert rows[1].arcs["governor"] == [-1 if word.head == word else word.head.i for word in plain]
    assert [parser.parse([line])[0] for line in LINES] == rows
    assert parser.parse([*LINES[::-1], *LINES])[len(LINES) :] == rows


def test_spacy_splits_sentences_and_takes_given_words(spacy_config):
    split = build_parser(spacy_config.model_copy(update={"split_sentences": True}))
    line = "The man saw a dog . I don't see dogs"
    (row,) = split.parse([line])
    check_rows([line], [row], dependencies=True)
    given = Given(words=split_at_blanks(line))
    (row,) = split.parse([line], [given])
    assert row.words["text"] == line.split()
    check_arcs_of(row, [len(tags) for tags, _ in read_trees(vars(row))])
    (whole,) = build_parser(spacy_config).parse([line], [given])
    assert whole.words["text"] == line.split() and len(whole.trees) == 1
    check_arcs_of(whole, [len(line.split())])
    moses = "I don 't see dogs"
    treebank = build_parser(spacy_config.model_copy(update={"treebank_words": True}))
    (row,) = treebank.parse([moses], [Given(words=split_at_blanks(moses))])
    assert row.words["text"] == moses.split() and row.words["pos_tag"] == SENTENCES[1][2].split()
    short = build_parser(spacy_config.model_copy(update={"max_words": 3}))
    assert short.parse(LINES[:1]) == [fallback(LINES[0], "flat_too_long", None, dependencies=True)]


def test_one_line_on_which_spacy_fails_is_flat_alone(spacy_config, monkeypatch):
    parser = build_parser(spacy_config)
    expected = parser.parse(["a dog", "a man"])
    pipe = parser._nlp.pipe

    def fails(documents, **options):
        if any("bad" in document.text for document in documents):
            raise ValueError("bad")
        return pipe(documents, **options)

    monkeypatch.setattr(parser._nlp, "pipe", fails)
    assert parser.parse(["a dog", "bad", "a man"]) == [
        expected[0], fallback("bad", "flat_parser_failed", None, dependencies=True), expected[1]
    ]  # fmt: skip


def test_the_fingerprint_knows_the_pipeline_by_its_files(spacy_config, pipeline, tmp_path):
    described = describe_parser(spacy_config)
    assert described["library"].startswith("spacy 3.") and str(pipeline) not in json.dumps(described)
    assert describe_in_words(described).endswith("installed models for en")
    moved = tmp_path / "moved"
    shutil.copytree(pipeline, moved)
    assert describe_parser(spacy_config.model_copy(update={"package": str(moved)})) == described
    (moved / "meta.json").write_text("{}")
    assert describe_parser(spacy_config.model_copy(update={"package": str(moved)})) != described


def test_pipelines_that_cannot_be_used_are_one_line(spacy_config, pipeline, tmp_path):
    import spacy

    spacy.blank("en").to_disk(tmp_path / "blank")
    for name in ("damaged", "sourced"):
        (tmp_path / name).mkdir()
    (tmp_path / "sourced" / "config.cfg").write_text('[components.parser]\nsource = "antigravity"\n')
    (tmp_path / "damaged" / "config.cfg").write_text("nothing")
    for changes, message in (
        ({"package": "en_core_web_nowhere"}, "no spaCy pipeline 'en_core_web_nowhere' is installed; run python -m spacy"),
        ({"package": "json"}, "no spaCy pipeline 'json' is installed"),  # a module, and no pipeline
        ({"package": str(tmp_path)}, "holds no config.cfg"),
        ({"package": str(tmp_path / "damaged")}, "spaCy cannot load parser.package"),
        ({"package": str(tmp_path / "sourced")}, "takes components from other packages"),
        ({"package": str(tmp_path / "blank")}, r"gives no arcs \(component parser\)"),
        ({"language": "de"}, "is for 'en', but parser.language is 'de'"),
    ):
        with pytest.raises(UserError, match=message) as error:
            build_parser(spacy_config.model_copy(update=changes))
        assert "\n" not in str(error.value)


def test_installed_pipelines_are_found_by_their_name(spacy_config, pipeline, tmp_path, monkeypatch):
    """The files of a package as `spacy package` and pip lay them out."""
    package, facts = tmp_path / "en_tiny", tmp_path / "en_tiny-0.0.1.dist-info"
    shutil.copytree(pipeline, package / "en_tiny-0.0.1")
    meta = json.loads((pipeline / "meta.json").read_text()) | {"name": "tiny", "version": "0.0.1"}
    (package / "en_tiny-0.0.1" / "meta.json").write_text(json.dumps(meta))
    (package / "meta.json").write_text(json.dumps(meta))
    (package / "__init__.py").write_text(
        "from spacy.util import load_model_from_init_py\n\n"
        "def load(**overrides):\n    return load_model_from_init_py(__file__, **overrides)\n"
    )
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: en_tiny\nVersion: 0.0.1\n")
    (facts / "entry_points.txt").write_text("[spacy_models]\nen_tiny = en_tiny\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed = spacy_config.model_copy(update={"package": "en_tiny"})
    described = describe_parser(installed)
    assert "package/__init__.py" in described["models"]["files"] and "en_tiny" not in sys.modules
    assert build_parser(installed).parse(LINES) == build_parser(spacy_config).parse(LINES)


def test_arcs_of_spacy_become_the_trees_of_a_data_set(spacy_config, tmp_path):
    (tmp_path / "a.txt").write_text("The man saw a dog .\nI don't see dogs\n")
    settings = {
        "splits": {"train": {"source": [tmp_path / "a.txt"], "target": [tmp_path / "a.txt"]}},
        "parser": spacy_config,
        "tree": {"tree_source": "dependencies"},
        "subwords": {"vocab_size": 290},
        "workers": 0,
    }
    index = preprocess(PreprocessConfig.model_validate(settings), tmp_path / "data")
    assert index["parser"]["library"].startswith("spacy 3.")
    assert not verify(tmp_path / "data").problems
    (row,) = LineEncoder(tmp_path / "data").encode(["The man saw a dog ."])  # a line that comes later has the same tree
    names = LabelVocab.load(tmp_path / "data/encoded/vocab/labels.txt").names
    assert {"S", "VP", "NP"} <= {names[label] for label in row["nodes"]["label"]}


@pytest.fixture(scope="module")
def benepar_model(tmp_path_factory):
    """A checkpoint of benepar's, of a model on characters that was trained for some steps."""
    pytest.importorskip("benepar")
    import nltk
    from benepar import InputSentence
    from benepar.char_lstm import RetokenizerForCharLSTM
    from benepar.decode_chart import ChartDecoder
    from benepar.nkutil import HParams
    from benepar.parse_chart import ChartParser

    torch.manual_seed(1)
    trees = [nltk.Tree.fromstring(tree) for tree in TREES]

    class Example(InputSentence):
        tree = property(lambda self: self._tree)

    examples = []
    for tree in trees:
        words, tags = zip(*tree.pos(), strict=True)
        examples.append(Example(list(words), [True] * len(words), list(tags), list(words)))
        examples[-1]._tree = tree
    tags = {tag: i for i, tag in enumerate(sorted({"UNK", *(tag for tree in trees for _, tag in tree.pos())}))}
    none = ("char_lstm_input_dropout", "relu_dropout", "residual_dropout", "attention_dropout", "morpho_emb_dropout")
    sizes = {"d_char_emb": 8, "d_model": 32, "encoder_max_len": 64, "num_heads": 2, "d_kv": 16, "d_ff": 32, "num_layers": 1}
    kinds = {"use_chars_lstm": True, "use_pretrained": False, "use_encoder": True, "predict_tags": True}
    rest = {"d_label_hidden": 16, "d_tag_hidden": 16, "tag_loss_scale": 5.0, "force_root_constituent": True}
    hparams = HParams(**dict.fromkeys(none, 0.0), **sizes, **kinds, **rest)
    characters = RetokenizerForCharLSTM.build_vocab([tree.leaves() for tree in trees])
    model = ChartParser(tags, ChartDecoder.build_vocab(trees), characters, hparams)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        for _, batch in model.encode_and_collate_subbatches(examples, 1000):
            model.compute_loss(batch).backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("benepar") / "model.pt"
    torch.save({"config": model.config, "state_dict": model.state_dict()}, path)
    return path


def test_benepar_gives_trees_over_words_of_spacy(benepar_model, pipeline):
    config = ParserConfig(name="benepar", models=benepar_model, device="cpu")
    parser = build_parser(config)
    rows = parser.parse(LINES)
    check_rows(LINES, rows, dependencies=False)
    assert rows[0].trees == TREES[:1]  # the tags are benepar's: there is no pipeline
    assert [parser.parse([line])[0] for line in LINES] == rows
    document = "The man saw a dog. I see."
    (row,) = build_parser(config.model_copy(update={"split_sentences": True})).parse([document])
    assert row.trees[0] == TREES[0] and [len(tags) for tags, _ in read_trees(vars(row))] == [6, 3]
    with_arcs = build_parser(config.model_copy(update={"dependencies": True, "package": str(pipeline)}))
    rows = with_arcs.parse(LINES)
    check_rows(LINES, rows, dependencies=True)
    assert rows[0].trees == TREES[:1] and rows[0].arcs["governor"] == [1, 2, -1, 4, 2, 2]
    quoted = "` don 't see `"
    (row,) = build_parser(config.model_copy(update={"treebank_words": True})).parse(
        [quoted], [Given(words=split_at_blanks(quoted))]
    )
    check_rows([quoted], [row], dependencies=False)


def test_benepar_on_a_pretrained_model_of_its_folder(benepar_model, tmp_path):
    """The form of benepar's releases: a tokeniser, a configuration and weights, with a BERT made here."""
    from benepar.nkutil import HParams
    from benepar.parse_chart import ChartParser
    from transformers import BertConfig, BertTokenizerFast

    letters = [chr(i) for i in range(97, 123)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "'", *letters, *("##" + letter for letter in letters)]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(pieces))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    settings = torch.load(benepar_model, weights_only=True)["config"]
    settings["hparams"] |= {"use_chars_lstm": False, "use_pretrained": True, "pretrained_model": "x", "predict_tags": False}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertConfig(vocab_size=len(pieces), benepar=settings, **sizes).save_pretrained(folder)
    config = ParserConfig(name="benepar", models=folder, device="cpu")
    with pytest.raises(UserError, match=r"cannot read .*benepar_model.bin"):
        build_parser(config)
    torch.save({}, folder / "benepar_model.bin")
    with pytest.raises(UserError, match="benepar cannot load"):  # and from here on transformers has what benepar needs
        build_parser(config)
    made = {**settings, "hparams": HParams(**settings["hparams"]), "pretrained_model_path": str(folder)}
    torch.save(ChartParser(**made).state_dict(), folder / "benepar_model.bin")
    check_rows(LINES, build_parser(config).parse(LINES), dependencies=False)
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "evil.Evil"}}')
    with pytest.raises(UserError, match="names additional code"):
        build_parser(config)


class Pickled:
    """Malicious content of a file: unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def test_pickles_in_models_of_benepar_are_not_run(benepar_model, tmp_path):
    torch.save({"config": {"hparams": Pickled(tmp_path / "made")}, "state_dict": {}}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="does not hold tensors"):
        build_parser(ParserConfig(name="benepar", models=tmp_path / "model.pt", device="cpu"))
    assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def supar_models(tmp_path_factory):
    """SuPar's two parsers with word vectors and random weights, saved by SuPar itself."""
    supar = pytest.importorskip("supar")
    folder = tmp_path_factory.mktemp("supar")
    (folder / "trees").write_text("\n".join(TREES * 4) + "\n")
    rows = []
    for words, xpos, _, heads, deps in SENTENCES:
        columns = zip(words.split(), xpos.split(), heads, deps.split(), strict=True)
        for i, (word, tag, head, relation) in enumerate(columns):
            head = 0 if head == i else head + 1
            rows.append(f"{i + 1}\t{word}\t_\t{tag}\t{tag}\t_\t{head}\t{relation.lower()}\t_\t_")
        rows.append("")
    words = sorted({word.lower() for sentence in SENTENCES for word in sentence[0].split()})
    (folder / "vectors").write_text("".join(f"{word} {i} 0.5 -0.5\n" for i, word in enumerate(["unk", *words])))
    (folder / "arcs").write_text("\n".join(rows * 4) + "\n")
    for kind, file, name in (
        (supar.CRFConstituencyParser, "trees", "constituency.pt"),
        (supar.BiaffineDependencyParser, "arcs", "depparse.pt"),
    ):
        torch.manual_seed(1)
        paths = {split: str(folder / file) for split in ("train", "dev", "test")}
        made = kind.build(str(folder / name), **SUPAR, **paths, embed=str(folder / "vectors"))
        made.save(folder / name)
    return folder


def test_supar_gives_trees_and_arcs_over_words_of_spacy(supar_models, pipeline):
    both = ParserConfig(name="supar", models=supar_models, dependencies=True, device="cpu")
    parser = build_parser(both)
    rows = parser.parse(LINES)
    check_rows(LINES, rows, dependencies=True)
    assert all(row.trees[0].startswith("(TOP (") and set(row.words["pos_tag"]) == {"X"} for row in rows)
    for line, row in zip(LINES, rows, strict=True):
        alone = parser.parse([line])[0]
        assert (alone.words, alone.trees, alone.arcs) == (row.words, row.trees, row.arcs)
    arcs_alone = both.model_copy(update={"constituency": False, "package": str(pipeline)})
    own = build_parser(arcs_alone).parse(LINES)
    check_rows(LINES, own, dependencies=True)
    assert own[0].arcs == rows[0].arcs and own[0].words["pos_tag"] == SENTENCES[0][2].split()
    with pytest.raises(UserError, match="gives no universal tags"):
        build_parser(both.model_copy(update={"constituency": False}))
    (supar_models / "depparse.pt").rename(supar_models / "other.pt")
    try:
        with pytest.raises(UserError, match="has no depparse.pt"):
            build_parser(both)
    finally:
        (supar_models / "other.pt").rename(supar_models / "depparse.pt")


def test_supars_own_reader_gives_the_same(supar_models, monkeypatch):
    import supar

    load = torch.load
    # Its reader runs the pickles, which PyTorch refuses unless it is told to; the files are our own.
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: load(*arguments, **{**options, "weights_only": False}))
    words = [SENTENCES[0][0].split(), SENTENCES[1][0].split()]
    trees = supar.Parser.load(str(supar_models / "constituency.pt")).predict([list(w) for w in words], verbose=False).trees
    arcs = supar.Parser.load(str(supar_models / "depparse.pt")).predict([list(w) for w in words], verbose=False, tree=True)
    monkeypatch.undo()
    config = ParserConfig(name="supar", models=supar_models, dependencies=True, device="cpu")
    lines = [" ".join(w) for w in words]
    rows = build_parser(config).parse(lines, [Given(words=split_at_blanks(line)) for line in lines])
    for row, tree, heads, relations in zip(rows, trees, arcs.arcs, arcs.rels, strict=True):
        assert row.trees[0] == " ".join(str(tree).split()).replace("(_ ", "(X ")
        assert row.arcs == {"governor": [head - 1 for head in heads], "deprel": list(relations)}


def test_supar_files_that_lack_weights_are_refused(supar_models, tmp_path):
    from treeproc.extras.parsers.supar import read_supar

    state = read_supar(supar_models / "constituency.pt")
    del state["state_dict"]["word_embed.weight"]
    state["transform"] = None
    state["args"] = state["args"].update({"delete": None})
    torch.save(state, tmp_path / "constituency.pt")
    with pytest.raises(UserError, match="its weights do not fit the model: word_embed.weight"):
        build_parser(ParserConfig(name="supar", models=tmp_path, device="cpu"))


def test_pickles_in_models_of_supar_are_not_run(supar_models, tmp_path):
    torch.save({"name": "crf-constituency", "args": Pickled(tmp_path / "made")}, tmp_path / "constituency.pt")
    with pytest.raises(UserError, match="holds more than SuPar's tables"):
        build_parser(ParserConfig(name="supar", models=tmp_path, device="cpu"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["spacy", "benepar", "supar"])
def test_a_missing_package_is_one_line(name, monkeypatch, tmp_path):
    monkeypatch.setattr("treeproc.common.errors.find_spec", lambda name: None)
    needs = {"models": tmp_path}
    if name == "spacy":
        needs = {"package": "en_core_web_sm", "dependencies": True, "constituency": False}
    with pytest.raises(UserError, match=rf"parser.name={name} needs spacy.*: pip install 'tree-attention\[.*{name}\]'$"):
        describe_parser(ParserConfig(name=name, device="cpu", **needs))


def test_settings_of_older_data_sets_are_described_as_then():
    assert "package" not in ParserConfig().facts()
    assert "package" in ParserConfig(name="benepar", models="x", package="en_x").facts()


def test_brackets_of_any_parser_are_given_trees(tmp_path, caplog):
    """Without a parser in the settings, too. The job says so, and says if a parser that was set takes their place."""
    (tmp_path / "a.mrg").write_text("\n".join(TREES) + "\n")
    settings = {"splits": {"train": {"source": [tmp_path / "a.mrg"]}}, "format": "brackets", "subwords": {"vocab_size": 290}}
    for name, parser in (("named", {"name": "given"}), ("open", {}), ("parsed", {"name": "shipped"})):
        index = preprocess(PreprocessConfig.model_validate({**settings, "parser": parser, "workers": 0}), tmp_path / name)
        rows = [row for shard in SplitShards(tmp_path / name / "parsed", "train") for row in shard.rows()]
        is_given = name != "parsed"
        assert ([row["trees"] for row in rows] == [[tree] for tree in TREES]) == is_given
        assert summary(index, tmp_path / name).split("\n")[0].endswith(f"trees: {'given' if is_given else 'parsed'}")
        assert ("parser.name is shipped, so the job does not use the trees of the files" in caplog.text) != is_given
    one, other = ((tmp_path / name / "config.yaml").read_bytes() for name in ("named", "open"))
    assert one == other


def test_trees_of_files_are_taken_unless_another_parser_or_arcs_are_set():
    def chosen(begun=None, **values) -> str:
        return PreprocessConfig.model_validate({"format": "brackets"} | values).settled(begun).parser.name

    assert (
        chosen()
        == chosen(parser={"language": "sv"})
        == chosen(format="sst")
        == chosen(tree={"tree_source": "balanced"})
        == "given"
    )
    assert chosen(format="labelled", labelled={"brackets": True}) == "given"
    assert chosen(begun={"parser": {"name": "stanza"}}) == "stanza" and chosen(begun={"parser": {"name": "given"}}) == "given"
    assert chosen(parser={"name": "words"}) == "words" and chosen(parser={"max_words": 20}) == "stanza"
    assert chosen(parser={"dependencies": True}) == chosen(tree={"tree_source": "dependencies"}) == "stanza"
    assert chosen(tree={"side": "target"}) == chosen(format="labelled") == chosen(format="conllu") == "stanza"
