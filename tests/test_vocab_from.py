"""Test splits of any name, in data sets of their own too: with the vocabulary of another data set, for models of that one."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import main_of
from pretrained_data import settings as pretrained_settings
from tiny_tokenizers import write_tokenizer

from treenet.config import DecodingConfig, ModelConfig, TrainConfig
from treenet.evaluation.evaluate import evaluate_run
from treenet.evaluation.settings import EvaluateSettings
from treenet.jobs.train_run import run_training
from treeproc.common.folder_kinds import RUN, mark_folder
from treeproc.common.settings import UserError, load_settings
from treeproc.common.yaml_reader import read_yaml
from treeproc.inspect import describe
from treeproc.shards.lengths import read_lengths
from treeproc.shards.schema import in_order
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.config import check_reuse
from treeproc.stages.filters import FilterConfig
from treeproc.stages.inputs import Inputs, SplitFiles
from treeproc.stages.job_report import DROPPED, line_list
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.stages.text_warnings import TextNotices
from treeproc.stages.text_work import TextWork
from treeproc.verify import verify

pytestmark = pytest.mark.slow

MODEL = ModelConfig(name="tree_transformer", d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
CONLLU = {"format": "conllu", "splits": {"test": {"source": ["a.conllu"]}}}
SST = ["(3 (2 The) (4 best))", "(0 (1 Bad) (2 .))", "(2 (2 So) (2 so))"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for side in ("en", "de"):
        lines = gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).decode().split("\n")
        for name, some in (("train", lines[:60]), ("test", lines[60:70]), ("news", lines[70:75])):
            (folder / f"{name}.{side}").write_text("\n".join(some) + "\n")
    return folder


def files(text: Path, **names: str) -> dict:
    return {split: {"source": [text / f"{name}.en"], "target": [text / f"{name}.de"]} for split, name in names.items()}


@pytest.fixture(scope="module")
def data(text, tmp_path_factory) -> Path:
    """Without a parser model: what a data set takes from another is the same for all parsers."""
    out = tmp_path_factory.mktemp("data") / "data"
    settings = {
        "splits": files(text, train="train", test="test"),
        "parser": {"name": "words"},
        "tree": {"tree_source": "right"},
        "subwords": {"vocab_size": 400},
        "rows_per_shard": 30,
        "workers": 0,
    }
    preprocess(PreprocessConfig.model_validate(settings), out)
    return out


def new_settings(text: Path, data: Path, **more) -> dict:
    splits = files(text, newstest="news", test_2017="test")
    return {"splits": splits, "vocab_from": data, "rows_per_shard": 30, "workers": 0} | more


@pytest.fixture(scope="module")
def new(text, data) -> Path:
    out = data.parent / "new"
    preprocess(PreprocessConfig.model_validate(new_settings(text, data)), out)
    return out


def test_new_test_splits_have_vocabulary_and_settings_of_the_other_data_set(data, new):
    old, index = read_index(data / "encoded"), read_index(new / "encoded")
    for name in ("vocab_fingerprint", "tree_fingerprint", "subword_settings", "tree_settings", "num_pieces", "num_labels"):
        assert index[name] == old[name], name
    for path in (data / "encoded" / "vocab").iterdir():
        assert (new / "encoded" / "vocab" / path.name).read_bytes() == path.read_bytes()
    assert list(index["totals"]) == ["newstest", "test_2017"] and not verify(new).problems
    assert read_lengths(new / "encoded", "newstest")["example_id"].tolist() == list(range(5))
    # The same lines are the same bytes, whatever the split and the data set are called.
    (there,), (here,) = SplitShards(data / "encoded", "test"), SplitShards(new / "encoded", "test_2017")
    assert there.record.sha256 == here.record.sha256
    assert "newstest" in describe(new)[0]


def test_text_without_translations_has_the_same_leaves_and_trees(text, data, new, tmp_path):
    splits = {"newstest": {"source": [text / "news.en"]}}
    preprocess(PreprocessConfig.model_validate(new_settings(text, data, format="text", splits=splits)), tmp_path / "new")
    (one,), (other,) = SplitShards(tmp_path / "new" / "encoded", "newstest"), SplitShards(new / "encoded", "newstest")
    assert len(one) == len(other) == 5 and not verify(tmp_path / "new").problems
    for row in range(5):
        pairs, lines = other.row(row), one.row(row)
        np.testing.assert_equal(lines, {name: value for name, value in pairs.items() if name != "tgt_pieces"})


def test_the_same_command_continues_and_the_settings_are_written_down(text, data, new):
    before = {path: path.stat().st_mtime_ns for path in new.rglob("*.arrow") if path.name != "lengths.arrow"}
    preprocess(PreprocessConfig.model_validate(new_settings(text, data)), new)
    settings = load_settings(PreprocessConfig, new / "config.yaml")
    assert settings.parser.name == "words" and settings.tree.tree_source == "right" and settings.subwords.vocab_size == 400
    preprocess(settings.model_copy(update={"workers": 0}), new)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_data_sets_that_moved_are_continued_with_their_new_places(text, data, tmp_path):
    """Also those that stand on other data sets, whose old places are gone. Another data set in their place is refused."""
    before, after = tmp_path / "before", tmp_path / "after"
    again = {"subwords": {"vocab_size": 390}, "tree": {"tree_source": "left"}}
    shutil.copytree(data, before / "data")

    def run(place: Path, name: str, **values: object) -> dict:
        return preprocess(PreprocessConfig.model_validate({"workers": 0} | values), place / name)

    def run_all(place: Path) -> list[dict]:
        grown = files(text, train="test")
        return [
            run(place, "again", parsed=place / "data", **again),
            run(place, "new", **new_settings(text, place / "data")),
            run(place, "grown", splits=grown, vocab_from=place / "data", new_pieces=5),
            run(place, "of_new", parsed=place / "new", vocab_from=place / "data"),
        ]

    made = run_all(before)
    before.rename(after)
    sound = {path: path.read_bytes() for path in after.rglob("*") if path.is_file() and "encoded" in path.parts}
    (after / "again" / "encoded" / "test-00000-of-00001.arrow").write_bytes(b"")
    assert run_all(after) == made
    assert {path: path.read_bytes() for path in sound} == sound
    for name in ("again", "new", "grown", "of_new"):  # the command that `verify` proposes
        settings = load_settings(PreprocessConfig, after / name / "config.yaml")
        preprocess(settings.model_copy(update={"workers": 0}), after / name)
    other = files(text, train="test", test="news")
    run(tmp_path, "other", splits=other, parser={"name": "words"}, tree={"tree_source": "right"}, subwords={"vocab_size": 400})
    for name, values in (
        ("again", {"parsed": tmp_path / "other"} | again),
        ("new", new_settings(text, tmp_path / "other")),
        ("grown", {"splits": files(text, train="test"), "vocab_from": tmp_path / "other", "new_pieces": 5}),
    ):
        with pytest.raises(UserError, match=rf"{name} (was made of another text stage|has another vocabulary) than .* --out"):
            run(after, name, **values)
    assert {path: path.read_bytes() for path in sound} == sound


def test_old_weights_are_scored_on_new_test_splits_by_name(data, new, tmp_path, repository, capsys):
    decoding = DecodingConfig(beam_size=1, max_length_factor=0.1, max_length_offset=3)
    config = TrainConfig(data=data, model=MODEL, decoding=decoding, workers=0, max_steps=2, checkpoint_every=1)
    run_training(config, tmp_path / "run")
    for split in ("newstest", "test_2017"):
        name, scores = evaluate_run(tmp_path / "run", EvaluateSettings(data=new, split=split))
        assert name == f"{split}.data-new" and scores["split"] == split
    evaluate_run(tmp_path / "run", EvaluateSettings())
    assert (tmp_path / "run" / "translations.test_2017.data-new.txt").read_bytes() == (
        tmp_path / "run" / "translations.test.txt"
    ).read_bytes()
    evaluate = main_of("evaluate.py")
    shutil.copy(tmp_path / "run" / "translations.newstest.data-new.txt", tmp_path / "lines.txt")
    systems = [str(tmp_path / "run"), str(tmp_path / "lines.txt")]
    evaluate(["--compare", *systems, f"data={new}", "split=newstest", "compare.samples=20"])
    assert "newstest" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no split 'test'; there are: newstest, test_2017"):
        evaluate_run(tmp_path / "run", EvaluateSettings(data=new))


def test_control_trees_of_new_test_splits(data, new):
    settings = {"parsed": new, "vocab_from": data, "tree": {"tree_source": "random"}, "workers": 0}
    index = preprocess(PreprocessConfig.model_validate(settings), data.parent / "random")
    assert index["tree_source"] == "random" and index["vocab_fingerprint"] == read_index(data / "encoded")["vocab_fingerprint"]
    again = load_settings(PreprocessConfig, data.parent / "random" / "config.yaml", ["workers=0"])
    assert preprocess(again, data.parent / "random") == index
    with pytest.raises(UserError, match=r"has no train split to learn a vocabulary from; give vocab_from=DATA"):
        preprocess(PreprocessConfig.model_validate({"parsed": new}), data.parent / "none")
    assert not (data.parent / "none").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"parser": {"max_words": 9}},
            r"was made with other settings \(parser.max_words: 150 -> 9\).*, or install that parser$",
        ),
        (
            {"subwords": {"vocab_size": 500}},
            r"was made with other settings \(subwords.vocab_size: 400 -> 500\).*; leave these .* out, and --config if .*them$",
        ),
        ({"tree": {"binarize": "right"}}, r"was made with other settings \(tree.binarize: 'none' -> 'right'\)"),
        ({"format": "brackets", "splits": {"test": {"source": ["a.mrg"]}}}, "have tgt_pieces, but those of these splits do not"),
        ({"splits": {}}, "splits: no files; write splits.train.source=FILE"),
    ],
)
def test_changes_that_make_scores_meaningless_are_refused(text, data, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        preprocess(PreprocessConfig.model_validate(new_settings(text, data, **change)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_that_is_damaged_or_another_is_refused(text, data, new, tmp_path):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    path = other / "encoded" / "vocab" / "labels.txt"
    path.write_text("<unk>\nX\nY\n")
    with pytest.raises(UserError, match=r"labels.txt is missing or damaged"):
        preprocess(PreprocessConfig.model_validate(new_settings(text, other)), tmp_path / "out")
    with pytest.raises(UserError, match=r"vocab_from: cannot read .*none/config.yaml; give the folder of a finished data set"):
        PreprocessConfig.model_validate(new_settings(text, tmp_path / "none"))


@pytest.mark.parametrize("change", [{"tokenized": "none"}, {"tokenized": "none", "parser": {"treebank_words": None}}, CONLLU])
def test_other_text_than_the_tokens_of_the_data_set_is_refused_at_once(text, data, tmp_path, change):
    """Each of these messages led to the next one: set tokenized, set parser.treebank_words, leave it out."""
    other = Path(shutil.copytree(data, tmp_path / "other"))
    config = read_yaml((other / "config.yaml").read_text(), "") | {"tokenized": "moses", "parser": {"treebank_words": True}}
    (other / "config.yaml").write_text(json.dumps(config))
    with pytest.raises(UserError, match="give files of Moses tokens, and leave out tokenized and format"):
        PreprocessConfig.model_validate(new_settings(text, other, **change))
    PreprocessConfig.model_validate(new_settings(text, other))


def test_tokens_for_a_data_set_of_plain_text_are_refused(data):
    index = read_index(data / "encoded")
    own = {"subwords": index["subword_settings"], "tree": index["tree_settings"], "normalization": "none"}
    with pytest.raises(UserError, match=r"treebank_words: None -> True.*; give plain text, and leave tokenized out"):
        check_reuse(data, parser=index["parser"] | {"treebank_words": True}, columns=index["columns"], **own)


def test_the_folder_of_a_run_is_no_data_set(text, tmp_path):
    mark_folder(tmp_path / "run", RUN)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text("{}")
    for folder, kind in (("run", "a training run"), ("export", "an export")):
        with pytest.raises(UserError, match=f"{folder} is {kind}; give the data set that it was trained on"):
            PreprocessConfig.model_validate(new_settings(text, tmp_path / folder))


def test_a_changed_copy_of_a_pretrained_tokenizer_is_named_and_made_again(tmp_path):
    pytest.importorskip("tokenizers")
    settings = pretrained_settings(tmp_path, write_tokenizer(tmp_path / "encoder", "wordpiece"))
    config = PreprocessConfig.model_validate(settings)
    preprocess(config, tmp_path / "data")
    new = {"splits": {"more": settings["splits"]["valid"]}, "vocab_from": tmp_path / "data", "filters": settings["filters"]}
    copy = tmp_path / "data" / "encoded" / "vocab" / "tokenizer.json"
    whole = copy.read_text()
    for change in (lambda: copy.write_text(whole.replace("true", "false", 1)), copy.unlink):
        change()
        with pytest.raises(UserError, match=r"tokenizer.json is missing or damaged; run its tree-attention preprocess again"):
            PreprocessConfig.model_validate(new)
        preprocess(config, tmp_path / "data")
        assert copy.read_text() == whole and PreprocessConfig.model_validate(new).subwords.tokenizer == copy.parent


def test_splits_have_one_order():
    assert in_order(["test_2017", "valid", "newstest", "test", "train"]) == ["train", "valid", "test", "newstest", "test_2017"]


def test_every_held_out_split_counts_as_overlap(text, tmp_path):
    splits = {name: SplitFiles(**one) for name, one in files(text, train="train", newstest="train").items()}
    inputs, filters = Inputs(splits, "parallel", "none", None), FilterConfig(drop_overlap="source")
    (tmp_path / "text").mkdir()
    with line_list(tmp_path / DROPPED) as dropped:
        records = list(TextWork(tmp_path, inputs, filters, {}).write("mark", 100, TextNotices(), dropped))
    assert [record.counts for record in records] == [{"dropped.overlap": 60}, {}]


def test_classes_are_those_of_the_other_data_set(tmp_path, caplog):
    (tmp_path / "train.txt").write_text("\n".join(SST * 20))
    (tmp_path / "more.txt").write_text("\n".join(SST[:2]))
    settings = {
        "splits": {"train": {"source": [tmp_path / "train.txt"]}},
        "format": "sst",
        "labels": {0: 0, 3: 1},
        "parser": {"name": "given"},
        "subwords": {"vocab_size": 290},
        "workers": 0,
    }
    data = tmp_path / "data"
    preprocess(PreprocessConfig.model_validate(settings), data)
    more = {"splits": {"more": {"source": [tmp_path / "more.txt"]}}, "vocab_from": str(data), "workers": 0}
    assert preprocess(PreprocessConfig.model_validate(more), tmp_path / "more")["num_classes"] == 2
    assert "labels" not in caplog.text
    assert [row["label"] for row in SplitShards(tmp_path / "more" / "encoded", "more")[0].rows()] == [1, 0]
    caplog.clear()
    preprocess(PreprocessConfig.model_validate(more | {"labels": {3: 0}}), tmp_path / "less")  # a mapping counts whole
    assert [row["label"] for row in SplitShards(tmp_path / "less" / "encoded", "more")[0].rows()] == [0]
    assert "labels is {'3': 0}, but {'0': 0, '3': 1} in" in caplog.text and "the numbers of classes" in caplog.text
    with pytest.raises(UserError, match="has 2 classes, but these examples have 4; set labels"):
        preprocess(PreprocessConfig.model_validate(more | {"labels": {0: 0, 3: 3}}), tmp_path / "wrong")
    preprocess(PreprocessConfig.model_validate(settings | {"labels": {0: 0, 3: 3}}), tmp_path / "four")
    of_four = {"parsed": tmp_path / "four", "vocab_from": str(data), "workers": 0}
    with pytest.raises(UserError, match="these examples have 4; give as parsed a data set with at most 2 classes"):
        preprocess(PreprocessConfig.model_validate(of_four), tmp_path / "of_four")


def test_the_command_needs_no_configuration(text, data, new, repository):
    main = main_of("preprocess.py")
    splits = [f"splits.newstest.{side}=[{text / f'news.{end}'}]" for side, end in (("source", "en"), ("target", "de"))]
    main(["--out", str(data.parent / "command"), *splits, f"vocab_from={data}", "workers=0"])
    (there,), (here,) = (SplitShards(folder / "encoded", "newstest") for folder in (new, data.parent / "command"))
    assert there.record.sha256 == here.record.sha256
