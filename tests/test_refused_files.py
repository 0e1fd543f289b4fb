"""What a user is told about files that are wrong: who reads the file, its name and content, and the message."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_files import one_line
from test_readers import sentence
from test_relatedness import HEADER, TABLE
from test_treebank import CONLLU

from treenet.runs.result_entries import read_scores
from treenet.runs.run_folder import read_facts
from treenet.tasks.scores import SCORES
from treeproc.common.settings import UserError
from treeproc.common.yaml_reader import read_yaml
from treeproc.extras.parser_training.treebank import Notation, sentences_in, trees_in
from treeproc.online.input_files import InputForm, read_raw_lines
from treeproc.readers import read_rows
from treeproc.readers.labelled import LabelledConfig, find_classes
from treeproc.readers.numbered_lines import read_lines, read_texts

Read = Callable[[Path], object]


def rows(form: str, part: str = "", two_sides: bool = False, **labelled) -> Read:
    """Read a file of a format, or a part of it."""
    return lambda path: list(read_rows(form, [path / part], [path] * two_sides, labelled=LabelledConfig(**labelled)))


# A file is `a` if the key is its content alone.
REFUSED: dict[Read, dict[str | bytes | tuple[str, str | bytes], str]] = {
    rows("brackets"): {
        "(S (NN a))\n(S (NN b)": "line 2: 1 bracket.* not closed",
        "\n(S (NN a)))": r"line 2: unbalanced '\)' at character 11",
        "(NN a)\nword (NN b)": "line 2: text outside of brackets: 'word'",
        "(S (NN a) b)": "line 1: a word beside brackets",
        "(S\n(NP))": "line 1: empty bracket",
        "(S (NN a))\n(S (Z\u2028B (NN b\u2028)))": r"line 2: the tree has the label 'Z\\u2028B' with the line end U\+2028",
        "(S (N\x1cN a))": r"line 1: the tree has the label 'N\\x1cN' with the line end U\+001C",
    },
    lambda path: trees_in(read_texts([path]), Notation()): {
        "(S (NN a))\n\n(S (NN a)))": r"line 3: unbalanced '\)' at character 11",
        "(S (NN a))\n(S (NN a)": r"line 2: 1 bracket\(s\) of this tree are not closed",
        "(S (NN a))\n(S (NN a) b)": "line 2: a word beside brackets or a second word at character 11 of the tree",
    },
    rows("conllu"): {
        sentence("1|a|2", "2|b|1"): "line 2: the arcs form a cycle",
        sentence("1|a|0", "2|b|1") + sentence("1|a|2", "2|b|0", "3|c|0"): (
            "line 6: expected one word with governor 0, but this is one of 2"
        ),
        sentence("1|a|0", "2|b|9"): "line 2: governor 9, but there are 2 words",
        sentence("1|a|0", "3|b|1"): "line 2: word 2 must come next, but 3 does",
        sentence("1|a|_"): "line 1: column 7 must be the number of the governor, but is '_'",
        sentence("1|a|0", "2-3|bc|_", "2|b|1"): "line 3: the sentence ends inside the range up to word 3",
        sentence("1|a|0", text="b"): "line 1: expected token 1, 'a', at character 1 of '# text'",
        sentence("1|a|0", "2|b|1", text="a"): "line 1: expected token 2, 'b', at character 2 of '# text'",
        sentence("1|a|0", text="a b"): "line 1: '# text' has more text than the tokens, from character 2",
        "1\ta\n": "line 1: expected 10 columns after a number, but found 2",
        "# a comment\n": "line 1: a sentence without words",
        sentence("1||0"): "line 1: the word is empty",
        sentence("\u0661|a|0"): "line 1: expected 10 columns after a number, but found 10",
        sentence("1|a|\u0660"): "line 1: column 7 must be the number of the governor",
        sentence("1|a|2", "2|b|0").replace("dep2", "de\x85p"): r"line 2: the word has the tag or relation .* end U\+0085",
        sentence("1|a|0").replace("T1", "T\u20291"): r"line 1: the word has the tag or relation .* end U\+2029",
    },
    lambda path: sentences_in(read_texts([path])): {
        ("a.conllu", CONLLU.replace("4\tobl:to", "9\tobl:to")): "line 12: the arcs form a cycle",
        ("a.conllu", CONLLU.replace("\tobl:to\t_", "\tobl:to")): "line 11: expected 10 columns after a number, but found 9",
        ("a.conllu", CONLLU.replace("\t8\tpunct", "\t18\tpunct")): "line 7: governor 18, but there are 10 words",
    },
    rows("sgm", two_sides=True): {
        "<seg>x</seg>": "line 1: a segment without an id",
        "\n</seg>": "line 2: </seg> without <seg>",
        '<seg id="7">x\n<seg id="8">y</seg>': "line 1: segment 7 has no </seg> before line 2",
        '\n<seg id="7">x': "line 2: segment 7 has no </seg>",
    },
    rows("labelled"): {
        ("a.tsv", "x\ta\n\ny\tb\n"): "line 2: the line is empty; remove it",
        ("a.tsv", "x\ta\nonly text\n"): (
            "line 2: expected 2 columns separated by tabs .label, tab, text., but found 1: .only text"
        ),
        ("a.tsv", "x\ta\tb\n"): "line 1: expected 2 columns .*, but found 3.*; for pairs of texts, set labelled.second_text=NAME",
        ("a.tsv", "x\ta\n\tb\n"): "line 2: the label is empty; write one, or remove the example",
        ("a.tsv", "x\ta\ny\t \u200b\n"): "line 2: the text is empty",
        ("a.tsv", "x\ta\0b\n"): "line 1: the text has a NUL byte",
        ("a.tsv", b"x\ta\ny\t\xff\n"): "line 2: not valid UTF-8",
        ("a.tsv", "label\tsentence\nx\ta\n"): (
            "line 1: must be a header .*label and text, .*.text. is missing: .*set labelled.text"
        ),
        ("a.tsv", "label\ttext\ttext\nx\ta\tb\n"): "line 1: the header names the column .text. twice",
        ("a.csv", "x,a\ny,b\n"): "line 1: must be a header .*label and text, separated by commas, .*set labelled.label",
        ("a.csv", "label;text\nx;a\n"): "but is 'label;text'; write commas between the columns of all lines$",
        ("a.csv", "label\ttext\nx\ta\n"): "but is 'label.*text'; write commas between the columns of all lines$",
        (
            "a.csv",
            "label,text\nx,a,b\n",
        ): "line 2: expected 2 columns separated by commas .*, but found 3.*; put a text with commas between quotation marks$",
        ("a.csv", "label,text\nx\n"): "line 2: expected 2 columns .*, but found 1",
        ("a.csv", 'label,text\nx,"a\ny,b\n'): "line 2: not a row of a table with commas .*unexpected end of data",
        ("a.csv", 'label,text\nx,"a"b\n'): "line 2: not a row of a table with commas",
        ("a.csv", "label,text\nx,a\n\n"): "line 3: the line is empty",
        ("a.csv", 'label,text\n"x\ty",a\n'): "line 2: the label .* has a tab or a line end",
        ("a.jsonl", '{"label": "x", "text": "a"}\nx\n'): "line 2: not JSON",
        ("a.jsonl", '{"label": "x", "text": "a", "label": "y"}\n'): "line 1: not JSON .the key .label. occurs twice",
        ("a.jsonl", "[1, 2]\n"): "line 1: must be a JSON object, but is",
        ("a.jsonl", '{"label": "x", "sentence": "a"}\n'): (
            "line 1: the object has no key .text., but .label, sent.*set labelled.text"
        ),
        ("a.jsonl", '{"label": null, "text": "a"}\n'): "line 1: the label must be a string or a whole number, but is .null",
        ("a.jsonl", '{"label": true, "text": "a"}\n'): "line 1: the label must be a string or a whole number, but is .true",
        ("a.jsonl", '{"label": "x", "text": ["a"]}\n'): "line 1: the text must be a string",
        ("a.jsonl", '{"label": "x", "text": "a\\u0000"}\n'): "line 1: the text has a NUL byte",
        ("a.jsonl", '{"label": "x", "text": "\\ud800"}\n'): "line 1: the text has .*half of a character",
        ("a.jsonl", '{"label": "x", "text": ""}\n'): "line 1: the text is empty",
        ("a.jsonl", "[" * 100_000 + "\n"): "line 1: not JSON",
        ("a.jsonl", '{"label": "x", "text": "a"}\n\n'): "line 2: the line is empty",
    },
    rows("labelled", text="a", second_text="b"): {
        ("a.tsv", "x\tone\n"): r"line 1: expected 3 columns separated by tabs \(label, tab, a, tab, b\), but found 2",
        ("a.tsv", "x\tone\t\n"): "line 1: the b is empty; write one, or remove the example",
        ("a.tsv", "x\t\ttwo\n"): "line 1: the a is empty; write one, or remove the example",
        ("a.csv", "label,a\nx,one\n"): "line 1: must be a header .*label and a and b.*'b' is missing.*set labelled.second_text",
        ("a.jsonl", '{"label": "x", "a": "one"}\n'): "line 1: the object has no key 'b', .*set labelled.second_text",
    },
    rows("labelled", classes=["x", "y"]): {
        "x\ta\nz\tb\n": (
            r"line 2: the label 'z' is none of the 2 classes \('x', 'y'\); correct it, or leave it out; labelled.classes"
        ),
    },
    lambda path: find_classes([path], LabelledConfig()): {
        "x\ta\nx\tb\n": "all examples have the class 'x'; a classifier needs two",
        "".join(f"text {i}\tx\n" for i in range(1001)): (
            "more than 1,000 classes, for example 'text 1000'; is the text in the place of the label"
        ),
    },
    lambda path: list(read_raw_lines(path, None, None, InputForm("labelled"))): {
        ("a.csv", "id,sentence\n1,a\n"): (
            "line 1: must be a header with the column text, .*'text' is missing: .*; rename its column"
        ),
        ("a.csv", "text,id\na\n"): "line 2: expected 2 columns",
        ("a.csv", "text,id\n\n"): "line 2: the line is empty",
        ("a.csv", "text\n"): "has no row, but must have one for each text",
        ("a.csv", "text,probability\na,1\n"): "has the column 'probability', which the output would have twice; rename it",
        ("a.tsv", "a\tb\tc\n"): "line 1: expected 1 columns separated by tabs .text., but found 3",
        ("a.tsv", b"x\ta\nx\t\xff\n"): "line 2: not valid UTF-8",
        ("a.jsonl", '{"sentence": "a"}\n'): "line 1: the object has no key 'text', but 'sentence'; rename its key",
        ("a.jsonl", '{"text": "a"}\ntext\n'): "line 2: not JSON",
        ("a.jsonl", '{"text": "a", "predicted": 1}\n'): "has the column 'predicted'",
        ("a.txt", "id,text,label\n1,a,x\n"): (
            "line 1: expected a text, but found the header of a table: 'id,text,label'; .*=FILE.csv"
        ),
        ("a", '"id","text"\n1,a\n'): "the header of a table.*=FILE.csv",
        ("a", "my id\tlabel\ttext\n1\tx\ta\n"): "the header of a table.*=FILE.tsv",
        ("a", '{"sentence": "a"}\n'): "found a JSON object.*=FILE.jsonl",
    },
    rows("sick"): {
        "a\tb\n": r"line 1: the header has no column 'sentence_A'",
        HEADER + "1\ta\tb\n": "line 2: expected 6 fields, but there are 3",
        HEADER + "1\ta\tb\tX\t5.1\tTRAIN\n": "line 2: relatedness_score must be a number from 1 to 5, but is '5.1'",
        HEADER + "1\ta\tb\tX\tnan\tTRAIN\n": "relatedness_score must be a number from 1 to 5, but is 'nan'",
        HEADER + "1\ta\t\tX\t5\tTRAIN\n": "line 2: a sentence is empty",
    },
    rows("sick", "TRAIN"): {TABLE.replace("SemEval_set", "set"): "line 1: the header has no column 'SemEval_set'"},
    rows("sick", "TEST"): {TABLE: "no row with SemEval_set TEST, but with TRAIN, TRIAL"},
    lambda path: list(read_lines([path])): {
        b"fine\n" * 20_000 + b"bad \xff byte\n": r"line 20001: not valid UTF-8 \(byte 0xff at column 5\)",
    },
    lambda path: read_yaml(path.read_text(), str(path)): {
        "? [a]\n: b": "a, line 1|not valid YAML",
        "a: " + "9" * 5000: "a, line 1|not valid YAML",
        "{a: nan: b}": "a, line 1|not valid YAML",
    },
    lambda path: read_facts(path.parent, needed=("parameters",)): {
        ("run.json", '{"data_fingerprint": 3}'): r"run.json is damaged: data_fingerprint: .*but is 3; restore it",
        ("run.json", "{}"): r"run.json is damaged: it has no parameters; restore it",
        ("run.json", '{"parameters": "\\ud800"}'): r"cannot read .*run.json",
        ("run.json", "[" * 100_000): r"cannot read .*run.json",
        ("run.json", "[]"): r"run.json must hold a JSON object",
    },
    lambda path: read_scores(path.parent): {
        ("scores.json", '{"test": 3}'): r"scores.json is damaged: test: .*but is 3; restore it, or move it away",
        ("scores.json", '{"test": {"bleu": "high"}}'): r"scores.json is damaged: test.bleu: .*'high'",
        ("scores.json", '{"test": {"steps": [1, "2"]}}'): r"scores.json is damaged: test.steps.1",
        ("scores.json", '{"test": {"buckets": {"words": [{"from": 0}]}}}'): r"scores.json is damaged: test.buckets.words.0",
        ("scores.json", '{"test": {"f1_interval": [0, "x"]}}'): r"scores.json is damaged: test.f1_interval.*1: .*'x'",
        ("scores.json", '{"test": {"groups": {"UID": {"a": {"num_pairs": 1}}}}}'): r"test.groups.UID.a.num_ties: Field required",
        **{
            ("scores.json", json.dumps({"test": {name: None}})): rf"scores.json is damaged: test.{name}: .*but is None"
            for name in SCORES
        },
    },
}


@pytest.mark.parametrize(
    ("read", "key", "message"),
    [pytest.param(read, key, said, id=said) for read, rows in REFUSED.items() for key, said in rows.items()],
)
def test_files_are_refused(read, key, message, tmp_path):
    name, content = key if isinstance(key, tuple) else ("a", key)
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    place = re.escape(str(tmp_path / name))
    with pytest.raises(UserError, match=f"^{place}, {message}" if message.startswith("line") else message) as error:
        read(tmp_path / name)
    one_line(error.value, str(tmp_path / name))
