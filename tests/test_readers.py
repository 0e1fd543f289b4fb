"""Files to pairs: line ends, encodings, mismatches, and the filters' reasons."""

import gzip

import pytest

from treeproc.filters import FilterConfig, drop_reason
from treeproc.readers import check_parallel, read_lines, read_pairs
from treeproc.settings import UserError


def test_only_newline_ends_a_line(tmp_path):
    text = "one\u2028still one\n two\x0b\x1c\u0085two \r\n\nfour\u2029"
    (tmp_path / "a").write_bytes(text.encode())
    assert list(read_lines([tmp_path / "a"])) == ["one\u2028still one", "two\x0b\x1c\u0085two", "", "four"]


def test_gzip_several_files_and_byte_order_mark(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"eins\nzwei\n"))
    (tmp_path / "b").write_bytes(b"\xef\xbb\xbfdrei")
    paths = [tmp_path / "a.gz", tmp_path / "b"]
    assert list(read_lines(paths)) == ["eins", "zwei", "drei"]
    assert check_parallel(paths, paths)[0] == 3
    assert list(read_pairs(paths, paths))[2] == ("drei", "drei")


def test_other_length_names_both_files_and_counts(tmp_path):
    (tmp_path / "a").write_text("1\n2\n3\n")
    (tmp_path / "b").write_text("1\n2\n")
    with pytest.raises(UserError, match=r"a has 3 lines, but .*b has 2"):
        check_parallel([tmp_path / "a"], [tmp_path / "b"])


def test_bad_utf8_names_file_and_line(tmp_path):
    (tmp_path / "a").write_bytes(b"fine\nbad \xff byte\n")
    with pytest.raises(UserError, match=r"a, line 2: not valid UTF-8 \(byte 0xff at column 5\)"):
        check_parallel([tmp_path / "a"], [tmp_path / "a"])


def test_empty_missing_and_broken_files(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    (tmp_path / "plain.gz").write_bytes(b"not compressed\n")
    with pytest.raises(UserError, match="empty"):
        check_parallel([tmp_path / "empty"], [tmp_path / "empty"])
    for name in ("missing", "broken.gz", "plain.gz"):
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            check_parallel([tmp_path / name], [tmp_path / name])


@pytest.mark.parametrize(
    ("source", "target", "split", "reason"),
    [
        ("a b", "c", "train", None),
        ("", "c", "test", "empty_source"),
        ("a", "", "train", "empty_target"),
        ("a b c d", "e", "train", "source_too_long"),
        ("a", "b c d e", "train", "target_too_long"),
        ("a" * 11, "b", "train", "source_word_too_long"),
        ("a b c d", "b" * 11, "test", None),
    ],
)
def test_drop_reasons(source, target, split, reason):
    assert drop_reason(source, target, split, FilterConfig(max_words=3, max_word_chars=10)) == reason
