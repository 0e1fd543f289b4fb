"""The split of sentence pairs: no line of valid or test is in train on the same side, and no pair is lost."""

import gzip
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given
from split_pairs import LARGEST, components, main, split

PAIRS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")), max_size=20)


@given(PAIRS)
def test_components_are_those_of_a_search_from_each_pair(pairs):
    def reached(start):
        found = {start}
        while more := {p for p in pairs if p not in found and any(p[0] == q[0] or p[1] == q[1] for q in found)}:
            found |= more
        return sorted(found)

    assert sorted(components(pairs)) == sorted({tuple(reached(pair)): reached(pair) for pair in pairs}.values())


@given(PAIRS, st.integers(0, 4), st.integers(0, 4))
def test_splits_share_no_line_and_hold_every_pair_once(pairs, valid, test):
    found = split(pairs, valid, test)
    assert sorted(pair for chosen in found.values() for pair in chosen) == sorted(set(pairs))
    for side in (0, 1):
        lines = [line for chosen in found.values() for line in {pair[side] for pair in chosen}]
        assert len(lines) == len(set(lines))
    assert len(found["valid"]) < valid + LARGEST and len(found["test"]) < test + LARGEST
    assert found == split(reversed(pairs), valid, test)


def test_the_command_writes_the_files_and_names_a_bad_line(tmp_path, monkeypatch, capsys):
    def run(lines: str) -> None:
        with gzip.open(tmp_path / "pairs.gz", "wt", encoding="utf-8") as file:
            file.write(lines)
        options = ["--pairs", str(tmp_path / "pairs.gz"), "--out", str(tmp_path), "--valid=1", "--test=1"]
        monkeypatch.setattr(sys, "argv", ["split_pairs.py", *options])
        main()

    run("a\tä\tmore\nb\tö\nc\tü\n")
    assert capsys.readouterr().out == "train: 1 pairs\nvalid: 1 pairs\ntest: 1 pairs\n"
    lines = [(tmp_path / f"{name}.en").read_text() for name in ("train", "valid", "test")]
    assert sorted(lines) == ["a\n", "b\n", "c\n"]
    with pytest.raises(SystemExit) as end:
        run("a\tä\nb\n")
    assert end.value.code == 2 and capsys.readouterr().err.endswith("line 2: expected source, tab, target\n")
