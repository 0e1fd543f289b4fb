"""Pretrained encoders below our models: their states are transformers' own, and gradients, checkpoints and messages are right."""

import json
import os
import shutil
from fnmatch import fnmatch

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from commands import run_here  # noqa: E402
from test_own_labels import WORDS, settings_of, toy_lines, write_files  # noqa: E402
from tiny_pretrained import FAMILIES, WIDTH, write_both, write_encoder  # noqa: E402
from toylabels import LABELLED_COLUMNS, NUM_PIECES, make_rows, write_labelled  # noqa: E402
from toyruns import gradient_and_kept  # noqa: E402

from treenet.config import TrainConfig  # noqa: E402
from treenet.config.models import PretrainedConfig  # noqa: E402
from treenet.evaluation.classify import classify_run  # noqa: E402
from treenet.evaluation.settings import ClassifySettings  # noqa: E402
from treenet.jobs.train_job import check_job  # noqa: E402
from treenet.jobs.train_run import run_training  # noqa: E402
from treenet.models.pretrained import PretrainedLeaves, load_pretrained  # noqa: E402
from treenet.models.pretrained_folder import pretrained_facts  # noqa: E402
from treenet.probing.inputs import encode_layers, num_layers  # noqa: E402
from treenet.runs.loading import load_model  # noqa: E402
from treenet.tasks.base import build_task  # noqa: E402
from treenet.training.optimizer import freeze_parameters  # noqa: E402
from treenet.training.ranks import Ranks  # noqa: E402
from treenet.training.trainer import Trainer  # noqa: E402
from treeproc.common.settings import UserError  # noqa: E402
from treeproc.shards.shard import SplitShards  # noqa: E402
from treeproc.shards.store import pieces_fingerprint, read_index  # noqa: E402
from treeproc.stages.preprocess import preprocess  # noqa: E402

pytestmark = pytest.mark.slow

# Lines of the data set (tests/pretrained_data.py) in which no piece crosses a border, and their places.
OWN = {"We do n't know": 0, "He knows her": 1, "😀 know us": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_both(tmp_path_factory.mktemp("bert"))


def config_of(made, **changes) -> TrainConfig:
    encoder, data = made
    model = {"name": "pretrained", "d_model": WIDTH, "d_ff": 24, "num_heads": 2, "num_encoder_layers": 1}
    values = {
        "data": data, "task": "classification", "model": model | {"pretrained": {"folder": encoder}} | changes.pop("model", {}),
        "classifier": {"supervision": "root", "pooling": "own"}, "max_steps": 4, "validate_every": 2, "checkpoint_every": 2,
        "average_checkpoints": 1, "optimizer": {"learning_rate": 0.01, "warmup_steps": 1}, "loggers": ["tensorboard"],
    }  # fmt: skip
    return TrainConfig.model_validate(values | changes)


def leaves_of(encoder, data) -> PretrainedLeaves:
    config = config_of((encoder, data))
    facts = pretrained_facts(config.model, data, read_index(data / "encoded"))
    leaves = PretrainedLeaves(facts["pretrained"], WIDTH).eval()
    load_pretrained(leaves, encoder)
    return leaves


# Of these, the first has a table of positions with another name, and the second needs its pooler.
@pytest.mark.parametrize("kind", [*FAMILIES, "roformer", "squeezebert"])
@torch.no_grad()
def test_states_are_those_of_transformers(tmp_path, kind):
    """One sentence of the batch is longer, and none is transformers' batch: padding and neighbours change nothing."""
    encoder, data = write_both(tmp_path, kind)
    leaves = leaves_of(encoder, data)
    shard = SplitShards(data / "encoded", "train")[0]
    states, first = leaves.encode(build_task(config_of((encoder, data))).open("train").batch(np.arange(4)))
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(encoder / "tokenizer.json"))
    for line, place in OWN.items():
        whole = tokenizer(line, return_tensors="pt", truncation=False, padding=False)
        wanted = model(input_ids=whole["input_ids"], attention_mask=torch.ones_like(whole["input_ids"])).last_hidden_state[0]
        count = len(shard.row(place)["leaves"]["piece"])
        assert len(wanted) == count + 2
        torch.testing.assert_close(states[place, :count], wanted[1:-1], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(first[place], wanted[0], atol=2e-5, rtol=1e-4)


def test_gradients_reach_what_is_trained_and_nothing_else(made):
    data = made[1]
    index = read_index(data / "encoded")
    batch = build_task(config_of(made)).open("train").batch(np.arange(4))
    frozen_below = ["encoder.embedding.pretrained.embeddings.*", "encoder.embedding.pretrained.encoder.layer.[01].*"]
    for patterns, moving in (
        ([], "embeddings.word"),
        (frozen_below, "encoder.layer.2"),
        (["encoder.embedding.pretrained.*"], None),
    ):
        config = config_of(made, freeze=patterns)
        task = build_task(config)
        torch.manual_seed(1)
        model = task.build_model(task.sizes(index)).train()
        freeze_parameters(config, model)
        logits = model(batch).examples
        torch.nn.functional.cross_entropy(logits, batch.labels).backward()
        for name, parameter in model.named_parameters():
            is_frozen = any(fnmatch(name, pattern) for pattern in patterns)
            assert (parameter.grad is None) == is_frozen, name
        below = [name for name, parameter in model.named_parameters() if parameter.grad is not None and ".pretrained." in name]
        assert bool(below) == (moving is not None) and (moving is None or any(moving in name for name in below))
        assert not (moving == "encoder.layer.2" and any("layer.0" in name or "layer.1." in name for name in below))
        # A frozen encoder has no dropout; one that is trained has.
        assert model.encoder.embedding.pretrained.training == (moving is not None)


def gradient_of(made, **changes) -> tuple[torch.Tensor, int]:
    """The gradient of a batch in training, and the bytes that its forward pass keeps for backward."""
    torch.manual_seed(1)
    trainer = Trainer(build_task(check_job(config_of(made, **changes)).config), Ranks(0, 1, torch.device("cpu")))
    return gradient_and_kept(trainer, trainer.micro_batches.rank_batch(trainer.plan.batch(0)))


@pytest.mark.parametrize("name", ["pretrained", "tree_transformer"])
def test_layers_of_the_encoder_are_computed_again_with_the_same_gradient(made, name, capfd, recwarn):
    """Also with both kinds of dropout, and with frozen layers below."""
    for freeze in ([], ["encoder.embedding.pretrained.embeddings.*", "encoder.embedding.pretrained.encoder.layer.0.*"]):
        (gradient, kept), (again, kept_less) = (
            gradient_of(made, model={"name": name}, freeze=freeze, checkpoint_activations=on) for on in (False, True)
        )
        assert torch.equal(gradient, again) and gradient.any() and kept_less < kept / 3
    once = "TF32 acceleration on top of oneDNN"  # PyTorch says it in whatever test comes first
    warned = [text for text in (str(one.message) for one in recwarn.list) if not text.startswith(once)]
    assert (capfd.readouterr().err, warned) == ("", [])


def test_an_encoder_whose_layers_cannot_be_computed_again_is_refused_unless_it_is_frozen(tmp_path):
    made = write_both(tmp_path, "squeezebert")
    with pytest.raises(UserError, match="^checkpoint_activations must be false: transformers cannot .* of squeezebert again$"):
        gradient_of(made, checkpoint_activations=True)
    gradient_of(made, checkpoint_activations=True, freeze=["encoder.embedding.pretrained.*"])


MODELS = {
    "pretrained": {"name": "pretrained"},
    "tree": {"name": "tree_transformer"},
    "tree_means": {"name": "tree_transformer", "tree": {"nodes": "labels_and_leaves"}},
    "tree_lstm": {"name": "tree_lstm"},
    "other_width": {"name": "transformer", "d_model": 8},
}


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    return write_both(tmp_path_factory.mktemp("binary"), tree={"binarize": "right"})


@pytest.mark.parametrize("case", MODELS)
def test_a_run_needs_its_encoder_only_when_it_begins(binary, tmp_path, case):
    """Training starts from the pretrained weights, and the trained model is loaded and scored without the folder."""
    encoder = shutil.copytree(binary[0], tmp_path / "encoder")
    config = config_of((encoder, binary[1]), model=MODELS[case])
    summary = run_training(config, tmp_path / "run")
    assert summary.finished
    shutil.rmtree(encoder)
    start, trained = (load_model(tmp_path / "run", untrained=untrained).model for untrained in (True, False))
    own = transformers.AutoModel.from_pretrained(binary[0]).state_dict()
    weights = start.encoder.embedding.pretrained.state_dict()
    assert weights and all(torch.equal(value, own[name]) for name, value in weights.items())
    moved = trained.encoder.embedding.pretrained.state_dict()
    assert any(not torch.equal(value, own[name]) for name, value in moved.items())
    batch = build_task(config).open("valid").batch(np.arange(4))
    assert trained(batch).examples.isfinite().all()


def test_a_resumed_run_is_the_uninterrupted_one(made, tmp_path):
    config = config_of(made, model={"name": "tree_transformer"})
    run_training(config, tmp_path / "whole")
    run_training(config.model_copy(update={"max_steps": 2}), tmp_path / "parts")
    run_training(config, tmp_path / "parts")
    whole, parts = (load_model(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def test_a_run_may_start_from_a_run_with_the_same_encoder(made, tmp_path):
    run_training(config_of(made, model={"name": "tree_transformer"}), tmp_path / "first")
    config = config_of(made, model={"name": "transformer", "num_encoder_layers": 2}, init=tmp_path / "first")
    run_training(config, tmp_path / "second")
    trained = load_model(tmp_path / "first").model.state_dict()
    start = load_model(tmp_path / "second", untrained=True).model.state_dict()
    taken = [name for name in start if ".pretrained." in name or name.startswith("head.")]
    assert len(taken) > 20 and all(torch.equal(start[name], trained[name]) for name in taken)


def test_a_run_with_another_encoder_or_other_pieces_is_no_start(made, tmp_path):
    """Its layers would stand above the table of this one."""
    run_training(config_of(made), tmp_path / "first")
    other = config_of(write_both(tmp_path, "roberta"), init=tmp_path / "first")
    with pytest.raises(UserError, match=r"another pretrained encoder \(bert instead of roberta\); leave init out"):
        run_training(other, tmp_path / "second")
    path = tmp_path / "first" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pieces_fingerprint": "0"}))
    with pytest.raises(UserError, match=r"has another pretrained encoder \(its pieces are others\)"):
        run_training(config_of(made, init=tmp_path / "first"), tmp_path / "second")


def test_probes_read_the_last_layer_and_the_vectors_of_pieces(made):
    config = config_of(made)
    task = build_task(config)
    model = task.build_model(task.sizes(read_index(made[1] / "encoded"))).eval()
    batch = task.open("train").batch(np.arange(4))
    found = encode_layers(model, batch, [0, num_layers(model)])
    torch.testing.assert_close(found[1], model.encoder.embedding.of_leaves(batch).detach())
    table, pieces = model.encoder.embedding.weight, batch.leaf_pieces[0, :3]
    torch.testing.assert_close(found[0][0, :3], table[pieces - 4])


def test_nodes_may_start_from_the_means_of_their_leaves(made):
    data = made[1]
    config = config_of(made, model=MODELS["tree_means"])
    task = build_task(config)
    model = task.build_model(task.sizes(read_index(data / "encoded"))).eval()
    batch = task.open("train").batch(np.arange(3))
    seen = []
    hook = model.encoder.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(batch)
        leaves = model.encoder.embedding.of_leaves(batch)
    hook.remove()
    count = leaves.shape[1]
    labels = model.encoder.embedding.scale * model.encoder.label_embedding(batch.node_labels)
    for row, node in ((0, 0), (0, 1), (2, 1)):
        start, end = int(batch.structure.start[row, node]), int(batch.structure.end[row, node])
        wanted = labels[row, node] + leaves[row, start:end].mean(0)
        torch.testing.assert_close(seen[0][row, count + node], wanted)


def damage_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def no_weights(folder):
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")


def other_tokenizer(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["zzz"] = tokenizer["model"]["vocab"].pop("know")
    path.write_text(json.dumps(tokenizer))


WRONG = {
    "no_weights": (no_weights, {}, "has no model.safetensors, and no other form of weights is read"),
    "no_config": (lambda folder: (folder / "config.json").unlink(), {}, "has no config.json; give the folder of a pretrained"),
    "decoder": (lambda folder: damage_config(folder, model_type="gpt2"), {}, "model of type gpt2, which is not an encoder"),
    "no_width": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "perceiver", "d_latents": 16, "num_blocks": 0}'),
        {},
        "a perceiver has no hidden_size; choose BERT",
    ),
    "few_pieces": (
        lambda folder: damage_config(folder, vocab_size=20),
        {},
        r"does not belong to .*pieces, and the encoder has 20",
    ),
    "tokenizer": (other_tokenizer, {}, "does not belong to .*: it has the pieces of another tokenizer; preprocess again with"),
    "width": (
        None,
        {"d_model": 32},
        "model.d_model must be 16, the width of the pretrained encoder, for model.name = pretrained",
    ),
    "heads": (None, {"name": "tree_transformer", "num_heads": 3}, r"d_model must be a multiple of 2 \* num_heads = 6"),
    "name": (None, {"name": "lightconv"}, "model.name must be one of"),
    "folder": (None, {"pretrained": {}}, "model.pretrained.folder must be the folder of a pretrained encoder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_line(made, tmp_path, case):
    damage, model, message = WRONG[case]
    encoder = shutil.copytree(made[0], tmp_path / "encoder")
    if damage:
        damage(encoder)
    with pytest.raises((UserError, ValueError), match=message) as caught:
        run_training(config_of((encoder, made[1]), model=model), tmp_path / "run")
    assert isinstance(caught.value, UserError) <= ("\n" not in str(caught.value))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("kind", ["fnet", "convbert", "funnel"])
def test_a_model_whose_states_change_with_padding_is_refused(tmp_path, kind):
    with pytest.raises(UserError, match="the states of a text change with the padding after it; choose BERT"):
        run_training(config_of(write_both(tmp_path, kind)), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_model_whose_states_of_padded_texts_are_no_numbers_is_refused(made, tmp_path, monkeypatch):
    def read(self, pieces, pad_mask, real=PretrainedLeaves.read):
        states, first = real(self, pieces, pad_mask)
        return states.masked_fill(pad_mask.any(1)[:, None, None], torch.nan), first

    monkeypatch.setattr(PretrainedLeaves, "read", read)
    with pytest.raises(UserError, match="the states of a text change with the padding after it"):
        run_training(config_of(made), tmp_path / "run")


def test_a_model_that_reads_no_later_pieces_is_refused(tmp_path):
    """XLM has checkpoints of both kinds, under one type of model."""
    with pytest.raises(UserError, match="the state of a piece does not change with the pieces after it; choose BERT"):
        run_training(config_of(write_both(tmp_path, "xlm")), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@torch.no_grad()
def test_long_texts_are_cut_where_the_table_of_positions_ends(tmp_path):
    leaves = leaves_of(*write_both(tmp_path, "roformer"))
    assert leaves.most_leaves == 38  # of 40 positions, two are of [CLS] and [SEP]


@torch.no_grad()
def test_big_bird_reads_a_long_text_before_a_short_one_as_after_it(tmp_path):
    leaves = leaves_of(*write_both(tmp_path, "big_bird"))
    pieces = torch.arange(4, 4 + leaves.most_leaves)[None]
    before, _, after = (leaves.read(pieces[:, :count], pieces[:, :count] < 0)[0] for count in (len(pieces[0]), 5, len(pieces[0])))
    assert torch.equal(before, after)


def test_a_data_set_of_other_pieces_is_refused(made, tmp_path):
    data = write_labelled(tmp_path / "data", {"train": make_rows(20), "valid": make_rows(5)})
    with pytest.raises(UserError, match=r"has its own pieces.*preprocess again with subwords\.tokenizer="):
        run_training(config_of((made[0], data)), tmp_path / "run")


def test_advice_about_binary_trees_leads_to_a_data_set_of_the_same_pieces(tmp_path):
    """Without the tokenizer in it, the second command would learn other pieces."""
    encoder, data = write_both(tmp_path, tree={"binarize": "none"})
    with pytest.raises(UserError, match="with tree.binarize=right and parsed set to its folder, and subwords") as raised:
        run_training(config_of((encoder, data), model={"name": "tree_lstm"}), tmp_path / "run")
    advised = str(raised.value).rpartition("and ")[2]
    arguments = (f"parsed={data}", "tree.binarize=right", advised, "workers=0")
    done = run_here("preprocess.py", "--out", tmp_path / "binary", *arguments)
    assert done.returncode == 0, done.stderr
    assert len({pieces_fingerprint(read_index(folder / "encoded")) for folder in (data, tmp_path / "binary")}) == 1
    assert run_training(config_of((encoder, tmp_path / "binary"), model={"name": "tree_lstm"}), tmp_path / "run").step == 4


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A data set with arcs, binary trees, classes and scores, as if its pieces were those of the tiny encoder beside it."""
    folder = tmp_path_factory.mktemp("toy")
    encoder = write_encoder(folder / "encoder")
    (encoder / "tokenizer.json").unlink()
    rows = make_rows(40)
    for number, row in enumerate(rows):
        row["score"] = 1.0 + number // 2 % 5
    facts = {"pieces": NUM_PIECES - 4, "unknown": 1, "before": [2], "after": [3]}
    splits = {"train": rows[:30], "valid": rows[30:]}
    for name, columns in (("classes", LABELLED_COLUMNS), ("scores", ("leaves", "nodes", "spans", "score", "arcs"))):
        write_labelled(folder / name, splits, columns=columns, tokenizer=facts)
    return encoder, folder


@pytest.mark.parametrize("pooling", ["own", "attention"])
@pytest.mark.parametrize("name", PretrainedConfig.architectures)
def test_every_model_above_a_pretrained_encoder_reads_an_example_alone_as_in_a_batch(toy, name, pooling):
    """Its gradients reach the lowest table of the pretrained encoder, also from pairs of sentences."""
    encoder, folder = toy
    for data, task_name in (("classes", "classification"), ("scores", "relatedness")):
        changes = {"classifier": {"supervision": "root", "pooling": pooling}, "optimizer": {"label_smoothing": 0.0}}
        config = config_of((encoder, folder / data), task=task_name, model={"name": name}, **changes)
        task = build_task(config)
        index = read_index(folder / data / "encoded")
        task.check(index)
        torch.manual_seed(2)
        model, source = task.build_model(task.sizes(index)).double().eval(), task.open("train")
        if pooling == "attention":
            torch.nn.init.normal_(model.query)
        alone, together = source.batch(np.arange(2, 4)), source.batch(np.arange(8))
        torch.testing.assert_close(model(alone).examples, model(together).examples[2:4])
        model(alone).examples.sum().backward()
        assert pooling == "own" or model.query.grad.abs().sum() > 0
        assert model.encoder.embedding.weight.grad.abs().sum() > 0


def test_relations_of_trees_stand_above_a_pretrained_encoder(toy):
    relations = {"sequence": {"clip": 2}, "tree_distance": {"clip": 3}, "decoder": False}
    config = config_of((toy[0], toy[1] / "classes"), model={"name": "relation_transformer", "relations": relations})
    task = build_task(config)
    model = task.build_model(task.sizes(read_index(toy[1] / "classes" / "encoded"))).eval()
    batch = task.open("train").batch(np.arange(5))
    assert batch.structure is not None and model(batch).examples.isfinite().all()


def test_raw_lines_get_the_classes_that_the_data_set_has(tmp_path):
    """`classify` cuts the lines with the tokenizer in the data set. It reads a longer line in windows."""
    encoder = write_encoder(tmp_path / "encoder", "roberta", positions=60)
    write_files(tmp_path)
    preprocess(settings_of(tmp_path, subwords={"tokenizer": encoder}), tmp_path / "data")
    config = config_of((encoder, tmp_path / "data"), model={"name": "tree_transformer"})
    run_training(config, tmp_path / "run")
    shutil.rmtree(encoder)
    name, _ = classify_run(tmp_path / "run", ClassifySettings(split="test"))
    rows = [line.split("\t") for line in (tmp_path / "run" / f"predictions.{name}.tsv").read_text().splitlines()[1:]]
    lines = [text for _, text in toy_lines(25, 200)]
    (tmp_path / "input").write_text("\n".join([*lines, "The dog was good. " * 20]) + "\n")
    files = f"input={tmp_path / 'input'}", f"output={tmp_path / 'output'}"
    done = run_here("classify.py", "--out", tmp_path / "run", *files)
    assert done.returncode == 0, done.stderr
    *found, last = (tmp_path / "output").read_text().split("\n")[:26]
    assert found == [sorted(WORDS)[int(row[2])] for row in rows]
    assert last in WORDS
