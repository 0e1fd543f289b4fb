"""Files of every format to rows: hand-written inputs with the rows they must give, and the one line that bad input gives."""

import gzip
import io
import os
import tarfile
import time
from pathlib import Path

import pyarrow as pa
import pytest
from data_beside import DATA
from reference_encoding import check_tree

from treeproc.common.settings import UserError
from treeproc.readers import FORMATS, read_lines, read_rows
from treeproc.readers.line_forms import compose_row
from treeproc.readers.numbered_lines import read_byte_lines, refuse_pipes
from treeproc.readers.treebanks import read_sentences
from treeproc.trees.flat_trees import read_flat_trees
from treeproc.trees.spans import read_brackets

SAMPLES = Path(__file__).resolve().parent / "samples"


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") and not name.endswith(".tar.gz") else content)
    return path


def rows_of(folder: Path, form: str, source: str, target: str | None = None, name: str = "a") -> list[dict]:
    """The rows that a format's reader gives for these contents of its files."""
    sides = [[write(folder, f"source/{name}", source)], [write(folder, f"target/{name}", target)] if target is not None else []]
    return list(read_rows(form, *sides))


def words_of(row: dict) -> list[str]:
    """The words, which must stand in the source where they say."""
    words = row["words"]
    found = [row["source"][a:b] for a, b in zip(words["start_char"], words["end_char"], strict=True)]
    assert found == words["text"]
    return found


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


# Lines


def test_composed_rows_keep_their_words():
    """NFC of the lines; words keep their texts and places, also where one begins with a mark, and what is not text stays."""
    source = "Cafe\u0301 \u212bngstro\u0308m\u0301 e\u0301."
    starts, ends = [0, 6, 15, 17, 18, 19], [5, 15, 16, 18, 19, 20]
    words = {"text": [source[a:b] for a, b in zip(starts, ends, strict=True)], "start_char": starts, "end_char": ends}
    row = compose_row({"source": source, "target": "e\u0301", "words": words, "trees": ["(X (X a))"], "label": 1})
    assert words_of(row) == ["Café", "\u00c5ngström", "\u0301", "e", "\u0301", "."]
    assert row["source"] == "Café \u00c5ngström\u0301 e\u0301." and (row["target"], row["label"]) == ("é", 1)
    plain = {"source": "Café.", "target": "", "words": {"text": ["Café", "."], "start_char": [0, 4], "end_char": [4, 5]}}
    assert compose_row(plain) == plain


def test_only_newline_ends_a_line(tmp_path):
    text = "one\u2028still one\n two\x0b\x1c\u0085two \r\n\nfour\u2029"
    assert list(read_lines([write(tmp_path, "a", text)])) == ["one\u2028still one", "two\x0b\x1c\u0085two", "", "four"]


@pytest.mark.parametrize("name", ["long", "long.gz"])
def test_lines_do_not_depend_on_where_blocks_end(name, tmp_path):
    lines = [chr(0x20AC) * (i * 37 % 4001) + str(i) for i in range(300)] + ["x" * 200_000, "", "end"]
    assert list(read_lines([write(tmp_path, name, "\n".join(lines))])) == lines


def test_gzip_several_files_and_byte_order_mark(tmp_path):
    paths = [write(tmp_path, "a.gz", "eins\nzwei\n"), write(tmp_path, "b", b"\xef\xbb\xbfdrei")]
    assert list(read_lines(paths)) == ["eins", "zwei", "drei"]
    assert list(read_rows("parallel", paths, paths))[2] == {"source": "drei", "target": "drei"}


@pytest.mark.parametrize(("left", "right", "counts"), [("1\n2\n3\n", "1\n2\n", (3, 2)), ("1\n", "1\n2\n3\n4\n", (1, 4))])
def test_other_length_names_both_files_and_counts(left, right, counts, tmp_path):
    with pytest.raises(UserError, match=rf"source/a has {counts[0]} lines, but .*target/a has {counts[1]};"):
        rows_of(tmp_path, "parallel", left, right)


ENDS = (
    ("parallel", "a\n", "a\n", "lines"),
    ("brackets", "(S (A a))\n", "a\n", "sentences"),
    ("iwslt_xml", "a\n", "a\n", "text lines"),
)


@pytest.mark.parametrize(("form", "source", "target", "unit"), ENDS)
def test_files_of_two_sides_that_do_not_end_together_are_told(form, source, target, unit, tmp_path, caplog):
    def read(*counts: tuple[int, int], folder: str) -> int:
        sides = [
            [write(tmp_path, f"{folder}/{number}.{side}", lines * pair[side]) for number, pair in enumerate(counts)]
            for side, lines in enumerate((source, target))
        ]
        return len(list(read_rows(form, *sides)))

    assert read((3, 2), (11, 12), folder="shifted") == 14
    first = tmp_path / "shifted" / "0"
    wanted = f"warning: {first}.0 has 3 {unit}, but {first}.1 has 2; their pairs go over the ends of files"
    assert [record.getMessage() for record in caplog.records] == [wanted]
    caplog.clear()
    assert read((3, 3), (0, 0), (2, 2), folder="together") == 5 and read((4, 4), folder="single") == 4
    with pytest.raises(UserError, match="has 5 .*, but .* has 6;"):
        read((3, 3), (2, 3), folder="unequal")
    assert not caplog.records


def test_missing_and_broken_files_and_pipes(tmp_path):
    write(tmp_path, "plain", b"")
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    (tmp_path / "plain.gz").write_bytes(b"not compressed\n")
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "broken.gz", "plain.gz", "broken.tar.gz"):
        form = "brackets" if "tar" in name else "parallel"
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            list(read_rows(form, [tmp_path / name], [tmp_path / name] if form == "parallel" else []))
    with pytest.raises(UserError, match="is a pipe or device"):
        refuse_pipes([tmp_path / "pipe"])


# Segments

SGM = """<srcset setid="newstest" srclang="any">
<DOC docid="{doc}" genre='news'>
<p>
<seg id="1">AT&amp;T said &quot;no&#33;&quot;</seg> <seg id="2"> two
 lines </seg>
</p>
</DOC>
<doc docid="b"><seg id="1">{last}</seg></doc>
"""


def test_sgm(tmp_path):
    rows = rows_of(tmp_path, "sgm", SGM.format(doc="a", last="&copy; stays"), SGM.format(doc="a", last=""))
    assert [row["source"] for row in rows] == ['AT&T said "no!"', "two lines", "&copy; stays"]
    assert rows[2]["target"] == ""


def test_sgm_sides_must_match(tmp_path):
    with pytest.raises(UserError, match=r"source/a, line 4, is segment 1 of document 'a', but .*target/a, line 4, .*'z'"):
        rows_of(tmp_path, "sgm", SGM.format(doc="a", last=""), SGM.format(doc="z", last=""))
    with pytest.raises(UserError, match="has 1 segments, but .* has 3"):
        rows_of(tmp_path, "sgm", '<doc docid="a"><seg id=1>x</seg>', SGM.format(doc="a", last=""))


def test_iwslt_training_files_lose_their_metadata(tmp_path):
    source = (
        '<doc docid="1" genre="lectures">\n<url>http://x</url>\n<keywords>a, b</keywords>\n<speaker>S</speaker>\n'
        "<talkid>1</talkid>\n"
        "<title>A title</title>\n<description>What &amp; why</description>\nFirst < line.\n Second.\n"
        '<reviewer href="x">R</reviewer>\n<translator href="x">T</translator>\n</doc>\n'
    )
    target = "<url>u</url>\n<title>Ein Titel</title>\n<description>Was</description>\nErste.\nZweite.\n"
    rows = rows_of(tmp_path, "iwslt_xml", source, target, name="train.tags.en-de.en")
    assert [row["source"] for row in rows] == ["A title", "What & why", "First < line.", "Second."]
    assert rows[-1]["target"] == "Zweite."


@pytest.mark.parametrize("end", ["&#10;", "&#xA;", "&#13;&#10;", "&#10;&#10;"])
def test_no_reference_ends_a_line(end, tmp_path):
    """A pair would be shifted where the lines are written to a file."""
    text = f"<title>A{end}title</title>\nOne{end}line.\n"
    rows = rows_of(tmp_path, "iwslt_xml", text, text)
    assert rows == [{"source": one, "target": one} for one in ("A title", "One line.")]


def test_iwslt_test_files(tmp_path):
    text = '<?xml version="1.0"?>\n<mteval>\n<doc docid="1">\n<title>T</title>\n<seg id="1"> One &amp; two. </seg>\n</doc>\n'
    assert rows_of(tmp_path, "iwslt_xml", text, text, name="a.xml") == [{"source": "One & two.", "target": "One & two."}]


def test_the_content_decides_how_iwslts_files_are_read(tmp_path):
    segments = '<mteval>\n<doc docid="1">\n<talkid>1</talkid>\n<title>T</title>\n<p>\n<seg id="1"> One. </seg>\n</p>\n</doc>\n'
    text = "<title>T</title>\n<url>u</url>\n<laughter>\nTwo.\n"
    for name in ("dev.en", "s.XML", "s.xml.txt", "a.xml", "a.sgm", "train.tags.en-de.en", "a.xml.gz"):
        assert rows_of(tmp_path, "iwslt_xml", segments, segments, name) == [{"source": "One.", "target": "One."}]
        assert [row["source"] for row in rows_of(tmp_path, "iwslt_xml", text, text, name)] == ["T", "<laughter>", "Two."]
    with pytest.raises(UserError, match=r"line 5: expected text as in the lines before, but found a segment: '<seg id="):
        rows_of(tmp_path, "iwslt_xml", text + '<seg id="1">x</seg>\n', text)


# Files of another format

UTF16 = "Ein Satz.\n" * 20
SEGMENTS = '<srcset setid="a">\n<doc docid="1">\n<seg id="1">One.</seg>\n</doc>\n</srcset>\n'
PLAIN = "<br> A sentence (of words).\n(So) it goes.\n{curly} 1 2\n\nEnd. <seg>\n"
FILES = {
    "parallel": PLAIN,
    "sgm": SEGMENTS,
    "iwslt_xml": "<url>http://x</url>\n<keywords>a</keywords>\nOne.\n<title>T</title>\nTwo.\n",
    "brackets": "( (S (NP (DT The) (NN dog))\n(VP (VBZ barks))) )\n",
    "sst": "(3 (2 It) (4 (3 's) (1 good)))\n(4 Great)\n",
    "agreement": "VBZ\tthe man that\n",
    "linzen": "sentence\tverb_pos\tverb_index\nmen run\tVBP\t2\n",
    "sick": "sentence_A\tsentence_B\trelatedness_score\na\tb\t1.0\n",
    "conllu": "# sent_id = 1\n1\tGo\t_\tX\tX\t_\t0\troot\t_\t_\n\n",
    "tmx": '<tmx version="1.4">\n<tu><tuv><seg>One.</seg></tuv></tu>\n</tmx>\n',
    "xliff": '<?xml version="1.0"?>\n<xliff version="1.2">\n<source>One.</source>\n</xliff>\n',
    "segments": '<seg id="1">One.</seg>\n<seg id="2">Two.</seg>\n',
    "json": '{"a": "b"}\n{"a": "c"}\n',
    "utf16": UTF16.encode("utf-16"),
    "utf16_without_mark": UTF16.encode("utf-16-le"),
    "zip": b"PK\x03\x04" + bytes(30),
    "pdf": b"%PDF-1.4\n",
    "sqlite": b"SQLite format 3\0",
    "arrow": b"ARROW1\0\0",
    "gzip": gzip.compress(b"text\n"),
}
# What a reader takes of other formats. Trees and JSON may be the text of a model: a warning names them.
TAKEN = {
    "parallel": {"agreement", "linzen", "sick", "brackets", "sst", "json"},
    "text": {"parallel", "agreement", "linzen", "sick", "brackets", "sst", "json"},
    "documents": {"parallel", "agreement", "linzen", "sick", "brackets", "sst", "json"},
    "iwslt_xml": {"parallel", "segments", "sgm", "agreement", "linzen", "sick", "brackets", "sst", "json"},
    "sgm": {"segments"},
    "brackets": {"sst"},
    "labelled": {"agreement"},
}


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "imdb"])
def test_a_file_of_another_format_is_refused(form, tmp_path, caplog):
    for name, content in FILES.items():
        caplog.clear()
        target = None if FORMATS[form].target != "required" else content
        if name in {form, *TAKEN.get(form, ())}:
            assert rows_of(tmp_path / name, form, content, target)
        else:
            with pytest.raises(UserError, match=rf"/{name}/source/a\b"):
                rows_of(tmp_path / name, form, content, target)
        warned = name != form and name in {"brackets", "sst", "json"} & TAKEN.get(form, set())
        assert ("looks like" in caplog.text) == warned


def test_messages_name_the_format_that_reads_the_file(tmp_path):
    for name in ("sgm", "iwslt_xml", "conllu"):
        for form in ("parallel", "text"):
            with pytest.raises(UserError, match=rf"source/a: expected lines of text, but found .*; set format={name}"):
                rows_of(tmp_path, form, FILES[name], FILES[name] if form == "parallel" else None)
    with pytest.raises(UserError, match=r"a: expected lines of text, but found .*; write its text to a file"):
        list(read_lines([write(tmp_path, "a", FILES["sgm"])]))
    with pytest.raises(UserError, match=r"target/a: expected lines of text, but found a treebank in CoNLL-U"):
        rows_of(tmp_path, "brackets", "(NN a)", FILES["conllu"])
    with pytest.raises(UserError, match=r"a: expected lines of text, but found a file of segments"):
        list(read_byte_lines(write(tmp_path, "a", FILES["segments"])))


# Brackets

TREES = r"""
( (S (NP-SBJ-1 (DT The) (NN dog))
     (VP (VBZ -LRB-barks-RRB-)
         (NP (-NONE- *T*-1)) (CC and\/or))
     (. .)) )
(NN Alone) (NP (NN 8~1))
""".replace("~", "\u00a0")


def test_brackets_over_lines_with_escapes_and_empty_nodes(tmp_path):
    rows = rows_of(tmp_path, "brackets", TREES, name="wsj.mrg.gz")
    assert [row["source"] for row in rows] == ["The dog (barks) and/or .", "Alone", "8\u00a01"]
    assert words_of(rows[2]) == ["8\u00a01"]
    words, tags, tree = read_brackets(rows[0]["trees"][0])
    assert words_of(rows[0]) == ["The", "dog", "(barks)", "and/or", "."] and tags == ["DT", "NN", "VBZ", "CC", "."]
    assert tree.labels == ["", "S", "NP-SBJ-1", "VP"]  # the phrase of the empty node alone is gone
    check_tree(tree, len(words))


def test_brackets_beside_lines_of_the_other_side(tmp_path):
    rows = rows_of(tmp_path, "brackets", "(NN a)\n(NN b)\n", "eins\nzwei\n")
    assert [(row["source"], row["target"]) for row in rows] == [("a", "eins"), ("b", "zwei")]
    with pytest.raises(UserError, match="has 2 sentences, but .* has 1"):
        rows_of(tmp_path, "brackets", "(NN a)\n(NN b)\n", "eins\n")


def test_a_tree_of_empty_nodes_alone_is_an_empty_example(tmp_path):
    assert rows_of(tmp_path, "brackets", "(S (-NONE- *))") == [
        {"source": "", "words": {"text": [], "start_char": [], "end_char": []}, "trees": []}
    ]


def test_a_word_with_the_tag_of_empty_nodes_stays_in_a_treebank_of_arcs(tmp_path):
    lines = ("1\tthe\t_\tDET\tDT\t_\t2\tdet\t_\t_", "2\tdog\t_\tNOUN\t-NONE-\t_\t0\troot\t_\t_")
    (row,) = rows_of(tmp_path, "conllu", "\n".join([*lines, "\n"]))
    found = read_flat_trees(pa.array(row["trees"]))
    assert [found.tag_names[tag] for tag in found.tags] == ["DT", "NOUN"] and words_of(row) == ["the", "dog"]


def test_folders_and_archives_come_in_order_of_names(tmp_path):
    files = {"ptb/wsj/02/b.mrg": b"(NN b)", "ptb/wsj/02/a.mrg.gz": gzip.compress(b"(NN a)"), "ptb/wsj/23/c.mrg": b"(NN c)"}
    hidden = {"ptb/wsj/02/.DS_Store": b"\xff"}
    for name, content in (files | hidden).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    tar = archive(tmp_path / "x.tar.gz", files | hidden)

    def sources(path):
        return [row["source"] for row in read_rows("brackets", [path], [])]

    assert sources(tmp_path / "ptb") == sources(tar) == ["a", "b", "c"]
    assert sources(tar / "ptb/wsj/02") == ["a", "b"] and sources(tar / "ptb/wsj/23/c.mrg") == ["c"]
    with pytest.raises(UserError, match=r"x.tar.gz holds no files below wsj"):
        sources(tar / "wsj")
    # So lines of the other side that fit the folder also fit its archive.
    files = {name: f"(NN {number})".encode() for number, name in enumerate(("y/2010/c", "y/2010-11/b", "y/2010.mrg"))}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert sources(tmp_path / "y") == sources(archive(tmp_path / "y.tar.gz", files)) == ["0", "1", "2"]


@pytest.mark.parametrize("form", ["brackets", "sst"])
def test_deep_nesting_is_read_in_linear_time(form, tmp_path):
    def seconds(depth):
        began = time.process_time()
        (row,) = rows_of(tmp_path, form, "(1 " * depth + "(2 a)" + ")" * depth)
        assert len(read_brackets(row["trees"][0])[2]) == depth
        return time.process_time() - began

    # Sixteen times the depth: linear time grows 16 times, quadratic time 256 times. The best of three has the least noise.
    best = {depth: min(seconds(depth) for _ in range(3)) for depth in (2_500, 40_000)}
    assert best[40_000] < 64 * max(best[2_500], 0.005)


def test_sentiment_trees(tmp_path):
    good, one = rows_of(tmp_path, "sst", "(3 (2 It) (4 (3 's) (1 -LRB-)))\n(4 Great)\n")
    assert (good["source"], good["label"]) == ("It 's (", 3)
    assert good["node_labels"] == [3, 4] and good["leaf_labels"] == [2, 3, 1]
    words, tags, tree = read_brackets(good["trees"][0])
    assert words == ["It", "'s", "("] and {*tags, *tree.labels} == {"X"} and tree.starts == [0, 1]
    assert (one["label"], one["node_labels"], one["leaf_labels"], one["trees"]) == (4, [4], [4], ["(X (X Great))"])
    with pytest.raises(UserError, match="source/a, line 2: every bracket must have a class from 0 to 4, but one has '5'"):
        rows_of(tmp_path, "sst", "(1 a)\n(1 (5 a) (1 b))")


# Labelled text


def test_imdb_folder_and_archive(tmp_path):
    files = {
        "aclImdb/train/pos/2_9.txt": b"Good.<br /><br />Very!",
        "aclImdb/train/neg/10_1.txt": b"Bad.\n",
        "aclImdb/train/neg/1_2.txt": b"Worse<BR>yet",
        "aclImdb/train/unsup/0_0.txt": b"?",
        "aclImdb/train/urls_pos.txt": b"http",
        "aclImdb/test/pos/0_8.txt": b"Fine.",
    }
    for name, content in files.items():
        write(tmp_path, name, content)
    tar = archive(tmp_path / "aclImdb_v1.tar.gz", files)
    expected = [("Bad.", 0), ("Worse yet", 0), ("Good. Very!", 1)]
    for path in (tmp_path / "aclImdb/train", tar / "aclImdb/train"):
        assert [(row["source"], row["label"]) for row in read_rows("imdb", [path], [])] == expected
    with pytest.raises(UserError, match="expected .*, but found no review"):
        list(read_rows("imdb", [tar / "aclImdb/train/unsup"], []))
    with pytest.raises(UserError, match="cannot read .*nowhere: No such file"):
        list(read_rows("imdb", [tmp_path / "nowhere"], []))


def test_agreement(tmp_path):
    rows = rows_of(tmp_path, "agreement", "VBZ\tthe man that\nVBP\tmen\nVBP\t\n")
    assert [(row["source"], row["label"]) for row in rows] == [("the man that", 0), ("men", 1), ("", 1)]
    assert words_of(rows[0]) == ["the", "man", "that"]
    with pytest.raises(UserError, match="source/a, line 2: expected VBZ or VBP"):
        rows_of(tmp_path, "agreement", "VBZ\ta\nthe\tb\n")


TABLE = "sentence\torig_sentence\tverb_pos\tsubj_index\tverb_index\tn_intervening\tall_nouns\n"


def test_linzen_table(tmp_path):
    rows = rows_of(tmp_path, "linzen", TABLE + 'the NN of """ men""" is\tx\tVBZ\t2\t6\t1\tn\nmen run\tx\tVBP\t1\t2\t0\t\n')
    assert [(row["source"], row["label"]) for row in rows] == [('the NN of """ men"""', 0), ("men", 1)]
    for line, message in (("a b\tx\tVBD\t1\t2\t0\tn", "verb_pos"), ("a b\tx\tVBZ\t1\t3\t0\tn", "2 words"), ("a b", "7 fields")):
        with pytest.raises(UserError, match=f"source/a, line 2: .*{message}"):
            rows_of(tmp_path, "linzen", TABLE + line)
    with pytest.raises(UserError, match="line 1: the header has no column 'sentence'"):
        rows_of(tmp_path, "linzen", "a\tb\n")


# CoNLL-U


def sentence(*words: str, text: str | None = None) -> str:
    """`number form governor [misc]` a word, columns of no interest filled in."""
    rows = [f"# text = {text}"] if text is not None else []
    for word in words:
        number, form, governor, misc = [*word.split("|"), "_"][:4]
        rows.append(f"{number}\t{form}\t_\t_\tT{number}\t_\t{governor}\tdep{number}\t_\t{misc}")
    return "\n".join(rows) + "\n\n"


def test_conllu_places_and_arcs(tmp_path):
    text = sentence("1|He|2", "2|left|0|SpaceAfter=No", "3|.|2", text="He  left.") + sentence(
        "1|a|0|SpaceAfter=No", "2|b|1", "3|c|1"
    )
    first, second = rows_of(tmp_path, "conllu", text, name="a.conllu.gz")
    assert first["source"] == "He  left." and words_of(first) == ["He", "left", "."]
    assert first["arcs"] == {"governor": [1, -1, 1], "deprel": ["dep1", "dep2", "dep3"]}
    assert first["trees"] == ["(X (T1 He) (T2 left) (T3 .))"]
    assert second["source"] == "ab c" and words_of(second) == ["a", "b", "c"]


def test_conllu_multiword_tokens_and_empty_nodes(tmp_path):
    """don't = do + n't is two leaves; zum = zu + dem is one, with zu's tag, the topmost word's arc, and the arcs to both."""
    (row,) = rows_of(
        tmp_path,
        "conllu",
        sentence(
            "1-2|don't|_", "1|do|3", "2|n't|3", "3|go|0", "3.1|empty|_", "4-5|zum|_", "4|zu|6", "5|dem|3", "6|Ende|3", "7|x|4"
        ),
    )
    assert words_of(row) == ["do", "n't", "go", "zum", "Ende", "x"] and row["source"] == "don't go zum Ende x"
    assert row["arcs"]["governor"] == [2, 2, -1, 2, 2, 3] and row["arcs"]["deprel"][3] == "dep5"
    assert "(T4 zum)" in row["trees"][0]


def test_a_sentence_of_10000_chained_words():
    lines = (f"{i}\tw\t_\tX\tX\t_\t{i - 1}\tdep\t_\t_" for i in range(1, 10_001))
    began = time.process_time()
    (row,) = read_sentences(lines, "a")
    assert row["arcs"]["governor"] == list(range(-1, 9_999)) and time.process_time() - began < 20


# Real data


# Files that may not be copied into the repository.
BESIDE = [
    ("sst", DATA / "sst" / "dev.txt", 1101),
    ("sst", DATA / "sst" / "train.txt", 8544),
    ("agreement", DATA / "linzen" / "numpred.val.gz", 15772),
]


@pytest.mark.parametrize(
    ("form", "path", "count"),
    [
        ("brackets", SAMPLES / "gum.mrg.gz", 52),
        ("conllu", SAMPLES / "en_ewt.conllu.gz", 60),
        ("conllu", SAMPLES / "de_pud.conllu.gz", 60),
        ("conllu", SAMPLES / "fr_pud.conllu.gz", 60),
        *(pytest.param(*case, marks=pytest.mark.data) for case in BESIDE),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_real_files(form, path, count):
    rows = list(read_rows(form, [path], []))
    assert len(rows) == count
    for row in rows:
        size = len(words_of(row))
        for text in row.get("trees", ()):
            _, tags, tree = read_brackets(text)
            assert len(tags) == size
            if len(tree):
                check_tree(tree, size)
