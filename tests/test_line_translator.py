"""The translator of lines on runs of random weights: its words about itself, what it explains, and what it refuses."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import example_of, tiny_model
from search_runs import NUM_PIECES, write_run, write_vocabulary
from strategies import Tree

from treenet.config import DecodingConfig
from treenet.data.batch import collate
from treenet.runs.loading import load_run
from treenet.translation.hypotheses import Hypothesis, check_num_best
from treenet.translation.line_constraints import LineConstraints, check_method, constraint_columns
from treenet.translation.line_translator import LineTranslator, gather, with_unmet
from treenet.translation.reranking import choose_by_risk, order_by_coverage
from treenet.translation.search import search_batch
from treenet.translation.settings import TranslateSettings
from treenet.translation.translate import (
    can_compile,
    change_decoding,
    decoding_of,
    detokenize,
    load_ensemble,
    score_examples,
    score_targets,
    translate_examples,
    translate_rows,
    warn_of_width,
)
from treeproc.common.settings import UserError
from treeproc.online.line_encoder import Constraints
from treeproc.online.raw_lines import EncodedLine, RawLine, RawLineEncoder

LINES = [RawLine(b"ba be bi"), RawLine(b"do ku"), RawLine(b"gi")]
BAD = RawLine(b"\x01")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", write_vocabulary(tmp_path_factory.mktemp("data")))


def translator(run: Path, **settings) -> LineTranslator:
    return LineTranslator(TranslateSettings(**settings), [run])


def test_a_translator_tells_its_settings_and_what_the_score_is(run):
    values = "beam_size=3 length_penalty={} length_penalty_form={} max_length_factor=1.5 max_length_offset=10 min_length=0"
    gnmt = {"length_penalty_form": "gnmt", "length_penalty": 0.6, "max_tokens": 50}
    assert translator(run).describe() == (
        f"tree_transformer averaged: {values.format(1.0, 'length')}; score = log-probability / length^a"
    )
    assert translator(run, decoding=gnmt).describe() == (
        f"tree_transformer averaged: {values.format(0.6, 'gnmt')}; score = log-probability / ((5 + length) / 6)^a"
    )
    for decoding, score in (
        ({"method": "mbr"}, "mean chrF against the samples"),
        ({"coverage_penalty": 0.2}, "log-probability / length^a + coverage penalty"),
        ({"method": "sampling"}, "log-probability / length^a"),
    ):
        assert translator(run, decoding=decoding).describe().endswith(f"; score = {score}")
        given = translator(run, decoding=decoding, score="given.txt").describe()
        assert given.endswith("; score = log-probability / length^a"), "given translations are not searched"


def test_an_explanation_shows_the_beam_or_as_many_as_there_are(run):
    def shown(**settings) -> int:
        lines = translator(run, **settings).explain(LINES[:1], 4).text.splitlines()
        ranked = [line.split("\t") for line in lines if "\t" in line]
        assert [rank for rank, *_ in ranked] == [str(rank) for rank in range(1, len(ranked) + 1)]
        assert any(line.startswith(("├─ ", "└─ ")) for line in lines), "the tree that the model reads"
        return len(ranked)

    sampling = {"method": "sampling", "min_length": 1}  # empty ones are left out
    long = {"min_length": 1}
    assert (shown(decoding=long), shown(decoding=long, nbest=2), shown(decoding=long, nbest=1)) == (3, 2, 1)
    assert (shown(decoding=sampling), shown(decoding=sampling, nbest=5)) == (3, 5)
    assert shown(decoding=sampling | {"method": "mbr", "mbr_samples": 2}) <= 2
    [(number, _)] = translator(run).explain([BAD], 4).problems
    assert number == 5 and translator(run).explain([RawLine(b""), BAD], 4).text == ""


def test_lines_without_rows_and_given_ones_have_their_places(run, tmp_path):
    found = translator(run, scores=True)([BAD, RawLine(b""), LINES[2]], 7)
    assert found.num_lines == 3 and found.text.startswith("\t\n\t\n") and found.text.count("\n") == 3
    assert [number for number, _ in found.problems] == [8] and found.notes == []
    assert translator(run, nbest=2)([BAD], 7).text == "8\t\n"
    assert translator(run)([BAD], 7).text == "\n"
    score, text = found.text.splitlines()[2].split("\t")
    assert float(score) < 0 and len(score.partition(".")[2]) == 6
    again = translator(run, score=tmp_path / "given.txt")
    assert again([BAD], 0).text == "\t\n"


def test_line_with_an_unmet_constraint_alone_has_that_problem():
    row, hypothesis = {"leaves": 1}, Hypothesis((5,), -1.0, -1.0)
    with_row, without = EncodedLine("a", row=row), EncodedLine("a", problem="bad")
    assert with_unmet(with_row, [hypothesis], DecodingConfig()) is with_row
    assert with_unmet(without, [], DecodingConfig()) is without
    assert with_unmet(with_row, [], DecodingConfig()).problem.startswith("no translation within the limits of length")


def test_compiled_steps_need_plain_beam_search_over_a_static_cache(run, tmp_path):
    plain, recurrent = tiny_model("transformer"), tiny_model("bilstm")
    assert can_compile(plain, DecodingConfig()) is True
    for model, decoding in (
        (recurrent, DecodingConfig()),
        (plain, DecodingConfig(method="sampling")),
        (plain, DecodingConfig(beam_size=4, diversity_groups=2)),
    ):
        assert not can_compile(model, decoding)
    with pytest.raises(UserError, match="compile=true needs plain beam search"):
        translator(run, compile=True, decoding={"method": "sampling"})
    with pytest.raises(UserError, match="compile=true needs plain beam search"):
        translator(run, compile=True, score="given.txt")
    runs = [run, shutil.copytree(run, tmp_path / "copy")]
    with pytest.raises(UserError, match="coverage_penalty needs one model"):
        LineTranslator(TranslateSettings(decoding={"coverage_penalty": 0.2}), runs)
    LineTranslator(TranslateSettings(decoding={"coverage_penalty": 0.2}, score="given.txt"), runs)
    with pytest.raises(UserError, match=r"^must_appear needs decoding.method = beam"):
        translator(run, must_appear="phrases", decoding={"method": "sampling"})
    with pytest.raises(UserError, match=r"^nbest must be from 1 to beam_size = 3, but is 4$"):
        translator(run, nbest=4)


@pytest.mark.parametrize(
    ("decoding", "num_best", "limit"),
    [
        ({"beam_size": 3}, 0, "from 1 to beam_size = 3"),
        ({"beam_size": 3}, 1, None),
        ({"beam_size": 3}, 3, None),
        ({"beam_size": 3}, 4, "from 1 to beam_size = 3"),
        ({"method": "mbr", "mbr_samples": 8}, 8, None),
        ({"method": "mbr", "mbr_samples": 8}, 9, "from 1 to mbr_samples = 8"),
        ({"method": "sampling"}, 1000, None),
        ({"method": "sampling"}, 0, "at least 1"),
    ],
)
def test_a_search_gives_at_most_what_it_finds(decoding, num_best, limit):
    config = DecodingConfig(**decoding)
    if limit is None:
        check_num_best(num_best, config)
    else:
        with pytest.raises(UserError, match=f"^the number of best translations must be {limit}, but is {num_best}$"):
            check_num_best(num_best, config)


def test_very_wide_beams_are_told_with_their_cost(run, capsys):
    for width, method in ((99, "beam"), (100, "sampling"), (100, "mbr")):
        warn_of_width(DecodingConfig(beam_size=width, method=method), 32_000)
    assert capsys.readouterr().err == ""
    for width, pieces, words in (
        (100, 2**20, "100 searches 20 times as many hypotheses as the usual 5, and takes at least 400 MiB"),
        (1000, 32_000, "1,000 searches 200 times as many hypotheses as the usual 5, and takes at least 123 MiB"),
    ):
        warn_of_width(DecodingConfig(beam_size=width), pieces)
        assert f"note: decoding.beam_size = {words} for each line of a batch" in capsys.readouterr().err
    translator(run, decoding={"beam_size": 100}, score="given.txt")
    assert "beam_size = 100" not in capsys.readouterr().err
    translator(run, decoding={"beam_size": 100})
    assert "beam_size = 100" in capsys.readouterr().err


def test_settings_that_were_set_change_those_of_the_run(run):
    loaded = load_run(run)
    assert decoding_of(DecodingConfig(), loaded).beam_size == 3
    changed = decoding_of(DecodingConfig(beam_size=5, length_penalty=0.5), loaded)
    assert (changed.beam_size, changed.length_penalty, changed.max_length_offset) == (5, 0.5, 10)
    with pytest.raises(UserError, match="^decoding: top_k needs method = sampling or mbr"):
        change_decoding(DecodingConfig(), DecodingConfig(top_k=3))


def test_models_of_one_ensemble_read_the_same(tmp_path):
    data = write_vocabulary(tmp_path / "data")
    runs = [write_run(tmp_path / name, data, name=name) for name in ("transformer", "tree_transformer", "tree2seq")]
    with pytest.raises(UserError, match="cannot form an ensemble; choose models that read the same, and plain ones"):
        load_ensemble(runs, ["averaged"])
    pair = load_ensemble([runs[0], runs[2]], ["averaged"])
    alike = [runs[0], write_run(tmp_path / "other", data, name="transformer")]
    assert pair.model.reads is load_run(runs[2]).model.reads and pair.checkpoint == "transformer/averaged + tree2seq/averaged"
    assert not pair.model.has_static_cache and load_ensemble(alike, ["averaged"]).model.has_static_cache


def test_models_that_read_arcs_refuse_bracketed_trees(tmp_path):
    data = write_vocabulary(tmp_path / "data", parser="given", dependencies=True)
    own = write_run(tmp_path / "run", data, name="child_sum_tree2seq")
    with pytest.raises(UserError, match="the model reads arcs of words, but bracketed trees have none"):
        translator(own, trees="trees.mrg")


def test_the_text_of_pieces_is_one_line(run):
    processor = load_run(run).processor
    pieces = processor.encode("ba be")
    newline = processor.piece_to_id("<0x0A>")
    assert detokenize(processor, Hypothesis(tuple(pieces), 0.0, 0.0)) == "ba be"
    assert detokenize(processor, Hypothesis((*pieces, newline, *pieces), 0.0, 0.0)).split(" ") == ["ba", "be", "", "ba", "be"]
    assert detokenize(processor, Hypothesis((), 0.0, 0.0)) == "" and processor.vocab_size() == NUM_PIECES


def examples() -> list[dict]:
    trees = Tree(5, [(0, 5, 3), (0, 2, 2), (3, 5, 3)]), Tree(1, [(0, 1, 1)]), Tree(3, [(0, 3, 2), (1, 3, 2)])
    return [example_of(tree, number) for number, tree in enumerate(trees)]


def empty_example(number: int) -> dict:
    empty = np.zeros(0, dtype=np.int64)
    spans = {name: empty for name in ("start", "end", "subtree_end")}
    return {**examples()[0], "example_id": number, "leaves": {"piece": empty}, "nodes": {"label": empty}, "spans": spans}


def test_examples_are_searched_and_scored_in_evaluation_mode_in_their_order(run):
    model, rows = tiny_model("transformer", dropout=0.5).train(), [*examples(), empty_example(3)]
    config = DecodingConfig(beam_size=2, max_length_factor=1e-9, max_length_offset=4)
    found = list(translate_examples(model, rows, config, num_best=2))
    assert not model.training and [len(own) for own in found] == [2, 2, 2, 1]
    assert [own[:1] for own in found[:3]] == list(translate_examples(model, rows[:3], config)), "one is the default"
    assert found[3][0].ids == () and math.isnan(found[3][0].score) and math.isnan(found[3][0].log_prob)
    model.train()
    given = [{**row, "tgt_pieces": np.array(own[0].ids)} for row, own in zip(rows, found, strict=True)]
    scored = list(score_examples(model, given, config))
    assert not model.training
    for one, (best, *_) in zip(scored[:3], found, strict=False):
        assert (one.ids, one.score) == (best.ids, pytest.approx(best.score, abs=1e-5))
    assert scored[3].ids == () and math.isnan(scored[3].score) and scored[3].token_log_probs == ()
    modes: list[bool] = []
    model.encoder.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    batch = collate(given[:3])
    score_targets(model, batch, config)
    search_batch(model, batch, config)
    assert modes == [True, True] and not torch.is_inference_mode_enabled()
    with pytest.raises(ValueError, match="minimum Bayes risk needs the processor"):
        list(translate_examples(model, rows, DecodingConfig(method="mbr", mbr_samples=2)))
    with pytest.raises(ValueError, match="forbidden strings need the texts of the pieces"):
        list(translate_examples(model, [{**rows[0], "must_not_appear": ["a"]}], config))
    with pytest.raises(UserError, match="must be from 1 to beam_size = 2, but is 3"):
        list(translate_examples(model, rows, config, num_best=3))
    loaded = load_run(run)
    assert translate_rows(loaded, [], DecodingConfig(), 1) == []


def test_risk_is_that_of_the_samples_that_sampling_draws(run):
    loaded, config = load_run(run), {"temperature": 0.7, "max_length_offset": 4}
    rows = [line.row for line in RawLineEncoder(loaded.data, given_trees=False, max_pieces=50).encode(LINES, 0)]
    drawn = translate_rows(loaded, rows, DecodingConfig(method="sampling", **config), 8)
    found = translate_rows(loaded, rows, DecodingConfig(method="mbr", mbr_samples=8, **config), 3)
    for samples, chosen in zip(drawn, found, strict=True):
        assert chosen == choose_by_risk(samples, [detokenize(loaded.processor, one) for one in samples], 3)
    assert len({one.ids for own in drawn for one in own}) > 8


def test_a_result_too_many_or_too_few_is_an_error():
    line, sample = EncodedLine("a"), Hypothesis((5,), -1.0, -1.0)
    for wrong in (
        lambda: gather([(1, line)], ["a", "b"], lambda *one: "", {}),
        lambda: gather([(1, line)], [], lambda *one: "", {}),
        lambda: choose_by_risk([sample, sample], ["a"], 1),
        lambda: order_by_coverage(None, examples()[:2], [[sample]], DecodingConfig(), 1, "cpu"),
    ):
        with pytest.raises((ValueError, IndexError)):
            wrong()


def test_constraints_have_the_form_of_lines_of_files():
    assert constraint_columns(None, None, None) == {}
    assert constraint_columns(["a", ""], None, None) == {"prefix": ["a", ""]}
    assert constraint_columns(None, [["a b", "c"], []], [[], ["d"]]) == {
        "must_appear": ["a b\tc", ""], "must_not_appear": ["", "d"],
    }  # fmt: skip
    for wrong, message in (
        ([["a\tb"]], "must_appear: a phrase must not have tabs"),
        (["ab"], r"must_appear\[0\]"),
        ([[], [3]], r"must_appear\[1\]: a phrase"),
        ("ab", "must_appear"),
    ):
        with pytest.raises(UserError, match=message):
            constraint_columns(None, wrong, None)
    decomposed = "Ma\u0308nner"  # which a model of NFC never writes
    found = Constraints.read(must_not_appear=f" {decomposed}\tx\tM\u00e4nner").must_not_appear
    assert found == (f" {decomposed}", "x", "M\u00e4nner", " M\u00e4nner")
    line = LineConstraints.of(
        {"prefix": np.array([4]), "must_appear": [np.array([5]), [6, 7], [5]], "must_not_appear": ["a", "a"]}
    )
    assert line == LineConstraints((4,), ((5,), (6, 7)), ("a",)) and LineConstraints.of({}) == LineConstraints()
    assert [bool(one) for one in (LineConstraints(), LineConstraints((4,)), LineConstraints(required=((4,),)),
                                  LineConstraints(forbidden=("a",)))] == [False, True, True, True]  # fmt: skip
    check_method(DecodingConfig())
    check_method(DecodingConfig(beam_size=4, diversity_groups=1))
    for values in ({"beam_size": 4, "diversity_groups": 2}, {"method": "sampling"}, {"method": "mbr"}):
        with pytest.raises(UserError, match="^must_appear needs"):
            check_method(DecodingConfig(**values))
