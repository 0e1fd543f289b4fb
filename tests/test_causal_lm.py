"""Training of causal language models: the same batches for all, resume, scores by sentence, the commands."""

import html
import itertools
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_here
from safetensors.torch import load_file, save_file
from toydata import WORDS, with_given_trees, write_toy_data
from toyruns import TINY_RUN, check_stop_and_resume, losses

from treenet.config import TrainConfig
from treenet.data.splits import read_split
from treenet.evaluation.language_models import example_batches, score_batches, source_batches
from treenet.evaluation.significance import compare_examples
from treenet.experiments.results import Results
from treenet.experiments.seeds import MEASURES, SeedsConfig
from treenet.experiments.seeds_report import _summarize_system, other_tests
from treenet.experiments.study import UNLEARNED
from treenet.jobs.train_run import run_training
from treenet.runs.checkpoint import WEIGHTS, publish, read_meta
from treenet.runs.loading import load_trained
from treenet.runs.metrics_log import read_metrics
from treenet.tasks.base import build_task, vocab_sizes
from treenet.training.batch_stream import plan_batches
from treenet.training.trainer import train
from treeproc.common.files import atomic_write, json_bytes, read_json
from treeproc.common.settings import load_settings
from treeproc.shards.schema import PAD_ID

slow = pytest.mark.slow

MODELS = {
    "causal": ["model.name=causal_transformer"],
    "tree_reg": ["model.name=causal_transformer", "model.tree_reg.weight=0.5"],
    "grammar": ["model.name=transformer_grammar"],
}


def make_config(data: Path, *overrides: str) -> TrainConfig:
    values = json.loads(json.dumps(TINY_RUN)) | {"task": "causal_lm"}
    values["model"] |= {"num_encoder_layers": 2, "dropout": 0.2}
    values["optimizer"] |= {"label_smoothing": 0.0}
    return load_settings(TrainConfig, None, overrides, **values, data=data)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return with_given_trees(write_toy_data(tmp_path_factory.mktemp("causal") / "data", train=40, valid=8, test=10))


@pytest.fixture(scope="module", params=MODELS)
def finished(request, data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp(request.param) / "run"
    run_training(make_config(data, *MODELS[request.param], "max_steps=30", "validate_every=15"), out)
    return out


def test_all_models_have_the_same_batches(data):
    tasks = [build_task(make_config(data, *overrides)) for overrides in MODELS.values()]
    sources = [task.open("train", training=True) for task in tasks]
    plans = [plan_batches(task.config, source) for task, source in zip(tasks, sources, strict=True)]
    for step in range(plans[0].num_batches):
        rows = [plan.batch(step) for plan in plans]
        assert all(np.array_equal(rows[0], other) for other in rows)
        pieces = int(sum(sources[0].lengths["leaves"][rows[0]])) + len(rows[0])
        assert {source.target_tokens(rows[0]) for source in sources} == {pieces}
        plain, grammar = sources[0].batch(rows[0]), sources[2].batch(rows[0])
        assert int((plain.tgt_out != PAD_ID).sum()) == pieces
        num_pieces = read_json(data / "encoded" / "index.json")["num_pieces"]
        assert int(((grammar.tgt_out != PAD_ID) & (grammar.tgt_out < num_pieces)).sum()) == pieces
        for batch in (plain, grammar):
            assert torch.equal(batch.pad_masks()[0], batch.tgt_in == PAD_ID)


@slow
@pytest.mark.parametrize("case", MODELS)
def test_stopped_and_resumed_equals_uninterrupted(case, data, tmp_path):
    config = make_config(data, *MODELS[case], "max_steps=8", "validate_every=4")
    check_stop_and_resume(config, tmp_path, 5)


@slow
@pytest.mark.parametrize("case", MODELS)
def test_micro_batches_have_the_losses_of_whole_batches(case, data, tmp_path):
    check_micro_batches(partial(make_config, data, *MODELS[case]), tmp_path)


def check_micro_batches(make: Callable[..., TrainConfig], folder: Path) -> None:
    """Batches cut into other parts, as they are on several workers, have the losses of whole ones."""
    found = []
    for cut in ("null", "12"):
        (folder / cut).mkdir()
        train(build_task(make("max_steps=4", f"batch.tokens_per_device={cut}")), folder / cut)
        found.append([loss for _, loss in losses(folder / cut)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@slow
@torch.no_grad()
def test_it_learns_and_scores_are_those_of_single_sentences(finished):
    """Scores of batches against each sentence alone, position by position, and the sum against the validation of the training."""
    config, model = load_trained(finished)
    valid = [line for line in read_metrics(finished) if line["event"] == "valid"]
    assert valid[-1]["nll"] < valid[0]["nll"]
    assert ("tree_reg" in valid[-1]) == (config.model.tree_reg.weight > 0)
    source = build_task(config).open("test")
    index = read_json(config.data / "encoded" / "index.json")
    scored = {one.example: one for one in score_batches(model, source_batches(source), index["num_pieces"])}
    for row in range(len(source)):
        batch = source.batch([row])
        logits = model.compute_logits(model(batch)[0])[0].double()
        nll = {"pieces": 0.0, "tree": 0.0}
        for position, target in enumerate(batch.tgt_out[0].tolist()):
            if target != PAD_ID:
                part = "pieces" if target < index["num_pieces"] else "tree"
                nll[part] += float(torch.logsumexp(logits[position], 0) - logits[position, target])
        one = scored[int(batch.example_ids[0])]
        assert (one.nll, one.tree_nll) == pytest.approx((nll["pieces"], nll["tree"]), rel=1e-5, abs=1e-6)
        assert one.pieces == one.words + 1 == int(source.lengths["leaves"][row]) + 1
    rows = list(read_split(config.data, "encoded", "test"))
    batches = example_batches(rows, model.reads, vocab_sizes(index))
    for one in score_batches(model, batches, index["num_pieces"]):
        assert one.total == pytest.approx(scored[one.example].total, rel=1e-5) and one.words == scored[one.example].words
    assert (sum(one.tree_nll for one in scored.values()) > 0) == (config.model.name == "transformer_grammar")


@slow
def test_scores_that_are_not_finite_are_refused_and_nothing_is_written(finished, tmp_path):
    """They were written as NaN, which --compare and records refuse, with the advice to score the model again."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    place = run / "averaged"
    meta = {name: value for name, value in read_meta(place).items() if name not in ("files", "sha256")}
    weights = {name: value * 1e30 for name, value in load_file(place / WEIGHTS).items()}
    publish(place, {WEIGHTS: lambda path: save_file(weights, path, {"format": "pt"})}, meta)
    before = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    done = run_here("score_lm.py", "--out", run, "split=test")
    assert done.returncode == 2
    assert "error: the scores of the model are not finite, because its training diverged; score" in done.stderr
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == before


def run(script: str, *arguments: object) -> tuple[int, str, str]:
    done = run_here(script, *arguments)
    return done.returncode, done.stdout, done.stderr


@slow
def test_the_workflows_from_configuration_to_scores(finished, tmp_path):
    config, _ = load_trained(finished)
    status, message, error = run("score_lm.py", "--out", finished)
    assert status == 0, error
    assert ("with the trees of the data set: an upper bound" in message) == (config.model.name == "transformer_grammar")
    entry = read_json(finished / "scores.json")["test"]
    rows = [line.split("\t") for line in (finished / "language_model.test.tsv").read_text().splitlines()[1:]]
    total = sum(float(row[3]) + float(row[4]) for row in rows)
    assert entry["perplexity"] == pytest.approx(math.exp(total / sum(int(row[2]) for row in rows)), rel=1e-6)
    assert entry["kind"] == ("joint" if config.model.name == "transformer_grammar" else "exact")
    assert ("perplexity_given_tree" in entry) == (entry["kind"] == "joint")
    assert (entry["num_examples"], entry["checkpoint"]) == (10, "averaged")
    treebank = tmp_path / "two.mrg"
    treebank.write_text("(S (NP (X ba) (X be)) (VP (X bibo) (X ba)))\n(S (NP (X ba) (X be)) (VP (X bibo) (X be)))\n")
    status, message, error = run("score_lm.py", "--out", finished, f"pairs.files=[{treebank}]")
    assert status == 0 and "right pairs (%)" in message, error
    entry = read_json(finished / "scores.json")["pairs-two"]
    assert (entry["num_words"], entry["num_pairs"]) == (8, 1)
    shutil.copytree(config.data, shuffled := tmp_path / "shuffled")
    index = read_json(shuffled / "encoded" / "index.json")
    index["tree_settings"]["tree_source"] = "shuffled"
    atomic_write(shuffled / "encoded" / "index.json", json_bytes(index))
    status, _, error = run("score_lm.py", "--out", finished, f"data={shuffled}", f"pairs.files=[{treebank}]")
    if config.model.name == "transformer_grammar":
        assert (
            status == 2 and error.count("\n") == 1 and "has shuffled trees" in error and "set trees=beam for a grammar" in error
        )
    else:  # the trees of the file are words for these models
        again = read_json(finished / "scores.json")["pairs-two"]
        assert status == 0 and again["nll"] == entry["nll"] and str(shuffled) in again["asked"]["data"], error
    treebank.write_text("(S (X ba)\n")
    status, _, error = run("score_lm.py", "--out", finished, f"pairs.files=[{treebank}]")
    assert status == 2 and "two.mrg, line 1: 1 bracket(s) of this tree are not closed" in error
    status, _, error = run("train_lm.py", "--config", finished / "config.yaml", "--out", finished, "max_steps=31")
    assert status == 0 and "scores.json, test is stale: the run has changed since then" in error.replace(f"{finished}/", "")
    assert f"tree-attention score-lm --out {finished} split=test" in error
    for other in ("evaluate.py", "probe.py"):
        status, _, error = run(other, "--out", finished)
        assert status == 2 and error.count("\n") == 1 and "is a run of causal_lm" in error
    status, _, error = run("train_lm.py", "--config", finished / "config.yaml", "--out", tmp_path, "model.name=bilstm")
    assert status == 2 and "model.name must be one of causal_transformer, transformer_grammar" in error


@slow
def test_a_masked_model_scores_each_piece_from_all_others(data, tmp_path):
    out = tmp_path / "run"
    config = make_config(data, "task=masked_lm", "model.name=transformer", "max_steps=6")
    run_training(config, out)
    status, message, error = run("score_lm.py", "--out", out)
    assert status == 0 and "pseudo-perplexity" in message, error
    _, model = load_trained(out)
    source = build_task(config).open("test")
    rows = [line.split("\t") for line in (out / "language_model.test.tsv").read_text().splitlines()[1:]]
    for row in range(3):
        batch = source.batch([row])
        pieces = batch.leaf_pieces.clone()
        nll = 0.0
        for place in range(pieces.shape[1]):
            batch.leaf_pieces = pieces.clone()
            batch.leaf_pieces[0, place] = model.mask_id
            logits = model.compute_logits(model(batch)[0, place]).detach()
            nll -= float(logits.log_softmax(0)[pieces[0, place]])
        assert float(rows[row][3]) == pytest.approx(nll, rel=1e-4)
    assert {row[4] for row in rows} == {"0.000000"}


def test_pairs_of_a_study_without_a_test_split_are_tested(capfd):
    right = {("causal", 1): "1 0 0 1", ("causal", 2): "0 0 1 1", ("tree", 1): "1 1 0 1", ("tree", 2): "1 1 1 1"}
    cells = [
        {"cell": f"{system}-seed{seed}", "system": system, "seed": seed, "parameters": 1, "seconds": 1.0, "valid.perplexity": 2.0}
        for system, seed in right
    ]
    plain = Results.of(cells, "system").by("system")
    assert "tests" not in _summarize_system(plain["tree"], plain["causal"], {}, MEASURES["causal_lm"])
    for cell, of_pairs in zip(cells, right.values(), strict=True):
        cell["pairs.pair_accuracy"] = of_pairs.count("1") / 4
    examples = {
        cell["cell"]: {"pairs": np.array(row.split(), dtype=int)} for cell, row in zip(cells, right.values(), strict=True)
    }
    table = Results.of(cells, "system").by("system")
    row = _summarize_system(table["tree"], table["causal"], examples, MEASURES["causal_lm"])
    assert row["tests"]["pairs.pair_accuracy"].difference == 0.375 and len(row["tests"]) == 1
    for cell, tested in ((cells[0], True), (cells[3], False)):  # a cell of an earlier grid, without pairs
        examples[cell["cell"]].pop("pairs"), cell.pop("pairs.pair_accuracy")
        table = Results.of(cells, "system").by("system")
        row = _summarize_system(table["tree"], table["causal"], examples, MEASURES["causal_lm"])
        assert ("pairs.pair_accuracy" in row, "tests" in row) == (tested, tested)  # no mean over a part of the seeds
        assert not tested or row["tests"]["pairs.pair_accuracy"].seeds == 1
    pairs = {"files": ["pairs.mrg"]}
    for given, said in (({}, "valid alone, and tests no difference"), ({"pairs": pairs}, "minimal pairs, and tests the pairs")):
        config = SeedsConfig(task="causal_lm", data=Path("data"), grid={**given, "systems": {"causal": {}}, "baseline": "causal"})
        config.check_data([], {Path("data"): {"totals": {"train": 1, "valid": 1}}})
        assert said in capfd.readouterr().err


@slow
def test_models_are_compared_over_seeds(data, tmp_path):
    """Differences and their errors against a computation of its own, from files of single sentences; a lower nll is better."""
    systems = {name: {"model": dict([overrides[0].removeprefix("model.").split("=")])} for name, overrides in MODELS.items()}
    systems["tree_reg"]["model"]["tree_reg"] = {"weight": 0.5}
    config = make_config(data).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "eight.mrg").write_text("".join(f"(S (X ba) (X {word}))\n" for word in WORDS[:16]))
    pairs = {"files": [str(tmp_path / "eight.mrg")]}
    config |= {"max_steps": 2, "grid": {"systems": systems, "baseline": "causal", "seeds": [1, 2], "pairs": pairs}}
    (tmp_path / "study.yaml").write_text(json.dumps(config))
    study, records = tmp_path / "study", tmp_path / "records"
    arguments = ("--config", tmp_path / "study.yaml", "--out", study, "--records", records, "workers=0")
    status, message, error = run("compare_seeds.py", *arguments)
    assert status == 0 and "ppl: perplexity of pieces" in message and "an upper bound" in message and "last" not in message, error
    report = read_json(study / "comparison.json")
    nll = {}
    for cell in (study / "cells").iterdir():
        rows = [line.split("\t") for line in (cell / "language_model.test.tsv").read_text().splitlines()[1:]]
        pieces = np.array([int(row[2]) for row in rows])
        nll[cell.name] = np.array([float(row[3]) + float(row[4]) for row in rows])
    for row in report["systems"][1:]:
        differences = np.array([nll[f"{row['system']}-seed{seed}"] - nll[f"causal-seed{seed}"] for seed in (1, 2)])
        test, ratio = row["tests"]["test.nll"], differences.sum() / (2 * pieces.sum())
        rest = differences.mean(0) - ratio * pieces
        errors = (differences.sum(1) / pieces.sum()).std(ddof=1) / 2**0.5, rest.std(ddof=1) / len(pieces) ** 0.5 / pieces.mean()
        assert test["difference"] == pytest.approx(ratio, abs=1e-4)
        assert (test["seeds_error"], test["sentences_error"]) == pytest.approx(errors, abs=1e-4)
    for row in report["systems"][1:]:
        right = {}
        for seed, name in itertools.product((1, 2), (row["system"], "causal")):
            lines = (study / "cells" / f"{name}-seed{seed}" / "language_model.pairs.tsv").read_text().splitlines()[1:]
            right[name, seed] = np.array([int(line.split("\t")[2]) for line in lines])
        expected = compare_examples(np.array([right[row["system"], seed] - right["causal", seed] for seed in (1, 2)]))
        test = row["tests"]["pairs.pair_accuracy"]
        assert test["difference"] == expected.difference and test["p_value"] == expected.p_value
        assert f"{row['system']} - causal, right in minimal pairs (%): {100 * expected.difference:+.2f}" in message
    record = read_json(records / "causal-seed1.json")
    assert len(record["sentences"]["pairs"].split()) == 8 and str(tmp_path) not in json.dumps(record)
    shutil.rmtree(study)  # the records are enough
    status, again, error = run("compare_seeds.py", *arguments)
    assert status == 0 and again.split("\n\n")[0] == message.split("\n\n")[0], error
    status, _, error = run("report.py", "--out", tmp_path / "page", study)
    assert status == 0, error
    page = (tmp_path / "page" / "index.html").read_text()
    answer = read_json(tmp_path / "page" / "report.json")["answers"][0]
    scores = {row["system"]: row["score"] for row in answer["rows"]}
    assert "the lowest nll" in answer["sentence"] and f"{min(scores.values()):.3f}" in answer["sentence"]
    assert list(scores) == sorted(scores, key=lambda name: (name != "causal", scores[name]))
    right = report["systems"][0]["pairs.pair_accuracy"]
    assert f"{100 * right['mean']:.2f} ± {100 * right['deviation']:.2f}" in message  # in the unit of its test below
    lines = other_tests(report)
    assert len(lines) == len(report["systems"]) - 1 and all(html.escape(line) in page for line in lines)
    for row in report["systems"]:
        row[UNLEARNED] = True  # then there is the difference alone
    assert [line.partition("%): ")[2].partition(";")[0] for line in other_tests(report)] == [
        f"{100 * row['tests']['pairs.pair_accuracy']['difference']:+.2f} -" for row in report["systems"][1:]
    ]
    status, _, error = run("compare_seeds.py", *arguments, "grid.peak_on_test=true")
    assert status == 2 and "grid.peak_on_test: must be false for language models" in error


@slow
def test_cells_are_compared_on_the_same_minimal_pairs(data, tmp_path):
    """A study that gets pairs later, corrects their file, and continues from records."""
    config = make_config(data).model_dump(mode="json", exclude_unset=True)
    systems, file = {"causal": {}, "tree_reg": {"model": {"tree_reg": {"weight": 0.5}}}}, tmp_path / "pairs.mrg"
    config["model"]["name"], pairs = "causal_transformer", f"grid.pairs.files=[{file}]"
    config |= {"max_steps": 2, "grid": {"systems": systems, "baseline": "causal"}}
    (tmp_path / "study.yaml").write_text(json.dumps(config))
    study, records = tmp_path / "study", tmp_path / "records"
    arguments = ("compare_seeds.py", "--config", tmp_path / "study.yaml", "--out", study, "--records", records, "workers=0")

    def write(*words: str) -> None:
        file.write_text("".join(f"(S (X ba) (X {word}))\n" for word in words))

    for dry in ((), ("--dry-run",)):  # no cell trains first
        status, _, error = run(*arguments, "grid.seeds=[1]", pairs, *dry)
        assert status == 2 and "pairs.mrg" in error and "No such file" in error and not study.exists(), error
    write(*WORDS[:8])
    shutil.copytree(data, shuffled := tmp_path / "shuffled")
    index = read_json(shuffled / "encoded" / "index.json")
    index["tree_settings"]["tree_source"] = "shuffled"
    atomic_write(shuffled / "encoded" / "index.json", json_bytes(index))
    for name, refused in (("transformer_grammar", True), ("causal_transformer", False)):
        other = f"grid.systems.other={{model: {{name: {name}}}, data: {shuffled}}}"
        status, _, error = run(*arguments, "grid.seeds=[1]", pairs, other, "--dry-run")
        assert status == (2 if refused else 0) and ("set grid.systems.other=null" in error) == refused, error
    assert run(*arguments, "grid.seeds=[1]")[0] == 0
    shutil.rmtree(study)
    status, said, error = run(*arguments, "grid.seeds=[1,2]", pairs)
    assert status == 0 and not any("pairs.pair_accuracy" in row for row in read_json(study / "comparison.json")["systems"]), error
    assert "no mean of pairs, because some cells have no such score: causal-seed1, tree_reg-seed1; remove" in said
    assert "tree_reg - causal, right in minimal pairs" not in said
    shutil.rmtree(study)
    for seed in (1, 2):
        (records / f"causal-seed{seed}.json").unlink()
        (records / f"tree_reg-seed{seed}.json").unlink()
    assert run(*arguments, "grid.seeds=[1]", pairs)[0] == 0
    write(*WORDS[8:16])  # the same number of pairs
    status, said, error = run(*arguments, "grid.seeds=[1,2]", pairs)
    assert status == 0 and error.count("scores are not those of this study (none of these minimal pairs)") == 2, error
    entries = [read_json(study / "cells" / f"causal-seed{seed}" / "scores.json")["pairs"] for seed in (1, 2)]
    assert entries[0]["pairs_fingerprint"] == entries[1]["pairs_fingerprint"] and "no mean" not in said
    assert "not those of this study" not in run(*arguments, "grid.seeds=[1,2]", pairs)[2]
    file.rename(tmp_path / "elsewhere.mrg")  # a table of cells that are done needs no pairs
    assert run(*arguments, "grid.seeds=[1,2]", pairs)[1].endswith(said[-200:])
    shutil.rmtree(study)
    write(*WORDS[:8])
    status, _, error = run(*arguments, "grid.seeds=[1,2,3]", pairs)
    assert status == 2 and "the record of causal-seed1 has other scores (its minimal pairs are others); give the" in error
    assert not study.exists(), "nothing is trained"
    status, _, error = run(*arguments, "grid.seeds=[3]", pairs)
    assert status == 2 and "causal-seed1 and causal-seed3 were scored on other minimal pairs; remove the record" in error
    for name in ("causal", "tree_reg"):
        for seed in (1, 2):
            (records / f"{name}-seed{seed}.json").unlink()
    assert run(*arguments, "grid.seeds=[1,2,3]", pairs)[0] == 0
