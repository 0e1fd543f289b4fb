"""The answers of one replica: translations as of translate.py, trees, attention and its limit."""

import json

import pytest
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from serving_process import run

from treenet.api.run import load_run
from treenet.extras.serving.messages import Answer, Question
from treenet.extras.serving.sentences import SentenceTranslator, load_reader
from treenet.extras.serving.settings import ServeSettings
from treenet.translation.line_translator import LineTranslator
from treenet.translation.settings import TranslateSettings
from treeproc.common.settings import UserError
from treeproc.online.raw_lines import RawLine

pytestmark = pytest.mark.slow

__all__ = ["run"]  # a fixture


@pytest.fixture(scope="module")
def translator(run) -> SentenceTranslator:
    return load_reader(ServeSettings(attention_numbers=1500), run)


def read(answer: bytes | str) -> dict:
    assert isinstance(answer, bytes), answer
    return Answer.model_validate_json(answer).model_dump()


def numbers(line: dict) -> list[float | None]:
    """Scores and weights: the last digits of float32 depend on the shape of a batch."""
    weights = line["attention"]["weights"] if line["attention"] else []
    return [one[name] for one in line["hypotheses"] for name in ("score", "log_prob")] + [w for row in weights for w in row]


def without_numbers(line: dict) -> dict:
    texts = [(one["text"], one["pieces"]) for one in line["hypotheses"]]
    targets = line["attention"] and line["attention"]["targets"]
    return {**line, "hypotheses": texts, "attention": targets}


def test_batches_of_requests_give_the_translations_of_translate(translator, run):
    lines = [" ".join(SEARCH_WORDS[i % 7 : i]) for i in range(1, 12)] + ["", "ba 😀", "ba\x01", "ba \ud800", "be " * 1001]
    questions = [Question(tuple(lines[i : i + 3]), 1 + i % 3, i % 2 == 0) for i in range(0, len(lines), 3)]
    answers = [line for answer in translator.answer(questions) for line in read(answer)["lines"]]
    alone = [line for question in questions for line in read(translator.answer([question])[0])["lines"]]
    assert len(answers) == len(lines)
    assert list(map(without_numbers, answers)) == list(map(without_numbers, alone))
    assert list(map(numbers, answers)) == [pytest.approx(one, abs=1e-4) for one in map(numbers, alone)]
    for num_best in (1, 2, 3):
        expected = LineTranslator(TranslateSettings(nbest=num_best, json_lines=True), [run])
        raw = [RawLine(line.encode("utf-8", "surrogatepass")) for line in lines]
        for i, record in enumerate(map(json.loads, expected(raw, 0).text.splitlines())):
            if 1 + 3 * (i // 3) % 3 == num_best:
                found = answers[i]
                assert (found["source"], found["error"]) == (record["source"], record.get("error"))
                assert [one["text"] for one in found["hypotheses"]] == [one["text"] for one in record["hypotheses"]]
                scores = [one["score"] for one in record["hypotheses"]]
                assert [one["score"] for one in found["hypotheses"]] == pytest.approx(scores, abs=1e-5)


def test_constraints_of_a_line_are_those_of_translate_beside_lines_without(translator, run):
    lines = ("ba be bi", "do du", "ba be bi", "", "be")
    [first] = read(translator.answer([Question(("ba be bi",), 1, False)])[0])["lines"]
    forbidden = first["translation"].split()[0]
    columns = {
        "prefix": ("", "bi", "", "", ""),
        "must_appear": ("do du\tba", "", "", "", "du bi " * 30),
        "must_not_appear": ("", "", forbidden, "", ""),
    }
    assert "do du" not in first["translation"]
    question = Question(lines, 2, True, columns)
    beside = Question(("ba be bi", "bi bo"), 2, True)
    answers = [read(answer)["lines"] for answer in translator.answer([beside, question, beside])]
    alone = [read(translator.answer([one])[0])["lines"] for one in (beside, question, beside)]
    assert [list(map(without_numbers, one)) for one in answers] == [list(map(without_numbers, one)) for one in alone]
    translator_of_files = LineTranslator(TranslateSettings(nbest=2, json_lines=True), [run])
    raw = [RawLine(line.encode(), **{name: columns[name][i].encode() for name in columns}) for i, line in enumerate(lines)]
    expected = list(map(json.loads, translator_of_files(raw, 0).text.splitlines()))
    assert [line["error"] for line in answers[1]] == [record.get("error") for record in expected]
    for line, record in zip(answers[1], expected, strict=True):
        assert [one["text"] for one in line["hypotheses"]] == [one["text"] for one in record["hypotheses"]]
    assert all("do du" in one["text"] and "ba" in one["text"] for one in answers[1][0]["hypotheses"])
    assert answers[1][1]["translation"].startswith("bi") and forbidden not in answers[1][2]["translation"]
    assert "no translation within the limits" in answers[1][4]["error"] and answers[1][4]["attention"] is None


def test_a_search_that_makes_no_phrases_appear_says_so(run):
    sampler = load_reader(ServeSettings(decoding={"method": "sampling"}), run)
    columns = {"must_appear": ("do", ""), "prefix": ("", "bi")}
    first, second = read(sampler.answer([Question(("ba be", "ba be"), 1, False, columns)])[0])["lines"]
    assert "must_appear needs decoding.method = beam" in first["error"] and not first["hypotheses"]
    assert second["error"] is None and second["translation"].startswith("bi")


def test_samples_of_a_request_do_not_depend_on_the_requests_beside_it(run):
    sampler = load_reader(ServeSettings(decoding={"method": "sampling"}), run)
    questions = [
        Question(("ba be bi", "do du"), 3, False),
        Question(("ba be bi",), 3, False),
        Question(("ba be bi", "do du"), 3, False),
    ]
    together = [read(answer)["lines"] for answer in sampler.answer(questions)]
    alone = [read(sampler.answer([question])[0])["lines"] for question in questions]
    assert [list(map(without_numbers, lines)) for lines in together] == [list(map(without_numbers, lines)) for lines in alone]
    assert len({one["text"] for one in together[0][0]["hypotheses"]}) > 1
    assert without_numbers(together[0][0]) == without_numbers(together[1][0])


def test_an_answer_has_tree_and_attention(translator, run):
    [line] = read(translator.answer([Question(("ba bebe bi",), 2, True)])[0])["lines"]
    expected = load_run(run).attention("ba bebe bi")
    leaves, nodes = line["tree"]["leaves"], line["tree"]["nodes"]
    assert [leaf["piece"] for leaf in leaves] + [node["label"] for node in nodes] == [p.name for p in expected.positions]
    assert [(node["start"], node["end"]) for node in nodes] == [(p.start, p.end) for p in expected.positions if p.is_node]
    assert line["attention"]["targets"] == expected.targets
    assert line["attention"]["weights"] == pytest.approx(expected.mean, abs=1e-4)
    assert (
        line["tree"]["brackets"].count("(") == len(leaves) + len(nodes) and line["translation"] == line["hypotheses"][0]["text"]
    )


def test_attention_has_a_limit_and_says_so(translator):
    lines = tuple(" ".join(SEARCH_WORDS[:n]) for n in (9, 12, 15, 2))
    answers = read(translator.answer([Question(lines, 1, True)])[0])["lines"]
    without = [answer for answer in answers if answer["attention"] is None]
    assert 0 < len(without) < 4
    assert all(
        answer["warnings"] == ["no attention: an answer has at most 1,500 weights; send fewer or shorter lines"]
        for answer in without
    )


@pytest.mark.parametrize("name", ["transformer", "tree_transformer"])
def test_the_limit_counts_the_weights_that_an_answer_has(tmp_path, name):
    """Those of nodes, which a plain model does not attend to, counted too."""
    folder = write_run(tmp_path / "run", write_vocabulary(tmp_path / "data"), name=name)
    question = Question(("ba bebe bi",), 1, True)

    def weights(most: int) -> list | None:
        [line] = read(load_reader(ServeSettings(attention_numbers=most), folder).answer([question])[0])["lines"]
        return line["attention"] and line["attention"]["weights"]

    size = sum(map(len, weights(1000)))
    assert weights(size) == weights(1000) and weights(size - 1) is None


def test_a_model_without_weights_says_so(tmp_path):
    folder = write_run(tmp_path / "run", write_vocabulary(tmp_path / "data"), name="convs2s")
    [line] = read(load_reader(ServeSettings(), folder).answer([Question(("ba be",), 1, True)])[0])["lines"]
    assert line["attention"] is None and "no attention weights" in line["warnings"][0] and line["translation"]


def test_a_coverage_penalty_that_the_model_cannot_compute_is_refused_at_the_start(tmp_path):
    folder = write_run(tmp_path / "run", write_vocabulary(tmp_path / "data"), name="convs2s")
    with pytest.raises(UserError, match="coverage_penalty needs one model with a Transformer decoder; leave it out"):
        load_reader(ServeSettings(decoding={"coverage_penalty": 0.2}), folder)


@pytest.mark.parametrize("kind", [RuntimeError, IndexError])
def test_a_request_that_fails_takes_no_other_with_it(translator, monkeypatch, capsys, kind):
    original = SentenceTranslator._answer_all

    def fails(self, questions):
        if any("bad" in question.lines for question in questions):
            raise kind("out of memory")
        return original(self, questions)

    monkeypatch.setattr(SentenceTranslator, "_answer_all", fails)
    good = Question(("ba be",), 1, False)
    found = translator.answer([good, Question(("bad",), 1, False), good])
    assert found[0] == found[2] == translator.answer([good])[0] and found[1] == "the request could not be answered"
    assert "out of memory" in capsys.readouterr().err
