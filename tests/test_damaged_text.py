"""Notices about damaged lines, mismatched pairs and doubtful classes; their healthy counterparts stay silent."""

import gzip
import json
import random

import pytest
from data_beside import DATA

from treeproc.common.messages import messages_shown
from treeproc.common.settings import UserError
from treeproc.readers.labelled import LabelledConfig, find_classes
from treeproc.readers.segments import segments
from treeproc.shards.store import describe_dropped, read_index
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.job_report import notice_lines
from treeproc.stages.line_rules import DAMAGE, RULES, Chunk
from treeproc.stages.pair_notices import LEAST_PAIRS, MOST_CHARACTERS, MOST_PAIRS, WINDOW, pair_problems, windows
from treeproc.stages.preprocess import SAMPLE, preprocess
from treeproc.stages.text_warnings import TextNotices, is_noticed


def sides(count: int) -> tuple[list[str], list[str]]:
    """The first pairs of the shipped sample."""
    return tuple(
        gzip.decompress((SAMPLE / f"train.{code}.gz").read_bytes()).decode().split("\n")[:count] for code in ("en", "de")
    )


def kinds(line: str) -> list[str]:
    return [kind for kind in DAMAGE if RULES[kind](Chunk(["before", line, "after"])) == [1]]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Donâ€™t go.", "miscoded"),
        ("Ein schÃ¶ner Tag", "miscoded"),
        ("â€žJa,â€œ sagte er.", "miscoded"),
        ("ÐŸÑ€Ð¸Ð²ÐµÑ‚", "miscoded"),
        ("æ—¥æœ¬èªž", "miscoded"),
        ("sch&ouml;n", "entities"),
        ("sch&#246;n &#xF6;&nbsp;", "entities"),
        ("<p>One.</p>", "markup"),
        ('See <a href="x">this</a>', "markup"),
        ("one<br/>two", "markup"),
        (r"sch\u00f6n", "codes"),
        (r"sch\xc3\xb6n", "codes"),
        ("ein%20Tag", "percent"),
        ("sch%C3%B6n", "percent"),
        ("%E6%97%A5%E6%9C%AC", "percent"),
        ("SGVsbG8gV29ybGQu", "base64"),
        ("RXIgd2FyIGRvcnQuIQ==", "base64"),
        ("12 ||| a small house ||| -1.5", "columns"),
        ("12\ta small house", "columns"),
        ("Er f?hrt nach M?nchen.", "lost"),
        ("eine ?bung", "lost"),
        ("?????????", "lost"),
        ("my hоuse", "scripts"),  # the o is Cyrillic
    ],
)
def test_each_damage_is_found_by_its_detector_alone(line, kind):
    assert kinds(line) == [kind]


@pytest.mark.parametrize(
    "line",
    [
        "Don’t say „Öl“ or «é», SCHÖ“, DÉJÀ», É… – Übergröße à l’œuvre Ångström Ð",
        "Tom &amp; Jerry &lt;3 at AT&T; R&D",
        "if a < b and b > c then <unk> <s> </s> <3",
        r"C:\users\x and \usepackage, \xi",
        "100%25 or 50 %20 of it, 5% a",
        "Donaudampfschiffahrt",
        "abcdefgh",
        "a | b || c |||d",
        "What? Why?! Really??? (yes?)",
        "¿Qué? «Quoi ?»",
        "Привет, world! SMS-ка",
        r"%sДата -pБРВ \nПривет",
        "p = &buffer; q = &state->next;",
        "youtu.be/watch?v=dQw4 a.php?page_id=x what????",
        "日本語の文。",
        "",
    ],
)
def test_healthy_lines_have_no_damage(line):
    assert kinds(line) == []


def notices_of(lines: list[str]) -> list[str]:
    config = PreprocessConfig.model_validate(
        {"splits": {"train": {"source": ["a"], "target": ["b"]}}, "parser": {"name": "words"}, "target_parser": None}
    )
    notices = config.notices()
    notices.tell("train", [{"example_id": n, "source": "plain", "target": line} for n, line in enumerate(lines)], ())
    return notice_lines(json.loads(json.dumps(notices.facts())), config.parsers(), config.form)


def test_damage_of_the_target_is_told_with_three_lines():
    lines = ["fein", "sch&ouml;n", "gr&uuml;n", "f&uuml;nf", "zw&ouml;lf"]
    (message,) = notices_of(lines)
    assert "HTML entities" in message and "4 of 5 lines of train target (80.0%)" in message
    assert "line 2: 'sch&ouml;n', 3: 'gr&uuml;n', 4: 'f&uuml;nf'; write" in message


def test_one_line_of_many_is_no_damage():
    assert notices_of(["fein"] * 300 + ["sch&ouml;n <p> M?nchen"]) == []


def test_notices_of_parts_are_those_of_the_whole():
    """Blocks in tasks leave parts, which merge: counts and the three examples are those of one process."""
    wanted = PreprocessConfig.model_validate({"splits": {"train": {"source": ["a"], "target": ["b"]}}}).notices().wanted
    rows = [{"example_id": n, "source": f"{n}%20a", "target": "b" if n % 3 else "<p>"} for n in range(20)]
    whole, merged = TextNotices(wanted), TextNotices(wanted)
    whole.tell("train", rows, ())
    for first in range(0, 20, 7):
        part = TextNotices(wanted)
        part.tell("train", rows[first : first + 7], ())
        merged.merge("train", json.loads(json.dumps(part.parts("train"))))
    assert json.dumps(merged.facts()) == json.dumps(whole.facts())
    assert is_noticed("markup", whole.facts()["train"]["target"])


def told(sources: list[str], targets: list[str]) -> list[tuple[str, int]]:
    return [(kind, more.get("by", 0)) for _, kind, _, more in pair_problems(sources, targets)]


def test_pairs_that_belong_together_are_silent():
    for count in (LEAST_PAIRS, 1000, MOST_PAIRS):
        source, target = sides(count)
        lower = [[line.lower() for line in side] for side in (source, target)]
        for pair in ((source, target), (target, source), lower, (source, [f"Well, {line}" for line in source])):
            assert told(*pair) == []


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_a_shift_is_told_with_its_length(lines):
    source, target = sides(LEAST_PAIRS + lines)
    assert told(source[:-lines], target[lines:]) == [("shifted", -lines)]
    assert told(source[lines:], target[:-lines]) == [("shifted", lines)]


def test_a_shift_from_the_middle_on_is_told_with_its_lines():
    source, target = sides(MOST_PAIRS + 1)
    half = MOST_PAIRS // 2
    ((_, kind, places, more),) = pair_problems(source[:-1], target[:half] + target[half + 1 :])
    assert (kind, more) == ("shifted", {"by": -1}) and sorted(places) == list(range(half, MOST_PAIRS))


def test_another_order_is_told_and_little_or_uniform_text_is_not():
    source, target = sides(LEAST_PAIRS)
    other = random.Random(1).sample(target, len(target))
    assert told(source, other) == [("unrelated", 0)]
    assert told(source[1:], other[1:]) == [], "too few pairs"
    numbers = [str(number) for number in range(1000)]
    assert told(numbers, numbers[::-1]) == [], "no word stands in two lines"
    for other in (50, 60):
        counted = [[f"{code}{n % 50} {code}b{n % other}" for n in range(1000)] for code in "ax"]
        assert told(*counted) == [], "lines that count up go with their neighbours as well"


def test_context_conversations_and_summaries_are_silent():
    source, target = sides(1200)
    context = [" ".join(source[n : n + 4]) for n in range(len(source) - 3)]
    assert told(context, target[3:]) == told(context, target[:-3]) == [], "the sentences before or after, as context"
    assert told(source[:-1], source[1:]) == told(source[1:], source[:-1]) == [], "each line answers the one before or after"
    documents = [line.ljust(MOST_CHARACTERS, ".") for line in source]
    assert told(documents, random.Random(1).sample(target, len(target))) == [], "a summary may be about what is not read"


def test_equal_and_constant_sides_are_told_once():
    source, target = sides(LEAST_PAIRS)
    assert told(source, source) == [("equal", 0)]
    assert told(source, ["Ja."] * len(source)) == [("constant", 0)]
    assert told(["Yes."] * len(source), target) == [("constant", 0)]


def test_windows_lie_evenly_over_a_split():
    assert windows(MOST_PAIRS) == list(range(MOST_PAIRS)) and windows(3) == [0, 1, 2]
    for rows in (MOST_PAIRS + 1, 100_003):
        places = windows(rows)
        assert len(places) == MOST_PAIRS and places[0] == 0 and places[-1] == rows - 1
        starts = places[::WINDOW]
        assert all(places[n * WINDOW : (n + 1) * WINDOW] == list(range(start, start + WINDOW)) for n, start in enumerate(starts))


@pytest.mark.slow
def test_a_job_tells_of_shifted_files_but_changes_nothing(tmp_path, caplog):
    source, target = sides(LEAST_PAIRS + 1)
    (tmp_path / "a").write_text("".join(f"{line}\n" for line in source[:-1]))
    (tmp_path / "b").write_text("".join(f"{line}\n" for line in target[1:]))
    values = {
        "splits": {"train": {"source": [tmp_path / "a"], "target": [tmp_path / "b"]}}, "parser": {"name": "words"},
        "subwords": {"vocab_size": 400}, "workers": 0, "rows_per_shard": 150,
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(values), tmp_path / "data")
    message = "the target of a source stands 1 line before it: 400 of 400 lines of train target (100.0%); for example"
    assert caplog.text.count(message) == 1 and "look for a line that one file lacks" in caplog.text
    facts = read_index(tmp_path / "data" / "text")["notices"]["train"]["target"]["shifted"]
    assert facts["looked_at"] == facts["count"] == 400 and facts["by"] == -1 and len(facts["more"]) == 2


def classes_of(tmp_path, content: str, name: str = "a.tsv", **settings) -> list[str]:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with messages_shown():
        return find_classes([tmp_path / name], LabelledConfig(**settings))


HEALTHY = "".join(f"{['yes', 'no', 'maybe'][n % 3]}\tThe text number {n}.\n" for n in range(30))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "".join(f"text {n}\tc{n % 2}\n" for n in range(30)),
            "30 examples have 30 classes, such as 'text 0'; if these are texts,",
        ),
        (HEALTHY + "yes,no\ta\n", "the class 'yes,no' looks like several classes of one example"),
        (HEALTHY + "no; yes\ta\n", "the class 'no; yes' looks like"),
        ("".join(f"c{n % 2},c{n % 3}\ta {n}\n" for n in range(30)), "6 classes, such as 'c0,c0', look like several classes"),
        (HEALTHY + "Yes\ta\n", "the classes 'Yes' (1 examples) and 'yes' (10) differ only in"),
        ("1\ta\n2\tb\n1.0\tc\n", "the classes '1' (1 examples) and '1.0' (1) differ only in"),
        ("01\ta\n2\tb\n1\tc\n", "or zeros of a number, and are two classes"),
        (
            "label\ttext\n" + HEALTHY + "label\ttext\n" + HEALTHY,
            "line 32: the line repeats the header, and is read as an example",
        ),
        (
            "mood\treview\n" + HEALTHY + "mood\treview\n" + HEALTHY,
            "has the class 'mood', which only 2 of 62 examples have; if it is a header",
        ),
    ],
)
def test_classes_that_are_none_are_told(content, message, tmp_path, caplog, capsys):
    classes_of(tmp_path, content)
    assert message in caplog.text + capsys.readouterr().err


def test_a_header_in_the_middle_of_csv_is_told(tmp_path, caplog):
    classes_of(tmp_path, "label,text\nyes,a\nno,b\nlabel,text\nno,c\n", "a.csv")
    assert "a.csv, line 4: the line repeats the header" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        HEALTHY,
        "label\ttext\n" + HEALTHY,
        "".join(f"{n % 12}\ttext {n}\n" for n in range(60)),
        "".join(f"{['0.5', '1.5', '1.50001'][n % 3]}\ttext {n}\n" for n in range(30)),
        "".join(f"{['LOC,city', 'LOC,state', 'NUM,date', 'C++'][n % 4]}\ttext {n}\n" for n in range(30)),
    ],
)
def test_healthy_classes_are_silent(content, tmp_path, caplog, capsys):
    classes_of(tmp_path, content)
    assert not caplog.text and not capsys.readouterr().err


@pytest.mark.slow
def test_a_class_that_only_valid_has_and_damaged_names_are_told(tmp_path, caplog):
    lines = ["s&uuml;&szlig;", "no", "rare", *["s&uuml;&szlig;", "no", "no"] * 5]
    (tmp_path / "a").write_text("".join(f"{label}\tThe text {n}.\n" for n, label in enumerate(lines)))

    def run(name: str, every: int) -> str:
        caplog.clear()
        values = {
            "splits": {"train": {"source": [tmp_path / "a"]}, "valid": {"hold_out": every}}, "format": "labelled",
            "parser": {"name": "words"}, "subwords": {"vocab_size": 280}, "workers": 0,
        }  # fmt: skip
        preprocess(PreprocessConfig.model_validate(values), tmp_path / name)
        return caplog.text

    assert "train has no example of rare, but valid has" in (said := run("held", 3))
    assert "1 of 3 names of train class (33.3%); for example train class name 3: 's&uuml;&szlig;'" in said
    assert "train has no example" not in run("other", 4)


def test_segments_in_comments_are_none():
    seg = '<seg id="{}">{}</seg>'
    lines = ['<doc docid="d">', seg.format(1, "one"), f"<!-- {seg.format(2, 'old')} -->", "<!--", seg.format(2, "older"), "-->"]
    lines += [seg.format(2, "a <!-- b"), f"<!-- x -->{seg.format(3, 'c')}<!-- {seg.format(4, 'd')}-->", "</doc>"]
    assert [text for _, text, _ in segments(iter(lines), "a.sgm")] == ["one", "a <!-- b", "c"]
    with pytest.raises(UserError, match=r"a.sgm, line 2: expected --> at the end of a comment, but found none"):
        list(segments(iter([seg.format(1, "one"), "<!--", seg.format(2, "two")]), "a.sgm"))


def test_dropped_lines_of_a_split_are_described():
    index = {"dropped": {"test": {"empty_target": 2}, "train": {}}, "totals": {"test": {"rows": 3}, "train": {"rows": 9}}}
    assert describe_dropped(index, "test") == "2 of 5 lines of test were dropped: 2 empty_target"
    assert describe_dropped(index, "train") == describe_dropped(index, "valid") == ""


@pytest.mark.data
@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")
def test_pairs_of_a_language_without_blanks():
    import lzma

    def read(code):
        return lzma.decompress((DATA / f"kftt/tune.{code}.xz").read_bytes()).decode().split("\n")[:-1]

    english, japanese = read("en"), read("ja")
    assert told(english, japanese) == [] == told(japanese, english)
    assert told(english[1:], japanese[:-1]) == [("shifted", 1)]
    assert told(english, sorted(japanese)) == [("unrelated", 0)]
