"""Scores of known translations."""

import gzip
import math
import re
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
import sacrebleu
from data_beside import DATA
from hypothesis import given
from hypothesis_profiles import num_examples
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from scipy.special import stdtr
from strategies import trees

from treenet.cli import evaluate
from treenet.evaluation.bootstrap import (
    SeedComparison,
    compare_means,
    compare_seeds,
    compare_slopes,
    compare_systems,
    sacrebleu_p,
    sample_counts,
    sample_metric,
    sentence_statistics,
    statistics_of,
    two_sided_p,
)
from treenet.evaluation.buckets import count_words, format_buckets, score_buckets, score_tags, tree_depth
from treenet.evaluation.evaluate import format_signatures
from treenet.evaluation.settings import BucketConfig
from treenet.report.score_sections import best_value
from treenet.tasks import translation_metrics
from treenet.tasks.translation_metrics import (
    METRICS,
    OF_STUDIES,
    Metric,
    build_tokenizer,
    choose_tokenizer,
    compute_scores,
    describe_blanks,
    describe_case,
    describe_forms,
    needed_tokenizer,
    sentence_chrf,
    split_compounds,
)
from treeproc.common.settings import UserError
from treeproc.readers import read_lines

MULTI30K = DATA / "multi30k"

REFERENCES = [
    f"the {animal} sat on the {thing} and looked at us ." for animal in ("cat", "dog", "cow") for thing in ("mat", "sofa", "car")
]


def test_the_references_score_100_with_signatures():
    scores = compute_scores(REFERENCES, REFERENCES)
    assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    assert scores["num_examples"] == 9
    version = f"version:{sacrebleu.__version__}"
    assert scores["bleu_signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}"
    assert scores["chrf_signature"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|{version}"


def test_bleu_of_a_known_case():
    """Six of seven words with one wrong at the end: precisions 5/6, 4/5, 3/4, 2/3 and brevity exp(1 - 7/6)."""
    scores = compute_scores(["a b c d e x"], ["a b c d e f g"])
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25 * 2.718281828 ** (1 - 7 / 6))


def test_ter_counts_edits_and_moved_blocks():
    """The reference has 4 words. One edit replaces a word, inserts one, or moves two words as one block."""
    assert compute_scores(REFERENCES, REFERENCES)["ter"] == 0
    for hypothesis, edits in (("a b c x", 1), ("a b b c d", 1), ("c d a b", 1), ("x y z w", 4), ("a b c d", 0)):
        assert compute_scores([hypothesis], ["a b c d"])["ter"] == pytest.approx(100 * edits / 4)
    values = [61.0, 59.0, 60.0]
    assert (best_value("ter", values), best_value("bleu", values), best_value("ter", [])) == (59.0, 61.0, None)
    assert (best_value("mse", [0.2, 0.3]), best_value("nll", [2.0, 1.0]), best_value("other", [1, 2])) == (0.2, 1.0, 2)


def slow_bleu_counts(hypothesis: list[str], references: list[list[str]], order: int) -> tuple[int, int]:
    """Matching n-grams, each counted at most as often as in the reference that has most of it; and all n-grams."""
    grams = [tuple(hypothesis[i : i + order]) for i in range(len(hypothesis) - order + 1)]
    most = {gram: max([tuple(r[i : i + order]) for i in range(len(r))].count(gram) for r in references) for gram in set(grams)}
    return sum(min(grams.count(gram), most[gram]) for gram in set(grams)), len(grams)


def test_further_references_count_as_in_the_definition_of_bleu():
    hypotheses = ["a b c d e f", "g h i a b c d"]
    first, second = ["a b c x e f g", "g h i j k l m"], ["z b c d e y", "a b c d h i"]
    precisions = []
    for order in range(1, 5):
        counts = [
            slow_bleu_counts(h.split(), [one.split(), other.split()], order)
            for h, one, other in zip(hypotheses, first, second, strict=True)
        ]
        precisions.append(sum(match for match, _ in counts) / sum(total for _, total in counts))
    length, closest = 13, 6 + 7  # of the references of a line, that of the closest length
    expected = 100 * math.exp(min(0, 1 - closest / length)) * math.prod(precisions) ** 0.25
    scores = compute_scores(hypotheses, first, more_references=[second])
    assert scores["bleu"] == pytest.approx(expected) and scores["bleu"] > compute_scores(hypotheses, first)["bleu"]
    assert scores["bleu_signature"].startswith("nrefs:2|")
    assert scores["ter"] < compute_scores(hypotheses, first)["ter"]


@pytest.mark.slow
def test_processes_share_lines_and_change_no_score(monkeypatch):
    hypotheses, others = REFERENCES[1:] + REFERENCES[:1], REFERENCES[2:] + REFERENCES[:2]
    expected = compute_scores(hypotheses, REFERENCES, more_references=[others])
    monkeypatch.setattr(translation_metrics, "_FEWEST_LINES", 4)
    monkeypatch.setattr(translation_metrics, "_LINES_AT_ONCE", 2)
    assert compute_scores(hypotheses, REFERENCES, more_references=[others], processes=2) == expected


def test_statistics_of_bleu_take_further_references():
    hypotheses, first, second = ["a b c d e f", "g h i a b c d"], ["a b c x e f g", "g h i j"], ["z b c d e y", "a b c d h i j"]
    for tokenizer, name in ((None, "bleu"), ("intl", "bleu_tokenized")):
        statistics = sentence_statistics(name, hypotheses, first, tokenizer, [second])
        expected = compute_scores(hypotheses, first, "intl", [second])[name]
        assert sample_metric(name, statistics, 1)[0] == pytest.approx(expected) and expected > 20
    assert statistics[:, -1].tolist() == [6, 7]
    with pytest.raises(UserError, match="must have one line per reference"):
        sentence_statistics("bleu", hypotheses, first, None, [second[1:]])


@pytest.mark.parametrize("name", OF_STUDIES)
def test_every_metric_of_studies_is_computed_from_numbers_of_its_sentences(name):
    lines = [line.replace("looked", "look", row % 2) for row, line in enumerate(REFERENCES)]
    statistics = sentence_statistics(name, lines, REFERENCES, "intl")
    assert statistics.shape == (len(lines), len(statistics_of(name))) and statistics.dtype == np.int64
    sampled = sample_metric(name, statistics, 20)
    assert sampled[0] == pytest.approx(compute_scores(lines, REFERENCES)[name]) and len(set(sampled)) > 3


def test_numbers_of_sentences_follow_the_tokeniser_of_the_metric(monkeypatch):
    """They were those of 13a for every BLEU of lines."""
    monkeypatch.setitem(METRICS, "bleu_char", Metric(title="BLEU of characters", kind="BLEU", options={"tokenize": "char"}))
    test_every_metric_of_studies_is_computed_from_numbers_of_its_sentences("bleu_char")


def test_a_comparison_takes_further_references():
    first, second = [line.replace("sat", "was") for line in REFERENCES], REFERENCES
    alone = compare_systems(first, second, REFERENCES, 20)["bleu"]
    both = compare_systems(first, second, REFERENCES, 20, [first])["bleu"]
    assert alone.difference > 1 and both.baseline == both.system == pytest.approx(100) and both.p_two_sided == 1
    with pytest.raises(UserError, match="must have one line per reference"):
        compare_systems(first, second, REFERENCES, 20, [first[1:]])


@pytest.mark.slow
def test_the_command_reads_further_references(tmp_path, capsys):
    files = {"found": ["a b c d e"], "first": ["a b x d e"], "second": ["a b c d f"], "short": []}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    given = [f"hypotheses={tmp_path / 'found'}", f"references={tmp_path / 'first'}"]
    evaluate.main([*given, f"more_references=[{tmp_path / 'second'}]"])
    assert "nrefs:2" in capsys.readouterr().out
    with pytest.raises(UserError, match="more_references: .*short must have 1 lines, but has 0"):
        evaluate.main([*given, f"more_references=[{tmp_path / 'short'}]"])


def test_case_and_tokenisation_are_those_of_13a():
    assert compute_scores(["Yes , we can go ."], ["Yes, we can go."])["bleu"] == pytest.approx(100)
    assert compute_scores(["yes, we can go."], ["Yes, we can go."])["bleu"] < 90


def reference_bleu(hypotheses: list[str], references: list[str]) -> float:
    """BLEU of Papineni et al. (2002) over the tokens between blanks, one reference a line, without smoothing."""

    def ngrams(line: str, order: int) -> Counter:
        words = line.split()
        return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))

    logs = []
    for order in range(1, 5):
        pairs = [(ngrams(h, order), ngrams(r, order)) for h, r in zip(hypotheses, references, strict=True)]
        hits = sum(min(count, right[gram]) for left, right in pairs for gram, count in left.items())
        logs.append(math.log(hits / sum(left.total() for left, _ in pairs)))
    lengths = [sum(len(line.split()) for line in side) for side in (hypotheses, references)]
    return 100 * math.exp(min(0, 1 - lengths[1] / lengths[0]) + sum(logs) / 4)


COMPOUNDS = [line.replace("sat on", "sat down-to-earth on") + " don't , well-made" for line in REFERENCES]


@pytest.mark.parametrize("tokenizer", ["none", "intl", "moses.en", "moses.de"])
def test_tokenised_and_compound_split_bleu_are_bleu_over_those_tokens(tokenizer):
    hypotheses = [line.replace("mat", "sofa").replace("well-made", "well-read") for line in COMPOUNDS]
    scores = compute_scores(hypotheses, COMPOUNDS, tokenizer)
    sides = [[build_tokenizer(tokenizer)(line) for line in side] for side in (hypotheses, COMPOUNDS)]
    assert scores["bleu_tokenized"] == pytest.approx(reference_bleu(*sides))
    sides = [[split_compounds(line) for line in side] for side in sides]
    assert scores["bleu_compound_split"] == pytest.approx(reference_bleu(*sides))
    assert f"tok:{tokenizer}|" in scores["bleu_tokenized_signature"]
    assert f"tok:{tokenizer}+compounds|" in scores["bleu_compound_split_signature"]
    assert ("sacremoses:" in scores["bleu_tokenized_signature"]) == tokenizer.startswith("moses")
    assert scores["bleu"] == compute_scores(hypotheses, COMPOUNDS)["bleu"]


def test_text_without_blanks_between_words_has_tokens_of_its_own():
    """Moses and 13a take a sentence for a word, so BLEU would be 0."""
    references = ["我想知道湯姆住在哪裡。", "他昨天在家裡看書。", "この本はとても面白い。"]
    hypotheses = ["我想知道湯姆住在這裡。", "他昨天在家裡看書。", "その本はとても面白い。"]
    assert [choose_tokenizer(False, one) for one in ("zh", "ja", "th", "ko")] == ["zh", "ja-mecab", "char", "moses.ko"]
    for tokenizer, named in (("zh", "zh"), ("ja-mecab", "ja-mecab-0.996-IPA"), ("char", "char")):
        scores = compute_scores(hypotheses, references, tokenizer)
        if tokenizer == "char":
            characters = [[" ".join(line) for line in side] for side in (hypotheses, references)]
            assert scores["bleu_tokenized"] == pytest.approx(reference_bleu(*characters))
        assert scores["bleu_tokenized"] > 55 > 40 > scores["bleu"]
        assert f"tok:{named}|" in scores["bleu_tokenized_signature"]
        assert f"tok:{named}+compounds|" in scores["bleu_compound_split_signature"]
        assert needed_tokenizer([scores]) == tokenizer
    for tokenizer in ("intl", "moses.de", "moses.ko"):
        assert describe_blanks(references, tokenizer).startswith("3 of 3 references are in a script without blanks")
    assert not any(describe_blanks(references, tokenizer) for tokenizer in ("zh", "ja-mecab", "char", "none"))
    assert not describe_blanks([*REFERENCES * 20, references[0]], "intl")


def test_the_words_of_japanese_are_those_of_sacrebleu():
    references, hypotheses = ["東京都に住んでいる学生です。", ""], ["東京に住んでいた学生です。", "はい。"]
    scores = compute_scores(hypotheses, references, "ja-mecab")
    metric = BLEU(tokenize="ja-mecab")
    assert scores["bleu_tokenized"] == metric.corpus_score(hypotheses, [references]).score > 0
    assert scores["bleu_tokenized_signature"] == metric.get_signature().format()


@pytest.mark.parametrize("module", ["MeCab", "ipadic"])
def test_japanese_without_its_extra_is_refused_in_one_line(monkeypatch, module):
    monkeypatch.setattr("treeproc.common.errors.is_installed", lambda name: name != module)
    with pytest.raises(UserError) as error:
        build_tokenizer(choose_tokenizer(False, "ja"))
    said = f"target_language=ja needs {module}, which is not installed: pip install 'tree-attention[ja]'"
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("tokenizer", ["zh", "moses.de"])
def test_tokenised_bleu_is_compared_over_the_same_tokens(tokenizer):
    """BLEU of perfect sentences without blanks is 0."""
    references = ["我喜欢吃苹果，但是他不喜欢。", "你好，世界！", "今天天气很好，我们去玩吧！"]
    systems = [[line.replace(*change) for line in references] for change in (("喜欢", "爱"), ("！", "。"))]
    found = compare_systems(*systems, references, 20, [systems[0]], tokenizer)
    assert list(found) == ["bleu", "bleu_tokenized", "chrf"]
    for side, lines in zip(("baseline", "system"), systems, strict=True):
        scores = compute_scores(lines, references, tokenizer, [systems[0]])
        assert {name: getattr(one, side) for name, one in found.items()} == pytest.approx({name: scores[name] for name in found})
    signature = found["bleu_tokenized"].signature
    assert signature.replace("|bs:20|seed:12345", "") == scores["bleu_tokenized_signature"]
    assert list(compare_systems(*systems, references, 20)) == ["bleu", "chrf"]


def test_words_in_another_form_of_unicode_are_told():
    composed, decomposed = ["für uns", "für", "x"], ["fu\u0308r uns", "fu\u0308r", "x"]
    for lines in ((composed, decomposed), (decomposed, composed)):
        assert describe_forms(*lines).startswith("in 2 of 3 lines, translation and reference have a word in two forms")
    assert not describe_forms(composed, composed) and not describe_forms(decomposed, decomposed)
    assert not describe_forms(["fur"], decomposed[:1]) and compute_scores(composed, decomposed)["chrf"] < 90


def test_capital_letters_on_one_side_alone_are_told():
    cased, lower = ["Ein Hund", "zwei Katzen", "drei"], ["ein hund", "zwei katzen", "drei"]
    assert describe_case(cased, lower).startswith("2 of 3 translations have capital letters, but no reference has one")
    assert describe_case(lower, cased).startswith("2 of 3 references have capital letters, but no translation has one")
    assert not describe_case(cased, cased) and not describe_case(lower, lower)
    assert not describe_case(cased, ["母は本を読みます。"] * 3), "a script without case"
    assert describe_case(lower, ["EIN HUND", "ZWEI KATZEN", "DREI"]).startswith("3 of 3 references have capital letters")
    assert not describe_case(["Ein", *lower * 10], ["ein", *lower * 10])


def test_the_tokeniser_is_that_of_the_data_or_of_the_language():
    assert [choose_tokenizer(*case) for case in ((True, "de"), (False, "de"), (False, None))] == ["none", "moses.de", "intl"]
    line = "Mr. Smith doesn't know well-made things, l'homme & 3,000.5 $ too."
    moses = "Mr. Smith doesn 't know well-made things , l 'homme & 3,000.5 $ too ."
    assert build_tokenizer("moses.en")(line) == moses
    assert build_tokenizer("moses.fr")("l'homme") == "l' homme" and build_tokenizer("moses.de")("z.B. so.") == "z.B. so ."
    assert split_compounds("well-known a-b-c - x-") == "well ##AT##-##AT## known a ##AT##-##AT## b-c - x-"


@pytest.mark.data
@pytest.mark.parametrize("language", ["en", "de"])
def test_moses_tokens_are_those_of_the_published_captions(language):
    tokenize = build_tokenizer(f"moses.{language}")
    raw = read_lines([MULTI30K / f"test_2016_flickr.{language}.gz"])
    with gzip.open(MULTI30K / f"test_2016_flickr.lc.norm.tok.{language}.gz", "rt", encoding="utf-8") as file:
        published = [line.replace("&apos;", "'").replace("&quot;", '"').replace("&amp;", "&").split() for line in file]
    same = sum(tokenize(line.lower()).split() == tokens for line, tokens in zip(raw, published, strict=True))
    assert same >= len(published) - 1  # one English line has its quotation marks put in order before


@given(trees())
@num_examples(60)
def test_depth_is_the_longest_way_from_root_to_leaf(tree):
    def depth(node: int) -> int:
        return 0 if node < 0 else 1 + depth(tree.parents[node])

    example = {"spans": {"subtree_end": tree.span_array[:, 2]}}
    assert tree_depth(example) == max((depth(node) for node in range(len(tree.parents))), default=0)


def test_pieces_of_a_word_count_once():
    assert count_words({"leaves": {"word_index": np.array([0, 0, 1, 2, 2, 2])}}) == 3
    assert count_words({"leaves": {"word_index": np.array([], dtype=np.int64)}}) == 0


def test_buckets_hold_every_line_once_and_score_their_lines():
    worse = [line.replace("looked at us", "left") for line in REFERENCES]
    sizes = {"words": np.array([1, 10, 11, 20, 21, 0, 99, 5, 60]), "depth": np.full(9, 3)}
    found = score_buckets(sizes, BucketConfig(words=(10, 20)), worse, REFERENCES)
    assert [(b["from"], b["to"], b["num_examples"]) for b in found["words"]] == [(0, 10, 4), (11, 20, 2), (21, None, 3)]
    assert [(b["from"], b["to"], b["num_examples"]) for b in found["depth"]] == [(0, 4, 9)]
    rows = [2, 3]
    expected = compute_scores([worse[i] for i in rows], [REFERENCES[i] for i in rows])["bleu"]
    assert found["words"][1]["bleu"] == expected and found["depth"][0]["bleu"] == compute_scores(worse, REFERENCES)["bleu"]
    table = [re.split("  +", line) for line in format_buckets(found).split("\n")]
    counts = {"up to 10": "4", "11 to 20": "2", "21 and more": "3"}
    words = [[name, counts[name], f"{one['bleu']:.2f}"] for name, one in zip(counts, found["words"], strict=True)]
    depth = [["depth of the source's tree", "sentences", "BLEU"], ["up to 4", "9", f"{found['depth'][0]['bleu']:.2f}"]]
    assert table == [["words of the source", "sentences", "BLEU"], *words, *depth]
    with pytest.raises(UserError, match="has 9 examples, but there are 8 references"):
        score_buckets(sizes, BucketConfig(), worse[1:], REFERENCES[1:])


def test_buckets_of_text_without_blanks_have_bleu_of_its_tokens():
    lines, sizes = ["我们今天去看电影"] * 4, {"words": np.full(4, 8)}
    found = score_buckets(sizes, BucketConfig(), lines, lines, "zh")
    assert found["words"][0]["bleu_tokenized"] == pytest.approx(100) and "tok. BLEU" in format_buckets(found)
    assert score_tags(["<a> x"] * 4, ["<a>"], lines, lines, "zh")[0]["bleu_tokenized"] == pytest.approx(100)
    for tokenizer, told in (("zh", True), ("intl", False)):
        said = format_signatures(compute_scores(lines, lines, tokenizer)).splitlines()[-1]
        assert said.startswith("compare the tokenised BLEU or chrF") is told


def test_chrf_of_a_line_is_that_of_a_corpus_of_it():
    worse = [line.replace("looked at us", "left") for line in REFERENCES]
    expected = [compute_scores([a], [b])["chrf"] for a, b in zip(worse, REFERENCES, strict=True)]
    assert sentence_chrf(worse, REFERENCES).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("lines", [REFERENCES[:-1], []])
def test_another_number_of_lines_is_refused(lines):
    with pytest.raises(UserError, match=f"must have one line per reference, 9, but have {len(lines)}"):
        compute_scores(lines, REFERENCES)


def test_nothing_to_score_is_refused():
    with pytest.raises(UserError, match="no lines to score"):
        compute_scores([], [])


def test_paired_bootstrap_tells_better_worse_and_equal():
    worse = [line.replace("looked at us", "left") for line in REFERENCES]
    better = compare_systems(worse, REFERENCES, REFERENCES, num_samples=200)
    assert better["bleu"].difference > 10 and better["bleu"].p_two_sided < 0.05 and better["chrf"].p_two_sided < 0.05
    assert "bs:200|seed:12345" in better["bleu"].signature
    assert compare_systems(REFERENCES, worse, REFERENCES, num_samples=200)["bleu"].difference == -better["bleu"].difference
    same = compare_systems(worse, worse, REFERENCES, num_samples=200)["chrf"]
    assert (same.p_two_sided, same.p_sacrebleu) == (1, 1)
    with pytest.raises(UserError, match="system translations: must have one line per reference"):
        compare_systems(worse, worse[1:], REFERENCES)


def test_a_bootstrap_of_means_is_that_of_its_definition():
    """Samples whose difference is as far from its mean as the observed one from 0. Sacrebleu takes absolute values first."""
    rng = np.random.default_rng(3)
    for shift in (0.05, 0.4, 2.0):
        baseline, system = rng.normal(size=30), rng.normal(size=30) + shift
        chosen = np.random.default_rng(12345).choice(30, size=(200, 30), replace=True)
        spread = [system[rows].mean() - baseline[rows].mean() for rows in chosen]
        observed = system.mean() - baseline.mean()
        farther = sum(abs(value - np.mean(spread)) >= abs(observed) for value in spread)
        in_sacrebleu = sum(abs(value) - np.mean(np.abs(spread)) > abs(observed) for value in spread)
        found = compare_means(baseline, system, 200, "metric")
        assert (found.baseline, found.difference) == pytest.approx((baseline.mean(), observed))
        value = NormalDist().inv_cdf((farther + 1) / 402) * math.sqrt(29 / 30)  # for 30 sentences, see `two_sided_p`
        assert found.p_two_sided == pytest.approx(2 * stdtr(29, value)) and found.p_sacrebleu == (in_sacrebleu + 1) / 201
        assert found.signature == "metric|bs:200|seed:12345"
    same = compare_means(baseline, baseline, 200, "metric")
    assert (same.p_two_sided, same.p_sacrebleu) == (1, 1)


def test_few_sentences_cannot_give_a_small_p():
    """The p of n sentences is at least 2^(1 - n): so often one of two equally good systems is better on all of them."""
    for count, least in ((1, 1.0), (2, 0.5), (5, 0.0625), (11, 0.0106)):  # 11: 1 / 1001 before Student's t
        references = (3 * REFERENCES)[:count]
        found = compare_systems(["nothing"] * count, references, references)["chrf"]
        assert found.p_two_sided == pytest.approx(least, rel=0.03), count
        means = compare_means(np.zeros(count), np.ones(count), 1000, "metric")
        assert means.p_two_sided == pytest.approx(least, rel=0.03)
    one = [np.array([score, *[score] * 50]) for score in (10.0, 20.0)]
    assert compare_seeds(one[:1], one[1:], 1).weights_p_two_sided == 1


@pytest.mark.parametrize(("sentences", "least", "half"), [(10, 0.05, 0.49), (150, 0.01, 0.47)])
def test_the_two_sided_p_of_equally_good_systems_is_about_uniform(sentences, least, half):
    """Of 2,000 pairs of equally good systems. Sacrebleu's p is one-sided, so it is far from uniform."""
    random, pairs, samples = np.random.default_rng(5), 2000, 1000
    scores = random.gamma(2.0, size=(sentences, pairs)) - random.gamma(2.0, size=(sentences, pairs))
    sampled = sample_counts(sentences, samples) @ scores / sentences
    found = np.array([[two_sided_p(one[1:], one[0], sentences), sacrebleu_p(one[1:], one[0])] for one in sampled.T])
    for share in (least, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9):
        spread = (share * (1 - share) / pairs) ** 0.5
        assert abs((found[:, 0] < share).mean() - share) < 4 * spread
    assert (found[:, 1] < 0.05).mean() > 0.09 and (found[:, 1] > half).mean() < 0.02


def spoil(seed: int, share: float) -> list[str]:
    """The references with words of other places in a share of all places."""
    random = np.random.default_rng(seed)
    words = [line.split() for line in REFERENCES]
    return [" ".join(str(random.choice(line)) if random.random() < share else word for word in line) for line in words]


def sample(lines: list[str], num_samples: int) -> np.ndarray:
    return sample_metric("bleu", sentence_statistics("bleu", lines, REFERENCES), num_samples)


def compare_lines(baselines, systems, num_samples: int) -> SeedComparison:
    groups = ([sample(lines, num_samples) for lines in group] for group in (baselines, systems))
    return compare_seeds(*groups, len(REFERENCES))


@pytest.mark.parametrize("shares", [(0.5, 0.1), (0.3, 0.25), (0.1, 0.4)])
def test_comparing_one_seed_is_the_paired_bootstrap_of_sacrebleu(shares):
    baseline, system = spoil(1, shares[0]), spoil(2, shares[1])
    found = compare_lines([baseline], [system], 300)
    expected = compare_systems(baseline, system, REFERENCES, num_samples=300)["bleu"]
    assert found.over_seeds.difference == pytest.approx(expected.difference)
    assert found.weights_p_two_sided == expected.p_two_sided
    test = PairedTest([("a", baseline), ("b", system)], {"bleu": BLEU(), "chrf": CHRF()}, [REFERENCES], "bs", 300)
    signatures, results = test()
    for key, one in zip(signatures, compare_systems(baseline, system, REFERENCES, num_samples=300).values(), strict=True):
        assert one.p_sacrebleu == results[key][1].p_value and one.signature == signatures[key].format()
        assert (one.baseline, one.system) == pytest.approx([result.score for result in results[key]])
    assert (found.over_seeds.interval, found.over_seeds.p_value) == (None, None) and not found.over_seeds.starred
    assert expected.about == "these two sets of weights on these sentences"


def test_comparing_seeds_takes_the_mean_over_seeds():
    groups = [[spoil(seed, share) for seed in seeds] for share, seeds in ((0.4, (1, 2, 3)), (0.2, (4, 5, 6)))]
    means = [np.mean([compute_scores(lines, REFERENCES)["bleu"] for lines in group]) for group in groups]
    both = compare_lines(*groups, 200)
    found = both.over_seeds
    assert found.difference == pytest.approx(means[1] - means[0]) and found.seeds == 3
    assert found.interval[0] < found.difference < found.interval[1] and found.sentences_error > 0
    back = compare_lines(*groups[::-1], 200)
    assert back.over_seeds.difference == pytest.approx(-found.difference) and back.weights_p_two_sided == both.weights_p_two_sided
    assert back.over_seeds.interval == pytest.approx((-found.interval[1], -found.interval[0]))
    same = compare_lines(groups[0], groups[0][::-1], 50)
    assert (same.over_seeds.difference, same.weights_p_two_sided) == (0, 1)


def test_the_error_over_sentences_is_that_of_samples_which_all_seeds_share():
    groups = [[spoil(seed, share) for seed in seeds] for share, seeds in ((0.4, (1, 2, 3)), (0.2, (4, 5, 6)))]
    found, random = [], np.random.default_rng(0)
    for _ in range(150):
        rows = random.integers(len(REFERENCES), size=len(REFERENCES))
        means = [np.mean([_corpus_bleu([lines[i] for i in rows], [REFERENCES[i] for i in rows]) for lines in g]) for g in groups]
        found.append(means[1] - means[0])
    error = compare_lines(*groups, 1000).over_seeds.sentences_error
    assert error == pytest.approx(np.std(found), rel=0.25)


def test_bleu_of_samples_is_that_of_sacrebleu_on_their_sentences():
    lines = [*spoil(3, 0.3)[:-3], "", "the", "a cat"]
    found = sample(lines, 5)
    rows = np.random.default_rng(12345).choice(len(lines), size=(5, len(lines)), replace=True)
    expected = [_corpus_bleu([lines[i] for i in sample], [REFERENCES[i] for i in sample]) for sample in rows]
    assert found == pytest.approx([_corpus_bleu(lines, REFERENCES), *expected], abs=1e-9)


def test_a_slope_is_that_of_each_seed_over_doublings_of_its_sizes():
    """With numpy's fit for each seed and sample as the oracle."""
    shares = {(0, 1): 0.6, (1, 1): 0.6, (0, 2): 0.4, (1, 2): 0.3, (0, 4): 0.3, (1, 4): 0.15}  # (side, size)
    sides = [
        np.array([[sample(spoil(10 * seed + size, shares[side, size]), 200) for size in (1, 2, 4)] for seed in (1, 2, 3)])
        for side in (0, 1)
    ]
    sizes = np.array([[1000, 2000, 4000], [990, 2010, 4000], [1010, 1990, 4000]])
    found = compare_slopes(*sides, sizes, len(REFERENCES))
    fits = [np.polyfit(np.log2(sizes[seed]), (sides[1] - sides[0])[seed], 1)[0] for seed in range(3)]
    assert found.difference == pytest.approx(np.mean([fit[0] for fit in fits])) and found.seeds == 3
    n = len(REFERENCES)
    assert found.sentences_error == pytest.approx(np.mean(fits, axis=0)[1:].std() * math.sqrt(n / (n - 1)))
    assert found.seeds_error == pytest.approx(np.std([fit[0] for fit in fits], ddof=1) / math.sqrt(3))
    assert found.interval[0] < found.difference < found.interval[1]


def test_a_difference_that_grows_alike_everywhere_has_its_slope_for_certain():
    growing = np.zeros((3, 3, 5)) + 1.5 * np.arange(3)[:, None]  # by 1.5 a doubling, for all seeds and samples
    found = compare_slopes(np.zeros((3, 3, 5)), growing, np.array([[500, 1000, 2000]] * 3), 9)
    assert found.difference == pytest.approx(1.5) and found.seeds_error == pytest.approx(0, abs=1e-9)


def _corpus_bleu(lines: list[str], references: list[str]) -> float:
    return BLEU().corpus_score(lines, [references]).score
