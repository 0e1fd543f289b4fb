"""New files for a model: tables row by row, with more columns in the output; segments; files of another form."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from treeproc.common.settings import UserError
from treeproc.online.input_files import HELD_FORM, InputForm, form_of, read_raw_lines
from treeproc.online.raw_lines import TableRow
from treeproc.readers.labelled import LabelledConfig

TEXTS = ["A fine  day.", 'He said "no", and left.', "", "Sun!"]
TABLES = {
    "a.csv": 'id,label,text\r\n1,new,A fine  day.\r\n2,,"He said ""no"",\r\nand left."\r\n3,x, \r\n4,x,Sun!',
    "b.csv": 'text\nA fine  day.\n"He said ""no"",\nand left."\n"\u200b"\nSun!\n',
    "a.tsv": 'label\ttext\nnew\tA fine  day.\nx\tHe said "no", and left.\nx\t\nx\tSun!\n',
    "b.tsv": 'x\tA fine  day.\nx\tHe said "no", and left.\nx\t\nx\tSun!\n',
    "a.jsonl": '{"text": "A fine  day."} \n{"n": 1e2, "text": "He said \\"no\\",\\nand left."}\n{"text": ""}\n{"text": "Sun!"}',
}
TABLES["a.csv.gz"] = TABLES["a.csv"]
PAIRS = {
    "a.csv": "a,b,label\none,uno,x\ntwo,due,y\n",
    "a.tsv": "one\tuno\ntwo\tdue\n",
    "b.tsv": "x\tone\tuno\ny\ttwo\tdue\n",
    "a.json": '{"a": "one", "b": "uno"}\n{"b": "due", "a": "two"}\n',
}
LABELLED = InputForm("labelled")


def write(folder: Path, name: str, content: str | bytes) -> Path:
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder / name


def fields(name: str, content: str) -> list:
    """The rows of a table as Python's own readers have them."""
    if ".json" in name:
        return [json.loads(line) for line in content.splitlines()]
    options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if ".tsv" in name else {}
    return list(csv.reader(content.splitlines(keepends=True), **options))


@pytest.mark.parametrize("name", TABLES)
def test_the_rows_of_a_table_come_back_with_more_columns(name, tmp_path):
    lines = list(read_raw_lines(write(tmp_path, name, TABLES[name]), None, None, LABELLED))
    assert [line.text.decode().strip("\u200b") for line in lines] == TEXTS
    values = [("a, b", 0.25), ('"', 1.0), (None, None), ("x", 1e-6)]
    more = [dict(zip(("p", "q"), one, strict=True)) for one in values]
    found = fields(name, "".join(line.row.with_columns(one) for line, one in zip(lines, more, strict=True)))
    before = fields(name, TABLES[name].replace("\r", ""))
    if ".json" in name:
        assert found == [row | one for row, one in zip(before, more, strict=True)]
        return
    written = [(text or "", "" if number is None else f"{number:.6f}") for text, number in values]
    head = [("p", "q")] if len(before) > len(TEXTS) else []
    assert found == [[*row, *one] for row, one in zip(before, [*head, *written], strict=True)]


@pytest.mark.parametrize("name", PAIRS)
def test_the_texts_of_a_pair_stay_apart(name, tmp_path):
    form = InputForm("labelled", LabelledConfig(text="a", second_text="b"))
    lines = list(read_raw_lines(write(tmp_path, name, PAIRS[name]), None, None, form))
    assert [line.text for line in lines] == [b"one\nuno", b"two\ndue"]


def test_trees_stand_in_a_table_or_beside_it(tmp_path):
    path, trees = write(tmp_path, "a.csv", "text\n(S (NN a))\n(S (NN b))\n"), write(tmp_path, "trees", "(S (NN a))\n(S (NN b))\n")
    form = InputForm("labelled", LabelledConfig(brackets=True))
    assert [(line.text, line.trees) for line in read_raw_lines(path, None, None, form)] == [
        (None, b"(S (NN a))"),
        (None, b"(S (NN b))"),
    ]
    with pytest.raises(UserError, match="a.csv has trees itself; leave trees out"):
        read_raw_lines(path, trees, None, form)
    beside = list(read_raw_lines(path, trees, None, LABELLED))
    assert [(line.text, line.trees, line.row.text) for line in beside] == [
        (one, one, one.decode()) for one in trees.read_bytes().split(b"\n")[:2]
    ]


def test_a_tree_over_several_lines_is_refused_where_a_tree_is_a_line(tmp_path):
    """Lines that are damaged alone are not: each of them has its own warning later."""
    content = "(S (NN a))\n\n(S (NN a)\n  (NN b))\n(S (NN c))\n"
    said = r"trees, line 3: expected one tree a line, but found a tree that ends in line 4; write each tree, .* on one line$"
    with pytest.raises(UserError, match=said):
        list(read_raw_lines(None, write(tmp_path, "trees", content), None))
    for alone in (
        "(S (NN a)\n(S (NN b))\n(S (NN c)))\n",
        "(S (NN a)))\n(S (NN b))\n(S (NN c)\n",
        "(S (NN a)\n(S (NN b))\n",
        "(NN a) (NN b)\n",
    ):
        assert len(list(read_raw_lines(None, write(tmp_path, "trees", alone), None))) == alone.count("\n")


def test_trees_as_lines_of_text_are_told_where_they_belong(tmp_path, caplog):
    content = "(S (NP (DT The) (NN man)) (VP (VBD saw)))\n(S (NP (NN A)) (VP (VBZ b)))\n"
    for number, (form, remedy) in enumerate(
        (
            (InputForm("brackets"), "give the trees as trees=FILE"),
            (InputForm("labelled", LabelledConfig(brackets=True)), "give the trees as trees=FILE"),
            (InputForm("parallel"), "write its text to a file"),
        )
    ):
        list(read_raw_lines(write(tmp_path, f"{number}.mrg", content), None, None, form))
        assert f"{number}.mrg looks like trees in brackets" in caplog.text and remedy in caplog.text.splitlines()[-1]


def test_lines_are_bytes_as_they_stand(tmp_path):
    """Whatever the format of the data set: not UTF-8, with tabs, with the name of a column."""
    content = b'text\n\xff\tlabel\ttext\n\n {"text": 1}\r\nlabel, text'
    for form in (None, LABELLED, InputForm("sgm"), InputForm("iwslt_xml"), InputForm("conllu")):
        lines = read_raw_lines(write(tmp_path, "a.txt", content), None, None, form)
        assert [line.text for line in lines] == content.split(b"\n")


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.jsonl", "a.json.gz"])
def test_a_table_is_refused_where_the_data_set_has_lines(name, tmp_path):
    lines, table = write(tmp_path, "a.txt", "a\n"), write(tmp_path, name, "a\n")
    message = f"{table} must have one text a line, but its name is that of a table"
    for files in ((table, None, None), (lines, None, table), (lines, None, table, LABELLED)):
        with pytest.raises(UserError, match=message):
            read_raw_lines(*files)
    assert [line.must_appear for line in read_raw_lines(lines, None, None, must_appear=table)] == [b"a"]
    with pytest.raises(UserError, match="line 1: expected a text, but found a JSON object: .*; write its texts"):
        list(read_raw_lines(write(tmp_path, "b", '{"a": "b"}\n'), None, None))


def test_segments_of_one_side_are_lines(tmp_path):
    sgm = '<srcset>\n<doc docid="d">\n<seg id="1">A &amp; B</seg>\n<seg id="2"></seg>\n</doc></srcset>\n'
    talk = "<url>http://x</url>\n<title>A &amp; B</title>\n<talkid>1</talkid>\n\n"
    for format_name, content in (("sgm", sgm), ("iwslt_xml", sgm), ("iwslt_xml", talk)):
        lines = read_raw_lines(write(tmp_path, "a.xml", content), None, None, InputForm(format_name))
        assert [line.text for line in lines] == [b"A & B", b""], content
        form, other = InputForm(format_name), write(tmp_path, "b.txt", "a\n")
        assert form.unit(tmp_path / "a.xml") == "segment" and form.unit(other) == form.unit(None) == "line"
        with pytest.raises(UserError, match=r"a.xml has 2 segments, but .*b.txt has 1;"):
            list(read_raw_lines(tmp_path / "a.xml", None, other, form))
    with pytest.raises(UserError, match="a.xml has no <seg id=.*; give a file of segments, or lines of text$"):
        list(read_raw_lines(write(tmp_path, "a.xml", "<html>\n<p>a</p>\n</html>\n"), None, None, InputForm("sgm")))
    table = write(tmp_path, "a.csv", "text\na\nb\n")
    with pytest.raises(UserError, match=r"a.csv has 2 rows, but .*b.txt has 1;"):
        list(read_raw_lines(table, tmp_path / "b.txt", None, LABELLED))
    with pytest.raises(UserError, match="expected lines of text, but found a file of segments in XML"):
        list(read_raw_lines(write(tmp_path, "a.xml", sgm), None, None))


def test_the_form_is_that_of_the_data_set(tmp_path):
    assert form_of(tmp_path) == InputForm()
    (tmp_path / "encoded").mkdir()
    index = {"schema_version": 1, "shards": [], "totals": {}, "fingerprint": "x"}
    (tmp_path / "encoded" / "index.json").write_text(json.dumps(index))
    assert form_of(tmp_path) == InputForm()
    (tmp_path / "config.yaml").write_text("format: labelled\nlabelled: {label: genre, classes: [a, b]}\nvocab_from: /gone\n")
    found = form_of(tmp_path)
    assert (found.format, found.labelled.label, found.labelled.text) == ("labelled", "genre", "text")
    held = tmp_path / "held"
    (held / "encoded").mkdir(parents=True)
    (held / "encoded" / "index.json").write_text(json.dumps(index | {HELD_FORM: found.facts()}))
    assert form_of(held).facts() == found.facts()


def test_a_row_without_columns_is_the_row():
    assert TableRow("csv", "a,b", "x,y").with_columns({}) == "x,y\na,b\n"
