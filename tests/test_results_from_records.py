"""Every figure in a table of a study on our pages is the one that the project computes from a record, or is marked there."""

import json
import re
from pathlib import Path

import pytest
from figures import FIGURE, RUNS, Row, report, unpaired
from from_records import MIXED, TABLES, fill, path_of
from page_template import find_tables
from sentences import SENTENCES

from treenet.experiments.comparable import check_one_study, find_unlike_sizes
from treenet.experiments.recorded_study import form_of
from treenet.experiments.records import read_records
from treenet.report.build import write_report
from treenet.report.settings import ReportSettings
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

# Tables whose runs kept no record, by page and place, with the folder in which their records would be. This list may only shrink.
WITHOUT_RECORD = {
    ("multi30k.md", "Multi30k English-German: check against a published score#0"): "multi30k_check",
}
# The same, of parts of tables that have other figures with a record.
PARTS_WITHOUT_RECORD = {
    ("results/README.md", "lose 4 to 5 BLEU on Multi30k (two runs), 0.3 to 1.0 on IWSLT'14"): "iwslt14_trees",
    ("results/README.md", "Multi30k: 50.5 to 52.4 % for 42.8 % of positions."): "multi30k_trees",
    ("results/README.md", "IWSLT'14: 59.7, 39.5 and 61.4 % for 45.4 %"): "iwslt14_trees",
    ("results/README.md", "with wrong trees it is up to 69.1 %"): "iwslt14_trees",
}
# Tables without a score of a trained model.
OTHER_TABLES = {
    ("control.md", "Every model that reads a tree#0"),
    ("language_models.md", "Cost#0"),
    ("pretrained.md", "Protocol#0"),
    ("pretrained.md", "Protocol#1"),
    ("pretrained.md", "Two more tasks#0"),
    ("protocols/multi30k.md", "Protocol: study M, the systems on Multi30k#0"),
    ("windows.md", "Seconds and memory of one rank#0"),
}
PAGES = sorted({*SENTENCES, *(page for page, _ in (*TABLES, *MIXED, *WITHOUT_RECORD, *OTHER_TABLES))})
# A claim of the paper is about a study if its row begins with a link to one of these.
STUDIES = re.compile(r"\((translation|classification|language_models|multi30k|finetuning|windows|pretrained|control)\.md")


def test_the_records_of_every_folder_are_of_one_study():
    """Earlier records have no hash of their pieces, and the sizes of our studies have no settings of their own."""
    for folder in {path.parent for path in RUNS.rglob("*.json")}:
        records = [one for one in map(json.loads, map(Path.read_text, folder.glob("*.json"))) if "labels" in one]
        if records:
            system = form_of(records).system
            check_one_study(records, system)
            assert system == "system" or not find_unlike_sizes(records, system)


@pytest.fixture(scope="module", params=PAGES)
def page(request):
    return request.param, path_of(request.param).read_text(encoding="utf-8")


def unchecked(name: str, text: str, checked: list[tuple[int, int]]) -> list[str]:
    """Return the figures of tables of studies that no record gives and no list names, and the tables in none or two lists."""
    out = []
    parts = [re.compile(r"\s+".join(map(re.escape, part.split()))) for page, part in PARTS_WITHOUT_RECORD if page == name]
    covered = [*checked, *(one.span() for part in parts for one in part.finditer(text))]
    for table in find_tables(text):
        place = (name, table.place)
        if sum(place in known for known in (TABLES, MIXED, WITHOUT_RECORD, OTHER_TABLES)) != 1:
            out.append(f"{place} must be in one of TABLES, MIXED, WITHOUT_RECORD, OTHER_TABLES")
        for cells in table.rows if place in MIXED else ():
            if name == "results/README.md" and not STUDIES.search(text[slice(*cells[0])]):
                continue
            for column, (start, end) in enumerate(cells):
                for found in FIGURE.finditer(text, start, end) if column not in MIXED[place] else ():
                    if not any(low <= found.start() and found.end() <= high for low, high in covered):
                        out.append(f"{place}: {found[0]} in {text[start:end]!r}")
    return out


def section(text: str, at: int) -> str:
    """Return the text between the headings around a place."""
    start, end = text.rfind("\n#", 0, at), text.find("\n#", at)
    return text[max(start, 0) : end if end > 0 else len(text)]


def test_every_figure_of_a_study_is_computed_from_a_record(page):
    name, text = page
    filled = fill(name, text)
    assert not filled.problems
    assert filled.text == text, "run `python docs/results/from_records.py`, and check what it changed"
    assert unchecked(name, text, filled.checked) == []


def test_pages_tell_what_has_no_record(page):
    name, text = page
    places = {table.place: table.start for table in find_tables(text)}
    for (of, place), folder in WITHOUT_RECORD.items():
        if of == name:
            assert place in places, f"{place} is no longer there: remove it from the list"
            assert re.search("without record", section(text, places[place]), re.IGNORECASE), place
            assert not (RUNS / folder).exists(), f"{folder} has records: compute {place} from them"
    for (of, part), folder in PARTS_WITHOUT_RECORD.items():
        if of == name:
            found = re.search(r"\s+".join(map(re.escape, part.split())), text)
            assert found, f"{part!r} is no longer there: remove it from the list"
            line = text[text.rfind("\n", 0, found.start()) : text.find("\n", found.end())]
            assert "ithout record" in line, part
            assert not (RUNS / folder).exists(), f"{folder} has records: compute {part!r} from them"


def test_another_figure_table_or_place_is_found():
    """The checks above can fail."""
    text = path_of("translation.md").read_text(encoding="utf-8")
    for right, wrong in (("| 16.99, 17.58, 17.40 |", "| 16.99, 17.58, 17.41 |"), ("Ours has 19.26 BLEU", "Ours has 19.27 BLEU")):
        assert right in text and fill("translation.md", text.replace(right, wrong)).text == text
    fewer = fill("translation.md", text.replace("| 16.99, 17.58, 17.40 |", "| 16.99, 17.58 |"))
    assert ["does not have as many figures" in one for one in fewer.problems] == [True]
    gone = fill("translation.md", text.replace("Ours has 19.26 BLEU", "Ours is as good"))
    assert ["must be there once" in one for one in gone.problems] == [True]
    more = text.replace(
        "## Why it could not decide\n", "## Why it could not decide\n\n| model | BLEU |\n|---|---|\n| new | 12.3 |\n"
    )
    assert any("#0') must be in one of" in one for one in unchecked("translation.md", more, fill("translation.md", more).checked))
    claims = path_of("results/README.md").read_text(encoding="utf-8")
    more = claims.replace("it sees +1.1 with", "it is at 12.3 and sees +1.1 with").replace(
        "-0.39 on IWSLT'14 (", "-0.38 on IWSLT'14 ("
    )
    filled = fill("results/README.md", more)
    assert "-0.39 on IWSLT'14" in filled.text and len(filled.problems) == 1
    assert any(": 12.3 in" in one for one in unchecked("results/README.md", more, filled.checked))


def test_figures_are_not_digits_of_names():
    text = "SST-5 on IWSLT'14, Multi30k: -0.14, 95 % of 20,764 [+0.1, < 0.001], **2.5** seeds"
    assert [one[0] for one in FIGURE.finditer(text)] == ["-0.14", "95", "20,764", "+0.1", "< 0.001", "2.5"]


def test_the_unpaired_test_of_a_study_is_that_of_its_report():
    """The second study decides by it, with intervals of 97.5 %."""
    row = Row("multi30k", "tree_transformer")
    (of_report,) = (one for one in report("multi30k", None, None, ())["pooled"] if one["model"] == row.system)
    expected = [of_report["difference"], *of_report["interval"], of_report["p_value"], of_report["seen"]]
    assert unpaired("bleu_tokenized", row, ("difference", "interval", "p_value", "seen")) == expected
    narrow, wide = (unpaired("bleu_tokenized", row, ("interval",), level) for level in (0.95, 0.975))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


# The report, from records alone.


def test_a_report_has_the_tables_and_plots_of_records(tmp_path):
    settings = ReportSettings(runs=(str(RUNS / "multi30k"), str(RUNS / "sst2")), main="shuffled")
    page = write_report(settings, tmp_path / "report")[0].read_text(encoding="utf-8")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    compared = {one["model"]: one.get("comparison", {}).get("against") for one in report["studies"]["multi30k"]["points"]}
    assert compared == {"transformer": None, "shuffled": "transformer", "tree_transformer": "shuffled"}
    assert "38.94, 39.55, 38.50" in page and "1.739, 1.732, 1.752" in page and "by nll on valid" in page
    assert report["comparisons"]["sst2"]["baseline"] == "tree_transformer" and "81.43 ± 0.89" in page
    assert {"scaling_1.png", "seeds_1.png"} <= {path.name for path in (tmp_path / "report" / "figures").iterdir()}


def test_a_report_shows_the_nll_of_test_where_records_have_it(tmp_path):
    """They are made up: those of the second study have it."""
    folder = tmp_path / "records"
    folder.mkdir()
    for number, (name, record) in enumerate(read_records(RUNS / "multi30k").items()):
        lines = len(record["sentences"]["bleu_tokenized.length"].split())
        nll = {"nll": " ".join(str(100_000 + 10 * number + line % 7) for line in range(lines)), "target_tokens": "10 " * lines}
        (folder / f"{name}.json").write_text(json.dumps({**record, "sentences": record["sentences"] | nll}))
    settings = ReportSettings(runs=(str(folder),), baseline="shuffled", main="transformer")
    page = write_report(settings, tmp_path / "report")[0].read_text(encoding="utf-8")
    (study,) = json.loads((tmp_path / "report" / "report.json").read_text())["studies"].values()
    tests = [(one["model"], one["against"]) for one in study["pooled"] if one["metric"] == "nll"]
    assert tests == [("transformer", "shuffled"), ("tree_transformer", "shuffled")]
    assert [round(value, 4) for value in study["points"][0]["nll"]["values"]] == [1.0, 1.0001, 1.0002]
    assert "<th" in page and "nll a token" in page and "1.000, 1.000, 1.000" in page


def test_names_without_a_record_and_damaged_records_are_refused(tmp_path):
    for setting in ("baseline", "main"):
        with pytest.raises(UserError, match=f"{setting} must be one of shuffled, transformer, tree_transformer, but is lstm"):
            write_report(ReportSettings(runs=(str(RUNS / "multi30k"),), **{setting: "lstm"}), tmp_path / "report")
    (record, *_) = read_records(RUNS / "sick").values()
    for change, message in (
        ({"settings": {}}, "its task must be"),
        ({"labels": {"model": "plain", "fraction": 1.0, "seed": 1}, "scores": {}}, "must have the scores of one split"),
    ):
        folder = tmp_path / "records"
        folder.mkdir(exist_ok=True)
        (folder / "plain.json").write_text(json.dumps({**record, "cell": "plain", **change}))
        with pytest.raises(UserError, match=message):
            write_report(ReportSettings(runs=(str(folder),)), tmp_path / "report")
