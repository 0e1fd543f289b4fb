"""Runs that start from another run: what is taken, against a matching written out by hand, and what a resumed run reads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from toydata import write_toy_data
from toylabels import write_toy_labels
from toyruns import final_weights, losses, make_config, same, train_ranks

from treenet.config import TrainConfig
from treenet.jobs.dry_run import dry_run
from treenet.jobs.train_job import check_job
from treenet.jobs.train_run import describe_run, run_training
from treenet.runs.checkpoint import checkpoint_folders, publish, read_meta
from treenet.runs.exported_run import export_run
from treenet.runs.initial_weights import split_init, start_from_init
from treenet.runs.loading import load_model, load_run
from treenet.runs.parameter_matching import vocabulary_places
from treenet.tasks.base import build_task
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer, train
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import UserError
from treeproc.common.storage import as_path
from treeproc.shards.store import read_index

SHORT = ["max_steps=2", "checkpoint_every=1", "validate_every=2", "average_checkpoints=1"]
TABLE = "encoder.embedding.weight"


@pytest.fixture(scope="module")
def other_data(tmp_path_factory) -> Path:
    """Other lines, so another order of pieces; and three other pieces, and a label more."""
    folder = write_toy_data(tmp_path_factory.mktemp("other"), seed=5, train=30)
    file = folder / "encoded" / "vocab" / "pieces.model"
    proto = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    for number in (10, 20, 30):
        proto.pieces[number].piece += "x"
    file.write_bytes(proto.SerializeToString())
    labels = folder / "encoded" / "vocab" / "labels.txt"
    labels.write_text("<unk>\nADJP\nNP\nPP\nS\nVP\n")
    index = json.loads((folder / "encoded" / "index.json").read_text())
    (folder / "encoded" / "index.json").write_text(json.dumps(index | {"num_labels": 6}))
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("base") / "run"
    run_training(make_config(data, *SHORT), out)
    return out


def config_of(data: Path, run: Path | str, *overrides: str) -> TrainConfig:
    return make_config(data, *SHORT, f"init={run}", *overrides)


def start(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The weights before the first update."""
    folder.mkdir(exist_ok=True)
    job = check_job(config)
    start_from_init(job.config, job.facts, folder)
    return load_file(folder / "initial" / "model.safetensors")


def fresh(config: TrainConfig) -> dict[str, torch.Tensor]:
    """The weights of the seed."""
    task = build_task(config)
    torch.manual_seed(config.seed)
    model = task.build_model(task.sizes(read_index(config.data / "encoded")))
    return {name: value.detach() for name, value in model.named_parameters()}


def pieces(data: Path) -> list[str]:
    model = SentencePieceProcessor(model_file=str(data / "encoded" / "vocab" / "pieces.model"))
    return [model.id_to_piece(number) for number in range(len(model))]


def labels(data: Path) -> list[str]:
    return (data / "encoded" / "vocab" / "labels.txt").read_text().splitlines()


@pytest.mark.slow
def test_the_same_sizes_take_all(data, run, tmp_path):
    weights = start(config_of(data, run), tmp_path)
    assert same(weights, load_file(run / "averaged" / "model.safetensors"))


def test_rows_are_matched_by_piece_and_label_and_all_else_is_as_without_init(data, other_data, run, tmp_path):
    config = config_of(other_data, run, "seed=7")
    weights, theirs, own = start(config, tmp_path), load_file(run / "averaged" / "model.safetensors"), fresh(config)
    assert pieces(data) != pieces(other_data) and labels(data) != labels(other_data)
    for name, names in ((TABLE, pieces), ("encoder.label_embedding.weight", labels)):
        before, shared = names(data), 0
        for row, entry in enumerate(names(other_data)):
            is_known = entry in before
            expected = theirs[name][before.index(entry)] if is_known else own[name][row]
            assert torch.equal(weights[name][row], expected), (name, entry)
            shared += is_known
        assert 0 < shared < len(names(other_data))
        meta = read_meta(tmp_path / "initial")
        assert meta["matches"]["in_part"][name].startswith(f"{shared} of {len(names(other_data))} ")
    others = weights.keys() - {TABLE, "encoder.label_embedding.weight"}
    assert all(torch.equal(weights[name], theirs[name]) for name in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "new", "unused"),
    [
        ("transformer", set(), {"label_embedding", "accumulation"}),
        ("relation_transformer", {"relations"}, {"label_embedding", "accumulation"}),
    ],
)
def test_a_plain_model_takes_what_fits_of_a_tree_model(data, run, tmp_path, model, new, unused):
    config = config_of(data, run, f"model.name={model}")
    weights, theirs, own = start(config, tmp_path), load_file(run / "averaged" / "model.safetensors"), fresh(config)
    for name in weights:
        fits = name in theirs and theirs[name].shape == weights[name].shape
        assert torch.equal(weights[name], theirs[name] if fits else own[name]), name
    matches = read_meta(tmp_path / "initial")["matches"]
    assert set(matches["taken"]) | matches["new"].keys() == weights.keys() and TABLE in matches["taken"]
    assert set(matches["unused"]) == theirs.keys() - weights.keys()
    assert all(any(part in name for name in matches["unused"]) for part in unused)
    assert not {*matches["taken"]} & matches["new"].keys()
    parts = ("relations", "label_embedding", "accumulation")
    assert {part for part in parts if any(part in name for name in matches["new"])} == new


@pytest.mark.slow
def test_a_tree_model_takes_what_fits_of_a_plain_model(data, tmp_path, capsys):
    run_training(make_config(data, *SHORT, "model.name=transformer"), tmp_path / "plain")
    config = config_of(data, tmp_path / "plain")
    weights, own = start(config, tmp_path / "tree"), fresh(config)
    theirs = load_file(tmp_path / "plain" / "averaged" / "model.safetensors")
    new = {name for name in weights if "accumulation" in name or "label_embedding" in name}
    assert new and all(torch.equal(weights[name], own[name] if name in new else theirs[name]) for name in weights)
    said = capsys.readouterr().err
    assert f"{len(weights) - len(new)} parameters taken, 0 in part, {len(new)} new" in said
    assert "encoder.layers.*.self_attention.accumulation.leaf_weight" in said and "has no such parameter" in said


def test_another_size_is_listed_with_both_shapes(data, run, tmp_path, capsys):
    weights = start(config_of(data, run, "model.d_ff=48"), tmp_path)
    reasons = read_meta(tmp_path / "initial")["matches"]["new"]
    assert reasons["encoder.layers.0.feed_forward.inner.weight"] == "has shape [48, 16] here and [32, 16] there"
    assert reasons.keys() == {name for name in weights if "feed_forward." in name and "outer.bias" not in name}
    said = capsys.readouterr().err
    assert "not taken: encoder.layers.*.feed_forward.inner.weight" in said
    assert "other settings of the model: d_ff: 32 -> 48\n" in said


@pytest.mark.slow
def test_a_masked_lm_starts_a_translation_model(data, tmp_path):
    run_training(make_config(data, *SHORT, "task=masked_lm", "model.name=transformer"), tmp_path / "lm")
    weights = start(config_of(data, tmp_path / "lm", "model.name=transformer"), tmp_path / "mt")
    theirs = load_file(tmp_path / "lm" / "averaged" / "model.safetensors")
    matches = read_meta(tmp_path / "mt" / "initial")["matches"]
    assert set(matches["taken"]) == {name for name in weights if name.startswith("encoder.")}
    assert matches["unused"] == ["encoder.embedding.mask"]
    assert all(torch.equal(weights[name], theirs[name]) for name in matches["taken"])


@pytest.mark.slow
def test_a_classifier_takes_the_rows_of_classes_that_both_runs_have(tmp_path):
    """Rows went by the numbers of classes, to other classes in silence; a head of another number took none."""
    data = write_toy_labels(tmp_path / "data")
    settings = ["task=classification", "optimizer.warmup_steps=1"]
    run_training(make_config(data, *SHORT, *settings), tmp_path / "run")
    theirs = load_file(tmp_path / "run" / "averaged" / "model.safetensors")
    assert same(start(config_of(data, tmp_path / "run", *settings), tmp_path / "same"), theirs)
    other = Path(shutil.copytree(data, tmp_path / "other"))
    index = json.loads((data / "encoded" / "index.json").read_text())
    known = [str(number) for number in reversed(range(index["num_classes"]))]  # the names of classes without names
    for names in (known, [*known, "more"]):
        named = index | {"classes": names, "num_classes": len(names)}
        (other / "encoded" / "index.json").write_text(json.dumps(named))
        config = config_of(other, tmp_path / "run", *settings)
        weights, own = start(config, tmp_path / names[-1]), fresh(config)
        heads = {name: torch.cat([theirs[name].flip(0), own[name][len(known) :]]) for name in weights if name.startswith("head.")}
        assert len(heads) == 2 and same(weights, theirs | heads)


@pytest.mark.slow
def test_the_first_update_starts_from_these_weights_and_a_resumed_run_reads_nothing_more(data, run, tmp_path, monkeypatch):
    """Once with a stop in between, and the other run gone; once undisturbed. With an average, which starts there too."""
    base = tmp_path / "base"
    shutil.copytree(run, base)
    settings = ["ema_decay=0.9", "lr_scale={'encoder.*': 0.5}", "max_steps=4"]
    config = config_of(data, base, *settings)
    run_training(config, tmp_path / "once")
    before = json.loads((tmp_path / "once" / "run.json").read_text())["init"]
    assert before["weights_sha256"] == read_meta(base / "averaged")["files"]["model.safetensors"]["sha256"]
    assert read_sessions(tmp_path / "once")[-1].started_from == before["weights_sha256"]
    run_training(config_of(data, base, *settings[:2], "max_steps=2"), tmp_path / "twice")
    shutil.rmtree(base)
    shutil.rmtree(tmp_path / "twice" / "initial")
    summary = run_training(config, tmp_path / "twice")
    assert "init: weights" in describe_run(summary)
    assert json.loads((tmp_path / "twice" / "run.json").read_text())["init"] == before
    for name in ("model.safetensors", "ema.safetensors"):
        assert same(*(load_file(checkpoint_folders(tmp_path / run)[-1] / name) for run in ("once", "twice")))
    scratch = make_config(data, *SHORT, *settings)
    run_training(scratch, tmp_path / "scratch")
    assert losses(tmp_path / "scratch")[0][1] != losses(tmp_path / "once")[0][1]


def test_one_update_from_init_equals_one_update_from_the_same_weights(data, run, tmp_path):
    """A seed whose own weights are replaced by hand before the first update."""
    run_training(config_of(data, run, "max_steps=1"), tmp_path)
    trainer = Trainer(build_task(make_config(data, *SHORT)), Ranks(0, 1, torch.device("cpu")))
    values = load_file(run / "averaged" / "model.safetensors")
    with torch.no_grad():
        for name, parameter in trainer.train_step.model.named_parameters():
            parameter.copy_(values[name])
    trainer.step(next(iter(trainer.rank_batches())))
    expected = {name: value.detach() for name, value in trainer.train_step.model.named_parameters()}
    assert same(final_weights(tmp_path), expected)


@pytest.mark.slow
def test_two_ranks_start_from_the_same_weights(data, other_data, run, tmp_path):
    config = config_of(other_data, run, "batch.max_tokens=40")
    for name in ("one", "two"):
        start(config, tmp_path / name)
    train(build_task(config), tmp_path / "one")
    assert train_ranks(2, config, tmp_path / "two") == [None, None]
    first, second = losses(tmp_path / "one"), losses(tmp_path / "two")
    torch.testing.assert_close(torch.tensor(second), torch.tensor(first), rtol=1e-5, atol=0)


def test_a_checkpoint_can_be_named_and_a_path_is_of_its_run(data, run, tmp_path):
    step = run / "checkpoints" / "step_00000001"
    assert same(start(config_of(data, step), tmp_path), load_file(step / "model.safetensors"))
    for path, expected in (
        ("s3://b/run", ("s3://b/run", "averaged")),
        ("s3://b/run/averaged", ("s3://b/run", "averaged")),
        ("s3://b/run/checkpoints/step_00000012", ("s3://b/run", "12")),
        ("s3://b/step_00000012", ("s3://b/step_00000012", "averaged")),
    ):
        found, checkpoint = split_init(as_path(path))
        assert (str(found), checkpoint) == expected


@pytest.mark.slow
def test_an_exported_run_brings_its_vocabulary(data, other_data, run, tmp_path):
    """Its data set is not there, and rows are matched by piece."""
    moved = tmp_path / "data"
    shutil.copytree(data, moved)
    run_training(make_config(moved, *SHORT), tmp_path / "run")
    export_run(load_run(tmp_path / "run"), tmp_path / "exported")
    shutil.rmtree(moved)
    expected = start(config_of(other_data, run), tmp_path / "expected")
    assert same(start(config_of(other_data, tmp_path / "exported"), tmp_path / "out"), expected)


@pytest.mark.slow
def test_untrained_scores_of_a_run_are_those_of_its_start(data, run, tmp_path):
    run_training(config_of(data, run), tmp_path)
    untrained = load_model(tmp_path, untrained=True)
    assert untrained.checkpoint == "untrained"
    assert untrained.weights_sha256 == read_meta(tmp_path / "initial")["files"]["model.safetensors"]["sha256"]
    expected = load_file(tmp_path / "initial" / "model.safetensors")
    assert same(dict(untrained.model.named_parameters()), expected)
    assert load_model(tmp_path, checkpoint="initial").checkpoint == "initial"


@pytest.mark.slow
def test_a_dry_run_starts_there_and_leaves_nothing(data, run, tmp_path, capsys):
    assert "plan:" in dry_run(config_of(data, run), tmp_path / "out")
    assert "parameters taken" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_weights_are_refused_and_moved_ones_are_not(data, run, tmp_path):
    run_training(config_of(data, run), tmp_path / "out")
    shutil.copytree(run, tmp_path / "moved")
    assert run_training(config_of(data, tmp_path / "moved", "max_steps=3"), tmp_path / "out").step == 3
    recorded = (tmp_path / "out" / "config.yaml").read_text()
    assert f"init: {run}" in recorded
    for init in (["init=null"], [f"init={run / 'checkpoints' / 'step_00000001'}"], [f"init={tmp_path / 'none'}"]):
        with pytest.raises(UserError, match=r"holds a run with other settings \(init: "):
            run_training(make_config(data, *SHORT, *init), tmp_path / "out")
    run_training(make_config(data, *SHORT), tmp_path / "scratch")
    with pytest.raises(UserError, match=r"other settings \(init: None -> "):
        run_training(config_of(data, run), tmp_path / "scratch")


@pytest.mark.slow
def test_until_the_first_checkpoint_init_may_change(data, run, tmp_path):
    start(config_of(data, run), tmp_path)
    first = read_meta(tmp_path / "initial")["init"]
    start(config_of(data, run / "checkpoints" / "step_00000001"), tmp_path)
    assert read_meta(tmp_path / "initial")["init"] != first
    job = check_job(make_config(data, *SHORT))
    assert start_from_init(job.config, job.facts, tmp_path) == {} and not (tmp_path / "initial").exists()


def test_a_table_of_another_size_than_its_vocabulary_is_left_out(data, other_data, run, tmp_path):
    """Somebody changed the run. No row is read from beyond the table."""
    base = tmp_path / "base"
    shutil.copytree(run, base)
    folder, weights = base / "averaged", load_file(run / "averaged" / "model.safetensors")
    meta = {name: value for name, value in read_meta(folder).items() if name not in ("files", "sha256")}
    weights[TABLE] = weights[TABLE][:20].clone()
    publish(folder, {"model.safetensors": lambda path: save_file(weights, path)}, meta)
    start(config_of(other_data, base), tmp_path / "out")
    assert read_meta(tmp_path / "out" / "initial")["matches"]["new"] == {TABLE: "has 20 rows there for 48 pieces"}


def damaged(run: Path, folder: Path) -> Path:
    """A copy of a run with another last byte of its weights."""
    shutil.copytree(run, folder)
    file = folder / "averaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    return folder


def test_unreadable_initial_weights_give_one_line(data, other_data, run, tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "config.yaml").write_text("grid: {seeds: [1]}\n")
    for init, message in (
        (tmp_path / "none", "init: .*none is not a run: config.yaml is missing"),
        (tmp_path / "study", "init: .*study is not a run: run.json is missing"),
        (run / "checkpoints" / "step_00000009", "step_00000009/model.safetensors is missing; .*there are: 1, 2"),
        (damaged(run, tmp_path / "damaged"), "averaged is damaged"),
    ):
        with pytest.raises(UserError, match=message):
            run_training(config_of(data, init), tmp_path / "out")
        assert not checkpoint_folders(tmp_path / "out")
    with pytest.raises(UserError, match="no parameter of .* fits this model"):
        start(config_of(data, run, "model.d_model=32", "model.num_heads=4", "model.name=bilstm"), tmp_path / "bilstm")


@pytest.mark.slow
def test_a_vocabulary_that_moved_or_changed_is_refused_only_if_it_is_needed(data, other_data, run, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(run, base)
    text = (base / "config.yaml").read_text()
    for place, message in ((tmp_path / "gone", "gone is missing"), (other_data, "the vocabulary of .* must be")):
        (base / "config.yaml").write_text(text.replace(f"data: {data}", f"data: {place}"))
        start(config_of(data, base), tmp_path / "same")
        with pytest.raises(UserError, match=message):
            start(config_of(other_data, base), tmp_path / "new")


def test_weights_of_a_run_that_starts_are_checked_when_they_are_loaded(data, run, tmp_path):
    config = config_of(data, run)
    start(config, tmp_path)
    file = tmp_path / "initial" / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"initial is damaged \(model.safetensors .*\); run the training command again"):
        train(build_task(config), tmp_path)


def test_places_are_found_by_growing_a_vocabulary(data):
    config = make_config(
        data, "model.name=multi_granularity", "model.num_heads=4", "model.phrases={ngrams: [2], levels: [1], chunk_size: 2}"
    )
    sizes = {"num_pieces": 48, "num_labels": 5, "num_pos_tags": 3}
    places = vocabulary_places(build_task(config), sizes)
    assert (places[TABLE].kind, places[TABLE].dim) == ("num_pieces", 0)
    assert {place.kind for place in places.values()} == {"num_pieces", "num_labels"}
    linearized = vocabulary_places(build_task(make_config(data, "model.name=linearized_transformer")), sizes)
    assert linearized["encoder.brackets.weight"].kind == "num_labels", "two rows for each label"
    relations = make_config(data, "model.name=relation_transformer", "model.relations={label_head: pos_tag}")
    assert vocabulary_places(build_task(relations), sizes)["encoder.label_embedding.weight"].kind == "num_pos_tags"
