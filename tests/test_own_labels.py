"""Texts with classes of the user's own: what a file may hold, what is refused, and the data set made from them."""

import gzip
import json
import re
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import run_here
from hypothesis import given
from hypothesis import strategies as st

from treeproc.common.messages import messages_shown
from treeproc.common.settings import UserError
from treeproc.inspect import describe, draw_line
from treeproc.readers import read_rows
from treeproc.readers.labelled import LabelledConfig, find_classes
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages.text_stage import TextStage
from treeproc.verify import verify

GOOD = {
    "a.tsv": "good\tA fine  day.\nso so\tIt rains.\ngood\t Sun! \n",
    "a": "good\tA fine  day.\r\nso so\tIt rains.\r\ngood\tSun!\r\n",
    "b.txt": "text\tlabel\tid\nA fine  day.\tgood\t1\nIt rains.\tso so\t2\nSun!\tgood\t3",
    "c.csv": 'id,label,text\n1,good,A fine  day.\n2, so so ,"It rains."\n3,"good","Sun!"\n',
    "d.jsonl": '{"label": "good", "text": "A fine  day."}\n{"text": "It rains.", "label": "so so"}\n'
    '{"text": "Sun!", "label": "good"}',
}


def rows_of(folder, name, content, **settings):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return list(read_rows("labelled", [path], [], labelled=LabelledConfig(**settings)))


@pytest.mark.parametrize("name", [*GOOD, "c.csv.gz"])
def test_every_form_gives_the_same_examples(name, tmp_path):
    rows = rows_of(tmp_path, name, GOOD[name.removesuffix(".gz")], classes=["so so", "good"])
    assert rows == [
        {"source": "A fine  day.", "label": 1},
        {"source": "It rains.", "label": 0},
        {"source": "Sun!", "label": 1},
    ]
    assert find_classes([tmp_path / name], LabelledConfig()) == ["good", "so so"]


PAIRS = {
    "a.tsv": "same\tA dog ran.\tA dog was running.\nother\tIt rains.\tSun!\n",
    "b.tsv": "b\tlabel\ta\nA dog was running.\tsame\tA dog ran.\nSun!\tother\tIt rains.\n",
    "c.csv": 'a,b,label\nA dog ran.,"A dog was running.",same\nIt rains.,Sun!,other\n',
    "d.jsonl": '{"label": "same", "a": "A dog ran.", "b": "A dog was running."}\n'
    '{"b": "Sun!", "label": "other", "a": "It rains."}\n',
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_two_rows_with_one_class(name, tmp_path):
    rows = rows_of(tmp_path, name, PAIRS[name], text="a", second_text="b", classes=["other", "same"])
    assert [(row["source"], row["label"]) for row in rows] == [
        ("A dog ran.", 1),
        ("A dog was running.", 1),
        ("It rains.", 0),
        ("Sun!", 0),
    ]
    assert find_classes([tmp_path / name], LabelledConfig(text="a", second_text="b")) == ["other", "same"]


def test_texts_of_several_lines_and_with_quotes(tmp_path):
    rows = rows_of(tmp_path, "a.csv", 'text,label\n"He said ""no"",\r\n\r\nand left.",x\nb,y\n')
    assert [(row["source"], row["label"]) for row in rows] == [('He said "no", and left.', "x"), ("b", "y")]
    rows = rows_of(tmp_path, "a.jsonl", '{"s": "a\\nb", "c": 1}\n{"s": "b", "c": -2}', text="s", label="c")
    assert [(row["source"], row["label"]) for row in rows] == [("a b", "1"), ("b", "-2")]


def test_a_text_in_csv_may_be_as_long_as_a_line(tmp_path):
    long = "a very long text, " * 9000
    rows = rows_of(tmp_path, "a.csv", f'text,label\n"{long}",x\nb,y\n')
    assert [row["source"] for row in rows] == [long.strip(), "b"]


def test_numbers_are_sorted_as_numbers_and_other_names_by_character(tmp_path):
    rows_of(tmp_path, "a", "10\ta\n9\tb\n-1\tc\n")
    assert find_classes([tmp_path / "a"], LabelledConfig()) == ["-1", "9", "10"]
    rows_of(tmp_path, "a", "10\ta\n9\tb\nB\tc\nb\td\n")
    assert find_classes([tmp_path / "a"], LabelledConfig()) == ["10", "9", "B", "b"]


def test_trees_as_texts(tmp_path):
    (row,) = rows_of(tmp_path, "a", "x\t(S (NP (DT The) (NN dog)) (VP (VBD ran)))", brackets=True)
    assert row["source"] == "The dog ran" and row["words"]["text"] == ["The", "dog", "ran"] and row["label"] == "x"
    for text, message in (("(S (NN a)) (S (NN b))", "one tree with words, but has 2"), ("a dog", "text outside of brackets")):
        with pytest.raises(UserError, match=f"/a, line 1: .*{message}"):
            rows_of(tmp_path, "a", f"x\t{text}", brackets=True)


PARTS = st.sampled_from(
    [
        "label",
        "text",
        "x",
        "a dog",
        "\t",
        ",",
        '"',
        "\n",
        "\r\n",
        "\r",
        "\0",
        "{",
        "}",
        '{"label": "x", "text": "a"}',
        "[",
        "\\ud800",
        "\u2028",
    ]
)


@given(st.sampled_from(["a", "a.csv", "a.jsonl"]), st.lists(PARTS, max_size=12).map("".join), st.booleans())
def test_any_text_gives_examples_or_one_line(name, text, brackets):
    check_any_text(name, text, brackets)


WORDS = st.lists(st.sampled_from(["x", "a dog", " ", "\u00a0", "(NN a)"]), min_size=1, max_size=3).map("".join)


@given(st.sampled_from(["a", "a.csv", "a.jsonl"]), st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))
def test_records_of_any_words_give_examples(name, records):
    form = {"a": "{}\t{}", "a.csv": "{},{}", "a.jsonl": None}[name]
    lines = [form.format(*one) if form else json.dumps(dict(zip(("label", "text"), one, strict=True))) for one in records]
    rows = check_any_text(name, "\n".join(["label,text"] * (name == "a.csv") + lines), False)
    assert len(rows) == len(records) or any(not value.strip() for one in records for value in one)


def check_any_text(name, text, brackets):
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = rows_of(Path(folder), name, text, brackets=brackets)
        except UserError as error:
            assert (
                "\n" not in str(error)
                and re.search(rf"/{re.escape(name)}(, line [0-9]+:| has bytes that are 0)", str(error))
                and len(str(error)) < 600
            )
            return []
        for row in rows:
            for value in (row["source"], row["label"]):
                assert value and value == value.strip() and not set("\n\r\0") & set(value) and value.encode()
        return rows


VALUES = {"a": " x \t a dog\n", "a.csv": "label,text\n x , a dog\n", "a.jsonl": '{"label": " x ", "text": " a dog"}'}


@pytest.mark.parametrize(("name", "text"), VALUES.items())
def test_blanks_around_a_value_are_none_of_it(tmp_path, name, text):
    (row,) = rows_of(tmp_path, name, text)
    assert (row["label"], row["source"]) == ("x", "a dog")


def test_classes_that_differ_only_in_case_or_blanks_are_told(tmp_path, capsys):
    rows_of(tmp_path, "a", "good\tc\nGood\td\nbad\te\nso so\tf\nbad\tg\nsoso\th\ngood\ti\n")
    with messages_shown():
        assert find_classes([tmp_path / "a"], LabelledConfig()) == ["Good", "bad", "good", "so so", "soso"]
    error = capsys.readouterr().err
    assert f"warning: {tmp_path / 'a'}: the classes 'Good' (1 examples) and 'good' (2) differ only in case, blanks," in error
    assert "'so so' (1 examples) and 'soso' (1) differ" in error and error.count("\n") == 2
    with pytest.raises(UserError, match=f"^{tmp_path / 'b'} \\+ {tmp_path / 'c'}: all examples have the class 'bad'"):
        for name in "bc":
            rows_of(tmp_path, name, "bad\tc\n")
        find_classes([tmp_path / "b", tmp_path / "c"], LabelledConfig())
    rows_of(tmp_path, "a", "bad\tc\nba\u200bd\td\n")
    with messages_shown():
        assert find_classes([tmp_path / "a"], LabelledConfig()) == ["bad", "ba\u200bd"]
    assert "differ only in case, blanks, invisible characters, Unicode form or zeros" in capsys.readouterr().err
    rows_of(tmp_path, "a", "caf\u00e9\tc\ncafe\u0301\td\n")
    with messages_shown():
        assert find_classes([tmp_path / "a"], LabelledConfig()) == ["cafe\u0301", "caf\u00e9"]
    assert "Unicode form" in capsys.readouterr().err


def test_a_first_line_that_is_perhaps_a_header(tmp_path, capsys):
    for name in ("a", "b"):
        rows_of(tmp_path, name, "mood\treview\nx\tc\ny\td\nx\te\n")
    files = [tmp_path / "a", tmp_path / "b"]
    with messages_shown():
        assert find_classes(files, LabelledConfig()) == ["mood", "x", "y"]
    message = (
        "/a: the first example has the class 'mood', which only 2 of 8 examples have; if it is a header, set "
        "labelled.label and labelled.text"
    )
    assert message in capsys.readouterr().err
    with messages_shown():
        assert find_classes(files, LabelledConfig(label="mood", text="review")) == ["x", "y"]
        (tmp_path / "a.csv").write_text("label,text\nmood,c\nx,d\ny,e\n")  # such a file has a header, and JSON Lines have none
        assert find_classes([tmp_path / "a.csv"], LabelledConfig()) == ["mood", "x", "y"]
    assert not capsys.readouterr().err


def test_classes_of_pairs_are_counted_by_pair(tmp_path, capsys):
    columns = LabelledConfig(text="a", second_text="b")
    premise = "a man sleeps"  # of all pairs of the first class, which is no header for it
    for name, lines in {"a": "gold\tsentence1\tsentence2\n", "b": f"New\t{premise}\tone\nNew\t{premise}\ttwo\n"}.items():
        (tmp_path / name).write_text(lines + "".join(f"{'yn'[i % 2]}\ttext {i}\tother {i}\n" for i in range(20)))
    with messages_shown():
        assert find_classes([tmp_path / "a"], columns) == ["gold", "n", "y"]
    message = (
        "/a: the first example has the class 'gold', which only 1 of 21 examples has; if it is a header, set labelled.label and "
        "labelled.text and labelled.second_text to its names"
    )
    assert message in capsys.readouterr().err
    with messages_shown():
        assert find_classes([tmp_path / "b"], columns) == ["New", "n", "y"]
    assert not capsys.readouterr().err
    (tmp_path / "c").write_text("yes\tc\td\nYes\te\tf\nno\tg\th\nno\ti\tj\n")
    with messages_shown():
        find_classes([tmp_path / "c"], columns)
    assert "the classes 'Yes' (1 examples) and 'yes' (1) differ only in case" in capsys.readouterr().err


# Data sets

WORDS = {"good": "great fine lovely", "bad": "awful poor ugly", "so so": "usual plain"}


def toy_lines(count, seed=0):
    names = list(WORDS)
    for i in range(seed, seed + count):
        label = names[i % 3]
        words = WORDS[label].split()
        yield label, f"The {('dog', 'film', 'day', 'house', 'book')[i % 5]} was {words[i % len(words)]} number {i}."


def write_files(folder):
    (folder / "train.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in toy_lines(90)))
    (folder / "valid.csv").write_text("text,label\n" + "".join(f'"{text}",{label}\n' for label, text in toy_lines(24, 100)))
    objects = [json.dumps({"label": label, "text": text}) for label, text in toy_lines(25, 200)]
    (folder / "test.jsonl").write_text("\n".join(objects) + "\n")


def settings_of(folder, **more):
    names = ("train.tsv", "valid.csv", "test.jsonl")
    splits = {name.partition(".")[0]: {"source": [folder / name]} for name in names}
    values = {"splits": splits, "format": "labelled", "subwords": {"vocab_size": 300}, "workers": 0}
    return PreprocessConfig.model_validate({**values, "parser": {"name": "shipped"}, **more})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_files(folder)
    preprocess(settings_of(folder), folder / "data")
    return folder / "data"


@pytest.mark.slow
def test_a_data_set_of_own_classes(data):
    index = read_index(data / "encoded")
    assert (index["classes"], index["num_classes"]) == (["bad", "good", "so so"], 3)
    assert [SplitShards(data / "encoded", "test")[0].row(i)["label"] for i in range(4)] == [2, 1, 0, 2]
    said = summary(index, data)
    assert "classes: bad 30 (33.3%), good 30 (33.3%), so so 30 (33.3%)" in said
    assert "classes: so so 9 (36.0%)" in describe(data)[0] and "no example of" not in said
    drawn = draw_line(data, "test", 2)
    assert "class: good" in drawn and "label: 1" in drawn
    assert not verify(data).problems
    path = data / "encoded" / "index.json"
    whole = path.read_bytes()
    path.write_text(json.dumps(json.loads(whole) | {"num_classes": 2}))
    assert {problem.what for problem in verify(data).problems} >= {"label is not below 2"}
    path.write_bytes(whole)


@pytest.mark.slow
def test_the_same_command_continues_and_other_classes_are_refused(data):
    folder = data.parent
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*.arrow")}
    preprocess(settings_of(folder), data)
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*.arrow")} == before
    with pytest.raises(UserError, match="belongs to other settings .*labelled.classes"):
        preprocess(settings_of(folder, labelled={"classes": ["good", "bad", "so so"]}), data)


@pytest.mark.slow
def test_a_label_that_was_corrected_before_the_text_stage_ended_is_no_class(tmp_path, monkeypatch):
    write_files(tmp_path)
    train, out = tmp_path / "train.tsv", tmp_path / "data"
    config = settings_of(tmp_path, parser={"name": "words"}, tree={"tree_source": "flat"})
    right = train.read_text()
    train.write_text(right.replace("good\t", "aaod\t", 1))
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(TextStage, "make", Mock(side_effect=KeyboardInterrupt))  # config.yaml is written
        preprocess(config, out)
    assert "aaod" in (out / "config.yaml").read_text()
    train.write_text(right)
    assert preprocess(config, out)["classes"] == ["bad", "good", "so so"]
    assert "aaod" not in (out / "config.yaml").read_text()
    assert preprocess(config, out)["classes"] == ["bad", "good", "so so"]


@pytest.mark.slow
def test_encoding_again_keeps_the_names(data, tmp_path):
    config = {"parsed": data, "tree": {"tree_source": "right"}, "subwords": {"vocab_size": 300}, "workers": 0}
    assert preprocess(PreprocessConfig.model_validate(config), tmp_path / "right")["classes"] == ["bad", "good", "so so"]


@pytest.mark.slow
def test_new_test_sets_have_the_classes_of_the_first(data, tmp_path):
    (tmp_path / "new.csv").write_text("label,text\nso so,A plain day.\n")
    base = ("preprocess.py", "--out", tmp_path / "new", f"vocab_from={data}", "workers=0")
    done = run_here(*base, f"splits.news.source=[{tmp_path / 'new.csv'}]")
    assert done.returncode == 0, done.stderr
    index = read_index(tmp_path / "new" / "encoded")
    assert (index["classes"], index["num_classes"]) == (["bad", "good", "so so"], 3)
    assert "classes: so so 1 (100.0%)" in done.stdout and "no example of" not in done.stdout
    (tmp_path / "new.csv").write_text("label,text\nfair,A plain day.\n")
    done = run_here("preprocess.py", "--out", tmp_path / "other", *base[3:], f"splits.news.source=[{tmp_path / 'new.csv'}]")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "'fair' is none of the 3 classes" in done.stderr
    chosen = "labelled.classes=[good, so so, bad]"
    (tmp_path / "new.csv").write_text("label,text\ngood,A plain day.\n")
    done = run_here("preprocess.py", "--out", tmp_path / "other", *base[3:], f"splits.a.source=[{tmp_path / 'new.csv'}]", chosen)
    assert done.returncode == 2 and "leave labelled.classes out" in done.stderr


@pytest.mark.slow
def test_new_test_sets_of_data_without_classes_are_refused(tmp_path):
    for side in ("en", "de"):
        (tmp_path / side).write_text("a dog\ntwo dogs\n" * 20)
    splits = {"train": {"source": [tmp_path / "en"], "target": [tmp_path / "de"]}}
    config = {"splits": splits, "parser": {"name": "words"}, "subwords": {"vocab_size": 270}, "workers": 0}
    preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    (tmp_path / "new").write_text("x\ta\ny\tb\n")
    new = {"vocab_from": tmp_path / "data", "format": "labelled", "splits": {"a": {"source": [tmp_path / "new"]}}, "workers": 0}
    with pytest.raises(UserError, match="vocab_from: .*data has no classes"):
        preprocess(PreprocessConfig.model_validate(new), tmp_path / "new_data")


@pytest.mark.slow
def test_a_bad_file_makes_no_data_set(tmp_path):
    """An empty file, a class that train has not, and a single class of train, each in one line."""
    write_files(tmp_path)
    cases = {
        "test.jsonl": ("", "no example of format labelled in .*test.jsonl"),
        "valid.csv": ("text,label\na dog,new\n", "valid.csv, line 2: the label 'new' is none of the 3 classes"),
        "train.tsv": ("x\ta\n", "train.tsv: all examples have the class 'x'"),
    }
    for name, (content, message) in cases.items():
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            preprocess(settings_of(tmp_path), tmp_path / "data")
        assert not (tmp_path / "data").exists()
        (tmp_path / name).write_text(whole)


@pytest.mark.slow
def test_given_trees_with_classes(tmp_path):
    trees = {"x": "(S (NP (DT The) (NN dog)) (VP (VBD ran)))", "y": "(NP (DT a) (JJ blue) (NN cat))"}
    (tmp_path / "train").write_text("".join(f"{label}\t{tree}\n" for label, tree in trees.items()) * 20)
    config = {
        "splits": {"train": {"source": [tmp_path / "train"]}},
        "format": "labelled",
        "labelled": {"brackets": True, "classes": ["x", "y", "z"]},
        "parser": {"name": "given"},
        "subwords": {"vocab_size": 280},
        "workers": 0,
    }
    index = preprocess(PreprocessConfig.model_validate(config), tmp_path / "data")
    assert index["num_classes"] == 3 and "no example of z" in summary(index, tmp_path / "data")
    assert "NP" in (tmp_path / "data" / "encoded" / "vocab" / "labels.txt").read_text().split()
