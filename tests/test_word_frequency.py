"""F1 of words by training frequency, against a slow count, and where the counts of a report come from."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from moto_store import s3_server
from test_report_answer import make_run
from toydata import write_toy_data

from treenet.data.splits import read_references
from treenet.evaluation.buckets import LASTS, count_occurrences, score_by_frequency
from treenet.report.compare import ScoreRow, ScoreTable
from treenet.report.lines import score_frequencies
from treeproc.common.files import file_sha256
from treeproc.common.storage import as_path
from treeproc.shards.store import read_index

WORDS = st.lists(st.sampled_from("abcdefg"), max_size=6)


def bucket_of(count: int) -> tuple[int, int | None]:
    """The bucket by trying every one."""
    for first, last in ((0, 0), (1, 1), (2, 4), (5, 9), (10, 99), (100, 999)):
        if first <= count <= last:
            return first, last
    return 1000, None


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=5), st.data())
@num_examples(80)
def test_f1_is_that_of_a_slow_count(rows, data):
    references, *systems = (list(side) for side in zip(*rows, strict=True))
    counts = {word: data.draw(st.sampled_from([0, 1, 2, 4, 5, 9, 10, 99, 100, 999, 1000, 10**6])) for word in "abcdefg"}
    expected = {}
    for word, count in counts.items():
        total = expected.setdefault(bucket_of(count), [0] * 5)
        for row, reference in enumerate(references):
            total[0] += reference.count(word)
            for number, lines in enumerate(systems):
                own = list(lines[row])
                total[3 + number] += own.count(word)
                total[1 + number] += min(own.count(word), reference.count(word))
    found = score_by_frequency(systems, references, counts)
    assert {(bucket.first, bucket.last): bucket.words for bucket in found} == {
        key: total[0] for key, total in expected.items() if any(total)
    }
    for bucket in found:
        total = expected[bucket.first, bucket.last]
        for number, f1 in enumerate(bucket.f1):
            size = total[3 + number] + total[0]
            assert f1 == pytest.approx(200 * total[1 + number] / size) if size else f1 is None


def test_counts_are_of_the_words_that_are_asked_for_alone():
    lines = [["a", "b", "a"], ["c"], []]
    assert count_occurrences(lines, {"a", "z"}) == {"a": 2, "z": 0}
    assert count_occurrences([], ()) == {}


def test_buckets_have_names_for_people():
    found = score_by_frequency([[list("abcdef")]], [list("abcdef")], dict(zip("abcdef", (0, 1, 3, 70, 500, 10**4), strict=True)))
    assert [bucket.name for bucket in found] == ["0", "1", "2–4", "10–99", "100–999", "1,000 and more"]
    assert all(bucket.f1 == [100.0] for bucket in found) and len(LASTS) == 6


def test_training_counts_are_those_of_the_data_set_or_the_page_says_why_not(tmp_path):
    data = write_toy_data(tmp_path / "data", train=40, test=6)
    references = read_references(data, "test")
    run = make_run("run", "transformer", 1, 2, batch={"fraction": 0.5})
    index = json.loads((data / "encoded" / "index.json").read_text())
    run.config["data"], run.facts["data_fingerprint"] = str(data), index["fingerprint"]
    run.translations["test"] = [" ".join(reversed(line.split())) for line in references]
    table = ScoreTable("test", index["text_fingerprint"], [], [ScoreRow("run", "test", {}, {})])
    found = score_frequencies(table, [run])
    assert not found.missing and found.training_lines == 40 and all(bucket.f1 == [100.0] for bucket in found.buckets)
    training = " ".join(read_references(data, "train")).split()
    tokens = [word for line in references for word in line.split()]
    for bucket in found.buckets:
        inside = [word for word in tokens if bucket.first <= training.count(word) <= (bucket.last or np.inf)]
        assert bucket.words == len(inside)
    assert sum(bucket.words for bucket in found.buckets) == len(tokens)
    assert found.notes == ("run was trained on a share of 0.5 of these lines.",)
    table.rows[0].record["bleu_tokenized_signature"] = "nrefs:1|tok:char|version:2"  # target_language=ja
    assert sum(bucket.words for bucket in score_frequencies(table, [run]).buckets) == sum(map(len, tokens))
    for name in (data / "text").glob("train-*.arrow"):
        name.unlink()
    assert "train-" in score_frequencies(table, [run]).missing
    shutil.rmtree(data)
    assert "no data set of a run" in score_frequencies(table, [run]).missing


@pytest.mark.slow
def test_counts_of_a_data_set_in_an_object_store_are_those_of_the_same_one_here(tmp_path, caplog):
    data = write_toy_data(tmp_path / "data", train=40, test=6)
    run = make_run("run", "transformer", 1, 2)
    index = json.loads((data / "encoded" / "index.json").read_text())
    index["files"] = {"lengths.arrow": file_sha256(data / "encoded" / "lengths.arrow")}  # objects are known by their hashes
    (data / "encoded" / "index.json").write_text(json.dumps(index))
    run.facts["data_fingerprint"] = index["fingerprint"]
    run.translations["test"] = [" ".join(reversed(line.split())) for line in read_references(data, "test")]
    table = ScoreTable("test", index["text_fingerprint"], [], [ScoreRow("run", "test", {}, {})])
    run.config["data"] = str(data)
    expected = score_frequencies(table, [run])
    with s3_server(tmp_path) as bucket:
        run.config["data"] = f"{bucket}/data"
        for path in data.rglob("*"):
            if path.is_file():
                (as_path(bucket) / "data" / path.relative_to(data).as_posix()).write_bytes(path.read_bytes())
        assert score_frequencies(table, [run]) == expected and not expected.missing
        said = caplog.messages
        assert said[0] == "counting the words of test in the training text"
        assert said[1].startswith(said[0]) and said[1].endswith(f" MB are read from {bucket}/data/text")
        shutil.rmtree(tmp_path / "cache")
        record = next(record for record in read_index(data / "text").records("train"))
        (as_path(bucket) / "data" / "text" / record.name).write_bytes(b"other")
        assert "is damaged: its hash is not the one in index.json" in score_frequencies(table, [run]).missing
