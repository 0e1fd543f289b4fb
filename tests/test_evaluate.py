"""Translating and scoring a run on toy data, from the package and from the command line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import main_of, run_here
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from toydata import write_toy_data

from treenet.config import DecodingConfig, ModelConfig, TrainConfig
from treenet.data import splits
from treenet.data.batch import collate
from treenet.data.splits import read_references, read_split
from treenet.evaluation import evaluate as evaluation
from treenet.evaluation.evaluate import evaluate_run, random_spans, translate_split, with_random_tree
from treenet.evaluation.settings import EvaluateSettings
from treenet.extras.learned_metrics import bertscore
from treenet.jobs.train_run import run_training
from treenet.models import VocabSizes, build_model
from treenet.runs.loading import load_run
from treenet.runs.metrics_log import read_metrics
from treenet.runs.result_entries import name_result, read_scores
from treenet.runs.result_provenance import PARSE, RunState
from treenet.runs.run_folder import name_in_results
from treenet.runs.run_results import read_nll, read_system
from treenet.structure import TreeStructure
from treenet.translation.hypotheses import Hypothesis
from treenet.translation.translate import detokenize, translate_examples
from treeproc.common.settings import UserError, load_settings
from treeproc.shards.schema import EOS_ID
from treeproc.shards.store import content_fingerprint, read_index
from treeproc.trees.flat_trees import FlatTrees

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MODEL = ModelConfig(d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two updates beside its data set; tests copy it when they write."""
    folder = tmp_path_factory.mktemp("run")
    data = write_toy_data(folder / "data", train=20, valid=6, test=9)
    config = TrainConfig(
        data=data, model=MODEL, decoding=DecodingConfig(beam_size=3), workers=0, max_steps=2, checkpoint_every=1, validate_every=2
    )
    run_training(config, folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def data_of(run: Path) -> Path:
    return load_run(run).config.data


def test_evaluation_writes_translations_and_scores(run):
    name, scores = evaluate_run(run, EvaluateSettings())
    lines = (run / "translations.test.txt").read_text().split("\n")
    assert name == "test" and len(lines) == 10 and lines[-1] == ""
    written = json.loads((run / "scores.json").read_text())
    assert written == {"test": scores}
    assert scores["num_examples"] == 9 and 0 <= scores["bleu"] <= 100 and "tok:13a" in scores["bleu_signature"]
    assert scores["checkpoint"] == "averaged" and scores["decoding"]["beam_size"] == 3
    assert set(scores["data"]) == {"fingerprint", "text_fingerprint", "tree_fingerprint", "vocab_fingerprint"}


def test_a_result_names_how_it_was_decoded_and_samples_have_one_of_their_own(run):
    _, plain = evaluate_run(run, EvaluateSettings())
    for chosen in ({"method": "sampling", "top_k": 5}, {"method": "mbr", "mbr_samples": 4}, {"diversity_groups": 3}):
        name, scores = evaluate_run(run, EvaluateSettings(decoding=DecodingConfig(**chosen)))
        assert name == ".".join(["test", *filter(None, [chosen.get("method")])])
        assert scores["decoding"].items() >= chosen.items() and scores["asked"]["decoding"] == chosen
        assert RunState(run).check(scores).changed == ""
        config = run / "config.yaml"
        before = config.read_text()
        config.write_text(before.replace("beam_size: 3", "beam_size: 6"))
        assert "decoding.beam_size 3, now 6" in RunState(run).check(scores).changed
        config.write_text(before)
    assert set(read_scores(run)) == {"test", "test.sampling", "test.mbr"}
    assert not plain["decoding"].keys() & {"method", "seed", "diversity_groups"}, "records of beam search are as before"


def test_the_cost_of_a_very_wide_beam_is_said_once_before_the_search(run, monkeypatch, capsys):
    def search(*given, **options):
        raise UserError("searched")

    monkeypatch.setattr(evaluation, "translate_examples", search)
    for size in (5, 1000):
        with pytest.raises(UserError, match="searched"):
            evaluate_run(run, EvaluateSettings(decoding=DecodingConfig(beam_size=size)))
        told = [line for line in capsys.readouterr().err.splitlines() if "beam_size" in line]
        assert [line.partition(";")[0] for line in told] == ([] if size == 5 else [
            "note: decoding.beam_size = 1,000 searches 200 times as many hypotheses as the usual 5, and takes at least 1 MiB for "
            "each line of a batch"
        ])  # fmt: skip


def test_a_result_with_the_usual_value_of_a_setting_that_the_run_has_otherwise_is_not_stale(run):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("beam_size: 3", "beam_size: 3\n  no_repeat_ngram: 2"))
    chosen = {"no_repeat_ngram": 0, "max_length_offset": 10}
    _, scores = evaluate_run(run, EvaluateSettings(decoding=DecodingConfig(**chosen, max_tokens=64)))
    assert scores["asked"]["decoding"] == chosen and "no_repeat_ngram" not in scores["decoding"]
    status = RunState(run).check(scores)
    assert status.changed == "" and "decoding.no_repeat_ngram=0" in status.command


@pytest.mark.parametrize(
    "error", [UserError("bertscore.model: cannot load it"), torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()]
)
def test_an_encoder_that_fails_after_the_search_costs_no_translations(error, run, monkeypatch):
    def fail(*given):
        raise error

    monkeypatch.setattr(bertscore, "check_bertscore", lambda config: None)
    monkeypatch.setattr(bertscore, "bert_scores", fail)
    asked = EvaluateSettings(bertscore={"model": run / "no-encoder", "layer": 1})
    said = r"cannot load it; the translations and the other scores of test are in \S+run$" if type(error) is UserError else None
    with pytest.raises(type(error), match=said):
        evaluate_run(run, asked)
    assert len((run / "translations.test.txt").read_text().splitlines()) == read_scores(run)["test"]["num_examples"] == 9
    assert "bertscore" not in read_scores(run)["test"]
    known = read_scores(run)
    (run / "scores.json").write_text(json.dumps({"test": known["test"] | {"bertscore": 0.5}}))
    with pytest.raises(type(error), match=said):
        evaluate_run(run, asked)
    assert read_scores(run)["test"]["bertscore"] == 0.5  # of the same translations


def test_a_second_evaluation_changes_nothing_and_others_are_added(run):
    evaluate_run(run, EvaluateSettings())
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    evaluate_run(run, EvaluateSettings())
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    evaluate_run(run, EvaluateSettings(split="valid", checkpoint="1"))
    evaluate_run(run, EvaluateSettings(untrained=True, random_trees=True, seed=4))
    evaluate_run(run, EvaluateSettings(checkpoint=str(run / "checkpoints" / "step_00000002")))
    names = ["test", "valid.step_00000001", "test.untrained.random_trees_4", "test.step_00000002"]
    assert list(json.loads((run / "scores.json").read_text())) == names
    assert {path.name for path in run.glob("translations.*")} == {f"translations.{name}.txt" for name in names}
    assert (run / "translations.test.txt").read_bytes() == before["translations.test.txt"]


@pytest.mark.parametrize("random_trees", [False, True])
def test_the_nll_of_references_is_that_of_single_sentences_in_float64(run, random_trees, monkeypatch):
    settings = EvaluateSettings(random_trees=random_trees, seed=3 if random_trees else 1)
    name, scores = evaluate_run(run, settings)
    loaded = load_run(run)
    model, expected, tokens = loaded.model.double().eval(), [], []
    for example in read_split(loaded.data, "encoded", "test"):
        example = with_random_tree(example, 3) if random_trees else example
        batch = collate([example], model.reads)
        log_probs = model(batch)[0].log_softmax(-1)
        target = [*example["tgt_pieces"].tolist(), EOS_ID]
        expected.append(-sum(log_probs[place, piece].item() for place, piece in enumerate(target)))
        tokens.append(len(target))
    found = read_nll(run, name)
    assert found.nll == pytest.approx(expected, abs=2e-4) and list(found.tokens) == tokens
    facts = scores["reference_nll"]
    assert scores["nll"] == pytest.approx(sum(expected) / sum(tokens), abs=1e-6) == facts["total"] / facts["tokens"]
    assert facts["per_sentence"] == pytest.approx(sum(expected) / 9, abs=1e-4) and facts["tokens"] == sum(tokens)
    monkeypatch.setattr(evaluation, "_SCORED_TOKENS", 1)  # a sentence at a time
    assert evaluate_run(run, settings)[1]["nll"] == pytest.approx(scores["nll"], abs=1e-6)
    (run / f"nll.{name}.tsv").write_text("tokens\tnll\n")
    asked = f" random_trees={str(random_trees).lower()} seed={settings.seed}"
    with pytest.raises(UserError, match=rf"nll\..*tsv is not the file that was scored; run .* --out \S+ split=test{asked}$"):
        read_nll(run, name)
    (run / f"translations.{name}.txt").unlink()
    with pytest.raises(UserError, match=rf"has no translations of {name} \(.*\); run .* --out \S+ split=test{asked}$"):
        read_system(run, name)


def test_the_nll_of_valid_is_that_of_the_training(run):
    (line,) = [line for line in read_metrics(run) if line["event"] == "valid"]
    scores = evaluate_run(run, EvaluateSettings(split="valid", checkpoint=str(line["step"])))[1]
    assert scores["nll"] == pytest.approx(line["nll"], abs=1e-6)


def test_translations_are_in_example_order_whatever_the_batches(run):
    loaded = load_run(run)
    examples = list(read_split(loaded.data, "encoded", "test"))
    assert [example["example_id"] for example in examples] == list(range(9))
    texts = list(read_split(loaded.data, "text", "test"))
    assert read_references(loaded.data, "test") == [row["target"] for row in texts]
    assert [" ".join(reversed(row["source"].split())) for row in texts] == [row["target"] for row in texts]
    expected = [h[0].ids for h in translate_split(loaded, EvaluateSettings())]
    for max_tokens, window in [(1, 4096), (30, 4), (10_000, 9)]:
        decoding = loaded.config.decoding.model_copy(update={"max_tokens": max_tokens})
        found = list(translate_examples(loaded.model, examples, decoding, window=window))
        assert [h[0].ids for h in found] == expected


def test_references_are_lower_cased_as_the_pieces_are(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "read_index", lambda folder: {"subword_settings": {"lowercase": True}})
    monkeypatch.setattr(splits, "read_split", lambda *given: iter([{"example_id": 0, "target": "Ο Σοφός ΣΟΦΟΣ"}]))
    assert read_references(tmp_path, "test") == ["ο σοφός σοφοσ"]


def test_an_example_without_leaves_has_the_empty_translation(run):
    loaded = load_run(run)
    example = next(read_split(loaded.data, "encoded", "test"))
    empty = {
        **example,
        "leaves": {name: values[:0] for name, values in example["leaves"].items()},
        "nodes": {name: values[:0] for name, values in example["nodes"].items()},
        "spans": {name: values[:0] for name, values in example["spans"].items()},
    }
    found = list(translate_examples(loaded.model, [empty, example, empty], loaded.config.decoding))
    assert [len(h) for h in found] == [1, 1, 1] and found[0] == found[2] and found[1][0].ids
    assert [h[0].ids for h in translate_examples(loaded.model, [empty], loaded.config.decoding)] == [()]
    assert detokenize(loaded.processor, found[0][0]) == ""


def test_detokenize_gives_the_text_of_the_pieces(run):
    loaded = load_run(run)
    for row, text in zip(read_split(loaded.data, "encoded", "test"), read_references(loaded.data, "test"), strict=True):
        assert detokenize(loaded.processor, Hypothesis(tuple(row["tgt_pieces"].tolist()), 0.0, 0.0)) == text


def test_random_trees_change_a_tree_model_and_leave_a_plain_one(run):
    examples = list(read_split(data_of(run), "encoded", "train"))
    changed = [with_random_tree(example, seed=1) for example in examples]
    for name, same in (("transformer", True), ("tree_transformer", False)):
        torch.manual_seed(0)
        model = build_model(MODEL.model_copy(update={"name": name}), VocabSizes(60, 6))
        scores = [
            [h[0].log_prob for h in translate_examples(model, side, DecodingConfig(beam_size=2))] for side in (examples, changed)
        ]
        assert np.allclose(scores[0], scores[1], atol=1e-4) == same


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 1000))
@num_examples(60)
def test_random_trees_are_trees(num_leaves, num_nodes, seed):
    spans = random_spans(num_leaves, num_nodes, np.random.default_rng(seed))
    tree = FlatTrees(np.zeros(num_nodes, dtype=int), *np.array(spans).T, names=[])
    parent, subtree_end = tree.parents(), tree.subtree_ends()
    assert len(spans) == num_nodes and spans[0] == (0, num_leaves)
    assert parent[0] == -1 and (parent[1:] >= 0).all() and (parent[1:] < np.arange(1, num_nodes)).all()
    for node, (start, end) in enumerate(spans):
        inside = {m for m in range(num_nodes) if m == node or (m > node and any(a == node for a in ancestors(parent, m)))}
        assert inside == set(range(node, subtree_end[node]))
        assert 0 <= start < end <= num_leaves
        if node:
            above = spans[parent[node]]
            assert above[0] <= start and end <= above[1]
            siblings = [spans[m] for m in range(node) if parent[m] == parent[node]]
            assert all(end_ <= start for _, end_ in siblings)
    TreeStructure.build([num_leaves], [np.column_stack([np.array(spans), subtree_end])])


def ancestors(parent, node):
    while (node := parent[node]) >= 0:
        yield node


def test_random_trees_keep_leaves_and_labels_and_differ_in_shape(run):
    for example in read_split(data_of(run), "encoded", "train"):
        changed = with_random_tree(example, seed=1)
        assert changed["leaves"] is example["leaves"]
        assert sorted(changed["nodes"]["label"]) == sorted(example["nodes"]["label"])
        shape, own = ([tuple(e["spans"][name].tolist()) for name in ("start", "end")] for e in (changed, example))
        assert shape != own or len(own[0]) == 1
        again = with_random_tree(example, seed=1)
        assert all((again["spans"][name] == changed["spans"][name]).all() for name in again["spans"])


def test_evaluate_refuses_unfit_settings_in_one_line(run, tmp_path):
    with pytest.raises(UserError, match=r"is not a run: .*config\.yaml is missing"):
        evaluate_run(tmp_path, EvaluateSettings())
    with pytest.raises(UserError, match="there are: 1, 2"):
        evaluate_run(run, EvaluateSettings(checkpoint="7"))
    with pytest.raises(UserError, match="has no split 'dev'"):
        evaluate_run(run, EvaluateSettings(split="dev"))
    other = write_toy_data(tmp_path / "other", train=8, valid=2, test=2, seed=1)
    with pytest.raises(UserError, match="the vocabulary must be"):
        evaluate_run(run, EvaluateSettings(data=other))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(data_of(run)), str(other)))
    with pytest.raises(UserError, match="; it was made again since then; restore it, or train on it into another folder$"):
        evaluate_run(run, EvaluateSettings())
    (run / "config.yaml").write_text(config)
    shutil.rmtree(run / "averaged")
    with pytest.raises(UserError, match=r"averaged/model\.safetensors is missing; train to the end"):
        evaluate_run(run, EvaluateSettings())


def test_another_data_set_of_the_same_vocabulary_gets_a_name_of_its_own(run, tmp_path):
    data = Path(shutil.copytree(data_of(run), tmp_path / "control"))
    index = data / "encoded" / "index.json"
    assert evaluate_run(run, EvaluateSettings(data=data))[0] == "test"
    index.write_text(json.dumps({**json.loads(index.read_text()), "fingerprint": "another"}))
    assert evaluate_run(run, EvaluateSettings(data=data))[0] == "test.data-control"


def test_trees_of_another_form_than_those_of_the_training_are_refused(run, tmp_path):
    def make(name: str, tree: dict) -> Path:
        folder = Path(shutil.copytree(data_of(run) if name == "own" else tmp_path / "own", tmp_path / name))
        values = json.loads((folder / "encoded" / "index.json").read_text()) | ({} if name == "own" else {"fingerprint": name})
        (folder / "encoded" / "index.json").write_text(json.dumps(values | {"tree_settings": tree}))
        return folder

    form = {"tree_source": "parsed", "side": "source", "collapse_unary": True, "binarize": "none", "seed": 1}
    own = make("own", form)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(data_of(run)), str(own)))
    arcs = {"phrases": "layered", "phrase_labels": "upos"}
    for number, healthy in enumerate(({}, form | {"tree_source": "shuffled", "seed": 3}, form | arcs, {"side": "source"})):
        assert evaluate_run(run, EvaluateSettings(data=make(f"like{number}", healthy)))[0] == f"test.data-like{number}"
    for name, value in {"collapse_unary": False, "binarize": "left", "side": "target"}.items():
        other = make(name, form | {name: value})
        with pytest.raises(UserError, match=f"{name} has trees of another form than .*/own, and without these settings$"):
            evaluate_run(run, EvaluateSettings(data=other))
    facts = json.loads((own / "encoded" / "index.json").read_text())
    (own / "encoded" / "index.json").write_text(json.dumps(facts | {"fingerprint": "made again"}))
    evaluate_run(run, EvaluateSettings(data=tmp_path / "binarize"))  # the form that the model learned is not known
    shutil.rmtree(own)
    evaluate_run(run, EvaluateSettings(data=tmp_path / "binarize"))


def test_dropped_lines_of_the_split_are_told(run, tmp_path, caplog):
    data = Path(shutil.copytree(data_of(run), tmp_path / "control"))
    index = data / "encoded" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "dropped": {"test": {"empty_target": 2}}}))
    evaluate_run(run, EvaluateSettings())
    assert "dropped" not in caplog.text
    evaluate_run(run, EvaluateSettings(data=data))
    message = "note: 2 of 11 lines of test were dropped: 2 empty_target; the scores are those of the other lines"
    assert caplog.text.count(message) == 1


def test_text_of_other_examples_is_refused(run, tmp_path):
    data = Path(shutil.copytree(data_of(run), tmp_path / "data"))
    for suffix in (".arrow", ".json"):
        first, second = (data / "text" / f"test-0000{i}-of-00002{suffix}" for i in (0, 1))
        first.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match="test-00000-of-00002.arrow is damaged: its hash is not the one in index.json; run"):
        read_references(data, "test")
    index = json.loads((data / "text" / "index.json").read_text())
    tests = [shard for shard in index["shards"] if shard["split"] == "test"]
    tests[0].update(bytes=tests[1]["bytes"], rows=tests[1]["rows"], sha256=tests[1]["sha256"])
    (data / "text" / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="data/text is not the stage that .*/data/encoded was made of; restore it, or run"):
        read_references(data, "test")
    encoded = json.loads((data / "encoded" / "index.json").read_text())
    encoded["text_fingerprint"] = content_fingerprint(read_index(data / "text").records())
    (data / "encoded" / "index.json").write_text(json.dumps(encoded))
    with pytest.raises(UserError, match="its stages text and encoded differ at line 1; run"):
        read_references(data, "test")


def test_command_line(run, capsys, tmp_path):
    main = main_of("evaluate.py")
    main(["--run", str(run), "split=valid", "decoding.beam_size=2"])
    of_valid = [f"hypotheses={run / 'translations.valid.txt'}", f"data={data_of(run)}"]
    with pytest.raises(UserError, match=r"translations.valid.txt holds translations of valid; set split=valid"):
        main([*of_valid, "split=test"])
    main([*of_valid, "split=valid"])
    assert "valid" in capsys.readouterr().out
    main(["--run", str(run), "split=valid", "decoding.beam_size=2"])
    printed = capsys.readouterr().out
    assert printed.split("\n")[1].startswith("valid ") and "tok:13a" in printed
    scores = json.loads((run / "scores.json").read_text())["valid"]
    assert scores["decoding"]["beam_size"] == 2 and scores["decoding"]["max_tokens"] == 4096
    for arguments, message in [
        ([], "give --out RUN"),
        (["--out", str(run), "decoding.beams=2"], "decoding.beams: unknown key"),
    ]:
        with pytest.raises(UserError, match=message):
            main(arguments)
    done = run_here("evaluate.py", "--out", "no_such_run", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: no_such_run is not a run") and done.stderr.count("\n") == 1


def test_settings_that_are_not_given_are_those_of_the_run(run):
    given = load_settings(EvaluateSettings, None, ["decoding.length_penalty=0.5"])
    evaluated = evaluate_run(run, given)[1]["decoding"]
    assert evaluated["length_penalty"] == 0.5 and evaluated["beam_size"] == 3


OF_CHECKPOINTS = ["averaged", "initial", "untrained", "last", "step_00000002"]
FREE = st.lists(
    st.sampled_from([*OF_CHECKPOINTS, "peak", "file", "sampling", "random_trees_1", "data-last", "a"]), min_size=1, max_size=2
).map(".".join)  # what a folder or a file of a user may be called


@st.composite
def named_results(draw, of_run: bool) -> str:
    """The name of a result of the run on its own data, or of one with a part that a user names."""
    split = draw(st.sampled_from(["test", "last", "treebank", "file", "unsupervised_parse", "data"]))
    checkpoint = draw(st.sampled_from(OF_CHECKPOINTS))
    more = draw(st.sampled_from([(), ("random_trees_1",), ("sampling",), ("random_trees_1", "sampling"), ("max_words_10",)]))
    if of_run:
        return draw(st.sampled_from([f"{split}.peak", name_result(split, checkpoint, Path("own"), *more, own_data=True)]))
    folder = draw(FREE)
    elsewhere = name_in_results(Path("/own"), Path("/", folder, "averaged"))
    names = [
        name_result(split, checkpoint, Path("/", folder), *more, own_data=False),
        name_result(split, elsewhere, Path("own"), *more, own_data=True),
        name_result(split, elsewhere, Path("/", draw(FREE)), *more, own_data=False),
        name_result(f"treebank-{folder}", checkpoint, Path("own"), *more, own_data=True),
        PARSE + name_result(split, checkpoint, Path("own"), *more, own_data=True),
        f"{split}.file.{folder}",
    ]
    return draw(st.sampled_from(names))


@num_examples(500)
@given(named_results(of_run=True), named_results(of_run=False))
def test_no_result_replaces_one_of_the_run_whatever_a_user_calls_a_folder(one, other):
    assert one != other


@pytest.mark.parametrize("folder", ["data", "last.data-a", "a.data-data"])
def test_weights_of_a_folder_called_data_have_other_names_than_data_sets(folder):
    """`checkpoint=X/data/averaged` and `data=X/averaged` were both test.data-averaged."""
    weights = name_result("test", name_in_results(Path("/own"), Path("/x", folder, "averaged")), Path("own"), own_data=True)
    for checkpoint in OF_CHECKPOINTS:
        for data in ("averaged", "a-averaged", "data-averaged", f"{folder}-averaged"):
            assert weights != name_result("test", checkpoint, Path("/y", data), own_data=False)


def test_checkpoints_that_are_not_those_of_the_run_are_named_apart(tmp_path):
    run = tmp_path / "run"
    own = {"averaged": "averaged", "initial": "initial", "checkpoints/step_00000002": "step_00000002"}
    others = {"last": "weights-run-last", "old/averaged": "weights-old-averaged", "../b.c/averaged": "weights-b_c-averaged"}
    others |= {"../b/checkpoints/step_00000002": "weights-b-step_00000002"}
    for path, name in {**own, **others}.items():
        assert name_in_results(run, run / path) == name
