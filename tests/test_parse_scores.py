"""Scores of parses: they are those of a slow replay, depend on their sentence alone, drop examples and make buckets."""

import filecmp
import gzip
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import stanza
import torch
from character_models import write_resources
from commands import run_here
from sample_lines import sample_lines

from treenet.data.splits import read_parse_scores, read_references, read_split
from treenet.evaluation.buckets import gather_buckets
from treenet.evaluation.settings import BucketConfig
from treenet.runs.result_entries import read_scores
from treeproc.common.settings import UserError
from treeproc.inspect import describe, draw_line
from treeproc.inspection.shard_verifier import _side_problems
from treeproc.parsers import ParserConfig, build_parser, describe_parser, find_models
from treeproc.parsers.model_files import ModelFiles, no_scores
from treeproc.parsers.parse_scores import ScoredParser
from treeproc.parsers.shift_reduce import Derivation
from treeproc.parsers.stanza_parser import stanza_options
from treeproc.shards.schema import UNSCORED
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages import parse_and_encode
from treeproc.stages.parse_and_encode import ParseShard
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages.shuffle import DonorTrees, ShapeDonors
from treeproc.trees.spans import flat_tree
from treeproc.verify import verify

pytestmark = pytest.mark.slow

PLAIN = ParserConfig(name="shipped", device="cpu")
SCORED = PLAIN.model_copy(update={"scores": True})
LINES = [*sample_lines(40), "No.", "?!?! 12,5 %", "x" * 300]


@pytest.fixture(scope="module")
def parser():
    return build_parser(SCORED)


def tagged(parser, lines: list[str]) -> list[list[tuple[str, str]]]:
    sentences = [[word for token in line[0] for word in token.words] for line in parser._tokenizer.tokenize(lines, 10_000)]
    tags, _ = parser._tagger.tag(sentences, 500)
    return [[(word, xpos) for word, (_, xpos) in zip(*one, strict=True)] for one in zip(sentences, tags, strict=True)]


@torch.no_grad()
def slow_score(model, sentence: list[tuple[str, str]]) -> float:
    """Take one transition after the other on Stanza's own objects."""
    (state,), found = model.initial_state_from_words([sentence]), []
    while not state.finished(model):
        legal = torch.tensor([transition.is_legal(state, model) for transition in model.transitions])
        log_probs = model.forward([state])[0].double().masked_fill(~legal, -torch.inf).log_softmax(0)
        found.append(float(log_probs.max()))
        (state,) = model.bulk_apply([state], [model.transitions[int(log_probs.argmax())]])
    return math.fsum(found) / len(found)


def test_scores_are_those_of_a_slow_replay(parser):
    model = stanza.Pipeline(**stanza_options(PLAIN, find_models(PLAIN))).processors["constituency"].trainer.model
    sentences = tagged(parser, LINES[::3])
    expected = [slow_score(model, sentence) for sentence in sentences]
    assert len({round(one, 3) for one in expected}) > 5
    derivations = parser._parser.derive(sentences, 300, scored=True)
    assert [one.score for one in derivations] == pytest.approx(expected, abs=1e-6)
    exact = parser._scored._in_float64().derive(sentences, 300, scored=True, given=[one.actions for one in derivations])
    assert [one.score for one in exact] == pytest.approx(expected, abs=1e-6)
    assert [one.tree for one in exact] == [one.tree for one in derivations]
    assert [score for _, score in parser._scored.parse(sentences, 300)] == [round(one, 3) + 0.0 for one in expected]


def test_batches_and_neighbours_do_not_matter(parser):
    expected = parser.parse(LINES)
    assert [replace(one, parse_score=UNSCORED) for one in expected] == build_parser(PLAIN).parse(LINES)
    assert parser.parse([*LINES[::-1], *sample_lines(30)])[: len(LINES)] == expected[::-1]
    assert [parser.parse([line])[0] for line in LINES[::12]] == expected[::12]
    assert build_parser(SCORED.model_copy(update={"batch_words": 40})).parse(LINES) == expected


class NoisyParser:
    """Gives chosen scores, with noise as that of a batch in float32; exact ones for given transitions."""

    def __init__(self, scores: np.ndarray, noise: np.ndarray):
        self.scores, self.noise = scores, noise

    def derive(self, sentences, batch_words, *, scored, given=None):
        rows = [int(word) for ((word, _),) in sentences]
        noise = self.noise if given is None else np.zeros_like(self.noise)
        return [Derivation(flat_tree(1), np.array([row]), self.scores[row] + noise[row]) for row in rows]


def test_noise_next_to_an_edge_of_rounding_changes_nothing():
    random = np.random.default_rng(0)
    edges = -random.integers(0, 300, 400) / 1000 - 0.0005
    scores = np.concatenate([edges + random.choice([-1, 1], 400) * 10.0 ** random.uniform(-12, -5, 400), -random.random(400)])
    sentences, found, rounded = [[(str(row), "NN")] for row in range(len(scores))], [], []
    for _ in range(5):
        noisy = NoisyParser(scores, random.uniform(-4e-7, 4e-7, len(scores)))
        one = ScoredParser(noisy)
        one._exact = noisy
        found.append([score for _, score in one.parse(sentences, 100)])
        rounded.append(np.round(scores + noisy.noise, 3).tolist())
    assert found == [(np.round(scores, 3) + 0.0).tolist()] * 5
    assert len(set(map(tuple, rounded))) == 5  # rounding alone is not enough


def test_a_line_has_the_mean_of_its_sentences_by_words(parser):
    split = build_parser(SCORED.model_copy(update={"split_sentences": True, "max_words": 12, "tags": ["<x>"]}))
    long = "I saw it in a town with my friends and their dogs in the rain."
    one, two, both, partly, tag = split.parse([first := "It is good.", second := "Is it?", f"{first} {second}", f"{first} {long}",
                                               f"<x> {first}"])  # fmt: skip
    assert both.parse_score == round((4 * one.parse_score + 3 * two.parse_score) / 7, 3) and len(both.trees) == 2
    assert partly.parse_status == "partly_flat_too_long" and partly.parse_score == UNSCORED
    assert tag.parse_score == one.parse_score > UNSCORED
    failing = SimpleNamespace(parse=lambda sentences, batch: [(None, UNSCORED)] * len(sentences))
    parser, kept = parser, parser._scored
    parser._scored = failing
    assert [(row.parse_status, row.parse_score) for row in parser.parse(["A cat."])] == [("flat_parser_failed", UNSCORED)]
    parser._scored = kept


def test_models_without_scores_are_refused(tmp_path, monkeypatch):
    write_resources(tmp_path, size=12, tagger_hidden=130, parser_hidden=132, noise=0.1)
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(tmp_path))
    config = ParserConfig(device="cpu", scores=True)
    for command in (describe_parser, build_parser):
        with pytest.raises(UserError, match="parser.scores: the models in .* give no scores of parses; set parser.name=shipped"):
            command(config)
    # The shipped models of German have no constituency parser, and `models` counts whatever the name is.
    shutil.copytree(tmp_path / "en", tmp_path / "de")
    with pytest.raises(UserError, match="give no scores of parses; leave parser.scores out$"):
        describe_parser(ParserConfig(device="cpu", scores=True, language="de"))
    trained = config.model_copy(update={"models": tmp_path})
    assert str(no_scores(trained, ModelFiles("trained", tmp_path, {}))).endswith("scores of parses; leave parser.scores out")


def test_the_settings_leave_no_trace_if_unset():
    assert SCORED.facts() == PLAIN.facts() and "scores" not in PreprocessConfig().model_dump()["parser"]
    tree = PreprocessConfig(tree={"min_parse_score": -0.1}).tree
    assert tree.facts() == PreprocessConfig().tree.facts() and "min_parse_score" not in PreprocessConfig().model_dump()["tree"]
    with pytest.raises(UserError, match="min_parse_score_in: needs min_parse_score"):
        PreprocessConfig(tree={"min_parse_score_in": "all"})


SETTINGS = {"name": "shipped", "device": "cpu", "max_words": 11, "scores": True}


def settings(folder, **more) -> PreprocessConfig:
    splits = {split: {"source": [folder / f"{split}.en"], "target": [folder / f"{split}.de"]} for split in ("train", "test")}
    small = {"subwords": {"vocab_size": 400}, "rows_per_shard": 20, "workers": 0}
    return PreprocessConfig(**{"splits": splits, "parser": SETTINGS, **small, **more})


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    lines = sample_lines(70)
    for split, own in (("train", lines[:50]), ("test", lines[50:])):
        (folder / f"{split}.en").write_text("".join(f"{line}\n" for line in own))
        (folder / f"{split}.de").write_text("".join(f"{line.upper()}\n" for line in own))
    return folder


@pytest.fixture(scope="module")
def data(text):
    """A finished data set with scores, of which nothing is dropped."""
    preprocess(settings(text), text / "data")
    return text / "data"


def scores_of(data, split: str) -> dict[int, float]:
    rows = (row for shard in SplitShards(data / "parsed", split) for row in shard.rows())
    return {row["example_id"]: row["parse_score"] for row in rows}


def shards_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_shards_have_the_scores_of_the_parser(data, text):
    rows = [row for shard in SplitShards(data / "parsed", "train") for row in shard.rows()]
    lines = (text / "train.en").read_text().splitlines()
    parsed = build_parser(SCORED.model_copy(update={"max_words": 11})).parse(lines)
    assert [row["parse_score"] for row in rows] == [one.parse_score for one in parsed]
    assert any(row["parse_score"] == UNSCORED for row in rows) and sum(row["parse_score"] > UNSCORED for row in rows) > 30
    index = read_index(data / "parsed")
    assert index["columns"] == ["example_id", "words", "trees", "parse_status", "parse_score"]
    assert "parse_score" not in read_index(data / "encoded")["columns"] and not verify(data).problems


def test_verify_compares_scores_and_parse_status(data):
    rows = [row for shard in SplitShards(data / "parsed", "train") for row in shard.rows()]
    parsed, flat = (next(row for row in rows if (row["parse_status"] == "parsed") is which) for which in (True, False))
    assert not [*_side_problems(parsed, None), *_side_problems(flat, None)]
    differ = "parse_score and parse_status differ on whether the line has a parse"
    for row, score, problem in ((parsed, UNSCORED, differ), (flat, -0.1, differ), (parsed, 0.001, "parse_score is above 0")):
        assert [*_side_problems({**row, "parse_score": score}, None)] == [problem]


def test_the_same_trees_without_scores(data, text):
    preprocess(settings(text, parser={**SETTINGS, "scores": False}), text / "plain")
    assert "parse_score" not in read_index(text / "plain" / "parsed")["columns"]
    ours, theirs = (read_index(one / "encoded") for one in (text / "plain", data))
    same = ("tree_fingerprint", "parser", "parser_settings", "tree_settings", "num_pieces")
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    for stage in ("text", "encoded"):
        names = [path.name for path in (data / stage).glob("*.arrow")]
        assert len(names) >= 4 and all(filecmp.cmp(text / "plain" / stage / one, data / stage / one, False) for one in names)
    with pytest.raises(UserError, match=r"parser.scores: None -> True.*choose another --out"):
        preprocess(settings(text), text / "plain")
    least = {"min_parse_score": -0.05}
    for more, do in (
        ({"splits": {}, "parsed": text / "plain", "tree": least}, "give a data set with scores as parsed=DATA"),
        ({"parser": {**SETTINGS, "scores": False}, "tree": least}, "set parser.scores=true"),
    ):
        config = PreprocessConfig(parsed=more["parsed"], tree=least, workers=0) if "parsed" in more else settings(text, **more)
        with pytest.raises(UserError, match=f"tree.min_parse_score: the parsed shards have no scores; {do}, or set"):
            preprocess(config, text / "refused")


@pytest.mark.parametrize("where", ["train", "all"])
def test_examples_below_the_least_score_are_dropped(data, text, where, monkeypatch):
    monkeypatch.setattr(ParseShard, "__init__", None)  # nothing is parsed again
    tree, out = {"min_parse_score": -0.02, "min_parse_score_in": where}, text / f"dropped_{where}"
    config = PreprocessConfig(parsed=data, tree=tree, subwords={"vocab_size": 400}, workers=0)
    index = preprocess(config, out)
    for split in ("train", "test"):
        scores = scores_of(data, split)
        kept = [number for number, score in scores.items() if score >= -0.02 or (split == "test" and where == "train")]
        low = len(scores) - len(kept)
        assert [row["example_id"] for row in read_split(out, "encoded", split)] == kept
        assert index["dropped"][split] == ({"parse_score": low} if where == "all" or split == "train" else {})
        assert index["totals"][split]["rows"] == len(kept)
        # The stages are joined by the number of the example.
        assert [row["example_id"] for row in read_split(out, "text", split)] == kept
        assert read_parse_scores(out, split).tolist() == [scores[number] for number in kept]
        lines = (text / f"{split}.de").read_text().splitlines()
        assert read_references(out, split) == [lines[number] for number in kept]
        old = {row["example_id"]: row for row in read_split(data, "encoded", split)}
        for row in read_split(out, "encoded", split):
            assert str(row) == str(old[row["example_id"]])
        listed = [line.split("\t") for line in (out / "encoded" / "dropped.tsv").read_text().splitlines()]
        gone = sorted(scores.keys() - kept)
        assert [row[1:] for row in listed if row[0] == split] == [[str(number + 1), "parse_score"] for number in gone]
        for number in gone[:2]:
            why = f"{split} has no line {number + 1}: the job dropped it, parse_score in {out}/encoded/dropped.tsv"
            with pytest.raises(UserError, match=why):
                draw_line(out, split, number + 1)
    assert 0 < index["dropped"]["train"]["parse_score"] < 45 and not verify(out).problems
    whole = read_index(data / "encoded")
    same, other = ("tree_fingerprint", "vocab_fingerprint", "parsed_fingerprint"), ("text_fingerprint", "fingerprint")
    assert [index[name] for name in same] == [whole[name] for name in same]
    assert all(index[name] != whole[name] for name in other)  # no study takes them for the same examples
    assert "parse_score" in describe(out)[0].partition("dropped: ")[2].split("\n")[0]

    # A job that was stopped goes on, with the same bytes.
    before = shards_of(out / "encoded")
    for name in ("index.json", "train-00001-of-00003.json", "train-00002-of-00003.arrow"):
        (out / "encoded" / name).unlink()
    dropped = (out / "encoded" / "dropped.tsv").read_bytes()
    (out / "encoded" / "dropped.tsv").write_text("cut")
    preprocess(config, out)
    assert shards_of(out / "encoded") == before and (out / "encoded" / "dropped.tsv").read_bytes() == dropped
    (out / "encoded" / "dropped.tsv").unlink()
    assert verify(out).problems
    preprocess(config, out)
    assert not verify(out).problems

    # A shard that lost an example in another way is told.
    (shard, *_) = SplitShards(data / "encoded", "test")
    shutil.copy(data / "encoded" / shard.record.name, out / "encoded" / shard.record.name)
    assert bool(verify(out).problems) == (where == "all")


def test_the_least_score_may_change_until_the_encoded_stage_is_finished(data, text):
    out = text / "changed"
    shutil.copytree(data, out)
    (out / "encoded" / "index.json").unlink()
    before = shards_of(out / "parsed")
    index = preprocess(settings(text, tree={"min_parse_score": -0.03}), out)
    assert index["dropped"]["train"]["parse_score"] > 0 and shards_of(out / "parsed") == before
    with pytest.raises(UserError, match=r"tree.min_parse_score: -0.03 -> -0.06"):
        preprocess(settings(text, tree={"min_parse_score": -0.06}), out)
    shutil.rmtree(out)
    with pytest.raises(UserError, match="tree.min_parse_score: drops all examples of train; set a lower number"):
        preprocess(settings(text, parser={**SETTINGS, "max_words": 1}, tree={"min_parse_score": -1}), out)


@pytest.mark.parametrize("source", ["random", "shuffled", "other_shape"])
def test_control_trees_have_the_same_examples(data, text, source, monkeypatch):
    monkeypatch.setattr(parse_and_encode, "donor_windows", lambda parsed, *_: [(n, n + 1) for n in range(len(parsed))])
    out, tree = text / source, {"min_parse_score": -0.01, "tree_source": source}
    preprocess(PreprocessConfig(parsed=data, tree=tree, subwords={"vocab_size": 400}, workers=0), out)
    kept = [number for number, score in scores_of(data, "train").items() if score >= -0.01]
    assert [row["example_id"] for row in read_split(out, "encoded", "train")] == kept and not verify(out).problems
    for row in read_split(out, "encoded", "train"):
        assert row["spans"]["end"][0] == len(row["leaves"]["piece"])
    if source != "random":  # counts are of the examples that stay
        cls, name = {"shuffled": (DonorTrees, "partner"), "other_shape": (ShapeDonors, "surplus")}[source]
        donors = cls(data / "parsed", "words", "trees", 1)
        told = np.concatenate([donors.of_shard(place, (place, place + 1))[1] for place in range(3)])  # the shards of train
        total = read_index(out / "encoded")["totals"]["train"]
        (count,) = (number for key, number in total.items() if key.startswith("lines_with") and key.endswith(name))
        assert count == told[kept].sum() < told.sum()


def test_both_texts_of_a_pair_are_dropped_and_classes_are_counted(tmp_path):
    lines = sample_lines(40)
    rows = [f'{"ab"[number % 2]},"{one}","{two}"' for number, (one, two) in enumerate(zip(lines[::2], lines[1::2], strict=True))]
    (tmp_path / "train.csv").write_text("\n".join(["label,text,other", *rows, ""]))
    labelled = {"second_text": "other", "text": "text", "label": "label"}
    config = PreprocessConfig(
        splits={"train": {"source": [tmp_path / "train.csv"]}}, format="labelled", labelled=labelled, workers=0,
        parser={**SETTINGS, "max_words": 40}, tree={"min_parse_score": -0.03}, subwords={"vocab_size": 400},
    )  # fmt: skip
    index = preprocess(config, tmp_path / "data")
    scores = scores_of(tmp_path / "data", "train")
    kept = [number for number in scores if min(scores[number], scores[number ^ 1]) >= -0.03]
    low = [number for number in scores if scores[number] < -0.03]
    assert 0 < len(kept) < 40 - len(low) and index["dropped"]["train"] == {"parse_score": 40 - len(kept)}
    assert [row["example_id"] for row in read_split(tmp_path / "data", "encoded", "train")] == kept
    counts = [sum(number // 2 % 2 == which for number in kept) // 2 for which in (0, 1)]
    assert all(f"{name} {count:,}" in describe(tmp_path / "data")[0] for name, count in zip("ab", counts, strict=True))


def test_inspect_shows_scores(data, text):
    scores = scores_of(data, "test")
    found = [score for score in scores.values() if score > UNSCORED]
    shown = describe(data)[0].partition("\ntest: ")[2]
    assert f"  parse_score: mean {np.mean(found):.3f}, quantiles {np.quantile(found, 0.05):.3f} (5%), " in shown
    assert f"95%), without a score {len(scores) - len(found)}\n" in shown
    for number in (min(scores, key=scores.get), max(scores, key=scores.get)):
        line = draw_line(data, "test", number + 1).split("\n")[-1]
        assert line == f"parse_score: {scores[number] if scores[number] > UNSCORED else 'none'}"


def test_evaluate_has_buckets_by_score(data, text):
    hypotheses, out = text / "other.txt.gz", text / "scored"
    hypotheses.write_bytes(gzip.compress((text / "test.de").read_bytes().replace(b" A ", b" THE ")))
    command = ["evaluate.py", "--out", out, f"hypotheses={hypotheses}", f"data={data}", "buckets.parse_score=[-0.04,-0.02,-0.01]"]
    done = run_here(*command)
    assert done.returncode == 0 and "score of the source's parse" in done.stdout and "up to -0.04" in done.stdout, done.stderr
    assert run_here(*command).returncode == 0  # which reads what the first one wrote
    (entry,) = read_scores(out).values()
    scores = np.array(list(scores_of(data, "test").values()))
    edges = [(None, -0.04), (-0.039, -0.02), (-0.019, -0.01), (-0.009, None)]
    counts = [
        int(np.sum((scores >= (-np.inf if a is None else a - 1e-9)) & (scores <= (0 if b is None else b + 1e-9))))
        for a, b in edges
    ]
    found = entry["buckets"]["parse_score"]
    expected = [(a, b, count) for (a, b), count in zip(edges, counts, strict=True) if count]
    assert [(one["from"], one["to"], one["num_examples"]) for one in found] == expected and sum(counts) == len(scores)
    names = [bucket.name for bucket in gather_buckets([found])]
    assert names == [{-0.04: "up to -0.04", None: "-0.009 and more"}.get(b, f"{a} to {b}") for a, b, _ in expected]
    assert run_here(*command[:-1], "buckets.parse_score=[-0.1,0]").returncode == 2
    assert "parse_score" not in BucketConfig().model_dump()
