"""The shipped German and French models: arcs of raw text, as written and lower-cased, and a data set of trees made of them."""

import pytest

from treeproc.parsers import ParserConfig, build_parser
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.verify import verify

pytestmark = pytest.mark.slow

# Lines with their subjects and verbs.
SUBJECTS = {
    "de": {
        "Der alte Hund schläft im Garten.": ("Hund", "schläft"),
        "Meine Schwester hat gestern ein neues Buch gekauft.": ("Schwester", "gekauft"),
        "Wir wohnen in einer kleinen Stadt.": ("Wir", "wohnen"),
    },
    "fr": {
        "Le chien dort dans le jardin.": ("chien", "dort"),
        "Ma sœur a acheté un nouveau livre hier.": ("sœur", "acheté"),
        "Nous habitons dans une petite ville.": ("Nous", "habitons"),
    },
}


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("language", SUBJECTS)
def test_subjects_are_found_in_both_cases(language, lower):
    parser = build_parser(ParserConfig(name="shipped", language=language, dependencies=True, constituency=False))
    lines = [line.lower() if lower else line for line in SUBJECTS[language]]
    for line, parsed, (subject, verb) in zip(lines, parser.parse(lines), SUBJECTS[language].values(), strict=True):
        words = parsed.words["text"]
        assert words == line.replace(".", " .").split() and parsed.parse_status == "parsed"
        dependent, governor = (words.index(word.lower() if lower else word) for word in (subject, verb))
        assert (parsed.arcs["governor"][dependent], parsed.arcs["deprel"][dependent]) == (governor, "nsubj")


@pytest.mark.parametrize("language", SUBJECTS)
def test_they_are_source_sides(language, tmp_path):
    (tmp_path / language).write_text("\n".join(list(SUBJECTS[language]) * 4), encoding="utf-8")
    (tmp_path / "en").write_text("\n".join(["A dog.", "A book.", "A town."] * 4), encoding="utf-8")
    config = {
        "splits": {"train": {"source": [tmp_path / language], "target": [tmp_path / "en"]}},
        "parser": {"name": "shipped", "language": language, "dependencies": True, "constituency": False},
        "tree": {"tree_source": "dependencies"},
        "subwords": {"vocab_size": 300},
        "workers": 0,
    }
    index = preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    assert index["totals"]["train"]["nodes"] > 12 * 3 and "12 parsed" in summary(index, tmp_path / "data")
    assert not verify(tmp_path / "data").problems
