"""Treebanks of Universal Dependencies by their folder: which files teach, which are held out, tags and lower case."""

from pathlib import Path

import pytest

from treeproc.common.settings import UserError
from treeproc.extras.parser_training.config import TrainParserConfig, ud_treebanks
from treeproc.extras.parser_training.job import possible_models, read_treebanks
from treeproc.extras.parser_training.treebank import lowered, sentences_in
from treeproc.readers.numbered_lines import read_texts


def sentence(number: int) -> str:
    words = [("Ein", "DET", "ART", 2, "det"), (f"Hund{number}", "NOUN", "NN", 3, "nsubj"), ("bellt", "VERB", "VVFIN", 0, "root")]
    rows = [f"{i}\t{w}\t_\t{u}\t{x}\t_\t{g}\t{r}\t_\t_" for i, (w, u, x, g, r) in enumerate(words, start=1)]
    return "\n".join([f"# text = Ein Hund{number} bellt", *rows, "", ""])


def write(folder: Path, name: str, count: int, first: int = 0) -> None:
    (folder / name).write_text("".join(sentence(first + i) for i in range(count)), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "de_all-ud-train.conllu", 30)
    write(tmp_path, "de_all-ud-dev.conllu", 5, 100)
    write(tmp_path, "de_all-ud-test.conllu", 7, 200)
    write(tmp_path, "de_two-ud-dev.conllu", 20, 300)
    write(tmp_path, "de_two-ud-test.conllu", 6, 400)
    write(tmp_path, "de_one-ud-test.conllu", 200, 500)
    write(tmp_path, "fr_all-ud-train.conllu", 3)
    (tmp_path / "README.md").write_text("x")
    return tmp_path


def config_of(folder: Path, **values) -> TrainParserConfig:
    return TrainParserConfig.model_validate({"treebank": folder, "language": "de", "hold_out": 5} | values)


def test_every_treebank_of_the_language_teaches_and_is_scored(folder):
    found = {treebank.name: treebank for treebank in read_treebanks(config_of(folder))}
    sizes = {name: {split: len(part) for split, part in t.sentences.items()} for name, t in found.items()}
    assert list(sizes) == ["de_all", "de_one", "de_two"]
    assert sizes["de_all"] == {"train": 30, "valid": 5, "test": 7}
    # Without a train file dev teaches, and a part of it chooses the weights.
    assert sizes["de_two"]["test"] == 6 and sizes["de_two"]["train"] + sizes["de_two"]["valid"] == 20
    # A file alone is cut into runs of neighbours, here of ten: the first and the eleventh of twenty are test.
    assert sizes["de_one"] == {"train": 160, "valid": 20, "test": 20}
    texts = {split: [s.text for s in part] for split, part in found["de_one"].sentences.items()}
    assert len({text for part in texts.values() for text in part}) == 200
    whole = sentences_in(read_texts([folder / "de_one-ud-test.conllu"]))
    assert texts["test"] == [s.text for s in whole[:10] + whole[100:110]]


def test_universal_tags_alone_and_lower_case_in_the_same_splits(folder):
    found = {t.name: t for t in read_treebanks(config_of(folder, tags="upos", lower_case=1))}
    assert [name for name in found if name.endswith("_lower")] == ["de_all_lower", "de_one_lower", "de_two_lower"]
    for name in ("de_all", "de_one", "de_two"):
        for split, part in found[name].sentences.items():
            low = found[f"{name}_lower"].sentences[split]
            assert [s.text for s in low] == [s.text.lower() for s in part] and part[0].words[0] == "Ein"
            assert all(s.xpos == [""] * 3 and s.upos == ["DET", "NOUN", "VERB"] for s in [*part, *low])
            assert [s.governors for s in low] == [s.governors for s in part]


def test_a_share_of_train_alone_is_lower_cased(folder):
    whole, some = (read_treebanks(config_of(folder, lower_case=share)) for share in (1, 0.5))
    for all_of_it, part in zip(whole, some, strict=True):
        names = {split: [s.text for s in found] for split, found in part.sentences.items()}
        wanted = {split: [s.text for s in found] for split, found in all_of_it.sentences.items()}
        assert set(names["train"]) <= set(wanted["train"])
        assert (names["valid"], names["test"]) == (wanted["valid"], wanted["test"])
    counts = [sum(len(t.sentences["train"]) for t in found if t.name.endswith("_lower")) for found in (whole, some)]
    assert 0.3 * counts[0] < counts[1] < 0.7 * counts[0]


def test_lower_case_keeps_every_character_in_its_place():
    assert lowered("İSTANBUL Straße") == "İstanbul straße"


def test_a_folder_without_the_language_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"has no treebank of language es; its languages are de, fr"):
        ud_treebanks(folder, "es")
    with pytest.raises(UserError, match="has no file LANGUAGE_NAME-ud-SPLIT.conllu"):
        ud_treebanks(tmp_path / "nowhere", "es")


def test_a_treebank_of_test_files_alone_is_scored_and_teaches_nothing(folder):
    values = {"conllu": {"test": [folder / "de_two-ud-test.conllu"]}}
    found = {t.name: t for t in read_treebanks(config_of(folder, treebank=None, treebanks={"only": values}))}
    assert {split: len(part) for split, part in found["only"].sentences.items()} == {"test": 6}
    with pytest.raises(UserError, match="no model can be trained"):
        possible_models(config_of(folder, treebank=None, treebanks={"only": values}, models=["pos", "depparse"]), [found["only"]])
