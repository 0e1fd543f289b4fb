"""The shipped German models: arcs of raw text, as written and lower-cased, and a data set of trees made of them."""

import pytest

from treeproc.job.preprocess import PreprocessConfig, preprocess
from treeproc.job.report import summary
from treeproc.parsers import ParserConfig, build_parser
from treeproc.verify import verify

LINES = [
    "Der alte Hund schläft im Garten.",
    "Meine Schwester hat gestern ein neues Buch gekauft.",
    "Wir wohnen in einer kleinen Stadt.",
]
SUBJECTS = [("Hund", "schläft"), ("Schwester", "gekauft"), ("Wir", "wohnen")]


@pytest.mark.parametrize("lower", [False, True])
def test_subjects_are_found_in_both_cases(lower):
    parser = build_parser(ParserConfig(name="shipped", language="de", dependencies=True, constituency=False))
    lines = [line.lower() if lower else line for line in LINES]
    for line, parsed, (subject, verb) in zip(lines, parser.parse(lines), SUBJECTS, strict=True):
        words = parsed.words["text"]
        assert words == line.replace(".", " .").split() and parsed.parse_status == "parsed"
        dependent, governor = (words.index(word.lower() if lower else word) for word in (subject, verb))
        assert (parsed.arcs["governor"][dependent], parsed.arcs["deprel"][dependent]) == (governor, "nsubj")


def test_german_is_a_source_side(tmp_path):
    (tmp_path / "de").write_text("\n".join(LINES * 4), encoding="utf-8")
    (tmp_path / "en").write_text("\n".join(["A dog.", "A book.", "A town."] * 4), encoding="utf-8")
    config = {
        "splits": {"train": {"source": [tmp_path / "de"], "target": [tmp_path / "en"]}},
        "parser": {"name": "shipped", "language": "de", "dependencies": True, "constituency": False},
        "tree": {"tree_source": "dependencies"},
        "subwords": {"vocab_size": 300},
        "workers": 0,
    }
    index = preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    assert index["totals"]["train"]["nodes"] > 12 * 3 and "12 parsed" in summary(index, tmp_path / "data")
    assert not verify(tmp_path / "data").problems
