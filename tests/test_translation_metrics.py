"""Facts about metrics of translations, advice at and beyond its limits, and lines that processes share."""

import pytest
from sacrebleu.metrics import CHRF
from toydata import write_toy_data

from treenet.tasks import translation_metrics
from treenet.tasks.translation_metrics import (
    COMPARED,
    METRIC_TITLES,
    METRICS,
    OF_NO_BLANKS,
    OF_STUDIES,
    OF_VALIDATIONS,
    SCORE_TYPES,
    check_lines,
    compute_scores,
    describe_blanks,
    describe_case,
    describe_forms,
    named_tokenizers,
    needed_tokenizer,
    sentence_chrf,
    tokenizer_of,
)
from treeproc.common.settings import UserError


def test_metrics_have_their_roles():
    assert COMPARED == ("bleu", "chrf") and OF_STUDIES == ("bleu", "bleu_tokenized", "chrf")
    assert OF_VALIDATIONS == ("bleu", "chrf", "ter")
    assert [name for name, metric in METRICS.items() if metric.lower_is_better] == ["ter"]
    assert [name for name, metric in METRICS.items() if metric.is_slow] == ["ter"]
    assert set(METRIC_TITLES) == {*METRICS, "bertscore", "comet"} and {"zh", "ja-mecab", "char"} == OF_NO_BLANKS
    assert {name for name, kind in SCORE_TYPES.items() if kind is float} == set(METRIC_TITLES)
    assert {name for name, kind in SCORE_TYPES.items() if kind is str} == {f"{name}_signature" for name in METRICS}
    # sacrebleu may advise to detokenise, but not where the input came in tokens.
    forced = {name: [METRICS[name].build(tokenized)._force for tokenized in (False, True)] for name in METRICS if "bleu" in name}
    assert forced == {"bleu": [False, True], "bleu_tokenized": [True, True], "bleu_compound_split": [True, True]}
    assert METRICS["bleu"].build()._force


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a"], ["b"], None),
        ([], [], "out: there are no lines to score"),
        (["a", "b"], ["c"], "out: must have one line per reference, 1 of gold, but have 2"),
        (["a", " "], ["c"], "out: must have one line per reference, 1 of gold, but have 2; the last line of out is blank"),
        (["a"], ["b", "c"], "out: must have one line per reference, 2 of gold, but have 1"),
        (["a"], ["b", ""], "out: must have one line per reference, 2 of gold, but have 1; the last line of gold is blank"),
        (["a", ""], ["b", "c", "d"], "out: must have one line per reference, 3 of gold, but have 2"),
    ],
)
def test_lines_that_do_not_match_are_refused(hypotheses, references, message):
    if message is None:
        return check_lines(hypotheses, references, "out", "gold")
    with pytest.raises(UserError) as caught:
        check_lines(hypotheses, references, "out", "gold")
    assert str(caught.value) == message
    with pytest.raises(UserError) as caught:
        check_lines(hypotheses, references)
    assert str(caught.value) == message.replace(" of gold, ", ", ").replace("out", "translations").replace(
        "gold", "the references"
    )


@pytest.mark.parametrize(
    ("few", "lines", "is_told"), [(0, 20, False), (1, 20, False), (1, 19, True), (2, 39, True), (2, 40, False)]
)
def test_more_than_one_line_in_twenty_is_told(few, lines, is_told):
    blanks = ["中文"] * few + ["ab"] * (lines - few)
    assert bool(describe_blanks(blanks, "intl")) == is_told and not describe_blanks(blanks, "none")
    cased = ["Ab"] * few + ["ab"] * (lines - few)
    assert bool(describe_case(cased, ["ab"] * lines)) == is_told
    assert bool(describe_case(["ab"] * lines, cased)) == is_told
    if is_told:
        assert describe_case(cased, ["ab"] * lines).startswith(f"{few} of {lines} translations")


def test_a_line_is_without_blanks_if_most_of_its_letters_are():
    assert not describe_blanks(["ab中文 1,2"], "intl") and describe_blanks(["a中文 1,2"], "intl")
    assert not describe_blanks(["1, 2"], "intl") and not describe_blanks([], "intl")
    assert not describe_case([], []) and not describe_forms([], [])
    assert describe_forms(["e\u0301 e\u0301 x"], ["\u00e9 x"]).startswith("in 1 of 1 lines")
    assert not describe_forms(["e\u0301 x"], ["y x"])


def test_the_tokeniser_follows_from_the_settings_of_the_data(tmp_path):
    data = write_toy_data(tmp_path / "data", train=2, valid=2, test=2)
    assert [tokenizer_of(None), tokenizer_of(None, "de"), tokenizer_of(data, "zh")] == ["intl", "moses.de", "zh"]
    for text, found in {
        "tokenized: none": "moses.de",
        "seed: 1": "moses.de",
        "tokenized: moses": "none",
        "- a": "moses.de",
    }.items():
        (data / "config.yaml").write_text(f"{text}\n")
        assert tokenizer_of(data, "de") == found


def test_processes_share_the_lines_of_slow_metrics_alone(monkeypatch):
    """Here, one process computes the parts."""
    shared = []

    def map_here(function, parts, processes, what):
        parts = list(parts)
        shared.append((processes, [len(side) for part in parts for side in part]))
        return map(function, parts)

    monkeypatch.setattr(translation_metrics, "map_in_processes", map_here)
    monkeypatch.setattr(translation_metrics, "_FEWEST_LINES", 4)
    monkeypatch.setattr(translation_metrics, "_LINES_AT_ONCE", 3)
    first, second = ["a b c d"] * 8, ["a b x d", "b a c d"] * 4
    hypotheses = ["a c b d", "a b c"] * 4
    expected = compute_scores(hypotheses, first, more_references=[second])
    for count, processes, found in ((8, 1, None), (7, 2, None), (8, 2, 2), (8, 3, 2)):
        shared.clear()
        scores = compute_scores(hypotheses[:count], first[:count], more_references=[second[:count]], processes=processes)
        assert shared == ([(found, [3, 3, 3, 3, 3, 3, 2, 2, 2])] if found else [])
        assert scores == expected if count == 8 else scores["num_examples"] == 7


def test_results_name_their_tokenisers():
    def results(*names: str) -> list[dict]:
        return [{"bleu_tokenized_signature": f"nrefs:1|tok:{name}|x:y"} if name else {} for name in names]

    assert named_tokenizers(results("none", "ja-mecab-0.996-IPA", "moses.de", "")) == {"none", "ja-mecab", "moses.de", "?"}
    for names, needed in (
        (("none",), "none"), (("none", "none"), "none"), (("zh",), "zh"), (("char",), "char"), (("ja-mecab-1",), "ja-mecab"),
        (("intl",), None), (("moses.de",), None), (("none", "zh"), None), (("",), None), ((), None),
    ):  # fmt: skip
        assert needed_tokenizer(results(*names)) == needed, names


def test_chrf_of_single_lines_is_that_of_sacrebleu():
    hypotheses, references = ["a b", "", "ein Hund"], ["a c", "x", "ein Hund"]
    expected = [CHRF().sentence_score(one, [other]).score for one, other in zip(hypotheses, references, strict=True)]
    assert sentence_chrf(hypotheses, references).tolist() == expected and expected[2] == 100
    with pytest.raises(ValueError, match="shorter"):
        sentence_chrf(hypotheses, references[:2])
