"""All sentences on the page of a report: what is kept, and in a browser sorting, filters and marks of words."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
from browser import MISSING, browser

from treenet.report import lines as module
from treenet.report.lines import Lines
from treenet.report.page import render_page
from treenet.report.report_model import Inside, Report, Scored

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=\"document.title='run'\">"
WORDS = ["Haus", "Baum", "Kind", "sah", "ging", "und", "nicht", "ein", EVIL]


def make_lines(count: int, systems: Sequence[str] = ("plain", "tree", "other"), baseline: int | None = 0) -> Lines:
    """Random sentences of a few words; numbers with ties."""
    random = np.random.default_rng(3)

    def texts() -> list[str]:
        return [" ".join(random.choice(WORDS, random.integers(1, 9))) + "." for _ in range(count)]

    return Lines(
        total=count,
        measured="tree",
        baseline=baseline,
        systems=list(systems),
        line=[3 * number + 1 for number in range(count)],
        words=random.integers(1, 30, count).tolist(),
        depth=random.integers(0, 8, count).tolist(),
        source=texts(),
        reference=texts(),
        translations=[texts() for _ in systems],
        chrf=[random.integers(0, 101, count).astype(float).tolist() for _ in systems],
    )


def render(lines: Lines) -> str:
    report = Report("Title", "test", [], [], {}, {}, [], [], {}, [], Inside(), Scored(lines=lines))
    return render_page(report, {})


def test_sentences_beyond_the_limit_are_those_of_the_smallest_change():
    lines = make_lines(50)
    assert module._fit(lines, 10**6) is lines
    few = module._fit(lines, 1500)
    assert 2 <= len(few.line) < 20 and few.line == sorted(few.line) and few.total == 50
    cut = set(lines.line) - set(few.line)
    change = dict(zip(lines.line, lines.changes().tolist(), strict=True))
    assert min(change[line] for line in few.line) >= max(change[line] for line in cut)
    place = lines.line.index(few.line[0])
    assert few.source[0] == lines.source[place] and [c[0] for c in few.chrf] == [c[place] for c in lines.chrf]
    assert f"{len(few.line)} of the 50 sentences of test" in render(few)
    assert module._fit(make_lines(50, ["one"], None), 1500).line[:3] == [1, 4, 7]  # no baseline: the first ones


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("lines")
    (folder / "index.html").write_text(render(make_lines(130)))
    with browser(folder / "profile") as window:
        window.resize(1280)
        window.open(folder / "index.html")
        yield window


SHOWN = """
  const more = document.querySelector('button.more');
  while (!more.hidden) more.click();
  return [...document.querySelectorAll('ol.lines li')].map((item) => Number(item.dataset.line));"""


def ask(window, **values) -> list[int]:
    """The lines that are drawn in the end, with these values in the form and nothing else."""
    window.run(
        """
        const form = document.querySelector('.filters');
        form.reset();
        for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;
        form.dispatchEvent(new Event('input', {bubbles: true}));""",
        {name.replace("_", "-"): value for name, value in values.items()},
    )
    return window.run(SHOWN)


def expected(lines: Lines, keep=lambda row: True, key=lambda row: 0) -> list[int]:
    """The slow oracle: rows that `keep` takes, by `key`, ties in the order of the file."""
    return [lines.line[row] for row in sorted(filter(keep, range(len(lines.line))), key=lambda row: (key(row), row))]


def test_in_a_browser_sentences_are_sorted(window):
    lines = make_lines(130)
    for place in (1, 2):
        change, words, depth = np.array(lines.chrf[place]) - np.array(lines.chrf[0]), np.array(lines.words), np.array(lines.depth)
        columns = {
            "change-down": -change,
            "change-up": change,
            "change-size": -abs(change),
            "words-up": words,
            "depth-down": -depth,
        }
        columns |= {"line-up": np.array(lines.line), "chrf-up": np.array(lines.chrf[place])}
        for name, column in columns.items():
            assert ask(window, system=place, order=name) == expected(lines, key=column.tolist().__getitem__), name


def test_in_a_browser_sentences_are_filtered(window):
    lines = make_lines(130)
    change = (np.array(lines.chrf[2]) - np.array(lines.chrf[0])).tolist()
    found = ask(
        window, system=2, order="line-up", change_from=-20, change_to=40, words_from=5, words_to=25, depth_to=6, text="kind"
    )

    def keep(row: int) -> bool:
        texts = (lines.source, lines.reference, lines.translations[0], lines.translations[2])
        small = -20 <= change[row] <= 40 and 5 <= lines.words[row] <= 25 and lines.depth[row] <= 6
        return small and any("Kind" in text[row] for text in texts)

    assert found == expected(lines, keep) and 5 < len(found) < 125
    status = "return document.querySelector('.count').textContent;"
    assert window.run(status).startswith(f"{len(found)} of 130 sentences")
    assert ask(window, text="no such word") == [] and window.run(status).startswith("0 of 130")


def test_in_a_browser_few_rows_are_drawn_until_more_are_asked_for(window):
    window.run("document.querySelector('.filters').reset(); ")
    window.run("document.querySelector('.filters').dispatchEvent(new Event('input'));")
    count = "return document.querySelectorAll('ol.lines li').length;"
    assert window.run(count) == 10
    window.click(window.run("return document.querySelector('button.more');"))
    assert window.run(count) == 60
    assert window.run("return [...document.querySelectorAll('ol.lines li')].indexOf(document.activeElement);") == 10


def tokens(line: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", line)


def longest_common(a: list[str], b: list[str]) -> int:
    """Length of a longest common subsequence, by recursion over prefixes."""
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
    for i, j in np.ndindex(len(a), len(b)):
        table[i + 1, j + 1] = table[i, j] + 1 if a[i] == b[j] else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def test_in_a_browser_words_in_which_translations_differ_are_marked(window):
    lines = make_lines(130)
    drawn = ask(window, system=1, order="line-up")
    assert drawn == lines.line
    shown = window.run("""return [...document.querySelectorAll('ol.lines li')].map((item) => [...item.querySelectorAll('dd')]
        .map((dd) => [dd.textContent, dd.querySelectorAll('mark').length, dd.querySelectorAll('mark.right').length]));""")
    for row, (source, reference, plain, tree) in enumerate(shown):
        assert (source[0], reference[0], source[1], reference[1]) == (lines.source[row], lines.reference[row], 0, 0)
        texts = [lines.translations[place][row] for place in (0, 1)]
        equal = longest_common(*map(tokens, texts))
        for text, (content, marks, right) in zip(texts, (plain, tree), strict=True):
            assert content == text and marks == len(tokens(text)) - equal
            assert right <= longest_common(tokens(text), tokens(lines.reference[row]))


def test_in_a_browser_no_text_of_a_sentence_becomes_markup(window):
    assert window.run("return [document.title, document.images.length];") == ["Title", 0]
    assert [entry for entry in window.log("browser") if entry["level"] != "INFO"] == []


def test_in_a_browser_one_system_alone_is_marked_against_the_reference(tmp_path):
    if MISSING:
        pytest.skip(MISSING)
    lines = make_lines(8, ["one"], None)
    lines.translations[0][0] = "word " * 401
    (tmp_path / "index.html").write_text(render(lines))
    with browser(tmp_path / "profile") as window:
        window.open(tmp_path / "index.html")
        assert ask(window, order="chrf-down") == expected(lines, key=lambda row: -lines.chrf[0][row])
        assert ask(window, order="line-up", change_from=50) == expected(lines, lambda row: lines.chrf[0][row] >= 50)
        ask(window, order="line-up")
        shown = window.run("""return [...document.querySelectorAll('ol.lines li')].map((item) =>
            [item.querySelectorAll('mark').length, item.textContent.includes('not compared')]);""")
        assert shown[0] == [0, True]
        for row in range(1, 8):
            own, reference = tokens(lines.translations[0][row]), tokens(lines.reference[row])
            assert shown[row] == [len(own) - longest_common(own, reference), False]
