"""Notices of the text stage about its lines: a count, an example and a hint; none about clean text."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from sample_lines import sample_lines

from treeproc.common.settings import UserError
from treeproc.inspect import describe, draw_line
from treeproc.online.line_encoder import read_treebank
from treeproc.online.raw_lines import RawLine, RawLineEncoder
from treeproc.parsers import ParserConfig
from treeproc.readers import find_format
from treeproc.readers.labelled import LabelledConfig
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages import filters
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.filters import FilterConfig, other_language, stride_of
from treeproc.stages.job_report import notice_lines, summary
from treeproc.stages.keys import normalised
from treeproc.stages.line_rules import has_several_sentences
from treeproc.stages.preprocess import preprocess
from treeproc.stages.text_warnings import TextNotices, wanted
from treeproc.verify import verify

pytestmark = pytest.mark.slow

GERMAN = [
    "Die alte Frau ging langsam über die Straße.",
    "Wir haben gestern Abend ein neues Buch gelesen.",
    "Meine Schwester wohnt seit drei Jahren in Hamburg.",
]
ENGLISH = [
    "The old woman went slowly across the street.",
    "We read a new book yesterday evening.",
    "My sister has lived in this town for three years.",
]
TOKENS = ["the dog &apos;s well @-@ known tail , it seems .", "they do n't run .", "he said , &quot; yes &quot; ."]


def notices_of(lines: dict[str, list[str]], **changes) -> tuple[dict, list[str]]:
    """Notices about splits of source lines, and their messages; the shipped parser reads the source, none the target."""
    config = PreprocessConfig.model_validate(
        {"splits": {split: {"source": ["a"], "target": ["b"]} for split in lines}, "parser": {"name": "shipped"}} | changes
    )
    notices = config.notices()
    for split, sources in lines.items():
        rows = [{"example_id": number, "source": line, "target": line} for number, line in enumerate(sources)]
        for side in notices.wanted:
            notices.add(split, side, rows)
            chosen = range(0, len(rows), stride_of(len(rows)))
            notices.add_sample(split, side, chosen, [sources[number] for number in chosen])
    facts = json.loads(json.dumps(notices.facts()))
    return facts, notice_lines(facts, config.parsers(), config.form)


def test_tokenised_text_is_told_with_count_example_and_setting():
    facts, messages = notices_of({"train": [*ENGLISH, *TOKENS]})
    assert facts["train"]["source"]["escapes"] == {"count": 2, "line": 4, "text": TOKENS[0], "more": [[6, TOKENS[2]]]}
    assert facts["train"]["source"]["tokens"]["count"] == 3
    assert (
        len(messages) == 1
        and "3 of 6 lines of train source (50.0%)" in messages[0]
        and messages[0].endswith("set tokenized: moses")
    )
    assert f"train source line 4: {TOKENS[0]!r}" in messages[0] and "escapes such as &apos; or @-@: 2 of 6" in messages[0]


def test_notices_read_the_text_after_a_tag():
    lines = [f"<DE> {line}" for line in (*ENGLISH, '"one ""big"" and ""old"" dog"', "ten letters here")]
    facts, messages = notices_of({"train": lines}, parser={"name": "shipped", "tags": ["<DE>"]})
    found = facts["train"]["source"]
    assert found["placeholders"]["count"] == 0 and found["language"]["looked_at"] == len(ENGLISH)
    assert found["quoted"] == {"count": 1, "line": 4, "text": lines[3]} and not any("placeholders" in one for one in messages)
    assert notices_of({"train": lines})[0]["train"]["source"]["placeholders"]["count"] == len(lines)


def test_text_that_is_not_tokenised_is_told_where_moses_is_set():
    facts, messages = notices_of({"train": ENGLISH}, tokenized="moses")
    assert len(messages) == 1 and "3 of 3 lines" in messages[0] and messages[0].endswith("set tokenized: none")
    tokens = ["the dog 's tail , it seems .", "they don 't run .", "he said : yes !"]
    assert notices_of({"train": tokens}, tokenized="moses")[1] == []


def test_clean_text_has_no_notices():
    """No notices about the sample's sentences, read by a parser of their language; blanks before ? and ! are French."""
    for lines in (sample_lines(400), [*ENGLISH, "C'est vrai ? Non !", "R & D costs 5 % .NET pays, he says."]):
        assert not [line for line in notices_of({"train": lines})[1] if "several sentences" not in line]


def test_escapes_in_plain_text_are_not_taken_for_tokens():
    _, messages = notices_of({"train": [*ENGLISH, "Salt &amp; pepper are on the table."]})
    assert len(messages) == 1 and "write the characters themselves" in messages[0] and "moses" not in messages[0]


def test_quoting_of_tables_is_told_outside_of_csv():
    """A table that a program wrote with tabs quotes only texts that have quotation marks."""
    plain = [
        '"Yes," he said.',
        '"Yes," he said, "it is."',
        '"a"',
        '""',
        '"" a ""',
        'an 8"" x 9"" sheet',
        '"8"" x 9" sheet"',
        '"Why?""Because."',
        '"""Return the sum."""',
        '"',
    ]
    assert notices_of({"train": [*ENGLISH, *plain]}, parser={"name": "words"})[1] == []
    facts, messages = notices_of({"train": [*ENGLISH, '"He said ""yes"" and ran."', '"""Yes,"" he said."']})
    assert facts["train"]["source"]["quoted"]["count"] == 2
    assert (
        len(messages) == 1 and "read as text: 2 of 5 lines of train source" in messages[0] and "undo the quoting" in messages[0]
    )


def test_wrapped_lines_of_running_text_are_told():
    wrapped = ["The old woman went slowly", "across the street, where", "she lived.", "We read.", "The end"]
    healthy = ["I went", "and then", "Tom said:", "yes.", "“Who?”", "she said.", "A. B. Smith", "Then."]
    for lines, count in (
        (wrapped, 1), (healthy, 0), ([line.lower() for line in wrapped], 0), ([line.upper() for line in wrapped], 0),
    ):  # fmt: skip
        config = PreprocessConfig.model_validate(
            {"splits": {"train": {"source": ["a"]}}, "format": "documents", "parser": {"name": "shipped"}}
        )
        notices = config.notices()
        rows = [{"example_id": number, "source": line, "document": 0} for number, line in enumerate(lines)]
        notices.tell("train", rows, [])
        notices.tell("train", [row | {"document": number} for number, row in enumerate(rows)], [])  # one line each
        notices.tell("train", rows[::2], [])  # a filter dropped what is between
        facts = notices.facts()
        assert facts["train"]["source"].get("wrapped", {"count": 0})["count"] == count
        messages = notice_lines(facts, config.parsers(), find_format("documents", None))
        assert any("join the lines of each paragraph" in one and repr(wrapped[0]) in one for one in messages) == bool(count)


def test_given_words_are_not_told_to_be_tokens():
    notices = TextNotices(wanted("none", ("words", "trees"), {"source": None}))
    notices.add("train", "source", [{"example_id": 0, "source": TOKENS[0]}])
    assert notices.facts() == {"train": {"source": {"lines": 1, "decomposed": {"count": 0, "line": 0, "text": ""}}}}


def test_hints_name_no_settings_that_another_data_set_gives():
    as_there = "write the lines as those of data"
    for lines, changes, remedy in (
        ([*ENGLISH, *TOKENS], {}, as_there),
        ([*ENGLISH, "Un cafe\u0301."], {}, as_there),
        (["We read. The end. It was late."], {}, as_there),
        (ENGLISH, {"tokenized": "moses"}, as_there),
        (GERMAN, {}, "remove such lines"),
    ):
        facts, messages = notices_of({"train": lines}, **changes)
        form = find_format("parallel", None)
        assert len(messages) == 1 and not messages[0].endswith(remedy)
        (said,) = notice_lines(facts, {"source": ParserConfig(name="shipped"), "target": None}, form, Path("data"))
        assert said.endswith(f"; {remedy}")


def test_another_language_than_the_parsers_is_told_with_its_share():
    facts, messages = notices_of({"train": [*ENGLISH * 3, GERMAN[0]], "test": GERMAN})
    assert facts["test"]["source"]["language"] == {
        "count": 3, "line": 1, "text": GERMAN[0], "more": [[2, GERMAN[1]], [3, GERMAN[2]]], "looked_at": 3, "seems": "de",
    }  # fmt: skip
    assert (
        len(messages) == 1
        and "another language (de) than the parser's (en): 1 of 10 lines of train source (10.0%)" in messages[0]
    )
    assert notices_of({"train": GERMAN}, parser={"name": "corenlp", "language": "de"})[1] == []
    assert notices_of({"train": GERMAN}, parser={"name": "words"})[1] == [], "no parser reads the lines"
    facts, _ = notices_of({"train": ENGLISH}, target_parser={"name": "corenlp", "language": "de"})
    assert facts["train"]["target"]["language"]["seems"] == "en"


def test_a_full_temporary_folder_is_named(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("py3langid.modelio.tempfile.TemporaryFile", full)
    filters._identifier.cache_clear()
    with pytest.raises(UserError, match=r"in /\S+: No space left on device; free space there, or set TMPDIR"):
        other_language("Wir haben gestern ein neues Buch gelesen.", "en")


def test_languages_that_short_lines_do_not_tell_apart_count_as_one():
    norwegian = "Jeg har bodd i denne byen i tre år nå, og jeg liker meg veldig godt blant de hyggelige menneskene her."
    assert other_language(norwegian, "da") is None and other_language(norwegian, "nb") is None
    assert other_language(norwegian, "en") in ("no", "da", "nb", "nn")


@pytest.mark.parametrize(
    ("line", "several"),
    [
        ("He came. She went.", True),
        ('"Wow! That is it," he said.', True),
        ("Was ist das? Ein Hund!", True),
        ("we keep , keep . &quot; it &apos;s late .", True),
        ("you know ? yes .", True),
        ("Mr. Smith and Dr. Jones met J. R. Green vs. Brown.", False),
        ("It was approx. 5 p.m. in the U.S. Senate.", False),
        ("Version 2. of it is here.", False),
        ("he lives on st . james street", True),  # Moses keeps abbreviations whole: a free stop ends a sentence
        ("One sentence...", False),
        ("", False),
    ],
)
def test_several_sentences(line, several):
    assert has_several_sentences(line) == several
    assert (notices_of({"train": [line or "x"]})[0]["train"]["source"]["sentences"]["count"] == 1) == several


def test_several_sentences_name_the_setting_that_splits_them():
    lines = [*ENGLISH, "He came. She went."]
    assert (
        "parser.split_sentences: true" in notices_of({"train": lines})[1][0]
        and "1 of 4 lines" in notices_of({"train": lines})[1][0]
    )
    assert notices_of({"train": lines}, parser={"name": "shipped", "split_sentences": True})[1] == []


@pytest.mark.parametrize(
    "mark", ["<unk>", "<T_3>", "__unk__", "sub@@ words", "[MASK]", "{{name}}", "%s", "%1$s", "%(user)s", "<URL>"]
)
def test_placeholders(mark):
    facts, messages = notices_of({"train": [*ENGLISH, f"I saw {mark} there."]})
    assert facts["train"]["source"]["placeholders"]["line"] == 4 and len(messages) == 1 and "placeholders" in messages[0]


@pytest.mark.parametrize(
    "line", ["5 < 6 and 7 > 6", "a_b __ c", "me@@home", "[sic] {sigh} 5 %", "50%such", "user@example.org <me@x.org>"]
)
def test_these_lines_have_no_placeholders(line):
    assert notices_of({"train": [line]})[0]["train"]["source"]["placeholders"]["count"] == 0


def test_text_cut_into_subwords_is_told_but_not_a_stray_mark():
    for lines in (["▁The ▁old wo man ▁went."], ["The old wo ##man went.", "##ä"], ["▁x"]):
        facts, messages = notices_of({"train": [*ENGLISH, *lines]}, parser={"name": "words"})
        found = facts["train"]["source"]["subwords"]
        more = [[5, line] for line in lines[1:]]
        assert (
            found
            == {"count": len(lines), "line": 4, "text": lines[0]} | ({"more": more} if more else {})
            == facts["train"]["target"]["subwords"]
        )
        assert len(messages) == 1 and messages[0].startswith("looks cut into subwords") and "join them to words" in messages[0]
    stray = [*ENGLISH * 10, "##Heading", "## Heading", "C## or a##b", "“quoted” … – ▂ 中"]
    facts, messages = notices_of({"train": stray})
    assert facts["train"]["source"]["subwords"]["count"] == 1 and not messages


def test_letters_apart_from_their_marks_are_told_with_the_setting_that_joins_them():
    facts, messages = notices_of({"train": [*ENGLISH, "Un cafe\u0301.", "Un café."]}, parser={"name": "words"})
    expected = {"count": 1, "line": 4, "text": "Un cafe\u0301."}
    assert facts["train"]["source"]["decomposed"] == expected == facts["train"]["target"]["decomposed"]
    assert len(messages) == 1 and "1 of 5 lines of train source (20.0%)" in messages[0]
    assert messages[0].endswith("normalization: nfc joins them") and "train source line 4: " in messages[0]
    of_header, of_pairs = LabelledConfig(), LabelledConfig(second_text="other")
    for name, labelled, unit in (
        ("text", None, "line"),
        ("labelled", of_header, "example"),
        ("labelled", of_pairs, "sentence"),
        ("conllu", None, "example"),
    ):
        assert f"train source {unit} 4: " in notice_lines(facts, {}, find_format(name, labelled))[0]
    assert notices_of({"train": ["Un cafe\u0301."]}, parser={"name": "words"}, normalization="nfc")[1] == []


def test_a_line_end_inside_a_line_moves_no_notice():
    facts, _ = notices_of({"valid": ["One\nline.", "Two.", "Un cafe\u0301 <br>."]}, parser={"name": "words"})
    for kind in ("decomposed", "markup"):
        assert facts["valid"]["target"][kind] == {"count": 1, "line": 3, "text": "Un cafe\u0301 <br>."}


def test_messages_stay_one_short_line():
    lines = [f"{'x' * 500} &apos;s <unk> , well . Yes . \u2028 {n}" for n in range(30)]
    _, messages = notices_of(
        {split: lines for split in ("train", "valid", "test")}, target_parser={"name": "corenlp", "language": "de"}
    )
    assert len(messages) >= 3 and all(len(line) < 650 and len(line.splitlines()) == 1 for line in messages)


MARKS = "\u0301\u093e\u0940\u0941\u0e34"  # an accent, vowels of Hindi and Thai


@given(st.lists(st.text(st.sampled_from(f"aB1 ,.-“”ßÄäİ中。\u2028ह❤\ufe0f{MARKS}"), max_size=8), min_size=1, max_size=6))
@num_examples(200)
def test_normal_forms_against_a_loop(lines):
    def slow(line):
        return "".join(c.lower()[0] for c in line if c.isalnum() or c in MARKS)

    assert normalised(lines) == [slow(line) for line in lines]


def test_lines_that_differ_in_a_vowel_are_no_near_copies():
    she, he = "मैं जाती हूँ।", "मैं जाता हूँ।"
    assert normalised([she, he]) == [she.replace(" ", "")[:-1], he.replace(" ", "")[:-1]]
    assert normalised(["Sun ☀\ufe0f!", "sun ☀"]) == ["sun", "sun"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function that makes a data set of files of pairs; no parser is asked. Returns its folder."""
    folder = tmp_path_factory.mktemp("notices")
    train = ["A dog, here.", "", "An apple", "a DOG here", "a b c d", "Two of them."]
    for name, lines in {"train": train, "test": ["A dog here!", "An apple"]}.items():
        for side in "ab":
            (folder / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines))

    def make(name: str, **changes):
        splits = {split: {"source": [folder / f"{split}.a"], "target": [folder / f"{split}.b"]} for split in ("train", "test")}
        values = {
            "splits": splits, "parser": {"name": "words"}, "subwords": {"vocab_size": 290}, "rows_per_shard": 2, "workers": 0,
        }  # fmt: skip
        config = PreprocessConfig.model_validate(values | changes)
        preprocess(config, folder / name)
        return folder / name, config

    return make


def test_near_copies_are_told_and_may_be_dropped(job, caplog):
    data, _ = job("kept")
    assert read_index(data / "text")["notices"]["train"]["source"]["leaks"] == {
        "count": 3, "line": 1, "text": "A dog, here.", "more": [[3, "An apple"], [4, "a DOG here"]],
    }  # fmt: skip
    assert "3 of 5 lines of train source (60.0%)" in caplog.text and "filters.drop_leaks: true" in caplog.text
    assert "3 leaks" in describe(data)[0]
    (of_pairs,) = notice_lines(read_index(data / "text")["notices"], {}, find_format("sick", None))
    assert "3 of 5 lines" in of_pairs and "drop_leaks" not in of_pairs
    caplog.clear()
    data, _ = job("dropped", filters={"drop_leaks": True})
    index = read_index(data / "text")
    assert index["dropped"]["train"] == {"empty_source": 1, "leak": 3} and index["totals"]["test"]["rows"] == 2
    assert "leaks" not in index["notices"]["train"]["source"] and "drop_leaks" not in caplog.text
    rows = (data / "text" / "dropped.tsv").read_text().splitlines()
    assert rows == ["split\tline\treason", "train\t1\tleak", "train\t2\tempty_source", "train\t3\tleak", "train\t4\tleak"]
    assert str(data / "text" / "dropped.tsv") in summary(read_index(data / "encoded"), data)


def test_control_characters_outside_of_train_are_told(job, caplog):
    """In train they are dropped. A replacement character prevents no translation."""
    _, config = job("without")
    assert "control" not in caplog.text and "control" not in read_index(job("without")[0] / "text")["notices"]["test"]["source"]
    folder = config.splits["train"].source[0].parent
    lines = "".join(f"{line}\n" for line in ["A dog.", "A \x01 dog\tand\ufffd.", "An\x85apple", "tab\t and \ufffd"])
    for side in ("c", "d"):
        (folder / f"control.{side}").write_text(lines, encoding="utf-8")
    files = {"source": [folder / "control.c"], "target": [folder / "control.d"]}
    data, _ = job("control", splits={"train": config.splits["train"].model_dump(), "test": files})
    notices = read_index(data / "text")["notices"]
    assert notices["test"]["source"]["control"] == {
        "count": 2, "line": 2, "text": "A \x01 dog\tand\ufffd.", "more": [[3, "An\x85apple"]],
    }  # fmt: skip
    assert "control" not in notices["test"]["target"]
    assert "control characters: translate and classify leave such lines empty" in caplog.text
    assert "2 of 4 lines of test source (50.0%)" in caplog.text and "2 control" in describe(data)[0]


@pytest.fixture(scope="module")
def composed(job):
    """A function that makes a data set of pairs with e + U+0301 and with lines of invisible characters."""
    _, config = job("plain")
    source, target = ["Un cafe\u0301.", "\u200b\ufeff", "Un café.", "a b"], ["re\u0301al", "x", "réal", "c\u2028d"]

    def make(name: str, **changes):
        folder = config.splits["train"].source[0].parent
        for side, lines in (("s", source), ("t", target)):
            (folder / f"marks.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        splits = {split: {"source": [folder / "marks.s"], "target": [folder / "marks.t"]} for split in ("train", "test")}
        return job(name, splits=splits, **changes)

    return make


def test_composed_text_and_invisible_lines_of_a_data_set_and_of_raw_lines(composed, tmp_path, caplog):
    plain, _ = composed("decomposed")
    assert "normalization: nfc joins them" in caplog.text
    data, config = composed("composed", normalization="nfc")
    indices = [read_index(folder / "encoded") for folder in (plain, data)]
    assert "normalization" not in indices[0] and indices[1]["normalization"] == "nfc"
    for folder, first in ((plain, "Un cafe\u0301."), (data, "Un café.")):
        assert read_index(folder / "text")["dropped"]["test"] == {"empty_source": 1}
        rows = [row for shard in SplitShards(folder / "text", "test") for row in shard.rows()]
        assert [row["source"] for row in rows] == [first, "Un café.", "a b"] and rows[2]["target"] == "c\u2028d"
        raw = [RawLine(text.encode(), target=b"re\xcc\x81al") for text in ("Un cafe\u0301.", "Un café.", "\u200b \u00ad", "")]
        found = RawLineEncoder(folder, given_trees=False, max_pieces=99).encode(raw)
        pieces = [line.row and line.row["leaves"]["piece"].tolist() for line in found]
        assert (pieces[0] == pieces[1]) == (folder == data) and found[0].source == first
        assert [line.source for line in found[2:]] == ["", ""] and found[2].problem == found[3].problem
        (tmp_path / "two.mrg").write_text("(S (X cafe\u0301))\n(S (X café))\n", encoding="utf-8")
        first, second = (row["leaves"]["piece"].tolist() for row in read_treebank([tmp_path / "two.mrg"], folder)[0])
        assert (first == second) == (folder == data)
    assert not verify(data).problems
    with pytest.raises(UserError, match="settings .normalization: 'nfc' -> 'none'.; choose another --out"):
        composed("composed")
    again = {"parsed": data, "subwords": {"vocab_size": 290}, "workers": 0}
    assert preprocess(PreprocessConfig.model_validate(again), tmp_path / "again")["normalization"] == "nfc"
    new = {"splits": {"more": config.splits["test"]}, "vocab_from": data, "workers": 0}
    assert preprocess(PreprocessConfig.model_validate(new), tmp_path / "new")["normalization"] == "nfc"
    caplog.clear()
    preprocess(PreprocessConfig.model_validate(new | {"vocab_from": plain}), tmp_path / "of_plain")
    assert f"write the lines as those of {plain}" in caplog.text and "nfc" not in caplog.text
    with pytest.raises(UserError, match="made with other settings .normalization: 'nfc' -> 'none'"):
        preprocess(PreprocessConfig.model_validate(new | {"normalization": "none"}), tmp_path / "other")


def test_words_as_a_parser_asks_for_none(job):
    data, _ = job("words")
    assert (data / "parsed" / "fallbacks.tsv").read_text() == "split\tline\tside\tparse_status\n"
    told_at_the_end = summary(read_index(data / "encoded"), data)
    assert "because parser.name is words" in told_at_the_end and "fallbacks.tsv" not in told_at_the_end


def test_lists_of_lines_are_mended_and_checked(job, caplog):
    data, config = job("whole")
    assert not verify(data).problems
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file() and path.name != "provenance.json"}
    (data / "text" / "dropped.tsv").write_text("nothing\n")
    (data / "parsed" / "fallbacks.tsv").unlink()
    assert {problem.path.name for problem in verify(data).problems} == {"dropped.tsv", "fallbacks.tsv"}
    preprocess(config, data)
    assert {path: path.read_bytes() for path in before} == before and not verify(data).problems


def test_fingerprints_are_those_of_data_sets_made_before(tmp_path):
    """The mark and the bytes of a text shard, as they were before `drop_leaks` came."""
    for name, text in {"a": "one\ntwo\n\n", "b": "eins\nzwei\ndrei\n"}.items():
        (tmp_path / name).write_text(text)
    values = {"splits": {"train": {"source": [tmp_path / "a"], "target": [tmp_path / "b"]}}, "parser": {"name": "words"}}
    config = PreprocessConfig.model_validate(values | {"subwords": {"vocab_size": 270}, "workers": 0})
    preprocess(config, tmp_path / "data")
    (shard,) = read_index(tmp_path / "data" / "text")["shards"]
    assert shard["fingerprint"] == "728d58845ec974f1"
    assert shard["sha256"] == "3397adf1cc9b6b64e0fc18b4fee90359d74ea7bd2c756af55cac892937b4ffd5"
    assert FilterConfig(drop_leaks=True).identity().items() >= {"drop_leaks": True, "near_copies": "with marks"}.items()


def test_lines_are_those_of_the_file_where_valid_is_held_out(job):
    data, config = job("held")
    splits = {"train": config.splits["train"], "valid": {"hold_out": 3}}
    inputs = PreprocessConfig.model_validate({"splits": splits}).inputs()
    lines = {
        split: [(inputs.line(split, number), row["source"]) for number, row in enumerate(inputs.rows(split))]
        for split in ("train", "valid")
    }
    whole = config.splits["train"].source[0].read_text().split("\n")
    assert [number for number, _ in lines["valid"]] == [3, 6] and [number for number, _ in lines["train"]] == [1, 2, 4, 5]
    assert all(whole[number - 1] == line for split in lines.values() for number, line in split)


def test_lines_that_were_not_parsed_can_be_inspected_where_valid_is_held_out(tmp_path):
    (tmp_path / "a").write_text("".join(f"word {number}{' more' * (number in (6, 7))}\n" for number in range(1, 10)))
    values = {
        "splits": {"train": {"source": [tmp_path / "a"], "target": [tmp_path / "a"]}, "valid": {"hold_out": 3}},
        "parser": {"name": "shipped", "max_words": 2}, "subwords": {"vocab_size": None}, "workers": 0,
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(values), data := tmp_path / "data")
    rows = [line.split("\t")[:2] for line in (data / "parsed" / "fallbacks.tsv").read_text().splitlines()[1:]]
    assert rows == [["train", "5"], ["valid", "2"]]
    for number, (split, line) in zip((7, 6), rows, strict=True):
        assert f"source: word {number} more" in draw_line(data, split, int(line))


def test_no_language_model_is_loaded_where_no_parser_reads_the_lines():
    code = (
        "import sys; from treeproc.stages.config import PreprocessConfig as C\n"
        "C.model_validate({'splits': {'train': {'source': ['a'], 'target': ['b']}}, 'parser': {'name': 'words'}}).notices()\n"
        "sys.exit('py3langid' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_without_the_package_no_language_is_checked_and_a_note_says_so_once(monkeypatch, capsys):
    monkeypatch.setattr(filters, "is_installed", lambda module: False)
    filters._can_identify.cache_clear()
    assert (filters.known("en"), filters.known("de"), filters.known(None)) == (None, None, None)
    filters._can_identify.cache_clear()
    note = "note: no line is checked for its language, since py3langid is not installed: pip install 'tree-attention[parse]'\n"
    assert capsys.readouterr().err == note
