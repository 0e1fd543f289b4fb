"""Word-synchronous beam search with a grammar: against the enumeration of all trees within the limits, and the command."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from commands import run_here
from folder_store import store  # noqa: F401  # a fixture
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from test_causal_lm import make_config
from toydata import LABELS, WORDS, with_given_trees, write_toy_data

from treenet.config import ModelConfig
from treenet.data.batch import collate
from treenet.data.input_kinds import ACTIONS
from treenet.data.splits import read_split
from treenet.evaluation import language_models
from treenet.evaluation.kept_scores import KeptScores, SentenceScore
from treenet.evaluation.language_models import Scored, describe_parses, example_batches, score_batches
from treenet.evaluation.settings import ScoreLMSettings, TreeBeamConfig
from treenet.evaluation.tree_beam import TreeBeam, spans_of
from treenet.jobs.train_run import run_training
from treenet.models import CausalLM, VocabSizes, build_causal_lm
from treenet.runs.loading import load_trained
from treenet.runs.mirror import open_results
from treenet.tasks.base import vocab_sizes
from treenet.tasks.causal_lm import to_causal
from treeproc.common.files import read_json
from treeproc.common.settings import UserError
from treeproc.common.storage import as_path
from treeproc.shards.schema import EOS_ID, PAD_ID
from treeproc.trees.spans import SpanTree, parents_and_subtree_ends, read_brackets

SIZES = VocabSizes(pieces=9, labels=2)
LIMITS = ((1, 1), (2, 1), (2, 2))  # max_depth, max_opens
WORD, CLOSE = "word", "close"


def build(seed: int, scale: float = 1.0, **options) -> CausalLM:
    """A tiny grammar of random weights; a larger `scale` makes its choices sharper."""
    torch.manual_seed(seed)
    sizes = {"d_model": 8, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 2, "name": "transformer_grammar"}
    model = build_causal_lm(ModelConfig(**sizes | options), SIZES).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.encoder.embedding.weight.data *= scale
    return model


def every_tree(words: int, depth: int = 2, opens: int = 2) -> Iterator[list]:
    """All sequences of actions with so many words: labels open nodes, no node is empty, the limits hold."""

    def go_on(done: list, left: int, opened: list[bool], new: int) -> Iterator[list]:
        """`opened` says of each open node whether it has a child."""
        if not left and not opened:
            yield done
        if left:
            yield from go_on([*done, WORD], left - 1, [True] * len(opened), 0)
            if len(opened) < depth and new < opens:
                for label in range(SIZES.labels):
                    yield from go_on([*done, label], left, [*opened, False], new + 1)
        if opened and opened[-1]:
            yield from go_on([*done, CLOSE], left, opened[:-1], new)

    yield from go_on([], words, [], 0)


def as_row(number: int, tree: list, words: Sequence[Sequence[int]]) -> dict:
    """The row of a shard for a tree over words of pieces. As in a data set, a word of several pieces has a node of its own."""
    edges = np.cumsum([0, *map(len, words)])
    nodes, opened, place = [], [], 0
    for action in tree:
        if action == WORD:
            if len(words[place]) > 1:
                nodes.append([0, edges[place], edges[place + 1], len(nodes) + 1])
            place += 1
        elif action == CLOSE:
            nodes[opened.pop()][2:] = [edges[place], len(nodes)]
        else:
            opened.append(len(nodes))
            nodes.append([action, edges[place], -1, -1])
    label, start, end, subtree_end = np.array(nodes, dtype=np.int64).reshape(-1, 4).T
    pieces = np.array([piece for word in words for piece in word], dtype=np.int64)
    index = np.repeat(np.arange(len(words)), [len(word) for word in words])
    return {
        "example_id": number,
        "leaves": {"piece": pieces, "word_index": index},
        "nodes": {"label": label},
        "spans": {"start": start, "end": end, "subtree_end": subtree_end},
        "tgt_pieces": pieces,
    }


@torch.no_grad()
def score_beginnings(model: CausalLM, words: Sequence[Sequence[int]], trees: list[list]) -> dict[tuple[int, ...], float]:
    """log p of every beginning of the trees, as ids of actions, and of the whole trees, which end in EOS; as in the training."""
    batch = to_causal(collate([as_row(n, tree, words) for n, tree in enumerate(trees)], ACTIONS), SIZES)
    log_probs = model.compute_logits(model(batch)[0]).log_softmax(-1).gather(2, batch.tgt_out[..., None])[..., 0]
    found = {(): 0.0}
    for targets, scores in zip(batch.tgt_out.tolist(), log_probs.tolist(), strict=True):
        ids: tuple[int, ...] = ()
        for target, score in zip(targets, scores, strict=True):
            if target != PAD_ID:
                found[*ids, target] = found[ids] + score
                ids = *ids, target
    return found


def log_sum(scores: Iterable[float]) -> float:
    return float(np.logaddexp.reduce([*scores]))


def slow_beam(beginnings: dict, words: Sequence[Sequence[int]], limits: TreeBeamConfig) -> tuple[list[float], dict]:
    """The search, one beginning after the other: the log-sums after each piece and the end, and the trees found."""
    after: dict[tuple, list] = {}
    for ids in sorted(beginnings, key=beginnings.__getitem__, reverse=True):
        after.setdefault(ids[:-1], []).append(ids)
    live, sums = [()], []
    for number, word in enumerate([*words, [EOS_ID]], start=1):
        waiting: list[tuple] = []
        wanted = limits.words if number < len(words) else limits.actions
        while live and len(waiting) < limits.actions:
            ranked = sorted((ids for one in live for ids in after[one] if ids), key=beginnings.__getitem__, reverse=True)
            best, rest = ranked[: limits.actions], ranked[limits.actions :]
            waiting += [ids for ids in best if ids[-1] == word[0]]
            waiting += [ids for ids in rest if ids[-1] == word[0]][: limits.fast_track]
            enough = sorted(beginnings[ids] for ids in waiting)[-wanted] if len(waiting) >= wanted else -np.inf
            live = [ids for ids in best if ids[-1] != word[0] and beginnings[ids] > enough]
        for piece in word[1:]:
            sums.append(log_sum(beginnings[ids] for ids in waiting))
            waiting = [(*ids, piece) for ids in waiting]
        live = sorted(waiting, key=beginnings.__getitem__, reverse=True)
        live = live[:wanted]
        sums.append(log_sum(beginnings[ids] for ids in live))
    return sums, {ids: beginnings[ids] for ids in waiting}


def check(sentence: Sequence[Sequence[int]], model: CausalLM, **sizes: int) -> tuple[SentenceScore, float]:
    """Compare a search with the slow one. Returns its scores, and log p(sentence) by the enumeration."""
    limits = {"max_depth": 2, "max_opens": 1 if len(sentence) > 3 else 2}
    trees = list(every_tree(len(sentence), limits["max_depth"], limits["max_opens"]))
    beginnings = score_beginnings(model, sentence, trees)
    whole = {ids: score for ids, score in beginnings.items() if ids and ids[-1] == EOS_ID}
    assert len(whole) == len(trees)
    every = {"actions": len(beginnings), "words": len(beginnings)}
    settings = TreeBeamConfig(**every | limits | sizes)
    found = TreeBeam(model, SIZES, settings).score(sentence)
    sums, of_beam = slow_beam(beginnings, sentence, settings)
    assert found.trees == len(of_beam)
    assert found.nll == pytest.approx(-np.diff([0.0, *sums]), abs=1e-9)
    best = max(of_beam, key=of_beam.__getitem__)
    assert found.best_nll == pytest.approx(-of_beam[best], abs=1e-9)
    names = {WORD: -1, CLOSE: -2}
    assert found.best in [tuple(names.get(action, action) for action in tree) for tree in trees]
    again = score_beginnings(model, sentence, [[{-1: WORD, -2: CLOSE}.get(action, action) for action in found.best]])
    assert again[best] == pytest.approx(of_beam[best], abs=1e-9)  # it is this tree
    if not sizes:
        assert found.trees == len(trees) and best == max(whole, key=whole.__getitem__)
    return found, log_sum(whole.values())


some_words = st.lists(st.lists(st.integers(4, SIZES.pieces - 1), min_size=1, max_size=3), max_size=4)
models = st.builds(build, st.integers(0, 999), st.sampled_from([0.5, 1.0, 3.0]))


def test_the_enumeration_has_all_trees():
    """One word stands alone, or below one node, or below two: 1 + 2 + 4 trees with two labels."""
    assert [len(list(every_tree(count))) for count in (0, 1)] == [1, 7]
    every = list(map(tuple, every_tree(3)))
    assert len(set(every)) == len(every) == 733
    assert ([0, WORD, CLOSE, 1, WORD, CLOSE] in [*every_tree(2)]) and ([0, CLOSE] not in [*every_tree(0)])


@num_examples(15)
@given(some_words, models)
def test_a_beam_that_holds_all_trees_is_the_enumeration(words, model):
    found, log_p = check(words, model)
    assert math.fsum(found.nll) == pytest.approx(-log_p, abs=1e-9)


@num_examples(25)
@given(some_words, models, st.integers(1, 30), st.integers(1, 10), st.integers(0, 3))
def test_a_small_beam_is_a_lower_bound(words, model, actions, kept, fast_track):
    found, log_p = check(words, model, actions=actions, words=kept, fast_track=fast_track)
    assert -log_p - 1e-9 <= math.fsum(found.nll) <= found.best_nll + 1e-9
    assert (found.nll > -1e-9).all()


@pytest.mark.parametrize("options", [{"norm": "pre"}, {"num_heads": 1, "num_encoder_layers": 3}])
def test_other_layers(options):
    check([[4], [5, 6], [4, 4, 8]], build(1, **options))


def test_more_depth_and_openings_add_trees():
    model, words = build(2), [[4], [5]]
    found = [TreeBeam(model, SIZES, TreeBeamConfig(words=100, max_depth=d, max_opens=o)).score(words) for d, o in LIMITS]
    assert [one.trees for one in found] == [11, 15, 71]
    assert np.all(np.diff([math.fsum(one.nll) for one in found]) < 0)


def test_a_sentence_does_not_depend_on_those_before_it():
    beam = TreeBeam(build(3).float(), SIZES, TreeBeamConfig(actions=20, words=5))
    alone = beam.score([[4], [5, 6]])
    first, *_, last = beam.score_all([[[4], [5, 6]], [], [[7]] * 9, [[4], [5, 6]]])
    for one in (first, last):
        assert (one.nll == alone.nll).all() and one[1:] == alone[1:]


def test_a_killed_search_continues(tmp_path, monkeypatch):
    sentences = [[[4]], [[5], [6, 7]], [[7], [4]]]
    kept = KeptScores(tmp_path, "weights", "settings")
    beam = TreeBeam(build(3), SIZES, TreeBeamConfig(actions=20, words=5), kept)
    score, searched = beam.score, []
    expected = [score(words) for words in sentences]
    monkeypatch.setattr(beam, "score", lambda words: searched.append(words) or score(words))

    def same(found: Iterable[SentenceScore]) -> bool:
        pairs = zip(found, expected, strict=True)
        return all(np.array_equal(one.nll, other.nll) and one[1:] == other[1:] for one, other in pairs)

    killed = beam.score_all(sentences)
    next(killed), next(killed)
    killed.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    searched.clear()
    assert same(beam.score_all(sentences)) and searched == sentences[1:]
    searched.clear()
    assert same(beam.score_all(sentences)) and not searched
    other = TreeBeam(build(3), SIZES, TreeBeamConfig(actions=20, words=5), KeptScores(tmp_path, "other weights", "settings"))
    monkeypatch.setattr(other, "score", beam.score)
    assert same(other.score_all(sentences)) and searched == sentences
    turned = TreeBeam(build(3), SIZES, TreeBeamConfig(actions=20, words=5), KeptScores(tmp_path, "weights", "settings"))
    assert all(np.array_equal(a.nll, b.nll) for a, b in zip(turned.score_all(sentences[::-1]), expected[::-1], strict=True))
    turned._kept.remove()
    kept.remove()
    assert file not in tmp_path.iterdir() and len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("error", [UserError("no memory"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_results_of_a_command_that_ends_early_are_in_the_store(error, tmp_path, store):  # noqa: F811
    """The next command removes what the store lacks. A file of a search leaves the store when the search is complete."""
    run = as_path("s3://bucket/run")
    (run / "config.yaml").write_bytes(b"seed: 1\n")
    with pytest.raises(type(error)), open_results(run) as folder:
        for name in ("translations.test.txt", "probes.json"):
            (folder / name).write_text("{}")
        for _ in KeptScores(folder, "weights").score_all([[[4]], [[5]]], lambda words: SentenceScore(np.zeros(2), 1, 0.5, (-1,))):
            raise error
    assert {"translations.test.txt", "probes.json"} < run.objects().keys()
    with open_results(run) as folder:
        assert (folder / "translations.test.txt").exists()
        kept = KeptScores(folder, "weights")
        again = []
        for _ in kept.score_all([[[4]], [[5]]], lambda words: again.append(words) or SentenceScore(np.zeros(2), 1, 0.5, (-1,))):
            pass
        assert again == [[[5]]]
        kept.remove()
    assert not [name for name in run.objects() if name.startswith("tree_beam")]
    assert {"translations.test.txt", "probes.json"} < run.objects().keys()


def test_scores_that_are_not_finite_give_nan():
    model = build(4)
    model.encoder.embedding.weight.data *= torch.nan
    assert np.isnan(TreeBeam(model, SIZES, TreeBeamConfig()).score([[4], [5]]).nll).all()


def test_spans_of_actions():
    actions = (0, -1, 1, 1, -1, -1, -2, -2, -2, -1)
    assert spans_of(actions, "AB") == [((0, 3), "A"), ((1, 3), "B"), ((1, 3), "B")]


def actions_of(example: dict) -> tuple[int, ...]:
    """The actions of the tree of an example whose words have one piece."""
    starts, ends = (example["spans"][name].tolist() for name in ("start", "end"))
    actions: list[int] = []
    for place in range(len(example["leaves"]["piece"])):
        actions += [label for label, start in zip(example["nodes"]["label"].tolist(), starts, strict=True) if start == place]
        actions += [-1, *[-2] * ends.count(place + 1)]
    return tuple(actions)


def test_parses_are_written_and_scored_by_brackets(tmp_path):
    data = write_toy_data(tmp_path / "data", test=3)
    examples = [*read_split(data, "encoded", "test")]
    sizes = [len(example["leaves"]["piece"]) for example in examples]
    found = [actions_of(examples[0]), (-1,) * sizes[1], (0, *(-1,) * sizes[2], -2)]
    scored = [
        Scored(n, size, size + 1, 1.0, 0.0, SentenceScore(np.ones(1), 5, 2.5, best))
        for n, (size, best) in enumerate(zip(sizes, found, strict=True))
    ]
    rows, scores = describe_parses(scored, examples, data)
    gold = [len(example["nodes"]["label"]) for example in examples]
    assert scores["bracket_recall"] == pytest.approx(gold[0] / sum(gold))
    assert scores["bracket_precision"] == pytest.approx(gold[0] / (gold[0] + 1))
    assert [row.split("\t")[:3] for row in rows] == [["", "5", "2.500000"]] * 3
    trees = [read_brackets(row.split("\t")[3]) for row in rows]
    assert [len(words) for words, _, _ in trees] == sizes and all(word in WORDS for words, _, _ in trees for word in words)
    written = trees[0][2]
    assert written.labels == ["ROOT", *(LABELS[label] for label in examples[0]["nodes"]["label"])]
    assert written.ends == [sizes[0], *examples[0]["spans"]["end"]]
    assert trees[1][2].labels == ["ROOT"] and trees[2][2].labels == ["ROOT", LABELS[0]]


def row_of(parse: str, example: dict) -> dict:
    """The row of a shard for a written parse over the pieces of an example; its root is not one of the grammar's nodes."""
    _, _, tree = read_brackets(parse)
    below = SpanTree(tree.labels[1:], tree.starts[1:], tree.ends[1:])
    first = np.append(np.flatnonzero(np.diff(example["leaves"]["word_index"], prepend=-1)), len(example["leaves"]["piece"]))
    spans = {"start": first[below.starts], "end": first[below.ends], "subtree_end": parents_and_subtree_ends(below)[1]}
    spans = {name: np.array(column, dtype=np.int64) for name, column in spans.items()}
    return example | {"nodes": {"label": np.array([LABELS.index(name) for name in below.labels], dtype=np.int64)}, "spans": spans}


@pytest.mark.slow
def test_the_command_parses_a_split_and_scores_pairs(tmp_path):
    data, run = with_given_trees(write_toy_data(tmp_path / "data", train=40, valid=8, test=6, longest=5)), tmp_path / "run"
    run_training(make_config(data, "model.name=transformer_grammar", "max_steps=30"), run)
    beam = ["trees=beam", "beam.actions=40", "beam.words=8", "beam.max_opens=3"]
    done = run_here("score_lm.py", "--out", run, *beam)
    assert done.returncode == 0, done.stderr
    assert "summed over the trees of a beam: an upper bound" in done.stdout and "labelled F1 (%)" in done.stdout
    entry = read_json(run / "scores.json")["test.beam"]
    assert not [*run.glob("tree_beam*")]
    rows = [line.split("\t") for line in (run / "language_model.test.beam.tsv").read_text().splitlines()]
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    nll, best = (np.array([float(row[name]) for row in table]) for name in ("nll", "best_nll"))
    assert entry["kind"] == "beam" and entry["beam"]["actions"] == 40 and "perplexity_given_tree" not in entry
    assert entry["nll"] * entry["num_targets"] == pytest.approx(nll.sum(), rel=1e-6) and (nll < best).all()
    _, model = load_trained(run)
    index, examples = read_json(data / "encoded" / "index.json"), [*read_split(data, "encoded", "test")]
    parsed = [row_of(row["parse"], example) for row, example in zip(table, examples, strict=True)]
    scored = score_batches(model, example_batches(parsed, ACTIONS, vocab_sizes(index)), index["num_pieces"])
    assert [one.total for one in sorted(scored, key=lambda one: one.example)] == pytest.approx(best, abs=1e-4)
    assert 0 <= entry["bracket_f1"] <= 1
    done = run_here("score_lm.py", "--out", run)  # the other result stays, and is an upper bound too
    assert done.returncode == 0 and {"test", "test.beam"} <= read_json(run / "scores.json").keys(), done.stderr
    results = [run / f"language_model.{name}.tsv" for name in ("test", "test.beam")]
    done = run_here("evaluate.py", "--compare", *results, "--out", tmp_path / "compared")
    assert done.returncode == 0 and "of those of a beam: an upper bound" in done.stderr, done.stderr
    treebank = tmp_path / "six.mrg"
    trees = ["(S (NP (X ba) (X be)) (X bibo))", "(S (X ba) (X be) (X bibobi))", "(S (X ba))"]
    treebank.write_text("".join(f"{tree}\n" for tree in trees for _ in range(2)))
    done = run_here("score_lm.py", "--out", run, f"pairs.files=[{treebank}]", "every=2", *beam)
    assert done.returncode == 0, done.stderr
    entry = read_json(run / "scores.json")["pairs-six.beam.every_2"]
    assert (entry["num_pairs"], entry["num_ties"], entry["kind"]) == (2, 2, "beam")
    rows = (run / "language_model.pairs-six.beam.every_2.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[1] for row in rows] == ["six.mrg:1", "six.mrg:3"]
    for options, message in (
        (["every=2"], "every: leave it out, or give blimp or pairs"),
        (["beam.words=3"], "beam: leave it out, or set trees=beam"),
        ([f"surprisal={treebank}"], "surprisal: needs a run of model.name=causal_transformer"),
    ):
        done = run_here("score_lm.py", "--out", run, *options)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("error") == 1


@pytest.mark.slow
def test_the_command_gives_surprisal_to_grammars_alone(tmp_path):
    text = tmp_path / "text.en"
    text.write_text("".join(f"ba be {word} bo\n" for word in WORDS))
    splits = [f"splits.train.source=[{text}]", f"splits.valid.source=[{text}]"]
    options = ["format=text", "parser.name=words", "subwords.vocab_size=290", "filters.drop_overlap=none", "workers=0"]
    done = run_here("preprocess.py", "--out", tmp_path / "data", *splits, *options)
    assert done.returncode == 0, done.stderr
    for name in ("transformer_grammar", "causal_transformer"):
        run_training(make_config(tmp_path / "data", f"model.name={name}", "max_steps=4"), tmp_path / name)
    story = tmp_path / "story.txt"
    story.write_text("ba  be \u00dc.\n\n  bo ba\u2581be\n")
    done = run_here("score_lm.py", "--out", tmp_path / "causal_transformer", f"surprisal={story}", "trees=beam")
    assert done.returncode == 2 and "trees must be given for" in done.stderr and done.stderr.count("\n") == 1
    run = tmp_path / "transformer_grammar"
    done = run_here("score_lm.py", "--out", run, f"surprisal={story}", "trees=beam", "beam.actions=10", "beam.words=3")
    assert done.returncode == 0 and "first pieces" not in done.stdout, done.stderr
    rows = [line.split("\t") for line in (run / "language_model.surprisal-story.beam.tsv").read_text().splitlines()]
    assert [row[1] for row in rows[1:]] == ["ba", "be", "\u00dc.", "</s>", "bo", "ba", "be", "</s>"]
    entry = read_json(run / "scores.json")["surprisal-story.beam"]
    bits = math.fsum(float(row[2]) for row in rows[1:])
    assert entry["nll"] * entry["num_targets"] == pytest.approx(math.log(2) * bits, rel=1e-6)


@pytest.mark.slow
def test_kept_scores_are_of_the_weights_and_of_the_settings_of_the_beam(tmp_path, monkeypatch):
    data, run = with_given_trees(write_toy_data(tmp_path / "data", train=20, valid=4, test=4, longest=3)), tmp_path / "run"
    made = []
    run_training(make_config(data, "model.name=transformer_grammar", "max_steps=2", "checkpoint_every=1"), run)
    monkeypatch.setattr(language_models, "KeptScores", lambda folder, *of: made.append(of) or KeptScores(folder, *of))
    for checkpoint, words in (("1", 2), ("2", 2), ("2", 3)):
        beam = {"actions": 9, "words": words, "max_opens": 2}
        language_models.score_lm_run(run, ScoreLMSettings(trees="beam", beam=beam, split="valid", checkpoint=checkpoint))
    assert len({*made}) == 3
