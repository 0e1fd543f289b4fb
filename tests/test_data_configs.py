"""Translation data whose trees are made of arcs: the configurations on made-up lines in the place and form of their files."""

import gzip
from pathlib import Path

import pytest
from sacremoses import MosesTokenizer

from treeproc.common.settings import load_settings
from treeproc.parsers.model_files import SHIPPED_MODELS
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.subwords import LabelVocab, Subwords

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).resolve().parent.parent / "workflows" / "configs"
LINES = {
    "en": ["The man next door didn't see a dog.", "Who's there?", "An old woman reads & writes in the garden, and they laugh."],
    "de": ["Der Mann von nebenan sah keinen Hund.", "Wer ist's?", "Eine alte Frau liest & schreibt im Garten, und sie lachen."],
    "fr": ["L'homme d'à côté n'a pas vu de chien.", "Qui l'a ?", "Une vieille femme lit & écrit au jardin, et ils rient."],
}
COPIES = 8
ARCS = ("parser.dependencies=true", "tree.tree_source=dependencies")
SMALL = ("subwords.vocab_size=320", "workers=0")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """The folder that relative paths of a configuration lead to; no model is found but the shipped ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(tmp_path / "none"))
    return tmp_path


def tokens(language: str) -> list[str]:
    """The lines as Moses tokenises them, lower-cased."""
    return [MosesTokenizer(lang=language).tokenize(line, return_str=True).lower() for line in LINES[language]]


def write_files(config: PreprocessConfig) -> None:
    """Every file that the configuration reads, with the lines of the language of its name."""
    for path in (path for files in config.splits.values() for path in [*files.source, *files.target]):
        language = path.name.removesuffix(".gz").removesuffix(".xml").rpartition(".")[2]
        lines = LINES[language] if config.tokenized == "none" else tokens(language)
        if path.suffix == ".xml":
            lines = [f'<seg id="{number}"> {line.replace("&", "&amp;")} </seg>' for number, line in enumerate(lines, start=1)]
            lines = ["<doc>", *lines, "</doc>"]
        else:
            lines = lines * COPIES
        path.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(f"{line}\n" for line in lines).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def make(name: str, *overrides: str) -> tuple[PreprocessConfig, dict]:
    config = load_settings(PreprocessConfig, CONFIGS / f"{name}_data.yaml", [*overrides, *SMALL])
    write_files(config)
    return config, preprocess(config, Path(name))


def rows(data: Path, stage: str, split: str) -> list[dict]:
    return [row for shard in SplitShards(data / stage, split) for row in shard.rows()]


@pytest.mark.parametrize(
    ("name", "overrides", "counts"),
    [
        ("iwslt14_de_en", (), (23, 1, 15)),
        ("iwslt13_fr_en", (), (24, 3, 3)),
        ("iwslt13_en_fr", ARCS, (24, 3, 3)),
        ("multi30k_de_en", (), (24, 24, 24)),
        ("multi30k_fr_en", (), (24, 24, 24)),
        ("iwslt14_part_de_en", (), (24, 24, 24)),
    ],
)
def test_configuration_makes_trees_of_arcs(name, overrides, counts):
    config, index = make(name, *overrides)
    data = Path(name)
    assert f"_{config.parser.language}_" in name
    assert index["tree_source"] == "dependencies" and config.parser.constituency == bool(overrides)
    splits = read_index(data / "parsed")["totals"]
    assert tuple(splits[split]["status.parsed"] for split in ("train", "valid", "test")) == counts
    names = LabelVocab.load(data / "encoded/vocab/labels.txt").names
    assert {"S", "NP", "VP"} <= set(names)
    subwords = Subwords(data / "encoded/vocab/pieces.model")
    for text, row in zip(rows(data, "text", "test"), rows(data, "encoded", "test"), strict=True):
        assert subwords.decode([row["leaves"]["piece"], row["tgt_pieces"]]) == [text["source"], text["target"]]
        assert "&a" not in text["source"] + text["target"] and len(row["arcs"]["governor"])


def test_trees_of_arcs_stand_beside_constituents_of_the_same_pieces():
    names = ("iwslt14_part_en_de", "iwslt14_part_en_de_dependencies")
    (_, parsed), (_, of_arcs) = make(names[0]), make(names[1], f"parsed={names[0]}")
    assert (parsed["tree_source"], of_arcs["tree_source"]) == ("parsed", "dependencies")
    same = [key for key in parsed if key.endswith("fingerprint") and parsed[key] == of_arcs[key]]
    assert "text_fingerprint" in same and "parsed_fingerprint" in same and "tree_fingerprint" not in same
    first, second = (rows(Path(name), "encoded", "train") for name in names)
    for own, other in zip(first, second, strict=True):
        assert all(own["leaves"][name].tolist() == other["leaves"][name].tolist() for name in ("piece", "word_index"))
        assert own["tgt_pieces"].tolist() == other["tgt_pieces"].tolist()
    assert any(own["spans"]["end"].tolist() != other["spans"]["end"].tolist() for own, other in zip(first, second, strict=True))


def test_constituents_of_german_are_one_line_away(place, monkeypatch):
    """The line that iwslt14_de_en_data.yaml names. The shipped English models stand in for Stanza's German ones."""
    monkeypatch.setattr("treeproc.parsers.model_files.SHIPPED_MODELS", place / "shipped")
    (place / "shipped").mkdir()
    (place / "shipped" / "de").symlink_to(SHIPPED_MODELS / "en")
    overrides = "parser.constituency=true tree.tree_source=parsed"
    assert f" {overrides}." in " ".join((CONFIGS / "iwslt14_de_en_data.yaml").read_text().replace("#", "").split())
    config, index = make("iwslt14_de_en", *overrides.split())
    assert (config.parser.language, index["tree_source"]) == ("de", "parsed")
